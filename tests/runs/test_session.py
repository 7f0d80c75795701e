"""Joining, sharing verdicts, patience, and leaving."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import serried
from serried.configs.compose import compose
from serried.configs.errors import StopRequested, UserError
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.launch.local.processes import PASSED_ON
from serried.program import main
from serried.runtime.exit import Cause, is_consequence, note_repeated
from serried.runtime.process import (
    check_surroundings,
    planned_processes,
    sleep_while_waiting,
    speaks,
    threads_per_process,
    torchrun_says,
    usable_cores,
)
from serried.runtime.rendezvous import Exchange, address_towards, describe_interface, interface_of
from serried.runtime.session import keep_report_of_hang, open_session, run_in_session
from serried.runtime.signals import Signals
from testing.forked_runs import typed
from testing.rank_pool import ROOT, Cluster
from tests.support.own_task import Points
from tests.support.slurm import wait_for


def share_verdicts() -> list[object]:
    with open_session(LaunchSection()) as session:
        ran = []
        value = session.once(lambda: ran.append(session.rank) or {"from": session.rank})
        node = session.once_per_node(lambda: session.rank * 10)
        try:
            session.once(_mistake)
        except UserError as error:
            caught = str(error)
        again = session.once(lambda: "still in step")
        total = torch.ones(1)
        dist.all_reduce(total)
        return [ran, value, node, caught, again, total.item(), torch.get_num_threads()]


def _mistake() -> None:
    raise UserError("no such file")


def test_limit_on_open_files_is_raised_to_what_is_allowed() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))\n"
        "from serried.runtime.process import allow_open_files; allow_open_files()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    ended = typed("-c", script)
    assert ended.stdout == "(512, 512)\n", ended.stderr


def test_results_of_one_rank_reach_all(cluster: Cluster) -> None:
    answers = [answer.value for answer in cluster.run(3, "tests.runs.test_session:share_verdicts")]
    threads = max(1, usable_cores() // 3)
    assert answers[0] == [[0], {"from": 0}, 0, "no such file", "still in step", 3.0, threads]
    assert answers[1] == answers[2] == [[], *answers[0][1:]]


def crash_on_main() -> str:
    with open_session(LaunchSection()) as session:
        try:
            session.once(lambda: 1 // 0)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_crash_of_the_deciding_rank_reaches_waiting_ranks(cluster: Cluster) -> None:
    first, second = (answer.value for answer in cluster.run(2, "tests.runs.test_session:crash_on_main"))
    assert first == "ZeroDivisionError: integer division or modulo by zero"
    assert "ZeroDivisionError" in second


def differ() -> str:
    with open_session(LaunchSection()) as session:
        session.same_everywhere("the recipe", "same")
        try:
            session.same_everywhere("the data", f"a: 0\nb: {1 if session.rank < 2 else 2}")
        except UserError as error:
            return str(error)
    return "nothing"


def test_ranks_that_differ_are_named(cluster: Cluster) -> None:
    for answer in cluster.run(3, "tests.runs.test_session:differ"):
        assert answer.value.startswith("the data differs between rank 0 (b: 1) and rank 2 (b: 2); start all ranks with")


def wait_for_a_silent_peer(ended: str) -> float:
    with open_session(LaunchSection(start_timeout_seconds=100, step_timeout_seconds=2)) as session:
        dist.all_reduce(torch.ones(1))
        with warnings.catch_warnings(action="error"):
            session.first_step_done()
        if session.rank == 1:
            wait_for(Path(ended).exists, "the other to lose its patience")
            return 0.0
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(torch.ones(1))
        Path(ended).touch()
        return time.monotonic() - started


def test_patience_is_short_after_the_first_step(cluster: Cluster, tmp_path: Path) -> None:
    """Guards the private names in Session.first_step_done: without them the wait would be 100 seconds."""
    answers = cluster.run(2, "tests.runs.test_session:wait_for_a_silent_peer", ended=str(tmp_path / "ended"))
    assert answers[0].value < 60  # 2 s, and 5 more for the watchdog to name who it is, on an idle machine


def form_after_an_attempt_that_failed_on_one_rank() -> list[float]:
    """Return the number of the next group before, and a sum over a group after."""
    with open_session(LaunchSection(start_timeout_seconds=30)) as session:
        dist.destroy_process_group()
        if session.rank == 0:
            with pytest.raises(RuntimeError):  # the other rank does not come
                dist.init_process_group(
                    "gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(milliseconds=100)
                )
        number = dist.distributed_c10d._world.group_count
        session.form_again([0, 1], [0, 0], 1, lambda _: None)
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group([0, 1]))
        return [number, total.item()]


def test_ranks_form_groups_after_an_attempt_that_failed_on_one_of_them(cluster: Cluster) -> None:
    """Guards the private name in Session.form_again: names of groups have that number, which would differ."""
    answers = cluster.run(2, "tests.runs.test_session:form_after_an_attempt_that_failed_on_one_rank")
    assert [answer.value for answer in answers] == [[1, 2.0], [0, 2.0]]


def test_session_without_torchrun_is_one_process() -> None:
    with open_session(LaunchSection()) as session:
        assert (session.rank, session.world_size, session.is_main) == (0, 1, True)
        assert session.once(lambda: 5) == session.once_per_node(lambda: 5) == 5
        session.same_everywhere("anything", "at all")
        assert session.cause.of(StopRequested("SIGTERM")) == (0, "SIGTERM before the first step", 75)
        session.first_step_done()
        assert session.cause.of(StopRequested("SIGTERM")) == (0, "SIGTERM", 75)
        assert session.cause.first(ValueError("here")) == (0, "ValueError: here", 70)
        assert not dist.is_initialized()


def test_missing_gpu_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match=r"launch\.device=cpu"), open_session(LaunchSection(device="cuda")):
        pass


@pytest.mark.parametrize("started", [1, 2])
def test_different_number_of_processes_than_started_is_refused(started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": started, "LOCAL_WORLD_SIZE": started}
    for name, value in {**torchrun, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(
        UserError, match=rf"launch.processes=8 but {started} .*torchrun --standalone --nproc_per_node=8"
    ):
        planned_processes(LaunchSection(processes=8), dry_run=False)
    assert planned_processes(LaunchSection(processes=started), dry_run=False) == started


def test_a_dry_run_plans_for_any_number_of_processes() -> None:
    assert planned_processes(LaunchSection(processes=8, nodes=4), dry_run=True) == 32


def test_a_second_signal_does_not_break_the_clean_up() -> None:
    """torchrun asks twice: a worker in its foreground gets the terminal's Ctrl-C and then SIGTERM."""
    code = (
        "import os, signal, time\n"
        "from serried.configs.schema.sections import LaunchSection\n"
        "from serried.runtime.exit import leave\nfrom serried.runtime.session import run_in_session\n"
        "def work(session):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(10)\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(0.2)\n"
        "        print('cleaned up', flush=True)\n"
        "leave(run_in_session(LaunchSection(), work))\n"
    )
    done = typed("-c", code)
    told = "stopped: SIGINT before the first step; run the same command to resume\n"
    assert (done.returncode, done.stdout, done.stderr) == (75, "cleaned up\n", told)


