"""Tensor folders computed from several others piece by piece: a base model with adapters, or the mean of models."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.hugging_face.adapter_folder import PREFIX, ROWS_END, adapted_layers, saved_module, scales_in
from serried.configs.hugging_face.expert_names import Matrix, for_all_experts, single_matrix
from serried.parallel.checkpoint_mapping import in_order
from serried.records.safetensors_files import TensorFolder, TensorSpec
from serried.trainer.checkpoint.tensors import Exported, mean_of_rows

_REPLACED = "lm_head.weight"
"""Weight of the base model that a newly trained head replaces."""


class Built:
    """A model in memory, with the interface of ``TensorFolder``."""

    def __init__(self, module: nn.Module, exported: Exported) -> None:
        self._tensors: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            for fragment in exported(name, parameter.shape):
                whole = self._tensors.setdefault(fragment.name, torch.empty(fragment.shape, dtype=parameter.dtype))
                ours = in_order(parameter.detach()[fragment.ours.indices()], fragment.order)
                whole[fragment.theirs.indices()] = ours.view(fragment.theirs.sizes)
        self.specs = {name: TensorSpec(name, each.dtype, tuple(each.shape)) for name, each in self._tensors.items()}

    def named_like(self, names: Sequence[str]) -> "Built":
        del names
        return self

    def read_elements(self, name: str, first: int, count: int) -> Tensor:
        return self._tensors[name].flatten()[first : first + count].clone()


class Resized:
    """``base`` with more rows in embedding and head, for added tokens. Implements the interface of ``TensorFolder``."""

    def __init__(self, base: TensorFolder, rows: int, new_rows: int) -> None:
        """``rows``: rows of the vocabulary in ``base``. ``new_rows``: rows of the vocabulary of the model."""
        self._base, self._rows, self._new_rows = base, rows, new_rows
        self._mean: tuple[str, Tensor] = ("", torch.empty(0))

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {
            name: replace(spec, shape=(self._new_rows, *spec.shape[1:])) if has_rows(spec, self._rows) else spec
            for name, spec in self._base.specs.items()
        }

    def named_like(self, names: Sequence[str]) -> "Resized":
        self._base.named_like(names)
        return self

    def read_elements(self, name: str, first: int, count: int) -> Tensor:
        spec = self._base.specs[name]
        if not has_rows(spec, self._rows) or first + count <= spec.numel:
            return self._base.read_elements(name, first, count)
        if self._mean[0] != name:
            self._mean = name, mean_of_rows(self._base, name).flatten().to(spec.dtype)
        mean, begin = self._mean[1], max(first, spec.numel)
        added = mean[torch.arange(begin, first + count) % len(mean)]
        return torch.cat((self._base.read_elements(name, first, begin - first), added)) if begin > first else added


class Merged:
    """``base`` with PEFT adapters merged into its matrices, in fp32, and with modules that are saved in full.

    Implements the interface of ``TensorFolder``, so several adapters can be merged one after the other.
    """

    def __init__(self, base: "Base", adapters: TensorFolder, config: Mapping[str, Any], factor: float = 1.0) -> None:
        """
        Args:
            base: The base model.
            adapters: The adapters.
            config: Content of their ``adapter_config.json``.
            factor: Factor of the products that LoRA adds.

        Raises:
            UserError: The adapters do not fit the base model, or they contain a module in full, or the row of a token,
                that adapters in ``base`` contain, too.
        """
        layers = adapted_layers(config, adapters.specs)
        self._base, self._adapters = base.named_like([f"{name}.weight" for name in layers]), adapters
        heads = {name.removeprefix(PREFIX): each for name, each in adapters.specs.items() if ".lora_" not in name}
        self._rows = {
            f"{name.removesuffix(ROWS_END)}.weight": PREFIX + name for name in heads if name.endswith(ROWS_END)
        }
        """Tensors with trained rows, by the name of the weight."""
        heads = {name: each for name, each in heads.items() if not name.endswith(ROWS_END)}
        self._tokens = trained_tokens(config)
        left_out = {_REPLACED} if heads.keys() - self._base.specs.keys() else set()
        if config.get("ensure_weight_tying"):
            left_out = {name for name in heads if not saved_module(name, tuple(config["modules_to_save"]))}
            heads = {name: each for name, each in heads.items() if name not in left_out}
        kept = {name: each for name, each in self._base.specs.items() if name not in left_out}
        self._heads = {name: replace(each, name=name) for name, each in heads.items()}
        scales = scales_in(adapters.folder, {*layers, *layers.values()})
        self._updates: dict[str, _Update] = {}
        """Updates of the merged weights, by the name of the tensor."""
        experts = _single_matrices(self._base)
        for name, layer in layers.items():
            is_linear = layer in (name, for_all_experts(name))
            update = _Update(f"{PREFIX}{name}", factor * scales[name if is_linear else layer])
            if is_linear:
                is_transposed = bool(config.get("fan_in_fan_out"))
                self._updates[f"{name}.weight"] = update._replace(is_transposed=is_transposed)
            elif layer in experts:
                count = 1 + max(matrix.expert for matrix in experts[layer].values())
                for tensor, matrix in experts[layer].items():
                    self._updates[tensor] = update._replace(experts=count, matrix=matrix)
            else:
                is_transposed = f"{layer}_bias" in self._base.specs  # gpt-oss
                shape = self._base.specs[layer].shape if layer in self._base.specs else (1,)
                self._updates[layer] = update._replace(is_transposed=is_transposed, experts=shape[0], is_stacked=True)
        self._refuse_unfit()
        self.specs: Mapping[str, TensorSpec] = kept | self._heads
        self._merged: tuple[str, Tensor] = ("", torch.empty(0))
        self._factors: tuple[str, tuple[Tensor, Tensor]] = ("", (torch.empty(0), torch.empty(0)))

    @property
    def adapted(self) -> set[str]:
        """Names of the merged weights."""
        return {*self._updates}

    def named_like(self, names: Sequence[str]) -> "Merged":
        del names
        return self

    def _refuse_unfit(self) -> None:
        folder, specs = self._adapters.folder, self._adapters.specs
        for name, update in self._updates.items():
            shape = self._base.specs[name].shape if name in self._base.specs else None
            layer = update.adapter.removeprefix(PREFIX)
            if any(tensor not in specs or len(specs[tensor].shape) != 2 for tensor in update.factors):
                raise UserError(f"{folder} lacks a matrix A or B of {layer}; copy the files of the adapters again")
            (rows, inputs), (outputs, columns) = (specs[tensor].shape for tensor in update.factors)
            matrix = (inputs, outputs // update.matrix.parts)
            fits = shape is not None and sorted(shape[-2:]) == sorted(matrix) and len(shape) == 2 + update.is_stacked
            if not fits or rows != columns or rows % update.experts:
                there = "the base model lacks it" if shape is None else f"its weight has shape {list(shape)}"
                raise UserError(f"{folder} has an adapter of {layer}, but {there}; use adapters of this base model")
        for name, stored in self._rows.items():
            if specs[stored].shape[0] != len(self._tokens):
                raise UserError(
                    f"{folder} has {specs[stored].shape[0]} rows in {stored}, but its trainable_token_indices names "
                    f"{len(self._tokens)} tokens; copy the files of the adapters again"
                )
            if name in self._base.specs and (last := max(self._tokens)) >= (rows := self._base.specs[name].shape[0]):
                raise UserError(
                    f"{folder} has a trained row of token {last}, but {name} has only {rows} rows here; merge only "
                    "adapters with the same added tokens"
                )
        for other in self._merged_before():
            self._refuse_overlap(other)
        for name, spec in self._heads.items() if isinstance(self._base, Merged) else ():
            if name in self._base.specs and spec.shape != (before := self._base.specs[name].shape):
                raise UserError(
                    f"{folder} contains {name} of shape {list(spec.shape)}, but it has shape {list(before)} here; "
                    "merge only adapters with the same added tokens"
                )

    def _merged_before(self) -> "Iterator[Merged]":
        """Yield the adapters that are merged into the base model, the last ones first."""
        base = self._base
        while isinstance(base, Merged):
            yield base
            base = base._base

    def _refuse_overlap(self, other: "Merged") -> None:
        """Raise ``UserError`` if adapters merged before contain the same module in full, or the same rows."""
        both = f"{self._adapters.folder} and {other._adapters.folder} both contain"
        if twice := self._heads.keys() & other._heads.keys():
            raise UserError(
                f"{both} {min(twice)} in full, and weights saved in full cannot be added; merge only one of them"
            )
        if self._rows.keys() & other._rows.keys() and (tokens := {*self._tokens} & {*other._tokens}):
            raise UserError(
                f"{both} a trained row of token {min(tokens)}, and trained rows cannot be added; merge only one of them"
            )
        if twice := (self._heads.keys() & other._rows.keys()) | (self._rows.keys() & other._heads.keys()):
            raise UserError(
                f"{both} {min(twice)}, one of them in full and one only the rows of some tokens, and these cannot be "
                "added; merge only one of them"
            )

    def read_elements(self, name: str, first: int, count: int) -> Tensor:
        """Read elements like ``TensorFolder.read_elements``. Adapted matrices are returned in fp32."""
        if name in self._heads:
            return self._adapters.read_elements(PREFIX + name, first, count)
        if name in self._rows:
            return self._with_rows(name, first, self._base.read_elements(name, first, count))
        if name not in self._updates:
            return self._base.read_elements(name, first, count)
        if self._merged[0] != name:
            self._merged = name, self._added(name, self._updates[name])
        return self._merged[1][first : first + count].clone()

    def _with_rows(self, name: str, first: int, values: Tensor) -> Tensor:
        """Return ``values``, the elements of a weight from ``first`` on, with the trained rows in place of the base
        model's."""
        rows = _whole(self._adapters, self._rows[name])
        width = rows.shape[1]
        for token, row in zip(self._tokens, rows, strict=True):
            begin, end = max(token * width, first), min((token + 1) * width, first + len(values))
            if begin < end:
                values[begin - first : end - first] = row[begin - token * width : end - token * width].to(values)
        return values

    def _added(self, name: str, update: "_Update") -> Tensor:
        weight = _whole(self._base, name)
        matrices = weight.transpose(-1, -2) if update.is_transposed else weight
        if self._factors[0] != update.adapter:  # kept, because the experts of a layer share them
            a, b = (_whole(self._adapters, tensor) for tensor in update.factors)
            self._factors = update.adapter, (a, b)
        a, b = self._factors[1]
        a, b = a.unflatten(0, (update.experts, -1)), b.unflatten(1, (-1, update.experts)).permute(2, 0, 1)
        if update.is_stacked:
            matrices.baddbmm_(b, a, alpha=update.scale)
            return weight.flatten()
        _, expert, index, parts = update.matrix
        matrices += update.scale * (b[expert].chunk(parts)[index] @ a[expert])
        if (length := f"{update.adapter}.lora_magnitude_vector") in self._adapters.specs:
            lengths = torch.linalg.vector_norm(matrices, dim=1)
            matrices *= (_whole(self._adapters, length) / lengths).unsqueeze(1)
        return weight.flatten()


