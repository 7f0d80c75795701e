"""Config section of the task ``preference``: DPO, IPO, ORPO, CPO, SimPO and KTO."""

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
"""Default ``margin`` of each loss that has one."""
_NLL_WEIGHTS = {"dpo": 0.0, "cpo": 1.0, "simpo": 0.0}
"""Default weights of the cross entropy of the chosen answer."""
_LABEL_WEIGHTS = ("desirable_weight", "undesirable_weight")
_WITH_REFERENCE = ("dpo", "ipo", "kto")


class PreferenceSection(TaskSection):
    """Training on pairs of answers, one of which is preferred, or on answers with a label."""

    formats: ClassVar[tuple[str, ...]] = ("preference", "unpaired")
    metrics = (*PAIR_METRICS, "chosen_log_prob", "rejected_log_prob")

    loss: Literal["dpo", "ipo", "orpo", "cpo", "simpo", "kto"] = "dpo"
    """``dpo``, ``ipo`` and ``kto`` compare with the initial model; ``orpo``, ``cpo`` and ``simpo`` need no reference
    model. ``kto`` trains on answers with a label, the others on pairs."""
    beta: Annotated[Number, Field(gt=0)] | None = None
    """Scale of the rewards; for ``orpo``, the weight of the odds ratio; for ``ipo``, tau. Null: 0.1, or 2 for
    ``simpo``."""
    margin: Annotated[Number, Field(ge=0)] | None = None
    """``cpo``, ``simpo``: target margin between the rewards. Null: 0, or 1 for ``simpo``."""
    nll_weight: Annotated[Number, Field(ge=0)] | None = None
    """``dpo``, ``cpo``, ``simpo``: weight of the mean cross entropy of the chosen answer. Null: 0, or 1 for
    ``cpo``."""

    desirable_weight: Annotated[Number, Field(ge=0)] = 1.0
    """``kto``: weight of the loss of answers with the label true."""
    undesirable_weight: Annotated[Number, Field(ge=0)] = 1.0
    """``kto``: weight of the loss of answers with the label false."""

    @property
    def metric_names(self) -> tuple[str, ...] | None:
        if self.loss != "kto":
            return self.metrics
        return (*(name for name in self.metrics if name != "reward_margin"), "divergence")

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
        for key in _LABEL_WEIGHTS if self.loss != "kto" else ():
            if (value := getattr(self, key)) != 1:
                yield f"task.{key}={value:g} is not used with task.loss={self.loss}, only with kto; remove it"
        if self.loss == "kto" and not any(getattr(self, key) for key in _LABEL_WEIGHTS):
            yield "task.desirable_weight=0 task.undesirable_weight=0 leave nothing to train on; use 1 for one of them"

    def mistakes_with(self, config: Any) -> Iterator[str]:
        yield from super().mistakes_with(config)
        if config.data.format == "unpaired" and self.loss != "kto":
            yield f"task.loss={self.loss} compares pairs, but data.format=unpaired has none; use task.loss=kto"
        if config.data.format == "preference" and self.loss == "kto":
            yield (
                "task.loss=kto trains on answers with a label; use recipe=kto, or data.format=unpaired, which also "
                "reads pairs, as two answers each"
            )
        yield from mistakes_of_sequence_shards(config)


tasks.register("preference", PreferenceSection, "serried.recipes.text.preference:Preference")
