"""Conversion of run records to the data of a report."""

import base64
import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serried.configs.addresses import masked
from serried.configs.plain_data import is_count, is_number
from serried.configs.schema.sections import DEFAULT_VALIDATION
from serried.records.files import write_atomically
from serried.records.report.html import html_page
from serried.records.report.run_records import Curve, Mark, Records, read_records
from serried.records.report.thinning import means, thinned
from serried.records.run_folder import is_png

_SCRIPTS = ("format", "specs", "charts", "marks", "sections", "page")
_POINTS = 60_000
"""Maximum number of points of all curves of a page, about 2 MB."""
_POINTS_OF_A_RUN = 50
"""Number of points that take as much space as the text about one run."""
_FEWEST_POINTS = 10_000
_WEIGHTS = {"loss": 4, "grad_norm": 2}
"""Relative number of points of curves by chart. Other charts have 1; readers look most closely at these two."""
_MOST_BUCKETS, _FEWEST_BUCKETS = 1500, 10
"""Maximum and minimum number of buckets of a curve of weight 1. If there are too many runs for the minimum, only their
main curves are drawn; if there are still too many, only the best runs are drawn."""
_MAIN_CURVES = (("loss", "training"), ("validation", DEFAULT_VALIDATION))
_TEXT_SHOWN = 4000
"""Maximum number of characters shown of a text that a callback logged."""
_IMAGE_BYTES = 4 * 2**20
"""Maximum size in bytes of all logged images on a page."""
_MARKS = 3000
"""Maximum number of marks of each kind on a page."""


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Write the report of the runs in ``run_dirs``, in this order, to the file ``out``, atomically.

    Run folders may be empty, or belong to a running or crashed run.
    """
    write_atomically(out, render([read_records(run_dir) for run_dir in run_dirs]))


def render(runs: Sequence[Records]) -> str:
    """Return the report of ``runs`` as HTML."""
    names = _names([Path(run.place) for run in runs])
    title = ", ".join(names) if len(names) <= 3 else f"{len(names)} runs"
    return html_page(title, _payload(runs, names), _SCRIPTS)


def _payload(runs: Sequence[Records], names: Sequence[str]) -> dict[str, Any]:
    curves, left_out = _curves_to_draw(runs)
    weight = sum(_WEIGHTS.get(chart, 1) for of_run in curves for chart, _ in of_run)
    buckets, marks = _points(runs) / 2 / max(weight, 1), _MARKS // max(len(runs), 1)
    configs = [run.config for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    differing = [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]
    environments = [
        {key: _counted(value) for key, value in run.environment.items() if value not in (None, [])} for run in runs
    ]
    shared = {
        key: value
        for key, value in (environments[0] if environments else {}).items()
        if all(environment.get(key) == value for environment in environments)
    }
    return {
        "written": time.time(),
        "runs": [
            {
                "name": name,
                "folder": run.place,
                **_summary(run),
                "texts": [
                    {"name": name, "step": step, "text": text[:_TEXT_SHOWN]} for name, (step, text) in run.texts.items()
                ],
                "images": _images(run, _IMAGE_BYTES // len(runs)),
                "starts": [_start(start, start is run.starts[-1]) for start in run.starts],
                "goodput": [_goodput_of_start(parts) for parts in run.goodput.starts],
                "environment": {key: value for key, value in environment.items() if key not in shared},
                **_drawn(run, of_run, buckets, marks if of_run else 0),
            }
            for run, name, environment, of_run in zip(runs, names, environments, curves, strict=True)
        ],
        "left_out": left_out,
        "environment": shared,
        "differences": {key: [_text(config.get(key)) for config in configs] for key in differing},
        "config": {key: _text(configs[0].get(key)) for key in keys if key not in differing},
    }


def _points(runs: Sequence[Records]) -> int:
    return max(_FEWEST_POINTS, _POINTS - _POINTS_OF_A_RUN * len(runs))


_Curves = dict[tuple[str, str], Curve]


def _curves_to_draw(runs: Sequence[Records]) -> tuple[list[_Curves], str]:
    """Return the curves of each run that fit on a page, and a sentence about curves that are left out."""
    most = _points(runs) // 2 // _FEWEST_BUCKETS  # largest total weight that fits

    def weight(of_runs: Iterable[_Curves]) -> int:
        return sum(_WEIGHTS.get(chart, 1) for curves in of_runs for chart, _ in curves)

    every = [run.curves for run in runs]
    if weight(every) <= most:
        return every, ""
    main = [{key: run.curves[key] for key in _MAIN_CURVES if key in run.curves} for run in runs]
    fitting = most // weight([dict.fromkeys(_MAIN_CURVES, Curve([], []))])
    best = sorted(range(len(runs)), key=lambda index: _rank(runs[index]))[:fitting]
    of_best = "" if weight(main) <= most else f" of the best {fitting} runs"
    drawn = [curves if not of_best or index in best else {} for index, curves in enumerate(main)]
    return drawn, f"Only the loss charts{of_best} are drawn for so many runs. A report of fewer runs has all charts."


def _rank(run: Records) -> tuple[float, float]:
    """Return a sort key, lower is better: validation loss, then loss; runs without validation come last."""
    best, last = _lowest(_of(run, "validation", DEFAULT_VALIDATION)), _at(_of(run, "loss", "training"), -1)
    return (best["value"] if best else math.inf, last["value"] if last else math.inf)


def _names(folders: Sequence[Path]) -> list[str]:
    """Return short, distinct names for ``folders``: the last part of the path, or more parts if several folders
    share it."""
    parts = [folder.absolute().parts for folder in folders]
    names = [folder[-1:] for folder in parts]
    for length in range(2, max(map(len, parts), default=0) + 1):
        names = [folder[-length:] if names.count(name) > 1 else name for folder, name in zip(parts, names, strict=True)]
    return [str(Path(*name)) for name in names]


def _summary(run: Records) -> dict[str, Any]:
    status, end = run.status, run.starts[-1]["end"] if run.starts else None
    state = status.state if status else (end or {}).get("state") or ("unknown" if run.starts else "not started")
    loss, validation = _of(run, "loss", "training"), _of(run, "validation", DEFAULT_VALIDATION)
    reason, planned = (status.reason if status else None) or (end or {}).get("reason"), run.config.get("trainer.steps")
    return {
        "state": str(state),
        "reason": str(reason) if reason else None,
        "step": max([status.step if status else 0, *run.steps[-1:]]),
        "steps": planned if is_count(planned) else None,
        "next": _next(run, state),
        "last_time": run.last_time,
        "seconds": run.elapsed_seconds,
        "loss": _at(loss, -1),
        "first_loss": _at(loss, 0),
        "best_validation": _lowest(validation),
        "validation": _at(validation, -1),
        **{name: _known(run.last.get(name)) for name in ("tokens", "samples")},
        "tokens_per_second": _median(_of(run, "throughput", "")),
        "unit": str(run.starts[-1].get("unit", "tokens")) if run.starts else "tokens",
        "mfu": _median(_of(run, "mfu", "")),
        "memory_bytes": max(_of(run, "memory", "peak").values, default=None),
        "data_share": run.waited_seconds / run.timed_seconds if run.timed_seconds else None,
        "eta_seconds": _known(run.last.get("eta_seconds")) if state == "running" else None,
        "parameters": _known(run.starts[-1].get("parameters")) if run.starts else None,
        "counts": {**run.counts, "undone": run.undone_lines},
        "sources": _sources(run),
        "metrics": _metrics(run),
        "logged": len(run.steps),
    }


def _next(run: Records, state: str) -> dict[str, str]:
    """Return the suggested next step: a text and, if there is one, a command."""
    folder = shlex.quote(run.place)
    saved = [mark.step for mark in run.marks if mark.kind == "checkpoint"]
    if state == "finished":
        return {
            "text": "Export the newest checkpoint as a Hugging Face model folder",
            "command": f"serried export run.dir={folder} out=FOLDER dtype=bf16",
        }
    if state == "running":
        return {"text": "Show the current state", "command": f"serried status run.dir={folder}"}
    if state == "stopped" and run.status and run.config.get("trainer.stop_at") == run.status.step:
        return {"text": "To resume, run the same command without trainer.stop_at, or with a higher value"}
    if state in ("stopped", "failed") and saved:
        return {"text": f"Run the same command to resume from the newest checkpoint (step {max(saved)})"}
    if state in ("stopped", "failed"):
        return {"text": "No checkpoint was saved; run the same command to start again from the beginning"}
    return {"text": "Run the same command to start it" if state == "not started" else "Run the same command to resume"}


def _metrics(run: Records) -> list[dict[str, Any]]:
    """Return the last value of each metric of the task: on the validation set if measured there, else in training."""
    names = sorted({chart for chart, _ in run.curves if chart.startswith("metric:")})
    found = []
    for chart in names:
        for part in (DEFAULT_VALIDATION, "training", "logged"):
            if (last := _at(_of(run, chart, part), -1)) is not None:
                found.append({"name": chart.removeprefix("metric:"), "set": part, **last})
                break
    return found


def _images(run: Records, left: int) -> list[dict[str, Any]]:
    """Return the last images of each name that fit in ``left`` bytes."""
    found: list[dict[str, Any]] = []
    for name, (step, paths) in run.images.items():
        sources = []
        for path in paths:
            with suppress(OSError):
                content = path.read_bytes()
                if is_png(content) and len(content) <= left:
                    left -= len(content)
                    sources.append(f"data:image/png;base64,{base64.b64encode(content).decode()}")
        if sources:
            found.append({"name": name, "step": step, "sources": sources})
    return found


def _sources(run: Records) -> list[dict[str, Any]]:
    """Return the tokens and validation loss of each source of a mixture."""
    losses = run.evaluated.get(DEFAULT_VALIDATION, {}).get("source_losses")
    tokens = {name: curve.values[-1] for (chart, name), curve in run.curves.items() if chart == "source_tokens"}
    by_name = losses if isinstance(losses, dict) else {}
    return [{"name": name, "tokens": count, "loss": _known(by_name.get(name))} for name, count in tokens.items()]


def _start(start: dict[str, Any], is_last: bool) -> dict[str, Any]:
    """Return the data of a start of the run for the page, including its hosts if it is the last start."""
    end = start["end"] or {}
    mesh = start.get("mesh")
    hosts = start.get("hosts")
    device = start.get("device")
    return {
        **{name: _known(start.get(name)) for name in ("first_step", "last_step", "seconds", "time", "world_size")},
        "mesh": {str(axis): degree for axis, degree in mesh.items() if is_count(degree)}
        if isinstance(mesh, dict)
        else {},
        "hosts": [str(host) for host in hosts] if isinstance(hosts, list) and is_last else [],
        "device": str(device) if device else None,
        "state": end.get("state"),
        "reason": end.get("reason"),
    }


def _goodput_of_start(parts: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each part of a start's wall-clock time, without parts that took no time."""
    return {name: round(seconds, 2) for name, seconds in parts.items() if seconds >= 0.005}


