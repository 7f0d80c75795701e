"""Data sections of language models, and the registry of data sources.

Each source has its own section with the keys that only this source reads. ``data`` chooses one; ``data.sources`` and
``data.validation`` contain further sources, under names that the user chooses.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from os.path import exists
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue, SerializeAsAny, create_model

from serried.configs.bucket_urls import is_bucket_url
from serried.configs.schema.fields import NAME_PATTERN, Count, Number, PathOrUrl, Section, Size
from serried.configs.schema.models import ModelSection
from serried.configs.schema.registry import Entry, Registry
from serried.configs.schema.sections import COMPARES_NOTHING, DEFAULT_VALIDATION, TRAINING, LoadingSection, RunConfig

_DIVIDED = ("hf", "stdlib", "text")
"""Sources without a fixed validation split: only the config determines which documents are held out."""


_OF_TEMPLATES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of chat templates whose values come from the row."""

_LEAST_FRACTION = 1e-9
"""Smallest ``data.validation_fraction`` above 0: 15 thousand of 15T tokens."""
MOST_VALIDATION = 0.999
"""Largest ``data.validation_fraction``."""


class SourceSection(Section):
    """A source of documents. Each source registers a section with its other keys."""

    needs: ClassVar[Mapping[str, str]] = {}
    """Required keys, with an example of a value."""
    libraries: ClassVar[Sequence[str]] = ()
    """Libraries that the source needs in addition to the required dependencies."""
    by_content: ClassVar[Sequence[str]] = (
        "name", "path", "subset", "split", "revision", "text_column", "messages_column", "columns", "token_dtype",
    )  # fmt: skip

    name: str
    """Name of the data source; a YAML file in ``data/`` sets it."""

    def check(self) -> None:
        """Raise ``UserError`` if the source cannot exist. Must be fast, since it is called before any slow set-up."""


class MixedSource(SourceSection):
    """One source of a mixture."""

    weight: Number = Field(default=1.0, ge=1e-9, le=1e9)
    """Weight of this source in the training data, relative to the weights of the other sources."""


@functools.cache
def _section_of(entry: Entry, base: Any) -> Any:
    return create_model(base.__name__, __base__=(entry.own, base))


def _by_name(base: type[SourceSection]) -> BeforeValidator:
    """Return a validator that uses the section of the source named in the values."""

    def validate(values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if (name := values.get("name")) in (singles := names_of_singles()):
            return _section_of(sources.get(name), base).model_validate(values)
        choice: Any = Literal[*singles]
        named = create_model(base.__name__, __base__=base, name=(choice, ...))
        return named.model_validate({key: value for key, value in values.items() if key in base.model_fields})

    return BeforeValidator(validate)


Sources = dict[str, Annotated[SerializeAsAny[MixedSource], _by_name(MixedSource)]]
"""Sources of a mixture, under names that the user chooses."""
ValidationSets = dict[str, Annotated[SerializeAsAny[SourceSection], _by_name(SourceSection)]]

Tokens = tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...]


