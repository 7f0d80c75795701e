"""Overrides to suggest for a plan: faster settings if memory is left, settings with less memory if it does not fit."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from serried.configs.divisors import divisors
from serried.configs.errors import UserError
from serried.configs.schema.sections import RunConfig
from serried.parallel.compile import check_blocks
from serried.parallel.layout.checks import allowed_micro_batches, checked_layout, with_values
from serried.planner.advice import KEEPS_LESS, Planned
from serried.planner.memory_formula import formula_memory
from serried.planner.plan_terms import Fits
from serried.planner.step_plan import StepPlan, fits_of
from serried.planner.time.planned_time import Timed, planned_rates
from serried.planner.time.step_work import job_of, shape_of
from serried.planner.time.time_model import step_of
from serried.trainer.task import RunTask

MICRO_BATCHES = (1, 2, 4, 8)
"""Micro-batch sizes to try."""
SMALLER_OPTIMIZERS = ("adamw8bit", "adamw_bf16", "adamw4bit")
"""Optimizers with less state than AdamW, closest numerics first."""
OTHER_NUMERICS = {
    "adamw8bit": "8-bit moments: numerics differ from adamw",
    "adamw_bf16": "bf16 weights and moments, rounded stochastically: numerics differ from adamw",
    "adamw4bit": "4-bit moments: numerics differ from adamw",
}
SHORTEST = 512
"""Shortest sample length to try, in tokens."""
_CHANGES = {
    "adapter.method": "trains adapters only",
    "adapter.quantize": "stores the base model in 4 bits",
    "data.sequence_length": "trains on shorter samples",
}
"""Effects of keys, other than on speed and memory."""
_WORTH_A_LINE = 0.01
_LINES = 3
_MOST_CHANGES = 3


class Faster(NamedTuple):
    """An override with which a step takes less time."""

    override: str
    saved: float
    """Saved share of the step time, if all overrides before this one are set."""
    bytes: int
    """Additional memory in bytes; negative if the override saves memory."""


class Fitting(NamedTuple):
    """Overrides, and the memory of a run with them."""

    values: Mapping[str, Any]
    fits: Fits

    def words(self) -> str:
        """Return the overrides as command-line arguments."""
        implied = ("parallel.replicate", "parallel.shard") if "parallel.strategy" in self.values else ()
        return " ".join(word(key, value) for key, value in self.values.items() if key not in implied)

    def changes(self) -> list[str]:
        """Return the effects of the overrides, other than on speed and memory."""
        optimizer = [OTHER_NUMERICS[self.values["optim.name"]]] if "optim.name" in self.values else []
        return [text for key, text in _CHANGES.items() if key in self.values] + optimizer


def word(key: str, value: object) -> str:
    """Return an override as a command-line argument; the choice of a section in its short form, ``optim=NAME``."""
    short = {"optim.name": "optim", "adapter.method": "adapter", "parallel.strategy": "parallel"}.get(key, key)
    return f"{short}={str(value).lower()}"


# faster --------------------------------------------------------------------------------------------------------------


def faster(planned: Planned, plan: StepPlan) -> list[Faster]:
    """Return overrides that save time, largest saving first. Each fits together with the overrides before it."""
    config = planned.config
    fits, time = plan.fits, plan.time
    shape = shape_of(config, planned.model, planned.plan)
    if fits is None or not isinstance(time, Timed) or shape is None or config.trainer.activation_memory_budget < 1:
        return []
    cluster, capacity = time.cluster, plan.capacity or 0
    rates = planned_rates(config, cluster.device)

    def estimate(values: Mapping[str, Any]) -> tuple[float, int] | None:
        """Return seconds and bytes of a step; None if the values cannot be combined."""
        changed = with_values(config, values)
        try:
            layout, accumulation = checked_layout(changed, planned.world_size)
            if changed.trainer.compiles:
                check_blocks(planned.model, planned.plan, changed.trainer.keeps_less)
            needed = fits_of(formula_memory(planned.of(changed, planned.world_size)), capacity).needed
        except UserError:
            return None
        return step_of(job_of(changed, shape, layout, accumulation), cluster, rates).seconds, needed

    first = estimate({})
    if first is None:
        return []
    more = max(0, fits.needed - first[1])  # traced memory that the formula does not cover
    found: list[Faster] = []
    values: dict[str, Any] = {}
    now = first
    while len(found) < _LINES:
        others = [({key: value}, estimate({**values, key: value})) for key, value in _quicker(planned, plan, values)]
        fitting = [
            (override, after) for override, after in others
            if after and Fits(after[1] + more, fits.usable).answer == "yes" and after[0] < (1 - _WORTH_A_LINE) * now[0]
        ]  # fmt: skip
        if not fitting:
            break
        override, after = min(fitting, key=lambda pair: pair[1][0])
        values |= override
        (text,) = map(word, override, override.values())
        found.append(Faster(text, 1 - after[0] / now[0], after[1] - now[1]))
        now = after
    return found


def _quicker(planned: Planned, plan: StepPlan, chosen: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield overrides that may save time, in addition to those in ``chosen``."""
    config, layout = planned.config, plan.layout
    trainer, parallel = config.trainer, config.parallel
    is_known = bool(planned.memory.activations)
    options: list[tuple[str, Sequence[Any]]] = []
    if not trainer.compiles and not config.plan.rates:  # rates were measured without compilation
        options.append(("trainer.compile", [True]))
    if is_known:
        allowed = [samples for samples in allowed_micro_batches(config, layout) if samples in MICRO_BATCHES]
        options.append(("trainer.micro_batch", [samples for samples in allowed if samples > trainer.micro_batch]))
        keeps_more = [mode for mode, less in KEEPS_LESS.items() if trainer.activation_checkpoint in less]
        options.append(("trainer.activation_checkpoint", keeps_more))
    if layout.shard * layout.context > 1 and layout.pipeline == 1:
        if parallel.frees_after_forward:
            options.append(("parallel.reshard_after_forward", [False]))
        if parallel.sync_every_micro_batch:
            options.append(("parallel.sync_every_micro_batch", [False]))
    return ((key, value) for key, values in options if key not in chosen for value in values)


