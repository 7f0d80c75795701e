"""A run folder written as training writes it, and what the trackers have of it."""

import json
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from serried.configs.compose import compose, config_yaml
from serried.records.run_folder import RunFolder
from serried.records.trackers.tracker_processes import Trackers
from testing.disturb import family, is_alive, parent
from testing.runs import tiny_overrides

PATIENCE_SECONDS = 400.0


class Records:
    """Writes a run folder as the trainer does, with tracker processes beside it and nothing trained."""

    def __init__(self, text: Path, run_dir: Path, *argv: str, step: int = 0, is_tracked: bool = True) -> None:
        config = compose(tiny_overrides(text, run_dir, *argv))
        self.folder = RunFolder(run_dir)
        self.folder.begin(config_yaml(config), {"torch": "2", "working_directory": str(Path.cwd())}, step)
        self.folder.record(
            "start", world_size=1, mesh={"replicate": 1, "shard": 1}, parameters=7, resumed_from=step or None,
            tracker_run_id="abcd1234",
        )  # fmt: skip
        self._run_dir, self.printed = run_dir, list[str]()
        self.trackers = Trackers(run_dir, config.track, self.printed.append)
        if is_tracked:
            self.trackers.start(niceness=0)

    def steps(self, first: int, last: int, loss: float = 1.0) -> None:
        """Record steps, and an evaluation after the last."""
        for step in range(first, last + 1):
            self.folder.record(
                "step", step=step, loss=loss + 1 / step, lr=1e-3, tokens_per_second=1280.0, mfu=None, skipped=False,
                source_tokens={"web": step}, **{"accuracy": 0.25, "top@5": 0.5},
            )  # fmt: skip
        self.folder.record("eval", step=last, set="validation", loss=loss, accuracy=0.75)

    def go_back(self, step: int, from_step: int) -> None:
        self.folder.go_back(step)
        self.folder.record("rollback", step=step, from_step=from_step, samples=0, left_out=0, reason="a spike")

    def warnings(self) -> list[str]:
        return [line for line in self.printed if line.startswith("WARNING")]

    def end(self, state: str = "finished") -> None:
        """End the run, and wait until its tracker processes have ended."""
        self.folder.record("stop", step=9, state=state, reason="all steps done")
        self.trackers.end(PATIENCE_SECONDS)
        self.folder.close()
        await_trackers(self._run_dir)


def trackers(run_dir: Path, name: str = "") -> list[int]:
    """Return the tracker processes of the run in ``run_dir``."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            words = (path / "cmdline").read_text(errors="replace").split("\0") if path.name.isdigit() else []
        except OSError:
            continue
        if "serried.records.trackers" in words and str(run_dir) in words and (name in words or not name):
            found.append(int(path.name))
    # A child that has not started its own program yet shows the words of its parent.
    return [pid for pid in found if parent(pid) not in found]


def started_tracker(run_dir: Path) -> int:
    """Return the tracker process of a run with one tracker. A process that has just started has no words yet."""
    (tracker,) = wait_for(lambda: trackers(run_dir))
    return int(tracker)


def await_trackers(run_dir: Path) -> None:
    """Wait until the tracker processes of a run and all their children have ended."""
    seen: set[int] = set()

    def have_ended() -> bool:
        seen.update(pid for tracker in trackers(run_dir) for pid in family(tracker))
        return not any(map(is_alive, seen))

    wait_for(have_ended)


def wait_for(condition: Callable[[], Any]) -> Any:
    """Wait until ``condition`` is true; return what it returned."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return result


def scalars(run_dir: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    """Return the points that TensorBoard shows; none if it does not know the tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # a second to import

    if not list(run_dir.glob("tensorboard/*")):
        return []
    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)] if tag in found.Tags()["scalars"] else []


def wandb_run(run_dir: Path) -> dict[str, Any]:
    """Return history, config and summary of the one .wandb file in ``run_dir``."""
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
    """Yield the records of a .wandb file: LevelDB's log format after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2  # a second to import

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
