"""Generations of a run that continues after losses: the sets of ranks that trained it, one file each.

A generation is claimed by creating its file, which one process can do. Two halves of a cluster that have lost each
other both try to claim the next generation, and the one that comes second must end.
"""

import json
import os
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from serried.configs.plain_data import parse_json, read_regular

RECOVERY = "recovery"
"""Folder of the files, in the run folder."""
_NAME = re.compile(r"generation-([0-9]{4,9})\.json", re.ASCII)


def claim(run_dir: Path, number: int, content: Mapping[str, Any]) -> bool:
    """Create the file of generation ``number`` with ``content``, unless it exists. Returns whether this call did so.

    The file appears with all of its content, also on NFS.
    """
    folder = run_dir / RECOVERY
    folder.mkdir(exist_ok=True)
    draft = folder / f".{uuid.uuid4().hex}"
    draft.write_text(json.dumps({"generation": number, **content}) + "\n", "utf-8")
    try:
        os.link(draft, _path(run_dir, number))
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):
            draft.unlink()
    return True


def read_generation(run_dir: Path, number: int) -> dict[str, Any] | None:
    """Return the content of generation ``number``; None if nobody has claimed it."""
    try:
        found = parse_json(read_regular(_path(run_dir, number)))
    except FileNotFoundError:
        return None
    return found if isinstance(found, dict) else None


def newest_generation(run_dir: Path) -> int:
    """Return the number of the newest claimed generation; 0 if there is none, or the disk does not respond."""
    with suppress(OSError):
        names = os.listdir(run_dir / RECOVERY)  # noqa: PTH208 -- entries are not opened
        return max((int(found[1]) for found in map(_NAME.fullmatch, names) if found), default=0)
    return 0


def _path(run_dir: Path, number: int) -> Path:
    return run_dir / RECOVERY / f"generation-{number:04}.json"
