"""Registration of the task ``image_classification``. Its section is defined elsewhere, since image readers use it."""

from serried.configs.schema.registry import tasks
from serried.configs.schema.tasks import ImageSection

tasks.register(
    "image_classification", ImageSection, "serried.recipes.classification.image_classification:ImageClassification"
)
