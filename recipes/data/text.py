"""Files of plain text: finding them, and splitting them into training and validation.

A file is a document. Everything here is a function of the relative names and the content of the files alone, so that
two machines with the same text get the same split.
"""

import difflib
import glob
import hashlib
import math
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.schema import SourceSection
from serried.recipes.data.files import (
    PIECE_BYTES,
    SourceFile,
    Stamp,
    assignment,
    files_state,
    key_of_files,
    kind_of,
    open_plain,
    read_pieces,
    size_of,
    skip,
    stamp_of,
    unchanged,
    unreadable,
)
from serried.recipes.data.source import SPLITS, Reading, Row, WithoutEmpty

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
"""Files that are one document each, when ``data.path`` is a folder. One that is named may end in anything."""

ROW_SUFFIXES = (".jsonl", ".parquet")
"""Files that hold a document in each row."""

WHOLE_FILES_FROM = 20
"""From this many distinct files on, validation takes whole files; below, the tail of each."""

_CLOSE = 0.75
"""Likeness of two names (1: equal) above which one may be a slip of the other."""

_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib-dynload"}


@dataclass(frozen=True)
class Document:
    """A file that was read once, so that its content is known by its hash."""

    name: str
    path: Path
    size_bytes: int
    """Decompressed."""
    sha256: bytes
    stamp: Stamp | None
    """What the file was then; None: it is not looked at again."""

    def read(self, start_bytes: int, stop_bytes: int) -> bytes:
        """Bytes ``start_bytes`` up to ``stop_bytes``; a ``UserError`` where the file has changed since."""
        with unchanged(self.path, self.stamp), open_plain(self.path) as stream:
            skip(stream, start_bytes)
            return stream.read(stop_bytes - start_bytes)


@dataclass(frozen=True)
class Part(WithoutEmpty):
    """Bytes ``start_bytes`` up to ``stop_bytes`` of a document: a unit of one row, which may come in pieces."""

    document: Document
    start_bytes: int
    stop_bytes: int
    split: str | None = None

    @property
    def name(self) -> str:
        return str(self.document.path)

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes

    def all_rows(self, first: int = 0) -> Iterator[Row]:
        if first:
            return
        offset = self.start_bytes
        with unchanged(self.document.path, self.document.stamp), open_plain(self.document.path) as stream:
            skip(stream, offset)
            for piece, following in pairwise(chain(read_pieces(stream, self.size_bytes), [b""])):
                yield Row(0, piece, offset == self.start_bytes, not following, offset)
                offset += len(piece)


class TextFiles:
    """Files of text as a source: the split is known from the whole, before a document is read."""

    noun = "file"

    def __init__(self, section: SourceSection, files: Sequence[SourceFile], validation_fraction: float | None) -> None:
        """``validation_fraction`` None: nothing is kept aside."""
        self.section, self._files, self._fraction = section, files, validation_fraction
        self._documents: list[Document] | None = None

    def identity(self) -> list[str]:
        return [os.path.commonpath([file.path.absolute() for file in self._files])]

    def state(self) -> str | None:
        return files_state(self._files)

    def fingerprint(self, reading: Reading) -> bytes:
        self._documents = read_documents(self._files, reading)
        files = [SourceFile(document.name, document.path) for document in self._documents]
        return key_of_files(files, [document.sha256 for document in self._documents])

    def units(self) -> list[Part]:
        assert self._documents is not None, "fingerprint comes first"
        if self._fraction is None:
            return [Part(document, 0, document.size_bytes) for document in self._documents]
        parts = split_documents(self._documents, self._fraction)
        return [part for split in SPLITS for part in parts[split]]


# finding --------------------------------------------------------------------------------------------------------------


def find_files(section: SourceSection) -> list[SourceFile]:
    """All files of the source, sorted by name. Reads none of them. Raises ``UserError`` where there are none."""
    try:
        if section.name == "stdlib":
            return _find_stdlib(Path(sysconfig.get_paths()["stdlib"]))
        assert section.path is not None  # the schema sees to it
        return _find_text(section.path)
    except OSError as error:
        raise UserError(
            f"cannot look at {error.filename} for training text: {error.strerror}; name another source: data.path=..."
        ) from error


