"""Nodes that share prepared data through a bucket, one of which is killed."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serried.configs import bucket_paths
from serried.configs.schema.data import DataSection, data_section
from serried.recipes.data.prepared import prepare as prepare_module
from serried.recipes.data.prepared.shared_cache import SharedCache, _Claim
from serried.recipes.data.readers.reading_progress import Progress
from serried.records.object_store import open_store
from testing.s3_server import BUCKET, S3Server

_SMALL = "tests.support.small_shards"
_DOCUMENTS = 400


def section(server: S3Server, folder: str, cache: str) -> DataSection:
    return data_section(
        name="text", path=server.url(f"{folder}/text"), sequence_length=64, cache_dir=server.url(f"{folder}/{cache}")
    )


def put_text(server: S3Server, folder: str) -> None:
    rows = [{"text": f"document {number} has {number * number} words"} for number in range(_DOCUMENTS)]
    for part in range(10):
        content = "".join(json.dumps(row) + "\n" for row in rows[part::10]).encode()
        server.client().put_object(Bucket=BUCKET, Key=f"{folder}/text/{part}.jsonl", Body=content)


def start_node(data: DataSection, disk: Path) -> "subprocess.Popen[str]":
    """Start a process that prepares, as on a node with its own ``disk``."""
    request = {"section": data.model_dump(mode="json"), "threads": 1, "shows": False, "patience_seconds": 1.0}
    process = subprocess.Popen(
        [sys.executable, "-m", _SMALL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(disk)}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return process


def written(server: S3Server, folder: str) -> int:
    """Number of objects written below ``folder`` so far. A claim, whose renewals depend on load, counts once."""
    return len({line.split()[-1] for line in server.requests() if line.startswith("PUT") and f"/{folder}/" in line})


def wait_until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.01)


def kill_after(server: S3Server, folder: str, cache: str, puts: int, disk: Path) -> bool:
    """Start a node, and kill it after ``puts`` objects. Return whether it was still running."""
    with start_node(section(server, folder, cache), disk) as process:
        while written(server, f"{folder}/{cache}") < puts and process.poll() is None:
            time.sleep(0.005)
        was_running = process.poll() is None
        process.kill()
    return was_running


def finished(server: S3Server, folder: str, cache: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Prepare on another node. Return all files of the prepared data in the bucket."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
    monkeypatch.setattr(prepare_module, "_PROCESS", _SMALL)
    monkeypatch.setattr(prepare_module, "PATIENCE_SECONDS", 1.0)
    bucket_paths.forget_listings()
    data = prepare_module.prepare(section(server, folder, cache), threads=1)
    key = data.folder.name
    own = {file.name: file.read_bytes() for file in data.folder.iterdir()}
    stored = {name.rpartition("/")[2]: content for name, content in server.objects(f"{folder}/{cache}/{key}").items()}
    assert stored == own
    assert not server.objects(f"{folder}/{cache}/claims")
    return {"key": key, **stored}


def check_kills(
    server: S3Server, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: list[int]
) -> None:
    """Kill a node at each of ``moments``, in percent of the objects, and let another continue."""
    put_text(server, folder)
    undisturbed = finished(server, folder, "whole", tmp_path / "whole", monkeypatch)
    puts = written(server, f"{folder}/whole")
    assert puts > 3 * 10  # of ten jobs

    def done_jobs() -> set[str]:
        return {key for key in server.objects(f"{folder}/killed") if "/done-" in key}

    def used(method: str, since: int, done: set[str]) -> set[str]:
        paths = {line.split()[-1] for line in server.requests()[since:] if line.startswith(method)}
        return {path.removeprefix(f"/{BUCKET}/") for path in paths} & done

    server.set_faults(latency=0.005)
    for number, moment in enumerate(moments):
        done, before = done_jobs(), len(server.requests())
        assert kill_after(server, folder, "killed", 1 + puts * moment // 100, tmp_path / f"node-{number}")
        assert not used("PUT", before, done), "finished jobs are not prepared again"
    done, before = done_jobs(), len(server.requests())
    assert done
    assert finished(server, folder, "killed", tmp_path / "last", monkeypatch) == undisturbed
    assert (used("GET", before, done), used("PUT", before, done)) == (done, set())


@pytest.mark.cloud
def test_killed_preparation_is_continued_by_another_node(
    server: S3Server, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_kills(server, folder, tmp_path, monkeypatch, [50])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_preparation_killed_at_ten_moments_gives_the_same_bytes(
    server: S3Server, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_kills(server, folder, tmp_path, monkeypatch, [*range(0, 100, 10)])


@pytest.mark.cloud
@pytest.mark.usefixtures("jumping_clock")
def test_clock_that_is_an_hour_off_changes_no_claim_of_a_preparation(server: S3Server, folder: str) -> None:
    holder = SharedCache(server.url(folder), Progress(None, 1), patience_seconds=1.0)
    waiter = SharedCache(server.url(folder), Progress(None, 1), patience_seconds=1800.0)
    has_claim, is_prepared = threading.Event(), threading.Event()

    def find() -> str | None:
        return "key" if is_prepared.is_set() else None

    def puts() -> int:
        return sum(line.startswith("PUT") and f"/{folder}/claims" in line for line in server.requests())

    def prepare_alone() -> None:
        with holder.claimed("name", find):
            has_claim.set()
            renewals = puts()
            wait_until(lambda: puts() > renewals + 2)
            is_prepared.set()

    with ThreadPoolExecutor(1) as pool:
        prepared = pool.submit(prepare_alone)
        has_claim.wait()
        with waiter.claimed("name", find) as found:
            assert found == "key"
        prepared.result()
    is_prepared.clear()
    killed = _Claim(open_store(server.url(folder)), "claims/other.json", 1.0)
    assert killed.take()
    with holder.claimed("other", find) as found:
        assert found is None


@pytest.mark.cloud
def test_job_whose_files_are_removed_before_the_upload_is_not_marked_as_finished(
    server: S3Server, folder: str, tmp_path: Path
) -> None:
    """A user's mistake, such as a bad row, removes the folder while earlier jobs are still being uploaded."""
    cache, may_upload = SharedCache(server.url(folder), Progress(None, 1)), threading.Event()
    for _ in range(cache._pool._max_workers):
        cache._pool.submit(may_upload.wait)
    for name in ("done-00000.json", "train-00000.bin"):
        (tmp_path / name).write_bytes(b"{}")
    cache.publish_job("key", tmp_path, 0)
    (tmp_path / "train-00000.bin").unlink()
    may_upload.set()
    with pytest.raises(FileNotFoundError):
        cache.wait_for_jobs()
    assert not server.objects(folder)


@pytest.mark.cloud
def test_nodes_that_start_together_prepare_once(server: S3Server, folder: str, tmp_path: Path) -> None:
    put_text(server, folder)
    nodes = [start_node(section(server, folder, "cache"), tmp_path / name) for name in "ab"]
    folders = []
    for node in nodes:
        with node:
            assert node.stdout is not None
            folders.append(Path(json.loads(list(node.stdout)[-1])["answer"]))
    first, second = ({file.name: file.read_bytes() for file in place.iterdir()} for place in folders)
    assert first == second
    text = [line for line in server.requests() if line.startswith("GET /") and f"/{folder}/text/" in line]
    assert len(text) == 10
