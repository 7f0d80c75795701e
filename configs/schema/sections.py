"""Sections that every run has, and ``RunConfig``, which contains them.

Types of keys are in ``fields.py``, the sections of data in ``data.py``, of model families in ``models.py`` and in
``recipes/models/``, of launching, recovery, planning, profiling and tracking in ``launch_plan_track.py``, of Slurm in
``slurm.py``.

Hydra composes YAML and the command line into a plain dict; ``RunConfig`` validates it and is frozen: nothing changes it
afterwards. Checks that need the number of processes are in ``parallel.layout.mesh``; checks that need files are in the
code that opens the files.
"""

import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, field_serializer, model_validator

from serried.configs.bucket_paths import with_urls
from serried.configs.bucket_urls import check_bucket_url, is_bucket_url
from serried.configs.schema.fields import (
    SCRATCH,
    Count,
    CountOrAuto,
    CountOrZero,
    Degree,
    Number,
    PathOrUrl,
    PositiveCount,
    RunPath,
    Section,
    Size,
)
from serried.configs.schema.kubernetes import KubernetesSection
from serried.configs.schema.launch_plan_track import (
    LaunchSection,
    PlanSection,
    ProfileSection,
    RecoverSection,
    TrackSection,
)
from serried.configs.schema.skypilot import SkypilotSection
from serried.configs.schema.slurm import SlurmSection

Schedule = Literal["gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"]
"""Pipeline schedules."""


