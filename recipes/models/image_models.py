"""Models of images by name, of torchvision, timm and transformers."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from serried.configs.errors import UserError
from serried.configs.libraries import not_installed
from serried.configs.model_folder import CONFIG, model_folder
from serried.configs.near import nearest
from serried.configs.plain_data import read_json
from serried.configs.tasks import ImageSection

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SHOWN = 8


def build_image_model(section: ImageSection, classes: Sequence[str]) -> nn.Module:
    """Return the model that ``section`` names, from images [B, 3, H, W] to scores [B, classes], or to an object with
    ``logits``.

    Raises:
        UserError: there is none, or its library or weights are not here.
    """
    build = {"torchvision": _of_torchvision, "timm": _of_timm, "transformers": _of_transformers}[section.library]
    named = f"task.model={section.model} task.library={section.library}"
    try:
        return build(section, classes).train()
    except UserError:
        raise
    except Exception as error:  # of any kind: the code of hundreds of models, and downloads
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if section.pretrained:
            raise UserError(
                f"{named} task.pretrained=true: the weights cannot be read or downloaded: {reason}; run it once on a "
                "machine with network and share its cache (TORCH_HOME, HF_HOME), or use task.pretrained=false"
            ) from None
        raise UserError(f"{named} cannot be built for images of {section.image_size}: {reason}") from None


def normalization(section: ImageSection) -> tuple[Sequence[float], Sequence[float]]:
    """Return mean and standard deviation of the colours that the model expects: ImageNet's, if it does not say."""
    if section.library != "timm":
        return IMAGENET
    found = _library(section).get_pretrained_cfg(section.model)
    return (found.mean, found.std) if found else IMAGENET


def exported_config(section: ImageSection, model: Any, classes: Sequence[str]) -> dict[str, Any]:
    """Return the content of ``config.json``, by which the library opens a checkpoint."""
    if section.library == "transformers":
        return {**model.config.to_dict(), "architectures": [type(model).__name__]}
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
            f"{section.library} does not fit torch {torch.__version__}: {' '.join(str(error).split())}; install the "
            "one that is made for it, or use task.library=transformers"
        ) from None


def _check_name(name: str, names: Sequence[str], section: ImageSection) -> None:
    if name not in names:
        near = nearest(name, names)
        hint = f"did you mean task.model={near[0]}?" if near else f"there are {', '.join(names[:_SHOWN])}, ..."
        raise UserError(f"task.model={name}: {section.library} has no such model; {hint}")


def _of_torchvision(section: ImageSection, classes: Sequence[str]) -> nn.Module:
    models = _library(section).models
    _check_name(section.model, models.list_models(module=models), section)
    sizes = {"image_size": section.image_size} if section.model.startswith("vit_") else {}
    model: nn.Module = models.get_model(section.model, weights=None, num_classes=len(classes), **sizes)
    if section.pretrained:
        weights = models.get_model_weights(section.model).DEFAULT
        # torch.hub would unpickle anything.
        _fill(model, weights.get_state_dict(progress=False, check_hash=True, weights_only=True), section)
    return model


def _fill(model: nn.Module, values: dict[str, torch.Tensor], section: ImageSection) -> None:
    """Load ``values``, but those of a head for another number of classes."""
    own = model.state_dict()
    others = {name for name in own if name not in values or values[name].shape != own[name].shape}
    head = {name.rpartition(".")[0] for name in others if name in own and own[name].ndim}
    if any(not isinstance(model.get_submodule(name), nn.Linear | nn.Conv2d) for name in head):
        raise UserError(
            f"task.image_size={section.image_size}: the weights of task.model={section.model} are for another size; "
            "leave it out"
        )
    model.load_state_dict({name: value for name, value in values.items() if name not in others}, strict=False)


def _of_timm(section: ImageSection, classes: Sequence[str]) -> Any:
    timm = _library(section)
    _check_name(section.model.partition(".")[0], timm.list_models(), section)
    return timm.create_model(section.model, pretrained=section.pretrained, num_classes=len(classes), **_sizes(section))


def _sizes(section: ImageSection) -> dict[str, int]:
    """Return what a model of timm must be told of the size of images."""
    found = _library(section).get_pretrained_cfg(section.model)
    return {"img_size": section.image_size} if found is not None and found.fixed_input_size else {}


def _of_transformers(section: ImageSection, classes: Sequence[str]) -> Any:
    transformers = _library(section)
    folder = model_folder(section.model, CONFIG, *["*.safetensors"] * section.pretrained, key="task.model")
    try:
        found = read_json(folder / CONFIG)
    except OSError as error:
        raise UserError(
            f"task.model={section.model}: cannot read {folder / CONFIG}: {error.strerror}; use the folder of a model "
            "of transformers, or a name on the Hub, as task.model=google/vit-base-patch16-224"
        ) from None
    labels = {
        "id2label": {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
    }
    kind = found.pop("model_type", None)
    if kind not in transformers.CONFIG_MAPPING:
        raise UserError(f"task.model={section.model} is of model_type {kind}, which transformers does not have")
    own = {key: value for key, value in found.items() if not key.startswith("_") and key not in ("auto_map", "dtype")}
    sizes = {"image_size": section.image_size} if "image_size" in own else {}
    config = transformers.AutoConfig.for_model(kind, **{**own, **labels, **sizes})
    if type(config) not in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise UserError(f"task.model={section.model}: transformers has no image classifier of model_type {kind}")
    auto = transformers.AutoModelForImageClassification
    if not section.pretrained:
        return auto.from_config(config, dtype=torch.float32)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # that the head is new is in the plan
    return auto.from_pretrained(
        folder, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, use_safetensors=True,
        local_files_only=True,
    )  # fmt: skip
