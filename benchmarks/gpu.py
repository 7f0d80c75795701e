"""Speed and memory on one GPU: this project and a hand-written loop, one after the other in the same process.

    python -m benchmarks.gpu                                    # Llama 1B, and 8 of the 32 layers of Llama 8B
    python -m benchmarks.gpu --shapes llama1b --rows eager compiled --steps 20
    python -m benchmarks.gpu --shapes llama1b --rows compiled --profile compiled

Sequences of 8,192 tokens of this machine's Python sources, and whole steps: batches read and copied, forward, backward,
clipping, fused AdamW, a log line every ten steps. The hand-written loop is this project's module and chunked loss under
torch.autocast, with its batches ready on the GPU.

MFU counts the FLOPs of the model in bf16, as the run's own log does: the whole square of attention, nothing that is
computed again, and for float8 the same peak. "Causal" counts half of that square, as Megatron does.
"""

import argparse
import gc
import statistics
import tempfile
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.step_overhead import _built, hand_written
from serried.configs.compose import compose
from serried.recipes.text.causal_lm import CausalLM
from serried.runtime.accelerator import device_name
from serried.runtime.session import Session, open_session
from serried.trainer.metrics.peak_flops import peak_flops

LAYERS_8B = [
    "recipe=llama8b", "model.layers=8", "parallel.sync_every_micro_batch=false", "trainer.activation_checkpoint=none",
]  # fmt: skip
SHAPES = {
    "llama1b": ["recipe=llama1b", "trainer.micro_batch=2", "trainer.global_batch=2"],
    "llama1b, 4 sequences": ["recipe=llama1b", "trainer.micro_batch=4", "trainer.global_batch=4"],
    "llama8b, 8 of 32 layers": [*LAYERS_8B, "trainer.micro_batch=1", "trainer.global_batch=1"],
    "llama8b, 8 of 32 layers, 2 sequences": [*LAYERS_8B, "trainer.micro_batch=2", "trainer.global_batch=2"],
}  # fmt: skip
COMPILED = "trainer.compile=true"
ROWS = {
    "hand-written": [],
    "hand-written, compiled": [COMPILED],
    "eager": [],
    "compiled": [COMPILED],
    "compiled, selective": [COMPILED, "trainer.activation_checkpoint=selective"],
    "compiled, float8 rowwise": [COMPILED, "precision=float8"],
    "compiled, float8 tensorwise": [COMPILED, "precision=float8", "precision.scaling=tensorwise"],
    "compiled, adamw8bit": [COMPILED, "optim=adamw8bit"],
}
WARM_UP_STEPS = 3


def measured(
    argv: list[str], row: str, session: Session, steps: int, *, is_profiled: bool
) -> tuple[list[float], int, float, float]:
    """Seconds of each step, bytes allocated at most, FLOPs of a step, and those with half of attention's square."""
    config = compose(argv)
    recipe, trainer = CausalLM(config), None
    recipe.open_data(recipe.prepare(lambda _: None))
    racer: Any
    if row.startswith("hand-written"):
        racer = hand_written(config, recipe, session.device, compiles=COMPILED in ROWS[row])
    else:
        trainer = _built(config, recipe, session)
        racer = trainer.steps()
    for _ in range(WARM_UP_STEPS):
        next(racer)
    seconds = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        started = time.perf_counter()
        next(racer)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated()
    parameters = sum(parameter.numel() for parameter in recipe.build_model().parameters())
    flops = recipe.flops_per_sample(parameters) * config.trainer.global_batch
    if is_profiled:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            next(racer)
            torch.cuda.synchronize()
        print(profiled.key_averages().table(sort_by="self_cuda_time_total", row_limit=24, max_name_column_width=90))
    racer.close()
    if trainer is not None:
        trainer.saver.checkpointer.close()
    model: Any = config.model
    length = config.data.sequence_length
    attention = 12 * model.layers * model.heads * model.attention_head_dim * length**2
    return seconds, peak, flops, flops - attention * config.trainer.global_batch / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", nargs="+", choices=ROWS, default=[], help="rows whose kernels to print too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serried-gpu-") as folder:
        for shape in options.shapes:
            base = None
            for number, row in enumerate(options.rows):
                argv = [
                    "data=stdlib", f"data.cache_dir={folder}/cache", "data.sequence_length=8192",
                    f"run.dir={folder}/{len(shape)}-{number}", "parallel=single", "trainer.steps=100k",
                    "trainer.eval_every=0", "trainer.log_every=10", "checkpoint.every=0", *SHAPES[shape], *ROWS[row],
                ]  # fmt: skip
                with open_session(compose(argv).launch) as session:
                    if number == 0:
                        print(f"{shape} on {device_name(session.device)}, torch {torch.__version__}\n")
                        print(
                            "| | ms/step: median (lowest to highest) | MFU | causal | speed | memory, GiB |\n|"
                            + 6 * " --- |"
                        )
                    try:
                        seconds, peak, flops, causal = measured(
                            argv, row, session, options.steps, is_profiled=row in options.profile
                        )
                    except torch.OutOfMemoryError:
                        print(f"| {row} | out of memory | | | | |", flush=True)
                        continue
                    finally:
                        gc.collect()
                        torch._dynamo.reset()
                        torch.cuda.empty_cache()
                    median = statistics.median(seconds)
                    base = base or median
                    best = peak_flops(device_name(session.device), "bf16")
                    shares = [f"{each / median / best:.1%}" if best else "unknown" for each in (flops, causal)]
                    spread = f"{1000 * min(seconds):.1f} to {1000 * max(seconds):.1f}"
                    times = f"{1000 * median:.1f} ({spread}) | {' | '.join(shares)} | {base / median:.3f}"
                    numbers = f"{times} | {peak / 2**30:.1f}"
                    print(f"| {row} | {numbers} |", flush=True)
            print()


if __name__ == "__main__":
    main()
