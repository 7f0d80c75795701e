"""Parallel layouts of several ranks on one GPU, through NCCL: losses, resuming, and host waits.

    python -m benchmarks.ranks_on_one_gpu                                # all rows, about four minutes on a GPU
    python -m benchmarks.ranks_on_one_gpu --rows 'ddp x2' 'hsdp 2x2'
    python -m benchmarks.ranks_on_one_gpu --device cpu --rows 'ddp x2'   # the same rows through Gloo

NCCL refuses two ranks on one GPU, unless NCCL_HOSTID gives each a host of its own. NVIDIA does not support this; the
ranks take turns on the GPU, and messages pass through the loopback network. So it shows whether the collectives are
right, and says nothing about speed. Run it before a first run on several GPUs.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.parity import CUTS, EXPERT_CUTS, MIXTURE, TIED, Curve, Cut, compare, run
from serried.verify.layouts import BOUNDS, Layout
from serried.verify.same_curve import refusing_waits, unwatched
from serried.verify.started_runs import Workplace
from testing.forked_runs import torchruns_variables
from testing.rank_pool import SPAWNED, Cluster
from testing.runs import write_text

WIDE_HEADS = ("model.head_dim=16",)
"""The narrowest that FlexAttention takes, which context ranks use on a GPU."""


class Row(NamedTuple):
    """A layout to train, and what is added to the small run of ``testing.runs``."""

    name: str
    precision: str = "fp32"
    more: tuple[str, ...] = ()


PARITY = (
    Row("ddp x2"), Row("fsdp x2 (ZeRO-3)"), Row("tensor x2"), Row("pipeline x2, 1f1b"),
    Row("context x2", more=WIDE_HEADS), Row("expert x2", more=MIXTURE), Row("hsdp 2x2"),
    Row("tensor x2 x fsdp x2"), Row("pipeline x2 x fsdp x2"), Row("context x2, ring", more=WIDE_HEADS),
    Row("fsdp x2 (ZeRO-3)", "bf16"), Row("fsdp x2 (ZeRO-3)", "fp16"), Row("ddp x2", "fp16"), Row("tensor x2", "bf16"),
    Row("pipeline x2, zbv"), Row("pipeline x2, 1f1b", more=TIED), Row("expert x2, sharded x2", more=MIXTURE),
    Row("fsdp x2, compiled"), Row("tensor x2, compiled"), Row("fsdp x2 (ZeRO-2)"),
)  # fmt: skip
RESUMED = (("fsdp x2 (ZeRO-3)", "tensor x2"), ("pipeline x2, 1f1b", "ddp x2"))
"""Layouts before and after a stop."""
UNWATCHED = (
    *((layout, 2) for layout in unwatched(2)),
    *((layout._replace(precision="bf16"), 2) for layout in unwatched(2) if layout.name == "fsdp x2"),
    *((layout, 4) for layout in unwatched(4) if layout.name == "hsdp 2x2"),
)
"""Layouts in which the host is not to wait for the GPU between log lines, and their ranks."""
_LIMIT_SECONDS = 60


def of_separate_hosts(rank: int, ranks: int, port: int, run: int = 1) -> dict[str, str]:
    """As ``torchruns_variables``, for ranks that NCCL takes for processes of different hosts."""
    own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "NCCL_HOSTID": f"host{rank}"}
    return torchruns_variables(rank, ranks, port, run) | own


def train_verified(argv: list[str]) -> int:
    """Train the task of ``serried verify`` on this rank. Returns the exit code."""
    import torch

    from serried.program import main as program
    from serried.task_class import declaration
    from serried.verify.training_script import VerifiedTask

    try:
        return program(argv, declaration(VerifiedTask))
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Checks:
    """Runs on a cluster, each compared with what it should give."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._text = write_text(folder / "text")
        self._cuts = {cut.name: cut for cut in (*EXPERT_CUTS, *CUTS)}
        self._references: dict[Row, Curve] = {}
        self._runs = 0

    def parity(self, row: Row) -> tuple[bool, str]:
        """Train ``row`` and the same in one process."""
        return self._against_one_process(row, self._train(row, self._cuts[row.name]))

    def resume(self, before: str, after: str) -> tuple[bool, str]:
        """Train three steps on one layout and three more on another."""
        run_dir = self._run_dir()
        self._train(Row(before), self._cuts[before], run_dir, steps=3)
        return self._against_one_process(Row(after), self._train(Row(after), self._cuts[after], run_dir))

    def host_waits(self, layout: Layout, ranks: int) -> tuple[bool, str]:
        """Train ``layout`` so that waiting of the host for the GPU is an error in some steps."""
        workplace = Workplace(self._folder, self._folder, ranks, "cuda")
        words = (*layout.overrides(workplace.global_batch), *refusing_waits(layout), f"run.dir={self._run_dir()}")
        answers = self._cluster.run(
            ranks, "benchmarks.ranks_on_one_gpu:train_verified", _LIMIT_SECONDS, argv=workplace.small_run(*words)
        )
        failed = [answer.printed for answer in answers if answer.value]
        return not failed, " ".join(failed)[-600:] or "none"

    def _run_dir(self) -> Path:
        self._runs += 1
        return self._folder / f"run-{self._runs}"

    def _train(self, row: Row, cut: Cut, run_dir: Path | None = None, steps: int = 6) -> Curve:
        accumulation = 1 if cut.processes == 1 else cut.accumulations[-1]
        more, run_dir = row.more, run_dir or self._run_dir()
        return run(self._cluster, cut, accumulation, row.precision, self._text, run_dir, *more, steps=steps)

    def _against_one_process(self, row: Row, curve: Curve) -> tuple[bool, str]:
        alone = row._replace(name="single")
        if alone not in self._references:
            self._references[alone] = self._train(alone, self._cuts["single"])
        found = compare(curve, self._references[alone])
        return found.loss < BOUNDS[row.precision], f"loss {found.loss:.1e}, gradient norm {found.grad_norm:.1e}"


