"""From the command line and the YAML files beside this one to a checked ``TextRunConfig``.

Hydra composes, pydantic checks, and whatever either of them (or the reading of the command line before them) refuses is
told in one sentence each, all at once. Keys are looked up in the schema before Hydra sees them, so that Hydra never has
to refuse one; each value goes to it as ``++key=value``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)
from pydantic import ValidationError

from serried.configs.declaration import declared
from serried.configs.errors import UserError
from serried.configs.explain import Layer, Origins, explain, shown, unfit, value_at
from serried.configs.help import choices_of, files_of, help_text
from serried.configs.keys import Key, all_keys, is_section
from serried.configs.model_folder import with_model_folder
from serried.configs.plain_data import flatten, read_yaml
from serried.configs.run_config import CHOSEN, check, config_yaml
from serried.configs.schema import SourceSection, TextRunConfig
from serried.configs.suggest import (
    advice,
    listing,
    meant,
    nearest,
    other_names,
    pasteable,
    squeezed,
    unknown_choice,
    unknown_key,
)
from serried.configs.words import last_of_each

__all__ = ["compose", "compose_saved", "config_yaml", "help_text", "parse_arguments"]

FOLDER = Path(__file__).resolve().parent
Action = Literal["train", "help", "config", "sweep"]
_COMMAND_LINE = "command line"


def parse_arguments(argv: Sequence[str]) -> tuple[Action, list[str]]:
    """Split the flags ``--help``, ``--cfg job`` and ``-m`` from the overrides; the first in this order wins.

    ``--config-dir FOLDER`` stays among them as one word, for ``config_dirs``.

    Other flags stay among the overrides, where ``compose`` refuses them together with every other mistake.
    """
    action: Action = "train"
    overrides: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("--help", "-h"):
            return "help", []
        if word == "--config-dir" and words:
            word = f"{word}={words.pop(0)}"
        if word in ("--cfg", "-c") and words[:1] == ["job"]:
            word = f"{word}={words.pop(0)}"
        if word in ("--cfg=job", "-c=job"):
            action = "config"
        elif word in ("-m", "--multirun"):
            action = "sweep" if action == "train" else action
        else:
            overrides.append(word)
    return action, overrides


def config_dirs(argv: Sequence[str]) -> tuple[list[str], tuple[Path, ...]]:
    """Split ``--config-dir=FOLDER`` from overrides.

    Raises:
        UserError: there is no such folder, or a file in it has the name of a shipped one, which would win.
    """
    flag = "--config-dir="
    folders = tuple(Path(word.removeprefix(flag)).expanduser().absolute() for word in argv if word.startswith(flag))
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--config-dir {folder} is no folder; give the one that holds recipe/, model/, data/, ...")
        hidden = [path for path in folder.glob("*/*.yaml") if (FOLDER / path.relative_to(folder)).exists()]
        if hidden:
            raise UserError(f"{hidden[0]} has the name of a shipped choice, which would be used instead; rename it")
    return [word for word in argv if not word.startswith(flag)], folders


def compose(argv: Sequence[str], folder: Path = FOLDER, told: Sequence[str] = ()) -> TextRunConfig:
    """The config that ``argv`` (overrides such as ``recipe=tiny`` and ``trainer.steps=1k``) asks for.

    ``told``: mistakes found earlier, to report together with those found here.

    Raises:
        UserError: anything is wrong with ``argv`` or the YAML files in ``folder``; names every mistake found.
    """
    groups = choices_of(folder)
    command = _Command(groups)
    given = {word.partition("=")[0].lstrip("+") for word in argv} | _keys_of_own_recipe(argv)
    command.read([*(word for word in declared().defaults if word.partition("=")[0] not in given), *argv])
    mistakes, plain = [*told], {}
    try:
        plain = _composed(folder, command)
        mistakes += command.told(plain)
        plain = with_model_folder(plain, given)
        checked = check(plain)
    except UserError as error:
        mistakes += [*command.told(plain), str(error)]
    except ValidationError as error:
        # Once overrides were refused, the rest may contradict itself for that reason alone.
        mistakes += explain(error, plain, _origins(folder, command), groups, alone=bool(mistakes))
    _refuse(mistakes)
    return cast(TextRunConfig, checked)  # of a user's task: a RunConfig, which has no model and no data


def _keys_of_own_recipe(argv: Sequence[str]) -> set[str]:
    """Return the keys that the user's own recipe sets, which the defaults of their task must not override."""
    name = dict(word.partition("=")[::2] for word in argv).get("recipe")
    found: set[str] = set()
    for folder in declared().config_dirs:
        try:
            found |= flatten(read_yaml(folder / "recipe" / f"{name}.yaml")).keys()
        except (OSError, ValueError):
            continue  # not there; or a mistake in it, which composing reports
    return found


