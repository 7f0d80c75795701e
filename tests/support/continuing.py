"""Text that a model of a test generates."""

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from serried.configs.schema.sections import ParallelSection
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.layout.mesh import Layout
from serried.parallel.parallelize import parallelize
from serried.parallel.plan import Decoding, ParallelPlan
from serried.recipes.models.family import ModelFamily
from serried.recipes.text.generation import Choose, chooser

GREEDY = chooser(temperature=0, top_p=1, seed=0)
TOKENS = 40
CLEAR = 2e-5
"""Smallest difference of the two largest logits at which rounding errors cannot change the greedy token."""


def on_one_process(model: nn.Module) -> DistributedModel:
    """``model`` with its values."""
    return parallelize(
        model, ParallelPlan(), None, seed=0, layout=Layout("single"), section=ParallelSection(strategy="single"),
        low_dtype=None, device=torch.device("cpu"),
    )  # fmt: skip


def continued(
    model: DistributedModel, family: ModelFamily, prompts: Sequence[Sequence[int]], tokens: int = TOKENS, *,
    rows: int = 1, choose: Choose = GREEDY, ends: Collection[int] = (),
    batches: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> list[list[int]]:  # fmt: skip
    """The next ``tokens`` tokens of each prompt, up to one of ``ends``, computed ``rows`` prompts at a time."""
    how = Decoding(choose, lambda _number, token: token not in ends, family.new_cache, rows, batches)
    return model.generate(prompts, [tokens] * len(prompts), how)


def greedy_and_sampled(seed: int) -> Choose:
    """Choose the likeliest token for prompts with an even number, and sample for the others."""
    sampled = chooser(temperature=0.8, top_p=0.9, seed=seed)

    def choose(logits: Tensor, numbers: Sequence[int]) -> Tensor:
        first, second = logits.topk(2).values.unbind(-1)
        is_greedy = torch.tensor([number % 2 == 0 for number in numbers])
        assert (first - second)[is_greedy].min() > CLEAR if is_greedy.any() else True, "rounding may decide"
        return GREEDY(logits, numbers).where(is_greedy, sampled(logits, numbers))

    return choose
