"""Causal language modelling: predict the next token."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from configs.errors import UserError
from configs.schema import RunConfig
from parallel.plan import LossTerms, ParallelPlan
from recipes.data.chat import chat_template
from recipes.data.dataset import Batch, PackedDataset, Sample, TokenDataset, collate, open_dataset
from recipes.data.prepare import Prepared, named_tokenizer, open_prepared, prepare
from recipes.data.show import for_terminal, marked_lines
from recipes.data.summary import summary_of
from recipes.data.tokenizer import hugging_face_files
from recipes.models import transformer
from recipes.models.head import IGNORE

_TEMPERATURE = 0.8


class CausalLM:
    """A Transformer on packed text. ``trainer.recipe.Recipe`` says what each method promises."""

    def __init__(self, config: RunConfig) -> None:
        self._model, self._data = config.model, config.data
        self._prepared: Prepared | None = None
        self._datasets: dict[str, TokenDataset | PackedDataset] = {}

    # data -----------------------------------------------------------------------------------------------------------

    def prepare(self, show: Callable[[str], None] | None = None, threads: int | None = None) -> str:
        return str(prepare(self._data, show, threads).folder)

    def open_data(self, folder: str) -> None:
        self._prepared = open_prepared(Path(folder))

    def describe_data(self) -> str:
        source = " ".join(filter(None, (self._data.name, self._data.path, self._data.subset)))
        line = f"{source}, {self._data.tokenizer} as tokens, {self._data.sequence_length} a sequence"
        if self._data.format == "chat":
            line += ", conversations, learned is what the assistant says"
        if self._prepared is None:
            return line
        how = self.dataset("train").describe()
        return f"{line}; {self._prepared.describe()}" + (f"; {how}" if how else "")

    def summary(self) -> str:
        """What was prepared, at length: documents, tokens, lengths, a sample."""
        assert self._prepared is not None, "open_data comes first"
        return summary_of(self._prepared, self._data.tokenizer)

    def describe_sample(self) -> list[str]:
        if self._data.format != "chat":
            return []  # all of it is learned
        assert self._prepared is not None, "open_data comes first"
        sample = self.dataset("train")[0]
        is_learned = np.concatenate(([False], sample.targets[:-1] != IGNORE))
        lines = marked_lines(self._prepared.tokenizer, sample.tokens, is_learned)
        return ["sample     the first sequence; what is learned of it stands behind >", *lines]

    def dataset(self, split: str) -> TokenDataset | PackedDataset:
        assert self._prepared is not None, "open_data comes first"
        if split not in self._datasets:
            self._datasets[split] = open_dataset(self._prepared, split, self._data)
        return self._datasets[split]

    def collate(self, samples: Sequence[Sample], ids: np.ndarray) -> Batch:
        return collate(samples, ids)

    def targets_per_sequence(self) -> int:
        return self._data.sequence_length

    # model ----------------------------------------------------------------------------------------------------------

    def vocab_size(self) -> int:
        """Rows of the embedding: as configured, else the tokenizer's, rounded up to ``model.vocab_multiple``.

        Raises:
            UserError: the tokenizer has more ids than the model has rows.
        """
        ids, rows = self._tokenizer_size(), self._model.vocab_size
        if rows is None:
            assert ids is not None
            return -(-ids // self._model.vocab_multiple) * self._model.vocab_multiple
        if ids is not None and ids > rows:
            raise UserError(
                f"model.vocab_size={rows} but data.tokenizer={self._data.tokenizer} has {ids} ids; "
                f"use model.vocab_size={ids}, or model.vocab_size=null for the tokenizer's own size"
            )
        return rows

    def _tokenizer_size(self) -> int | None:
        """Number of ids; None in a dry run that need not know it, and can do without files and libraries."""
        if self._prepared is None and self._data.tokenizer != "bytes" and self._model.vocab_size:
            return None
        if self._prepared is None and self._data.tokenizer == "train":
            return self._data.vocab_size
        named = named_tokenizer(self._data) if self._prepared is None and self._data.name != "tokens" else None
        if named is None and self._prepared is None:
            self.open_data(self.prepare())  # only the text knows how many characters there are
        tokenizer = named if self._prepared is None else self._prepared.tokenizer
        assert tokenizer is not None
        return tokenizer.vocab_size

    def build_model(self) -> transformer.Transformer:
        with torch.device("meta"):
            return transformer.Transformer(self._model, self.vocab_size())

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        assert isinstance(model, transformer.Transformer)
        return model.parallel_plan()

    def initial_std(self, name: str) -> float | None:
        return transformer.initial_std(self._model, name)

    def describe_model(self) -> str:
        model = self._model
        tied = ", embeddings tied" if model.tie_embeddings else ""
        return (
            f"{model.name}: {model.layers} layers, dim {model.dim}, heads {model.heads} (key/value {model.kv_heads}), "
            f"vocabulary {self._vocabulary()}{tied}"
        )

    def _vocabulary(self) -> str:
        rows, ids = self.vocab_size(), self._tokenizer_size()
        return f"{ids:,} padded to {rows:,}" if self._model.vocab_size is None and ids != rows else f"{rows:,}"

    def loss(self, model: nn.Module, batch: Batch) -> LossTerms:
        loss_sum = model(batch.tokens, batch.targets, batch.positions)
        return LossTerms(loss_sum, (batch.targets != IGNORE).sum())

    def flops_per_token(self, parameters: int) -> float:
        return transformer.flops_per_token(self._model, parameters, self.vocab_size(), self._data.sequence_length)

    @torch.no_grad()
    def sample(self, model: nn.Module, tokens: int, seed: int, device: torch.device) -> str:
        assert self._prepared is not None, "open_data comes first"
        tokenizer = self._prepared.tokenizer
        generator = torch.Generator().manual_seed(seed)
        ids = [tokenizer.end_id, *tokenizer.start_ids]  # what stands before the first token of every document
        prompt = len(ids)
        for _ in range(tokens):
            window = torch.tensor([ids[-self._data.sequence_length :]], device=device)
            # Not the rows that only pad the vocabulary.
            logits = model(window)[0, -1, : tokenizer.vocab_size].float().cpu() / _TEMPERATURE
            # Never the end mark: under sharding all ranks must take the same number of forwards.
            logits[tokenizer.end_id] = float("-inf")
            ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        return for_terminal(tokenizer.decode(ids[prompt:]))

    # export ---------------------------------------------------------------------------------------------------------

    def export_name(self, name: str) -> str:
        return transformer.hugging_face_name(name)

    def check_weights(self, folder: Path) -> None:
        path = folder / "config.json"
        try:
            found = json.loads(path.read_text())
            changes = transformer.hugging_face_differences(self._model, self.vocab_size(), found)
        except OSError as error:
            raise UserError(
                f"cannot read {path}: {error.strerror}; it says what the weights beside it compute"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{path} {reason}") from None
        if changes:
            raise UserError(f"{path} describes another model than this one; use {' '.join(changes)}")

    def export_files(self, folder: Path) -> None:
        assert self._prepared is not None, "open_data comes first"
        tokenizer = self._prepared.tokenizer
        config = transformer.hugging_face_config(self._model, self.vocab_size(), tokenizer.end_id)
        files = {"config.json": json.dumps(config, indent=2) + "\n", **hugging_face_files(tokenizer)}
        for name, content in files.items():
            (folder / name).write_text(content, "utf-8")
        if self._data.format == "chat":
            (folder / "chat_template.jinja").write_text(chat_template(self._data, tokenizer)[0], "utf-8")
