"""AdamW with state of 8 and 4 bits: near AdamW, with as many bytes as told, and on every layout the same codes."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # there is no public one

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.shard_specs import ShardSpec, Slice
from serried.trainer.optim.algorithms.quantized_adamw import QuantizedAdamW, check_columns
from serried.trainer.optim.optimizer import build_optimizer, take_step
from serried.trainer.optim.optimizer_state import state_bytes


def trained(optim: str, steps: int) -> list[torch.Tensor]:
    """A matrix and a vector after so many steps."""
    torch.manual_seed(1)
    named = {"matrix": nn.Parameter(torch.randn(5, 32)), "norm": nn.Parameter(torch.ones(8))}
    optimizer = build_optimizer(named.items(), compose([f"optim={optim}", "optim.lr=0.01"]).optim)
    for _ in range(steps):
        for parameter in named.values():
            parameter.grad = torch.randn_like(parameter)
        take_step(optimizer, torch.tensor(2.0), torch.zeros(()))
    return [each.detach() for each in named.values()]


@pytest.mark.parametrize(("optim", "nearness"), [("adamw8bit", 0.04), ("adamw4bit", 0.25)])
def test_updates_are_near_those_of_adamw(optim: str, nearness: float) -> None:
    before, ours, theirs = trained(optim, 0), trained(optim, 5), trained("adamw", 5)
    moved = (theirs[0] - before[0]).norm()
    assert 0 < (ours[0] - theirs[0]).norm() < nearness * moved
    assert ours[1].equal(theirs[1]), "vectors have plain AdamW"


def test_state_has_the_expected_bytes() -> None:
    for name, expected in (("adamw8bit", 2.25), ("adamw4bit", 1.25)):
        section = compose([f"optim={name}"]).optim
        assert [state_bytes(section, ndim=ndim).per_element for ndim in (2, 1)] == [expected, 8]


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_decode_to_the_precision_of_their_bits_and_encode_to_themselves(bits: int) -> None:
    matrix = nn.Parameter(torch.zeros(3, 64))
    optimizer = QuantizedAdamW(
        [{"params": [matrix], "name": "matrices", "weight_decay": 0.0}], bits=bits, lr=1.0, betas=(0.0, 0.0), eps=1e-8
    )
    matrix.grad = torch.randn(3, 64) * torch.tensor([[1e-6], [1.0], [0.0]])
    optimizer.step()
    state = dict(optimizer.state[matrix])
    mean = optimizer._read(state, "exp_avg")
    largest = matrix.grad.unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True).expand(-1, -1, 16).flatten(1)
    assert ((mean - matrix.grad).abs() <= largest * (0.035 if bits == 8 else 0.13)).all()
    codes = {key: value.clone() for key, value in state.items()}
    optimizer._write(state, "exp_avg", mean)
    assert all(value.equal(codes[key]) for key, value in state.items())


def test_tensors_without_rows_of_fp32_have_plain_adamw() -> None:
    named = {
        "channels_last": nn.Parameter(torch.ones(4, 16, 3, 16).to(memory_format=torch.channels_last)),
        "fp64": nn.Parameter(torch.ones(4, 16, dtype=torch.float64)),
    }
    optimizer = build_optimizer(named.items(), compose(["optim=adamw8bit", "optim.lr=0.1"]).optim)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    take_step(optimizer, torch.ones(()), torch.zeros(()))
    assert all((each < 0.95).all() for each in named.values())


def test_a_step_after_one_of_fake_tensors_moves_the_weights() -> None:
    for mode in (FakeTensorMode(), contextlib.nullcontext()):
        with mode:
            matrix = nn.Parameter(torch.ones(4, 16))
            optimizer = build_optimizer([("matrix", matrix)], compose(["optim=adamw8bit", "optim.lr=0.1"]).optim)
            matrix.grad = torch.ones_like(matrix)
            take_step(optimizer, torch.ones(()), torch.zeros(()))
    assert (matrix < 0.95).all()


def test_tensor_sharding_that_splits_quantized_blocks_is_refused_in_one_line() -> None:
    spec = ShardSpec("down.weight", (8, 48), (Slice(1, ("tensor",)),))
    layout = Layout("fsdp", tensor=2)
    with pytest.raises(
        UserError, match=r"tensor=2 divides down.weight into shards of 24 columns.*a multiple of 16; use"
    ):
        check_columns("adamw8bit", [spec], layout)
    check_columns("adamw8bit", [replace(spec, shape=(8, 64)), replace(spec, shape=(8, 40))], layout)
