"""Whatever ranks die in a step, and whatever survivors miss the vote, the survivors agree on one step."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from serried.runtime.agreement import Agreement, Fenced, NotRecoverable, Report, agree, meet_survivors


@given(
    replicas=st.integers(1, 4), shard=st.integers(1, 3), step=st.integers(1, 2**40), data=st.data(),
    reached=st.sampled_from(["prepare", "vote"]),
)  # fmt: skip
def test_survivors_of_any_loss_end_at_the_same_step_or_at_a_checkpoint(
    replicas: int, shard: int, step: int, reached: str, data: st.DataObject
) -> None:
    """A rank starts to vote when it has prepared. The vote ends on a rank only if all ranks have started it."""
    ranks = range(replicas * shard)
    groups = [list(ranks)[first : first + shard] for first in ranks[::shard]]
    dead = data.draw(st.sets(st.sampled_from(ranks), max_size=len(ranks)))
    if reached == "prepare":
        prepared = data.draw(st.sets(st.sampled_from(ranks), max_size=len(ranks) - 1))
        committed = set[int]()
    else:
        prepared = set(ranks)
        committed = data.draw(st.sets(st.sampled_from(ranks)))
    reports = [
        Report(rank, step - (rank not in committed), step - (rank not in prepared))
        for rank in ranks
        if rank not in dead
    ]
    whole = [group for group in groups if dead.isdisjoint(group)]
    if not whole:
        with pytest.raises(NotRecoverable, match=rf"0 of {replicas} replicas are whole, and at least 1 must be"):
            agree(reports, groups)
        return
    found = agree(reports, groups)
    assert list(found.ranks) == [rank for group in whole for rank in group]
    assert found.step == (step if committed - dead else step - 1)
    assert set(found.behind) == {rank for rank in found.ranks if rank not in committed and found.step == step}
    assert set(found.behind) <= prepared


def test_a_step_that_a_rank_can_neither_finish_nor_undo_is_not_recoverable() -> None:
    """It cannot happen while the vote is kept, and must not train on."""
    with pytest.raises(NotRecoverable, match="step 8 is done on another rank, but rank 1 has not prepared it"):
        agree([Report(0, 8, 8), Report(1, 7, 7)], [[0], [1]])


def test_fewer_whole_replicas_than_required_are_not_recoverable() -> None:
    reports = [Report(rank, 7, 7) for rank in (0, 1, 2)]
    with pytest.raises(NotRecoverable, match="1 of 2 replicas is whole, and at least 2 must be"):
        agree(reports, [[0, 1], [2, 3]], 2)
    assert agree(reports, [[0, 1], [2, 3]]).ranks == (0, 1)


def meet(store: HashStore, report: Report, gone: set[int], claims: list[Any], patience_seconds: float) -> Agreement:
    """Meet the survivors of three ranks that are a replica each."""

    def claim(content: Mapping[str, Any]) -> bool:
        claims.append(content)
        return len(claims) == 1

    return meet_survivors(
        store, report, [[0], [1], [2]], least_replicas=1, is_gone=gone.__contains__, patience_seconds=patience_seconds,
        claim=claim, check=lambda: None,
    )  # fmt: skip


def test_first_survivor_decides_once_for_all() -> None:
    store, claims = HashStore(), list[Any]()
    with ThreadPoolExecutor(2) as ranks:
        met = [ranks.submit(meet, store, Report(rank, 7, 7 + (rank == 2)), {0}, claims, 60) for rank in (2, 1)]
    assert [future.result() for future in met] == [Agreement((1, 2), 7, ())] * 2
    assert claims == [{"ranks": (1, 2), "step": 7, "behind": ()}]


def test_rank_that_was_taken_for_gone_is_fenced_when_it_comes() -> None:
    """A frozen process wakes up after the others have continued."""
    store, claims = HashStore(), list[Any]()
    assert meet(store, Report(1, 7, 7), {0, 2}, claims, 60).ranks == (1,)
    with pytest.raises(Fenced, match="the other processes continue without this one"):
        meet(store, Report(0, 7, 7), set(), claims, 60)
    assert len(claims) == 1


def test_rank_that_runs_and_does_not_report_ends_the_meeting() -> None:
    with pytest.raises(NotRecoverable, match="rank 2 runs, but does not react"):
        meet(HashStore(), Report(0, 7, 7), {1}, [], 0.05)


def test_generation_that_another_process_has_claimed_ends_the_meeting() -> None:
    with pytest.raises(NotRecoverable, match="another process has claimed this generation"):
        meet(HashStore(), Report(0, 7, 7), {1, 2}, ["taken"], 60)
