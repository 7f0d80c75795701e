"""Conversations in the style of current models: trained on is what a model must write, and nothing is lost."""

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serried.configs.errors import UserError
from serried.configs.schema.sections import TrainerSection
from serried.recipes.data.chat.conversations import (
    ChatEncoder,
    ask,
    chat_encoder,
    encoder_of_rows,
    template_to_export,
)
from serried.recipes.data.prepared.prepare import Prepared, prepare
from serried.recipes.data.readers.source import Row
from serried.recipes.data.samples.token_dataset import PackedDataset, collate
from serried.recipes.data.tokenizers.chat_template import Template
from serried.recipes.data.tokenizers.encode_rows import Encoded
from serried.recipes.data.tokenizers.hugging_face_tokenizer import (
    HuggingFaceTokenizer,
    find_tokenizer,
    tokenizer_from_spec,
)
from serried.recipes.data.tokenizers.tokenizer import hugging_face_files
from serried.recipes.models.layers.lm_head import IGNORE
from serried.recipes.text.text_data import TextData
from serried.trainer.data.loader import BatchLoader, Reader
from serried.trainer.data.sampler import BatchShare, SampleOrder
from tests.support.chat_templates import SPECIAL, STYLES, Style
from tests.support.texts import section, write_documents

ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"a": {"type": "integer"}}},
}
BLOCKS = ("<think>\n\n</think>\n\n", "\n<think></think>\n", "\n<think></think>")
"""Empty blocks of reasoning that templates here write."""


