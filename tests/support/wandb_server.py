"""A stand-in for W&B's server: it stores runs and their rows, and reports what it has."""

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PROJECT = {"id": "p1", "name": "project", "entity": {"id": "e1", "name": "team", "__typename": "Entity"}}


@dataclass
class Stored:
    """A run as the server has it."""

    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    config: str = "{}"
    exit_code: int | None = None
    starts: int = 0
    answers: list[dict[str, Any]] = field(default_factory=list)
    """What the client sent with its upserts."""


class WandbServer(ThreadingHTTPServer):
    """Listens on the loopback."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.runs: dict[str, Stored] = {}
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed hangs up in the middle: that is part of the test."""

    def query(self, text: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Answer a GraphQL request."""
        found = re.search(r"\b(?:query|mutation)\s+(\w+)", text)
        operation, name = found[1] if found else "", str(variables.get("name") or variables.get("id"))
        if "__type" in text or "__schema" in text:
            asked = re.findall(r'(\w+)\s*:\s*__type\(name:\s*"?\$?(\w+)', text)
            return {alias: {"name": each, "fields": [], "inputFields": []} for alias, each in asked} or {"__type": None}
        if operation in ("Viewer", "viewer"):
            viewer = {"id": "u1", "entity": "team", "username": "tester", "flags": "{}", "email": "", "admin": False}
            return {"viewer": {**viewer, "teams": {"edges": []}, "apiKeys": {"edges": []}}}
        if operation == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        if operation == "RunResumeStatus":
            run = self.runs.get(name)
            return {"model": {**_PROJECT, "bucket": None if run is None else _bucket(name, run)}}
        if operation == "UpsertBucket":
            run = self.runs.setdefault(name, Stored())
            run.starts += 1
            run.config = variables.get("config") or run.config
            run.answers.append(variables)
            bucket: dict[str, Any] = {"id": name, "name": name, "displayName": name, "project": _PROJECT}
            bucket |= {"description": None, "config": run.config, "sweepName": None}
            bucket["historyLineCount"] = len(run.history)
            return {"upsertBucket": {"bucket": bucket, "inserted": run.starts == 1}}
        if operation == "CreateRunFiles":
            files = [{"name": each, "uploadUrl": f"{self.url}/up/{each}"} for each in variables.get("files", [])]
            return {"createRunFiles": {"runID": "r1", "uploadHeaders": [], "files": files}}
        return {}

    def stream(self, name: str, told: dict[str, Any]) -> None:
        """Take what a run streams: rows, by their number, and the newest summary."""
        run = self.runs.setdefault(name, Stored())
        for kind, chunk in (told.get("files") or {}).items():
            lines = [json.loads(line) for line in chunk["content"] if line.startswith("{")]
            if "history" in kind:
                begin = chunk.get("offset", len(run.history))
                run.history[begin : begin + len(lines)] = lines
            elif "summary" in kind and lines:
                run.summary = lines[-1]
        if told.get("complete"):
            run.exit_code = told.get("exitcode")


def _bucket(name: str, run: Stored) -> dict[str, Any]:
    tail = json.dumps([json.dumps(row) for row in run.history[-1:]])
    return {
        "id": name, "name": name, "displayName": name, "summaryMetrics": json.dumps(run.summary), "logLineCount": 0,
        "historyLineCount": len(run.history), "eventsLineCount": 0, "historyTail": tail, "eventsTail": "[]",
        "config": run.config, "tags": [], "wandbConfig": json.dumps({"t": 1}),
    }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def log_message(self, *_: Any) -> None: ...

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, told: dict[str, Any]) -> None:
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = self._body()
        if self.path.endswith("/graphql"):
            asked = json.loads(body)
            with self.server.lock:
                answer = self.server.query(asked["query"], asked.get("variables") or {})
            return self._answer({"data": answer})
        if found := re.match(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
            with self.server.lock:
                self.server.stream(found[1], json.loads(body))
            return self._answer({"exitcode": None, "limits": {}})
        return self._answer({})  # telemetry, which is not JSON

    def do_PUT(self) -> None:
        self._body()
        self._answer({})

    def do_GET(self) -> None:
        self._answer({})


@contextmanager
def serving(port: int = 0) -> Iterator[WandbServer]:
    """A server, in a thread; at a ``port`` of its choice."""
    with WandbServer(port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
