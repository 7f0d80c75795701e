"""Moments of a step at which the memory of a rank may peak, computed from sizes."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

_FP32_BYTES = 4


class Activations(Protocol):
    """Estimate of the activation memory."""

    def __call__(self, moment: str, left: int, has_earlier: bool) -> float:
        """Return the bytes at ``moment``, one of ``activations.terms.MOMENTS``.

        Args:
            left: number of blocks whose backward is still to come.
            has_earlier: whether the backward of another micro-batch is done.
        """


class Moment(NamedTuple):
    """Bytes of temporary tensors and gradients at one moment of a step."""

    phase: str
    gathered: float
    gradients: float
    passing: float
    """Gradients that are being added to ``gradients`` or reduced over ranks."""
    activations: float = 0

    @property
    def bytes(self) -> float:
        """Sum of all fields."""
        return self.gathered + self.gradients + self.passing + self.activations


class Part(NamedTuple):
    """Parameters that are gathered together."""

    gathered: int
    """Bytes when gathered."""
    trained: int
    """Number of trained elements before FSDP sharding."""
    held: int
    """Number of trained elements on this rank."""
    largest: int
    """Number of elements of the largest trained parameter."""


class Parts(NamedTuple):
    """All parameters of a rank, in the order of the forward."""

    before: Sequence[Part]
    blocks: Sequence[Part]
    after: Sequence[Part]
    rest: Part
    """Parameters in no unit. They stay gathered during forward and backward."""


class How(NamedTuple):
    """Settings for gathering parameters and accumulating gradients."""

    accumulation: int
    keeps_buckets: bool
    """Whether DDP keeps gradients between steps."""
    is_sharded: bool
    is_pipelined: bool
    """Whether there are pipeline stages, which reduce all gradients after the last micro-batch."""
    ranks: int
    """Ranks that each parameter is sharded over."""
    width: int
    """Bytes of a gathered element, and of its gradient before accumulation and reduction."""
    held_width: int
    """Bytes of an element of this rank's gradients."""
    gathers: bool
    """Whether gathered copies of the parameters are used."""
    frees: bool
    """Whether units are freed after their forward."""
    reduces_each: bool
    """Whether gradients are reduced after each micro-batch."""
    tied: int
    """Number of uses of the weight that embedding and head share: 2 on a rank with both, 1 with only the head, else
    0."""
    sums_later: bool
    """Whether unsharded gradients are accumulated only in the next backward, as in zero-bubble schedules."""
    offloads: bool
    """Whether shards of parameters and gradients are in host memory."""

    @property
    def holds_whole(self) -> bool:
        """Whether gradients of earlier micro-batches are held unsharded."""
        sums_up = self.is_pipelined or (self.accumulation > 1 and not self.reduces_each)
        return self.is_sharded and (self.ranks > 1 or self.offloads) and sums_up


def moments(parts: Parts, blocks: int, how: How, activations: Activations, fetched: float = 0) -> Iterator[Moment]:
    """Yield the moments of a step at which memory may peak.

    Args:
        blocks: number of blocks on this rank, whether or not they are separate units.
        fetched: bytes of optimizer state copied from host memory to update one parameter.
    """
    held = sum(part.held for part in (*parts.before, *parts.blocks, *parts.after, parts.rest))
    yield Moment("optimizer", 0, (not how.offloads) * how.held_width * held, fetched)
    different = min(how.accumulation, 3)  # the first, one in between, the last
    for number in range(different):
        has_earlier = number > 0 or how.keeps_buckets
        is_last = number == different - 1 and not how.is_pipelined
        yield from _MicroBatch(parts, blocks, how, activations, has_earlier, is_last).moments()
    units = [parts.rest, *parts.before, *parts.blocks, *parts.after]
    for number, part in enumerate(units if how.is_pipelined else ()):
        gathered = how.gathers * sum(unit.gathered for unit in units[number + 1 :])
        to_come = (_FP32_BYTES if how.holds_whole else how.width) * sum(unit.trained for unit in units[number:])
        formed = how.held_width * sum(unit.held for unit in units[number * how.offloads : number + 1])
        yield Moment("backward", gathered, formed + to_come, _FP32_BYTES * part.trained, activations("start", 0, True))


