"""Progress of a run: token and step counts, the best evaluation, and early stopping."""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from serried.configs.errors import UserError
from serried.configs.plain_data import is_count, is_number
from serried.configs.schema.sections import RunConfig
from serried.trainer.checkpoint.resume import Start
from serried.trainer.checkpoint.saved_state import taking_from
from serried.trainer.step import StepResult

DONE = "all steps done"
MANY_SKIPPED = 0.05
"""Fraction of skipped steps from which the end of the run reports a warning."""


@dataclass
class Counts:
    """Token counts, losses and skipped steps of a run so far."""

    tokens: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    source_tokens: dict[str, int] = field(default_factory=dict)
    """Number of tokens from each source of a mixture, by name."""
    skipped: int = 0
    """Number of steps that were skipped, except those in which fp16 loss scaling overflowed."""

    def add(self, result: StepResult, sources: Sequence[str]) -> None:
        """Count a step. ``sources``: names of a mixture's sources, in the order of the result."""
        self.tokens += int(result.tokens)
        self.skipped += bool(result.skipped) and not result.is_overflow
        for name, tokens in zip(sources, result.by_source, strict=True):
            self.source_tokens[name] = self.source_tokens.get(name, 0) + int(tokens)
        if math.isfinite(result.loss):
            self.last_loss = result.loss
            self.first_loss = result.loss if self.first_loss is None else self.first_loss

    def check(self) -> None:
        """Raise ``ValueError`` if a value has the wrong type or range."""
        if not all(map(is_count, (self.tokens, self.skipped, *self.source_tokens.values()))):
            raise ValueError("progress")
        if not all(loss is None or is_number(loss) for loss in (self.first_loss, self.last_loss)):
            raise ValueError("progress")


@dataclass
class Progress:
    """Counts, the last evaluation and the best evaluation so far. Identical on all ranks."""

    counts: Counts = field(default_factory=Counts)
    validation_loss: float | None = None
    validated_step: int = 0
    validation: dict[str, float] = field(default_factory=dict)
    """Finite loss and named metrics of the last evaluation on the validation set."""
    to_minimise: float | None = None
    """``checkpoint.best_metric`` of the last evaluation, negated if higher is better."""
    best: float | None = None
    """The lowest ``to_minimise`` so far."""
    evaluations_since_best: int = 0
    best_of: str = ""
    """``checkpoint.best_metric`` and ``best_mode`` for which ``best`` was computed."""
    early_stop: str | None = None
    """Reason why the run finished before its last step."""
    missed: list[str] = field(default_factory=list)
    """Validation sets that were not evaluated in the last evaluation because the run stopped."""
    made_up: dict[str, dict[str, float]] = field(default_factory=dict)
    """``validation`` by step, for checkpoints that were saved before their interrupted evaluation was completed."""

    def evaluated(self, step: int, means: Mapping[str, float], config: RunConfig) -> None:
        """Compare an evaluation on the validation set with the best so far, and decide whether the run stops early.

        ``means``: loss and named metrics. Raises ``UserError`` if ``checkpoint.best_metric`` is not among them.
        """
        trainer = config.trainer
        metric, mode = config.checkpoint.best_metric, config.checkpoint.best_mode
        finite = {name: value for name, value in means.items() if math.isfinite(value)}
        self.validation_loss, self.validated_step = finite.get("loss"), step
        if metric not in means:
            raise UserError(
                f"checkpoint.best_metric={metric} is not a metric of this task; use one of {', '.join(means)}"
            )
        self.validation, value = finite, finite.get(metric)
        self.to_minimise = -value if value is not None and mode == "max" else value
        if (best_of := f"{metric}, {mode}") != self.best_of:
            self.best_of, self.best = best_of, None
            self.evaluations_since_best = 0
        if step % trainer.evaluates_every and step != trainer.steps:
            return  # not a scheduled evaluation: it is due to trainer.stop_at
        if self.to_minimise is not None and (self.best is None or self.to_minimise < self.best):
            self.best, self.evaluations_since_best = self.to_minimise, 0
        else:
            self.evaluations_since_best += 1
        patience, key = trainer.early_stopping_patience, "trainer.early_stopping_patience"
        if patience and self.evaluations_since_best >= patience:
            self.early_stop = f"{metric} has not improved in {patience} evaluations ({key})"

    def is_finished(self, step: int, config: RunConfig) -> bool:
        """Return whether nothing is left to do after ``step``, including evaluations skipped by a stop."""
        return self.early_stop is not None or (step == config.trainer.steps and not self.missed)

    def finished_because(self, steps: int) -> str:
        """Return why a run of ``steps`` steps is finished, with the fraction of skipped steps if it is large."""
        reason = self.early_stop or DONE
        skipped = self.counts.skipped
        if skipped < MANY_SKIPPED * steps:
            return reason
        return f"{reason}, of which {skipped:,} of {steps:,} ({skipped / steps:.0%}) were skipped"

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain data that is independent of this object."""
        plain = asdict(self)
        return {**plain.pop("counts"), **plain}

    def resume(self, start: Start) -> None:
        """Resume from the checkpoint of ``start``, if there is one. The decision to stop early is made again.

        Raises ``UserError`` if the checkpoint's progress is invalid.
        """
        if start.resumes:
            with taking_from(start.checkpoint):
                self.load_state_dict(start.state["progress"])
            self.early_stop = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``. Raises ``TypeError`` or ``ValueError`` if it was not returned by ``state_dict()``."""
        values = deepcopy(dict(state))
        names = {attribute.name for attribute in fields(Counts)} & {*values}
        counted = {name: values.pop(name) for name in names}
        loaded = Progress(Counts(**counted), **values)
        loaded.counts.check()
        losses = loaded.validation_loss, loaded.best, loaded.to_minimise
        if not all(map(is_count, (loaded.validated_step, loaded.evaluations_since_best))):
            raise ValueError("progress")
        if not all(loss is None or is_number(loss) for loss in losses):
            raise ValueError("progress")
        if not isinstance(loaded.made_up, dict) or not all(isinstance(name, str) for name in loaded.missed):
            raise TypeError("progress")
        for attribute in fields(self):
            setattr(self, attribute.name, getattr(loaded, attribute.name))


def saved_early_stop(state: Mapping[str, Any], patience: int) -> str | None:
    """Return the early-stopping reason in a checkpoint's ``state``.

    None if the run did not stop early, or if a larger ``patience`` lets it continue.
    """
    progress = _progress_in(state)
    reason, waited = progress.get("early_stop"), progress.get("evaluations_since_best")
    return str(reason) if reason and isinstance(waited, int) and 0 < patience <= waited else None


def saved_skipped(state: Mapping[str, Any]) -> int:
    """Return the number of skipped steps in a checkpoint's ``state``."""
    skipped = _progress_in(state).get("skipped", 0)
    return skipped if is_count(skipped) else 0


def has_missed_evaluations(state: Mapping[str, Any]) -> bool:
    """Return whether the run stopped before the evaluation of the step in a checkpoint's ``state``."""
    return bool(_progress_in(state).get("missed"))


def _progress_in(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the progress in a checkpoint's ``state``. It is not validated: another version may have written it."""
    progress = state.get("progress")
    return progress if isinstance(progress, dict) else {}
