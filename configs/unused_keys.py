"""Notes on keys that the user set but the run does not read.

A key that only another optimizer, source or model family reads is refused by ``configs.messages.invalid_values``, and a
contradiction by ``_mistakes`` of a section. Other unused keys only get a note, since a script may set them for several
runs.
"""

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from serried.configs.messages.invalid_values import shown
from serried.configs.subcommand_arguments import values_of


class Run(NamedTuple):
    """The settings of a run that decide which keys it reads."""

    config: Any
    layout: Any
    """Resolved degrees of the mesh axes, a ``Layout``."""
    is_sweep: bool = False
    is_on_cpu: bool = False
    """Whether it is certain that the run computes on a CPU."""
    key: str = ""
    """Key whose readers are evaluated."""

    @property
    def own(self) -> Any:
        """Value of ``key``."""
        section, _, name = self.key.partition(".")
        return getattr(getattr(self.config, section), name)

    @property
    def group(self) -> Any:
        """Parameter group that ``key`` belongs to."""
        return self.config.optim.groups[self.key.split(".")[2]]

    @property
    def last_step(self) -> float:
        """Last step of the run; infinite if it depends on the data."""
        trainer = self.config.trainer
        return math.inf if trainer.epochs is not None else float(trainer.steps)

    def reaches(self, step: int) -> bool:
        """Return whether the run ends at ``step`` or later. True for 0, which turns a feature off."""
        return step <= self.last_step

    @property
    def saves_in_between(self) -> bool:
        """Whether ``checkpoint.every`` causes saves before the last step."""
        return 0 < self.config.checkpoint.every < self.last_step

    @property
    def may_save_in_between(self) -> bool:
        """Whether checkpoints may be saved before the last step, by step or by time."""
        return self.saves_in_between or self.config.checkpoint.minutes_between > 0

    def model(self, name: str, otherwise: Any = None) -> Any:
        """Return a value of the section ``model``; ``otherwise`` if it does not exist."""
        return getattr(getattr(self.config, "model", None), name, otherwise)

    def data(self, name: str, otherwise: Any = None) -> Any:
        """Return a value of the section ``data``; ``otherwise`` if it does not exist."""
        return getattr(getattr(self.config, "data", None), name, otherwise)


class Reader(NamedTuple):
    """Condition under which a run reads some keys."""

    keys: str
    """Keys and groups, or patterns of them, separated by spaces."""
    reads: Callable[[Run], bool]
    """Function that returns whether a run reads the keys."""
    why: str
    """Words that follow ``key=value`` in the note. Braces are filled in from the ``config``."""
    cure: str
    """Overrides with which a run reads the keys; empty if there are none."""
    is_instead: bool = False
    """Whether ``cure`` replaces the key."""

    def has(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.keys.split())


def _evaluations(run: Run) -> float:
    every = run.config.trainer.evaluates_every
    return math.ceil(run.last_step / every) if math.isfinite(run.last_step) else math.inf


def _has_patience(run: Run) -> bool:
    patience = run.config.trainer.early_stopping_patience
    return patience == 0 or _evaluations(run) > patience


def _finds_spikes(run: Run) -> bool:
    return run.config.health.spike == "off" or run.config.health.spike_window / 2 < run.last_step


def _rolls_back(run: Run) -> bool:
    return "rollback" in (run.config.health.spike, run.config.health.non_finite)


def _keeps_some(run: Run) -> bool:
    every, keep_every = run.config.checkpoint.every, run.config.checkpoint.keep_every
    return 0 in (keep_every, every) or keep_every % every == 0


def _has_tracker(run: Run) -> bool:
    return run.config.track.wandb != "off" or run.config.track.mlflow is not None


def _compares_most(run: Run) -> bool:
    """Whether every checkpoint is evaluated, or every evaluated step is saved."""
    saved, evaluated = run.config.checkpoint.every, run.config.trainer.evaluates_every
    return not run.config.checkpoint.keep_best or saved % evaluated == 0 or evaluated % saved == 0


def _chooses_experts(run: Run) -> bool:
    experts = run.model("experts")
    return experts in (None, 0, 1) or bool(run.model("experts_per_token") < experts)


