"""Notices of a cloud that it will take this machine away, from the metadata service of the instance.

``launch.notice`` names the cloud. On the first process of each node, a thread asks every five seconds, and requests a
stop as a signal would.

- AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html, with IMDSv2
- GCP: https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_an_instance_was_preempted
- Azure: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from serried.configs.errors import UserError
from serried.configs.formats import printable
from serried.configs.plain_data import parse_json
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.runtime.signals import Signals

ADDRESS = "SERRIED_METADATA_URL"
"""Environment variable with the address of the metadata service, such as ``http://127.0.0.1:1338``, for tests and
emulators."""
NOTICE = "notice of "
"""Beginning of the reason of a run that stops for a notice."""

_ADDRESS = "http://169.254.169.254"  # the same in all three clouds
_HTTP = re.compile(r"http://([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::([0-9]{1,5}))?/?")
_POLL_SECONDS = 5.0
_ANSWER_SECONDS = 2.0
_FIRST_ANSWER_SECONDS = 10.0
_SILENT_SECONDS = 60.0
_MOST_BYTES, _MOST_CHARACTERS = 2**20, 60
_AZURE_ENDS, _AZURE_RESTARTS = ("Preempt", "Terminate"), ("Reboot", "Redeploy")


class Notice(NamedTuple):
    """Announcement of a cloud."""

    text: str
    ends: bool
    """Whether the machine is about to end. If false, it may end later, or restarts: the run saves and continues."""


class NoAnswer(Exception):
    """Raised if the metadata service does not answer as this cloud's does. The message is the reason."""


class Metadata:
    """Metadata service at an address."""

    def __init__(self, address: str) -> None:
        found = _HTTP.fullmatch(address)
        if found is None or int(found[2] or 80) > 65535:
            raise UserError(f"{ADDRESS}={address} is not an address; use e.g. {ADDRESS}={_ADDRESS}, or unset {ADDRESS}")
        self.address = address.rstrip("/")
        self._place = found[1].strip("[]"), int(found[2] or 80)

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        """Return the answer; None if there is nothing at ``path``. Raises ``NoAnswer``."""
        import http.client  # takes long to import

        connection = http.client.HTTPConnection(*self._place, timeout=_ANSWER_SECONDS)  # uses no proxy
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            content = response.read(_MOST_BYTES)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NoAnswer("no answer" if isinstance(error, TimeoutError) else str(error) or "no answer") from None
        finally:
            connection.close()
        if response.status == 404:
            return None
        if response.status != 200:
            raise NoAnswer(f"HTTP status {response.status} for {path.partition('?')[0]}")
        return content.decode("utf-8", "replace")


def _aws(metadata: Metadata) -> Notice | None:
    token = metadata.ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    if token is None:
        raise NoAnswer("it has no session tokens (IMDSv2)")
    headers = {"X-aws-ec2-metadata-token": token}
    found = metadata.ask("/latest/meta-data/spot/instance-action", headers)
    if found is not None:
        told = _object(found)
        return Notice(f"{_shown(told.get('action', 'end'))} at {_shown(told.get('time', 'an unknown time'))}", True)
    if metadata.ask("/latest/meta-data/events/recommendations/rebalance", headers) is not None:
        return Notice("this instance is at an elevated risk of interruption", False)
    return None


def _gcp(metadata: Metadata) -> Notice | None:
    found = metadata.ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    if found is None or (told := found.strip().upper()) not in ("TRUE", "FALSE"):
        raise NoAnswer("it does not say whether this instance is preempted")
    return Notice("this instance is preempted", True) if told == "TRUE" else None


