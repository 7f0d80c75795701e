"""Conducts a search: Optuna suggests trials and remembers them, Hydra's own plugin is between, and each is handed to
whoever trains it.

Nothing is called because a config names it: the plugin's sweeper and Optuna's sampler are made here, the latter one
of those that ``search`` lets pass.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from serried.configs.errors import TrainingFailed, UserError
from serried.configs.origin import Origin
from serried.configs.points import Evaluate, Point

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

SWEEPER = "hydra/sweeper"
_ANY_TIME = ("launch", "slurm", "track", "profile")
"""Sections that may change between two starts of a search."""


@dataclass(frozen=True)
class Search:
    """Optuna's, as Hydra's plugin conducts it: trials are asked for one at a time, and told how they ended."""

    options: Any
    argv: Sequence[str]
    """What is searched."""
    fixed: tuple[str, ...]
    origin: Origin

    def __call__(self, evaluate: Evaluate) -> None:
        with optuna_is_quiet(), told_in_one_line():
            storage, study, options = self._study()
            sweeper = _sweeper(options, storage, study.study_name, self._left(study))
            sweeper.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(self.origin.sweep_folder)}}})
            sweeper.hydra_context, sweeper.job_idx = object(), 0
            sweeper.launcher = launcher = _Launcher(study, self._point, evaluate, self.options.max_failure_rate)
        for trial in _completed(study):
            if (self.origin.sweep_folder / trial_name(trial.number)).is_dir():
                evaluate(self._point(study, trial))  # finished: to be shown beside the others
        try:
            with optuna_is_quiet(), told_in_one_line():
                sweeper.sweep(list(self.argv))
        except UserError:
            if launcher.problem is not None:
                raise launcher.problem from None
            if _completed(study) or self._left(study):
                raise
            # All are done and have failed, so that Optuna has no best one to name.

    def _study(self) -> "tuple[Any, Study, Any]":
        """The storage, the study in it, with what an earlier start broke off asked for again, and the options."""
        import optuna

        folder, options = self.origin.sweep_folder, self.options.copy()
        folder.mkdir(parents=True, exist_ok=True)
        url = options.storage or f"sqlite:///{folder / 'study.db'}"
        # Optuna 2.10 leaves commits to SQLAlchemy, which does them by itself no longer since 2.0.
        storage = optuna.storages.RDBStorage(url, {"isolation_level": "AUTOCOMMIT"})
        study = optuna.create_study(
            storage=storage, study_name=options.study_name or folder.name, direction="minimize", load_if_exists=True
        )
        self._refuse_another_command(study)
        for trial in study.get_trials(deepcopy=False):
            # In a storage that others use too, one without a folder here may be theirs.
            is_own = options.storage is None or (folder / trial_name(trial.number)).is_dir()
            if trial.state.name == "RUNNING" and is_own:
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            elif trial.state.name != "FAIL" or _again(trial.number) in study.user_attrs:
                continue
            study.set_user_attr(_again(trial.number), True)
            study.enqueue_trial(trial.params)
        seed = options.sampler.get("seed")
        if seed is not None:  # or it would suggest what it has suggested before
            options.sampler.seed = seed + len(study.get_trials(deepcopy=False))
        return storage, study, options

    def _refuse_another_command(self, study: "Study") -> None:
        fixed = sorted(word for word in self.fixed if word.partition(".")[0].partition("=")[0] not in _ANY_TIME)
        earlier = study.user_attrs.get("fixed")
        if earlier is None:
            study.set_user_attr("fixed", fixed)
        elif earlier != fixed:
            then, now = sorted({*earlier} - {*fixed}), sorted({*fixed} - {*earlier})
            raise UserError(
                f"the trials in {self.origin.sweep_folder} were made with {' '.join(then) or 'less'}, and this command "
                f"has {' '.join(now) or 'not'}: their losses would not compare; use run.name=OTHER for another search"
            )

    def _left(self, study: "Study") -> int:
        """How many trials are to be made yet; one that is asked for again does not count."""
        ended = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
        again = [trial for trial in ended if _again(trial.number) in study.user_attrs]
        return int(max(0, self.options.n_trials - len(ended) + len(again)))

    def _point(self, study: "Study", trial: "FrozenTrial") -> Point:
        # The same values are the same run: it goes on, or is finished already.
        number = next(other.number for other in study.get_trials(deepcopy=False) if other.params == trial.params)
        values = {key: typed(value) for key, value in trial.params.items()}
        return self.origin.point(trial_name(number), values, self.fixed)


def _sweeper(options: Any, storage: Any, study_name: str, trials: int) -> Any:
    """What Hydra's plugin would have made of ``options``."""
    import optuna
    from hydra_plugins.hydra_optuna_sweeper._impl import OptunaSweeperImpl  # see search._space

    given = OmegaConf.to_container(options.sampler, resolve=True)
    kind = getattr(optuna.samplers, given["_target_"].rpartition(".")[2])
    keys = {name: value for name, value in given.items() if not name.startswith("_")}
    # The plugin gives the grid its values.
    sampler = functools.partial(kind, **keys) if kind is optuna.samplers.GridSampler else kind(**keys)
    return OptunaSweeperImpl(
        sampler=sampler, direction=options.direction, storage=storage, study_name=study_name, n_trials=trials,
        n_jobs=options.n_jobs, max_failure_rate=options.max_failure_rate, search_space=options.search_space,
        custom_search_space=None, params=options.params,
    )  # fmt: skip


