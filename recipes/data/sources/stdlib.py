"""Python's standard library as a source: real text that every machine has."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serried.configs.errors import UserError
from serried.configs.schema.data import SourceSection, register_source
from serried.recipes.data.readers.find_files import walk
from serried.recipes.data.readers.plain_text import TextFiles

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib-dynload"}


class StdlibSection(SourceSection):
    """Config of Python's standard library as a source."""

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if getattr(self, "format", "text") == "chat":
            yield "data=stdlib has no conversations; use data=text data.path=CHATS.jsonl, or data.format=text"


@register_source("stdlib", section=StdlibSection)
def stdlib(section: Any) -> TextFiles:
    """Return the source files of the standard library, without tests, installed packages and machine-specific files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in walk(root, leave_out=_LEFT_OUT)
        if file.name.endswith(".py") and not file.name.startswith(("_sysconfigdata", "config-"))
    ]
    if not files:
        raise UserError(
            f"data=stdlib: {root} has no .py files; train on your own text: data=text data.path=FILE_OR_FOLDER_OR_GLOB"
        )
    return TextFiles(files, section.validation_fraction)