class DataSection(LoadingSection, SourceSection):
    """Training data: keys common to all sources."""

    free = ("cache_dir", "fetch", "fetch_limit")
    by_content = ("validation", "bad_rows")

    validation: ValidationSets = Field(default_factory=dict)
    """Additional validation sets, under names you choose; each is evaluated in full, or up to
    ``trainer.eval_batches``."""
    validation_fraction: Number = Field(default=0.05, ge=0, le=MOST_VALIDATION)
    """Fraction of the text held out for validation: full documents, or the end of each file if there are few files. 0:
    train on all text."""
    format: Literal["text", "chat", "preference", "unpaired"] = "text"
    """``chat``: each row is a conversation; only the assistant's messages are trained on. ``preference``: each row is a
    pair of answers. ``unpaired``: each row is an answer with a label, true or false."""
    chat_template: PathOrUrl | None = None
    """Jinja template for conversations, or a file with one; null: the template of the tokenizer, else ChatML.
    ``none``: each row is a prompt and its completion, used unchanged."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Additional variables of the chat template, such as ``data.chat_template_kwargs.enable_thinking=false``."""
    train_on: Literal["replies", "last", "all"] = "replies"
    """Tokens of conversations to train on: all ``replies`` of the assistant, its ``last`` reply, or ``all`` tokens."""
    tokenizer: PathOrUrl = Field(default="bytes", min_length=1, max_length=4096)
    """``bytes``, ``chars``, ``train``, a ``tokenizer.json`` or a Hugging Face name."""
    vocab_size: Size = 8192
    """``data.tokenizer=train``: size of the vocabulary to learn."""
    add_tokens: Tokens = ()
    """Tokens to add to the tokenizer, recognized in all text. Pretrained models get a new row for each in the embedding
    and the head."""
    add_special_tokens: Tokens = ()
    """Special tokens to add, recognized in conversations; in plain text they remain text."""
    sequence_length: Annotated[Count, Field(ge=1, le=10**8)]
    """Tokens per sequence."""
    packing: Literal["split", "best_fit", "none"] = "split"
    """``split``: one stream of documents, split into sequences. ``best_fit``: pack complete documents. ``none``: one
    document per sequence, padded."""
    isolate_documents: bool = False
    """Mask attention between the documents of a sequence, and restart positions at each document."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """``skip``: leave out unusable rows, and count them."""
    cache_dir: PathOrUrl | None = None
    """Folder of prepared tokens; ``$XDG_CACHE_HOME/serried`` or ``~/.cache/serried`` when null. With
    ``s3://BUCKET/PATH``, one node prepares and uploads the tokens, and the others download them."""
    fetch: Literal["whole", "ranges"] = "whole"
    """``whole``: download tokens that are in a bucket before training. ``ranges``: read each sequence from the bucket
    when it is used, for data that is larger than the disk."""
    fetch_limit: str = "10GB"
    """Disk space per source, in MB, GB or TB, for what ``data.fetch=ranges`` has read. More is read again when it is
    used again."""

    @property
    def fetch_limit_bytes(self) -> int:
        """``fetch_limit`` in bytes; -1 if it is not a size."""
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([MGT])B", self.fetch_limit, re.ASCII)
        return int(float(found[1]) * 1000 ** " KMGT".index(found[2])) if found else -1

    @property
    def is_chat(self) -> bool:
        """Whether rows are conversations or pairs of answers, not plain text."""
        return self.format != "text"

    @property
    def has_template(self) -> bool:
        """Whether prompts are formatted with a chat template."""
        return self.is_chat and self.chat_template != "none"

    @property
    def isolates(self) -> bool:
        """Whether attention is masked between documents, and sequences may have several."""
        return self.packs_answers or (self.isolate_documents and self.packing != "none")

    @property
    def has_answers(self) -> bool:
        """Whether rows are pairs of answers, or answers with a label."""
        return self.format in ("preference", "unpaired")

    @property
    def packs_answers(self) -> bool:
        """Whether a sequence may contain the answers of several rows. Attention between rows is always masked."""
        return self.packing == "best_fit" and self.has_answers

    @property
    def added_tokens(self) -> Tokens:
        """All tokens to add to the tokenizer."""
        return (*self.add_tokens, *self.add_special_tokens)

    @property
    def is_streamed(self) -> bool:
        """Whether the source is read during training."""
        return bool(getattr(self, "streaming", False))

    @property
    def keeps_none(self) -> bool:
        """Whether no documents are held out for validation. Token files may still be validation data by their name."""
        return not self.validation_fraction and not getattr(self, "validation_split", None)

    @property
    def mixed(self) -> Mapping[str, MixedSource]:
        """Sources of a mixture by name; empty for a single source."""
        return getattr(self, "sources", {})

    def _mistakes(self) -> Iterator[str]:
        yield from self._mistakes_of_sources()
        yield from super()._mistakes()
        if 0 < self.validation_fraction < _LEAST_FRACTION:
            yield (
                f"data.validation_fraction={self.validation_fraction:g} holds out less than 1e-9 of the documents, "
                "which is none; use data.validation_fraction=0.001, or 0 to train on all documents"
            )
        yield from self._mistakes_of_text()

    def _mistakes_of_sources(self) -> Iterator[str]:
        for key in self.needs:
            if not getattr(self, key):
                yield f"data={self.name} needs data.{key}={self.needs[key]}"
        named: dict[str, SourceSection] = {f"data.sources.{name}": each for name, each in self.mixed.items()}
        named |= {f"data.validation.{name}": source for name, source in self.validation.items()}
        for path, source in named.items():
            if not re.fullmatch(NAME_PATTERN, path.split(".", 2)[2]):
                yield f"{path}: use letters, digits, _ and -, starting with a letter; e.g. web-2024"
            for key in source.needs:
                if not getattr(source, key):
                    yield f"{path}.name={source.name} needs {path}.{key}={source.needs[key]}"
        yield from self._mistakes_of_fetching([self, *named.values()])
        taken = {DEFAULT_VALIDATION: "the data held out from training", TRAINING: "the training data"}
        for name in self.validation.keys() & taken.keys():
            yield f"data.validation.{name}: this name is reserved for {taken[name]}; use another name"

    def _mistakes_of_fetching(self, named: Sequence[SourceSection]) -> Iterator[str]:
        if self.fetch_limit_bytes < 0:
            yield f"data.fetch_limit={self.fetch_limit} is not a size in MB, GB or TB; e.g. data.fetch_limit=50GB"
        has_tokens = any(source.name == "tokens" and is_bucket_url(getattr(source, "path", "")) for source in named)
        if self.fetch == "ranges" and not has_tokens and not is_bucket_url(self.cache_dir):
            yield (
                "data.fetch=ranges reads prepared data in a bucket; add data.cache_dir=s3://BUCKET/PATH, or use "
                "data=tokens data.path=s3://BUCKET/PATH"
            )

    def _mistakes_of_text(self) -> Iterator[str]:
        made = ("chars", "train")
        if self.vocab_size != type(self).model_fields["vocab_size"].default and self.tokenizer != "train":
            yield (
                f"data.vocab_size={self.vocab_size} has an effect only with data.tokenizer=train, not "
                f"data.tokenizer={self.tokenizer}; add data.tokenizer=train, or set the vocabulary size of the model: "
                f"model.vocab_size={self.vocab_size}"
            )
        if len(self.mixed) > 1 and self.tokenizer in made:
            yield (
                f"data.tokenizer={self.tokenizer} is built from a single source, but data=mixture has "
                f"{len(self.mixed)}; use data.tokenizer=bytes, or an existing tokenizer"
            )
        yield from self._mistakes_of_added_tokens((*made, "bytes"))
        yield from self._mistakes_of_chats()
        if self.has_answers:
            yield from self._mistakes_of_answers()
        if self.is_chat and self.tokenizer in made:
            yield (
                f"data.format={self.format} needs an existing tokenizer, but data.tokenizer={self.tokenizer} builds "
                "one from text; use data.tokenizer=bytes, or the tokenizer of the model: data.tokenizer=MODEL_FOLDER"
            )
        named = ("bytes", *made)
        if self.tokenizer not in named and "/" not in self.tokenizer and not exists(self.tokenizer):  # noqa: PTH110
            close = (get_close_matches(self.tokenizer, named, 1, 0.5) or named)[0]
            yield (
                f"data.tokenizer={self.tokenizer} is not one of {', '.join(named)}, and no such file or folder "
                f"exists; use data.tokenizer={close}, or a Hugging Face name with its owner, "
                "as in openai-community/gpt2"
            )

    def _mistakes_of_added_tokens(self, fixed: Sequence[str]) -> Iterator[str]:
        key = "add_tokens" if self.add_tokens else "add_special_tokens"
        if self.added_tokens and self.tokenizer in fixed:
            yield (
                f"data.{key} needs the tokenizer of a model, and data.tokenizer={self.tokenizer} cannot be extended; "
                "use data.tokenizer=MODEL_FOLDER"
            )
        for token in sorted({*self.add_tokens} & {*self.add_special_tokens}):
            yield f"{token!r} is in both data.add_tokens and data.add_special_tokens; name it in one of them"
        for key in ("add_tokens", "add_special_tokens"):
            tokens = getattr(self, key)
            for token in sorted({token for token in tokens if tokens.count(token) > 1}):
                yield f"data.{key} names {token!r} more than once; name it once"

    def _mistakes_of_chats(self) -> Iterator[str]:
        kwargs = self.chat_template_kwargs
        given = {"chat_template": self.chat_template is not None, "chat_template_kwargs": bool(kwargs)}
        for key in (key for key, is_given in given.items() if is_given and not self.is_chat):
            yield f"data.{key} has an effect only with data.format=chat; add data.format=chat"
        if self.train_on != "replies" and self.format != "chat":
            yield (
                f"data.train_on={self.train_on} has an effect only with data.format=chat, not "
                f"data.format={self.format}; leave it out"
            )
        for name in kwargs:
            if not name.isidentifier() or name in _OF_TEMPLATES:
                why = "its value is set from each row" if name in _OF_TEMPLATES else "not a valid variable name"
                yield f"data.chat_template_kwargs.{name}: {why}; leave it out"
        if self.chat_template != "none":
            return
        if kwargs:
            yield "data.chat_template_kwargs has no effect with data.chat_template=none; leave one of them out"
        if self.has_answers:
            yield f"data.chat_template=none needs data.format=chat, not data.format={self.format}; leave it out"
        if self.train_on == "last":
            yield (
                "data.train_on=last has no effect with data.chat_template=none, because each row has one completion; "
                "leave it out"
            )

    def _mistakes_of_answers(self) -> Iterator[str]:
        if self.isolate_documents:
            yield (
                f"data.isolate_documents=true has no effect with data.format={self.format}, because answers are always "
                "isolated; leave it out"
            )
        if self.mixed:
            yield f"data=mixture with data.format={self.format} is not supported; put the rows into one file or folder"


