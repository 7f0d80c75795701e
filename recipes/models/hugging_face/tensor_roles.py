"""Tensor parallelism of transformers models: roles of modules from ``base_model_tp_plan``, tested on a small copy."""

from typing import Any

import torch

from serried.parallel.axes.tensor_trial import difference_of_shards
from serried.parallel.plan import ParallelPlan

_ROLES = {"colwise": "column", "rowwise": "row"}
"""Roles of ``ParallelPlan``, by style in transformers' plan."""
_REPLICATED = (
    "replicated_with_grad_allreduce", "colwise_gather_output", "rowwise_split_input", "embedding_rowwise",
)  # fmt: skip
"""Styles of modules that are replicated: norms of heads, embeddings, and matrices with whole inputs and outputs."""


def roles_of(model: Any) -> dict[str, str]:
    """Return the roles of the modules of a transformers model."""
    prefix, styles = model.base_model_prefix, _styles(model)
    roles = {f"{prefix}.{glob}": _ROLES[style] for glob, style in styles.items() if style in _ROLES}
    return roles | {region: "region" for glob in roles if (region := glob.rpartition(".")[0]) not in roles}


def refuse_roles(model: Any, copy: Any) -> str:
    """Return why transformers' plan for ``model`` cannot be used, as a clause; empty if it can.

    ``copy``: small copy of the model, or None.
    """
    name = type(model).__name__
    others = sorted({*_styles(model).values()} - {*_ROLES, *_REPLICATED})
    if others:
        return f"the tensor plan of transformers for {name} uses {', '.join(others)}, which model=hf does not support"
    if not roles_of(model):
        return f"transformers has no tensor plan for {name} that shards its matrices"
    if copy is None:
        return f"the tensor plan of transformers for {name} cannot be tested on a small copy of the model"
    tokens = (torch.arange(12, device="cpu") % copy.config.vocab_size).unsqueeze(0)
    with torch.autocast("cpu", enabled=False):
        differing = difference_of_shards(copy, ParallelPlan(roles=roles_of(copy)), lambda shard: shard(tokens).logits)
    if differing:
        return f"a small {name} sharded by the tensor plan of transformers differs from a whole one ({differing})"
    return ""


def _styles(model: Any) -> dict[str, str]:
    return getattr(model.config, "base_model_tp_plan", None) or {}
