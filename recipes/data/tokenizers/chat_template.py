"""Chat templates: Jinja, compiled as in ``transformers``, in a sandbox with resource limits."""

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from functools import wraps
from types import MappingProxyType
from typing import Any

from serried.configs.errors import UserError
from serried.recipes.data.readers.source_files import library

Message = dict[str, Any]

_NOW = datetime(2024, 7, 26)
"""Date for templates that use the current date. It is fixed, since tokens must not depend on the day."""

_MOST_CHARACTERS = 2**26
"""Maximum number of characters in the text of one conversation, or in one string of a template."""

_MOST_STEPS = 3_000_000
"""Maximum number of steps (loop iterations, macros and calls) for one conversation, which take a few seconds. Steps are
counted instead of time, so that the same rows are accepted on every machine."""

_STEPS_OF_A_CALL = 5
"""Cost of a call, in steps."""

_MOST_PARTS = 2**20
"""Maximum number of nested elements in a list or an object that is converted to text."""

_FUNCTIONS = frozenset({"raise_exception", "strftime_now", "namespace", "range", "dict", "lipsum", "cycler", "joiner"})

_GROWING = (
    "join", "replace", "center", "indent", "ljust", "rjust", "zfill", "expandtabs", "format", "translate", "slice",
    "batch",
)  # fmt: skip
"""Filters and string methods that may return a result much longer than their arguments."""

CURE = "use another template, data.chat_template=FILE, or fix the row"


class Unlearnable(Exception):
    """Raised if a conversation cannot be rendered, or its replies cannot be found. The message is for users."""


class TooMuch(UserError):
    """Raised if a template exceeds a resource limit, for example in an endless loop. This would happen for every
    row."""


