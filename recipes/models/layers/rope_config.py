"""Config section of scaled rotary embeddings, and its form in the ``config.json`` of a model."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from serried.configs.plain_data import is_number
from serried.configs.schema.fields import Number, PositiveCount, Section

RopeType = Literal["linear", "dynamic", "yarn", "longrope", "llama3"]
ROPE_TYPES: tuple[str, ...] = get_args(RopeType)
_READ: Mapping[str, Collection[str]] = {
    "linear": (),
    "dynamic": ("original_max_sequence_length",),
    "yarn": ("original_max_sequence_length",),
    "longrope": ("short_factor", "long_factor", "original_max_sequence_length"),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_sequence_length"),
}
"""Required keys of each type, in addition to ``factor``."""
_OPTIONAL: Mapping[str, Collection[str]] = {
    "linear": ("original_max_sequence_length",),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    "longrope": ("attention_factor",),
}


class RopeScaling(Section):
    """Scaled rotary frequencies, for contexts longer than in the original training."""

    names: ClassVar[Mapping[str, str]] = {"original_max_sequence_length": "original_max_position_embeddings"}
    """Keys that have another name in a ``config.json``."""

    rope_type: RopeType = "llama3"
    """``linear`` divides all frequencies by ``factor``; ``dynamic`` raises the base with the length of a document;
    ``yarn`` divides low frequencies only (arXiv 2309.00071); ``longrope`` divides each frequency by its own factor
    (arXiv 2402.13753); ``llama3`` is the scaling of Llama 3.1."""
    factor: Number = Field(gt=0)
    """Ratio of the extended context length to the original one."""
    low_freq_factor: Number | None = Field(default=None, gt=0)
    """For ``llama3``: wavelengths longer than the original context length divided by this value are scaled by the full
    ``factor``."""
    high_freq_factor: Number | None = Field(default=None, gt=0)
    """For ``llama3``: wavelengths shorter than the original context length divided by this value are unchanged."""
    original_max_sequence_length: PositiveCount | None = None
    """Longest sequence of the original training, in tokens. Null: taken from the model, and
    ``model.max_sequence_length`` becomes ``factor`` times this length."""
    attention_factor: Number | None = Field(default=None, gt=0)
    """For ``yarn`` and ``longrope``: factor on rotated queries and keys; the recommendation of the paper when null."""
    beta_fast: Number | None = Field(default=None, gt=0)
    """For ``yarn``: frequencies with more turns than this over the original context are unchanged; 32 when null."""
    beta_slow: Number | None = Field(default=None, gt=0)
    """For ``yarn``: frequencies with fewer turns than this over the original context are divided by ``factor``; 1 when
    null."""
    truncate: bool = True
    """For ``yarn``: round the bounds between changed and unchanged frequencies to whole pairs."""
    mscale: Number | None = Field(default=None, ge=0)
    """For ``yarn``, with ``mscale_all_dim``: another form of ``attention_factor``, as in DeepSeek V3."""
    mscale_all_dim: Number | None = Field(default=None, ge=0)
    """For ``yarn``: divisor in that form; ``model.family=deepseek_v3`` also multiplies all scores by its square."""
    short_factor: tuple[Number, ...] | None = None
    """For ``longrope``: divisor of each frequency in documents of up to ``original_max_sequence_length`` tokens."""
    long_factor: tuple[Number, ...] | None = None
    """For ``longrope``: divisor of each frequency in longer documents."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Leave out defaults, so that runs of earlier versions, which had only four keys, can be resumed.
        plain: dict[str, Any] = serialize(self)
        fields = type(self).model_fields
        return {key: plain[key] for key in plain if getattr(self, key) != fields[key].default}

    @property
    def depends_on_length(self) -> bool:
        """Whether documents longer than ``original_max_sequence_length`` have other frequencies than shorter ones."""
        return self.rope_type in ("dynamic", "longrope")

    @property
    def original(self) -> int:
        """``original_max_sequence_length``, for types that require it."""
        assert self.original_max_sequence_length is not None
        return self.original_max_sequence_length

    @property
    def attention(self) -> float:
        """Factor on rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "yarn":
            both = self.mscale and self.mscale_all_dim
            return _of_yarn(self.factor, self.mscale or 1) / self.of_all_dims if both else _of_yarn(self.factor)
        if self.rope_type == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original))
        return 1.0

    @property
    def of_all_dims(self) -> float:
        """Factor on queries and keys in all dims, in models that have one."""
        return _of_yarn(self.factor, self.mscale_all_dim) if self.mscale_all_dim else 1.0

    def pairs_mistake(self, pairs: int) -> str | None:
        """Return an error message if a list of factors does not have one value for each of ``pairs`` rotary pairs."""
        for key in ("short_factor", "long_factor"):
            found = getattr(self, key)
            if found is not None and len(found) != pairs:
                return (
                    f"model.rope_scaling.{key} has {len(found)} values, but the model has {pairs} rotary pairs; give "
                    f"a list of {pairs} numbers"
                )
        return None

    def described(self) -> dict[str, Any]:
        """Return the scaling in the format of ``config.json``, without the base of the frequencies."""
        own = {"rope_type": self.rope_type, "factor": self.factor}
        kept = {*_READ[self.rope_type], *(_OPTIONAL.get(self.rope_type, ()) if self.rope_type != "linear" else ())}
        values = self.model_dump(mode="json")
        return own | {self.names.get(key, key): value for key, value in values.items() if key in kept}

    def _mistakes(self) -> Iterator[str]:
        kind, section = self.rope_type, "model.rope_scaling"
        if missing := [key for key in _READ[kind] if getattr(self, key) is None]:
            usual = "{rope_type: yarn, factor: 4}"
            yield (
                f"{section} has rope_type={kind} without {', '.join(missing)}; add {section}.{missing[0]}=..., or use "
                f"'{section}={usual}'"
            )
            return
        known = {*_READ[kind], *_OPTIONAL.get(kind, ()), "rope_type", "factor"}
        for name, field in type(self).model_fields.items():
            if name not in known and getattr(self, name) != field.default:
                readers = [other for other in ROPE_TYPES if name in {*_READ[other], *_OPTIONAL.get(other, ())}]
                yield f"{section}.{name} is used only with rope_type={', '.join(readers)}, not with {kind}; remove it"
        if kind == "llama3" and (self.high_freq_factor or 0) <= (self.low_freq_factor or 0):
            yield (
                f"{section}.high_freq_factor={self.high_freq_factor:g} must exceed "
                f"{section}.low_freq_factor={self.low_freq_factor:g}; Llama 3.1 uses 4 and 1"
            )
        fast, slow = self.beta_fast or 32, self.beta_slow or 1
        if fast < slow:
            yield f"{section}.beta_fast={fast:g} is less than {section}.beta_slow={slow:g}; the paper uses 32 and 1"
        for name in ("short_factor", "long_factor"):
            if any(value <= 0 for value in getattr(self, name) or ()):
                yield f"{section}.{name} has values of 0 or less, but frequencies are divided by them; correct them"


class Rope(NamedTuple):
    """Rotary frequencies of a block."""

    base: float
    scaling: RopeScaling | None
    dim: int | None = None
    """Number of leading dims of each head that are in a pair; None: the model's number."""
    fraction: float = 1.0
    """Fraction of the pairs that are rotated, with the frequencies that they have among all pairs."""


