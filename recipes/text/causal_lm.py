"""Causal language modeling: predict the next token."""

import functools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from serried.configs.errors import UserError
from serried.configs.formats import printable
from serried.configs.hugging_face.model_folder import CONFIG, GENERATION, model_folder
from serried.configs.plain_data import NotPlainData, read_json
from serried.configs.schema.data import DataSection, TextRunConfig
from serried.configs.schema.models import ModelSection
from serried.configs.schema.registry import models, takes
from serried.configs.schema.sections import DEFAULT_VALIDATION, WHOLE, RunConfig, TrainerSection
from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.plan import Inputs, LossTerms, ParallelPlan
from serried.recipes.data.chat.conversations import ask, chat_template
from serried.recipes.data.prepared.decontamination import kept_apart, left_out
from serried.recipes.data.prepared.prepare import Prepared, cache_folder, open_prepared, prepare
from serried.recipes.data.prepared.summary import marked_lines, summary_of
from serried.recipes.data.samples.mixture_dataset import (
    MixtureDataset,
    describe_sources,
    key_of_source,
    mistakes_of,
    source_sections,
    validation_sections,
)
from serried.recipes.data.samples.text_bytes import TextBytes
from serried.recipes.data.samples.token_dataset import Batch, PackedDataset, Sample, TokenDataset, collate, open_dataset
from serried.recipes.data.streaming.lanes import StreamDataset
from serried.recipes.data.streaming.stream import open_training, prepare_stream
from serried.recipes.data.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer, named_tokenizer
from serried.recipes.data.tokenizers.tokenizer import Tokenizer, changed_token, hugging_face_files
from serried.recipes.data.tokenizers.transformers_tokenizer import difference, opened
from serried.recipes.models.family import ModelFamily, family_of
from serried.recipes.models.layers.attention_choice import describe_attention
from serried.recipes.models.layers.lm_head import IGNORE, HeadTerms, LanguageModelHead, linear_cross_entropy_sum
from serried.recipes.text.causal_lm_config import CausalLMSection
from serried.recipes.text.generation import TextStream, chooser, continued, until_end
from serried.records.safetensors_files import TensorFolder
from serried.trainer.task import Piece, TextTask

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
                f"adapter.method={run.adapter.method} with model.pretrained=false: adapters are trained on the weights "
                "of a model, and these stay frozen; use model.pretrained=true"
            )
        self._prepared: Prepared | None = None
        """Prepared data of the first source. All sources have its tokenizer."""
        self._sources: dict[str, Prepared] = {}
        self._held_out: dict[str, Prepared] = {}
        """Validation sets by name, including sources of a mixture without documents that are also in another source."""
        self._left_out: dict[str, int] = {}
        self._text_bytes: TextBytes | None = None
        self._built: ModelFamily | None = None
        self._saved: Path | None = None
        """Folder of the opened saved model; None while a model is trained."""
        self._datasets: dict[str, TokenDataset | PackedDataset | MixtureDataset | StreamDataset] = {}

    # data -----------------------------------------------------------------------------------------------------------

    def prepare(self, show: Callable[[str], None] | None = None, threads: int | None = None) -> str:
        def prepared_as(key: str, section: DataSection) -> Prepared:
            with mistakes_of(key):
                return prepare(section, show, threads)

        sections = {key_of_source(name): each for name, each in source_sections(self._data).items()}
        sections |= {f"data.validation.{name}": each for name, each in validation_sections(self._data).items()}
        for key, section in sections.items():
            with mistakes_of(key):
                section.check()
        if self._data.is_streamed:
            sequences = self._trainer.eval_batches * self._trainer.global_batch
            sources = {"": prepare_stream(self._data, sequences, show)}
        else:
            sources = {
                name: prepared_as(key_of_source(name), each) for name, each in source_sections(self._data).items()
            }
        validation = {
            name: prepared_as(f"data.validation.{name}", each) for name, each in validation_sections(self._data).items()
        }
        self._check_tokenizers([*sources.values(), *validation.values()])
        held_out = {name: prepared.whole() for name, prepared in validation.items()}
        if len(sources) > 1 and not self._data.keeps_none:  # validation data of one source may be in another
            held_out |= {f"{DEFAULT_VALIDATION}/{name}": prepared for name, prepared in sources.items()}
        training, cache = list(sources.values()), cache_folder(self._data)
        apart = {name: kept_apart(name, prepared, training, cache, show) for name, prepared in held_out.items()}
        place = {
            "sources": {name: str(prepared.folder) for name, prepared in sources.items()},
            "validation": {name: str(prepared.folder) for name, prepared in validation.items()},
            "apart": {name: str(folder) for name, folder in apart.items() if folder is not None},
        }
        return json.dumps(place)

    def _check_tokenizers(self, prepared: Sequence[Prepared]) -> None:
        if any(source.tokenizer.spec() != prepared[0].tokenizer.spec() for source in prepared):
            raise UserError(
                f"data.tokenizer={self._data.tokenizer} is learned from a source, and the sources here would each have "
                "their own; use data.tokenizer=bytes, or the files of an existing tokenizer"
            )

    def open_data(self, place: str) -> None:
        folders = {kind: {name: Path(path) for name, path in each.items()} for kind, each in json.loads(place).items()}
        self._sources = {name: open_prepared(folder) for name, folder in folders["sources"].items()}
        self._prepared = next(iter(self._sources.values()))
        self._held_out = {name: open_prepared(folder).whole() for name, folder in folders["validation"].items()}
        self._held_out |= {name: open_prepared(folder) for name, folder in folders["apart"].items()}
        self._left_out = {name: left_out(folder) for name, folder in folders["apart"].items()}

    def describe_data(self) -> str:
        sources = describe_sources(self._data)
        tokenizer = self._data.tokenizer
        tokens = f"{tokenizer} as tokens" if tokenizer in ("bytes", "chars") else f"tokenizer {tokenizer}"
        line = f"{sources}, {tokens}, {self._data.sequence_length} a sequence"
        if self._data.format == "chat":
            line += ", conversations, trained on the assistant's messages only"
        if self._prepared is None:
            return line
        sizes = [f"{name} {prepared.describe()}".strip() for name, prepared in self._sources.items()]
        if self._data.is_streamed:
            held_out = self._prepared.splits["validation"]
            sizes = [f"validation {held_out.tokens:,} tokens of {held_out.documents:,} documents"]
        left_out = [f"{name} without {count:,} that are trained on" for name, count in self._left_out.items()]
        return "; ".join(filter(None, [line, *sizes, *left_out, self.dataset("train").describe()]))

    def summary(self) -> str:
        """Return a detailed summary of the prepared data: documents, tokens, lengths, a sample."""
        assert self._prepared is not None, "open_data comes first"
        prepared = {**self._sources, **self._held_out}
        texts = [f"{name}\n" * bool(name) + summary_of(each, self._data.tokenizer) for name, each in prepared.items()]
        return "\n".join(texts)

    def describe_sample(self) -> list[str]:
        if self._data.format != "chat":
            return []  # every token is a target
        assert self._prepared is not None, "open_data comes first"
        sample = self.dataset("train")[0]
        is_learned = np.concatenate(([False], sample.targets[:-1] != IGNORE))
        lines = marked_lines(self._prepared.tokenizer, sample.tokens, is_learned)
        return ["sample     the first sequence; trained on: lines with >", *lines]

    def dataset(self, split: str) -> Any:
        assert self._prepared is not None, "open_data comes first"
        if self._keeps_none(split):
            return None
        if split not in self._datasets:
            self._datasets[split] = self._open(split)
        return self._datasets[split]

    def _keeps_none(self, split: str) -> bool:
        """Return whether ``split`` is the validation split and all data is trained on. Raises ``UserError`` if the
        run has no other validation set."""
        sources = self._sources.values()
        if split != DEFAULT_VALIDATION or any(source.splits["validation"].tokens for source in sources):
            return False
        assert isinstance(self.run, TextRunConfig)
        if not self._data.keeps_none and not getattr(self._data, "is_prepared", False):
            return False
        for mistake in () if self._data.validation else self.run.mistake_of_evaluation():
            raise UserError(mistake)
        return True

    def _open(self, split: str) -> TokenDataset | PackedDataset | MixtureDataset | StreamDataset:
        if split in self._held_out:
            with mistakes_of(f"data.validation.{split}"):
                return open_dataset(self._held_out[split], "validation", self._data)
        if self._data.is_streamed and split == "train":
            lanes, seed = self._trainer.global_batch, self._trainer.seed
            return open_training(self._data, self._sources[""], lanes=lanes, seed=seed, workers=self._data.workers)
        sources, is_whole = dict(self._sources), split == WHOLE
        if is_whole:
            sources, split = {name: prepared.whole() for name, prepared in sources.items()}, "validation"
        elif split == DEFAULT_VALIDATION:
            sources = {name: self._held_out.get(f"{split}/{name}", prepared) for name, prepared in sources.items()}
        datasets = {}
        for name, prepared in sources.items():
            with mistakes_of(key_of_source(name)):
                datasets[name] = open_dataset(prepared, split, self._data, to_end=is_whole)
        if not self._data.mixed:
            return datasets[""]
        weights = {name: source.weight for name, source in self._data.mixed.items()}
        return MixtureDataset(datasets, weights, getattr(self._data, "weigh_by", "tokens"))

    def further_validation(self) -> Sequence[str]:
        return list(self._data.validation)

    def collate_numbered(self, samples: Sequence[Sample], ids: np.ndarray) -> Batch:
        return collate(samples, ids)

    def example_batch(self, samples: int) -> Any:
        """Return a batch of zeros. Needs no data, so that a plan can be made on another machine."""
        tokens = torch.zeros(samples, self._data.sequence_length, dtype=torch.int64)
        return Batch(tokens, tokens, tokens[:, 0], tokens if self._data.isolate_documents else None)

    def weight_per_sample(self) -> int:
        return self._data.sequence_length

    # model ----------------------------------------------------------------------------------------------------------

    def vocab_size(self) -> int:
        """Return the rows of the embedding: as configured, or the tokenizer's size rounded up to
        ``model.vocab_multiple``. Raises ``UserError`` if the tokenizer has more ids than the model has rows."""
        ids, rows = self._tokenizer_size(), self._model.vocab_size
        if rows is None:
            assert ids is not None
            return -(-ids // self._model.vocab_multiple) * self._model.vocab_multiple
        if ids is not None and ids > rows and self._model.path:
            raise UserError(
                f"data.tokenizer={self._data.tokenizer} has {ids} ids, and the embedding of model.path="
                f"{self._model.path} has {rows} rows, so the last {ids - rows} would have none; use a tokenizer "
                f"without them, or let transformers add rows, resize_token_embeddings({ids}) and "
                "save_pretrained(FOLDER), and use model.path=FOLDER"
            )
        if ids is not None and ids > rows:
            raise UserError(
                f"model.vocab_size={rows} but data.tokenizer={self._data.tokenizer} has {ids} ids; "
                f"use {self._ways_to_fit(ids)}"
            )
        return rows

    def _ways_to_fit(self, ids: int) -> str:
        """Return the overrides that make a tokenizer of ``ids`` fit. The size of pretrained weights is fixed."""
        path = self._model.path
        if path is None:
            return f"model.vocab_size={ids}, or model.vocab_size=null for the tokenizer's own size"
        if self._data.tokenizer != path:
            return f"data.tokenizer={path}, the model's own"
        return f"another model: the tokenizer in {path} does not fit its weights (resize_token_embeddings({ids}) would)"

    def _tokenizer_size(self) -> int | None:
        """Return the number of ids; None in a dry run that does not need it and can do without files and libraries."""
        if self._prepared is None:
            if self._data.tokenizer != "bytes" and self._model.vocab_size:
                return None
            if self._data.tokenizer == "train":
                return self._data.vocab_size
            if self._data.name != "tokens" and (named := named_tokenizer(self._data)) is not None:
                return named.vocab_size
            self.open_data(self.prepare())  # the number of characters depends on the text
        return self._tokenizer().vocab_size

    def _family(self) -> ModelFamily:
        if self._built is None:
            self._built = family_of(models.get(self._model.family).load(), self._model, self.vocab_size())
        return self._built

    @property
    def opens_in(self) -> str:
        return self._family().opens_in

    def build_model(self) -> nn.Module:
        model, section = self._family().build(), self.config
        if isinstance(section, CausalLMSection) and (section.label_smoothing or section.z_loss):
            heads = [module for module in model.modules() if isinstance(module, LanguageModelHead)]
            if not heads:
                key = "label_smoothing" if section.label_smoothing else "z_loss"
                raise UserError(
                    f"task.{key}={getattr(section, key):g}: the model family {self._model.family} has no "
                    f"LanguageModelHead to add it to the loss; use task.{key}=0"
                )
            for head in heads:
                head.loss = partial(linear_cross_entropy_sum, terms=HeadTerms(section.label_smoothing, section.z_loss))
        return model

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
        return f"{ids:,} padded to {rows:,}" if self._model.vocab_size is None and ids != rows else f"{rows:,}"

    def inputs(self, batch: Batch) -> Inputs:
        return self._family().inputs(batch)

    def terms(self, output: torch.Tensor, batch: Batch) -> LossTerms:
        training = self._datasets.get("train")
        counts = {"sources": training.targets_by_source(batch)} if isinstance(training, MixtureDataset) else {}
        loss_sum = self._family().loss_sum(output, batch)
        return LossTerms(loss_sum, (batch.targets != IGNORE).sum(), counts=counts)

    def slice_sequence(self, batch: Batch, part: Callable[[torch.Tensor, int], torch.Tensor]) -> Batch:
        # Positions stay complete: every rank needs to know the document of each key.
        return batch._replace(tokens=part(batch.tokens, 1), targets=part(batch.targets, 1))

    def flops_per_sample(self, parameters: int) -> float:
        length = self._data.sequence_length
        return length * self._family().flops_per_token(parameters, length)

    @torch.no_grad()
    def sample(self, model: nn.Module, tokens: int, seed: int, device: torch.device) -> str:
        tokenizer = self._tokenizer()
        choose = chooser(temperature=_TEMPERATURE, top_p=1.0, seed=seed)

        def never_the_end(logits: torch.Tensor) -> int:
            # Never sample padding rows either. With sharding, all ranks run the same number of forwards.
            logits = logits[: tokenizer.vocab_size]
            logits[tokenizer.end_id] = float("-inf")
            return choose(logits)

        prompt = self._beginning(tokenizer)
        fitting = min(tokens, self._model.max_sequence_length - len(prompt))
        ids = continued(
            model, prompt, layers=self._cached_layers(), tokens=fitting, choose=never_the_end, device=device
        )  # fmt: skip
        return printable(tokenizer.decode(ids))

    def _cached_layers(self) -> int | None:
        """Return the number of layers of a cache for generation; None if the model has no cache, or ranks share the
        work on a sample."""
        return self._family().cached_layers if self.sample_split.is_whole else None

    def lengths(self) -> tuple[int, int]:
        return self._data.sequence_length, self._model.max_sequence_length

    def echoes_prompt(self) -> bool:
        return not self._data.is_chat

    def next_command(self, start: str) -> str:
        if self._data.name == "stdlib":
            start = re.sub(r" (recipe|data)=\S+", "", start)
            return f"your own text: {start} recipe={self.run.recipe} data=text data.path=FILE_OR_FOLDER run.name=mine"
        export = f"serried export run.dir={shlex.quote(str(self.run.run.dir))} out=FOLDER"
        if self.run.adapter.method != "none":
            return f"a model with the adapters in it: {export} merge=true"
        return f"a plain model folder: {export} dtype=bf16"

    def notes(self, starts_from_scratch: bool) -> list[str]:
        notes, has_adapters = [*self._family().notes(), *self._tokenizer_notes()], self.run.adapter.method != "none"
        truncation = getattr(self.dataset("train"), "truncation", None) if self._prepared is not None else None
        notes += [warning] if truncation is not None and (warning := truncation()) else []
        has_weights = not starts_from_scratch or (self._model.path and self._model.pretrained)
        if has_weights or not (has_adapters or self._data.format == "chat"):
            return notes
        if has_adapters:
            method = self.run.adapter.method
            note = f"a run with adapter.method={method} starts only with a base model: model.path=FOLDER_OR_NAME"
        else:
            note = (
                "the model starts with random weights, and conversations alone teach it little; to start from a "
                f"trained model: model.path=FOLDER_OR_NAME {self.run.another_run}"
            )
        return [*notes, note]

    def _tokenizer_notes(self) -> list[str]:
        """Return a line if transformers' tokenizer gives other ids."""
        tokenizer = None if self._prepared is None else self._prepared.tokenizer
        if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.is_plain or self._data.tokenizer == "train":
            return []
        name = self._data.tokenizer

        def encode(text: str) -> list[int]:
            return [*tokenizer.start_ids, *tokenizer.encode(text).tolist()]

        found = difference("data.tokenizer", name, opened(name), encode, tokenizer.added_tokens)
        return [] if found is None else [found]

    def prompt_ids(self, said: Sequence[str]) -> list[int]:
        """Return the ids of the prompt. Raises ``UserError`` if the tokenizer or the chat template cannot encode
        ``said``."""
        return self._asked(said)[0]

    def _asked(self, said: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return ``said`` as token ids (as messages if the model was trained on conversations), and the tokens that
        end a reply."""
        tokenizer = self._tokenizer()
        if self._data.is_chat:
            return ask(chat_template(self._data, tokenizer)[0], tokenizer, said)
        (prompt,) = said
        if not prompt:
            return self._beginning(tokenizer), []
        return [*tokenizer.start_ids, *tokenizer.encode(prompt).tolist()], []

    def write(
        self, model: nn.Module, said: Sequence[str], *, tokens: int, temperature: float, top_p: float, seed: int,
        device: torch.device,
    ) -> Iterator[Piece]:  # fmt: skip
        tokenizer = self._tokenizer()
        ids, end_of_turn = self._asked(said)
        choose = chooser(temperature=temperature, top_p=top_p, seed=seed)

        def of_vocabulary(logits: torch.Tensor) -> int:
            if logits.isnan().any():
                raise UserError(
                    "the model computes NaN, so no token is likeliest; use precision=fp32, or other weights"
                )
            return choose(logits[: tokenizer.vocab_size])  # no padding rows of the vocabulary

        following = continued(
            model, ids, layers=self._cached_layers(), tokens=tokens, choose=of_vocabulary, device=device
        )  # fmt: skip
        stream = TextStream(tokenizer, ids)
        for token in until_end(following, {tokenizer.end_id, *self._ends_of_saved()}, end_of_turn):
            yield Piece(stream.add(token), 1)
        yield Piece(stream.rest(), 0)

    def open_saved(self, checkpoint: Path) -> None:
        self._saved = checkpoint

    def _ends_of_saved(self) -> list[int]:
        """Return the tokens at which transformers stops generation with the opened model."""
        found = self._base_settings if self._saved is None else _settings_in(self._saved)
        ends = (found[name].get("eos_token_id") for name in (GENERATION, CONFIG))
        return next((end_ids for end_ids in map(_as_list, ends) if end_ids), [])

    def text_ids(self, text: str, *, begins: bool) -> list[int]:
        tokenizer = self._tokenizer()
        return [*(tokenizer.start_ids if begins else ()), *tokenizer.encode(text).tolist()]

    def first_id(self) -> int:
        return [*self._tokenizer().start_ids, self._tokenizer().end_id][0]

    def _beginning(self, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens before the first token of every document."""
        return [tokenizer.end_id, *tokenizer.start_ids]

    def _tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the data if it is open, else the configured one."""
        if self._prepared is not None:
            return self._prepared.tokenizer
        assert self._named_tokenizer is not None, "open_data comes first"
        return self._named_tokenizer

    @functools.cached_property
    def _named_tokenizer(self) -> Tokenizer | None:
        """Configured tokenizer. It is read once: a checkpoint's files may be deleted while its model generates text."""
        return named_tokenizer(self._data)

    def target_bytes(self, batch: Batch) -> int:
        if self._text_bytes is None:
            self._text_bytes = TextBytes(self._tokenizer())
        return self._text_bytes.of_targets(batch)

    def check_tokenizer(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            is_same = path.read_text("utf-8") == hugging_face_files(self._tokenizer())["tokenizer.json"]
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; the tokens of the model are read from it") from None
        if not is_same:
            raise UserError(
                f"data.tokenizer={self._data.tokenizer} is not the tokenizer of {folder} any more: it was learned from "
                "other text, or its files have changed; to use text with the "
                "model's tokenizer, give data=text data.path=FILES"
            )

    def check_resumed(self, checkpoint: Path) -> None:
        if self._lacks_output_bias(checkpoint):
            raise UserError(
                f"{checkpoint} was trained by an earlier version without o_proj.bias, and model.attention_bias=true "
                f"adds it with model.family={self._model.family}, as in transformers; use its weights alone, with "
                f"biases that start at zero: serried export {shlex.quote(str(checkpoint))} out=weights, then "
                "checkpoint.resume=weights"
            )
        now = hugging_face_files(self._tokenizer()).get("tokenizer.json")
        if now is None or (what := changed_token(checkpoint / "tokenizer.json", now)) is None:
            return
        keys, without = "data.tokenizer,data.path", ""
        if self._data.vocab_size != type(self._data).model_fields["vocab_size"].default:
            keys, without = f"{keys},data.vocab_size", " without data.vocab_size"  # a learned tokenizer's
        use = shlex.join([f"data.tokenizer={checkpoint}", f"checkpoint.allow_changes=[{keys}]"])
        raise UserError(
            f"{checkpoint} was trained with another tokenizer than data.tokenizer={self._data.tokenizer} is now: "
            f"{what}; use its own, {use}{without}, or {self.run.another_run} to keep both"
        )

    # export ---------------------------------------------------------------------------------------------------------

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        return self._family().exported(name, shape)

    def exported_from(self, folder: Path) -> Callable[[str, Sequence[int]], tuple[Fragment, ...]]:
        if not self._lacks_output_bias(folder):
            return self.exported
        return lambda name, shape: () if name.endswith(_OUTPUT_BIAS) else self.exported(name, shape)

    def _lacks_output_bias(self, folder: Path) -> bool:
        """Return whether the model in ``folder`` lacks the bias of the attention output, like models of an earlier
        version."""
        is_whole = self.run.adapter.method == "none" and getattr(self._model, "output_bias", False)
        return is_whole and not any(name.endswith(_OUTPUT_BIAS) for name in TensorFolder(folder).specs)

    def pretrained(self) -> Path | None:
        if not self._model.path or not self._model.pretrained:
            return None
        return model_folder(self._model.path, "*.safetensors", "*.json")

    def check_weights(self, folder: Path) -> None:
        """Check that ``folder`` has a ``config.json``, from which composing the config took the architecture."""
        if not (folder / CONFIG).is_file():
            raise UserError(f"{folder / CONFIG} does not exist; the architecture of the model is read from it")

    def _export_config(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the content of ``config.json`` for an export."""
        config = self._family().export_config(tokenizer.end_id) | self._special_ids(tokenizer)
        if takes(self.run.optim, "rounding") and not self.run.trainer.ema_decay:  # averages are fp32
            config |= {key: "bfloat16" for key in ("dtype", "torch_dtype") if key in config}
        return config

    def export_files(self, folder: Path) -> None:
        assert self._prepared is not None, "open_data comes first"
        tokenizer = self._prepared.tokenizer
        settings = {CONFIG: self._export_config(tokenizer), GENERATION: self._base_settings[GENERATION]}
        for name, found in settings.items():
            ends, end_of_turn = _as_list(found.get("eos_token_id")), self._end_of_turn(tokenizer)
            if end_of_turn is not None and found and end_of_turn not in ends:
                settings[name] = found | {"eos_token_id": [*(ends or [tokenizer.end_id]), end_of_turn]}
        files = {name: json.dumps(each, indent=2) + "\n" for name, each in settings.items() if each}
        for name, content in (files | hugging_face_files(tokenizer)).items():
            (folder / name).write_text(content, "utf-8")
        if self._data.is_chat:
            (folder / "chat_template.jinja").write_text(chat_template(self._data, tokenizer)[0], "utf-8")

    def _end_of_turn(self, tokenizer: Tokenizer) -> int | None:
        """Return the token that ends a reply of the model; None if replies end with several tokens, or with text."""
        if not self._data.is_chat or not isinstance(tokenizer, HuggingFaceTokenizer):
            return None
        try:
            _, ids = ask(chat_template(self._data, tokenizer)[0], tokenizer, ["?"])
        except UserError:  # the template requires other messages
            return None
        return ids[0] if len(ids) == 1 and ids[0] in tokenizer.added_ids else None

    def _special_ids(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the special ids of ``config.json``: the base model's, or else the tokenizer's."""
        end, base = tokenizer.end_id, self._base_settings[CONFIG]
        if not base:
            return {"bos_token_id": tokenizer.start_ids[0]} if tokenizer.start_ids else {}
        ids = {key: base[key] for key in ("bos_token_id", "pad_token_id") if key in base}
        ends = base.get("eos_token_id")  # a single id, or a list
        is_known = end in _as_list(ends)
        return {"bos_token_id": None} | ids | ({"eos_token_id": ends} if is_known else {})

    @functools.cached_property
    def _base_settings(self) -> dict[str, dict[str, Any]]:
        """Settings of the base model; empty if there is none, or if it no longer exists when a run resumes."""
        with suppress(UserError):
            if (folder := self.pretrained()) is not None:
                return _settings_in(folder)
        return {CONFIG: {}, GENERATION: {}}


def _settings_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the settings in a model folder, by file; empty for a file that cannot be read."""
    found: dict[str, dict[str, Any]] = {CONFIG: {}, GENERATION: {}}
    for name in found:
        with suppress(OSError, NotPlainData):
            found[name] = read_json(folder / name)
    return found


def _as_list(ids: Any) -> list[int]:
    """Return ``eos_token_id`` (an id or a list) as a list; empty if it is neither."""
    several = ids if isinstance(ids, list) else [ids]
    return several if all(isinstance(token, int) for token in several) else []
