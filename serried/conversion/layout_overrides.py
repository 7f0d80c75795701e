"""Overrides for the batch, parallel layout and precision of another framework's config."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from serried.configs.errors import UserError
from serried.conversion.converted import Converted
from serried.conversion.foreign_config import ForeignConfig, Setting

_AXES = ("tensor", "context", "pipeline")
"""Axes that divide the work on one sample."""
_MESH = ("replicate", "shard", "expert", *_AXES)
"""Axes whose degrees multiply to the number of GPUs."""


# Batch and layout -----------------------------------------------------------------------------------------------------


def set_batch(config: ForeignConfig, out: Converted, gpus: int | None, task: str) -> None:
    micro, accumulation = config.count("micro_batch"), config.count("accumulation")
    degrees = [max(1, config.count(axis) if axis in config else 1) for axis in _AXES]
    divisor = math.prod(degrees)
    whole = config.count("global_batch") if "global_batch" in config else None
    known = gpus or (config.count("processes") if "processes" in config else None)
    replicate, shard = _data_degrees(config)
    mesh = max(1, replicate) * max(1, shard) * divisor if replicate > 1 or shard > 1 else 0
    if mesh and known and (known != mesh if shard else known % mesh):
        raise UserError(f"gpus={known} does not fit {_groups(config, _MESH)} in {config.path}; use gpus={mesh}")
    if mesh and shard:
        known = mesh
    if known is None and whole is not None and "micro_batch" in config and whole % (micro * accumulation) == 0:
        known = whole // (micro * accumulation) * divisor
    count = known or mesh or divisor
    if count % divisor:
        fitting = max(divisor, count // divisor * divisor)
        raise UserError(f"gpus={count} is not a multiple of {divisor} ({_groups(config)}); use gpus={fitting}")
    out.nodes = config.count("nodes") if "nodes" in config and not gpus else 1
    out.processes = max(1, count // out.nodes)
    ranks = count // divisor
    if whole is None and "micro_batch" not in config:
        return
    if whole is not None and "micro_batch" not in config:
        out.set("trainer.global_batch", whole)
        share = whole / (accumulation * ranks)
        out.set("trainer.micro_batch", int(share) if known and share == int(share) else "auto")
        return
    samples = "pairs" if task in ("preference", "reward") else "sequences"
    samples = "rows" if out.overrides.get("recipe") == "kto" else samples
    product = micro * accumulation * ranks
    out.set("trainer.global_batch", whole or product)
    out.set("trainer.micro_batch", "auto" if config.flag("auto_batch") else micro)
    accumulated = config.said("accumulation") if "accumulation" in config else "1 accumulated"
    factors = f"{config.said('micro_batch')} x {accumulated} x {count} GPU{'s' if count > 1 else ''}"
    factors += f" ({_groups(config, _MESH)})" if mesh else ""
    shares = f" / {divisor} ({_groups(config)})" if divisor > 1 else ""
    if whole is not None and product != whole:
        out.decide.append(
            f"{config.said('global_batch')} is kept, although {factors}{shares} equals {product}; add gpus=N, the "
            "number of GPUs of that run"
        )
    else:
        assumed = "" if known else "; the file does not set the number of GPUs, so add gpus=N for more"
        out.explained.append(f"trainer.global_batch={product} {samples} per step: {factors}{shares}{assumed}")


def _groups(config: ForeignConfig, axes: Sequence[str] = _AXES) -> str:
    return " x ".join(config.said(axis) for axis in axes if axis in config and config.number(axis) > 0)


def _data_degrees(config: ForeignConfig) -> tuple[int, int]:
    """Return the degrees of ``replicate`` and ``shard``; 0 if ``config`` leaves one to the launcher."""
    replicate, shard = (config.count(axis) if config.number(axis) > 0 else 0 for axis in ("replicate", "shard"))
    if config.title == "axolotl" and config.number("expert") > 1:  # an axis of its own there, but not here
        shard = max(1, shard) * config.count("expert")
    return replicate, shard


def set_layout(config: ForeignConfig, out: Converted) -> None:
    for axis in (*_AXES, "expert"):
        if axis in config and config.count(axis) > 1:
            out.set(f"parallel.{axis}", config.count(axis))
    layout, frees, reason = _strategy(config, out)
    is_sharded = any(axis in config and config.count(axis) > 1 for axis in (*_AXES, "expert"))
    if layout == "ddp" and is_sharded:
        layout, reason = "fsdp", ""
    if layout != "ddp":
        out.set("parallel", layout)
    if not frees:
        out.set("parallel.reshard_after_forward", False)
    if reason:
        out.explained.append(reason)
    replicate, shard = _data_degrees(config)
    if replicate > 1:
        out.set("parallel", "hsdp")
        out.set("parallel.replicate", replicate)
    elif shard > 1:
        out.set("parallel", "fsdp")
    if shard > 1 or (replicate > 1 and shard == 1):
        out.set("parallel.shard", shard)
    offloads = [config.text(fact).lower() for fact in ("offload_params", "offload_optimizer") if config.flag(fact)]
    if "nvme" in offloads:
        out.lack(config.said("offload_params", "offload_optimizer"), "state is offloaded to host memory, not to disk")
    if config.flag("offload_params") and layout != "ddp":
        out.set("parallel.offload", True)
    elif config.flag("offload_optimizer"):
        out.set("optim.offload", True)
    if config.flag("device_cpu"):
        out.set("launch.device", "cpu")


def _strategy(config: ForeignConfig, out: Converted) -> tuple[str, bool, str]:
    """Return the parallel strategy, whether parameters are freed after the forward (ZeRO-3), and an explanation."""
    if "zero_stage" in config:
        return _of_stage(config, int(config.number("zero_stage")), config.said("zero_stage"))
    if config.flag("deepspeed"):
        name = Path(config.text("deepspeed")).name.lower()
        found = re.search(r"z(?:ero)?[_-]?([0-3])", name)
        if "offload" in name:
            config.facts.setdefault("offload_optimizer", config.facts["deepspeed"]._replace(value="cpu"))
            if "param" in name or "all" in name or (found and found[1] == "3"):
                config.facts.setdefault("offload_params", config.facts["deepspeed"]._replace(value="cpu"))
        if found:
            return _of_stage(
                config, int(found[1]), f"{config.said('deepspeed')} (file not found; stage taken from its name)"
            )
        out.decide.append(
            f"{config.said('deepspeed')} was not found here; convert both files: serried convert {config.path} {name}"
        )
        return "fsdp", True, ""
    sharding = config.text("sharding").upper()
    strategy = " ".join(config.words("fsdp")).lower() if config.flag("fsdp") else config.text("strategy").lower()
    if (
        strategy in ("fsdp", "full_shard")
        or "shard" in strategy
        or config.flag("fsdp_version")
        or (sharding and config.flag("fsdp"))
    ):
        said = config.said("fsdp", "strategy", "fsdp_version")
        if "offload" in strategy:
            config.facts.setdefault("offload_params", Setting(said, True))
        if "HYBRID" in sharding or sharding in ("4", "5") or "hybrid" in strategy:
            if out.nodes > 1:
                out.set("parallel.replicate", out.nodes)
            elif config.number("replicate") <= 1:
                out.decide.append(f"{config.said('sharding', 'fsdp')}: set the replicas with parallel.replicate=NODES")
            return "hsdp", "ZERO2" not in sharding and sharding != "5", ""
        if sharding in ("NO_SHARD", "3"):
            return "ddp", True, ""
        keeps = (
            sharding in ("SHARD_GRAD_OP", "2", "FALSE")
            or "shard_grad_op" in strategy
            or config.text("reshard") == "False"
        )
        if config.title == "torchtune" and out.processes * out.nodes == 1:
            return "ddp", True, ""
        return "fsdp", not keeps, ""
    return "ddp", True, ""


def _of_stage(config: ForeignConfig, stage: int, said: str) -> tuple[str, bool, str]:
    del config
    if stage == 0:
        return "ddp", True, ""
    shards = "shards gradients and optimizer state; parameters stay gathered between forward and backward (ZeRO-2)"
    if stage == 1:
        return (
            "fsdp",
            False,
            f"{said}: parallel=fsdp {shards}; ZeRO-1 shards only the optimizer state, with the same results",
        )
    if stage == 2:
        return "fsdp", False, f"{said}: parallel=fsdp parallel.reshard_after_forward=false {shards}"
    return "fsdp", True, f"{said}: parallel=fsdp shards parameters too (ZeRO-3)"


def set_precision(config: ForeignConfig, out: Converted, is_adapter: bool) -> None:
    mixed, dtype = config.text("mixed_precision").lower(), config.text("dtype").lower()
    weights = config.text("weights_dtype").lower()
    is_fp16 = config.flag("fp16") or config.flag("fp16_all") or mixed == "fp16"
    is_auto = config.text("bf16").lower() == "auto"
    is_bf16 = (
        config.flag("bf16")
        or config.flag("bf16_all")
        or config.flag("pure_bf16")
        or mixed == "bf16"
        or dtype in ("bf16", "bfloat16")
    )
    if is_fp16 and "fp16" in config and config.text("fp16") == "auto":
        is_fp16 = False
    if config.flag("fp8") or mixed == "fp8":
        out.set("precision", "float8")
    elif is_fp16 and (not is_bf16 or is_auto):
        out.set("precision", "fp16")
        if "initial_scale_power" in config:
            out.set("precision.initial_scale", 2 ** config.count("initial_scale_power"))
        if "growth_interval" in config:
            out.set("precision.growth_interval", config.count("growth_interval"))
    elif is_bf16 or weights in ("bfloat16", "torch.bfloat16") or config.title in ("TRL", "Unsloth"):
        out.set("precision", "bf16")
    elif is_adapter or out.overrides.get("recipe") in ("dpo", "kto", "reward"):
        out.set("precision", "fp32")
    keeps_bf16 = config.flag("pure_bf16") or config.flag("bf16_all") or dtype in ("bf16", "bfloat16")
    if keeps_bf16 and not is_adapter:
        subject = config.said("pure_bf16", "bf16_all", "dtype")
        out.explained.append(
            f"{subject}: precision=bf16 keeps fp32 weights for the optimizer (16 bytes per parameter, sharded with "
            "parallel=fsdp); optim=adamw_bf16 keeps only bf16 weights, rounded stochastically"
        )
    quantizer = config.text("quantizer").lower()
    if quantizer and is_adapter:
        out.lack(config.said("quantizer"), "quantization-aware training is not supported with adapters")
    elif quantizer:
        out.set("precision.quantize_aware", "int4_weight_only" if "weightonly" in quantizer else "int8_dynamic_int4")
