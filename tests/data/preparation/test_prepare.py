"""From documents to tokens on disk: prepared once and whole, by however many processes."""

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import serried.recipes.data.prepared.prepare as preparing
import serried.recipes.data.prepared.token_shards
import serried.recipes.data.prepared.tokenize
import serried.recipes.data.readers.reading_progress
import serried.recipes.data.readers.row_files
import serried.recipes.data.readers.source_files
from serried.configs.errors import UserError
from serried.configs.schema.data import DataSection
from serried.recipes.data.prepared.prepare import cache_folder, open_prepared, prepare
from serried.recipes.data.prepared.token_shards import Shard, ShardWriter, TokenStream
from serried.recipes.data.readers.plain_text import TextFiles
from serried.recipes.data.tokenizers.encode_rows import Encoded
from serried.recipes.data.tokenizers.tokenizer import token_dtype
from tests.support.texts import documents, everything, many_files, section, write

LONG_AGO = 1_600_000_000


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take files of this moment for settled, so that the memo is used."""
    monkeypatch.setattr(serried.recipes.data.readers.source_files, "SETTLED_SECONDS", -10.0)


def refuse_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(preparing, "write_shards", fail)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rows(folder: Path, count: int = 300) -> Path:
    """Lines of different length in two files."""
    texts = [f"document {i} " + "of some words and more " * (i % 13) for i in range(count)]
    halves = texts[: count // 2], texts[count // 2 :]
    lines = ["".join(json.dumps({"text": text}) + "\n" for text in half) for half in halves]
    return write(folder, {"a.jsonl": lines[0], "b.jsonl": lines[1]})


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards and units of 2 kB, so that little text has many."""
    monkeypatch.setattr(serried.recipes.data.prepared.tokenize, "_SHARD_BYTES", 2000)
    monkeypatch.setattr(serried.recipes.data.readers.row_files, "_UNIT_BYTES", 700)


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_prepared_tokens_are_those_of_the_text(tmp_path: Path, tokenizer: str) -> None:
    files = {f"{i:02d}.txt": f"Grüße {i}\n" * (i + 3) for i in range(25)}
    prepared = prepare(section(write(tmp_path / "text", files), tmp_path / "cache", tokenizer=tokenizer))
    found = []
    for name in ("train", "validation"):
        stored = np.fromfile(prepared.folder / f"{name}-00000.bin", token_dtype(prepared.tokenizer.vocab_size))
        assert np.array_equal(stored, everything(prepared, name))
        pieces = documents(prepared, name)
        found += pieces
        summary = prepared.splits[name]
        assert (summary.documents, summary.tokens) == (len(pieces), len(stored))
        assert summary.text_bytes == sum(len(piece.encode()) for piece in pieces)
        assert sum(summary.lengths) == summary.documents
    assert sorted(found) == sorted(files.values())
    assert sorted(path.name for path in prepared.folder.iterdir()) == [
        "summary.json", "tokenizer.json", "train-00000.bin", "train-00000.crc32", "train-00000.starts",
        "validation-00000.bin", "validation-00000.crc32", "validation-00000.starts",
    ]  # fmt: skip
    again = open_prepared(prepared.folder)
    assert (again.splits, again.tokenizer.spec()) == (prepared.splits, prepared.tokenizer.spec())


def test_tokens_are_mapped_not_read(tmp_path: Path) -> None:
    prepared = prepare(section(many_files(tmp_path / "text"), tmp_path / "cache"))
    assert isinstance(prepared.stream("train").read(3, 9).base.base, np.memmap)


@pytest.mark.parametrize("settled", [True, False])
def test_second_preparation_tokenizes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: bool) -> None:
    if settled:
        settle(monkeypatch)
    text = many_files(tmp_path / "text")
    first = prepare(section(text, tmp_path / "cache"))
    times = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    refuse_to_write(monkeypatch)
    if settled:
        monkeypatch.setattr(TextFiles, "fingerprint", lambda *_: pytest.fail("the source was read again"))
    again = prepare(section(text, tmp_path / "cache", sequence_length=8))
    assert again.folder == first.folder
    assert {path: path.stat().st_mtime_ns for path in again.folder.iterdir()} == times


