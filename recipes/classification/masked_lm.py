"""Masked language modeling with transformers' models: predict masked tokens of a text.

Devlin et al., "BERT: pre-training of deep bidirectional transformers for language understanding", 2018.
"""

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from serried.configs.errors import UserError
from serried.configs.plain_data import read_json
from serried.configs.schema.sections import RunConfig
from serried.recipes.classification.masked_lm_config import MaskedLMSection
from serried.recipes.classification.text_classification import TextBatch, TextClassification
from serried.recipes.data.labelled.labelled_texts import open_encoder, open_texts
from serried.recipes.data.labelled.splits_and_classes import LabelledData, MappedSamples
from serried.recipes.models.layers.lm_head import IGNORE

_USUAL_MASKS = ("[MASK]", "<mask>")
"""Mask tokens to try if no tokenizer file names one."""


class MaskedText(NamedTuple):
    """A text with masked tokens."""

    tokens: np.ndarray
    """[tokens], int64, some of them masked"""
    targets: np.ndarray
    """[tokens], int64; ``IGNORE`` where nothing is predicted"""


class Masking:
    """Masks random tokens of a text, but no special tokens."""

    def __init__(self, encoder: Any, mask: str, share: float) -> None:
        """``encoder``: tokenizer of the library ``tokenizers``, with the token ``mask``. ``share``: fraction of tokens
        to predict."""
        self._mask, self._share = encoder.token_to_id(mask), share
        self.ids = encoder.get_vocab_size()
        self._special = [number for number, each in encoder.get_added_tokens_decoder().items() if each.special]

    def __call__(self, tokens: np.ndarray, seed: int) -> MaskedText:
        """Return ``tokens`` with random masking that depends only on ``seed``. Of the tokens to predict, 80% are
        masked and 10% are replaced by a random token."""
        random, count = np.random.default_rng(seed), len(tokens)
        is_predicted = (random.random(count) < self._share) & ~np.isin(tokens, [*self._special, self._mask])
        becomes, others = random.random(count), random.integers(self.ids, size=count)
        shown = np.where(is_predicted & (becomes < 0.8), self._mask, tokens)
        shown = np.where(is_predicted & (becomes >= 0.9), others, shown)
        return MaskedText(shown, np.where(is_predicted, tokens, IGNORE))


class MaskedLM(TextClassification):
    """A transformers model that predicts masked tokens of a text, as a classification of each token."""

    Config = MaskedLMSection
    unit = "predictions"
    architecture = "MaskedLM"
    classes: Sequence[str] = ()
    defaults: ClassVar[Mapping[str, Any]] = {
        **TextClassification.defaults,
        "optim.lr": 5e-5, "checkpoint.best_metric": "loss", "checkpoint.best_mode": "min",
    }  # fmt: skip
    config: MaskedLMSection

    def configure(self, run: RunConfig) -> None:
        if run.adapter.method != "none":
            raise UserError(
                f"adapter.method={run.adapter.method} is not supported with task={run.task.name}, as the head of these "
                "models is tied to the embeddings; use adapter=none, and freeze parameters with "
                "optim.groups.NAME.frozen=true"
            )
        super().configure(run)

    def classes_in(self, checkpoint: Path) -> None:
        """Return None: the classes are the tokens of the tokenizer."""

    # data -----------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _encoder(self) -> Any:
        return open_encoder(self._folder, self.config.sequence_length, self._sides.truncation)

    @functools.cached_property
    def _masking(self) -> Masking:
        named: list[Any] = []
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            with suppress(OSError, ValueError):
                entry = read_json(self._folder / name).get("mask_token")
                named.append(entry.get("content") if isinstance(entry, dict) else entry)
        for token in (*named, *_USUAL_MASKS):
            if isinstance(token, str) and self._encoder.token_to_id(token) is not None:
                return Masking(self._encoder, token, self.config.mask_share)
        raise UserError(
            f"task.model={self.config.model}: the tokenizer has no mask token (mask_token in tokenizer_config.json); "
            "use a masked language model, such as BERT, RoBERTa or ModernBERT"
        )

    def open_samples(self) -> LabelledData:
        return open_texts(self.config, self._encoder, self._form)

    def dataset(self, split: str) -> Any:
        texts = super().dataset(split)
        if split == "train" or texts is None:
            return texts
        masking = self._masking
        # The masks are the same in each evaluation.
        return MappedSamples(texts, lambda sample, index: masking(sample.tokens, index))

    def augment(self, sample: Any, seed: int) -> MaskedText:
        return self._masking(sample.tokens, seed)

    def collate(self, samples: Sequence[Any]) -> TextBatch:
        return TextBatch(*self._padded(samples), self._filled([sample.targets for sample in samples], IGNORE))

    def example_batch(self, samples: int) -> TextBatch:
        tokens = torch.ones(samples, self.config.sequence_length, dtype=torch.int64)
        return TextBatch(tokens, tokens, tokens)

    def weight_per_sample(self) -> int:
        return max(1, round(self.config.mask_share * self.config.sequence_length))

    # model ----------------------------------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        ids = self._masking.ids
        model: Any = super().build_model()
        rows = model.config.vocab_size
        if ids > rows:
            raise UserError(
                f"task.model={self.config.model}: the tokenizer has {ids:,} tokens, but the embedding of the model has "
                f"only {rows:,} rows; use the tokenizer that the model was trained with"
            )
        trained: nn.Module = model
        return trained

    # descriptions ---------------------------------------------------------------------------------------------------

    def describe_model(self) -> str:
        c = self.config
        return f"{c.model} of transformers, as a masked language model" + ", pretrained" * c.pretrained

    def describe_data(self) -> str:
        return f"{super().describe_data()}, {100 * self.config.mask_share:.3g}% of the tokens predicted"
