"""Objects in a bucket of an S3 server, through a proxy that cuts, delays and refuses."""

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import pytest

from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import UserError
from serried.records import object_store
from serried.records.object_store import ObjectStore, open_store
from serried.records.store import ABSENT, Conflict, NoAnswer, StoreError, Unclear
from testing.s3_server import SECRET, S3Server

pytestmark = pytest.mark.cloud

MIB = 2**20


def small_parts(server: S3Server, folder: str) -> ObjectStore:
    return ObjectStore(server.url(folder), retry_seconds=30.0, part_bytes=5 * MIB)


def test_objects_are_written_read_listed_and_deleted(server: S3Server, folder: str) -> None:
    store = open_store(server.url(folder))
    assert store.get("a/b") is None
    assert store.stat("a/b") is None
    tag = store.put("a/b c%é.txt", b"0123456789")
    store.put("a/d", b"x")
    assert store.get("a/b c%é.txt") == (b"0123456789", tag)
    assert store.stat("a/b c%é.txt") == (10, tag)
    assert [(found.key, found.size_bytes, found.tag == tag) for found in store.list("a")] == [
        ("a/b c%é.txt", 10, True), ("a/d", 1, False),
    ]  # fmt: skip
    view = memoryview(bytearray(4))
    store.read_into("a/b c%é.txt", 3, view, tag)
    assert bytes(view) == b"3456"
    store.delete(["a/b c%é.txt", "a/missing", "a/d"])
    assert store.list("") == []
    store.delete([])


def test_range_that_is_short_missing_or_of_another_content_raises(server: S3Server, folder: str) -> None:
    store = open_store(server.url(folder))
    tag = store.put("a", b"0123456789")
    with pytest.raises(StoreError, match="2 bytes instead of 4 at byte 8"):
        store.read_into("a", 8, memoryview(bytearray(4)))
    with pytest.raises(StoreError, match="does not exist"):
        store.read_into("b", 0, memoryview(bytearray(4)))
    store.put("a", b"9876543210")
    with pytest.raises(Conflict):
        store.read_into("a", 0, memoryview(bytearray(4)), tag)


def test_conditional_writes_of_a_stale_tag_or_an_existing_object_are_refused(server: S3Server, folder: str) -> None:
    store = open_store(server.url(folder))
    with pytest.raises(Conflict):
        store.put("a", b"0", '"d16fb36f0911f878998c136191af705e"')
    first = store.put("a", b"1", ABSENT)
    with pytest.raises(Conflict):
        store.put("a", b"2", ABSENT)
    second = store.put("a", b"3", first)
    with pytest.raises(Conflict):
        store.put("a", b"4", first)
    assert store.get("a") == (b"3", second)


def test_one_of_six_concurrent_conditional_writes_succeeds(server: S3Server, folder: str) -> None:
    store = open_store(server.url(folder))
    tag, won = store.put("a", b"0"), []

    def write(number: int) -> None:
        try:
            store.put("a", str(number).encode(), tag)
            won.append(number)
        except Conflict:
            pass

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("a") is not None
    assert store.get("a")[0] == str(won[0]).encode()  # type: ignore[index]


@pytest.mark.parametrize("fault", ["slow_down", "error", "lost", "cut_request", "cut_answer", "truncate"])
def test_objects_are_written_and_read_although_requests_fail(fault: str, server: S3Server, folder: str) -> None:
    store, contents = small_parts(server, folder), {}
    server.set_faults("", fault, "", "", "", fault)
    for number, size_bytes in enumerate([1, 11 * MIB + 7]):
        contents[f"file{number}"] = content = os.urandom(size_bytes)
        upload = store.writer(f"file{number}")
        for first in range(0, size_bytes, 700_001):
            upload.write(memoryview(content)[first : first + 700_001])
        upload.finish()
        found = memoryview(bytearray(size_bytes))
        store.read_into(f"file{number}", 0, found)
        assert bytes(found) == content
    server.set_faults()
    assert server.counts()[f"fault {fault}"] >= 2
    assert {key.rpartition("/")[2]: content for key, content in server.objects(folder).items()} == contents


