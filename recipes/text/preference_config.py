"""Config section of the task ``preference``: DPO, ORPO and SimPO."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from serried.configs.schema.fields import Number
from serried.configs.schema.registry import tasks
from serried.configs.schema.sections import TaskSection
from serried.recipes.text.pair_task_config import PAIR_METRICS, mistakes_of_sequence_shards

_BETAS = {"dpo": 0.1, "orpo": 0.1, "simpo": 2.0}


class PreferenceSection(TaskSection):
    """Training on pairs of answers, one of which is preferred."""

    formats: ClassVar[tuple[str, ...]] = ("preference",)
    metrics = (*PAIR_METRICS, "chosen_log_prob", "rejected_log_prob")

    loss: Literal["dpo", "orpo", "simpo"] = "dpo"
    """``dpo`` compares with the initial model; ``orpo`` and ``simpo`` need no reference model."""
    beta: Annotated[Number, Field(gt=0)] | None = None
    """Scale of the rewards; for ``orpo``, the weight of the odds ratio. When null, 0.1, or 2 for ``simpo``."""
    margin: Annotated[Number, Field(ge=0)] | None = None
    """Target margin between the rewards, for ``simpo`` only; 1 when null."""

    @property
    def scale(self) -> float:
        """``beta``, or its default if null."""
        return _BETAS[self.loss] if self.beta is None else self.beta

    @property
    def target_margin(self) -> float:
        """``margin``, or its default if null."""
        return 1.0 if self.margin is None else self.margin

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if self.margin is not None and self.loss != "simpo":
            yield f"task.margin={self.margin:g} is only read with task.loss=simpo; leave it out"

    def mistakes_with(self, config: Any) -> Iterator[str]:
        yield from super().mistakes_with(config)
        yield from mistakes_of_sequence_shards(config)


tasks.register("preference", PreferenceSection, "serried.recipes.text.preference:Preference")
