"""Generate the tables of docs/reference/configuration.md (``python -m tools.key_tables``), coming-from.md (``...
coming-from``) and families.md (``... families``), and ``configs/schema/transformers_defaults.py`` (``...
transformers-defaults``)."""

import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from serried.configs.compose import compose
from serried.configs.help import choices_of
from serried.configs.hugging_face.model_folder import ANY_FAMILY
from serried.configs.messages.keys import Key, all_keys, key_notes, readers
from serried.configs.plain_data import flatten
from serried.configs.schema.registry import models, tasks
from serried.configs.schema.run_config import CHOSEN
from serried.recipes.models.family import family_of

_FRAMEWORKS = {"hf": "HF Trainer", "titan": "torchtitan", "lightning": "Lightning", "nanogpt": "nanoGPT"}


def key_tables() -> str:
    """Return Markdown tables of the keys of each section, with separate tables for keys of only some choices, and the
    values that recipes set."""
    recipes = {name: _texts(compose([f"recipe={name}"]).model_dump(mode="json")) for name in choices_of()["recipe"]}
    values = recipes["tiny"]
    for group, registry in CHOSEN.items():
        for entry in map(registry.get, registry.names()):
            optional = {name: each for name, each in entry.section.model_fields.items() if not each.is_required()}
            defaults = {
                f"{group}.{name}": each.get_default() for name, each in optional.items() if not each.default_factory
            }
            if registry.key == "name" and group != "data":  # most sources need keys that no YAML file sets
                defaults = compose([f"{group}={entry.name}"]).model_dump(mode="json")
            values = _texts(defaults) | values
    for entry in tasks.entries():
        of_task = {
            name: each.get_default() for name, each in entry.section.model_fields.items() if not each.is_required()
        }
        values = _texts({f"task.{name}": value for name, value in of_task.items()}) | values
    named = [key for keys in all_keys().named.values() for key in keys.values()]
    sections: dict[str, dict[str, list[Key]]] = {}
    for key in [*all_keys().values(), *named]:
        section = key.path.rpartition(".")[0]
        sections.setdefault(section.partition(".")[0], {}).setdefault(_which(key), []).append(key)
    lines = []
    for name, by_choice in sections.items():
        lines += [f"### {_code(name) or 'The run as a whole'}", ""]
        # Keys of all choices come first.
        for which, keys in sorted(by_choice.items(), key=lambda item: item[0] != ""):
            rows = [(f"`{key.path}`", _code(values.get(key.path, "")), _purpose(key)) for key in keys]
            lines += [*([f"{which}:", ""] if which else []), *_table(("Key", "Default", "Meaning"), rows), ""]
    lines += ["### What recipes set", "", "Values of `tiny` are the defaults above; other recipes set:", ""]
    for name, chosen in recipes.items():
        differing = [f"{path}={value}" for path, value in chosen.items() if value != recipes["tiny"].get(path)]
        words = [word for word in differing if word.partition("=")[0] not in ("recipe", "run.name", "run.dir")]
        if words:
            lines += [f"`recipe={name}`", "", "```", *textwrap.wrap(" ".join(words), 118, **_WHOLE_WORDS), "```", ""]
    return "\n".join(lines).rstrip()


_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}


def _which(key: Key) -> str:
    """Return the choices whose section has the key; empty if all sections have it."""
    group, names = key.path.partition(".")[0], readers(key.path)
    if group == tasks.group:
        names = [entry.name for entry in tasks.entries() if key.field_name in entry.section.model_fields]
        chosen, known = "task.name", tasks.names()
    elif not names:
        return ""
    else:
        chosen = group if CHOSEN[group].key == "name" else f"{group}.{CHOSEN[group].key}"
        known = CHOSEN[group].names()
    others = [name for name in known if name not in (*names, ANY_FAMILY if group == "model" else "")]
    if not others:
        return ""
    return f"`{chosen}={'|'.join(names)}`" if len(names) <= len(others) else f"All but `{chosen}={'|'.join(others)}`"


def _purpose(key: Key) -> str:
    kind = _type(key)
    return f"{key.purpose.replace('``', '`')} *{kind[0].upper()}{kind[1:]}.*"


def _texts(tree: Any) -> dict[str, str]:
    return {key: leaf if isinstance(leaf, str) else json.dumps(leaf) for key, leaf in flatten(tree).items()}


def _type(key: Key) -> str:
    words = key.expected.removeprefix("a ")
    return f"{words}, {key.bounds}" if key.bounds else words


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


def coming_from() -> str:
    """Return other frameworks' names for each key, as the Markdown tables of docs/reference/coming-from.md."""
    keys, others = [], []
    for target, known in key_notes()["names"].items():
        if "=" in target:
            others.append([f"`{target}`", _plain(known)])
        elif ":" in known:
            words = [word.rpartition(":") for word in known.split()]
            row = [[name for tag, _, name in words if tag == framework] for framework in [*_FRAMEWORKS, ""]]
            keys.append([f"`{target}`", *(", ".join(map(_code, cell)) for cell in row)])
    for entry in key_notes()["advice"]:
        others.append([re.sub(r"\{\w+\}", "N", entry["answer"]), _plain(entry["names"])])
    head = ["Here", *_FRAMEWORKS.values(), "Also"]
    return "\n".join([*_table(head, keys), "", *_table(["Here", "Elsewhere"], others)])


