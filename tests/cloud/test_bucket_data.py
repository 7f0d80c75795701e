"""Data, models and outputs in a bucket."""

import gzip
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serried.configs import bucket_paths
from serried.configs.errors import UserError
from serried.configs.schema.data import data_section
from serried.recipes.data.prepared.prepare import Prepared, prepare
from serried.records.bucket_files import ObjectCopy, check_space, download_objects
from testing.s3_server import BUCKET, S3Server

pytestmark = pytest.mark.cloud

Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that only this test uses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SERRIED_SCRATCH", raising=False)
    bucket_paths.forget_listings()


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def words(count: int, start: int = 0) -> list[Any]:
    return [{"text": f"document {number} has {number * number} words"} for number in range(start, start + count)]


def parquet(rows: list[Any]) -> bytes:
    arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = arrow.BufferOutputStream()
    tables.write_table(arrow.Table.from_pylist(rows), sink, row_group_size=40)
    return bytes(sink.getvalue())


def zstd(content: bytes) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    sink = arrow.BufferOutputStream()
    with arrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


CHATS = [
    {"messages": [{"role": "user", "content": f"Add {n} and 1."}, {"role": "assistant", "content": f"{n + 1}"}]}
    for n in range(60)
]
PAIRS = [{"prompt": f"Add {n} and 1.", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(60)]
KINDS: dict[str, tuple[Callable[[], Files], str, dict[str, Any]]] = {
    "text": (lambda: {f"b/{n}.txt": f"text {n} of ten\n".encode() * (n + 1) for n in range(10)}, "", {}),
    "text-glob": (lambda: {f"b/{n}.log": f"line {n}\n".encode() * 30 for n in range(25)}, "**/*.log", {}),
    "jsonl": (lambda: {"b.jsonl": lines(words(90)), "a/c.jsonl": lines(words(9, 90))}, "", {}),
    "jsonl-gz": (lambda: {"b.jsonl.gz": gzip.compress(lines(words(90)))}, "b.jsonl.gz", {}),
    "jsonl-zst": (lambda: {"a.jsonl.zst": zstd(lines(words(90)))}, "", {}),
    "parquet": (lambda: {"x/1.parquet": parquet(words(90)), "x/2.parquet": parquet(words(90, 90))}, "x/*.parquet", {}),
    "chat": (lambda: {"chats.jsonl": lines(CHATS)}, "", {"format": "chat"}),
    "preference": (lambda: {"pairs.jsonl.gz": gzip.compress(lines(PAIRS))}, "", {"format": "preference"}),
}


def put(server: S3Server, folder: str, files: Files) -> None:
    for name, content in files.items():
        server.client().put_object(Bucket=BUCKET, Key=f"{folder}/{name}", Body=content)


def prepared(path: str, cache: Path | None = None, **more: Any) -> Prepared:
    return prepare(data_section(name="text", path=path, sequence_length=128, cache_dir=cache and str(cache), **more))


def tokens_of(data: Prepared) -> dict[str, list[int]]:
    return {split: (stream := data.stream(split)).read(0, stream.tokens).tolist() for split in ("train", "validation")}


@pytest.mark.parametrize("kind", KINDS)
def test_data_in_a_bucket_has_the_key_and_tokens_of_a_local_copy(
    server: S3Server, folder: str, tmp_path: Path, kind: str
) -> None:
    make, name, more = KINDS[kind]
    files = make()
    put(server, folder, files | {".hidden/a.txt": b"not read", "a/.b.jsonl": b"not read"})
    for file, content in files.items():
        (tmp_path / "copy" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / file).write_bytes(content)
    remote = prepared(f"{server.url(folder)}/{name}", tmp_path / "remote", **more)
    local = prepared(f"{tmp_path}/copy/{name}", tmp_path / "local", **more)
    assert remote.key == local.key
    assert remote.splits == local.splits
    assert tokens_of(remote) == tokens_of(local)
    assert sum(split.documents for split in remote.splits.values()) > 8


def test_later_start_lists_once_and_reads_nothing(server: S3Server, folder: str, tmp_path: Path) -> None:
    put(server, folder, {"a.jsonl": lines(words(50)), "b.jsonl": lines(words(50, 50))})
    first = prepared(server.url(folder), tmp_path)
    before = server.counts()
    again = prepared(server.url(folder), tmp_path)
    assert again.key == first.key
    requests = server.counts() - before
    assert (requests.pop("HEAD"), requests.pop("GET list"), requests.pop("bytes down") < 2000) == (1, 1, True)
    assert not requests


def test_changed_object_is_noticed_and_only_it_is_read(server: S3Server, folder: str, tmp_path: Path) -> None:
    put(server, folder, {"a.jsonl": lines(words(50)), "b.jsonl": lines(words(50, 50))})
    first = prepared(server.url(folder), tmp_path)
    put(server, folder, {"b.jsonl": lines(words(50, 70))})
    before = len(server.requests())
    assert prepared(server.url(folder), tmp_path).key != first.key
    requests = server.requests()[before:]
    assert [line for line in requests if line.startswith("GET /")] == [f"GET /bucket/{folder}/b.jsonl"]


def test_object_that_changes_after_the_listing_is_refused(server: S3Server, folder: str) -> None:
    put(server, folder, {"a.txt": b"one"})
    listed = bucket_paths.bucket_files(server.url(folder), "data.path")
    put(server, folder, {"a.txt": b"two"})
    with pytest.raises(UserError) as error:
        listed.fetch()
    assert str(error.value) == (
        f"{server.url(folder)}/a.txt changed while it was being read; run again when nothing writes to it"
    )


def test_objects_arrive_whole_through_faults(server: S3Server, folder: str) -> None:
    content = {f"{n}.bin": os.urandom(300_000 * (1 + 90 * (n == 3))) for n in range(6)}
    put(server, folder, content)
    listed = bucket_paths.bucket_files(server.url(folder), "data.path")
    server.set_faults(slow_down=0.1, error=0.1, truncate=0.1, cut_answer=0.1)
    copy = listed.fetch()
    assert {name: (copy / name).read_bytes() for name in content} == content


FORKS = """
import os, sys
from pathlib import Path
from serried.configs import bucket_paths
url = sys.argv[1]
bucket_paths.local_path(url, "data.path")
assert "obstore" not in sys.modules
child = os.fork()
if child == 0:
    path = bucket_paths.local_path(f"{url}/a.txt", "data.path")
    os._exit(0 if Path(path).read_bytes() == b"one" else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_file_that_the_disk_took_only_in_part_gets_no_name(tmp_path: Path) -> None:
    """Then ``os.pwrite`` reports fewer bytes, and no error. Here it is the largest size of files of this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def read_into(*_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 2**20, before[1]))

    store: Any = SimpleNamespace(read_into=read_into)
    try:
        with pytest.raises(OSError, match="too large"):
            download_objects(store, [ObjectCopy("a", 5 * 2**20, "tag", tmp_path / "a")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "a").exists()


def test_process_that_read_a_bucket_can_fork(server: S3Server, folder: str) -> None:
    put(server, folder, {"a.txt": b"one"})
    ended = subprocess.run(
        [sys.executable, "-c", FORKS, server.url(folder)], capture_output=True, text=True, timeout=120
    )  # in a new process, because an earlier test may have loaded obstore
    assert ended.returncode == 0, ended.stderr


def test_bad_row_is_reported_with_the_url_of_its_object(server: S3Server, folder: str, tmp_path: Path) -> None:
    put(server, folder, {"chats.jsonl": lines([*CHATS, {"messages": 3}])})
    with pytest.raises(UserError) as error:
        prepared(server.url(folder), tmp_path, format="chat")
    assert str(error.value).startswith(f"{server.url(folder)}/chats.jsonl line 61")
    skipping = prepared(server.url(folder), tmp_path, format="chat", bad_rows="skip")
    assert skipping.bad_rows[0].startswith(f"{server.url(folder)}/chats.jsonl line 61")
    assert str(skipping.place("train", 0)).startswith(f"{server.url(folder)}/chats.jsonl at byte ")


def test_wrong_url_is_one_line(server: S3Server, folder: str, tmp_path: Path) -> None:
    put(server, folder, {"images/1.png": b"1", "images/2.png": b"2", "both/a": b"1", "both/a/b": b"2"})
    url = server.url(folder)
    wrong = {
        f"{url}/none": f"data.path={url}/none has no objects; list what is there: aws s3 ls {url}/",
        f"{url}/*/*.csv": f"data.path={url}/*/*.csv matches no object; {url} has both/a, both/a/b, images/1.png, ",
        f"{url}/images": f"data.path={url}/images: none of the 2 files in it ends in .txt .text .md ",
        f"{url}/both": f"the object {url}/both/a cannot be stored as a file: it is also the name of a folder; ",
        "s3://other/x": "data.path=s3://other/x: bucket other does not exist",
    }
    for path, said in wrong.items():
        with pytest.raises(UserError) as error:
            prepared(path, tmp_path)
        assert str(error.value).startswith(said)
        assert "\n" not in str(error.value)
    for tokenizer in (f"{url}/images", f"{url}/images/tokenizer.json"):
        with pytest.raises(UserError) as error:
            prepared(url, tmp_path, tokenizer=tokenizer)
        assert str(error.value).startswith(f"data.tokenizer={tokenizer}: the folder has no tokenizer.json; create it ")


def test_lack_of_library_rights_and_space_is_one_line(
    server: S3Server, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.url(folder)
    server.set_faults("expired")
    with pytest.raises(UserError) as error:
        bucket_paths.bucket_files(url, "data.path")
    assert str(error.value) == f"data.path={url}: these credentials may not access it (access denied)"
    with pytest.raises(UserError, match=r"^data.path=s3://b/x: .* to download, but only .* are free in .*; choose "):
        check_space(tmp_path, 10**16, "s3://b/x", "data.path")
    (tmp_path / "obstore.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError) as error:
        bucket_paths.bucket_files(url, "data.path")
    assert str(error.value) == f"data.path={url} needs obstore; pip install 'serried[cloud]'"


# a shared cache -------------------------------------------------------------------------------------------------------


def shared(path: str, cache_url: str, **more: Any) -> Prepared:
    shown: list[str] = []
    section = data_section(name="text", path=path, sequence_length=128, cache_dir=cache_url, **more)
    found = prepare(section, shown.append)
    assert shown[-1] == ""
    return found


def own_disk(monkeypatch: pytest.MonkeyPatch, disk: Path) -> None:
    """Continue as another node, whose caches are on ``disk``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
    bucket_paths.forget_listings()


def test_second_node_downloads_the_tokens_and_not_the_text(
    server: S3Server, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, f"{folder}/text", {"chats.jsonl": lines(CHATS)})
    url, cache = server.url(f"{folder}/text"), server.url(f"{folder}/cache")
    local = prepared(url, tmp_path / "local", format="chat")
    first = shared(url, cache, format="chat")
    own_disk(monkeypatch, tmp_path / "second")
    before = len(server.requests())
    second = shared(url, cache, format="chat")
    assert (first.key, tokens_of(first)) == (second.key, tokens_of(second)) == (local.key, tokens_of(local))
    assert not [line for line in server.requests()[before:] if line.startswith("GET /") and "/text/" in line]
    stored = server.objects(f"{folder}/cache/{first.folder.name}")
    names = {key.rpartition("/")[2]: content for key, content in stored.items()}
    assert names == {file.name: file.read_bytes() for file in first.folder.iterdir()}
    assert names == {file.name: file.read_bytes() for file in second.folder.iterdir()}
    assert not server.objects(f"{folder}/cache/claims")
    put(server, f"{folder}/text", {"chats.jsonl": lines([*CHATS, {"messages": 3}])})
    with pytest.raises(UserError) as error:
        shared(url, cache, format="chat")
    assert str(error.value).startswith(f"{url}/chats.jsonl line 61")
    assert not server.objects(f"{folder}/cache/claims")
    put(server, f"{folder}/text", {"chats.jsonl": lines(CHATS)})
    before = len(server.requests())
    shared(url, cache, format="chat")
    assert not [line for line in server.requests()[before:] if line.startswith(("GET /", "PUT"))]
