"""Conversations: rendered as transformers renders them, and only what the assistant says is learned."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serried.configs.errors import UserError
from serried.recipes.data.chat import CHATML, ChatEncoder, chat_encoder, chat_template
from serried.recipes.data.encode import Encoded
from serried.recipes.data.hugging_face_tokenizer import HuggingFaceTokenizer
from serried.recipes.data.progress import Progress
from serried.recipes.data.source import Row, open_source
from serried.recipes.data.tokenizer import BytesTokenizer
from tests.texts import section

LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
UNASKED = "{% for message in messages %}{{ message['role'] | upper + ': ' + message['content'] + '\n' }}{% endfor %}"
"""Knows no add_generation_prompt and no mark that ends a turn."""
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = """\
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and ns.last == messages|length - 1 %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role != "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set reasoning = '' %}
        {%- if '</think>' in message.content %}
            {%- set reasoning = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""As Qwen 3's: empty reasoning before the last reply, none in those before it."""
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<|user|>' + message['content'] }}{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"
)
"""As DeepSeek R1's: asks for reasoning, and keeps none."""
TOOLS = (
    "{% for message in messages %}{% if message.tool_calls is defined %}"
    "{{ '<|im_start|>assistant\n' }}{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>",
    "<|assistant|>",
)  # fmt: skip

