"""Config section of the task ``reward``."""

from collections.abc import Iterator
from typing import Any, ClassVar

from serried.configs.schema.registry import tasks
from serried.configs.schema.sections import TaskSection
from serried.recipes.text.pair_task_config import PAIR_METRICS, mistakes_of_sequence_shards


class RewardSection(TaskSection):
    """Training of a reward model, which scores answers, on pairs of answers."""

    formats: ClassVar[tuple[str, ...]] = ("preference",)
    metrics = PAIR_METRICS

    def mistakes_with(self, config: Any) -> Iterator[str]:
        yield from super().mistakes_with(config)
        yield from mistakes_of_sequence_shards(config)
        if config.parallel.tensor != 1:
            yield (
                f"parallel.tensor={config.parallel.tensor} is not supported with task.name=reward, whose head has a "
                "single output; use parallel.tensor=1, with parallel=fsdp for large models"
            )
        if config.trainer.sample_tokens:
            yield (
                f"trainer.sample_tokens={config.trainer.sample_tokens} but task.name=reward does not generate text; "
                "use trainer.sample_tokens=0"
            )


tasks.register("reward", RewardSection, "serried.recipes.text.reward:Reward")
