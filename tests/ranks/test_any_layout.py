"""The promise: a checkpoint of any layout is read on any other, with the same bits, and training continues alike."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from serried.parallel.layout.local_shards import local
from serried.program import main
from serried.trainer.checkpoint.save import Checkpointer, HostCopies
from serried.trainer.data.loader import BatchLoader
from serried.trainer.loop import Loop
from testing.rank_pool import Cluster
from testing.runs import checkpoint, different_tensors, losses, metrics, overrides, save_again, status, weights
from tests.ranks.test_health import flip

Steps = list[dict[str, Any]]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "single": (1, ["parallel=single"]),
    "fsdp x3": (3, ["parallel=fsdp", "trainer.micro_batch=6"]),
    "tensor x2": (2, ["parallel=fsdp", "parallel.tensor=2"]),
    "tensor x2 x fsdp x3": (6, ["parallel=fsdp", "parallel.tensor=2", "trainer.micro_batch=6"]),
    "tensor x2 x replicate x2": (4, ["parallel=hsdp", "parallel.replicate=2", "parallel.tensor=2"]),
    "pipeline x3": (3, ["parallel=fsdp", "parallel.pipeline=3"]),
    "pipeline x2, zbv": (2, ["parallel=fsdp", "parallel.pipeline=2", "parallel.pipeline_schedule=zbv"]),
    "pipeline x2, interleaved x fsdp x2": (
        4, ["parallel=fsdp", "parallel.pipeline=2", "parallel.pipeline_schedule=interleaved"],
    ),
    "pipeline x2 x tensor x2": (4, ["parallel=fsdp", "parallel.pipeline=2", "parallel.tensor=2"]),
    "pipeline x2 x tensor x2 x fsdp x2": (8, ["parallel=fsdp", "parallel.pipeline=2", "parallel.tensor=2"]),
}  # fmt: skip
EXPERTS: dict[str, tuple[int, list[str]]] = {
    "experts on one": (1, ["parallel=single"]),
    "fsdp x3 with experts": (3, ["parallel=fsdp", "trainer.micro_batch=6"]),
    "expert x2": (2, ["parallel=fsdp", "parallel.expert=2"]),
    "expert x4": (4, ["parallel=fsdp", "parallel.expert=4"]),
    "expert x2 x fsdp x2": (4, ["parallel=fsdp", "parallel.expert=2"]),
    "expert x2 x tensor x2": (2, ["parallel=fsdp", "parallel.expert=2", "parallel.tensor=2"]),
    "expert x2 x context x2": (2, ["parallel=fsdp", "parallel.expert=2", "parallel.context=2"]),
    "expert x2 x pipeline x2": (4, ["parallel=fsdp", "parallel.expert=2", "parallel.pipeline=2"]),
}
SAVED = ("pipeline x2 x tensor x2", "expert x2 x fsdp x2")
"""A checkpoint of one is read on all that train the same model."""


def argv_of(layout: str, text: Path, run_dir: Path, *more: str) -> list[str]:
    dense = ["model.layers=4", "model.tie_embeddings=true"]
    model = ["model=moe_tiny", "model.layers=2", "model.expert_hidden_dim=24"] if layout in EXPERTS else dense
    how = ["trainer.steps=4", "trainer.micro_batch=9", "trainer.deterministic=true"]
    return overrides(text, run_dir, *model, *how, *(LAYOUTS | EXPERTS)[layout][1], *more)


def train(cluster: Cluster, layout: str, text: Path, run_dir: Path, *more: str, code: int = 0) -> None:
    argv = argv_of(layout, text, run_dir, *more)
    answers = cluster.run((LAYOUTS | EXPERTS)[layout][0], "testing.runs:train_small", argv=argv)
    assert {answer.value["code"] for answer in answers} == {code}, answers[0].printed


@pytest.fixture(scope="module")
def saved(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run on a layout that was stopped after two of four steps, trained once."""

    @cache
    def stopped(layout: str) -> Path:
        run_dir = tmp_path_factory.mktemp("saved") / "run"
        train(cluster, layout, text, run_dir, "trainer.stop_at=2", code=75)
        return run_dir

    return stopped


