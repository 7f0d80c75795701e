"""Qwen 2 and 2.5 (https://arxiv.org/abs/2412.15115): Llama, with a bias of queries, keys and values."""

from typing import Any

from serried.recipes.models.transformer import Llama, Transformer


class Qwen2Transformer(Transformer):
    """``Transformer`` with these biases."""

    has_bias = True


class Qwen2(Llama):
    """``model.family=qwen2``."""

    transformer = Qwen2Transformer

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        return super().export_config(end_token) | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": False,
        }