_SOURCE = (*SourceSection.model_fields, "sources", "weigh_by", "token_dtype", "validation_split", "streaming")
"""Keys of ``data`` that name the documents; a choice of ``data`` replaces all of them, and no others."""


def compose_saved(saved: Path, argv: Sequence[str], reads: tuple[str, ...], folder: Path = FOLDER) -> TextRunConfig:
    """The config that a run left in the file ``saved``, with the overrides ``argv`` on top.

    ``reads``: prefixes of the keys that are read here; others are refused. A new choice of ``data`` keeps the keys
    that say how documents become tokens.

    Raises:
        UserError: the file cannot be read, or anything is wrong with it or with ``argv``; names every mistake found.
    """
    groups = choices_of(folder)
    command = _Command(groups)
    command.read(argv)
    try:
        plain = read_yaml(saved)
        recipe = plain["recipe"]
    except (OSError, ValueError, KeyError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a config that train.py wrote"
        unreadable = f"cannot read {saved}: {reason}; use run.dir=FOLDER of a run"
        _refuse([*_misread(command, reads, None), unreadable])
        raise
    _refuse(_misread(command, reads, plain))
    origins = Origins(command.typed, [Layer(saved, "")], saved.parent)
    try:
        if command.typed:
            known = [f"recipe={recipe}"] if recipe in groups["recipe"] else []
            composed = _composed(folder, _Command(groups, dict(command.typed), [*known, *command.overrides]))
            for key in command.typed:
                _take_over(key, composed, plain)
        return cast(TextRunConfig, check(plain))
    except ValidationError as error:
        _refuse(explain(error, plain, origins, groups, alone=False))
        raise


def refuse_misread(argv: Sequence[str], reads: tuple[str, ...], folder: Path = FOLDER) -> None:
    """Refuse what ``compose_saved`` would refuse for any run, if the run is not known.

    Raises:
        UserError: there is a mistake; names every one.
    """
    command = _Command(choices_of(folder))
    command.read(argv)
    _refuse(_misread(command, reads, None))


def _misread(command: "_Command", reads: tuple[str, ...], plain: Mapping[str, Any] | None) -> list[str]:
    """Mistakes of ``command``, alone and for the run with the config ``plain`` (None: not known)."""
    unread = [
        _unread(key, value, plain, reads)
        for key, value in command.typed.items()
        if not key.startswith(reads) or key == "data.tokenizer"
    ]
    return [*command.told({}), *unread]


def _unread(key: str, value: str, plain: Mapping[str, Any] | None, reads: tuple[str, ...]) -> str:
    """The sentence for a key that the command does not read."""
    if key.partition(".")[0] in ("model", "recipe") or key == "data.tokenizer":
        has = "a run has its own value" if plain is None else f"the run has {key}={shown(value_at(key, plain))}"
        return f"{key}={shown(value)}: {has}, and its weights fit no other; leave it out"
    return f"{key}={shown(value)} has no effect here; keys that are read: {', '.join(reads)}; leave it out"


def _take_over(key: str, composed: Mapping[str, Any], plain: dict[str, Any]) -> None:
    """Copy ``key``, a key or a group, from ``composed`` to ``plain``."""
    if key == "data":
        source = {name: composed[key][name] for name in _SOURCE if name in composed[key]}
        plain[key] = {**{name: value for name, value in plain[key].items() if name not in _SOURCE}, **source}
        plain[key].update(validation={})
        return
    *sections, last = key.split(".")
    for name in sections:
        composed = composed[name]
        plain = plain.setdefault(name, {})
    plain[last] = composed[last]


def _refuse(mistakes: Sequence[str]) -> None:
    if mistakes:
        raise UserError(*dict.fromkeys(" ".join(mistake.split()) for mistake in mistakes))


def _composed(folder: Path, command: "_Command") -> dict[str, Any]:
    """The YAML files and overrides, composed by Hydra, as plain data.

    Raises:
        UserError: a YAML file cannot be read or merged, or refers to something that does not exist.
    """
    try:
        with initialize_config_dir(str(folder), version_base=None):
            config = hydra_compose(declared().root, _for_hydra(command.overrides, folder), return_hydra_config=True)
        with open_dict(config):
            choices = config.pop("hydra").runtime.choices
            config.recipe = choices.recipe or declared().name
            for group, registry in CHOSEN.items():  # a choice without a YAML file, or whose file leaves the name out
                if registry.key == "name":
                    name = command.typed.get(group, choices.get(group))
                    config[group] = {"name": name, **(config.get(group) or {})}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{_relative(mark.name, folder)}:{mark.line + 1}" if mark else f"a file in {folder.name}"
        raise UserError(f"{place} is not valid YAML: {error.problem}") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_not_composed(error, folder, command.groups)) from None
    try:
        plain = _without_missing(OmegaConf.to_container(config, resolve=True))
        return {**plain, "task": {"name": declared().name, **plain.get("task", {})}} if declared().name else plain
    except OmegaConfBaseException as error:
        key = str(error.full_key).partition("[")[0]
        reason = next((reason for kind, reason in _UNRESOLVED.items() if isinstance(error, kind)), "it has no value")
        given = f"{key}={shown(value_at(key, OmegaConf.to_container(config)))} ({_origins(folder, command).of(key)})"
        raise UserError(f"{given} cannot be filled in: {reason}") from None


