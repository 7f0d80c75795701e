"""Checkpoints of runs in a bucket: saved, resumed on other layouts, damaged, kept and removed."""

import errno
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.records import bucket_run, object_store, run_folder
from serried.records.head import Entry, Head, read_head
from serried.records.object_store import ObjectStore, open_store
from serried.records.ranged_files import RangedFile
from serried.records.store import StoreError
from serried.runtime.session import Session
from serried.trainer.checkpoint.bucket_checkpoints import BucketCheckpoints, Pace, download
from serried.trainer.checkpoint.manifest import check_files, read_manifest
from serried.trainer.monitor.control_file import Control
from serried.trainer.trainer import Trainer
from testing.rank_pool import Cluster
from testing.runs import metrics, run_here, tiny_overrides, train_reported, train_small
from testing.s3_server import BUCKET, S3Server
from tests.ranks.test_health import DDP2, spike_at

pytestmark = pytest.mark.cloud


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERRIED_SCRATCH", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


@pytest.fixture
def url(server: S3Server, folder: str) -> str:
    return server.url(folder)


def entries(url: str) -> list[Entry]:
    head = read_head(open_store(url))
    assert head is not None
    return head.checkpoints


def losses(server: S3Server, folder: str) -> list[tuple[int, float]]:
    """Step and loss of all lines of the run's records."""
    epoch = json.loads(server.objects(f"{folder}/head.json")[f"{folder}/head.json"])["records"]
    text = server.objects(f"{folder}/records/{epoch}/metrics-")[f"{folder}/records/{epoch}/metrics-00000.jsonl"]
    found = [json.loads(line) for line in text.splitlines()]
    return [(line["step"], line["loss"]) for line in found if line["event"] == "step"]


def local_losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics(run_dir)]


def test_checkpoints_in_a_bucket_have_the_bytes_of_those_in_a_folder_and_resume_bitwise(
    server: S3Server, folder: str, url: str, text: Path, tmp_path: Path
) -> None:
    how = ("trainer.deterministic=true", "trainer.ema_decay=0.9")
    assert run_here(tiny_overrides(text, tmp_path / "run", *how)).code == 0
    assert run_here(tiny_overrides(text, url, *how, "trainer.stop_at=3")).code == 75
    assert [entry.step for entry in entries(url)] == [2, 3]
    before = len(server.requests())
    ended = run_here(tiny_overrides(text, url, *how))
    assert ended.code == 0, ended.printed
    requests = [request.replace(f"/bucket/{folder}/", "") for request in server.requests()[before:]]
    assert f"saved      {url}/checkpoints/00000006-2-" in ended.printed
    assert [entry.step for entry in entries(url)] == [4, 6]
    assert losses(server, folder) == local_losses(tmp_path / "run")
    store = open_store(url)
    for entry in entries(url):
        copy = download(store, entry, tmp_path / "copy/checkpoints")
        straight = tmp_path / "run/checkpoints" / copy.name
        ours, theirs = read_manifest(copy), read_manifest(straight)
        assert {name: record for name, record in ours.items() if name != "state.json"} == {
            name: record for name, record in theirs.items() if name != "state.json"
        }
        check_files(copy, lambda _: True)
    assert requests.count("GET head.json") == 1
    first_save = next(number for number, request in enumerate(requests) if request.startswith("PUT checkpoints/"))
    after = requests[first_save:]
    assert len([request for request in after if "list" in request]) == 1, "the records of earlier starts, once"
    resumed = next(request.split("/")[1] for request in requests if request.endswith("/model.safetensors"))
    of_resumed = [request.rpartition("/")[2] for request in requests if f"GET checkpoints/{resumed}/" in request]
    # The header, and the data once: all of it lies in one MiB.
    assert {name: of_resumed.count(name) for name in {*of_resumed}} == {
        "MANIFEST.json": 2, "model.safetensors": 2, "optimizer.safetensors": 2, "state.json": 1, "config.json": 1,
        "tokenizer.json": 1, "tokenizer_config.json": 1,
    }  # fmt: skip


@pytest.fixture
def started(url: str, text: Path) -> str:
    """The URL of a run with checkpoints of steps 2 and 4, stopped after step 4."""
    ended = run_here(tiny_overrides(text, url, "trainer.stop_at=4"))
    assert ended.code == 75, ended.printed
    return url


def train_in_bucket(argv: list[str], environment: dict[str, str]) -> int:
    """Train on a rank of the cluster."""
    with patch.dict(os.environ, environment):
        return train_reported(argv)


