"""Training whose rank 1 gets its signal before its first step: ``torchrun -m tests.support.leaving key=value``.

Rank 0 is in its first step by then, or on its way there.
"""

import sys
from collections.abc import Generator
from unittest.mock import patch

from serried.configs.errors import StopRequested
from serried.program import main
from serried.runtime.exit import leave
from serried.trainer.trainer import Trainer

_steps = Trainer.steps


def steps_unless_asked(self: Trainer) -> Generator[int, None, None]:
    """As rank 1 of ranks that were asked to stop."""
    if self.context.session.rank == 1:
        raise StopRequested("SIGTERM")
    return _steps(self)


if __name__ == "__main__":
    with patch.object(Trainer, "steps", steps_unless_asked):
        leave(main(sys.argv[1:]))
