"""Process groups, connections and store calls of runs on many ranks, by counting.

``python -m benchmarks.many_ranks`` prints the tables of docs/evidence/many-gpus.md. Groups are made as in a run, on
torch's "fake" backend, which connects nothing. Store calls of Gloo are counted with threads as ranks.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from serried.configs.compose import compose
from serried.parallel.layout.mesh import Layout, resolve_layout
from serried.parallel.layout.process_groups import Groups
from serried.runtime import rendezvous
from serried.runtime.rendezvous import connect
from testing.runs import train_small

LAYOUTS = (
    (512, "llama8b", ()),
    (512, "llama8b", ("parallel=hsdp", "parallel.replicate=64", "parallel.shard=8")),
    (512, "llama70b", ()),
    (512, "glm45_air", ()),
    (512, "llama405b", ()),
    (4096, "llama70b", ()),
    (4096, "llama405b", ()),
    (4096, "llama405b", ("parallel.context=4",)),
)
"""Ranks, recipe, and overrides beside it."""
_NO_DATA = ("data.tokenizer=bytes", "model.vocab_size=128256")
_COUNTED_RANKS = (8, 16)
"""Sizes of groups whose store calls are counted; those of larger ones follow."""
_RANKS = (8, 64, 512, 4096)
_SECONDS_OF_AN_AXIS = (0.3, 1.0)
"""Estimate of the time in which NCCL starts all groups of an axis."""
_CALLS_PER_SECOND, _BYTES_PER_SECOND = 1e5, 1e9
"""Estimate of what torch's store answers, with one thread."""
_WORLD_GROUPS = 2
"""Gloo groups of all ranks: torch's own, and that of checkpoints, which another thread uses."""


class RankGroups(NamedTuple):
    """Process groups of one rank."""

    made: int
    """Groups that all ranks make, including those that this rank is not in; without the world's."""
    device: list[int]
    """Sizes of its groups for device tensors, the world's first: communicators of NCCL."""
    host: list[int]
    """Sizes of its groups for host tensors, the world's first: Gloo connects all ranks of each."""


@contextmanager
def recorded_groups() -> Iterator[list[tuple[list[int], str | None]]]:
    """Record the ranks and the backend of each group that is made in this context."""
    made: list[tuple[list[int], str | None]] = []
    new_group = dist.new_group

    def recorded(ranks: Sequence[int], *, backend: str | None = None, **options: Any) -> Any:
        made.append((list(ranks), backend))
        return new_group(ranks, backend=backend, **options)

    with patch.object(dist, "new_group", recorded):
        yield made


