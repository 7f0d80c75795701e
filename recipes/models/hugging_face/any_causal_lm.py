"""Any decoder-only language model in transformers, run with transformers' own code.

Parameters keep their names. Code in a model's folder (``trust_remote_code``) is never run: the folder may come from
an untrusted source.

Shapes: B batch, S sequence, D dim, V vocabulary.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from serried.configs.errors import UserError
from serried.configs.hugging_face.model_folder import architecture_of, without_code
from serried.configs.schema.registry import models
from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.fsdp_units import units_of
from serried.parallel.plan import ParallelPlan
from serried.parallel.precision.low_precision_linear import import_torchao
from serried.recipes.models.family import LossFamily
from serried.recipes.models.hugging_face.any_causal_lm_config import HuggingFaceSection
from serried.recipes.models.hugging_face.document_attention import NAME, documents_at
from serried.recipes.models.hugging_face.generation_cache import GenerationCache, cache_for, depends_on_batch
from serried.recipes.models.hugging_face.model_checks import ModelChecks
from serried.recipes.models.hugging_face.tensor_roles import roles_of
from serried.recipes.models.layers.lm_head import EAGER, IGNORE, compiled_passes, linear_cross_entropy_sum


class HuggingFaceModel(LossFamily):
    """Family ``hf`` (``model=hf``)."""

    opens_in = "transformers"
    section: HuggingFaceSection

    def __init__(self, section: HuggingFaceSection, vocab_size: int) -> None:
        super().__init__(section, vocab_size)
        self._drawn: dict[str, Any] = {}
        """Standard deviation with which transformers initializes each parameter; None: ones. A string describes any
        other initialization."""
        self._fragments: dict[str, tuple[Fragment, ...]] = {}
        """Position of each parameter in the tensors of a checkpoint."""
        self._description = ""
        self._config: Any = None
        self._checks: ModelChecks | None = None
        self._layers = self._dim = 0

    def build(self) -> nn.Module:
        if find_spec("transformers.core_model_loading" if find_spec("transformers") else "transformers") is None:
            raise UserError("model=hf needs transformers 5 or newer; use: pip install 'transformers>=5'")
        draws = _Draws()
        with draws, _EmptyOnMeta():
            model = self._of_transformers()
        self._drawn = {name: draws.last(parameter) for name, parameter in model.named_parameters()}
        self._fragments = fragments_of(model)
        if not self.section.pretrained:
            self._check_initial_values()
        self._checks = ModelChecks(model)
        self._checks.run()
        if self._checks.takes_attention:
            model.set_attn_implementation(NAME)
        self.is_batched = not depends_on_batch(self._config)
        self._empty_cache = cache_for(model.forward, self._config)
        model.forward = _Forward(model, self._checks)
        return model

    def new_cache(self, padding: Sequence[int], capacity: int) -> GenerationCache | None:
        del capacity
        assert self._checks is not None, "build comes first"
        return self._empty_cache(padding) if self.is_batched and self._checks.takes_cache else None

    def _of_transformers(self) -> Any:
        transformers = import_transformers()
        path, found = self.section.path, self.section.architecture
        kind = str(found.get("model_type"))
        try:
            self._config = transformers.AutoConfig.for_model(**without_code(found) | {"vocab_size": self.vocab_size})
            self._config.use_cache = False
            model = transformers.AutoModelForCausalLM.from_config(self._config, dtype=torch.float32)
        except Exception as error:  # a model's code may raise any exception on an untrusted file
            reason = " ".join(str(error).split())[:200]
            if kind not in transformers.CONFIG_MAPPING:
                has_code = "; code in the folder of a model is never run" if "auto_map" in found else ""
                reason = f"transformers {transformers.__version__} has no such model, a newer version may{has_code}"
            elif self._config is not None and type(self._config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
                reason = "transformers has no causal language model of this type"
            raise UserError(f"model.path={path} has model_type {kind}: {reason}; use another model") from None
        named = found.get("architectures")
        if isinstance(named, list) and named and type(model).__name__ not in named:
            is_masked = architecture_of(found).endswith("ForMaskedLM")
            instead = f"task=masked_lm task.model={path}" if is_masked else f"a folder with a {type(model).__name__}"
            raise UserError(
                f"model.path={path} has a {architecture_of(found)}, but model=hf would train a {type(model).__name__} "
                f"with different weights or attention; use {instead}"
            )
        head = model.get_output_embeddings()
        is_tied = head is not None and head.weight is model.get_input_embeddings().weight
        tied = ", embeddings tied" if is_tied else ""
        self._layers, self._dim = (
            getattr(self._config, key, None) or 0 for key in ("num_hidden_layers", "hidden_size")
        )
        self._description = (
            f"{type(model).__name__} of transformers {transformers.__version__}, {self._layers} layers, dim "
            f"{self._dim}{tied}"
        )
        return model

    def _check_initial_values(self) -> None:
        for name, drawn in self._drawn.items():
            if isinstance(drawn, str):
                raise UserError(
                    f"model.pretrained=false: {name} is initialized with {drawn}, but only normal distributions with "
                    "mean 0 are supported; save a new model with transformers, and use model.path=FOLDER"
                )

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        """Return the repeated blocks, the roles of modules and, for code that computes in bf16, FSDP2 units. Without
        units, FSDP2 gathers fp32 parameters, and the model computes under autocast."""
        assert self._checks is not None, "build comes first"
        lists = {name: len(each) for name, each in model.named_modules() if isinstance(each, nn.ModuleList)}
        outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        longest = max(outer, key=lists.__getitem__, default="")
        blocks = tuple(f"{longest}.{index}" for index in range(lists.get(longest, 0)))
        units = units_of(model) if self._checks.computes_in_bf16 else ()
        return ParallelPlan(units=units, blocks=blocks, roles=roles_of(model), refuse_roles=self._refuse_roles)

    def _refuse_roles(self) -> str:
        assert self._checks is not None, "build comes first"
        reason = self._checks.refuses_roles
        return reason and f"{reason}; use {self.section.native}parallel.tensor=1 with parallel=fsdp"

    def initial_std(self, name: str) -> float | None:
        return self._drawn.get(name, 0.0)

    def describe(self) -> str:
        return self._description or "a model of transformers"

    def notes(self) -> list[str]:
        if self._checks is None:
            return []
        kind = self.section.architecture.get("model_type")
        native = f"model=auto reads {kind} natively" if kind in models.names() else "no native family reads it"
        limits = list(self._checks.limits())
        if not (self.is_batched and self._checks.takes_cache):
            limits.append("text is generated without a cache")
        how = f": {', '.join(limits)}" if limits else ""
        return [f"model=hf runs transformers' own code{how}; {native}"]

    def flops_per_token(self, parameters: int, sequence_length: int) -> float:
        """Return forward and backward FLOPs per token: 6 per weight of a matrix product, plus attention."""
        looked_up = 0 if getattr(self._config, "tie_word_embeddings", False) else self.vocab_size * self._dim
        return 6.0 * (parameters - looked_up) + 12 * self._layers * self._dim * sequence_length

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        return self._fragments.get(name) or super().exported(name, shape)

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        del end_token  # the end token in the folder's config is kept
        own = {"vocab_size": self.vocab_size, "dtype": "float32", "torch_dtype": "float32"}
        return without_code(self.section.architecture) | own


def import_transformers() -> Any:
    """Import transformers. Suppresses messages about missing GPU kernels from torchao, which transformers imports."""
    if find_spec("torchao"):
        with suppress(ImportError, AttributeError):  # an incompatible version; torchao is not needed here
            import_torchao()
    return importlib.import_module("transformers")


class _Forward:
    """Forward of a transformers model with a family's interface: maps tokens to logits, or to the summed loss."""

    def __init__(self, model: Any, checks: ModelChecks) -> None:
        self._name, self._forward, self._checks = type(model).__name__, model.forward, checks
        self._head = _Head(model.get_output_embeddings())

    def __call__(
        self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None,
        cache: GenerationCache | None = None,
    ) -> Tensor:  # fmt: skip
        """Map ``tokens`` [B, S] to logits [B, S, V]; with ``targets`` [B, S] (-100: no target), to the loss sum,
        fp32 scalar.

        ``positions`` [B, S] restart from 0 with each document; attention is masked between documents. With a ``cache``,
        the tokens follow the cached ones, and only the logits of the last token are returned, [B, 1, V].
        """
        if cache is not None:
            return cache.next_logits(self._forward, tokens)
        named: Mapping[str, Tensor] = {}
        if positions is not None:
            if self._checks.isolation is None:
                raise UserError(
                    f"data.isolate_documents=true: transformers' {self._name} cannot isolate documents in a sequence; "
                    "use data.packing=none or data.isolate_documents=false"
                )
            named = self._checks.isolation(positions)
        with documents_at(positions):
            if targets is None:
                return self._logits(tokens, **named)
            if self._head.is_product and self._checks.returns_head_output:
                with self._head.computing_loss(targets):
                    return self._logits(tokens, **named)
            logits = self._logits(tokens, **named).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")

    def _logits(self, tokens: Tensor, **named: Tensor) -> Tensor:
        logits: Tensor = self._forward(tokens, **named).logits
        return logits