@cache
def tokenizer(*, is_old: bool = False) -> HuggingFaceTokenizer:
    """A small tokenizer that splits text into words as Llama 3's and Qwen's, or ``is_old`` as GPT-2's, in which a blank
    line before a word is two tokens, and one at the end of a prompt."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(words), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_old)
    library.pre_tokenizer = level if is_old else pre_tokenizers.Sequence([split, level])
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    library.train_from_iterator(["What is two and two? Four, and\n\nnothing else.\n\n\n <think>\n"] * 9, trainer)
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    return HuggingFaceTokenizer({"tokenizer.json": library.to_str(), "tokenizer_config.json": json.dumps(config)})


@cache
def reference(name: str, has_tools: bool, is_old: bool) -> "Theirs":
    return Theirs(STYLES[name], [ADD] if has_tools else None, is_old)


class Theirs:
    """The reference: a tokenizer of transformers with one template."""

    def __init__(self, style: Style, tools: list[Any] | None, is_old: bool) -> None:
        from transformers import PreTrainedTokenizerFast

        self._given: dict[str, Any] = {"chat_template": style.template, "tools": tools, **style.variables}
        self._library = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer(is_old=is_old)._with_marks, bos_token="<s>", eos_token="</s>"
        )

    def text(self, messages: Any, **options: Any) -> str:
        return str(self._library.apply_chat_template(messages, tokenize=False, **self._given, **options))

    def ids(self, messages: Any, **options: Any) -> list[int]:
        return list(self._library.apply_chat_template(messages, **self._given, **options)["input_ids"])

    def ids_of(self, text: str) -> list[int]:
        return list(self._library(text, add_special_tokens=False)["input_ids"])


class Emitted(NamedTuple):
    """What a model writes when it is asked for a reply."""

    prompt: str
    block: str
    """Empty reasoning that the template writes before the reply."""
    text: str
    has_end: bool


def emitted(theirs: Theirs, style: Style, messages: list[dict[str, Any]], turn: int) -> Emitted:
    """The reply by the definition: what transformers renders behind its own generation prompt."""
    prompt = theirs.text(messages[:turn], add_generation_prompt=True)
    whole = theirs.text(messages[: turn + 1])
    message = messages[turn]
    if style is STYLES["deepseek r1"]:  # keeps no reasoning, and asks for some
        thought, _, said = message["content"].rpartition("</think>")
        thought = thought.strip("\n").removeprefix("<think>").strip("\n")
        return Emitted(prompt, "", f"{thought}\n</think>\n\n{said.lstrip(chr(10))}</s>", has_end=True)
    if style is STYLES["gpt-oss"]:  # reasoning before a call is no longer shown once the last reply follows
        return Emitted(prompt, "", in_channels(message), has_end=True)
    assert whole.startswith(prompt)
    text = whole.removeprefix(prompt)
    has_thought = message.get("reasoning_content") or "<think>" in (message["content"] or "")
    block = "" if has_thought else next((block for block in BLOCKS if text.startswith(block)), "")
    text = text.removeprefix(block)
    if style is STYLES["phi"]:
        text = text.removesuffix("</s>")  # the end of the text, behind that of the turn
    has_end = style is not STYLES["glm"]
    return Emitted(prompt, block, text.rstrip() if has_end else text, has_end)


def in_channels(message: dict[str, Any]) -> str:
    """What a model of gpt-oss writes behind ``<|start|>assistant``."""
    parts = []
    if message.get("thinking"):
        parts.append(f"<|channel|>analysis<|message|>{message['thinking']}<|end|>")
    if not message.get("tool_calls"):
        return "<|start|>assistant".join([*parts, f"<|channel|>final<|message|>{message['content']}<|return|>"])
    if message["content"]:
        parts.append(f"<|channel|>commentary<|message|>{message['content']}<|end|>")
    function = message["tool_calls"][0]["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    call = f" to=functions.{function['name']}<|channel|>commentary json<|message|>{arguments}<|call|>"
    return "<|start|>assistant".join([*parts, call])


WORDS = st.one_of(
    st.sampled_from(["", "Four.", " two ", "\n\nnothing\n", "assistant", "e\u0301🙂", '"a": {1}', "user\n"]),
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>|[]"), max_size=8),
)
THOUGHTS = st.sampled_from(["2 + 2", "so\n\nfour", "señor 🙂", "wait"])


@st.composite
def conversations(draw: st.DrawFn, style: Style) -> tuple[list[dict[str, Any]], bool]:
    """Messages that the template accepts, and whether there are tools."""
    messages: list[dict[str, Any]] = []
    has_tools = style.calls > 0 and draw(st.booleans())
    if style.system != "nowhere" and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(WORDS)})
    said = 0
    for turn in range(draw(st.integers(1, 6))):
        if turn and style.system == "anywhere" and draw(st.integers(0, 5)) == 0:
            messages.append({"role": "system", "content": draw(WORDS)})
        messages.append({"role": "user", "content": draw(WORDS)})
        if turn and said and draw(st.integers(0, 7)) == 0:
            break
        for step in range(draw(st.integers(0, 2)) if has_tools else 0):
            calls = [
                {
                    "id": f"call{turn:02}{step:02}{number}", "type": "function",
                    "function": {"name": draw(st.sampled_from(["add", "find"])), "arguments": draw(ARGUMENTS)},
                }
                for number in range(draw(st.integers(1, style.calls)))
            ]  # fmt: skip
            content = "" if style is STYLES["mistral"] else draw(st.sampled_from(["", "Let me see."]))
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            think(draw, style, messages[-1])
            for call in calls:
                named = {"tool_call_id": call["id"], "name": call["function"]["name"]}  # type: ignore[index]
                messages.append({"role": "tool", "content": draw(WORDS), **named})
        messages.append({"role": "assistant", "content": draw(WORDS)})
        think(draw, style, messages[-1])
        if draw(st.integers(0, 6)) == 0:
            messages[-1]["weight"] = 0
        said += messages[-1].get("weight", 1)
    return messages, has_tools


ARGUMENTS = st.dictionaries(
    st.sampled_from(["a", "b"]), st.one_of(st.integers(0, 99), st.sampled_from(["x", 'say "two"', "ñ"])), max_size=2
)


def think(draw: st.DrawFn, style: Style, message: dict[str, Any]) -> None:
    if not style.reasoning or not draw(st.booleans()):
        return
    thought = draw(THOUGHTS)
    if style.reasoning != "inline":
        message[style.reasoning] = thought
    else:
        message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content'].lstrip(chr(10))}"


@cache
def encoder_of(name: str, train_on: Any, is_old: bool) -> ChatEncoder:
    style = STYLES[name]
    return ChatEncoder(
        tokenizer(is_old=is_old), style.template, "the template", variables=style.variables, train_on=train_on
    )


def encode(name: str, messages: Any, has_tools: bool, train_on: str = "replies", is_old: bool = False) -> list[Encoded]:
    content = {"messages": messages, "tools": [ADD]} if has_tools else messages
    (encoded,) = encoder_of(name, train_on, is_old)([Row(0, content)], "chats.jsonl")
    if isinstance(encoded, UserError):
        raise encoded
    return [*encoded.before, encoded._replace(before=())]


def trained(documents: Sequence[Encoded]) -> int:
    return sum(int(document.supervised.sum()) for document in documents if document.supervised is not None)


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_trained_tokens_are_the_tokens_generated_after_the_prompt(name: str, data: st.DataObject) -> None:
    style = STYLES[name]
    messages, has_tools = data.draw(conversations(style))
    is_old = data.draw(st.booleans())
    theirs = reference(name, has_tools, is_old)
    turns = [
        turn for turn, message in enumerate(messages) if message["role"] == "assistant" and message.get("weight", 1)
    ]
    replies = {turn: emitted(theirs, style, messages, turn) for turn in turns}
    if not any(reply.text for reply in replies.values()):
        with pytest.raises(UserError, match="nothing to train on"):
            encode(name, messages, has_tools, is_old=is_old)
        return
    documents = encode(name, messages, has_tools, is_old=is_old)
    expected, ended = 0, [False] * len(documents)
    for reply in replies.values():
        said, found = theirs.ids_of(reply.text), []
        for number, document in enumerate(documents):
            for shown in map(theirs.ids_of, (reply.prompt + reply.block, reply.prompt)):
                start, stop = len(shown), len(shown) + len(said)
                if document.tokens[:stop].tolist() == [*shown, *said] and document.supervised[start:stop].all():
                    found.append(number)
                    ended[number] |= stop == len(document.tokens) - 1 and not reply.has_end and bool(said)
                    break
        assert reply.text == "" or found, f"{reply.text!r} is trained nowhere after its prompt"
        expected += len(said)
    assert trained(documents) == expected + sum(ended), "nothing else is trained on"
    assert len(documents) <= len(turns)
    rendered = [theirs.ids(messages[:count]) for count in range(1, len(messages) + 1)]
    for document in [] if name in ("deepseek r1", "gpt-oss") else documents:  # these no longer show their own prompts
        ids, runs = document.tokens.tolist(), np.diff(document.supervised, prepend=0) == 1  # type: ignore[arg-type]
        assert ids in rendered or ids[:-1] in rendered or runs.sum() == 1, "else a reply follows its own prompt"


U = {"role": "user", "content": "What is two and two?"}
A = {"role": "assistant", "content": "Four."}
THOUGHT = {**A, "reasoning_content": "2 + 2"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}


def runs_of(document: Encoded) -> list[str]:
    assert document.supervised is not None
    parts = np.split(document.tokens, np.flatnonzero(np.diff(document.supervised)) + 1)
    first = int(document.supervised[0])
    return [tokenizer().decode_marked(part.tolist()) for part in parts[1 - first :: 2]]


def test_rows_are_split_only_where_a_template_drops_something() -> None:
    plain, thinking = [U, A, U, A, U, A], [U, THOUGHT, U, THOUGHT, U, A]
    counts = {name: len(encode(name, plain, False)) for name in STYLES}
    # These write something else before or after the last reply than they show later.
    assert counts == dict.fromkeys(STYLES, 1) | dict.fromkeys(["qwen 3 without thinking", "deepseek r1", "gpt-oss"], 3)
    assert len(encode("llama 3", plain, False, is_old=True)) == 3, "prompts end with another token than in the text"
    assert [runs_of(document) for document in encode("qwen 3", thinking, False)] == [
        ["<think>\n2 + 2\n</think>\n\nFour.<|im_end|>"],
        ["<think>\n2 + 2\n</think>\n\nFour.<|im_end|>"],
        ["Four.<|im_end|>"],
    ]


def test_a_loop_of_calls_after_one_question_stays_one_sample() -> None:
    calling = {**THOUGHT, "content": "", "tool_calls": [CALL, CALL]}
    result = {"role": "tool", "content": "4"}
    messages = [U, calling, result, result, calling, result, result, THOUGHT]
    assert len(encode("qwen 3", messages, True)) == 1
    assert len(encode("hermes", [{**message, "reasoning_content": None} for message in messages], True)) == 1


def test_several_calls_of_which_a_template_shows_one_are_refused() -> None:
    messages = [U, {**A, "content": "", "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "4"}, A]
    with pytest.raises(UserError, match=r"the template does not render the tool_calls of message 2 \(assistant\)"):
        encode("gpt-oss", messages, True)


def test_arguments_as_text_are_those_of_objects_where_a_template_would_quote_them() -> None:
    """As in OpenAI's format."""
    as_text = {**CALL, "function": {**CALL["function"], "arguments": '{"a": 2, "b": 2}'}}  # type: ignore[dict-item]
    for name in ("llama 3", "hermes", "glm"):
        rows = [[U, {**A, "tool_calls": [call]}, {"role": "tool", "content": "4"}, A] for call in (CALL, as_text)]
        (mine, *_), (theirs, *_) = (encode(name, messages, True) for messages in rows)
        assert mine.tokens.tolist() == theirs.tokens.tolist()