@pytest.fixture(scope="module")
def whole(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Steps]:
    """Steps of a run of one process that was not stopped, trained once."""

    @cache
    def steps(layout: str) -> Steps:
        run_dir = tmp_path_factory.mktemp("whole") / "run"
        train(cluster, layout, text, run_dir)
        return metrics(run_dir)

    return steps


@pytest.mark.slow
@pytest.mark.parametrize("layout", (*LAYOUTS, *EXPERTS))
def test_checkpoint_is_read_bitwise_on_any_layout_and_training_continues(
    layout: str,
    saved: Callable[[str], Path],
    whole: Callable[[str], Steps],
    cluster: Cluster,
    text: Path,
    tmp_path: Path,
) -> None:
    source = saved(SAVED[layout in EXPERTS])
    argv = argv_of(layout, text, source)
    cluster.run((LAYOUTS | EXPERTS)[layout][0], "testing.runs:save_again", argv=argv, run_dir=str(tmp_path / "again"))
    assert not different_tensors(source, tmp_path / "again")
    train(cluster, layout, text, tmp_path / "run", f"checkpoint.resume={tmp_path / 'again'}")
    steps = metrics(tmp_path / "run")
    assert [line["step"] for line in steps] == [3, 4]
    for line, other in zip(steps, whole("experts on one" if layout in EXPERTS else "single")[2:], strict=True):
        assert line["samples"] == other["samples"]
        assert math.isclose(line["loss"], other["loss"], rel_tol=1e-5)
        assert math.isclose(line["grad_norm"], other["grad_norm"], rel_tol=1e-5)


STATES = {"adafactor": (), "muon": (), "adamw_bf16": ("precision=bf16",), "adamw8bit": ("model.hidden_dim=64",)}
"""Optimizers whose state is not that of AdamW, and what they need; of 64 columns, two ranks have whole blocks."""
BF16, FP32 = torch.bfloat16, torch.float32
TYPES = {"adamw_bf16": ({BF16}, {FP32}), "adamw8bit": ({FP32}, {torch.uint8, BF16, FP32})}


@pytest.mark.slow
@pytest.mark.parametrize("optim", STATES)
def test_state_of_an_optimizer_resumes_bitwise_and_on_another_layout(
    optim: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    chosen = (f"optim={optim}", *STATES[optim])
    train(cluster, "tensor x2", text, tmp_path / "whole", *chosen)
    train(cluster, "tensor x2", text, tmp_path / "run", *chosen, "trainer.stop_at=2", code=75)
    elsewhere = "pipeline x3" if optim == "muon" else "fsdp x3"
    train(cluster, elsewhere, text, tmp_path / "other", *chosen, f"checkpoint.resume={tmp_path / 'run'}")
    train(cluster, "tensor x2", text, tmp_path / "run", *chosen)
    assert not different_tensors(tmp_path / "whole", tmp_path / "run")
    bound = 1e-3 if optim in TYPES else 1e-5
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "whole")[2:], rel=bound)
    for stem, types in zip(("model", "optimizer"), TYPES.get(optim, ({FP32}, {FP32})), strict=True):
        whole, moved = (weights(tmp_path / name, stem) for name in ("whole", "other"))
        assert {tensor.dtype for tensor in moved.values()} == types
        for name, tensor in whole.items():
            if tensor.dtype == torch.uint8:  # rounding of another order of sums may move a code to the next
                assert (moved[name] != tensor).float().mean() < 0.01, name
    saved = json.loads((checkpoint(tmp_path / "run") / "config.json").read_text())["dtype"]
    assert saved == ("bfloat16" if optim == "adamw_bf16" else "float32")


