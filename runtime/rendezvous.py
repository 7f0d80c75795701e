"""Rendezvous of a run's processes through the store that torchrun hosts."""

import os
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOK_SECONDS, _LONGEST_NAP_SECONDS = 0.01, 0.5


def meet(rank: int, world_size: int, patience: timedelta) -> str:
    """Agree with all ranks on a name for this attempt that no process of an earlier attempt knows.

    Raises:
        RuntimeError: some ranks did not arrive within ``patience``.
    """
    if not _agent_hosts():
        return "only"
    return _agree(connect(rank, world_size, patience), rank, world_size, patience)


def connect(rank: int, world_size: int, patience: timedelta, *, again: bool = False) -> "Store":
    """Connect to the store. With ``again``, open a second connection of this process."""
    import torch.distributed as dist

    hosts = rank == 0 and not _agent_hosts() and not again
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, world_size, is_master=hosts, timeout=patience)


def _agent_hosts() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _agree(tcp: "Store", rank: int, world_size: int, patience: timedelta) -> str:
    """Return a name chosen by rank 0, on all ranks.

    A restart under the same agents uses the store of the previous attempt, which holds addresses of dead
    processes. No variable of torchrun's identifies the attempt: each agent counts its own restarts, and a new
    node starts at 0. So rank 0 answers every request in the store, including requests of dead processes, until
    all its ranks have checked in.
    """
    import torch.distributed as dist

    store = dist.PrefixStore(f"meeting_{os.environ.get('TORCHELASTIC_RUN_ID')}", tcp)
    mine = uuid.uuid4().hex
    nap = 0.005
    deadline = time.monotonic() + patience.total_seconds()
    if rank != 0:
        store.set(f"asks/{store.add('asked', 1)}", mine)
        while not store.check([f"answer/{mine}"]):  # signals are not handled inside Store.wait
            if time.monotonic() > deadline:
                raise dist.DistStoreError("rank 0 has not joined")
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)
        name = store.get(f"answer/{mine}").decode()
        store.set(f"{name}/is_here/{rank}", "")
        return name
    everybody = [f"{mine}/is_here/{rank}" for rank in range(1, world_size)]
    unanswered: set[int] = set()
    seen = 0
    while not store.check(everybody):
        asked = store.add("asked", 0)
        unanswered |= set(range(seen + 1, asked + 1))
        seen = asked
        for number in sorted(unanswered):
            if store.check([f"asks/{number}"]):  # a process that died in between never writes it
                store.set(f"answer/{store.get(f'asks/{number}').decode()}", mine)
                unanswered.discard(number)
        if time.monotonic() > deadline:
            came = sum(store.check([key]) for key in everybody)
            raise dist.DistStoreError(f"{came + 1} of {world_size} processes joined")
        time.sleep(_LOOK_SECONDS)
    return mine
