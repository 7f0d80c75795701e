"""gpt-oss (https://arxiv.org/abs/2508.10925): a mixture of experts with attention sinks and sliding windows.

Differences from ``moe``: every other block attends only to the last tokens; each head also attends to a sink, a key of
value zero with a learned score; routers and experts have biases; the SwiGLU of experts is clamped, and its gate and
other input alternate in one matrix.

Shapes: N rows, E experts, D dim, I inner width of an expert.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from serried.recipes.models.families.gpt_oss_config import GptOssSection
from serried.recipes.models.families.llama import Attention
from serried.recipes.models.families.moe import (
    MixtureOfExperts,
    MoE,
    MoETransformer,
    Router,
    StackedExperts,
)


class GptOssExperts(StackedExperts):
    """Feed-forwards with biases and a clamped SwiGLU."""

    fused: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_up_proj",), "down_proj": ("down_proj",)}
    is_transposed = True

    def __init__(self, config: GptOssSection) -> None:
        super().__init__()
        experts = config.experts
        dim = config.dim
        hidden = config.expert_hidden_dim
        self.alpha, self.limit = config.plain["swiglu_alpha"], config.swiglu_limit
        self.gate_up_proj = nn.Parameter(torch.empty(experts, dim, 2 * hidden))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, dim))

    def _products(self, rows: Tensor, counts: Tensor) -> Tensor:
        multiply = self.product(rows, counts)
        every = torch.arange(len(counts), device=rows.device)
        expert = every.repeat_interleave(counts, output_size=len(rows))
        # Biases are added as a matrix product, whose backward has a fixed order of additions on a GPU too.
        chosen = (expert.unsqueeze(1) == every).to(rows.dtype)  # [N, E]
        both = multiply(rows, "gate_up_proj") + chosen @ self.gate_up_proj_bias.to(rows.dtype)
        gate, other = both[:, ::2].clamp(max=self.limit), both[:, 1::2].clamp(-self.limit, self.limit)
        hidden = (other + 1) * gate * torch.sigmoid(gate * self.alpha)
        return multiply(hidden, "down_proj") + chosen @ self.down_proj_bias.to(rows.dtype)


class GptOssTransformer(MoETransformer):
    """``MoETransformer`` with attention sinks and biases."""

    config: GptOssSection

    def attention(self, number: int) -> Attention:
        del number
        bias = self.config.attention_bias
        return Attention(self.config, bias=bias, output_bias=bias, sinks=True)

    def mixture(self) -> MixtureOfExperts:
        return MixtureOfExperts(self.config, Router(self.config, bias=True), GptOssExperts(self.config))


class GptOss(MoE):
    """Family ``gpt_oss``."""

    section: GptOssSection
    transformer = GptOssTransformer

    def initial_std(self, name: str) -> float | None:
        return 0.0 if name.endswith("_bias") else super().initial_std(name)

    def parameters_of_expert(self) -> int:
        return super().parameters_of_expert() + 2 * self.section.expert_hidden_dim + self.section.dim

    def checkpoint_names(self, name: str) -> list[str]:
        return [self.export_name(name.replace(".mlp.gate.", ".mlp.router.").replace(".sinks.weight", ".sinks"))]

    def own_entries(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        del plain
        windows = map(self.section.window, range(self.section.layers))
        return {"layer_types": ["sliding_attention" if window else "full_attention" for window in windows]}
