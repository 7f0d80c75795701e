"""The tokenizer files beside a saved model: transformers gives the same ids for the same text."""

from pathlib import Path

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from serried.recipes.data.tokenizers.tokenizer import BytesTokenizer, CharsTokenizer, Tokenizer, hugging_face_files

CHARACTERS = "\n !aé√漢🜁"


def opened(tokenizer: Tokenizer, folder: Path) -> transformers.PreTrainedTokenizerBase:
    for name, content in hugging_face_files(tokenizer).items():
        (folder / name).write_text(content)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> transformers.PreTrainedTokenizerBase:
    return opened(BytesTokenizer(), tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def of_chars(tmp_path_factory: pytest.TempPathFactory) -> transformers.PreTrainedTokenizerBase:
    return opened(CharsTokenizer("".join(sorted(CHARACTERS))), tmp_path_factory.mktemp("chars"))


@given(text=st.text())
def test_bytes(text: str, of_bytes: transformers.PreTrainedTokenizerBase) -> None:
    ids = of_bytes(text)["input_ids"] if text else []
    if "<|end|>" not in text:
        np.testing.assert_array_equal(ids, BytesTokenizer().encode(text))
    assert of_bytes.eos_token_id == BytesTokenizer.end_id


@given(text=st.text(alphabet=CHARACTERS))
def test_chars(text: str, of_chars: transformers.PreTrainedTokenizerBase) -> None:
    ours = CharsTokenizer("".join(sorted(CHARACTERS)))
    ids = of_chars(text)["input_ids"] if text else []
    np.testing.assert_array_equal(ids, ours.encode(text))
    assert of_chars.decode(ids) == ours.decode(ids) == text
    assert of_chars.eos_token_id == ours.end_id


def test_bytes_come_back_as_text(of_bytes: transformers.PreTrainedTokenizerBase) -> None:
    for text in ("hello world", " two  spaces", "naïve √2 漢字 🜁\n\ttab"):
        assert of_bytes.decode(of_bytes(text)["input_ids"]) == text