def _drawn(run: Records, curves: _Curves, points: float, most_marks: int) -> dict[str, Any]:
    """Return ``curves`` of ``run``, thinned to ``points`` buckets in a chart of weight 1, and some marks of each
    kind.

    ``x`` has a row for each step of any curve, and curves refer to these rows. Numbers that only grow are stored
    as differences, which takes a third of the space.
    """
    drawn = [(chart, name, *_thin(run, chart, curve, points)) for (chart, name), curve in sorted(curves.items())]
    marks = _first_of_each_kind(run.marks, most_marks)
    of_marks = np.array([mark.step for mark in marks], dtype=np.int64)
    of_curves = (steps for _, _, *points in drawn for steps, _ in points)
    rows = np.unique(np.concatenate([of_marks, *of_curves]))
    return {
        "x": {"step": _differences(rows), **_clocks(run, rows)},
        "curves": [
            {
                "chart": chart,
                "name": name,
                "at": _differences(np.searchsorted(rows, steps)),
                "y": _numbers(values),
                "mean_at": _differences(np.searchsorted(rows, mean_steps)),
                "mean_y": [float(f"{mean:.6g}") for mean in mean_values],
            }
            for chart, name, (steps, values), (mean_steps, mean_values) in drawn
        ],
        "marks": [
            {"kind": mark.kind, "at": int(np.searchsorted(rows, mark.step)), "text": mark.text} for mark in marks
        ],
    }


