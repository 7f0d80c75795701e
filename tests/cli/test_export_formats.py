"""``serried export format=...``: other software computes what the checkpoint does, and mistakes are one line."""

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serried import cli
from serried.commands.export_models import _difference, _move_all
from serried.configs.errors import UserError
from serried.program import main
from serried.recipes.data.tokenizers.hugging_face_tokenizer import train_tokenizer
from serried.recipes.data.tokenizers.tokenizer import hugging_face_files
from serried.recipes.exports.gguf_file import _rope_factors, _splitting
from serried.recipes.models.families.llama_config import LlamaSection
from tests.runs.fine_tuning.test_lora import lora, models  # noqa: F401 -- a fixture

pytestmark = pytest.mark.slow

TOKENS = torch.randint(300, (3, 9), generator=torch.Generator().manual_seed(1))
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0, "head_dim": 16,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {"sliding_window": 64}, "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 128},  # transformers reads no other from GGUF
}  # fmt: skip
TEXT = "the quick brown fox, and the lazy dog; the quicker the better"


def saved(folder: Path, family: str) -> Path:
    """A model of transformers with random weights, also of norms and biases, and a tokenizer of 300 ids."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / family)
    for name, content in hugging_face_files(train_tokenizer(iter([TEXT]), 300)).items():
        (folder / family / name).write_text(content)
    return folder / family


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), "Llama")


def logits(folder: Path, **named: Any) -> Tensor:
    """What transformers computes."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **named).eval()
    with torch.no_grad():
        found: Tensor = model(TOKENS).logits
    return found


