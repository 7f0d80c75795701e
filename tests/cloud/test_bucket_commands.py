"""Commands that read or repair a run in a bucket."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

import serried as package
from serried.cli import main as serried
from serried.commands import bucket_runs
from serried.configs.bucket_paths import bucket_files
from serried.recipes.data.prepared import shared_cache
from serried.records.head import read_head
from serried.records.object_store import open_store
from serried.records.store import StoreError
from testing.runs import run_here, tiny_overrides
from testing.s3_server import S3Server

pytestmark = pytest.mark.cloud


@pytest.fixture(scope="module")
def trained(_server: S3Server, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run with the checkpoints 4 and 6, to be read only."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in _server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SERRIED_SCRATCH", str(tmp_path_factory.mktemp("trained")))
        url = _server.url("commands/trained")
        assert run_here(tiny_overrides(text, url)).code == 0
        yield url


@pytest.fixture(autouse=True)
def elsewhere(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine: its scratch folder and its current folder are empty."""
    del server
    monkeypatch.setenv("SERRIED_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.chdir(tmp_path)


def test_commands_read_the_checkpoints(trained: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert serried(["evaluate", trained, "json=true"]) == 0
    newest = json.loads(capfd.readouterr().out)
    assert serried(["evaluate", f"run.dir={trained}", "checkpoint=4", "json=true"]) == 0
    earlier = json.loads(capfd.readouterr().out)
    assert newest["loss"] < earlier["loss"]
    assert serried(["generate", trained, "prompt=lorem", "tokens=5"]) == 0
    assert capfd.readouterr().out
    assert serried(["export", trained, "out=model"]) == 0
    assert load_file("model/model.safetensors").keys()
    assert sum(parameter.numel() for parameter in package.load_model(trained).parameters()) > 10_000
    assert serried(["export", trained, "checkpoint=5", "out=other"]) == 78
    assert f"there is no checkpoint of step 5 in {trained}; use checkpoint=4 or checkpoint=6" in capfd.readouterr().err
    assert serried(["stop", trained]) == 78
    assert f"no process is training in {trained}, so there is nothing to stop" in capfd.readouterr().err
    assert serried(["stop", f"{trained}-not"]) == 78
    assert serried(["status", f"{trained}-not"]) == 78
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert all(f"there is no run in {trained}-not" in line for line in said)


def test_fetched_run_is_a_run_folder_that_trains_on(
    trained: str, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: object) -> None:
        raise StoreError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(bucket_runs, "download_records", break_off)
        assert serried(["fetch", trained, "out=here"]) == 78
    assert not (tmp_path / "here").exists(), "the same command can be given again"
    assert serried(["fetch", trained, "out=here", "checkpoint=all"]) == 0
    assert f"fetched    {trained} to here; checkpoints: 4, 6" in capfd.readouterr().out
    here = tmp_path / "here"
    assert sorted(path.name for path in (here / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    ended = run_here(tiny_overrides(text, here, "checkpoint.allow_changes=true", "trainer.steps=8"))
    assert ended.code == 0, ended.printed
    steps = [json.loads(line).get("step") for line in (here / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 8
    assert [step for step in dict.fromkeys(steps) if step] == [*range(1, 9)]
    assert serried(["fetch", trained, "out=here"]) == 78


def test_lost_head_is_rebuilt_after_asking(
    server: S3Server, folder: str, text: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.url(folder)
    assert run_here(tiny_overrides(text, url, "trainer.stop_at=4")).code == 75
    before = read_head(store := open_store(url))
    store.put("control", b"stop")
    assert before is not None
    capfd.readouterr()
    assert serried(["repair", url]) == 78
    assert f"{url}/head.json is intact" in capfd.readouterr().err
    store.delete(["head.json"])
    prefix = before.checkpoints[-1].prefix
    server.client().copy_object(
        Bucket="bucket", Key=f"{folder}/checkpoints/00000009-1-00000000/MANIFEST.json",
        CopySource=f"bucket/{folder}/{prefix}/MANIFEST.json",
    )  # fmt: skip
    assert run_here(tiny_overrides(text, url)).code == 78
    assert serried(["repair", url]) == 78
    assert "Add yes=true to confirm" in capfd.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(bucket_runs, "_confirm", lambda *_: store.put("head.json", b"{}"))
        assert serried(["repair", url]) == 78
        assert f"{url}/head.json has changed in the meantime; see serried status" in capfd.readouterr().err
    store.delete(["head.json"])
    assert serried(["repair", url, "yes=true"]) == 0
    after = read_head(store)
    assert after is not None
    assert [entry.attempt for entry in after.checkpoints] == [entry.attempt for entry in before.checkpoints]
    assert after.records == before.records
    assert serried(["clean", url]) == 0
    assert f"cleaned    {url}: removed 1 incomplete checkpoints" in capfd.readouterr().out
    ended = run_here(tiny_overrides(text, url))
    assert ended.code == 0, "the request from before the loss does not stop it"
    assert "step 5/6" in ended.printed


def test_status_of_a_folder_of_runs_lists_them(
    trained: str, server: S3Server, capfd: pytest.CaptureFixture[str]
) -> None:
    parent = trained.rpartition("/")[0]
    store = open_store(f"{parent}/copied")
    for key, content in server.objects("commands/trained/").items():
        if "/checkpoints/" not in key:
            store.put(key.removeprefix("commands/trained/"), content)
    before = len(server.requests())
    assert serried(["status", parent, "--json"]) == 0
    assert len(json.loads(f"[{','.join(capfd.readouterr().out.splitlines())}]")) == 2
    assert not [line for line in server.requests()[before:] if "checkpoints/" in line]
    assert serried(["status", f"run.dir={parent}"]) == 0
    assert capfd.readouterr().out.count(f"run     {trained}\nstate   finished: all steps done, exit code 0\n") == 2
    open_store(f"{parent}/damaged").put("head.json", b"{}")
    assert serried(["status", parent]) == 0
    shown = capfd.readouterr()
    assert shown.out.count("state   finished") == 2
    assert f"WARNING    {parent}/damaged/head.json cannot be used" in shown.err


def test_unfinished_data_and_unused_downloads_are_removed(
    server: S3Server, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SERRIED_SCRATCH")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store, url = open_store(server.url(folder)), server.url(folder)
    unfinished, complete = "a" * 32, "b" * 32
    for name in (f"{unfinished}/done-00000.json", f"{complete}/train-00000.bin", f"{complete}/summary.json", "memos/a"):
        store.put(name, b"{}")
    for words in (
        ["prepared=1"], ["downloads=1", f"data.cache_dir={url}"], [f"data.cache_dir={url}"], [url, "downloads=1"],
        ["downloads=1", "prepared=1", f"data.cache_dir={url}"],
    ):  # fmt: skip
        assert serried(["clean", *words]) == 78
        assert "serried clean downloads=DAYS" in capfd.readouterr().err
    assert serried(["clean", "prepared=1", f"data.cache_dir={url}"]) == 0
    assert "removed 0 unfinished preparations" in capfd.readouterr().out
    listed = bucket_files(url, "data.path", again=True)
    paths = [listed.fetch([name]) / name for name in ("memos/a", f"{complete}/summary.json")]
    os.utime(paths[0].resolve(), (1, 1))
    later = time.time() + 3 * 86400
    with monkeypatch.context() as patched:
        patched.setattr(shared_cache, "time", SimpleNamespace(time=lambda: later))
        assert serried(["clean", "prepared=1", f"data.cache_dir={url}"]) == 0
    assert "removed 1 unfinished preparations" in capfd.readouterr().out
    assert {listed.key for listed in store.list("")} == {
        f"{complete}/summary.json", f"{complete}/train-00000.bin", "memos/a"
    }  # fmt: skip
    assert serried(["clean", "downloads=30"]) == 0
    assert "removed 1 files, 2B" in capfd.readouterr().out
    assert [path.exists() for path in paths] == [False, True]
    assert not paths[0].is_symlink()
    assert (bucket_files(url, "data.path", again=True).fetch(["memos/a"]) / "memos/a").read_bytes() == b"{}"
