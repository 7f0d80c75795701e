"""What a command resumes from, what it may change, what it keeps, and what it says."""

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from serried import cli
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.plain_data import read_yaml
from serried.configs.schema.data import TextRunConfig
from serried.configs.schema.run_config import run_config_class
from serried.recipes.data.tokenizers.tokenizer import changed_token
from serried.trainer.checkpoint.manifest import read_manifest, record_of, write_manifest
from serried.trainer.checkpoint.resume import differences, is_free
from serried.trainer.checkpoint.saved_state import read_state
from testing.runs import (
    Ended,
    checkpoint,
    losses,
    metrics,
    run_here,
    status,
    steps_saved,
    tiny_overrides,
    tree,
    weights,
)

pytestmark = pytest.mark.usefixtures("_elsewhere")


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths, and what a mistake leaves behind, stay in the test's own folder."""
    monkeypatch.chdir(tmp_path)


def train(text: Path, run_dir: Path, *more: str, code: int = 0, **keywords: Any) -> Ended:
    ended = run_here(tiny_overrides(text, run_dir, *more), **keywords)
    assert ended.code == code, ended.printed
    return ended


def refusal(text: Path, run_dir: Path, *more: str) -> str:
    """The one line that refuses the command."""
    return run_here(tiny_overrides(text, run_dir, *more)).error


def resumed_from(run_dir: Path) -> list[int | None]:
    return [line["resumed_from"] for line in metrics(run_dir, "start")]


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with all its checkpoints, which nobody may change."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    train(text, run_dir, "checkpoint.keep=9")
    return run_dir


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


# where it begins ------------------------------------------------------------------------------------------------------


def test_resume_must_without_a_checkpoint_is_refused(text: Path, tmp_path: Path) -> None:
    line = refusal(text, tmp_path / "run", "checkpoint.resume=must")
    assert "checkpoint.resume=must" in line
    assert "use checkpoint.resume=auto" in line
    train(text, tmp_path / "run", "trainer.stop_at=2", code=75)
    train(text, tmp_path / "run", "checkpoint.resume=must")
    assert resumed_from(tmp_path / "run") == [None, 2]


def test_resume_never_keeps_the_earlier_run_aside(text: Path, copy: Path) -> None:
    before = tree(copy)
    printed = train(text, copy, "checkpoint.resume=never", "trainer.steps=2").printed
    assert f"an earlier run here (finished at step 6) is kept in {copy}/earlier-1" in printed
    assert tree(copy / "earlier-1") == before
    assert steps_saved(copy) == [2]
    assert resumed_from(copy) == [None]
    assert [line["step"] for line in metrics(copy)] == [1, 2]


@pytest.mark.parametrize("name", ["checkpoint", "run folder"])
def test_resuming_from_another_run_leaves_its_folder_unchanged(
    name: str, text: Path, finished: Path, tmp_path: Path
) -> None:
    given = finished / "checkpoints/step-00000002" if name == "checkpoint" else finished
    step, steps = (2, 6) if name == "checkpoint" else (6, 8)
    before = tree(finished)
    how = [f"checkpoint.resume={given}", f"trainer.steps={steps}", "checkpoint.allow_changes=true"]
    train(text, tmp_path / "run", *how)
    assert tree(finished) == before
    assert resumed_from(tmp_path / "run") == [step]
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(step + 1, steps + 1))
    if name == "checkpoint":
        assert losses(tmp_path / "run") == losses(finished)[2:]


def test_missing_resume_path_is_refused_and_changes_nothing(text: Path, copy: Path) -> None:
    before = tree(copy)
    line = refusal(text, copy, f"checkpoint.resume={copy}/checkpoints/step-00000003")
    assert "step-00000003 is not auto, never, must or an existing folder" in line
    assert f"in {copy}/checkpoints there are step-00000002 step-00000004 step-00000006; use checkpoint." in line
    assert "did you mean checkpoint.resume=never?" in refusal(text, copy, "checkpoint.resume=nver")
    file = copy / "config.yaml"
    assert str(file) in refusal(text, copy, f"checkpoint.resume={file}")
    (copy.parent / "empty").mkdir()
    assert "config.json" in refusal(text, copy, f"checkpoint.resume={copy.parent}/empty")
    assert tree(copy) == before


