"""Checks that the sections of tasks on pairs of answers share."""

from collections.abc import Iterator
from typing import Any

PAIR_METRICS = ("reward_margin", "reward_accuracy", "chosen_reward", "rejected_reward")


def mistakes_of_sequence_shards(config: Any) -> Iterator[str]:
    """Refuse context parallelism, which shards answers that the task needs whole."""
    if config.parallel.context != 1:
        yield (
            f"parallel.context={config.parallel.context} divides answers over ranks, and task.name={config.task.name} "
            "needs whole ones; use parallel.context=1, and parallel.tensor for long sequences"
        )
