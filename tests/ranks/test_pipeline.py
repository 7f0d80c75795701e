"""Pipeline stages: what is in each, and what a pipeline refuses."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import serried
from serried.configs.errors import UserError
from serried.parallel.axes.model_axes import shard_specs
from serried.parallel.axes.pipeline_stages import split
from serried.parallel.layout.mesh import Layout
from serried.parallel.plan import Inputs, LossTerms, ParallelPlan
from serried.recipes.models.families.llama import Transformer
from serried.recipes.models.families.llama_config import LlamaSection
from testing.rank_pool import Cluster
from testing.runs import different_tensors, metrics, overrides, weights
from tests.support.own_task import Points

SECTION = LlamaSection(
    name="t", dim=16, layers=4, heads=2, kv_heads=1, hidden_dim=24, vocab_size=33, tie_embeddings=True
)


def model(section: LlamaSection = SECTION) -> Transformer:
    with torch.device("meta"):
        return Transformer(section, section.vocab_size or 0)


@pytest.mark.parametrize(
    "layout",
    [
        Layout("fsdp", pipeline=2, stages=2),
        Layout("fsdp", pipeline=2, stages=2, layers_of_stages=(3, 1)),
        Layout("fsdp", pipeline=3, stages=3),
        Layout("fsdp", pipeline=2, stages=4, schedule="interleaved"),
        Layout("fsdp", pipeline=2, stages=4, schedule="zbv"),
    ],
    ids=lambda layout: f"{layout.schedule} {layout.stages} {layout.layers_of_stages}",
)
def test_stages_hold_the_parameters_of_the_shard_specs(layout: Layout) -> None:
    whole = model()
    plan = whole.parallel_plan()
    holders: dict[str, list[int]] = {name: [] for name, _ in whole.named_parameters()}
    for pipeline in range(layout.pipeline):
        for stage, module in split(whole, plan, layout, pipeline).items():
            assert type(module) is Transformer
            assert stage in layout.stages_of(pipeline)
            for name, _ in module.named_parameters():
                holders[name].append(layout.pipeline_of(stage))
    specs = shard_specs(whole, plan, layout)
    assert {name: sorted(found) for name, found in holders.items()} == {
        name: sorted(spec.holders) for name, spec in specs.items()
    }


def test_chained_stages_compute_the_same_as_the_model() -> None:
    torch.manual_seed(0)
    whole = Transformer(SECTION, 33)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(33, (2, 9))
    named = {"targets": tokens[:, 1:], "positions": torch.arange(8).repeat(2, 1)}
    layout, hidden = Layout("fsdp", pipeline=3, stages=3), tokens[:, :-1]
    for pipeline in range(3):
        hidden = split(whole, whole.parallel_plan(), layout, pipeline)[pipeline](hidden, **named)
    assert hidden.equal(whole(tokens[:, :-1], **named))


class Front(nn.Module):
    """An embedding within a module, beside a parameter that is not tied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"table": nn.Embedding(7, 4)})
        self.scale = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.scale(self.inner["table"](ids))


class TiedHead(nn.Module):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x @ table.T


class NestedTie(nn.Module):
    """Reads a parameter of a module within a module at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.front = Front()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = TiedHead()

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = block(x)
        table: Any = self.front.inner
        return self.head(x, table.table.weight)


def test_a_tied_parameter_may_be_in_a_module_within_a_module() -> None:
    whole, ids = NestedTie(), torch.arange(7)
    plan = ParallelPlan(blocks=("blocks.0", "blocks.1", "blocks.2"), tied=("front.inner.table.weight",))
    layout, hidden = Layout("fsdp", pipeline=3, stages=3), torch.arange(7)
    specs, held = shard_specs(whole, plan, layout), []
    for pipeline in range(3):
        stage = split(whole, plan, layout, pipeline)[pipeline]
        held += [name for name, _ in stage.named_parameters()]
        assert all(pipeline in specs[name].holders for name, _ in stage.named_parameters())
        hidden = stage(hidden)
    assert hidden.equal(whole(ids))
    assert held.count("front.inner.table.weight") == 2
    assert len(held) == 1 + len(specs)


class OutsideOfModules(nn.Module):
    """Does something to the stream in its own forward, before the blocks, between them or behind."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.place == "before":
            x += torch.ones(4)
        for block in self.blocks:
            x = block(x) * 2 if self.place == "between" else block(x)
        return self.head(x.mean(1) if self.place == "behind" else x)


@pytest.mark.parametrize(
    ("place", "stage", "message"),
    [("before", 1, "before blocks.2"), ("between", 0, "after blocks.1"), ("behind", 0, "after blocks.1")],
)
def test_model_that_computes_outside_its_modules_is_refused(place: str, stage: int, message: str) -> None:
    with pytest.raises(UserError, match=f"OutsideOfModules.forward has computation {message} outside of its modules"):
        stages_of_two(OutsideOfModules(place))[stage](torch.zeros(2, 3, 4) if stage else torch.zeros(2, 3).long())