class _Head:
    """Forward of the output projection, which computes the loss instead of logits on request."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._targets: Tensor | None = None
        self._passes = EAGER
        self._is_linear = type(module) is nn.Linear and module.bias is None
        if self._is_linear:
            self._forward = module.forward
            module.forward, module.compile_parts = self, self._compile_parts

    @property
    def is_product(self) -> bool:
        """Whether the head only multiplies by its weight, without an adapter."""
        return self._is_linear and not hasattr(self._module, "adapter")

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map hidden states [B, S, D] to logits [B, S, V], or to the loss summed over targets."""
        if self._targets is not None:
            if torch.is_autocast_enabled(hidden.device.type):
                hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
            return linear_cross_entropy_sum(
                hidden.flatten(0, 1), self._module.weight, self._targets, passes=self._passes
            )
        logits: Tensor = self._forward(hidden)
        return logits

    def _compile_parts(self) -> None:
        self._passes = compiled_passes()

    @contextmanager
    def computing_loss(self, targets: Tensor) -> Iterator[None]:
        """Context manager in which forward returns the loss."""
        self._targets = targets
        try:
            yield
        finally:
            self._targets = None


class _EmptyOnMeta(TorchFunctionMode):
    """Context manager in which ``torch.empty`` creates tensors on the meta device.

    Parameters, which start as ``torch.empty``, take no memory. Buffers, which are computed, have their values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        return func(*args, **(named | {"device": "meta"} if func is torch.empty else named))


class _Views(TorchFunctionMode):
    """Context manager in which ``contiguous`` returns its input, so that slices of a tensor remain views of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


