"""Model of the step time, computed from the work of a block and the rates of the device."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from serried.parallel.layout.mesh import ZERO_BUBBLE_SCHEDULES, Layout
from serried.planner.devices import Cluster, Device
from serried.planner.plan_terms import Work
from serried.planner.time.pipeline_timeline import Cost, about, duration
from serried.planner.time.published_rates import Rates

_HALF_BYTES = 2
_FP32_BYTES = 4
_OPTIMIZER_BYTES = 30
"""Bytes that an update reads and writes for each parameter: the gradient, two moments and the parameter."""
_NEWTON_SCHULZ_STEPS = 5
"""Newton-Schulz iterations of Muon, with three matrix products each."""
_BACKWARD_OF_ATTENTION = 2.5
"""Ratio of the cost of attention's backward to its forward: five matrix products instead of two."""
_HIDDEN_AT_THE_END = 0.8
"""Share of the last backward that can overlap with gradient reduction."""
_EXPOSED_AT_LEAST = 0.1
_LARGEST_SEEN = 512
"""Number of ranks in the largest FSDP group of a published run."""
_LOST_BEYOND = 0.025
"""Share of the step time lost for each doubling of the FSDP group beyond ``_LARGEST_SEEN``, as ranks wait for each
other in each block. An assumption: published runs lose 1 to 5 % for each doubling from 128 to 512."""


class Shape(NamedTuple):
    """Sizes of a transformer."""

    layers: int
    dim: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_gated: bool = True
    is_tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_hidden: int = 0
    dense_layers: int = 0
    """Number of layers without experts in a model with experts. ``hidden`` is the mean over these layers and shared
    experts."""
    attended: float = 1.0
    """Share of the attention scores that sliding windows keep."""
    latent_projections: int = 0
    """Number of parameters in the matrices of an attention with latent vectors; 0 without them."""
    gathers_fp32: bool = False
    """Whether FSDP gathers parameters in fp32 at every precision."""

    @property
    def width(self) -> int:
        """Total dim of all query heads."""
        return self.heads * self.head_dim

    @property
    def matrices(self) -> int:
        """Number of matrices in a feed-forward."""
        return 3 if self.is_gated else 2

    @property
    def of_dense(self) -> int:
        """Number of parameters in a block, without its routed experts."""
        return self.projections + self.matrices * self.dim * self.hidden

    @property
    def projections(self) -> int:
        """Number of parameters in the matrices of an attention."""
        return self.latent_projections or 2 * self.dim * (self.width + self.kv_heads * self.head_dim)

    @property
    def of_experts(self) -> int:
        """Mean number of parameters in the routed experts of a block."""
        return self.experts * self._of_expert * (self.layers - self.dense_layers) // self.layers

    @property
    def of_head(self) -> int:
        """Number of parameters in the head."""
        return self.vocab * self.dim

    @property
    def parameters(self) -> int:
        """Number of parameters in the model, without norms and biases."""
        return self.layers * (self.of_dense + self.of_experts) + self.of_head * (1 if self.is_tied else 2)

    @property
    def _of_expert(self) -> int:
        return self.matrices * self.dim * self.expert_hidden

    def block_matrices(self) -> Iterator[tuple[int, int, float]]:
        """Yield rows, columns and number of the matrices of a block, on average."""
        yield self.dim, self.width, 2
        yield self.dim, self.kv_heads * self.head_dim, 2
        yield self.dim, self.hidden, self.matrices
        if self.experts:
            yield self.dim, self.expert_hidden, self.matrices * self.experts * (1 - self.dense_layers / self.layers)

    def flops_per_token(self, sequence: int) -> float:
        """Return the FLOPs of forward and backward per token, without the savings of a causal mask."""
        active = self.of_dense + self.experts_per_token * self._of_expert
        return 6 * (self.layers * active + self.of_head) + 12 * self.layers * self.width * sequence