def _for_hydra(overrides: Sequence[str], folder: Path) -> list[str]:
    """``overrides`` without choices that have no YAML file: the defaults of their section apply."""
    files = files_of(folder)
    pairs = [override.partition("=") for override in overrides]
    words = [f"{key}={value if key not in CHOSEN or value in files.get(key, ()) else '[]'}" for key, _, value in pairs]
    urls = (QuotedString(text=f"file://{folder}", quote=Quote.double) for folder in declared().config_dirs)
    folders = [url.with_quotes() for url in urls]
    return [*words, *([f"hydra.searchpath=[{','.join(folders)}]"] if folders else [])]


def _origins(folder: Path, command: "_Command") -> Origins:
    """Origins of the values of a composed config."""
    with initialize_config_dir(str(folder), version_base=None):
        loader = GlobalHydra.instance().config_loader()
        overrides = _for_hydra(command.overrides, folder)
        defaults = loader.compute_defaults_list(declared().root, overrides, RunMode.RUN).defaults
    folders = [folder, *declared().config_dirs]
    files = [(each / f"{default.config_path}.yaml", default.package or "") for default in defaults for each in folders]
    # Hydra's own settings are in the list too; their files are elsewhere.
    return Origins(command.typed, [Layer(file, section) for file, section in files if file.exists()], folder.parent)


def _not_composed(error: Exception, folder: Path, groups: Mapping[str, Sequence[str]]) -> str:
    """The sentence for YAML files that Hydra cannot compose; its messages name the file first, if possible."""
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        return unknown_choice(group, choice, groups.get(group, []), f"chosen by a YAML file in {folder.name}")
    found = re.match(r"In '(.+?)': *(.*)", str(error).strip(), re.DOTALL)
    file, text = (f"{folder.name}/{found[1]}.yaml", found[2]) if found else (f"a file in {folder.name}", str(error))
    if group_name := re.match(r"Could not override '(.+?)'", text):
        near = nearest(group_name[1], list(groups)) or groups
        return f"{file}: no group {group_name[1]!r}; did you mean {' or '.join(near)}?"
    if not text.strip() or "Cannot merge" in text:
        return f"{file} does not fit: it must hold keys with values, and each ${{ needs its }}"
    return f"{file} does not fit: {text.strip().splitlines()[0]}"


_UNRESOLVED = {  # the more specific classes first
    InterpolationKeyError: "it refers to a key that does not exist",
    InterpolationToMissingValueError: "it refers to a key that has no value",
    UnsupportedInterpolationType: "it asks for a function that does not exist",
    InterpolationResolutionError: "it refers to itself, or to something that has no value",
}


