"""Result of a conversion: overrides, and sentences on them."""

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from serried.recipes.data.readers.source_files import assignment

LAYOUTS = ("DeepSpeed", "accelerate")
"""Formats without a model and data."""


@dataclass
class Converted:
    """Overrides, and sentences on what they mean."""

    overrides: dict[str, str] = field(default_factory=dict)
    """Values by key or group, in the order to print."""
    explained: list[str] = field(default_factory=list)
    decide: list[str] = field(default_factory=list)
    """What the file does not determine, with the override to choose."""
    lacking: list[str] = field(default_factory=list)
    """What has no counterpart."""
    processes: int = 1
    nodes: int = 1

    def set(self, key: str, value: Any) -> None:
        self.overrides[key] = written(value)

    def lack(self, subject: object, reason: str) -> None:
        self.lacking.append(f"{subject}: {reason}")

    @property
    def words(self) -> list[str]:
        """Overrides to paste into a shell."""
        return [pasteable(key, value) for key, value in self.overrides.items()]


def written(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return re.sub(r"e([+-])0+", r"e\1", f"{value:.6g}").replace("e+", "e")
    if isinstance(value, list | tuple):
        return f"[{','.join(written(item) for item in value)}]"
    return str(value)


def pasteable(key: str, value: str) -> str:
    if re.fullmatch(r"\[[\w.,*+-]*\]", value):
        return shlex.quote(f"{key}={value}")
    return assignment(key, value)
