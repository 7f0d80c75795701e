"""Read JSON and YAML from untrusted files, with limits on the kind of file, size, depth and types.

Run folders, checkpoints and model folders are shared and downloaded. A file in one may be a pipe, larger than memory,
nested until the parser's stack overflows, or a YAML document whose aliases expand to gigabytes.
"""

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeGuard

import yaml

MOST_BYTES = 16 * 2**20
MOST_DEPTH = 64
_TOO_LARGE = 2**62


class NotPlainData(ValueError):
    """Raised for a file or text that is not plain data within the limits. The message is one line with the reason."""


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading; a pipe or a device could block or never end.

    Raises:
        OSError: it cannot be opened.
        NotPlainData: it is not a regular file.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotPlainData(f"{path} is not a regular file")
    return file


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most ``most_bytes``.

    Raises:
        OSError: it cannot be read.
        NotPlainData: it is not a regular file, or larger.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size  # read(n) allocates n bytes, even for a short file
        content = file.read(min(size, most_bytes) + 1)
    if len(content) > most_bytes:
        raise NotPlainData(f"{path} is larger than {most_bytes} bytes")
    return content


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file, of any size.

    Raises:
        OSError: it cannot be read.
        NotPlainData: it is not a regular file.
    """
    with open_regular(path) as file:
        return file.read()


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON document.

    Raises:
        NotPlainData: it is not JSON in UTF-8, or nested deeper than ``MOST_DEPTH``.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise NotPlainData(f"nested deeper than {MOST_DEPTH} levels") from None
    except ValueError as error:
        raise NotPlainData(f"not JSON: {_first_line(error)}") from None
    brackets = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if brackets > MOST_DEPTH:  # fewer brackets cannot nest deeper
        _check_depth(value)
    return value


def parse_yaml(text: bytes | str) -> Any:
    """Return the value of a YAML document without aliases.

    Raises:
        NotPlainData: it is not YAML in UTF-8, has an alias, or is nested deeper than ``MOST_DEPTH``.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        # Parsing yields events one by one; building values recurses, in C without a limit, and expands aliases.
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH:
                raise NotPlainData(f"nested deeper than {MOST_DEPTH} levels")
            if isinstance(event, yaml.AliasEvent):
                raise NotPlainData(f"the YAML alias *{event.anchor} is not supported")
        return yaml.load(text, loader)
    except NotPlainData:
        raise
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError, yaml.YAMLError) as error:
        raise NotPlainData(f"not YAML: {_first_line(error)}") from None


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        OSError: it cannot be read.
        NotPlainData: it is not a JSON object within the limits.
    """
    return _object(path, parse_json(read_bytes(path, most_bytes)))


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        OSError: it cannot be read.
        NotPlainData: it is not a mapping within the limits.
    """
    return _object(path, parse_yaml(read_bytes(path)))


def read_if_there(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file; an empty one if it cannot be read."""
    try:
        return read_json(path) if path.suffix == ".json" else read_yaml(path)
    except (OSError, ValueError):
        return {}


def value_at(path: str, tree: Any) -> Any:
    """Return the value at a dotted path of nested dicts; ``None`` if there is none."""
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted name."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    dot = f"{prefix}." if prefix else ""
    return {key: leaf for name, part in tree.items() for key, leaf in flatten(part, f"{dot}{name}").items()}


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether ``value`` is a plausible number of steps, ranks or tokens."""
    return type(value) is int and 0 <= value < _TOO_LARGE


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number."""
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < _TOO_LARGE)


def _object(path: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NotPlainData(f"{path} does not contain a mapping of names to values")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MOST_DEPTH):
        parts = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        if not parts:
            return
        level = [item for part in parts for item in part]
    raise NotPlainData(f"nested deeper than {MOST_DEPTH} levels")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def expanded(name: str) -> Path:
    """Return ``name`` as a path with ``~`` expanded; unchanged if there is no such user."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 -- that of Path fails if there is no such user
