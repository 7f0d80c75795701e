"""Keys that a run does not read: each gets one line, and what the line offers makes the run read it."""

import shlex
from fnmatch import filter as filter_names

import pytest

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.messages.keys import all_keys, readers
from serried.configs.unused_keys import READERS, Run, notes
from serried.launch.start import planned_sweep
from serried.planning import planned_layout
from serried.program import note_unread

SITUATIONS = {
    "parallel=fsdp": "",
    "parallel=hsdp": "launch.processes=2",
    "parallel.pipeline_schedule=gpipe": "",
    "parallel.layers_of_stages=[2,2]": "",
    "parallel.stages_per_rank=2": "",
    "parallel.context_method=ring": "",
    "parallel.sequence=false": "",
    "parallel.reshard_after_forward=true": "",
    "parallel.sync_every_micro_batch=true": "parallel=fsdp",
    "precision.scaling=rowwise": "",
    "precision.gather=bf16": "",
    "precision.initial_scale=65536": "",
    "precision.growth_interval=2000": "",
    "adapter.rank=16": "",
    "adapter.alpha=32": "",
    "adapter.scale=standard": "",
    "checkpoint.strict=false": "adapter=lora",
    "optim.groups.a.lr_scale=2": "optim.groups.a.parameters=*norm* optim.groups.a.frozen=true",
    "optim.groups.a.weight_decay=0.2": "optim.groups.a.parameters=*norm* optim.groups.a.frozen=true",
    "optim.groups.a.lr_scale=0": "optim.groups.a.parameters=*norm*",
    "optim.lr=0": "",
    "optim.dampening=0.1": "optim=sgd optim.momentum=0",
    "optim.offload=true": "launch.device=cpu",
    "schedule.warmup_steps=300": "",
    "schedule.warmup_steps=5": "schedule.warmup_ratio=0.1",
    "trainer.activation_checkpoint_every=1": "",
    "trainer.eval_every=1k": "",
    "trainer.log_every=1k": "",
    "checkpoint.every=1k": "",
    "trainer.eval_batches=3": "trainer.eval_every=0",
    "trainer.sample_tokens=1M": "",
    "trainer.early_stopping_patience=5": "trainer.eval_every=100",
    "trainer.stop_at=1k": "",
    "health.spike_deviations=2": "health.spike=off",
    "health.spike_window=64": "health.spike=off",
    "health.spike=skip": "trainer.steps=20",
    "health.spike_deviations=3": "trainer.steps=20",
    "health.spike_window=1k": "",
    "health.spike=rollback": "checkpoint.every=300",
    "health.non_finite=rollback": "checkpoint.every=300",
    "health.max_rollbacks=9": "",
    "health.replica_check_every=5": "",
    "health.replica_check_every=1k": "parallel=ddp launch.processes=2",
    "recover.min_replicas=1": "",
    "recover.silence_seconds=5": "",
    "checkpoint.keep=5": "checkpoint.every=0",
    "checkpoint.keep_every=30": "checkpoint.every=0",
    "checkpoint.keep_every=1k": "",
    "checkpoint.keep_every=40": "checkpoint.every=30",
    "checkpoint.upload_limit=1GB/s": "",
    "checkpoint.keep_best=true": "checkpoint.every=300",
    "checkpoint.keep_best=True": "checkpoint.every=5 trainer.eval_every=7",
    "checkpoint.best_metric=loss": "",
    "checkpoint.best_mode=min": "",
    "checkpoint.allow_changes=true": "checkpoint.resume=never",
    "track.project=a": "",
    "track.group=a": "",
    "track.tags=[a]": "",
    "track.notes=a": "",
    "track.entity=a": "track=mlflow",
    "profile.memory=true": "launch.device=cpu",
    "launch.stop_timeout_seconds=5": "",
    "kubernetes.claim=runs": "trainer.micro_batch=4",
    "skypilot.infra=aws": "trainer.micro_batch=4",
    "skypilot.disk_gb=9": "trainer.micro_batch=4",
    "slurm.time_minutes=5": "",
    "slurm.requeue=true": "",
    "slurm.dependency=afterok:1": "",
    "slurm.array_concurrency=2": "launch=slurm",
    "model.pretrained=false": "",
    "model.vocab_multiple=128": "model.vocab_size=300",
    "model.global_every=3": "model=gemma3_1b data.tokenizer=bytes model.sliding_window=null",
    "model.local_rope_theta=10000": "model=gemma3_1b data.tokenizer=bytes model.sliding_window=null",
    "model.balance_rate=0.01": "model=moe_tiny model.family=qwen3_moe model.shared_experts=0 model.qk_norm=true "
    "model.rotary_fraction=1 model.routed_scale=1",
    **{
        f"model.{key}": "model=moe_tiny model.dense_layers=4"
        for key in (
            "dense_layers=4", "experts=8", "experts_per_token=2", "expert_hidden_dim=64", "shared_experts=1",
            "routed_scale=1", "normalize_weights=true", "balance_rate=0.1",
        )
    },
    "model.experts=4": "model=moe_tiny model.experts_per_token=4",
    "model.experts_per_token=8": "model=moe_tiny model.experts=8",
    "model.balance_rate=0.2": "model=moe_tiny model.experts=4 model.experts_per_token=4",
    "model.hidden_dim=128": "model=moe_tiny model.dense_layers=0",
    "data.validation_fraction=0.1": "data=hf data.path=a/b data.validation_split=test",
    "data.text_column=a": "data=text data.path=x data.format=chat",
    "data.messages_column=a": "data=text data.path=x",
    "data.validation.a.text_column=a": "data=text data.path=x data.format=chat data.validation.a.name=text "
    "data.validation.a.path=x",
    "data.sources.a.messages_column=a": "data=mixture data.sources.a.name=text data.sources.a.path=x "
    "data.sources.b.name=stdlib",
    "data.columns.prompt=a": "data=text data.path=x",
    "data.sources.a.columns.prompt=a": "data=mixture data.sources.a.name=text data.sources.a.path=x "
    "data.sources.b.name=stdlib",
    "data.fetch_limit=1GB": "data=text data.path=x data.cache_dir=s3://b/x",
    "data.isolate_documents=true": "data=text data.path=x data.packing=none",
    "data.sources.a.weight=2": "data=mixture data.sources.a.name=stdlib",
    "data.weigh_by=tokens": "data=mixture data.sources.a.name=stdlib",
}  # fmt: skip
"""Overrides that nothing reads -> the other overrides of such a command."""

