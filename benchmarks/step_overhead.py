"""What the trainer costs: the same module on the same batches, compared with a minimal hand-written loop.

    python -m benchmarks.step_overhead                     # all layouts; a real model and one of almost no compute
    python -m benchmarks.step_overhead --layouts ddp --turns 40
    python -m benchmarks.step_overhead --against compiled --precision bf16  # what trainer.compile brings
    python -m benchmarks.step_overhead --against sdpa --precision bf16  # what attention by rows brings
    python -m benchmarks.step_overhead --profile             # what a step spends on them, call by call

Both stay alive in the same processes and take turns of a few steps, so that a machine that slows down slows both. The
hand-written loop has DDP or FSDP2, skipped gradient syncs, clipping, fused AdamW and a loss logged every ten
steps, and nothing else; its batches lie ready in memory, while the trainer reads, collates and counts its own.

The profile counts, call by call, the time in marks, rates, estimates and whatever else makes the numbers of a log line.
It slows calls of Python functions and nothing else, so that their share is less without it.
"""

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from serried.configs.compose import compose, config_yaml
from serried.configs.schema.data import TextRunConfig
from serried.parallel.axes.model_axes import shard_specs
from serried.parallel.initialize import initialize
from serried.parallel.layout.local_shards import held_parameters
from serried.parallel.layout.mesh import resolve_layout
from serried.parallel.plan import ParallelPlan
from serried.recipes.models.layers.lm_head import IGNORE
from serried.recipes.text.causal_lm import CausalLM
from serried.records.run_folder import RunFolder
from serried.runtime.console import Console
from serried.runtime.session import Session, open_session
from serried.trainer.callbacks import Callbacks
from serried.trainer.checkpoint.resume import Start
from serried.trainer.data.loader import BatchLoader, Reader
from serried.trainer.data.sampler import BatchShare, SampleOrder
from serried.trainer.monitor.heartbeat import Pulse
from serried.trainer.optim.optimizer import learning_rate
from serried.trainer.run_context import Context
from serried.trainer.task import to_device
from serried.trainer.trainer import Trainer
from testing.rank_pool import Cluster
from testing.runs import write_text

LAYOUTS = {"single": 1, "ddp": 2, "fsdp": 2}
MODELS = {
    # About a second per step on one core, a realistic step.
    "real": ["model.dim=256", "model.layers=6", "model.heads=8", "model.kv_heads=4", "model.hidden_dim=768",
             "data.sequence_length=256", "trainer.global_batch=16", "trainer.micro_batch=4"],
    # Nothing but the driver.
    "almost no compute": ["model.dim=16", "model.layers=6", "model.heads=2", "model.kv_heads=1", "model.hidden_dim=16",
                          "data.sequence_length=16", "trainer.global_batch=8", "trainer.micro_batch=2"],
}  # fmt: skip
STEPS_IN_A_TURN = {"real": 2, "almost no compute": 20}
ITSELF = {"compiled": "trainer.compile=true", "sdpa": "model.attention=sdpa"}
"""What the trainer takes turns with itself about."""
WARM_UP_STEPS = 10
PROFILED_STEPS = {"real": 30, "almost no compute": 300}
NUMBERS = ("parallel/step_phases.py", "trainer/metrics/meter.py")
"""Where numbers come from."""


def race(argv: list[str], turns: int, steps_in_a_turn: int, against: str = "hand-written") -> dict[str, list[float]]:
    """Seconds a step of each turn, for the trainer, and for the hand-written loop or another of ``ITSELF``. Runs on
    every rank."""
    config = compose(argv)
    recipe = CausalLM(config)
    with open_session(config.launch) as session:
        trainers = [_built(config, recipe, session)]
        racers: dict[str, Any] = {"trainer": trainers[0].steps()}
        if against in ITSELF:
            changed = compose([*argv, ITSELF[against], f"run.dir={config.run.dir}-{against}"])
            trainers.append(_built(changed, CausalLM(changed), session))
            racers[against] = trainers[1].steps()
        else:
            racers[against] = hand_written(config, recipe, session.device)
        seconds: dict[str, list[float]] = {name: [] for name in racers}
        for turn in range(turns + 2):  # the first two warm up caches, allocators and optimizer state, and compile
            for name in racers if turn % 2 else reversed(racers):
                if session.world_size > 1:
                    dist.barrier()
                started = time.perf_counter()
                for _ in range(steps_in_a_turn):
                    next(racers[name])
                seconds[name].append((time.perf_counter() - started) / steps_in_a_turn)
        for racer in racers.values():
            racer.close()
        for trainer in trainers:
            trainer.saver.checkpointer.close()
    return {name: values[2:] for name, values in seconds.items()}


def share_of_numbers(argv: list[str], steps_profiled: int) -> tuple[float, float]:
    """Seconds of a step under the profiler, and those of them that its numbers take. Runs on every rank."""
    config = compose(argv)
    with open_session(config.launch) as session:
        trainer, profiler = _built(config, CausalLM(config), session), cProfile.Profile()
        steps = trainer.steps()
        for step in range(WARM_UP_STEPS + steps_profiled):
            if step == WARM_UP_STEPS:
                profiler.enable()
            next(steps)
        profiler.disable()
        steps.close()
        trainer.saver.checkpointer.close()
    profile: Any = pstats.Stats(profiler)
    whole = sum(own for _, _, own, _, _ in profile.stats.values())
    numbers = 0.0
    for (file, _, _), (*_, callers) in profile.stats.items():
        if file.endswith(NUMBERS):
            numbers += sum(took for (by, _, _), (*_, took) in callers.items() if not by.endswith(NUMBERS))
    return whole / steps_profiled, numbers / steps_profiled


