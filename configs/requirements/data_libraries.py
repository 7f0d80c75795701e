"""Optional libraries that the data of a run needs. Imports none of them."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

from serried.configs.errors import UserError
from serried.configs.schema.data import DataSection, SourceSection


def check_data_libraries(data: DataSection) -> None:
    """Raise ``UserError`` if a library that the data needs is not installed."""
    for name, purpose in _needed(data):
        if find_spec(name) is None:
            raise not_installed(name, purpose)


def not_installed(name: str, purpose: str, extra: str = "data") -> UserError:
    """The error for a missing library of an ``extra`` that ``purpose`` needs."""
    return UserError(
        f"{purpose} needs the library {name}, which is not installed here; use: pip install -e '.[{extra}]'"
    )


def _needed(data: DataSection) -> Iterator[tuple[str, str]]:
    """Yield names of libraries, and the setting that needs each."""
    sources: dict[str, SourceSection] = {"": data}
    sources |= {f"data.sources.{name}: ": each for name, each in data.mixed.items()}
    sources |= {f"data.validation.{name}: ": each for name, each in data.validation.items()}
    for key, source in sources.items():
        for library in source.libraries:
            yield library, f"{key}data={source.name}"
    tokenizer = data.tokenizer
    if tokenizer == "train":
        yield "tokenizers", "data.tokenizer=train"
    elif tokenizer not in ("bytes", "chars") and not _is_here(tokenizer):
        yield "huggingface_hub", f"data.tokenizer={tokenizer}"
        yield "tokenizers", f"data.tokenizer={tokenizer}"


def _is_here(name: str) -> bool:
    # Methods of Path raise if there is no such user, or a folder may not be read.
    return os.path.exists(os.path.expanduser(name))  # noqa: PTH110, PTH111
