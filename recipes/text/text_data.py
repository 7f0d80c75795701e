"""Text data of a run: prepared sources and validation sets, their datasets and their tokenizer."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from serried.configs.errors import UserError
from serried.configs.schema.data import DataSection
from serried.configs.schema.sections import DEFAULT_VALIDATION, MOST_THREADS, WHOLE, TrainerSection
from serried.recipes.data.prepared.decontamination import kept_apart, left_out
from serried.recipes.data.prepared.prepare import Prepared, cache_folder, open_prepared, prepare
from serried.recipes.data.prepared.summary import marked_lines, shown_documents, summary_of
from serried.recipes.data.samples.mixture_dataset import (
    MixtureDataset,
    describe_sources,
    key_of_source,
    mistakes_of,
    source_sections,
    validation_sections,
)
from serried.recipes.data.samples.token_dataset import Batch, PackedDataset, Sample, TokenDataset, open_dataset
from serried.recipes.data.streaming.lanes import StreamDataset
from serried.recipes.data.streaming.stream import open_training, prepare_stream
from serried.recipes.data.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer, named_tokenizer
from serried.recipes.data.tokenizers.tokenizer import Tokenizer
from serried.recipes.models.layers.lm_head import IGNORE

_TRAINED_ON = {
    "replies": "conversations, trained on the assistant's messages only",
    "last": "conversations, trained on the assistant's last message only",
    "all": "conversations, trained on all tokens",
}


class TextData:
    """Text data of a run, from its config section ``data``. ``trainer`` defines the batch size and the seed of streamed
    data. ``isolates``: whether samples have positions."""

    def __init__(self, section: DataSection, trainer: TrainerSection, *, isolates: bool) -> None:
        self.section, self._trainer, self._isolates = section, trainer, isolates
        self.sources: dict[str, Prepared] = {}
        """Prepared sources by name; empty before ``open``. All share one tokenizer."""
        self.held_out: dict[str, Prepared] = {}
        """Validation sets by name, without documents that are also in the training data. For a mixture, they may
        include the validation splits of its sources."""
        self.is_weighted = False
        """Whether any token has a weight in the loss other than 1. False before ``open``."""
        self._left_out: dict[str, int] = {}
        self._datasets: dict[str, TokenDataset | PackedDataset | MixtureDataset | StreamDataset] = {}

    @property
    def first(self) -> Prepared | None:
        """The prepared data of the first source; None before ``open``."""
        return next(iter(self.sources.values()), None)

    def prepare(self, show: Callable[[str], None] | None, threads: int | None) -> str:
        """Download, tokenize and deduplicate the text. Return the argument for ``open``."""

        def prepared_as(key: str, section: DataSection) -> Prepared:
            with mistakes_of(key):
                return prepare(section, show, threads)

        training_sections = source_sections(self.section)
        held_out_sections = validation_sections(self.section)
        keys = {key_of_source(name): section for name, section in training_sections.items()}
        keys |= {f"data.validation.{name}": section for name, section in held_out_sections.items()}
        for key, section in keys.items():
            with mistakes_of(key):
                section.check()
        if self.section.is_streamed:
            sequences = self._trainer.eval_batches * self._trainer.global_batch
            sources = {"": prepare_stream(self.section, sequences, show)}
        else:
            sources = {name: prepared_as(key_of_source(name), section) for name, section in training_sections.items()}
        validation = {
            name: prepared_as(f"data.validation.{name}", section) for name, section in held_out_sections.items()
        }
        self._check_tokenizers([*sources.values(), *validation.values()])
        held_out = {name: prepared.whole() for name, prepared in validation.items()}
        if len(sources) > 1 and not self.section.keeps_none:  # validation documents of one may be in another
            held_out |= {f"{DEFAULT_VALIDATION}/{name}": prepared for name, prepared in sources.items()}
        training, cache = list(sources.values()), cache_folder(self.section)
        apart = {name: kept_apart(name, prepared, training, cache, show) for name, prepared in held_out.items()}
        place = {
            "sources": {name: str(prepared.folder) for name, prepared in sources.items()},
            "validation": {name: str(prepared.folder) for name, prepared in validation.items()},
            "apart": {name: str(folder) for name, folder in apart.items() if folder is not None},
        }
        tokenizer = next(iter(sources.values())).tokenizer
        for_tools = tokenizer.template_for_tools if isinstance(tokenizer, HuggingFaceTokenizer) else None
        return json.dumps({"folders": place, "template_for_tools": for_tools})

    def _check_tokenizers(self, prepared: Sequence[Prepared]) -> None:
        if any(source.tokenizer.spec() != prepared[0].tokenizer.spec() for source in prepared):
            raise UserError(
                f"data.tokenizer={self.section.tokenizer} would train a different tokenizer for each source; use "
                "data.tokenizer=bytes, or the files of an existing tokenizer"
            )

    def open(self, place: str) -> None:
        """Open the result of ``prepare``."""
        found = json.loads(place)
        folders = {kind: {name: Path(path) for name, path in paths.items()} for kind, paths in found["folders"].items()}
        self.sources = {name: open_prepared(folder) for name, folder in folders["sources"].items()}
        for name, source in self.sources.items():
            if isinstance(source.tokenizer, HuggingFaceTokenizer):
                tokenizer = source.tokenizer.with_template_for_tools(found["template_for_tools"])
                self.sources[name] = replace(source, tokenizer=tokenizer)
        self.held_out = {name: open_prepared(folder).whole() for name, folder in folders["validation"].items()}
        self.held_out |= {name: open_prepared(folder) for name, folder in folders["apart"].items()}
        prepared = [*self.sources.values(), *self.held_out.values()]
        self.is_weighted = any(shard.weights for one in prepared for shards in one.shards.values() for shard in shards)
        self._left_out = {name: left_out(folder) for name, folder in folders["apart"].items()}

    def describe(self) -> list[str]:
        """Return descriptions of the configured data and, if it is open, of its sizes."""
        tokenizer = self.section.tokenizer
        tokens = f"{tokenizer} as tokens" if tokenizer in ("bytes", "chars") else f"tokenizer {tokenizer}"
        line = f"{describe_sources(self.section)}, {tokens}, {self.section.sequence_length} a sequence"
        if self.section.format == "chat":
            line += f", {_TRAINED_ON[self.section.train_on]}"
        if self.first is None:
            return [line]
        sizes = [f"{name} {prepared.describe()}".strip() for name, prepared in self.sources.items()]
        if self.section.is_streamed:
            held_out = self.first.splits["validation"]
            sizes = [f"validation {held_out.tokens:,} tokens of {held_out.documents:,} documents"]
        left_out = [f"{name} without {n:,} documents of the training data" for name, n in self._left_out.items()]
        return [line, *sizes, *left_out]

    def summary(self) -> str:
        """Return a detailed summary of the prepared data: documents, tokens, lengths, a sample."""
        prepared = {**self.sources, **self.held_out}
        tokenizer = self.section.tokenizer
        texts = [(f"{name}\n" if name else "") + summary_of(of, tokenizer) for name, of in prepared.items()]
        return "\n".join(texts)

    def shown_samples(self, count: int) -> list[str]:
        """Return the text of the first ``count`` training documents of each source, with the trained parts
        marked."""
        found = [(name, line) for name, prepared in self.sources.items() for line in shown_documents(prepared, count)]
        return [f"{name} {line}" if name and not line.startswith(" ") else line for name, line in found]

    def describe_sample(self, sample: Sample) -> list[str]:
        """Return lines that show ``sample``, with its targets marked."""
        is_learned = np.concatenate(([False], sample.targets[:-1] != IGNORE))
        lines = marked_lines(self.tokenizer, sample.tokens, is_learned)
        return ["sample     the first sequence; trained on: lines with >", *lines]

    def keeps_none(self, split: str) -> bool:
        """Return whether ``split`` is the validation split, and is empty because all data is used for training."""
        if split != DEFAULT_VALIDATION or any(of.splits["validation"].tokens for of in self.sources.values()):
            return False
        return self.section.keeps_none or getattr(self.section, "is_prepared", False)

    def dataset(self, split: str) -> TokenDataset | PackedDataset | MixtureDataset | StreamDataset:
        """Return the dataset of ``split``, which is opened once and cached."""
        if split not in self._datasets:
            self._datasets[split] = self._open(split)
        return self._datasets[split]

    def _open(self, split: str) -> TokenDataset | PackedDataset | MixtureDataset | StreamDataset:
        if split in self.held_out:
            with mistakes_of(f"data.validation.{split}"):
                return open_dataset(self.held_out[split], "validation", self.section, isolates=self._isolates)
        if self.section.is_streamed and split == "train":
            lanes, seed = self._trainer.global_batch, self._trainer.seed
            return open_training(
                self.section, self.sources[""], lanes=lanes, seed=seed, workers=self.section.threads(MOST_THREADS)
            )
        sources, is_whole = dict(self.sources), split == WHOLE
        if is_whole:
            sources, split = {name: prepared.whole() for name, prepared in sources.items()}, "validation"
        elif split == DEFAULT_VALIDATION:
            sources = {name: self.held_out.get(f"{split}/{name}", prepared) for name, prepared in sources.items()}
        datasets = {}
        for name, prepared in sources.items():
            with mistakes_of(key_of_source(name)):
                datasets[name] = open_dataset(prepared, split, self.section, isolates=self._isolates, to_end=is_whole)
        if not self.section.mixed:
            return datasets[""]
        weights = {name: source.weight for name, source in self.section.mixed.items()}
        return MixtureDataset(datasets, weights, getattr(self.section, "weigh_by", "tokens"))

    def targets_by_source(self, batch: Batch) -> Tensor | None:
        """Return the number of targets in ``batch`` from each source of a mixture; None if the data is no mixture."""
        training = self._datasets.get("train")
        return training.targets_by_source(batch) if isinstance(training, MixtureDataset) else None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the data if it is open, else the configured one."""
        if self.first is not None:
            return self.first.tokenizer
        assert self.named_tokenizer is not None, "the data is opened first"
        return self.named_tokenizer

    @functools.cached_property
    def named_tokenizer(self) -> Tokenizer | None:
        """Configured tokenizer; None if it depends on the text. It is read only once, because a checkpoint's files may
        be deleted while its model generates text."""
        return named_tokenizer(self.section)
