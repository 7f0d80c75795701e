"""The page of one run or of several: their records as curves, in one HTML file that needs nothing else."""

from collections.abc import Sequence
from pathlib import Path


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Write the page of the runs in these folders, which may be in any state, to the file ``out``.

    Raises:
        OSError: it cannot be written.
    """
    from serried.records.page import (
        page,  # numpy comes with it, which a command that writes no page should not wait for
    )

    page.write_report(run_dirs, out)
