"""Hugging Face tokenizers: loaded from a file, a folder or the Hub, or trained here."""

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serried.configs.bucket_paths import local_path
from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import UserError
from serried.configs.plain_data import parse_json, read_bytes
from serried.configs.schema.data import DataSection
from serried.recipes.data.readers.source_files import assignment, library, quiet
from serried.recipes.data.tokenizers.tokenizer import (
    END,
    REPLACEMENT,
    TEMPLATE_FOR_TOOLS,
    TOKENIZER_CONFIG,
    BytesTokenizer,
    CharsTokenizer,
    Tokenizer,
    chars_tokenizer_of,
    token_dtype,
)

_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
"""Files of a tokenizer. Only the first is required."""
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end|>", "<|im_end|>")
"""End-of-text tokens to try if no file names one."""

_MOST_BYTES = 2**28
"""Maximum size of a tokenizer file in bytes. Files of the largest vocabularies have 2**25 bytes."""


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer described by a ``tokenizer.json``.

    Documents begin with the tokens that its post-processor adds at the start (Llama 3: ``<|begin_of_text|>``; most:
    none), and end with its end-of-text token. Other tokens that a post-processor adds are left out. The name of a
    special token in a text is treated as text, so it cannot end a document.
    """

    takes_bytes = False

    def __init__(self, files: Mapping[str, str]) -> None:
        """``files``: contents of ``tokenizer.json`` and the files next to it, by name.

        Raises:
            ValueError: the files do not describe a tokenizer, or it has no end-of-text token.
        """
        self._files = {name: files[name] for name in _FILES if name in files}
        self.template_for_tools = files.get(TEMPLATE_FOR_TOOLS)
        """Jinja chat template for conversations with tools, if it is in a folder of its own."""
        self._tokenizer = _parsed(files["tokenizer.json"])
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        self.end = _end_token(self._files, ids)
        """Text of the end token."""
        self.end_id: int = ids[self.end]
        bare, whole = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
        begin = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
        self.start_ids = tuple(whole[:begin])
        self._dtype = token_dtype(self.vocab_size)
        self._known = frozenset(ids.values())

    @property
    def chat_template(self) -> str | None:
        """Jinja chat template; None if there is none."""
        return self.chat_templates.get("default")

    @functools.cached_property
    def chat_templates(self) -> dict[str, str]:
        """Jinja chat templates by name: ``default``, and optionally ``tool_use`` for conversations with tools."""
        template = _settings(self._files, "tokenizer_config.json").get("chat_template")
        named: dict[Any, Any] = {"default": template}
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if "chat_template.jinja" in self._files:
            named = {"default": self._files["chat_template.jinja"]}
        if self.template_for_tools is not None:
            named["tool_use"] = self.template_for_tools
        return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether ``tokenizer_config.json`` has no class and no tokens with which transformers would encode
        differently."""
        settings = _settings(self._files, "tokenizer_config.json")
        added = settings.get("added_tokens_decoder")
        marks = [value for key, value in settings.items() if key.endswith("_token")]
        marks += [*added.values()] if isinstance(added, dict) else []
        names = [mark.get("content") if isinstance(mark, dict) else mark for mark in marks]
        texts = [name for name in names if isinstance(name, str)]
        return (
            settings.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
            and not {"add_prefix_space", "add_bos_token", "add_eos_token", "extra_special_tokens"} & settings.keys()
            and all(self._tokenizer.token_to_id(text) is not None for text in texts)
        )

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of tokens that were added to the vocabulary, such as special tokens, by text."""
        return {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}

    @functools.cached_property
    def added_ids(self) -> frozenset[int]:
        return frozenset(self.added_tokens.values())

    @functools.cached_property
    def _with_marks(self) -> Any:
        tokenizer = _parsed(self._files["tokenizer.json"])
        tokenizer.post_processor = None  # it would add no tokens here, but may exclude spaces from token offsets
        return tokenizer

    def encode(self, text: bytes | str) -> np.ndarray:
        return self.encode_many([text.decode() if isinstance(text, bytes) else text])[0]

    def encode_many(self, texts: Sequence[bytes | str]) -> list[np.ndarray]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, self._dtype) for encoding in found]

    def encode_placed(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        found = self._tokenizer.encode(text, add_special_tokens=False)
        words = [-1 if word is None else word for word in found.word_ids]
        places = np.array([start for start, _ in found.offsets], np.int64)
        return np.array(found.ids, self._dtype), places, np.array(words, np.int64)

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        found = self._with_marks.encode(text, add_special_tokens=False)
        return np.array(found.ids, self._dtype), np.array(found.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int]) -> str:
        pieces, run = [], list[int]()
        for token in map(int, ids):
            if token in self._known:
                run.append(token)
            else:
                pieces += [self._tokenizer.decode(run), REPLACEMENT]
                run = []
        return "".join([*pieces, self._tokenizer.decode(run)])

    def decode_marked(self, ids: Iterable[int]) -> str:
        return str(self._with_marks.decode(list(map(int, ids)), skip_special_tokens=False))

    def spec(self) -> dict[str, Any]:
        return {"kind": "hugging_face", "files": self._files}

    def state(self) -> dict[str, Any]:
        for_tools = {} if self.template_for_tools is None else {TEMPLATE_FOR_TOOLS: self.template_for_tools}
        return {"kind": "hugging_face", "files": self._files | for_tools}

    def with_template_for_tools(self, template: str | None) -> "HuggingFaceTokenizer":
        """Return a copy with ``template`` for conversations with tools; ``self`` if it is None, or there is one."""
        if template is None or self.template_for_tools is not None:
            return self
        return HuggingFaceTokenizer({**self._files, TEMPLATE_FOR_TOOLS: template})

    def with_tokens(self, tokens: Sequence[str], special: Sequence[str]) -> "HuggingFaceTokenizer":
        """Return a copy with additional ``tokens`` and ``special`` tokens, as ``add_tokens`` of transformers adds them.

        Tokens that were added before are skipped, except that they become special if they are in ``special``.
        """
        tokenizer = _parsed(self._files["tokenizer.json"])
        known = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
        if known.keys() >= {*tokens} and all(known.get(token) for token in special):
            return self
        tokenizer.add_tokens(list(tokens))
        tokenizer.add_special_tokens(list(special))
        settings = _settings(self._files, "tokenizer_config.json")
        key = "extra_special_tokens"  # as transformers 5 writes it
        if not isinstance(settings.get(key), list):
            key = "additional_special_tokens"  # as transformers 4 does
        named = settings.get(key) or []
        settings[key] = [*named, *(token for token in dict.fromkeys(special) if token not in named)]
        files = {"tokenizer.json": tokenizer.to_str(pretty=True)}
        if special:
            files["tokenizer_config.json"] = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        return HuggingFaceTokenizer({**self.state()["files"], **files})


def _parsed(content: str) -> Any:
    tokenizers = library("tokenizers", "a tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises no specific exception
        raise ValueError(f"not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _end_token(files: Mapping[str, str], ids: Mapping[str, int]) -> str:
    """Return the text of the token that ends a document."""
    settings = {name: _settings(files, name) for name in ("tokenizer_config.json", "special_tokens_map.json")}
    for name, values in settings.items():
        entry = values.get("eos_token")
        token = entry.get("content") if isinstance(entry, dict) else entry
        if token is not None:
            if not isinstance(token, str) or token not in ids:
                raise ValueError(f"eos_token {token!r} of {name} is not in tokenizer.json")
            return token
    usual = next((token for token in _USUAL_ENDS if token in ids), None)
    if usual is None:
        raise ValueError(
            "the token that ends a document is unknown: add a tokenizer_config.json with an eos_token next to "
            f"tokenizer.json (it has none of {', '.join(_USUAL_ENDS)})"
        )
    return usual


def _settings(files: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return the JSON object in one of the files next to ``tokenizer.json``; empty if the file does not exist."""
    try:
        settings = parse_json(files.get(name, "{}"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{name} is not a mapping from names to values")
    return settings


# finding --------------------------------------------------------------------------------------------------------------


def named_tokenizer(section: DataSection) -> Tokenizer | None:
    """Return the tokenizer that ``data.tokenizer`` names, with the added tokens; None for tokenizers that are trained
    on the text."""
    if section.tokenizer == "bytes":
        return BytesTokenizer()
    if section.tokenizer in ("chars", "train"):
        return None
    found = find_tokenizer(section.tokenizer)
    if not section.added_tokens:
        return found
    if isinstance(found, CharsTokenizer):
        raise UserError(
            f"data.tokenizer={section.tokenizer} has one id per character and cannot be extended; leave "
            "data.add_tokens and data.add_special_tokens out"
        )
    return found.with_tokens(section.add_tokens, section.add_special_tokens)


def local_tokenizer(name: str) -> str:
    """Return ``name``; for the URL of a tokenizer in a bucket, download its files and return the path on this node."""
    folder, slash, last = name.rpartition("/")
    is_beside = is_bucket_url(name) and last == "tokenizer.json"
    here = local_path(folder if is_beside else name, "data.tokenizer", *_FILES, TEMPLATE_FOR_TOOLS)
    return f"{here}{slash}{last}" if is_beside else here


def find_tokenizer(name: str) -> HuggingFaceTokenizer | CharsTokenizer:
    """Load the tokenizer from a ``tokenizer.json``, a folder that contains one, or a name on the Hub. Raises
    ``UserError`` if it does not exist or is not available."""
    here = local_tokenizer(name)
    path = Path(os.path.expanduser(here))  # noqa: PTH111 -- Path.expanduser fails for an unknown user
    is_folder = path.is_dir()
    if is_folder:
        path = path / "tokenizer.json"
    if (is_folder or is_bucket_url(name)) and not path.exists():
        raise UserError(
            f"{assignment('data.tokenizer', name)}: the folder has no tokenizer.json; create it with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        files = _files_beside(path) if path.exists() else _files_of_hub(name)
        return chars_tokenizer_of(files["tokenizer.json"]) or HuggingFaceTokenizer(files)
    except UnicodeDecodeError as error:
        raise UserError(f"{assignment('data.tokenizer', name)} is not a tokenizer.json: {error.reason}") from error
    except ValueError as error:
        raise UserError(f"{assignment('data.tokenizer', name)}: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror or error}") from error


def _files_beside(path: Path) -> dict[str, str]:
    others = {name: path.parent / name for name in (*_FILES[1:], TEMPLATE_FOR_TOOLS)}
    found = {name: _read(other) for name, other in others.items() if other.exists()}
    return {"tokenizer.json": _read(path), **found}


def _read(path: Path) -> str:
    return read_bytes(path, _MOST_BYTES).decode("utf-8")


def _files_of_hub(name: str) -> dict[str, str]:
    errors = library("huggingface_hub.errors", f"data.tokenizer={name}")
    library("huggingface_hub.file_download", f"data.tokenizer={name}")  # sets up the logger that is silenced below
    try:
        with quiet():
            try:
                # Cached files are used as they are, so a start needs no network.
                files = {"tokenizer.json": _downloaded(name, "tokenizer.json", local_files_only=True)}
            except errors.LocalEntryNotFoundError:
                files = {"tokenizer.json": _downloaded(name, "tokenizer.json")}
                for file in (*_FILES[1:], TEMPLATE_FOR_TOOLS):
                    with contextlib.suppress(errors.EntryNotFoundError):
                        _downloaded(name, file)
            else:
                _add_template_for_tools(name)
            for file in (*_FILES[1:], TEMPLATE_FOR_TOOLS):
                with contextlib.suppress(errors.EntryNotFoundError):
                    files[file] = _downloaded(name, file, local_files_only=True)
        return files
    except errors.GatedRepoError as error:
        raise UserError(
            f"data.tokenizer={name} is gated: request access at https://huggingface.co/{name}, then run `hf auth "
            "login` (or set HF_TOKEN) and start again; or use another tokenizer, as in "
            "data.tokenizer=openai-community/gpt2, or train your own: data.tokenizer=train"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"data.tokenizer={name} is not a file or folder on this machine, and on the Hugging Face Hub it does not "
            "exist or is private; check the name, or run `hf auth login`"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise UserError(
            f"data.tokenizer={name} has no tokenizer.json on the Hugging Face Hub; create it with transformers: "
            "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER), then data.tokenizer=FOLDER"
        ) from error
    except errors.HFValidationError as error:
        raise UserError(
            f"{assignment('data.tokenizer', name)} is neither a file or folder on this machine nor a valid name on the "
            "Hugging Face Hub; use the path of a tokenizer.json, or OWNER/NAME"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        raise UserError(
            f"data.tokenizer={name} is not on this machine, and the Hugging Face Hub cannot be reached "
            f"({type(error).__name__}); run `serried prepare` with the same overrides on a machine with network access "
            "and share data.cache_dir and HF_HOME with this machine, or use a folder with a tokenizer.json: "
            "data.tokenizer=FOLDER"
        ) from error


def _add_template_for_tools(name: str) -> None:
    """Download the template for tools to a cache that does not have it, as earlier versions did not ask for it. The
    cache records if the repository has none. Without network the cache is used as it is."""
    hub, errors = (library(part, f"data.tokenizer={name}") for part in ("huggingface_hub", "huggingface_hub.errors"))
    if hub.try_to_load_from_cache(name, TEMPLATE_FOR_TOOLS) is None:
        commit = Path(hub.hf_hub_download(name, "tokenizer.json", local_files_only=True)).parent.name
        with contextlib.suppress(errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError):
            hub.hf_hub_download(name, TEMPLATE_FOR_TOOLS, revision=commit)


def _downloaded(name: str, file: str, *, local_files_only: bool = False) -> str:
    hub = library("huggingface_hub", f"data.tokenizer={name}")
    return _read(Path(hub.hf_hub_download(name, file, local_files_only=local_files_only)))


# training -------------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Train a byte-level byte-pair encoding (like GPT-2's) with ``vocab_size`` ids on ``texts``.

    Deterministic. The tokenizer has fewer ids if too few pairs occur at least twice.
    """
    tokenizers = library("tokenizers", "data.tokenizer=train")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    smallest = len(level.alphabet()) + 1
    if vocab_size < smallest:
        raise UserError(
            f"data.vocab_size={vocab_size} is below {smallest} ({smallest - 1} bytes and the end token); use "
            "data.vocab_size=8192"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    config = json.dumps(TOKENIZER_CONFIG, indent=2) + "\n"
    return HuggingFaceTokenizer({"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": config})


def tokenizer_from_spec(spec: dict[str, Any]) -> Tokenizer:
    """Create a tokenizer from the result of ``Tokenizer.state`` or ``Tokenizer.spec``.

    Raises:
        ValueError: the kind of tokenizer is unknown to this version.
    """
    kind = spec.get("kind")
    if kind == "bytes":
        return BytesTokenizer()
    if kind == "chars" and isinstance(spec.get("characters"), str):
        return CharsTokenizer(spec["characters"])
    if kind == "hugging_face":
        return HuggingFaceTokenizer(spec["files"])
    raise ValueError(f"unknown tokenizer {kind!r}")
