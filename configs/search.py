"""``hydra/sweeper=optuna``: what a search is to try, read from words typed and a YAML file. ``study`` conducts it."""

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.types import IntervalSweep, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from serried.configs.compose import compose
from serried.configs.errors import UserError, noted
from serried.configs.origin import (
    Origin,
    example,
    in_a_name,
    is_known,
    parse_word,
    refuse_to_sweep,
    refuse_unreadable,
    words_of,
)
from serried.configs.points import Sweep, labels
from serried.configs.schema import parse_count
from serried.configs.study import SWEEPER, Search, first_line, optuna_is_quiet, told_in_one_line, trial_name, typed
from serried.configs.suggest import nearest_keys, pasteable

SAMPLER = "hydra/sweeper/sampler"
OPTION = "hydra.sweeper."
_EXAMPLE = "'optim.lr=tag(log, interval(1e-5, 1e-2))'"
_RANGE = re.compile(r"(interval|range)\(([^()]*)\)")
_ARGUMENTS = {"interval": ("start", "end"), "range": ("start", "stop", "step")}
_SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "grid": "GridSampler", "nsgaii": "NSGAIISampler"}
"""Those that keep no pickle in the study, as ``cmaes`` does, and that are for one result, as ``motpe`` is not."""
_STORAGES = ("sqlite", "postgresql", "mysql")
"""Databases of tables; in Redis Optuna keeps pickles."""
_CALLED = ("custom_search_space", "sampler.constraints_func")
"""Options that name a function."""


def read_search(argv: Sequence[str], words: Sequence[str], folder: Path, mistakes: list[str]) -> Sweep:
    """The search of the overrides ``argv``, with the overrides ``words`` of ``hydra.sweeper`` itself.

    ``mistakes``: what is wrong with them already, to be told with what is found here.

    Raises:
        UserError: Optuna is not installed, nothing is searched, or a word or an end of the space is mistaken.
    """
    try:
        if importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
            raise ModuleNotFoundError
    except ModuleNotFoundError:
        raise UserError(f"{SWEEPER}=optuna needs Optuna, which is not installed: pip install -e '.[sweep]'") from None
    options: Any = OmegaConf.create({"params": None, "search_space": None})
    with noted(mistakes):
        options = _options(words, folder)
    fixed: list[str] = []
    swept: list[str] = []
    for word in argv:
        override, (key, _, value) = parse_word(word), word.partition("=")
        if not is_known(word, folder) or override is None or not override.is_sweep_override():
            with noted(mistakes):
                if is_known(word, folder):
                    refuse_unreadable(word, example(key, folder, is_searched=True))
                fixed.append(word)
            continue
        with noted(mistakes):
            refuse_to_sweep(key, value)
            swept.append(word)
    as_typed = fixed
    with noted(mistakes), optuna_is_quiet(), told_in_one_line():
        space, fixed = _space(swept, fixed, options, folder)
    if mistakes or not all(is_known(word, folder) for word in as_typed):
        compose(as_typed, folder, mistakes)  # refuses them, with what is wrong with the rest
    if not space:
        raise UserError(f"{SWEEPER}=optuna searches values, and no key has several; e.g. {_EXAMPLE}")
    for key, distribution in space.items():
        refuse_to_sweep(key, str(distribution))
    keys = tuple(space)
    folder_name = f"search-{in_a_name(str(options.study_name or '-'.join(labels(keys).values())))}"
    corners = _corners(space)
    origin = Origin.of([*fixed, *words_of(corners[0])], folder, folder_name)
    origin = Origin(origin.run_name, origin.sweep_folder, origin.sweep_folder, folder)
    points = tuple(origin.point(trial_name("N"), values, fixed) for values in corners)
    trainer = points[0].config.trainer
    if not trainer.eval_every:
        raise UserError(
            f"{SWEEPER}=optuna goes by the validation loss, and trainer.eval_every=0 evaluates nothing; "
            f"use trainer.eval_every={max(1, trainer.steps // 4)}"
        )
    search = Search(options, argv=[word for word in argv if word not in fixed], fixed=tuple(fixed), origin=origin)
    return Sweep(origin.sweep_folder, keys, points, options.n_trials, search)