class _Draws(TorchDispatchMode):
    """Records how tensors are initialized while a model is built."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[int, tuple[Tensor, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, _, _ = func.__name__.partition(".")
        if kind.endswith("_") and isinstance(args[0], Tensor):
            self._last[id(args[0])] = args[0], _drawn(kind, args[1:])
        return func(*args, **(kwargs or {}))

    def last(self, parameter: Tensor) -> Any:
        """Return how ``parameter`` was last filled: the standard deviation of a zero-mean normal distribution, None for
        ones, or a string that describes other values."""
        return self._last.get(id(parameter), (parameter, "other values"))[1]


def _drawn(kind: str, values: Sequence[Any]) -> Any:
    if kind == "normal_":
        mean, std = values[0] if values else 0.0, values[1] if len(values) > 1 else 1.0
        return std if mean == 0 else f"a mean of {mean}"
    constant = 0.0 if kind == "zero_" else values[0] if kind == "fill_" else None
    return {0.0: 0.0, 1.0: None}.get(constant, kind) if isinstance(constant, int | float) else kind


def fragments_of(model: Any) -> dict[str, tuple[Fragment, ...]]:
    """Return the position of each parameter in the tensors that transformers would save.

    Since version 5, transformers renames some tensors and splits stacked experts. The mapping is found by running
    its conversion on meta tensors. Raises ``UserError`` if a tensor would hold more than one parameter.
    """
    from transformers.core_model_loading import revert_weight_conversion  # save_pretrained calls it

    parameters = {name: parameter.detach().to("meta") for name, parameter in model.named_parameters()}
    name_of = {parameter.untyped_storage()._cdata: name for name, parameter in parameters.items()}
    found: dict[str, list[Fragment]] = {}
    with _Views():
        saved = revert_weight_conversion(model, dict(parameters))
    for name, tensor in saved.items():
        ours = name_of.get(tensor.untyped_storage()._cdata, "")
        if not ours or tensor.stride() != parameters[ours].stride()[-tensor.ndim :]:
            raise UserError(
                f"transformers' {type(model).__name__} saves {name} in a layout that is not supported; use another "
                "model"
            )
        part = Fragment.view(name, tensor.shape, int(tensor.storage_offset()), parameters[ours].shape)
        found.setdefault(ours, []).append(part)
    return {name: tuple(fragments) for name, fragments in found.items()}
