"""The head of a run in a bucket: claims, renewals, commits and refusals, on an S3 server."""

import json
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from serried.configs.errors import UserError
from serried.records import head as head_module
from serried.records.bucket_run import CONTROL, new_request, rebuilt_head
from serried.records.head import HEAD, Earlier, Entry, Fenced, Head, HeadContent, read_head
from serried.records.object_store import ObjectStore
from serried.records.store import StoreError, Unclear
from testing.s3_server import S3Server

pytestmark = pytest.mark.cloud


@pytest.fixture
def store(server: S3Server, folder: str) -> ObjectStore:
    return ObjectStore(server.url(folder), retry_seconds=1.0)


def claim(store: ObjectStore, job: str = "", patience_seconds: float = 0.2, renew_seconds: float = 100.0) -> Head:
    return Head.claim(store, job, patience_seconds=patience_seconds, renew_seconds=renew_seconds)


def keep_all(new: HeadContent) -> None:
    """Remove no checkpoint."""


def save(head: Head, step: int) -> Entry:
    """Commit a checkpoint with one file, and keep the newest two."""
    entry = Entry(step, head.begin(step), 4)
    for name in ("model.safetensors", "MANIFEST.json"):
        head.store.put(f"{entry.prefix}/{name}", b"file")

    def keep_two(new: HeadContent) -> None:
        del new.checkpoints[:-2]

    for gone in head.commit(entry, keep_two):
        head.remove(gone.attempt)
    return entry


def steps(store: ObjectStore) -> list[int]:
    content = read_head(store)
    assert content is not None
    return [entry.step for entry in content.checkpoints]


def test_new_run_is_claimed_with_three_requests_to_the_head_and_renewed_with_one(
    server: S3Server, store: ObjectStore, folder: str
) -> None:
    before = len(server.requests())
    head = claim(store)
    to_head = [request for request in server.requests()[before:] if request.endswith(f"{folder}/{HEAD}")]
    assert [request.partition(" /")[0] for request in to_head] == ["GET", "PUT conditional", "PUT conditional"]
    before = len(server.requests())
    head.renew()
    assert server.requests()[before:] == [f"PUT conditional /bucket/{folder}/{HEAD}"]
    assert (head.epoch, head.is_ours, read_head(store)) == (1, True, head.content)


def test_released_run_and_run_of_the_same_job_are_claimed_without_waiting(store: ObjectStore) -> None:
    claim(store).release()
    second = claim(store, job="job 7", patience_seconds=1000.0)
    third = claim(store, job="job 7", patience_seconds=1000.0)
    assert third.epoch == second.epoch + 1 == 3
    with pytest.raises(Fenced, match="has taken over s3://"):
        second.renew()


def test_renewed_run_refuses_a_second_start_which_names_the_owner(store: ObjectStore) -> None:
    head = claim(store, renew_seconds=0.1)
    said: list[str] = []
    with pytest.raises(UserError, match=rf"process {head.content.owner[:8]} on \S+ trains in s3://.*run\.dir=OTHER"):
        Head.claim(store, "another job", patience_seconds=30.0, say=said.append)
    assert said[0].startswith("waiting    up to 30 s for process ")
    head.release()


def test_silent_owner_loses_the_run_after_the_patience_and_is_refused(store: ObjectStore) -> None:
    zombie = claim(store)
    save(zombie, 10)
    late = zombie.begin(20)
    owner = claim(store)
    save(owner, 30)
    with pytest.raises(Fenced, match=rf"process {owner.content.owner[:8]} on \S+ has taken over"):
        zombie.commit(Entry(20, late), keep_all)
    assert not zombie.is_ours
    with pytest.raises(Fenced):
        zombie.sweep()
    zombie.release()  # no error, and no effect
    assert steps(store) == [10, 30]
    assert owner.content.state == "held"


@pytest.mark.usefixtures("jumping_clock")
def test_clock_that_is_an_hour_off_changes_no_claim_renewal_or_refusal(store: ObjectStore) -> None:
    test_renewed_run_refuses_a_second_start_which_names_the_owner(store)
    test_silent_owner_loses_the_run_after_the_patience_and_is_refused(store)


