"""Existing token files, written by ``serried prepare`` or another tool."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import ClassVar, Literal

from serried.configs.bucket_paths import bucket_files
from serried.configs.bucket_urls import is_bucket_url
from serried.configs.plain_data import expanded
from serried.configs.schema.data import DataSection, SourceSection, sources
from serried.configs.schema.fields import PathOrUrl
from serried.recipes.data.readers.find_files import check_path


class TokensSection(SourceSection):
    """Config of existing token files."""

    needs: ClassVar[Mapping[str, str]] = {"path": "FILE_OR_FOLDER_OR_GLOB"}
    aliases: ClassVar[Mapping[str, str]] = {"token_dtype": "token_type token_bytes"}

    path: PathOrUrl | None = None
    """File, folder or glob, also ``s3://BUCKET/PATH``; for ``hf`` the name of a dataset, or its folder."""
    token_dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """Dtype of flat binary files."""

    def check(self) -> None:
        check_path(str(self.path))

    @property
    def is_prepared(self) -> bool:
        """Whether ``path`` is a folder that ``serried prepare`` wrote."""
        path = str(self.path)
        if is_bucket_url(path):
            return "summary.json" in bucket_files(path, "data.path").files
        return (expanded(path) / "summary.json").exists()

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if isinstance(self, DataSection) and "tokenizer" not in self.model_fields_set and not self.is_prepared:
            yield (
                "data=tokens needs data.tokenizer, the tokenizer that created the tokens, e.g. "
                "data.tokenizer=openai-community/gpt2 or data.tokenizer=bytes. For characters (nanoGPT's "
                "shakespeare_char) train on the text: data=text data.path=input.txt data.tokenizer=chars"
            )


sources.register("tokens", TokensSection, lambda: import_module("serried.recipes.data.prepared.token_files").FlatFiles)
