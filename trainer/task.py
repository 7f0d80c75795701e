"""What is trained: a model, data and a loss. Users subclass ``Task``; ``recipes`` has the built-in tasks."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from serried.configs.errors import UserError
from serried.configs.schema.sections import RunConfig, Section
from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.plan import Inputs, LossTerms, ParallelPlan
from serried.trainer.callbacks import Event


class Dataset(Protocol):
    """Samples by number. ``dataset[i]`` must depend on ``i`` alone, and may be called from several threads."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


def fingerprint(dataset: Dataset) -> str:
    """Return a name for the content of ``dataset``: its ``fingerprint`` if it has one, else its class and length.

    A resumed run must see the same data; this is what is compared.
    """
    return str(getattr(dataset, "fingerprint", None) or f"{type(dataset).__name__}-{len(dataset)}")


@dataclass(frozen=True)
class Reference:
    """Numbers of each sample that the pretrained model gives, which training compares with.

    They are computed once, before training, by the model of the run on its own layout, and kept in ``folder``.
    """

    columns: int
    """How many numbers a sample has."""
    folder: Path
    settings: Mapping[str, Any]
    """What the numbers depend on beside weights and samples, as JSON."""
    numbers: Callable[[Any, Any], tuple[Tensor, Tensor]]
    """What the model returned, and the batch -> ids of the samples [samples], and their numbers [samples, columns],
    fp64."""
    use: Callable[[str, np.ndarray], None]
    """Takes the name of a data set and the numbers of all its samples, [samples, columns]; NaN where they were not
    asked for."""