PLAIN = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four, señor."},
    {"role": "user", "content": "And three times that: 3 x 4?"},
    {"role": "assistant", "content": "Twelve 🙂"},
]
WITH_SYSTEM = [{"role": "system", "content": "You count."}, *PLAIN]


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    """A small byte-level BPE, with the special tokens of all templates here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    library.train_from_iterator([message["content"] for message in WITH_SYSTEM] * 9, trainer)
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "model_max_length": 4}
    return HuggingFaceTokenizer({"tokenizer.json": library.to_str(), "tokenizer_config.json": json.dumps(config)})


def encode(tokenizer: Any, template: str, messages: Any) -> Encoded:
    (encoded,) = ChatEncoder(tokenizer, template, "the template")([Row(4, messages)], "chats.jsonl")
    assert encoded.supervised is not None
    assert encoded.tokens.shape == encoded.supervised.shape
    return encoded


def learned(tokenizer: Any, encoded: Encoded) -> list[str]:
    """Text of each run of tokens that are learned."""
    assert encoded.supervised is not None
    runs = np.split(encoded.tokens, np.flatnonzero(np.diff(encoded.supervised)) + 1)
    first = int(encoded.supervised[0])
    return [tokenizer.decode_marked(run.tolist()) for run in runs[1 - first :: 2]]


TEMPLATES = {
    "chatml": (CHATML, ["Four, señor.<|im_end|>", "Twelve 🙂<|im_end|>"]),
    "llama 3": (LLAMA3, ["Four, señor.<|eot_id|>", "Twelve 🙂<|eot_id|>"]),
    "llama 2": (LLAMA2, [" Four, señor. </s>", " Twelve 🙂 </s>"]),
    "unasked": (UNASKED, ["Four, señor.\n", "Twelve 🙂\n"]),
    "marked": (MARKED, ["Four, señor.<|im_end|>", "Twelve 🙂<|im_end|>"]),
    "qwen 3": (QWEN3, ["Four, señor.<|im_end|>", "<think>\n\n</think>\n\nTwelve 🙂<|im_end|>"]),
    "deepseek": (DEEPSEEK, ["Four, señor.</s>", "Twelve 🙂</s>"]),
}
"""Template and what is learned of ``PLAIN``."""


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [PLAIN, WITH_SYSTEM], ids=["plain", "with system"])
def test_tokens_are_those_of_transformers_and_replies_are_learned(
    name: str, messages: list[dict[str, str]], tokenizer: HuggingFaceTokenizer
) -> None:
    from transformers import PreTrainedTokenizerFast

    if name == "llama 2" and messages is WITH_SYSTEM:
        pytest.skip("it takes no system message so")
    template, expected = TEMPLATES[name]
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._with_marks, bos_token="<s>", eos_token="</s>")
    text = theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
    ids = theirs.apply_chat_template(messages, chat_template=template)["input_ids"]
    encoded = encode(tokenizer, template, messages)
    assert encoded.tokens.tolist() == ids + ([] if ids[-1] == tokenizer.end_id else [tokenizer.end_id])
    assert learned(tokenizer, encoded) == expected
    ours = encode(BytesTokenizer(), template.replace("bos_token", "'<s>'").replace("eos_token", "'</s>'"), messages)
    assert BytesTokenizer().decode(ours.tokens) == text
    assert ours.tokens[-1] == BytesTokenizer.end_id
    # A reply's first blank may be one token with its first word.
    assert [run.lstrip(" ") for run in learned(BytesTokenizer(), ours)] == [run.lstrip(" ") for run in expected]


def test_the_reasoning_of_the_last_reply_is_learned(tokenizer: HuggingFaceTokenizer) -> None:
    thought = {"role": "assistant", "content": "<think>\n3 x 4\n</think>\n\nTwelve"}
    encoded = encode(tokenizer, QWEN3, [*PLAIN[:3], thought])
    assert learned(tokenizer, encoded) == ["Four, señor.<|im_end|>", "<think>\n3 x 4\n</think>\n\nTwelve<|im_end|>"]


@pytest.mark.parametrize("template", [QWEN3, DEEPSEEK], ids=["qwen 3", "deepseek"])
def test_reasoning_that_a_template_drops_is_refused(template: str, tokenizer: HuggingFaceTokenizer) -> None:
    thought = {"role": "assistant", "content": "<think>\n2 + 2\n</think>\n\nFour"}
    with pytest.raises(
        UserError, match=r"^row 5 of chats\.jsonl: the template renders message 2 \(assistant\) differently"
    ):
        encode(tokenizer, template, [PLAIN[0], thought, *PLAIN[2:]])


def test_calls_of_tools_are_learned_and_their_answers_are_not(tokenizer: HuggingFaceTokenizer) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 2, "b": "<2>"}}}
    messages = [
        PLAIN[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_calls": None},  # as a table has it, in which no column is absent
        PLAIN[1],
    ]
    encoded = encode(tokenizer, TOOLS, messages)
    assert learned(tokenizer, encoded) == [
        '{"name": "add", "arguments": {"a": 2, "b": "<2>"}}<|im_end|>',
        "Four, señor.<|im_end|>",
    ]


ADD = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer", "default": None}}}}
SHOWN = "{% if tools %}{{ tools | tojson }}{% endif %}" + TOOLS


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_of_a_row_are_seen_as_by_transformers(
    as_text: bool, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    messages = [
        PLAIN[0],
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
        {"role": "tool", "content": "4"},
        PLAIN[1],
    ]
    rows = [{"messages": messages, "tools": json.dumps([ADD]) if as_text else [ADD]}, {"messages": PLAIN, "tools": []}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(section(tmp_path / "rows.jsonl", format="chat"))
    source.fingerprint(Progress(None, 1))
    (unit,) = source.units()
    with_tools, without = ChatEncoder(tokenizer, SHOWN, "the template")(list(unit.rows()), unit.name)
    assert learned(tokenizer, with_tools)[0] == '{"name": "add", "arguments": {"a": 2}}<|im_end|>'
    schema = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}
    library = PreTrainedTokenizerFast(tokenizer_object=tokenizer._with_marks, bos_token="<s>", eos_token="</s>")
    theirs = library.apply_chat_template(messages, tools=[schema], chat_template=SHOWN)["input_ids"]
    assert with_tools.tokens.tolist() == [*theirs, tokenizer.end_id]
    assert without.tokens.tolist() == encode(tokenizer, TOOLS, PLAIN).tokens.tolist()


@pytest.mark.parametrize("said", [None, "", "Let me add."])
def test_calls_and_tools_that_a_template_leaves_out_are_refused(
    said: str | None, tokenizer: HuggingFaceTokenizer
) -> None:
    calling = {"role": "assistant", "content": said, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    with pytest.raises(UserError, match=r"the template leaves out the tool_calls of message 2 \(assistant\); use a "):
        encode(tokenizer, CHATML, [PLAIN[0], calling, *PLAIN[:2]])
    with pytest.raises(UserError, match=r"the template shows no tools, .* or remove the column 'tools'"):
        encode(tokenizer, TOOLS, {"messages": [PLAIN[0], calling], "tools": [ADD]})


def test_a_call_that_a_template_shows_in_its_own_way_is_learned(tokenizer: HuggingFaceTokenizer) -> None:
    """As DeepSeek V3's: calls only of messages without content; tools without asking whether there are any."""
    template = (
        "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% for message in messages %}"
        "{% if message.content is none %}{{ '<|assistant|>' + message.tool_calls[0].function.name + eos_token }}"
        "{% elif message.role == 'user' %}{{ '<|user|>' + message.content }}"
        "{% else %}{{ '<|assistant|>' + message.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    messages = [PLAIN[0], {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}]
    encoded = encode(tokenizer, template, {"messages": messages, "tools": [ADD]})
    assert learned(tokenizer, encoded) == ["add</s>"]


def test_calls_in_conversations_of_sharegpt_are_kept(tokenizer: HuggingFaceTokenizer) -> None:
    call = {"function": {"name": "add", "arguments": {}}}
    shared = [{"from": "human", "value": "Add."}, {"from": "gpt", "value": "", "tool_calls": [call]}]
    assert learned(tokenizer, encode(tokenizer, TOOLS, shared)) == ['{"name": "add", "arguments": {}}<|im_end|>']


def test_parts_of_text_are_one_text_and_others_are_refused(tokenizer: HuggingFaceTokenizer) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "two and two?"}]
    whole = encode(tokenizer, CHATML, [{"role": "user", "content": parts}, PLAIN[1]])
    assert whole.tokens.tolist() == encode(tokenizer, CHATML, PLAIN[:2]).tokens.tolist()
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(UserError, match=r"message 1 \(user\) has a part of type 'image_url' in its content, and only"):
        encode(tokenizer, CHATML, [{"role": "user", "content": [*parts, image]}, PLAIN[1]])
    with pytest.raises(UserError, match=r"message 1 \(user\) has a part without text in its content"):
        encode(tokenizer, CHATML, [{"role": "user", "content": [{"type": "text", "text": None}]}, PLAIN[1]])


