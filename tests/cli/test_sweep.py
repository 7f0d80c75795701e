"""``-m`` as it is typed: grids and searches, in real processes that are killed and resumed, and as decisions."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution

from serried.cli import main as serried
from serried.configs.errors import EXIT_FAILED, EXIT_MISTAKE, EXIT_STOPPED, UserError
from serried.launch.local.processes import NotedSignals
from serried.launch.sweep.grid import read_sweep
from serried.launch.sweep.optuna_search import Search
from serried.launch.sweep.points import Point
from serried.launch.sweep.sweep_table import Outcome, outcome_of, read_outcome, table, write_summary
from serried.launch.sweep.train_sweep import run_sweep, summarize
from serried.program import main
from testing.disturb import is_alive
from testing.forked_runs import torchruns_variables
from testing.rank_pool import ROOT
from testing.runs import losses, metrics, run_here, steps_saved, tiny_overrides
from tests.support.slurm import wait_for

pytestmark = pytest.mark.timeout(600)

_LONG = ("trainer.steps=40", "checkpoint.every=2")
_TWO_PROCESSES = ("launch=local", "launch.processes=2", "launch.device=cpu")
_SPACE = ("optim.lr=tag(log, interval(1e-5, 1e-2))", "schedule=cosine,constant", "trainer.eval_every=3")


class Sweep:
    """A sweep in processes of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), "-m", *words],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def processes(self) -> list[int]:
        """Return its process and all that it started, itself first."""
        found = [self.process.pid]
        for pid in found:
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):
                    found += [int(child) for child in path.read_text().split()]
        return found

    def kill(self) -> None:
        """Kill all processes at once with SIGKILL."""
        pids = self.processes()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        wait_for(lambda: not any(is_alive(pid) for pid in pids), "all to be dead")

    def end(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=400)
        return self.process.returncode, stdout, stderr


@pytest.fixture
def sweeps() -> Iterator[list[Sweep]]:
    """The sweeps that a test starts, none of which outlives it."""
    started: list[Sweep] = []
    yield started
    for each in started:
        if each.process.poll() is None:
            each.kill()


def steps_of(run_dir: Path) -> int:
    """Return how many steps a run has logged."""
    try:
        return len(metrics(run_dir))
    except FileNotFoundError:
        return 0


def summary(folder: Path) -> dict[str, dict[str, object]]:
    """Return the runs in ``sweep.json`` by the name of their folder, in its order."""
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    return {Path(run["run_dir"]).name: run for run in runs}


# Whole sweeps


