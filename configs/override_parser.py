"""Parser of the command line of ``train.py``: accepted overrides, and a sentence for each mistake."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from serried.configs.addresses import has_password
from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import UserError
from serried.configs.messages.invalid_values import shown, unfit
from serried.configs.messages.keys import Key, all_keys, is_section
from serried.configs.messages.suggestions import (
    Groups,
    advice,
    listing,
    meant,
    other_names,
    pasteable,
    squeezed,
    unknown_choice,
    unknown_key,
)
from serried.configs.plain_data import expanded, flatten
from serried.configs.schema.declaration import FOLDER
from serried.configs.subcommand_arguments import last_of_each

COMMAND_LINE = "command line"
Action = Literal["train", "help", "config", "sweep"]
_CONFIG_DIR = "--config-dir="
_PLAIN_TEXTS = re.compile(r"""\[([^][{}"'$\\]+)\]""")
"""A list of texts without quotes, such as ``[<tool>,</tool>]``, which Hydra's grammar may not read."""
_NO_SWEEP = "give one, or sweep over them: python train.py -m ..."


def parse_arguments(argv: Sequence[str]) -> tuple[Action, list[str]]:
    """Split the flags ``--help``, ``--cfg job`` and ``-m`` from the overrides; the first in this order wins.

    Other flags stay among the overrides, where ``compose`` refuses them.
    """
    action: Action = "train"
    overrides: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("--help", "-h"):
            return "help", [*overrides, *words]
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
    """Split each ``--config-dir FOLDER`` from the overrides. Raises ``UserError`` if there is no such folder, or it
    contains a file with the name of a shipped file, which would take precedence."""
    overrides, folders = [], []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--config-dir":
            if not words:
                raise UserError("--config-dir needs a folder of YAML files after it: --config-dir FOLDER")
            word = f"{word}={words.pop(0)}"
        if word.startswith(_CONFIG_DIR):
            folders.append(expanded(word.removeprefix(_CONFIG_DIR)).absolute())
        else:
            overrides.append(word)
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--config-dir {folder} is not a folder; use one that has recipe/, model/, data/, ...")
        hidden = [path for path in folder.glob("*/*.yaml") if (FOLDER / path.relative_to(folder)).exists()]
        if hidden:
            raise UserError(f"{hidden[0]} has the name of a built-in preset, so it would be ignored; rename it")
    return overrides, tuple(folders)


class _Unknown(NamedTuple):
    """A word with an unknown key. The sentence may depend on the rest of the config."""

    word: str
    """The word as typed if it is not ``key=value``, else empty."""
    key: str
    value: str


@dataclass
class CommandLine:
    """A command line, read word by word; mistakes are collected, not raised."""

    groups: Groups
    typed: dict[str, str] = field(default_factory=dict)
    """Accepted overrides as typed, by key or group."""
    choices: dict[str, str] = field(default_factory=dict)
    """Choices, by group."""
    values: dict[str, Any] = field(default_factory=dict)
    """Values, by key."""
    mistakes: list[str | _Unknown] = field(default_factory=list)

    def read(self, argv: Sequence[str]) -> "CommandLine":
        """Read all words. The last value of a repeated key counts."""
        words = last_of_each(argv)
        while words:
            word = words.pop(0)
            key, equals, value = word.partition("=")
            if equals and word[0] not in "-~":
                self._read_override(key.lstrip("+").strip(), value.strip())
            elif word.startswith("~"):
                instead = _another_value(key.lstrip("~")) or f"the command without {word}"
                self.mistakes.append(f"{word}: keys cannot be deleted; use {instead}")
            else:
                key, _, value = re.sub("^([^=:]+):", r"\1=", word.lstrip("-")).partition("=")
                is_value = not value and (word.startswith("-") or key in self.groups or key in all_keys())
                if is_value and words and "=" not in words[0] and not re.match(r"-{1,2}[A-Za-z]", words[0]):
                    value = words.pop(0)
                    word = f"{word} {value}"
                self._refuse_word(word, key.replace("-", "_") if word.startswith("-") else key, value)
        return self

    def sentences(self, plain: Mapping[str, Any]) -> list[str]:
        """Return a sentence for each mistake.

        ``plain``: the config composed from the accepted overrides, if known, for numbers in the sentences.
        """
        known = other_names().keys
        unknown = [word for word in self.mistakes if isinstance(word, _Unknown) and squeezed(word.key) in known]
        at = flatten(plain) | {known[squeezed(word.key)][0]: word.value for word in unknown}
        return [word if isinstance(word, str) else self._sentence(word, at) for word in self.mistakes]

    def _sentence(self, unknown: _Unknown, at: Mapping[str, Any]) -> str:
        word, key, value = unknown
        if word:
            return f"{shown(word)}: {advice(key, value, at)}"
        return unknown_key(key, shown(value), COMMAND_LINE, self.groups, at)

    def _refuse_word(self, word: str, key: str, value: str) -> None:
        """Refuse ``word``, a flag or a word without ``=``. The user may have meant ``key=value``."""
        homes = [group for group, choices in self.groups.items() if word in choices]
        is_flag = word.startswith("-")
        if homes:
            group = "recipe" if "recipe" in homes else homes[0]
            self.mistakes.append(f"{word}: an override is key=value; write {group}={word}")
        elif is_flag and key and advice(key, value):
            self.mistakes.append(_Unknown(word, key, value))
        elif key and (overrides := meant(key, value, self.groups)):
            rule = "overrides have no dashes" if is_flag else "an override is key=value"
            self.mistakes.append(f"{shown(word)}: {rule}; write {' or '.join(overrides)}")
        elif is_flag:
            self.mistakes.append(
                f"unknown flag {shown(word)}; the flags are --help, --cfg job, --config-dir FOLDER, --callback NAME "
                "and -m; everything else is key=value, without dashes"
            )
        else:
            example = "--help" if word == "help" else "recipe=tiny" if "recipe" in self.groups else "trainer.steps=1000"
            self.mistakes.append(f"{shown(word) or repr(word)}: an override is key=value; e.g. {example}")

    def _read_override(self, key: str, value: str) -> None:
        if mistake := self._mistake(key, value):
            self.mistakes.append(mistake)
        elif key in self.groups:
            self._read_choice(key, value)
        else:
            self._read_value(all_keys()[key], value)

    def _mistake(self, key: str, value: str) -> str | _Unknown | None:
        """Return why ``key`` cannot be given a value; None if it can."""
        section, _, leaf = key.rpartition(".")
        if not key:
            return f"={shown(value)} has no key before the =; e.g. trainer.steps=1000"
        if key == "recipe" and key not in self.groups:
            return (
                f"recipe={shown(value)}: the built-in recipes are for language models, and this task does not use "
                "them; leave it out, or add your own recipes with --config-dir FOLDER (FOLDER/recipe/NAME.yaml)"
            )
        if key in ("model", "data") and key not in self.groups and f"task.{key}" not in all_keys():
            return f"{key}={shown(value)}: this task defines its own {key}; leave it out"
        if key in self.groups or key in all_keys():
            if not value:
                return f"{key}= has no value; e.g. {_another_value(key) or f'{key}={chr(124).join(self.groups[key])}'}"
            if leaf in ("name", "strategy") and value in self.groups.get(section, []):
                # It would change the label but no key of the choice.
                return f"{key}={value} sets only the name of the choice; write {section}={value}"
            return None
        if leaf in all_keys().named.get(section, ()):
            return f"{key}={shown(value)}: write {section}.NAME.{leaf}, with a name of your choice"
        if is_section(key) and f"task.{key}" not in all_keys() and squeezed(key) not in other_names().advice:
            return f"{key}={shown(value)}: {key} is a section, not a key; {listing(key)}"
        return _Unknown("", key, value)

    def _read_choice(self, group: str, value: str) -> None:
        choice = value.strip("\"'")
        if choice in self.groups[group]:
            self.typed[group], self.choices[group] = value, choice
        elif "," in choice:
            self.mistakes.append(f"{group}={shown(value)} has several values: {_NO_SWEEP}")
        else:
            self.mistakes.append(unknown_choice(group, shown(choice), self.groups[group]))

    def _read_value(self, key: Key, value: str) -> None:
        parsed = _parsed(key.path, value)
        is_several = parsed is not None and parsed.is_sweep_override()
        if key.is_free_text:
            self._read_text(key, value, None if is_several else parsed)
        elif parsed is None and key.kind == "texts" and (texts := _PLAIN_TEXTS.fullmatch(value)):
            self._accept(key, value, [text.strip() for text in texts[1].split(",")])
        elif parsed is None:
            self.mistakes.append(unfit(key, shown(value), COMMAND_LINE))
        elif is_several:
            in_brackets = f"write a list in brackets, {pasteable(key.path, f'[{value}]')}"
            remedy = in_brackets if key.takes_list else _NO_SWEEP
            self.mistakes.append(f"{key.path}={shown(value)} has several values: {remedy}")
        else:
            self._accept(key, value, parsed.value())

    def _read_text(self, key: Key, value: str, parsed: Override | None) -> None:
        """Take text as typed even if Hydra's grammar reads it as something else (``~/books``, ``2024``, ``été``)."""
        if parsed is not None and (value == "null" or isinstance(parsed.value(), str)):
            self._accept(key, value, parsed.value())
        elif is_bucket_url(value) and has_password(value):
            self._accept(key, value, value)  # the check of the URL refuses it without repeating the password
        elif "=" in value or "," in value:
            # Probably two joined overrides or a list rather than a name.
            quoted = QuotedString(text=value, quote=Quote.double).with_quotes()
            self.mistakes.append(
                f"{key.path}={shown(value)} contains a '{'=' if '=' in value else ','}'; "
                f"if this is intended, quote the value: {pasteable(key.path, quoted)}"
            )
        else:
            self._accept(key, value, value)

    def _accept(self, key: Key, typed: str, value: Any) -> None:
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException:
            reference = pasteable(key.path, "${recipe}")
            self.mistakes.append(f"{key.path}={shown(typed)} is not a valid reference to another key; e.g. {reference}")
        else:
            self.typed[key.path], self.values[key.path] = typed, value


@functools.lru_cache(maxsize=1024)  # the runs of a sweep repeat most overrides
def _parsed(key: str, value: str) -> Override | None:
    try:
        return _parser().parse_override(f"{key}={value}")
    except HydraException:
        return None


@functools.cache
def _parser() -> OverridesParser:
    """Return Hydra's parser. Cached, since creating it takes longer than parsing most overrides."""
    return OverridesParser.create()


def _another_value(key: str) -> str:
    """Return overrides that set ``key`` to another value; empty if there is no such key."""
    found = all_keys().get(key)
    return f"{found.example}{f', or {key}=null for none' if found.nullable else ''}" if found else ""
