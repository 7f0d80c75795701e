"""Long documents are tokenized in pieces, and have the tokens of the whole."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from serried.configs.errors import UserError
from serried.recipes.data.prepared import prepare
from serried.recipes.data.readers import source_files
from serried.recipes.data.readers.source import Row
from serried.recipes.data.tokenizers import encode_rows as encode
from serried.recipes.data.tokenizers.encode_rows import Encoded, Joiner, Seam, TextEncoder
from serried.recipes.data.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer
from tests.support.texts import documents, section, write

SAMPLE = ["the cat sat on the mat", "  two  blanks\tand 12345 digits", "naïve café 漢字 aaaa", "isn't it? ..,,"] * 20
LLAMA3 = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(*, prefix: bool, trim: bool) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(SAMPLE, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    return made


def llama2() -> Tokenizer:
    """No pre-tokenizer: the whole text is one word."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.train_from_iterator(SAMPLE, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"]))
    return made


def llama3() -> Tokenizer:
    made = byte_level(prefix=False, trim=False)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return made


def unigram(scheme: str, split: bool) -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.train_from_iterator(
        SAMPLE, trainers.UnigramTrainer(vocab_size=80, special_tokens=["<unk>"], unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return made


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(SAMPLE, trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"]))
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: byte_level(prefix=False, trim=False),
    "with a prefix space": lambda: byte_level(prefix=True, trim=True),
    "llama 2": llama2,
    "llama 3": llama3,
    "unigram": lambda: unigram("always", True),
    "unigram of the whole text": lambda: unigram("first", False),
    "word pieces": word_piece,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> HuggingFaceTokenizer:
    made = KINDS[request.param]()
    made.add_special_tokens(["</s>"])
    made.add_tokens(["<two words>"])
    return HuggingFaceTokenizer({"tokenizer.json": made.to_str(), "tokenizer_config.json": '{"eos_token": "</s>"}'})


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for module in (source_files, encode, prepare.write_shards.__globals__):
            if isinstance(module, dict):
                patch.setitem(module, "PIECE_BYTES", 2000)
            else:
                patch.setattr(module, "PIECE_BYTES", 2000)
        patch.setattr(source_files, "AROUND_BYTES", 400)
        patch.setattr(encode, "_COMPARED_CHARACTERS", 40)
        patch.setattr(prepare, "_FEWEST_TOKENS", 100)
        yield


WORDS = (
    "the", "cat", " ", "  ", "\n", "\n\n", "\r\n", "\t", "12345", "naïve", "漢字", "🜁", "</s>", "<two words>",
    "isn't", "e\u0301",
)  # fmt: skip


def random_text(seed: int) -> str:
    random, parts = np.random.default_rng(seed), []
    for _ in range(random.integers(2, 7)):
        if random.random() < 0.3:
            parts.append(str(random.choice(["a", " ", "\n", "7", "漢"])) * int(random.integers(500, 5000)))
        parts.append("".join(random.choice(WORDS, random.integers(50, 900))))
    return "".join(parts)


def test_pieces_have_the_tokens_of_the_whole(tokenizer: HuggingFaceTokenizer) -> None:
    encoder = TextEncoder(tokenizer, "t")
    for seed in range(1, 9):
        text = random_text(seed)
        (document,) = encoder([Row(0, text)], "u")
        assert document.tokens.tolist() == [*tokenizer.encode(text).tolist(), tokenizer.end_id], seed


def test_files_and_rows_have_the_tokens_of_the_whole(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    text = "a line of some words that repeats\n" * 300 + "a" * 9001 + "\nthe end 漢字 " * 500
    named = write(tmp_path / "tokenizer", dict(tokenizer.spec()["files"]))
    write(tmp_path, {"files/a.txt": text, "rows/a.jsonl": json.dumps({"text": text}) + "\n"})
    for source in ("files", "rows"):
        given = section(tmp_path / source, tmp_path / "cache", tokenizer=str(named), validation_fraction=0)
        if source == "files" and '"type":"Unigram"' in tokenizer.spec()["files"]["tokenizer.json"]:
            with pytest.raises(UserError, match=r"a.txt cannot be tokenized in pieces: its tokens at byte \d"):
                prepare.prepare(given)  # where a run of one letter begins and ends decides how it is divided
            continue
        prepared = prepare.prepare(given)
        (found,) = documents(prepared, "train")
        ids = prepared.stream("train").read(0, prepared.stream("train").tokens).tolist()
        assert ids == [*tokenizer.encode(text).tolist(), tokenizer.end_id]
        assert len(found)


def test_tokens_that_depend_on_text_far_away_are_refused() -> None:
    def of(number: int) -> Encoded:
        seam = Seam(np.array([number]), np.array([0]), np.array([0]))
        return Encoded(np.array([1]), None, seam, seam)

    join = Joiner(lambda rows, _: [of(len(rows[0].before))])
    rows = [Row(0, b"ab", True, False, 0, b"", b"cd"), Row(0, b"cd", False, True, 2, b"ab", b"")]
    first = join(rows[0], of(7)._replace(first=None), "file.txt")
    assert first.last is not None
    with pytest.raises(UserError, match=r"file.txt cannot be tokenized in pieces: its tokens at byte 2 depend on text"):
        join(rows[1], of(8), "file.txt")


def test_data_of_an_earlier_version_is_used_unless_it_has_long_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = byte_level(prefix=True, trim=False)
    made.add_special_tokens(["</s>"])
    contents = {"tokenizer.json": made.to_str(), "tokenizer_config.json": '{"eos_token": "</s>"}'}
    named = write(tmp_path / "tokenizer", contents)
    write(tmp_path, {"short/a.txt": "the cat " * 20, "long/a.txt": "the cat " * 1000})
    for kind in ("short", "long"):
        given = section(tmp_path / kind, tmp_path / "cache", tokenizer=str(named), validation_fraction=0)
        with monkeypatch.context() as patch:  # as an earlier version did it
            patch.setattr(prepare, "_joins_pieces", lambda *_: False)
            earlier = prepare.prepare(given)
        said: list[str] = []
        found = prepare.prepare(given, said.append)
        assert (found.folder == earlier.folder) == (found.key == earlier.key) == (kind == "short")
        assert any("data=tokens data.path=" in line for line in said) == (kind == "long")
        anew = prepare.prepare(given.model_copy(update={"cache_dir": tmp_path / f"other-{kind}"}))
        assert anew.key == found.key
        kept = section(earlier.folder, tmp_path / "cache", name="tokens")
        assert prepare.prepare(kept).key == earlier.key
