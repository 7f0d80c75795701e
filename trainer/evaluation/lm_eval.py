"""Benchmarks of lm-evaluation-harness, computed with the model of a run on the run's parallel layout.

Every rank builds all requests. Each data rank computes a share of them in the same number of forward passes. The
results are summed over the ranks, and every rank computes the metrics with the harness, so they are the same as on one
process. Imported only by runs that use benchmarks, since importing the harness is slow.
"""

import hashlib
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache
from io import StringIO
from typing import Any, NamedTuple

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.schema.sections import HARNESS
from serried.configs.similar_names import nearest
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.plan import Decoding, LossTerms
from serried.runtime.session import Session
from serried.trainer.evaluation.evaluate import Kept
from serried.trainer.task import Prompt, Sampling, TextTask

_IGNORE = -100
"""Target of a token that is not scored."""
_LENGTHS = 64
"""Batches are padded to a multiple of this number of tokens, since compiled blocks are recompiled for new lengths."""
_SEED, _FEW_SHOT_SEED, _GENERATED_TOKENS = 0, 1234, 256  # defaults of the harness
_NAMES_OF_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the largest number of tokens to generate. The first that is given counts."""

OnDevice = Callable[[Iterable[Any]], Iterable[Any]]
"""Moves batches to the device. Ends early if a rank requests a stop."""


class Stopped(Exception):
    """Raised when the ranks have agreed to stop."""


class Benchmarks:
    """The benchmarks in ``trainer.evaluate``."""

    def __init__(self, names: Sequence[str], documents: int, task: TextTask, session: Session) -> None:
        """Load the benchmarks and their data, first on one rank of each node, which downloads the data. This is a
        collective call.

        ``documents``: maximum number of documents of each benchmark.

        Raises ``UserError`` if a benchmark is unknown, cannot be loaded or generates text with settings that are not
        supported, or if the ranks have different data.
        """
        self._documents, self._task, self._tasks = documents, task, dict[str, Any]()
        self._groups = dict[str, Any]()
        self._shown: list[str] = []
        session.once_per_node(lambda: _load(names) and None)
        for name, found in zip(names, _load(names), strict=True):
            self._tasks |= found["tasks"]
            self._groups |= found["groups"]
            of_name = name.removeprefix(HARNESS)
            self._shown += [of_name] if of_name in found["groups"] else [*found["tasks"]]
        for name, found in self._tasks.items():
            self._check_generation(name, found)
        session.same_everywhere("the data of trainer.evaluate", self.requests())

    def _check_generation(self, name: str, benchmark: Any) -> None:
        """Raise ``UserError`` if ``benchmark`` generates text with settings that are not supported."""
        if benchmark.OUTPUT_TYPE != "generate_until":
            return
        try:
            tokens, longest = _sampling(benchmark.config.generation_kwargs or {}).tokens, self._task.lengths()[1]
        except ValueError as error:
            raise UserError(
                f"trainer.evaluate: {name} has generation_kwargs {error}, which is not supported during training; "
                "remove the task, and use lm_eval on an exported model"
            ) from None
        if tokens >= longest:
            raise UserError(
                f"trainer.evaluate: {name} generates {tokens} tokens, which leaves no room for its questions within "
                f"model.max_sequence_length={longest}; remove the task, or set max_gen_toks in its generation_kwargs"
            )

    def requests(self) -> str:
        """Return the number of requests of each benchmark and a hash of them, one benchmark per line."""
        lines = []
        for name, task in self._tasks.items():
            task.set_fewshot_seed(_FEW_SHOT_SEED)
            with _quiet(), _seeded():
                task.build_all_requests(limit=self._documents)
            asked = [(request.request_type, request.args) for request in task.instances]
            lines.append(f"{name}: {len(asked)} requests, {hashlib.sha256(repr(asked).encode()).hexdigest()[:16]}")
        return "\n".join(lines)

    def scores(
        self, parallel: DistributedModel, micro_batch: int, on_device: OnDevice, progress: Callable[[], None]
    ) -> dict[str, float]:
        """Return the metrics under the names ``TASK.METRIC``. This is a collective call.

        ``progress`` is called for each generated token: a batch of long answers may take longer than a step may stall.

        Raises:
            Stopped: ``on_device`` ended early.
        """
        scorer = _Scorer(self._task, parallel, micro_batch, on_device, progress)
        for task in self._tasks.values():
            task.set_fewshot_seed(_FEW_SHOT_SEED)
        with _quiet(), _seeded():
            found: Any = evaluate(
                scorer, {"tasks": self._tasks, "groups": self._groups}, limit=self._documents, bootstrap_iters=0,
                log_samples=False,
            )  # fmt: skip
        return {
            f"{name}.{metric.removesuffix(',none').replace(',', '.')}": float(value)
            for name in self._shown
            for metric, value in found["results"][name].items()
            if isinstance(value, int | float) and "," in metric and "_stderr," not in metric
        }


def _load(names: Sequence[str]) -> list[Any]:
    """Return the harness's ``tasks`` and ``groups`` for each of ``names``."""
    check_names(names)
    manager, found = _manager_of(names), list[Any]()
    for name in names:
        spec = name.removeprefix(HARNESS)
        try:
            with _quiet(), _seeded():
                found.append(manager.load(spec))
        except Exception as error:  # any error: a benchmark may contain code, and its data may be anywhere
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"trainer.evaluate={name} cannot be loaded: {type(error).__name__}: {reason}; fix the cause, or leave "
                "it out"
            ) from None
    return found


