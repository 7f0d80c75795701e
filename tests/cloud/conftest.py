"""The S3 server of the tests of one process."""

import os
import re
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest

from testing.runs import run_here, tiny_overrides
from testing.s3_server import S3Server


@pytest.fixture(scope="session")
def _server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def server(_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 server behind a proxy without faults. This process and what it starts use it through the proxy."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in _server.environment.items():
        monkeypatch.setenv(name, value)
    _server.set_faults()
    yield _server
    _server.set_faults()


@pytest.fixture(scope="session")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run in a folder, with the checkpoints of steps 4 and 6."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    assert run_here(tiny_overrides(text, run_dir)).code == 0
    return run_dir


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> str:
    """A folder in the bucket that no other test uses."""
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    return f"tests/{name}"


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day is an hour ahead at one reading, and an hour behind at the next."""
    now, now_ns, offsets = time.time, time.time_ns, cycle((3600, -3600))
    monkeypatch.setattr(time, "time", lambda: now() + next(offsets))
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + next(offsets) * 10**9)
