"""Report of one or several runs: their records as curves, in one self-contained HTML file."""

from collections.abc import Sequence
from pathlib import Path


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Write the report of the runs in these folders, in any state, to the file ``out``."""
    from serried.records.report import (
        page,  # imports numpy, so only commands that write a report import it
    )

    page.write_report(run_dirs, out)
