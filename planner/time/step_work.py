"""Work of a step, derived from the config and the model on the meta device."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from serried.configs.schema.data import DataSection
from serried.configs.schema.sections import RunConfig, TaskSection
from serried.parallel.activation_checkpoint import Mix
from serried.parallel.layout.mesh import Layout
from serried.parallel.plan import ParallelPlan
from serried.planner.devices import Cluster, Device
from serried.planner.time.published_rates import FAR, SEEN
from serried.planner.time.time_model import Job, Shape
from serried.recipes.models.families.gemma4_config import Gemma4Section
from serried.recipes.models.families.gpt2_config import GPT2Section
from serried.recipes.models.families.llama_config import LlamaSection
from serried.recipes.models.families.moe_config import MoESection
from serried.recipes.models.hugging_face.any_causal_lm_config import HuggingFaceSection
from serried.recipes.text.causal_lm_config import CausalLMSection

_OTHER_FORM = 0.05
"""Relative difference in parameter count above which a model is treated as an unknown architecture."""

_LARGEST_CONTEXT = 8
"""Largest number of context ranks in torchtitan's published runs."""


def shape_of(config: RunConfig, model: nn.Module, plan: ParallelPlan) -> Shape | None:
    """Return the sizes of the model of ``config``.

    None if the model is not a known transformer, or if its objective adds work to next-token prediction.
    """
    section, data = getattr(config, "model", None), config.data
    if type(config.task) not in (TaskSection, CausalLMSection) or section is None or not isinstance(data, DataSection):
        return None
    if (shape := _shape(section)) is None:
        return None
    matrices = {name: each.shape for name, each in model.named_parameters() if each.ndim >= 2}
    rows = [size[0] for name, size in matrices.items() if size[1] == shape.dim and not name.startswith(plan.blocks)]
    shape = shape._replace(vocab=section.vocab_size or max(rows, default=0))
    held = sum(math.prod(size) for name, size in matrices.items() if name.startswith(plan.blocks))

    def excess(shape: Shape) -> float:
        return abs(held / (shape.layers * (shape.of_dense + shape.of_experts)) - 1)

    if isinstance(section, HuggingFaceSection):  # config.json does not state whether it is gated
        shape = min(shape, shape._replace(is_gated=False), key=excess)
    if config.adapter.method == "none" and excess(shape) > _OTHER_FORM:
        return None
    return shape._replace(attended=_attended(section, data.sequence_length), gathers_fp32=not plan.units)


def unknown_why(config: RunConfig, shape: Shape | None, device: Device) -> str:
    """Return the reason, as a clause, that no step time is known for a model of this shape."""
    if device.measured is not None:
        known = ", ".join(device.measured)
        return f"{device.source} has rates only for precision={known}; measure others with serried plan calibrate"
    if shape is None:
        return "there are no rates for this kind of model or task"
    if device.lacks_bf16 and config.precision.name in ("bf16", "float8", "int8"):
        return f"{device.name} has no hardware support for bf16; use precision=fp16"
    return f"there are no rates for precision={config.precision.name} on {device.name}"


def job_of(config: Any, shape: Shape, layout: Layout, accumulation: int, mix: Mix | None = None) -> Job:
    """Return a step of ``config`` for a model of this shape.

    ``mix``: activation checkpointing chosen to fit an activation memory budget.
    """
    trainer = config.trainer
    recompute = trainer.activation_checkpoint
    share = 1 / trainer.activation_checkpoint_every
    rest = "none"
    if mix is not None:
        recompute = mix.first
        share = mix.share
        rest = mix.rest
    return Job(
        shape,
        layout,
        config.data.sequence_length,
        trainer.micro_batch,
        accumulation,
        recompute=recompute,
        recomputing=share,
        rest=rest,
        precision="8bit" if config.precision.name == "float8" else config.precision.name,
        frees_after_forward=config.parallel.frees_after_forward,
        reduces_each=config.parallel.sync_every_micro_batch,
        is_fused=trainer.compiles,
        is_adapter=config.adapter.method != "none",
        orthogonalizes=config.optim.name == "muon",
        offloads=config.offloads_state,
        is_transformers=isinstance(config.model, HuggingFaceSection),
    )


