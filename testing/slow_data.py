"""``train.py`` with slow reads, slowest on rank 1: ``torchrun ... -m testing.slow_data KEY=VALUE ...``."""

import os
import sys
import time
from typing import Any

from serried.program import main
from serried.runtime.exit import leave
from serried.trainer.data.loader import Reader

_read = Reader.read


def read(*arguments: Any) -> Any:
    time.sleep(0.15 if os.environ.get("RANK") == "1" else 0.05)
    return _read(*arguments)


if __name__ == "__main__":
    Reader.read = read  # type: ignore[method-assign, assignment]
    leave(main(sys.argv[1:]))
