"""Run folder: its ownership, and the records that the run writes there."""

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData, open_regular, read_if_there, value_at
from serried.configs.schema.fields import SCRATCH
from serried.records.files import write_atomically
from serried.records.generations import RECOVERY
from serried.records.goodput import Goodput, goodput_of
from serried.records.head import Head
from serried.records.lock import LOCK, is_same_file, lock_folder, replace_lock
from serried.records.metrics import LOST_METRICS, METRICS, parse_event
from serried.records.status import STATUS, Members, Status, read_status, write_status

PROFILES = "profile"
IMAGES = "images"
RECORDS = (
    "config.yaml", "environment.json", METRICS, LOST_METRICS, STATUS, "report.html", "log", "checkpoints", "wandb",
    "tensorboard", PROFILES, IMAGES, RECOVERY,
)  # fmt: skip
"""Files and folders of a run. They are moved aside when another run starts in the same folder."""

_HISTORY = ("start", "lost", "recovered", "joined", "stop")
"""Events of the processes that trained, whose steps may be trained again."""
_UNFINISHED = ".partial"
_READ_AT_THE_END_BYTES = 64 * 2**20
"""Maximum size of ``metrics.jsonl`` that is read when a run ends, which takes about 3 s."""


class RunFolder:
    """``run.dir``, locked by at most one process. Only rank 0 has an instance."""

    def __init__(self, path: Path, url: str | None = None, *, takes_over: bool = False) -> None:
        """Create and lock the folder.

        Args:
            url: The run in a bucket for which it is a scratch folder, for messages.
            takes_over: Whether the process that locked it is lost. It may be frozen, and must not write later.

        Raises ``UserError`` if it cannot be written, contains unsafe links, or another process is training there.
        """
        self.path = path
        self.another_disk = "run.dir=FOLDER" if url is None else f"{SCRATCH}=FOLDER"
        """Setting that chooses another disk, for messages."""
        self._metrics: IO[bytes] | None = None
        self._unwritten = b""
        self._failing: set[str] = set()
        refuse_links(path)
        self._made = [made for made in (path / LOCK, path) if not made.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            # A disk without file locks does not tell whether the lost process is only frozen on another node.
            self._lock = replace_lock(path) if takes_over else lock_folder(path)
            for unfinished in path.glob(f".earlier-*{_UNFINISHED}"):
                self._finish(unfinished)
        except BlockingIOError:
            raise UserError(
                f"another process is training in {url or path}; wait for it, or use run.name=OTHER or run.dir=FOLDER"
            ) from None
        except OSError as error:
            raise UserError(f"cannot write the run folder {path}: {error.strerror}; use {self.another_disk}") from None
        self._earlier = read_status(path)
        self.earlier_seconds = 0.0
        """Wall-clock time of the run that ``set_run_aside`` moved."""
        self.head: Head | None = None
        """Claim on the run in a bucket, for which this is a scratch folder; None for a run in a folder."""
        self.members: Members | None = None
        """Replicas that train now, for ``status.json``. None if the run does not continue after losses."""
        self.upload: Callable[[], None] = lambda: None
        """Upload the metrics and the status to the bucket, if there is one. Raises ``StoreError``."""

    def join(self, head: Head, upload: Callable[[], None]) -> None:
        """Make this the scratch folder of a run in a bucket, whose records were just downloaded into it."""
        self.head, self.upload = head, upload
        self._earlier = read_status(self.path)

    @property
    def warning(self) -> str | None:
        """Warning of the lock; see ``FolderLock``."""
        return self._lock.warning

    @property
    def is_ours(self) -> bool:
        """Whether the locked folder still exists and was not removed, renamed or replaced, and no other process has
        taken over the run in the bucket."""
        return is_same_file(self.path / LOCK, self._lock) and (self.head is None or self.head.is_ours)

    @property
    def has_begun(self) -> bool:
        """Whether this start has written records here."""
        return self._metrics is not None

    @property
    def has_new_status(self) -> bool:
        """Whether the status differs from what it was when the folder was claimed."""
        return read_status(self.path) != self._earlier

    def holds_a_run(self) -> bool:
        """Return whether an earlier run left more files here than the log of a start that ended at once."""
        has_records = any((self.path / name).exists() for name in (METRICS, STATUS))
        return has_records or any((self.path / "checkpoints").glob("*"))

    def earlier_end(self) -> str:
        """Return how the earlier run here ended, in words."""
        status = read_status(self.path)
        return f"{status.state} at step {status.step}" if status else "state unknown"

    def set_run_aside(self) -> Path:
        """Move an earlier run's records into the next free ``earlier-N``. Return that folder.

        A start that is killed during the move leaves a hidden folder, and the next start moves the rest.
        """
        aside = self._next_aside()
        unfinished = aside.with_name(f".{aside.name}{_UNFINISHED}")
        unfinished.mkdir()
        self._finish(unfinished)
        self.earlier_seconds = goodput_of(aside).total_seconds
        return aside

    def _finish(self, unfinished: Path) -> None:
        self._move(RECORDS, unfinished)
        unfinished.rename(self.path / unfinished.name[1:].removesuffix(_UNFINISHED))

    def set_aside(self, names: Iterable[str]) -> Path:
        """Move ``names``, paths within this folder, into the next free ``earlier-N``. Return that folder."""
        aside = self._next_aside()
        aside.mkdir()
        self._move(names, aside)
        return aside

    def _next_aside(self) -> Path:
        number = 1 + max((int(p.name[8:]) for p in self.path.glob("earlier-*") if p.name[8:].isdigit()), default=0)
        return self.path / f"earlier-{number}"

    def _move(self, names: Iterable[str], aside: Path) -> None:
        for name in names:
            if (self.path / name).exists():
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                (self.path / name).rename(aside / name)

    def begin(self, config_yaml: str, environment: dict[str, Any], step: int) -> None:
        """Write ``config.yaml`` and ``environment.json`` and open ``metrics.jsonl``; ``step`` steps are already
        done.

        Lines of later steps, which a crash left, are moved to ``lost.jsonl``. These steps are trained again, so
        that ``metrics.jsonl`` has each step once.

        Raises:
            OSError: the disk fails.
            UserError: ``metrics.jsonl`` is a pipe or a device.
        """
        self._forget_after(step)
        write_atomically(self.path / "config.yaml", config_yaml)
        write_atomically(self.path / "environment.json", json.dumps(environment, indent=2) + "\n")
        self._metrics = (self.path / METRICS).open("ab", buffering=0)
        self.status("running", step=step)

    def continue_records(self, step: int) -> None:
        """Append to the records of this run, whose earlier writer is lost, after ``step``.

        Raises:
            OSError: the disk fails.
        """
        self._forget_after(step)
        # Lines that the lost process writes later, if it was only frozen, belong to no file.
        if (self.path / METRICS).exists():
            write_atomically(self.path / METRICS, (self.path / METRICS).read_bytes())
        self._metrics = (self.path / METRICS).open("ab", buffering=0)
        self.status("running", step=step)

    def go_back(self, step: int) -> None:
        """Move the lines of steps after ``step`` aside, since these steps are trained again."""
        self._unless_it_fails(METRICS, lambda: self._reopen_after(step))

    def _reopen_after(self, step: int) -> None:
        assert self._metrics is not None
        self._write()
        self._forget_after(step)
        reopened = (self.path / METRICS).open("ab", buffering=0)
        self._metrics.close()
        self._metrics = reopened

    def _forget_after(self, step: int) -> None:
        try:
            with open_regular(self.path / METRICS) as file:
                text = file.read()
        except FileNotFoundError:
            return
        except NotPlainData as error:
            raise UserError(f"{error}; remove it, or use run.dir=FOLDER") from None
        kept: list[bytes] = []
        lost: list[bytes] = []
        for line in text.splitlines():
            (kept if _is_of(line, step) else lost).append(line + b"\n")
        if lost:
            with (self.path / LOST_METRICS).open("ab") as aside:
                aside.writelines(lost)
        if b"".join(kept) != text:
            write_atomically(self.path / METRICS, b"".join(kept))

    def record(self, event: str, **values: Any) -> None:
        """Append one line of strict JSON to ``metrics.jsonl``. Numbers that JSON cannot represent become null.

        If the disk fails, the line is kept and written with the next one: a full disk does not end the run.
        """
        finite = {key: None if _non_finite(value) else value for key, value in values.items()}
        if any(_non_finite(value) for value in values.values()):
            finite["nonfinite"] = True
        line = json.dumps({"event": event, **finite, "time": round(time.time(), 3)}, allow_nan=False)
        self._unwritten += line.encode() + b"\n"
        self._unless_it_fails(METRICS, self._write)

    def record_stop(self, step: int, state: str, reason: str) -> Goodput | None:
        """Append the event ``stop`` to ``metrics.jsonl``, with the goodput of the run. Return the goodput; None if
        reading all records would take long, since little time may be left."""
        found = None
        with suppress(OSError):
            if (self.path / METRICS).stat().st_size <= _READ_AT_THE_END_BYTES:
                found = goodput_of(self.path, {"event": "stop", "step": step, "time": time.time()})
        seconds = None if found is None else {name: round(value, 3) for name, value in found.seconds.items()}
        self.record("stop", step=step, state=state, reason=reason, goodput=seconds)
        return found

    def add_images(self, name: str, step: int, contents: Iterable[bytes]) -> list[str]:
        """Write PNG images of the series ``name``. Returns their paths within the folder. A full disk ends no run.

        Raises:
            ValueError: One of them is not PNG.
        """
        contents, paths = list(contents), []
        if not all(is_png(content) for content in contents):
            raise ValueError(f"an image of {name} is not PNG")
        series = re.sub(r"[^\w.-]", "_", name).lstrip(".") or "_"
        for number, content in enumerate(contents):
            path = f"{IMAGES}/step-{step:08}/{series}-{number}.png"

            def write(path: str = path, content: bytes = content) -> None:
                (self.path / path).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path / path, content, survives_power_loss=False)

            self._unless_it_fails(path, write)
            paths.append(path)
        return paths

    def _write(self) -> None:
        assert self._metrics is not None
        while self._unwritten:
            self._unwritten = self._unwritten[self._metrics.write(self._unwritten) or 0 :]

    def status(self, state: str, *, step: int, reason: str | None = None, exit_code: int | None = None) -> None:
        """Replace ``status.json``, unless the disk fails or the folder now belongs to another run."""
        if self.is_ours:
            status = Status(state, step, reason, exit_code, self.members)
            self._unless_it_fails(STATUS, lambda: write_status(self.path, status))

    def _unless_it_fails(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if name not in self._failing:  # one warning until the next success
                with suppress(OSError, ValueError):
                    print(
                        f"WARNING    cannot write {self.path / name}: {error.strerror}. Training continues", flush=True
                    )
            self._failing.add(name)
        else:
            self._failing.discard(name)

    def fail(self, step: int, reason: str, exit_code: int) -> None:
        """Record that the run failed at ``step``, if it had started."""
        if self._metrics is not None:
            self.status("failed", step=step, reason=reason, exit_code=exit_code)
            self.record_stop(step, "failed", reason)

    def stop_early(self, step: int, reason: str, exit_code: int) -> None:
        """Record that the run ended at ``step`` and can be resumed from its newest checkpoint, or started again.

        Also recorded if the run had not started, so that its launcher may start it again.
        """
        if self._metrics is not None:
            self.record_stop(step, "stopped", reason)
        elif self._earlier is not None:
            if self._earlier.state == "finished":
                return
            step = self._earlier.step
        self.status("stopped", step=step, reason=reason, exit_code=exit_code)

    def close(self) -> None:
        """Release the folder. A command that was refused leaves nothing behind."""
        if self._metrics is not None:
            with suppress(OSError):
                self._write()
            self._metrics.close()
        elif self._made and self.is_ours:
            with suppress(OSError):
                for made in self._made:
                    made.rmdir() if made == self.path else made.unlink()
        self._lock.close()


def place_of(folder: Path) -> str:
    """Return the run folder as the user gave it: the URL of a run in a bucket if ``folder`` is its scratch folder or a
    copy of it, else ``folder``."""
    return shown_place(folder, value_at("run.dir", read_if_there(folder / "config.yaml")))


def shown_place(folder: Path, given: object) -> str:
    """Return ``given``, the ``run.dir`` of the run in ``folder``, if it is the URL of a bucket, else ``folder``."""
    return str(given) if is_bucket_url(given) else str(folder)


def refuse_links(path: Path) -> None:
    """Refuse links among files that are appended to and folders that files are moved into. A folder from another person
    may contain links to any file of the user. Other files are always replaced, not written through."""
    written = [path / name for name in (LOCK, METRICS, LOST_METRICS, "log", "output", IMAGES)]
    found: list[Path] = []
    with suppress(OSError):  # such as a name that is too long: the code that creates the folder reports it
        for pattern in ("log/*", ".tracker-*.lock", f".earlier-*{_UNFINISHED}"):
            found += path.glob(pattern)
    for link in written + found:
        if os.path.islink(link):  # noqa: PTH114 -- Path.is_symlink raises
            raise UserError(
                f"{link} is a link to {link.readlink()}, but a run writes only inside its own folder; remove the link, "
                "or use run.dir=FOLDER"
            )


def _is_of(line: bytes, step: int) -> bool:
    """Return whether a line of ``metrics.jsonl`` is complete and not of a later step. Events in ``_HISTORY`` are always
    kept."""
    event = parse_event(line)
    return event is not None and (event["event"] in _HISTORY or event.get("step", step + 1) <= step)


def is_png(content: bytes) -> bool:
    """Return whether ``content`` starts with the PNG signature."""
    return content.startswith(b"\x89PNG\r\n\x1a\n")


def _non_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
