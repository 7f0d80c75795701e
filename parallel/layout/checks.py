"""Checks of a layout against the model and the batch, before torch is imported. Errors name values that work."""

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version

from serried.configs.divisors import divisors, nearest_divisors
from serried.configs.errors import UserError
from serried.configs.hugging_face.model_folder import teacher_section
from serried.configs.schema.registry import takes
from serried.configs.schema.run_config import Config
from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.mesh import (
    MODEL_AXES,
    V_SCHEDULES,
    ZERO_BUBBLE_SCHEDULES,
    Layout,
    fewest_micro_batches,
    gradient_accumulation,
    resolve_layout,
)
from serried.runtime.process import is_started

_NEEDS_A_MICRO_BATCH_PER_STAGE = ("1f1b", *V_SCHEDULES)
_WORKS_IN_ROUNDS = ("interleaved", "interleaved_zero_bubble")
_MOST_IMBALANCE = 1.1
"""Bound on the samples of the busiest rank, relative to the smallest possible, for an automatic micro-batch."""
_version_of = cache(version)  # cached, because a search checks thousands of layouts


def checked_layout(config: RunConfig, world_size: int) -> tuple[Layout, int]:
    """Return the layout of ``config`` on ``world_size`` processes, and the number of gradient accumulation steps.

    Raises:
        UserError: The configuration is inconsistent.
    """
    layout = resolve_layout(config.parallel, world_size)
    accumulation = gradient_accumulation(config.trainer, layout)
    check_layout(config, layout, accumulation)
    return layout, accumulation


def check_layout(config: RunConfig, layout: Layout, accumulation: int) -> None:
    """Check the layout against the configuration.

    Tasks without the sections ``model`` and ``data`` are checked later, when the model is sharded.

    Raises:
        UserError: The layout does not fit the model, the sequences or the batch.
    """
    section = config.parallel
    if section.sync_every_micro_batch and section.strategy == "ddp":
        raise UserError(
            "parallel.sync_every_micro_batch=true with parallel=ddp only adds communication, as replicas keep full "
            "gradients in any case; use parallel.sync_every_micro_batch=false, or parallel=fsdp"
        )
    if section.sync_every_micro_batch and accumulation > fewest_micro_batches(config.trainer, layout):
        raise UserError(
            "parallel.uneven=true with parallel.sync_every_micro_batch=true: a replica with fewer micro-batches would "
            "reduce gradients fewer times; use parallel.sync_every_micro_batch=false"
        )
    if section.offload:
        _check_offload(config, layout)
    if layout.strategy == "ddp" and layout.size(("pipeline", "expert")) > 1:
        axis = "pipeline" if layout.pipeline > 1 else "expert"
        raise UserError(
            f"parallel.{axis}={getattr(layout, axis)} is not supported with parallel=ddp; use parallel=fsdp, or "
            f"parallel=hsdp parallel.replicate={layout.replicate}"
        )
    if config.precision.gather == "float8" and section.strategy in ("single", "ddp"):
        raise UserError(
            f"precision.gather=float8 with parallel={section.strategy}: no weights are gathered; use "
            "precision.gather=bf16, or parallel=fsdp"
        )
    if config.trainer.evaluate and layout.pipeline * layout.context > 1:
        axis = "pipeline" if layout.pipeline > 1 else "context"
        raise UserError(
            f"trainer.evaluate with parallel.{axis}={getattr(layout, axis)}: no rank has the logits of full sequences; "
            f"use parallel.{axis}=1, or remove trainer.evaluate and use lm_eval on an exported model"
        )
    if takes(config.optim, "rounding"):
        _check_bf16_weights(config)
    if config.trainer.compiles:
        check_compile(config, layout)
    keeps_less = config.trainer.keeps_less
    is_split = layout.pipeline > 1 and layout.schedule in ZERO_BUBBLE_SCHEDULES
    if is_split and keeps_less and config.trainer.activation_checkpoint != "offload":
        raise UserError(
            # A trace shows 5 recomputations of a block and 7 % more memory:
            # https://github.com/pytorch/pytorch/issues/136766
            f"{keeps_less[0]} with parallel.pipeline_schedule={layout.schedule}: the schedule computes the weight "
            "gradients of a block in several passes, and each pass would recompute the block, so time and memory would "
            f"grow; use {keeps_less[1]}, or parallel.pipeline_schedule=1f1b or interleaved"
        )
    if layout.world == 1 and section.expert > 1:
        raise UserError(
            f"parallel.expert={section.expert} needs more than one process; use more processes, with parallel=fsdp"
        )
    model = getattr(config, "model", None)
    if model is not None:
        degrees = {axis: getattr(layout, axis) for axis in (*MODEL_AXES, "expert")}
        for mistake in model.layout_mistakes(degrees, sequence=layout.sequence):
            raise UserError(mistake)
    divisible = model.divisible() if model is not None else {}
    if layout.expert > 1 and divisible and not divisible.get("expert"):
        raise UserError(f"parallel.expert={layout.expert}: the model has no experts; use parallel.expert=1")
    check_experts(layout, divisible.get("expert", {}), divisible.get("expert_shard", {}))
    if layout.tensor > 1:
        _check_tensor(layout, _divided_by_tensor(config, divisible))
    if sequence_length := getattr(config.data, "sequence_length", None):
        _check_sequence(layout, sequence_length)
    if layout.pipeline > 1:
        _check_stages(layout, getattr(model, "layers", None))
        for count in {accumulation, fewest_micro_batches(config.trainer, layout)}:
            _check_micro_batches(config, layout, count)
        # A login node may have no torch, or another one than the job.
        if layout.schedule in ZERO_BUBBLE_SCHEDULES and (not config.launch.submits or is_started()):
            check_zero_bubble(layout.schedule, _version_of("torch"))


