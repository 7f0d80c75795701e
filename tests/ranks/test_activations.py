"""Activation checkpointing: the bits of a step without it, on every layout, and the memory that the plan says."""

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.parallel.activation_checkpoint import Mix, checkpoint_blocks, mix_within
from serried.parallel.compile import compile_blocks
from serried.parallel.layout.local_shards import local
from serried.parallel.layout.mesh import Layout, resolve_layout
from serried.parallel.parallelize import parallelize
from serried.parallel.plan import LossTerms, ParallelPlan
from serried.planner.activations.estimate import planned_mix
from serried.recipes.data.samples.token_dataset import Batch
from serried.recipes.text.causal_lm import CausalLM
from serried.runtime.session import open_session
from serried.trainer.memory.activation_budget import chosen_mix
from serried.trainer.precision import LOW_DTYPES
from serried.trainer.task import RunTask
from testing.rank_pool import Cluster
from testing.runs import run_here, tiny_overrides

MODES = ("full", "selective", "offload")
MIXED = Mix("full", "selective", 0.5, (0.1, 0.4))
MODEL = [
    "model.dim=32", "model.layers=4", "model.heads=4", "model.kv_heads=2", "model.hidden_dim=48",
]  # fmt: skip
EXPERTS = ["model=moe_tiny", "model.expert_hidden_dim=24", "model.shared_experts=1", *MODEL]
SAMPLES, LENGTH, MICRO_BATCHES = 2, 32, 4


def drop(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    del arguments
    return F.dropout(output, 0.1, module.training)


def step(argv: list[str], mode: str, every: int = 1, *, compiled: bool = False) -> dict[str, Tensor]:
    """Totals of a step of ``MICRO_BATCHES`` with dropout, and this rank's gradients."""
    config = compose(argv)
    with open_session(config.launch) as session:
        layout, task = resolve_layout(config.parallel, session.world_size), CausalLM(config)
        model = task.build_model()
        plan = task.parallel_plan(model)
        for name in plan.blocks:
            model.get_submodule(name).mlp.register_forward_hook(drop)  # type: ignore[union-attr]

        def prepare(stage: nn.Module) -> None:
            checkpoint_blocks(stage, plan, MIXED if mode == "mixed" else mode, every)
            if compiled:
                compile_blocks(stage, plan)

        parallel = parallelize(
            model, plan, lambda _: 0.2, seed=1, layout=layout, section=config.parallel,
            low_dtype=LOW_DTYPES[config.precision.name], device=session.device,
            prepare=prepare,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(parallel.place.data_rank)
        tokens = torch.randint(257, (MICRO_BATCHES, SAMPLES, LENGTH), generator=generator)
        positions = torch.arange(LENGTH).remainder(LENGTH // 2).expand(SAMPLES, LENGTH)
        if config.precision.name == "bf16":  # one document, for attention by rows
            positions = None
        batches = [Batch(each, each.roll(-1, 1), torch.zeros(SAMPLES), positions) for each in tokens]
        totals = parallel.forward_backward(
            batches, task, 1.0, partial(parallel.loads.take, session.device), range(MICRO_BATCHES)
        )
        found = {name: totals[name] for name in totals.shapes}
        for number, held in enumerate(parallel.parameters):  # a V schedule has a tied name twice
            assert held.tensor.grad is not None
            found[f"{number} {held.name}"] = local(held.tensor.grad).clone()
        return found


def differing(argv: list[str], modes: list[str], every: int = 1) -> dict[str, list[str]]:
    """What of a step is not bitwise that of a step without checkpointing, by mode."""
    expected = step(argv, "none")
    found = {}
    for mode in modes:
        ours = step(argv, mode, every)
        assert ours.keys() == expected.keys()
        found[mode] = [name for name, tensor in expected.items() if not tensor.equal(ours[name])]
    return found


LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "single": (1, ["parallel=single"]),
    "single, bf16": (1, ["parallel=single", "precision=bf16"]),
    "ddp, fp16": (2, ["parallel=ddp", "precision=fp16"]),
    "fsdp, bf16": (2, ["parallel=fsdp", "precision=bf16"]),
    "fsdp": (2, ["parallel=fsdp"]),
    "tensor": (2, ["parallel=fsdp", "parallel.tensor=2"]),
    "context": (2, ["parallel=fsdp", "parallel.context=2"]),
    "ring": (2, ["parallel=fsdp", "parallel.context=2", "parallel.context_method=ring"]),
    "1f1b": (2, ["parallel=fsdp", "parallel.pipeline=2"]),
    "expert": (2, ["parallel=fsdp", "parallel.expert=2"]),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("single", "fsdp, bf16"))) for name in LAYOUTS],
)
def test_a_step_has_the_same_bits_in_every_mode(name: str, cluster: Cluster) -> None:
    ranks, how = LAYOUTS[name]
    modes = [*MODES, "mixed"]
    model = EXPERTS if "expert" in name or name.startswith("single") else MODEL
    answers = cluster.run(ranks, "tests.ranks.test_activations:differing", argv=[*how, *model], modes=modes)
    assert [answer.value for answer in answers] == [{mode: [] for mode in modes}] * ranks


