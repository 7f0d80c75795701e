"""Sequence classification with transformers' models: one class for each text."""

import functools
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.hugging_face.model_folder import CONFIG, model_folder
from serried.configs.plain_data import NotPlainData, read_json
from serried.configs.schema.sections import RunConfig
from serried.configs.schema.tasks import TextsSection
from serried.parallel.plan import LossTerms
from serried.recipes.classification.classification_task import Classification
from serried.recipes.classification.text_classification_config import TextClassSection
from serried.recipes.data.labelled.labelled_texts import LabelledText, open_encoder, open_texts
from serried.recipes.data.labelled.splits_and_classes import LabelledData
from serried.recipes.data.tokenizers.tokenizer import changed_token
from serried.recipes.data.tokenizers.transformers_tokenizer import Sides, difference, opened, sides
from serried.recipes.models.hugging_face.classifier import build_classifier, not_built

_WIDTH_MULTIPLE = 8
"""Batches are padded to a multiple of this length."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


class TextBatch(NamedTuple):
    """Batch of texts."""

    tokens: Tensor
    """[batch, sequence], int64"""
    mask: Tensor
    """[batch, sequence], int64; 0 for padding"""
    labels: Tensor
    """[batch], or [batch, sequence]"""


class TextClassification(Classification):
    """A transformers model that predicts the class of a text."""

    Config: ClassVar[type[TextsSection]] = TextClassSection
    unit = "texts"
    defaults: ClassVar[Mapping[str, Any]] = {
        "trainer.steps": 1000, "trainer.global_batch": 32, "trainer.micro_batch": 8, "trainer.eval_batches": 10**6,
        "precision": "bf16", "optim.lr": 3e-5, "optim.weight_decay": 0.01, "schedule.warmup_steps": 100,
        "checkpoint.best_metric": "accuracy", "checkpoint.best_mode": "max",
    }  # fmt: skip
    config: TextsSection
    architecture: ClassVar[str] = "SequenceClassification"
    """Name of transformers' class, after ``AutoModelFor``."""

    def configure(self, run: RunConfig) -> None:
        super().configure(run)
        self._heads: list[str] = []
        if run.adapter.method != "none" and not self.config.pretrained:
            raise UserError(
                f"adapter.method={run.adapter.method} with task.pretrained=false: only adapters are trained, so the "
                "model's weights would stay random; use task.pretrained=true"
            )

    # data -----------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _folder(self) -> Path:
        patterns = ["*.json", *["*.safetensors"] * self.config.pretrained]
        return model_folder(self.config.model, *patterns, key="task.model")

    def open_samples(self) -> LabelledData:
        encoder = open_encoder(self._folder, self.config.sequence_length, self._sides.truncation)
        return open_texts(self.config, encoder, self._form)

    @functools.cached_property
    def _theirs(self) -> Any:
        """The tokenizer, opened by transformers; None if transformers cannot open it."""
        return opened(str(self._folder))

    @functools.cached_property
    def _sides(self) -> Sides:
        return sides(self._theirs)

    @functools.cached_property
    def _found(self) -> dict[str, Any]:
        """Content of ``config.json``."""
        try:
            return read_json(self._folder / CONFIG)
        except (OSError, NotPlainData):
            return {}  # building the model reports the problem

    def prepare(self, show: Callable[[str], None]) -> str:
        del show
        return str(self._folder)  # one process per node downloads missing files

    @functools.cached_property
    def _padding(self) -> int:
        """Id of the padding token: the model's own, or else a token that no text ends with, since models classify by
        the last token that is not padding. Raises ``UserError`` if there is none."""
        pad, ends = self._found.get("pad_token_id"), self._found.get("eos_token_id")
        if isinstance(pad, int):
            return pad
        encoder, several = open_encoder(self._folder, 2**20), ends if isinstance(ends, list) else []
        marks = [number for number, each in encoder.get_added_tokens_decoder().items() if each.special]
        last = encoder.encode("a").ids[-1:]
        for token in (ends, self._sides.pad_id, self._sides.end_id, *several, *marks):
            if isinstance(token, int) and token not in last and encoder.id_to_token(token) is not None:
                return token
        raise UserError(
            f"task.model={self.config.model}: the tokenizer has no padding token, such as <pad>; set pad_token_id in "
            f"{self._folder / CONFIG}"
        )

    @property
    def _form(self) -> str:
        """Description of the padding and truncation, for the data fingerprint; empty if they are as in earlier
        versions."""
        form = [f"padding on the {self._sides.padding}"] * (self._sides.padding != "right")
        form += [f"truncation on the {self._sides.truncation}"] * (self._sides.truncation != "right")
        ids = [self._found.get(key) for key in ("pad_token_id", "eos_token_id")]
        if self._padding != next((token for token in ids if isinstance(token, int)), 0):
            form.append(f"padding token {self._padding}")
        return "".join(f"; {difference}" for difference in form)

    def collate(self, samples: Sequence[LabelledText]) -> TextBatch:
        return TextBatch(*self._padded(samples), torch.tensor([sample.label for sample in samples]))

    def _padded(self, samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return the tokens of ``samples``, padded to one length, and the mask."""
        rows = [sample.tokens for sample in samples]
        return self._filled(rows, self._padding), self._filled([np.ones_like(row) for row in rows], 0)

    def _filled(self, rows: Sequence[np.ndarray], value: int) -> Tensor:
        """Stack ``rows``, each [tokens], padded to one length with ``value``."""
        longest, is_left = max(map(len, rows)), self._sides.padding == "left"
        if is_left and not any(key.startswith("rope_") for key in self._found):
            longest = self.config.sequence_length  # positions of tokens must not depend on other texts of the batch
        width = min(-(-longest // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE, self.config.sequence_length)
        stacked = np.full((len(rows), width), value, np.int64)
        for into, row in zip(stacked, rows, strict=True):
            into[slice(width - len(row), None) if is_left else slice(len(row))] = row
        return torch.from_numpy(stacked)

    def example_batch(self, samples: int) -> Any:
        tokens = torch.ones(samples, self.config.sequence_length, dtype=torch.int64)
        return TextBatch(tokens, tokens, tokens[:, 0] * 0)

    # model ----------------------------------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        try:
            model, new = build_classifier(self.config, self.classes, self.architecture, {}, self._padding)
        except UserError:
            raise
        except Exception as error:  # the code of a model may raise any exception
            raise not_built(f"task.model={self.config.model}", self.config.pretrained, "texts", error) from None
        longest = getattr(model.config, "max_position_embeddings", None)
        table: Any = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
        if isinstance(longest, int) and getattr(table, "padding_idx", None) is not None:
            longest -= table.padding_idx + 1  # RoBERTa's positions start after the padding id
        if isinstance(longest, int) and longest < self.config.sequence_length:
            raise UserError(
                f"task.sequence_length={self.config.sequence_length} exceeds the {longest} tokens that "
                f"task.model={self.config.model} supports; use task.sequence_length={longest}"
            )
        model.config.use_cache = False
        self._heads = _new_modules(model, new)
        self._of_transformers(model)
        if self.run.adapter.method != "none":
            self._check_names()
        return model

    def _check_names(self) -> None:
        """Raise ``UserError`` if checkpoints use other parameter names than the model, since PEFT finds modules by
        name."""
        for name, (first, *_) in self._fragments.items():
            if first.name != name:
                raise UserError(
                    f"adapter.method={self.run.adapter.method} is not supported with task.model={self.config.model}: "
                    f"transformers saves {name} as {first.name}, so PEFT would not find it; use adapter=none"
                )

    def heads(self) -> Sequence[str]:
        return self._heads

    def loss(self, model: nn.Module, batch: TextBatch) -> LossTerms:
        return self._terms(model, model(input_ids=batch.tokens, attention_mask=batch.mask), batch.labels)

    # descriptions ---------------------------------------------------------------------------------------------------

    def describe_model(self) -> str:
        c = self.config
        return f"{c.model} of transformers, {len(self.classes):,} classes" + ", pretrained" * c.pretrained

    def describe_data(self) -> str:
        return f"{self._sizes('texts')}, at most {self.config.sequence_length:,} tokens each"

    def notes(self, starts_from_scratch: bool) -> Sequence[str]:
        encoder = open_encoder(self._folder, 2**20)
        marks = {each.content: number for number, each in encoder.get_added_tokens_decoder().items()}
        found = difference(
            "task.model", self.config.model, self._theirs, lambda text: encoder.encode(text).ids, marks,
            ", a copy of the model's folder",
        )  # fmt: skip
        return [*super().notes(starts_from_scratch), *([] if found is None else [found])]

    def adapter_settings(self) -> Mapping[str, Any]:
        return {"task_type": "SEQ_CLS", "base_model_name_or_path": self.config.model}

    def check_resumed(self, checkpoint: Path) -> None:
        super().check_resumed(checkpoint)
        with suppress(OSError):
            now = (self._folder / _TOKENIZER[0]).read_text("utf-8")
            if what := changed_token(checkpoint / _TOKENIZER[0], now):
                raise UserError(
                    f"{checkpoint} was trained with a different tokenizer than the one of "
                    f"task.model={self.config.model}: {what}; use the model that the checkpoint was trained with, or "
                    f"{self.run.another_run}"
                )

    def export_files(self, folder: Path) -> None:
        super().export_files(folder)
        for name in _TOKENIZER:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, folder / name)


def _new_modules(model: Any, new: Collection[str]) -> list[str]:
    """Return the names of the modules outside the base model of ``model``, and of modules inside it with ``new``
    parameters."""
    inside = f"{model.base_model_prefix}."
    return sorted(
        {
            name.rpartition(".")[0] if name.startswith(inside) else name.partition(".")[0]
            for name, _ in model.named_parameters()
            if name in new or not name.startswith(inside)
        }
    )
