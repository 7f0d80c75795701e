"""Where documents come from: files of rows, compressed files, Hugging Face datasets; and what is said of bad ones."""

import bz2
import gzip
import json
import lzma
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import serried.recipes.data.readers.json_rows
import serried.recipes.data.readers.row_files
from serried.configs.errors import UserError
from serried.configs.schema.data import DataSection, data_section
from serried.recipes.data.prepared.prepare import Prepared, _dividing_fraction, prepare
from serried.recipes.data.readers.hugging_face_dataset import streamed_units
from serried.recipes.data.readers.reading_progress import Progress
from serried.recipes.data.readers.source import Place, Row, Unit, open_source
from serried.recipes.data.samples.token_dataset import open_dataset
from testing.rank_pool import ROOT
from tests.support.texts import documents, everything, many_files, section, write

TEXTS = [f"document {i}: " + "né and so on " * (i % 7) for i in range(200)]


def lines(texts: Sequence[Any] = TEXTS, column: str = "text") -> str:
    return "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts))


def table(path: Path, texts: Sequence[Any] = TEXTS, column: str = "text", rows_per_group: int = 30) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"id": list(range(len(texts))), column: texts}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_per_group)
    return path


def zstandard(content: bytes) -> bytes:
    return bytes(pyarrow.Codec("zstd").compress(content, asbytes=True))


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard
}  # fmt: skip


def all_rows(path: Path, **changes: Any) -> list[Row]:
    source = open_source(data_section(sequence_length=16, name="text", path=str(path), **changes))
    source.fingerprint(Progress(None, 1))
    return [row for unit in source.units() for row in unit.rows()]


def both(prepared: Prepared) -> list[str]:
    return [text for split in ("train", "validation") for text in documents(prepared, split)]


def refusal(path: Path | str, cache: Path, **changes: Any) -> str:
    """What preparing ``path`` is refused with: one line, and nothing is left of it."""
    with pytest.raises(UserError) as caught:
        prepare(section(path, cache, **changes))
    assert len(str(caught.value).split("\n")) == (len(caught.value.args) + 1 if caught.value.head else 1)
    assert not [folder for folder in cache.glob("*") if folder.name != "memos"]
    return str(caught.value)


# reading --------------------------------------------------------------------------------------------------------------


def test_rows_are_the_documents(tmp_path: Path) -> None:
    write(tmp_path, {"lines/a.jsonl": lines()})
    table(tmp_path / "table/a.parquet")
    for folder in ("lines", "table"):
        prepared = prepare(section(tmp_path / folder, tmp_path / "cache"))
        assert sorted(both(prepared)) == sorted(TEXTS)
        assert prepared.noun == "document"


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_files_are_read_decompressed(tmp_path: Path, suffix: str) -> None:
    compress = COMPRESSORS[suffix]
    write(tmp_path, {"rows/a.jsonl": lines(), "packed/a.jsonl" + suffix: compress(lines().encode())})
    plain, packed = all_rows(tmp_path / "rows"), all_rows(tmp_path / "packed")
    assert [row.content for row in packed] == [row.content for row in plain] == TEXTS

    text = "".join(f"line {i}\n" for i in range(2000))  # one file: its tail is validation
    write(tmp_path, {"text/a.txt": text, "small/a.txt" + suffix: compress(text.encode())})
    streams = [
        everything(prepare(section(tmp_path / folder, tmp_path / "cache")), split).tolist()
        for split in ("train", "validation")
        for folder in ("text", "small")
    ]
    assert streams[0] == streams[1]
    assert streams[2] == streams[3]


