"""Vocabulary of a model: rows for its tokenizer and for added tokens, and checks that model and tokenizer fit."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.plain_data import parse_json
from serried.configs.schema.data import DataSection
from serried.configs.schema.models import ModelSection
from serried.configs.schema.sections import AdapterSection
from serried.parallel.checkpoint_mapping import Fragment
from serried.recipes.data.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer, find_tokenizer, local_tokenizer
from serried.recipes.data.tokenizers.tokenizer import Tokenizer, changed_token, hugging_face_files, ids_of_tokens
from serried.recipes.data.tokenizers.transformers_tokenizer import difference, opened
from serried.records.safetensors_files import TensorFolder

_SHOWN = 5


def embedding_rows(model: ModelSection, data: DataSection, ids: int | None) -> int:
    """Return the number of rows of the embedding: the configured number, or ``ids`` rounded up to a multiple of
    ``model.vocab_multiple`` if it is not configured, or too small for added tokens.

    Args:
        ids: Size of the tokenizer; may be None if ``model.vocab_size`` is set.

    Raises:
        UserError: The tokenizer has more ids than the model has rows.
    """
    rows = model.vocab_size
    if rows is None or (data.added_tokens and model.path and ids is not None and ids > rows):
        assert ids is not None
        return -(-ids // model.vocab_multiple) * model.vocab_multiple
    if ids is not None and ids > rows and model.path:
        or_add = "" if data.tokenizer == "bytes" else ", or add rows for them: 'data.add_tokens=[TOKEN,...]'"
        raise UserError(
            f"data.tokenizer={data.tokenizer} has {ids} ids, but the embedding of model.path={model.path} has only "
            f"{rows} rows; use a tokenizer without the last {ids - rows} ids{or_add}"
        )
    if ids is not None and ids > rows:
        raise UserError(
            f"model.vocab_size={rows} but data.tokenizer={data.tokenizer} has {ids} ids; "
            f"use {_ways_to_fit(model, data, ids)}"
        )
    return rows


def exported_with_fewer_rows(
    exported: Callable[[str, Sequence[int]], tuple[Fragment, ...]], tensors: TensorFolder, rows: int
) -> Callable[[str, Sequence[int]], tuple[Fragment, ...]]:
    """Return ``exported`` for a folder in which the embedding and the head may have fewer rows than the vocabulary.

    Args:
        exported: Maps parameters to their location in a folder of the same vocabulary.
        tensors: Tensors of the folder.
        rows: Number of rows of the vocabulary.
    """

    def fewer(part: Fragment) -> Fragment:
        spec = tensors.named_like([part.name]).specs.get(part.name)
        lacks_rows = spec is not None and part.shape[:1] == (rows,) and spec.shape[1:] == part.shape[1:]
        if spec is None or not lacks_rows or spec.shape[0] >= rows:
            return part
        return Fragment.whole(part.name, spec.shape)

    return lambda name, shape: tuple(fewer(part) if part.is_whole else part for part in exported(name, shape))


def notes_of_added_tokens(
    data: DataSection, tokenizer: Tokenizer, adapter: AdapterSection, embeddings: Sequence[str]
) -> list[str]:
    """Return notes about tokens to add that exist already, and about new tokens whose rows are not trained.

    Args:
        data: The data section, which names the new tokens and the tokenizer without them.
        tokenizer: The tokenizer with the new tokens.
        adapter: The adapters.
        embeddings: Names of the modules with a row for each token.
    """
    if not data.added_tokens:
        return []
    known = ids_of_tokens(parse_json(hugging_face_files(find_tokenizer(data.tokenizer))["tokenizer.json"]))
    found = {token: known[token] for token in data.added_tokens if token in known}
    notes = []
    if found:
        listed = ", ".join(f"{token!r} ({number})" for token, number in [*found.items()][:_SHOWN])
        more = ", ..." if len(found) > _SHOWN else ""
        notes.append(f"data.add_tokens: the vocabulary has these tokens already, with their ids: {listed}{more}")
    new = [token for token in data.added_tokens if token not in known]
    is_trained = bool(adapter.modules_to_save or adapter.trainable_token_indices)
    if adapter.method != "none" and not is_trained and new:
        names = ",".join(name.rpartition(".")[2] for name in embeddings)
        now = ids_of_tokens(parse_json(hugging_face_files(tokenizer)["tokenizer.json"]))
        ids = ",".join(str(now[token]) for token in new)
        kept = "as they are in the merged model" if adapter.merge else "at their initial values"
        notes.append(
            f"data.add_tokens with adapter.method={adapter.method}: the rows of new tokens are not trained and stay "
            f"{kept}; to train them: 'adapter.trainable_token_indices=[{ids}]'; or all rows: "
            f"'adapter.modules_to_save=[{names}]'"
        )
    return notes


def _ways_to_fit(model: ModelSection, data: DataSection, ids: int) -> str:
    """Return overrides with which a tokenizer with ``ids`` ids fits the model. Pretrained weights are not resized."""
    path = model.path
    if path is None:
        return f"model.vocab_size={ids}, or model.vocab_size=null for the tokenizer's own size"
    if data.tokenizer != path:
        return f"data.tokenizer={path}, the model's own"
    return f"another model: the tokenizer in {path} does not fit its weights (resize_token_embeddings({ids}) would)"


def note_of_other_ids(data: DataSection, tokenizer: Tokenizer) -> list[str]:
    """Return a list with a note if transformers' tokenizer encodes text to other ids, else an empty list."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.is_plain or data.tokenizer == "train":
        return []
    name = data.tokenizer

    def encode(text: str) -> list[int]:
        return [*tokenizer.start_ids, *tokenizer.encode(text).tolist()]

    found = difference("data.tokenizer", name, opened(local_tokenizer(name)), encode, tokenizer.added_tokens)
    return [] if found is None else [found]


def check_tokenizer_of(folder: Path, data: DataSection, tokenizer: Tokenizer) -> None:
    """Raise ``UserError`` if ``tokenizer``, the tokenizer of ``data``, is not the tokenizer of the model in
    ``folder``."""
    path = folder / "tokenizer.json"
    try:
        is_same = path.read_text("utf-8") == hugging_face_files(tokenizer)["tokenizer.json"]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; the tokens of the model are read from it") from None
    if not is_same:
        raise UserError(
            f"data.tokenizer={data.tokenizer} is no longer the tokenizer of {folder}: it was trained on other text, or "
            "its files have changed; to use text with the tokenizer of the model: data=text data.path=FILES"
        )


def check_unchanged(checkpoint: Path, data: DataSection, tokenizer: Tokenizer, another_run: str) -> None:
    """Raise ``UserError`` if ``checkpoint`` was trained with another tokenizer.

    ``another_run``: overrides that start another run, for the message.
    """
    now = hugging_face_files(tokenizer).get("tokenizer.json")
    if now is None or (what := changed_token(checkpoint / "tokenizer.json", now)) is None:
        return
    keys, without = "data.tokenizer,data.path", ""
    if data.vocab_size != type(data).model_fields["vocab_size"].default:
        keys, without = f"{keys},data.vocab_size", " without data.vocab_size"  # only for a tokenizer trained by the run
    use = shlex.join([f"data.tokenizer={checkpoint}", f"checkpoint.allow_changes=[{keys}]"])
    raise UserError(
        f"{checkpoint} was trained with a different tokenizer than the current one of data.tokenizer={data.tokenizer}: "
        f"{what}; use the tokenizer of the checkpoint, {use}{without}, or {another_run} to keep both"
    )
