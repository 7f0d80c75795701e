"""Tokenization of preference pairs, a chosen and a rejected answer to the same prompt, and of single answers.

A prepared document is a pair: the conversation with the chosen answer, then the one with the rejected answer. The byte
of a token in ``supervised`` is 1 if the token is trained on, plus 2 in the second conversation. A single answer is a
document of its own, with 2 in all its bytes if its label is false.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from serried.configs.errors import UserError
from serried.configs.formats import printable
from serried.configs.schema.data import DataSection
from serried.recipes.data.chat.conversations import ChatEncoder, chat_encoder
from serried.recipes.data.readers.source import Row
from serried.recipes.data.tokenizers.encode_rows import Encoded, encoded_rows
from serried.recipes.data.tokenizers.tokenizer import Tokenizer

LEARNED, REJECTED = 1, 2
"""Bits of each token's byte in ``supervised``."""

_SHOWN_CHARACTERS = 60


class PairEncoder:
    """Encoder of rows that are pairs of answers."""

    def __init__(self, chat: ChatEncoder, sequence_length: int) -> None:
        """``sequence_length``: longer prompts are refused."""
        self._chat, self._sequence_length = chat, sequence_length

    def spec(self, earlier: int | None = None) -> dict[str, Any]:
        """Return all settings that the tokens depend on, except rows and tokenizer, as plain JSON. ``earlier``: format
        of an earlier version to use instead of the current one."""
        spec = {"sequence_length": self._sequence_length, **self._chat.spec(earlier)}
        return spec if earlier else {**spec, "weighted": True}  # earlier versions did not read weights

    def __call__(self, rows: Sequence[Row], unit: str) -> list[Encoded | UserError]:
        return encoded_rows(rows, unit, self._encode)

    def _encode(self, row: Row) -> Encoded:
        pair = row.content
        if not isinstance(pair, dict):
            raise UserError(" is not a pair of answers; use data.format=chat or data.format=text")
        if pair["chosen"] == pair["rejected"]:
            raise UserError(
                f": chosen and rejected are the same answer ({_shown(pair['chosen'])}), so there is nothing to "
                "prefer; fix or remove the row"
            )
        sides = [self._side(pair, name) for name in ("chosen", "rejected")]
        if np.array_equal(sides[0].tokens, sides[1].tokens):
            raise UserError(
                f": chosen and rejected have the same tokens ({_shown(pair['chosen'])}), so there is nothing to "
                "prefer; fix or remove the row"
            )
        kept = self._sequence_length + 1
        if np.array_equal(sides[0].tokens[:kept], sides[1].tokens[:kept]):
            longest = max(len(side.tokens) for side in sides)
            raise UserError(
                f": chosen and rejected differ only after the first data.sequence_length={self._sequence_length} "
                f"tokens ({_shown(pair['chosen'])}), so there is nothing to prefer; use "
                f"data.sequence_length={longest - 1}, or remove the row"
            )
        learned = [side.supervised for side in sides if side.supervised is not None]
        marks = np.concatenate((learned[0], learned[1] | np.uint8(REJECTED)))
        is_new = any(side.is_new for side in sides)
        tokens = np.concatenate([side.tokens for side in sides])
        return Encoded(tokens, marks, is_new=is_new, weights=_weights(pair, tokens))

    def _side(self, pair: dict[str, Any], name: str) -> Encoded:
        prompt, answer = pair["prompt"], pair[name]
        if not any(message.get("content") or message.get("value") or message.get("tool_calls") for message in answer):
            raise UserError(f": {name} is empty; fix or remove the row")
        encoded = self._chat.conversation([*prompt, *answer], f", {name}", len(prompt), pair.get("tools", ()))
        assert encoded.supervised is not None
        if encoded.before:
            raise UserError(
                f": {name} has several replies, and the chat template drops or changes the earlier ones; keep only one "
                "reply, or use another template: data.chat_template=FILE"
            )
        if encoded.weights is not None:
            raise UserError(
                f": {name} has a message with a weight other than 0 and 1, but a pair or answer has one weight; use a "
                "column weight, or remove the row"
            )
        if (tokens := int(np.flatnonzero(encoded.supervised)[0])) > self._sequence_length:
            raise UserError(
                f": the prompt has {tokens} tokens, so data.sequence_length={self._sequence_length} leaves no room for "
                f"an answer; use a data.sequence_length above {tokens}, or remove the row"
            )
        return encoded


class AnswerEncoder(PairEncoder):
    """Encoder of rows that are single answers with a label, or pairs, which become two answers."""

    def _encode(self, row: Row) -> Encoded:
        found = row.content
        if not isinstance(found, dict):
            raise UserError(" is not an answer with a label; use data.format=chat or data.format=text")
        if "label" in found:
            return self._labelled(found, "completion", is_desired=bool(found["label"]))
        super()._encode(row)  # checks the pair
        chosen, rejected = (self._labelled(found, name, is_desired=name == "chosen") for name in ("chosen", "rejected"))
        return rejected._replace(before=(chosen,))

    def _labelled(self, row: dict[str, Any], name: str, *, is_desired: bool) -> Encoded:
        side = self._side(row, name)
        assert side.supervised is not None
        marks = side.supervised | np.uint8(0 if is_desired else REJECTED)
        return side._replace(supervised=marks, weights=_weights(row, side.tokens))


def pair_encoder(section: DataSection, tokenizer: Tokenizer) -> PairEncoder:
    """Return the encoder for ``data.format=preference`` and ``unpaired``."""
    encoder = AnswerEncoder if section.format == "unpaired" else PairEncoder
    return encoder(chat_encoder(section, tokenizer), section.sequence_length)


def _weights(row: dict[str, Any], tokens: np.ndarray) -> np.ndarray | None:
    """Return the weight of the row for each of ``tokens``; None if it has none."""
    return np.full(len(tokens), row["weight"], np.float32) if "weight" in row else None


def _shown(messages: Sequence[dict[str, Any]]) -> str:
    """Return the last message, shortened and quoted."""
    text = " ".join(str(messages[-1].get("content", messages[-1].get("value"))).split()) if messages else ""
    return repr(printable(text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"))