def _first_of_each_kind(marks: Sequence[Mark], most: int) -> list[Mark]:
    counts: Counter[str] = Counter()
    kept = []
    for mark in marks:
        counts[mark.kind] += 1
        if counts[mark.kind] <= most:
            kept.append(mark)
    return kept


_Points = tuple[NDArray[np.int64], NDArray[np.float64]]


def _thin(run: Records, chart: str, curve: Curve, points: float) -> tuple[_Points, _Points]:
    """Return the points to draw, and the points to smooth, which are empty if all values are drawn."""
    buckets = max(_FEWEST_BUCKETS, min(_MOST_BUCKETS, int(points * _WEIGHTS.get(chart, 1))))
    steps, values = np.array(curve.steps, dtype=np.int64), np.array(curve.values)
    # Stacked curves need equal steps: the steps at which their sum has spikes.
    parts = [other.values for (of, _), other in run.curves.items() if of == chart and other.steps == curve.steps]
    chosen = thinned(np.sum(parts, axis=0) if chart == "time_split" else values, buckets)
    if len(chosen) == len(values):
        return (steps, values), (steps[:0], values[:0])
    middle, mean = means(values, buckets)
    return (steps[chosen], values[chosen]), (steps[middle], mean)


def _clocks(run: Records, rows: NDArray[np.int64]) -> dict[str, Any]:
    """Return the tokens and milliseconds of training up to each step of ``rows``; None if no line records them."""

    def clock(recorded: Sequence[float], unit: float) -> list[int] | None:
        at = np.array(recorded)
        known = ~np.isnan(at)
        if not known.any():
            return None
        steps, values = np.array(run.steps)[known], np.maximum.accumulate(at[known])
        if steps[0] > 0 and len(steps) > 1 and not run.starts[0]["first_step"]:
            steps, values = np.append(0, steps), np.append(0.0, values)
        return _differences(np.round(np.interp(rows, steps, values) * unit).astype(np.int64))

    return {"tokens": clock(run.tokens, 1), "milliseconds": clock(run.seconds, 1000)}


