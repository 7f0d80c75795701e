"""``-m`` as it is typed: a grid or Optuna's search, real processes, killed in the middle and gone on with."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from serried.cli import main as serried
from serried.configs.errors import UserError
from serried.configs.points import Point
from serried.configs.study import optuna_is_quiet
from serried.configs.sweep import read_sweep
from serried.launch.start import start_sweep
from serried.launch.summary import Outcome, read_outcome, table, write_summary
from serried.launch.sweep import summarize
from serried.program import main
from tests.cluster import ROOT
from tests.runs import metrics, run_here, steps_saved, tiny_overrides
from tests.slurm import wait_for

_OPTUNA = ("hydra/sweeper=optuna", "hydra/sweeper/sampler=random", "trainer.eval_every=3", "trainer.eval_batches=1")
pytestmark = pytest.mark.timeout(600)

_TWO_PROCESSES = ("launch=local", "launch.processes=2", "launch.device=cpu")

# The file `hold` names a step; before it, ranks wait for a signal. Of the run `held`, the others go on.
_HOLD = """
import os
if "RANK" in os.environ or "SERRIED_SWEEP" in os.environ and "launch=local" not in " ".join(os.sys.argv):
    import time
    from pathlib import Path
    import serried.trainer.loop
    train = serried.trainer.loop.Loop._train
    hold = Path({hold!r})
    def wait(self, step, batches):
        run, _, at = hold.read_text().rpartition(" ") if hold.exists() else ("", "", "0")
        while step == int(at) and self._context.config.run.name.endswith(run) and (
            "deaf" in os.environ or self._context.session.signals.received is None
        ):
            time.sleep(0.01)
        train(self, step, batches)
    serried.trainer.loop.Loop._train = wait