def test_small_object_is_written_with_one_request_and_leaves_no_upload(server: S3Server, folder: str) -> None:
    before = server.counts()
    upload = small_parts(server, folder).writer("a")
    upload.write(memoryview(b"abc"))
    upload.finish()
    assert server.counts() - before == {"PUT": 1, "bytes up": 3}


class Counted(bytearray):
    """A part of an upload, counted while something holds it."""

    alive: ClassVar[weakref.WeakSet["Counted"]] = weakref.WeakSet()
    most: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        Counted.alive.add(self)
        Counted.most = max(Counted.most, len(Counted.alive))

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def test_upload_faster_than_the_server_holds_at_most_8_parts(
    server: S3Server, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "bytearray", Counted, raising=False)
    server.set_faults(latency=0.2)
    upload = small_parts(server, folder).writer("a")
    part = memoryview(bytes(5 * MIB))
    for _ in range(12):
        upload.write(part)
    upload.finish()
    assert Counted.most <= 8, "six on their way, one that the library waits to send, and one that is filled"


def test_aborted_upload_leaves_neither_object_nor_parts(server: S3Server, folder: str) -> None:
    upload = small_parts(server, folder).writer("a")
    upload.write(memoryview(bytes(11 * MIB)))
    upload.abort()
    assert server.objects(folder) == {}
    assert server.uploads(folder) == []


def test_lost_answer_to_the_end_of_an_upload_is_no_error(server: S3Server, folder: str) -> None:
    server.set_faults("", "", "", "", "lost")  # a start, three parts, the end
    upload = small_parts(server, folder).writer("a")
    upload.write(memoryview(bytes(11 * MIB)))
    upload.finish()
    assert server.counts()["fault lost"] > 0
    assert [len(content) for content in server.objects(folder).values()] == [11 * MIB]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "no bucket in run.dir=s3://; use s3://BUCKET/PATH"),
        ("S3:/b/x", "no bucket in run.dir=S3:/b/x; use s3://BUCKET/PATH"),
        ("s3://b/../x/y", "not the URL of a folder"),
        ("s3://key:secret@b/x", "credentials belong in the environment (AWS_ACCESS_KEY_ID"),
        ("s3://b/x?AWSAccessKeyId=secret", "credentials belong in the environment (AWS_ACCESS_KEY_ID"),
    ],
)
def test_invalid_url_is_refused_in_one_line_without_its_secret(url: str, message: str) -> None:
    assert is_bucket_url(url)
    with pytest.raises(UserError) as refused:
        open_store(url)
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)


def test_missing_bucket_and_expired_credentials_are_named(server: S3Server, folder: str) -> None:
    store = open_store("s3://absent/x")
    for call in (lambda: store.get("a"), lambda: store.put("a", b"1"), lambda: store.list("")):
        with pytest.raises(StoreError, match="bucket absent does not exist"):
            call()
    store = open_store(server.url(folder))
    server.set_faults(expired=1.0)
    for call in (lambda: store.get("a"), lambda: store.put("a", b"1"), lambda: store.stat("a")):
        with pytest.raises(StoreError, match=r"expired|may not access"):
            call()
    upload = small_parts(server, folder).writer("a")
    with pytest.raises(StoreError, match="expired") as refused:
        for _ in range(20):
            upload.write(memoryview(bytes(5 * MIB)))
        upload.finish()
    upload.abort()
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_store_without_encryption_on_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://10.0.0.1:9000")
    with pytest.raises(UserError, match=r"AWS_ENDPOINT_URL=http://10\.0\.0\.1:9000 is not encrypted; use https"):
        open_store("s3://b/x")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    open_store("s3://b/x")


def test_missing_credentials_and_missing_obstore_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(object_store, "_is_amazon_instance", lambda: False)
    with pytest.raises(UserError, match=r"no credentials for data\.path=s3://b/x; set AWS_ACCESS_KEY_ID, .* by eval"):
        open_store("s3://b/x", "data.path")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    script = "import sys; sys.modules['obstore'] = None\n"
    script += "from serried.records.object_store import open_store; open_store('s3://b/x')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "UserError: run.dir=s3://b/x needs obstore; pip install 'serried[cloud]'" in done.stderr


