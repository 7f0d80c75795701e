"""A run that starts from the checkpoint of another run in a bucket."""

from pathlib import Path

import pytest

from serried.records.head import read_head
from serried.records.object_store import open_store
from serried.trainer.checkpoint.bucket_checkpoints import download
from serried.trainer.checkpoint.manifest import read_manifest
from testing.rank_pool import Cluster
from testing.runs import metrics, run_here, tiny_overrides
from testing.s3_server import BUCKET, S3Server
from tests.cloud.test_bucket_checkpoints import losses

pytestmark = pytest.mark.cloud


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERRIED_SCRATCH", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


@pytest.fixture(scope="module")
def other(_server: S3Server, text: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a run with the checkpoints of steps 2 and 4, to be read only."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in _server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SERRIED_SCRATCH", str(tmp_path_factory.mktemp("other")))
        url = _server.url("resume/other")
        assert run_here(tiny_overrides(text, url, "trainer.stop_at=4")).code == 75
    return url


def without_state(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """Return the size and checksum of the files of a checkpoint whose content does not name the run."""
    return {name: record[:2] for name, record in read_manifest(checkpoint).items() if name != "state.json"}


def test_run_in_a_bucket_and_run_in_a_folder_continue_another_run_bitwise(
    server: S3Server, folder: str, other: str, text: Path, straight: Path, tmp_path: Path
) -> None:
    url, before = server.url(folder), server.objects("resume/other")
    sent = len(server.requests())
    ended = run_here(tiny_overrides(text, url, f"checkpoint.resume={other}/"))
    assert ended.code == 0, ended.printed
    assert f"resuming from {other}/checkpoints/step-00000004 at step 4" in ended.printed
    requests = [request for request in server.requests()[sent:] if "/resume/other" in request]
    assert [request for request in requests if "head.json" in request] == ["GET /bucket/resume/other/head.json"]
    assert {request.partition(" ")[0] for request in requests} == {"GET"}
    assert not [request for request in requests if "list" in request]
    assert losses(server, folder) == [(line["step"], line["loss"]) for line in metrics(straight)][4:]
    head = read_head(store := open_store(url))
    assert head is not None
    last = download(store, head.checkpoints[-1], tmp_path / "copy")
    assert without_state(last) == without_state(straight / "checkpoints/step-00000006")

    words = tiny_overrides(text, tmp_path / "here", f"checkpoint.resume={other}/checkpoints/step-4")
    assert run_here([*words, "trainer.stop_at=5"]).code == 75
    ended = run_here(words)
    assert ended.code == 0, ended.printed
    assert "this run started from s3://" in ended.printed, "the same command continues with its own checkpoint"
    assert [line["loss"] for line in metrics(tmp_path / "here")] == [line["loss"] for line in metrics(straight)][4:]
    assert without_state(tmp_path / "here/checkpoints/step-00000006") == without_state(last)
    assert server.objects("resume/other") == before


def test_another_layout_continues_another_run_with_its_losses(
    server: S3Server, other: str, text: Path, straight: Path, tmp_path: Path, cluster: Cluster, scratch: Path
) -> None:
    words = tiny_overrides(text, tmp_path / "two", "parallel=fsdp", f"checkpoint.resume={other}/checkpoints/00000002")
    answers = cluster.run(
        2, "tests.cloud.test_bucket_checkpoints:train_in_bucket", argv=words,
        environment=server.environment | {"SERRIED_SCRATCH": str(scratch)},
    )  # fmt: skip
    assert [answer.value for answer in answers] == [0, 0], answers[0].printed
    expected = [line["loss"] for line in metrics(straight)][2:]
    assert [line["loss"] for line in metrics(tmp_path / "two")] == pytest.approx(expected, abs=2e-5)


def test_damaged_newest_checkpoint_of_another_run_is_skipped(
    server: S3Server, folder: str, text: Path, straight: Path, tmp_path: Path
) -> None:
    url = server.url(folder)
    assert run_here(tiny_overrides(text, url, "trainer.stop_at=4")).code == 75
    head = read_head(open_store(url))
    assert head is not None
    key = f"{folder}/{head.checkpoints[-1].prefix}/optimizer.safetensors"
    content = bytearray(server.objects(key)[key])
    content[-9] ^= 1
    server.client().put_object(Bucket=BUCKET, Key=key, Body=bytes(content))
    ended = run_here(tiny_overrides(text, tmp_path / "here", f"checkpoint.resume={url}"))
    assert ended.code == 0, ended.printed
    assert f"resuming from the newest complete checkpoint, {url}/checkpoints/step-00000002" in ended.printed
    assert [line["loss"] for line in metrics(tmp_path / "here")] == [line["loss"] for line in metrics(straight)][2:]


@pytest.mark.usefixtures("server")
def test_new_run_uses_only_the_weights_of_another_run(other: str, text: Path, straight: Path, tmp_path: Path) -> None:
    first = []
    for number, resume in enumerate([f"{other}/checkpoints/step_4", str(straight / "checkpoints/step-00000004")]):
        words = (f"checkpoint.resume={resume}", "checkpoint.weights_only=true", "trainer.stop_at=1")
        ended = run_here(tiny_overrides(text, tmp_path / f"run-{number}", *words))
        assert ended.code == 75, ended.printed
        first.append([(line["step"], line["loss"]) for line in metrics(tmp_path / f"run-{number}")])
    assert first[0] == first[1]
    assert first[0][0][1] != metrics(straight)[0]["loss"]


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("resume", "message"),
    [
        (
            "{other}/checkpoints/step-3",
            "there is no such checkpoint; use checkpoint.resume={other}/checkpoints/step-000000",
        ),
        ("{other}-not", "there is no run in {other}-not; use the URL of a run, the folder that contains head.json"),
        ("s3:/bucket/a", "no bucket in checkpoint.resume=s3:/bucket/a; use s3://BUCKET/PATH"),
    ],
)
def test_url_that_names_no_checkpoint_is_refused_in_one_line(
    resume: str, message: str, other: str, text: Path, tmp_path: Path
) -> None:
    ended = run_here(tiny_overrides(text, tmp_path / "run", f"checkpoint.resume={resume.format(other=other)}"))
    assert ended.code == 78
    assert message.format(other=other) in ended.printed.splitlines()[-1]
