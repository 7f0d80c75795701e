"""Adapters of a model: selection of layers, initialization, and checkpoints in PEFT's format."""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from serried.configs.errors import UserError
from serried.configs.hugging_face.adapter_folder import (
    ADAPTER_CONFIG,
    PREFIX,
    ROWS_END,
    adapted_layers,
    described_adapters,
    layer_value,
    matches_layer,
    scale_of,
)
from serried.configs.hugging_face.expert_names import SINGLE_NAMES
from serried.configs.messages.invalid_values import shown
from serried.configs.plain_data import read_json
from serried.configs.schema.sections import AdapterSection
from serried.configs.similar_names import nearest, nearest_pattern
from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.initialize import initialize_uniform
from serried.parallel.layout.local_shards import HeldTensor, is_sharded
from serried.parallel.lora import MAGNITUDE, A, Adapter, B, attach, initialize_orthogonal, is_linear
from serried.parallel.nf4 import BLOCK, can_quantize, pack, quantize
from serried.parallel.plan import ParallelPlan
from serried.parallel.token_rows import ROWS, attach_rows, with_rows
from serried.records.safetensors_files import TensorFolder
from serried.trainer.checkpoint.expert_adapters import ExpertLayers, Stack
from serried.trainer.checkpoint.retention import ADAPTER
from serried.trainer.checkpoint.tensors import Exported, mean_of_rows, tied_parameters

