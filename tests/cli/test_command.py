"""The program as its users start it: real processes, real torchrun, real files, and what they print."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from serried.program import main
from testing.forked_runs import torchruns_variables, typed, typed_on
from testing.rank_pool import ROOT
from testing.runs import checkpoint, metrics, overrides, run_here, status
from tests.cli.config.test_mistakes import MISTAKES, Mistake


def start(*arguments: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Return the outcome of ``train.py`` in interpreters of its own; with several processes, torchrun starts them."""
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if processes > 1:  # torchrun itself is a fork, the ranks are not
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
        return typed(*torchrun, "train.py", *arguments, env=clean)
    command = [sys.executable, "train.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=clean, check=False)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("places")
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("ten bytes.")
    (folder / "file").write_text("not a folder")
    return {
        "empty": str(folder / "empty.txt"),
        "short": str(folder / "short.txt"),
        "absent": str(folder / "absent.txt"),
        "file": str(folder / "file"),
        "run": str(folder / "run"),
    }


def check_one_error_line(mistake: Mistake, done: subprocess.CompletedProcess[str], places: dict[str, str]) -> None:
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done.stderr
    for expected in mistake.expected:
        assert fill(expected, places) in done.stderr
    assert "Traceback" not in done.stderr
    assert not [line for line in done.stdout.splitlines() if not line.startswith("waiting")]  # on a busy machine


def arguments(mistake: Mistake, places: dict[str, str]) -> list[str]:
    return [fill(word, places) for word in mistake.argv]


def fill(words: str, places: dict[str, str]) -> str:
    for name, path in places.items():
        words = words.replace(f"{{{name}}}", path)
    return words


IN_PROCESSES_OF_THEIR_OWN = ("all at once",)


# test_mistakes.py has the others that composing finds.
BY_THE_PROGRAM = [m for m in MISTAKES if m.processes > 1 or m.stage != "compose" or m.name in IN_PROCESSES_OF_THEIR_OWN]


@pytest.mark.parametrize("mistake", BY_THE_PROGRAM, ids=lambda m: m.name)
def test_a_mistake_is_one_line_and_exit_78(
    mistake: Mistake, places: dict[str, str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake.processes > 1:  # what they refuse before they meet
        for name, value in torchruns_variables(0, mistake.processes, port=1).items():
            monkeypatch.setenv(name, value)
    extra = [f"run.dir={places['run']}"] if mistake.stage == "run" and "run.dir" not in "".join(mistake.argv) else []
    argv = [*arguments(mistake, places), *extra]
    if mistake.name in IN_PROCESSES_OF_THEIR_OWN:
        done = start(*argv)
    else:  # the same program, without waiting for an interpreter
        code = main(argv)
        done = subprocess.CompletedProcess(argv, code, *capfd.readouterr())
    check_one_error_line(mistake, done, places)
    assert done.returncode == 78
    if mistake.stage == "compose":
        count = len(done.stderr.splitlines())
        assert count == 1 or done.stderr.startswith(f"error: {count - 1} mistakes:\n")


@pytest.mark.slow
def test_under_torchrun_a_mistake_is_still_one_line(places: dict[str, str]) -> None:
    mistake = named("batch")
    done = start(*arguments(mistake, places), "launch.device=cpu", processes=2)
    ours, footer = before_the_footer(done.stderr)
    said = [line for line in ours.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done.stderr
    assert "exitcode  : 78" in footer
    assert "Traceback" not in ours
    assert all(fill(expected, places) in done.stderr for expected in mistake.expected)


def before_the_footer(stderr: str) -> tuple[str, str]:
    """What all processes printed, and what torchrun, once they have ended, says of them: it has a traceback always."""
    ours, mark, footer = stderr.partition("failed (exitcode: ")
    assert mark, stderr
    return ours, footer


@pytest.mark.slow
def test_a_mistake_that_one_rank_finds_is_one_line_of_all(places: dict[str, str]) -> None:
    mistake = named("absent file")
    done = typed_on(2, "train.py", *arguments(mistake, places), "launch.device=cpu", f"run.dir={places['run']}")
    assert [each.returncode for each in done] == [78, 78]
    printed = "".join(each.stderr for each in done)
    assert printed.startswith("error: ")
    assert len(printed.splitlines()) == 1
    assert all(fill(expected, places) in printed for expected in mistake.expected)


def named(name: str) -> Mistake:
    return next(mistake for mistake in MISTAKES if mistake.name == name)


def test_main_job_under_torchrun_then_again_then_from_scratch(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = overrides(text, run_dir, "trainer.eval_every=4", "trainer.eval_batches=1", "trainer.sample_tokens=20",
                     "trainer.log_every=5", "trainer.micro_batch=9", "trainer.steps=10", "parallel=fsdp")  # fmt: skip
    done = start(*argv, processes=2)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/10", "5/10", "10/10"]
    assert [line.split()[1] for line in lines if line.startswith("eval ")] == ["4/10", "8/10", "10/10"]
    assert sum(line.startswith("finished") for line in lines) == 1
    assert any(line.startswith("  | ") for line in lines)
    assert "\r" not in done.stdout

    assert status(run_dir) == {"state": "finished", "step": 10, "reason": "all steps done", "exit_code": 0}
    assert metrics(run_dir, "start")[0]["world_size"] == 2
    steps = metrics(run_dir)
    assert steps[-1]["samples"] == 360
    assert steps[-1]["tokens"] == 360 * 32
    assert steps[-1]["mfu"] is None
    assert steps[-1]["memory_bytes"] > 10**8
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [line["step"] for line in metrics(run_dir, "eval")] == [4, 8, 10]
    assert metrics(run_dir, "stop")[0]["state"] == "finished"
    assert {"python", "torch", "git_commit"} <= json.loads((run_dir / "environment.json").read_text()).keys()
    assert sorted(path.name for path in (run_dir / "log").iterdir()) == ["rank-0.log", "rank-1.log"]

    before = (run_dir / "metrics.jsonl").read_bytes()
    again = run_here(argv)
    assert again.code == 0
    assert "is finished" in again.printed
    assert (run_dir / "metrics.jsonl").read_bytes() == before

    assert "optim.eps 1e-08 -> 1e-06" in run_here([*argv, "optim.eps=1e-6"]).error

    elsewhere = [*(word for word in argv if "data.path" not in word), f"data.path={text}-typo"]
    assert "-typo" in run_here([*elsewhere, "checkpoint.resume=never"]).error
    assert (run_dir / "metrics.jsonl").read_bytes() == before, "a mistake moves no finished run"
    anew = run_here([*argv, "checkpoint.resume=never", "trainer.micro_batch=18"])
    assert anew.code == 0, anew.printed
    note = "note: trainer.micro_batch is given 2 times; the last value is used: trainer.micro_batch=18\n"
    assert note in anew.printed
    assert (run_dir / "earlier-1" / "metrics.jsonl").read_bytes() == before
    assert (checkpoint(run_dir / "earlier-1") / "config.json").exists()
    assert len(metrics(run_dir, "start")) == 1


def test_records_of_an_unfinished_run_are_kept_aside(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("precious\n")
    (run_dir / "status.json").write_text('{"state": "running", "step": 7}')
    ended = run_here(overrides(text, run_dir, "trainer.steps=1", "trainer.micro_batch=36"))
    assert ended.code == 0, ended.printed
    assert "running at step 7" in ended.printed
    assert (run_dir / "earlier-1" / "metrics.jsonl").read_text() == "precious\n"


def test_a_crash_shows_the_traceback_of_the_first_rank_only(text: Path, tmp_path: Path) -> None:
    """No user's mistake, so a traceback, but one."""
    argv = overrides(text, tmp_path / "run", "trainer.micro_batch=9", "parallel=ddp")
    script = tmp_path / "broken.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import serried.trainer.step, serried.program as train\n"
        "from serried.runtime.exit import leave\n"
        "inner = serried.trainer.step.TrainStep.__call__\n"
        "def broken(self, *arguments):\n"
        "    self.calls = getattr(self, 'calls', 0) + 1\n"
        "    if self.calls == 3 and os.environ['RANK'] == '1':\n"
        "        raise ZeroDivisionError('here')\n"
        "    return inner(self, *arguments)\n"
        "serried.trainer.step.TrainStep.__call__ = broken\n"
        "leave(train.main(sys.argv[1:]))\n"
    )
    printed = [done.stderr for done in typed_on(2, str(script), *argv)]
    assert ["Traceback" in text for text in printed] == [False, True], "the other rank's is only an echo"
    assert printed[1].count("Traceback (most recent call last)") == 1
    assert "ZeroDivisionError: here" in printed[1]
    now = status(tmp_path / "run")
    assert (now["state"], now["reason"]) == ("failed", "ZeroDivisionError: here"), "the cause, not its echo"
    assert metrics(tmp_path / "run", "stop")[-1]["reason"] == "ZeroDivisionError: here"


WITHOUT_TORCH = """
import sys
import serried
from serried import cli, program
from serried.configs.compose import compose

assert program.main(["--help"]) == cli.main(["generate", "--help"]) == 0
assert not {"torch", "numpy", "safetensors"} & sys.modules.keys(), "for help"
compose(["recipe=llama8b", "trainer.steps=10k"])
assert cli.main(["report", sys.argv[1]]) == 0
import serried.records.trackers.__main__, serried.records.trackers.tensorboard_tracker
assert program.main(["launch=local", "launch.processes=3"]) == 78
assert "torch" not in sys.modules
assert program.main(["recipe=llama8b", "launch.processes=8", "dry_run=true"]) == 0
assert not {"transformers", "datasets", "wandb"} & sys.modules.keys(), "for a plan"
assert not {"torch._dynamo", "torch.distributed.tensor", "sympy"} & sys.modules.keys(), "as long as torch itself"
"""


def test_help_config_report_trackers_mistake_and_plan_import_nothing_they_do_not_use(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "running", "step": 1, "reason": null, "exit_code": null}')
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("error: trainer.global_batch=32 is not a multiple of 24")
    assert len(done.stderr.splitlines()) == 1


def test_plan_warns_of_checkpoints_that_are_more_than_an_hour_apart(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama8b", "launch.processes=8", "plan.device=h100", "dry_run=true", "checkpoint.every_minutes=0"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "WARNING    1,000 steps without a checkpoint take 22h03m" in printed
    assert "add checkpoint.every_minutes=30" in printed
    for more in ("checkpoint.every_minutes=30", "checkpoint.every=10"):
        assert main([*words, more]) == 0
        assert "without a checkpoint" not in capsys.readouterr().out


def test_the_plan_of_llama8b_is_exact_and_allocates_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=llama8b", "launch.processes=8", "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    assert "8,030,261,248 parameters" in printed
    assert "fsdp, shard 8" in printed
    share = 8_030_261_248 * 4 / 8 / 2**30
    assert f"parameters {share:.1f}GiB, gradients {share:.1f}GiB," in printed
    assert f"optimizer state {2 * share:.1f}GiB" in printed
    assert "gathered 2.0GiB," in printed, "after the forward: the head, and the buffer in which it arrived"
    assert len(printed.splitlines()) <= 12


def test_a_plan_that_does_not_fit_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def warnings(*words: str) -> list[str]:
        assert main(["dry_run=true", *words]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING ")]

    (warning,) = warnings("recipe=llama8b")
    assert warning.endswith("more than the 80.0GiB of a GPU; to plan for a node of 8 GPUs: launch.processes=8")
    for recipe, processes in (
        ("llama1b", 8),
        ("llama3b", 8),
        ("llama8b", 8),
        ("llama8b_131k", 8),
        ("llama70b", 16),
        ("llama405b", 512),
        ("glm45_air", 64),
    ):
        assert warnings(f"recipe={recipe}", f"launch.processes={processes}") == [], "a recipe fits the nodes it names"
    for words, expected in (
        (["recipe=llama8b", "launch.processes=8", "trainer.micro_batch=4"], "trainer.activation_checkpoint=full"),
        (["recipe=llama8b", "launch.processes=8", "trainer.micro_batch=64"], "trainer.micro_batch=1"),
        (["recipe=llama70b", "launch.processes=8"], "launch.processes=16"),  # and how to divide it over these
    ):
        (warning,) = warnings(*words)
        advised = warning.partition("these fit: ")[2].split()
        assert advised[0] == expected
        keys = [word.partition("=")[0] for word in advised]
        kept = [word for word in words if word.partition("=")[0] not in keys]
        assert warnings(*kept, *advised) == [], "what fits can be pasted"
    longer = ["data.sequence_length=147456", "model.max_sequence_length=147456"]
    (warning,) = warnings(
        "recipe=llama8b_131k",
        "launch.processes=16",
        "parallel.context=16",
        "trainer.activation_checkpoint=none",
        *longer,
    )
    assert "does not fit: 81." in warning, "keys and values of whole sequences"
    assert warning.endswith("these fit: parallel.context_method=ring")
