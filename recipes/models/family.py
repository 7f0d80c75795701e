"""Base class of the families of language models."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.schema.models import ModelSection
from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.plan import Inputs, ParallelPlan
from serried.recipes.models.layers.lm_head import IGNORE


class Tokens(Protocol):
    """A batch of sequences; ``recipes.data.samples.token_dataset.Batch`` is one."""

    @property
    def tokens(self) -> Tensor:
        """[B, S], int64"""

    @property
    def targets(self) -> Tensor:
        """[B, S], int64; ``IGNORE`` where there is none"""

    @property
    def positions(self) -> Tensor | None:
        """[B, S], int64, from 0 in each document; None: documents are not isolated from each other"""


class ModelFamily:
    """A decoder-only language model of one configuration. ``build`` is required; everything else has a default."""

    opens_in: str = ""
    """Other software that opens a checkpoint as it is."""
    cached_layers: int | None = None
    """Layers that keep keys and values, for models whose forward takes a ``cache``; None: text is generated without."""

    def __init__(self, section: Any, vocab_size: int) -> None:
        """``section``: the family's own section; ``vocab_size``: rows of the embedding."""
        self.section, self.vocab_size = section, vocab_size

    def build(self) -> nn.Module:
        """Return the module, on the CPU with its own initial values, or on the meta device with ``initial_std``.

        It maps ``tokens`` [B, S] to logits [B, S, V].
        """
        raise NotImplementedError(f"{type(self).__name__} must define build()")

    def inputs(self, batch: Tokens) -> Inputs:
        """Return what the model is called with: ``model(stream, **named)``."""
        if batch.positions is not None:
            raise UserError("data.isolate_documents=true needs a model family that takes positions; leave it out")
        return Inputs(batch.tokens)

    def loss_sum(self, output: Tensor, batch: Tokens) -> Tensor:
        """Return the cross entropy summed over the targets that are not ``IGNORE``, from what the model returned."""
        return F.cross_entropy(
            output.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        """Return how ``model`` may be sharded. The default finds its repeated blocks."""
        del model
        return ParallelPlan()

    def initial_std(self, name: str) -> float | None:
        """Return the standard deviation of the initial values of a parameter of a model on meta; None: ones."""
        raise UserError(f"{type(self).__name__}.build() returns a model on meta: define initial_std(name) ({name})")

    def describe(self) -> str:
        """Return the sizes of the model, for the plan."""
        return type(self).__name__

    def notes(self) -> list[str]:
        """Return warnings for the plan."""
        return []

    def flops_per_token(self, parameters: int, sequence_length: int) -> float:
        """Return FLOPs of forward and backward: 6 per parameter, attention not counted."""
        del sequence_length
        return 6.0 * parameters

    def export_name(self, name: str) -> str:
        """Return the name in a checkpoint of parameter ``name``."""
        return name

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        """Return where the elements of parameter ``name`` of ``shape`` lie in the tensors of a checkpoint.

        The default: in one tensor of the same shape, under its ``export_name``. See ``Fragment`` for a parameter that
        is several tensors there (stacked experts), or for parameters that share one (queries, keys and values).
        """
        return (Fragment.whole(self.export_name(name), shape),)

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        """Return the content of ``config.json`` beside the weights."""
        return {"model_type": self.section.family, "vocab_size": self.vocab_size, "eos_token_id": end_token}


class LossFamily(ModelFamily):
    """A family whose model ends in a ``LanguageModelHead``, which forms the loss chunk by chunk."""

    def inputs(self, batch: Tokens) -> Inputs:
        return Inputs(batch.tokens, {"targets": batch.targets, "positions": batch.positions})

    def loss_sum(self, output: Tensor, batch: Tokens) -> Tensor:
        del batch
        return output


class PublishedFamily(LossFamily):
    """A family that transformers has too, whose section says how a ``config.json`` describes its models."""

    opens_in = "transformers"

    def __init__(self, section: Any, vocab_size: int) -> None:
        super().__init__(section, vocab_size)
        self.cached_layers = section.layers
        padding = getattr(section, "padding_token", None)
        if padding is not None and padding >= vocab_size:
            of_file = f" (pad_token_id of the config.json in model.path={section.path})" if section.path else ""
            raise UserError(
                f"model.padding_token={padding}{of_file} is no row of the embedding, which has {vocab_size}; use "
                "model.padding_token=null"
            )

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        model_type, architecture = self.section.opens_as
        return {
            **self.section.described(),
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "initializer_range": self.section.initializer_std,
            "bos_token_id": end_token,
            "eos_token_id": end_token,
            "dtype": "float32",
        }


class BuiltFamily(ModelFamily):
    """The family of a function ``build(section, vocab_size)``."""

    def __init__(self, build: Any, section: Any, vocab_size: int) -> None:
        super().__init__(section, vocab_size)
        self._build = build

    def build(self) -> nn.Module:
        return self._build(self.section, self.vocab_size)

    def describe(self) -> str:
        own = {name: getattr(self.section, name) for name in type(self.section).model_fields}
        sizes = [f"{name} {value}" for name, value in own.items() if name not in ModelSection.model_fields]
        return ", ".join(sizes) or self.section.family


def family_of(registered: Any, section: ModelSection, vocab_size: int) -> ModelFamily:
    """Return the family that was registered, a class or a function, for a configuration."""
    if isinstance(registered, type) and issubclass(registered, ModelFamily):
        return registered(section, vocab_size)
    return BuiltFamily(registered, section, vocab_size)
