"""Where processes meet: the store that torchrun hosts, and the group they form there."""

import os
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOK_SECONDS, _LONGEST_NAP_SECONDS = 0.01, 0.5


def meet(rank: int, world_size: int, patience: timedelta) -> str:
    """Agree with all ranks on a name for this attempt, which no process of an earlier one knows.

    Raises:
        RuntimeError: some did not come within ``patience``.
    """
    if not _agent_hosts():
        return "only"
    return _agree(connect(rank, world_size, patience), rank, world_size, patience)


def connect(rank: int, world_size: int, patience: timedelta, *, again: bool = False) -> "Store":
    """A connection to the store in which the processes meet; ``again``: one more, where this process has one."""
    import torch.distributed as dist

    hosts = rank == 0 and not _agent_hosts() and not again
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, world_size, is_master=hosts, timeout=patience)


def _agent_hosts() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _agree(tcp: "Store", rank: int, world_size: int, patience: timedelta) -> str:
    """A restart under the same agents meets the store of the attempt before, with addresses of dead processes in it.

    No variable of torchrun's will do: agents count restarts each for itself, and a node that joins begins at 0. So rank
    0 makes a name up and answers everybody who asks for it, the dead too, until all of its own ranks have checked in.
    """
    import torch.distributed as dist

    store = dist.PrefixStore(f"meeting_{os.environ.get('TORCHELASTIC_RUN_ID')}", tcp)
    mine, nap, deadline = uuid.uuid4().hex, 0.005, time.monotonic() + patience.total_seconds()
    if rank != 0:
        store.set(f"asks/{store.add('asked', 1)}", mine)
        while not store.check([f"answer/{mine}"]):  # no signal is heard inside Store.wait
            if time.monotonic() > deadline:
                raise dist.DistStoreError("rank 0 has not come")
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
            if store.check([f"asks/{number}"]):  # who died in between will never have written it
                store.set(f"answer/{store.get(f'asks/{number}').decode()}", mine)
                unanswered.discard(number)
        if time.monotonic() > deadline:
            came = sum(store.check([key]) for key in everybody)
            raise dist.DistStoreError(f"{came + 1} of {world_size} processes came")
        time.sleep(_LOOK_SECONDS)
    return mine
