"""Dataset that is streamed during training, as lanes of documents that are each read from front to back.

A step takes one sequence from each lane, so the number of lanes equals the global batch size: the sequence at position
p of every step belongs to lane p. On every parallel layout, a lane is read in order by one rank, and its content
depends only on the lane number. The position of a lane is a cursor of four integers. A run that resumes, on any number
of ranks, continues from the cursors of all lanes.
"""

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from serried.configs.errors import UserError
from serried.recipes.data.readers.source import Row, Unit
from serried.recipes.data.samples.token_dataset import Sample, positions_in_documents
from serried.recipes.data.tokenizers.encode_rows import Encoder
from serried.recipes.models.layers.lm_head import IGNORE

_ROWS_AT_ONCE = 16
_CHARACTERS_AT_ONCE = 1 << 16
"""Limits of the rows and characters that are tokenized at once. Each lane keeps up to this much in memory."""

_BALANCED = 2
"""Number of parts per lane above which some lanes may have one part more than others."""

_ENDLESS = 2**62

_ATTEMPTS = 8
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0  # so that all attempts take about two minutes
_NETWORK_LIBRARIES = ("aiohttp", "fsspec", "httpcore", "httpx", "requests", "urllib3")


class Cursor(NamedTuple):
    """Position of a lane in its documents."""

    epoch: int = 0
    place: int = 0
    """Index of the unit in the order in which the lane reads its units in this epoch."""
    row: int = 0
    token: int = 0
    """Index of the token in the row's document."""


