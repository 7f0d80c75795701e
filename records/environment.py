"""``environment.json``: versions, hardware and the commit of the code that a run used."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import serried


def environment() -> dict[str, Any]:
    """Return versions, hardware and the code's commit. No environment variables, so no secrets."""
    import torch

    from serried.runtime.accelerator import device_names

    changed = _git("status", "--porcelain")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "platform": platform.platform(),
        "working_directory": str(Path.cwd()),
        "cpus": os.cpu_count(),
        "gpus": device_names(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changed_files": None if changed is None else len(changed.splitlines()),
    }


def _git(*arguments: str) -> str | None:
    root = Path(serried.__file__).resolve().parent
    command = ["git", "-C", str(root), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()
