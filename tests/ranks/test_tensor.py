"""The tensor axis: on several ranks loss, logits and gradients are those of one process."""

import re
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.parallel.axes.tensor import TENSOR, Stream, _rows_of_vocabularies
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.shard_specs import ShardSpec
from serried.parallel.parallelize import check_plan, parallelize
from serried.parallel.plan import LossTerms, ParallelPlan
from serried.recipes.models.families.llama import Transformer
from serried.recipes.models.families.llama_config import LlamaSection
from serried.recipes.models.layers import lm_head as head
from serried.runtime.session import open_session
from testing.rank_pool import Cluster
from testing.wire_bytes import Wire

VOCABULARY = 257
"""Which no number of ranks here divides."""
LAYERS, DIM, SEQUENCES, LENGTH = 2, 24, 2, 36


def model(tied: bool) -> Transformer:
    section = LlamaSection(
        name="small", dim=DIM, layers=LAYERS, heads=6, kv_heads=3 if dist.get_world_size() == 3 else 2, hidden_dim=36,
        tie_embeddings=tied, vocab_size=VOCABULARY,
    )  # fmt: skip
    torch.manual_seed(1)
    built = Transformer(section, VOCABULARY)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    if tied:
        terms = head.HeadTerms(label_smoothing=0.2, z_loss=0.05)
        built.lm_head.loss = partial(head.linear_cross_entropy_sum, terms=terms)
    return built.double()


def batch() -> dict[str, Tensor]:
    """Documents that are isolated, and tokens without a target."""
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(2))
    targets = tokens.roll(-1, 1)
    targets[:, 5:9], targets[1, -10:] = -100, -100
    positions = torch.cat((torch.arange(20), torch.arange(LENGTH - 20))).expand(SEQUENCES, -1)
    return {"tokens": tokens, "targets": targets, "positions": positions}


def against_one_process(tied: bool, sequence: bool) -> dict[str, Any]:
    """Largest differences, relative to the largest number; and the bytes on the wire."""
    chunks_of_10_tokens = patch.multiple(head, _MINIMUM_CHUNK_TOKENS=10, _CHUNK_LOGITS=1)
    with open_session(compose([]).launch) as session, chunks_of_10_tokens:
        whole, inputs = model(tied), batch()
        plan, layout = whole.parallel_plan(), Layout("fsdp", tensor=session.world_size, sequence=sequence)
        place, groups = layout.coordinates(session.rank), SimpleNamespace(tensor=dist.group.WORLD)
        sharded = deepcopy(whole)
        TENSOR.apply(sharded, plan, layout, place, groups)  # type: ignore[arg-type]
        loss = whole(**inputs)
        (loss * 2).backward()
        with Wire() as wire:
            mine = sharded(**inputs)
            (mine * 2).backward()
        found = {"loss": difference(mine, loss)}
        expected = dict(whole.named_parameters())
        for name, parameter in sharded.named_parameters():
            gradient, theirs = parameter.grad, expected[name].grad
            assert gradient is not None, name
            assert theirs is not None
            if TENSOR.is_partial(plan, layout, name):
                dist.all_reduce(gradient)
            slices = TENSOR.slices(plan, layout, name, theirs.shape)
            box = ShardSpec(name, tuple(theirs.shape), slices).box(layout, place)
            for dim, (start, size) in enumerate(zip(box.starts, box.sizes, strict=True)):
                theirs = theirs.narrow(dim, start, size)
            found[name] = difference(gradient, theirs)
        with torch.no_grad():
            found["evaluation"] = difference(sharded(**inputs), whole(**inputs))
        found |= {f"{name} of logits": number for name, number in differences_of_logits(whole, sharded).items()}
        return {"differences": found, "loss": mine.item(), "sent": sum(wire.bytes.values())}


