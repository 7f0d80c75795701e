"""Stopping within a long step: all ranks drop it before the same micro-batch, and save the step before.

A micro-batch takes a second by the clock that decides how long steps are, unless a test says otherwise.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import serried
from serried.configs.errors import EXIT_STOPPED
from serried.configs.schema.declaration import BUILT_IN
from serried.program import main
from serried.task_class import declaration
from serried.trainer.replica_check import GoBack
from serried.trainer.step_log import StepLog
from testing.rank_pool import Cluster
from testing.runs import ObservedRecipe, checkpoint, different_tensors, metrics, status, steps_saved, tiny_overrides
from tests.support.own_task import Points

MICRO_BATCHES = 4
SECOND_OF_STEP_3 = 2 * MICRO_BATCHES + 2
LAYOUTS = {  # ranks and keys
    "ddp": (2, "parallel=ddp"),
    "fsdp": (2, "parallel=fsdp"),
    "fsdp, gathered for the step": (2, "parallel=fsdp parallel.reshard_after_forward=false"),
    "fsdp, summed after each micro-batch": (2, "parallel=fsdp parallel.sync_every_micro_batch=true"),
    "hsdp": (4, "parallel=hsdp parallel.replicate=2 parallel.shard=2"),
    "uneven": (3, f"parallel=ddp parallel.uneven=true trainer.global_batch={3 * MICRO_BATCHES + 1}"),
    "tensor": (2, "parallel.tensor=2"),
    "context": (2, "parallel.context=2"),
    "fp16 and an average": (2, "parallel=fsdp precision=fp16 precision.initial_scale=256 trainer.ema_decay=0.9"),
    "experts": (2, "parallel=fsdp parallel.expert=2 model=moe_tiny model.expert_hidden_dim=24 model.layers=2"),
    "offloaded": (2, "parallel=fsdp parallel.offload=true"),
    "Muon, whose update exchanges matrices": (2, "parallel=fsdp optim=muon"),
    "bf16 weights": (2, "parallel=fsdp precision=bf16 optim=adamw_bf16"),
}
DAILY = ("fp16 and an average",)


def arguments(text: Path, run_dir: Path, ranks: int, *more: str) -> list[str]:
    words = dict(word.split("=", 1) for word in more)
    sharing = int(words.get("parallel.tensor", 1)) * int(words.get("parallel.context", 1))
    batch = f"trainer.global_batch={MICRO_BATCHES * ranks // sharing}"
    steps = ["trainer.steps=4", "trainer.micro_batch=1", "checkpoint.every=0", "trainer.deterministic=true"]
    return tiny_overrides(text, run_dir, "model.layers=2", batch, *steps, *more)


@contextmanager
def clock_ahead() -> Iterator[list[float]]:
    """Set the clock of steps ahead by the seconds in the list."""
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    with patch("serried.trainer.monitor.step_clock.time", clock):
        yield ahead


def acts_of(ahead: list[float], asked_in: int, ask: Callable[[], None]) -> dict[int, Callable[[], None]]:
    """What this rank does in each of its micro-batches."""

    def compute(number: int) -> None:
        ahead[0] += 1
        if number == asked_in:
            ask()

    return {number: partial(compute, number) for number in range(1, 1000)}


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def train_asked(argv: list[str], asked_in: int, rank: int) -> dict[str, Any]:
    """As ``train.py`` does it; ``rank`` is asked to stop in its micro-batch number ``asked_in``."""
    made: list[ObservedRecipe] = []
    ask = terminate if int(os.environ.get("RANK", "0")) == rank else lambda: None
    with clock_ahead() as ahead:

        def make() -> ObservedRecipe:
            made.append(ObservedRecipe(acts=acts_of(ahead, asked_in, ask)))
            return made[-1]

        code = main(argv, BUILT_IN._replace(task=make))
    return {"code": code, "micro_batches": len(made[0].sample_ids)}


def is_undisturbed(run_dir: Path, undisturbed: Path) -> None:
    lines, expected = metrics(run_dir), metrics(undisturbed)
    keys = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "skipped", "scale")
    assert [[line[key] for key in keys] for line in lines] == [[line[key] for key in keys] for line in expected]
    assert not different_tensors(run_dir, undisturbed)
    ours, theirs = (json.loads((checkpoint(run) / "state.json").read_text()) for run in (run_dir, undisturbed))
    assert [ours[key] for key in ("step", "samples", "step_state")] == [
        theirs[key] for key in ("step", "samples", "step_state")
    ]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in LAYOUTS]
)
def test_request_within_a_long_step_drops_it_on_all_ranks_and_resumes_bitwise(
    layout: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    ranks, words = LAYOUTS[layout]
    argv = arguments(text, tmp_path / "run", ranks, *words.split())
    answers = cluster.run(
        ranks, "tests.runs.test_dropped_step:train_asked", argv=argv, asked_in=SECOND_OF_STEP_3, rank=ranks - 1
    )
    more = layout == "uneven"  # rank 0 has one more micro-batch in some steps, and does not vote before it
    done = [SECOND_OF_STEP_3 + 2 * more, *[SECOND_OF_STEP_3] * (ranks - 1)]
    asked = [{"code": EXIT_STOPPED, "micro_batches": count} for count in done]
    assert [answer.value for answer in answers] == asked, answers[0].printed
    why = f"SIGTERM on rank {ranks - 1}"
    said = f"stopping   {why}: step 3 is dropped after micro-batch 2 of {MICRO_BATCHES + more}, saving step 2\n"
    assert said in answers[0].printed
    assert "".join(answer.printed for answer in answers[1:]) == ""
    assert status(tmp_path / "run") == {"state": "stopped", "step": 2, "reason": why, "exit_code": EXIT_STOPPED}
    assert steps_saved(tmp_path / "run") == [2]
    for folder in ("run", "undisturbed"):
        argv = arguments(text, tmp_path / folder, ranks, *words.split())
        answers = cluster.run(ranks, "serried.program:main", arguments=argv)
        assert [answer.value for answer in answers] == [0] * ranks, answers[0].printed
    is_undisturbed(tmp_path / "run", tmp_path / "undisturbed")


class Normed(Points):
    """A model with BatchNorm, whose statistics every forward changes."""

    defaults = Points.defaults | {"trainer.micro_batch": 2, "trainer.global_batch": 2 * 2 * MICRO_BATCHES}

    def __init__(self, acts: dict[int, Callable[[], None]]) -> None:
        super().__init__()
        self._acts, self.micro_batches = acts, 0

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, self.config.dim), nn.BatchNorm1d(self.config.dim), nn.Linear(self.config.dim, 3)
        )

    def loss(self, model: nn.Module, batch: dict) -> serried.LossTerms:
        if torch.is_grad_enabled() and batch["x"].any():
            self.micro_batches += 1
            self._acts.get(self.micro_batches, lambda: None)()
        return super().loss(model, batch)


def train_normed(argv: list[str], asked_in: int) -> dict[str, int]:
    """Train with BatchNorm; rank 1 is asked to stop in its micro-batch number ``asked_in``."""
    made: list[Normed] = []
    with clock_ahead() as ahead:

        def make() -> Normed:
            ask = terminate if os.environ["RANK"] == "1" else lambda: None
            made.append(Normed(acts_of(ahead, asked_in, ask)))
            return made[-1]

        code = main(argv, declaration(Normed)._replace(task=make))
    return {"code": code, "micro_batches": made[0].micro_batches}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_statistics_of_batch_norm_are_those_of_the_step_that_is_saved(
    strategy: str, cluster: Cluster, tmp_path: Path
) -> None:
    ended = []
    for folder, asked_in in (("undisturbed", 0), ("run", SECOND_OF_STEP_3), ("run", 0)):
        argv = [f"run.dir={tmp_path / folder}", f"parallel={strategy}", "trainer.steps=4", "trainer.eval_every=0"]
        answers = cluster.run(2, "tests.runs.test_dropped_step:train_normed", argv=argv, asked_in=asked_in)
        ended += [answer.value for answer in answers]
    codes = [answer["code"] for answer in ended]
    assert codes == [0, 0, EXIT_STOPPED, EXIT_STOPPED, 0, 0]
    assert [answer["micro_batches"] for answer in ended[2:4]] == [SECOND_OF_STEP_3] * 2
    assert steps_saved(tmp_path / "run") == [2, 4]
    is_undisturbed(tmp_path / "run", tmp_path / "undisturbed")


def test_first_step_of_a_start_is_dropped_at_once_with_nothing_to_save(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    argv = arguments(text, tmp_path / "run", 2, "parallel=ddp")
    answers = cluster.run(2, "tests.runs.test_dropped_step:train_asked", argv=argv, asked_in=2, rank=1)
    assert [answer.value for answer in answers] == [{"code": EXIT_STOPPED, "micro_batches": 2}] * 2
    reason = "SIGTERM on rank 1"
    said = f"{reason}: step 1 is dropped after micro-batch 2 of {MICRO_BATCHES}, there is nothing to save yet\n"
    assert said in answers[0].printed
    assert f"stopped: {reason} before the first step; run the same command to resume\n" in answers[0].printed
    assert "Traceback" not in answers[0].printed + answers[1].printed
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["step"]) == ("stopped", 0)
    assert steps_saved(tmp_path / "run") == []


def test_step_before_the_dropped_one_is_not_saved_twice(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    argv = arguments(text, tmp_path / "run", 2, "checkpoint.every=2", "parallel=ddp")
    answers = cluster.run(2, "tests.runs.test_dropped_step:train_asked", argv=argv, asked_in=SECOND_OF_STEP_3, rank=0)
    assert [answer.value["code"] for answer in answers] == [EXIT_STOPPED] * 2
    assert [line["step"] for line in metrics(tmp_path / "run", "checkpoint")] == [2]
    assert steps_saved(tmp_path / "run") == [2]


def test_pipeline_ends_the_step_before_it_stops(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    """Only the last stage has a loss: by the clocks of both, a step takes four seconds."""
    argv = arguments(text, tmp_path / "run", 1, "parallel=fsdp", "parallel.pipeline=2")
    answers = cluster.run(2, "tests.runs.test_dropped_step:train_asked", argv=argv, asked_in=SECOND_OF_STEP_3, rank=1)
    assert [answer.value["code"] for answer in answers] == [EXIT_STOPPED] * 2
    assert answers[1].value["micro_batches"] == 3 * MICRO_BATCHES
    assert "stopping   SIGTERM on rank 1: saving, then the run ends\n" in answers[0].printed
    assert (status(tmp_path / "run")["step"], steps_saved(tmp_path / "run")) == (3, [3])


def train_back(argv: list[str], asked_in: int) -> dict[str, Any]:
    """As ``train_asked`` with one rank; the result of step 3, read when that step is saved, makes the run go back."""
    read_all = StepLog.read_all

    def read(self: StepLog, newest: int, loader: Any = None) -> None:
        if newest == 3 and loader is None:
            raise GoBack(3, "a spike")
        read_all(self, newest, loader)

    with patch.object(StepLog, "read_all", read):
        return train_asked(argv, asked_in, 0)


def test_rollback_while_the_step_before_is_saved_ends_at_the_checkpoint(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """What FSDP2 has accumulated of the dropped step would be added to another one."""
    argv = arguments(text, tmp_path / "run", 1, "checkpoint.every=2")
    asked_in = 3 * MICRO_BATCHES + 2
    (answer,) = cluster.run(1, "tests.runs.test_dropped_step:train_back", argv=argv, asked_in=asked_in)
    assert answer.value == {"code": EXIT_STOPPED, "micro_batches": asked_in}, answer.printed
    assert (status(tmp_path / "run")["step"], steps_saved(tmp_path / "run")) == (2, [2])


class _Clock(SimpleNamespace):
    """``time``, ahead by the seconds in a list."""

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead[0]

    def time(self) -> float:
        return time.time() + self.ahead[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def train_limited(argv: list[str], job_seconds: float | None) -> dict[str, Any]:
    """Train; all limits go by the clock that micro-batches set ahead. ``job_seconds``: time of a Slurm job."""
    made: list[ObservedRecipe] = []

    def make() -> ObservedRecipe:
        made.append(ObservedRecipe(acts=acts_of(ahead, 0, lambda: None)))
        return made[-1]

    with clock_ahead() as ahead:
        clock = _Clock(ahead=ahead)
        end = {"SLURM_JOB_END_TIME": str(int(clock.time() + job_seconds))} if job_seconds else {}
        monitor, signals = "serried.trainer.monitor.shutdown.time", "serried.runtime.signals.time"
        with patch.dict(os.environ, end), patch(monitor, clock), patch(signals, clock):
            code = main(argv, BUILT_IN._replace(task=make))
    return {"code": code, "micro_batches": len(made[0].sample_ids)}


@pytest.mark.parametrize(
    ("words", "job_seconds", "most", "reason"),
    [
        (["trainer.max_minutes=0.5"], None, 30, "trainer.max_minutes=0.5"),
        (["trainer.max_minutes=0.01"], None, MICRO_BATCHES, "trainer.max_minutes=0.01"),  # at least one step
        ([], 100, 75, r"Slurm ends this job at \d\d:\d\d"),  # a quarter of the time is spared
    ],
)
def test_clock_drops_a_long_step_but_the_first(
    words: list[str], job_seconds: float | None, most: int, reason: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    argv = arguments(text, tmp_path / "run", 1, "trainer.steps=20", *words)
    (answer,) = cluster.run(1, "tests.runs.test_dropped_step:train_limited", argv=argv, job_seconds=job_seconds)
    assert answer.value["code"] == EXIT_STOPPED, answer.printed
    micro_batches = answer.value["micro_batches"]
    assert MICRO_BATCHES <= micro_batches <= most
    step = micro_batches // MICRO_BATCHES
    assert (status(tmp_path / "run")["step"], steps_saved(tmp_path / "run")) == (step, [step])
    assert re.fullmatch(reason, status(tmp_path / "run")["reason"])


def train_slowly(argv: list[str]) -> dict[str, Any]:
    """Micro-batches take a third of a second, by any clock; the last rank is asked to stop in step 3."""
    made: list[ObservedRecipe] = []

    def compute(number: int) -> None:
        time.sleep(1 / 3)
        if number == SECOND_OF_STEP_3 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            terminate()

    def make() -> ObservedRecipe:
        made.append(ObservedRecipe(acts={number: partial(compute, number) for number in range(1, 1000)}))
        return made[-1]

    code = main(argv, BUILT_IN._replace(task=make))
    return {"code": code, "micro_batches": len(made[0].sample_ids)}


@pytest.mark.slow
def test_eight_ranks_stop_within_two_micro_batches_of_a_slow_step(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    words = ("parallel=fsdp", "parallel.tensor=2")
    argv = arguments(text, tmp_path / "run", 8, *words)
    answers = cluster.run(8, "tests.runs.test_dropped_step:train_slowly", argv=argv)
    assert {answer.value["code"] for answer in answers} == {EXIT_STOPPED}, answers[0].printed
    (micro_batches,) = {answer.value["micro_batches"] for answer in answers}
    assert SECOND_OF_STEP_3 <= micro_batches <= SECOND_OF_STEP_3 + 2
    assert steps_saved(tmp_path / "run") == [2]
    for folder in ("run", "undisturbed"):
        argv = arguments(text, tmp_path / folder, 8, *words)
        answers = cluster.run(8, "serried.program:main", arguments=argv)
        assert [answer.value for answer in answers] == [0] * 8, answers[0].printed
    is_undisturbed(tmp_path / "run", tmp_path / "undisturbed")
