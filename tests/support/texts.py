"""Small texts to find, split and prepare, and tokens that were prepared."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from serried.configs.schema.data import DataSection, data_section
from serried.recipes.data.prepared.prepare import Prepared
from serried.recipes.data.prepared.token_shards import Shard, ShardWriter, TokenStream
from serried.recipes.data.readers.source import Place
from serried.recipes.data.tokenizers.encode_rows import Encoded
from serried.recipes.data.tokenizers.tokenizer import BytesTokenizer


def section(path: Path | str, cache: Path | None = None, **changes: Any) -> DataSection:
    return data_section(
        **{
            "name": "text",
            "path": str(path),
            "sequence_length": 16,
            "cache_dir": None if cache is None else str(cache),
            **changes,
        }
    )


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


@dataclass(frozen=True)
class Documents:
    """Documents of tokens on disk, in shards as preparation writes them: what a dataset takes from prepared data."""

    shards: dict[str, list[Shard]]
    key: str = "documents"
    tokenizer: BytesTokenizer = field(default_factory=BytesTokenizer)

    def stream(self, split: str) -> TokenStream:
        return TokenStream(self.shards[split])

    place = Prepared.place


def write_documents(
    folder: Path,
    documents: Sequence[Sequence[int]],
    *,
    supervised: Sequence[Sequence[int]] | None = None,
    shards: int = 1,
) -> Documents:
    """Write ``documents`` (and which of their tokens are learned) as the training split, dealt to ``shards``."""
    written = []
    for number in range(shards):
        # A shard may end anywhere in the stream; these end with a document, and some may have none.
        part = range(len(documents) * number // shards, len(documents) * (number + 1) // shards)
        with ShardWriter(folder, f"train-{number}", np.dtype(np.uint16)) as writer:
            for place in part:
                flags = None if supervised is None else np.array(supervised[place], np.uint8)
                encoded = Encoded(np.array(documents[place], np.uint16), flags)
                writer.add(encoded, begins=True, place=Place("chats.parquet", place, "row"))
        written += [writer.shard()] if part else []
    return Documents({"train": written, "validation": []})
