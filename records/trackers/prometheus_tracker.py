"""Prometheus: a page to scrape, or a file for node_exporter's textfile collector. https://prometheus.io/docs/"""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server, write_to_textfile

from serried.configs.addresses import host_and_port
from serried.records.goodput import goodput_of
from serried.records.trackers.rows import Row, Run

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_GOODPUT_SECONDS = 30.0
"""Minimum time between two updates of the goodput, for which all records are read."""
_MOST_SHARE = 100
"""Reading records takes at most one part in so many of the time."""


class PrometheusTracker:
    """Gauges with the newest value of each metric. There is no history, so restarts and rollbacks need no care."""

    last_step = -1

    def __init__(self, run: Run) -> None:
        """Raises ``OSError`` if the port is in use or the file cannot be written."""
        target = str(run.config["track"]["prometheus"])
        self._registry = CollectorRegistry()
        self._labels = {"run": run.name, "run_id": run.identity}
        self._gauges: dict[str, Gauge] = {}
        self._folder = run.folder
        self._goodput_after = 0.0
        self._file: Path | None = None
        if (address := host_and_port(target)) is not None:
            host, port = address
            try:
                start_http_server(port, addr=host, registry=self._registry)
            except OSError as error:
                raise OSError(f"cannot listen at port {port} of {host}: {error.strerror}") from None
            self.note = f"Prometheus: http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
        else:
            self._file = Path(target).expanduser()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self.note = f"Prometheus: {self._file}"
        self._set("up", 1.0)
        self._write()

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in row.values.items():
                self._set(name, float(value))
            self._set("step", float(row.step))
            self._set("last_record_timestamp_seconds", row.time)
        if time.monotonic() >= self._goodput_after:
            began = time.monotonic()
            self._set_goodput()
            ended = time.monotonic()
            self._goodput_after = ended + max(_GOODPUT_SECONDS, _MOST_SHARE * (ended - began))
        self._write()

    def close(self, _: Mapping[str, Any]) -> None:
        self._set_goodput()
        self._set("up", 0.0)
        self._write()

    def _set_goodput(self) -> None:
        found = goodput_of(self._folder)
        self._set("goodput_ratio", found.productive_share)
        for part, seconds in found.seconds.items():
            self._set("goodput_seconds", seconds, part=part)

    def _set(self, name: str, value: float, **labels: str) -> None:
        labels |= self._labels
        name = _NOT_IN_NAMES.sub("_", f"serried_{name}")
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, f"{name} of the run", [*labels], registry=self._registry)
        self._gauges[name].labels(**labels).set(value)

    def _write(self) -> None:
        if self._file is not None:
            write_to_textfile(str(self._file), self._registry)  # atomically
