"""Kill a run that saves into a bucket behind a faulty network, again and again, and check the bucket after every kill.

    python -m testing.bucket_storm kills=200 zombies=20 races=20 [lanes=3] [seed=1]

Each "rank" is a thread whose data is a function of (rank, step). A worker claims the run, resumes, and saves after
every step, until it is killed at a random moment. In between, a worker is paused until another has taken the run and
saved, and then continues (a zombie), and two workers start at once (a race). ``lanes`` runs are disturbed side by side.

The checks read the bucket past the proxy. The program prints counts as JSON, and fails if a checkpoint that the head
names is not complete, or if a commit that was reported is missing.
"""

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.records import object_store
from serried.records.head import MANIFEST, Fenced, Head, HeadContent
from serried.records.object_store import ObjectStore
from serried.records.ranged_files import BlockSums, ranged_file
from serried.records.record_upload import RecordUpload, download_records
from serried.records.run_folder import RunFolder
from serried.records.safetensors_files import TensorSpec, header
from serried.runtime.session import Session
from serried.trainer.checkpoint.bucket_checkpoints import BucketCheckpoints, abort_uploads, materialize
from serried.trainer.checkpoint.manifest import FileRecord, parse_manifest
from testing.forked_runs import FORKS, settle
from testing.s3_server import S3Server

RANKS, MIB = 3, 2**20
_DATA_BYTES = 5 * MIB + 4321
NETWORK = {
    "slow_down": 0.03, "error": 0.03, "lost": 0.03, "cut_request": 0.03, "cut_answer": 0.03, "truncate": 0.02,
    "hang": 0.001, "latency": 0.005,
}  # fmt: skip
"""Probability of each fault of ``testing.faulty_proxy``, 17 % of all requests in total."""
_PATIENCE_SECONDS = 2.0