def _built(config: TextRunConfig, recipe: CausalLM, session: Session) -> Trainer:
    folder = RunFolder(config.run.dir) if session.is_main else None
    console = Console(False, session.rank)
    hooks = Callbacks(config, folder, pulse := Pulse(), console.log)
    return Trainer(Context(config, recipe, session, console, folder, pulse, hooks), config_yaml(config), Start())


def hand_written(config: Any, recipe: CausalLM, device: torch.device, *, compiles: bool = False) -> Generator[None]:
    """The loop one would write for this job alone."""
    model: Any = recipe.build_model()
    strategy, world, is_low = config.parallel.strategy, _world(), config.precision.name == "bf16"
    if compiles:
        for block in model.layers:
            block.compile(dynamic=False)
    shards = world > 1 and strategy == "fsdp"
    if shards:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        policy = low if is_low else MixedPrecisionPolicy()
        for block in model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    layout = resolve_layout(config.parallel, world)
    rank = dist.get_rank() if dist.is_initialized() else 0
    specs = shard_specs(model, ParallelPlan(), layout)
    initialize(held_parameters([model], specs, layout, rank), recipe.initial_std, config.trainer.seed)
    if world > 1 and strategy == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optim.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    batches = [[to_device(batch, device) for batch in step] for step in _take(config, recipe, 8)]
    count = len(batches[0])
    step = 0
    while True:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.trainer.steps, config.optim.lr, config.schedule)
        total = torch.zeros((), device=device)
        for index, batch in enumerate(batches[step % len(batches)]):
            last = index == count - 1
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            skip = model.no_sync() if not last and hasattr(model, "no_sync") else nullcontext()
            with skip:
                with torch.autocast(device.type, torch.bfloat16, enabled=is_low and not shards):
                    loss = model(batch.tokens, batch.targets) / (batch.targets != IGNORE).sum() / count
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), config.trainer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            if world > 1:
                dist.all_reduce(total)
            total.item()
        yield


def _take(config: Any, recipe: CausalLM, steps: int) -> list[list[Any]]:
    """The first batches of the run, read once."""
    dataset, layout = recipe.dataset("train"), resolve_layout(config.parallel, _world())
    loader = BatchLoader(
        Reader(dataset, recipe.collate_numbered), SampleOrder(len(dataset), config.trainer.seed),
        BatchShare(
            config.trainer.micro_batch, layout.data_ranks, dist.get_rank() if dist.is_initialized() else 0,
            config.trainer.global_batch,
        ),
        steps=range(steps), workers=0, pin_memory=False,
    )  # fmt: skip
    return list(loader)


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--against", choices=["hand-written", *ITSELF], default="hand-written")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    columns = [
        f"{options.against}, ms/step",
        "speed of the trainer relative to it: median (quartiles)",
        "added, ms/step",
    ]
    if options.profile:
        columns = ["profiled, ms/step", "instrumentation, ms/step", "share"]
    print(f"| model | layout | {' | '.join(columns)} |\n|{' --- |' * 5}")
    cluster = Cluster(2)
    with tempfile.TemporaryDirectory(prefix="serried-overhead-") as temporary:
        text = write_text(Path(temporary) / "text")
        for model in options.models:
            for layout in options.layouts:
                argv = [
                    "data=text", f"data.path={text}", f"data.cache_dir={temporary}/cache", *MODELS[model],
                    f"run.dir={temporary}/{model.split()[0]}-{layout}", f"parallel={layout}", "trainer.steps=1M",
                    "trainer.eval_every=0", "trainer.log_every=10", "checkpoint.every=0",
                    f"precision={options.precision}",
                ]  # fmt: skip
                function, how = "share_of_numbers", {"steps_profiled": PROFILED_STEPS[model]}
                if not options.profile:
                    how = {"turns": options.turns, "steps_in_a_turn": STEPS_IN_A_TURN[model]}
                    function, how = "race", {**how, "against": options.against}
                found = cluster.run(
                    LAYOUTS[layout], f"benchmarks.step_overhead:{function}", timeout_seconds=3600, argv=argv, **how
                )[0].value
                if options.profile:
                    row = f"{1000 * found[0]:.1f} | {1000 * found[1]:.3f} | {found[1] / found[0]:.2%}"
                else:
                    row = _row(found["trainer"], found[options.against])
                print(f"| {model} | {layout} x{LAYOUTS[layout]} | {row} |", flush=True)
    cluster.stop()


def _row(trainer: list[float], hand_written: list[float]) -> str:
    ratios = sorted(b / t for t, b in zip(trainer, hand_written, strict=True))
    added = [1000 * (t - b) for t, b in zip(trainer, hand_written, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    a_low, a_middle, a_high = statistics.quantiles(added, n=4)
    return (
        f"{1000 * statistics.median(hand_written):.1f} | {middle:.3f} ({low:.3f} to {high:.3f}) | "
        f"{a_middle:+.2f} ({a_low:+.2f} to {a_high:+.2f})"
    )


if __name__ == "__main__":
    main()
