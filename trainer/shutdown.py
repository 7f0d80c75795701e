"""Requests to stop or to save, from wherever they come, made one decision of all ranks at a step boundary.

Every rank votes with each step; the votes travel with the step's totals, so asking costs no exchange and no wait for
the device. All ranks read the sum of the same step, so they come to the same decision after the same step.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from serried.configs.schema import RunConfig
from serried.runtime.console import Console
from serried.runtime.session import Session

CONTROL = "control"
"""File in the run folder; a word in it is obeyed."""

_LOOK_SECONDS = 1.0
_REASON_BYTES = 200
_T = TypeVar("_T")


class Action(IntEnum):
    """What to do after a step. The values are votes: rank 0 alone asks for SAVE, any rank for STOP."""

    GO_ON = 0
    SAVE = 1
    STOP = 2


class Shutdown:
    """One rank's part in deciding when the run ends. A context manager around the training loop."""

    def __init__(
        self, config: RunConfig, session: Session, console: Console, last_save_seconds: Callable[[], float]
    ) -> None:
        """``last_save_seconds``: how long the latest save took, 0 where there was none."""
        self.action = Action.GO_ON
        """What all ranks do at this step boundary."""
        self.reason: str | None = None
        """Who asked to stop, once that is agreed; the same on every rank."""
        self._config, self._session, self._console = config, session, console
        self._last_save_seconds = last_save_seconds
        self._asked: str | None = None
        self._asked_to_save = threading.Event()
        self._control = _ControlFile(config.run.dir / CONTROL, self.request, self._asked_to_save.set, console)
        self._step_seconds: deque[float] = deque(maxlen=10)
        self._boundary = time.monotonic()
        self._travelling: _Votes | None = None
        self._spare: _Votes | None = None

    def __enter__(self) -> "Shutdown":
        self._session.signals.hold()
        if self._session.is_main:
            self._control.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._control.end()

    @property
    def stops(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self.action is Action.STOP

    def request(self, reason: str) -> None:
        """Ask all ranks to stop at the next step boundary. From any thread and rank; the first reason counts."""
        self._asked = self._asked or reason

    def vote(self) -> float:
        """This rank's vote, for the step under way."""
        if self._mine() is not None:
            return float(Action.STOP)
        if self._asked_to_save.is_set():
            self._asked_to_save.clear()
            return float(Action.SAVE)
        return float(Action.GO_ON)

    def count(self, votes: Tensor) -> None:
        """Take the sum of all ranks' votes, a scalar on the device, of the step just done, and set ``action``.

        On a GPU it is that of the step before, which has arrived or soon will: the newest step is not waited for.
        """
        now = time.monotonic()
        self._step_seconds.append(now - self._boundary)
        self._boundary = now
        if votes.device.type == "cpu":
            total = votes.item()
        else:
            arrived = self._travelling
            self._travelling = self._spare or _Votes()
            self._travelling.send(votes)
            total = arrived.read() if arrived is not None else 0.0
            self._spare = arrived
        self.action = Action(min(int(total), Action.STOP))
        if self.stops and self.reason is None:  # it is known already where the run has gone back in between
            self._settle()

    def unless_stopped(self, batches: Iterable[_T]) -> Iterator[_T]:
        """``batches``, until a rank asks to stop: then they end on all ranks at the same one, and ``stops`` is set.

        Asked on the host before each batch, through Gloo. On a GPU at most two batches are under way, or the host would
        have handed out all of them before anybody asks.
        """
        done: deque[torch.cuda.Event] = deque()
        for batch in batches:
            asked = torch.tensor(0.0 if self._mine() is None else 1.0)
            if dist.is_initialized():
                dist.all_reduce(asked, op=dist.ReduceOp.MAX)
            if asked.item():
                self.action = Action.STOP
                self._settle()
                return
            yield batch
            if self._session.device.type == "cuda":
                done.append(torch.cuda.Event())
                done[-1].record()
                if len(done) == 2:
                    done.popleft().synchronize()

    def _mine(self) -> str | None:
        """Why this rank wants to stop, if it does."""
        signal = self._session.signals.received
        if signal is not None:
            return signal
        if self._asked is None and self._session.is_main:
            self._asked = self._overdue()
        return self._asked

    def _overdue(self) -> str | None:
        minutes = self._config.trainer.max_minutes
        if minutes is not None and time.monotonic() - self._session.started >= 60 * minutes:
            return f"trainer.max_minutes={minutes:g}"
        deadline = self._session.signals.deadline
        if deadline is not None and deadline.is_near(self._needed_seconds()):
            return str(deadline)
        return None

    def _needed_seconds(self) -> float:
        """For this step, the next, and a save."""
        return self._last_save_seconds() + 2 * max(self._step_seconds, default=0.0)

    def _settle(self) -> None:
        """Have every rank know who asked. A collective, of those who have agreed to stop."""
        mine = self._mine()
        reasons = [mine]
        if dist.is_initialized():
            text = torch.zeros(_REASON_BYTES, dtype=torch.uint8)
            encoded = (mine or "").encode()[:_REASON_BYTES]
            if encoded:
                text[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
            texts = [torch.zeros_like(text) for _ in range(self._session.world_size)]
            dist.all_gather(texts, text)
            reasons = [bytes(other.tolist()).rstrip(b"\0").decode(errors="replace") for other in texts]
        self.reason = _in_words(reasons)
        self._console.say(f"stopping   {self.reason}: saving, then the run ends")


def _in_words(reasons: list[str | None]) -> str:
    """The first of the ranks' reasons, of which a signal may be the echo; a signal with the ranks that got it."""
    first = min((reason for reason in reasons if reason), key=lambda reason: reason.startswith("SIG"))
    alike = [rank for rank, reason in enumerate(reasons) if reason == first]
    if len(reasons) == 1 or not first.startswith("SIG"):
        return first
    if len(alike) == len(reasons):
        return f"{first} on all ranks"
    more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
    return f"{first} on rank {alike[0]}{more}"


class _Votes:
    """A number on its way from the GPU to the host."""

    def __init__(self) -> None:
        self._number = torch.empty((), dtype=torch.float64, pin_memory=True)
        self._arrived = torch.cuda.Event()

    def send(self, number: Tensor) -> None:
        self._number.copy_(number, non_blocking=True)
        self._arrived.record()

    def read(self) -> float:
        self._arrived.synchronize()
        return self._number.item()


class _ControlFile:
    """Looks into the file now and then, in a thread: on a network disk that can take long."""

    def __init__(
        self, path: Path, ask_to_stop: Callable[[str], None], ask_to_save: Callable[[], None], console: Console
    ) -> None:
        self._path, self._console = path, console
        self._ask_to_stop, self._ask_to_save = ask_to_stop, ask_to_save
        self._thread = threading.Thread(target=self._look_again_and_again, name="control-file", daemon=True)
        self._ended = threading.Event()
        self._seen: str | None = None

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(_LOOK_SECONDS)

    def _look_again_and_again(self) -> None:
        while not self._ended.is_set():
            with suppress(OSError):
                self._look()
            self._ended.wait(_LOOK_SECONDS)

    def _look(self) -> None:
        try:
            with self._path.open(errors="replace") as file:
                word = file.read(100).strip()
        except FileNotFoundError:
            self._seen = None
            return
        if not word or word == self._seen:  # being written, or known
            return
        self._seen = word
        if word.lower() not in ("stop", "save"):
            self._console.say(
                f"WARNING    {self._path} says {word.splitlines()[0]!r}; it can say stop (save and stop) or save (save "
                "and go on)"
            )
            return
        try:
            self._path.unlink()
            self._seen = None
        except OSError as error:
            self._console.say(f"WARNING    cannot remove {self._path}: {error.strerror}; it counts this once")
        if word.lower() == "stop":
            self._ask_to_stop("control: stop")
        else:
            self._ask_to_save()