class _MicroBatch:
    def __init__(
        self, parts: Parts, blocks: int, how: How, activations: Activations, has_earlier: bool, is_last: bool
    ) -> None:
        self._parts = parts
        self._blocks = blocks
        self._how = how
        self._activations = partial(activations, has_earlier=has_earlier)
        self._has_earlier, self._is_last = has_earlier, is_last
        self._reduces = how.is_sharded and not how.is_pipelined and (is_last or how.reduces_each)
        self._order = [*reversed(parts.after), *reversed(parts.blocks), *reversed(parts.before)]
        """Order of the backward."""

    def moments(self) -> Iterator[Moment]:
        """Yield the possible peaks: the end of the forward, both ends of the backward, and blocks whose neighbors
        differ."""
        parts = self._parts
        blocks = self._blocks
        after = len(parts.after)
        rest = parts.rest
        yield Moment("forward", self._after_forward(), self._gradients(0), 0, self._activations("forward", blocks))
        begins = self._activations("backward", blocks)
        yield Moment("backward", self._in_backward(0, starts=not after), self._gradients(0), 0, begins)
        if not parts.blocks:
            yield self._within(after, rest, self._activations("block", blocks))
        for number in sorted({0, len(parts.blocks) - 2, len(parts.blocks) - 1} & {*range(len(parts.blocks))}):
            place = after + len(parts.blocks) - 1 - number
            yield self._within(place, self._order[place], self._activations("block", number + 1))
            yield from self._reduced(place, self._order[place], self._activations("start", number))
        starts = self._activations("start", 0)
        for place in range(after + len(parts.blocks), len(self._order)):
            if self._order[place].trained:
                yield self._within(place, self._order[place], starts)
                yield from self._reduced(place, self._order[place], starts)
        if rest.trained:
            yield self._within(len(self._order), rest, starts, tied=self._how.tied)
            yield from self._reduced(len(self._order), rest, starts)

    def _within(self, place: int, part: Part, activations: float, tied: int | None = None) -> Moment:
        """Return the moment in the backward of a part at which its largest parameter's gradient exists.

        ``tied``: number of uses of the embedding weight, if this part may hold it. With two uses, the gradients of both
        and their sum exist. In other parts, the gradient from the head is held.
        """
        how = self._how
        times = (3 if tied > 1 else 1) if tied is not None else 1
        formed = how.width * (part.trained + (times - 1) * part.largest if tied is not None else part.largest)
        waits = how.width * self._parts.rest.largest if how.tied and tied is None else 0
        passing = self._reducing(place) + formed + waits
        return Moment("backward", self._in_backward(place), self._gradients(place), passing, activations)

    def _reduced(self, place: int, part: Part, activations: float) -> Iterator[Moment]:
        """Yield the moment after the backward of a part at which its gradients are reduced."""
        how = self._how
        if not how.is_sharded:
            if how.held_width > how.width and not how.gathers:  # bf16 weights: one gradient is upcast
                yield Moment("backward", 0, self._gradients(place + 1), how.width * part.largest, activations)
            return
        is_added = how.holds_whole and self._has_earlier
        is_wide = self._reduces and (is_added or how.ranks == 1)  # with one rank, torch divides into a copy
        passing = (_FP32_BYTES if is_wide else how.width) * part.trained + self._reducing(place + 1)
        if how.offloads and self._reduces:
            passing += how.held_width * part.held  # copied to the host
        if place < len(self._order) and how.tied:
            passing += how.width * self._parts.rest.largest
        gathered = self._in_backward(place + 1, starts=True) if place < len(self._order) else 0
        yield Moment("backward", gathered, self._gradients(place + 1), passing, activations)

    def _gradients(self, place: int) -> float:
        """Return the bytes of gradients after the backward of the first ``place`` parts."""
        waits = self._how.width * sum(part.trained for part in (*self._order, self._parts.rest))
        return self._summed(place) + self._how.sums_later * waits

    def _summed(self, place: int) -> float:
        all_of_it = [*self._order, self._parts.rest]
        formed, to_come = all_of_it[:place], all_of_it[place:]
        held_width = self._how.held_width * (not self._how.offloads)
        if not self._how.holds_whole:
            return held_width * sum(part.held for part in (all_of_it if self._has_earlier else formed))
        if not self._reduces:
            return _FP32_BYTES * sum(part.trained for part in (all_of_it if self._has_earlier else formed))
        shards = held_width * sum(part.held for part in formed)
        return shards + _FP32_BYTES * sum(part.trained for part in to_come)

    def _reducing(self, place: int) -> float:
        """Return the bytes of the gradients that are being reduced after the backward of the first ``place`` parts."""
        if not self._reduces or not place:
            return 0
        return _FP32_BYTES * [*self._order, self._parts.rest][place - 1].trained

    def _after_forward(self) -> float:
        """Return the gathered bytes after the forward, including the buffer of the last all-gather.

        The next all-gather frees this buffer.
        """
        units, rest = self._order, self._parts.rest.gathered
        last = units[0].gathered if units else rest
        kept = last * bool(units) if self._how.frees else sum(part.gathered for part in units)
        arrives = self._how.ranks > 1 and (self._how.frees or not self._has_earlier)
        return self._how.gathers * (rest + kept + arrives * last)

    def _in_backward(self, place: int, *, starts: bool = False) -> float:
        """Return the gathered bytes in the backward of a part, including the prefetched next one unless ``starts``."""
        units, rest = self._order, self._parts.rest.gathered
        if not self._how.frees:
            left = units[place:] if self._is_last else units
        else:
            left = units[place : place + (1 if starts or self._how.ranks == 1 else 2)]
        return self._how.gathers * (rest + sum(part.gathered for part in left))
