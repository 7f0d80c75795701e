"""``launch=local`` as it is typed: one error line before anything starts, one console, one exit code, no orphans."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest

from serried import cli
from serried.commands import slurm_jobs
from serried.configs.errors import EXIT_MISTAKE
from serried.configs.requirements import install_command
from serried.launch.local.launcher import _exit_code
from serried.launch.slurm.batch_script import script
from serried.launch.slurm.queue import Job, jobs_of, note_job
from serried.launch.slurm.requeue import verdict
from serried.launch.sweep.grid import read_sweep
from serried.program import main as train
from serried.records.status import Status
from testing.disturb import is_alive
from testing.forked_runs import typed
from testing.rank_pool import ROOT
from testing.runs import metrics, status, tiny_overrides
from tests.support.slurm import wait_for

_ENDLESS = ("trainer.steps=1000000", "schedule=constant", "checkpoint.every=1000000")


class Local:
    """A run of ``launch=local`` with two processes."""

    def __init__(self, *words: str, program: str = "train.py", folder: Path = ROOT) -> None:
        argv = [sys.executable, str(ROOT / program), "launch=local", "launch.processes=2", "launch.device=cpu", *words]
        self.process = subprocess.Popen(
            argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, restore_signals=True
        )

    def ranks(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return sorted(int(pid) for path in children for pid in path.read_text().split())

    def end(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=120)
        return self.process.returncode, stdout, stderr


@pytest.fixture
def started(text: Path, tmp_path: Path) -> Iterator[Local]:
    """One that trains, and would for ever, in ``tmp_path / "run"``."""
    run = Local(*tiny_overrides(text, tmp_path / "run", *_ENDLESS))
    wait_for(lambda: is_training(tmp_path / "run"), "the third step")
    ranks = run.ranks()
    assert len(ranks) == 2
    yield run
    with suppress(ProcessLookupError):
        run.process.kill()
    run.process.communicate()
    wait_for(lambda: not any(is_alive(pid) for pid in ranks), "the ranks to end")


def is_training(run_dir: Path) -> bool:
    try:
        return len(metrics(run_dir)) >= 3
    except FileNotFoundError:
        return False


_NOT_IMPORTED = {
    "accelerate", "datasets", "lightning", "mlflow", "optuna", "torch._inductor.compile_fx",
    "torch.distributed.pipelining", "torchao", "transformers", "wandb",
}  # fmt: skip
"""What a plain run does without, and would start seconds later with. (torch's own optimizers import torch._dynamo,
torch.distributed.tensor and sympy.)"""


def test_two_processes_train_rank_0_prints_and_none_imports_what_it_does_not_use(text: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import os, pathlib, sys\n"
        "from serried.program import main\n"
        "from serried.runtime.exit import leave\n"
        "code = main(sys.argv[1:])\n"
        "(pathlib.Path(__file__).parent / f'{os.getpid()}.modules').write_text('\\n'.join(sys.modules))\n"
        "leave(code)\n"
    )
    code, stdout, stderr = Local(*tiny_overrides(text, tmp_path / "run"), program=str(own)).end()
    assert (code, stderr) == (0, "")
    assert [line.split()[1] for line in stdout.splitlines() if line.startswith("step ")] == [
        f"{n}/6" for n in range(1, 7)
    ]
    assert sum(line.startswith("finished") for line in stdout.splitlines()) == 1
    assert metrics(tmp_path / "run", "start")[0]["world_size"] == 2
    assert len(list((tmp_path / "run" / "log").iterdir())) == 2
    of_ranks = [set(path.read_text().splitlines()) for path in tmp_path.glob("*.modules")]
    assert [_NOT_IMPORTED & each for each in of_ranks] == [set()] * 3, "two ranks and what forked them"


def test_slurm_dry_run_without_launch_slurm_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from serried.program import main

    for words in ([], ["-m", "trainer.seed=1,2"], ["-m", "trainer.seed=1,2", "launch=local"]):
        assert main([*words, "slurm.dry_run=true", f"run.dir={tmp_path}"]) == 78
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("error: slurm.dry_run=true prints the script that launch=slurm would submit")
        assert len(said.err.splitlines()) == 1


def lose(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``library`` not be installed."""
    monkeypatch.setattr(
        "serried.configs.requirements.find_spec", lambda name: None if name == library else find_spec(name)
    )


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("datasets", ["data=hf", "data.path=owner/name"]),
        ("datasets", ["data.validation.web.name=hf", "data.validation.web.path=owner/name"]),
        ("tokenizers", ["data.tokenizer=train"]),
        ("huggingface_hub", ["data.tokenizer=owner/name"]),
        ("wandb", ["track.wandb=offline"]),
    ],
)
@pytest.mark.parametrize("start", [["launch=local"], ["-m", "launch=local", "trainer.seed=1,2"]])
def test_missing_library_is_reported_before_any_process_starts(
    library: str,
    words: list[str],
    start: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from serried.program import main

    lose(library, monkeypatch)
    for starts in ("serried.launch.local.launcher.run_local", "serried.launch.start.run_sweep"):
        monkeypatch.setattr(starts, lambda *_: pytest.fail("it was started"))
    assert main([*start, "launch.processes=2", "launch.device=cpu", *words]) == 78
    stderr = capsys.readouterr().err
    assert len(stderr.splitlines()) == 1
    assert "not installed" in stderr
    assert "pip install -e '.[" in stderr


def test_libraries_are_installed_for_the_checkout_or_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("eval") == "pip install -e '.[eval]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("eval", "sweep") == f"pip install -e '{ROOT}[eval,sweep]'"
    installed = tmp_path / "site-packages/serried/configs/requirements.py"
    installed.parent.mkdir(parents=True)
    shutil.copy(ROOT / "configs/requirements.py", installed)
    assert runpy.run_path(str(installed))["install_command"]("eval") == "pip install 'serried[eval]'"


@pytest.mark.parametrize(
    ("library", "values"),
    [("huggingface_hub", "data.tokenizer=bytes,owner/name"), ("wandb", "track.wandb=off,offline")],
)
def test_library_missing_for_one_run_of_a_sweep_is_reported_before_the_first(
    library: str, values: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from serried.program import main

    lose(library, monkeypatch)
    monkeypatch.setattr("serried.launch.start.run_sweep", lambda *_: pytest.fail("it was started"))
    assert main(["-m", values]) == 78
    stderr = capsys.readouterr().err
    assert len(stderr.splitlines()) == 1
    assert "not installed" in stderr


def test_library_missing_here_is_accepted_for_a_job_with_another_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from serried.program import main

    monkeypatch.setattr("serried.configs.requirements.find_spec", lambda _: None)
    words = ["launch=slurm", "slurm.dry_run=true", "data.tokenizer=owner/name", f"run.dir={tmp_path}"]
    assert main(words) == 78
    assert main([*words, "slurm.python=/opt/python"]) == 0
    assert "#SBATCH" in capsys.readouterr().out


@pytest.mark.slow
def test_mistake_found_by_the_ranks_is_one_line(text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "checkpoint.resume=must")
    done = typed("train.py", "launch=local", "launch.processes=2", *argv)
    assert (done.returncode, [line for line in done.stdout.splitlines() if not line.startswith("waiting")]) == (78, [])
    assert done.stderr.startswith("error: checkpoint.resume=must but ")
    assert len(done.stderr.splitlines()) == 1


def launched(tmp_path: Path, load: str, rank: str) -> subprocess.CompletedProcess[str]:
    """Two ranks that do ``rank`` instead of training, after ``load`` in their launcher."""
    words = [*tiny_overrides(tmp_path, tmp_path / "run"), "launch=local", "launch.processes=2", "launch.device=cpu"]
    script = f"""
import os, signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as a daemon may leave it
from serried.configs.compose import compose
from serried.launch.local.launcher import run_local
from serried.records.status import Status, write_status
from serried.runtime.exit import say_why
from serried.runtime.process import tell_launcher

def load():
    {load}

code = run_local(compose({words}), [], load)
rank = os.environ.get("RANK")
if code is None:
    {rank}
    tell_launcher(ended=True)
sys.stdout.flush()
os._exit(code)
"""
    return typed("-c", script)


_WITH_A_THREAD = """
import runpy, sys, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""
"""A launcher with two threads does not fork."""


def interpreters(start: str, text: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """A run of two ranks that are interpreters, each of which does ``start`` when its Python starts."""
    (tmp_path / "sitecustomize.py").write_text(start)
    argv = ["launch=local", "launch.processes=2", *tiny_overrides(text, tmp_path / "run")]
    return typed("-c", _WITH_A_THREAD, *argv, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"})


def test_ranks_interrupted_while_python_starts_are_stopped_not_failed(text: Path, tmp_path: Path) -> None:
    done = interpreters(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "    time.sleep(2)\n",
        text, tmp_path,
    )  # fmt: skip
    assert done.returncode == 75, done.stderr
    assert "stopped" in done.stdout + done.stderr
    assert "failed" not in done.stderr


@pytest.mark.slow
def test_launcher_with_threads_starts_interpreters_that_train(text: Path, tmp_path: Path) -> None:
    done = interpreters("", text, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert metrics(tmp_path / "run", "start")[0]["world_size"] == 2


def test_refused_command_does_not_return_the_exit_code_of_an_existing_run() -> None:
    written_by_another = Status("finished", 9, exit_code=0)
    assert _exit_code({EXIT_MISTAKE}, written_by_another, was_asked_to_stop=False) == EXIT_MISTAKE


def test_forked_ranks_have_their_environment_group_log_and_exit_code(tmp_path: Path) -> None:
    done = launched(
        tmp_path,
        "print('loaded')",
        "given = [os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GLOO_SOCKET_IFNAME')]\n"
        "    print(*given, os.getpgid(0) == os.getpid(), os.environ['SERRIED_LAUNCHER'] == str(os.getppid()))\n"
        "    print('failed: rank', rank, file=sys.stderr)\n"
        "    code = 70 * (rank == '1')",
    )
    assert done.stdout == "loaded\n0 0 2 lo True True\n"
    assert (done.returncode, done.stderr) == (70, "failed: rank 0\nfailed: rank 1\n")
    (log,) = (tmp_path / "run" / "output").glob("*/rank-1.log")
    assert log.read_text() == "1 1 2 lo True True\nfailed: rank 1\n"
    assert log.parent.stat().st_mode == log.parent.parent.stat().st_mode, "open to the group, as the umask says"


def test_environment_in_a_folder_with_a_space_can_fork(tmp_path: Path) -> None:
    library = next((Path(numpy.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas*"))
    copy = tmp_path / "a b" / library.name
    copy.parent.mkdir()
    shutil.copyfile(library, copy)
    done = launched(tmp_path, f"import ctypes; ctypes.CDLL({str(copy)!r})", "print('trained'); code = 0")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "trained\n")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signal_while_the_launcher_imports_ends_it_in_one_line(name: str, tmp_path: Path) -> None:
    done = launched(tmp_path, f"os.kill(os.getpid(), signal.{name}); time.sleep(60)", "code = 1")
    said = f"stopped: {name} before training began; run the same command to start it\n"
    assert (done.returncode, done.stdout, done.stderr) == (75, "", said)


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (["launch=local", "launch.processes=2"], "before training began; run the same command to start it"),
        pytest.param([], "while the processes were joining; run the same command to resume", marks=pytest.mark.slow),
    ],
)
def test_signal_while_torch_is_imported_is_not_lost(launch: list[str], said: str, text: Path, tmp_path: Path) -> None:
    """torch catches any exception in its import of numpy, and computes without it."""
    script = f"""
import os, signal, sys
from serried.program import main

class Strike:
    def find_spec(name, path=None, target=None):
        if name == "numpy" and "torch" in sys.modules:
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Strike)
os._exit(main({[*tiny_overrides(text, tmp_path / "run"), "launch.device=cpu", *launch]}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (75, "", f"stopped: SIGTERM {said}\n")


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])
def test_signal_between_two_forks_reaches_every_rank(name: str, tmp_path: Path) -> None:
    strike = f"os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.{name}))"
    done = launched(tmp_path, strike, "time.sleep(60)")
    assert done.stdout == "stopped    before training began; run the same command to start it\n"
    assert (done.returncode, done.stderr) == (75, "")


def test_killed_rank_of_a_launcher_is_named(tmp_path: Path) -> None:
    done = launched(tmp_path, "pass", "os.kill(os.getpid(), signal.SIGKILL * (rank == '1')); time.sleep(60)")
    assert done.returncode == 70
    assert done.stderr.startswith("failed: rank 1 was killed by SIGKILL")


def test_rank_that_ends_with_0_before_the_run_does_is_named(tmp_path: Path) -> None:
    done = launched(tmp_path, "pass", "rank == '1' and os._exit(0); time.sleep(60)")
    reason = "rank 1 ended with exit code 0 before the run finished: code in it called os._exit() or exit()"
    assert (done.returncode, done.stderr) == (70, f"failed: {reason}\n")


def test_ranks_that_all_end_with_0_before_the_run_does_have_failed(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    rank = f"rank == '0' and write_status(__import__('pathlib').Path({run_dir!r}), Status('running', 3)); os._exit(0)"
    done = launched(tmp_path, "pass", rank)
    assert done.returncode == 70
    assert done.stderr.startswith("failed: rank")
    assert "ended with exit code 0 before the run finished" in done.stderr
    ended = status(tmp_path / "run")
    assert (ended["state"], ended["step"], ended["exit_code"]) == ("failed", 3, 70)
    assert ended["reason"] in done.stderr


def test_error_of_another_rank_that_the_disk_does_not_take_is_printed(tmp_path: Path) -> None:
    done = launched(
        tmp_path, "pass",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "    time.sleep(60 * (rank == '0'))\n"
        "    say_why('failed: the disk is full')\n"
        "    code = 70",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (70, "failed: the disk is full\n")


@pytest.mark.slow
def test_traceback_of_another_rank_is_printed_last(text: Path, tmp_path: Path) -> None:
    done = interpreters(
        "import os\n"
        "from serried.trainer.step import TrainStep\n"
        "do = TrainStep.__call__\n"
        "def fail(self, *arguments):\n"
        "    if os.environ['RANK'] == '1': raise ZeroDivisionError('here')\n"
        "    return do(self, *arguments)\n"
        "TrainStep.__call__ = fail\n",
        text, tmp_path,
    )  # fmt: skip
    assert done.returncode == 70
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert done.stderr.endswith("ZeroDivisionError: here\n")
    assert status(tmp_path / "run")["reason"] == "ZeroDivisionError: here"


@pytest.mark.slow
def test_signal_to_the_launcher_ends_in_a_checkpoint(started: Local, tmp_path: Path) -> None:
    started.process.send_signal(signal.SIGUSR1)
    code, stdout, _ = started.end()
    assert code == 75
    assert "stopping   SIGUSR1 on all ranks" in stdout
    ended = status(tmp_path / "run")
    assert (ended["state"], ended["exit_code"]) == ("stopped", 75)
    assert (tmp_path / "run" / "checkpoints" / f"step-{ended['step']:08}").is_dir()


@pytest.mark.slow
def test_killed_rank_is_named_and_the_others_end(started: Local, tmp_path: Path) -> None:
    os.kill(started.ranks()[1], signal.SIGKILL)
    code, _, stderr = started.end()
    assert code == 70
    assert stderr.splitlines()[-1].startswith("failed: rank 1 was killed by SIGKILL")
    assert "Traceback" not in stderr, "of a rank that lost its connection"
    assert str(status(tmp_path / "run")["reason"]).startswith("rank 1 was killed by SIGKILL")


@pytest.mark.slow
def test_killed_launcher_leaves_no_rank(started: Local, tmp_path: Path) -> None:
    ranks = started.ranks()
    started.process.kill()
    wait_for(lambda: not any(is_alive(pid) for pid in ranks), "the ranks to end")
    assert status(tmp_path / "run")["state"] == "stopped"


# Slurm, as far as it can be told without one


def points(*words: str) -> str:
    sweep = read_sweep(["launch=slurm", *words])
    return script({point.argv: point.config for point in sweep.points})


def test_script_is_the_one_for_use_by_hand_with_other_settings() -> None:
    by_hand = (ROOT / "slurm" / "train.sbatch").read_text()
    words = ("slurm.gpus_per_node=4", "trainer.global_batch=64", "slurm.partition=gpu", "slurm.dry_run=true")
    text = points("optim.lr=1e-3,3e-3", *words)
    mark = "# ---- From here on every script is the same. ----"
    assert text.partition(mark)[2] == by_hand.partition(mark)[2]
    assert by_hand.partition(mark)[2]
    lines = text.splitlines()
    assert {
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --partition=gpu",
        "#SBATCH --array=0-1",
        "processes=4",
        "bucket=''",
    } <= set(lines)
    assert [line for line in lines if "run_dir=" in line and "tiny-lr-0.003" in line]
    assert "dry_run" not in text, "it would only print itself"
    for shell in (text, by_hand):
        subprocess.run(["bash", "-n"], input=shell, text=True, check=True)


def test_script_of_a_run_that_continues_after_losses_has_a_step_for_each_node() -> None:
    words = ["parallel=ddp", "launch.nodes=2", "launch.device=cpu", "optim.lr=1e-3,3e-3"]
    text = points(*words, "recover.mode=memory").splitlines()
    assert {"recover=true", "#SBATCH --no-kill"} <= set(text)
    text = points(*words).splitlines()
    assert {"recover=false", "#SBATCH --no-kill"} & set(text) == {"recover=false"}


_IN_TWO_STAGES = "parallel.pipeline=2 parallel.sync_every_micro_batch=false"


@pytest.mark.parametrize(
    ("more", "seconds"),
    [
        ("slurm.gpu_type=h100", 120),  # 3 x 1.4 s, for a micro-batch, compiled, + 60 s for 96 GB at 0.2 GB/s a rank
        ("slurm.gpu_type=h100 trainer.micro_batch=16", 125),  # 3 x 22 s, compiled, + 60 s
        (f"slurm.gpu_type=h100 {_IN_TWO_STAGES}", 342),  # 3 x 94 s, for a step, + 60 s
        (f"slurm.gpu_type=h100 {_IN_TWO_STAGES} slurm.time_minutes=10", 300),
        ("slurm.gpu_type=v100", 120),
        ("slurm.gpu_type=h100 slurm.signal_seconds=200", 200),
        ("slurm.gpu_type=h100 slurm.time_minutes=2 model=tiny data.tokenizer=bytes", 60),
    ],
)
def test_slurm_asks_a_run_to_stop_as_early_as_its_plan_says(
    more: str, seconds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch=slurm", "recipe=llama8b", "launch.nodes=1", "slurm.gpus_per_node=8", f"run.dir={tmp_path}"]
    assert train([*words, *more.split(), "slurm.dry_run=true"]) == 0
    assert f"#SBATCH --signal=USR1@{seconds}\n" in capsys.readouterr().out


def test_type_of_gpus_and_further_options_are_in_the_script() -> None:
    more = "slurm.options=\"--mail-user=me@example.org --comment='two words' --exclusive --gres=lscratch:9\""
    lines = points("slurm.gpus_per_node=4", "slurm.gpu_type=a100", more, "optim.lr=1e-3,3e-3").splitlines()
    assert [line for line in lines if line.startswith("#SBATCH --gpus")] == ["#SBATCH --gpus-per-node=a100:4"]
    own = [
        "#SBATCH --mail-user=me@example.org",
        "#SBATCH --comment='two words'",
        "#SBATCH --exclusive",
        "#SBATCH --gres=lscratch:9",
    ]
    assert [line for line in lines if line in own] == own


def test_options_of_srun_are_quoted_and_reach_the_ranks_and_the_look_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun is a script here that prints its arguments, and Python is false: no rank starts."""
    given = "--container-image='/images/a b.sqsh' --container-mounts=/data;reboot"
    monkeypatch.chdir(tmp_path)
    text = points(f'slurm.srun_options="{given}"', "slurm.python=/bin/false", "optim.lr=1e-3,3e-3")
    assert "srun_options=('--container-image=/images/a b.sqsh' '--container-mounts=/data;reboot')" in text.splitlines()
    commands = {
        "srun": f'printf "<%s>" "$@" | tr "\\n" " " >>{tmp_path}/seen; echo >>{tmp_path}/seen',
        "scontrol": "echo NodeName=n0 NodeAddr=n0 State=IDLE",
        "squeue": "echo 2030-01-01T00:00:00",
    }
    for name, does in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "0",
    }
    subprocess.run(["bash"], input=text, text=True, env=environment, capture_output=True, timeout=60, check=False)
    ranks, look = (tmp_path / "seen").read_text().splitlines()
    own = "<--container-image=/images/a b.sqsh><--container-mounts=/data;reboot>"
    assert f"{own}<bash><-c>" in ranks
    assert look.startswith("<--nodes=1><--ntasks=1><--nodelist=")
    assert f"{own}</bin/false><-m><serried.launch.slurm.requeue>" in look


def test_preflight_in_a_job_prints_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch=slurm", "launch.nodes=4", "slurm.gpus_per_node=8", "slurm.time_minutes=2000", "run.name=big"]
    assert slurm_jobs.preflight([*words, "slurm.dry_run=true"]) == 0
    text = capsys.readouterr().out
    lines = set(text.splitlines())
    assert {"#SBATCH --nodes=4", "#SBATCH --time=10", "#SBATCH --no-requeue", "program=(-m serried)"} <= lines
    assert f"arguments=(preflight {' '.join(words)})" in lines
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_slurm_without_a_configuration_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        "#!/bin/sh\nfor line in 'error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host' "
        "'fatal: Could not establish a configuration source'; do echo \"sbatch: $line\" >&2; done\nexit 1\n"
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert cli.main(["submit", f"run.dir={tmp_path / 'run'}"]) == 78
    told = capsys.readouterr().err
    assert told.startswith("error: Slurm is installed on this machine but not configured: ")
    assert "res_nsearch" not in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("sweep", [[], ["-m", "trainer.seed=1,2"]])
def test_line_break_in_a_folder_is_no_line_of_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sweep: list[str]
) -> None:
    folder = f"{tmp_path}/run\ntouch {tmp_path}/hacked\n#"
    assert train([*sweep, "launch=slurm", "launch.device=cpu", "slurm.dry_run=true", f"run.dir={folder}"]) == 78
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: run.dir: ")
    assert "contains a line break" in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize("sweep", [[], ["-m", "trainer.seed=1,2"]])
def test_job_that_slurm_refuses_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sweep: list[str]
) -> None:
    (tmp_path / "bin").mkdir()
    for name, body in {"sbatch": "echo 'sbatch: error: invalid partition' >&2; exit 1", "squeue": "exit 0"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    assert train([*sweep, "launch=slurm", "launch.device=cpu", f"run.dir={tmp_path / 'a/b/run'}"]) == 78
    told = "error: Slurm refused the job: invalid partition; to print the script: slurm.dry_run=true\n"
    assert capsys.readouterr().err == told
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def end_a_start(run_dir: Path, job: str = "1", saved: int | None = None, **status: object) -> tuple[int, str]:
    """A start of a job that ends with ``status``, and has saved after step ``saved``."""
    (run_dir / "slurm").mkdir(parents=True, exist_ok=True)
    start = run_dir / "slurm" / f"{job}.start"
    start.touch()
    if saved is not None:
        (run_dir / "checkpoints" / f"step-{saved:08}").mkdir(parents=True)
    if status:
        (run_dir / "status.json").write_text(json.dumps({"reason": None, "exit_code": None} | status))
    else:
        os.utime(start, (start.stat().st_atime, start.stat().st_mtime + 1))
    return verdict(run_dir, start)


def test_stopped_and_killed_runs_are_queued_again(tmp_path: Path) -> None:
    assert end_a_start(tmp_path, saved=5, state="stopped", step=5, reason="SIGUSR1 on all ranks")[0] == 75
    (tmp_path / "slurm" / "1.stopped").touch()
    assert end_a_start(tmp_path)[0] == 75, "a signal while the processes were joining"
    (tmp_path / "slurm" / "1.stopped").unlink()
    assert end_a_start(tmp_path)[0] == 70, "the status is that of the start before"
    assert end_a_start(tmp_path, saved=6, state="running", step=7)[0] == 75, "killed: it goes on from its checkpoint"
    code, line = end_a_start(tmp_path, state="running", step=7)
    assert code == 70
    assert "crash loop: two starts in a row ended at step 7" in line
    assert "time_minutes" not in line, "nobody knows that it was for want of time"
    assert end_a_start(tmp_path, state="failed", step=9, exit_code=70)[0] == 70
    assert end_a_start(tmp_path, state="finished", step=9, exit_code=0)[0] == 0


def test_same_hang_twice_is_a_crash_loop_but_two_preemptions_are_not(tmp_path: Path) -> None:
    assert end_a_start(tmp_path, state="stopped", step=8, reason="rank 5 hangs in data.next for 61 s")[0] == 75
    assert end_a_start(tmp_path, state="stopped", step=8, reason="rank 3 hangs in data.next for 60 s")[0] == 70
    for _ in range(3):
        assert end_a_start(tmp_path, state="stopped", step=8, reason="SIGTERM on all ranks")[0] == 75
    (tmp_path / "slurm" / "1.stopped").write_text("SIGTERM\n")
    for _ in range(3):
        assert end_a_start(tmp_path)[0] == 75, "before training began, too"
    (tmp_path / "slurm" / "1.failed").touch()
    assert end_a_start(tmp_path)[0] == 70, "one node failed, and Slurm ended the other"


def test_two_starts_without_a_checkpoint_are_a_crash_loop(tmp_path: Path) -> None:
    """Whatever ends them, and wherever: a limit too short for a step would be queued again for ever."""
    assert end_a_start(tmp_path, saved=100, state="stopped", step=130, reason="rank 1 in data.next")[0] == 75
    assert end_a_start(tmp_path, state="running", step=150)[0] == 75
    assert end_a_start(tmp_path, state="stopped", step=99, reason="SIGTERM on all ranks")[0] == 75
    code, line = end_a_start(tmp_path, state="stopped", step=140, reason="SIGUSR1 on rank 0")
    assert code == 70
    assert "two starts in a row saved no checkpoint, and the last one ended at step 140 (SIGUSR1 on rank 0)" in line
    assert "raise slurm.time_minutes" in line
    assert end_a_start(tmp_path, "2", state="running", step=150)[0] == 75, "who submits again has mended something"
    (tmp_path / "slurm" / "2.stopped").touch()
    assert end_a_start(tmp_path, "2")[0] == 70, "the limit ends it while the processes join"


@pytest.mark.parametrize("reason", ["control: stop", "trainer.stop_at=5"])
def test_run_stopped_by_its_user_is_not_queued_again(reason: str, tmp_path: Path) -> None:
    code, line = end_a_start(tmp_path, saved=5, state="stopped", step=5, reason=reason, exit_code=75)
    assert code == 0
    assert "Not started again; run the same command to resume" in line


def test_jobs_are_found_by_their_run(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    note_job(tmp_path, "17", 3)

    def job(name: str) -> Job:
        return Job(name, "PENDING", "0:00", "1:00", "(Resources)", "gpu")

    queued = [job("17_3"), job("17_1"), job("17"), job("18")]
    assert [found.name for found in jobs_of(tmp_path, queued)] == ["17_3"]
