"""``serried verify``: what it prints and writes, and that each check can fail."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import indent

import pytest
import torch

from serried.cli import main
from serried.configs.compose import compose
from serried.planning import planned_layout
from serried.program import main as program
from serried.task_class import declaration
from serried.trainer.callbacks import Event
from serried.verify.check import Bounds, Case, Check, Found
from serried.verify.faults import faults
from serried.verify.layouts import ALONE, layouts
from serried.verify.node import anonymous
from serried.verify.same_curve import determinism, parity, refusing_waits, resume
from serried.verify.speed import measured_run, speed
from serried.verify.started_runs import TRAINING_SCRIPT, RunFailed, Workplace, reason_of
from serried.verify.training_script import VerifiedTask
from serried.verify.verification import CHECKS, Report, Row, summary, table, verify
from testing.forked_runs import ROOT, typed_on

ON_CPU = ["launch.device=cpu", "launch.processes=2"]


@pytest.fixture(autouse=True)
def _handlers_as_they_were():
    """The command replaces handlers of signals, in a process that then ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# cheap ----------------------------------------------------------------------------------------------------------------


def test_list_prints_every_check_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "list", "launch=local", *ON_CPU]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 processes on a CPU\n")
    assert [line.partition(":")[0] for line in printed.splitlines() if re.match(r"\w+: ", line)] == [
        "preflight", "parity", "determinism", "host_waits", "resume", "faults", "speed", "memory", "checkpoint",
    ]  # fmt: skip
    assert "  ddp x2, fp32\n" in printed
    assert "skipped: only CUDA can detect it" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["only=parity,fualts"], "there is no check 'fualts'; did you mean faults?"),
        (["only=all"], "checks: preflight, parity, "),
        (["trainer.steps=3"], "trainer.steps=3 has no effect here, because serried verify trains with its own configs"),
        (["oot=x.json"], "did you mean out=x.json"),
        (["out=nowhere/x.json"], "out=nowhere/x.json is not a file in an existing folder; use out=verify.json"),
        (["out=s3://bucket/x.json"], "out=s3://bucket/x.json is an address"),
        (["folder=/proc/verify"], "cannot write folder=/proc/verify: "),
        (["script=nowhere.py"], "script=nowhere.py is not a file"),
        (["least_mfu=40"], "least_mfu=40 is not a number from 0 to 1; e.g. least_mfu=0.4"),
        (["launch=slurm"], "launch=slurm: serried verify checks only its own node"),
        (["launch.nodes=2"], "launch.nodes=2: serried verify checks only its own node"),
        (["launch.device=cuda"], "launch.device=cuda but torch finds no such device; use launch.device=cpu"),
        (["launch.device=tpu"], "launch.device=tpu (command line) is not one of auto, cpu, cuda, xpu, npu"),
        (["faults"], "'faults' is neither key=value"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", *words]) == 78
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert len(printed.splitlines()) == 1
    assert expected in printed
    assert not list(tmp_path.iterdir())


def test_processes_of_torchrun_start_nothing_but_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (variables | {"RANK": "1", "LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    assert main(["verify", "launch.device=cpu"]) == 0
    assert not list(tmp_path.iterdir())
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert main(["verify", "launch.device=cpu"]) == 78
    assert "4 processes on 2 nodes: serried verify checks one node; use --nnodes=1" in capsys.readouterr().err


def test_table_of_recorded_results_shows_each_row_with_its_figure_bound_and_log() -> None:
    rows = [
        Row("parity", "ddp x8, fp32", "passed", "loss 1.0e-07", "2e-06", {"loss": 1e-7}, 12.5, "parity-ddp.log"),
        Row("faults", "a rank is killed", "failed", "x" * 200, "70, 60 s", {}, 3.0, "faults.log", ["failed: x"]),
        Row("host_waits", "between log lines", "skipped", "only a GPU computes beside the host"),
    ]
    head, first, second, third = table(rows)
    assert re.split(r"\s{2,}", head) == ["check", "result", "figure", "bound", "log"]
    assert re.split(r"\s{2,}", first) == [
        "parity", "ddp x8, fp32", "passed", "loss 1.0e-07", "2e-06", "parity-ddp.log",
    ]  # fmt: skip
    assert re.split(r"\s{2,}", second)[2:] == ["FAILED", f"{'x' * 73}...", "70, 60 s", "faults.log"]
    assert third.split("  ")[-1] == "only a GPU computes beside the host"
    report = Report("cuda", 8, "2026-11-27T19:00:00Z", {}, rows, seconds=754.0)
    assert summary(report) == "failed     1 passed, 1 failed, 1 skipped; 12m34s"
    assert Report("cuda", 8, "", {}, rows[:1]).result == "passed"
    assert Report("cuda", 8, "", {}, rows[:1], is_interrupted=True).result == "interrupted"


def test_keys_of_the_report_are_those_of_the_documentation() -> None:
    page = (ROOT / "docs/how-to/verify.md").read_text("utf-8").partition("## The report")[2]
    report, row = page.partition("| key of a row | content |")[::2]

    def keys(table: str) -> set[str]:
        return {
            key for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", cell)
        }

    made = Report("cpu", 2, "", {}, [Row("parity", "ddp", "passed", "")]).as_data()
    assert keys(report) == {*made}
    assert keys(row) == {*made["rows"][0]}


def test_report_continues_after_failures_and_has_what_was_done_before_ctrl_c(tmp_path: Path) -> None:
    def fail() -> Found:
        raise RunFailed("a run ended with exit code 70")

    def interrupt() -> Found:
        raise KeyboardInterrupt

    works = [("right", lambda: Found(True, f"at {tmp_path}")), ("wrong", lambda: Found(False, "3", "2", {"x": 3}))]
    works += [("failing", fail), ("with a mistake", lambda: Found(True, 1 // 0)), ("stopped", interrupt)]  # type: ignore[arg-type]
    cases = [Case("absent", fail, "no GPU"), *(Case(name, work) for name, work in works), Case("later", fail)]
    said: list[str] = []
    workplace = Workplace(tmp_path / "runs", tmp_path, 2, "cpu")
    report = verify(workplace, [Check("one", "", lambda *_: cases)], Bounds(), tmp_path / "out.json", said.append)
    written = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert [row["result"] for row in written["rows"]] == ["skipped", "passed", "failed", "failed", "failed"]
    assert [row["figure"] for row in written["rows"]] == [
        "no GPU", "at FOLDER", "3", "a run ended with exit code 70",
        "ZeroDivisionError: integer division or modulo by zero",
    ]  # fmt: skip
    assert "ZeroDivisionError" in written["rows"][4]["log_tail"][-1]
    assert (written["result"], report.is_interrupted, len(said)) == ("failed", True, 5)
    assert {"serried", "torch", "python", "cores", "devices", "topology", "variables"} <= written["machine"].keys()
    assert os.uname().nodename not in json.dumps(written["machine"])


def test_text_of_the_report_names_no_host_user_address_or_folder(tmp_path: Path) -> None:
    host = os.uname().nodename
    text = f"rank 1 on {host} at 10.1.2.3: {tmp_path}/run-1 and {Path.home()}/data, torch 2.13.0"
    assert anonymous(tmp_path)(text) == "rank 1 on HOST at ADDRESS: FOLDER/run-1 and ~/data, torch 2.13.0"


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
def test_every_layout_is_a_valid_run_on_as_many_gpus(ranks: int, tmp_path: Path) -> None:
    workplace = Workplace(tmp_path, tmp_path, ranks, "cuda")
    found = [ALONE, *layouts(ranks, "cuda")]
    assert len({(layout.name, layout.precision) for layout in found}) == len(found)
    assert ranks == 1 or {"ddp", "fsdp", "tensor", "context", "pipeline", "expert"} <= {
        layout.name.split()[0] for layout in found
    }
    for layout in found:
        words = workplace.small_run(*layout.overrides(workplace.global_batch))
        processes = 1 if layout is ALONE else ranks
        config = compose([*words, f"launch.processes={processes}", "dry_run=true"])
        mesh, accumulation = planned_layout(config)
        assert (mesh.world, mesh.data_ranks, accumulation) == (processes, layout.data_ranks, layout.accumulation)


@pytest.mark.parametrize("processes", [1, 8])
def test_measured_run_is_valid_on_gpus(processes: int, tmp_path: Path) -> None:
    words = measured_run(Workplace(tmp_path, tmp_path, 8, "cuda"), processes)
    config = compose([*words, f"launch.processes={processes}", "dry_run=true"])
    assert planned_layout(config)[0].world == processes
    assert config.profile.steps is not None


def test_waiting_for_the_gpu_is_an_error_from_step_4_to_step_7(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the switch of torch that makes it one is replaced, as it needs a GPU."""
    workplace = Workplace(tmp_path, tmp_path, 2, "cpu")
    (layout,) = (layout for layout in layouts(2, "cpu") if layout.name == "ddp x2")
    more = ("trainer.log_every=1", "trainer.micro_batch=4", "launch.device=cpu")
    words = workplace.small_run(*layout.overrides(workplace.global_batch), *refusing_waits(layout), *more)
    seen: list[tuple[str, int]] = []

    class Watched(VerifiedTask):
        def on_step(self, event: Event) -> None:
            seen.append(("step", event.step))

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: seen.append((mode, 0)))
    assert program(words, declaration(Watched)) == 0
    assert [number for _, number in seen] == [1, 2, 3, 0, 4, 5, 6, 7, 0, 8, 9, 10]
    assert [mode for mode, number in seen if not number] == ["error", "default"]


def test_torch_has_the_operation_that_hangs_a_gpu() -> None:
    assert callable(torch.cuda._sleep)


# real runs ------------------------------------------------------------------------------------------------------------


def command(*words: str, where: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *words], cwd=where, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


COMPARED = {"parity": parity, "determinism": determinism, "resume": resume}
"""Checks that compare many runs."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_checks_pass_on_a_cpu_once_under_torchrun(tmp_path: Path) -> None:
    """All checks except those that compare many runs."""
    names = [check.name for check in CHECKS if check.name not in COMPARED]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    words = ("-m", "serried", "verify", f"only={','.join(names)}", "out=report.json", "launch.device=cpu")
    done = command(*torchrun, *words, where=tmp_path)
    printed, _ = done.communicate()
    written = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert done.returncode == 0, printed
    assert (written["result"], written["ranks"]) == ("passed", 2)
    assert {row["check"] for row in written["rows"]} == {*names}
    skipped = [(row["check"], row["name"]) for row in written["rows"] if row["result"] == "skipped"]
    assert skipped == [
        ("host_waits", "between log lines"), ("speed", "against one device"), ("memory", "against the plan"),
    ]  # fmt: skip
    assert printed.count(f"passed     {len(written['rows']) - len(skipped)} passed, 3 skipped") == 1
    logs = {path.name for path in (tmp_path / "verify" / "logs").iterdir()}
    assert {row["log"] for row in written["rows"] if row["result"] == "passed"} <= logs
    assert [path.name for path in (tmp_path / "verify").iterdir()] == ["logs"], "the runs are gone"


class ForkedWorkplace(Workplace):
    """Trains in forks, which have imported torch. Other tests start runs as the command does."""

    def train(
        self, *words: str, processes: int | None = None, device: str | None = None, limit_seconds: float | None = None,
        code: int = 0,
    ) -> Path:  # fmt: skip
        del limit_seconds
        words = tuple(self.small_run(*words, f"launch.device={device or self.device}"))
        folder = Path(dict(word.split("=", 1) for word in words)["run.dir"])
        return self._forked(folder, processes, str(self._script), *words, code=code)

    def program(self, *words: str, processes: int | None = None, limit_seconds: float) -> Path:
        del limit_seconds
        run = (f"run.dir={self.new_folder()}", f"launch.device={self.device}")
        return self._forked(Path(run[0][8:]), processes, "-m", "serried.program", *words, *run)

    def _forked(self, folder: Path, processes: int | None, *arguments: str, code: int = 0) -> Path:
        done = typed_on(processes or self.ranks, *arguments, cwd=self.folder)
        printed = "".join(rank.stdout + rank.stderr for rank in done)
        self.log.write_text(printed)
        if {rank.returncode for rank in done} != {code}:
            raise RunFailed(reason_of(folder, printed))
        return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_checks_that_compare_runs_pass_on_a_cpu(name: str, tmp_path: Path) -> None:
    workplace = ForkedWorkplace(tmp_path / "runs", tmp_path, 2, "cpu")
    (check,) = (check for check in CHECKS if check.name == name)
    report = verify(workplace, [check], Bounds(), tmp_path / "out.json", print)
    assert len(report.rows) == {"parity": 7, "determinism": 1, "resume": 3}[name]
    assert {row.result for row in report.rows} == {"passed"}, report.rows


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_command_prints_what_is_done_and_leaves_no_process(number: int, tmp_path: Path) -> None:
    running = command("-m", "serried", "verify", "launch=local", "only=faults", *ON_CPU, where=tmp_path)
    assert running.stdout is not None
    for line in running.stdout:
        if "passed   faults" in line:
            break
    deadline = time.monotonic() + 60
    while not any((tmp_path / "verify").glob("runs-*/run-2*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(number)
    printed, _ = running.communicate(timeout=60)
    assert running.returncode == 75, printed
    assert "interrupted 1 passed" in printed
    assert json.loads((tmp_path / "verify.json").read_text("utf-8"))["result"] == "interrupted"
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _is_readable(path)]
    assert not [words for words in commands if str(tmp_path).encode() in words]


def _is_readable(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


RANKS = """
def terms(self, output, batch):
    terms = super().terms(output, batch)
    return terms._replace(loss_sum=terms.loss_sum * (1 + 1e-4 * int(os.environ.get("WORLD_SIZE", 1))))
"""
CHANCE = """
def terms(self, output, batch):
    terms = super().terms(output, batch)
    return terms._replace(loss_sum=terms.loss_sum * (1 + 1e-6 * os.urandom(1)[0]))
"""
REPEATS = """
def dataset(self, split):
    found = super().dataset(split)
    return Repeated(found) if self.resumed() else found
"""
DEAF = """
def inputs(self, batch):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return super().inputs(batch)
"""
TAMPERS = """
def on_end(self, event):
    path = next(event.path.glob("checkpoints/*/model*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
"""
ANOTHER_RANK = """
def _is_due(self, fault, count):
    return self.config.fault == fault and os.environ["RANK"] == "0" and count >= self.config.at
"""
HEAD = """
import os
import signal
import serried
from serried.verify.training_script import VerifiedTask

class Repeated:
    def __init__(self, found):
        self.found = found

    def __getattr__(self, name):
        return getattr(self.found, name)

    def __len__(self):
        return len(self.found)

    def __getitem__(self, index):
        return self.found[max(0, index - 1)]

class Broken(VerifiedTask):
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("body", "check", "row", "says"),
    [
        (RANKS, parity, "ddp x2, fp32", "loss 1.0e-04, "),
        (CHANCE, determinism, "two runs of one command", " tensors differ"),
        (REPEATS, resume, "on the same layout (fsdp x2)", " tensors differ"),
        (TAMPERS, resume, "on the same layout (fsdp x2)", "no checkpoint is complete: "),
        (DEAF, faults, "SIGTERM, and a resume", "exit code 70 instead of 75"),
        (ANOTHER_RANK, faults, "a forward of a rank hangs", "the reason does not contain 'rank 1 '"),
        (None, speed, "training", "tokens/s"),
    ],
    ids=["ranks", "chance", "repeats", "tampers", "deaf", "another rank", "slow"],
)
def test_check_fails_on_the_fault_it_is_for(
    body: str | None, check: object, row: str, says: str, tmp_path: Path
) -> None:
    """Each fault is put into the task, or is a bound that cannot be met."""
    script = TRAINING_SCRIPT
    if body is not None:
        script = tmp_path / "broken.py"
        script.write_text(f'{HEAD}{indent(body, "    ")}\nif __name__ == "__main__":\n    serried.main(Broken)\n')
    kind = Workplace if check is faults else ForkedWorkplace
    workplace = kind(tmp_path / "runs", tmp_path, 2, "cpu", script)
    (chosen,) = (case for case in check(workplace, Bounds(least_tokens_per_second=1e12)) if case.name == row)  # type: ignore[operator]
    report = verify(workplace, [Check("one", "", lambda *_: [chosen])], Bounds(), tmp_path / "out.json", print)
    (found,) = report.rows
    assert found.result == "failed", found
    assert says in found.figure
    assert found.log_tail
    assert report.result == "failed"
