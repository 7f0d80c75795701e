"""Runs of ``serried verify``, started in new processes like a user's runs, and their records."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import serried
from serried.configs.errors import EXIT_FINISHED
from serried.records.metrics import METRICS, read_events
from serried.records.status import Status, read_status
from serried.runtime.import_signals import LAUNCHER
from serried.runtime.process import REPORTS, STATUS_DECIDES
from serried.runtime.signals import SWEEP
from serried.trainer.checkpoint.retention import committed

FAULT = "fault"
"""File in the run folder that the training script creates when its fault begins."""
RAISED = "raised on purpose by serried verify"
"""Message of the exception that the training script raises as its fault."""
TRAINING_SCRIPT = Path(__file__).with_name("training_script.py")
LIMIT_SECONDS = 240.0
"""Time limit for one run of the small model."""
_TORCHRUN = re.compile(r"(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
_Value = TypeVar("_Value")
_LOOK_SECONDS = 0.05
_LEFT_OVER_SECONDS = 20.0  # a driver first ends the kernels of a process


class RunFailed(Exception):
    """Raised if a run did not end as expected. The message is one line."""


class Started:
    """A running command with all of its processes, which form a separate session."""

    def __init__(self, arguments: Sequence[str], cwd: Path, log: Path) -> None:
        self._log, self._began = log, time.monotonic()
        with log.open("ab") as file:
            file.write(f"$ python {' '.join(arguments)}\n".encode())
            file.flush()
            self._at = file.tell()
            self._process = subprocess.Popen(
                [sys.executable, *arguments], cwd=cwd, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=_environment(), start_new_session=True,
            )  # fmt: skip

    @property
    def printed(self) -> str:
        """Output so far."""
        return self._log.read_bytes()[self._at :].decode("utf-8", "replace")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, limit_seconds: float) -> int:
        """Return the exit code. Raises ``RunFailed`` if it is still running after ``limit_seconds``."""
        try:
            return self._process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"still running {limit_seconds:.0f} s later: {last_line(self.printed)}") from None

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the command, as a scheduler does."""
        self._process.send_signal(signal.SIGTERM)

    def processes(self) -> list[int]:
        """Return the ids of all running processes of the command. Without /proc, only its main process."""
        pid = self._process.pid
        if not Path("/proc/self/stat").exists():
            return [] if self.has_ended() else [pid]
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _session(path) == pid]

    def left_over(self) -> list[int]:
        """Return the ids of processes that still run some seconds after the command has ended."""
        deadline = time.monotonic() + _LEFT_OVER_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return left

    def kill(self) -> None:
        """Kill every process of the command."""
        if not self.has_ended():
            self._process.kill()
            self._process.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _session(process: Path) -> int | None:
    """Return the session of a running process; None if it has ended or is a zombie."""
    try:
        state, _, _, session = (process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:4]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(session)


def _environment() -> dict[str, str]:
    """Return the environment without the variables of torchrun, so that the command starts its own processes."""
    is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    kept = {name: value for name, value in os.environ.items() if not _TORCHRUN.fullmatch(name)}
    if is_under_torchrun and kept.get("OMP_NUM_THREADS") == "1":  # set by torchrun, not by the user
        del kept["OMP_NUM_THREADS"]
    for name in (STATUS_DECIDES, REPORTS, LAUNCHER):  # of the job or the launcher that verify itself may run in
        kept.pop(name, None)
    root = Path(serried.__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):  # a checkout that may not be installed
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), kept.get("PYTHONPATH")]))
    return kept | {SWEEP: str(os.getpid())}  # makes a run stop if this process is killed


