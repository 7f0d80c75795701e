"""``Task``, the class that users subclass: a model, data and a loss."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.schema.fields import Section
from serried.configs.schema.sections import RunConfig
from serried.parallel.plan import Inputs, LossTerms, ParallelPlan
from serried.trainer.task.batches import default_batch, difference, no_batch


class Dataset(Protocol):
    """Samples by index. ``dataset[i]`` must depend only on ``i``, and may be called from several threads."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


def fingerprint(dataset: Dataset) -> str:
    """Return an identifier of the content of ``dataset``.

    It is the attribute ``fingerprint`` of the data set if it has one, else its class name and length. A resumed run
    compares it, since it must use the same data.
    """
    return str(getattr(dataset, "fingerprint", None) or f"{type(dataset).__name__}-{len(dataset)}")


class Task:
    """A model, data and a loss. A task does not depend on the rank, the device or the parallel layout.

    ``build_model``, ``dataset`` and ``loss`` are required. Every other method has a default. Methods are called on
    every process. A task may also define methods of the capabilities in ``serried.trainer.task.capabilities``, such as
    ``prepare``, ``pretrained``, ``export_files`` and the hooks ``on_...``. A run adds defaults for the methods that
    the task does not define.

    Example:
        >>> class Houses(serried.Task):
        ...     defaults = {"trainer.steps": 300, "trainer.global_batch": 64}
        ...
        ...     def build_model(self):
        ...         return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        ...
        ...     def dataset(self, split):
        ...         return TensorDataset(*load(split))
        ...
        ...     def loss(self, model, batch):
        ...         features, price = batch
        ...         loss_sum = F.mse_loss(model(features)[:, 0], price, reduction="sum")
        ...         return serried.LossTerms(loss_sum, torch.tensor(len(price)))
        >>> serried.main(Houses)
    """

    Config: ClassVar[type[Section]] = Section
    """The task's own section of the configuration. Its fields are the keys ``task.KEY``."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Default values of configuration keys, such as ``{"trainer.steps": 300}``. The command line overrides them."""
    sections: ClassVar[tuple[str, ...]] = ()
    """Sections of the built-in language models that the task uses: ``model``, ``data``. A custom task needs none."""
    unit: ClassVar[str] = "samples"
    """Unit of the counts on the console and in the records: ``samples``, or the unit of ``LossTerms.weight``, such as
    ``tokens``."""

    config: Any = None
    """The values of ``Config`` in this run. Set before any method is called."""
    run: RunConfig
    """The configuration of the run."""
    resumed: Callable[[], Sequence[Path]] = staticmethod(tuple)
    """Returns the checkpoints that the run resumes from, newest first. Set before any method is called."""

    @classmethod
    def task_name(cls) -> str:
        """Return the name of the task: the class name in lower case, with underscores between words."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def configure(self, run: RunConfig) -> None:
        """Set the configuration of the run. Called once, before any other method."""
        self.run, self.config = run, run.task

    # required --------------------------------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        """Return the model: on the CPU with its initial values, or on the meta device if ``initial_std`` is defined.

        Random numbers drawn from torch's generator are the same on every process and for every parallel layout.
        """
        raise UserError(f"{type(self).__name__} must define build_model()")

    def dataset(self, split: str) -> Dataset | None:
        """Return the samples of ``train`` or ``validation``, or None if there is no such split."""
        del split
        raise UserError(f"{type(self).__name__} must define dataset(split)")

    def loss(self, model: nn.Module, batch: Any) -> LossTerms:
        """Run ``model`` on ``batch`` and return its loss.

        A task may define ``inputs`` and ``terms`` instead. They are required for pipeline parallelism, which calls the
        model itself.

        Args:
            model: The model returned by ``build_model``, or its sharded form.
            batch: A batch returned by ``collate``, on the device: tensors [samples, ...].

        Returns:
            Sums over the batch, not means. They are summed over all ranks and divided by the total weight.
        """
        inputs = self.inputs(batch)
        return self.terms(model(inputs.stream, **inputs.named), batch)

    def inputs(self, batch: Any) -> Inputs:
        """Return the arguments of the model: ``model(stream, **named)``."""
        del batch
        defined = type(self).loss is not Task.loss
        raise UserError(
            f"{type(self).__name__} defines only loss(), but a pipeline needs inputs(batch) and terms(output, batch); "
            "define these instead, or use parallel.pipeline=1"
            if defined
            else f"{type(self).__name__} must define loss(model, batch)"
        )

    def terms(self, output: Any, batch: Any) -> LossTerms:
        """Return the loss for ``output``, the model's output for ``inputs(batch)``. Same format as in ``loss``."""
        del output, batch
        raise UserError(f"{type(self).__name__} must define terms(output, batch) in addition to inputs(batch)")

    # data ------------------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Any]) -> Any:
        """Return a batch: tensors in dicts, lists, tuples or named tuples, with the samples along dim 0."""
        return default_batch(samples, type(self).__name__)

    def collate_numbered(self, samples: Sequence[Any], ids: np.ndarray) -> Any:
        """Return a batch of ``samples`` with the indices ``ids`` [samples].

        An id below 0 marks padding, which must have weight 0. The default drops padding, or keeps one sample if all are
        padding. The evaluation ignores the loss of such a batch.
        """
        kept = {place: sample_id for place, sample_id in enumerate(ids.tolist()) if sample_id >= 0} or {0: 0}
        samples = [samples[place] for place in kept]
        if type(self).collate is Task.collate and (reason := difference(samples, list(kept.values()))):
            raise no_batch(reason, type(self).__name__)
        return self.collate(samples)

    def example_batch(self, samples: int) -> Any:
        """Return a batch of ``samples`` samples for the plan, which uses only shapes and dtypes."""
        dataset = self.dataset("train")
        assert dataset is not None, "there is something to train on"
        ids = np.arange(samples) % len(dataset)
        return self.collate_numbered([dataset[index] for index in ids.tolist()], ids)

    def augment(self, sample: Any, seed: int) -> Any:
        """Return ``sample`` with random changes. Called only in training.

        The changes must depend only on ``sample`` and ``seed``. The seed differs each time that a sample is used. It is
        the same on every layout and after a resume.
        """
        del seed
        return sample

    def slice_sequence(self, batch: Any, part: Callable[[Tensor, int], Tensor]) -> Any:
        """Return ``batch`` with each tensor that has one element per token along ``dim`` replaced by
        ``part(tensor, dim)``."""
        del batch, part
        raise UserError(
            f"{type(self).__name__} does not define which tensors of a batch contain the sequence; define "
            "slice_sequence(batch, part), or use parallel.context=1"
        )

    def weight_per_sample(self) -> int:
        """Return the expected ``LossTerms.weight`` of one sample. Used only to keep the loss in the range of fp16."""
        return 1

    # model -----------------------------------------------------------------------------------------------------------

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        """Return the parallel plan of ``model``. The default finds its repeated blocks."""
        del model
        return ParallelPlan()

    def initial_std(self, name: str) -> float | None:
        """Return the standard deviation to initialize parameter ``name`` of a model on the meta device.

        None initializes the parameter to ones.
        """
        raise UserError(
            f"{type(self).__name__}.build_model() returns a model on the meta device without initial values; define "
            f"initial_std(name), or build the model on the CPU (parameter {name})"
        )

    def flops_per_sample(self, parameters: int) -> float | None:
        """Return the FLOPs of forward and backward for one sample. None if unknown, then MFU is not reported."""
        del parameters
        return None


def needs_data_for_example(task: Task) -> bool:
    """Return whether ``task.example_batch`` reads the training data."""
    return type(task).example_batch is Task.example_batch
