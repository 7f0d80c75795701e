"""Search over all valid layouts of a run, by formula, for the fastest layouts and for layouts that need less memory."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from pathlib import Path
from typing import Any

import torch

from serried.configs.divisors import divisors
from serried.configs.errors import UserError
from serried.configs.formats import columns, size
from serried.configs.schema.sections import RunConfig
from serried.parallel.compile import check_blocks
from serried.parallel.layout.checks import check_compile, checked_layout, with_values
from serried.parallel.layout.mesh import Layout
from serried.parallel.nf4 import is_packed, whole_numel
from serried.parallel.parallelize import check_plan
from serried.planner.activations.estimate import activation_estimate
from serried.planner.alternatives import MICRO_BATCHES, Fitting, smaller, task_for, word
from serried.planner.devices import DEVICES
from serried.planner.memory_formula import Sizes, formula_memory, planned_memory, share_of
from serried.planner.plan_lines import seconds_text
from serried.planner.plan_terms import Fits
from serried.planner.step_plan import fits_of
from serried.planner.time.planned_time import (
    measured_rates,
    planned_cluster,
    planned_device,
    planned_rates,
    unknown_device,
)
from serried.planner.time.published_rates import software_for
from serried.planner.time.step_work import doubts, job_of, shape_of, unknown_why
from serried.planner.time.time_model import Job, held_elements, step_of
from serried.records.files import output_file, write_atomically
from serried.records.report.html import html_page
from serried.trainer.model import model_to_train
from serried.trainer.optim.optimizer import check_optimizer
from serried.trainer.optim.optimizer_state import state_bytes
from serried.trainer.precision import frozen_type, trained_type
from serried.trainer.task import RunTask

_FP32_BYTES = 4
_USABLE_SHARE = 0.9
_EQUAL = 1.05
"""Ratio of two predicted times below which they count as equal."""
_SLOWEST = 2
"""Largest ratio to the fastest time at which a layout with less memory is shown."""
_SHOWN = 8
_MESHES, _OF_A_MESH = 20, 3
"""Number of meshes, and number of candidates per mesh, for which the timeline is simulated."""
_LEAST = 16
"""Number of layouts with the least memory to try first for a run that needs less memory."""
_MOST_CONTEXT = 32
_MOST_STAGES = 64
_SET_BY_CHOICE: dict[str, dict[str, Any]] = {
    "ddp": {"parallel.replicate": -1, "parallel.shard": 1},
    "fsdp": {"parallel.replicate": 1, "parallel.shard": -1},
    "hsdp": {"parallel.replicate": 2, "parallel.shard": -1},
}
"""Keys that ``parallel=NAME`` sets."""
_SCHEDULES = (("1f1b", None), ("interleaved", 2), ("interleaved", 4), ("zbv", None))


@dataclass(frozen=True)
class Candidate:
    """A valid layout."""

    overrides: Mapping[str, Any]
    config: RunConfig
    job: Job
    seconds: float
    """Step time by a formula."""
    bytes: float
    """Approximate memory of the rank that needs the most."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one device."""
        return self.config.trainer.global_batch * self.job.sequence / self.seconds / self.job.layout.world

    def words(self) -> str:
        """Return the overrides as command-line arguments."""
        return " ".join(map(word, self.overrides, self.overrides.values())) or "(no change)"


