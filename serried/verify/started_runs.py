"""Runs of ``serried verify``: started in new processes as a user starts them, and read back from their records."""

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
from serried.runtime.signals import SWEEP
from serried.trainer.checkpoint.retention import committed

FAULT = "fault"
"""File in the run folder that the training script makes when its fault begins."""
RAISED = "raised on purpose by serried verify"
"""Message of the exception that it raises as its fault."""
TRAINING_SCRIPT = Path(__file__).with_name("training_script.py")
LIMIT_SECONDS = 240.0
"""For one run of the small model, from start to end."""
_TORCHRUN = re.compile(r"(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
_Value = TypeVar("_Value")
_LOOK_SECONDS = 0.05
_LEFT_OVER_SECONDS = 5.0


class RunFailed(Exception):
    """A run did not do what it was started for. The message is one line."""


class Started:
    """A command that runs, with all processes that it starts. They are a session of their own."""

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
        """What it has printed so far."""
        return self._log.read_bytes()[self._at :].decode("utf-8", "replace")

    @property
    def seconds(self) -> float:
        """Seconds since its start."""
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
        """Return all processes of the command that run, its own included. Linux only; elsewhere its own."""
        pid = self._process.pid
        if not Path("/proc/self/stat").exists():
            return [] if self.has_ended() else [pid]
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _session(path) == pid]

    def left_over(self) -> list[int]:
        """Return the processes that still run some seconds after the command has ended."""
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
    """Return the session of a process that runs; None if it has ended, or is only waited for."""
    try:
        state, _, _, session = (process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:4]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(session)


def _environment() -> dict[str, str]:
    """Return the environment without what torchrun sets, so that the command starts processes itself."""
    is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    kept = {name: value for name, value in os.environ.items() if not _TORCHRUN.fullmatch(name)}
    if is_under_torchrun and kept.get("OMP_NUM_THREADS") == "1":  # torchrun's, and not the user's choice
        del kept["OMP_NUM_THREADS"]
    root = Path(serried.__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):  # a checkout, which need not be installed
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), kept.get("PYTHONPATH")]))
    return kept | {SWEEP: str(os.getpid())}  # a run stops if this process is killed