@pytest.mark.parametrize("unit_bytes", [1, 40, 333, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_every_line_is_in_one_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_bytes: int, end: str) -> None:
    monkeypatch.setattr(serried.recipes.data.readers.row_files, "_UNIT_BYTES", unit_bytes)
    texts = ["a", "é" * 30, "b\nc", "d" * 100, "e"]
    write(tmp_path, {"a.jsonl": lines(texts).replace("\n", end).removesuffix(end)})
    assert [row.content for row in all_rows(tmp_path)] == texts


@pytest.mark.parametrize("kind", ["lines", "table"])
def test_a_unit_can_be_read_from_any_row_on(tmp_path: Path, kind: str) -> None:
    if kind == "lines":
        write(tmp_path, {"a.jsonl": lines()})
    else:
        table(tmp_path / "a.parquet")
    source = open_source(data_section(sequence_length=16, name="text", path=str(tmp_path)))
    source.fingerprint(Progress(None, 1))
    for unit in source.units():
        rows = list(unit.rows())
        for first in (0, 1, len(rows) // 2, len(rows)):
            assert list(unit.rows(first)) == rows[first:]


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": lines([*TEXTS, "", None, ""])})
    prepared = prepare(section(tmp_path, tmp_path / "cache"))
    assert (len(both(prepared)), prepared.empty) == (len(TEXTS), 3)


def test_validation_shares_no_document_with_training(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": lines(TEXTS), "b.jsonl": lines(TEXTS[::-1])})
    prepared = prepare(section(tmp_path, tmp_path / "cache", validation_fraction=0.2))
    train, validation = documents(prepared, "train"), documents(prepared, "validation")
    assert not set(train) & set(validation)
    assert len(train) + len(validation) == 2 * len(TEXTS)
    assert 0.1 < len(validation) / (2 * len(TEXTS)) < 0.3


def test_document_stays_in_its_split_when_documents_are_added(tmp_path: Path) -> None:
    splits = []
    for name, texts in (("few", TEXTS[:150]), ("all", TEXTS)):
        write(tmp_path / name, {"a.jsonl": lines(texts)})
        splits.append(set(documents(prepare(section(tmp_path / name, tmp_path / "cache")), "validation")))
    assert splits[0] < splits[1]


# bad ones -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (lines() + '{"text": "cut o', r"a\.jsonl line 201 is not JSON: Unterminated string.* at column 10.*cut off"),
        (lines() + '{"text": 3}\n', r"a\.jsonl line 201: column 'text' is a number \(3\), not text"),
        (
            lines() + '["text"]\n',
            r"a\.jsonl line 201 is a list .*, not an object .* JSON array with: jq -c .* > lines\.jsonl",
        ),
        (
            '{\n "text": "a"\n}\n',
            r"a\.jsonl line 1 is not JSON: .*; each line must be one object; .*: jq -c .* > lines\.jsonl",
        ),
        (
            lines() + '{"body": "b"}\n',
            r"a\.jsonl line 201 has no column 'text'; its columns are body; .*text_column=body",
        ),
        (
            lines() + '{"messages": []}\n',
            r"line 201 has no column 'text'; its columns are messages; use data\.format=chat to train on conversations",
        ),
        (
            lines() + '{"instruction": "Two and two?", "output": "Four."}\n',
            r"are instruction, output; .* data\.format=chat to train on conversations, or data\.text_column=NAME",
        ),
        (
            lines() + '{"text": [{"role": "user", "content": "?"}]}\n',
            r"not text; to train on conversations use data\.format=chat data\.messages_column=text",
        ),
        (
            lines().encode() + b'{"text": "\xff"}\n',
            r"a\.jsonl line 201 is not UTF-8: byte 0xff at offset \d+ of the file",
        ),
        (lines() + '{"text": "\\ud800"}\n', r"a\.jsonl line 201 contains an unpaired surrogate, U\+D800"),
        (lines(["", "", None]), r"all 3 documents of .* are empty, so there is nothing to train on"),
        ("", r"has no documents, so there is nothing to train on"),
        (lines(["same"] * 9), r"all 9 documents of .* have the same text"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_bad_lines_are_refused_with_their_number(tmp_path: Path, content: bytes | str, expected: str) -> None:
    message = refusal(write(tmp_path / "rows", {"a.jsonl": content}), tmp_path / "cache")
    assert re.search(expected, message), message


def test_line_numbers_count_from_the_start_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serried.recipes.data.readers.row_files, "_UNIT_BYTES", 100)
    for bad in (0, 57, 199):
        texts: list[Any] = list(TEXTS)
        texts[bad] = 1.5
        message = refusal(write(tmp_path / str(bad), {"a.jsonl": lines(texts)}), tmp_path / "cache")
        assert f"a.jsonl line {bad + 1}: column 'text' is a number (1.5)" in message


def damaged(path: Path, start: int, stop: int) -> None:
    content = bytearray(path.read_bytes())
    content[start:stop] = bytes(stop - start)
    path.write_bytes(content)


def invalid_utf8(path: Path) -> None:
    offsets = pyarrow.py_buffer(np.array([0, 2, 4, 6], np.int32))
    texts = pyarrow.StringArray.from_buffers(3, offsets, pyarrow.py_buffer(b"abc\xffef"))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: os.truncate(path, 2000), r"a\.parquet is not a complete parquet file: .*cut off"),
        (lambda path: os.truncate(path, 0), r"a\.parquet is not a complete parquet file"),
        (lambda path: damaged(path, 1500, 1700), r"a\.parquet cannot be read from row [\d,]+ on \(row group \d\)"),
        (lambda path: table(path, column="body"), r"no column 'text'; its columns are id, body; .*text_column=id"),
        (lambda path: table(path, list(range(9))), r"a\.parquet row 1: column 'text' is a number \(0\), not text"),
        (invalid_utf8, r"a\.parquet row 2 is not UTF-8: byte 0xff at offset 1 of its text"),
    ],
)
def test_bad_tables_are_named(tmp_path: Path, damage: Callable[[Path], Any], expected: str) -> None:
    damage(table(tmp_path / "rows/a.parquet"))
    message = refusal(tmp_path / "rows", tmp_path / "cache")
    assert re.search(expected, message), message


