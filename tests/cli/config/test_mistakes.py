"""Wrong command lines, and what each must say. One table, for ``compose`` alone and for the whole program."""

from dataclasses import dataclass

import pytest

from serried.configs.compose import compose
from serried.configs.errors import UserError


@dataclass(frozen=True)
class Mistake:
    """A wrong command line.

    ``stage`` says who finds out: ``parse`` before anything is composed, ``compose`` from the words and the YAML files
    alone, ``run`` only once the number of
    processes or the files are known. ``{empty}``, ``{short}``, ``{absent}`` and ``{file}`` in ``argv`` stand for paths:
    an empty file, a text of ten bytes, a path where nothing is, and a file where a folder should be.
    """

    name: str
    argv: tuple[str, ...]
    expected: tuple[str, ...]
    stage: str = "compose"
    processes: int = 1


def _mistake(name: str, argv: str, *expected: str, stage: str = "compose", processes: int = 1) -> Mistake:
    return Mistake(name, tuple(argv.split("|")), expected, stage, processes)


MISTAKES = [
    # names
    _mistake("recipe", "recipe=lama8b", "no recipe 'lama8b'", "recipe=llama8b", "tiny"),
    _mistake("model", "model=llama8", "no model 'llama8'", "model=llama8b"),
    _mistake("precision", "precision=bfloat16", "precision=bf16", "fp16"),
    _mistake("top-level key", "dryrun=true", "unknown key dryrun=true", "dry_run=true"),
    _mistake("group", "modle=tiny", "unknown key modle=tiny", "model=tiny"),
    _mistake("key", "trainer.stpes=5", "trainer.stpes=5 (command line)", "trainer.steps=5"),
    _mistake("section", "trainr.steps=5", "trainer.steps=5"),
    _mistake("deep key", "model.rope_scaling.fctor=8", "model.rope_scaling.factor=8"),
    _mistake(
        "deep key in a mapping",
        "model.rope_scaling={rope_type: yarn, factor: 4, beta_fst: 32}",
        "unknown key model.rope_scaling.beta_fst=32",
        "model.rope_scaling.beta_fast=32",
    ),
    _mistake("type of rope", "model.rope_scaling={rope_type: yarm, factor: 4}", "rope_scaling.rope_type=yarn?"),
    _mistake(
        "rope without its keys",
        "model.rope_scaling={rope_type: longrope, factor: 4}",
        "has rope_type=longrope without short_factor, long_factor",
        "'model.rope_scaling={rope_type: yarn, factor: 4}'",
    ),
    _mistake(
        "rope with a key of another",
        "model.rope_scaling={rope_type: yarn, factor: 4, low_freq_factor: 1}",
        "model.rope_scaling.low_freq_factor is used only with rope_type=llama3, not with yarn; remove it",
    ),
    _mistake(
        "no list of factors",
        "model.rope_scaling={rope_type: longrope, factor: 4, short_factor: 1, long_factor: [1]}",
        "model.rope_scaling.short_factor=1 (command line) is not a list of numbers",
    ),
    _mistake(
        "rope that transformers reads otherwise",
        "model=gemma3_1b|model.rope_scaling={rope_type: yarn, factor: 4, truncate: false}",
        "model.rope_scaling.truncate=false is not supported with model.family=gemma3_text",
    ),
    _mistake(
        "rope that transformers has not",
        "model=phi3_mini|model.rope_scaling={rope_type: yarn, factor: 4}",
        "rope_type=yarn with model.family=phi3, for which transformers computes only longrope",
    ),
    _mistake("key with plus", "+trainer.stpes=5", "trainer.steps=5"),
    _mistake("key with two pluses", "++trainer.foo=1", "unknown key trainer.foo=1", "steps, epochs, global_batch"),
    _mistake("bare name", "steps=5", "trainer.steps=5"),
    _mistake("capitals", "Trainer.Steps=5", "trainer.steps=5"),
    # names from elsewhere
    _mistake("learning_rate", "learning_rate=1e-3", "optim.lr=1e-3"),
    *(
        _mistake(f"a time limit in Slurm's words, {given}", f"slurm.time={given}", f"slurm.time_minutes={minutes}?")
        for given, minutes in (("4:00:00", 240), ("90:30", 91), ("1-12", 2160), ("1-00:30:00", 1470), ("45", 45))
    ),
    _mistake(
        "an option of sbatch",
        "slurm.mail_user=a",
        "other options of sbatch are set together in one key",
        "'slurm.options=",
    ),
    _mistake("no option", "slurm.options=-x", "'-x' is not of the form --name=value or --name"),
    _mistake("an option with a key", 'slurm.options="--time=3"', "--time is set by slurm.time_minutes; use that key"),
    _mistake("an option that waits", "slurm.options=--wait", "--wait would keep serried from starting or finding"),
    _mistake("another job", 'slurm.options="--wrap=true"', "--wrap would keep serried from starting or finding"),
    _mistake(
        "an option of our srun", "slurm.srun_options='--ntasks=2'", "--ntasks is set by the batch script; leave it"
    ),
    _mistake("a line of our srun", "slurm.srun_options='--comment=\"a\nreboot\"'", "is not of the form --name=value"),
    _mistake("a late signal", "slurm.signal_seconds=1e9", "slurm.signal_seconds=1e9 (command line) is out of range"),
    _mistake("type and number", "slurm.gpu_type=a100:4", "use slurm.gpu_type=a100 slurm.gpus_per_node=4"),
    _mistake("no size", "slurm.memory=64X", "slurm.memory=64X is not a memory size", "slurm.memory=64G"),
    _mistake(
        "type without number", "slurm.gpu_type=a100", "needs the number of GPUs per node; e.g. slurm.gpus_per_node=8"
    ),
    _mistake("nested alias", "trainer.max_steps=100", "trainer.steps=100"),
    _mistake("misspelt alias", "train.learning_rte=1e-3", "optim.lr=1e-3"),
    _mistake("num_gpus", "num_gpus=8", "torchrun --nproc_per_node=8"),
    _mistake("epochs", "num_train_epochs=3", "trainer.epochs=3"),
    _mistake(
        "accumulation", "gradient_accumulation_steps=4", "is computed as", "trainer.global_batch / (trainer.micro_batch"
    ),
    _mistake("bf16", "bf16=true", "precision=bf16"),
    _mistake("a GPU", "launch.device=gpu", "is not one of auto, cpu, cuda, xpu, npu; did you mean launch.device=auto?"),
    _mistake(
        "compile mode",
        "trainer.compile_mode=max-autotune|trainer.compile=false",
        "has no effect with trainer.compile=false",
    ),
    _mistake("W&B as a switch", "track.wandb=true", "did you mean track.wandb=online?"),
    _mistake("profiler", "profiler=pytorch", "'profile.steps=[10,13]'"),
    _mistake(
        "profile, one step",
        "profile.steps=5",
        "is a single number",
        "give the first and the last step: 'profile.steps=[5,5]'",
    ),
    _mistake("profile, backwards", "profile.steps=[13,10]", "'profile.steps=[10,13]'"),
    _mistake("profile, from 0", "profile.steps=[0,3]", "profile.steps=[0,3]", "count from 1"),
    _mistake(
        "profile, too late", "trainer.steps=20|profile.steps=[30,33]", "trainer.steps=20", "'profile.steps=[17,20]'"
    ),
    _mistake(
        "profile, behind the stop",
        "trainer.stop_at=5|profile.steps=[5,8]",
        "trainer.stop_at=5",
        "'profile.steps=[2,5]'",
    ),
    _mistake("memory snapshot", "enable_memory_snapshot=true", "profile.memory=true"),
    _mistake(
        "no such checkpoint",
        "checkpoint.resume=runs/nowhere",
        "runs/nowhere",
        "must",
        "Hugging Face model",
        stage="run",
    ),
    _mistake("must resume", "checkpoint.resume=must", "has no checkpoint", "=auto", stage="run"),
    _mistake("capital never", "checkpoint.resume=Never", "checkpoint.resume=never"),
    _mistake("best of nothing", "checkpoint.keep_best=true|trainer.eval_every=0", "trainer.eval_every="),
    _mistake("keep none", "checkpoint.keep=0", "checkpoint.keep", "1"),
    _mistake("checkpoint mode", "checkpoint.mode=asynchronous", "async", "sync"),
    # not yet
    _mistake("hf data", "data=huggingface", "Did you mean data=hf?"),
    _mistake("no dataset", "data=hf", "data.path=OWNER/NAME_OR_FOLDER"),
    _mistake("idle subset", "data.subset=en", "add data=hf"),
    _mistake(
        "idle column", "data=tokens|data.path=x|data.tokenizer=bytes|data.text_column=body", "is a key of data=text, hf"
    ),
    _mistake("idle vocabulary", "data.vocab_size=300", "data.tokenizer=train", "model.vocab_size=300"),
    _mistake("ranges", "data.fetch=ranges", "add data.cache_dir=s3://BUCKET/PATH, or use data=tokens data.path=s3://"),
    _mistake(
        "limit", "data.fetch_limit=5", "data.fetch_limit=5 is not a size in MB, GB or TB", "data.fetch_limit=50GB"
    ),
    _mistake("sweep", "-m|trainer.seed=1", "but no key has several", stage="parse"),
    _mistake("several values", "trainer.seed=1,2", "has several values: give one, or sweep", "train.py -m"),
    # form
    _mistake("dashes", "--trainer.lr=1", "no dashes", "optim.lr=1"),
    _mistake("dashes and blank", "--recipe|llama8b", "no dashes", "recipe=llama8b"),
    _mistake("unknown flag", "--verbose", "unknown flag --verbose", "--help"),
    _mistake("no equals sign", "recipe|tiny", "recipe=tiny"),
    _mistake("no key", "=5", "no key"),
    _mistake("no value", "trainer.steps=", "no value", "trainer.steps=1000"),
    _mistake("two equals signs", "run.name=a=b", "contains a '='", """'run.name="a=b"'"""),
    _mistake("section as key", "trainer=5", "trainer is a section", "global_batch"),
    _mistake("below a value", "trainer.steps.x=1", "trainer.steps=1"),
    _mistake("deletion", "~trainer.steps", "cannot be deleted", "trainer.steps=1000"),
    _mistake("unset variable", "run.name=${oc.env:NOPE}", "variable NOPE is not set", "default: ${oc.env:NOPE,VALUE}"),
    _mistake("reference", "run.name=${nope}", "run.name=${nope} (command line)", "not found"),
    # values
    _mistake("no number", "trainer.steps=abc", "trainer.steps=abc (command line) is not a whole number", "10k, 2M"),
    _mistake("fraction", "trainer.global_batch=1.5", "is not a whole number"),
    _mistake("negative", "trainer.steps=-5", "at least 1"),
    _mistake("out of range", "schedule.min_lr_ratio=1.5", "at least 0 and at most 1"),
    _mistake("infinite", "optim.lr=inf", "not finite"),
    _mistake("no switch", "dry_run=maybe", "true or false"),
    _mistake("no such choice", "data.tokenizer=byte", "bytes, chars", "data.tokenizer=bytes"),
    _mistake("list", "optim.betas=0.9,0.95", "'optim.betas=[0.9,0.95]'"),
    # values that contradict each other
    _mistake("heads", "model.heads=5", "model.heads=5 does not divide model.dim=128", "model.heads=4"),
    _mistake("kv heads", "model.kv_heads=3", "model.kv_heads=3 does not divide model.heads=4", "model.kv_heads=2"),
    _mistake("odd dim", "model.dim=129", "model.heads=4 does not divide model.dim=129; use model.dim=128"),
    _mistake("odd head_dim", "model.head_dim=7", "model.head_dim=7 is odd", "use model.head_dim=8"),
    _mistake(
        "odd heads", "model.dim=28", "model.head_dim=7 (model.dim=28 / model.heads=4) is odd", "use model.head_dim=8"
    ),
    _mistake("long sequence", "data.sequence_length=16k", "16000 exceeds", "data.sequence_length=8192"),
    _mistake(
        "idle recipe", "precision=bf16|precision.scaling=tensorwise", "has an effect only with precision=float8; add it"
    ),
    _mistake(
        "idle scale", "precision.initial_scale=8", "precision.initial_scale=8.0 has an effect only with precision=fp16"
    ),
    _mistake("idle gather", "precision=bf16|precision.gather=float8", "is not supported with precision=bf16"),
    _mistake("no path", "data=text", "data.path=FILE_OR_FOLDER_OR_GLOB"),
    _mistake("idle path", "data.path=books", "add data=text"),
    # tasks
    _mistake("one row", "recipe=reward|parallel=fsdp|parallel.tensor=2", "=2 is not supported with task.name=reward"),
    _mistake("sample", "recipe=reward|trainer.sample_tokens=9", "9 but task.name=reward does not generate text"),
    _mistake("beta of a reward", "recipe=reward|task.beta=1", "task.beta"),
    _mistake("margin", "recipe=dpo|task.margin=1", "task.margin=1 is not used with task.loss=dpo, only with cpo"),
    _mistake("label weight", "recipe=dpo|task.desirable_weight=2", "=2 is not used with task.loss=dpo, only with kto"),
    _mistake("nll weight", "recipe=kto|task.nll_weight=1", "=1 is not used with task.loss=kto, only with dpo"),
    _mistake("no label weighs", "recipe=kto|task.desirable_weight=0|task.undesirable_weight=0", "nothing to train on"),
    _mistake("beta of 0", "recipe=kto|task.beta=0", "task.beta"),
    _mistake("pairs for KTO", "recipe=dpo|task.loss=kto", "use recipe=kto, or data.format=unpaired"),
    _mistake("answers for DPO", "recipe=kto|task.loss=dpo", "data.format=unpaired has none; use task.loss=kto"),
    _mistake("answers for rewards", "recipe=reward|data.format=unpaired", "use recipe=kto, for answers with a label"),
    _mistake(
        "isolated pairs", "recipe=dpo|data.isolate_documents=true", "=true has no effect with data.format=preference"
    ),
    _mistake(
        "no pairs", "recipe=dpo|data.format=chat", "supported by task.name=preference; use data.format=preference"
    ),
    _mistake(
        "parts of answers",
        "recipe=dpo|parallel=fsdp|parallel.context=2",
        "=2 is not supported with task.name=preference",
    ),
    _mistake("key of a task", "recipe=dpo|task.bta=1", "did you mean task.beta=1?"),
    _mistake("beta", "recipe=dpo|task.beta=0", "task.beta=0 (command line) is out of range: it must be above 0"),
    # model families
    _mistake("key of gemma2", "model=gemma3_1b|model.score_soft_cap=50", "=null, or model.family=gemma2"),
    _mistake("key of gemma3", "model=gemma2_9b|model.local_rope_theta=1e4", "=null, or model.family=gemma3"),
    _mistake(
        "window",
        "model.sliding_window=64",
        "model.family=gemma2, gemma3_text, gemma4_text, gpt_oss, mistral, phi3, but the run uses",
    ),
    _mistake("soft cap", "model=gemma2_9b|model.attn_logit_softcapping=50", "did you mean model.score_soft_cap=50?"),
    _mistake("epsilon", "model=mistral7b|model.rms_norm_eps=1e-5", "did you mean model.norm_eps=1e-5?"),
    # optimizers and schedules
    _mistake("optim", "optim=lionn", "no optim 'lionn'. Did you mean optim=lion?"),
    _mistake("optim.name", "optim.name=lionn", "no optimizer 'lionn' is registered; did you mean optim=lion?"),
    _mistake(
        "SGD", "optim=sgd|optim.betas=[0.9,0.95]", "a key of optim=adamw, adam, ", "lion, ", "the run uses optim=sgd"
    ),
    _mistake(
        "key of a schedule", "schedule=constant|schedule.min_lr_ratio=0.2", "a key of schedule=cosine, linear, wsd"
    ),
    _mistake("betas", "optim=lion|optim.betas=[0.9,1]", "both must be at least 0 and below 1"),
    # several
    _mistake(
        "all at once",
        "recipe=tny|trainer.stpes=5|trainer.global_batch=x|optim.lr=-1",
        "4 mistakes:",
        "recipe=tiny",
        "trainer.steps=5",
        "trainer.global_batch=x (command line) is not a whole number",
        "optim.lr=-1 (command line) is out of range",
    ),
    # what only the run knows
    _mistake("degrees", "parallel=hsdp|parallel.replicate=3|parallel.shard=2", "3", "2", "4", stage="run", processes=4),
    _mistake("degree", "parallel=hsdp|parallel.replicate=3", "parallel.replicate=3", "4", stage="run", processes=4),
    _mistake(
        "two rests", "parallel=hsdp|parallel.replicate=-1|parallel.shard=-1", "only one", stage="run", processes=2
    ),
    _mistake("single on many", "parallel=single", "parallel=single", stage="run", processes=2),
    _mistake("ddp does not shard", "parallel=ddp|parallel.shard=2", "parallel.shard=2", stage="run", processes=2),
    _mistake(
        "shards of one process",
        "parallel=fsdp|parallel.shard=8",
        "8 processes",
        "1 process was started",
        "--nproc_per_node=8 (in a dry run: launch.processes=8)",
        "parallel.shard=-1",
        stage="run",
    ),
    _mistake(
        "replicas of one process",
        "parallel=ddp|parallel.replicate=4",
        "4 processes",
        "1 process was started",
        "--nproc_per_node=4 (in a dry run: launch.processes=4)",
        "parallel.replicate=-1",
        stage="run",
    ),
    _mistake(
        "replicas that exchange each time",
        "recipe=llama8b|parallel=ddp",
        "parallel.sync_every_micro_batch=true",
        "use parallel.sync_every_micro_batch=false",
        stage="run",
    ),
    _mistake("batch", "trainer.global_batch=30|trainer.micro_batch=8", "30", "8", stage="run"),
    _mistake("batch over ranks", "trainer.global_batch=8|trainer.micro_batch=8", "8", "4", stage="run", processes=4),
    _mistake("absent file", "data=text|data.path={absent}", "{absent}", stage="run"),
    _mistake("empty file", "data=text|data.path={empty}", "{empty}", stage="run"),
    _mistake("short text", "data=text|data.path={short}", "data.sequence_length", "add text to data.path", stage="run"),
    _mistake("run folder is a file", "run.dir={file}", "{file}", stage="run"),
]


def by_name(stage: str) -> list:
    """The mistakes of one stage as parameters of a test."""
    return [pytest.param(mistake, id=mistake.name) for mistake in MISTAKES if mistake.stage == stage]


def test_the_table_is_large_and_its_names_are_unique():
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 25


@pytest.mark.parametrize("mistake", by_name("compose"))
def test_mistake_is_refused_in_one_line_with_a_fix(mistake: Mistake):
    with pytest.raises(UserError) as caught:
        compose(mistake.argv)
    message = str(caught.value)
    for text in mistake.expected:
        assert text in message
    head, *rest = message.splitlines()
    assert not rest or head == f"{len(rest)} mistakes:"
    assert all(line.startswith("  ") for line in rest)
    for jargon in (
        "Traceback",
        "Input should",
        "extra_forbidden",
        "Extra inputs",
        "pydantic",
        "Override",
        "mismatched",
    ):
        assert jargon not in message


@pytest.mark.parametrize("mistake", by_name("run"))
def test_mistake_that_only_the_run_can_detect_composes(mistake: Mistake):
    compose(mistake.argv)
