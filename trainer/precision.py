"""Precision of matrix products, and fp16 loss scaling that is identical on all ranks."""

from functools import partial

import torch
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.schema.registry import takes
from serried.configs.schema.sections import PrecisionSection, RunConfig
from serried.parallel.layout.mesh import Layout
from serried.parallel.parallelize import gathered_type
from serried.parallel.plan import ParallelPlan
from serried.parallel.precision.float8_all_gather import can_gather
from serried.parallel.precision.float8_int8 import MULTIPLE, Float8, Int8, check_eight_bits, is_eight_bits
from serried.parallel.precision.low_precision_linear import (
    Chosen,
    Product,
    check_torchao,
    choose_linear,
    product_of_torchao,
    set_product,
)
from serried.parallel.precision.quantize_aware import FakeQuantized, quantized_layers

LOW_DTYPES: dict[str, torch.dtype | None] = {
    "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16, "int8": torch.bfloat16,
}  # fmt: skip
"""Dtype of all or most matrix products by precision. None means fp32."""


def trained_type(config: RunConfig) -> torch.dtype | None:
    """Return the dtype of trained weights if the optimizer rounds them, else None for fp32."""
    return torch.bfloat16 if takes(config.optim, "rounding") else None


def frozen_type(config: RunConfig, plan: ParallelPlan) -> torch.dtype | None:
    """Return the dtype of frozen weights, such as a base model or a teacher. None means fp32.

    This is the low-precision dtype if the model computes in no other dtype.
    """
    if trained_type(config):
        return trained_type(config)
    if config.adapter.method == "none" and not config.task.has_teacher:
        return None
    return gathered_type(plan, LOW_DTYPES[config.precision.name])


def chosen_layers(config: RunConfig, model: nn.Module, plan: ParallelPlan, layout: Layout) -> Chosen | None:
    """Return the layers that compute in 8 bits or with fake quantization. None if neither is configured.

    Raises:
        UserError: The model has no such layers.
    """
    if is_eight_bits(config.precision.name):
        chosen = choose_linear(model, plan, layout, rows=MULTIPLE, columns=MULTIPLE)
    elif config.precision.quantize_aware != "none":
        chosen = quantized_layers(model, plan)
    else:
        return None
    if not chosen.names:
        what, instead = _setting(config)
        raise UserError(f"{what} applies to {chosen.describe()}; use {instead}")
    return chosen


def gathered_in_float8(config: RunConfig, model: nn.Module, plan: ParallelPlan, layout: Layout) -> set[str]:
    """Return the names of the weights that FSDP2 gathers in float8."""
    if config.precision.gather == "bf16" or not layout.is_sharded:
        return set()
    chosen = chosen_layers(config, model, plan, layout)
    names = [f"{name}.weight" for name in chosen.names] if chosen else []
    tensor = {name: layout.tensor if plan.role(name.removesuffix(".weight")) == "column" else 1 for name in names}
    ranks = layout.shard * layout.context
    return {name for name in names if can_gather(len(model.get_parameter(name)) // tensor[name], ranks)}


def check_products(config: RunConfig, device: torch.device) -> None:
    """Raise ``UserError`` if ``device`` or the installed libraries do not support the precision of ``config``."""
    if device.type == "cuda" and torch.version.hip is None and config.precision.name == "bf16":
        refuse_emulation(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    if is_eight_bits(config.precision.name):
        check_eight_bits(config.precision.name, device)
    elif config.precision.quantize_aware != "none":
        check_torchao(*_setting(config))


def refuse_emulation(name: str, capability: tuple[int, int]) -> None:
    """Raise ``UserError`` if a GPU of this compute capability does not support bf16.

    torch would emulate bf16 in fp32, which is several times slower.
    """
    if capability < (8, 0):
        raise UserError(
            f"precision=bf16 needs a GPU of compute capability 8.0 (Ampere) or higher, but {name} has "
            f"{'.'.join(map(str, capability))}; use precision=fp16"
        )


def set_products(config: RunConfig, model: nn.Module, plan: ParallelPlan, layout: Layout, device: torch.device) -> None:
    """Set the precision of the layers of ``model`` as configured. Call this before sharding."""
    chosen = chosen_layers(config, model, plan, layout)
    if chosen is not None:
        check_torchao(*_setting(config))
        set_product(model, chosen.names, product_of_torchao(*_setting(config), partial(_product, config, device)))


def _setting(config: RunConfig) -> tuple[str, str]:
    """Return the override that selects torchao's matrix products, and an override that avoids them."""
    if is_eight_bits(config.precision.name):
        return f"precision={config.precision.name}", "precision=bf16"
    return f"precision.quantize_aware={config.precision.quantize_aware}", "precision.quantize_aware=none"


def _product(config: RunConfig, device: torch.device) -> Product:
    if config.precision.name == "float8":
        gathers = config.precision.gather == "float8"
        return Float8(config.precision.scaling, gathers=gathers, emulates=device.type == "cpu")
    return Int8() if config.precision.name == "int8" else FakeQuantized(config.precision.quantize_aware)


class GradScaler:
    """Dynamic loss scaling for fp16 (https://arxiv.org/abs/1710.03740), with the rules of ``torch.amp.GradScaler``.

    ``torch.amp.GradScaler`` is not used: it combines overflow flags over the placement of the first gradient, so ranks
    can disagree (see ``found_inf_reduce_handler``), and it needs a pass over all gradients. Here, overflow is
    detected from the global gradient norm, which is the same on every rank, without synchronizing with the host. If
    scaling is disabled, the scale is always 1.
    """

    GROWTH, BACKOFF = 2.0, 0.5

    def __init__(self, section: PrecisionSection, device: torch.device) -> None:
        self.enabled = section.name == "fp16"
        self._growth_interval = section.growth_interval
        self.scale = torch.full((), section.initial_scale if self.enabled else 1.0, device=device)
        """Factor of the loss before backward, an fp32 scalar on the device."""
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, rejected: Tensor) -> None:
        """Halve the scale if the step was rejected. Double it after ``growth_interval`` consecutive good steps.

        ``rejected``: bool scalar.
        """
        if not self.enabled:
            return
        self._good_steps = (self._good_steps + 1) * ~rejected
        grow = self._good_steps == self._growth_interval
        self._good_steps *= ~grow
        grown = self.scale * self.GROWTH
        # As in torch, the scale does not grow beyond the range of fp32.
        self.scale = torch.where(grow & grown.isfinite(), grown, self.scale)
        self.scale = torch.where(rejected, self.scale * self.BACKOFF, self.scale)

    def state_dict(self) -> dict[str, float | int] | None:
        """Return the scale for a checkpoint, or None if scaling is disabled. Synchronizes with the device."""
        return {"scale": self.scale.item(), "good_steps": int(self._good_steps.item())} if self.enabled else None

    def load_state_dict(self, state: dict[str, float | int] | None) -> None:
        """Restore ``state``. Does nothing if scaling is disabled now or was disabled when the checkpoint was saved."""
        if self.enabled and state is not None:
            self.scale.fill_(state["scale"])
            self._good_steps.fill_(state["good_steps"])
