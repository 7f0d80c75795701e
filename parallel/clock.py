"""When the ranks of a pipeline compute what: the order of each schedule, and the timeline that follows from costs.

Arithmetic alone, without torch, so that thousands of layouts can be compared.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from serried.parallel.mesh import ZERO_BUBBLE_SCHEDULES, Layout

Kind = Literal["forward", "backward", "inputs", "weights"]
"""``inputs`` and ``weights``: the two halves of a backward, of gradients of inputs and of weights."""


_ROUNDS_TO_FILL = 5


class Slot(NamedTuple):
    """A piece of work of one rank."""

    kind: Kind
    stage: int
    index: int
    """Of the micro-batch."""


class Cost(NamedTuple):
    """Seconds of one micro-batch in a stage."""

    forward: float
    backward: float
    weights: float = 0.0
    """Of ``backward``: gradients of weights, which zero-bubble schedules compute later."""

    def of(self, kind: Kind) -> float:
        """Return the seconds of a slot."""
        if kind == "inputs":
            return self.backward - self.weights
        return {"forward": self.forward, "backward": self.backward, "weights": self.weights}[kind]


class Timeline(NamedTuple):
    """A step of a pipeline."""

    seconds: float
    busy: tuple[float, ...]
    """Of each rank."""
    slots: tuple[tuple[tuple[Slot, float], ...], ...] = ()
    """Of each rank, in order, with their starts."""


def play(layout: Layout, micro_batches: int, costs: Sequence[Cost], transfer: float = 0.0) -> Timeline:
    """Return the timeline of a step. ``costs`` are of each stage; ``transfer``: seconds between stages."""
    player = _Player(layout, micro_batches, costs, transfer)
    if layout.schedule in ZERO_BUBBLE_SCHEDULES:
        player.fill_gaps()
    else:
        player.follow([[*_order(layout, rank, micro_batches)] for rank in range(layout.pipeline)])
    return player.timeline()


def duration(layout: Layout, micro_batches: int, costs: Sequence[Cost], transfer: float = 0.0) -> float:
    """Return the seconds of a step as ``play`` does, without playing all of a long one: once the pipeline is full, each
    round of micro-batches takes as long as the one before."""
    rest = micro_batches % layout.pipeline
    shown = _ROUNDS_TO_FILL * layout.pipeline + rest
    if micro_batches <= shown + layout.pipeline or (rest and layout.schedule.startswith("interleaved")):
        return play(layout, micro_batches, costs, transfer).seconds
    first, second = (
        play(layout, count, costs, transfer).seconds for count in (shown, shown + layout.pipeline)
    )
    return first + (second - first) * (micro_batches - shown) / layout.pipeline


def _order(layout: Layout, rank: int, micro_batches: int) -> Iterator[Slot]:
    """Yield the slots of a rank, as torch's schedule of this name has them."""
    stages = layout.stages_of(rank)
    if layout.schedule in ("gpipe", "looped_bfs"):
        yield from (Slot("forward", stage, index) for stage in stages for index in range(micro_batches))
        indices = range(micro_batches) if layout.schedule == "gpipe" else range(micro_batches - 1, -1, -1)
        yield from (Slot("backward", stage, index) for stage in reversed(stages) for index in indices)
        return
    rounds = max(1, micro_batches // layout.pipeline)
    of_round = micro_batches // rounds
    if layout.schedule == "1f1b":
        of_round, warm_up = 1, layout.pipeline - 1 - rank
    else:
        warm_up = (len(stages) - 1) * of_round + 2 * (layout.pipeline - 1 - rank)

    def slots(kind: Kind, order: Sequence[int]) -> list[Slot]:
        """A round of micro-batches passes each stage in turn."""
        steps = range(micro_batches * len(stages))
        seen: dict[int, int] = defaultdict(int)
        found = []
        for step in steps:
            stage = order[step // of_round % len(stages)]
            found.append(Slot(kind, stage, seen[stage]))
            seen[stage] += 1
        return found

    forwards, backwards = slots("forward", stages), slots("backward", stages[::-1])
    warm_up = min(warm_up, len(forwards))
    yield from forwards[:warm_up]
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        yield from pair
    yield from backwards[len(forwards) - warm_up :]


class _Player:
    """Places slots in time."""

    def __init__(self, layout: Layout, micro_batches: int, costs: Sequence[Cost], transfer: float) -> None:
        self._layout, self._micro_batches, self._costs, self._transfer = layout, micro_batches, costs, transfer
        self._rank_of = [layout.pipeline_of(stage) for stage in range(layout.stages)]
        self._free = [0.0] * layout.pipeline
        """When each rank has done what it was given."""
        self._ends: dict[Slot, float] = {}
        self._placed: list[list[tuple[Slot, float]]] = [[] for _ in range(layout.pipeline)]

    def follow(self, orders: Sequence[Sequence[Slot]]) -> None:
        """Place the slots of each rank in this order, each as soon as what it needs is there."""
        waiting: dict[Slot, list[int]] = defaultdict(list)
        ready, done = list(range(len(orders))), [0] * len(orders)
        while ready:
            rank = ready.pop()
            while done[rank] < len(orders[rank]):
                slot = orders[rank][done[rank]]
                missing = next((need for need in self._needs(slot) if need not in self._ends), None)
                if missing is not None:
                    waiting[missing].append(rank)
                    break
                self._place(rank, slot)
                done[rank] += 1
                ready += waiting.pop(slot, ())

    def fill_gaps(self) -> None:
        """Place slots as zero-bubble schedules aim to: gradients of inputs first, then forwards, of no more micro-batches
        than without a second half, and gradients of weights where a rank would wait. An approximation: torch's orders
        are fixed in advance."""
        ranks = range(self._layout.pipeline)
        left = {
            (kind, stage): 0 for kind in ("forward", "inputs", "weights") for stage in range(self._layout.stages)
        }  # the next micro-batch
        chosen = [self._next(rank, left) for rank in ranks]
        while any(chosen):
            start, slot, rank = min((*each, rank) for rank, each in enumerate(chosen) if each)
            self._place(rank, slot)
            left[slot.kind, slot.stage] += 1
            near = range(max(0, slot.stage - 1), min(slot.stage + 2, self._layout.stages))
            for each in {self._rank_of[stage] for stage in near}:
                chosen[each] = self._next(each, left)

    def _next(self, rank: int, left: Mapping[tuple[str, int], int]) -> tuple[float, Slot] | None:
        """Return when a rank could begin which slot, if any."""
        stages = self._layout.stages_of(rank)
        held = sum(left["forward", stage] - left["inputs", stage] for stage in stages)
        best: tuple[float, int, Slot] | None = None
        kinds: tuple[Kind, ...] = ("inputs", "forward", "weights")
        for priority, kind in enumerate(kinds):
            for stage in reversed(stages):
                if kind == "forward" and stage == stages[0] and held >= len(stages) * self._layout.pipeline:
                    continue
                slot = Slot(kind, stage, left[kind, stage])
                needs = self._needs(slot)
                if slot.index < self._micro_batches and all(need in self._ends for need in needs):
                    start = max([self._free[rank], *(self._arrival(need, rank) for need in needs)])
                    if best is None or (start, priority) < best[:2]:
                        best = (start, priority, slot)
        return best and (best[0], best[2])

    def timeline(self) -> Timeline:
        """Return what was placed."""
        busy = tuple(sum(self._costs[slot.stage].of(slot.kind) for slot, _ in placed) for placed in self._placed)
        return Timeline(max(self._free), busy, tuple(map(tuple, self._placed)))

    def _place(self, rank: int, slot: Slot) -> None:
        start = max([self._free[rank], *(self._arrival(need, rank) for need in self._needs(slot))])
        self._free[rank] = self._ends[slot] = start + self._costs[slot.stage].of(slot.kind)
        self._placed[rank].append((slot, start))

    def _arrival(self, need: Slot, rank: int) -> float:
        return self._ends[need] + (self._transfer if self._rank_of[need.stage] != rank else 0.0)

    def _needs(self, slot: Slot) -> list[Slot]:
        kind, stage, index = slot
        if kind == "forward":
            return [Slot("forward", stage - 1, index)] if stage else []
        if kind == "weights":
            return [Slot("inputs", stage, index)]
        own = [Slot("forward", stage, index)]
        return [*own, Slot(kind, stage + 1, index)] if stage < self._layout.stages - 1 else own
