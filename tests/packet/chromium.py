"""A real Chromium without a window, driven through the pipe of its own debugging protocol.

It speaks JSON over two file descriptors, so no driver and no package stands in between. A tab
notes what a page logs, throws or asks the network for, which is what a test of a page that must be
silent wants to see.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMEOUT_S = 60
_NAMES = ("chromium", "chromium-browser", "google-chrome")
EXECUTABLE = next((found for name in _NAMES if (found := shutil.which(name))), None)
MISSING = "no Chromium here: apt-get install chromium"
# For `run`: cells that are out of sight are not laid out, unless they are told to be.
NOTHING_SKIPPED = """
document.querySelectorAll(".cell").forEach((each) => { each.style.contentVisibility = "visible" })
"""
_LOGGED = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}


def _high(descriptor: int) -> int:
    """The same file under a number that is in nobody's way."""
    there = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return there


class Chromium:
    """One browser process; `call` sends a command and returns its result."""

    def __init__(self, profile: Path) -> None:
        theirs_in, ours_out = map(_high, os.pipe())
        ours_in, theirs_out = map(_high, os.pipe())
        arguments = ["--headless=new", "--remote-debugging-pipe", "--disable-gpu"]
        arguments += ["--no-first-run", "--hide-scrollbars", f"--user-data-dir={profile}"]
        arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
        # The protocol wants descriptors 3 and 4, which a shell can name and Python cannot.
        redirected = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", redirected, str(EXECUTABLE), *arguments],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in (theirs_in, theirs_out):
            os.close(descriptor)
        self._out, self._in = ours_out, ours_in
        self._rest, self._last_id = b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        """The result of a command. Raises AssertionError when the browser refuses it."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def receive(self) -> dict[str, Any]:
        """The next message; one that is an event is kept in `events`."""
        until = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], until - time.monotonic())
            assert ready, f"Chromium has said nothing for {TIMEOUT_S} s"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "Chromium has ended"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        self.process.wait(timeout=TIMEOUT_S)
        os.close(self._out)
        os.close(self._in)


class Tab:
    """One page. `problems` is all that it logged or threw, `asked` all addresses that it wanted."""

    def __init__(self, browser: Chromium, address: str, width: int = 1280, **media: str) -> None:
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self.target, self.session = target, attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.media(**media)
        self.resize(width)
        self.call("Page.navigate", url=address)  # answered when the new document is there
        until = time.monotonic() + TIMEOUT_S
        while self.run("document.readyState") != "complete":
            assert time.monotonic() < until, f"{address} has not loaded for {TIMEOUT_S} s"

    def call(self, method: str, **params: Any) -> Any:
        """A command to this page."""
        return self.browser.call(method, self.session, **params)

    def _events(self, *names: str) -> list[dict[str, Any]]:
        return [
            event["params"]
            for event in self.browser.events
            if event.get("sessionId") == self.session and event["method"] in names
        ]

    @property
    def problems(self) -> list[dict[str, Any]]:
        """What a silent page has none of."""
        return self._events(*_LOGGED)

    @property
    def asked(self) -> list[str]:
        """Every address that the page asked for, itself first."""
        return [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    def run(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression, awaited."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        """The size of the window in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def media(self, scheme: str = "light", kind: str = "") -> None:
        """What the reader prefers (`light`, `dark`), and the medium (`print`, or none)."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)

    def press(self, key: str, code: int) -> None:
        """A key, by its name and its virtual key code."""
        for kind in ("keyDown", "keyUp"):
            about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, **about, **text)

    def picture(self, *, whole: bool = True) -> bytes:
        """A PNG of the whole page, or of what the window shows."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF")["data"])

    def close(self) -> None:
        """Close the page and forget its events."""
        self.browser.call("Target.closeTarget", targetId=self.target)


@contextlib.contextmanager
def opened(browser: Chromium, address: str, width: int = 1280, **media: str) -> Iterator[Tab]:
    """A page of its own, closed at the end."""
    tab = Tab(browser, address, width, **media)
    try:
        yield tab
    finally:
        tab.close()
