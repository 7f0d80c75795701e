"""Export to a Hugging Face folder with weights quantized by torchao, which transformers opens."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from serried.configs.hugging_face.model_folder import CONFIG, without_code
from serried.configs.plain_data import read_json
from serried.parallel.precision.quantize_aware import GROUP, torchao_config
from serried.recipes.exports.export_formats import Source

_OF_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt")


def write(source: Source, file: Path, dtype: str) -> None:
    """Write the model to the folder ``file``."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    found = without_code(read_json(source.folder / CONFIG))
    config = transformers.AutoConfig.for_model(**found)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linear = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    others = [
        name
        for name, each in linear.items()
        if each is head or each.in_features % GROUP or f"{name}.weight" in source.frozen
    ]
    quantized = transformers.TorchAoConfig(torchao_config(dtype), modules_to_not_convert=others)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.folder, config=config, dtype=torch.float32, quantization_config=quantized
    )
    model.save_pretrained(file)
    for tokenizer_file in (path for pattern in _OF_TOKENIZER for path in source.folder.glob(pattern)):
        shutil.copyfile(tokenizer_file, file / tokenizer_file.name)


def run(source: Source, file: Path, tokens: Tensor) -> Tensor:
    """Return the logits that the model in ``file`` computes for ``tokens``."""
    import transformers

    del source
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(file, dtype=torch.float32)
    logits: Tensor = model(tokens).logits
    return logits