@dataclass(frozen=True)
class Job:
    """A step of a run."""

    shape: Shape
    layout: Layout
    sequence: int
    micro_batch: int
    accumulation: int
    """Number of micro-batches on each rank, or on the ranks with the most."""
    recompute: str = "none"
    """``none``, ``full``, ``selective`` (half of the matrix products and all memory-bound operations) or
    ``attention``."""
    recomputing: float = 1.0
    """Share of the blocks that use ``recompute``."""
    rest: str = "none"
    """Recomputation of the other blocks."""
    precision: str = "bf16"
    """Precision of matrix products, one of the names in ``Device.peak``."""
    frees_after_forward: bool = True
    reduces_each: bool = True
    """Whether gradients are reduced after each micro-batch."""
    is_fused: bool = False
    """Whether operations between matrix products are fused, as by ``torch.compile``."""
    is_flash: bool = True
    """Whether attention is one kernel that skips masked scores. Otherwise the scores are materialized."""
    hides_exchanges: float = 0.0
    """Share of tensor-parallel communication that overlaps with matrix products."""
    is_adapter: bool = False
    """Whether only adapters are trained, so that base weights need no gradients."""
    orthogonalizes: bool = False
    """Whether the optimizer is Muon."""
    offloads: bool = False
    """Whether parameters or optimizer state are in host memory. The time to copy them is unknown."""
    is_transformers: bool = False
    """Whether the model runs the code of transformers."""

    @property
    def width(self) -> int:
        """Bytes of an element of activations."""
        return _FP32_BYTES if self.precision == "fp32" else _HALF_BYTES

    @property
    def gathered_width(self) -> int:
        """Bytes of an element of a gathered parameter."""
        return _FP32_BYTES if self.shape.gathers_fp32 else self.width

    @property
    def tokens(self) -> float:
        """Number of tokens in a micro-batch on one rank."""
        return self.micro_batch * self.sequence / self.layout.context


@dataclass(frozen=True)
class Step:
    """Predicted time of a step."""

    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds by activity or wait, averaged over ranks. The sum is ``seconds``."""


class _Group(NamedTuple):
    """Ranks of a collective."""

    ranks: int
    inside: int
    """Number of ranks of the collective on one node."""


class _Block(NamedTuple):
    """A block of the model on one rank: seconds for one micro-batch, and numbers of elements."""

    forward: dict[str, float]
    backward: dict[str, float]
    dense: float
    experts: float


def step_of(job: Job, cluster: Cluster, rates: Rates, *, is_quick: bool = False) -> Step:
    """Return the time of a step. ``is_quick``: approximate a pipeline in closed form, without its timeline."""
    clock = _Clock(job, cluster, rates)
    return clock.pipelined(about if is_quick else duration) if job.layout.pipeline > 1 else clock.alone()


def held_elements(job: Job) -> float:
    """Return the number of parameters that a rank would hold without FSDP sharding."""
    shape, layout = job.shape, job.layout
    experts = shape.layers * shape.of_experts
    return ((shape.parameters - experts) / layout.tensor + experts / layout.expert) / layout.pipeline


def seconds_of(work: Work, precision: str, cluster: Cluster, rates: Rates) -> dict[str, float]:
    """Return the seconds of ``work`` by kind: products, attention, and memory-bound operations."""
    device = cluster.device
    peak = device.peak(precision)
    assert peak
    attention_peak = device.half_peak or peak  # rates measured in fp32 have no other
    best = peak * (rates.products_8bit if precision == "8bit" else rates.products)
    products = 0.0
    for dims, count in work.products.items():
        flops = 2.0 * count
        for dim in dims:
            flops *= dim + rates.half  # dim / (share of the best rate reached with this dim)
        products += flops / best
    memory = work.moved_bytes / (device.memory_rate * rates.memory) + work.launches * rates.launch
    attention = work.attention_flops / (attention_peak * rates.attention)
    return {"products": products, "attention": attention, "memory": memory}


def block_work(job: Job) -> Work:
    """Return the work of a block's forward for one micro-batch on one rank."""
    shape = job.shape
    layout = job.layout
    tokens = job.tokens
    tensor = layout.tensor
    parts = tensor if layout.sequence else 1  # ranks that activations between the matrices are sharded over
    projections = shape.projections
    products: dict[tuple[int, int, int], float] = {}

    def add(flops: float, *dims: float) -> None:
        m, n, k = (max(1, round(dim)) for dim in dims)
        products[m, n, k] = products.get((m, n, k), 0.0) + flops / (2 * m * n * k)

    heads = (shape.heads + shape.kv_heads) * shape.head_dim / 2
    add(2 * tokens * projections / tensor, tokens, shape.dim, heads / tensor)
    if shape.hidden:
        flops = 2 * tokens * shape.matrices * shape.dim * shape.hidden / tensor
        add(flops, tokens, shape.dim, shape.hidden / tensor)
    inner = shape.hidden / tensor
    if shape.experts:
        rows = tokens / parts * shape.experts_per_token
        of_one = rows * layout.expert / shape.experts
        share = 1 - shape.dense_layers / shape.layers
        flops = 2 * rows * shape.matrices * shape.dim * shape.expert_hidden * share
        add(flops, of_one, shape.dim, shape.expert_hidden)
        inner += shape.experts_per_token * (shape.expert_hidden + 2 * shape.dim) / parts
    scores = 4 * tokens * job.sequence * shape.attended * shape.width / tensor * (0.5 if job.is_flash else 1.0)
    # Number of reads and writes by norms and residual additions, activation functions, and rotary embeddings.
    norms, activations, rotations = (
        (6, 3 if shape.is_gated else 4, 4) if job.is_fused else (12, 6 if shape.is_gated else 4, 8)
    )
    moved = tokens * job.width * (norms * shape.dim / parts + activations * inner + rotations * shape.width / tensor)
    if not job.is_flash:
        moved += job.micro_batch * shape.heads / tensor * job.sequence**2 * 8
    if job.precision == "8bit":
        moved += tokens * job.width * (2 * shape.dim + shape.hidden / tensor)
    return Work(products, scores, moved, 12 if job.is_fused else 40)