def trial_name(number: int | str) -> str:
    """The folder of a trial."""
    return f"trial-{number}"


def _again(number: int) -> str:
    """Attribute of a study: this trial has been asked for again."""
    return f"again-{number}"


def _completed(study: "Study") -> list[Any]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.value is not None]


class _Launcher:
    """What Hydra's sweeper takes for a launcher."""

    def __init__(
        self, study: "Study", point: "Callable[[Study, FrozenTrial], Point]", evaluate: Evaluate, failure_rate: float
    ) -> None:
        self.problem: BaseException | None = None
        """What ended the sweep from our side."""
        self._study, self._point, self._evaluate, self._failure_rate = study, point, evaluate, failure_rate

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:  # noqa: ARG002
        """Train the trial that was asked for, one at a time. Hydra chose the names."""
        try:
            running = [each for each in self._study.get_trials(deepcopy=False) if each.state.name == "RUNNING"]
            trial = next(
                each for each in reversed(running)
                if {f"{key}={value}" for key, value in each.params.items()} <= set(job_overrides[0])
            )  # fmt: skip
            loss = self._evaluate(self._point(self._study, trial))
            if loss is None and self._failure_rate < 1:
                raise TrainingFailed(f"trial {trial.number} failed, and max_failure_rate={self._failure_rate:g}")
        except BaseException as error:
            self.problem = error
            raise
        # None is no number: the plugin tells Optuna that the trial failed, and goes on.
        return [JobReturn(overrides=job_overrides[0], status=JobStatus.COMPLETED, _return_value=loss)]


@contextmanager
def optuna_is_quiet() -> Iterator[None]:
    """What matters is told by us; warnings are about interfaces that the plugin uses."""
    for name in ("optuna", "hydra_plugins.hydra_optuna_sweeper._impl", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Make one line of what Optuna, its storage or Hydra's plugin object to.

    Raises:
        UserError: they do.
    """
    try:
        yield
    except (UserError, TrainingFailed):
        raise
    except Exception as error:
        cause = error.__cause__ or error  # Hydra's own words are about its instantiation
        raise UserError(f"{SWEEPER}=optuna: {type(cause).__name__}: {first_line(cause)}") from error


def first_line(error: BaseException) -> str:
    """What ``error`` says first; its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def typed(value: Any) -> str:
    """A value of a trial as one would type it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
