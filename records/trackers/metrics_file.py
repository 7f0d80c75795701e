"""``metrics.jsonl``, read while it grows."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_LINES_AT_A_TIME = 1000


class MetricsFile:
    """Follows the file. It only grows, or is replaced by another: lines that were taken back are not in that."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._torn = b""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """The next events, up to a thousand, and whether they are the first of another file than before."""
        is_another = self._is_another()
        if is_another:
            self.close()
            with suppress(FileNotFoundError):
                self._file = self._path.open("rb")
        if self._file is None:
            return False, []
        events: list[dict[str, Any]] = []
        while len(events) < _LINES_AT_A_TIME and (line := self._torn + self._file.readline()):
            if not line.endswith(b"\n"):
                self._torn = line
                break
            self._torn = b""
            with suppress(ValueError):  # a torn line that a crash left, before it is moved aside
                events.append(json.loads(line))
        return is_another, events

    def _is_another(self) -> bool:
        if self._file is None:
            return True
        try:
            there = self._path.stat()
        except FileNotFoundError:  # between two names
            return False
        return not os.path.samestat(there, os.fstat(self._file.fileno()))

    def close(self) -> None:
        """Let go of the file; ``read`` begins with its first line again."""
        if self._file is not None:
            self._file.close()
        self._file, self._torn = None, b""
