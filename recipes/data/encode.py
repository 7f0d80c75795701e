"""Rows of a source as tokens."""

import io
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from serried.configs.errors import UserError
from serried.recipes.data.files import PIECE_BYTES, read_pieces
from serried.recipes.data.source import Row
from serried.recipes.data.tokenizer import Tokenizer, token_dtype


class Encoded(NamedTuple):
    """One document, or a piece of one, as tokens, including the end mark."""

    tokens: np.ndarray
    """[tokens], unsigned"""
    supervised: np.ndarray | None
    """[tokens], uint8, 1 for those that are trained on; None: all of them."""


Encoder = Callable[[Sequence[Row], str], list[Encoded]]
"""Turns rows, and the name of their unit for messages, into one ``Encoded`` per row. Pure and thread-safe; takes many
rows at once, for speed. Raises ``UserError`` for a row that cannot be encoded."""


class TextEncoder:
    """Encoder of rows of text. More than 1 MiB is tokenized in pieces."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """``name``: name of the tokenizer in messages."""
        self._tokenizer, self._name = tokenizer, name
        dtype = token_dtype(tokenizer.vocab_size)
        self._start, self._end = np.array(tokenizer.start_ids, dtype), np.array([tokenizer.end_id], dtype)

    def __call__(self, rows: Sequence[Row], unit: str) -> list[Encoded]:
        pieces = [_pieces(as_bytes(row, unit)) for row in rows]
        texts = [self._text(piece, row, unit) for row, mine in zip(rows, pieces, strict=True) for piece in mine]
        ids = iter(self._tokenizer.encode_many(texts))
        encoded = []
        for row, mine in zip(rows, pieces, strict=True):
            parts = [self._start] if row.begins else []
            parts += [next(ids) for _ in mine]
            parts += [self._end] if row.ends else []
            encoded.append(Encoded(np.concatenate(parts), None))
        return encoded

    def _text(self, piece: bytes, row: Row, unit: str) -> bytes | str:
        try:
            return piece if self._tokenizer.takes_bytes else piece.decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(unit, row.offset_bytes, error, self._name) from error


def _pieces(content: bytes) -> list[bytes]:
    return [content] if len(content) <= PIECE_BYTES else list(read_pieces(io.BytesIO(content)))


def as_bytes(row: Row, unit: str) -> bytes:
    """Return the text of a row as bytes; raise ``UserError`` if it is not text."""
    if isinstance(row.content, bytes):
        return row.content
    if not isinstance(row.content, str):
        raise UserError(f"{row_of_unit(row, unit)} is a conversation, not text; use data.format=chat")
    try:
        return row.content.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(row.content[error.start])
        raise UserError(
            f"{row_of_unit(row, unit)} holds half a character (U+{half:04X}), an unpaired surrogate; fix the row"
        ) from error


def row_of_unit(row: Row, unit: str) -> str:
    """Name of a row in messages, such as ``row 41 of chats.jsonl``; counted from 1."""
    return f"row {row.number + 1:,} of {unit}"


def not_utf8(unit: str, offset_bytes: int, error: UnicodeDecodeError, tokenizer: str) -> UserError:
    """The error for a file that is not UTF-8."""
    return UserError(
        f"{unit} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset_bytes + error.start} of the "
        f"file ({error.reason}), and data.tokenizer={tokenizer} needs characters; convert the file or use "
        "data.tokenizer=bytes"
    )


def texts_of(rows: Iterator[Row], unit: str, tokenizer: str) -> Iterator[str]:
    """Yield the text of each row; raise ``UserError`` if one is not UTF-8."""
    for row in rows:
        try:
            yield as_bytes(row, unit).decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(unit, row.offset_bytes, error, tokenizer) from error
