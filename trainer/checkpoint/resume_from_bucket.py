"""Checkpoints of a run in a bucket that another run starts from: ``checkpoint.resume=s3://BUCKET/RUN``."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from serried.configs.bucket_paths import note_download
from serried.configs.bucket_urls import check_bucket_url
from serried.configs.errors import UserError
from serried.configs.schema.fields import scratch_folder
from serried.configs.schema.sections import RunConfig
from serried.records.files import make_scratch
from serried.records.head import CHECKPOINTS, Entry, is_attempt, read_head
from serried.records.object_store import open_store
from serried.records.store import StoreError, ended_by
from serried.runtime.session import Session
from serried.trainer.checkpoint.bucket_checkpoints import fetch_contents, open_on_all_nodes
from serried.trainer.checkpoint.retention import folder_name, step_of

_KEY = "checkpoint.resume"
_STEP = re.compile(r"(?:step[-_]?)?0*([0-9]{1,18})")
_CHECKPOINT = re.compile(rf"(.+)/{CHECKPOINTS}(?:/((?:step[-_]?)?[0-9]+(?:-[0-9]+-[0-9a-f]+)?))?")
_SHOWN = 4


class CheckpointsAtUrl:
    """Checkpoints that a URL in ``checkpoint.resume`` names. They are read by ranges, through a scratch folder."""

    def __init__(self, config: RunConfig, session: Session) -> None:
        self.url = check_bucket_url(config.checkpoint.resume, _KEY)
        """URL that was given, without a slash at its end."""
        self._run_url, self._name = split(self.url)
        self._is_own = self._run_url == config.run.url
        self._store = open_store(self._run_url, _KEY)
        self._session = session
        # Several runs on this node may start from the same checkpoint.
        place = config.run.url or config.run.dir.absolute()
        self._scratch = config.run.dir if self._is_own else scratch_folder(f"{self._run_url} for {place}")
        self.folder = self._scratch / CHECKPOINTS
        """Folder through which the checkpoints are read."""
        self._entries: Sequence[Entry] = ()

    def names(self) -> list[str]:
        """Return the names of the checkpoints to try, newest first. Called on rank 0.

        Raises ``UserError`` if there is none, and ``TrainingStopped`` if the store does not answer.
        """
        try:
            head = read_head(self._store)
        except StoreError as error:
            raise ended_by(error, f"cannot read {_KEY}={self.url}: {error}") from None
        if head is None:
            raise UserError(
                f"{_KEY}={self.url}: there is no run in {self._run_url}; use the URL of a run, the folder that "
                f"contains head.json, or model.path={self.url} for the weights of a model"
            )
        earlier = [] if self._is_own else [entry for run in head.earlier for entry in run.checkpoints]
        self._entries = chosen(head.checkpoints, earlier, self._name, self._run_url)
        return [folder_name(entry.step) for entry in reversed(self._entries)]

    def open(self, path: Path) -> str | None:
        """Make a checkpoint of another run readable on all nodes. Returns why it is damaged, else None. This is a
        collective call."""
        note_download(self.folder, f"{self._run_url}/{CHECKPOINTS}")
        self._session.once_per_node(partial(make_scratch, self._scratch))
        return open_on_all_nodes(self._store, path, self._session, lambda: fetch_contents(self._store, self._of(path)))

    def _of(self, path: Path) -> Entry:
        return next(entry for entry in self._entries if entry.step == step_of(path))


def split(url: str) -> tuple[str, str]:
    """Return the URL of the run that ``url`` names, and the last part of the URL of one of its checkpoints; empty if it
    names the run or its folder of checkpoints."""
    found = _CHECKPOINT.fullmatch(url)
    return (found[1], found[2] or "") if found else (url, "")


def chosen(checkpoints: Sequence[Entry], earlier: Sequence[Entry], name: str, run_url: str) -> Sequence[Entry]:
    """Return the checkpoints that ``name`` means, ordered by step: all for an empty name, else the checkpoint of a step
    (``300``, ``step-300`` or ``step-00000300``) or the one with this folder in the bucket.

    ``earlier``: checkpoints that were set aside, which only the name of their folder means. Raises ``UserError`` if
    there is none.
    """
    step = _STEP.fullmatch(name)
    if not name:
        found = checkpoints
    elif is_attempt(name):
        found = [entry for entry in (*checkpoints, *earlier) if entry.attempt == name]
    else:
        found = [entry for entry in checkpoints if step and entry.step == int(step[1])]
    if found:
        return found
    if not checkpoints:
        raise UserError(f"the run in {run_url} has no checkpoint; use {_KEY}=URL of another run")
    there = " or ".join(f"{_KEY}={run_url}/{CHECKPOINTS}/{folder_name(entry.step)}" for entry in checkpoints[-_SHOWN:])
    raise UserError(f"{_KEY}={run_url}/{CHECKPOINTS}/{name}: there is no such checkpoint; use {there}")
