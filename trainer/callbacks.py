"""Callbacks: user code that is called on rank 0 at events of a run."""

import json
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from serried.configs.errors import TrainingFailed, UserError
from serried.configs.plain_data import is_number
from serried.configs.schema.sections import RunConfig
from serried.records.run_folder import RunFolder

if TYPE_CHECKING:
    from serried.trainer.monitor.heartbeat import Pulse

_STATE = "callbacks"
"""Key of the callbacks' state in the plain data of a checkpoint."""


@dataclass(frozen=True)
class Event:
    """The argument of a task's hooks."""

    step: int
    """Number of optimizer steps done."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """For ``on_step`` and ``on_evaluate``: loss and named metrics, averaged over the global batch or the data set."""
    split: str = ""
    """For ``on_evaluate``: name of the data set."""
    path: Path | str | None = None
    """For ``on_save``: the checkpoint, as a URL for a run in a bucket. For ``on_start`` and ``on_end``: the run
    folder."""


@dataclass(frozen=True)
class Run:
    """State of a run at an event: the argument of every hook of a callback.

    Example:
        >>> class Slowest(serried.Callback):
        ...     def on_save(self, run):
        ...         started = time.perf_counter()
        ...         upload(run.checkpoint)
        ...         run.log({"upload_seconds": time.perf_counter() - started})
    """

    step: int
    """Number of optimizer steps done. In ``on_save``: step of the checkpoint."""
    config: RunConfig
    """The configuration of the run."""
    folder: Path
    """The run folder."""
    metrics: Mapping[str, float]
    """Loss and named metrics by name. In ``on_step``: averaged over the global batch. In ``on_evaluate``: averaged over
    the data set. In ``on_end``: the last evaluation on the validation set. Empty in ``on_start`` and ``on_save``."""
    split: str
    """Name of the data set in ``on_evaluate``, such as ``validation``."""
    checkpoint: Path | str | None
    """Folder of the finished checkpoint in ``on_save``. For a run in a bucket, its URL."""
    records: RunFolder

    @property
    def steps(self) -> int:
        """Total number of optimizer steps of the run, ``trainer.steps``."""
        return self.config.trainer.steps

    def log(self, values: Mapping[str, float | str]) -> None:
        """Record numbers and strings in ``metrics.jsonl``. The report and the trackers show them.

        Args:
            values: Numbers (or tensors and arrays of one element) and strings by name.

        Raises:
            TypeError: A value is neither a number nor a string.

        Example:
            >>> run.log({"upload_seconds": 3.2, "sample": "Once upon a time"})
        """
        metrics: dict[str, float | None] = {}
        texts: dict[str, str] = {}
        for name, value in values.items():
            if isinstance(value, str):
                texts[str(name)] = value
            else:
                number = _number(name, value)
                metrics[str(name)] = number if math.isfinite(number) else None
        more: dict[str, Any] = {"nonfinite": True} if None in metrics.values() else {}
        self.records.record("log", step=self.step, metrics=metrics, texts=texts, **more)

    def log_images(self, name: str, images: Iterable[bytes | Path | str]) -> None:
        """Copy PNG images into the folder ``images`` of the run. The report and the trackers show them.

        Args:
            name: Name of the series, for example ``samples``.
            images: Contents or paths of PNG files.

        Raises:
            ValueError: An image is not PNG.
            OSError: A file cannot be read.

        Example:
            >>> figure.savefig("attention.png")
            >>> run.log_images("attention", ["attention.png"])
        """
        if isinstance(images, bytes | str | Path):
            images = [images]
        contents = [image if isinstance(image, bytes) else Path(image).read_bytes() for image in images]
        paths = self.records.add_images(name, self.step, contents)
        self.records.record("log", step=self.step, images={name: paths})


class Callback:
    """Base class of callbacks. Override the hooks that you need.

    Hooks are called on rank 0 only, so they must not use collectives. The other ranks wait while a hook runs. An
    exception in a hook ends the run as failed, after the checkpoint that is due in that step is complete. The same
    command resumes the run.

    Example:
        >>> class Upload(serried.Callback):
        ...     def __init__(self):
        ...         self.uploaded = 0
        ...
        ...     def on_save(self, run):
        ...         subprocess.run(["rclone", "copy", run.checkpoint, "remote:runs"], check=True)
        ...         self.uploaded += 1
        ...         run.log({"uploaded": self.uploaded})
        ...
        ...     def state_dict(self):
        ...         return {"uploaded": self.uploaded}
        ...
        ...     def load_state_dict(self, state):
        ...         self.uploaded = state["uploaded"]
        >>> serried.main(MyTask, callbacks=[Upload])
    """

    @property
    def name(self) -> str:
        """Name in messages and checkpoints, unique among the callbacks of a run. The class name by default."""
        return type(self).__name__

    def on_start(self, run: Run) -> None:
        """Called before the first step of a new or resumed run."""

    def on_step(self, run: Run) -> None:
        """Called after each logged step (``trainer.log_every``)."""

    def on_evaluate(self, run: Run) -> None:
        """Called after each evaluation of a data set."""

    def on_save(self, run: Run) -> None:
        """Called when all files of a checkpoint are complete.

        Training continues while a checkpoint is written, so later steps may already be done.
        """

    def on_end(self, run: Run) -> None:
        """Called once after the last step or a requested stop, when the end of the run is recorded.

        Not called if the run fails.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of this callback as plain data (dicts, lists, strings, finite numbers).

        Saved in every checkpoint.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned for the checkpoint that the run resumes from.

        Called before ``on_start`` and after a rollback. Not called if the checkpoint has no state for this callback.
        """


class HasHooks(Protocol):
    """The hooks of a task."""

    def on_start(self, event: Event) -> None: ...
    def on_step(self, event: Event) -> None: ...
    def on_evaluate(self, event: Event) -> None: ...
    def on_save(self, event: Event) -> None: ...
    def on_end(self, event: Event) -> None: ...


class _TaskHooks(Callback):
    """Adapter that calls the hooks of a task as a callback."""

    def __init__(self, task: HasHooks) -> None:
        self._task = task

    @property
    def name(self) -> str:
        return type(self._task).__name__

    def on_start(self, run: Run) -> None:
        self._task.on_start(Event(run.step, path=run.folder))

    def on_step(self, run: Run) -> None:
        self._task.on_step(Event(run.step, run.metrics))

    def on_evaluate(self, run: Run) -> None:
        self._task.on_evaluate(Event(run.step, run.metrics, split=run.split))

    def on_save(self, run: Run) -> None:
        self._task.on_save(Event(run.step, path=run.checkpoint))

    def on_end(self, run: Run) -> None:
        self._task.on_end(Event(run.step, run.metrics, path=run.folder))


class Callbacks:
    """The callbacks of a run. Empty except on rank 0."""

    def __init__(self, config: RunConfig, folder: RunFolder | None, pulse: "Pulse", log: Callable[[str], None]) -> None:
        """``folder``: None except on rank 0. ``log``: writes a text to the log of this rank."""
        self.config = config
        self._folder, self._log = folder, log
        self._pulse = pulse
        self._failures: list[Exception] = []
        self._callbacks: list[Callback] = []

    def make(self, task: HasHooks, given: Sequence[Callback | type[Callback]]) -> None:
        """Create the callbacks of the run: the hooks of ``task``, and the callbacks in ``given``. Called on rank 0.

        Raises:
            UserError: One of them is not a callback, cannot be created, or has the same name as another.
        """
        self._callbacks = [_TaskHooks(task), *map(_made, given)]
        names = [callback.name for callback in self._callbacks[1:]]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UserError(
                f"two callbacks are named {repeated[0]}; set a different name attribute in one of their classes"
            )

    def call(
        self, hook: str, step: int, metrics: Mapping[str, float] | None = None, *, split: str = "",
        checkpoint: Path | str | None = None,
    ) -> bool:  # fmt: skip
        """Call ``hook`` of all callbacks. Returns whether all succeeded. Exceptions are kept for ``raise_failure``."""
        if self._folder is None:
            return True
        failures = len(self._failures)
        run = Run(step, self.config, self.config.run.dir, metrics or {}, split, checkpoint, self._folder)
        for callback in self._callbacks:
            with self._entered(callback, hook):
                getattr(callback, hook)(run)
        return len(self._failures) == failures

    def raise_failure(self) -> None:
        """Raise the first exception of a hook, if any. Further exceptions are written to the log.

        Raises:
            TrainingFailed: A hook raised an exception.
        """
        failures, self._failures = self._failures, []
        for failure in failures[1:]:
            self._log("".join(traceback.format_exception(failure)))
        if failures:
            try:
                raise failures[0]
            finally:
                del failures  # break the cycle: the traceback refers to this frame, which refers to the failure

    @property
    def has_failed(self) -> bool:
        """Whether ``raise_failure`` will raise."""
        return bool(self._failures)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all callbacks as an entry of a checkpoint's plain data."""
        states: dict[str, Any] = {}
        for callback in self._callbacks:
            with self._entered(callback, "state_dict"):
                if state := _plain(dict(callback.state_dict())):
                    states[callback.name] = state
        return {_STATE: states} if states else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore the callbacks from a checkpoint's plain data.

        Returns:
            Names of callbacks that have a state in the checkpoint but are not part of this run.

        Raises:
            TrainingFailed: ``load_state_dict`` of a callback raised an exception.
        """
        states = state.get(_STATE, {}) if self._folder is not None else {}
        for callback in self._callbacks:
            if callback.name in states:
                with self._entered(callback, "load_state_dict"):
                    callback.load_state_dict(states[callback.name])
        self.raise_failure()
        return sorted(states.keys() - {callback.name for callback in self._callbacks})

    @contextmanager
    def _entered(self, callback: Callback, hook: str) -> Iterator[None]:
        """Record the running hook in the heartbeat, and keep an exception for ``raise_failure``."""
        try:
            with self._pulse.during_callback(f"{callback.name}.{hook}"):
                yield
        except Exception as error:
            self._failures.append(_failure(callback, hook, error))


def _made(given: Any) -> Callback:
    """Return ``given`` if it is a callback, or an instance if it is a class."""
    is_class = isinstance(given, type)
    name = given.__name__ if is_class else type(given).__name__
    if not (issubclass(given, Callback) if is_class else isinstance(given, Callback)):
        raise UserError(f"{name} is not a callback; give a subclass of serried.Callback, or an instance of one")
    try:
        return given() if is_class else given
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"callback {name} cannot be created: {_in_a_line(error)}") from error


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy of ``state``. Training continues while checkpoints are written."""
    copy: dict[str, Any] = {}
    for key, value in state.items():
        try:
            copy |= json.loads(json.dumps({key: value}, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"{key!r} is not plain, finite data: {error}") from error
    return copy


def _failure(callback: Callback, hook: str, error: Exception) -> Exception:
    """Return the exception that ends the run because ``hook`` raised ``error``."""
    if isinstance(error, TrainingFailed | UserError):
        return error
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f" ({theirs[0].filename}, line {theirs[0].lineno})" if theirs else ""
    failure = TrainingFailed(f"callback {callback.name}.{hook}: {_in_a_line(error)}{where}")
    failure.__cause__ = error
    return failure


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _number(name: str, value: Any) -> float:
    if is_number(value) or isinstance(value, float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {type(value).__name__}; log only numbers and strings") from None
