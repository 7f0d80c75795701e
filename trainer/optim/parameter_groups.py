"""Parameter groups by name pattern, with their own learning rate and weight decay, or frozen."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.schema.sections import OptimSection, ParameterGroup
from serried.configs.similar_names import nearest_pattern
from serried.parallel.layout.local_shards import is_sharded

_WHOLE = ", whole"


def freeze(model: nn.Module, section: OptimSection) -> None:
    """Freeze the parameters of frozen groups. Call this before the model is sharded.

    Raises:
        UserError: the pattern of a group matches no parameter, no trainable parameter, or only parameters of earlier
            groups; or all parameters are frozen.
    """
    is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    names = list(is_trained)
    _refuse_unmatched(is_trained, section.groups)
    group_of = _groups_by_name(names, section.groups)
    for name, parameter in model.named_parameters():
        if name in group_of and section.groups[group_of[name]].frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        groups = " and ".join(f"optim.groups.{name}.frozen=true" for name in section.groups) or "requires_grad=False"
        raise UserError(f"{groups} leaves no parameter to train; freeze fewer parameters")


def parameter_groups(named: Iterable[tuple[str, Tensor]], section: OptimSection) -> list[dict[str, Any]]:
    """Return the trainable parameters as parameter groups for torch's optimizers, each with a name and ``lr_scale``.

    Matrices and vectors are in separate groups: vectors (norms, biases) have no weight decay unless the configured
    group sets one. Sharded and unsharded parameters are separate too, because torch's kernels do not accept both in one
    list. If none of ``named`` is trainable, which is possible on a pipeline stage, the result is one group without
    parameters.
    """
    everything = list(named)
    group_of = _groups_by_name([name for name, _ in everything], section.groups)
    found: dict[str, list[tuple[str, Tensor]]] = {own: [] for own in ("", *section.groups)}
    for name, parameter in everything:
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and not name.endswith("bias")  # biases of experts are stacked
            kind = ("matrices" if is_matrix else "norms") + _WHOLE * (not is_sharded(parameter))
            found[group_of.get(name, "")].append((kind, parameter))
    groups = [group for own, members in found.items() for group in _split(own, members, section)]
    return groups or [{"name": "none", "params": [], "weight_decay": 0.0, "lr_scale": 1.0}]


def _split(own: str, members: list[tuple[str, Tensor]], section: OptimSection) -> Iterator[dict[str, Any]]:
    kinds = {kind: [parameter for each, parameter in members if each == kind] for kind in sorted(dict(members))}
    is_mixed = len({kind.endswith(_WHOLE) for kind in kinds}) > 1
    group = section.groups[own] if own else ParameterGroup(parameters="*")
    for kind, parameters in kinds.items():
        decay = group.weight_decay
        if decay is None:
            decay = section.weight_decay if kind.startswith("matrices") else 0.0
        name = kind if is_mixed else kind.removesuffix(_WHOLE)
        name = name if not own else own if len(kinds) == 1 else f"{own}.{name}"
        yield {"name": name, "params": parameters, "weight_decay": decay, "lr_scale": group.lr_scale}


def _groups_by_name(names: Collection[str], groups: Mapping[str, ParameterGroup]) -> dict[str, str]:
    """Map each parameter name to the first group whose pattern matches it. Unmatched names are left out."""
    group_of: dict[str, str] = {}
    for group, section in groups.items():
        matched = [name for name in names if fnmatchcase(name, section.parameters)]
        group_of = dict.fromkeys(matched, group) | group_of
    return group_of


def _refuse_unmatched(is_trained: Mapping[str, bool], groups: Mapping[str, ParameterGroup]) -> None:
    trained = [name for name in is_trained if is_trained[name]]
    group_of = _groups_by_name(list(is_trained), groups)
    for group, section in groups.items():
        matched = [name for name in is_trained if fnmatchcase(name, section.parameters)]
        if matched and group not in group_of.values():
            first = group_of[matched[0]]
            raise UserError(
                f"optim.groups.{group}.parameters={section.parameters} matches only parameters of earlier groups, and "
                "a parameter belongs to the first group that matches "
                f"(optim.groups.{first}.parameters={groups[first].parameters}); put optim.groups.{group} before "
                f"optim.groups.{first}"
            )
        if not matched or not (section.frozen or any(is_trained[name] for name in matched)):
            names = list(is_trained) if section.frozen else trained
            guess = nearest_pattern(section.parameters, names, fnmatchcase)
            near = [name for name in names if guess and fnmatchcase(name, guess)][:3] or names[:3]
            kind = "parameters that are trained" if matched else "parameters"
            raise UserError(
                f"optim.groups.{group}.parameters={section.parameters} matches none of the {len(names)} {kind}; "
                f"similar names: {', '.join(near)}; e.g. 'optim.groups.{group}.parameters="
                f"{guess or ''.join(near[0].rpartition('.')[:2]) + '*'}'"
            )