@pytest.mark.slow
def test_stopped_grid_resumes_and_failed_run_does_not_end_it(text: Path, tmp_path: Path, sweeps: list[Sweep]) -> None:
    home = tmp_path / "runs"
    words = tiny_overrides(text, home, "model.vocab_size=8,300", *_LONG)
    second = home / "vocab_size-300"

    sweeps.append(Sweep(tmp_path, *words))
    wait_for(lambda: steps_of(second) > 1, "the second run to train")
    sweeps[-1].process.terminate()
    code, stdout, _ = sweeps[-1].end()
    assert code == EXIT_STOPPED
    assert "stopped    SIGTERM: 0 of 2 runs are finished; run the same command to resume" in stdout
    assert read_outcome(second, {}).state == "stopped"
    stopped_at = steps_saved(second)[-1]

    sweeps.append(Sweep(tmp_path, *words))
    code, stdout, stderr = sweeps[-1].end()
    assert code == EXIT_MISTAKE
    assert "run 2/2    vocab_size=300: resumes in" in stdout
    assert [line["resumed_from"] for line in metrics(second, "start")] == [None, stopped_at]
    assert stderr.startswith(f"failed: {home}/vocab_size-8: ")
    assert len(stderr.splitlines()) == 1
    states = [(name, run["state"]) for name, run in summary(home / "sweep-vocab_size").items()]
    assert states == [("vocab_size-300", "finished"), ("vocab_size-8", "failed")]
    rows = (home / "sweep-vocab_size" / "sweep.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["model.vocab_size", "300", "8"]
    alone = tmp_path / "alone"
    assert run_here(tiny_overrides(text, alone, "model.vocab_size=300", *_LONG)).code == 0
    assert losses(second) == pytest.approx(losses(alone))


@pytest.mark.slow
def test_killed_search_resumes_and_suggests_what_an_uninterrupted_one_does(
    text: Path, tmp_path: Path, sweeps: list[Sweep]
) -> None:
    words = tiny_overrides(text, tmp_path / "runs", *_SPACE, "search.trials=3", *_LONG, "trainer.eval_every=20")
    folder = tmp_path / "runs" / "search-lr-schedule"
    sweeps.append(Sweep(tmp_path, *words))
    wait_for(lambda: steps_of(folder / "trial-1") > 3 and len(steps_saved(folder / "trial-1")) > 1, "trial 1")
    sweeps[-1].kill()
    killed_at = steps_saved(folder / "trial-1")[-1]

    sweeps.append(Sweep(tmp_path, *words))
    code, stdout, stderr = sweeps[-1].end()
    assert (code, stderr) == (0, ""), stdout
    assert [line["resumed_from"] for line in metrics(folder / "trial-1", "start")] == [None, killed_at]
    runs = summary(folder)
    assert {run["state"] for run in runs.values()} == {"finished"}
    best = {name: min(line["loss"] for line in metrics(folder / name, "eval")) for name in runs}
    assert {name: run["validation_loss"] for name, run in runs.items()} == best
    again = tried(tmp_path / "again", lambda point: best[point.name], 3, *_SPACE)
    assert [again[name] for name in runs] == [run["values"] for run in runs.values()]


@pytest.mark.slow
def test_second_interrupt_ends_a_sweep_without_saving(text: Path, tmp_path: Path, sweeps: list[Sweep]) -> None:
    slow_step = ("trainer.global_batch=100000", "launch.stop_timeout_seconds=300")
    words = tiny_overrides(text, tmp_path / "runs", "trainer.seed=1,2", *slow_step, *_TWO_PROCESSES)
    sweeps.append(Sweep(tmp_path, *words))
    wait_for(lambda: (tmp_path / "runs" / "seed-1" / "metrics.jsonl").exists(), "the first run to train")
    started = sweeps[-1].processes()
    assert len(started) >= 4, "the sweep, its run's launcher and two ranks"

    def interrupted() -> bool:
        with suppress(ProcessLookupError):
            sweeps[-1].process.send_signal(signal.SIGINT)
        return sweeps[-1].process.poll() is not None

    wait_for(interrupted, "the sweep to end")
    code, stdout, _ = sweeps[-1].end()
    assert code == EXIT_STOPPED, stdout
    wait_for(lambda: not any(is_alive(pid) for pid in started), "all to end")


@pytest.mark.slow
def test_killed_sweep_leaves_no_run_and_a_second_one_is_refused(
    text: Path, tmp_path: Path, sweeps: list[Sweep]
) -> None:
    words = tiny_overrides(text, tmp_path / "runs", "trainer.seed=1,2", *_LONG)
    first = tmp_path / "runs" / "seed-1"
    sweeps.append(Sweep(tmp_path, *words))
    wait_for(lambda: (tmp_path / "runs" / "sweep-seed" / "sweep.json").exists(), "the sweep to start")
    with pytest.raises(UserError, match=r"another process is running this sweep.* use run.dir=OTHER"):
        run_sweep(read_sweep(words), lambda *_: None)
    wait_for(lambda: steps_of(first) > 1, "the first run to train")
    run = sweeps[-1].processes()[1]
    sweeps[-1].process.kill()
    sweeps[-1].process.communicate()
    wait_for(lambda: not is_alive(run), "the run to save and stop")
    assert read_outcome(first, {}).state == "stopped"


@pytest.mark.slow
def test_grid_trains_every_run_and_status_updates_its_table(
    text: Path, tmp_path: Path, sweeps: list[Sweep], capsys: pytest.CaptureFixture[str]
) -> None:
    words = tiny_overrides(text, tmp_path / "runs", "trainer.seed=1,2", "trainer.steps=2")
    sweeps.append(Sweep(tmp_path, *words))
    code, stdout, stderr = sweeps[-1].end()
    assert (code, stderr) == (0, ""), stdout
    folder, run_dir = tmp_path / "runs" / "sweep-seed", tmp_path / "runs" / "seed-1"
    assert {run["state"] for run in summary(folder).values()} == {"finished"}
    assert (folder / "report.html").stat().st_size > 1000

    write_summary(folder, ["trainer.seed"], [Outcome(run_dir, {"trainer.seed": "1"}, "queued", time=0.0)])
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert serried(["status", f"run.dir={folder}"]) == 0
        assert summary(folder)["seed-1"]["state"] == "queued", "the process that holds the lock will write it"
    capsys.readouterr()
    assert serried(["status", f"run.dir={folder}"]) == 0
    assert capsys.readouterr().out.endswith(f"files      {folder}: sweep.json, sweep.csv, report.html\n")
    assert summary(folder)["seed-1"]["state"] == "finished"
    assert "finished" in (folder / "sweep.csv").read_text()


# What happens to the runs, without training them


Fate = Callable[[Point], Outcome]


def conduct(words: list[str], fate: Fate) -> int:
    """Run the sweep of ``words``, in which each run ends as ``fate`` says. Return the exit code."""

    def train(point: Point, _: NotedSignals) -> Outcome:
        return fate(point)

    return run_sweep(read_sweep(words), lambda *_: None, train)


def ended(point: Point, state: str = "finished", **more: object) -> Outcome:
    """Return the outcome of a run, and leave its files as the run would."""
    from serried.configs.compose import config_yaml

    run_dir, loss, step = point.config.run.dir, more.get("validation_loss"), int(str(more.get("step", 6)))
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(config_yaml(point.config))
    status = {"state": state, "step": step, "reason": more.get("reason"), "exit_code": more.get("exit_code", 0)}
    (run_dir / "status.json").write_text(json.dumps(status))
    accuracy = more.get("reward_accuracy")
    event = {"event": "eval", "step": step, "set": "validation", "loss": loss, "reward_accuracy": accuracy}
    (run_dir / "metrics.jsonl").write_text(json.dumps(event) + "\n")
    return outcome_of(point)


def tried(
    run_dir: Path, loss: Callable[[Point], float | None], trials: int, *words: str
) -> dict[str, dict[str, object]]:
    """Search as ``words`` say, with the result ``loss`` for each trial (None: it failed). Return the values by name."""

    def fate(point: Point) -> Outcome:
        result = loss(point)
        return ended(point, "finished" if result is not None else "failed", validation_loss=result)

    base = ["trainer.steps=6", "trainer.eval_every=3", f"run.dir={run_dir}", f"search.trials={trials}"]
    sweep = read_sweep([*base, *words])
    run_sweep(sweep, lambda *_: None, lambda point, _: fate(point))
    names = sorted(summary(sweep.folder), key=lambda name: int(name.removeprefix("trial-")))
    return {name: summary(sweep.folder)[name]["values"] for name in names}  # type: ignore[misc]


def by_rate(point: Point) -> float:
    return abs(point.config.optim.lr - 1e-3) + len(point.config.schedule.name)


def suggested(
    trials: int, loss: Callable[[Mapping[str, str]], float], earlier: Mapping[str, Mapping[str, str]], seed: int = 0
) -> dict[str, Mapping[str, str]]:
    """Return the values of each trial of a search, of which ``earlier`` were made by an earlier start."""
    found: dict[str, Mapping[str, str]] = {}

    def evaluate(point: Point) -> float:
        found[point.name] = point.values
        return loss(point.values)

    space = {"rate": FloatDistribution(1e-5, 1e-2, log=True), "schedule": CategoricalDistribution(["cosine", "wsd"])}
    parameters = {name: {**values, "rate": float(values["rate"])} for name, values in earlier.items()}
    builder = SimpleNamespace(point=lambda name, values: Point(name, values, (), None))
    Search(space, trials, "tpe", seed, parameters, builder)(evaluate)
    return found


def test_interrupted_search_suggests_what_an_uninterrupted_one_does() -> None:
    def loss(values: Mapping[str, str]) -> float:
        return abs(float(values["rate"]) - 1e-3) + len(values["schedule"])

    at_once = suggested(13, loss, {})
    in_parts: dict[str, Mapping[str, str]] = {}
    for trials in range(1, 14):
        in_parts = suggested(trials, loss, in_parts)
        assert len(in_parts) == trials
    assert in_parts == at_once
    assert len({str(values) for values in at_once.values()}) == 13
    assert suggested(1, loss, {}, seed=1)["trial-0"] != at_once["trial-0"]
    other_results = suggested(13, lambda values: -loss(values), {})
    differs = [at_once[name] != other_results[name] for name in at_once]
    assert differs == [False] * 10 + [True] * 3, "the sampler uses results from the eleventh trial on"


def test_failed_trial_is_tried_again_with_its_values(tmp_path: Path) -> None:
    names: list[str] = []

    def fails_at_first(point: Point) -> float | None:
        names.append(point.name)
        return None if names.count("trial-1") == 1 and point.name == "trial-1" else 1.0

    first = tried(tmp_path, fails_at_first, 2, *_SPACE)
    assert tried(tmp_path, fails_at_first, 3, *_SPACE).items() >= first.items()
    assert names == ["trial-0", "trial-1", "trial-1", "trial-2"]


def test_search_ends_when_no_values_are_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = tried(tmp_path, by_rate, 9, "schedule=cosine,constant", "trainer.seed=1,2", "trainer.eval_every=3")
    assert sorted(str(each) for each in values.values()) == sorted({str(each) for each in values.values()})
    assert len(values) == 4
    assert "ended after 4 of 9 trials" in capsys.readouterr().out


def test_values_that_do_not_fit_are_replaced(tmp_path: Path) -> None:
    heads = [values["model.heads"] for values in tried(tmp_path, by_rate, 3, "model.heads=interval(1,4)").values()]
    assert sorted(heads) == ["1", "2", "4"], "3 does not divide the width"


def test_trials_outside_the_space_are_refused(tmp_path: Path) -> None:
    tried(tmp_path, by_rate, 3, *_SPACE)
    with pytest.raises(UserError, match=r"trials outside this search space, such as optim.lr=.*with run.dir=OTHER"):
        tried(tmp_path, by_rate, 4, "optim.lr=interval(0.5,1)", *_SPACE[1:])


def test_three_runs_that_fail_alike_end_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun: list[str] = []

    def fails(point: Point) -> Outcome:
        begun.append(point.name)
        return Outcome(point.config.run.dir, point.values, "failed", reason=f"port {len(begun)}", exit_code=70)

    assert conduct([f"run.dir={tmp_path}", "trainer.seed=range(5)"], fails) == EXIT_FAILED
    assert begun == ["seed-0", "seed-1", "seed-2"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("failed: 3 runs in a row failed for the same reason before their first step")


def test_finished_runs_are_skipped_unless_a_setting_changed(tmp_path: Path) -> None:
    begun: list[str] = []

    def finishes(point: Point) -> Outcome:
        begun.append(point.name)
        return ended(point)

    words = [f"run.dir={tmp_path}", "trainer.seed=1,2", "trainer.steps=6"]
    for more in ([], ["launch.device=cpu"], ["optim.weight_decay=0.5"]):
        assert conduct([*words, *more], finishes) == 0
    assert begun == ["seed-1", "seed-2"] * 2


def test_finished_runs_are_skipped_although_they_chose_settings_themselves(tmp_path: Path) -> None:
    begun: list[str] = []

    def finishes(point: Point) -> Outcome:
        begun.append(point.name)
        chosen = {"micro_batch": 2, "steps": 4}
        trainer = point.config.trainer.model_copy(update=chosen)
        return ended(replace(point, config=point.config.model_copy(update={"trainer": trainer})), step=4)

    words = [f"run.dir={tmp_path}", "trainer.seed=1,2", "trainer.micro_batch=auto", "trainer.epochs=1"]
    for more in ([], [], ["trainer.epochs=2"]):
        assert conduct([*words, *more], finishes) == 0
    assert begun == ["seed-1", "seed-2"] * 2


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("trainer.stop_at=2", "run the same command without trainer.stop_at, or with a higher value, to resume"),
        ("trainer.max_minutes=1", "run the same command to resume"),
    ],
)
def test_sweep_of_stopped_runs_ends_with_what_to_type(
    reason: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stops(point: Point) -> Outcome:
        return Outcome(point.config.run.dir, point.values, "stopped", 2, reason, 75, validation_loss=1.0)

    assert conduct(["optim.lr=1e-3,3e-3", f"run.dir={tmp_path}"], stops) == EXIT_STOPPED
    assert capsys.readouterr().out.splitlines()[-1] == f"stopped    {reason}: 0 of 2 runs are finished; {expected}"


def test_search_maximises_the_metric_of_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[float | None] = []

    def train(point: Point, _: NotedSignals) -> Outcome:
        ended(point, validation_loss=1.0, reward_accuracy=0.5 if point.name == "trial-0" else 0.75)
        told.append(outcome_of(point).to_minimise)
        return outcome_of(point)

    metric = (
        "recipe=dpo", "data.path=x", "checkpoint.best_metric=reward_accuracy", "checkpoint.best_mode=max",
        "trainer.steps=6", "search.trials=2",
    )  # fmt: skip
    sweep = read_sweep([f"run.dir={tmp_path}", *metric, *_SPACE])
    run_sweep(sweep, lambda *_: None, train)
    assert told == [-0.5, -0.75]
    assert list(summary(sweep.folder)) == ["trial-1", "trial-0"]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["lr", "schedule", "loss", "validation", "reward_accuracy", "tok/s", "state", "folder"] in rows
    outcomes = [replace(Outcome(tmp_path, {}, metric="accuracy"), unit="samples", tokens_per_second=5.0)]
    assert "accuracy  samples/s  state" in table(["optim.lr"], outcomes)


# The words of a sweep


def test_grid_has_a_run_for_every_combination() -> None:
    sweep = read_sweep(["optim.lr=1e-3,3e-3", "model=tiny", "trainer.seed=range(1,4)", "run.dir=here"])
    assert sweep.runs == len(sweep.points) == 6
    assert sweep.keys == ("optim.lr", "trainer.seed")
    assert str(sweep.folder) == "here/sweep-lr-seed"
    assert {str(point.config.run.dir) for point in sweep.points} >= {"here/lr-0.001-seed-1", "here/lr-0.003-seed-3"}
    assert {point.config.optim.lr for point in sweep.points} == {1e-3, 3e-3}


def test_run_folders_are_beside_the_folder_of_the_sweep() -> None:
    sweep = read_sweep(["run.name=mine", "schedule=glob(c*)", "optim.betas=[0.9,0.95],[0.9,0.99]"])
    assert str(sweep.folder) == "runs/mine-sweep-schedule-betas"
    assert [str(point.config.run.dir) for point in sweep.points] == [
        "runs/mine-schedule-constant-betas-0.9_0.95",
        "runs/mine-schedule-constant-betas-0.9_0.99",
        "runs/mine-schedule-cosine-betas-0.9_0.95",
        "runs/mine-schedule-cosine-betas-0.9_0.99",
    ]


def test_corners_of_a_search_are_checked_before_it_starts() -> None:
    words = ["search.trials=7", "trainer.eval_every=10", "schedule=cosine,wsd"]
    sweep = read_sweep([*words, "optim.lr=interval(1e-5,1e-2)", "model.layers=interval(2,9)"])
    assert sweep.runs == 7
    corners = [tuple(point.values.values()) for point in sweep.points]
    assert corners[0] == ("cosine", "1e-05", "2")
    assert set(corners[1:]) == {("wsd", "1e-05", "2"), ("cosine", "0.01", "2"), ("cosine", "1e-05", "9")}
    with pytest.raises(UserError, match=r"model.heads=3 does not divide model.dim=128"):
        read_sweep([*words, "model.heads=4,3"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trainer.seed=1", "but no key has several"),
        ("trainer.seed=1,1", "would use runs/tiny-seed-1"),
        ("trainer.sed=1,2", "did you mean trainer.seed=1,2?"),
        ("trainer.seed=range(5000)", "more than 1000"),
        ("trainer.seed=range(1,10000000000)", "has more than 1000 values"),
        (
            "optim.lr=range(1,1e9)",
            "optim.lr=range(1,1e9) has more than 1000 values; give fewer values, or search a range",
        ),
        ("optim.lr=shuffle(range(1,1e9))", "has more than 1000 values"),
        ("optim.lr=range(1,2,1e-300)", "has more than 1000 values"),
        ("optim.lr=range(1,inf)", "has more than 1000 values"),
        ("trainer.seed=range(5,1)", "has no values"),
        ("trainer.seed=range(1,5,0)", "must not be zero"),
        ("trainer.seed=range(1,", "is not a valid list of values"),
        ("trainer.seed=1,2]", "is not a valid list of values to sweep over"),
        ("schedule=cosine,wsd]", "is not a valid list of values to sweep over"),
        ("schedul=cosine,wsd", "did you mean schedule=cosine,wsd?"),
        ("optim.lr=interval(1,2)", "add search.trials=20"),
        ("run.dir=a,b", "cannot be swept"),
        ("launch=local,torchrun", "cannot be swept"),
        ("hydra.sweeper.n_trials=5 optim.lr=1,2", "-m search.trials=20"),
        ("search.trials=20", "needs a key with several values"),
        ("search.seed=1 optim.lr=1e-3,1e-2", "needs the number of trials: search.trials=20"),
        ("search.trials=x optim.lr=1,2", "is not a whole number of at least 1; e.g. search.trials=20"),
        ("search.trials=2 search.seed=-1 optim.lr=1,2", "search.seed=-1 is not a whole number of at least 0"),
        (
            "search.trials=2 search.trial=3 optim.lr=1,2",
            "unknown key search.trial=3; the keys of a search are search.trials=20",
        ),
        ("search.trials=2 search.sampler=grid optim.lr=1,2", "search.sampler=grid is not one of tpe, random"),
        ("search.trials=2 optim.lr=1e-3,1e-2 trainer.eval_every=0", "use trainer.eval_every="),
        (
            "search.trials=2 optim.lr=1e-3,1e-2 data.validation_fraction=0 data.validation.v.name=stdlib",
            "search.trials=2 needs validation data held out from training",
        ),
        ("search.trials=2 optim.lr=interval(-1,1)", "out of range"),
        ("search.trials=2 optim.lr=interval(3,1)", "`low <= high` must hold, but got (low=3.0, high=1.0)"),
        ("search.trials=2 optim.lr=tag(log,interval(0,1))", "`low > 0` must hold"),
        ("search.trials=2 optim.lr=glob(*)", "optim.lr=glob(*) has no values"),
        ("search.trials=2 optim.lr=[1],[2]", "is not a number"),
        ("search.trials=2 run.dir=a,b", "run.dir=a,b cannot be swept"),
    ],
)
def test_mistaken_sweep_is_refused_in_one_line(words: str, expected: str) -> None:
    with pytest.raises(UserError) as refused:
        read_sweep(words.split())
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_all_mistakes_of_a_sweep_are_reported_at_once() -> None:
    with pytest.raises(UserError) as refused:
        read_sweep(["search.trials=x", "optim.lr=interval(3,1)", "trainer.seed=1,2]", "run.dir=a,b", "optim.lrr=2"])
    lines = str(refused.value).splitlines()[1:]
    parts = ["trainer.seed=1,2]", "run.dir=a,b", "search.trials=x", "interval(3,1)", "optim.lrr=2"]
    assert [part in line for part, line in zip(parts, lines, strict=True)] == [True] * 5


def test_spaces_and_pluses_around_a_key_are_ignored_and_the_last_value_is_used() -> None:
    sweep = read_sweep([" optim.lr=1e-3,3e-3", "trainer.seed=7", "+trainer.seed = 1,2"])
    assert sweep.keys == ("optim.lr", "trainer.seed")
    assert sweep.runs == 4


def test_missing_optuna_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "serried.launch.sweep.optuna_search", raising=False)
    with pytest.raises(UserError, match=r"pip install -e '.\[sweep\]'"):
        read_sweep(["search.trials=2", "optim.lr=1e-3,1e-2"])