def rope_of(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of rotary embeddings in a ``config.json``. transformers 5 writes
    ``rope_parameters``, earlier versions ``rope_scaling``, which transformers reads first."""
    rope: Mapping[str, Any] = found.get("rope_scaling") or found.get("rope_parameters") or {}
    return rope


def type_of(rope: Mapping[str, Any]) -> Any:
    """Return the ``rope_type`` of ``rope``, which early versions of transformers called ``type``."""
    return rope.get("rope_type", rope.get("type", "default"))


def scaling_from(found: Mapping[str, Any], types: Collection[str] = ROPE_TYPES) -> dict[str, Any] | None:
    """Return the keys of ``RopeScaling`` that the ``config.json`` ``found`` describes; None without scaling.

    Raises ``ValueError`` if the type is not among ``types``, or if a key that it requires is missing.
    """
    rope, longest = rope_of(found), found["max_position_embeddings"]
    kind = type_of(rope)
    if kind == "default":
        return None
    if kind not in types:
        raise ValueError(f"has rope_type {kind}; only default, {', '.join(types)} are supported")
    # transformers prefers the key outside of rope_scaling, and for dynamic uses max_position_embeddings.
    outside = {"original_max_position_embeddings": longest} if kind == "dynamic" else found
    rope = {"original_max_position_embeddings": longest, **rope}
    rope |= {key: outside[key] for key in RopeScaling.names.values() if key in outside}
    original = rope["original_max_position_embeddings"]
    is_ratio = kind == "longrope" or (kind == "yarn" and "factor" in rope)
    if is_ratio and rope.get("factor") is None and is_number(longest) and is_number(original) and original > 0:
        rope["factor"] = longest / original
    wanted = ["factor", *(RopeScaling.names.get(key, key) for key in _READ[kind])]
    if missing := [key for key in wanted if rope.get(key) is None]:
        raise ValueError(f"has rope_type {kind} without {', '.join(missing)}")
    optional = () if kind == "linear" else _OPTIONAL.get(kind, ())
    keys = {} if kind == "llama3" else {"rope_type": kind}
    for key in ("factor", *_READ[kind], *optional):
        value = rope.get(RopeScaling.names.get(key, key))
        if value is not None and value != RopeScaling.model_fields[key].default:
            keys[key] = value
    return keys


def _of_yarn(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's factor on rotated queries and keys."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
