"""Plan of a run in about a dozen lines, printed before the run starts and by a dry run."""

import json
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import nn

from serried.configs.bucket_paths import with_urls
from serried.configs.formats import short, size
from serried.configs.hugging_face.quantization import quantization_in
from serried.configs.messages.invalid_values import shown
from serried.configs.requirements import install_command
from serried.configs.schema.sections import RunConfig, TrainerSection
from serried.configs.unused_keys import Run, notes
from serried.parallel.activation_checkpoint import Mix
from serried.parallel.layout.checks import with_micro_batch, with_values
from serried.parallel.layout.mesh import Layout, fewest_micro_batches
from serried.parallel.lora import ExpertAdapter, adapters_of
from serried.parallel.nf4 import whole_numel
from serried.parallel.plan import ParallelPlan
from serried.parallel.precision.float8_int8 import is_eight_bits
from serried.planner.activations.estimate import number_of_firsts, planned_mix
from serried.planner.advice import Planned, fitting
from serried.planner.auto_micro_batch import choose
from serried.planner.devices import DEVICES
from serried.planner.memory_formula import Sizes, planned_memory
from serried.planner.plan_lines import plan_lines
from serried.planner.step_plan import RESERVED_BYTES, StepPlan, plan_step
from serried.planner.time.planned_time import Timed, measured_rates, planned_device
from serried.runtime.accelerator import accelerator_type, memory_bytes
from serried.runtime.process import remembered_words
from serried.trainer.adapters import BATCH_NORMS
from serried.trainer.checkpoint.checkpoint_size import copied_bytes, saved_bytes
from serried.trainer.checkpoint.resume import Start
from serried.trainer.data.sampler import passes
from serried.trainer.memory.host_memory import tensor_bytes
from serried.trainer.model import check_model, model_to_train, with_compile
from serried.trainer.monitor.time_to_stop import estimated_save_seconds, micro_batches_per_look, seconds_to_stop
from serried.trainer.optim.optimizer import check_optimizer, learning_rate
from serried.trainer.precision import chosen_layers, frozen_type, trained_type
from serried.trainer.run_data import training_data, with_steps
from serried.trainer.task import Dataset, RunTask, needs_data_for_example

_STATISTICS = (
    "BatchNorm computes statistics over the micro-batch of each rank, and a checkpoint stores those of rank 0, "
    "so the loss depends on the layout; on GPUs use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"
)
_FP32_BYTES = 4
_LARGE_GPU_BYTES = 80 * 2**30
"""Memory of an A100 or H100, which a plan assumes on a machine without GPUs."""

_PASSES_THAT_TEACH = 16
"""Number of epochs beyond which the return falls off sharply. Up to 4 epochs are almost as good as new data
(Muennighoff et al., "Scaling data-constrained language models", 2023)."""


