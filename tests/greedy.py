"""``train.py`` whose last rank asks in step 2 for more memory than there is: ``-m tests.greedy STAGE KEY=VALUE``."""

import os
import sys
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from serried.parallel.phases import BACKWARD, FORWARD, OPTIMIZER
from serried.parallel.plan import LossTerms
from serried.program import main
from serried.recipes.causal_lm import CausalLM
from serried.runtime.ending import leave
from serried.trainer.step import TrainStep

ABSURD = 2**50


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
    """As ``train.py`` does it, but for the last rank in ``stage`` of step 2."""
    loss, step, took = CausalLM.loss, TrainStep.__call__, [0]
    is_greedy = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1

    def greedy_loss(self: CausalLM, model: Any, batch: Any) -> LossTerms:
        is_step_2 = took[0] == 1 and torch.is_grad_enabled()
        if is_greedy and ((stage == FORWARD and is_step_2) or (stage == "evaluation" and not torch.is_grad_enabled())):
            torch.empty(ABSURD)
        terms = loss(self, model, batch)
        if is_greedy and stage == BACKWARD and is_step_2:
            return terms._replace(loss_sum=_Asks.apply(terms.loss_sum))
        return terms

    def greedy_step(self: TrainStep, *arguments: Any) -> Tensor:
        if is_greedy and stage == OPTIMIZER and took[0] == 1:
            self._optimizer.register_step_pre_hook(lambda *_: torch.empty(ABSURD) and None)
        result = step(self, *arguments)
        took[0] += 1
        return result

    with patch.object(CausalLM, "loss", greedy_loss), patch.object(TrainStep, "__call__", greedy_step):
        return main(argv)


if __name__ == "__main__":
    leave(train_out_of_memory(sys.argv[2:], sys.argv[1]))