def _compares_evaluations(run: Run) -> bool:
    return run.is_sweep or run.config.checkpoint.keep_best or run.config.trainer.early_stopping_patience > 0


_NO_EFFECT = "has no effect"
_LATE = "is more than the {last} steps of the run, so only the last step is"

READERS: tuple[Reader, ...] = (
    Reader(
        "parallel", lambda run: run.layout.world > 1 or run.config.parallel.strategy == "single",
        f"{_NO_EFFECT} with a single process", "launch=local launch.processes=2",
    ),
    Reader(
        "parallel", lambda run: run.config.parallel.strategy != "hsdp" or run.layout.replicate < run.layout.world,
        "shards nothing, because each process is a full replica", "parallel=ddp", is_instead=True,
    ),
    Reader(
        "parallel.pipeline_schedule parallel.layers_of_stages", lambda run: run.layout.pipeline > 1,
        f"{_NO_EFFECT} without a pipeline", "parallel=fsdp parallel.pipeline=2",
    ),
    Reader(
        "parallel.stages_per_rank", lambda run: run.layout.pipeline > 1,
        f"{_NO_EFFECT} without a pipeline", "parallel=fsdp parallel.pipeline=2 parallel.pipeline_schedule=interleaved",
    ),
    Reader(
        "parallel.context_method", lambda run: run.layout.context > 1,
        f"{_NO_EFFECT} without context parallelism", "parallel=fsdp parallel.context=2",
    ),
    Reader(
        "parallel.sequence", lambda run: run.layout.tensor > 1,
        f"{_NO_EFFECT} without tensor parallelism", "parallel=fsdp parallel.tensor=2",
    ),
    Reader(
        "parallel.reshard_after_forward parallel.sync_every_micro_batch", lambda run: run.layout.is_sharded,
        f"{_NO_EFFECT}, because no parameters are sharded", "parallel=fsdp launch=local launch.processes=2",
    ),
    Reader(
        "precision.scaling", lambda run: run.config.precision.name == "float8",
        f"{_NO_EFFECT} with precision={{config.precision.name}}", "precision=float8",
    ),
    Reader(
        "precision.gather", lambda run: run.config.precision.name == "float8",
        f"{_NO_EFFECT} with precision={{config.precision.name}}",
        "precision=float8 precision.scaling=tensorwise parallel=fsdp",
    ),
    Reader(
        "precision.initial_scale precision.growth_interval", lambda run: run.config.precision.name == "fp16",
        f"{_NO_EFFECT} with precision={{config.precision.name}}", "precision=fp16",
    ),
    Reader(
        "adapter.[!m]*",  # adapter.modules is refused
        lambda run: run.config.adapter.method != "none" or run.config.adapter.merge,
        f"{_NO_EFFECT} without adapters", "adapter=lora",
    ),
    Reader(
        "checkpoint.strict", lambda run: run.config.adapter.method == "none",
        f"{_NO_EFFECT} with adapters, whose base model must fit", "adapter=none",
    ),
    Reader(
        "optim.groups.*.lr_scale optim.groups.*.weight_decay",
        lambda run: not run.group.frozen, f"{_NO_EFFECT} on frozen parameters", "",
    ),
    Reader("optim.groups.*.lr_scale", lambda run: run.group.lr_scale > 0,
           "leaves these parameters unchanged, but still computes their gradients", "{section}.frozen=true",
           is_instead=True),
    Reader("optim.lr", lambda run: run.config.optim.lr > 0, "leaves all weights unchanged", "optim.lr=3e-4"),
    Reader(
        "optim.dampening", lambda run: getattr(run.config.optim, "momentum", 1) > 0,
        f"{_NO_EFFECT} without momentum", "optim.momentum=0.9",
    ),
    Reader(
        "optim.offload", lambda run: not run.is_on_cpu,
        f"{_NO_EFFECT} on a CPU, where the state is in host memory anyway", "",
    ),
    Reader(
        "schedule.warmup_steps", lambda run: run.config.schedule.warmup_ratio is None,
        f"{_NO_EFFECT}: schedule.warmup_ratio={{config.schedule.warmup_ratio:g}} replaces it",
        "schedule.warmup_ratio=null",
    ),
    Reader(
        "schedule.warmup_steps", lambda run: run.config.schedule.warmup_steps < run.last_step,
        "is not below trainer.steps={config.trainer.steps}: the learning rate only rises",
        "schedule.warmup_steps={tenth}",
    ),
    Reader(
        "trainer.activation_checkpoint_every", lambda run: run.config.trainer.activation_checkpoint != "none",
        f"{_NO_EFFECT} without activation checkpointing", "trainer.activation_checkpoint=selective",
    ),
    Reader("trainer.eval_every", lambda run: run.reaches(run.config.trainer.evaluates_every),
           f"{_LATE} evaluated", "trainer.eval_every={tenth}"),
    Reader("trainer.log_every", lambda run: run.reaches(run.config.trainer.log_every),
           "is more than the {last} steps of the run, so only the first and last steps are logged",
           "trainer.log_every={tenth}"),
    Reader("checkpoint.every", lambda run: run.reaches(run.config.checkpoint.every),
           f"{_LATE} saved", "checkpoint.every={tenth}"),
    Reader(
        "trainer.eval_batches", lambda run: bool(run.config.trainer.evaluates_every),
        f"{_NO_EFFECT} with trainer.eval_every=0, which turns evaluation off", "trainer.eval_every={tenth}",
    ),
    Reader(
        "trainer.sample_tokens",
        lambda run: run.config.trainer.sample_tokens <= run.model("max_sequence_length", math.inf),
        "is more than the model can generate with model.max_sequence_length={config.model.max_sequence_length}",
        "trainer.sample_tokens=200",
    ),
    Reader(
        "trainer.early_stopping_patience", _has_patience,
        f"{_NO_EFFECT}, because the run has too few evaluations", "trainer.eval_every={often}",
    ),
    Reader(
        "trainer.stop_at",
        lambda run: run.config.trainer.stop_at is None or run.config.trainer.stop_at < run.last_step,
        f"{_NO_EFFECT}: the run ends at trainer.steps={{config.trainer.steps}}", "",
    ),
    Reader(
        "health.spike_deviations health.spike_window", lambda run: run.config.health.spike != "off",
        f"{_NO_EFFECT} with health.spike=off", "health.spike=warn",
    ),
    Reader(
        "health.spike health.spike_deviations health.spike_window", _finds_spikes,
        f"{_NO_EFFECT}: the run ends before half of health.spike_window={{config.health.spike_window}} steps, when "
        "spikes start to be detected",
        "health.spike_window={window}",
    ),
    Reader(
        "health.spike health.non_finite",
        lambda run: run.own != "rollback" or run.saves_in_between or bool(run.config.checkpoint.every_minutes),
        "has no checkpoint to return to before the last step with checkpoint.every={config.checkpoint.every}, "
        "unless checkpoint.every_minutes saves one",
        "checkpoint.every={tenth}",
    ),
    Reader("health.max_rollbacks", _rolls_back, f"{_NO_EFFECT} without rollbacks",
           "health.spike=rollback checkpoint.every={tenth}"),
    Reader(
        "health.replica_check_every", lambda run: run.layout.world > run.layout.shard,
        f"{_NO_EFFECT}: no two processes hold the same parameters", "parallel=ddp launch=local launch.processes=2",
    ),
    Reader("health.replica_check_every", lambda run: run.reaches(run.config.health.replica_check_every),
           f"{_LATE} compared", "health.replica_check_every={tenth}"),
    Reader(
        "checkpoint.keep checkpoint.keep_every", lambda run: run.may_save_in_between,
        f"{_NO_EFFECT} with checkpoint.every={{config.checkpoint.every}}, which saves only at the end of the run",
        "checkpoint.every={tenth}",
    ),
    Reader(
        "checkpoint.keep_every", lambda run: run.reaches(run.config.checkpoint.keep_every),
        f"{_LATE} kept", "checkpoint.keep_every={config.checkpoint.every}",
    ),
    Reader(
        "checkpoint.keep_every", _keeps_some,
        "keeps only steps that are also multiples of checkpoint.every={config.checkpoint.every}",
        "checkpoint.keep_every={config.checkpoint.every}",
    ),
    Reader(
        "checkpoint.upload_limit", lambda run: run.config.run.url is not None, f"{_NO_EFFECT} for a run in a folder",
        "run.dir=s3://BUCKET/PATH",
    ),
    Reader(
        "checkpoint.keep_best", lambda run: not run.config.checkpoint.keep_best or run.saves_in_between,
        "has only one checkpoint to choose from with checkpoint.every={config.checkpoint.every}",
        "checkpoint.every={tenth} trainer.eval_every={tenth}",
    ),
    Reader(
        "checkpoint.keep_best", _compares_most,
        "compares only steps that are both saved (every {config.checkpoint.every}) and evaluated (every "
        "{config.trainer.evaluates_every})", "checkpoint.every={config.trainer.evaluates_every}",
    ),
    Reader(
        "checkpoint.best_metric checkpoint.best_mode", _compares_evaluations,
        f"{_NO_EFFECT} without checkpoint.keep_best, early stopping or a sweep", "checkpoint.keep_best=true",
    ),
    Reader(
        "checkpoint.allow_changes", lambda run: run.config.checkpoint.resume != "never",
        f"{_NO_EFFECT} with checkpoint.resume=never", "checkpoint.resume=auto",
    ),
    Reader("track.project track.group track.tags track.notes", _has_tracker,
           f"{_NO_EFFECT} without a tracker", "track=wandb"),
    Reader("track.entity", lambda run: run.config.track.wandb != "off", f"{_NO_EFFECT} without W&B", "track=wandb"),
    Reader(
        "profile.memory",  # the run itself warns about it
        lambda run: run.config.profile.steps is not None or not run.is_on_cpu or not run.config.dry_run,
        f"{_NO_EFFECT} on a CPU without profile.steps", "profile.steps=[1,1]",
    ),
    Reader("recover.min_replicas recover.silence_seconds", lambda run: run.config.recover.mode != "off",
           f"{_NO_EFFECT} with recover.mode=off", "recover.mode=memory parallel=ddp"),
    Reader("launch.stop_timeout_seconds", lambda run: run.config.launch.name == "local" or run.is_sweep,
           f"{_NO_EFFECT} with launch={{config.launch.name}}", "launch=local"),
    # dry_run of these sections is refused elsewhere.
    Reader("kubernetes.[!d]*", lambda run: run.config.launch.name == "kubernetes",
           f"{_NO_EFFECT} with launch={{config.launch.name}}", "launch=kubernetes"),
    Reader("skypilot.[!d]* skypilot.disk_gb", lambda run: run.config.launch.name == "skypilot",
           f"{_NO_EFFECT} with launch={{config.launch.name}}", "launch=skypilot"),
    Reader("slurm.[!d]* slurm.de*", lambda run: run.config.launch.name == "slurm",
           f"{_NO_EFFECT} with launch={{config.launch.name}}", "launch=slurm"),
    Reader("slurm.array_concurrency", lambda run: run.is_sweep, f"{_NO_EFFECT} without a sweep (-m)", ""),
    Reader("model.pretrained", lambda run: run.model("path") is not None,
           f"{_NO_EFFECT} without model.path", ""),
    Reader(
        "model.vocab_multiple", lambda run: run.model("vocab_size") is None or bool(run.data("added_tokens")),
        f"{_NO_EFFECT} with model.vocab_size={{config.model.vocab_size}}, which is not rounded",
        "model.vocab_size=null",
    ),
    Reader(
        "model.global_every model.local_rope_theta", lambda run: run.model("sliding_window", 0) is not None,
        f"{_NO_EFFECT} without a sliding window", "model.sliding_window=512",
    ),
    Reader(
        "model.balance_rate", lambda run: run.model("has_router_bias", True),
        f"{_NO_EFFECT} with model.family={{config.model.family}}, whose routers have no bias", "",
    ),
    Reader(
        "model.dense_layers model.experts model.experts_per_token model.expert_hidden_dim model.shared_experts "
        "model.routed_scale model.normalize_weights model.balance_rate",
        lambda run: run.model("dense_layers", 0) < run.model("layers", math.inf),
        "gives a model without experts: all model.layers={config.model.layers} layers are dense",
        "model.dense_layers=1",
    ),
    Reader(
        "model.experts model.experts_per_token", _chooses_experts,
        "sends every token to all model.experts={config.model.experts} experts", "model.experts_per_token=1",
    ),
    Reader("model.balance_rate", _chooses_experts,
           f"{_NO_EFFECT}, because every token goes to all experts", "model.experts_per_token=1"),
    Reader(
        "model.hidden_dim", lambda run: run.model("experts") is None or run.model("dense_layers", 1) > 0,
        f"{_NO_EFFECT} with model.dense_layers=0: all layers have experts of width model.expert_hidden_dim",
        "model.dense_layers=1",
    ),
    Reader("data.validation_fraction", lambda run: run.data("validation_split") is None,
           f"{_NO_EFFECT} with data.validation_split={{config.data.validation_split}}", "data.validation_split=null"),
    Reader("data.text_column data.*.text_column", lambda run: run.data("format") == "text",
           f"{_NO_EFFECT} with data.format={{config.data.format}}", "data.format=text"),
    Reader("data.messages_column data.*.messages_column", lambda run: run.data("format") == "chat",
           f"{_NO_EFFECT} with data.format={{config.data.format}}", "data.format=chat"),
    Reader("data.columns* data.*.columns*", lambda run: run.data("format") != "text",
           f"{_NO_EFFECT} with data.format=text", "data.format=chat"),
    Reader("data.fetch_limit", lambda run: run.data("fetch") == "ranges", f"{_NO_EFFECT} without data.fetch=ranges",
           "data.fetch=ranges"),
    Reader("data.isolate_documents", lambda run: run.data("packing") != "none",
           f"{_NO_EFFECT} with data.packing=none, because each sequence is one document", ""),
    Reader("data.sources.*.weight data.weigh_by", lambda run: len(run.data("mixed", ())) > 1,
           f"{_NO_EFFECT} with a single source", ""),
)  # fmt: skip
"""Keys that only some runs read, in addition to the keys of a choice. A key may appear in several entries; every run
reads a key that appears in none."""

