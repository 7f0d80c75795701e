"""Learning rate, loss scale, norms and layouts: the pure parts of a step."""

import importlib
import itertools
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.schema.registry import schedules
from serried.configs.schema.sections import ParallelSection, PrecisionSection, ScheduleSection, TrainerSection
from serried.parallel.layout.mesh import Layout, gradient_accumulation, resolve_layout
from serried.parallel.plan import LossTerms
from serried.parallel.random_seed import seed_random_numbers
from serried.parallel.step_phases import Phases
from serried.parallel.sync.gradient_norm import sum_of_squares
from serried.recipes.text.causal_lm import CausalLM
from serried.trainer.model import build_model, sharded
from serried.trainer.optim.optimizer import learning_rate, model_optimizer
from serried.trainer.optim.weight_average import WeightAverage
from serried.trainer.precision import GradScaler
from serried.trainer.task import map_tensors
from serried.trainer.training_state import train_step


def schedule(name: str, **values: float) -> ScheduleSection:
    section = schedules.get(name).section
    known = {key: value for key, value in values.items() if key in section.model_fields}
    return section(name=name, **known)  # type: ignore[return-value, call-arg]


@pytest.mark.parametrize("name", ["cosine", "wsd", "linear", "constant"])
def test_schedules_warm_up_reach_the_peak_and_end_where_they_should(name: str) -> None:
    s = schedule(name, warmup_steps=10, min_lr_ratio=0.1, decay_fraction=0.2)
    rates = [learning_rate(step, 100, 2.0, s) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == 2.0
    assert rates[10] == pytest.approx(2.0, rel=0.02)
    assert rates[-1] == pytest.approx(2.0 if name == "constant" else 0.2)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[9:]))
    if name == "wsd":
        assert rates[79] == 2.0 > rates[80]
    if name == "cosine":
        assert rates[54] == pytest.approx(2.0 * 0.55, rel=0.02)
    if name == "linear":
        assert rates[54] == pytest.approx(2.0 * 0.55)


def test_schedule_without_warm_up_starts_at_the_peak_and_may_be_all_warm_up() -> None:
    assert learning_rate(1, 10, 1.0, schedule("linear", min_lr_ratio=0)) == pytest.approx(0.9)
    assert learning_rate(10, 10, 1.0, schedule("cosine", warmup_steps=10)) == 1.0
    assert learning_rate(1, 1, 1.0, schedule("wsd", min_lr_ratio=0, decay_fraction=0.1)) == 1.0


@pytest.mark.parametrize("name", ["cosine", "wsd", "linear", "constant"])
def test_warm_up_as_a_ratio_gives_the_rates_of_as_many_steps(name: str) -> None:
    by_ratio = schedule(name, warmup_ratio=0.07, warmup_steps=40)
    by_steps = schedule(name, warmup_steps=8)  # 0.07 x 101 = 7.07, rounded up
    rates = [[learning_rate(step, 101, 2.0, section) for step in range(1, 102)] for section in (by_ratio, by_steps)]
    assert rates[0] == rates[1]
    assert learning_rate(1, 101, 2.0, schedule(name, warmup_ratio=0.0)) == learning_rate(1, 101, 2.0, schedule(name))


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.sampled_from([1.0, 2.0**16, 2.0**99]))
def test_loss_scale_moves_as_torch_grad_scaler_does(overflows: list[bool], interval: int, initial: float) -> None:
    section = PrecisionSection(name="fp16", initial_scale=initial, growth_interval=interval)
    ours = GradScaler(section, torch.device("cpu"))
    theirs = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=interval)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflow in overflows:
        theirs.scale(parameter.sum() * 0).backward()
        parameter.grad = torch.full((1,), math.inf if overflow else 0.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(overflow))
        assert ours.scale.item() == theirs.get_scale()


def test_loss_scale_stays_one_unless_fp16() -> None:
    scaler = GradScaler(PrecisionSection(name="bf16"), torch.device("cpu"))
    scaler.update(torch.tensor(True))
    assert scaler.scale.item() == 1


@pytest.mark.parametrize("shape", [(3_000_000,), (3000, 1000), (100, 30, 1000)])
def test_norm_is_exact_to_1e_7_where_fp32_is_not(shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.01, 3, shape[-1])
    exact = gradient.double().square().sum().item()
    assert sum_of_squares([gradient]).item() == pytest.approx(exact, rel=1e-7)
    halves = gradient.chunk(2)
    split = sum_of_squares([halves[0]]) + sum_of_squares([halves[1]])
    assert split.item() == pytest.approx(sum_of_squares([gradient]).item(), rel=1e-12)


