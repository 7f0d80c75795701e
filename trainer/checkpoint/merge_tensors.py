"""Tensor folders computed from several others piece by piece: a base model with adapters, or the mean of models."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from serried.configs.hugging_face.adapter_folder import PREFIX, scales_in
from serried.records.safetensors_files import TensorFolder, TensorSpec
from serried.trainer.checkpoint.tensors import Exported

_REPLACED = "lm_head.weight"
"""Weight of the base model that a newly trained head replaces."""


class Built:
    """A model in memory, with the interface of ``TensorFolder``."""

    def __init__(self, module: nn.Module, exported: Exported) -> None:
        self._tensors: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            for fragment in exported(name, parameter.shape):
                whole = self._tensors.setdefault(fragment.name, torch.empty(fragment.shape, dtype=parameter.dtype))
                whole[fragment.theirs.indices()] = parameter.detach()[fragment.ours.indices()].view(
                    fragment.theirs.sizes
                )
        self.specs = {name: TensorSpec(name, each.dtype, tuple(each.shape)) for name, each in self._tensors.items()}

    def named_like(self, names: Sequence[str]) -> "Built":
        del names
        return self

    def read_elements(self, name: str, first: int, count: int) -> Tensor:
        return self._tensors[name].flatten()[first : first + count].clone()


class Merged:
    """``base`` with PEFT adapters merged into its matrices, in fp32, and with the trained head, if any.

    Implements the interface of ``TensorFolder``.
    """

    def __init__(self, base: TensorFolder | Built, adapters: TensorFolder, config: Mapping[str, Any]) -> None:
        """``config``: content of ``adapter_config.json``."""
        end = ".lora_A.weight"
        adapted = [name.removeprefix(PREFIX).removesuffix(end) for name in adapters.specs if name.endswith(end)]
        self._base, self._adapters = base.named_like([f"{name}.weight" for name in adapted]), adapters
        heads = {name.removeprefix(PREFIX): each for name, each in adapters.specs.items() if ".lora_" not in name}
        kept = {name: each for name, each in self._base.specs.items() if not (heads and name == _REPLACED)}
        self._heads = {name: replace(each, name=name) for name, each in heads.items()}
        self.specs: Mapping[str, TensorSpec] = kept | self._heads
        self._scales = scales_in(adapters.folder, adapted)
        self._is_transposed = bool(config["fan_in_fan_out"])
        self._merged: tuple[str, Tensor] = ("", torch.empty(0))

    def read_elements(self, name: str, first: int, count: int) -> Tensor:
        """Read elements like ``TensorFolder.read_elements``. Adapted matrices are returned in fp32."""
        if name in self._heads:
            return self._adapters.read_elements(PREFIX + name, first, count)
        module = PREFIX + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in self._adapters.specs:
            return self._base.read_elements(name, first, count)
        if self._merged[0] != name:
            self._merged = name, self._added(name, module)
        return self._merged[1][first : first + count].clone()

    def _added(self, name: str, module: str) -> Tensor:
        weight = _whole(self._base, name)
        weight = weight.T if self._is_transposed else weight
        a, b = (_whole(self._adapters, f"{module}.{key}.weight") for key in ("lora_A", "lora_B"))
        weight = weight + self._scales[module.removeprefix(PREFIX)] * (b @ a)
        if (length := f"{module}.lora_magnitude_vector") in self._adapters.specs:
            weight *= (_whole(self._adapters, length) / torch.linalg.vector_norm(weight, dim=1)).unsqueeze(1)
        return (weight.T if self._is_transposed else weight).flatten()


class Mean:
    """Mean of several ``TensorFolder``s with equal names and shapes, computed in fp32. Implements their interface."""

    def __init__(self, folders: Sequence[TensorFolder]) -> None:
        self.specs: Mapping[str, TensorSpec] = folders[-1].specs
        self._folders = folders

    def read_elements(self, name: str, first: int, count: int) -> Tensor:
        """Read elements like ``TensorFolder.read_elements``. Non-float values are taken from the last folder."""
        values = [folder.read_elements(name, first, count) for folder in self._folders]
        if not values[-1].is_floating_point():
            return values[-1]
        return torch.stack([value.float() for value in values]).mean(0).to(values[-1].dtype)


def _whole(folder: TensorFolder | Built, name: str) -> Tensor:
    spec = folder.specs[name]
    return folder.read_elements(name, 0, spec.numel).view(spec.shape).float()