def differences_of_logits(whole: Transformer, sharded: Transformer) -> dict[str, float]:
    """For losses that are not the head's own."""
    logits = [each(batch()["tokens"]) for each in (whole, sharded)]
    gradients = []
    for each, own in zip((whole, sharded), logits, strict=True):
        each.zero_grad()
        own.square().sum().backward()
        gradient = each.get_parameter("layers.0.self_attn.q_proj.weight").grad
        assert gradient is not None
        gradients.append(gradient)
    mine = gradients[0].chunk(dist.get_world_size())[dist.get_rank()]
    return {"values": difference(logits[1], logits[0]), "gradient": difference(gradients[1], mine)}


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize(("ranks", "tied", "sequence"), [(2, False, True), (2, True, False), (3, True, True)])
def test_loss_and_gradients_equal_one_process(ranks: int, tied: bool, sequence: bool, cluster: Cluster) -> None:
    answers = cluster.run(ranks, "tests.ranks.test_tensor:against_one_process", tied=tied, sequence=sequence)
    for answer in answers:
        assert len(answer.value["differences"]) == 9 * LAYERS + 6 + (not tied)
        assert max(answer.value["differences"].values()) < 1e-5, answer.value
    assert len({answer.value["loss"] for answer in answers}) == 1, "equal bits on all ranks"
    # Into and out of two regions of a layer, forward and backward; and at both ends of the model.
    stream = SEQUENCES * LENGTH * DIM * 8
    normalizers = SEQUENCES * LENGTH * 2 * 4
    expected = (LAYERS * 8 + 4) * stream * (ranks - 1) // ranks + (ranks - 1) * normalizers
    assert [answer.value["sent"] for answer in answers] == [expected] * ranks


