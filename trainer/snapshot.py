"""Snapshot of a GPU's memory with the stack of each allocation, as JSON."""

import gzip
import json
from contextlib import suppress
from pathlib import Path

import torch

_HISTORY_EVENTS = 100_000
_COMPRESSION = 3


def record_history() -> None:
    """Make the GPU's allocator record the stack of each allocation from now on, about 2 microseconds each."""
    # Private, and there is no public name for it: torch's documentation of memory snapshots uses these two names.
    # tests/test_profile.py guards them.
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=_HISTORY_EVENTS)


def write_snapshot(path: Path, device: torch.device) -> None:
    """Write what ``device`` (a GPU) holds, and the history of allocations if it was recorded.

    torch's own dump is a pickle, which nothing here writes; this is the same dictionary, and
    docs/performance.md has the command that makes of it what pytorch.org/memory_viz reads.

    Raises:
        OSError: the disk fails.
    """
    snapshot = torch.cuda.memory._snapshot(device)  # private: see record_history
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with gzip.open(temporary, "wt", compresslevel=_COMPRESSION, encoding="utf-8") as file:
            json.dump(snapshot, file, default=str)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
