"""The promise: whatever stops and resumes on whatever ranks, each sample is trained on where one process would."""

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serried.configs.compose import compose, config_yaml
from serried.parallel.plan import LossTerms
from serried.recipes.data.samples.mixture_dataset import MixtureDataset
from serried.recipes.data.samples.token_dataset import Batch, Sample, collate
from serried.recipes.data.streaming.lanes import Deal, StreamDataset
from serried.runtime.session import open_session
from serried.trainer.data.loader import BatchLoader, Reader
from serried.trainer.data.sampler import BatchShare, Stream, sample_order
from serried.trainer.run import train
from testing.rank_pool import Cluster
from testing.runs import ObservedRecipe, metrics, tiny_overrides
from tests.data.test_lanes import encode, numbered

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
        units, encode, lambda row, _: row.number != 3, Deal(len(units), GLOBAL_BATCH, 3), sequence_length=SEQUENCE,
        isolate_documents=False, remembered=workers + 3, identity="",
    )  # fmt: skip


class Leg(NamedTuple):
    """A start of the run, up to where it stops."""

    ranks: int
    micro_batch: int
    workers: int
    steps: int


CUTS = [(ranks, micro_batch) for ranks in (1, 2, 3, 4, 5) for micro_batch in (1, 2, 3, 6) if ranks * micro_batch <= 12]
legs = st.tuples(st.sampled_from(CUTS), st.sampled_from([0, 2]), st.integers(1, 9)).map(
    lambda leg: Leg(*leg[0], *leg[1:])
)


def trained_on(kind: str, plan: Sequence[Leg], total_steps: int) -> Iterator[tuple[int, list[int]]]:
    """Number and tokens of each sample, in the order in which one process would come to them."""
    state: dict[str, Any] | None = None
    done = 0
    for leg in plan:
        steps = min(leg.steps, total_steps - done)
        datasets = [open_dataset(kind, leg.workers) for _ in range(leg.ranks)]
        for dataset in datasets:
            if isinstance(dataset, Stream) and state is not None:
                dataset.load(state, done * GLOBAL_BATCH)
        # Each would read on to the last step: whoever stops has read ahead.
        loaders = [
            BatchLoader(
                Reader(dataset, collate), sample_order(dataset, 1),
                BatchShare(leg.micro_batch, leg.ranks, rank, GLOBAL_BATCH), steps=range(done, total_steps),
                workers=leg.workers, pin_memory=False, first_index=done * GLOBAL_BATCH,
            )
            for rank, dataset in enumerate(datasets)
        ]  # fmt: skip
        for _ in range(steps):
            of_ranks = [next(loader) for loader in loaders]
            for micro_batches in zip_longest(*of_ranks, fillvalue=None):
                for batch in filter(None, micro_batches):
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
    units = open_dataset("stream", 0)._documents.units
    expected = {
        int(word) for unit in units for row, text in enumerate(unit.documents) if row != 3 for word in text.split()
    }
    seen = torch.tensor(tokens).flatten().tolist()
    assert expected <= set(seen), "each token of training, and ..."
    assert set(seen) - expected == {9999}, "... none of validation, beside the end mark"
    assert len(seen) > 2.5 * (len(expected) + sum(len(unit.documents) - 1 for unit in units))


# whole runs -----------------------------------------------------------------------------------------------------------


class Witness(ObservedRecipe):
    """Writes down the samples it trains on, number and tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, ragged=False, fault=None)
        self.trained_on: list[list[tuple[int, list[int]]]] = []

    def loss(self, model: torch.nn.Module, batch: Batch) -> LossTerms:
        if torch.is_grad_enabled() and batch.sample_ids.max() >= 0:
            self.trained_on.append(list(zip(batch.sample_ids.tolist(), batch.tokens.tolist(), strict=True)))
        return super().loss(model, batch)


def train_witnessed(argv: list[str]) -> list[list[tuple[int, list[int]]]]:
    """Train as ``argv`` says on this rank. Returns the samples of each micro-batch."""
    config = compose(argv)
    recipe = Witness(config)
    with open_session(config.launch) as session:
        train(config, recipe, session, config_yaml(config))
    return recipe.trained_on


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Each kind of data, so little that 96 sequences of 32 tokens are more than 2.5 epochs of each part of it."""
    folder = tmp_path_factory.mktemp("sources")
    random = np.random.default_rng(1)
    for name, files, words in (("web", 6, 30), ("code", 3, 30)):
        (folder / name).mkdir()
        for number in range(files):
            (folder / name / f"{number}.txt").write_text(" ".join(map(str, random.integers(100, 1000, words))))
    (folder / "rows").mkdir()
    for number in range(5):
        rows = [{"text": " ".join(map(str, random.integers(100, 1000, random.integers(1, 9))))} for _ in range(36)]
        (folder / "rows" / f"{number}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    mixture = ["data=mixture", "data.path=null", "data.sources.web.weight=0.75", "data.sources.code.weight=0.25"]
    mixture += ["data.validation_fraction=0.2"]
    for name in ("web", "code"):
        mixture += [f"data.sources.{name}.name=text", f"data.sources.{name}.path={folder / name}"]
    return {
        "memory-mapped": [f"data.path={folder / 'web'}"],
        "mixture": mixture,
        "stream": ["data=hf", f"data.path={folder / 'rows'}", "data.streaming=true", "data.validation_fraction=0.2"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_stops_and_changes_its_layout_trains_on_what_a_straight_one_does(
    kind: str, sources: dict[str, list[str]], cluster: Cluster, tmp_path: Path
) -> None:
    """Numbers and tokens, in the order of training, where each start has other ranks, threads and micro-batches."""

    def trained(run_dir: Path, ranks: int, steps: int, *how: str) -> list[tuple[int, list[int]]]:
        argv = tiny_overrides(tmp_path, run_dir, "trainer.steps=8", f"trainer.global_batch={GLOBAL_BATCH}")
        changes = dict(argument.split("=", 1) for argument in [*argv, *sources[kind], *how])
        answers = cluster.run(
            ranks,
            "tests.data.test_exactly_once:train_witnessed",
            argv=[f"{key}={value}" for key, value in changes.items()],
        )
        of_steps = [np.split(np.array(answer.value, object), steps) for answer in answers]
        in_turn = (
            batch
            for of_ranks in zip(*of_steps, strict=True)
            for batches in zip_longest(*of_ranks, fillvalue=())
            for batch in batches
        )
        return [(number, tokens) for batch in in_turn for number, tokens in batch]

    straight = trained(tmp_path / "straight", 1, 8, "trainer.micro_batch=12", "data.workers=0")
    uneven = ["trainer.micro_batch=3", "parallel.uneven=true"]  # two micro-batches on the first of three ranks
    pieces = trained(tmp_path / "pieces", 3, 3, *uneven, "data.workers=2", "trainer.stop_at=3")
    pieces += trained(
        tmp_path / "pieces", 2, 2, "trainer.micro_batch=1", "data.workers=0", "parallel=fsdp", "trainer.stop_at=5"
    )
    pieces += trained(tmp_path / "pieces", 1, 3, "trainer.micro_batch=4", "data.workers=2")
    assert pieces == straight
    assert len(straight) == 96
    assert [line["samples"] for line in metrics(tmp_path / "pieces")] == [12 * step for step in range(1, 9)]
    if kind == "memory-mapped":
        assert max(number for number, _ in straight) < 96 / 2.5, "more than 2.5 epochs"