def overview(
    config: RunConfig,
    task: RunTask,
    accumulation: int,
    sizes: Sizes,
    place: str,
    device: str,
    start: Start | None = None,
    training: Dataset | None = None,
) -> list[str]:
    """Return the plan as a list of lines.

    Args:
        place: description of the processes and their location.
        device: type of the devices.
        training: the training data; None if it is not open.
    """
    model, plan, layout = sizes.model, sizes.plan, sizes.layout
    trainer, parallel = config.trainer, config.parallel
    parameters = sum(whole_numel(parameter) for parameter in model.parameters())
    step_weight = trainer.global_batch * task.weight_per_sample()
    mesh = layout.describe(len(plan.blocks), accumulation)
    if layout.shard * layout.context > 1:
        frees = parallel.frees_after_forward
        gathers = ", ZeRO-3 (reshards after forward)" if frees else ", ZeRO-2 (stays gathered)"
        mesh += ", ZeRO-2 (small and on a CPU: one unit)" if plan.is_one_unit else gathers
    schedule = config.schedule.with_warmup_steps(trainer.steps)
    used_for = check_optimizer(config.optim, model, plan, layout)
    place_of_state = ", state in host memory" if config.offloads_state else ""
    ratio = learning_rate(trainer.steps, trainer.steps, 1.0, schedule)
    decay = f" to {ratio:g}x" if ratio != 1 and schedule.warmup_steps < trainer.steps else ""
    short_run = " (longer than the run)" if schedule.warmup_steps >= trainer.steps else ""
    precision = [_precision(config, model, plan, layout, starts=start is not None)]
    precision += ["blocks compiled"] * trainer.compiles + list(filter(None, [task.describe_kernels(device)]))
    lines = [
        ("model", f"{task.describe_model()}; {parameters:,} parameters{_trained(config, model, task.heads())}"),
        ("mesh", f"{mesh}; {place}"),
        (
            "batch",
            f"{trainer.global_batch} samples = {trainer.micro_batch} per pass x {layout.data_ranks} "
            f"{'' if layout.data_ranks == layout.world else 'data '}rank{'s' if layout.data_ranks > 1 else ''} x "
            f"{_accumulated(trainer, layout, accumulation)}; "
            f"{step_weight:,} {task.unit} per step, {short(step_weight * trainer.steps)} in {trainer.steps:,} steps",
        ),
        ("precision", "; ".join(precision)),
        (
            "optimizer",
            f"{config.optim.name}{used_for}{place_of_state}, peak lr {config.optim.lr:g}, {schedule.name}{decay}, "
            f"warm-up {schedule.warmup_steps} steps{short_run}, "
            + (f"clip at norm {trainer.max_grad_norm:g}" if trainer.max_grad_norm else "no clipping")
            + (f"; evaluates and saves averaged weights, decay {trainer.ema_decay:g}" if trainer.ema_decay else ""),
        ),
        ("memory", _memory(config, task, accumulation, sizes)),
        *([("reference", text)] if (text := task.describe_reference()) else []),
        ("data", _data(task, training) + (_passes(config, training) if training is not None else "")),
        *([("evaluate", _benchmarks(trainer))] if trainer.evaluate else []),
        ("save", _saving(config, layout, model, plan, device)),
        ("run", f"{config.run.place}, {_beginning(config, start)}" if start else config.run.place),
    ]
    if training is not None:
        lines += [("WARNING", text) for text in _repetitions(config, training) if task.unit == "tokens"]
    if layout.data_ranks > 1 and any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        lines.append(("WARNING", _STATISTICS))
    is_new = config.checkpoint.resume in ("auto", "never") if start is None else start.source is None
    lines += [("WARNING", text) for text in task.notes(is_new)]
    lines += [("note", text) for text in _notes_on_length(config, layout)]
    return [f"{name:<10} {text}" for name, text in lines]


def _accumulated(trainer: TrainerSection, layout: Layout, most: int) -> str:
    fewest = fewest_micro_batches(trainer, layout)
    return f"{most} accumulated" if fewest == most else f"{fewest} or {most} accumulated (uneven: a step takes {most})"


def _notes_on_length(config: RunConfig, layout: Layout) -> list[str]:
    """Return notes on command-line keys that have no effect once ``trainer.epochs`` is converted to steps."""
    if config.trainer.epochs is None:
        return []
    by_steps = config.model_copy(update={"trainer": config.trainer.model_copy(update={"epochs": None})})
    words = remembered_words()
    printed = notes(words, [Run(config, layout)])
    return [note for note in notes(words, [Run(by_steps, layout)]) if note not in printed]


def _benchmarks(trainer: TrainerSection) -> str:
    documents = trainer.eval_batches * trainer.global_batch
    return (
        f"{', '.join(trainer.evaluate)}: at most {documents:,} documents per task, every {trainer.evaluates_every:,} "
        f"steps; the line memory does not include the logits of {trainer.micro_batch} full requests"
    )


def _unchecked_benchmarks(trainer: TrainerSection) -> list[str]:
    """Return a line if the names in ``trainer.evaluate`` cannot be checked here. Raises ``UserError`` if one is
    wrong."""
    if not trainer.evaluate:
        return []
    if find_spec("lm_eval") is None:
        library = f"the library lm-eval, which is not installed here; use: {install_command('eval')}"
        return [f"WARNING    trainer.evaluate={shown(trainer.evaluate)} is not checked: a run needs {library}"]
    from serried.trainer.evaluation.lm_eval import check_names

    check_names(trainer.evaluate)
    return []


def chosen(config: RunConfig, task: RunTask, layout: Layout) -> tuple[RunConfig, str]:
    """Return ``config`` with the chosen ``trainer.micro_batch`` for the planned device, and a line that reports it."""
    launch, capacity = config.launch, _capacity(config)
    if launch.names_gpu or (launch.device == "auto" and (launch.submits or accelerator_type() is not None)):
        capacity = _gpu_bytes(config)
    usable = capacity - RESERVED_BYTES if capacity else tensor_bytes(processes=launch.processes or layout.world)
    samples, line = choose(config, task, layout, usable, "cuda" if capacity else "cpu")
    return with_micro_batch(config, samples), line


