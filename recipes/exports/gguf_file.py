"""Export to GGUF, the format of llama.cpp: one file with the model's sizes, tokenizer and weights."""

import json
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serried.configs.errors import UserError
from serried.configs.hugging_face.model_folder import CONFIG, embedded_tokens
from serried.recipes.exports.export_formats import Source
from serried.recipes.models.layers.rope import rope_frequencies
from serried.recipes.models.layers.rope_config import Rope
from serried.records.safetensors_files import TensorFolder, TensorSpec, header, tensor_bytes

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""llama.cpp's name of the architecture of each model family."""
_TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
_BLOCK = 32
"""Number of values that share a scale in Q8_0 and Q4_0."""
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITTINGS = {
    (_PATTERN.replace("DIGITS", r"\p{N}{1,3}"), True): "llama-bpe",
    (_PATTERN.replace("DIGITS", r"\p{N}"), False): "qwen2",
    (None, False): "gpt-2",
}
"""llama.cpp's name of the pre-tokenizer, by its regular expression (None for GPT-2's, which is built in) and
``ignore_merges`` (whether a word that is a token is not split further)."""
_FREQUENCIES = "rope_freqs.weight"
_DIVIDED = ("linear", "llama3")
"""Types of frequency scaling that can be expressed as divisors of the frequencies, which llama.cpp reads for Llama."""


