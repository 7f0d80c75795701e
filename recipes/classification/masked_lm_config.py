"""Config section of the task ``masked_lm``."""

from typing import Annotated

from pydantic import Field

from serried.configs.schema.fields import Number
from serried.configs.schema.registry import tasks
from serried.configs.schema.tasks import TextsSection


class MaskedLMSection(TextsSection):
    """Texts in which a model predicts masked tokens."""

    mask_share: Annotated[Number, Field(gt=0, le=1)] = 0.15
    """Fraction of the tokens to predict. Of these, 80% are masked, 10% are random tokens, and 10% are unchanged."""


tasks.register("masked_lm", MaskedLMSection, "serried.recipes.classification.masked_lm:MaskedLM")