@pytest.mark.parametrize("how", ["parallel=ddp", "parallel=fsdp", "parallel.tensor=2"])
def test_run_resumes_on_two_ranks_with_the_losses_of_a_run_in_a_folder(
    how: str, server: S3Server, folder: str, started: str, text: Path, straight: Path, cluster: Cluster, scratch: Path
) -> None:
    answers = cluster.run(
        2, "tests.cloud.test_bucket_checkpoints:train_in_bucket", argv=tiny_overrides(text, started, how),
        environment=server.environment | {"SERRIED_SCRATCH": str(scratch)},
    )  # fmt: skip
    assert [answer.value for answer in answers] == [0, 0], answers[0].printed
    assert dict(losses(server, folder)) == pytest.approx(dict(local_losses(straight)), abs=2e-5)
    assert [entry.step for entry in entries(started)] == [4, 6]


@pytest.mark.slow
def test_run_resumes_on_four_ranks_of_other_layouts_with_the_losses_of_a_run_in_a_folder(
    server: S3Server, folder: str, url: str, text: Path, tmp_path: Path, cluster: Cluster, scratch: Path
) -> None:
    common = ("trainer.micro_batch=1", "trainer.deterministic=true", "model.kv_heads=4")
    starts = [
        (2, "parallel=ddp", "trainer.stop_at=2"),
        (4, "parallel=fsdp", "trainer.stop_at=4"),
        (4, "parallel.tensor=4", ""),
    ]
    for place in (tmp_path / "run", url):
        for ranks, how, end in starts:
            answers = cluster.run(
                ranks, "tests.cloud.test_bucket_checkpoints:train_in_bucket",
                argv=tiny_overrides(text, place, *common, how, *filter(None, [end])),
                environment=server.environment | {"SERRIED_SCRATCH": str(scratch)},
            )  # fmt: skip
            assert [answer.value for answer in answers] == [75 if end else 0] * ranks, answers[0].printed
    assert losses(server, folder) == local_losses(tmp_path / "run"), "bitwise"
    assert run_here(tiny_overrides(text, tmp_path / "straight", *common)).code == 0
    assert dict(losses(server, folder)) == pytest.approx(dict(local_losses(tmp_path / "straight")), abs=2e-5)
    assert [entry.step for entry in entries(url)] == [4, 6]


def flip_last_bit(server: S3Server, key: str) -> None:
    """Damage an object of the bucket."""
    content = bytearray(server.objects(key)[key])
    content[-9] ^= 1
    server.client().put_object(Bucket=BUCKET, Key=key, Body=bytes(content))


@pytest.mark.parametrize("damaged", ["model.safetensors", "optimizer.safetensors", "state.json", "missing"])
def test_damaged_newest_checkpoint_is_skipped_for_the_one_before(
    damaged: str, server: S3Server, folder: str, started: str, text: Path, straight: Path
) -> None:
    newest = entries(started)[-1]
    if damaged == "missing":
        server.client().delete_object(Bucket=BUCKET, Key=f"{folder}/{newest.prefix}/model.safetensors")
    else:
        flip_last_bit(server, f"{folder}/{newest.prefix}/{damaged}")
    ended = run_here(tiny_overrides(text, started))
    assert ended.code == 0, ended.printed
    assert "damaged: s3://" in ended.printed
    assert f"complete checkpoint, {started}/checkpoints/step-00000002" in ended.printed
    assert losses(server, folder) == local_losses(straight)
    head = read_head(open_store(started))
    assert head is not None
    assert [run.checkpoints for run in head.earlier] == [[newest]], "kept, as it may help to find the cause"
    assert [entry.step for entry in head.checkpoints] == [4, 6]


