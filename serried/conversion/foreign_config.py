"""Reader of other frameworks' configs: recognizes the format of a file and names its values."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from serried.configs.addresses import is_secret, masked
from serried.configs.errors import UserError
from serried.configs.messages.invalid_values import shown
from serried.configs.plain_data import NotPlainData, flatten, parse_json, parse_yaml, read_bytes, read_yaml
from serried.conversion.shell_command import read_command

_SHARED = "hugging_face"
"""Part of ``formats.yaml`` that is not a format of its own."""
_OFF: tuple[Any, ...] = (None, False, "", 0, [], {}, "none", "no", "None", "False", "false", "off")


class Setting(NamedTuple):
    """Value in a foreign config."""

    name: str
    """Dotted name of the key; for a default, with the name of the framework."""
    value: Any

    def __str__(self) -> str:
        return f"{self.name}={'***' if is_secret(self.name) else masked(shown(_without_secrets(self.value)))}"

    @property
    def is_off(self) -> bool:
        return isinstance(self.value, str | bool | int | list | dict | None) and self.value in _OFF


def _without_secrets(value: Any) -> Any:
    """Return ``value`` with *** for passwords and tokens in nested mappings, and for those that a text assigns, such as
    ``API_KEY=...`` or ``--token ...``."""
    if isinstance(value, list):
        return [_without_secrets(item) for item in value]
    if isinstance(value, dict):
        return {key: "***" if is_secret(str(key)) else _without_secrets(item) for key, item in value.items()}
    if isinstance(value, str):
        assigned = re.compile(r"(?<![\w.-])((?:--)?([\w.-]+)=|--([\w.-]+)\s+)[^\s,;]+")
        return assigned.sub(lambda found: f"{found[1]}***" if is_secret(found[2] or found[3]) else found[0], value)
    return value


@dataclass
class ForeignConfig:
    """Settings from one or more config files, keyed by what they set, such as ``micro_batch``."""

    title: str
    """Name of the framework."""
    path: Path
    """First file."""
    facts: dict[str, Setting] = field(default_factory=dict)
    answers: list[tuple[Setting, str]] = field(default_factory=list)
    """Settings without a counterpart, with an explanation; empty if none is known."""
    undetermined: list[str] = field(default_factory=list)
    """Sentences on flags of the launcher whose value is known only where the script runs."""

    def __contains__(self, fact: str) -> bool:
        return fact in self.facts and self.facts[fact].value is not None

    def said(self, *facts: str) -> str:
        """Return ``key=value`` of the first of ``facts`` in the file, as it is written there."""
        return next((str(self.facts[fact]) for fact in facts if fact in self), facts[0])

    def value(self, fact: str, otherwise: Any = None) -> Any:
        """Return the value of ``fact``; ``otherwise`` if it is missing or null."""
        return self.facts[fact].value if fact in self else otherwise

    def text(self, fact: str, otherwise: str = "") -> str:
        return str(self.value(fact, otherwise))

    def flag(self, fact: str) -> bool:
        """Return whether ``fact`` is set and on: ``auto`` and other texts are on."""
        return fact in self and not self.facts[fact].is_off

    def number(self, fact: str, otherwise: float = 0) -> float:
        """Return the value of ``fact`` as a number. YAML reads ``2e-5`` as text."""
        value = self.value(fact, otherwise)
        try:
            if isinstance(value, bool):
                raise ValueError
            number = float(value)
            if abs(number) < 1e15:  # not inf, not nan
                return int(number) if number == int(number) else number
        except (TypeError, ValueError):
            pass
        raise UserError(f"{self.said(fact)} in {self.path} is not a number; correct it, or leave it out") from None

    def count(self, fact: str, otherwise: int = 1) -> int:
        """Return the value of ``fact`` as a whole number of at least 1."""
        number = self.number(fact, otherwise)
        if number != int(number) or number < 1:
            raise UserError(f"{self.said(fact)} in {self.path} is not a whole number of at least 1; correct it")
        return int(number)

    def numbers(self, fact: str) -> list[float]:
        """Return the value of ``fact``, a list of numbers or their text."""
        value = self.value(fact, [])
        listed = value if isinstance(value, list) else re.findall(r"[\d.eE+-]+", str(value))
        try:
            return [float(item) for item in listed]
        except (TypeError, ValueError):
            raise UserError(f"{self.said(fact)} in {self.path} is not a list of numbers; correct it") from None

    def words(self, fact: str) -> list[str]:
        """Return the value of ``fact`` as texts: a list, or one text with commas."""
        value = self.value(fact, [])
        listed = value if isinstance(value, list) else str(value).split(",")
        return [text for item in listed if (text := str(item).strip())]


def read(paths: Sequence[Path]) -> ForeignConfig:
    """Return the settings of the files. The first file with a model determines defaults; values in it come first.

    Raises ``UserError`` if a file cannot be read, or its format cannot be recognized.
    """
    undetermined: list[str] = []
    read_files = [(path, tree, _recognized(path, tree)) for path, tree in _trees(paths, undetermined)]
    read_files.sort(key=lambda item: item[2] in ("deepspeed", "accelerate"))
    path, tree, name = read_files[0]
    config = ForeignConfig(_formats()[name]["title"], path, undetermined=undetermined)
    needs = _formats()[name].get("trains_if", "*").split()
    if not any(fnmatchcase(key, pattern) for key in (*tree, *flatten(tree)) for pattern in needs):
        raise UserError(
            f"{path} of {config.title} does not describe training; to use a model see serried chat, generate and "
            "evaluate, to merge or convert one serried export"
        )
    for _, tree, name in read_files:
        _add(config, name, tree)
    if isinstance(config.value("deepspeed"), dict):
        _add(config, "deepspeed", config.facts.pop("deepspeed").value)
    elif (beside := _deepspeed_beside(config)) is not None:
        _add(config, "deepspeed", _tree(beside))
    for _, _, name in read_files:
        for fact, value in _formats()[name].get("defaults", {}).items():
            key = next(iter(_names(name).get(fact, [fact])))
            config.facts.setdefault(fact, Setting(f"{_formats()[name]['title']}'s default {key}", value))
    return config


@functools.cache
def _formats() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("formats.yaml"))


def local_path(config: ForeignConfig, named: str) -> str | None:
    """Return the path of a file or folder that ``config`` names; None if it does not exist. It may be relative to the
    current folder or to that of the config."""
    beside = config.path.parent / named
    with suppress(OSError, ValueError):  # a name that is too long, or holds a null byte
        if Path(named).expanduser().exists():
            return named
        if beside.exists():
            return str(beside)
    return None


def titles() -> list[str]:
    """Return the names of the formats."""
    return [each["title"] for name, each in _formats().items() if name != _SHARED]


def _trees(paths: Sequence[Path], undetermined: list[str]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the content of each file. The flags of a shell script replace values of the config that it names; sentences
    on those without a known value are added to ``undetermined``."""
    for path in paths:
        if path.suffix != ".sh":
            yield path, _tree(path)
            continue
        command = read_command(path, _content(path).decode("utf-8", "replace"))
        named = [path.parent / name if (path.parent / name).is_file() else Path(name) for name in command.configs]
        trees = [(config, _tree(config)) for config in named]
        launch = [pair for pair in trees if {"distributed_type", "zero_optimization"} & {*pair[1]}]
        flags = command.flags
        undetermined += command.undetermined
        for _, tree in (pair for pair in trees if pair not in launch):
            flags = {**tree, **flags}
        yield path, flags
        yield from launch


