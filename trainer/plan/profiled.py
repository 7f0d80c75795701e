"""What ranks exchanged in the profiled steps of a run: how long it took, and how much of that computing hid."""

import gzip
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from serried.configs.plain_data import is_number, open_regular
from serried.records.run_folder import PROFILES

_TRACE = re.compile(r"steps-\d+-\d+-rank-0\.json\.gz")
_MOST_BYTES = 2**30
"""That are read of a trace."""
_MESSAGES = ("send", "recv", "gloo:send", "gloo:recv")
"""Of a pipeline, which waits for them in a phase of its own."""


class Exchanged(NamedTuple):
    """Collectives of rank 0, in seconds of a step."""

    steps: tuple[int, int]
    """First and last that were profiled."""
    seconds: float
    """While at least one was under way: those that wait for a rank that is late are long."""
    exposed: float
    """Of these, while nothing was computed."""


def exchanged(run: Path) -> Exchanged | None:
    """Return what the newest profile in the folder of a run shows; None: there is none that can be read."""
    found = [path for path in (run / PROFILES).glob("*.json.gz") if _TRACE.fullmatch(path.name)]
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            with open_regular(path) as raw, gzip.open(raw) as file:
                events = json.loads(file.read(_MOST_BYTES))["traceEvents"]
            first, last = (int(word) for word in path.name.split("-")[1:3])
            return Exchanged((first, last), *(each / (last - first + 1) for each in _seconds(events)))
        except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # of a run that was killed, or not ours
    return None


def _seconds(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the seconds of exchanges, and those of them in which nothing was computed."""
    timed = [event for event in events if is_number(event.get("dur")) and is_number(event.get("ts"))]
    kernels = [event for event in timed if event.get("cat") == "kernel"]
    marks = ("nccl", "gloo:")
    exchanges = [each for each in kernels or timed if each["name"].startswith(marks) and not _is_message(each)]
    # Work of a GPU is its kernels, of a CPU its operators.
    computes = [each for each in kernels or timed if not each["name"].startswith(marks)]
    computes = [each for each in computes if kernels or each["name"].startswith("aten::")]
    computing = _covered(computes)
    return _covered(exchanges) / 1e6, (_covered([*exchanges, *computes]) - computing) / 1e6


def _is_message(event: Mapping[str, Any]) -> bool:
    return event["name"] in _MESSAGES or event.get("args", {}).get("Collective name") in _MESSAGES


def _covered(events: Iterable[Mapping[str, Any]]) -> float:
    """Return how long at least one of ``events`` lasts, in microseconds."""
    covered, end = 0.0, -math.inf
    for began, ended in sorted((each["ts"], each["ts"] + each["dur"]) for each in events):
        covered += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return covered