@pytest.mark.parametrize(
    ("names", "format", "twice"),
    [
        (["text", "text", "id"], "text", "text"),
        (["messages", "messages", "id"], "chat", "messages"),
        (["instruction", "output", "instruction"], "chat", "instruction"),
        (["chosen", "rejected", "rejected", "prompt"], "preference", "rejected"),
        (["prompt", "chosen", "rejected", "prompt"], "preference", "prompt"),
    ],
)
def test_two_columns_of_a_name_are_refused_if_they_are_read(
    tmp_path: Path, names: list[str], format: str, twice: str
) -> None:
    columns = pyarrow.Table.from_arrays([pyarrow.array(["one", "two"])] * len(names), names=names)
    pyarrow.parquet.write_table(columns, tmp_path / "a.parquet")
    said = refusal(tmp_path / "a.parquet", tmp_path / "cache", format=format)
    assert f"a.parquet has 2 columns named '{twice}'; rename or remove one of them" in said


def test_two_fields_of_a_name_in_messages_are_refused(tmp_path: Path) -> None:
    words = pyarrow.array(["user", "hello"])
    message = pyarrow.StructArray.from_arrays([words, words, words], names=["role", "content", "role"])
    column = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2], pyarrow.int32()), message)
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([column], names=["messages"]), tmp_path / "a.parquet")
    said = refusal(tmp_path / "a.parquet", tmp_path / "cache", format="chat")
    assert "a.parquet row 1 or a later row: " in said


def test_two_columns_of_a_name_that_are_not_read_change_nothing(tmp_path: Path) -> None:
    values = [pyarrow.array(["one", "two"]), pyarrow.array([1, 2]), pyarrow.array([3, 4])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(values, names=["text", "id", "id"]), tmp_path / "a.parquet")
    assert [row.content for row in all_rows(tmp_path / "a.parquet")] == ["one", "two"]


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_truncated_archives_are_named(tmp_path: Path, suffix: str) -> None:
    content = COMPRESSORS[suffix](os.urandom(5000).hex().encode())
    for kind in ("txt", "jsonl"):
        name = f"a.{kind}{suffix}"
        write(tmp_path / name, {name: content[:-900]})
        assert re.search(rf"{re.escape(name)} is damaged or cut off", refusal(tmp_path / name, tmp_path / "cache"))


