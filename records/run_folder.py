"""The run folder: whose it is, its records, and the console lines that mirror them."""

import errno
import fcntl
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import serried
from serried.configs.announce import duration
from serried.configs.errors import UserError
from serried.runtime.live import Doing, Live, is_terminal

PROFILES = "profile"
RECORDS = (
    "config.yaml", "environment.json", "metrics.jsonl", "lost.jsonl", "status.json", "report.html", "log",
    "checkpoints", "wandb", "tensorboard", PROFILES,
)  # fmt: skip
"""What a run leaves in its folder, and what is kept aside when another starts there."""

_CANNOT_LOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)


class RunFolder:
    """``run.dir``, claimed by one process at a time. Lives on rank 0 only."""

    def __init__(self, path: Path) -> None:
        """Make and claim the folder.

        Raises:
            UserError: it cannot be written, or another process is training there.
        """
        self.path = path
        self._metrics: IO[bytes] | None = None
        self._unwritten = b""
        self._failing: set[str] = set()
        self._earlier = read_status(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
        except OSError as error:
            raise UserError(f"cannot write the run folder {path}: {error.strerror}; use run.dir=FOLDER") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise UserError(
                f"another process is training in {path}; wait for it, or use run.name=OTHER or run.dir=FOLDER"
            ) from None
        except OSError as error:  # a disk that knows no locks: go on without
            if error.errno not in _CANNOT_LOCK:
                self._lock.close()
                raise UserError(f"cannot lock {path / '.lock'}: {error.strerror}; use run.dir=FOLDER") from None

    def holds_a_run(self) -> bool:
        """Whether an earlier run left more here than the log of a start that went no further."""
        return any((self.path / name).exists() for name in ("metrics.jsonl", "status.json", "checkpoints"))

    def earlier_end(self) -> str:
        """How the earlier run here ended, in words."""
        status = read_status(self.path)
        return f"{status['state']} at step {status['step']}" if status else "state unknown"

    def set_aside(self, names: Iterable[str]) -> Path:
        """Move ``names``, paths within this folder, into the next free ``earlier-N``. Returns that."""
        number = 1 + max((int(p.name[8:]) for p in self.path.glob("earlier-*") if p.name[8:].isdigit()), default=0)
        aside = self.path / f"earlier-{number}"
        aside.mkdir()
        for name in names:
            if (self.path / name).exists():
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                (self.path / name).rename(aside / name)
        return aside

    def begin(self, config_yaml: str, environment: dict[str, Any], step: int) -> None:
        """Write ``config.yaml`` and ``environment.json``, open ``metrics.jsonl``; ``step`` steps are done already.

        Lines of later steps than that, which a crash left, are moved to ``lost.jsonl``: these steps are trained again,
        and ``metrics.jsonl`` tells each once.
        """
        self._forget_after(step)
        _replace(self.path / "config.yaml", config_yaml)
        _replace(self.path / "environment.json", json.dumps(environment, indent=2) + "\n")
        self._metrics = (self.path / "metrics.jsonl").open("ab", buffering=0)
        self.status("running", step=step)

    def go_back(self, step: int) -> None:
        """Put the lines of steps after ``step`` aside: these steps are trained again."""
        self._unless_it_fails("metrics.jsonl", lambda: self._reopen_after(step))

    def _reopen_after(self, step: int) -> None:
        assert self._metrics is not None
        self._write()
        self._forget_after(step)
        reopened = (self.path / "metrics.jsonl").open("ab", buffering=0)
        self._metrics.close()
        self._metrics = reopened

    def _forget_after(self, step: int) -> None:
        try:
            text = (self.path / "metrics.jsonl").read_text(errors="replace")
        except FileNotFoundError:
            return
        kept: list[str] = []
        lost: list[str] = []
        for line in text.splitlines():
            (kept if _is_of(line, step) else lost).append(line + "\n")
        if lost:
            with (self.path / "lost.jsonl").open("a") as file:
                file.writelines(lost)
        if "".join(kept) != text:
            _replace(self.path / "metrics.jsonl", "".join(kept))

    def record(self, event: str, **values: Any) -> None:
        """Append one line of strict JSON to ``metrics.jsonl``; a number that JSON has no name for becomes null.

        Where the disk fails the line is kept, to be written with the next one: a full disk ends no run.
        """
        finite = {key: None if _non_finite(value) else value for key, value in values.items()}
        if any(_non_finite(value) for value in values.values()):
            finite["nonfinite"] = True
        line = json.dumps({"event": event, **finite, "time": round(time.time(), 3)}, allow_nan=False)
        self._unwritten += line.encode() + b"\n"
        self._unless_it_fails("metrics.jsonl", self._write)

    def _write(self) -> None:
        assert self._metrics is not None
        while self._unwritten:
            self._unwritten = self._unwritten[self._metrics.write(self._unwritten) or 0 :]

    def status(self, state: str, *, step: int, reason: str | None = None, exit_code: int | None = None) -> None:
        """Replace ``status.json``, unless the disk fails."""
        status = next_status(self._earlier, state, step=step, reason=reason, exit_code=exit_code)
        self._unless_it_fails("status.json", lambda: write_status(self.path, status))

    def _unless_it_fails(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if name not in self._failing:  # one line for as long as it lasts
                with suppress(OSError):
                    print(f"WARNING    cannot write {self.path / name}: {error.strerror}. Training goes on", flush=True)
            self._failing.add(name)
        else:
            self._failing.discard(name)

    def fail(self, step: int, reason: str, exit_code: int) -> None:
        """Record that the run ended at ``step``, if it had begun."""
        if self._metrics is not None:
            self.record("stop", step=step, state="failed", reason=reason)
            self.status("failed", step=step, reason=reason, exit_code=exit_code)

    def stop_early(self, step: int, reason: str, exit_code: int) -> None:
        """Record that the run ended at ``step`` and can go on from its newest checkpoint, or begin again.

        Also where it had not begun, so that whoever started it knows that it may start it again.
        """
        if self._metrics is not None:
            self.record("stop", step=step, state="stopped", reason=reason)
        elif self._earlier.get("state") == "finished":
            return
        else:
            step = self._earlier.get("step", step)
        self.status("stopped", step=step, reason=reason, exit_code=exit_code)

    @property
    def has_begun(self) -> bool:
        """Whether this start has records here of its own."""
        return self._metrics is not None

    def close(self) -> None:
        """Let go of the folder."""
        if self._metrics is not None:
            with suppress(OSError):
                self._write()
            self._metrics.close()
        self._lock.close()


def read_status(run_dir: Path) -> dict[str, Any]:
    """``status.json``; empty where there is none that can be read."""
    try:
        status = json.loads((run_dir / "status.json").read_text())
        return status if isinstance(status["state"], str) and isinstance(status["step"], int) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def next_status(
    earlier: dict[str, Any], state: str, *, step: int, reason: str | None, exit_code: int | None
) -> dict[str, Any]:
    """The status of a run in whose folder ``earlier`` was the status when it started.

    ``failures`` counts failures one after another, at the same step and for the same reason (numbers in it, such as
    ports, may differ); a step beyond that ends the series.
    """
    failures, failure = earlier.get("failures", 0), earlier.get("last_failure") or {}
    if state == "failed":
        same = (step, _without_numbers(reason)) == (failure.get("step"), _without_numbers(failure.get("reason")))
        failures, failure = failures + 1 if same else 1, {"step": step, "reason": reason}
    elif step > failure.get("step", step):
        failures, failure = 0, {}
    status = {"state": state, "step": step, "reason": reason, "exit_code": exit_code, "failures": failures}
    return {**status, "last_failure": failure} if failure else status


def _without_numbers(text: str | None) -> str:
    return re.sub(r"\d+", "N", text or "")


def write_status(run_dir: Path, status: dict[str, Any]) -> None:
    """Replace ``status.json`` whole, so that a reader never sees half of it."""
    _replace(run_dir / "status.json", json.dumps(status) + "\n")


def tell_end(run_dir: Path, state: str, *, step: int, reason: str, exit_code: int) -> None:
    """Have ``status.json`` say why this rank ended the run: rank 0 may be killed in a collective before it can."""
    now = read_status(run_dir)
    if now.get("state") == "running":
        write_status(run_dir, next_status(now, state, step=step, reason=reason, exit_code=exit_code))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def _is_of(line: str, step: int) -> bool:
    """Whether a line of ``metrics.jsonl`` is whole and tells of no later step; starts and stops are history."""
    try:
        event = json.loads(line)
        return event["event"] in ("start", "stop") or event["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


def _non_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def environment() -> dict[str, Any]:
    """Versions, hardware and the code's commit. No environment variables, so no secrets."""
    import torch

    root = Path(serried.__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            run = subprocess.run(
                ["git", "-C", root, *arguments], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return run.stdout.strip()

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "platform": platform.platform(),
        "working_directory": str(Path.cwd()),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "git_commit": git("rev-parse", "HEAD"),
        "git_changed_files": len(status.splitlines()) if (status := git("status", "--porcelain")) is not None else None,
    }


class Console:
    """Lines for the user from rank 0; every rank keeps its own in ``log/rank-N.log``, once that is opened."""

    def __init__(self, speaks: bool, rank: int) -> None:
        self._speaks, self._rank = speaks, rank
        self._live = Live(self.say, self._present, is_drawn=speaks and is_terminal())
        self._doing: Doing | None = None
        self._describe: Callable[[], Doing | None] = lambda: None
        self.last_step: dict[str, Any] | None = None
        """What was told of a step last; for the line that shows how the run stands."""
        self._log: IO[str] | None = None
        self._pending: list[str] | None = []

    def open(self, run_folder: Path) -> None:
        """Write the log to ``run_folder`` from here on, and what was said before: an earlier run's is aside by now."""
        with suppress(OSError):  # a node that cannot write there still trains; what matters is printed by rank 0
            path = run_folder / "log" / f"rank-{self._rank}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = path.open("a", buffering=1)
            self._log.writelines(self._pending or [])
        self._pending = None

    def say(self, text: str) -> None:
        """Print ``text``, if this rank speaks, and log it."""
        if self._speaks:
            # It may lead into a file on a full disk; Python keeps what is left for later.
            with suppress(OSError), self._live.aside():
                print(text, file=sys.stdout, flush=True)
        self.log(text)

    def progress(self, text: str) -> None:
        """Say how far something is: on a terminal over what was said before, which an empty ``text`` takes away."""
        if not self._speaks:
            return
        if is_terminal():
            self._live.show(text)
        elif text:
            with suppress(OSError), self._live.aside():
                print(text, flush=True)

    def doing(self, what: str, kind: str = "") -> None:
        """Say what is done from here on: shown on a terminal, told elsewhere where it takes long. Another ``what`` of
        the same ``kind`` is one thing going on."""
        self._doing = Doing(what, kind or what)
        self._live.start()

    def follow(self, describe: Callable[[], Doing | None]) -> None:
        """As ``doing``, of whatever ``describe`` says, asked from another thread; None: what ``doing`` said."""
        self._describe = describe
        self._live.start()

    def _present(self) -> Doing | None:
        return self._describe() or self._doing

    def quiet(self) -> None:
        """From here on say and log, and show nothing besides."""
        self._live.close()

    def log(self, text: str) -> None:
        """Write ``text`` to this rank's log alone."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ")
        lines = "".join(f"{stamp}{line}\n" for line in text.splitlines())
        if self._pending is not None:
            self._pending.append(lines)
        elif self._log is not None:
            with suppress(OSError):  # the disk is full: the log is not what the run is for
                self._log.write(lines)

    def close(self) -> None:
        """Leave a clean terminal behind, and let go of the log."""
        self._live.close()
        if self._log is not None:
            with suppress(OSError):  # what a full disk did not take is tried again here
                self._log.close()
            self._log = None


def step_line(values: dict[str, Any], steps: int, ranks: int) -> str:
    """The line of one step; one that was skipped between two log lines has no rates."""
    parts = [
        f"step {values['step']:>{len(str(steps))}}/{steps}",
        f"loss {values['loss']:.4f}",
        f"grad {values['grad_norm']:.2f}",
        f"lr {values['lr']:.1e}",
    ]
    rate = values["tokens_per_second"]
    if rate is not None:
        each = f" ({short(values['tokens_per_second_per_device'])}/rank)" if ranks > 1 else ""
        parts.append(f"tok/s {short(rate)}{each}")
    if values["mfu"] is not None:
        parts.append(f"mfu {values['mfu']:.1%}")
    if values["scale"] is not None:
        parts.append(f"scale {values['scale']:g}")
    if rate is not None:
        parts += [
            f"mem {size(values['memory_bytes'])}",
            f"data {values['data_seconds'] / values['step_seconds']:.1%}",
            f"eta {duration(values['eta_seconds'])}",
        ]
    if values["skipped"]:
        is_finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        parts.append(f"SKIPPED: {'a spike' if is_finite else 'not finite'}, nothing changed")
    return "  ".join(parts)


def short(number: float) -> str:
    """1234567 -> 1.2M."""
    for limit, divisor, suffix in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "B")):
        if number < limit:
            return f"{number / divisor:.1f}{suffix}" if suffix else f"{number:.0f}"
    return f"{number / 1e12:.1f}T"


def size(number_bytes: float) -> str:
    """Bytes -> 1.5GiB."""
    for limit, divisor, unit in ((2**20, 2**10, "KiB"), (2**30, 2**20, "MiB"), (2**40, 2**30, "GiB")):
        if number_bytes < limit:
            return f"{number_bytes / divisor:.1f}{unit}"
    return f"{number_bytes / 2**40:.2f}TiB"
