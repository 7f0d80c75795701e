"""Tokens per second of text generation: prompts in one batch, compared with one prompt after the other.

    python -m benchmarks.generation_speed                    # on this CPU, one thread
    python -m benchmarks.generation_speed --models qwen3_600m --prompts 32 --tokens 20
    python -m benchmarks.generation_speed --device cuda --precision bf16

Both use the same model with random weights, and the cache. They take turns, so that a machine that slows down slows
both. Prompts have different lengths; texts end at no token. The texts are compared as well.
"""

import argparse
import statistics
import time
from functools import partial

import torch

from serried.configs.compose import compose
from serried.configs.schema.registry import models
from serried.configs.schema.sections import ParallelSection
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.layout.mesh import Layout
from serried.parallel.parallelize import parallelize
from serried.parallel.plan import Decoding
from serried.recipes.models.family import ModelFamily, family_of
from serried.recipes.text.generation import chooser


def built(preset: str, device: torch.device, *, is_low: bool) -> tuple[ModelFamily, DistributedModel]:
    """Return the model of ``preset`` with random weights."""
    section = compose([f"model={preset}", "data.tokenizer=bytes"]).model
    family = family_of(models.get(section.family).load(), section, section.vocab_size or 256)
    model = family.build()
    return family, parallelize(
        model, family.parallel_plan(model), family.initial_std, seed=0, layout=Layout("single"),
        section=ParallelSection(strategy="single"), low_dtype=torch.bfloat16 if is_low else None, device=device,
    )  # fmt: skip


def measure(preset: str, arguments: argparse.Namespace) -> None:
    """Print the tokens per second of both, and their ratio."""
    family, model = built(preset, torch.device(arguments.device), is_low=arguments.precision == "bf16")
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, arguments.longest + 1, (arguments.prompts,), generator=generator).tolist()
    prompts = [torch.randint(family.vocab_size, (length,), generator=generator).tolist() for length in lengths]

    def write(rows: int) -> tuple[float, list[list[int]]]:
        how = Decoding(chooser(temperature=0.8, top_p=1.0, seed=1), lambda *_: True, family.new_cache, rows)
        started = time.perf_counter()
        found = model.generate(prompts, [arguments.tokens] * len(prompts), how)
        return sum(map(len, found)) / (time.perf_counter() - started), found

    ways = [partial(write, 1), partial(write, len(prompts))]
    for way in ways:
        way()
    turns = [[way() for way in ways] for _ in range(arguments.turns)]
    alone, together = (statistics.median(turn[index][0] for turn in turns) for index in (0, 1))
    ratio = statistics.median(turn[1][0] / turn[0][0] for turn in turns)
    texts = zip(*(turns[0][index][1] for index in (0, 1)), strict=True)
    same = sum(one == other for one, other in texts)
    print(f"{preset}: {len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {arguments.tokens} new tokens")
    print(f"    one by one {alone:,.0f} tokens/s, batched {together:,.0f}, ratio {ratio:.1f}; {same} texts are equal")


def main() -> None:
    """Measure each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--longest", type=int, default=64, help="largest number of tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for preset in arguments.models:
        measure(preset, arguments)


if __name__ == "__main__":
    main()
