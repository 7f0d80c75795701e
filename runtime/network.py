"""Network between nodes: the interface through which this machine reaches the others."""

import ipaddress
import os
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from serried.configs.errors import UserError
from serried.runtime.process import host_name

if TYPE_CHECKING:
    from torch.distributed import Store

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable: the network interfaces that Gloo uses."""

_LIST_ADDRESSES, _ROOM_BYTES = 0x8912, 2**16  # SIOCGIFCONF of Linux
_LOOK_SECONDS = 0.05


def check_interface() -> None:
    """Raise ``UserError`` if ``GLOO_SOCKET_IFNAME`` names a network interface that this machine does not have."""
    named, found = os.environ.get(INTERFACE, ""), list[str]()
    with suppress(OSError):
        found = [name for _, name in socket.if_nameindex()]
    if found and (unknown := [name for name in named.split(",") if name and name not in found]):
        raise UserError(
            f"{INTERFACE}={named}: there is no network interface {unknown[0]} on {host_name()}. It has "
            f"{', '.join(found)}; unset {INTERFACE}, or use {INTERFACE}={found[-1]}"
        )


def choose_interface(store: "Store", ranks: tuple[int, int, int, int], patience: timedelta) -> None:
    """Set ``GLOO_SOCKET_IFNAME``, unless it is set, to the interface through which this node reaches the others.

    Without it, Gloo announces the address to which the host's name resolves on the host itself, which is often
    127.0.1.1. Most nodes use the interface on the route to the rendezvous host. The rendezvous host itself may
    resolve its name to a loopback address, so it uses the interface on the route to another node.

    ``ranks``: rank, local rank, world size and local world size. A collective.

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
