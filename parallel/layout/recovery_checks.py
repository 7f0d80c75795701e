"""Refusals of ``recover.mode=memory``: runs that could not continue from memory after a loss."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from serried.configs.errors import UserError
from serried.configs.schema.registry import takes
from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.checks import check_layout
from serried.parallel.layout.mesh import AXES, Layout, gradient_accumulation

_OR_OFF = "or recover.mode=off"


class Processes(NamedTuple):
    """The processes of a run, and what started them."""

    launcher: str
    """``local``, ``torchrun``, ``slurm``, ``kubernetes`` or ``skypilot``."""
    nodes: int
    per_node: int
    max_restarts: int = 0
    """``--max-restarts`` of torchrun."""
    is_elastic: bool = False
    """Whether torchrun's agents meet in an elastic rendezvous (c10d or etcd)."""


def replicas_of(layout: Layout) -> list[list[int]]:
    """Return the ranks of each replica of ``layout``, in ascending order."""
    return layout.peers([axis for axis in AXES if axis != "replicate"])


def layout_without(layout: Layout, lost: int) -> Layout:
    """Return ``layout`` without ``lost`` replicas. The others share the global batch, equally or not."""
    return replace(layout, replicate=layout.replicate - lost, uneven=True)


def check_recovery(config: RunConfig, layout: Layout) -> None:
    """Check that a run of ``config`` on ``layout`` can continue without a replica.

    Raises:
        UserError: It cannot.
    """
    recover, optim = config.recover, config.optim
    if layout.replicate == 1:
        raise UserError(
            "recover.mode=memory needs replicas: use parallel=ddp, or parallel=hsdp parallel.replicate=2, on at least "
            f"2 processes, {_OR_OFF}"
        )
    if recover.min_replicas >= layout.replicate:
        raise UserError(
            f"recover.min_replicas={recover.min_replicas}, but a loss leaves {layout.replicate - 1} of the "
            f"{layout.replicate} replicas; use recover.min_replicas={layout.replicate - 1}, {_OR_OFF}"
        )
    if config.run.url is not None:
        raise UserError(
            f"recover.mode=memory with run.dir={config.run.url}: only the process that claimed the run in a bucket "
            f"writes there, and this version cannot replace it; use run.dir=FOLDER, {_OR_OFF}"
        )
    if takes(optim, "matrices") or takes(optim, "sums"):
        raise UserError(
            f"recover.mode=memory with optim={optim.name}: the ranks exchange data during the update, which a loss "
            f"would leave half done; use optim=adamw, {_OR_OFF}"
        )
    if getattr(config.data, "is_streamed", False):
        raise UserError(
            "recover.mode=memory with data.streaming=true: only the lost process knows its position in the stream; use "
            f"data.streaming=false, {_OR_OFF}"
        )
    if config.parallel.sync_every_micro_batch:
        raise UserError(
            "recover.mode=memory with parallel.sync_every_micro_batch=true: after a loss, replicas with fewer "
            "micro-batches would reduce gradients fewer times; use parallel.sync_every_micro_batch=false, "
            f"{_OR_OFF}"
        )
    if layout.pipeline > 1:
        _check_schedules(config, layout)


def _check_schedules(config: RunConfig, layout: Layout) -> None:
    """Check that the pipeline schedule can run the micro-batches of a replica after each possible loss."""
    checked = set()
    for lost in range(1, layout.replicate - config.recover.min_replicas + 1):
        fewer = layout_without(layout, lost)
        if (count := gradient_accumulation(config.trainer, fewer)) in checked:
            continue
        checked.add(count)
        try:
            check_layout(config, fewer, count)
        except UserError as error:
            raise UserError(f"recover.mode=memory, after the loss of {_replicas(lost)}: {error}") from None


def check_recovery_start(config: RunConfig, layout: Layout, processes: Processes) -> None:
    """Check that what started ``processes`` keeps the others running when one of them is lost.

    Raises:
        UserError: It does not, or a node has processes of too many replicas.
    """
    launcher, _, per_node, max_restarts, _ = processes
    if launcher == "local":
        return
    if launcher in ("kubernetes", "skypilot"):
        raise UserError(
            f"recover.mode=memory with launch={launcher}: a pod ends when another one leaves; use launch=slurm, "
            f"torchrun or launch=local, {_OR_OFF}"
        )
    if processes.nodes == 1:
        if launcher == "torchrun":
            raise UserError(
                "recover.mode=memory under one torchrun agent: the agent ends all processes when one dies; start them "
                f"with python train.py launch=local launch.processes={per_node}, or use recover.mode=off"
            )
        raise UserError(
            f"recover.mode=memory with launch={launcher} on one node: all processes of a node end when one dies; use "
            f"launch.nodes=2 or more, {_OR_OFF}"
        )
    if max_restarts:
        raise UserError(
            f"recover.mode=memory with torchrun --max-restarts={max_restarts}: agents would restart the processes that "
            "are left, which loses their memory; use --max-restarts=0, or recover.mode=off"
        )
    if processes.is_elastic:
        raise UserError(
            "recover.mode=memory with an elastic rendezvous of torchrun: the loss of the node that hosts it ends all "
            "others; use --rdzv-backend=static --node-rank=N --master-addr=HOST, or recover.mode=off"
        )
    left, node = min((_whole_without(layout, node, per_node), node) for node in range(processes.nodes))
    if left < config.recover.min_replicas:
        why = "the stages of a pipeline are on different nodes" if layout.pipeline > 1 else "nodes share replicas"
        raise UserError(
            f"recover.mode=memory: without node {node}, {left} of {layout.replicate} replicas would be whole, as {why} "
            f"and recover.min_replicas={config.recover.min_replicas}; use {_whole_on_nodes(layout, per_node)}{_OR_OFF}"
        )


def _whole_without(layout: Layout, node: int, per_node: int) -> int:
    """Return the number of replicas that are left after the loss of ``node``.

    The other ranks of a replica that is lost end, and with each of them all ranks of its node.
    """
    lost, left = {node}, replicas_of(layout)
    while broken := [ranks for ranks in left if any(rank // per_node in lost for rank in ranks)]:
        left = [ranks for ranks in left if ranks not in broken]
        lost |= {rank // per_node for ranks in broken for rank in ranks}
    return len(left)


def _whole_on_nodes(layout: Layout, per_node: int) -> str:
    if layout.pipeline > 1:
        return "parallel.pipeline=1, "
    if layout.strategy == "hsdp" and per_node % (inner := layout.block // layout.shard) == 0:
        return f"parallel.shard={per_node // inner} parallel.replicate=-1, "
    return ""


def _replicas(count: int) -> str:
    return f"{count} replica{'' if count == 1 else 's'}"


def torchrun_is_elastic(words: Sequence[str]) -> bool:
    """Return whether ``words``, the command line of an agent, choose an elastic rendezvous."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        key, _, value = word.partition("=")
        if key.replace("_", "-") == "--standalone":
            return True
        if key.replace("_", "-") == "--rdzv-backend":
            return (value or following) != "static"
    return False
