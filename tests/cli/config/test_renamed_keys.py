"""Keys that were renamed: refused with the new name if a user types them, and read as before in saved configs."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import serried
from serried.configs.compose import compose, compose_saved
from serried.configs.errors import UserError
from serried.configs.help import choices_of
from serried.configs.messages.keys import all_keys
from serried.configs.override_parser import CommandLine
from serried.configs.plain_data import read_yaml, value_at
from serried.configs.renamed_keys import RENAMED, with_new_names
from serried.configs.schema.declaration import declaring
from serried.records.report.run_records import read_records
from serried.task_class import declaration
from serried.trainer.checkpoint.manifest import read_manifest, record_of, write_manifest
from serried.trainer.checkpoint.saved_state import read_state
from testing.runs import checkpoint, losses, run_here, tiny_overrides

VALUES = {
    "parallel.schedule": "zbv",
    "precision.recipe": "tensorwise",
    "trainer.patience": "3",
    "trainer.quantize_aware": "int4_weight_only",
    "trainer.workers": "0",
}


def with_old_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` as the version before wrote it."""
    config = json.loads(json.dumps(config))
    for old, new in RENAMED.items():
        (section, key), (new_section, new_key) = old.split("."), new.split(".")
        config[section][key] = config[new_section].pop(new_key)
    return config


def mistakes(*argv: str) -> str:
    with pytest.raises(UserError) as error:
        compose(argv)
    return str(error.value)


def test_every_renamed_key_has_a_value_here_and_a_new_key():
    assert VALUES.keys() == RENAMED.keys()
    assert all(new in all_keys() and old not in all_keys() for old, new in RENAMED.items())


@pytest.mark.parametrize(("old", "value"), VALUES.items())
def test_an_old_key_is_refused_with_the_override_to_paste(old: str, value: str):
    assert mistakes(f"{old}={value}") == f"{old}={value} (command line) has been renamed; use {RENAMED[old]}={value}"


def test_an_old_key_in_a_yaml_file_is_refused_with_its_place(tmp_path: Path):
    (tmp_path / "recipe").mkdir()
    recipe = "# @package _global_\ndefaults: [tiny]\nparallel:\n  schedule: zbv\ntrainer:\n  patience: 2\n"
    (tmp_path / "recipe/mine.yaml").write_text(recipe)
    argv = ["recipe=mine", f"--config-dir={tmp_path}"]
    ended = run_here([*argv, "dry_run=true"])
    assert ended.code == 78
    assert "mine.yaml:4) has been renamed; use parallel.pipeline_schedule=zbv" in ended.printed
    assert "mine.yaml:6) has been renamed; use trainer.early_stopping_patience=2" in ended.printed


def test_an_old_key_as_a_flag_or_in_a_list_of_changes_names_the_new_one():
    assert mistakes("--trainer.workers", "4").endswith("overrides have no dashes; write data.workers=4")
    allowed = "checkpoint.allow_changes"
    assert mistakes(f"{allowed}=[precision.recipe]").endswith(f"did you mean '{allowed}=[precision.scaling]'?")


class Own(serried.Task):
    class Config(serried.Section):
        size: int = 1


def test_a_task_of_ones_own_has_data_workers_and_no_other_key_of_data():
    with declaring(declaration(Own)):
        assert compose(["data.workers=7"]).data.workers == 7
        assert [key for key in all_keys() if key.startswith("data.")] == ["data.workers"]
        assert mistakes("trainer.workers=7").endswith("use data.workers=7")
        assert mistakes("data.path=x").endswith("the keys of data are workers")
        assert "data" not in choices_of()
        assert "this task defines its own data" in str(CommandLine(choices_of()).read(["data=text"]).mistakes[0])


def test_old_names_are_read_as_the_new_ones():
    saved = {"trainer": {"workers": 0, "steps": 5, "patience": 3}, "parallel": {"schedule": "zbv"}, "run": None}
    assert with_new_names(saved) == {
        "trainer": {"steps": 5, "early_stopping_patience": 3},
        "parallel": {"pipeline_schedule": "zbv"},
        "run": None,
        "data": {"workers": 0},
    }
    assert saved["trainer"]["workers"] == 0, "the argument stays as it is"
    assert with_new_names({"trainer": 3, "precision": []}) == {"trainer": 3, "precision": []}


def test_a_run_of_the_version_before_is_read_and_resumed_without_a_change(text: Path, tmp_path: Path):
    run, settings = tmp_path / "run", ["trainer.early_stopping_patience=9", "data.workers=0", "trainer.eval_every=2"]
    straight = tiny_overrides(text, tmp_path / "straight", *settings)
    assert run_here(straight).code == 0
    assert run_here(tiny_overrides(text, run, *settings, "trainer.stop_at=3")).code == 75
    saved, state = run / "config.yaml", checkpoint(run) / "state.json"
    saved.write_text(yaml.safe_dump(with_old_names(read_yaml(saved)), sort_keys=False))
    plain = json.loads(state.read_text())
    state.write_text(json.dumps(plain | {"config": with_old_names(plain["config"])}))
    records = read_manifest(state.parent)
    write_manifest(state.parent, {**records, "state.json": record_of(state)})
    assert "patience" in saved.read_text() and "early_stopping" not in saved.read_text() + state.read_text()

    assert read_state(state.parent)["config"] == plain["config"]
    assert read_records(run).config["trainer.early_stopping_patience"] == 9
    opened = compose_saved(saved, ["precision=bf16"], ("precision",))
    assert (opened.trainer.early_stopping_patience, opened.data.workers) == (9, 0)
    ended = run_here(tiny_overrides(text, run, *settings))
    assert ended.code == 0
    assert "changed since the checkpoint" not in ended.printed and "WARNING" not in ended.printed
    assert losses(run) == losses(tmp_path / "straight")
    assert value_at("data.workers", read_yaml(saved)) == 0


def test_another_precision_for_a_saved_run_leaves_its_quantization(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(compose(["precision.quantize_aware=int4_weight_only"]).model_dump(mode="json"))
    )
    opened = compose_saved(tmp_path / "config.yaml", ["precision=bf16"], ("precision",))
    assert (opened.precision.name, opened.precision.quantize_aware) == ("bf16", "int4_weight_only")