REFUSED = {
    "adapter.modules", "adapter.modules_to_save", "adapter.trainable_token_indices", "adapter.merge",
    "checkpoint.weights_only", "parallel.offload",
    "trainer.activation_memory_budget", "trainer.evaluate", "task.margin", "trainer.compile_mode",
    "trainer.sample_tokens", "data.vocab_size", "data.fetch", "data.add_tokens", "data.add_special_tokens",
    "data.chat_template", "slurm.dry_run", "kubernetes.dry_run", "skypilot.dry_run",
}  # fmt: skip
"""Keys that are refused where nothing reads them; see ``tests.cli.config.test_mistakes``."""

READ_ALWAYS = {
    "recipe", "dry_run", "run.name", "run.dir", "task.name", "task.label_smoothing", "task.z_loss",
    *(f"parallel.{axis}" for axis in ("strategy", "replicate", "shard", "context", "tensor", "pipeline", "expert")),
    "parallel.uneven",
    "precision.name", "precision.quantize_aware", "adapter.method", "optim.name", "optim.weight_decay", "schedule.name",
    "schedule.warmup_ratio",
    *(f"trainer.{name}" for name in (
        "steps", "epochs", "global_batch", "micro_batch", "activation_checkpoint", "ema_decay",
        "compile", "max_grad_norm", "seed", "deterministic", "max_minutes",
    )),
    "checkpoint.every_minutes", "checkpoint.mode", "checkpoint.resume",
    "track.wandb", "track.tensorboard", "track.mlflow", "track.prometheus", "track.webhook",
    "profile.steps", "recover.mode",
    *(f"launch.{name}" for name in (
        "name", "processes", "nodes", "device", "threads", "start_timeout_seconds", "step_timeout_seconds", "notice",
    )),
    *(f"data.{name}" for name in (
        "name", "workers", "format", "tokenizer", "sequence_length", "packing", "isolate_documents", "cache_dir",
    )),
    *(f"model.{name}" for name in ("name", "family", "path", "vocab_size", "max_sequence_length")),
    "optim.groups.NAME.parameters", "optim.groups.NAME.frozen",
}  # fmt: skip
"""Keys that every run reads which may have them."""


def noted(*words: str) -> list[str]:
    config = compose([*words, "dry_run=true"])
    is_on_cpu = config.launch.device == "cpu"
    return notes(words, [Run(config, planned_layout(config)[0], is_on_cpu=is_on_cpu)])


def test_each_key_is_always_read_or_has_a_rule() -> None:
    """A new key belongs into one of the tables above."""
    named = [key.path for keys in all_keys().named.values() for key in keys.values()]
    of_a_choice = {path for path in [*all_keys(), *named] if readers(path) or path.startswith("task.")}
    without = {path for path in [*all_keys(), *named] if not any(reader.has(path) for reader in READERS)}
    plan = {path for path in without if path.startswith("plan.")}  # refused but in a plan
    assert without - of_a_choice - plan - REFUSED - READ_ALWAYS == set()
    assert without | of_a_choice >= READ_ALWAYS


