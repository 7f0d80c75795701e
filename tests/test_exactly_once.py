"""The promise: whatever stops and resumes on whatever ranks, each sample is trained on where one process would."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.data.dataset import Sample, collate
from recipes.data.lanes import StreamDataset
from recipes.data.mixture import MixtureDataset
from tests.test_lanes import encode, numbered
from trainer.loader import BatchLoader
from trainer.sampler import Stream, sample_order

GLOBAL_BATCH, SEQUENCE = 12, 8
KINDS = ("memory-mapped", "mixture", "stream")


class Numbers:
    """Sample i begins with i: stands for tokens on disk, which any rank may read anywhere."""

    fingerprint = "numbers"

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        window = np.arange(index, index + SEQUENCE + 1)
        return Sample(window[:-1], window[1:])

    def describe(self) -> str:
        return ""


def open_dataset(kind: str, workers: int) -> Any:
    """About 40 samples an epoch, of each kind as a rank opens it."""
    if kind == "memory-mapped":
        return Numbers(40)
    if kind == "mixture":
        return MixtureDataset({"web": Numbers(30), "code": Numbers(7)}, {"web": 0.7, "code": 0.3}, "samples")
    random = np.random.default_rng(5)
    units = numbered([random.integers(1, 3, 20).tolist() for _ in range(7)])
    return StreamDataset(
        units, encode, lambda row: row.number != 3, lanes=GLOBAL_BATCH, sequence_length=SEQUENCE, seed=3,
        isolate_documents=False, remembered=workers + 3, identity="",
    )  # fmt: skip


class Leg(NamedTuple):
    """A start of the run, up to where it stops."""

    ranks: int
    micro_batch: int
    workers: int
    steps: int


CUTS = [
    (ranks, micro_batch) for ranks in (1, 2, 3, 4) for micro_batch in (1, 2, 3, 6) if 12 % (ranks * micro_batch) == 0
]
legs = st.tuples(st.sampled_from(CUTS), st.sampled_from([0, 2]), st.integers(1, 9)).map(
    lambda leg: Leg(*leg[0], *leg[1:])
)


def trained_on(kind: str, plan: Sequence[Leg], total_steps: int) -> Iterator[tuple[int, list[int]]]:
    """Number and tokens of each sample, in the order in which one process would come to them."""
    state: dict[str, Any] | None = None
    done = 0
    for leg in plan:
        steps = min(leg.steps, total_steps - done)
        accumulation = GLOBAL_BATCH // (leg.ranks * leg.micro_batch)
        datasets = [open_dataset(kind, leg.workers) for _ in range(leg.ranks)]
        for dataset in datasets:
            if isinstance(dataset, Stream) and state is not None:
                dataset.load(state, done * GLOBAL_BATCH)
        # Each would read on to the last step: whoever stops has read ahead.
        loaders = [
            BatchLoader(
                dataset, collate, sample_order(dataset, 1), steps=range(done, total_steps), accumulation=accumulation,
                data_ranks=leg.ranks, data_rank=rank, micro_batch=leg.micro_batch, workers=leg.workers,
                pin_memory=False, first_index=done * GLOBAL_BATCH,
            )
            for rank, dataset in enumerate(datasets)
        ]  # fmt: skip
        for _ in range(steps):
            of_ranks = [next(loader) for loader in loaders]
            for micro_batches in zip(*of_ranks, strict=True):
                for batch in micro_batches:
                    yield from zip(batch.sample_ids.tolist(), batch.tokens.tolist(), strict=True)
        done += steps
        states = [d.state(done * GLOBAL_BATCH) for d in datasets if isinstance(d, Stream)]
        state = {lane: cursor for part in states for lane, cursor in part.items()}
        for loader in loaders:
            loader.close()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(plan=st.lists(legs, min_size=1, max_size=4))
def test_stops_layouts_and_workers_change_no_sample(kind: str, plan: list[Leg]) -> None:
    steps = 9  # 108 samples: more than 2.5 epochs
    straight = list(trained_on(kind, [Leg(1, 12, 0, steps)], steps))
    pieces = list(trained_on(kind, [*plan, Leg(1, 12, 0, steps)], steps))
    assert pieces == straight


def test_an_epoch_of_a_stream_has_each_token_once() -> None:
    """The lanes together, each for as long as its own documents last."""
    ids, tokens = zip(*trained_on("stream", [Leg(3, 1, 2, 4), Leg(4, 3, 2, 5)], 9), strict=True)
    assert list(ids) == list(range(9 * GLOBAL_BATCH))
    units = open_dataset("stream", 0)._units
    expected = {
        int(word) for unit in units for row, text in enumerate(unit.documents) if row != 3 for word in text.split()
    }
    seen = torch.tensor(tokens).flatten().tolist()
    assert expected <= set(seen), "each token of training, and ..."
    assert set(seen) - expected == {9999}, "... none of validation, beside the end mark"
    assert len(seen) > 2.5 * (len(expected) + sum(len(unit.documents) - 1 for unit in units))
