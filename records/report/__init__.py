"""The report of one or several runs: their records as curves, in one self-contained HTML file."""

from collections.abc import Sequence
from pathlib import Path


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Write the report of the runs in these folders, in any state, to the file ``out``."""
    from serried.records.report import (
        page,  # imports numpy, which a command that writes no report should not wait for
    )

    page.write_report(run_dirs, out)
