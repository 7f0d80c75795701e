"""Registries: built-in entries are found by the names of their modules, and composing a config imports no torch."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from serried.configs.schema.data import sources
from serried.configs.schema.registry import Registry, models, optimizers, schedules, tasks
from testing.rank_pool import ROOT

REGISTRIES = {"models": models, "optimizers": optimizers, "schedules": schedules, "sources": sources, "tasks": tasks}


def test_composing_and_listing_all_keys_imports_no_torch() -> None:
    script = """
import sys
sys.modules["torch"] = None  # importing it fails, as on a login node
from serried.configs.compose import compose
from serried.configs.messages.keys import all_keys
from serried.configs.schema.registry import models, tasks
for argv in (["recipe=tiny"], ["recipe=llama405b"], ["model=moe_tiny", "optim=muon", "schedule=wsd"]):
    compose(argv)
assert {"hf", "gpt2"} < {*models.names()} and "reward" in tasks.names() and "model.experts" in all_keys()
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize("name", REGISTRIES)
def test_every_built_in_entry_loads(name: str) -> None:
    entries = REGISTRIES[name].entries()
    assert entries
    for entry in entries:
        assert callable(entry.load()), entry.name


PACKAGE = """
from serried.configs.schema.registry import Registry
from serried.configs.schema.fields import Section

class ShapeSection(Section):
    name: str = "square"

registry = Registry("shape", "shape", "no.entry.points", ShapeSection, built_in=("shapes.*_config",), first="square")
"""
CONFIG = """
from shapes import ShapeSection, registry

class {Name}Section(ShapeSection):
    size: int = 1

registry.register("{name}", {Name}Section, "shapes.{name}:{Name}")
"""


def test_module_with_its_config_module_is_registered_without_other_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shapes"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    for name in ("circle", "square"):
        (folder / f"{name}.py").write_text(f"class {name.title()}: ...\n")
        (folder / f"{name}_config.py").write_text(CONFIG.format(name=name, Name=name.title()))
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry = import_module("shapes").registry
    assert registry.names() == ["square", "circle"], "the first one, then by name"
    assert not {"shapes.circle", "shapes.square"} & sys.modules.keys(), "only the sections were imported"
    assert registry.get("circle").load().__name__ == "Circle"
    for name in [name for name in sys.modules if name.partition(".")[0] == "shapes"]:
        monkeypatch.delitem(sys.modules, name)
