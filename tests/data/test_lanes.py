"""Lanes: documents that are read while they are trained on, all of them once an epoch, from wherever a lane stands."""

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.recipes.data.readers.source import Row
from serried.recipes.data.streaming import lanes
from serried.recipes.data.streaming.lanes import Deal, StreamDataset
from serried.recipes.data.streaming.stream import open_training, prepare_stream
from serried.recipes.data.tokenizers.encode_rows import Encoded
from serried.recipes.models.layers.lm_head import IGNORE
from serried.trainer.checkpoint.manifest import read_manifest, record_of, write_manifest
from testing.runs import checkpoint, run_here, tiny_overrides
from tests.support.texts import section, write

END = 9999


@dataclass
class Rows:
    """A unit of ``documents``, each a text of numbers; every read fails ``failures`` times at row ``fails_at``."""

    name: str
    documents: Sequence[str]
    failures: list[Exception] = field(default_factory=list)
    fails_at: int = 0
    size_bytes: int = 100
    split: str | None = None

    def all_rows(self, first: int = 0) -> Iterator[Row]:
        for number in range(first, len(self.documents)):
            if number == self.fails_at and self.failures:
                raise self.failures.pop(0)
            if self.documents[number]:
                yield Row(number, self.documents[number])

    rows = all_rows


def encode(rows: Sequence[Row], unit: str) -> list[Encoded]:
    del unit
    words = [str(row.content).split() for row in rows]
    return [
        Encoded(np.array([*map(int, text), *([END] if row.ends else [])], np.uint16), None)
        for row, text in zip(rows, words, strict=True)
    ]


def stream(units: Sequence[Rows], **changes: Any) -> StreamDataset:
    settings_: dict[str, Any] = {
        "sequence_length": 8, "isolate_documents": False, "remembered": 8, "identity": "test", **changes,
    }  # fmt: skip
    deal = Deal(len(units), settings_.pop("lanes", 4), settings_.pop("seed", 1))
    return StreamDataset(units, encode, lambda row, _: "7777" not in str(row.content), deal, **settings_)


def numbered(sizes: Sequence[Sequence[int]]) -> list[Rows]:
    """Units of documents of so many tokens, each token a number of its own."""
    numbers = count()
    return [
        Rows(f"unit {i}", [" ".join(str(next(numbers)) for _ in range(size)) for size in documents])
        for i, documents in enumerate(sizes)
    ]


def tokens_of(dataset: StreamDataset, lane: int, lanes: int, samples: int, first: int = 0) -> list[int]:
    """What a lane gives, without the token that a sample shares with the next one."""
    taken = [dataset[number * lanes + lane] for number in range(first, first + samples)]
    for one, other in pairwise(taken):
        assert one.targets[-1] in (IGNORE, other.tokens[0])
        assert all(target in (IGNORE, token) for target, token in zip(one.targets[:-1], one.tokens[1:], strict=True))
    return [int(token) for sample in taken for token in sample.tokens]


some_units = st.lists(st.lists(st.integers(0, 30), min_size=6, max_size=12), min_size=1, max_size=6)


@settings(max_examples=40)
@given(sizes=some_units, lanes_=st.integers(1, 6), seed=st.integers(0, 2**63 - 1))
def test_every_epoch_has_every_document_of_the_lanes_once(sizes: list[list[int]], lanes_: int, seed: int) -> None:
    units = numbered(sizes)
    deal = Deal(len(units), lanes_, seed)
    parts = [part for lane in range(lanes_) for part in iter_parts(deal, lane, 0)]
    assert sorted(parts) == [(unit, rest) for unit in range(len(units)) for rest in range(deal.cut)]
    for lane in range(lanes_):
        own = list(iter_parts(deal, lane, 0))
        assert sorted(iter_parts(deal, lane, 1)) == sorted(own)
        rows = [row for unit, rest in own for row in units[unit].documents[rest :: deal.cut] if row]
        if not rows:
            continue
        length = sum(len(row.split()) + 1 for row in rows)
        dataset = stream(units, lanes=lanes_, seed=seed, sequence_length=1)
        epochs = tokens_of(dataset, lane, lanes_, 2 * length)
        for epoch in (epochs[:length], epochs[length:]):
            assert Counter(epoch) == Counter(int(word) for row in rows for word in [*row.split(), str(END)])


def iter_parts(deal: Deal, lane: int, epoch: int) -> Iterator[tuple[int, int]]:
    for place in count():
        if (part := deal.part(lane, epoch, place)) is None:
            return
        yield part