class Workplace:
    """Starts runs in a folder, on the devices of this machine.

    Attributes:
        log: File for the output of the next commands.
        ranks: Number of processes of a run on all devices: 1 or an even number.
        device: Value of ``launch.device``.
    """

    def __init__(self, folder: Path, logs: Path, ranks: int, device: str, script: Path = TRAINING_SCRIPT) -> None:
        self.folder, self.logs = folder, logs
        self.ranks, self.device = ranks, device
        self.text = write_text(folder / "text")
        self.log = logs / "verify.log"
        self._script = script
        self._count = 0
        self._shared: dict[str, Any] = {}

    def train(
        self, *words: str, processes: int | None = None, device: str | None = None, limit_seconds: float | None = None,
        code: int = EXIT_FINISHED,
    ) -> Path:  # fmt: skip
        """Train the small model, and return the run folder.

        Raises:
            RunFailed: The exit code is not ``code``, or the run does not end in time.
        """
        folder, started = self.start(*words, processes=processes, device=device)
        ended = self._end(started, limit_seconds)
        if ended != code:
            reason = reason_of(folder, started.printed)
            raise RunFailed(f"a run ended with exit code {ended} instead of {code}: {reason}")
        return folder

    def start(self, *words: str, processes: int | None = None, device: str | None = None) -> tuple[Path, Started]:
        """Start a run of the small model. Return its folder and the command."""
        words = tuple(self.small_run(*words))
        started = self._started([str(self._script), *words, *self._launched(processes, device)])
        given = dict(word.split("=", 1) for word in words)
        return Path(given["run.dir"]), started

    def program(self, *words: str, processes: int | None = None, limit_seconds: float) -> Path:
        """Train with the overrides ``words``, and return the run folder."""
        folder = self.new_folder()
        arguments = ["-m", "serried.program", *words, f"run.dir={folder}", *self._launched(processes, None)]
        started = self._started(arguments)
        if (ended := self._end(started, limit_seconds)) != EXIT_FINISHED:
            raise RunFailed(f"a run ended with exit code {ended}: {reason_of(folder, started.printed)}")
        return folder

    def command(self, *arguments: str, limit_seconds: float | None = None) -> tuple[int, str]:
        """Run ``python`` with ``arguments``. Return the exit code and the output."""
        started = self._started(arguments)
        return self._end(started, limit_seconds), started.printed

    def small_run(self, *words: str) -> list[str]:
        """Return the overrides of a small run in a new folder. Keys in ``words`` replace the defaults."""
        small = [
            "data=text", f"data.path={self.text}", f"data.cache_dir={self.folder / 'cache'}", "data.sequence_length=32",
            "model.dim=32", "model.layers=4", "model.heads=4", "model.kv_heads=2", "model.head_dim=16",
            "model.hidden_dim=48", "model.tie_embeddings=false", "trainer.steps=10",
            f"trainer.global_batch={self.global_batch}", "trainer.log_every=1", "trainer.eval_every=0",
            "trainer.sample_tokens=0", "schedule.warmup_steps=3", "launch.stop_timeout_seconds=30",
            "optim.lr=0.002",  # at 0.003 the loss spikes, which amplifies rounding tenfold
        ]  # fmt: skip
        given = dict(word.split("=", 1) for word in (*small, *words))
        if given.get("parallel") in ("fsdp", "hsdp") and "parallel.pipeline" not in given:
            given.setdefault("parallel.reshard_after_forward", "true")  # several FSDP2 units on a CPU too
        given.setdefault("run.dir", str(self.new_folder()))
        return [f"{key}={value}" for key, value in given.items()]

    def once(self, name: str, work: Callable[[], _Value]) -> _Value:
        """Return the result of ``work``, which is called only once for each ``name``. For runs that several cases need.

        Raises:
            RunFailed: ``work`` raised it, in this call or an earlier one.
        """
        if name not in self._shared:
            try:
                self._shared[name] = work()
            except RunFailed as failure:
                self._shared[name] = RunFailed(f"{name}: {failure}")
        if isinstance(found := self._shared[name], RunFailed):
            raise found
        return found

    @property
    def is_on_gpus(self) -> bool:
        """Whether runs use GPUs of any kind."""
        return self.device != "cpu"

    @property
    def global_batch(self) -> int:
        """Samples per step of the small run. Every layout divides this number, with 3 or 6 accumulation steps."""
        return 6 * self.ranks

    def new_folder(self) -> Path:
        """Return the path of a new folder for a run. The folder is not created."""
        self._count += 1
        return self.folder / f"run-{self._count}"

    def _launched(self, processes: int | None, device: str | None) -> list[str]:
        processes, device = processes or self.ranks, device or self.device
        return ["launch=local", f"launch.processes={processes}", f"launch.device={device}"]

    def _started(self, arguments: Sequence[str]) -> Started:
        return Started(arguments, self.folder, self.log)

    def _end(self, started: Started, limit_seconds: float | None) -> int:
        with ending(started):
            return started.wait(limit_seconds or LIMIT_SECONDS)


