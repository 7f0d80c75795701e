"""Text of ``--help``, generated from the YAML files and the docstrings of the schema. Needs no Hydra."""

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from serried.configs.formats import columns
from serried.configs.messages.keys import all_keys, own_keys
from serried.configs.schema.declaration import declared
from serried.configs.schema.run_config import CHOSEN

_WIDTH = 108

_COMMON_KEYS = (
    "trainer.steps", "trainer.global_batch", "trainer.micro_batch", "trainer.max_grad_norm", "trainer.seed",
    "trainer.deterministic", "trainer.log_every", "trainer.eval_every", "optim.lr", "optim.weight_decay",
    "schedule.warmup_steps", "data.path", "data.tokenizer", "data.sequence_length", "model.dim", "model.layers",
    "parallel.replicate", "parallel.shard", "parallel.reshard_after_forward", "run.name", "run.dir",
    "checkpoint.every", "checkpoint.resume", "trainer.stop_at", "trainer.max_minutes", "launch.processes",
    "launch.device", "dry_run",
)  # fmt: skip

_EXAMPLES = (
    ("python train.py", "recipe tiny, one process"),
    ("torchrun --nproc_per_node=2 train.py parallel=fsdp precision=bf16", "two processes, another parallel layout"),
    ("python train.py data=text data.path='books/*.txt' run.name=books", "your own text"),
    ("python train.py -m optim.lr=1e-3,3e-3 model.layers=2,4", "a sweep: four runs, compared in a table"),
    ("python train.py recipe=llama8b launch.processes=8 dry_run=true", "the plan for another machine"),
)


def choices_of() -> dict[str, list[str]]:
    """Return the groups and their choices, with registered names; ``recipe`` first, choices in natural order (8b before
    70b)."""
    named = {group: registry.names() for group, registry in CHOSEN.items() if registry.key == "name"}
    files = files_of()
    return {group: sorted({*choices, *named.get(group, [])}, key=_natural) for group, choices in files.items()}


def files_of() -> dict[str, list[str]]:
    """Return the choices that have a YAML file, as a mapping from config group to their names."""
    found: dict[str, list[str]] = {"recipe": []}
    for path in sorted(path for folder in declared().folders for path in folder.glob("*/*.yaml")):
        found.setdefault(path.parent.name, []).append(path.stem)
    own = () if declared().sections else ("model", "data")
    if not declared().sections:  # the shipped recipes are for the built-in tasks
        found["recipe"] = [path.stem for folder in declared().config_dirs for path in folder.glob("recipe/*.yaml")]
    return {group: names for group, names in found.items() if names and group not in own}


def help_text(program: str = "train.py", chosen: Sequence[str] = ()) -> str:
    """Return the usage of ``program``, its recipes, groups, the common keys with their units, and examples.

    A choice such as ``optim=sgd`` among the overrides ``chosen`` adds the keys of this choice.
    """
    groups, known = choices_of(), all_keys()
    has_recipes = bool(groups.pop("recipe", None))
    own = [path for path in known if path.startswith("task.") and path != "task.name" and declared().name]
    keys = [
        (path, _first_sentence(known[path].purpose, _WIDTH - 34)) for path in (*own, *_COMMON_KEYS) if path in known
    ]
    is_built_in = bool(declared().sections)
    about = "Train a language model" if is_built_in else f"Train {declared().name}"
    recipes = "recipe=NAME sets everything below; overrides take precedence" + " (default: tiny)" * is_built_in
    return "\n".join(
        [
            f"{about}, on one process or many.",
            "",
            f"usage: python {program} [key=value ...]",
            f"       torchrun --nproc_per_node=N {program} [key=value ...]",
            f"       python {program} [key=value ...] --cfg job      print the config and stop",
            f"       python {program} --config-dir FOLDER ...        YAML presets of your own: FOLDER/recipe/NAME.yaml",
            f"       python {program} --callback MODULE:CLASS ...    a serried.Callback of your own",
            "",
            *([f"recipes: {recipes}", recipes_text(), ""] if has_recipes else []),
            "groups: each choice sets several keys",
            *_table([row for group, choices in groups.items() for row in _wrapped(group, " | ".join(choices))]),
            "",
            *_keys_of_choices(chosen),
            "common keys; counts may be written 1e3, 10k, 2M (all keys: --cfg job, explained in "
            "docs/reference/configuration.md)",
            *_table(keys),
            *(["", "examples", *_table(_EXAMPLES)] if is_built_in else []),
        ]
    )


def _keys_of_choices(words: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for group, _, name in (word.partition("=") for word in words):
        if group in CHOSEN and CHOSEN[group].key == "name" and name in CHOSEN[group].names():
            keys = own_keys(group, name)
            rows = [(path, _first_sentence(key.purpose, _WIDTH - 34)) for path, key in keys.items()]
            lines += [f"keys of {group}={name}" + ("" if rows else ": none of its own"), *_table(rows), ""]
    return lines


def recipes_text() -> str:
    """Return a table of the recipes with the first comment of each YAML file."""
    files = {path.stem: path for folder in reversed(declared().folders) for path in folder.glob("recipe/*.yaml")}
    return "\n".join(_table([(name, _first_comment(files[name])) for name in choices_of()["recipe"]]))


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"  {line}" for line in columns(rows)]


def _wrapped(name: str, text: str) -> list[tuple[str, str]]:
    lines = wrap(text, _WIDTH - 14)
    return list(zip([name, *[""] * len(lines)], lines, strict=False))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _first_comment(file: Path) -> str:
    lines = (line[1:].strip() for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    return next((line for line in lines if not line.startswith("@package")), "")


def _first_sentence(purpose: str, width: int) -> str:
    """Shorten ``purpose`` to the sentences, or else clauses, that fit into ``width``."""
    text = purpose.replace("``", "")
    for mark in (". ", "; "):
        while len(text) > width and mark in text:
            text = text[: text.rindex(mark)]
    return text.rstrip(".")
