"""Config section of the task ``causal_lm``."""

from pydantic import Field

from serried.configs.schema.fields import Number
from serried.configs.schema.registry import tasks
from serried.configs.schema.sections import TaskSection


class CausalLMSection(TaskSection):
    """Training to predict the next token."""

    metrics = ()

    label_smoothing: Number = Field(default=0.0, ge=0, le=0.9)
    """Fraction of each target that is spread evenly over the vocabulary, in training only."""
    z_loss: Number = Field(default=0.0, ge=0)
    """Weight of the z-loss, the squared log-sum-exp of the logits, such as 1e-4."""


tasks.register("causal_lm", CausalLMSection, "serried.recipes.text.causal_lm:CausalLM")
