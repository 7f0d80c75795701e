"""Bytes that a step sends along the axes of FSDP2 and of a pipeline; the other axes have theirs in their own tests."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from serried.configs.compose import compose
from serried.parallel.layout.mesh import resolve_layout
from serried.parallel.parallelize import parallelize
from serried.parallel.plan import LossTerms
from serried.parallel.precision.float8_int8 import Float8
from serried.parallel.precision.low_precision_linear import choose_linear, set_product
from serried.recipes.models.families.llama import Transformer
from serried.recipes.text.causal_lm import CausalLM
from testing.rank_pool import Cluster
from testing.runs import overrides, train_small
from testing.wire_bytes import Wire

MODEL = ["model.dim=64", "model.layers=4", "model.heads=4", "model.kv_heads=2", "model.hidden_dim=128"]


@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.parametrize(("dtype", "width"), [(None, 4), (torch.bfloat16, 2)])
def test_fsdp_gathers_units_as_often_as_needed_and_reduces_once_in_fp32(
    frees: bool, dtype: torch.dtype | None, width: int
) -> None:
    """ZeRO-3 gathers every unit twice, but the last, where backward starts, once; ZeRO-2 each once."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        how = ["parallel=fsdp", "parallel.shard=4", f"parallel.reshard_after_forward={str(frees).lower()}"]
        config = compose([*how, *MODEL, "model.vocab_size=256", "model.tie_embeddings=false"])
        with torch.device("meta"):
            model = Transformer(config.model, 256)
        whole = sum(parameter.numel() for parameter in model.parameters())
        last = sum(parameter.numel() for each in (model.norm, model.lm_head) for parameter in each.parameters())
        parallel = parallelize(
            model, model.parallel_plan(), lambda _: 0.02, seed=1, layout=resolve_layout(config.parallel, 4),
            section=config.parallel, low_dtype=dtype, device=torch.device("cpu"),
        )  # fmt: skip
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        with Wire() as wire:
            parallel.model(tokens, targets=tokens).backward()
    finally:
        dist.destroy_process_group()
    gathered = 2 * whole - last if frees else whole
    assert wire.bytes == {"allgather_base": gathered * width * 3 // 4, "reduce_scatter_base": whole * 4 * 3 // 4}


def test_weights_of_float8_products_are_gathered_as_one_byte_each() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        how = ["parallel=fsdp", "parallel.shard=4", "parallel.reshard_after_forward=false"]
        config = compose([*how, *MODEL, "model.vocab_size=256", "model.tie_embeddings=false"])
        with torch.device("meta"):
            model = Transformer(config.model, 256)
        plan, layout = model.parallel_plan(), resolve_layout(config.parallel, 4)
        names = choose_linear(model, plan, layout, rows=16, columns=16).names
        set_product(model, names, Float8("tensorwise", gathers=True))
        in_float8 = sum(model.get_parameter(f"{name}.weight").numel() for name in names)
        whole = sum(parameter.numel() for parameter in model.parameters())
        parallel = parallelize(
            model, plan, lambda _: 0.02, seed=1, layout=layout, section=config.parallel, low_dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )  # fmt: skip
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        with Wire() as wire:
            parallel.model(tokens, targets=tokens).backward()
    finally:
        dist.destroy_process_group()
    assert len(names) == 4 * 7
    assert wire.bytes == {
        "allgather_base": (2 * whole - in_float8) * 3 // 4,
        "allreduce": 2 * 4 * len(names) * 3 // 4,
        "reduce_scatter_base": whole * 4 * 3 // 4,
    }


class Reduced(TorchDispatchMode):
    """Remembers the gradients that units reduced, as long as they are held."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__.strip("_") == "reduce_scatter_base":
            self.inputs.append(weakref.ref(args[1]))
        return function(*args, **(kwargs or {}))


def test_gradients_reduced_after_each_micro_batch_are_not_held_until_the_next() -> None:
    """FSDP2 keeps the last one until a backward that it is told is the last of the step."""
    held: list[int] = []
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        how = ["parallel=fsdp", "parallel.shard=4", "parallel.sync_every_micro_batch=true"]
        config = compose([*how, *MODEL, "model.vocab_size=256", "model.tie_embeddings=false"])
        with torch.device("meta"):
            model = Transformer(config.model, 256)
        parallel = parallelize(
            model, model.parallel_plan(), lambda _: 0.02, seed=1, layout=resolve_layout(config.parallel, 4),
            section=config.parallel, low_dtype=None, device=torch.device("cpu"),
        )  # fmt: skip

        class Counting(CausalLM):
            def loss(self, model: Any, batch: Any) -> LossTerms:
                held.append(sum(each() is not None for each in reduced.inputs))
                return LossTerms(model(batch, targets=batch), batch.numel())

        with Reduced() as reduced:
            parallel.forward_backward([torch.zeros(1, 16, dtype=torch.int64)] * 3, Counting(), 1.0)
    finally:
        dist.destroy_process_group()
    assert len(reduced.inputs) == 3 * len(model.parallel_plan().units)
    assert held == [0, 0, 0]


class Messages(Wire):
    """Counts messages from rank to rank only."""

    def _sent(self, name: str, args: Any) -> int:
        return sum(each.numel() * each.element_size() for each in args[0]) if name == "send" else 0


def bytes_of_messages(argv: list[str]) -> int:
    with Messages() as wire:
        train_small(argv)
    return wire.bytes["send"]


@pytest.mark.parametrize("more", [[], pytest.param(["parallel.tensor=2"], marks=pytest.mark.slow)])
def test_pipeline_sends_activations_and_gradients_once_per_micro_batch(
    more: list[str], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    tensor = 2 if more else 1

    def sent(steps: int) -> int:
        argv = overrides(
            text, tmp_path / str(steps), "parallel=fsdp", "parallel.pipeline=2", *more, "trainer.global_batch=12",
            "trainer.micro_batch=3", f"trainer.steps={steps}", "checkpoint.every=0",
        )  # fmt: skip
        answers = cluster.run(2 * tensor, "tests.data.test_bytes:bytes_of_messages", argv=argv)
        return sum(int(answer.value) for answer in answers)

    micro_batches, border = 4, 3 * 32 * 32 * 4  # samples x tokens x dim x bytes
    # Each of the tensor ranks sends its part of the sequence. The first step sends more, to learn the shapes.
    assert sent(3) - sent(2) == micro_batches * 2 * border
