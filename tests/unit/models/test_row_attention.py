"""Attention that keeps documents and windows apart without a mask, and attention in blocks of rows in bf16."""

import importlib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.parallel.plan import with_sinks
from serried.recipes.models.families.llama import Transformer
from serried.recipes.models.families.llama_config import LlamaSection
from serried.recipes.models.layers import attention
from serried.recipes.models.layers.attention import (
    Rows,
    attend,
    attend_in_documents,
    attend_with_logsumexp,
    blocks_from,
    causal_mask,
    documents,
)
from serried.recipes.models.layers.attention_choice import describe_attention
from serried.recipes.models.layers.cpu_attention import attend_by_rows, attend_by_rows_with_logsumexp
from serried.recipes.text.causal_lm import CausalLM
from tests.runs.test_out_of_memory import peak

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
def test_error_in_bf16_is_bounded_by_that_of_sdpa(tokens: int, counts: tuple[int, int], scale: float | None) -> None:
    exact = attended(torch.float32, tokens, counts, scale, "sdpa")
    ours, theirs = (
        torch.stack([(found - right).norm() / right.norm() for found, right in zip(each, exact, strict=True)])
        for each in (attended(torch.bfloat16, tokens, counts, scale, kernel) for kernel in ("auto", "sdpa"))
    )
    assert not ours.equal(theirs)
    assert (ours / theirs).max() < TIMES_SDPA


def test_row_attention_passes_the_operator_checks_of_torch() -> None:
    q, k, v = (heads(count, 70, 8, seed).requires_grad_() for seed, count in enumerate((4, 2, 2)))
    for first in (None, torch.arange(70).sub(9).clamp(min=0).expand(2, -1)):
        torch.library.opcheck(attend_by_rows, (q, k, v, 0.2, first, 3.0))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(attend_by_rows_with_logsumexp, (q, k, v, 0.2, first, 3.0), test_utils=tests)


LENGTH = 300
LENGTHS = ((40, 3, 130, 1, 65, 61), (300,), (64, 64, 172))
"""Of the documents in three sequences, with and without borders at those of blocks."""
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in each]) for each in LENGTHS])
MASKED = [(POSITIONS, None), (None, 7), (None, 100), (POSITIONS, 50), (POSITIONS, 2)]
"""Positions and windows."""


