"""Preference training: of two answers to a prompt, make the chosen one more likely than the rejected one.

DPO (https://arxiv.org/abs/2305.18290) compares with a reference, the initial model; ORPO
(https://arxiv.org/abs/2403.07691) and SimPO (https://arxiv.org/abs/2405.14734) need none. The loss is a sum over
pairs and never a mean over a batch, so it does not depend on how pairs are batched.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.hugging_face.model_folder import ANY_FAMILY
from serried.configs.schema.sections import RunConfig
from serried.parallel.lora import without_adapters
from serried.parallel.plan import Inputs, LossTerms
from serried.recipes.data.prepared.prepare import cache_folder
from serried.recipes.data.samples.pair_dataset import PairBatch
from serried.recipes.models.layers.lm_head import IGNORE, LanguageModelHead, token_losses
from serried.recipes.text.pair_task import PairTask, pair_terms
from serried.recipes.text.preference_config import PreferenceSection
from serried.trainer.task import Reference

_FOLDER = "reference"


class Preference(PairTask):
    """A language model trained to prefer one of two answers."""

    Config = PreferenceSection

    config: PreferenceSection

    def configure(self, run: RunConfig) -> None:
        super().configure(run)
        if self.config.loss == "dpo" and not (self._model.path and self._model.pretrained):
            raise UserError(
                "task.loss=dpo compares with the initial model of the run, and random weights are not worth comparing "
                f"with; use {'model.pretrained=true' if self._model.path else 'model.path=FOLDER_OR_NAME'}"
            )

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for module in model.modules():
            if isinstance(module, LanguageModelHead):
                module.loss = token_losses
        return model

    def flops_per_sample(self, parameters: int) -> float:
        passes = 4 / 3 if self._compares_with_base else 1  # the reference adds a forward
        return passes * super().flops_per_sample(parameters)

    # loss -----------------------------------------------------------------------------------------------------------

    def inputs(self, batch: Any) -> Inputs:
        inputs = self._family().inputs(batch)
        if self._model.family != ANY_FAMILY:
            return inputs
        # The loss is not a sum over tokens: the log-probability of each answer is computed from logits.
        return inputs._replace(named={name: each for name, each in inputs.named.items() if name != "targets"})

    def loss(self, model: nn.Module, batch: PairBatch) -> LossTerms:
        if self._compares_with_base:
            inputs = self.inputs(batch)
            with without_adapters(model):
                batch = batch._replace(reference=log_probs(model(inputs.stream, **inputs.named), batch)[0])
        return super().loss(model, batch)

    def terms(self, output: Tensor, batch: Any) -> LossTerms:
        sums, lengths = log_probs(output, batch)
        is_dpo, beta = self.config.loss == "dpo", self.config.scale
        rewards = beta * (sums - batch.reference) if is_dpo else beta * sums / lengths
        if self.config.loss == "orpo":
            losses = orpo_losses(sums / lengths, beta)
        else:
            losses = margin_losses(rewards, 0.0 if is_dpo else self.config.target_margin)
        return pair_terms(losses, rewards, batch, chosen_log_prob=sums[:, 0], rejected_log_prob=sums[:, 1])

    # reference ------------------------------------------------------------------------------------------------------

    @property
    def _compares_with_base(self) -> bool:
        """Whether the reference is the base model of adapters, computed in each step."""
        return self.config.loss == "dpo" and self.run.adapter.method != "none" and self.sample_split.pipeline == 1

    def reference_numbers(self) -> Reference | None:
        if self.config.loss != "dpo" or self._compares_with_base:
            return None
        return Reference(
            columns=2, folder=cache_folder(self._data) / _FOLDER, settings=self.reference_settings(),
            numbers=lambda output, batch: (batch.sample_ids, log_probs(output, batch)[0]), use=self._take_reference,
        )  # fmt: skip

    def describe_reference(self) -> str:
        if self.config.loss != "dpo":
            return f"none: {self.config.loss} needs none"
        if self._compares_with_base:
            return "the model without its adapters, one forward more in each step; no second model"
        return (
            f"log-probabilities by {self._model.path}, computed once before the first step on this layout and kept in "
            f"{cache_folder(self._data) / _FOLDER}; no second model"
        )

    def _take_reference(self, split: str, numbers: np.ndarray) -> None:
        """Use ``numbers``, log-probabilities [pairs, 2], as the reference of ``split``."""
        self.dataset(split).reference = numbers

    def reference_settings(self) -> Mapping[str, Any]:
        """Return the settings that affect the reference log-probabilities, in addition to the weights and the pairs."""
        model, adapter = self._model.model_dump(mode="json", exclude={"path", "name"}), self.run.adapter
        # A frozen model may be stored in fewer bits than a trained one.
        frozen = None if adapter.method == "none" else {"quantize": adapter.quantize}
        return {"model": model, "precision": self.run.precision.name, "frozen": frozen}


def log_probs(output: Tensor, batch: PairBatch) -> tuple[Tensor, Tensor]:
    """Return the log-probability and the number of tokens of each answer, [batch, 2], fp64 and int64.

    ``output``: the model's logits [2 x batch, S, V], or its loss of each token [2 x batch, S].
    """
    targets = batch.targets
    if output.dim() == 3:
        losses = F.cross_entropy(output.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="none")
        output = losses.view(targets.shape)
    # In fp64: the loss subtracts two long sums, and would lose digits that it needs in fp32.
    return -output.double().sum(1).view(-1, 2), (targets != IGNORE).sum(1).clamp(min=1).view(-1, 2)


def margin_losses(rewards: Tensor, margin: float) -> Tensor:
    """Return the loss of each pair from the rewards of both answers, [pairs, 2].

    For DPO, rewards are beta x the log-ratio to the reference, and ``margin`` is 0. For SimPO, rewards are beta x the
    mean log-probability per token.
    """
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - margin)


def orpo_losses(means: Tensor, beta: float) -> Tensor:
    """Return the ORPO loss of each pair: the chosen answer's loss plus ``beta`` x the loss of the odds ratio.

    ``means``: mean log-probability per token of both answers, [pairs, 2].
    """
    # Log-odds, log p - log(1 - p). log(1 - p) uses expm1 near p = 1 and log1p near p = 0: the other loses digits there.
    means = means.clamp(max=-1e-12)
    rest = torch.where(means > -0.6931471805599453, torch.log(-torch.expm1(means)), torch.log1p(-torch.exp(means)))
    odds = means - rest
    return -means[:, 0] - beta * F.logsigmoid(odds[:, 0] - odds[:, 1])
