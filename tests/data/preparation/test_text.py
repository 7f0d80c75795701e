"""From files to documents: tokenizers, what is found, how it is split, and what is said where it is not."""

import contextlib
import errno
import glob
import json
import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serried.configs.errors import UserError
from serried.configs.schema.data import data_section
from serried.recipes.data.prepared.prepare import prepare
from serried.recipes.data.readers.find_files import find_files
from serried.recipes.data.readers.plain_text import Part, read_documents, split_documents, tail_start
from serried.recipes.data.readers.reading_progress import Progress
from serried.recipes.data.readers.source_files import Document, SourceFile, assignment
from serried.recipes.data.sources import text as text_files
from serried.recipes.data.sources.stdlib import stdlib
from serried.recipes.data.tokenizers.hugging_face_tokenizer import tokenizer_from_spec
from serried.recipes.data.tokenizers.tokenizer import BytesTokenizer, CharsTokenizer, Tokenizer, token_dtype
from tests.support.texts import everything, many_files, section, write


def files_of(path: Path | str) -> list[SourceFile]:
    return find_files(str(path), text_files.TEXT_SUFFIXES)


def found(path: Path | str) -> list[str]:
    return [file.name for file in files_of(path)]


def split(path: Path | str, fraction: float = 0.1) -> dict[str, list[Part]]:
    return split_documents(read_documents(files_of(path), Progress(None, 1)), fraction)


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
    with pytest.raises(UserError, match=rf"U\+{ord(unknown):04X}\) at position 2 .* the 2 "):
        CharsTokenizer("ab").encode(f"ab{unknown}")


def test_token_dtype_fits_the_vocabulary() -> None:
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


@pytest.mark.parametrize("pattern", ["**/*.txt", "**", "*/**/*.txt", "**/more/*.txt", "**/**/*.txt"])
def test_links_in_a_circle_end_in_a_glob(tmp_path: Path, pattern: str) -> None:
    write(tmp_path, {"text/a/a.txt": "x", "text/b/b.txt": "y", "elsewhere/c.txt": "z"})
    text = tmp_path / "text"
    (text / "a/more").symlink_to(tmp_path / "elsewhere")
    links = {"loop": text, "a/up": text, "a/beside": text / "b", "b/back": text / "a", "b/self": text / "b"}
    for name in links:
        (text / name).symlink_to(links[name])
    names = found(f"{text}/{pattern}")
    assert len(names) == len({*names}) < 20
    assert "a/more/c.txt" in names
    if "more" not in pattern:
        assert {"a/a.txt", "b/b.txt"} <= {*names}


def test_a_glob_follows_a_link_to_a_folder_beside_it(tmp_path: Path) -> None:
    write(tmp_path, {"text/a.txt": "x"})
    (tmp_path / "same").symlink_to(tmp_path / "text")
    assert found(f"{tmp_path}/**/*.txt") == ["same/a.txt", "text/a.txt"]


def test_files_behind_a_link_below_two_links_are_found_twice_as_by_glob(tmp_path: Path) -> None:
    write(tmp_path, {"text/d/a.txt": "x", "x/b.txt": "y"})
    (tmp_path / "text/d/L").symlink_to(tmp_path / "x")
    (tmp_path / "text/A").symlink_to(tmp_path / "text/d")
    pattern = f"{tmp_path}/text/**/*.txt"
    assert len(found(pattern)) == len(glob.glob(pattern, recursive=True)) == 4  # noqa: PTH207


