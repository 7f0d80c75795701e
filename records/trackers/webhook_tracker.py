"""Tracker that posts to a webhook once, when the run ends or is interrupted."""

import json
import os
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from serried.records.goodput import goodput_of
from serried.records.run_folder import place_of
from serried.records.status import read_status
from serried.records.trackers.rows import Row, Run
from serried.runtime.process import host_name

_SECONDS = 20.0


class WebhookTracker:
    """Posts one JSON object: ``text``, which chat services show, and the values in it for other programs.

    Its address is a secret, so the config has the name of the environment variable that contains it.
    """

    last_step = -1

    def __init__(self, run: Run) -> None:
        """Raises ``KeyError`` if the environment variable has been removed."""
        self._variable = str(run.config["track"]["webhook"])
        self._url = os.environ[self._variable]
        self._run = run
        self._step = 0
        self.note = f"webhook: a message is posted to the address in {self._variable} when the run ends"

    def write(self, rows: Sequence[Row]) -> None:
        self._step = max([self._step, *(row.step for row in rows)])

    def close(self, summary: Mapping[str, Any]) -> None:
        """Post the end of the run. Raises ``OSError`` if the server does not accept it."""
        state, reason, step = summary["state"], summary.get("reason"), self._step
        status = read_status(self._run.folder)
        if state == "killed" and status is not None and status.state != "running":  # such as a run that hung
            state, reason, step = status.state, status.reason, max(step, status.step)
        goodput = goodput_of(self._run.folder)
        because = f": {reason}" if reason else ""
        text = f"serried run {self._run.name} {state} at step {step}{because} (goodput {goodput.line()})"
        values = {
            "text": text, "content": text, "run": self._run.name, "run_id": self._run.identity,
            "run_dir": place_of(self._run.folder), "host": host_name(), "state": state, "reason": reason, "step": step,
            "goodput": goodput.productive_share,
        }  # fmt: skip
        try:
            body, headers = json.dumps(values).encode(), {"Content-Type": "application/json"}
            request = urllib.request.Request(self._url, body, headers, method="POST")
            urllib.request.urlopen(request, timeout=_SECONDS).close()
        except Exception as error:  # the text of an error may contain the address
            code = getattr(error, "code", None)
            known = f"HTTP {code}" if code is not None else type(getattr(error, "reason", error)).__name__
            raise OSError(f"cannot post to the address in {self._variable}: {known}") from None
