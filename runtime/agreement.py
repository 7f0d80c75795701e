"""The survivors of a lost rank agree on the ranks that continue, and on the last step that was done.

A step has three parts. *Prepare* is everything that needs other ranks, and changes only gradients and buffers. The
*vote* is one all-reduce of all ranks after it. *Commit* is the update, which is local. A rank that has the result of
the vote knows that every rank has prepared the step, so every rank that has not committed it yet can do so alone, with
its own gradients and the same bits.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOK_SECONDS = 0.01


class NotRecoverable(Exception):
    """The survivors cannot continue from memory. The run must restart from a checkpoint."""


class Fenced(Exception):
    """The other ranks continue without this one."""


class Report(NamedTuple):
    """A survivor's state."""

    rank: int
    committed: int
    """The last step whose update this rank has applied."""
    prepared: int
    """The last step that this rank can commit without other ranks: ``committed`` or the next step."""


class Agreement(NamedTuple):
    """Decision of the survivors."""

    ranks: tuple[int, ...]
    """Ranks that continue, in the order of their new numbers."""
    step: int
    """The last step that is done once the ranks in ``behind`` have committed it."""
    behind: tuple[int, ...]
    """Ranks that still commit ``step``."""


def agree(reports: Iterable[Report], replicas: Sequence[Sequence[int]], least_replicas: int = 1) -> Agreement:
    """Return the decision of the survivors, given the reports of all of them.

    Args:
        reports: Reports of all survivors.
        replicas: Ranks of each replica before the loss.
        least_replicas: Number of whole replicas without which the run does not continue.

    Raises:
        NotRecoverable: Too few replicas are whole, or the survivors disagree on more than one step.
    """
    by_rank = {report.rank: report for report in reports}
    whole = [replica for replica in replicas if all(rank in by_rank for rank in replica)]
    if len(whole) < max(1, least_replicas):
        count = f"{len(whole)} of {len(replicas)} replicas {'is' if len(whole) == 1 else 'are'} whole"
        raise NotRecoverable(f"{count}, and at least {max(1, least_replicas)} must be")
    ranks = tuple(sorted(rank for replica in whole for rank in replica))
    # A survivor of a replica that is not whole may be the only one that knows the result of the vote.
    step = max(report.committed for report in by_rank.values())
    behind = tuple(rank for rank in ranks if by_rank[rank].committed < step)
    for rank in behind:
        if by_rank[rank].prepared != step:
            raise NotRecoverable(f"step {step} is done on another rank, but rank {rank} has not prepared it")
    return Agreement(ranks, step, behind)


def meet_survivors(
    store: "Store", report: Report, replicas: Sequence[Sequence[int]], *, least_replicas: int,
    is_gone: Callable[[int], bool], patience_seconds: float, claim: Callable[[Mapping[str, Any]], bool],
    check: Callable[[], None],
) -> Agreement:  # fmt: skip
    """Report to the other survivors, and return their common decision.

    The first survivor decides once every rank has reported or is gone.

    Args:
        store: Store of this attempt; its keys are new.
        report: State of this rank.
        replicas: Ranks of each replica before the loss.
        least_replicas: See ``agree``.
        is_gone: Returns whether a rank has ended, or is silent.
        patience_seconds: Longest time to wait for a rank that neither reports nor is gone.
        claim: Claims the generation with its content. Returns False if another process has claimed it.
        check: Called often. An exception that it raises ends the meeting.

    Raises:
        NotRecoverable: The survivors cannot continue.
        Fenced: The others continue without this rank.
    """
    everybody = sorted(rank for replica in replicas for rank in replica)
    store.set(f"report/{report.rank}", json.dumps(report))
    deadline = time.monotonic() + patience_seconds
    while not store.check(["agreement"]):
        check()
        present = [rank for rank in everybody if not is_gone(rank)]
        late = [rank for rank in present if not store.check([f"report/{rank}"])]
        if not late and present and present[0] == report.rank:
            reports = [Report(*json.loads(store.get(f"report/{rank}"))) for rank in present]
            # Two ranks may take themselves for the first one, if one of them was silent for a while.
            store.compare_set("agreement", "", json.dumps(_decision(reports, replicas, least_replicas, claim)))
        elif time.monotonic() > deadline:
            raise NotRecoverable(f"rank {late[0] if late else present[0]} runs, but does not react")
        time.sleep(_LOOK_SECONDS)
    decided = json.loads(store.get("agreement"))
    if "failure" in decided:
        raise NotRecoverable(decided["failure"])
    agreement = Agreement(tuple(decided["ranks"]), decided["step"], tuple(decided["behind"]))
    if report.rank not in agreement.ranks:
        raise Fenced("the other processes continue without this one, or without its replica")
    return agreement


def _decision(
    reports: Sequence[Report], replicas: Sequence[Sequence[int]], least_replicas: int,
    claim: Callable[[Mapping[str, Any]], bool],
) -> dict[str, Any]:  # fmt: skip
    try:
        decided = agree(reports, replicas, least_replicas)._asdict()
        is_claimed = claim(decided)
    except NotRecoverable as why:
        return {"failure": str(why)}
    except OSError as error:
        return {"failure": f"the run folder cannot be written: {error.strerror}"}
    return decided if is_claimed else {"failure": "another process has claimed this generation of the run"}