_ASKS_FOR_NOTHING = (None, False, 0, "off", "none", ())


def notes(words: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Return a note for each key in the overrides ``words`` that none of the ``runs`` of a command reads. A default
    that turns something off, such as 0 or null, needs no note."""
    return [note for key, value in values_of(words).items() if (note := _note(key, value, runs))]


def _note(key: str, value: str, runs: Sequence[Run]) -> str | None:
    idle = [_reader_in_vain(key, run) for run in runs]
    config, reader = runs[0].config, idle[0]
    if reader is None or None in idle or _asks_for_nothing(key, config):
        return None
    figures = {"config": config, "section": key.rpartition(".")[0], **_figures(runs[0])}
    why, cure = reader.why.format(**figures), reader.cure.format(**figures)
    is_instead = reader.is_instead or cure.startswith(f"{key}=")
    remedy = f"{'use' if is_instead else 'add'} {cure}{' instead' * reader.is_instead}, or " if cure else ""
    return f"{key}={shown(value)} {why}; {remedy}leave it out"


def _reader_in_vain(key: str, run: Run) -> Reader | None:
    """Return the first reader whose condition for ``key`` the run does not meet; None if the run reads it."""
    return next((reader for reader in READERS if reader.has(key) and not reader.reads(run._replace(key=key))), None)


def _figures(run: Run) -> dict[str, int]:
    """Return the values of placeholders in addition to ``config``."""
    last = int(min(run.last_step, 1000))
    return {
        "last": last,
        "tenth": max(1, last // 10),
        "window": max(4, last // 2),
        "often": max(1, last // (run.config.trainer.early_stopping_patience + 2)),
    }


def _asks_for_nothing(key: str, config: Any) -> bool:
    """Return whether the value of ``key`` is the default, and turns something off or leaves it to another key."""
    *sections, name = key.split(".")
    for section in sections:
        config = config.get(section) if isinstance(config, dict) else getattr(config, section, None)
    field = getattr(type(config), "model_fields", {}).get(name)
    if field is None or field.is_required():
        return False
    value = getattr(config, name)
    return value == field.get_default(call_default_factory=True) and value in _ASKS_FOR_NOTHING
