"""Small texts to find, split and prepare."""

from pathlib import Path
from typing import Any

from configs.schema import DataSection


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
