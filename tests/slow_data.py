"""``train.py`` on a slow disk, slower for rank 1: ``torchrun ... -m tests.slow_data KEY=VALUE ...``."""

import os
import sys
import time
from typing import Any

import serried.trainer.loader
from serried.program import main
from serried.runtime.ending import leave

_read_batch = serried.trainer.loader.read_batch


def read_batch(*arguments: Any) -> Any:
    time.sleep(0.15 if os.environ.get("RANK") == "1" else 0.05)
    return _read_batch(*arguments)


if __name__ == "__main__":
    serried.trainer.loader.read_batch = read_batch
    leave(main(sys.argv[1:]))
