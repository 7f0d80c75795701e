"""Whole documents in sequences: nothing lost, nothing twice, nothing too long."""

import itertools
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serried.configs.errors import UserError
from serried.recipes.data.samples.packing import best_fit
from serried.recipes.data.samples.token_dataset import PackedDataset, Sample, TokenDataset, collate
from serried.recipes.models.layers.lm_head import IGNORE
from tests.support.texts import write_documents

DOCUMENTS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
"""Lengths in tokens."""


def numbered(lengths: Sequence[int]) -> list[list[int]]:
    """Documents in which no two tokens are the same."""
    bounds = np.cumsum([0, *lengths])
    return [list(range(start, stop)) for start, stop in itertools.pairwise(bounds)]


def learned(sample: Sample) -> list[tuple[int, int]]:
    """Pairs of an input and its target."""
    return [(int(a), int(b)) for a, b in zip(sample.tokens, sample.targets, strict=True) if b != IGNORE]


@given(lengths=st.lists(st.integers(1, 20), max_size=200), capacity=st.integers(20, 50))
def test_best_fit_packing_equals_the_textbook_algorithm(lengths: list[int], capacity: int) -> None:
    packing = best_fit(np.array(lengths, np.int64), capacity)
    assert sorted(packing.order.tolist()) == list(range(len(lengths)))
    sequences = [packing.order[a:b].tolist() for a, b in zip(packing.bounds[:-1], packing.bounds[1:], strict=True)]
    assert all(sum(lengths[piece] for piece in sequence) <= capacity for sequence in sequences)
    assert all(sequence == sorted(sequence) for sequence in sequences)
    assert sequences == sorted(sequences), "in the order of their first documents"
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda number: rooms[number])] -= length
        else:
            rooms.append(capacity - length)
    filled = sorted(capacity - sum(lengths[piece] for piece in sequence) for sequence in sequences)
    assert filled == sorted(rooms)


@given(lengths=DOCUMENTS, sequence=st.integers(1, 24), shards=st.integers(1, 3), isolate=st.booleans())
def test_every_token_but_a_documents_first_is_a_target_once(
    lengths: list[int], sequence: int, shards: int, isolate: bool
) -> None:
    documents = numbered(lengths)
    pairs = [pair for document in documents for pair in itertools.pairwise(document)]
    with tempfile.TemporaryDirectory() as folder:
        data = write_documents(Path(folder), documents, shards=shards)
        if not pairs:
            with pytest.raises(UserError, match="no document with at least two tokens"):
                PackedDataset(data, "train", sequence, isolate_documents=isolate)  # type: ignore[arg-type]
            return
        dataset = PackedDataset(data, "train", sequence, isolate_documents=isolate)  # type: ignore[arg-type]
        samples = [dataset[i] for i in range(len(dataset))]
    assert all(sample.tokens.shape == sample.targets.shape == (sequence,) for sample in samples)
    assert sorted(pair for sample in samples for pair in learned(sample)) == pairs
    # What fits into a sequence lies in one.
    whole = [set(itertools.pairwise(d)) for d in documents if 1 < len(d) <= sequence + 1]
    assert all(any(document <= set(learned(sample)) for sample in samples) for document in whole)


@given(lengths=DOCUMENTS, sequence=st.integers(1, 24), shards=st.integers(1, 3), best=st.booleans())
def test_positions_restart_with_each_document(lengths: list[int], sequence: int, shards: int, best: bool) -> None:
    """A document that a window cuts goes on counted from its start in the window; so do the pieces of a long one."""
    documents = numbered(lengths)
    document_of = {token: number for number, document in enumerate(documents) for token in document}
    assume(max(lengths) > 1 if best else sum(lengths) > sequence)
    with tempfile.TemporaryDirectory() as folder:
        data: Any = write_documents(Path(folder), documents, shards=shards)
        dataset = (PackedDataset if best else TokenDataset)(data, "train", sequence, isolate_documents=True)
        for i in range(len(dataset)):
            sample = dataset[i]
            assert sample.positions is not None
            runs = np.split(np.arange(sequence), np.flatnonzero(sample.positions == 0)[1:])
            for run in runs:
                assert sample.positions[run].tolist() == list(range(len(run)))
                if (sample.targets[run] != IGNORE).any():
                    assert len({document_of[token] for token in sample.tokens[run].tolist()}) == 1
            for a, b in learned(sample):
                assert document_of[a] == document_of[b], "no document is predicted from another"


@given(lengths=DOCUMENTS, sequence=st.integers(1, 24), isolate=st.booleans(), data=st.data())
def test_windows_train_on_supervised_tokens_only(
    lengths: list[int], sequence: int, isolate: bool, data: st.DataObject
) -> None:
    documents = numbered(lengths)
    flags = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in lengths]
    is_learned = dict(zip((t for d in documents for t in d), (f for fs in flags for f in fs), strict=True))
    begins = {document[0] for document in documents}
    assume(sum(lengths) > sequence)
    with tempfile.TemporaryDirectory() as folder:
        shards: Any = write_documents(Path(folder), documents, supervised=flags, shards=2)
        dataset = TokenDataset(shards, "train", sequence, isolate_documents=isolate)
        pairs = [pair for i in range(len(dataset)) for pair in learned(dataset[i])]
    used = range(1, len(dataset) * sequence + 1)
    assert pairs == [(t - 1, t) for t in used if is_learned[t] and not (isolate and t in begins)]