@dataclass(frozen=True)
class Deal:
    """Assignment of units and their rows to lanes.

    Units are assigned to lanes round-robin. If there are too few units for a balanced assignment, each unit is first
    split into ``cut`` parts, each with every ``cut``-th row. Each lane then reads the full unit and keeps the rows of
    its part.
    """

    units: int
    lanes: int
    seed: int

    @cached_property
    def cut(self) -> int:
        """Number of parts that each unit is split into."""
        cut = -(-self.lanes // self.units)
        while self.units * cut % self.lanes and self.units * cut < _BALANCED * self.lanes:
            cut += 1
        return cut

    def part(self, lane: int, epoch: int, place: int) -> tuple[int, int] | None:
        """Return the unit that the lane reads at index ``place`` of an epoch, and the remainder r of its part, which
        has the rows with ``number % cut == r``. None if the epoch is over."""
        cut = self.cut
        count = len(range(lane, self.units * cut, self.lanes))
        if place >= count:
            return None
        order = sorted(range(count), key=lambda i: self._key(f"{lane} {epoch} {i}"))
        return divmod(self._dealt[lane + order[place] * self.lanes], cut)

    @cached_property
    def _dealt(self) -> list[int]:
        """Parts in the order of assignment. It is shuffled, so that different lanes read neighboring parts at different
        times."""
        return sorted(range(self.units * self.cut), key=lambda part: self._key(f"part {part}"))

    def _key(self, text: str) -> bytes:
        return hashlib.blake2b(f"{self.seed} {text}".encode(), digest_size=16).digest()


class StreamDataset:
    """Streamed dataset. Sample i is the next sequence of lane i mod ``lanes``.

    The samples of a lane are read once and in order. A sequence has the tokens of consecutive documents, and its last
    target is the first input token of the next sequence. May be called from any number of threads: a call for a later
    sample of a lane waits for the earlier ones.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        encoder: Encoder,
        is_training: Callable[[Row, str], bool],
        deal: Deal,
        *,
        sequence_length: int,
        isolate_documents: bool,
        remembered: int,
        identity: str,
        earlier: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Open the lanes without reading.

        Args:
            is_training: function of (row, name of its unit) that returns whether the row is trained on.
            remembered: number of past samples of each lane for which ``state`` can still be called.
            identity: identity of the encoder and of the training split.
            earlier: mapping from identities of the same data in earlier versions to a description of the change.
        """
        self._documents = _Documents(units, encoder, is_training, deal)
        self._deal = deal
        self._sequence_length = sequence_length
        self._isolate = isolate_documents
        self._remembered = remembered
        self._starts = dict.fromkeys(range(deal.lanes), Cursor())
        self._first_sample, self._has_restarted = 0, False
        self._lanes: dict[int, _Lane] = {}
        self._lock = threading.Lock()
        names = [[unit.name.rpartition("/")[2], unit.size_bytes] for unit in units]

        def fingerprint(identity: str) -> str:
            text = json.dumps([names, deal.lanes, sequence_length, deal.seed, isolate_documents, identity])
            return hashlib.sha256(text.encode()).hexdigest()[:32]

        self.fingerprint = fingerprint(identity)
        """Identity of the samples, equal on every machine. It depends on the names and sizes of files, not on their
        content."""
        self.earlier_fingerprints = {fingerprint(old): change for old, change in earlier.items()}
        """Mapping from fingerprints of the same data in earlier versions to a description of the change."""

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Sample:
        number, lane = divmod(index, self._deal.lanes)
        return self._lane(lane).take(number)

    def describe(self) -> str:
        """Describe how the data is read, for the printed plan."""
        cut = self._deal.cut
        again = f"; each of them is read by {cut} lanes, which share its rows" if cut > 1 else ""
        anew = "; started again from the beginning, as the checkpoint has other lanes" if self._has_restarted else ""
        units = len(self._documents.units)
        return f"streamed: {self._deal.lanes} lanes over {units:,} files or parts of files{again}{anew}"

    def state(self, samples: int) -> dict[str, Any]:
        """Return the cursors of the lanes that this process reads, after ``samples`` samples of the run on all
        ranks."""
        if samples == self._first_sample:  # some lanes may not have been opened yet
            return {str(lane): list(cursor) for lane, cursor in self._starts.items()}
        with self._lock:
            lanes = dict(self._lanes)
        return {str(number): list(lane.cursor(self._first(number, samples))) for number, lane in lanes.items()}

    def load(self, state: dict[str, Any], samples: int) -> None:
        """Continue from the cursors of all lanes after ``samples`` samples. Must be called before the first sample is
        read.

        If ``state`` has a different number of lanes, it is not used and every lane starts from the beginning.
        """
        self._first_sample = samples
        self._has_restarted = len(state) != self._deal.lanes
        if not self._has_restarted:
            self._starts = {int(lane): Cursor(*cursor) for lane, cursor in state.items()}

    def rewind(self, samples: int) -> None:
        """Go back to the position after ``samples`` samples, by at most ``remembered`` samples of each lane."""
        cursors = {int(lane): Cursor(*cursor) for lane, cursor in self.state(samples).items()}
        # Initial cursors are outdated for lanes of other ranks, except for lanes that no step has used.
        still = {
            lane: cursor
            for lane, cursor in self._starts.items()
            if self._first(lane, samples) == self._first(lane, self._first_sample)
        }
        self._first_sample, self._starts = samples, still | cursors
        self._lanes.clear()
        self._documents.closed.clear()

    def close(self) -> None:
        """Interrupt waiting between retries of failed network reads."""
        self._documents.closed.set()

    def _first(self, lane: int, samples: int) -> int:
        """Return the index, within ``lane``, of its first sample after the first ``samples`` samples of the run."""
        return -(-(samples - lane) // self._deal.lanes)

    def _lane(self, number: int) -> "_Lane":
        with self._lock:
            if number not in self._lanes:
                cursor = self._starts[number]
                self._lanes[number] = _Lane(
                    self._documents.of_lane(number, cursor),
                    self._first(number, self._first_sample),
                    cursor,
                    self._sequence_length,
                    self._remembered,
                    isolate=self._isolate,
                )
            return self._lanes[number]


class _Documents:
    """Documents of each lane, read from its units in order."""

    def __init__(
        self, units: Sequence[Unit], encoder: Encoder, is_training: Callable[[Row, str], bool], deal: Deal
    ) -> None:
        """``is_training``: function of (row, name of its unit) that returns whether the row is trained on."""
        self.units = units
        self.closed = threading.Event()
        """Set to interrupt waiting between retries of failed network reads."""
        self._encoder = encoder
        self._is_training = is_training
        self._deal = deal

    def of_lane(self, lane: int, cursor: Cursor) -> Iterator["_Piece"]:
        """Yield the documents of a lane without end, starting at the row of ``cursor``."""
        epoch, place, row = cursor[:3]
        while True:
            count = 0
            whole_epoch = place == row == 0
            while (part := self._deal.part(lane, epoch, place)) is not None:
                for piece in self._of_part(*part, epoch, place, row):
                    count += len(piece.tokens)
                    yield piece
                place, row = place + 1, 0
            if whole_epoch and not count:
                lanes = self._deal.lanes
                raise UserError(
                    f"data.streaming=true assigns documents to trainer.global_batch={lanes} sequences per step, but "
                    f"sequence {lane} has no document to train on, as the data is too small; use data.streaming=false"
                )
            epoch, place = epoch + 1, 0

    def _of_part(self, number: int, remainder: int, epoch: int, place: int, first: int) -> Iterator["_Piece"]:
        unit, mine = self.units[number], list[Row]()

        def pieces() -> Iterator[_Piece]:
            for row, encoded in zip(mine, self._encoder(mine, unit.name), strict=True):
                if isinstance(encoded, UserError):
                    raise encoded
                if len(encoded.tokens):
                    yield _Piece(Cursor(epoch, place, row.number), encoded.tokens, begins=True)
            mine.clear()

        for row in _patiently(unit, first, self.closed.wait):
            if row.number % self._deal.cut == remainder and self._is_training(row, unit.name):
                mine.append(row)
            if len(mine) == _ROWS_AT_ONCE or sum(len(row.content) for row in mine) > _CHARACTERS_AT_ONCE:
                yield from pieces()
        yield from pieces()


class _Lane:
    """Sequences of one lane, each read once and in order."""

    def __init__(
        self,
        documents: Iterator["_Piece"],
        first: int,
        cursor: Cursor,
        sequence_length: int,
        remembered: int,
        *,
        isolate: bool,
    ) -> None:
        self._documents = documents
        self._sequence_length = sequence_length
        self._isolate = isolate
        self._remembered = remembered
        self._next = first
        self._cursors = deque([cursor], maxlen=remembered + 1)
        """Cursors before the latest samples and, as the last entry, before the next sample."""
        self._pieces: deque[_Piece] = deque()
        self._skip = cursor.token
        self._turn = threading.Condition()
        self._failure: Exception | None = None

    def take(self, number: int) -> Sample:
        with self._turn:
            if not 0 <= number - self._next <= self._remembered:
                raise RuntimeError(f"sample {number} of a lane is requested, but sample {self._next} is next")
            self._turn.wait_for(lambda: self._next == number or self._failure is not None)
            if self._failure is not None:
                raise self._failure
        try:
            sample = self._read()
        except Exception as error:
            with self._turn:
                self._failure = error
                self._turn.notify_all()
            raise
        with self._turn:
            self._cursors.append(self._pieces[0].cursor)
            self._next += 1
            self._turn.notify_all()
        return sample

    def cursor(self, number: int) -> Cursor:
        """Return the position of the lane before sample ``number``."""
        with self._turn:
            behind = self._next - number
            assert 0 <= behind < len(self._cursors), "the trainer is behind by what the loader reads ahead, at most"
            return self._cursors[-1 - behind]

    def _read(self) -> Sample:
        window = np.empty(self._sequence_length + 1, np.int64)
        begins = []
        filled = 0
        used = 0
        while filled < len(window):
            if used == len(self._pieces):
                self._pieces.append(self._next_piece())
            piece = self._pieces[used]
            tokens = piece.tokens[: len(window) - filled]
            if piece.begins and filled:
                begins.append(filled)
            window[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
            used += 1
        self._advance(self._sequence_length)
        tokens, targets = window[:-1], window[1:]
        if not self._isolate:
            return Sample(tokens, targets)
        starts = np.array(begins, np.int64)
        targets = targets.copy()
        targets[starts - 1] = IGNORE
        return Sample(tokens, targets, positions_in_documents(starts, self._sequence_length))

    def _next_piece(self) -> "_Piece":
        piece = next(self._documents)
        while self._skip >= len(piece.tokens):  # tokens of the document before the cursor
            self._skip -= len(piece.tokens)
            piece = next(self._documents)
        piece, self._skip = piece.after(self._skip), 0
        return piece

    def _advance(self, tokens: int) -> None:
        while tokens >= len(self._pieces[0].tokens):
            tokens -= len(self._pieces.popleft().tokens)
        self._pieces[0] = self._pieces[0].after(tokens)


class _Piece(NamedTuple):
    """Tokens of one document, or a part of them."""

    cursor: Cursor
    """Position of the first token."""
    tokens: np.ndarray
    begins: bool
    """Whether the first token is the document's first."""

    def after(self, tokens: int) -> "_Piece":
        if tokens == 0:
            return self
        cursor = self.cursor._replace(token=self.cursor.token + tokens)
        return _Piece(cursor, self.tokens[tokens:], begins=False)


def _patiently(unit: Unit, first: int, pause: Callable[[float], bool]) -> Iterator[Row]:
    """Yield the rows from number ``first`` on, with a few retries on network errors. ``pause`` waits for the given
    number of seconds, and returns True immediately if the rows are no longer needed."""
    number, failures = first, 0
    while True:
        try:
            for row in unit.all_rows(number):
                number, failures = row.number + 1, 0
                if row.error is not None:
                    raise row.error
                if row.content:
                    yield row
            return
        except Exception as error:
            failures += 1
            if not _may_pass(error):
                raise
            wait = min(_FIRST_PAUSE_SECONDS * 2 ** (failures - 1), _LONGEST_PAUSE_SECONDS)
            if failures == _ATTEMPTS or pause(wait):
                raise UserError(
                    f"{unit.name} cannot be read from row {number + 1:,} on, after {failures} "
                    f"attempt{'s' if failures > 1 else ''}: {type(error).__name__}: {error}; run the same command to "
                    "resume from the newest checkpoint"
                ) from error


def _may_pass(error: BaseException | None) -> bool:
    """Return whether an error may be temporary, such as a failure of the network or a server."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status", None)
        if isinstance(status, int):
            return status == 429 or status >= 500
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        if type(error).__module__.partition(".")[0] in _NETWORK_LIBRARIES:
            return True
        error = error.__cause__
    return False
