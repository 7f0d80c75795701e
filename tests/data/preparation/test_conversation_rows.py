"""Conversations and pairs in the formats that people have, and what is said of rows that fit none."""

import json
from pathlib import Path
from typing import Any

import pytest

from serried.commands.prepare_data import prepare
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.recipes.data.readers.json_parquet_rows import Column, units_of_file
from serried.recipes.text.causal_lm import CausalLM
from tests.support.chat_templates import QWEN3

U, A = {"role": "user", "content": "Add."}, {"role": "assistant", "content": "3"}
CHAT, PAIRS = Column("messages", "chat"), Column("chosen", "preference")


def contents(path: Path, rows: list[dict[str, Any]], column: Column) -> list[Any]:
    """The content of each row, or the message for one that has none."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (unit,) = units_of_file(path, column, path.stat().st_size, None)
    return [str(row.error).removeprefix(f"{path} ") if row.error else row.content for row in unit.all_rows()]


def test_columns_by_other_names_are_read(tmp_path: Path) -> None:
    row = {"q": "Add.", "a": "3", "who": "You count.", "prompt": "ignored"}
    column = Column("messages", "chat", (("completion", "a"), ("prompt", "q"), ("system", "who")))
    assert contents(tmp_path / "a.jsonl", [row], column) == [[{"role": "system", "content": "You count."}, U, A]]
    (said,) = contents(tmp_path / "a.jsonl", [{"q": "Add."}], column)
    assert said == "line 1 has no column 'a', which data.columns.completion names; its columns are q"
    assert contents(tmp_path / "a.jsonl", [{"talk": [U, A]}], Column("messages", "chat", (("messages", "talk"),))) == [
        [U, A]
    ]


def test_columns_beside_messages_are_read(tmp_path: Path) -> None:
    function = {"name": "add", "parameters": {}}
    rows = [
        {"messages": [U, A], "system": "You count.", "functions": [function]},
        {"conversations": [U, A], "system": None, "weight": 1.0},
        {"messages": [U, A], "weight": 0},
        {"messages": [U, A], "weight": 0.5},
        {"messages": [U, A], "prompt": "Add."},
        {"messages": [U, A], "prompt": "Add.", "completion": "3"},
    ]
    assert contents(tmp_path / "a.jsonl", rows, CHAT) == [
        {"messages": [U, A], "system": "You count.", "tools": [{"type": "function", "function": function}]},
        [U, A],
        "",
        "line 4: column 'weight' is a number (0.5), and a row is trained on (1) or not (0); fix the row, or give the "
        "column another name",
        [U, A],
        "line 6: it has both 'messages' and 'prompt' and 'completion', which are two conversations; name one: "
        "data.columns.messages=messages, or remove the others",
    ]


def test_pairs_of_hh_and_sharegpt_have_the_prompt_apart(tmp_path: Path) -> None:
    begin = "\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: Add.\n\nAssistant:"
    asked = {"from": "human", "value": "Add."}
    rows = [
        {"chosen": f"{begin} 3", "rejected": f"{begin} 4"},
        {"conversations": [asked], "chosen": {"from": "gpt", "value": "3"}, "rejected": {"from": "gpt", "value": "4"}},
    ]
    of_hh, shared = contents(tmp_path / "a.jsonl", rows, PAIRS)
    assert [message["content"] for message in of_hh["prompt"]] == ["Hi.", "Hello.", "Add."]
    assert (of_hh["chosen"], of_hh["rejected"]) == ([A], [{**A, "content": "4"}])
    assert shared == {
        "prompt": [asked], "chosen": [{"from": "gpt", "value": "3"}], "rejected": [{"from": "gpt", "value": "4"}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.chat_template_kwargs=5", "is not a mapping of names to values; e.g. 'data.chat_template_kwargs={enable"),
        ("data.chat_template_kwargs.tools=5", "data.chat_template_kwargs.tools: every template gets it from the row"),
        ("data.columns.promt=q", "no column is called so here; did you mean data.columns.prompt=q?"),
        ("data.train_on=x", "data.train_on=x (command line) is not one of replies, last, all"),
        ("data.format=text data.train_on=all", "data.train_on=all is only read with data.format=chat"),
        ("data.chat_template=none data.train_on=last", "whose rows have one completion; leave it out"),
        ("data.chat_template=none data.chat_template_kwargs.a=1", "has no effect with data.chat_template=none"),
    ],
)
def test_keys_of_conversations_that_fit_nothing_are_one_line(word: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(["recipe=sft", "data.path=x.jsonl", *word.split()])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_samples_are_shown_with_what_is_trained_on_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thought = {**A, "reasoning_content": "1 + 2"}
    rows = [{"messages": [{**U, "content": f"Add {number}."}, thought, U, A]} for number in range(40)]
    contents(tmp_path / "a.jsonl", rows, CHAT)
    (tmp_path / "t.jinja").write_text(QWEN3)
    words = ["recipe=sft", f"data.path={tmp_path / 'a.jsonl'}", f"data.chat_template={tmp_path / 't.jinja'}"]
    words += [f"data.cache_dir={tmp_path / 'cache'}", "data.validation_fraction=0.2"]
    assert prepare([*words, "show=1"]) == 0
    printed = capsys.readouterr().out
    assert "; 40 rows split into 80 samples, as the chat template changes earlier turns" in printed
    assert "  > <think>\n  > 1 + 2\n  > </think>\n  > 3<|im_end|>\n  | <|end|>" in printed
    assert "sample 1 (" in printed
    assert "sample 2 (" not in printed
    with pytest.raises(UserError, match="show=x is not a whole number from 0 to 1000"):
        prepare([*words, "show=x"])


def test_variables_of_a_template_reach_generation(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(QWEN3)
    words = ["recipe=sft", "data.path=x.jsonl", f"data.chat_template={tmp_path / 't.jinja'}"]
    asked = [
        bytes(CausalLM(compose([*words, *more])).prompt_ids(["Add."])).decode()
        for more in ([], ["data.chat_template_kwargs.enable_thinking=false"])
    ]
    assert asked[1] == f"{asked[0]}<think>\n\n</think>\n\n"