def test_a_fresh_file_is_never_taken_for_unchanged(tmp_path: Path) -> None:
    """An edit that leaves size and time of a file written this moment is still seen."""
    text = write(tmp_path / "text", {"a.txt": "one " * 100})
    keys = []
    for word in ("one ", "two "):
        write(text, {"a.txt": word * 100})
        os.utime(text / "a.txt", (LONG_AGO, LONG_AGO))
        keys.append(prepare(section(text, tmp_path / "cache")).key)
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: write(text, {"000.txt": "<000>" * 20 + "!"}),
        lambda text: write(text, {"more.txt": "more"}),
        lambda text: (text / "000.txt").rename(text / "renamed.txt"),
        lambda text: (text / "000.txt").unlink(),
    ],
)
def test_a_change_of_the_source_is_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any]
) -> None:
    settle(monkeypatch)
    text = many_files(tmp_path / "text")
    before = prepare(section(text, tmp_path / "cache")).key
    change(text)
    assert prepare(section(text, tmp_path / "cache")).key != before


def test_the_key_is_of_content_and_settings(tmp_path: Path) -> None:
    here, there = many_files(tmp_path / "here"), many_files(tmp_path / "there")
    key = prepare(section(here, tmp_path / "cache")).key
    assert prepare(section(there, tmp_path / "other")).key == key
    assert prepare(section(here, tmp_path / "cache", sequence_length=99)).key == key
    assert prepare(section(here, tmp_path / "cache", tokenizer="chars")).key != key
    assert prepare(section(here, tmp_path / "cache", validation_fraction=0.1)).key != key


def _prepare_in_process(text: Path, cache: Path, start: Any, results: Any) -> None:
    start.wait()
    results.put(str(prepare(section(text, cache)).folder))


def test_processes_that_prepare_at_once_get_the_same(tmp_path: Path) -> None:
    text, cache = many_files(tmp_path / "text"), tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_prepare_in_process, args=(text, cache, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    folders = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
    assert len(folders) == 1
    assert open_prepared(Path(folders.pop())).splits["train"].documents > 0
    assert sorted(path.name == "memos" for path in cache.iterdir()) in ([False], [False, True])


def test_threads_that_prepare_at_once_get_the_same(tmp_path: Path) -> None:
    text = many_files(tmp_path / "text")
    barrier = threading.Barrier(4)

    def run(_: int) -> Path:
        barrier.wait(30)
        return prepare(section(text, tmp_path / "cache")).folder

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(run, range(4)))) == 1


def _hang_after(shards: int, source: Path, cache: Path, reached: Any) -> None:
    made = 0
    write_shards = preparing.write_shards

    def hang(*arguments: Any) -> Any:
        nonlocal made
        if made == shards:
            reached.set()
            time.sleep(600)
        made += 1
        return write_shards(*arguments)

    preparing.write_shards = hang
    prepare(section(source, cache))


@pytest.mark.usefixtures("small_shards")
def test_killed_preparation_resumes(tmp_path: Path) -> None:
    source, cache = rows(tmp_path / "rows"), tmp_path / "cache"
    undisturbed = prepare(section(source, tmp_path / "other"))
    assert len(undisturbed.shards["train"]) > 5
    context = multiprocessing.get_context("fork")
    reached = context.Event()
    process = context.Process(target=_hang_after, args=(3, source, cache, reached))
    process.start()
    assert reached.wait(60)
    (left,) = cache.glob("*.partial")
    finished = {path: path.stat().st_ino for path in left.glob("train-*.bin")}
    assert len(finished) == 3
    (left / f"train-00003.bin.{socket.gethostname()}.x.tmp").write_bytes(b"half")
    with pytest.raises(UserError, match="does not exist"):
        open_prepared(left)

    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    prepared = prepare(section(source, cache))
    assert not left.exists()
    assert {path.name: path.stat().st_ino for path in prepared.folder.iterdir()}.items() >= {
        (path.name, inode) for path, inode in finished.items()
    }
    assert contents(prepared.folder) == contents(undisturbed.folder)


