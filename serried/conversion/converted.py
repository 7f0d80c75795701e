"""Result of a conversion: overrides, and sentences on them."""

import json
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from serried.recipes.data.readers.source_files import assignment

LAYOUTS = ("DeepSpeed", "accelerate")
"""Formats without a model and data."""


@dataclass
class Converted:
    """Overrides, and sentences that explain them."""

    overrides: dict[str, str] = field(default_factory=dict)
    """Values by key or group, in the order to print."""
    explained: list[str] = field(default_factory=list)
    decide: list[str] = field(default_factory=list)
    """Settings that the file does not determine, with the override to choose."""
    lacking: list[str] = field(default_factory=list)
    """Settings without a counterpart."""
    lists: dict[str, list[Any]] = field(default_factory=dict)
    """Values that are lists, by key."""
    processes: int = 1
    nodes: int = 1

    def set(self, key: str, value: Any) -> None:
        self.overrides[key] = written(value)
        if isinstance(value, list):
            self.lists[key] = value

    def lack(self, subject: object, reason: str) -> None:
        self.lacking.append(f"{subject}: {reason}")

    @property
    def words(self) -> list[str]:
        """Overrides to paste into a shell."""
        return [
            _list_override(key, self.lists[key]) if key in self.lists else assignment(key, value)
            for key, value in self.overrides.items()
        ]


def written(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return re.sub(r"e([+-])0+", r"e\1", f"{value:.6g}").replace("e+", "e")
    if isinstance(value, list | tuple):
        return f"[{','.join(written(item) for item in value)}]"
    return str(value)


def _list_override(key: str, items: list[Any]) -> str:
    """Return ``key=[...]``, quoted for a shell, whose items Hydra reads as they are."""
    texts = [written(item) for item in items]
    plain = [text if re.fullmatch(r"[\w.*+/-]+", text) else json.dumps(text, ensure_ascii=False) for text in texts]
    return shlex.quote(f"{key}=[{','.join(plain)}]")