def planned_compile(config: RunConfig, task: RunTask, layout: Layout) -> RunConfig:
    """Return ``config`` with a value for ``trainer.compile=auto`` on the planned device."""
    is_on_gpu = _capacity(config) is not None and _device_type(config) != "cpu"
    return with_compile(config, task, layout, "cuda" if is_on_gpu else "cpu")[0]


def dry_run(config: RunConfig, task: RunTask, layout: Layout, accumulation: int, why: str = "") -> str:
    """Return the plan of a run without starting it. ``why``: line that reports the chosen micro-batch."""
    trainer = config.trainer
    if trainer.epochs is not None or (trainer.activation_memory_budget < 1 and needs_data_for_example(task)):
        task.open_data(task.prepare(lambda _: None))
    if trainer.epochs is not None:  # the number of steps depends on the data
        config = with_steps(config, training_data(task))
    device = _device_type(config)
    built = model_to_train(config, task, device)
    check_model(config, built.module, built.plan, layout)
    sizes = Sizes(config, layout, built.module, built.plan)
    place = f"planned for {layout.world} process{'es' if layout.world > 1 else ''}"
    lines = [*[why] * bool(why), *overview(config, task, accumulation, sizes, place, device)]
    lines += _unchecked_benchmarks(trainer)
    if config.plan.model_fields_set:
        planned = plan_of(config, task, accumulation, sizes)
        if config.plan.as_json:
            batch = {"micro_batch": config.trainer.micro_batch, "accumulation": accumulation}
            return json.dumps(batch | planned.as_data())
        lines += [f"{name:<10} {text}" for name, text in plan_lines(config, task, planned)]
    needed, limit = planned_memory(config, task, accumulation, sizes).total, _gpu_bytes(config)
    if _is_for_gpus(config) and needed > limit:
        if config.launch.processes is None and layout.world == 1:
            remedy = "to plan for a node of 8 GPUs: launch.processes=8"
        else:
            remedy = fitting(Planned(config, task, layout.world, device), limit)
        much = f"{size(needed)} per rank are more than the {size(limit)} of a GPU"
        lines.append(f"WARNING    does not fit: {much}; {remedy}")
    return "\n".join([*lines, "dry run: no model was allocated and no process started"])


def _device_type(config: RunConfig) -> str:
    """Return the type of the planned device: this machine's, unless the run or the plan is for another machine."""
    is_here = not config.launch.submits and not config.plan.model_fields_set
    is_cpu = config.launch.device == "auto" and is_here and accelerator_type() is None
    return "cpu" if is_cpu else config.launch.device


def _is_for_gpus(config: RunConfig) -> bool:
    return config.parallel.strategy in ("fsdp", "hsdp") and config.launch.device != "cpu"


def plan_of(config: RunConfig, task: RunTask, accumulation: int, sizes: Sizes) -> StepPlan:
    is_timed = _is_for_gpus(config) or bool(config.plan.model_fields_set - {"mode", "as_json"})
    return plan_step(config, task, accumulation, sizes, _capacity(config), is_timed=is_timed)


def _capacity(config: RunConfig) -> int | None:
    """Return the memory in bytes of the planned GPU; None if no GPU is planned for."""
    named = config.plan.device or config.plan.memory
    has_gpu = measured_rates(config).is_gpu if config.plan.rates else _is_for_gpus(config) or named
    return _gpu_bytes(config) if has_gpu else None


def _gpu_bytes(config: RunConfig) -> int:
    if config.plan.memory_bytes:
        return config.plan.memory_bytes
    if (config.plan.device or config.plan.rates) and (device := planned_device(config)):
        return int(device.memory_bytes)
    return _LARGE_GPU_BYTES if (kind := accelerator_type()) is None else memory_bytes(torch.device(kind, 0))[1]


def _data(task: RunTask, training: Dataset | None) -> str:
    return task.describe_data() or (f"{len(training):,} samples" if training is not None else "defined by the task")


def _passes(config: RunConfig, training: Dataset) -> str:
    each = passes(training, config.trainer.steps * config.trainer.global_batch)
    if not each:
        return ""
    numbers = ", ".join(
        f"{name} {number:{',.0f' if number >= 100 else ',.2g'}}".strip() for name, number in each.items()
    )
    return f"; {numbers} epoch{'s' if numbers != '1' else ''} in {config.trainer.steps:,} steps"


def _repetitions(config: RunConfig, training: Dataset) -> list[str]:
    each = passes(training, config.trainer.steps * config.trainer.global_batch)
    return [
        f"{f'source {name}' if name else 'the training data'} is repeated {number:,.0f} times in "
        f"{config.trainer.steps:,} steps; more than about {_PASSES_THAT_TEACH} repetitions hardly improve a model "
        f"(arXiv 2305.16264); use more data{', a lower weight' if name else ''} or fewer steps"
        for name, number in each.items()
        if number > _PASSES_THAT_TEACH
    ]


