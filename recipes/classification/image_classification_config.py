"""Registration of the task ``image_classification``; its section is shared with the readers of images."""

from serried.configs.schema.registry import tasks
from serried.configs.schema.tasks import ImageSection

tasks.register(
    "image_classification", ImageSection, "serried.recipes.classification.image_classification:ImageClassification"
)
