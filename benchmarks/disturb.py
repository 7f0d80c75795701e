"""Start a run under torchrun, watch it, and check it after it was disturbed."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from serried.trainer.checkpoint.manifest import Damaged, check_file, read_manifest
from serried.trainer.checkpoint.retention import committed, step_of
from tests.forks import ROOT, typed_on
from tests.runs import metrics, weights

PATIENCE_SECONDS = 120.0
"""For a start to show its first step, and for a torchrun to end."""

_SAME_LINE = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "skipped")


@contextmanager
def torchrun(
    processes: int, argv: list[str], output: Path, script: tuple[str, ...] = ("train.py",)
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``script`` with ``argv`` under torchrun; on exit kill it and all of its processes if they still run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun would set it too, with a warning
    with output.open("wb") as file:
        agent = subprocess.Popen(
            [*command, *script, *argv], cwd=ROOT, stdout=file, stderr=file, stdin=subprocess.DEVNULL,
            env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        yield agent
    finally:
        if agent.poll() is None:
            for pid in family(agent.pid):
                send(pid, signal.SIGKILL)
            agent.wait()


def train_undisturbed(processes: int, argv: list[str]) -> None:
    """Train with ``argv`` without interruption, in forks instead of under torchrun, which starts interpreters."""
    for done in typed_on(processes, "train.py", *argv):
        if done.returncode != 0:
            raise RuntimeError(f"the undisturbed run failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")


def family(pid: int) -> list[int]:
    """Return a process and all of its descendants."""
    parents = {int(path.name): parent(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found, new = [pid], [pid]
    while new:
        new = [child for child, its_parent in parents.items() if its_parent in new]
        found += new
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on (state, parent, ...); none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def parent(pid: int) -> int | None:
    """Return the process that started ``pid``; None if there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def is_alive(pid: int) -> bool:
    """Return whether ``pid`` still runs; a process that has ended is a zombie until its parent waits for it."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def send(pid: int, number: int) -> None:
    """Send a signal, if the process still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def ended(agent: subprocess.Popen[bytes], processes: list[int]) -> list[int]:
    """Wait for torchrun to end. Returns the processes that outlived it, after killing them."""
    with suppress(subprocess.TimeoutExpired):
        agent.wait(PATIENCE_SECONDS)
    deadline = time.monotonic() + 5
    while (left := [pid for pid in processes if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in left:
        send(pid, signal.SIGKILL)
    return left


# watching ------------------------------------------------------------------------------------------------------------


def under_way(checkpoints: Path) -> str | None:
    """Return what is happening in the folder of checkpoints: saving, deleting, or None."""
    with suppress(FileNotFoundError):
        for path in checkpoints.iterdir():
            if path.name.startswith(".step-"):
                return "saving" if path.name.endswith(".partial") else "deleting"
    return None


def started_at(run_dir: Path, launched: float) -> int | None:
    """Return the step that the start at time ``launched`` resumed from, 0 if from scratch; None if it is not recorded
    yet."""
    recorded = lines(run_dir / "metrics.jsonl")
    starts = [line for line in recorded if line["event"] == "start" and line["time"] >= launched - 0.01]
    return starts[-1]["resumed_from"] or 0 if starts else None


def last_step(run_dir: Path) -> int:
    """Return the last step recorded."""
    return max((line["step"] for line in lines(run_dir / "metrics.jsonl") if line["event"] == "step"), default=0)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON lines; the last one may still be being written."""
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


# what must hold -------------------------------------------------------------------------------------------------------


def newest_step(run_dir: Path) -> int | None:
    """Return the step of the newest checkpoint."""
    found = committed(run_dir / "checkpoints")
    return step_of(found[-1]) if found else None


def torn_or_lost(run_dir: Path, newest: int | None) -> list[str]:
    """Return what is wrong with the visible checkpoints; ``newest`` was committed before."""
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
    """Return where the disturbed run, now finished, differs from the uninterrupted one."""
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


# the command ----------------------------------------------------------------------------------------------------------


def run_storm(
    documentation: str | None, what: str, default: int, storm: Callable[..., Any], layouts: Iterable[str] = ()
) -> None:
    """Run ``storm`` as the command line says, ``--<what>`` times, and exit with 1 if it found a violation. ``layouts``:
    names that ``--layout`` takes besides the usual ones."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{what}", type=int, default=default)
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2, 3, 4, 6))
    parser.add_argument("--layout", default="fsdp", choices=("single", "ddp", "fsdp", "hsdp", *layouts))
    parser.add_argument("--seed", type=int, default=1)
    options = vars(parser.parse_args())
    # A shell has what it starts in the background (`... &`) ignore SIGINT, and torchrun would until it is up.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="serried-storm-") as folder:
        result = storm(Path(folder) / "storm", **options, say=lambda line: print(line, flush=True))
    for violation in result.violations:
        print(f"VIOLATION: {violation}")
    print(result.summary())
    sys.exit(1 if result.violations else 0)
