"""Sample order: a pure function of (seed, index), a permutation in every epoch, and however it is dealt the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.sampler import SampleOrder, micro_batch_indices

sizes = st.integers(1, 400) | st.sampled_from([511, 512, 513, 1000, 4096])
seeds = st.integers(0, 2**63 - 1)


def epoch(size: int, seed: int, number: int) -> np.ndarray:
    return SampleOrder(size, seed)(np.arange(number * size, (number + 1) * size))


@given(size=sizes, seed=seeds, number=st.integers(0, 2**40))
def test_every_epoch_has_each_sample_once(size: int, seed: int, number: int) -> None:
    assert np.array_equal(np.sort(epoch(size, seed, number)), np.arange(size))


@given(size=sizes, seed=seeds, indices=st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
def test_a_sample_depends_on_its_index_alone(size: int, seed: int, indices: list[int]) -> None:
    order = SampleOrder(size, seed)
    together = order(np.array(indices, np.int64))
    alone = [int(order(np.array([index], np.int64))[0]) for index in indices]
    assert together.tolist() == alone
    assert together.dtype == np.int64


@given(
    size=st.integers(2**30, 2**62),
    seed=seeds,
    indices=st.sets(st.integers(0, 2**30 - 1), min_size=2, max_size=50),
)
def test_huge_sizes_stay_in_range_and_apart(size: int, seed: int, indices: set[int]) -> None:
    samples = SampleOrder(size, seed)(np.array(sorted(indices), np.int64))
    assert len(set(samples.tolist())) == len(indices)
    assert samples.min() >= 0
    assert samples.max() < size


@given(
    accumulation=st.integers(1, 4),
    ranks=st.integers(1, 6),
    micro_batch=st.integers(1, 5),
    step=st.integers(0, 2**40),
    size=sizes,
    seed=seeds,
)
def test_a_step_has_the_same_samples_however_it_is_dealt(
    accumulation: int, ranks: int, micro_batch: int, step: int, size: int, seed: int
) -> None:
    order, batch = SampleOrder(size, seed), accumulation * ranks * micro_batch
    whole = order(np.arange(step * batch, (step + 1) * batch)).tolist()
    dealt = [
        micro_batch_indices(step, accumulation=accumulation, data_ranks=ranks, micro_batch=micro_batch, data_rank=rank)
        for rank in range(ranks)
    ]
    in_order = [dealt[rank][micro] for micro in range(accumulation) for rank in range(ranks)]
    assert all(len(indices) == micro_batch for indices in in_order)
    assert order(np.concatenate(in_order)).tolist() == whole


@given(seed=seeds, number=st.integers(0, 2**40))
def test_seeds_and_epochs_differ(seed: int, number: int) -> None:
    here = epoch(200, seed, number)
    assert not np.array_equal(here, epoch(200, seed, number + 1))
    assert not np.array_equal(here, epoch(200, seed + 1, number))


@pytest.mark.parametrize("size", [2, 3, 7, 10, 16, 33, 100])
def test_each_place_gets_each_sample_equally_often(size: int) -> None:
    """Chi-square over many epochs: [place, sample] counts against uniform, ten standard deviations wide."""
    epochs = 4000
    places = SampleOrder(size, 7)(np.arange(size * epochs)).reshape(epochs, size)
    counts = np.stack([np.bincount(places[:, place], minlength=size) for place in range(size)])
    expected, freedom = epochs / size, (size - 1) ** 2
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 10 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [1000, 2**14, 100_003])
def test_places_and_neighbours_do_not_correlate(size: int) -> None:
    samples = epoch(size, 3, 0).astype(float)
    limit = 6 / np.sqrt(size)
    assert abs(np.corrcoef(np.arange(size), samples)[0, 1]) < limit
    assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < limit
    assert abs(np.corrcoef(samples, epoch(size, 3, 1))[0, 1]) < limit
    assert abs(np.corrcoef(samples, epoch(size, 4, 0))[0, 1]) < limit


def test_the_order_is_fixed_for_ever() -> None:
    """A run that stops under one version goes on under another: these numbers may never change."""
    assert SampleOrder(1000, 1)(np.arange(998, 1004)).tolist() == [619, 720, 977, 692, 412, 698]
    assert SampleOrder(2**40, 2**63 - 1)(np.array([0, 1, 2**62])).tolist() == [830927769921, 815319962868, 883409514353]


@pytest.mark.parametrize(("size", "seed"), [(0, 1), (2**62 + 1, 1), (5, -1)])
def test_what_cannot_be_ordered_is_refused(size: int, seed: int) -> None:
    with pytest.raises(ValueError, match=r"must be in"):
        SampleOrder(size, seed)
    with pytest.raises(ValueError, match="negative"):
        SampleOrder(5, 1)(np.array([-1]))
