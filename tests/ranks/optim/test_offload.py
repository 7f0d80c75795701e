"""``optim.offload=true``: the same bits and checkpoints, with the optimizer's state in host memory."""

import math
from functools import partial
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

import serried
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.schema.declaration import declaring
from serried.configs.schema.sections import OptimSection
from serried.parallel.checkpoint_mapping import unchanged
from serried.parallel.layout.local_shards import local
from serried.parallel.layout.mesh import resolve_layout
from serried.parallel.layout.process_groups import Groups
from serried.parallel.parallelize import parallelize
from serried.parallel.plan import ParallelPlan
from serried.parallel.step_phases import Phases
from serried.parallel.sum_table import SumTable
from serried.planner.overview import dry_run
from serried.planner.trace.traced_step import memory_of
from serried.program import main
from serried.recipes.text.causal_lm import CausalLM
from serried.runtime.session import Session
from serried.task_class import declaration
from serried.trainer.checkpoint.checkpoint_size import copied_bytes
from serried.trainer.checkpoint.checkpoints import FolderCheckpoints
from serried.trainer.checkpoint.save import Checkpointer
from serried.trainer.checkpoint.tensors import state_parts
from serried.trainer.memory.host_memory import check_host_memory
from serried.trainer.model import build_model, sharded
from serried.trainer.optim.optimizer import build_optimizer, create_state, model_optimizer, take_step, takes_verdict
from serried.trainer.optim.optimizer_state import group_values, tensor_state
from serried.trainer.optim.weight_average import WeightAverage
from serried.trainer.task import task_for_run
from serried.trainer.training_state import train_step
from testing.rank_pool import Cluster
from testing.runs import different_tensors, metrics, overrides
from tests.ranks.optim.test_optimizers import OWN_OPTIMIZER, with_own
from tests.unit.planner.test_plan import SHORT, TINY, both

SYNC = "parallel.sync_every_micro_batch=true"
OFFLOAD, PARAMETERS = "optim.offload=true", "parallel.offload=true"


@pytest.mark.parametrize("optim", ["adamw", "adam", "sgd", "rmsprop", "lion", "adamw8bit", "adamw4bit", "rolling"])
def test_offload_keeps_updates_and_state_bitwise_equal(optim: str, tmp_path: Path) -> None:
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


