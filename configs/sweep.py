"""``-m``: from a command line with several values for its keys to the runs of a sweep.

A grid is every combination. ``hydra/sweeper=optuna`` is a search, which Hydra's own plugin conducts: here it only gets
another launcher, which hands each trial to whoever trains it.
"""

import importlib.util
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from configs.compose import FOLDER, compose
from configs.errors import TrainingFailed, UserError
from configs.keys import all_keys
from configs.points import Evaluate, Point, Sweep, labels
from configs.suggest import nearest_keys, pasteable

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

_SWEEPER, _SAMPLER = "hydra/sweeper", "hydra/sweeper/sampler"
_OPTION = "hydra.sweeper."
_EXAMPLE = "'optim.lr=tag(log, interval(1e-5, 1e-2))'"
_MOST_RUNS = 1000
_ANY_TIME = ("launch", "slurm", "track", "profile")
"""Sections that may change between two starts of a search."""


def read_sweep(argv: Sequence[str], folder: Path = FOLDER) -> Sweep:
    """The sweep that ``argv``, overrides of which some have several values, asks for.

    Every run of a grid is composed and checked, of a search the corners of its space.

    Raises:
        UserError: no key has several values, or a combination is mistaken.
    """
    ours = [word.lstrip("+") for word in argv if not _is_of_the_sweeper(word)]
    words = [word.lstrip("+") for word in argv if _is_of_the_sweeper(word)]
    chosen = [word.partition("=")[2] for word in words if word.partition("=")[0] == _SWEEPER]
    if chosen[-1:] == ["optuna"]:
        return _search(ours, words, folder)
    if chosen and chosen[-1] != "basic":
        raise UserError(f"no {_SWEEPER} {chosen[-1]!r}; there are basic, the grid, and optuna")
    if options := [word for word in words if not word.startswith(f"{_SWEEPER}=")]:
        raise UserError(f"{options[0]} is read by {_SWEEPER}=optuna alone; add that, or leave it out")
    return _grid(ours, folder)


_ONE_VALUE = {
    "run.name": "each run gets a name of its own",
    "run.dir": "each run gets a folder of its own in it",
    "launch": "all runs are started alike",
    "dry_run": "it prints the plan of the first run",
    "slurm.dry_run": "it prints the script of all runs",
}


def _refuse_to_sweep(key: str, value: str) -> None:
    if key in _ONE_VALUE:
        raise UserError(f"{key}={value} cannot be swept: {_ONE_VALUE[key]}; give one value")


def _is_of_the_sweeper(word: str) -> bool:
    key = word.partition("=")[0].lstrip("+")
    return key in (_SWEEPER, _SAMPLER) or key.startswith(_OPTION)


# A grid


def _grid(argv: Sequence[str], folder: Path) -> Sweep:
    combinations: list[dict[str, str]] = [{}]
    fixed: list[str] = []
    for word in argv:
        key, values = _values(word)
        if len(values) < 2:
            fixed.append(word if not values else f"{key}={values[0]}")
            continue
        _refuse_to_sweep(key, word.partition("=")[2])
        combinations = [{**rest, key: value} for rest in combinations for value in values]
        if len(combinations) > _MOST_RUNS:
            raise UserError(f"a grid of more than {_MOST_RUNS} runs ({word}); give fewer values, or {_SWEEPER}=optuna")
    keys = tuple(combinations[0])
    if not keys:
        raise UserError("-m sweeps over several values, and no key has them; e.g. -m optim.lr=1e-3,3e-3")
    label = labels(keys)
    origin = _Origin.of([*fixed, *_words(combinations[0])], folder, f"sweep-{_in_a_name('-'.join(label.values()))}")
    points: list[Point] = []
    for chosen in combinations:
        name = "-".join(f"{label[key]}-{_in_a_name(value)}" for key, value in chosen.items())
        points.append(origin.point(name, chosen, fixed))
        if points[-1].config.run.dir in [other.config.run.dir for other in points[:-1]]:
            raise UserError(f"two runs of the sweep would share {points[-1].config.run.dir}; give every value once")
    return Sweep(origin.sweep_folder, keys, tuple(points), len(points))


def _values(word: str) -> tuple[str, list[str]]:
    """The key of an override and its values: several where they are separated by commas, or made by ``range(...)``.

    Neither where it is no sweep, or no override that Hydra can read: that is told when it is composed.

    Raises:
        UserError: it has endless values.
    """
    parsed = _parsed(word)
    if parsed is None or not parsed.is_sweep_override():
        return "", []
    if parsed.is_interval_sweep():
        raise UserError(f"{word}: an interval has no end of values; give some, or search it: {_SWEEPER}=optuna")
    try:
        return parsed.key_or_group, list(parsed.sweep_string_iterator())
    except HydraException:
        raise UserError(
            f"{word}: nothing here can list these values; write them out, with commas between them"
        ) from None


