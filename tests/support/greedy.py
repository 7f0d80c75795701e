"""``train.py`` whose last rank asks in step 2 for too much memory: ``-m tests.support.greedy STAGE KEY=VALUE``."""

import os
import sys
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from serried.configs.schema.declaration import BUILT_IN
from serried.parallel.plan import LossTerms
from serried.parallel.step_phases import BACKWARD, FORWARD, OPTIMIZER
from serried.program import main
from serried.recipes.text.causal_lm import CausalLM
from serried.runtime.exit import leave

ABSURD = 2**50
EVALUATION = "evaluation"


class _Asks(torch.autograd.Function):
    """Asks for too much in the backward."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        del ctx
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        return gradient + torch.empty(ABSURD).sum()


def train_out_of_memory(argv: list[str], stage: str) -> int:
    """As ``train.py`` does it with two sequences a micro-batch and four a step, but for the last rank in ``stage`` of
    step 2."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    is_last = int(os.environ.get("RANK", 0)) == ranks - 1
    micro_batches = 0

    def asks(now: str) -> bool:
        is_step_2 = 2 < micro_batches * ranks <= 4
        return is_last and now == stage and (is_step_2 or stage == EVALUATION)

    class Greedy(CausalLM):
        def loss(self, model: Any, batch: Any) -> LossTerms:
            nonlocal micro_batches
            is_trained = torch.is_grad_enabled()
            micro_batches += is_trained and batch.sample_ids.max() >= 0  # not of a rehearsal
            if asks(FORWARD if is_trained else EVALUATION):
                torch.empty(ABSURD)
            terms = super().loss(model, batch)
            if is_trained and asks(BACKWARD):
                return terms._replace(loss_sum=_Asks.apply(terms.loss_sum))
            return terms

    def before_step(*_: Any) -> None:
        if asks(OPTIMIZER):
            torch.empty(ABSURD)

    hook = register_optimizer_step_pre_hook(before_step)
    try:
        return main(argv, BUILT_IN._replace(task=Greedy))
    finally:
        hook.remove()


if __name__ == "__main__":
    leave(train_out_of_memory(sys.argv[2:], sys.argv[1]))
