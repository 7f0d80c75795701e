"""Section ``slurm``: the Slurm job that a run is submitted as."""

import math
import re
import shlex
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from serried.configs.schema.fields import PathText, PositiveCount, Section

_Word = Annotated[str, Field(pattern=r"""^[^\s'"\\]+$""")]
MOST_SIGNAL_SECONDS = 65535
"""Largest number of seconds that sbatch's ``--signal`` accepts."""
_SIGNAL_SECONDS = 120


class SlurmSection(Section):
    """Job that ``launch=slurm`` and ``serried submit`` submit to Slurm. Null uses the default of the cluster."""

    partition: _Word | None = None
    """Partition, or several separated by commas, quoted."""
    account: _Word | None = None
    """Account to charge."""
    qos: _Word | None = None
    """Quality of service."""
    reservation: _Word | None = None
    """Reservation to run in."""
    time_minutes: PositiveCount | None = None
    """Time limit of one start, in minutes; with ``requeue`` a run may take several starts."""
    gpus_per_node: PositiveCount | None = None
    """GPUs on each node; also sets ``launch.processes``."""
    gpu_type: _Word | None = None
    """Type of these GPUs, such as ``a100``, on clusters with several types."""
    cpus_per_node: PositiveCount | None = None
    """CPU cores on each node."""
    memory: _Word | None = None
    """Memory on each node in sbatch's format, such as ``64G``."""
    constraint: _Word | None = None
    """Required node features."""
    exclude: _Word | None = None
    """Nodes to exclude, as ``serried preflight`` prints them."""
    dependency: _Word | None = None
    """Jobs to wait for, such as ``afterok:123``."""
    array_concurrency: PositiveCount | None = None
    """Maximum number of runs of a sweep (``-m``) at a time; all when null."""
    options: str | None = None
    """Additional options of sbatch, as in a shell: ``--mail-user=me@example.org --exclusive``."""
    srun_options: str | None = None
    """Options of the srun that starts the processes of a node, as in a shell, such as Pyxis's
    ``--container-image=train.sqsh --container-mounts=/data``."""
    modules: str | None = None
    """Environment modules to load, separated by spaces."""
    setup: str | None = None
    """Shell commands to run on the first node before training; their exports reach all nodes: ``source /opt/env.sh;
    export NCCL_DEBUG=INFO``."""
    container: str | None = None
    """Command prefix that runs a program in a container: ``apptainer exec --nv image.sif``."""
    python: PathText | None = None
    """Python interpreter on the nodes; null: the interpreter that submits the job."""
    interface: _Word | None = None
    """Network interface for Gloo and NCCL, such as ``ib0``; chosen automatically when null."""
    requeue: bool = True
    """Requeue a stopped run (time limit, preemption), to resume. Failed runs are not requeued."""
    signal_seconds: Annotated[PositiveCount, Field(le=MOST_SIGNAL_SECONDS)] | None = None
    """Seconds before the time limit at which Slurm asks the run to save and stop. Null: 120, or the planned time
    to stop and save if that is known and longer; at most half of ``time_minutes``."""
    dry_run: bool = False
    """Print the script and stop."""

    def _mistakes(self) -> Iterator[str]:
        if self.memory and not re.fullmatch("[0-9]+[KMGT]?B?", self.memory, re.IGNORECASE):
            yield f"slurm.memory={self.memory} is not a memory size that sbatch accepts; e.g. slurm.memory=64G"
        if self.gpu_type and ":" in self.gpu_type:
            kind, _, number = self.gpu_type.partition(":")
            yield f"slurm.gpu_type={self.gpu_type}: use slurm.gpu_type={kind} slurm.gpus_per_node={number}"
        elif self.gpu_type and self.gpus_per_node is None:
            yield f"slurm.gpu_type={self.gpu_type} needs the number of GPUs per node; e.g. slurm.gpus_per_node=8"
        yield from _wrong_options(self.options)
        yield from _wrong_srun_options(self.srun_options)
        limit = self.time_minutes and self.time_minutes * 60
        if limit and self.signal_seconds and self.signal_seconds >= limit:
            yield (
                f"slurm.signal_seconds={self.signal_seconds} is not below slurm.time_minutes={self.time_minutes} "
                f"(= {limit} s): the run would be stopped as it starts; use slurm.signal_seconds={max(1, limit // 4)}"
            )

    def signals_before(self, needed_seconds: float = 0.0) -> int:
        """Return ``signal_seconds``; if that is null, a default that leaves ``needed_seconds`` for stopping."""
        if self.signal_seconds is not None:
            return self.signal_seconds
        most = min(30 * self.time_minutes, MOST_SIGNAL_SECONDS) if self.time_minutes else MOST_SIGNAL_SECONDS
        return min(max(_SIGNAL_SECONDS, math.ceil(needed_seconds)), most)