def test_fraction_without_validation_documents_is_refused_with_a_larger_one(tmp_path: Path) -> None:
    source = write(tmp_path / "rows", {"a.jsonl": lines(TEXTS[:4])})
    message = refusal(source, tmp_path / "cache", validation_fraction=0.001)
    assert "leaves none of the 4 documents" in message
    fix = re.search(r"data\.validation_fraction=([\d.]+)$", message)
    assert fix
    prepared = prepare(section(source, tmp_path / "cache", validation_fraction=float(fix[1])))
    assert min(split.documents for split in prepared.splits.values()) >= 1


@pytest.mark.parametrize(
    ("lowest", "highest", "is_small", "fraction"),
    [
        (0.2131, 0.9, True, 0.22), (0.2131, 0.2149, True, 0.214), (0.1, 0.8765, False, 0.87),
        (0.876, 0.8765, False, 0.8765), (0.9957, 0.9999, True, 0.996), (0.9957, 0.9999, False, 0.999),
        (0.9991, 0.9999, True, 0), (0.5, 0.5000001, True, 0),
    ],
)  # fmt: skip
def test_fraction_that_divides_few_documents_is_one_that_a_run_accepts(
    lowest: float, highest: float, is_small: bool, fraction: float
) -> None:
    assert _dividing_fraction(lowest, highest, is_small=is_small) == fraction


def test_text_beside_rows_is_refused_with_globs_that_work(tmp_path: Path) -> None:
    write(tmp_path / "mixed", {"README.md": "read me", "a.jsonl": lines()})
    message = refusal(tmp_path / "mixed", tmp_path / "cache")
    globs = re.findall(r"data\.path=\"?([^\s\"]*\*[^\s\"]*)", message)
    assert [pattern.rpartition(".")[2] for pattern in globs] == ["jsonl", "md"]
    assert len(all_rows(Path(globs[0]))) == len(TEXTS)
    assert "select one kind" in refusal(tmp_path / "mixed/*", tmp_path / "cache")


@pytest.mark.parametrize("name", ["a.json", "a.ndjson", "a.json.gz"])
def test_a_named_json_file_with_a_row_in_each_line_is_read_as_rows(tmp_path: Path, name: str) -> None:
    content: Any = "\ufeff" + lines()
    write(tmp_path, {name: gzip.compress(content.encode()) if name.endswith(".gz") else content})
    assert [row.content for row in all_rows(tmp_path / name)] == TEXTS
    write(tmp_path, {"b.json": '{"n": 1}\n{"n": 2}\n'})
    assert "has no column 'text'; its columns are n" in refusal(tmp_path / "b.json", tmp_path / "cache")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_rows_of_a_json_array_are_documents(tmp_path: Path, name: str, indent: int | None) -> None:
    rows = [{"text": text, "n": {"of": ["[]", ","]}} for text in TEXTS] * 100
    write(tmp_path, {name: json.dumps(rows, indent=indent)})
    found = all_rows(tmp_path / name)
    assert [row.content for row in found] == TEXTS * 100
    assert [row.number for row in found] == list(range(len(rows)))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"text": "a"}, {"text": "b', r"a\.json row 2 is not JSON: .*; the file may be cut off: create it again"),
        ('[{"text": "a"},\n', r"a\.json ends after row 1, before the end of its array; it may be cut off: create it"),
        ('[{"text": "a"}', r"a\.json ends after row 1, before the end of its array; it may be cut off: create it"),
        ('[{"text": "a"},]', r"a\.json row 2 is not JSON: "),
        ('[{"text": "a"} {"text": "b"}]', r"a\.json has text \(.*\) after row 1, not a comma or the end of the array"),
        (
            '[{"text": "a"}, {"text": "b"}]\n[{"text": "c"}]',
            r"second array after the first 2 rows; .*: jq -c .*jsonl",
        ),
        ('[{"text": "a"} or {"text": "b"}]', r"a\.json has text \(.*\) after row 1, not a comma or the end of the"),
        ('[{"text": "a"}] x', r"a\.json has text after its array of 1 rows; correct the file"),
        (
            '[{"text": "a"}, 5]',
            r"a\.json row 2 is a number \(5\), not an object that maps column names to values; fix or",
        ),
        ('[{"text": "a"}, {"body": "b"}]', r"a\.json row 2 has no column 'text'; its columns are body"),
    ],
)
def test_bad_rows_of_a_json_array_are_named(tmp_path: Path, content: str, said: str) -> None:
    write(tmp_path, {"a.json": content})
    assert re.search(said, refusal(tmp_path / "a.json", tmp_path / "cache"))