@pytest.mark.parametrize("name", STYLES)
def test_all_tokens_or_the_last_reply_are_trained_on_if_asked(name: str) -> None:
    messages = [U, A, U, {**A, "content": "No.", "weight": 0}, U, A]
    whole = encode(name, messages, False, "all")[-1]
    assert whole.supervised is not None
    theirs = reference(name, False, False).ids(messages)
    assert whole.tokens.tolist()[: len(theirs)] == theirs
    untrained = tokenizer().decode_marked(whole.tokens[whole.supervised == 0].tolist())
    assert "No." in untrained
    assert len(untrained) < 20, "the message that is left out, and no other"
    with pytest.raises(UserError, match=r"nothing to train on: the last reply is excluded from training \(weight: 0"):
        encode(name, messages[:4], False, "last")
    last = encode(name, messages, False, "last")
    assert [len(runs_of(document)) for document in last] == [1]
    assert last[0].tokens.tolist() == encode(name, messages, False)[-1].tokens.tolist()


def test_a_variable_that_a_template_does_not_read_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"^data\.chat_template_kwargs\.enable_thinkin=false has no effect: it does not read this variable \(it "
        r"reads enable_thinking\); remove it",
    ):
        ChatEncoder(tokenizer(), STYLES["qwen 3"].template, "it", variables={"enable_thinkin": False})


