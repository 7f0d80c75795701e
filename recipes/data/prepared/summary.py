"""Human-readable summary of prepared data, and tokens as text."""

from itertools import groupby, pairwise

import numpy as np

from serried.configs.formats import printable
from serried.recipes.data.prepared.prepare import Prepared, count_of
from serried.recipes.data.readers.source import SPLITS
from serried.recipes.data.tokenizers.tokenizer import Tokenizer, token_dtype

_BAR_CHARACTERS = 40
_SAMPLE_CHARACTERS = 300
_SHOWN_LINES = 24
_SHOWN_CHARACTERS = 110


def summary_of(prepared: Prepared, tokenizer_name: str) -> str:
    """Return about twenty lines that describe ``prepared``: documents, tokens, document lengths, tokenizer and a
    sample."""
    splits = prepared.splits
    lines = [
        ("folder", str(prepared.folder)),
        ("documents", ", ".join(f"{split} {splits[split].documents:,}" for split in SPLITS) + _left_out(prepared)),
        ("tokens", ", ".join(f"{split} {splits[split].tokens:,}" for split in SPLITS) + _bytes_per_token(prepared)),
        ("tokenizer", _tokenizer(prepared, tokenizer_name)),
    ]
    text = [f"{name:<10} {value}" for name, value in lines]
    text += ["tokens per document (train):", *_histogram(splits["train"].lengths)]
    sample = printable(prepared.sample()[:_SAMPLE_CHARACTERS])
    text += ["the first training document begins:", *(f"  | {line}" for line in sample.splitlines())]
    return "\n".join(text)


def _left_out(prepared: Prepared) -> str:
    reasons = [f"{prepared.empty:,} empty"] if prepared.empty else []
    reasons += [count_of(prepared.zero_weight, "row") + " of weight 0"] if prepared.zero_weight else []
    reasons += [f"{prepared.held_out:,} training documents also used for validation"] if prepared.held_out else []
    reasons += [f"{prepared.bad:,} bad rows (data.bad_rows=skip)"] if prepared.bad else []
    return (f"; left out: {', '.join(reasons)}" if reasons else "") + prepared.describe_split()


def _bytes_per_token(prepared: Prepared) -> str:
    tokens = sum(split.tokens for split in prepared.splits.values())
    text_bytes = sum(split.text_bytes for split in prepared.splits.values())
    size = token_dtype(prepared.tokenizer.vocab_size).itemsize
    per_token = f"{text_bytes / tokens:.2f} bytes of text each, " if tokens and text_bytes else ""
    return f"; {per_token}{size} byte{'s' if size > 1 else ''} on disk"


def _tokenizer(prepared: Prepared, name: str) -> str:
    tokenizer = prepared.tokenizer
    start = f"begins with {', '.join(map(str, tokenizer.start_ids))} and " if tokenizer.start_ids else ""
    end = getattr(tokenizer, "end", None)
    end = f" ({end})" if end else ""
    return f"{name}, {tokenizer.vocab_size:,} ids; a document {start}ends with {tokenizer.end_id}{end}"


def _histogram(lengths: list[int]) -> list[str]:
    """Return a histogram of document lengths, with one bar per power of two."""
    used = [i for i, count in enumerate(lengths) if count]
    if not used:
        return ["  none"]
    rows = [(f"{2 ** (i - 1) if i else 0:,} to {max(2**i - 1, 0):,}", lengths[i]) for i in range(used[0], used[-1] + 1)]
    width, most = max(len(label) for label, _ in rows), max(lengths)
    return [
        f"  {label:>{width}}  {'#' * -(-count * _BAR_CHARACTERS // most):<{_BAR_CHARACTERS}}  {count:,}"
        for label, count in rows
    ]


def shown_documents(prepared: Prepared, count: int) -> list[str]:
    """Return the text of the first ``count`` training documents as lines. Text that is trained on begins with ``>``,
    other text with ``|``."""
    if not count:
        return []
    stream = prepared.stream("train")
    starts = stream.all_document_starts()[: count + 1].tolist()
    bounds = [*starts, stream.tokens] if len(starts) <= count else starts
    lines = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        tokens = stream.read(start, stop).astype(np.int64)
        is_learned = np.arange(stop - start) > 0  # the first token is never a target
        if stream.is_supervised:
            is_learned &= stream.supervised(start, stop) & 1 == 1
        place = prepared.place("train", number)
        where = "" if place is None else f" ({place})"
        lines.append(f"sample {number + 1}{where}: {stop - start:,} tokens, {int(is_learned.sum()):,} trained on (>)")
        lines += marked_lines(prepared.tokenizer, tokens, is_learned)
    return lines


def marked_lines(tokenizer: Tokenizer, tokens: np.ndarray, is_learned: np.ndarray) -> list[str]:
    """Return the text of ``tokens`` [tokens] as lines. Text that is trained on (``is_learned`` [tokens]) begins with
    ``>``, other text with ``|``.

    Long lines and long texts are shortened. Equal consecutive lines, such as padding, are merged into one.
    """
    lines: list[str] = []
    begins = np.flatnonzero(np.diff(is_learned) | (tokens[:-1] == tokenizer.end_id)) + 1
    for run in np.split(np.arange(len(tokens)), begins):
        mark = "  > " if is_learned[run[0]] else "  | "
        text = printable(tokenizer.decode_marked(tokens[run].tolist()))
        lines += [mark + _shortened(line) for line in text.split("\n") if line]
    counted = [(line, len(list(same))) for line, same in groupby(lines)]
    lines = [line if count == 1 else f"{line}  ({count} times)" for line, count in counted]
    more = len(lines) - _SHOWN_LINES
    return lines if more <= 1 else [*lines[:_SHOWN_LINES], f"  ... and {more} more lines"]


def _shortened(line: str) -> str:
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."