class _Update(NamedTuple):
    """Update of a weight by an adapter."""

    adapter: str
    """Beginning of the names of its tensors."""
    scale: float
    is_transposed: bool = False
    """Whether the weight is [inputs, outputs] instead of [outputs, inputs]."""
    experts: int = 1
    """Number of experts that the adapter belongs to."""
    is_stacked: bool = False
    """Whether the weight contains the matrices of all these experts, instead of one matrix."""
    matrix: Matrix = Matrix("", 0, 0, 1)
    """Position of the matrix in an adapter of several matrices."""

    @property
    def factors(self) -> tuple[str, str]:
        """Names of A and B."""
        return f"{self.adapter}.lora_A.weight", f"{self.adapter}.lora_B.weight"


def _single_matrices(base: "Base") -> dict[str, dict[str, Matrix]]:
    """Return the tensors of ``base`` with the matrix of one expert, by the name of the layer that stacks them."""
    found: dict[str, dict[str, Matrix]] = {}
    for tensor in base.specs:
        if matrix := single_matrix(tensor.removesuffix(".weight")):
            found.setdefault(matrix.layer, {})[tensor] = matrix
    return found


Base = TensorFolder | Built | Resized | Merged


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


def has_rows(spec: TensorSpec, rows: int) -> bool:
    """Return whether a tensor has a row for each of ``rows`` tokens. Tensors of the numbered blocks never have."""
    return spec.shape[:1] == (rows,) and not any(part.isdigit() for part in spec.name.split("."))


def trained_tokens(config: Mapping[str, Any]) -> list[int]:
    """Return the tokens with trained rows. ``config``: content of ``adapter_config.json``."""
    tokens: Any = config.get("trainable_token_indices") or []
    return next(iter(tokens.values())) if isinstance(tokens, dict) else tokens


def _whole(folder: Base, name: str) -> Tensor:
    spec = folder.specs[name]
    return folder.read_elements(name, 0, spec.numel).view(spec.shape).float()