def test_a_signal_after_an_error_does_not_hide_it() -> None:
    """torchrun sends one to all as soon as one has failed."""
    code = (
        "import os, signal, time\n"
        "from serried.configs.schema.sections import LaunchSection\n"
        "from serried.runtime.exit import leave\nfrom serried.runtime.session import run_in_session\n"
        "from serried.runtime.exit import Cause\n"
        "first = Cause.first\n"
        "def signalled(self, error):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.2)\n"
        "    return first(self, error)\n"
        "Cause.first = signalled\n"
        "leave(run_in_session(LaunchSection(), lambda session: 1 // 0))\n"
    )
    done = typed("-c", code)
    assert done.returncode == 70
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("ZeroDivisionError: integer division or modulo by zero\n")


def test_node_with_a_mistake_reports_it_without_rank_0() -> None:
    """Rank 0, on another machine, may be fine: it would wait, and nobody would say why."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    started = {
        "RANK": "8", "LOCAL_RANK": "0", "GROUP_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    done = typed("train.py", "launch.device=cuda", "trainer.global_batch=128", env=os.environ | started)
    assert done.returncode == 78
    assert done.stderr.startswith("error: launch.device=cuda")
    assert len(done.stderr.splitlines()) == 1


def fail_in_turn() -> list[object]:
    with open_session(LaunchSection()) as session:
        if session.rank == 1:
            found = session.cause.first(UserError("mine"))
            session.gather("the failure is known")
        else:
            session.gather("the failure is known")
            found = session.cause.first(RuntimeError("echo\nof it"))
        return list(found)


def test_all_ranks_know_who_failed_first_and_why(cluster: Cluster) -> None:
    assert [answer.value for answer in cluster.run(3, "tests.runs.test_session:fail_in_turn")] == [[1, "mine", 78]] * 3


# surroundings ---------------------------------------------------------------------------------------------------------

_ONE_OF_TWO = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, r"RANK=1, .* contradict each other"),
        ({"LOCAL_WORLD_SIZE": "0"}, r"LOCAL_WORLD_SIZE=0 contradict"),
        ({"WORLD_SIZE": "0"}, "contradict|is set but not"),
        ({**_ONE_OF_TWO, "RANK": "2"}, "RANK=2, .* contradict"),
        ({**_ONE_OF_TWO, "MASTER_PORT": "x"}, "MASTER_PORT=x: must be a whole number"),
        ({**_ONE_OF_TWO, "RANK": "9" * 5000}, "must be a whole number"),
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE=2 is set but not RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
        ),
        (
            {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
            "is set but not MASTER_ADDR, MASTER_PORT",
        ),
        ({"RANK": "first"}, "RANK=first: must be a whole number"),
    ],
)
def test_invalid_torchrun_variables_are_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in _ONE_OF_TWO:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        torchrun_says()


def test_single_process_prints_despite_a_leftover_rank_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert speaks()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert speaks(), "nothing that starts ranks leaves out the port"
    for name, value in _ONE_OF_TWO.items():
        monkeypatch.setenv(name, value if name != "RANK" else "1")
    assert not speaks()


def test_a_first_interrupt_in_a_long_step_is_acknowledged_while_it_runs() -> None:
    is_heard = threading.Event()
    with Signals() as signals:
        signals.hold()
        signals.acknowledge = is_heard.set
        os.kill(os.getpid(), signal.SIGINT)
        assert is_heard.wait(20)
        assert signals.received == "SIGINT"


def test_note_has_no_terminal_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    note_repeated(["data.path=a", "data.path=b\x1b[31m"])
    assert (
        capsys.readouterr().err == "note: data.path is given 2 times; the last value is used: data.path=b\ufffd[31m\n"
    )


@pytest.mark.parametrize(
    ("threads", "environment", "expected"),
    [
        (3, {"OMP_NUM_THREADS": "5"}, 3),
        (None, {"OMP_NUM_THREADS": "5"}, 5),
        (None, {"OMP_NUM_THREADS": "1"}, 1),
        (None, {"OMP_NUM_THREADS": "4,2"}, 4),
        (None, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a"}, None),
        (None, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a", "SERRIED_LAUNCHER": "7"}, 1),
        (None, {"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "a"}, 2),
        (None, {"OMP_NUM_THREADS": "many"}, None),
        (None, {}, None),
    ],
)
def test_threads_are_the_users_choice_or_a_share_of_the_cores(
    threads: int | None, environment: dict[str, str], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "SERRIED_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    share = max(1, usable_cores() // 2)
    assert threads_per_process(LaunchSection(threads=threads), 2) == (expected or share)


@pytest.mark.parametrize(
    ("load", "given", "found"),
    [
        (0.1, {}, None),
        (1000.0, {}, "1000"),
        (1000.0, {"GOMP_SPINCOUNT": "7"}, "7"),
        (1000.0, {"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_threads_sleep_while_they_wait_on_a_busy_machine(
    load: float, given: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    sleep_while_waiting(load)
    assert os.environ.get("GOMP_SPINCOUNT") == found


def test_system_without_a_load_average_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown() -> None:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", unknown)
    assert main(["--help"]) == 0
    capsys.readouterr()


def test_removed_current_folder_and_undecodable_arguments_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    check_surroundings(["run.name=größe"])
    with pytest.raises(UserError, match="not UTF-8"):
        check_surroundings(["prompt=\udcff"])
    folder.rmdir()
    with pytest.raises(UserError, match="current folder was removed"):
        check_surroundings([])


def test_too_few_open_files_are_refused_at_once() -> None:
    words = ["-m", "serried", "status"]
    few = ["bash", "-c", 'ulimit -n 12; exec "$0" "$@"', sys.executable, *words]
    done = subprocess.run(few, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    said = "error: ulimit -n 12 allows too few open files; use ulimit -n 1024\n"
    assert (done.returncode, done.stderr) == (78, said)


def test_no_folder_for_temporary_files_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    told = "error: found no writable folder for temporary files; set the environment variable TMPDIR=FOLDER"
    for word in ("launch=torchrun", "launch=local", "dry_run=true"):
        assert main([f"run.dir={tmp_path / 'run'}", word]) == 78
        assert capsys.readouterr().err.startswith(told)
    with pytest.raises(UserError, match="environment variable TMPDIR=FOLDER"):
        serried.fit(Points, [f"run.dir={tmp_path / 'run'}"])
    assert main(["--help"]) == 0, "which imports no torch"


def test_network_interface_that_does_not_exist_is_refused_before_a_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**_ONE_OF_TWO, "GLOO_SOCKET_IFNAME": "lo,nope0"}.items():
        monkeypatch.setenv(name, value)
    told = r"^GLOO_SOCKET_IFNAME=lo,nope0: .* has no network interface nope0, only .*lo.*; unset GLOO_SOCKET"
    with pytest.raises(UserError, match=told), open_session(LaunchSection(device="cpu")):
        pass


def test_interface_with_an_address_is_found_and_its_speed_is_named_where_it_has_one(tmp_path: Path) -> None:
    own = address_towards("127.0.0.1", 1)
    assert own == "127.0.0.1"
    assert interface_of(own) == "lo"
    assert interface_of("203.0.113.9") is None, "of a block for documentation"
    assert interface_of("2001:db8::1") is None
    for name, speed in {"eth0": "10000", "eth1": "100", "ib0": "-1", "eth2": "2500"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(f"{speed}\n")
    told = [describe_interface(name, tmp_path) for name in ("eth0", "eth0:1", "eth1", "ib0", "eth2", "tun0")]
    assert told == ["eth0 (10 Gb/s)", "eth0:1 (10 Gb/s)", "eth1 (100 Mb/s)", "ib0", "eth2 (2.5 Gb/s)", "tun0"]


def test_too_little_address_space_to_import_torch_is_one_line() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (600 << 20,) * 2)"
    asked = f"{limit}; from serried.program import main; raise SystemExit(main(__import__('sys').argv[1:]))"
    done = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr == "error: ulimit -v 614400 is too little to import torch; use ulimit -v unlimited\n"


def test_error_is_one_line_without_terminal_control_characters() -> None:
    assert str(UserError("data.path=a\x1b[31mb\nc is not a file")) == "data.path=a\ufffd[31mb c is not a file"
    with pytest.raises(UserError, match="must not contain slashes, spaces or control characters"):
        compose(["run.name=a\x1b[31mb"])
    assert str(UserError("a\r\nb", "c")) == "2 mistakes:\n  a\ufffd b\n  c"


def test_output_that_the_terminal_cannot_encode_ends_nothing(tmp_path: Path) -> None:
    """Under latin-1, and into a closed stream."""
    script = (
        "import sys; from pathlib import Path\n"
        "from serried.runtime.import_signals import print_any_text\n"
        "from serried.runtime.console import Console\n"
        "from serried.runtime.exit import leave\n"
        "c = Console(True, 0)\n"
        f"c.open(Path({str(tmp_path)!r}))\n"
        "c.say('lost \u4f60')\n"
        "sys.stderr = None\n"
        "print_any_text()\n"
        "c.say('loss 1.0 \u4f60 \\udcff \x1b[2J'); sys.stdout.close(); c.say('closed'); c.close(); leave(0)"
    )
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"loss 1.0 \\u4f60 \\ufffd \\ufffd[2J\n"
    assert "loss 1.0 \u4f60" in (tmp_path / "log" / "rank-0.log").read_text(encoding="utf-8")


def test_hangup_is_passed_on_unchanged() -> None:
    assert PASSED_ON[signal.SIGHUP] == signal.SIGHUP


def test_unusable_gpu_driver_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPUs are counted without it, so the first use of one is what fails."""

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020). Please update it.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    assert run_in_session(LaunchSection(), lambda _: 0) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: torch ")
    assert line.endswith("found version 12020). Please update it; use launch.device=cpu to train without them")


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_deterministic_gpu_libraries_are_set_before_processes_join(
    is_deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL reads it when it makes the group, and never again."""
    names, found = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE"), []
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in names})
    monkeypatch.setattr("serried.program.run_in_session", lambda *_: found.extend(map(os.environ.get, names)) or 0)
    assert main([f"run.dir={tmp_path}", f"trainer.deterministic={str(is_deterministic).lower()}"]) == 0
    assert found == ([":4096:8", "0"] if is_deterministic else [None, None])


@pytest.mark.parametrize(
    ("error", "reason", "exit_code"),
    [
        ("NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error", "another", 70),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", "no answer from another", 75),
        ("Application timeout caused pair closure", "no answer from another process", 75),
        ("mat1 and mat2 shapes cannot be multiplied", "RuntimeError: mat1", 70),
    ],
)
def test_errors_of_gloo_and_nccl_at_the_end_of_another_rank_are_consequences(
    error: str, reason: str, exit_code: int
) -> None:
    found = Cause(0, range(1), LaunchSection(), Signals(), Exchange(0, 1, 1)).of(RuntimeError(error))
    assert found.reason.startswith(reason)
    assert found.exit_code == exit_code, "a rank that hangs ends the run resumably, whoever notices it first"
    assert is_consequence(found.reason) == (not reason.startswith("RuntimeError"))


@pytest.mark.parametrize(("given", "kept"), [(None, "3"), ("1", "3"), ("0", "0"), ("2", "2"), ("3", "3")])
def test_torch_keeps_its_report_of_a_hang_unless_the_user_chose_otherwise(given: str | None, kept: str) -> None:
    environment = {} if given is None else {"TORCH_NCCL_ASYNC_ERROR_HANDLING": given}
    keep_report_of_hang(environment)
    assert environment == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": kept}


def test_torchrun_sets_the_value_that_is_replaced() -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python", "printenv"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_NCCL")}
    assert typed(*command, "TORCH_NCCL_ASYNC_ERROR_HANDLING", env=clean).stdout.split() == ["1"]