def test_second_preparation_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = many_files(tmp_path / "text"), tmp_path / "cache"
    second_waits, said = threading.Event(), list[str]()
    write_shards = preparing.write_shards

    def wait_for_the_second(*arguments: Any) -> Any:
        assert second_waits.wait(60)
        refuse_to_write(monkeypatch)
        return write_shards(*arguments)

    monkeypatch.setattr(preparing, "write_shards", wait_for_the_second)

    def show(text: str) -> None:
        said.append(text)
        second_waits.set()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(prepare, section(source, cache))
        while not list(cache.glob("*.partial")):
            assert not first.done()
            time.sleep(0.01)
        second = threads.submit(prepare, section(source, cache), show)
        assert first.result(60).folder == second.result(60).folder
    assert said == ["preparing data: waiting for another process that is preparing the same data", ""]


def test_abandoned_preparation_is_removed_after_two_weeks_and_no_folder_of_others(tmp_path: Path) -> None:
    cache, key = tmp_path / "cache", "0123456789abcdef" * 2
    prepare(section(many_files(tmp_path / "text"), cache))
    (prepared,) = (folder for folder in cache.iterdir() if (folder / "summary.json").exists())
    abandoned = [cache / name for name in (f"{key}.partial", f"apart-{key}.partial", f"{key}.{'f' * 12}.tmp")]
    for folder in abandoned:
        shutil.copytree(prepared, folder)
        write(folder, {".train-00001.bin.my-host.ffff.tmp": "x", "done-00000.json": "{}"})
    fresh = cache / f"{'f' * 32}.partial"
    shutil.copytree(prepared, fresh)
    others = [cache / name for name in ("thesis.tmp", "download.partial", f"{'e' * 32}.partial", f"{key}.tmp")]
    for folder in others:
        write(folder, {"precious.txt": "x"})
    write(cache, {f"{'d' * 32}.partial": "a file"})
    others.append(cache / f"{'d' * 32}.partial")
    for folder in (*abandoned, *others):
        for path in (*folder.glob("*"), folder):
            os.utime(path, (LONG_AGO, LONG_AGO))
    (tmp_path / "text" / "more.txt").write_text("more")
    prepare(section(tmp_path / "text", cache))
    assert not any(folder.exists() for folder in abandoned)
    assert all(folder.exists() for folder in (fresh, *others))


@pytest.mark.usefixtures("small_shards")
def test_the_bytes_do_not_depend_on_threads(tmp_path: Path) -> None:
    source = rows(tmp_path / "rows")
    folders = [prepare(section(source, tmp_path / str(n)), threads=n).folder for n in (1, 5)]
    assert contents(folders[0]) == contents(folders[1])


def test_the_stream_does_not_depend_on_where_shards_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = rows(tmp_path / "rows")
    one = prepare(section(source, tmp_path / "one"))
    monkeypatch.setattr(serried.recipes.data.prepared.tokenize, "_SHARD_BYTES", 1)
    monkeypatch.setattr(serried.recipes.data.readers.row_files, "_UNIT_BYTES", 700)
    many = prepare(section(source, tmp_path / "many"))
    assert len(one.shards["train"]) == 1 < len(many.shards["train"])
    assert one.key == many.key
    for name in ("train", "validation"):
        assert np.array_equal(everything(one, name), everything(many, name))
        starts = [prepared.stream(name).all_document_starts().tolist() for prepared in (one, many)]
        assert starts[0] == starts[1]


def test_document_longer_than_a_shard_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serried.recipes.data.prepared.tokenize, "_SHARD_BYTES", 2000)
    text = "".join(f"word {i} né " for i in range(100_000))
    assert len(text) > 1 << 20
    lines = [json.dumps({"text": each}) + "\n" for each in [*"abcdefghij" * 6, text]]
    source = write(tmp_path / "rows", {"a.jsonl": "".join(lines)})
    prepared = prepare(section(source, tmp_path / "cache", validation_fraction=0.3, tokenizer="chars"))
    assert text in [*documents(prepared, "train"), *documents(prepared, "validation")]