def test_conversations_of_sharegpt_are_the_same(tokenizer: HuggingFaceTokenizer) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [{"from": names[message["role"]], "value": message["content"]} for message in WITH_SYSTEM]
    ours, theirs = (encode(tokenizer, CHATML, messages) for messages in (WITH_SYSTEM, shared))
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert np.array_equal(ours.supervised, theirs.supervised)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (PLAIN[:1], "it has nothing to train on: no message is from the assistant (roles: user); fix"),
        ([], "it has nothing to train on: no message is from the assistant (roles: none); fix"),
        ("hello", "is not a list of messages; use data.format=text for text, or data.messages_column=NAME"),
        ([{"text": "hi"}], "message 1 has no role (it has text); messages are {role, content} or {from, value}"),
        ([PLAIN[0], {"role": "assistant", "content": 4}], "message 2 (assistant) has 4 in place of text"),
        ([{"role": "assistant"}], "message 1 (assistant) has None in place of text"),
        ([{"from": "alien", "value": "hi"}], "message 1 is from 'alien', which is not one of human, user, gpt, "),
        ([*PLAIN, {"role": "user", "content": "\ud800"}], "holds half a character"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(messages: Any, said: str, tokenizer: HuggingFaceTokenizer) -> None:
    for each in (BytesTokenizer(), tokenizer):
        with pytest.raises(UserError) as caught:
            encode(each, CHATML, messages)
        assert str(caught.value).startswith("row 5 of chats.jsonl")
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_empty_reply_is_refused() -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(
        UserError, match=r"row 5 of chats\.jsonl: it has nothing to train on: the assistant's messages are empty"
    ):
        encode(BytesTokenizer(), template, [PLAIN[0], {"role": "assistant", "content": ""}])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LLAMA2, "row 5 of chats.jsonl: the template refuses it: Conversation roles must alternate user/assistant/"),
        ("{{ messages[0].content + 1 }}", ": the template fails with TypeError: "),
        ("{{ messages.clear() }}", ": the template refuses it: "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ": the template refuses it: access to attribute"),
        ("{% for x in range(9) %}{{ 'x' * 2**23 }}{% endfor %}", "more than 67108864 characters for one conversation"),
        ("{{ 'x' * 2**40 }}", ": the template fails with OverflowError: * with too large a result"),
        ("{{ 9 ** 99 }}", ": the template fails with OverflowError: ** with too large a result"),
    ],
)
def test_a_template_that_fails_or_breaks_out_is_one_line(template: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        encode(BytesTokenizer(), template, WITH_SYSTEM)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_template_is_the_given_one_or_the_tokenizers_or_chatml(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(UNASKED)
    files = tokenizer.spec()["files"]
    named = [{"name": "tool_use", "template": TOOLS}, {"name": "default", "template": LLAMA3}]
    in_config = HuggingFaceTokenizer({**files, "tokenizer_config.json": json.dumps({"chat_template": LLAMA2})})
    by_name = HuggingFaceTokenizer({**files, "tokenizer_config.json": json.dumps({"chat_template": named})})
    beside = HuggingFaceTokenizer({**in_config.spec()["files"], "chat_template.jinja": QWEN3})
    given = section("x", format="chat", chat_template=str(file)), section("x", format="chat", chat_template=MARKED)
    neither: list[Any] = [tokenizer, BytesTokenizer()]
    assert [chat_template(section("x"), each)[0] for each in neither] == [CHATML, CHATML]
    own: list[Any] = [in_config, by_name, beside]
    assert [chat_template(section("x"), each)[0] for each in own] == [LLAMA2, LLAMA3, QWEN3]
    assert [chat_template(each, own[2])[0] for each in given] == [UNASKED, MARKED]
    specs = [chat_encoder(each, own[2]).spec() for each in (section("x"), *given)]
    assert len({json.dumps(spec) for spec in specs}) == 3
    with pytest.raises(UserError, match=r"cannot read data\.chat_template=.*nowhere\.jinja: No such file"):
        chat_template(section("x", format="chat", chat_template=str(tmp_path / "nowhere.jinja")), own[0])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"cannot read data\.chat_template=.*pipe is not a regular file"):
        chat_template(section("x", format="chat", chat_template=str(tmp_path / "pipe")), own[0])
    with pytest.raises(UserError, match=r"data\.chat_template is not a Jinja template in line 1: "):
        chat_encoder(section("x", format="chat", chat_template="{% for x %}"), own[0])


def test_the_day_in_a_template_does_not_change_the_tokens() -> None:
    template = "{{ strftime_now('%d %b %Y') }} " + CHATML
    assert (
        BytesTokenizer().decode(encode(BytesTokenizer(), template, PLAIN).tokens).startswith("26 Jul 2024 <|im_start|>")
    )
