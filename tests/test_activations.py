"""Activation checkpointing: the bits of a step without it, on every layout, and the memory that the plan says."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.parallel.activations import checkpoint_blocks
from serried.parallel.apply import parallelize
from serried.parallel.compile import compile_blocks
from serried.parallel.held import local
from serried.parallel.mesh import resolve_layout
from serried.parallel.plan import ParallelPlan
from serried.recipes.causal_lm import CausalLM
from serried.recipes.data.dataset import Batch
from serried.runtime.session import open_session
from serried.trainer.precision import LOW_DTYPES
from tests.cluster import Cluster

MODES = ("full", "selective", "offload")
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
            checkpoint_blocks(stage, plan, mode, every)
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
        totals = parallel.forward_backward(batches, task, 1.0, lambda: 0.0, range(MICRO_BATCHES))
        found = {"loss": totals.loss_sum, "loads": totals.loads}
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
    "zbv": (2, ["parallel=fsdp", "parallel.pipeline=2", "parallel.schedule=zbv"]),
    "expert": (2, ["parallel=fsdp", "parallel.expert=2"]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("context", "fsdp"))) for name in LAYOUTS]
)
def test_a_step_has_the_same_bits_in_every_mode(name: str, cluster: Cluster) -> None:
    ranks, how = LAYOUTS[name]
    modes = list(MODES)
    model = EXPERTS if "expert" in name or name.startswith("single") else MODEL
    answers = cluster.run(ranks, "tests.test_activations:differing", argv=[*how, *model], modes=modes)
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
def test_own_blocks_compute_again_from_the_buffers_that_they_found_and_change_none(mode: str) -> None:
    found = []
    for each in ("none", mode):
        torch.manual_seed(1)
        model = nn.Sequential(nn.ModuleDict({"blocks": nn.Sequential(Counting(), Counting())})["blocks"])
        checkpoint_blocks(model, ParallelPlan(), each)
        model(torch.randn(8, 4)).square().sum().backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert all(ours.equal(theirs) for ours, theirs in zip(*found, strict=True))


def test_a_model_without_blocks_is_one_line() -> None:
    with pytest.raises(UserError, match=r"trainer\.activation_checkpoint=full: the model has no repeated blocks"):
        checkpoint_blocks(nn.Linear(2, 2), ParallelPlan(), "full")
