"""MLflow: a tracking server, a database or a folder. https://mlflow.org/docs/latest/ml/tracking"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # otherwise the import looks up a host
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")  # seconds
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the user asked for a folder

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from serried.configs.plain_data import flatten
from serried.records.trackers.rows import Row, Run

_STEP = "step"  # a metric that every row has
_METRICS_AT_A_TIME = 1000
_PARAMETERS_AT_A_TIME = 100
_LONGEST_VALUE = 5000
_NOT_IN_KEYS = re.compile(r"[^\w\-. :/]")  # MLflow refuses these
_STATUS = {"finished": "FINISHED", "failed": "FAILED"}


class MlflowTracker:
    """A run of MLflow, found again by its tags.

    It receives the steps after its last one. Points cannot be removed, so after a rollback the whole history is
    written into a new run and the previous one is deleted.
    """

    last_step = -1

    def __init__(self, run: Run) -> None:
        track, rollbacks = run.config["track"], str(len(run.rollbacks))
        self._client = client = MlflowClient(tracking_uri=track["mlflow"])
        name = track["project"] or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "serried"
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)
        existing = client.search_runs([experiment], f"tags.tracker_run_id = '{run.identity}'")
        kept = next(
            (existing_run for existing_run in existing if existing_run.data.tags.get("rollbacks") == rollbacks), None
        )
        if kept is None:
            tags = {"tracker_run_id": run.identity, "rollbacks": rollbacks, **dict.fromkeys(track["tags"], "true")}
            tags |= {"group": track["group"]} if track["group"] else {}
            tags |= {"mlflow.note.content": track["notes"]} if track["notes"] else {}
            self._run_id = client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
            values = flatten({**run.config, "run_facts": run.facts})
            for params in _chunks([Param(key, _text(value)) for key, value in values.items()], _PARAMETERS_AT_A_TIME):
                client.log_batch(self._run_id, params=params)
        else:
            self._run_id = kept.info.run_id
            client.update_run(self._run_id, status="RUNNING")
            self.last_step = max((point.step for point in client.get_metric_history(self._run_id, _STEP)), default=-1)
        self.note = f"MLflow: {track['mlflow']}, run {self._run_id}"
        for existing_run in existing:
            if existing_run is not kept:
                client.delete_run(existing_run.info.run_id)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._write_files(row)
        points = [
            Metric(_NOT_IN_KEYS.sub("_", key), float(value), round(row.time * 1000), row.step)
            for row in rows
            for key, value in (*row.values.items(), (_STEP, row.step))  # the step last: then the row is complete
        ]
        for metrics in _chunks(points, _METRICS_AT_A_TIME):
            self._client.log_batch(self._run_id, metrics=metrics)

    def _write_files(self, row: Row) -> None:
        """Write texts and images as artifacts."""
        for key, text in row.texts.items():
            self._client.log_text(self._run_id, text, f"{_folder(key)}/step-{row.step:08}.txt")
        for key, paths in row.images.items():
            for path in paths:
                self._client.log_artifact(self._run_id, str(path), f"{_folder(key)}/step-{row.step:08}")

    def close(self, summary: Mapping[str, Any]) -> None:
        tags = [RunTag(f"summary.{key}", _text(value)) for key, value in summary.items()]
        self._client.log_batch(self._run_id, tags=tags)
        self._client.set_terminated(self._run_id, status=_STATUS.get(summary["state"], "KILLED"))


def _chunks(values: list[Any], size: int) -> Iterator[list[Any]]:
    return (values[first : first + size] for first in range(0, len(values), size))


def _folder(key: str) -> str:
    return re.sub(r"[^\w\-/]", "_", key)


def _text(value: Any) -> str:
    return ("null" if value is None else str(value))[:_LONGEST_VALUE]
