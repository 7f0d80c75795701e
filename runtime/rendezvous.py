"""Rendezvous of ranks: the store, the network interface, and the exchange of plain JSON data on the host."""

import ipaddress
import json
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serried.configs.errors import UserError
from serried.runtime.process import host_name

if TYPE_CHECKING:
    from torch.distributed import Store

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interfaces that Gloo uses."""

GLOO_LAZY = "TORCH_GLOO_LAZY_INIT"
"""Environment variable of torch. If set, two ranks of a Gloo group connect when they first communicate."""
_RANKS_CONNECTED_AT_START = 512
_LIST_ADDRESSES, _ROOM_BYTES = 0x8912, 2**16  # SIOCGIFCONF of Linux
_LONGEST_NAP_SECONDS = 0.5
_LOOK_SECONDS, _LOOK_FOR_RANKS_SECONDS = 0.05, 0.01


def meet(rank: int, world_size: int, patience: timedelta) -> str:
    """Rendezvous with all ranks. Return a name for this attempt, unknown to processes of earlier attempts.

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
        time.sleep(_LOOK_FOR_RANKS_SECONDS)
    return mine


class Exchange:
    """Exchange of plain data between ranks, through the store.

    Every rank must make the same calls in the same order.
    """

    def __init__(self, rank: int, world_size: int, patience_seconds: float) -> None:
        """``patience_seconds``: longest time to wait for another rank."""
        self.store: Store | None = None
        """Store of the run. None for a single process, and before the rendezvous."""
        self.waits_for: str | None = None
        """The ranks that this rank currently waits for, for the watchdog's report."""
        self.check_peers: Callable[[], None] = lambda: None
        """Called while this rank waits for others. An exception that it raises ends the wait."""
        self.survives: Callable[[BaseException], bool] = lambda _: False
        """Returns whether an error is the consequence of a loss after which this rank continues from memory."""
        self._rank = rank
        self._world_size = world_size
        self._patience_seconds = patience_seconds
        self._attempt = ""
        """Prefix of this attempt's keys in the store."""
        self._count = 0

    def join(self, patience: timedelta) -> "Store":
        """Rendezvous with all ranks. Return a store for their process groups.

        Raises:
            RuntimeError: some ranks did not arrive within ``patience``.
        """
        import torch.distributed as dist

        self._attempt = f"attempt_{meet(self._rank, self._world_size, patience)}"
        return dist.PrefixStore(self._attempt, connect(self._rank, self._world_size, patience))

    def own_connection(self, name: str, patience: timedelta) -> "Store":
        """Return a store with a separate connection, for another thread. All ranks share it under ``name``."""
        import torch.distributed as dist

        if self.store is None:
            return dist.HashStore()
        tcp = connect(self._rank, self._world_size, patience, again=True)
        return dist.PrefixStore(name, dist.PrefixStore(self._attempt, tcp))

    def of_generation(self, generation: int, rank: int, world_size: int) -> "Exchange":
        """Return an exchange among ``world_size`` of the ranks, with its own keys. ``rank``: this rank among them."""
        import torch.distributed as dist

        assert self.store is not None
        formed = Exchange(rank, world_size, self._patience_seconds)
        formed.store = dist.PrefixStore(f"generation_{generation}", self.store)
        formed._attempt = f"{self._attempt}/generation_{generation}"
        formed.check_peers, formed.survives = self.check_peers, self.survives
        return formed

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, by rank, on every rank.

        Rank 0 collects the values, so that every other rank writes and reads one value, regardless of the number of
        ranks.
        """
        if self.store is None:
            return [value]
        self._count += 1
        keys = [f"gather/{self._count}/{rank}" for rank in range(self._world_size)]
        together = f"gather/{self._count}"
        self.store.set(keys[self._rank], json.dumps(value))
        if self._rank > 0:
            self._await([together], "every rank")
            return json.loads(self.store.get(together))
        self._await(keys, "every rank")
        values = [json.loads(encoded) for encoded in self.store.multi_get(keys)]
        self.store.set(together, json.dumps(values))
        return values

    def once(
        self, function: Callable[[], Any], on_crash: Callable[[BaseException], object], *, leads: bool, group: str
    ) -> Any:
        """Call ``function`` on the leading rank of ``group``. All ranks of the group return its result.

        ``leads``: whether this is the leading rank. ``on_crash`` is called if ``function`` crashed, before the other
        ranks receive the failure and fail too.

        Raises:
            UserError: ``function`` raised it. It is raised on every rank.
        """
        self._count += 1
        key = f"once/{group}/{self._count}"
        verdict: dict[str, Any] = {}
        if leads:
            try:
                verdict = {"result": function()}
            except UserError as error:
                verdict = {"error": [str(argument) for argument in error.args], "head": error.head}
            except BaseException as error:
                on_crash(error)
                verdict = {"failure": repr(error)}
                raise
            finally:
                if self.store is not None:
                    self.store.set(key, json.dumps(verdict))
        elif self.store is not None:
            self._await([key], f"the first process of the {group}")
            verdict = json.loads(self.store.get(key))
        if "error" in verdict:
            raise UserError(*verdict["error"], head=verdict["head"])
        if "failure" in verdict:
            raise RuntimeError(f"the first process of the {group} failed: {verdict['failure']}")
        return verdict["result"]

    def first(self, name: str, value: Any) -> Any:
        """Return the ``value`` of the rank that called this first with ``name``.

        Raises:
            RuntimeError: the store and its host are gone.
        """
        return value if self.store is None else json.loads(self.store.compare_set(name, "", json.dumps(value)))

    def has(self, name: str) -> bool:
        """Return whether a rank has called ``first`` with ``name``.

        Raises:
            RuntimeError: the store and its host are gone.
        """
        return self.store is not None and self.store.check([name])

    def all_arrive(self, name: str, patience_seconds: float) -> bool:
        """Return whether all ranks call this with ``name`` within ``patience_seconds``.

        All ranks that call it get the same answer.

        Raises:
            RuntimeError: the store and its host are gone.
        """
        if self.store is None:
            return True
        self.store.add(f"arrived/{name}", 1)
        deadline = time.monotonic() + patience_seconds
        while not (are_here := self.store.add(f"arrived/{name}", 0) == self._world_size):
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_SECONDS)
        return bool(self.first(f"all arrived/{name}", are_here))

    def _await(self, keys: list[str], whom: str) -> None:
        """Wait until the store has ``keys``, by polling: signals are not handled inside ``Store.wait``."""
        assert self.store is not None
        self.waits_for = whom
        deadline, nap = time.monotonic() + self._patience_seconds, 0.001
        while not self.store.check(keys):
            try:
                self.check_peers()
            except RuntimeError:
                if self.store.check(keys):  # a rank that has ended answered before
                    break
                raise
            if time.monotonic() > deadline:
                self.store.wait(keys, timedelta(milliseconds=1))  # raises torch's own error
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)
        self.waits_for = None


# the network between nodes --------------------------------------------------------------------------------------------


def check_interface() -> None:
    """Raise ``UserError`` if ``GLOO_SOCKET_IFNAME`` names a network interface that this machine does not have."""
    named, found = os.environ.get(INTERFACE, ""), list[str]()
    with suppress(OSError):
        found = [name for _, name in socket.if_nameindex()]
    if found and (unknown := [name for name in named.split(",") if name and name not in found]):
        raise UserError(
            f"{INTERFACE}={named}: {host_name()} has no network interface {unknown[0]}, only {', '.join(found)}; unset "
            f"{INTERFACE}, or use {INTERFACE}={found[-1]}"
        )


def limit_connections(world_size: int) -> None:
    """Make ranks of large runs connect on demand, unless the user has set the variable.

    Call this before a group is created. By default, Gloo connects all ranks of a group when the group is created. Each
    rank then reads the addresses of all others from the store, which takes minutes for thousands of ranks. Smaller runs
    keep the default, so that a run whose store is gone can still save.
    """
    if world_size > _RANKS_CONNECTED_AT_START:
        os.environ.setdefault(GLOO_LAZY, "1")


def choose_interface(store: "Store", ranks: tuple[int, int, int, int], patience: timedelta) -> None:
    """Set ``GLOO_SOCKET_IFNAME``, unless it is set, to the interface through which this node reaches the others.

    Without it, Gloo announces the address to which the host's name resolves on the host itself, which is often
    127.0.1.1. Most nodes use the interface on the route to the rendezvous host. The rendezvous host itself may
    resolve its name to a loopback address, so it uses the interface on the route to another node.

    ``ranks``: rank, local rank, world size and local world size. This is a collective call.

    Raises:
        RuntimeError: the other nodes did not publish their addresses within ``patience``.
    """
    _, local_rank, world_size, local_world_size = ranks
    if local_world_size == world_size:
        return
    own = address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    is_known = own is not None and not ipaddress.ip_address(own).is_loopback
    if local_rank == 0:
        if is_known:
            store.compare_set("interface/address", "", str(own))
        store.add("interface/told", local_world_size)
    if os.environ.get(INTERFACE):
        return
    deadline = time.monotonic() + patience.total_seconds()
    while not is_known and not store.check(["interface/address"]):
        if store.add("interface/told", 0) >= world_size:
            break  # all processes are on one machine
        if time.monotonic() > deadline:
            store.wait(["interface/address"], timedelta(milliseconds=1))  # raises torch's own error
        time.sleep(_LOOK_SECONDS)
    if not is_known and store.check(["interface/address"]):
        own = address_towards(store.get("interface/address").decode(), int(os.environ["MASTER_PORT"]))
    if own is not None and (name := interface_of(own)) is not None and not ipaddress.ip_address(own).is_loopback:
        os.environ[INTERFACE] = name


def address_towards(host: str, port: int) -> str | None:
    """Return this machine's source address on the route to ``host``; None if there is no route. Sends nothing."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as way:
                way.connect(address)
                return str(way.getsockname()[0]).partition("%")[0]
    return None


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has ``address``; None if there is none, or on systems other
    than Linux."""
    wanted = ipaddress.ip_address(address)
    with suppress(OSError, ImportError):
        for name, found in _addresses_of_version_6() if wanted.version == 6 else _addresses_of_version_4():
            if found == wanted.packed:
                return name
    return None


def _addresses_of_version_4() -> list[tuple[str, bytes]]:
    import array
    import fcntl

    room = array.array("B", bytes(_ROOM_BYTES))
    entry = 40 if struct.calcsize("P") == 8 else 32  # struct ifreq: 16 bytes of name, then a socket address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("iP", _ROOM_BYTES, room.buffer_info()[0])
        used = struct.unpack("iP", fcntl.ioctl(any_socket, _LIST_ADDRESSES, asked))[0]
    entries = (room[start : start + entry].tobytes() for start in range(0, used, entry))
    return [(record[:16].partition(b"\0")[0].decode(), record[20:24]) for record in entries]


def _addresses_of_version_6() -> list[tuple[str, bytes]]:
    lines = Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines()
    return [(line.split()[-1], bytes.fromhex(line.split()[0])) for line in lines]


def describe_interface(name: str, folder: Path = Path("/sys/class/net")) -> str:
    """Return ``name`` with its speed, if the system knows it: ``eth0 (10 Gb/s)``."""
    megabits = 0
    with suppress(OSError, ValueError):  # an interface without a cable, and many virtual ones, have no speed
        megabits = int((folder / name.partition(":")[0] / "speed").read_text(encoding="utf-8"))
    if megabits <= 0:
        return name
    return f"{name} ({f'{megabits / 1000:g} Gb/s' if megabits >= 1000 else f'{megabits} Mb/s'})"