def content_of(rank: int, step: int) -> bytes:
    """Return a safetensors file whose data is a function of ``rank`` and ``step``. It has two parts."""
    data = np.random.Philox(key=[rank, step]).random_raw(_DATA_BYTES // 8 + 1).view("u1")[:_DATA_BYTES]
    return header([TensorSpec("x", torch.uint8, (_DATA_BYTES,))]) + data.tobytes()


def store_of(url: str) -> ObjectStore:
    """Return the folder at ``url`` with parts of 5 MiB, and with short waits between tries."""
    object_store._FIRST_WAIT_SECONDS = 0.1
    object_store._PART_SECONDS = 5.0
    return ObjectStore(url, retry_seconds=20.0, part_bytes=5 * MIB)


# the worker -----------------------------------------------------------------------------------------------------------


def work(url: str, environment: dict[str, str], job: str, scratch: Path, output: Path) -> None:
    """Claim, resume, and save step after step until killed. Each event is a line of ``output``."""
    settle()
    os.environ.update(environment)
    with output.open("a", buffering=1) as file:
        try:
            _work(url, job, scratch, lambda *words: print(*words, file=file, flush=True))
        except Fenced:
            print("fenced", file=file, flush=True)
        except BaseException as error:
            print("died", type(error).__name__, str(error).splitlines()[:1], file=file, flush=True)


def _work(url: str, job: str, scratch: Path, tell: Callable[..., None]) -> None:
    store, folder = store_of(url), RunFolder(scratch)
    try:
        head = Head.claim(store, job, patience_seconds=_PATIENCE_SECONDS, renew_seconds=_PATIENCE_SECONDS / 4)
    except UserError:
        return tell("busy")
    tell("claimed", head.epoch)

    def announce() -> None:
        def name_records(new: HeadContent) -> None:
            new.records = new.epoch

        head.swap(name_records)

    if head.content.records:
        download_records(store, head.content.records, scratch)
    upload = RecordUpload(store, head.epoch, scratch, lambda _: None, is_main=True, announce=announce)
    folder.join(head, upload.flush)
    config = compose(["recipe=tiny", "checkpoint.keep=2"])
    session = Session((0, 0, 1, 1), torch.device("cpu"), config.launch)
    checkpoints = BucketCheckpoints(store, scratch / "checkpoints", config.checkpoint, session, folder)
    step = 0
    if entries := head.content.checkpoints:
        step = entries[-1].step
        path = materialize(store, entries[-1], scratch / "checkpoints")
        for rank in range(RANKS):
            file, expected = ranged_file(path / f"rank{rank}.safetensors"), content_of(rank, step)
            assert file is not None
            for first in range(0, len(expected), 3 * MIB):
                view = memoryview(bytearray(len(expected[first : first + 3 * MIB])))
                file.read_into(first, view)
                assert bytes(view) == expected[first : first + 3 * MIB], "resumed other bytes"
    tell("resumed", step)
    folder.begin("", {}, step)
    tell("swept", *checkpoints.sweep())
    while True:
        step += 1
        folder.record("step", step=step, job=job)
        attempt, _ = checkpoints.begin(step, 0)
        files, problem = _save(checkpoints, attempt, step)
        state = {"step": step, "progress": {}}

        def write_others(others: Path, state: dict[str, Any] = state) -> None:
            (others / "state.json").write_text(json.dumps(state))

        if problem is None:
            problem = checkpoints.commit(attempt, step, files, write_others, state, [])
        if not head.is_ours:
            return tell("fenced")
        if problem is None:
            tell("saved", step)
        else:
            tell("failed", step, problem)
            checkpoints.discard(attempt)


def _save(checkpoints: BucketCheckpoints, attempt: str, step: int) -> tuple[dict[str, FileRecord], str | None]:
    """Upload the files of all ranks. Returns their records, and the reason if one failed."""
    files: dict[str, FileRecord] = {}
    problems: list[str] = []

    def save(rank: int) -> None:
        name, content = f"rank{rank}.safetensors", memoryview(content_of(rank, step))
        uploads, sums = checkpoints.files(attempt), BlockSums()
        try:
            uploads.open(name)
            for first in range(0, len(content), MIB):
                sums.add(content[first : first + MIB])
                uploads.append(name, [content[first : first + MIB]], 0)
            uploads.close(name, is_whole=True)
            files[name] = FileRecord(len(content), zlib.crc32(content), sums.text())
        except OSError as error:
            problems.append(uploads.reason(name, error))
            uploads.close(name, is_whole=False)

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return files, problems[0] if problems else None


class Worker:
    """A worker process, and the lines that it has written."""

    def __init__(self, server: S3Server, url: str, job: str, place: Path) -> None:
        place.mkdir()
        self._output = place / "output"
        self._output.touch()
        arguments = (url, server.environment, job, place / "scratch", self._output)
        self._process = FORKS.Process(target=work, args=arguments, daemon=True)
        self._process.start()

    def lines(self) -> list[str]:
        """Return the complete lines so far."""
        return [line for line in self._output.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def has(self, word: str) -> bool:
        """Return whether a line starts with ``word``."""
        return any(line.startswith(word) for line in self.lines())

    def wait_for(self, *words: str, seconds: float = 90.0) -> bool:
        """Wait for a line that starts with one of ``words``, and return whether there is one."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.is_alive():
            if any(map(self.has, words)):
                return True
            time.sleep(0.02)
        return any(map(self.has, words))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.join()


# the checks -----------------------------------------------------------------------------------------------------------


class Lane:
    """One run in the bucket, and the storm on it."""

    def __init__(self, server: S3Server, name: str, seed: int, place: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._server, self._name, self._place = server, name, place
        self._random = random.Random(seed)
        self._newest = self._number = 0

    def storm(self, kinds: list[str]) -> None:
        """Start, disturb and kill workers: one ``kill``, ``zombie`` or ``race`` after the other."""
        for kind in kinds:
            workers = getattr(self, f"_{kind}")()
            for worker in workers:
                worker.kill()
            self._count(workers)
            self._check()
        self._sweep()

    def _worker(self, job: str) -> Worker:
        self._number += 1
        return Worker(self._server, self._server.url(self._name), job, self._place / f"{self._name}-{self._number}")

    def _kill(self) -> list[Worker]:
        worker = self._worker("same")
        # Some are killed while they claim and resume, some in any save, and some after a commit: on a slow machine,
        # most processes of the second kind end before they have saved anything.
        begin = self._random.random()
        if begin >= 0.6:
            worker.wait_for("saved", "busy", "died", "fenced")
        elif begin >= 0.2:
            worker.wait_for("resumed", "busy", "died", "fenced")
        time.sleep(self._random.random() * 3.0)
        return [worker]

    def _race(self) -> list[Worker]:
        pair = [self._worker(f"race {self._number} {side}") for side in "ab"]
        for worker in pair:
            worker.wait_for("claimed", "busy", "died", seconds=30.0)
        time.sleep(self._random.random())
        winners = sum(worker.has("claimed") for worker in pair)
        assert winners <= 1, [worker.lines() for worker in pair]
        self.counts["races"] += 1
        self.counts["races with one winner"] += winners
        return pair

    def _zombie(self) -> list[Worker]:
        while True:
            zombie = self._worker("same")
            if zombie.wait_for("saved"):
                break
            zombie.kill()
            self._count([zombie])
        time.sleep(self._random.random())
        zombie.signal(signal.SIGSTOP)
        other = self._worker("other")
        assert other.wait_for("saved", seconds=120.0), other.lines()
        epoch = int(next(line for line in other.lines() if line.startswith("claimed")).split()[1])
        before = len(zombie.lines())
        zombie.signal(signal.SIGCONT)
        assert zombie.wait_for("fenced", seconds=90.0), zombie.lines()
        assert not any(line.startswith("saved") for line in zombie.lines()[before + 1 :]), zombie.lines()
        assert self._head()["epoch"] == epoch
        self.counts["zombies, all refused"] += 1
        return [zombie, other]

    def _count(self, workers: list[Worker]) -> None:
        self.counts["processes killed"] += len(workers)
        for lines in (worker.lines() for worker in workers):
            assert not any(line.startswith("died AssertionError") for line in lines), lines
            saved = [int(line.split()[1]) for line in lines if line.startswith("saved")]
            self.counts["commits reported"] += len(saved)
            self.counts["saves that failed"] += sum(line.startswith("failed") for line in lines)
            self.counts["starts that failed"] += sum(line.startswith("died") for line in lines)
            self._newest = max([self._newest, *saved])

    def _objects(self, path: str) -> dict[str, bytes]:
        found = self._server.objects(f"{self._name}/{path}")
        return {key.removeprefix(f"{self._name}/"): content for key, content in found.items()}

    def _head(self) -> dict[str, Any]:
        found = self._objects("head.json")
        return json.loads(found["head.json"]) if found else {"checkpoints": [], "records": 0}

    def _check(self) -> None:
        """Check that all checkpoints of the head are complete, and that no commit or record is missing."""
        head = self._head()
        for entry in head["checkpoints"]:
            prefix = f"checkpoints/{entry['attempt']}"
            found = self._objects(f"{prefix}/")
            records = parse_manifest(found[f"{prefix}/{MANIFEST}"], prefix)
            assert len(records) == RANKS + 1, records
            for name, record in records.items():
                content = found[f"{prefix}/{name}"]
                assert (len(content), zlib.crc32(content)) == record[:2], (entry, name)
                if name.startswith("rank"):
                    assert content == content_of(int(name[4]), entry["step"]), (entry, name)
            self.counts["checkpoints read back, byte-equal"] += 1
        newest = head["checkpoints"][-1]["step"] if head["checkpoints"] else 0
        assert newest >= self._newest, (newest, self._newest)
        self._newest = newest
        if newest:
            segments = sorted(self._objects(f"records/{head['records']}/metrics-").items())
            lines = b"".join(content for _, content in segments).splitlines()
            steps = [event["step"] for event in map(json.loads, lines) if event["event"] == "step"]
            assert steps[:newest] == list(range(1, newest + 1)), "the records lack a step, or have one twice"

    def _sweep(self) -> None:
        """Check that nothing is left after the owner has swept."""
        for name, value in self._server.past_the_proxy.items():
            os.environ[name] = value
        head = Head.claim(store_of(self._server.url(self._name)), "same")
        self.counts["orphaned attempts at the end"] += len(head.sweep())
        self.counts["orphaned uploads at the end"] += abort_uploads(head.store, lambda _: True)
        named = head.content.named()
        keys = self._objects("checkpoints/")
        left = {key for key in keys if key.split("/")[1] not in named}
        self.counts["orphans after the sweep"] += len(left) + len(self._server.uploads(f"{self._name}/"))
        head.release()
        self._check()


def storm(kills: int, zombies: int, races: int, lanes: int = 1, seed: int = 1) -> dict[str, Any]:
    """Run the storm, and return the counts. Raises ``AssertionError`` at the first thing that must not be."""
    kinds = ["kill"] * kills + ["zombie"] * zombies + ["race"] * races
    random.Random(seed).shuffle(kinds)
    began, problems = time.monotonic(), []
    with S3Server(seed) as server, tempfile.TemporaryDirectory(prefix="serried-storm-") as place:
        server.set_faults(**NETWORK)
        runs = [Lane(server, f"lane{number}", seed + number, Path(place)) for number in range(lanes)]

        def run(number: int) -> None:
            try:
                runs[number].storm(kinds[number::lanes])
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        counts = sum((lane.counts for lane in runs), Counter())
        faults = sum(count for kind, count in server.counts().items() if kind.startswith("fault"))
        requests = sum(count for kind, count in server.counts().items() if kind.partition(" ")[0].isupper())
    assert not counts["orphans after the sweep"]
    return {"seconds": round(time.monotonic() - began), "requests": requests, "faults": faults, **counts,
            "orphans after the sweep": 0}  # fmt: skip


if __name__ == "__main__":
    options = {name: int(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])}
    print(json.dumps(storm(**options), indent=1))
