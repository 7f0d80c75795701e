"""Knowledge distillation: predict each token like a larger, frozen model (https://arxiv.org/abs/1503.02531).

The teacher is a submodule of the model, so every parallel layout shards it like the model. Checkpoints do not
contain it. The teacher's head stores its hidden states, and the student's head compares the logits of both, one chunk
of tokens at a time.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.formats import size
from serried.configs.hugging_face.model_folder import model_folder, teacher_section
from serried.configs.plain_data import read_json
from serried.configs.schema.registry import models
from serried.configs.schema.sections import RunConfig
from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.plan import LossTerms, ParallelPlan, Vocabulary
from serried.recipes.data.samples.token_dataset import Batch
from serried.recipes.data.tokenizers.tokenizer import LARGEST_TOKENIZER, ids_of_tokens
from serried.recipes.models.family import ModelFamily, family_of
from serried.recipes.models.layers.lm_head import Chunk, Gradients, LanguageModelHead, chunks
from serried.recipes.text.causal_lm import CausalLM
from serried.recipes.text.distillation_config import DistillationSection

_TEACHER = "teacher"
"""Name of the teacher's submodule."""


class Distillation(CausalLM):
    """A language model trained to match a teacher."""

    Config = DistillationSection

    config: DistillationSection

    def configure(self, run: RunConfig) -> None:
        super().configure(run)
        if self.config.teacher is None:
            raise UserError("task.name=distillation needs a teacher: task.teacher=FOLDER_OR_NAME")
        self._folder: Path | None = None
        """The teacher's folder on this node, set by ``open_data``."""

    @cached_property
    def _teacher(self) -> ModelFamily:
        """Model family of the teacher. Raises ``UserError`` if the teacher cannot be read, has a vocabulary of another
        size, or does not support ``data.sequence_length``."""
        path = str(self.config.teacher)
        section = teacher_section(path)
        if section.vocab_size != self.vocab_size():
            raise UserError(
                f"task.teacher={path} has a vocabulary of {section.vocab_size:,} tokens, but the model has "
                f"{self.vocab_size():,}; use a teacher and a model with the same vocabulary"
            )
        if self._data.sequence_length > (longest := section.max_sequence_length):
            raise UserError(
                f"data.sequence_length={self._data.sequence_length} exceeds the {longest} tokens that "
                f"task.teacher={path} supports; use data.sequence_length={longest}"
            )
        return family_of(models.get(section.family).load(), section, section.vocab_size)

    def prepare(self, show: Callable[[str], None] | None = None, threads: int | None = None) -> str:
        teacher = self.teacher_folder()
        return json.dumps({"teacher": str(teacher), "data": super().prepare(show, threads)})

    def open_data(self, place: str) -> None:
        places = json.loads(place)
        super().open_data(places["data"])
        self._folder = Path(places["teacher"])
        own = self._text.tokenizer.spec().get("files", {}).get("tokenizer.json")
        if own and self._teacher_ids() not in (None, ids_of_tokens(json.loads(own))):
            raise UserError(
                f"task.teacher={self.config.teacher} and data.tokenizer={self._data.tokenizer} have different "
                "vocabularies; use a teacher and a model with the same vocabulary"
            )

    def _teacher_ids(self) -> dict[str, int] | None:
        """Return the id of each of the teacher's tokens; None if it has no ``tokenizer.json``."""
        file = self.teacher_folder() / "tokenizer.json"
        try:
            return ids_of_tokens(read_json(file, LARGEST_TOKENIZER)) if file.exists() else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"task.teacher={self.config.teacher}: cannot read {file} ({type(error).__name__}: {error}); replace "
                "the file, or remove it if the teacher has the tokens of the model"
            ) from None

    # model ----------------------------------------------------------------------------------------------------------

    def _weigh_tokens(self, model: nn.Module) -> None:
        del model
        raise UserError(
            "distillation does not support data whose messages or rows have weights other than 0 and 1; use only "
            "0 and 1, or ignore the weights of rows: data.columns.weight=null"
        )

    def build_model(self) -> nn.Module:
        model, teacher = super().build_model(), self._teacher.build()
        mine, theirs = _head(model, self._model.family), _head(teacher, self._teacher.section.family)
        kept = _Kept(self.config.weight, self.config.temperature)
        mine.loss, theirs.loss = kept.compare, kept.keep
        teacher.requires_grad_(False)
        model.add_module(_TEACHER, teacher.eval())
        return model

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        own, its = self._family().parallel_plan(model), self._teacher.parallel_plan(model.get_submodule(_TEACHER))
        if not own.units or not its.units:
            return ParallelPlan()
        # The teacher's head is in no FSDP unit, so its weight stays gathered: the student's head reads it.
        ends = tuple(name for name, role in its.roles.items() if role == "head")
        units = [tuple(f"{_TEACHER}.{name}" for name in unit) for unit in its.units if not {*unit} & {*ends}]
        return replace(
            own,
            units=(*units, *own.units),
            roles={**own.roles, **{f"{_TEACHER}.{glob}": role for glob, role in its.roles.items()}},
            context=(*own.context, *(f"{_TEACHER}.{name}".rstrip(".") for name in its.context)),
        )

    def initial_std(self, name: str) -> float | None:
        return 0.0 if name.startswith(f"{_TEACHER}.") else super().initial_std(name)

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        return () if name.startswith(f"{_TEACHER}.") else super().exported(name, shape)

    def teacher_folder(self) -> Path:
        return self._folder or model_folder(str(self.config.teacher), "*.safetensors", "*.json", key="task.teacher")

    def exported_teacher(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        own = name.removeprefix(f"{_TEACHER}.")
        return () if own == name else self._teacher.exported(own, shape)

    def flops_per_sample(self, parameters: int) -> float:
        length = self._data.sequence_length
        forward = self._teacher.flops_per_token(self._teacher_parameters, length) / 3
        return super().flops_per_sample(parameters) + length * forward

    @cached_property
    def _teacher_parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self._teacher.build().parameters())

    def describe_reference(self) -> str:
        width = 2 if self.run.precision.name in ("bf16", "float8", "int8") else 4
        return (
            f"the teacher {self.config.teacher}: {self._teacher.describe()}; {self._teacher_parameters:,} parameters, "
            f"{size(width * self._teacher_parameters)} in total, sharded as the model is; frozen, not saved in "
            "checkpoints"
        )

    # loss -----------------------------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: Batch) -> LossTerms:
        inputs = self._teacher.inputs(batch)
        with torch.no_grad():
            model.get_submodule(_TEACHER)(inputs.stream, **inputs.named)
        return super().loss(model, batch)

    def terms(self, output: Tensor, batch: Batch) -> LossTerms:
        terms = super().terms(output[0], batch)
        named = {"cross_entropy": output[1], "divergence": output[2]}
        return terms._replace(metrics={name: (value.detach(), terms.weight) for name, value in named.items()})


