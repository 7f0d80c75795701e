"""A replica that is lost does not end training: the others continue from memory, on the same loss curve."""

import os
import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

import serried
from serried.configs.errors import EXIT_STOPPED
from serried.program import main
from serried.runtime.process import is_running
from testing.rank_pool import Cluster
from testing.recovery_storm import LAYOUTS, SEVER, Death, Ended, faults, run, run_nodes, words
from testing.runs import ObservedRecipe, losses, metrics, run_here, status, steps_saved, tiny_overrides

SHORT = ["trainer.steps=6", "trainer.eval_every=0", "checkpoint.every=3"]
Undisturbed = Callable[..., dict[int, float]]


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Losses by step of a run that loses nothing."""

    @cache
    def trained(layout: str, *more: str) -> dict[int, float]:
        folder = tmp_path_factory.mktemp("undisturbed")
        ended = run(words(layout, text, folder / "run", *more), [], folder / "out")
        assert ended.code == 0, ended.printed
        return {line["step"]: line["loss"] for line in metrics(folder / "run")}

    return trained


def recovers(ended: Ended, run_dir: Path, expected: dict[int, float], deaths: Sequence[Death], every: int = 4) -> None:
    wrong, _ = faults(ended, run_dir, expected, len([death for death in deaths if death.kind]), every)
    assert not wrong, ended.printed


class Counter(serried.Callback):
    """Counts logged steps."""

    def __init__(self) -> None:
        self.steps = 0

    def on_start(self, run: Any) -> None:
        run.log({"before": self.steps})

    def on_step(self, run: Any) -> None:
        self.steps += 1
        run.log({"counted": self.steps})

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]


def test_run_whose_rank_0_is_killed_finishes_on_the_same_curve(text: Path, tmp_path: Path) -> None:
    """The other rank prints, records and calls the callback from then on, and has the only replica."""
    mixture = ["data=mixture", "data.path=null", "checkpoint.every=2", "checkpoint.mode=sync"]
    for name, path, weight in (("web", text, 0.7), ("code", text / "07.txt", 0.3)):
        key = f"data.sources.{name}"
        mixture += [f"{key}.name=text", f"{key}.path={path}", f"{key}.weight={weight}"]
    argv, deaths = words("ddp x2", text, tmp_path / "run", *SHORT, *mixture), [Death(0, "vote", 4)]
    ended = run(argv, deaths, tmp_path / "out", ObservedRecipe, callbacks=[Counter])
    alone = [word for word in argv if not word.startswith(("launch", "recover", "parallel"))]
    assert run_here([*alone, f"run.dir={tmp_path / 'alone'}"]).code == 0
    recovers(ended, tmp_path / "run", dict(enumerate(losses(tmp_path / "alone"), start=1)), deaths, 0)
    assert "lost       " in ended.printed
    assert "(rank 0) in step 4: the process of rank 0 has ended; 1 of 2 replicas continues" in ended.printed
    assert "finished   6 steps" in ended.printed
    assert [line["ranks"] for line in metrics(tmp_path / "run", "lost")] == [[0]]
    logged = [(line["step"], line["metrics"]) for line in metrics(tmp_path / "run", "log")]
    counted = [(step, values["counted"]) for step, values in logged if "counted" in values]
    assert counted == [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (6, 5)], "its state is that of the checkpoint of step 2"
    assert [(step, values["before"]) for step, values in logged if "before" in values] == [(0, 0), (3, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "deaths"),
    [
        ("ddp x3", [Death(1, "answer", 4), Death(0, "build", 2)]),
        ("hsdp 3x2", [Death(0, "commit", 2), Death(5, "form", 1)]),
    ],
)
def test_second_loss_while_the_others_recover(
    layout: str, deaths: list[Death], undisturbed: Undisturbed, text: Path, tmp_path: Path
) -> None:
    """A survivor that missed the result of the vote applies the update alone."""
    ended = run(words(layout, text, tmp_path / "run", *SHORT), deaths, tmp_path / "out")
    recovers(ended, tmp_path / "run", undisturbed(layout, *SHORT), deaths, 0)


@pytest.mark.slow
def test_frozen_rank_0_that_wakes_up_later_ends_without_touching_the_records(
    undisturbed: Undisturbed, text: Path, tmp_path: Path
) -> None:
    """The others continue after ``recover.silence_seconds``; here they wait for its end before step 4."""
    out = tmp_path / "out"
    deaths = [Death(0, "forward", 3, signal.SIGSTOP), Death(1, "data", 5, 0)]

    def wake_up() -> None:
        if not (out / "process-0").exists() or not (tmp_path / "run" / "metrics.jsonl").exists():
            return
        process = int((out / "process-0").read_text())
        if not is_running(process):
            (out / "go").touch()
        elif metrics(tmp_path / "run", "recovered"):
            os.kill(process, signal.SIGCONT)

    ended = run(words("ddp x3", text, tmp_path / "run", *SHORT), deaths, out, on_look=wake_up)
    recovers(ended, tmp_path / "run", undisturbed("ddp x3", *SHORT), deaths, 0)
    assert "(rank 0) in step 3: rank 0 has given no sign of life for 10 s" in ended.printed
    log = (tmp_path / "run" / "log" / "rank-0.log").read_text()
    assert "the other processes continue without this one" in log
    assert [line["state"] for line in metrics(tmp_path / "run", "stop")] == ["finished"]


@pytest.mark.slow
def test_node_that_is_lost_costs_its_replica(undisturbed: Undisturbed, text: Path, tmp_path: Path) -> None:
    """Each rank is on a node of its own. Rank 0 writes the records until its node is lost; the store is elsewhere."""
    argv = [word for word in words("ddp x3", text, tmp_path / "run", *SHORT) if not word.startswith("launch=")]
    argv = [word for word in argv if not word.startswith("launch.processes")]
    codes = run_nodes(argv, [Death(0, "vote", 3)], tmp_path / "out", 3)
    assert sorted(codes) == [-signal.SIGKILL, 0, 0], (tmp_path / "out" / "printed").read_text()
    expected = undisturbed("ddp x3", *SHORT)
    steps = metrics(tmp_path / "run")
    assert [line["step"] for line in steps] == list(expected)
    assert max(abs(line["loss"] / expected[line["step"]] - 1) for line in steps) < 1e-6
    assert [line["ranks"] for line in metrics(tmp_path / "run", "lost")] == [[0]]


@pytest.mark.slow
def test_run_that_cannot_continue_without_rank_0_says_why_on_the_console(text: Path, tmp_path: Path) -> None:
    deaths = [Death(0, "data", 3), Death(1, "data", 3)]
    argv = words("ddp x4", text, tmp_path / "run", *SHORT, "recover.min_replicas=3")
    ended = run(argv, deaths, tmp_path / "out")
    assert ended.code == EXIT_STOPPED, ended.printed
    assert status(tmp_path / "run")["state"] == "stopped"
    lines = [line for line in ended.printed.splitlines() if line.startswith("stopped: ")]
    assert len(lines) == 1 and "2 of 4 replicas are whole, and at least 3 must be" in lines[0], ended.printed
    assert not ended.left_behind


STATES = {
    "weight average and fp16": ("ddp x3", ["trainer.ema_decay=0.9", "precision=fp16"]),
    "experts": (
        "hsdp 2x2",
        ["model=moe_tiny", "model.expert_hidden_dim=24", "parallel.expert=2", "trainer.ema_decay=0.9"],
    ),
    "stages of a pipeline": ("hsdp 2x2", ["parallel.pipeline=2", "parallel.shard=1"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_all_state_of_a_step_is_kept(state: str, undisturbed: Undisturbed, text: Path, tmp_path: Path) -> None:
    layout, more = STATES[state]
    deaths = [Death(0, "answer", 4)]
    ended = run(words(layout, text, tmp_path / "run", *SHORT, *more), deaths, tmp_path / "out")
    recovers(ended, tmp_path / "run", undisturbed(layout, *SHORT, *more), deaths, 0)
    assert metrics(tmp_path / "run", "recovered")[0]["rolled_forward"] > 0


@pytest.mark.slow
def test_connections_that_break_often_cost_nothing_and_the_third_loss_of_a_step_ends_the_run(
    text: Path, tmp_path: Path
) -> None:
    """Both processes live on, and keep no files and tensors of earlier trainers."""
    keys = ["trainer.steps=12", "trainer.eval_every=0", "checkpoint.every=0"]
    # Not directly before a collective: Gloo may miss that a connection closes while it begins one, and waits then.
    breaks = [Death(1, "forward", number, SEVER) for number in (*range(2, 22, 2), 22, 23, 24)]
    ended = run(words("ddp x2", text, tmp_path / "run", *keys), breaks, tmp_path / "out")
    assert ended.code == EXIT_STOPPED, ended.printed
    why = "the connection to another process broke, and step 12 has failed 3 times in a row"
    assert f"stopped: {why}; run the same command to resume" in ended.printed
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["reason"]) == ("stopped", why)
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 12))
    assert [line["step"] for line in metrics(tmp_path / "run", "recovered")] == [*range(2, 12), 12, 12]
    assert not metrics(tmp_path / "run", "lost")
    assert [len(files) for files in ended.open_files] == [13, 13]
    for files, held in zip(ended.open_files, ended.held, strict=True):
        assert max(files[2:]) <= files[1], ended
        assert max(held[2:]) - held[1] < 1000, "bytes; the weights alone have 128,000"


@pytest.mark.slow
def test_run_that_is_terminated_while_it_recovers_saves_what_is_done(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    terminated = [Death(rank, "build", 2, signal.SIGTERM) for rank in (0, 2)]
    ended = run(words("ddp x3", text, run_dir, *SHORT), [Death(1, "vote", 3), *terminated], tmp_path / "out")
    assert (ended.code, ended.left_behind) == (EXIT_STOPPED, []), ended.printed
    assert "stopping   SIGTERM on all ranks: saving step 2" in ended.printed
    assert (status(run_dir)["state"], steps_saved(run_dir)) == ("stopped", [2]), ended.printed


def collectives(argv: list[str]) -> dict[str, int]:
    """Train on a node with one rank. Return the numbers of collectives of torch."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert main(argv) == 0
    return {event.key: event.count for event in profiled.key_averages() if event.key.startswith("c10d::")}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp x2", "hsdp 2x2"])
def test_step_without_a_loss_has_one_more_all_reduce(layout: str, cluster: Cluster, text: Path, tmp_path: Path) -> None:
    ranks, parallel = LAYOUTS[layout]
    counts = {}
    for mode in ("off", "memory"):
        keys = [*parallel.split(), "launch.device=cpu", "trainer.steps=3", "checkpoint.every=0"]
        keys += ["trainer.micro_batch=1", f"recover.mode={mode}"]
        argv = tiny_overrides(text, tmp_path / mode, *keys)
        answers = cluster.run(ranks, "tests.runs.test_recovery:collectives", argv=argv)
        counts[mode] = [answer.value for answer in answers]
    for without, more in zip(counts["off"], counts["memory"], strict=True):
        assert more == without | {"c10d::allreduce_": without["c10d::allreduce_"] + 3}