def _options(words: Sequence[str], folder: Path) -> Any:
    """``hydra.sweeper``, as Hydra composes it from ``words``.

    Raises:
        UserError: a key or a value is wrong, or asks for what runs of ours cannot give.
    """
    groups = [word for word in words if "/" in word.partition("=")[0]]
    given = {word.partition("=")[0].removeprefix(OPTION): word for word in words if word not in groups}
    known = _composed(groups, folder)
    _refuse_what_is_called(known)
    names = [f"{OPTION}{name}" for name in _dotted(known) if not name.endswith("_")]
    mistakes: list[str] = []
    for name, word in [*given.items()]:
        if name.startswith(("params", "search_space")):
            mistakes.append(f"{word}: that is for YAML files; here type the keys themselves, e.g. {_EXAMPLE}")
        elif name == "sampler":
            mistakes.append(f"{word}: write {SAMPLER}={'|'.join(_SAMPLERS)}, and its keys as {OPTION}sampler.seed=1")
        elif f"{OPTION}{name}" not in names:
            near = [pasteable(key, word.partition("=")[2]) for key in nearest_keys(f"{OPTION}{name}", names)]
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
            mistakes.append(f"unknown key {word}; {hint}")
        else:
            continue
        del given[name]
    try:
        options = _composed([*groups, *(f"++{word}" for word in given.values())], folder)
    except UserError as together:
        for name, word in given.items():
            try:
                _composed([*groups, f"++{word}"], folder)
            except UserError as error:
                mistakes.append(_unfit(word, OmegaConf.select(known, name), str(error)))
        raise UserError(*(mistakes or [str(together)])) from None
    if mistakes:
        raise UserError(*mistakes)
    _refuse_what_is_called(options)
    _refuse_pickles(options)
    direction = getattr(options.direction, "name", options.direction)
    if direction != "minimize":
        mistakes.append(
            f"hydra.sweeper.direction={direction}: a run has one result, its best validation loss, and that is to be "
            "small; use hydra.sweeper.direction=minimize"
        )
    if options.n_trials < 1:
        mistakes.append(
            f"hydra.sweeper.n_trials={options.n_trials} leaves nothing to do; use hydra.sweeper.n_trials=20"
        )
    if "n_jobs" in given and options.n_jobs != 1:
        mistakes.append(
            f"hydra.sweeper.n_jobs={options.n_jobs}: the runs of a sweep go one after the other, so that each has the "
            "whole machine and Optuna knows of all before it; leave it out"
        )
    if not 0 <= options.max_failure_rate <= 1:
        mistakes.append(
            f"hydra.sweeper.max_failure_rate={options.max_failure_rate:g} is no share between 0 and 1; leave it out to "
            "go on after runs that fail, or use hydra.sweeper.max_failure_rate=0 to stop at the first"
        )
    if mistakes:
        raise UserError(*mistakes)
    with open_dict(options):
        options.n_jobs = 1
        if "max_failure_rate" not in given:
            options.max_failure_rate = 1.0
    return options


def _unfit(word: str, default: Any, reason: str) -> str:
    """The sentence for a value that ``hydra.sweeper`` refuses for ``reason`` where ``default`` stands otherwise."""
    key, _, value = word.partition("=")
    if isinstance(default, bool):
        return f"{word} is not true or false; e.g. {key}={str(default).lower()}"
    if isinstance(default, int) or "to Integer" in reason:
        count, usual = parse_count(value), 1 if default is None or key == f"{OPTION}n_jobs" else default
        digits, count = (" in digits", count) if isinstance(count, int) else ("", usual)
        return f"{word} is not a whole number{digits}; e.g. {key}={count}"
    if isinstance(default, float) or "to Float" in reason:
        return f"{word} is not a number; e.g. {key}={0.1 if default is None else default}"
    override = parse_word(word)
    if override is None:
        quoted = QuotedString(text=value, quote=Quote.double).with_quotes()
        return f"{word} cannot be read; if that is meant, quote it: {pasteable(key, quoted)}"
    if override.is_sweep_override():
        return f"{word} holds several values; give one"
    return f"{word} does not fit: {reason}"


def _refuse_what_is_called(options: Any) -> None:
    """Have no config, of whatever file or command line, say what is called.

    Raises:
        UserError: one does, or the sampler is none of those allowed.
    """
    for name in _CALLED:
        if (value := OmegaConf.select(options, name)) is not None:
            raise UserError(
                f"{OPTION}{name}={value} names a function, and none is called because a config names it; leave it out"
            )
    sampler = OmegaConf.to_container(options.sampler, resolve=True)
    kind = sampler.get("_target_") if isinstance(sampler, dict) else sampler
    if kind == "optuna.samplers.CmaEsSampler":
        raise UserError(f"{SAMPLER}=cmaes keeps pickles in the study, which can run code; use {SAMPLER}=tpe")
    if kind not in [f"optuna.samplers.{name}" for name in _SAMPLERS.values()]:
        raise UserError(f"no sampler {kind}; use {SAMPLER}={'|'.join(_SAMPLERS)}")
    for name, value in sampler.items():
        if isinstance(value, dict | list):
            raise UserError(f"{OPTION}sampler.{name}={value} is no single value; leave it out")


def _refuse_pickles(options: Any) -> None:
    storage = options.storage
    if storage is None:
        return
    kind, is_url, _ = storage.partition("://") if isinstance(storage, str) else ("", "", "")
    if kind.partition("+")[0] in _STORAGES and is_url:
        return
    what = f"{kind}://..." if is_url else "..."  # the rest of it may hold a password
    why = "Optuna keeps pickles there, which can run code" if kind.startswith("redis") else "no database for a study"
    raise UserError(f"{OPTION}storage={what}: {why}; use {OPTION}storage=sqlite:///FILE, postgresql:// or mysql://")


