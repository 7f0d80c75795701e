"""Section ``kubernetes``: the pods that a run is submitted as."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from serried.configs.schema.fields import Count, PositiveCount, Section

_Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
_SIZE = re.compile(r"[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)")
_SELECTOR = re.compile(r"[A-Za-z0-9./_-]+=[A-Za-z0-9._-]*")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*Gb/s")


class KubernetesSection(Section):
    """Job that ``launch=kubernetes`` creates: one pod per node, from ``launch.nodes``."""

    kind: Literal["job", "jobset", "trainjob", "runtime"] = "job"
    """``job`` (an Indexed Job and a Service, which every cluster has), ``jobset`` (needs the JobSet controller) or
    ``trainjob`` (needs Kubeflow Trainer). ``runtime`` starts nothing: it creates a ClusterTrainingRuntime for such
    TrainJobs, once for a cluster."""
    runtime: _Name | None = None
    """ClusterTrainingRuntime of a TrainJob. Null: Kubeflow's ``torch-distributed``, or ``serried`` with
    ``kind=runtime``."""
    image: str | None = Field(default=None, min_length=1)
    """Container image with serried installed, with a tag or a digest."""
    claim: _Name | None = None
    """PersistentVolumeClaim that all pods can write (ReadWriteMany). It is the working folder of the pods, so relative
    paths of the command are on it. Null for a run in a bucket, unless the command has such paths."""
    scratch: str = "200Gi"
    """Space on the disk of a node for a run in a bucket: records, prepared data and caches."""
    gpus: PositiveCount | None = 8
    """Number of GPUs per pod; also sets ``launch.processes``. Null: none, to train on the CPU."""
    cpus: PositiveCount | None = None
    """Number of CPU cores per pod."""
    memory: str | None = None
    """Memory per pod, such as ``1500Gi``."""
    shared_memory: str = "64Gi"
    """Size of ``/dev/shm``, which NCCL uses. It counts as memory of the pod."""
    namespace: _Name | None = None
    """Namespace; the namespace of kubectl's context when null."""
    secret: _Name | None = None
    """Secret whose keys become environment variables, such as ``WANDB_API_KEY`` and ``HF_TOKEN``."""
    service_account: _Name | None = None
    """Service account of the pods."""
    queue: _Name | None = None
    """Kueue's LocalQueue that admits the run."""
    node_selector: str | None = None
    """Labels of the nodes to use, quoted: ``'kubernetes.node_selector="pool=h100,zone=a"'``."""
    node_bandwidth: str = "10Gb/s"
    """Bandwidth between a node and the volume or bucket. It determines how long a pod may save before it is killed."""
    retries: Count = 3
    """Maximum number of restarts after a pod fails, for example when its container ran out of memory or the bucket of
    the run does not answer. Stopped runs and lost nodes do not count, and failed runs are not retried."""
    dry_run: bool = False
    """Print the YAML and stop, without contacting a cluster."""

    @property
    def bandwidth_bytes_per_second(self) -> float:
        """``node_bandwidth`` in bytes per second."""
        found = _RATE.fullmatch(self.node_bandwidth)
        assert found is not None
        return float(found[1]) * 1e9 / 8

    @property
    def selected_labels(self) -> dict[str, str]:
        """``node_selector`` as a mapping from label to value."""
        words = (self.node_selector or "").split(",")
        return {label: value for label, equals, value in (word.strip().partition("=") for word in words) if equals}

    def _mistakes(self) -> Iterator[str]:
        if self.image and ":" not in self.image.rpartition("/")[2] and "@" not in self.image:
            yield (
                f"kubernetes.image={self.image} has no tag, so pods may run different versions; use "
                f"kubernetes.image={self.image}:TAG"
            )
        for key in ("memory", "shared_memory", "scratch"):
            value = getattr(self, key)
            if value is not None and not _SIZE.fullmatch(value):
                yield f"kubernetes.{key}={value} is not a size in Kubernetes' format; e.g. kubernetes.{key}=64Gi"
        rate = _RATE.fullmatch(self.node_bandwidth)
        if rate is None or float(rate[1]) == 0:
            yield (
                f"kubernetes.node_bandwidth={self.node_bandwidth} is not a rate in Gb/s; e.g. "
                "kubernetes.node_bandwidth=25Gb/s"
            )
        for word in self.node_selector.split(",") if self.node_selector else ():
            if not _SELECTOR.fullmatch(word.strip()):
                yield (
                    f"kubernetes.node_selector={self.node_selector}: {word.strip()!r} is not LABEL=VALUE; e.g. "
                    "'kubernetes.node_selector=\"pool=h100,zone=a\"'"
                )
