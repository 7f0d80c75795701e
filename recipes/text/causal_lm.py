"""Causal language modeling: predict the next token."""

import functools
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from serried.configs.errors import UserError
from serried.configs.formats import printable
from serried.configs.hugging_face.model_folder import ANY_FAMILY, CONFIG, GENERATION, model_folder
from serried.configs.schema.data import DataSection, TextRunConfig
from serried.configs.schema.models import ModelSection
from serried.configs.schema.registry import models, takes
from serried.configs.schema.sections import RunConfig, TrainerSection
from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.plan import Decoding, Inputs, LossTerms, ParallelPlan
from serried.recipes.data.chat.conversations import ask, chat_template
from serried.recipes.data.samples.text_bytes import TextBytes
from serried.recipes.data.samples.token_dataset import Batch, Sample, collate
from serried.recipes.data.tokenizers.tokenizer import Tokenizer
from serried.recipes.models.family import ModelFamily, Tokens, family_of
from serried.recipes.models.layers.attention_choice import describe_attention
from serried.recipes.models.layers.lm_head import (
    IGNORE,
    HeadTerms,
    LanguageModelHead,
    linear_cross_entropy_sum,
    token_losses,
)
from serried.recipes.text.causal_lm_config import CausalLMSection
from serried.recipes.text.generation import Reply, chooser, of_vocabulary
from serried.recipes.text.model_files import NO_SETTINGS, Settings, end_ids, settings_in, special_ids, write_model_files
from serried.recipes.text.text_data import TextData
from serried.recipes.text.vocabulary import (
    check_tokenizer_of,
    check_unchanged,
    embedding_rows,
    exported_with_fewer_rows,
    note_of_other_ids,
    notes_of_added_tokens,
)
from serried.records.safetensors_files import TensorFolder
from serried.trainer.task import Prompt, Sampling, TextModel, TextTask, Written

_TEMPERATURE = 0.8
_OUTPUT_BIAS = ".o_proj.bias"