def check_zero_bubble(schedule: str, torch_version: str) -> None:
    """Raise ``UserError`` if this torch version cannot run a schedule that splits the backward."""
    # torch 2.11 fails with "_input_metadata is invalid" on autograd functions, which heads and collectives use.
    if tuple(map(int, torch_version.split(".")[:2])) < (2, 12):
        raise UserError(
            f"parallel.pipeline_schedule={schedule} needs torch 2.12 or newer, but torch {torch_version} is installed; "
            "use parallel.pipeline_schedule=1f1b or interleaved"
        )


def allowed_micro_batches(config: RunConfig, layout: Layout) -> list[int]:
    """Return the values of ``trainer.micro_batch`` that the batch and the layout allow, largest first.

    With uneven shares, values with which a rank has many more samples than necessary are left out.

    Raises:
        UserError: There is no such value.
    """
    most, allowed = gradient_accumulation(with_micro_batch(config, 1).trainer, layout), []
    per_shard = config.trainer.global_batch // layout.shard
    refused: UserError | None = None
    for samples in reversed(divisors(per_shard)):
        changed = with_micro_batch(config, samples)
        try:
            accumulation = gradient_accumulation(changed.trainer, layout)
            if accumulation * samples > _MOST_IMBALANCE * most:
                continue
            check_layout(changed, layout, accumulation)
            allowed.append(samples)
        except UserError as error:
            refused = error
    if not allowed and refused:
        raise refused
    return allowed


def with_micro_batch(config: Config, samples: int) -> Config:
    """Return ``config`` with ``trainer.micro_batch=samples``."""
    return with_values(config, {"trainer.micro_batch": samples})


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """Return ``config`` with the ``values`` of keys such as ``trainer.micro_batch``, without validation."""
    sections: dict[str, dict[str, object]] = defaultdict(dict)
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    changed = {name: getattr(config, name).model_copy(update=update) for name, update in sections.items()}
    return config.model_copy(update=changed)


def _check_offload(config: RunConfig, layout: Layout) -> None:
    if not layout.is_sharded:
        where = f"parallel={layout.strategy}" if layout.world > 1 else "one process"
        more = " on more processes" if layout.world == 1 else ""
        raise UserError(
            f"parallel.offload=true with {where}: FSDP2 offloads only sharded parameters; use parallel=fsdp{more}, or "
            "optim.offload=true"
        )
    if config.optim.offload:
        raise UserError(
            "parallel.offload=true with optim.offload=true: parallel.offload already keeps the optimizer state in "
            "host memory; use optim.offload=false"
        )
    if takes(config.optim, "matrices") or takes(config.optim, "sums"):
        raise UserError(
            f"parallel.offload=true updates on the CPU, but optim={config.optim.name} exchanges data of all parameters "
            "between ranks; use optim=adamw, or parallel.offload=false"
        )
    if config.precision.gather == "float8":
        raise UserError(
            "parallel.offload=true with precision.gather=float8: the float8 scales are computed on the device; use "
            "precision.gather=bf16"
        )
    if takes(config.optim, "rounding") and config.parallel.sync_every_micro_batch:
        raise UserError(  # torch 2.11 runs the hook that casts a gradient to fp32 during the copy to the host
            f"parallel.offload=true with optim={config.optim.name} and parallel.sync_every_micro_batch=true: gradients "
            "would be cast to fp32 while they are copied to the host; use parallel.sync_every_micro_batch=false, or "
            "optim=adamw"
        )


