"""Training under torchrun, asked to stop again and again, and compared with an uninterrupted run.

    python -m benchmarks.signal_storm --signals 100
    python -m benchmarks.signal_storm --signals 20 --layout ddp --seed 2

Each start gets one signal (SIGTERM, SIGUSR1 or SIGINT) to torchrun, to one rank or to all ranks: while starting, at the
first step, between steps, in an evaluation, in a save, or while a slow disk keeps it waiting for data. Then the same
command resumes, with other numbers of reading threads and other modes of saving, as the seed says. What must hold: each
start ends with state ``stopped`` and a checkpoint of the last step it recorded, or finishes; no process outlives it;
the next start resumes from there; no step is trained twice; in the end metrics.jsonl, weights and optimizer state have
the bits of the uninterrupted run. Exit code 1 otherwise.
"""

import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
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

STEPS_BETWEEN_SIGNALS = 20
_SAVE_EVERY, _EVALUATE_EVERY = 5, 4
_GLOBAL_BATCH = 12
_POLL_SECONDS = 0.001
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_MOMENTS = ("starting", "first step", "training", "evaluation", "saving", "data wait")


@dataclass
class Storm:
    """Result of a storm."""

    signals: int = 0
    what: Counter[str] = field(default_factory=Counter)
    """Signal, target and moment, each -> how often."""
    before_it_began: int = 0
    """Signals that ended a start which had not written anything yet."""
    steps: int = 0
    longest_seconds: float = 0.0
    """From a signal to the end of the last process."""
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> str:
        """One line."""
        what = ", ".join(f"{count} {name}" for name, count in sorted(self.what.items()))
        verdict = "no violation" if not self.violations else f"{len(self.violations)} VIOLATIONS"
        return (
            f"{self.signals} signals ({what}; {self.before_it_began} before the run began) over {self.steps} steps; "
            f"all processes gone after {self.longest_seconds:.1f} s at most; {verdict}; {self.seconds:.0f} s"
        )


def storm(
    folder: Path,
    *,
    signals: int,
    processes: int,
    layout: str,
    seed: int = 1,
    say: Callable[[str], None] = print,
) -> Storm:
    """Disturb a run in ``folder`` by ``signals`` signals and compare it with an undisturbed one. Leaves no process."""
    began = time.monotonic()
    text, stormy, calm, output = folder / "text", folder / "stormy", folder / "calm", folder / "output.txt"
    text.mkdir(parents=True)
    write_text(text)
    result = Storm(steps=STEPS_BETWEEN_SIGNALS * (signals + 1))
    chance = random.Random(seed)

    def words(run_dir: Path, *more: str) -> list[str]:
        return overrides(
            text, run_dir, f"parallel={layout}", f"trainer.steps={result.steps}", "trainer.deterministic=true",
            f"trainer.global_batch={_GLOBAL_BATCH}", f"trainer.micro_batch={_GLOBAL_BATCH // processes}",
            f"checkpoint.every={_SAVE_EVERY}", f"trainer.eval_every={_EVALUATE_EVERY}", "trainer.eval_batches=4",
            "launch.device=cpu", *more,
        )  # fmt: skip

    def start(run_dir: Path, *more: str, slow: bool = False) -> Any:
        script = ("-m", "tests.slow_data") if slow else ("train.py",)
        return torchrun(processes, words(run_dir, *more), output, script=script)

    train_undisturbed(processes, words(calm))
    while result.signals < signals and len(result.violations) <= 3:
        launched, newest = time.time(), newest_step(stormy)
        number, target = chance.choice(_SIGNALS), chance.choice(("torchrun", "one rank", "all ranks"))
        moment = chance.choice(_MOMENTS)
        how = f"checkpoint.mode={chance.choice(['async', 'sync'])}", f"trainer.workers={chance.choice([0, 2])}"
        with start(stormy, *how, slow=moment == "data wait") as agent:
            if not _await(moment, stormy, launched, agent, chance):
                tail = output.read_text()[-2000:]
                result.violations.append(f"a start ended or hung before its signal ({moment}): {tail}")
                break
            everyone = family(agent.pid)
            ranks = [pid for pid in everyone if parent(pid) == agent.pid]
            if not ranks:
                target = "torchrun"  # which has started none yet
            hit = {"torchrun": [agent.pid], "one rank": ranks and [chance.choice(ranks)], "all ranks": ranks}
            targets = hit[target]
            struck = time.time()
            for pid in targets:
                send(pid, number)
            left = ended(agent, everyone)
        seconds = time.time() - struck
        result.signals += 1
        result.what.update((number.name, f"to {target}", f"while {moment}"))
        result.longest_seconds = max(result.longest_seconds, seconds)
        what = f"signal {result.signals}/{signals}: {number.name} to {target}, {moment}"
        problems = [f"processes left behind: {left}"] if left else []
        problems += _check_end(stormy, launched, newest, result)
        problems += torn_or_lost(stormy, newest)
        result.violations += [f"{what}: {problem}\n{output.read_text()[-2000:]}" for problem in problems]
        say(f"{what}; all ended after {seconds:.1f} s; {_status(stormy).get('state')} at step {newest_step(stormy)}")
        if _status(stormy).get("state") == "finished":
            break
    with start(stormy) as last:
        code = last.wait()
    if code != 0:
        result.violations.append(f"the last start ended with {code}: {output.read_text()[-2000:]}")
    else:
        result.violations += differences(stormy, calm, result.steps)
    twice = [line["step"] for line in lines(stormy / "lost.jsonl") if line["event"] == "step"]
    if twice:
        result.violations.append(f"steps that were lost and trained again: {twice}")
    result.seconds = time.monotonic() - began
    return result


