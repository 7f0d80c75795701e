"""``launch.notice``: what a cloud's metadata service announces, asked over HTTP from a server on this machine."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serried.configs.errors import UserError
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.launch.slurm.requeue import verdict
from serried.runtime import cloud_notice
from serried.runtime.cloud_notice import ADDRESS, CLOUDS, Metadata, Notice, watch
from serried.runtime.signals import Signals
from serried.trainer.monitor.shutdown import Action, Shutdown
from testing.runs import metrics, run_here, status, tiny_overrides

AWS_ACTION = "/latest/meta-data/spot/instance-action"
AWS_RISK = "/latest/meta-data/events/recommendations/rebalance"
TOKEN = "AQAAAK-token=="
Pages = dict[str, str]


class Service(ThreadingHTTPServer):
    """A metadata service with the rules of all three clouds about tokens and headers."""

    def __init__(self, cloud: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cloud = cloud
        self.pages: Pages = {
            "aws": {},
            "gcp": {"/computeMetadata/v1/instance/preempted": "FALSE"},
            "azure": {"/metadata/instance/compute/name": "vm-7", "/metadata/scheduledevents": _events()},
        }[cloud]
        self.counts = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_PUT(self) -> None:
        is_right = self.server.cloud == "aws" and self.path == "/latest/api/token"
        has_time = 1 <= int(self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "0")) <= 21600
        self._answer(200 if is_right and has_time else 400, TOKEN)

    def do_GET(self) -> None:
        self.server.counts += 1
        wanted = {
            "aws": ("X-aws-ec2-metadata-token", TOKEN), "gcp": ("Metadata-Flavor", "Google"),
            "azure": ("Metadata", "true"),
        }  # fmt: skip
        header, value = wanted[self.server.cloud]
        if self.headers.get(header) != value:
            return self._answer(401, "")
        if self.server.cloud == "azure" and "api-version=20" not in self.path:
            return self._answer(400, "")
        page = self.server.pages.get(self.path.partition("?")[0])
        return self._answer(404 if page is None else 200, page or "")

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(cloud: str) -> Iterator[Service]:
    with Service(cloud) as service:
        threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield service
        service.shutdown()


def _events(*kinds: str, name: str = "vm-7", when: str = "Mon, 19 Sep 2026 18:29:47 GMT") -> str:
    events = [
        {"EventId": kind, "EventType": kind, "ResourceType": "VirtualMachine", "Resources": [name], "NotBefore": when}
        for kind in kinds
    ]
    return json.dumps({"DocumentIncarnation": 1, "Events": events})


@pytest.mark.parametrize(
    ("cloud", "pages", "expected"),
    [
        ("aws", {}, None),
        ("aws", {AWS_ACTION: '{"action": "terminate", "time": "2026-11-28T08:22:00Z"}'},
         Notice("terminate at 2026-11-28T08:22:00Z", True)),
        ("aws", {AWS_ACTION: "[" * 9000}, Notice("end at an unknown time", True)),
        ("aws", {AWS_ACTION: '{"action": "\\u001b[2Jstop\\n", "time": 5}'}, Notice("\ufffd[2Jstop at 5", True)),
        ("aws", {AWS_RISK: '{"noticeTime": "2026-11-28T08:22:00Z"}'},
         Notice("this instance is at an elevated risk of interruption", False)),
        ("gcp", {}, None),
        ("gcp", {"/computeMetadata/v1/instance/preempted": "TRUE"}, Notice("this instance is preempted", True)),
        ("azure", {}, None),
        ("azure", {"/metadata/scheduledevents": _events("Freeze", "Preempt")},
         Notice("Preempt of vm-7, at Mon, 19 Sep 2026 18:29:47 GMT", True)),
        ("azure", {"/metadata/scheduledevents": _events("Reboot", when="")}, Notice("Reboot of vm-7, at once", False)),
        ("azure", {"/metadata/scheduledevents": _events("Preempt", name="vm-8")}, None),
        ("azure", {"/metadata/scheduledevents": '{"Events": [3, {"Resources": 4}]}'}, None),
    ],
)  # fmt: skip
def test_notice_of_a_cloud_is_parsed(cloud: str, pages: Pages, expected: Notice | None) -> None:
    with serving(cloud) as service:
        service.pages.update(pages)
        assert CLOUDS[cloud][1](Metadata(service.address)) == expected


@pytest.mark.parametrize(("asked", "there"), [("aws", "gcp"), ("gcp", "aws"), ("azure", "gcp"), ("gcp", "azure")])
def test_metadata_service_of_another_cloud_is_one_line(asked: Any, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_notice, "_FIRST_ANSWER_SECONDS", 0.0)
    with serving(there) as service:
        monkeypatch.setenv(ADDRESS, service.address)
        with (
            pytest.raises(UserError, match=rf"launch.notice={asked}: the metadata service of \w+ does not answer at"),
            watch(LaunchSection(notice=asked), Signals(), is_first_on_node=True),
        ):
            pass


def test_missing_metadata_service_and_unusable_address_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_notice, "_FIRST_ANSWER_SECONDS", 0.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    section = LaunchSection(notice="aws")
    for given, said in ((address, f"at {address}: .*refused"), ("169.254.169.254", "is not an address; use e.g. SERR")):
        monkeypatch.setenv(ADDRESS, given)
        with pytest.raises(UserError, match=said), watch(section, Signals(), is_first_on_node=True):
            pass
        with watch(section, Signals(), is_first_on_node=False):  # the other processes do not ask
            pass


def test_silence_of_the_service_is_reported_once_and_training_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cloud_notice, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(cloud_notice, "_SILENT_SECONDS", 0.0)
    signals = Signals()
    with serving("gcp") as service:
        monkeypatch.setenv(ADDRESS, service.address)
        with watch(LaunchSection(notice="gcp"), signals, is_first_on_node=True):
            service.pages.clear()
            _wait(lambda: service.counts > 20)
            service.pages["/computeMetadata/v1/instance/preempted"] = "TRUE"
            _wait(lambda: signals.received is not None)
    assert capsys.readouterr().out.count("the metadata service of GCP has not answered for 0 s") == 1
    assert signals.received == "notice of GCP: this instance is preempted"


def _wait(is_there: Callable[[], bool]) -> None:
    never = threading.Event()
    for _ in range(2000):
        if is_there():
            return
        never.wait(0.01)
    raise AssertionError("it did not happen")


def test_run_saves_once_at_an_elevated_risk_and_stops_when_the_end_is_announced(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_notice, "_POLL_SECONDS", 0.01)
    pages = {3: {AWS_RISK: "{}"}, 6: {AWS_ACTION: '{"action": "terminate", "time": "2026-11-28T08:22:00Z"}'}}

    def is_asking() -> bool:
        return any(thread.name == "cloud notice" for thread in threading.enumerate())

    with serving("aws") as service:
        monkeypatch.setenv(ADDRESS, service.address)

        def announce(_: object, step: int) -> None:
            if step in pages:
                service.pages.update(pages[step])
                count = service.counts
                _wait(lambda: service.counts > count + 4 or not is_asking())  # it stops asking after a final notice

        overrides = ("trainer.steps=9", "checkpoint.every=0", "launch.notice=aws")
        ended = run_here(tiny_overrides(text, tmp_path / "run", *overrides), announce)
    assert ended.code == 75, ended.printed
    assert ended.printed.count("WARNING    notice of AWS: this instance is at an elevated risk") == 1
    reason = "notice of AWS: terminate at 2026-11-28T08:22:00Z"
    assert f"stopping   {reason}: saving, then the run ends" in ended.printed
    assert status(tmp_path / "run")["reason"] == reason
    assert [line["step"] for line in metrics(tmp_path / "run", "checkpoint")] == [4, 7]


def test_notice_before_training_begins_ends_the_start(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving("gcp") as service:
        service.pages["/computeMetadata/v1/instance/preempted"] = "TRUE"
        monkeypatch.setenv(ADDRESS, service.address)
        ended = run_here([*tiny_overrides(text, tmp_path / "run"), "launch.notice=gcp"])
    assert ended.code == 75
    assert "stopped: notice of GCP: this instance is preempted while the processes were joining" in ended.printed


def test_repeated_notices_do_not_count_as_a_crash_loop(tmp_path: Path) -> None:
    start = tmp_path / "slurm" / "7.start"
    start.parent.mkdir()
    for _ in range(4):
        start.touch()
        ended = {"state": "stopped", "step": 3, "reason": "notice of AWS: stop at 5", "exit_code": 75}
        (tmp_path / "status.json").write_text(json.dumps(ended))
        assert verdict(tmp_path, start)[0] == 75


@pytest.mark.parametrize(
    ("votes", "expected"),
    [([0, 0], Action.GO_ON), ([1, 1, 1], Action.SAVE), ([10**6, 1], Action.STOP), ([10**6] * 3, Action.STOP)],
)
def test_ranks_that_ask_to_save_together_do_not_stop_the_run(votes: list[int], expected: Action) -> None:
    import torch

    session: Any = SimpleNamespace(device=torch.device("cpu"), world_size=len(votes), signals=Signals())
    config: Any = SimpleNamespace(run=None)
    console: Any = SimpleNamespace(say=lambda _: None)
    shutdown = Shutdown(config, session, console, None, lambda: 0.0)
    shutdown.reason = "asked"
    shutdown.count(torch.tensor([float(sum(votes)), 1.0]))
    assert shutdown.action is expected
