"""Rank 0's checks of the run folder during training: the file ``control``, and whether the folder still exists.

A thread checks about once a second, since a network disk may take long to answer.
"""

import threading
import time
from contextlib import suppress
from pathlib import Path

from serried.configs.plain_data import open_regular
from serried.records.bucket_run import CONTROL, new_request
from serried.records.head import Head
from serried.records.run_folder import RunFolder
from serried.runtime.console import Console

_LOOK_SECONDS = 1.0
_LOOK_IN_BUCKET_SECONDS = 5.0
_MOST_BYTES = 100


class Control:
    """Requests of the user through the run folder, checked between ``start`` and ``end``."""

    def __init__(self, folder: RunFolder, console: Console) -> None:
        self.asks_to_stop = False
        self.asks_to_save = threading.Event()
        """Set on a request to save. Cleared when the ranks have agreed on the save."""
        self.has_lost_folder = False
        """Whether the folder was removed, renamed or replaced: another run may be training there now."""
        self._folder, self._console = folder, console
        self._thread = threading.Thread(target=self._look_again_and_again, name="control-file", daemon=True)
        self._ended = threading.Event()
        self._seen: str | None = None
        self._look_in_bucket_at = 0.0
        self._acted_upon = "" if folder.head is None else folder.head.content.control_seen
        """Tag of the last request in the bucket that this or an earlier start acted upon."""

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(_LOOK_SECONDS)

    def _look_again_and_again(self) -> None:
        while not self._ended.is_set():
            with suppress(OSError, ValueError):
                self.look()
            self._ended.wait(_LOOK_SECONDS)

    def look_at_folder(self) -> None:
        """Check whether the folder still belongs to this run, and set ``has_lost_folder``."""
        self.has_lost_folder = not self._folder.is_ours

    def check_claim(self) -> None:
        """Raise ``TrainingStopped`` with the name of the process that has taken over the run in the bucket, if any."""
        if self._folder.head is not None:
            self._folder.head.renew()

    def look(self) -> None:
        """Check the folder and the control file once."""
        self.look_at_folder()
        if self.has_lost_folder:
            return
        if self._folder.head is not None:
            self._look_in_bucket(self._folder.head)
            return
        path = self._folder.path / CONTROL
        word = _word_in(path)
        if not word or word == self._seen:  # still being written, or already seen
            self._seen = word
            return
        self._seen = word
        if not self._follow(word, str(path)):
            return
        try:
            path.unlink()  # last, so that a missing file shows the user that the command takes effect
            self._seen = None
        except OSError as error:
            self._console.say(f"WARNING    cannot remove {path}: {error.strerror}; the request takes effect only once")

    def _look_in_bucket(self, head: Head) -> None:
        """Check the object ``control``, which stays in the bucket: the head notes which content was acted upon."""
        if time.monotonic() >= self._look_in_bucket_at:
            self._look_in_bucket_at = time.monotonic() + _LOOK_IN_BUCKET_SECONDS
            if request := new_request(head, self._acted_upon):
                word, self._acted_upon = request
                if word:
                    self._follow(word, head.store.where(CONTROL))

    def _follow(self, word: str, where: str) -> bool:
        """Note the request ``word``, or print that there is no such request. Return whether there is."""
        if word.lower() not in ("stop", "save"):
            self._console.say(
                f"WARNING    {where} contains {word.splitlines()[0]!r}; write stop (save and stop) or save "
                "(save and continue)"
            )
            return False
        if word.lower() == "stop":
            self.asks_to_stop = True
        else:
            self.asks_to_save.set()
        return True


def _word_in(path: Path) -> str | None:
    try:
        with open_regular(path) as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return None