def test_nan_input_of_a_stage_is_not_taken_for_a_change() -> None:
    stages_of_two(OutsideOfModules(""))[1](torch.full((2, 3, 4), float("nan")))


def stages_of_two(model: nn.Module) -> dict[int, nn.Module]:
    plan, layout = ParallelPlan(blocks=("blocks.*",)).for_model(model), Layout("fsdp", pipeline=2, stages=2)
    return split(model, plan, layout, 0) | split(model, plan, layout, 1)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [(("block.*",), "'block.*', but OutsideOfModules has no such module"), (("blocks",), "use 'blocks.*'")],
)
def test_blocks_that_do_not_exist_are_refused(blocks: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        ParallelPlan(blocks=blocks).for_model(OutsideOfModules(""))


@pytest.mark.slow
def test_a_zbv_run_evaluates_samples_and_resumes_with_the_same_bits(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """Tied, with two stages a rank, one of which has both ends. Evaluations pass by the schedule."""
    layout = ["parallel=fsdp", "parallel.pipeline=2", "parallel.pipeline_schedule=zbv", "model.tie_embeddings=true"]
    small = [*layout, "model.layers=4", "trainer.steps=4", "trainer.global_batch=8", "trainer.micro_batch=2"]

    def run(name: str, *more: str) -> str:
        argv = overrides(text, tmp_path / name, *small, *more)
        return cluster.run(2, "testing.runs:train_small", argv=argv)[0].printed

    printed = run("whole", "trainer.eval_every=2", "trainer.sample_tokens=4")
    assert "sample     unconditional text" in printed
    assert len(metrics(tmp_path / "whole", "eval")) == 2
    run("halves", "trainer.stop_at=2")
    run("halves")
    whole, halves = ([(line["loss"], line["grad_norm"]) for line in metrics(tmp_path / n)] for n in ("whole", "halves"))
    assert whole == halves
    assert not different_tensors(tmp_path / "whole", tmp_path / "halves")


class InStages(Points):
    """A task of a user's own, with metrics and dropout, that a pipeline can run."""

    loss = serried.Task.loss

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("version", torch.ones(2))  # of no block: each stage has it
        return model

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        del model
        return ParallelPlan(blocks=("*",))

    def inputs(self, batch: Any) -> Inputs:
        return Inputs(batch["x"])

    def terms(self, output: Any, batch: Any) -> LossTerms:
        terms: LossTerms = Points.loss(self, lambda _: output, batch)  # type: ignore[arg-type]
        return terms


def fit_in_stages(overrides: list[str]) -> dict[str, Any]:
    result = serried.fit(InStages, overrides)
    return {"loss": result.loss, "validation": result.validation, **result.metrics}


def test_own_task_has_the_same_dropout_and_metrics_in_stages(cluster: Cluster, tmp_path: Path) -> None:
    groups = ["optim.groups.end.parameters=3.*", "optim.groups.end.lr_scale=0.5"]
    alone = cluster.run(
        1, "tests.ranks.test_pipeline:fit_in_stages", overrides=[*groups, f"run.dir={tmp_path / 'alone'}"]
    )
    layout = [
        *groups,
        "parallel=fsdp",
        "parallel.pipeline=2",
        "parallel.pipeline_schedule=gpipe",
        f"run.dir={tmp_path / 'staged'}",
    ]
    staged = cluster.run(2, "tests.ranks.test_pipeline:fit_in_stages", overrides=layout)
    assert set(alone[0].value) == {"loss", "validation", "class_loss", "size_loss", "accuracy"}
    for answer in staged:
        assert answer.value == pytest.approx(alone[0].value, rel=1e-5)
    first, last = (metrics(tmp_path / name)[-1] for name in ("alone", "staged"))
    assert {key for key in first if key.startswith("lr")} == {key for key in last if key.startswith("lr")}
    assert weights(tmp_path / "staged")["version"].equal(torch.ones(2))


def test_layers_of_stages_that_omit_a_block_are_refused() -> None:
    whole, layout = model(), Layout("fsdp", pipeline=2, stages=2, layers_of_stages=(2, 1))
    with pytest.raises(UserError, match=r"layers_of_stages=\[2, 1\] sums to 3.*declares 4 blocks"):
        shard_specs(whole, whole.parallel_plan(), layout)


def test_undeclared_parameter_shared_by_stages_is_refused() -> None:
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    whole[2].weight = whole[0].weight
    plan, layout = ParallelPlan(blocks=("1", "2")), Layout("fsdp", pipeline=2, stages=2)
    with pytest.raises(UserError, match=r"2.weight and 0.weight are one parameter.*tied=\('0.weight',\)"):
        split(whole, plan, layout, 0)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match=r"Linear declares no blocks.*parallel.pipeline=1"):
        split(nn.Linear(2, 2), ParallelPlan(), Layout("fsdp", pipeline=2, stages=2), 0)
