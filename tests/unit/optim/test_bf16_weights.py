"""Weights in bf16, rounded stochastically: unbiased, the same on every layout, and with half the bytes."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.parallel.layout.local_shards import HeldTensor, local
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.shard_specs import ShardSpec, Slice
from serried.parallel.optim import stochastic_rounding as rounding
from serried.parallel.optim.stochastic_rounding import Rounding
from serried.parallel.parallelize import parallelize
from serried.parallel.plan import ParallelPlan
from serried.parallel.sync.gradient_sync import Summed
from serried.recipes.data.samples.token_dataset import Batch
from serried.recipes.models.families.llama import Transformer
from serried.recipes.text.causal_lm import CausalLM
from serried.trainer.optim.optimizer import build_optimizer, check_optimizer, take_step

SEED = 3
SHAPE = (4, 10, 24)


def rounded(values: Tensor, step: int, *, spec: ShardSpec | None = None, rank: int = 0, seed: int = SEED) -> Tensor:
    """What a rank rounds ``values``, its part of a parameter, to; by itself if there is no ``spec``."""
    layout = Layout("fsdp", shard=2, tensor=3) if spec else Layout("single")
    spec = spec or ShardSpec("weight", tuple(values.shape))
    parameter = nn.Parameter(values)
    rounds = Rounding([HeldTensor(spec.name, parameter, spec, spec.box(layout, layout.coordinates(rank)))], seed)
    result = torch.empty_like(values, dtype=torch.bfloat16)
    for place in rounds.pieces(parameter):
        result[place] = rounds.round(values[place].clone(), parameter, place, torch.tensor(float(step)))
    return result


def test_stochastic_rounding_is_unbiased_and_returns_a_neighbour() -> None:
    values = torch.tensor([1.001, -1.001, 0.3, 1e-20, -700.1]).repeat(200, 1)
    sums, steps = torch.zeros(values.shape, dtype=torch.float64), 50
    for step in range(steps):
        result = rounded(values, step)
        assert ((result.float() - values).abs() < values.abs() * 2**-7).all()
        sums += result
    below = (values.view(torch.int32) & -65536).view(torch.float32)
    above = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32)
    share = (values - below) / (above - below)
    error = (share * (1 - share) / (steps * len(values))).sqrt() * (above - below).abs()  # of the mean
    assert ((sums.mean(0) / steps - values[0]).abs() < 4 * error[0]).all()
    exact = torch.tensor([[0.0, -0.0, 1.5, -(2.0**-130), float("inf")]])
    assert rounded(exact, 1).view(torch.int16).equal(exact.bfloat16().view(torch.int16))


def test_rounding_of_shards_equals_rounding_of_the_full_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_ON_A_CPU", 50)  # several pieces, also within the first dim
    values = torch.randn(SHAPE)
    whole = rounded(values, 5)
    spec = ShardSpec("weight", SHAPE, (Slice(2, ("tensor",)), Slice(1, ("shard", "context"))))
    layout = Layout("fsdp", shard=2, tensor=3)
    for rank in range(layout.world):
        place = spec.box(layout, layout.coordinates(rank)).indices()
        assert rounded(values[place].contiguous(), 5, spec=spec, rank=rank).equal(whole[place])
    for other in (rounded(values, 6), rounded(values, 5, seed=4), rounded(values, 5, spec=ShardSpec("bias", SHAPE))):
        assert 0.4 < (other != whole).float().mean() * 1.5 < 0.6  # of two independent roundings a third differ


def test_random_bits_equal_the_published_hash() -> None:
    def mixed(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    def lowbias32(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        return (x ^ x >> 15) * 0x846CA68B % 2**32

    odd, key = 0x9E3779B97F4A7C15, rounding._key(SEED, "weight")
    row, column, step = 2 * SHAPE[1] + 7, 19, 5
    of_row = mixed((row * odd + mixed((step * odd + key) % 2**64)) % 2**64)
    value = torch.randn(SHAPE)
    noise = lowbias32((of_row >> 32) ^ column) >> 16
    expected = value[2, 7, 19].view(torch.int32) + noise & -65536
    assert rounded(value, step)[2, 7, 19].float().view(torch.int32) == expected


def trained(optim: str, dtype: torch.dtype, steps: int, lr: float) -> tuple[Tensor, Tensor]:
    """Weights before and after steps with the gradients of a quadratic function."""
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(64, 64).to(dtype))
    before = weight.detach().clone().float()
    optimizer = build_optimizer([("weight", weight)], compose([f"optim={optim}", f"optim.lr={lr}"]).optim)
    for _ in range(steps):
        weight.grad = weight.detach().clone()
        take_step(optimizer, torch.ones(()), torch.zeros(()))
    return before, weight.detach().float()


def test_small_updates_change_weights_unlike_with_plain_rounding() -> None:
    steps, lr = 40, 2e-5  # a change of 1 is less than a hundredth of what bf16 resolves there
    large = trained("adamw", torch.float32, 0, lr)[0].abs() > 0.25
    before, exact = trained("adamw", torch.float32, steps, lr)
    start, plain = trained("adamw", torch.bfloat16, steps, lr)
    assert plain[large].equal(start[large])
    start, ours = trained("adamw_bf16", torch.bfloat16, steps, lr)
    moved, wanted = (ours - start)[large] * start[large].sign(), (exact - before)[large] * before[large].sign()
    assert moved.mean().item() == pytest.approx(wanted.mean().item(), rel=0.15)


def test_state_is_fp32_and_updates_are_near_those_of_adamw() -> None:
    _, ours = trained("adamw_bf16", torch.bfloat16, 20, 0.05)
    before, exact = trained("adamw", torch.float32, 20, 0.05)
    assert (ours - exact).norm() < 0.05 * (exact - before).norm()


def test_gradients_reduced_after_each_micro_batch_add_up_in_fp32() -> None:
    """Each has 8 bits, and 7 of them need more."""
    small = ["model.dim=16", "model.layers=1", "model.heads=2", "model.kv_heads=2", "model.hidden_dim=16"]
    config = compose(["parallel=fsdp", "parallel.sync_every_micro_batch=true", *small])
    found = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.device("meta"):
            model = Transformer(config.model, 16)
        parallel = parallelize(
            model, model.parallel_plan(), lambda _: 0.2, seed=1, layout=Layout("fsdp"), section=config.parallel,
            low_dtype=torch.bfloat16, trained_dtype=torch.bfloat16, device=torch.device("cpu"),
        )  # fmt: skip
        tokens = torch.arange(16).view(1, 16)
        batch = Batch(tokens, tokens.roll(-1, 1), torch.zeros(1), None)
        for count in (1, 7):
            parallel.forward_backward([batch] * count, CausalLM(config), 1.0)
            found.append([local(held.tensor.grad) for held in parallel.parameters if held.tensor.grad is not None])
            for held in parallel.parameters:
                held.tensor.grad = None
    finally:
        dist.destroy_process_group()
    for one, seven in zip(*found, strict=True):
        assert seven.dtype == torch.float32
        torch.testing.assert_close(seven, 7 * one, rtol=1e-6, atol=0)


def test_parameter_without_a_gradient_under_ddp_is_refused_in_one_line() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sync = Summed(model)
        with sync.during(is_last=False):
            sum(model[name](torch.ones(2)).sum() for name in model).backward()
        with pytest.raises(UserError, match=r"does not depend on unused\.weight"), sync.during(is_last=True):
            model["used"](torch.ones(2)).sum().backward()
    finally:
        dist.destroy_process_group()


def test_model_with_other_dtypes_is_refused_in_one_line() -> None:
    chosen = compose(["optim=adamw_bf16", "precision=bf16"]).optim
    with pytest.raises(UserError, match=r"stores weights in bf16, but Linear may compute in other dtypes.*optim=adamw"):
        check_optimizer(chosen, nn.Linear(2, 2), ParallelPlan(), Layout("single"))
