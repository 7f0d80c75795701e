"""On a real Slurm cluster: submitted from the config, stopped by Slurm in each of its ways, queued again, gone on."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from serried.planner.time.measured_rates import read_rates
from testing.rank_pool import ROOT
from testing.runs import metrics, tiny_overrides
from tests.support.slurm import PATIENCE_SECONDS, SlurmCluster, wait_for, why_not

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

# A login node has no torch: importing it fails here.
_LOGIN_NODE = "import sys; sys.modules['torch'] = None; from {module} import main; sys.exit(main(sys.argv[1:]))"
_ENDLESS = ("trainer.steps=1000000", "schedule=constant", "checkpoint.every=1000000", "trainer.deterministic=true")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def _no_job_stays(slurm: SlurmCluster) -> Iterator[None]:
    yield
    slurm.clear()


def at_login(slurm: SlurmCluster, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _LOGIN_NODE.format(module=module), *words],
        cwd=ROOT, env=slurm.environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip


def submit(slurm: SlurmCluster, *words: str) -> str:
    """Submit a run of two nodes, as ``launch=slurm`` does; returns the job's number."""
    done = at_login(slurm, "serried.program", "launch=slurm", "launch.nodes=2", "launch.device=cpu", *words)
    assert done.returncode == 0, done.stderr
    found = re.search(r"job (\d+)", done.stdout)
    assert found, done.stdout
    return found[1]


def printed(run_dir: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted((run_dir / "slurm").glob("*.log")))


def status(run_dir: Path) -> dict[str, object]:
    try:
        return dict(json.loads((run_dir / "status.json").read_text()))
    except FileNotFoundError:
        return {}


def steps(run_dir: Path) -> list[int]:
    try:
        return [line["step"] for line in metrics(run_dir)]
    except FileNotFoundError:
        return []


def starts(run_dir: Path) -> list[int | None]:
    """From which step each start went on; None: from none."""
    return [line["resumed_from"] for line in metrics(run_dir, "start")]


def wait_for_steps(run_dir: Path, more_than: int) -> None:
    wait_for(lambda: max(steps(run_dir), default=0) > more_than, f"step {more_than}", lambda: printed(run_dir))


def has_trained_on(run_dir: Path, start: int) -> bool:
    began = starts(run_dir)
    return len(began) == start and max(steps(run_dir), default=0) > (began[-1] or 0)


def wait_for_a_start(run_dir: Path, number: int) -> None:
    """Wait until the run has started that often, and trained on."""
    wait_for(lambda: has_trained_on(run_dir, number), f"start {number}", lambda: printed(run_dir))


def wait_for_state(run_dir: Path, state: str) -> None:
    wait_for(lambda: status(run_dir).get("state") == state, f"the run to be {state}", lambda: printed(run_dir))


def check_nothing_was_lost(run_dir: Path, text: Path, tmp_path: Path) -> None:
    """Every step once, from sample to sample, with the losses of a run that nobody stopped."""
    done = steps(run_dir)
    assert done == list(range(1, len(done) + 1))
    assert [line["samples"] for line in metrics(run_dir)] == [4 * step for step in done]
    last = (starts(run_dir)[-1] or 0) + 1
    assert [line["loss"] for line in metrics(run_dir)][:last] == undisturbed_losses(text, tmp_path, last)


def undisturbed_losses(text: Path, tmp_path: Path, last: int) -> list[float]:
    """Return the losses of the first steps of a run that nobody stopped."""
    whole = tmp_path / "undisturbed"
    argv = tiny_overrides(text, whole, *_ENDLESS, f"trainer.stop_at={last}", "launch=local", "launch.processes=2")
    subprocess.run(
        [sys.executable, "train.py", *argv, "launch.device=cpu"], cwd=ROOT, timeout=PATIENCE_SECONDS, check=False
    )
    return [line["loss"] for line in metrics(whole)]


