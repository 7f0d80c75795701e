"""Training under torchrun, killed again and again, and compared with a run that nobody disturbed.

    python -m benchmarks.kill_storm --kills 50 --processes 2 --layout fsdp
    python -m benchmarks.kill_storm --kills 10 --processes 2 --layout ddp --seed 2

Each time one rank, or torchrun with all of its ranks, is killed by SIGKILL: while starting, between two steps, or in a
save (as soon as its unfinished folder is seen). Then the same command resumes, with checkpoints written beside training
or not, as the seed says. What must hold: after each kill every visible checkpoint is whole and none is lost; the next
start resumes from the newest; in the end metrics.jsonl tells each step once, in order, with the bits of the undisturbed
run, and so do weights and optimizer state. Exit code 1 where anything does not.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster import ROOT
from tests.runs import metrics, overrides, weights, write_text
from trainer.checkpoint.manifest import Damaged, check_file, read_manifest
from trainer.checkpoint.retention import committed, step_of

STEPS_BETWEEN_KILLS = 8
_SAVE_EVERY = 2
_GLOBAL_BATCH = 12
_PATIENCE_SECONDS = 120.0  # for a start to show its first step, and for a torchrun to end after a kill
_POLL_SECONDS = 0.001
_SAME_LINE = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "skipped")


@dataclass
class Storm:
    """What a storm came to."""

    kills: int = 0
    moments: Counter[str] = field(default_factory=Counter)
    """What was going on when a kill struck: starting, training, saving, deleting -> how often."""
    targets: Counter[str] = field(default_factory=Counter)
    """rank or group -> how often it was killed."""
    starts: int = 0
    repeated_steps: int = 0
    """Steps that were trained again because they came after the newest checkpoint."""
    resumed: list[int] = field(default_factory=list)
    """The step of each resume."""
    steps: int = 0
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> str:
        """One line."""
        moments = ", ".join(f"{count} {name}" for name, count in sorted(self.moments.items()))
        targets = ", ".join(f"{count} of one {name}" if name == "rank" else f"{count} of the {name}" for name, count in
                            sorted(self.targets.items()))  # fmt: skip
        resumed = f"resumed {len(self.resumed)} times at steps {_extent(self.resumed)}"
        verdict = "no violation" if not self.violations else f"{len(self.violations)} VIOLATIONS"
        return (
            f"{self.kills} kills ({moments}; {targets}) in {self.starts} starts of {self.steps} steps; {resumed}, "
            f"{self.repeated_steps} steps trained again; {verdict}; {self.seconds:.0f} s"
        )


def storm(
    folder: Path,
    *,
    kills: int,
    processes: int,
    layout: str,
    seed: int = 1,
    say: Callable[[str], None] = print,
) -> Storm:
    """Kill a run in ``folder`` ``kills`` times and compare it with an undisturbed one. Leaves no process behind."""
    began = time.monotonic()
    text, stormy, calm = folder / "text", folder / "stormy", folder / "calm"
    text.mkdir(parents=True)
    write_text(text)
    result = Storm(steps=STEPS_BETWEEN_KILLS * (kills + 1))
    chance = random.Random(seed)

    def start(run_dir: Path, mode: str) -> Any:
        argv = overrides(
            text, run_dir, f"parallel={layout}", f"trainer.steps={result.steps}", "trainer.deterministic=true",
            f"trainer.global_batch={_GLOBAL_BATCH}", f"trainer.micro_batch={_GLOBAL_BATCH // processes}",
            f"checkpoint.every={_SAVE_EVERY}", f"checkpoint.mode={mode}", "launch.device=cpu",
        )  # fmt: skip
        return _torchrun(processes, argv, folder / "output.txt")

    with start(calm, "async") as undisturbed:
        if undisturbed.wait() != 0:
            raise RuntimeError(f"the undisturbed run failed:\n{(folder / 'output.txt').read_text()[-3000:]}")
    committed_before: int | None = None
    while result.kills < kills:
        result.starts += 1
        launched = time.time()
        with start(stormy, chance.choice(["async", "sync"])) as agent:
            moment = chance.choices(["starting", "training", "saving"], [1, 4, 5])[0]
            target = chance.choice(["rank", "group"])
            # Kills march on with the steps, so that none finds the run finished.
            aim = result.kills * STEPS_BETWEEN_KILLS + chance.randrange(1, STEPS_BETWEEN_KILLS)
            struck = _await(moment, stormy, aim, launched, agent, chance)
            if struck is None:
                tail = (folder / "output.txt").read_text()[-2000:]
                result.violations.append(f"start {result.starts} ended or hung before it could be killed: {tail}")
                break
            newest, struck_at = _newest(stormy), time.time()
            killed = _kill(agent, target, chance)
            left, ended_at = _ended(agent, killed), time.time()
            if left:
                result.violations.append(f"kill {result.kills + 1} of the {target} left processes behind: {left}")
        result.kills += 1
        result.moments[struck] += 1
        result.targets[target] += 1
        result.violations += _check_start(stormy, launched, committed_before, result)
        result.violations += [f"after kill {result.kills}: {problem}" for problem in _check_checkpoints(stormy, newest)]
        committed_before = _newest(stormy)
        say(
            f"kill {result.kills}/{kills}: {'a rank' if target == 'rank' else 'the group'}, {struck}, "
            f"{struck_at - launched:.1f} s after its start; all ended after {ended_at - struck_at:.1f} s; newest "
            f"checkpoint: step {committed_before}"
        )
        if len(result.violations) > 3:
            break
    launched = time.time()
    result.starts += 1
    with start(stormy, "async") as last:
        code = last.wait()
    result.violations += _check_start(stormy, launched, committed_before, result)
    if code != 0:
        result.violations.append(f"the last start ended with {code}: {(folder / 'output.txt').read_text()[-2000:]}")
    else:
        result.violations += _differences(stormy, calm, result.steps)
    lost = stormy / "lost.jsonl"
    lines = [json.loads(line) for line in lost.read_text().splitlines() if _is_json(line)] if lost.exists() else []
    result.repeated_steps = sum(line["event"] == "step" for line in lines)
    result.seconds = time.monotonic() - began
    return result


# starting and killing -------------------------------------------------------------------------------------------------


@contextmanager
def _torchrun(processes: int, argv: list[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun would set it too, with a warning
    with output.open("wb") as file:
        agent = subprocess.Popen(
            [*command, "train.py", *argv], cwd=ROOT, stdout=file, stderr=file, stdin=subprocess.DEVNULL,
            env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        yield agent
    finally:
        if agent.poll() is None:
            for pid in _family(agent.pid):
                _signal(pid, signal.SIGKILL)
            agent.wait()


def _kill(agent: subprocess.Popen[bytes], target: str, chance: random.Random) -> list[int]:
    """Kill one rank, or torchrun and everything below it. Returns all processes that must be gone soon."""
    family = _family(agent.pid)
    ranks = [pid for pid in family if _parent(pid) == agent.pid]
    if target == "rank" and ranks:
        _signal(chance.choice(sorted(ranks)), signal.SIGKILL)
        return family
    _signal(agent.pid, signal.SIGSTOP)  # it must not start or end a rank between the look and the kill
    family = _family(agent.pid)
    chance.shuffle(family)
    for pid in family:
        _signal(pid, signal.SIGKILL)
    return family


def _ended(agent: subprocess.Popen[bytes], family: list[int]) -> list[int]:
    """Wait for torchrun to end. Returns the processes that outlived it, after killing them."""
    with suppress(subprocess.TimeoutExpired):
        agent.wait(_PATIENCE_SECONDS)
    deadline = time.monotonic() + 5
    while (left := [pid for pid in family if _is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in left:
        _signal(pid, signal.SIGKILL)
    return left


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _family(pid: int) -> list[int]:
    """A process and all below it."""
    parents = {int(path.name): _parent(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    family, new = [pid], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        family += new
    return family


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on (state, parent, ...); none: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _is_alive(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


# aiming ---------------------------------------------------------------------------------------------------------------


def _await(
    moment: str, run_dir: Path, aim: int, launched: float, agent: subprocess.Popen[bytes], chance: random.Random
) -> str | None:
    """Wait for the ``moment`` to kill. Returns what is going on then; None: the run ended by itself, or hangs."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    if moment == "starting":
        until = time.monotonic() + chance.uniform(0.2, 8)
        while time.monotonic() < until and agent.poll() is None and _begun_at(run_dir, launched) is None:
            time.sleep(0.02)
        return None if agent.poll() is not None else "starting"
    begun: int | None = None
    while time.monotonic() < deadline and agent.poll() is None:
        begun = _begun_at(run_dir, launched)
        # Resuming may begin beyond the aim: then some steps from there.
        if begun is not None and _last_step(run_dir) >= max(aim, begun + 1 + aim % 3):
            break
        time.sleep(0.005)
    checkpoints = run_dir / "checkpoints"
    while moment == "saving" and time.monotonic() < deadline and agent.poll() is None and not _under_way(checkpoints):
        time.sleep(_POLL_SECONDS)
    if agent.poll() is not None or time.monotonic() >= deadline:
        return None
    time.sleep(chance.uniform(0, 0.02 if moment == "saving" else 0.1))
    return _under_way(checkpoints) or "training"