_PIECE_NUMBERS = 2**23
"""Number of weights that are quantized at a time."""
_ENDINGS = {A: "lora_A.weight", B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
_Number = TypeVar("_Number", int, float)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class CannotAdapt(UserError):
    """Error for a pattern of ``adapter.modules`` that matches no layer that supports adapters."""

    def __init__(self, pattern: str, told: str) -> None:
        super().__init__(told)
        self.pattern = pattern


class Adapters:
    """Trainable adapters of a model. The parameters of the base model are frozen."""

    def __init__(
        self, section: AdapterSection, model: nn.Module, plan: ParallelPlan, exported: Exported,
        heads: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Attach adapters to ``model``, which may be on the meta device.

        Args:
            section: The configuration of the adapters.
            model: The base model. Its parameters are frozen.
            plan: The parallel plan of ``model``.
            exported: Maps parameters to their location in the base model's checkpoint.
            heads: Names of modules that are fully trained instead of adapted.

        Raises:
            UserError: A pattern matches no layer, or a layer that does not support adapters.
        """
        self._section, self._of_base = section, exported
        self._heads = tuple(f"{head}." for head in heads)
        self._weights = {
            name: exported(f"{name}.weight", module.weight.shape)[0]
            for name, module in _linear_layers(model, exported).items()
        }
        """Location of each adaptable layer's weight in the base model's checkpoint."""
        self._experts = ExpertLayers(model, plan, exported, section.modules or ())
        chosen = self._choose(section.modules, plan)
        self.packed: dict[str, tuple[int, ...]] = {}
        """Original shapes of the quantized weights by parameter name."""
        self._ranks = self._by_layer(chosen, "rank_pattern", section.rank)
        """Rank of each adapted layer."""
        self._alphas = self._by_layer(chosen, "alpha_pattern", section.alpha)
        self._is_conv1d = self._attach(model)
        for head in heads:
            model.get_submodule(head).requires_grad_(True)
        self._saved_modules = _modules_in_checkpoint(model, heads, exported)
        self._tied = {name: of for name, of in tied_parameters(model).items() if self.is_of_head(of)}
        """Aliases of tied parameters that are fully trained, mapped to the name of the shared parameter."""
        self._row_weights = self._attach_rows(model, plan)
        """Location of the weights of which some rows are trained, by the name of the module."""
        if section.quantize != "none":
            self._quantize(model, plan)

    def _attach_rows(self, model: nn.Module, plan: ParallelPlan) -> dict[str, Fragment]:
        """Make the rows of ``adapter.trainable_token_indices`` trainable, in the embedding and the head."""
        if not (tokens := self._section.trainable_token_indices):
            return {}
        key = f"adapter.trainable_token_indices=[{','.join(map(str, tokens[:3]))}{',...' if tokens[3:] else ''}]"
        modules = dict(model.named_modules())
        names = {role: [name for name in modules if plan.role(name) == role] for role in ("vocabulary", "head")}
        if [len(found) for found in names.values()] != [1, 1] or not hasattr(modules[names["head"][0]], "with_rows"):
            raise UserError(
                f"{key} needs a model of a built-in family, with one embedding and one head; use "
                "adapter.modules_to_save"
            )
        (embedding,), (head,) = names.values()
        (rows, _), is_tied = modules[embedding].weight.shape, modules[head].weight is None
        if max(tokens) >= rows:
            raise UserError(
                f"{key}: the embedding has {rows} rows, and none for token {max(tokens)}; leave this token out"
            )
        if whole := next((name for name in (embedding, head) if self.is_of_head(f"{name}.")), None):
            raise UserError(
                f"{key}: all rows of {whole} are trained with adapter.modules_to_save; leave one of them out"
            )
        owners = [embedding] if is_tied else [embedding, head]
        for owner in owners:
            attach_rows(modules[owner], tokens)
        modules[head].with_rows = partial(with_rows, modules[owners[-1]])
        return {owner: self._of_base(f"{owner}.weight", modules[owner].weight.shape)[0] for owner in owners}

    @property
    def trains_tied_rows(self) -> bool:
        """Whether rows that the embedding and the head share are trained."""
        return len(self._row_weights) == 1

    def is_of_head(self, name: str) -> bool:
        """Return whether parameter ``name`` is in a fully trained head."""
        return name.startswith(self._heads)

    def _aliases(self, name: str) -> set[str]:
        """Return the names that the user may write for layer ``name``."""
        if name in self._experts.stacks:
            return self._experts.stacks[name].aliases
        weight = self._weights[name]
        return {_module_of(weight.name), *([name] if weight.is_whole else [])}

    def _by_layer(self, chosen: Sequence[str], key: str, otherwise: _Number) -> dict[str, _Number]:
        """Return a value for each ``chosen`` layer: the value of the first matching pattern in ``adapter.<key>``, or
        ``otherwise`` if no pattern matches."""
        patterns, names = getattr(self._section, key), {name: self._aliases(name) for name in chosen}
        for pattern, value in patterns.items():
            if not any(matches_layer(alias, pattern) for known in names.values() for alias in known):
                raise CannotAdapt(pattern, _unmatched(f"adapter.{key}={{{pattern}: {value}}}", pattern, names))
        return {name: layer_value(patterns, known, otherwise) for name, known in names.items()}

    def _attach(self, model: nn.Module) -> bool:
        """Freeze ``model`` and attach adapters to the chosen layers. Returns whether the layers are ``Conv1D``."""
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        section = self._section
        stacks = self._adapted_stacks
        if stacks:
            self._experts.check(section, self._ranks, self._alphas)
        for name, stack in stacks.items():
            stack.attach(model, self._ranks[name], scale_of(self._ranks[name], self._alphas[name], section.scale))
        linear = {name: rank for name, rank in self._ranks.items() if name not in stacks}
        kinds = {type(model.get_submodule(name)).__name__ == "Conv1D" for name in linear}
        if len(kinds) > 1:
            raise UserError(
                "adapter.modules: PEFT's format cannot store adapters of both Conv1D and Linear layers; select one kind"
            )
        is_conv1d, is_dora = kinds == {True}, section.method == "dora"
        shared: dict[str, nn.Parameter] = {}
        for name, rank in linear.items():
            adapter = Adapter(scale_of(rank, self._alphas[name], section.scale), section.dropout, is_conv1d)
            module, tensor = model.get_submodule(name), self._weights[name].name
            shared[tensor] = attach(module, rank, adapter, is_dora=is_dora, shared=shared.get(tensor))
        return is_conv1d

    def _quantize(self, model: nn.Module, plan: ParallelPlan) -> None:
        blocks = tuple(f"{block}." for block in plan.blocks)
        for name in self._weights:
            module = model.get_submodule(name)
            if self.is_of_head(f"{name}."):
                continue
            if name.startswith(blocks or "") and isinstance(module, nn.Linear) and can_quantize(module):
                self.packed[f"{name}.weight"] = tuple(module.weight.shape)
                quantize(module)
        if not self.packed:
            raise UserError(
                f"adapter.quantize={self._section.quantize}: the blocks have no nn.Linear whose number of inputs is a "
                f"multiple of {BLOCK}; use adapter.quantize=none"
            )

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        """Return the location of a parameter in the run's checkpoint. Empty for parameters of the base model.

        Layers whose weights share a tensor in the checkpoint, such as queries, keys and values, share A. Their B
        matrices are stored in one tensor.
        """
        owner, key = _owner_and_key(name)
        if self.is_of_head(name):
            # PEFT needs tied weights under all of their names.
            names = [name, *(further for further, of in self._tied.items() if of == name)]
            parts = [part for alias in names for part in self._of_base(alias, shape)]
            return tuple(part._replace(name=f"{PREFIX}{part.name}") for part in parts)
        if owner in self._row_weights and key == ROWS:
            return (Fragment.whole(f"{PREFIX}{_module_of(self._row_weights[owner].name)}{ROWS_END}", shape),)
        if not self._is_of_adapter(name):
            return ()
        if owner in self._experts.stacks:
            return self._experts.stacks[owner].fragments(key, shape, _ENDINGS[key], self._depth(owner))
        weight = self._weights[owner]
        tensor = f"{PREFIX}{_module_of(weight.name)}.{_ENDINGS[key]}"
        if weight.is_whole or key == A:
            return (Fragment.whole(tensor, shape),)
        dim = 1 if self._is_conv1d else 0  # dimension of the output features
        whole = (weight.shape[dim], *shape[1:])
        return (Fragment.within(tensor, whole, 0, weight.theirs.starts[dim], shape),)

    def _depth(self, name: str) -> int:
        """Return the number of stacks after stack ``name`` in the same module that have adapters."""
        experts = self._experts.stacks[name].experts
        same = [key for key, stack in self._experts.stacks.items() if key in self._ranks and stack.experts == experts]
        return len(same) - 1 - same.index(name)

    def exported_base(self, of_folder: Exported) -> Exported:
        """Return a mapping from parameters to their location in the base model's folder.

        Empty for parameters of adapters, otherwise the location that ``of_folder`` returns.
        """
        return lambda name, shape: () if self._is_of_adapter(name) else of_folder(name, self.packed.get(name, shape))

    def _is_of_adapter(self, name: str) -> bool:
        owner, key = _owner_and_key(name)
        return (owner in self._ranks and key in _ENDINGS) or (owner in self._row_weights and key == ROWS)

    @torch.no_grad()
    def load_packed(self, folder: Path, parameters: Iterable[HeldTensor]) -> None:
        """Load this rank's rows of the quantized weights from the base model's folder."""
        weights = {weight.name for weight in self._weights.values()}
        tensors = TensorFolder(folder).named_like(weights) if self.packed else None
        for held in parameters:
            if held.name not in self.packed or tensors is None or not held.box.numel:
                continue
            whole = self.packed[held.name]
            (part,) = self._of_base(held.name, whole)
            first, step = part.theirs.starts[0] + held.box.starts[0], max(1, _PIECE_NUMBERS // whole[1])
            shards = held.spec.shape[1] // held.box.sizes[1]  # of the inputs
            columns = slice(*(whole[1] // shards * (held.box.starts[1] // held.box.sizes[1] + end) for end in (0, 1)))
            for start in range(0, held.box.sizes[0], step):
                into = held.local[start : start + step].view(torch.uint8)
                values = tensors.read_elements(part.name, (first + start) * whole[1], len(into) * whole[1])
                rows = values.view(len(into), whole[1])[:, columns]
                into.copy_(pack(rows.to(into.device)).view(torch.uint8))

    @torch.no_grad()
    def load_rows(self, folder: Path | None, parameters: Iterable[HeldTensor]) -> None:
        """Load this rank's part of the trained rows from the base model's folder. A row that the folder lacks is set to
        the mean of the folder's rows."""
        if not self._row_weights:
            return
        if folder is None:
            raise UserError("adapter.trainable_token_indices needs a base model: model.path=FOLDER_OR_NAME")
        tensors = TensorFolder(folder).named_like([weight.name for weight in self._row_weights.values()])
        for held in parameters:
            owner, _, key = held.name.rpartition(".")
            if key != ROWS or not held.box.numel:
                continue
            name, first = self._row_weights[owner].name, held.box.starts[0]
            rows, width = tensors.specs[name].shape
            for index, token in enumerate(self._section.trainable_token_indices[first : first + held.box.sizes[0]]):
                is_new = token >= rows
                row = mean_of_rows(tensors, name) if is_new else tensors.read_elements(name, token * width, width)
                held.local[index] = row[held.box.columns()].to(held.local)

    @torch.no_grad()
    def initialize(self, parallel: DistributedModel, seed: int) -> None:
        """Initialize the adapters so that they add zero.

        A and B are initialized as in PEFT, by default B to zero. DoRA's magnitudes are the row norms of the base
        weights, which must already be loaded.
        """
        held = {parameter.name: parameter for parameter in parallel.parameters}
        for name, parameter in held.items():
            owner, key = _owner_and_key(name)
            if owner not in self._ranks:
                continue
            if key in (A, B) and self._section.init == "orthogonal":
                initialize_orthogonal(parameter, key, self._weights[owner].name, seed)
            elif key == A:
                initialize_uniform(parameter, 1 / math.sqrt(parameter.spec.shape[-1]), seed)
            elif key == B:
                parameter.local.zero_()
            elif key == MAGNITUDE:
                lengths = _lengths(held[f"{owner}.weight"], 1 if self._is_conv1d else 0, parallel)
                parameter.local.copy_(lengths[parameter.box.indices()])

    def write_config(self, folder: Path, base: str | None, further: Mapping[str, Any]) -> None:
        """Write ``adapter_config.json``, which PEFT needs to load the adapters.

        Args:
            folder: Folder to write into.
            base: Folder or Hub name of the base model.
            further: Items that the task adds.
        """
        section = self._section
        config = {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": base,
            "r": section.rank,
            "lora_alpha": section.alpha,
            "lora_dropout": section.dropout,
            "use_rslora": section.scale == "rslora",
            "use_dora": section.method == "dora",
            "rank_pattern": self._patterns(self._ranks, section.rank),
            "alpha_pattern": self._patterns(self._alphas, section.alpha),
            **self._targets(),
            "fan_in_fan_out": self._is_conv1d,
            "modules_to_save": self._saved_modules or None,
            "ensure_weight_tying": bool(self._tied),
            "trainable_token_indices": self._token_indices(),
            "bias": "none",
            "inference_mode": True,
            **further,
        }
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def _token_indices(self) -> list[int] | dict[str, list[int]] | None:
        """Return ``trainable_token_indices`` for PEFT: a list trains the embedding, and a head that is tied to it."""
        tokens = list(self._section.trainable_token_indices)
        names = [_module_of(weight.name).rpartition(".")[2] for weight in self._row_weights.values()]
        return dict.fromkeys(names, tokens) if len(names) > 1 else tokens or None

    def _other_values(self, values: Mapping[str, _Number], default: _Number) -> dict[str, _Number]:
        """Return the ``values`` by layer that differ from ``default``, by the name of the layer in a checkpoint."""
        named = {self._label(name): value for name, value in values.items()}
        return {name: value for name, value in named.items() if value != default}

    def _patterns(self, values: Mapping[str, _Number], default: _Number) -> dict[str, _Number]:
        """Return ``_other_values`` for PEFT, with the names of layers that it adapts as parameters too."""
        named, mistaken = self._other_values(values, default), self._mistaken()
        return named | {f"{name}.weight": value for name, value in named.items() if name in mistaken}

    @property
    def _adapted(self) -> set[str]:
        """Names that the adapted layers have in PEFT."""
        return {self._label(name) for name in self._ranks}

    def _label(self, name: str) -> str:
        """Return the name that layer ``name`` has in PEFT."""
        return (
            self._experts.stacks[name].label if name in self._experts.stacks else _module_of(self._weights[name].name)
        )

    def check_folder(self, folder: Path) -> None:
        """Raise ``UserError`` if the PEFT adapters in ``folder`` do not match these adapters."""
        tensors = TensorFolder(folder, ADAPTER).specs
        found = described_adapters(folder, tensors)
        linear = {_module_of(weight.name) for weight in self._weights.values()}
        layers = adapted_layers(read_json(folder / ADAPTER_CONFIG), tensors)
        theirs = {name if name in linear else layer for name, layer in layers.items()}  # a user's experts are linear
        if unknown := theirs - linear - self._experts.labels:
            raise UserError(unknown_layer(folder, min(unknown)))
        keys = {key: shown(found[key]) for key in ("method", "scale")}
        differing = {key: value for key, value in keys.items() if value != shown(getattr(self._section, key))}
        for key, values in (("rank", self._ranks), ("alpha", self._alphas)):
            ours = self._other_values(values, found[key])
            patterns = found.get(f"{key}_pattern", {})
            if any(layer_value(patterns, [name], found[key]) != ours.get(name, found[key]) for name in theirs):
                differing[key] = shown(found[key])
        if theirs != self._adapted:
            differing["modules"] = f"[{','.join(self._target_modules(theirs))}]"
        if (tokens := found.get("trainable_token_indices", ())) != self._section.trainable_token_indices:
            differing["trainable_token_indices"] = f"[{','.join(map(str, tokens))}]"
        if (saved := found.get("modules_to_save", [])) != self._saved_modules:
            differing["modules_to_save"] = f"[{','.join(saved)}]"
        if differing:
            use = " ".join(shlex.quote(f"adapter.{key}={value}") for key, value in differing.items())
            raise UserError(f"the adapters in {folder} do not match this command's adapter.* settings; use {use}")

    def check_embeddings(self, folder: Path) -> None:
        """Raise ``UserError`` if PEFT would train other parts of the embedding and the head with the adapters in
        ``folder``."""
        file, config = folder / ADAPTER_CONFIG, read_json(folder / ADAPTER_CONFIG)
        if self._tied and not config.get("ensure_weight_tying"):
            raise UserError(
                f"{file} has no ensure_weight_tying: PEFT unties the embedding from the head with these adapters; "
                "merge them with PEFT's merge_and_unload()"
            )
        tokens = config.get("trainable_token_indices")
        if self._row_weights and len(self._row_weights) != (len(tokens) if isinstance(tokens, dict) else 1):
            raise UserError(
                f"{file} has trainable_token_indices for the embedding only, but this run also trains rows of the "
                "head; merge these adapters with PEFT's merge_and_unload()"
            )

    @property
    def _adapted_stacks(self) -> dict[str, Stack]:
        return {name: stack for name, stack in self._experts.stacks.items() if name in self._ranks}

    def _mistaken(self) -> set[str]:
        """Return the names of adapted linear layers that PEFT 0.21 would take for routed experts.

        It adapts them, with the same results, if their weights are named as parameters. Not with dropout or DoRA.
        """
        if not self._experts.stacks or self._section.method == "dora" or self._section.dropout:
            return set()
        linear = {self._label(name) for name in self._ranks if name not in self._experts.stacks}
        return {name for name in linear if name.rpartition(".")[2] in SINGLE_NAMES}

    def _targets(self) -> dict[str, list[str]]:
        """Return ``target_modules`` and ``target_parameters`` for PEFT."""
        stacks, mistaken = [*self._adapted_stacks.values()], self._mistaken()
        modules = self._target_modules(self._adapted - {stack.label for stack in stacks} - mistaken)
        modules += sorted({stack.name for stack in stacks if stack.singles})
        shared = {stack.label for stack in stacks if not stack.singles}
        short = {f"experts.{stack.name}" for stack in stacks if not stack.singles}
        others = [stack.label for stack in self._experts.stacks.values() if stack.label not in shared]
        is_clear = not any(label.endswith(tuple(short)) for label in others)
        parameters = sorted(short if is_clear else shared) + sorted(f"{name}.weight" for name in mistaken)
        return {"target_modules": modules, **({"target_parameters": parameters} if parameters else {})}

    def _target_modules(self, chosen: set[str]) -> list[str]:
        """Return ``target_modules`` for PEFT: the last parts of the names ``chosen`` if they match no other layer."""
        last = {name.rpartition(".")[2] for name in chosen}
        others = {*self._experts.names, *(_module_of(weight.name) for weight in self._weights.values())} - chosen
        return sorted(chosen if any(name.rpartition(".")[2] in last for name in others) else last)

    def _choose(self, patterns: Sequence[str] | None, plan: ParallelPlan) -> list[str]:
        names = {name: self._aliases(name) for name in self._weights if not self.is_of_head(f"{name}.")}
        if patterns is None:
            inside = [name for name in names if name.startswith(tuple(f"{block}." for block in plan.blocks))]
            if not (inside or names):
                raise UserError("adapter.method: the model has no linear layers to adapt; use adapter=none")
            of_experts = {name.rpartition(".")[2] for name in self._experts.names}  # PEFT would adapt the experts, too
            return [name for name in inside or names if name.rpartition(".")[2] not in of_experts]
        chosen = set[str]()
        names |= {name: stack.aliases for name, stack in self._experts.stacks.items()}
        for pattern in patterns:
            if some := next(
                (each.label for each in self._experts.stacks.values() if each.matches_only_some(pattern)), None
            ):
                raise CannotAdapt(
                    pattern,
                    f"adapter.modules=[{pattern}] matches only some of the experts of {some}, but PEFT adapts all "
                    f"experts of a layer; use 'adapter.modules=[{some}]'",
                )
            unknown = [] if self._experts.stacks else self._experts.names  # of a user's own mixture
            if stacked := next((name for name in unknown if matches_layer(name, pattern)), None):
                raise CannotAdapt(
                    pattern,
                    f"adapter.modules=[{pattern}] matches stacked experts ({stacked}), but only experts of the "
                    "built-in families can have adapters; select other layers, e.g. 'adapter.modules=[*.self_attn.*]'",
                )
            found = [name for name, known in names.items() if any(matches_layer(alias, pattern) for alias in known)]
            if not found:
                raise CannotAdapt(pattern, _unmatched(f"adapter.modules=[{pattern}]", pattern, names))
            chosen.update(found)
        return [name for name in names if name in chosen]


def modules_to_save(patterns: Sequence[str], model: nn.Module, exported: Exported) -> list[str]:
    """Return the names of the modules of ``model`` that ``patterns``, the value of ``adapter.modules_to_save``, match.

    Raises:
        UserError: A pattern matches no module, or a module that shares its weight with another module.
    """
    known, chosen = dict[str, set[str]](), list[str]()
    tied = {name.rpartition(".")[0]: of.rpartition(".")[0] for name, of in tied_parameters(model).items()}
    for name, module in model.named_modules() if patterns else ():
        for parameter, values in module.named_parameters():
            parts = exported(f"{name}.{parameter}", values.shape)
            if name and len(parts) == 1 and name not in tied:
                known.setdefault(name, {name}).add(parts[0].name.removesuffix(f".{parameter}"))
    for pattern in patterns:
        if head := next((name for name in tied if matches_layer(name, pattern)), None):
            others = dict.fromkeys([*(other for other in patterns if other != pattern), tied[head]])
            raise UserError(
                f"adapter.modules_to_save=[{pattern}]: {head} and {tied[head]} share a weight, and training "
                f"{tied[head]} covers both; use 'adapter.modules_to_save=[{','.join(others)}]'"
            )
        found = [name for name, aliases in known.items() if any(matches_layer(alias, pattern) for alias in aliases)]
        if not found:
            last = sorted({name.rpartition(".")[2] for name in known})
            near = nearest(pattern.rpartition(".")[2], last) or last[:4]
            raise UserError(
                f"adapter.modules_to_save=[{pattern}] matches no module that can be trained in full; similar names: "
                f"{', '.join(near)}; e.g. 'adapter.modules_to_save=[{near[0]}]'"
            )
        chosen += found
    return list(dict.fromkeys(chosen))


def unknown_layer(folder: Path, name: str) -> str:
    """Return the error message for adapters in ``folder`` of a layer that does not support adapters."""
    return f"{folder} has an adapter for {name}, which is not supported; merge the adapters with PEFT"


def _linear_layers(model: nn.Module, exported: Exported) -> dict[str, Any]:
    """Return the layers that support adapters, by name. The weight of each is a single tensor in a checkpoint."""
    if any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        raise UserError(
            "adapter.method: the model has BatchNorm layers, and training would change their statistics in the base "
            "model; use adapter=none, or another norm"
        )
    layers = {name: module for name, module in model.named_modules() if is_linear(module)}
    return {
        name: module for name, module in layers.items() if len(exported(f"{name}.weight", module.weight.shape)) == 1
    }  # fmt: skip


def _modules_in_checkpoint(model: nn.Module, heads: Iterable[str], exported: Exported) -> list[str]:
    """Return the names that the modules ``heads`` have in a checkpoint."""
    return sorted(
        {
            exported(f"{head}.{name}", parameter.shape)[0].name.removesuffix(f".{name}")
            for head in heads
            for name, parameter in model.get_submodule(head).named_parameters()
        }
    )


def _lengths(weight: HeldTensor, dim: int, parallel: DistributedModel) -> torch.Tensor:
    """Return the norms of the full rows of a weight, whose outputs are along ``dim``."""
    lengths = torch.linalg.vector_norm(weight.tensor.detach().float(), dim=1 - dim)
    lengths = lengths.full_tensor() if is_sharded(lengths) else lengths
    if "tensor" not in weight.spec.sliced_axes:
        return lengths
    squares = torch.zeros(weight.spec.shape[dim], device=lengths.device)
    is_of_rows = any(cut.dim == dim and cut.axes == ("tensor",) for cut in weight.spec.slices)
    first = len(lengths) * parallel.place.tensor * is_of_rows
    squares[first : first + len(lengths)] = lengths.square()
    dist.all_reduce(squares, group=parallel.groups.tensor)
    return squares.sqrt()


def _owner_and_key(name: str) -> tuple[str, str]:
    """Return the layer that parameter ``name`` of an adapter belongs to, and the parameter's name there.

    An adapter of stacked experts has parameters such as ``experts.down_proj_lora_A``, so its layer is
    ``experts.down_proj``.
    """
    key = next((key for key in _ENDINGS if name.endswith(key)), name.rpartition(".")[2])
    return name[: -len(key) - 1], key


def _module_of(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _unmatched(given: str, pattern: str, layers: Mapping[str, Iterable[str]]) -> str:
    """Return the error message for a pattern that matches none of ``layers``, a mapping from layers to their names.

    ``given``: the override that contains the pattern.
    """
    names = sorted({name for known in layers.values() for name in known})
    guess = nearest_pattern(pattern, names, matches_layer)
    last = sorted({name.rpartition(".")[2] for name in names if guess is None or matches_layer(name, guess)})
    near = (nearest(pattern.rpartition(".")[2], last) if guess is None else None) or last[:4]
    return (
        f"{given} matches none of the {len(layers)} linear layers, such as {names[0]}; similar names: "
        f"{', '.join(near)}; e.g. {shlex.quote(given.replace(pattern, guess or near[0]))}"
    )
