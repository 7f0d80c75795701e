"""Measurements of one process: its node, device and network. ``preflight`` evaluates them."""

import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from serried.runtime import accelerator
from serried.runtime.session import Session

_WRITE_BYTES = 64 * 2**20
_SHARED_MEMORY = Path("/dev/shm")
_DRIVER = Path("/proc/driver/nvidia/version")
_TIMED = 3
_CLOCK_ROUNDS = 5
_all_gather_whole: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch 2.13 has the first name and deprecates the second."""


def versions() -> dict[str, str | None]:
    """Return the versions that must be equal on all nodes."""
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and torch.version.cuda else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "driver": _driver(),
    }


def _driver() -> str | None:
    try:
        found = re.search(r"Module\s+([0-9.]+)", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def device(session: Session) -> dict[str, Any]:
    """Return the name and number of the node's devices, and the free share of the memory of this rank's device."""
    if session.device.type == "cpu":
        return {"name": platform.machine() or "cpu", "count": os.cpu_count() or 1, "free_share": 1.0}
    free, total = accelerator.memory_bytes(session.device)
    name = accelerator.device_name(session.device)
    return {"name": name, "count": accelerator.accelerator_count(), "free_share": free / total}


def matmul_flops(session: Session) -> float:
    """Return the best FLOP/s of a few large matrix products (bf16 on a GPU, fp32 on a CPU)."""
    size, dtype = (8192, torch.bfloat16) if session.device.type != "cpu" else (512, torch.float32)
    matrix = torch.full((size, size), 1 / size, dtype=dtype, device=session.device)
    seconds = min(_timed(session, lambda: torch.mm(matrix, matrix)) for _ in range(4 * _TIMED))
    return float(2 * size**3 / seconds)


def collectives(session: Session) -> dict[str, Any]:
    """Measure all-reduce and all-gather between all ranks. This is a collective call.

    Returns:
        ``reduce_bytes_per_second`` and ``gather_bytes_per_second``, the bus bandwidth as nccl-tests define it;
        ``is_reduce_wrong``; and ``gather_wrong``, the ranks whose data was wrong.
    """
    ranks = session.world_size
    count = min(2**24, 2**30 // ranks) if session.device.type != "cpu" else 2**20  # at most 4 GiB for many ranks
    mine = _pattern(session.rank, count, session.device)
    of_rank_0 = _pattern(0, count, session.device)
    gathered = mine.new_empty(ranks * count)  # one tensor: NCCL would gather a list into a second copy
    reduced = all_reduce(mine.clone())
    _all_gather_whole(gathered, mine)
    parts = gathered.split(count)
    found = {  # small integers, whose sums are exact in fp32
        "is_reduce_wrong": not torch.equal(reduced, ranks * of_rank_0 + sum(range(ranks))),
        "gather_wrong": [rank for rank, part in enumerate(parts) if not torch.equal(part, of_rank_0 + rank)],
    }
    nbytes = mine.nbytes * (ranks - 1) / ranks
    reduce_seconds = min(_timed(session, lambda: all_reduce(reduced.zero_())) for _ in range(_TIMED))
    gather_seconds = min(_timed(session, lambda: _all_gather_whole(gathered, mine)) for _ in range(_TIMED))
    return found | {
        "reduce_bytes_per_second": 2 * nbytes / reduce_seconds,
        "gather_bytes_per_second": nbytes * ranks / gather_seconds,
    }


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Sum ``tensor`` over all ranks, in place."""
    dist.all_reduce(tensor)
    return tensor


def _pattern(rank: int, count: int, device: torch.device) -> torch.Tensor:
    """Return a test pattern of integers: rank 0's pattern plus ``rank``."""
    return (torch.arange(count, device=device) % 1009 + rank).float()