@pytest.mark.parametrize("typed", SITUATIONS)
def test_unread_key_gets_one_note_whose_fix_makes_it_read(typed: str) -> None:
    context = SITUATIONS[typed].split()
    key = typed.partition("=")[0]
    with_it = [each for each in context if each.partition("=")[0] != key]
    (note,) = [each for each in noted(*with_it, typed) if each.startswith(f"{key}=")]
    assert note.startswith(f"{typed} ")
    assert note.endswith("leave it out")
    _, verb, rest = note.rpartition("; add ") if "; add " in note else note.rpartition("; use ")
    cure = shlex.split(rest.removesuffix(", or leave it out").removesuffix(" instead")) if verb else []
    if not cure:
        return
    # A model, a server and more processes are needed too.
    again = [*with_it, typed, *cure] if verb == "; add " else [*with_it, *cure]
    is_submitted = {"launch=slurm", "launch=kubernetes", "launch=skypilot"} & {*cure}
    processes = [] if is_submitted else ["launch.processes=2"] * ("parallel=" in " ".join(again))
    assert [each for each in noted(*again, *processes) if each.startswith(f"{key}=")] == []


def test_each_rule_has_a_test_case() -> None:
    typed = [each.partition("=")[0] for each in SITUATIONS]
    assert [pattern for each in READERS for pattern in each.keys.split() if not filter_names(typed, pattern)] == []


def test_key_set_by_a_recipe_gets_no_note() -> None:
    assert noted("recipe=sft", "data.path=x") == noted() == []


@pytest.mark.parametrize(
    "typed", ["track.notes=null", "checkpoint.keep_every=0", "profile.memory=false", "adapter.modules=null"]
)
def test_default_that_turns_nothing_on_gets_no_note(typed: str) -> None:
    assert noted(typed, "checkpoint.every=0") == []


def test_checkpoint_keys_get_no_note_with_timed_saves() -> None:
    keys = ("checkpoint.keep=5", "checkpoint.keep_every=30", "health.spike=rollback")
    assert noted(*keys, "checkpoint.every=0", "checkpoint.every_minutes=5") == []
    (note,) = noted("checkpoint.keep=5", "health.spike=rollback", "checkpoint.every=300")
    assert "unless checkpoint.every_minutes saves one" in note


def test_key_read_in_one_run_of_a_sweep_gets_no_note(capsys: pytest.CaptureFixture[str]) -> None:
    def note_sweep(swept: str) -> None:
        words = ["dry_run=true", "launch.processes=2", "parallel=fsdp", "parallel.pipeline_schedule=gpipe", swept]
        note_unread(words, [point.config for point in planned_sweep(words).points], is_sweep=True)

    note_sweep("parallel.pipeline=1,2")
    assert "note: " not in capsys.readouterr().err
    note_sweep("trainer.seed=1,2")
    note = "note: parallel.pipeline_schedule=gpipe has no effect without a pipeline;"
    assert capsys.readouterr().err.count(note) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("health.spike=rollback checkpoint.every=0", "saves none before the end; use checkpoint.every=30"),
        ("checkpoint.keep_best=true checkpoint.every=0", "saves only the last; use checkpoint.every=100"),
        ("checkpoint.keep_best=true checkpoint.every=29 trainer.eval_every=30", "no step is both saved and evaluated"),
        ("checkpoint.best_mode=max", "for which lower is better; use checkpoint.best_mode=min"),
        ("checkpoint.best_metric=acc", "which has loss; use checkpoint.best_metric=loss"),
        ("recipe=dpo data.path=x checkpoint.best_metric=acc", "loss, reward_margin, reward_accuracy, chosen_reward"),
        ("adapter=lora adapter.init=orthogonal adapter.rank=3", "even ranks, but one is 3; use adapter.init=uniform"),
        ("optim.lr=1e300", "must be at least 0, and from 1.2e-38 to 3.4e38 in magnitude"),
        (
            "data.validation_fraction=1e-12",
            "holds out less than 1e-9 of the documents, which is none; use data.validation_fr",
        ),
        ("data.validation_fraction=0.999999", "it must be at least 0 and at most 0.999"),
        ("trainer.ema_decay=0.999999999999", "it must be at least 0 and at most 0.999999"),
        ("trainer.global_batch=1e15", "it must be at least 1 and at most 1e7"),
        ("trainer.micro_batch=1e15", "it must be at least 1 and at most 1e7"),
        ("trainer.steps=1e15", "it must be at least 1 and at most 1e10"),
        ("trainer.eval_batches=1e15", "it must be at least 1 and at most 1e10"),
        ("launch.threads=10000", "it must be at least 1 and at most 1024"),
        ("data.workers=1024", "it must be at least 0 and at most 256"),
        ("task.label_smoothing=0.999999", "it must be at least 0 and at most 0.9"),
        ("trainer.max_minutes=1e-300", "must be above 0, and from 1.2e-38 to 3.4e38 in magnitude"),
    ],
)
def test_contradictory_keys_are_refused(argv: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(argv.split())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "typed",
    [
        ["trainer.epochs=2", "trainer.eval_every=50", "trainer.early_stopping_patience=3"],
        ["health.spike=skip", "health.non_finite=rollback", "checkpoint.every=20", "trainer.steps=100"],
    ],
)
def test_keys_that_are_read_get_no_note(typed: list[str]) -> None:
    assert noted(*typed) == []
