"""Layouts that do not fit the model or the batch: one line with the equation and a value that works."""

import re
from importlib.metadata import PackageNotFoundError

import pytest
from torch import nn

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.parallel.layout import checks
from serried.parallel.layout.checks import allowed_micro_batches, check_layout, check_zero_bubble
from serried.parallel.layout.mesh import gradient_accumulation, resolve_layout
from serried.parallel.layout.recovery_checks import (
    Processes,
    check_recovery,
    check_recovery_start,
    torchrun_is_elastic,
)
from serried.parallel.plan import ParallelPlan
from serried.planning import planned_layout
from serried.trainer.model import check_model

TINY = [
    "recipe=tiny",
    "parallel=fsdp",
    "model.layers=4",
    "model.heads=8",
    "model.kv_heads=4",
    "data.sequence_length=64",
]


def check(arguments: list[str], processes: int) -> None:
    config = compose(["run.name=checks", *TINY, *arguments])
    layout = resolve_layout(config.parallel, processes)
    check_layout(config, layout, gradient_accumulation(config.trainer, layout))


@pytest.mark.parametrize(
    ("arguments", "processes", "says", "mended"),
    [
        ("parallel.tensor=3 model.hidden_dim=384", 3, "parallel.tensor=3 does not divide model.heads=8", ""),
        ("parallel.tensor=8", 8, "parallel.tensor=8 does not divide model.kv_heads=4; use parallel.tensor=4", ""),
        (
            "parallel.context=2 data.sequence_length=66",
            2,
            "data.sequence_length=66 is not a multiple of 4 = 2 x parallel.context 2",
            "data.sequence_length=64",
        ),
        (
            "parallel.tensor=4 data.sequence_length=30",
            4,
            "parallel.tensor=4 does not divide data.sequence_length=30",
            "parallel.sequence=false",
        ),
        ("parallel.pipeline=5", 5, "model.layers=4 is less than the 5 pipeline stages", ""),
        (
            "parallel.pipeline=2 parallel.layers_of_stages=[2,3]",
            2,
            "parallel.layers_of_stages=[2, 3] sums to 5, but the model has model.layers=4",
            "",
        ),
        (
            "parallel.pipeline=4 trainer.global_batch=8 trainer.micro_batch=4",
            4,
            "accumulation 2 = global_batch 8 / (micro_batch 4 x 1 data ranks) is less than the",
            "trainer.micro_batch=2",
        ),
        (
            "parallel.pipeline=2 parallel.pipeline_schedule=interleaved trainer.global_batch=5 trainer.micro_batch=1",
            2,
            "cannot be divided into rounds of 2",
            "parallel.pipeline_schedule=gpipe",
        ),
        ("parallel.expert=2", 2, "parallel.expert=2: the model has no experts", "parallel.expert=1"),
        (
            "parallel=ddp parallel.pipeline=2",
            4,
            "parallel.pipeline=2 is not supported with parallel=ddp",
            "parallel=fsdp",
        ),
        ("parallel=ddp parallel.sync_every_micro_batch=true", 2, "only adds communication", "parallel=fsdp"),
        (
            "parallel.pipeline=2 parallel.sync_every_micro_batch=true",
            2,
            "with a pipeline",
            "parallel.sync_every_micro_batch=false",
        ),
        (
            "parallel.pipeline=2 parallel.pipeline_schedule=zbv parallel.reshard_after_forward=true "
            "trainer.micro_batch=1",
            2,
            "after FSDP has freed the weights",
            "parallel.reshard_after_forward=false",
        ),
        (
            "parallel=ddp trainer.global_batch=64 trainer.micro_batch=4",
            7,
            "trainer.global_batch=64 is not a multiple of 28 = trainer.micro_batch 4 x 7 data ranks",
            "parallel.uneven=true",
        ),
        (
            "parallel=hsdp parallel.replicate=7 parallel.shard=2 parallel.uneven=true trainer.global_batch=66 "
            "trainer.micro_batch=4",
            14,
            "is not a multiple of 8 = trainer.micro_batch 4 x 2 ranks of a replica",
            "trainer.global_batch=64",
        ),
        (
            "parallel=ddp parallel.uneven=true trainer.global_batch=8 trainer.micro_batch=2",
            7,
            "trainer.global_batch=8 is not a multiple of 14",
            "trainer.global_batch=14",
        ),
        (
            "parallel.uneven=true",
            2,
            "parallel.uneven=true has no effect with parallel=fsdp",
            "parallel=ddp",
        ),
        (
            "parallel=hsdp parallel.replicate=3 parallel.shard=2 parallel.uneven=true trainer.global_batch=64 "
            "trainer.micro_batch=4 parallel.sync_every_micro_batch=true",
            6,
            "a replica with fewer micro-batches would reduce gradients fewer times",
            "parallel.sync_every_micro_batch=false",
        ),
        (
            "parallel=hsdp parallel.replicate=2 parallel.pipeline=2 parallel.uneven=true trainer.global_batch=12 "
            "trainer.micro_batch=4",
            4,
            "accumulation 1 = global_batch 12 / (micro_batch 4 x 2 data ranks) is less than the 2 stages",
            "trainer.micro_batch=3",
        ),
        ("adapter.rank=4", 1, "adapter.rank=4 has no effect with adapter.method=none", "adapter=lora"),
        ("adapter.modules=[q_proj]", 1, "adapter.modules=[q_proj] has no effect", "adapter=lora"),
        ("optim=adamw_bf16", 2, "optim=adamw_bf16 with precision=fp32: weights stored in bf16", "precision=bf16"),
        (
            "optim=adamw_bf16 precision=bf16 adapter=lora",
            2,
            "adapter.method=lora saves almost no memory",
            "optim=adamw",
        ),
        ("optim=adamw_bf16 precision=bf16 trainer.ema_decay=0.9", 2, "would not change", "trainer.ema_decay=0"),
    ],
)
def test_a_layout_that_does_not_fit_says_why_and_what_would(
    arguments: str, processes: int, says: str, mended: str
) -> None:
    with pytest.raises(UserError) as caught:
        check(arguments.split(), processes)
    message = str(caught.value)
    assert says in message
    assert "\n" not in message
    fixes = re.findall(r"[a-z]+(?:\.[a-z_]+)?=[\w.]+", message[message.rindex("use ") :]) if "use " in message else []
    assert mended in fixes if mended else True
    if mended:
        check([*arguments.split(), mended], processes)


