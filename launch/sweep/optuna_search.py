"""``search.trials``: Optuna chooses each run of a sweep from the results of the runs before it.

The study is not stored. ``sweep.json`` and the run folders have every trial's values and result, and each start
replays them to Optuna. The sampler is seeded for each trial, so an interrupted search suggests the same values
as an uninterrupted one.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from hydra.core.override_parser.types import IntervalSweep, RangeSweep
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.messages.keys import all_keys
from serried.configs.schema.fields import parse_count
from serried.configs.schema.sections import COMPARES_NOTHING
from serried.launch.sweep.arguments import SEARCH_EXAMPLE, PointBuilder, Words, in_a_name, values_of
from serried.launch.sweep.points import Evaluate, Point, Sweep, labels
from serried.launch.sweep.sweep_table import read_summary
from serried.runtime.process import say

_SAMPLERS = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
_OPTIONS = {"trials": "20", "sampler": "tpe", "seed": "0"}
_TRIAL = "trial-"
_ATTEMPTS = 20
"""Number of suggestions for a trial before giving up, if they were tried before or do not fit the other settings."""


@dataclass(frozen=True)
class Search:
    """Runs trials one after the other until there are ``trials`` of them."""

    space: Mapping[str, BaseDistribution]
    trials: int
    sampler: str
    seed: int
    earlier: Mapping[str, Mapping[str, Any]]
    """Parameters of an earlier start's trials, by name, in the order they were chosen."""
    builder: PointBuilder

    def __call__(self, evaluate: Evaluate) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study()
        for name, parameters in self.earlier.items():
            loss = evaluate(self._point(name, parameters))
            study.add_trial(
                optuna.create_trial(
                    params=dict(parameters), distributions=dict(self.space), value=loss,
                    state=TrialState.FAIL if loss is None else TrialState.COMPLETE,
                )
            )  # fmt: skip
        tried = [*self.earlier.values()]
        while len(tried) < self.trials:
            suggestion = self._suggest(study, tried)
            if suggestion is None:
                say(f"search     ended after {len(tried)} of {self.trials} trials: all combinations were tried")
                return
            trial, point = suggestion
            tried.append(trial.params)
            loss = evaluate(point)
            study.tell(trial, loss, TrialState.FAIL if loss is None else None)

    def _suggest(self, study: optuna.Study, tried: list[Mapping[str, Any]]) -> tuple[optuna.Trial, Point] | None:
        """Return a trial with new values; None if all values of the space have been tried. Raises ``UserError`` if
        no suggested values fit the other settings."""
        problem: UserError | None = None
        for attempt in range(_ATTEMPTS):
            seed = random.Random(f"{self.seed}, trial {len(tried)}, attempt {attempt}").getrandbits(32)
            study.sampler = _SAMPLERS[self.sampler](seed=seed)
            trial = study.ask(dict(self.space))
            if trial.params not in tried:
                try:
                    return trial, self._point(f"{_TRIAL}{len(tried)}", trial.params)
                except UserError as error:  # for example a number of heads that does not divide the model's width
                    problem = error
            study.tell(trial, state=TrialState.FAIL)
        if problem is not None:
            raise problem
        return None

    def _point(self, name: str, parameters: Mapping[str, Any]) -> Point:
        return self.builder.point(name, {key: str(value) for key, value in parameters.items()})


def read_search(words: Words) -> Sweep:
    """Return the search over the swept keys of ``words``. Raises ``UserError`` if an option, a range or a corner of
    the space has a mistake, nothing is swept, or the folder holds trials of another space."""
    options = _read_options(words)
    space: dict[str, BaseDistribution] = {}
    for key in words.swept:
        try:
            space[key] = _distribution(words, key)
        except UserError as error:
            words.mistakes += error.args
    if words.mistakes or not space:
        compose(words.fixed, found=words.mistakes)  # raises with all mistakes
        raise UserError(f"search.trials needs a key with several values or a range; e.g. {SEARCH_EXAMPLE}")
    corners = _corners(space)
    name = f"search-{in_a_name('-'.join(labels(list(space)).values()))}"
    builder = PointBuilder.of(words.fixed, corners[0], name, inside=True)
    points = tuple(builder.point(f"{_TRIAL}N", values) for values in corners)
    trainer = points[0].config.trainer
    if not trainer.evaluates_every:
        raise UserError(
            "a search compares validation results, and trainer.eval_every=0 turns evaluation off; "
            f"use trainer.eval_every={max(1, trainer.steps // 4)}"
        )
    if any(point.config.lacks_validation for point in points):
        raise UserError(f"search.trials={options['trials']} {COMPARES_NOTHING}")
    earlier = _earlier(builder, space)
    search = Search(space, int(options["trials"]), options["sampler"], int(options["seed"]), earlier, builder)
    return Sweep(builder.sweep_folder, tuple(space), points, max(search.trials, len(earlier)), search)