def search(config: RunConfig, task: RunTask, processes: int) -> str:
    """Return a table of the fastest layouts that fit and of slower layouts that need less memory; JSON if
    ``plan.as_json``.

    If ``plan.out`` is set, also write an HTML page of the layouts. If no layout fits, search again with less optimizer
    state, frozen weights in 4 bits or shorter samples.

    Raises:
        UserError: the time of this model or on this device is unknown, no layout fits, or the page cannot be written.
    """
    out = config.plan.out
    if out is not None and (not out.name or out.is_dir() or not out.parent.is_dir()):
        raise UserError(f"out={out} is not a file in an existing folder; use out=layouts.html")
    written = None if out is None else output_file(out)
    searched = _Search(config, task, processes)
    found = searched.fitting()
    fastest = searched.fastest(found)
    if not searched.valid:
        batch = config.trainer.global_batch
        raise UserError(
            f"no layout of {processes} processes is possible: parallel degrees must divide "
            f"trainer.global_batch={batch} and the sizes of the model; use another launch.processes or "
            "trainer.global_batch"
        )
    device = searched.machine.device.name
    nearest = None if fastest else searched.nearest()
    # The nearest candidate may fit by the plan, although it did not by the first estimate.
    if nearest is not None and nearest.bytes <= searched.machine.limit:
        fastest = [nearest]
        found = [nearest]
        nearest = None
    if not fastest:
        tried: dict[str, str] = {}
        limit = searched.machine.limit
        for other in _smaller(config, task, processes):
            for key, value in other.changes.items():
                tried[value if key == "optim.name" else key] = word(key, value)
            if other.may_fit(searched) and (fastest := other.fastest(found := other.fitting())):
                searched = other
                break
        else:
            nor = f", nor with {', '.join(tried.values())}" if tried else ""
            least = f"the nearest is {_missing(nearest, limit)}; " if nearest is not None else ""
            raise UserError(
                f"none of {searched.valid:,} valid layouts of {processes} {device} fits {size(limit)}{nor}; {least}"
                "use more processes, shorter samples or a smaller model"
            )
    covered = (
        [candidate for candidate in found if not searched.doubts(candidate)] if searched.doubts(fastest[0]) else []
    )
    covered = searched.fastest(covered)[:3]
    frugal = searched.frugal(found, fastest)
    tables = {"fastest": fastest, "covered": covered, "smaller": frugal}
    data: dict[str, Any] = {"valid": searched.valid, "fitting": len(found), "device": device}
    data |= {"changed": dict(searched.changes), "nearest": nearest and searched.as_data(nearest)}
    data |= {
        "rates": searched.machine.rates_of,
        **{name: [*map(searched.as_data, table)] for name, table in tables.items()},
    }
    if written is not None:
        shown = {candidate.words() for table in tables.values() for candidate in table}
        others = [searched.as_data(candidate) for candidate in found if candidate.words() not in shown]
        title = f"{config.run.name}: layouts of {processes} {device}"
        _write(written, title, data | {"title": title, "limit": searched.machine.limit, "others": others})
    if config.plan.as_json:
        return json.dumps(data)
    fit = f"{len(found):,} of which fit {size(searched.machine.limit)}"
    of = f"{searched.valid:,} valid layouts of {processes} {device}, {fit}"
    lines = [f"{'searched':<10} {of}; rates of {searched.machine.rates_of}"]
    if nearest is not None:
        lines.append(f"{'changed':<10} {'; '.join(searched.what_changes())}")
        lines.append(f"{'nearest':<10} without this change: {_missing(nearest, searched.machine.limit)}")
    lines += searched.table(fastest, is_numbered=True)
    equal = sum(candidate.seconds <= _EQUAL * fastest[0].seconds for candidate in fastest)
    if equal > 1:
        lines.append(f"{'equal':<10} 1 to {equal} differ by less than 5%, the error of these times; choose by memory")
    if covered:
        lines += [f"{'covered':<10} the fastest layouts that published runs cover", *searched.table(covered)]
    if frugal:
        lines += [f"{'smaller':<10} layouts that need less memory than any faster one", *searched.table(frugal)]
    if noted := {doubt for candidate in (*fastest, *frugal) for doubt in searched.doubts(candidate)}:
        lines.append(f"{'?':<10} a rough guess: no published run has {', nor '.join(sorted(noted))}")
    if out is not None:
        lines.append(f"{'page':<10} {out}, {size(out.stat().st_size)}; open it in a browser")
    return "\n".join(lines)


def _missing(nearest: Candidate, limit: float) -> str:
    return f"{nearest.words()}, which needs {size(nearest.bytes)}: {size(nearest.bytes - limit)} are missing"


