"""What a run computes in a step, from its config and its model on meta."""

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from serried.configs.schema import GPT2Section, LlamaSection, MoESection, RunConfig
from serried.parallel.mesh import Layout
from serried.parallel.plan import ParallelPlan
from serried.trainer.plan.devices import Cluster
from serried.trainer.plan.rates import FAR, SEEN
from serried.trainer.plan.seconds import Job, Shape


def shape_of(config: RunConfig, model: nn.Module, plan: ParallelPlan) -> Shape | None:
    """Return the sizes of the model of ``config``; None if they are not those of a known transformer."""
    section, data = getattr(config, "model", None), getattr(config, "data", None)
    if not isinstance(section, LlamaSection | GPT2Section) or data is None:
        return None
    rows = [
        parameter.shape[0]
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and parameter.shape[1] == section.dim and not name.startswith(plan.blocks)
    ]
    return _shape(section, max(rows, default=0))._replace(attended=_attended(section, data.sequence_length))


def job_of(config: Any, shape: Shape, layout: Layout, accumulation: int) -> Job:
    """Return a step of ``config``, whose model has this shape."""
    trainer = config.trainer
    keeps = trainer.activation_checkpoint_every > 1  # of the others some compute nothing again
    return Job(
        shape,
        layout,
        config.data.sequence_length,
        trainer.micro_batch,
        accumulation,
        recompute="none" if keeps else trainer.activation_checkpoint,
        precision=config.precision.name,
        frees_after_forward=config.parallel.frees_after_forward,
        reduces_each=config.parallel.sync_every_micro_batch,
        is_adapter=config.adapter.method != "none",
    )


def _shape(section: LlamaSection | GPT2Section, vocab: int) -> Shape:
    if isinstance(section, GPT2Section):
        width = section.dim // section.heads
        return Shape(
            section.layers, section.dim, section.hidden_dim, section.heads, section.heads, width, vocab,
            is_gated=False, is_tied=section.tie_embeddings,
        )  # fmt: skip
    shape = Shape(
        section.layers, section.dim, section.hidden_dim, section.heads, section.kv_heads, section.attention_head_dim,
        vocab, is_tied=section.tie_embeddings,
    )  # fmt: skip
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
    )


def _attended(section: LlamaSection | GPT2Section, length: int) -> float:
    """Return which share of the causal scores the windows of the blocks leave."""
    if isinstance(section, GPT2Section):
        return 1.0
    windows = [min(section.window(layer) or length, length) for layer in range(section.layers)]
    return math.fsum(1 - (1 - window / length) ** 2 for window in windows) / len(windows)


def doubts(job: Job, cluster: Cluster, software: str) -> Iterator[str]:
    """Yield what no published run with the rates of ``software`` shows about a job."""
    seen = SEEN[software]
    sharding = job.layout.shard * job.layout.context
    if cluster.device.name not in seen.devices:
        yield f"{cluster.device.name} with rates of {seen.devices[0]}"
    if job.frees_after_forward and sharding > FAR * seen.sharding:
        yield f"groups of more than {FAR * seen.sharding} ranks that gather for each block"
    if job.sequence > seen.sequence:
        yield f"sequences of more than {seen.sequence}"
    if job.shape.experts:
        yield "experts"
    if job.precision not in ("bf16", "8bit"):
        yield f"precision={job.precision}"
    if job.is_adapter:
        yield "adapters"
    if job.recompute == "offload":
        yield "copies to the host"
