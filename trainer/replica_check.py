"""Health of the run: the response to failed steps and spikes, and the bitwise comparison of replicas."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from serried.configs.errors import TrainingFailed, TrainingStopped
from serried.configs.schema.sections import HealthSection
from serried.parallel.layout.mesh import Coordinates, Layout
from serried.parallel.layout.process_groups import gather_plain
from serried.parallel.layout.shard_specs import ShardSpec
from serried.runtime.session import Session
from serried.trainer.checkpoint.file_assignment import Part
from serried.trainer.step import FAILURES_THAT_STOP, StepResult

_CHUNK_WORDS = 2**20
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 divided by the golden ratio, as a signed integer
_FOLD = 0xD1342543DE82EF95 - 2**64


class GoBack(Exception):
    """Request to undo the steps up to ``step`` and skip their samples. Raised on all ranks."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step = step


def respond(section: HealthSection, step: int, result: StepResult, advice: str) -> str | None:
    """Return a message about a failed step that does not end the run, or None.

    ``advice``: end of the error message if the run fails.

    Raises:
        GoBack: ``section`` asks for a rollback.
        TrainingStopped: ``section`` asks for a stop.
        TrainingFailed: The last ``FAILURES_THAT_STOP`` steps failed.
    """
    if result.failed_in_row >= FAILURES_THAT_STOP:
        what = "had a spike" if result.is_finite else "was not finite"
        if not result.tokens:
            what = "was missing, because no sample had anything to predict (a weight of 0),"
            advice = "Check the data of those steps, and the weights that loss() returns"
        reason = f"loss or gradient {what} in {FAILURES_THAT_STOP} steps in a row, up to step {step}"
        if section.non_finite == "rollback":
            raise GoBack(step, reason)
        raise TrainingFailed(f"{reason}; the weights were not changed. {advice}")
    if not result.is_finite and not result.is_overflow and section.non_finite == "stop":
        raise TrainingStopped(f"loss or gradient was not finite at step {step} (health.non_finite=stop)")
    if not result.is_spike:
        return None
    reason = (
        f"spike at step {step}: loss {result.loss:.4f} (limit {result.loss_limit:.4f}), gradient norm "
        f"{result.grad_norm:.3g} (limit {result.norm_limit:.3g})"
    )
    if section.spike == "rollback":
        raise GoBack(step, reason)
    if section.spike == "stop":
        raise TrainingStopped(f"{reason} (health.spike=stop)")
    return f"{reason}{'; skipped' if result.skipped else ''}"


class Alike(NamedTuple):
    """Group of tensors with the same sharding, so that the same ranks hold replicas of all of them."""

    axes: tuple[str, ...]
    """Mesh axes along which the tensors are sharded. They are replicated along all other axes."""
    holders: tuple[int, ...]
    """Pipeline ranks of the stages that hold replicas, one entry per replica. Empty if no stages share tensors."""

    @classmethod
    def of(cls, spec: ShardSpec, layout: Layout) -> "Alike":
        """Return the group for the tensor described by ``spec``."""
        axes = tuple(axis for axis in spec.sliced_axes if layout.size((axis,)) > 1)
        return cls(axes, spec.holders if len(spec.holders) > 1 else ())

    def on(self, place: Coordinates) -> int:
        """Return the number of replicas on the rank at ``place``: two if it has both stages of a tied parameter."""
        return self.holders.count(place.pipeline) if self.holders else 1

    def copies(self, layout: Layout) -> list[list[tuple[int, int]]]:
        """Return groups of replicas that must be bitwise equal: pairs of rank and index of the replica on that rank."""
        groups: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for rank in range(layout.world):
            place = layout.coordinates(rank)
            stage = -1 if self.holders else place.pipeline
            groups[stage, layout.index(place, self.axes)] += [(rank, number) for number in range(self.on(place))]
        return [group for group in groups.values() if len(group) > 1]

    def along(self, layout: Layout) -> str:
        """Return the mesh axes along which there are replicas, for a message."""
        axes = [axis for axis in ("replicate", "shard", "context", "tensor") if layout.size((axis,)) > 1]
        divides_block = "expert" in self.axes or "expert_shard" in self.axes
        axes = [axis for axis in axes if axis not in self.axes and (axis == "replicate" or not divides_block)]
        return " and ".join([*(["tied stages"] if self.holders else []), *axes])


