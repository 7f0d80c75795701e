"""Models, images, token files and outputs in a bucket."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serried.cli import main as command
from serried.configs import bucket_paths
from serried.configs.errors import UserError
from serried.configs.schema.data import data_section
from serried.configs.schema.tasks import ImageSection
from serried.program import main as train
from serried.recipes.data.labelled.labelled_images import open_images
from serried.recipes.data.prepared.prepare import prepare
from testing.runs import overrides, write_text
from testing.s3_server import BUCKET, S3Server

pytestmark = pytest.mark.cloud


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that only this test uses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SERRIED_SCRATCH", raising=False)
    bucket_paths.forget_listings()


def put_folder(server: S3Server, folder: str, source: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            name = path.relative_to(source).as_posix()
            server.client().put_object(Bucket=BUCKET, Key=f"{folder}/{name}", Body=path.read_bytes())


def losses(run: Path) -> list[float]:
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "step"]


def test_models_and_adapters_are_exported_to_a_bucket_and_trained_from_it(
    server: S3Server, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, base, adapters = write_text(tmp_path / "text"), server.url(f"{folder}/base"), server.url(f"{folder}/lora")
    short = ["trainer.steps=2", "launch.device=cpu", "trainer.global_batch=6"]

    def run(name: str, *more: str) -> Path:
        assert train(overrides(text, tmp_path / name, *short, *more)) == 0
        return tmp_path / name

    trained = run("trained")
    assert command(["export", f"run.dir={trained}", f"out={base}"]) == 0
    assert f"to {base}: " in capsys.readouterr().out
    assert command(["export", f"run.dir={trained}", f"out={tmp_path / 'copy'}"]) == 0
    copy = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    assert {key.rpartition("/")[2]: content for key, content in server.objects(f"{folder}/base").items()} == copy
    assert command(["export", f"run.dir={trained}", f"out={base}"]) == 78
    assert f"out={base} exists already" in capsys.readouterr().err

    lora = ["adapter=lora", "adapter.rank=2"]
    model = ["data.tokenizer", "model.dim", "model.layers", "model.heads", "model.kv_heads", "model.hidden_dim"]
    model += ["model.tie_embeddings"]

    def tuned(name: str, path: str, *more: str) -> Path:
        words = [word for word in overrides(text, tmp_path / name, *short, *more) if word.split("=")[0] not in model]
        assert train([*words, *([f"model.path={path}", "model=auto"] if path else [])]) == 0
        return tmp_path / name

    remote, local = tuned("remote", base, *lora), tuned("local", str(tmp_path / "copy"), *lora)
    assert losses(remote) == losses(local)
    assert command(["export", f"run.dir={remote}", f"out={adapters}"]) == 0
    config = json.loads(server.objects(f"{folder}/lora")[f"{folder}/lora/adapter_config.json"])
    assert config["base_model_name_or_path"] == base

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-node"))
    again = tuned("again", "", "adapter=lora", f"adapter.path={adapters}")
    assert losses(again)[0] < losses(remote)[0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third-node"))
    assert command(["export", f"run.dir={remote}", "merge=true", f"out={tmp_path / 'merged'}"]) == 0
    assert command(["report", f"run.dir={remote}", f"out={server.url(f'{folder}/report.html')}"]) == 0
    assert server.objects(f"{folder}/report.html")[f"{folder}/report.html"].startswith(b"<!doctype html>")


def test_images_in_a_bucket_are_those_of_a_local_copy(server: S3Server, folder: str, tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for name in ("train/cat/1.png", "train/cat/2.png", "train/dog/a/3.png", "val/dog/4.png"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pillow.fromarray(random.integers(0, 255, (8, 9, 3), np.uint8)).save(path)
    put_folder(server, folder, tmp_path / "images")
    remote, local = (open_images(ImageSection(path=path)) for path in (server.url(folder), str(tmp_path / "images")))
    for mine, its in ((remote.training, local.training), (remote.validation, local.validation)):
        assert mine is not None and its is not None
        assert (mine.fingerprint, len(mine)) == (its.fingerprint, len(its))  # type: ignore[attr-defined]
        for index in range(len(its)):
            assert mine[index].label == its[index].label
            assert mine[index].pixels.tobytes() == its[index].pixels.tobytes()


def tokens(path: str, **more: Any) -> Any:
    return prepare(data_section(name="tokens", path=path, sequence_length=16, **more))


def test_prepared_folder_in_a_bucket_is_opened(server: S3Server, folder: str, tmp_path: Path) -> None:
    data = {"path": str(write_text(tmp_path / "text")), "sequence_length": 16, "cache_dir": str(tmp_path / "own")}
    local = prepare(data_section(name="text", **data))
    put_folder(server, folder, local.folder)
    assert tokens(server.url(folder)).key == local.key
    server.client().delete_object(Bucket=BUCKET, Key=f"{folder}/train-00000.bin")
    bucket_paths.forget_listings()
    with pytest.raises(UserError, match=r"^prepared data s3://bucket/.* does not exist or is not complete"):
        tokens(server.url(folder))


# nodes with their own disks -------------------------------------------------------------------------------------------

_NODE = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'


def start_nodes(tmp_path: Path, disks: list[str], words: list[str]) -> list[tuple[int, str]]:
    """Run two nodes of one process each, whose caches are on their own disks. Return their exit codes and output."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("needs root, for mount namespaces")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = []
    for number, disk in enumerate(disks):
        (tmp_path / f"disk-{number}").mkdir()
        (tmp_path / disk).mkdir(exist_ok=True)
        command = [
            "unshare", "--mount", "--propagation", "private", "sh", "-c", _NODE, "sh",
            str(tmp_path / f"disk-{number}"), str(tmp_path / disk),
            sys.executable, "train.py", *words,
        ]  # fmt: skip
        place = {
            "RANK": number, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": number,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "XDG_CACHE_HOME": tmp_path / disk,
        }  # fmt: skip
        environment = os.environ | {name: str(value) for name, value in place.items()}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        nodes.append(subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], **pipes))
    ended = [node.communicate(timeout=240)[0] for node in nodes]
    return [(node.returncode, printed) for node, printed in zip(nodes, ended, strict=True)]