class Counting(nn.Module):
    """A block with a buffer that its forward changes and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.linear(x) * self.calls).relu()


@pytest.mark.parametrize("mode", MODES)
def test_own_blocks_recompute_from_the_same_buffers_and_change_none(mode: str) -> None:
    found = []
    for each in ("none", mode):
        torch.manual_seed(1)
        model = nn.Sequential(nn.ModuleDict({"blocks": nn.Sequential(Counting(), Counting())})["blocks"])
        checkpoint_blocks(model, ParallelPlan(), each)
        model(torch.randn(8, 4)).square().sum().backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert all(ours.equal(theirs) for ours, theirs in zip(*found, strict=True))


def test_model_without_blocks_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"trainer\.activation_checkpoint=full: the model has no repeated blocks"):
        checkpoint_blocks(nn.Linear(2, 2), ParallelPlan(), "full")


# budget --------------------------------------------------------------------------------------------------------------

KEPT = {"none": 100.0, "selective": 40.0, "full": 10.0}


@pytest.mark.parametrize(
    ("budget", "kept", "first", "rest", "firsts"),
    [
        (0.99, KEPT, "selective", "none", 1),
        (0.5, KEPT, "selective", "none", 7),
        (0.4, KEPT, "selective", "none", 8),
        (0.25, KEPT, "full", "selective", 4),
        (0.1, KEPT, "full", "none", 8),
        (0.5, KEPT | {"selective": 80.0}, "full", "none", 5),  # which saves too little for what it computes again
    ],
)
def test_blocks_keep_at_most_the_budget_with_the_least_recomputation(
    budget: float, kept: dict[str, float], first: str, rest: str, firsts: int
) -> None:
    mix = mix_within(budget, kept)
    assert mix is not None
    assert (mix.first, mix.rest, mix.firsts(8)) == (first, rest, firsts)
    assert firsts * kept[first] + (8 - firsts) * kept[rest] <= 8 * budget * kept["none"]


def test_blocks_keep_at_least_their_inputs() -> None:
    assert mix_within(0.09, KEPT) is None


def kept_after_forward(model: nn.Module, tokens: Tensor) -> int:
    """Bytes that torch's allocator holds more after a forward."""
    gc.collect()  # otherwise the profile may count the release of memory that an earlier one saw
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = model(tokens, tokens)
    found = sum(each.self_cpu_memory_usage for each in profiled.events() or ())
    del loss
    return found


