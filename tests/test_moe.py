"""Mixture-of-experts models are Hugging Face's: same weights, same logits, same config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from serried.configs.compose import compose
from serried.configs.families import MoESection
from serried.configs.schema import ParallelSection
from serried.parallel.apply import parallelize
from serried.parallel.axes import shard_specs
from serried.parallel.held import held_parameters
from serried.parallel.initialize import initialize
from serried.parallel.mesh import Layout
from serried.parallel.plan import ParallelPlan
from serried.recipes.models.moe import (
    Experts,
    MixtureOfExperts,
    MoE,
    Router,
    can_group,
)
from serried.trainer.checkpoint.state import load_weights

GLM = {
    "shared_experts": 1, "dense_layers": 1, "attention_bias": True, "rotary_fraction": 0.5, "qk_norm": True,
    "routed_scale": 1.5,
}  # fmt: skip
QWEN = {"family": "qwen3_moe", "qk_norm": True, "dense_layers": 1, "normalize_weights": False}


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


def exported(config: MoESection, model: torch.nn.Module) -> dict[str, Tensor]:
    state = {}
    for name, tensor in model.state_dict().items():
        names = MoE(config, 131).checkpoint_names(name)
        state |= {names[0]: tensor} if len(names) == 1 else dict(zip(names, tensor, strict=True))
    return state


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(GLM, id="glm4_moe"),
        pytest.param({"shared_experts": 2, "normalize_weights": False, "tie_embeddings": True}, id="glm4_moe, plain"),
        pytest.param(QWEN, id="qwen3_moe"),
        pytest.param({"family": "mixtral"}, id="mixtral"),
    ],
)
def test_logits_and_config_equal_hugging_face(changes: dict[str, Any], tmp_path: Any) -> None:
    import transformers
    from safetensors.torch import save_file

    config = section(**changes)
    ours = build(config)
    described = MoE(config, 131).export_config(None)
    (tmp_path / "config.json").write_text(json.dumps(described))
    state = {name: tensor.contiguous() for name, tensor in exported(config, ours).items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    theirs, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loaded
    tokens = torch.randint(131, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
        assert expected.std() > 0.1, "a flat output would compare equal to anything"
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-5)

    for description in (described, theirs.config.to_dict()):
        read = section(family=config.family, **MoESection.keys_from(description))
        different = {key for key, value in read.model_dump().items() if getattr(config, key) != value}
        assert different <= {"head_dim", *(["hidden_dim"] if config.family == "mixtral" else [])}  # 12 = 48 / 4


def test_weights_of_glm_with_a_layer_for_speculative_decoding_are_read(tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file, save_file

    sizes = {
        "vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 12,
        "num_key_value_heads": 2, "intermediate_size": 40, "num_experts_per_tok": 2, "initializer_range": 0.2,
        "max_position_embeddings": 256,
    }  # fmt: skip
    own: dict[str, Any] = {"n_routed_experts": 6, "moe_intermediate_size": 36, "use_qk_norm": True}
    config = transformers.AutoConfig.for_model("glm4_moe", **sizes, **own)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path)
    drafts = {f"model.layers.3.{each}.weight": torch.ones(2) for each in ("eh_proj", "input_layernorm")}
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | drafts, file, {"format": "pt"})
    found = json.loads((tmp_path / "config.json").read_text())
    family = MoE(MoESection(name="glm", family="glm4_moe", **MoESection.keys_from(found)), 131)
    model, single = family.build(), ParallelSection(strategy="single")
    ours = parallelize(
        model, family.parallel_plan(model), None,
        seed=0, layout=Layout("single"), section=single, low_dtype=None, device=torch.device("cpu"),
    )  # fmt: skip
    load_weights(tmp_path, ours, family.exported)
    tokens = torch.randint(131, (2, 50))
    with torch.no_grad():
        torch.testing.assert_close(ours.module(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


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
    router = Router(section())
    torch.nn.init.normal_(router.weight)
    rows, gradients = torch.randn(5, 48).half(), []
    for each in (rows.float(), rows):
        _, weights, _ = router(each)
        (weights[:, 0].sum() * 1e7).backward()
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
        ({"family": "qwen3_moe"}, "use model.qk_norm=true, or model.family=glm4_moe"),
        ({"family": "mixtral", "shared_experts": 1}, "use model.shared_experts=0, or model.family=glm4_moe"),
    ],
)
def test_sizes_that_do_not_fit_are_reported_with_a_value_that_does(changes: dict[str, Any], answer: str) -> None:
    with pytest.raises(ValidationError, match=answer):
        section(**changes)


def test_glm45_air_has_its_published_size() -> None:
    config = compose(["recipe=glm45_air"]).model
    family = MoE(config, config.vocab_size or 0)
    count = sum(parameter.numel() for parameter in family.build().parameters())
    assert f"{count:,}" == "106,852,245,504"
    assert f"{family.active_parameters(count):,}" == "13,424,123,904"


def test_router_balances_towards_experts_with_fewer_tokens_after_accepted_steps_alone() -> None:
    router = Router(section(balance_rate=0.5))
    loads = torch.tensor([9, 3, 4, 5, 4, 5], dtype=torch.float64)  # 5 on average
    router.balance(loads, torch.tensor(False))
    assert router.e_score_correction_bias.tolist() == [0] * 6
    router.balance(loads, torch.tensor(True))
    assert router.e_score_correction_bias.tolist() == [-0.5, 0.5, 0.5, 0, 0.5, 0]


@pytest.mark.parametrize(
    ("capability", "rows", "dtype", "is_grouped"),
    [
        ((9, 0), 100, torch.bfloat16, True),
        ((8, 0), 100, torch.bfloat16, True),
        ((7, 5), 100, torch.bfloat16, False),
        ((10, 0), 100, torch.bfloat16, False),  # whose kernel leaves gradients of experts without tokens unwritten
        ((9, 0), 2**31 // 64, torch.bfloat16, False),  # its offsets have 32 bits
        ((9, 0), 100, torch.float32, False),
    ],
)
def test_grouped_products_of_a_gpu_are_used_where_they_are_right(
    capability: tuple[int, int], rows: int, dtype: torch.dtype, is_grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        inputs, weight = (torch.empty(size, dtype=dtype, device="cuda") for size in ((rows, 64), (4, 32, 64)))
        assert can_group(inputs, weight) == is_grouped
