"""Small texts to find, split and prepare."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import DataSection
from recipes.data.prepare import Prepared


def section(path: Path | str, cache: Path | None = None, **changes: Any) -> DataSection:
    return DataSection(**{"name": "text", "path": str(path), "sequence_length": 16, "cache_dir": cache, **changes})


class Reading:
    """Reads a source in one thread and tells nobody."""

    def total(self, size_bytes: int) -> None: ...

    def done(self, size_bytes: int) -> None: ...

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        return map(function, items)


def everything(prepared: Prepared, split: str) -> np.ndarray:
    """All tokens of a split."""
    return prepared.stream(split).read(0, prepared.splits[split].tokens)


def documents(prepared: Prepared, split: str) -> list[str]:
    """The documents of a split as text."""
    pieces = np.split(everything(prepared, split), prepared.stream(split).all_document_starts()[1:])
    assert all(piece[-1] == prepared.tokenizer.end_id for piece in pieces)
    return [prepared.tokenizer.decode(piece) for piece in pieces]


def write(folder: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def many_files(folder: Path, count: int = 40) -> Path:
    return write(folder, {f"{i:03d}.txt": f"<{i:03d}>" * (20 + i % 7) for i in range(count)})
