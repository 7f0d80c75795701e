"""Compose the command line and the YAML files of this package into a checked ``RunConfig``.

Hydra composes and pydantic validates. All mistakes are reported at once, one sentence per mistake. Keys are looked up
in the schema before Hydra runs. Hydra receives only the choices of groups; values are set in the composed config.
"""

import functools
import re
from codecs import BOM_UTF8
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from serried.configs.bucket_paths import forget_listings, with_urls
from serried.configs.errors import UserError
from serried.configs.help import choices_of, files_of
from serried.configs.hugging_face.adapter_settings import with_adapters
from serried.configs.hugging_face.model_folder import with_model_folder
from serried.configs.messages.invalid_values import Origins, explain, shown
from serried.configs.messages.keys import all_keys, is_section
from serried.configs.messages.suggestions import Groups, nearest, nearest_keys, pasteable, unknown_choice
from serried.configs.override_parser import CommandLine
from serried.configs.plain_data import expanded, flatten, read_if_there, read_yaml, value_at
from serried.configs.renamed_keys import RENAMED, read_saved_config
from serried.configs.schema.data import DataSection, TextRunConfig
from serried.configs.schema.declaration import FOLDER, declared
from serried.configs.schema.fields import parse_count
from serried.configs.schema.launch_plan_track import TrackSection
from serried.configs.schema.run_config import CHOSEN, base_schema, check, chosen_in, config_yaml
from serried.configs.schema.sections import OptimSection, RunConfig

__all__ = ["FOLDER", "compose", "compose_saved", "config_yaml", "refuse_misread"]


def compose(argv: Sequence[str], found: Sequence[str] = ()) -> TextRunConfig:
    """Return the config for the overrides ``argv``, such as ``recipe=tiny`` and ``trainer.steps=1k``.

    ``found``: mistakes found earlier, which are reported together with the mistakes found here.

    Raises ``UserError``, which lists every mistake in ``argv`` and the YAML files.
    """
    forget_listings()
    groups = choices_of()
    given = {word.partition("=")[0].lstrip("+") for word in argv} | _keys_of_own_recipe(argv)
    beside = _defaults_beside(given, argv)
    if wrong := CommandLine(groups).read(beside).sentences({}):
        _refuse([sentence.replace("(command line)", "(defaults of the task)") for sentence in wrong])
    line = CommandLine(groups).read([*beside, *argv])
    plain: dict[str, Any] = {}
    preset: dict[str, Any] = {}
    late: Sequence[str] = ()
    try:
        plain = preset = _composed(line)
        own = _from_files(declared().root, declared().shipped, _for_hydra(line), _stamp())[0].get("model")
        plain = _with_fitting_length(with_model_folder(with_adapters(preset, given), given, own or {}), given)
        config = check(plain)
        late = _unknown_changes(config)
    except UserError as error:
        late = [with_urls(str(said)) for said in error.args]
    except ValidationError as error:
        # If overrides were refused, the remaining ones may contradict each other only for that reason.
        origins = replace(_origins(line), of_folder=_of_folder(preset, plain))
        late = explain(error, plain, origins, groups, alone=bool(found or line.mistakes))
    _refuse([*found, *line.sentences(plain), *late])
    return cast(TextRunConfig, config)  # for a user's own task it is a RunConfig, without the sections model and data


def _unknown_changes(config: RunConfig) -> list[str]:
    """Return a sentence for each name in ``checkpoint.allow_changes`` that is not a key or section."""
    key, allowed = "checkpoint.allow_changes", config.checkpoint.allow_changes
    found = []
    for name in () if isinstance(allowed, bool) else allowed:
        if name not in all_keys() and not is_section(name):
            names = [RENAMED[name]] if name in RENAMED else nearest_keys(name, all_keys())
            near = [pasteable(key, f"[{other}]") for other in names]
            hint = f"did you mean {' or '.join(near)}?" if near else f"e.g. {all_keys()[key].example}"
            found.append(f"{key}=[{name}]: there is no key {name}; {hint}")
    return found


