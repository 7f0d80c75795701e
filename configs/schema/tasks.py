"""Sections of tasks on samples, shared with their data readers and their models.

The section of a task is next to its code in ``recipes/``, in a module whose name ends in ``_config``.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from serried.configs.schema.fields import Count, Number, PathOrUrl, Section, Size
from serried.configs.schema.sections import LoadingSection


class SampledSection(Section):
    """Samples, and the model that is trained on them."""

    by_content = ("path",)
    loading: ClassVar[type[LoadingSection]] = LoadingSection
    """Class of the section ``data``."""

    path: PathOrUrl = Field(min_length=1, max_length=4096)
    """Samples: a file or folder, or a Hugging Face dataset."""
    validation: str | None = None
    """Split to evaluate on; null: the first of ``val``, ``validation`` and ``test`` that exists."""
    model: PathOrUrl = Field(min_length=1, max_length=4096)
    """Name of the model in its library; for transformers a folder, or a name on the Hub."""
    pretrained: bool = False
    """Start from the pretrained weights of the model; the head is new unless the number of classes matches."""
    label_smoothing: Number = Field(default=0.0, ge=0, le=0.9)
    """Fraction of each target that is spread evenly over the classes, in training only."""

    def mistakes_with(self, config: Any) -> Iterator[str]:
        """Yield the error message that this task has no sections of a language model."""
        yield (
            f"task.name={config.task.name} cannot be used with the other settings, which are for a language model; "
            f"choose the task with task={config.task.name} instead"
        )


class LabelledSection(SampledSection):
    """Labelled samples, and the model that classifies them."""

    label_column: str = "label"
    """Column of the labels."""


class ImageLoadingSection(LoadingSection):
    """Loading of images. All cores decode them by default."""

    workers: Annotated[Count, Field(ge=0, le=256)] | None = None


class ImageSection(LabelledSection):
    """Images and their classes."""

    loading = ImageLoadingSection

    path: PathOrUrl = Field(default="images", min_length=1, max_length=4096)
    """Samples: a file or folder, or a Hugging Face dataset."""
    image_column: str = "image"
    """Column of a Hugging Face dataset with the images."""
    library: Literal["torchvision", "timm", "transformers"] = "torchvision"
    """Library of the model."""
    model: PathOrUrl = Field(default="resnet50", min_length=1, max_length=4096)
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

    by_content = ("bad_rows",)

    path: PathOrUrl = Field(default="texts.jsonl", min_length=1, max_length=4096)
    """Samples: a file or folder, or a Hugging Face dataset."""
    text_column: str = "text"
    """Column of the texts."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """``skip``: leave out rows of files that cannot be used, and count them."""
    model: PathOrUrl = Field(default="answerdotai/ModernBERT-base", min_length=1, max_length=4096)
    """Name of the model in its library; for transformers a folder, or a name on the Hub."""
    pretrained: bool = True
    """Start from the pretrained weights of the model; the head is new unless the number of classes matches."""
    sequence_length: Annotated[Count, Field(ge=2, le=10**6)] = 512
    """Maximum tokens of a text; longer texts are truncated."""
