"""Reader of shell scripts that start another framework with flags, such as ``trl sft --model_name_or_path ...``."""

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData, parse_yaml

_TASKS = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "cpo", "orpo")
"""Commands of ``trl``."""
_NODES = ("nnodes", "num_nodes", "num_machines", "NNODES")
_PER_NODE = ("nproc_per_node", "num_gpus", "NPROC_PER_NODE")
_PROGRAM = re.compile(r"\b(accelerate|axolotl|deepspeed|llamafactory-cli|torchrun|trl|tune|python3?)\b")
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
_CONFIG = re.compile(r"\.(ya?ml|json)$")


class ShellCommand(NamedTuple):
    """A command that starts training."""

    flags: dict[str, Any]
    """Values by key, with ``num_processes`` and ``num_machines`` of the launcher."""
    configs: list[str]
    """Config files that it names."""
    undetermined: list[str]
    """Sentences on numbers of GPUs and nodes that are known only where the script runs."""


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
    environment = dict(word.split("=", 1) for word in before if "=" in word)
    if Path(words[0]).name == "llamafactory-cli":  # which starts torchrun with these variables
        flags.update({name: _value(environment[name]) for name in ("NNODES", "NPROC_PER_NODE") if name in environment})
    return ShellCommand(flags, configs, _set_processes(flags, environment.get("CUDA_VISIBLE_DEVICES", "")))


def _set_processes(flags: dict[str, Any], visible: str) -> list[str]:
    """Set ``num_processes`` and ``num_machines`` in ``flags`` from the flags of all launchers. Return a sentence if the
    script leaves them open. ``visible``: GPUs by number, if it lists some."""
    names = (*_NODES, *_PER_NODE, "num_processes")
    stated = {name: _listed(flags.pop(name))[0] for name in names if name in flags}  # the script may follow the number
    nodes = next((stated[name] for name in _NODES if name in stated), 1)
    per_node = next((stated[name] for name in _PER_NODE if name in stated), None)
    if visible and nodes == 1 and per_node in (None, "gpu", "auto") and "num_processes" not in stated:
        stated["CUDA_VISIBLE_DEVICES"] = visible
        per_node = len(visible.split(",")) if re.fullmatch(r"[\w/-]+(,[\w/-]+)*", visible) else visible
    if per_node is None and {*stated} <= {"num_processes", "num_machines"}:  # the config may state the other
        if all(type(value) is int for value in stated.values()):
            flags.update(stated)
            return []
    elif type(per_node) is int and type(nodes) is int:
        flags["num_processes"], flags["num_machines"] = per_node * nodes, nodes
        return []
    said = " ".join(f"{'--' * name.islower()}{name}={value}" for name, value in stated.items())
    return [f"{said}: the script does not state the number of GPUs; convert with gpus=N, the GPUs of all nodes"]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _value(text: str) -> Any:
    """Return the value of a flag: a number, true or false, null, or the text."""
    try:
        value = parse_yaml(text)
    except NotPlainData:
        return text
    if isinstance(value, int | float) and ":" in text:  # YAML reads 1:30 as 90
        return text
    return value if isinstance(value, bool | int | float | None) or text.startswith(("[", "{")) else text