def _with_fitting_length(plain: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the composed config with sequences no longer than the model supports, unless the user set the length."""
    model, data = plain.get("model"), plain.get("data")
    if "data.sequence_length" in given or not isinstance(model, dict) or not isinstance(data, dict):
        return plain
    longest, length = (parse_count(count) for count in (model.get("max_sequence_length"), data.get("sequence_length")))
    is_longer = isinstance(longest, int) and isinstance(length, int) and 0 < longest < length
    return plain | {"data": data | {"sequence_length": longest}} if is_longer else plain


def _defaults_beside(given: Collection[str], argv: Sequence[str]) -> list[str]:
    """Return the defaults of the task that apply to this command line.

    If the user chooses another optimizer, defaults in ``optim.*`` apply only to keys that this optimizer has and that
    its YAML file does not set. The same holds for ``schedule.*``.
    """
    defaults = dict(word.partition("=")[::2] for word in declared().defaults)
    chosen = dict(word.partition("=")[::2] for word in argv)
    own = {"optim": OptimSection.model_fields["name"].default, "schedule": "cosine"} | defaults
    kept = {
        group: _kept_by(group, chosen[group])
        for group in ("optim", "schedule")
        if chosen.get(group, own[group]) != own[group]
    }

    def applies(key: str) -> bool:
        group, _, last = key.partition(".")
        return key not in given and (group not in kept or not last or last.partition(".")[0] in kept[group])

    return [f"{key}={value}" for key, value in defaults.items() if applies(key)]


def _kept_by(group: str, choice: str) -> set[str]:
    """Return the keys that ``group=choice`` has but its YAML file does not set; empty if there is no such choice."""
    values: dict[str, Any] = {}
    for folder in declared().folders:
        values |= read_if_there(folder / group / f"{choice}.yaml")  # composing reports mistakes in it
    name = str(values.get("name", choice))
    if name not in CHOSEN[group].names():
        return set()
    return CHOSEN[group].get(name).section.model_fields.keys() - values.keys()


def _keys_of_own_recipe(argv: Sequence[str]) -> set[str]:
    """Return the keys that the user's own recipe sets. The defaults of the task must not override them."""
    keys: set[str] = set()
    names = [dict(word.partition("=")[::2] for word in argv).get("recipe")]
    for name in names:  # the loop appends the recipes that each recipe is based on
        for folder in declared().config_dirs:
            content = read_if_there(folder / "recipe" / f"{name}.yaml")
            keys |= flatten(content).keys()
            names += [name for name in content.get("defaults") or [] if isinstance(name, str) and name not in names]
    return keys


def compose_saved(saved: Path, argv: Sequence[str], reads: tuple[str, ...]) -> TextRunConfig:
    """Return the config that a run saved in the file ``saved``, with the overrides ``argv`` applied.

    ``reads``: prefixes of accepted keys; other keys are refused. A new choice of ``data`` keeps the keys that determine
    how documents are tokenized and packed.

    Raises ``UserError`` if the file cannot be read, or there are mistakes in it or in ``argv``; lists every mistake.
    """
    groups = choices_of()
    line = CommandLine(groups).read(argv)
    try:
        plain = read_saved_config(saved)
        recipe = plain["recipe"]
    except (OSError, ValueError, KeyError) as error:
        _refuse([*_misread(line, reads, None), _unreadable(saved, error)])
        raise
    _refuse(_misread(line, reads, plain))
    _trust_no_places(plain, saved.parent)
    try:
        if line.typed:
            choices = {"recipe": recipe} if recipe in groups.get("recipe", ()) else {}
            composed = _composed(CommandLine(groups, line.typed, choices | line.choices, line.values))
            for key in line.typed:
                _take_over(key, composed, plain)
        return cast(TextRunConfig, check(plain))
    except ValidationError as error:
        _refuse(explain(error, plain, Origins(line.typed, [(saved, "")], saved.parent), groups, alone=False))
        raise


def _trust_no_places(plain: dict[str, Any], run_dir: Path) -> None:
    """Remove paths outside of ``run_dir``, the run folder, from its saved config ``plain``, which is not trusted.

    ``data.cache_dir`` is kept only if that folder already contains prepared data.
    """
    run, data, track = (plain.get(name) for name in ("run", "data", "track"))
    if isinstance(run, dict):
        run["dir"] = str(run_dir)
    if isinstance(track, dict):
        track.pop("mlflow", None)  # not used here; earlier versions saved addresses that are refused now
    if isinstance(data, dict) and isinstance(named := data.get("cache_dir"), str) and not _is_cache(expanded(named)):
        data["cache_dir"] = None
        if data.get("name") != "tokens":
            data.pop("fetch", None)  # what it reads in ranges is in that folder


def _is_cache(folder: Path) -> bool:
    with suppress(OSError, ValueError):
        return (folder / "memos").is_dir() or any(folder.glob("*/summary.json"))
    return False


def saved_trackers(saved: Path) -> TrackSection:
    """Return the section ``track`` of the config that a run saved in the file ``saved``. The task of the run need not
    be installed. Raises ``UserError`` if the file cannot be read."""
    try:
        return TrackSection.model_validate(read_yaml(saved)["track"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(_unreadable(saved, error)) from error


def _unreadable(saved: Path, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else "it is not a config that train.py wrote"
    return f"cannot read {saved}: {reason}; use run.dir=FOLDER of a run"


def refuse_misread(argv: Sequence[str], reads: tuple[str, ...]) -> None:
    """Check ``argv`` like ``compose_saved``, but without a run. Raises ``UserError``, which lists every mistake."""
    _refuse(_misread(CommandLine(choices_of()).read(argv), reads, None))


def _misread(line: CommandLine, reads: tuple[str, ...], plain: Mapping[str, Any] | None) -> list[str]:
    """Return the mistakes in ``line``, including overrides that do not fit the run with the config ``plain`` (None:
    unknown)."""
    mistakes = line.sentences({})
    for key, value in line.typed.items():
        if key.partition(".")[0] in ("model", "recipe") or key == "data.tokenizer":
            own = "a value of its own" if plain is None else f"{key}={shown(value_at(key, plain))}"
            mistakes.append(f"{key}={shown(value)}: the run was trained with {own}, which is fixed; leave it out")
        elif not key.startswith(reads):
            keys = ", ".join(reads)
            mistakes.append(f"{key}={shown(value)} has no effect here; only these keys are read: {keys}; leave it out")
    return mistakes


_TRAINED_FOR = ("quantize_aware",)
"""Keys of ``precision`` that keep their saved value when another precision is chosen."""


def _take_over(key: str, composed: Mapping[str, Any], plain: dict[str, Any]) -> None:
    """Copy ``key``, a key or a group, from ``composed`` to ``plain``."""
    if key == "data":
        # A new choice of data replaces only the keys of the source.
        shared = DataSection.model_fields.keys() - {"name"}
        source = {name: value for name, value in composed[key].items() if name not in shared}
        plain[key] = {**{name: value for name, value in plain[key].items() if name in shared}, **source}
        plain[key].update(validation={})
        return
    if key == "precision":
        # The weights were trained with these values.
        composed = {key: composed[key] | {name: plain[key][name] for name in _TRAINED_FOR if name in plain[key]}}
    *sections, last = key.split(".")
    for name in sections:
        composed = composed[name]
        plain = plain.setdefault(name, {})
    plain[last] = composed[last]


def _refuse(mistakes: Sequence[str]) -> None:
    if mistakes:
        raise UserError(*dict.fromkeys(" ".join(mistake.split()) for mistake in mistakes))


def _composed(line: CommandLine) -> dict[str, Any]:
    """Return the config that Hydra composes from the YAML files and overrides, as plain data. Raises ``UserError`` if a
    YAML file cannot be read or merged, or refers to something that does not exist."""
    shipped = declared().shipped
    try:
        files, choices = _from_files(declared().root, shipped, _for_hydra(line), _stamp())
        config = OmegaConf.create(files)
        _fill_in(config, choices, line)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        file = Path(mark.name) if mark else shipped
        name = file.relative_to(shipped.parent) if file.is_relative_to(shipped.parent) else file
        place = f"{name}:{mark.line + 1}" if mark else f"a file in {shipped.name}"
        raise UserError(f"{place} is not valid YAML: {error.problem}") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_not_composed(error, shipped.name, line.groups)) from None
    try:
        return _without_missing(OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException as error:
        key = str(error.full_key).partition("[")[0]
        given = f"{key}={shown(value_at(key, OmegaConf.to_container(config)))} ({_origins(line).of(key)})"
        reason = str(error).splitlines()[0]
        if unset := re.search("Environment variable '(.+)' not found", reason):
            cure = f"set it, or give a default: ${{oc.env:{unset[1]},VALUE}}"
            reason = f"the environment variable {unset[1]} is not set; {cure}"
        raise UserError(f"{given} cannot be resolved: {reason}") from None


def _stamp() -> object:
    """Return a cache key that changes whenever the YAML files change."""
    yamls = sorted(path for folder in declared().folders for path in folder.rglob("*.yaml"))
    return tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in yamls)


@functools.lru_cache(maxsize=64)  # most runs of a sweep choose the same files
def _from_files(root: str, folder: Path, words: tuple[str, ...], stamp: object) -> tuple[Any, Any]:
    """Return the content of the YAML files and the choices, as plain data. ``stamp``: cache key of the files."""
    del stamp
    with initialize_config_dir(str(folder), version_base=None):
        config = hydra_compose(root, list(words), return_hydra_config=True)
    with open_dict(config):
        choices = config.pop("hydra").runtime.choices
    return OmegaConf.to_container(config), OmegaConf.to_container(choices)


def _fill_in(config: DictConfig, choices: Mapping[str, str], line: CommandLine) -> None:
    """Set the names of the chosen optimizer, model, ... and the values of the command line."""
    for group, choice in choices.items():
        for file in (folder / group / f"{choice}.yaml" for folder in declared().config_dirs):
            if file.is_file() and file.read_bytes().startswith(BOM_UTF8):
                raise UserError(
                    f"{file} begins with a byte order mark, so its first line would not be read; save the file as "
                    "UTF-8 without a byte order mark"
                )
    if isinstance(config.get("recipe"), DictConfig):
        raise UserError(
            f"the file of recipe={choices['recipe']} sets keys of the whole run, so it must begin with "
            "# @package _global_"
        )
    config.recipe = choices["recipe"] or declared().name
    for group, registry in chosen_in(base_schema()).items():  # a choice without a YAML file, or one without a name
        if registry.key == "name":
            name = line.choices.get(group, choices.get(group))
            _name(config, group, name)
    if declared().name:
        _name(config, "task", declared().name)
    for key, value in line.values.items():
        OmegaConf.update(config, key, value, merge=False)


def _name(config: DictConfig, section: str, name: str | None) -> None:
    """Set the name in ``section`` if the YAML files do not set it."""
    found = config.get(section) or {}
    if not isinstance(found, Mapping):
        raise UserError(f"{section}={found} in a YAML file: {section} is a section and must contain keys with values")
    config[section] = {"name": name, **found}


def _for_hydra(line: CommandLine) -> tuple[str, ...]:
    """Return the words for Hydra: choices that have a YAML file. Other choices get the defaults of their section."""
    files = files_of()
    words = [
        f"{group}={choice if group not in CHOSEN or choice in files.get(group, ()) else '[]'}"
        for group, choice in line.choices.items()
    ]
    urls = (QuotedString(text=f"file://{path}", quote=Quote.double).with_quotes() for path in declared().config_dirs)
    return (*words, f"hydra.searchpath=[{','.join(urls)}]")


def _origins(line: CommandLine) -> Origins:
    """Return the origins of the values of a composed config."""
    shipped, folders = declared().shipped, declared().folders
    defaults = _defaults_list(declared().root, shipped, _for_hydra(line), _stamp())
    files = [(folder / f"{path}.yaml", package) for path, package in defaults for folder in folders]
    # The list also contains Hydra's own settings, whose files are elsewhere.
    typed = {key: value for key, value in line.typed.items() if key not in line.choices}
    return Origins(typed, [(file, section) for file, section in files if file.exists()], shipped.parent)


def _of_folder(preset: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, str]:
    """Return the origin of each key of ``model`` that the ``config.json`` of the model changed."""
    before, after = preset.get("model") or {}, plain.get("model") or {}
    origin = f"config.json of {after.get('path')}"
    return {f"model.{key}": origin for key, value in after.items() if key not in before or before[key] != value}


@functools.lru_cache(maxsize=64)
def _defaults_list(root: str, folder: Path, words: tuple[str, ...], stamp: object) -> list[tuple[str | None, str]]:
    """Return the YAML files that Hydra merges, in order, and the section of each. ``stamp``: as for ``_from_files``."""
    del stamp
    with initialize_config_dir(str(folder), version_base=None):
        loader = GlobalHydra.instance().config_loader()
        defaults = loader.compute_defaults_list(root, [*words], RunMode.RUN).defaults
    return [(default.config_path, default.package or "") for default in defaults]


def _not_composed(error: Exception, folder: str, groups: Groups) -> str:
    """Return the error message for YAML files that Hydra cannot compose. It begins with the file name, if known."""
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        return unknown_choice(group, choice, groups.get(group, []), f"chosen by a YAML file in {folder}")
    found = re.match(r"In '(.+?)': *(.*)", str(error).strip(), re.DOTALL)
    file, text = f"a file in {folder}", str(error)
    if found:
        own = (path / f"{found[1]}.yaml" for path in declared().config_dirs)
        file, text = str(next((path for path in own if path.is_file()), f"{folder}/{found[1]}.yaml")), found[2]
    if group_name := re.match(r"Could not override '(.+?)'", text):
        near = nearest(group_name[1], list(groups)) or groups
        return f"{file}: no group {group_name[1]!r}; did you mean {' or '.join(near)}?"
    if not text.strip() or "Cannot merge" in text:
        return f"{file} is not a valid config: it must contain keys with values, and each ${{ needs a closing }}"
    return f"{file} is not a valid config: {text.strip().splitlines()[0]}"


def _without_missing(node: Any) -> Any:
    """Return the data without keys marked ``???``, which the schema reports as missing. All keys become strings."""
    if isinstance(node, dict):
        return {str(key): _without_missing(value) for key, value in node.items() if value != "???"}
    return node