@pytest.mark.parametrize(
    ("arguments", "processes"),
    [
        ("parallel.tensor=2 parallel.pipeline=2", 8),
        ("parallel.context=2 parallel.tensor=2", 4),
        ("parallel.pipeline=2 parallel.pipeline_schedule=zbv trainer.global_batch=16 trainer.micro_batch=2", 4),
    ],
)
def test_valid_layouts_are_accepted(arguments: str, processes: int) -> None:
    check(arguments.split(), processes)


def test_schedules_that_divide_backwards_need_torch_2_12() -> None:
    for version in ("2.12.0", "2.15.0+cu132", "3.0.0a0+git1234567"):
        check_zero_bubble("zbv", version)
    with pytest.raises(
        UserError,
        match=r"^parallel\.pipeline_schedule=zbv needs torch 2\.12 or newer, but torch 2\.11\.0\+cu130 is installed; ",
    ):
        check_zero_bubble("zbv", "2.11.0+cu130")


def test_login_node_does_not_check_the_torch_version_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have none."""

    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(checks, "_version_of", none)
    words = ["parallel.pipeline=2", "parallel.pipeline_schedule=zbv", "trainer.micro_batch=1"]
    check([*words, "launch=slurm"], 2)
    with pytest.raises(PackageNotFoundError):
        check(words, 2)


def test_automatic_micro_batch_of_uneven_shares_keeps_them_within_a_tenth() -> None:
    """With 1024 samples on 7 replicas, one has at least 147: 160 with micro-batches of 32, 192 with 64."""
    config = compose([*TINY, "parallel=ddp", "parallel.uneven=true", "trainer.global_batch=1024"])
    layout = resolve_layout(config.parallel, 7)
    assert allowed_micro_batches(config, layout) == [32, 16, 8, 4, 2, 1]


def test_sync_batch_norm_is_refused_with_uneven_shares() -> None:
    config = compose([*TINY, "parallel=ddp", "parallel.uneven=true"])
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    with pytest.raises(UserError, match="with SyncBatchNorm: all ranks exchange statistics in each micro-batch"):
        check_model(config, model, ParallelPlan(), resolve_layout(config.parallel, 3))
    check_model(config, model[0], ParallelPlan(), resolve_layout(config.parallel, 3))


ONE_NODE = Processes("local", 1, 8)


def check_recovering(arguments: str, world: int, processes: Processes = ONE_NODE) -> None:
    config = compose(["run.name=checks", *TINY, "recover.mode=memory", *arguments.split()])
    layout = resolve_layout(config.parallel, world)
    check_layout(config, layout, gradient_accumulation(config.trainer, layout))
    check_recovery(config, layout)
    check_recovery_start(config, layout, processes)


@pytest.mark.parametrize(
    ("arguments", "world", "says", "mended"),
    [
        ("", 4, "recover.mode=memory needs replicas: use parallel=ddp, or parallel=hsdp parallel.", "parallel=ddp"),
        ("", 4, "recover.mode=memory needs replicas: ", "parallel=hsdp parallel.replicate=2 parallel.shard=-1"),
        ("parallel=ddp", 1, "recover.mode=memory needs replicas: ", ""),
        (
            "parallel=ddp recover.min_replicas=5",
            4,
            "recover.min_replicas=5, but a loss leaves 3 of the 4 replicas; use recover.min_replicas=3, or ",
            "recover.min_replicas=3",
        ),
        ("parallel=ddp recover.min_replicas=4", 4, "recover.min_replicas=4, but a loss leaves 3 of the 4 replicas", ""),
        ("parallel=ddp optim=muon", 2, "with optim=muon: the ranks exchange data during the", "optim=adamw"),
        ("parallel=ddp optim=adafactor", 2, "with optim=adafactor: the ranks exchange data", "optim=adamw"),
        (
            "parallel=ddp data=hf data.path=a/b data.streaming=true",
            2,
            "recover.mode=memory with data.streaming=true",
            "data.streaming=false",
        ),
        (
            "parallel=hsdp parallel.replicate=2 parallel.shard=2 parallel.sync_every_micro_batch=true",
            4,
            "parallel.sync_every_micro_batch=true: after a loss, replicas with fewer micro-batches",
            "parallel.sync_every_micro_batch=false",
        ),
        (
            "parallel=hsdp parallel.replicate=3 parallel.pipeline=2 parallel.pipeline_schedule=interleaved "
            "parallel.stages_per_rank=2 trainer.global_batch=18 trainer.micro_batch=2",
            6,
            "recover.mode=memory, after the loss of 1 replica: accumulation 5 = ",
            "parallel.pipeline_schedule=gpipe parallel.stages_per_rank=1",
        ),
    ],
)
def test_run_that_could_not_continue_after_a_loss_is_refused_in_one_line(
    arguments: str, world: int, says: str, mended: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_recovering(arguments, world)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    if mended:
        check_recovering(f"{arguments} {mended}", world)


@pytest.mark.parametrize(
    ("arguments", "world", "processes", "says"),
    [
        (
            "parallel=ddp",
            4,
            Processes("torchrun", 1, 4),
            "recover.mode=memory under one torchrun agent: the agent ends all processes when one dies; start them with "
            "python train.py launch=local launch.processes=4, or use recover.mode=off",
        ),
        ("parallel=ddp", 4, Processes("slurm", 1, 4), "with launch=slurm on one node: all processes of a node end"),
        ("parallel=ddp", 4, Processes("torchrun", 2, 2, 3), "with torchrun --max-restarts=3: agents would restart"),
        (
            "parallel=ddp",
            4,
            Processes("torchrun", 2, 2, is_elastic=True),
            "with an elastic rendezvous of torchrun: the loss of the node that hosts it ends all others",
        ),
        (
            "parallel=hsdp parallel.replicate=2 parallel.pipeline=2",
            4,
            Processes("slurm", 2, 2),
            "without node 0, 0 of 2 replicas would be whole, as the stages of a pipeline are on different nodes and "
            "recover.min_replicas=1; use parallel.pipeline=1, or recover.mode=off",
        ),
        (
            "parallel=hsdp parallel.replicate=2 parallel.shard=3",
            6,
            Processes("torchrun", 3, 2),
            "without node 0, 0 of 2 replicas would be whole, as nodes share replicas and recover.min_replicas=1; use "
            "parallel.shard=2 parallel.replicate=-1, or recover.mode=off",
        ),
        (
            "parallel=hsdp parallel.replicate=3 parallel.shard=2",
            6,
            Processes("torchrun", 2, 3),  # the third replica is whole, but on the node of a rank of the second
            "without node 0, 0 of 3 replicas would be whole, as nodes share replicas and recover.min_replicas=1",
        ),
        (
            "parallel=ddp recover.min_replicas=3",
            4,
            Processes("torchrun", 2, 2),
            "without node 0, 2 of 4 replicas would be whole, as nodes share replicas and recover.min_replicas=3",
        ),
    ],
)
def test_processes_that_would_not_outlive_a_loss_are_refused_in_one_line(
    arguments: str, world: int, processes: Processes, says: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_recovering(f"{arguments} trainer.global_batch=12 trainer.micro_batch=1", world, processes)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "world", "processes"),
    [
        ("parallel=ddp", 2, Processes("local", 1, 2)),
        ("parallel=hsdp parallel.replicate=2 parallel.shard=2", 4, Processes("slurm", 2, 2)),
        ("parallel=hsdp parallel.replicate=2 parallel.shard=2", 4, Processes("torchrun", 4, 1)),
        # A node has one stage of one replica.
        ("parallel=hsdp parallel.replicate=2 parallel.pipeline=2", 4, Processes("slurm", 4, 1)),
        ("parallel=hsdp parallel.replicate=2 parallel.pipeline=2", 4, Processes("local", 1, 4)),
    ],
)
def test_run_that_outlives_a_loss_is_accepted(arguments: str, world: int, processes: Processes) -> None:
    check_recovering(f"{arguments} trainer.global_batch=12 trainer.micro_batch=1", world, processes)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, "under one torchrun agent"),
        (
            {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_MAX_RESTARTS": 3},
            "with torchrun --max-restarts=3",
        ),
        (
            {"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": 2, "PET_RDZV_BACKEND": "c10d"},
            "with an elastic rendezvous of torchrun",
        ),
        ({}, "with launch=kubernetes: a pod ends when another one leaves"),
    ],
)
def test_started_processes_are_recognized_by_their_environment(
    variables: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "a", "MASTER_PORT": 1}
    for name, value in (started | variables).items():
        monkeypatch.setenv(name, str(value))
    launch = "launch=torchrun" if variables else "launch=kubernetes launch.processes=4"
    config = compose(["run.name=checks", *TINY, "recover.mode=memory", "parallel=ddp", *launch.split()])
    with pytest.raises(UserError, match=f"^recover.mode=memory {says}"):
        planned_layout(config)


@pytest.mark.parametrize(
    ("command", "is_elastic"),
    [
        ("torchrun --nnodes=2 --node-rank=0 train.py", False),
        ("torchrun --nnodes=2 --rdzv-backend=static train.py", False),
        ("torchrun --rdzv_backend c10d train.py", True),
        ("torchrun --standalone train.py", True),
        ("torchrun --nnodes=2 --rdzv-backend etcd-v2 train.py", True),
    ],
)
def test_rendezvous_is_recognized_by_the_command_line(command: str, is_elastic: bool) -> None:
    assert torchrun_is_elastic(command.split()) == is_elastic


def test_sync_batch_norm_is_refused_with_recovery() -> None:
    config = compose([*TINY, "parallel=ddp", "recover.mode=memory"])
    with pytest.raises(UserError, match=r"^recover\.mode=memory with SyncBatchNorm: .*; use recover\.mode=off, or "):
        check_model(config, nn.SyncBatchNorm(4), ParallelPlan(), resolve_layout(config.parallel, 3))
