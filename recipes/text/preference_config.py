"""Config section of the task ``preference``: DPO, IPO, ORPO, CPO and SimPO."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from serried.configs.schema.fields import Number
from serried.configs.schema.registry import tasks
from serried.configs.schema.sections import TaskSection
from serried.recipes.text.pair_task_config import PAIR_METRICS, mistakes_of_sequence_shards

_BETAS = {"simpo": 2.0}
_BETA = 0.1
_MARGINS = {"cpo": 0.0, "simpo": 1.0}
"""Default margins of the losses with a margin."""
_NLL_WEIGHTS = {"dpo": 0.0, "cpo": 1.0, "simpo": 0.0}
"""Default weights of the cross entropy of the chosen answer."""
_WITH_REFERENCE = ("dpo", "ipo")


class PreferenceSection(TaskSection):
    """Training on pairs of answers, one of which is preferred."""

    formats: ClassVar[tuple[str, ...]] = ("preference",)
    metrics = (*PAIR_METRICS, "chosen_log_prob", "rejected_log_prob")

    loss: Literal["dpo", "ipo", "orpo", "cpo", "simpo"] = "dpo"
    """``dpo`` and ``ipo`` compare with the initial model; ``orpo``, ``cpo`` and ``simpo`` need no reference model."""
    beta: Annotated[Number, Field(gt=0)] | None = None
    """Scale of the rewards; for ``orpo``, the weight of the odds ratio; for ``ipo``, tau. When null, 0.1, or 2 for
    ``simpo``."""
    margin: Annotated[Number, Field(ge=0)] | None = None
    """``cpo``, ``simpo``: target margin between the rewards. When null, 0, or 1 for ``simpo``."""
    nll_weight: Annotated[Number, Field(ge=0)] | None = None
    """``dpo``, ``cpo``, ``simpo``: weight of the mean cross entropy of the chosen answer. When null, 0, or 1 for
    ``cpo``."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the initial model."""
        return self.loss in _WITH_REFERENCE

    @property
    def scale(self) -> float:
        """``beta``, or its default if null."""
        return _BETAS.get(self.loss, _BETA) if self.beta is None else self.beta

    @property
    def target_margin(self) -> float:
        """``margin``, or its default if null."""
        return _MARGINS.get(self.loss, 0.0) if self.margin is None else self.margin

    @property
    def weight_of_nll(self) -> float:
        """``nll_weight``, or its default if null."""
        return _NLL_WEIGHTS.get(self.loss, 0.0) if self.nll_weight is None else self.nll_weight

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        for key, read_with in (("margin", _MARGINS), ("nll_weight", _NLL_WEIGHTS)):
            value = getattr(self, key)
            if value is not None and self.loss not in read_with:
                losses = ", ".join(read_with)
                yield f"task.{key}={value:g} is not used with task.loss={self.loss}, only with {losses}; remove it"

    def mistakes_with(self, config: Any) -> Iterator[str]:
        yield from super().mistakes_with(config)
        yield from mistakes_of_sequence_shards(config)


tasks.register("preference", PreferenceSection, "serried.recipes.text.preference:Preference")
