"""``head.json`` of a run in a bucket: the one object that decides who trains, and which checkpoints exist.

A checkpoint exists if and only if the head names it; its files are complete before that. Every write of the head
expects the tag of the head that this process wrote or read last, so a process that has lost the run cannot change
anything that a reader sees. No time of another machine is compared.
"""

import copy
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from serried.configs.errors import TrainingStopped, UserError
from serried.configs.plain_data import MOST_BYTES, NotPlainData, is_count, is_number, parse_json
from serried.records.store import ABSENT, Conflict, Expect, Store, StoreError, Unclear

HEAD = "head.json"
CHECKPOINTS = "checkpoints"
MANIFEST = "MANIFEST.json"

PATIENCE_SECONDS, RENEW_SECONDS = 45.0, 10.0
"""Time without a renewal after which a claim expires, and interval of renewals."""
_VERSION = 1
_TRIES = 30
_REPEAT_SECONDS = 120.0
"""Time after which a write without an answer is not repeated. The store itself repeats it for some time."""
_ATTEMPT = re.compile(r"[0-9]{8,255}-[0-9]{1,20}-[0-9a-f]{8}", re.ASCII)


class NewerVersion(UserError):
    """Raised if a later version of serried wrote the head."""


class Fenced(TrainingStopped):
    """Raised if another process has taken over the run. This one must end, and write nothing more."""


@dataclass(frozen=True)
class Entry:
    """A checkpoint that the head names."""

    step: int
    attempt: str
    """Name of its folder below ``checkpoints/``: the step, the epoch, and random digits."""
    size_bytes: int = 0
    validation: dict[str, float] = field(default_factory=dict)
    """Metrics on the validation set at this step."""

    @property
    def prefix(self) -> str:
        """Key of the folder of its files."""
        return f"{CHECKPOINTS}/{self.attempt}"


@dataclass(frozen=True)
class Earlier:
    """A run, or newer checkpoints of this run, that were set aside."""

    records: int
    """Epoch of its records; 0 if they stay with the run."""
    checkpoints: list[Entry]
    end: str
    """How it ended, in words."""


@dataclass
class HeadContent:
    """Content of ``head.json``."""

    epoch: int = 0
    """Number of claims so far."""
    owner: str = ""
    """Random name of the process of the last claim."""
    host: str = ""
    job: str = ""
    """Name of the scheduler's job of the owner, which never has two processes at once. Empty if there is none."""
    state: str = "free"
    """``held`` while the owner trains, else ``free``."""
    checkpoints: list[Entry] = field(default_factory=list)
    """Checkpoints, ordered by step."""
    records: int = 0
    """Epoch whose records belong to the run. 0 if there are none."""
    control_seen: str = ""
    """Tag of the last content of ``control`` that was acted upon."""
    earlier: list[Earlier] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    """Further plain data about the run, by name."""
    nonce: str = ""
    """Random value that differs in every write."""

    def named(self) -> set[str]:
        """Return the attempts of all checkpoints, including those that were set aside."""
        return {
            entry.attempt
            for entries in (self.checkpoints, *(run.checkpoints for run in self.earlier))
            for entry in entries
        }

    def to_json(self) -> bytes:
        """Return the content of the object."""
        return (json.dumps({"version": _VERSION} | asdict(self), indent=1) + "\n").encode()

    @classmethod
    def parse(cls, text: bytes, where: str) -> "HeadContent":
        """Return the content in ``text``, which may come from an untrusted source.

        Raises ``UserError`` if it is invalid, ``NewerVersion`` if only a later version of serried can read it.
        """
        try:
            if len(text) > MOST_BYTES:
                raise NotPlainData(f"larger than {MOST_BYTES} bytes")
            plain = parse_json(text)
            if type(plain.get("version")) is int and plain["version"] > _VERSION:
                raise NewerVersion(
                    f"{where} has version {plain['version']}, but this version of serried reads version {_VERSION}; "
                    "use the version of serried that wrote it"
                )
            earlier = [
                Earlier(_count(run["records"]), _entries(run["checkpoints"]), _text(run["end"]))
                for run in plain["earlier"]
            ]
            return cls(
                epoch=_count(plain["epoch"]), owner=_text(plain["owner"]), host=_text(plain["host"]),
                job=_text(plain["job"]), state="held" if plain["state"] == "held" else "free",
                checkpoints=_entries(plain["checkpoints"]), records=_count(plain["records"]),
                control_seen=_text(plain["control_seen"]), earlier=earlier, extra=dict(plain["extra"]),
                nonce=_text(plain["nonce"]),
            )  # fmt: skip
        except (NotPlainData, AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{where} cannot be used ({type(error).__name__}: {error}); rebuild it: serried repair run.dir="
                f"{where.removesuffix(f'/{HEAD}')}"
            ) from None


