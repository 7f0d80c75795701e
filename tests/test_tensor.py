"""The tensor axis: on several ranks loss, logits and gradients are those of one process."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.schema import LlamaSection
from serried.parallel.mesh import Layout
from serried.parallel.plan import ParallelPlan
from serried.parallel.shard_specs import ShardSpec
from serried.parallel.tensor import TENSOR
from serried.recipes.models import head
from serried.recipes.models.transformer import Transformer
from serried.runtime.session import open_session
from tests.cluster import Cluster
from tests.wire import Wire

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
            found["evaluation"] = difference(sharded(**inputs), loss)
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
    answers = cluster.run(ranks, "tests.test_tensor:against_one_process", tied=tied, sequence=sequence)
    for answer in answers:
        assert len(answer.value["differences"]) == 9 * LAYERS + 6 + (not tied)
        assert max(answer.value["differences"].values()) < 1e-5, answer.value
    assert len({answer.value["loss"] for answer in answers}) == 1, "equal bits on all ranks"
    # Into and out of two regions of a layer, forward and backward; and at both ends of the model.
    stream = SEQUENCES * LENGTH * DIM * 8
    normalizers = SEQUENCES * LENGTH * 2 * 4
    expected = (LAYERS * 8 + 4) * stream * (ranks - 1) // ranks + (ranks - 1) * normalizers
    assert [answer.value["sent"] for answer in answers] == [expected] * ranks


def refusal(built: nn.Module, plan: ParallelPlan, ranks: int) -> str:
    layout, groups = Layout("fsdp", tensor=ranks), SimpleNamespace(tensor=object())
    with pytest.raises(UserError) as refused:
        TENSOR.apply(built, plan, layout, layout.coordinates(0), groups)  # type: ignore[arg-type]
    return str(refused.value)


def test_a_model_without_roles_or_with_too_few_rows_is_refused() -> None:
    assert "declares no roles" in refusal(nn.Linear(2, 2), ParallelPlan(), 2)
    with torch.device("meta"):
        few = nn.Sequential(nn.Embedding(5, 4))
    assert "leaves ranks without any of 5 rows" in refusal(few, ParallelPlan(roles={"0": "vocabulary"}), 4)


def test_gradients_that_are_terms_of_a_sum() -> None:
    """By their place: a bias after the sum is whole only on a whole stream, a norm of heads never."""
    roles = {"wpe": "source", "attn": "region", "attn.q": "column", "attn.out": "row"}
    names = ["wpe.weight", "norm.weight", "attn.q.bias", "attn.q_norm.weight", "attn.out.weight", "attn.out.bias"]

    def partial(sequence: bool) -> list[str]:
        layout = Layout("fsdp", tensor=2, sequence=sequence)
        return [name for name in names if TENSOR.is_partial(ParallelPlan(roles=roles), layout, name)]

    assert partial(sequence=True) == ["wpe.weight", "norm.weight", "attn.q_norm.weight", "attn.out.bias"]
    assert partial(sequence=False) == ["attn.q_norm.weight"]
