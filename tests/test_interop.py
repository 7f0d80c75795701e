"""Checkpoints are Hugging Face models, and Hugging Face models are where fine-tuning starts."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serried.trainer.trainer import Trainer
from tests.cluster import Cluster
from tests.runs import checkpoint, metrics, run_here, tiny_overrides, train_reported

LAYOUTS = {"single": (1, "parallel=single"), "fsdp x2": (2, "parallel=fsdp")}
TOKENS = torch.randint(257, (2, 30), generator=torch.Generator().manual_seed(5))


def train_and_look(argv: list[str], out: str) -> int:
    """Train; what the model answers to ``TOKENS`` before the first step and after the last is written to ``out``."""
    steps = Trainer.steps

    def answer(trainer: Trainer) -> Tensor:
        with torch.no_grad():
            logits: Tensor = trainer.state.parallel.model(TOKENS)
        trainer.state.parallel.reshard()
        return logits.contiguous()

    def watched(self: Trainer) -> Iterator[int]:
        first = answer(self)
        yield from steps(self)
        last = answer(self)
        if self.context.session.is_main:
            save_file({"first": first, "last": last}, out)

    with patch.object(Trainer, "steps", watched):
        return train_reported(argv)


def train(cluster: Cluster, layout: str, text: Path, run_dir: Path, *more: str) -> dict[str, Tensor]:
    """The logits before and after."""
    ranks, how = LAYOUTS[layout]
    out = str(run_dir.with_suffix(".logits"))
    argv = tiny_overrides(text, run_dir, how, *more)
    for answer in cluster.run(ranks, "tests.test_interop:train_and_look", argv=argv, out=out):
        assert answer.value == 0, answer.printed
    return load_file(out)


def opened(folder: Path, **keywords: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **keywords).eval()


def answer(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    assert logits.std() > 0.01, "a flat output would compare equal to anything"
    return logits


# from here to transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_opens_a_checkpoint_as_it_lies(
    layout: str, tied: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    how = [f"model.tie_embeddings={tied}", "model.layers=2", "optim.lr=0.03", "schedule=constant"]
    logits = train(cluster, layout, text, tmp_path / "run", *how)
    assert not logits["first"].allclose(logits["last"], atol=1e-2)
    files = list(checkpoint(tmp_path / "run").glob("model*.safetensors"))
    assert len(files) == LAYOUTS[layout][0]
    model = opened(checkpoint(tmp_path / "run"))
    torch.testing.assert_close(answer(model), logits["last"], rtol=0, atol=1e-5)


# from transformers to here --------------------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 20000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1048576 // 2**16,
}  # fmt: skip
MODELS = {
    "float32 in files": (torch.float32, "20KB", {}),
    "bfloat16 tied in one file": (torch.bfloat16, "1GB", {"tie_word_embeddings": True}),
    "float16 tied in files with llama3": (
        torch.float16, "20KB", {"tie_word_embeddings": True, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-6},
    ),
    "bfloat16 in files with other heads": (torch.bfloat16, "30KB", {"head_dim": 16, "num_key_value_heads": 1}),
}  # fmt: skip


def make(folder: Path, name: str) -> Path:
    """A random model, saved by transformers."""
    import transformers

    dtype, size, changes = MODELS[name]
    values: dict[str, Any] = {
        "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 56, "max_position_embeddings": 256, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values | changes)).to(dtype)
    model.save_pretrained(folder, max_shard_size=size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (size != "1GB")
    return folder


@pytest.fixture(scope="module", params=MODELS)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("theirs") / "model", request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("plain") / "model", "float32 in files")


def refusal(text: Path, run_dir: Path, *more: str) -> str:
    """The one line that refuses the command; what the run folder holds stays."""
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    ended = run_here(tiny_overrides(text, run_dir, *more))
    assert ended.code == 78, ended.printed
    [line] = [line for line in ended.printed.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in ended.printed
    after = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before
    return line


def pasted(line: str) -> list[str]:
    """The overrides that an error names, after ``use``, as bash reads them."""
    words = re.split(r"; use (?=model\.|')", line, maxsplit=1)[1]
    done = subprocess.run(["bash", "-c", f"printf '%s\\n' {words}"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fine_tuning_starts_from_what_transformers_saved(
    layout: str, theirs: Path, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    resume = f"checkpoint.resume={theirs}"
    fit = pasted(refusal(text, tmp_path / "run", resume))
    how = [resume, *fit, "trainer.steps=2"]
    logits = train(cluster, layout, text, tmp_path / "run", *how, "optim.lr=0")
    model = opened(theirs)
    expected = answer(model)
    torch.testing.assert_close(logits["first"], expected, rtol=0, atol=1e-5)
    assert torch.equal(logits["last"], logits["first"])
    assert metrics(tmp_path / "run", "start")[0]["resumed_from"] is None
    back = opened(checkpoint(tmp_path / "run"))
    assert torch.equal(answer(back), expected)
    there, here = model.state_dict(), back.state_dict()
    assert there.keys() == here.keys()
    assert all(here[name].equal(there[name]) for name in there)


def test_a_fine_tuning_run_resumes_from_its_own_checkpoints(plain: Path, text: Path, tmp_path: Path) -> None:
    how = [f"checkpoint.resume={plain}", *pasted(refusal(text, tmp_path / "run", f"checkpoint.resume={plain}"))]
    assert run_here(tiny_overrides(text, tmp_path / "run", *how, "trainer.stop_at=2")).code == 75
    assert run_here(tiny_overrides(text, tmp_path / "run", *how, "trainer.stop_at=4")).code == 75
    # Its origin may be gone by then, and need not be named.
    assert run_here(tiny_overrides(text, tmp_path / "run", *how[1:])).code == 0
    assert [line["resumed_from"] for line in metrics(tmp_path / "run", "start")] == [None, 2, 4]


def changed(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy with another config.json; None: without that key."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text()) | changes
    text = json.dumps({key: value for key, value in config.items() if value is not None})
    (to / "config.json").write_text(text)
    return to


@pytest.mark.parametrize(
    ("changes", "override"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 12345.678}}, "model.rope_theta=12345.678"),
        ({"rope_parameters": None, "rope_theta": 5e6}, "model.rope_theta=5000000.0"),
        ({"num_attention_heads": 8, "head_dim": 8}, "model.heads=8"),
        ({"num_key_value_heads": None}, "model.kv_heads=4"),
        ({"rms_norm_eps": 1.5e-7}, "model.norm_eps=1.5e-07"),
        ({"tie_word_embeddings": True}, "model.tie_embeddings=true"),
        ({"num_hidden_layers": 3}, "model.layers=3"),
        (
            {"rope_parameters": LLAMA3 | {"factor": 8.123456789, "original_max_position_embeddings": 1048576}},
            "model.rope_scaling={factor:8.123456789,low_freq_factor:1.0,high_freq_factor:4.0,"
            "original_max_sequence_length:1048576}",
        ),
        (
            {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {**LLAMA3, "factor": 32}},
            "model.rope_scaling={factor:32,low_freq_factor:1.0,high_freq_factor:4.0,original_max_sequence_length:16}",
        ),
    ],
)
def test_another_config_is_told_as_overrides_that_work(
    changes: dict[str, Any], override: str, plain: Path, text: Path, tmp_path: Path
) -> None:
    folder = changed(plain, tmp_path / "model", **changes)
    resume = f"checkpoint.resume={folder}"
    base = pasted(refusal(text, tmp_path / "run", f"checkpoint.resume={plain}"))
    line = refusal(text, tmp_path / "run", resume, *base)
    assert "config.json describes another model than this one; use " in line
    fit = pasted(line)
    assert override in fit
    # With them the config fits: what is refused then, if anything, is that the weights are not of that config.
    ended = run_here(tiny_overrides(text, tmp_path / "run", resume, *base, *fit, "trainer.steps=1"))
    assert "describes another model" not in ended.printed
    assert "Traceback" not in ended.printed
    assert ended.code in (0, 78)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "mistral"}, "config.json is of model_type mistral; only llama can be taken over"),
        ({"attention_bias": True}, "config.json has attention_bias True; only False can be taken over"),
        ({"mlp_bias": True}, "config.json has mlp_bias True"),
        ({"hidden_act": "gelu"}, "config.json has hidden_act gelu; only silu"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "config.json has rope_type yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "config.json lacks 'low_freq_factor'"),
        ({"hidden_size": None}, "config.json lacks 'hidden_size'"),
    ],
)
def test_what_no_override_can_mend_is_refused(
    changes: dict[str, Any], told: str, plain: Path, text: Path, tmp_path: Path
) -> None:
    folder = changed(plain, tmp_path / "model", **changes)
    assert told in refusal(text, tmp_path / "run", f"checkpoint.resume={folder}")


def test_folders_that_are_no_models_are_refused_and_nothing_is_moved(plain: Path, text: Path, tmp_path: Path) -> None:
    run_dir, folder = tmp_path / "run", tmp_path / "model"
    resume = f"checkpoint.resume={folder}"
    assert run_here(tiny_overrides(text, run_dir, "trainer.stop_at=1")).code == 75
    shutil.copytree(plain, folder)
    fit = pasted(refusal(text, run_dir, resume))

    first = min(folder.glob("*.safetensors"))
    content = first.read_bytes()
    first.write_bytes(content[:-5])
    assert f"{first} cannot be used" in refusal(text, run_dir, resume, *fit)
    first.unlink()
    assert "which is not there; copy it too" in refusal(text, run_dir, resume, *fit)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    assert "'pytorch_model.bin' is a pickle, which is never loaded; convert" in refusal(text, run_dir, resume, *fit)
    config = (folder / "config.json").read_text()
    for text_ in ("[]", "{", "null", config.replace(": 32", ": []", 1)):
        (folder / "config.json").write_text(text_)
        assert f"{folder / 'config.json'} " in refusal(text, run_dir, resume, *fit)
    (folder / "config.json").unlink()
    assert f"cannot read {folder / 'config.json'}: No such file" in refusal(text, run_dir, resume, *fit)


def test_other_tensors_than_the_config_says_are_refused_and_nothing_is_moved(
    plain: Path, text: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    assert run_here(tiny_overrides(text, run_dir, "trainer.stop_at=1")).code == 75
    fit = pasted(refusal(text, run_dir, f"checkpoint.resume={plain}"))
    folder = changed(plain, tmp_path / "model", num_hidden_layers=3)
    line = refusal(text, run_dir, f"checkpoint.resume={folder}", *fit, "model.layers=3")
    assert "9 tensors are not in it (model.layers.2.input_layernorm.weight" in line