@contextmanager
def ending(started: Started) -> Iterator[Started]:
    """Context manager that leaves no process of ``started`` behind."""
    try:
        yield started
    finally:
        started.kill()


def write_text(folder: Path) -> Path:
    """Write thirty text files with enough structure for the loss to fall. Return ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ("lorem", "ipsum", "dolor", "sit", "amet", "consectetur", "adipiscing", "elit", "sed", "do")
    state = 7
    for number in range(30):
        chosen = []
        for _ in range(300):
            state = state * 48271 % (2**31 - 1)  # the text does not depend on library versions
            chosen.append(words[min(state % 10, state // 10 % 10)])
        (folder / f"{number:02d}.txt").write_text(" ".join(chosen), "utf-8")
    return folder


# records of a run -----------------------------------------------------------------------------------------------------


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Return the records of the steps of a run. Raises ``RunFailed`` if there are none."""
    steps = events_of(run, "step")
    if not steps:
        raise RunFailed("a run recorded no step")
    return steps


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of ``kind`` in order."""
    return [event for event in read_events(run / METRICS) if event["event"] == kind]


def status_of(run: Path) -> Status:
    """Return the status of a run. Raises ``RunFailed`` if it has none."""
    if (status := read_status(run)) is None:
        raise RunFailed("a run left no status.json")
    return status


def resumed_from(run: Path) -> int | None:
    """Return the step from which the last start of a run resumed; None if it started from scratch."""
    starts = events_of(run, "start")
    return starts[-1].get("resumed_from") if starts else None


def newest_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of a run. Raises ``RunFailed`` if there is none."""
    if not (found := committed(run / "checkpoints")):
        raise RunFailed("a run saved no checkpoint")
    return found[-1]


class Difference(NamedTuple):
    """Largest relative differences between two curves."""

    loss: float
    grad_norm: float


def difference(steps: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> Difference:
    """Return the largest relative differences between ``steps`` and the same steps of ``reference``.

    Raises:
        RunFailed: A step is missing, or differs in its samples or in whether it was skipped.
    """
    by_number = {step["step"]: step for step in reference}
    if not steps or any(step["step"] not in by_number for step in steps):
        raise RunFailed(f"recorded the steps {[step['step'] for step in steps]} instead of {[*by_number]}")
    pairs = [(step, by_number[step["step"]]) for step in steps]
    for key in ("skipped", "samples", "tokens"):
        for ours, theirs in pairs:
            if ours.get(key) != theirs.get(key):
                raise RunFailed(f"step {ours['step']}: {key} is {ours.get(key)} instead of {theirs.get(key)}")

    def largest(name: str) -> float:
        if any(step[name] is None for pair in pairs for step in pair):
            raise RunFailed(f"a {name} is not finite")
        return max(abs(ours[name] - theirs[name]) / abs(theirs[name]) for ours, theirs in pairs)

    return Difference(largest("loss"), largest("grad_norm"))


def reason_of(run: Path, printed: str) -> str:
    """Return the reason why a run ended, in one line."""
    status = read_status(run)
    lines = [line for line in printed.splitlines() if line.startswith(("error: ", "failed: "))]
    return (status and status.reason) or (lines[0] if lines else last_line(printed))


def last_line(printed: str) -> str:
    """Return the last non-empty line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
