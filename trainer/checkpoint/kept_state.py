"""State of a rank that is kept in memory while the model is built again without a lost replica."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from serried.trainer.checkpoint.file_assignment import Part

Key = tuple[str, str, int]
"""Stem of the files of a checkpoint, name of the tensor in the state, and number of the copy on this rank."""


class KeptState(NamedTuple):
    """This rank's shards of all tensors of a checkpoint, without a copy, and its plain data."""

    tensors: Mapping[Key, Tensor]
    plain: dict[str, Any]

    @classmethod
    def of(cls, parts: Iterator[tuple[str, Part]], plain: dict[str, Any]) -> "KeptState":
        """Return the state that consists of ``parts`` and ``plain``."""
        return cls({key: part.local.detach() for key, part in _numbered(parts)}, plain)

    @torch.no_grad()
    def copy_to(self, parts: Iterator[tuple[str, Part]]) -> None:
        """Copy the tensors to ``parts``, the same parts of a new model."""
        missing = set(self.tensors)
        for key, part in _numbered(parts):
            part.local.copy_(self.tensors[key])
            missing.discard(key)
        assert not missing, f"the new model has no {sorted(missing)[0]}"


def _numbered(parts: Iterator[tuple[str, Part]]) -> Iterator[tuple[Key, Part]]:
    seen: dict[tuple[str, str], int] = {}
    for stem, part in parts:
        number = seen[stem, part.name] = seen.get((stem, part.name), -1) + 1
        yield (stem, part.name, number), part
