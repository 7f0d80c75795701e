"""A headless Chromium that tests steer: real pointers and keys, and whatever the page's own scripts can see."""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ANSWER_SECONDS = 120.0  # the machine may be busy


def chromium() -> str:
    """The browser's path; skips the test where there is none."""
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no Chromium here ({', '.join(_NAMES)}); make test-page installs it where it may")
    return path


@contextmanager
def browser(home: Path) -> Iterator["Browser"]:
    """A browser that keeps what it writes in ``home``. It speaks over two pipes: no port is opened."""
    to_browser, from_browser = os.pipe(), os.pipe()
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
        "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
        "--disable-features=Translate", f"--user-data-dir={home / 'profile'}", "--remote-debugging-pipe", "about:blank",
    ]  # fmt: skip
    # The browser reads descriptor 3 and writes 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]} 2>"$HOME/errors"', "bash", *command]
    process = subprocess.Popen(
        shell,
        env={**os.environ, "HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(to_browser[0], from_browser[1]),
        start_new_session=True,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Browser(to_browser[1], from_browser[0])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])


class Browser:
    """The DevTools protocol, messages one at a time. https://chromedevtools.github.io/devtools-protocol/"""

    def __init__(self, into: int, out_of: int) -> None:
        self._into, self._out_of = into, out_of
        self._unread = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, /, **parameters: Any) -> dict[str, Any]:
        """Do ``method`` and return its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        data = json.dumps({**message, **({"sessionId": session} if session else {})}).encode() + b"\0"
        while data:
            data = data[os.write(self._into, data) :]
        while (answer := self._next()).get("id") != self._last_id:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def wait_for(self, method: str, session: str) -> None:
        """Until an event ``method`` of ``session`` comes, or one has come."""
        while not any(e.get("method") == method and e.get("sessionId") == session for e in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._out_of], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            read = os.read(self._out_of, 1 << 20)
            assert read, "the browser has ended"
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    @contextmanager
    def page(self, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator["Page"]:
        """``file`` in a tab of its own. At the end it must have fetched nothing else, and complained of nothing."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        page.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        page.send("Page.navigate", url=file.as_uri())
        self.wait_for("Page.loadEventFired", session)
        page.drawn()
        yield page
        page.drawn()
        assert page.complaints() == []
        assert page.requests() == [file.as_uri()]
        self.send("Target.closeTarget", targetId=target)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Do ``method`` in this tab."""
        return self._browser.send(method, self._session, **parameters)

    def js(self, expression: str) -> Any:
        """The value of ``expression``, a promise's when it is one."""
        done = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def drawn(self) -> None:
        """Until what has changed is on the screen."""
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def resize(self, width: int, height: int) -> None:
        """Have a window of this size, in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def box(self, selector: str) -> dict[str, float]:
        """Where the element is, once it is scrolled into view."""
        self.js(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        self.drawn()
        box: dict[str, float] = self.js(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return {x: b.x, y: b.y, width: b.width, height: b.height}; })()"
        )
        return box

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: mouseMoved, mousePressed, mouseReleased."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        """Click in the middle of the element."""
        box = self.box(selector)
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)
        self.drawn()

    def complaints(self) -> list[str]:
        """What the console shows, and exceptions."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self._mine() if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Addresses that the page has asked for, and those it was kept from asking for."""
        return [event["params"]["request"]["url"] for event in self._mine() if _is_request(event)]

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """The page as a PNG."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _mine(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]


def _is_request(event: dict[str, Any]) -> bool:
    return event["method"] == "Network.requestWillBeSent" and not event["params"]["request"]["url"].startswith("data:")