@pytest.mark.parametrize("piece_bytes", [1, 7, 64])
def test_rows_of_a_json_array_are_the_same_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(serried.recipes.data.readers.json_rows, "PIECE_BYTES", piece_bytes)
    write(tmp_path, {"a.jsonl": f" \n{json.dumps([{'text': text, 'n': 12} for text in TEXTS], indent=1)}\n \n"})
    assert [row.content for row in all_rows(tmp_path / "a.jsonl")] == TEXTS


def test_a_json_file_with_an_object_over_several_lines_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.json": json.dumps({"text": "one document"}, indent=2)})
    assert "jq -c" in (message := refusal(tmp_path / "a.json", tmp_path / "cache"))
    assert "data.path=lines.jsonl" in message


@pytest.mark.parametrize("content", ['{"name": "package"}', '{\n "text": 1', "[1, 2]", '["a"]', "text", '[{"a": 1}]'])
def test_a_json_file_without_rows_is_one_document_of_text(tmp_path: Path, content: str) -> None:
    write(tmp_path, {"a.json": content})
    pieces = [row.content for row in all_rows(tmp_path / "a.json", validation_fraction=1e-9)]
    assert b"".join(pieces) == content.encode()


# Hugging Face ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def hub_home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Hugging Face's libraries write to a folder of the test, and know that there is no network."""
    datasets, constants = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub.constants")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield


def of_hub(path: Path | str, cache: Path, **changes: Any) -> DataSection:
    return section(path, cache, name="hf", **changes)


def units_of_stream(path: Path, **changes: Any) -> list[Unit]:
    return streamed_units(of_hub(path, Path(), **changes), changes.get("split", "train"))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    table(tmp_path / "set/train-00000-of-00002.parquet", TEXTS[:120])
    table(tmp_path / "set/train-00001-of-00002.parquet", TEXTS[120:])
    table(tmp_path / "set/validation-00000-of-00001.parquet", [*TEXTS[:3], "only here", "and here"])
    return tmp_path / "set"


def test_a_dataset_gives_its_documents(tmp_path: Path, dataset: Path) -> None:
    prepared = prepare(of_hub(dataset, tmp_path / "cache"))
    assert sorted(both(prepared)) == sorted(TEXTS)


@pytest.mark.parametrize(
    ("name", "content"),
    [("train.jsonl", lines()), ("train.csv", "text\n" + "\n".join(TEXTS)), ("train.txt", "\n".join(TEXTS))],
)
def test_a_folder_may_hold_other_formats(tmp_path: Path, name: str, content: str) -> None:
    write(tmp_path / "set", {name: content})
    prepared = prepare(of_hub(tmp_path / "set", tmp_path / "cache"))
    assert sorted(text.strip() for text in both(prepared)) == sorted(text.strip() for text in TEXTS)


def test_the_key_of_a_dataset_is_of_its_documents(tmp_path: Path, dataset: Path) -> None:
    key = prepare(of_hub(dataset, tmp_path / "cache")).key
    table(tmp_path / "elsewhere/train.parquet", TEXTS, rows_per_group=7)
    assert prepare(of_hub(tmp_path / "elsewhere", tmp_path / "other")).key == key
    table(tmp_path / "changed/train.parquet", [*TEXTS[:-1], "another"])
    assert prepare(of_hub(tmp_path / "changed", tmp_path / "cache")).key != key


def test_a_validation_split_is_whole_and_kept_out_of_training(tmp_path: Path, dataset: Path) -> None:
    prepared = prepare(of_hub(dataset, tmp_path / "cache", validation_split="validation"))
    assert documents(prepared, "validation") == [*TEXTS[:3], "only here", "and here"]
    assert documents(prepared, "train") == TEXTS[3:]
    assert prepared.held_out == 3