def _head(model: nn.Module, family: str) -> LanguageModelHead:
    for module in model.modules():
        if isinstance(module, LanguageModelHead):
            return module
    raise UserError(
        f"model.family={family} returns all logits at once, but distillation compares logits in chunks; use a built-in "
        "family"
    )


class _End(NamedTuple):
    """Inputs from which a model's logits are computed."""

    hidden: Tensor
    """Hidden states, [T, D]"""
    weight: Tensor
    vocabulary: Vocabulary
    soft_cap: float | None


class _Kept:
    """Stores the teacher's hidden states and head weight from its forward until the student's forward."""

    def __init__(self, weight: float, temperature: float) -> None:
        self._weight, self._temperature = weight, temperature
        self._end: _End | None = None

    def keep(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary, soft_cap: float | None
    ) -> Tensor:
        """Store the inputs of the teacher's logits. Returns a loss of zero."""
        del targets
        self._end = _End(hidden, weight, vocabulary, soft_cap)
        return hidden.new_zeros(())

    def compare(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary, soft_cap: float | None
    ) -> Tensor:
        """Return the loss of the student's head; see ``distillation_sums``."""
        end, self._end = self._end, None
        assert end is not None, "the teacher's forward comes first"
        mine = _End(hidden, weight, vocabulary, soft_cap)
        return distillation_sums(mine, end, targets, self._weight, self._temperature)


