"""Weights & Biases. https://docs.wandb.ai"""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import wandb

from serried.records.trackers.rows import Row, Run

_INIT_SECONDS, _FLUSH_SECONDS = float(os.environ.get("WANDB_INIT_TIMEOUT", "30")), 1
_STEP = "step"


class WandbTracker:
    """A run of W&B.

    Online, the run is resumed: the server knows its last step and receives the steps after it. Offline runs
    cannot be resumed, so each start writes the whole history into a new folder and deletes the previous one.
    """

    def __init__(self, run: Run, *, is_online: bool, finish_seconds: float) -> None:
        track, folder = run.config["track"], run.folder / "wandb"
        folder.mkdir(exist_ok=True)  # W&B uses a folder for temporary files if this one is missing
        previous = [path for path in folder.glob(f"*run-*-{run.identity}") if not path.is_symlink()]
        settings = wandb.Settings(
            silent=True, console="off",
            init_timeout=_INIT_SECONDS,
            finish_timeout=finish_seconds,
            finish_timeout_raises=True,
            x_transaction_log_flush_interval=_FLUSH_SECONDS,  # a killed process loses values that are not flushed
            x_stats_pid=os.getppid(),  # the training process
            # Otherwise W&B would record the command, code and packages of this process instead of the run's.
            disable_git=True, disable_code=True, x_disable_meta=True, x_save_requirements=False,
        )  # fmt: skip
        self._run: Any = wandb.init(
            mode="online" if is_online else "offline",
            resume="allow" if is_online else None,
            dir=run.folder, id=run.identity, name=run.name, allow_val_change=True, settings=settings,
            project=track["project"] or os.environ.get("WANDB_PROJECT") or "serried",
            config={**run.config, "run_facts": run.facts},
            **{key: track[key] for key in ("entity", "group", "tags", "notes")},
        )  # fmt: skip
        # W&B drops steps that are repeated after a restart or a rollback, unless a metric of ours is the axis.
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        self.last_step = int(self._run.summary.get(_STEP, -1)) if self._run.resumed else -1
        self.note = f"W&B: {self._run.url}" if is_online else f"W&B, offline: wandb sync {folder}/offline-run-*"
        for path in previous:
            if path != Path(self._run.dir).parent:
                shutil.rmtree(path, ignore_errors=True)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            images = {name: _images(paths) for name, paths in row.images.items()}
            self._run.log({_STEP: row.step, "_timestamp": row.time, **row.values, **row.texts, **images})

    def close(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=1 if summary["state"] in ("failed", "killed") else 0)
        wandb.teardown()  # waits for its service process, which closes the file last


def _images(paths: Sequence[Path]) -> list[Any]:
    """Return the images that W&B can read: it needs Pillow, and refuses a broken file."""
    found = []
    for path in paths if find_spec("PIL") else ():
        with suppress(Exception):
            found.append(wandb.Image(str(path)))
    return found
