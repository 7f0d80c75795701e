"""Images with classes, from a folder with one subfolder per class or from a Hugging Face dataset."""

import contextlib
import hashlib
import io
import math
import os
import random
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from serried.configs.bucket_paths import local_path
from serried.configs.errors import UserError
from serried.configs.plain_data import expanded, open_regular
from serried.configs.schema.tasks import ImageSection
from serried.recipes.data.labelled.splits_and_classes import (
    TRAINING,
    LabelledData,
    open_dataset,
    unknown_class,
    validation_split,
)
from serried.recipes.data.readers.source_files import assignment, library, opened

_ENDINGS = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
_FORMATS = frozenset(
    ("AVIF", "BMP", "DIB", "GIF", "HEIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP")
)
"""Image formats that Pillow may decode, detected from the content of a file. PostScript is excluded, since Pillow would
start an interpreter for it."""
_ORIENTATION = 0x0112
"""EXIF tag of the camera's orientation."""
UPRIGHT = "-upright"
"""Suffix of the fingerprint of a folder whose images are rotated according to their EXIF orientation."""
_ROWS = (".parquet", ".arrow", ".json", ".csv")
"""Suffixes of files by which a folder is recognized as a Hugging Face dataset."""
_CENTRE = 0.875
"""Fraction of the shorter side that the center crop keeps in evaluation."""
_MOST = 2**16 - 1
"""Largest value of 16-bit grayscale."""
_SHAPES = (math.log(3 / 4), math.log(4 / 3))
"""Logarithms of the smallest and largest aspect ratio (width / height) of a random crop."""
_SHOWN = 5
_RESUMES = "then resume with 'checkpoint.allow_changes=[task.path]'"


class Image(NamedTuple):
    """An image with its class."""

    pixels: Any
    """PIL image in RGB; after cropping, a uint8 tensor [3, size, size]."""
    label: int


def open_images(section: ImageSection, *, upright: bool = True) -> LabelledData:
    """Find the images at ``task.path`` without reading them. ``upright``: rotate images of a folder according to their
    EXIF orientation. Raises ``UserError`` if there are none, or the splits have different classes."""
    library("PIL", "task=image_classification", extra="vision")
    folder, typed = expanded(local_path(section.path, "task.path")), assignment("task.path", section.path)
    try:
        is_folder, names = folder.is_dir(), []
        if is_folder:
            names = sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith("."))
        has_rows = any(name == "data" or name.endswith(_ROWS) for name in names)
        if is_folder and (TRAINING in names or not has_rows):
            return _open_folder(section, folder, typed, names, upright)
    except OSError as error:
        raise UserError(f"{typed}: cannot read {error.filename}: {error.strerror}; use another folder") from None
    if not is_folder and (section.path.startswith(("/", ".", "~")) or section.path.count("/") != 1):
        raise UserError(
            f"{typed} is neither a folder nor the name of a dataset; put images into FOLDER/train/CLASS/, or use "
            "OWNER/NAME"
        )
    return _open_dataset(section, str(folder) if is_folder else section.path)


# a folder -------------------------------------------------------------------------------------------------------------


class FolderImages:
    """Dataset of the images of one split in a folder."""

    def __init__(self, folder: Path, classes: Sequence[str] | None = None, *, upright: bool = True) -> None:
        """``classes``: classes of the training split; None if this is the training split."""
        entries = [entry for entry in os.scandir(folder) if entry.name[0] != "."]
        found = {entry.name: entry.path for entry in entries if entry.is_dir()}
        unused = sum(_is_image(entry.name) for entry in entries if entry.name not in found)
        told = (
            f"{unused:,} images in {folder} are not used, as they are not in class folders; move them to "
            f"{folder}/CLASS/"
        )
        self.note = told if unused else ""
        """Message about images outside of class folders; empty if there are none."""
        self.upright = upright
        self.classes = sorted(found) if classes is None else list(classes)
        self._folder = folder
        self._names = []
        labels = []
        key = hashlib.sha256()
        for name in sorted(found):
            label = self.classes.index(name) if name in self.classes else -1
            for path, size_bytes in sorted(_files(found[name])):
                self._names.append(os.path.relpath(path, folder))
                labels.append(label)
                key.update(f"{self._names[-1]}\0{size_bytes}\n".encode("utf-8", "surrogateescape"))
        present = set(labels)
        self.empty = [name for label, name in enumerate(self.classes) if label not in present]
        for name in self.empty:  # the hashed paths contain the names of all other classes
            key.update(f"{name}\n".encode("utf-8", "surrogateescape"))
        self.unknown = sorted(found.keys() - set(self.classes))
        self._labels, self.fingerprint = np.array(labels, np.int32), key.hexdigest() + UPRIGHT * upright

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Image:
        path = self._folder / self._names[index]
        try:
            with open_regular(path) as file:
                return Image(_decoded(file, self.upright), int(self._labels[index]))
        except Exception as error:  # decoders may raise any exception on untrusted files
            reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"cannot read {path} as an image: {reason}; repair or remove it, {_RESUMES}") from None