@pytest.mark.parametrize("has_weight", [True, False])
def test_reply_after_reasoning_that_a_later_turn_hides_is_trained_on_with_the_reasoning(has_weight: bool) -> None:
    """The reply looks like an earlier one in the full text, but its prompt in generation has the reasoning."""

    def call(number: int, **more: Any) -> dict[str, Any]:
        function = {"name": "add", "arguments": {}}
        calls = [{"id": f"call{number:05}", "type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls, **more}

    def result(number: int) -> dict[str, Any]:
        return {"role": "tool", "content": "4", "tool_call_id": f"call{number:05}", "name": "add"}

    thought = call(2, reasoning_content="2 + 2", **({} if has_weight else {"weight": 0}))
    messages = [U, call(1), result(1), A, U, thought, result(2), {"role": "assistant", "content": "Five."}, U]
    theirs = reference("glm", True, False)
    reply = emitted(theirs, STYLES["glm"], messages, 7)
    assert "2 + 2" in reply.prompt
    shown, said = theirs.ids_of(reply.prompt + reply.block), theirs.ids_of(reply.text)
    stop = len(shown) + len(said)
    trained = [
        document.supervised[len(shown) : stop].all()
        for document in encode("glm", messages, True)
        if document.tokens[:stop].tolist() == [*shown, *said]
    ]
    assert trained == [True]


def test_a_template_for_tools_is_chosen_for_rows_with_tools() -> None:
    own = tokenizer().spec()["files"]
    chatml, hermes = STYLES["chatml"].template, STYLES["hermes"].template
    named = [{"name": "default", "template": chatml}, {"name": "tool_use", "template": hermes}]
    config = {**json.loads(own["tokenizer_config.json"]), "chat_template": named}
    several = HuggingFaceTokenizer({**own, "tokenizer_config.json": json.dumps(config)})
    encoder = chat_encoder(section("x", format="chat"), several)
    content = {"messages": [U, A], "tools": [ADD]}
    found = encoder([Row(0, [U, A]), Row(1, content)], "chats.jsonl")
    (plain,), (with_tools,) = encode("chatml", [U, A], False), encode("hermes", [U, A], True)
    assert [row.tokens.tolist() for row in found if isinstance(row, Encoded)] == [
        plain.tokens.tolist(), with_tools.tokens.tolist(),
    ]  # fmt: skip
    exported = template_to_export(section("x", format="chat"), several)
    both = [ChatEncoder(tokenizer(), exported, "it")([row], "x")[0] for row in (Row(0, [U, A]), Row(1, content))]
    assert [row.tokens.tolist() for row in both if isinstance(row, Encoded)] == [
        plain.tokens.tolist(), with_tools.tokens.tolist(),
    ]  # fmt: skip


@pytest.fixture
def with_tools(tmp_path: Path) -> Path:
    """A tokenizer that transformers saved with the template for tools in a folder of its own."""
    from transformers import AutoTokenizer

    for name, text in tokenizer().spec()["files"].items():
        (tmp_path / name).write_text(text)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    theirs.chat_template = {"default": STYLES["chatml"].template, "tool_use": STYLES["hermes"].template}
    theirs.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "additional_chat_templates" / "tool_use.jinja").is_file()
    return tmp_path / "saved"


def test_template_for_tools_that_transformers_saved_in_a_folder_of_its_own_is_found(
    with_tools: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    both = {"default": STYLES["chatml"].template, "tool_use": STYLES["hermes"].template}
    found = find_tokenizer(str(with_tools))
    assert isinstance(found, HuggingFaceTokenizer)
    again = tokenizer_from_spec(json.loads(json.dumps(found.state())))
    assert isinstance(again, HuggingFaceTokenizer)
    longer = found.with_tokens(["<new>"], [])
    assert found.chat_templates == again.chat_templates == longer.chat_templates == both
    for name, text in hugging_face_files(found).items():  # one folder, which transformers reads in the same way
        (tmp_path / "again").mkdir(exist_ok=True)
        (tmp_path / "again" / name).write_text(text)
    assert AutoTokenizer.from_pretrained(tmp_path / "again").chat_template == both


def test_template_for_tools_changes_the_key_of_conversations_with_tools_alone(with_tools: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Hello, world.\n\n" * 50)
    for name, tools in (("chats.jsonl", []), ("tools.jsonl", [ADD])):
        rows = [{"messages": [{**U, "content": f"{number}?"}, A], "tools": tools} for number in range(40)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def prepared(name: str) -> Prepared:
        format = "text" if name == "text" else "chat"
        return prepare(section(tmp_path / name, tmp_path / "cache", tokenizer=str(with_tools), format=format))

    names = ("text", "chats.jsonl", "tools.jsonl")
    before = [prepared(name).key for name in names]
    file = with_tools / "additional_chat_templates" / "tool_use.jinja"
    file.write_text(STYLES["qwen 3"].template)
    with_other = [prepared(name).key for name in names]
    file.unlink()
    without = [prepared(name).key for name in names[:2]]
    assert before[:2] == with_other[:2] == without
    assert before[2] != with_other[2]


def test_template_for_tools_is_exported_with_data_that_was_prepared_without_it(
    with_tools: Path, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("Hello, world.\n\n" * 50)
    chosen = section(tmp_path / "text", tmp_path / "cache", tokenizer=str(with_tools), validation_fraction=0)
    file = with_tools / "additional_chat_templates" / "tool_use.jinja"
    file.rename(tmp_path / "tool_use.jinja")
    earlier = prepare(chosen)
    (tmp_path / "tool_use.jinja").rename(file)
    data = TextData(chosen, TrainerSection(steps=1, global_batch=1, micro_batch=1), isolates=False)
    data.open(data.prepare(None, None))
    assert data.first is not None
    assert (data.first.folder, data.first.key) == (earlier.folder, earlier.key)
    assert "tool_use" in hugging_face_files(data.tokenizer)["tokenizer_config.json"]


@pytest.mark.parametrize(
    "text",
    [
        "{% for message in messages %}{{ message.content }}{% endfor %} \n\n",
        "\n\n  {% for message in messages %}{{ message.content }}{% endfor %}\n",
        "  {{ messages[0].content }}\n  ",
        "{{ messages[0].content }}\n{% if x %}{% endif %}\n",
    ],
)
def test_an_exported_template_has_the_blanks_of_the_one_in_training(text: str) -> None:
    own = tokenizer().spec()["files"]
    for_tools = f"{text}{{{{ tools }}}}\n\n"
    named = [{"name": "default", "template": text}, {"name": "tool_use", "template": for_tools}]
    config = {**json.loads(own["tokenizer_config.json"]), "chat_template": named}
    several = HuggingFaceTokenizer({**own, "tokenizer_config.json": json.dumps(config)})
    plain, with_tools = Template(text, "it", {}).render([U]), Template(for_tools, "it", {}).render([U], tools=[ADD])
    exported = Template(template_to_export(section("x", format="chat"), several), "it", {})
    assert (exported.render([U]), exported.render([U], tools=[ADD])) == (plain, with_tools)
    chosen = section("x", format="chat", chat_template=text, chat_template_kwargs={"x": 1})
    assert Template(template_to_export(chosen, tokenizer()), "it", {}).render([U]) == plain


def test_an_exported_template_renders_as_in_training_unless_asked_otherwise() -> None:
    from transformers import PreTrainedTokenizerFast

    chosen = section(
        "x", format="chat", chat_template=STYLES["qwen 3"].template, chat_template_kwargs={"enable_thinking": False}
    )
    exported = template_to_export(chosen, tokenizer())
    library = PreTrainedTokenizerFast(tokenizer_object=tokenizer()._with_marks, chat_template=exported)
    asked, thinking = (
        library.apply_chat_template([U], tokenize=False, add_generation_prompt=True, **given)
        for given in ({}, {"enable_thinking": True})
    )
    assert asked == f"{thinking}<think>\n\n</think>\n\n"
    ids, _ = ask(STYLES["qwen 3"].template, tokenizer(), [U["content"]], chosen.chat_template_kwargs)
    assert tokenizer().decode_marked(ids) == asked
    assert ask(exported, tokenizer(), [U["content"]], chosen.chat_template_kwargs)[0] == ids


@pytest.mark.parametrize("train_on", ["replies", "all"])
def test_a_completion_without_a_template_follows_its_prompt_as_it_is(train_on: str) -> None:
    chosen = section("x", format="chat", chat_template="none", train_on=train_on)
    encoder = encoder_of_rows(chosen, tokenizer())
    (found,) = encoder([Row(0, {"prompt": "What is\n", "completion": "\nFour."})], "rows.jsonl")  # type: ignore[dict-item]
    assert isinstance(found, Encoded)
    prompt, said = tokenizer().encode("What is\n").tolist(), tokenizer().encode("\nFour.").tolist()
    assert found.tokens.tolist() == [*prompt, *said, tokenizer().end_id]
    assert found.supervised is not None
    marks = [int(train_on == "all")] * len(prompt) + [1] * (len(said) + 1)
    assert found.supervised.tolist() == marks
    refused = encoder([Row(0, [U, A]), Row(1, {"prompt": "a", "completion": ""})], "rows.jsonl")  # type: ignore[dict-item]
    assert [str(error).partition(",")[0] for error in refused] == [
        "row 1 of rows.jsonl is a conversation", "row 2 of rows.jsonl: the completion is empty",
    ]  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_sums_of_targets_are_equal_on_any_number_of_ranks_packed_or_not(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["chatml", "qwen 3", "hermes"]))
    documents = []
    for messages, has_tools in data.draw(st.lists(conversations(STYLES[name]), min_size=3, max_size=6)):
        with suppress(UserError):
            documents += encode(name, messages, has_tools)
    if not documents:
        return
    length = max(len(document.tokens) for document in documents)
    flags = [document.supervised.tolist() for document in documents if document.supervised is not None]
    with tempfile.TemporaryDirectory() as folder:
        ids = [document.tokens.tolist() for document in documents]
        prepared: Any = write_documents(Path(folder), ids, supervised=flags, shards=2)
        for packs in (True, False):
            dataset = PackedDataset(prepared, "train", length, isolate_documents=packs, packs=packs)
            by_ranks = [targets_of(dataset, ranks) for ranks in (1, 2, 3)]
            assert by_ranks[0] == by_ranks[1] == by_ranks[2], "in every step"
            assert sum((dataset[i].targets != IGNORE).sum() for i in range(len(dataset))) == trained(documents)
            assert packs or len(dataset) == len(documents)


def targets_of(dataset: Any, ranks: int) -> list[int]:
    """Targets of each of some steps of six sequences, of all ranks together."""
    found = np.zeros(3, np.int64)
    for rank in range(ranks):
        share = BatchShare(micro_batch=6 // ranks, global_batch=6, data_ranks=ranks, data_rank=rank)
        order = SampleOrder(len(dataset), 1)
        with BatchLoader(
            Reader(dataset, collate), order, share, steps=range(3), workers=0, pin_memory=False
        ) as batches:
            found += [sum(int((batch.targets != IGNORE).sum()) for batch in step) for step in batches]
    return found.tolist()  # type: ignore[no-any-return]
