"""Config section of the task ``distillation``."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from serried.configs.schema.fields import Number, PathOrUrl
from serried.configs.schema.registry import tasks
from serried.configs.schema.sections import TaskSection


class DistillationSection(TaskSection):
    """Training to match the predictions of a larger model."""

    metrics = ("cross_entropy", "divergence")
    has_teacher: ClassVar[bool] = True
    opened_as = "causal_lm"
    by_content = ("teacher",)

    teacher: PathOrUrl | None = Field(default=None, min_length=1, max_length=4096)
    """Folder of the teacher, or its name on the Hub."""
    weight: Annotated[Number, Field(gt=0, le=1)] = 0.5
    """Weight of the divergence from the teacher in the loss; the rest is cross entropy."""
    temperature: Annotated[Number, Field(gt=0, le=100)] = 1.0
    """Temperature that softens both distributions before they are compared."""

    def mistakes_with(self, config: Any) -> Iterator[str]:
        yield from super().mistakes_with(config)
        if config.parallel.pipeline != 1:
            yield (
                f"parallel.pipeline={config.parallel.pipeline} is not supported with task.name=distillation, as the "
                "teacher cannot be split into stages; use parallel.pipeline=1, with parallel=fsdp or parallel.tensor "
                "for large models"
            )
        for name, group in config.optim.groups.items():
            if group.frozen:
                yield (
                    f"optim.groups.{name}.frozen=true is not supported with task.name=distillation, which treats "
                    "frozen parameters as the teacher's and stores them in low precision; remove it, or use "
                    "adapter=lora"
                )


tasks.register("distillation", DistillationSection, "serried.recipes.text.distillation:Distillation")