def _smaller(config: RunConfig, task: RunTask, processes: int) -> Iterator["_Search"]:
    """Yield searches of runs that need less memory than ``config``, smallest changes first."""
    options = [
        [values for values in steps if not {key.partition(".")[0] for key in values} & {"trainer", "parallel"}]
        for steps in smaller(config, processes)
    ]
    alone = [values for steps in options for values in steps]
    pairs = [{**one, **other} for one, other in combinations(alone, 2) if not {*one} & {*other}]
    for values in (*alone, *pairs):
        changed = with_values(config, values)
        with suppress(UserError):
            yield _Search(changed, task_for(task, changed), processes, values)


def _write(out: Path, title: str, data: dict[str, Any]) -> None:
    try:
        write_atomically(out, html_page(title, data, ("format", "specs", "layouts")))
    except OSError as error:
        raise UserError(f"cannot write out={out}: {error.strerror}; use out=FILE in another folder") from None


class _Machine:
    """Devices of a search and their rates."""

    def __init__(self, config: RunConfig, processes: int) -> None:
        """
        Raises:
            UserError: this device is unknown.
        """
        device = planned_device(config)
        if device is None:
            raise UserError(f"this GPU is not in the catalogue; use plan.device={'|'.join(DEVICES)}")
        if unknown := unknown_device(config, device, processes):
            raise UserError(f"plan.search=true: {unknown}")
        self.device = device
        self.cluster, self.rates = planned_cluster(config, device), planned_rates(config, device)
        self.rates_of = str(config.plan.rates or software_for(device.name))
        self.limit = _USABLE_SHARE * device.memory_bytes
        self._has_own_rates = bool(config.plan.rates)
        self.has_gpus = config.launch.device != "cpu" and not (config.plan.rates and not measured_rates(config).is_gpu)

    def seconds(self, job: Job, *, is_quick: bool = False) -> float:
        """Return the time of a step; ``is_quick``: by a formula instead of the timeline."""
        return step_of(job, self.cluster, self.rates, is_quick=is_quick).seconds

    def doubts(self, job: Job) -> list[str]:
        """Return the properties of ``job`` that no published run covers."""
        return [] if self._has_own_rates else [*doubts(job, self.cluster, self.rates_of)]


