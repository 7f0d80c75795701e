"""Entry point of a pod: starts the ranks of this node, and exits with a code that says what should follow.

``python -m serried.launch.kubernetes.pod PROGRAM... -- OVERRIDE...``; ``manifests.py`` sets the environment.

===  ===============================================================================
  0  the run finished, or its user asked it to stop
 70  the run failed, and would fail again
 75  it was stopped, or another pod ended: a new pod resumes it
 78  a mistake in the command or the environment
 69  the bucket does not answer or takes no writes: a new pod starts, which counts as one of the allowed restarts
===  ===============================================================================

This replaces torchrun, which exits with 1 for every failure. Its agent on the first node also waits for the others for
up to 300 s at its end, while a replaced pod talks to its old store. Here the pods of one attempt meet at the first pod,
which then stops listening, so a pod that comes again waits for the next attempt.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_MISTAKE, EXIT_STOPPED, UserError
from serried.configs.formats import printable
from serried.configs.plain_data import NotPlainData, parse_json
from serried.configs.schema.fields import scratch_folder
from serried.launch.local.processes import NotedSignals, Started, killed_by, wait_for_all
from serried.launch.slurm.requeue import ANOTHER_POD, ENDS, earlier_end, newest_in_bucket, verdict
from serried.records.object_store import open_store
from serried.records.status import Status, read_status
from serried.records.store import StoreError

NODES = "SERRIED_NODES"
PROCESSES = "SERRIED_PROCESSES"
RUN_DIR = "SERRIED_RUN_DIR"
GRACE_SECONDS = "SERRIED_GRACE_SECONDS"
JOB = "SERRIED_JOB"
"""Variable with the identity of the Job, which is the same for all its pods and their replacements."""
MEETING_SECONDS = "SERRIED_MEETING_SECONDS"
TERMINATION_LOG = "SERRIED_TERMINATION_LOG"
PORT = 29500
"""Port at which the pods meet. The ranks meet at the next one."""

EXIT_UNAVAILABLE = 69
_PATIENCE_SECONDS = 1800.0
_ANSWER_SECONDS = 10.0
_RETRY_SECONDS = 0.5
_ENDING_SECONDS = 10.0
_NOTICED_SECONDS = 2.0
_MOST_MESSAGE = 4000
_MOST_ENDS_BYTES = 2**20
_BUCKET_RETRY_SECONDS, _VERDICT_SECONDS = 20.0, 60.0
_GO = b"go\n"
_DONE = b"done\n"
"""Message of a pod that ended because the run did. In the first pod's, the exit code and reason follow as JSON."""
_KILLED = b"killed\n"


class Attempt:
    """The pods that start together. ``is_left`` is set when one of them is lost, or one of its ranks is killed."""

    def __init__(self, index: int, nodes: int, address: str, port: int, patience_seconds: float) -> None:
        """Wait for the other pods.

        Raises:
            TimeoutError: They were not there within ``patience_seconds``.
        """
        self.is_left = threading.Event()
        self._verdict: tuple[int, str] | None = None
        self._is_over = threading.Event()
        self._has_told = False
        self._deadline = time.monotonic() + patience_seconds
        self._others = self._gathered(nodes, port) if index == 0 else [self._joined(index, address, port)]
        for other in self._others:
            other.settimeout(None)
            threading.Thread(target=self._watch, args=(other,), name="other pod", daemon=True).start()

    def _left_seconds(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("not all pods started in time")
        return left

    def _gathered(self, nodes: int, port: int) -> list[socket.socket]:
        """Accept all other pods, then let them go."""
        waiting: dict[int, socket.socket] = {}
        if nodes == 1:
            return []
        with socket.create_server(("", port), backlog=1024) as server:
            while len(waiting) < nodes - 1:
                server.settimeout(self._left_seconds())
                other = server.accept()[0]
                other.settimeout(_ANSWER_SECONDS)
                _notice_lost_nodes(other)
                try:
                    index = int(other.makefile().readline(32))
                except (OSError, ValueError):  # not a pod
                    other.close()
                    continue
                if index in waiting:  # a pod that was replaced while it waited
                    waiting[index].close()
                waiting[index] = other
        for other in waiting.values():
            with suppress(OSError):  # it has ended, which its thread will notice
                other.sendall(_GO)
        return list(waiting.values())

    def _joined(self, index: int, address: str, port: int) -> socket.socket:
        """Wait at the first pod until it lets all pods go."""
        while True:
            left = self._left_seconds()
            with suppress(OSError):  # the first pod, or its name, is not there yet, or it was replaced
                first = socket.create_connection((address, port), timeout=min(left, _ANSWER_SECONDS))
                _notice_lost_nodes(first)
                first.sendall(f"{index}\n".encode())
                first.settimeout(left)
                if first.recv(len(_GO), socket.MSG_WAITALL) == _GO:
                    return first
                first.close()
            time.sleep(_RETRY_SECONDS)

    def _watch(self, other: socket.socket) -> None:
        with suppress(OSError), other.makefile("rb") as lines:
            if lines.readline(len(_DONE)) == _DONE:
                self._verdict = _parsed(lines.readline(2 * _MOST_MESSAGE))
                self._is_over.set()
                return
        self.is_left.set()
        self._is_over.set()

    def verdict_of_first_pod(self) -> tuple[int, str] | None:
        """Wait for the exit code and the reason of the first pod; None if it sends none. Called on other pods."""
        self._is_over.wait(_VERDICT_SECONDS)
        return self._verdict

    def close(self) -> None:
        """Leave the attempt. The end of this process does the same."""
        for other in self._others:
            with suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)
            other.close()

    def tell_done(self, verdict: tuple[int, str] | None = None) -> None:
        """Report to the other pods that the run has ended here. Ranks elsewhere may take longer to end.

        ``verdict``: exit code and reason, from the first pod.
        """
        self._tell(_DONE + (json.dumps(verdict).encode() + b"\n" if verdict else b""))

    def tell_killed(self) -> None:
        """Tell the other pods that a rank here was killed, before their own ranks fail because of that."""
        self._tell(_KILLED)

    def _tell(self, message: bytes) -> None:
        if not self._has_told:
            self._has_told = True
            for other in self._others:
                with suppress(OSError):  # it has ended
                    other.sendall(message)