def _azure(metadata: Metadata) -> Notice | None:
    headers = {"Metadata": "true"}
    name = metadata.ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    found = metadata.ask("/metadata/scheduledevents?api-version=2020-07-01", headers)
    if name is None or found is None:
        raise NoAnswer("it has no scheduled events")
    events = _object(found).get("Events")
    mine = [
        event
        for event in (events if isinstance(events, list) else ())
        if isinstance(event, dict) and isinstance(told := event.get("Resources"), list) and name.strip() in told
    ]
    for kinds, ends in ((_AZURE_ENDS, True), (_AZURE_RESTARTS, False)):
        for event in mine:
            if event.get("EventType") in kinds:
                when = event.get("NotBefore") or "once"  # empty if it has started
                return Notice(f"{event['EventType']} of {_shown(name)}, at {_shown(when)}", ends)
    return None


CLOUDS: dict[str, tuple[str, Callable[[Metadata], Notice | None]]] = {
    "aws": ("AWS", _aws), "gcp": ("GCP", _gcp), "azure": ("Azure", _azure),
}  # fmt: skip
"""Display name, and function that asks for a notice, by the value of ``launch.notice``."""


def _object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _shown(value: object) -> str:
    return printable(str(value).strip())[:_MOST_CHARACTERS]


def _warn(text: str) -> None:
    with suppress(OSError, ValueError):  # standard output may be a file on a full disk
        print(f"WARNING    {text}", flush=True)  # not only on rank 0: each node has its own notices


@contextmanager
def watch(section: LaunchSection, signals: Signals, *, is_first_on_node: bool) -> Iterator[None]:
    """Context manager that asks the cloud for notices, if this process is the first on its node.

    Raises:
        UserError: The metadata service does not answer as that of ``launch.notice`` does.
    """
    if section.notice is None or not is_first_on_node:
        yield
        return
    cloud, ask = CLOUDS[section.notice]
    metadata = Metadata(os.environ.get(ADDRESS) or _ADDRESS)
    notice = _first(section.notice, metadata)
    closing = threading.Event()
    watcher = _Watcher(cloud, lambda: ask(metadata), signals, closing)
    watcher.tell(notice)
    threading.Thread(target=watcher.run, name="cloud notice", daemon=True).start()
    try:
        yield
    finally:
        closing.set()


def _first(name: str, metadata: Metadata) -> Notice | None:
    """Return the first answer."""
    cloud, ask = CLOUDS[name]
    deadline = time.monotonic() + _FIRST_ANSWER_SECONDS
    while True:
        try:
            return ask(metadata)
        except NoAnswer as error:
            reason = error
        if time.monotonic() >= deadline:
            raise UserError(
                f"launch.notice={name}: the metadata service of {cloud} does not answer at {metadata.address}: "
                f"{reason}; in a container it may be out of reach; use launch.notice=null to train without notices"
            )
        time.sleep(1)


class _Watcher:
    """Turns notices into requests to stop or to save."""

    def __init__(
        self, cloud: str, ask: Callable[[], Notice | None], signals: Signals, closing: threading.Event
    ) -> None:
        self._cloud = cloud
        self._ask = ask
        self._signals = signals
        self._closing = closing
        self._told: set[bool] = set()
        self._answered = time.monotonic()

    def run(self) -> None:
        """Ask until the run ends, or was asked to stop."""
        while True not in self._told and not self._closing.wait(_POLL_SECONDS):
            try:
                notice = self._ask()
            except NoAnswer as error:
                self._miss(error)
                continue
            self._answered = time.monotonic()
            if not self._closing.is_set():
                self.tell(notice)

    def tell(self, notice: Notice | None) -> None:
        """Request a stop, or a save, once."""
        if notice is None or notice.ends in self._told:
            return
        self._told.add(notice.ends)
        if notice.ends:
            self._signals.ask(f"{NOTICE}{self._cloud}: {notice.text}")
        else:
            _warn(f"{NOTICE}{self._cloud}: {notice.text}; saving")
            self._signals.asks_to_save.set()

    def _miss(self, error: NoAnswer) -> None:
        if time.monotonic() - self._answered > _SILENT_SECONDS:
            _warn(
                f"the metadata service of {self._cloud} has not answered for {_SILENT_SECONDS:.0f} s "
                f"({error}); a notice would be missed"
            )
            self._answered = float("inf")