class _Model:
    """Model of a search: checks layouts and estimates their memory."""

    def __init__(self, config: RunConfig, task: RunTask, machine: _Machine) -> None:
        """
        Raises:
            UserError: the time of this model is unknown.
        """
        built = model_to_train(config, task)
        self.module, self.plan = built.module, built.plan
        self._blocks = len(built.blocks)
        shape = shape_of(config, self.module, self.plan)
        if shape is None or not machine.device.peak(config.precision.name):
            why = unknown_why(config, shape, machine.device)
            hint = "" if "; use " in why else "; use precision=bf16, and a built-in family"
            raise UserError(f"plan.search=true: {why}{hint}")
        self.shape = shape
        parameters = [*self.module.parameters()]
        elements = sum(map(whole_numel, parameters))
        self._trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad) / elements
        """Share of the parameters that are trained."""
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        width = (frozen_type(config, self.plan) or torch.float32).itemsize
        packed = torch.bfloat16.itemsize
        held = (parameter.numel() * (packed if is_packed(parameter) else width) for parameter in frozen)
        self._frozen_bytes = sum(held) / elements
        """Bytes of all frozen parameters, divided by the number of all parameters."""
        self._state_bytes = 0 if config.offloads_state else state_bytes(config.optim).per_element
        self._refused: dict[object, UserError | None] = {}

    def check(self, config: RunConfig, layout: Layout) -> None:
        """Raise UserError if the model cannot be sharded or compiled this way. Equal cases are checked once."""
        kind = (layout.tensor, layout.stages, config.trainer.activation_checkpoint)
        if kind not in self._refused:
            self._refused[kind] = None
            try:
                check_plan(self.module, self.plan, layout)
                check_optimizer(config.optim, self.module, self.plan, layout)
                if config.trainer.compiles:
                    check_blocks(self.module, self.plan, config.trainer.keeps_less)
            except UserError as error:
                self._refused[kind] = error
        if refused := self._refused[kind]:
            raise refused

    def compiles(self, config: RunConfig, layout: Layout) -> bool:
        """Return whether ``trainer.compile=auto`` compiles blocks on ``layout``, as a run decides."""
        if config.trainer.activation_checkpoint == "offload":
            return False
        with suppress(UserError):
            check_compile(config, layout)
            check_blocks(self.module, self.plan, config.trainer.keeps_less)
            return True
        return False

    def rough_bytes(self, config: RunConfig, job: Job) -> float:
        """Return an approximate number of bytes that the first rank needs."""
        layout, elements = job.layout, held_elements(job)
        divided = layout.shard * layout.context
        block = job.shape.of_dense / layout.tensor + job.shape.of_experts / layout.expert
        gathered = (
            2 * max(block, job.shape.of_head / layout.tensor) if config.parallel.frees_after_forward else elements
        )
        whole = elements if divided > 1 and job.accumulation > 1 and not job.reduces_each else 0.0
        estimate = activation_estimate(config, layout, self.plan, self.module, is_rough=True)
        share = share_of(config, layout, job.accumulation, self._blocks, 0)
        activations = 0 if estimate is None else estimate(share)
        weights = (trained_type(config) or torch.float32).itemsize
        of_trained = self._trained * (weights + _FP32_BYTES + self._state_bytes)
        states = (not config.parallel.offload) * elements / divided * (of_trained + self._frozen_bytes)
        return states + layout.is_sharded * 2 * gathered + _FP32_BYTES * self._trained * whole + activations


