"""Preference training: of two answers to a prompt, make the chosen one more likely than the rejected one.

DPO (https://arxiv.org/abs/2305.18290) and IPO (https://arxiv.org/abs/2310.12036) compare with a reference, the initial
model; ORPO (https://arxiv.org/abs/2403.07691), CPO (https://arxiv.org/abs/2401.08417) and SimPO
(https://arxiv.org/abs/2405.14734) need none. The loss is a sum over pairs and never a mean over a batch, so it does not
depend on how pairs are batched.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.hugging_face.model_folder import ANY_FAMILY
from serried.configs.schema.sections import DEFAULT_VALIDATION, TRAINING, RunConfig
from serried.parallel.lora import without_adapters
from serried.parallel.plan import Inputs, LossTerms
from serried.recipes.data.prepared.prepare import cache_folder
from serried.recipes.data.samples.pair_dataset import PairBatch
from serried.recipes.models.layers.lm_head import IGNORE, LanguageModelHead, token_losses
from serried.recipes.text.pair_task import PairTask, pair_terms
from serried.recipes.text.preference_config import PreferenceSection
from serried.recipes.text.preference_losses import ipo_losses, margin_losses, orpo_losses
from serried.trainer.task import Reference

_FOLDER = "reference"


class Preference(PairTask):
    """A language model trained to prefer one of two answers."""

    Config = PreferenceSection

    config: PreferenceSection

    def configure(self, run: RunConfig) -> None:
        super().configure(run)
        if self.config.needs_reference and not (self._model.path and self._model.pretrained):
            use = "model.pretrained=true" if self._model.path else "model.path=FOLDER_OR_NAME"
            raise UserError(
                f"task.loss={self.config.loss} uses the initial model as its reference, and random weights are of no "
                f"use as a reference; use {use}"
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
                reference = log_probs(model(inputs.stream, **inputs.named), batch)[0]
            batch = batch._replace(reference=reference.view_as(batch.reference))
        return super().loss(model, batch)

    def terms(self, output: Tensor, batch: Any) -> LossTerms:
        sums, lengths = log_probs(output, batch)
        section, beta, means = self.config, self.config.scale, sums / lengths
        if section.loss == "orpo":
            rewards, losses = beta * means, orpo_losses(means, beta)
        elif section.loss == "ipo":
            ratios = sums - batch.reference.flatten(0, 1)
            rewards, losses = beta * ratios, ipo_losses(ratios / lengths, beta)
        else:
            if section.loss == "dpo":
                rewards = beta * (sums - batch.reference.flatten(0, 1))
            else:
                rewards = beta * (means if section.loss == "simpo" else sums)
            losses = margin_losses(rewards, section.target_margin)
        losses = losses - section.weight_of_nll * means[:, 0]
        return pair_terms(losses, rewards, batch, chosen_log_prob=sums[:, 0], rejected_log_prob=sums[:, 1])

    # reference ------------------------------------------------------------------------------------------------------

    @property
    def _compares_with_base(self) -> bool:
        """Whether the reference is the base model of adapters, computed in each step."""
        adapter = self.run.adapter  # modules that are trained in full change the model without its adapters
        is_base = adapter.method != "none" and not adapter.modules_to_save
        return self.config.needs_reference and is_base and self.sample_split.pipeline == 1

    def reference_numbers(self) -> Reference | None:
        if not self.config.needs_reference or self._compares_with_base:
            return None
        datasets = [self.dataset(split) for split in (TRAINING, DEFAULT_VALIDATION, *self.further_validation())]
        columns = 2 * max(dataset.most_pairs for dataset in datasets if dataset is not None)

        def numbers(output: Tensor, batch: PairBatch) -> tuple[Tensor, Tensor]:
            found = log_probs(output, batch)[0].view_as(batch.reference).flatten(1)
            return batch.sample_ids, F.pad(found, (0, columns - found.shape[1]))

        return Reference(
            columns=columns, folder=cache_folder(self._data) / _FOLDER, settings=self.reference_settings(),
            numbers=numbers, use=self._take_reference,
        )  # fmt: skip

    def describe_reference(self) -> str:
        if not self.config.needs_reference:
            return f"none ({self.config.loss} has no reference model)"
        if self._compares_with_base:
            return "the model without its adapters: one more forward in each step, no second model"
        return (
            f"log-probabilities of {self._model.path}, computed once on this layout before the first step and cached "
            f"in {cache_folder(self._data) / _FOLDER}; no second model"
        )

    def _take_reference(self, split: str, numbers: np.ndarray) -> None:
        """Use ``numbers``, log-probabilities [samples, columns], as the reference of ``split``."""
        self.dataset(split).reference = numbers

    def reference_settings(self) -> Mapping[str, Any]:
        """Return the settings that affect the reference log-probabilities, in addition to the weights and the pairs."""
        model, adapter = self._model.model_dump(mode="json", exclude={"path", "name"}), self.run.adapter
        # A frozen model may be stored in fewer bits than a trained one.
        frozen = None if adapter.method == "none" else {"quantize": adapter.quantize}
        return {"model": model, "precision": self.run.precision.name, "frozen": frozen}


def log_probs(output: Tensor, batch: PairBatch) -> tuple[Tensor, Tensor]:
    """Return the log-probability and the number of tokens of each answer, [batch x P, sides], fp64 and int64.

    ``output``: the model's logits [sequences, S, V], or its loss of each token [sequences, S].
    """
    targets = batch.targets
    if output.dim() == 3:
        losses = F.cross_entropy(output.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="none")
        output = losses.view(targets.shape)
    # In fp64: the loss subtracts two long sums, and would lose digits that it needs in fp32.
    return -batch.sums(output.double()), batch.sums((targets != IGNORE).long()).clamp(min=1)
