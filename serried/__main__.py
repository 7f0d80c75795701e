"""Entry point of ``python -m serried``, the same as the command ``serried``."""

from serried.cli import main

main()
