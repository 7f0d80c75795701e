"""Collectives with gradients: on several ranks the same numbers as one process that holds all parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from serried.configs.compose import compose
from serried.parallel import collectives
from serried.runtime.session import open_session
from testing.rank_pool import Cluster

Parts = list[Tensor]
SENT = [[1, 3, 0], [0, 2, 2], [4, 0, 1]]
"""Rows that each rank (first index) sends to each other one."""


def part(rank: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)


def one_process(name: str, parts: Parts) -> Parts:
    """What each rank should get, from the parts of all."""
    ranks = range(len(parts))
    if name == "gather":
        return [torch.cat(parts, 1) for _ in ranks]
    if name == "scatter_sum":
        return list(sum(parts).chunk(len(parts), 1))  # type: ignore[union-attr]
    if name == "copy":
        return [parts[0] for _ in ranks]
    if name == "all_sum":
        return [sum(parts) for _ in ranks]  # type: ignore[misc]
    if name == "join":
        return [torch.cat(parts, 1) for _ in ranks]
    rows = [part.split(sent[: len(parts)]) for part, sent in zip(parts, SENT, strict=False)]
    return [torch.cat([rows[sender][receiver] for sender in ranks]) for receiver in ranks]


def exchanged(name: str, mine: Tensor, rank: int, ranks: int) -> Tensor:
    group = torch.distributed.group.WORLD
    assert group is not None
    received = [sent[rank] for sent in SENT[:ranks]]
    calls: dict[str, Callable[[], Tensor]] = {
        "gather": lambda: collectives.gather(mine, 1, group),
        "scatter_sum": lambda: collectives.scatter_sum(mine, 1, group),
        "copy": lambda: collectives.copy(mine, group),
        "all_sum": lambda: collectives.all_sum(mine, group),
        "join": lambda: collectives.join(mine, -2, [5, 3, 1][:ranks], group),
        "all_to_all": lambda: collectives.all_to_all(mine, SENT[rank][:ranks], received, group),
    }
    return calls[name]()


def shape(name: str, rank: int, ranks: int) -> tuple[int, ...]:
    if name == "join":
        return 2, (5, 3, 1)[rank], 4
    return (sum(SENT[rank][:ranks]), 4) if name == "all_to_all" else (2, 6, 4)


NAMES = ("gather", "scatter_sum", "copy", "all_sum", "join", "all_to_all")
EQUAL_OUTPUTS = ("all_sum", "join")
"""Backward expects the same gradient on all ranks: that of one loss which all of them compute."""


def differentiate(names: list[str]) -> dict[str, Any]:
    """Largest differences of output and gradient from one process, by collective."""
    with open_session(compose([]).launch) as session:
        rank, ranks = session.rank, session.world_size
        found = {}
        for name in names:
            parts = [part(0 if name == "copy" else r, *shape(name, r, ranks)).requires_grad_() for r in range(ranks)]
            expected = one_process(name, parts)
            mine = parts[rank].detach().requires_grad_()
            output = exchanged(name, mine, rank, ranks)
            seeds = [0 if name in EQUAL_OUTPUTS else r for r in range(ranks)]
            weights = [part(seed, *each.shape, seed=1) for seed, each in zip(seeds, expected, strict=True)]
            losses = [(each * weight).sum() for each, weight in zip(expected, weights, strict=True)]
            loss = losses[0] if name in EQUAL_OUTPUTS else torch.stack(losses).sum()
            (gradient,) = torch.autograd.grad(loss, parts[0 if name == "copy" else rank])
            (output * weights[rank]).sum().backward()
            assert mine.grad is not None
            found[name] = [(output - expected[rank]).abs().max().item(), (mine.grad - gradient).abs().max().item()]
        return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_outputs_and_gradients_equal_those_of_one_process(ranks: int, cluster: Cluster) -> None:
    for answer in cluster.run(ranks, "tests.ranks.test_collectives:differentiate", names=list(NAMES)):
        assert answer.value.keys() == set(NAMES)
        assert max(number for pair in answer.value.values() for number in pair) < 1e-12, answer.value


KINDS = {
    "bf16": torch.ones(2, 3, dtype=torch.bfloat16), "int64": torch.ones(4, 1, 2, dtype=torch.int64),
    "complex": torch.full((3, 2), 1 + 2j),
}  # fmt: skip


def gather_each_kind() -> dict[str, Any]:
    """Whether torch's own gather returns what the ranks have, by kind of tensor, and the operations of c10d it uses."""
    with open_session(compose([]).launch) as session, profile(activities=[ProfilerActivity.CPU]) as profiled:
        name = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
        functional, equal = torch.ops._c10d_functional, {}
        for kind, one in KINDS.items():
            gathered = functional.all_gather_into_tensor(one * (session.rank + 1), session.world_size, name)
            parts = [one * (rank + 1) for rank in range(session.world_size)]
            equal[kind] = torch.equal(functional.wait_tensor(gathered), torch.cat(parts))
    return {"equal": equal, "used": [event.key for event in profiled.key_averages() if "gather" in event.key]}


def test_functional_gather_on_gloo_is_one_collective_not_a_coalesced_one(cluster: Cluster) -> None:
    """The race is too rare to test for, so the test looks at what is called."""
    for answer in cluster.run(2, "tests.ranks.test_collectives:gather_each_kind"):
        assert answer.value["equal"] == dict.fromkeys(KINDS, True)
        assert "c10d::_allgather_base_" in answer.value["used"]
        assert not [name for name in answer.value["used"] if "coalesced" in name]
