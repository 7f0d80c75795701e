"""The model is Hugging Face's Llama: same weights, same logits, same loss, same file."""

import hashlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from serried.parallel.axes.model_axes import shard_specs
from serried.parallel.initialize import initialize, normal_rows
from serried.parallel.layout.local_shards import held_parameters
from serried.parallel.layout.mesh import Layout
from serried.parallel.plan import ParallelPlan
from serried.recipes.models.families.llama import Llama, Transformer
from serried.recipes.models.families.llama_config import LlamaSection
from serried.recipes.models.layers import lm_head as head
from serried.recipes.models.layers.lm_head import IGNORE, HeadTerms, LanguageModelHead, linear_cross_entropy_sum
from serried.recipes.models.layers.rope import RotaryEmbedding
from serried.recipes.models.layers.rope_config import Rope, RopeScaling

LLAMA31_SCALING = RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_sequence_length=64)


def section(**changes: object) -> LlamaSection:
    values = {
        "name": "small", "dim": 48, "layers": 3, "heads": 4, "kv_heads": 2, "hidden_dim": 80, "vocab_size": 131,
        "max_sequence_length": 512,
    }  # fmt: skip
    return LlamaSection(**{**values, **changes})  # type: ignore[arg-type]


def build(config: LlamaSection, seed: int = 0) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config, config.vocab_size or 0)
    model.to_empty(device="cpu")
    # Four times the usual spread, so that a wrong rotation or scale shows far above rounding.
    initialize(
        held_parameters([model], shard_specs(model, ParallelPlan(), Layout("single")), Layout("single")),
        lambda name: None if (std := Llama(config, 131).initial_std(name)) is None else 4 * std,
        seed,
    )
    return model


@pytest.mark.parametrize(
    ("kv_heads", "tied", "scaling", "head_dim"),
    [(4, False, None, 16), (2, True, LLAMA31_SCALING, None), (1, False, LLAMA31_SCALING, 16), (1, True, None, None)],
)
def test_logits_equal_hugging_face(
    kv_heads: int, tied: bool, scaling: RopeScaling | None, head_dim: int | None
) -> None:
    import transformers

    config = section(kv_heads=kv_heads, tie_embeddings=tied, rope_scaling=scaling, head_dim=head_dim)
    ours = build(config)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**Llama(config, 131).export_config(None), attn_implementation="eager")
    ).eval()
    state = {Llama(config, 131).export_name(name): parameter for name, parameter in ours.named_parameters()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if tied else [])
    tokens = torch.randint(131, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert expected.std() > 0.1, "a flat output would compare equal to anything"
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-5)


def test_rope_scaling_changes_the_output() -> None:
    tokens = torch.randint(131, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain, scaled = build(section())(tokens), build(section(rope_scaling=LLAMA31_SCALING))(tokens)
    assert (plain - scaled).abs().max() > 1e-2


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_equal_full_logits_cross_entropy(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_CHUNK_LOGITS", 1)
    monkeypatch.setattr(head, "_MINIMUM_CHUNK_TOKENS", 7)  # 60 tokens: eight chunks and a remainder
    model = build(section(tie_embeddings=tied))
    generator = torch.Generator().manual_seed(2)
    tokens, targets = torch.randint(131, (2, 2, 30), generator=generator)
    targets[0, 5:11] = IGNORE

    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORE)
    (expected * 0.37).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss = model(tokens, targets)
    (loss * 0.37).backward()

    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, targets), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_label_smoothing_and_z_loss_are_added_only_in_training(
    soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_CHUNK_LOGITS", 1)
    monkeypatch.setattr(head, "_MINIMUM_CHUNK_TOKENS", 7)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 15, 8, generator=generator, requires_grad=True)
    weight = torch.randn(19, 8, generator=generator, requires_grad=True)
    targets = torch.randint(19, (2, 15), generator=generator)
    targets[0, 3:6] = IGNORE
    projection = LanguageModelHead(8, 19, tied=True, soft_cap=soft_cap)
    projection.loss = partial(linear_cross_entropy_sum, terms=HeadTerms(label_smoothing=0.1, z_loss=0.02))

    logits = F.linear(hidden, weight)
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=0.1)
    expected = expected + 0.02 * logits.logsumexp(2)[targets != IGNORE].square().sum()
    found = projection(hidden, targets, weight)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(3 * loss, (hidden, weight)) for loss in (found, expected)]
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        torch.testing.assert_close(projection(hidden, targets, weight), plain)


