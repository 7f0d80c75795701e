"""Data sets named by other frameworks' configs."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serried.configs.errors import UserError
from serried.configs.messages.invalid_values import shown
from serried.configs.plain_data import read_if_there
from serried.conversion.foreign_config import ForeignConfig, local_path

_FILES = re.compile(r"\.(jsonl?|ndjson|parquet|csv|txt|md|arrow)(\.(gz|zst|bz2|xz))?$")
_LOADERS = ("json", "parquet", "csv", "text", "arrow")
"""Names of generic loaders of ``datasets``, which read ``data_files``."""
_OF_TORCHTUNE: dict[str, dict[str, Any]] = {
    "alpaca_dataset": {"path": "tatsu-lab/alpaca", "all": True},
    "alpaca_cleaned_dataset": {"path": "yahma/alpaca-cleaned", "all": True},
    "slimorca_dataset": {"path": "Open-Orca/SlimOrca-Dedup"},
    "wikitext_dataset": {"path": "EleutherAI/wikitext_document_level", "text": "page"},
    "cnn_dailymail_articles_dataset": {"path": "ccdv/cnn_dailymail", "text": "article"},
    "samsum_dataset": {"path": "Samsung/samsum", "columns": {"prompt": "dialogue", "completion": "summary"}},
    "grammar_dataset": {"path": "liweili/c4_200m", "columns": {"prompt": "input", "completion": "output"}},
    "stack_exchange_paired_dataset": {
        "path": "lvwerra/stack-exchange-paired", "columns": {"chosen": "response_j", "rejected": "response_k"},
    },
    "hh_rlhf_helpful_dataset": {"path": "RLHFlow/HH-RLHF-Helpful-standard"},
}  # fmt: skip
"""Data sets that functions of torchtune load; ``all``: it trains on the prompts too."""
_FIELDS = {
    "field_instruction": "prompt", "field_prompt": "prompt", "field_output": "completion", "field_input": "input",
    "field_system": "system", "field_chosen": "chosen", "field_rejected": "rejected", "field_tools": "tools",
    "field_label": "label", "field_completion": "completion",
}  # fmt: skip
"""Names of axolotl for our columns."""
_FACTORY_COLUMNS = {
    "prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system",
    "tools": "tools", "chosen": "chosen", "rejected": "rejected", "kto_tag": "label",
}  # fmt: skip
"""Names of LLaMA-Factory for our columns."""


@dataclass
class Source:
    """One data set."""

    path: str
    kind: str = "hf"
    """``hf`` or ``text``."""
    format: str = "chat"
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    messages: str | None = None
    """Column of the conversation, unless it is ``messages`` or ``conversations``."""
    text: str | None = None
    """Column of the text."""
    columns: dict[str, str] = field(default_factory=dict)
    trains_on_all: bool = False


@dataclass
class ForeignData:
    """Data sets of a config, with sentences on what differs."""

    training: list[Source] = field(default_factory=list)
    validation: list[Source] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)


def data_of(config: ForeignConfig, task: str) -> ForeignData:
    """Return the data sets of ``config`` for a ``task``: sft, text, preference or reward."""
    data = ForeignData()
    pairs = task in ("preference", "reward")
    readers = (_axolotl, _factory, _torchtune, _trl)
    for reader in readers:
        reader(config, data)
    for source in (*data.training, *data.validation):
        if pairs:
            source.format = "preference"
        elif task == "text" and source.format == "chat":
            source.format = "text"
    return data


def _located(config: ForeignConfig, path: str, **more: Any) -> Source:
    """Return a source, which is local if ``path`` looks like a file or exists."""
    found = local_path(config, path)
    is_local = found is not None or path.startswith((".", "/", "~")) or bool(_FILES.search(path))
    return Source(found or path, "text" if is_local else "hf", **more)


def _files(config: ForeignConfig, entry: Mapping[str, Any], path: str, **more: Any) -> list[Source]:
    """Return the sources of an entry that may name the loader of ``datasets`` and ``data_files``."""
    named = entry.get("data_files")
    files = [] if named is None or isinstance(named, Mapping) else named if isinstance(named, list) else [named]
    if not all(isinstance(file, str) for file in files):
        raise UserError(
            f"data_files={shown(named)} of {path} in {config.path} is no file name and no list of them; correct it"
        )
    if files and (path in _LOADERS or local_path(config, path)):
        return [_located(config, file, **more) for file in files]
    return [_located(config, path, **more)]


def _text(entry: Mapping[str, Any], *keys: str) -> str | None:
    return next((str(entry[key]) for key in keys if entry.get(key) is not None), None)


# axolotl --------------------------------------------------------------------------------------------------------------


def _axolotl(config: ForeignConfig, data: ForeignData) -> None:
    for fact, listed in (("datasets", data.training), ("test_datasets", data.validation)):
        entries = config.value(fact, []) if fact != "datasets" or "dataset_mixer" not in config else []
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, Mapping) and (path := _text(entry, "path", "id")):
                listed += _axolotl_sources(config, entry, path, data)
    if "pretraining_dataset" in config:
        named = config.value("pretraining_dataset")
        for entry in named if isinstance(named, list) else [named]:
            entry = entry if isinstance(entry, Mapping) else {"path": entry}
            if not (path := _text(entry, "path")):
                continue
            source = _located(config, path, format="text", subset=_text(entry, "name"))
            source.split, source.text = _text(entry, "split"), _text(entry, "text_column")
            data.training.append(source)


def _axolotl_sources(config: ForeignConfig, entry: Mapping[str, Any], path: str, data: ForeignData) -> list[Source]:
    kind = entry.get("type")
    fields: dict[str, Any] = {**entry, **kind} if isinstance(kind, Mapping) else dict(entry)
    name = "user_defined" if isinstance(kind, Mapping) else str(kind or "chat_template").split(":")[0]
    stem = name.split(".")[0]
    plain = stem in ("completion", "pretrain")
    sources = _files(config, entry, path, format="text" if plain else "chat")
    messages = _text(fields, "field_messages")
    for source in sources:
        source.subset, source.split = _text(entry, "name", "subset"), _text(entry, "split")
        source.revision = _text(entry, "revision")
        source.text = _text(fields, "field") if plain else None
        source.messages = messages if messages not in ("messages", "conversations") else None
        source.columns = {ours: str(fields[key]) for key, ours in _FIELDS.items() if fields.get(key)}
        source.columns = {ours: theirs for ours, theirs in source.columns.items() if ours != theirs}
        source.trains_on_all = bool(fields.get("train_on_inputs"))
    if isinstance(kind, Mapping) and kind.get("format"):
        data.lacking.append(f"type.format of {path}: rows are rendered by the chat template, not by a format string")
    elif stem.startswith(("alpaca", "gpteacher", "reflection", "explainchoice", "oasst")):
        data.notes.append(
            f"type={kind} of {path}: axolotl uses its own prompt format (### Instruction: ...), but serried uses the "
            "chat template; for another format use data.chat_template=FILE.jinja"
        )
    elif stem == "input_output":
        data.lacking.append(
            f"type=input_output of {path}: per-segment labels are not supported; set train: false in messages"
        )
    elif not plain and stem not in (
        "chat_template",
        "sharegpt",
        "user_defined",
        "chatml",
        "llama3",
        "zephyr",
        "ipo",
        "orpo",
        "bradley_terry",
        "kto",
        "simpo",
    ):
        data.lacking.append(
            f"type={kind} of {path}: prompt strategies are not supported; name the columns with data.columns"
        )
    mapping = fields.get("message_property_mappings")
    known = (["role", "content"], ["from", "value"])
    if isinstance(mapping, Mapping) and [mapping.get("role"), mapping.get("content")] not in known:
        data.lacking.append(
            f"message_property_mappings of {path}: messages need role and content, or from and value; rename the keys"
        )
    if (roles := fields.get("roles_to_train")) and roles not in (["assistant"], ["assistant", "gpt"], ["gpt"]):
        data.lacking.append(
            f"roles_to_train={roles} of {path}: only replies of the assistant are trained on (data.train_on)"
        )
    if fields.get("train_on_eos") in ("all", "last"):
        data.lacking.append(
            f"train_on_eos={fields['train_on_eos']} of {path}: the end token of each reply is always trained on"
        )
    return sources


# LLaMA-Factory --------------------------------------------------------------------------------------------------------


def _factory(config: ForeignConfig, data: ForeignData) -> None:
    folder = Path(config.text("dataset_dir", "data"))
    folder = next((place for place in (config.path.parent / folder, folder) if place.is_dir()), folder)
    table = read_if_there(folder / "dataset_info.json")
    for fact, listed in (("factory_dataset", data.training), ("factory_validation", data.validation)):
        for name in config.words(fact):
            listed += _factory_sources(config, folder, name, table.get(name), data)


def _factory_sources(config: ForeignConfig, folder: Path, name: str, entry: Any, data: ForeignData) -> list[Source]:
    if not isinstance(entry, Mapping):
        place = folder / "dataset_info.json"
        data.notes.append(
            f"dataset={name}: {place} has no entry for it; add data.path=FILE, or data=hf data.path=OWNER/NAME"
        )
        return [Source(str(folder / f"{name}.json"), "text")]
    if hub := _text(entry, "hf_hub_url"):
        source = Source(hub, "hf", subset=_text(entry, "subset"), split=_text(entry, "split"))
    elif file := _text(entry, "file_name", "script_url"):
        source = Source(str(folder / file), "text")
    else:
        data.notes.append(
            f"dataset={name}: its entry in {folder / 'dataset_info.json'} has no file_name or hf_hub_url, and data is "
            "read from files and from the Hub only; download it, and add data.path=FILE"
        )
        return []
    columns = entry.get("columns")
    columns = columns if isinstance(columns, Mapping) else {}
    if entry.get("formatting") == "sharegpt" or "messages" in columns:
        messages = _text(columns, "messages")
        source.messages = messages if messages not in ("messages", "conversations") else None
        tags = entry.get("tags")
        tags = tags if isinstance(tags, Mapping) else {}
        pair = (tags.get("role_tag", "from"), tags.get("content_tag", "value"))
        if pair not in (("from", "value"), ("role", "content")):
            data.lacking.append(f"tags of {name}: messages need role and content, or from and value; rename the keys")
    elif config.text("stage") == "pt":
        source.text = _text(columns, "prompt")
    else:
        ours = {"prompt": "prompt", "query": "input", "response": "completion", "kto_tag": "label"}
        named = {theirs: str(columns[theirs]) for theirs in _FACTORY_COLUMNS if theirs in columns}
        usual = {("instruction", "output"), ("question", "answer"), ("prompt", "response"), ("query", "response")}
        if (named.get("prompt", "instruction"), named.get("response", "output")) in usual:
            named = {key: value for key, value in named.items() if key not in ("prompt", "response")}
        source.columns = {
            ours.get(theirs, theirs): column for theirs, column in named.items() if ours.get(theirs, theirs) != column
        }
    if set(columns) & {"images", "videos", "audios"}:
        data.lacking.append(f"images of {name}: models are trained on text only")
    return [source]


# torchtune ------------------------------------------------------------------------------------------------------------


def _torchtune(config: ForeignConfig, data: ForeignData) -> None:
    for fact, listed in (("dataset", data.training), ("validation_dataset", data.validation)):
        named = config.value(fact)
        for entry in named if isinstance(named, list) else [named]:
            if isinstance(entry, Mapping) and "_component_" in entry:
                listed += _torchtune_sources(config, entry, data)


def _torchtune_sources(config: ForeignConfig, entry: Mapping[str, Any], data: ForeignData) -> list[Source]:
    component = str(entry["_component_"]).rpartition(".")[2]
    known = _OF_TORCHTUNE.get(component, {})
    path = _text(entry, "source") or known.get("path")
    if not path:
        data.notes.append(
            f"{component} is code that does not name its data; add data.path=FILE, or data=hf data.path=OWNER/NAME"
        )
        return []
    is_text = component in ("text_completion_dataset", "wikitext_dataset", "cnn_dailymail_articles_dataset")
    mapped = entry.get("column_map") or {}
    if not isinstance(mapped, Mapping):
        raise UserError(
            f"column_map={shown(mapped)} of {component} in {config.path} is no mapping; write column_map: "
            "{input: COLUMN, output: COLUMN}"
        )
    names = {"input": "prompt", "output": "completion", "system": "system", "prompt": "prompt"}
    columns = {names.get(str(theirs), str(theirs)): str(column) for theirs, column in mapped.items()} or known.get(
        "columns", {}
    )
    sources = _files(config, entry, path, format="text" if is_text else "chat")
    for source in sources:
        source.subset, source.split = _text(entry, "name"), _text(entry, "split")
        source.text = _text(entry, "column") or known.get("text") if is_text else None
        column = _text(entry, "conversation_column")
        source.messages = column if column not in ("messages", "conversations") else None
        source.columns = {ours: column for ours, column in columns.items() if ours != column}
        trained = entry.get("train_on_input")
        source.trains_on_all = bool(known.get("all") if trained is None else trained)
        if "masking_strategy" in entry:
            source.trains_on_all = entry["masking_strategy"] == "train_on_all"
    if component.startswith("alpaca"):
        data.notes.append(
            f"{component}: torchtune uses its own prompt format (### Instruction: ...), but serried uses the chat "
            "template; for another format use data.chat_template=FILE.jinja"
        )
    return sources


# TRL and Unsloth ------------------------------------------------------------------------------------------------------


def _trl(config: ForeignConfig, data: ForeignData) -> None:
    if "dataset_name" in config:
        source = _located(config, config.text("dataset_name"))
        source.subset = config.text("dataset_subset") or None
        source.split = config.text("dataset_split") or None
        data.training.append(source)
    splits = config.words("dataset_splits")
    mixer = config.value("dataset_mixer", {})
    for name, fraction in mixer.items() if isinstance(mixer, dict) else ():
        split = next((split for split in splits if "train" in split), None)
        data.training.append(_located(config, str(name), split=split))
        _note_fraction(config, data, data.training[-1], "dataset_mixer", fraction)
    mixture = config.value("dataset_mixture", [])
    for entry in mixture if isinstance(mixture, list) else []:
        if isinstance(entry, Mapping) and (path := _text(entry, "id", "path")):
            source = _located(config, path)
            source.subset, source.split = _text(entry, "config", "name"), _text(entry, "split")
            for key in ("weight", "fraction"):
                _note_fraction(config, data, source, key, entry.get(key))
            data.training.append(source)
    for fact, listed in (("train_file", data.training), ("validation_file", data.validation)):
        if fact in config:
            listed.append(_located(config, config.text(fact)))
    if "text_field" in config and not config.facts["text_field"].name.endswith("default dataset_text_field"):
        for source in data.training:
            source.format, source.text = "text", config.text("text_field")


def _note_fraction(config: ForeignConfig, data: ForeignData, source: Source, key: str, value: Any) -> None:
    """Name the fraction of the rows of a data set that the other framework keeps, unless it keeps all."""
    if value is None or value == 1:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise UserError(f"{key}={shown(value)} of {source.path} in {config.path} is not a number above 0; correct it")
    share = "its share of the rows of the mixture" if key == "fraction" else "the fraction of its rows that is used"
    split = source.split or "train"
    of = f"{source.path} ({split})" if source.split else source.path
    data.notes.append(
        f"{key}={shown(value)} of {of} is {share}, but serried reads all rows; shorten the file, or name a split such "
        f"as {split}[:25%] with data=hf"
    )


def names_of(sources: list[Source]) -> Iterator[tuple[str, Source]]:
    """Yield sources with names for ``data.sources``: the last part of the path, made unique."""
    taken: set[str] = set()
    for source in sources:
        stem = _FILES.sub("", source.path.rstrip("/").rpartition("/")[2])
        if source.subset or source.split not in (None, "train"):
            stem += f"-{source.subset or source.split}"
        name = re.sub(r"[^\w-]+", "-", stem, flags=re.ASCII).strip("-_")
        name = name if re.match(r"[A-Za-z]", name) else f"source-{name}".rstrip("-")
        unique, number = name, 2
        while unique in taken:
            unique, number = f"{name}-{number}", number + 1
        taken.add(unique)
        yield unique, source
