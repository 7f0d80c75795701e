"""Azure Blob Storage, in Microsoft's emulator Azurite (``npm install -g azurite``); skipped where it is missing."""

import base64
import email.utils
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from serried.launch.bucket_check import check_bucket
from serried.records.object_store import open_store
from serried.records.store import ABSENT, Conflict
from testing.rank_pool import ROOT

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Account and key of every Azurite: https://learn.microsoft.com/azure/storage/common/storage-use-azurite"""

pytestmark = [
    pytest.mark.cloud,
    pytest.mark.skipif(shutil.which("azurite-blob") is None, reason="Azurite is not installed"),
]


def _make_container(address: str, name: str) -> None:
    date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    headers = f"x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signed = hmac.new(base64.b64decode(KEY), ("PUT" + 12 * "\n" + headers).encode(), hashlib.sha256).digest()
    request = urllib.request.Request(
        f"{address}/{ACCOUNT}/{name}?restype=container", method="PUT",
        headers={
            "x-ms-date": date, "x-ms-version": version, "Content-Length": "0",
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}",
        },
    )  # fmt: skip
    urllib.request.urlopen(request, timeout=10).close()


@pytest.fixture(scope="module")
def emulator() -> Iterator[str]:
    """Address of an Azurite with an empty container ``box``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = ["azurite-blob", "--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([*command, "--skipApiVersionCheck", "--silent"], stdout=quiet, stderr=quiet)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                _make_container(address, "box")
                break
            except urllib.error.URLError:
                time.sleep(0.2)
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def _environment(emulator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", emulator)


def test_store_on_azure_honours_conditions_ranges_and_parts() -> None:
    store = open_store("az://box/store", retry_seconds=10)
    first = store.put("small", b"1", ABSENT)
    for expect in (ABSENT, '"0x1"'):
        with pytest.raises(Conflict):
            store.put("small", b"2", expect)
    second = store.put("small", b"2", first)
    assert store.get("small") == (b"2", second)
    with pytest.raises(Conflict):
        store.put("small", b"3", first)
    content = os.urandom(2**20) * 40
    upload = store.writer("folder/large")
    upload.write(memoryview(content))
    upload.finish()
    (listed,) = store.list("folder")
    assert (listed.key, listed.size_bytes) == ("folder/large", len(content))
    found = store.stat("folder/large")
    assert found == (len(content), listed.tag), "tags of a listing are those of the object"
    part = bytearray(1000)
    store.read_into("folder/large", 17 * 2**20 - 500, memoryview(part), listed.tag)
    assert bytes(part) == content[17 * 2**20 - 500 :][:1000]
    with pytest.raises(Conflict):
        store.read_into("folder/large", 0, memoryview(part), second)
    store.delete(["small", "folder/large", "missing"])
    assert store.list("") == []


def test_bucket_of_azure_passes_the_checks_of_preflight() -> None:
    assert check_bucket("az://box/checked").problems == []
    (problem,) = check_bucket("az://missing/run").problems
    assert problem.startswith("az://missing/run cannot be used (PutObject): "), problem


def test_run_in_azure_is_saved_and_found_again() -> None:
    words = [
        "recipe=tiny", "run.dir=az://box/runs/a", "launch.device=cpu", "trainer.steps=2", "trainer.eval_every=0",
        "trainer.sample_tokens=0", "checkpoint.every=0",
    ]  # fmt: skip

    def train() -> str:
        done = subprocess.run(
            [sys.executable, "train.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "saved      az://box/runs/a/checkpoints/00000002-1-" in train()
    assert "az://box/runs/a is finished: 2 steps" in train()
    keys = [listed.key for listed in open_store("az://box/runs/a").list("")]
    assert {"head.json", "records/1/metrics-00000.jsonl", "records/1/status.json"} <= {*keys}
