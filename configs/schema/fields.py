"""Types of config keys, and the base class of sections."""

import ast
import functools
import hashlib
import inspect
import itertools
import math
import os
import re
import tempfile
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
from serried.configs.bucket_urls import check_bucket_url, is_bucket_url
from serried.configs.errors import UserError

NAME_PATTERN = r"[A-Za-z][A-Za-z0-9_-]*"
"""Names of sources and validation sets."""
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def refuse_switch(value: Any) -> Any:
    """Convert booleans to strings, since pydantic would accept them as 1 and 0."""
    return str(value).lower() if isinstance(value, bool) else value


def parse_count(value: Any) -> Any:
    """Convert ``1e3``, ``"10k"``, ``"2M"`` or ``"1.5B"`` to an integer. Other values are returned for pydantic to
    validate."""
    if isinstance(value, bool):
        return refuse_switch(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        match = re.fullmatch(r"([+-]?[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([kKmMbBgGtT]?)", value.strip())
        if match:
            if match[1].lstrip("+-").replace("_", "").isdigit():  # exact, unlike a float
                return int(match[1]) * _SUFFIXES[match[2].lower()]
            number = float(match[1].replace("_", "")) * _SUFFIXES[match[2].lower()]
            if number.is_integer():
                return int(number)
    return value


Count = Annotated[int, BeforeValidator(parse_count)]
"""Integer; may be written ``1e3``, ``10k``, ``2M`` or ``1.5B``."""
PositiveCount = Annotated[Count, Field(ge=1, le=10**10)]
"""Number of steps, minutes, documents or machines."""
CountOrZero = Annotated[Count, Field(ge=0, le=10**10)]
Size = Annotated[Count, Field(ge=1, le=10**7)]
"""Size of a tensor dimension. Larger values overflow inside torch."""
DerivedSize = Annotated[
    Size, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 10**7}, {"type": "null"}]})
]
"""Size that the section derives from other keys when it is null."""
Degree = Annotated[Count, Field(ge=-1, le=10**6)]
AUTO = 0
"""Value of ``trainer.micro_batch=auto`` until a number is chosen. It is serialized as ``auto``."""


def _count_or_auto(value: Any, count: ValidatorFunctionWrapHandler) -> Any:
    return AUTO if value == "auto" else count(value)


CountOrAuto = Annotated[
    Size,
    WrapValidator(_count_or_auto),
    PlainSerializer(lambda count: count or "auto"),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 10**7}, {"const": "auto"}]}),
]
NOT_IN_32_BITS = "not_in_32_bits"
"""Error type of a number that would become 0 or infinite in 32 bits."""


def _refuse_unheld(value: Any) -> Any:
    """Refuse a number that a 32-bit float cannot represent: in a computation it would become 0 or infinite."""
    if isinstance(value, float) and math.isfinite(value) and value and not 1.2e-38 < abs(value) < 3.4e38:
        raise PydanticCustomError(NOT_IN_32_BITS, "not in 32 bits")
    return refuse_switch(value)


Number = Annotated[float, BeforeValidator(_refuse_unheld)]
"""Real number; booleans are refused."""
Seconds = Annotated[Number, Field(ge=0.1, le=10**7)]


def _refuse_address(value: Any, *, takes_buckets: bool = False) -> Any:
    if isinstance(value, str) and is_address(value):
        # ``explain`` writes the message
        raise PydanticCustomError("address", "is an address", {"takes_buckets": takes_buckets})
    return value


def _scratch_of_bucket(value: Any) -> Any:
    """Replace the URL of a run in a bucket by this node's scratch folder for it."""
    if not is_bucket_url(value):
        return _refuse_address(value, takes_buckets=True)
    try:
        return scratch_folder(check_bucket_url(value, "run.dir"))
    except UserError as error:
        raise PydanticCustomError("bucket", "{text}", {"text": str(error)}) from None


SCRATCH = "SERRIED_SCRATCH"
"""Variable with the folder for scratch folders."""


def scratch_folder(url: str) -> Path:
    """Return the folder of this node for the run at ``url`` in a bucket: its name is a hash of the URL, inside
    ``$SERRIED_SCRATCH`` or this user's folder for temporary files."""
    given = os.environ.get(SCRATCH)
    root = Path(given) if given else Path(tempfile.gettempdir()) / f"serried-{os.getuid()}"
    return root.absolute() / hashlib.sha256(url.encode()).hexdigest()[:16]


LocalPath = Annotated[Path, BeforeValidator(_refuse_address)]
"""Path of a file or folder."""
RunPath = Annotated[Path, BeforeValidator(_scratch_of_bucket)]
"""Run folder. For the URL of a run in a bucket, it is this node's scratch folder."""
PathText = Annotated[str, BeforeValidator(_refuse_address)]
"""Path of a file or folder, a glob, or a name on the Hub."""


def _refuse_other_address(value: Any) -> Any:
    if not is_bucket_url(value):
        return _refuse_address(value, takes_buckets=True)
    try:
        return check_bucket_url(value, "")
    except UserError:
        raise PydanticCustomError("bucket_url", "is not the URL of a bucket") from None  # as above


PathOrUrl = Annotated[str, BeforeValidator(_refuse_other_address)]
"""Path as ``PathText``, or the URL of a file or folder in a bucket, such as ``s3://BUCKET/PATH``."""


class Section(BaseModel):
    """Base class of all sections of the configuration. Sections are frozen, and undeclared keys are errors.

    Example::

        class Config(serried.Section):
            width: int = 64  # the key task.width
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    free: ClassVar[Sequence[str]] = ()
    """Fields that do not affect the results of a run, such as its location, speed or logging. They may differ on
    resume."""
    by_content: ClassVar[Sequence[str]] = ()
    """Free fields that name something, such as data, whose content is compared on resume."""

    @classmethod
    @functools.cache
    def purposes(cls) -> dict[str, str]:
        """Return the docstring of each field.

        Docstrings are read from the source on demand, for help texts and tables. pydantic's
        ``use_attribute_docstrings`` would parse every section at each start.
        """
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
    """Return the string below each field in the class body; empty if there is no source, as for classes created at run
    time."""
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