@pytest.mark.parametrize("down", ["the data", "the store"])
def test_store_that_does_not_answer_is_no_damage(
    down: str, started: str, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the run would start from an earlier checkpoint and move the newest one aside."""
    before = read_head(open_store(started))
    assert before is not None
    newest = f"{before.checkpoints[-1].prefix}/model.safetensors"
    in_use = {
        name: getattr(ObjectStore, name) for name in (["read_into"] if down == "the data" else ["read_into", "stat"])
    }

    def replaced(name: str) -> Any:
        def answer(store: ObjectStore, key: str, *more: Any) -> Any:
            if key == newest:
                raise StoreError("model.safetensors: no answer")
            return in_use[name](store, key, *more)

        return answer

    with monkeypatch.context() as patched:
        for name in in_use:
            patched.setattr(ObjectStore, name, replaced(name))
        with pytest.raises(UserError, match=r"cannot read model\.safetensors: no answer"):
            RangedFile(open_store(started), newest, 4, "AAAAAA==").read_into(0, memoryview(bytearray(4)))
        ended = run_here(tiny_overrides(text, started))
    assert ended.code == 78, ended.printed
    assert "cannot read model.safetensors: no answer" in ended.printed
    after = read_head(open_store(started))
    assert after is not None
    assert (after.checkpoints, after.earlier, after.state) == (before.checkpoints, [], "free")


def test_full_scratch_disk_is_a_mistake_and_the_claim_ends(
    started: str, text: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for replaced, what, fix in (
        ((bucket_run, "download_records"), "the scratch folder ", "set SERRIED_SCRATCH to another folder"),
        ((run_folder, "write_atomically"), "", "use SERRIED_SCRATCH=FOLDER"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(*replaced, full)
            ended = run_here(tiny_overrides(text, started))
        assert ended.code == 78, ended.printed
        assert f"cannot write {what}{scratch}/" in ended.printed
        assert f"No space left on device; {fix}" in ended.printed
        head = read_head(open_store(started))
        assert head is not None
        assert head.state == "free"


def test_start_that_cannot_read_its_records_ends_its_claim(
    started: str, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise StoreError("records/1/a does not exist")

    monkeypatch.setattr(bucket_run, "download_records", missing)
    ended = run_here(tiny_overrides(text, started))
    assert ended.code == 78, ended.printed
    assert f"cannot use run.dir={started}: records/1/a does not exist" in ended.printed
    head = read_head(open_store(started))
    assert head is not None
    assert head.state == "free"


def test_save_without_an_answer_differs_from_a_refused_one(server: S3Server, url: str, tmp_path: Path) -> None:
    """A last save without an answer ends the run with 75, even if the store answers again by then."""
    config = compose(["recipe=tiny"])
    session = Session((0, 0, 1, 1), torch.device("cpu"), config.launch)
    checkpoints = BucketCheckpoints(open_store(url, retry_seconds=0.1), tmp_path, config.checkpoint, session, None)
    for fault, had_no_answer in (("down", True), ("expired", False)):
        files = checkpoints.files("00000001-1-00000000")
        assert not checkpoints.had_no_answer
        files.open("a")
        files.append("a", [memoryview(b"1")], 1)
        server.set_faults(**{fault: 1.0})
        with pytest.raises(StoreError) as failed:
            files.close("a", is_whole=True)
        server.set_faults()
        assert "/checkpoints/00000001-1-00000000/a" in files.reason("a", failed.value)
        assert checkpoints.had_no_answer == had_no_answer


@pytest.mark.parametrize("knows", [True, False])
def test_process_that_lost_the_run_removes_no_upload_of_the_next(
    knows: bool, server: S3Server, folder: str, url: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(url)
    heads = [Head.claim(store, patience_seconds=0.1, renew_seconds=100.0) for _ in range(2)]
    attempts = [head.begin(4) for head in heads]
    for attempt in attempts:
        server.client().create_multipart_upload(Bucket=BUCKET, Key=f"{folder}/checkpoints/{attempt}/a")
    section: Any = SimpleNamespace(upload_bytes_per_second=None)
    zombie, owner = (
        BucketCheckpoints(store, scratch, section, None, SimpleNamespace(head=head))  # type: ignore[arg-type]
        for head in heads
    )
    if not knows:  # the run is taken over after the sweep of attempts
        monkeypatch.setattr(heads[0], "sweep", list)
    notes = zombie.sweep()
    assert [note.partition(": ")[0] for note in notes] == [f"cannot remove the remains of saves in {url}"] * knows
    assert len(server.uploads(f"{folder}/")) == 2
    assert owner.sweep() == []
    assert server.uploads(f"{folder}/") == [f"{folder}/checkpoints/{attempts[1]}/a"]
    heads[1].release()


def test_new_start_sets_the_run_aside_and_its_objects_stay(
    server: S3Server, folder: str, started: str, text: Path, straight: Path
) -> None:
    kept = ("/records/1/", "/checkpoints/")
    before = {key: content for key, content in server.objects(folder).items() if any(part in key for part in kept)}
    ended = run_here(tiny_overrides(text, started, "checkpoint.resume=never"))
    assert ended.code == 0, ended.printed
    assert f"an earlier run here (stopped at step 4) is kept as entry 1 of {started}/head.json" in ended.printed
    assert losses(server, folder) == local_losses(straight)
    after = server.objects(folder)
    assert {key: after.get(key) for key in before} == before
    head = read_head(open_store(started))
    assert head is not None
    assert [(run.records, [entry.step for entry in run.checkpoints]) for run in head.earlier] == [(1, [2, 4])]


def rolled_back(argv: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Train on a rank of the cluster; rank 0 damages the newest checkpoint before step 8, whose loss is a spike."""

    def damage() -> None:
        url = next(word for word in argv if word.startswith("run.dir=")).removeprefix("run.dir=")
        while (newest := entries(url)[-1]).step < 6:
            time.sleep(0.05)
        store = open_store(url)
        key = next(listed.key for listed in store.list(newest.prefix) if listed.key.endswith("-00002.safetensors"))
        found = store.get(key)
        assert found is not None
        content = bytearray(found[0])
        content[-1] ^= 1
        store.put(key, bytes(content))

    with patch.dict(os.environ, environment):
        return train_small(argv, fault=spike_at(8), acts={8: damage} if os.environ["RANK"] == "0" else {})


def test_rollback_goes_past_a_damaged_checkpoint_of_the_bucket(
    server: S3Server, url: str, text: Path, cluster: Cluster, scratch: Path
) -> None:
    answers = cluster.run(
        2, "tests.cloud.test_bucket_checkpoints:rolled_back",
        argv=tiny_overrides(text, url, *DDP2, "health.spike=rollback"),
        environment=server.environment | {"SERRIED_SCRATCH": str(scratch)},
    )  # fmt: skip
    assert [answer.value["code"] for answer in answers] == [0, 0], answers[0].printed
    assert "newer checkpoints (00000006-1-" in answers[0].printed
    assert [entry.step for entry in entries(url)] == [9, 12]


def test_best_checkpoint_is_kept_by_the_metric_in_the_head(server: S3Server, url: str, text: Path) -> None:
    words = [
        "checkpoint.keep=1",
        "checkpoint.keep_best=true",
        "optim.lr=50",
        "schedule.warmup_steps=6",
        "trainer.eval_every=2",
    ]
    before = len(server.requests())
    ended = run_here(tiny_overrides(text, url, *words))
    assert ended.code == 0, ended.printed
    found = entries(url)
    assert [entry.step for entry in found] == [2, 6], (found, ended.printed)
    assert found[0].validation["loss"] < found[1].validation["loss"]
    assert f"; the best: checkpoints/{found[0].attempt}" in ended.printed
    requests = server.requests()[before:]
    assert not [request for request in requests if request.startswith("GET") and request.endswith("state.json")]


def test_upload_limit_applies_until_training_waits(url: str, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    pace = Pace(1000.0)
    with monkeypatch.context() as patched:
        patched.setattr("serried.trainer.checkpoint.bucket_checkpoints.time.monotonic", lambda: 7.0)
        patched.setattr(pace._lifted, "wait", waits.append)
        for _ in range(3):
            pace.take(500)
    assert waits == [0.5, 1.0, 1.5], "the clock stands still"
    # At this limit, the last save would take two hours.
    ended = run_here(tiny_overrides(text, url, "checkpoint.every=0", "checkpoint.upload_limit=0.02KB/s"))
    assert ended.code == 0, ended.printed
    refused = run_here(tiny_overrides(text, url, "checkpoint.upload_limit=5"))
    assert refused.code == 78
    assert "checkpoint.upload_limit=5 is not a rate in KB/s, MB/s or GB/s; e.g. checkpoint.upload_limit=500MB/s" in (
        refused.printed
    )


def test_outage_during_a_save_costs_that_checkpoint_and_no_step(
    server: S3Server, folder: str, url: str, text: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(object_store.open_store.__kwdefaults__, "retry_seconds", 1.0)

    def disturb(trainer: Trainer, step: int) -> None:
        if step == 3:
            trainer.saver.wait()
            server.set_faults(down=1.0)
        if step == 5:
            trainer.saver.wait()
            server.set_faults()

    ended = run_here(tiny_overrides(text, url), disturb)
    assert ended.code == 0, ended.printed
    assert "WARNING    no checkpoint of step 4: " in ended.printed
    assert [entry.step for entry in entries(url)] == [2, 6]
    assert losses(server, folder) == local_losses(straight)


def test_run_that_is_taken_over_before_its_last_save_ends_with_75(
    url: str, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(trainer: Trainer, step: int) -> None:
        del trainer
        if step == 5:
            taken.append(Head.claim(open_store(url), patience_seconds=0.0))

    # Only the commit notices it.
    monkeypatch.setattr(Control, "look", lambda _: None)
    monkeypatch.setattr(Control, "look_at_folder", lambda _: None)
    monkeypatch.setattr(Head, "renew", lambda _: None)

    taken: list[Head] = []
    ended = run_here(tiny_overrides(text, url, "checkpoint.every=0"), take)
    assert ended.code == 75, ended.printed
    assert entries(url) == []
    taken[0].release()
