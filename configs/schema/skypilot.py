"""Section ``skypilot``: the managed job that a run is submitted as."""

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from serried.configs.schema.fields import Count, PositiveCount, Section

_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"


class SkypilotSection(Section):
    """Managed job that ``launch=skypilot`` creates: ``launch.nodes`` machines, replaced if the cloud takes one away."""

    image: str | None = Field(default=None, min_length=1)
    """Container image with serried installed, with a tag or a digest."""
    infra: str | None = Field(default=None, pattern=r"^[a-z0-9*][A-Za-z0-9*._-]*(/[A-Za-z0-9*._-]+){0,2}$")
    """Cloud, region and zone, such as ``aws`` or ``gcp/us-central1``; null: SkyPilot chooses the cheapest."""
    accelerator: str = Field(default="H100", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """SkyPilot's name of the GPU (``sky gpus list``)."""
    gpus: PositiveCount | None = 8
    """Number of GPUs per node; also sets ``launch.processes``. Null: none, to train on the CPU."""
    cpus: PositiveCount | None = None
    """Minimum number of CPU cores per node."""
    memory_gb: PositiveCount | None = None
    """Minimum memory per node in GB."""
    disk_gb: PositiveCount = 256
    """Disk of a node in GB, which holds the image, prepared data and caches."""
    spot: bool = True
    """Use spot instances, which the cloud may take away."""
    retries: Count = 0
    """Maximum number of restarts after a failure. SkyPilot counts all failures alike, including a mistake in the
    command. Stopped runs and lost nodes do not count."""
    file_mounts: dict[str, str] = Field(default_factory=dict)
    """Files to copy to each node: a local path or the URL of a bucket, by path on the node, such as
    ``{/data: s3://bucket/books}``."""
    secrets: tuple[Annotated[str, Field(pattern=_VARIABLE)], ...] = ()
    """Names of environment variables of this machine to pass on, such as ``[WANDB_API_KEY,HF_TOKEN]``."""
    dry_run: bool = False
    """Print the YAML and stop, without contacting SkyPilot. It contains no secret."""

    def _mistakes(self) -> Iterator[str]:
        if self.image and ":" not in self.image.rpartition("/")[2] and "@" not in self.image:
            yield (
                f"skypilot.image={self.image} has no tag, so nodes may run different versions; use "
                f"skypilot.image={self.image}:TAG"
            )
        for target, source in self.file_mounts.items():
            if not target.startswith(("/", "~/")) or not source or re.search(r"\s", target + source):
                yield (
                    f"skypilot.file_mounts={{{target}: {source}}} needs an absolute path on the node and a source; "
                    "e.g. 'skypilot.file_mounts={/data: s3://bucket/books}'"
                )
