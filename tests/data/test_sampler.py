"""Sample order: a pure function of (seed, index), a permutation in every epoch, and however it is dealt the same."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serried.trainer.data.sampler import (
    BatchShare,
    MixtureOrder,
    SampleOrder,
    block_counts,
    evaluation_samples,
    micro_batch_indices,
    passes,
)

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


@given(size=st.integers(2**30, 2**62), seed=seeds, indices=st.sets(st.integers(0, 2**30 - 1), min_size=2, max_size=50))
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
def test_step_has_the_same_samples_on_any_layout(
    accumulation: int, ranks: int, micro_batch: int, step: int, size: int, seed: int
) -> None:
    order, batch = SampleOrder(size, seed), accumulation * ranks * micro_batch
    whole = order(np.arange(step * batch, (step + 1) * batch)).tolist()
    dealt = [micro_batch_indices(step, BatchShare(micro_batch, ranks, rank, batch)) for rank in range(ranks)]
    in_order = [dealt[rank][micro] for micro in range(accumulation) for rank in range(ranks)]
    assert all(len(indices) == micro_batch for indices in in_order)
    assert order(np.concatenate(in_order)).tolist() == whole


@given(
    units=st.integers(1, 40), replicas=st.integers(1, 8), shard=st.integers(1, 3), micro_batch=st.integers(1, 3),
    step=st.integers(0, 2**40),
)  # fmt: skip
def test_uneven_shares_differ_by_one_micro_batch_and_have_each_sample_once(
    units: int, replicas: int, shard: int, micro_batch: int, step: int
) -> None:
    ranks, batch = replicas * shard, units * shard * micro_batch
    dealt = [micro_batch_indices(step, BatchShare(micro_batch, ranks, rank, batch)) for rank in range(ranks)]
    counts = [len(micro_batches) for micro_batches in dealt]
    assert max(counts) - min(counts) <= 1
    assert all(len(set(counts[first : first + shard])) == 1 for first in range(0, ranks, shard)), "within a replica"
    samples = np.concatenate([indices for micro_batches in dealt for indices in micro_batches])
    assert sorted(samples.tolist()) == list(range(step * batch, (step + 1) * batch))


@given(seed=seeds, number=st.integers(0, 2**40))
def test_orders_of_seeds_and_epochs_differ(seed: int, number: int) -> None:
    here = epoch(200, seed, number)
    assert not np.array_equal(here, epoch(200, seed, number + 1))
    assert not np.array_equal(here, epoch(200, seed + 1, number))


@pytest.mark.parametrize("size", [2, 3, 7, 10, 16, 33, 100])
def test_each_position_gets_each_sample_equally_often(size: int) -> None:
    """Chi-square over many epochs: [place, sample] counts against uniform, ten standard deviations wide."""
    epochs = 1000
    places = SampleOrder(size, 7)(np.arange(size * epochs)).reshape(epochs, size)
    counts = np.stack([np.bincount(places[:, place], minlength=size) for place in range(size)])
    expected, freedom = epochs / size, (size - 1) ** 2
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 10 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [1000, 2**14, 100_003])
def test_positions_of_neighbouring_samples_do_not_correlate(size: int) -> None:
    samples = epoch(size, 3, 0).astype(float)
    limit = 6 / np.sqrt(size)
    assert abs(np.corrcoef(np.arange(size), samples)[0, 1]) < limit
    assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < limit
    assert abs(np.corrcoef(samples, epoch(size, 3, 1))[0, 1]) < limit
    assert abs(np.corrcoef(samples, epoch(size, 4, 0))[0, 1]) < limit


def test_order_never_changes_between_versions() -> None:
    """A run that stops under one version goes on under another: these numbers may never change."""
    assert SampleOrder(1000, 1)(np.arange(998, 1004)).tolist() == [619, 720, 977, 692, 412, 698]
    assert SampleOrder(2**40, 2**63 - 1)(np.array([0, 1, 2**62])).tolist() == [830927769921, 815319962868, 883409514353]


# mixtures -------------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    samples: int
    weight: float


class Mixed:
    is_shuffled_together = False

    def __init__(self, **parts: tuple[int, float]) -> None:
        self.parts = {name: Part(*part) for name, part in parts.items()}

    def __len__(self) -> int:
        return sum(part.samples for part in self.parts.values())


few_decimals = st.integers(1, 999).map(lambda number: number / 100)
mixtures = st.lists(st.tuples(st.integers(1, 60), few_decimals), min_size=2, max_size=6).map(
    lambda parts: {f"source{i}": Part(*part) for i, part in enumerate(parts)}
)


@settings(max_examples=60)
@given(parts=mixtures)
def test_source_has_its_share_at_any_sample(parts: dict[str, Part]) -> None:
    """The counts after n samples are within 1 - 1/(2m - 2) of the shares, whatever n, and exact after a block."""
    order, counts = MixtureOrder(parts, 1), np.array(block_counts([part.weight for part in parts.values()]))
    block = counts.sum()
    sources, earlier = order.places(np.arange(block + 50))
    after = np.cumsum(sources[:, None] == np.arange(len(parts)), axis=0)
    shares = np.arange(1, block + 51)[:, None] * counts / block
    assert np.abs(after - shares).max() <= 1 - 1 / (2 * len(parts) - 2) + 1e-9
    assert after[block - 1].tolist() == counts.tolist()
    assert (after[np.arange(len(after)), sources] - 1 == earlier).all(), "how many of the source came before"


def test_mixture_of_one_source_equals_that_source() -> None:
    order = MixtureOrder({"web": Part(7, 0.3)}, 1)
    assert sorted(order(np.arange(7, 14)).tolist()) == list(range(7))


@settings(max_examples=60)
@given(parts=mixtures, seed=seeds, start=st.integers(0, 2**40))
def test_mixture_reads_each_source_epoch_by_epoch(parts: dict[str, Part], seed: int, start: int) -> None:
    order = MixtureOrder(parts, seed)
    indices = np.arange(start, start + 400)
    samples = order(indices)
    sources, places = order.places(indices)
    first = np.cumsum([0, *(part.samples for part in parts.values())])
    for source, part in enumerate(parts.values()):
        mine, at = samples[sources == source] - first[source], places[sources == source]
        assert np.array_equal(at, np.arange(at[0], at[0] + len(at)) if len(at) else at)
        for epoch in set(at // part.samples):
            seen = mine[at // part.samples == epoch]
            assert len(set(seen)) == len(seen)
            assert ((seen >= 0) & (seen < part.samples)).all()
    picked = indices[::37]
    assert [int(order(np.array([i]))[0]) for i in picked] == samples[::37].tolist(), "each depends on its index alone"


def test_another_source_or_weight_does_not_reorder_the_others() -> None:
    def samples_of_web(parts: dict[str, Part]) -> list[int]:
        order = MixtureOrder(parts, 5)
        sources, _ = order.places(np.arange(400))
        web = list(parts).index("web")
        return (order(np.arange(400))[sources == web] - sum(p.samples for p in list(parts.values())[:web])).tolist()

    two = samples_of_web({"web": Part(50, 0.5), "code": Part(50, 0.5)})
    three = samples_of_web({"books": Part(9, 2.0), "web": Part(50, 0.5), "code": Part(50, 0.5)})
    assert two[: len(three)] == three
    assert samples_of_web({"web": Part(50, 0.9), "code": Part(50, 0.1)})[: len(two)] == two
    one = MixtureOrder({"web": Part(50, 0.5), "code": Part(50, 0.5)}, 5)
    assert not np.array_equal(one(np.arange(0, 100, 2)) % 50, one(np.arange(1, 100, 2)) % 50), "each has an own order"


@pytest.mark.parametrize(
    "weights, counts",
    [
        ([0.7, 0.3], [7, 3]),
        ([7, 2, 1], [7, 2, 1]),
        ([0.333, 0.667], [333, 667]),
        ([1, 1, 1], [1, 1, 1]),
        ([0.123456789, 0.876543211], [8091, 57445]),
        ([1e-9, 1.0], [1, 65535]),
    ],
)
def test_mixture_weights_become_sample_counts(weights: list[float], counts: list[int]) -> None:
    assert block_counts(weights) == counts


def test_an_evaluation_takes_every_source_in_proportion_from_its_start() -> None:
    mixed = Mixed(web=(100, 3.0), code=(4, 1.0))
    taken = evaluation_samples(mixed, 40)
    assert taken["web"].tolist() == list(range(30))
    assert taken["code"].tolist() == [100 + i % 4 for i in range(10)], "a source that ends begins again"
    assert {name: len(each) for name, each in evaluation_samples(mixed, 10**6).items()} == {"web": 78, "code": 26}
    assert evaluation_samples(range(5), 10)[""].tolist() == [0, 1, 2, 3, 4]


def test_passes_are_counted_for_each_source() -> None:
    assert passes(Mixed(web=(100, 3.0), code=(4, 1.0)), 400) == {"web": 3.0, "code": 25.0}
    assert passes(range(50), 20) == {"": 0.4}


def test_order_of_a_mixture_never_changes_between_versions() -> None:
    order = MixtureOrder({"web": Part(1000, 0.7), "code": Part(100, 0.2), "books": Part(10, 0.1)}, 1)
    assert order(np.array([0, 1, 2, 3, 4, 5, 6, 10**12])).tolist() == [370, 337, 1072, 288, 915, 1105, 880, 127]
