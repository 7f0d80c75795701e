"""The class that users subclass: a model, data and a loss."""

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
    """Samples by number. ``dataset[i]`` must depend on ``i`` alone, and may be called from several threads."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


def fingerprint(dataset: Dataset) -> str:
    """Return a name for the content of ``dataset``: its ``fingerprint`` if it has one, else its class and length.

    A resumed run must see the same data; this name is compared.
    """
    return str(getattr(dataset, "fingerprint", None) or f"{type(dataset).__name__}-{len(dataset)}")


class Task:
    """A model, data and a loss. A task knows no rank, no device and no parallel layout.

    ``build_model``, ``dataset`` and ``loss`` are required; every other method has a default. Methods are called on
    every process. A task may also define methods of the capabilities in ``serried.trainer.task.capabilities``, such as
    ``prepare``, ``pretrained``, ``export_files`` and the hooks ``on_...``; a run adds the defaults of those that it
    does not define.

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
    """The task's own section of the configuration: its fields are the keys ``task.KEY``."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of configuration keys, such as ``{"trainer.steps": 300}``; the command line overrides them."""
    sections: ClassVar[tuple[str, ...]] = ()
    """Sections of the built-in language models that the task reads: ``model``, ``data``. A user's task needs none."""
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
        """Take the configuration of the run. Called once, before any other method."""
        self.run, self.config = run, run.task

    # required --------------------------------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        """Return the model, on the CPU with its own initial values, or on the meta device with ``initial_std``.

        Random numbers drawn from torch's generator are the same on every process and for every parallel layout.
        """
        raise UserError(f"{type(self).__name__} must define build_model()")

    def dataset(self, split: str) -> Dataset | None:
        """Return the samples of ``train`` or ``validation``; None if there is no such split."""
        del split
        raise UserError(f"{type(self).__name__} must define dataset(split)")

    def loss(self, model: nn.Module, batch: Any) -> LossTerms:
        """Run ``model`` on ``batch`` and return its loss.

        A task may define ``inputs`` and ``terms`` instead: a pipeline, which calls the model itself, needs them.

        Args:
            model: The model of ``build_model``, or its sharded form.
            batch: A batch of ``collate``, on the device: tensors [samples, ...].

        Returns:
            Sums over the batch, not means. They are divided once, by the weight of all ranks.
        """
        inputs = self.inputs(batch)
        return self.terms(model(inputs.stream, **inputs.named), batch)

    def inputs(self, batch: Any) -> Inputs:
        """Return the arguments of the model: ``model(stream, **named)``."""
        del batch
        defined = type(self).loss is not Task.loss
        raise UserError(
            f"{type(self).__name__} defines loss() alone, so a pipeline cannot run it; define inputs(batch) and "
            "terms(output, batch) in its place, or use parallel.pipeline=1"
            if defined
            else f"{type(self).__name__} must define loss(model, batch)"
        )

    def terms(self, output: Any, batch: Any) -> LossTerms:
        """Return the loss, as in ``loss``, from the model's ``output`` for ``inputs(batch)``."""
        del output, batch
        raise UserError(f"{type(self).__name__} must define terms(output, batch) beside inputs(batch)")

    # data ------------------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Any]) -> Any:
        """Return a batch: tensors in dicts, lists, tuples or named tuples, with the samples along dim 0."""
        return default_batch(samples, type(self).__name__)

    def collate_numbered(self, samples: Sequence[Any], ids: np.ndarray) -> Any:
        """Return a batch of ``samples`` whose numbers are ``ids`` [samples].

        An id below 0 marks padding, which must have weight 0. The default drops it, and keeps one sample if all are
        padding; the evaluation ignores the loss of such a batch.
        """
        kept = {place: sample_id for place, sample_id in enumerate(ids.tolist()) if sample_id >= 0} or {0: 0}
        samples = [samples[place] for place in kept]
        if type(self).collate is Task.collate and (reason := difference(samples, list(kept.values()))):
            raise no_batch(reason, type(self).__name__)
        return self.collate(samples)

    def example_batch(self, samples: int) -> Any:
        """Return a batch of ``samples`` samples for a plan, which reads shapes and types alone."""
        dataset = self.dataset("train")
        assert dataset is not None, "there is something to train on"
        ids = np.arange(samples) % len(dataset)
        return self.collate_numbered([dataset[index] for index in ids.tolist()], ids)

    def augment(self, sample: Any, seed: int) -> Any:
        """Return ``sample`` with random changes, in training only.

        All of them must follow from ``seed``, which differs each time that a sample is used, and is the same on every
        layout and after a resume.
        """
        del seed
        return sample

    def slice_sequence(self, batch: Any, part: Callable[[Tensor, int], Tensor]) -> Any:
        """Return ``batch`` with ``part(tensor, dim)`` for each tensor that has one number per token along ``dim``."""
        del batch, part
        raise UserError(
            f"{type(self).__name__} does not say which tensors of a batch contain the sequence; define "
            "slice_sequence(batch, part), or use parallel.context=1"
        )

    def weight_per_sample(self) -> int:
        """Return the expected ``LossTerms.weight`` of one sample. Only keeps the loss in the range of fp16."""
        return 1

    # model -----------------------------------------------------------------------------------------------------------

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        """Return how ``model`` may be sharded. The default finds its repeated blocks."""
        del model
        return ParallelPlan()

    def initial_std(self, name: str) -> float | None:
        """Return the standard deviation of the initial values of parameter ``name`` of a model on meta; None: ones."""
        raise UserError(
            f"{type(self).__name__}.build_model() returns a model on the meta device, so its values must be chosen: "
            f"define initial_std(name), or build it on the CPU (parameter {name})"
        )

    def flops_per_sample(self, parameters: int) -> float | None:
        """Return FLOPs of forward and backward for one sample; None if unknown, which leaves MFU out."""
        del parameters
        return None


def needs_data_for_example(task: Task) -> bool:
    """Return whether ``task.example_batch`` reads the training data."""
    return type(task).example_batch is Task.example_batch
