"""Data that a first run loads in addition to its imports, loaded once for all forked test processes."""

import logging
from pathlib import Path

import serried.parallel.pipeline_runner
import serried.planner.run_planner
import serried.records.report.page  # noqa: F401
from serried.configs.compose import compose
from serried.configs.schema.data import sources
from serried.configs.schema.registry import models, optimizers, schedules, tasks
from testing.runs import tiny_overrides

logging.disable(logging.WARNING)  # transformers imports torchao, which warns about libraries that it cannot load
import transformers.modeling_utils  # noqa: E402, F401  # two seconds in each process that opens a model of transformers

logging.disable(logging.NOTSET)

for registry in (models, optimizers, schedules, sources, tasks):
    registry.names()
for parallel in ("ddp", "fsdp", "hsdp"):  # compose() caches the files that it reads
    config = compose(tiny_overrides(Path("text"), Path("run"), f"parallel={parallel}"))
    models.get(config.model.family).load()