def _trained(config: RunConfig, model: nn.Module, heads: Sequence[str]) -> str:
    counts = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    whole = sum(whole_numel(parameter) for parameter in model.parameters())
    if sum(counts) == whole:
        return ""
    section, what = config.adapter, ""
    if section.method != "none":
        adapters = adapters_of(model)
        stacks = [adapter for adapter in adapters if isinstance(adapter, ExpertAdapter)]
        ranks = sorted({section.rank, *section.rank_pattern.values()})
        rank = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        shared = sum(adapter.index == 0 for adapter in stacks)  # matrices that share A are counted once
        counts_by_kind = {"layers": len(adapters) - len(stacks), "stacks of experts": shared}
        where = " and ".join(f"{count} {kind}" for kind, count in counts_by_kind.items() if count)
        what = f": {section.method} of {rank}, alpha {section.alpha:g}, in {where}"
        what += ", and the new head" if heads else ""
        what += f", and {', '.join(section.modules_to_save)} in full" if section.modules_to_save else ""
        tokens = len(section.trainable_token_indices)
        what += f", and the embedding rows of {tokens:,} tokens" if tokens else ""
    return f", of which {sum(counts):,} ({sum(counts) / whole:.2%}) are trained{what}"


def planned_stop_seconds(
    config: RunConfig, task: RunTask, layout: Layout, accumulation: int, node_bytes_per_second: float | None = None
) -> float | None:
    """Return the seconds from a request to stop until the run is saved, on GPUs of ``slurm.gpu_type``; None if the step
    time there is unknown.

    ``node_bytes_per_second``: bandwidth of a node to the storage, if known.
    """
    gpu = config.slurm.gpu_type and config.slurm.gpu_type.lower()
    if gpu and gpu not in DEVICES:
        return None
    config = with_values(config, {"plan.device": gpu, "plan.mode": "formula"})
    built = model_to_train(config, task, "cuda")
    sizes = Sizes(config, layout, built.module, built.plan)
    time = plan_step(config, task, accumulation, sizes, None, is_timed=True).time
    if not isinstance(time, Timed):
        return None
    nbytes = saved_bytes(config, built.module, built.plan)
    save_seconds = estimated_save_seconds(nbytes, layout.world)
    if node_bytes_per_second is not None:
        save_seconds = nbytes / (config.launch.nodes or 1) / node_bytes_per_second
    step_seconds = time.range[1]
    per_look = micro_batches_per_look(step_seconds, accumulation) if layout.pipeline == 1 else None
    look_seconds = step_seconds * per_look / accumulation if per_look else None
    return seconds_to_stop(step_seconds, save_seconds, look_seconds=look_seconds, is_delayed=True)


def _saving(config: RunConfig, layout: Layout, model: nn.Module, plan: ParallelPlan, device: str) -> str:
    checkpoint = config.checkpoint
    rest = [f"keeps the last {checkpoint.keep}"]
    rest += [f"one every {checkpoint.keep_every} steps permanently"] if checkpoint.keep_every else []
    rest += ["the best"] if checkpoint.keep_best else []
    intervals = [f"{checkpoint.every} steps"] * (checkpoint.every > 0)
    intervals += [f"{checkpoint.minutes_between} minutes"] * (checkpoint.minutes_between > 0)
    when = f"every {' or '.join(intervals)} and at the end" if intervals else "at the end"
    whole = saved_bytes(config, model, plan)
    copied = copied_bytes(config, model, plan, device) / layout.world
    copy = f" (copies {size(copied)} per rank to host memory)" if copied else ""
    return f"{when}, {checkpoint.mode}{copy}, {size(whole)} each; {', '.join(rest)}"


def _beginning(config: RunConfig, start: Start) -> str:
    if start.checkpoint is not None:
        return f"resuming from {config.run.shown(start.checkpoint)} at step {start.step}"
    given = []
    if start.weights is not None:
        quantization = quantization_in(start.weights)
        how = f", dequantized from {quantization.method}," if quantization else ""
        given.append(f"the weights of {with_urls(str(start.weights))}{how}")
    given += [f"the adapters of {config.adapter.path or start.adapters}"] if start.adapters is not None else []
    return f"step 0 with {' and '.join(given)}".rstrip(",") if given else "step 0"