def export(folder: Path, out: Path, *words: str) -> None:
    assert cli.main(["export", str(folder), f"out={out}", *words]) == 0
    assert not list(out.parent.glob(".*.partial"))


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_read_by_transformers_has_the_logits_and_the_tokenizer(family: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    import transformers

    folder = saved(tmp_path, family)
    export(folder, tmp_path / "out.gguf", "dtype=fp32", "format=gguf")
    torch.testing.assert_close(logits(tmp_path, gguf_file="out.gguf"), logits(folder), atol=1e-5, rtol=1e-5)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
    assert read(TEXT).input_ids == transformers.AutoTokenizer.from_pretrained(folder)(TEXT).input_ids


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "q8_0", "q4_0"])
def test_gguf_has_matrices_in_the_dtype_and_vectors_in_fp32(llama: Path, dtype: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    export(llama, tmp_path / "out.gguf", f"dtype={dtype}", "format=gguf")
    kinds = {each.name: each.tensor_type.name for each in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert kinds["blk.1.attn_q.weight"] == {"fp16": "F16"}.get(dtype, dtype.upper())
    assert kinds["output_norm.weight"] == "F32"
    assert kinds["output.weight"] == ("Q8_0" if dtype == "q4_0" else kinds["blk.1.attn_q.weight"])


LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")


def tokenizer_json(*parts: Any, **of_model: Any) -> dict[str, Any]:
    """``tokenizer.json`` of a tokenizer that splits text by these ``parts``."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE(**of_model))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts]) if len(parts) > 1 else parts[0]
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


def test_gguf_names_only_ways_to_split_text_that_are_known() -> None:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Split

    alone, after = ByteLevel(add_prefix_space=False), ByteLevel(add_prefix_space=False, use_regex=False)
    llama3, qwen2, gpt4o = (
        Split(Regex(each), "isolated") for each in (LLAMA3_SPLIT, QWEN2_SPLIT, rf"\p{{Lu}}*\p{{Ll}}+|{LLAMA3_SPLIT}")
    )
    assert _splitting(tokenizer_json(alone)) == "gpt-2"
    assert _splitting(tokenizer_json(llama3, after, ignore_merges=True)) == "llama-bpe"
    assert _splitting(tokenizer_json(qwen2, after)) == "qwen2"
    for other in (
        tokenizer_json(Digits(individual_digits=True), alone),  # SmolLM
        tokenizer_json(gpt4o, after, ignore_merges=True),
        tokenizer_json(Split(Regex(r"\p{N}{1,3}"), "isolated"), qwen2, after),  # DeepSeek
        tokenizer_json(llama3, after),  # DBRX
        tokenizer_json(qwen2, alone),
        tokenizer_json(ByteLevel(add_prefix_space=True)),
        tokenizer_json(after),
        {"pre_tokenizer": None, "model": {}},
    ):
        with pytest.raises(
            UserError, match=r"supports only the pre-tokenizers of .*; use format=hf and .*convert_hf_to_gguf\.py"
        ):
            _splitting(other)


def test_all_files_of_an_export_are_moved_or_none(tmp_path: Path) -> None:
    written, name = tmp_path / "written", "m[1].onnx"
    written.mkdir()
    for each in (name, f"{name}.data"):
        (written / each).write_text("new")
    (tmp_path / f"{name}.data").write_text("mine")
    with pytest.raises(UserError, match=r"m\[1\]\.onnx\.data, which already exists"):
        _move_all(written, tmp_path)
    assert not (tmp_path / name).exists()
    (tmp_path / f"{name}.data").unlink()
    _move_all(written, tmp_path)
    assert {each.name for each in tmp_path.iterdir() if each.is_file()} == {name, f"{name}.data"}


def test_gguf_has_the_rotary_factors_of_llama3() -> None:
    """llama.cpp divides frequencies by them; transformers reads none."""
    pytest.importorskip("gguf")
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = transformers.LlamaConfig(**SIZES)
    scaled = transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3)
    section = LlamaSection.model_validate({"name": "x", "vocab_size": 300, **LlamaSection.keys_from(scaled.to_dict())})
    before = 1.0 / (plain.rope_parameters["rope_theta"] ** (torch.arange(0, 16, 2) / 16))
    found = _rope_factors(section)
    assert found is not None
    torch.testing.assert_close(before / found, ROPE_INIT_FUNCTIONS["llama3"](scaled, "cpu")[0])


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_onnx_runtime_takes_any_batch_and_length(llama: Path, dtype: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export(llama, tmp_path / "out.onnx", "format=onnx", f"dtype={dtype}")
    session = runtime.InferenceSession(tmp_path / "out.onnx")
    expected = logits(llama).numpy()
    bound = {"fp32": 1e-5, "int8": 0.2}[dtype] * abs(expected).max()
    for rows, length in ((3, 9), (1, 1)):
        found = session.run(None, {"tokens": TOKENS[:rows, :length].numpy()})[0]
        assert abs(found - expected[:rows, :length]).max() < bound


def test_torch_export_has_no_pickle_and_takes_any_batch_and_length(llama: Path, tmp_path: Path) -> None:
    export(llama, tmp_path / "out.pt2", "format=torch_export")
    with zipfile.ZipFile(tmp_path / "out.pt2") as archive:
        assert [name for name in archive.namelist() if archive.read(name).startswith((b"\x80\x02", b"PK"))] == []
    model, expected = torch.export.load(tmp_path / "out.pt2").module(), logits(llama)
    for rows, length in ((3, 9), (1, 2)):
        torch.testing.assert_close(model(TOKENS[:rows, :length]), expected[:rows, :length], atol=1e-5, rtol=1e-5)


def test_executorch_takes_any_batch_and_length(llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    from executorch.runtime import Runtime

    export(llama, tmp_path / "out.pte", "format=executorch")
    method, expected = Runtime.get().load_program(tmp_path / "out.pte").load_method("forward"), logits(llama)
    for rows, length in ((3, 9), (1, 1)):
        found = method.execute([TOKENS[:rows, :length].contiguous()])[0]
        torch.testing.assert_close(found, expected[:rows, :length], atol=1e-5, rtol=1e-5)


def test_adapters_are_merged(models: Path, tmp_path: Path) -> None:  # noqa: F811
    assert main(lora(models, tmp_path / "run")) == 0
    export(tmp_path / "run", tmp_path / "model", "merge=true")
    export(tmp_path / "run", tmp_path / "out.pt2", "format=torch_export")
    few = TOKENS % 257
    found = torch.export.load(tmp_path / "out.pt2").module()(few)
    export(tmp_path / "model", tmp_path / "merged.pt2", "format=torch_export")
    assert torch.equal(found, torch.export.load(tmp_path / "merged.pt2").module()(few))


def test_mistakes_are_one_line_and_leave_nothing(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    gpt2 = transformers.GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    reward = transformers.LlamaConfig(**SIZES, num_labels=1, pad_token_id=1)
    transformers.LlamaForSequenceClassification(reward).save_pretrained(tmp_path / "reward")
    (tmp_path / "used").write_text("mine")
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    before = sorted(tmp_path.iterdir())

    def refusal(*words: str) -> str:
        capsys.readouterr()
        assert cli.main(["export", *words]) == 78
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and error.endswith("\n")
        assert sorted(tmp_path.iterdir()) == before
        return error

    out = f"out={tmp_path / 'out'}"
    assert "did you mean format=onnx?" in refusal(str(llama), out, "format=onx")
    assert "dtype=fp32 or dtype=bf16" in refusal(str(llama), out, "format=torch_export", "dtype=q4_0")
    assert "has no effect" in refusal(str(llama), out, "format=torch_export", "merge=true")
    assert "out=my-model.pt2" in refusal(str(llama), "format=torch_export")
    assert "exists" in refusal(str(llama), f"out={tmp_path / 'used'}", "format=torch_export")
    assert "remove" not in refusal(str(llama), "out=/dev/null", "format=torch_export")
    assert "LlamaForSequenceClassification" in refusal(str(tmp_path / "reward"), out, "format=torch_export")
    assert "cannot write" in refusal(str(llama), f"out={tmp_path / 'used' / 'out'}", "format=torch_export")
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        assert "1000B are free" in refusal(str(llama), out, "format=torch_export")
    assert "adapters without a run" in refusal(str(tmp_path / "adapters"), out, "format=torch_export")
    pytest.importorskip("gguf")
    assert "format=gguf does not support model.family=gpt2" in refusal(str(tmp_path / "gpt2"), out, "format=gguf")


@pytest.mark.parametrize("found", [[1.0, 2.2], [1.0, float("nan")]])
def test_a_file_that_computes_something_else_is_refused(found: list[float]) -> None:
    with pytest.raises(UserError, match="differ from the checkpoint's by"):
        _difference(torch.tensor(found), torch.tensor([1.0, 2.0]), "format=x", 0.05)
