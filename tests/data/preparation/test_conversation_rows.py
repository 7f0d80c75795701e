"""Conversations and pairs in the formats that people have, and what is said of rows that fit none."""

import json
from pathlib import Path
from typing import Any

import pytest

from serried.commands.prepare_data import prepare
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.recipes.data.chat import conversations as chat
from serried.recipes.data.chat.conversations import CHATML
from serried.recipes.data.prepared.prepare import prepare as prepare_data
from serried.recipes.data.readers import columns
from serried.recipes.data.readers.columns import Column
from serried.recipes.data.readers.row_files import units_of_file
from serried.recipes.text.causal_lm import CausalLM
from tests.support.chat_templates import QWEN3

U, A = {"role": "user", "content": "Add."}, {"role": "assistant", "content": "3"}
CHAT, PAIRS = Column("messages", "chat"), Column("chosen", "preference")


def contents(path: Path, rows: list[Any], column: Column) -> list[Any]:
    """The content of each row, or the message for one that has none."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (unit,) = units_of_file(path, column, path.stat().st_size, None)
    return [str(row.error).removeprefix(f"{path} ") if row.error else row.content for row in unit.all_rows()]


def test_columns_by_other_names_are_read(tmp_path: Path) -> None:
    row = {"q": "Add.", "a": "3", "who": "You count.", "prompt": "ignored"}
    column = Column("messages", "chat", (("completion", "a"), ("prompt", "q"), ("system", "who")))
    assert contents(tmp_path / "a.jsonl", [row], column) == [[{"role": "system", "content": "You count."}, U, A]]
    (said,) = contents(tmp_path / "a.jsonl", [{"q": "Add."}], column)
    assert said == "line 1 has no column 'a' (data.columns.completion=a); its columns are q"
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
        {"messages": [U, A], "weight": -0.5},
        {"messages": [U, A], "prompt": "Add."},
        {"messages": [U, A], "prompt": "Add.", "completion": "3"},
    ]
    assert contents(tmp_path / "a.jsonl", rows, CHAT) == [
        {"messages": [U, A], "system": "You count.", "tools": [{"type": "function", "function": function}]},
        [U, A],
        "",
        {"messages": [U, A], "weight": 0.5},
        "line 5: column 'weight' is a number (-0.5), not a number from 0 to 1,000,000; fix the row, or ignore the "
        "column: data.columns.weight=null",
        [U, A],
        "line 7: 'messages' and 'prompt' and 'completion' both contain a conversation; use "
        "data.columns.messages=messages to read only 'messages', or remove one of them",
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


def test_a_prompt_beside_whole_conversations_is_not_repeated(tmp_path: Path) -> None:
    other = {**A, "content": "4"}
    asked, three, four = (
        {"from": kind, "value": text} for kind, text in (("human", "Add."), ("gpt", "3"), ("gpt", "4"))
    )
    rows = [
        {"conversations": [asked], "chosen": [asked, three], "rejected": [asked, four]},
        {"conversations": [asked, three], "chosen": [asked, three], "rejected": [asked, four]},
        {"prompt": [U], "chosen": [U, A], "rejected": [U, other]},
        {"prompt": [U], "chosen": [A], "rejected": [other]},
        {"conversations": [asked], "chosen": [three], "rejected": [four]},
    ]
    shared = {"prompt": [asked], "chosen": [three], "rejected": [four]}
    plain = {"prompt": [U], "chosen": [A], "rejected": [other]}
    assert contents(tmp_path / "a.jsonl", rows, PAIRS) == [shared, shared, plain, plain, shared]


def conversations(path: Path, beside: dict[str, Any]) -> list[str]:
    """The words that prepare a file of chats, of which every other row has the columns ``beside``."""
    rows = [
        {"messages": [{**U, "content": f"Add {number}."}, A], **(beside if number % 2 else {})} for number in range(40)
    ]
    contents(path, rows, CHAT)
    return [
        "recipe=sft",
        f"data.path={path}",
        f"data.cache_dir={path.parent / 'cache'}",
        "data.validation_fraction=0.2",
    ]


def test_weights_of_rows_are_counted_or_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = conversations(tmp_path / "a.jsonl", {"weight": 0})
    assert prepare(words) == 0
    printed = capsys.readouterr().out
    assert "left out: 20 rows of weight 0" in printed
    assert " empty" not in printed
    words = conversations(tmp_path / "a.jsonl", {"weight": -0.7})
    with pytest.raises(UserError, match=r"line 2: column 'weight' is a number \(-0\.7\).*data\.columns\.weight=null"):
        prepare(words)
    assert prepare([*words, "data.columns.weight=null"]) == 0
    assert "left out" not in capsys.readouterr().out
    rows = [{"messages": [{**U, "content": f"Add {number}."}, A], "weight": 0} for number in range(40)]
    contents(tmp_path / "a.jsonl", rows, CHAT)
    with pytest.raises(UserError, match=r"^all 40 rows of .* have weight 0, .*data\.columns\.weight=null"):
        prepare(words)


FUNCTION = {"name": "add", "parameters": {}}


@pytest.mark.parametrize(
    ("beside", "ignored", "is_same"),
    [
        ({"source": "web"}, [], True),
        ({"weight": 1}, [], True),
        ({"weight": 0}, [], False),
        ({"weight": 0}, ["data.columns.weight=null"], True),
        ({"functions": [FUNCTION]}, [], False),
        ({"functions": [FUNCTION]}, ["data.columns.functions=null"], True),
    ],
)
def test_rows_that_are_read_in_another_way_than_before_get_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: dict[str, Any], ignored: list[str], is_same: bool
) -> None:
    (tmp_path / "t.jinja").write_text("{{ tools or '' }}" + CHATML)
    words = [*conversations(tmp_path / "a.jsonl", beside), f"data.chat_template={tmp_path / 't.jinja'}"]
    with monkeypatch.context() as before:  # the earlier version did not read these columns
        before.setattr(chat, "_FORMAT", chat.EARLIER_FORMATS[0])
        before.setattr(columns, "_WEIGHT", "not read")
        before.setattr(columns, "_FUNCTIONS", "not read")
        earlier = prepare_data(compose(words).data)
    lines: list[str] = []
    now = prepare_data(compose([*words, *ignored]).data, lines.append)
    assert (now.key == earlier.key) == is_same
    assert any("WARNING" in line and str(earlier.folder) in line for line in lines) == (not is_same)
    elsewhere = prepare_data(compose([*words, *ignored, f"data.cache_dir={tmp_path / 'other'}"]).data)
    assert (elsewhere.key == earlier.key) == is_same


def test_data_that_an_intact_earlier_folder_shows_to_differ_get_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = conversations(tmp_path / "a.jsonl", {})
    with monkeypatch.context() as before:
        before.setattr(chat, "_FORMAT", chat.EARLIER_FORMATS[0])
        before.setattr(columns.Column, "content", lambda *found: [U, {**A, "content": str(found[1])}])
        earlier = prepare_data(compose(words).data)
    assert prepare_data(compose(words).data).key != earlier.key


def test_a_column_that_no_row_has_is_refused_before_anything_is_prepared(tmp_path: Path) -> None:
    words = conversations(tmp_path / "a.jsonl", {"persona": "You count."})
    assert prepare([*words, "data.columns.system=persona"]) == 0, "some rows have it"
    with pytest.raises(UserError) as caught:
        prepare([*words, "data.columns.system=person"])
    assert str(caught.value) == (
        f"data.columns.system=person: no row of {tmp_path / 'a.jsonl'} has this column; the columns are messages, "
        "persona"
    )
    array = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    (tmp_path / "a.jsonl").write_text(json.dumps(array))
    with pytest.raises(UserError, match=r"^data\.columns\.system=person: no row of .* has this column"):
        prepare([*words, "data.columns.system=person"])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.columns.promt=null", "unknown column promt; did you mean data.columns.prompt=null?"),
        ("data.chat_template_kwargs=5", "is not a mapping of names to values; e.g. 'data.chat_template_kwargs={enable"),
        ("data.chat_template_kwargs.tools=5", "data.chat_template_kwargs.tools: its value is set from each row"),
        ("data.columns.promt=q", "unknown column promt; did you mean data.columns.prompt=q?"),
        ("data.train_on=x", "data.train_on=x (command line) is not one of replies, last, all"),
        ("data.format=text data.train_on=all", "data.train_on=all has an effect only with data.format=chat"),
        ("data.chat_template=none data.train_on=last", "because each row has one completion; leave it out"),
        ("data.chat_template=none data.chat_template_kwargs.a=1", "has no effect with data.chat_template=none"),
    ],
)
def test_invalid_keys_of_conversations_are_refused_in_one_line(word: str, said: str) -> None:
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
        bytes(CausalLM(compose([*words, *more])).prompt(["Add."]).ids).decode()
        for more in ([], ["data.chat_template_kwargs.enable_thinking=false"])
    ]
    assert asked[1] == f"{asked[0]}<think>\n\n</think>\n\n"