def _precision(config: RunConfig, model: nn.Module, plan: ParallelPlan, layout: Layout, *, starts: bool) -> str:
    name = config.precision.name
    chosen, rounded = chosen_layers(config, model, plan, layout), ""
    if chosen and not is_eight_bits(name):
        rounded = f"; rounded as by {config.precision.quantize_aware} in {chosen.describe()}"
    if name == "fp32":
        return f"fp32{rounded}"
    is_on_cpu = starts and (config.launch.device == "cpu" or accelerator_type() is None)
    products = f"{name} products{rounded}"
    if is_on_cpu and not is_eight_bits(name) and torch.backends.cpu.get_cpu_capability() == "AVX2":
        products += " (many times slower than precision=fp32 on this CPU)"  # oneDNN needs AVX-512 for 16-bit dtypes
    if chosen and is_eight_bits(name):
        recipe = [config.precision.scaling, *["gathered in float8"] * (config.precision.gather == "float8")]
        how = ", ".join(recipe * (name == "float8") + ["emulated on this CPU"] * is_on_cpu)
        products += f"{f' ({how})' * bool(how)} in {chosen.describe()}, bf16 products elsewhere"
    extra = f", loss scale from {config.precision.initial_scale:g}" if name == "fp16" else ""
    held = "bf16 parameters, rounded stochastically; fp32" if trained_type(config) else "fp32 parameters,"
    if config.adapter.method != "none":
        held = f"frozen weights in {'bf16' if frozen_type(config, plan) else 'fp32'}; fp32 adapters,"
        if config.adapter.quantize != "none":
            held = f"frozen linear layers in {config.adapter.quantize}, other {held}"
    return f"{products}; {held} gradient sums and optimizer state{extra}"


def _memory(config: RunConfig, task: RunTask, accumulation: int, sizes: Sizes) -> str:
    memory, trainer = planned_memory(config, task, accumulation, sizes), config.trainer
    layout, plan = sizes.layout, sizes.plan
    note = ""
    may_sum_each = layout.pipeline == 1 and layout.strategy != "ddp"
    if memory.gradients_while_accumulating and may_sum_each:
        note = f" (unsharded while accumulating; {size(memory.gradients)} with parallel.sync_every_micro_batch=true)"
    here = {
        "parameters": (memory.parameters, ""),
        "gradients": (memory.gradients + memory.gradients_while_accumulating, note),
        "optimizer state": (memory.optimizer_state, ""),
        "gathered": (memory.gathered, ""),
    }
    is_shown = {kind: value or not (memory.on_host or kind == "gathered") for kind, (value, _) in here.items()}
    parts = [f"{kind} {size(value)}{more}" for kind, (value, more) in here.items() if is_shown[kind]]
    activations = f"activations about {size(memory.activations)}" if memory.activations else "activations not estimated"
    if trainer.keeps_less:
        plain = with_values(config, {"trainer.activation_checkpoint": "none", "trainer.activation_memory_budget": 1.0})
        less = planned_memory(plain, task, accumulation, sizes).activations - memory.activations
        mix = planned_mix(config, task, layout, plan, sizes.model)
        how = _mixed(mix, layout, len(plan.blocks_in(sizes.model))) if mix else _checkpointing(trainer)
        activations += f" ({how}{f', {size(less)} less' * (less > 0)})"
    apart = "" if memory.is_of_parts else "; not all at the same time"
    apart += "".join(f"; {kind} {size(value)}" for kind, value in memory.apart.items())
    return f"{size(memory.total)} per rank: {', '.join(parts)}, {activations}{apart}"


def _mixed(mix: Mix, layout: Layout, blocks: int) -> str:
    """Describe the modes with which blocks stay within an activation memory budget."""
    firsts = number_of_firsts(mix, layout, blocks, range(layout.stages))
    first, rest = mix.kept
    kept = (firsts * first + (blocks - firsts) * rest) / blocks
    others = f", {blocks - firsts} {mix.rest if mix.rest != 'none' else 'unchanged'}" if firsts < blocks else ""
    return f"within the budget: {firsts} blocks {mix.first}{others}, keeping {kept:.2f} of all activations"


def _checkpointing(trainer: TrainerSection) -> str:
    """Describe the activation checkpointing of a run."""
    every, mode = trainer.activation_checkpoint_every, trainer.activation_checkpoint
    blocks = f"1 of {every} blocks" if every > 1 else "blocks"
    if mode == "offload":
        return f"{mode}: {blocks} keep them in host memory"
    return f"{mode}: {blocks} {'' if mode == 'full' else 'partly '}recomputed in the backward"
