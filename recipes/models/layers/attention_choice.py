"""Choice of a run's attention kernel, and reasons why a kernel cannot be used."""

import inspect
from typing import Any

import torch

from serried.configs.errors import UserError
from serried.configs.schema.data import TextRunConfig
from serried.recipes.models.layers.attention import CAPABILITY, has_flex

FLEX = "FlexAttention"
LEAST_WIDTH = 16
"""Smallest head dim that FlexAttention supports (torch 2.11, 2.13)."""
_SDPA, _ROWS = "scaled_dot_product_attention", "attention in blocks of rows"


def describe_attention(config: TextRunConfig, device: str, context: int) -> str:
    """Return the run's attention kernel on a device of type ``device``, for the plan; empty if the model has no key
    ``attention``. Raises ``UserError`` if the kernel that ``model.attention`` names cannot be used."""
    model = config.model
    kernel = getattr(model, "attention", None)
    if kernel is None:
        return ""
    if kernel in ("flex", "varlen") and (reason := _refused(config, device, context)):
        raise UserError(f"model.attention={kernel}{reason}; use model.attention=auto")
    window, is_other = getattr(model, "sliding_window", None), getattr(model, "needs_mask", False)
    is_masked = config.isolates or is_other or (window and window < config.data.sequence_length)
    is_cpu, is_divided = device == "cpu", context != 1  # -1: all remaining ranks
    if not is_masked and not is_divided:
        is_by_rows = is_cpu and kernel == "auto" and config.precision.name not in ("fp32", "fp16")
        return _ROWS if is_by_rows else _SDPA
    if is_divided:
        kernel = "sdpa" if is_cpu else "auto"
    if kernel == "varlen":
        return "varlen_attn"
    if kernel != "sdpa" and is_cpu:
        return _ROWS
    if kernel != "sdpa" and (not torch.cuda.is_available() or has_flex(torch.device("cuda"))):
        _check_width(model, "launch.device=cpu" if is_divided else "model.attention=sdpa")
        return FLEX
    return f"{_SDPA} with a mask of queries x keys" if not is_other else "attention with all scores in memory"


def _check_width(model: Any, instead: str) -> None:
    """Raise ``UserError`` if the heads of ``model`` are too narrow for FlexAttention."""
    width = getattr(model, "attention_head_dim", model.dim // model.heads)
    if width < LEAST_WIDTH:
        raise UserError(
            f"head dim {width} (model.dim={model.dim}, model.heads={model.heads}) is too small for {FLEX} "
            f"({LEAST_WIDTH} or more), and this run needs it on GPUs; use fewer model.heads, or {instead}"
        )


def _refused(config: TextRunConfig, device: str, context: int) -> str:
    """Return the reason why ``model.attention`` (``flex`` or ``varlen``) cannot be used; empty if it can."""
    model: Any = config.model
    is_varlen = model.attention == "varlen"
    if device == "cpu":
        return " needs a GPU (to plan for one: launch.device=cuda)"
    if torch.cuda.is_available() and not has_flex(torch.device("cuda")):
        return f" needs Triton, a C compiler and a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or higher"
    if is_varlen and config.precision.name == "fp32":
        return " does not support precision=fp32 (precision=bf16 is supported)"
    if is_varlen and (cap := getattr(model, "score_soft_cap", None)):
        return f" does not support model.score_soft_cap={cap:g}"
    if is_varlen and getattr(model, "needs_mask", False):
        return f" does not support the attention sinks of model.family={model.family}"
    if is_varlen and context != 1:
        return f" does not support parallel.context={context}"
    is_grouped = getattr(model, "kv_heads", model.heads) != model.heads
    if is_varlen and is_grouped and not _takes_groups():
        return f" needs torch 2.12 or newer for model.kv_heads={model.kv_heads} with model.heads={model.heads}"
    return ""


def _takes_groups() -> bool:
    from torch.nn.attention.varlen import varlen_attn  # imports torch._dynamo

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