def _parsed(word: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def _in_a_name(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+", "_", value).strip("_") or "_"


def _words(values: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


@dataclass(frozen=True)
class _Origin:
    """What the runs of a sweep have in common."""

    run_name: str
    home: Path | None
    """Folder of the runs' folders, where the user or the search says it; else each is in ``runs``, by its name."""
    sweep_folder: Path
    configs: Path

    @staticmethod
    def of(argv: Sequence[str], configs: Path, name: str) -> "_Origin":
        """Of the sweep to which the run ``argv`` would belong; ``name`` tells sweeps of that run apart.

        Raises:
            UserError: the run is mistaken.
        """
        run = compose(argv, configs).run
        if any(word.startswith("run.dir=") for word in argv):
            return _Origin(run.name, run.dir, run.dir / name, configs)
        return _Origin(run.name, None, run.dir.with_name(f"{run.dir.name}-{name}"), configs)

    def point(self, name: str, values: Mapping[str, str], fixed: Sequence[str]) -> Point:
        """The run with ``values`` for the swept keys.

        Raises:
            UserError: it is mistaken.
        """
        typed = {word.partition("=")[0]: word for word in [*fixed, *_words(values)]}
        if len(typed) < len(fixed) + len(values):
            compose([*fixed, *_words(values)], self.configs)  # a key that is given twice is refused there
        # Where the recipe is swept, the runs' names begin with their own recipes'.
        own_name = compose(list(typed.values()), self.configs).run.name if "recipe" in values else self.run_name
        added = {"run.name": f"{own_name}-{name}"}
        if self.home is not None:
            added["run.dir"] = str(self.home / name)
        if "track.group" in all_keys() and "track.group" not in typed:
            added["track.group"] = self.sweep_folder.name
        for key, value in added.items():
            typed[key] = f"{key}={QuotedString(text=value, quote=Quote.double).with_quotes()}"
        argv = tuple(typed.values())
        return Point(name, values, argv, compose(argv, self.configs))


# A search


def _search(argv: Sequence[str], words: Sequence[str], folder: Path) -> Sweep:
    try:
        if importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
            raise ModuleNotFoundError
    except ModuleNotFoundError:
        raise UserError(f"{_SWEEPER}=optuna needs Optuna, which is not installed: pip install -e '.[sweep]'") from None
    options = _options(words, folder)
    with _optuna_is_quiet(), _told_in_one_line():
        space, fixed = _space(argv, options)
    if not space:
        raise UserError(f"{_SWEEPER}=optuna searches values, and no key has several; e.g. {_EXAMPLE}")
    for key, distribution in space.items():
        _refuse_to_sweep(key, str(distribution))
    keys = tuple(space)
    name = f"search-{_in_a_name(str(options.study_name or '-'.join(labels(keys).values())))}"
    corners = _corners(space)
    origin = _Origin.of([*fixed, *_words(corners[0])], folder, name)
    origin = _Origin(origin.run_name, origin.sweep_folder, origin.sweep_folder, folder)
    points = tuple(origin.point(f"corner-{number}", values, fixed) for number, values in enumerate(corners))
    trainer = points[0].config.trainer
    if not trainer.eval_every:
        raise UserError(
            f"{_SWEEPER}=optuna goes by the validation loss, and trainer.eval_every=0 evaluates nothing; "
            f"use trainer.eval_every={max(1, trainer.steps // 4)}"
        )
    search = _Search(options, argv=[word for word in argv if word not in fixed], fixed=tuple(fixed), origin=origin)
    return Sweep(origin.sweep_folder, keys, points, options.n_trials, search)


def _options(words: Sequence[str], folder: Path) -> Any:
    """``hydra.sweeper``, as Hydra composes it from ``words``.

    Raises:
        UserError: a key or a value is wrong, or asks for what runs of ours cannot give.
    """
    groups = [word for word in words if "/" in word.partition("=")[0]]
    given = {word.partition("=")[0].removeprefix(_OPTION): word for word in words if word not in groups}
    known = _composed(groups, folder)
    names = [f"{_OPTION}{name}" for name in _dotted(known) if not name.endswith("_")]
    for name, word in given.items():
        if name.startswith(("params", "search_space")):
            raise UserError(f"{word}: that is for YAML files; here type the keys themselves, e.g. {_EXAMPLE}")
        if f"{_OPTION}{name}" not in names:
            near = [pasteable(key, word.partition("=")[2]) for key in nearest_keys(f"{_OPTION}{name}", names)]
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
            raise UserError(f"unknown key {word}; {hint}")
    options = _composed([*groups, *(f"++{word}" for word in given.values())], folder)
    direction = getattr(options.direction, "name", options.direction)
    if direction != "minimize":
        raise UserError(
            f"hydra.sweeper.direction={direction}: a run has one result, its best validation loss, and that is to be "
            "small; use hydra.sweeper.direction=minimize"
        )
    if options.n_trials < 1:
        raise UserError(
            f"hydra.sweeper.n_trials={options.n_trials} leaves nothing to do; use hydra.sweeper.n_trials=20"
        )
    if "n_jobs" in given and options.n_jobs != 1:
        raise UserError(
            f"hydra.sweeper.n_jobs={options.n_jobs}: the runs of a sweep go one after the other, so that each has the "
            "whole machine and Optuna knows of all before it; leave it out"
        )
    if not 0 <= options.max_failure_rate <= 1:
        raise UserError(
            f"hydra.sweeper.max_failure_rate={options.max_failure_rate:g} is no share between 0 and 1; leave it out to "
            "go on after runs that fail, or use hydra.sweeper.max_failure_rate=0 to stop at the first"
        )
    with open_dict(options):
        options.n_jobs = 1
        if "max_failure_rate" not in given:
            options.max_failure_rate = 1.0
    return options


def _composed(words: Sequence[str], folder: Path) -> DictConfig:
    try:
        with initialize_config_dir(str(folder), version_base=None):
            return hydra_compose("train", list(words), return_hydra_config=True).hydra.sweeper
    except MissingConfigException as error:
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        raise UserError(f"no {group} {choice!r}; there are {', '.join(error.options or [])}") from None
    except (HydraException, OmegaConfBaseException) as error:
        what = _first_line(error).removeprefix("Error merging override ++")
        raise UserError(f"{what}: {_first_line(error.__cause__)}" if error.__cause__ else what) from None


def _dotted(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in node:
        yield f"{prefix}{name}"
        if OmegaConf.is_dict(node) and not OmegaConf.is_missing(node, name) and isinstance(node[name], DictConfig):
            yield from _dotted(node[name], f"{prefix}{name}.")


def _space(argv: Sequence[str], options: Any) -> tuple[dict[str, Any], list[str]]:
    """The distribution of each key that is searched, and the words of ``argv`` that are none."""
    from hydra_plugins.hydra_optuna_sweeper import _impl

    parsed = {word: _parsed(word) for word in argv}
    swept = [word for word, override in parsed.items() if override is not None and override.is_sweep_override()]
    fixed = [word for word in argv if word not in swept]
    fixed_keys = [word.partition("=")[0] for word in fixed]
    with open_dict(options):
        for in_yaml in (options.params, options.search_space):
            for key in [key for key in in_yaml or {} if key in fixed_keys]:  # the command line is the stronger
                del in_yaml[key]
    space = {
        str(key): _impl.create_optuna_distribution_from_config(each)
        for key, each in (options.search_space or {}).items()
    }
    params = [f"{key}={value}" for key, value in (options.params or {}).items()]
    found, constants = _impl.create_params_from_overrides([*params, *swept])
    return {**space, **found}, [*fixed, *_words(constants)]


def _corners(space: Mapping[str, Any]) -> list[dict[str, str]]:
    """Points that between them have the ends of every range and every choice."""
    ends = {
        key: [_typed(each) for each in getattr(one, "choices", None) or (one.low, one.high)]
        for key, one in space.items()
    }
    first = {key: values[0] for key, values in ends.items()}
    return [first, *({**first, key: value} for key, values in ends.items() for value in values[1:])]


def _typed(value: Any) -> str:
    """A value of a trial as one would type it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


@dataclass(frozen=True)
class _Search:
    """Optuna's, as Hydra's plugin conducts it: trials are asked for one at a time, and told how they ended."""

    options: Any
    argv: Sequence[str]
    """What is searched."""
    fixed: tuple[str, ...]
    origin: _Origin

    def __call__(self, evaluate: Evaluate) -> None:
        with _optuna_is_quiet(), _told_in_one_line():
            storage, study, options = self._study()
            sweeper = instantiate(options).sweeper
            sweeper.storage, sweeper.study_name, sweeper.n_trials = storage, study.study_name, self._left(study)
            sweeper.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(self.origin.sweep_folder)}}})
            sweeper.hydra_context, sweeper.job_idx = object(), 0
            sweeper.launcher = launcher = _Launcher(study, self._point, evaluate, self.options.max_failure_rate)
        for trial in _completed(study):
            if (self.origin.sweep_folder / _name(trial.number)).is_dir():
                evaluate(self._point(study, trial))  # finished: to be shown beside the others
        try:
            with _optuna_is_quiet(), _told_in_one_line():
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
        storage = url if url.startswith("redis") else optuna.storages.RDBStorage(url, {"isolation_level": "AUTOCOMMIT"})
        study = optuna.create_study(
            storage=storage, study_name=options.study_name or folder.name, direction="minimize", load_if_exists=True
        )
        self._refuse_another_command(study)
        for trial in study.get_trials(deepcopy=False):
            if trial.state.name == "RUNNING" and (folder / _name(trial.number)).is_dir():
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
        values = {key: _typed(value) for key, value in trial.params.items()}
        return self.origin.point(_name(number), values, self.fixed)


def _name(number: int) -> str:
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
def _optuna_is_quiet() -> Iterator[None]:
    """What matters is told by us; warnings are about interfaces that the plugin uses."""
    for name in ("optuna", "hydra_plugins.hydra_optuna_sweeper._impl", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _told_in_one_line() -> Iterator[None]:
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
        raise UserError(f"{_SWEEPER}=optuna: {type(cause).__name__}: {_first_line(cause)}") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