def test_isolation_changes_no_input_of_a_window(tmp_path: Path) -> None:
    data: Any = write_documents(tmp_path, numbered([5, 9, 3, 30]))
    plain = TokenDataset(data, "train", 8)
    isolated = TokenDataset(data, "train", 8, isolate_documents=True)
    assert plain[0].positions is None
    assert len(plain) == len(isolated) == 5
    assert all(plain[i].tokens.tolist() == isolated[i].tokens.tolist() for i in range(5))
    assert isolated[0].tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert isolated[0].targets.tolist() == [1, 2, 3, 4, IGNORE, 6, 7, 8]
    assert isolated[0].positions is not None
    assert isolated[0].positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_padding_of_a_sequence_is_isolated(tmp_path: Path) -> None:
    data: Any = write_documents(tmp_path, [[7, 8, 9], [1, 2, 3, 4]])
    sample = PackedDataset(data, "train", 9, isolate_documents=True)[0]
    assert sample.tokens.tolist() == [7, 8, 9, 1, 2, 3, 4, 0, 0]
    assert sample.targets.tolist() == [8, 9, IGNORE, 2, 3, 4, IGNORE, IGNORE, IGNORE]
    assert sample.positions is not None
    assert sample.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1]


def test_conversations_are_cut_off_and_counted(tmp_path: Path) -> None:
    flags = [[0, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1], [0, 1]]
    data: Any = write_documents(tmp_path, numbered([3, 8, 2]), supervised=flags)
    dataset = PackedDataset(data, "train", 5, isolate_documents=True)
    pairs = sorted(pair for i in range(len(dataset)) for pair in learned(dataset[i]))
    assert pairs == [(0, 1), (1, 2), (4, 5), (5, 6), (6, 7), (7, 8), (11, 12)]
    assert dataset.describe() == (
        "2 sequences of whole documents, 100.0 % filled, isolated; 1 conversation truncated to 5 tokens"
    )


def test_conversation_truncated_before_its_replies_is_refused(tmp_path: Path) -> None:
    text = list(b"user: a long question, much too long")
    flags = [[0, 1, 1], [0] * len(text) + [1] * 4, [1, 1]]
    data: Any = write_documents(tmp_path, [[1, 2, 3], [*text, 5, 6, 7, 8], [9, 9]], supervised=flags)
    with pytest.raises(
        UserError, match=r"^chats\.parquet row 2 has 40 tokens and nothing to train on in the first 20: "
    ) as caught:
        PackedDataset(data, "train", 20, isolate_documents=True)
    fix = re.search(r"use data\.sequence_length=(\d+), ", str(caught.value))
    assert fix
    assert int(fix[1]) == len(text) + 3
    assert len(PackedDataset(data, "train", int(fix[1]), isolate_documents=True)) == 2
    without = PackedDataset(data, "train", 20, isolate_documents=True, skips=True)
    assert [sample.tokens[:3].tolist() for sample in map(without.__getitem__, range(len(without)))] == [[1, 2, 3]]
    assert without.describe().endswith(
        "1 conversation truncated to 20 tokens, 1 of them left out as nothing to train on remains"
    )
    assert (
        "truncates 1 conversation of data and removes 89 % of all tokens; to keep all 40 tokens of the longest: "
        in without.truncation()
    )


def test_packings_have_fingerprints_of_their_own_and_threads_read_them_alike(tmp_path: Path) -> None:
    data: Any = write_documents(tmp_path, numbered([3, 17, 8, 2, 9, 9, 30, 4] * 5))
    made = [
        kind(data, "train", 16, isolate_documents=isolate)
        for kind in (TokenDataset, PackedDataset)
        for isolate in (False, True)
    ]
    assert len({dataset.fingerprint for dataset in made}) == 4
    again = PackedDataset(data, "train", 16, isolate_documents=True)
    assert again.fingerprint == made[3].fingerprint
    expected = [made[3][i].tokens.tolist() for i in range(len(again))]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda i: again[i].tokens.tolist(), range(len(again)))) == expected


def test_a_batch_has_positions_where_documents_are_isolated(tmp_path: Path) -> None:
    data: Any = write_documents(tmp_path, numbered([9] * 9))
    ids = np.array([0, -1])
    plain, isolated = (TokenDataset(data, "train", 12, isolate_documents=isolate) for isolate in (False, True))
    assert collate([plain[0], plain[0]], ids).positions is None
    positions = collate([isolated[0], isolated[1]], ids).positions
    assert positions is not None
    assert positions.tolist() == [isolated[0].positions.tolist(), isolated[1].positions.tolist()]  # type: ignore[union-attr]