def _check_bf16_weights(config: RunConfig) -> None:
    trainer, how = config.trainer, f"optim={config.optim.name}"
    if config.precision.name in ("fp32", "fp16"):
        raise UserError(
            f"{how} with precision={config.precision.name}: weights stored in bf16 are multiplied in bf16; use "
            "precision=bf16, or optim=adamw"
        )
    if config.adapter.method != "none":
        raise UserError(
            f"{how} with adapter.method={config.adapter.method} saves almost no memory, as only the adapters are "
            "trained; use optim=adamw"
        )
    if trainer.ema_decay:
        raise UserError(
            f"{how} with trainer.ema_decay={trainer.ema_decay:g}: an average in bf16 would not change, as its "
            "steps are too small; use trainer.ema_decay=0, or optim=adamw"
        )


def check_compile(config: RunConfig, layout: Layout) -> None:
    """Raise ``UserError`` if blocks cannot be compiled on ``layout``."""
    if layout.pipeline > 1 and layout.schedule in ZERO_BUBBLE_SCHEDULES:
        raise UserError(
            f"trainer.compile=true with parallel.pipeline_schedule={layout.schedule}: the schedule runs the backward "
            "of a block in two passes, but torch frees the saved tensors of a compiled block after the first pass; use "
            "parallel.pipeline_schedule=1f1b or interleaved, or trainer.compile=false"
        )
    keeps_less = config.trainer.keeps_less
    if layout.context > 1 and layout.context_method == "ring" and keeps_less:
        raise UserError(
            f"trainer.compile=true with {keeps_less[0]} and parallel.context_method=ring: recomputation needs a single "
            "graph per block, but the sends and receives of the ring break the graph; use "
            f"parallel.context_method=gather, {keeps_less[1]}, or trainer.compile=false"
        )