def check_names(names: Sequence[str]) -> None:
    """Raise ``UserError`` if one of ``names`` is neither a benchmark of the harness nor a YAML file."""
    manager = _manager_of(names)
    for name in names:
        spec = name.removeprefix(HARNESS)
        if spec not in manager.all_tasks and not spec.endswith(".yaml"):
            close = [HARNESS + task for task in nearest(spec, manager.all_tasks)]
            raise UserError(
                f"trainer.evaluate={name}: lm-evaluation-harness has no such task; "
                + (f"did you mean {' or '.join(close)}?" if close else "its tasks: lm_eval ls tasks")
            )


def _manager_of(names: Sequence[str]) -> TaskManager:
    return _manager(not all(name.endswith(".yaml") for name in names))


@cache
def _manager(with_its_own: bool) -> TaskManager:
    """Return a task manager. Indexing the harness's own tasks reads thousands of files, which takes seconds."""
    return TaskManager(include_defaults=with_its_own)


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    """Convert ``generation_kwargs`` of a task. Raises ``ValueError`` with the name of a setting that is not
    supported."""
    given = dict(settings)
    until, tokens = given.pop("until", None) or [], _GENERATED_TOKENS
    for name in reversed(_NAMES_OF_TOKENS):
        tokens = int(given.pop(name, None) or tokens)
    samples, temperature = given.pop("do_sample", None), given.pop("temperature", None)
    temperature = 0.0 if not samples else 1.0 if temperature is None else float(temperature)
    top_p = float(given.pop("top_p", None) or 1)
    if given:
        raise ValueError(next(iter(given)))
    stops = (until,) if isinstance(until, str) else tuple(until)
    return Sampling(tokens, temperature, top_p, _SEED, stops)


class _Request(NamedTuple):
    """Tokens to score, and the context before them."""

    context: Sequence[int]
    continuation: Sequence[int]


class _Batch(NamedTuple):
    tokens: Tensor
    """[B, S]"""
    targets: Tensor
    """[B, S]. ``_IGNORE`` for tokens that are not scored."""
    ids: Tensor
    """[B], number of the request. -1 for padding."""


class _Reporting(NamedTuple):
    """A model that reports each generated token."""

    model: DistributedModel
    report: Callable[[], None]

    def generate(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], how: Decoding) -> list[list[int]]:
        """Return the tokens that follow each of ``prompts``; see ``DistributedModel.generate``."""

        def choose(logits: Tensor, numbers: Sequence[int]) -> Tensor:
            self.report()
            return how.choose(logits, numbers)

        return self.model.generate(prompts, limits, how._replace(choose=choose))