@pytest.mark.slow
def test_nodes_without_a_common_disk_train_from_a_model_in_a_bucket(
    server: S3Server, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, base = write_text(tmp_path / "text"), server.url(f"{folder}/base")
    put_folder(server, f"{folder}/text", text)
    small = [*overrides(text, tmp_path / "trained", "trainer.steps=1", "launch.device=cpu")]
    assert train(small) == 0
    assert command(["export", f"run.dir={tmp_path / 'trained'}", f"out={base}"]) == 0
    capsys.readouterr()
    words = [
        "recipe=tiny", "data=text", f"data.path={server.url(f'{folder}/text')}", "model=auto", f"model.path={base}",
        f"data.cache_dir={server.url(f'{folder}/prepared')}", "data.sequence_length=32", "trainer.steps=2",
        "trainer.global_batch=4", "trainer.micro_batch=2", "trainer.eval_every=0", "launch.device=cpu",
        "adapter=lora", "trainer.sample_tokens=0",
    ]  # fmt: skip
    ended = start_nodes(tmp_path, ["disk", "disk"], [*words, f"run.dir={tmp_path / 'run'}"])
    assert [code for code, _ in ended] == [0, 0], ended
    assert len(losses(tmp_path / "run")) == 2
    prepared = [list((tmp_path / f"disk-{number}" / "serried").glob("*/summary.json")) for number in range(2)]
    assert [len(folders) for folders in prepared] == [1, 1]
    weights = [list((tmp_path / f"disk-{number}").rglob("downloads/*/contents/*")) for number in range(2)]
    assert len(weights[0]) == len(weights[1]) + 30  # only the node that prepared has the text


def test_file_that_is_written_beside_the_named_one_replaces_no_object(server: S3Server, folder: str) -> None:
    client, data = server.client(), f"{folder}/model.onnx.data"
    client.put_object(Bucket="bucket", Key=data, Body=b"kept")
    with (
        pytest.raises(UserError, match=rf"out={server.url(data)} exists already; use another out"),
        bucket_paths.output_path(server.url(f"{folder}/model.onnx")) as path,
    ):
        for name in (path.name, f"{path.name}.data"):
            path.with_name(name).write_bytes(b"new")
    assert server.objects(folder) == {data: b"kept"}


def test_lines_that_a_library_prints_are_not_taken_for_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = ["a warning", "3", '{"level": "info"}', '{"answer": [1, 2]}']
    (tmp_path / "talks.py").write_text("".join(f"print({line!r}, flush=True)\n" for line in lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert bucket_paths.ask_process("talks", {}, lambda _: None) == [1, 2]
    assert capfd.readouterr().err.splitlines() == lines[:3]
