"""Fine-tuning on conversations, from an exported model to a checkpoint that transformers talks through."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serried.commands import export_models
from serried.recipes.data.prepared.summary import marked_lines
from serried.recipes.data.readers.columns import Column
from serried.recipes.data.readers.row_files import units_of_file
from serried.recipes.data.tokenizers.tokenizer import BytesTokenizer
from testing import runs

CHAT = [
    {"role": "system", "content": "You count."},
    {"role": "user", "content": "One, two?"},
    {"role": "assistant", "content": "Three."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Four."},
]


ADD = {"role": "user", "content": "Add."}


def write_chats(path: Path, count: int = 120) -> Path:
    chats = [[*CHAT[: 3 + number % 3], {"role": "assistant", "content": f"{number}."}] for number in range(count)]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


@pytest.fixture(scope="module")
def model(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, as anybody's would be."""
    folder = tmp_path_factory.mktemp("model")
    assert runs.run_here(runs.tiny_overrides(text, folder / "run", "trainer.steps=1")).code == 0
    export_models.export([f"run.dir={folder / 'run'}", f"out={folder / 'model'}"])
    return folder / "model"


def sft(model: Path, chats: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        "recipe=sft", f"data.path={chats}", f"data.cache_dir={chats.parent / 'cache'}", f"run.dir={run_dir}",
        f"model.path={model}", "data.sequence_length=256", "trainer.steps=3", "trainer.global_batch=4",
        "trainer.eval_every=3", "trainer.log_every=1", "optim.lr=0.01", *more,
    ]  # fmt: skip


def test_model_is_trained_on_the_replies_of_the_assistant(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ended = runs.run_here(sft(model, write_chats(tmp_path / "chats.jsonl"), tmp_path / "run"))
    assert ended.code == 0, ended.printed
    lines = ended.printed.splitlines()
    assert f"with the weights of {model}" in ended.printed
    assert "random weights" not in ended.printed
    assert "conversations, trained on the assistant's messages only" in ended.printed
    assert "% filled, isolated" in ended.printed
    first = lines.index("sample     the first sequence; trained on: lines with >")
    assert lines[first + 1 : first + 7] == [
        "  | <|im_start|>system",
        "  | You count.<|im_end|>",
        "  | <|im_start|>user",
        "  | One, two?<|im_end|>",
        "  | <|im_start|>assistant",
        "  > Three.<|im_end|>",
    ]
    steps = runs.metrics(tmp_path / "run")
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["tokens"] < 0.5 * 3 * 4 * 256, "targets are what the assistant says"
    assert "; 1,024 tokens per step, 3.1k in 3 steps\n" in ended.printed
    assert f"3 steps, {steps[-1]['tokens']} tokens, " in ended.printed
    saved = AutoTokenizer.from_pretrained(runs.checkpoint(tmp_path / "run"))
    rendered = saved.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nYou count.<|im_end|>\n<|im_start|>user\nOne, two?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_fine_tuning_without_a_model_is_reported(model: Path, tmp_path: Path) -> None:
    argv = sft(model, write_chats(tmp_path / "chats.jsonl", 40), tmp_path / "run", "trainer.steps=1")
    argv = [word for word in argv if not word.startswith("model.path") and word != "trainer.steps=3"]
    ended = runs.run_here(argv)
    assert ended.code == 0, ended.printed
    (warning,) = [line for line in ended.printed.splitlines() if "random weights" in line]
    assert warning.startswith("WARNING    the model starts with random weights")
    assert "model.path=FOLDER_OR_NAME" in warning


def test_row_with_nothing_to_train_on_is_refused_before_training(model: Path, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 40)
    chats.write_text(chats.read_text() + json.dumps({"messages": CHAT[:2]}) + "\n")
    ended = runs.run_here(sft(model, chats, tmp_path / "run"))
    assert ended.code == 78
    assert ended.printed.count("error: ") == 1
    assert f"error: {chats} line 41: nothing to train on: no message is from the assistant" in ended.printed


def test_evaluation_with_nothing_to_predict_is_reported(model: Path, tmp_path: Path) -> None:
    """A question that takes more sequences than are evaluated."""
    question = [{"role": "user", "content": "One, two? " * 300}, {"role": "assistant", "content": "Three."}]
    (tmp_path / "long.jsonl").write_text(json.dumps({"messages": question}) + "\n")
    more = ["data.validation.long.name=text", f"data.validation.long.path={tmp_path / 'long.jsonl'}"]
    more += ["data.packing=split", "trainer.eval_batches=1", "trainer.sample_tokens=0"]
    ended = runs.run_here(sft(model, write_chats(tmp_path / "chats.jsonl"), tmp_path / "run", *more))
    assert ended.code == 0, ended.printed
    assert "the evaluation on long has no loss, as its sequences have nothing to predict" in ended.printed
    evaluated = {line["set"]: (line["loss"], line["tokens"]) for line in runs.metrics(tmp_path / "run", "eval")}
    assert evaluated["long"] == (None, 0)
    assert evaluated["validation"][1] > 0


def test_data_of_another_column_is_prepared_separately(model: Path, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 40)
    assert runs.run_here(sft(model, chats, tmp_path / "run", "trainer.stop_at=1")).code == 75
    ended = runs.run_here(sft(model, chats, tmp_path / "other", "data.messages_column=conversations"))
    assert ended.code == 78
    assert "its columns are messages; use data.messages_column=messages if it holds messages" in ended.printed


def test_changed_template_counts_as_different_data(model: Path, tmp_path: Path) -> None:
    chats, template = write_chats(tmp_path / "chats.jsonl"), tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    argv = sft(model, chats, tmp_path / "run", f"data.chat_template={template}")
    assert runs.run_here([*argv, "trainer.stop_at=1"]).code == 75
    template.write_text("{% for m in messages %}{{ m.role + '> ' + m.content + '\n' }}{% endfor %}")
    ended = runs.run_here(argv)
    assert ended.code == 78
    assert "was trained on different data" in ended.printed


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        ({"instruction": "Add.", "input": "1 and 2", "output": "3"}, "user assistant"),
        ({"instruction": "Add 1 and 2.", "input": "", "output": "3", "system": "You count."}, "system user assistant"),
        (
            {"conversations": [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "3"}]},
            "user assistant",
        ),
        ({"prompt": [ADD], "completion": "3"}, "user assistant"),
    ],
)
def test_questions_and_answers_in_columns_of_their_own_are_conversations(
    tmp_path: Path, row: dict[str, Any], roles: str
) -> None:
    """As lines and as a table: the same messages."""
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "id": 7}) + "\n")
    parquet.write_table(pyarrow.Table.from_pylist([{**row, "id": 7}]), tmp_path / "rows.parquet")
    column, found = Column("messages", "chat"), []
    for name in ("rows.jsonl", "rows.parquet"):
        (unit,) = units_of_file(tmp_path / name, column, 1 << 20, None)
        found.append([each.content for each in unit.all_rows()])
    assert found[0] == found[1]
    ((*before, question, answer),) = found[0]
    assert " ".join(message["role"] for message in (*before, question, answer)) == roles
    assert question["content"].startswith("Add")
    assert question["content"].endswith("1 and 2") or not row.get("input")
    assert answer["content"] == "3"


def test_repeated_lines_of_the_sample_are_merged() -> None:
    tokens = np.array([104, 105, 256, *[256] * 30], np.int64)
    lines = marked_lines(BytesTokenizer(), tokens, np.zeros(len(tokens), bool))
    assert len(lines) == 2
    assert lines[1].endswith("(30 times)")