def _find_stdlib(root: Path) -> list[SourceFile]:
    """Sources of the standard library, without tests, installed packages and files generated for one machine."""
    files = [
        file
        for file in _walk(root, leave_out=_NOT_STDLIB)
        if file.name.endswith(".py") and not file.name.startswith(("_sysconfigdata", "config-"))
    ]
    if not files:
        raise UserError(
            f"data=stdlib: this Python keeps no .py files in {root}; train on your own text: "
            "data=text data.path=FILE_OR_FOLDER_OR_GLOB"
        )
    return files


def _find_text(typed: str) -> list[SourceFile]:
    path = Path(typed).expanduser() if typed.startswith("~") else Path(typed)
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        # Only now a glob: a file may well be called "notes [old].txt".
        if glob.has_magic(typed):
            return _find_glob(typed, path)
        raise no_such_path(typed, path) from None
    if stat.S_ISDIR(kind):
        return _find_in_folder(typed, path)
    if stat.S_ISREG(kind):
        return [SourceFile(path.name, path)]
    raise UserError(f"{assignment('data.path', typed)} is neither a file nor a folder; name a file, a folder or a glob")


def _find_in_folder(typed: str, folder: Path) -> list[SourceFile]:
    found = list(_walk(folder))
    texts = [file for file in found if kind_of(file.path) in TEXT_SUFFIXES]
    rows = [file for file in found if kind_of(file.path) in ROW_SUFFIXES]
    if texts and rows:
        raise UserError(
            f"{assignment('data.path', typed)} holds both files of text ({texts[0].name}: {len(texts)}) and files of "
            f"rows ({rows[0].name}: {len(rows)}); name one kind with a glob: "
            f"{assignment('data.path', folder / '**' / f'*{_ending(rows[0])}')} or "
            f"{assignment('data.path', folder / '**' / f'*{_ending(texts[0])}')}"
        )
    if texts or rows:
        return texts or rows
    wanted = " ".join((*TEXT_SUFFIXES, *ROW_SUFFIXES))
    if not found:
        raise UserError(
            f"{assignment('data.path', typed)}: the folder holds no files; put {wanted} files in it or name another"
        )
    suffixes = Counter(file.path.suffix or "no suffix" for file in found).most_common(4)
    suffix = next((s for s, _ in suffixes if s != "no suffix"), "")
    raise UserError(
        f"{assignment('data.path', typed)}: none of the {len(found)} files in it ends in {wanted} (there is "
        f"{', '.join(f'{name}: {count}' for name, count in suffixes)}); name them with a glob: "
        f"{assignment('data.path', folder / '**' / f'*{suffix}')}"
    )


def _ending(file: SourceFile) -> str:
    """``.jsonl.gz`` for ``a.jsonl.gz``."""
    kind, suffix = kind_of(file.path), file.path.suffix
    return suffix if suffix.lower() == kind else kind + suffix


def _find_glob(typed: str, pattern: Path) -> list[SourceFile]:
    fixed = next(i for i, part in enumerate(pattern.parts) if glob.has_magic(part))
    root = Path(*pattern.parts[:fixed])
    # Not Path.glob, which would take hidden files too.
    matches = (Path(match) for match in glob.iglob(str(pattern), recursive=True))  # noqa: PTH207
    files = {match.relative_to(root).as_posix(): match for match in matches if match.is_file()}
    if not files:
        if not root.exists():
            raise no_such_path(typed, root)
        inside = sorted(entry.name for entry in root.iterdir())[:5] if root.is_dir() else []
        holds = f"{root.absolute()} holds {', '.join(inside)}, ..." if inside else f"{root.absolute()} is empty"
        raise UserError(
            f"{assignment('data.path', typed)} matches no file; {holds}; ** matches folders below, as in "
            f"{assignment('data.path', root / '**' / '*.txt')}"
        )
    return [SourceFile(name, files[name]) for name in sorted(files)]


