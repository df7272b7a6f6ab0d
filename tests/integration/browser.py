"""A headless Chromium, driven over its debugging pipe: pages opened, looked into, clicked, photographed.

Owns the process and its messages (Chrome DevTools Protocol, JSON ended by a zero byte, on descriptors 3 and 4).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def find_chromium() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Page:
    """One tab. ``problems`` are what the page's scripts threw, and what it could not load."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.problems: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> tuple[Any, Any]:
        """(value, what it threw or None)."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return found["result"].get("value"), found.get("exceptionDetails")

    def read(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        value, thrown = self.evaluate(expression)
        assert thrown is None, (expression, thrown)
        return value

    def wait(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Until the expression is true (until then it may throw); its value."""
        deadline = time.monotonic() + timeout_s
        while True:
            value, thrown = self.evaluate(expression)
            if value and thrown is None:
                return value
            assert time.monotonic() < deadline, (
                expression,
                thrown,
                self.read("document.body.innerText"),
                self.problems,
            )
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """The mouse at the middle of the first match, as a person's would be."""
        quoted = json.dumps(selector)
        self.wait(f"document.querySelector({quoted}) !== null")
        self.read(f"document.querySelector({quoted}).scrollIntoView({{block: 'center'}})")
        box = self.read(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])(document.querySelector({quoted}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def photograph(self, path: Path, clip: dict[str, float] | None = None) -> None:
        """PNG of what is in sight, or of ``clip`` (x, y, width, height in the page's pixels; scale)."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, **({"clip": clip} if clip else {}))
        path.write_bytes(base64.b64decode(shot["data"]))

    def heard(self, message: dict[str, Any]) -> None:
        if message["method"] == "Runtime.exceptionThrown":
            self.problems.append(str(message["params"]["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.problems.append(str(message["params"]["entry"]))


class Browser:
    """Raises AssertionError when the browser does not answer within ``timeout_s``."""

    def __init__(self, path: str, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._profile = tempfile.TemporaryDirectory()
        down, self._down = os.pipe()
        self._up, up = os.pipe()
        command = ["bash", "-c", f'exec "$@" 3<&{down} 4>&{up}', "chromium", path, *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(down, up), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(down)
        os.close(up)
        os.set_blocking(self._up, False)
        self._buffer = b""
        self._calls = 0
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._down)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._up)
        self._profile.cleanup()

    def new_page(self, width: int = 1400, height: int = 1000) -> Page:
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        return page

    def call(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._down, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._calls:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer and (page := self._pages.get(answer.get("sessionId", ""))):
                page.heard(answer)
        raise AssertionError(f"the browser did not answer {method}")

    def _messages(self) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            head, zero, rest = self._buffer.partition(b"\0")
            if zero:
                self._buffer = rest
                yield json.loads(head)
                continue
            try:
                part = os.read(self._up, 1 << 20)
            except BlockingIOError:
                time.sleep(0.005)
                continue
            assert part, "the browser ended"
            self._buffer += part


@contextmanager
def new_page(chromium: str, width: int = 1400) -> Iterator[Page]:
    with Browser(chromium) as browser:
        yield browser.new_page(width)
