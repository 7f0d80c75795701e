"""serried evaluate: the number that the run itself saw, on any number of processes, and what it means per byte."""

import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import serried
from serried.cli import main
from serried.configs.compose import compose, compose_saved
from serried.configs.errors import EXIT_MISTAKE, UserError
from serried.configs.schema.sections import DEFAULT_VALIDATION
from serried.recipes.data.samples.text_bytes import TextBytes
from serried.recipes.data.samples.token_dataset import Batch
from serried.recipes.data.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer, find_tokenizer, train_tokenizer
from serried.recipes.data.tokenizers.tokenizer import BytesTokenizer, CharsTokenizer, Tokenizer, hugging_face_files
from serried.recipes.models.layers.lm_head import IGNORE
from serried.trainer.run_data import check_validation
from testing.forked_runs import typed_on
from testing.rank_pool import Cluster
from testing.runs import checkpoint, metrics, overrides, run_here, steps_saved, tiny_overrides
from tests.cli.test_generate import files_of
from tests.support.own_task import Points


@pytest.fixture(scope="module")
def run_dir(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two sharded processes, with two validation sets."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    more = folder.parent / "more.txt"
    more.write_text("dolor sit amet, not seen before; " * 100)
    further = ["data.validation.more.name=text", f"data.validation.more.path={more}"]
    argv = overrides(
        text, folder, "parallel=fsdp", "trainer.steps=4", "trainer.eval_every=2", "trainer.eval_batches=1",
        "trainer.micro_batch=9", "checkpoint.every=2", "launch.device=cpu", "data.packing=best_fit", *further,
    )  # fmt: skip
    cluster.run(2, "testing.runs:train_small", argv=argv)
    return folder


def evaluate_here(words: list[str]) -> int:
    """What a rank does, without leaving: the process goes on to other tests."""
    from serried.commands.evaluate_model import evaluate

    return evaluate(words)


def evaluated(cluster: Cluster, ranks: int, *words: str) -> list[dict[str, Any]]:
    answers = cluster.run(ranks, "tests.cli.test_evaluate:evaluate_here", words=[*words, "json=true"])
    assert [answer.value for answer in answers] == [0] * ranks, answers
    assert not any(answer.printed for answer in answers[1:]), "rank 0 speaks"
    return [json.loads(line) for line in answers[0].printed.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("ranks", "more"),
    [(1, []), (2, []), pytest.param(4, ["parallel=ddp"], marks=pytest.mark.slow), (3, ["trainer.micro_batch=2"])],
)
def test_evaluation_equals_that_of_the_run(cluster: Cluster, run_dir: Path, ranks: int, more: list[str]) -> None:
    before = files_of(run_dir)
    found = evaluated(cluster, ranks, f"run.dir={run_dir}", *more)
    assert files_of(run_dir) == before, "nothing of the run is touched"
    last = {event["set"]: event for event in metrics(run_dir, "eval") if event["step"] == 4}
    assert [each["set"] for each in found] == ["validation", "more"] == list(last)
    for each in found:
        assert each["loss"] == pytest.approx(last[each["set"]]["loss"], rel=1e-6)
        assert each["tokens"] == last[each["set"]]["tokens"]
        assert each["perplexity"] == pytest.approx(math.exp(each["loss"]))
        ends = each["tokens"] - each["text_bytes"]
        assert 0 <= ends < 30, "all tokens are bytes but the end marks"
        assert each["bits_per_byte"] == pytest.approx(
            each["loss"] * each["tokens"] / math.log(2) / each["text_bytes"], rel=1e-9
        )


def test_saved_config_of_a_stranger_chooses_no_place_to_write_to(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    saved["run"]["dir"] = "/etc"
    saved["track"]["mlflow"] = "https://dapi-token@host/"  # as an earlier version kept it
    for cache, kept in (("theirs", None), ("ours", str(tmp_path / "ours"))):
        saved["data"]["cache_dir"] = str(tmp_path / cache)
        (tmp_path / "ours/memos").mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(saved))
        config = compose_saved(folder / "config.yaml", [], ())
        assert (config.run.dir, config.data.cache_dir, config.track.mlflow) == (folder, kept, None)
        typed = compose_saved(folder / "config.yaml", [f"data.cache_dir={tmp_path / 'typed'}"], ("data",))
        assert typed.data.cache_dir == str(tmp_path / "typed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (4, ["parallel=fsdp", "parallel.pipeline=2", "parallel.tensor=2", "model.tie_embeddings=true"]),
        (4, ["parallel=fsdp", "parallel.expert=2", "model=moe_tiny", "model.expert_hidden_dim=24"]),
        (2, ["parallel=fsdp", "parallel.context=2"]),
    ],
    ids=["pipeline x tensor, tied", "expert x fsdp", "context"],
)
def test_a_run_on_several_axes_is_evaluated_and_writes_as_one_process_does(
    ranks: int, how: list[str], cluster: Cluster, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [word for word in how if word.startswith("model")]
    small = [
        "trainer.steps=20", "trainer.eval_every=20", "trainer.eval_batches=1", "trainer.global_batch=8",
        "trainer.micro_batch=2", "optim.lr=0.05", "model.layers=2",
    ]  # fmt: skip
    texts = []
    for processes, layout in ((1, ["parallel=single", *model]), (ranks, how)):
        run_dir = tmp_path / f"x{processes}"
        argv = overrides(text, run_dir, *small, *layout)
        cluster.run(processes, "testing.runs:train_small", argv=argv)
        assert main(["generate", f"run.dir={run_dir}", "prompt=lorem ip", "temperature=0", "tokens=30"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(set(texts[0][8:])) > 2, "it has learned more than one letter"
    seen = metrics(run_dir, "eval")[-1]
    for processes, other in ((1, []), (2, ["parallel=fsdp", "parallel.tensor=2"])):
        (found,) = evaluated(cluster, processes, f"run.dir={run_dir}", *other)
        assert found["loss"] == pytest.approx(seen["loss"], rel=1e-5)
        assert found["tokens"] == seen["tokens"]


def test_earlier_checkpoint_and_full_validation_set_are_evaluated(cluster: Cluster, run_dir: Path) -> None:
    first = {event["set"]: event for event in metrics(run_dir, "eval") if event["step"] == 2}
    (found, _) = evaluated(cluster, 1, f"run.dir={run_dir}", "checkpoint=2")
    assert found["loss"] == pytest.approx(first["validation"]["loss"], rel=1e-6)
    assert found["sequences"] == 36 < found["all_sequences"]
    (whole, _) = evaluated(cluster, 1, f"run.dir={run_dir}", "trainer.eval_batches=1000")
    assert whole["sequences"] == whole["all_sequences"] == found["all_sequences"]


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "train"])
def test_other_text_is_tokenized_by_the_tokenizer_of_the_run(
    tokenizer: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    more = ["data.tokenizer=train", "data.vocab_size=300"] if tokenizer == "train" else [f"data.tokenizer={tokenizer}"]
    argv = tiny_overrides(text, run, *more, "trainer.eval_every=6", "trainer.eval_batches=1")
    assert run_here(argv).code == 0
    other = tmp_path / "other.txt"
    other.write_text("amet sed elit do " * 40)
    (found,) = evaluated(cluster, 1, f"run.dir={run}", "data=text", f"data.path={other}", "data.sequence_length=16")
    opened = BytesTokenizer() if tokenizer == "bytes" else find_tokenizer(str(run / "checkpoints" / "step-00000006"))
    ids = [*opened.encode(other.read_text()).tolist(), opened.end_id]
    assert found["tokens"] == len(ids) - 1, "no token is left out, however short the last sequence is"
    assert found["sequences"] == found["all_sequences"] == -(-(len(ids) - 1) // 16)
    told = opened.decode(ids[1:-1])
    assert found["text_bytes"] == len(told.encode())
    (own,) = evaluated(cluster, 1, f"run.dir={run}")
    assert own["loss"] == pytest.approx(metrics(run, "eval")[-1]["loss"], rel=1e-6)


def test_characters_outside_the_vocabulary_are_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert run_here(tiny_overrides(text, run, "data.tokenizer=chars")).code == 0
    (tmp_path / "other.txt").write_text("lorem Ω " * 40)
    assert evaluate_here([f"run.dir={run}", "data=text", f"data.path={tmp_path / 'other.txt'}"]) == 78
    printed = capsys.readouterr().err
    assert "'Ω'" in printed
    assert len(printed.splitlines()) == 1


def test_data_rewritten_with_another_tokenizer_is_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "text"
    mine.mkdir()
    for path in text.glob("*.txt"):
        (mine / path.name).write_text(path.read_text())
    run = tmp_path / "run"
    assert run_here(tiny_overrides(mine, run, "data.tokenizer=chars")).code == 0
    (mine / "30.txt").write_text("more: Ω " * 40)
    assert evaluate_here([f"run.dir={run}"]) == 78
    assert "data.tokenizer=chars is no longer the tokenizer of" in capsys.readouterr().err


def test_losses_of_a_mixture_are_reported_by_source(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = tiny_overrides(text, run, "trainer.eval_every=6", "trainer.eval_batches=3", "data=mixture")
    argv = [word for word in argv if not word.startswith("data.path")]
    for name, files in (("few", "0*.txt"), ("many", "[12]*.txt")):
        argv += [f"data.sources.{name}.name=text", f"data.sources.{name}.path={text}/{files}"]
    assert run_here(argv).code == 0
    last = metrics(run, "eval")[-1]
    found = evaluated(cluster, 2, f"run.dir={run}")
    assert [each["set"] for each in found] == ["validation", "validation/few", "validation/many"]
    assert found[0]["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert found[1]["loss"] == pytest.approx(last["source_losses"]["few"], rel=1e-6)
    assert sum(each["tokens"] for each in found[1:]) == found[0]["tokens"] == last["tokens"]


@pytest.mark.slow
def test_two_processes_print_the_same_as_one(run_dir: Path) -> None:
    done, other = typed_on(2, "-m", "serried", "evaluate", f"run.dir={run_dir}", "precision=bf16")
    assert (done.returncode, other.returncode) == (0, 0), done.stderr + other.stderr
    assert other.stdout == ""
    # On a busy machine it may say that it waits.
    head, first, second = (line for line in done.stdout.splitlines() if not line.startswith("waiting"))
    assert head.startswith(f"model      {run_dir}/checkpoints/step-00000004, bf16, 2 processes on cpu (gloo)")
    assert first.startswith("validation loss 5.")
    assert "bits/byte" in first
    assert "36 of" in first
    assert second.startswith("more       loss 5.")


def test_unreadable_config_is_reported_with_its_line(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = (run_dir / "config.yaml").read_text()
    (tmp_path / "checkpoints").symlink_to(run_dir / "checkpoints")
    (tmp_path / "config.yaml").write_text(saved.replace("eval_batches: 1", "eval_batches: few"))
    assert main(["evaluate", f"run.dir={tmp_path}"]) == 78
    printed = capsys.readouterr().err
    assert "trainer.eval_batches=few (config.yaml:" in printed
    (tmp_path / "config.yaml").write_text("[1, 2")
    assert main(["evaluate", f"run.dir={tmp_path}"]) == 78
    assert "is not a config that train.py wrote" in capsys.readouterr().err


def test_choice_of_data_replaces_only_the_source(run_dir: Path) -> None:
    saved = compose_saved(run_dir / "config.yaml", [], ("data",))
    changed = compose_saved(
        run_dir / "config.yaml", ["data=hf", "data.path=owner/set", "precision=bf16"], ("data", "precision")
    )
    assert (changed.data.name, changed.data.path, changed.data.validation) == ("hf", "owner/set", {})
    same = ("tokenizer", "sequence_length", "packing", "isolate_documents", "format", "cache_dir")
    assert all(getattr(changed.data, key) == getattr(saved.data, key) for key in same)
    assert (changed.precision.name, saved.precision.name) == ("bf16", "fp32")
    assert changed.model == saved.model


# bytes ----------------------------------------------------------------------------------------------------------------


def byte_level() -> HuggingFaceTokenizer:
    return train_tokenizer(iter(["the cat sat on the mat; né à la carte " * 20]), 320)


def of_words() -> HuggingFaceTokenizer:
    """As Llama 2's: blanks are part of words, a text begins with one, and what it does not know goes byte by byte."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    words = ["▁", "t", "h", "e", "c", "a", "▁t", "▁th", "▁the", "▁c", "▁ca"]
    vocabulary = {name: number for number, name in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "c"), ("▁c", "a")]
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["</s>"])
    return HuggingFaceTokenizer({"tokenizer.json": made.to_str(), "tokenizer_config.json": '{"eos_token": "</s>"}'})


KINDS: dict[str, Tokenizer] = {
    "bytes": BytesTokenizer(), "chars": CharsTokenizer("".join(sorted(set("the cat sat né€")))),
    "byte level": byte_level(), "words": of_words(),
}  # fmt: skip


@settings(max_examples=40)
@given(st.lists(st.text(alphabet="the cat sat né€", min_size=1, max_size=30), min_size=1, max_size=5))
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_targets_are_those_of_the_text(kind: str, documents: list[str]) -> None:
    tokenizer = KINDS[kind]
    ids = [tokenizer.end_id]
    for document in documents:
        ids += [*tokenizer.start_ids, *tokenizer.encode(document).tolist(), tokenizer.end_id]
    stream = torch.tensor([ids])
    batch = Batch(stream[:, :-1], stream[:, 1:], torch.zeros(1, dtype=torch.int64))
    counted = TextBytes(tokenizer)
    assert counted.of_targets(batch) == sum(len(document.encode()) for document in documents)
    half = batch.targets.clone()
    half[:, ::2] = IGNORE
    rest = batch.targets.clone()
    rest[:, 1::2] = IGNORE
    parts = [counted.of_targets(batch._replace(targets=targets)) for targets in (half, rest)]
    assert sum(parts) == counted.of_targets(batch), "each target counts once, however batches are cut"


def test_character_tokenizer_is_loaded_from_its_files(tmp_path: Path) -> None:
    tokenizer = CharsTokenizer("\n abcé€")
    for name, content in hugging_face_files(tokenizer).items():
        (tmp_path / name).write_text(content, "utf-8")
    found = find_tokenizer(str(tmp_path))
    assert isinstance(found, CharsTokenizer)
    assert found.spec() == tokenizer.spec()
    assert np.array_equal(found.encode("bé"), tokenizer.encode("bé"))
    for name, content in hugging_face_files(BytesTokenizer()).items():
        (tmp_path / name).write_text(content, "utf-8")
    assert isinstance(find_tokenizer(str(tmp_path)), HuggingFaceTokenizer)


def test_exported_model_by_its_bare_path_has_the_same_loss_as_its_run(
    cluster: Cluster, run_dir: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run_dir), f"out={tmp_path / 'model'}"]) == 0
    data = ["data=text", f"data.path={text}", f"data.cache_dir={tmp_path}"]
    (of_run,) = evaluated(cluster, 1, str(run_dir), *data)
    (of_model,) = evaluated(cluster, 1, str(tmp_path / "model"), *data, "data.sequence_length=32")
    assert of_model["loss"] == pytest.approx(of_run["loss"], rel=1e-4)
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "model")]) == 78
    assert "does not belong to a run, so give the data: data=text data.path=FILES" in capsys.readouterr().err


def test_evaluation_skipped_by_a_stop_is_run_on_resume(text: Path, tmp_path: Path) -> None:
    """So that patience and the best checkpoint are those of a run that never stopped."""

    def argv(run: Path) -> list[str]:
        return tiny_overrides(
            text, run, "trainer.steps=8", "trainer.eval_every=4", "trainer.eval_batches=1",
            "trainer.early_stopping_patience=5", "data.validation.more.name=text", f"data.validation.more.path={text}",
        )  # fmt: skip

    def stop(_: object, step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    def evaluated(run: Path) -> list[tuple[int, str, float]]:
        return [(line["step"], line["set"], line["loss"]) for line in metrics(run, "eval")]

    assert run_here(argv(tmp_path / "whole")).code == 0
    assert run_here(argv(tmp_path / "stopped"), stop).code == 75
    assert evaluated(tmp_path / "stopped") == [], "the ranks agreed to stop with step 4"
    assert run_here(argv(tmp_path / "stopped")).code == 0
    assert evaluated(tmp_path / "stopped") == evaluated(tmp_path / "whole")
    ends = [json.loads((checkpoint(tmp_path / run) / "state.json").read_text()) for run in ("whole", "stopped")]
    made_up = ends[1]["progress"].pop("made_up")
    assert made_up["4"]["loss"] == evaluated(tmp_path / "whole")[0][2], "retention finds it here"
    assert ends[0]["progress"] == ends[1]["progress"] | {"made_up": {}}


def test_missing_best_metric_is_reported_before_the_first_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="best_metric=acc is not a metric of this task; use one of loss, class_loss"):
        serried.fit(Points, [f"run.dir={tmp_path}", "checkpoint.best_metric=acc", "checkpoint.keep_best=true"])
    printed = capsys.readouterr().out
    warned = printed.index("WARNING    checkpoint.best_metric=acc is not a training metric")
    assert warned < printed.index("step 2/8")
    assert steps_saved(tmp_path) == [4]


@pytest.mark.parametrize("key", ["trainer.early_stopping_patience=2", "checkpoint.keep_best=true"])
def test_key_that_compares_evaluations_without_validation_data_is_refused(key: str) -> None:
    config = compose([key])
    check_validation(config, [DEFAULT_VALIDATION])
    with pytest.raises(UserError, match=f"^{key} needs evaluations, but there is no validation data; set data"):
        check_validation(config, ["other"])


# without data kept back -----------------------------------------------------------------------------------------------


def test_a_run_trains_on_all_documents_and_evaluates_on_none(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = tiny_overrides(text, run, "data.validation_fraction=0", "trainer.steps=2")
    ended = run_here(argv)
    assert ended.code == 0, ended.printed
    size = sum(path.stat().st_size + 1 for path in text.iterdir())  # each file and its end mark
    assert f"train {size:,} tokens of 30 files, validation 0 of 0" in ended.printed
    assert not metrics(run, "eval")
    assert run_here([*argv, "checkpoint.keep_best=true", "trainer.eval_every=2"]).error.count("validation") >= 1


def test_evaluating_on_nothing_is_refused_with_overrides_that_work(text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "data.validation_fraction=0", "trainer.eval_every=1")
    message = run_here(argv).error
    assert "trainer.eval_every=0, or add a validation set: " in message
    own = re.findall(r"data\.validation\.NAME\.\S+", message)
    own = [word.replace("NAME", "own").replace("FILES", str(tmp_path / "own.txt")) for word in own]
    (tmp_path / "own.txt").write_text("dolor sit amet, not seen before; " * 100)
    ended = run_here([*argv, *own, "trainer.steps=2", "trainer.eval_batches=1"])
    assert ended.code == 0, ended.printed
    events = metrics(tmp_path / "run", "eval")
    assert [(event["set"], event["step"]) for event in events] == [("own", 1), ("own", 2)]
    found = main(["evaluate", f"run.dir={tmp_path / 'run'}", "json=true", "trainer.eval_batches=1"])
    assert found == 0


@pytest.mark.parametrize("more", ["data.streaming=true", "data.packing=best_fit", "data.validation_split=validation"])
def test_run_without_held_out_rows_trains_on_all_rows(more: str, text: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    for split in ("train", "validation"):
        lines = [json.dumps({"text": f"{path.read_text()} {split}"}) + "\n" for path in sorted(text.iterdir())]
        (rows / f"{split}.jsonl").write_text("".join(lines))
    argv = tiny_overrides(text, tmp_path / "run", "data=hf", f"data.path={rows}", "data.validation_fraction=0", more)
    ended = run_here([*argv, "trainer.steps=2"])
    assert ended.code == 0, ended.printed
    if more == "data.streaming=true":
        assert "validation 0 tokens" in ended.printed
    else:
        assert "tokens of 30 documents, validation" in ended.printed
    evaluating = run_here([*argv, "trainer.steps=2", "trainer.eval_every=2", "checkpoint.resume=never"])
    assert evaluating.code == (0 if "split" in more else EXIT_MISTAKE)


def test_run_without_held_out_documents_trains_on_the_full_mixture(text: Path, tmp_path: Path) -> None:
    sources = ["data=mixture", "data.validation_fraction=0", "trainer.steps=1"]
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 4000)
        sources += [f"data.sources.{name}.name=text", f"data.sources.{name}.path={tmp_path / name}.txt"]
    argv = [word for word in tiny_overrides(text, tmp_path / "run", *sources) if not word.startswith("data.path=")]
    ended = run_here(argv)
    assert ended.code == 0, ended.printed
    assert ended.printed.count("train 4,001 tokens of 1 file, validation 0 of 0") == 2
