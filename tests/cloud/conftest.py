"""The S3 server of the tests of one process."""

import os
import re
from collections.abc import Iterator

import pytest

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


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> str:
    """A folder in the bucket that no other test uses."""
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    return f"tests/{name}"
