"""Experts divided over ranks: tokens travel to them and back, checkpoints and messages do not know of it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.parallel.axes.expert import EXPERT
from serried.parallel.axes.model_axes import shard_specs
from serried.parallel.layout.checks import check_layout
from serried.parallel.layout.mesh import Layout, resolve_layout
from serried.parallel.layout.process_groups import Groups
from serried.parallel.plan import ParallelPlan
from serried.recipes.models.families.moe import MixtureOfExperts
from serried.runtime.session import open_session
from testing.rank_pool import Cluster
from testing.runs import overrides, weights
from testing.wire_bytes import Wire
from tests.unit.models.test_moe import section

TOKENS, DIM, EXPERTS = 10, 48, 6
MIXTURE = ["model=moe_tiny", "model.expert_hidden_dim=24", "trainer.steps=2"]


def against_all_experts(per_token: int, favoured: float) -> dict[str, Any]:
    """Largest differences between a mixture whose experts are divided over all ranks and a whole one; and the bytes
    sent. ``favoured``: bias of expert 0."""
    with open_session(compose([]).launch) as session:
        ranks, rank = session.world_size, session.rank
        layout = Layout("fsdp", shard=ranks, expert=ranks)
        plan = ParallelPlan(mixtures=("mlp",))
        torch.manual_seed(0)
        whole = MixtureOfExperts(section(experts_per_token=per_token, experts=EXPERTS))
        for parameter in whole.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        whole.gate.e_score_correction_bias[0] += favoured
        divided = copy.deepcopy(whole)
        EXPERT.apply(
            torch.nn.ModuleDict({"mlp": divided}), plan, layout, layout.coordinates(rank), Groups(layout, "cpu")
        )
        x = torch.randn(ranks, TOKENS, DIM)
        mine = x[rank : rank + 1].requires_grad_()
        with Wire() as wire:
            result = divided(mine)
            result.sin().sum().backward()
        whole_x = x.detach().requires_grad_()
        expected = whole(whole_x)
        expected.sin().sum().backward()
        differences = [result - expected[rank], mine.grad - whole_x.grad[rank]]
        held = EXPERTS // ranks
        for name, parameter in divided.experts.named_parameters():
            theirs = whole.experts.get_parameter(name).grad[rank * held : (rank + 1) * held]
            differences.append(parameter.grad - theirs)
        dist.all_reduce(divided.gate.weight.grad)
        differences.append(divided.gate.weight.grad - whole.gate.weight.grad)
        largest = max(difference.abs().max().item() for difference in differences)
        return {"difference": largest, "sent": sum(wire.bytes.values())}


@pytest.mark.parametrize(("ranks", "per_token", "favoured"), [(2, 2, 0.0), (3, 2, 0.0), (2, 1, 100.0), (2, 6, 0.0)])
def test_experts_on_other_ranks_compute_and_learn_the_same(
    ranks: int, per_token: int, favoured: float, cluster: Cluster
) -> None:
    """Also if one expert gets all tokens, so that a rank has none."""
    found = cluster.run(
        ranks, "tests.ranks.models.test_experts:against_all_experts", per_token=per_token, favoured=favoured
    )
    assert max(answer.value["difference"] for answer in found) < 1e-5
    if per_token == EXPERTS:  # every rank sends each token to every rank: forward there and back, and the gradients
        rows = 4 * per_token * TOKENS * DIM * 4 * (ranks - 1) // ranks
        counts = 8 * EXPERTS * (ranks - 1) // ranks
        assert [answer.value["sent"] for answer in found] == [rows + counts] * ranks
    if favoured:  # rank 0 has the expert: rank 1 sends its tokens and the gradients of their results
        counts = 8 * EXPERTS // 2
        assert [answer.value["sent"] - counts for answer in found] == [2 * TOKENS * DIM * 4] * 2


def test_a_checkpoint_of_divided_experts_is_read_on_other_ranks_and_by_transformers(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    import transformers

    def train(processes: int, function: str, how: list[str], **keywords: Any) -> None:
        argv = overrides(text, tmp_path / "run", *MIXTURE, *how, "trainer.micro_batch=3")
        cluster.run(processes, function, argv=argv, **keywords)

    train(4, "testing.runs:train_small", ["parallel=fsdp", "parallel.expert=2"])
    first = {stem: weights(tmp_path / "run", stem) for stem in ("model", "optimizer")}
    train(3, "testing.runs:save_again", ["parallel=fsdp"], run_dir=str(tmp_path / "again"))
    for stem, tensors in first.items():
        found = weights(tmp_path / "again", stem)
        assert found.keys() == tensors.keys()
        assert all(found[name].equal(tensors[name]) for name in tensors)
    biases = [tensor for name, tensor in first["model"].items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    assert all(bias.unique().numel() > 1 for bias in biases), "two steps have moved it"
    path = next((tmp_path / "run" / "checkpoints").glob("step-*"))
    _, loaded = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loaded


@pytest.mark.parametrize(
    ("processes", "words", "answer"),
    [
        (4, ["parallel.expert=3"], "parallel.expert=3 does not divide model.experts=8; use parallel.expert=2 or"),
        (
            4,
            ["parallel.expert=8"],
            "parallel.expert=8 does not divide the number of ranks that share experts, 4 = shard 4 x context 1 x "
            "tensor 1; use parallel.expert=2 or parallel.expert=4",
        ),
        (4, ["model=tiny", "parallel.expert=2"], "the model has no experts; use parallel.expert=1"),
        (
            2,
            ["parallel=ddp", "parallel.expert=2"],
            "parallel.expert=2 is not supported with parallel=ddp; use parallel=fsdp",
        ),
        (2, ["parallel.tensor=2", "parallel.sequence=false"], "use parallel.sequence=true"),
        (
            12,
            ["parallel.expert=2"],
            "parallel.expert=2 leaves 4 experts sharded over 6 ranks, but 6 divides neither the number of these "
            "experts nor model.dim=128; use parallel.expert=1",
        ),
    ],
)
def test_degrees_that_do_not_fit_the_experts_are_refused_with_one_that_does(
    processes: int, words: list[str], answer: str
) -> None:
    config = compose(["parallel=fsdp", "model=moe_tiny", "trainer.global_batch=48", "trainer.micro_batch=1", *words])
    with pytest.raises(UserError) as error:
        check_layout(config, resolve_layout(config.parallel, processes), 4)
    assert answer in str(error.value)


@pytest.mark.parametrize(
    ("layout", "mixtures", "answer"),
    [
        (Layout("fsdp", shard=2, expert=2), (), "return ParallelPlan(mixtures=...) from parallel_plan()"),
        (Layout("fsdp", shard=4, expert=4), ("mlp",), "does not divide dim 0 of mlp.experts.gate_proj=6; use parallel"),
        (Layout("fsdp", tensor=2, sequence=False), ("mlp",), "use parallel.sequence=true"),
        (Layout("fsdp", shard=2, expert=2), ("mlp",), ""),
    ],
)
def test_experts_of_a_model_without_a_section_are_checked_when_sharded(
    layout: Layout, mixtures: tuple[str, ...], answer: str
) -> None:
    model = torch.nn.ModuleDict({"mlp": MixtureOfExperts(section(experts=EXPERTS))})
    if not answer:
        specs = shard_specs(model, ParallelPlan(mixtures=mixtures), layout)
        assert "expert" in specs["mlp.experts.up_proj"].sliced_axes
        return
    with pytest.raises(UserError) as error:
        shard_specs(model, ParallelPlan(mixtures=mixtures), layout)
    assert answer in str(error.value)
