"""An exported checkpoint is a Hugging Face model folder: same weights, same logits, in any dtype and file size."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serried.configs.errors import UserError
from serried.records.safetensors_files import TensorFolder, TensorSpec, header, index_json, tensor_bytes
from serried.trainer.checkpoint import export as module
from serried.trainer.checkpoint.export import export
from serried.trainer.checkpoint.manifest import record_of, write_manifest
from tests.unit.checkpoint.test_checkpoint_files import whole, write


def checkpoint_of(folder: Path, state: dict[str, Tensor], config: dict[str, Any], files: int = 2) -> Path:
    """A committed checkpoint, as a save by ``files`` ranks leaves it."""
    folder.mkdir(parents=True)
    for stem in ("model", "optimizer"):
        index = {}
        for number in range(files):
            part = {name: state[name] for name in list(state)[number::files]}
            file = f"{stem}-{number + 1:05d}-of-{files:05d}.safetensors"
            index[file] = write(folder / file, part)
        (folder / f"{stem}.safetensors.index.json").write_text(index_json(index))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "state.json").write_text("{}")
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    (folder / "MANIFEST.json").unlink(missing_ok=True)
    write_manifest(folder, {path.name: record_of(path) for path in folder.iterdir()})


class Case(NamedTuple):
    checkpoint: Path
    model: Any  # transformers' model of the same weights


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, tie_word_embeddings=request.param,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    state = {name: tensor for name, tensor in model.state_dict().items() if not request.param or "lm_head" not in name}
    folder = tmp_path_factory.mktemp("run") / "checkpoints" / "step-00000010"
    return Case(checkpoint_of(folder, state, {**config.to_dict(), "dtype": None}), model)


@pytest.mark.parametrize(
    ("dtype", "shard_bytes"),
    [(None, 10**9), (None, 1), (torch.float32, 50_000), (torch.bfloat16, 10**9), (torch.float16, 50_000)],
)
def test_exported_model_opens_in_transformers_with_the_same_weights_and_logits(
    case: Case, dtype: torch.dtype | None, shard_bytes: int, tmp_path: Path
) -> None:
    import transformers

    out = tmp_path / "new" / "model"
    files = export(case.checkpoint, out, dtype=dtype, shard_bytes=shard_bytes)
    names = [path.name for path in files]
    assert files == sorted(out.iterdir())
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= set(names)
    assert not [name for name in names if name.startswith(("state", "optimizer", "MANIFEST"))]
    assert ("model.safetensors" in names) == (shard_bytes == 10**9)
    assert ("model.safetensors.index.json" in names) == (shard_bytes < 10**9)
    assert sorted(tmp_path.iterdir()) == [out.parent] and list(out.parent.iterdir()) == [out]
    wanted = dtype or torch.float32
    for key in ("dtype", "torch_dtype"):
        assert json.loads((out / "config.json").read_text())[key] == str(wanted).removeprefix("torch.")

    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert theirs.dtype == wanted
    assert (theirs.generation_config.bos_token_id, theirs.generation_config.eos_token_id) == (1, 2)
    for name, tensor in case.model.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor.to(wanted))
    tokens = torch.randint(131, (2, 20), generator=torch.Generator().manual_seed(1))
    if wanted == torch.float32:
        with torch.no_grad():
            assert torch.equal(theirs.eval()(tokens).logits, case.model(tokens).logits)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 60))
def test_shards_are_filled_up_to_the_limit_and_contain_every_tensor_once(sizes: list[int], shard_bytes: int) -> None:
    specs = [TensorSpec(str(number), torch.float32, (size,)) for number, size in enumerate(sizes)]
    files = module._shards(specs, shard_bytes)
    assert [spec for part in files.values() for spec in part] == specs
    for part in files.values():
        assert len(part) == 1 or sum(spec.nbytes for spec in part) <= shard_bytes
    for part, following in itertools.pairwise(files.values()):
        assert sum(spec.nbytes for spec in part) + following[0].nbytes > shard_bytes


def test_tensors_exported_in_small_pieces_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {
        "none": torch.tensor(1.5), "empty": torch.empty(0, 3), "odd": torch.randn(7, 11), "wide": torch.randn(1, 1000),
        "double": torch.randn(5, 5, dtype=torch.float64), "half": torch.randn(9).half(), "count": torch.arange(5),
        "scaled": torch.randn(6).to(torch.float8_e4m3fn), "strange": torch.tensor([torch.inf, -torch.inf, torch.nan]),
    }  # fmt: skip
    checkpoint = checkpoint_of(tmp_path / "step-00000001", state, {}, files=3)
    monkeypatch.setattr(module, "_PIECE_BYTES", 40)
    export(checkpoint, tmp_path / "out", dtype=torch.float16, shard_bytes=300)
    found = TensorFolder(tmp_path / "out")
    assert set(found.specs) == set(state)
    for name, tensor in state.items():
        expected = tensor if name in ("count", "scaled") else tensor.half()
        read = whole(found, name)
        assert read.dtype == expected.dtype and read.shape == expected.shape
        assert bytes(tensor_bytes(read)) == bytes(tensor_bytes(expected))


def test_memory_of_an_export_stays_small_for_any_tensor(tmp_path: Path) -> None:
    """One tensor of 256 MiB, exported by a process that may take half of that beyond torch itself."""
    rows = 2**26 // 1024
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header([TensorSpec("x", torch.float32, (rows, 1024))]))
        file.truncate(file.tell() + rows * 4096)
    (folder / "config.json").write_text("{}")
    commit(folder)
    program = (
        "import resource, sys, torch\nfrom pathlib import Path\nfrom serried.trainer.checkpoint.export import export\n"
        "torch.ones(8).half().isinf()\nbefore = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "export(Path(sys.argv[1]), Path(sys.argv[2]), dtype=torch.bfloat16, shard_bytes=10**10)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    command = [sys.executable, "-c", program, str(folder), str(tmp_path / "out")]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 128 * 1024  # KiB
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > rows * 2048


def refusal(folder: Path, out: Path, dtype: torch.dtype | None = None) -> str:
    """The error with which the export is refused; checked to be one line and to leave nothing behind."""
    before = sorted(out.parent.glob("*"))
    with pytest.raises(UserError) as caught:
        export(folder, out, dtype=dtype, shard_bytes=10**9)
    assert sorted(out.parent.glob("*")) == before
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    state = {"a": torch.randn(4, 4), "b": torch.tensor([1.0, 7e4, 3.4e38])}
    return checkpoint_of(tmp_path / "run" / "step-00000001", state, {"model_type": "llama"})


def test_a_folder_in_use_is_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    assert "not empty; use another folder" in refusal(small, tmp_path / "used")
    assert "Not a directory" in refusal(small, tmp_path / "used" / "file")
    assert "Not a directory" in refusal(small, tmp_path / "used" / "file" / "below")
    assert "is inside the checkpoint" in refusal(small, small / "out")
    assert "is inside the checkpoint" in refusal(small, small)
    assert (tmp_path / "used" / "file").read_text() == "mine"


def test_empty_folder_and_leftovers_of_a_killed_export_are_overwritten(small: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_text("half")
    export(small, tmp_path / "out", dtype=None, shard_bytes=10**9)
    assert torch.equal(whole(TensorFolder(tmp_path / "out"), "a"), whole(TensorFolder(small), "a"))
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float16, "70000"), (torch.bfloat16, "3.4e+38")], ids=["fp16", "bf16"]
)
def test_weight_that_overflows_the_dtype_is_named(small: Path, dtype: torch.dtype, value: str, tmp_path: Path) -> None:
    message = refusal(small, tmp_path / "out", dtype)
    assert message.startswith(f"b contains {value}") and "dtype=fp32" in message


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json", "tokenizer.json", "MANIFEST.json"])
def test_a_damaged_checkpoint_is_not_exported(small: Path, name: str, tmp_path: Path) -> None:
    content = bytearray((small / name).read_bytes())
    content[len(content) // 2] ^= 1
    (small / name).write_bytes(content)
    message = refusal(small, tmp_path / "out")
    assert name in message and "checkpoint=STEP" in message


@pytest.mark.parametrize("name", ["state.json", "optimizer-00001-of-00002.safetensors"])
def test_damage_to_the_training_state_does_not_matter(small: Path, name: str, tmp_path: Path) -> None:
    (small / name).unlink()
    export(small, tmp_path / "out", dtype=None, shard_bytes=10**9)


def test_files_that_the_manifest_does_not_vouch_for_are_refused(small: Path, tmp_path: Path) -> None:
    write(small / "model.safetensors", {"a": torch.zeros(1)})  # which would be read rather than the index
    assert "model.safetensors is not in MANIFEST.json" in refusal(small, tmp_path / "out")
    (small / "model.safetensors").unlink()
    (small / "config.json").unlink()
    commit(small)
    assert "no config.json" in refusal(small, tmp_path / "out")


def test_full_disk_is_reported_before_the_export(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "has only 1000B free" in refusal(small, tmp_path / "out")


@pytest.mark.parametrize("function", ["fsync", "rename"])
def test_a_disk_that_fails_leaves_nothing(
    small: Path, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, fail)
    assert "No space left on device" in refusal(small, tmp_path / "out")


def test_a_generation_config_is_kept(small: Path, tmp_path: Path) -> None:
    (small / "generation_config.json").write_text('{"temperature": 0.5}')
    (small / "merges.txt").write_text("a b")
    commit(small)
    export(small, tmp_path / "out", dtype=None, shard_bytes=10**9)
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"temperature": 0.5}'
    assert (tmp_path / "out" / "merges.txt").read_text() == "a b"


@pytest.mark.parametrize(("dtype", "shard_bytes"), [(torch.int8, 1), (torch.float64, 1), (None, 0)])
def test_invalid_dtype_and_shard_size_of_an_export_are_refused(
    small: Path, dtype: Any, shard_bytes: int, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="export as"):
        export(small, tmp_path / "out", dtype=dtype, shard_bytes=shard_bytes)
