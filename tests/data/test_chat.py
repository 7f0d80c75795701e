"""Conversations: rendered as transformers renders them, and only what the assistant says is learned."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serried.configs.errors import UserError
from serried.recipes.data.chat.conversations import CHATML, ChatEncoder, ask, chat_encoder, chat_template
from serried.recipes.data.readers.reading_progress import Progress
from serried.recipes.data.readers.source import Row, open_source
from serried.recipes.data.tokenizers.chat_template import Template
from serried.recipes.data.tokenizers.encode_rows import Encoded
from serried.recipes.data.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer
from serried.recipes.data.tokenizers.tokenizer import BytesTokenizer
from tests.support.texts import section

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
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- set ns.last = loop.index0 %}
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
    if isinstance(encoded, UserError):
        raise encoded
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
    "unasked": (UNASKED, ["Four, señor.\n", "Twelve 🙂\n</s>"]),
    "marked": (MARKED, ["Four, señor.<|im_end|>", "Twelve 🙂<|im_end|>"]),
    "qwen 3": (QWEN3, ["Four, señor.<|im_end|>", "Twelve 🙂<|im_end|>"]),
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
    if name == "unasked":
        expected = [run.replace("</s>", "<|end|>") for run in expected]
    assert learned(BytesTokenizer(), ours) == expected


def test_the_reasoning_of_the_last_reply_is_learned(tokenizer: HuggingFaceTokenizer) -> None:
    thought = {"role": "assistant", "content": "<think>\n3 x 4\n</think>\n\nTwelve"}
    encoded = encode(tokenizer, QWEN3, [*PLAIN[:3], thought])
    assert learned(tokenizer, encoded) == ["Four, señor.<|im_end|>", "<think>\n3 x 4\n</think>\n\nTwelve<|im_end|>"]


def test_reasoning_that_a_template_drops_later_is_learned_in_a_sample_that_ends_with_it(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    thought = {"role": "assistant", "content": "<think>\n2 + 2\n</think>\n\nFour"}
    encoded = encode(tokenizer, QWEN3, [PLAIN[0], thought, *PLAIN[2:]])
    (before,) = encoded.before
    assert learned(tokenizer, before) == ["<think>\n2 + 2\n</think>\n\nFour<|im_end|>"]
    assert before.tokens.tolist() == encode(tokenizer, QWEN3, [PLAIN[0], thought]).tokens.tolist()
    assert learned(tokenizer, encoded) == ["Twelve 🙂<|im_end|>"]
    assert "2 + 2" not in tokenizer.decode(encoded.tokens)


def test_reasoning_that_a_template_asks_for_and_never_shows_follows_the_prompt(tokenizer: HuggingFaceTokenizer) -> None:
    """As DeepSeek R1's: a reply without reasoning ends the block that the prompt begins."""
    thought = {"role": "assistant", "content": "<think>\n2 + 2\n</think>\n\nFour"}
    encoded = encode(tokenizer, DEEPSEEK, [PLAIN[0], thought, *PLAIN[2:]])
    samples = [*encoded.before, encoded]
    assert [learned(tokenizer, sample) for sample in samples] == [
        ["2 + 2\n</think>\n\nFour</s>"], ["\n</think>\n\nTwelve 🙂</s>"],
    ]  # fmt: skip
    asked, _ = ask(DEEPSEEK, tokenizer, ["What is two and two?"])
    assert samples[0].tokens[: len(asked)].tolist() == asked


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
    with pytest.raises(
        UserError, match=r"the template does not render the tool_calls of message 2 \(assistant\); use a "
    ):
        encode(tokenizer, CHATML, [PLAIN[0], calling, *PLAIN[:2]])
    with pytest.raises(UserError, match=r"the template does not render the tools, .* or remove the column 'tools'"):
        encode(tokenizer, TOOLS, {"messages": [PLAIN[0], {**calling, "content": ""}], "tools": [ADD]})


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
    with pytest.raises(UserError, match=r"message 1 \(user\) has a part of type 'image_url' in its content, but only"):
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
        (PLAIN[:1], "nothing to train on: no message is from the assistant (roles: user); fix"),
        ([], "nothing to train on: no message is from the assistant (roles: none); fix"),
        ("hello", "is not a list of messages; use data.format=text for text, or data.messages_column=NAME"),
        (
            [{"text": "hi"}],
            "message 1 has no role (its keys: text); write messages as {role, content} or {from, value}",
        ),
        ([PLAIN[0], {"role": "assistant", "content": 4}], "message 2 (assistant) has 4 as its content, not text"),
        ([{"role": "assistant"}], "message 1 (assistant) has None as its content, not text"),
        ([{"from": "alien", "value": "hi"}], "message 1 has the unknown role 'alien'; use one of human, user, gpt, "),
        ([*PLAIN, {"role": "user", "content": "\ud800"}], "contains an unpaired surrogate"),
    ],
)
def test_row_that_is_not_a_conversation_is_refused_with_its_reason(
    messages: Any, said: str, tokenizer: HuggingFaceTokenizer
) -> None:
    for each in (BytesTokenizer(), tokenizer):
        with pytest.raises(UserError) as caught:
            encode(each, CHATML, messages)
        assert str(caught.value).startswith("row 5 of chats.jsonl")
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_empty_reply_is_refused() -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(
        UserError, match=r"row 5 of chats\.jsonl: nothing to train on: the assistant's messages are empty"
    ):
        encode(BytesTokenizer(), template, [PLAIN[0], {"role": "assistant", "content": ""}])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            LLAMA2,
            "row 5 of chats.jsonl: the template raises an error: Conversation roles must alternate user/assistant/",
        ),
        ("{{ messages[0].content + 1 }}", ": the template fails with TypeError: "),
        ("{{ messages.clear() }}", ": the template raises an error: "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ": the template raises an error: access to attribute"),
        (
            "{% for x in range(9) %}{{ 'x' * 2**23 }}{% endfor %}",
            "more than 67,108,864 characters for one conversation",
        ),
        (
            "{{ [1]|slice(2**30)|list }}",
            "makes a text or list of more than 67,108,864 characters or items (slice); use",
        ),
        (
            "{{ [1]|batch(2**30, 0)|list }}",
            "makes a text or list of more than 67,108,864 characters or items (batch); use",
        ),
        ("{{ 'x' * 2**40 }}", "the template makes a text or list of more than 67,108,864 characters or items (*); use"),
        ("{{ 9 ** 99 }}", "the template computes ** with too large a result; use"),
    ],
)
def test_failing_or_unsafe_template_is_refused_in_one_line(template: str, said: str) -> None:
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
    with pytest.raises(UserError, match=r"data\.chat_template is not a valid Jinja template in line 1: "):
        chat_encoder(section("x", format="chat", chat_template="{% for x %}"), own[0])


