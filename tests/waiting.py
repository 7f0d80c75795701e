"""``train.py`` whose third step waits for a signal: ``torchrun ... -m tests.waiting KEY=VALUE ...``."""

import sys
import time
from typing import Any

from serried.program import main
from serried.runtime.ending import leave
from serried.trainer.trainer import Trainer

_train = Trainer._train


def train(self: Trainer, step: int, batches: list[Any]) -> None:
    deadline = time.monotonic() + 60
    while step == 3 and self._session.signals.received is None and time.monotonic() < deadline:
        time.sleep(0.005)
    _train(self, step, batches)


if __name__ == "__main__":
    Trainer._train = train  # type: ignore[method-assign]
    leave(main(sys.argv[1:]))