def groups_of(layout: Layout, rank: int, *, ties_ends: bool) -> RankGroups:
    """Return the process groups of ``rank`` in a run on GPUs."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        with recorded_groups() as made:
            Groups(layout, "cpu").make(ties_ends=ties_ends)
    finally:
        dist.destroy_process_group()
    mine = [len(ranks) for ranks, _ in made if rank in ranks]
    blocks = layout.world // layout.block if 1 < layout.block < layout.world else 0  # of ``Checkpointer``
    host = [layout.world] * _WORLD_GROUPS + [layout.block] * (blocks > 0)
    return RankGroups(len(made) + _WORLD_GROUPS - 1 + blocks, [layout.world, *mine], host)


class CountingStore(dist.Store):
    """A store that counts the calls of one rank, and the bytes that it reads. Looks for a key are not counted: they
    depend on how long others take."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.keys, self.read_bytes = store, list[str](), 0
        """``keys``: key of each call, in order."""

    def set(self, key: str, value: Any) -> None:
        self.keys.append(key)
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.keys.append(key)
        found = self.store.get(key)
        self.read_bytes += len(found)
        return found

    def add(self, key: str, amount: int) -> int:
        self.keys.append(key)
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.keys.append(keys[0])
        self.store.wait(keys, *timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.keys.append(keys[0])
        found = self.store.multi_get(keys)
        self.read_bytes += sum(map(len, found))
        return found

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self.keys.append(keys[0])
        self.store.multi_set(keys, values)  # type: ignore[attr-defined]

    def append(self, key: str, value: Any) -> None:
        self.keys.append(key)
        self.store.append(key, value)  # type: ignore[attr-defined]

    def has_extended_api(self) -> bool:
        return True


def gloo_calls(ranks: int) -> tuple[int, int]:
    """Connect a Gloo group of ``ranks`` threads. Return the store calls of a rank, and the bytes that it reads."""
    shared = dist.HashStore()
    stores = [CountingStore(shared) for _ in range(ranks)]

    def connect_rank(rank: int) -> Any:
        return dist.ProcessGroupGloo(stores[rank], rank, ranks, timedelta(seconds=60))

    with ThreadPoolExecutor(ranks) as threads:
        groups = list(threads.map(connect_rank, range(ranks)))
    del groups
    return len(stores[-1].keys), stores[-1].read_bytes


def run_calls(argv: Sequence[str], saves: Sequence[int]) -> tuple[int, list[int]]:
    """Train as ``argv`` says, on this rank. Return the calls of its training thread before the first step, and between
    the micro-batches ``saves``, counted from 1. Calls of torch's own are left out."""
    stores: list[CountingStore] = []
    seen: list[int] = []

    def counting(*arguments: Any, again: bool = False, **named: Any) -> dist.Store:
        store = connect(*arguments, again=again, **named)
        if not again:  # else it is the watchdog's, which counts seconds
            stores.append(store := CountingStore(store))
        return store

    def look() -> None:
        seen.append(sum("/control/" in f"/{key}" for store in stores for key in store.keys))

    with patch.object(rendezvous, "connect", counting):
        train_small(list(argv), acts=dict.fromkeys((1, *saves), look))
    return seen[0], [after - before for before, after in pairwise(seen[1:])]


def group_table() -> Iterator[str]:
    """Yield a table of the process groups of ``LAYOUTS`` as Markdown."""
    yield "| ranks | recipe | groups made | NCCL communicators of a rank, by their ranks | their start, estimated |"
    yield "| --- | --- | --- | --- | --- |"
    for ranks, recipe, more in LAYOUTS:
        config = compose([f"recipe={recipe}", *_NO_DATA, *more])
        found = groups_of(resolve_layout(config.parallel, ranks), 0, ties_ends=False)
        low, high = (seconds * len(found.device) for seconds in _SECONDS_OF_AN_AXIS)
        name = " ".join([f"`{recipe}`", *(f"`{word}`" for word in more)])
        sizes = f"{len(found.device)}: {', '.join(map(str, found.device))}"
        yield f"| {ranks:,} | {name} | {found.made:,} | {sizes} | {low:.0f} to {high:.0f} s |"


def store_table() -> Iterator[str]:
    """Yield a table of what the Gloo groups of all ranks cost as Markdown."""
    (few, fewer_bytes), (many, more_bytes) = (gloo_calls(ranks) for ranks in _COUNTED_RANKS)
    low, high = _COUNTED_RANKS
    each = (many - few) / (high - low)
    values = [found / ranks for found, ranks in ((fewer_bytes, low), (more_bytes, high))]
    growth = (values[1] - values[0]) / (high - low)
    yield "| ranks | sockets of a rank | store calls of a rank | read by all ranks | time of the store, estimated |"
    yield "| --- | --- | --- | --- | --- |"
    for ranks in _RANKS:
        calls = _WORLD_GROUPS * (few + each * (ranks - low))
        read = _WORLD_GROUPS * ranks**2 * (values[0] + growth * (ranks - low))
        seconds = max(ranks * calls / _CALLS_PER_SECOND, read / _BYTES_PER_SECOND)
        sockets = _WORLD_GROUPS * (ranks - 1)
        yield f"| {ranks:,} | {sockets:,} | {calls:,.0f} | {read / 1e9:,.3g} GB | {seconds:,.2g} s |"


if __name__ == "__main__":
    print("\n".join([*group_table(), "", *store_table()]))
