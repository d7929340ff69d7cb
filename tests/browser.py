"""A real headless Chromium, spoken to over its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium")


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.messages: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Run a command and return its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            self._note(answer)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _note(self, event: dict[str, Any]) -> None:
        """Keep what the page complains about."""
        if event.get("method") == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(event["params"]["exceptionDetails"])[:500])
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.messages.append(event["params"]["entry"]["text"] + event["params"]["entry"].get("url", ""))

    def open(self, url: str, width: int, height: int, *, phone: bool = False) -> None:
        """Load a page in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState == 'complete'")

    def value(self, script: str) -> Any:
        """What a JavaScript expression says."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, script: str, seconds: float = 60) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < deadline, f"never became true: {script}; {self.messages}"
            time.sleep(0.1)

    def picture(self, path: Path, scale: float = 1.0) -> None:
        """Save what is seen as PNG."""
        size = json.loads(self.value("JSON.stringify({width: innerWidth, height: innerHeight, y: scrollY})"))
        clip = {"x": 0, "scale": scale, **size}
        data = self.call("Page.captureScreenshot", format="png", clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browsing() -> Iterator[Page]:
    """A browser with one tab, and a profile that is thrown away."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
        process = subprocess.Popen(
            [CHROMIUM, *arguments, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with connect(_tab(Path(folder)), max_size=None) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            process.wait(timeout=20)


def _tab(folder: Path) -> str:
    """The address of the first tab's debugger."""
    for _ in range(300):
        with contextlib.suppress(OSError, httpx.HTTPError, IndexError):
            port = (folder / "DevToolsActivePort").read_text(encoding="ascii").split()[0]
            tabs = [tab for tab in httpx.get(f"http://127.0.0.1:{port}/json").json() if tab["type"] == "page"]
            return str(tabs[0]["webSocketDebuggerUrl"])
        time.sleep(0.1)
    raise AssertionError("chromium did not start")
