"""``trainer.micro_batch=auto``: the largest that fits, in the plan, in a run and after a change of the layout."""

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.plain_data import read_yaml
from serried.configs.schema.declaration import declaring
from serried.parallel.layout.checks import allowed_micro_batches, with_micro_batch
from serried.parallel.layout.mesh import Layout, resolve_layout
from serried.planner.advice import Planned
from serried.planner.auto_micro_batch import choose, for_run
from serried.program import main
from serried.recipes.text.causal_lm import CausalLM
from serried.task_class import declaration
from serried.trainer.checkpoint.resume import Start, plain
from serried.trainer.memory.host_memory import tensor_bytes
from serried.trainer.task import task_for_run
from testing.rank_pool import Cluster
from testing.runs import losses
from tests.support.own_task import Points

LLAMA8B = ["recipe=llama8b", "data.tokenizer=bytes", "model.vocab_size=128256", "trainer.micro_batch=auto"]


def chosen(usable_gib: float, *argv: str, **how: Any) -> tuple[int, str]:
    config = compose([*LLAMA8B, *argv])
    layout = resolve_layout(config.parallel, 8)
    return choose(config, CausalLM(config), layout, int(usable_gib * 2**30), "cuda", **how)


def needed_gib(samples: int, *argv: str) -> float:
    config = with_micro_batch(compose([*LLAMA8B, *argv]), samples)
    return Planned(config, CausalLM(config), 8).memory.total / 2**30


def test_the_largest_micro_batch_that_leaves_a_tenth_is_chosen() -> None:
    samples, line = chosen(72.5)
    assert 1 < samples < 64
    assert needed_gib(samples) < 0.9 * 72.5 < 1.05 * needed_gib(2 * samples)
    assert line.startswith(f"chosen     trainer.micro_batch={samples}, the most that fit: ")
    more, _ = chosen(72.5, "trainer.activation_checkpoint=full")
    assert more > samples
    assert line.endswith(f"; {more} with trainer.activation_checkpoint=full")


def test_earlier_micro_batch_is_kept_while_it_fits() -> None:
    assert chosen(72.5, earlier=1)[0] == 1
    assert chosen(72.5, earlier=64)[0] == chosen(72.5, earlier=3)[0] == 2


@pytest.mark.parametrize(("earlier", "number"), [({"micro_batch": 2.0}, 2), ({"micro_batch": "many"}, 4), ({}, 4)])
def test_invalid_micro_batch_of_a_checkpoint_is_not_kept(earlier: dict[str, Any], number: int) -> None:
    config = compose(["trainer.micro_batch=auto", "trainer.global_batch=4", "data.sequence_length=64"])
    state: dict[str, Any] = {"config": plain(config), "torch": torch.__version__, "world_size": 1}
    del state["config"]["trainer"]["micro_batch"]
    state["config"]["trainer"] |= earlier
    session: Any = SimpleNamespace(
        world_size=1, local_world_size=1, device=torch.device("cpu"), gather=lambda value: [value],
        once=lambda function: function(),
    )  # fmt: skip
    found, _ = for_run(config, CausalLM(config), session, Start(Path("checkpoint"), state=state))
    assert (found.trainer.micro_batch, type(found.trainer.micro_batch)) == (number, int)


@pytest.mark.parametrize(
    ("usable_gib", "argv", "says"),
    [
        (72.5, ["trainer.activation_checkpoint=none"], "use trainer.activation_checkpoint=selective ("),
        (30, [], "use trainer.activation_checkpoint=full (2 fit) or trainer.micro_batch=1 to try"),
        (22, ["trainer.activation_checkpoint=full"], "use optim.offload=true or trainer.micro_batch=1 to try"),
        (10, ["trainer.activation_checkpoint=full"], "true (not enough on its own) or trainer.micro_batch=1"),
    ],
)
def test_if_nothing_fits_the_error_says_what_would_help(usable_gib: float, argv: list[str], says: str) -> None:
    with pytest.raises(UserError, match=r"trainer\.micro_batch=auto: a micro-batch of 1 needs ") as refused:
        chosen(usable_gib, *argv)
    assert says in str(refused.value)


def test_only_micro_batches_that_the_batch_and_the_schedule_allow_are_tried() -> None:
    config = compose(["trainer.global_batch=24", "parallel=fsdp", "parallel.pipeline=2"])
    assert allowed_micro_batches(config, resolve_layout(config.parallel, 4)) == [6, 4, 3, 2, 1]
    with pytest.raises(UserError, match=r"trainer.global_batch=24 is not a multiple of 5"):
        allowed_micro_batches(config, Layout("ddp", replicate=5))


def test_memory_limit_per_process_is_not_divided_by_the_processes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, hard))
    try:
        found = [tensor_bytes(processes=processes) for processes in (1, 2)]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert found == [2**30, 2**30]


def of_points(layout: Layout, usable: int, *argv: str) -> int:
    with declaring(declaration(Points)):
        config = compose(["trainer.micro_batch=auto", "trainer.global_batch=32", "task.dim=8192", *argv])
    task = task_for_run(Points())
    task.configure(config)
    return choose(config, task, layout, usable, "cpu")[0]


def test_the_activations_of_a_module_without_a_formula_are_traced() -> None:
    of_ddp = [of_points(Layout("ddp", replicate=2), usable) for usable in (2_000_000, 3_000_000, 10**9)]
    assert of_ddp == sorted(of_ddp)
    assert of_ddp[0] < of_ddp[1] < of_ddp[2] == 16
    assert of_points(Layout("fsdp", shard=2), 2_500_000, "parallel=fsdp") < 16
    assert of_points(Layout("fsdp", shard=2), 10**9, "parallel=fsdp") == 16


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["trainer.micro_batch=automatic"], "is not a whole number or auto; e.g. trainer.micro_batch=8, auto"),
        (["trainer.micro_batch=0"], "is out of range: it must be at least 1"),
        (["trainer.micro_batch=auto", "trainer.global_batch=7", "launch.processes=2"], "is not a multiple of 2"),
        (["auto_find_batch_size=true"], "did you mean trainer.micro_batch=auto?"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "dry_run=true"]) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_plan_shows_the_chosen_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA8B, "launch.processes=8", "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    samples = chosen(78)[0]
    assert f"trainer.micro_batch={samples}, the most that fit" in printed
    assert f"512 samples = {samples} per pass x 8 ranks x {64 // samples} accumulated" in printed


def test_auto_micro_batch_trains_like_the_explicit_number_and_is_chosen_again_for_another_layout(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = str(Path(__file__).parents[2] / "support" / "own_task.py")

    def run(ranks: int, name: str, *more: str) -> list[float]:
        argv = [f"run.dir={tmp_path / name}", *more]
        cluster.run(ranks, "tests.cli.test_api:fit", script=script, name="Points", argv=argv)
        return losses(tmp_path / name)

    def number(name: str) -> Any:
        return read_yaml(tmp_path / name / "config.yaml")["trainer"]["micro_batch"]

    auto, ddp = "trainer.micro_batch=auto", "parallel=ddp"
    run(2, "auto", auto, ddp, "trainer.stop_at=3")
    assert number("auto") == 6
    resumed = run(2, "auto", auto, ddp, "trainer.stop_at=5")
    assert number("auto") == 6
    assert resumed == run(2, "written", "trainer.micro_batch=6", ddp, "trainer.stop_at=5")
    run(1, "auto", auto)
    assert number("auto") == 12