def read_head(store: Store) -> HeadContent | None:
    """Return the head of the run in ``store``, or None if there is no run.

    Raises:
        UserError: It is invalid.
        StoreError: The store does not answer.
    """
    found = store.get(HEAD)
    return HeadContent.parse(found[0], store.where(HEAD)) if found else None


class Head:
    """This process's claim on the run in ``store``. Only rank 0 has an instance."""

    def __init__(self, store: Store, content: HeadContent, tag: Expect | str, job: str, renew_seconds: float) -> None:
        self.store = store
        self.owner = uuid.uuid4().hex
        self._content = content
        self._tag = tag
        self._job = job
        self._renew_seconds = renew_seconds
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._nonces: set[str] = set()
        self._active: set[str] = set()
        """Attempts of this process that are being written, or whose outcome is not known yet."""
        self._doubtful: set[str] = set()
        """Attempts whose commit got no answer, and may take effect until the tag of the head has changed."""
        self._fenced: str | None = None

    @classmethod
    def claim(
        cls, store: Store, job: str = "", *, patience_seconds: float = PATIENCE_SECONDS,
        renew_seconds: float = RENEW_SECONDS, say: Callable[[str], None] | None = None,
    ) -> "Head":  # fmt: skip
        """Take the run in ``store``, and renew the claim in a thread until ``release``.

        A run is taken at once if it is new, free, or held by a process of the same scheduler's ``job``; otherwise when
        its owner has not renewed its claim for ``patience_seconds`` of this machine's clock. ``say`` is called with a
        line before that wait.

        Raises:
            UserError: Another process trains there, the head is invalid or lost, or the store ignores conditions.
            StoreError: The store does not answer, or refuses access.
        """
        content, tag = cls._wait_until_free(store, job, patience_seconds, say)
        head = cls(store, content, tag, job, renew_seconds)
        head._take()
        head._refuse_without_conditions(tag)
        threading.Thread(target=head._renew_until_the_end, name="renew", daemon=True).start()
        return head

    @staticmethod
    def _wait_until_free(
        store: Store, job: str, patience_seconds: float, say: Callable[[str], None] | None
    ) -> tuple[HeadContent, Expect | str]:
        found = store.get(HEAD)
        if found is None:
            if any(listed.key.endswith(f"/{MANIFEST}") for listed in store.list(CHECKPOINTS)):
                raise UserError(
                    f"{store.url} has checkpoints but no {HEAD}; rebuild it: serried repair run.dir={store.url}"
                )
            return HeadContent(), ABSENT
        content, tag = HeadContent.parse(found[0], store.where(HEAD)), found[1]
        if content.state != "held" or (job and content.job == job):
            return content, tag
        if say is not None:
            say(
                f"waiting    up to {patience_seconds:.0f} s for {_name(content)}, which has not ended its claim on "
                f"{store.url}: it was killed, or still trains"
            )
        began = time.monotonic()
        while (waited := time.monotonic() - began) < patience_seconds:
            time.sleep(min(1.0, patience_seconds / 10))
            now = store.get(HEAD)
            if now is None or now[1] == tag:
                continue
            content, tag = HeadContent.parse(now[0], store.where(HEAD)), now[1]
            if content.state == "held":
                raise UserError(
                    f"{_name(content)} trains in {store.url}; it renewed its claim within {waited + 1:.0f} s; wait for "
                    "it, or use run.dir=OTHER"
                )
            break
        return content, tag

    def _take(self) -> None:
        def take(new: HeadContent) -> None:
            new.epoch = new.epoch + 1
            new.owner = self.owner
            new.host = socket.gethostname()
            new.job = self._job
            new.state = "held"

        try:
            self.swap(take)
        except Fenced as error:
            raise UserError(
                f"another start of this run was first: {error}; wait for it, or use run.dir=OTHER"
            ) from None

    def _refuse_without_conditions(self, stale: Expect | str) -> None:
        """Write the same content under a condition that no longer holds.

        Raises ``UserError`` if the store accepts it.
        """
        with self._lock:
            for number in range(_TRIES):
                try:
                    self.store.put(HEAD, self._content.to_json(), stale)
                except Conflict:
                    return
                except Unclear:
                    if number == _TRIES - 1:
                        raise
                    time.sleep(min(5.0, 0.1 * 2**number))
                    continue
                break
            self._content.state = "free"
            self.store.put(HEAD, self._content.to_json())
        raise UserError(
            f"{self.store.url} ignores If-Match and If-None-Match, so two starts could both train here; use another "
            "store, or a folder on a shared disk"
        )

    @property
    def epoch(self) -> int:
        """Number of this claim."""
        return self.content.epoch

    @property
    def content(self) -> HeadContent:
        """A copy of the head as this process wrote it last."""
        return copy.deepcopy(self._content)

    @property
    def is_ours(self) -> bool:
        """Whether no write has been refused because another process has taken the run."""
        return self._fenced is None

    def swap(self, change: Callable[[HeadContent], None]) -> None:
        """Apply ``change`` to a copy of the content, and write it. ``change`` may be called several times.

        Raises:
            Fenced: Another process has taken the run.
            StoreError: The store does not answer, or refuses access. The change may have taken effect, or may later.
        """
        with self._lock:
            if self._fenced is not None:
                raise Fenced(self._fenced)
            began = time.monotonic()
            for number in range(_TRIES):
                new = copy.deepcopy(self._content)
                change(new)
                new.nonce = uuid.uuid4().hex
                self._nonces.add(new.nonce)
                problem: StoreError | None = None
                try:
                    self._tag = self.store.put(HEAD, new.to_json(), self._tag)
                    self._content = new
                    break
                except Conflict:
                    pass
                except StoreError as error:
                    problem = error
                found = self.store.get(HEAD)
                there = HeadContent.parse(found[0], self.store.where(HEAD)) if found else None
                if found and there and there.nonce in self._nonces:  # this try, or an earlier one whose answer was lost
                    self._content, self._tag = there, found[1]
                    if there.nonce == new.nonce:
                        break
                elif (found[1] if found else ABSENT) != self._tag:
                    owner = _name(there) if there else "a process that removed its head"
                    self._fenced = f"{owner} has taken over {self.store.url}; this process writes nothing more"
                    raise Fenced(self._fenced)
                is_over = time.monotonic() - began > _REPEAT_SECONDS
                if problem is not None and (is_over or not isinstance(problem, Unclear)):
                    raise problem
                time.sleep(min(5.0, 0.1 * 2**number))
            else:
                raise problem or Unclear(f"cannot write {self.store.where(HEAD)}")
            # The tag has changed, so an earlier write without an answer can no longer take effect.
            self._active -= self._doubtful
            self._doubtful.clear()

    def renew(self) -> None:
        """Write the head unchanged, so that other processes see that this one is alive."""
        self.swap(_unchanged)

    def _renew_until_the_end(self) -> None:
        while not self._ended.wait(self._renew_seconds):
            try:
                self.renew()
            except Fenced:
                return
            except (StoreError, UserError):
                pass  # training continues: only a refusal ends it

    def release(self, change: Callable[[HeadContent], None] | None = None) -> None:
        """End the claim, and apply ``change``.

        It is no error if another process has taken the run, or if the store does not answer.
        """
        self._ended.set()

        def free(new: HeadContent) -> None:
            if change is not None:
                change(new)
            new.state = "free"

        with suppress(Fenced, StoreError, UserError):
            self.swap(free)

    def begin(self, step: int) -> str:
        """Return the name of a new attempt to save ``step``."""
        attempt = f"{step:08d}-{self._content.epoch}-{os.urandom(4).hex()}"
        self._active.add(attempt)
        return attempt

    def commit(self, entry: Entry, change: Callable[[HeadContent], None]) -> list[Entry]:
        """Add ``entry``, whose files are complete, to the head. It replaces an earlier checkpoint of the same step.

        ``change`` is applied in the same write, and may remove other checkpoints. Returns the entries that are no
        longer named, and whose files the caller removes.

        Raises the same errors as ``swap``. Afterwards ``give_up`` must be called.
        """
        gone: list[Entry] = []

        def add(new: HeadContent) -> None:
            before = [*new.checkpoints]
            new.checkpoints = [other for other in before if other.step != entry.step] + [entry]
            new.checkpoints.sort(key=lambda other: other.step)
            change(new)
            gone[:] = [other for other in before if other.attempt not in new.named()]

        self._doubtful.add(entry.attempt)
        self.swap(add)
        self._doubtful.discard(entry.attempt)
        self._active.discard(entry.attempt)
        return gone

    def give_up(self, attempt: str) -> bool:
        """Remove the files of an attempt that failed, unless its commit may still take effect. Returns whether it is a
        checkpoint after all, as a renewal in another thread found."""
        with self._lock:
            if attempt in self._content.named():
                return True
            if attempt in self._doubtful:
                return False
            self._active.discard(attempt)
        self.remove(attempt)
        return False

    def remove(self, attempt: str) -> None:
        """Remove the files of an attempt that the head does not name. The manifest is removed first, so that no reader
        takes the other files for a checkpoint.

        Raises ``StoreError`` if the store does not answer.
        """
        keys = [listed.key for listed in self.store.list(f"{CHECKPOINTS}/{attempt}")]
        manifests = [key for key in keys if key.endswith(f"/{MANIFEST}")]
        self.store.delete(manifests)
        self.store.delete(key for key in keys if key not in manifests)

    def sweep(self) -> list[str]:
        """Remove the files of attempts that the head does not name and that this process does not write. Returns the
        attempts.

        Raises ``Fenced`` or ``StoreError``. The next sweep removes the remaining files.
        """
        self.renew()  # refused if the run is no longer ours
        with self._lock:
            kept, epoch = self._content.named() | self._active, self._content.epoch
        found = {listed.key.split("/")[1] for listed in self.store.list(CHECKPOINTS) if listed.key.count("/") > 1}
        orphans = [name for name in sorted(found - kept) if _ATTEMPT.fullmatch(name) and epoch_of(name) <= epoch]
        for attempt in orphans:
            self.remove(attempt)
        return orphans

    def is_abandoned(self, attempt: str) -> bool:
        """Return whether ``attempt`` is of this or an earlier start and no longer written. A later start has taken over
        the run, and its attempts are not ours to judge."""
        return is_attempt(attempt) and epoch_of(attempt) <= self._content.epoch and attempt not in self._active

    @property
    def active(self) -> Collection[str]:
        """Attempts that this process is writing, or whose commit got no answer yet."""
        return frozenset(self._active)


def epoch_of(attempt: str) -> int:
    """Return the epoch in the name of an attempt."""
    return int(attempt.split("-")[1])


def is_attempt(name: str) -> bool:
    """Return whether ``name`` is the name of an attempt."""
    return _ATTEMPT.fullmatch(name) is not None


def _unchanged(content: HeadContent) -> None:
    """Change nothing."""


def _name(content: HeadContent) -> str:
    return f"process {content.owner[:8]} on {content.host}"


def _count(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{value!r} is not a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1000 or not value.isprintable():
        raise ValueError("a value is not a line of text")
    return value


def _entries(plain: Any) -> list[Entry]:
    return [_entry(values) for values in plain]


def _entry(plain: Any) -> Entry:
    attempt, step = _text(plain["attempt"]), _count(plain["step"])
    if not _ATTEMPT.fullmatch(attempt) or int(attempt.split("-")[0]) != step:
        raise ValueError(f"{attempt!r} is not a checkpoint of step {step}")
    validation = {_text(name): float(value) for name, value in plain["validation"].items() if is_number(value)}
    return Entry(step, attempt, _count(plain["size_bytes"]), validation)
