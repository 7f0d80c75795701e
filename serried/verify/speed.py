"""Measurements of training speed, memory compared with the plan, and checkpoint speed."""

import json
import os
import shutil
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from serried.configs.formats import short, size
from serried.verify.check import Bounds, Case, Found
from serried.verify.started_runs import RunFailed, Workplace, events_of, newest_checkpoint, steps_of

_LIMIT_SECONDS = 600.0
_ON_A_CPU = ("recipe=tiny", "parallel=fsdp", "trainer.steps=12", "trainer.log_every=3", "profile.steps=[11,12]")
_ON_GPUS = (
    "recipe=llama1b", "data=stdlib", "data.sequence_length=8192", "trainer.steps=20", "trainer.log_every=5",
    "trainer.compile=true", "profile.steps=[19,20]",
)  # fmt: skip
_MEMORY_BOUND = 0.2
_NEEDED_BYTES = 40 * 2**30
"""Disk space for the checkpoints of two runs of ``recipe=llama1b``."""
_CHUNK_BYTES = 8 * 2**20


def speed(workplace: Workplace, bounds: Bounds) -> list[Case]:
    """Training speed of a language model."""
    shared = "" if workplace.is_on_gpus else "processes of one CPU share its cores"
    alone = "" if workplace.ranks > 1 else "there is only one process"
    silent = "" if workplace.ranks > 1 else "one process does not communicate"
    full = _no_room(workplace)
    return [
        Case("training", partial(_training, workplace, bounds), full),
        Case("against one device", partial(_scaling, workplace), shared or alone or full),
        Case("exposed communication", partial(_exposed, workplace), silent or full),
    ]


def memory(workplace: Workplace, _: Bounds) -> list[Case]:
    """Peak memory compared with ``serried plan``."""
    why = _no_room(workplace) if workplace.is_on_gpus else "on a CPU, the memory of a process includes its libraries"
    return [Case("against the plan", partial(_planned, workplace), why)]


def checkpoint(workplace: Workplace, _: Bounds) -> list[Case]:
    """Write and read speed of checkpoints."""
    return [
        Case("write", partial(_written, workplace), _no_room(workplace)),
        Case("read", partial(_read, workplace), _no_room(workplace)),
    ]


def _no_room(workplace: Workplace) -> str:
    free = shutil.disk_usage(workplace.folder).free
    if not workplace.is_on_gpus or free > _NEEDED_BYTES:
        return ""
    return f"needs {size(_NEEDED_BYTES)} of disk space, but only {size(free)} are free; use folder=FOLDER"


def measured_run(workplace: Workplace, ranks: int) -> list[str]:
    """Return the overrides of the measured run."""
    samples, micro_batch = (2, "auto") if workplace.is_on_gpus else (4, "4")
    words = [*(_ON_GPUS if workplace.is_on_gpus else _ON_A_CPU)]
    words += ["trainer.eval_every=0", "trainer.sample_tokens=0", "checkpoint.every=0"]
    words += [f"trainer.micro_batch={micro_batch}", f"trainer.global_batch={samples * ranks}"]
    words += [f"data.cache_dir={workplace.folder / 'cache'}"]
    return words if workplace.is_on_gpus else [*words, "data=text", f"data.path={workplace.text}"]


def _run(workplace: Workplace, processes: int | None = None) -> Path:
    """Return the folder of the measured run, on ``processes`` or all devices."""
    ranks, limit = processes or workplace.ranks, _LIMIT_SECONDS
    work = partial(
        workplace.program, *measured_run(workplace, ranks), processes=processes, limit_seconds=limit
    )  # fmt: skip
    return workplace.once(f"the measured run on {ranks}", work)


def _rates(run: Path) -> tuple[float, float | None]:
    """Return the medians of tokens per second and MFU over the log lines after the first.

    MFU is None if the peak of the device is unknown.
    """
    steps = [step for step in steps_of(run)[1:] if step.get("tokens_per_second")]
    if not steps:
        raise RunFailed("a run recorded no speed")
    shares = [step["mfu"] for step in steps if step.get("mfu") is not None]
    rate = statistics.median(step["tokens_per_second"] for step in steps)
    return rate, statistics.median(shares) if shares else None


