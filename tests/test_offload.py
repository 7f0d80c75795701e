"""``optim.offload=true``: the same bits and checkpoints, with the optimizer's state in host memory."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from harness.cluster import Cluster
from harness.runs import metrics, overrides, weights
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.schema import OptimSection
from serried.parallel.held import local
from serried.program import main
from serried.trainer.host_memory import check_offload
from serried.trainer.optimizer import build_optimizer, create_state, take_step
from serried.trainer.optimizer_state import group_values, tensor_state
from serried.trainer.plan.traced import memory_of
from tests.test_optimizers import OWN_OPTIMIZER, with_own
from tests.test_plan import SHORT, TINY, both

OFFLOAD = "optim.offload=true"


@pytest.mark.parametrize("optim", ["adamw", "adam", "sgd", "rmsprop", "lion", "adamw8bit", "adamw4bit", "rolling"])
def test_updates_and_state_have_the_bits_of_those_without(optim: str, tmp_path: Path) -> None:
    (tmp_path / "rolling.py").write_text(OWN_OPTIMIZER)
    with_own(tmp_path / "rolling.py")

    section = compose([f"optim={optim}", "optim.lr=0.1"]).optim

    def bits(section: OptimSection) -> list[Any]:
        torch.manual_seed(2)
        named = {name: nn.Parameter(torch.randn(6, 32)) for name in ("first", "second", "unused")}
        named["norm"] = nn.Parameter(torch.ones(4))
        optimizer = build_optimizer(named.items(), section)
        for rejected in (True, False, True, False):
            for name in ("first", "second", "norm"):
                named[name].grad = torch.full_like(named[name], math.nan) if rejected else torch.randn_like(named[name])
            take_step(optimizer, torch.tensor(2.0), torch.tensor(float(rejected)))
        state = [value for each in named.values() for value in tensor_state(optimizer, each).values()]
        whole = [each.detach().view(-1).view(torch.uint8).numpy().tobytes() for each in (*named.values(), *state)]
        return [*whole, group_values(optimizer)]

    assert bits(section.model_copy(update={"offload": True})) == bits(section)


class Pinned(TorchDispatchMode):
    """Counts the bytes that are asked for in pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if (kwargs or {}).get("pin_memory"):
            self.bytes += local(result).nbytes
        return result


def test_state_of_a_gpus_parameters_lies_in_pinned_host_memory() -> None:
    """Whole and sharded ones, on tensors without data, which may be of a device that is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cuda", [0, 1])
        with FakeTensorMode(allow_non_fake_inputs=True), Pinned() as pinned:
            whole = torch.zeros(4, 32, device="cuda")
            parameters: list[Tensor] = [nn.Parameter(whole)]
            parameters.append(nn.Parameter(DTensor.from_local(whole, mesh, [Shard(0)], run_check=False)))
            optimizer = build_optimizer(zip(("whole", "sharded"), parameters, strict=True), compose([OFFLOAD]).optim)
            create_state(optimizer)  # the second step, which fetches what the first has left
            state = [each for parameter in parameters for each in tensor_state(optimizer, parameter).values()]
            assert {each.device.type for each in parameters} == {"cuda"}
            assert {local(each).device.type for each in state if each.ndim} == {"cpu"}
            assert pinned.bytes == sum(local(each).nbytes for each in state if each.ndim) > 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("layout", "optim", "halves"),
    [
        (("parallel=ddp",), "adamw", [[OFFLOAD], []]),
        (("parallel=fsdp",), "rolling", [[], [OFFLOAD]]),
        pytest.param(
            ("parallel=fsdp", "parallel.tensor=2"), "adamw8bit", [[OFFLOAD], [OFFLOAD]], marks=pytest.mark.slow
        ),
        pytest.param(("parallel=fsdp", "precision=bf16"), "adamw_bf16", [[OFFLOAD], []], marks=pytest.mark.slow),
    ],
)
def test_a_run_may_switch_it_on_or_off_when_it_resumes(
    layout: tuple[str, ...], optim: str, halves: list[list[str]], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rolling.py"
    file.write_text(OWN_OPTIMIZER)

    def train(name: str, *more: str) -> Path:
        small = ["model.hidden_dim=64", "trainer.steps=4", "trainer.global_batch=4", "trainer.micro_batch=2"]
        small += [f"optim={optim}", "health.replica_check_every=1"]
        argv = overrides(text, tmp_path / name, *layout, *small, *more)
        cluster.run(2, "tests.test_optimizers:train_with_own", argv=argv, file=str(file))
        return tmp_path / name

    whole = train("whole")
    train("switched", "trainer.stop_at=2", *halves[0])
    switched = train("switched", *halves[1])
    assert [line["loss"] for line in metrics(switched)] == [line["loss"] for line in metrics(whole)]
    for stem in ("model", "optimizer"):
        ours, theirs = weights(switched, stem), weights(whole, stem)
        assert ours.keys() == theirs.keys()
        assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


@pytest.mark.slow
def test_the_plan_counts_state_as_the_hosts_by_formula_and_trace() -> None:
    argv = (*TINY, "trainer.global_batch=16", "parallel=fsdp", "parallel.tensor=2", "optim=adamw8bit")
    (stage,), formula, _ = both(*argv, processes=4)
    (offloaded,), less, _ = both(*argv, OFFLOAD, processes=4)
    memory = memory_of([offloaded])
    assert less.on_host == memory.on_host == formula.optimizer_state
    assert formula.total - less.total == stage.step.peak - memory.peak == formula.optimizer_state


def test_the_device_holds_the_state_of_one_parameter_in_an_update(cluster: Cluster, tmp_path: Path) -> None:
    argv = (*TINY, "trainer.global_batch=1", "trainer.micro_batch=1", "data.sequence_length=8", "parallel=single")
    argv += ("model.layers=1", "model.vocab_size=20000", OFFLOAD)
    (stage,), formula, _ = both(*argv, processes=1)
    memory = memory_of([stage])
    assert memory.phase == "optimizer"
    assert memory.peak == pytest.approx(formula.total, rel=1e-3)
    assert memory.on_host == formula.on_host
    (answer,) = cluster.run(1, "harness.allocated:allocated_and_sent", argv=[*SHORT, *argv], path=str(tmp_path))
    assert memory.peak + memory.on_host == pytest.approx(answer.value[0], rel=1e-3)


@pytest.mark.parametrize("optim", ["muon", "adafactor"])
def test_an_optimizer_that_needs_all_parameters_at_once_is_refused(
    optim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"optim={optim}", OFFLOAD, "dry_run=true"]) == 78
    assert f"one parameter after the other, and with optim={optim}" in capsys.readouterr().err


def test_the_plan_says_where_the_state_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=llama1b", "data.tokenizer=bytes", "launch.processes=8", OFFLOAD, "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    assert "optimizer  adamw, state in host memory, peak lr" in printed
    assert "; optimizer state in host memory 1.2GiB\n" in printed


def test_too_little_host_memory_is_one_line() -> None:
    session: Any = SimpleNamespace(gather=lambda here: [here, 2**30], local_world_size=1)
    check_offload(2**20, session)
    with pytest.raises(UserError, match=r"needs 1.1GiB of host memory for each rank, and 1.0GiB are available; use"):
        check_offload(11 * 2**30 // 10, session)