def pairs_bytes_per_second(session: Session, members: list[int], device: torch.device) -> float | None:
    """Return the mean rate in bytes per second at which this rank exchanges tensors on ``device`` with each other
    member in turn; None for a rank that is not in ``members`` or is the only one. This is a collective call. A slow
    link lowers the rate of all pairs of one rank."""
    count = 2**24 if device.type != "cpu" else 2**20
    out, into = (torch.ones(count, device=device) for _ in range(2))
    rates = []
    for pairs in tournament(members):
        partner = next((b if a == session.rank else a for a, b in pairs if session.rank in (a, b)), None)
        if partner is not None:

            def exchange(partner: int = partner) -> None:
                # In one batch: with NCCL, two sends that each wait for the other rank's receive would deadlock.
                for work in dist.batch_isend_irecv(
                    [dist.P2POp(dist.isend, out, partner), dist.P2POp(dist.irecv, into, partner)]
                ):
                    work.wait()

            exchange()  # the first exchange opens the connection
            rates.append(2 * out.nbytes / min(_timed(session, exchange) for _ in range(_TIMED)))
        dist.barrier()
    return sum(rates) / len(rates) if rates else None


def tournament(members: list[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs, in which each member is paired once with each other member (circle method)."""
    circle: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(a, b) for a, b in met if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _timed(session: Session, work: Callable[[], Any]) -> float:
    def wait() -> None:
        accelerator.wait_for_device(session.device)

    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def clock_ahead_seconds(session: Session) -> float:
    """Return how far this machine's clock is ahead of rank 0's, in seconds; accurate to the time of a barrier. This is
    a collective call."""
    if session.world_size == 1:
        return 0.0
    found = []
    for _ in range(_CLOCK_ROUNDS):
        dist.barrier()
        times = [torch.zeros(1, dtype=torch.float64) for _ in range(session.world_size)]
        dist.all_gather(times, torch.tensor([time.time()], dtype=torch.float64))
        found.append(float(times[session.rank] - times[0]))
    return min(found, key=abs)


def unresolved(hosts: list[str]) -> list[str]:
    """Return the host names that do not resolve on this machine."""
    missing = []
    for host in sorted(set(hosts)):
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            missing.append(host)
    return missing


def open_files() -> int:
    """Return the number of files, including sockets, that this process may open."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if allowed == resource.RLIM_INFINITY else allowed


def shared_memory_bytes() -> int | None:
    """Return the size of ``/dev/shm``; None if it does not exist."""
    try:
        return shutil.disk_usage(_SHARED_MEMORY).total
    except OSError:
        return None


def disk(folder: Path) -> dict[str, Any]:
    """Return the free bytes, free inodes and write speed of the disk of ``folder`` (or of its nearest existing
    parent)."""
    there = existing(folder)
    stat = os.statvfs(there)
    return {
        "free_bytes": stat.f_bavail * stat.f_frsize,
        "free_inodes": stat.f_favail if stat.f_files else None,  # some file systems have no limit
        "write_bytes_per_second": _WRITE_BYTES / _write_seconds(there),
    }


def existing(folder: Path) -> Path:
    """Return ``folder``, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def _write_seconds(folder: Path) -> float:
    data = os.urandom(2**20)
    with NamedTemporaryFile(dir=folder, prefix=".preflight-") as file:
        started = time.perf_counter()
        for _ in range(_WRITE_BYTES // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - started


# rates of ``serried plan calibrate`` ---------------------------------------------------------------------------------

_EXCHANGED_BYTES = (2**14, 2**20, 2**24)
_ATTENTION = {"cpu": (4, 8, 512, 64), "gpu": (1, 32, 8192, 128)}
"""Batch size, heads, sequence length and head dim of the timed attention. On a GPU, a smaller one would mostly measure
the kernel launch."""
_SMALL = 300
"""Number of operations on a tiny tensor that are timed together."""


def device_name(session: Session) -> str:
    """Return the name of this rank's GPU, or the model of the CPU."""
    if session.device.type != "cpu":
        return accelerator.device_name(session.device)
    with suppress(OSError):
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        if found:
            return found[1].strip()
    return platform.machine() or "cpu"


def memory_bytes(session: Session) -> int:
    """Return the memory of this rank's GPU, or of the machine, in bytes."""
    if session.device.type != "cpu":
        return accelerator.memory_bytes(session.device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def product_seconds(session: Session, shape: tuple[int, int, int], precision: str) -> float:
    """Return the seconds of a matrix product of [m, k] and [k, n]."""
    m, n, k = shape
    a, b = (_random(session, precision, *size) for size in ((m, k), (k, n)))
    return _best(session, lambda: torch.mm(a, b))


def attention_flops(session: Session, precision: str) -> float:
    """Return the FLOP/s of causal attention, forward and backward, counted without the mask."""
    query, key, value = (
        _random(session, precision, *_ATTENTION["cpu" if session.device.type == "cpu" else "gpu"]).requires_grad_()
        for _ in range(3)
    )

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    return 14 * query.numel() * query.shape[-2] / _best(session, attend)


def copy_bytes_per_second(session: Session) -> float:
    """Return the bytes per second that an elementwise operation on large tensors reads and writes."""
    count = 2**26 if session.device.type != "cpu" else 2**21
    a, b, out = (torch.ones(count, device=session.device) for _ in range(3))
    return 3 * a.nbytes / _best(session, lambda: torch.mul(a, b, out=out))


def launch_seconds(session: Session) -> float:
    """Return the seconds of an operation on a tiny tensor."""
    small = torch.ones(8, device=session.device)
    return _best(session, lambda: [small * small for _ in range(_SMALL)]) / _SMALL


def group_of_node(session: Session) -> ProcessGroup:
    """Return the process group of the ranks of this node. This is a collective call."""
    each, count = session.local_world_size, session.world_size
    groups = [dist.new_group(list(range(first, first + each))) for first in range(0, count, each)]
    return groups[session.rank // each]


def exchange_rate(session: Session, group: ProcessGroup | None) -> dict[str, float]:
    """Return the bytes per second that each rank sends in all-gathers and reduce-scatters, and the seconds of one call.
    This is a collective call."""
    ranks = dist.get_world_size(group)
    points = []
    for size in _EXCHANGED_BYTES:
        part = torch.ones(size // 4, device=session.device)
        whole = torch.ones(ranks * (size // 4), device=session.device)
        gather = _best(session, partial(_all_gather_whole, whole, part, group=group))
        scatter = _best(session, partial(dist.reduce_scatter_tensor, part, whole, group=group))
        points.append(((ranks - 1) * size, (gather + scatter) / 2))
    (_, of_call), *_, (most, seconds) = points
    return {"bytes_per_second": most / max(seconds - of_call, 1e-9), "seconds": of_call}


def hidden_share(session: Session) -> float:
    """Return the share of an exchange that is hidden by simultaneous matrix products. This is a collective call."""
    is_gpu = session.device.type != "cpu"
    size, count = (8192, 2**26) if is_gpu else (512, 2**21)
    matrix = _random(session, "bf16" if is_gpu else "fp32", size, size)
    part = torch.ones(count, device=session.device)
    whole = torch.ones(count * session.world_size, device=session.device)

    def exchange(is_waited: bool = True) -> Any:
        work = _all_gather_whole(whole, part, async_op=True)
        return work.wait() if is_waited and work is not None else work

    once = _best(session, lambda: torch.mm(matrix, matrix))
    alone = _best(session, exchange)
    times = max(1, round(alone / once))

    def compute() -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    def both() -> None:
        work = exchange(is_waited=False)
        compute()
        work.wait()

    computing, together = _best(session, compute), _best(session, both)
    return min(1.0, max(0.0, (computing + alone - together) / min(computing, alone)))


def _random(session: Session, precision: str, *size: int) -> torch.Tensor:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.randn(size, device=session.device).to(dtype)


def _best(session: Session, work: Callable[[], Any]) -> float:
    """Return the shortest time of ``work``, which runs the same number of times on every rank."""
    _timed(session, work)
    return min(_timed(session, work) for _ in range(2 * _TIMED))
