"""Contents of the weight files next to a ``config.json``, read without torch."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from serried.configs.plain_data import open_regular, parse_json, read_json

_LARGEST_HEADER_BYTES = 100_000_000  # as in the safetensors library
HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
_PIECE_BYTES = 16 * 2**20


def has_head_of_its_own(folder: Path) -> bool:
    """Return whether the weights in ``folder`` have an output projection that differs from the embedding.

    False if they cannot be read, since loading them reports the error.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        files = _files(folder, "model")
        embedding = next((name for name in files if name.endswith(_EMBEDDINGS)), None)
        if HEAD in files and embedding is not None:
            pieces = [_values(folder / files[name], name) for name in (HEAD, embedding)]
            return any(ours != theirs for ours, theirs in zip(*pieces, strict=True))
    return False


def tensor_names(folder: Path, stem: str) -> list[str]:
    """Return the names of the tensors in the files ``stem`` of ``folder``.

    Raises:
        OSError, ValueError, KeyError, TypeError: The files cannot be read.
    """
    return [name for name in _files(folder, stem) if name != "__metadata__"]


def _files(folder: Path, stem: str) -> Mapping[str, str]:
    """Return the file name of each tensor."""
    single = f"{stem}.safetensors"
    if (folder / single).is_file():
        with open_regular(folder / single) as file:
            return dict.fromkeys(_header(file), single)
    names = read_json(folder / f"{single}.index.json", _LARGEST_HEADER_BYTES)["weight_map"]
    return {name: os.path.basename(file) for name, file in names.items()}  # noqa: PTH119


def _header(file: IO[bytes]) -> dict[str, Any]:
    length = int.from_bytes(file.read(8), "little")
    if length > min(_LARGEST_HEADER_BYTES, os.fstat(file.fileno()).st_size):
        raise ValueError(f"a header of {length} bytes does not fit in the file")
    header: dict[str, Any] = parse_json(file.read(length))
    return header


def _values(path: Path, name: str) -> Iterator[bytes]:
    """Yield the dtype and shape of tensor ``name`` as JSON, then its bytes."""
    with open_regular(path) as file:
        header = _header(file)
        begin, end = header[name]["data_offsets"]
        yield json.dumps([header[name]["dtype"], header[name]["shape"]]).encode()
        file.seek(begin + file.tell())
        while begin < end:
            piece = file.read(min(end - begin, _PIECE_BYTES))
            if not piece:
                raise ValueError("the file is truncated")
            yield piece
            begin += len(piece)
