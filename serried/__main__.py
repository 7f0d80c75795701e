"""``python -m serried``: the command ``serried``."""

import sys

from serried.cli import main

sys.exit(main())
