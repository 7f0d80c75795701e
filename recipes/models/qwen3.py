"""Qwen 3, dense (https://arxiv.org/abs/2505.09388): Llama with queries and keys normalised per head."""

from typing import Any

from serried.recipes.models.transformer import Llama, Transformer


class Qwen3Transformer(Transformer):
    """``Transformer`` with these norms."""

    normalizes_heads = True


class Qwen3(Llama):
    """``model.family=qwen3``."""

    transformer = Qwen3Transformer
    normalizes_heads = True

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        return super().export_config(end_token) | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "use_sliding_window": False,
        }
