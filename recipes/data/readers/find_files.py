"""Search for the files that ``data.path`` names: a file, a folder or a glob."""

import glob
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from serried.configs.bucket_paths import BucketFiles, bucket_files
from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import UserError
from serried.recipes.data.readers.source_files import SourceFile, assignment, kind_of

_MOST_FOLDERS = 200_000
_CLOSE = 0.75
"""Similarity of two names (1: equal) above which one may be a misspelling of the other."""


def find_files(typed: str, suffixes: Collection[str]) -> list[SourceFile]:
    """Return the files at ``typed``, which is a file, folder or glob, sorted by name. In a folder, only files with one
    of the ``suffixes`` are returned. Files in a bucket are downloaded; no file is opened. Raises ``UserError`` if there
    are none."""
    if is_bucket_url(typed):
        return _find_in_bucket(typed, suffixes)
    path = Path(os.path.expanduser(typed))  # noqa: PTH111 -- Path.expanduser fails for an unknown user
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            return _find_in_folder(typed, path, suffixes)
        if stat.S_ISREG(kind):
            return [SourceFile(path.name, path)]
    except FileNotFoundError:
        # Only now treated as a glob, since a file may be called "notes [old].txt".
        return _find_glob(typed, path) if glob.has_magic(typed) else _not_there(typed, path)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}; use another source: data.path=...") from error
    raise UserError(f"{assignment('data.path', typed)} is neither a file nor a folder; name a file, a folder or a glob")


def check_path(typed: str) -> None:
    """Raise ``UserError`` if ``typed`` is not a file, folder or glob. Looks only at the local disk."""
    if is_bucket_url(typed):
        return
    path = Path(os.path.expanduser(typed))  # noqa: PTH111
    if not glob.has_magic(typed):
        try:
            path.stat()
        except FileNotFoundError:
            _not_there(typed, path)
        except OSError:
            pass  # the reason is reported when it is opened


def _find_in_folder(typed: str, folder: Path, suffixes: Collection[str]) -> list[SourceFile]:
    found = list(walk(folder))
    if chosen := [file for file in found if kind_of(file.path) in suffixes]:
        return chosen
    raise _none_of(typed, folder.as_posix(), [file.name for file in found], suffixes)


def _find_in_bucket(typed: str, suffixes: Collection[str]) -> list[SourceFile]:
    found, chosen = list_bucket(typed, suffixes)
    folder = found.fetch(chosen)
    return [SourceFile(name, folder / name, f"{found.url}/{name}") for name in chosen]


def list_bucket(typed: str, suffixes: Collection[str]) -> tuple[BucketFiles, list[str]]:
    """Return the listing of the URL ``typed``, and the names in it that ``find_files`` would return. Nothing is
    downloaded."""
    found = bucket_files(typed, "data.path")
    chosen = [name for name in found.files if not found.is_folder or kind_of(name) in suffixes]
    if not chosen:
        raise _none_of(typed, typed, list(found.files), suffixes)
    return found, chosen


def _none_of(typed: str, folder: str, found: Sequence[str], suffixes: Collection[str]) -> UserError:
    """Return the error for a folder in which no file has one of the ``suffixes``."""
    wanted = " ".join(suffixes)
    if not found:
        return UserError(
            f"{assignment('data.path', typed)}: the folder has no files; put {wanted} files in it, or use another "
            "folder"
        )
    endings = Counter(Path(name).suffix for name in found).most_common(4)
    example = assignment("data.path", f"{folder}/**/*{endings[0][0]}")
    counts = ", ".join(f"{ending or 'no suffix'}: {count}" for ending, count in endings)
    return UserError(
        f"{assignment('data.path', typed)}: none of the {len(found)} files in it ends in {wanted} (it has {counts}); "
        f"select them with a glob: {example}"
    )


def _find_glob(typed: str, pattern: Path) -> list[SourceFile]:
    fixed = next(i for i, part in enumerate(pattern.parts) if glob.has_magic(part))
    root = Path(*pattern.parts[:fixed])
    matches = map(Path, sorted(_matches(str(pattern))))
    if files := [SourceFile(match.relative_to(root).as_posix(), match) for match in matches if match.is_file()]:
        return files
    if not root.exists():
        _not_there(typed, root)
    inside = sorted(entry.name for entry in root.iterdir())[:5] if root.is_dir() else []
    holds = f"{root.absolute()} has {', '.join(inside)}, ..." if inside else f"{root.absolute()} is empty"
    raise UserError(
        f"{assignment('data.path', typed)} matches no file; {holds}; ** matches subfolders, as in "
        f"{assignment('data.path', root / '**' / '*.txt')}"
    )


def _matches(pattern: str) -> set[str]:
    """Return the paths that ``pattern`` matches, like ``glob.iglob``, but without following cyclic links."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return set(glob.iglob(pattern))  # noqa: PTH207 -- Path.glob would also find hidden files
    at = parts.index("**")
    rest = parts[at + 1 :] or ("*",)
    tops = glob.iglob(str(Path(*parts[:at]))) if at else ["."]  # noqa: PTH207
    found: set[str] = set()
    for top in tops:
        for folder in _folders_below(top):
            found |= _matches(str(Path(glob.escape(folder), *rest)))
    return found


def _folders_below(top: str) -> Iterator[str]:
    """Yield ``top`` and the folders below it, except hidden ones. Links are followed, except to a folder that
    contains them. Raises ``UserError`` if there are too many folders."""
    count = 0
    left: list[tuple[str, frozenset[tuple[int, int]]]] = [(top, frozenset())]
    while left:
        folder, above = left.pop()
        try:
            status = os.stat(folder)  # noqa: PTH116
            here = (status.st_dev, status.st_ino)
            if here in above or not stat.S_ISDIR(status.st_mode):
                continue
            inside = sorted(os.scandir(folder), key=lambda entry: entry.name, reverse=True)
        except OSError:
            continue  # like glob
        count += 1
        if count > _MOST_FOLDERS:
            raise UserError(
                f"{assignment('data.path', top)}: found more than {_MOST_FOLDERS:,} folders, possibly because symbolic "
                "links form a cycle; use folders without such links: data.path=..."
            )
        yield folder
        for entry in inside:
            if not entry.name.startswith(".") and entry.is_dir():
                left.append((entry.path, above | {here}))


def walk(root: Path, leave_out: Iterable[str] = ()) -> Iterator[SourceFile]:
    """Yield regular files below ``root``, sorted by name, except hidden ones, caches and folders named in
    ``leave_out``.

    Links are followed. A folder that is reached twice is read once, since a link to a parent would lead to endless
    recursion.
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


def _not_there(typed: str, path: Path) -> list[SourceFile]:
    """Raise the error that names the missing part of ``path`` and the nearest existing name."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    there: dict[str, str] = {}
    if os.access(missing.parent, os.R_OK):
        is_last = missing == path
        entries = [entry for entry in missing.parent.iterdir() if entry.name[0] != "." and (is_last or entry.is_dir())]
        there = {entry.name.lower(): entry.name for entry in entries}
        there |= {entry.name.partition(".")[0].lower(): entry.name for entry in entries}
    what = "does not exist" if missing == path else f"does not exist: there is no {missing}"
    message = f"{assignment('data.path', typed)} {what} (looked in {missing.parent.absolute()})"
    if near := get_close_matches(missing.name.lower(), there, 1, _CLOSE):
        nearest = missing.parent / there[near[0]] / path.relative_to(missing)
        raise UserError(f"{message}; did you mean {assignment('data.path', nearest)}?")
    raise UserError(f"{message}; name a file, a folder or a glob, as in data.path='corpus/**/*.txt'")
