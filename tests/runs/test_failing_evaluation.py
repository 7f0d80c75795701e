"""An evaluation that fails ends the run, after the step before it was saved."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED
from serried.program import main
from serried.task_class import declaration
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

    where, ranks = "", (0,)

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
        """Of 12 samples in batches of 3."""
        world, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
        if where != self.where or rank not in self.ranks:
            return
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > (1 if where == "hook" else 4 // world):
            raise ValueError(f"the {where} is bad")


def train(argv: list[str], where: str = "", ranks: list[int] | None = None) -> int:
    """Train on this rank. Returns the exit code."""
    return main(argv, declaration(type("Failing", (Failing,), {"where": where, "ranks": ranks or []})))


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
        answers = cluster.run(world, "tests.runs.test_failing_evaluation:train", argv=argv, **named)
        return {answer.value for answer in answers}

    assert run("whole") == {EXIT_FINISHED}
    assert run("failed", where, ranks) == {EXIT_FAILED}
    ended = status(tmp_path / "failed")
    assert (ended["state"], ended["step"]) == ("failed", 4)
    assert f"the {where} is bad" in ended["reason"]
    assert steps_saved(tmp_path / "failed") == [4]
    state = json.loads((checkpoint(tmp_path / "failed") / "state.json").read_text())
    assert state["validation_loss"] is None, "a result that was not reported would be that of the best checkpoint"
    assert state["progress"]["missed"] == ["validation"]
    assert run("failed") == {EXIT_FINISHED}
    assert losses(tmp_path / "failed") == losses(tmp_path / "whole")
    assert losses(tmp_path / "failed", "eval")[-2:] == losses(tmp_path / "whole", "eval")[-2:]
    assert not different_tensors(tmp_path / "failed", tmp_path / "whole")
    assert steps_saved(tmp_path / "failed") == steps_saved(tmp_path / "whole"), "the best one is kept"


def test_run_without_evaluations_does_not_make_up_a_failed_one(tmp_path: Path) -> None:
    argv = [f"run.dir={tmp_path / 'run'}", *OVERRIDES[:6]]
    assert train(argv, "loss", [0]) == EXIT_FAILED
    assert train([*argv, "trainer.eval_every=0"], "loss", [0]) == EXIT_FINISHED
    assert status(tmp_path / "run")["state"] == "finished"
