"""Batches ahead of the step: the same for any number of threads, in order, and no thread left behind."""

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serried.configs.errors import UserError
from serried.trainer.data.loader import PADDING_ID, BatchLoader, Reader, SampleError, evaluation_batches, evaluation_ids
from serried.trainer.data.sampler import BatchShare, SampleOrder


class Numbers(NamedTuple):
    values: Tensor
    ids: Tensor


class Squares:
    """Sample i is i squared. Counts its reads; ``bad`` raises; ``pause_seconds`` is how long a read takes."""

    def __init__(self, size: int, bad: dict[int, Exception] | None = None, pause_seconds: float = 0.0) -> None:
        self.size, self.bad, self.pause_seconds = size, bad or {}, pause_seconds
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        time.sleep(self.pause_seconds)
        if index in self.bad:
            raise self.bad[index]
        return index * index


def collate(samples: Sequence[int], ids: np.ndarray) -> Numbers:
    return Numbers(torch.tensor(samples), torch.from_numpy(ids))


def loader(dataset: Squares, **changes: Any) -> BatchLoader:
    dealt = {name: changes.pop(name) for name in BatchShare._fields if name in changes}
    share = BatchShare(**{"micro_batch": 3, "global_batch": 6, **dealt})
    settings_ = {"steps": range(5), "workers": 2, "pin_memory": False, **changes}
    return BatchLoader(Reader(dataset, collate), SampleOrder(len(dataset), 1), share, **settings_)


def ids_by_step(dataset: Squares, **changes: Any) -> list[list[list[int]]]:
    with loader(dataset, **changes) as batches:
        return [[batch.ids.tolist() for batch in step] for step in batches]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batch-loader")]


@settings(max_examples=25)
@given(workers=st.integers(0, 4), accumulation=st.integers(1, 3), first=st.integers(0, 2**40), steps=st.integers(0, 80))
def test_number_of_threads_changes_no_batch(workers: int, accumulation: int, first: int, steps: int) -> None:
    asked = {"global_batch": 3 * accumulation, "steps": range(first, first + steps)}
    assert ids_by_step(Squares(100), workers=workers, **asked) == ids_by_step(Squares(100), workers=0, **asked)


@pytest.mark.parametrize(("ranks", "accumulation", "micro_batch"), [(1, 1, 12), (2, 3, 2), (4, 1, 3), (3, 4, 1)])
def test_ranks_and_accumulation_change_no_sample(ranks: int, accumulation: int, micro_batch: int) -> None:
    dealt = [
        ids_by_step(Squares(50), data_ranks=ranks, data_rank=rank, global_batch=12, micro_batch=micro_batch)
        for rank in range(ranks)
    ]
    for step in range(5):
        in_order = [i for micro in range(accumulation) for rank in range(ranks) for i in dealt[rank][step][micro]]
        assert in_order == SampleOrder(50, 1)(np.arange(step * 12, step * 12 + 12)).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_started_at_a_later_step_reads_the_same_samples(workers: int) -> None:
    whole = ids_by_step(Squares(10), steps=range(100), workers=workers)
    assert ids_by_step(Squares(10), steps=range(37, 100), workers=workers) == whole[37:]


def test_samples_reach_collate_with_their_ids() -> None:
    with loader(Squares(20)) as batches:
        for step in batches:
            for batch in step:
                assert torch.equal(batch.values, batch.ids**2)


def test_reads_ahead_two_steps_and_no_further() -> None:
    dataset = Squares(1000)
    with loader(dataset, steps=range(50), workers=1) as batches:
        next(batches)
        deadline = time.monotonic() + 60
        while len(dataset.read) < 18 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(dataset.read) == 18  # the step that was asked for, and two more, of six samples each


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_failure_comes_at_its_step_with_the_sample(workers: int) -> None:
    bad = int(SampleOrder(60, 1)(np.array([15]))[0])  # in the third step
    with loader(Squares(60, {bad: OSError("disk gone")}), workers=workers) as batches:
        next(batches)
        next(batches)
        with pytest.raises(SampleError, match=rf"sample {bad} of step 3: OSError: disk gone") as caught:
            next(batches)
        assert isinstance(caught.value.__cause__, OSError)
    assert threads() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_user_error_in_a_dataset_stays_a_user_error(workers: int) -> None:
    bad = int(SampleOrder(60, 1)(np.array([0]))[0])
    with (
        loader(Squares(60, {bad: UserError("row 7 is empty")}), workers=workers) as batches,
        pytest.raises(UserError, match=rf"sample {bad} of step 1: row 7 is empty"),
    ):
        next(batches)


def test_closing_early_leaves_no_thread() -> None:
    batches = loader(Squares(60, pause_seconds=0.005), workers=4, steps=range(1000))
    next(batches)
    assert threads()
    batches.close()
    batches.close()
    assert threads() == []
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_exhausted_loader_yields_no_further_batches(workers: int) -> None:
    with loader(Squares(60), workers=workers, steps=range(1)) as batches:
        assert len(list(batches)) == 1
        assert list(batches) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_waiting_time_is_measured_and_returned_once(workers: int) -> None:
    with loader(Squares(60, pause_seconds=0.01), workers=workers, steps=range(1)) as batches:
        next(batches)
        assert 0.03 < batches.take_waited_seconds() < 10
        assert batches.take_waited_seconds() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinning needs a GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_in_pinned_memory(workers: int) -> None:
    with loader(Squares(60), workers=workers, pin_memory=True) as batches:
        assert all(tensor.is_pinned() for step in batches for batch in step for tensor in batch)


# evaluation -----------------------------------------------------------------------------------------------------------


@given(size=st.integers(1, 60), first=st.integers(0, 60), micro_batch=st.integers(1, 7), ranks=st.integers(1, 5))
def test_evaluation_assigns_each_sample_to_one_rank(size: int, first: int, micro_batch: int, ranks: int) -> None:
    samples = np.arange(first, first + size)
    dealt = [evaluation_ids(samples, BatchShare(micro_batch, ranks, rank)) for rank in range(ranks)]
    assert len({len(batches) for batches in dealt}) == 1
    assert all(batch.shape == (micro_batch,) for batches in dealt for batch in batches)
    ids = np.concatenate([batch for batches in dealt for batch in batches])
    assert sorted(ids[ids != PADDING_ID].tolist()) == samples.tolist()
    assert (ids == PADDING_ID).sum() < micro_batch * ranks


def test_evaluation_reads_only_the_assigned_samples() -> None:
    samples = np.arange(5)
    last = list(evaluation_batches(Reader(Squares(9), collate), samples, BatchShare(2, 2, 1)))
    assert [(batch.ids.tolist(), counts) for batch, counts in last] == [([2, 3], True), ([PADDING_ID] * 2, False)]
    assert last[0][0].values.tolist() == [4, 9]
    with pytest.raises(SampleError, match="sample 4 of the evaluation: KeyError"):
        list(evaluation_batches(Reader(Squares(9, {4: KeyError("x")}), collate), samples, BatchShare(2, 2, 0)))
