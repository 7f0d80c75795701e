"""MLflow: a tracking server, a database or a folder. https://mlflow.org/docs/latest/ml/tracking"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.update(MLFLOW_DISABLE_TELEMETRY="true")  # it looks up a host as it is imported
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")  # seconds; a try later begins anew
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder is what the user asked for

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from serried.configs.trackers import is_address
from serried.records.trackers.tracker import Held, Row, Run, Summary, flat

_IDENTITY = "tracker_run_id"
_METRICS_AT_A_TIME = 1000
_PARAMETERS_AT_A_TIME = 100
_LONGEST_VALUE = 5000
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "killed": "KILLED"}
_OF_EACH_ROW = ("train/lr", "spike/loss_limit")
"""Each row of a step has the one, and that of a spike between them the other; those of evaluations are told by name."""


class MlflowTracker:
    """One run of MLflow, found again by its tag ``tracker_run_id``.

    Points cannot be taken back there. So a start goes on in the run that is there if that has the history of
    ``metrics.jsonl`` so far; else it writes the whole history into a new run and deletes the one before.
    """

    follows_changes = True

    def __init__(self, uri: str) -> None:
        self.uses_network = is_address(uri)
        self._uri = uri
        self._client = MlflowClient(tracking_uri=uri)
        self._run_id = ""
        self._superseded: list[str] = []

    def open(self, run: Run) -> Held:
        track = run.track
        name = track["project"] or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "serried"
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        parameters = {key: _text(value) for key, value in flat({**run.config, "run_facts": run.facts}).items()}
        runs = self._client.search_runs([experiment], f"tags.{_IDENTITY} = '{run.identity}'")
        for each in runs:
            has = self._last_step(each, run, parameters)
            if has is not None:
                self._run_id = each.info.run_id
                self._client.update_run(self._run_id, status="RUNNING")
                self._superseded = [other.info.run_id for other in runs if other.info.run_id != self._run_id]
                return Held(has, run.rollbacks)
        self._superseded = [each.info.run_id for each in runs]
        tags = {_IDENTITY: run.identity, **dict.fromkeys(track["tags"], "true")}
        tags |= {key: track[key] for key in ("group",) if track[key]}
        tags |= {"mlflow.note.content": track["notes"]} if track["notes"] else {}
        self._run_id = self._client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        params = [Param(key, value) for key, value in parameters.items()]
        for begin in range(0, len(params), _PARAMETERS_AT_A_TIME):
            self._client.log_batch(self._run_id, params=params[begin : begin + _PARAMETERS_AT_A_TIME])
        return Held(-1, run.rollbacks)

    def _last_step(self, found: Any, run: Run, parameters: Mapping[str, str]) -> int | None:
        """The last step that a run there has; None: it is not the beginning of this one."""
        if found.data.params != parameters:
            return None
        keys = [key for key in found.data.metrics if key in _OF_EACH_ROW or key.startswith("validation/")]
        points = [point for key in keys for point in self._client.get_metric_history(found.info.run_id, key)]
        last = max(points, key=lambda point: point.step, default=None)
        if last is None:
            return -1
        there = max((point for point in points if point.key == "train/lr"), key=lambda point: point.step, default=None)
        time = None if there is None else run.time_of(there.step)
        return last.step if there and time and _milliseconds(time) == there.timestamp else None

    def write(self, rows: Sequence[Row]) -> None:
        batch: list[Metric] = []
        for row in rows:
            points = [Metric(key, float(value), _milliseconds(row.time), row.step) for key, value in row.values.items()]
            if len(batch) + len(points) > _METRICS_AT_A_TIME:
                self._client.log_batch(self._run_id, metrics=batch)
                batch = []
            batch += points
        if batch:
            self._client.log_batch(self._run_id, metrics=batch)

    def caught_up(self) -> None:
        for run_id in self._superseded:
            self._client.delete_run(run_id)
        self._superseded = []

    def summarize(self, summary: Summary) -> None:
        tags = [RunTag(f"summary.{key}", _text(value)) for key, value in summary.items()]
        self._client.log_batch(self._run_id, tags=tags)

    def close(self, summary: Summary) -> None:
        self._client.set_terminated(self._run_id, status=_STATUS[summary["state"]])

    def note(self) -> str:
        return f"MLflow: {self._uri}, run {self._run_id}"


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _text(value: Any) -> str:
    return ("null" if value is None else str(value))[:_LONGEST_VALUE]
