"""Evaluation of a model on a data set, during training or from a checkpoint."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.configs.errors import EXIT_FINISHED, UserError
from serried.configs.hugging_face.adapter_folder import ADAPTER_CONFIG
from serried.configs.schema.sections import DEFAULT_VALIDATION, WHOLE, RunConfig
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.layout.mesh import Layout, resolve_layout
from serried.parallel.plan import LossTerms
from serried.parallel.sum_table import section
from serried.runtime.console import Console
from serried.runtime.session import Session
from serried.trainer.adapter_base_model import base_of, check_base
from serried.trainer.adapters import CannotAdapt, unknown_layer
from serried.trainer.checkpoint.manifest import MANIFEST, Damaged, check_files
from serried.trainer.checkpoint.read_while_training import read_by_all
from serried.trainer.checkpoint.retention import ADAPTER, MODEL
from serried.trainer.checkpoint.saved_state import STATE
from serried.trainer.data.loader import Reader, evaluation_batches
from serried.trainer.data.sampler import BatchShare, evaluation_samples
from serried.trainer.model import model_to_train, sharded
from serried.trainer.precision import check_products
from serried.trainer.task import Dataset, RunTask, StepMean, TextTask, to_device

Batches = Iterable[Any]

_LARGEST_EXPONENT = 709.0


class Sums(NamedTuple):
    """Sums over a data set and all ranks."""

    loss_sum: float
    weight: float
    metrics: dict[str, tuple[float, float]]
    """Sum and weight of each named metric."""


def evaluate_by_source(
    parallel: DistributedModel,
    task: RunTask,
    dataset: Dataset,
    *,
    samples: int,
    micro_batch: int,
    on_device: Callable[[Batches], Batches],
) -> Iterator[tuple[str, Sums]]:
    """Evaluate the first ``samples`` samples, or all samples if there are fewer.

    This is a collective call: each rank reads its share. Yields the sums by source of a mixture, or under the name ""
    if there is a single source.

    ``on_device``: receives pairs of a batch and whether it counts, and yields them with the batch on the device.
    """

    for source, numbers in evaluation_samples(dataset, samples).items():
        share = BatchShare(micro_batch, parallel.layout.data_ranks, parallel.place.data_rank)
        read = partial(evaluation_batches, Reader(dataset, task.collate_numbered), numbers, share)
        batches = on_device(read())
        if (step_mean := task.step_mean()) is not None:
            mean = parallel.mean_loss(batches, step_mean.objective)
            batches = _with_mean(on_device(read()), step_mean, mean)
        sums = parallel.evaluate(batches, task)
        total = sums.read()
        metrics = {name: (number, weight) for name, (number, weight) in section(total, "metrics").items()}
        yield source, Sums(total["loss_sum"], total["weight"], metrics)


def _with_mean(batches: Batches, step_mean: StepMean, mean: Tensor) -> Iterator[tuple[Any, bool]]:
    for batch, counts in batches:
        yield step_mean.use(batch, mean), counts


class Kept:
    """Objective that stores values for each sample. Subclasses define ``terms`` or override ``loss``."""

    def __init__(self, task: RunTask, samples: int, columns: int, parallel: DistributedModel) -> None:
        self.inputs, self.slice_sequence, self._owns = task.inputs, task.slice_sequence, parallel.place.owns_loss
        self.numbers = torch.zeros(samples, columns, dtype=torch.float64, device=parallel.device)

    def loss(self, model: nn.Module, batch: Any) -> LossTerms:
        inputs = self.inputs(batch)
        return self.terms(model(inputs.stream, **inputs.named), batch)

    def terms(self, output: Any, batch: Any) -> LossTerms:
        raise NotImplementedError

    def keep(self, samples: Tensor, numbers: Tensor) -> LossTerms:
        """Store ``numbers`` for ``samples``, unless another rank stores them. Returns a loss of weight 0."""
        if self._owns:
            self.numbers[samples] = numbers
        return LossTerms(self.numbers.new_zeros(()), 0)

    def total(self) -> Tensor:
        """Return the values of all ranks, [samples, columns]. This is a collective call: each value is 0 on all ranks
        but one."""
        if dist.is_initialized():
            dist.all_reduce(self.numbers)
        return self.numbers


@dataclass(frozen=True)
class Evaluated:
    """Result of an evaluation on one data set."""

    set: str
    """Name of the validation set. For a source of a mixture, followed by a slash and the source's name."""
    sequences: int
    all_sequences: int
    """Number of sequences in the data set."""
    tokens: float
    """Total weight of the loss: the number of target tokens, or of the task's ``unit``, an int unless rows have
    weights."""
    text_bytes: int
    """Number of UTF-8 bytes in the text of the targets."""
    loss_sum: float
    """Sum of the loss over the targets, in nats."""
    unit: str = "tokens"
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of the task's named metrics."""

    @property
    def loss(self) -> float | None:
        """Mean loss over the targets. None if there are none."""
        return self.loss_sum / self.tokens if self.tokens else None

    @property
    def perplexity(self) -> float | None:
        """exp(loss). Infinite if it exceeds the range of a float. None if there is no loss."""
        if self.loss is None:
            return None
        return math.exp(self.loss) if self.loss < _LARGEST_EXPONENT else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text. None if the targets are not text."""
        return self.loss_sum / (math.log(2) * self.text_bytes) if self.text_bytes else None


def print_evaluation(
    config: RunConfig,
    task: RunTask,
    session: Session,
    checkpoint: Path,
    *,
    is_whole: bool,
    batches: int | None,
    as_json: bool,
) -> int:
    """Evaluate and print the result on rank 0. Returns the exit code."""
    console = Console(session.is_main, session.rank)
    global_batch = config.trainer.global_batch
    try:
        found = evaluate(
            config, task, session, checkpoint,
            is_whole=is_whole, sequences=batches and batches * global_batch, console=console,
        )  # fmt: skip
        if as_json:
            for result in found:
                console.say(json.dumps({name: _finite(value) for name, value in _numbers(result).items()}))
            return EXIT_FINISHED
        console.say(f"model      {checkpoint}, {config.precision.name}, {session.place()}")
        for result in found:
            console.say(describe(result, global_batch))
    finally:
        console.close()
    return EXIT_FINISHED


_TOLD = ("set", "loss", "perplexity", "bits_per_byte", "tokens", "text_bytes", "sequences", "all_sequences")


def _numbers(found: Evaluated) -> dict[str, Any]:
    if found.unit == "tokens":
        return {name: getattr(found, name) for name in _TOLD} | dict(found.metrics)
    counts = {found.unit: round(found.tokens, 6), f"all_{found.unit}": found.all_sequences}
    return {"set": found.set, "loss": found.loss, **found.metrics, **counts}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe(found: Evaluated, global_batch: int) -> str:
    """Return one line about the result, for the user."""
    if found.loss is None:
        return f"{found.set:<10} no loss: its {found.sequences:,} sequences have nothing to predict"
    named = "".join(f"  {name} {value:.4f}" for name, value in found.metrics.items())
    if found.unit != "tokens":
        line = f"{found.set:<10} loss {found.loss:.4f}{named}  over {round(found.tokens, 6):,} {found.unit}"
        return line + f" of {found.all_sequences:,}" * (found.sequences < found.all_sequences)
    bits = f"{found.bits_per_byte:.4f}" if found.bits_per_byte is not None else "unknown"
    line = (
        f"{found.set:<10} loss {found.loss:.4f}  perplexity {found.perplexity:.4g}  bits/byte {bits}  over "
        f"{found.tokens:,} tokens, {found.text_bytes:,} bytes"
    )
    if found.sequences < found.all_sequences and "/" not in found.set:
        batches = -(-found.all_sequences // global_batch)
        line += f"; {found.sequences:,} of {found.all_sequences:,} sequences, all: trainer.eval_batches={batches}"
    return line


def evaluate(
    config: RunConfig,
    task: RunTask,
    session: Session,
    checkpoint: Path,
    *,
    is_whole: bool,
    sequences: int | None,
    console: Console,
) -> list[Evaluated]:
    """Evaluate the weights of ``checkpoint`` with ``config``. This is a collective call that returns the same result on
    every rank.

    The validation sets are evaluated, or all of ``data`` if ``is_whole``. ``sequences``: maximum number of sequences
    of each data set. None evaluates all of them.

    Raises ``UserError`` if the checkpoint is damaged, or its model or tokenizer does not match the data.
    """
    read = partial(read_by_all, session, checkpoint)  # each call includes a collective
    read(partial(task.open_saved, checkpoint))
    console.doing("preparing data")
    read(lambda: task.open_data(session.once_per_node(partial(task.prepare, console.progress))))
    if isinstance(task, TextTask):
        read(partial(session.once, partial(task.check_tokenizer, checkpoint)))
    console.doing(f"reading {checkpoint}")
    read(partial(session.once, partial(check_weights, checkpoint)))
    if task.reference_numbers() is not None:
        raise UserError(
            "the loss of this task needs log-probabilities of the reference model, and only training computes them; "
            "the evaluations of the run are in metrics.jsonl"
        )
    layout = resolve_layout(config.parallel, session.world_size)
    parallel = read(partial(load_model, config, task, layout, session.device, checkpoint))
    names = [WHOLE] if is_whole else [DEFAULT_VALIDATION, *task.further_validation()]
    datasets = read(partial(_datasets, task, names))
    found = []
    for name, dataset in datasets.items():
        wanted = len(dataset) if sequences is None else sequences
        found += _evaluate_on(config, task, session, parallel, name, dataset, wanted, console)
    return found


def _count(weight: float) -> float:
    return int(weight) if weight.is_integer() else weight


def _datasets(task: RunTask, names: Sequence[str]) -> dict[str, Dataset]:
    """Return the data sets ``names``, after reading a batch of each, which may need files of the checkpoint.

    Raises ``UserError`` if a data set does not exist.
    """
    found = {}
    for name in names:
        dataset = task.dataset(name)
        if dataset is None and name == DEFAULT_VALIDATION and len(names) > 1:
            continue
        if dataset is None:
            other = "; use data=text data.path=FILES" if isinstance(task, TextTask) else ""
            other = "; use task.path=SAMPLES" if hasattr(task.run.task, "path") else other
            raise UserError(
                f"there is no {name} data to evaluate on: {type(task).__name__}.dataset({name!r}) returned None{other}"
            )
        if len(dataset):
            Reader(dataset, task.collate_numbered).read([0], "of the evaluation")
        found[name] = dataset
    return found


def _evaluate_on(
    config: RunConfig,
    task: RunTask,
    session: Session,
    parallel: DistributedModel,
    name: str,
    dataset: Dataset,
    wanted: int,
    console: Console,
) -> list[Evaluated]:
    """Evaluate the data set ``name``. Returns its result, followed by the result of each source if it is a mixture."""
    sizes = {source: len(samples) for source, samples in evaluation_samples(dataset, wanted).items()}
    micro_batch, total = config.trainer.micro_batch, sum(sizes.values())
    done, text_bytes = 0, 0

    def on_device(batches: Batches) -> Iterator[Any]:
        nonlocal done, text_bytes
        for batch in batches:
            console.doing(f"evaluating {name}: {min(done, total):,} of {total:,} sequences", f"evaluating {name}")
            text_bytes += task.target_bytes(batch[0]) if isinstance(task, TextTask) and task.unit == "tokens" else 0
            yield to_device(batch, session.device)
            done += micro_batch * parallel.layout.data_ranks

    each: list[Evaluated] = []
    found = evaluate_by_source(parallel, task, dataset, samples=wanted, micro_batch=micro_batch, on_device=on_device)
    for source, sums in found:
        of_source = f"{name}/{source}" if source else name
        all_bytes, text_bytes = sum(dict(session.gather((parallel.place.data_rank, text_bytes))).values()), 0
        metrics = {key: total / weight for key, (total, weight) in sums.metrics.items() if weight}
        each.append(
            Evaluated(
                of_source, sizes[source], len(dataset), _count(sums.weight), all_bytes, sums.loss_sum, task.unit,
                metrics,
            )
        )  # fmt: skip
    if len(each) == 1:
        return each
    tokens, all_bytes = sum(part.tokens for part in each), sum(part.text_bytes for part in each)
    return [Evaluated(name, total, len(dataset), tokens, all_bytes, sum(part.loss_sum for part in each)), *each]


def load_model(
    config: RunConfig, task: RunTask, layout: Layout, device: torch.device, checkpoint: Path
) -> DistributedModel:
    """Return the model with the weights of ``checkpoint``, in evaluation mode. This is a collective call."""
    check_products(config, device)  # same check as in training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.trainer.seed)  # build_model() must initialize a base model as in training
        try:
            model = model_to_train(config, task)  # whether a layer is frozen affects its precision
        except CannotAdapt as error:
            if (checkpoint / STATE).exists():
                raise
            raise UserError(unknown_layer(checkpoint, error.pattern)) from None
    weights: Path | None = checkpoint
    if model.adapters is not None:
        weights = base_of(checkpoint, model.module)
    model.check_names(None, weights)
    parallel = sharded(config, model, layout, device)
    model.start(parallel, weights, config.trainer.seed)
    if model.adapters is not None:
        model.load_adapters(checkpoint, parallel)
    parallel.module.eval()
    return parallel


def check_weights(checkpoint: Path) -> None:
    """Verify the checksums of the weight files. Raises ``UserError`` if a file is damaged."""
    if not (checkpoint / STATE).exists() and not (checkpoint / MANIFEST).exists():
        return  # an exported model has no checksums
    try:
        check_files(checkpoint, lambda name: name.startswith((MODEL, ADAPTER)) or name == "config.json")
        if (checkpoint / ADAPTER_CONFIG).exists():
            check_base(checkpoint)
    except Damaged as damaged:
        raise UserError(f"{damaged}; use another checkpoint: checkpoint=STEP") from None