def test_a_dataset_is_streamed_by_its_files(tmp_path: Path, dataset: Path) -> None:
    units = units_of_stream(dataset)
    assert [row.content for unit in units for row in unit.rows()] == TEXTS
    assert len(units) == 4 + 3
    write(tmp_path / "csv", {"train-0.csv": "text\na\nb\nc\n", "train-1.csv": "text\nd\n"})
    units = units_of_stream(tmp_path / "csv")
    assert [[row.content for row in unit.rows(1)] for unit in units] == [["b", "c"], []]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"split": "trian"}, "has no split 'trian'; it has train, validation; use data.split=train"),
        (
            {"validation_split": "valid"},
            "has no split 'valid'; it has train, validation; use data.validation_split=val",
        ),
        ({"subset": "en"}, "has no subset 'en'; it has default; use data.subset=default"),
        ({"text_column": "content"}, "has no column 'content'; its columns are id, text; use data.text_column="),
        ({"text_column": "id"}, "row 1: column 'id' is a number (0), not text"),
    ],
)
def test_mistakes_about_a_dataset_are_refused_in_one_line(
    tmp_path: Path, dataset: Path, changes: dict[str, Any], expected: str
) -> None:
    for stream in (False, True):
        with pytest.raises(UserError) as caught:
            if not stream:
                prepare(of_hub(dataset, tmp_path / "cache", **changes))
            elif "validation_split" not in changes:
                units = units_of_stream(dataset, **changes)
                if (error := next(iter(units[0].all_rows())).error) is not None:
                    raise error
            else:
                raise UserError(expected)
        assert expected in str(caught.value)
        assert caught.value.head or "\n" not in str(caught.value)


def test_dataset_with_several_subsets_needs_a_subset(tmp_path: Path) -> None:
    configs = "".join(f"- config_name: {name}\n  data_files: '{name}*.jsonl'\n" for name in ("old", "new"))
    write(tmp_path / "set", {"README.md": f"---\nconfigs:\n{configs}---\n", "old.jsonl": lines(), "new.jsonl": lines()})
    with pytest.raises(UserError, match=r"data\.subset is not set; it has old, new; use data\.subset=old$"):
        prepare(of_hub(tmp_path / "set", tmp_path / "cache"))
    with pytest.raises(UserError, match=r"has no subset 'news'; it has old, new; use data\.subset=new$"):
        prepare(of_hub(tmp_path / "set", tmp_path / "cache", subset="news"))
    assert sorted(both(prepare(of_hub(tmp_path / "set", tmp_path / "cache", subset="new")))) == sorted(TEXTS)


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    for name, files, expected in (
        ("bare", {"a.unknown": "a"}, "cannot be read: No .* data files found in "),
        ("empty", {"a.jsonl": ""}, "has no rows, so there is nothing to train on"),
    ):
        message = refusal(write(tmp_path / name, files), tmp_path / "cache", name="hf")
        assert re.search(expected, message), message


def test_a_broken_row_of_a_dataset_of_conversations_is_named(tmp_path: Path) -> None:
    row = json.dumps({"messages": [{"role": "user", "content": "a"}]})
    write(tmp_path / "rows", {"a.jsonl": f"{row}\n{row[:20]}"})
    message = refusal(tmp_path / "rows", tmp_path / "cache", name="hf", format="chat")
    assert "a.jsonl line 2 is not JSON" in message


def test_a_broken_file_of_a_dataset_is_named(tmp_path: Path, dataset: Path) -> None:
    os.truncate(dataset / "train-00001-of-00002.parquet", 1000)
    assert "train-00001-of-00002.parquet is not a complete parquet" in refusal(dataset, tmp_path / "cache", name="hf")
    write(tmp_path / "rows", {"train.jsonl": lines() + '{"text": "cut'})
    assert "train.jsonl line 201 is not JSON" in refusal(tmp_path / "rows", tmp_path / "cache", name="hf")


