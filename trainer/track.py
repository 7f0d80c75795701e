"""The run folder: whose it is, its records, and the console lines that mirror them."""

import fcntl
import json
import math
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import yaml

from configs.errors import EXIT_FAILED, EXIT_MISTAKE, UserError

RECORDS = ("config.yaml", "environment.json", "metrics.jsonl", "status.json", "log", "model")
"""What a run leaves in its folder, and what is kept aside when another starts there."""


class RunFolder:
    """``run.dir``, claimed by one process at a time. Lives on rank 0 only."""

    def __init__(self, path: Path) -> None:
        """Make and claim the folder.

        Raises:
            UserError: it cannot be written, or another process is training there.
        """
        self.path = path
        self.is_finished = False
        self._metrics: IO[str] | None = None
        self._aside: Path | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
        except OSError as error:
            raise UserError(f"cannot write the run folder {path}: {error.strerror}; use run.dir=FOLDER") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is training in {path}; wait for it, or use run.name=OTHER or run.dir=FOLDER"
            ) from None

    def settle(self, config_yaml: str, *, anew: bool) -> str | None:
        """Decide what becomes of an earlier run here. Returns what to tell the user, if anything.

        A finished run is left alone unless ``anew`` (then ``is_finished`` is set); any other's records are moved into
        ``earlier-N``, never written over.

        Raises:
            UserError: the finished run had other settings.
        """
        if not any((self.path / name).exists() for name in ("metrics.jsonl", "status.json", "model")):
            return None  # at most the log of a start that went no further
        status = self._earlier_status()
        if status.get("state") == "finished" and not anew:
            changed = _differences(self._earlier_config(), config_yaml)
            if changed:
                raise UserError(
                    f"{self.path} holds a finished run with other settings ({'; '.join(changed)}); "
                    f"use run.name=OTHER to keep both, or checkpoint.resume=never to start anew here"
                )
            self.is_finished = True
            return (
                f"{self.path} is finished: {status.get('step')} steps, the model is in {self.path / 'model'}. "
                f"Nothing to do."
                f"\nstart anew: checkpoint.resume=never (keeps these files in {self.path}/earlier-N) "
                f"· elsewhere: run.name=OTHER"
            )
        self._aside = self._free_name()
        ended = f"{status.get('state')} at step {status.get('step')}"
        return f"an earlier run here ({ended}) is kept in {self._aside}; starting anew at step 0"

    def _earlier_status(self) -> dict[str, Any]:
        try:
            status = json.loads((self.path / "status.json").read_text())
        except (OSError, ValueError):
            status = None
        return status if isinstance(status, dict) else {"state": "unknown", "step": "unknown"}

    def _earlier_config(self) -> str:
        try:
            return (self.path / "config.yaml").read_text()
        except OSError:
            return ""

    def _free_name(self) -> Path:
        number = 1 + max((int(p.name[8:]) for p in self.path.glob("earlier-*") if p.name[8:].isdigit()), default=0)
        return self.path / f"earlier-{number}"

    def _set_aside(self, aside: Path) -> None:
        aside.mkdir()
        for name in RECORDS:
            if (self.path / name).exists():
                (self.path / name).rename(aside / name)

    def begin(self, config_yaml: str, environment: dict[str, Any]) -> None:
        """Set an earlier run's records aside, write ``config.yaml`` and ``environment.json``, open ``metrics.jsonl``.

        Called once nothing in the user's hands can fail any more, so that a mistyped path moves no finished run.
        """
        if self._aside is not None:
            self._set_aside(self._aside)
        (self.path / "config.yaml").write_text(config_yaml)
        (self.path / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")
        self._metrics = (self.path / "metrics.jsonl").open("a", buffering=1)
        self.status("running", step=0)

    def record(self, event: str, **values: Any) -> None:
        """Append one line of strict JSON to ``metrics.jsonl``; a number that JSON has no name for becomes null."""
        finite = {key: None if _non_finite(value) else value for key, value in values.items()}
        if any(_non_finite(value) for value in values.values()):
            finite["nonfinite"] = True
        assert self._metrics is not None
        line = json.dumps({"event": event, **finite, "time": round(time.time(), 3)}, allow_nan=False)
        self._metrics.write(line + "\n")

    def status(self, state: str, *, step: int, reason: str | None = None, exit_code: int | None = None) -> None:
        """Replace ``status.json`` whole, so that a reader never sees half of it."""
        text = json.dumps({"state": state, "step": step, "reason": reason, "exit_code": exit_code})
        temporary = self.path / ".status.json.tmp"
        temporary.write_text(text + "\n")
        temporary.replace(self.path / "status.json")

    def fail(self, step: int, error: BaseException) -> None:
        """Record that the run ended at ``step`` because of ``error``."""
        interrupted = isinstance(error, KeyboardInterrupt)
        reason = "interrupted" if interrupted else f"{type(error).__name__}: {error}".splitlines()[0]
        code = EXIT_MISTAKE if isinstance(error, UserError) else EXIT_FAILED
        if self._metrics is None:
            return
        self.record("stop", step=step, state="failed", reason=reason)
        self.status("failed", step=step, reason=reason, exit_code=code)

    def close(self) -> None:
        """Let go of the folder."""
        if self._metrics is not None:
            self._metrics.close()
        self._lock.close()


_NOT_PART_OF_THE_NUMBERS = ("run.", "launch.", "checkpoint.", "dry_run", "data.workers", "data.cache_dir")


def _differences(earlier_yaml: str, config_yaml: str) -> list[str]:
    """``key old -> new`` for the settings that shape a run's numbers."""
    earlier, now = (_flat(yaml.safe_load(text)) for text in (earlier_yaml, config_yaml))
    return [
        f"{key} {earlier.get(key)} -> {now.get(key)}"
        for key in sorted(earlier.keys() | now.keys())
        if earlier.get(key) != now.get(key) and not key.startswith(_NOT_PART_OF_THE_NUMBERS)
    ]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    return {key: value for name, part in tree.items() for key, value in _flat(part, f"{prefix}{name}.").items()}


def _non_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def environment() -> dict[str, Any]:
    """Versions, hardware and the code's commit. No environment variables, so no secrets."""
    import torch

    root = Path(__file__).resolve().parent.parent

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
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "git_commit": git("rev-parse", "HEAD"),
        "git_changed_files": len(status.splitlines()) if (status := git("status", "--porcelain")) is not None else None,
    }