def staged_bytes(argv: list[str], run_dir: str) -> tuple[int, int]:
    """Bytes that this rank copies for a save, and those of the whole state."""
    copied, found = [], []
    take, begin = HostCopies.take, Checkpointer.begin

    def watched_take(self: HostCopies) -> Any:
        staged = take(self)
        copied.append(sum(tensor.nbytes for tensor in staged.values()))
        return staged

    def watched_begin(self: Checkpointer, *arguments: Any) -> None:
        begin(self, *arguments)
        found.append((copied[-1], self._plan.total_bytes))

    with patch.object(HostCopies, "take", watched_take), patch.object(Checkpointer, "begin", watched_begin):
        save_again(argv, run_dir)
    return found[-1]


def test_a_rank_copies_its_share_of_the_state_for_a_save(
    saved: Callable[[str], Path], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    argv = argv_of(SAVED[0], text, saved(SAVED[0]))
    answers = cluster.run(4, "tests.ranks.test_any_layout:staged_bytes", argv=argv, run_dir=str(tmp_path / "again"))
    shares = [answer.value[0] / answer.value[1] for answer in answers]
    assert sum(shares) < 1.05, "no copy of a tensor is staged twice, but for norms"
    assert max(shares) < 0.4, "the first stage has the embedding too"


CUBE = ["parallel=fsdp", "parallel.pipeline=2", "parallel.tensor=2", "parallel.shard=2"]
SEQUENCES_AND_EXPERTS = ["model=moe_tiny", "model.expert_hidden_dim=24", "parallel=fsdp", "parallel.context=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "how"),
    [(8, CUBE), (2, [*SEQUENCES_AND_EXPERTS, "parallel.expert=2"])],
    ids=["pipeline x tensor x shard", "context x expert"],
)
def test_a_stopped_run_resumes_to_the_same_bits(
    processes: int, how: list[str], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    def run(run_dir: Path, *more: str, code: int = 0) -> None:
        few = ("trainer.steps=4", "trainer.micro_batch=9", "trainer.deterministic=true")
        argv = overrides(text, run_dir, *few, *how, *more)
        answers = cluster.run(processes, "testing.runs:train_small", argv=argv, timeout_seconds=300)
        assert {answer.value["code"] for answer in answers} == {code}, answers[0].printed

    straight, pieces = tmp_path / "straight", tmp_path / "pieces"
    run(straight)
    run(pieces, "trainer.stop_at=2", code=75)
    run(pieces)
    curves = [
        [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(path)] for path in (straight, pieces)
    ]
    assert curves[0] == curves[1]
    assert not different_tensors(straight, pieces)


def train_flipping(argv: list[str], rank: int, name: str) -> int:
    """Flip one bit of parameter ``name`` on ``rank`` after step 1."""
    log = Loop._log

    def flipping(self: Loop, loader: BatchLoader) -> None:
        log(self, loader)
        if self.step == 1 and self._context.session.rank == rank:
            [held] = [each for each in self._state.parallel.parameters if each.name == name]
            flip(local(held.tensor).detach(), 3, 1)

    with patch.object(Loop, "_log", flipping):
        return main(argv)


@pytest.mark.parametrize(
    ("rank", "name", "expected"),
    [
        (1, "layers.0.input_layernorm.weight", "rank 0 on HOST and rank 1 on HOST hold different bits {} along tensor"),
        pytest.param(
            3, "embed_tokens.weight", "rank 1 on HOST and rank 3 on HOST hold different bits {} along tied stages",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_rank_with_a_flipped_bit_is_named(
    rank: int, name: str, expected: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    argv = argv_of(SAVED[0], text, tmp_path / "run", "health.replica_check_every=1", "trainer.steps=2")
    answers = cluster.run(4, "tests.ranks.test_any_layout:train_flipping", argv=argv, rank=rank, name=name)
    assert {answer.value for answer in answers} == {75}
    reason = status(tmp_path / "run")["reason"]
    host = reason.split(" on ")[1].split()[0]
    assert expected.replace("HOST", host).format("for the same tensors (copies") in reason
