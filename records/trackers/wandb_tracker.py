"""Weights & Biases. https://docs.wandb.ai"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from serried.records.trackers.tracker import Held, Row, Run, Summary

# Where training has all cores, a thread here is given 1.5 % of one.
_INIT_SECONDS, _SERVICE_SECONDS = 180.0, 120.0
_FINISH_SECONDS = 20.0
_FLUSH_SECONDS = 1
_STEP = "step"


class WandbTracker:
    """One run of W&B.

    Online, the server says up to which step it has the run, and is sent what is beyond. Offline, each start writes the
    whole history into a new folder, since offline runs cannot be resumed, and the one before is deleted.
    """

    def __init__(self, *, is_online: bool, process: int | None) -> None:
        """``process``: whose use of the machine W&B shows; None: nobody's."""
        self._is_online, self._process = is_online, process
        self.uses_network = is_online
        self.follows_changes = not is_online
        self._run: Any = None
        self._folder = Path()
        self._superseded: list[Path] = []

    def open(self, run: Run) -> Held:
        if self._run is not None:
            self._run.finish()
        track, folder = run.track, run.folder / "wandb"
        folder.mkdir(exist_ok=True)  # else W&B falls back to a folder for temporary files
        self._superseded = [path for path in folder.glob(f"*run-*-{run.identity}") if not path.is_symlink()]
        self._run = wandb.init(
            mode="online" if self._is_online else "offline",
            dir=run.folder,
            id=run.identity,
            resume="allow" if self._is_online else None,
            project=track["project"] or os.environ.get("WANDB_PROJECT") or "serried",
            entity=track["entity"],
            group=track["group"],
            tags=track["tags"],
            notes=track["notes"],
            name=run.name,
            config={**run.config, "run_facts": run.facts},
            allow_val_change=True,
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=_INIT_SECONDS,
                x_service_wait=_SERVICE_SECONDS,
                finish_timeout=_FINISH_SECONDS,
                finish_timeout_raises=True,
                x_transaction_log_flush_interval=_FLUSH_SECONDS,  # what is not flushed is lost where W&B is killed
                # Of this process W&B would record the command, the code and the packages: they are not the run's.
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_save_requirements=False,
                x_disable_stats=self._process is None,
                **({} if self._process is None else {"x_stats_pid": self._process}),
            ),
        )
        self._folder = Path(self._run.dir).parent
        # Steps that come again after a restart or a rollback are points on this axis; W&B's own drops them.
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        if not self._run.resumed:
            return Held(-1, 0)
        there = self._run.summary
        return Held(int(there.get(_STEP, -1)), int(there.get("rollbacks", 0)))

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({_STEP: row.step, "_timestamp": row.time, **row.values})

    def caught_up(self) -> None:
        for folder in self._superseded:
            shutil.rmtree(folder, ignore_errors=True)

    def summarize(self, summary: Summary) -> None:
        self._run.summary.update(dict(summary))

    def close(self, summary: Summary) -> None:
        self._run.finish(exit_code=0 if summary["state"] in ("finished", "stopped") else 1)
        wandb.teardown()  # its service closes the file after it has answered, and only then ends

    def note(self) -> str:
        return f"W&B: {self._run.url}" if self._is_online else f"W&B, offline; {self._to_send()}"

    def _to_send(self) -> str:
        return f"to send them: wandb sync {self._folder}"
