"""Base class of model families.

A new family is a module with its code, a module ``*_config`` next to it with its section, and a YAML preset.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.schema.models import ModelSection
from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.plan import Inputs, ParallelPlan
from serried.recipes.models.layers.kv_cache import Cache
from serried.recipes.models.layers.lm_head import IGNORE

Exported = Callable[[str, Sequence[int]], tuple[Fragment, ...]]
"""Maps the name and shape of a parameter to the position of its elements in the tensors of a checkpoint."""


class Tokens(Protocol):
    """A batch of sequences, such as ``recipes.data.samples.token_dataset.Batch``."""

    @property
    def tokens(self) -> Tensor:
        """[B, S], int64"""

    @property
    def targets(self) -> Tensor:
        """[B, S], int64; ``IGNORE`` where there is no target"""

    @property
    def positions(self) -> Tensor | None:
        """[B, S], int64, restarting at 0 in each document; None if documents are not isolated from each other"""


class ModelFamily:
    """A decoder-only language model of one configuration. ``build`` is required; everything else has a default.

    Register a subclass (or a function ``build(section, vocab_size)``) with ``serried.register_model``.

    Args:
        section: the family's config section.
        vocab_size: rows of the embedding.

    Example::

        @serried.register_model("bigram", section=BigramSection)
        class Bigram(serried.ModelFamily):
            def build(self):
                width = self.section.width
                return nn.Sequential(nn.Embedding(self.vocab_size, width), nn.Linear(width, self.vocab_size))
    """

    opens_in: str = ""
    """Other software that opens a checkpoint without conversion."""
    cached_layers: int | None = None
    """Number of layers of the KV cache, if the model's forward accepts a ``cache``; None to generate text without
    one."""
    is_batched: bool = True
    """Whether text can be generated for several prompts together: the logits of a sequence do not depend on the other
    sequences of a batch."""

    def __init__(self, section: Any, vocab_size: int) -> None:
        """Store the section and the vocabulary size."""
        self.section, self.vocab_size = section, vocab_size

    def build(self) -> nn.Module:
        """Return the module, on the CPU with its own initial values, or on the meta device with ``initial_std``.

        Returns:
            A module that maps ``tokens`` [B, S], int64, to logits [B, S, V].
        """
        raise NotImplementedError(f"{type(self).__name__} must define build()")

    def inputs(self, batch: Tokens) -> Inputs:
        """Return the arguments of the model's forward, ``model(stream, **named)``.

        Args:
            batch: sequences with ``tokens``, ``targets`` and perhaps ``positions``, [B, S] each.

        Raises:
            UserError: the batch has positions, but the model does not accept them.
        """
        if batch.positions is not None:
            raise UserError(
                "data.isolate_documents=true needs a model family that accepts positions; use "
                "data.isolate_documents=false"
            )
        return Inputs(batch.tokens)

    def loss_sum(self, output: Tensor, batch: Tokens) -> Tensor:
        """Return the cross entropy summed over the targets that are not ``IGNORE``, a scalar.

        Args:
            output: the model's output; by default logits [B, S, V].
            batch: the batch of this output.
        """
        return F.cross_entropy(
            output.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        """Return how ``model`` can be sharded. The default plan finds the repeated blocks."""
        del model
        return ParallelPlan()

    def initial_std(self, name: str) -> float | None:
        """Return the standard deviation of a parameter's initial values, for a model on meta; None for ones.

        Args:
            name: name of the parameter in the model.
        """
        raise UserError(
            f"{type(self).__name__}.build() returns a model on the meta device, so initial_std({name!r}) must be "
            "defined"
        )

    def new_cache(self, padding: Sequence[int], capacity: int) -> Any:
        """Return an empty cache for text generation, the argument ``cache`` of the model's forward; None to recompute
        all tokens for each new one.

        With a cache, the forward must follow ``Cache.positions`` and ``Cache.mask``, and return the logits of the last
        token, [B, 1, V].

        Args:
            padding: number of padding tokens at the beginning of each sequence of a batch.
            capacity: largest number of tokens of a sequence, including padding.
        """
        return None if self.cached_layers is None else Cache(self.cached_layers, capacity, padding)

    def describe(self) -> str:
        """Return a description of the model's sizes, for the plan."""
        return type(self).__name__

    def notes(self) -> list[str]:
        """Return warnings for the plan."""
        return []

    def flops_per_token(self, parameters: int, sequence_length: int) -> float:
        """Return the FLOPs of forward and backward per token. The default counts 6 per parameter, without attention.

        Args:
            parameters: number of trained and frozen parameters.
            sequence_length: number of tokens per sequence.
        """
        del sequence_length
        return 6.0 * parameters

    def export_name(self, name: str) -> str:
        """Return the name of parameter ``name`` in a checkpoint."""
        return name

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        """Return the position of a parameter's elements in the tensors of a checkpoint.

        The default is one tensor of the same shape with the name ``export_name(name)``. See ``Fragment`` for a
        parameter that is stored as several tensors (stacked experts), and for parameters that share a tensor
        (queries, keys and values).

        Args:
            name: name of the parameter in the model.
            shape: unsharded shape of the parameter.
        """
        return (Fragment.whole(self.export_name(name), shape),)

    def exported_in(self, names: Collection[str], exported: Exported) -> Exported:
        """Return ``exported`` for reading a folder whose layout may differ from the one that is written.

        Args:
            names: names of the tensors in the folder.
            exported: maps parameters to their position in the layout that is written.
        """
        del names
        return exported

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        """Return the content of ``config.json`` for an exported model.

        Args:
            end_token: id of the end-of-text token, if there is one.
        """
        return {"model_type": self.section.family, "vocab_size": self.vocab_size, "eos_token_id": end_token}


class LossFamily(ModelFamily):
    """A family whose model ends in a ``LanguageModelHead``, which computes the loss in chunks."""

    def inputs(self, batch: Tokens) -> Inputs:
        return Inputs(batch.tokens, {"targets": batch.targets, "positions": batch.positions})

    def loss_sum(self, output: Tensor, batch: Tokens) -> Tensor:
        del batch
        return output


class PublishedFamily(LossFamily):
    """A family that transformers also supports. Its section converts from and to ``config.json``."""

    opens_in = "transformers"

    def __init__(self, section: Any, vocab_size: int) -> None:
        super().__init__(section, vocab_size)
        self.cached_layers = section.layers
        padding = getattr(section, "padding_token", None)
        if padding is not None and padding >= vocab_size:
            of_file = f" (pad_token_id of the config.json in model.path={section.path})" if section.path else ""
            raise UserError(
                f"model.padding_token={padding}{of_file} is outside the embedding ({vocab_size} rows); use "
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
    """Family that wraps a function ``build(section, vocab_size)``."""

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
    """Create the model family from a registered class or function."""
    if isinstance(registered, type) and issubclass(registered, ModelFamily):
        return registered(section, vocab_size)
    return BuiltFamily(registered, section, vocab_size)
