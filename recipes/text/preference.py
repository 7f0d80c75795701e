"""Preference training: of two answers to a prompt, make the chosen one more likely than the rejected one.

DPO (https://arxiv.org/abs/2305.18290) and IPO (https://arxiv.org/abs/2310.12036) compare with a reference, the initial
model; ORPO (https://arxiv.org/abs/2403.07691), CPO (https://arxiv.org/abs/2401.08417) and SimPO
(https://arxiv.org/abs/2405.14734) need none. KTO (https://arxiv.org/abs/2402.01306) trains on single answers with a
label and compares with a reference, and with an estimate of the divergence from it over the global batch. The loss is a
sum over pairs or answers, so it does not depend on how they are batched.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.schema.sections import DEFAULT_VALIDATION, TRAINING, RunConfig
from serried.parallel.lora import without_adapters
from serried.parallel.plan import Inputs, LossTerms
from serried.recipes.data.prepared.prepare import cache_folder
from serried.recipes.data.samples.pair_dataset import PairBatch
from serried.recipes.models.layers.lm_head import IGNORE, LanguageModelHead, token_losses
from serried.recipes.text.pair_task import PairTask, pair_terms, weighted_terms
from serried.recipes.text.preference_config import PreferenceSection
from serried.recipes.text.preference_losses import ipo_losses, kto_losses, margin_losses, orpo_losses
from serried.trainer.task import Reference, StepMean

_FOLDER = "reference"


class Preference(PairTask):
    """A language model trained to prefer one of two answers."""

    Config = PreferenceSection

    config: PreferenceSection

    @property
    def unit(self) -> str:  # type: ignore[override]
        return "answers" if self.config.loss == "kto" else "pairs"

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
        # A forward and a backward take 3 units. The reference adds a forward. KTO trains on one of two sequences, and
        # needs a forward of the other.
        forwards = 1 if self._compares_with_base else 0
        units = 4 + 2 * forwards if self.config.loss == "kto" else 2 * (3 + forwards)
        return units / 6 * super().flops_per_sample(parameters)

    # loss -----------------------------------------------------------------------------------------------------------

    @property
    def _needs_token_losses(self) -> bool:
        return True

    def loss(self, model: nn.Module, batch: PairBatch) -> LossTerms:
        return super().loss(model, self.with_base(model, batch))

    def with_base(self, model: nn.Module, batch: PairBatch) -> PairBatch:
        """Return ``batch`` with the base model's log-probabilities as the reference, if the run compares with the base
        model; otherwise ``batch`` unchanged."""
        if not self._compares_with_base:
            return batch
        inputs = self.inputs(batch)
        with without_adapters(model):
            reference = log_probs(model(inputs.stream, **inputs.named), batch)[0]
        return batch._replace(reference=reference.view_as(batch.reference))

    def terms(self, output: Tensor, batch: Any) -> LossTerms:
        if self.config.loss == "kto":
            return self._terms_of_answers(output, batch)
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

    def _terms_of_answers(self, output: Tensor, batch: PairBatch) -> LossTerms:
        section, beta = self.config, self.config.scale
        assert batch.is_desired is not None, "single answers have labels"
        sums, is_desired = log_probs(output, batch)[0][:, 0], batch.is_desired.flatten()
        rewards, divergence = beta * (sums - batch.reference[:, :, 0].flatten()), batch.divergence
        divergence = torch.zeros_like(rewards[0]) if divergence is None else divergence
        losses = kto_losses(
            rewards, beta * divergence, is_desired, section.desirable_weight, section.undesirable_weight
        )
        weights = batch.weights.flatten()
        good, bad = weights * is_desired, weights * ~is_desired
        is_right = (rewards > beta * divergence) == is_desired
        metrics = {
            "reward_accuracy": (is_right.double(), weights), "chosen_reward": (rewards, good),
            "rejected_reward": (rewards, bad), "chosen_log_prob": (sums, good), "rejected_log_prob": (sums, bad),
            "divergence": (divergence.expand_as(rewards), weights),
        }  # fmt: skip
        return weighted_terms(losses, weights, metrics)

    def example_batch(self, samples: int) -> PairBatch:
        batch = super().example_batch(samples)
        if self.config.loss != "kto":
            return batch
        labels = torch.zeros_like(batch.weights, dtype=torch.bool)
        return batch._replace(is_desired=labels, divergence=batch.weights.new_zeros(())).side(0)

    def step_mean(self) -> StepMean | None:
        if self.config.loss != "kto":
            return None

        def use(batch: PairBatch, mean: Tensor) -> PairBatch:
            return batch.side(0)._replace(divergence=mean.clamp(min=0))

        return StepMean(_Divergence(self), use)

    # reference ------------------------------------------------------------------------------------------------------

    @property
    def _compares_with_base(self) -> bool:
        """Whether the reference is the base model of adapters, computed in each step."""
        adapter = self.run.adapter  # training modules in full changes the base model, too
        is_base = adapter.method != "none" and not (adapter.modules_to_save or adapter.trainable_token_indices)
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


class _Divergence:
    """Objective whose mean loss, the log-ratio of the other answers, estimates the divergence from the reference."""

    def __init__(self, task: Preference) -> None:
        self._task, self.slice_sequence = task, task.slice_sequence

    def inputs(self, batch: PairBatch) -> Inputs:
        return self._task.inputs(batch.side(1))

    def loss(self, model: nn.Module, batch: PairBatch) -> LossTerms:
        others = self._task.with_base(model, batch.side(1))
        inputs = self._task.inputs(others)
        return _divergence_terms(model(inputs.stream, **inputs.named), others)

    def terms(self, output: Tensor, batch: PairBatch) -> LossTerms:
        return _divergence_terms(output, batch.side(1))


def _divergence_terms(output: Tensor, others: PairBatch) -> LossTerms:
    is_answer = others.weights.flatten() > 0
    ratios = (log_probs(output, others)[0] - others.reference.flatten(0, 1))[:, 0]
    return LossTerms(ratios.where(is_answer, 0).sum(), is_answer.sum())


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