@dataclass
class _Command:
    """The command line, read word by word."""

    groups: dict[str, list[str]]
    typed: dict[str, str] = field(default_factory=dict)
    """Accepted overrides as typed, by key."""
    overrides: list[str] = field(default_factory=list)
    """The same for Hydra."""
    mistakes: list[str | tuple[str, str, str]] = field(default_factory=list)
    """Sentences. In place of one: its beginning, an unknown key and its value, on which ``told`` gives advice."""
    parser: OverridesParser = field(default_factory=OverridesParser.create)

    def told(self, plain: Mapping[str, Any]) -> list[str]:
        """Mistakes of the command line. ``plain``: the config that the rest of it composes to, if any."""
        unknown = {key: value for _, key, value in (each for each in self.mistakes if not isinstance(each, str))}
        if plain and len(unknown) > 1:
            plain = _renamed(unknown, plain)
        return [
            each
            if isinstance(each, str)
            else f"{each[0]}: {advice(*each[1:], plain)}"
            if each[0]
            else unknown_key(each[1], shown(each[2]), _COMMAND_LINE, self.groups, plain)
            for each in self.mistakes
        ]

    def read(self, argv: Sequence[str]) -> None:
        """Read all words; mistakes are collected, never raised."""
        words = last_of_each(argv)
        while words:
            word = words.pop(0)
            if word.startswith("-"):
                self._read_flag(word, words)
            elif word.startswith("~"):
                self._refuse_deletion(word)
            elif "=" not in word:
                self._read_bare_word(word, words)
            else:
                key, _, value = word.partition("=")
                if key and not value and words and _is_bare(words[0]):
                    value = words.pop(0)
                    self.mistakes.append(f"{word} {value}: no blank after the =; write {pasteable(key, value)}")
                else:
                    self._read_override(key.lstrip("+").strip(), value.strip())

    def _read_flag(self, word: str, words: list[str]) -> None:
        name, has_value, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in ("m", "multirun"):
            self.mistakes.append((word, "multirun", ""))
            return
        if not has_value and words and _is_bare(words[0]):
            value = words.pop(0)
            word = f"{word} {value}"
        if name in ("cfg", "c"):
            self.mistakes.append(f"{word}: write --cfg job, which prints the config and stops")
        elif name and advice(name, value):
            self.mistakes.append((shown(word), name, value))
        elif name and (overrides := meant(name, value, self.groups)):
            self.mistakes.append(f"{shown(word)}: overrides have no dashes; write {' or '.join(overrides)}")
        else:
            self.mistakes.append(
                f"no flag {shown(word)}; the flags are --help and --cfg job, anything else is key=value without dashes"
            )

    def _refuse_deletion(self, word: str) -> None:
        key = word.lstrip("~").partition("=")[0]
        found = all_keys().get(key)
        if found is None:
            self.mistakes.append(f"{word}: keys cannot be deleted; leave {word} out")
        elif found.nullable:
            self.mistakes.append(f"{word}: keys cannot be deleted; write {key}=null")
        else:
            self.mistakes.append(f"{word}: keys cannot be deleted; give it another value, e.g. {found.example}")

    def _read_bare_word(self, word: str, words: list[str]) -> None:
        homes = [group for group, choices in self.groups.items() if word in choices]
        if words and words[0].startswith("=") and len(words) > (words[0] == "="):
            value = words.pop(0)[1:] or words.pop(0)
            self.mistakes.append(f"{word} = {value}: no blanks around the =; write {pasteable(word, value)}")
        elif homes:
            group = "recipe" if "recipe" in homes else homes[0]
            self.mistakes.append(f"{word}: an override is key=value; write {group}={word}")
        elif word == "help":
            self.mistakes.append("help: write --help")
        else:
            key, _, value = word.partition(":")
            if not value and key in [*self.groups, *all_keys()] and words and _is_bare(words[0]):
                value = words.pop(0)
                word = f"{word} {value}"
            overrides = meant(key, value, self.groups)
            hint = f"write {' or '.join(overrides)}" if overrides else "e.g. recipe=tiny"
            self.mistakes.append(f"{shown(word) or repr(word)}: an override is key=value; {hint}")

    def _read_override(self, key: str, value: str) -> None:
        if self._is_refused(key, value):
            return
        if key in self.groups:
            self._read_choice(key, value)
        else:
            self._read_value(all_keys()[key], value)

    def _is_refused(self, key: str, value: str) -> bool:
        """Whether ``key`` cannot be given a value; adds the reason to ``mistakes``."""
        count = len(self.mistakes)
        section, _, leaf = key.rpartition(".")
        if not key:
            self.mistakes.append(f"={shown(value)} has no key before the =; e.g. trainer.steps=1000")
        elif key in all_keys() or key in self.groups:
            if not value:
                example = all_keys()[key].example if key in all_keys() else f"{key}={'|'.join(self.groups[key])}"
                alternative = f", or {key}=null for none" if key in all_keys() and all_keys()[key].nullable else ""
                self.mistakes.append(f"{key}= has no value; e.g. {example}{alternative}")
            elif leaf in ("name", "strategy") and value in self.groups.get(section, []):
                # Would change the label, and no key that belongs to the choice.
                self.mistakes.append(f"{key}={value} is only the label of a choice; write {section}={value}")
        elif is_section(key) and squeezed(key) not in other_names().advice:
            self.mistakes.append(f"{key}={shown(value)}: {key} is a section, not a key; {listing(key)}")
        elif above := _value_above(key):
            self.mistakes.append(
                f"{key}={shown(value)}: {above} is a value with nothing below it; write {pasteable(above, value)}"
            )
        else:
            self.mistakes.append(("", key, value))
        return len(self.mistakes) > count

    def _read_choice(self, group: str, value: str) -> None:
        choice = value.strip("\"'")
        if choice in self.groups[group]:
            self.typed[group] = value
            self.overrides.append(f"{group}={choice}")
        elif "," in choice:
            self.mistakes.append(f"{group}={shown(value)} holds several values: {_NO_SWEEP}")
        else:
            self.mistakes.append(unknown_choice(group, shown(choice), self.groups[group]))

    def _read_value(self, key: Key, value: str) -> None:
        parsed = self._parsed(key.path, value)
        if parsed is not None and parsed.is_sweep_override():
            parsed = None if key.is_free_text else parsed
        if key.is_free_text:
            self._read_text(key, value, parsed)
        elif parsed is None:
            self.mistakes.append(unfit(key, shown(value), _COMMAND_LINE))
        elif parsed.is_sweep_override():
            remedy = _NO_SWEEP
            if key.kind in ("array", "texts"):
                remedy = f"a list stands in brackets, {pasteable(key.path, f'[{value}]')}"
            self.mistakes.append(f"{key.path}={shown(value)} holds several values: {remedy}")
        else:
            self._accept(key, value, value)

    def _read_text(self, key: Key, value: str, parsed: Override | None) -> None:
        """Text is taken as typed even where Hydra's grammar has other plans for it (``~/books``, ``2024``, ``été``)."""
        if parsed is not None and (value == "null" or isinstance(parsed.value(), str)):
            self._accept(key, value, value)
        elif "=" in value or "," in value:
            # More likely two overrides run together, or a list, than a name.
            quoted = QuotedString(text=value, quote=Quote.double).with_quotes()
            self.mistakes.append(
                f"{key.path}={shown(value)} holds a '{'=' if '=' in value else ','}'; "
                f"if that is meant, quote it: {pasteable(key.path, quoted)}"
            )
        else:
            self._accept(key, value, QuotedString(text=value, quote=Quote.double).with_quotes())

    def _accept(self, key: Key, value: str, for_hydra: str) -> None:
        if "${" in value:
            try:
                OmegaConf.create({"value": value})
            except OmegaConfBaseException:
                reference = pasteable(key.path, "${recipe}")
                self.mistakes.append(f"{key.path}={shown(value)} is no reference to another key; e.g. {reference}")
                return
        self.typed[key.path] = value
        self.overrides.append(f"++{key.path}={for_hydra}")

    def _parsed(self, key: str, value: str) -> Override | None:
        try:
            return self.parser.parse_override(f"{key}={value}")
        except HydraException:
            return None


