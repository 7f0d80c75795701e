"""A run folder that is written as training writes it, what trackers have of it, and whether their processes live."""

import json
import os
import signal
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from benchmarks.disturb import family, send
from serried.configs.compose import compose, config_yaml
from serried.records.run_folder import RunFolder
from serried.records.trackers.processes import Mirrors
from serried.runtime.console import Console
from tests.runs import tiny_overrides

PATIENCE_SECONDS = 400.0
"""Longer than a mirror may live without its run."""


class Records:
    """Writes a run folder as the trainer does, with mirrors beside it and nothing trained."""

    def __init__(
        self,
        text: Path,
        run_dir: Path,
        *argv: str,
        identity: str = "abcd1234",
        step: int = 0,
        niceness: int = 0,
        working_directory: Path | None = None,
    ) -> None:
        """``niceness`` of the mirrors: nothing is trained here, and other tests need not be spared."""
        config = compose(tiny_overrides(text, run_dir, *argv))
        self.folder = RunFolder(run_dir)
        environment = {"torch": "2", "working_directory": str(working_directory or Path.cwd())}
        self.folder.begin(config_yaml(config), environment, step)
        self.folder.record(
            "start", world_size=1, mesh={"replicate": 1, "shard": 1}, parameters=7, resumed_from=step or None,
            tracker_run_id=identity,
        )  # fmt: skip
        self._run_dir = run_dir
        self.mirrors = Mirrors(run_dir, config.track, Console(True, 0))
        self.mirrors.start(niceness, working_directory)

    def steps(self, first: int, last: int, loss: float = 1.0) -> None:
        """Tell of steps, the last of them evaluated."""
        for step in range(first, last + 1):
            self.folder.record(
                "step", step=step, loss=loss + 1 / step, grad_norm=0.5, lr=1e-3, samples=4 * step, tokens=128 * step,
                step_seconds=0.1, tokens_per_second=1280.0, mfu=None, skipped=False, scale=None,
                source_tokens={"web": step},
            )  # fmt: skip
        self.folder.record("eval", step=last, set="validation", loss=loss, tokens=64)
        self.mirrors.look()

    def go_back(self, step: int, from_step: int) -> None:
        self.folder.go_back(step)
        self.folder.record("rollback", step=step, from_step=from_step, samples=0, left_out=0, reason="a spike")

    def look(self) -> bool:
        self.mirrors.look()
        return False

    def end(self, state: str = "finished") -> None:
        """End the run, and wait until its mirrors have ended too."""
        self.folder.record("stop", step=9, state=state, reason="all steps done")
        self.mirrors.end()
        self.folder.close()
        await_mirrors(self._run_dir)

    def die(self) -> None:
        """As if all were killed: the mirrors too, in the middle of whatever they do."""
        for pid in mirrors(self._run_dir):
            for each in family(pid):
                send(each, signal.SIGKILL)
        self.mirrors.end()
        self.folder.close()
        await_mirrors(self._run_dir)


def mirrors(run_dir: Path) -> list[int]:
    """Processes that mirror the run in ``run_dir``."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            words = (path / "cmdline").read_bytes().split(b"\0") if path.name.isdigit() else []
        except OSError:
            continue
        if any(word.endswith(b"serried.records.trackers") for word in words) and os.fsencode(run_dir) in words:
            found.append(int(path.name))
    return found


def await_mirrors(run_dir: Path) -> None:
    """Wait until the mirrors of a run have ended. One that begins again has no command line for a moment."""
    seen: set[int] = set()

    def have_ended() -> bool:
        seen.update(mirrors(run_dir))
        return not any(_is_alive(pid) for pid in seen)

    wait_for(have_ended)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], Any]) -> Any:
    """Wait until ``condition`` is true; returns what it returned."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return result


def scalars(run_dir: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    """Points that TensorBoard shows."""
    return [(event.step, event.value) for event in accumulator(run_dir).Scalars(tag)]


def accumulator(run_dir: Path) -> EventAccumulator:
    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return found.Reload()


def wandb_run(run_dir: Path) -> dict[str, Any]:
    """History, config and summary of the one .wandb file in ``run_dir``."""
    (path,) = (run_dir / "wandb").glob("*run-*/*.wandb")
    found: dict[str, Any] = {"history": [], "config": {}, "summary": {}, "folder": path.parent}
    for record in _records(path.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            found["history"].append(_values(record.history.item))
        elif kind == "summary":
            found["summary"] |= _values(record.summary.update)
        elif kind == "exit":
            found["exit_code"] = record.exit.exit_code
        elif kind == "run":
            found |= {"id": record.run.run_id, "group": record.run.run_group, "tags": list(record.run.tags)}
            found |= {"name": record.run.display_name, "notes": record.run.notes, "project": record.run.project}
            found["config"] |= _values(record.run.config.update)
        elif kind == "metric":
            found.setdefault("axes", set()).add(
                (record.metric.glob_name or record.metric.name, record.metric.step_metric)
            )
    return found


def _values(items: Any) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[Any]:
    """Records of a .wandb file: LevelDB's log format behind a header of seven bytes. The client has no reader."""
    assert data[:4] == b":W&B"
    at, part = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # no header begins there
            at += left
            continue
        checksum, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            return
        chunk = data[at + 7 : at + 7 + length]
        assert checksum == zlib.crc32(bytes([kind]) + chunk)
        at, part = at + 7 + length, part + chunk
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record