def test_norm_of_no_gradients_is_zero_and_of_a_non_finite_one_is_not_finite() -> None:
    assert sum_of_squares([torch.ones(2, 2), torch.empty(0, 5)]).item() == pytest.approx(4, rel=1e-7)
    assert not sum_of_squares([torch.ones(2, 2), torch.tensor([[1.0, math.inf]])]).isfinite()
    assert not sum_of_squares([torch.tensor([[1.0, math.nan]])]).isfinite()


def parallel(strategy: str, **values: object) -> ParallelSection:
    return ParallelSection(strategy=strategy, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("section", "world", "layout"),
    [
        (parallel("single"), 1, Layout("single")),
        (parallel("ddp", replicate=-1), 8, Layout("ddp", replicate=8)),
        (parallel("fsdp", shard=-1), 6, Layout("fsdp", shard=6)),
        (parallel("hsdp", replicate=2, shard=-1), 8, Layout("hsdp", replicate=2, shard=4)),
        (parallel("hsdp", replicate=-1, shard=4), 8, Layout("hsdp", replicate=2, shard=4)),
        (parallel("hsdp", replicate=2, shard=4), 8, Layout("hsdp", replicate=2, shard=4)),
        (parallel("ddp", replicate=-1), 1, Layout("single")),
        (parallel("fsdp", shard=-1, tensor=2), 8, Layout("fsdp", shard=4, tensor=2)),
        (parallel("ddp", replicate=-1, tensor=2), 4, Layout("ddp", replicate=2, tensor=2)),
        (
            parallel("fsdp", shard=1, pipeline=-1, pipeline_schedule="interleaved"),
            3,
            Layout("fsdp", pipeline=3, schedule="interleaved", stages=6),
        ),
        (parallel("fsdp", shard=-1), 1, Layout("single")),
    ],
)
def test_valid_layouts_resolve_to_their_degrees(section: ParallelSection, world: int, layout: Layout) -> None:
    assert resolve_layout(section, world) == layout


@pytest.mark.parametrize(
    ("section", "world", "says"),
    [
        (parallel("single"), 4, ["4", "parallel=ddp"]),
        (
            parallel("hsdp", replicate=3, shard=-1),
            8,
            ["replicate=3 does not divide 8 processes", "parallel.replicate=2"],
        ),
        (
            parallel("hsdp", replicate=2, shard=3),
            8,
            ["6 processes (replicate 2 x shard 3)", "8 processes were started", "=6"],
        ),
        (parallel("hsdp", replicate=2, shard=-1), 1, ["replicate=2 does not divide 1 process"]),
        (parallel("ddp", replicate=4), 2, ["4 processes", "2 processes were started", "parallel.replicate=-1"]),
        (parallel("hsdp", replicate=-1, shard=-1), 2, ["both -1"]),
        (parallel("ddp", replicate=-1, shard=2), 2, ["shard=2", "parallel=fsdp"]),
        (parallel("fsdp", replicate=2, shard=-1), 2, ["replicate=2", "parallel=hsdp"]),
        (parallel("fsdp", shard=0), 2, ["shard=0", "1 or more"]),
        (
            parallel("fsdp", shard=3, tensor=2, pipeline=2),
            8,
            [
                "12 processes (replicate 1 x shard 3 x tensor 2 x pipeline 2)",
                "--nproc_per_node=12",
                "parallel.shard=-1",
            ],
        ),
        (parallel("fsdp", shard=-1, tensor=3), 8, ["parallel.tensor=3 does not divide 8", "parallel.tensor=2"]),
        (parallel("fsdp", shard=-1, tensor=-1), 8, ["parallel.shard and parallel.tensor are both -1"]),
        (parallel("single", tensor=2), 2, ["parallel=fsdp"]),
        (
            parallel("fsdp", shard=-1, pipeline=2, pipeline_schedule="zbv", stages_per_rank=3),
            4,
            ["zbv", "stages_per_rank=2"],
        ),
        (parallel("fsdp", shard=-1, pipeline=2, layers_of_stages=(1, 2, 3)), 4, ["3 numbers for 2 stages"]),
    ],
)
def test_impossible_layouts_are_refused_with_reason_and_fix(
    section: ParallelSection, world: int, says: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        resolve_layout(section, world)
    assert all(words in str(caught.value) for words in says), caught.value
    assert "\n" not in str(caught.value)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 16))
