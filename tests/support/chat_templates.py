"""Chat templates in the style of current models, and what each of them can show."""

from typing import Any, NamedTuple

_CALLS_AS_JSON = (
    "{%- for call in message.tool_calls or [] %}{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + '
    "'\", \"arguments\": ' }}{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
)
_TOOLS_IN_SYSTEM = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages and messages[0].role == 'system' %}"
    "{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- '# Tools\\n' }}{%- for tool in tools %}"
    "{{- tool | tojson }}{{- '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif messages and messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
)
_TOOL_RESULTS = (
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>ROLE' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
)
_LAST_QUERY = (
    "{%- set ns = namespace(last=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
)
_REASONING = (
    "{%- set content = message.content or '' %}{%- set reasoning = message.reasoning_content or '' %}"
    "{%- if not reasoning and '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
)

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- if messages and messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: 26 Jul 2024\\n\\n' }}"
    "{%- for tool in tools or [] %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}"
    "{{- system + '<|eot_id|>' }}{%- for message in rest %}"
    "{%- if message.tool_calls %}{%- if message.tool_calls | length != 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{{- message.content or '' }}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
QWEN3 = (
    _TOOLS_IN_SYSTEM + _LAST_QUERY + "{%- for message in messages %}" + _REASONING + "{%- if message.role == 'user' or "
    "(message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- else %}{{- content }}{%- endif %}"
    + _CALLS_AS_JSON + "{{- '<|im_end|>\\n' }}" + _TOOL_RESULTS.replace("ROLE", "user") +
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)  # fmt: skip
DEEPSEEK_R1 = (
    "{{- bos_token }}{%- for message in messages %}{%- if message.role == 'system' %}{{- message.content }}"
    "{%- elif message.role == 'user' %}{{- '<|User|>' + message.content }}"
    "{%- else %}{{- '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"
)
MISTRAL = (
    "{%- if messages and messages[0].role == 'system' %}{%- set system = messages[0].content %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}"
    "{%- set ns = namespace(last=-1) %}{%- for message in rest %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{{- bos_token }}{%- for message in rest %}"
    "{%- if message.role == 'user' %}{%- if tools and loop.index0 == ns.last %}"
    "{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- if loop.index0 == ns.last and system is defined %}"
    "{{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}"
    "{%- elif message.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}"
    "{%- if call.id is not defined or call.id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}{%- endfor %}"
    "{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}"
    "{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] {\"content\": ' }}{{- message.content | tojson }}"
    "{{- ', \"call_id\": \"' + message.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- else %}{{- raise_exception('Only user, assistant and tool roles are supported!') }}{%- endif %}{%- endfor %}"
)
GEMMA = (
    "{{- bos_token }}{%- if messages and messages[0].role == 'system' %}"
    "{{- raise_exception('System role not supported') }}{%- endif %}{%- for message in messages %}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
    "{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}"
    "{{- message.content | trim + '<end_of_turn>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"
)
GPT_OSS = (
    "{{- '<|start|>system<|message|>Reasoning: medium<|end|>' }}"
    "{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' %}"
    "{%- if system or tools %}{{- '<|start|>developer<|message|>' + system }}"
    "{%- for tool in tools or [] %}{{- '\\ntype ' }}{{- tool | tojson }}{%- endfor %}{{- '<|end|>' }}{%- endif %}"
    "{%- set ns = namespace(called='') %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{%- elif message.role == 'tool' %}"
    "{{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{- message.content | tojson }}{{- '<|end|>' }}{%- elif message.role == 'assistant' and message.tool_calls %}"
    "{%- set later = namespace(final=false) %}{%- for other in messages[loop.index:] %}"
    "{%- if other.role == 'assistant' and not other.tool_calls %}{%- set later.final = true %}{%- endif %}{%- endfor %}"
    "{%- if message.thinking and not later.final %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}"
    "{%- if message.content %}{{- '<|start|>assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}"
    "{%- endif %}{%- set ns.called = message.tool_calls[0].function.name %}"
    "{{- '<|start|>assistant to=functions.' + ns.called + '<|channel|>commentary json<|message|>' }}"
    "{{- message.tool_calls[0].function.arguments | tojson }}{{- '<|call|>' }}"
    "{%- elif message.role == 'assistant' and loop.last and not add_generation_prompt %}{%- if message.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
GLM = (
    "{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n# Tools' }}{%- for tool in tools %}"
    "{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{%- endif %}"
    + _LAST_QUERY + "{%- for message in messages %}" + _REASONING + "{%- if message.role == 'user' %}"
    "{{- '<|user|>\\n' + content }}{%- elif message.role == 'system' %}{{- '<|system|>\\n' + content }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}{%- else %}{{- '<|assistant|>' }}"
    "{%- if loop.index0 > ns.last and reasoning %}{{- '\\n<think>' + reasoning.strip() + '</think>' }}"
    "{%- else %}{{- '\\n<think></think>' }}{%- endif %}"
    "{%- if content.strip() %}{{- '\\n' + content.strip() }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>' + call.function.name + '\\n' }}"
    "{%- for key, value in call.function.arguments.items() %}{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}"
    "{{- value if value is string else value | tojson }}{{- '</arg_value>\\n' }}{%- endfor %}{{- '</tool_call>' }}"
    "{%- endfor %}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n<think></think>' }}{%- endif %}{%- endif %}"
)  # fmt: skip
PHI = (
    "{%- for message in messages %}{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}"
)
HERMES = (
    _TOOLS_IN_SYSTEM + "{%- for message in messages %}{%- if message.role == 'user' or message.role == 'assistant' or "
    "(message.role == 'system' and not loop.first) %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{{- message.content or '' }}" + _CALLS_AS_JSON + "{{- '<|im_end|>\\n' }}"
    + _TOOL_RESULTS.replace("ROLE", "tool") + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)  # fmt: skip


class Style(NamedTuple):
    """A template, and what it can show."""

    template: str
    system: str = "anywhere"
    """Where system messages may be: ``nowhere``, ``first`` or ``anywhere``."""
    calls: int = 0
    """Largest number of tool calls in a message."""
    reasoning: str = ""
    """Key of messages with reasoning; ``inline`` for reasoning in the content."""
    alternates: bool = False
    """Whether turns must be of the user and the assistant in turn."""
    variables: dict[str, Any] = {}  # noqa: RUF012 -- never changed


STYLES = {
    "chatml": Style(CHATML),
    "llama 3": Style(LLAMA3, "first", 1),
    "qwen 3": Style(QWEN3, "anywhere", 3, "reasoning_content"),
    "qwen 3 without thinking": Style(QWEN3, "anywhere", 3, variables={"enable_thinking": False}),
    "qwen 3 inline": Style(QWEN3, "anywhere", 3, "inline"),
    "deepseek r1": Style(DEEPSEEK_R1, "first", 0, "inline"),
    "mistral": Style(MISTRAL, "first", 3),
    "gemma": Style(GEMMA, "nowhere", alternates=True),
    "gpt-oss": Style(GPT_OSS, "first", 1, "thinking"),
    "glm": Style(GLM, "anywhere", 3, "reasoning_content"),
    "phi": Style(PHI),
    "hermes": Style(HERMES, "anywhere", 3),
}
SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|User|>",
    "<|Assistant|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>", "<|start|>", "<|message|>", "<|channel|>", "<|call|>",
    "<|return|>", "<|end|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip
"""Special tokens of all templates."""