class Workplace:
    """Starts runs in a folder, on the devices of this machine.

    Attributes:
        log: file that the next commands print to.
        ranks: processes of a run on all devices: an even number, or one.
        device: value of ``launch.device`` of the runs.
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
        """Train the small model, and return the run folder. Raises ``RunFailed`` if the run ends with another exit code
        than ``code``, or does not end."""
        folder, started = self.start(*words, processes=processes, device=device)
        ended = self._end(started, limit_seconds)
        if ended != code:
            raise RunFailed(f"a run ended with exit code {ended} and not {code}: {reason_of(folder, started.printed)}")
        return folder

    def start(self, *words: str, processes: int | None = None, device: str | None = None) -> tuple[Path, Started]:
        """Start a run of the small model. Return its folder, and the command."""
        words = tuple(self.small_run(*words))
        started = self._started([str(self._script), *words, *self._launched(processes, device)])
        given = dict(word.split("=", 1) for word in words)
        return Path(given["run.dir"]), started

    def program(self, *words: str, processes: int | None = None, limit_seconds: float) -> Path:
        """Train what ``words`` say, and return the run folder."""
        folder = self.new_folder()
        arguments = ["-m", "serried.program", *words, f"run.dir={folder}", *self._launched(processes, None)]
        started = self._started(arguments)
        if (ended := self._end(started, limit_seconds)) != EXIT_FINISHED:
            raise RunFailed(f"a run ended with exit code {ended}: {reason_of(folder, started.printed)}")
        return folder

    def command(self, *arguments: str, limit_seconds: float | None = None) -> tuple[int, str]:
        """Run ``python`` with ``arguments``. Return the exit code and what it printed."""
        started = self._started(arguments)
        return self._end(started, limit_seconds), started.printed

    def small_run(self, *words: str) -> list[str]:
        """Return the overrides of a small run in a new folder; a key of ``words`` replaces one given here."""
        small = [
            "data=text", f"data.path={self.text}", f"data.cache_dir={self.folder / 'cache'}", "data.sequence_length=32",
            "model.dim=32", "model.layers=4", "model.heads=4", "model.kv_heads=2", "model.head_dim=16",
            "model.hidden_dim=48", "model.tie_embeddings=false", "trainer.steps=10",
            f"trainer.global_batch={self.global_batch}", "trainer.log_every=1", "trainer.eval_every=0",
            "trainer.sample_tokens=0", "schedule.warmup_steps=3", "launch.stop_timeout_seconds=30",
            "optim.lr=0.002",  # at 0.003 a step of this run spikes, and a spike amplifies rounding tenfold
        ]  # fmt: skip
        given = dict(word.split("=", 1) for word in (*small, *words))
        if given.get("parallel") in ("fsdp", "hsdp") and "parallel.pipeline" not in given:
            given.setdefault("parallel.reshard_after_forward", "true")  # several units on a CPU too
        given.setdefault("run.dir", str(self.new_folder()))
        return [f"{key}={value}" for key, value in given.items()]

    def once(self, name: str, work: Callable[[], _Value]) -> _Value:
        """Return what ``work`` returns, which is called once for each ``name``: runs that several cases need.

        Raises ``RunFailed``, also again, if ``work`` does."""
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
        """Whether runs compute on GPUs, of any kind."""
        return self.device != "cpu"

    @property
    def global_batch(self) -> int:
        """Samples of a step of the small run: every layout divides them, three and six times accumulated."""
        return 6 * self.ranks

    def new_folder(self) -> Path:
        """Return a folder for a run, which does not exist yet."""
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
    """Write thirty files of words with some order in them, so that a loss falls. Return ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ("lorem", "ipsum", "dolor", "sit", "amet", "consectetur", "adipiscing", "elit", "sed", "do")
    state = 7
    for number in range(30):
        chosen = []
        for _ in range(300):
            state = state * 48271 % (2**31 - 1)  # the same text with any version of any library
            chosen.append(words[min(state % 10, state // 10 % 10)])
        (folder / f"{number:02d}.txt").write_text(" ".join(chosen), "utf-8")
    return folder


# what a run has recorded ----------------------------------------------------------------------------------------------


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Return the records of the steps of a run. Raises ``RunFailed`` if there are none."""
    steps = events_of(run, "step")
    if not steps:
        raise RunFailed("a run recorded no step")
    return steps


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of a ``kind``, in order."""
    return [event for event in read_events(run / METRICS) if event["event"] == kind]


def status_of(run: Path) -> Status:
    """Return the status of a run. Raises ``RunFailed`` if it has none."""
    if (status := read_status(run)) is None:
        raise RunFailed("a run left no status.json")
    return status


def resumed_from(run: Path) -> int | None:
    """Return the step that the last start of a run resumed from; None: from none."""
    starts = events_of(run, "start")
    return starts[-1].get("resumed_from") if starts else None


def newest_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of a run. Raises ``RunFailed`` if there is none."""
    if not (found := committed(run / "checkpoints")):
        raise RunFailed("a run saved no checkpoint")
    return found[-1]


class Difference(NamedTuple):
    """Largest relative differences of two curves."""

    loss: float
    grad_norm: float


def difference(steps: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> Difference:
    """Return how far ``steps`` are from the steps of the same numbers in ``reference``. Raises ``RunFailed`` if one of
    them is missing, was skipped, or took other samples."""
    by_number = {step["step"]: step for step in reference}
    if not steps or any(step["step"] not in by_number for step in steps):
        raise RunFailed(f"has steps {[step['step'] for step in steps]} and not {[*by_number]}")
    pairs = [(step, by_number[step["step"]]) for step in steps]
    for key in ("skipped", "samples", "tokens"):
        for ours, theirs in pairs:
            if ours.get(key) != theirs.get(key):
                raise RunFailed(f"step {ours['step']}: {key} is {ours.get(key)} and not {theirs.get(key)}")

    def largest(name: str) -> float:
        if any(step[name] is None for pair in pairs for step in pair):
            raise RunFailed(f"a {name} is not finite")
        return max(abs(ours[name] - theirs[name]) / abs(theirs[name]) for ours, theirs in pairs)

    return Difference(largest("loss"), largest("grad_norm"))


def reason_of(run: Path, printed: str) -> str:
    """Return why a run ended, in one line."""
    status = read_status(run)
    lines = [line for line in printed.splitlines() if line.startswith(("error: ", "failed: "))]
    return (status and status.reason) or (lines[0] if lines else last_line(printed))


def last_line(printed: str) -> str:
    """Return the last line that is not empty."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