def test_date_in_a_template_does_not_change_the_tokens() -> None:
    template = "{{ strftime_now('%d %b %Y') }} " + CHATML
    assert (
        BytesTokenizer().decode(encode(BytesTokenizer(), template, PLAIN).tokens).startswith("26 Jul 2024 <|im_start|>")
    )


# what is trained on ---------------------------------------------------------------------------------------------------

PLAIN_TEXT = (
    "{% for m in messages %}{{ ('User: ' if m.role == 'user' else 'Assistant: ') + m.content + '\n' }}{% endfor %}"
)
NEVER_ASKS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
END_AFTER_ALL = PLAIN_TEXT + "{{ eos_token }}"


def said_to(reply: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Go."}, {"role": "assistant", "content": reply}]


@pytest.mark.parametrize(
    ("template", "reply", "trained"),
    [
        (NEVER_ASKS, "Yes.", "Yes.<|im_end|>"),
        (NEVER_ASKS, "assistant", "assistant<|im_end|>"),
        (NEVER_ASKS, "  padded", "  padded<|im_end|>"),
        (CHATML, "  padded ", "  padded <|im_end|>"),
        (CHATML, "\n\nassistant", "\n\nassistant<|im_end|>"),
        (PLAIN_TEXT, "A", "A\n</s>"),
        (PLAIN_TEXT, "Assistant", "Assistant\n</s>"),
        (PLAIN_TEXT.removesuffix("{% endfor %}").replace(" + '\n'", "") + "{% endfor %}", "A", "A</s>"),
        (END_AFTER_ALL, "A", "A\n</s>"),
        (LLAMA2, "A", " A </s>"),
        (UNASKED.replace("upper", "lower"), "assistant:", "assistant:\n</s>"),
    ],
)
def test_a_reply_is_trained_with_its_end_and_without_its_header(
    tokenizer: HuggingFaceTokenizer, template: str, reply: str, trained: str
) -> None:
    assert learned(tokenizer, encode(tokenizer, template, said_to(reply))) == [trained]


def test_a_first_token_that_begins_with_the_blank_of_the_header_is_trained() -> None:
    """As of GPT-2 and Llama 3: a blank and the word after it are one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: number for number, each in enumerate([*alphabet, "ĠA", "Ġs", "</s>"])}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "A"), ("Ġ", "s")]))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_special_tokens(["</s>"])
    files = {"tokenizer.json": library.to_str(), "tokenizer_config.json": '{"eos_token": "</s>"}'}
    encoded = encode(own := HuggingFaceTokenizer(files), PLAIN_TEXT, said_to("A"))
    assert learned(own, encoded) == [" A\n</s>"]
    ids, _ = ask(PLAIN_TEXT, own, ["Go."])
    assert own.decode(ids) == "User: Go.\nAssistant:"
    assert encoded.tokens[: len(ids)].tolist() == ids, "a model is asked as it was trained"


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_trained_on_follows_what_the_template_asks_with(name: str, tokenizer: HuggingFaceTokenizer) -> None:
    """By ids, from transformers alone: those before a reply are those of the prompt that asks for it."""
    from transformers import PreTrainedTokenizerFast

    if name == "unasked":
        pytest.skip("it has no generation prompt")
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._with_marks, bos_token="<s>", eos_token="</s>")
    encoded = encode(tokenizer, TEMPLATES[name][0], PLAIN)
    assert encoded.supervised is not None
    starts = np.flatnonzero(np.diff(encoded.supervised) == 1) + 1
    for start, turn in zip(starts.tolist(), (1, 3), strict=True):
        asked = theirs.apply_chat_template(PLAIN[:turn], chat_template=TEMPLATES[name][0], add_generation_prompt=True)[
            "input_ids"
        ]
        block = "<think>\n\n</think>\n\n" if name == "qwen 3" and turn == 3 else ""
        assert encoded.tokens[:start].tolist() == [*asked, *tokenizer.encode(block).tolist()]


@pytest.mark.parametrize("name", [*TEMPLATES, "plain", "end after all"])
def test_long_conversations_are_found_as_each_reply_alone_would_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from serried.recipes.data.chat import reply_spans as replies

    others = {"plain": PLAIN_TEXT, "end after all": END_AFTER_ALL}
    template = Template(
        {**{key: each for key, (each, _) in TEMPLATES.items()}, **others}[name],
        name,
        {"bos_token": "<s>", "eos_token": "</s>"},
    )
    words = ["A", "  padded ", "assistant", "user", "Assistant: A", "x\n", "<|im_end|>", "Go.\n\nGo."]
    messages = [
        {"role": ("user", "assistant")[turn % 2], "content": words[(3 * turn + turn // 5) % len(words)]}
        for turn in range(24)
    ]
    renders = 0

    def render(*given: Any, **options: Any) -> str:
        nonlocal renders
        renders += 1
        return template.render(*given, **options)

    turns = range(1, 24, 2)
    found = replies.find_samples(render, name, messages, turns)
    assert renders < 36 or name in ("qwen 3", "end after all")
    monkeypatch.setattr(replies, "_as_others", lambda *_: None)
    assert found == replies.find_samples(render, name, messages, turns)


@pytest.mark.parametrize("key", ["weight", "train", "training"])
def test_messages_with_no_weight_are_not_trained_on(key: str, tokenizer: HuggingFaceTokenizer) -> None:
    off = 0 if key == "weight" else False
    messages = [PLAIN[0], {**PLAIN[1], key: off}, PLAIN[2], {**PLAIN[3], key: 1, "weight": 1.0}]
    encoded = encode(tokenizer, CHATML, messages)
    assert encoded.tokens.tolist() == encode(tokenizer, CHATML, PLAIN).tokens.tolist()
    assert learned(tokenizer, encoded) == ["Twelve 🙂<|im_end|>"]
    with pytest.raises(
        UserError, match=r"nothing to train on: all replies are excluded from training \(weight: 0 or false, train"
    ):
        encode(tokenizer, CHATML, messages[:2])
    for value in (-0.5 if key == "weight" else 0.5, "no"):
        with pytest.raises(
            UserError, match=rf"message 2 \(assistant\) has {key}: {value!r}; use 1 or true to train on the message"
        ):
            encode(tokenizer, CHATML, [PLAIN[0], {**PLAIN[1], key: value}])


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_a_key_is_shown_or_refused_unless_it_is_not_trained_on(
    key: str, tokenizer: HuggingFaceTokenizer
) -> None:
    shows = CHATML.replace("message['content'] +", f"(message.{key} or '') + message['content'] +")
    thought = {**PLAIN[1], key: "2 + 2"}
    assert learned(tokenizer, encode(tokenizer, shows, [PLAIN[0], thought]))[0].startswith("2 + 2Four")
    with pytest.raises(
        UserError, match=rf"the template does not render the {key} of message 2 \(assistant\); remove the {key}, "
    ):
        encode(tokenizer, CHATML, [PLAIN[0], thought])
    repeated = {"role": "assistant", "content": "<think>2 + 2</think>Four", key: "2 + 2"}
    encode(tokenizer, CHATML, [PLAIN[0], repeated])
    assert len(learned(tokenizer, encode(tokenizer, CHATML, [PLAIN[0], {**thought, "weight": 0}, *PLAIN[2:]]))) == 1


def test_empty_reasoning_that_a_template_drops_is_no_loss(tokenizer: HuggingFaceTokenizer) -> None:
    messages = [
        {**message, "content": f"<think>\n\n</think>\n\n{message['content']}"} for message in (PLAIN[1], PLAIN[3])
    ]
    encoded = encode(tokenizer, QWEN3, [PLAIN[0], messages[0], PLAIN[2], messages[1]])
    assert encoded.before == ()
    assert learned(tokenizer, encoded) == ["Four, señor.<|im_end|>", "<think>\n\n</think>\n\nTwelve 🙂<|im_end|>"]


QWEN3_TOOLS = QWEN3.replace(
    "        {{- '<|im_end|>\\n' }}\n    {%- endif %}",
    "        {%- for call in message.tool_calls or [] %}\n"
    "            {%- if loop.first and content %}{{- '\\n' }}{%- endif %}\n"
    "            {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}\n"
    "        {%- endfor %}\n"
    "        {{- '<|im_end|>\\n' }}\n    {%- endif %}",
)
"""As Qwen 3's with tools: empty reasoning before a call only while nothing follows it."""


@pytest.mark.parametrize("said", ["", "Let me add."])
def test_calls_that_a_template_renders_differently_once_others_follow_are_learned(
    said: str, tokenizer: HuggingFaceTokenizer
) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        PLAIN[0],
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        PLAIN[1],
    ]
    shown = f'{said}{said and chr(10)}<tool_call>\n{{"name": "add", "arguments": {{"a": 2}}}}\n</tool_call><|im_end|>'
    assert learned(tokenizer, encode(tokenizer, QWEN3_TOOLS, messages)) == [
        shown, "Four, señor.<|im_end|>",
    ]  # fmt: skip


