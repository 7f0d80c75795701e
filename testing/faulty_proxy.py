"""A proxy between an S3 client and an S3 server that spoils some exchanges. Loopback only; plain HTTP/1.1.

    python -m testing.faulty_proxy PORT UPSTREAM_PORT SEED

GET /__stats returns counts; PUT /__faults takes JSON: {"<fault>": probability, ..., "latency": seconds,
"script": [fault or "", ...]}, where the script is for the next requests. Faults:

- slow_down: 503 SlowDown, not forwarded
- error: 500 InternalError, not forwarded
- lost: forwarded, then 500 instead of the answer, so that a write took effect that the client was told has failed
- cut_request: the connection ends in the middle of the request's body
- cut_answer: forwarded, and the connection ends before the answer
- truncate: the connection ends in the middle of the answer's body
- expired: 403 ExpiredToken, not forwarded
- hang: no answer, and the connection stays open
- ignore_conditions: forwarded without If-Match and If-None-Match, as by a store that does not know them
- down: the connection ends at once
"""

import asyncio
import json
import random
import sys
from collections import Counter, defaultdict
from typing import Any
from urllib.parse import unquote

FAULTS = (
    "slow_down", "error", "lost", "cut_request", "cut_answer", "truncate", "expired", "hang", "ignore_conditions",
    "down",
)  # fmt: skip
_REFUSALS = {"slow_down": (503, "SlowDown"), "error": (500, "InternalError"), "expired": (403, "ExpiredToken")}
_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{0}</Code><Message>{0}</Message></Error>'

Headers = dict[str, str]


class Proxy:
    """State of the proxy: probabilities of faults, and counts of requests by kind."""

    def __init__(self, upstream_port: int, seed: int) -> None:
        self._upstream_port, self._random = upstream_port, random.Random(seed)
        self._faults: dict[str, Any] = {}
        self._script: list[str] = []
        self._counts: Counter[str] = Counter()
        self._requests: list[str] = []
        # Unlike a real service, the server does not check a condition and write in one atomic step.
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            while head := await _read_head(reader):
                method, path, headers = head
                if headers.get("expect"):
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                if path.startswith("/__"):
                    await self._administer(path, await _read_body(reader, headers), writer)
                elif not await self._exchange(method, path, headers, reader, writer):
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()
            else:
                writer.close()

    async def _administer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/__faults":
            self._faults = json.loads(body)
            self._script = self._faults.pop("script", [])
        answer = json.dumps({"counts": self._counts, "requests": self._requests}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
        await writer.drain()

    def _draw(self) -> str | None:
        if self._script:
            return self._script.pop(0) or None
        roll = self._random.random()
        for fault in FAULTS:
            roll -= self._faults.get(fault, 0.0)
            if roll < 0:
                return fault
        return None

    async def _exchange(
        self, method: str, path: str, headers: Headers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Pass one request on. Returns whether the connection is kept."""
        kind = _kind(method, path, headers)
        self._counts[kind] += 1
        self._requests.append(f"{kind} {unquote(path.partition('?')[0])}")
        fault = self._draw()
        if fault:
            self._counts[f"fault {fault}"] += 1
        if fault == "down" or fault == "cut_request":
            if fault == "cut_request" and int(headers.get("content-length", 0)):
                await reader.read(65536)
            writer.transport.abort()
            return False
        if fault == "hang":
            await asyncio.sleep(3600)
        body = await _read_body(reader, headers)
        self._counts["bytes up"] += len(body)
        await asyncio.sleep(self._faults.get("latency", 0.0) * self._random.random() * 2)
        if fault in _REFUSALS:
            return await _refuse(writer, *_REFUSALS[fault], method)
        if fault == "ignore_conditions":
            headers = {name: value for name, value in headers.items() if name not in ("if-match", "if-none-match")}
        async with self._locks[path] if "conditional" in kind else asyncio.Lock():
            start, content = await self._forward(method, path, headers, body)
        self._counts["bytes down"] += len(content)
        if fault == "cut_answer":
            writer.transport.abort()
            return False
        if fault == "lost":
            return await _refuse(writer, 500, "InternalError", method)
        writer.write(start + (content[: len(content) // 2] if fault == "truncate" else content))
        await writer.drain()
        if fault == "truncate":
            writer.transport.close()
            return False
        return True

    async def _forward(self, method: str, path: str, headers: Headers, body: bytes) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        dropped = ("connection", "expect", "transfer-encoding", "content-length")
        lines = [
            f"{method} {path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers.items() if name not in dropped),
            f"content-length: {len(body)}", "connection: close", "", "",
        ]  # fmt: skip
        writer.write("\r\n".join(lines).encode("latin-1") + body)
        await writer.drain()
        head = await _read_head(reader)
        if head is None:
            raise OSError("the server ended the connection")
        _, code, found = head
        has_body = method != "HEAD" and code[:3] not in ("204", "304")
        content = await _read_body(reader, found, to_end=True) if has_body else b""
        writer.close()
        found.pop("connection", None)
        found.pop("transfer-encoding", None)
        if method != "HEAD":
            found["content-length"] = str(len(content))
        lines = [f"HTTP/1.1 {code}", *(f"{name}: {value}" for name, value in found.items()), "", ""]
        return "\r\n".join(lines).encode("latin-1"), content


def _kind(method: str, path: str, headers: Headers) -> str:
    """Return a name of the kind of a request, such as ``GET``, ``PUT conditional``, ``PUT part`` or ``GET list``."""
    if "partNumber=" in path:
        return f"{method} part"
    if "upload" in path.partition("?")[2]:
        return f"{method} uploads"
    if "list-type" in path:
        return f"{method} list"
    if method == "PUT" and {"if-match", "if-none-match"} & headers.keys():
        return "PUT conditional"
    return method


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, str, Headers] | None:
    """Return method and path of a request, or version and code of an answer, and the headers."""
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *rest = text.split("\r\n")[:-2]
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
    if first.startswith("HTTP/"):
        return first[:8], first[9:], headers
    method, path, _ = first.split(" ")
    return method, path, headers


async def _read_body(reader: asyncio.StreamReader, headers: Headers, *, to_end: bool = False) -> bytes:
    if "chunked" in headers.get("transfer-encoding", ""):
        parts = []
        while size := int((await reader.readline()).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readline()
        await reader.readline()
        return b"".join(parts)
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return await reader.read() if to_end else b""


async def _refuse(writer: asyncio.StreamWriter, status: int, code: str, method: str) -> bool:
    body = b"" if method == "HEAD" else _ERROR.format(code).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/xml\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return True


async def _main(port: int, upstream_port: int, seed: int, host: str = "127.0.0.1") -> None:
    hosts = sorted({"127.0.0.1", host})
    server = await asyncio.start_server(Proxy(upstream_port, seed).serve, hosts, port, limit=2**20)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    port, upstream_port, seed = map(int, sys.argv[1:4])
    asyncio.run(_main(port, upstream_port, seed, *sys.argv[4:]))
