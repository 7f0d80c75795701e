"""The way from the command to the model is short: what a debugger or a profile shows of it fits on a screen."""

from pathlib import Path

from testing.forked_runs import typed
from testing.rank_pool import ROOT
from testing.runs import tiny_overrides

MOST_FRAMES = 12

_STACK_AT_MODEL = """
import os, runpy, traceback
from serried.recipes.models.families.llama import Transformer

def forward(self, *_, **__):
    print(*(f"{frame.filename}:{frame.name}" for frame in traceback.extract_stack()[:-1]), sep="\\n", flush=True)
    os._exit(0)

Transformer.forward = forward
runpy.run_path("train.py", run_name="__main__")
"""


def test_model_is_called_at_most_12_frames_below_train_py(text: Path, tmp_path: Path) -> None:
    done = typed("-c", _STACK_AT_MODEL, *tiny_overrides(text, tmp_path))
    assert "train.py:<module>" in done.stdout, done.stderr
    below = done.stdout.rpartition("train.py:<module>")[2]
    own = [line for line in below.splitlines() if line.startswith(f"{ROOT}/") and "site-packages" not in line]
    frames = ["train.py:<module>", *(line.removeprefix(f"{ROOT}/") for line in own)]
    assert "step.py:__call__" in " ".join(frames)
    assert len(frames) <= MOST_FRAMES, frames
