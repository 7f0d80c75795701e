"""Image models by name, from torchvision, timm and transformers."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from serried.configs.errors import UserError
from serried.configs.hugging_face.model_folder import model_folder
from serried.configs.messages.invalid_values import shown
from serried.configs.plain_data import NotPlainData, is_number, read_if_there, read_json
from serried.configs.requirements import not_installed
from serried.configs.schema.tasks import ImageSection
from serried.configs.similar_names import nearest
from serried.recipes.models.hugging_face.classifier import build_classifier, not_built

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PROCESSOR = "preprocessor_config.json"
"""File next to ``config.json`` that describes how transformers preprocesses images for a model."""
_SHOWN = 8
_WITHOUT = "fix the file, or remove it to use the mean and standard deviation of ImageNet"


def build_image_model(section: ImageSection, classes: Sequence[str]) -> nn.Module:
    """Return the model that ``section`` names. It maps images [B, 3, H, W] to scores [B, classes], or to an object
    with ``logits``. Raises ``UserError`` if it does not exist, or its library or weights are not available."""
    build = {"torchvision": _of_torchvision, "timm": _of_timm, "transformers": _of_transformers}[section.library]
    try:
        return build(section, classes).train()
    except UserError:
        raise
    except Exception as error:  # models' code and downloads may raise any exception
        named = f"task.model={section.model} task.library={section.library}"
        raise not_built(named, section.pretrained, f"images of {section.image_size}", error) from None


def normalization(section: ImageSection, checkpoints: Sequence[Path] = ()) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and standard deviation of colors that the model expects; ImageNet's if it does not specify
    them.

    ``checkpoints``: checkpoints of the run to resume, newest first. A transformers model uses the values in them
    instead of those in its folder. If they have none, ImageNet's are used, as in earlier versions.

    Raises ``UserError`` if the model's values are invalid.
    """
    if section.library == "timm":
        found = _library(section).get_pretrained_cfg(section.model)
        return (found.mean, found.std) if found else IMAGENET
    if section.library != "transformers":
        return IMAGENET
    if checkpoints:
        described = (read_if_there(checkpoint / PROCESSOR) for checkpoint in checkpoints)
        return _colours(next(filter(None, described), {}), checkpoints[0] / PROCESSOR)
    file = model_folder(section.model, "*.json", key="task.model") / PROCESSOR
    try:
        return _colours(read_json(file) if file.exists() else {}, file)
    except (OSError, NotPlainData) as error:
        reason = f"cannot read {file}: {error.strerror}" if isinstance(error, OSError) else error
        raise UserError(f"task.model={section.model}: {reason}; {_WITHOUT}") from None


def _colours(processor: Mapping[str, Any], file: Path) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and standard deviation in ``processor``, the content of ``file``."""
    if processor.get("do_normalize") is False:
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    given: list[Any] = [processor.get("image_mean"), processor.get("image_std")]
    if None in given:
        return IMAGENET
    # transformers also accepts a single number.
    mean, std = ([value] * 3 if is_number(value) else value for value in given)
    is_usable = all(
        isinstance(statistic, list) and len(statistic) == 3 and all(map(is_number, statistic))
        for statistic in (mean, std)
    )
    if not is_usable or min(std) <= 0:
        raise UserError(
            f"{file}: image_mean {shown(given[0])} and image_std {shown(given[1])} must be three numbers each, and "
            f"image_std above 0; {_WITHOUT}"
        )
    return mean, std


def exported_config(section: ImageSection, classes: Sequence[str]) -> dict[str, Any]:
    """Return the content of ``config.json``, with which timm (or a user of torchvision) opens a checkpoint."""
    mean, std = normalization(section)
    images = {"input_size": [3, section.image_size, section.image_size], "mean": list(mean), "std": list(std)}
    if section.library == "timm":  # timm.create_model("local-dir:FOLDER")
        return {
            "architecture": section.model.partition(".")[0],
            "num_classes": len(classes),
            "label_names": list(classes),
            "model_args": _sizes(section),
            "pretrained_cfg": {**images, "num_classes": len(classes)},
        }
    return {"library": section.library, "model": section.model, "label_names": list(classes), **images}


def _library(section: ImageSection) -> Any:
    try:
        return importlib.import_module(section.library)
    except ImportError:
        raise not_installed(section.library, f"task.library={section.library}", extra="vision") from None
    except Exception as error:  # its operators are compiled for one version of torch
        raise UserError(
            f"{section.library} is not compatible with torch {torch.__version__}: {' '.join(str(error).split())}; "
            "install the matching version, or use task.library=transformers"
        ) from None


def _check_name(name: str, names: Sequence[str], section: ImageSection) -> None:
    if name not in names:
        near = nearest(name, names)
        hint = f"did you mean task.model={near[0]}?" if near else f"its models are {', '.join(names[:_SHOWN])}, ..."
        raise UserError(f"task.model={name}: {section.library} has no such model; {hint}")


def _of_torchvision(section: ImageSection, classes: Sequence[str]) -> nn.Module:
    models = _library(section).models
    _check_name(section.model, models.list_models(module=models), section)
    sizes = {"image_size": section.image_size} if section.model.startswith("vit_") else {}
    model: nn.Module = models.get_model(section.model, weights=None, num_classes=len(classes), **sizes)
    if section.pretrained:
        weights = models.get_model_weights(section.model).DEFAULT
        # Without weights_only, torch.hub would unpickle any object.
        _fill(model, weights.get_state_dict(progress=False, check_hash=True, weights_only=True), section)
    return model


def _fill(model: nn.Module, values: dict[str, torch.Tensor], section: ImageSection) -> None:
    """Load ``values`` into ``model``, except a head for a different number of classes."""
    own = model.state_dict()
    others = {name for name in own if name not in values or values[name].shape != own[name].shape}
    head = {name.rpartition(".")[0] for name in others if name in own and own[name].ndim}
    if any(not isinstance(model.get_submodule(name), nn.Linear | nn.Conv2d) for name in head):
        raise UserError(
            f"task.image_size={section.image_size} does not match the pretrained weights of "
            f"task.model={section.model}; remove it"
        )
    model.load_state_dict({name: value for name, value in values.items() if name not in others}, strict=False)


def _of_timm(section: ImageSection, classes: Sequence[str]) -> Any:
    timm = _library(section)
    _check_name(section.model.partition(".")[0], timm.list_models(), section)
    return timm.create_model(section.model, pretrained=section.pretrained, num_classes=len(classes), **_sizes(section))


def _sizes(section: ImageSection) -> dict[str, int]:
    """Return the arguments that set the image size of a timm model."""
    found = _library(section).get_pretrained_cfg(section.model)
    return {"img_size": section.image_size} if found is not None and found.fixed_input_size else {}


def _of_transformers(section: ImageSection, classes: Sequence[str]) -> Any:
    return build_classifier(section, classes, "ImageClassification", {"image_size": section.image_size})[0]