def _content(path: Path) -> bytes:
    what = "serried convert FILE takes a YAML or JSON file, or a shell script"
    try:
        return read_bytes(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {what}") from None
    except NotPlainData as error:
        raise UserError(f"{error}; {what}") from None


def _tree(path: Path) -> dict[str, Any]:
    content = _content(path)
    if path.suffix == ".py" or path.suffix == ".ipynb":
        raise UserError(
            f"{path} is code, which is not run; write its arguments to a YAML file, such as learning_rate: 2e-4, and "
            "convert that file"
        )
    try:
        is_json = path.suffix == ".json" or content.lstrip().startswith(b"{")
        tree = parse_json(content) if is_json else parse_yaml(content)
    except NotPlainData as error:
        raise UserError(f"{path}: {error}; correct the file") from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UserError(f"{path} has no keys with values; serried convert FILE takes {_listed_formats()}")
    return _without_references({key.replace("-", "_").lstrip("_"): value for key, value in tree.items()})


def _without_references(tree: dict[str, Any]) -> dict[str, Any]:
    """Return ``tree`` with ``${name}`` in texts replaced by the text of a top-level key, as torchtune does."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        return _filled_text(value, tree) if isinstance(value, str) else value

    return {key: filled(value) for key, value in tree.items()}


def _filled_text(text: str, tree: Mapping[str, Any]) -> str:
    def known(found: re.Match[str]) -> str:
        value = tree.get(found[1])
        return str(value) if isinstance(value, str | int | float) else found[0]

    return re.sub(r"\$\{(\w+)\}", known, text)


def _listed_formats() -> str:
    *some, last = titles()
    return f"a config of {', '.join(some)} or {last}"


def _recognized(path: Path, tree: Mapping[str, Any]) -> str:
    names = [*tree, *flatten(tree)]
    for name, each in _formats().items():
        for line in each.get("marks", ()) if each.get("without") not in tree else ():
            if all(any(fnmatchcase(key, mark) for key in names) for mark in line.split()):
                return str(name)
    known = {"model", "trainer", "optim", "data", "parallel"} & {*tree}
    if "trainer" in known and len(known) > 2:
        raise UserError(
            f"{path} is a config of serried; train with it: python train.py --config-dir FOLDER recipe=NAME"
        )
    raise UserError(
        f"{path} has an unknown format; serried convert FILE takes {_listed_formats()}; to look up a single "
        "key, type it: python train.py learning_rate=2e-4"
    )


@functools.cache
def _names(name: str) -> dict[str, list[str]]:
    """Return the names of each fact in a format, the preferred one first. Its own names replace shared ones."""
    each = _formats()[name]
    shared = _names(each["includes"]) if "includes" in each else {}
    own = {fact: names.split() for fact, names in each["facts"].items()}
    return {fact: [*own.get(fact, ()), *shared.get(fact, ())] for fact in {**own, **shared}}


def _patterns(name: str, key: str) -> Iterator[tuple[str, str]]:
    """Yield the patterns of keys that a format leaves out, with an explanation; empty for those that change nothing."""
    each = _formats()[name]
    for entry in each.get("answers", ()):
        yield from ((pattern, entry["answer"]) for pattern in entry["keys"].split())
    yield from ((pattern, "") for pattern in each.get("silent", "").split())
    if "includes" in each:
        yield from _patterns(each["includes"], key)


def _add(config: ForeignConfig, name: str, tree: Mapping[str, Any]) -> None:
    """Add the settings in ``tree`` to ``config``. Values that are there already stay."""
    wholes = {key for names in _names(name).values() for key in names}
    settings = dict(_settings(tree, "", wholes))
    if _formats()[name].get("flat"):  # sections of such a file have names of their own
        settings = {key.rpartition(".")[2]: value for key, value in settings.items()}
    if name in ("deepspeed", "accelerate"):
        settings = {key: value for key, value in settings.items() if value != "auto" or key.endswith(".enabled")}
    used: set[str] = set()
    for fact, names in _names(name).items():
        present = [key for key in names if key in settings]
        used.update(present)
        if stated := [key for key in present if settings[key] is not None]:
            config.facts.setdefault(fact, Setting(stated[0], settings[stated[0]]))
    for key, value in settings.items():
        setting = Setting(key, value)
        if key in used or setting.is_off or any(key.startswith(f"{whole}.") for whole in used):
            continue
        found = next((answer for pattern, answer in _patterns(name, key) if fnmatchcase(key, pattern)), None)
        if found is None:
            config.answers.append((setting, ""))
        elif found:
            config.answers.append((setting, found))


def _settings(tree: Mapping[str, Any], above: str, wholes: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by their dotted names. Mappings whose name is in ``wholes`` are values."""
    for key, value in tree.items():
        path = f"{above}{key}"
        if path in wholes:
            yield path, value
        if isinstance(value, dict) and value:
            yield from _settings(value, f"{path}.", wholes)
        elif path not in wholes:
            yield path, value


def _deepspeed_beside(config: ForeignConfig) -> Path | None:
    """Return the DeepSpeed file that the config names, if it exists."""
    named = config.value("deepspeed")
    if not isinstance(named, str) or not named.endswith(".json"):
        return None
    places = (config.path.parent / named, Path(named), config.path.parent / Path(named).name)
    return next((place for place in places if place.is_file()), None)