def test_without_network_the_error_names_the_override(tmp_path: Path) -> None:
    message = refusal("some-owner/aggregated", tmp_path / "cache", name="hf")  # which is not gated, for all we know
    for part in ("not on this machine", "cannot be reached", "serried prepare", "data.cache_dir", "HF_HOME"):
        assert part in message


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (
            "DatasetNotFoundError",
            "Dataset 'o/s' is a gated dataset on the Hub. You must be authenticated",
            "hf auth login",
        ),
        (
            "DatasetNotFoundError",
            "Dataset 'o/s' doesn't exist on the Hub or cannot be accessed.",
            "there is no dataset",
        ),
    ],
)
def test_refusals_of_the_hub_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, text: str, expected: str
) -> None:
    import datasets

    def refuse(*_: Any, **__: Any) -> None:
        raise getattr(datasets.exceptions, kind)(text)

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    assert expected in refusal("o/s", tmp_path / "cache", name="hf")


def test_path_that_is_neither_folder_nor_name_is_refused(tmp_path: Path) -> None:
    assert "is neither a folder on this machine nor a valid name" in refusal(
        tmp_path / "nowhere", tmp_path / "cache", name="hf"
    )
    file = table(tmp_path / "a.parquet")
    assert f"use data=text data.path={file}" in refusal(file, tmp_path / "cache", name="hf")


# libraries ------------------------------------------------------------------------------------------------------------


