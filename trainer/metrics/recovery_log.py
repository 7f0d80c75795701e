"""Console and metrics.jsonl output of losses, and of processes that join. Called on the new rank 0."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from serried.configs.formats import size
from serried.records.run_folder import RunFolder
from serried.records.status import Members
from serried.runtime.console import Console


class Lost(NamedTuple):
    """Processes that were lost."""

    step: int
    """Step that was under way."""
    hosts: tuple[str, ...]
    """Host name of each of ``ranks``."""
    ranks: tuple[int, ...]
    """Ranks that are lost, as numbered at the start of the run. All ranks of a replica are lost with one of them."""
    reason: str


def log_loss(
    console: Console, folder: RunFolder | None, lost: Lost, members: Members, micro_batches: tuple[int, int]
) -> None:
    """Report ``lost``.

    Args:
        members: Replicas that continue.
        micro_batches: Number of micro-batches of a step on the ranks that have the most, before and after the loss.
    """
    nodes = tuple(dict.fromkeys(lost.hosts))
    if folder is not None:
        folder.record(
            "lost", step=lost.step, nodes=list(nodes), ranks=list(lost.ranks), reason=lost.reason,
            replicas=members.replicas, total_replicas=members.total_replicas,
        )  # fmt: skip
    before, after = micro_batches
    work = f", with up to {after} micro-batches instead of {before}" if after != before else ""
    verb = "continue" if members.replicas > 1 else "continues"
    console.say(
        f"lost       {', '.join(nodes)} ({_in_words(lost.ranks)}) in step {lost.step}: {lost.reason}; {members} "
        f"{verb}{work}"
    )


def log_recovery(
    console: Console, folder: RunFolder | None, step: int, generation: int, seconds: float, *, redone: bool,
    rolled_forward: int = 0,
) -> None:  # fmt: skip
    """Report that training continues.

    Args:
        step: Next step.
        seconds: Time since the loss was noticed.
        redone: Whether ``step`` had begun before the loss.
        rolled_forward: Number of ranks that completed the step before alone, because they did not get its result.
    """
    if folder is not None:
        folder.record(
            "recovered", step=step, generation=generation, seconds=round(seconds, 3), redone=redone,
            rolled_forward=rolled_forward,
        )  # fmt: skip
    console.say(
        f"continues  with step {step} after {seconds:.1f} s, generation {generation}: the same samples, the same curve"
    )


def log_join(
    console: Console, folder: RunFolder | None, step: int, node: str, source: str, nbytes: int, seconds: float,
    members: Members,
) -> None:  # fmt: skip
    """Report a ``node`` that joined before ``step``, and received its state from the node ``source``."""
    if folder is not None:
        folder.record(
            "joined", step=step, node=node, bytes=nbytes, seconds=round(seconds, 3), replicas=members.replicas,
            total_replicas=members.total_replicas,
        )  # fmt: skip
    console.say(f"joined     {node} at step {step}: {size(nbytes)} from {source} in {seconds:.1f} s; {members}")


def _in_words(ranks: Iterable[int]) -> str:
    """Return ``ranks`` in words, as in ``ranks 0, 4-7``."""
    ordered = sorted(ranks)
    starts = [ordered[0], *(rank for before, rank in pairwise(ordered) if rank > before + 1)] if ordered else []
    runs = []
    for start in starts:
        end = start
        while end + 1 in ordered:
            end += 1
        runs.append(str(start) if end == start else f"{start}-{end}")
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(runs)}"
