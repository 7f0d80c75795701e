"""An evaluation that fails ends the run, after the step before it was saved."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED
from serried.program import main
from serried.task_class import declaration
from testing.forked_runs import typed_on
from testing.rank_pool import Cluster
from testing.runs import checkpoint, different_tensors, losses, status, steps_saved
from tests.support.own_task import Points

OVERRIDES = [
    "trainer.steps=6", "trainer.eval_every=2", "trainer.eval_batches=1", "checkpoint.every=4", "checkpoint.keep=1",
    "launch.device=cpu", "checkpoint.keep_best=true", "trainer.early_stopping_patience=9",
]  # fmt: skip


class Validated(dict):
    """A sample of the validation set."""


class Failing(Points):
    """Fails in the second evaluation: where a sample is read, in the loss, or in the hook."""

    where, ranks, is_killed = "", (0,), False

    def dataset(self, split: str) -> list:
        samples = super().dataset(split)
        return samples if split == "train" else [Validated(each) for each in samples]

    def collate(self, samples: Any) -> Any:
        if isinstance(samples[0], Validated):
            self._fail("sample")
        return super().collate([dict(each) for each in samples])

    def loss(self, model: Any, batch: dict) -> Any:
        if not model.training:
            self._fail("loss")
        return super().loss(model, batch)

    def on_evaluate(self, event: Any) -> None:
        del event
        self._fail("hook")

    def _fail(self, where: str) -> None:
        """Of 12 samples."""
        world, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
        if where != self.where or rank not in self.ranks:
            return
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > (1 if where == "hook" else 12 // (self.run.trainer.micro_batch * world)):
            if self.is_killed:
                time.sleep(3)  # until all ranks have written their files
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"the {where} is bad")


def train(argv: list[str], where: str = "", ranks: list[int] | None = None, *, is_killed: bool = False) -> int:
    """Train on this rank. Returns the exit code."""
    task = type("Failing", (Failing,), {"where": where, "ranks": ranks or [], "is_killed": is_killed})
    return main(argv, declaration(task))


def train_alone(world: int, *arguments: Any, **keywords: Any) -> list[int]:
    """Call ``train`` in processes that end with it, as the others notice it by that. Returns their exit codes."""
    lines = [
        f"import os, {__name__} as tests, serried.trainer.monitor.shutdown as shutdown",
        "shutdown._FAILS_WITHIN_SECONDS = 1.0",
        f"os._exit(tests.train(*{arguments!r}, **{keywords!r}))",
    ]
    return [process.returncode for process in typed_on(world, "-c", "\n".join(lines))]


def check_saved(run_dir: Path) -> None:
    """Step 4 is saved without an evaluation."""
    assert steps_saved(run_dir) == [4]
    state = json.loads((checkpoint(run_dir) / "state.json").read_text())
    assert state["validation_loss"] is None, "a result that was not reported would be that of the best checkpoint"
    assert state["progress"]["missed"] == ["validation"]


def check_equal(run_dir: Path, undisturbed: Path) -> None:
    """The run that failed has been resumed to its end as if it never had."""
    assert losses(run_dir) == losses(undisturbed)
    assert losses(run_dir, "eval")[-2:] == losses(undisturbed, "eval")[-2:]
    assert not different_tensors(run_dir, undisturbed)
    assert steps_saved(run_dir) == steps_saved(undisturbed), "the best one is kept"


@pytest.mark.parametrize(
    ("world", "layout", "where", "ranks"),
    [
        (1, "single", "loss", [0]),
        pytest.param(2, "fsdp", "loss", [0, 1], marks=pytest.mark.slow),
        (2, "fsdp", "sample", [1]),
        pytest.param(2, "ddp", "hook", [0], marks=pytest.mark.slow),
    ],
)
def test_step_before_a_failed_evaluation_is_saved_and_the_evaluation_made_up_on_resume(
    world: int, layout: str, where: str, ranks: list[int], cluster: Cluster, tmp_path: Path
) -> None:
    def run(name: str, *arguments: Any) -> set[int]:
        argv = [f"run.dir={tmp_path / name}", f"parallel={layout}", *OVERRIDES]
        named = dict(zip(("where", "ranks"), arguments, strict=False))
        answers = cluster.run(world, f"{__name__}:train", argv=argv, **named)
        return {answer.value for answer in answers}

    assert run("whole") == {EXIT_FINISHED}
    assert run("failed", where, ranks) == {EXIT_FAILED}
    ended = status(tmp_path / "failed")
    assert (ended["state"], ended["step"]) == ("failed", 4)
    assert f"the {where} is bad" in ended["reason"]
    check_saved(tmp_path / "failed")
    assert run("failed") == {EXIT_FINISHED}
    check_equal(tmp_path / "failed", tmp_path / "whole")


ASYNC, SYNC = "checkpoint.mode=async", "checkpoint.mode=sync"


@pytest.mark.parametrize(
    ("world", "layout", "rank", "mode", "is_killed"),
    [
        (2, "fsdp", 1, ASYNC, False),
        pytest.param(2, "fsdp", 0, ASYNC, False, marks=pytest.mark.slow),
        pytest.param(2, "fsdp", 1, SYNC, False, marks=pytest.mark.slow),
        pytest.param(2, "ddp", 1, SYNC, False, marks=pytest.mark.slow),
        pytest.param(3, "fsdp", 2, ASYNC, False, marks=pytest.mark.slow),
        pytest.param(3, "fsdp", 0, SYNC, False, marks=pytest.mark.slow),
        pytest.param(2, "fsdp", 1, ASYNC, True, marks=pytest.mark.slow),
        pytest.param(3, "ddp", 1, SYNC, True, marks=pytest.mark.slow),
    ],
)
def test_step_is_saved_if_one_rank_alone_fails_in_the_model_in_the_evaluation(
    world: int, layout: str, rank: int, mode: str, is_killed: bool, cluster: Cluster, tmp_path: Path
) -> None:
    """With an average of the weights, which is in their place during the evaluation."""

    def argv(name: str) -> list[str]:
        more = ["trainer.ema_decay=0.9", f"trainer.micro_batch={2 if world == 3 else 3}"]
        return [f"run.dir={tmp_path / name}", f"parallel={layout}", mode, *more, *OVERRIDES]

    def run(name: str) -> set[int]:
        return {answer.value for answer in cluster.run(world, f"{__name__}:train", argv=argv(name))}

    assert run("whole") == {EXIT_FINISHED}
    codes = train_alone(world, argv("failed"), "loss", [rank], is_killed=is_killed)
    assert codes == [-signal.SIGKILL if is_killed and each == rank else EXIT_FAILED for each in range(world)]
    check_saved(tmp_path / "failed")
    if not is_killed:
        assert "the loss is bad" in status(tmp_path / "failed")["reason"]
        log = (tmp_path / f"failed/log/rank-{rank}.log").read_text()
        assert " saved " in log, "committed by all ranks at once, and not when the one that failed had given up waiting"
    assert run("failed") == {EXIT_FINISHED}
    check_equal(tmp_path / "failed", tmp_path / "whole")


def test_run_without_evaluations_does_not_make_up_a_failed_one(tmp_path: Path) -> None:
    argv = [f"run.dir={tmp_path / 'run'}", *OVERRIDES[:6]]
    assert train(argv, "loss", [0]) == EXIT_FAILED
    assert train([*argv, "trainer.eval_every=0"], "loss", [0]) == EXIT_FINISHED
    assert status(tmp_path / "run")["state"] == "finished"
