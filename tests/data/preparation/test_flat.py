"""Tokens made before: our own folders, and the files of other tools, used where they lie."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serried.configs.errors import UserError
from serried.configs.schema.data import DataSection
from serried.recipes.data.prepared.prepare import Prepared, open_prepared, prepare
from tests.support.texts import everything, many_files, section

END = 256
DOCUMENTS = [np.frombuffer(f"document {i} ".encode() * (i % 9 + 1), np.uint8) for i in range(100)]
STREAM = np.concatenate([np.append(document, END) for document in DOCUMENTS])


def of_tokens(path: Path | str, cache: Path, **changes: Any) -> DataSection:
    return section(path, cache, **{"name": "tokens", "tokenizer": "bytes", **changes})


def llm_c(path: Path, tokens: np.ndarray, magic: int = 20240520, dtype: str = "uint16") -> Path:
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())
    return path


def raw(path: Path, tokens: np.ndarray, dtype: str = "uint16") -> Path:
    tokens.astype(dtype).tofile(path)
    return path


def npy(path: Path, tokens: np.ndarray, dtype: str = "uint16") -> Path:
    np.save(path, tokens.astype(dtype))
    return path


@pytest.mark.parametrize(
    ("make", "name", "changes"),
    [
        (raw, "a.bin", {}),
        (lambda path, tokens: raw(path, tokens, "uint32"), "a.bin", {"token_dtype": "uint32"}),
        (npy, "a.npy", {}),
        (lambda path, tokens: npy(path, tokens, "int64"), "a.npy", {}),
        (llm_c, "a.bin", {}),
        (lambda path, tokens: llm_c(path, tokens, 20240801, "uint32"), "a.bin", {}),
        (raw, "odd.tok", {}),  # named by itself
    ],
)
def test_files_of_other_tools_are_read(tmp_path: Path, make: Any, name: str, changes: dict[str, Any]) -> None:
    make(tmp_path / name, STREAM)
    prepared = prepare(of_tokens(tmp_path / name, tmp_path / "cache", validation_fraction=0.1, **changes))
    train, validation = everything(prepared, "train"), everything(prepared, "validation")
    assert np.array_equal(np.concatenate((train, validation)), STREAM)
    assert 0.05 < len(validation) / len(STREAM) < 0.15
    assert train[-1] == END
    starts = prepared.stream("train").all_document_starts()
    assert np.array_equal(starts[1:], np.flatnonzero(train == END)[:-1] + 1)
    assert prepared.splits["train"].documents + prepared.splits["validation"].documents == len(DOCUMENTS)
    assert "document 0 " in prepared.sample()


def test_token_files_are_mapped_where_they_are(tmp_path: Path) -> None:
    raw(tmp_path / "train.bin", np.tile(STREAM, 30))
    raw(tmp_path / "val.bin", STREAM)
    prepared = prepare(of_tokens(tmp_path, tmp_path / "cache"))
    assert isinstance(prepared.stream("train").read(5, 9).base.base, np.memmap)
    stored = sum(path.stat().st_size for path in prepared.folder.iterdir())
    assert stored < (tmp_path / "train.bin").stat().st_size / 2


def test_files_called_val_are_validation(tmp_path: Path) -> None:
    for name in ("train_000001.bin", "train_000002.bin", "fineweb_val_000000.bin"):
        llm_c(tmp_path / name, STREAM)
    prepared = prepare(of_tokens(tmp_path, tmp_path / "cache"))
    assert np.array_equal(everything(prepared, "train"), np.tile(STREAM, 2))
    assert np.array_equal(everything(prepared, "validation"), STREAM)


def test_document_is_never_in_both_splits(tmp_path: Path) -> None:
    for fraction in (0.01, 0.5, 0.99):
        raw(tmp_path / "a.bin", STREAM)
        raw(tmp_path / "b.bin", STREAM)
        prepared = prepare(of_tokens(tmp_path / "*.bin", tmp_path / "cache", validation_fraction=fraction))
        train, validation = everything(prepared, "train"), everything(prepared, "validation")
        assert np.array_equal(np.concatenate((train, validation)), np.tile(STREAM, 2))
        assert len(train) == 0 or train[-1] == END


def test_tail_of_an_endless_document_is_validation(tmp_path: Path) -> None:
    raw(tmp_path / "a.bin", np.arange(1000) % 200)
    prepared = prepare(of_tokens(tmp_path / "a.bin", tmp_path / "cache", validation_fraction=0.1))
    assert [prepared.splits[split].tokens for split in ("train", "validation")] == [900, 100]


def test_prepared_folder_is_opened_in_place(tmp_path: Path) -> None:
    made = prepare(section(many_files(tmp_path / "text"), tmp_path / "cache"))
    moved = made.folder.rename(tmp_path / "moved")

    def same(prepared: Prepared) -> bool:
        return prepared.key == made.key and prepared.splits == made.splits

    prepared = prepare(of_tokens(moved, tmp_path / "other"))
    assert prepared.folder == moved
    assert same(prepared)
    assert same(open_prepared(moved))
    with pytest.raises(UserError, match=r"different tokenizer than data\.tokenizer=chars; remove"):
        prepare(of_tokens(moved, tmp_path / "other", tokenizer="chars"))


def test_a_change_is_another_key_and_an_old_folder_is_refused(tmp_path: Path) -> None:
    raw(tmp_path / "a.bin", STREAM)
    before = prepare(of_tokens(tmp_path / "a.bin", tmp_path / "cache"))
    changed = STREAM.copy()
    changed[5] += 1
    raw(tmp_path / "a.bin", changed)
    assert prepare(of_tokens(tmp_path / "a.bin", tmp_path / "cache")).key != before.key
    os.truncate(tmp_path / "a.bin", 100)
    with pytest.raises(UserError, match="damaged"):
        open_prepared(before.folder)


@pytest.mark.parametrize(
    ("name", "content", "changes", "expected"),
    [
        ("a.bin", b"\1\0\2", {}, r"a\.bin has 3 bytes, not a multiple of the size of uint16; .*data\.token_dtype="),
        ("a.bin", b"", {}, r"a\.bin is empty"),
        ("a.bin", b"\1\0\1\1", {}, r"a\.bin: token 1 is 257, but data\.tokenizer=bytes has only 257 ids"),
        ("a.npy", b"\x93NUMPY\1\0", {}, r"a\.npy is not a complete \.npy file"),
        (
            "a.npy",
            np.zeros((2, 3), np.uint16),
            {},
            r"a\.npy has an array of dtype uint16 and shape \[2, 3\], not a list of tokens",
        ),
        ("a.npy", np.zeros(3, np.float32), {}, r"a\.npy has an array of dtype float32 and shape \[3\]"),
        ("a.npy", np.zeros(3, ">u2"), {}, r"a\.npy has an array of dtype uint16 with swapped bytes and shape \[3\]"),
        ("a.txt", b"x", {"path": ""}, r"none of the 1 files in it ends in \.bin \.npy"),
        ("train.bin", b"\1\0", {"path": "trian.bin"}, r"trian\.bin does not .*did you mean data\.path=.*/train\.bin"),
        (
            "a.bin",
            b"\1\0",
            {"tokenizer": "train"},
            r"tokenizer=train is created from text, but data=tokens has only tokens",
        ),
    ],
)
def test_files_that_hold_no_tokens_are_refused(
    tmp_path: Path, name: str, content: Any, changes: Any, expected: str
) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir()
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        np.save(folder / name, content)
    changes = dict(changes)
    path = folder / changes.pop("path", name)
    with pytest.raises(UserError) as caught:
        prepare(of_tokens(path, tmp_path / "cache", **changes))
    assert re.search(expected, str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


def test_file_shorter_than_its_header_is_refused(tmp_path: Path) -> None:
    path = llm_c(tmp_path / "a.bin", STREAM)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(UserError, match=rf"truncated or damaged: its header says {len(STREAM):,} tokens"):
        prepare(of_tokens(path, tmp_path / "cache"))
