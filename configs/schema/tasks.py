"""Sections of the built-in tasks beside plain training on text."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from serried.configs.schema.sections import Count, Number, PathText, Section, Size, TaskSection

_OF_PAIRS = ("reward_margin", "reward_accuracy", "chosen_reward", "rejected_reward")
_BETAS = {"dpo": 0.1, "orpo": 0.1, "simpo": 2.0}


class CausalLMSection(TaskSection):
    """Training to predict the next token."""

    metrics = ()

    label_smoothing: Number = Field(default=0.0, ge=0, le=0.9)
    """Fraction of each target that is spread evenly over the vocabulary, in training only."""
    z_loss: Number = Field(default=0.0, ge=0)
    """Weight of the z-loss, the squared log-sum-exp of the logits, such as 1e-4."""


class PreferenceSection(TaskSection):
    """Training on pairs of answers, of which one is preferred."""

    formats: ClassVar[tuple[str, ...]] = ("preference",)
    metrics = (*_OF_PAIRS, "chosen_log_prob", "rejected_log_prob")

    loss: Literal["dpo", "orpo", "simpo"] = "dpo"
    """``dpo`` compares with the initial model; ``orpo`` and ``simpo`` need no reference."""
    beta: Annotated[Number, Field(gt=0)] | None = None
    """Scale of the rewards, for ``orpo`` the weight of the odds ratio; when null 0.1, or 2 for ``simpo``."""
    margin: Annotated[Number, Field(ge=0)] | None = None
    """``simpo``: target margin between the rewards; when null 1."""

    @property
    def scale(self) -> float:
        """``beta``, or what it is by default."""
        return _BETAS[self.loss] if self.beta is None else self.beta

    @property
    def target_margin(self) -> float:
        """``margin``, or what it is by default."""
        return 1.0 if self.margin is None else self.margin

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if self.margin is not None and self.loss != "simpo":
            yield f"task.margin={self.margin:g} is only read with task.loss=simpo; leave it out"

    def mistakes_with(self, config: Any) -> Iterator[str]:
        yield from super().mistakes_with(config)
        yield from _whole_sequences(config)


class DistillationSection(TaskSection):
    """Training to predict tokens as a larger model does."""

    metrics = ("cross_entropy", "divergence")
    has_teacher: ClassVar[bool] = True
    by_content = ("teacher",)

    teacher: PathText | None = Field(default=None, min_length=1, max_length=4096)
    """Folder of the teacher, or its name on the Hub."""
    weight: Annotated[Number, Field(gt=0, le=1)] = 0.5
    """Weight of the divergence from the teacher in the loss; the rest is cross entropy."""
    temperature: Annotated[Number, Field(gt=0, le=100)] = 1.0
    """Temperature that softens both distributions before they are compared."""

    def mistakes_with(self, config: Any) -> Iterator[str]:
        yield from super().mistakes_with(config)
        if config.parallel.pipeline != 1:
            yield (
                f"parallel.pipeline={config.parallel.pipeline} with task.name=distillation, whose teacher is not split "
                "into stages; use parallel.pipeline=1, with parallel=fsdp or parallel.tensor for large models"
            )
        for name, group in config.optim.groups.items():
            if group.frozen:
                yield (
                    f"optim.groups.{name}.frozen=true with task.name=distillation: what is frozen is taken for the "
                    "teacher's and held in the type of products; leave it out, or use adapter=lora"
                )


class RewardSection(TaskSection):
    """Training of a model that scores answers, on pairs of them."""

    formats: ClassVar[tuple[str, ...]] = ("preference",)
    metrics = _OF_PAIRS

    def mistakes_with(self, config: Any) -> Iterator[str]:
        yield from super().mistakes_with(config)
        yield from _whole_sequences(config)
        if config.parallel.tensor != 1:
            yield (
                f"parallel.tensor={config.parallel.tensor} cannot divide the one row of the head of task.name=reward; "
                "use parallel.tensor=1, with parallel=fsdp for large models"
            )
        if config.trainer.sample_tokens:
            yield (
                f"trainer.sample_tokens={config.trainer.sample_tokens} with task.name=reward, which writes no text; "
                "use trainer.sample_tokens=0"
            )


class SampledSection(Section):
    """Samples, and the model that is trained on them."""

    by_content = ("path",)

    path: PathText = Field(min_length=1, max_length=4096)
    """Samples: a file or folder, or a Hugging Face dataset."""
    validation: str | None = None
    """Split to evaluate on; when null the first of ``val``, ``validation`` and ``test`` that exists."""
    model: PathText = Field(min_length=1, max_length=4096)
    """Name of the model in its library; for transformers a folder, or a name on the Hub."""
    pretrained: bool = False
    """Start from the pretrained weights of the model; the head is new unless the number of classes matches."""
    label_smoothing: Number = Field(default=0.0, ge=0, le=0.9)
    """Share of each target that is spread evenly over the classes, in training only."""

    def mistakes_with(self, config: Any) -> Iterator[str]:
        """Refuse the sections of a language model."""
        yield (
            f"task.name={config.task.name} was added to the keys of a language model; choose it with "
            f"task={config.task.name} instead"
        )


class LabelledSection(SampledSection):
    """Samples that have a class each, and the model that is to tell the classes apart."""

    label_column: str = "label"
    """Column of the labels."""


class ImageSection(LabelledSection):
    """Images and their classes."""

    path: PathText = Field(default="images", min_length=1, max_length=4096)
    """Samples: a file or folder, or a Hugging Face dataset."""
    image_column: str = "image"
    """Column of a Hugging Face dataset with the images."""
    library: Literal["torchvision", "timm", "transformers"] = "torchvision"
    """Library of the model."""
    model: PathText = Field(default="resnet50", min_length=1, max_length=4096)
    """Name of the model in its library; for transformers a folder, or a name on the Hub."""
    image_size: Size = 224
    """Height and width that images are scaled to."""
    smallest_crop: Annotated[Number, Field(gt=0, le=1)] = 0.08
    """Smallest fraction of an image that a random crop keeps in training; 1: no random crops."""
    flip: bool = True
    """Mirror half of the images in training."""
    sync_batch_norm: bool = False
    """Compute BatchNorm's statistics over all ranks; on GPUs only."""


class TextsSection(SampledSection):
    """Texts, and a model of transformers."""

    path: PathText = Field(default="texts.jsonl", min_length=1, max_length=4096)
    """Samples: a file or folder, or a Hugging Face dataset."""
    text_column: str = "text"
    """Column of the texts."""
    model: PathText = Field(default="answerdotai/ModernBERT-base", min_length=1, max_length=4096)
    """Name of the model in its library; for transformers a folder, or a name on the Hub."""
    pretrained: bool = True
    """Start from the pretrained weights of the model; the head is new unless the number of classes matches."""
    sequence_length: Annotated[Count, Field(ge=2, le=10**6)] = 512
    """Maximum tokens of a text; longer texts are truncated."""


class TextClassSection(TextsSection, LabelledSection):
    """Texts and their classes."""


class MaskedLMSection(TextsSection):
    """Texts of which a model is to predict words that are hidden."""

    mask_share: Annotated[Number, Field(gt=0, le=1)] = 0.15
    """Fraction of the tokens to predict: of these 80% are masked, 10% become a random token, and 10% stay."""


def _whole_sequences(config: Any) -> Iterator[str]:
    if config.parallel.context != 1:
        yield (
            f"parallel.context={config.parallel.context} divides answers over ranks, and task.name={config.task.name} "
            "needs whole ones; use parallel.context=1, and parallel.tensor for long sequences"
        )
