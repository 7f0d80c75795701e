"""Whether a tracker's server can be reached is found out without its client."""

import os
import socket
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.disturb import family
from serried.records.trackers.reach import ask
from tests.test_trackers import await_wandb, warned
from tests.tracked import Records, mirrors, wait_for
from tests.wandb_server import WandbServer, serving

_KEY = 40 * "7"
_ONLINE = {"wandb": "online", "mlflow": None}


@pytest.fixture(autouse=True)
def _nobodys_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "NETRC")) or "proxy" in name.lower()
    ]:
        monkeypatch.delenv(name)
    (tmp_path / "home" / ".config" / "wandb").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def why_unreachable(name: str, track: dict[str, Any], seconds: float = 20.0) -> str | None:
    return ask(name, track, seconds).why_not


def _no_such_host(*_: Any, **__: Any) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with serving() as server:
        yield server


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def test_without_a_key_there_is_no_hope() -> None:
    assert "no key for https://api.wandb.ai: WANDB_API_KEY is not set" in str(why_unreachable("wandb", _ONLINE))


@pytest.mark.parametrize("where", ["variable", "token file", "netrc", "named netrc", "settings"])
def test_a_key_is_found_wherever_the_client_looks(
    where: str, server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    assert why_unreachable("wandb", _ONLINE) is not None
    entry = f"machine {server.url.removeprefix('http://')}\n  login user\n  password {_KEY}\n"
    if where == "variable":
        monkeypatch.setenv("WANDB_API_KEY", _KEY)
    elif where == "token file":
        monkeypatch.setenv("WANDB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    elif where == "netrc":
        (tmp_path / "home" / ".netrc").write_text(entry)
    elif where == "named netrc":
        (tmp_path / "mine").write_text(entry)
        monkeypatch.setenv("NETRC", str(tmp_path / "mine"))
    else:
        (tmp_path / "home" / ".config" / "wandb" / "settings").write_text(f"[default]\napi_key = {_KEY}\n")
    assert why_unreachable("wandb", _ONLINE) is None


def test_a_key_for_somebody_else_is_none(server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    (tmp_path / "home" / ".netrc").write_text("machine example.org\n  login user\n  password secret\n")
    assert "no key" in str(why_unreachable("wandb", _ONLINE))


@pytest.mark.parametrize("folder", ["wandb", ".wandb", "home/.config/wandb"])
def test_the_address_is_found_wherever_the_client_looks(
    folder: str, nobody: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", _KEY)
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "settings").write_text(f"[default]\nbase_url = {nobody}\n")
    assert why_unreachable("wandb", _ONLINE) == f"{nobody} cannot be reached (Connection refused)"


@pytest.mark.parametrize(
    "content", [b"no settings", b"[default\nbase_url = http://127.0.0.1:1", b"[default]\na = \xff"]
)
def test_of_settings_that_cannot_be_read_the_client_is_to_judge(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "home" / ".config" / "wandb" / "settings").write_bytes(content)
    assert why_unreachable("wandb", _ONLINE) is None


@pytest.mark.parametrize(
    ("variable", "proxy"),
    [("all_proxy", "http://127.0.0.1:1"), ("http_proxy", "socks5://127.0.0.1:1"), ("https_proxy", "127.0.0.1:1")],
)
def test_a_proxy_that_others_know_how_to_use_is_left_to_them(
    variable: str, proxy: str, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_unreachable("mlflow", {"mlflow": nobody}) is not None
    monkeypatch.setenv(variable, proxy)
    assert ask("mlflow", {"mlflow": nobody}) == (False, None)


def test_a_proxy_of_its_own_is_left_to_the_client(nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", _KEY)
    monkeypatch.setenv("WANDB_BASE_URL", nobody)
    monkeypatch.setenv("WANDB_HTTPS_PROXY", "http://127.0.0.1:3128")
    assert ask("wandb", _ONLINE) == (False, None)


def test_the_proxy_of_the_environment_is_asked(
    nobody: str, server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    assert why_unreachable("mlflow", {"mlflow": "http://nothing.invalid"}) is None
    monkeypatch.setenv("http_proxy", nobody)
    assert "cannot be reached (Connection refused)" in str(why_unreachable("mlflow", {"mlflow": server.url}))


def test_who_answers_can_be_reached_unless_he_says_that_he_fails(
    server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, unknown = (True, None), (False, None)
    assert ask("mlflow", {"mlflow": server.url}) == answered
    assert ask("mlflow", {"mlflow": server.url.replace("http", "https")}) == unknown, "he speaks no TLS"
    handler: Any = server.RequestHandlerClass
    monkeypatch.setattr(handler, "do_POST", lambda self: self.send_error(404))
    assert ask("mlflow", {"mlflow": server.url}) == unknown
    monkeypatch.setattr(handler, "do_POST", lambda self: self.send_error(503))
    assert why_unreachable("mlflow", {"mlflow": server.url}) == f"{server.url} answers 503 (Service Unavailable)"
    for page in (b"no HTTP\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n<html>A page", b"HTTP/1.0 200 OK\r\n\r\n[7]"):
        monkeypatch.setattr(handler, "do_POST", lambda self, page=page: self.wfile.write(page))
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", _KEY)
        assert ask("wandb", _ONLINE) == unknown


def test_of_who_does_not_know_the_key_the_client_is_to_judge(
    server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_IDENTITY_TOKEN_FILE", "token")
    assert ask("wandb", _ONLINE) == (False, None)
    monkeypatch.setenv("WANDB_API_KEY", _KEY)
    assert ask("wandb", _ONLINE) == (True, None)


def test_a_key_does_not_follow_where_an_address_leads(server: WandbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    handler: Any = server.RequestHandlerClass

    def lead_away(self: Any) -> None:
        heard.append(self.headers["Authorization"])
        self.send_response(302)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self: Any) -> None:
        heard.append(self.headers["Authorization"])
        self.send_error(404)

    monkeypatch.setattr(handler, "do_POST", lead_away)
    monkeypatch.setattr(handler, "do_GET", answer)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", _KEY)
    assert ask("wandb", _ONLINE) == (False, None)
    assert heard == [f"Basic {b64encode(b'api:' + _KEY.encode()).decode()}", None]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_it_is_what_the_client_asks_that_is_to_be_answered(
    name: str, server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a page of static files may be where the server behind it hangs."""
    server.hangs.set()
    monkeypatch.setenv("WANDB_BASE_URL", server.url + "/of/ours/")
    monkeypatch.setenv("WANDB_API_KEY", _KEY)
    track = {"wandb": "online", "mlflow": server.url + "/of/ours/"}
    assert why_unreachable(name, track, seconds=0.3) == f"{server.url}/of/ours/ has not answered for 0 s"
    (path,) = wait_for(lambda: server.asked)
    assert path == "/of/ours" + {"wandb": "/graphql", "mlflow": "/api/2.0/mlflow/experiments/search"}[name]


def test_who_does_not_answer_cannot_be_reached(nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://user:secret@127.0.0.1:{silent.getsockname()[1]}"
        why = str(why_unreachable("mlflow", {"mlflow": address}, seconds=0.3))
    assert "has not answered for 0 s" in why
    assert "secret" not in why
    assert "http://127.0.0.1" in why
    assert why_unreachable("mlflow", {"mlflow": "http://[not-an-address"}) is None
    assert why_unreachable("mlflow", {"mlflow": nobody}) == f"{nobody} cannot be reached (Connection refused)"
    monkeypatch.setattr(socket, "getaddrinfo", _no_such_host)
    assert why_unreachable("mlflow", {"mlflow": "http://nothing.invalid"}) == (
        "http://nothing.invalid cannot be reached (Name or service not known)"
    )


@pytest.mark.parametrize(
    ("name", "track"),
    [
        ("wandb", {"wandb": "offline"}),
        ("tensorboard", _ONLINE),
        ("mlflow", {"mlflow": "sqlite:///mlflow.db"}),
        ("mlflow", {"mlflow": "mlruns"}),
        ("mlflow", {"mlflow": "databricks"}),
    ],
)
def test_what_needs_no_web_address_is_not_asked(name: str, track: dict[str, Any]) -> None:
    assert why_unreachable(name, track) is None


@pytest.mark.slow
def test_a_mirror_imports_no_client_until_there_is_somebody_to_reach(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setenv("WANDB_API_KEY", _KEY)
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
    records = Records(text, run_dir, "track.wandb=online")
    records.steps(1, 4)
    (warning,) = warned(records, capsys)
    assert f"W&B: {server.url} cannot be reached (Connection refused); it is tried again now and then" in warning
    (mirror,) = mirrors(run_dir)
    assert family(mirror) == [mirror]
    assert "pydantic_core" not in Path(f"/proc/{mirror}/maps").read_text(), "which W&B's client imports"
    with serving(server.server_address[1]) as server:
        await_wandb(records, capsys)
        assert "pydantic_core" in Path(f"/proc/{mirror}/maps").read_text()
        records.steps(5, 6)
        records.end()
        assert [row["step"] for row in server.runs["abcd1234"].history] == list(range(1, 7))
