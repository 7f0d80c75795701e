"""Preparation with a shared cache, as a process: ``python -m serried.recipes.data.prepared.shared_preparation``.

A separate process uses the bucket, since a process that has used it must not fork. Request and answers have the format
of ``serried.records.bucket_files``.
"""

import json
import sys
from typing import Any

from serried.configs.bucket_paths import answer_here, downloads, with_urls
from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import TrainingStopped, UserError
from serried.configs.schema.data import data_section
from serried.recipes.data.prepared.prepare import cache_folder, prepare_source
from serried.recipes.data.prepared.shared_cache import SharedCache
from serried.recipes.data.readers.reading_progress import Progress, usable_cores
from serried.records.bucket_files import answer, end_with_parent, write_line
from serried.records.store import StoreError


def _prepare(request: dict[str, Any]) -> str:
    section = data_section(**request["section"])
    show = (lambda text: write_line({"show": text})) if request["shows"] else None
    with Progress(show, request["threads"] or usable_cores()) as progress:
        shared = None
        if is_bucket_url(section.cache_dir):
            shared = SharedCache(str(section.cache_dir), progress, request["patience_seconds"])
        try:
            with downloads(cache_folder(section), progress.say):
                return str(prepare_source(section, progress, shared).folder)
        except StoreError as error:
            raise UserError(f"data.cache_dir={section.cache_dir}: {error}") from None
        except TrainingStopped as error:  # the data is read before training begins
            raise UserError(error) from None


def main() -> int:
    request = json.loads(sys.stdin.readline())
    end_with_parent()
    answer_here(answer)
    try:
        write_line({"answer": _prepare(request)})
    except UserError as error:
        write_line({"errors": [with_urls(str(line)) for line in error.args], "head": with_urls(error.head)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
