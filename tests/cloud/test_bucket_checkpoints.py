"""Checkpoints of runs in a bucket: saved, resumed on other layouts, damaged, kept and removed."""

import json
from pathlib import Path

import pytest

from serried.records.head import Entry, read_head
from serried.records.object_store import open_store
from serried.trainer.checkpoint.bucket_checkpoints import download
from serried.trainer.checkpoint.manifest import check_files, read_manifest
from testing.runs import metrics, run_here, tiny_overrides
from testing.s3_server import S3Server

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
