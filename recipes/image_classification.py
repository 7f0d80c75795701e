"""Image classification: one class for each image."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.model_folder import CONFIG
from serried.configs.schema import RunConfig
from serried.configs.tasks import ImageSection
from serried.parallel.fragments import Fragment
from serried.parallel.plan import LossTerms
from serried.recipes.data.images import Image, ImageData, ImageSet, cropped_at_random, cropped_to_centre, open_images
from serried.recipes.models.hugging_face_model import fragments_of
from serried.recipes.models.image_models import build_image_model, exported_config, normalization
from serried.trainer.task import Task

_TOP = 5


class ImageClassification(Task):
    """A model that tells classes of images apart."""

    Config = ImageSection
    unit = "images"
    defaults: ClassVar[Mapping[str, Any]] = {
        "trainer.steps": 2000, "trainer.global_batch": 256, "trainer.micro_batch": 32, "trainer.eval_batches": 10**6,
        "precision": "bf16", "optim.lr": 1e-3, "optim.weight_decay": 0.05, "schedule.warmup_steps": 500,
        "checkpoint.best_metric": "accuracy", "checkpoint.best_mode": "max",
    }  # fmt: skip
    config: ImageSection

    def configure(self, run: RunConfig) -> None:
        super().configure(run)
        if run.adapter.method != "none":
            raise UserError(
                f"adapter.method={run.adapter.method} trains adapters alone, and the head of task={run.task.name} is "
                "new; use adapter=none, and optim.groups.NAME.frozen=true for what is to stay"
            )

    # data -----------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _data(self) -> ImageData:
        return open_images(self.config)

    def prepare(self, show: Callable[[str], None]) -> str:
        if self.config.pretrained:  # one process per node downloads what is not there
            show(f"looking for the weights of {self.config.model}")
            build_image_model(self.config, self._data.classes)
            show("")
        return ""

    def dataset(self, split: str) -> ImageSet | None:
        return self._data.training if split == "train" else self._data.validation

    def augment(self, sample: Image, seed: int) -> Image:
        c = self.config
        return Image(cropped_at_random(sample.pixels, c.image_size, c.smallest_crop, c.flip, seed), sample.label)

    def collate(self, samples: Sequence[Image]) -> tuple[Tensor, Tensor]:
        """Bytes [B, 3, H, W] and labels [B]. Images of an evaluation come as they are in their files."""
        pixels = [
            each.pixels if isinstance(each.pixels, Tensor) else cropped_to_centre(each.pixels, self.config.image_size)
            for each in samples
        ]
        return torch.stack(pixels), torch.tensor([each.label for each in samples])

    def example_batch(self, samples: int) -> Any:
        size = self.config.image_size
        return torch.zeros(samples, 3, size, size, dtype=torch.uint8), torch.zeros(samples, dtype=torch.int64)

    # model ----------------------------------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        model = build_image_model(self.config, self._data.classes)
        if self.config.sync_batch_norm:
            if not self.run.dry_run and (self.run.launch.device == "cpu" or not torch.cuda.is_available()):
                raise UserError("task.sync_batch_norm=true needs GPUs; leave it out")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if self.config.library == "transformers":
            self._fragments = fragments_of(model)
        self._export = exported_config(self.config, model, self._data.classes)
        return model

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> LossTerms:
        images, labels = batch
        mean, std = (images.new_tensor(each, dtype=torch.float32).view(3, 1, 1) for each in self._normalization)
        output = model((images.float() / 255 - mean) / std)
        scores = getattr(output, "logits", output).float()
        smoothing = self.config.label_smoothing if model.training else 0.0
        loss_sum = F.cross_entropy(scores, labels, reduction="sum", label_smoothing=smoothing)
        count = torch.tensor(len(labels))
        best = scores.topk(min(_TOP, scores.shape[1])).indices == labels.unsqueeze(1)
        metrics = {"accuracy": (best[:, 0].sum(), count)}
        if scores.shape[1] > _TOP:
            metrics[f"top{_TOP}_accuracy"] = (best.sum(), count)
        return LossTerms(loss_sum, count, metrics)

    @functools.cached_property
    def _normalization(self) -> tuple[Sequence[float], Sequence[float]]:
        return normalization(self.config)

    # words ----------------------------------------------------------------------------------------------------------

    def describe_model(self) -> str:
        c = self.config
        return f"{c.model} of {c.library}, {len(self._data.classes):,} classes" + ", pretrained" * c.pretrained

    def describe_data(self) -> str:
        c, data = self.config, self._data
        crops = f"random crops from {c.smallest_crop:g} of the area on" if c.smallest_crop < 1 else "no random crops"
        held_out = f"{len(data.validation):,} to evaluate on" if data.validation is not None else "none to evaluate on"
        return (
            f"{c.path}: {len(data.training):,} images, {held_out}; {c.image_size}x{c.image_size}, {crops}"
            + ", mirrored at random" * c.flip
        )

    @property
    def opens_in(self) -> str:
        return {"timm": "timm", "transformers": "transformers"}.get(self.config.library, "")

    def next_command(self, start: str) -> str:
        del start
        return f"a plain model folder: serried export run.dir={self.run.run.dir} out=FOLDER"

    # export ---------------------------------------------------------------------------------------------------------

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        if self.config.library == "transformers" and (found := self._fragments.get(name)):
            return found
        return super().exported(name, shape)

    def export_files(self, folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(self._export, indent=2) + "\n", "utf-8")