def test_a_message_that_a_template_leaves_out_is_refused(tokenizer: HuggingFaceTokenizer) -> None:
    """However often its words are elsewhere."""
    known = (
        "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    )
    for role, cure in {"developer": "use the role 'system', or", "system": "remove the message, or"}.items():
        with pytest.raises(
            UserError, match=rf"does not render the content of message 1 \({role}\), .*; {cure} use a template"
        ):
            encode(tokenizer, known, [{"role": role, "content": "Four"}, *PLAIN])
    assert encode(tokenizer, CHATML, [{"role": "developer", "content": "Four"}, *PLAIN])


@pytest.mark.parametrize(
    ("content", "expression", "expected"),
    [
        ("R" * 12_000 + "four", "content.replace(message.reasoning_content, '')", "four"),
        ("a" * 20_000 + "<image>", "content | replace('<image>', '<|img|>' * 576)", "a" * 20_000 + "<|img|>" * 576),
        ("ab" * 20_000, "content.replace('a', 'x' * 30000, 1)", "x" * 30_000 + "b" + "ab" * 19_999),
        ("ab" * 20_000, "content | replace(old='a', new='x' * 30000, count=1)", "x" * 30_000 + "b" + "ab" * 19_999),
        (
            "ab" * 20_000,
            "content | replace('', 'x' * 30000, 2)",
            "x" * 30_000 + "a" + "x" * 30_000 + "b" + "ab" * 19_999,
        ),
    ],
    ids=["reasoning", "image", "count", "named", "empty"],
)
def test_replacement_is_bounded_by_its_resulting_length(content: str, expression: str, expected: str) -> None:
    message = {"role": "user", "content": content, "reasoning_content": "R" * 12_000}
    given = "{% set message = messages[0] %}{% set content = message.content %}"
    template = Template(given + "{{ " + expression + " }}", "it", {})
    assert template.render([message]) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "x.replace('a', x)", "x.replace('', x)", "x | replace('a', x)", "x | replace(old='', new=x)",
        "x.replace('a', x, 4000)", "(x | e).replace('a', x)", "[x, x] | replace('a', x)",
    ],
)  # fmt: skip
def test_a_replacement_that_fills_the_memory_is_refused(expression: str) -> None:
    template = Template("{% set x = 'a' * 20000 %}{{ " + expression + " }}", "it", {})
    with pytest.raises(UserError, match=r"it makes a text or list of more than 67,108,864 characters or items \(repl"):
        template.render([])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "takes more than 20,000 steps",
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "takes more than 20,000 steps",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails with RecursionError"),
        ("DOUBLE{% set n.x = n.x ~ n.x %}", "makes a text or list of more than"),
        ("DOUBLE{% set n.x = n.x + n.x %}", "makes a text or list of more than"),
        ("DOUBLE{% set n.x = n.x.replace('a', n.x) %}", "makes a text or list of more than"),
        ("DOUBLE{% set n.x = [n.x, n.x] | join %}", "makes a text or list of more than"),
        ("DOUBLE{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}", "makes a text or list of more than"),
        ("DOUBLE{% set n.x = [n.x, n.x] %}", "writes a list of more than"),
        ("{{ '%99999999999d' % 1 }}", "formats with too large a width"),
        ("{{ '{:>99999999999}'.format(1) }}", "formats with too large a width"),
        ("{{ 'a' | center(99999999999) }}", "makes a text or list of more than"),
    ],
)
def test_endless_template_is_refused_in_one_line(template: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from serried.recipes.data.tokenizers import chat_template as module

    monkeypatch.setattr(module, "_MOST_STEPS", 20_000)
    monkeypatch.setattr(module, "_MOST_CHARACTERS", 2**16)
    monkeypatch.setattr(module, "_MOST_PARTS", 2**10)
    doubles = "{% set n = namespace(x='aa') %}{% for i in range(90) %}"
    template = template.replace("DOUBLE", doubles) + ("{% endfor %}{{ n.x }}" if "DOUBLE" in template else "")
    with pytest.raises(UserError, match=said) as caught:
        encode(BytesTokenizer(), template, PLAIN)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{{ 1" + " + 1" * 20000 + " }}",
        "{{ x" + " | upper" * 20000 + " }}",
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{% if 0 %}" + "{% elif 0 %}" * 5000 + "{% endif %}",
    ],
    ids=["parentheses", "if", "sum", "filters", "for", "elif"],
)
def test_too_deeply_nested_template_is_refused_in_one_line(template: str) -> None:
    with pytest.raises(
        UserError, match=r"^the template cannot be compiled as a Jinja template: it is nested or"
    ) as caught:
        encode(BytesTokenizer(), template, PLAIN)
    assert "\n" not in str(caught.value)
