"""Adafactor: torch's own updates, the same curve on every layout, state of rows and columns that resumes anywhere."""

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.parity import CUTS, EXPERT_CUTS, MIXTURE, TOLERANCES, compare, run
from serried.configs.compose import compose
from serried.trainer.optim.optimizer import build_optimizer
from testing.rank_pool import Cluster
from testing.runs import weights
from tests.unit.planner.test_plan import TINY, both

ADAFACTOR = "optim=adafactor"


def test_adafactor_updates_equal_torch() -> None:
    torch.manual_seed(1)
    shapes = {"matrix": (6, 4), "row": (1, 5), "experts": (3, 4, 2), "norm": (5,), "scale": ()}
    ours = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    ours["small"] = nn.Parameter(1e-5 * torch.randn(4, 4))
    theirs = [nn.Parameter(each.detach().clone()) for each in ours.values()]
    section = compose([ADAFACTOR, "optim.lr=0.3", "optim.weight_decay=0.1"]).optim
    optimizer = build_optimizer(ours.items(), section)
    matrices, vectors = ([each for each in theirs if (each.ndim > 1) == wanted] for wanted in (True, False))
    reference = torch.optim.Adafactor(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=0.3
    )
    optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
    for _ in range(12):  # the eleventh rate is below 0.3
        for our, their in zip(ours.values(), theirs, strict=True):
            our.grad = torch.randn(our.shape)
            their.grad = our.grad.clone()
        optimizer.step()
        reference.step()
    for (name, our), their in zip(ours.items(), theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.slow
def test_planned_state_equals_state_of_a_rank() -> None:
    argv = (*TINY, "trainer.global_batch=16", ADAFACTOR, "parallel=fsdp", "parallel.tensor=2")
    (stage,), formula, _ = both(*argv, processes=4)
    counters = 4 * (3 * 9 + 3)  # of steps, which the formula leaves out: one for each parameter
    assert formula.optimizer_state + counters == stage.memory["optimizer state"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("hsdp 2x2", ()),
        ("pipeline x2, zbv x fsdp x2", ("model.tie_embeddings=true",)),
        ("expert x2, sharded x2", MIXTURE),
    ],
)
def test_adafactor_loss_curve_equals_single_process(
    name: str, more: tuple[str, ...], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    cut = next(each for each in (*CUTS, *EXPERT_CUTS) if each.name == name)
    chosen = (ADAFACTOR, "optim.lr=0.05", *more)
    reference = run(cluster, CUTS[0], 1, "fp32", text, tmp_path / "single", *chosen, steps=5)
    curve = run(cluster, cut, cut.accumulations[-1], "fp32", text, tmp_path / "run", *chosen, steps=5)
    difference = compare(curve, reference)
    assert difference.same_samples
    assert max(difference.loss, difference.grad_norm) < TOLERANCES["fp32"]
    assert curve.losses[-1] < 0.98 * curve.losses[0], "a run that learns nothing would agree with anything"
    whole, divided = (weights(tmp_path / each, "optimizer") for each in ("single", "run"))
    assert {name: each.shape for name, each in divided.items()} == {name: each.shape for name, each in whole.items()}
