"""Timeline of a pipeline step: the order of work in each schedule, and start times computed from costs.

Pure arithmetic without torch, so that thousands of layouts can be compared.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from serried.parallel.layout.mesh import ALL_FORWARDS_FIRST, ZERO_BUBBLE_SCHEDULES, Layout

Kind = Literal["forward", "backward", "inputs", "weights"]
"""Kind of work. ``inputs`` and ``weights`` are the two halves of a backward: input gradients and weight gradients."""


_ROUNDS_TO_FILL = 3


class Slot(NamedTuple):
    """One unit of work on a rank."""

    kind: Kind
    stage: int
    micro_batch: int


class Cost(NamedTuple):
    """Seconds of one micro-batch in a stage."""

    forward: float
    backward: float
    weights: float = 0.0
    """Part of ``backward`` for weight gradients, which zero-bubble schedules compute later."""

    def of(self, kind: Kind) -> float:
        if kind == "forward":
            return self.forward
        if kind == "backward":
            return self.backward
        return self.weights if kind == "weights" else self.backward - self.weights


class Timeline(NamedTuple):
    """A step of a pipeline."""

    seconds: float
    slots: list[list[tuple[Slot, float]]]
    """Slots of each rank in order, with their start times."""


def play(layout: Layout, micro_batches: int, costs: Sequence[Cost], transfer: float = 0.0) -> Timeline:
    """Return the timeline of a step.

    Args:
        costs: cost of each stage.
        transfer: seconds to send a tensor to another rank.
    """
    player = _Player(layout, micro_batches, costs, transfer)
    if layout.schedule in ZERO_BUBBLE_SCHEDULES:
        player.fill_gaps()
    else:
        player.follow([[*_order(layout, rank, micro_batches)] for rank in range(layout.pipeline)])
    return player.timeline()


def duration(layout: Layout, micro_batches: int, costs: Sequence[Cost], transfer: float = 0.0) -> float:
    """Return the seconds of a step as ``play`` computes them, without simulating every micro-batch.

    Once the pipeline is full, each round of micro-batches takes as long as the one before.
    """
    rest = micro_batches % layout.pipeline
    shown = _ROUNDS_TO_FILL * layout.pipeline + rest
    if micro_batches <= shown + layout.pipeline or (rest and layout.schedule.startswith("interleaved")):
        return play(layout, micro_batches, costs, transfer).seconds
    first, second = (play(layout, count, costs, transfer).seconds for count in (shown, shown + layout.pipeline))
    return first + (second - first) * (micro_batches - shown) / layout.pipeline


def about(layout: Layout, micro_batches: int, costs: Sequence[Cost], transfer: float = 0.0) -> float:
    """Return an approximate step time in seconds, in closed form: the work of the busiest rank, plus the bubble of a
    pipeline with equal stages."""
    ranks = [[costs[stage] for stage in layout.stages_of(rank)] for rank in range(layout.pipeline)]
    busiest = max(sum(cost.forward + cost.backward for cost in rank) for rank in ranks)
    mean = sum(cost.forward + cost.backward - 2 * cost.weights for cost in costs) / layout.stages
    return micro_batches * busiest + (layout.pipeline - 1) * mean + 2 * (layout.stages - 1) * transfer


def _order(layout: Layout, rank: int, micro_batches: int) -> Iterator[Slot]:
    """Yield the slots of a rank in the order of torch's schedule of the same name."""
    stages = layout.stages_of(rank)
    if layout.schedule in ALL_FORWARDS_FIRST:
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
        """Return the slots of one kind. A round of micro-batches passes each stage in turn."""
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
    """Assigns start times to slots."""

    def __init__(self, layout: Layout, micro_batches: int, costs: Sequence[Cost], transfer: float) -> None:
        self._layout = layout
        self._micro_batches = micro_batches
        self._costs = costs
        self._rank_of = [layout.pipeline_of(stage) for stage in range(layout.stages)]
        ranks = [*self._rank_of, self._rank_of[-1]]
        self._after = [transfer if ranks[stage] != ranks[stage + 1] else 0.0 for stage in range(layout.stages)]
        """Seconds of a message from each stage to the next."""
        self._free = [0.0] * layout.pipeline
        """Time at which each rank becomes free."""
        never = [[math.inf] * micro_batches for _ in range(layout.stages)]
        self._forward, self._backward = never, [[*row] for row in never]
        """Time at which each micro-batch has left each stage."""
        self._placed: list[list[tuple[Slot, float]]] = [[] for _ in range(layout.pipeline)]

    def follow(self, orders: Sequence[Sequence[Slot]]) -> None:
        """Place the slots of each rank in this order, each as soon as its input has arrived."""
        ready, done = set(range(len(orders))), [0] * len(orders)
        while ready:
            rank = ready.pop()
            order, at = orders[rank], done[rank]
            while at < len(order) and (arrival := self._arrival(order[at])) < math.inf:
                self._place(rank, order[at], max(self._free[rank], arrival))
                at += 1
            if at > done[rank]:
                done[rank] = at
                for stage in self._layout.stages_of(rank):
                    near = {max(0, stage - 1), min(stage + 1, self._layout.stages - 1)}
                    ready |= {self._rank_of[other] for other in near} - {rank}

    def fill_gaps(self) -> None:
        """Place slots as zero-bubble schedules aim to: input gradients first, then forwards, and weight gradients when
        a rank would wait.

        The number of micro-batches in flight is limited to the number of ranks. This is an approximation: torch's
        orders are fixed in advance.
        """
        left = {
            (kind, stage): 0 for kind in ("forward", "inputs", "weights") for stage in range(self._layout.stages)
        }  # index of the next micro-batch
        chosen = [self._next(rank, left) for rank in range(self._layout.pipeline)]
        while any(chosen):
            start, slot, rank = min((*each, rank) for rank, each in enumerate(chosen) if each)
            self._place(rank, slot, start)
            left[slot.kind, slot.stage] += 1
            near = range(max(0, slot.stage - 1), min(slot.stage + 2, self._layout.stages))
            for other in {self._rank_of[stage] for stage in near}:
                chosen[other] = self._next(other, left)

    def _next(self, rank: int, left: Mapping[tuple[str, int], int]) -> tuple[float, Slot] | None:
        """Return (start time, slot) of the slot that a rank can start next; None if no slot is ready."""
        stages = self._layout.stages_of(rank)
        held = sum(left["forward", stage] - left["inputs", stage] for stage in stages)
        best: tuple[float, int, Slot] | None = None
        kinds: tuple[Kind, ...] = ("inputs", "forward", "weights")
        for priority, kind in enumerate(kinds):
            for stage in reversed(stages):
                index = left[kind, stage]
                is_full = kind == "forward" and stage == stages[0] and held >= len(stages) * self._layout.pipeline
                before = {"inputs": "forward", "weights": "inputs"}.get(kind)
                if index == self._micro_batches or is_full or (before and left[before, stage] == index):
                    continue
                start = max(self._free[rank], self._arrival(slot := Slot(kind, stage, index)))
                if start < math.inf and (best is None or (start, priority) < best[:2]):
                    best = (start, priority, slot)
        return best and (best[0], best[2])

    def timeline(self) -> Timeline:
        return Timeline(max(self._free), self._placed)

    def _place(self, rank: int, slot: Slot, start: float) -> None:
        kind, stage, index = slot
        self._free[rank] = end = start + self._costs[stage].of(kind)
        if kind != "weights":
            (self._forward if kind == "forward" else self._backward)[stage][index] = end
        self._placed[rank].append((slot, start))

    def _arrival(self, slot: Slot) -> float:
        """Return the time at which the input of a slot arrives from another stage; infinite if it is not known yet."""
        kind, stage, index = slot
        if kind == "forward":
            return self._forward[stage - 1][index] + self._after[stage - 1] if stage else 0.0
        if kind == "weights" or stage == self._layout.stages - 1:
            return 0.0
        return self._backward[stage + 1][index] + self._after[stage]