class CausalLM(TextTask):
    """Causal language model on packed text: a transformer that predicts the next token.

    The task of ``recipe=tiny``, ``llama8b`` and the other pre-training recipes. A subclass may change the data
    (``dataset``, ``collate_numbered``), the model (``build_model``) or the loss (``loss``, ``terms``), and inherits
    the rest: tokenization, evaluation, generation and export in Hugging Face format.

    Args:
        run: config of the run; None if ``configure`` is called later.
    """

    sections = ("model", "data")

    _model: ModelSection
    _data: DataSection
    _trainer: TrainerSection

    def __init__(self, run: RunConfig | None = None) -> None:
        if run is not None:
            self.configure(run)

    def configure(self, run: RunConfig) -> None:
        assert isinstance(run, TextRunConfig), "the built-in tasks are composed with the sections model and data"
        super().configure(run)
        self._model = run.model
        self._data = run.data
        self._trainer = run.trainer
        if run.adapter.method != "none" and self._model.path and not self._model.pretrained:
            raise UserError(
                f"adapter.method={run.adapter.method} with model.pretrained=false: only adapters are trained, so the "
                "model's weights would stay random; use model.pretrained=true"
            )
        self._isolates = run.isolates
        """Whether batches have positions."""
        self._text = TextData(run.data, run.trainer, isolates=run.isolates)
        self._text_bytes: TextBytes | None = None
        self._built: ModelFamily | None = None
        self._embeddings: list[str] = []
        """Names of the modules with a row for each token; empty before ``build_model``."""
        self._saved: Path | None = None
        """Folder of the saved model that was opened; None during training."""

    # data -----------------------------------------------------------------------------------------------------------

    def prepare(self, show: Callable[[str], None] | None = None, threads: int | None = None) -> str:
        return self._text.prepare(show, threads)

    def open_data(self, place: str) -> None:
        self._text.open(place)

    def describe_data(self) -> str:
        described = self._text.describe()
        if self._text.sources:
            described.append(self.dataset("train").describe())
        return "; ".join(filter(None, described))

    def shown_samples(self, count: int) -> list[str]:
        """Return the text of the first ``count`` training documents, with the trained parts marked."""
        return self._text.shown_samples(count)

    def summary(self) -> str:
        """Return a detailed summary of the prepared data: documents, tokens, lengths, a sample."""
        return self._text.summary()

    def describe_sample(self) -> list[str]:
        is_chat = self._data.format == "chat"  # in other formats, every token is a target
        return self._text.describe_sample(self.dataset("train")[0]) if is_chat else []

    def dataset(self, split: str) -> Any:
        return None if self._keeps_none(split) else self._text.dataset(split)

    def _keeps_none(self, split: str) -> bool:
        """Return whether ``split`` is the validation split, and is empty because all data is used for training.
        Raises ``UserError`` if the run evaluates and has no other validation set."""
        assert self._text.sources, "open_data comes first"
        if not self._text.keeps_none(split):
            return False
        assert isinstance(self.run, TextRunConfig)
        for mistake in () if self._data.validation else self.run.mistake_of_evaluation():
            raise UserError(mistake)
        return True

    def further_validation(self) -> Sequence[str]:
        return list(self._data.validation)

    def collate_numbered(self, samples: Sequence[Sample], ids: np.ndarray) -> Batch:
        return collate(samples, ids)

    def example_batch(self, samples: int) -> Any:
        """Return a batch of zeros. It needs no data, so that a run can be planned on a machine without the data."""
        tokens = torch.zeros(samples, self._data.sequence_length, dtype=torch.int64)
        return Batch(tokens, tokens, tokens[:, 0], tokens if self._isolates else None)

    def weight_per_sample(self) -> int:
        return self._data.sequence_length

    # model ----------------------------------------------------------------------------------------------------------

    def vocab_size(self) -> int:
        """Return the number of rows of the embedding: the configured number, or the tokenizer's size rounded up to a
        multiple of ``model.vocab_multiple``. Raises ``UserError`` if the tokenizer has more ids than the model has
        rows."""
        return embedding_rows(self._model, self._data, self._tokenizer_size())

    def _tokenizer_size(self) -> int | None:
        """Return the number of token ids. Return None in a dry run that does not need it, to avoid reading files and
        importing libraries."""
        if not self._text.sources:
            if self._data.tokenizer != "bytes" and self._model.vocab_size and not self._data.added_tokens:
                return None
            if self._data.tokenizer == "train":
                return self._data.vocab_size
            if self._data.name != "tokens" and (named := self._text.named_tokenizer) is not None:
                return named.vocab_size
            self.open_data(self.prepare())  # the vocabulary depends on the text
        return self._text.tokenizer.vocab_size

    def _family(self) -> ModelFamily:
        if self._built is None:
            self._built = family_of(models.get(self._model.family).load(), self._model, self.vocab_size())
        return self._built

    @property
    def opens_in(self) -> str:
        return self._family().opens_in

    def build_model(self) -> nn.Module:
        model, section = self._family().build(), self.config
        if self._text.is_weighted:
            self._weigh_tokens(model)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._embeddings = [
            name.removesuffix(".weight") for name, shape in shapes.items() if shape[:1] == (self.vocab_size(),)
        ]
        if isinstance(section, CausalLMSection) and (section.label_smoothing or section.z_loss):
            heads = [module for module in model.modules() if isinstance(module, LanguageModelHead)]
            if not heads:
                key = "label_smoothing" if section.label_smoothing else "z_loss"
                raise UserError(
                    f"task.{key}={getattr(section, key):g} is computed by a LanguageModelHead, which "
                    f"model.family={self._model.family} does not have; use task.{key}=0"
                )
            for head in heads:
                head.loss = partial(linear_cross_entropy_sum, terms=HeadTerms(section.label_smoothing, section.z_loss))
        return model

    def _weigh_tokens(self, model: nn.Module) -> None:
        """Make the heads of ``model`` return the loss of each token, which ``terms`` multiplies by its weight."""
        section = self.config
        for key in ("label_smoothing", "z_loss"):
            if isinstance(section, CausalLMSection) and getattr(section, key):
                raise UserError(
                    f"task.{key}={getattr(section, key):g} is not supported with data whose messages or rows have "
                    f"weights other than 0 and 1; use task.{key}=0"
                )
        for module in model.modules():
            if isinstance(module, LanguageModelHead):
                module.loss = token_losses

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        return self._family().parallel_plan(model)

    def initial_std(self, name: str) -> float | None:
        return self._family().initial_std(name)

    def describe_model(self) -> str:
        found = f"{self._model.name}: {self._family().describe()}, vocabulary {self._vocabulary()}"
        section = self.config
        if isinstance(section, CausalLMSection):
            found += f", label smoothing {section.label_smoothing:g}" if section.label_smoothing else ""
            found += f", z-loss {section.z_loss:g}" if section.z_loss else ""
        return found

    def describe_kernels(self, device: str) -> str:
        assert isinstance(self.run, TextRunConfig)
        return describe_attention(self.run, device, self.sample_split.context)

    def _vocabulary(self) -> str:
        rows, ids = self.vocab_size(), self._tokenizer_size()
        if rows > (before := self._model.vocab_size or rows):
            return f"{before:,}, resized to {rows:,}"
        return f"{ids:,} padded to {rows:,}" if self._model.vocab_size is None and ids != rows else f"{rows:,}"

    @property
    def _needs_token_losses(self) -> bool:
        """Whether ``terms`` computes the loss from the losses of single tokens, not from their sum."""
        return self._text.is_weighted

    def inputs(self, batch: Tokens) -> Inputs:
        inputs = self._family().inputs(batch)
        if self._model.family != ANY_FAMILY or not self._needs_token_losses:
            return inputs
        # With targets, a model of transformers returns the loss sum; without them, logits.
        return inputs._replace(named={name: value for name, value in inputs.named.items() if name != "targets"})

    def terms(self, output: torch.Tensor, batch: Batch) -> LossTerms:
        of_sources = self._text.targets_by_source(batch)
        counts = {} if of_sources is None else {"sources": of_sources}
        is_target = batch.targets != IGNORE
        if not self._text.is_weighted:
            return LossTerms(self._family().loss_sum(output, batch), is_target.sum(), counts=counts)
        shape = tuple(output.shape)
        if shape[:2] != batch.targets.shape or len(shape) > 3:
            raise UserError(
                f"model.family={self._model.family} returns a loss of shape {shape}, but the data has weights for the "
                "loss of each token; return logits [B, S, V], or ignore the weights of rows: data.columns.weight=null"
            )
        if len(shape) == 3:  # logits
            losses = F.cross_entropy(output.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
            output = losses.view_as(batch.targets)
        weights = torch.ones_like(output) if batch.weights is None else batch.weights
        return LossTerms((output * weights).sum(), (weights.double() * is_target).sum(), counts=counts)

    def slice_sequence(self, batch: Batch, part: Callable[[torch.Tensor, int], torch.Tensor]) -> Batch:
        # Positions are not sharded: every rank needs to know which document each key belongs to.
        weights = None if batch.weights is None else part(batch.weights, 1)
        return batch._replace(tokens=part(batch.tokens, 1), targets=part(batch.targets, 1), weights=weights)

    def flops_per_sample(self, parameters: int) -> float:
        length = self._data.sequence_length
        return length * self._family().flops_per_token(parameters, length)

    def sample(self, model: TextModel, tokens: int, seed: int) -> str:
        tokenizer = self._text.tokenizer
        prompt = self._beginning(tokenizer)
        fitting = min(tokens, self._model.max_sequence_length - len(prompt))
        choose = chooser(temperature=_TEMPERATURE, top_p=1.0, seed=seed)
        choose = of_vocabulary(tokenizer, choose, never=[tokenizer.end_id])
        how = Decoding(choose, lambda _number, _token: True, self._family().new_cache)
        return printable(tokenizer.decode(model.generate([prompt], [fitting], how)[0]))

    def lengths(self) -> tuple[int, int]:
        return self._data.sequence_length, self._model.max_sequence_length

    def echoes_prompt(self) -> bool:
        return not self._data.has_template

    def next_command(self, start: str) -> str:
        if self._data.name == "stdlib":
            start = re.sub(r" (recipe|data)=\S+", "", start)
            return f"your own text: {start} recipe={self.run.recipe} data=text data.path=FILE_OR_FOLDER run.name=mine"
        export = f"serried export run.dir={shlex.quote(self.run.run.place)} out=FOLDER"
        if self.run.adapter.method != "none":
            return f"a model with the adapters in it: {export} merge=true"
        return f"a plain model folder: {export} dtype=bf16"

    def notes(self, starts_from_scratch: bool) -> list[str]:
        notes, has_adapters = [*self._family().notes()], self.run.adapter.method != "none"
        truncation = None
        if self._text.sources:
            notes += note_of_other_ids(self._data, self._text.tokenizer)
            notes += notes_of_added_tokens(self._data, self._text.tokenizer, self.run.adapter, self._embeddings)
            truncation = getattr(self.dataset("train"), "truncation", None)
        notes += [warning] if truncation is not None and (warning := truncation()) else []
        has_weights = not starts_from_scratch or (self._model.path and self._model.pretrained)
        if has_weights or not (has_adapters or self._data.format == "chat"):
            return notes
        if has_adapters:
            method = self.run.adapter.method
            note = f"adapter.method={method} needs a base model: model.path=FOLDER_OR_NAME"
        else:
            note = (
                "the model starts with random weights, and conversations alone are too little to train it; to start "
                f"from a trained model: model.path=FOLDER_OR_NAME {self.run.another_run}"
            )
        return [*notes, note]

    def prompt(self, said: Sequence[str]) -> Prompt:
        """Encode ``said`` as a prompt, with the chat template if the data has one.

        Raises:
            UserError: The tokenizer or the chat template cannot encode ``said``.
        """
        tokenizer = self._text.tokenizer
        if self._data.has_template:
            text = chat_template(self._data, tokenizer)[0]
            return Prompt(*ask(text, tokenizer, said, self._data.chat_template_kwargs))
        (prompt,) = said
        if not prompt:
            return Prompt(self._beginning(tokenizer))
        if self._data.is_chat:  # prompts of completion data may contain special tokens as text
            return Prompt([*tokenizer.start_ids, *tokenizer.encode_marked(prompt)[0].tolist()])
        return Prompt([*tokenizer.start_ids, *tokenizer.encode(prompt).tolist()])

    def write(
        self, model: TextModel, prompts: Sequence[Prompt], sampling: Sampling, *, rows: int = 1,
        show: Callable[[str], None] | None = None, batches: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> list[Written]:  # fmt: skip
        tokenizer = self._text.tokenizer
        ends = {tokenizer.end_id, *self._ends_of_saved()}

        def replies() -> list[Reply]:
            return [
                Reply(tokenizer, ids, end_ids=ends, end_of_turn=end_of_turn, stops=sampling.stops)
                for ids, end_of_turn in prompts
            ]

        growing = replies()

        def goes_on(number: int, token: int) -> bool:
            text = growing[number].add(token)
            if show is not None and text:
                show(text)
            return not growing[number].is_ended

        choose = chooser(temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed)
        limits = [min(sampling.tokens, self._model.max_sequence_length - len(prompt.ids)) for prompt in prompts]
        family = self._family()
        rows = rows if family.is_batched else 1
        how = Decoding(of_vocabulary(tokenizer, choose), goes_on, family.new_cache, rows, batches)
        made = model.generate([prompt.ids for prompt in prompts], limits, how)
        written = []
        for reply, tokens in zip(replies(), made, strict=True):
            for token in tokens:
                reply.add(token)
            is_ended = reply.is_ended
            rest = reply.finish()
            if show is not None and rest:
                show(rest)
            written.append(Written(reply.text, reply.tokens, is_ended))
        return written

    def open_saved(self, checkpoint: Path) -> None:
        self._saved = checkpoint

    def _ends_of_saved(self) -> list[int]:
        """Return the token ids at which transformers stops generation: the end ids in the config of the opened model,
        or of the base model during training."""
        return end_ids(self._base_settings if self._saved is None else settings_in(self._saved))

    def text_ids(self, text: str, *, begins: bool) -> list[int]:
        tokenizer = self._text.tokenizer
        return [*(tokenizer.start_ids if begins else ()), *tokenizer.encode(text).tolist()]

    def first_id(self) -> int:
        return [*self._text.tokenizer.start_ids, self._text.tokenizer.end_id][0]

    def _beginning(self, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens that precede every document."""
        return [tokenizer.end_id, *tokenizer.start_ids]

    def target_bytes(self, batch: Batch) -> int:
        if self._text.is_weighted:
            return 0  # a weighted loss cannot be converted to bits per byte
        if self._text_bytes is None:
            self._text_bytes = TextBytes(self._text.tokenizer)
        return self._text_bytes.of_targets(batch)

    def check_tokenizer(self, folder: Path) -> None:
        check_tokenizer_of(folder, self._data, self._text.tokenizer)

    def check_resumed(self, checkpoint: Path) -> None:
        if self._lacks_output_bias(checkpoint):
            raise UserError(
                f"{checkpoint} was trained by an earlier version without o_proj.bias, but model.attention_bias=true "
                f"now adds this bias with model.family={self._model.family}, as in transformers; to use only the "
                f"weights, with biases that start at zero: serried export {shlex.quote(str(checkpoint))} out=weights, "
                "then checkpoint.resume=weights"
            )
        check_unchanged(checkpoint, self._data, self._text.tokenizer, self.run.another_run)

    # export ---------------------------------------------------------------------------------------------------------

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        return self._family().exported(name, shape)

    def exported_from(self, folder: Path) -> Callable[[str, Sequence[int]], tuple[Fragment, ...]]:
        if self._lacks_output_bias(folder):
            return lambda name, shape: () if name.endswith(_OUTPUT_BIAS) else self.exported(name, shape)
        tensors = TensorFolder(folder)
        exported = self._family().exported_in(tensors.specs, self.exported)
        return exported_with_fewer_rows(exported, tensors, self.vocab_size())

    def _lacks_output_bias(self, folder: Path) -> bool:
        """Return whether the model in ``folder`` was saved by an earlier version, without the bias of the attention
        output."""
        is_whole = self.run.adapter.method == "none" and getattr(self._model, "output_bias", False)
        return is_whole and not any(name.endswith(_OUTPUT_BIAS) for name in TensorFolder(folder).specs)

    def pretrained(self) -> Path | None:
        if not self._model.path or not self._model.pretrained:
            return None
        return model_folder(self._model.path, "*.safetensors", "*.json")

    def check_weights(self, folder: Path) -> None:
        """Check that ``folder`` has a ``config.json``, from which the architecture was read."""
        if not (folder / CONFIG).is_file():
            raise UserError(
                f"{folder / CONFIG} does not exist, but the architecture of the model is read from it; restore the file"
            )

    def _export_config(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the content of ``config.json`` for an export."""
        special = special_ids(tokenizer, self._base_settings[CONFIG])
        config = self._family().export_config(tokenizer.end_id) | special
        if takes(self.run.optim, "rounding") and not self.run.trainer.ema_decay:  # averaged weights are fp32
            config |= {key: "bfloat16" for key in ("dtype", "torch_dtype") if key in config}
        return config

    def export_files(self, folder: Path) -> None:
        tokenizer = self._text.tokenizer
        config, generation = self._export_config(tokenizer), self._base_settings[GENERATION]
        write_model_files(folder, config, generation, self._data, tokenizer)

    @functools.cached_property
    def _base_settings(self) -> Settings:
        """Settings of the base model; empty if there is none, or if it no longer exists when a run resumes."""
        with suppress(UserError):
            if (folder := self.pretrained()) is not None:
                return settings_in(folder)
        return NO_SETTINGS
