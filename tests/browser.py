"""A real browser for tests: Debian's chromium, headless, driven through its own pipe with the standard library."""

import base64
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from memfit.reports.page import write_page

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
# Chromium listens on descriptor 3 and answers on 4; they must be exactly those.
LAUNCH = (
    "import fcntl, os, sys\n"
    "ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]\n"
    "os.dup2(ends[0], 3), os.dup2(ends[1], 4)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)


class Browser:
    """One page of a headless chromium, and everything it complained about or asked the network for."""

    def __init__(self, program: str, profile: Path) -> None:
        """Start chromium with a fresh profile."""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._buffer, self._number = b"", 0
        read_end, self._write = os.pipe()
        self._read, write_end = os.pipe()
        launcher = [sys.executable, "-c", LAUNCH, str(read_end), str(write_end)]
        command = [*launcher, program, *FLAGS, f"--user-data-dir={profile}"]
        with open(profile.with_suffix(".log"), "wb") as log:
            self._process = subprocess.Popen(
                command, pass_fds=(read_end, write_end), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        os.close(read_end)
        os.close(write_end)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """Stop chromium."""
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Result of one command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result

    def _receive(self, timeout_seconds: float = 60) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], timeout_seconds)
            assert ready, "chromium doesn't answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "chromium has ended"
            self._buffer += chunk
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        bad_call = method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning")
        if bad_call or method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the window and the colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file and wait until its script has run."""
        self.problems.clear()
        self.requests.clear()
        # Only the fragment may differ from the page before, which would not load anything.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.as_uri() + fragment)
        deadline = time.monotonic() + 30
        while self.run("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < deadline, "the page doesn't finish loading"
            time.sleep(0.05)

    def run(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def text(self, selector: str) -> str:
        """Text of the first element that matches."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    def count(self, selector: str) -> int:
        """Number of elements that match."""
        return int(self.run(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Send a mouse event."""
        pressed = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def show(self, result: Any, folder: Path, width: int = 1280, height: int = 3600) -> "Browser":
        """Open the page of a result; nothing may go wrong in it, and nothing but the file be asked for."""
        self.resize(width, height)
        self.open(write_page(result, folder / "page.html"))
        assert self.problems == []
        assert len(self.requests) == 1
        return self
