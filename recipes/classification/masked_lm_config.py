"""Section of the task ``masked_lm``."""

from typing import Annotated

from pydantic import Field

from serried.configs.schema.fields import Number
from serried.configs.schema.registry import tasks
from serried.configs.schema.tasks import TextsSection


class MaskedLMSection(TextsSection):
    """Texts of which a model is to predict words that are hidden."""

    mask_share: Annotated[Number, Field(gt=0, le=1)] = 0.15
    """Fraction of the tokens to predict: of these 80% are masked, 10% become a random token, and 10% stay."""


tasks.register("masked_lm", MaskedLMSection, "serried.recipes.classification.masked_lm:MaskedLM")
