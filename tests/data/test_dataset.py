"""From tokens to samples: the windows of the stream, by number."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from serried.configs.errors import UserError
from serried.recipes.data.prepared.prepare import Prepared, open_prepared, prepare
from serried.recipes.data.samples.token_dataset import TokenDataset, collate
from serried.recipes.models.layers.lm_head import IGNORE
from tests.support.texts import everything, many_files, section, write


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("prepared")
    return prepare(section(many_files(folder / "text"), folder / "cache", validation_fraction=0.2))


@pytest.mark.parametrize("name", ["train", "validation"])
@pytest.mark.parametrize("length", [1, 7, 64, 500])
def test_samples_are_the_windows_of_the_stream(prepared: Prepared, name: str, length: int) -> None:
    stream, dataset = everything(prepared, name), TokenDataset(prepared, name, length)
    assert len(dataset) == (len(stream) - 1) // length
    for i in {0, len(dataset) // 2, len(dataset) - 1}:
        sample = dataset[i]
        assert np.array_equal(sample.tokens, stream[i * length : i * length + length])
        assert np.array_equal(sample.targets, stream[i * length + 1 : i * length + length + 1])
        assert sample.tokens.dtype == sample.targets.dtype == np.int64
    for i in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[i]


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("length", [1, 7, 500, 10**6])
def test_every_token_but_the_first_is_a_target_once(prepared: Prepared, length: int, isolate: bool) -> None:
    stream = everything(prepared.whole(), "validation")
    dataset = TokenDataset(prepared.whole(), "validation", length, isolate_documents=isolate, to_end=True)
    samples = [dataset[i] for i in range(len(dataset))]
    assert all(len(sample.tokens) == len(sample.targets) == length for sample in samples)
    targets = np.concatenate([sample.targets for sample in samples])
    begins = prepared.whole().stream("validation").document_starts(1, len(stream)) if isolate else np.array([], int)
    expected = stream[1:].astype(np.int64)
    expected[begins - 1] = IGNORE  # predicted from another document
    assert np.array_equal(targets[: len(expected)], expected)
    assert (targets[len(expected) :] == IGNORE).all()
    assert np.array_equal(np.concatenate([sample.tokens for sample in samples])[: len(expected)], stream[:-1])


def test_no_validation_window_is_in_the_training_text(prepared: Prepared) -> None:
    training = everything(prepared, "train").astype("<u2").tobytes()
    dataset = TokenDataset(prepared, "validation", 64)
    assert not any(dataset[i].tokens.astype("<u2").tobytes() in training for i in range(len(dataset)))


def test_different_samples_have_different_fingerprints(prepared: Prepared) -> None:
    asked = [("train", 16), ("train", 17), ("validation", 16)]
    prints = [TokenDataset(prepared, name, length).fingerprint for name, length in asked]
    assert len(set(prints)) == 3
    assert TokenDataset(open_prepared(prepared.folder), "train", 16).fingerprint == prints[0]


def test_reading_from_many_threads_gives_the_same(prepared: Prepared) -> None:
    dataset = TokenDataset(prepared, "train", 8)
    expected = [dataset[i].tokens.tolist() for i in range(len(dataset))]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(4):
            assert list(threads.map(lambda i: dataset[i].tokens.tolist(), range(len(dataset)))) == expected


def test_collate_stacks_and_padding_has_no_targets(prepared: Prepared) -> None:
    dataset = TokenDataset(prepared, "train", 8)
    samples = [dataset[3], dataset[0], dataset[0]]
    batch = collate(samples, np.array([3, 0, -1]))
    assert batch.tokens.shape == batch.targets.shape == (3, 8)
    assert batch.sample_ids.tolist() == [3, 0, -1]
    assert batch.targets[0].tolist() == dataset[3].targets.tolist()
    assert batch.targets[1].tolist() == dataset[0].targets.tolist()
    assert batch.targets[2].tolist() == [IGNORE] * 8


@pytest.mark.parametrize("name", ["train", "validation"])
def test_text_shorter_than_a_sequence_is_refused_with_a_length_that_fits(tmp_path: Path, name: str) -> None:
    data = prepare(section(write(tmp_path, {"a.txt": "word " * 200}), tmp_path / "cache", validation_fraction=0.1))
    has = data.splits[name].tokens
    with pytest.raises(
        UserError, match=rf"sequence_length=5000 needs 5001 tokens, but the \w+ text has {has} "
    ) as caught:
        TokenDataset(data, name, 5000)
    fix = re.search(r"add text to data\.path, or use data\.sequence_length=(\d+)$", str(caught.value))
    assert fix
    for each in ("train", "validation"):
        assert len(TokenDataset(data, each, int(fix[1]))) >= 1
    with pytest.raises(UserError):
        TokenDataset(data, "validation", int(fix[1]) + 1)


@pytest.mark.parametrize(
    ("text", "has", "enough_for"),
    [
        ("x", "0 (0 bytes of 0 files)", "no length at all"),
        ("four", "2 (1 byte of 1 file)", "only data.sequence_length=1, too short for training"),
        ("ten bytes.", "2 (1 byte of 1 file)", "only data.sequence_length=1, too short for training"),
    ],
)
def test_text_too_short_for_any_useful_sequence_is_refused(
    tmp_path: Path, text: str, has: str, enough_for: str
) -> None:
    data = prepare(section(write(tmp_path, {"a.txt": text}), tmp_path / "cache"))
    with pytest.raises(UserError) as caught:
        TokenDataset(data, "validation", 16)
    assert str(caught.value) == (
        f"data.sequence_length=16 needs 17 tokens, but the validation text has {has}; "
        f"add text to data.path (this text allows {enough_for})"
    )