"""


class Sweep:
    """A sweep under way."""

    def __init__(self, folder: Path, *words: str, deaf: bool = False) -> None:
        self._hold = folder / "hold"
        (folder / "hooks").mkdir(exist_ok=True)
        (folder / "hooks" / "sitecustomize.py").write_text(_HOLD.format(hold=str(self._hold)))
        environment = os.environ | {"PYTHONPATH": f"{folder / 'hooks'}:{ROOT}"} | ({"deaf": "yes"} if deaf else {})
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), "-m", *words],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def processes(self) -> list[int]:
        """It and all it has started, itself first."""
        found = [self.process.pid]
        for pid in found:
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):
                    found += [int(child) for child in path.read_text().split()]
        return found

    def kill(self) -> None:
        """All at once, with no time for a word."""
        pids = self.processes()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        wait_for(lambda: not any(is_alive(pid) for pid in pids), "all to be dead", 60)

    def end(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=400)
        return self.process.returncode, stdout, stderr


@pytest.fixture
def sweeps() -> Iterator[list[Sweep]]:
    """Those that a test starts, none of which outlives it."""
    started: list[Sweep] = []
    yield started
    for each in started:
        if each.process.poll() is None:
            each.kill()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def has_trained(run_dir: Path, step: int) -> bool:
    try:
        return any(line["step"] == step for line in metrics(run_dir))
    except FileNotFoundError:
        return False


def summary(folder: Path) -> dict[str, dict[str, object]]:
    """What ``sweep.json`` says of each run, by the name of its folder; in its order."""
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    return {Path(run["run_dir"]).name: run for run in runs}


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics(run_dir)]


@pytest.mark.slow
def test_a_grid_goes_on_after_a_signal_and_after_a_kill_with_the_numbers_of_single_runs(
    text: Path, tmp_path: Path, sweeps: list[Sweep]
) -> None:
    home = tmp_path / "runs"
    words = tiny_overrides(text, home, "trainer.seed=1,2", *_TWO_PROCESSES)
    first, second = home / "seed-1", home / "seed-2"
    (tmp_path / "hold").write_text("seed-2 3")

    sweeps.append(Sweep(tmp_path, *words))
    wait_for(lambda: has_trained(second, 2), "the second run to be under way", 300)
    sweeps[-1].process.terminate()
    code, stdout, stderr = sweeps[-1].end()
    assert (code, stderr) == (75, "")
    assert "stopped    SIGTERM: 1 of 2 runs are finished; go on: the same command" in stdout
    assert read_outcome(second, {}).state == "stopped"
    assert steps_saved(second)[-1] == 3

    (tmp_path / "hold").write_text("seed-2 5")
    sweeps.append(Sweep(tmp_path, *words))
    wait_for(lambda: has_trained(second, 4) and 4 in steps_saved(second), "it to go on", 300)
    sweeps[-1].kill()

    (tmp_path / "hold").unlink()
    sweeps.append(Sweep(tmp_path, *words))
    code, stdout, stderr = sweeps[-1].end()
    assert (code, stderr) == (0, "")
    assert "run 1/2    seed=1: finished before" in stdout
    assert "run 2/2    seed=2: goes on in" in stdout
    assert [line["resumed_from"] for line in metrics(first, "start")] == [None]
    assert [line["resumed_from"] for line in metrics(second, "start")] == [None, 3, 4]
    assert {run["state"] for run in summary(home / "sweep-seed").values()} == {"finished"}
    for seed, run_dir in ((1, first), (2, second)):
        alone = tmp_path / f"alone-{seed}"
        assert run_here(tiny_overrides(text, alone, f"trainer.seed={seed}")).code == 0
        assert losses(run_dir) == pytest.approx(losses(alone))


@pytest.mark.slow
def test_a_run_that_fails_does_not_end_the_others_and_one_that_is_stopped_goes_on(
    text: Path, tmp_path: Path, sweeps: list[Sweep]
) -> None:
    words = tiny_overrides(text, tmp_path / "runs", "model.vocab_size=8,300", "trainer.eval_every=3")
    stopped = tmp_path / "runs" / "vocab_size-300"
    (tmp_path / "hold").write_text("vocab_size-300 3")
    sweeps.append(Sweep(tmp_path, *words))
    wait_for(lambda: has_trained(stopped, 2), "the second run to be under way", 300)
    sweeps[-1].process.terminate()
    code, stdout, _ = sweeps[-1].end()
    assert code == 75
    assert "stopped    SIGTERM: 0 of 2 runs are finished; go on: the same command" in stdout
    assert read_outcome(stopped, {}).state == "stopped"

    (tmp_path / "hold").unlink()
    sweeps.append(Sweep(tmp_path, *words))
    code, stdout, stderr = sweeps[-1].end()
    assert [line["resumed_from"] for line in metrics(stopped, "start")] == [None, 3]
    alone = tmp_path / "alone"
    assert run_here(tiny_overrides(text, alone, "model.vocab_size=300", "trainer.eval_every=3")).code == 0
    assert losses(stopped) == pytest.approx(losses(alone))
    assert code == 78
    assert stderr.startswith(f"failed: {tmp_path}/runs/vocab_size-8: ")
    assert len(stderr.splitlines()) == 1
    runs = summary(tmp_path / "runs" / "sweep-vocab_size")
    assert [(name, run["state"]) for name, run in runs.items()] == [
        ("vocab_size-300", "finished"),
        ("vocab_size-8", "failed"),
    ]
    best = min(line["loss"] for line in metrics(tmp_path / "runs" / "vocab_size-300", "eval"))
    assert runs["vocab_size-300"]["validation_loss"] == best
    assert f"{best:.4f}" in stdout
    rows = (tmp_path / "runs" / "sweep-vocab_size" / "sweep.csv").read_text().splitlines()
    assert rows[0].startswith("model.vocab_size,loss,validation_loss,")
    assert [row.partition(",")[0] for row in rows[1:]] == ["300", "8"]


@pytest.mark.parametrize("starts", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_optuna_is_told_the_best_validation_loss_and_goes_on_with_its_study(
    starts: int, text: Path, tmp_path: Path, sweeps: list[Sweep]
) -> None:
    space = ("optim.lr=tag(log, interval(1e-5, 1e-2))", "schedule=cosine,constant")
    words = tiny_overrides(text, tmp_path / "runs", *_OPTUNA, *space, "hydra.sweeper.sampler.seed=1")
    folder = tmp_path / "runs" / "search-lr-schedule"
    for trials in range(1, starts + 1):
        sweeps.append(Sweep(tmp_path, *words, f"hydra.sweeper.n_trials={trials}"))
        code, stdout, stderr = sweeps[-1].end()
        assert (code, stderr) == (0, "")
        assert stdout.count(": finished before") == trials - 1
    assert sorted(path.name for path in folder.glob("trial-*")) == [f"trial-{number}" for number in range(starts)]
    runs = summary(folder)
    assert len({run["values"]["optim.lr"] for run in runs.values()}) == starts  # type: ignore[index]
    found = {name: min(line["loss"] for line in metrics(folder / name, "eval")) for name in runs}
    assert {name: run["validation_loss"] for name, run in runs.items()} == found
    best = (folder / "optimization_results.yaml").read_text()
    assert f"best_value: {min(found.values())}\n" in best
    assert f"optim.lr: {next(iter(runs.values()))['values']['optim.lr']}\n" in best  # type: ignore[index]


@pytest.mark.slow
def test_a_trial_that_was_killed_goes_on_with_its_values(text: Path, tmp_path: Path, sweeps: list[Sweep]) -> None:
    words = tiny_overrides(text, tmp_path / "runs", *_OPTUNA, "optim.lr=interval(1e-4,1e-2)")
    folder = tmp_path / "runs" / "search-lr"
    (tmp_path / "hold").write_text("trial-1 5")
    sweeps.append(Sweep(tmp_path, *words, "hydra.sweeper.n_trials=3"))
    wait_for(lambda: has_trained(folder / "trial-1", 4) and 4 in steps_saved(folder / "trial-1"), "trial 1", 300)
    sweeps[-1].kill()
    (tmp_path / "hold").unlink()
    sweeps.append(Sweep(tmp_path, *words, "hydra.sweeper.n_trials=3"))
    code, stdout, _ = sweeps[-1].end()
    assert code == 0, stdout
    assert [line["resumed_from"] for line in metrics(folder / "trial-1", "start")] == [None, 4]
    runs = summary(folder)
    assert len(runs) == 3
    assert {run["state"] for run in runs.values()} == {"finished"}
    assert len({run["values"]["optim.lr"] for run in runs.values()}) == 3  # type: ignore[index]


@pytest.mark.slow
def test_a_trial_that_was_asked_for_and_never_began_is_made(text: Path, tmp_path: Path, sweeps: list[Sweep]) -> None:
    """As where the search ended between the two."""
    words = tiny_overrides(text, tmp_path / "runs", *_OPTUNA, "optim.lr=interval(1e-4,1e-2)")
    folder = tmp_path / "runs" / "search-lr"
    sweeps.append(Sweep(tmp_path, *words, "hydra.sweeper.n_trials=1"))
    assert sweeps[-1].end()[0] == 0
    with optuna_is_quiet():
        from optuna import distributions, load_study, storages

        storage = storages.RDBStorage(f"sqlite:///{folder / 'study.db'}", {"isolation_level": "AUTOCOMMIT"})
        asked = load_study("search-lr", storage).ask({"optim.lr": distributions.UniformDistribution(1e-4, 1e-2)})
    sweeps.append(Sweep(tmp_path, *words, "hydra.sweeper.n_trials=2"))
    code, stdout, _ = sweeps[-1].end()
    assert code == 0, stdout
    runs = summary(folder)
    assert sorted(runs) == ["trial-0", "trial-1"]
    assert float(str(runs["trial-1"]["values"]["optim.lr"])) == asked.params["optim.lr"]  # type: ignore[index]


@pytest.mark.slow
def test_optunas_own_grid_is_searched_once(text: Path, tmp_path: Path, sweeps: list[Sweep]) -> None:
    words = tiny_overrides(text, tmp_path / "runs", *_OPTUNA, "hydra/sweeper/sampler=grid", "trainer.seed=1,2")
    for _ in range(2):
        sweeps.append(Sweep(tmp_path, *words))
        code, stdout, stderr = sweeps[-1].end()
        assert (code, stderr) == (0, ""), stdout
    assert sorted(summary(tmp_path / "runs" / "search-seed")) == ["trial-0", "trial-1"]


@pytest.mark.slow
def test_three_runs_that_fail_alike_before_their_first_step_end_the_sweep(
    text: Path, tmp_path: Path, sweeps: list[Sweep]
) -> None:
    words = tiny_overrides(text, tmp_path / "runs", "model.vocab_size=8", "trainer.seed=range(5)")
    sweeps.append(Sweep(tmp_path, *words))
    code, stdout, stderr = sweeps[-1].end()
    assert code == 78
    assert stdout.count("begins in") == 3
    assert stderr.splitlines()[-1].startswith("failed: 3 runs in a row failed alike before their first step")


@pytest.mark.slow
def test_the_second_interrupt_ends_it_without_saving(text: Path, tmp_path: Path, sweeps: list[Sweep]) -> None:
    (tmp_path / "hold").write_text("seed-1 3")
    words = tiny_overrides(text, tmp_path / "runs", "trainer.seed=1,2", *_TWO_PROCESSES)
    sweeps.append(Sweep(tmp_path, *words, deaf=True))
    wait_for(lambda: has_trained(tmp_path / "runs" / "seed-1", 2), "the first run to be under way", 300)
    started = sweeps[-1].processes()
    assert len(started) == 4, "the sweep, its run's launcher and two ranks"

    def interrupted() -> bool:
        with suppress(ProcessLookupError):
            sweeps[-1].process.send_signal(signal.SIGINT)
        return sweeps[-1].process.poll() is not None

    wait_for(interrupted, "the sweep to end", 60)
    code, stdout, _ = sweeps[-1].end()
    assert code == 75, stdout
    wait_for(lambda: not any(is_alive(pid) for pid in started), "all to end", 30)


@pytest.mark.slow
def test_a_sweep_that_is_killed_leaves_no_run_and_another_waits_for_it(
    text: Path, tmp_path: Path, sweeps: list[Sweep]
) -> None:
    (tmp_path / "hold").write_text("seed-1 3")
    words = tiny_overrides(text, tmp_path / "runs", "trainer.seed=1,2")
    sweeps.append(Sweep(tmp_path, *words))
    wait_for(lambda: has_trained(tmp_path / "runs" / "seed-1", 2), "the first run to be under way", 300)
    refused = Sweep(tmp_path, *words)
    code, _, stderr = refused.end()
    assert code == 78
    assert stderr.startswith("error: another process is at this sweep")
    run = sweeps[-1].processes()[1]
    sweeps[-1].process.kill()
    sweeps[-1].process.communicate()
    wait_for(lambda: not is_alive(run), "the run to save and stop", 60)
    assert read_outcome(tmp_path / "runs" / "seed-1", {}).state == "stopped"
    (tmp_path / "hold").unlink()
    sweeps.append(Sweep(tmp_path, *words))
    assert sweeps[-1].end()[0] == 0


# What needs no run


def test_a_grid_makes_a_run_of_every_combination() -> None:
    sweep = read_sweep(["optim.lr=1e-3,3e-3", "model=tiny", "trainer.seed=range(1,4)", "run.dir=here"])
    assert sweep.runs == len(sweep.points) == 6
    assert sweep.keys == ("optim.lr", "trainer.seed")
    assert str(sweep.folder) == "here/sweep-lr-seed"
    assert {str(point.config.run.dir) for point in sweep.points} >= {"here/lr-0.001-seed-1", "here/lr-0.003-seed-3"}
    assert {point.config.optim.lr for point in sweep.points} == {1e-3, 3e-3}


def test_runs_and_the_sweep_have_folders_beside_each_other() -> None:
    sweep = read_sweep(["run.name=mine", "schedule=cosine,wsd", "optim.betas=[0.9,0.95],[0.9,0.99]"])
    assert str(sweep.folder) == "runs/mine-sweep-schedule-betas"
    assert [str(point.config.run.dir) for point in sweep.points[:2]] == [
        "runs/mine-schedule-cosine-betas-0.9_0.95",
        "runs/mine-schedule-cosine-betas-0.9_0.99",
    ]


def test_the_corners_of_a_search_are_checked_before_it_starts() -> None:
    words = ["hydra/sweeper=optuna", "trainer.eval_every=10", "hydra.sweeper.n_trials=7", "schedule=cosine,wsd"]
    sweep = read_sweep([*words, "optim.lr=interval(1e-5,1e-2)", "model.layers=range(2,9)"])
    assert sweep.runs == 7
    assert sweep.search is not None
    corners = [tuple(point.values.values()) for point in sweep.points]
    assert corners[0] == ("cosine", "1e-05", "2")
    assert set(corners[1:]) == {("wsd", "1e-05", "2"), ("cosine", "0.01", "2"), ("cosine", "1e-05", "9")}
    with pytest.raises(UserError, match=r"model.heads=3 does not divide model.dim=128"):
        read_sweep([*words, "model.heads=4,3"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trainer.seed=1", "no key has them"),
        ("trainer.seed=1,1", "would share runs/tiny-seed-1"),
        ("trainer.sed=1,2", "trainer.seed=1"),
        ("trainer.seed=range(5000)", "more than 1000 runs"),
        ("optim.lr=interval(1,2)", "hydra/sweeper=optuna"),
        ("schedule=glob(*)", "write them out"),
        ("run.dir=a,b", "cannot be swept"),
        ("launch=local,torchrun", "cannot be swept"),
        ("trainer.seed=1,2 trainer.seed=3", "given twice"),
        ("optim.lr=1e-3,3e-3 optim.lr=1,2", "optim.lr is given twice: optim.lr=1e-3,3e-3 and optim.lr=1,2; keep one"),
        (
            "hydra/sweeper=optuna optim.lr=interval(1,2) optim.lr=interval(1e-4,1e-3)",
            "optim.lr is given twice: optim.lr=interval(1,2) and optim.lr=interval(1e-4,1e-3); keep one",
        ),
        (
            "hydra/sweeper=optuna optim.lr=1,2 hydra.sweeper.n_trials=5 hydra.sweeper.n_trials=6",
            "given twice: hydra.sweeper.n_trials=5 and hydra.sweeper.n_trials=6; keep one",
        ),
        ("hydra/sweeper=optuna hydra/sweeper=basic optim.lr=1,2", "hydra/sweeper is given twice"),
        ("hydra/sweeper=ax trainer.seed=1,2", "there are basic, the grid, and optuna"),
        ("hydra.sweeper.n_trials=3 trainer.seed=1,2", "read by hydra/sweeper=optuna"),
        ("hydra/sweeper=optuna", "no key has several"),
        ("hydra/sweeper=optuna optim.lr=1e-3,1e-2 trainer.eval_every=0", "use trainer.eval_every="),
        ("hydra/sweeper=optuna optim.lrr=1e-3,1e-2", "optim.lr="),
        ("hydra/sweeper=optuna optim.lr=interval(-1,1)", "out of range"),
        ("hydra/sweeper=optuna hydra.sweeper.n_trial=3 optim.lr=1,2", "did you mean hydra.sweeper.n_trials=3"),
        ("hydra/sweeper=optuna hydra.sweeper.params={optim.lr:'1,2'}", "type the keys themselves"),
        (
            "hydra/sweeper=optuna hydra.sweeper.n_trials=x optim.lr=1,2",
            "not a whole number; e.g. hydra.sweeper.n_trials=",
        ),
        ("hydra/sweeper=optuna hydra.sweeper.n_trials=1k optim.lr=1,2", "e.g. hydra.sweeper.n_trials=1000"),
        ("hydra/sweeper=optuna hydra.sweeper.sampler.seed=x optim.lr=1,2", "e.g. hydra.sweeper.sampler.seed=1"),
        (
            "hydra/sweeper=optuna hydra.sweeper.max_failure_rate=x optim.lr=1,2",
            "is not a number; e.g. hydra.sweeper.max",
        ),
        ("hydra/sweeper=optuna hydra.sweeper.sampler.multivariate=x optim.lr=1,2", "is not true or false; e.g. hydra."),
        ("hydra/sweeper=optuna optim.lr=interval(3,1)", "3 is above 1; use 'optim.lr=interval(1,3)'"),
        ("hydra/sweeper=optuna model.layers=range(5,2)", "use 'model.layers=range(2,5)'"),
        ("hydra/sweeper=optuna optim.lr=tag(log,interval(0,1))", "use 'optim.lr=tag(log,interval(0.001,1))'"),
        ("hydra/sweeper=optuna optim.lr=interval(start=3,end=1)", "3 is above 1; use 'optim.lr=interval(1,3)'"),
        ("hydra/sweeper=optuna optim.lr=interval(-1,-3)", "-1 is above -3; use 'optim.lr=interval(-3,-1)'"),
        (
            "hydra/sweeper=optuna model.layers=int(interval(3.5,1.2))",
            "3.5 is above 1.2; use 'model.layers=int(interval(1.2,3.5))'",
        ),
        ("hydra/sweeper=optuna model.layers=range(1,10,0)", "not 0; use 'model.layers=range(1,10)'"),
        ("hydra/sweeper=optuna model.layers=range(start=10,stop=1,step=-2)", "use 'model.layers=range(1,10,2)'"),
        ("hydra/sweeper=optuna model.layers=range(-5)", "use 'model.layers=range(-5,0)'"),
        (
            "hydra/sweeper=optuna optim.lr=tag(log,interval(-3,-1))",
            "begins above 0, not at -3; e.g. 'optim.lr=tag(log, interval(3e-05, 0.003))'",
        ),
        (
            "hydra/sweeper=optuna optim.lr=tag(log,interval(start=-3,end=1))",
            "use 'optim.lr=tag(log,interval(0.001,1))'",
        ),
        (
            "hydra/sweeper=optuna hydra.sweeper.study_name={a optim.lr=1,2",
            "hydra.sweeper.study_name={a cannot be read; if that is meant, quote it: 'hydra.sweeper.study_name=\"{a\"'",
        ),
        (
            "hydra/sweeper=optuna hydra.sweeper.study_name=a,b optim.lr=1,2",
            "hydra.sweeper.study_name=a,b holds several values",
        ),
        (
            "hydra/sweeper=optuna hydra.sweeper.study_name=${nope} optim.lr=1,2",
            "hydra.sweeper.study_name=${nope} does not fit",
        ),
        ("hydra/sweeper=optuna run.dir=a,b", "run.dir=a,b cannot be swept"),
        (
            "hydra/sweeper=optuna optim.lr=glob(*)",
            "optim.lr=glob(*) cannot be searched: these are neither values nor a",
        ),
        ("hydra/sweeper=optuna optim.lr=interval(a,1)", "optim.lr=interval(a,1) cannot be read"),
        ("hydra/sweeper=optuna optim.lr=tag(log,interval(1e-5,1e-2)", "cannot be read"),
        ("hydra/sweeper=optuna optim.lrr=interval(1e-5,1e-2)", "did you mean 'optim.lr=interval(1e-5,1e-2)'?"),
        ("trainer.seed=range(1,", "trainer.seed=range(1, cannot be read"),
        ("trainer.seed=1,2]", "trainer.seed=1,2] cannot be read as values to sweep over; e.g. -m trainer.seed=8,16"),
        ("optim.betas=[0.9,0.95],[0.9,0.99", "optim.betas=[0.9,0.95],[0.9,0.99 cannot be read as values"),
        ("schedule=cosine,wsd]", "e.g. -m schedule=constant,cosine"),
        ("optim.lrr=1e-3,3e-3", "unknown key optim.lrr=1e-3,3e-3 (command line); did you mean optim.lr=1e-3,3e-3?"),
        ("optim.lrr=1e-3,3e-3 trainer.seed=1,2", "did you mean optim.lr=1e-3,3e-3?"),
        ("schedul=cosine,wsd", "did you mean schedule=cosine,wsd?"),
        ("hydra/sweeper=optuna hydra.sweeper.n_jobs=4 optim.lr=1,2", "one after the other"),
        ("hydra/sweeper=optuna hydra.sweeper.direction=maximize optim.lr=1,2", "direction=minimize"),
        ("hydra/sweeper=optuna hydra.sweeper.max_failure_rate=7 optim.lr=1,2", "between 0 and 1"),
        ("hydra/sweeper=optuna hydra/sweeper/sampler=tpee optim.lr=1,2", "there are tpe, random, grid"),
        ("hydra/sweeper=optuna optim.lr=[1],[2]", "is not a number"),
        ("hydra/sweeper=optuna hydra/sweeper/sampler=cmaes optim.lr=1,2", "keeps pickles"),
        ("hydra/sweeper=optuna hydra/sweeper/sampler=motpe optim.lr=1,2", "use hydra/sweeper/sampler=tpe|random"),
        ("hydra/sweeper=optuna hydra.sweeper.storage=redis://:secret@here optim.lr=1,2", "keeps pickles"),
        ("hydra/sweeper=optuna hydra.sweeper.storage=nonsense://x optim.lr=1,2", "use hydra.sweeper.storage=sqlite"),
        ("hydra/sweeper=optuna hydra.sweeper.storage={_target_:os.abort} optim.lr=1,2", "use hydra.sweeper.storage="),
        ("hydra/sweeper=optuna hydra.sweeper.custom_search_space=os.getcwd optim.lr=1,2", "names a function"),
        ("hydra/sweeper=optuna hydra.sweeper.sampler={_target_:os.abort} optim.lr=1,2", "write hydra/sweeper"),
        ("hydra/sweeper=optuna hydra.sweeper.sampler._target_=os.getcwd optim.lr=1,2", "unknown key"),
        ("hydra/sweeper=optuna hydra.sweeper.sampler.seed={_target_:os.getcwd} optim.lr=1,2", "seed"),
    ],
)
def test_what_is_no_sweep_is_refused_in_one_line(words: str, expected: str) -> None:
    with pytest.raises(UserError) as refused:
        read_sweep(words.split())
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_all_mistakes_of_a_sweep_are_told_at_once() -> None:
    with pytest.raises(UserError) as refused:
        read_sweep(["hydra/sweeper=optuna", "optim.lr=interval(3,1)", "model.layers=range(5,2)"])
    assert [line.partition("=")[0].strip() for line in str(refused.value).splitlines()[1:]] == [
        "optim.lr",
        "model.layers",
    ]
    with pytest.raises(UserError) as refused:
        read_sweep(["optim.lrr=1e-3,3e-3", "trainer.seed=1,2", "trainer.stps=3"])
    assert str(refused.value).startswith("2 mistakes:\n")
    with pytest.raises(UserError) as refused:
        read_sweep(["hydra/sweeper=optuna", "hydra.sweeper.n_trials=x", "optim.lr=interval(3,1)", "trainer.seed=1,2]",
                    "run.dir=a,b", "optim.lrr=2", "trainer.stps=2", "trainer.steps=abc", "model=tiny",
                    "model=llama1b"])  # fmt: skip
    parts = ["model is given twice", "n_trials=x", "trainer.seed=1,2]", "run.dir=a,b", "interval(3,1)",
             "optim.lrr=2", "trainer.stps=2", "trainer.steps=abc"]  # fmt: skip
    lines = str(refused.value).splitlines()[1:]
    assert [part in line for part, line in zip(parts, lines, strict=True)] == [True] * 8
    with pytest.raises(UserError) as refused:
        read_sweep(["optim.lr=interval(1,2)", "trainer.seed=1,2]", "run.dir=a,b", "optim.lrr=2", "trainer.steps=abc"])
    assert str(refused.value).startswith("5 mistakes:\n")


def test_blanks_and_pluses_around_a_key_are_none_of_it() -> None:
    assert read_sweep([" optim.lr=1e-3,3e-3", "+trainer.seed = 1,2"]).keys == ("optim.lr", "trainer.seed")


def test_a_large_grid_says_what_it_does_before_it_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_sweep(["trainer.seed=range(3)"])
    assert capsys.readouterr().out == ""

    def refuse(*_: object) -> None:
        raise UserError("the first point")

    monkeypatch.setattr("serried.configs.origin.Origin.point", refuse)
    with pytest.raises(UserError, match="the first point"):
        read_sweep(["trainer.seed=range(200)"])
    assert capsys.readouterr().out.startswith("sweep      200 runs: trainer.seed; ")


def test_a_dry_run_names_the_runs_below_the_plan_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "dry_run=true", "launch.device=cpu", "optim.lr=1e-3,3e-3", "run.name=mine"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("model ")
    assert printed[-3].startswith("sweep      2 runs: optim.lr; ")
    assert printed[-2:] == ["run 1/2    lr=0.001: runs/mine-lr-0.001", "run 2/2    lr=0.003: runs/mine-lr-0.003"]
    words = ["hydra/sweeper=optuna", "trainer.eval_every=5", "hydra.sweeper.n_trials=7", "optim.lr=interval(1e-5,1e-2)"]
    assert main(["-m", "dry_run=true", "launch.device=cpu", *words]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("sweep      7 runs: optim.lr; ")
    assert printed.endswith("this is the plan of one of them, lr=1e-05\n")
    assert "runs/tiny-search-lr/trial-N" in printed
    assert "corner" not in printed


@pytest.mark.parametrize(
    ("reason", "words", "expected"),
    [
        ("trainer.stop_at=2", [], "go on: the same command without trainer.stop_at, or with a higher one"),
        ("trainer.max_minutes=1", [], "go on: the same command"),
        ("trainer.stop_at=2", list(_OPTUNA), "a search to the last step is another: without trainer.stop_at"),
    ],
)
def test_a_sweep_whose_runs_stopped_says_what_to_type_last(
    reason: str, words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def stops(_: object, point: Point, __: float) -> Outcome:
        return Outcome(point.config.run.dir, point.values, "stopped", 2, reason, 75, validation_loss=1.0)

    monkeypatch.setattr("serried.launch.sweep._Runs._train", stops)
    sweep = read_sweep(["optim.lr=1e-3,3e-3", f"run.dir={tmp_path}", *words])
    assert start_sweep(sweep, lambda *_: None) == 75
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"stopped    {reason}: 0 of ")
    assert expected in last


@pytest.mark.parametrize(
    ("file", "content", "words", "expected"),
    [
        ("sampler/mine.yaml", "_target_: os.getcwd\n", "hydra/sweeper/sampler=mine", "no sampler os.getcwd"),
        (
            "sampler/mine.yaml", "_target_: optuna.samplers.TPESampler\ngamma: {_target_: os.getcwd}\n",
            "hydra/sweeper/sampler=mine", "is no single value",
        ),
        (
            "sampler/mine.yaml", "_target_: optuna.samplers.NSGAIISampler\nconstraints_func: os.getcwd\n",
            "hydra/sweeper/sampler=mine", "names a function",
        ),
        ("", "hydra: {sweeper: {sampler: {_target_: os.getcwd}}}\n", "", "no sampler os.getcwd"),
        ("", "hydra: {sweeper: {custom_search_space: os.getcwd}}\n", "", "names a function"),
        ("", "hydra: {sweeper: {storage: 'redis://here'}}\n", "", "keeps pickles"),
    ],
)  # fmt: skip
def test_no_function_is_called_because_a_file_names_it(
    file: str, content: str, words: str, expected: str, tmp_path: Path
) -> None:
    folder = tmp_path / "configs"
    shutil.copytree(ROOT / "configs", folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    if file:
        path = folder / "hydra" / "sweeper" / file
        path.parent.mkdir(parents=True)
        path.write_text(content)
    else:
        with (folder / "train.yaml").open("a") as train:
            train.write(content)
    with pytest.raises(UserError, match=expected):
        read_sweep(["hydra/sweeper=optuna", *words.split(), "optim.lr=1e-3,1e-2"], folder)


@pytest.mark.parametrize("sampler", ["tpe", "grid", "nsgaii"])
def test_what_is_used_of_the_plugin_is_there_and_no_study_holds_a_pickle(
    sampler: str, text: Path, tmp_path: Path
) -> None:
    words = tiny_overrides(text, tmp_path, *_OPTUNA[2:], "optim.lr=1e-3,1e-2", "hydra/sweeper=optuna")
    sweep = read_sweep([*words, f"hydra/sweeper/sampler={sampler}", "hydra.sweeper.n_trials=2"])
    assert sweep.search is not None
    tried: list[Point] = []

    def evaluate(point: Point) -> float:
        tried.append(point)
        return point.config.optim.lr

    sweep.search(evaluate)
    assert len(tried) == 2
    study = (sweep.folder / "study.db").read_bytes()
    for start in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        assert start + b"c" not in study
        assert start + b"\x95" not in study
        assert start.hex().encode() not in study


def test_a_storage_that_cannot_be_opened_is_one_line(text: Path, tmp_path: Path) -> None:
    url = "sqlite:////nowhere/at/all.db"
    words = tiny_overrides(text, tmp_path, *_OPTUNA, "optim.lr=1e-3,1e-2", f"hydra.sweeper.storage={url}")
    with pytest.raises(UserError, match="hydra/sweeper=optuna: "):
        start_sweep(read_sweep(words), lambda *_: None)


def test_trials_of_another_command_do_not_compare(text: Path, tmp_path: Path) -> None:
    def search(*more: str) -> None:
        words = tiny_overrides(text, tmp_path, *_OPTUNA, "optim.lr=1e-3,1e-2", *more)
        sweep = read_sweep(words)
        assert sweep.search is not None
        sweep.search(lambda point: point.config.optim.lr)

    search("hydra.sweeper.n_trials=2")
    with pytest.raises(UserError, match=r"were made with trainer.steps=6, and this command has trainer.steps=7"):
        search("trainer.steps=7", "hydra.sweeper.n_trials=4")
    search("launch.device=cpu", "hydra.sweeper.n_trials=3")


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install -e '.\[sweep\]'"):
        read_sweep(["hydra/sweeper=optuna", "optim.lr=1e-3,1e-2"])


def test_inside_torchrun_it_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert main(["-m", "trainer.seed=range(30)"]) == 78
    printed = capsys.readouterr()
    assert "python train.py -m launch=local launch.processes=4 ..." in printed.err
    assert printed.out == "", "nothing is composed before, or announced by each process"


@pytest.mark.parametrize("more", [[], ["dry_run=true"]], ids=str)
def test_a_search_is_no_array_job(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch=slurm", "optim.lr=1e-3,1e-2", "hydra/sweeper=optuna", "trainer.eval_every=5", *more]
    assert main(["-m", *words]) == 78
    assert "sbatch ... --wrap" in capsys.readouterr().err


@pytest.mark.parametrize("dry_run", ["slurm.dry_run=true", "dry_run=true"])
@pytest.mark.parametrize("swept", ["launch.processes=1,2", "slurm.qos=null,a"])
def test_the_runs_of_an_array_job_ask_for_the_same(
    swept: str, dry_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "launch=slurm", "launch.device=cpu", dry_run, swept]) == 78
    shown = capsys.readouterr()
    key, _, values = swept.partition("=")
    assert f"{key} is {values.replace(',', ' in one run and ')} in another" in shown.err
    assert f"{key}={values.partition(',')[0]} run.name=OTHER" in shown.err
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Commands of Slurm that do as ``scripts`` say."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_while_squeue_does_not_answer_nothing_is_submitted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, submitted = tmp_path / "runs", tmp_path / "submitted"
    fake_slurm(tmp_path / "bin", monkeypatch, squeue="exit 1", sbatch=f"echo x >> {submitted}; echo 17")
    words = ["launch=slurm", "launch.device=cpu", "trainer.seed=1,2", f"run.dir={runs}"]
    assert main(["-m", *words]) == 0
    assert f"serried status run.dir={runs}/sweep-seed" in capsys.readouterr().out
    assert submitted.read_text() == "x\n"
    for again in (["-m", *words], [*words[:2], f"run.dir={runs}/seed-2"]):
        assert main(again) == 78
        told = capsys.readouterr().err
        assert "squeue does not answer, and job 17_" in told
        assert len(told.splitlines()) == 1
    assert submitted.read_text() == "x\n"


def test_a_look_at_the_nodes_does_not_wait_for_squeue_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("serried.launch.slurm._SILENT_SECONDS", 0)
    monkeypatch.setattr("serried.launch.slurm._LOOK_SECONDS", 0.01)
    cancelled = tmp_path / "cancelled"
    fake_slurm(tmp_path / "bin", monkeypatch, squeue="exit 1", sbatch="echo 17", scancel=f"echo $1 > {cancelled}")
    assert serried(["preflight", "launch=slurm", "launch.device=cpu", f"run.dir={tmp_path / 'run'}"]) == 78
    assert "squeue has not answered for 0 s, so job 17 is cancelled" in capsys.readouterr().err
    assert cancelled.read_text() == "17\n"


def test_the_table_has_the_best_first_and_what_never_trained_last() -> None:
    outcomes = [
        Outcome(Path("a"), {"optim.lr": "0.0123456789"}, "finished", 6, loss=2.0, validation_loss=3.0),
        Outcome(Path("b"), {"optim.lr": "0.2"}, "failed", 3),
        Outcome(Path("c"), {"optim.lr": "0.3"}, "finished", 6, loss=1.0),
        Outcome(Path("d"), {"optim.lr": "0.4"}, "stopped", 4, loss=9.0, validation_loss=2.5, tokens_per_second=1234.5),
    ]
    rows = [line.split() for line in table(["optim.lr"], outcomes).splitlines()]
    assert rows == [
        ["lr", "loss", "validation", "tok/s", "state", "folder"],
        ["0.4", "9.0000", "2.5000", "1,234", "stopped", "at", "4", "d"],
        ["0.0123457", "2.0000", "3.0000", "-", "finished", "a"],
        ["0.3", "1.0000", "-", "-", "finished", "c"],
        ["0.2", "-", "-", "-", "failed", "at", "3", "b"],
    ]


def test_the_report_compares_what_has_begun_and_may_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = read_sweep(["trainer.seed=1,2,3", f"run.dir={tmp_path}"])
    for point, loss in zip(sweep.points[:2], (2.0, 1.0), strict=True):
        run_dir = point.config.run.dir
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").write_text(json.dumps({"event": "eval", "set": "validation", "loss": loss}) + "\n")
        (run_dir / "status.json").write_text(
            json.dumps({"state": "finished", "step": 6, "reason": None, "exit_code": 0})
        )
    outcomes = [read_outcome(point.config.run.dir, point.values) for point in sweep.points]
    compared: list[tuple[list[str], Path]] = []
    summarize(sweep, outcomes, lambda folders, out: compared.append(([folder.name for folder in folders], out)))
    assert compared == [(["seed-2", "seed-1"], tmp_path / "sweep-seed" / "report.html")]
    assert "report.html" in capsys.readouterr().out

    for error in (OSError(28, "No space left on device"), KeyError("of the page's own")):

        def fails(*_: object, error: Exception = error) -> None:
            raise error

        summarize(sweep, outcomes, fails)
        printed = capsys.readouterr().out
        assert "WARNING    no report: " in printed
        assert "report.html" not in printed.splitlines()[-1]


def test_status_writes_the_table_and_the_report_of_a_sweep_anew(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run_dir = tmp_path / "sweep-lr", tmp_path / "a"
    assert run_here(tiny_overrides(text, run_dir, "trainer.steps=2")).code == 0
    noted = Outcome(run_dir, {"optim.lr": "0.1"}, "queued", time=0.0)
    write_summary(folder, ["optim.lr"], [noted])
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert serried(["status", f"run.dir={folder}"]) == 0
        assert summary(folder)["a"]["state"] == "queued", "whoever is at it writes it"
    capsys.readouterr()
    assert serried(["status", f"run.dir={folder}"]) == 0
    assert capsys.readouterr().out.endswith(f"files      {folder}: sweep.json, sweep.csv, report.html\n")
    assert summary(folder)["a"]["state"] == "finished"
    assert "finished" in (folder / "sweep.csv").read_text()
    assert (folder / "report.html").stat().st_size > 1000


def test_status_shows_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep-lr"
    write_summary(folder, ["optim.lr"], [Outcome(tmp_path / "a", {"optim.lr": "0.1"}, "failed", reason="why")])
    assert serried(["status", f"run.dir={folder}"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"sweep  {folder}: 0 of 1 runs finished"
    assert shown[2].split()[:2] == ["0.1", "-"]