def test_another_run_that_is_already_past_the_last_step_is_refused(text: Path, finished: Path, tmp_path: Path) -> None:
    line = refusal(text, tmp_path / "run", f"checkpoint.resume={finished}")
    assert "step 6" in line
    assert "trainer.steps=6" in line


def test_same_path_again_resumes_from_its_own_checkpoints(text: Path, finished: Path, tmp_path: Path) -> None:
    given, run_dir = finished / "checkpoints/step-00000002", tmp_path / "run"
    relative = os.path.relpath(given)
    assert relative.startswith("..")
    train(text, run_dir, f"checkpoint.resume={given}", "trainer.stop_at=4", code=75)
    train(text, run_dir, f"checkpoint.resume={relative}", "trainer.stop_at=5", code=75)
    train(text, run_dir, f"checkpoint.resume={given}/")
    assert resumed_from(run_dir) == [2, 4, 5]
    assert [line["step"] for line in metrics(run_dir)] == [3, 4, 5, 6]
    assert not list(run_dir.glob("earlier-*"))
    assert "Nothing to do" in train(text, run_dir, f"checkpoint.resume={given}").printed
    # Another path is another beginning.
    printed = train(text, run_dir, f"checkpoint.resume={finished}/checkpoints/step-00000004").printed
    assert f"kept in {run_dir}/earlier-1" in printed
    assert resumed_from(run_dir) == [4]


@pytest.mark.parametrize("spelling", ["absolute", "relative", "run.dir relative"])
def test_rolling_back_keeps_newer_checkpoints_aside_and_resumes(spelling: str, text: Path, copy: Path) -> None:
    run_dir = Path("run") if spelling == "run.dir relative" else copy
    given = "run/checkpoints/step-00000002" if spelling == "relative" else copy / "checkpoints/step-00000002"
    expected = losses(copy)
    back = [f"checkpoint.resume={given}", "checkpoint.keep=9"]
    printed = train(text, run_dir, *back, "trainer.stop_at=4", code=75).printed
    assert "newer checkpoints (step-00000004, step-00000006) are kept in" in printed
    assert steps_saved(copy / "earlier-1") == [4, 6]
    assert steps_saved(copy) == [2, 4]
    train(text, run_dir, *back)
    assert steps_saved(copy) == [2, 4, 6]
    assert resumed_from(copy) == [None, 2, 4]
    assert [path.name for path in copy.glob("earlier-*")] == ["earlier-1"]
    assert [line["step"] for line in metrics(copy)] == [1, 2, 3, 4, 5, 6]
    assert losses(copy) == expected


def test_a_run_folder_given_as_its_own_path_is_just_resumed(text: Path, tmp_path: Path) -> None:
    train(text, tmp_path / "run", "trainer.stop_at=4", code=75)
    train(text, Path("run"), f"checkpoint.resume={tmp_path}/run")
    assert resumed_from(tmp_path / "run") == [None, 4]
    assert not list((tmp_path / "run").glob("earlier-*"))


# what may change ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after 2 of its 6 steps, which nobody may change."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    train(text, run_dir, "trainer.stop_at=2", code=75)
    return run_dir