class ReplicaCheck:
    """Compare the replicas of model shards and optimizer state bitwise.

    Replicas differ only if memory, a device or an interconnect has failed.
    """

    def __init__(self, specs: Iterable[ShardSpec], layout: Layout, session: Session) -> None:
        """``specs``: shard specs of the full model."""
        self._layout, self._session = layout, session
        specs = list(specs)
        self.is_possible = any(spec.copies(layout) > 1 for spec in specs)
        """Whether any tensor has replicas."""
        # Scalars of an optimizer, such as its step count, are replicated on all ranks that hold the parameter.
        numbers = [replace(spec, slices=()) for spec in specs]
        found = {Alike.of(spec, layout): None for spec in (*specs, *numbers, ShardSpec("", ()))}
        self._columns = [(kind, number) for kind in found for number in range(1 + (len(set(kind.holders)) == 1))]
        """Pairs of group and index of the replica, in the same order on all ranks."""

    def __call__(self, step: int, parts: Iterable[Part]) -> None:
        """Compare ``parts``, this rank's shards of the state after ``step``. This is a collective call that waits for
        the device.

        Raises:
            TrainingStopped: Replicas differ. The message names the ranks that disagree with the majority.
        """
        if not self.is_possible:
            return
        held: dict[tuple[Alike, int], list[Tensor]] = defaultdict(list)
        seen: Counter[str] = Counter()
        for part in parts:
            held[Alike.of(part.shards, self._layout), seen[part.name]].append(part.local.detach())
            seen[part.name] += 1
        zero = torch.zeros((), dtype=torch.int64)
        mine = torch.stack([digest(held[column]).cpu() if column in held else zero for column in self._columns])
        # Use Gloo, so that a faulty NCCL cannot affect the result.
        digests = [torch.zeros(len(mine), dtype=torch.int64) for _ in range(self._session.world_size)]
        dist.all_gather(digests, mine)
        table = dict(zip(self._columns, torch.stack(digests).T.tolist(), strict=True))
        odd = set[int]()
        along = dict[str, None]()
        is_majority = True
        for kind in dict.fromkeys(kind for kind, _ in self._columns):
            copies = kind.copies(self._layout)
            found, is_clear = differing(
                [(rank, table[kind, number][rank]) for rank, number in group] for group in copies
            )
            is_majority = is_majority and is_clear
            odd |= set(found)
            if found:
                along[kind.along(self._layout)] = None
        if not odd:
            return
        hosts = gather_plain(self._session.host())
        named = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in sorted(odd))
        which = "holds" if len(odd) == 1 else "hold"
        doubt = "other bits than the replicas" if is_majority else "different bits for the same tensors"
        raise TrainingStopped(
            f"silent corruption, detected at step {step}: {named} {which} {doubt} (copies along {', '.join(along)}). "
            "This state is not saved. Test the memory and the devices of that node, or exclude it"
        )


def differing(groups: Iterable[Sequence[tuple[int, int]]]) -> tuple[list[int], bool]:
    """Return the ranks that disagree with the majority of their group, and whether every group has a majority.

    ``groups``: groups of pairs of rank and digest. The digests of a group should be equal. Without a majority, all
    ranks of the group are returned.
    """
    odd: list[int] = []
    is_majority = True
    for group in groups:
        (usual, count), *others = Counter(digest for _, digest in group).most_common()
        if not others:
            continue
        has_majority = 2 * count > len(group)
        odd += [rank for rank, digest in group if digest != usual or not has_majority]
        is_majority = is_majority and has_majority
    return sorted(set(odd)), is_majority


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> Tensor:
    """Return a hash of the bits of ``tensors``, an int64 scalar on their device. Does not synchronize with the device.

    The hash is a sum of 64-bit words multiplied by odd factors that depend on the position, modulo 2^64. A single
    flipped bit always changes it.
    """
    total = factors = torch.empty(0, dtype=torch.int64)
    for number, tensor in enumerate(tensors):
        if number == 0:
            total = torch.zeros((), dtype=torch.int64, device=tensor.device)
            factors = torch.arange(1, 2 * _CHUNK_WORDS, 2, dtype=torch.int64, device=tensor.device) * _ODD
        for words in _words(tensor.contiguous().view(-1).to(total.device)):
            for chunk in words.split(_CHUNK_WORDS):
                total = total * _FOLD + (factors[: len(chunk)] * chunk).sum()
    return total


def _words(flat: Tensor) -> Iterator[Tensor]:
    """Yield the bits of ``flat`` as 64-bit words, then the remaining elements that do not fill a word."""
    per_word = 8 // flat.element_size()
    whole = len(flat) // per_word * per_word
    if flat.storage_offset() % per_word:  # a view that is not aligned to a word
        flat = flat.clone()
    yield flat[:whole].view(torch.int64)
    yield flat[whole:].view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