def _files(folder: str) -> Iterator[tuple[str, int]]:
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from _files(entry.path)
        elif _is_image(entry.name):
            status = entry.stat()
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{entry.path} is not a regular file; remove it")
            yield entry.path, status.st_size


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in _ENDINGS  # noqa: PTH122 -- called for a million files


def _open_folder(section: ImageSection, folder: Path, typed: str, names: Sequence[str], upright: bool) -> LabelledData:
    form = f"put images into {folder}/{TRAINING}/CLASS/"
    if TRAINING not in names:
        found = f"it has {', '.join(names[:_SHOWN])}" if names else "it is empty"
        raise UserError(f"{typed} has no folder {TRAINING} ({found}); {form}")
    training = FolderImages(folder / TRAINING, upright=upright)
    if not training.classes or not len(training):
        raise UserError(f"{typed}: {folder / TRAINING} has no images ({' '.join(sorted(_ENDINGS))}); {form}")
    if training.empty:
        shown = ", ".join(training.empty[:_SHOWN]) + (", ..." if len(training.empty) > _SHOWN else "")
        raise UserError(
            f"{typed}: {folder / TRAINING} has classes without images: {shown}; remove their folders, or put images "
            "into them"
        )
    name = validation_split(section, names)
    validation = FolderImages(folder / name, training.classes, upright=upright) if name else None
    if validation is not None:
        if validation.unknown:
            raise unknown_class(validation.unknown[0], f"{folder / str(name)}", training.classes)
        if not len(validation):
            raise UserError(f"{typed}: {folder / str(name)} has no images; add images, or remove the folder")
    return LabelledData(training.classes, training, validation)


# a dataset ------------------------------------------------------------------------------------------------------------


class TableImages:
    """Dataset of the images of one split of a Hugging Face dataset."""

    def __init__(self, table: Any, image: str, label: str, number: Callable[[Any], int]) -> None:
        """``number``: function from label to class index."""
        feature = library("datasets", "a dataset").Image
        self.fingerprint = str(table.cast_column(image, feature())._fingerprint)  # not public in datasets
        self._table = table.cast_column(image, feature(decode=False))  # otherwise datasets would decode any format
        self._image = image
        self._label = label
        self._number = number

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Image:
        try:
            row = self._table[index]
            with contextlib.ExitStack() as stack:
                return Image(_decoded(_file_in(row[self._image], stack), True), self._number(row[self._label]))
        except Exception as error:  # decoders may raise any exception
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"cannot read row {index + 1} of the dataset: {type(error).__name__}: {reason}; repair or remove the "
                f"row, {_RESUMES}"
            ) from None


def _file_in(cell: Any, stack: contextlib.ExitStack) -> Any:
    """Open the image file in a cell of a ``datasets`` image column. It is closed with ``stack``."""
    if cell["bytes"] is not None:
        return io.BytesIO(cell["bytes"])
    is_address = "://" in cell["path"]
    return opened(cell["path"], stack) if is_address else stack.enter_context(open_regular(Path(cell["path"])))


def _open_dataset(section: ImageSection, name: str) -> LabelledData:
    image, label = section.image_column, section.label_column
    columns = {"task.image_column": image, "task.label_column": label}

    def opened(table: Any, number: Callable[[Any], int]) -> TableImages:
        return TableImages(table, image, label, number)

    return open_dataset(section, name, columns, f"folder with {TRAINING}/CLASS/", opened)


# pixels ---------------------------------------------------------------------------------------------------------------


