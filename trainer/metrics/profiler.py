"""Profile of selected steps: a Chrome trace per rank, a table of the slowest operators, and GPU memory.

Profiling does not change the results of a step. If profiling fails, a warning is printed.
"""

import errno
import gc
import gzip
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from serried.configs.formats import size
from serried.configs.schema.sections import RunConfig
from serried.parallel.step_phases import BACKWARD, FORWARD, OPTIMIZER, Phases
from serried.records.files import replacing
from serried.records.run_folder import PROFILES
from serried.runtime.console import Console
from serried.runtime.session import Session
from serried.trainer.monitor.heartbeat import DATA, END, EVALUATE, LOG, SAVE, SET_UP, TRAIN
from serried.trainer.replica_check import GoBack

_ANNOTATIONS = {
    SET_UP: "set-up", DATA: "data", TRAIN: "copy to device", FORWARD: "forward", BACKWARD: "backward",
    OPTIMIZER: "optimizer", LOG: "log", EVALUATE: "evaluate", SAVE: "save", END: "end",
}  # fmt: skip
_STEP = "ProfilerStep"
_SHOWN_OPERATORS, _WRITTEN_OPERATORS = 8, 60
_NAME_WIDTH = 60
_COMPRESSION = 3
_HISTORY_EVENTS = 100_000


def remember_allocations(config: RunConfig, device: torch.device, console: Console) -> None:
    """Start recording the allocation history of the GPU, if ``profile.memory`` is set."""
    if config.profile.memory and device.type == "cuda":
        record_history()
    elif config.profile.memory and config.profile.steps is None:
        console.say(
            "WARNING    profile.memory=true alone records nothing on CPUs, whose allocator has no history; add "
            "'profile.steps=[FIRST,LAST]' for a trace with the allocations of these steps"
        )


class StepProfiler:
    """Profiler of the steps ``profile.steps`` on one rank, a context manager around the training loop.

    The step before the first profiled step is traced and discarded, so that the profiler's one-time work is not
    measured. If the first profiled step is the first trained step, the profiler is prepared before it.
    """

    def __init__(
        self,
        config: RunConfig,
        session: Session,
        console: Console,
        phases: Phases,
        pause: Callable[[float], None],
        *,
        first_step: int,
    ) -> None:
        """Prepare the profiler.

        Args:
            pause: Called with the seconds that profiling took, to exclude them from the step times.
            first_step: First step that is trained.
        """
        self._session = session
        self._console = console
        self._phases = phases
        self._pause = pause
        self._folder, self._with_memory = config.run.dir / PROFILES, config.profile.memory
        self._wanted = config.profile.steps
        self._profile: profile | None = None
        self._profiled: list[int] = []
        self._annotation: record_function | None = None
        if self._wanted is not None and self._wanted[1] < first_step:
            self._warn(f"the run resumes with step {first_step}, after these steps")
            self._wanted = None

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, GoBack):
            self._guard(self._end)
        else:  # not stopped: that would wait for the device, which may wait for a rank that has ended
            self._listen(is_on=False)

    def begin(self, step: int) -> None:
        """Begin ``step``. Call this before the step waits for its data."""
        if self._wanted is None:
            return
        first, last = self._wanted
        if self._profile is not None:
            self._guard(self._end if step > last else partial(self._next, step))
        elif first - 1 <= step <= last:
            self._guard(partial(self._start, step))

    def _guard(self, work: Callable[[], None]) -> None:
        """Call ``work``. If it fails, there is no profile, and training continues."""
        started = time.perf_counter()
        try:
            work()
        except Exception as error:
            told = getattr(error, "strerror", None) or (str(error).splitlines() or [repr(error)])[0]
            self._warn(f"{told}. Training continues")
            self._listen(is_on=False)
            self._profile, self._wanted = None, None
        self._pause(time.perf_counter() - started)

    def _warn(self, reason: str) -> None:
        assert self._wanted is not None
        first, last = self._wanted
        self._console.say(f"WARNING    no profile of profile.steps=[{first},{last}]: {reason}")

    def _start(self, step: int) -> None:
        assert self._wanted is not None
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise Kineto prints two lines on each rank
        first = max(step, self._wanted[0])
        activities = [ProfilerActivity.CPU]
        if self._session.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=lambda step: ProfilerAction.WARMUP if step < first else ProfilerAction.RECORD,
            profile_memory=self._with_memory,
            acc_events=True,
        )
        self._profile.step_num = first - 1  # so that the trace has the run's step numbers
        self._profiled = []
        self._profile.start()
        if step == first:
            self._next(step)

    def _next(self, step: int) -> None:
        assert self._profile is not None
        self._listen(is_on=False)
        self._profile.step()
        self._profiled.append(step)
        self._listen(is_on=True)

    def _listen(self, *, is_on: bool) -> None:
        """Start or stop marking the phases of steps in the trace."""
        self._phases.listener = self._annotate if is_on else None
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None

    def _annotate(self, name: str) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        self._annotation = record_function(_ANNOTATIONS.get(name, name))
        self._annotation.__enter__()

    def _end(self) -> None:
        if self._profile is None:
            return
        self._listen(is_on=False)
        ended, self._profile = self._profile, None
        ended.stop()
        if not self._profiled:  # the run ended before the first profiled step
            return
        self._write(ended)
        self._wanted = None
        del ended
        gc.collect()  # its events form reference cycles, and garbage collection does not run between steps

    def _write(self, ended: profile) -> None:
        first = self._profiled[0]
        last = self._profiled[-1]
        rank = self._session.rank
        name = f"steps-{first}-{last}-rank-{rank}"
        on_device = self._session.device.type == "cuda"
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"{name}.json.gz"
        _write_trace(ended, trace)
        events = ended.key_averages()
        sort_by = f"self_{'device' if on_device else 'cpu'}_time_total"
        table = events.table(sort_by=sort_by, row_limit=_WRITTEN_OPERATORS, max_name_column_width=_NAME_WIDTH)
        (self._folder / f"{name}.txt").write_text(f"{table}\n", "utf-8")
        for line in operator_table(list(events), self._profiled, on_device=on_device):
            self._console.say(line)
        self._console.say(
            f"           {self._folder}: {trace.name} ({size(trace.stat().st_size)}; opens in ui.perfetto.dev), "
            f"{name}.txt{', one pair per rank' if self._session.world_size > 1 else ''}"
        )
        if self._with_memory and on_device:
            snapshot = self._folder / f"memory-step-{last}-rank-{rank}.json.gz"
            write_snapshot(snapshot, self._session.device)
            self._console.say(f"           memory snapshot: {snapshot}")


