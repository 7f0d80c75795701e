"""Classifiers of images, texts or tokens from transformers."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from serried.configs.errors import UserError
from serried.configs.hugging_face.model_folder import CONFIG, model_folder, refuse_adapters, without_code
from serried.configs.hugging_face.quantization import KEY as QUANTIZED
from serried.configs.plain_data import NotPlainData, read_json
from serried.configs.schema.tasks import SampledSection
from serried.recipes.models.hugging_face.any_causal_lm import import_transformers


def build_classifier(
    section: SampledSection, classes: Sequence[str], of: str, own: Mapping[str, Any], pad_id: int | None = None
) -> tuple[Any, Collection[str]]:
    """Build ``transformers.AutoModelFor<of>`` from the config of ``task.model``.

    Args:
        classes: names of the classes; empty for the model's own.
        of: rest of the class name, such as ``SequenceClassification``.
        own: values that override values of the config; keys that the config lacks are ignored.
        pad_id: id of the padding token if the config names none.

    Returns:
        The model and the names of newly initialized parameters.

    Raises:
        UserError: transformers is not installed or has no such model, or the config cannot be read.
    """
    try:
        transformers = import_transformers()
    except ImportError:
        raise UserError(f"task.model={section.model} needs transformers; use: pip install 'transformers>=5'") from None
    folder = model_folder(section.model, "*.json", *["*.safetensors"] * section.pretrained, key="task.model")
    try:
        found = read_json(folder / CONFIG)
    except (OSError, NotPlainData) as error:
        refuse_adapters(str(section.model), folder, "task.model")
        raise UserError(
            f"task.model={section.model}: cannot read {folder / CONFIG}: {getattr(error, 'strerror', error)}; use the "
            "folder of a model of transformers, or its name on the Hub, OWNER/NAME"
        ) from None
    kind = found.pop("model_type", None)
    if kind not in transformers.CONFIG_MAPPING:
        raise UserError(
            f"task.model={section.model} has model_type {kind}, but transformers {transformers.__version__} does not "
            "support it; use another model"
        )
    if found.get(QUANTIZED):
        raise UserError(
            f"task.model={section.model} has quantized weights ({QUANTIZED} in {CONFIG}); use the model before its "
            "quantization"
        )
    kept = without_code(found)
    kept.pop("dtype", None)
    labels = {
        "id2label": {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
    }
    config = transformers.AutoConfig.for_model(
        kind, **kept | (labels if classes else {}) | {k: v for k, v in own.items() if k in kept}
    )
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = pad_id
    auto = getattr(transformers, f"AutoModelFor{of}")
    mapping = f"MODEL_FOR_{re.sub('(?<=[a-z])(?=[A-Z])', '_', of).upper()}_MAPPING"
    if type(config) not in getattr(transformers, mapping):
        raise UserError(
            f"task.model={section.model}: transformers has no AutoModelFor{of} for model_type {kind}; use another model"
        )
    if not section.pretrained:
        model = auto.from_config(config, dtype=torch.float32).train()
        return model, {name for name, _ in model.named_parameters()}
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # suppresses the warning about a new head
    model, loaded = auto.from_pretrained(
        folder, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, use_safetensors=True,
        local_files_only=True, output_loading_info=True,
    )  # fmt: skip
    return model.train(), {*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])}


def not_built(named: str, pretrained: bool, samples: str, error: Exception) -> UserError:
    """Return the error for a model, ``named`` by overrides, that its library cannot build."""
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if pretrained:
        return UserError(
            f"{named} task.pretrained=true: the weights cannot be read or downloaded: {reason.rstrip('.')}; put them "
            "into the folder of the model, or, for a model of the Hub, run once with network access and share the "
            "cache (TORCH_HOME, HF_HOME), or use task.pretrained=false"
        )
    return UserError(f"{named} cannot be built for {samples}: {reason}")