class Console:
    """Lines for the user from rank 0; every rank keeps its own in ``log/rank-N.log``."""

    def __init__(self, speaks: bool, rank: int, run_folder: Path) -> None:
        self._speaks = speaks
        self._log = run_folder / "log" / f"rank-{rank}.log"

    def say(self, text: str) -> None:
        """Print ``text``, if this rank speaks, and log it."""
        if self._speaks:
            print(text, file=sys.stdout, flush=True)
        self.log(text)

    def log(self, text: str) -> None:
        """Write ``text`` to this rank's log alone."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ")
        # Opened each time: the folder may be set aside, with an earlier run's logs in it, once this run begins.
        with suppress(OSError):  # a node that cannot write there still trains; what matters is printed by rank 0
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a") as log:
                log.write("".join(f"{stamp}{line}\n" for line in text.splitlines()))


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
        parts.append(f"tok/s {short(rate)}" + (f" ({short(rate / ranks)}/rank)" if ranks > 1 else ""))
    if values["mfu"] is not None:
        parts.append(f"mfu {values['mfu']:.1%}")
    if values["scale"] is not None:
        parts.append(f"scale {values['scale']:g}")
    if rate is not None:
        parts += [
            f"mem {size(values['memory_bytes'])}",
            f"data {values['data_seconds'] / values['step_seconds']:.1%}",
            f"eta {duration((steps - values['step']) * values['step_seconds'])}",
        ]
    if values["skipped"]:
        parts.append("SKIPPED: not finite, nothing changed")
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


def duration(seconds: float) -> str:
    """Seconds -> 45s, 3m20s, 5h12m, 1d03h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