def families() -> str:
    """Return the model families as the Markdown table of docs/reference/families.md."""
    presets = {
        name: compose([f"model={name}", "data.tokenizer=bytes"]).model
        for name in choices_of()["model"]
        if name not in ("auto", ANY_FAMILY)
    }
    rows = []
    for entry in models.entries():
        if entry.name == ANY_FAMILY:
            continue  # not one architecture
        own = {name: section for name, section in presets.items() if section.family == entry.name}
        # A mixture-of-experts family without a preset is described by moe_tiny.
        section = next(iter(own.values()), presets["moe_tiny"].model_copy(update={"family": entry.name}))
        family = family_of(entry.load(), section, 257)
        plan = family.parallel_plan(family.build())
        declared = {"tensor": plan.roles, "context": plan.context, "pipeline": plan.blocks, "expert": plan.mixtures}
        reads = family.export_config(None)["architectures"][0]
        axes = ", ".join(axis for axis, names in declared.items() if names)
        form = (entry.section.__doc__ or "").removeprefix("Architecture of ").rstrip(".")
        rows.append((_code(entry.name), _code(reads), form, ", ".join(map(_code, own)), axes))
    return "\n".join(_table(("`model.family`", "Opens", "Architecture", "Presets", "Axes besides data parallel"), rows))


_NO_ARCHITECTURE = re.compile("drop|router|summary|use_cache|initializer|pretraining_tp|[be]os_token|mtp")
"""Fields that do not describe the model, but its training or generation in transformers."""
_JOINED = ":\N{NO-BREAK SPACE}"
"""Colon with a no-break space, so that lines are not wrapped after it."""
_OF_ROPE = ("rope_theta", "partial_rotary_factor")
"""Keys that transformers reads into ``rope_parameters``."""


def defaults_of_transformers() -> dict[str, dict[str, Any]]:
    """Return the tables of ``configs/schema/transformers_defaults.py`` for the installed transformers.

    The tables contain, by ``model_type``, defaults of keys that a ``config.json`` may leave out, keys that must not be
    null, and alternative names of keys.
    """
    import transformers

    tables: dict[str, dict[str, Any]] = {"DEFAULTS": {}, "NOT_NULL": {}, "ALIASES": {}}
    for kind in (name for name in models.names() if name in transformers.CONFIG_MAPPING):
        made = transformers.CONFIG_MAPPING[kind]
        usual = {field.name: field.default for field in dataclasses.fields(transformers.PreTrainedConfig)}
        own = {each.name: each.default for each in dataclasses.fields(made) if each.name not in usual}
        own = {name: value for name, value in own.items() if not _NO_ARCHITECTURE.search(name)}
        rope = made().rope_parameters if "rope_parameters" in own else {}
        own.pop("rope_parameters", None)
        derived = {key: rope[key] for key in _OF_ROPE if key in rope}
        if kind == "gemma4_text":
            derived = {}  # transformers reads them only in ``rope_parameters``
        elif "full_attention" in rope:
            derived = {
                "rope_theta": rope["full_attention"]["rope_theta"],
                "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
                "sliding_window_pattern": made().layer_types.index("full_attention") + 1,
            }
        elif rope.get("rope_type", "default") != "default":
            derived["rope_parameters"] = {key: rope[key] for key in rope if key not in _OF_ROPE}
        tables["DEFAULTS"][kind] = own | derived
        # transformers accepts a null base, but cannot compute angles with it.
        bases = ("rope_theta", "rope_local_base_freq")
        named = [key for key in own | derived if key != "rope_parameters"]
        needed = [key for key in named if key in bases or not _takes_null(made, key)]
        tables["NOT_NULL"][kind] = tuple(needed)
        aliases = (pair if pair[1] in own else pair[::-1] for pair in made.attribute_map.items())
        tables["ALIASES"][kind] = {further: name for further, name in aliases if name in own}
    return tables


def _takes_null(made: Any, key: str) -> bool:
    try:
        made(**{key: None})
    except Exception:  # any kind: its own checks, or arithmetic with None
        return False
    return True


def transformers_defaults() -> str:
    """Return the content of ``configs/schema/transformers_defaults.py``."""
    import transformers

    lines = [
        '"""Defaults of transformers for keys that a ``config.json`` leaves out, by ``model_type``.',
        "",
        "``python -m tools.key_tables transformers-defaults`` writes it: composing imports no transformers.",
        '"""',
        "",
        "from collections.abc import Mapping, Sequence",
        "from typing import Any",
        "",
        f'VERSION = "{transformers.__version__}"',
        '"""Version of transformers that the tables were recorded with."""',
        "# fmt: off",
    ]
    purposes = {
        "DEFAULTS": ("Mapping[str, Any]", "Values of keys that are left out; None: it follows from others."),
        "NOT_NULL": ("Sequence[str]", "Keys that transformers refuses if they are null."),
        "ALIASES": ("Mapping[str, str]", "Further names of keys, which transformers reads too -> the name here."),
    }
    for name, table in defaults_of_transformers().items():
        kind, purpose = purposes[name]
        lines.append(f"{name}: Mapping[str, {kind}] = {{")
        for family, value in table.items():
            entry = f"    {json.dumps(family)}: {_literal(value)},".replace(": ", _JOINED)
            lines += textwrap.wrap(entry, 119, subsequent_indent=" " * 8, break_on_hyphens=False)
        lines += ["}", f'"""{purpose}"""']
    return "\n".join(lines).replace(_JOINED, ": ")


def _literal(value: Any) -> str:
    """Return ``value`` as a Python literal with double quotes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_literal(each)}, " for each in value).strip() + ")"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _plain(known: str) -> str:
    return ", ".join(f"`{word.rpartition(':')[2]}`" for word in known.split())


if __name__ == "__main__":
    tables = {
        "coming-from": coming_from, "families": families, "transformers-defaults": transformers_defaults,
    }  # fmt: skip
    print(tables.get(" ".join(sys.argv[1:]), key_tables)())
