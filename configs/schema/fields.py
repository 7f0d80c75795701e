"""Types of keys, and the base class of sections."""

import ast
import functools
import inspect
import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from serried.configs.addresses import is_address

NAME_PATTERN = r"[A-Za-z][A-Za-z0-9_-]*"
"""Names of sources and validation sets."""
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def refuse_switch(value: Any) -> Any:
    """Turn true and false into words, which are not numbers: pydantic would read them as 1 and 0."""
    return str(value).lower() if isinstance(value, bool) else value


def parse_count(value: Any) -> Any:
    """Turn ``1e3``, ``"10k"``, ``"2M"`` or ``"1.5B"`` into an integer; anything else is left to pydantic to judge."""
    if isinstance(value, bool):
        return refuse_switch(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        match = re.fullmatch(r"([+-]?[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([kKmMbBgGtT]?)", value.strip())
        if match:
            if match[1].lstrip("+-").replace("_", "").isdigit():  # exact where a float would round
                return int(match[1]) * _SUFFIXES[match[2].lower()]
            number = float(match[1].replace("_", "")) * _SUFFIXES[match[2].lower()]
            if number.is_integer():
                return int(number)
    return value


Count = Annotated[int, BeforeValidator(parse_count)]
"""A whole number; ``1e3``, ``10k``, ``2M`` and ``1.5B`` are read as powers of ten."""
PositiveCount = Annotated[Count, Field(ge=1, le=10**10)]
"""A number of steps, minutes, documents or machines."""
CountOrZero = Annotated[Count, Field(ge=0, le=10**10)]
Size = Annotated[Count, Field(ge=1, le=10**7)]
"""A dimension of a tensor. Larger ones overflow inside torch."""
DerivedSize = Annotated[
    Size, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 10**7}, {"type": "null"}]})
]
"""A size that the section fills in when it is null."""
Degree = Annotated[Count, Field(ge=-1, le=10**6)]
AUTO = 0
"""``trainer.micro_batch=auto`` before it is chosen; configurations are written with the word."""


def _count_or_auto(value: Any, count: ValidatorFunctionWrapHandler) -> Any:
    return AUTO if value == "auto" else count(value)


CountOrAuto = Annotated[
    Size,
    WrapValidator(_count_or_auto),
    PlainSerializer(lambda count: count or "auto"),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 10**7}, {"const": "auto"}]}),
]
NOT_IN_32_BITS = "not_in_32_bits"
"""Type of the error of a number that would become 0 or infinite."""


def _refuse_unheld(value: Any) -> Any:
    """Refuse a number that no 32-bit float holds: in a computation it would become 0 or infinite."""
    if isinstance(value, float) and math.isfinite(value) and value and not 1.2e-38 < abs(value) < 3.4e38:
        raise PydanticCustomError(NOT_IN_32_BITS, "not in 32 bits")
    return refuse_switch(value)


Number = Annotated[float, BeforeValidator(_refuse_unheld)]
"""A real number; true and false are not."""
Seconds = Annotated[Number, Field(ge=0.1, le=10**7)]


def _refuse_address(value: Any) -> Any:
    if isinstance(value, str) and is_address(value):
        raise PydanticCustomError("address", "is an address")  # ``explain`` has the words
    return value


LocalPath = Annotated[Path, BeforeValidator(_refuse_address)]
"""A file or folder."""
PathText = Annotated[str, BeforeValidator(_refuse_address)]
"""A file, folder, glob or name on the Hub."""


class Section(BaseModel):
    """Base class of all sections of the configuration: frozen, and a key that is not declared is an error.

    Example::

        class Config(serried.Section):
            width: int = 64  # the key task.width
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    free: ClassVar[Sequence[str]] = ()
    """Fields that change where, how fast or how visibly a run goes, not its numbers: they may differ on resume."""
    by_content: ClassVar[Sequence[str]] = ()
    """Free fields that name something, such as data, of which the content is compared on resume."""

    @classmethod
    @functools.cache
    def purposes(cls) -> dict[str, str]:
        """Return the docstring of each field, read from the source: pydantic's ``use_attribute_docstrings`` would parse
        every section at every start, and only help texts and tables show them."""
        own = [_docstrings(base) for base in reversed(cls.__mro__) if issubclass(base, Section) and base is not Section]
        return {name: text for docstrings in own for name, text in docstrings.items()}

    @classmethod
    def has_free(cls, field: str, *, by_content: bool = False) -> bool:
        """Return whether ``field`` is among the ``free`` (or ``by_content``) fields of the section or of a base."""
        kinds = ("by_content",) if by_content else ("free", "by_content")
        return any(field in vars(base).get(kind, ()) for base in cls.__mro__ for kind in kinds)

    def _mistakes(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between values, with an override that resolves it."""
        yield from ()

    @model_validator(mode="after")
    def _values_agree(self) -> Self:
        for mistake in self._mistakes():
            raise ValueError(mistake)
        return self


def _docstrings(section: type) -> dict[str, str]:
    """Return the string below each field of the class body; empty without source, as of a class that a run composes."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(statements)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