def _shape(section: Any) -> Shape | None:
    """Return the sizes of a family's model, without its vocabulary size."""
    if isinstance(section, HuggingFaceSection):
        return _shape_of_transformers(section.architecture)
    if isinstance(section, GPT2Section):
        width = section.dim // section.heads
        return Shape(
            section.layers, section.dim, section.hidden_dim, section.heads, section.heads, width, 0,
            is_gated=False, is_tied=section.tie_embeddings,
        )  # fmt: skip
    if not isinstance(section, LlamaSection):
        return None
    shape = Shape(
        section.layers, section.dim, section.hidden_dim, section.heads, section.kv_heads, section.attention_head_dim,
        0, is_tied=section.tie_embeddings,
    )  # fmt: skip
    if isinstance(section, Gemma4Section):
        if section.block_input_dim or section.kv_shared_layers:
            return None
        # Experts are in addition to the feed-forward of each block.
        return shape._replace(
            experts=section.experts,
            experts_per_token=section.experts_per_token,
            expert_hidden=section.expert_hidden_dim,
        )
    if not isinstance(section, MoESection):
        return shape
    dense = section.dense_layers / section.layers
    shared = section.shared_experts * section.expert_hidden_dim
    return shape._replace(
        hidden=round(dense * section.hidden_dim + (1 - dense) * shared),
        experts=section.experts,
        experts_per_token=section.experts_per_token,
        expert_hidden=section.expert_hidden_dim,
        dense_layers=section.dense_layers,
        latent_projections=getattr(section, "projections", 0),
    )


def _shape_of_transformers(found: Mapping[str, Any]) -> Shape | None:
    layers, heads = _named(found, "num_hidden_layers", "n_layer"), _named(found, "num_attention_heads", "n_head")
    dim = _named(found, "hidden_size", "n_embd")
    if not (layers and heads and dim):
        return None
    return Shape(
        layers,
        dim,
        _named(found, "intermediate_size", "n_inner") or 4 * dim,
        heads,
        found.get("num_key_value_heads") or heads,
        found.get("head_dim") or dim // heads,
        0,
        is_tied=bool(found.get("tie_word_embeddings", True)),
    )


def _named(found: Mapping[str, Any], *names: str) -> int:
    return next((found[name] for name in names if isinstance(found.get(name), int)), 0)


def _attended(section: Any, length: int) -> float:
    """Return the share of causal attention scores that the blocks' sliding windows keep."""
    if not isinstance(section, LlamaSection):
        return 1.0
    windows = [min(section.window(layer) or length, length) for layer in range(section.layers)]
    return math.fsum(1 - (1 - window / length) ** 2 for window in windows) / len(windows)


def doubts(job: Job, cluster: Cluster, software: str) -> Iterator[str]:
    """Yield the properties of ``job`` that no published run with the rates of ``software`` covers."""
    seen = SEEN[software]
    sharding = job.layout.shard * job.layout.context
    if cluster.device.name not in seen.devices:
        yield f"{cluster.device.name} with rates of {seen.devices[0]}"
    if job.frees_after_forward and sharding > FAR * seen.sharding:
        yield f"gathers over more than {FAR * seen.sharding} ranks for each block"
    if job.sequence > seen.sequence:
        yield f"sequences longer than {seen.sequence}"
    if job.layout.context > _LARGEST_CONTEXT:
        yield f"sequences sharded over more than {_LARGEST_CONTEXT} ranks"
    if job.shape.experts:
        yield "experts"
    if job.precision not in ("bf16", "8bit"):
        yield f"precision={job.precision}"
    if job.is_adapter and not seen.has_adapters:
        yield "adapters"
    if job.is_transformers:
        yield "code of transformers"
    if job.recompute == "offload" or job.offloads:
        yield "copies to host memory"