class _Search:
    """Search over the layouts of a run on a number of processes."""

    def __init__(
        self, config: RunConfig, task: RunTask, processes: int, changes: Mapping[str, Any] | None = None
    ) -> None:
        """``changes``: values that differ from the command, by key.

        Raises:
            UserError: the time of this model or on this device is unknown.
        """
        if config.trainer.activation_memory_budget < 1:
            raise UserError(
                f"trainer.activation_memory_budget={config.trainer.activation_memory_budget:g} is not supported with "
                "plan.search=true, which chooses trainer.activation_checkpoint; use trainer.activation_memory_budget=1"
            )
        self.config, self.task = config, task
        self.processes, self.changes = processes, changes or {}
        self.machine = _Machine(config, processes)
        self.model = _Model(config, task, self.machine)
        self.valid = 0
        self._tried: list[tuple[float, Mapping[str, Any]]] = []
        """Bytes and overrides of the valid candidates."""

    def fitting(self) -> list[Candidate]:
        """Return the candidates that fit the device by the rough estimate, fastest first."""
        valid = [*filter(None, map(self._candidate, self._overrides()))]
        self.valid = len(valid)
        sizes = ((candidate.bytes, candidate.overrides) for candidate in valid)
        self._tried = sorted(sizes, key=lambda pair: pair[0])
        fitting = (self._timed(candidate) for candidate in valid if candidate.bytes <= self.machine.limit)
        return sorted(fitting, key=lambda candidate: candidate.seconds)

    def may_fit(self, whole: "_Search") -> bool:
        """Return whether one of the layouts with the least memory in the search ``whole`` fits, by the rough
        estimate."""
        candidates = filter(None, (self._candidate(overrides) for _, overrides in whole._tried))
        return any(candidate.bytes <= self.machine.limit for candidate in islice(candidates, _LEAST))

    def nearest(self) -> Candidate | None:
        """Return the candidate that needs the least memory, by the plan."""
        least = (self._candidate(overrides) for _, overrides in self._tried[:_OF_A_MESH])
        played = map(self._played, filter(None, least))
        return min(played, key=lambda candidate: candidate.bytes, default=None)

    def what_changes(self) -> list[str]:
        """Return the overrides that all candidates share, and their effects."""
        words = Fitting(self.changes, Fits(0, 0))
        return [words.words(), *words.changes()]

    def _candidate(self, overrides: Mapping[str, Any]) -> Candidate | None:
        """Return the candidate of these overrides, without its time; None if they are not valid."""
        config = _changed(self.config, overrides)
        try:
            layout, accumulation = checked_layout(config, self.processes)
            if config.trainer.compile == "auto":
                config = _compiled(config, self.machine.has_gpus and self.model.compiles(config, layout))
            self.model.check(config, layout)
        except UserError:
            return None
        job = job_of(config, self.model.shape, layout, accumulation)
        return Candidate({**self.changes, **overrides}, config, job, math.inf, self.model.rough_bytes(config, job))

    def _timed(self, candidate: Candidate) -> Candidate:
        return replace(candidate, seconds=self.machine.seconds(candidate.job, is_quick=True))

    def fastest(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Return the fastest candidates, one for each mesh, with time from the timeline and memory from the plan."""
        by_mesh: dict[object, list[Candidate]] = {}
        for candidate in found:
            layout = candidate.job.layout
            mesh = (layout.replicate, layout.context, layout.tensor, layout.pipeline, layout.expert)
            if mesh in by_mesh or len(by_mesh) < _MESHES:
                by_mesh.setdefault(mesh, []).append(candidate)
        best = []
        for of_mesh in by_mesh.values():
            played = [
                candidate
                for candidate in map(self._played, of_mesh[:_OF_A_MESH])
                if candidate.bytes <= self.machine.limit
            ]
            best += sorted(played, key=lambda candidate: candidate.seconds)[:1]
        return sorted(best, key=lambda candidate: candidate.seconds)[:_SHOWN]

    def frugal(self, found: Sequence[Candidate], shown: Sequence[Candidate]) -> list[Candidate]:
        """Return slower candidates that need 10% less memory than ``shown`` and than every faster candidate."""
        least = min(candidate.bytes for candidate in shown)
        longest = _SLOWEST * shown[0].seconds
        found = [candidate for candidate in found if candidate.seconds <= longest]
        front = [self._played(candidate) for candidate in _front(found, least)[:_SHOWN]]
        return _front(sorted(front, key=lambda candidate: candidate.seconds), least)

    def table(self, candidates: Sequence[Candidate], *, is_numbered: bool = False) -> list[str]:
        rows: list[tuple[str, ...]] = [("", "time", "tok/s/GPU", "memory", "overrides")]
        for number, candidate in enumerate(candidates, 1):
            time = f"{seconds_text(candidate.seconds)}{'?' if self.doubts(candidate) else ''}"
            rate = f"{candidate.tokens_per_second:,.0f}"
            rows.append((str(number) if is_numbered else " ", time, rate, size(candidate.bytes), candidate.words()))
        return columns(rows)

    def as_data(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "overrides": dict(candidate.overrides),
            "words": candidate.words(),
            "seconds": candidate.seconds,
            "tokens_per_second": candidate.tokens_per_second,
            "bytes": round(candidate.bytes),
            "doubts": self.doubts(candidate),
        }

    def doubts(self, candidate: Candidate) -> list[str]:
        """Return the properties of ``candidate`` that no published run covers."""
        return self.machine.doubts(candidate.job)

    def _overrides(self) -> Iterator[dict[str, Any]]:
        """Yield the overrides of each candidate, valid or not."""
        for mesh in self._meshes():
            ways = _ways(mesh.get("parallel"), mesh.get("parallel.pipeline", 1))
            for way, micro_batch, checkpoint in product(ways, MICRO_BATCHES, ("none", "selective", "full")):
                trainer = {"trainer.micro_batch": micro_batch, "trainer.activation_checkpoint": checkpoint}
                yield self._different({**mesh, **way, **trainer})

    def _meshes(self) -> Iterator[dict[str, Any]]:
        """Yield all meshes, as keys of ``parallel``."""
        plan = self.model.plan
        ranks = self.processes
        per_node = self.machine.cluster.per_node
        if ranks == 1:
            yield {}
            return
        powers = [degree for degree in divisors(ranks) if degree & (degree - 1) == 0]
        tensors = [degree for degree in powers if degree <= per_node] if plan.roles else [1]
        contexts = [degree for degree in powers if degree <= _MOST_CONTEXT] if plan.context else [1]
        pipelines = [degree for degree in divisors(ranks) if degree <= _MOST_STAGES] if plan.blocks else [1]
        yield {"parallel": "ddp", **dict.fromkeys(("parallel.tensor", "parallel.context", "parallel.pipeline"), 1)}
        for tensor, context, pipeline, expert in product(
            tensors, contexts, pipelines, powers if plan.mixtures else [1]
        ):
            if ranks % (tensor * context * pipeline):
                continue
            left, inside = ranks // (tensor * context * pipeline), max(1, per_node // (tensor * context))
            degrees = {"tensor": tensor, "context": context, "pipeline": pipeline, "expert": expert}
            mesh = {f"parallel.{axis}": degree for axis, degree in degrees.items()}
            for copies in sorted({1, max(1, left // inside), max(1, left // (8 * inside))}):
                strategy = {"parallel": "hsdp", "parallel.replicate": copies} if copies > 1 else {"parallel": "fsdp"}
                for schedule, per_rank in _SCHEDULES if pipeline > 1 else ():
                    stages = {"parallel.pipeline_schedule": schedule, "parallel.stages_per_rank": per_rank}
                    yield {**strategy, **mesh, **stages}
                if pipeline == 1:
                    yield {**strategy, **mesh}

    def _different(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the items of ``wanted`` that differ from the config."""
        strategy = wanted.get("parallel")
        is_other = strategy not in (None, self.config.parallel.strategy)
        now = _SET_BY_CHOICE[strategy] if is_other and strategy else {}
        whole = {"parallel": strategy, **_SET_BY_CHOICE[strategy], **wanted} if strategy else wanted
        return {
            key: value
            for key, value in whole.items()
            if (is_other if key == "parallel" else value != now.get(key, _value(self.config, key)))
        }

    def _played(self, candidate: Candidate) -> Candidate:
        """Return ``candidate`` with time from the timeline and memory from the plan."""
        job = candidate.job
        sizes = Sizes(candidate.config, job.layout, self.model.module, self.model.plan)
        memory = planned_memory(candidate.config, self.task, job.accumulation, sizes)
        needed = fits_of(formula_memory(memory), int(self.machine.device.memory_bytes)).needed
        return replace(candidate, seconds=self.machine.seconds(job), bytes=needed)


def _front(found: Sequence[Candidate], least: float) -> list[Candidate]:
    """Return the candidates that need at least 10% less memory than ``least`` and than all earlier candidates."""
    front: list[Candidate] = []
    for candidate in found:
        if candidate.bytes < 0.9 * least:
            front.append(candidate)
            least = candidate.bytes
    return front


def _ways(strategy: str | None, pipeline: int) -> list[dict[str, Any]]:
    """Return the overrides to try for FSDP: whether it reshards parameters after the forward, and whether it reduces
    gradients after each micro-batch."""
    if strategy is None:
        return [{}]
    key, sync = "parallel.reshard_after_forward", "parallel.sync_every_micro_batch"
    if pipeline > 1 or strategy == "ddp":
        return [{key: None, sync: False}]
    return [{key: frees, sync: syncs} for frees in (None, False) for syncs in (False, True)]


def _value(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _compiled(config: RunConfig, compiles: bool) -> RunConfig:
    """Return ``config`` with this value of ``trainer.compile``. It is not validated again, since a search creates
    thousands of configs."""
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"compile": compiles})})


def _changed(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    chosen = _SET_BY_CHOICE.get(overrides.get("parallel", ""), {})
    values = {**chosen, **overrides}
    return with_values(config, {"parallel.strategy" if key == "parallel" else key: values[key] for key in values})
