"""Mixtures of experts: the arithmetic of routers and experts; test_families.py compares whole models."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.parallel.axes.model_axes import shard_specs
from serried.parallel.initialize import initialize
from serried.parallel.layout.local_shards import held_parameters
from serried.parallel.layout.mesh import Layout
from serried.parallel.lora import attach_to_experts, without_adapters
from serried.parallel.plan import ParallelPlan
from serried.recipes.models.families import moe
from serried.recipes.models.families.moe import Experts, MixtureOfExperts, MoE, Router, can_group
from serried.recipes.models.families.moe_config import MoESection

GLM = {"shared_experts": 1, "dense_layers": 1, "qk_norm": True, "routed_scale": 1.5}


def section(**changes: Any) -> MoESection:
    values: dict[str, Any] = {
        "name": "small", "family": "glm4_moe", "dim": 48, "layers": 3, "heads": 4, "kv_heads": 2, "hidden_dim": 80,
        "experts": 6, "experts_per_token": 2, "expert_hidden_dim": 36, "vocab_size": 131, "max_sequence_length": 512,
    }  # fmt: skip
    return MoESection(**{**values, **changes})


def build(config: MoESection) -> torch.nn.Module:
    family = MoE(config, config.vocab_size or 0)
    model = family.build()
    buffers = dict(model.named_buffers())
    model.to_empty(device="cpu")

    def std(name: str) -> float | None:  # wide, so that a wrong choice of experts shows far above rounding
        usual = family.initial_std(name)
        return 0.1 if usual == 0 else None if usual is None else 4 * usual

    specs = shard_specs(model, ParallelPlan(), Layout("single"))
    initialize(held_parameters([model], specs, Layout("single")), std, seed=0)
    for number, (name, buffer) in enumerate(buffers.items()):
        torch.nn.init.normal_(buffer, std=0.1, generator=torch.Generator().manual_seed(number))
        model.get_buffer(name).copy_(buffer)
    return model


@pytest.mark.parametrize("width", [36, 35])
def test_experts_grouped_and_looped_equal_a_loop_over_tokens(width: int) -> None:
    config = section(expert_hidden_dim=width)  # rows of 140 bytes are refused by grouped_mm
    experts = Experts(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    rows = torch.randn(20, 48, generator=generator, requires_grad=True)
    counts = torch.tensor([5, 0, 7, 1, 0, 7])

    found = experts(rows, counts)
    (found * rows.detach().cos()).sum().backward()
    gradients = [each.grad.clone() for each in (rows, *experts.parameters())]
    rows.grad = None
    experts.zero_grad()
    gate, up, down = experts.gate_proj, experts.up_proj, experts.down_proj
    expected = torch.stack(
        [
            down[expert] @ (torch.nn.functional.silu(gate[expert] @ row) * (up[expert] @ row))
            for row, expert in zip(rows, torch.arange(6).repeat_interleave(counts), strict=True)
        ]
    )
    torch.testing.assert_close(found, expected)
    (expected * rows.detach().cos()).sum().backward()
    for each, gradient in zip((rows, *experts.parameters()), gradients, strict=True):
        torch.testing.assert_close(gradient, each.grad)


def test_router_counts_on_request_and_prefers_the_first_of_equal_experts() -> None:
    router = Router(section(experts_per_token=3))
    torch.nn.init.zeros_(router.weight)
    chosen, weights, counts = router(torch.randn(5, 48))
    assert chosen.tolist() == [[0, 1, 2]] * 5
    assert counts.tolist() == [5, 5, 5, 0, 0, 0]
    assert weights.sum(1).tolist() == pytest.approx([1] * 5)
    assert router.loads is None
    router.is_counting = True
    router.e_score_correction_bias += torch.tensor([0, 0, 0, 0, 1, 0])
    router(torch.randn(4, 48))
    router(torch.randn(2, 48))
    assert router.loads.tolist() == [6, 6, 0, 0, 6, 0]


def test_gradients_of_a_router_in_fp16_may_be_larger_than_fp16_holds() -> None:
    torch.manual_seed(1)
    router = Router(section())
    torch.nn.init.normal_(router.weight)
    rows, gradients = torch.randn(5, 48).half(), []
    for each in (rows.float(), rows):
        _, weights, _ = router(each)
        (weights[:, 0].sum() * 1e8).backward()
        gradients.append(router.weight.grad)
        router.weight.grad = None
    assert gradients[0].abs().max() > torch.finfo(torch.float16).max
    torch.testing.assert_close(gradients[1], gradients[0])


def test_gradients_of_a_mixture_equal_a_dense_sum_over_all_experts() -> None:
    model = build(section(**GLM))
    mixture = model.get_submodule("layers.1.mlp")
    assert isinstance(mixture, MixtureOfExperts)
    x = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(3), requires_grad=True)

    def dense(x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chosen, weights, _ = mixture.gate(tokens)
        table = torch.zeros(14, 6).scatter(1, chosen, weights)
        experts = mixture.experts
        hidden = torch.nn.functional.silu(torch.einsum("td,eid->tei", tokens, experts.gate_proj))
        hidden = hidden * torch.einsum("td,eid->tei", tokens, experts.up_proj)
        routed = torch.einsum("tei,edi,te->td", hidden, experts.down_proj, table)
        return routed.view(x.shape) + mixture.shared_experts(x)

    gradients = []
    for forward in (mixture, dense):
        x.grad = None
        mixture.zero_grad()
        forward(x).cos().sum().backward()
        gradients.append([each.grad.clone() for each in (x, *mixture.parameters())])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"experts_per_token": 7}, "model.experts_per_token=7 exceeds model.experts=6; use model.experts_per_token=6"),
        ({"dense_layers": 4}, "model.dense_layers=4 exceeds model.layers=3; use model.dense_layers=2"),
        ({"rotary_fraction": 0.3}, "use model.rotary_fraction=1"),
        ({"expert_groups": 4}, "model.expert_groups=4 does not divide model.experts=6 into groups of two or more; use"),
        ({"expert_groups": 6}, "model.expert_groups=6 does not divide model.experts=6 into groups of two or more; use"),
        (
            {"expert_groups": 3, "experts_per_token": 3},
            "model.groups_per_token=1 of model.expert_groups=3 does not fit model.experts_per_token=3; use "
            "model.groups_per_token=3",
        ),
        ({"family": "qwen3_moe"}, "use model.qk_norm=true, or model.family=glm4_moe"),
        ({"family": "mixtral", "shared_experts": 1}, "use model.shared_experts=0, or model.family=glm4_moe"),
    ],
)
def test_sizes_that_do_not_fit_are_reported_with_a_value_that_does(changes: dict[str, Any], answer: str) -> None:
    with pytest.raises(ValidationError, match=answer):
        section(**changes)


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        (
            "model.kv_heads=64",
            "model.kv_heads=64 with model.family=deepseek_v3, where each of model.heads=128 has its own keys and "
            "values; use model.kv_heads=128",
        ),
        ("model.head_dim=128", "model.plain_head_dim=128 and model.rotary_head_dim=64; use model.head_dim=null"),
        ("model.value_head_dim=256", "exceeds the width of keys, 192; use model.value_head_dim=192"),
        ("model.rotary_fraction=0.5", "cannot be expressed in checkpoints of model.family=deepseek_v3"),
    ],
)
def test_sizes_that_do_not_fit_latent_attention_are_refused(word: str, answer: str) -> None:
    with pytest.raises(UserError, match=answer):
        compose(["model=deepseek_v3", "data.tokenizer=bytes", word])


def test_glm45_air_has_its_published_size() -> None:
    config = compose(["recipe=glm45_air"]).model
    family = MoE(config, config.vocab_size or 0)
    count = sum(parameter.numel() for parameter in family.build().parameters())
    assert f"{count:,}" == "106,852,245,504"
    assert f"{family.active_parameters(count):,}" == "13,424,123,904"


def test_router_balances_experts_only_after_accepted_steps() -> None:
    router = Router(section(balance_rate=0.5))
    loads = torch.tensor([9, 3, 4, 5, 4, 5], dtype=torch.float64)  # 5 on average
    router.balance(loads, torch.tensor(False))
    assert router.e_score_correction_bias.tolist() == [0] * 6
    router.balance(loads, torch.tensor(True))
    assert router.e_score_correction_bias.tolist() == [-0.5, 0.5, 0.5, 0, 0.5, 0]


@pytest.mark.parametrize("rank", [4, 3])  # rows of 12 bytes are refused by grouped_mm
def test_experts_with_adapters_equal_experts_with_changed_matrices(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    adapted = Experts(section())
    attach_to_experts(adapted, "gate_up_proj", rank, 0.5, ("gate_proj", "up_proj"), is_transposed=False)
    attach_to_experts(adapted, "down_proj", rank, 2.0, ("down_proj",), is_transposed=False)
    for parameter in adapted.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    plain, changed = Experts(section()), Experts(section())
    with torch.no_grad():
        for name in ("gate_proj", "up_proj", "down_proj"):
            plain.get_parameter(name).copy_(adapted.get_parameter(name))
            changed.get_parameter(name).copy_(adapted.get_parameter(name))
        gate, up = (adapted.gate_up_proj_lora_B @ adapted.gate_up_proj_lora_A).chunk(2, dim=1)
        changed.gate_proj += 0.5 * gate
        changed.up_proj += 0.5 * up
        changed.down_proj += 2.0 * adapted.down_proj_lora_B @ adapted.down_proj_lora_A
    rows, counts = torch.randn(20, 48, generator=generator), torch.tensor([5, 0, 7, 1, 0, 7])
    torch.testing.assert_close(adapted(rows, counts), changed(rows, counts), atol=1e-5, rtol=1e-5)
    with without_adapters(adapted):
        assert adapted(rows, counts).equal(plain(rows, counts))
    assert not adapted(rows, counts).allclose(plain(rows, counts), atol=0.1)


@pytest.mark.parametrize(
    ("capability", "rows", "dtype", "is_grouped"),
    [
        ((9, 0), 100, torch.bfloat16, True),
        ((8, 0), 100, torch.bfloat16, True),
        ((7, 5), 100, torch.bfloat16, False),
        ((10, 0), 100, torch.bfloat16, True),
        ((9, 0), 2**31 // 64, torch.bfloat16, False),  # its offsets have 32 bits
        ((9, 0), 100, torch.float32, False),
    ],
)
def test_grouped_gpu_products_are_used_only_where_they_are_correct(
    capability: tuple[int, int], rows: int, dtype: torch.dtype, is_grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        inputs, weight = (torch.empty(size, dtype=dtype, device="cuda") for size in ((rows, 64), (4, 32, 64)))
        assert can_group(inputs, weight) == is_grouped


class UnwrittenGradients(torch.autograd.Function):
    """``_grouped`` with a kernel that does not write the gradient of an expert without tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, offsets = ctx.saved_tensors
        counts = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
        of_weight = torch.full_like(weight, torch.nan)
        for expert, (ours, theirs) in enumerate(zip(grad.split(counts), rows.split(counts), strict=True)):
            if len(ours):
                of_weight[expert] = ours.T @ theirs
        return F.grouped_mm(grad, weight, offs=offsets), of_weight, None


def test_gradient_that_a_kernel_leaves_unwritten_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Blackwell. Experts 1 and 3 have no tokens; all others have the gradients of a kernel that is right."""
    config = section()
    rows = torch.randn(12, config.dim)
    counts = torch.zeros(config.experts, dtype=torch.int64)
    counts[0], counts[2] = 7, 5
    found = []
    for is_blackwell in (False, True):
        monkeypatch.setattr(moe, "_leaves_gradients_unwritten", lambda _, answer=is_blackwell: answer)
        if is_blackwell:
            monkeypatch.setattr(moe, "_grouped", UnwrittenGradients.apply)
        torch.manual_seed(1)
        experts = Experts(config)
        for parameter in experts.parameters():
            nn.init.normal_(parameter)
        inputs = rows.clone().requires_grad_()
        experts(inputs, counts).square().sum().backward()
        found.append([inputs.grad, *(parameter.grad for parameter in experts.parameters())])
    assert all(found[0][1][expert].count_nonzero() == 0 for expert in (1, 3))
    for expected, given in zip(*found, strict=True):
        torch.testing.assert_close(given, expected)
