"""What a first run loads beyond its imports, loaded once for all processes that the tests fork."""

from pathlib import Path

import serried.parallel.pipeline
import serried.records.page.page  # noqa: F401
from harness.runs import tiny_overrides
from serried.configs.compose import compose
from serried.configs.data_section import sources
from serried.configs.registry import models, optimizers, schedules, tasks

for registry in (models, optimizers, schedules, sources, tasks):
    registry.names()
models.get(compose(tiny_overrides(Path("text"), Path("run"), "parallel=fsdp")).model.family).load()
