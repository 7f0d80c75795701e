"""Explanation of an out-of-memory error: memory in use and overrides that help, without communication."""

import errno
import re
import resource
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from serried.configs.errors import TrainingFailed, UserError
from serried.configs.formats import size
from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.local_shards import local
from serried.planner.advice import Advice, Planned, advice
from serried.planner.memory_formula import FormulaMemory
from serried.planner.trace.cuda_allocator import has_expandable_segments
from serried.records.run_folder import PROFILES
from serried.runtime.accelerator import memory_bytes
from serried.runtime.session import Session
from serried.trainer.checkpoint.checkpoint_size import saved_bytes
from serried.trainer.memory.host_memory import limits, machine_bytes, tensor_bytes
from serried.trainer.metrics.meter import peak_memory_bytes
from serried.trainer.metrics.profiler import write_snapshot
from serried.trainer.monitor.heartbeat import SET_UP, Pulse
from serried.trainer.task import RunTask

_TEXTS = (  # messages of errors without their own class
    "can't allocate memory", "Cannot allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc", "CUDA driver error: out of memory", "Triton Error [CUDA]: out of memory",
    "Cuda failure 2 'out of memory'",  # from NCCL
)  # fmt: skip
_NO_THREAD = ("Resource temporarily unavailable", "can't start new thread")
"""Messages of errors if ``ulimit -v`` leaves no memory for the stack of a thread."""
_ASKED_FOR = re.compile(r"(?:[Tt]ried to allocate|Unable to allocate) ([\d.]+) ?(bytes|[KMGTPE]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}
_EXPANDABLE_SEGMENTS = "PYTORCH_ALLOC_CONF=expandable_segments:True"
_ADVICE_LINES = 6
_USABLE_SHARE = 0.9
_FRAGMENTED_SHARE = 0.05


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error`` or its cause is out of memory on the device or the host."""
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    texts = _TEXTS + (_NO_THREAD if is_limited else ())
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in texts):
            return True
        error = error.__cause__
    return False


def explained(
    error: BaseException,
    config: RunConfig,
    task: RunTask,
    session: Session,
    pulse: Pulse,
    optimizer: torch.optim.Optimizer | None,
) -> BaseException:
    """Return ``error``, or for an out-of-memory error a ``TrainingFailed`` that lists memory in use and overrides that
    help.

    This is not a collective call, because other ranks may be inside one. ``optimizer`` is None before it is created.
    """
    if isinstance(error, UserError | TrainingFailed) or not is_out_of_memory(error):
        return error
    stage, step = pulse.phases.now, pulse.now.step
    where = stage if stage == SET_UP or not step else f"{stage} of step {step}"
    try:
        usage = _measure(session.device)
    except Exception:  # the device cannot answer; the error itself is still reported
        return error
    lines = [
        f"rank {session.rank} on {session.host()} ran out of memory in {where}: {_asked_for(error)}{usage.free_text}"
    ]
    with suppress(Exception):  # a failure here must not hide the error
        planned = Planned(config, task, session.world_size, session.device.type)
        lines += [f"  {line}" for line in _holdings(planned.memory, _held(optimizer), usage)]
        for number, advice in enumerate(_advice(planned, stage, usage, _asked_bytes(error))):
            lines.append(f"  {'' if number else 'try':<9}  {advice}")
    if session.device.type == "cuda":
        path = config.run.dir / PROFILES / f"out-of-memory-rank-{session.rank}.json.gz"
        with suppress(Exception):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_snapshot(path, session.device)
            history = "" if config.profile.memory else "; profile.memory=true adds the stack of each allocation"
            lines.append(f"  {'snapshot':<9}  {path}{history}")
    return TrainingFailed("\n".join(lines))


# measured memory ------------------------------------------------------------------------------------------------------


class _Usage(NamedTuple):
    """Measured memory in bytes."""

    allocated: int
    """Bytes of this process's tensors on a GPU; on a CPU its peak resident memory."""
    reserved_free: int
    """Bytes that torch's allocator reserves without using them for a tensor."""
    others: int | None
    """Bytes used by other processes; None if unknown, as on a CPU."""
    capacity: int
    """Bytes that tensors of this process could use."""
    free_text: str


def _measure(device: torch.device) -> _Usage:
    if device.type != "cpu":
        free, total = memory_bytes(device)
        allocated, reserved = torch.accelerator.memory_allocated(device), torch.accelerator.memory_reserved(device)
        others = max(0, total - free - reserved)
        return _Usage(
            allocated, reserved - allocated, others, total - others, f"{size(free)} of the GPU's {size(total)} are free"
        )
    resident = peak_memory_bytes(device)[0]
    total, available = machine_bytes()
    text = f"{size(available)} of the machine's {size(total)} are free"
    text += "".join(f", and {whose} {size(limit)}" for whose, limit in limits().items())
    return _Usage(resident, 0, None, tensor_bytes(resident), text)


def _asked_bytes(error: BaseException | None) -> int:
    """Return the number of bytes in the failed allocation; 0 if unknown."""
    while error is not None:
        if found := _ASKED_FOR.search(str(error)):
            return int(float(found[1]) * _UNITS[found[2]])
        error = error.__cause__
    return 0


def _asked_for(error: BaseException) -> str:
    asked = _asked_bytes(error)
    return f"could not allocate {size(asked)}; " if asked else ""


# memory in use --------------------------------------------------------------------------------------------------------


def _held(optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Return the bytes of this rank's tensors that exist on its device between steps, by kind."""
    if optimizer is None:
        return {}
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    state = [
        value for parameter in parameters for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and value.device == parameter.device
    ]  # fmt: skip
    kinds = {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer state": state,
    }
    return {kind: sum(local(tensor).nbytes for tensor in tensors) for kind, tensors in kinds.items()}


def _holdings(planned: FormulaMemory, held: dict[str, int], usage: _Usage) -> list[str]:
    """Return lines on the memory used by this run, and on the use of the full GPU."""
    if held:
        parts = [f"{kind} {size(number)}" for kind, number in held.items() if number]
    else:  # not all of these tensors are allocated yet, so use the planned sizes
        parts = [
            f"parameters {size(planned.parameters)}", f"gradients {size(planned.gradients)}",
            f"optimizer state {size(planned.optimizer_state)}",
        ]  # fmt: skip
    if planned.gathered:
        parts.append(f"gathered up to {size(planned.gathered)}")
    on_device = usage.others is not None
    needed = f"a micro-batch needs about {size(planned.activations)}"
    if held:
        rest = max(0, usage.allocated - sum(held.values()) - planned.gathered)
        parts.append(f"activations{'' if on_device else ', libraries'} and the rest {size(rest)} ({needed})")
    else:
        parts.append(f"activations: {needed}")
    lines = [f"{'holds' if held else 'needs':<9}  {', '.join(parts)}"]
    if usage.others is not None:
        lines.append(
            f"{'device':<9}  {size(usage.allocated)} in tensors, {size(usage.reserved_free)} reserved by the allocator "
            f"but unused, {size(usage.others)} used by other processes and the driver"
        )
    return lines


# overrides that help --------------------------------------------------------------------------------------------------


def _advice(planned: Planned, stage: str, usage: _Usage, asked: int) -> list[str]:
    """Return one line for each override, sorted by saved bytes. Overrides that keep the numerics come first."""
    config, more = planned.config, []
    if usage.others is None and config.checkpoint.mode == "async" and stage != SET_UP:
        copy = saved_bytes(config, planned.model, planned.plan) // planned.world_size
        more.append(Advice("checkpoint.mode=sync", copy, " while a checkpoint is written"))
    found = advice(planned, stage, _USABLE_SHARE * usage.capacity, more)
    lines = [f"{advised.override:<42} saves about {size(advised.saved)}{advised.note}" for advised in found]
    if usage.reserved_free > max(asked, _FRAGMENTED_SHARE * usage.capacity) and not has_expandable_segments():
        lines.insert(0, f"{_EXPANDABLE_SEGMENTS:<42} uses up to {size(usage.reserved_free)} of fragmented free memory")
    return lines[:_ADVICE_LINES]