sources = Registry(
    "data source",
    "data",
    "serried.data_sources",
    DataSection,
    built_in=("serried.recipes.data.sources.*",),
    first="text",
)


def names_of_singles() -> list[str]:
    """Return the names of all sources except mixtures."""
    return [name for name in sources.names() if name != "mixture"]


def register_source(name: str, *, section: type[Section] = SourceSection) -> Callable[[Any], Any]:
    """Register a data source as ``data=NAME``; a decorator for a function of the section that yields documents, or
    returns a ``Source``.

    A document is text, or the list of messages of a conversation. The function may be called more than once, and must
    yield the same documents each time.

    Args:
        name: Value of ``data`` on the command line.
        section: Keys that only this source reads.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        UserError: The name is registered already.

    Example::

        @serried.register_source("poems")
        def read(section):
            for path in sorted(Path("poems").glob("*.txt")):
                yield path.read_text()
    """
    return sources.registering(name, section)


def data_section(**values: Any) -> DataSection:
    """Return the validated section for ``values``, whose ``name`` is a registered source."""
    section = sources.get(values["name"]).section.model_validate(values)
    assert isinstance(section, DataSection)
    return section


def alone(data: DataSection, source: SourceSection) -> DataSection:
    """Return a data section with ``source``, one source of a mixture or a validation set, as the only source of
    ``data``."""
    entry = sources.get(source.name)
    shared = {name: getattr(data, name) for name in DataSection.model_fields}
    own = {name: getattr(source, name) for name in entry.section.model_fields if name in type(source).model_fields}
    section = entry.section.model_construct(**{**shared, **own, "validation": {}})
    assert isinstance(section, DataSection)
    return section


