"""Health of the run: the response to failed steps and spikes, and the bitwise comparison of replicas."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from serried.configs.errors import TrainingFailed, TrainingStopped
from serried.configs.schema import HealthSection
from serried.parallel.mesh import Layout
from serried.runtime.session import Session
from serried.trainer.checkpoint.plan import Part
from serried.trainer.step import FAILURES_THAT_STOP, StepResult

_CHUNK_WORDS = 2**20
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio, as a signed number
_FOLD = 0xD1342543DE82EF95 - 2**64


class GoBack(Exception):
    """Undo the steps up to ``step`` and leave out their samples. Raised on all ranks."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step = step


def respond(section: HealthSection, step: int, result: StepResult, advice: str) -> str | None:
    """Return the message about a step that went wrong but does not end the run; None: there is none, or not again.

    ``advice`` ends the sentence of a run that fails.

    Raises:
        GoBack, TrainingStopped, TrainingFailed: as ``section`` says.
    """
    is_overflow = not result.is_finite and math.isfinite(result.loss) and result.scale > 1  # fp16 finding its scale
    if result.failed_in_row >= FAILURES_THAT_STOP:
        what = "jumped" if result.is_finite else "was not finite"
        if not result.tokens:
            what = "was not there, since no sequence had anything to predict,"
        reason = f"loss or gradient {what} in {FAILURES_THAT_STOP} steps in a row, to step {step}"
        if section.non_finite == "rollback":
            raise GoBack(step, reason)
        raise TrainingFailed(f"{reason}; the weights are those from before. {advice}")
    if not result.is_finite and not is_overflow and section.non_finite == "stop":
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


class ReplicaCheck:
    """Compares the bits of all replicas of the model and of the optimizer's state, which never differ unless memory, a
    device or a wire has failed."""

    def __init__(self, layout: Layout, session: Session) -> None:
        self._layout, self._session = layout, session
        self.is_possible = layout.replicate > 1
        """Whether there is anything to compare."""

    def __call__(self, step: int, parts: Iterable[Part]) -> None:
        """Compare ``parts``, this rank's share of the state after ``step``. A collective; waits for the device.

        Raises:
            TrainingStopped: replicas differ; names the ranks that hold other bits than most.
        """
        if not self.is_possible:
            return
        by_axes: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        for part in parts:
            if part.shards.copies(self._layout) > 1:
                by_axes[part.shards.sliced_axes].append(part.local.detach())
        groups = dict(sorted(by_axes.items()))
        mine = torch.stack([digest(tensors) for tensors in groups.values()])
        # Through Gloo: what NCCL may have broken is not asked for the verdict.
        digests = [torch.zeros(len(mine), dtype=torch.int64) for _ in range(self._session.world_size)]
        dist.all_gather(digests, mine.cpu())
        odd, is_majority = set[int](), True
        for axes, column in zip(groups, torch.stack(digests).T.tolist(), strict=True):
            found, is_clear = differing(column, holders_of_the_same(self._layout, axes))
            odd, is_majority = odd | set(found), is_majority and is_clear
        if not odd:
            return
        hosts = self._session.gather(self._session.host())
        named = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in sorted(odd))
        which = "holds" if len(odd) == 1 else "hold"
        doubt = "other bits than its replicas" if is_majority else "different bits where they should hold the same"
        raise TrainingStopped(
            f"silent corruption, seen at step {step}: {named} {which} {doubt}. Nothing of this is saved. "
            "Test the memory and the devices of that node, or leave it out"
        )


def holders_of_the_same(layout: Layout, axes: Sequence[str]) -> list[list[int]]:
    """Groups of ranks that hold equal bits of tensors that are divided along ``axes``."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in range(layout.world):
        groups[layout.index(layout.coordinates(rank), ("pipeline", *axes))].append(rank)
    return list(groups.values())


def differing(digests: Sequence[int], groups: Iterable[Sequence[int]]) -> tuple[list[int], bool]:
    """Return the ranks that disagree with the majority of their group, and whether there is one.

    Without a majority, return all ranks that differ.
    """
    odd: list[int] = []
    is_majority = True
    for ranks in groups:
        (usual, count), *others = Counter(digests[rank] for rank in ranks).most_common()
        if not others:
            continue
        if 2 * count > len(ranks):
            odd += [rank for rank in ranks if digests[rank] != usual]
        else:
            odd, is_majority = odd + list(ranks), False
    return sorted(odd), is_majority


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> Tensor:
    """A hash of the bits of ``tensors``, int64 scalar on their device, computed there without a wait.

    Sums of words of 64 bits times odd numbers that depend on the position, modulo 2^64: one changed bit, wherever,
    always changes it.
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
    """The bits of ``flat`` as 64-bit words, and the few numbers at the end that fill none."""
    per_word = 8 // flat.element_size()
    whole = len(flat) // per_word * per_word
    if flat.storage_offset() % per_word:  # a view that begins inside a word
        flat = flat.clone()
    yield flat[:whole].view(torch.int64)
    yield flat[whole:].view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