class PinnedLater(Pinned):
    """Counts those of tensors that are copied there too, which fake tensors cannot be."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is not torch.ops.aten._pin_memory.default:
            return super().__torch_dispatch__(operation, types, args, kwargs)
        self.bytes += args[0].nbytes
        return args[0].clone()


def test_offloaded_state_of_a_gpu_is_in_pinned_host_memory() -> None:
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


@pytest.mark.parametrize("optim", ["adamw", pytest.param("adamw8bit", marks=pytest.mark.slow)])
def test_step_with_offloaded_parameters_mixes_no_devices(optim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharded by FSDP2 for a GPU that is not there, on tensors without data, which refuse operations on two devices."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        config = compose(
            ["model=moe_tiny", "model.layers=2", "parallel=fsdp", "parallel.tensor=2", PARAMETERS, f"optim={optim}"]
        )
        task, layout = CausalLM(config), resolve_layout(config.parallel, 4)
        model, groups = build_model(config, task), Groups(layout, "cuda")
        assert groups.fsdp is not None  # outside of the fake mode: torch reads the ranks of a mesh
        with FakeTensorMode(allow_non_fake_inputs=True), PinnedLater() as pinned:
            device = torch.device("cuda", 0)
            parallel = sharded(config, model, layout, device, phases=Phases(), groups=groups)
            held = [each.local for each in parallel.parameters]
            assert {each.device.type for each in held} == {"cpu"}
            assert {each.tensor.device.type for each in parallel.buffers.held()} == {"cuda"}
            assert pinned.bytes == sum(each.nbytes for each in held)
            # Without a driver, few operations of a GPU can be asked for: from here on "meta" is the device.
            parallel.device = device = torch.device("meta")

            def forward_backward(*_: Any) -> SumTable:
                for each in parallel.parameters:
                    each.tensor.grad = torch.zeros_like(each.tensor)
                return SumTable.pack({"loss_sum": 1.0, "weight": 1.0, "votes": 0.0}, device)

            monkeypatch.setattr(parallel, "forward_backward", forward_backward)
            monkeypatch.setattr(parallel.loads, "balance", lambda *_: None)
            optimizer = model_optimizer(parallel, config.optim, model.blocks, None, 0)
            average = WeightAverage(0.9, parallel.parameters, device)
            step = train_step(config, task, task.weight_per_sample(), parallel, optimizer, average)
            assert {step([None], 1e-3, lambda: 0.0).vector.device.type for _ in "12"} == {"meta"}
            for name in ("grad_scale", "found_inf") if takes_verdict(optimizer) else ():
                assert getattr(optimizer, name).device.type == "cpu", "torch copies it without waiting"
            state = [value for each in parallel.parameters for value in tensor_state(optimizer, each.tensor).values()]
            assert {local(each).device.type for each in (*state, *average.of.values())} == {"cpu"}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("layout", "optim", "halves"),
    [
        (("parallel=fsdp", "trainer.micro_batch=1", "trainer.ema_decay=0.9"), "adamw", [[PARAMETERS, SYNC], []]),
        pytest.param(("parallel=fsdp", "precision=bf16"), "rolling", [[], [PARAMETERS]], marks=pytest.mark.slow),
        pytest.param(("parallel=fsdp", "precision=fp16"), "adamw", [[PARAMETERS], []], marks=pytest.mark.slow),
        pytest.param(("parallel=fsdp", "parallel.tensor=2"), "adamw8bit", [[], [PARAMETERS]], marks=pytest.mark.slow),
        pytest.param(("parallel=fsdp", "parallel.pipeline=2"), "lion", [[PARAMETERS], []], marks=pytest.mark.slow),
        pytest.param(("parallel=fsdp", "precision=bf16"), "adamw_bf16", [[PARAMETERS], []], marks=pytest.mark.slow),
        (("parallel=ddp",), "adamw", [[OFFLOAD], []]),
        pytest.param(("parallel=fsdp",), "rolling", [[], [OFFLOAD]], marks=pytest.mark.slow),
    ],
)
def test_resumed_run_may_switch_offload_on_or_off(
    layout: tuple[str, ...], optim: str, halves: list[list[str]], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rolling.py"
    file.write_text(OWN_OPTIMIZER)

    def train(name: str, *more: str) -> Path:
        small = ["model.hidden_dim=64", "trainer.steps=4", "trainer.global_batch=4", "trainer.micro_batch=2"]
        small += [f"optim={optim}", "health.replica_check_every=1"]
        argv = overrides(text, tmp_path / name, *layout, *small, *more)
        cluster.run(2, "tests.ranks.optim.test_optimizers:train_with_own", argv=argv, file=str(file))
        return tmp_path / name

    whole = train("whole")
    train("switched", "trainer.stop_at=2", *halves[0])
    switched = train("switched", *halves[1])
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in metrics(switched)] == [line[key] for line in metrics(whole)]
    assert not different_tensors(switched, whole)


@pytest.mark.slow
def test_plan_counts_offloaded_state_as_host_memory() -> None:
    argv = (*TINY, "model.layers=1", "trainer.global_batch=8", "parallel=fsdp", "parallel.tensor=2", "optim=adamw8bit")
    (stage,), formula, _ = both(*argv, processes=4)
    (offloaded,), less, _ = both(*argv, OFFLOAD, processes=4)
    memory = memory_of([offloaded])
    assert less.on_host == memory.on_host == formula.optimizer_state
    assert formula.total - less.total == stage.peak - memory.peak == formula.optimizer_state


def test_device_holds_state_of_one_parameter_at_a_time(cluster: Cluster, tmp_path: Path) -> None:
    argv = (*TINY, "trainer.global_batch=1", "trainer.micro_batch=1", "data.sequence_length=8", "parallel=single")
    argv += ("model.layers=1", "model.vocab_size=20000", OFFLOAD)
    (stage,), formula, _ = both(*argv, processes=1)
    memory = memory_of([stage])
    assert memory.phase == "optimizer"
    assert memory.peak == pytest.approx(formula.total, rel=1e-3)
    assert memory.on_host == formula.on_host
    (answer,) = cluster.run(1, "testing.allocated_bytes:allocated_and_sent", argv=[*SHORT, *argv], path=str(tmp_path))
    assert memory.peak + memory.on_host == pytest.approx(answer.value[0], rel=1e-3)


@pytest.mark.parametrize("optim", ["muon", "adafactor"])
def test_an_optimizer_that_needs_all_parameters_at_once_is_refused(
    optim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"optim={optim}", OFFLOAD, "dry_run=true"]) == 78
    assert f"one parameter at a time, but optim={optim} needs all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["parallel=ddp", "launch.processes=2"], "with parallel=ddp: FSDP2 offloads only sharded parameters"),
        (["launch.processes=1"], "with one process: FSDP2 offloads only sharded parameters; use parallel=fsdp on more"),
        (["parallel=fsdp", "launch.processes=2", OFFLOAD], "with optim.offload=true: parallel.offload already keeps"),
        (["parallel=fsdp", "launch.processes=2", "optim=muon"], "but optim=muon exchanges data of all parameters"),
    ],
)
def test_parameters_that_cannot_be_offloaded_are_refused(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([PARAMETERS, *argv, "dry_run=true"]) == 78
    assert reason in capsys.readouterr().err


class Scaled(serried.Task):
    """Has a parameter without dims."""

    def build_model(self) -> nn.Module:
        model = nn.Linear(4, 1)
        model.scale = nn.Parameter(torch.tensor(1.0))
        return model


def test_dry_run_refuses_offload_of_parameters_that_fsdp_cannot_shard() -> None:
    with declaring(declaration(Scaled)):
        config = compose(["parallel=fsdp", PARAMETERS, "launch.device=cpu"])
    task = task_for_run(Scaled())
    task.configure(config)
    with pytest.raises(UserError, match="cannot shard scale because it is a scalar"):
        dry_run(config, task, resolve_layout(config.parallel, 2), 1)


def test_plan_reports_parameters_in_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama1b", "data.tokenizer=bytes", "launch.processes=8", "parallel=fsdp", PARAMETERS]
    assert main([*words, SYNC, "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    assert "memory     " in printed
    assert "GiB per rank: gathered " in printed, "nothing else lasts on the device"
    for kind in ("parameters", "gradients", "optimizer state"):
        assert f"; {kind} in host memory " in printed


def test_plan_reports_place_of_optimizer_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=llama1b", "data.tokenizer=bytes", "launch.processes=8", OFFLOAD, "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    assert "optimizer  adamw, state in host memory, peak lr" in printed
    assert "; optimizer state in host memory 1.2GiB\n" in printed


def session_with_a_gibibyte(device: str) -> Any:
    """Of a rank on ``device``, where another rank may have 1 GiB of host memory."""
    return SimpleNamespace(gather=lambda here: [here, 2**30], local_world_size=1, device=torch.device(device))


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_copy_that_a_gpu_cannot_pin_in_host_memory_is_refused_when_nothing_is_offloaded(mode: str) -> None:
    config = compose([f"checkpoint.mode={mode}"])
    check_host_memory(config, 0, 2**30, session_with_a_gibibyte("cuda"))
    told = r"a save needs 1\.1GiB of host memory per rank to copy the state, but only 1\.0GiB are available; use optim="
    with pytest.raises(UserError, match=told):
        check_host_memory(config, 0, 11 * 2**30 // 10, session_with_a_gibibyte("cuda"))
    check_host_memory(config, 0, 11 * 2**30 // 10, session_with_a_gibibyte("cpu"))


def test_too_little_host_memory_is_refused_in_one_line() -> None:
    session = session_with_a_gibibyte("cpu")
    beside, waiting = (compose(["optim.offload=true", f"checkpoint.mode={mode}"]) for mode in ("async", "sync"))
    check_host_memory(waiting, 2**20, 0, session)
    with pytest.raises(UserError, match=r"1.1GiB of host memory per rank, but only 1.0GiB are available; use optim="):
        check_host_memory(waiting, 11 * 2**30 // 10, 0, session)
    check_host_memory(beside, 2**29, 2**29, session)
    copy = r"optim.offload=true needs 512.0MiB .* and 768.0MiB to copy the state in a save, .*; use {}optim="
    for config, sync in ((beside, "checkpoint.mode=sync, "), (waiting, "")):
        with pytest.raises(UserError, match=copy.format(sync)):
            check_host_memory(config, 2**29, 2**29 + 2**28, session)


@pytest.mark.parametrize(
    ("words", "device", "elements"),
    [
        ("checkpoint.mode=async optim.offload=true", "cuda", 3),
        ("checkpoint.mode=sync optim.offload=true", "cuda", 1),
        ("checkpoint.mode=sync optim.offload=true trainer.ema_decay=0.9", "cuda", 2),
        ("checkpoint.mode=sync parallel.offload=true", "cuda", 0),
        ("checkpoint.mode=sync optim.offload=true", "cpu", 0),
    ],
)
def test_save_copies_device_state_and_changing_state_to_host_memory(words: str, device: str, elements: int) -> None:
    """``elements`` for each one of the weights, AdamW's moments being two."""
    module = nn.Linear(64, 64, bias=False)
    copied = copied_bytes(compose(words.split()), module, ParallelPlan(), device)
    assert copied == pytest.approx(4 * 64 * 64 * elements, abs=8)


