"""Context lengths derived from an override of ``model.rope_scaling``."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from serried.configs.plain_data import is_number
from serried.configs.schema.fields import parse_count

_KEY = "rope_scaling"
_ORIGINAL, _LONGEST = "original_max_sequence_length", "max_sequence_length"


def with_extended_context(model: Mapping[str, Any], own: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the section ``model`` with context lengths derived from the user's ``rope_scaling``, if it sets a factor.

    The original length is taken from the model's own scaling or, if it has none, from its ``max_sequence_length``. The
    new ``max_sequence_length`` is ``factor`` times the original length. Lengths set by the user are kept.

    Args:
        own: The section without the user's overrides.
        given: Keys that the user set.
    """
    model = dict(model)
    typed = model.get(_KEY)
    if not isinstance(typed, Mapping) or not any(key.partition(".")[0] == _KEY for key in _within_model(given)):
        return model
    before = own.get(_KEY) or {}
    scaling = {**(before if _KEY not in _within_model(given) else {}), **typed}
    longest, factor = parse_count(own.get(_LONGEST)), _number(scaling.get("factor"))
    original = scaling.get(_ORIGINAL) or before.get(_ORIGINAL)
    if original is None and is_number(longest):
        was = before.get("factor")  # set with linear scaling, which has no original length
        original = round(longest / was) if is_number(was) and was > 0 else longest
    if original is not None and scaling.get("rope_type") != "linear":
        scaling[_ORIGINAL] = original
    model[_KEY] = scaling
    original = parse_count(original)
    if is_number(original) and is_number(factor) and factor > 0 and _LONGEST not in _within_model(given):
        model[_LONGEST] = math.floor(original * factor)
    return model


def _within_model(given: Collection[str]) -> set[str]:
    return {key.removeprefix("model.") for key in given if key.startswith("model.")}


def _number(value: Any) -> Any:
    """Return ``value``. Text that represents a number is converted to a float."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
