"""Training under torchrun, killed again and again, and compared with an uninterrupted run.

    python -m benchmarks.kill_storm --kills 50 --processes 2 --layout fsdp
    python -m benchmarks.kill_storm --kills 10 --processes 2 --layout ddp --seed 2
    python -m benchmarks.kill_storm --kills 10 --processes 4 --layout "pipeline x2 x tensor x2"

Each time one rank, or torchrun with all of its ranks, is killed by SIGKILL: while starting, between two steps, or in a
save (as soon as its unfinished folder is seen). Then the same command resumes, with checkpoints written beside training
or not, as the seed says. What must hold: after each kill every visible checkpoint is whole and none is lost; the next
start resumes from the newest; in the end metrics.jsonl has each step once, in order, with the bits of the uninterrupted
run, and so do weights and optimizer state. Exit code 1 otherwise.
"""

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.disturb import (
    PATIENCE_SECONDS,
    differences,
    ended,
    family,
    last_step,
    lines,
    newest_step,
    parent,
    run_storm,
    send,
    started_at,
    torchrun,
    torn_or_lost,
    train_undisturbed,
    under_way,
)  # fmt: skip
from tests.runs import overrides, write_text

STEPS_BETWEEN_KILLS = 8
_SAVE_EVERY = 2
_GLOBAL_BATCH = 12
_POLL_SECONDS = 0.001

LAYOUTS = {
    "pipeline x2 x tensor x2": (1, ["parallel=fsdp", "parallel.pipeline=2", "parallel.tensor=2"]),
    "expert x2 x fsdp x2": (4, ["model=moe_tiny", "model.expert_hidden_dim=24", "parallel=fsdp", "parallel.expert=2"]),
}
"""Layouts of four processes and several axes: data ranks, overrides. Others are values of ``parallel``."""


@dataclass
class Storm:
    """Result of a storm."""

    kills: int = 0
    moments: Counter[str] = field(default_factory=Counter)
    """What was going on at a kill: starting, training, saving, deleting -> how often."""
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
    data_ranks, how = LAYOUTS.get(layout, (processes, [f"parallel={layout}"]))
    passes = 1 if data_ranks == processes else 4  # a pipeline needs several

    def words(run_dir: Path, mode: str) -> list[str]:
        return overrides(
            text, run_dir, *how, f"trainer.steps={result.steps}", "trainer.deterministic=true",
            f"trainer.global_batch={_GLOBAL_BATCH}", f"trainer.micro_batch={_GLOBAL_BATCH // data_ranks // passes}",
            f"checkpoint.every={_SAVE_EVERY}", f"checkpoint.mode={mode}", "launch.device=cpu",
        )  # fmt: skip

    def start(run_dir: Path, mode: str) -> Any:
        return torchrun(processes, words(run_dir, mode), folder / "output.txt")

    train_undisturbed(processes, words(calm, "async"))
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
            newest, struck_at = newest_step(stormy), time.time()
            killed = _kill(agent, target, chance)
            left, ended_at = ended(agent, killed), time.time()
            if left:
                result.violations.append(f"kill {result.kills + 1} of the {target} left processes behind: {left}")
        result.kills += 1
        result.moments[struck] += 1
        result.targets[target] += 1
        result.violations += _check_start(stormy, launched, committed_before, result)
        result.violations += [f"after kill {result.kills}: {problem}" for problem in torn_or_lost(stormy, newest)]
        committed_before = newest_step(stormy)
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
        result.violations += differences(stormy, calm, result.steps)
    result.repeated_steps = sum(line["event"] == "step" for line in lines(stormy / "lost.jsonl"))
    result.seconds = time.monotonic() - began
    return result


# starting and killing -------------------------------------------------------------------------------------------------


def _kill(agent: subprocess.Popen[bytes], target: str, chance: random.Random) -> list[int]:
    """Kill one rank, or torchrun and everything below it. Returns all processes that must be gone soon."""
    everyone = family(agent.pid)
    ranks = [pid for pid in everyone if parent(pid) == agent.pid]
    if target == "rank" and ranks:
        send(chance.choice(sorted(ranks)), signal.SIGKILL)
        return everyone
    send(agent.pid, signal.SIGSTOP)  # it must not start or end a rank between the look and the kill
    everyone = family(agent.pid)
    chance.shuffle(everyone)
    for pid in everyone:
        send(pid, signal.SIGKILL)
    return everyone


# aiming ---------------------------------------------------------------------------------------------------------------


def _await(
    moment: str, run_dir: Path, aim: int, launched: float, agent: subprocess.Popen[bytes], chance: random.Random
) -> str | None:
    """Wait for the ``moment`` to kill. Returns what is going on then; None if the run ended without it, or hangs."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    if moment == "starting":
        until = time.monotonic() + chance.uniform(0.2, 8)
        while time.monotonic() < until and agent.poll() is None and started_at(run_dir, launched) is None:
            time.sleep(0.02)
        return None if agent.poll() is not None else "starting"
    start: int | None = None
    while time.monotonic() < deadline and agent.poll() is None:
        start = started_at(run_dir, launched)
        # Resuming may begin beyond the aim: then some steps from there.
        if start is not None and last_step(run_dir) >= max(aim, start + 1 + aim % 3):
            break
        time.sleep(0.005)
    checkpoints = run_dir / "checkpoints"
    while moment == "saving" and time.monotonic() < deadline and agent.poll() is None and not under_way(checkpoints):
        time.sleep(_POLL_SECONDS)
    if agent.poll() is not None or time.monotonic() >= deadline:
        return None
    time.sleep(chance.uniform(0, 0.02 if moment == "saving" else 0.1))
    return under_way(checkpoints) or "training"


# what must hold -------------------------------------------------------------------------------------------------------


def _check_start(run_dir: Path, launched: float, newest: int | None, result: Storm) -> list[str]:
    """Whether the latest start, where it got that far, resumed from the ``newest`` checkpoint there was."""
    start = started_at(run_dir, launched)
    if start is None:
        return []
    if start:
        result.resumed.append(start)
    if start != (newest or 0):
        return [f"start {result.starts} resumed from step {start}, but step {newest} was committed"]
    return []


def _extent(steps: list[int]) -> str:
    return f"{min(steps)} to {max(steps)}" if steps else "none"


if __name__ == "__main__":
    run_storm(__doc__, "kills", 50, storm, LAYOUTS)
