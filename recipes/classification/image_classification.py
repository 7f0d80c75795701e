"""Image classification: one class for each image."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.plain_data import read_if_there
from serried.configs.schema.tasks import ImageSection
from serried.parallel.plan import LossTerms
from serried.recipes.classification.classification_task import Classification
from serried.recipes.data.labelled.labelled_images import (
    UPRIGHT,
    FolderImages,
    Image,
    cropped_at_random,
    cropped_to_centre,
    image_processor,
    open_images,
)
from serried.recipes.data.labelled.splits_and_classes import LabelledData
from serried.recipes.models.hugging_face.image_models import (
    PROCESSOR,
    build_image_model,
    exported_config,
    normalization,
)


class ImageClassification(Classification):
    """A model that predicts the class of an image."""

    Config = ImageSection
    unit = "images"
    defaults: ClassVar[Mapping[str, Any]] = {
        "trainer.steps": 2000, "trainer.global_batch": 256, "trainer.micro_batch": 32, "trainer.eval_batches": 10**6,
        "precision": "bf16", "optim.lr": 1e-3, "optim.weight_decay": 0.05, "schedule.warmup_steps": 500,
        "checkpoint.best_metric": "accuracy", "checkpoint.best_mode": "max",
    }  # fmt: skip
    config: ImageSection
    _processor: dict[str, Any] | None = None
    """Content of ``preprocessor_config.json``; None if the model's library does not read one."""

    # data -----------------------------------------------------------------------------------------------------------

    def open_samples(self) -> LabelledData:
        # A run of an earlier version, which ignored the EXIF orientation of images in folders, continues to ignore it.
        newest = self.resumed()[:1]
        began = [
            str(read_if_there(checkpoint / "state.json").get("data_fingerprint", UPRIGHT)) for checkpoint in newest
        ]
        return open_images(self.config, upright=all(fingerprint.endswith(UPRIGHT) for fingerprint in began))

    def prepare(self, show: Callable[[str], None]) -> str:
        if self.config.pretrained:  # one process per node downloads missing files
            show(f"looking for the weights of {self.config.model}")
            build_image_model(self.config, self.classes)
            show("")
        return ""

    def augment(self, sample: Image, seed: int) -> Image:
        c = self.config
        return Image(cropped_at_random(sample.pixels, c.image_size, c.smallest_crop, c.flip, seed), sample.label)

    def collate(self, samples: Sequence[Image]) -> tuple[Tensor, Tensor]:
        """Return the images as uint8 [B, 3, H, W] and the labels [B]. Images that were not augmented, as in
        evaluation, are center-cropped."""
        pixels = [
            sample.pixels
            if isinstance(sample.pixels, Tensor)
            else cropped_to_centre(sample.pixels, self.config.image_size)
            for sample in samples
        ]
        return torch.stack(pixels), torch.tensor([sample.label for sample in samples])

    def example_batch(self, samples: int) -> Any:
        size = self.config.image_size
        return torch.zeros(samples, 3, size, size, dtype=torch.uint8), torch.zeros(samples, dtype=torch.int64)

    # model ----------------------------------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        if self.run.adapter.method != "none":
            raise UserError(
                f"adapter.method={self.run.adapter.method} is not supported with task={self.run.task.name}, as the new "
                "head would not be trained; use adapter=none, and freeze parameters with optim.groups.NAME.frozen=true"
            )
        model = build_image_model(self.config, self.classes)
        if self.config.sync_batch_norm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if self.config.library == "transformers":
            self._processor = image_processor(self.config.image_size, *self._normalization)
            return self._of_transformers(model)
        self._export = exported_config(self.config, self.classes)
        return model

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> LossTerms:
        images, labels = batch
        mean, std = (  # created on the device: copying to a GPU would block the host
            torch.stack([images.new_full((1, 1), value, dtype=torch.float32) for value in statistic])
            for statistic in self._normalization
        )
        return self._terms(model, model((images.float() / 255 - mean) / std), labels)

    @functools.cached_property
    def _normalization(self) -> tuple[Sequence[float], Sequence[float]]:
        # Weights need the normalization they were trained with. The folder of a saved model (task.model) contains it.
        return normalization(self.config, self.resumed() if self._classes is None else ())

    def export_files(self, folder: Path) -> None:
        super().export_files(folder)
        if self._processor is not None:
            (folder / PROCESSOR).write_text(json.dumps(self._processor, indent=2) + "\n", "utf-8")

    # descriptions ---------------------------------------------------------------------------------------------------

    def describe_kernels(self, device: str) -> str:
        if self.config.sync_batch_norm and device == "cpu":
            raise UserError(
                "task.sync_batch_norm=true needs GPUs (to plan for GPUs: launch.device=cuda); use "
                "task.sync_batch_norm=false"
            )
        return ""

    def describe_model(self) -> str:
        c = self.config
        return f"{c.model} of {c.library}, {len(self.classes):,} classes" + ", pretrained" * c.pretrained

    def describe_data(self) -> str:
        c = self.config
        crops = (
            f"random crops of at least {c.smallest_crop:g} of the area" if c.smallest_crop < 1 else "no random crops"
        )
        flips = ", random horizontal flips" if c.flip else ""
        return f"{self._sizes(self.unit)}; {c.image_size}x{c.image_size}, {crops}{flips}"

    def notes(self, starts_from_scratch: bool) -> Sequence[str]:
        del starts_from_scratch
        splits = [split for split in (self._data.training, self._data.validation) if isinstance(split, FolderImages)]
        told = "EXIF orientation of photos is ignored, as at the start of this run; to apply it, start another run: "
        kept = [told + self.run.another_run] if splits and not splits[0].upright else []
        return [split.note for split in splits if split.note] + kept

    @property
    def opens_in(self) -> str:
        return "" if self.config.library == "torchvision" else self.config.library