def saver_for_a_gpu(folder: Path, device: str, *argv: str) -> Checkpointer:
    """A saver of a small model on ``device``, which takes that for a GPU."""
    config = compose(argv)
    layout, session = resolve_layout(config.parallel, 1), Session((0, 0, 1, 1), torch.device("cuda", 0), config.launch)
    model = parallelize(
        nn.Linear(4, 4), ParallelPlan(), None, seed=1, layout=layout, section=config.parallel, low_dtype=None,
        device=torch.device(device),
    )  # fmt: skip
    optimizer = build_optimizer(model.module.named_parameters(), config.optim)
    parts = partial(state_parts, model, optimizer, unchanged)
    checkpoints = FolderCheckpoints(folder, config.checkpoint, session)
    return Checkpointer(checkpoints, config.checkpoint, layout, session, parts, lambda _: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without pinned memory")
@pytest.mark.parametrize(("mode", "advice"), [("async", "checkpoint.mode=sync, or more ranks"), ("sync", "more ranks")])
def test_failed_copy_of_a_save_does_not_suggest_the_current_mode(
    mode: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    with pytest.raises(UserError, match=f"cannot copy its .* to host memory: .*; use {advice} with parallel=fsdp$"):
        saver_for_a_gpu(tmp_path, "meta", f"checkpoint.mode={mode}", "optim=rmsprop")


def test_state_in_host_memory_is_not_copied_while_training_waits_for_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if for a GPU: without one there is no pinned memory, so a copy would be refused."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    saver = saver_for_a_gpu(tmp_path, "cpu", "checkpoint.mode=sync")
    saver.begin(1, {})
    saver.finish()
    saved = saver.close()
    assert saved is not None
    assert saved.problem is None