def _training(workplace: Workplace, bounds: Bounds) -> Found:
    rate, mfu = _rates(_run(workplace))
    required = [
        *((f"at least {short(least)} tokens/s",) if (least := bounds.least_tokens_per_second) else ()),
        *((f"MFU at least {bounds.least_mfu:.0%}",) if bounds.least_mfu else ()),
    ]
    is_right = rate >= (bounds.least_tokens_per_second or 0) and (mfu or 0) >= (bounds.least_mfu or 0)
    figure = f"{short(rate)} tokens/s, MFU {'unknown' if mfu is None else f'{mfu:.1%}'}"
    values = {"tokens_per_second": rate, "tokens_per_second_per_device": rate / workplace.ranks, "mfu": mfu}
    return Found(is_right, figure, ", ".join(required), values)


def _scaling(workplace: Workplace) -> Found:
    alone, together = _rates(_run(workplace, 1))[0], _rates(_run(workplace))[0]
    share = together / workplace.ranks / alone
    return Found(
        True, f"{share:.1%} of the speed of a single device, per device", "",
        {"share": share, "tokens_per_second_of_one": alone},
    )  # fmt: skip


def _compared(workplace: Workplace) -> dict[str, Any]:
    """Return the output of ``serried plan compare`` for the measured run."""
    run = _run(workplace)

    def compare() -> dict[str, Any]:
        code, printed = workplace.command("-m", "serried", "plan", "compare", str(run), "json=true")
        try:
            found = json.loads(printed.strip().splitlines()[-1])
            return {"plan": found["plan"], "run": found["run"]}
        except (ValueError, IndexError, KeyError, TypeError):
            raise RunFailed(f"serried plan compare ended with exit code {code}: {printed.strip()[-300:]}") from None

    return workplace.once("serried plan compare", compare)


def _exposed(workplace: Workplace) -> Found:
    ran = _compared(workplace)["run"]
    if not ran["exchanged"]:
        raise RunFailed("a run left no readable profile")
    seconds, exposed = ran["exchanged"]["seconds"], ran["exchanged"]["exposed"]
    share = exposed / ran["step_seconds"] if ran["step_seconds"] else 0.0
    figure = (
        f"{share:.1%} of a step, of {seconds / ran['step_seconds']:.1%} in total" if ran["step_seconds"] else "unknown"
    )
    values = {"share": share, "exposed_seconds": exposed, "exchange_seconds": seconds, "step": ran["step_seconds"]}
    return Found(True, figure, "", values)


def _planned(workplace: Workplace) -> Found:
    found = _compared(workplace)
    planned, measured = found["plan"]["memory"]["bytes"], found["run"]["memory_bytes"]
    if not measured:
        raise RunFailed("a run recorded no memory")
    error = planned / measured - 1
    return Found(
        abs(error) < _MEMORY_BOUND, f"planned {size(planned)}, allocated {size(measured)}: {error:+.1%}",
        f"within {_MEMORY_BOUND:.0%}",
        {"planned_bytes": planned, "measured_bytes": measured, "reserved_bytes": found["run"]["reserved_bytes"]},
    )  # fmt: skip


def _written(workplace: Workplace) -> Found:
    saved = events_of(_run(workplace), "checkpoint")
    if not saved:
        raise RunFailed("a run saved no checkpoint")
    nbytes, seconds = saved[-1]["bytes"], max(saved[-1]["seconds"], 1e-9)
    figure = f"{size(nbytes)} in {seconds:.2f} s: {size(nbytes / seconds)}/s"
    values = {"bytes": nbytes, "seconds": seconds, "stall_seconds": saved[-1]["stall_seconds"]}
    return Found(True, f"{figure}; training waited {saved[-1]['stall_seconds']:.2f} s", "", values)


def _read(workplace: Workplace) -> Found:
    folder = newest_checkpoint(_run(workplace))
    nbytes, started = 0, time.perf_counter()
    for path in folder.iterdir():
        nbytes += _read_from_disk(path)
    seconds = max(time.perf_counter() - started, 1e-9)
    return Found(
        True, f"{size(nbytes)} in {seconds:.2f} s: {size(nbytes / seconds)}/s by one process", "",
        {"bytes": nbytes, "seconds": seconds},
    )  # fmt: skip


def _read_from_disk(path: Path) -> int:
    """Read a file, bypassing the page cache if the system supports it. Return its size in bytes."""
    nbytes = 0
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := file.read(_CHUNK_BYTES):
            nbytes += len(chunk)
    return nbytes
