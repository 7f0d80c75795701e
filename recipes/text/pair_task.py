"""Base class of tasks that train on pairs of answers: datasets, batches, and FLOPs of a pair."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from serried.configs.schema.sections import WHOLE, RunConfig
from serried.parallel.plan import LossTerms
from serried.recipes.data.prepared.prepare import Prepared
from serried.recipes.data.prepared.summary import marked_lines
from serried.recipes.data.samples.mixture_dataset import mistakes_of
from serried.recipes.data.samples.pair_dataset import Pair, PairBatch, PairDataset, UnpairedDataset, collate_pairs
from serried.recipes.models.layers.attention_choice import FLEX
from serried.recipes.models.layers.lm_head import IGNORE
from serried.recipes.text.causal_lm import CausalLM


class PairTask(CausalLM):
    """A model trained on pairs of answers, one of which is preferred."""

    unit: ClassVar[str] = "pairs"

    def configure(self, run: RunConfig) -> None:
        super().configure(run)
        self._pairs: dict[str, PairDataset] = {}

    def dataset(self, split: str) -> Any:
        if self._keeps_none(split):
            return None
        if split not in self._pairs:
            held_out, first = self._text.held_out, self._text.first
            assert first is not None, "open_data comes first"
            prepared, name = held_out.get(split, first), split
            if split in held_out or split == WHOLE:
                prepared, name = prepared.whole(), "validation"
            with mistakes_of(f"data.validation.{split}" if split in held_out else "data"):
                self._pairs[split] = self._open_pairs(prepared, name)
        return self._pairs[split]

    def _open_pairs(self, prepared: Prepared, split: str) -> PairDataset:
        kind = UnpairedDataset if self._data.format == "unpaired" else PairDataset
        return kind(prepared, split, self._data.sequence_length, packs=self._data.packs_answers)

    def collate_numbered(self, samples: Sequence[Any], ids: np.ndarray) -> Any:
        return collate_pairs(
            samples, ids, self._data.sequence_length, whole=self._needs_one_shape, packed=self._data.packs_answers,
            labelled=self._data.format == "unpaired", isolated=self._isolates,
        )  # fmt: skip

    @functools.cached_property
    def _needs_one_shape(self) -> bool:
        """Whether all batches must be padded to ``data.sequence_length``: with pipeline parallelism, and if a new
        shape would be compiled."""
        if self.sample_split.pipeline != 1 or self.run.trainer.compiles:
            return True
        is_on_gpu = self.run.launch.device != "cpu" and torch.cuda.is_available()
        return is_on_gpu and self.describe_kernels("cuda") == FLEX

    def example_batch(self, samples: int) -> PairBatch:
        tokens = torch.zeros(2 * samples, self._data.sequence_length, dtype=torch.int64)
        reference = torch.zeros(samples, 1, 2, dtype=torch.float64)
        rows = tokens if self._data.packs_answers else None
        positions = tokens if self._isolates else None
        return PairBatch(tokens, tokens, tokens[:samples, 0], reference, reference[:, :, 0], positions, rows)

    def weight_per_sample(self) -> int:
        return 1

    def describe_data(self) -> str:
        return super().describe_data().replace("a sequence", "an answer with its prompt", 1)

    def describe_sample(self) -> list[str]:
        pair: Pair = self.dataset("train")[0][0]
        is_pair = self._data.format == "preference"
        first = "pair, chosen and rejected" if is_pair else f"answer, with the label {str(pair.is_desired).lower()}"
        lines = [f"sample     the first {first}; trained on: lines with >"]
        for number in range(2 if is_pair else 1):
            tokens, targets = pair.tokens[number], pair.targets[number]
            is_learned = np.concatenate(([False], targets != IGNORE))
            whole = np.append(tokens, targets[-1] if is_learned[-1] else self._text.tokenizer.end_id)
            lines += [*(["  ---"] if number else []), *marked_lines(self._text.tokenizer, whole, is_learned)]
        return lines

    def flops_per_sample(self, parameters: int) -> float:
        length = 2 * (self.dataset("train").mean_length if self._text.sources else self._data.sequence_length)
        return length * self._family().flops_per_token(parameters, self._data.sequence_length)


def pair_terms(losses: Tensor, rewards: Tensor, batch: PairBatch, **more: Tensor) -> LossTerms:
    """Return the weighted sum of ``losses`` [pairs], and metrics that show how well ``rewards`` [pairs, 2] separate the
    answers.

    ``more``: further metrics [pairs]. Padding is excluded.
    """
    margins = rewards[:, 0] - rewards[:, 1]
    metrics = {
        "reward_margin": margins, "reward_accuracy": (margins > 0).double(),
        "chosen_reward": rewards[:, 0], "rejected_reward": rewards[:, 1], **more,
    }  # fmt: skip
    weights = batch.weights.flatten()
    return weighted_terms(losses, weights, {name: (values, weights) for name, values in metrics.items()})


def weighted_terms(losses: Tensor, weights: Tensor, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> LossTerms:
    """Return the sum of ``losses`` [answers], and of ``metrics``, times their weights [answers]. Values of weight 0 may
    be NaN."""

    def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
        return (values * weights).where(weights > 0, 0).sum()

    sums = {name: (weighted_sum(values.detach(), each), each.sum()) for name, (values, each) in metrics.items()}
    return LossTerms(weighted_sum(losses, weights).float(), weights.sum(), sums)
