"""Decoder-only transformers with a mixture of experts: Hugging Face's glm4_moe, qwen3_moe and mixtral.

A router sends each token to the k best of E small feed-forwards and sums their weighted outputs
(https://arxiv.org/abs/1701.06538). In glm4_moe, scores are sigmoids, and a bias balances the load of experts without
an auxiliary loss (https://arxiv.org/abs/2408.15664); it is updated after each accepted step, see ``trainer.step``. The
other two use softmax scores without a bias; their weights can be loaded, trained and saved. Attention, norms and
the first, dense layers are the same as in ``llama``.

Shapes: T tokens, k experts per token, E experts, D dim, I inner width of an expert, N rows, one for each token and
each of its experts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.lora import ExpertAdapter, add_to_experts
from serried.parallel.plan import Dispatch, ParallelPlan
from serried.recipes.models.families.llama import (
    ROLES,
    Attention,
    FeedForward,
    Llama,
    Transformer,
)
from serried.recipes.models.families.moe_config import MoESection
from serried.recipes.models.family import Exported

_GROUPED_ALIGNMENT = 16
"""Alignment of rows in bytes for ``grouped_mm`` (torch 2.13, on CPU and GPU)."""
_GROUPED_CAPABILITY = (8, 0)
_MOST_GROUPED_NUMBERS = 2**31 - 1
"""Largest number of elements in an operand or the result: beyond it, torch's GPU kernel accesses invalid memory
(https://github.com/pytorch/torchtitan/issues/1932)."""
_BLACKWELL = 10
"""Major compute capability whose kernel does not write the gradient of an expert without tokens
(https://github.com/pytorch/pytorch/issues/172439)."""


class Router(nn.Module):
    """Chooses the experts of each token, in fp32, so that rounding errors do not change the choice.

    ``loads`` counts the tokens sent to each expert while ``is_counting`` is set; see ``parallel.plan.Router``.
    """

    def __init__(self, config: MoESection, *, bias: bool = False) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.normalizes, self.scale = config.normalize_weights, config.routed_scale
        self.groups, self.groups_per_token = config.expert_groups, config.groups_per_token
        self.weight = nn.Parameter(torch.empty(config.experts, config.dim))
        self.bias = nn.Parameter(torch.empty(config.experts)) if bias else None
        self.balance_rate = config.balance_rate
        self.e_score_correction_bias: Tensor | None
        # Created on the CPU with its value, even if parameters are on meta. The name is Hugging Face's.
        correction = torch.zeros(config.experts, device="cpu") if config.has_router_bias else None
        self.register_buffer("e_score_correction_bias", correction)
        self.is_counting = False
        self.loads: Tensor | None = None

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map tokens [T, D] to their experts [T, k], the experts' weights [T, k] in fp32, and the number of tokens
        of each expert [E]."""
        with torch.autocast(rows.device.type, enabled=False):
            weight = as_gathered(self.weight, rows)
            logits = F.linear(rows.float(), weight, None if self.bias is None else self.bias.float())
        correction = self.e_score_correction_bias
        scores = logits.softmax(dim=1) if correction is None else logits.sigmoid()
        ranking = scores.detach() if correction is None else scores.detach() + correction
        if self.groups_per_token < self.groups:
            ranking = self._in_best_groups(ranking)
        # A stable sort, so that among equal scores the first expert wins on every device; topk does not guarantee it.
        chosen = ranking.sort(dim=1, descending=True, stable=True).indices[:, : self.experts_per_token]
        weights = scores.gather(1, chosen)
        if self.normalizes:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        counts = torch.zeros(len(self.weight), dtype=torch.int64, device=rows.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        if self.is_counting:
            self.loads = counts if self.loads is None else self.loads + counts
        return chosen, weights * self.scale, counts

    def _in_best_groups(self, ranking: Tensor) -> Tensor:
        """Replace ``ranking`` [T, E] by -inf outside of the groups with the largest sums of their two best experts."""
        groups = ranking.unflatten(1, (self.groups, -1))
        order = groups.topk(2).values.sum(2).sort(dim=1, descending=True, stable=True).indices
        rest = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, order[:, self.groups_per_token :], True)
        return groups.masked_fill(rest.unsqueeze(2), float("-inf")).flatten(1)

    def balance(self, loads: Tensor, accepted: Tensor) -> None:
        """If ``accepted``, raise the bias of experts with fewer tokens than the mean of ``loads`` [E] by
        ``balance_rate``, and lower the bias of the others."""
        bias = self.e_score_correction_bias
        if bias is not None and self.weight.requires_grad:  # a frozen router is not changed
            moves = torch.sign(loads.sum() - len(loads) * loads) * accepted  # exact, since these are integers
            bias += (self.balance_rate * moves).to(bias.dtype)


def as_gathered(weight: Tensor, rows: Tensor) -> Tensor:
    """Return ``weight`` in fp32, rounded to the dtype of ``rows``, in which sharded mixed precision gathers it.

    It is not rounded to fp16: its gradient, a sum over tokens, could overflow.
    """
    return (weight if rows.dtype == torch.float16 else weight.to(rows.dtype)).float()


class StackedExperts(nn.Module):
    """Feed-forwards with stacked weights: all experts of the layer, or this rank's shard of them."""

    fused: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    """Stacked matrices by their name in transformers, which concatenates the rows of some. PEFT adapts them by these
    names."""
    is_single_in_peft = True
    """Whether PEFT also opens adapters that name the matrices of each expert."""
    is_transposed = False
    """Whether the stacked matrices are [E, inputs, outputs] instead of [E, outputs, inputs]."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: dict[str, ExpertAdapter] = {}
        """Adapters of stacked matrices, by the name of the matrices."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows [N, D], ordered by expert with ``counts`` [E] rows each, to [N, D]."""
        if rows.dtype == torch.float16:
            # A weight's gradient is a sum over tokens, which can overflow in fp16.
            with torch.autocast(rows.device.type, enabled=False):
                return self._products(rows.float(), counts).half()
        return self._products(rows, counts)

    def _products(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute ``forward`` in the dtype of ``rows``."""
        raise NotImplementedError

    def product(self, rows: Tensor, counts: Tensor) -> Callable[[Tensor, str], Tensor]:
        """Return a function that multiplies rows by the stacked matrices of a name, including their adapters.

        Args:
            rows: the input of the experts, [N, D], ordered by expert.
            counts: number of rows of each expert, [E].
        """
        by_expert = product_of_experts(rows, counts)

        def multiply(rows: Tensor, name: str) -> Tensor:
            matrices = getattr(self, name)
            output = by_expert(rows, matrices.transpose(1, 2) if self.is_transposed else matrices)
            return add_to_experts(self, name, rows, output, by_expert)

        return multiply


class Experts(StackedExperts):
    """SwiGLU feed-forwards."""

    def __init__(self, config: MoESection) -> None:
        super().__init__()
        wide, narrow = (config.experts, config.expert_hidden_dim, config.dim), (config.dim, config.expert_hidden_dim)
        self.gate_proj = nn.Parameter(torch.empty(wide))
        self.up_proj = nn.Parameter(torch.empty(wide))
        self.down_proj = nn.Parameter(torch.empty(config.experts, *narrow))

    def _products(self, rows: Tensor, counts: Tensor) -> Tensor:
        multiply = self.product(rows, counts)
        hidden = F.silu(multiply(rows, "gate_proj")) * multiply(rows, "up_proj")
        return multiply(hidden, "down_proj")


def product_of_experts(rows: Tensor, counts: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that multiplies each row by the matrix of its expert: rows [N, inputs] and stacked matrices [E,
    outputs, inputs] give [N, outputs], in the dtype of the rows.

    Args:
        rows: the input of the experts, [N, D], ordered by expert.
        counts: number of rows of each expert, [E].
    """
    offsets = counts.cumsum(0).to(torch.int32)
    is_unwritten = _leaves_gradients_unwritten(rows.device)
    sizes: list[int] = []  # read only if needed, since the host then waits for the device

    def multiply(rows: Tensor, weight: Tensor) -> Tensor:
        matrices = weight.to(rows.dtype)
        if can_group(rows, weight):
            return _grouped(rows, _WrittenGradient.apply(matrices, counts) if is_unwritten else matrices, offsets)
        if not sizes:
            sizes.extend(counts.tolist())
        return torch.cat([F.linear(piece, matrices[expert]) for expert, piece in enumerate(rows.split(sizes))])

    return multiply


def can_group(rows: Tensor, weight: Tensor) -> bool:
    """Return whether ``grouped_mm`` supports ``rows`` [N, D] and ``weight`` [E, I, D]; the alternative is a loop
    over experts."""
    if any(size * rows.element_size() % _GROUPED_ALIGNMENT for size in weight.shape[1:]):
        return False
    if rows.device.type != "cuda":
        return True
    if rows.dtype != torch.bfloat16 or len(rows) * max(weight.shape[1:]) > _MOST_GROUPED_NUMBERS:
        return False
    return torch.cuda.get_device_capability(rows.device) >= _GROUPED_CAPABILITY


def _leaves_gradients_unwritten(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _BLACKWELL


class _WrittenGradient(torch.autograd.Function):
    """Identity for weights [E, I, D]. Its backward sets the gradients of experts without tokens to zero, because the
    kernel leaves them uninitialized."""

    @staticmethod
    def forward(ctx, weight: Tensor, counts: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(counts)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (counts,) = ctx.saved_tensors
        return torch.where((counts > 0)[:, None, None], grad, 0), None


def _grouped(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=offsets)


class _Permuted(torch.autograd.Function):
    """``rows[index]`` with a deterministic backward, which also gathers: the backward of indexing would add in varying
    order on a GPU."""

    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        """``index`` [N] contains each row of ``rows`` [T, D] N/T times; ``inverse`` [N] has the positions by row."""
        ctx.save_for_backward(inverse)
        ctx.rows = len(rows)
        return rows[index]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (ctx.rows, -1)).sum(1), None, None


class MixtureOfExperts(nn.Module):
    """Feed-forward of a block: routed experts, and shared experts that process every token."""

    def __init__(self, config: MoESection, router: Router | None = None, experts: StackedExperts | None = None) -> None:
        super().__init__()
        self.gate = router or Router(config)
        self.experts = experts or Experts(config)
        self.dispatch = Dispatch()
        width = config.shared_experts * config.expert_hidden_dim
        self.shared_experts = FeedForward(config.dim, width) if width else None

    def forward(self, x: Tensor) -> Tensor:
        routed = self._routed(x.flatten(0, 1)).view(x.shape)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)

    def _routed(self, tokens: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return the weighted outputs of the experts for ``tokens`` [T, D]. ``seen``: input of the router, if it is not
        ``tokens``."""
        chosen, weights, counts = self.gate(tokens if seen is None else seen)
        order = chosen.flatten().argsort(stable=True)  # by expert, then by token
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        rows = _Permuted.apply(tokens, order // chosen.shape[1], place)
        rows = self.dispatch.run(rows, counts, self.experts)
        rows = _Permuted.apply(rows, place, order).view(*chosen.shape, -1)  # [T, k, D]
        return (rows * weights.unsqueeze(2)).sum(1).to(tokens.dtype)


class MoETransformer(Transformer):
    """``Transformer`` with a mixture of experts in every block after the first ``dense_layers``."""

    config: MoESection

    def attention(self, number: int) -> nn.Module:
        del number
        config = self.config
        return Attention(config, bias=config.attention_bias, norm=config.qk_norm, output_bias=config.output_bias)

    def feed_forward(self, number: int) -> nn.Module:
        return super().feed_forward(number) if number < self.config.dense_layers else self.mixture()

    def mixture(self) -> MixtureOfExperts:
        """Return the mixture of experts of a block."""
        return MixtureOfExperts(self.config)

    def parallel_plan(self) -> ParallelPlan:
        first, layers = self.config.dense_layers, self.config.layers
        # A mixture processes each rank's shard of the residual stream. Only its shared experts are a region.
        regions = [f"layers.{number}.mlp" for number in range(first)] + ["layers.*.mlp.shared_experts"]
        kept = {name: role for name, role in ROLES.items() if name != "layers.*.mlp"}
        shared = {name.replace(".mlp.", ".mlp.shared_experts."): kept[name] for name in kept if ".mlp." in name}
        return replace(
            super().parallel_plan(),
            roles=kept | shared | dict.fromkeys(regions, "region"),
            mixtures=tuple(f"layers.{number}.mlp" for number in range(first, layers)),
        )


def fused_experts(name: str, shape: Sequence[int]) -> Fragment | None:
    """Return the position of stacked experts in a checkpoint with one ``gate_up_proj`` and one ``down_proj`` for all
    experts of a layer; None for other parameters. ``name``: name in the checkpoint."""
    owner, _, part = name.rpartition(".")
    if not owner.endswith(".experts") or part not in ("gate_proj", "up_proj", "down_proj"):
        return None
    if part == "down_proj":
        return Fragment.whole(name, shape)
    whole = (shape[0], 2 * shape[1], *shape[2:])
    return Fragment.within(f"{owner}.gate_up_proj", whole, 1, 0 if part == "gate_proj" else shape[1], shape)


_MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class MoE(Llama):
    """Families ``glm4_moe`` (GLM-4.5), ``qwen3_moe`` and ``mixtral``."""

    section: MoESection
    transformer: type[Transformer] = MoETransformer

    def describe(self) -> str:
        model, shared = self.section, self.section.shared_experts
        return (
            f"{super().describe()}; {model.experts} experts of {model.expert_hidden_dim} in "
            f"{model.layers - model.dense_layers} layers, {model.experts_per_token} per token"
            f"{f', and {shared} shared' if shared else ''}"
        )

    def active_parameters(self, parameters: int) -> int:
        """Return how many of ``parameters`` are used per token."""
        model = self.section
        idle = (model.layers - model.dense_layers) * (model.experts - model.experts_per_token)
        return parameters - idle * self.parameters_of_expert()

    def parameters_of_expert(self) -> int:
        """Return the number of parameters of one routed expert."""
        return 3 * self.section.dim * self.section.expert_hidden_dim

    def flops_per_token(self, parameters: int, sequence_length: int) -> float:
        return super().flops_per_token(self.active_parameters(parameters), sequence_length)

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        names = self.checkpoint_names(name)
        if len(names) == 1:
            return (Fragment.whole(names[0], shape),)
        return tuple(Fragment.entry(each, shape, index) for index, each in enumerate(names))

    def exported_in(self, names: Collection[str], exported: Exported) -> Exported:
        """See ``ModelFamily``. Experts may be stacked as in the modules of transformers: Qwen 3.5 is, on the Hub."""
        if not any(name.endswith(".experts.gate_up_proj") for name in names):
            return exported

        def fused(name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
            found = fused_experts(self.export_name(name), shape)
            return exported(name, shape) if found is None else (found,)

        return fused

    def checkpoint_names(self, name: str) -> list[str]:
        """Return the names of parameter ``name`` in a Hugging Face checkpoint: one for each expert if experts are
        stacked, else one."""
        owner, _, last = name.rpartition(".")
        is_mixtral = self.section.family == "mixtral"
        if is_mixtral and ".mlp." in owner + ".":
            owner = owner.replace(".mlp", ".block_sparse_moe")
        if not owner.endswith(".experts"):
            return [self.export_name(f"{owner}.{last}")]
        last = _MIXTRAL_NAMES[last] if is_mixtral else last
        return [self.export_name(f"{owner}.{expert}.{last}.weight") for expert in range(self.section.experts)]

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        plain = super().export_config(end_token) | {"model_type": self.section.family}
        return plain | self.own_entries(plain)

    def own_entries(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of ``config.json`` that differ from ``plain``, the entries of all families."""
        config = self.section
        if config.family == "mixtral":
            return {"architectures": ["MixtralForCausalLM"], "sliding_window": None}
        if config.family == "qwen3_moe":
            own = {"decoder_sparse_step": 1, "mlp_only_layers": list(range(config.dense_layers))}
            return {"architectures": ["Qwen3MoeForCausalLM"], **own}
        return {
            "architectures": ["Glm4MoeForCausalLM"],
            "rope_parameters": {**plain["rope_parameters"], "partial_rotary_factor": config.rotary_fraction},
            "num_nextn_predict_layers": 0,
        }
