"""Batches: nested dicts, lists and tuples of tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from serried.configs.errors import UserError


def default_batch(samples: Sequence[Any], task_name: str) -> Any:
    """Collate ``samples`` into a batch with torch's ``default_collate``.

    Raises:
        UserError: The samples cannot be collated.
    """
    try:
        return default_collate(list(samples))
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise no_batch(f"{type(error).__name__}: {error}".splitlines()[0], task_name) from error


def no_batch(reason: str, task_name: str) -> UserError:
    """Return the error for a task whose samples cannot be collated."""
    return UserError(
        f"samples cannot be collated into a batch: {reason}; return samples with the same keys and shapes, or define "
        f"{task_name}.collate(samples)"
    )


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return ``batch`` with ``function`` applied to every tensor in its dicts, lists, tuples and named tuples."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        kind: Any = type(batch)  # a dict or a similar class, such as transformers' BatchEncoding
        return kind({key: map_tensors(function, value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch``, which is on the CPU, with its tensors moved to ``device``.

    Does not wait for the copy of pinned tensors.
    """
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def difference(values: Sequence[Any], ids: Sequence[int], where: str = "sample") -> str:
    """Return why ``values`` cannot be collated, or an empty string if no difference is found.

    ``values`` are the values of samples ``ids`` at ``where``. For some differences, ``default_collate`` fails without
    naming the key. For others, depending on which sample comes first, it returns a batch with missing keys.
    """
    forms = [_form(value) for value in values]
    for form, sample_id in zip(forms, ids, strict=True):
        if form != forms[0]:
            return f"{where} is {forms[0]} in dataset[{ids[0]}], but {form} in dataset[{sample_id}]"
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
    """Return a description of ``value`` that must be the same in all samples for ``default_collate``.

    Numbers and zero-dimensional arrays have the same description, since ``default_collate`` accepts a mix of them.
    """
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return "a dict"
    if isinstance(value, Sequence):
        return f"a {type(value).__name__}" + f" of {len(value)}" * (not isinstance(value, str | bytes))
    return f"of shape {list(shape)}" if (shape := getattr(value, "shape", ())) else "a number"