class _Scorer(TemplateLM):
    """Interface of the harness to the model of a run. Text is tokenized as for an exported model."""

    def __init__(
        self, task: TextTask, parallel: DistributedModel, micro_batch: int, on_device: OnDevice,
        progress: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self._writer = _Reporting(parallel, progress)
        self._task, self._parallel, self._micro_batch, self._on_device = task, parallel, micro_batch, on_device
        self._most = task.lengths()[1] // parallel.layout.tensor * parallel.layout.tensor

    @property
    def eot_token_id(self) -> int:
        return self._task.first_id()

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return [*self._task.text_ids(string, begins=add_special_tokens is not False)]

    def generate_until(self, requests: Any, **_: Any) -> list[str]:
        alike: dict[Sampling, list[int]] = {}
        """Requests by their settings."""
        for number, (_context, settings) in enumerate(request.args for request in requests):
            alike.setdefault(_sampling(settings), []).append(number)
        found: dict[int, str] = {}
        for sampling, numbers in alike.items():
            room = self._task.lengths()[1] - sampling.tokens
            contexts = (self.tok_encode(requests[number].args[0])[-room:] for number in numbers)
            prompts = [Prompt(context or [self.eot_token_id]) for context in contexts]
            written = self._task.write(
                self._writer, prompts, sampling, rows=self._micro_batch, batches=self._until_stopped
            )
            found |= dict(zip(numbers, (text.text for text in written), strict=True))
        return [found[number] for number in range(len(requests))]

    def _until_stopped(self, batches: Iterable[int]) -> Iterator[int]:
        """Yield ``batches``. Raises ``Stopped`` if the ranks have agreed to stop."""
        every, done = [*batches], 0
        for batch in self._on_device(every):
            yield batch
            done += 1
        if done < len(every):
            raise Stopped

    def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
        windows = [
            [
                _Request(*make_disjoint_window(window))
                for window in get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._most, 1)
            ]
            for (text,) in (request.args for request in requests)
        ]
        found = iter(self._scored([window for of_text in windows for window in of_text]))
        return [sum(next(found)[0] for _ in of_text) for of_text in windows]

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        return self._scored([_Request(context, continuation) for _, context, continuation in requests])

    def _scored(self, requests: Sequence[_Request]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each request, and whether all of its tokens are the most likely ones."""
        if not requests:
            return []
        found = _Found(self._task, len(requests), 2, self._parallel)
        self._parallel.predict(self._batches(requests), found)
        return [(log_prob, others == 0) for log_prob, others in found.total().tolist()]

    def _batches(self, requests: Sequence[_Request]) -> Iterator[_Batch]:
        """Yield this rank's batches, the longest requests first. All ranks yield the same number of batches."""
        order = sorted(range(len(requests)), key=lambda number: -sum(map(len, requests[number])))
        rank, size, of_all = self._parallel.place.data_rank, self._micro_batch, self._parallel.layout.data_ranks
        starts, done = range(0, len(order), size * of_all), 0
        mine = (order[start + rank * size : start + (rank + 1) * size] for start in starts)
        # A rank without remaining requests computes one whose result is ignored.
        batches = (
            self._batch(requests, numbers) if numbers else self._batch(requests, order[:1], -1) for numbers in mine
        )
        for batch in self._on_device(batches):
            yield batch
            done += 1
        if done < len(starts):
            raise Stopped

    def _batch(self, requests: Sequence[_Request], numbers: Sequence[int], number: int | None = None) -> _Batch:
        rows = [([*requests[i].context, *requests[i].continuation])[-self._most - 1 :] for i in numbers]
        step = math.lcm(_LENGTHS, self._parallel.layout.tensor)
        length = min(self._most, -(-(max(map(len, rows)) - 1) // step) * step)
        tokens = torch.zeros(len(rows), length, dtype=torch.long)
        targets = torch.full_like(tokens, _IGNORE)
        for index, (row, each) in enumerate(zip(rows, numbers, strict=True)):
            tokens[index, : len(row) - 1] = torch.tensor(row[:-1])
            scored = min(len(requests[each].continuation), len(row) - 1)
            targets[index, len(row) - 1 - scored : len(row) - 1] = torch.tensor(row[-scored:])
        ids = torch.tensor(numbers) if number is None else torch.full((len(rows),), number)
        return _Batch(tokens, targets, ids)


class _Found(Kept):
    """Store the log-likelihood of each request, and the number of its tokens that are not the most likely ones."""

    def loss(self, model: nn.Module, batch: _Batch) -> LossTerms:
        logits, wanted = model(batch.tokens), batch.targets != _IGNORE
        log_probs, targets = logits[wanted].float().log_softmax(-1), batch.targets[wanted]
        row = wanted.nonzero()[:, 0]
        sums = self.numbers.new_zeros(len(batch.ids), 2)
        sums[:, 0].index_add_(0, row, log_probs.gather(1, targets.unsqueeze(1)).squeeze(1).double())
        sums[:, 1].index_add_(0, row, (log_probs.argmax(-1) != targets).double())
        return self.keep(batch.ids[batch.ids >= 0], sums[batch.ids >= 0])


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed Python and NumPy equally on all ranks in this context, since benchmarks use them for shuffling.

    The states of the generators are restored afterwards.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    random.seed(_SEED)
    np.random.seed(_FEW_SHOT_SEED)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress progress bars and log messages of the harness and its dependencies in this context."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)