def test_memory_of_preparation_is_bounded(tmp_path: Path) -> None:
    size_bytes = 96 << 20
    source = write(tmp_path / "text", {"a.txt": b"some words on a line\n" * (size_bytes // 21)})
    tracemalloc.start()
    try:
        prepared = prepare(section(source, tmp_path / "cache"), threads=2)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert prepared.splits["train"].text_bytes > 0.9 * size_bytes
    assert peak_bytes < size_bytes / 2


def test_preparation_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serried.recipes.data.readers.reading_progress, "_EVERY_SECONDS", 0.0)
    source, said = write(tmp_path / "text", {f"{i}.txt": f"{i} " * 200_000 for i in range(9)}), list[str]()
    prepare(section(source, tmp_path / "cache"), said.append)
    *lines, end = said
    assert end == ""
    for line in lines:
        assert re.fullmatch(
            r"preparing data: (reading|tokenising) [\d.]+[KM]?i?B of 3\.4MiB, [\d.]+[KMG]?i?B/s, eta (\d+m)?\d+s", line
        ), line
    assert {line.split()[2] for line in lines} == {"reading", "tokenising"}
    assert " 3.4MiB of 3.4MiB" in lines[-1]


def test_another_machine_without_our_locks_may_be_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same ``.partial``, and renames it while this one still writes."""
    source, cache = rows(tmp_path / "rows"), tmp_path / "cache"
    theirs = prepare(section(source, tmp_path / "theirs"))
    write_shards = preparing.write_shards

    def overtaken(partial: Path, *arguments: Any) -> Any:
        partial.rename(cache / "gone")
        shutil.copytree(theirs.folder, cache / theirs.key)
        return write_shards(partial, *arguments)

    monkeypatch.setattr(preparing, "write_shards", overtaken)
    assert prepare(section(source, cache)).folder == cache / theirs.key


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = rows(tmp_path / "rows")
    write_shards = preparing.write_shards

    def change_first(*arguments: Any) -> Any:
        with (source / "b.jsonl").open("a") as stream:
            stream.write('{"text": "more"}\n')
        return write_shards(*arguments)

    monkeypatch.setattr(preparing, "write_shards", change_first)
    with pytest.raises(UserError, match=r"b\.jsonl changed while it was being prepared"):
        prepare(section(source, tmp_path / "cache"))
    assert not list((tmp_path / "cache").iterdir())


def as_pipe(path: Path) -> None:
    """Replace a file by a pipe, which blocks whoever opens it."""
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [
        *(
            lambda folder, name=name: as_pipe(folder / name)
            for name in (
                "summary.json",
                "tokenizer.json",
                "train-00000.bin",
                "train-00000.starts",
                "validation-00000.starts",
            )
        ),
        lambda folder: (folder / "train-00000.bin").unlink(),
        lambda folder: os.truncate(folder / "train-00000.bin", 900),
        lambda folder: os.truncate(folder / "validation-00000.bin", 100),
        lambda folder: os.truncate(folder / "validation-00000.bin", 0),
        lambda folder: (folder / "train-00000.starts").unlink(),
        lambda folder: (folder / "summary.json").write_text("{"),
        lambda folder: (folder / "summary.json").write_text("[]"),
        lambda folder: (folder / "tokenizer.json").write_text('{"kind": "runes"}'),
    ],
)
def test_damaged_folder_is_refused_and_prepared_again(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    data = section(many_files(tmp_path / "text"), tmp_path / "cache")
    whole = prepare(data)
    tokens = everything(whole, "train").copy()
    damage(whole.folder)
    with pytest.raises(UserError, match=r"^prepared data .*(damaged|not whole)[^\n]*$"):
        open_prepared(whole.folder)
    assert np.array_equal(everything(prepare(data), "train"), tokens)
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_pipe_in_place_of_what_a_cache_remembers_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    data = section(many_files(tmp_path / "text"), tmp_path / "cache")
    whole = prepare(data)
    (memo,) = (tmp_path / "cache/memos").iterdir()
    as_pipe(memo)
    assert prepare(data).key == whole.key


def conversations(tmp_path: Path) -> DataSection:
    """Enough for several blocks of each file."""
    answer = {"role": "assistant", "content": "b"}
    rows = [json.dumps({"messages": [{"role": "user", "content": str(row)}, answer]}) for row in range(10_000)]
    write(tmp_path / "chats", {"chats.jsonl": "\n".join(rows)})
    return section(tmp_path / "chats" / "chats.jsonl", tmp_path / "cache", format="chat")


def test_changed_bit_of_prepared_tokens_is_refused_when_it_is_read(tmp_path: Path) -> None:
    folder = prepare(conversations(tmp_path)).folder
    tokens = open_prepared(folder).splits["train"].tokens
    for kind in ("bin", "starts", "supervised"):
        path = folder / f"train-00000.{kind}"
        content = path.read_bytes()
        assert len(content) > 2**16
        for place in (0, 2**16 - 1, 2**16, len(content) - 1):
            flipped = bytearray(content)
            flipped[place] ^= 8
            path.write_bytes(flipped)
            stream = open_prepared(folder).stream("train")
            with pytest.raises(UserError, match=rf"^prepared data .* is damaged: train-00000.{kind} .*remove"):
                {"bin": stream.read, "starts": stream.document_starts, "supervised": stream.supervised}[kind](0, tokens)
            if (kind, place) == ("bin", 2**16):
                intact = np.frombuffer(content, np.uint16)[5 : 2**15]
                assert np.array_equal(stream.read(5, 2**15), intact)
            path.write_bytes(content)
    stream = open_prepared(folder).stream("train")
    (folder / "train-00000.crc32").unlink()  # as an earlier version made it
    earlier = open_prepared(folder).stream("train")
    assert np.array_equal(stream.read(0, tokens), earlier.read(0, tokens))
    assert np.array_equal(stream.supervised(0, tokens), earlier.supervised(0, tokens))
    for start, stop in ((0, tokens), (1, 1), (5, 60), (tokens - 3, tokens), (tokens // 2, tokens // 2 + 9)):
        assert np.array_equal(stream.document_starts(start, stop), earlier.document_starts(start, stop))


@pytest.mark.parametrize("name", ["summary.json", "tokenizer.json"])
def test_changed_description_of_prepared_tokens_is_refused_and_an_earlier_version_s_read(
    name: str, tmp_path: Path
) -> None:
    data = section(many_files(tmp_path / "text"), tmp_path / "cache", tokenizer="chars")
    folder = prepare(data).folder
    content = (folder / name).read_text()
    place = next(place for place, character in enumerate(content) if character in "123456")
    (folder / name).write_text(content[:place] + str(int(content[place]) + 1) + content[place + 1 :])
    with pytest.raises(UserError, match=r"^prepared data .* is damaged .*; remove the folder"):
        open_prepared(folder)
    prepare(data)
    assert (folder / name).read_text() == content
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({key: value for key, value in summary.items() if key != "crc32"}))
    assert open_prepared(folder).key == folder.name


def test_prepared_data_missing_on_this_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"does not exist.* on {re.escape(socket.gethostname())}; .*data\.cache_dir="):
        open_prepared(tmp_path / "nowhere")


def test_unwritable_cache_is_refused(tmp_path: Path) -> None:
    text = many_files(tmp_path / "text")
    write(tmp_path, {"file": "x"})
    for cache in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(
            UserError, match=r"cannot write prepared data to .*bytes needed, .*free.*data\.cache_dir="
        ) as caught:
            prepare(section(text, cache))
        assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"No space left on device .*data\.cache_dir="):
        prepare(section(many_files(tmp_path / "text"), tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_folder(section("x")) == tmp_path / ".cache/serried"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(section("x")) == tmp_path / "xdg/serried"
    assert cache_folder(section("x", Path("~/mine"))) == tmp_path / "mine"


def test_weights_of_tokens_are_read_over_shards_with_and_without_them(tmp_path: Path) -> None:
    shards = []
    for number, row_weights in enumerate(([None, None], [None, 0.25, None], [2.5])):
        with ShardWriter(tmp_path, f"train-{number:05d}", np.dtype(np.uint16)) as writer:
            for weight in row_weights:
                weights = None if weight is None else np.full(3, weight, np.float32)
                writer.add(Encoded(np.arange(3), np.ones(3, np.uint8), weights=weights), begins=True)
        shards.append(Shard.from_json(tmp_path, writer.shard().as_json(tmp_path)))
    assert [shard.weights is not None for shard in shards] == [False, True, True]
    stream = TokenStream(shards)
    want = np.repeat(np.array([1, 1, 1, 0.25, 1, 2.5], np.float32), 3)
    for start in range(19):
        for stop in range(start, 19):
            assert np.array_equal(stream.weights(start, stop), want[start:stop])
    path = tmp_path / "train-00001.weights"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 8, *path.read_bytes()[1:]]))
    with pytest.raises(UserError, match=r"damaged: train-00001.weights"):
        TokenStream(shards).weights(0, 18)
