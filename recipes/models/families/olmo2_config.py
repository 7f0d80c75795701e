"""Config section of OLMo 2."""

from serried.configs.schema.registry import models
from serried.recipes.models.families.llama_config import LlamaSection


class Olmo2Section(LlamaSection):
    """Architecture of OLMo 2: Llama with norms after attention and feed-forward, and normalized queries and keys."""

    opens_as = ("olmo2", "Olmo2ForCausalLM")
    normalizes_heads = True


models.register("olmo2", Olmo2Section, "serried.recipes.models.families.olmo2:Olmo2")
