"""A rank for the tests: a process that takes one task after another, so that tests do not wait for interpreters.

It reads tasks as JSON lines from standard input and answers with JSON lines on the standard output it was started with.
While a task runs, its prints go to the file that the task names.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives the tests, however they end
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    import torch.distributed  # noqa: F401  paid for once, while the tests are being collected

    answers.write(json.dumps({"ready": os.getpid()}) + "\n")
    for line in sys.stdin:
        task = json.loads(line)
        answer = run(task)
        answers.write(json.dumps(answer) + "\n")


def run(task: dict[str, Any]) -> dict[str, Any]:
    for key in _TORCHRUN:
        os.environ.pop(key, None)
    os.environ |= task["environment"]
    with Path(task["output"]).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            module, _, name = task["function"].partition(":")
            return {"value": getattr(importlib.import_module(module), name)(**task["arguments"])}
        except BaseException:
            return {"error": traceback.format_exc()}
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


if __name__ == "__main__":
    main()
