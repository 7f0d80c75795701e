"""Reward models: a score for an answer, learned from pairs of answers (Bradley and Terry 1952).

The head of the language model is replaced by a single row of weights. The score of an answer is the product of that
row and the hidden state of the answer's last token, as in transformers' models for sequence classification.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.schema.sections import RunConfig
from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.plan import LossTerms
from serried.recipes.data.samples.pair_dataset import Pair
from serried.recipes.data.tokenizers.tokenizer import Tokenizer
from serried.recipes.models.layers.lm_head import IGNORE, LanguageModelHead
from serried.recipes.text.pair_task import PairTask, pair_terms
from serried.recipes.text.reward_config import RewardSection
from serried.records.safetensors_files import TensorFolder

_HEAD, _SCORE = "lm_head", "score.weight"
"""Names of the head module, and of its weight in a checkpoint."""

_CLASSIFIERS = {"Gemma3ForCausalLM": "Gemma3TextForSequenceClassification"}
"""Names of transformers' sequence classification classes that do not follow from the name of the language model."""
_WITHOUT_CLASSIFIER = ("glm4_moe",)
"""Model families for which transformers has no sequence classification class."""


class ScoreHead(nn.Module):
    """Maps hidden states [B, S, D] to one score per token, [B, S] fp32."""

    def __init__(self, dim: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, dim, device=device))

    def forward(self, hidden: Tensor, targets: Tensor | None = None, shared_weight: Tensor | None = None) -> Tensor:
        """Takes the arguments of ``LanguageModelHead.forward``, and ignores ``targets`` and ``shared_weight``."""
        del targets, shared_weight
        return F.linear(hidden, self.weight.to(hidden.dtype)).squeeze(-1).float()


class Reward(PairTask):
    """A language model that scores answers."""

    Config = RewardSection

    def configure(self, run: RunConfig) -> None:
        super().configure(run)
        if "tie_embeddings" in type(self._model).model_fields:  # the score head has its own weight
            self._model = self._model.model_copy(update={"tie_embeddings": False})

    # data -----------------------------------------------------------------------------------------------------------

    def collate_numbered(self, samples: Sequence[Any], ids: np.ndarray) -> Any:
        ended = [tuple(_up_to_end(pair, self._data.sequence_length) for pair in sample) for sample in samples]
        return super().collate_numbered(ended, ids)

    # model ----------------------------------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        model = super().build_model()
        head = getattr(model, _HEAD, None)
        if not isinstance(head, LanguageModelHead) or head.weight is None:
            raise UserError(
                f"model.family={self._model.family} has no LanguageModelHead called {_HEAD} to replace with a score "
                "head; use a built-in family"
            )
        setattr(model, _HEAD, ScoreHead(head.weight.shape[1], head.weight.device))
        return model

    def heads(self) -> Sequence[str]:
        return (_HEAD,)

    def adapter_settings(self) -> Mapping[str, Any]:
        return {"task_type": "SEQ_CLS"}

    def initial_std(self, name: str) -> float | None:
        return 0.02 if name == f"{_HEAD}.weight" else super().initial_std(name)

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        return (Fragment.whole(_SCORE, shape),) if name == f"{_HEAD}.weight" else super().exported(name, shape)

    def exported_from(self, folder: Path) -> Callable[[str, Sequence[int]], tuple[Fragment, ...]]:
        exported = super().exported_from(folder)
        if _SCORE in TensorFolder(folder).specs:
            return exported
        return lambda name, shape: () if name == f"{_HEAD}.weight" else exported(name, shape)

    @property
    def _classifier(self) -> str:
        """Name of the transformers class that opens a checkpoint; empty if there is none."""
        if self._model.family in _WITHOUT_CLASSIFIER:
            return ""
        name = str(self._family().export_config(None).get("architectures", [""])[0])
        return _CLASSIFIERS.get(name) or re.sub("ForCausalLM|LMHeadModel", "ForSequenceClassification", name)

    @property
    def opens_in(self) -> str:
        return f"transformers ({self._classifier})" if self._classifier else ""

    def _export_config(self, tokenizer: Tokenizer) -> dict[str, Any]:
        config = super()._export_config(tokenizer)
        if not self._classifier:
            return config
        # transformers reads the score at the last non-padding token.
        padding = _padding_id(tokenizer)
        labels: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return config | {"architectures": [self._classifier], "pad_token_id": padding, **labels}

    def next_command(self, start: str) -> str:
        opens = "transformers.AutoModelForSequenceClassification.from_pretrained(CHECKPOINT)"
        is_whole = self._classifier and self.run.adapter.method == "none"
        return f"scores: {opens}" if is_whole else super().next_command(start)

    def _no_text(self, *_: Any, **__: Any) -> Any:
        raise UserError(
            "a reward model scores answers and cannot generate text; open it with transformers' "
            "AutoModelForSequenceClassification"
        )

    sample = text_ids = prompt = write = _no_text

    # loss -----------------------------------------------------------------------------------------------------------

    def terms(self, output: Tensor, batch: Any) -> LossTerms:
        scores = batch.sums(output.double() * (batch.targets != IGNORE))
        return pair_terms(-F.logsigmoid(scores[:, 0] - scores[:, 1]), scores, batch)


def _up_to_end(pair: Pair, most: int) -> Pair:
    """Truncate both sequences of ``pair`` after the last token of the answer, and to ``most`` tokens. Only the last
    token of each is a target."""
    tokens, targets = [], []
    for its_tokens, its_targets in zip(pair.tokens, pair.targets, strict=True):
        last = int(np.flatnonzero(its_targets != IGNORE)[-1])
        sequence = np.append(its_tokens[: last + 1], its_targets[last])[:most]
        tokens.append(sequence)
        targets.append(np.where(np.arange(len(sequence)) == len(sequence) - 1, sequence, IGNORE))
    return pair._replace(tokens=(tokens[0], tokens[1]), targets=(targets[0], targets[1]))


def _padding_id(tokenizer: Tokenizer) -> int | None:
    """Return the id of the tokenizer's padding token; None if it has none."""
    files = tokenizer.spec().get("files", {})
    named = json.loads(files.get("tokenizer_config.json", "{}")).get("pad_token")
    named = named.get("content") if isinstance(named, dict) else named
    added = json.loads(files.get("tokenizer.json", "{}")).get("added_tokens", [])
    return next((token["id"] for token in added if token["content"] == named), None)
