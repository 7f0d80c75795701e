"""The page of one run or of several: their records as curves, in one HTML file that needs nothing else."""

from trainer.page.page import write_report

__all__ = ["write_report"]
