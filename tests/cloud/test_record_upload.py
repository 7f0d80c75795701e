"""Records of a run in a bucket: uploaded as they grow, read back as they were."""

import json
from pathlib import Path

import pytest

from serried.records import record_upload
from serried.records.object_store import open_store
from serried.records.record_upload import RecordUpload, download_records, download_summary, remove_records
from serried.records.run_folder import RunFolder
from serried.records.store import StoreError
from testing.s3_server import S3Server
from tests.cloud.test_runs_in_a_bucket import until

pytestmark = pytest.mark.cloud


def train(folder: RunFolder, steps: range) -> None:
    for step in steps:
        folder.record("step", step=step, loss=1 / step)
    folder.status("running", step=steps[-1])


def steps_in(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines]


@pytest.mark.parametrize("segment_bytes", [100, 101, 4 * 2**20])
def test_metrics_are_read_back_whole_after_growth_and_rollback(
    segment_bytes: int, server: S3Server, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_upload, "SEGMENT_BYTES", segment_bytes)
    store, run = open_store(server.url(folder)), RunFolder(tmp_path / "run")
    run.begin("a: 1\n", {}, step=0)
    uploads = RecordUpload(store, 7, run.path, print, is_main=True)

    def read_back() -> list[int]:
        uploads.flush()
        download_summary(store, 7, tmp_path / "copy")
        assert (tmp_path / "copy/status.json").read_bytes() == (run.path / "status.json").read_bytes()
        return steps_in(tmp_path / "copy")

    for last in (1, 9, 10):
        train(run, range(len(steps_in(run.path)) + 1, last + 1))
        assert read_back() == [*range(1, last + 1)]
    run.go_back(4)
    assert read_back() == [*range(1, 5)]
    train(run, range(5, 21))
    assert read_back() == [*range(1, 21)]


def test_records_of_all_kinds_are_in_the_next_start(server: S3Server, folder: str, tmp_path: Path) -> None:
    store, run = open_store(server.url(folder)), RunFolder(tmp_path / "run")
    run.begin("a: 1\n", {"python": "3"}, step=0)
    train(run, range(1, 5))
    run.go_back(2)
    run.add_images("samples", 2, [b"\x89PNG\r\n\x1a\n" + bytes(9 * 2**20)])
    run.add_images("Güte/見本 é", 2, [b"\x89PNG\r\n\x1a\n" + bytes(range(256))])
    (run.path / "log").mkdir()
    (run.path / "log/rank-0.log").write_text("hello\n")
    (run.path / "checkpoints").mkdir()
    (run.path / "checkpoints/none-of-the-records").write_text("x")
    RecordUpload(store, 1, run.path, print, is_main=True).send_all()
    other = tmp_path / "other-node"
    (other / "log").mkdir(parents=True)
    (other / "log/rank-1.log").write_text("there\n")
    RecordUpload(store, 1, other, print, is_main=False).send_all()
    next_start = tmp_path / "next"
    download_records(store, 1, next_start)
    names = {str(path.relative_to(next_start)) for path in next_start.rglob("*") if path.is_file()}
    written = {str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file()}
    assert names == {name for name in written if name[0] != "." and "checkpoints" not in name} | {"log/rank-1.log"}
    assert "images/step-00000002/Güte_見本_é-0.png" in names
    for name in names - {"log/rank-1.log"}:
        assert (next_start / name).read_bytes() == (run.path / name).read_bytes()


def test_log_of_another_node_is_newer_than_the_copy_of_an_earlier_start(
    server: S3Server, folder: str, tmp_path: Path
) -> None:
    store, logs = open_store(server.url(folder)), {}
    for node, text in (("main", "before\n"), ("other", "before\nnow\n")):
        logs[node] = tmp_path / node / "log"
        logs[node].mkdir(parents=True)
        (logs[node] / "rank-1.log").write_text(text)
    RecordUpload(store, 2, tmp_path / "other", print, is_main=False).send_all()
    main = RecordUpload(store, 2, tmp_path / "main", print, is_main=True)
    for text in ("a\n", "a\nb\n"):
        (logs["main"] / "rank-0.log").write_text(text)
        main.send_all()
        found = server.objects(f"{folder}/records")
        assert found[f"{folder}/records/2/log/rank-0.log"] == text.encode()
        assert found[f"{folder}/records/2/log/rank-1.log"] == b"before\nnow\n"


def test_objects_that_no_run_writes_are_not_downloaded(server: S3Server, folder: str, tmp_path: Path) -> None:
    client, store = server.client(), open_store(server.url(folder))
    for name in (".lock", "log/.evil", "unknown", "log/fine"):
        client.put_object(Bucket="bucket", Key=f"{folder}/records/1/{name}", Body=b"x")
    download_records(store, 1, tmp_path / "inside/copy")
    client.put_object(Bucket="bucket", Key=f"{folder}/records/1/log/../../evil", Body=b"x")
    with pytest.raises(StoreError, match="invalid path"):
        download_records(store, 1, tmp_path / "inside/copy")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["fine"]


def test_only_what_changed_is_uploaded(server: S3Server, folder: str, tmp_path: Path) -> None:
    store, run = open_store(server.url(folder)), RunFolder(tmp_path / "run")
    run.begin("a: 1\n", {}, step=0)
    train(run, range(1, 3))
    uploads = RecordUpload(store, 1, run.path, print, is_main=True)
    uploads.send_all()
    before = server.counts()
    uploads.send_all()
    assert server.counts() == before
    train(run, range(3, 4))
    uploads.flush()
    sent = server.counts() - before
    assert (sent["PUT"], sent["GET"]) == (2, 0), "one segment and the status"
    RecordUpload(store, 3, run.path, print, is_main=True).send_all()
    remove_records(store, 2, [])
    assert {key.split("/")[-2] for key in server.objects(f"{folder}/records")} == {"3"}, "a later start's stay"


def test_outage_is_reported_once_when_it_begins_and_once_when_it_is_over(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_upload, "_LOOK_SECONDS", 0.01)
    run, said = RunFolder(tmp_path / "run"), list[str]()
    run.begin("a: 1\n", {}, step=0)
    uploads = RecordUpload(open_store("s3://made-later/x"), 1, run.path, said.append, is_main=True)
    uploads.start()
    until(lambda: len([line for line in server.requests() if "/made-later/" in line]) >= 3)
    records = "s3://made-later/x/records/1"
    assert said == [
        f"WARNING    records are not uploaded to {records}: cannot write {records}/config.yaml: bucket made-later does "
        "not exist. Training continues"
    ]
    server.make_bucket("made-later")
    until(lambda: len(said) > 1)
    uploads.close()
    assert said[1:] == [f"records    are uploaded again to {records}"]


def test_records_that_cannot_be_uploaded_at_the_end_are_one_warning(
    server: S3Server, folder: str, tmp_path: Path
) -> None:
    run, said = RunFolder(tmp_path / "run"), list[str]()
    run.begin("a: 1\n", {}, step=0)
    store = open_store(server.url(folder), retry_seconds=0.3)
    uploads = RecordUpload(store, 1, run.path, said.append, is_main=True)
    server.set_faults(down=1.0)
    uploads.close()
    (line,) = said
    assert line.startswith(f"WARNING    the last records are not in {server.url(folder)}/records/1: cannot write ")
    assert line.endswith(" breaks; the next start waits up to 45 s for this process")