class Template:
    """A Jinja template, run in a sandbox, since templates are untrusted code."""

    def __init__(
        self,
        text: str,
        name: str,
        special_tokens: Mapping[str, str],
        *,
        for_tools: str | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Compile the template. Raises ``UserError`` if it is invalid, or does not use one of the ``variables``.

        Args:
            special_tokens: variables such as ``bos_token``.
            for_tools: separate template for conversations with tools.
            variables: additional variables, by name.
        """
        self.text, self.name, self.for_tools = text, name, for_tools
        self.variables = dict(variables)
        self._given = {**special_tokens, **variables}
        self._spent = _Spent()
        self._compiled = _compile(text, name, self._spent)
        self._compiled_for_tools = None if for_tools is None else _compile(for_tools, name, self._spent)
        _check_variables([text, *([] if for_tools is None else [for_tools])], name, variables)

    def render(
        self, messages: Sequence[Message], *, ask_for_reply: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """Return the text of ``messages``; with ``ask_for_reply``, followed by the generation prompt. ``tools``: tools
        that the assistant may call.

        Raises:
            Unlearnable: the template refuses the messages, or fails.
            TooMuch: the template exceeds a resource limit.
        """
        import jinja2

        self._spent.steps = 0
        compiled = self._compiled_for_tools if tools and self._compiled_for_tools else self._compiled
        given = {"messages": messages, "tools": list(tools) or None, "documents": None}
        try:
            pieces = compiled.generate({**given, "add_generation_prompt": ask_for_reply, **self._given})
            return _joined(pieces)
        except _Excess as error:
            raise TooMuch(f"{self.name} {error}; use another template: data.chat_template=FILE") from error
        except jinja2.TemplateError as error:
            raise Unlearnable(f"{self.name} raises an error: {error}; {CURE}") from error
        except Exception as error:  # a template may raise any exception
            reason = f"{type(error).__name__}: {error}"
            raise Unlearnable(f"{self.name} fails with {reason}; {CURE}") from error


def _check_variables(texts: Sequence[str], name: str, variables: Mapping[str, Any]) -> None:
    """Raise ``UserError`` if one of the ``variables`` is not used in any of the templates."""
    if not variables:
        return
    from jinja2 import meta

    environment, _ = _environment(_Spent())
    read = {found for text in texts for found in meta.find_undeclared_variables(environment.parse(text))}
    for variable in variables:
        if variable in read:
            continue
        others = sorted(read - {"messages", "tools", "documents", "add_generation_prompt"} - _FUNCTIONS)
        others = [other for other in others if not other.endswith("_token")]
        close = get_close_matches(variable, others, 1) or others[:5]
        hint = f"it reads {', '.join(close)}" if close else "it reads no such variables"
        given = f"data.chat_template_kwargs.{variable}={json.dumps(variables[variable])}"
        raise UserError(f"{given} has no effect: {name} does not read this variable ({hint}); remove it")


class _Excess(Exception):
    """Raised if a template exceeds a resource limit, which the message describes."""


class _Spent(threading.local):
    """Number of steps spent on the current conversation, per thread."""

    steps = 0

    def step(self, steps: int = 1) -> None:
        self.steps += steps
        if self.steps > _MOST_STEPS:
            raise _Excess(f"takes more than {_MOST_STEPS:,} steps for one conversation")


def _joined(pieces: Iterable[str]) -> str:
    text, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > _MOST_CHARACTERS:
            raise _Excess(f"writes more than {_MOST_CHARACTERS:,} characters for one conversation")
        text.append(piece)
    return "".join(text)


def _check_length(length: int, what: str) -> None:
    if length > _MOST_CHARACTERS:
        raise _Excess(f"makes a text or list of more than {_MOST_CHARACTERS:,} characters or items ({what})")


def _check_parts(value: Any) -> Any:
    """Return ``value``. Raises ``_Excess`` if it has too many nested elements: lists that share elements may be small
    in memory but extremely long as text."""
    waiting, parts = [value], 0
    while waiting:
        each = waiting.pop()
        if isinstance(each, list | tuple | dict):
            parts += len(each)
            if parts > _MOST_PARTS:
                raise _Excess(f"writes a list of more than {_MOST_PARTS:,} parts")
            waiting += [*each, *each.values()] if isinstance(each, dict) else each
    return value


def _check_growth(name: str, given: Sequence[Any], named: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Raise ``_Excess`` if the result of the function ``name``, one of ``_GROWING``, may be too long. The product of
    the sizes of its arguments is used as an upper bound."""
    if name == "replace" and (length := _length_replaced(given, named)) is not None:
        _check_length(length, name)
        return
    given = [*given, *named.values()]

    def size(value: Any) -> int:
        if isinstance(value, list | tuple):
            return sum(map(size, value)) + len(value)
        return len(value) if isinstance(value, str | dict) else abs(value) if isinstance(value, int) else 1

    if name == "format":
        if any(isinstance(argument, str) and re.search(r"\d{7}|\*", argument) for argument in given[:1]):
            raise _Excess("formats with too large a width")
        return
    _check_length((size(given[0]) + 1) * max(map(size, given[1:]), default=1), name)


def _length_replaced(given: Sequence[Any], named: Mapping[str, Any]) -> int | None:
    """Return the length of the result of ``replace``; None if it cannot be derived from these arguments."""
    arguments = {**dict(zip(("text", "old", "new", "count"), given, strict=False)), **named}
    count = arguments.pop("count", None)
    if len(arguments) < 3 or not isinstance(count, int | None):
        return None  # the call itself will fail
    if any(
        isinstance(argument, list | tuple | dict) or hasattr(argument, "__html__") for argument in arguments.values()
    ):
        return None  # may be far longer as text, or may be escaped first
    text, old, new = (str(arguments[key]) for key in ("text", "old", "new"))
    found = text.count(old)  # an empty string is found before each character and at the end
    times = found if count is None or count < 0 else min(count, found)
    return len(text) + times * (len(new) - len(old))


def _environment(spent: _Spent) -> tuple[Any, Any]:
    """Return an environment that compiles templates like ``transformers``, and a function that adds resource limits to
    a parsed template. Tests compare its functions and options with ``transformers``."""
    library("jinja2", "data.format=chat")
    import jinja2
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Generation(jinja2.ext.Extension):
        """Accepts ``{% generation %}``, with which a few templates mark replies. It has no effect, since replies are
        found without it."""

        tags = {"generation"}  # noqa: RUF012 -- like its base class

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Sandbox that limits the length of results and the number of calls."""

        intercepted_binops = frozenset(["*", "**", "+", "%"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(operand) if isinstance(operand, str | list | tuple) else operand for operand in (left, right)]
            if operator == "**" and right > 64:
                raise _Excess("computes ** with too large a result")
            if operator == "%" and isinstance(left, str):
                _check_growth("format", [left])
            if operator == "+" and sizes != [left, right] and all(isinstance(size, int) for size in sizes):
                _check_length(sizes[0] + sizes[1], "+")
            if operator == "*" and sizes != [left, right] and all(isinstance(size, int) for size in sizes):
                _check_length(sizes[0] * sizes[1], "*")
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
            spent.step(_STEPS_OF_A_CALL)
            method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
            owner = getattr(method, "__self__", None)
            if isinstance(owner, str) and method.__name__ in _GROWING:
                _check_growth(method.__name__, [owner, *arguments], named)
            result = super().call(context, function, *arguments, **named)
            return text_of(result) if isinstance(result, str) else result

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # unlike Jinja's own filter, without HTML escapes
        return json.dumps(_check_parts(value), ensure_ascii=ensure_ascii, **options)

    @jinja2.pass_context  # otherwise the compiler would evaluate it as a constant
    def step(_: Any, value: Any) -> Any:
        spent.step()
        return value

    def text_of(value: Any) -> Any:
        _check_length(len(value), "a macro or set block")
        return value

    def concatenated(values: Sequence[Any]) -> str:
        texts = [str(_check_parts(value)) for value in values]
        _check_length(sum(map(len, texts)), "~")
        return "".join(texts)

    def bounded(filter_name: str, function: Any) -> Any:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # some filters take the context as their first argument

        @wraps(function)
        def checked(*arguments: Any, **named: Any) -> Any:
            given = [_check_parts(argument) for argument in arguments[first:]]
            if filter_name in _GROWING and not any(hasattr(argument, "__next__") for argument in given):
                _check_growth(filter_name, given, named)
            return function(*arguments, **named)

        return checked

    class Bounded(NodeTransformer):
        """Adds a step count to the bodies of loops and macros, and length checks to set blocks and ``~``."""

        def _count(self, node: Any) -> Any:
            counted = nodes.Filter(nodes.Const(None), "serried step", [], [], None, None, lineno=node.lineno)
            self.generic_visit(node)
            node.body = [nodes.ExprStmt(counted, lineno=node.lineno), *node.body]
            return node

        visit_For = visit_Macro = visit_CallBlock = _count

        def visit_AssignBlock(self, node: Any) -> Any:
            self.generic_visit(node)
            node.filter = nodes.Filter(node.filter, "serried text", [], [], None, None, lineno=node.lineno)
            return node

        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            parts = nodes.List(node.nodes, lineno=node.lineno)
            return nodes.Filter(parts, "serried join", [], [], None, None, lineno=node.lineno)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols], finalize=_check_parts
    )
    for filter_name in (
        "string",
        "join",
        "replace",
        "center",
        "indent",
        "format",
        "upper",
        "lower",
        "trim",
        "pprint",
        "slice",
        "batch",
    ):
        environment.filters[filter_name] = bounded(filter_name, environment.filters[filter_name])
    environment.filters["tojson"] = to_json
    # Templates cannot use these names, since they contain a space.
    environment.filters |= {"serried step": step, "serried join": concatenated, "serried text": text_of}
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _NOW.strftime
    return environment, Bounded().visit


def _compile(text: str, name: str, spent: _Spent) -> Any:
    """Compile a template. Raises ``UserError`` if it is invalid."""
    environment, bounded = _environment(spent)
    import jinja2

    or_remove = ", or remove data.chat_template" if name.startswith("data.chat_template") else ""
    cure = f"use another template: data.chat_template=FILE{or_remove}"
    try:
        tree = bounded(environment.parse(text))
        tree.set_environment(environment)
        return environment.from_string(tree)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        at = f" in line {line}" if line else ""
        raise UserError(f"{name} is not a valid Jinja template{at}: {error}; {cure}") from error
    except (RecursionError, MemoryError, SyntaxError) as error:  # raised by Python for the generated code
        raise UserError(
            f"{name} cannot be compiled as a Jinja template: it is nested or chained too deeply "
            f"({type(error).__name__}); {cure}"
        ) from error
