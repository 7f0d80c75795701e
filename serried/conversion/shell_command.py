"""Reader of shell scripts that start another framework with flags, such as ``trl sft --model_name_or_path ...``."""

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData, parse_yaml

_TASKS = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "cpo", "orpo")
"""Commands of ``trl``."""
_PROGRAM = re.compile(r"\b(accelerate|axolotl|deepspeed|llamafactory-cli|torchrun|trl|tune|python3?)\b")
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
_CONFIG = re.compile(r"\.(ya?ml|json)$")


class ShellCommand(NamedTuple):
    """A command that starts training."""

    flags: dict[str, Any]
    """Values by key, with ``num_processes`` and ``num_machines`` of the launcher."""
    configs: list[str]
    """Config files that it names."""


def read_command(path: Path, text: str) -> ShellCommand:
    """Return the first command in a shell script that starts a training program. Nothing is run.

    Raises ``UserError`` if there is none.
    """
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        named = [index for index, word in enumerate(words) if _PROGRAM.search(word)]
        if named and any(word.startswith("--") or _CONFIG.search(word) for word in words):
            return _command(words[: named[0]], words[named[0] :])
    raise UserError(f"{path} has no line that starts training, such as trl sft --model_name_or_path NAME; correct it")


def _command(before: list[str], words: list[str]) -> ShellCommand:
    flags: dict[str, Any] = {}
    configs: list[str] = []
    key = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            flags[key] = _value(value) if equals else True
            key = "" if equals else key
        elif word.endswith(".py") or _PROGRAM.fullmatch(word):  # what the launcher starts; it takes flags of its own
            key = ""
            if Path(word).stem in _TASKS:
                flags["rl"] = Path(word).stem
        elif _OVERRIDE.match(word):  # of torchtune
            name, _, value = word.partition("=")
            flags[name], key = _value(value), ""
        elif key:
            flags[key] = _value(word) if flags[key] is True else [*_listed(flags[key]), _value(word)]
        elif _CONFIG.search(word):
            configs.append(word)
    for name in ("config", "config_file"):
        if isinstance(flags.get(name), str):
            configs.append(flags.pop(name))
    if Path(words[0]).name == "trl" and words[1:2] and words[1] in _TASKS:
        flags["rl"] = words[1]
    visible = next((word.partition("=")[2] for word in before if word.startswith("CUDA_VISIBLE_DEVICES=")), "")
    nodes = flags.pop("nnodes", flags.get("num_machines", 1))
    per_node = flags.pop("nproc_per_node", flags.pop("num_gpus", None))
    per_node, nodes = _listed(per_node)[0], _listed(nodes)[0]  # the script may follow the number
    if isinstance(per_node, int) and isinstance(nodes, int):
        flags["num_processes"], flags["num_machines"] = per_node * nodes, nodes
    elif visible and "num_processes" not in flags:
        flags["num_processes"] = len(visible.split(","))
    return ShellCommand(flags, configs)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _value(text: str) -> Any:
    """Return the value of a flag: a number, true or false, null, or the text."""
    try:
        value = parse_yaml(text)
    except NotPlainData:
        return text
    return value if isinstance(value, bool | int | float | None) or text.startswith(("[", "{")) else text