def _read_options(words: Words) -> dict[str, str]:
    options = dict(words.options)
    for name in sorted({*options} - {*_OPTIONS}):
        known = ", ".join(f"search.{each}={value}" for each, value in _OPTIONS.items())
        words.mistakes.append(f"unknown key search.{name}={options.pop(name)}; the keys of a search are {known}")
    if "trials" not in options:
        words.mistakes.append(f"search.{' search.'.join(options)} needs the number of trials: search.trials=20")
    options = _OPTIONS | options
    for name, lowest in (("trials", 1), ("seed", 0)):
        count = parse_count(options[name])
        if not isinstance(count, int) or count < lowest:
            example = f"e.g. search.{name}={_OPTIONS[name]}"
            words.mistakes.append(
                f"search.{name}={options[name]} is not a whole number of at least {lowest}; {example}"
            )
        options[name] = str(count)
    if options["sampler"] not in _SAMPLERS:
        words.mistakes.append(f"search.sampler={options['sampler']} is not one of {', '.join(_SAMPLERS)}")
    return options


def _distribution(words: Words, key: str) -> BaseDistribution:
    override = words.swept[key]
    value = override.value()
    try:
        if isinstance(value, IntervalSweep):
            is_integer = isinstance(value.start, int) or (key in all_keys() and all_keys()[key].kind == "integer")
            kind = IntDistribution if is_integer else FloatDistribution
            low, high = (int(end) if is_integer else end for end in (value.start, value.end))
            return kind(low, high, log="log" in value.tags)
        if isinstance(value, RangeSweep) and isinstance(numbers := value.range(), range) and numbers:
            low, high = sorted((numbers[0], numbers[-1]))
            return IntDistribution(low, high, log="log" in value.tags, step=abs(numbers.step))
        return CategoricalDistribution(values_of(override))
    except ValueError as error:  # such as a logarithm of 0
        reason = str(error).rstrip(".")
        raise UserError(f"{override.input_line} cannot be searched: {reason}; e.g. {SEARCH_EXAMPLE}") from None


def _corners(space: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return points that together contain both ends of every range and every choice."""
    ends = {
        key: [str(value) for value in getattr(one, "choices", None) or (one.low, one.high)]
        for key, one in space.items()
    }
    first = {key: values[0] for key, values in ends.items()}
    return [first, *({**first, key: value} for key, values in ends.items() for value in values[1:])]


def _earlier(builder: PointBuilder, space: Mapping[str, BaseDistribution]) -> dict[str, dict[str, Any]]:
    """Return the parameters of the trials in the sweep's folder, by name. Raises ``UserError`` if they were chosen
    from a space that is not within ``space``."""
    _, outcomes = read_summary(builder.sweep_folder)
    trials = {outcome.run_dir.name: outcome.values for outcome in outcomes}
    earlier = {}
    for name in sorted(trials, key=lambda name: int(name.removeprefix(_TRIAL))):
        try:
            parameters = {key: _parameter(one, trials[name][key]) for key, one in space.items()}
            optuna.create_trial(params=parameters, distributions=dict(space), value=0.0)  # checks the values
        except (KeyError, ValueError):
            typed = " ".join(f"{key}={value}" for key, value in trials[name].items())
            raise UserError(
                f"{builder.sweep_folder} has earlier trials outside this search space, such as {typed}; widen the "
                f"space to include them, or start another search with {builder.config.another_run}"
            ) from None
        earlier[name] = parameters
    return earlier


def _parameter(distribution: BaseDistribution, typed: str) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return typed
    return int(typed) if isinstance(distribution, IntDistribution) else float(typed)