def _await(moment: str, run_dir: Path, launched: float, agent: subprocess.Popen[bytes], chance: random.Random) -> bool:
    """Wait for the ``moment`` to strike. False if the run ended without it, or hangs."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    if moment == "starting":
        until = time.monotonic() + chance.uniform(0.2, 8)
        while time.monotonic() < until and agent.poll() is None and started_at(run_dir, launched) is None:
            time.sleep(0.02)
        return agent.poll() is None
    steps = chance.randrange(1, 7)

    def is_there() -> bool:
        start = started_at(run_dir, launched)
        if start is None or moment == "first step":
            return start is not None
        if last_step(run_dir) < start + steps:
            return False
        if moment == "saving":
            return under_way(run_dir / "checkpoints") == "saving"
        return moment != "evaluation" or last_step(run_dir) % _EVALUATE_EVERY == 0

    while not is_there():
        if agent.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    time.sleep(chance.uniform(0, {"first step": 0.5, "evaluation": 0.01, "saving": 0.02}.get(moment, 0.1)))
    return agent.poll() is None


def _check_end(run_dir: Path, launched: float, newest: int | None, result: Storm) -> list[str]:
    """What is wrong with how a start ended; ``newest`` is the step of the newest checkpoint before it."""
    status, start = _status(run_dir), started_at(run_dir, launched)
    if start is None:
        result.before_it_began += 1
        wrong = status and status["state"] not in ("stopped", "running")
        return [f"before it began, status.json says {status}"] if wrong else []
    problems = []
    if start != (newest or 0):
        problems.append(f"began at step {start}, but step {newest} was committed")
    if (status["state"], status["exit_code"]) not in (("stopped", 75), ("finished", 0)):
        problems.append(f"status.json says {status}")
    if status["step"] != (newest_step(run_dir) or 0):
        problems.append(f"status.json says step {status['step']}, the newest checkpoint is {newest_step(run_dir)}")
    if last_step(run_dir) != status["step"]:
        problems.append(f"step {last_step(run_dir)} was told, but the run ended at step {status['step']}")
    return problems


def _status(run_dir: Path) -> dict[str, Any]:
    with suppress(FileNotFoundError):
        return dict(json.loads((run_dir / "status.json").read_text()))
    return {}


if __name__ == "__main__":
    run_storm(__doc__, "signals", 100, storm)
