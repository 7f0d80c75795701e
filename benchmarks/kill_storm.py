"""Training, killed again and again, and compared with an uninterrupted run.

    python -m benchmarks.kill_storm --kills 50 --processes 2 --layout fsdp
    python -m benchmarks.kill_storm --kills 10 --processes 2 --layout ddp --seed 2 --launch local
    python -m benchmarks.kill_storm --kills 10 --processes 4 --layout "pipeline x2 x tensor x2"

Each time one rank is killed by SIGKILL, or all ranks together with what started them: while starting, between two
steps, or in a save (as soon as its unfinished folder is seen). Then the same command resumes, with checkpoints written
beside training or not, as the seed says. What must hold: after each kill every visible checkpoint is whole and none is
lost; the next start resumes from the newest; in the end metrics.jsonl has each step once, in order, with the bits of
the uninterrupted run, and so do weights and optimizer state. Exit code 1 otherwise.
"""

import signal
from typing import ClassVar

from testing.disturb import Storm, family, run_storm, send


class Kills(Storm):
    """Kills one rank, or all processes."""

    name = "kills"
    moments: ClassVar = {"starting": 1, "training": 4, "saving": 5}
    targets = ("one rank", "group")
    steps_between = 8
    keys = ("checkpoint.every=2",)

    def keys_of_a_start(self) -> list[str]:
        return [f"checkpoint.mode={self.chance.choice(['async', 'sync'])}"]

    def aim(self) -> tuple[int, int]:
        # Kills march on with the steps, so that none finds the run finished; resuming may begin beyond the aim.
        return self.done * self.steps_between + self.chance.randrange(1, self.steps_between), self.chance.randrange(
            1, 4
        )

    def strike(self, target: str, launcher: int, ranks: list[int]) -> str:
        if target == "one rank" and ranks:
            send(self.chance.choice(sorted(ranks)), signal.SIGKILL)
            return "SIGKILL to one rank"
        send(launcher, signal.SIGSTOP)  # it must not start or end a rank between the look and the kill
        everyone = family(launcher)
        self.chance.shuffle(everyone)
        for pid in everyone:
            send(pid, signal.SIGKILL)
        return "SIGKILL to the group"


if __name__ == "__main__":
    run_storm(__doc__, Kills, 50)