def test_dry_run_lists_the_runs_below_the_plan_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "dry_run=true", "launch.device=cpu", "optim.lr=1e-3,3e-3", "run.name=mine"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("model ")
    assert printed[-3].startswith("sweep      2 runs: optim.lr; ")
    assert printed[-2:] == ["run 1/2    lr=0.001: runs/mine-lr-0.001", "run 2/2    lr=0.003: runs/mine-lr-0.003"]
    words = ["search.trials=7", "trainer.eval_every=5", "optim.lr=interval(1e-5,1e-2)"]
    assert main(["-m", "dry_run=true", "launch.device=cpu", *words]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("sweep      7 runs: optim.lr; ")
    assert printed[-1].endswith("the plan above is for one of them: lr=1e-05")
    assert any("runs/tiny-search-lr/trial-N" in line for line in printed)


@pytest.mark.parametrize("more", [[], ["dry_run=true"]], ids=str)
def test_search_as_an_array_job_is_refused(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "launch=slurm", "optim.lr=1e-3,1e-2", "search.trials=3", "trainer.eval_every=5", *more]) == 78
    assert "sbatch ... --wrap" in capsys.readouterr().err


def test_sweep_inside_torchrun_is_refused_with_the_command_to_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in torchruns_variables(0, 4, 29500).items():
        monkeypatch.setenv(name, value)
    assert main(["-m", "trainer.seed=range(30)"]) == 78
    printed = capsys.readouterr()
    assert "python train.py -m launch=local launch.processes=4 ..." in printed.err
    assert printed.out == "", "nothing is composed before, or announced by each process"


