"""Run the checks of ``serried verify`` one after the other, and write the report."""

import json
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serried.configs.formats import columns, duration
from serried.records.files import write_atomically
from serried.verify.check import Bounds, Case, Check, Found
from serried.verify.faults import faults
from serried.verify.node import anonymous, preflight
from serried.verify.same_curve import determinism, host_waits, parity, resume
from serried.verify.speed import checkpoint, memory, speed
from serried.verify.started_runs import RunFailed, Workplace

FORMAT = 1
"""Version of the report format. Existing keys keep their name and meaning."""
CHECKS = tuple(
    Check(check.__name__, (check.__doc__ or "").strip().rstrip(".").replace("``", ""), check)
    for check in (preflight, parity, determinism, host_waits, resume, faults, speed, memory, checkpoint)
)
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_TAIL_LINES = 40
_FIGURE_WIDTH = 76


@dataclass(frozen=True)
class Row:
    """One row of the report."""

    check: str
    name: str
    result: str
    """``passed``, ``failed`` or ``skipped``."""
    figure: str
    """Measurement or observation, or the reason for skipping."""
    bound: str = ""
    """Limit of the figure. If empty, the figure is reported but not checked."""
    values: Mapping[str, float | int | str | None] = field(default_factory=dict)
    """Values of the figure and the bound, by name. The names depend on the check."""
    seconds: float = 0.0
    log: str = ""
    """Name of the log file with the output of the runs."""
    log_tail: Sequence[str] = ()
    """Last lines of the log file, if the case failed."""


@dataclass
class Report:
    """Results of all checks, as written to ``out``."""

    device: str
    """``cpu``, ``cuda`` or another value of ``launch.device``."""
    ranks: int
    """Number of processes per run."""
    started: str
    """Start time in UTC."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    is_interrupted: bool = False
    seconds: float = 0.0

    @property
    def result(self) -> str:
        if any(row.result == FAILED for row in self.rows):
            return FAILED
        return "interrupted" if self.is_interrupted else PASSED

    def as_data(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "format": FORMAT, "result": self.result, "started": self.started, "seconds": round(self.seconds, 1),
            "device": self.device, "ranks": self.ranks, "machine": dict(self.machine),
            "rows": [asdict(row) for row in self.rows],
        }  # fmt: skip


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table of ``rows``."""
    shown = [("check", "", "result", "figure", "bound", "log")]
    for row in rows:
        figure = row.figure if len(row.figure) <= _FIGURE_WIDTH else f"{row.figure[: _FIGURE_WIDTH - 3]}..."
        shown.append((row.check, row.name, row.result.upper() if row.result == FAILED else row.result, figure,
                      row.bound, row.log))  # fmt: skip
    return columns(shown)


def summary(report: Report) -> str:
    """Return the summary line below the table."""
    counts = {result: sum(row.result == result for row in report.rows) for result in (PASSED, FAILED, SKIPPED)}
    counted = ", ".join(f"{count} {result}" for result, count in counts.items() if count)
    return f"{report.result:<10} {counted or 'nothing was done'}; {duration(report.seconds)}"


def verify(
    workplace: Workplace, checks: Sequence[Check], bounds: Bounds, out: Path, say: Callable[[str], Any]
) -> Report:
    """Run ``checks``, and write the report to ``out`` after each case. Ends early on ``KeyboardInterrupt``."""
    began = time.monotonic()
    report = Report(workplace.device, workplace.ranks, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    clean = anonymous(workplace.folder, workplace.logs, workplace.logs.parent)

    def write() -> None:
        report.seconds = time.monotonic() - began
        write_atomically(out, json.dumps(report.as_data(), indent=1) + "\n")

    try:
        report.machine = _machine(clean)
        write()
        cases = [(check.name, case) for check in checks for case in check.cases(workplace, bounds)]
        for number, (check, case) in enumerate(cases, start=1):
            row = _row(workplace, check, case, clean)
            say(f"{number:>3}/{len(cases)}  {row.result:<7}  {check}: {case.name}  ({duration(row.seconds)})")
            report.rows.append(row)
            write()
    except KeyboardInterrupt:
        report.is_interrupted = True
        write()
    return report


def _row(workplace: Workplace, check: str, case: Case, clean: Callable[[str], str]) -> Row:
    """Run a case. An unexpected exception is a failed row too, with its traceback in the log."""
    if case.skipped:
        return Row(check, case.name, SKIPPED, case.skipped)
    log = workplace.log = workplace.logs / f"{re.sub('[^a-z0-9_]+', '-', f'{check} {case.name}'.lower())}.log"
    log.touch()
    began = time.monotonic()
    try:
        found = case.work()
    except RunFailed as failure:
        found = Found(False, str(failure))
    except Exception as error:
        found = Found(False, f"{type(error).__name__}: {error}".splitlines()[0])
        with log.open("a", encoding="utf-8") as file:
            file.write(traceback.format_exc())
    tail = [] if found.is_right else log.read_text("utf-8", "replace").splitlines()[-_TAIL_LINES:]
    return Row(
        check, case.name, PASSED if found.is_right else FAILED, clean(found.figure), found.bound,
        {key: clean(value) if isinstance(value, str) else value for key, value in found.values.items()},
        round(time.monotonic() - began, 1), log.name, [clean(line) for line in tail],
    )  # fmt: skip


def _machine(clean: Callable[[str], str]) -> dict[str, Any]:
    """Return the description of the machine. A separate process collects it, so that this one does not initialize
    CUDA."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "serried.verify.node"], capture_output=True, text=True, timeout=300, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"unknown": type(error).__name__}
    return found | {"topology": [clean(line) for line in found["topology"]]}