def test_lanes_have_equal_parts_or_nearly() -> None:
    for units in (1, 2, 3, 5, 31, 32, 33, 500, 600, 5000):
        for lanes_ in (1, 4, 32, 512):
            deal = Deal(units, lanes_, 1)
            least, most = units * deal.cut // lanes_, -(-units * deal.cut // lanes_)
            assert most <= 1.5 * least, (units, lanes_, deal.cut)
            assert units < 2 * lanes_ or deal.cut == 1
    assert Deal(32, 32, 1).cut == 1
    assert Deal(1, 32, 1).cut == 32


@settings(max_examples=40)
@given(
    sizes=st.lists(st.lists(st.integers(3, 40), min_size=8, max_size=12), min_size=1, max_size=5),
    samples=st.integers(0, 30),
    isolate=st.booleans(),
)
def test_lane_resumes_from_its_cursor(sizes: list[list[int]], samples: int, isolate: bool) -> None:
    """Whatever was read ahead: the cursors are of the samples that were asked to be done."""
    units = numbered(sizes)
    straight = stream(units, isolate_documents=isolate)
    expected = [straight[i] for i in range(60)]
    before = stream(units, isolate_documents=isolate)
    for i in range(samples + 12):
        before[i]
    state = before.state(samples)
    after = stream(units, isolate_documents=isolate)
    after.load(state, samples)
    for i in range(samples, 60):
        sample = after[i]
        assert np.array_equal(sample.tokens, expected[i].tokens)
        assert np.array_equal(sample.targets, expected[i].targets)
        assert (sample.positions is None) == (not isolate)
        assert sample.positions is None or np.array_equal(sample.positions, expected[i].positions)


@settings(max_examples=20)
@given(samples=st.integers(0, 30), ahead=st.integers(0, 20))
@example(samples=1, ahead=0)  # not every lane had a turn
def test_a_stream_goes_back_a_few_steps_in_the_same_process(samples: int, ahead: int) -> None:
    units = numbered([[20, 7, 3, 12]] * 5)
    straight, dataset = stream(units), stream(units)
    expected = [straight[i].tokens.tolist() for i in range(60)]
    for i in range(samples + ahead):
        dataset[i]
    dataset.close()
    dataset.rewind(samples)
    assert [dataset[i].tokens.tolist() for i in range(samples, 60)] == expected[samples:]


def test_documents_that_are_isolated_restart_positions_and_are_not_predicted_from_each_other() -> None:
    dataset = stream([Rows("unit", ["1 2", "3 4 5", "6"])], lanes=1, sequence_length=9, isolate_documents=True)
    sample = dataset[0]
    assert sample.tokens.tolist() == [1, 2, END, 3, 4, 5, END, 6, END]
    assert sample.targets.tolist() == [2, END, IGNORE, 4, 5, END, IGNORE, END, IGNORE]
    assert sample.positions is not None
    assert sample.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1]


def test_validation_samples_are_not_trained_on() -> None:
    dataset = stream([Rows("unit", ["1 2", "7777 3", "4 5"])], lanes=1, sequence_length=1)
    assert tokens_of(dataset, 0, 1, 12) == [1, 2, END, 4, 5, END] * 2


