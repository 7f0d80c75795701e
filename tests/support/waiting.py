"""``train.py`` whose third step waits for a signal: ``torchrun ... -m tests.support.waiting KEY=VALUE ...``."""

import sys
import time
from typing import Any

from serried.program import main
from serried.runtime.exit import leave
from serried.trainer.loop import Loop

_train = Loop._train


def train(self: Loop, step: int, batches: list[Any]) -> None:
    deadline = time.monotonic() + 60
    while step == 3 and self._context.session.signals.received is None and time.monotonic() < deadline:
        time.sleep(0.005)
    _train(self, step, batches)


if __name__ == "__main__":
    Loop._train = train  # type: ignore[method-assign]
    leave(main(sys.argv[1:]))
