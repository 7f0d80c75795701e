"""``launch=kubernetes``: manifests that Kubernetes accepts, and pods that end so that the right thing follows."""

import importlib
import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from serried.launch.kubernetes.manifests import FAILURE_POLICY
from serried.launch.kubernetes.pod import Attempt, Node
from serried.launch.kubernetes.pod import main as run_pod
from serried.program import main
from testing.disturb import family, last_step, send
from testing.forked_runs import typed
from testing.runs import losses, run_here, tiny_overrides
from tests.support.job_controller import JobController, action

GIVEN = ("launch=kubernetes", "kubernetes.image=ghcr.io/me/serried:0.2", "kubernetes.claim=runs")
MODELS = {
    "jobset": "jobset_v1alpha2_job_set.JobsetV1alpha2JobSet",
    "runtime": "trainer_v1alpha1_cluster_training_runtime.TrainerV1alpha1ClusterTrainingRuntime",
    "trainjob": "trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob",
}
VERSIONS = ("1.29", "1.31", "1.37")


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    """Return the manifests that a dry run prints."""
    assert main([*GIVEN, "kubernetes.dry_run=true", *argv]) == 0, capsys.readouterr().err
    return list(yaml.safe_load_all(capsys.readouterr().out))


def names(value: Any, path: str = "") -> set[str]:
    """Return the paths of all keys in ``value``."""
    if isinstance(value, dict):
        return {f"{path}.{key}" for key in value}.union(*(names(each, f"{path}.{key}") for key, each in value.items()))
    if isinstance(value, list):
        return set().union(*(names(each, f"{path}[{number}]") for number, each in enumerate(value)))
    return set()


OPTIONS = [
    ("launch.nodes=2",),
    ("kubernetes.gpus=null", "launch.device=cpu"),
    ("kubernetes.service_account=train", "kubernetes.queue=team", "launch.nodes=4"),
    ("kubernetes.cpus=64", "kubernetes.memory=1500Gi", "kubernetes.namespace=ml",
     "kubernetes.node_selector='pool=h100,zone=a'"),
]  # fmt: skip
IN_BUCKET = ("kubernetes.claim=null", "run.dir=s3://bucket/runs/a")


@pytest.mark.parametrize(
    ("kind", "argv"),
    [
        *((kind, argv) for kind in ("job", "jobset", "trainjob") for argv in OPTIONS),
        *((kind, IN_BUCKET) for kind in ("job", "trainjob", "runtime")),
        ("runtime", (*OPTIONS[2], *OPTIONS[3])),
    ],
)
def test_manifests_match_the_schemas_of_kubernetes_and_kubeflow(
    kind: str, argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    secret = [] if kind == "trainjob" else ["kubernetes.secret=keys"]
    found = printed(capsys, "trainer.global_batch=256", f"kubernetes.kind={kind}", *secret, *argv)
    assert [each["kind"] for each in found] == {
        "job": ["Service", "Job"], "jobset": ["JobSet"], "trainjob": ["TrainJob"],
        "runtime": ["ClusterTrainingRuntime"],
    }[kind]  # fmt: skip
    jobs = [*found] if kind == "job" else []
    for document in found if kind != "job" else ():
        module, _, name = MODELS[kind].partition(".")  # a slow import, only for this test
        model = getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), name)
        assert names(document) <= names(json.loads(model.from_dict(document).to_json())), "unknown keys are dropped"
        if kind != "trainjob":
            jobset = document["spec"] if kind == "jobset" else document["spec"]["template"]["spec"]
            spec = jobset["replicatedJobs"][0]["template"]["spec"]
            jobs.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "child"}, "spec": spec})
    for document in jobs:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    ("code", "conditions", "expected"),
    [
        (78, [], "FailJob"), (70, [], "FailJob"), (75, [], "Ignore"), (137, ["DisruptionTarget"], "Ignore"),
        (143, ["DisruptionTarget"], "Ignore"), (70, ["DisruptionTarget"], "FailJob"), (137, [], "Count"),
        (1, [], "Count"),
    ],
)  # fmt: skip
def test_end_of_a_pod_leads_to_the_right_action(code: int, conditions: list[str], expected: str) -> None:
    assert action(FAILURE_POLICY["rules"], code, conditions) == expected


