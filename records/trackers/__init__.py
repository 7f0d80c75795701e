"""Trackers: W&B, TensorBoard and MLflow, each fed by a process of its own that follows ``metrics.jsonl``.

The training process imports none of them. ``processes.py`` is its side; the rest runs in the mirrors.
"""

import os
import shlex
import sys
from pathlib import Path

import serried

COMMAND = (sys.executable, "-P", "-m", "serried.records.trackers")
"""What runs a mirror. ``-P``: a file of the user's called wandb.py is not the tracker."""


def send_command(run_dir: Path) -> str:
    """What to type, once the run in ``run_dir`` has ended, to have its trackers take its records again."""
    return f"serried send run.dir={shlex.quote(str(run_dir))}"


def python_path() -> str:
    """``PYTHONPATH`` with which ``COMMAND`` finds its modules from any folder."""
    root = str(Path(serried.__file__).parent.parent)
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([root, *others]))