def distillation_sums(mine: _End, its: _End, targets: Tensor, weight: float, temperature: float) -> Tensor:
    """Return the loss, the cross entropy and the divergence from the teacher, each summed over targets, fp32 [3].

    The loss is (1 - ``weight``) x cross entropy + ``weight`` x ``temperature``^2 x KL(teacher || student), with both
    distributions softened by ``temperature``. Only the loss has a gradient. Logits are computed for one
    chunk of tokens at a time. If autograd is enabled, gradients are computed in the forward.
    """
    if not torch.is_grad_enabled():
        sums = torch.zeros(3, dtype=torch.float32, device=mine.hidden.device)
        its_chunks = _chunks(its, targets)
        for chunk in _chunks(mine, targets):
            _add(sums, chunk, _divergence(chunk.logits, next(its_chunks).logits, mine.vocabulary, temperature)[0])
            del chunk  # frees its memory before the next chunk is computed
        return _with_loss(sums, weight, temperature)
    trained: Tensor = _Distilled.apply(mine.hidden, mine.weight, targets, mine, its, weight, temperature)
    return trained


def _chunks(end: _End, targets: Tensor) -> Iterator[Chunk]:
    return chunks(end.hidden, end.weight.to(end.hidden.dtype), targets, end.vocabulary, end.soft_cap)


def _add(sums: Tensor, chunk: Chunk, divergence: Tensor) -> None:
    """Add the cross entropy and the divergence of a chunk to ``sums``."""
    sums += torch.stack((sums.new_zeros(()), chunk.losses.sum(), divergence.where(chunk.is_target, 0).sum()))


def _with_loss(sums: Tensor, weight: float, temperature: float) -> Tensor:
    """Compute the loss from the other two sums, in place."""
    sums[0] = (1 - weight) * sums[1] + weight * temperature**2 * sums[2]
    return sums


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, mine: _End, its: _End, share: float, temperature: float
    ) -> Tensor:
        vocabulary = mine.vocabulary
        gradients = Gradients(hidden, weight, vocabulary, is_frozen=not ctx.needs_input_grad[1])
        sums = torch.zeros(3, dtype=torch.float32, device=hidden.device)
        its_chunks = _chunks(its, targets)  # zip() would keep references to the previous chunks
        for chunk in _chunks(mine._replace(weight=gradients.low_weight), targets):
            divergence, logs, wanted = _divergence(chunk.logits, next(its_chunks).logits, vocabulary, temperature)
            _add(sums, chunk, divergence)
            softened = logs.exp_().sub_(wanted)
            del wanted
            slope = None if mine.soft_cap is None else (chunk.logits / mine.soft_cap).square_().neg_().add_(1)
            of_logits = chunk.logits.sub_(chunk.normalizer.unsqueeze(1)).exp_()  # softmax, in place
            of_logits.scatter_add_(1, chunk.row.unsqueeze(1), -chunk.is_here.float().unsqueeze(1))
            of_logits.mul_(1 - share).add_(softened, alpha=share * temperature)
            of_logits.mul_(chunk.is_target.unsqueeze(1))
            if slope is not None:
                of_logits.mul_(slope)
            gradients.add(chunk, of_logits)
            del chunk, logs, softened, of_logits, slope  # frees their memory before the next chunk
        ctx.save_for_backward(gradients.hidden, gradients.weight)
        ctx.weight_dtype = weight.dtype
        return _with_loss(sums, share, temperature)

    @staticmethod
    def backward(ctx, grad_sums: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        grad_hidden, grad_weight = ctx.saved_tensors
        of_weight = (grad_weight * grad_sums[0]).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        return (grad_hidden * grad_sums[0]).to(grad_hidden.dtype), of_weight, None, None, None, None, None


def _divergence(mine: Tensor, its: Tensor, vocabulary: Vocabulary, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return KL(teacher || student) of each token [T], the student's softened log-probabilities and the teacher's
    softened probabilities, each [T, local rows]."""
    mine, its = mine / temperature, its / temperature
    nothing = mine.new_zeros(len(mine))
    my_normalizer, _ = vocabulary.combine(mine.logsumexp(1), nothing)
    its_normalizer, _ = vocabulary.combine(its.logsumexp(1), nothing)
    wanted = (its - its_normalizer.unsqueeze(1)).exp_()
    _, expected = vocabulary.combine(nothing, (wanted * (its - mine)).sum(1))
    return expected - its_normalizer + my_normalizer, mine.sub_(my_normalizer.unsqueeze(1)), wanted