def test_the_standard_library_is_there_without_tests() -> None:
    files = stdlib(data_section(name="stdlib", sequence_length=16))._files
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
        ("Emty.txt", r"did you mean data\.path=T/empty\.txt\?"),
        ("empty.json", r"did you mean data\.path=T/empty\.jsonl\.gz\?"),
        ("corpus.txt", r"did you mean data\.path=T/corpus\?"),
        ("wiki", r"did you mean data\.path=T/wiki\.jsonl\.gz\?"),
        ("missing.txt", r"T/missing\.txt does not exist \(looked in T\); name a file, a folder or a glob"),
        ("nope", r"T/nope does not exist \(looked in T\); name a file, a folder or a glob"),
        ("constraint.txt", r"did you mean data\.path=T/constraints\.txt\?"),
        ("constraint/a.txt", r"there is no T/constraint \(looked in T\); name a file, a folder or a glob"),
        ("zzz/qqq", r"does not exist: there is no T/zzz .*name a file"),
        ("corpus/a.txt/b", r"cannot read .*a\.txt/b.*: Not a directory"),
        ("corpus/*.csv", r"matches no file; T/corpus has a\.txt"),
        ("nope/*.csv", r"does not exist.*T"),
        ("pictures", r"none of the 2 files in it ends in \.txt .*\.png: 2.*data\.path=.*T/pictures/\*\*/\*\.png"),
        ("nothing", r"the folder has no files"),
        ("pipe", r"neither a file nor a folder"),
        ("empty.txt", r"T/empty\.txt is empty \(0 bytes\), so there is nothing to train on"),
        ("empties", r"is empty \(0 bytes\) and so are the other 1 files"),
    ],
)
def test_mistakes_in_the_path_are_refused_in_one_line(tmp_path: Path, path: str, expected: str) -> None:
    write(
        tmp_path,
        {
            "corpus/a.txt": "x",
            "constraints.txt": "x",
            "opt/a.txt": "x",
            "photo.png": "x",
            "pictures/1.png": "x",
            "pictures/2.png": "x",
            "empty.txt": "",
            "empty.jsonl.gz": "",
            "wiki.jsonl.gz": "",
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
        read_documents(files_of(tmp_path), Progress(None, 1))


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    documents = read_documents(files_of(write(tmp_path, {"a.txt": "before"})), Progress(None, 1))
    write(tmp_path, {"a.txt": "now"})
    with pytest.raises(UserError, match=r"a\.txt changed while .*\(from 6 to 3 bytes\)"):
        list(Part.of(documents[0], 0, documents[0].size_bytes, "train").rows())


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
def test_commands_to_paste_are_quoted(value: str, expected: str) -> None:
    assert assignment("k", value) == expected


# splitting ------------------------------------------------------------------------------------------------------------


def test_many_files_are_split_by_file(tmp_path: Path) -> None:
    prepared = prepare(section(many_files(tmp_path / "text"), tmp_path / "cache", validation_fraction=0.2))
    marks = {
        name: set(re.findall(r"<\d{3}>", prepared.tokenizer.decode(everything(prepared, name))))
        for name in ("train", "validation")
    }
    assert not marks["train"] & marks["validation"]
    assert len(marks["train"] | marks["validation"]) == 40
    sizes = {name: prepared.splits[name].text_bytes for name in marks}
    assert 0.1 <= sizes["validation"] / sum(sizes.values()) <= 0.22


@given(sizes=st.lists(st.integers(1, 5000), min_size=20, max_size=60), fraction=st.floats(0.001, 0.999))
@example(sizes=[1] * 19 + [5000], fraction=0.9)
@example(sizes=[1] * 20, fraction=0.999)
@example(sizes=[1, 1, 36, 30, 190, *[1] * 15], fraction=0.125)
def test_validation_files_are_about_the_fraction_and_never_all(sizes: list[int], fraction: float) -> None:
    documents = [Document(f"{i}.txt", Path(f"{i}.txt"), size, i.to_bytes(2), None) for i, size in enumerate(sizes)]
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


def test_few_files_are_split_at_their_tails(tmp_path: Path) -> None:
    lines = "".join(f"line {i} of the text\n" for i in range(500))
    write(tmp_path, {"a.txt": lines, "b.txt": lines[:3000]})
    parts = split(tmp_path, 0.1)
    for head, tail in zip(parts["train"], parts["validation"], strict=True):
        assert (head.start_bytes, tail.start_bytes) == (0, head.size_bytes)
        assert head.size_bytes + tail.size_bytes == tail.document.size_bytes
        assert head.document.read(0, head.size_bytes).endswith(b"\n")
        assert 0.1 <= tail.size_bytes / tail.document.size_bytes <= 0.11


def reader(content: bytes) -> Callable[[int, int], bytes]:
    return lambda start, stop: content[start:stop]


@given(text=st.text(st.sampled_from("ab\né€\U0001f600"), min_size=1), fraction=st.floats(0.01, 0.99))
def test_a_tail_starts_at_a_character(text: str, fraction: float) -> None:
    content = text.encode()
    cut = tail_start(reader(content), len(content), fraction)
    assert 0 < cut <= len(content)
    assert content[:cut].decode() + content[cut:].decode() == text


@given(content=st.binary(min_size=1), fraction=st.floats(0.01, 0.99))
def test_tail_of_any_bytes_can_be_taken(content: bytes, fraction: float) -> None:
    assert 0 < tail_start(reader(content), len(content), fraction) <= len(content)
