"""Connections of this process to ranks on other nodes. A rank whose connections are all closed has ended.

The kernel of a node closes the connections of a process that ends, however it ends. A process that is stopped or
starved keeps them. Gloo connects all ranks of a group when the group is created, also on GPUs, where it exchanges host
tensors. Linux only: on other systems, no connection is found.
"""

import json
import os
import socket
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import Store

CONNECTS_WITHIN_SECONDS = 2.0
_DESCRIPTORS = Path("/proc/self/fd")
_ESTABLISHED = 1
"""First byte of ``struct tcp_info`` of an open connection; it differs once the peer has closed it."""


class _Connection(NamedTuple):
    path: Path
    name: str
    """Name of the socket in ``/proc``, which is not reused."""
    local: str
    remote: str


class PeerSockets:
    """Connections to ``peers``, found by addresses that the ranks publish in a store."""

    def __init__(self, store: "Store", rank: int, peers: Iterable[int]) -> None:
        """Publish the addresses of this rank. Call it once the group of all ranks exists."""
        self._open = _connections()
        self._waiting = set(peers)
        """Peers whose addresses are not known yet."""
        self._of: dict[int, list[_Connection]] = {}
        store.set(_key(rank), json.dumps([connection.local for connection in self._open]))

    def closed(self, store: "Store") -> list[int]:
        """Return the peers to which every connection is closed."""
        for peer in [peer for peer in self._waiting if store.check([_key(peer)])]:
            addresses = set(json.loads(store.get(_key(peer))))
            self._of[peer] = [connection for connection in self._open if connection.remote in addresses]
            self._waiting.discard(peer)
        return [peer for peer, found in self._of.items() if found and not any(map(_is_open, found))]


def _key(rank: int) -> str:
    return f"sockets/{rank}"


def _connections() -> list[_Connection]:
    """Return the open TCP connections of this process."""
    found = []
    with suppress(OSError):
        for path in list(_DESCRIPTORS.iterdir()):
            with suppress(OSError):
                name = str(path.readlink())
                if name.startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(path.name))) as copy:
                        if copy.family in (socket.AF_INET, socket.AF_INET6):
                            ends = [f"{host}:{port}" for host, port, *_ in (copy.getsockname(), copy.getpeername())]
                            found.append(_Connection(path, name, *ends))
    return found


def _is_open(connection: _Connection) -> bool:
    with suppress(OSError):
        if str(connection.path.readlink()) == connection.name:
            with socket.socket(fileno=os.dup(int(connection.path.name))) as copy:
                return copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    return False


def local_hosts(store_port: int) -> list[str]:
    """Return the addresses of this machine through which this process is connected to other ranks."""
    return sorted({host for host, port in map(_split, (c.local for c in _connections())) if port != store_port})


def opened(connect: Callable[[], "Store"]) -> tuple["Store", list[str]]:
    """Return the store that ``connect`` returns, and the local addresses of the connections that it has opened."""
    before = {connection.local for connection in _connections()}
    store = connect()
    return store, [connection.local for connection in _connections() if connection.local not in before]


def sever(hosts: Collection[str], store_port: int, also: Collection[str]) -> None:
    """Close the connections of this process to other ranks, which are on ``hosts``. Keep those to the store, except
    those with local addresses in ``also``.

    All ranks that wait for this one fail at once, and so do threads of this process that wait for others. Gloo's
    ``abort()`` does nothing, and destroying a group closes nothing while anything refers to it. Listening sockets are
    left alone, since Gloo would end the process.
    """
    for connection in _connections():
        host, port = _split(connection.remote)
        if connection.local in also or (host in hosts and store_port not in (port, _split(connection.local)[1])):
            with suppress(OSError), socket.socket(fileno=os.dup(int(connection.path.name))) as copy:
                copy.shutdown(socket.SHUT_RDWR)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def first_node_is_gone() -> str:
    """Return the beginning of a message that the first node is gone."""
    return f"the first node is gone: its store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def first_node_refuses() -> bool:
    """Return whether the first node refuses connections because its store has ended."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    try:
        socket.create_connection(address, CONNECTS_WITHIN_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
