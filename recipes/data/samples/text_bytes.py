"""Bytes of text per token, to compare losses of models with different tokenizers."""

import json
import re

import numpy as np
from torch import Tensor

from serried.recipes.data.samples.token_dataset import Batch
from serried.recipes.data.tokenizers.tokenizer import Tokenizer
from serried.recipes.models.layers.lm_head import IGNORE

_ANCHOR = "a"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextBytes:
    """Counts the UTF-8 bytes of text in the targets of batches. Special tokens, such as the end token, are not text.

    A token of a byte-level encoding always has the same bytes. Tokens of other encodings may lose a space at the
    beginning of a document, so there are two tables.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._inside, self._at_start = _tables(tokenizer)
        self._begins = tokenizer.start_ids[-1] if tokenizer.start_ids else tokenizer.end_id
        """Token before the first token of a document's text."""

    def of_targets(self, batch: Batch) -> int:
        """Return the bytes of text in the targets of ``batch``."""
        is_target = batch.targets != IGNORE
        targets, before = _numbers(batch.targets[is_target]), _numbers(batch.tokens[is_target])
        return int(np.where(before == self._begins, self._at_start[targets], self._inside[targets]).sum())


def _numbers(tokens: Tensor) -> np.ndarray:
    return np.asarray(tokens.cpu().numpy())


def _tables(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of text bytes of every id inside a document, and at its start, both [vocabulary], int64."""
    spec = tokenizer.spec()
    if spec["kind"] == "bytes":
        inside = np.ones(tokenizer.vocab_size, np.int64)
        inside[tokenizer.end_id] = 0
        return inside, inside
    if spec["kind"] == "chars":
        inside = np.array([*(len(character.encode()) for character in spec["characters"]), 0])
        return inside, inside
    return _hugging_face_tables(tokenizer, json.loads(spec["files"]["tokenizer.json"]))


def _hugging_face_tables(tokenizer: Tokenizer, content: dict[str, object]) -> tuple[np.ndarray, np.ndarray]:
    import tokenizers

    parsed = tokenizers.Tokenizer.from_str(json.dumps(content))
    added = parsed.get_added_tokens_decoder()
    names = parsed.get_vocab(with_added_tokens=True)
    inside = np.zeros(tokenizer.vocab_size, np.int64)
    at_start = np.zeros(tokenizer.vocab_size, np.int64)
    is_byte_level = '"ByteLevel"' in json.dumps(content["decoder"])
    anchor = next((number for name, number in names.items() if name in (_ANCHOR, f"\u2581{_ANCHOR}")), None)
    for name, number in names.items():
        if number in added:
            size = (0 if added[number].special else len(added[number].content.encode()),) * 2
        elif is_byte_level:
            size = len(name), len(name)  # a character represents a byte
        elif _BYTE.fullmatch(name):
            size = 1, 1
        else:
            alone = len(parsed.decode([number]).encode())
            behind = alone if anchor is None else len(parsed.decode([anchor, number]).encode()) - len(_ANCHOR)
            size = behind, alone
        inside[number], at_start[number] = size
    return inside, at_start