def test_one_of_four_concurrent_claims_wins(store: ObjectStore) -> None:
    won: list[Head] = []

    def start() -> None:
        with suppress(UserError):
            won.append(claim(store, patience_seconds=10.0, renew_seconds=0.1))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for head in won:
        head.release()
    assert [head.epoch for head in won] == [1]


def test_commit_takes_one_request_and_retention_removes_the_files_of_old_checkpoints(
    server: S3Server, store: ObjectStore, folder: str
) -> None:
    head = claim(store)
    save(head, 1)
    kept = [save(head, 2), save(head, 3)]
    assert steps(store) == [2, 3]
    names = {key.removeprefix(f"{folder}/") for key in server.objects(folder)}
    files = ("model.safetensors", "MANIFEST.json")
    assert names == {HEAD} | {f"{entry.prefix}/{name}" for entry in kept for name in files}
    before = len(server.requests())
    head.commit(Entry(4, head.begin(4)), keep_all)
    assert server.requests()[before:] == [f"PUT conditional /bucket/{folder}/{HEAD}"]


def test_commit_of_the_same_step_replaces_the_checkpoint(store: ObjectStore) -> None:
    head = claim(store)
    first, second = save(head, 5), save(head, 5)
    assert [entry.attempt for entry in head.content.checkpoints] == [second.attempt]
    assert [listed.key for listed in store.list(first.prefix)] == []


@pytest.mark.parametrize("fault", ["lost", "cut_answer"])
def test_commit_whose_answer_is_lost_is_read_back_as_ours(fault: str, server: S3Server, store: ObjectStore) -> None:
    head = claim(store)
    server.set_faults(fault)
    entry = Entry(3, head.begin(3))
    head.commit(entry, keep_all)
    assert steps(store) == [3]
    assert head.active == frozenset()
    head.renew()


def test_files_of_an_unclear_commit_stay_until_a_later_write_of_the_head(server: S3Server, store: ObjectStore) -> None:
    head = claim(store)
    entry = Entry(3, head.begin(3))
    store.put(f"{entry.prefix}/model.safetensors", b"file")
    server.set_faults(down=1.0)
    with pytest.raises(StoreError):
        head.commit(entry, keep_all)
    server.set_faults()
    assert head.give_up(entry.attempt) is False
    assert len(store.list(entry.prefix)) == 1  # the commit may still arrive
    assert head.sweep() == [entry.attempt]  # the renewal in it has shown that the commit did not arrive
    assert store.list(entry.prefix) == []


def test_unclear_commit_that_took_effect_is_adopted_by_a_renewal(server: S3Server, store: ObjectStore) -> None:
    head = claim(store)
    entry = Entry(3, head.begin(3))
    store.put(f"{entry.prefix}/model.safetensors", b"file")
    server.set_faults("lost", down=1.0)
    with pytest.raises(StoreError):
        head.commit(entry, keep_all)
    server.set_faults()
    assert steps(store) == [3]
    head.renew()
    assert head.give_up(entry.attempt) is True
    assert head.sweep() == []
    assert len(store.list(entry.prefix)) == 1


def test_sweep_removes_attempts_of_earlier_starts_and_nothing_else(store: ObjectStore) -> None:
    head = claim(store)
    kept, orphan = save(head, 1), head.begin(2)
    store.put(f"checkpoints/{orphan}/model.safetensors", b"file")
    assert head.sweep() == []  # being written
    owner = claim(store)
    active = owner.begin(4)
    others = [
        f"checkpoints/{active}/a",
        "checkpoints/notes.txt",
        "checkpoints/mine/a",
        "checkpoints/00000009-9-00000000/a",
    ]
    for key in others:
        store.put(key, b"file")

    def set_aside(new: HeadContent) -> None:
        new.checkpoints, new.earlier = [], [Earlier(1, [kept], "killed")]

    owner.swap(set_aside)
    assert owner.sweep() == [orphan]
    assert {listed.key for listed in store.list("checkpoints")} == {
        *others,
        *(f"{kept.prefix}/{name}" for name in ("model.safetensors", "MANIFEST.json")),
    }


