"""The S3 server moto in a separate process on loopback, behind a proxy that can spoil requests and counts them."""

import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

BUCKET = "bucket"
SECRET = "server-secret-4f1c9a"
"""Secret key that the processes get. Tests search for it in all that they write."""
_START_SECONDS = 60.0
_STARTS = 3


class S3Server:
    """A server with an empty bucket ``bucket``, and the proxy ``testing.faulty_proxy`` in front of it.

    Example::

        with S3Server() as server:
            run_a_command(f"run.dir={server.url('runs/a')}", env=os.environ | server.environment)
            server.set_faults(slow_down=0.1)
    """

    def __init__(self, seed: int = 0, host: str = "127.0.0.1") -> None:
        """``host``: another address of this machine on which the proxy listens, besides loopback."""
        self._host = host
        self._processes: list[subprocess.Popen[bytes]] = []
        for tries_left in reversed(range(_STARTS)):
            try:
                self._start(seed)
                return
            except BaseException as error:
                self.stop()
                if not tries_left or not isinstance(error, RuntimeError):
                    raise

    def _start(self, seed: int) -> None:
        self._port, self.proxy_port = _free_port(), _free_port()
        quiet: dict[str, Any] = {
            "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL,
            "cwd": Path(__file__).resolve().parent.parent,
        }  # fmt: skip
        commands = (
            ("moto.server", "-H", "127.0.0.1", "-p", str(self._port)),
            ("testing.faulty_proxy", str(self.proxy_port), str(self._port), str(seed), self._host),
        )
        self._processes = [subprocess.Popen([sys.executable, "-m", *command], **quiet) for command in commands]
        for port in (self._port, self.proxy_port):
            self._wait_for(port)
        self.make_bucket(BUCKET)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a process that uses the server through the proxy."""
        return self._environment(self.proxy_port, self._host)

    @property
    def past_the_proxy(self) -> dict[str, str]:
        """Environment variables of a process that uses the server itself, without faults and counts."""
        return self._environment(self._port, "127.0.0.1")

    def _environment(self, port: int, host: str) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "server-key",
            "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip

    def url(self, path: str) -> str:
        """Return the URL of a folder in the bucket."""
        return f"s3://{BUCKET}/{path}"

    def make_bucket(self, name: str) -> None:
        """Create another bucket."""
        self._request(self._port, "PUT", f"/{name}")

    def objects(self, path: str = "") -> dict[str, bytes]:
        """Return the contents of all objects below a folder, by key, past the proxy."""
        client = self.client()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=path)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return {key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}

    def uploads(self, path: str = "") -> list[str]:
        """Return the keys of uploads in parts that are neither complete nor removed."""
        return [
            entry["Key"]
            for entry in self.client().list_multipart_uploads(Bucket=BUCKET, Prefix=path).get("Uploads", [])
        ]

    def client(self) -> Any:
        """Return a client of boto3 past the proxy."""
        import boto3

        return boto3.client(
            "s3", endpoint_url=f"http://127.0.0.1:{self._port}", aws_access_key_id="server-key",
            aws_secret_access_key=SECRET, region_name="us-east-1",
        )  # fmt: skip

    def set_faults(self, *script: str, **probabilities: float) -> None:
        """Set the faults of the next requests ("" is none), then the probability of each fault, and ``latency``.

        See ``testing.faulty_proxy`` for the names.
        """
        self._request(self.proxy_port, "PUT", "/__faults", json.dumps(probabilities | {"script": script}).encode())

    def counts(self) -> Counter[str]:
        """Return the number of requests through the proxy so far, by kind, and of faults."""
        return Counter(json.loads(self._request(self.proxy_port, "GET", "/__stats"))["counts"])

    def requests(self) -> list[str]:
        """Return the kind and the path of all requests through the proxy so far."""
        found: list[str] = json.loads(self._request(self.proxy_port, "GET", "/__stats"))["requests"]
        return found

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()

    def __enter__(self) -> "S3Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _request(self, port: int, method: str, path: str, body: bytes = b"") -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body or None, method=method)
        with urllib.request.urlopen(request) as answer:
            content: bytes = answer.read()
        return content

    def _wait_for(self, port: int) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if any(process.poll() is not None for process in self._processes):
                break
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"no server on port {port}; pip install -e '.[dev]'")


def _free_port() -> int:
    """Return a free port below the range from which the system chooses ports of connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