class Scaled(nn.Module):
    """A parameter without dims, which FSDP2 cannot shard."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(10, 4), nn.Parameter(torch.tensor(1.5))
        self.head = head.LanguageModelHead(4, 10, tied=False)
        nn.init.normal_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens) * self.scale, tokens.roll(-1, 1))


def gradients_of_a_scalar() -> list[tuple[float, float]]:
    """On tensor ranks and on one process, with the stream divided and whole."""
    found, config, tokens = [], compose(["parallel=fsdp"]), torch.arange(10).view(1, 10)
    plan = ParallelPlan(roles={"embed": "vocabulary", "head": "head"})
    objective: Any = SimpleNamespace(loss=lambda model, batch: LossTerms(model(batch), 1))
    with open_session(config.launch) as session:
        for sequence in (True, False):
            torch.manual_seed(3)
            whole = Scaled()
            parallel = parallelize(
                deepcopy(whole), plan, None, seed=1, layout=Layout("fsdp", tensor=2, sequence=sequence),
                section=config.parallel, low_dtype=None, device=session.device,
            )  # fmt: skip
            parallel.forward_backward([tokens], objective, 1.0)
            whole(tokens).backward()
            mine = parallel.module.get_parameter("scale").grad
            assert mine is not None
            assert whole.scale.grad is not None
            found.append((mine.item(), whole.scale.grad.item()))
    return found


def test_gradients_of_a_parameter_without_dims_are_summed_once(cluster: Cluster) -> None:
    for answer in cluster.run(2, "tests.ranks.test_tensor:gradients_of_a_scalar"):
        for mine, expected in answer.value:
            assert mine == pytest.approx(expected, rel=1e-5)


def refusal(built: nn.Module, plan: ParallelPlan, ranks: int, *, sequence: bool = False) -> str:
    layout, groups = Layout("fsdp", tensor=ranks, sequence=sequence), SimpleNamespace(tensor=object())
    with pytest.raises(UserError) as refused:
        TENSOR.apply(built, plan, layout, layout.coordinates(0), groups)  # type: ignore[arg-type]
    return str(refused.value)


def test_a_model_without_roles_or_with_too_few_rows_is_refused() -> None:
    assert "declares no roles" in refusal(nn.Linear(2, 2), ParallelPlan(), 2)
    with torch.device("meta"):
        few = nn.Sequential(nn.Embedding(5, 4))
    assert "leaves ranks without any of the 5 rows" in refusal(few, ParallelPlan(roles={"0": "vocabulary"}), 4)


def test_a_plan_that_lacks_an_axis_is_refused_before_anything_is_divided() -> None:
    for layout, why in (
        (Layout("fsdp", tensor=2), "parallel.tensor=2: the model declares no roles"),
        (Layout("fsdp", pipeline=2, stages=2), "parallel.pipeline=2: Linear declares no blocks"),
    ):
        with pytest.raises(UserError, match=why):
            check_plan(nn.Linear(2, 2), ParallelPlan(), layout)


def test_sequence_sharding_without_end_roles_is_refused() -> None:
    """Every gradient would be too large by the number of ranks."""
    roles = {"0": "region", "0.0": "column", "0.1": "row"}
    built = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    for more in ({}, {"wte": "vocabulary"}, {"lm_head": "head"}):
        told = refusal(built, ParallelPlan(roles=roles | more), 2, sequence=True)
        assert told.endswith("use parallel.sequence=false"), told


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("module", "role", "why"),
    [
        (nn.Embedding(4, 4, max_norm=1.0, sparse=True), "vocabulary", "is an embedding with max_norm, sparse"),
        (_Doubled(4, 4), "row", r"has its own forward \(_Doubled\)"),
        (_Doubled(4, 4), "conv1d_row", "has its own forward"),
    ],
)
def test_module_whose_forward_would_be_ignored_is_refused(module: nn.Module, role: str, why: str) -> None:
    told = refusal(nn.Sequential(module), ParallelPlan(roles={"0": role}), 2)
    assert re.search(f"0 has the role {role} but {why}", told), told


def test_a_head_that_ranks_cannot_divide_is_refused() -> None:
    told = refusal(nn.Sequential(nn.Linear(4, 4)), ParallelPlan(roles={"0": "head"}), 2)
    assert "0 has the role head but is a Linear; use an nn.Linear without bias, or serried." in told, told


def test_vocabulary_rows_are_counted_per_module() -> None:
    tied = head.LanguageModelHead(2, 9, tied=True)
    modules = {"large": nn.Embedding(9, 2), "small": nn.Embedding(4, 2), "head": tied}
    roles = {"large": "vocabulary", "small": "vocabulary", "head": "head"}
    assert _rows_of_vocabularies(nn.ModuleDict(modules), roles) == {"large": 9, "small": 4, "head": 9}


def length_that_ranks_cannot_divide() -> str:
    with open_session(compose([]).launch):
        group = dist.group.WORLD
        assert group is not None
        with pytest.raises(UserError) as refused:
            Stream(group, is_divided=True).own_part(torch.zeros(1, 5, 2))
        halves = Stream(group, is_divided=True).own_part(torch.arange(8).view(4, 2))  # positions without a batch
        assert halves.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]][dist.get_rank()]
        assert Stream(group, is_divided=False).own_part(torch.zeros(1, 5, 2)).shape == (1, 5, 2)
        return str(refused.value)


def test_a_length_that_ranks_cannot_divide_is_refused(cluster: Cluster) -> None:
    told = cluster.run(2, "tests.ranks.test_tensor:length_that_ranks_cannot_divide")[0].value
    assert told.startswith("parallel.tensor=2 does not divide a sequence of 5")


def test_partial_gradients_are_found_by_role() -> None:
    """By their place: a bias after the sum is whole only on a whole stream, a norm of heads never."""
    roles = {"wpe": "source", "attn": "region", "attn.q": "column", "attn.out": "row"}
    names = ["wpe.weight", "norm.weight", "attn.q.bias", "attn.q_norm.weight", "attn.out.weight", "attn.out.bias"]

    def partial(sequence: bool) -> list[str]:
        layout = Layout("fsdp", tensor=2, sequence=sequence)
        return [name for name in names if TENSOR.is_partial(ParallelPlan(roles=roles), layout, name)]

    assert partial(sequence=True) == ["wpe.weight", "norm.weight", "attn.q_norm.weight", "attn.out.bias"]
    assert partial(sequence=False) == ["attn.q_norm.weight"]
