"""Hugging Face datasets from the Hub or a local folder, either prepared or streamed."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import ClassVar

from serried.configs.bucket_paths import local_path
from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import UserError
from serried.configs.schema.data import DataSection, sources
from serried.configs.schema.fields import PathOrUrl
from serried.recipes.data.readers.source_files import assignment
from serried.recipes.data.sources.text import RowsSection


class HubSection(RowsSection):
    """Config of a Hugging Face dataset."""

    needs: ClassVar[Mapping[str, str]] = {"path": "OWNER/NAME_OR_FOLDER"}
    libraries: ClassVar[Sequence[str]] = ("datasets",)
    path: PathOrUrl | None = None
    """File, folder or glob, also ``s3://BUCKET/PATH``; for ``hf`` the name of a dataset, or its folder."""
    subset: str | None = None
    """Name of the configuration within the dataset, such as ``sample-10BT``."""
    split: str = "train"
    """Split to train on."""
    revision: str | None = None
    """Branch, tag or commit of the dataset."""
    validation_split: str | None = None
    """Split for validation, instead of a fraction of the training split."""
    streaming: bool = False
    """Stream the data during training, for data that does not fit on disk."""

    def check(self) -> None:
        if not is_bucket_url(self.path):
            self.folder_or_name()

    def folder_or_name(self) -> str:
        """Return the folder of the dataset, or its name on the Hub. Raises ``UserError`` if ``path`` is neither."""
        assert self.path is not None
        path = os.path.expanduser(local_path(self.path, "data.path"))  # noqa: PTH111 -- methods of Path fail in unreadable folders
        if os.path.isfile(path):  # noqa: PTH113
            raise UserError(
                f"{assignment('data.path', self.path)} is a file, but data=hf needs a folder or the name of a dataset; "
                f"use data=text {assignment('data.path', self.path)}"
            )
        if os.path.isdir(path):  # noqa: PTH112
            return path
        if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", self.path):
            raise UserError(
                f"{assignment('data.path', self.path)} is neither a folder on this machine nor a valid name on the "
                "Hugging Face Hub; use data.path=OWNER/NAME, as in data.path=HuggingFaceFW/fineweb-edu, or the path "
                "of a folder"
            )
        return self.path

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if not self.streaming:
            return
        if not isinstance(self, DataSection):
            yield (
                f"streaming=true with path={self.path}: the sources of data=mixture cannot be streamed; remove "
                "streaming=true"
            )
            return
        whole = {  # settings that need the full text before the first step
            f"packing={self.packing}": self.packing != "split",
            f"format={self.format}": self.is_chat,
            f"bad_rows={self.bad_rows}": self.bad_rows == "skip",
            f"tokenizer={self.tokenizer}": self.tokenizer in ("chars", "train"),
        }
        for setting in (key for key, is_given in whole.items() if is_given):
            yield (
                f"data.{setting} needs all data before training, but data.streaming=true reads the data during "
                "training; remove one of the two"
            )


sources.register(
    "hf", HubSection, lambda: import_module("serried.recipes.data.readers.hugging_face_dataset").HubDataset
)
