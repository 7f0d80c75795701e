"""Encoding of the rows of a source as tokens."""

import io
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from serried.configs.errors import UserError
from serried.recipes.data.readers.source import AtRow, Place, Row
from serried.recipes.data.readers.source_files import AROUND_BYTES, PIECE_BYTES, read_surrounded
from serried.recipes.data.tokenizers.chat_template import TooMuch
from serried.recipes.data.tokenizers.tokenizer import Tokenizer, token_dtype

_COMPARED_CHARACTERS = 1024
"""Number of characters on each side of the seam between two pieces within which the tokens of both pieces must
agree."""


class Seam(NamedTuple):
    """Tokens on both sides of the seam (the boundary between two pieces of a document), as encoded with one of the
    pieces."""

    ids: np.ndarray
    places: np.ndarray
    """[tokens], int64, offset of each token from the seam in characters"""

    words: np.ndarray
    """[tokens], int64, index of each token's word, relative to the first"""

    def is_same(self, other: "Seam | None") -> bool:
        """Return whether ``other``, from the other piece, has the same tokens and words at the same positions."""
        return other is not None and all(map(np.array_equal, self, other))


class Encoded(NamedTuple):
    """Tokens of a document or of a piece of one, including the end token."""

    tokens: np.ndarray
    """[tokens], unsigned"""
    supervised: np.ndarray | None
    """[tokens], uint8, 1 for tokens that are trained on; None if all tokens are."""
    first: Seam | None = None
    """Seam at the start of a piece; None if the previous piece need not be compared."""
    last: Seam | None = None
    """Seam at the end of a piece; None if the next piece need not be compared."""
    before: "tuple[Encoded, ...]" = ()
    """Documents of the same row that come before this one."""
    is_new: bool = False
    """Whether earlier versions of this library encoded the row differently."""
    weights: np.ndarray | None = None
    """[tokens], fp32: weight of each token in the loss; None if all are 1."""


Encoder = Callable[[Sequence[Row], str], list[Encoded | UserError]]
"""Function of (rows, name of their unit) that returns an ``Encoded`` for each row, or the error if it cannot be
encoded. The name is for messages. Pure and thread-safe. Takes many rows at once for speed."""


def encoded_rows(rows: Sequence[Row], unit: str, encode: Callable[[Row], Encoded]) -> list[Encoded | UserError]:
    """Apply ``encode`` to each row. A ``UserError`` is returned in place of the result, with the row's position added.
    ``TooMuch`` is not returned but raised."""
    found: list[Encoded | UserError] = []
    for row in rows:
        try:
            found.append(encode(row))
        except TooMuch as error:
            raise TooMuch(AtRow(row_of_unit(row, unit), str(error))) from error
        except UserError as error:
            found.append(UserError(AtRow(row_of_unit(row, unit), str(error))))
    return found