class _Clock:
    """Computes the seconds of each activity on the ranks of a job."""

    def __init__(self, job: Job, cluster: Cluster, rates: Rates) -> None:
        self.job = job
        self.cluster = cluster
        self.rates = rates
        axes = "tensor", "context", "fsdp", "replicate", "expert", "expert fsdp"
        groups = [_group(job.layout, axis, cluster.per_node) for axis in axes]
        self.tensor, self.context, self.sharding, self.copies, self.expert, self.expert_sharding = groups

    # block -------------------------------------------------------------------------------------------------------

    def block(self) -> _Block:
        job = self.job
        shape = job.shape
        tensor = job.layout.tensor
        once = self._seconds(block_work(job))
        attention = once["attention"]
        memory = once["memory"]
        products = once["products"]
        again = {
            "none": 0.0,
            "offload": 0.0,
            "selective": 0.5 * products + memory,
            "attention": attention + (0.0 if job.is_flash else 0.5 * memory),
            "full": products + attention + memory,
        }
        forward, backward = dict(once), {
            "products": products * (1 if job.is_adapter else 2),
            "attention": _BACKWARD_OF_ATTENTION * attention,
            "memory": 2 * memory,
            "recomputed": again[job.recompute] * job.recomputing + again[job.rest] * (1 - job.recomputing),
        }  # fmt: skip
        for name, (there, back) in self._exchanges().items():
            forward[name], backward[name] = there, back
        return _Block(forward, backward, shape.of_dense / tensor, shape.of_experts / job.layout.expert)

    def _exchanges(self) -> dict[str, tuple[float, float]]:
        """Return (forward, backward) seconds of tensor, context and expert communication in a block, by axis."""
        job = self.job
        shape = job.shape
        layout = job.layout
        full = job.recomputing if job.recompute == "full" else 0.0  # recomputed blocks communicate again
        found = {}
        if layout.tensor > 1:
            half = self._gather(job.tokens * shape.dim * job.width, self.tensor)  # an all-reduce costs twice that
            if layout.sequence:
                half *= 1 - job.hides_exchanges
                found["tensor"] = 4 * half, (5 + 3 * full) * half
            else:
                found["tensor"] = 4 * half, (4 + 4 * full) * half
        if layout.context > 1:
            keys = job.micro_batch * job.sequence * 2 * shape.kv_heads * shape.head_dim / layout.tensor
            gather = self._gather(keys * job.width, self.context)
            found["context"] = gather, gather * (2 + full)
        if layout.expert > 1:
            parts = layout.tensor if layout.sequence else 1
            rows = job.tokens / parts * shape.experts_per_token * (1 - shape.dense_layers / shape.layers)
            once = 2 * self._all_to_all(rows * shape.dim * job.width, self.expert)
            found["expert"] = once, once * (1 + full)
        return found

    def head(self) -> dict[str, float]:
        """Return the seconds of forward and backward of the head and loss."""
        job = self.job
        shape = job.shape
        tensor = job.layout.tensor
        dims = tuple(max(1, round(dim)) for dim in (job.tokens, shape.dim, shape.vocab / tensor))
        m, n, k = dims
        products = {(m, n, k): 3 * job.tokens * shape.of_head / tensor / (m * n * k)}
        return self._seconds(Work(products, moved_bytes=12 * job.tokens * shape.vocab / tensor))

    # full step ---------------------------------------------------------------------------------------------------

    def _work(self, block: _Block, head: Mapping[str, float], times: float) -> dict[str, float]:
        """Return the seconds of all blocks and the ``head`` for ``times`` micro-batches."""
        of_blocks = _sum(block.forward, block.backward)
        parts = {name: times * self.job.shape.layers * seconds for name, seconds in of_blocks.items()}
        for name, seconds in head.items():
            parts[name] = parts.get(name, 0.0) + times * seconds
        return parts

    def alone(self) -> Step:
        """Return a step without a pipeline."""
        job, block = self.job, self.block()
        parts = self._work(block, self.head(), job.accumulation)
        gathers_each = job.frees_after_forward and self.sharding.ranks > 1
        parts["data"] = self._gathers(block) if gathers_each else 0.0
        parts["data"] += self._sums(job.shape.layers * _total(block), only_copies=gathers_each)
        parts["optimizer"] = self._update()
        if gathers_each and (doublings := math.log2(self.sharding.ranks / _LARGEST_SEEN)) > 0:
            parts["stragglers"] = doublings * _LOST_BEYOND * sum(parts.values())
        return _step(parts)

    def pipelined(self, played: Callable[..., float]) -> Step:
        """Return a step of a pipeline, including the waits between ranks. ``played`` computes the duration."""
        job, layout = self.job, self.job.layout
        block, head = self.block(), self.head()
        forward, backward = sum(block.forward.values()), sum(block.backward.values())
        end = sum(head.values())
        is_split = layout.schedule in ZERO_BUBBLE_SCHEDULES
        weights = block.backward["products"] / 2 if is_split else 0.0
        costs = []
        for stage in range(layout.stages):
            blocks = len(layout.block_range(stage, job.shape.layers))
            last = end if stage == layout.stages - 1 else 0.0
            costs.append(Cost(blocks * forward + last / 3, blocks * backward + last * 2 / 3, blocks * weights))
        seconds_played = played(layout, job.accumulation, costs, self._transfer())
        parts = self._work(block, head, job.accumulation / layout.pipeline)
        parts["pipeline"] = seconds_played - sum(parts.values())
        parts["data"] = self._sums(job.shape.layers / layout.pipeline * (forward + backward))
        parts["optimizer"] = self._update()
        return _step(parts)

    def _gathers(self, block: _Block) -> float:
        """Return the exposed seconds of FSDP's all-gathers and reduce-scatters, if parameters are freed after use."""
        job, group = self.job, self.sharding
        head = job.shape.of_head / job.layout.tensor
        forward, backward = sum(block.forward.values()), sum(block.backward.values())
        gather = self._gather(block.dense * job.gathered_width, group)
        gather += self._gather(block.experts * job.gathered_width, self.expert_sharding)
        reduce = self._gather(block.dense * _FP32_BYTES, group)
        reduce += self._gather(block.experts * _FP32_BYTES, self.expert_sharding)
        reduce *= not job.is_adapter
        first = max(0.0, gather - forward)

        def exposed(reduce: float, head_reduce: float) -> float:
            of_block = first + max(0.0, gather + reduce - backward)
            ends = gather + reduce + 2 * self._gather(head * job.gathered_width, group) + head_reduce
            return job.shape.layers * of_block + ends

        last = exposed(reduce, self._gather(head * _FP32_BYTES, group))
        return last + (job.accumulation - 1) * (last if job.reduces_each else exposed(0.0, 0.0))

    def _sums(self, micro_batch: float, only_copies: bool = False) -> float:
        """Return the exposed seconds of one gradient reduction and one parameter all-gather in the last backward."""
        if self.job.is_adapter:
            return 0.0
        share = held_elements(self.job)
        seconds = 2 * self._gather(share / self.sharding.ranks * _FP32_BYTES, self.copies)
        if not only_copies:
            width = _FP32_BYTES + self.job.gathered_width
            seconds += self._gather(share * width, self.sharding)
        return max(_EXPOSED_AT_LEAST * seconds, seconds - _HIDDEN_AT_THE_END * micro_batch)

    def _update(self) -> float:
        if self.job.is_adapter:
            return 0.0
        own = held_elements(self.job) / self.sharding.ranks
        seconds = own * _OPTIMIZER_BYTES / (self.cluster.device.memory_rate * self.rates.memory)
        return seconds + (self._orthogonalizing() if self.job.orthogonalizes else 0.0)

    def _orthogonalizing(self) -> float:
        """Return the seconds that Muon adds: one rank orthogonalizes each matrix of the blocks and sends it back."""
        job = self.job
        shape = job.shape
        layout = job.layout
        ranks = layout.world // layout.pipeline
        whole = 0.0
        longest = 0.0
        elements = 0.0
        for rows, columns, count in shape.block_matrices():
            if not columns:
                continue
            short, long = sorted((rows, columns))
            products = Counter([(short, short, long), (short, short, short), (short, long, short)])
            work = Work().plus(Work(products), _NEWTON_SCHULZ_STEPS)
            precision = job.precision if job.precision in ("fp32", "fp16") else "bf16"
            of_matrix = seconds_of(work, precision, self.cluster, self.rates)["products"]
            whole += shape.layers / layout.pipeline * count * of_matrix
            longest = max(longest, of_matrix)
            elements += shape.layers / layout.pipeline * count * rows * columns
        sent = elements / ranks * (1 + layout.replicate) * job.width
        group = _Group(ranks, min(ranks, self.cluster.per_node))
        return max(longest, whole / ranks) + (self._all_to_all(sent, group) if ranks > 1 else 0.0)

    # rates -------------------------------------------------------------------------------------------------------

    def _seconds(self, work: Work) -> dict[str, float]:
        return seconds_of(work, self.job.precision, self.cluster, self.rates)

    def _transfer(self) -> float:
        """Return the seconds to send activations from one stage to the next."""
        job, device = self.job, self.cluster.device
        parts = job.layout.tensor if job.layout.sequence else 1
        is_inside = job.layout.world // job.layout.pipeline < self.cluster.per_node
        rate = device.link_rate * self.rates.links if is_inside else device.between_nodes * self.rates.network
        return job.tokens * job.shape.dim * job.width / parts / rate + self.rates.latency

    def _gather(self, whole_bytes: float, group: _Group) -> float:
        """Return the seconds of an all-gather or reduce-scatter of ``whole_bytes``.

        Rings use the network cards of all ranks in a node.
        """
        if group.ranks == 1 or not whole_bytes:
            return 0.0
        rate, of_call = _wire(group, self.cluster.device, self.rates)
        return whole_bytes * (group.ranks - 1) / group.ranks / rate + of_call

    def _all_to_all(self, bytes_of_rank: float, group: _Group) -> float:
        """Return the seconds of an all-to-all in which each rank sends ``bytes_of_rank``."""
        device, rates = self.cluster.device, self.rates
        inside = bytes_of_rank * (group.inside - 1) / group.ranks / (device.link_rate * rates.links)
        between = 0.0
        if group.inside < group.ranks:
            between = bytes_of_rank * (1 - group.inside / group.ranks) / (device.between_nodes * rates.network)
        return max(inside, between) + rates.latency + (group.ranks / group.inside - 1) * rates.hop