def _decoded(file: Any, upright: bool) -> Any:
    """Decode an open file as a PIL image in RGB. ``upright``: rotate it according to its EXIF orientation, like
    ``datasets`` and transformers. May raise any exception if the file cannot be decoded."""
    from PIL import Image as pillow
    from PIL import ImageOps

    pillow.init()
    with pillow.open(file, formats=[name for name in pillow.ID if name in _FORMATS]) as image:
        image.load()
        return _in_rgb(ImageOps.exif_transpose(image) if upright and _is_turned(image) else image)


def _is_turned(image: Any) -> bool:
    try:
        return image.getexif().get(_ORIENTATION, 1) != 1
    except Exception:  # EXIF data from the web is often damaged while the pixels are intact
        return False


def _in_rgb(image: Any) -> Any:
    """Convert a PIL image to RGB. 16-bit grayscale is scaled to 8 bits, since Pillow would turn all values above 254
    white. Raises ``ValueError`` if pixel values have neither 8 nor 16 bits."""
    from PIL import Image as pillow

    if image.mode == "RGB":
        return image  # convert() would copy the image
    if image.mode[0] not in "IF":  # 8-bit modes
        return image.convert("RGB")
    values = np.asarray(image)
    least, largest = values.min(), values.max()
    if image.mode == "I" and least >= 0 and largest <= 255:  # 8-bit values in a wider dtype
        return image.convert("RGB")
    if image.mode == "F" or least < 0 or largest > _MOST:
        raise ValueError(
            f"pixels of mode {image.mode} from {least:g} to {largest:g} are not supported, only 8-bit pixels and "
            f"integers from 0 to {_MOST}"
        )
    scale = _MOST // 255
    return pillow.fromarray(((values.astype(np.int32) + scale // 2) // scale).astype(np.uint8)).convert("RGB")


def image_processor(size: int, mean: Sequence[float], std: Sequence[float]) -> dict[str, Any]:
    """Return the content of ``preprocessor_config.json``, so that transformers preprocesses images as evaluation does:
    cropped as by ``cropped_to_centre`` and normalized with ``mean`` and ``std``."""
    from PIL import Image as pillow

    return {
        "image_processor_type": "CLIPImageProcessor",  # works with any model and supports center crops
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": round(size / _CENTRE)},
        "resample": int(pillow.Resampling.BILINEAR),
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }


def cropped_at_random(image: Any, size: int, smallest: float, flip: bool, seed: int) -> Tensor:
    """Return a random crop of a PIL image as a uint8 tensor [3, size, size]. The crop covers at least the fraction
    ``smallest`` of the image's area; if that is 1, the center crop is used. With ``flip``, it is mirrored with
    probability 1/2. All random numbers depend only on ``seed``."""
    numbers = random.Random(seed)  # only random() returns the same values in all versions of Python
    box = _random_box(image.width, image.height, smallest, numbers) if smallest < 1 else _centre(image)
    pixels = _scaled(image, size, box)
    return pixels.flip(-1) if flip and numbers.random() < 0.5 else pixels


def cropped_to_centre(image: Any, size: int) -> Tensor:
    """Return the center crop of a PIL image as a uint8 tensor [3, size, size]."""
    return _scaled(image, size, _centre(image))


def _random_box(width: int, height: int, smallest: float, numbers: random.Random) -> tuple[float, float, float, float]:
    for _ in range(10):
        area = width * height * (smallest + (1 - smallest) * numbers.random())
        shape = math.exp(_SHAPES[0] + (_SHAPES[1] - _SHAPES[0]) * numbers.random())
        wide, high = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < wide <= width and 0 < high <= height:
            left, top = int(numbers.random() * (width - wide + 1)), int(numbers.random() * (height - high + 1))
            return left, top, left + wide, top + high
    side = min(width, height)
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


def _centre(image: Any) -> tuple[float, float, float, float]:
    side = _CENTRE * min(image.width, image.height)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return left, top, left + side, top + side


def _scaled(image: Any, size: int, box: tuple[float, float, float, float]) -> Tensor:
    from PIL import Image as pillow

    scaled = image.resize((size, size), pillow.Resampling.BILINEAR, box)
    return torch.from_numpy(np.array(scaled)).permute(2, 0, 1).contiguous()