class Joiner:
    """Joins the pieces of documents so that the tokens equal the tokens of the whole document.

    Each piece is tokenized with some text before and after it, whose tokens are dropped. Two pieces are joined if both
    have the same tokens around the seam. If not, the second piece is tokenized again with the full first piece before
    it.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._before: tuple[Row, Encoded] | None = None

    def __call__(self, row: Row, document: Encoded, unit: str) -> Encoded:
        """Return the tokens of ``row``, given the encoder's result ``document``. Must be called for all rows in
        order. Raises ``UserError`` if the tokens depend on distant text."""
        if self._before is not None and document.first is not None:
            earlier, joined = self._before
            if not document.first.is_same(joined.last):
                assert isinstance(earlier.content, bytes)
                row = row._replace(before=earlier.before + earlier.content)
                (again,) = self._encoder([row], unit)
                if isinstance(again, UserError):
                    raise again
                document = again
            if document.first is None or not document.first.is_same(joined.last):
                raise UserError(
                    f"{unit} cannot be tokenized in pieces: its tokens at byte {row.offset_bytes:,} depend on text "
                    f"more than {AROUND_BYTES:,} bytes later; split the document there"
                )
        self._before = (row, document) if document.last is not None else None
        return document


class TextEncoder:
    """Encoder of text rows. A text above 1 MiB is tokenized in pieces, with the same tokens as the full text."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """``name``: name of the tokenizer in messages."""
        self._tokenizer, self._name = tokenizer, name
        dtype = token_dtype(tokenizer.vocab_size)
        self._start, self._end = np.array(tokenizer.start_ids, dtype), np.array([tokenizer.end_id], dtype)

    def __call__(self, rows: Sequence[Row], unit: str) -> list[Encoded | UserError]:
        found: dict[int, Encoded | UserError] = {}
        texts: dict[int, bytes | str] = {}
        for number, row in enumerate(rows):
            try:
                content = as_bytes(row, unit)
                is_short = len(content) <= PIECE_BYTES and row.begins and row.ends
                if self._tokenizer.splits_anywhere or is_short:
                    texts[number] = self._text(content, row.offset_bytes, row.place or unit)
                else:
                    found[number] = self._long(row, content, unit)
            except UserError as error:
                if row.place is None:
                    raise
                found[number] = error
        for number, ids in zip(texts, self._tokenizer.encode_many([*texts.values()]), strict=True):
            found[number] = self._marked(rows[number], Encoded(ids, None))
        return [found[number] for number in range(len(rows))]

    def _marked(self, row: Row, document: Encoded) -> Encoded:
        parts = [*([self._start] if row.begins else []), document.tokens, *([self._end] if row.ends else [])]
        return document._replace(tokens=np.concatenate(parts))

    def _long(self, row: Row, content: bytes, unit: str) -> Encoded:
        if not (row.begins and row.ends):
            return self._marked(row, self._piece(row._replace(content=content), unit))
        pieces = []
        offset = row.offset_bytes
        join = Joiner(lambda rows, unit: [self._piece(rows[0], unit)])
        for before, piece, after in read_surrounded(io.BytesIO(content)):
            mine = Row(row.number, piece, not before, not after, offset, before, after)
            document = self._piece(mine, unit)
            try:
                pieces.append(join(mine, document, unit).tokens)
            except UserError:  # the full text is in memory, so tokenize it at once
                pieces = [self._tokenizer.encode(content)]
                break
            offset += len(piece)
        return self._marked(row, Encoded(np.concatenate(pieces), None))

    def _piece(self, row: Row, unit: str) -> Encoded:
        """Return the tokens of a piece and its seams, without start and end tokens."""
        assert isinstance(row.content, bytes)
        offset = row.offset_bytes - len(row.before)
        texts = []
        for part in (row.before, row.content, row.after):
            texts.append(str(self._text(part, offset, unit, as_text=True)))
            offset += len(part)
        ids, places, words = self._tokenizer.encode_placed("".join(texts))
        places = np.maximum.accumulate(places)  # some tokenizers give the position of the first letter, after the space
        start, stop = len(texts[0]), len(texts[0]) + len(texts[1])

        def seam(at: int) -> Seam:
            near = slice(*np.searchsorted(places, (at - _COMPARED_CHARACTERS, at + _COMPARED_CHARACTERS)))
            return Seam(ids[near], places[near] - at, words[near] - words[near][:1])

        begin = 0 if row.begins else int(np.searchsorted(places, start))
        end = len(ids) if row.ends else int(np.searchsorted(places, stop))
        return Encoded(
            ids[begin:end], None, None if row.begins else seam(start), None if row.ends else seam(stop)
        )  # fmt: skip

    def _text(self, piece: bytes, offset_bytes: int, unit: Place | str, *, as_text: bool = False) -> bytes | str:
        try:
            return piece if self._tokenizer.takes_bytes and not as_text else piece.decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(unit, offset_bytes, error, self._name) from error


def as_bytes(row: Row, unit: str) -> bytes:
    """Return the text of a row as bytes. Raises ``UserError`` if it is not text."""
    if isinstance(row.content, bytes):
        return row.content
    if not isinstance(row.content, str):
        raise UserError(AtRow(row_of_unit(row, unit), " is a conversation, not text; use data.format=chat"))
    try:
        return row.content.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(row.content[error.start])
        said = f" contains an unpaired surrogate, U+{half:04X} (half a character); fix the row"
        raise UserError(AtRow(row_of_unit(row, unit), said)) from error


def row_of_unit(row: Row, unit: str) -> Place | str:
    """Return the name of a row in messages, such as ``chats.jsonl line 41`` or ``row 41 of data=mine``, counted from
    1."""
    return f"row {row.number + 1:,} of {unit}" if row.place is None else row.place


def not_utf8(unit: Place | str, offset_bytes: int, error: UnicodeDecodeError, tokenizer: str) -> UserError:
    """Return the error for a file that is not UTF-8."""
    return UserError(
        f"{unit} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset_bytes + error.start} of the "
        f"file ({error.reason}), but data.tokenizer={tokenizer} needs text; convert the file, or use "
        "data.tokenizer=bytes"
    )


def texts_of(rows: Iterator[Row], unit: str, tokenizer: str) -> Iterator[str]:
    """Yield the text of each row. Raises ``UserError`` if a row is not UTF-8."""
    for row in rows:
        try:
            yield as_bytes(row, unit).decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(unit, row.offset_bytes, error, tokenizer) from error