def _differences(numbers: NDArray[Any]) -> list[int]:
    differences: list[int] = np.diff(numbers, prepend=0).tolist()
    return differences


def _numbers(values: Iterable[float]) -> list[float | int | None]:
    """Return values as recorded; null for non-finite ones."""
    return [None if math.isnan(value) else int(value) if value == int(value) else value for value in map(float, values)]


def _of(run: Records, chart: str, name: str) -> Curve:
    return run.curves.get((chart, name), Curve([], []))


def _at(curve: Curve, index: int) -> dict[str, Any] | None:
    """Return the first (index 0) or last (-1) finite value of ``curve``, with its step."""
    finite = [(step, value) for step, value in zip(curve.steps, curve.values, strict=True) if not math.isnan(value)]
    return {"step": finite[index][0], "value": finite[index][1]} if finite else None


def _lowest(curve: Curve) -> dict[str, Any] | None:
    finite = [(value, step) for step, value in zip(curve.steps, curve.values, strict=True) if not math.isnan(value)]
    return {"step": min(finite)[1], "value": min(finite)[0]} if finite else None


def _median(curve: Curve) -> float | None:
    return float(np.median(curve.values)) if curve.values else None


def _known(value: Any) -> float | None:
    return value if is_number(value) else None


def _counted(value: Any) -> str:
    """Return ``_text`` of a value. For a list, such as the GPUs, return each distinct entry with its count."""
    if not isinstance(value, list):
        return _text(value)
    each = [_text(entry) for entry in value]
    return ", ".join(f"{each.count(text)} × {text}" for text in dict.fromkeys(each))


def _text(value: Any) -> str:
    """Return a config value as typed on the command line, without the password of an address."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return masked(text)