def main() -> int:
    """Print a row for each check as it ends. Returns 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rows", nargs="+", help="names of layouts; default: all")
    options = parser.parse_args()
    if options.device == "cuda":
        os.environ |= {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
        cluster = Cluster(2, SPAWNED, of_separate_hosts)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        cluster = Cluster(2)
    failures = 0

    def show(what: str, name: str, check: Callable[[], tuple[bool, str]]) -> None:
        nonlocal failures
        if options.rows and name not in options.rows:
            return
        began = time.monotonic()
        try:
            is_right, found = check()
        except AssertionError as error:  # of the cluster: a rank failed or hangs
            lines = [line for line in str(error).splitlines() if "Error" in line or "not done" in line]
            is_right, found = False, "; ".join(lines[-3:])[-400:] or str(error)[-400:]
        failures += not is_right
        seconds = time.monotonic() - began
        print(f"| {what} | {name} | {'passed' if is_right else 'FAILED'} | {found} | {seconds:.0f} s |", flush=True)

    with tempfile.TemporaryDirectory(prefix="serried-one-gpu-") as folder:
        checks = Checks(cluster, Path(folder))
        print("| check | layout | result | found | took |\n|" + 5 * " --- |")
        for row in PARITY:
            added = [each for each in row.more if each not in WIDE_HEADS][:1]
            show(" ".join(["curve", row.precision, *added]), row.name, partial(checks.parity, row))
        for before, after in RESUMED:
            show("curve after a resume", f"{before} to {after}", partial(checks.resume, before, after))
        for layout, ranks in UNWATCHED if options.device == "cuda" else ():
            show(f"host waits {layout.precision}", layout.name, partial(checks.host_waits, layout, ranks))
    cluster.stop()
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