def test_change_of_settings_that_affect_training_is_refused_in_one_line(
    text: Path, stopped: Path, tmp_path: Path
) -> None:
    before = tree(stopped)
    for change, told in {
        "optim.lr=0.001": "optim.lr 0.003 -> 0.001",
        "optim.betas=[0.9,0.99]": "optim.betas [0.9,0.95] -> [0.9,0.99]",
        "schedule=linear": "schedule.name cosine -> linear",
        "schedule.warmup_steps=2": "schedule.warmup_steps 1 -> 2",
        "trainer.steps=7": "trainer.steps 6 -> 7",
        "trainer.seed=2": "trainer.seed 1 -> 2",
        "trainer.global_batch=6": "trainer.global_batch 4 -> 6",
        "trainer.max_grad_norm=0": "trainer.max_grad_norm 1.0 -> 0.0",
        "precision=bf16": "precision.name fp32 -> bf16",
        "data.sequence_length=16": "data.sequence_length 32 -> 16",
    }.items():
        line = refusal(text, stopped, change)
        assert f"would change the run: {told}; use run.dir=OTHER to keep both, or checkpoint.resume=never" in line
        key = told.partition(" ")[0]
        assert line.endswith(f"or 'checkpoint.allow_changes=[{key}]' to resume with the new settings")
    several = refusal(text, stopped, "optim.lr=0.1", "trainer.seed=3", "trainer.log_every=2")
    assert "would change the run: optim.lr 0.003 -> 0.1; trainer.seed 1 -> 3; use" in several
    assert "'checkpoint.allow_changes=[optim.lr,trainer.seed]'" in several
    beside = refusal(text, stopped, "optim.lr=0.1", "trainer.seed=3", "checkpoint.allow_changes=[optim]")
    assert "would change the run: trainer.seed 1 -> 3; use" in beside
    assert "'checkpoint.allow_changes=[optim,trainer.seed]'" in beside
    model = refusal(text, stopped, "model.dim=64", "data=stdlib", "data.path=null", "trainer.steps=7")
    changes = "data.name text -> stdlib; model.dim 16 -> 64; trainer.steps 6 -> 7; use"
    assert changes in model, "all that changed is named, data first"
    assert "allow_changes" not in model, "the weights would not fit"
    elsewhere = refusal(text, tmp_path / "fork", "optim.lr=0.1", f"checkpoint.resume={checkpoint(stopped)}")
    assert "run.dir=OTHER" not in elsewhere, "it is another already"
    assert f"use its weights alone: checkpoint.resume={checkpoint(stopped)} checkpoint.weights_only=true" in elsewhere
    assert tree(stopped) == before