# fitting -------------------------------------------------------------------------------------------------------------


class Search:
    """Overrides that let a run fit on the same number of processes, by formula."""

    def __init__(self, planned: Planned, task: RunTask, plan: StepPlan) -> None:
        assert plan.fits is not None
        assert plan.capacity is not None
        self._planned, self._task = planned, task
        self._usable, self._capacity = plan.fits.usable, plan.capacity
        self._built: dict[object, Planned] = {}
        self._seen: dict[frozenset[tuple[str, Any]], Fitting | None] = {}
        own = self._estimate({})
        self._more = 0 if own is None else max(0, plan.fits.needed - own.needed)
        """Traced bytes that the formula does not cover."""
        self._seen.clear()

    def found(self) -> list[Fitting]:
        """Return sets of overrides with which the run fits, the fewest and least costly first; no set contains
        another."""
        found: list[Fitting] = []
        options = smaller(self._planned.config, self._planned.world_size)
        for number in range(1, _MOST_CHANGES + 1):
            for chosen in combinations(options, number):
                keys = {key for steps in chosen for key in steps[-1]}
                is_known = any(keys >= {*smaller_set.values} for smaller_set in found)
                if len(found) == _LINES or is_known or {"adapter.method", "optim.name"} <= keys:
                    continue
                strongest = self._fitting([steps[-1] for steps in chosen])
                if strongest is not None and self._fits(strongest):
                    found.append(self._relaxed(chosen))
        return found

    def nearest(self) -> Fitting | None:
        """Return the tried overrides that do not fit but come closest to fitting."""
        missing = [tried for tried in self._seen.values() if tried and not self._fits(tried) and tried.values]
        return max(missing, key=lambda tried: tried.fits.margin, default=None)

    def _relaxed(self, chosen: Sequence[Sequence[Mapping[str, Any]]]) -> Fitting:
        """Return the options ``chosen``, each in its weakest form with which the run still fits."""
        steps = [options[-1] for options in chosen]
        for place, options in enumerate(chosen):
            for weaker in options[:-1]:
                tried = self._fitting([*steps[:place], weaker, *steps[place + 1 :]])
                if tried and self._fits(tried):
                    steps[place] = weaker
                    break
        found = self._fitting(steps)
        assert found is not None
        return found

    @staticmethod
    def _fits(tried: Fitting) -> bool:
        return tried.fits.answer != "no"

    def _fitting(self, steps: Sequence[Mapping[str, Any]]) -> Fitting | None:
        values = {key: value for step in steps for key, value in step.items()}
        key = frozenset(values.items())
        if key not in self._seen:
            fits = self._estimate(values)
            found = None if fits is None else Fitting(values, Fits(fits.needed + self._more, self._usable))
            self._seen[key] = found
        return self._seen[key]

    def _estimate(self, values: Mapping[str, Any]) -> Fits | None:
        changed = with_values(self._planned.config, values)
        try:
            planned = self._built_for(values, changed)
            return fits_of(formula_memory(planned.of(changed, self._planned.world_size)), self._capacity)
        except UserError:
            return None

    def _built_for(self, values: Mapping[str, Any], changed: RunConfig) -> Planned:
        """Return the plan of a model and task with these values."""
        built = tuple((key, value) for key, value in values.items() if key.partition(".")[0] in ("adapter", "data"))
        if not built:
            return self._planned
        if built not in self._built:
            task = task_for(self._task, changed)
            self._built[built] = Planned(changed, task, self._planned.world_size, self._planned.device)
        return self._built[built]


def task_for(task: RunTask, config: RunConfig) -> RunTask:
    """Return a task of the same class for another ``config``."""
    other = type(task)()
    other.configure(config)
    return other


def smaller(config: RunConfig, processes: int) -> list[list[dict[str, Any]]]:
    """Return options that save memory, each as steps from weak to strong. Options that keep the numerics come first."""
    trainer, adapter = config.trainer, config.adapter
    data = getattr(config, "data", None)
    options: list[list[dict[str, Any]]] = []
    if config.parallel.strategy == "ddp" and processes > 1:
        options.append([{"parallel.strategy": "fsdp", "parallel.replicate": 1, "parallel.shard": -1}])
    options.append([{"trainer.micro_batch": samples} for samples in divisors(trainer.micro_batch)[-2::-1]])
    if trainer.activation_memory_budget == 1:
        less = KEEPS_LESS.get(trainer.activation_checkpoint, ())
        options.append([{"trainer.activation_checkpoint": mode} for mode in less])
    if adapter.method == "lora" and adapter.quantize == "none":
        options.append([{"adapter.quantize": "nf4"}])
    has_base = getattr(getattr(config, "model", None), "path", None) or getattr(data, "format", "text") != "text"
    if adapter.method == "none" and has_base:
        options += [[{"adapter.method": "lora"}], [{"adapter.method": "lora", "adapter.quantize": "nf4"}]]
    if adapter.method == "none" and config.optim.name == "adamw":
        options += [[{"optim.name": name}] for name in SMALLER_OPTIMIZERS]
    if data is not None:
        lengths = [data.sequence_length >> times for times in range(1, 8)]
        options.append([{"data.sequence_length": length} for length in lengths if length >= SHORTEST])
    return [steps for steps in options if steps]