class Clock:
    """Time of a process that does nothing but wait."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_outage_is_waited_for_once_by_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.exceptions import BaseError

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    clock, tries = Clock(), 0
    monkeypatch.setattr(object_store, "time", clock)
    said: list[str] = []
    stores = [open_store(f"s3://of-this-test/{name}", say=said.append) for name in "ab"]

    def unanswered(*_: object, **__: object) -> None:
        nonlocal tries
        tries += 1
        raise BaseError("HTTP error: error sending request")

    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError

    def took(call: Callable[[], object]) -> tuple[float, int]:
        nonlocal tries
        began, tries = clock.seconds, 0
        with pytest.raises(NoAnswer):
            call()
        return clock.seconds - began, tries

    for store in stores:
        monkeypatch.setattr(store, "obstore", SimpleNamespace(get=unanswered, put=unanswered, head=absent))
    waited, tried = took(lambda: stores[0].get("a"))
    assert (180 < waited < 190, tried > 30) == (True, True), (waited, tried)
    assert said == ["waiting    up to 180 s for s3://of-this-test/a: HTTP error: error sending request"]
    assert took(lambda: stores[0].put("a", b"1")) == (0.0, 1)
    assert took(lambda: stores[1].get("a")) == (0.0, 1)
    stores[1].begin_to_wait()
    assert took(lambda: stores[0].get("a"))[0] > 180
    assert stores[0].stat("a") is None, "an answer"
    assert took(lambda: stores[1].put("a", b"1"))[0] > 180


def test_write_without_an_answer_ends_although_reads_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.exceptions import BaseError

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    clock = Clock()
    monkeypatch.setattr(object_store, "time", clock)
    store = open_store("s3://full/a")

    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError

    def has_no_space(*_: object, **__: object) -> None:
        assert clock.seconds < 1000
        clock.sleep(1.0)
        assert store.stat("b") is None  # by another thread
        raise BaseError("Server returned non-2xx status code: 507 Insufficient Storage: ")

    monkeypatch.setattr(store, "obstore", SimpleNamespace(put=has_no_space, head=absent))
    with pytest.raises(Unclear, match="the server answers 507 Insufficient Storage"):
        store.put("a", b"1")
    assert 180 < clock.seconds < 190
    began, clock.seconds = clock.seconds, 1000.0  # an upload that took long, while other requests were answered
    assert store.stat("b") is None
    assert isinstance(store, ObjectStore)
    assert not store.gives_up(clock.seconds, began)


def test_reason_of_an_outage_is_a_few_words(server: S3Server, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(server.url(folder), retry_seconds=0.3)
    server.set_faults(down=1.0)
    with pytest.raises(NoAnswer) as failed:
        store.get("a")
    proxy = f"127.0.0.1:{server.proxy_port}"
    assert str(failed.value) == f"{server.url(folder)}/a: the connection to {proxy} breaks"
    server.set_faults(slow_down=1.0)
    with pytest.raises(Unclear) as failed:
        store.put("a", b"1")
    assert str(failed.value) == f"cannot write {server.url(folder)}/a: SlowDown"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(NoAnswer) as failed:
        ObjectStore(server.url(folder), retry_seconds=0.3).stat("a")
    assert str(failed.value).endswith("/a: no connection to 127.0.0.1:9: Connection refused")


def test_refusal_of_any_provider_is_final(server: S3Server, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim repeats a write that got no answer for two minutes."""
    from obstore.exceptions import PermissionDeniedError

    store = open_store(server.url(folder))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionDeniedError("403 Forbidden, without an error code of S3")

    monkeypatch.setattr(store, "obstore", SimpleNamespace(put=refuse))
    with pytest.raises(StoreError, match="these credentials may not access it") as refused:
        store.put("a", b"1")
    assert not isinstance(refused.value, Unclear)
