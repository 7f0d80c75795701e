"""A model family of a user's: one file that registers it, and one YAML beside it, outside the checkout."""

import json
import subprocess
from pathlib import Path

import pytest

from testing.forked_runs import typed, typed_on
from testing.runs import losses, tiny_overrides

_SCRIPT = '''
import serried
from torch import nn


class BigramSection(serried.Section):
    """Predict a token from the one before."""

    width: int = 32
    """Width of the embedding."""


@serried.register_model("bigram", section=BigramSection)
def build(section, vocab_size):
    return nn.Sequential(nn.Embedding(vocab_size, section.width), nn.Linear(section.width, vocab_size))


if __name__ == "__main__":
    serried.main()
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bigram.py").write_text(_SCRIPT)
    (tmp_path / "presets" / "model").mkdir(parents=True)
    (tmp_path / "presets" / "model" / "bigram.yaml").write_text("name: bigram\nfamily: bigram\nwidth: 16\n")
    return tmp_path


def bigram(folder: Path, *words: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """What the first of them says."""
    argv = ("bigram.py", "--config-dir", "presets", *words)
    return typed(*argv, cwd=folder) if processes == 1 else typed_on(processes, *argv, cwd=folder)[0]


def overrides(text: Path, run_dir: Path, *more: str) -> list[str]:
    words = tiny_overrides(text, run_dir, "trainer.sample_tokens=4")
    return [*(word for word in words if not word.startswith("model.")), "model=bigram", *more]


def test_user_family_has_the_same_losses_on_every_layout(folder: Path, text: Path) -> None:
    alone = bigram(folder, *overrides(text, folder / "one"))
    assert alone.returncode == 0, alone.stderr
    assert "model      bigram: width 16, vocabulary 257" in alone.stdout
    sharded = bigram(folder, *overrides(text, folder / "two", "parallel=fsdp"), processes=2)
    assert sharded.returncode == 0, sharded.stderr
    assert losses(folder / "two") == pytest.approx(losses(folder / "one"), rel=1e-5)
    config = json.loads((folder / "one" / "checkpoints" / "step-00000006" / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"]) == ("bigram", 257)


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("model.widht=4", "did you mean model.width=4?"),
        ("model.heads=4", "but the run uses model.family=bigram"),
        (
            "task.z_loss=1e-4",
            "task.z_loss=0.0001 is computed by a LanguageModelHead, which model.family=bigram does not have",
        ),
        ("model.width=x", "model.width=x (command line) is not a whole number"),
    ],
)
def test_mistakes_in_keys_of_a_user_family_are_one_line(word: str, answer: str, folder: Path, text: Path) -> None:
    ended = bigram(folder, *overrides(text, folder / "run", word, "dry_run=true"))
    assert (ended.returncode, ended.stdout) == (78, "")
    assert answer in ended.stderr
    assert ended.stderr.count("\n") == 1