def _parsed(line: bytes) -> tuple[int, str] | None:
    """Return the exit code and the reason in a message; None if it has none."""
    with suppress(NotPlainData, TypeError, ValueError):
        code, reason = parse_json(line)
        if code in (EXIT_FINISHED, EXIT_FAILED, EXIT_STOPPED, EXIT_MISTAKE) and isinstance(reason, str):
            return code, printable(reason)
    return None


def _notice_lost_nodes(connection: socket.socket) -> None:
    """Notice a node that vanished within 20 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _OtherPods:
    """The other pods as a process for ``wait_for_all``: it fails when one of them ends before our ranks."""

    def __init__(self, attempt: Attempt, ranks: Sequence[Started]) -> None:
        self._attempt, self._ranks = attempt, ranks
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and all(rank.poll() is not None for rank in self._ranks):
            self.returncode = EXIT_FINISHED
        elif self.returncode is None and self._attempt.is_left.is_set():
            self.returncode = EXIT_STOPPED
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        pass


def main(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Train on this node, and return the exit code of the pod."""
    split = list(words).index("--")
    command = [sys.executable, *words[:split], *words[split + 1 :]]
    try:
        node = Node(environment)
    except UserError as error:
        print(f"error: {error}", flush=True)
        return EXIT_MISTAKE
    with NotedSignals() as signals:
        if (ended := node.earlier_end()) is not None:  # this pod was replaced after the others had ended for good
            return node.end(EXIT_FINISHED, ended)
        try:
            node.begin()
            attempt = _unless_signaled(signals, node.meet)
        except TimeoutError as error:
            return node.end(EXIT_STOPPED, f"stopped before training began: {error}")
        except OSError as error:
            return node.end(EXIT_MISTAKE, f"error: {error.filename or f'port {node.port}'}: {error.strerror}")
        if attempt is None:
            return node.end(EXIT_STOPPED, f"stopped before training began: {signals.received[0].name}")
        ranks = [subprocess.Popen(command, env=variables) for variables in node.rank_variables()]

        def tell_others() -> None:
            if not signals.received and any((rank.returncode or 0) < 0 for rank in ranks):
                attempt.tell_killed()

        processes: list[Started] = [*ranks, _OtherPods(attempt, ranks)]
        failed = wait_for_all(processes, signals, node.patience_seconds, tell_others)
    killed = node.killed_rank(failed)
    if killed is not None and not signals.received and not attempt.is_left.is_set():
        attempt.tell_killed()
        return node.end(*killed)
    if failed and node.waits_for_first_pod and (verdict := attempt.verdict_of_first_pod()) is not None:
        attempt.tell_done()
        return node.end(*verdict)
    status = node.final_status() if failed or node.is_in_bucket else None
    asked = signals.received[0].name if signals.received else None
    if status is not None and status.state == "failed":  # perhaps because of another pod, whose end is noticed later
        attempt.is_left.wait(_NOTICED_SECONDS)
    has_lost_pod = attempt.is_left.is_set() and asked is None
    if node.is_in_bucket:
        verdict = node.judge(failed, status, asked=asked, has_lost_pod=has_lost_pod)
        if not has_lost_pod:
            attempt.tell_done((EXIT_STOPPED, verdict[1]) if verdict[0] == EXIT_UNAVAILABLE else verdict)  # counts once
        return node.end(*verdict)
    if not failed or (status is not None and status.state != "running" and not has_lost_pod):
        attempt.tell_done()
    return node.end(*node.judge(failed, status, asked=asked, has_lost_pod=has_lost_pod))


