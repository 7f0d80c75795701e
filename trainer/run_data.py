"""Data of a run: the data sets, and the position in the training data."""

import hashlib
import math
from collections.abc import Collection, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch

from serried.configs.errors import UserError
from serried.configs.schema.sections import DEFAULT_VALIDATION, TRAINING, RunConfig
from serried.parallel.layout.checks import with_values
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.process_groups import gather_plain
from serried.runtime.console import Console
from serried.runtime.process import usable_cores
from serried.runtime.session import Session
from serried.trainer.checkpoint.resume import Start
from serried.trainer.checkpoint.saved_state import taking_from
from serried.trainer.data.loader import Augment, BatchLoader, Reader
from serried.trainer.data.sampler import BatchShare, Mixture, Stream, sample_order
from serried.trainer.task import Dataset, RunTask, fingerprint


def check_validation(config: RunConfig, validation: Collection[str]) -> None:
    """Raise ``UserError`` if the configuration needs evaluations but there is no validation data."""
    if DEFAULT_VALIDATION in validation:
        return
    patience = config.trainer.early_stopping_patience
    uses = {
        f"trainer.early_stopping_patience={patience}": patience,
        "checkpoint.keep_best=true": config.checkpoint.keep_best,
    }
    for given in (given for given, is_set in uses.items() if is_set):
        how = "set data.validation_fraction=0.01" if hasattr(config, "model") else "give the task a validation data set"
        raise UserError(f"{given} needs evaluations, but there is no validation data; {how}, or remove it")


