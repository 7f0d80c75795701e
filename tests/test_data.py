"""From files to samples: what is found, how it is split, prepared once and whole, and what is said where it is not."""

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import re
import signal
import socket
import sysconfig
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import load_file

import recipes.data.prepare as preparing
from configs.errors import UserError
from configs.schema import DataSection
from recipes.data.dataset import TokenDataset, collate
from recipes.data.prepare import Prepared, cache_folder, open_prepared, prepare
from recipes.data.text import Document, Part, assignment, find_files, read_documents, split_documents, tail_start
from recipes.data.tokenizer import BytesTokenizer, CharsTokenizer, Tokenizer, token_dtype, tokenizer_from_spec
from recipes.models.head import IGNORE

LONG_AGO = 1_600_000_000


def section(path: Path | str, cache: Path | None = None, **changes: Any) -> DataSection:
    return DataSection(**{"name": "text", "path": str(path), "sequence_length": 16, "cache_dir": cache, **changes})


def write(folder: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def many_files(folder: Path, count: int = 40) -> Path:
    return write(folder, {f"{i:03d}.txt": f"<{i:03d}>" * (20 + i % 7) for i in range(count)})


def found(path: Path | str) -> list[str]:
    return [file.name for file in find_files(section(path))]


def split(path: Path | str, fraction: float = 0.1) -> dict[str, list[Part]]:
    return split_documents(read_documents(find_files(section(path))), fraction)


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take files of this moment for settled, so that the memo is used."""
    monkeypatch.setattr(preparing, "_SETTLED_SECONDS", -10.0)


def refuse_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(preparing, "_make", fail)


# tokenizers -----------------------------------------------------------------------------------------------------------


@given(content=st.binary())
def test_bytes_round_trip(content: bytes) -> None:
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(content)
    assert bytes(ids.tolist()) == content
    assert tokenizer.decode(ids) == content.decode(errors="replace")


@given(text=st.text())
def test_chars_round_trip(text: str) -> None:
    tokenizer = CharsTokenizer("".join(sorted(set(text))))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == token_dtype(tokenizer.vocab_size)
    with contextlib.suppress(UnicodeEncodeError):  # half a character cannot come from a file
        assert np.array_equal(tokenizer.encode(text.encode()), ids)


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), CharsTokenizer(" abé\U0001f600")])
def test_a_tokenizer_is_its_spec(tokenizer: Tokenizer) -> None:
    again = tokenizer_from_spec(json.loads(json.dumps(tokenizer.spec())))
    assert again.spec() == tokenizer.spec()
    assert (again.vocab_size, again.end_id) == (tokenizer.vocab_size, tokenizer.end_id)
    assert np.array_equal(again.encode("a b"), tokenizer.encode("a b"))


def test_decode_takes_any_id() -> None:
    assert BytesTokenizer().decode([72, 256, 105, 999, -1]) == "Hi\ufffd\ufffd"
    assert CharsTokenizer("ab").decode([0, 2, 1, 7, -1]) == "ab\ufffd\ufffd"


@pytest.mark.parametrize("unknown", ["x", "ζ", "\U0001f600", "\ud800"])
def test_an_unknown_character_is_named(unknown: str) -> None:
    with pytest.raises(UserError, match=rf"U\+{ord(unknown):04X}\) at place 2 .* the 2 "):
        CharsTokenizer("ab").encode(f"ab{unknown}")


def test_widths_of_ids() -> None:
    assert [token_dtype(size).name for size in (256, 257, 65536, 65537)] == ["uint8", "uint16", "uint16", "uint32"]


# finding --------------------------------------------------------------------------------------------------------------


def test_a_folder_gives_its_text_files_in_order(tmp_path: Path) -> None:
    write(
        tmp_path,
        dict.fromkeys(
            ("b.txt", "a/z.md", "a.py", "A.TXT", "c.png", ".hidden.txt", ".git/x.txt", "a/__pycache__/y.py"), "x"
        ),
    )
    assert found(tmp_path) == ["A.TXT", "a.py", "a/z.md", "b.txt"]


def test_a_named_file_and_a_glob_may_end_in_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, dict.fromkeys(("a.log", "b/c.log", "b/d/e.log", "f.txt", "odd [1].txt"), "x"))
    assert found(tmp_path / "a.log") == ["a.log"]
    assert found(f"{tmp_path}/**/*.log") == ["a.log", "b/c.log", "b/d/e.log"]
    assert found(f"{tmp_path}/b/*.log") == ["c.log"]
    assert found(tmp_path / "odd [1].txt") == ["odd [1].txt"]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert found("~/f.txt") == ["f.txt"]
    assert found("*.log") == ["a.log"]
    assert found("b/**") == ["c.log", "d/e.log"]


def test_links_are_followed_once(tmp_path: Path) -> None:
    write(tmp_path, {"text/a.txt": "x", "elsewhere/b.txt": "y"})
    (tmp_path / "text/more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "text/loop").symlink_to(tmp_path / "text")
    (tmp_path / "text/gone.txt").symlink_to(tmp_path / "nowhere")
    assert found(tmp_path / "text") == ["a.txt", "more/b.txt"]


def test_the_standard_library_is_there_without_tests() -> None:
    files = find_files(DataSection(name="stdlib", sequence_length=16))
    names = [file.name for file in files]
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert sum(file.path.stat().st_size for file in files) > 5_000_000
    assert str(files[0].path).startswith(sysconfig.get_paths()["stdlib"])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("corpsu", r"data\.path=T/corpsu does not exist .*did you mean data\.path=T/corpus\?"),
        ("corpsu/a.txt", r"there is no T/corpsu .*did you mean data\.path=T/corpus/a\.txt\?"),
        ("zzz/qqq", r"does not exist, for there is no T/zzz .*name a file"),
        ("corpus/a.txt/b", r"cannot look at .*a\.txt/b.*: Not a directory"),
        ("corpus/*.csv", r"matches no file; T/corpus holds a\.txt"),
        ("nope/*.csv", r"does not exist.*T"),
        ("pictures", r"none of the 2 files in it ends in \.txt .*\.png: 2.*data\.path=.*T/pictures/\*\*/\*\.png"),
        ("nothing", r"the folder holds no files"),
        ("pipe", r"neither a file nor a folder"),
        ("empty.txt", r"T/empty\.txt is empty \(0 bytes\): nothing to train on"),
        ("empties", r"is empty \(0 bytes\) and so are the other 1 files"),
    ],
)
def test_mistakes_in_the_path(tmp_path: Path, path: str, expected: str) -> None:
    write(
        tmp_path,
        {
            "corpus/a.txt": "x",
            "pictures/1.png": "x",
            "pictures/2.png": "x",
            "empty.txt": "",
            "empties/a.txt": "",
            "empties/b.txt": "",
        },
    )
    (tmp_path / "nothing").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError) as caught:
        prepare(section(tmp_path / path, tmp_path / "cache"))
    message = str(caught.value)
    assert re.search(expected.replace("T", re.escape(str(tmp_path))), message), message
    assert "\n" not in message


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a.txt": "x"})

    def refuse(path: Path, *_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"cannot read .*a\.txt: Permission denied; make it readable"):
        read_documents(find_files(section(tmp_path)))


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    documents = read_documents(find_files(section(write(tmp_path, {"a.txt": "before"}))))
    write(tmp_path, {"a.txt": "now"})
    with pytest.raises(UserError, match=r"a\.txt changed while .*\(from 6 to 3 bytes\)"):
        documents[0].read()


def test_chars_want_utf8_and_bytes_do_not(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"good " * 20 + b"\xff\x00 bad " * 20})
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8: byte 0xff at offset 100 of .*data\.tokenizer=bytes"):
        prepare(section(tmp_path, tmp_path / "cache", tokenizer="chars"))
    assert prepare(section(tmp_path, tmp_path / "cache")).splits["train"].tokens > 100


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a/b-c_1.txt", "k=a/b-c_1.txt"),
        ("a b", "'k=\"a b\"'"),
        ("x*.txt", "'k=\"x*.txt\"'"),
        ("it's", "'k=\"it'\\''s\"'"),
    ],
)
def test_what_is_to_be_pasted_is_quoted_where_needed(value: str, expected: str) -> None:
    assert assignment("k", value) == expected


# splitting ------------------------------------------------------------------------------------------------------------


def test_many_files_are_split_by_file(tmp_path: Path) -> None:
    prepared = prepare(section(many_files(tmp_path / "text"), tmp_path / "cache", validation_fraction=0.2))
    marks = {
        name: set(re.findall(r"<\d{3}>", prepared.tokenizer.decode(prepared.tokens(name))))
        for name in ("train", "validation")
    }
    assert not marks["train"] & marks["validation"]
    assert len(marks["train"] | marks["validation"]) == 40
    sizes = {name: prepared.splits[name].text_bytes for name in marks}
    assert 0.1 <= sizes["validation"] / sum(sizes.values()) <= 0.22


@given(sizes=st.lists(st.integers(1, 5000), min_size=20, max_size=60), fraction=st.floats(0.001, 0.999))
@example(sizes=[1] * 19 + [5000], fraction=0.9)
@example(sizes=[1] * 20, fraction=0.999)
def test_whole_files_make_about_the_share_and_never_all(sizes: list[int], fraction: float) -> None:
    documents = [Document(f"{i}.txt", Path(f"{i}.txt"), size, i.to_bytes(2)) for i, size in enumerate(sizes)]
    parts = split_documents(documents, fraction)
    train, validation = parts["train"], parts["validation"]
    assert train
    assert validation
    assert sorted(p.document.name for p in train + validation) == sorted(d.name for d in documents)
    share, largest = (sum(p.size_bytes for p in validation) / sum(sizes)), max(sizes) / sum(sizes)
    assert share >= 0.5 * fraction or len(train) == 1
    assert share <= max(1.1 * fraction, 0.5 * fraction + largest)


def test_the_split_depends_on_nothing_but_the_source(tmp_path: Path) -> None:
    def names(folder: Path) -> list[str]:
        return [part.document.name for part in split(folder)["validation"]]

    assert names(many_files(tmp_path / "here")) == names(many_files(tmp_path / "there/deeper"))


def test_copies_of_a_file_stay_together(tmp_path: Path) -> None:
    many_files(tmp_path)
    write(tmp_path, {f"copy/{i:03d}.txt": (tmp_path / f"{i:03d}.txt").read_bytes() for i in range(40)})
    parts = split(tmp_path)
    contents = {name: {part.document.sha256 for part in parts[name]} for name in parts}
    assert not contents["train"] & contents["validation"]
    assert len(parts["validation"]) % 2 == 0


def test_few_files_give_their_tails(tmp_path: Path) -> None:
    lines = "".join(f"line {i} of the text\n" for i in range(500))
    write(tmp_path, {"a.txt": lines, "b.txt": lines[:3000]})
    parts = split(tmp_path, 0.1)
    for head, tail in zip(parts["train"], parts["validation"], strict=True):
        assert (head.start_bytes, head.stop_bytes, tail.stop_bytes) == (0, tail.start_bytes, tail.document.size_bytes)
        assert head.read().endswith(b"\n")
        assert 0.1 <= tail.size_bytes / tail.document.size_bytes <= 0.11


@given(text=st.text(st.sampled_from("ab\né€\U0001f600"), min_size=1), fraction=st.floats(0.01, 0.99))
def test_a_tail_starts_at_a_character(text: str, fraction: float) -> None:
    content = text.encode()
    cut = tail_start(content, fraction)
    assert 0 < cut <= len(content)
    assert content[:cut].decode() + content[cut:].decode() == text


@given(content=st.binary(min_size=1), fraction=st.floats(0.01, 0.99))
def test_any_bytes_have_a_tail(content: bytes, fraction: float) -> None:
    assert 0 < tail_start(content, fraction) <= len(content)


# preparing ------------------------------------------------------------------------------------------------------------


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


# samples --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("prepared")
    return prepare(section(many_files(folder / "text"), folder / "cache", validation_fraction=0.2))


@pytest.mark.parametrize("name", ["train", "validation"])
@pytest.mark.parametrize("length", [1, 7, 64, 500])
def test_samples_are_the_windows_of_the_stream(prepared: Prepared, name: str, length: int) -> None:
    stream, dataset = prepared.tokens(name), TokenDataset(prepared, name, length)
    assert len(dataset) == (len(stream) - 1) // length
    for i in {0, len(dataset) // 2, len(dataset) - 1}:
        sample = dataset[i]
        assert np.array_equal(sample.tokens, stream[i * length : i * length + length])
        assert np.array_equal(sample.targets, stream[i * length + 1 : i * length + length + 1])
        assert sample.tokens.dtype == sample.targets.dtype == np.int64
    for i in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[i]


def test_no_validation_window_is_in_the_training_text(prepared: Prepared) -> None:
    training = prepared.tokens("train").astype("<u2").tobytes()
    dataset = TokenDataset(prepared, "validation", 64)
    assert not any(dataset[i].tokens.astype("<u2").tobytes() in training for i in range(len(dataset)))


def test_fingerprints_tell_samples_apart(prepared: Prepared) -> None:
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
def test_text_shorter_than_a_sequence(tmp_path: Path, name: str) -> None:
    data = prepare(section(write(tmp_path, {"a.txt": "word " * 200}), tmp_path / "cache", validation_fraction=0.1))
    has = data.splits[name].tokens
    with pytest.raises(
        UserError, match=rf"sequence_length=5000 needs 5001 tokens, and the \w+ text has {has} "
    ) as caught:
        TokenDataset(data, name, 5000)
    fix = re.search(r"use more text, or at most data\.sequence_length=(\d+)$", str(caught.value))
    assert fix
    for each in ("train", "validation"):
        assert len(TokenDataset(data, each, int(fix[1]))) >= 1
    with pytest.raises(UserError):
        TokenDataset(data, "validation", int(fix[1]) + 1)


@pytest.mark.parametrize(
    ("text", "has", "enough_for"),
    [
        ("x", "0 (0 bytes of 0 files)", "no length at all"),
        ("four", "2 (1 byte of 1 file)", "data.sequence_length=1, too short to learn from"),
        ("ten bytes.", "2 (1 byte of 1 file)", "data.sequence_length=1, too short to learn from"),
    ],
)
def test_text_too_short_for_any_useful_sequence(tmp_path: Path, text: str, has: str, enough_for: str) -> None:
    data = prepare(section(write(tmp_path, {"a.txt": text}), tmp_path / "cache"))
    with pytest.raises(UserError) as caught:
        TokenDataset(data, "validation", 16)
    assert str(caught.value) == (
        f"data.sequence_length=16 needs 17 tokens, and the validation text has {has}; "
        f"give more text in data.path: this is enough for {enough_for}"
    )