def test_pods_get_the_options_the_secret_and_a_grace_period_for_the_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ("recipe=llama8b", "launch.nodes=2", "kubernetes.secret=keys", "kubernetes.queue=team")
    _, job = printed(capsys, *argv, "kubernetes.node_selector='pool=h100'", "kubernetes.node_bandwidth=25Gb/s")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][:3] == ["-m", "serried.program", "--"]
    assert container["args"][3:] == ["recipe=llama8b", "run.name=llama8b", "run.dir=/workspace/runs/llama8b"]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert container["resources"]["limits"] == container["resources"]["requests"] == {"nvidia.com/gpu": "8"}
    assert pod["nodeSelector"] == {"pool": "h100"}
    assert (job["spec"]["suspend"], job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]) == (True, "team")
    _, slow = printed(capsys, *argv, "kubernetes.node_bandwidth=5Gb/s")
    fast_seconds, slow_seconds = (
        each["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] for each in (job, slow)
    )
    save_seconds = [96.4 / 2 * 8 / rate for rate in (25, 5)]  # 96.4 GB over two nodes
    assert 30 + save_seconds[0] < fast_seconds < 75 + 2 * save_seconds[0]
    assert 30 + save_seconds[1] < slow_seconds < 75 + 2 * save_seconds[1]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run.name=Llama_8B"], "run.name=Llama_8B cannot be the name of a job: Kubernetes allows at most 40 of"),
        (["kubernetes.claim=null"], "run.dir=runs/tiny would be inside the pods and vanish with them; use run.dir=s3:"),
        (["kubernetes.claim=null", "run.dir=s3://bucket/a", "--config-dir=docs"], "--config-dir=docs would not be in "),
        (["kubernetes.claim=null", "run.dir=s3://bucket/a", "data=text", "data.path=docs/*.md"],
         "data.path=docs/*.md is a file of this machine, not of the pods; use data.path=s3://BUCKET/PATH, or "),
        (["run.dir=../a"], "run.dir=../a is not on the volume kubernetes.claim=runs"),
        (["run.dir=/workspace/../tmp/a"], "run.dir=/workspace/../tmp/a is not on the volume kubernetes.claim=runs"),
        (["run.dir=/tmp/a"], "run.dir=/tmp/a is not on the volume kubernetes.claim=runs, mounted in the pods"),
        (["kubernetes.image=serried"], "kubernetes.image=serried has no tag, so pods may run different versions; use"),
        (["kubernetes.image=null"], "launch=kubernetes needs a container image with serried; build one from"),
        (["kubernetes.memory=lots"], "kubernetes.memory=lots is not a size in Kubernetes' format; e.g. "),
        (["kubernetes.node_bandwidth=25"], "kubernetes.node_bandwidth=25 is not a rate in Gb/s; e.g. kubernetes.node_"),
        (["kubernetes.node_selector=h100"], "kubernetes.node_selector=h100: 'h100' is not LABEL=VALUE; e.g. "),
        (["kubernetes.kind=trainjob", "kubernetes.secret=keys"], "kubernetes.secret=keys cannot be used with "),
        (["launch=local"], "kubernetes.dry_run=true prints the YAML that launch=kubernetes would create, but"),
        (["-m", "trainer.seed=1,2"], "-m cannot be used with launch=kubernetes, which creates one run; run"),
    ],
)  # fmt: skip
def test_run_that_cannot_work_in_pods_is_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (*GIVEN, "kubernetes.dry_run=true", "kubernetes.gpus=null", "launch.device=cpu")
    replaced = {word.partition("=")[0] for word in argv}
    assert main([*(word for word in given if word.partition("=")[0] not in replaced), *argv]) == 78
    error = capsys.readouterr().err
    assert [line for line in error.splitlines() if not line.startswith("note: ")] == [error.splitlines()[-1]]
    assert error.splitlines()[-1].startswith(f"error: {said}"), error


