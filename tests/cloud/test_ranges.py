"""Tokens in a bucket that are read in ranges: ``data.fetch=ranges``."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serried import cli
from serried.configs import bucket_paths
from serried.configs.errors import TrainingStopped, UserError
from serried.configs.schema.data import data_section
from serried.recipes.data.prepared.prepare import Prepared, prepare
from serried.recipes.data.prepared.ranged_objects import BLOCK_BYTES, StoredObject, StoredObjects
from serried.recipes.data.prepared.shared_cache import SharedCache
from serried.recipes.data.readers.reading_progress import Progress
from serried.trainer.trainer import Trainer
from testing.runs import run_here, tiny_overrides
from testing.s3_server import BUCKET, S3Server

pytestmark = pytest.mark.cloud

END = 256


@pytest.fixture(autouse=True)
def _own_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERRIED_SCRATCH", raising=False)
    use_disk(tmp_path / "disk", monkeypatch)


def use_disk(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continue as a node whose caches are on ``disk``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
    bucket_paths.forget_listings()


def prepared(path: str, name: str = "tokens", **more: Any) -> Prepared:
    return prepare(data_section(name=name, path=path, sequence_length=32, **more))


def put_folder(server: S3Server, folder: str, source: Path) -> str:
    for path in source.iterdir():
        server.client().put_object(Bucket=BUCKET, Key=f"{folder}/{path.name}", Body=path.read_bytes())
    return server.url(folder)


def write_chats(folder: Path) -> str:
    """Write conversations with several blocks of tokens."""
    random = np.random.default_rng(3)
    texts = [" ".join(map(str, random.integers(0, 10**6, 60).tolist())) for _ in range(400)]
    rows = [
        {"messages": [{"role": "user", "content": text[:90]}, {"role": "assistant", "content": text}]} for text in texts
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "chats.jsonl")


def gets(server: S3Server, folder: str, since: int = 0) -> list[str]:
    """Names of the objects below ``folder`` that were read, once for each request."""
    prefix = f"GET /{BUCKET}/{folder}/"
    return [line.removeprefix(prefix) for line in server.requests()[since:] if line.startswith(prefix)]


def write_again(server: S3Server, key: str) -> None:
    """Write the same content in parts, which gives the object another tag."""
    client, place = server.client(), {"Bucket": BUCKET, "Key": key}
    before = client.head_object(**place)["ETag"]
    content = server.objects(key)[key]
    upload = {**place, "UploadId": client.create_multipart_upload(**place)["UploadId"]}
    part = {"PartNumber": 1, "ETag": client.upload_part(**upload, PartNumber=1, Body=content)["ETag"]}
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": [part]})
    assert client.head_object(**place)["ETag"] != before


def forget_kept(data: Prepared) -> None:
    np.memmap(data.folder / "ranges.blocks", "<u4", "r+")[:] = 0


def streams(data: Prepared) -> Iterator[np.ndarray]:
    for split in ("train", "validation"):
        stream = data.stream(split)
        yield stream.read(0, stream.tokens)
        if stream.is_supervised:
            yield stream.supervised(0, stream.tokens)


def assert_equal(data: Prepared, other: Prepared) -> None:
    assert (data.key, data.splits) == (other.key, other.splits)
    for found, expected in zip(streams(data), streams(other), strict=True):
        assert np.array_equal(found, expected)


def test_sequences_read_in_ranges_are_those_of_a_local_copy(server: S3Server, folder: str, tmp_path: Path) -> None:
    local = prepared(write_chats(tmp_path), "text", format="chat", cache_dir=str(tmp_path / "cache"))
    url = put_folder(server, folder, local.folder)
    ranged = prepared(url, fetch="ranges")
    large = {"train-00000.bin", "train-00000.supervised", "validation-00000.bin", "validation-00000.supervised"}
    assert not large & set(gets(server, folder))
    stream, expected = ranged.stream("train"), local.stream("train")
    assert stream.tokens > 3 * BLOCK_BYTES
    for start in (0, 100_000, 99_990, 200_000):
        assert np.array_equal(stream.read(start, start + 32), expected.read(start, start + 32))
    assert gets(server, folder)[-3:] == ["train-00000.bin"] * 3, "positions 99,990 and 100,000 are in the same block"
    assert_equal(ranged, local)
    before = len(server.requests())
    assert_equal(prepared(url, fetch="ranges"), local)
    assert not gets(server, folder, before), "all blocks are kept"
    kept = np.memmap(ranged.folder / "train-00000.bin", np.uint8, "r+")
    kept[70_000] ^= 1
    assert_equal(ranged, local)
    assert gets(server, folder, before) == ["train-00000.bin"], "the block that changed on the disk is read again"


def test_content_above_the_limit_is_not_kept(server: S3Server, folder: str, tmp_path: Path) -> None:
    local = prepared(
        write_chats(tmp_path), "text", cache_dir=str(tmp_path / "cache"), text_column="messages", format="chat"
    )
    url = put_folder(server, folder, local.folder)
    limited = prepared(url, fetch="ranges", fetch_limit="0.2MB")
    stream = limited.stream("train")
    windows = range(0, stream.tokens, BLOCK_BYTES // 2)
    for _ in range(2):
        before = len(server.requests())
        for start in windows:
            stop = min(start + BLOCK_BYTES // 2, stream.tokens)
            assert np.array_equal(stream.read(start, stop), local.stream("train").read(start, stop))
    assert len(gets(server, folder, before)) == len(windows) - 3, "three blocks of 64 KiB are kept"
    assert_equal(prepared(url, fetch="ranges"), local)
    before = len(server.requests())
    assert_equal(limited, local)
    assert not gets(server, folder, before), "with the default limit, all blocks are"


def test_changed_and_missing_objects_and_refusals_are_one_line(server: S3Server, folder: str, tmp_path: Path) -> None:
    local = prepared(write_chats(tmp_path), "text", format="chat", cache_dir=str(tmp_path / "cache"))
    url = put_folder(server, folder, local.folder)
    stream = prepared(url, fetch="ranges").stream("train")
    client, key = server.client(), f"{folder}/train-00000.bin"
    content = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    stream.read(0, 10)
    server.set_faults("expired")
    with pytest.raises(TrainingStopped, match=rf"^cannot read {url}/train-00000.bin: .*expired|may not access"):
        stream.read(100_000, 100_010)
    client.put_object(Bucket=BUCKET, Key=key, Body=content[:-1] + b"\0")
    with pytest.raises(UserError, match=rf"^{url}/train-00000.bin changed since it was listed; restore that version"):
        stream.read(100_000, 100_010)
    client.delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(UserError, match=rf"^{url}/train-00000.bin does not exist any more; restore it"):
        stream.read(100_000, 100_010)
    assert np.array_equal(stream.read(0, 10), local.stream("train").read(0, 10)), "what is kept can be read"
    client.put_object(Bucket=BUCKET, Key=key, Body=content[:200_000] + b"\0\0" + content[200_002:])
    bucket_paths.forget_listings()
    with pytest.raises(UserError, match=rf"^{url}/train-00000.bin is damaged: it does not match its checksum; prepare"):
        prepared(url, fetch="ranges").stream("train").read(100_000, 100_010)


def test_losses_with_ranges_are_those_of_whole_tokens(
    server: S3Server, folder: str, text: Path, tmp_path: Path
) -> None:
    cache = f"data.cache_dir={server.url(f'{folder}/prepared')}"
    losses = []
    for fetch in ("whole", "ranges"):
        run = tmp_path / fetch
        more = [f"data.fetch={fetch}", *(["data.fetch_limit=0MB"] if fetch == "ranges" else [])]
        words = tiny_overrides(text, run, cache, *more, "trainer.steps=3", "trainer.eval_every=2")
        bucket_paths.forget_listings()
        if fetch == "ranges":
            for path in (tmp_path / "disk" / "serried").iterdir():  # of a node that did not prepare
                path.rename(tmp_path / path.name)
        before = len(server.requests())
        ended = run_here(words)
        assert ended.code == 0, ended.printed
        events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        losses.append([event["loss"] for event in events if event["event"] in ("step", "eval")])
    assert losses[0] == losses[1]
    assert len(losses[0]) > 3
    (kept,) = (tmp_path / "disk" / "serried" / "ranges").iterdir()
    read = gets(server, f"{folder}/prepared/{kept.name}", before)
    assert read.count("train-00000.bin") == 3 * 4, "one request for each sequence"
    write_again(server, f"{folder}/prepared/{kept.name}/train-00000.bin")
    again = prepared(str(text), "text", cache_dir=server.url(f"{folder}/prepared"), fetch="ranges")
    assert again.folder == kept
    forget_kept(again)
    assert again.stream("train").read(0, 100).any()


def test_prepared_data_larger_than_the_disk_is_refused_unless_it_is_read_in_ranges(
    server: S3Server, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "0" * 32
    for name, content in (("train-00000.bin", bytes(5112)), ("train-00000.starts", bytes(8)), ("summary.json", b"{}")):
        server.client().put_object(Bucket=BUCKET, Key=f"{folder}/{key}/{name}", Body=content)
    cache = SharedCache(server.url(folder), Progress(None, 1))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(UserError) as error:
        cache.fetch(key, tmp_path)
    assert str(error.value) == (
        f"data.cache_dir={server.url(folder)}: 5.0KiB to download, but only 4.0KiB are free in {tmp_path}; choose "
        "another disk with SERRIED_SCRATCH=/LARGER/DISK, or read tokens without a copy: data.fetch=ranges"
    )
    cache.fetch(key, tmp_path, in_ranges=True)
    assert {path.name for path in tmp_path.iterdir()} == {"objects.json", "summary.json", "train-00000.starts"}


@pytest.mark.parametrize(("change", "code"), [("expired", 75), ("replaced", 78)])
def test_run_whose_tokens_cannot_be_read_ends_with_one_line(
    change: str, code: int, server: S3Server, folder: str, text: Path, tmp_path: Path
) -> None:
    """Missing rights may come back, and the run with them; a changed object needs its user."""
    local = prepared(str(text), "text", cache_dir=str(tmp_path / "cache"))
    url = put_folder(server, folder, local.folder)
    key = f"{folder}/train-00000.bin"

    def disturb(trainer: Trainer, step: int) -> None:
        del trainer
        if step == 2 and change == "expired":
            server.set_faults(expired=1.0)
        elif step == 2:
            content = server.objects(key)[key]
            server.client().put_object(Bucket=BUCKET, Key=key, Body=content[::-1])

    words = ["data=tokens", f"data.path={url}", "data.fetch=ranges", "data.fetch_limit=0MB", "trainer.steps=20"]
    ended = run_here(tiny_overrides(text, tmp_path / "run", *words), disturb)
    assert ended.code == code, ended.printed
    said = {
        "expired": f"cannot read {url}/train-00000.bin: ",
        "replaced": f"{url}/train-00000.bin changed since it was",
    }
    assert said[change] in ended.printed
    assert "Traceback" not in ended.printed


def test_command_that_cannot_read_tokens_ends_with_one_line(
    server: S3Server, folder: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    local = prepared(str(text), "text", cache_dir=str(tmp_path / "cache"))
    url = put_folder(server, folder, local.folder)

    def fail(self: StoredObjects, entry: StoredObject, *_: object) -> None:
        raise TrainingStopped(f"cannot read {self.url}/{entry.key}: no answer in time")

    monkeypatch.setattr(StoredObjects, "read_into", fail)
    assert cli.main(["prepare", "data=tokens", f"data.path={url}", "data.fetch=ranges"]) == 75
    assert capsys.readouterr().err.splitlines()[-1] == f"failed: cannot read {url}/train-00000.bin: no answer in time"


# token files of other tools -------------------------------------------------------------------------------------------


def write_flat(folder: Path) -> Path:
    random = np.random.default_rng(5)
    for name, count in (("a.bin", 200_000), ("b.npy", 90_000)):
        tokens = random.integers(0, END, count)
        tokens[random.integers(0, count, 500)] = END
        folder.mkdir(exist_ok=True)
        np.save(folder / name, tokens.astype("<u4")) if name.endswith("npy") else tokens.astype("<u2").tofile(
            folder / name
        )
    return folder


def test_token_files_are_scanned_by_one_node(
    server: S3Server, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = write_flat(tmp_path / "flat")
    url, cache = put_folder(server, f"{folder}/flat", flat), server.url(f"{folder}/prepared")
    alone = prepared(url, tokenizer="bytes", fetch="ranges")
    assert np.array_equal(
        np.concatenate([alone.stream(split).read(0, alone.splits[split].tokens) for split in ("train", "validation")]),
        np.concatenate((np.fromfile(flat / "a.bin", "<u2"), np.load(flat / "b.npy"))),
    )
    read = {}
    for node, fetch in (("first", "whole"), ("second", "whole"), ("third", "ranges")):
        use_disk(tmp_path / node, monkeypatch)
        before = len(server.requests())
        found = prepared(url, tokenizer="bytes", cache_dir=cache, fetch=fetch)
        read[node] = sorted(gets(server, f"{folder}/flat", before))
        assert_equal(found, alone)
        for split in ("train", "validation"):
            starts = found.stream(split).all_document_starts()
            assert len(starts) > 5
            assert np.array_equal(starts, alone.stream(split).all_document_starts())
    assert read == {"first": ["a.bin", "b.npy"], "second": ["a.bin", "b.npy"], "third": []}
    stored = {key.rpartition("/")[2] for key in server.objects(f"{folder}/prepared/{alone.folder.name}")}
    assert stored == {
        "objects.json", "summary.json", "tokenizer.json", "train-00000.starts", "train-00001.starts",
        "validation-00000.starts",
    }  # fmt: skip
    assert not server.objects(f"{folder}/prepared/claims")
    write_again(server, f"{folder}/flat/a.bin")
    bucket_paths.forget_listings()
    again = prepared(url, tokenizer="bytes", cache_dir=cache, fetch="ranges")
    forget_kept(again)
    assert_equal(again, alone)


def test_token_files_written_again_and_a_removed_folder_do_not_end_the_run(
    server: S3Server, folder: str, tmp_path: Path
) -> None:
    """The same content has another tag. What is kept is a copy, which the run can do without."""
    url = put_folder(server, folder, write_flat(tmp_path / "flat"))
    before = prepared(url, tokenizer="bytes", fetch="ranges")
    write_again(server, f"{folder}/a.bin")
    bucket_paths.forget_listings()
    again = prepared(url, tokenizer="bytes", fetch="ranges", fetch_limit="0.1MB")
    assert again.folder == before.folder
    stream, expected = again.stream("train"), np.fromfile(tmp_path / "flat" / "a.bin", "<u2")
    assert np.array_equal(stream.read(0, 1000), expected[:1000])
    assert (again.folder / "ranges.limit").read_text() == "100000\n"
    shutil.rmtree(again.folder)
    for start in (0, 100_000):
        assert np.array_equal(stream.read(start, start + 1000), expected[start : start + 1000])


def test_damaged_token_file_is_named_by_its_url(server: S3Server, folder: str) -> None:
    server.client().put_object(Bucket=BUCKET, Key=f"{folder}/c.bin", Body=b"abc")
    with pytest.raises(UserError) as error:
        prepared(f"{server.url(folder)}/c.bin", tokenizer="bytes", fetch="ranges")
    assert str(error.value).startswith(
        f"{server.url(folder)}/c.bin has 3 bytes, not a multiple of the size of uint16; "
    )