class Node:
    """This pod's place in the run."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises ``UserError`` if the run is in a bucket that cannot be opened from here."""
        self._environment = environment
        self._index = int(self._given("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "0"))
        self._nodes = int(self._given("PET_NNODES", NODES, "1"))
        self._processes = int(self._given("PET_NPROC_PER_NODE", PROCESSES, "1"))
        self._address = self._given("PET_MASTER_ADDR", "MASTER_ADDR", "127.0.0.1")
        self._port = int(self._given("PET_MASTER_PORT", "MASTER_PORT", str(PORT)))
        run_dir = environment[RUN_DIR]
        self._ends = _EndsInBucket(run_dir) if is_bucket_url(run_dir) else None
        self._run_dir = scratch_folder(run_dir) if self._ends is not None else Path(run_dir)
        self._start = self._run_dir / "kubernetes" / f"{environment.get(JOB, 'job')}.start"

    def _given(self, *names: str) -> str:
        """Return the first of the variables ``names`` that is set; the last of ``names`` is the default."""
        *variables, default = names
        return next((value for name in variables if (value := self._environment.get(name))), default)

    @property
    def is_in_bucket(self) -> bool:
        """Whether the run is in a bucket, so that pods share no folder."""
        return self._ends is not None

    @property
    def waits_for_first_pod(self) -> bool:
        """Whether the first pod knows how the run ended, and this one does not."""
        return self._ends is not None and self._index != 0

    @property
    def patience_seconds(self) -> float:
        """Time that the ranks get to stop."""
        return max(1.0, float(self._environment.get(GRACE_SECONDS, "600")) - _ENDING_SECONDS)

    @property
    def port(self) -> int:
        """Port at which the pods meet."""
        return self._port

    def earlier_end(self) -> str | None:
        """Return how the last start of this job ended, if nothing should follow; else None."""
        if self._ends is not None:
            self._start.parent.mkdir(parents=True, exist_ok=True)
            self._ends.download(self._start.parent / ENDS)
            return earlier_end(self._start)
        if not self._start.exists() or self.final_status(0.0) is None:
            return None
        code, line = verdict(self._run_dir, self._start, is_recorded=False)
        return line if code == EXIT_FINISHED else None

    def begin(self) -> None:
        """Mark the start of an attempt: a ``status.json`` from before belongs to an earlier one. Raises ``OSError`` if
        the volume cannot be written."""
        if self._index == 0:
            self._start.parent.mkdir(parents=True, exist_ok=True)
            self._start.touch()
            self._start.with_suffix(".stopped").unlink(missing_ok=True)

    def meet(self) -> Attempt:
        """Wait for the other pods. Raises ``TimeoutError`` if they do not come, ``OSError`` if the port is in use."""
        seconds = float(self._environment.get(MEETING_SECONDS, _PATIENCE_SECONDS))
        return Attempt(self._index, self._nodes, self._address, self._port, seconds)

    def rank_variables(self) -> Iterator[dict[str, str]]:
        """Yield the environment of each rank, as torchrun would set it."""
        for number in range(self._processes):
            rank = {
                "RANK": self._index * self._processes + number, "LOCAL_RANK": number, "GROUP_RANK": self._index,
                "WORLD_SIZE": self._nodes * self._processes, "LOCAL_WORLD_SIZE": self._processes,
                "MASTER_ADDR": self._address, "MASTER_PORT": self._port + 1,
            }  # fmt: skip
            yield {**self._environment, **{name: str(value) for name, value in rank.items()}}

    def killed_rank(self, failed: Mapping[int, int]) -> tuple[int, str] | None:
        """Return the exit code and the reason if a rank was killed by a signal; else None."""
        killed = [(rank, -code) for rank, code in sorted(failed.items()) if code < 0]
        if not killed:
            return None
        rank, number = killed[0]
        return 128 + number, f"rank {self._index * self._processes + rank} was {killed_by(number)}"

    def judge(
        self, failed: Mapping[int, int], status: Status | None, *, asked: str | None, has_lost_pod: bool
    ) -> tuple[int, str]:
        """Return the exit code and the reason.

        Args:
            failed: Exit codes, negative for a signal, of the ranks that failed first. The index after the last rank
                stands for the other pods.
            status: Status that this attempt left.
            asked: Name of the signal that this pod received.
            has_lost_pod: Whether another pod ended before the ranks here.
        """
        if self.waits_for_first_pod and failed and EXIT_MISTAKE not in failed.values():
            is_failed = not (asked or has_lost_pod or EXIT_STOPPED in failed.values())
            reason = "the first pod did not say why; see its log" if is_failed else asked or ANOTHER_POD
            return (EXIT_FAILED, f"failed: {reason}") if is_failed else (EXIT_STOPPED, f"stopped: {reason}")
        if not failed and status is None:
            return EXIT_FINISHED, "finished"
        if status is None and EXIT_MISTAKE in failed.values():
            return EXIT_MISTAKE, "a mistake in the command or the environment; see the log of the pod"
        is_stopped = bool(asked) or has_lost_pod or EXIT_STOPPED in failed.values()
        if status is None and is_stopped:
            reason = asked or ANOTHER_POD
            if self._index == 0:
                self._start.with_suffix(".stopped").write_text(reason)
            else:
                return EXIT_STOPPED, f"stopped before training began: {reason}"
        if status is None and not is_stopped:
            return EXIT_FAILED, f"ranks ended with exit codes {sorted({*failed.values()})}; see the log of the pod"
        if self._ends is None:
            return verdict(self._run_dir, self._start, is_recorded=self._index == 0, has_lost_pod=has_lost_pod)
        newest = self._ends.newest_checkpoint
        found = verdict(self._run_dir, self._start, has_lost_pod=has_lost_pod, newest_checkpoint=newest)
        is_kept = self._ends.upload(self._start.parent / ENDS)
        if found[0] == EXIT_STOPPED and not asked and not has_lost_pod and not is_kept:
            return EXIT_UNAVAILABLE, found[1]  # counts, or a wrong address or a full store would start pods forever
        return found if failed else (EXIT_FINISHED, found[1])

    def final_status(self, patience_seconds: float = _ENDING_SECONDS) -> Status | None:
        """Return the status that this attempt left; None if it left none. Rank 0 may be in another pod, and still be
        writing it."""
        deadline = time.monotonic() + patience_seconds
        while True:
            status = read_status(self._run_dir)
            if status is None or status.time < self._start.stat().st_mtime:
                status = None
            is_known = self._index == 0 or self.is_in_bucket or (status is not None and status.state != "running")
            if is_known or time.monotonic() > deadline:
                return status
            time.sleep(_RETRY_SECONDS)

    def end(self, code: int, line: str) -> int:
        """Print the reason for the end, show it in the status of the pod, and return ``code``."""
        print(line, flush=True)
        with suppress(OSError):
            Path(self._environment.get(TERMINATION_LOG, "/dev/termination-log")).write_text(line[:_MOST_MESSAGE])
        return code


class _EndsInBucket:
    """Records of how the starts of a run in a bucket ended. Pods read them before their ranks start, and the first pod
    adds to them.

    If the bucket does not answer, nothing is read or added, and the ranks report the reason.
    """

    def __init__(self, url: str) -> None:
        self._store = open_store(url, retry_seconds=_BUCKET_RETRY_SECONDS)
        self._key = f"kubernetes/{ENDS}"

    def download(self, path: Path) -> None:
        """Replace the file at ``path``."""
        path.unlink(missing_ok=True)
        with suppress(StoreError):
            if (found := self._store.get(self._key)) is not None:
                path.write_bytes(found[0][-_MOST_ENDS_BYTES:])

    def upload(self, path: Path) -> bool:
        """Write the file at ``path`` to the bucket. Returns whether that worked."""
        with suppress(OSError):
            self._store.put(self._key, path.read_bytes())
            return True
        return False

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint; None if there is none."""
        return newest_in_bucket(self._store)


def _unless_signaled(signals: NotedSignals, meet: Callable[[], Attempt]) -> Attempt | None:
    """Return the result of ``meet``, which is called in a thread; None as soon as a signal arrives."""
    found: list[Attempt | Exception] = []

    def run() -> None:
        try:
            found.append(meet())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name="meeting", daemon=True)
    thread.start()
    while thread.is_alive():
        if signals.received:
            return None
        thread.join(0.1)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
