"""Checks shared by the config sections of tasks that train on pairs of answers."""

from collections.abc import Iterator
from typing import Any

PAIR_METRICS = ("reward_margin", "reward_accuracy", "chosen_reward", "rejected_reward")


def mistakes_of_sequence_shards(config: Any) -> Iterator[str]:
    """Refuse context parallelism: it shards answers, and the task needs complete ones."""
    if config.parallel.context != 1:
        yield (
            f"parallel.context={config.parallel.context} is not supported with task.name={config.task.name}, which "
            "needs full answers on each rank; use parallel.context=1, and parallel.tensor for long sequences"
        )
