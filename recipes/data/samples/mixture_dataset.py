"""Dataset that mixes several sources, and the config section of each source."""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from serried.configs.errors import UserError
from serried.configs.schema.data import DataSection, SourceSection, alone
from serried.configs.schema.data import sources as registered
from serried.recipes.data.samples.token_dataset import Batch, PackedDataset, Sample, TokenDataset
from serried.recipes.data.sources.mixture import WeighBy
from serried.recipes.models.layers.lm_head import IGNORE

_MEASURED_SAMPLES = 256
"""Number of samples of each source from which its mean number of targets is estimated."""

Samples = TokenDataset | PackedDataset
"""Sequences of one source, by number."""


@dataclass(frozen=True)
class MixedPart:
    """Properties of one source that determine the order of a mixture."""

    samples: int
    weight: float
    """Share of the samples, relative to the other sources' weights."""


class MixtureDataset:
    """The samples of several sources, numbered one source after the other. Their order is determined elsewhere."""

    def __init__(self, sources: Mapping[str, Samples], weights: Mapping[str, float], weigh_by: WeighBy) -> None:
        """``weights``: shares of the samples or of the trained tokens (``weigh_by``), by the names of ``sources``.

        With ``weigh_by="size"`` they are not used: the share of a source is proportional to its number of samples.
        """
        self.is_shuffled_together = weigh_by == "size"
        self._sources = list(sources.values())
        self._first = [0, *accumulate(len(source) for source in self._sources)]
        self._later = torch.tensor(self._first[1:-1])
        """First sample of each source except the first, on the device of the last batch."""
        if weigh_by == "tokens":
            tokens = {name: _mean_targets(source) for name, source in sources.items()}
            if len(set(tokens.values())) > 1:  # otherwise the weights stay exact
                weights = {name: weight / tokens[name] for name, weight in weights.items()}
        if self.is_shuffled_together:
            weights = {name: len(source) for name, source in sources.items()}
        self.parts = {name: MixedPart(len(source), float(weights[name])) for name, source in sources.items()}
        """Parts by source name, in the order of their sample numbers."""
        identity: list[object] = [[name, part.weight, sources[name].fingerprint] for name, part in self.parts.items()]
        if self.is_shuffled_together:
            identity.append(weigh_by)
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        """Identity of the samples, equal on every machine for equal samples in equal shares."""

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source = bisect_right(self._first, index) - 1
        return self._sources[source][index - self._first[source]]

    def truncation(self, name: str = "data") -> str:
        """Return a warning about sources from which truncation removes most tokens; empty if there are none."""
        each = zip(self.parts, self._sources, strict=True)
        found = (source.truncation(f"{name}.sources.{part}") for part, source in each if hasattr(source, "truncation"))
        return "; ".join(filter(None, found))

    def describe(self) -> str:
        """Describe how documents are arranged into sequences, for the printed plan. Empty for the default."""
        each = zip(self.parts, (source.describe() for source in self._sources), strict=True)
        return "; ".join(f"{name} {text}" for name, text in each if text)

    def targets_by_source(self, batch: Batch) -> Tensor:
        """Return the number of targets of each source in ``batch``, [sources], int64."""
        self._later = self._later.to(batch.sample_ids.device)
        owners = torch.bucketize(batch.sample_ids, self._later, right=True)
        mine = owners[:, None] == torch.arange(len(self._sources), device=owners.device)
        # Padding counts towards the first source, but has no targets.
        return (mine * (batch.targets != IGNORE).sum(1, keepdim=True)).sum(0)


def _mean_targets(source: Samples) -> float:
    """Return the mean number of targets of samples spread evenly over the source."""
    chosen = np.linspace(0, len(source) - 1, min(_MEASURED_SAMPLES, len(source))).astype(np.int64)
    return float(np.mean([(source[i].targets != IGNORE).sum() for i in chosen.tolist()]))


def source_sections(section: DataSection) -> dict[str, DataSection]:
    """Return the section of each source of the training data, by name. A single source has the name ""."""
    return {name: alone(section, source) for name, source in section.mixed.items()} or {"": section}


def validation_sections(section: DataSection) -> dict[str, DataSection]:
    """Return the section of each additional validation set, by name. All of its data is for validation."""
    return {
        name: alone(section, source).model_copy(update={"validation_fraction": 0.0})
        for name, source in section.validation.items()
    }


@contextmanager
def mistakes_of(key: str) -> Iterator[None]:
    """Context manager that replaces ``data`` with ``key``, such as ``data.sources.web``, in the config keys of error
    messages."""
    try:
        yield
    except UserError as error:
        if key == "data":
            raise
        own = "|".join({name for entry in registered.entries() for name in entry.own.model_fields} - {"name"})
        texts = [re.sub(rf"\bdata\.({own})\b", rf"{key}.\1", str(text)) for text in error.args]
        if error.head:
            raise UserError(*texts, head=f"{key}: {error.head}") from error
        raise UserError(*(f"{key}: {text}" for text in texts)) from error


def key_of_source(name: str) -> str:
    """Return the config key of a source, by its name in ``source_sections``."""
    return f"data.sources.{name}" if name else "data"


def describe_sources(section: DataSection) -> str:
    """Describe the sources: ``stdlib``, ``text books``, or ``web (text books) 70 %, code (stdlib) 30 % of the
    tokens``."""
    if not section.mixed:
        return _described(section)
    if getattr(section, "weigh_by", "") == "size":
        return ", ".join(f"{name} ({_described(source)})" for name, source in section.mixed.items()) + " together"
    whole = sum(source.weight for source in section.mixed.values())
    parts: Sequence[str] = [
        f"{name} ({_described(source)}) {100 * source.weight / whole:.3g} %" for name, source in section.mixed.items()
    ]
    return f"{', '.join(parts)} of the {getattr(section, 'weigh_by', '')}"


def _described(source: SourceSection) -> str:
    words = (source.name, getattr(source, "path", None), getattr(source, "subset", None))
    return " ".join(" ".join(filter(None, words)).splitlines())
