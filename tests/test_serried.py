"""The command ``serried``, as it is typed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from serried import main
from tests.cluster import ROOT, Cluster
from tests.runs import overrides, weights


def serried(*arguments: str, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "serried.py"), *arguments],
        cwd=where, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    argv = overrides(text, folder, "parallel=fsdp", "trainer.steps=4", "checkpoint.every=2")
    cluster.run(2, "tests.runs:train_small", argv=argv)
    return folder


def test_an_exported_model_and_its_tokenizer_open(run_dir: Path, tmp_path: Path) -> None:
    done = serried("export", f"run.dir={run_dir}", "out=model", "dtype=bf16", "shard_size=20kB", where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step-00000004" in done.stdout
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    for name, tensor in model.state_dict().items():
        assert tensor.equal(weights(run_dir)[name].to(torch.bfloat16)), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("né")["input_ids"] == list("né".encode())
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    assert not {"state.json", "MANIFEST.json"} & {path.name for path in (tmp_path / "model").iterdir()}


def test_an_earlier_step_can_be_exported(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", f"run.dir={run_dir}", f"out={tmp_path / 'model'}", "checkpoint=2"]) == 0
    assert "step-00000002" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["exprot"], "serried export"),
        (["recipes", "recipe=tiny"], "serried plan recipe=tiny"),
        (["plan", "trainer.stps=3"], "trainer.steps=3"),
        (["export"], "out=FOLDER is missing"),
        (["export", "out=x", "run.dir=nowhere"], "nowhere/checkpoints holds no checkpoint"),
        (["export", "out=x", "run.dri=runs/tiny"], "did you mean run.dir=runs/tiny"),
        (["export", "out=x", "dtype=int8"], "fp32, bf16, fp16"),
        (["export", "out"], "'out' is not key=value"),
        (["export", "out=x", "out=y"], "given twice"),
        (["export", "out=x", "run.dir={run}", "checkpoint=3"], "there are 2, 4"),
        (["export", "out=x", "run.dir={run}", "checkpoint=last"], "checkpoint=last is not a step"),
        (["export", "out=x", "run.dir={run}", "shard_size=0"], "shard_size=0"),
        (["export", "out={run}", "run.dir={run}"], "not empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(
    arguments: list[str],
    expected: str,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([word.replace("{run}", str(run_dir)) for word in arguments]) == 78
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert len(printed.splitlines()) == 1
    assert expected in printed
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["export", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "serried export" in capsys.readouterr().out
