"""Whether the plan ranks layouts as this machine does, with rates measured on it."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serried.configs.compose import compose
from serried.parallel.layout.mesh import gradient_accumulation, resolve_layout
from serried.parallel.step_phases import Phases
from serried.planner.memory_formula import Sizes
from serried.planner.step_plan import plan_step
from serried.planner.time.calibrate import measure, of_all
from serried.planner.time.planned_time import Timed
from serried.planner.trace.traced_step import products_of, trace_step
from serried.recipes.text.causal_lm import CausalLM
from serried.runtime.session import open_session
from serried.trainer.model import build_model, sharded
from serried.trainer.optim.optimizer import build_optimizer
from serried.trainer.training_state import train_step
from testing.rank_pool import Cluster
from tools.published import spearman

QUIET_LOAD = 1.0
ROUNDS = 4
MODEL = [
    "model.dim=256", "model.layers=2", "model.hidden_dim=768", "model.heads=4", "model.kv_heads=4", "precision=fp32",
    "model.vocab_size=512", "model.tie_embeddings=false", "data.tokenizer=bytes", "launch.device=cpu",
    "data.sequence_length=128", "trainer.global_batch=8", "plan.mode=trace", "dry_run=true",
]  # fmt: skip
SYNC, ZERO_2 = "parallel.sync_every_micro_batch=true", "parallel.reshard_after_forward=false"
LAYOUTS: dict[str, Sequence[str]] = {
    "single, 1": ["parallel=single", "trainer.micro_batch=1"],
    "single, 8": ["parallel=single", "trainer.micro_batch=8"],
    "single, 4 of 256": ["parallel=single", "trainer.micro_batch=4", "data.sequence_length=256"],
    "single, 8 of 64": ["parallel=single", "trainer.micro_batch=8", "data.sequence_length=64"],
    "single, 16": ["parallel=single", "trainer.micro_batch=16", "trainer.global_batch=32"],
    "ddp, 1": ["parallel=ddp", "trainer.micro_batch=1"],
    "ddp, 4": ["parallel=ddp", "trainer.micro_batch=4"],
    "ddp, 8": ["parallel=ddp", "trainer.micro_batch=8", "trainer.global_batch=32"],
    "ZeRO-3, 1": ["parallel=fsdp", "trainer.micro_batch=1"],
    "ZeRO-3, 2, sum each": ["parallel=fsdp", "trainer.micro_batch=2", SYNC],
    "ZeRO-3, 4": ["parallel=fsdp", "trainer.micro_batch=4"],
    "ZeRO-3, 1, sum each": ["parallel=fsdp", "trainer.micro_batch=1", "trainer.global_batch=16", SYNC],
    "ZeRO-2, 1": ["parallel=fsdp", "trainer.micro_batch=1", ZERO_2],
    "ZeRO-2, 4": ["parallel=fsdp", "trainer.micro_batch=4", ZERO_2],
    "ZeRO-2, 4 of 256": ["parallel=fsdp", "trainer.micro_batch=4", ZERO_2, "data.sequence_length=256"],
}  # fmt: skip


def processes_of(argv: Sequence[str]) -> int:
    return 1 if "parallel=single" in argv else 2


def planned(argv: Sequence[str]) -> Any:
    """Config, task, layout and accumulation of one of the layouts."""
    config = compose([*MODEL, *argv])
    layout = resolve_layout(config.parallel, processes_of(argv))
    return config, CausalLM(config), layout, gradient_accumulation(config.trainer, layout)


def measured(layouts: Mapping[str, Sequence[str]], shapes: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Shortest seconds of a step of each layout on this rank, and its rates."""
    with open_session(compose(MODEL).launch) as session:
        steps, seconds = {}, {name: [] for name in layouts}
        for name, argv in layouts.items():
            config, task, layout, accumulation = planned(argv)
            parallel = sharded(
                config, build_model(config, task), layout, session.device, task.initial_std, phases=Phases()
            )
            optimizer = build_optimizer([(held.name, held.tensor) for held in parallel.parameters], config.optim)
            step = train_step(config, task, task.weight_per_sample(), parallel, optimizer, None)
            batches = [task.example_batch(config.trainer.micro_batch)] * accumulation
            steps[name] = partial(step, batches, 1e-3, lambda: 0.0)
            steps[name]()
        rates = measure(session, [(m, n, k) for m, n, k in shapes], "fp32")
        for _ in range(ROUNDS):
            for name, step in steps.items():
                session.gather(name)
                started = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - started)
        return {"seconds": {name: min(each) for name, each in seconds.items()}, "rates": rates}


@pytest.mark.slow
def test_layouts_are_ranked_as_they_are_on_this_machine(cluster: Cluster, tmp_path: Path) -> None:
    if (load := os.getloadavg()[0]) >= QUIET_LOAD:
        pytest.skip(f"the machine is busy (load {load:.1f}), so its times say nothing: the ranking was not tested")
    pairs = ranked(cluster, tmp_path)
    assert spearman([*pairs.values()]) > 0.9, pairs


def ranked(cluster: Cluster, folder: Path) -> dict[str, tuple[float, float]]:
    """Seconds of a step of each layout, as planned and as measured."""
    found = {}
    for processes in (1, 2):
        layouts = {name: argv for name, argv in LAYOUTS.items() if processes_of(argv) == processes}
        plans = {name: planned(argv) for name, argv in layouts.items()}
        shapes = sorted({each for plan in plans.values() for each in products_of(trace_step(*plan))})
        answers = cluster.run(
            processes, "tests.cli.test_ranking:measured", layouts=layouts, shapes=shapes, timeout_seconds=300
        )
        rates = of_all([answer.value["rates"] for answer in answers])
        file = folder / f"rates-{processes}.json"
        file.write_text(json.dumps(rates | {"date": "2026-01-01", "precision": "fp32"}))
        for name, (config, task, layout, accumulation) in plans.items():
            config = config.model_copy(update={"plan": config.plan.model_copy(update={"rates": file})})
            built = build_model(config, task)
            plan = plan_step(
                config, task, accumulation, Sizes(config, layout, built.module, built.plan), None, is_timed=True
            )
            assert isinstance(plan.time, Timed)
            found[name] = plan.time.step.seconds, max(answer.value["seconds"][name] for answer in answers)
    return found
