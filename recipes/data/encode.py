"""Rows to tokens: what a source's rows are learned as."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from recipes.data.source import Row


class Encoded(NamedTuple):
    """One document as tokens, the end mark included."""

    tokens: np.ndarray
    """[tokens], unsigned"""
    supervised: np.ndarray | None
    """[tokens], uint8, 1 for those that are learned; None: all of them."""


class Encoder(Protocol):
    """Turns rows into tokens. Pure and thread-safe; many rows at once, since tokenizers are faster then."""

    def __call__(self, rows: Sequence[Row], unit: str) -> list[Encoded]:
        """One ``Encoded`` a row; ``unit`` names where they are from, for messages.

        Raises:
            UserError: a row cannot be encoded; names the unit and the row.
        """