def _under_way(checkpoints: Path) -> str | None:
    with suppress(FileNotFoundError):
        for path in checkpoints.iterdir():
            if path.name.startswith(".step-"):
                return "saving" if path.name.endswith(".partial") else "deleting"
    return None


def _begun_at(run_dir: Path, launched: float) -> int | None:
    """The step that the start of time ``launched`` resumed from (0: anew); None: it is not that far yet."""
    starts = [line for line in _lines(run_dir) if line["event"] == "start" and line["time"] >= launched - 0.01]
    return starts[-1]["resumed_from"] or 0 if starts else None


def _last_step(run_dir: Path) -> int:
    return max((line["step"] for line in _lines(run_dir) if line["event"] == "step"), default=0)


def _lines(run_dir: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl tells at the moment; a line that is being written may be there in part."""
    try:
        text = (run_dir / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines() if _is_json(line)]


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


# what must hold -------------------------------------------------------------------------------------------------------


def _newest(run_dir: Path) -> int | None:
    found = committed(run_dir / "checkpoints")
    return step_of(found[-1]) if found else None


def _check_start(run_dir: Path, launched: float, newest: int | None, result: Storm) -> list[str]:
    """Whether the latest start, where it got that far, resumed from the ``newest`` checkpoint there was."""
    begun = _begun_at(run_dir, launched)
    if begun is None:
        return []
    if begun:
        result.resumed.append(begun)
    if begun != (newest or 0):
        return [f"start {result.starts} resumed from step {begun}, but step {newest} was committed"]
    return []


def _check_checkpoints(run_dir: Path, newest: int | None) -> list[str]:
    """What is wrong with the checkpoints in sight; ``newest`` was committed before the kill."""
    problems = []
    folder = run_dir / "checkpoints"
    visible = [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.exists() else []
    for path in visible:
        try:
            for name, record in read_manifest(path).items():
                check_file(path, name, record)
        except Damaged as damage:
            problems.append(f"torn: {damage}")
    if newest is not None and (_newest(run_dir) or 0) < newest:
        problems.append(f"the checkpoint of step {newest} is lost; the newest is {_newest(run_dir)}")
    return problems


def _differences(stormy: Path, calm: Path, steps: int) -> list[str]:
    problems = []
    told, expected = metrics(stormy), metrics(calm)
    if [line["step"] for line in told] != list(range(1, steps + 1)):
        problems.append(f"metrics.jsonl does not tell steps 1 to {steps} once each: {[line['step'] for line in told]}")
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


def _extent(steps: list[int]) -> str:
    return f"{min(steps)} to {max(steps)}" if steps else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2, 3, 4, 6))
    parser.add_argument("--layout", default="fsdp", choices=("single", "ddp", "fsdp", "hsdp"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serried-storm-") as folder:
        result = storm(
            Path(folder) / "storm", kills=options.kills, processes=options.processes, layout=options.layout,
            seed=options.seed, say=lambda line: print(line, flush=True),
        )  # fmt: skip
    for violation in result.violations:
        print(f"VIOLATION: {violation}")
    print(result.summary())
    sys.exit(1 if result.violations else 0)


if __name__ == "__main__":
    main()