def write(source: Source, file: Path, dtype: str) -> None:
    """Write the model to ``file``. Vectors stay in fp32, as llama.cpp requires."""
    from gguf import GGUFWriter, LlamaFileType, quant_shape_to_byte_shape

    section = source.section
    if section.family not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UserError(
            f"format=gguf does not support model.family={section.family}, only {known}; use format=hf and llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    scaling = section.rope_scaling
    if scaling and (_ARCHITECTURES[section.family] != "llama" or scaling.rope_type not in _DIVIDED):
        raise UserError(
            f"format=gguf does not support model.rope_scaling.rope_type={scaling.rope_type} of "
            f"model.family={section.family}; use format=hf and llama.cpp's convert_hf_to_gguf.py"
        )
    writer = GGUFWriter(file, _ARCHITECTURES[section.family])
    _add_sizes(writer, source)
    kind = "ALL_F32" if dtype == "fp32" else f"MOSTLY_{_TYPES[dtype]}"
    writer.add_file_type(LlamaFileType[kind])
    _add_tokenizer(writer, source.folder)
    weights = TensorFolder(source.folder)
    names = _names(source, weights)
    for name, spec in ((name, weights.specs[of]) for of, name in names.items()):
        kind = _kind(spec, dtype)
        shape = quant_shape_to_byte_shape(spec.shape, kind)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), prod(shape), kind)
    factors = _rope_factors(section)
    if factors is not None:
        writer.add_tensor_info(_FREQUENCIES, factors.shape, np.dtype(np.float32), factors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in _values(source, weights, names, dtype):
        writer.write_tensor_data(values)
    if factors is not None:
        writer.write_tensor_data(factors.numpy())
    writer.close()


def run(source: Source, file: Path, tokens: Tensor) -> Tensor:
    """Return the logits of the model with the weights that the ``gguf`` package reads from ``file``."""
    back = file.with_name(f"{file.name}.back")
    back.mkdir()
    try:
        _read_back(source, file, back)
        logits: Tensor = source.opened(back)(tokens)
        return logits
    finally:
        shutil.rmtree(back)


def _read_back(source: Source, file: Path, folder: Path) -> None:
    """Convert the weights in ``file`` back to a Hugging Face ``folder``."""
    from gguf import GGUFReader, dequantize

    theirs = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    weights = TensorFolder(source.folder)
    names = _names(source, weights)
    shutil.copyfile(source.folder / CONFIG, folder / CONFIG)
    specs = [TensorSpec(name, torch.float32, weights.specs[name].shape) for name in names]
    with (folder / "model.safetensors").open("wb") as out:
        out.write(header(specs))
        for spec in specs:
            found = theirs[names[spec.name]]
            values = torch.from_numpy(dequantize(found.data, found.tensor_type).astype(np.float32))
            heads = _heads(source.section, spec.name)
            if heads:
                values = values.unflatten(0, (heads, -1, 2)).transpose(1, 2)
            out.write(tensor_bytes(values.reshape(spec.shape).contiguous()))


def _add_sizes(writer: Any, source: Source) -> None:
    section, head_dim = source.section, source.section.attention_head_dim
    writer.add_name(source.folder.name if section.name in (None, "") else section.name)
    # llama.cpp ignores the sliding window of these families, so the context must not exceed it.
    writer.add_context_length(min(section.max_sequence_length, section.window(0) or section.max_sequence_length))
    writer.add_embedding_length(section.dim)
    writer.add_block_count(section.layers)
    writer.add_feed_forward_length(section.hidden_dim)
    writer.add_head_count(section.heads)
    writer.add_head_count_kv(section.kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(section.rope_theta)
    writer.add_layer_norm_rms_eps(section.norm_eps)
    writer.add_vocab_size(embedded_tokens(source.folder))


def _rope_factors(section: Any) -> Tensor | None:
    """Return the divisors of the rotary frequencies, one per pair; None without frequency scaling."""
    if section.rope_scaling is None:
        return None
    dim, plain = section.rotary_dim, Rope(section.rope_theta, None)
    return rope_frequencies(dim, plain) / rope_frequencies(dim, section.rope(0))


def _names(source: Source, weights: TensorFolder) -> dict[str, str]:
    """Return a mapping from Hugging Face names of tensors to llama.cpp's names."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    section = source.section
    known = get_tensor_name_map(MODEL_ARCH[_ARCHITECTURES[section.family].upper()], section.layers)
    names = {name: known.get_name(name, (".weight", ".bias")) for name in weights.specs}
    if section.tie_embeddings and "token_embd.weight" in names.values():
        names.pop("lm_head.weight", None)  # llama.cpp uses the embedding as the head
    elif section.tie_embeddings:
        names["lm_head.weight"] = "token_embd.weight"
    return {name: found for name, found in names.items() if found}


def _heads(section: Any, name: str) -> int:
    """Return the number of heads in weight ``name`` whose rows must be reordered, or 0.

    For Llama, llama.cpp rotates pairs of neighbors (2i, 2i + 1) instead of (i, i + E/2).
    """
    if _ARCHITECTURES[section.family] != "llama":
        return 0
    return {"q_proj": section.heads, "k_proj": section.kv_heads}.get(name.split(".")[-2], 0)


def _kind(spec: TensorSpec, dtype: str) -> Any:
    from gguf import GGMLQuantizationType

    if len(spec.shape) == 1:
        return GGMLQuantizationType.F32
    if not dtype.startswith("q"):
        return GGMLQuantizationType[_TYPES[dtype]]
    if spec.shape[-1] % _BLOCK:
        return GGMLQuantizationType.F16
    is_end = spec.name.endswith(("embed_tokens.weight", "lm_head.weight"))  # quantization errors matter most here
    return GGMLQuantizationType["Q8_0" if is_end else _TYPES[dtype]]


def _values(source: Source, weights: TensorFolder, names: dict[str, str], dtype: str) -> Iterator[np.ndarray[Any, Any]]:
    from gguf import quantize

    for name in names:
        spec = weights.specs[name]
        values = weights.read_elements(name, 0, spec.numel).float().view(spec.shape)
        heads = _heads(source.section, name)
        if heads:
            values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(spec.shape)
        yield quantize(values.contiguous().numpy(), _kind(spec, dtype))


def _add_tokenizer(writer: Any, folder: Path) -> None:
    """Add the content of ``tokenizer.json``. If it does not exist, the exported file has no tokenizer."""
    from gguf import SpecialVocab, TokenType

    rows = embedded_tokens(folder)
    if not (folder / "tokenizer.json").is_file():
        writer.add_tokenizer_model("no_vocab")
        return
    found = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    model = found["model"]
    is_bytes = not model.get("byte_fallback")  # the characters of a token represent bytes, as in GPT-2
    if model.get("type", "BPE") != "BPE":
        raise UserError(
            f"format=gguf supports only byte-pair encodings, but the tokenizer has type {model['type']}; use format=hf"
        )
    texts = [f"[PAD{number}]" for number in range(rows)]
    kinds = [TokenType.UNUSED] * rows
    for text, number in model["vocab"].items():
        is_byte = not is_bytes and text.startswith("<0x") and text.endswith(">")
        texts[number], kinds[number] = text, TokenType.BYTE if is_byte else TokenType.NORMAL
    for added in found.get("added_tokens", []):
        texts[added["id"]] = added["content"]
        kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2" if is_bytes else "llama")
    writer.add_tokenizer_pre(_splitting(found) if is_bytes else "default")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    if not is_bytes:
        writer.add_token_scores(_scores(model, texts))
    SpecialVocab(folder, load_merges=is_bytes, n_vocab=rows).add_to_gguf(writer, quiet=True)


def _scores(model: dict[str, Any], texts: list[str]) -> list[float]:
    """Return the score of each token: the negative rank of its merge, or 0.

    A SentencePiece tokenizer first merges the pair with the highest score.
    """
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    ranks = {"".join(pair): -float(rank) for rank, pair in reversed([*enumerate(pairs)])}
    return [ranks.get(text, 0.0) for text in texts]


def _splitting(tokenizer: dict[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer. Raises ``UserError`` if it has none."""
    found = tokenizer.get("pre_tokenizer") or {}
    *before, last = found.get("pretokenizers") or [found]
    pattern = None
    is_plain = last.get("type") == "ByteLevel" and not last.get("add_prefix_space", True)
    if before:
        pattern = before[0].get("pattern", {}).get("Regex")
        is_plain &= before[0].get("behavior") == "Isolated" and not before[0].get("invert")
    is_plain &= len(before) < 2 and last.get("use_regex", True) == (not before)
    name = _SPLITTINGS.get((pattern, bool(tokenizer["model"].get("ignore_merges"))))
    if name is None or not is_plain or (before and pattern is None):
        raise UserError(
            "format=gguf supports only the pre-tokenizers of GPT-2, Llama 3 and Qwen 2, but this tokenizer has "
            "another one; use format=hf and llama.cpp's convert_hf_to_gguf.py"
        )
    return name
