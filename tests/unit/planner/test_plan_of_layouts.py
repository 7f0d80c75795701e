"""What the plan says of a layout of several axes: mesh, batch, and the memory of the rank that needs the most."""

import pytest
import torch

from serried.configs.compose import compose
from serried.parallel.axes.model_axes import shard_specs
from serried.parallel.layout.mesh import Layout, gradient_accumulation, resolve_layout
from serried.planner.memory_formula import FormulaMemory, Sizes, planned_memory
from serried.planner.overview import dry_run
from serried.recipes.text.causal_lm import CausalLM


def memory_of(*argv: str, processes: int) -> tuple[FormulaMemory, Layout]:
    config = compose(["recipe=llama8b", "parallel=fsdp", "trainer.activation_checkpoint=none", *argv])
    layout = resolve_layout(config.parallel, processes)
    task = CausalLM(config)
    model = task.build_model()
    accumulation = gradient_accumulation(config.trainer, layout)
    return planned_memory(config, task, accumulation, Sizes(config, layout, model, task.parallel_plan(model))), layout


@pytest.mark.parametrize(
    ("schedule", "stages", "text"),
    [
        ("1f1b", 8, "fsdp, shard 8, tensor 8, pipeline 8 (1f1b, 10 layers a stage, bubble 18%)"),
        ("interleaved", 16, "fsdp, shard 8, tensor 8, pipeline 8 (interleaved, 5 layers a stage, bubble 10%)"),
        ("zbv", 16, "fsdp, shard 8, tensor 8, pipeline 8 (zbv, 5 layers a stage)"),
    ],
)
def test_a_mesh_is_described_with_its_schedule_and_bubble(schedule: str, stages: int, text: str) -> None:
    layout = Layout("fsdp", pipeline=8, shard=8, tensor=8, schedule=schedule, stages=stages)
    assert layout.describe(80, 32) == text


def test_stages_of_unequal_length_are_all_named() -> None:
    layout = Layout("fsdp", pipeline=2, stages=2, layers_of_stages=(3, 1))
    assert layout.describe(4, 4) == "fsdp, pipeline 2 (1f1b, 3 + 1 layers, bubble 20%)"


def test_the_rank_that_holds_the_most_is_planned_for() -> None:
    memory, layout = memory_of("parallel.tensor=2", "parallel.pipeline=2", "parallel.shard=2", processes=8)
    config = compose(["recipe=llama8b"])
    task = CausalLM(config)
    model = task.build_model()
    specs = shard_specs(model, task.parallel_plan(model), layout)
    held = [0] * layout.world
    for rank in range(layout.world):
        place = layout.coordinates(rank)
        for spec in specs.values():
            held[rank] += spec.box(layout, place).numel if place.pipeline in spec.holders else 0
    assert memory.parameters in (4 * max(held[:4]), 4 * max(held[4:]))
    assert sum(held) == pytest.approx(sum(each.numel() for each in model.parameters()), rel=1e-3)


def test_each_axis_divides_the_memory_that_it_should() -> None:
    eight, _ = memory_of(processes=8)
    tensor, _ = memory_of("parallel.tensor=8", processes=8)
    context, _ = memory_of("parallel.context=8", processes=8)
    assert tensor.parameters == pytest.approx(eight.parameters, rel=0.01)
    assert tensor.gathered < eight.gathered / 7
    assert eight.activations / 8 < tensor.activations < eight.activations / 2, "inputs of matrices are whole"
    assert context.parameters == eight.parameters
    assert context.activations < eight.activations / 4, "gathered keys and values are whole"
    # torch has a buffer for each message of a step: many micro-batches would need more memory than the blocks.
    pipeline, _ = memory_of("parallel.pipeline=8", "trainer.global_batch=64", processes=8)
    assert eight.activations / 2 < pipeline.activations < eight.activations, "the first stage has eight in flight"


def test_a_plan_names_processes_and_data_ranks_apart() -> None:
    argv = ["recipe=llama8b", "parallel=fsdp", "parallel.tensor=8", "launch.processes=64", "dry_run=true"]
    config = compose(argv)
    layout = resolve_layout(config.parallel, 64)
    text = dry_run(config, CausalLM(config), layout, gradient_accumulation(config.trainer, layout))
    assert "mesh       fsdp, shard 8, tensor 8, ZeRO-3 (reshards after forward); planned for 64 processes" in text
    assert " per pass x 8 data ranks x " in text


def test_a_plan_without_another_device_is_for_this_cpu_where_there_is_no_gpu() -> None:
    def text_of(*words: str) -> str:
        config = compose(["recipe=tiny", "parallel=fsdp", "launch.processes=2", "dry_run=true", *words])
        layout = resolve_layout(config.parallel, 2)
        return dry_run(config, CausalLM(config), layout, gradient_accumulation(config.trainer, layout))

    is_cpu = not torch.cuda.is_available()
    assert ("ZeRO-2 (small and on a CPU: one unit)" in text_of()) == is_cpu
    assert "ZeRO-3 (reshards after forward)" in text_of("plan.device=h100", "plan.mode=formula")
