"""Training, asked to stop again and again, and compared with an uninterrupted run.

    python -m benchmarks.signal_storm --signals 100
    python -m benchmarks.signal_storm --signals 20 --layout ddp --seed 2 --launch local

Each start gets one signal (SIGTERM, SIGUSR1 or SIGINT) to its launcher (torchrun, or the process that forks the ranks),
to one rank or to all ranks: while starting, at the first step, between steps, in an evaluation, in a save, or while a
slow disk keeps it waiting for data. Then the same command resumes, with other numbers of reading threads and other
modes of saving, as the seed says. What must hold: each start ends with state ``stopped`` and a checkpoint of the last
step it recorded, or finishes; no process outlives it; the next start resumes from there; no step is trained twice; in
the end metrics.jsonl, weights and optimizer state have the bits of the uninterrupted run. Exit code 1 otherwise.
"""

import signal

from testing.disturb import EVALUATE_EVERY, Storm, last_step, lines, newest_step, run_storm, send, status


class Signals(Storm):
    """Sends one signal to each start."""

    name = "signals"
    moments = dict.fromkeys(("starting", "first step", "training", "evaluation", "saving", "data wait"), 1)
    targets = ("the launcher", "one rank", "all ranks")
    steps_between = 20
    keys = ("checkpoint.every=5", f"trainer.eval_every={EVALUATE_EVERY}", "trainer.eval_batches=4")

    def keys_of_a_start(self) -> list[str]:
        mode, workers = self.chance.choice(["async", "sync"]), self.chance.choice([0, 2])
        return [f"checkpoint.mode={mode}", f"data.workers={workers}"]

    def aim(self) -> tuple[int, int]:
        return 0, self.chance.randrange(1, 7)

    def strike(self, target: str, launcher: int, ranks: list[int]) -> str:
        number = self.chance.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
        if not ranks:
            target = "the launcher"  # which has started none yet
        hit = {"one rank": ranks and [self.chance.choice(ranks)], "all ranks": ranks}
        for pid in hit.get(target, [launcher]):
            send(pid, number)
        return f"{number.name} to {target}"

    def check(self, start: int | None) -> list[str]:
        ended, newest = status(self.run_dir), newest_step(self.run_dir) or 0
        if start is None:
            wrong = ended and ended["state"] not in ("stopped", "running")
            return [f"before it began, status.json says {ended}"] if wrong else []
        problems = []
        if (ended["state"], ended["exit_code"]) not in (("stopped", 75), ("finished", 0)):
            problems.append(f"status.json says {ended}")
        if not last_step(self.run_dir) == ended["step"] == newest:
            told = f"step {last_step(self.run_dir)} was told, status.json says step {ended['step']}"
            problems.append(f"{told}, and the newest checkpoint is of step {newest}")
        if twice := [line["step"] for line in lines(self.run_dir / "lost.jsonl") if line["event"] == "step"]:
            problems.append(f"steps that were lost and trained again: {twice}")
        return problems


if __name__ == "__main__":
    run_storm(__doc__, Signals, 100)
