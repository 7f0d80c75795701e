"""Config section of the task ``text_classification``."""

from serried.configs.schema.registry import tasks
from serried.configs.schema.tasks import LabelledSection, TextsSection


class TextClassSection(TextsSection, LabelledSection):
    """Texts, each with one class."""


tasks.register(
    "text_classification", TextClassSection, "serried.recipes.classification.text_classification:TextClassification"
)
