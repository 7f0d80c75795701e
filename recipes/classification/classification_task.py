"""Base class of tasks that assign a class to each sample."""

import functools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.hugging_face.model_folder import CONFIG
from serried.configs.plain_data import read_json
from serried.configs.schema.sections import WHOLE, RunConfig
from serried.configs.schema.tasks import LabelledSection, SampledSection, TextsSection
from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.plan import LossTerms
from serried.recipes.data.labelled.splits_and_classes import LabelledData
from serried.recipes.data.readers.source_files import assignment
from serried.recipes.models.hugging_face.any_causal_lm import fragments_of
from serried.recipes.models.layers.lm_head import IGNORE
from serried.trainer.task import Dataset, RunTask

_TOP = 5


class Classification(RunTask):
    """A model that predicts classes."""

    config: SampledSection
    _export: dict[str, Any]
    """Content of the exported ``config.json``."""
    _classes: list[str] | None = None
    """Classes of the saved model that was opened; None during training."""

    def configure(self, run: RunConfig) -> None:
        super().configure(run)
        self._fragments: dict[str, tuple[Fragment, ...]] = {}

    def open_saved(self, checkpoint: Path) -> None:
        """Open the model in ``checkpoint`` and use its classes, since the samples may have changed or been deleted.

        Without adapters, the checkpoint contains the full model.
        """
        self._classes = self.classes_in(checkpoint)
        if self.run.adapter.method == "none":
            of_folder = getattr(self.config, "library", "transformers") == "transformers"
            own = {"model": str(checkpoint.absolute())} if of_folder else {}
            self.config = self.config.model_copy(update={"pretrained": False, **own})

    def classes_in(self, checkpoint: Path) -> list[str] | None:
        """Return the classes of the model in ``checkpoint``; None to use the classes of the samples."""
        try:
            found = read_json(checkpoint / CONFIG)
            labels = found.get("label_names") or [found["id2label"][str(n)] for n in range(len(found["id2label"]))]
            return [str(label) for label in labels]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"cannot read the class names in {checkpoint / CONFIG} ({type(error).__name__}: {error}); use another "
                "checkpoint"
            ) from None

    def check_resumed(self, checkpoint: Path) -> None:
        before, now = self.classes_in(checkpoint), list(self.classes)
        if before is not None and before != now:
            number = next(
                (number for number, names in enumerate(zip(before, now, strict=False)) if names[0] != names[1]),
                min(len(before), len(now)),
            )
            was, is_now = (names[number] if number < len(names) else "none" for names in (before, now))
            where = assignment("task.path", self.config.path)
            raise UserError(
                f"{checkpoint} was trained with different classes than {where} has now: class {number} was {was} and "
                f"is now {is_now}; use samples of the same classes, or {self.run.another_run}"
            )

    def open_samples(self) -> LabelledData:
        """Return the samples. Called when they are first needed, since their classes determine the model's shape."""
        raise NotImplementedError

    @functools.cached_property
    def _data(self) -> LabelledData:
        found, typed = self.open_samples(), assignment("task.path", self.config.path)
        if self._classes is not None:
            return found.numbered_as(self._classes, typed)
        if isinstance(self.config, LabelledSection) and len(found.classes) < 2:
            is_of_texts = isinstance(self.config, TextsSection)
            named = ", or set the column of the labels: task.label_column=NAME" if is_of_texts else ""
            raise UserError(
                f"all training samples of {typed} have the same class, {found.classes[0]!r}, but a classifier needs at "
                f"least two; add samples of other classes{named}"
            )
        return found

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes by number."""
        return self._data.classes if self._classes is None else self._classes

    def dataset(self, split: str) -> Dataset | None:
        if split == "train" or (split == WHOLE and self._data.validation is None):
            return self._data.training
        return self._data.validation

    def _of_transformers(self, model: Any) -> Any:
        """Record the config of ``model`` and transformers' names of its tensors, for checkpoints. Return ``model``."""
        self._fragments = fragments_of(model)
        described = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}
        self._export = {**described, "architectures": [type(model).__name__]}
        return model

    def _terms(self, model: nn.Module, output: Any, labels: Tensor) -> LossTerms:
        """Return the summed cross entropy and the accuracy.

        Args:
            output: output of ``model``: scores [..., classes], or an object with ``logits``.
            labels: [...], ``IGNORE`` for positions without a label.
        """
        labels = labels.flatten()
        scores = getattr(output, "logits", output).flatten(0, -2).float()
        smoothing = self.config.label_smoothing if model.training else 0.0
        loss_sum = F.cross_entropy(
            scores, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
        )  # fmt: skip
        count = (labels != IGNORE).sum()
        best = scores.topk(min(_TOP, scores.shape[1])).indices == labels.unsqueeze(1)
        metrics = {"accuracy": (best[:, 0].sum(), count)}
        if scores.shape[1] > _TOP:
            metrics[f"top{_TOP}_accuracy"] = (best.sum(), count)
        return LossTerms(loss_sum, count, metrics)

    def _sizes(self, samples: str) -> str:
        data = self._data
        held_out = f"{len(data.validation):,} for evaluation" if data.validation is not None else "none for evaluation"
        left_out = f", {data.bad_rows:,} bad rows left out" if data.bad_rows else ""
        return f"{self.config.path}: {len(data.training):,} {samples}, {held_out}{left_out}"

    @property
    def opens_in(self) -> str:
        return "transformers"

    def next_command(self, start: str) -> str:
        del start
        merged = " merge=true" if self.run.adapter.method != "none" else ""
        return f"a plain model folder: serried export run.dir={shlex.quote(self.run.run.place)} out=FOLDER{merged}"

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        return self._fragments.get(name) or super().exported(name, shape)

    def export_files(self, folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(self._export, indent=2) + "\n", "utf-8")
