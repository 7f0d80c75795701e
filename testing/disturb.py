"""Start a run, disturb it repeatedly, and compare it with an undisturbed run."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from serried.trainer.checkpoint.manifest import Damaged, check_file, read_manifest
from serried.trainer.checkpoint.retention import committed, step_of
from testing.forked_runs import ROOT, typed_on
from testing.runs import metrics, overrides, weights, write_text

PATIENCE_SECONDS = 120.0
"""Time limit for the first step of a start, and for the end of a launcher."""

EVALUATE_EVERY = 4

_SAME_LINE = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "skipped")


@contextmanager
def started(
    processes: int, argv: list[str], output: Path, *, script: tuple[str, ...] = ("train.py",), launch: str = "torchrun"
) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager that runs ``script`` with ``argv`` and yields the launcher of the ranks.

    The launcher is torchrun, or the program itself with ``launch=local``. On exit, it is killed with all of its
    processes if it still runs.
    """
    command = [sys.executable, *script, *argv]
    if launch == "torchrun":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    else:
        command += [f"launch={launch}", f"launch.processes={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun would set it with a warning
    with output.open("wb") as file:
        launcher = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            for pid in family(launcher.pid):
                send(pid, signal.SIGKILL)
            launcher.wait()


def train_undisturbed(processes: int, argv: list[str]) -> None:
    """Train with ``argv`` without interruption, in forks. torchrun would start new interpreters."""
    for done in typed_on(processes, "train.py", *argv):
        if done.returncode != 0:
            raise RuntimeError(f"a run without a disturbance failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")


def family(pid: int) -> list[int]:
    """Return the ids of a process and all of its descendants."""
    parents = {int(path.name): parent(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found, new = [pid], [pid]
    while new:
        new = [child for child, its_parent in parents.items() if its_parent in new]
        found += new
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on (state, parent, ...); empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def parent(pid: int) -> int | None:
    """Return the id of the parent of ``pid``; None if there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def is_alive(pid: int) -> bool:
    """Return whether ``pid`` still runs. A zombie, which has ended but was not waited for, does not count."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def send(pid: int, number: int) -> None:
    """Send a signal, if the process still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def ended(launcher: subprocess.Popen[bytes], processes: list[int]) -> list[int]:
    """Wait for ``launcher`` to end. Kill and return the ``processes`` that outlived it."""
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(PATIENCE_SECONDS)
    deadline = time.monotonic() + 5
    while (left := [pid for pid in processes if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in left:
        send(pid, signal.SIGKILL)
    return left


# watching ------------------------------------------------------------------------------------------------------------


def under_way(checkpoints: Path) -> str | None:
    """Return the activity in the checkpoints folder: ``saving``, ``deleting`` or None."""
    with suppress(FileNotFoundError):
        for path in checkpoints.iterdir():
            if path.name.startswith(".step-"):
                return "saving" if path.name.endswith(".partial") else "deleting"
    return None


def started_at(run_dir: Path, launched: float) -> int | None:
    """Return the step from which the start at time ``launched`` resumed.

    0 means from scratch, None that the start is not recorded yet.
    """
    recorded = lines(run_dir / "metrics.jsonl")
    starts = [line for line in recorded if line["event"] == "start" and line["time"] >= launched - 0.01]
    return starts[-1]["resumed_from"] or 0 if starts else None


def status(run_dir: Path) -> dict[str, Any]:
    """Return the content of status.json; empty if there is none."""
    with suppress(FileNotFoundError):
        return dict(json.loads((run_dir / "status.json").read_text()))
    return {}


def last_step(run_dir: Path) -> int:
    """Return the last recorded step."""
    return max((line["step"] for line in lines(run_dir / "metrics.jsonl") if line["event"] == "step"), default=0)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete records of a JSON Lines file. The last line may be incomplete and is then left out."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines() if _is_json(line)]


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


# invariants -----------------------------------------------------------------------------------------------------------


def newest_step(run_dir: Path) -> int | None:
    """Return the step of the newest checkpoint."""
    found = committed(run_dir / "checkpoints")
    return step_of(found[-1]) if found else None


def torn_or_lost(run_dir: Path, newest: int | None) -> list[str]:
    """Return the problems of the visible checkpoints. ``newest`` is the step of a checkpoint committed earlier."""
    problems = []
    folder = run_dir / "checkpoints"
    visible = [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.exists() else []
    for path in visible:
        try:
            for name, record in read_manifest(path).items():
                check_file(path, name, record)
        except Damaged as damage:
            problems.append(f"torn: {damage}")
    if newest is not None and (newest_step(run_dir) or 0) < newest:
        problems.append(f"the checkpoint of step {newest} is lost; the newest is {newest_step(run_dir)}")
    return problems


def differences(stormy: Path, calm: Path, steps: int) -> list[str]:
    """Return the differences between the finished disturbed run and the undisturbed one."""
    problems = []
    told, expected = metrics(stormy), metrics(calm)
    if [line["step"] for line in told] != list(range(1, steps + 1)):
        problems.append(f"metrics.jsonl does not have steps 1 to {steps} once each: {[line['step'] for line in told]}")
    for line, other in zip(told, expected, strict=False):
        if different := [key for key in _SAME_LINE if line[key] != other[key]]:
            values = ", ".join(f"{key} {line[key]} instead of {other[key]}" for key in different)
            problems.append(f"step {other['step']} differs: {values}")
            break
    for stem in ("model", "optimizer"):
        a, b = weights(stormy, stem), weights(calm, stem)
        different = [name for name in b if name not in a or not a[name].equal(b[name])]
        if different or a.keys() != b.keys():
            problems.append(f"{stem}: {len(different)} of {len(b)} tensors differ in bits: {different[:3]}")
    return problems


# the storm ------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "pipeline x2 x tensor x2": (1, ["parallel=fsdp", "parallel.pipeline=2", "parallel.tensor=2"]),
    "expert x2 x fsdp x2": (4, ["model=moe_tiny", "model.expert_hidden_dim=24", "parallel=fsdp", "parallel.expert=2"]),
}
"""Data ranks and overrides of layouts with four processes and several axes. Other layouts are values of
``parallel``."""

_GLOBAL_BATCH = 12
_POLL_SECONDS, _POLL_SAVE_SECONDS = 0.005, 0.001
_PAUSE_SECONDS = {"first step": 0.5, "evaluation": 0.01, "saving": 0.02}
"""Longest pause between each moment and the disturbance; 0.1 for other moments."""


@dataclass
class Storm(ABC):
    """A run in ``folder`` that is disturbed ``count`` times, and an undisturbed run. Leaves no process behind.

    Subclasses implement the disturbance.
    """

    name: ClassVar[str]
    """Plural name of the disturbances."""
    moments: ClassVar[dict[str, int]]
    """Moments at which the run is disturbed, with their weights in the random choice."""
    targets: ClassVar[tuple[str, ...]]
    steps_between: ClassVar[int]
    keys: ClassVar[tuple[str, ...]]

    folder: Path
    count: int
    processes: int = 2
    layout: str = "fsdp"
    launch: str = "torchrun"
    seed: int = 1
    say: Callable[[str], object] = print
    done: int = 0
    what: Counter[str] = field(default_factory=Counter)
    """Number of disturbances by moment, target and kind."""
    longest_seconds: float = 0.0
    """Longest time from a disturbance to the end of the last process."""
    violations: list[str] = field(default_factory=list)

    @abstractmethod
    def keys_of_a_start(self) -> list[str]:
        """Return the overrides for the next start."""

    @abstractmethod
    def aim(self) -> tuple[int, int]:
        """Return the steps that the run, and its next start, must have completed before the disturbance."""

    @abstractmethod
    def strike(self, target: str, launcher: int, ranks: list[int]) -> str:
        """Disturb ``target``. Return a description such as ``KIND to TARGET``."""

    def check(self, start: int | None) -> list[str]:  # noqa: ARG002
        """Return the problems with the end of a start that began at step ``start``; None if it did not begin."""
        return []

    @property
    def run_dir(self) -> Path:
        """Folder of the disturbed run."""
        return self.folder / "stormy"

    @property
    def steps(self) -> int:
        """Number of steps of both runs."""
        return self.steps_between * (self.count + 1)

    def blow(self) -> None:
        """Train both runs and compare them. The last start is undisturbed and uses forked ranks."""
        began, calm = time.monotonic(), self.folder / "calm"
        self.chance = random.Random(self.seed)
        write_text(self.folder / "text")
        train_undisturbed(self.processes, self._words(calm))
        while self.done < self.count and len(self.violations) <= 3 and self._disturb():
            pass
        launched, newest = time.time(), newest_step(self.run_dir)
        train_undisturbed(self.processes, self._words(self.run_dir))
        start = started_at(self.run_dir, launched)
        problems = [*self._start_problems(start, newest), *self.check(start)]
        problems += differences(self.run_dir, calm, self.steps)
        self._note("the last start", problems)
        lost = sum(line["event"] == "step" for line in lines(self.run_dir / "lost.jsonl"))
        what = ", ".join(f"{count} {name}" for name, count in sorted(self.what.items()))
        self.say(
            f"{self.done} {self.name} under {self.launch} ({what}) over {self.steps} steps, {lost} of them trained "
            f"again; all processes gone after {self.longest_seconds:.1f} s at most; {len(self.violations)} violations; "
            f"{time.monotonic() - began:.0f} s"
        )

    def _disturb(self) -> bool:
        """Start, disturb and check the run. Return whether it can be started again."""
        launched, newest = time.time(), newest_step(self.run_dir)
        moment = self.chance.choices(list(self.moments), list(self.moments.values()))[0]
        target = self.chance.choice(self.targets)
        script = ("-m", "testing.slow_data") if moment == "data wait" else ("train.py",)
        with self._started(self.keys_of_a_start(), script) as launcher:
            if not self._comes(moment, launcher, launched):
                self._note(moment, [f"start {self.done + 1} ended or hung before it"])
                return False
            moment = under_way(self.run_dir / "checkpoints") or ("training" if moment == "saving" else moment)
            committed, struck = newest_step(self.run_dir), time.time()
            everyone = family(launcher.pid)
            what = self.strike(target, launcher.pid, [pid for pid in everyone if parent(pid) == launcher.pid])
            left = ended(launcher, everyone)
        seconds, start = time.time() - struck, started_at(self.run_dir, launched)
        self.done += 1
        self.longest_seconds = max(self.longest_seconds, seconds)
        self.what.update((f"while {moment}", *what.split(" to ")))
        if start is None:
            self.what["before the run began"] += 1
        problems = [f"processes left behind: {left}"] if left else []
        problems += [*self._start_problems(start, newest), *self.check(start), *torn_or_lost(self.run_dir, committed)]
        self._note(f"{what}, {moment}", problems)
        self.say(
            f"{self.done}/{self.count}: {what}, {moment}, {struck - launched:.1f} s after its start; all ended after "
            f"{seconds:.1f} s; newest checkpoint: step {newest_step(self.run_dir)}"
        )
        return status(self.run_dir).get("state") != "finished"

    def _words(self, run_dir: Path) -> list[str]:
        data_ranks, how = LAYOUTS.get(self.layout, (self.processes, [f"parallel={self.layout}"]))
        passes = 1 if data_ranks == self.processes else 4  # a pipeline needs several micro-batches
        return overrides(
            self.folder / "text", run_dir, *how, f"trainer.steps={self.steps}", "trainer.deterministic=true",
            f"trainer.global_batch={_GLOBAL_BATCH}", f"trainer.micro_batch={_GLOBAL_BATCH // data_ranks // passes}",
            "launch.device=cpu", *self.keys,
        )  # fmt: skip

    def _started(self, keys: list[str], script: tuple[str, ...] = ("train.py",)) -> Any:
        words = [*self._words(self.run_dir), *keys]
        return started(self.processes, words, self.folder / "output.txt", script=script, launch=self.launch)

    def _comes(self, moment: str, launcher: subprocess.Popen[bytes], launched: float) -> bool:
        """Wait for the ``moment``. Return False if the start ends before it or hangs."""
        deadline = time.monotonic() + PATIENCE_SECONDS

        def until(is_there: Callable[[], bool], poll_seconds: float = _POLL_SECONDS) -> bool:
            while not is_there() and launcher.poll() is None and time.monotonic() < deadline:
                time.sleep(poll_seconds)
            return launcher.poll() is None and time.monotonic() < deadline

        def has_begun() -> bool:
            return started_at(self.run_dir, launched) is not None

        if moment == "starting":
            at = time.monotonic() + self.chance.uniform(0.2, 8)
            return until(lambda: time.monotonic() >= at or has_begun())
        of_the_run, of_the_start = self.aim()
        if not until(has_begun):
            return False
        if moment != "first step":
            aim = max(of_the_run, (started_at(self.run_dir, launched) or 0) + of_the_start)
            until(lambda: last_step(self.run_dir) >= aim)
        if moment == "evaluation":
            until(lambda: last_step(self.run_dir) % EVALUATE_EVERY == 0)
        if moment == "saving":
            until(lambda: under_way(self.run_dir / "checkpoints") is not None, _POLL_SAVE_SECONDS)
        time.sleep(self.chance.uniform(0, _PAUSE_SECONDS.get(moment, 0.1)))
        return until(lambda: True)

    def _start_problems(self, start: int | None, newest: int | None) -> list[str]:
        wrong = start is not None and start != (newest or 0)
        return [f"began at step {start}, but step {newest} was committed"] if wrong else []

    def _note(self, what: str, problems: list[str]) -> None:
        output = (self.folder / "output.txt").read_text()[-2000:] if problems else ""
        self.violations += [f"{self.done}/{self.count} {what}: {problem}\n{output}" for problem in problems]


def run_storm(documentation: str | None, storm: type[Storm], default: int) -> None:
    """Run ``storm`` with the command-line options. Exit with code 1 if it found a violation."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{storm.name}", type=int, default=default, dest="count")
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2, 3, 4, 6))
    parser.add_argument("--layout", default="fsdp", choices=("single", "ddp", "fsdp", "hsdp", *LAYOUTS))
    parser.add_argument("--launch", default="torchrun", choices=("torchrun", "local"))
    parser.add_argument("--seed", type=int, default=1)
    options = vars(parser.parse_args())
    # A shell makes background processes (`... &`) ignore SIGINT, and a launcher would inherit that while it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="serried-storm-") as folder:
        found = storm(Path(folder) / "storm", **options, say=lambda line: print(line, flush=True))
        found.blow()
    for violation in found.violations:
        print(f"VIOLATION: {violation}")
    sys.exit(1 if found.violations else 0)
