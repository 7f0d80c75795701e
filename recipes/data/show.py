"""Tokens as readable text."""

from itertools import groupby

import numpy as np

from serried.configs.formats import printable
from serried.recipes.data.tokenizer import Tokenizer

_SHOWN_LINES = 24
_SHOWN_CHARACTERS = 110


def marked_lines(tokenizer: Tokenizer, tokens: np.ndarray, is_learned: np.ndarray) -> list[str]:
    """The text of ``tokens`` [tokens] in lines: trained on (``is_learned`` [tokens]) after ``>``, the rest after ``|``.

    Long lines and long texts are shortened; equal lines in a row, such as padding, become one.
    """
    lines: list[str] = []
    begins = np.flatnonzero(np.diff(is_learned) | (tokens[:-1] == tokenizer.end_id)) + 1
    for run in np.split(np.arange(len(tokens)), begins):
        mark = "  > " if is_learned[run[0]] else "  | "
        text = printable(tokenizer.decode_marked(tokens[run].tolist()))
        lines += [mark + _shortened(line) for line in text.split("\n") if line]
    counted = [(line, len(list(same))) for line, same in groupby(lines)]
    lines = [line if count == 1 else f"{line}  ({count} times)" for line, count in counted]
    more = len(lines) - _SHOWN_LINES
    return lines if more <= 1 else [*lines[:_SHOWN_LINES], f"  ... and {more} more lines"]


def _shortened(line: str) -> str:
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."
