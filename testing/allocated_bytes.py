"""Measured memory and communication of a step on this rank."""

import json
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from serried.configs.compose import compose
from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.mesh import gradient_accumulation, resolve_layout
from serried.parallel.step_phases import Phases
from serried.recipes.text.causal_lm import CausalLM
from serried.runtime.session import Session, open_session
from serried.trainer.model import build_model, sharded
from serried.trainer.optim.optimizer import model_optimizer
from serried.trainer.precision import LOW_DTYPES
from serried.trainer.training_state import train_step
from testing.wire_bytes import Wire


def allocated_and_sent(argv: list[str], path: str) -> tuple[int, dict[str, int]]:
    """Measure the peak memory of a step on this rank, and the bytes that it sends.

    Returns:
        The smallest peak of several steps in bytes, from the events of torch's allocator, and the bytes sent by
        operation.
    """
    config = compose(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences two lines of torch's profiler
    with open_session(config.launch) as session:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step = a_step(config, session)
            for number in range(4):
                with GlooHasFreed(), record_function(f"step {number}"):
                    step()
        with Wire() as wire:
            step()
        file = Path(path) / f"{session.rank}.json"
    spans, sizes = spans_and_sizes(profiled, file)
    steps = [span for name, span in spans.items() if re.fullmatch("step [1-3]", name)]
    return min(max(size for at, size in sizes if first <= at <= last) for first, last in steps), dict(wire.bytes)


class GlooHasFreed(TorchDispatchMode):
    """Dispatch mode that waits after each collective until Gloo's threads are idle and have freed their copies.

    On a loaded machine they free them long after the collective has finished.
    """

    def __init__(self) -> None:
        super().__init__()
        tasks = Path("/proc/self/task").glob("*/stat")
        self._threads = [task for task in tasks if "(pt_gloo_runloop)" in _read(task)]
        self._may_hold = bool(self._threads)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        deadline, looks_idle = time.monotonic() + 1, 0
        while self._may_hold and looks_idle < 2 and time.monotonic() < deadline:
            time.sleep(1e-4)  # also lets threads run that wait for the GIL and look idle
            looks_idle = 0 if any(") R " in _read(thread) for thread in self._threads) else looks_idle + 1
        self._may_hold = bool(self._threads) and "c10d" in function.namespace
        return function(*args, **(kwargs or {}))


def _read(stat: Path) -> str:
    """Read the state of a thread. Empty if it has ended; threads of an earlier process group may end at any time."""
    try:
        return stat.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def a_step(config: RunConfig, session: Session) -> Callable[[], object]:
    """Build the model and optimizer of ``config``. Return a function that trains one step."""
    task, layout = CausalLM(config), resolve_layout(config.parallel, session.world_size)
    model = build_model(config, task)
    repeated = model.blocks
    parallel = sharded(config, model, layout, session.device, task.initial_std, phases=Phases())
    optimizer = model_optimizer(
        parallel, config.optim, repeated, LOW_DTYPES[config.precision.name], config.trainer.seed
    )
    step = train_step(config, task, task.weight_per_sample(), parallel, optimizer, None)
    batches = [task.example_batch(config.trainer.micro_batch)] * gradient_accumulation(config.trainer, layout)
    return partial(step, batches, 1e-3, lambda: 0.0)


def spans_and_sizes(profiled: profile, file: Path) -> tuple[dict[str, tuple[float, float]], list[tuple[float, int]]]:
    """Return the start and end of each named span of a profile, and (time, bytes held by torch's allocator)."""
    profiled.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    spans = {each["name"]: (each["ts"], each["ts"] + each["dur"]) for each in events if "dur" in each}
    counts = sorted((each["ts"], each["args"]) for each in events if each["name"] == "[memory]")
    # The counter includes memory that was allocated during earlier profiles of this process and freed after them.
    before = int(counts[0][1]["Total Allocated"]) - int(counts[0][1]["Bytes"])
    return spans, [(at, int(counted["Total Allocated"]) - before) for at, counted in counts]