def _walk(root: Path, leave_out: Iterable[str] = ()) -> Iterator[SourceFile]:
    """Regular files below ``root``, sorted by name, without hidden ones, caches and folders called as in ``leave_out``.

    Links are followed; a folder reached twice is read once, for a link to a parent would never end.
    """
    skipped = {"__pycache__", *leave_out}
    seen: set[tuple[int, int]] = set()
    names: list[str] = []

    def refuse(error: OSError) -> None:
        raise error

    for folder, subfolders, files in os.walk(root, followlinks=True, onerror=refuse):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        relative = Path(folder).relative_to(root)
        names += [(relative / name).as_posix() for name in files if not name.startswith(".")]
    for name in sorted(names):
        if (root / name).is_file():
            yield SourceFile(name, root / name)


def no_such_path(typed: str, path: Path) -> UserError:
    """Return the error that names the missing part of the path and what exists."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    parent = missing.parent
    try:
        there: dict[str, list[Path]] = {}
        for entry in parent.iterdir():
            there.setdefault(_stem(entry.name), []).append(entry)
        stems = difflib.get_close_matches(_stem(missing.name), there, n=10, cutoff=_CLOSE)  # fast, of very many files
        alike = [each for stem in stems for each in there[stem] if _is_alike(each, missing, is_last=missing == path)]
        near = [(_likeness(each.name, missing.name), each) for each in alike]
    except OSError:
        near = []
    what = "does not exist" if missing == path else f"does not exist: there is no {missing}"
    message = f"{assignment('data.path', typed)} {what} (looked in {parent.absolute()})"
    if near:
        nearest = max(near)[1] / path.relative_to(missing)
        return UserError(f"{message}; did you mean {assignment('data.path', nearest)}?")
    return UserError(f"{message}; name a file, a folder or a glob, as in data.path='corpus/**/*.txt'")


def _is_alike(entry: Path, missing: Path, *, is_last: bool) -> bool:
    """Whether ``entry`` is of a kind with what was typed as ``missing``, the last part of a path or one before it."""
    if entry.name.startswith("."):
        return False
    if entry.is_dir():
        return not is_last or not missing.suffix or entry.name == missing.stem
    return is_last and (not missing.suffix or kind_of(entry) in (kind_of(missing), *TEXT_SUFFIXES, *ROW_SUFFIXES))


def _likeness(one: str, other: str) -> tuple[float, float]:
    """Of two names without their endings, which must not be all that is alike; then of the whole names."""
    stems, names = (_stem(one), _stem(other)), (one.lower(), other.lower())
    of_stems, of_names = (difflib.SequenceMatcher(None, *pair).ratio() for pair in (stems, names))
    return of_stems, of_names


def _stem(name: str) -> str:
    """``name`` without its ending, also where that has a compression behind it."""
    name = name.lower()
    return name.removesuffix(Path(name).suffix).removesuffix(kind_of(name))


# reading --------------------------------------------------------------------------------------------------------------


def read_documents(files: Sequence[SourceFile], reading: Reading) -> list[Document]:
    """Hash every file. Empty ones are left out; all of them empty, or one unreadable, is a ``UserError``."""

    def hashed(file: SourceFile) -> Document:
        sha256, size_bytes = hashlib.sha256(), 0
        try:
            stamp = stamp_of(file.path.stat())
        except OSError as error:
            raise unreadable(file.path, error) from error
        with unchanged(file.path, stamp), open_plain(file.path) as stream:
            while block := stream.read(PIECE_BYTES):
                sha256.update(block)
                size_bytes += len(block)
        reading.done(stamp[1])
        return Document(file.name, file.path, size_bytes, sha256.digest(), stamp)

    reading.total(sum(size_of(file) for file in files))
    documents = [document for document in reading.map(hashed, files) if document.size_bytes]
    if not documents:
        others = f" and so are the other {len(files) - 1} files" if len(files) > 1 else ""
        raise UserError(
            f"{files[0].path} is empty (0 bytes){others}: nothing to train on; name another source: data.path=..."
        )
    return documents


# splitting ------------------------------------------------------------------------------------------------------------


def split_documents(documents: Sequence[Document], validation_fraction: float) -> dict[str, list[Part]]:
    """Cut the source into ``train`` and ``validation`` so that no byte is in both.

    With at least ``WHOLE_FILES_FROM`` distinct files, whole files go to validation, in the order of a hash of their
    names until ``validation_fraction`` of the bytes is there, leaving out what would overshoot it by a tenth; files of
    equal content go together. With fewer, the tail of each file goes there. Both keep the order of ``documents``.
    """
    groups: dict[bytes, list[Document]] = {}
    for document in documents:
        groups.setdefault(document.sha256, []).append(document)
    if len(groups) < WHOLE_FILES_FROM:
        return _split_tails(documents, validation_fraction)
    kept = _choose_groups(groups, validation_fraction)
    split: dict[str, list[Part]] = {"train": [], "validation": []}
    for document in documents:
        name = "validation" if document.sha256 in kept else "train"
        split[name].append(Part(document, 0, document.size_bytes, name))
    return split


def _choose_groups(groups: dict[bytes, list[Document]], fraction: float) -> set[bytes]:
    """Contents that go to validation."""
    size_bytes = {content: sum(d.size_bytes for d in group) for content, group in groups.items()}
    wanted_bytes = fraction * sum(size_bytes.values())
    # surrogateescape: a file name need not be UTF-8.
    order = sorted(groups, key=lambda c: hashlib.sha256(groups[c][0].name.encode("utf-8", "surrogateescape")).digest())
    kept: set[bytes] = set()
    kept_bytes = 0
    for content in order[:-1]:  # at least the last is trained on
        # A file that alone is more than is wanted would be a poor sample of the source.
        if kept_bytes < wanted_bytes and kept_bytes + size_bytes[content] <= 1.1 * wanted_bytes:
            kept.add(content)
            kept_bytes += size_bytes[content]
    rest = sorted((content for content in order if content not in kept), key=size_bytes.__getitem__)
    for content in rest[:-1]:
        if kept_bytes >= 0.5 * wanted_bytes:
            break
        kept.add(content)
        kept_bytes += size_bytes[content]
    return kept


def _split_tails(documents: Sequence[Document], fraction: float) -> dict[str, list[Part]]:
    split: dict[str, list[Part]] = {"train": [], "validation": []}
    for document in documents:
        cut = tail_start(document.read, document.size_bytes, fraction)
        split["train"].append(Part(document, 0, cut, "train"))
        if cut < document.size_bytes:
            split["validation"].append(Part(document, cut, document.size_bytes, "validation"))
    return split


def tail_start(read: Callable[[int, int], bytes], size_bytes: int, fraction: float) -> int:
    """Offset in bytes at which about the last ``fraction`` of a text starts.

    Preferably after a line end, as long as the tail is not doubled by that, nor a mebibyte longer; else at the start
    of a UTF-8 character. Never 0: the head, which is trained on, keeps at least one byte. ``read(start, stop)`` gives
    the text.
    """
    tail_bytes = math.ceil(size_bytes * fraction)
    cut = max(1, size_bytes - tail_bytes)
    start = max(0, cut - min(tail_bytes, PIECE_BYTES))
    line_end = read(start, cut).rfind(b"\n")
    if line_end >= 0:
        return start + line_end + 1
    # Back to the start of a character (0b10...... is inside of one), else on to the next. What is no UTF-8 has none.
    low, high = max(0, cut - 4), min(cut + 4, size_bytes)
    around = read(low, high + 1)
    near = (*range(cut, low, -1), *range(cut + 1, high + 1))
    return next((at for at in near if at == size_bytes or around[at - low] & 0xC0 != 0x80), cut)
