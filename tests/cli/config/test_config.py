"""What is promised of the configuration: it composes fast, is complete, and refuses everything it does not know."""

import itertools
import re
import shutil
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError, create_model

from serried.configs.bucket_paths import output_path
from serried.configs.compose import FOLDER, compose, compose_saved
from serried.configs.divisors import divisors
from serried.configs.errors import UserError
from serried.configs.help import choices_of, help_text
from serried.configs.hugging_face.model_folder import teacher_section
from serried.configs.messages.keys import _keys_of, all_keys, check_fields
from serried.configs.messages.suggestions import unknown_key
from serried.configs.override_parser import parse_arguments
from serried.configs.requirements import asked_for
from serried.configs.schema.declaration import BUILT_IN, declaring
from serried.configs.schema.fields import Section
from serried.configs.schema.run_config import check, config_yaml
from serried.configs.subcommand_arguments import repeated
from serried.launch.start import start_elsewhere
from serried.launch.sweep.grid import read_sweep
from serried.recipes.models.families.llama_config import LlamaSection
from serried.task_class import installed
from tools.key_tables import key_tables

GROUPS = choices_of()


def refusal(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        compose(argv)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A copy of the YAML files that a test may add to, in place of those that are shipped."""
    no_code = shutil.ignore_patterns("*.py", "__pycache__")
    copied = Path(shutil.copytree(FOLDER, tmp_path / "configs", ignore=no_code))
    with declaring(BUILT_IN._replace(shipped=copied)):
        yield copied


def write_recipe(folder: Path, body: str) -> None:
    (folder / "recipe" / "mine.yaml").write_text(f"# @package _global_\n# Mine\n{body}", encoding="utf-8")


# Composing


def test_no_overrides_give_the_recipe_tiny():
    config = compose([])
    assert (config.recipe, config.run.name, config.run.dir.as_posix()) == ("tiny", "tiny", "runs/tiny")
    assert (config.model.name, config.data.name, config.parallel.strategy) == ("tiny", "stdlib", "ddp")
    assert compose(["recipe=tiny"]) == config


@pytest.mark.parametrize(
    "parallel",
    ["single", *(pytest.param(each, marks=pytest.mark.slow) for each in GROUPS["parallel"] if each != "single")],
)
@pytest.mark.parametrize(
    "recipe", [path.stem for path in sorted((FOLDER / "recipe").glob("*.yaml")) if "\nparallel:" in path.read_text()]
)
def test_recipe_with_degrees_of_its_own_composes_with_every_parallelism(recipe: str, parallel: str):
    config = compose([f"recipe={recipe}", f"parallel={parallel}"])
    assert (config.recipe, config.parallel.strategy) == (recipe, parallel)


@pytest.mark.parametrize(
    "group, choice",
    [
        (group, choice)
        for group in GROUPS
        for choice in GROUPS[group]
        if group not in ("recipe", "parallel") and choice != "auto" and (group, choice) != ("model", "hf")
    ],
)
def test_every_choice_composes_and_carries_its_name(group: str, choice: str):
    books = ["data.path=books.txt"]
    needed = {
        "text": books,
        "hf": books,
        "tokens": [*books, "data.tokenizer=bytes"],
        "mixture": ["data.sources.books.name=stdlib"],
    }
    config = compose([f"{group}={choice}", *needed.get(choice, [])])
    if (group, choice) == ("data", "fineweb_edu"):
        choice = "hf"  # which it is an instance of
    section = getattr(config, group)
    if group == "track":  # several of its choices go together
        assert asked_for(section) == [] if choice == "files" else asked_for(section) == [choice.partition("_")[0]]
        return
    assert choice in (
        section,
        getattr(section, "name", None),
        getattr(section, "strategy", None),
        getattr(section, "method", None),
        "adamw",
    )


def test_the_command_line_overrides_the_groups_and_the_values_of_a_recipe():
    config = compose(["recipe=llama1b", "model=tiny", "precision=fp16", "trainer.steps=5k", "optim.lr=1e-4"])
    assert (config.recipe, config.model.name, config.precision.name) == ("llama1b", "tiny", "fp16")
    assert (config.parallel.strategy, config.trainer.steps, config.optim.lr) == ("fsdp", 5000, 1e-4)
    assert config.run.name == "llama1b"


def test_a_later_group_choice_is_not_undone_by_the_recipe():
    assert compose(["recipe=llama8b", "schedule=wsd"]).schedule.min_lr_ratio == 0.0


def test_a_recipe_can_build_on_another(folder: Path):
    write_recipe(folder, "defaults:\n  - tiny\n  - override /precision: bf16\ntrainer:\n  steps: 500\n")
    config = compose(["recipe=mine"])
    assert (config.recipe, config.run.name, config.precision.name) == ("mine", "mine", "bf16")
    assert (config.trainer.steps, config.trainer.global_batch) == (500, compose([]).trainer.global_batch)


@pytest.mark.parametrize(
    "typed, steps",
    [("1e3", 1000), ("10k", 10_000), ("2M", 2_000_000), ("1.5B", 1_500_000_000), ("1_000", 1000), ("0100", 100)],
)
def test_counts_may_be_written_short(typed: str, steps: int):
    assert compose([f"trainer.steps={typed}"]).trainer.steps == steps


def test_large_counts_are_exact():
    assert compose(["trainer.seed=9007199254740993"]).trainer.seed == 9007199254740993
    assert compose(["trainer.seed='9007199254740993'"]).trainer.seed == 9007199254740993


@pytest.mark.parametrize(
    "typed", ["~/books/*.txt", "../a b/c (1).txt", "été.txt", "data/[ab]*.txt", "2024", "1e3", "true", "C:/x", "日本"]
)
def test_text_stays_as_typed(typed: str):
    assert compose(["data=text", f"data.path={typed}"]).data.path == typed


def test_quoted_text_may_hold_anything():
    assert compose(["data=text", 'data.path="a=b,c"']).data.path == "a=b,c"


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_plus_signs_make_no_difference(prefix: str):
    assert compose([f"{prefix}trainer.steps=50"]).trainer.steps == 50
    assert compose([f"{prefix}recipe=llama1b"]).recipe == "llama1b"


def test_last_value_of_a_repeated_key_is_used_with_one_note():
    words = ["trainer.steps=50", "optim.lr=1", "+trainer.steps=60", "optim.lr=1"]
    assert compose(words).trainer.steps == 60
    assert repeated(words) == ["trainer.steps is given 2 times; the last value is used: trainer.steps=60"]
    both = ["trainer.steps=10", "trainer.epochs=2"]
    assert repeated(both) == ["trainer.steps=10 has no effect: trainer.epochs=2 sets the steps"]
    assert repeated([*both, "trainer.epochs=null"])[1:] == []


def test_references_null_and_repeated_keys_are_read():
    config = compose(["run.name=${recipe}-x", "model.head_dim=null", "trainer.steps=50", "trainer.steps=50"])
    assert (config.run.name, config.run.dir.as_posix(), config.model.head_dim) == ("tiny-x", "runs/tiny-x", None)
    assert compose(["recipe=llama1b", "model.rope_scaling=null"]).model.rope_scaling is None


def test_the_config_is_frozen():
    config = compose([])
    with pytest.raises(ValidationError):
        config.trainer.steps = 5  # type: ignore[misc]


def test_composing_is_a_pure_function_of_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = compose(["trainer.steps=50"])
    monkeypatch.chdir(tmp_path)
    assert compose(["trainer.steps=50"]) == before
    assert list(tmp_path.iterdir()) == []


# The models


def parameters(model: LlamaSection) -> int:
    """Parameters of a Llama 3 model, by hand."""
    assert model.vocab_size
    head_dim = model.dim // model.heads
    attention = 2 * model.dim * model.heads * head_dim + 2 * model.dim * model.kv_heads * head_dim
    block = attention + 3 * model.dim * model.hidden_dim + 2 * model.dim
    tables = (1 if model.tie_embeddings else 2) * model.vocab_size * model.dim
    return model.layers * block + tables + model.dim


@pytest.mark.parametrize(
    "name, count, rope_factor",
    [
        ("llama1b", 1_235_814_400, 32),
        ("llama3b", 3_212_749_824, 32),
        ("llama8b", 8_030_261_248, 8),
        ("llama70b", 70_553_706_496, 8),
    ],
)
def test_published_models_have_their_published_size(name: str, count: int, rope_factor: int):
    model = compose([f"recipe={name}"]).model
    assert parameters(model) == count
    assert f"{count:,}" in (FOLDER / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    assert (model.norm_eps, model.rope_theta, model.max_sequence_length) == (1e-5, 500000.0, 131072)
    assert model.rope_scaling is not None
    assert model.rope_scaling.model_dump() == {
        "factor": rope_factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_sequence_length": 8192,
    }


# Writing it down


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(each, marks=[] if each in ("tiny", "llama8b", "dpo") else pytest.mark.slow)
        for each in GROUPS["recipe"]
    ],
)
def test_yaml_gives_the_same_config_back(recipe: str, folder: Path):
    config = compose([f"recipe={recipe}", "run.name='2024'", "optim.lr=1e-7", "data=text", "data.path=a: #é"])
    text = config_yaml(config)
    assert check(yaml.safe_load(text)) == config
    write_recipe(folder, text)
    assert compose(["recipe=mine"]) == config.model_copy(update={"recipe": "mine"})


def test_every_key_has_a_description():
    assert [key.path for key in all_keys().values() if not key.purpose] == []


def test_every_yaml_file_begins_with_a_description():
    for file in FOLDER.rglob("*.yaml"):
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if "@package" not in line]
        assert re.match(r"# \S", lines[0]), file


def test_help_is_short_and_complete():
    lines = help_text().splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 120
    for choice in itertools.chain(*GROUPS.values()):
        assert choice in help_text()
    assert "trainer.steps" in help_text()
    assert "trainer.steps" in help_text()
    for example in re.findall(r"train\.py((?: [a-z_.]+=\S+)+)  ", help_text()):
        compose([word.replace("'", "") for word in example.split()])


def test_help_contains_only_full_sentences():
    listed = re.findall(r"^  ([a-z_.]+) {2,}(\S.*)$", help_text().partition("common keys")[2], re.MULTILINE)
    assert {"checkpoint.resume", "parallel.reshard_after_forward"} <= {key for key, _ in listed}
    for key, said in listed:
        purpose = all_keys()[key].purpose.replace("``", "")
        assert purpose.startswith(said)
        assert purpose[len(said)] in ".;"
        assert said.count("(") == said.count(")")


@pytest.mark.parametrize(
    "argv, parsed",
    [
        ([], ("train", [])),
        (["recipe=tiny", "-x"], ("train", ["recipe=tiny", "-x"])),
        (["a=1", "--help"], ("help", ["a=1"])),
        (["-h"], ("help", [])),
        (["--cfg", "job", "a=1"], ("config", ["a=1"])),
        (["a=1", "--cfg=job"], ("config", ["a=1"])),
        (["-c", "job"], ("config", [])),
        (["--cfg", "all"], ("train", ["--cfg", "all"])),
        (["--cfg"], ("train", ["--cfg"])),
        (["--cfg", "job", "--help"], ("help", [])),
    ],
)
def test_flags_are_split_from_overrides(argv: list[str], parsed: tuple[str, list[str]]):
    assert parse_arguments(argv) == parsed


# Refusing


def test_suggestion_for_an_unknown_key_never_repeats_that_key():
    for path in all_keys():
        wrong = f"{path}x=1"
        suggested = unknown_key(f"{path}x", "1", "here", GROUPS).partition("did you mean ")[2]
        assert f"{path}=" in suggested
        assert wrong not in suggested


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("steps", "20", "trainer.steps=20"),
        ("stpes", "2k,4k", "trainer.steps=2k,4k"),
        ("steps", "[10,13]", "'profile.steps=[10,13]'"),
        ("steps", "", "trainer.steps=1000, 10k, 2M or 'profile.steps=[10,13]'"),
        ("profile.stepz", "20", "profile.steps=20"),  # surely that key, whose mistake in the value comes next
        ("memory", "64G", "slurm.memory=64G or plan.memory=64G"),
        ("memory", "true", "profile.memory=true or slurm.memory=true or plan.memory=true"),
    ],
)
def test_suggested_keys_accept_the_value(key: str, value: str, expected: str):
    assert unknown_key(key, value, "here", GROUPS).endswith(f"; did you mean {expected}?")


def test_sources_and_validation_sets_have_user_chosen_names():
    argv = ["data.sources.web-2.name=text", "data.sources.web-2.path=~/books", "data.sources.web-2.weight=0.7"]
    config = compose(["data=mixture", *argv, "data.sources.code.name=stdlib", "data.validation.held.name=stdlib"])
    assert {name: (getattr(source, "path", None), source.weight) for name, source in config.data.sources.items()} == {
        "web-2": ("~/books", 0.7),
        "code": (None, 1.0),
    }
    assert list(config.data.validation) == ["held"]
    assert check(yaml.safe_load(config_yaml(config))) == config


@pytest.mark.parametrize(
    "argv, message",
    [
        (["data=mixture"], "data=mixture needs sources: data.sources.NAME.name=text"),
        (
            ["data.sources.a.name=stdlib"],
            "is a key of data=mixture, but the run uses data=stdlib; leave it out, or add data=m",
        ),
        (
            ["data=text", "data.path=x", "data.subset=y"],
            "data.subset=y (command line) is a key of data=hf, but the run uses data=text",
        ),
        (
            ["data=mixture", "data.sources.a.name=text", "data.sources.a.path=x", "data.sources.a.subset=y"],
            "subset=y (command line) is a key of data.sources.a.name=hf, but the run uses data.sources.a.name=text",
        ),
        (["data=mixture", "data.sources.a.name=txt"], "did you mean data.sources.a.name=text?"),
        (["data=mixture", "data.sources.a.weigth=3"], "did you mean data.sources.a.weight=3"),
        (["data=mixture", "data.sources.a.path=x"], "data.sources.a.name has no value, in a YAML file"),
        (["data=mixture", "data.sources.a.name=hf"], "data.sources.a.name=hf needs data.sources.a.path=OWNER/NAME"),
        (["data=mixture", "data.sources.a=x"], "data.sources.a is a section, not a key; the keys of data.sources.a"),
        (["data.sources=x"], "it has one section for each name you choose, such as data.sources.web"),
        (["data.sources.a/b.name=text"], "a/b is not a valid name; use letters, digits, _ and -"),
        (
            ["data=mixture", "data.sources.a.weight=0", "data.sources.a.name=stdlib"],
            "data.sources.a.weight=0 (command line) is out of range: it must be at least 1e-9",
        ),
        (["data.sources.a.path.b=0"], "data.sources.a.path is a key, not a section"),
        (["data.validation.validation.name=stdlib"], "this name is reserved for the data held out from training"),
        (["data.validation.train.name=stdlib"], "data.validation.train: this name is reserved for the training data"),
        (["mixture_weights=[1,2]"], "data=mixture data.sources.NAME.name=text"),
    ],
)
def test_mistakes_below_a_users_name_are_reported_like_any_others(argv: list[str], message: str):
    assert message in refusal(*argv)


def _typo(key: str, position: int, kind: str, letter: str) -> str:
    position %= len(key)
    before, after = key[:position], key[position:]
    if kind == "deletion":
        return before + after[1:]
    if kind == "insertion":
        return before + letter + after
    return before + after[1:2] + after[:1] + after[2:]


slips = st.builds(
    lambda key, *slip: (key, _typo(key, *slip)),
    st.sampled_from([*all_keys(), *GROUPS]),
    st.integers(0, 100),
    st.sampled_from(["deletion", "insertion", "swap"]),
    st.sampled_from("abcdefghijklmnopqrstuvwxyz_"),
).filter(lambda slip: slip[1] not in all_keys() and slip[1] not in GROUPS)


@settings(max_examples=40)
@given(slips)
def test_typo_of_one_letter_is_refused(slip: tuple[str, str]):
    assert f"{slip[1]}=1" in refusal(f"{slip[1]}=1")


@settings(max_examples=150)
@given(slips)
def test_typo_of_one_letter_suggests_the_key(slip: tuple[str, str]):
    key, typed = slip
    message = unknown_key(typed, "1", "command line", GROUPS)
    assert re.search(rf"(?<![\w.]){re.escape(key)}=", message), message  # a question, or a sentence that has the key


@given(st.integers(1, 5000))
def test_divisors_are_all_that_divide(number: int):
    assert divisors(number) == [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@pytest.mark.timeout(20)
def test_divisors_of_huge_numbers_take_no_time():
    assert len(divisors(3_000_000_000)) == 2 * 10 * 10
    assert divisors(2**61 - 1) == [1, 2**61 - 1]
    assert "use model.heads=8 (or one of [5," in refusal("model.dim=10000000", "model.heads=7")


@pytest.mark.parametrize(
    "override",
    [
        "model.vocab_size=1e18", "model.dim=1e18", "model.head_dim=1e18", "model.layers=1e7", "data.workers=1e9",
        "launch.step_timeout_seconds=1e12", "launch.start_timeout_seconds=1e300", "precision.initial_scale=1e300",
        "precision.initial_scale=1e-300", "health.spike_window=1e9", "trainer.steps=1e18",
    ],
)  # fmt: skip
def test_huge_value_is_out_of_range(override: str):
    assert f"{override} (command line) is out of range: it must be " in refusal(override)


@pytest.mark.parametrize("name", ["x" * 300, "~no-such-user", "~no-such-user/" + "x" * 300])
def test_path_that_no_file_can_have_is_refused(name: str):
    assert f"model.path={name}: cannot read " in refusal(f"model.path={name}")
    assert compose([f"checkpoint.resume={name}"]).checkpoint.resume == name, "it is refused where checkpoints are read"


def test_recipe_of_an_unknown_user_is_refused():
    assert "no recipe '~no-such-user'" in refusal("recipe=~no-such-user")


def test_tokenizer_name_of_300_characters_is_refused():
    assert "no such file or folder" in refusal(f"data.tokenizer={'x' * 300}")


def test_mixture_weights_have_a_range():
    source = ["data=mixture", "data.sources.a.name=stdlib", "data.sources.a.weight=1e308"]
    assert "it must be at least 1e-9 and at most 1e9" in refusal(*source)


def test_resized_tiny_model_keeps_its_proportions():
    tiny = compose([]).model
    assert (tiny.dim, tiny.heads, tiny.kv_heads, tiny.hidden_dim) == (128, 4, 2, 384)
    resized = compose(["model.dim=384", "model.heads=6", "model.layers=6"]).model
    assert (resized.kv_heads, resized.hidden_dim) == (3, 1024)
    assert compose(["model.heads=1"]).model.kv_heads == 1
    assert compose(["model.hidden_dim=512", "model.kv_heads=4"]).model.hidden_dim == 512


def test_tokens_need_the_tokenizer_that_made_them(tmp_path: Path):
    message = refusal("data=tokens", "data.path=x.bin")
    assert "data=tokens needs data.tokenizer" in message
    assert "data=text data.path=input.txt data.tokenizer=chars" in message
    assert compose(["data=tokens", "data.path=x.bin", "data.tokenizer=bytes"]).data.tokenizer == "bytes"
    (tmp_path / "summary.json").touch()
    compose(["data=tokens", f"data.path={tmp_path}"])  # a folder of serried prepare holds its tokenizer


def test_single_divisor_is_suggested_without_a_list():
    assert "use model.heads=1, or set model.head_dim" in refusal("model.dim=2", "model.heads=3", "model.kv_heads=1")


@pytest.mark.parametrize("key", ["checkpoint.keep_best=true", "trainer.early_stopping_patience=2"])
@pytest.mark.parametrize(
    "more", [["trainer.eval_every=0"], ["data.validation.v.name=text", "data.validation.v.path=v"]]
)
def test_comparing_evaluations_without_held_out_data_is_refused(key: str, more: list[str]):
    message = refusal(key, "data.validation_fraction=0", *more)
    assert message.startswith(f"{key} needs validation data held out from training, but data.validation_fr")
    assert "\n" not in message
    assert "use data.validation_fraction=0.05, or " in message
    if "trainer.eval_every=0" not in more:
        compose([key, *more, "data.validation_fraction=0.05"])


def test_comparing_evaluations_is_accepted_if_a_source_may_have_validation_data():
    held = ["data.validation.v.name=text", "data.validation.v.path=v", "data.validation_fraction=0"]
    best = "checkpoint.keep_best=true"
    compose([best, *held, "data=hf", "data.path=a/b", "data.validation_split=test"])
    compose([best, *held, "data=tokens", "data.path=x", "data.tokenizer=bytes"])
    mixture = ["data=mixture", "data.sources.a.name=stdlib", "data.sources.b.name=hf", "data.sources.b.path=a/b"]
    compose([best, *held, *mixture, "data.sources.b.validation_split=test"])
    assert best in refusal(best, *held, *mixture)


def test_all_mistakes_are_reported_together_and_once():
    message = refusal("recipe=tny", "trainer.stpes=5", "trainer.stpes=5", "optim.lr=x", "data.workers=-1", "--foo")
    head, *rest = message.splitlines()
    assert head == "5 mistakes:"
    assert len(rest) == len(set(rest)) == 5


def test_refused_overrides_cause_no_mistakes_of_their_own():
    # Without the recipe the sequence would be too long for the model, and without data.path there would be no text.
    assert "\n" not in refusal("recipe=lama8b", "data.sequence_length=100k")
    assert "\n" not in refusal("data=text", "data.pth=books.txt")


def test_a_message_is_one_line_whatever_was_typed():
    for word in ("run.name=a\nb", "a\nb=3", "a\nb", "--a\nb", "trainer.steps=a\nb", f"run.name=/{'x' * 999}"):
        message = refusal(word)
        assert "\n" not in message
        assert len(message) < 400


@settings(max_examples=25)
@given(st.lists(st.text(min_size=0, max_size=12), max_size=3))
def test_no_command_line_ends_in_anything_but_a_config_or_a_refusal(argv: list[str]):
    try:
        compose(argv)
    except UserError as error:
        assert str(error).strip()


@settings(max_examples=50)
@given(
    key=st.sampled_from([*all_keys(), *GROUPS]), value=st.text(alphabet=st.sampled_from("ab1.,=[]{}()'\"$\\~ -:#é\n"))
)
def test_no_value_ends_in_anything_but_a_config_or_a_refusal(key: str, value: str):
    try:
        compose([f"{key}={value}"])
    except UserError as error:
        assert str(error).strip()


@pytest.mark.parametrize(
    "body, expected",
    [
        (
            "defaults: [tiny]\ntrainer:\n  stpes: 5\n",
            ["trainer.stpes=5 (configs/recipe/mine.yaml:5)", "trainer.steps=5"],
        ),
        (
            "defaults: [tiny]\ntrainer:\n  steps: abc\n",
            ["trainer.steps=abc (configs/recipe/mine.yaml:5)", "whole number"],
        ),
        ("defaults: [tiny]\ntrainer: 5\n", ["trainer=5 (configs/recipe/mine.yaml:4)", "trainer is a section", "steps"]),
        (
            "defaults: [tiny]\ntraner:\n  steps: 5\n",
            ["unknown section traner (configs/recipe/mine.yaml:4)", "trainer?"],
        ),
        ("defaults: [tiny]\nwandb:\n  project: x\n", ["unknown section wandb", "sections: ", "track"]),
        ("defaults: [tiny]\nlearning_rate: 1\n", ["learning_rate=1 (configs/recipe/mine.yaml:4)", "optim.lr=1"]),
        ("defaults: [tiny]\nrun:\n  name: ${nope}\n", ["run.name=${nope} (configs/recipe/mine.yaml:5)", "not found"]),
        ("trainer:\n  steps: 5\n", ["trainer.global_batch", "have no value, in a YAML file", "trainer.micro_batch=8"]),
        ("defaults:\n  - override /model: lama8b\n", ["no model 'lama8b'", "YAML file in configs", "model=llama8b"]),
        ("defaults:\n  - override /modle: tiny\n", ["configs/recipe/mine.yaml", "no group 'modle'", "model?"]),
        ("trainer: [\n", ["configs/recipe/mine.yaml:4 is not valid YAML"]),
        ("trainer:\n  steps: 1\n  steps: 2\n", ["configs/recipe/mine.yaml:5 is not valid YAML", "duplicate key steps"]),
        ("- a\n- b\n", ["configs/recipe/mine.yaml", "keys with values"]),
    ],
)
def test_mistakes_in_a_yaml_file_name_the_file_and_the_line(folder: Path, body: str, expected: list[str]):
    write_recipe(folder, body)
    message = refusal("recipe=mine")
    for text in expected:
        assert text in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "file, text, words, expected",
    [
        ("model/mine.yaml", "width: 4\n", ("model=mine",), "unknown key model.width=4 (presets/model/mine.yaml:1)"),
        ("optim/mine.yaml", "name: adamw\neps: x\n", ("optim=mine",), "optim.eps=x (presets/optim/mine.yaml:2)"),
        ("schedule/mine.yaml", "- eps\n", ("schedule=mine",), "keys with values"),
        ("recipe/mine.yaml", "trainer:\n  steps: 5\n", ("recipe=mine",), "must begin with # @package _global_"),
        ("model/mine.yaml", "", ("model=glm4_moe",), "write FOLDER/model/glm4_moe.yaml with family: glm4_moe"),
    ],
)
def test_mistakes_in_a_users_presets_name_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, words: tuple[str, ...], expected: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "presets" / file).parent.mkdir(parents=True)
    (tmp_path / "presets" / file).write_text(text)
    with declaring(BUILT_IN._replace(config_dirs=(tmp_path / "presets",))):
        assert expected in refusal(*words)


def test_the_last_file_that_set_a_value_is_named(folder: Path):
    file = folder / "model" / "tiny.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("layers: 4", "layers: four"), encoding="utf-8")
    assert "model.layers=four (configs/model/tiny.yaml:4)" in refusal()
    write_recipe(folder, "defaults: [tiny]\nmodel:\n  layers: five\n")
    assert "model.layers=five (configs/recipe/mine.yaml:5)" in refusal("recipe=mine")
    assert "model.layers=six (command line)" in refusal("recipe=mine", "model.layers=six")


def test_the_tables_in_the_documentation_are_what_the_command_prints():
    page = (FOLDER.parent / "docs/reference/configuration.md").read_text(encoding="utf-8")
    committed = page.partition("<!-- python -m tools.key_tables -->\n")[2].partition("\n<!-- end -->")[0]
    assert committed == key_tables(), (
        "put the output of `python -m tools.key_tables` into docs/reference/configuration.md"
    )


class Part(Section):
    """A section in a section."""

    a: int = 1


class Colour(Enum):
    """No type of a key."""

    RED = "red"


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Part, {"x.a": "integer"}),
        (Part | None, {"x": "object", "x.a": "integer"}),
        (dict[str, Part] | None, {}),
        (list[Part], {"x": "array"}),
        (bool | Part, {"x": "boolean"}),
        (Literal["off"] | Part, {"x": "string"}),
        (list[str] | None, {"x": "texts"}),
        (Annotated[int, Field(gt=0)] | None, {"x": "integer"}),
    ],
    ids=str,
)
def test_a_field_of_a_users_section_is_a_key_or_a_section_by_its_type(annotation: Any, expected: dict[str, str]):
    own = create_model("Own", __base__=Section, x=(annotation, None))
    check_fields(own, "Own")
    keys = _keys_of(own, "")
    assert {path: key.kind for path, key in keys.items()} == expected
    assert list(keys.named) == ([] if expected else ["x"])


def test_a_key_has_the_alias_of_its_field():
    own = create_model("Own", __base__=Section, x=(int, Field(1, alias="lambda")))
    assert {path: key.kind for path, key in _keys_of(own, "").items()} == {"lambda": "integer"}


@pytest.mark.parametrize("annotation", [Colour, dict[str, create_model("Other", __base__=Section, f=(Any, None))]])
def test_a_field_that_cannot_be_a_key_is_refused_before_it_is_used(annotation: Any):
    with pytest.raises(UserError, match="is not supported as the type of a key"):
        check_fields(create_model("Own", __base__=Section, x=(annotation, None)), "Own")


# paths ----------------------------------------------------------------------------------------------------------------

PATHS = {
    "data.cache_dir": [], "data.tokenizer": [], "checkpoint.resume": [], "slurm.python": [],
    "plan.rates": [], "plan.out": ["plan.search=true"], "adapter.path": [],
    "data.path": ["data=text"], "model.path": ["model=auto"],
    "data.chat_template": ["data=text", "data.path=x", "data.format=chat"],
    "task.path": ["task=text_classification"], "task.model": ["task=image_classification"],
    "data.validation.a.path": ["data.validation.a.name=hf"],
    "data.sources.a.path": ["data=mixture", "data.sources.a.name=tokens"],
}  # fmt: skip
"""Keys that take a path, and what else makes them be read."""
NO_PATHS = {
    "track.mlflow", "track.prometheus", "track.wandb", "trainer.evaluate", "model.family", "data.name",
    "data.text_column", "kubernetes.claim", "run.dir", "slurm.srun_options",
}  # fmt: skip
"""Keys whose description names a file or folder though they take addresses, names or options."""


@pytest.mark.parametrize("key", PATHS)
def test_address_in_place_of_a_path_is_refused(key: str) -> None:
    declaration = installed(PATHS[key][0].removeprefix("task=")) if key.startswith("task.") else BUILT_IN
    words = [word for word in PATHS[key] if not word.startswith("task=")]
    with declaring(declaration):
        said = refusal(*words, f"{key}=ftp://host/folder")
    assert f"{key}=ftp://host/folder" in said
    assert " is an address, but only local files and folders" in said
    assert "supported; mount the storage" in said or f": {key}=s3://BUCKET/PATH, gs:// or az://" in said


@pytest.mark.parametrize("key", ["data.path", "data.tokenizer", "model.path", "adapter.path"])
def test_mistake_in_the_url_of_a_bucket_names_its_key(key: str) -> None:
    words = {"data.path": ["data=text"], "model.path": ["model=auto"]}.get(key, [])
    assert refusal(*words, f"{key}=s3://") == f"no bucket in {key}=s3://; use s3://BUCKET/PATH"
    said = refusal(*words, f"{key}=s3://name:secret@bucket/folder")
    assert said.startswith(f"{key} contains a user, a query or a fragment; credentials belong in the environment ")


def test_output_that_names_a_whole_bucket_is_refused() -> None:
    reason = r"^out=s3://bucket names a whole bucket; .*: out=s3://bucket/NAME$"
    with pytest.raises(UserError, match=reason), output_path("s3://bucket/"):
        pass


@pytest.mark.parametrize("url", ["s3://bucket/runs/one", "gs://bucket/runs/one/", "az://bucket/runs/one"])
def test_run_in_a_bucket_has_a_scratch_folder_and_keeps_its_url(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERRIED_SCRATCH", str(tmp_path))
    config = compose([f"run.dir={url}"])
    assert config.run.url == url.rstrip("/")
    assert config.run.dir.parent == tmp_path
    assert config.run.dir != compose([f"run.dir={url}2"]).run.dir
    assert (
        config.run.shown(config.run.dir / "checkpoints" / "step-00000003")
        == f"{config.run.url}/checkpoints/step-00000003"
    )
    assert config.run.shown(tmp_path / "other") == str(tmp_path / "other")
    assert str(tmp_path) not in config_yaml(config)
    assert check(yaml.safe_load(config_yaml(config))) == config


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://", "no bucket in run.dir=s3://; use s3://BUCKET/PATH"),
        ("S3:/b/x", "no bucket in run.dir=S3:/b/x; use s3://BUCKET/PATH"),
        ("s3://b/a/../x", "run.dir=s3://b/a/../x is not the URL of a folder in a bucket; use s3://BUCKET/PATH"),
        (
            "s3://AKIA:hush@b/x",
            "run.dir contains a user, a query or a fragment; credentials belong in",
        ),
        ("s3://b/x?X-Amz-Security-Token=hush", "run.dir contains a user, a query or a fragment; credentials belong"),
        ("'s3://b/x?secret_key=hush'", "run.dir contains a user, a query or a fragment; credentials belong"),
        (
            "https://b/x",
            "run.dir=https://b/x (command line) is an address, but only local files and folders, and buckets, are "
            "supported; for a bucket of S3, Google or Azure: run.dir=s3://BUCKET/PATH, gs:// or az://",
        ),
    ],
)
def test_mistake_in_the_url_of_a_run_is_one_line_without_secrets(url: str, expected: str) -> None:
    said = refusal(f"run.dir={url}")
    assert said.startswith(expected)
    assert "\n" not in said
    assert "hush" not in said


def test_runs_of_a_sweep_are_below_the_url_and_its_table_is_in_a_folder() -> None:
    sweep = read_sweep(["run.dir=s3://bucket/runs", "run.name=tiny", "optim.lr=0.1,0.2"])
    places = [(point.config.run.name, point.config.run.url) for point in sweep.points]
    assert places == [(f"tiny-lr-{lr}", f"s3://bucket/runs/lr-{lr}") for lr in ("0.1", "0.2")]
    assert sweep.folder == Path("runs/tiny-sweep-lr")
    with pytest.raises(UserError, match=r"^search\.trials cannot be used with run\.dir=s3://bucket/runs: "):
        read_sweep(["run.dir=s3://bucket/runs", "search.trials=2", "optim.lr=interval(0.1,0.2)"])


def test_batch_script_of_a_run_in_a_bucket_logs_to_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run.dir=s3://bucket/runs/one", "run.name=one", "launch=slurm", "slurm.dry_run=true", "launch.device=cpu"]
    assert start_elsewhere(words, compose(words), lambda: None, lambda: None) == 0
    script = capsys.readouterr().out
    for line in (
        f"#SBATCH --output={tmp_path}/runs/one/slurm/%j.log", f"run_dir={tmp_path}/runs/one",
        "bucket=s3://bucket/runs/one",
        "arguments=(run.dir=s3://bucket/runs/one run.name=one launch=slurm launch.device=cpu)",
    ):  # fmt: skip
        assert f"\n{line}\n" in script, script
    assert not [*tmp_path.iterdir()]


def test_every_key_that_names_a_file_or_folder_is_among_those_that_refuse_addresses() -> None:
    named = {path for path, key in all_keys().items() if key.kind == "string" and not key.choices}
    named = {path for path in named if re.search(r"\b(files?|folder|path)\b", all_keys()[path].purpose.lower())}
    assert named - NO_PATHS - {"task.teacher"} <= PATHS.keys()
    with pytest.raises(UserError, match=r"^task\.teacher=ftp://host/model is an address"):
        teacher_section("ftp://host/model")


@pytest.mark.parametrize(
    ("key", "address", "use"),
    [
        (
            "data.tokenizer",
            "https://huggingface.co/Qwen/Qwen3-0.6B",
            "the name on the Hub: data.tokenizer=Qwen/Qwen3-0.6B",
        ),
        ("data.cache_dir", "file:///scratch/cache", "use data.cache_dir=/scratch/cache"),
        (
            "data.cache_dir",
            "gs://user:secret@bucket/x",
            "data.cache_dir contains a user, a query or a fragment; credentials belong in the environment",
        ),
    ],
)
def test_address_that_is_refused_has_a_path_or_a_name_in_its_place(key: str, address: str, use: str) -> None:
    said = refusal(f"{key}={address}")
    assert use in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("words", "fetch"),
    [
        (["data=text", "data.path=x"], "whole"),
        (["data=tokens", "data.path=s3://bucket/tokens", "data.tokenizer=bytes"], "ranges"),
    ],
)
def test_saved_run_reads_in_ranges_only_what_is_not_in_a_cache_that_is_not_trusted(
    words: list[str], fetch: str, tmp_path: Path
) -> None:
    config = compose([*words, "data.fetch=ranges", "data.cache_dir=s3://bucket/prepared"])
    (tmp_path / "config.yaml").write_text(config_yaml(config))
    saved = compose_saved(tmp_path / "config.yaml", [], ("data",))
    assert (saved.data.cache_dir, saved.data.fetch) == (None, fetch)
