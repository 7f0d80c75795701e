"""The text of ``--help``, made from the YAML files and the docstrings of the schema. Needs no Hydra."""

import re
from collections.abc import Sequence
from pathlib import Path

from serried.configs.keys import all_keys
from serried.configs.run_config import CHOSEN

_FOLDER = Path(__file__).resolve().parent
_WIDTH = 108

_COMMON_KEYS = (
    "trainer.steps",
    "trainer.global_batch",
    "trainer.micro_batch",
    "trainer.max_grad_norm",
    "trainer.seed",
    "trainer.deterministic",
    "trainer.log_every",
    "trainer.eval_every",
    "optim.lr",
    "optim.weight_decay",
    "schedule.warmup_steps",
    "data.path",
    "data.tokenizer",
    "data.sequence_length",
    "model.dim",
    "model.layers",
    "parallel.replicate",
    "parallel.shard",
    "parallel.reshard_after_forward",
    "run.name",
    "run.dir",
    "checkpoint.every",
    "checkpoint.resume",
    "trainer.stop_at",
    "trainer.max_minutes",
    "launch.processes",
    "launch.device",
    "dry_run",
)

_EXAMPLES = (
    ("python train.py", "recipe tiny, one process"),
    ("torchrun --nproc_per_node=2 train.py parallel=fsdp precision=bf16", "two processes, another parallel layout"),
    ("python train.py data=text data.path='books/*.txt' run.name=books", "your own text"),
    ("python train.py -m optim.lr=1e-3,3e-3 model.layers=2,4", "a sweep: four runs, compared in a table"),
    ("python train.py recipe=llama8b launch.processes=8 dry_run=true", "the plan for another machine"),
)


def choices_of(folder: Path = _FOLDER) -> dict[str, list[str]]:
    """The groups in ``folder`` and their choices, registered names among them; ``recipe`` first, choices in natural
    order (8b before 70b)."""
    named = {group: registry.names() for group, registry in CHOSEN.items() if registry.key == "name"}
    files = files_of(folder)
    return {group: sorted({*choices, *named.get(group, [])}, key=_natural) for group, choices in files.items()}


def files_of(folder: Path = _FOLDER) -> dict[str, list[str]]:
    """The groups in ``folder`` and the choices that have a YAML file there."""
    groups = sorted(
        (path for path in folder.iterdir() if path.is_dir()), key=lambda path: (path.name != "recipe", path)
    )
    choices = {group.name: [file.stem for file in group.glob("*.yaml")] for group in groups}
    return {group: names for group, names in choices.items() if names}


def help_text(folder: Path = _FOLDER) -> str:
    """Usage, recipes, groups, common keys and examples."""
    groups = choices_of(folder)
    del groups["recipe"]
    keys = [(path, _first_sentence(all_keys()[path].purpose, _WIDTH - 34)) for path in _COMMON_KEYS]
    return "\n".join(
        [
            "Train a language model, on one process or many.",
            "",
            "usage: python train.py [key=value ...]",
            "       torchrun --nproc_per_node=N train.py [key=value ...]",
            "       python train.py [key=value ...] --cfg job      print the config and stop",
            "",
            "recipes: recipe=NAME chooses everything below; overrides come on top (default: tiny)",
            recipes_text(folder),
            "",
            "groups: each chooses a set of keys",
            *_table([(group, " | ".join(choices)) for group, choices in groups.items()]),
            "",
            "common keys; counts may be written 1e3, 10k, 2M (all keys: --cfg job, explained in configs/schema.py)",
            *_table(keys),
            "",
            "examples",
            *_table(_EXAMPLES),
        ]
    )


def recipes_text(folder: Path = _FOLDER) -> str:
    """Recipes with their first comment."""
    names = choices_of(folder)["recipe"]
    return "\n".join(_table([(name, _first_comment(folder / "recipe" / f"{name}.yaml")) for name in names]))


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(left) for left, _ in rows)
    return [f"  {left:<{width}}  {right}".rstrip() for left, right in rows]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _first_comment(file: Path) -> str:
    lines = (line[1:].strip() for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    return next((line for line in lines if not line.startswith("@package")), "")


def _first_sentence(purpose: str, width: int) -> str:
    """As many whole sentences, or else clauses, of ``purpose`` as fit into ``width``."""
    text = purpose.replace("``", "")
    for mark in (". ", "; "):
        while len(text) > width and mark in text:
            text = text[: text.rindex(mark)]
    return text.rstrip(".")