def case(dtype: torch.dtype, key_heads: int) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values as a projection leaves them, and the gradient of a result."""
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(3, LENGTH, count, 16, generator=generator) for count in (4, key_heads, key_heads, 4)]
    *inputs, grad = (each.to(dtype).transpose(1, 2) for each in made)
    return inputs, grad


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [each.detach().clone(memory_format=torch.preserve_format).requires_grad_() for each in inputs]
    out = function(*leaves)
    return [each.detach().float() for each in (out, *torch.autograd.grad(out, leaves, grad))]


BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("kernel", ["auto", "sdpa"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16", "fp16"])
def test_sinks_equal_a_further_key_without_value(kernel: str, dtype: torch.dtype) -> None:
    inputs, grad = case(dtype, 2)
    sinks = torch.linspace(-1, 2, grad.shape[1])
    rows, mask = (causal_mask(POSITIONS, LENGTH, grad.device, 50, each) for each in (kernel, "sdpa"))
    assert isinstance(rows, Rows) == (kernel == "auto")

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return with_sinks(*attend_with_logsumexp(q, k, v, rows), sinks)

    def reference(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = (q @ k.repeat_interleave(2, 1).mT / 4).masked_fill(~mask, float("-inf"))
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
        return scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)

    found = with_gradients(ours, [*inputs, sinks], grad)
    expected = with_gradients(reference, [*(each.float() for each in inputs), sinks], grad.float())
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() < 2 * BOUNDS[dtype] * theirs.norm()


@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("positions", "window"), MASKED)
@pytest.mark.parametrize("form", [{}, {"soft_cap": 0.8, "scale": 0.5}], ids=["plain", "capped"])
def test_row_attention_with_documents_and_windows_equals_masked_attention(
    positions: Tensor | None, window: int | None, form: dict[str, float], dtype: torch.dtype
) -> None:
    inputs, grad = case(dtype, 2)
    rows, mask = (
        causal_mask(positions, LENGTH, grad.device, window, kernel) for kernel in ("auto", "sdpa")
    )  # fmt: skip
    assert isinstance(rows, Rows)
    assert isinstance(mask, Tensor)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found = with_gradients(partial(attend, mask=rows, **form), inputs, grad)
    wide = [each.float() for each in inputs]
    expected = with_gradients(partial(attend, mask=mask, **form), wide, grad.float())
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() < BOUNDS[dtype] * theirs.norm()


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, begins: Tensor, _begins: Tensor, longest: int, _longest: int, *,
    scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What ``varlen_attn`` computes, on a CPU; tensors are [tokens, heads, E]."""
    assert longest == begins.diff().max()
    assert begins.dtype == torch.int32
    parts = []
    for start, end in itertools.pairwise(begins.tolist()):
        mask = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if window_size[0] >= 0:
            mask = mask.triu(-window_size[0])
        document = (each[start:end].transpose(0, 1) for each in (q, k, v))
        parts.append(F.scaled_dot_product_attention(*document, attn_mask=mask, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(parts, dim=1).transpose(0, 1)


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(("positions", "window"), MASKED)
def test_varlen_attention_of_documents_equals_masked_attention(
    positions: Tensor | None, window: int | None, key_heads: int
) -> None:
    """``varlen_attn`` has a kernel on GPUs alone; another function takes its arguments here."""
    inputs, grad = case(torch.float32, key_heads)
    mask = documents(positions, LENGTH, window)
    found = with_gradients(partial(attend_in_documents, mask=mask, scale=None, kernel=one_by_one), inputs, grad)
    dense = causal_mask(positions, LENGTH, grad.device, window, "sdpa")
    for mine, theirs in zip(found, with_gradients(partial(attend, mask=dense), inputs, grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("positions", "window"), [*MASKED, (None, 128), (None, 129), (None, 256)])
def test_flex_block_mask_equals_the_dense_mask(positions: Tensor | None, window: int | None) -> None:
    """FlexAttention runs on GPUs; its forward, uncompiled, runs here."""
    rows = causal_mask(positions, LENGTH, torch.device("cpu"), window)
    dense = causal_mask(positions, LENGTH, torch.device("cpu"), window, "sdpa")
    assert isinstance(rows, Rows)
    assert isinstance(dense, Tensor)
    blocks = blocks_from(rows.first)
    (q, k, v), _ = case(torch.float32, 4)
    with torch.no_grad():
        expected = attend(q, k, v, dense)
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=blocks), expected, rtol=0, atol=2e-6)
    padded = F.pad(dense.expand(len(rows.first), 1, -1, -1), (0, 84, 0, 84))
    tiles = padded.unflatten(3, (3, 128)).unflatten(2, (3, 128))  # [B, 1, 3, 128, 3, 128]
    assert blocks.to_dense().bool().equal(tiles.any(-1).any(3)), "no block is computed for nothing"
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_num_blocks[..., :2].equal(tiles.all(-1).all(3).sum(-1)[..., :2]), "nor looked at for nothing"


DENSE_BYTES = 2 * 1024 * 1024
"""Of a mask, a byte an element."""


def test_documents_take_no_more_memory_than_one_document(tmp_path: Path) -> None:
    taken = {}
    for kernel in ("auto", "sdpa"):
        section = LlamaSection(
            name="small", dim=32, layers=2, heads=2, kv_heads=1, hidden_dim=32, vocab_size=64, attention=kernel,
            tie_embeddings=True,
        )  # fmt: skip
        model, tokens = Transformer(section, 64), torch.randint(64, (2, 1024))
        for isolated in (False, True):
            positions = torch.arange(1024).remainder(100).expand(2, -1) if isolated else None
            taken[kernel, isolated] = peak(model, tokens, torch.float32, tmp_path, positions)
    assert taken["auto", True] < taken["auto", False] + DENSE_BYTES / 4
    assert taken["sdpa", True] > taken["sdpa", False] + DENSE_BYTES, "it would show"


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
def test_every_family_uses_row_attention_in_bf16_on_a_cpu_unless_set_to_sdpa(name: str) -> None:
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


APART, BF16, WINDOW = "data.isolate_documents=true", "precision=bf16", "model.sliding_window=8"

DYNAMIC = "model.rope_scaling={rope_type: dynamic, factor: 8, original_max_sequence_length: 64}"


@pytest.mark.parametrize(
    ("device", "words", "expected"),
    [
        ("cpu", [], "scaled_dot_product_attention"),
        ("cpu", [BF16], "attention in blocks of rows"),
        ("cpu", [BF16, "model.attention=sdpa"], "scaled_dot_product_attention"),
        ("cpu", [APART], "attention in blocks of rows"),
        ("cpu", [APART, "parallel=fsdp", "parallel.context=2"], "scaled_dot_product_attention with a mask of "),
        ("cpu", [APART, "model.attention=sdpa"], "scaled_dot_product_attention with a mask of queries x keys"),
        ("cpu", ["model=gpt2", "data.sequence_length=64", APART], "attention in blocks of rows"),
        ("cuda", [BF16], "scaled_dot_product_attention"),
        ("cuda", [BF16, APART], "FlexAttention"),
        ("cuda", [BF16, "model=mistral7b", WINDOW], "FlexAttention"),
        ("cuda", [BF16, DYNAMIC, "data.packing=none"], "FlexAttention"),
        ("cuda", [BF16, DYNAMIC, "data.packing=none", "data.sequence_length=64"], "scaled_dot_product_attention"),
        (
            "cuda",
            [APART, "model.dim=32"],
            "error: head dim 8 (model.dim=32, model.heads=4) is too small for FlexAttention",
        ),
        ("cuda", [BF16, APART, "model.attention=varlen", "model.kv_heads=4"], "varlen_attn"),
        ("cuda", [BF16, "model.attention=varlen", "model.kv_heads=4"], "scaled_dot_product_attention"),
        ("cpu", ["model.attention=flex"], "error: model.attention=flex needs a GPU"),
        ("cpu", ["model.attention=varlen"], "error: model.attention=varlen needs a GPU"),
        ("cuda", ["model.attention=varlen"], "error: model.attention=varlen does not support precision=fp32"),
        (
            "cuda",
            [BF16, "model=gemma2_9b", "model.attention=varlen"],
            "error: model.attention=varlen does not support model.score",
        ),
        (
            "cuda",
            [BF16, "model=gpt_oss_20b", "model.attention=varlen"],
            "error: model.attention=varlen does not support the attention sinks of model.family=gpt_oss",
        ),
        ("cpu", [BF16, "model=gpt_oss_20b"], "attention in blocks of rows"),
        (
            "cuda",
            [BF16, "model.attention=varlen", "parallel=fsdp", "parallel.context=-1"],
            "error: model.attention=varlen does not support parallel.context=-1",
        ),
    ],
)
def test_the_plan_names_the_attention_or_refuses_it_in_one_line(device: str, words: list[str], expected: str) -> None:
    try:
        config = compose(words)
        found = describe_attention(config, device, config.parallel.context)
    except UserError as error:
        found = f"error: {error}"
        assert found.endswith(("use model.attention=auto", "or model.attention=sdpa"))
    assert found.startswith(expected)


@pytest.mark.parametrize(
    ("dtype", "is_masked", "key_heads"),
    [(torch.bfloat16, False, 2), (torch.bfloat16, True, 4), (torch.float32, False, 4), (torch.float32, True, 4)],
)
def test_gpu_kernel_for_shared_keys_never_materializes_scores(
    dtype: torch.dtype, is_masked: bool, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That for fp32 and for masks takes no shared keys: SDPA would fall back to one that holds all scores."""
    found: list[Any] = []

    def sdpa(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **_: Any) -> Tensor:
        found.append((k.shape[1], v.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    with FakeTensorMode():
        q, k, v = (torch.empty(2, heads, 8, 16, dtype=dtype, device="cuda") for heads in (4, 2, 2))
        attend(q, k, v, torch.ones(2, 1, 8, 8, dtype=torch.bool, device="cuda") if is_masked else None)
    assert found == [(key_heads, key_heads, key_heads == 2)]


def test_repeated_keys_equal_repeat_interleave() -> None:
    keys = heads(2, 3, 5, seed=1)
    assert attention._repeated(keys, 6).equal(keys.repeat_interleave(3, dim=1))


@pytest.mark.parametrize("soft_cap", [None, 20.0])
@pytest.mark.filterwarnings("error")
def test_flex_attention_in_a_compiled_block_is_one_graph_for_all_masks(
    soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; the graph is made as there, and run as it is."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None, raising=False)  # which refuses a backward on a CPU
    torch._dynamo.reset()
    graphs = CompileCounter()
    block = torch.compile(partial(attend, soft_cap=soft_cap), backend=graphs, dynamic=False, fullgraph=True)
    q, k, v = (heads(count, 256, 16, seed=count).float().requires_grad_() for count in (4, 2, 2))
    for document in (100, 60, 30):
        positions = torch.arange(256) % document
        blocks = blocks_from((torch.arange(256) - positions).expand(2, -1))
        rows = causal_mask(positions.expand(2, -1), 256, torch.device("cpu"))
        torch.testing.assert_close(block(q, k, v, blocks), attend(q, k, v, rows, soft_cap=soft_cap), rtol=0, atol=1e-5)
    assert graphs.frame_count == 1


def test_varlen_attention_in_a_compiled_block_is_one_graph_for_any_number_of_documents() -> None:
    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begins: torch.Tensor, *_: Any, **__: Any) -> Any:
        del k
        return q + v + begins.diff().sum()

    torch._dynamo.reset()
    graphs = CompileCounter()
    block = torch.compile(partial(attend_in_documents, scale=None, kernel=kernel), backend=graphs, dynamic=False)
    q, k, v = (heads(2, 256, 16, seed=seed).float() for seed in range(3))
    for document in (100, 60, 30, 256):
        positions = (torch.arange(256) % document).expand(2, -1)
        assert torch.equal(block(q, k, v, documents(positions, 256, None)), q + v + 512)
    assert graphs.frame_count == 1
