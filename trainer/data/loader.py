"""Batch loader with prefetching in threads."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from serried.configs.errors import TrainingFailed, UserError
from serried.trainer.data.sampler import BatchShare, Order, Stream, micro_batch_indices
from serried.trainer.task import Dataset, map_tensors

PADDING_ID = -1
"""Sample number that marks padding in a micro-batch. ``Task.collate_numbered`` gives padding a weight of 0."""

_LOOKAHEAD_STEPS = 2

_PLANNED_STEPS = 32
"""Number of steps whose sample numbers are computed at once. Computing them for a single step takes 0.3 ms."""

Augment = Callable[[Any, int], Any]
"""Maps a sample and its position in the order to the sample, possibly with random changes."""

Collate = Callable[[Sequence[Any], np.ndarray], Any]
"""Maps samples and their numbers [batch], int64, to a batch: tensors in dicts, lists, tuples and named tuples."""


class SampleError(RuntimeError):
    """Raised if a sample could not be read. The message contains its number. The cause is the exception of the data
    set."""


class Reader(NamedTuple):
    """Read samples and collate them into batches."""

    dataset: Dataset
    collate: Collate
    augment: Augment | None = None

    def read(self, ids: Sequence[int] | np.ndarray, where: str = "", places: Sequence[int] | np.ndarray = ()) -> Any:
        """Return the batch of samples ``ids`` [batch], augmented by their ``places`` [batch] in the training order.

        ``where`` describes the purpose in error messages.

        Raises:
            SampleError, UserError, TrainingFailed: a sample cannot be read.
        """
        samples, ids = [], np.asarray(ids, np.int64)
        for number, sample_id in enumerate(ids.tolist()):
            try:
                sample = self.dataset[0 if sample_id == PADDING_ID else sample_id]
                samples.append(sample if self.augment is None else self.augment(sample, int(places[number])))
            except UserError as error:
                raise UserError(f"sample {sample_id} {where}: {error}") from error
            except TrainingFailed:
                raise
            except Exception as error:
                raise SampleError(f"cannot read sample {sample_id} {where}: {type(error).__name__}: {error}") from error
        return self.collate(samples, ids)


class BatchLoader:
    """Iterator over steps. Each item is the list of this rank's micro-batches of one step.

    Threads read about two steps ahead. With ``workers=0``, samples are read in the caller's thread. The batches do not
    depend on the number of threads. Threads are used instead of processes: reading copies from a memory map, which
    releases the GIL. Processes would have to be forked from a process with a live NCCL or Gloo group, which is not
    supported, and would receive the trainer's signals. An exception in a thread is raised in the caller's thread, at
    the step to which it belongs.

    Use it as a context manager: leaving it ends the threads.
    """

    def __init__(
        self,
        reader: Reader,
        order: Order,
        share: BatchShare,
        *,
        steps: range,
        workers: int,
        pin_memory: bool,
        first_index: int | None = None,
    ) -> None:
        """Start to read ahead.

        Args:
            reader: Reads the samples.
            order: Maps positions to sample numbers.
            share: This rank's share of each global batch.
            steps: Steps to yield, counted from 0.
            workers: Number of threads.
            pin_memory: Copy batches into pinned memory.
            first_index: Position of the first step's first sample in the order. By default, the position after all
                earlier steps.
        """
        self._reader = reader
        self._order = order
        self._share = share
        if first_index is None:
            first_index = steps.start * share.global_batch
        self._steps = self._plan(steps, first_index)
        self._pin_memory = pin_memory
        self._waited_seconds = 0.0
        self._closed = False
        self._ahead: deque[list[Future[Any]]] = deque()
        # If a step has fewer micro-batches than there are threads, more steps keep every thread busy.
        self._ahead_steps = max(_LOOKAHEAD_STEPS, -(-workers // len(share.positions)))
        self._threads = self._start(workers) if workers else None

    def _start(self, workers: int) -> ThreadPoolExecutor:
        # The current GPU is set per thread: a new thread on any rank would pin memory through GPU 0.
        device = torch.accelerator.current_device_index() if self._pin_memory else None
        use_device = (lambda: torch.accelerator.set_device_index(device)) if device is not None else None
        return ThreadPoolExecutor(workers, thread_name_prefix="batch-loader", initializer=use_device)

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        if self._closed:
            raise RuntimeError("this BatchLoader was closed")
        started = time.perf_counter()
        if self._threads is None:
            step, places = next(self._steps)
            batches = [self._read(step, *micro_batch) for micro_batch in places]
        else:
            batches = self._await_next(self._threads)
        self._waited_seconds += time.perf_counter() - started
        return batches

    def _await_next(self, threads: ThreadPoolExecutor) -> list[Any]:
        self._ask_ahead(threads)
        if not self._ahead:
            raise StopIteration
        batches = [future.result() for future in self._ahead.popleft()]
        self._ask_ahead(threads)  # so that the threads work during the step
        return batches

    def _ask_ahead(self, threads: ThreadPoolExecutor) -> None:
        for step, places in islice(self._steps, self._ahead_steps - len(self._ahead)):
            self._ahead.append([threads.submit(self._read, step, *micro_batch) for micro_batch in places])

    def _plan(self, steps: range, first_index: int) -> Iterator[tuple[int, list[tuple[np.ndarray, np.ndarray]]]]:
        """Yield every step with the positions and the sample numbers of each of this rank's micro-batches."""
        for first in range(0, len(steps), _PLANNED_STEPS):
            block = steps[first : first + _PLANNED_STEPS]
            indices = np.array([micro_batch_indices(step - steps.start, self._share, first_index) for step in block])
            numbers = self._order(indices.ravel()).reshape(indices.shape)
            for step, *of_step in zip(block, indices, numbers, strict=True):
                yield step, list(zip(*of_step, strict=True))

    def _read(self, step: int, places: np.ndarray, ids: np.ndarray) -> Any:
        batch = self._reader.read(ids, f"of step {step + 1}", places)
        return map_tensors(torch.Tensor.pin_memory, batch) if self._pin_memory else batch

    def take_waited_seconds(self) -> float:
        """Return the seconds that the caller has waited for data since the previous call."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def close(self) -> None:
        """Stop the threads and discard their results. May be called more than once."""
        self._closed = True
        self._ahead.clear()
        if isinstance(self._reader.dataset, Stream):
            self._reader.dataset.close()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def evaluation_ids(samples: np.ndarray, share: BatchShare) -> list[np.ndarray]:
    """Return the sample numbers of one rank's evaluation micro-batches: arrays [micro_batch], int64.

    ``samples`` [samples] are distributed in order. All ranks get the same number of micro-batches: with different
    numbers, they would wait for each other forever. Missing samples are filled with ``PADDING_ID``.
    """
    rounds = -(-len(samples) // share.of_all)
    dealt = np.full(rounds * share.of_all, PADDING_ID, np.int64)
    dealt[: len(samples)] = samples
    return list(dealt.reshape(rounds, share.data_ranks, share.micro_batch)[:, share.data_rank])


def evaluation_batches(reader: Reader, samples: np.ndarray, share: BatchShare) -> Iterator[tuple[Any, bool]]:
    """Yield one rank's batches for an evaluation on ``samples`` [samples], and whether each batch contains any samples.

    All ranks get the same number of batches, so a batch may have none, see ``evaluation_ids``.
    """
    for ids in evaluation_ids(samples, share):
        yield reader.read(ids, "of the evaluation"), bool((ids >= 0).any())
