"""From documents to tokens on disk: prepared once and whole, by however many processes."""

import errno
import fcntl
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import recipes.data.prepare as preparing
from configs.errors import UserError
from recipes.data.prepare import cache_folder, open_prepared, prepare
from recipes.data.tokenizer import token_dtype
from tests.texts import many_files, section, write

LONG_AGO = 1_600_000_000


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take files of this moment for settled, so that the memo is used."""
    monkeypatch.setattr(preparing, "_SETTLED_SECONDS", -10.0)


def refuse_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(preparing, "_make", fail)


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_what_is_prepared_is_the_text(tmp_path: Path, tokenizer: str) -> None:
    files = {f"{i:02d}.txt": f"Grüße {i}\n" * (i + 3) for i in range(25)}
    prepared = prepare(section(write(tmp_path / "text", files), tmp_path / "cache", tokenizer=tokenizer))
    documents = []
    for name in ("train", "validation"):
        stored = load_file(prepared.folder / f"{name}.safetensors")  # the library reads what we wrote
        assert np.array_equal(stored["tokens"], prepared.tokens(name))
        assert stored["tokens"].dtype == token_dtype(prepared.tokenizer.vocab_size)
        assert stored["document_starts"].dtype == np.int64
        pieces = np.split(stored["tokens"], stored["document_starts"][1:])
        assert all(piece[-1] == prepared.tokenizer.end_id for piece in pieces)
        documents += [prepared.tokenizer.decode(piece) for piece in pieces]
        summary = prepared.splits[name]
        assert (summary.files, summary.tokens) == (len(pieces), len(stored["tokens"]))
    assert sorted(documents) == sorted(files.values())
    assert sorted(path.name for path in prepared.folder.iterdir()) == [
        "summary.json", "tokenizer.json", "train.safetensors", "validation.safetensors"
    ]  # fmt: skip
    again = open_prepared(prepared.folder)
    assert (again.splits, again.tokenizer.spec()) == (prepared.splits, prepared.tokenizer.spec())


def test_tokens_are_mapped_not_read(tmp_path: Path) -> None:
    prepared = prepare(section(many_files(tmp_path / "text"), tmp_path / "cache"))
    assert isinstance(prepared.tokens("train").base, np.memmap)


@pytest.mark.parametrize("settled", [True, False])
def test_the_second_time_nothing_is_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: bool) -> None:
    if settled:
        settle(monkeypatch)
    text = many_files(tmp_path / "text")
    first = prepare(section(text, tmp_path / "cache"))
    times = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    refuse_to_write(monkeypatch)
    if settled:
        monkeypatch.setattr(preparing, "read_documents", lambda _: pytest.fail("the source was read again"))
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
    assert open_prepared(Path(folders.pop())).splits["train"].files > 0
    assert sorted(path.name == "memos" for path in cache.iterdir()) in ([False], [False, True])


def test_threads_that_prepare_at_once_get_the_same(tmp_path: Path) -> None:
    text = many_files(tmp_path / "text")
    barrier = threading.Barrier(4)

    def run(_: int) -> Path:
        barrier.wait(30)
        return prepare(section(text, tmp_path / "cache")).folder

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(run, range(4)))) == 1


def _hang_while_writing(text: Path, cache: Path, reached: Any) -> None:
    def hang(*_: Any) -> None:
        reached.set()
        time.sleep(600)

    preparing._publish = hang
    prepare(section(text, cache))


def test_what_a_killed_process_left_is_never_used_and_goes(tmp_path: Path) -> None:
    text, cache = many_files(tmp_path / "text"), tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    reached = context.Event()
    process = context.Process(target=_hang_while_writing, args=(text, cache, reached))
    process.start()
    assert reached.wait(60)
    (left,) = cache.glob("*.tmp")
    with pytest.raises(UserError, match="damaged"):
        open_prepared(left)

    other = prepare(section(many_files(tmp_path / "other", 30), cache))
    assert left.exists(), "its owner lives"

    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    prepared = prepare(section(text, cache))
    assert not left.exists()
    assert prepared.splits["train"].files > 0
    assert other.folder.exists()


def test_what_another_machine_left_goes_after_a_day(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    fresh, old, mine = (cache / f"k.{name}.tmp" for name in ("elsewhere.1", "elsewhere.2", f"{socket.gethostname()}.3"))
    for folder in (fresh, old, mine):
        write(folder, {"lock": ""})
        if folder == old:
            for path in (folder / "lock", folder):
                os.utime(path, (LONG_AGO, LONG_AGO))
    with (mine / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare(section(many_files(tmp_path / "text"), cache))
        assert (fresh.exists(), old.exists(), mine.exists()) == (True, False, True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "train.safetensors").unlink(),
        lambda folder: os.truncate(folder / "train.safetensors", 900),
        lambda folder: os.truncate(folder / "validation.safetensors", 100),
        lambda folder: os.truncate(folder / "validation.safetensors", 0),
        lambda folder: (folder / "summary.json").write_text("{"),
        lambda folder: (folder / "summary.json").write_text("[]"),
        lambda folder: (folder / "tokenizer.json").write_text('{"kind": "runes"}'),
    ],
)
def test_a_damaged_folder_is_refused_and_made_anew(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    data = section(many_files(tmp_path / "text"), tmp_path / "cache")
    whole = prepare(data)
    tokens = whole.tokens("train").copy()
    damage(whole.folder)
    with pytest.raises(UserError, match=r"^prepared data .*(damaged|not whole)[^\n]*$"):
        open_prepared(whole.folder)
    assert np.array_equal(prepare(data).tokens("train"), tokens)
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_prepared_data_that_this_node_lacks_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"not there.* on {re.escape(socket.gethostname())}; .*data\.cache_dir="):
        open_prepared(tmp_path / "nowhere")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    text = many_files(tmp_path / "text")
    write(tmp_path, {"file": "x"})
    for cache in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(
            UserError, match=r"cannot write prepared data to .*bytes needed, .*free.*data\.cache_dir="
        ) as caught:
            prepare(section(text, cache))
        assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(preparing, "_to_disk", full)
    with pytest.raises(UserError, match=r"No space left on device .*data\.cache_dir="):
        prepare(section(many_files(tmp_path / "text"), tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_folder(section("x")) == tmp_path / ".cache/serried"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(section("x")) == tmp_path / "xdg/serried"
    assert cache_folder(section("x", Path("~/mine"))) == tmp_path / "mine"