def _write_trace(ended: profile, path: Path) -> None:
    """Write the trace to ``path`` atomically."""
    plain = path.with_name(f".{path.stem}")
    try:
        ended.export_chrome_trace(str(plain))
        if not plain.exists():  # torch does not report a failure
            raise OSError(errno.ENOSPC, f"torch cannot write the trace to {path.parent}: is the disk full?")
        with plain.open("rb") as file, replacing(path) as raw, gzip.open(raw, "wb", _COMPRESSION) as target:
            shutil.copyfileobj(file, target)
    finally:
        for left in (plain, plain.with_name(f"{plain.name}.tmp")):  # torch writes to the second, then renames it
            with suppress(OSError):
                left.unlink()


def record_history() -> None:
    """Start recording the stack of each GPU allocation. This costs about 2 microseconds per allocation."""
    # Private API without a public equivalent: torch's documentation of memory snapshots uses these two functions.
    # tests/runs/test_profile.py guards them.
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=_HISTORY_EVENTS)


def write_snapshot(path: Path, device: torch.device) -> None:
    """Write a memory snapshot of ``device`` (a GPU), with the history of allocations if it was recorded.

    torch dumps the same dictionary as a pickle, which this package never writes. docs/how-to/performance.md has the
    command that converts this JSON file for pytorch.org/memory_viz.
    """
    snapshot = torch.cuda.memory._snapshot(device)  # private: see record_history
    with replacing(path) as raw, gzip.open(raw, "wt", compresslevel=_COMPRESSION, encoding="utf-8") as file:
        json.dump(snapshot, file, default=str)


def operator_table(events: Sequence[Any], steps: Sequence[int], *, on_device: bool) -> list[str]:
    """Return the operators with the most self time and the shares of the phases on the host, in at most ten lines.

    ``events``: averages of the profiler over ``steps``. Times are per step, on the GPU if ``on_device``, otherwise on
    the CPU.
    """
    count = len(steps)
    named = {event.key: event.cpu_time_total / count for event in events if event.is_user_annotation}
    whole = next((total for name, total in named.items() if name.startswith(_STEP)), 0.0)
    shares = [
        f"{name} {named[name] / whole:.1%}" for name in _ANNOTATIONS.values() if named.get(name, 0.0) > 0.0005 * whole
    ]
    time_of = "self_device_time_total" if on_device else "self_cpu_time_total"
    operators = [event for event in events if event.device_type == DeviceType.CPU and not event.is_user_annotation]
    operators.sort(key=lambda event: getattr(event, time_of), reverse=True)
    total = sum(getattr(event, time_of) for event in operators)
    which = f"steps {steps[0]} to {steps[-1]}" if count > 1 else f"step {steps[0]}"
    lines = [
        f"profile    {which}, {whole / 1e3:.1f} ms each under the profiler; "
        f"{'the host: ' if on_device else ''}{', '.join(shares)}",
        f"  {'operator':<{_NAME_WIDTH}}  {'calls/step':>10}  {'GPU' if on_device else 'CPU':>6} ms/step  {'share':>6}",
    ]
    for event in operators[:_SHOWN_OPERATORS]:
        own = getattr(event, time_of)
        lines.append(
            f"  {event.key[:_NAME_WIDTH]:<{_NAME_WIDTH}}  {event.count / count:>10.6g}  {own / count / 1e3:>14.2f}  "
            f"{own / max(total, 1e-9):>6.1%}"
        )
    return lines
