"""Batches: nested dicts, lists and tuples of tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from serried.configs.errors import UserError


def default_batch(samples: Sequence[Any], task_name: str) -> Any:
    """Return ``samples`` as a batch by torch's ``default_collate``.

    Raises:
        UserError: They make no batch.
    """
    try:
        return default_collate(list(samples))
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise no_batch(f"{type(error).__name__}: {error}".splitlines()[0], task_name) from error


def no_batch(reason: str, task_name: str) -> UserError:
    """Return the mistake of a task whose samples make no batch."""
    return UserError(
        f"samples make no batch: {reason}; return samples with the same keys and shapes, or define "
        f"{task_name}.collate(samples)"
    )


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return ``batch`` with ``function`` applied to every tensor in its dicts, lists, tuples and named tuples."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        kind: Any = type(batch)  # a dict, or one of its kin such as transformers' BatchEncoding
        return kind({key: map_tensors(function, value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch``, which is on the CPU, with its tensors on ``device``, without waiting for the copy if they are
    pinned."""
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def difference(values: Sequence[Any], ids: Sequence[int], where: str = "sample") -> str:
    """Return why the values that samples ``ids`` have at ``where`` make no batch; empty if nothing is known against it.

    ``default_collate`` fails on some of these without naming the key, and on others, depending on which sample comes
    first, returns a batch with keys left out.
    """
    forms = [_form(value) for value in values]
    for form, sample_id in zip(forms, ids, strict=True):
        if form != forms[0]:
            return f"{where} is {forms[0]} in dataset[{ids[0]}], {form} in dataset[{sample_id}]"
    parts: dict[str, list[Any]] = {}
    if isinstance(values[0], Mapping):
        for key in dict.fromkeys(key for value in values for key in value):
            if lacking := [sample_id for value, sample_id in zip(values, ids, strict=True) if key not in value]:
                first = ", ".join(f"dataset[{sample_id}]" for sample_id in lacking[:8])
                return f"{where}[{key!r}] is missing in {len(lacking)} of {len(ids)} samples: {first}"
            parts[f"{where}[{key!r}]"] = [value[key] for value in values]
    elif isinstance(values[0], Sequence) and not isinstance(values[0], str | bytes):
        parts = {f"{where}[{index}]": list(of) for index, of in enumerate(zip(*values, strict=True))}
    return next(filter(None, (difference(of, ids, place) for place, of in parts.items())), "")


def _form(value: Any) -> str:
    """Return the form of ``value``, which ``default_collate`` needs to be the same in all samples.

    It mixes numbers and arrays without dims.
    """
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return "a dict"
    if isinstance(value, Sequence):
        return f"a {type(value).__name__}" + f" of {len(value)}" * (not isinstance(value, str | bytes))
    return f"of shape {list(shape)}" if (shape := getattr(value, "shape", ())) else "a number"
