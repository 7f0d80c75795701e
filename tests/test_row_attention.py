"""Attention in blocks of rows: as near to fp32 as stated, one operation for modes and compilers, in every family."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from serried.configs.compose import compose
from serried.recipes.causal_lm import CausalLM
from serried.recipes.models.attention import attend
from serried.recipes.models.row_attention import attend_by_rows

TIMES_SDPA = 2.5
"""Most that the root mean square of an error may be, beside that of SDPA in bf16."""


def heads(count: int, tokens: int, width: int, seed: int) -> Tensor:
    """[B, heads, S, E], laid out as a projection leaves it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, count, width, generator=generator).bfloat16().transpose(1, 2)


def attended(
    dtype: torch.dtype, tokens: int, counts: tuple[int, int], scale: float | None, kernel: str
) -> list[Tensor]:
    """Result and gradients, in fp32."""
    q, k, v = (
        heads(count, tokens, 16, seed).to(dtype).clone().requires_grad_()
        for seed, count in enumerate((counts[0], counts[1], counts[1]))
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = attend(q, k, v, None, scale=scale, kernel=kernel)
    out.backward(heads(counts[0], tokens, 16, 3).to(dtype))
    return [each.float() for each in (out.detach(), q.grad, k.grad, v.grad) if each is not None]


@pytest.mark.parametrize(("tokens", "counts", "scale"), [(256, (4, 2), None), (100, (6, 2), 0.3), (65, (3, 3), None)])
def test_errors_are_within_a_bound_of_those_of_sdpa_in_bf16(
    tokens: int, counts: tuple[int, int], scale: float | None
) -> None:
    exact = attended(torch.float32, tokens, counts, scale, "sdpa")
    ours, theirs = (
        torch.stack([(found - right).norm() / right.norm() for found, right in zip(each, exact, strict=True)])
        for each in (attended(torch.bfloat16, tokens, counts, scale, kernel) for kernel in ("auto", "sdpa"))
    )
    assert not ours.equal(theirs)
    assert (ours / theirs).max() < TIMES_SDPA


def test_shapes_layouts_and_gradients_are_what_torch_requires_of_an_operation() -> None:
    q, k, v = (heads(count, 70, 8, seed).requires_grad_() for seed, count in enumerate((4, 2, 2)))
    torch.library.opcheck(attend_by_rows, (q, k, v, 0.2))


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += operation is torch.ops.serried.scaled_dot_product_by_rows.default
        return operation(*args, **(kwargs or {}))


SMALL = ["model.dim=32", "model.layers=3", "model.heads=4", "model.hidden_dim=48", "data.sequence_length=64"]
FAMILIES = {
    "llama1b": [], "mistral7b": [], "qwen25_7b": [], "qwen3_600m": [], "olmo2_7b": [], "phi3_mini": [], "moe_tiny": [],
    "gpt2": [], "gemma3_1b": ["model.layers=6"],
}  # fmt: skip
"""Models whose blocks, at 64 tokens, attend without a window or a cap of scores."""


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_takes_it_in_bf16_on_a_cpu_unless_asked_for_sdpa(name: str) -> None:
    own = [] if name == "gpt2" else ["model.kv_heads=2"]
    for kernel in ("auto", "sdpa"):
        argv = [f"model={name}", *SMALL, *own, *FAMILIES[name], "model.vocab_size=300", f"model.attention={kernel}"]
        config = compose([*argv, "model.head_dim=8"] if own else argv)
        with torch.device("meta"):
            model: Any = CausalLM(config).build_model()
        model = model.to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        tokens = torch.randint(300, (1, 64))
        with Calls() as calls, torch.autocast("cpu", torch.bfloat16):
            model(tokens, tokens)
        assert calls.count == (config.model.layers if kernel == "auto" else 0)
