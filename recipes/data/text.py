"""Sources of text: where the documents are, and which part of each is kept for validation.

A source is a list of files; a file is a document. Everything here is a function of the relative names and the content
of the files alone, so that two machines with the same text get the same split.
"""

import difflib
import glob
import hashlib
import math
import os
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.errors import UserError
from configs.schema import DataSection

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
"""What is read when ``data.path`` is a folder. A file that is named, by itself or by a glob, may end in anything."""

WHOLE_FILES_FROM = 20
"""From this many distinct files on, validation takes whole files; below, the tail of each."""

_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib-dynload"}
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """A file that was found and not yet read. ``name`` is its path relative to the source, with ``/`` between parts."""

    name: str
    path: Path


@dataclass(frozen=True)
class Document:
    """A file that was read once, so that its content is known by its hash."""

    name: str
    path: Path
    size_bytes: int
    sha256: bytes

    def read(self) -> bytes:
        """The content: what was hashed, or a ``UserError`` where the file has changed since."""
        content = _read(self.path)
        if hashlib.sha256(content).digest() != self.sha256:
            raise UserError(
                f"{self.path} changed while it was being prepared (from {self.size_bytes} to {len(content)} bytes); "
                "run again when nothing writes to it"
            )
        return content

    def read_text(self) -> str:
        """The content as characters; a ``UserError`` where it is not UTF-8."""
        content = self.read()
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.path} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start} of "
                f"{len(content)} ({error.reason}), and data.tokenizer=chars needs characters; "
                "convert the file or use data.tokenizer=bytes"
            ) from error


@dataclass(frozen=True)
class Part:
    """Bytes ``start_bytes`` up to ``stop_bytes`` of a document."""

    document: Document
    start_bytes: int
    stop_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes

    def read(self) -> bytes:
        """The content of this part."""
        return self.document.read()[self.start_bytes : self.stop_bytes]


def assignment(key: str, value: str | os.PathLike[str]) -> str:
    """``key=value`` as a shell and Hydra take it: quoted only where the value has characters of theirs."""
    value = str(value)
    if re.fullmatch(r"[\w./~+@%-]+", value):
        return f"{key}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("'", "'\\''")
    return f"'{key}=\"{escaped}\"'"


# finding --------------------------------------------------------------------------------------------------------------


def find_files(section: DataSection) -> list[SourceFile]:
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
    """The standard library's sources: no tests, nothing installed later, nothing generated for one machine."""
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
        return _find_glob(typed, path) if glob.has_magic(typed) else _refuse_missing(typed, path)
    if stat.S_ISDIR(kind):
        return _find_in_folder(typed, path)
    if stat.S_ISREG(kind):
        return [SourceFile(path.name, path)]
    raise UserError(f"{assignment('data.path', typed)} is neither a file nor a folder; name a file, a folder or a glob")


def _find_in_folder(typed: str, folder: Path) -> list[SourceFile]:
    found = list(_walk(folder))
    files = [file for file in found if file.path.suffix.lower() in TEXT_SUFFIXES]
    if files:
        return files
    wanted = " ".join(TEXT_SUFFIXES)
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


def _find_glob(typed: str, pattern: Path) -> list[SourceFile]:
    fixed = next(i for i, part in enumerate(pattern.parts) if glob.has_magic(part))
    root = Path(*pattern.parts[:fixed])
    # Not Path.glob, which would take hidden files too.
    matches = (Path(match) for match in glob.iglob(str(pattern), recursive=True))  # noqa: PTH207
    files = {match.relative_to(root).as_posix(): match for match in matches if match.is_file()}
    if not files:
        if not root.exists():
            _refuse_missing(typed, root)
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


def _refuse_missing(typed: str, path: Path) -> list[SourceFile]:
    """Say which part of the path is missing and what is there instead."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    parent = missing.parent
    try:
        there = sorted(entry.name for entry in parent.iterdir())
    except OSError:
        there = []
    near = difflib.get_close_matches(missing.name, there, n=1, cutoff=0.5)
    what = "does not exist" if missing == path else f"does not exist, for there is no {missing}"
    message = f"{assignment('data.path', typed)} {what} (looked in {parent.absolute()})"
    if near:
        nearest = parent / near[0] / path.relative_to(missing)
        raise UserError(f"{message}; did you mean {assignment('data.path', nearest)}?")
    raise UserError(f"{message}; name a file, a folder or a glob, as in data.path='corpus/**/*.txt'")


# reading --------------------------------------------------------------------------------------------------------------


def read_documents(files: Sequence[SourceFile]) -> list[Document]:
    """Hash every file. Empty ones are left out; all of them empty, or one unreadable, is a ``UserError``."""
    documents = []
    for file in files:
        sha256, size_bytes = hashlib.sha256(), 0
        try:
            with file.path.open("rb") as stream:
                while block := stream.read(_READ_BYTES):
                    sha256.update(block)
                    size_bytes += len(block)
        except OSError as error:
            raise _unreadable(file.path, error) from error
        if size_bytes:
            documents.append(Document(file.name, file.path, size_bytes, sha256.digest()))
    if not documents:
        others = f" and so are the other {len(files) - 1} files" if len(files) > 1 else ""
        raise UserError(
            f"{files[0].path} is empty (0 bytes){others}: nothing to train on; name another source: data.path=..."
        )
    return documents


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror}; make it readable, or leave it out with data.path=...")


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
        split[name].append(Part(document, 0, document.size_bytes))
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
        cut = tail_start(document.read(), fraction)
        split["train"].append(Part(document, 0, cut))
        if cut < document.size_bytes:
            split["validation"].append(Part(document, cut, document.size_bytes))
    return split


def tail_start(content: bytes, fraction: float) -> int:
    """Offset in bytes at which about the last ``fraction`` of ``content`` starts.

    Preferably after a line end, as long as the tail is not doubled by that; else at the start of a UTF-8 character.
    Never 0: the head, which is trained on, keeps at least one byte.
    """
    tail_bytes = math.ceil(len(content) * fraction)
    cut = max(1, len(content) - tail_bytes)
    line_end = content.rfind(b"\n", max(0, cut - tail_bytes), cut)
    if line_end >= 0:
        return line_end + 1
    # Back to the start of a character (0b10...... is inside of one), else on to the next. What is no UTF-8 has none.
    near = (*range(cut, max(0, cut - 4), -1), *range(cut + 1, min(cut + 4, len(content) + 1)))
    return next((at for at in near if at == len(content) or content[at] & 0xC0 != 0x80), cut)