@pytest.mark.parametrize("change", ["precision=fp16", "data.sequence_length=16 trainer.seed=2 optim.lr=0.001"])
def test_change_of_settings_that_affect_training_may_be_allowed(
    change: str, text: Path, stopped: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    printed = train(text, tmp_path / "run", *change.split(), "checkpoint.allow_changes=true").printed
    told = next(line for line in printed.splitlines() if line.startswith("changed since the checkpoint: "))
    assert all(word.split("=")[1] in told for word in change.split())
    assert resumed_from(tmp_path / "run") == [None, 2]
    assert not any(line["skipped"] for line in metrics(tmp_path / "run"))


def test_other_content_under_the_same_path_is_refused_until_allowed(text: Path, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "text")
    data = [f"data.path={tmp_path}/text", f"data.cache_dir={tmp_path}/cache"]
    train(text, tmp_path / "run", *data, "trainer.stop_at=2", code=75)
    (tmp_path / "text/00.txt").write_text("something else " * 100)
    before = tree(tmp_path / "run")
    line = refusal(text, tmp_path / "run", *data)
    assert "different data (fingerprint" in line
    assert "'checkpoint.allow_changes=[optim.lr,data.path]'" in refusal(
        text, tmp_path / "run", *data, "checkpoint.allow_changes=[optim.lr]"
    )
    assert "'checkpoint.allow_changes=[data.path]'" in line
    assert tree(tmp_path / "run") == before
    train(text, tmp_path / "run", *data, "checkpoint.allow_changes=[data.path]")
    assert resumed_from(tmp_path / "run") == [None, 2]


def test_checkpoint_before_an_allowed_change_is_kept(text: Path, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    more = ["optim.lr=1", "checkpoint.allow_changes=[optim.lr]", "checkpoint.every=1", "checkpoint.keep=1"]
    printed = train(text, tmp_path / "run", *more, "trainer.stop_at=4", code=75).printed
    assert f"{tmp_path}/run/checkpoints/step-00000002 is kept" in printed
    assert steps_saved(tmp_path / "run") == [2, 4]
    assert "is kept" not in train(text, tmp_path / "run", *more, "trainer.stop_at=5", code=75).printed
    assert steps_saved(tmp_path / "run") == [2, 5]
    train(text, tmp_path / "run", *more[1:])
    assert steps_saved(tmp_path / "run") == [5, 6], "the one before the last change"


@pytest.mark.parametrize("tokenizer", ["train", "chars"])
def test_tokenizer_learned_again_is_refused_under_the_weights_whatever_is_allowed(
    tokenizer: str, tmp_path: Path
) -> None:
    folder, run_dir = tmp_path / "text", tmp_path / "run"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat sat on the mat with a hat and that was that " * 60)
    own = [f"data.tokenizer={tokenizer}", f"data.cache_dir={tmp_path}/cache"]
    own += ["data.vocab_size=280"] * (tokenizer == "train")
    train(folder, run_dir, *own, "trainer.stop_at=2", code=75)
    (folder / "b.txt").write_text("Quincunx zigzag QUIZ jazz, buzz & fizz! " * 60)
    before = tree(run_dir)
    for allowed in ("false", "true", "[data]"):
        line = refusal(folder, run_dir, *own, f"checkpoint.allow_changes={allowed}")
        assert (
            f"was trained with a different tokenizer than the current one of data.tokenizer={tokenizer}: token '"
            in line
        )
    assert tree(run_dir) == before
    use = line.partition("use the tokenizer of the checkpoint, ")[2].partition(
        " without" if tokenizer == "train" else ", or"
    )[0]
    if tokenizer == "train":
        train(folder, run_dir, own[1], *shlex.split(use))
        assert resumed_from(run_dir) == [None, 2]
        assert 2 in steps_saved(run_dir), "its tokenizer is read again at the next start"


def test_token_that_is_added_to_a_tokenizer_changes_no_other(tmp_path: Path) -> None:
    now = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<end>", "id": 2}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(now))

    def changed(**other: Any) -> str | None:
        return changed_token(tmp_path / "tokenizer.json", json.dumps({**now, **other}))

    assert changed() is changed(version="1.0") is None
    assert changed(added_tokens=[*now["added_tokens"], {"content": "<new>", "id": 3}]) is None
    assert changed(model={"vocab": {"b": 0, "a": 1}}) == "token 'a' had id 0 and now has id 1"
    assert changed(model={"vocab": [["a", -1.0], ["b", -2.0]]}) is None
    assert changed(added_tokens=[]) == "token '<end>' had id 2 and now has no id"
    assert changed_token(tmp_path / "none.json", "{}") is None


def test_names_in_allow_changes_are_looked_up() -> None:
    for typed, told in {
        "[optim.lrr]": "there is no key optim.lrr; did you mean 'checkpoint.allow_changes=[optim.lr]'?",
        "optim.lr": "is not true or false or a list of strings; e.g. 'checkpoint.allow_changes=[optim.lr]'",
        "optim.lr,trainer.seed": "write a list in brackets, 'checkpoint.allow_changes=[optim.lr,trainer.seed]'",
    }.items():
        with pytest.raises(UserError) as error:
            compose([f"checkpoint.allow_changes={typed}"])
        assert str(error.value).endswith(told)
    allowed = compose(["checkpoint.allow_changes=[optim,data.sources.web.path]"]).checkpoint
    assert [key for key in ("optim.lr", "optimistic", "trainer.seed") if allowed.allows(key)] == ["optim.lr"]


def test_the_same_content_under_another_path_is_the_same(text: Path, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "moved")
    shutil.copytree(stopped, tmp_path / "run")
    printed = train(text, tmp_path / "run", f"data.path={tmp_path}/moved").printed
    assert f"changed since the checkpoint: data.path {text} -> {tmp_path}/moved" in printed


def test_with_another_batch_no_sample_is_repeated_or_skipped(text: Path, tmp_path: Path) -> None:
    straight = train(text, tmp_path / "straight", "trainer.global_batch=6", "trainer.steps=5").sample_ids
    pieces = train(text, tmp_path / "run", "trainer.global_batch=6", "trainer.stop_at=3", code=75).sample_ids
    pieces += train(text, tmp_path / "run", "trainer.global_batch=4", "checkpoint.allow_changes=true").sample_ids
    assert pieces == straight
    assert len(set(pieces)) == 30
    assert [line["samples"] for line in metrics(tmp_path / "run")] == [6, 12, 18, 22, 26, 30]


def test_harmless_changes_are_only_reported(text: Path, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    changes = {
        "parallel=fsdp": "parallel.strategy ddp -> fsdp",
        "trainer.micro_batch=4": "trainer.micro_batch 2 -> 4",
        "trainer.log_every=2": "trainer.log_every 1 -> 2",
        "trainer.eval_every=2": "trainer.eval_every 0 -> 2",
        "trainer.eval_batches=1": "trainer.eval_batches 8 -> 1",
        "data.workers=0": "data.workers 2 -> 0",
        "launch.step_timeout_seconds=60": "launch.step_timeout_seconds 300.0 -> 60.0",
    }
    printed = train(text, tmp_path / "run", *changes, "checkpoint.keep=3").printed
    told = [line for line in printed.splitlines() if line.startswith("changed since the checkpoint: ")]
    assert len(told) == 1
    for text_ in changes.values():
        assert text_ in told[0]
    assert "run.dir" not in told[0]
    assert "WARNING" not in printed


def test_constant_schedule_may_be_extended(text: Path, tmp_path: Path) -> None:
    train(text, tmp_path / "run", "schedule=constant", "trainer.steps=4")
    printed = train(text, tmp_path / "run", "schedule=constant", "trainer.steps=6").printed
    assert "changed since the checkpoint: trainer.steps 4 -> 6" in printed
    train(text, tmp_path / "straight", "schedule=constant")
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


# stopping -------------------------------------------------------------------------------------------------------------


def test_stopped_run_reports_nothing_to_do_at_its_stop(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def ended() -> tuple[str, int, int]:
        now = status(run_dir)
        return now["state"], now["step"], now["exit_code"]

    train(text, run_dir, "trainer.stop_at=3", code=75)
    assert ended() == ("stopped", 3, 75)
    assert steps_saved(run_dir) == [2, 3]
    before = tree(run_dir)
    told = (run_dir / "status.json").stat().st_mtime_ns
    printed = train(text, run_dir, "trainer.stop_at=3", code=75).printed
    assert (run_dir / "status.json").stat().st_mtime_ns > told, "a batch script must see that this start has stopped"
    assert "is at step 3, where trainer.stop_at=3 stops. Nothing to do." in printed
    assert tree(run_dir) == before
    train(text, run_dir)
    assert ended() == ("finished", 6, 0)
    before = tree(run_dir)
    for more in ((), ("trainer.stop_at=6",), ("trainer.stop_at=3",), ("trainer.stop_at=9",)):
        printed = train(text, run_dir, *more).printed
        assert f"{run_dir} is finished: 6 steps" in printed
    assert tree(run_dir) == before


# records --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crashed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that crashed after step 5; its newest checkpoint is that of step 4. Nobody may change it."""

    def crash(_: Any, step: int) -> None:
        if step == 5:
            raise OSError("a crash")

    run_dir = tmp_path_factory.mktemp("crashed") / "run"
    train(text, run_dir, "checkpoint.mode=sync", code=70, after_step=crash)
    return run_dir


@pytest.mark.parametrize("torn", ["no", "in the middle"])
def test_after_a_crash_each_step_is_recorded_once(torn: str, text: Path, crashed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(crashed, run_dir)
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines = [line for line in lines if json.loads(line)["event"] != "stop"]  # as if killed
    assert json.loads(lines[-1])["step"] == 5
    if torn == "in the middle":
        lines[-1] = lines[-1][:30]
    path.write_text("".join(lines))
    train(text, run_dir)
    assert resumed_from(run_dir) == [None, 4]
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics(run_dir, "checkpoint")] == [2, 4, 6]
    lost = (run_dir / "lost.jsonl").read_text().splitlines()
    assert len(lost) == 1
    assert torn != "no" or json.loads(lost[0])["step"] == 5


# what stays -----------------------------------------------------------------------------------------------------------


def test_retention_keeps_newest_and_every_nth_checkpoint(text: Path, tmp_path: Path) -> None:
    keys = ["checkpoint.keep=2", "checkpoint.keep_every=3"]
    train(text, tmp_path / "run", *keys, "checkpoint.every=1", "trainer.steps=9", "trainer.stop_at=5", code=75)
    train(text, tmp_path / "run", *keys, "checkpoint.every=1", "trainer.steps=9")
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (3, 6, 8, 9)
    ]


def test_retention_keeps_the_best_checkpoint(text: Path, tmp_path: Path) -> None:
    # A learning rate that ruins the model after its first steps.
    how = ["checkpoint.keep=1", "checkpoint.keep_best=true", "trainer.eval_every=2", "checkpoint.every=1"]
    spoilt = ["schedule=linear", "schedule.warmup_steps=8", "schedule.min_lr_ratio=1", "optim.lr=4", "trainer.steps=8"]
    train(text, tmp_path / "run", *how, *spoilt)
    found = {line["step"]: line["loss"] for line in metrics(tmp_path / "run", "eval")}
    best = min(found, key=lambda step: found[step])
    assert best != 8, found
    assert steps_saved(tmp_path / "run") == [best, 8]


# what a fresh pair of eyes found --------------------------------------------------------------------------------------


def test_unlisted_file_in_a_checkpoint_is_refused(text: Path, copy: Path) -> None:
    """As ``save_pretrained`` into the folder leaves it: it would be read instead of the checkpoint's own."""
    newest = copy / "checkpoints" / "step-00000006"
    (newest / "optimizer.safetensors.index.json").write_text("{}")
    assert "optimizer.safetensors.index.json is not part of the checkpoint" in refusal(text, copy)


def test_a_checkpoint_without_its_manifest_is_not_taken_for_a_model_folder(
    text: Path, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished / "checkpoints" / "step-00000004", tmp_path / "model")
    (tmp_path / "model" / "MANIFEST.json").unlink()
    line = refusal(text, tmp_path / "run", f"checkpoint.resume={tmp_path / 'model'}")
    assert "is a checkpoint without MANIFEST.json" in line
    (tmp_path / "model" / "state.json").unlink()
    train(text, tmp_path / "run", f"checkpoint.resume={tmp_path / 'model'}", "model.max_sequence_length=8192")
    assert resumed_from(tmp_path / "run") == [None]


def test_resume_accepts_the_checkpoints_folder(text: Path, finished: Path, tmp_path: Path) -> None:
    path = f"checkpoint.resume={finished / 'checkpoints'}"
    train(text, tmp_path / "run", path, "trainer.steps=8", "checkpoint.allow_changes=true")
    assert resumed_from(tmp_path / "run") == [6]


def test_too_little_disk_space_moves_nothing(text: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serried.trainer.checkpoint.checkpoints._SPARE_BYTES", 2**60)
    before = tree(copy)
    assert "free" in refusal(text, copy, "checkpoint.resume=never")
    assert tree(copy) == before


def test_run_killed_after_its_last_checkpoint_is_finished(text: Path, copy: Path) -> None:
    (copy / "status.json").write_text('{"state": "running", "step": 6, "reason": null, "exit_code": null}')
    train(text, copy)
    assert status(copy)["state"] == "finished"


def test_partial_checkpoint_is_removed_before_the_space_check(
    text: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = copy / "checkpoints" / ".step-00000008.partial"
    partial.mkdir()
    asked: list[bool] = []

    def lack(*_: Any) -> None:
        asked.append(partial.exists())

    monkeypatch.setattr("serried.trainer.checkpoint.checkpoints.lack_of_space", lack)
    train(text, copy, "trainer.steps=8", "checkpoint.allow_changes=true")
    assert asked[0] is False


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("data.path={other}", "different data"),
        ("data.path=nowhere", "nowhere"),
        ("model.vocab_size=300", "other shapes"),
    ],
)
def test_finished_run_refuses_a_command_with_other_settings(
    change: str, expected: str, text: Path, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("others' words, " * 1000)
    assert expected in refusal(text, finished, change.format(other=tmp_path / "other.txt"))


def test_loss_that_was_never_finite_is_reported_and_ends_nothing(text: Path, tmp_path: Path) -> None:
    def lose(trainer: Any, _: int) -> None:
        trainer.progress.counts.first_loss = trainer.progress.counts.last_loss = None

    ended = train(text, tmp_path / "run", after_step=lose)
    assert "loss not finite -> not finite" in ended.printed


def test_invalid_utf8_in_the_records_is_ignored(text: Path, copy: Path) -> None:
    with (copy / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "step": 9, \xff\xfe\n')
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    train(text, copy)
    assert [line["step"] for line in metrics(copy)] == [1, 2, 3, 4, 5, 6]


def test_a_key_that_an_older_version_did_not_know_is_no_change(stopped: Path) -> None:
    earlier = json.loads((next((stopped / "checkpoints").glob("step-*")) / "state.json").read_text())["config"]
    now = json.loads(json.dumps(earlier))
    del earlier["optim"]["lr"], earlier["optim"]["eps"], earlier["optim"]["betas"], earlier["checkpoint"]["keep"]
    schema = run_config_class(now, TextRunConfig)
    assert list(differences(earlier, now, schema)) == ["optim.lr"], "it has no default, so nobody knows"


@pytest.mark.parametrize("change", ["model.vocab_size=257", "model.head_dim=4"])
def test_keys_without_effect_on_the_numbers_are_no_change(
    change: str, text: Path, stopped: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    assert "would change" not in train(text, tmp_path / "run", change).printed


def test_an_edited_config_yaml_is_said_to_have_no_effect(text: Path, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    assert "file is not read" not in train(text, tmp_path / "run", "trainer.log_every=2").printed
    path = tmp_path / "run/config.yaml"
    path.write_text(path.read_text().replace("seed: ", "seed: 1"))
    printed = train(text, tmp_path / "run").printed
    seed = read_yaml(path)["trainer"]["seed"]
    assert f"config.yaml has trainer.seed={seed}, but this file is not read" in printed


# a checkpoint from a stranger -----------------------------------------------------------------------------------------

ODD_VALUES: list[tuple[str, Any]] = [
    ("step", "6"), ("step", -1), ("samples", 1e300), ("samples", None), ("config", []), ("config.data", 3),
    ("config.data", {"sources": 7}), ("progress.tokens", None), ("progress.first_loss", "low"),
    ("progress.surprise", 1), ("step_state", {}), ("step_state.window", {"values": [1]}),
    ("step_state.failed_in_row", "x"), ("data_fingerprint", None), ("origin", 3), ("tracker_run_id", {}),
    ("torch", None), ("world_size", "two"), ("version", 2),
]  # fmt: skip


def test_checkpoint_without_a_bias_that_its_model_has_since_is_continued_from_its_weights(
    text: Path, tmp_path: Path
) -> None:
    experts = [
        "model=moe_tiny", "model.family=qwen3_moe", "model.shared_experts=0", "model.qk_norm=true",
        "model.rotary_fraction=1", "model.dense_layers=0", "model.attention_bias=true",
    ]  # fmt: skip
    train(text, tmp_path / "run", *experts, "trainer.stop_at=2", code=75)
    folder = checkpoint(tmp_path / "run")
    for file in folder.glob("*.safetensors"):
        kept = {name: each for name, each in load_file(file).items() if ".o_proj.bias" not in name}
        save_file(kept, file, {"format": "pt"})
    write_manifest(folder, {name: record_of(folder / name) for name in read_manifest(folder)})
    line = refusal(text, tmp_path / "run", *experts)
    assert "was trained by an earlier version without o_proj.bias" in line
    words = shlex.split(line[line.index("serried export") : line.index(", then")])
    assert cli.main(words[1:]) == 0
    more = ["checkpoint.resume=weights", "optim.lr=0", "trainer.steps=1"]
    assert line.endswith("then checkpoint.resume=weights")
    train(text, tmp_path / "next", *experts, *more)
    before, after = weights(tmp_path / "run"), weights(tmp_path / "next")
    assert all(after[name].equal(each) for name, each in before.items())
    biases = [each for name, each in after.items() if name not in before]
    assert len(biases) == 1
    assert not biases[0].any()


def changed_state(state: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of ``state`` with ``value`` at the dotted ``key``."""
    first, _, rest = key.partition(".")
    return {**state, first: changed_state(state[first], rest, value) if rest else value}


def test_odd_values_in_state_json_are_one_line_even_with_a_fitting_manifest(text: Path, tmp_path: Path) -> None:
    train(text, tmp_path / "run", "trainer.stop_at=2", code=75)
    folder = checkpoint(tmp_path / "run")
    state = json.loads((folder / "state.json").read_text())
    records = read_manifest(folder)
    texts = [json.dumps(changed_state(state, key, value)) for key, value in ODD_VALUES]
    texts += ["[]", "3", "[" * 5000, '{"version": 1}', '"\udcff"', ""]
    for odd in texts:
        (folder / "state.json").write_bytes(odd.encode("utf-8", "surrogateescape"))
        write_manifest(folder, {**records, "state.json": record_of(folder / "state.json")})
        assert "step-00000002" in refusal(text, tmp_path / "run")


def test_sections_say_which_of_their_keys_shape_the_numbers() -> None:
    words = ["data=mixture", "data.sources.web.name=text", "data.sources.web.path=x", "optim.groups.slow.parameters=*"]
    config = compose([*words, "data.validation.held.name=text", "data.validation.held.path=y"])
    shaping = [
        "model.dim", "model.path", "data.sequence_length", "data.tokenizer", "data.sources.web.weight", "optim.lr",
        "optim.groups.slow.lr_scale", "task.named", "model.head_dimension", "trainer.global_batch", "precision.name",
    ]  # fmt: skip
    named = ["data.name", "data.sources.web.path", "data.sources.web.text_column", "data.validation.held.path"]
    free = [
        "recipe",
        "run.dir",
        "parallel.shard",
        "trainer.eval_every",
        "data.cache_dir",
        "model.head_dim",
        "task.name",
    ]
    assert not [key for key in shaping if is_free(key, config)]
    assert all(is_free(key, config, by_content=True) for key in named)
    assert all(is_free(key, config) and not is_free(key, config, by_content=True) for key in free)


def test_state_beyond_the_last_step_of_its_config_is_refused(tmp_path: Path) -> None:
    def written(step: int, trainer: dict[str, Any]) -> dict[str, Any]:
        state = {
            "version": 1, "step": step, "samples": 4, "config": {"trainer": trainer}, "progress": {}, "step_state": {},
            "data_fingerprint": "x",
        }  # fmt: skip
        (tmp_path / "state.json").write_text(json.dumps(state))
        return read_state(tmp_path)

    assert written(20, {"steps": 20})["step"] == 20
    assert written(20, {})["step"] == 20
    for step in (21, 10**15):
        with pytest.raises(
            UserError, match=rf"has invalid values: step {step} exceeds trainer\.steps=20 of its config; use"
        ):
            written(step, {"steps": 20})
