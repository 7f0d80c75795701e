"""Muon: torch's own updates, the same on every layout, in a step that is accepted or changes nothing."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.parity import CUTS, MIXTURE, MUON, MUON_CUTS, MUON_EXPERT_CUTS, TOLERANCES, Curve, Cut, compare, run
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.schema.registry import optimizers
from serried.configs.schema.sections import ParallelSection
from serried.parallel.layout.mesh import Layout, resolve_layout
from serried.parallel.layout.shard_specs import ShardSpec, Slice
from serried.parallel.optim.matrix_exchange import Matrices, deal, matrix_names
from serried.parallel.parallelize import parallelize
from serried.parallel.plan import ParallelPlan
from serried.recipes.models.families.gpt2 import Conv1D
from serried.runtime.session import open_session
from serried.trainer.model import build_model, sharded
from serried.trainer.optim.optimizer import check_optimizer
from serried.trainer.optim.parameter_groups import parameter_groups
from serried.trainer.task import RunTask
from testing.rank_pool import Cluster


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.11 has none")
@pytest.mark.parametrize(("rows", "columns"), [(32, 48), (64, 16), (33, 33)])
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_muon_updates_equal_torch(rows: int, columns: int, adjust_lr: str) -> None:
    torch.manual_seed(1)
    ours = nn.Parameter(torch.randn(rows, columns))
    theirs = nn.Parameter(ours.detach().clone())
    section = compose(["optim=muon", "optim.lr=0.02", f"optim.adjust_lr={adjust_lr}"]).optim
    matrices = Matrices.whole([ours], torch.bfloat16)
    muon = optimizers.get("muon").load()(parameter_groups([("weight", ours)], section), section, matrices)
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn=adjust_lr)
    for _ in range(3):
        ours.grad = torch.randn(rows, columns)
        theirs.grad = ours.grad.clone()
        muon.step()
        reference.step()
    assert ours.allclose(theirs, rtol=0, atol=1e-6)


ROWS, COLUMNS, ROWS_OF_EXPERTS = Slice(0, ("shard", "context")), Slice(1, ("tensor",)), Slice(1, ("expert_shard",))


@pytest.mark.parametrize(
    ("layout", "shape", "slices"),
    [
        (Layout("ddp", replicate=3), (5, 7), ()),
        (Layout("hsdp", replicate=2, shard=3), (2, 7), (ROWS,)),  # one rank holds nothing
        (Layout("fsdp", shard=2, context=2, tensor=3), (9, 7), (COLUMNS, ROWS)),
        (Layout("fsdp", shard=2, tensor=2), (9, 7), (ROWS,)),  # whole on each tensor rank, as a router is
        (Layout("fsdp", pipeline=2, shard=4, expert=2), (6, 4, 3), (Slice(0, ("expert",)), ROWS_OF_EXPERTS)),
        (Layout("fsdp", shard=4, expert=4), (8, 4, 3), (Slice(0, ("expert",)),)),
    ],
)
def test_each_matrix_is_assigned_to_a_rank_with_its_largest_shard(
    layout: Layout, shape: tuple[int, ...], slices: tuple[Slice, ...]
) -> None:
    specs, ranks = (
        [ShardSpec(f"weight {number}", shape, slices) for number in range(5)],
        layout.world // layout.pipeline,
    )
    dealt = deal(specs, layout, layout.pipeline - 1)
    counts = Counter[tuple[int, ...]]()
    for number, whole, parts, owner, _ in dealt:
        sizes = {rank: box.numel for box, holders in parts for rank in holders}
        assert sizes[owner] == max(sizes.values())
        assert sum(box.numel for box, _ in parts) == whole.numel
        for box, holders in parts:
            for rank in holders:
                place = layout.coordinates((layout.pipeline - 1) * ranks + rank)
                assert box == specs[number].box(layout, place).overlap(whole)
        counts.update([(number, *whole.starts)])
    stacked = shape[0] if len(shape) == 3 else 1
    assert len(counts) == counts.total() == 5 * stacked
    owned = Counter(each.owner for each in dealt)
    assert max(owned.values()) - min(owned[rank] for rank in owned) <= 1


def test_matrices_of_blocks_and_of_each_expert_are_selected() -> None:
    shapes = {
        "embed.weight": (9, 4), "blocks.0.q.weight": (4, 4), "blocks.0.norm": (4,), "blocks.0.conv.weight": (4, 4, 3),
        "blocks.0.mlp.experts.up": (8, 4, 4), "blocks.10.q.weight": (4, 4), "head.weight": (9, 4),
        "blocks.0.mlp.experts.up_bias": (8, 4),
    }  # fmt: skip
    assert matrix_names(shapes, ["blocks.0"]) == {"blocks.0.q.weight", "blocks.0.mlp.experts.up"}


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Sequential(*(nn.Sequential(nn.Conv2d(2, 2, 3)) for _ in range(2))), nn.Linear(2, 2)),
    ],
)
def test_model_without_block_matrices_is_refused_in_one_line(model: nn.Module) -> None:
    expected = "optim=muon updates the matrices of repeated blocks, but the model has none; return ParallelPlan"
    with pytest.raises(UserError, match=expected):
        check_optimizer(compose(["optim=muon"]).optim, model, ParallelPlan(), Layout("single"))


def test_shape_of_a_conv1d_is_outputs_and_inputs() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.ModuleDict({"up": Conv1D(2, 6), "down": nn.Linear(6, 2)}) for _ in range(2))
    parallel = parallelize(
        model, ParallelPlan(), None, seed=1, layout=Layout("single"), section=ParallelSection(strategy="single"),
        low_dtype=None, device=torch.device("cpu"),
    )  # fmt: skip
    matrices = Matrices.of(parallel, ("blocks.0", "blocks.1"), None)
    found = {each.name: matrices.shape(each.tensor) for each in parallel.parameters if each.tensor in matrices}
    assert (found["blocks.0.up.weight"], found["blocks.0.down.weight"]) == ((6, 2), (2, 6))


class TiedTask(RunTask):
    """A model without a plan, whose head is tied to the last of its blocks: FSDP2 wraps the other blocks only."""

    def build_model(self) -> nn.Module:
        model = nn.Module()
        model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(4))
        model.head = nn.Linear(8, 8)
        model.head.weight = model.blocks[3].get_submodule("0").weight
        return model


def names_of_matrices(strategy: str) -> list[str]:
    config = compose([f"parallel={strategy}", "parallel.reshard_after_forward=true"])
    with open_session(config.launch) as session:
        built = build_model(config, TiedTask())
        parallel = sharded(config, built, resolve_layout(config.parallel, session.world_size), session.device)
        matrices = Matrices.of(parallel, built.blocks, None)
        return [each.name for each in parallel.parameters if each.tensor in matrices]


def test_matrices_are_the_same_when_fsdp_wraps_some_blocks(cluster: Cluster) -> None:
    names = [
        cluster.run(2, "tests.ranks.optim.test_muon:names_of_matrices", strategy=each)[0].value
        for each in ("ddp", "fsdp")
    ]
    assert names[0] == names[1] == [f"blocks.{number}.0.weight" for number in range(4)]


# whole runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return run(cluster, CUTS[0], 1, "fp32", text, tmp_path_factory.mktemp("muon") / "run", *MUON, steps=3)


DAILY = ("fsdp x2 (ZeRO-3)",)


@pytest.mark.parametrize(
    "cut", [pytest.param(cut, id=cut.name, marks=[] if cut.name in DAILY else pytest.mark.slow) for cut in MUON_CUTS]
)
def test_muon_equals_the_single_process(
    cut: Cut, reference: Curve, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    curve = run(cluster, cut, cut.accumulations[-1], "fp32", text, tmp_path / "run", *MUON, steps=3)
    difference = compare(curve, reference)
    assert difference.same_samples
    assert max(difference.loss, difference.grad_norm) < TOLERANCES["fp32"]


@pytest.mark.slow
def test_muon_updates_each_expert_separately_on_any_layout(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    how = (*MIXTURE, *MUON)
    single = run(cluster, CUTS[0], 1, "fp32", text, tmp_path / "single", *how, steps=3)
    for cut in MUON_EXPERT_CUTS:
        run_dir = tmp_path / str(cut.processes)
        curve = run(cluster, cut, cut.accumulations[0], "fp32", text, run_dir, *how, steps=3)
        difference = compare(curve, single)
        assert difference.same_samples, cut.name
        assert max(difference.loss, difference.grad_norm) < TOLERANCES["fp32"], cut.name
