"""Hosts on this machine: network namespaces on one bridge, each with a name and an address of its own. Needs root."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.guardian import Guardian

_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind "$3" /etc/nsswitch.conf && shift 3 && exec "$@"'


def why_not() -> str | None:
    """Why this machine cannot have such hosts; None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "nsenter", "unshare", "setpriv") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (packages iproute2, util-linux)"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], check=False)
    return "this machine allows no network namespaces" if probe.returncode else None


class Hosts:
    """``count`` hosts, ``node0`` and so on, at ``address(i)``; this machine is at ``address()`` on the same bridge."""

    def __init__(self, count: int, folder: Path, *, know_themselves_by: str | None = None) -> None:
        """``know_themselves_by``: the address that a host's own name means on the host, instead of its own."""
        self.count = count
        self._guardian = Guardian()
        self.mark = self._guardian.mark
        """What all that belongs to them bears."""
        number = int(self.mark.rpartition("x")[2])
        self._net = f"10.{64 + os.getpid() % 128}.{(os.getpid() // 128 + number) % 256}"
        self._names = [folder / f"hosts-{index}" for index in range(count)]
        self._switch = folder / "nsswitch.conf"
        for host, path in enumerate(self._names):
            addresses = [self.address(index) for index in range(count)]
            addresses[host] = know_themselves_by or addresses[host]
            names = [f"{address} node{index}" for index, address in enumerate(addresses)]
            own = f"{self.address()} {os.uname().nodename}"
            path.write_text("\n".join(["127.0.0.1 localhost", own, *names]) + "\n")
        self._switch.write_text("passwd: files\ngroup: files\nhosts: files\n")  # else each name waits for a DNS server
        try:
            self._up()
        except BaseException:
            self.close()
            raise

    def _up(self) -> None:
        bridge = f"{self.mark}br"
        _ip(f"link add {bridge} type bridge")
        _ip(f"addr add {self.address()}/24 dev {bridge}")
        _ip(f"link set {bridge} up")
        for index in range(self.count):
            space, cable = self._space(index), self._cable(index)
            _ip(f"netns add {space}")
            _ip(f"link add {cable} type veth peer name eth0 netns {space}")
            _ip(f"link set {cable} master {bridge} up")
            _ip(f"-n {space} addr add {self.address(index)}/24 dev eth0")
            _ip(f"-n {space} link set eth0 up")
            _ip(f"-n {space} link set lo up")

    def address(self, index: int = -9) -> str:
        """Of a host; without an index, of this machine."""
        return f"{self._net}.{10 + index}"

    def _space(self, index: int) -> str:
        return f"{self.mark}n{index}"

    def _cable(self, index: int) -> str:
        return f"{self.mark}v{index}"

    def command(self, index: int, command: Sequence[str], *, own_processes: bool = False) -> list[str]:
        """``command`` on host ``index``. With ``own_processes``, to kill what this starts kills all that it started."""
        apart = ["--pid", "--fork", "--kill-child=KILL", "--mount-proc"] if own_processes else []
        return [
            "setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{self._space(index)}",
            "unshare", "--uts", "--mount", "--propagation", "private", *apart,
            "bash", "-c", _ENTER, "enter", f"node{index}", str(self._names[index]), str(self._switch),
            *command,
        ]  # fmt: skip

    def set_link(self, index: int, state: str) -> None:
        """Plug the cable of a host in (``up``) or out (``down``)."""
        _ip(f"link set {self._cable(index)} {state}")

    def close(self) -> None:
        """Take all away, also what was begun only, and what runs there."""
        self._guardian.close()


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)
