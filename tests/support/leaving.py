"""Training whose rank 1 gets its signal before its first step: ``torchrun -m tests.support.leaving key=value``.

Rank 0 is in its first step by then, or on its way there.
"""

import sys
from unittest.mock import patch

from serried.configs.errors import StopRequested
from serried.program import main
from serried.runtime.exit import leave
from serried.trainer.trainer import Trainer

_run = Trainer.run


def run_unless_asked(self: Trainer) -> int:
    """As rank 1 of those that were asked to stop."""
    if self.context.session.rank == 1:
        raise StopRequested("SIGTERM")
    return _run(self)


if __name__ == "__main__":
    with patch.object(Trainer, "run", run_unless_asked):
        leave(main(sys.argv[1:]))