def processes_of(job: str, node: str) -> list[int]:
    """Return the processes of a job's step on a node."""
    wanted = {f"SLURM_JOB_ID={job}".encode(), f"SLURMD_NODENAME={node}".encode()}
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted <= set(path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return found


def test_two_nodes_train_what_one_process_trains(slurm: SlurmCluster, text: Path, tmp_path: Path) -> None:
    run_dir, may_begin = tmp_path / "run", tmp_path / "may-begin"
    hold = f"slurm.setup='until [ -e {may_begin} ]; do sleep 0.1; done'"
    argv = tiny_overrides(text, run_dir, "slurm.interface=eth0", hold)
    job = submit(slurm, *argv)
    again = at_login(slurm, "serried.cli", "submit", "launch.nodes=2", *argv)
    assert again.returncode == 78
    assert f"already has a job in the queue: {job} " in again.stderr
    shown = at_login(slurm, "serried.cli", "status", f"run.dir={run_dir}").stdout
    assert f"job     {job} " in shown

    may_begin.touch()
    slurm.wait_for_state(job, "COMPLETED", "FAILED")
    assert slurm.job(job)["JobState"] == "COMPLETED", printed(run_dir)
    assert status(run_dir)["state"] == "finished"
    assert (run_dir / "slurm" / f"{job}.sbatch").exists()
    assert "step 6/6" in (run_dir / "slurm" / f"{job}-node-0.log").read_text()
    assert (run_dir / "slurm" / f"{job}-node-1.log").exists()
    assert metrics(run_dir, "start")[0]["world_size"] == 2
    alone = tmp_path / "alone"
    subprocess.run(
        [sys.executable, "train.py", *tiny_overrides(text, alone)], cwd=ROOT, timeout=PATIENCE_SECONDS, check=True
    )
    assert [line["loss"] for line in metrics(run_dir)] == pytest.approx([line["loss"] for line in metrics(alone)])
    shown = at_login(slurm, "serried.cli", "status", f"run.dir={run_dir}").stdout
    assert "finished: all steps done, exit code 0" in shown
    assert "step    6/6, loss " in shown


def test_run_saves_before_the_time_limit_and_resumes_when_queued_again(
    slurm: SlurmCluster, text: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    argv = tiny_overrides(text, run_dir, *_ENDLESS)
    job = submit(slurm, *argv, "slurm.time_minutes=30", "slurm.signal_seconds=600")
    wait_for_steps(run_dir, 5)
    slurm.ask("scontrol", "update", f"jobid={job}", "timelimit=9")  # so that 600 s before the limit are over
    wait_for(lambda: slurm.job(job).get("Restarts") == "1", "the requeue", lambda: printed(run_dir))
    slurm.ask("scontrol", "update", f"jobid={job}", "timelimit=30")
    wait_for_a_start(run_dir, 2)
    assert "SIGUSR1" in metrics(run_dir, "stop")[0]["reason"]
    assert slurm.job(job)["Restarts"] == "1"

    slurm.ask("scancel", job)
    slurm.wait_for_state(job, "CANCELLED")
    wait_for_state(run_dir, "stopped")
    assert status(run_dir)["exit_code"] == 75
    check_nothing_was_lost(run_dir, text, tmp_path)


def test_run_resumes_after_preemption_and_after_a_requeue(slurm: SlurmCluster, text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = submit(slurm, *tiny_overrides(text, run_dir, *_ENDLESS), "slurm.partition=low")
    wait_for_steps(run_dir, 5)
    urgent = slurm.ask(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"
    ).strip()
    slurm.wait_for_state(urgent, "COMPLETED")
    wait_for_a_start(run_dir, 2)
    slurm.ask("scontrol", "requeue", job)
    wait_for_a_start(run_dir, 3)
    assert [line["state"] for line in metrics(run_dir, "stop")] == ["stopped", "stopped"]
    check_nothing_was_lost(run_dir, text, tmp_path)


def test_run_continues_without_a_node_whose_processes_are_killed(
    slurm: SlurmCluster, text: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    argv = tiny_overrides(text, run_dir, *_ENDLESS, "recover.mode=memory")
    job = submit(slurm, *argv)
    wait_for_steps(run_dir, 5)
    for process in processes_of(job, "node1"):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    wait_for(lambda: bool(metrics(run_dir, "recovered")), "the recovery", lambda: printed(run_dir))
    lost, recovered = metrics(run_dir, "lost")[0], metrics(run_dir, "recovered")[0]
    assert (lost["nodes"], lost["ranks"], lost["replicas"], recovered["generation"]) == (["node1"], [1], 1, 1)
    wait_for_steps(run_dir, recovered["step"] + 3)
    assert "1 of 2 replicas" in at_login(slurm, "serried.cli", "status", f"run.dir={run_dir}").stdout
    slurm.ask("scancel", job)
    wait_for_state(run_dir, "stopped")
    assert starts(run_dir) == [None]
    assert slurm.job(job)["Restarts"] == "0"
    losses = [line["loss"] for line in metrics(run_dir)][: recovered["step"] + 2]
    assert losses == pytest.approx(undisturbed_losses(text, tmp_path, len(losses)), rel=1e-6)


def test_a_sweep_is_one_array_job(slurm: SlurmCluster, text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "runs", "trainer.steps=2", "run.name=small", "trainer.seed=1,2")
    done = at_login(
        slurm, "serried.program", "launch=slurm", "launch.device=cpu", "slurm.array_concurrency=1", "-m", *argv
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"array job (\d+): 2 runs", done.stdout)
    assert found, done.stdout
    for task, seed in enumerate((1, 2)):
        run_dir = tmp_path / "runs" / f"seed-{seed}"
        wait_for_state(run_dir, "finished")
        assert (run_dir / "slurm" / f"{found[1]}_{task}-node-0.log").exists()
        config = (run_dir / "config.yaml").read_text()
        assert f"name: small-seed-{seed}\n" in config
        assert f"seed: {seed}\n" in config
    wait_for(lambda: not slurm.ask("squeue", "--noheader").strip(), "an empty queue")
    done = at_login(
        slurm, "serried.program", "launch=slurm", "launch.device=cpu", "slurm.array_concurrency=1", "-m", *argv
    )
    assert done.returncode == 0, done.stderr
    assert "submitted" not in done.stdout
    assert done.stdout.count("finished  ") == 2, done.stdout
    assert (tmp_path / "runs" / "sweep-seed" / "sweep.json").exists()


def test_mistake_found_on_the_nodes_is_not_queued_again(slurm: SlurmCluster, text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = tiny_overrides(text, run_dir, f"data.path={tmp_path}/nowhere", "checkpoint.resume=auto")
    job = submit(slurm, *argv)
    ended = slurm.wait_for_state(job, "COMPLETED", "FAILED")
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "0", "70:0")
    assert "failed before training began" in (run_dir / "slurm" / f"{job}.log").read_text()
    assert "error: data.path=" in printed(run_dir)


def test_job_refused_by_slurm_is_one_line(slurm: SlurmCluster, text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "slurm.partition=no-such", "launch.nodes=2")
    done = at_login(slurm, "serried.cli", "submit", *argv)
    assert done.returncode == 78
    assert done.stderr.startswith("error: Slurm refused the job: ")
    assert "invalid partition specified: no-such" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def slow_start(tmp_path: Path, begun: Path, seconds: int) -> str:
    """A setup that has each Python take ``seconds`` longer to start, in the first start of the job."""
    slow = tmp_path / "slow" / "sitecustomize.py"
    slow.parent.mkdir()
    slow.write_text(
        "import os, time\n"
        "if 'SLURM_STEP_ID' in os.environ:\n"
        f"    open({str(begun)!r}, 'w')\n"
        f"    time.sleep({seconds})\n"
    )
    return f"slurm.setup='[ -e {begun} ] || export PYTHONPATH={slow.parent}'"


def test_run_preempted_while_python_starts_is_queued_again(slurm: SlurmCluster, text: Path, tmp_path: Path) -> None:
    """Nobody but the script can tell: no handler is there yet, neither torchrun's nor the ranks'."""
    run_dir, begun = tmp_path / "run", tmp_path / "begun"
    setup = slow_start(tmp_path, begun, 60)
    job = submit(slurm, *tiny_overrides(text, run_dir), "slurm.partition=low", setup)
    wait_for(begun.exists, "Python to start", lambda: printed(run_dir))
    urgent = slurm.ask(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"
    ).strip()
    slurm.wait_for_state(urgent, "COMPLETED")
    wait_for_state(run_dir, "finished")
    assert slurm.job(job)["Restarts"] == "1"


def test_signal_while_python_starts_stops_the_run(slurm: SlurmCluster, text: Path, tmp_path: Path) -> None:
    """torchrun has to ignore SIGUSR1, and so would the ranks, which come later."""
    run_dir, begun = tmp_path / "run", tmp_path / "begun"
    job = submit(slurm, *tiny_overrides(text, run_dir, *_ENDLESS), slow_start(tmp_path, begun, 5))
    wait_for(begun.exists, "Python to start", lambda: printed(run_dir))
    slurm.ask("scancel", "--signal=USR1", job)  # as Slurm does before the time limit, at a time of its own
    wait_for(lambda: slurm.job(job).get("Restarts") == "1", "the requeue", lambda: printed(run_dir))
    assert "stopped: SIGUSR1 while the processes were joining" in printed(run_dir)
    assert "stopped before training began: SIGUSR1" in printed(run_dir)
    wait_for_steps(run_dir, 1)


def test_modules_setup_and_container_apply_to_the_ranks(
    slurm: SlurmCluster, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``module`` is a shell function, where there is one; a container is any command that runs another."""
    monkeypatch.setitem(slurm.environment, "BASH_FUNC_module%%", '() { export LOADED="$*"; }')
    run_dir, seen, container = tmp_path / "run", tmp_path / "seen", tmp_path / "container.sh"
    seen.mkdir()
    container.write_text(f'#!/usr/bin/env bash\nenv >{seen}/${{SLURM_NODEID:-batch}}-$SLURM_STEP_ID\nexec "$@"\n')
    container.chmod(0o755)
    job = submit(
        slurm, *tiny_overrides(text, run_dir, "trainer.steps=2"), "slurm.modules='cuda/12 nccl'",
        "slurm.setup='export SET_UP=\"two words\"'", f"slurm.container='env CONTAINED=yes {container}'",
        "slurm.time_minutes=9", "slurm.cpus_per_node=2",
    )  # fmt: skip
    assert slurm.wait_for_state(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", printed(run_dir)
    assert len(list(seen.iterdir())) == 3, "the ranks of each node, and the look at the end"
    for path in seen.iterdir():
        lines = path.read_text().splitlines()
        assert {"LOADED=load cuda/12 nccl", "SET_UP=two words", "CONTAINED=yes"} <= set(lines)
        assert any(re.fullmatch(r"SLURM_JOB_END_TIME=\d+", line) for line in lines), "the ranks look at the clock"


def test_preflight_submits_a_job_and_waits_for_it(slurm: SlurmCluster, text: Path, tmp_path: Path) -> None:
    argv = [*tiny_overrides(text, tmp_path / "run"), "launch=slurm", "launch.nodes=2", "launch.device=cpu"]
    done = at_login(slurm, "serried.cli", "preflight", *argv)
    assert re.match(r"submitted  job \d+: 2 nodes x 1 process\n", done.stdout), done.stderr
    assert done.stdout.endswith("fit: 2 nodes, 2 ranks\n")
    unfit = [line for line in done.stdout.splitlines() if line.startswith("unfit ")]
    assert all("of the median" in line for line in unfit), "nothing but what a busy machine does to speeds"
    assert done.returncode == (70 if unfit else 0)
    assert "\nnode0  0 " in done.stdout
    assert "\nnode1  1 " in done.stdout


def test_a_job_measures_the_rates_of_a_cluster(slurm: SlurmCluster, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "rates.json"
    argv = [*tiny_overrides(text, tmp_path / "run"), "launch=slurm", "launch.nodes=2", "launch.device=cpu"]
    done = at_login(slurm, "serried.cli", "plan", "calibrate", *argv, f"out={out}")
    assert done.returncode == 0, done.stdout + done.stderr + printed(tmp_path / "run")
    assert re.match(r"submitted  job \d+: 2 nodes x 1 process\n", done.stdout)
    assert "; 2 processes, 1 per node; torch " in done.stdout
    assert done.stdout.endswith(f"written    {out}; use it with plan.rates={out}\n")
    rates = read_rates(out)
    assert rates.cluster.per_node == 1
    assert 0 < rates.cluster.device.network_rate < float("inf")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_preflight_leaves_no_job(
    number: signal.Signals, slurm: SlurmCluster, text: Path, tmp_path: Path
) -> None:
    argv = [*tiny_overrides(text, tmp_path / "run"), "launch=slurm", "launch.device=cpu", "slurm.setup=sleep 1000"]
    program = [sys.executable, "-c", _LOGIN_NODE.format(module="serried.cli"), "preflight", *argv]
    with subprocess.Popen(
        program, cwd=ROOT, env=slurm.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as waiting:
        assert waiting.stdout is not None
        job = waiting.stdout.readline().split()[2].rstrip(":")
        slurm.wait_for_state(job, "RUNNING")
        waiting.send_signal(number)
        stdout, stderr = waiting.communicate(timeout=PATIENCE_SECONDS)
    assert (waiting.returncode, stderr) == (75, "")
    assert stdout.endswith(f"stopped    {number.name}: job {job} is cancelled\n")
    slurm.wait_for_state(job, "CANCELLED")


def test_preflight_names_the_unfit_node(slurm: SlurmCluster, text: Path, tmp_path: Path) -> None:
    """One of two has another disk in place of the shared one, in a container as it were."""
    disk, container = tmp_path / "disk", tmp_path / "container.sh"
    disk.mkdir()
    container.write_text(
        "#!/usr/bin/env bash\n"
        f'[ $SLURM_NODEID = 1 ] || exec "$@"\n'
        f'exec unshare --mount bash -c \'mount -t tmpfs none {disk} && mkdir {disk}/run && exec "$@"\' bash "$@"\n'
    )
    container.chmod(0o755)
    argv = [*tiny_overrides(text, disk / "run"), "launch=slurm", "launch.nodes=2", "launch.device=cpu"]
    done = at_login(slurm, "serried.cli", "preflight", *argv, f"slurm.container={container}", "slurm.exclude=node9")
    assert done.returncode == 78
    assert "Invalid node name specified" in done.stderr
    done = at_login(slurm, "serried.cli", "preflight", *argv, f"slurm.container={container}")
    assert done.returncode == 70, done.stdout + done.stderr
    assert (
        f"\nunfit      node1: does not see files that rank 0 writes to {disk / 'run'}; use run.dir=FOLDER on a shared"
        in done.stdout
    )
    assert "\nexclude    slurm.exclude=node1, or sbatch --exclude=node1\nverdict    not fit: 2 nodes" in done.stdout