def test_batch_that_does_not_divide_is_refused_with_a_fix_that_does(
    global_batch: int, micro_batch: int, ranks: int
) -> None:
    layout = Layout("ddp", replicate=ranks)
    trainer = TrainerSection(steps=1, global_batch=global_batch, micro_batch=micro_batch)
    try:
        assert gradient_accumulation(trainer, layout) * micro_batch * ranks == global_batch
    except UserError as error:
        fixes = str(error).split("use ")[1].split(" or ")
        assert fixes
        for fix in fixes:
            if fix.startswith("a number of data ranks that divides it: "):
                for other in fix.split(": ")[1].split(", "):
                    gradient_accumulation(trainer, Layout("ddp", replicate=int(other)))
                continue
            if fix == "parallel.uneven=true for unequal shares":
                most = gradient_accumulation(trainer, replace(layout, uneven=True))
                assert (most - 1) * micro_batch * ranks < global_batch <= most * micro_batch * ranks
                continue
            key, value = fix.removeprefix("trainer.").split("=")
            gradient_accumulation(trainer.model_copy(update={key: int(value)}), layout)


def test_loss_scale_of_one_is_saved_and_loaded() -> None:
    section = PrecisionSection(name="fp16", initial_scale=2.0)
    scaler = GradScaler(section, torch.device("cpu"))
    scaler.update(torch.tensor(True))
    scaler.update(torch.tensor(False))
    again = GradScaler(section, torch.device("cpu"))
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict() == {"scale": 1.0, "good_steps": 1}
    again.load_state_dict(GradScaler(PrecisionSection(name="fp32"), torch.device("cpu")).state_dict())
    assert again.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("seed", [0, 7, 2**63 + 1, 2**64 - 1])
def test_seeded_random_numbers_equal_those_of_torch(seed: int, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    drawn = []
    torch.zeros(1, device=device)  # CUDA is in use
    for set_seed in (torch.manual_seed, seed_random_numbers):
        set_seed(seed)
        drawn.append(torch.nn.functional.dropout(torch.ones(1000, device=device)))
    assert drawn[0].equal(drawn[1])


def test_sums_of_a_loss_on_a_gpu_copy_nothing_to_it() -> None:
    """The host would wait for the device in every micro-batch."""

    class Copies(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operation(*args, **(kwargs or {}))
            self.found += "copy" in str(operation) and args[0].device.type != result.device.type
            return result

    with FakeTensorMode(), Copies() as copies:
        loss = torch.empty((), device="cuda")
        LossTerms(loss, 3, {"accuracy": (1.5, 2)}).table()
        assert copies.found == 0
        torch.as_tensor(3, device="cuda")
        assert copies.found == 1, "as it would be seen"
    assert LossTerms(torch.tensor(2.5), 3, {"accuracy": (1.5, 2)}).table().vector.tolist() == [2.5, 3.0, 1.5, 2.0]


class Asked(TorchDispatchMode):
    """Notes operations for which the host would wait for a device, of which ``meta`` is one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = operation.overloadpacket.__name__ in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")
        result = False if asks else operation(*args, **(kwargs or {}))
        devices = [
            {each.device.type for each in tree_leaves(tree) if isinstance(each, torch.Tensor)}
            for tree in (args, result)
        ]
        if (asks and "meta" in devices[0]) or (devices[1] and devices[0] and devices[0] != devices[1]):
            self.found.append(f"{operation} {devices}")
        return result


@pytest.mark.parametrize("optim", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_step_neither_waits_for_the_device_nor_copies_to_it(optim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From forward to update, in a window of losses too: the host of a GPU waits at log lines alone."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # which knows no such device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    for module in ("adam", "optimizer"):
        there = importlib.import_module(f"torch.optim.{module}")
        monkeypatch.setattr(there, "_get_fused_kernels_supported_devices", lambda: ["meta"], raising=False)
    config = compose([f"optim={optim}", "model.layers=2", "data.isolate_documents=true", "health.spike=skip"])
    task = CausalLM(config)
    model, device = build_model(config, task), torch.device("meta")
    parallel = sharded(config, model, Layout("single"), device, phases=Phases())
    optimizer = model_optimizer(parallel, config.optim, model.blocks, None, config.trainer.seed)
    average = WeightAverage(0.9, parallel.parameters, device)
    step = train_step(config, task, task.weight_per_sample(), parallel, optimizer, average)
    batch = map_tensors(lambda tensor: torch.empty_like(tensor, device=device), task.example_batch(2))
    step([batch, batch], 1e-3, lambda: 0.0, [1, 2])  # the first computes rotary angles
    with Asked() as asked:
        for _ in range(9):
            step([batch, batch], 1e-3, lambda: 0.0, [1, 2])
    assert asked.found == []
