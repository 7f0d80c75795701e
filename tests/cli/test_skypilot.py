"""``launch=skypilot``: a task that SkyPilot accepts, whose nodes start the run as pods do."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from serried.program import main

GIVEN = ("launch=skypilot", "skypilot.image=ghcr.io/me/serried:0.2", "run.dir=s3://bucket/runs/a", "run.name=a")
OTHER_PYTHON = os.environ.get("SKYPILOT_PYTHON")
"""Interpreter with SkyPilot, whose requirements may conflict with those of the tests."""

# https://docs.skypilot.co/en/latest/reference/yaml-spec.html
_KEYS = {"name", "num_nodes", "resources", "envs", "secrets", "file_mounts", "workdir", "run"}
_RESOURCES = {
    "infra", "accelerators", "cpus", "memory", "image_id", "use_spot", "disk_size", "job_recovery",
}  # fmt: skip
_RECOVERY = {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """Return the task that a dry run prints."""
    assert main([*GIVEN, "skypilot.dry_run=true", *argv]) == 0, capsys.readouterr().err
    return dict(yaml.safe_load(capsys.readouterr().out))


ALL = (
    "recipe=llama8b", "launch.nodes=2", "skypilot.infra=aws/us-east-1", "skypilot.accelerator=A100-80GB",
    "skypilot.cpus=32", "skypilot.memory_gb=400", "skypilot.retries=2", "skypilot.file_mounts={/data: s3://bucket/books}",
    "skypilot.secrets=[WANDB_API_KEY]", "launch.notice=aws",
)  # fmt: skip
CPU = ("skypilot.gpus=null", "launch.device=cpu", "skypilot.spot=false")


@pytest.mark.parametrize("argv", [ALL, CPU])
def test_task_has_only_keys_that_skypilot_knows(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, *argv)
    assert found.keys() <= _KEYS
    assert found["resources"].keys() <= _RESOURCES
    assert found["resources"]["job_recovery"].keys() <= _RECOVERY, "SkyPilot ignores misspelt keys here"


def test_task_starts_the_run_as_pods_do_and_again_after_a_stop(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, *ALL)
    resources = found["resources"]
    assert resources["accelerators"] == {"A100-80GB": 8}
    assert resources["job_recovery"] == {"max_restarts_on_errors": 2, "recover_on_exit_codes": [75]}
    assert (found["num_nodes"], resources["use_spot"]) == (2, True)
    assert found["file_mounts"] == {"/data": "s3://bucket/books"}
    assert found["secrets"] == {"WANDB_API_KEY": None}
    assert found["envs"]["SERRIED_RUN_DIR"] == "s3://bucket/runs/a"
    assert found["run"].splitlines()[-1] == (
        "exec python -m serried.launch.kubernetes.pod -m serried.program -- run.name=a recipe=llama8b "
        "launch.notice=aws run.dir=s3://bucket/runs/a"
    )


def test_script_of_the_task_sets_what_a_pod_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, *CPU, "launch.nodes=2")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nenv\n")
    python.chmod(0o755)
    sky = {
        "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_TASK_ID": "sky-managed-7", "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", found["run"]], env=sky | found["envs"], capture_output=True, text=True, check=True, timeout=60
    )
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert {name: variables[name] for name in (
        "MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX", "SERRIED_NODES", "SERRIED_PROCESSES", "SERRIED_JOB",
    )} == {
        "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500", "JOB_COMPLETION_INDEX": "1", "SERRIED_NODES": "2",
        "SERRIED_PROCESSES": "1", "SERRIED_JOB": "sky-managed-7",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not OTHER_PYTHON and find_spec("sky") is None, reason="SkyPilot is not installed")
@pytest.mark.parametrize("argv", [ALL, CPU])
def test_parser_of_skypilot_accepts_the_task(
    argv: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(capsys, *argv, "skypilot.file_mounts={}")  # SkyPilot would look for the bucket
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(found))
    code = (
        "import json, sky; task = sky.Task.from_yaml_config(json.load(open('task.json')), "
        "secrets_overrides=[('WANDB_API_KEY', 'x')]); (resources,) = task.resources; "
        "print(task.num_nodes, resources.use_spot, resources.job_recovery['recover_on_exit_codes'])"
    )
    (tmp_path / "task.json").write_text(json.dumps(found))
    done = subprocess.run(
        [OTHER_PYTHON or sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": ""}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = "2 True [75]" if argv is ALL else "1 False [75]"
    assert done.stdout.splitlines()[-1] == expected


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run.dir=runs/a"], "run.dir=runs/a would be on the disk of a machine and vanish with it; use run.dir=s3://"),
        (["data=text", "data.path=docs"], "data.path=docs is a file of this machine, not of the nodes; use data."),
        (["run.name=Llama_8B"], "run.name=Llama_8B cannot be the name of a job: "),
        (["skypilot.image=null"], "launch=skypilot needs a container image with serried; build one from the "),
        (["skypilot.image=serried"], "skypilot.image=serried has no tag, so nodes may run different versions; use "),
        (["skypilot.file_mounts={data: s3://b/c}"], "skypilot.file_mounts={data: s3://b/c} needs an absolute path "),
        (["skypilot.infra=AWS east"], "skypilot.infra=AWS east (command line) must not contain spaces"),
        (["skypilot.job_recovery=EAGER"], "unknown key skypilot.job_recovery=EAGER (command line); the keys of "),
        (["launch=local"], "skypilot.dry_run=true prints the YAML that launch=skypilot would create, but this is "),
        (["-m", "trainer.seed=1,2"], "-m cannot be used with "),
    ],
)  # fmt: skip
def test_run_that_skypilot_cannot_start_is_refused_in_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (*GIVEN, *CPU, "skypilot.dry_run=true")
    replaced = {word.partition("=")[0] for word in argv}
    assert main([*(word for word in given if word.partition("=")[0] not in replaced), *argv]) == 78
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {said}"), error


def _sky(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> Path:
    """Put a ``sky`` on the PATH that records its arguments and its task."""
    record, script = folder / "record", folder / "sky"
    script.write_text(
        f'#!/bin/sh\necho "$*" > {record}\nfor last; do true; done\ncat "$last" > {folder}/task.yaml\n{answer}\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return record


def test_submitting_creates_a_managed_job_without_a_secret_in_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = _sky(tmp_path, monkeypatch, "exit 0")
    assert main([*GIVEN, *CPU, "skypilot.secrets=[MY_TOKEN]"]) == 78
    assert capsys.readouterr().err.startswith("error: skypilot.secrets: MY_TOKEN is not set in the environment")
    monkeypatch.setenv("MY_TOKEN", "hidden-5150")
    assert main([*GIVEN, *CPU, "skypilot.secrets=[MY_TOKEN]"]) == 0
    assert capsys.readouterr().out.startswith("submitted  managed job a: nodes 1, processes per node 1\n")
    assert record.read_text().startswith("jobs launch --yes --detach-run --secret MY_TOKEN /")
    assert "hidden-5150" not in record.read_text() + (tmp_path / "task.yaml").read_text()


def test_refusal_by_skypilot_and_missing_skypilot_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _sky(tmp_path, monkeypatch, "echo 'No cloud access is set up.' >&2; exit 1")
    assert main([*GIVEN, *CPU]) == 78
    assert capsys.readouterr().err.startswith("error: SkyPilot refused the job: No cloud access is set up.; to print")
    monkeypatch.setenv("PATH", "/nowhere")
    assert shutil.which("sky") is None
    assert main([*GIVEN, *CPU]) == 78
    assert capsys.readouterr().err.startswith("error: launch=skypilot needs sky, which is not on the PATH of this ")