def wire(layout: Layout, axis: str, cluster: Cluster, rates: Rates) -> tuple[float, float]:
    """Return (bytes per second of a rank, seconds to start a collective) along an axis, named as in ``Flow``."""
    return _wire(_group(layout, axis, cluster.per_node), cluster.device, rates)


def _wire(group: _Group, device: Device, rates: Rates) -> tuple[float, float]:
    hops = group.ranks / group.inside - 1
    slowest = device.link_rate * rates.links
    if hops:
        slowest = min(slowest, group.inside * device.between_nodes * rates.network)
    return slowest, rates.latency + hops * rates.hop


def _group(layout: Layout, axis: str, per_node: int) -> _Group:
    beside = max(1, per_node // layout.tensor)
    ranks, most_inside = {
        "tensor": (layout.tensor, per_node),
        "context": (layout.context, beside),
        "fsdp": (layout.shard * layout.context, beside),
        "replicate": (layout.replicate, max(1, per_node // layout.block)),
        "expert": (layout.expert, per_node),
        "expert fsdp": (layout.expert_shard, max(1, per_node // layout.expert)),
        "pipeline": (2, max(1, per_node // layout.block)),
    }.get(axis, (layout.world, per_node))
    return _Group(ranks, min(ranks, most_inside))


def _sum(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


def _total(block: _Block) -> float:
    return sum(block.forward.values()) + sum(block.backward.values())


def _step(parts: dict[str, float]) -> Step:
    return Step(sum(parts.values()), {name: seconds for name, seconds in parts.items() if seconds})