def test_threads_that_ask_early_wait_for_their_sample() -> None:
    units = numbered([[20] * 5] * 4)
    expected = [stream(units)[lane].tokens.tolist() for lane in range(4)]
    dataset, taken = stream(units), {}

    def take(index: int) -> None:
        taken[index] = dataset[index].tokens.tolist()

    threads = [threading.Thread(target=take, args=(index,)) for index in (12, 8, 4, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    straight = stream(units)
    assert [taken[i] for i in (0, 4, 8, 12)] == [straight[i].tokens.tolist() for i in (0, 4, 8, 12)]
    assert taken[0] == expected[0]
    with pytest.raises(RuntimeError, match="sample 1 of a lane is requested, but sample 4 is next"):
        dataset[4]


def test_failed_network_reads_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_FIRST_PAUSE_SECONDS", 0.001)
    documents = ["1 2", "3 4", "5 6"]
    wrapped = UserError("part.parquet cannot be read")
    wrapped.__cause__ = ConnectionResetError("reset")
    failing = Rows("unit", documents, [TimeoutError("slow"), wrapped, ConnectionError("gone")], fails_at=1)
    expected = tokens_of(stream([Rows("unit", documents)], lanes=1, sequence_length=2), 0, 1, 9)
    assert tokens_of(stream([failing], lanes=1, sequence_length=2), 0, 1, 9) == expected
    for_ever = Rows("unit 7", documents, [ConnectionError("gone")] * 100, fails_at=2)
    with pytest.raises(
        UserError, match=r"unit 7 cannot be read from row 3 on, after 8 attempts: ConnectionError: gone"
    ):
        tokens_of(stream([for_ever], lanes=1, sequence_length=2), 0, 1, 9)


def test_permanent_errors_of_a_source_are_raised_at_once() -> None:
    for failure in (UserError("unit row 1 is not text"), FileNotFoundError("unit")):
        dataset = stream([Rows("unit", ["1 2", "3 4"], [failure] * 9, fails_at=1)], lanes=1, sequence_length=1)
        with pytest.raises(type(failure), match="unit"):
            tokens_of(dataset, 0, 1, 9)
        with pytest.raises(type(failure)):  # so do threads that come later, instead of waiting for ever
            dataset[2]


def test_ended_run_does_not_wait_for_network_retries() -> None:
    dataset = stream([Rows("unit", ["1 2"], [ConnectionError("gone")] * 9)], lanes=1)
    dataset.close()
    with pytest.raises(UserError, match="after 1 attempt:"):
        dataset[0]


def test_too_little_data_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        UserError, match=r"trainer.global_batch=4 .* sequence . has no document .*use data.streaming=false"
    ):
        for lane in range(4):
            stream([Rows("unit", ["1 2", "3 4"])])[lane]


def test_another_number_of_lanes_starts_from_scratch_and_reports_it() -> None:
    units = numbered([[20] * 5] * 4)
    dataset = stream(units, lanes=2)
    dataset.load(stream(units, lanes=4).state(0), 40)
    assert "started again" in dataset.describe()
    assert np.array_equal(dataset[40].tokens, stream(units, lanes=2)[0].tokens)


def test_the_fingerprint_is_of_what_shapes_the_samples() -> None:
    units = numbered([[20] * 5] * 4)
    first = stream(units).fingerprint
    moved = [Rows(f"elsewhere/{unit.name}", unit.documents) for unit in units]
    assert stream(moved).fingerprint == first
    for change in ({"lanes": 2}, {"seed": 2}, {"sequence_length": 9}, {"isolate_documents": True}, {"identity": "x"}):
        assert stream(units, **change).fingerprint != first
    assert stream(units[:3]).fingerprint != first


def test_none_of_a_validation_split_is_trained_on_however_much_of_it_is_evaluated(tmp_path: Path) -> None:
    texts = [f"<{number:04d}>" * 8 for number in range(60)]
    for name, chosen in (("train", texts), ("validation", texts[40:])):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in chosen)
        write(tmp_path / "set", {f"{name}.jsonl": rows})
    data = section(
        tmp_path / "set", tmp_path / "cache", name="hf", streaming=True, validation_split="validation",
        sequence_length=48,
    )  # fmt: skip
    some, more = (prepare_stream(data, sequences) for sequences in (2, 9))
    assert some.splits["validation"].documents < more.splits["validation"].documents < 20
    training = open_training(data, some, lanes=1, seed=1, workers=0)
    assert training.fingerprint == open_training(data, more, lanes=1, seed=1, workers=0).fingerprint
    seen = bytes(token for i in range(80) for token in training[i].tokens.tolist() if token < 256).decode()
    assert all((text in seen) == (number < 40) for number, text in enumerate(texts))


def test_run_from_before_pieces_were_joined_resumes_with_a_warning(text: Path, tmp_path: Path) -> None:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(["a b"], trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet))
    config = json.dumps({"eos_token": "</s>"})
    write(tmp_path / "tokenizer", {"tokenizer.json": library.to_str(), "tokenizer_config.json": config})
    rows = "".join(json.dumps({"text": f"{number} " * 200}) + "\n" for number in range(60))
    write(tmp_path / "set", {"train.jsonl": rows})
    argv = tiny_overrides(
        text, tmp_path / "run", "data=hf", f"data.path={tmp_path / 'set'}", "data.streaming=true",
        f"data.tokenizer={tmp_path / 'tokenizer'}", "data.validation_fraction=0.2",
    )  # fmt: skip
    assert run_here([*argv, "trainer.stop_at=2"]).code == 75
    data = section(
        tmp_path / "set", compose(argv).data.cache_dir, name="hf", streaming=True, validation_fraction=0.2,
        tokenizer=str(tmp_path / "tokenizer"), sequence_length=compose(argv).data.sequence_length,
    )  # fmt: skip
    folder = checkpoint(tmp_path / "run")
    state = json.loads((folder / "state.json").read_text())
    opened = open_training(data, prepare_stream(data, 1), lanes=4, seed=compose(argv).trainer.seed, workers=0)
    assert state["data_fingerprint"] == opened.fingerprint
    (state["data_fingerprint"],) = opened.earlier_fingerprints
    (folder / "state.json").write_text(json.dumps(state))
    write_manifest(folder, {name: record_of(folder / name) for name in read_manifest(folder)})
    ended = run_here([*argv, "trainer.stop_at=4"])
    assert ended.code == 75, ended.printed
    assert (
        f"WARNING    data changed since {folder}: documents above 1 MiB were tokenized in pieces of 1 MiB"
        in ended.printed
    )
    ended = run_here(argv)
    assert ended.code == 0, ended.printed
    assert "data changed since" not in ended.printed
