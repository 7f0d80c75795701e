"""Sections that do not affect the results of a run: launching, recovery, planning, profiling and tracking."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from serried.configs.addresses import has_password, host_and_port, is_address, without_password
from serried.configs.schema.fields import Count, LocalPath, Number, PositiveCount, Seconds, Section


def _unquoted_off(value: Any) -> Any:
    """Return ``off`` for false: YAML reads an unquoted ``off`` as false."""
    return "off" if value is False else value


class ProfileSection(Section):
    """Profiling of some steps: time by operator, and memory."""

    steps: tuple[Count, Count] | None = None
    """First and last step to profile, inclusive; null: none. Traces and a table of operators go to
    ``run.dir/profile``."""
    memory: bool = False
    """Record every allocation of the profiled steps. On a GPU also record the allocator's history from the start, for a
    snapshot after these steps and when memory runs out."""

    @field_validator("steps", mode="before")
    @classmethod
    def _not_one(cls, steps: object) -> object:
        if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
            raise ValueError(
                f"profile.steps={steps} is a single number; give the first and the last step: "
                f"'profile.steps=[{steps},{steps}]'"
            )
        return steps

    def _mistakes(self) -> Iterator[str]:
        first, last = self.steps or (1, 1)
        if min(first, last) < 1:
            yield f"profile.steps=[{first},{last}]: steps count from 1; e.g. 'profile.steps=[10,13]'"
        if first > last:
            yield (
                f"profile.steps=[{first},{last}]: the first step comes after the last; use "
                f"'profile.steps=[{last},{first}]'"
            )


class LaunchSection(Section):
    """Processes, how they are started, and timeouts."""

    name: Literal["torchrun", "local", "slurm", "kubernetes", "skypilot"] = "torchrun"
    """``torchrun`` (you start the processes), ``local`` (this command starts them here), ``slurm``, ``kubernetes``
    or ``skypilot`` (it submits a job)."""
    processes: Annotated[Count, Field(ge=1, le=10**5)] | None = None
    """Processes per node. With ``launch=torchrun``, torchrun decides. Null with ``launch=local``: one per GPU, or one
    without GPUs."""
    nodes: Annotated[Count, Field(ge=1, le=10**5)] | None = None
    """Number of nodes. With ``launch=torchrun``, torchrun decides. Null: one."""
    device: Literal["auto", "cpu", "cuda", "xpu", "npu"] = "auto"
    """``auto`` (the GPU if there is one), ``cpu``, ``cuda`` (NVIDIA, AMD), ``xpu`` (Intel) or ``npu`` (Ascend)."""
    threads: Annotated[Count, Field(ge=1, le=1024)] | None = None
    """Threads per process; null: ``OMP_NUM_THREADS`` if set, else the cores divided by the processes."""
    start_timeout_seconds: Seconds = 1800.0
    """Seconds that a process waits for the others until the first step is done, including data preparation and
    set-up."""
    step_timeout_seconds: Seconds = 300.0
    """Seconds that the run may stall after the first step. Then the rank that causes the stall is reported and the run
    stops, to resume later; after a fifth of this time there is a warning. A phase that took longer the first time is
    allowed twice that time."""
    stop_timeout_seconds: Seconds = 600.0
    """Seconds that a stop with ``launch=local`` may take, including the checkpoint, before processes are killed."""
    notice: Literal["aws", "gcp", "azure"] | None = None
    """Cloud whose metadata service announces that this machine is taken away, such as a spot instance: the run then
    saves and stops. Null: no service is asked."""

    @property
    def submits(self) -> bool:
        """Whether the command submits a job, which trains on other machines."""
        return self.name in ("slurm", "kubernetes", "skypilot")

    @property
    def names_gpu(self) -> bool:
        """Whether ``device`` names a GPU or another accelerator."""
        return self.device not in ("auto", "cpu")


class RecoverSection(Section):
    """Response to the loss of a process."""

    mode: Annotated[Literal["off", "memory"], BeforeValidator(_unquoted_off)] = "off"
    """``off``: the run ends when a process is lost, to resume from its newest checkpoint. ``memory``: the replicas that
    are left continue from memory, with the same samples and the same loss curve."""
    min_replicas: PositiveCount = 1
    """Least number of replicas that continue. If fewer are left, the run stops, to resume from its newest
    checkpoint."""
    silence_seconds: Seconds = 10.0
    """Seconds without a sign of life after which a process counts as lost. A process whose connections are closed
    counts as lost at once."""


def _text_of_port(value: object) -> object:
    return str(value) if type(value) is int else value


class TrackSection(Section):
    """Experiment trackers. Each has a process that follows ``metrics.jsonl``, which cannot stop training or change its
    results."""

    wandb: Annotated[Literal["off", "offline", "online"], BeforeValidator(_unquoted_off)] = "off"
    """Weights & Biases: ``online``, ``offline`` (files in the run folder, for ``wandb sync``) or ``off``."""
    tensorboard: bool = False
    """Write event files for TensorBoard to ``run.dir/tensorboard``."""
    mlflow: str | None = Field(default=None, min_length=1)
    """MLflow store: a server's address, ``sqlite:///FILE`` or a folder; null: none."""
    prometheus: Annotated[str, BeforeValidator(_text_of_port)] | None = Field(default=None, min_length=1)
    """Newest metrics for Prometheus: a port to scrape on this machine, ``HOST:PORT`` to listen elsewhere, or a file
    ``NAME.prom`` for node_exporter; null: none."""
    webhook: str | None = Field(default=None, min_length=1)
    """Name of the environment variable that contains the URL to post to when the run ends; null: none."""
    project: str | None = Field(default=None, min_length=1)
    """W&B project and MLflow experiment; null: ``WANDB_PROJECT`` and ``MLFLOW_EXPERIMENT_NAME`` if set, else
    ``serried``."""
    entity: str | None = Field(default=None, min_length=1)
    """W&B team or user; your default when null."""
    group: str | None = Field(default=None, min_length=1)
    """Group of runs in the tracker; a sweep sets it."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """Tags of the run."""
    notes: str | None = None
    """Notes about the run."""

    def _mistakes(self) -> Iterator[str]:
        is_file = self.prometheus and self.prometheus.endswith(".prom") and not is_address(self.prometheus)
        if self.prometheus and not is_file and host_and_port(self.prometheus) is None:
            yield (
                f"track.prometheus={self.prometheus} is not a port, HOST:PORT or a file that ends in .prom; use e.g. "
                "track.prometheus=9400, or track.prometheus=/var/lib/node_exporter/run.prom"
            )
        if self.webhook and not self.webhook.isidentifier():
            is_url = is_address(self.webhook)
            yield (
                f"{'track.webhook is an address' if is_url else f'track.webhook={self.webhook} is no variable name'}, "
                "and the config is kept in the run folder, where an address would not stay secret; use export "
                "SERRIED_WEBHOOK=ADDRESS and track.webhook=SERRIED_WEBHOOK"
            )
        if self.mlflow and has_password(self.mlflow):
            kept = without_password(self.mlflow)
            yield (
                "track.mlflow contains a password, token or user name, which would be saved in the run folder; use "
                f"{f'track.mlflow={kept}' if kept else 'an address without it'}, and set it in the environment: "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN for a server, "
                "PGPASSWORD or MYSQL_PWD for a database"
            )


class PlanSection(Section):
    """Assumptions of ``serried plan`` and ``dry_run=true``. If any of these keys is set, they also print the time of a
    step. Not saved in the run folder."""

    device: str | None = Field(default=None, min_length=1)
    """Device to plan for, such as ``h100``, ``rtx4090`` or ``t4``; null: this machine's device, or ``h100``."""
    memory: str | None = None
    """Memory of the device, such as ``24GiB``, if it differs from the memory of ``plan.device``."""
    per_node: PositiveCount | None = None
    """Devices per node; null: ``launch.processes`` if ``launch.nodes`` is set, else 8."""
    mode: Literal["formula", "trace"] | None = None
    """How memory and communication are computed: ``formula``, or ``trace`` (run a step on tensors without data).
    Null: ``serried plan`` traces, and ``dry_run=true`` prints only the memory by formula."""
    tokens: Annotated[Count, Field(ge=1, le=10**15)] | None = None
    """Total number of training tokens, such as ``15T``; computed from ``trainer.steps`` when null."""
    price: Annotated[Number, Field(gt=0)] | None = None
    """Price per device-hour, in any currency; null: no costs are printed."""
    rates: LocalPath | None = None
    """File of rates written by ``serried plan calibrate``; null: the rates of published runs."""
    search: bool = False
    """Compare all valid layouts instead, as ``serried plan search`` does."""
    out: LocalPath | None = None
    """HTML file to write these layouts to; set by ``serried plan search out=FILE``."""
    as_json: bool = False
    """Print one JSON object instead of text; set by ``serried plan json=true``."""

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` in bytes."""
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([GT])(i?)B", self.memory or "")
        return found and int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2]))

    def _mistakes(self) -> Iterator[str]:
        if self.memory is not None and not 2**30 <= (self.memory_bytes or 0) <= 2**50:
            yield f"plan.memory={self.memory} is not the memory of a device; e.g. plan.memory=24GiB or plan.memory=24GB"
