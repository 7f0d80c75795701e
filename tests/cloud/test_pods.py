"""Pods of a run in a bucket: processes that share nothing but the bucket."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from serried.configs.errors import EXIT_STOPPED
from serried.configs.schema.fields import scratch_folder
from serried.launch.kubernetes import pod
from serried.launch.kubernetes.manifests import FAILURE_POLICY
from serried.launch.kubernetes.pod import Node
from serried.program import main
from serried.records.object_store import ObjectStore
from serried.records.status import Status, write_status
from serried.records.store import Unclear
from testing.disturb import send
from testing.runs import losses, run_here, tiny_overrides
from testing.s3_server import SECRET, S3Server
from tests.support.job_controller import JobController


def job_of(capsys: pytest.CaptureFixture[str], text: Path, url: str, *argv: str) -> dict[str, Any]:
    """Return the Job that a dry run prints."""
    small = [word for word in tiny_overrides(text, Path("runs/pods")) if not word.startswith("run.")]
    given = [
        "launch=kubernetes", "kubernetes.image=me/serried:0.2", "kubernetes.dry_run=true", "kubernetes.gpus=null",
        "launch.device=cpu", "kubernetes.secret=keys", "run.name=pods", f"run.dir={url}", "trainer.log_every=1", *argv,
    ]  # fmt: skip
    assert main([*small, *given]) == 0, capsys.readouterr().err
    *_, job = yaml.safe_load_all(capsys.readouterr().out)
    return dict(job)


def steps_recorded(server: S3Server, path: str) -> list[dict[str, Any]]:
    """Return the step lines of the newest records in the bucket."""
    objects = server.objects(path)
    head = json.loads(objects[f"{path}/head.json"])
    segments = [content for key, content in objects.items() if key.startswith(f"{path}/records/{head['records']}/metr")]
    lines = [json.loads(line) for content in segments for line in content.decode().splitlines()]
    return [line for line in lines if line["event"] == "step"]


def step_in_logs(controller: JobController) -> int:
    """Return the last step that the pods printed."""
    lines = [line for line in controller.logs().splitlines() if line.startswith("step ")]
    return max((int(line.split()[1].partition("/")[0]) for line in lines), default=0)


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("drained", marks=pytest.mark.cloud),
        pytest.param("lost node", marks=pytest.mark.slow),
        pytest.param("lost first node", marks=pytest.mark.slow),
    ],
)
def test_pod_that_ends_is_replaced_and_the_run_has_the_undisturbed_losses(
    what: str, server: S3Server, folder: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ("trainer.steps=20", "checkpoint.every=5")
    assert run_here(tiny_overrides(text, tmp_path / "alone", *steps)).code == 0
    workspace = tmp_path / "nodes"
    workspace.mkdir()
    job = job_of(capsys, text, server.url(folder), "launch.nodes=2", "parallel=fsdp", *steps)
    controller = JobController(job, workspace)
    disturbed: list[int] = []

    def disturb(running: JobController) -> None:
        if not disturbed and step_in_logs(running) >= 6:
            disturbed.append(1)
            pod = running.pods[0 if what == "lost first node" else 1]
            if what == "drained":
                send(pod.process.pid, signal.SIGTERM)
            else:
                pod.kill()

    outcome = controller.run(disturb)
    assert outcome == "Complete", controller.logs()
    assert controller.counted == 0, controller.ended
    assert [end.action for end in controller.ended] == ["Ignore", "Ignore", "Complete", "Complete"], controller.logs()
    found = [line["loss"] for line in steps_recorded(server, folder)]
    assert found[-5:] == pytest.approx(losses(tmp_path / "alone")[-5:], rel=1e-5)
    (last,) = [json.loads(line) for line in server.objects(folder)[f"{folder}/kubernetes/ends.jsonl"].splitlines()][-1:]
    assert (last["state"], last["step"]) == ("finished", 20)
    written = [path for path in workspace.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    if what != "drained":
        return
    assert [end.code for end in controller.ended] == [75, 75, 0, 0], (controller.ended, controller.logs())
    assert {end.message for end in controller.ended[:2]} == {controller.ended[0].message}
    assert "stopped at step" in controller.ended[0].message
    assert "SIGTERM" in controller.ended[0].message
    assert found == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    # A pod that is replaced after the end has nothing to do.
    environment = {"SERRIED_RUN_DIR": server.url(folder), "SERRIED_JOB": "uid-of-the-job", "JOB_COMPLETION_INDEX": "1"}
    assert str(Node({**os.environ, **environment}).earlier_end()).startswith("finished at step 20")
    assert Node({**os.environ, **environment, "SERRIED_JOB": "another"}).earlier_end() is None


@pytest.mark.cloud
def test_stop_counts_if_the_bucket_does_not_answer(
    server: S3Server, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a wrong address would start pods forever."""
    monkeypatch.setenv("SERRIED_SCRATCH", str(tmp_path))
    monkeypatch.setattr(pod, "_BUCKET_RETRY_SECONDS", 0.3)

    def refuse(*_: object) -> str:
        raise Unclear("the server answers 507 Insufficient Storage")

    node = Node(
        {**os.environ, "SERRIED_RUN_DIR": server.url(folder), "SERRIED_JOB": "uid", "JOB_COMPLETION_INDEX": "0"}
    )
    assert node.earlier_end() is None
    node.begin()
    run_dir = scratch_folder(server.url(folder))
    write_status(run_dir, Status("stopped", 0, "cannot use run.dir: no answer in time", EXIT_STOPPED))
    server.set_faults(down=1.0)
    stopped = {0: EXIT_STOPPED}
    code, line = node.judge(stopped, node.final_status(), asked=None, has_lost_pod=False)
    assert (code, line) == (69, "stopped at step 0: cannot use run.dir: no answer in time")
    assert node.judge(stopped, node.final_status(), asked="SIGTERM", has_lost_pod=False)[0] != 69
    server.set_faults()
    (run_dir / "kubernetes/ends.jsonl").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "put", refuse)
        code, _ = node.judge(stopped, node.final_status(), asked=None, has_lost_pod=False)
    assert code == 69, "a crash loop of a store that only reads would not be noticed"
    (run_dir / "kubernetes/ends.jsonl").unlink()
    assert node.judge(stopped, node.final_status(), asked=None, has_lost_pod=False)[0] == EXIT_STOPPED
    rules = FAILURE_POLICY["rules"]
    assert not [rule for rule in rules if 69 in rule.get("onExitCodes", {}).get("values", ())], "so that it counts"


@pytest.mark.cloud
def test_mistake_in_the_command_fails_the_job_at_once(
    server: S3Server, folder: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(capsys, text, server.url(folder))
    job["spec"]["template"]["spec"]["containers"][0]["args"].append("checkpoint.resume=must")
    controller = JobController(job, tmp_path)
    assert controller.run() == "Failed"
    assert (controller.ended[-1].code, controller.counted) == (78, 0), controller.logs()
    assert "error: checkpoint.resume=must" in controller.logs()
