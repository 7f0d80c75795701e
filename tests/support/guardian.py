"""A process that outlives the tests, however they end, and takes away the hosts and daemons that they have made.

What a process of tests makes bears a mark: names of namespaces and interfaces begin with it, and daemons have it in
their environment. A guardian waits until that process is gone, or closes it, and clears all that bears its mark.
"""

import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MARK = "SERRIED_TESTS"
"""Environment variable of daemons that tests start; its value is a mark."""

_MARKED = re.compile(r"(s([0-9a-f]+)x\d+)(?!\d)")
_NUMBERS = itertools.count()


class Guardian:
    """Clears what bears its ``mark`` when it is closed, or this process ends. Begins with what earlier processes have
    left behind, whose guardians were killed too."""

    def __init__(self) -> None:
        for name in (*_spaces(), *_links()):
            found = _MARKED.match(name)
            if found is not None and not Path(f"/proc/{int(found[2], 16)}").exists():
                clear(found[1])
        self.mark = f"s{os.getpid():x}x{next(_NUMBERS)}"  # short: names of interfaces hold 15 characters
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.guardian", self.mark, str(os.getpid())],
            cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def close(self) -> None:
        """Have all cleared, and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def clear(mark: str) -> None:
    """Kill the processes and take away the namespaces and interfaces that bear ``mark``."""
    spaces = [name for name in _spaces() if _bears(name, mark)]
    deadline = time.monotonic() + 20
    while (processes := _processes(mark, spaces)) and time.monotonic() < deadline:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    for space in spaces:
        _ip("netns", "del", space)
    for link in _links():
        if _bears(link, mark):
            _ip("link", "del", link)


def _processes(mark: str, spaces: Iterable[str]) -> set[int]:
    found = {int(number) for space in spaces for number in _ip("netns", "pids", space).split()}
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            if folder.name.isdecimal() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found - {os.getpid()}


def _spaces() -> list[str]:
    return [entry["name"] for entry in json.loads(_ip("-json", "netns", "list") or "[]")]


def _links() -> list[str]:
    return [entry["ifname"] for entry in json.loads(_ip("-json", "link") or "[]")]


def _bears(name: str, mark: str) -> bool:
    found = _MARKED.match(name)
    return found is not None and found[1] == mark


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return done.stdout


def _main(mark: str, guarded: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A forked process of the tests may hold the other end open and live on.
    while os.getppid() == guarded and not select.select([sys.stdin], [], [], 1)[0]:
        pass
    clear(mark)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