class RunSection(Section):
    """Name and folder of the run."""

    name: str = Field(min_length=1, pattern=r"^[^/\s\x00-\x1f\x7f]+$")
    """Name of the run; by default the recipe's name."""
    dir: RunPath
    """Run folder, relative to the current folder, or ``s3://BUCKET/PATH`` (also ``gs://`` and ``az://``). It has no
    timestamp, so the same command finds it again."""
    _url: str | None = PrivateAttr(None)

    @property
    def url(self) -> str | None:
        """URL of a run in a bucket, whose ``dir`` is this node's scratch folder; None for a run in a folder."""
        return self._url

    @property
    def place(self) -> str:
        """The run folder as the user gave it, for messages: a URL or a path."""
        return self._url or str(self.dir)

    @property
    def another_disk(self) -> str:
        """Setting that chooses another disk for the files that ``dir`` holds, for messages."""
        return "run.dir=FOLDER" if self._url is None else f"{SCRATCH}=FOLDER"

    def shown(self, path: Path | None) -> str:
        """Return a path for messages: with the URL in place of the scratch folder of a run in a bucket."""
        if self._url is None or path is None or not path.is_relative_to(self.dir):
            return with_urls(str(path))
        return f"{self._url}/{path.relative_to(self.dir)}"

    @model_validator(mode="wrap")
    @classmethod
    def _keep_address(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        section = validate(values)
        given = values.get("dir") if isinstance(values, dict) else None
        if is_bucket_url(given):
            section._url = check_bucket_url(str(given), "run.dir")
        return section

    @field_serializer("dir")
    def _address_or_folder(self, folder: Path) -> Path | str:
        return self._url or folder


TRAINING = "train"
"""Name of the training data among the data sets of a recipe."""
DEFAULT_VALIDATION = "validation"
"""Name of the validation set taken from the training data."""
COMPARES_NOTHING = (
    "needs validation data held out from training, but data.validation_fraction=0 holds out none; use "
    "data.validation_fraction=0.05"
)
"""End of the message that refuses a key if a run ``lacks_validation``."""
WHOLE = "all of data"
"""Name of a data set with all documents, without a validation split. It contains spaces, so no name chosen by a user
equals it."""


class ParallelSection(Section):
    """Parallel layout: ``pipeline x replicate x shard x context x tensor`` is the number of processes."""

    strategy: Literal["single", "ddp", "fsdp", "hsdp"]
    """``ddp`` replicates the model, ``fsdp`` shards it, ``hsdp`` replicates groups of shards. One process is always
    ``single``."""
    replicate: Degree = 1
    """Number of replicas of the model; -1: all remaining processes."""
    shard: Degree = 1
    """Number of ranks that one replica is sharded over; -1: all remaining processes."""
    context: Degree = 1
    """Number of ranks that each sequence is sharded over; -1: all remaining processes."""
    tensor: Degree = 1
    """Number of ranks that each matrix of a block is sharded over; -1: all remaining processes."""
    pipeline: Degree = 1
    """Number of ranks that the blocks are distributed over, in stages; -1: all remaining processes."""
    expert: Annotated[Count, Field(ge=1, le=10**6)] = 1
    """Number of ranks that the experts of a mixture are distributed over. They are taken from the shard, context and
    tensor ranks, whose product it must divide."""
    sequence: bool = True
    """Shard activations along the sequence between layers with ``tensor`` parallelism; false replicates them."""
    context_method: Literal["gather", "ring"] = "gather"
    """Exchange of keys and values between ``context`` ranks: all-gather, or a ring (less memory, more messages)."""
    pipeline_schedule: Schedule = "1f1b"
    """Order of the forward and backward passes of the micro-batches in a ``pipeline``."""
    stages_per_rank: Annotated[Count, Field(ge=1, le=1000)] | None = None
    """Number of ``pipeline`` stages on each rank. Null: 1, or 2 for schedules with several stages per rank."""
    layers_of_stages: tuple[Annotated[Count, Field(ge=1, le=1000)], ...] | None = None
    """Number of blocks in each ``pipeline`` stage; null: split evenly, with fewer in the last stages."""
    reshard_after_forward: bool | None = None
    """Free gathered parameters after forward (ZeRO-3); false keeps them (ZeRO-2: faster, more memory). Null: true, but
    false with ``pipeline``, which would gather again for each micro-batch. If it is null on a CPU, parameters of less
    than 1 GiB in total are gathered as one unit."""
    uneven: bool = False
    """Allow replicas to train different numbers of micro-batches of a global batch, at most one more than others, such
    as 1024 samples on 7 replicas. The slowest replicas determine the time of a step."""
    sync_every_micro_batch: bool = False
    """Reduce gradients after each micro-batch: saves the memory of unsharded gradients, costs communication."""
    offload: bool = False
    """Keep the shards of parameters and gradients and the optimizer state in host memory, and update them on the CPU:
    least GPU memory, slow steps."""

    @property
    def frees_after_forward(self) -> bool:
        """``reshard_after_forward``, with null replaced by the default."""
        return self.pipeline == 1 if self.reshard_after_forward is None else self.reshard_after_forward


class PrecisionSection(Section):
    """Arithmetic of forward and backward. Gradient sums and optimizer state are always fp32. Parameters are fp32 too,
    except with ``optim=adamw_bf16``."""

    free = ("gather",)

    name: Literal["fp32", "bf16", "fp16", "float8", "int8"]
    """Dtype of matrix products; ``float8`` and ``int8`` apply to the linear layers of the blocks, with bf16
    elsewhere."""
    scaling: Literal["rowwise", "tensorwise", "rowwise_with_gw_hp"] = "rowwise"
    """Scales of ``float8``: one per row, one per tensor (faster, less accurate), or one per row with weight gradients
    computed in bf16."""
    gather: Literal["bf16", "float8"] = "bf16"
    """Dtype in which FSDP gathers the weights of ``float8`` layers with ``scaling=tensorwise``. ``float8`` sends half
    the bytes, with bitwise identical results."""
    quantize_aware: Literal["none", "int8_dynamic_int4", "int4_weight_only"] = "none"
    """Quantization-aware training of the linear layers of the blocks: 4-bit weights in groups of 32.
    ``int8_dynamic_int4`` also quantizes inputs to 8 bits, per token. Checkpoints are not quantized."""
    initial_scale: Number = Field(default=65536.0, ge=1e-30, le=1e30)
    """Initial loss scale of ``fp16``."""
    growth_interval: PositiveCount = 2000
    """Number of steps without overflow after which the loss scale of ``fp16`` doubles."""

    def _mistakes(self) -> Iterator[str]:
        for key, name in {"scaling": "float8", "initial_scale": "fp16", "growth_interval": "fp16"}.items():
            if self.name != name and (value := getattr(self, key)) != type(self).model_fields[key].default:
                yield f"precision.{key}={value} has an effect only with precision={name}; add it, or leave this key out"
        if self.gather == "float8" and (self.name, self.scaling) != ("float8", "tensorwise"):
            given = f"precision.scaling={self.scaling}" if self.name == "float8" else f"precision={self.name}"
            yield (
                f"precision.gather=float8 is not supported with {given}: FSDP gathers weights in float8 only if each "
                "has a single scale; use precision=float8 precision.scaling=tensorwise, or precision.gather=bf16"
            )


class ParameterGroup(Section):
    """Parameters of the model that are trained differently from the rest."""

    parameters: str = Field(min_length=1)
    """Pattern of parameter names, as in ``decoder.*`` or ``*.bias``. A parameter belongs to the first group that
    matches."""
    lr_scale: Number = Field(default=1.0, ge=0)
    """Multiplier on ``optim.lr``."""
    weight_decay: Annotated[Number, Field(ge=0)] | None = None
    """Weight decay, also of vectors; null: ``optim.weight_decay`` for matrices and 0 for vectors."""
    frozen: bool = False
    """Do not train these parameters: no gradient, no optimizer state."""


class OptimSection(Section):
    """Keys common to all optimizers. Each optimizer adds its own."""

    free = ("offload",)

    name: str = "adamw"
    """Name of the optimizer; ``optim=NAME`` sets it."""
    lr: Number = Field(ge=0)
    """Peak learning rate."""
    weight_decay: Number = Field(default=0.1, ge=0)
    """Weight decay, multiplied by the learning rate. Applied to matrices only, not to vectors such as norms and
    biases."""
    groups: dict[str, ParameterGroup] = Field(default_factory=dict)
    """Parameter groups with their own learning rate or weight decay, or frozen, under names you choose."""
    offload: bool = False
    """Keep the optimizer state in host memory: same results, less GPU memory, slower updates."""

    def _mistakes(self) -> Iterator[str]:
        betas = getattr(self, "betas", ())
        if not all(0 <= beta < 1 for beta in betas):
            yield f"optim.betas={list(betas)}: both must be at least 0 and below 1; e.g. optim.betas=[0.9,0.95]"


class AdapterSection(Section):
    """Low-rank adapters: the weights of the model are frozen, and two small matrices are trained for each adapted
    weight."""

    method: Literal["none", "lora", "dora"] = "none"
    """``none`` trains the model itself, ``lora`` trains adapters, ``dora`` also trains the norm of each weight row."""
    rank: Annotated[Count, Field(ge=1, le=10**5)] = 16
    """Rank of the weight update."""
    alpha: Number = Field(default=32.0, gt=0, le=10**6)
    """The weight update is multiplied by alpha / rank."""
    dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the adapter inputs."""
    scale: Literal["standard", "rslora"] = "standard"
    """``rslora`` multiplies by alpha / sqrt(rank) instead, for large ranks (arXiv 2312.03732)."""
    init: Literal["uniform", "orthogonal"] = "uniform"
    """Initial values. ``uniform``: the second matrix is zero; ``orthogonal``: neither is zero, but their product is."""
    quantize: Literal["none", "nf4"] = "none"
    """``nf4``: store the frozen linear layers of the blocks in 4 bits (QLoRA)."""
    modules: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    """Linear layers and stacked experts to adapt, by name or pattern, such as ``[q_proj,v_proj]``, ``['*.layers.3.*']``
    or ``[experts.down_proj]``; null: all linear layers of the blocks."""
    modules_to_save: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Modules to train in full, in addition to the adapters, by name or pattern, such as ``[embed_tokens,lm_head]``."""
    trainable_token_indices: tuple[Annotated[int, Field(ge=0, le=10**7)], ...] = ()
    """Ids of tokens whose rows in the embedding and the head are trained, in addition to the adapters."""
    rank_pattern: dict[str, Annotated[Count, Field(ge=1, le=10**5)]] = Field(default_factory=dict)
    """Values that replace ``rank``, by name or pattern of the layer, such as ``{down_proj: 8}``. The first match
    applies."""
    alpha_pattern: dict[str, Annotated[Number, Field(gt=0, le=10**6)]] = Field(default_factory=dict)
    """Values that replace ``alpha``, by name or pattern of the layer. The first match applies."""
    path: PathOrUrl | None = Field(default=None, min_length=1, max_length=4096)
    """Adapters to start from: a PEFT folder, a run or a checkpoint with adapters, or a name on the Hub. All other keys
    of ``adapter`` except ``quantize`` are taken from there."""
    merge: bool = False
    """First merge the adapters of ``path`` into the base model. The run then trains new adapters with this command's
    settings on the merged model, or the merged model itself with ``adapter=none``."""

    def _mistakes(self) -> Iterator[str]:
        if self.quantize != "none" and self.method != "lora":
            yield (
                f"adapter.quantize={self.quantize} is not supported with adapter.method={self.method}: quantized "
                "weights can only be trained with LoRA adapters; use adapter=lora, or adapter.quantize=none"
            )
        if self.merge and self.path is None:
            yield "adapter.merge=true names no adapters to merge; use adapter.path=FOLDER, or adapter.merge=false"
        odd = [rank for rank in (self.rank, *self.rank_pattern.values()) if rank % 2]
        if self.init == "orthogonal" and odd:
            yield f"adapter.init=orthogonal needs even ranks, but one is {odd[0]}; use adapter.init=uniform"
        if self.init != "uniform" and self.path is not None and not self.merge:
            yield f"adapter.init={self.init} has no effect with adapter.path, whose values are loaded; leave it out"
        names = ["rank", "alpha", "dropout", "scale", "init", "modules", "modules_to_save"]
        names += ["rank_pattern", "alpha_pattern", "trainable_token_indices"]
        if len({*self.trainable_token_indices}) < len(self.trainable_token_indices):
            yield "adapter.trainable_token_indices names a token twice; name each once"
        for name in names if self.method == "none" else ():
            if (value := getattr(self, name)) != type(self).model_fields[name].get_default(call_default_factory=True):
                shown = f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else value
                given = f"adapter.{name}={shown}"
                yield f"{given} has no effect with adapter.method=none; use adapter=lora, or leave it out"


class ScheduleSection(Section):
    """Keys common to all schedules. The learning rate is a pure function of the step, after a linear warm-up."""

    name: str
    """Name of the schedule; ``schedule=NAME`` sets it."""
    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises from near 0 to ``optim.lr``."""
    warmup_ratio: Number | None = Field(default=None, ge=0, le=1)
    """Warm-up as a fraction of all steps, rounded up; replaces ``warmup_steps``."""

    def with_warmup_steps(self, steps: int) -> Self:
        """Return the section for a run of ``steps`` steps, with ``warmup_ratio`` converted to ``warmup_steps``."""
        if self.warmup_ratio is None:
            return self
        warmup_steps = math.ceil(Fraction(repr(self.warmup_ratio)) * steps)
        return self.model_copy(update={"warmup_steps": warmup_steps, "warmup_ratio": None})


HARNESS = "lm_eval:"
"""Prefix of the names of tasks of lm-evaluation-harness."""


class TrainerSection(Section):
    """Training loop. A step is one optimizer step; batches are counted in sequences."""

    free = (
        "epochs", "micro_batch", "deterministic", "log_every", "eval_every", "eval_batches", "evaluate",
        "early_stopping_patience", "stop_at", "max_minutes", "sample_tokens", "activation_checkpoint",
        "activation_checkpoint_every", "activation_memory_budget", "compile", "compile_mode",
    )  # fmt: skip

    steps: PositiveCount
    """Total number of optimizer steps of the run."""
    epochs: Annotated[Number, Field(gt=0, le=10**6)] | None = None
    """Passes over the training data, instead of ``steps``; rounded up to full steps."""
    global_batch: Size
    """Samples per optimizer step, over all processes and micro-batches."""
    micro_batch: CountOrAuto
    """Samples per forward pass on one process; ``auto``: the most that fit in memory. Accumulation = global_batch /
    (micro_batch x data ranks)."""
    activation_checkpoint: Literal["none", "full", "selective", "offload"] = "none"
    """Activations that blocks keep for the backward pass. ``none``: all of them; ``full``: only the inputs of blocks,
    the rest is recomputed; ``selective``: also half of the matrix products and attention; ``offload``: all of them, in
    host memory. The results are the same."""
    activation_checkpoint_every: PositiveCount = 1
    """Apply ``activation_checkpoint`` to every second (2), third (3) ... block; the others keep everything."""
    activation_memory_budget: Number = Field(default=1.0, gt=0, le=1)
    """Limit on the activations that blocks keep for the backward pass, as a fraction of ``activation_checkpoint=none``.
    To stay below it, some blocks are ``selective`` or ``full``. The results are the same. 1: no limit."""
    ema_decay: Number = Field(default=0.0, ge=0, le=0.999999)
    """Decay of an exponential moving average of the weights, such as 0.999; 0: none. Evaluations and checkpoints use
    the average; training continues from the weights, which are saved too."""
    compile: bool | Literal["auto"] = False
    """Compile each block with ``torch.compile`` when training first runs it. Needs a C++ compiler; on a GPU Triton.
    ``auto``: compile on GPUs, if possible."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """``mode`` of ``torch.compile``; torch's default when null."""
    max_grad_norm: Number = Field(default=1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 turns clipping off."""
    seed: Annotated[Count, Field(ge=0, lt=2**63)] = 1
    """Seed of the initial weights and the sample order."""
    deterministic: bool = False
    """Make two runs of one command bitwise equal. Operations that cannot be deterministic are refused."""
    log_every: CountOrZero = 10
    """Steps between log lines; 0: none."""
    eval_every: CountOrZero | None = None
    """Steps between evaluations on the validation data, also at the last step; 0: none. Null: a tenth of the run."""
    eval_batches: PositiveCount = 8
    """Number of validation batches of ``global_batch`` samples per evaluation; fewer if the data has fewer."""
    evaluate: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness, such as ``[lm_eval:arc_easy]``, scored at each evaluation on at most
    ``eval_batches`` x ``global_batch`` documents; a path to a ``.yaml`` is your own task."""
    early_stopping_patience: CountOrZero = 0
    """Finish after this many evaluations in a row without a better ``checkpoint.best_metric``; 0: never."""
    stop_at: PositiveCount | None = None
    """Save and stop after this step, to resume later; the learning rate schedule still spans ``steps``."""
    max_minutes: Annotated[Number, Field(gt=0)] | None = None
    """Save and stop this many minutes after the start; the same command resumes."""
    sample_tokens: CountOrZero = 0
    """Tokens of text to generate from the trained model at the end; 0: none."""

    def _mistakes(self) -> Iterator[str]:
        for name in self.evaluate:
            if not name.removeprefix(HARNESS) or not name.startswith(HARNESS):
                known = name.rpartition(":")[2] or "arc_easy"
                yield f"trainer.evaluate={name} is not a known evaluation; use trainer.evaluate=[{HARNESS}{known}]"
        if self.evaluate and self.eval_every == 0:
            yield "trainer.evaluate is set, but trainer.eval_every=0 turns evaluation off; leave trainer.eval_every out"
        if self.activation_memory_budget < 1 and self.activation_checkpoint != "none":
            yield (
                f"trainer.activation_memory_budget={self.activation_memory_budget:g} and "
                f"trainer.activation_checkpoint={self.activation_checkpoint} cannot be combined, as both choose the "
                "activations that blocks keep; use "
                "trainer.activation_checkpoint=none, or trainer.activation_memory_budget=1"
            )
        if self.activation_checkpoint_every > 1 and self.activation_checkpoint == "none":
            yield (
                f"trainer.activation_checkpoint_every={self.activation_checkpoint_every} has no effect without "
                "trainer.activation_checkpoint; leave it out, or use trainer.activation_checkpoint=selective"
            )
        if self.compile_mode is not None and self.compile is False:
            yield (
                f"trainer.compile_mode={self.compile_mode} has no effect with trainer.compile=false; use "
                "trainer.compile=true, or leave it out"
            )
        if self.compiles and self.activation_checkpoint == "offload":
            yield (
                "trainer.compile=true does not support trainer.activation_checkpoint=offload, because its copies to "
                "host memory cannot be compiled; use trainer.activation_checkpoint=selective, or trainer.compile=false"
            )

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled. False if ``compile`` is ``auto``, which a run decides when it starts."""
        return self.compile is True

    @property
    def keeps_less(self) -> tuple[str, str] | None:
        """Override that makes blocks keep fewer activations for the backward pass, and the override that turns this
        off; None if blocks keep all activations."""
        if self.activation_memory_budget < 1:
            key = "trainer.activation_memory_budget"
            return f"{key}={self.activation_memory_budget:g}", f"{key}=1"
        key = "trainer.activation_checkpoint"
        return None if self.activation_checkpoint == "none" else (f"{key}={self.activation_checkpoint}", f"{key}=none")

    @property
    def evaluates_every(self) -> int:
        """Steps between evaluations; 0: none."""
        return -(-self.steps // 10) if self.eval_every is None else self.eval_every

    @property
    def last_step(self) -> int:
        """Last step of this start of the run."""
        return min(self.steps, self.stop_at or self.steps)


MOST_THREADS = 16
"""Maximum number of threads if ``data.workers`` is null."""


class LoadingSection(Section):
    """Loading of the data. Every task has these keys; language models have more."""

    free: ClassVar[Sequence[str]] = ("workers",)

    workers: Annotated[Count, Field(ge=0, le=256)] | None = 2
    """Threads per process that prefetch batches; 0: read in the training thread; null (the default for images): one per
    core of the process, from 2 to 16."""

    def threads(self, cores: int) -> int:
        """Return the number of threads that prefetch batches in a process with ``cores`` CPU cores."""
        return min(max(2, cores), MOST_THREADS) if self.workers is None else self.workers


class HealthSection(Section):
    """Response to spikes, non-finite steps and replicas that differ."""

    spike: Literal["off", "warn", "skip", "stop", "rollback"] = "warn"
    """Response to a spike of the loss or gradient norm: ``warn``; ``skip`` the step, leaving all state unchanged;
    ``stop``, to resume later; ``rollback`` to the newest checkpoint and leave out the samples since then."""
    spike_deviations: Number = Field(default=6.0, gt=0)
    """A spike is more than this many standard deviations above the mean of the last accepted steps."""
    spike_window: Annotated[Count, Field(ge=4, le=10**6)] = 128
    """Number of accepted steps in this mean. No spike is reported until half of them have run."""
    non_finite: Literal["skip", "stop", "rollback"] = "skip"
    """Response to a loss or gradient that is not finite. The step changes nothing; after three in a row the run fails
    (``skip``) or returns to the newest checkpoint (``rollback``). ``stop``: stop at the first one, to resume later."""
    max_rollbacks: PositiveCount = 3
    """Maximum number of rollbacks of a run; then it stops."""
    replica_check_every: CountOrZero = 100
    """Steps between bitwise comparisons of replicas (``ddp``, ``hsdp``), which also precede every save; 0: never
    compare."""


DEFAULT_MINUTES_BETWEEN = 30
"""Default maximum time between checkpoints, in minutes, unless ``every`` is 0."""


_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(KB|MB|GB)/s", re.ASCII)
_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9}


class CheckpointSection(Section):
    """Saving and resuming. Checkpoints are Hugging Face model folders in ``run.dir/checkpoints``."""

    every: CountOrZero = 1000
    """Steps between checkpoints; 0: only at the end."""
    every_minutes: CountOrZero | None = None
    """Maximum time between checkpoints, in minutes. When it has passed, the next step is saved; 0: off. Null: 30, or 0
    with ``every=0``."""
    keep: PositiveCount = 2
    """Number of newest checkpoints to keep."""
    keep_every: CountOrZero = 0
    """Checkpoints whose step is a multiple of this are kept permanently; 0: none."""
    keep_best: bool = False
    """Also keep the checkpoint with the best ``best_metric``. Only steps that are both evaluated and saved count, so
    checkpoints saved by ``every_minutes`` do not."""
    best_metric: str = Field(default="loss", min_length=1)
    """Validation metric that ``keep_best`` and ``trainer.early_stopping_patience`` compare: ``loss`` or a metric of the
    task."""
    best_mode: Literal["min", "max"] = "min"
    """``min`` if a lower ``best_metric`` is better, ``max`` if a higher one is."""
    mode: Literal["async", "sync"] = "async"
    """``async``: training continues while a checkpoint is written. ``sync``: training waits; only GPU tensors are
    copied."""
    upload_limit: str | None = None
    """Limit of uploads to a bucket per node, such as ``500MB/s``, while training continues; null: none. A save that
    training waits for is not limited."""
    resume: PathOrUrl = Field(default="auto", min_length=1)
    """``auto`` (the newest checkpoint, if any), ``must``, ``never`` or a path. ``never`` restarts and moves earlier
    files to ``earlier-N``; a path is a checkpoint, a run folder, or a folder of weights (with adapters, a PEFT folder).
    ``s3://BUCKET/RUN`` is a run in a bucket. From weights, and from a run of another task, a run starts at step 0."""
    weights_only: bool = False
    """Use only the weights of a path in ``resume``, even of a run: start at step 0 with a new optimizer."""
    strict: bool = True
    """Refuse weights to start from unless all of their tensors fit the model. ``false``: load the tensors that fit, and
    list the others; parameters without a tensor keep their initial values."""
    allow_changes: bool | tuple[str, ...] = False
    """Keys or sections that may differ from the checkpoint although they change the loss curve, such as
    ``[optim.lr,data.path]``; true: all. Other weights or another tokenizer are always refused."""

    @property
    def minutes_between(self) -> int:
        """Maximum time between checkpoints, in minutes; 0: no limit."""
        if self.every_minutes is not None:
            return self.every_minutes
        return DEFAULT_MINUTES_BETWEEN if self.every else 0

    @property
    def upload_bytes_per_second(self) -> float | None:
        """``upload_limit`` in bytes per second; None if there is no limit."""
        found = _RATE.fullmatch(self.upload_limit or "")
        return float(found[1]) * _BYTES[found[2]] if found else None

    def allows(self, key: str) -> bool:
        """Return whether ``allow_changes`` lists ``key`` or a section that contains it."""
        allowed = self.allow_changes
        if isinstance(allowed, bool):
            return allowed
        return any(key == prefix or key.startswith(f"{prefix}.") for prefix in allowed)

    def _mistakes(self) -> Iterator[str]:
        if self.upload_limit is not None and not self.upload_bytes_per_second:
            yield (
                f"checkpoint.upload_limit={self.upload_limit} is not a rate in KB/s, MB/s or GB/s; e.g. "
                "checkpoint.upload_limit=500MB/s"
            )
        word = {"true": "auto", "false": "never"}.get(self.resume.lower(), self.resume.lower())
        if word in ("auto", "must", "never") and self.resume != word:
            yield f"checkpoint.resume={self.resume}: use checkpoint.resume={word}"
        elif self.weights_only and self.resume in ("auto", "must", "never"):
            yield (
                f"checkpoint.weights_only=true with checkpoint.resume={self.resume}: name the run or folder whose "
                "weights to start from: checkpoint.resume=FOLDER"
            )


class TaskSection(Section):
    """Training task. A user-defined task adds its keys here."""

    free = ("name",)
    formats: ClassVar[tuple[str, ...]] = ("text", "chat")
    """Values of ``data.format`` that the task supports."""
    metrics: ClassVar[tuple[str, ...] | None] = None
    """Names of evaluation metrics in addition to the loss; None: known only to the task itself."""
    has_teacher: ClassVar[bool] = False
    """Whether the model contains a frozen teacher, which is not saved."""
    opened_as: ClassVar[str | None] = None
    """Task that loads the trained model; None: the task itself."""

    name: str = Field(default="causal_lm", min_length=1)
    """Name of the task; a recipe sets it."""

    @property
    def metric_names(self) -> tuple[str, ...] | None:
        """Names of the task's metrics. By default ``metrics``; a section may make them depend on its values."""
        return self.metrics

    def mistakes_with(self, config: Any) -> Iterator[str]:
        """Yield a sentence for each contradiction with the rest of the ``config`` of a language model."""
        if config.data.format not in self.formats:
            recipes = {
                "preference": "recipe=dpo or recipe=reward, for pairs of answers",
                "unpaired": "recipe=kto, for answers with a label",
            }
            usual = "chat" if "chat" in self.formats else self.formats[0]
            use = recipes.get(config.data.format, f"data.format={usual}")
            yield f"data.format={config.data.format} is not supported by task.name={self.name}; use {use}"


class RunConfig(Section):
    """The configuration of a run."""

    free = (
        "recipe", "dry_run", "run", "launch", "slurm", "kubernetes", "skypilot", "checkpoint", "track", "profile",
        "health", "parallel", "plan", "recover",
    )  # fmt: skip

    recipe: str
    """Name of the recipe, which sets all keys that are not given."""
    dry_run: bool = False
    """Print the plan and stop, on any machine, for any number of processes."""
    run: RunSection
    task: TaskSection = Field(default_factory=TaskSection)
    parallel: ParallelSection
    precision: PrecisionSection
    adapter: AdapterSection = Field(default_factory=AdapterSection)
    optim: OptimSection
    schedule: ScheduleSection
    trainer: TrainerSection
    health: HealthSection = Field(default_factory=HealthSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    track: TrackSection = Field(default_factory=TrackSection)
    profile: ProfileSection = Field(default_factory=ProfileSection)
    launch: LaunchSection
    recover: RecoverSection = Field(default_factory=RecoverSection)
    slurm: SlurmSection = Field(default_factory=SlurmSection)
    plan: PlanSection = Field(default_factory=PlanSection, exclude=True)
    kubernetes: KubernetesSection = Field(default_factory=KubernetesSection)
    skypilot: SkypilotSection = Field(default_factory=SkypilotSection)
    data: LoadingSection = Field(default_factory=LoadingSection)

    @property
    def another_run(self) -> str:
        """Overrides that make the same command a separate run."""
        has_default_dir = self.run.dir.parts[-2:] == ("runs", self.run.name)
        new = " checkpoint.resume=auto" if self.checkpoint.resume == "must" else ""
        return f"run.{'name' if has_default_dir else 'dir'}=OTHER{new}"

    @property
    def lacks_validation(self) -> bool:
        """Whether no part of the training data is held out for validation. Other validation sets are not considered."""
        return False

    @property
    def offloads_state(self) -> bool:
        """Whether the optimizer state is in host memory, with or without the parameters."""
        return self.optim.offload or self.parallel.offload

    def _mistakes(self) -> Iterator[str]:
        if self.precision.name in ("float8", "int8") and self.adapter.method != "none":
            yield (
                f"precision={self.precision.name} has no effect with adapter.method={self.adapter.method}: it applies "
                "to the weights of linear layers that are trained, but adapters freeze them; use precision=bf16"
            )
        if self.adapter.merge and self.checkpoint.resume not in ("auto", "must", "never"):
            yield (
                f"adapter.merge=true with checkpoint.resume={self.checkpoint.resume}: a run starts from the merged "
                "model or from that folder; leave one of them out"
            )
        yield from self._quantizing_mistakes()
        if self.plan.model_fields_set and not self.dry_run:
            key = min(self.plan.model_fields_set)
            yield f"plan.{key}={getattr(self.plan, key)} is only read by serried plan and dry_run=true; leave it out"
        elif self.plan.out is not None and not self.plan.search:
            yield f"plan.out={self.plan.out} is only read by serried plan search; leave it out"
        elif self.plan.mode == "trace" and self.plan.search:
            yield (
                "plan.mode=trace cannot be used with serried plan search, which uses formulas; leave it out, and trace "
                "the layout that you choose"
            )
        if self.checkpoint.keep_best and not self.trainer.evaluates_every:
            yield (
                "checkpoint.keep_best=true but trainer.eval_every=0 turns evaluation off; "
                f"use trainer.eval_every={self.checkpoint.every or self.trainer.steps}"
            )
        yield from self._mistakes_of_saving()
        if (patience := self.trainer.early_stopping_patience) and not self.trainer.evaluates_every:
            yield (
                f"trainer.early_stopping_patience={patience} but trainer.eval_every=0 turns evaluation off; "
                f"use trainer.eval_every={max(1, (self.trainer.steps or 100) // 10)}"
            )
        if self.profile.steps is not None and self.profile.steps[1] > (end := self.trainer.last_step):
            first, last = self.profile.steps
            key = "steps" if end == self.trainer.steps else "stop_at"
            yield (
                f"profile.steps=[{first},{last}] goes beyond trainer.{key}={end}; "
                f"use 'profile.steps=[{max(1, end - (last - first))},{end}]'"
            )

    def _mistakes_of_saving(self) -> Iterator[str]:
        checkpoint, health, evaluated = self.checkpoint, self.health, self.trainer.evaluates_every
        for key, response in (("spike", health.spike), ("non_finite", health.non_finite)):
            if response == "rollback" and not checkpoint.every and not checkpoint.minutes_between:
                yield (
                    f"health.{key}=rollback needs a checkpoint to return to, but checkpoint.every=0 saves none before "
                    f"the end; use checkpoint.every={max(1, (self.trainer.steps or 1000) // 10)}, or health.{key}=skip"
                )
        if checkpoint.keep_best and evaluated and checkpoint.every and self.trainer.epochs is None:
            both = math.lcm(checkpoint.every, evaluated)
            if max(checkpoint.every, evaluated) < self.trainer.steps < both:
                yield (
                    f"checkpoint.keep_best=true: no step is both saved and evaluated, with "
                    f"checkpoint.every={checkpoint.every} and evaluations every {evaluated} of "
                    f"{self.trainer.steps} steps; use checkpoint.every={evaluated}"
                )
        elif checkpoint.keep_best and evaluated and not checkpoint.every:
            yield (
                "checkpoint.keep_best=true chooses among checkpoints, but checkpoint.every=0 saves only the last; use "
                f"checkpoint.every={evaluated}"
            )
        if checkpoint.best_metric == "loss" and checkpoint.best_mode == "max":
            yield (
                "checkpoint.best_mode=max contradicts checkpoint.best_metric=loss, for which lower is better; use "
                "checkpoint.best_mode=min, or name another metric"
            )
        known = self.task.metric_names
        if known is not None and not self.trainer.evaluate and checkpoint.best_metric not in ("loss", *known):
            yield (
                f"checkpoint.best_metric={checkpoint.best_metric} is not a metric of task.name={self.task.name}, which "
                f"has {', '.join(('loss', *known))}; use checkpoint.best_metric={(*known, 'loss')[0]}"
            )

    def _quantizing_mistakes(self) -> Iterator[str]:
        if (how := self.precision.quantize_aware) == "none":
            return
        without = "or precision.quantize_aware=none"
        if self.precision.name in ("fp16", "float8", "int8"):
            yield (
                f"precision.quantize_aware={how} is not supported with precision={self.precision.name}; "
                f"use precision=bf16, {without}"
            )
        if self.adapter.method != "none":
            yield (
                f"precision.quantize_aware={how} is not supported with adapter.method={self.adapter.method}, which "
                f"freezes the weights to quantize; use adapter=none, {without}"
            )
        if self.parallel.tensor != 1:
            yield (
                f"precision.quantize_aware={how} is not supported with parallel.tensor={self.parallel.tensor}, which "
                f"would shard weights that share a scale; use parallel.tensor=1, {without}"
            )
