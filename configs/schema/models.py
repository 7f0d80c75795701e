"""Keys common to all model families, and reading of the ``config.json`` of a checkpoint.

The section of a family is next to its code in ``recipes/models/``, in a module whose name ends in ``_config``.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from serried.configs.plain_data import is_number
from serried.configs.schema.fields import Count, PathOrUrl, Section, Size
from serried.configs.schema.transformers_defaults import ALIASES, DEFAULTS, NOT_NULL, VERSION


def use_nearest(key: str, values: Sequence[int]) -> str:
    """Return advice such as ``use model.heads=4 (or one of [8, 2, 16])``. ``values`` are sorted, nearest first."""
    return f"use {key}={values[0]}" + (f" (or one of {list(values[1:4])})" if values[1:] else "")


def refuse_unless(found: Mapping[str, Any], **plain: Any) -> None:
    """Raise ``ValueError`` if a key of the ``config.json`` ``found`` has another value than in ``plain``."""
    for key, value in plain.items():
        if (found.get(key) or value) != value:
            raise ValueError(f"has {key} {found[key]}; only {value} is supported")


def keys_named(names: Mapping[str, str], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ``names`` with their values in the ``config.json`` ``found``. ``names`` maps each key to its
    name there."""
    return {ours: found[theirs] for ours, theirs in names.items()}


def completed(found: Mapping[str, Any], section: type["ModelSection"]) -> dict[str, Any]:
    """Return the ``config.json`` ``found`` with missing keys filled in with the defaults of transformers.

    For a ``model_type`` that transformers does not have, the defaults of the family of ``section`` are used, or of its
    nearest base class that has some.

    Raises ``ValueError`` if a key is null for which transformers needs a value, and ``TypeError`` if a value has the
    wrong type, such as a string instead of a number.
    """
    own = [base.opens_as[0] for base in section.__mro__ if issubclass(base, ModelSection)]
    kind = next((name for name in (str(found.get("model_type")), *own) if name in DEFAULTS), "")
    defaults, aliases = DEFAULTS.get(kind, {}), ALIASES.get(kind, {})
    named = [key for key in found if key not in aliases] + [key for key in found if key in aliases]
    values = {aliases.get(key, key): found[key] for key in named}  # transformers reads alternative names last
    if values.get("rope_parameters", {}) is None:  # equivalent to leaving it out
        del values["rope_parameters"]
    for key in NOT_NULL.get(kind, ()):
        if key in values and values[key] is None:
            raise ValueError(
                f"has {key} null, but transformers {VERSION} requires a value; leave the key out to use "
                f"{defaults[key]}, or set it"
            )
    _check_kinds(values, defaults)
    return {**defaults, **values}


_NUMBER = "a number"
_LIST = "a list"
_MAPPING = "a mapping of names to values"
_KINDS = {
    **dict.fromkeys(("pad_token_id", "num_key_value_heads", "head_dim", "n_inner", "sliding_window"), _NUMBER),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "rope_theta"), _NUMBER),
    **dict.fromkeys(("layer_types", "mlp_only_layers"), _LIST),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "full_attention", "sliding_attention"), _MAPPING),
}
"""Expected kind of value for keys without a default."""


def _check_kinds(values: Mapping[str, Any], defaults: Mapping[str, Any], of: str = "") -> None:
    for key, value in values.items():
        kind = _NUMBER if is_number(defaults.get(key)) else _KINDS.get(key)
        if kind is None or value is None:
            continue
        is_right = {_NUMBER: is_number(value), _LIST: isinstance(value, list), _MAPPING: isinstance(value, dict)}
        if not is_right[kind]:
            raise TypeError(f"has {of}{key} {json.dumps(value)}; use {kind}")
        if kind == _MAPPING:
            _check_kinds(value, {}, f"{of}{key}.")


READ_EARLIER: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"sliding_window": None},
    "glm4_moe": {"rms_norm_eps": 1e-6},
    "mixtral": {"rms_norm_eps": 1e-6, "rope_theta": 1e4},
}
"""Defaults of earlier versions of serried for missing keys of a ``config.json``, if they differ from the defaults of
transformers and change the output of a frozen model."""


class ModelSection(Section):
    """Keys common to all families of language models. Each family adds its own."""

    free = ("name", "max_sequence_length", "vocab_size", "vocab_multiple", "head_dim", "initializer_std", "attention")
    # Sizes among these keys are compared by the shapes of tensors.
    names: ClassVar[Mapping[str, str]] = {}
    """Keys that are copied unchanged from a ``config.json``, with their names there."""
    opens_as: ClassVar[tuple[str, str]] = ("", "")
    """``model_type`` of a checkpoint, and the transformers class that loads it."""

    name: str
    """Name of the model config, for display."""
    family: str = "llama"
    """Name of the model family; a YAML file in ``model/`` sets it."""
    path: PathOrUrl | None = Field(default=None, min_length=1, max_length=4096)
    """Folder or Hub name of a Hugging Face model to start from: its architecture, weights and tokenizer are used."""
    pretrained: bool = True
    """Start from the weights in ``path``; false: from random weights."""
    vocab_size: Size | None = None
    """Number of rows of the embedding table, in tokens; the tokenizer's size when null."""
    vocab_multiple: Size = 1
    """Round the tokenizer's size up to a multiple of this (128 suits GPUs). ``vocab_size`` is not rounded, unless
    ``data.add_tokens`` adds rows."""
    max_sequence_length: Annotated[Count, Field(ge=1, le=10**8)] = 131072
    """Longest sequence that the model supports, in tokens; ``data.sequence_length`` must not exceed it."""

    def divisible(self) -> Mapping[str, Mapping[str, int]]:
        """Return, for each mesh axis, the keys and values that the degree of the axis must divide."""
        return {}

    def layout_mistakes(self, degrees: Mapping[str, int], *, sequence: bool) -> Iterator[str]:
        """Yield a sentence for each parallel axis that the family cannot be sharded over, with an override to use.

        Args:
            degrees: Number of ranks of each axis of the model: ``pipeline``, ``context``, ``tensor`` and ``expert``.
            sequence: Whether tensor ranks shard activations along the sequence.
        """
        del degrees, sequence
        yield from ()

    def described(self) -> dict[str, Any]:
        """Return the ``config.json`` entries of the keys in ``names``."""
        return {theirs: getattr(self, ours) for ours, theirs in self.names.items()}

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of this section that describe the model of a Hugging Face ``config.json``.

        Raises:
            ValueError: The family does not support the model.
            KeyError: A required entry is missing.
        """
        raise ValueError(f"has model_type {found.get('model_type')}, which {cls.__name__} does not support")
