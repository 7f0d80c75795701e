"""A rank process for tests. It runs one task after another, so that tests do not wait for new interpreters."""

import faulthandler
import importlib
import json
import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from testing.forked_runs import set_aside, settle, torchruns_variables


def serve(pipe: Connection) -> None:
    """Read tasks and answer them. The output of a task goes to the file named in the task."""
    settle()
    faulthandler.enable()  # prints a traceback to the task's file after a crash
    pipe.send(json.dumps({"ready": os.getpid()}))
    while True:
        try:
            task = json.loads(pipe.recv())
        except EOFError:
            return
        pipe.send(json.dumps(run(task)))


def run(task: dict[str, Any]) -> dict[str, Any]:
    for key in torchruns_variables(0, 1, 0):
        os.environ.pop(key, None)
    os.environ |= task["environment"]
    set_aside()
    torch.default_generator.manual_seed(1)  # otherwise the random draws of a task depend on earlier tasks
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