@pytest.mark.parametrize("budget", [0.6, pytest.param(0.3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["tiny", "moe_tiny", "gpt2"])
def test_the_allocator_holds_at_most_the_budget(name: str, budget: float) -> None:
    sizes = {"dim": 128, "heads": 4, "hidden_dim": 320, "vocab_size": 257, "max_sequence_length": 128}
    sizes |= {"expert_hidden_dim": 128} if name == "moe_tiny" else {}
    sizes |= {"kv_heads": 2} if name != "gpt2" else {}
    tokens, taken = torch.randint(0, 257, (8, 128)), {}
    for given, layers in ((1.0, 3), (1.0, 6), (budget, 6)):
        argv = [f"model={name}", *(f"model.{key}={value}" for key, value in sizes.items())]
        argv += ["data.sequence_length=128", "trainer.micro_batch=8", f"trainer.activation_memory_budget={given}"]
        config = compose([*argv, f"model.layers={layers}"])
        task = CausalLM(config)
        module = task.build_model()
        plan = task.parallel_plan(module)
        mix = planned_mix(config, task, Layout("single"), plan, module)
        module.to_empty(device="cpu")
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)
        checkpoint_blocks(module, plan, mix or "none")
        taken[given, layers] = kept_after_forward(module, tokens)
    of_blocks = 2 * (taken[1.0, 6] - taken[1.0, 3])
    beside = taken[1.0, 6] - of_blocks
    assert 0.7 * budget < (taken[budget, 6] - beside) / of_blocks <= budget


def test_measured_activations_of_blocks_agree_with_the_formula() -> None:
    argv = ["model.layers=4", "trainer.activation_memory_budget=0.5"]
    config = compose(argv)
    task = CausalLM(config)
    module = task.build_model()
    plan, layout = task.parallel_plan(module), Layout("single")
    estimated = planned_mix(config, task, layout, plan, module)
    measured = chosen_mix(config, task, layout, plan, module)
    assert estimated is not None and measured is not None
    assert (measured.first, measured.rest) == (estimated.first, estimated.rest)
    assert measured.kept == pytest.approx(estimated.kept, rel=0.1)
    assert all(parameter.is_meta for parameter in module.parameters()), "the model itself is as it was"


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.layers = nn.Linear(2, 2), nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)  # type: ignore[no-any-return]


class OfUnused(RunTask):
    def loss(self, model: nn.Module, batch: Tensor) -> LossTerms:
        return LossTerms(model(batch).sum(), 1)

    def example_batch(self, samples: int) -> Tensor:
        return torch.zeros(samples, 2)


def test_blocks_that_keep_nothing_are_refused_in_one_line() -> None:
    config = compose(["trainer.activation_memory_budget=0.5"])
    with pytest.raises(UserError, match=r"trainer\.activation_memory_budget=0\.5: the loss keeps no activations"):
        chosen_mix(config, OfUnused(), Layout("single"), ParallelPlan(blocks=("layers.0", "layers.1")), Unused())


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("trainer.activation_memory_budget=0", "trainer.activation_memory_budget"),
        ("trainer.activation_checkpoint_every=2", "has no effect without trainer.activation_checkpoint; leave it out"),
        ("trainer.activation_memory_budget=0.01", "use trainer.activation_memory_budget=0.0"),
        (
            "trainer.activation_memory_budget=0.5 trainer.activation_checkpoint=full",
            "use trainer.activation_checkpoint=none, or trainer.activation_memory_budget=1",
        ),
        (
            "trainer.activation_memory_budget=0.5 launch.processes=2 parallel=fsdp parallel.pipeline=2 "
            "parallel.pipeline_schedule=zbv trainer.micro_batch=1",
            "use trainer.activation_memory_budget=1, or parallel.pipeline_schedule=1f1b or interleaved",
        ),
        (
            "trainer.activation_checkpoint=selective launch.processes=2 parallel=fsdp parallel.pipeline=2 "
            "parallel.pipeline_schedule=zbv trainer.micro_batch=1",
            "use trainer.activation_checkpoint=none, or parallel.pipeline_schedule=1f1b or interleaved",
        ),
        (
            "trainer.activation_memory_budget=0.5 trainer.compile=true model=moe_tiny",
            "use trainer.activation_memory_budget=1, or trainer.compile=false",
        ),
    ],
)
def test_activation_budget_that_cannot_be_met_is_refused_in_one_line(
    more: str, told: str, text: Path, tmp_path: Path
) -> None:
    assert (
        told in run_here(tiny_overrides(text, tmp_path / "run", "model.layers=4", "dry_run=true", *more.split())).error
    )


def test_plan_reports_the_number_of_blocks_per_mode(text: Path, tmp_path: Path) -> None:
    argv = ["launch.processes=4", "parallel=fsdp", "parallel.pipeline=2", "model.layers=6", "trainer.micro_batch=1"]
    argv += ["trainer.activation_memory_budget=0.6", "dry_run=true"]
    ended = run_here(tiny_overrides(text, tmp_path / "run", *argv))
    assert "within the budget: 4 blocks selective, 2 unchanged, keeping 0.60 of all" in ended.printed, ended.printed