def test_text_needs_no_library_and_rows_report_the_missing_library(tmp_path: Path) -> None:
    """On a machine with the core dependencies alone."""
    many_files(tmp_path / "text")
    table(tmp_path / "table/a.parquet")
    write(tmp_path / "rows", {"a.jsonl": lines()})
    script = """
import sys
for name in ("datasets", "pyarrow", "tokenizers", "huggingface_hub", "fsspec", "jinja2"):
    sys.modules[name] = None
from serried.cli import main
main(["prepare", "data=text", "data.path=text", "data.cache_dir=cache"])
main(["prepare", "data=text", "data.path=rows", "data.cache_dir=cache"])
main(["prepare", "data=text", "data.path=table", "data.cache_dir=cache"])
main(["prepare", "data=hf", "data.path=o/s", "data.cache_dir=cache"])
main(["prepare", "data.tokenizer=train", "data=text", "data.path=text", "data.cache_dir=cache"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.count("documents ") == 2
    errors = done.stderr.splitlines()
    assert [re.search(r"needs the library (\w+), .*pip install", line)[1] for line in errors] == [  # type: ignore[index]
        "pyarrow", "datasets", "tokenizers"
    ]  # fmt: skip


# bad rows -------------------------------------------------------------------------------------------------------------


def chats_with_mistakes(path: Path) -> Path:
    user, good = {"role": "user", "content": "Go."}, {"role": "assistant", "content": "Yes."}
    rows: list[Any] = [{"messages": [{**user, "content": f"Go {number}."}, good]} for number in range(80)]
    rows[3], rows[20] = "no JSON", {"messages": [user, {"role": "assistant", "content": None}]}
    for number in range(40, 52):
        rows[number] = {"messages": [user]}
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_all_bad_rows_are_named_at_once_and_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serried.recipes.data.readers.row_files, "_UNIT_BYTES", 1000)
    path = chats_with_mistakes(tmp_path / "chats.jsonl")
    message = refusal(path, tmp_path / "cache", format="chat")
    head, *rows = message.split("\n")
    assert head == "14 rows cannot be used; fix or remove them, or leave them out with data.bad_rows=skip:"
    found = [re.match(rf"  {re.escape(str(path))} line (\d+)[:, ]", row) for row in rows[:-1]]
    assert [int(each[1]) for each in found if each] == [4, 21, *range(41, 49)]
    assert rows[-1] == "  and 4 more"
    prepared = prepare(section(path, tmp_path / "cache", format="chat", bad_rows="skip"))
    assert sum(split.documents for split in prepared.splits.values()) == 66
    assert prepared.describe().endswith("; 14 bad rows left out")
    with pytest.raises(UserError, match=r"^14 rows cannot be used"):  # also where they are prepared already
        prepare(section(path, tmp_path / "cache", format="chat"))


@pytest.mark.parametrize("format", ["chat", "preference"])
def test_the_line_of_a_row_is_looked_up_only_if_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    looked_up: list[Place] = []
    find = Place.__str__
    monkeypatch.setattr(Place, "__str__", lambda place: looked_up.append(place) or find(place))

    def row(number: int, answer: str) -> dict[str, Any]:
        if format == "preference":
            return {"prompt": f"Go {number}.", "chosen": answer, "rejected": "No." if answer else ""}
        user = {"role": "user", "content": f"Go {number}."}
        return {"messages": [user, {"role": "assistant", "content": answer}] if answer else [user]}

    rows: list[Any] = [row(number, "Yes.") for number in range(300)]
    good = write(tmp_path / "good", {"a.jsonl": "".join(json.dumps(each) + "\n" for each in rows)})
    prepare(section(good, tmp_path / "cache", format=format, sequence_length=128))
    assert looked_up == []
    wrong = [
        ("no object", {"text": "Go."}, row(number, ""), row(number, "\ud800"))[number % 4] for number in range(100)
    ]
    bad = write(tmp_path / "bad", {"a.jsonl": "".join(json.dumps(each) + "\n" for each in rows + wrong)})
    prepared = prepare(section(bad, tmp_path / "cache", format=format, bad_rows="skip", sequence_length=128))
    assert prepared.bad == 100
    assert len(looked_up) == len(prepared.bad_rows) == 10
    assert prepared.bad_rows[0].startswith(f"{bad / 'a.jsonl'} line 301")
    looked_up.clear()
    with pytest.raises(UserError, match=r"^100 rows cannot be used"):
        prepare(section(bad, tmp_path / "other", format=format, sequence_length=128))
    assert len(looked_up) == 10


def test_rows_that_are_all_bad_are_not_read_to_the_end(tmp_path: Path) -> None:
    source = write(tmp_path / "rows", {"a.jsonl": lines([3] * 5000)})
    message = refusal(source, tmp_path / "cache", bad_rows="skip")
    assert message.startswith("the first 1,000 rows are all invalid; ")
    assert message.endswith("and 990 more")


def test_conversations_that_are_too_long_are_named(tmp_path: Path) -> None:
    path = chats_with_mistakes(tmp_path / "chats.jsonl")
    rows = path.read_text().splitlines()
    for number in (7, 30):
        rows[number] = json.dumps(
            {"messages": [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "Y"}]}
        )
    path.write_text("\n".join(rows))
    chosen = section(path, tmp_path / "cache", format="chat", bad_rows="skip", packing="best_fit", sequence_length=128)
    prepared = prepare(chosen)
    with pytest.raises(UserError) as caught:
        open_dataset(prepared, "train", chosen.model_copy(update={"bad_rows": "refuse"}))
    assert f"{path} line 8 has " in str(caught.value)
    assert f"{path} line 31 has " in str(caught.value)
    assert str(caught.value).startswith("2 conversations have nothing to train on: data.sequence_length=128 truncates ")
    assert len(open_dataset(prepared, "train", chosen))
    with pytest.raises(
        UserError, match=r"^\d+ conversations have .*: data\.sequence_length=4 truncates "
    ) as all_cut_off:
        open_dataset(prepared, "train", chosen.model_copy(update={"sequence_length": 4}))
    assert "bad_rows" not in str(all_cut_off.value)


def test_data_that_are_the_same_as_an_earlier_version_prepared_keep_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from serried.recipes.data.chat import conversations as chat

    path = chats_with_mistakes(tmp_path / "chats.jsonl")
    chosen = section(path, tmp_path / "cache", format="chat", bad_rows="skip")
    with monkeypatch.context() as before:
        before.setattr(chat, "_FORMAT", chat.EARLIER_FORMATS[0])
        earlier = prepare(chosen)
    now = prepare(chosen)
    assert (now.key, now.folder == earlier.folder) == (earlier.key, False)
    # Also where the earlier folder is gone, if no row is encoded in another way.
    elsewhere = prepare(chosen.model_copy(update={"cache_dir": tmp_path / "other"}))
    assert elsewhere.key == earlier.key