def _renamed(unknown: Mapping[str, str], plain: Mapping[str, Any]) -> dict[str, Any]:
    """``plain`` with the values of unknown keys that are another framework's name for one key."""
    plain = {name: {**part} if isinstance(part, dict) else part for name, part in plain.items()}
    for name, value in unknown.items():
        section, _, key = next(iter(other_names().keys.get(squeezed(name), [])), "").rpartition(".")
        if isinstance(plain.get(section), dict):
            plain[section][key] = value
    return plain


_NO_SWEEP = "give one, or sweep over them: python train.py -m ..."


def _is_bare(word: str) -> bool:
    """Whether ``word`` can only be the value of the word before it."""
    return "=" not in word and not re.match(r"-{1,2}[A-Za-z]", word)


def _value_above(key: str) -> str | None:
    """The key that is a plain value although ``key`` asks for something below it."""
    parts = key.split(".")
    above = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next((path for path in above if path in all_keys() and not is_section(path)), None)


def _without_missing(node: Any) -> Any:
    """The same data less the keys marked ``???``, for the schema to report as missing; all keys are text."""
    if isinstance(node, dict):
        return {str(key): _without_missing(value) for key, value in node.items() if value != "???"}
    return node


def _relative(name: str, folder: Path) -> str:
    path = Path(name)
    return path.relative_to(folder.parent).as_posix() if path.is_relative_to(folder.parent) else name
