"""Reference values of a pretrained model for each sample, computed before training.

They are computed by the model of the run, on the run's parallel layout, while it still has the pretrained weights, so
no second model is needed. Rank 0 stores them in a file whose name is a hash of everything that they depend on. Values
that no step has needed so far are NaN. The file ends with the CRC-32 of the values, little-endian.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData, read_regular
from serried.configs.schema.sections import RunConfig
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.plan import LossTerms
from serried.records.files import write_atomically
from serried.runtime.console import Console
from serried.trainer.adapter_base_model import initial_weights, same_files
from serried.trainer.checkpoint.resume import Start, download_on_all_nodes
from serried.trainer.data.loader import Reader, evaluation_batches
from serried.trainer.data.sampler import BatchShare, evaluation_samples, sample_order
from serried.trainer.evaluation.evaluate import Kept
from serried.trainer.monitor.heartbeat import SET_UP
from serried.trainer.run_context import Context
from serried.trainer.run_data import Data
from serried.trainer.task import Dataset, Reference, RunTask, fingerprint, to_device

_FORMAT = 1
_BLOCK_BATCHES = 64
"""Minimum number of batches per rank between two writes. An interrupted pass resumes after the last write."""
_WRITES = 16
"""Approximate number of writes in a pass."""


class ReferencePass:
    """The reference values that this run needs, and the pass that computes missing values."""

    def __init__(self, context: Context, data: Data, reference: Reference, start: Start) -> None:
        """Find the pretrained model and the reference values computed so far. This is a collective call.

        Raises ``UserError`` if there is no pretrained model, or if it differs from the model that the checkpoint of
        ``start`` was trained with.
        """
        self._context, self._reference = context, reference
        session = context.session
        folder = session.once(lambda: str(initial_weights(context.config, context.task) or ""))
        if not folder:
            raise UserError("the reference needs a pretrained model: add model.path=FOLDER_OR_NAME")
        self.folder = Path(folder)
        download_on_all_nodes(self.folder, lambda: initial_weights(context.config, context.task), session)
        """Folder of the pretrained model."""
        before = Start() if context.config.checkpoint.allows("model.path") else start
        self.files = same_files("reference", self.folder, before, context)
        """Weight files of the pretrained model, with checksums."""
        trained = _numbers_of_run(context.config, data)
        wanted = {"train": (data.training, trained)} | {
            name: (dataset, _evaluated(context.config, dataset)) for name, dataset in data.validation.items()
        }
        self._splits = [_Split(name, *each, reference, self.files) for name, each in wanted.items()]
        for split in self._splits:
            split.read(context)

    @property
    def is_needed(self) -> bool:
        """Whether any reference value must be computed."""
        return any(len(split.missing) for split in self._splits)

    def run(self, parallel: DistributedModel) -> None:
        """Compute the missing reference values with ``parallel``, which holds the pretrained weights. This is a
        collective call."""
        for split in self._splits:
            split.compute(self._context, parallel)

    def use(self) -> None:
        """Pass the reference values to the task."""
        for split in self._splits:
            self._reference.use(split.name, split.numbers)


class _Split:
    """The reference values of one data set."""

    def __init__(
        self, name: str, dataset: Dataset, wanted: np.ndarray, reference: Reference, files: dict[str, Any]
    ) -> None:
        """``wanted``: indices of the needed samples. ``files``: files of the pretrained model, with checksums."""
        self.name = name
        self._dataset = dataset
        self._wanted = wanted
        self._reference = reference
        settings = {"format": _FORMAT, "weights": files, "data": fingerprint(dataset), **reference.settings}
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
        self._path = reference.folder / f"{key}.f64"
        self.numbers = np.full((len(dataset), reference.columns), np.nan)

    @property
    def missing(self) -> np.ndarray:
        """Indices of the needed samples whose values are not known."""
        return self._wanted[np.isnan(self.numbers[self._wanted, 0])]

    def read(self, context: Context) -> None:
        """Read the stored values on rank 0, for all ranks. This is a collective call."""
        if context.session.is_main:
            self._read(context.console)
        if dist.is_initialized():
            both = torch.from_numpy(self.numbers).to(context.session.device)
            dist.broadcast(both, 0)
            self.numbers = both.cpu().numpy()

    def _read(self, console: Console) -> None:
        try:
            content = read_regular(self._path)
        except FileNotFoundError:
            return
        except (OSError, NotPlainData) as error:
            console.say(f"WARNING    cannot read {self._path}: {error}; the reference is recomputed")
            return
        numbers, checksum = content[: self.numbers.nbytes], content[self.numbers.nbytes :]
        if len(numbers) < self.numbers.nbytes or checksum not in (b"", _checksum(numbers)):
            console.say(f"WARNING    {self._path} is damaged; the reference is recomputed")
            return
        self.numbers = np.frombuffer(numbers, self.numbers.dtype).reshape(self.numbers.shape).copy()
        if not checksum:  # written by a version without checksums
            with suppress(UserError):
                self._write()

    def compute(self, context: Context, parallel: DistributedModel) -> None:
        """Compute the missing values. This is a collective call."""
        missing, session = self.missing, context.session
        micro_batch, ranks = context.config.trainer.micro_batch, parallel.layout.data_ranks
        step = max(_BLOCK_BATCHES * micro_batch * ranks, len(missing) // _WRITES)
        for start in range(0, len(missing), step):
            samples = missing[start : start + step]
            found = _Found(context.task, self._reference, samples, parallel)
            parallel.predict(self._batches(context, parallel, samples, start, len(missing)), found)
            self.numbers[samples] = found.total().cpu().numpy()
            session.once(self._write)

    def _batches(
        self, context: Context, parallel: DistributedModel, samples: np.ndarray, done: int, wanted: int
    ) -> Iterator[Any]:
        share = BatchShare(context.config.trainer.micro_batch, parallel.layout.data_ranks, parallel.place.data_rank)
        for batch, _ in evaluation_batches(Reader(self._dataset, context.task.collate_numbered), samples, share):
            context.pulse.enter(SET_UP, 0)
            context.console.doing(
                f"reference of {self.name}: {done:,} of {wanted:,} samples", "computing the reference"
            )
            yield to_device(batch, context.session.device)
            done = min(wanted, done + share.of_all)

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            numbers = self.numbers.tobytes()
            write_atomically(self._path, numbers + _checksum(numbers))
        except OSError as error:
            raise UserError(
                f"cannot write {self._path}: {error.strerror}; choose another folder: data.cache_dir=FOLDER"
            ) from None


def _checksum(numbers: bytes) -> bytes:
    return zlib.crc32(numbers).to_bytes(4, "little")


class _Found(Kept):
    """Store the reference values of samples during a pass."""

    def __init__(self, task: RunTask, reference: Reference, samples: np.ndarray, parallel: DistributedModel) -> None:
        """``samples``: sample ids in ascending order."""
        super().__init__(task, len(samples), reference.columns, parallel)
        self._reference, self._samples = reference, torch.from_numpy(samples).to(parallel.device)

    def terms(self, output: Any, batch: Any) -> LossTerms:
        ids, numbers = self._reference.numbers(output, batch)
        return self.keep(torch.searchsorted(self._samples, ids[ids >= 0]), numbers[ids >= 0])


def _numbers_of_run(config: RunConfig, data: Data) -> np.ndarray:
    """Return the indices of the training samples that the run needs, without duplicates."""
    size = len(data.training)
    trainer, health = config.trainer, config.health
    positions = data.samples(trainer.steps)
    if positions >= size or "rollback" in (health.spike, health.non_finite):  # a rollback skips samples
        return np.arange(size)
    order: Callable[[np.ndarray], np.ndarray] = sample_order(data.training, trainer.seed)
    return np.unique(order(np.arange(positions)))


def _evaluated(config: RunConfig, dataset: Dataset) -> np.ndarray:
    """Return the indices of the samples of a validation set that evaluations read."""
    trainer = config.trainer
    if not trainer.evaluates_every:
        return np.arange(0)
    parts: Sequence[np.ndarray] = [*evaluation_samples(dataset, trainer.eval_batches * trainer.global_batch).values()]
    return np.concatenate(parts)
