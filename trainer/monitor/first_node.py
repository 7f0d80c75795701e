"""Detection of a failure of the first node, which hosts the rendezvous store and the ranks that judge the reports."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from serried.runtime.peer_sockets import CONNECTS_WITHIN_SECONDS, first_node_refuses
from serried.runtime.session import Session
from serried.trainer.monitor.diagnosis import seconds_text
from serried.trainer.monitor.heartbeat import END, Moment, Pulse

_REFUSES_AFTER_SECONDS = 3.0
_GONE_AFTER_SECONDS, _ANSWERS_WITHIN_SECONDS = 60.0, 5.0


class FirstNodeWatch:
    """Thread that ends this process if the first node has failed.

    The first node counts as failed if, for a minute, the store has not answered and the training thread has entered no
    phase. A few seconds are enough if the node refuses connections, as it does once the process of the store has ended.
    This is a separate thread, because a request to a store on a machine without power may block for long.
    """

    def __init__(
        self, session: Session, pulse: Pulse, answers: Callable[[], int], end: Callable[[Moment, str], None],
        *, step_timeout_seconds: float, interval_seconds: float, closing: threading.Event,
    ) -> None:  # fmt: skip
        """Start the thread.

        Args:
            answers: Returns the number of answers from the store so far.
            end: Ends this process; takes the phase of this rank and a clause about the store.
            closing: Set when the thread is to end.
        """
        self._session, self._pulse = session, pulse
        self._answers, self._end = answers, end
        self._limit_seconds = min(_GONE_AFTER_SECONDS, step_timeout_seconds)
        self._interval_seconds, self._closing = interval_seconds, closing
        threading.Thread(target=self._run, name="first node", daemon=True).start()

    def _run(self) -> None:
        answers, moment = 0, self._pulse.now
        silent = 0.0
        last = time.monotonic()
        while not self._closing.wait(self._interval_seconds):
            now = time.monotonic()
            # Limited, because a machine that slept, or a suspended job, has not hung.
            elapsed, last = min(now - last, 2 * self._interval_seconds + CONNECTS_WITHIN_SECONDS), now
            is_still = answers == self._answers() and moment is self._pulse.now
            silent = silent + elapsed if is_still else 0.0
            answers, moment = self._answers(), self._pulse.now
            is_over = moment.phase == END  # the first node may leave first
            if silent >= _REFUSES_AFTER_SECONDS and not is_over and first_node_refuses():
                self._end(moment, "refuses connections")
            if silent >= self._limit_seconds:
                if not self._store_answers():
                    self._end(moment, f"has not answered for {seconds_text(silent)}")
                silent = 0.0

    def _store_answers(self) -> bool:
        """Return whether the store answers on a new connection.

        The reporting thread may have failed for another reason.
        """
        has_answered = threading.Event()

        def ask() -> None:
            with suppress(RuntimeError):
                self._session.own_connection("watchdog", _ANSWERS_WITHIN_SECONDS).check(["end"])
                has_answered.set()

        threading.Thread(target=ask, name="first node asked", daemon=True).start()
        return has_answered.wait(_ANSWERS_WITHIN_SECONDS)
