"""Comparison with the tokenizer that transformers loads, whose class may deviate from ``tokenizer.json``."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serried.recipes.models.hugging_face.any_causal_lm import import_transformers

_TEXTS = (
    "a", " a", "The quick brown fox, isn't it?", "  two  blanks\n\n and\n  lines\t\t", "1234567 + 89 = 3.14",
    "naïve café ﬁ Ａ１ ẞ", "漢字 🜁 привет", "STOP it's WE'LL", "def f(x):\n    return x\r\n",
)  # fmt: skip
"""Texts that tokenizers treat differently: spaces, case, digits, accents and Unicode variants of letters."""

_SHOWN = 8


class Sides(NamedTuple):
    """Padding and truncation settings of a transformers tokenizer."""

    padding: str = "right"
    truncation: str = "right"
    pad_id: int | None = None
    end_id: int | None = None


def opened(name: str) -> Any:
    """Load a tokenizer with transformers from a folder, a file in it or a cached name, without running its code. None
    if transformers cannot load it, or is not installed."""
    path = Path(os.path.expanduser(name))  # noqa: PTH111 -- Path.expanduser fails for an unknown user
    name = str(path.parent) if path.is_file() else str(path) if path.is_dir() else name
    try:
        transformers = import_transformers()
    except ImportError:
        return None
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(50)
    try:
        for kind in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
            try:
                found = kind.from_pretrained(name, local_files_only=True, trust_remote_code=False)
            except Exception:  # the tokenizer classes may raise any exception
                continue
            if found.is_fast:
                return found
        return None
    finally:
        transformers.utils.logging.set_verbosity(level)


def sides(tokenizer: Any) -> Sides:
    """Return the settings of a tokenizer that ``opened`` returned."""
    if tokenizer is None:
        return Sides()
    return Sides(
        tokenizer.padding_side, tokenizer.truncation_side, tokenizer.pad_token_id, tokenizer.eos_token_id
    )  # fmt: skip


def difference(
    key: str, name: str, theirs: Any, encode: Callable[[str], Sequence[int]], marks: Mapping[str, int], folder: str = ""
) -> str | None:
    """Return a message about ids that differ between transformers and ``encode``, with a remedy. None if no ids differ.

    Args:
        encode: function from text to ids, including special tokens if this library adds them.
        marks: ids of added tokens, by text.
        folder: appended to ``key=FOLDER`` in the message, to describe how FOLDER must be created.
    """
    if theirs is None:
        return None
    kind = type(theirs).__name__
    found = next(
        (
            f"{text!r} is {_shown(there)} in transformers and {_shown(here)} here"
            for text in _TEXTS
            if (there := _ids(theirs, text)) != (here := list(encode(text)))
        ),
        None,
    )
    if found is None:
        others = [text for text, number in theirs.get_added_vocab().items() if marks.get(text, number) != number]
        others += [text for text in theirs.get_added_vocab() if text not in marks]
        if not others:
            return None
        found = (
            f"transformers has the tokens {', '.join(map(repr, others[:_SHOWN]))}, which tokenizer.json does not have"
        )
    command = f'import transformers; transformers.AutoTokenizer.from_pretrained("{name}").save_pretrained("FOLDER")'
    return (
        f"transformers ({kind}) tokenizes differently than tokenizer.json of {key}={name}: {found}; this run uses "
        f"tokenizer.json; to use the ids of transformers: python -c {shlex.quote(command)} and {key}=FOLDER{folder}"
    )


def _ids(tokenizer: Any, text: str) -> list[int]:
    try:
        return list(tokenizer(text, split_special_tokens=True)["input_ids"])
    except Exception:  # the tokenizer classes may raise any exception
        return []


def _shown(ids: Sequence[int]) -> str:
    return f"{list(ids[:_SHOWN])}".replace("]", ", ...]" if len(ids) > _SHOWN else "]")