def _divided_by_tensor(config: RunConfig, divisible: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return the sizes that ``parallel.tensor`` must divide, including the teacher's, by their description."""
    sizes = {f"{key}={size}": size for key, size in divisible.get("tensor", {}).items()}
    if config.task.has_teacher and (teacher := getattr(config.task, "teacher", None)) is not None:
        its = teacher_section(teacher).divisible().get("tensor", {})
        sizes |= {f"{key.removeprefix('model.')}={its[key]} of task.teacher={teacher}": its[key] for key in its}
    return sizes


def _check_tensor(layout: Layout, sizes: Mapping[str, int]) -> None:
    for words, size in sizes.items():
        if size % layout.tensor:
            common = math.gcd(*sizes.values())
            fitting, *others = nearest_divisors(common, layout.tensor)
            more = f" (or one of {sorted(others)})" if others else ""
            raise UserError(
                f"parallel.tensor={layout.tensor} does not divide {words}; use parallel.tensor={fitting}{more}"
            )


def check_experts(layout: Layout, experts: Mapping[str, int], widths: Mapping[str, int]) -> None:
    """Check the numbers of ``experts`` of a model, and the ``widths`` of an expert that FSDP2 may shard, by name.

    Raises:
        UserError: The layout does not fit the experts.
    """
    for key, count in experts.items():
        fitting = [degree for degree in divisors(math.gcd(layout.block, count)) if degree > 1]
        instead = " or ".join(f"parallel.expert={degree}" for degree in fitting[:4]) or "parallel.expert=1"
        if count % layout.expert:
            raise UserError(f"parallel.expert={layout.expert} does not divide {key}={count}; use {instead}")
        if layout.block % layout.expert:
            raise UserError(
                f"parallel.expert={layout.expert} does not divide the number of ranks that share experts, "
                f"{layout.block} = shard {layout.shard} x context {layout.context} x tensor {layout.tensor}; use "
                f"{instead}"
            )
        if layout.expert > 1:
            _check_expert_shards(layout, count, widths)
        if layout.tensor > 1 and not layout.sequence:
            raise UserError(
                "parallel.sequence=false with experts and parallel.tensor: each token would be sent to its experts "
                "once per tensor rank; use parallel.sequence=true"
            )


def _check_expert_shards(layout: Layout, count: int, widths: Mapping[str, int]) -> None:
    """Check the widths of experts if FSDP2 shards within experts.

    FSDP2 does so if the number of experts per rank is not a multiple of the ranks that shard them. It needs even
    shards.
    """

    def misfit(expert: int) -> str | None:
        shards = layout.block // expert
        return (
            next((key for key, width in widths.items() if width % shards), None) if count // expert % shards else None
        )

    if key := misfit(layout.expert):
        fitting = [degree for degree in divisors(math.gcd(layout.block, count)) if degree > 1 and not misfit(degree)]
        instead = " or ".join(f"parallel.expert={degree}" for degree in fitting[:4]) or "parallel.expert=1"
        raise UserError(
            f"parallel.expert={layout.expert} leaves {count // layout.expert} experts sharded over "
            f"{layout.expert_shard} ranks, but {layout.expert_shard} divides neither the number of these experts nor "
            f"{key}={widths[key]}; use {instead}"
        )


def _check_sequence(layout: Layout, length: int) -> None:
    parts = 2 * layout.context if layout.context > 1 else 1
    if length % parts:
        raise UserError(
            f"data.sequence_length={length} is not a multiple of {parts} = 2 x parallel.context {layout.context}, as "
            f"each rank has two chunks of a sequence; use data.sequence_length={_multiple(length, parts)}"
        )
    if layout.sequence and length // layout.context % layout.tensor:
        wanted = layout.tensor * max(parts, layout.context)
        part = f" / parallel.context {layout.context}" if layout.context > 1 else ""
        raise UserError(
            f"parallel.tensor={layout.tensor} does not divide data.sequence_length={length}{part}, as "
            "parallel.sequence=true requires; use parallel.sequence=false or "
            f"data.sequence_length={_multiple(length, wanted)}"
        )


def _check_stages(layout: Layout, layers: int | None) -> None:
    if layers is None:
        return
    if layers < layout.stages:
        fitting = layers // (layout.stages // layout.pipeline)
        instead = f"parallel.pipeline={fitting}" if fitting > 1 else "fewer stages"
        raise UserError(f"model.layers={layers} is less than the {layout.stages} pipeline stages; use {instead}")
    if layout.layers_of_stages and sum(layout.layers_of_stages) != layers:
        raise UserError(
            f"parallel.layers_of_stages={list(layout.layers_of_stages)} sums to {sum(layout.layers_of_stages)}, but "
            f"the model has model.layers={layers}; correct the numbers, or remove them"
        )


def _check_micro_batches(config: RunConfig, layout: Layout, accumulation: int) -> None:
    if config.parallel.sync_every_micro_batch:
        raise UserError(
            "parallel.sync_every_micro_batch=true with a pipeline: gradients are reduced at the end of a step; use "
            "parallel.sync_every_micro_batch=false"
        )
    if config.parallel.frees_after_forward and layout.schedule in ZERO_BUBBLE_SCHEDULES:
        raise UserError(  # measured: wrong gradients, silently
            f"parallel.reshard_after_forward=true with parallel.pipeline_schedule={layout.schedule}: "
            "weight gradients are computed after FSDP has freed the weights; use parallel.reshard_after_forward=false"
        )
    trainer = config.trainer

    def fits(count: int) -> bool:
        if layout.schedule in _NEEDS_A_MICRO_BATCH_PER_STAGE:
            return count >= layout.stages
        if layout.schedule in _WORKS_IN_ROUNDS:
            return count % max(1, count // layout.pipeline) == 0
        return True

    if fits(accumulation):
        return
    per_rank = trainer.global_batch // layout.data_ranks
    smaller = [size for size in divisors(per_rank) if size < trainer.micro_batch and fits(per_rank // size)]
    instead = (
        f"trainer.micro_batch={smaller[-1]}"
        if smaller
        else f"trainer.global_batch={trainer.micro_batch * layout.data_ranks * layout.stages}"
    )
    equation = (
        f"accumulation {accumulation} = global_batch {trainer.global_batch} / (micro_batch {trainer.micro_batch} x "
        f"{layout.data_ranks} data ranks)"
    )
    if layout.schedule in _WORKS_IN_ROUNDS:
        why = (
            f"cannot be divided into rounds of {layout.pipeline} or more micro-batches for "
            f"parallel.pipeline_schedule={layout.schedule}"
        )
    else:
        why = f"is less than the {layout.stages} stages of parallel.pipeline_schedule={layout.schedule}"
    raise UserError(f"{equation} {why}; use {instead}, or parallel.pipeline_schedule=gpipe")


def _multiple(size: int, of: int) -> int:
    """Return the positive multiple of ``of`` nearest to ``size``."""
    return max(1, round(size / of)) * of