def _kubectl(folder: Path, monkeypatch: pytest.MonkeyPatch, stderr: str = "") -> Path:
    """Put a ``kubectl`` on the PATH that records its input, and fails if ``stderr`` is given."""
    record = folder / "record"
    script = folder / "kubectl"
    answer = f"echo '{stderr}' >&2; exit 1" if stderr else "exit 0"
    script.write_text(f'#!/bin/sh\necho "# $*" >> {record}\ncat >> {record}\necho "---" >> {record}\n{answer}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return record


def test_submitting_creates_the_service_then_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = _kubectl(tmp_path, monkeypatch)
    assert main([*GIVEN, "kubernetes.gpus=null", "launch.device=cpu", "launch.nodes=2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("submitted  job tiny: 2 pods x 1 process\n")
    assert "cancel     kubectl delete job/tiny service/tiny" in said
    assert [line for line in record.read_text().splitlines() if line.startswith("# ")] == [
        "# apply -f -", "# create -f -",
    ]  # fmt: skip
    assert [each["kind"] for each in yaml.safe_load_all(record.read_text()) if each] == ["Service", "Job"]


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("Error from server (AlreadyExists): jobs tiny already exists", "a job named tiny exists already; if it has "),
        ("error: no context chosen", "Kubernetes refused the Service: error: no context chosen; to print the YAML: "),
    ],
)
def test_refusal_of_the_cluster_is_one_line(
    stderr: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _kubectl(tmp_path, monkeypatch, stderr)
    assert main([*GIVEN, "kubernetes.gpus=null", "launch.device=cpu"]) == 78
    assert capsys.readouterr().err.startswith(f"error: {said}")


def _job(capsys: pytest.CaptureFixture[str], text: Path, *more: str) -> dict[str, Any]:
    """Return the Job of a run of two pods with one process each."""
    argv = [word for word in tiny_overrides(text, Path("runs/pods")) if not word.startswith("run.")]
    *_, job = printed(
        capsys, *argv, "run.name=pods", "kubernetes.gpus=null", "launch.device=cpu", "launch.nodes=2",
        "parallel=fsdp", *more,
    )  # fmt: skip
    return job


@pytest.mark.slow
@pytest.mark.parametrize("what", ["drained", "lost node", "lost first node"])
def test_pod_that_ends_is_replaced_and_the_run_has_the_undisturbed_losses(
    what: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "alone"
    steps = ("trainer.steps=60", "checkpoint.every=5")
    assert run_here(tiny_overrides(text, alone, *steps)).code == 0
    workspace = tmp_path / "volume"
    workspace.mkdir()
    controller = JobController(_job(capsys, text, *steps, "trainer.log_every=1"), workspace)
    run_dir = workspace / "runs" / "pods"
    disturbed: list[int] = []

    def disturb(running: JobController) -> None:
        if not disturbed and last_step(run_dir) >= 12:
            disturbed.append(last_step(run_dir))
            pod = running.pods[0 if what == "lost first node" else 1]
            if what == "drained":
                send(pod.process.pid, signal.SIGTERM)
            else:
                pod.kill()

    outcome = controller.run(disturb)
    assert outcome == "Complete", controller.logs()
    assert disturbed, "the run ended before it was disturbed"
    assert controller.counted == 0, controller.ended
    actions = [end.action for end in controller.ended]
    assert actions == ["Ignore", "Ignore", "Complete", "Complete"], (controller.ended, controller.logs())
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-5)
    assert controller.ended[-1].message.startswith("finished")
    if what == "drained":
        assert [end.code for end in controller.ended] == [75, 75, 0, 0]
        assert any("stopped at step" in end.message and "SIGTERM" in end.message for end in controller.ended)


@pytest.mark.slow
def test_mistake_in_the_command_fails_the_job_at_once(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = _job(capsys, text)
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["args"].append("checkpoint.resume=must")  # there is no checkpoint: found when the run starts
    controller = JobController(job, tmp_path)
    assert controller.run() == "Failed"
    assert (controller.ended[-1].code, controller.counted) == (78, 0), controller.logs()
    assert "error: checkpoint.resume=must" in controller.logs()


@pytest.mark.slow
def test_pod_that_is_asked_to_end_while_it_waits_for_the_others_ends_at_once(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    controller = JobController(_job(capsys, text), tmp_path)
    controller.pods[1].kill()  # so that the first pod waits

    first = controller.pods[0]
    asked: list[int] = []

    def drain(_: JobController) -> None:
        if not asked and list(tmp_path.glob("runs/pods/kubernetes/*.start")):
            asked.append(signal.SIGTERM)
            send(first.process.pid, signal.SIGTERM)

    controller.run(drain, patience_seconds=15)
    assert controller.ended, "no pod ended"
    assert (first.process.returncode, first.message.read_text()) == (75, "stopped before training began: SIGTERM")


def test_script_of_the_user_and_its_flags_are_found_on_the_volume(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    script = tmp_path / "code" / "train.py"  # not ours, in spite of its name
    script.write_text("import serried\nfrom tests.support.own_task import Points\nserried.main(Points)\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe").mkdir()
    (tmp_path / "mine" / "recipe" / "own.yaml").write_text("trainer:\n  steps: 5\n")
    argv = [
        "--config-dir=mine", *GIVEN, "kubernetes.dry_run=true", "kubernetes.gpus=null", "launch.device=cpu",
        "run.name=own", "trainer.steps=5", "trainer.global_batch=6",
    ]  # fmt: skip
    done = typed("code/train.py", *argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *_, job = yaml.safe_load_all(done.stdout)
    words = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words[: words.index("--")] == ["code/train.py", "--config-dir=mine"]
    elsewhere = typed(str(script), *argv[1:], cwd=tmp_path / "mine")
    assert elsewhere.returncode == 78
    assert f"error: {script} is not in the current folder" in elsewhere.stderr


def test_grace_period_is_all_that_limits_the_last_save(capsys: pytest.CaptureFixture[str]) -> None:
    _, job = printed(capsys, "recipe=llama8b", "launch.nodes=2", "kubernetes.node_bandwidth=1Gb/s")
    pod = job["spec"]["template"]["spec"]
    given = {entry["name"]: entry.get("value", "") for entry in pod["containers"][0]["env"]} | {"SERRIED_RUN_DIR": "x"}
    assert pod["terminationGracePeriodSeconds"] > 600
    assert Node(given).patience_seconds == pod["terminationGracePeriodSeconds"] - 10


def _ended(run_dir: Path, state: str, reason: str) -> dict[str, str]:
    """Write the end of a start of a job, and return the environment of one of its pods."""
    (run_dir / "kubernetes").mkdir(parents=True)
    (run_dir / "kubernetes" / "uid.start").touch()
    (run_dir / "status.json").write_text(json.dumps({"state": state, "step": 3, "reason": reason, "exit_code": 0}))
    return {"SERRIED_RUN_DIR": str(run_dir), "SERRIED_JOB": "uid", "JOB_COMPLETION_INDEX": "1", "SERRIED_NODES": "2"}


@pytest.mark.parametrize(
    ("state", "reason", "expected"),
    [
        ("finished", "all steps done", "finished at step 3: all steps done"),
        ("stopped", "control: stop", "stopped at step 3: control: stop. Not started again; run the same command to "
         "resume"),
        ("stopped", "SIGTERM", None),
        ("running", "", None),
    ],
)  # fmt: skip
def test_pod_that_is_replaced_after_the_run_ended_for_good_ends_too(
    state: str, reason: str, expected: str | None, tmp_path: Path
) -> None:
    assert Node(_ended(tmp_path, state, reason)).earlier_end() == expected


def _attempts(count: int) -> list[Attempt]:
    """Return the attempt of pods that met in this process."""
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        port = int(first.getsockname()[1])
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda index: Attempt(index, count, "127.0.0.1", port, 30), range(count)))


def test_pod_that_ended_as_the_run_does_is_not_lost_and_others_are() -> None:
    first, second, third = _attempts(3)
    second.tell_done()
    second.close()
    assert not first.is_left.wait(0.5), "the first pod may need longer, such as for on_end"
    third.tell_killed()
    assert first.is_left.wait(10)
    first.close()
    assert third.is_left.wait(10)


def test_first_pod_tells_the_others_how_the_run_ended() -> None:
    first, second = _attempts(2)
    first.tell_done((75, "stopped at step 3: SIGTERM\n"))
    first.close()
    assert second.verdict_of_first_pod() == (75, "stopped at step 3: SIGTERM\n")
    assert not second.is_left.is_set()
    second.close()


@pytest.mark.parametrize(
    "message", [b"", b"done\n", b"done\n[75]\n", b"done\n[1, 2]\n", b'done\n[137, "x"]\n', b"killed\n"]
)
def test_pod_without_a_message_from_the_first_pod_decides_on_its_own(message: bytes) -> None:
    first, second = _attempts(2)
    (connection,) = first._others
    connection.sendall(message)
    first.close()
    assert second.verdict_of_first_pod() is None
    assert second.is_left.is_set() is not message.startswith(b"done")
    second.close()


@pytest.mark.slow
def test_pod_of_a_killed_rank_counts_and_the_others_do_not(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = _job(capsys, text, "trainer.steps=100000", "trainer.log_every=1")
    job["spec"]["backoffLimit"] = 0
    controller = JobController(job, tmp_path)
    killed: list[int] = []

    def kill(running: JobController) -> None:
        if not killed and last_step(tmp_path / "runs" / "pods") >= 3:
            (pid,) = family(running.pods[1].process.pid)[1:][:1]
            killed.append(pid)
            send(pid, signal.SIGKILL)

    assert controller.run(kill) == "Failed"
    codes = {end.index: end.code for end in controller.ended}
    assert codes.get(1) == 128 + signal.SIGKILL, controller.logs()
    assert "rank 1 was killed by SIGKILL" in controller.ended[-1].message
    assert codes.get(0, 75) == 75


def test_volume_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    code = run_pod(["-c", "pass", "--"], {"SERRIED_RUN_DIR": str(tmp_path / "file" / "run")})
    assert (code, capsys.readouterr().out) == (78, f"error: {tmp_path}/file/run/kubernetes: Not a directory\n")


def test_secret_of_the_pods_may_hold_what_a_tracker_needs(capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "kubernetes.gpus=null", "launch.device=cpu", "track.webhook=ONLY_THERE", "kubernetes.secret=keys")
