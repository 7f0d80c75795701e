"""Thread that notices lost ranks, and then closes the connections to all others, so that no rank waits any more.

A rank is lost if its process has ended, or if it gives no sign of life for a while, as a frozen one. Each rank looks
at the processes on its own machine, and gives a sign of life through the store, over its own connection.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from serried.runtime.peer_sockets import local_hosts, sever
from serried.runtime.process import is_running
from serried.runtime.session import Session

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOK_SECONDS = 0.2
_SIGNS_PER_SILENCE = 5
_LEAST_PATIENCE_SECONDS, _ENDS_WITHIN_SECONDS = 5.0, 2.0


class PeerLost(RuntimeError):
    """Raised in place of a wait for ranks that will not come."""


class Member(NamedTuple):
    """A rank of the run since its start."""

    number: int
    """The rank at the start."""
    process: int
    node: int
    """The first rank on the same machine at the start."""
    host: str


class PeerWatch:
    """Watches the ranks of a session, and severs this rank from them once one is lost."""

    def __init__(self, session: Session, silence_seconds: float) -> None:
        """Start the thread. This is a collective call, made while all ranks are connected.

        ``silence_seconds``: time without a sign of life after which a rank is lost.
        """
        self._silence_seconds = silence_seconds
        port = int(os.environ["MASTER_PORT"])
        facts = session.gather([session.rank - session.local_rank, session.host(), local_hosts(port)])
        self._sever = partial(sever, {host for _, _, hosts in facts for host in hosts}, port)
        processes = session.cause.processes
        self.members = [Member(rank, processes[rank], node, host) for rank, (node, host, _) in enumerate(facts)]
        """The ranks that train, by their current rank."""
        self._self = self.members[session.rank]
        self._lock = threading.Lock()
        self._lost: dict[int, str] = {}
        """Lost ranks and the reasons, by the rank at the start, in the order in which they were noticed."""
        self.is_severed = False
        """Whether the connections to the other ranks are closed. They are opened again by a new generation."""
        patience = timedelta(seconds=max(silence_seconds, _LEAST_PATIENCE_SECONDS))
        self.also_severed: list[str] = []
        """Local addresses of the connection through which process groups are formed."""
        self._board = _Board(self._self.number, partial(session.exchange.own_connection, "peers", patience))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer watch", daemon=True)
        self._thread.start()

    def lost(self, rank: int) -> str | None:
        """Return why the current rank ``rank`` is lost; None if it is not."""
        return self._reason(self.members[rank])

    def all_lost(self) -> dict[int, str]:
        """Return the current ranks that are lost, with the reasons."""
        found = ((rank, self.lost(rank)) for rank in range(len(self.members)))
        return {rank: reason for rank, reason in found if reason is not None}

    def first_reason(self, members: Sequence[Member]) -> str | None:
        """Return why the first of ``members`` was lost; None if none of them is."""
        numbers = {member.number for member in members if self._reason(member) is not None}
        return next((reason for number, reason in list(self._lost.items()) if number in numbers), None)

    def lose(self, member: Member, reason: str) -> None:
        """Treat ``member`` as lost."""
        self._lose(member, reason)

    def check(self) -> None:
        """Raise ``PeerLost`` if this rank is severed from the others, or one is lost."""
        lost = self.all_lost()
        if self.is_severed or lost:
            raise PeerLost(next(iter(lost.values()), "the connections to the other ranks are closed"))

    def sever(self) -> None:
        """Close the connections to all other ranks."""
        with self._lock:
            self.is_severed = True
            self._sever(self.also_severed)

    def continue_with(self, ranks: Sequence[int]) -> None:
        """Watch only the current ranks ``ranks`` from now on; their order gives their new numbers. Some of them may be
        lost meanwhile."""
        with self._lock:
            self.members = [self.members[rank] for rank in ranks]
            self.is_severed = False

    def close(self) -> None:
        """Tell the others that this rank ends as planned, and stop the thread."""
        self._closing.set()
        self._thread.join(_ENDS_WITHIN_SECONDS)
        self._board.leave()

    def _reason(self, member: Member) -> str | None:
        if member.number not in self._lost and member.node == self._self.node and not is_running(member.process):
            self._lost[member.number] = f"the process of rank {member.number} has ended"
        return self._lost.get(member.number)

    # in its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        interval = min(_LOOK_SECONDS, self._silence_seconds / _SIGNS_PER_SILENCE)
        last, signed = time.monotonic(), float("-inf")
        while not self._closing.wait(interval):
            now = time.monotonic()
            # Limited, since this process may have been frozen itself.
            elapsed, last = min(now - last, 2 * interval), now
            try:
                if now - signed > self._silence_seconds / _SIGNS_PER_SILENCE:
                    signed = now
                    for number, reason in self._board.read(self.members):
                        self._lost.setdefault(number, reason)
                self._look(elapsed)
            except RuntimeError:  # the store is unreachable: try again over a new connection
                self._board.close()

    def _look(self, elapsed: float) -> None:
        for member in self.members:
            reason, silent = self._reason(member), self._board.silence(member, elapsed)
            if reason is None and silent > self._silence_seconds:
                reason = f"rank {member.number} has given no sign of life for {silent:.0f} s"
            if reason is not None and member is not self._self:
                self._lose(member, reason)

    def _lose(self, member: Member, reason: str) -> None:
        if self._board.has_left(member):
            return
        self._lost.setdefault(member.number, reason)
        self._board.tell(member, reason)
        with self._lock:
            if member in self.members and not self.is_severed:
                self.is_severed = True
                self._sever(self.also_severed)


class _Board:
    """Signs of life and losses of all ranks, in the store."""

    def __init__(self, number: int, connect: Callable[[], "Store"]) -> None:
        """``number``: this rank at the start."""
        self._number, self._connect = number, connect
        self._store: Store | None = None
        self._signs: dict[int, tuple[bytes, float]] = {}
        """The latest sign of each rank, and the seconds since it was read."""
        self._signed = self._read = 0
        self._told: set[int] = set()

    def read(self, members: Sequence[Member]) -> list[tuple[int, str]]:
        """Give a sign of life, and read those of ``members``. Returns the losses that other ranks have told since the
        last call."""
        store = self._connected()
        self._signed += 1
        store.set(f"alive/{self._number}", str(self._signed))
        for member in members:
            key, (before, _) = f"alive/{member.number}", self._signs.get(member.number, (b"", 0.0))
            if member.number != self._number and store.check([key]) and (sign := store.get(key)) != before:
                self._signs[member.number] = sign, 0.0
        found = []
        for number in range(self._read, store.add("told", 0)):
            if not store.check([f"lost/{number}"]):
                break  # the rank that noticed it has not written it yet
            lost, reason = json.loads(store.get(f"lost/{number}"))
            found.append((lost, reason))
            self._read = number + 1
        return found

    def silence(self, member: Member, elapsed: float) -> float:
        """Return the seconds since the last sign of ``member``, or since the first call, ``elapsed`` seconds after the
        last call."""
        sign, seconds = self._signs.get(member.number, (b"", 0.0))
        self._signs[member.number] = sign, seconds + elapsed
        return seconds + elapsed

    def tell(self, member: Member, reason: str) -> None:
        """Tell the other ranks that ``member`` is lost."""
        if member.number not in self._told:
            self._told.add(member.number)
            store = self._connected()
            store.set(f"lost/{store.add('told', 1) - 1}", json.dumps([member.number, reason]))

    def has_left(self, member: Member) -> bool:
        """Return whether ``member`` has ended as planned."""
        return self._connected().check([f"left/{member.number}"])

    def leave(self) -> None:
        """Tell the other ranks that the end of this one is planned."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"left/{self._number}", "")

    def close(self) -> None:
        """Drop the connection. The next call opens a new one."""
        self._store = None

    def _connected(self) -> "Store":
        if self._store is None:
            self._store = self._connect()
        return self._store