def _composed(words: Sequence[str], folder: Path) -> DictConfig:
    try:
        with initialize_config_dir(str(folder), version_base=None):
            sweeper = hydra_compose("train", list(words), return_hydra_config=True).hydra.sweeper
        OmegaConf.resolve(sweeper)
        return sweeper
    except MissingConfigException as error:
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        raise UserError(f"no {group} {choice!r}; there are {', '.join(_SAMPLERS)}") from None
    except (HydraException, OmegaConfBaseException) as error:
        what = first_line(error).removeprefix("Error merging override ++")
        raise UserError(f"{what}: {first_line(error.__cause__)}" if error.__cause__ else what) from None


def _dotted(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in node:
        yield f"{prefix}{name}"
        if OmegaConf.is_dict(node) and not OmegaConf.is_missing(node, name) and isinstance(node[name], DictConfig):
            yield from _dotted(node[name], f"{prefix}{name}.")


def _space(swept: Sequence[str], fixed: Sequence[str], options: Any, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The distribution of each key that is searched, by the words ``swept`` and by YAML files, and all words that have
    one value: ``fixed``, and what a YAML file adds to them."""
    # The plugin's public class wants a whole Hydra application; how it reads values is in this module alone.
    # tests/test_sweep.py guards what is used of it.
    from hydra_plugins.hydra_optuna_sweeper import _impl

    fixed_keys = [word.partition("=")[0] for word in fixed]
    with open_dict(options):
        for chosen in (options.params, options.search_space):
            for key in [key for key in chosen or {} if key in fixed_keys]:  # the command line is the stronger
                del chosen[key]
    space: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    mistakes: list[str] = []
    for key, each in (options.search_space or {}).items():
        try:
            space[str(key)] = _impl.create_optuna_distribution_from_config(each)
        except Exception as error:  # whatever Optuna says of a range, it does not say of which
            mistakes.append(f"hydra.sweeper.search_space of a YAML file, {key}: {first_line(error)}")
    in_yaml = " (hydra.sweeper.params of a YAML file)"
    params = {f"{key}={value}": in_yaml for key, value in (options.params or {}).items()}
    for word, place in [*params.items(), *((word, "") for word in swept)]:
        try:
            found, plain = _impl.create_params_from_overrides([word])
        except Exception as error:
            mistakes.append(_no_range(word, place, error, folder))
        else:
            space.update(found)
            constants.update(plain)
    if mistakes:
        raise UserError(*mistakes)
    return space, [*fixed, *words_of(constants)]


def _no_range(word: str, place: str, error: Exception, folder: Path) -> str:
    """The sentence for an override, from ``place``, of which Optuna can make nothing that is searched."""
    key, _, value = word.partition("=")
    override, found = parse_word(word), _RANGE.search(value)
    ends = override.value() if override is not None else None
    e_g = f"e.g. {example(key, folder, is_searched=True)}"
    reason = first_line(error) if str(error) else "these are neither values nor a range"
    if found is None or not isinstance(ends, IntervalSweep | RangeSweep):
        return f"{word}{place} cannot be searched: {reason}; {e_g}"
    bounds = _arguments(found[1], found[2])

    def with_ends(low: str, high: str, *step: str) -> str:
        return pasteable(
            key, f"{value[: found.start()]}{found[1]}({','.join([low, high, *step])}){value[found.end() :]}"
        )

    low, high, *step = bounds
    lower, higher = sorted((low, high), key=float)
    if step and float(step[0]) <= 0:
        use = with_ends(lower, higher, *([step[0].removeprefix("-")] if float(step[0]) else []))
        return f"{word}{place}: the step is above 0, not {step[0]}; use {use}"
    if float(low) > float(high):
        use = with_ends(high, low, *step)
        return f"{word}{place}: the lower end comes first, and {low} is above {high}; use {use}"
    if "log" in ends.tags and float(low) <= 0:
        above = "1" if isinstance(ends, IntervalSweep) and isinstance(ends.start, int) else f"{float(high) / 1000:g}"
        use = f"use {with_ends(above, high)}" if float(high) > 0 else e_g
        return f"{word}{place}: what is searched by its logarithm begins above 0, not at {low}; {use}"
    return f"{word}{place} cannot be searched: {reason}; {e_g}"


def _arguments(function: str, text: str) -> list[str]:
    """The ends of a range, and its step where it is given, as they stand in ``text``, in any order or unnamed."""
    names = _ARGUMENTS[function]
    given: dict[str, str] = {}
    for name, argument in zip(names, text.split(","), strict=False):
        own_name, is_named, number = argument.rpartition("=")
        given[own_name.strip() if is_named else name] = number.strip()
    if names[1] not in given:  # range(5)
        given = {**given, names[0]: "0", names[1]: given[names[0]]}
    return [given[name] for name in names if name in given]


def _corners(space: Mapping[str, Any]) -> list[dict[str, str]]:
    """Points that between them have the ends of every range and every choice."""
    ends = {
        key: [typed(each) for each in getattr(one, "choices", None) or (one.low, one.high)]
        for key, one in space.items()
    }
    first = {key: values[0] for key, values in ends.items()}
    return [first, *({**first, key: value} for key, values in ends.items() for value in values[1:])]
