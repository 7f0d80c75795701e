"""Conversion of text to token ids and back.

A tokenizer is a pure function of its ``state()``, which is plain JSON and is stored with prepared data and saved
models. Prepared data is found by the part of it that determines the ids, ``spec()``.
A new kind of tokenizer needs a class, and a branch in ``tokenizer_from_spec`` and in ``hugging_face_files``.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from serried.configs.errors import UserError
from serried.configs.plain_data import parse_json, read_bytes

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LARGEST_TOKENIZER = 256 * 2**20
"""Maximum size of a ``tokenizer.json`` in bytes."""
TEMPLATE_FOR_TOOLS = "additional_chat_templates/tool_use.jinja"
"""File in which newer versions of transformers store the chat template for conversations with tools."""
END = "<|end|>"
"""Text of the end token of tokenizers that this package creates."""
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END,
    "clean_up_tokenization_spaces": False,
}  # fmt: skip
"""``tokenizer_config.json`` of tokenizers that this package creates."""


class Tokenizer(ABC):
    """Converts text to token ids. Thread-safe; holds only its vocabulary."""

    vocab_size: int
    """Number of ids, including the end token."""
    start_ids: tuple[int, ...] = ()
    """Ids before every document; empty for most tokenizers."""
    end_id: int
    """Id after every document."""
    takes_bytes: bool
    """Whether a text may be arbitrary bytes that are not UTF-8."""
    splits_anywhere: bool = False
    """Whether a text may be split between any two characters without changing its ids."""

    @abstractmethod
    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the ids of ``text``, [tokens], in the smallest unsigned dtype that fits the vocabulary.

        No special tokens are added. The name of a special token in ``text`` is treated as text.
        """

    def encode_many(self, texts: Sequence[bytes | str]) -> list[np.ndarray]:
        """Like ``encode``, for several texts at once."""
        return [self.encode(text) for text in texts]

    def encode_placed(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Like ``encode``, but also return the position of each id's first character and the index of its word, both
        [tokens], int64."""
        raise NotImplementedError(f"{type(self).__name__} splits anywhere")

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``, without end tokens. Invalid text becomes U+FFFD, so decoding never fails."""

    @abstractmethod
    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Like ``encode``, but names of special tokens in ``text`` become special tokens. Also return the range of
        characters of each id, as start and stop, [tokens, 2]."""

    def decode_marked(self, ids: Iterable[int]) -> str:
        """Like ``decode``, but include the names of special tokens."""
        runs = groupby(ids, key=lambda token: token == self.end_id)
        return "".join(END * len(list(run)) if is_end else self.decode(run) for is_end, run in runs)

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """Return plain JSON data from which ``tokenizer_from_spec`` creates a tokenizer with the same ids."""

    def state(self) -> dict[str, Any]:
        """Return ``spec()`` and all other files of the tokenizer, in the same format."""
        return self.spec()


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned dtype that fits the ids of a vocabulary."""
    return np.dtype(np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.uint32)


class BytesTokenizer(Tokenizer):
    """Tokenizer of bytes: ids 0-255 are the bytes of the UTF-8 text (or of any data), and 256 ends a document."""

    vocab_size = 257
    end_id = 256
    takes_bytes = True
    splits_anywhere = True

    def encode(self, text: bytes | str) -> np.ndarray:
        content = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(content, np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        content = bytearray()
        for token in ids:
            if 0 <= token < 256:
                content.append(token)
            elif token != self.end_id:
                content += REPLACEMENT.encode()
        return content.decode("utf-8", errors="replace")

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        # The end token has no name that a text could contain.
        lengths = [len(character.encode()) for character in text]
        places = np.repeat(np.arange(len(text)), lengths)
        return self.encode(text), np.stack((places, places + 1), axis=1)

    def spec(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class CharsTokenizer(Tokenizer):
    """Tokenizer with one id per character that occurs in the source, ordered by code point. The last id ends a
    document."""

    takes_bytes = False
    splits_anywhere = True

    def __init__(self, characters: str) -> None:
        """``characters``: all characters, each once, sorted."""
        if list(characters) != sorted(set(characters)):
            raise ValueError("characters must be sorted and each occur once")
        self.characters = characters
        self.end_id = len(characters)
        self.vocab_size = len(characters) + 1
        points = _code_points(characters)
        self._dtype = token_dtype(self.vocab_size)
        self._id_of_point = np.full(int(points[-1]) + 2 if len(points) else 1, -1, np.int32)
        self._id_of_point[points] = np.arange(len(points), dtype=np.int32)

    def encode(self, text: bytes | str) -> np.ndarray:
        points = _code_points(text.decode("utf-8") if isinstance(text, bytes) else text)
        # The last entry of the table stands for all code points above the known ones.
        ids = self._id_of_point[np.minimum(points, len(self._id_of_point) - 1)]
        unknown = np.flatnonzero(ids < 0)
        if len(unknown):
            character = chr(int(points[unknown[0]]))
            raise UserError(
                f"character {character!r} (U+{ord(character):04X}) at position {int(unknown[0])} is not among the "
                f"{len(self.characters)} characters of the training text; remove it, or use data.tokenizer=bytes"
            )
        return ids.astype(self._dtype)

    def decode(self, ids: Iterable[int]) -> str:
        known = range(len(self.characters))
        return "".join(self.characters[i] if i in known else REPLACEMENT for i in ids if i != self.end_id)

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        places = np.arange(len(text))
        return self.encode(text), np.stack((places, places + 1), axis=1)

    def spec(self) -> dict[str, Any]:
        return {"kind": "chars", "characters": self.characters}


def _code_points(text: str) -> np.ndarray:
    # surrogatepass: a command line can contain an unpaired surrogate, which is then reported as an unknown character.
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)


def hugging_face_files(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the files from which ``transformers.AutoTokenizer`` loads ``tokenizer`` with the same ids, as content by
    name.

    Files of a Hugging Face tokenizer are returned unchanged, except that a template for tools in a folder of its own is
    added to ``tokenizer_config.json``, in the earlier format, so that all files are in one folder. Byte and character
    tokenizers become byte-pair encodings without merges: one id per byte or per character.
    """
    spec = tokenizer.state()
    if spec["kind"] == "hugging_face":
        return _in_one_folder(spec["files"])
    return {name: json.dumps(content, indent=2) + "\n" for name, content in _own_files(tokenizer, spec).items()}


def _in_one_folder(files: Mapping[str, str]) -> dict[str, str]:
    """Return ``files`` with the template for tools in ``tokenizer_config.json``."""
    files = dict(files)
    for_tools = files.pop(TEMPLATE_FOR_TOOLS, None)
    if for_tools is None:
        return files
    settings = parse_json(files.get("tokenizer_config.json", "{}"))
    others = files.pop("chat_template.jinja", settings.get("chat_template"))
    named = others if isinstance(others, list) else [{"name": "default", "template": others}] if others else []
    named = [entry for entry in named if entry.get("name") != "tool_use"]
    settings["chat_template"] = [*named, {"name": "tool_use", "template": for_tools}]
    return files | {"tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n"}


def ids_of_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the mapping from token to id in the parsed content of a ``tokenizer.json``."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # a unigram model has a list of (token, score)
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return vocabulary | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}


def changed_token(saved: Path, now: str) -> str | None:
    """Describe the first token of the ``tokenizer.json`` at ``saved`` that has another id in ``now``, the content of a
    ``tokenizer.json``. None if all ids are the same, or ``saved`` does not exist."""
    try:
        before = read_bytes(saved, LARGEST_TOKENIZER).decode()
        if before == now:
            return None
        ids = ids_of_tokens(parse_json(now))
        for token, number in ids_of_tokens(parse_json(before)).items():
            if (other := ids.get(token)) != number:
                return f"token {token!r} had id {number} and now has {'no id' if other is None else f'id {other}'}"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read {saved} ({type(error).__name__}: {error}); use another checkpoint") from None
    return None


def chars_tokenizer_of(tokenizer_json: str) -> CharsTokenizer | None:
    """Return the character tokenizer that ``hugging_face_files`` converted to this ``tokenizer.json``; None if it is
    from another tokenizer.

    Loaded as an ordinary byte-pair encoding, the file would silently drop unknown characters.
    """
    try:
        vocabulary = parse_json(tokenizer_json)["model"]["vocab"]
        tokenizer = CharsTokenizer("".join(sorted(vocabulary)))
    except (ValueError, KeyError, TypeError):
        return None
    is_same = hugging_face_files(tokenizer)["tokenizer.json"] == tokenizer_json
    return tokenizer if is_same else None


def _own_files(tokenizer: Tokenizer, spec: dict[str, Any]) -> dict[str, Any]:
    if spec["kind"] == "bytes":
        vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        pre_tokenizer, decoder = level, level
    else:
        vocabulary = {character: number for number, character in enumerate(spec["characters"])}
        pre_tokenizer, decoder = None, {"type": "Fuse"}
    end = {"id": tokenizer.end_id, "content": END, "special": True, "normalized": False}
    end |= {"single_word": False, "lstrip": False, "rstrip": False}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary, "merges": [],
    }  # fmt: skip
    return {
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
            "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": decoder, "model": model,
        },
        "tokenizer_config.json": TOKENIZER_CONFIG,
    }  # fmt: skip


def _byte_characters() -> list[str]:
    """Return the printable character for each byte in byte-level encodings (GPT-2's ``bytes_to_unicode``)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (chr(256 + number) for number in range(256 - len(printable)))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]