def test_store_that_ignores_conditions_is_refused(server: S3Server, store: ObjectStore) -> None:
    server.set_faults(ignore_conditions=1.0)
    with pytest.raises(UserError, match=r"ignores If-Match and If-None-Match, so two starts could both train here"):
        claim(store)
    content = read_head(store)
    assert content is not None
    assert content.state == "free"


def test_outage_ends_nothing_and_the_next_renewal_succeeds(server: S3Server, store: ObjectStore) -> None:
    head = claim(store, renew_seconds=0.1)
    server.set_faults(down=1.0)
    time.sleep(2.0)
    server.set_faults()
    before = server.counts()["PUT conditional"]
    while server.counts()["PUT conditional"] < before + 2:
        time.sleep(0.05)
    assert head.is_ours
    head.release()


def test_checkpoints_without_a_head_are_not_taken_for_a_new_run(store: ObjectStore) -> None:
    store.put("checkpoints/00000300-7-1b57633a/MANIFEST.json", b"{}")
    with pytest.raises(
        UserError, match=r"has checkpoints but no head\.json; rebuild it: serried repair run\.dir=s3://"
    ):
        claim(store)


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoints": [{"step": 3, "attempt": "../../etc", "size_bytes": 1, "validation": {}}]},
        {"checkpoints": [{"step": 4, "attempt": "00000003-1-1b57633a", "size_bytes": 1, "validation": {}}]},
        {"checkpoints": 5}, {"epoch": -1}, {"owner": "a\nb"}, {"version": 2}, {"earlier": [{}]}, {"extra": 3},
    ],
)  # fmt: skip
def test_invalid_head_of_a_stranger_is_refused_in_one_line(change: dict[str, object], store: ObjectStore) -> None:
    text = json.dumps(json.loads(HeadContent(checkpoints=[Entry(3, "00000003-1-1b57633a")]).to_json()) | change)
    store.put(HEAD, text.encode())
    with pytest.raises(UserError) as refused:
        read_head(store)
    assert "\n" not in str(refused.value)
    assert f"{store.url}/{HEAD}" in str(refused.value)
    is_newer = "version" in change
    with pytest.raises(UserError, match="has version 2" if is_newer else "there is no complete checkpoint"):
        rebuilt_head(store)  # a head of a later version is not lost


def test_request_is_followed_although_the_note_of_it_got_no_answer(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Head.claim(store, renew_seconds=100.0)
    store.put(CONTROL, b"stop 1234")
    with monkeypatch.context() as patched:
        put, get = store.put, store.get

        def put_without_answer(*given: Any) -> str:
            put(*given)
            raise Unclear("no answer in time")

        def get_all_but_the_head(key: str) -> tuple[bytes, str] | None:
            if key == HEAD:
                raise StoreError("no answer in time")
            return get(key)

        patched.setattr(store, "put", put_without_answer)
        patched.setattr(store, "get", get_all_but_the_head)
        with pytest.raises(StoreError):
            new_request(head, "")
    head.renew()
    request = new_request(head, "")
    assert request is not None
    assert request[0] == "stop"
    assert new_request(head, request[1]) is None
    head.release()


def test_write_that_the_store_never_answers_ends_although_reads_are_answered(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, waited_seconds = claim(store), 0.0

    def has_no_space(*_: object) -> str:
        nonlocal waited_seconds
        waited_seconds += 180.0  # the store repeats it for so long
        raise Unclear("the server answers 507 Insufficient Storage")

    with monkeypatch.context() as patched:
        patched.setattr(store, "put", has_no_space)
        patched.setattr(head_module, "time", SimpleNamespace(monotonic=lambda: waited_seconds, sleep=lambda _: None))
        with pytest.raises(Unclear):
            head.renew()
    assert waited_seconds == 180.0
    head.release()