class TextRunConfig(RunConfig):
    """Configuration of a run that trains a built-in language model."""

    model: ModelSection  # at run time the section of a family, with more keys: see configs.schema.run_config
    data: DataSection

    @property
    def isolates(self) -> bool:
        """Whether batches have positions: documents are isolated from each other, or a single document from its
        padding, which must not lengthen it if rotary frequencies depend on the length."""
        scaling: Any = getattr(self.model, "rope_scaling", None)
        if not getattr(scaling, "depends_on_length", False) or self.data.sequence_length <= scaling.original:
            return self.data.isolates
        return self.data.isolates or self.data.packing == "none" or self.data.has_answers

    @property
    def lacks_validation(self) -> bool:
        sources: Sequence[SourceSection] = list(self.data.mixed.values()) or [self.data]
        is_divided = all(
            source.name in _DIVIDED and not getattr(source, "validation_split", None) for source in sources
        )
        return is_divided and self.data.keeps_none

    def _mistakes(self) -> Iterator[str]:
        yield from self._mistakes_of_comparing()
        yield from super()._mistakes()
        yield from self.task.mistakes_with(self)
        if self.data.keeps_none and self.data.name != "tokens" and not self.data.validation:
            yield from self.mistake_of_evaluation()
        if self.data.sequence_length > self.model.max_sequence_length:
            yield (
                f"data.sequence_length={self.data.sequence_length} exceeds "
                f"model.max_sequence_length={self.model.max_sequence_length}; "
                f"use data.sequence_length={self.model.max_sequence_length} or "
                f"model.max_sequence_length={self.data.sequence_length}"
            )

    def _mistakes_of_comparing(self) -> Iterator[str]:
        if self.lacks_validation and self.checkpoint.keep_best:
            yield f"checkpoint.keep_best=true {COMPARES_NOTHING}, or checkpoint.keep_best=false"
        if self.lacks_validation and (patience := self.trainer.early_stopping_patience):
            key = "trainer.early_stopping_patience"
            yield f"{key}={patience} {COMPARES_NOTHING}, or {key}=0"

    def mistake_of_evaluation(self) -> Iterator[str]:
        """Yield a sentence if evaluations are on although no data is held out for them."""
        if self.trainer.eval_every != 0:
            yield (
                "data.validation_fraction=0 holds out no documents for evaluation; turn evaluation off with "
                "trainer.eval_every=0, or add a validation set: "
                "data.validation.NAME.name=text data.validation.NAME.path=FILES"
            )
