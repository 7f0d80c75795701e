"""Splits, classes and columns of labelled datasets."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from serried.configs.errors import UserError
from serried.configs.schema.tasks import LabelledSection, SampledSection
from serried.configs.similar_names import nearest
from serried.recipes.data.readers.source_files import assignment, library, quiet
from serried.trainer.task import Dataset, fingerprint

TRAINING = "train"
_VALIDATION = ("val", "validation", "test")
_SHOWN = 5


class MappedSamples:
    """Dataset that applies a function of (sample, index) to each sample of another dataset."""

    def __init__(self, samples: Dataset, change: Callable[[Any, int], Any]) -> None:
        self._samples = samples
        self._change = change
        self.fingerprint = fingerprint(samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._change(self._samples[index], index)


class LabelledData(NamedTuple):
    """Splits of the dataset at ``task.path``, and its classes."""

    classes: Sequence[str]
    training: Dataset
    validation: Dataset | None
    bad_rows: int = 0
    """Number of bad rows that were left out."""

    def numbered_as(self, names: Sequence[str], where: str) -> "LabelledData":
        """Return the same samples with labels renumbered to the classes ``names`` of a model. Raises ``UserError`` if
        the data has other classes. ``where``: name of the data in the message."""
        if unknown := [name for name in self.classes if name not in names]:
            raise UserError(
                f"{where} has the class {unknown[0]}, but the model has only the classes {_some(names)}; remove the "
                "samples of other classes"
            )
        numbers = [list(names).index(name) for name in self.classes]

        def renumbered(sample: Any, _: int) -> Any:
            return sample._replace(label=numbers[sample.label])

        validation = self.validation and MappedSamples(self.validation, renumbered)
        return LabelledData(names, MappedSamples(self.training, renumbered), validation, self.bad_rows)


def validation_split(section: SampledSection, names: Collection[str]) -> str | None:
    """Return the split to evaluate on, one of ``names``; None if there is none. Raises ``UserError`` if
    ``task.validation`` is not one of them."""
    if section.validation is None:
        return next((name for name in _VALIDATION if name in names), None)
    if section.validation not in names:
        near = nearest(section.validation, names) or [name for name in names if name != TRAINING] or ["null"]
        raise UserError(
            f"task.validation={section.validation}: {assignment('task.path', section.path)} has no such split (it has "
            f"{', '.join([*names][:_SHOWN])}); use task.validation={near[0]}"
        )
    return section.validation


class Classes:
    """Mapping from label values to class indices."""

    def __init__(self, values: Iterable[Any]) -> None:
        """``values``: all labels of the training data. May contain duplicates."""
        found = sorted(set(values), key=lambda value: (isinstance(value, str), value))
        self._numbers = {value: number for number, value in enumerate(found)}
        self.names = [str(value) for value in found]

    def number(self, value: Any) -> int:
        return self._numbers[value]

    def check(self, values: Iterable[Any], where: str) -> None:
        """Raise ``UserError`` if ``values`` contains a label that the training data does not have."""
        if unknown := sorted(str(value) for value in set(values) - self._numbers.keys()):
            raise unknown_class(unknown[0], where, self.names)


def unknown_class(name: str, where: str, classes: Sequence[str]) -> UserError:
    """Return the error for a class that only a validation split has."""
    return UserError(
        f"{where} has the class {name}, but the training data has only {_some(classes)}; add training samples of this "
        "class, or remove the samples of this class from the validation data"
    )


def _some(classes: Sequence[str]) -> str:
    return ", ".join(classes[:_SHOWN]) + (", ..." if len(classes) > _SHOWN else "")


def open_dataset(
    section: SampledSection, name: str, columns: Mapping[str, str], form: str,
    opened: Callable[[Any, Callable[[Any], int]], Dataset],
) -> LabelledData:  # fmt: skip
    """Open the dataset ``name``, from the Hub or a folder. The result has no classes if the task has no labels.

    Args:
        columns: columns to keep, as a mapping from config key to column name.
        form: description of the local files that are also accepted, for messages.
        opened: function that opens a split, given its table and a function from label to class index.

    Raises:
        UserError: the dataset cannot be loaded, lacks a column or split, or has invalid labels.
    """
    typed = assignment("task.path", section.path)
    datasets = library("datasets", f"a dataset ({typed})")
    try:
        with quiet():
            splits = datasets.load_dataset(name)
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")[:200]
        raise UserError(
            f"{typed} is neither a {form} nor a dataset that can be loaded here: {reason}; on a machine with access to "
            f"the Hugging Face Hub: hf download {name} --repo-type dataset --local-dir FOLDER"
        ) from None
    if TRAINING not in splits:
        raise UserError(f"{typed} has no split {TRAINING} (it has {', '.join(splits)}); use a dataset with this split")
    training, label = splits[TRAINING], section.label_column if isinstance(section, LabelledSection) else None
    check_columns(columns, training.column_names, typed)
    split = validation_split(section, list(splits))

    def both(names: Sequence[str], number: Callable[[Any], int]) -> LabelledData:
        tables = [
            splits[split_name].select_columns([*columns.values()]) for split_name in (TRAINING, split) if split_name
        ]
        chosen, *others = (opened(table, number) for table in tables)
        return LabelledData(names, chosen, others[0] if others else None)

    if label is None:
        return both((), int)
    named = getattr(training.features[label], "names", None)
    for split_name in (TRAINING, split) if split else (TRAINING,):
        _check_labels(splits[split_name][label], named, f"split {split_name} of {typed}")
    classes = Classes(named or training[label])
    if split:
        others = getattr(splits[split].features[label], "names", None) if named else splits[split][label]
        classes.check(others or (), f"split {split} of {typed}")
    return both(list(named), int) if named else both(classes.names, classes.number)


def _check_labels(values: Iterable[Any], named: Sequence[str] | None, where: str) -> None:
    """Raise ``UserError`` if a label is neither a string nor an integer, or is not one of the ``named`` classes."""
    for value in set(values):
        if not isinstance(value, str | int) or (named and value not in range(len(named))):
            raise UserError(f"{where} has the unknown label {value}; remove such rows")


def check_columns(columns: Mapping[str, str], names: Sequence[str], where: str) -> None:
    """Raise ``UserError`` if one of ``columns`` (config key to column name) is not in ``names``."""
    if missing := missing_column(columns, names):
        typed, instead = missing
        raise UserError(f"{typed}: {where} has no such column; its columns are {', '.join(names)}; use {instead}")


def missing_column(columns: Mapping[str, str], names: Sequence[str]) -> tuple[str, str] | None:
    """Return the config override of the first column that is not in ``names``, and a suggested replacement. None if all
    columns exist."""
    left = [name for name in names if name not in columns.values()] or ["COLUMN"]
    for key, column in columns.items():
        if column not in names:
            return f"{key}={column}", f"{key}={(nearest(column, left) or left)[0]}"
    return None