class Data:
    """Data sets of a task, opened on every rank, and the position in the order of training samples."""

    def __init__(self, task: RunTask, session: Session, console: Console) -> None:
        """Prepare and open the data of the task. This is a collective call.

        Raises ``UserError`` if there is no training data, or if the ranks read different data.
        """
        console.doing("preparing data")
        task.open_data(session.once_per_node(partial(task.prepare, console.progress)))
        self.training = training_data(task)
        names = (DEFAULT_VALIDATION, *task.further_validation())
        found = {name: task.dataset(name) for name in names}
        for name, dataset in found.items():
            _refuse_table(task, name, dataset)
        self.validation: dict[str, Dataset] = {name: dataset for name, dataset in found.items() if dataset is not None}
        self.fingerprint = fingerprint(self.training)
        self.earlier_fingerprints: Mapping[str, str] = getattr(self.training, "earlier_fingerprints", {})
        """Fingerprints of the same data in earlier versions, with descriptions of the changes since then."""
        session.same_everywhere("the training data", self.fingerprint)
        seen = (f"{name}: {fingerprint(dataset)}, {len(dataset)} samples" for name, dataset in self.validation.items())
        # All ranks must evaluate the same number of batches.
        session.same_everywhere("the validation data", "\n".join(seen))
        self.sources = list(self.training.parts) if isinstance(self.training, Mixture) else []
        self._stream = self.training if isinstance(self.training, Stream) else None
        self._session = session
        self.step = self._first_step = 0
        """``step``: the last completed step. ``_first_step``: the step after which this start or a rollback resumed."""
        self._sample, self._global_batch = 0, 1

    def start(self, start: Start, global_batch: int) -> None:
        """Resume after the samples of the checkpoint, if there is one. ``global_batch``: samples per step."""
        self._global_batch = global_batch
        if start.resumes:
            with taking_from(start.checkpoint):
                self.load_state_dict(start.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the step and the position in the data from a checkpoint's plain data."""
        self.step = self._first_step = state["step"]
        self._sample = state["samples"]
        if self._stream is not None:
            self._stream.load(state.get("stream", {}), self._sample)

    def skip(self, to_step: int, samples: int) -> None:
        """Resume after ``to_step`` with sample number ``samples``, skipping the samples of undone steps."""
        if self._stream is not None:
            self._stream.rewind(samples)
        self.step = self._first_step = to_step
        self._sample = samples

    def samples(self, step: int) -> int:
        """Return the number of samples used up to and including ``step``: the position in the order of samples."""
        return self._sample + (step - self._first_step) * self._global_batch

    def sample_ids(self, step: int, seed: int) -> list[int]:
        """Return the indices of the samples of ``step`` over all ranks."""
        end = self.samples(step)
        return [int(number) for number in sample_order(self.training, seed)(np.arange(end - self._global_batch, end))]

    def loader(self, task: RunTask, config: RunConfig, data_ranks: int, data_rank: int) -> BatchLoader:
        """Return a loader of this rank's batches from the current position to the last step."""
        trainer = config.trainer
        return BatchLoader(
            Reader(self.training, task.collate_numbered, _augmentation(task, trainer.seed)),
            sample_order(self.training, trainer.seed),
            BatchShare(trainer.micro_batch, data_ranks, data_rank, trainer.global_batch),
            steps=range(self._first_step, trainer.last_step),
            workers=config.data.threads(usable_cores() // self._session.local_world_size),
            pin_memory=self._session.device.type != "cpu",
            first_index=self._sample,
        )

    def micro_batch_seeds(self, step: int, seed: int, count: int, layout: Layout, data_rank: int) -> list[int]:
        """Return a seed for each of this rank's ``count`` micro-batches of ``step``.

        The seed depends on the position of the micro-batch in the global batch. For the same ``trainer.micro_batch``, a
        sample has the same seed on every layout. Ranks that shard a sample use the same seed, so a task may draw random
        numbers for the full sample.
        """
        places = range(data_rank, count * layout.data_ranks, layout.data_ranks)
        return [_seed_of(f"{seed}/{self.samples(step)}/{place}") for place in places]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data after ``step``, for a checkpoint. This is a collective call."""
        samples = self.samples(self.step)
        state = {"samples": samples, "data_fingerprint": self.fingerprint}
        if self._stream is None:
            return state
        parts = gather_plain(self._stream.state(samples))
        return state | {"stream": {key: value for part in parts for key, value in part.items()}}


def _augmentation(task: RunTask, seed: int) -> Augment | None:
    """Return ``task.augment`` with seeds from the sample's position. None if the task does not override it."""
    if type(task).augment is RunTask.augment:
        return None
    return lambda sample, place: task.augment(sample, _seed_of(f"{seed}/augment/{place}"))


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def with_steps(config: RunConfig, training: Dataset) -> RunConfig:
    """Return ``config`` with ``trainer.steps`` computed from ``trainer.epochs``, if set.

    Raises ``UserError`` if the data is a stream, whose length is unknown.
    """
    trainer = config.trainer
    if trainer.epochs is None:
        return config
    if isinstance(training, Stream):
        raise UserError(f"trainer.epochs={trainer.epochs:g}: the length of streamed data is unknown; use trainer.steps")
    steps = math.ceil(Fraction(repr(trainer.epochs)) * len(training) / trainer.global_batch)
    return with_values(config, {"trainer.steps": steps})


def _refuse_table(task: RunTask, split: str, dataset: Any) -> None:
    """Raise ``UserError`` if ``dataset`` is a pandas DataFrame: indexing it would return columns."""
    if hasattr(dataset, "iloc") and getattr(dataset, "ndim", 0) == 2:
        raise UserError(
            f"{type(task).__name__}.dataset({split!r}) returned a {type(dataset).__name__}; return its rows: "
            "torch.tensor(frame.to_numpy(), dtype=torch.float32)"
        )


def training_data(task: RunTask) -> Dataset:
    """Return the training data of ``task``. Raises ``UserError`` if there is none."""
    training = task.dataset(TRAINING)
    if isinstance(training, torch.utils.data.DataLoader):
        raise UserError(
            f"{type(task).__name__}.dataset({TRAINING!r}) returned a DataLoader; return the data set itself: batches "
            "are made by trainer.micro_batch and collate()"
        )
    if isinstance(training, Mapping) and 0 not in training:
        raise UserError(
            f"{type(task).__name__}.dataset({TRAINING!r}) returned a {type(training).__name__} with the keys "
            f"{', '.join(map(str, [*training][:4]))}; return a data set with samples numbered 0, 1, ..."
        )
    _refuse_table(task, TRAINING, training)
    if training is not None and not hasattr(training, "__len__"):
        raise UserError(
            f"{type(task).__name__}.dataset({TRAINING!r}) returned a {type(training).__name__} without a "
            "length; return a map-style data set, with __len__ and __getitem__"
        )
    if training is None:
        raise UserError(f"{type(task).__name__}.dataset({TRAINING!r}) returned None: there is nothing to train on")
    if not isinstance(training, Stream) and not len(training):
        raise UserError(f"{type(task).__name__}.dataset({TRAINING!r}) has no samples")
    return training
