"""FSDP2 units of a module without a plan: groups of parameters that are gathered together."""

from collections import defaultdict

from torch import nn

_WITHOUT_FORWARD: set[type[nn.Module]] = {nn.ModuleList, nn.ModuleDict}
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def units_of(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return one unit per repeated block, and one per embedding or linear layer larger than half a block.

    Blocks are the children of the outermost containers whose children all have the same class. Modules with a tied
    parameter belong to no unit, so that FSDP2 keeps them together. Without repeated blocks there are no units.
    """
    tied = _holders_of_tied_parameters(model)
    blocks = [name for name in blocks_of(model) if not any(_is_inside(holder, name) for holder in tied)]
    if not blocks:
        return ()
    mean = sum(_size(model.get_submodule(name)) for name in blocks) / len(blocks)
    large = [
        name
        for name, module in model.named_modules()
        # Not subclasses: their parent may read the weight without calling them.
        if type(module) in (nn.Embedding, nn.Linear)
        and _size(module) > mean / 2
        and name not in tied
        and not any(_is_inside(name, block) for block in blocks)
    ]
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return tuple((name,) for name in sorted([*blocks, *large], key=order.__getitem__))


def blocks_of(module: nn.Module, name: str = "") -> list[str]:
    """Return the names of the repeated blocks of ``module``, in order. ``name`` is the name of ``module``."""
    found: list[str] = []
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        repeated = {key: each for key, each in child.named_children() if _size(each)}
        classes = {type(module) for module in repeated.values()}
        are_blocks = len(repeated) > 1 and len(classes) == 1 and not classes & _WITHOUT_FORWARD
        if isinstance(child, _CONTAINERS) and are_blocks:
            found += [f"{path}.{key}" for key in repeated]
        else:
            found += blocks_of(child, path)
    return found


def _holders_of_tied_parameters(model: nn.Module) -> set[str]:
    holders: dict[nn.Parameter, set[str]] = defaultdict(set)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders[parameter].add(name)
    return {name for names in holders.values() if len(names) > 1 for name in names}


def _is_inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