@pytest.mark.parametrize(
    ("words", "another"), [("slurm.dry_run=true", "run.name=OTHER"), ("dry_run=true run.dir=a", "run.dir=OTHER")]
)
@pytest.mark.parametrize("swept", ["launch.processes=1,2", "slurm.qos=null,a"])
def test_runs_of_an_array_job_must_ask_for_the_same_nodes(
    swept: str, words: str, another: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "launch=slurm", "launch.device=cpu", *words.split(), swept]) == 78
    shown = capsys.readouterr()
    key, _, values = swept.partition("=")
    assert f"{key} is {values.replace(',', ' in one run and ')} in another" in shown.err
    assert f"{key}={values.partition(',')[0]} {another}" in shown.err
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Commands of Slurm that do as ``scripts`` say."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_nothing_is_submitted_twice_while_squeue_does_not_answer(
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
        assert "squeue does not answer, so job 17_" in told
        assert len(told.splitlines()) == 1
    assert submitted.read_text() == "x\n"


def test_preflight_stops_waiting_if_squeue_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("serried.launch.slurm.batch_script._SILENT_SECONDS", 0)
    monkeypatch.setattr("serried.launch.slurm.batch_script._LOOK_SECONDS", 0.01)
    cancelled = tmp_path / "cancelled"
    fake_slurm(tmp_path / "bin", monkeypatch, squeue="exit 1", sbatch="echo 17", scancel=f"echo $1 > {cancelled}")
    assert serried(["preflight", "launch=slurm", "launch.device=cpu", f"run.dir={tmp_path / 'run'}"]) == 78
    assert "squeue has not answered for 0 s, so job 17 is cancelled" in capsys.readouterr().err
    assert cancelled.read_text() == "17\n"


# The table and the report


def test_table_has_the_best_run_first_and_untrained_runs_last() -> None:
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


def test_report_compares_started_runs_and_may_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        assert "WARNING    cannot write the report: " in printed
        assert "report.html" not in printed.splitlines()[-1]


def test_status_shows_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep-lr"
    write_summary(folder, ["optim.lr"], [Outcome(tmp_path / "a", {"optim.lr": "0.1"}, "failed", reason="why")])
    assert serried(["status", f"run.dir={folder}"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"sweep  {folder}: 0 of 1 runs finished"
    assert shown[2].split()[:2] == ["0.1", "-"]