_KEYS_OF_SBATCH = {
    "job-name": "run.name", "output": "run.dir", "nodes": "launch.nodes", "gpus-per-node": "slurm.gpus_per_node",
    "gres": "slurm.gpus_per_node", "cpus-per-task": "slurm.cpus_per_node", "mem": "slurm.memory",
    "time": "slurm.time_minutes", "signal": "slurm.signal_seconds", "array": "slurm.array_concurrency",
    "no-requeue": "slurm.requeue",
    **{name: f"slurm.{name}" for name in (
        "partition", "account", "qos", "reservation", "constraint", "exclude", "dependency", "requeue",
    )},
}  # fmt: skip
"""Options of sbatch that are set by a key."""
_NO_JOB_OF_OURS = (
    "help", "ntasks", "ntasks-per-node", "open-mode", "parsable", "test-only", "usage", "version", "wait", "wrap",
)  # fmt: skip
"""Options that would make sbatch run something else, or print something other than the job id."""


_SET_BY_OUR_SRUN = (
    "nodes", "ntasks", "ntasks-per-node", "nodelist", "cpus-per-task", "kill-on-bad-exit", "output", "open-mode",
    "multi-prog",
)  # fmt: skip
"""Options of srun that the batch script sets, or that would start something else."""


def _wrong_srun_options(options: str | None) -> Iterator[str]:
    """Yield a sentence for each mistake in ``slurm.srun_options``."""
    words, mistakes = _options_in("slurm.srun_options", options, "--container-image=FILE")
    yield from mistakes
    for name in (word.partition("=")[0] for word in words):
        if name.removeprefix("--") in _SET_BY_OUR_SRUN:
            yield f"slurm.srun_options: {name} is set by the batch script; leave it out"


def _options_in(key: str, options: str | None, example: str) -> tuple[list[str], list[str]]:
    """Return the words of ``options`` of the form --name=value or --name, and a sentence for each other word."""
    try:
        words = shlex.split(options or "")
    except ValueError as error:
        return [], [f"{key}={options} cannot be split into words: {error}; e.g. {key}={example}"]
    right = [word for word in words if re.fullmatch("--[a-z][a-z-]*(=[^\x00-\x1f\x7f]*)?", word)]
    wrong = [word for word in words if word not in right]
    return right, [f"{key}: {word!r} is not of the form --name=value or --name; e.g. {key}={example}" for word in wrong]


def _wrong_options(options: str | None) -> Iterator[str]:
    """Yield a sentence for each mistake in ``slurm.options``."""
    words, mistakes = _options_in("slurm.options", options, "--exclusive")
    yield from mistakes
    for word in words:
        name = word.partition("=")[0].removeprefix("--")
        if name in _KEYS_OF_SBATCH and (name != "gres" or word.startswith("--gres=gpu")):
            yield f"slurm.options: --{name} is set by {_KEYS_OF_SBATCH[name]}; use that key"
        elif name in _NO_JOB_OF_OURS:
            yield f"slurm.options: --{name} would keep serried from starting or finding the job; leave it out"
