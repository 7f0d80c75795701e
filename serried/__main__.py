"""``python -m serried``: the command ``serried``."""

from serried.cli import main

main()