class Task:
    """What is trained. It knows no rank, no device and no parallel layout.

    ``build_model``, ``dataset`` and ``loss`` are required; everything else has a default. The methods are called on
    every process, except the hooks (``on_...``), which are called on rank 0 alone and must not use collectives.
    """

    Config: ClassVar[type[Section]] = Section
    """The task's own section of the configuration: its fields are the keys ``task.KEY``."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of configuration keys, such as ``{"trainer.steps": 300}``; the command line overrides them."""
    sections: ClassVar[tuple[str, ...]] = ()
    """Sections of the built-in language models that the task reads: ``model``, ``data``. A user's task needs none."""
    unit: ClassVar[str] = "samples"
    """What the console and the records count: ``samples``, or what ``LossTerms.weight`` counts, such as ``tokens``."""

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
        """Run ``model`` on ``batch``. Returns sums over the batch, not means: they are divided once, over all ranks.

        A task may define ``inputs`` and ``terms`` in its place: a pipeline, which calls the model itself, needs them.
        """
        inputs = self.inputs(batch)
        return self.terms(model(inputs.stream, **inputs.named), batch)

    def inputs(self, batch: Any) -> Inputs:
        """Return what the model is called with: ``model(stream, **named)``."""
        del batch
        defined = type(self).loss is not Task.loss
        raise UserError(
            f"{type(self).__name__} defines loss() alone, so a pipeline cannot run it; define inputs(batch) and "
            "terms(output, batch) in its place, or use parallel.pipeline=1"
            if defined
            else f"{type(self).__name__} must define loss(model, batch)"
        )

    def terms(self, output: Any, batch: Any) -> LossTerms:
        """Return the loss from what the model returned for ``inputs(batch)``: sums over the batch, not means."""
        del output, batch
        raise UserError(f"{type(self).__name__} must define terms(output, batch) beside inputs(batch)")

    def slice_sequence(self, batch: Any, part: Callable[[Tensor, int], Tensor]) -> Any:
        """Return ``batch`` with ``part(tensor, dim)`` in place of what has one number per token along ``dim``."""
        del batch, part
        raise UserError(
            f"{type(self).__name__} does not say which tensors of a batch contain the sequence; define "
            "slice_sequence(batch, part), or use parallel.context=1"
        )

    # data ------------------------------------------------------------------------------------------------------------

    def prepare(self, show: Callable[[str], None]) -> str:
        """Download or convert the data; called by one process per node. Returns the argument of ``open_data``.

        ``show`` takes progress lines, each in place of the one before; an empty one ends them.
        """
        del show
        return ""

    def open_data(self, place: str) -> None:
        """Open what ``prepare`` made. Called by every process."""

    def further_validation(self) -> Sequence[str]:
        """Return names of validation splits besides ``validation``."""
        return ()

    def collate(self, samples: Sequence[Any]) -> Any:
        """Return a batch: tensors in dicts, lists, tuples or named tuples, with the samples along dim 0."""
        try:
            return default_collate(list(samples))
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise self._no_batch(f"{type(error).__name__}: {error}".splitlines()[0]) from error

    def _no_batch(self, reason: str) -> UserError:
        return UserError(
            f"samples make no batch: {reason}; return samples with the same keys and shapes, or define "
            f"{type(self).__name__}.collate(samples)"
        )

    def collate_numbered(self, samples: Sequence[Any], ids: np.ndarray) -> Any:
        """Return a batch of ``samples`` whose numbers are ``ids`` [samples].

        An id below 0 marks padding, which must weigh nothing. The default drops it, and keeps one sample where all is
        padding; the evaluation ignores the loss of such a batch.
        """
        kept = {place: sample_id for place, sample_id in enumerate(ids.tolist()) if sample_id >= 0} or {0: 0}
        samples = [samples[place] for place in kept]
        if type(self).collate is Task.collate and (difference := _difference(samples, list(kept.values()))):
            raise self._no_batch(difference)
        return self.collate(samples)

    def example_batch(self, samples: int) -> Any:
        """Return a batch of ``samples`` samples for a plan, which reads shapes and types alone."""
        dataset = self.dataset("train")
        assert dataset is not None, "there is something to train on"
        ids = np.arange(samples) % len(dataset)
        return self.collate_numbered([dataset[index] for index in ids.tolist()], ids)

    def augment(self, sample: Any, seed: int) -> Any:
        """Return ``sample`` with random changes, in training only. All of them must follow from ``seed``, which is
        another each time that a sample is used, and the same on every layout and after a resume."""
        del seed
        return sample

    def weight_per_sample(self) -> int:
        """Return the expected ``LossTerms.weight`` of one sample. It keeps the loss in the range of fp16, no more."""
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

    # words -----------------------------------------------------------------------------------------------------------

    def describe_model(self) -> str:
        """Return one line for the plan."""
        return type(self).__name__

    def describe_data(self) -> str:
        """Return one line for the plan, before or after ``open_data``."""
        return ""

    def describe_reference(self) -> str:
        """Return one line for the plan on what training compares with; empty: with nothing."""
        return ""

    def describe_sample(self) -> Sequence[str]:
        """Return lines that show a sample of the training data."""
        return ()

    @property
    def opens_in(self) -> str:
        """Other software that opens a checkpoint as it is."""
        return ""

    def describe_kernels(self, device: str) -> str:
        """Return what the plan says of how the model computes on a device of this type, such as ``cpu``.

        Raises:
            UserError: it cannot be trained there as it is configured.
        """
        del device
        return ""

    def next_command(self, start: str) -> str:
        """Return what the user may want to type next after a finished run; ``start`` starts this program again."""
        return f"{start} run.name=OTHER for another run"

    def notes(self, starts_from_scratch: bool) -> Sequence[str]:
        """Return warnings for the plan."""
        del starts_from_scratch
        return ()

    # checkpoints -----------------------------------------------------------------------------------------------------

    def export_name(self, name: str) -> str:
        """Return the name in a checkpoint of parameter ``name``."""
        return name

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        """Return where the elements of parameter ``name`` of ``shape`` lie in the tensors of a checkpoint.

        The default: in one tensor of the same shape, under its ``export_name``.
        """
        return (Fragment.whole(self.export_name(name), shape),)

    def exported_from(self, folder: Path) -> Callable[[str, Sequence[int]], tuple[Fragment, ...]]:
        """Return ``exported`` for the model in ``folder``, with () for parameters that it lacks and that may start from
        initial values. The default: it lacks none."""
        del folder
        return self.exported

    def pretrained(self) -> Path | None:
        """Return the folder of the weights that a new run begins with; None: initial values. Called on one rank."""
        return None

    def heads(self) -> Sequence[str]:
        """Return names of modules that are trained whole beside adapters, such as a new head. Called after
        ``build_model``."""
        return ()

    def adapter_settings(self) -> Mapping[str, Any]:
        """Return further keys of ``adapter_config.json``, which PEFT reads."""
        return {}

    def open_saved(self, checkpoint: Path) -> None:
        """Prepare for the model in ``checkpoint``, which is opened and not trained further. Called before ``prepare``
        and ``build_model``."""

    def check_resumed(self, checkpoint: Path) -> None:
        """Raise ``UserError`` if the numbers that the model in ``checkpoint`` takes or gives, such as ids of tokens or
        classes, mean something else in the data now. Called after ``open_data``, on one rank."""

    def teacher_folder(self) -> Path | None:
        """Return the folder of the weights of a frozen model within the model; None: there is none."""
        return None

    def exported_teacher(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        """Return where parameter ``name`` lies in the tensors of ``teacher_folder()``; () for those of no teacher, and
        ``exported`` returns () for the teacher's."""
        del name, shape
        return ()

    def check_weights(self, folder: Path) -> None:
        """Raise ``UserError`` if the model in ``folder`` computes something else than this one would."""

    def reference_numbers(self) -> Reference | None:
        """Return what to compute with the weights in ``pretrained()`` before training; None: nothing. Called after
        ``open_data``."""
        return None

    def export_files(self, folder: Path) -> None:
        """Write files beside the weights of a checkpoint, such as a config that lets other software open it."""

    # hooks, on rank 0 alone ------------------------------------------------------------------------------------------

    def on_start(self, event: Event) -> None:
        """Called before the first step."""

    def on_step(self, event: Event) -> None:
        """Called after each logged step."""

    def on_evaluate(self, event: Event) -> None:
        """Called after each evaluation of a data set."""

    def on_save(self, event: Event) -> None:
        """Called after each committed checkpoint."""

    def on_end(self, event: Event) -> None:
        """Called once, after the last step."""


class Piece(NamedTuple):
    """A piece of generated text."""

    text: str
    """Empty if no more characters are complete: one may take several tokens."""
    tokens: int
    """Tokens generated since the piece before."""


def needs_data_for_example(task: Task) -> bool:
    """Return whether ``task.example_batch`` reads the training data."""
    return type(task).example_batch is Task.example_batch


class TextTask(Task):
    """A task whose model reads and writes text; what ``generate``, ``evaluate`` and chat need beyond a ``Task``."""

    unit: ClassVar[str] = "tokens"

    def adapter_settings(self) -> Mapping[str, Any]:
        return {"task_type": "CAUSAL_LM"}

    def sample(self, model: nn.Module, tokens: int, seed: int, device: torch.device) -> str:
        """Return text generated by ``model``. Called on all ranks together; returns the same text on each."""
        raise NotImplementedError(f"{type(self).__name__} must define sample()")

    def target_bytes(self, batch: Any) -> int:
        """Return the bytes of text that ``batch`` has to predict; 0 if it is not text."""
        raise NotImplementedError(f"{type(self).__name__} must define target_bytes()")

    def check_tokenizer(self, folder: Path) -> None:
        """Raise ``UserError`` if the data has other tokens than the model in ``folder``. Called after ``open_data``."""

    def lengths(self) -> tuple[int, int]:
        """Return the tokens of a training sequence, and the most that the model can take."""
        raise NotImplementedError(f"{type(self).__name__} must define lengths()")

    def echoes_prompt(self) -> bool:
        """Return whether generated text continues the prompt, which is then printed first; a chat's reply does not."""
        return True

    def prompt_ids(self, said: Sequence[str]) -> Sequence[int]:
        """Return the token ids of a text to continue, or of the messages of a chat so far, as the model is to see
        them. A chat begins and ends with a message of the user."""
        raise NotImplementedError(f"{type(self).__name__} must define prompt_ids()")

    def text_ids(self, text: str, *, begins: bool) -> Sequence[int]:
        """Return the token ids of ``text``, behind what the tokenizer puts before a text if it ``begins`` one."""
        raise NotImplementedError(f"{type(self).__name__} must define text_ids()")

    def first_id(self) -> int:
        """Return the token id that stands before a text that nothing comes before."""
        raise NotImplementedError(f"{type(self).__name__} must define first_id()")

    def write(
        self, model: nn.Module, said: Sequence[str], *, tokens: int, temperature: float, top_p: float, seed: int,
        device: torch.device,
    ) -> Iterator[Piece]:  # fmt: skip
        """Yield what ``model`` writes after ``said``, as in ``prompt_ids``, until it ends or ``tokens`` tokens are
        generated."""
        raise NotImplementedError(f"{type(self).__name__} must define write()")


def _difference(values: Sequence[Any], ids: Sequence[int], where: str = "sample") -> str:
    """Return why the values that samples ``ids`` have at ``where`` make no batch; empty if nothing is known against it.

    ``default_collate`` fails on some of these without naming the key, and on others, depending on which sample comes
    first, returns a batch with keys left out.
    """
    forms = [_form(value) for value in values]
    for form, sample_id in zip(forms, ids, strict=True):
        if form != forms[0]:
            return f"{where} is {forms[0]} in dataset[{ids[0]}], {form} in dataset[{sample_id}]"
    parts: dict[str, list[Any]] = {}
    if isinstance(values[0], Mapping):
        for key in dict.fromkeys(key for value in values for key in value):
            if lacking := [sample_id for value, sample_id in zip(values, ids, strict=True) if key not in value]:
                first = ", ".join(f"dataset[{sample_id}]" for sample_id in lacking[:8])
                return f"{where}[{key!r}] is missing in {len(lacking)} of {len(ids)} samples: {first}"
            parts[f"{where}[{key!r}]"] = [value[key] for value in values]
    elif isinstance(values[0], Sequence) and not isinstance(values[0], str | bytes):
        parts = {f"{where}[{index}]": list(of) for index, of in enumerate(zip(*values, strict=True))}
    return next(filter(None, (_difference(of, ids, place) for place, of in parts.items())), "")


def _form(value: Any) -> str:
    """Return what ``default_collate`` needs to be the same in all samples. It mixes numbers and arrays without dims."""
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return "a dict"
    if isinstance(value, Sequence):
        return f"a {type(value).__name__}" + f" of {len(value)}" * (not isinstance(value, str | bytes))
    return f"of shape {list(shape)}" if (shape := getattr(value, "shape", ())) else "a number"


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return ``batch`` with ``function`` applied to every tensor in its dicts, lists, tuples and named tuples."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        kind: Any = type(batch)  # a dict, or one of its kin such as transformers' BatchEncoding
        return kind({key: map_tensors(function, value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch``, which is on the CPU, with its tensors on ``device``, without waiting for the copy if they are
    pinned."""
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