@pytest.mark.parametrize("terms", [head.PLAIN, HeadTerms(label_smoothing=0.1, z_loss=0.02)], ids=["plain", "terms"])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_compiled_passes_over_logits_give_the_loss_and_gradients_of_eager_ones(
    dtype: torch.dtype, soft_cap: float | None, terms: HeadTerms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_CHUNK_LOGITS", 1)
    monkeypatch.setattr(head, "_MINIMUM_CHUNK_TOKENS", 4)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(24, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(19, 8, generator=generator, requires_grad=True)
    targets = torch.randint(19, (24,), generator=generator)
    targets[3:6] = IGNORE
    found = []
    torch._dynamo.reset()
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        for passes in (head.EAGER, head.compiled_passes()):
            loss = linear_cross_entropy_sum(hidden, weight, targets, None, soft_cap, terms, passes)
            found.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    # Two chunks at once: gradients of the weight are summed in another order, in bf16 within a chunk.
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    assert all((one - other).norm() <= bound * one.norm() for one, other in zip(*found, strict=True))


def test_compiled_passes_have_at_most_three_graphs_each_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_CHUNK_LOGITS", 1)
    monkeypatch.setattr(head, "_MINIMUM_CHUNK_TOKENS", 8)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
    passes, weight = head.compiled_passes(), torch.randn(19, 8, requires_grad=True)
    for tokens in (8, *range(1, 30)):
        hidden, targets = torch.randn(tokens, 8), torch.randint(19, (tokens,))
        found, expected = (linear_cross_entropy_sum(hidden, weight, targets, passes=each) for each in (passes, None))
        torch.testing.assert_close(found, expected)
    assert graphs.frame_count <= 6, "of both passes: the first length, one token, and any other"


def test_loss_of_masked_tokens_only_is_zero_with_zero_gradient() -> None:
    model = build(section())
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    loss = model(tokens, torch.full((1, 8), IGNORE))
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())


def test_head_gradient_of_fp16_does_not_overflow() -> None:
    """Where nearly all of 32,768 targets are one class, that row's gradient is a sum past fp16's largest, 65,504."""
    generator = torch.Generator().manual_seed(0)
    hidden = 3 + torch.randn(32768, 32, generator=generator) / 2
    weight = torch.randn(257, 32, generator=generator) / 50
    targets = torch.zeros(32768, dtype=torch.int64)
    targets[::100] = torch.randint(257, targets[::100].shape, generator=generator)

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        leaf = weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = linear_cross_entropy_sum(hidden.to(dtype), leaf, targets)
        loss.backward()
        assert leaf.grad is not None
        return leaf.grad

    expected, low = gradient(torch.float32), gradient(torch.float16)
    assert expected.abs().max() > 65504
    assert low.isfinite().all()
    assert (low - expected).norm() < 1e-4 * expected.norm()


def test_meta_model_allocates_nothing_and_plan_names_exist() -> None:
    with torch.device("meta"):
        model = Transformer(section(), 131)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())
    planned = [name for unit in model.parallel_plan().units for name in unit]
    assert len(planned) == len(set(planned))
    for name in planned:
        model.get_submodule(name)


def test_initial_weights_depend_only_on_name_seed_and_row() -> None:
    whole = normal_rows(3, "layers.0.weight", (5000, 700), 0, 5000)
    assert abs(whole.mean()) < 2e-3
    assert abs(whole.std() - 1) < 2e-3
    for first, rows in [(0, 1), (1666, 1667), (4999, 1), (1497, 1500), (5000, 0)]:
        assert torch.equal(normal_rows(3, "layers.0.weight", (5000, 700), first, rows), whole[first : first + rows])
    torch.set_num_threads(3)
    try:
        assert torch.equal(normal_rows(3, "layers.0.weight", (5000, 700), 1, 4998), whole[1:4999])
    finally:
        torch.set_num_threads(1)
    assert not torch.equal(normal_rows(4, "layers.0.weight", (5000, 700), 0, 1), whole[:1])
    assert not torch.equal(normal_rows(3, "layers.1.weight", (5000, 700), 0, 1), whole[:1])
    # Rows past the first block come from another stream, not from the first one again.
    assert not torch.equal(whole[: 2**20 // 700][:5], whole[2**20 // 700 :][:5])


@pytest.mark.parametrize(
    ("name", "shape", "first_row", "rows", "digest"),
    [
        ("embed_tokens.weight", (257, 8), 0, 257, "ffef8438357ff2e77c242c29f6675a6b"),
        # Rows 1496 to 1498: the last of the first block and the first of the second.
        ("layers.0.mlp.up_proj.weight", (5000, 700), 1496, 3, "5b774d897cc0bfb224092c939958dae4"),
    ],
)
def test_initial_weights_have_the_recorded_bits(
    name: str, shape: tuple[int, ...], first_row: int, rows: int, digest: str
) -> None:
    """Should numpy change its stream, old seeds give other weights: then say so to users, and renew the digests."""
    weights = normal_rows(2, name, shape, first_row, rows)
    assert weights.abs().max() < 3.65, "no number here comes by way of the C library's logarithm"
    assert hashlib.blake2b(weights.numpy().tobytes(), digest_size=16).hexdigest() == digest


def test_rotary_tables_are_shared_and_sliced_to_any_length() -> None:
    rotary, rope, device = RotaryEmbedding(16), Rope(5e5, LLAMA31_SCALING), torch.device("cpu")
    fresh = {length: RotaryEmbedding(16).table(rope, length, device) for length in (1, 7, 40, 512)}
    for length in (7, 40, 1, 40, 512, 7):
        for table, expected in zip(rotary.table(rope, length, device), fresh[length], strict=True):
            assert torch.equal(table, expected)
            assert table.is_contiguous()
    assert [cos.shape[0] for cos, _ in rotary.tables.values()] == [512]
