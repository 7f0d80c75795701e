"""Pods of a run in a bucket: processes that share nothing but the bucket."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from serried.program import main
from testing.runs import tiny_overrides
from testing.s3_server import S3Server
from tests.support.job_controller import JobController

pytestmark = pytest.mark.cloud


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


def test_mistake_in_the_command_fails_the_job_at_once(
    server: S3Server, folder: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(capsys, text, server.url(folder))
    job["spec"]["template"]["spec"]["containers"][0]["args"].append("checkpoint.resume=must")
    controller = JobController(job, tmp_path)
    assert controller.run() == "Failed"
    assert (controller.ended[-1].code, controller.counted) == (78, 0), controller.logs()
    assert "error: checkpoint.resume=must" in controller.logs()
