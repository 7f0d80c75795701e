"""Overrides that save memory, each with what it saves: by planning the same run with it."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from serried.configs.divisors import divisors
from serried.configs.errors import UserError
from serried.configs.schema import RunConfig
from serried.parallel.checks import check_layout
from serried.parallel.held import unshardable
from serried.parallel.mesh import Layout, gradient_accumulation, resolve_layout
from serried.parallel.phases import BACKWARD, FORWARD
from serried.trainer.model import build_model
from serried.trainer.optimizer import can_offload
from serried.trainer.parameter_groups import freeze
from serried.trainer.plan.memory import FormulaMemory, Sizes, planned_memory
from serried.trainer.pulse import EVALUATE
from serried.trainer.task import Task

_WORTH_A_LINE_SHARE = 0.005


class Advice(NamedTuple):
    """An override."""

    override: str
    saved: int
    """Bytes."""
    note: str
    """What it costs."""


class Planned:
    """Memory that a run of a config needs, and that it would need with other values."""

    def __init__(self, config: RunConfig, task: Task, world_size: int, device: str | None = None) -> None:
        self.config, self.world_size = config, world_size
        self.device = device or config.launch.device
        self._task = task
        built = build_model(config, task, device)
        self.model, self.plan = built.module, built.plan
        freeze(self.model, config.optim)
        self.memory = self.of(config, world_size)

    def of(self, config: RunConfig, world_size: int) -> FormulaMemory:
        """Raises UserError where the config does not go together."""
        layout = resolve_layout(config.parallel, world_size)
        accumulation = gradient_accumulation(config.trainer, layout)
        check_layout(config, layout, accumulation)
        return planned_memory(config, self._task, accumulation, Sizes(config, layout, self.model, self.plan))

    def saved_by(self, section: str, ranks: int = 1, **values: object) -> int:
        """Bytes that other ``values`` in a section would save, on ``ranks`` times as many ranks; 0: none."""
        try:
            return self.memory.total - self.of(self.with_(section, **values), ranks * self.world_size).total
        except UserError:
            return 0

    def saved_by_offload(self) -> int:
        """Bytes that ``parallel.offload=true`` would save; 0: none, or it is refused."""
        is_possible = self.device != "cpu" and not unshardable(self.model)
        return self.saved_by("parallel", offload=True) if is_possible else 0

    def axes_left(self, layout: Layout) -> list[str]:
        """Axes along which the model may be divided further, on as many ranks."""
        plan = self.plan
        declared = {"tensor": plan.roles, "context": plan.context, "pipeline": plan.blocks}
        return [axis for axis, names in declared.items() if names and layout.shard % 2 == 0]

    def with_(self, section: str, **values: object) -> RunConfig:
        changed = getattr(self.config, section).model_copy(update=values)
        return self.config.model_copy(update={section: changed})


def advice(planned: Planned, stage: str, usable: float, more: Iterable[Advice] = ()) -> list[Advice]:
    """Return what saves memory in ``stage``, what keeps the numbers first, and of these what saves most; but parameters
    in host memory, which each step copies, after these, unless no other override is enough.

    ``usable``: bytes that the run may take. ``more``: others that keep the numbers.
    """
    threshold = _WORTH_A_LINE_SHARE * planned.memory.total
    same, other = (
        sorted((each for each in kind if each.saved > threshold), key=lambda each: -each.saved)
        for kind in ([*_that_keep_the_numbers(planned, stage, usable), *more], _that_change_them(planned, stage))
    )
    last = Advice("parallel.offload=true", planned.saved_by_offload(), ", which host memory then holds; much slower")
    if last.saved <= threshold:
        return [*same, *other]
    fits = [planned.memory.total - each.saved <= usable for each in (last, *same)]
    return [last, *same, *other] if fits[0] and not any(fits[1:]) else [*same, last, *other]


def _that_keep_the_numbers(planned: Planned, stage: str, usable: float) -> Iterator[Advice]:
    config, world = planned.config, planned.world_size
    layout = resolve_layout(config.parallel, world)
    budget = config.trainer.activation_memory_budget
    if stage in (FORWARD, BACKWARD) and budget < 1:
        saved_bytes = planned.saved_by("trainer", activation_memory_budget=budget / 2)
        yield Advice(f"trainer.activation_memory_budget={budget / 2:g}", saved_bytes, ", and computes blocks again")
    elif stage in (FORWARD, BACKWARD) and config.trainer.activation_checkpoint in ("none", "selective"):
        saved = {mode: planned.saved_by("trainer", activation_checkpoint=mode) for mode in ("selective", "full")}
        fits = planned.memory.total - saved["selective"] <= usable
        chosen = "selective" if fits and saved["selective"] else "full"
        yield Advice(f"trainer.activation_checkpoint={chosen}", saved[chosen], ", and computes blocks again")
    if stage in (FORWARD, BACKWARD, EVALUATE):
        smaller = divisors(config.trainer.micro_batch)[:-1]
        fitting = [
            each for each in smaller
            if planned.memory.total - planned.saved_by("trainer", micro_batch=each) <= usable
        ]  # fmt: skip
        if smaller:
            samples = max(fitting, default=1)
            saved_bytes = planned.saved_by("trainer", micro_batch=samples)
            yield Advice(f"trainer.micro_batch={samples}", saved_bytes, " of activations")
    if planned.device != "cpu" and can_offload(config.optim) and not config.parallel.offload:
        saved_bytes = planned.saved_by("optim", offload=True)
        yield Advice("optim.offload=true", saved_bytes, ", which host memory then holds; slower updates")
    if layout.shard * layout.context > 1:
        yield Advice(
            "parallel.reshard_after_forward=true", planned.saved_by("parallel", reshard_after_forward=True),
            ", and is slower",
        )  # fmt: skip
    if layout.shard > 1 and layout.pipeline == 1:
        yield Advice(
            "parallel.sync_every_micro_batch=true", planned.saved_by("parallel", sync_every_micro_batch=True),
            ", and communicates more",
        )  # fmt: skip
    if layout.replicate > 1:
        yield Advice("parallel=fsdp", planned.saved_by("parallel", strategy="fsdp", replicate=1, shard=-1), "")
    if layout.world > 1 and layout.strategy != "ddp":
        rest = "" if config.parallel.shard == -1 else " parallel.shard=-1"
        degrees = {axis: 2 * getattr(layout, axis) for axis in planned.axes_left(layout)}
        by_axis = {axis: planned.saved_by("parallel", shard=-1, **{axis: each}) for axis, each in degrees.items()}
        if by_axis:
            axis = max(by_axis, key=lambda each: by_axis[each])
            yield Advice(f"parallel.{axis}={degrees[axis]}{rest}", by_axis[axis], "")
    fully = {"strategy": "fsdp", "replicate": 1, "shard": -1}
    if layout.strategy != "ddp":
        name = "more ranks" if layout.shard > 1 else "more ranks and parallel=fsdp"
        yield Advice(f"{name}, such as {2 * world}", planned.saved_by("parallel", ranks=2, **fully), " on each")


def _that_change_them(planned: Planned, stage: str) -> Iterator[Advice]:
    config = planned.config
    if config.optim.name == "adamw":
        saved = planned.saved_by("optim", name="adamw8bit")
        yield Advice("optim=adamw8bit", saved, " of optimizer state, in a new run; other rounding")
    if stage not in (FORWARD, BACKWARD, EVALUATE):
        return
    if config.precision.name == "fp32":
        yield Advice("precision=bf16", planned.saved_by("precision", name="bf16"), "; other rounding")
