"""A headless Chromium over its debugging pipe: the DevTools protocol with the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars")
_LAUNCH = "import os, sys; a = sys.argv; os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execv(a[3], a[3:])"  # it reads 3 and writes 4


def find() -> str | None:
    """The path of a browser, TEST_BROWSER first; None if there is none."""
    given = os.environ.get("TEST_BROWSER")
    return given or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `messages` holds its console output and errors, `requests` the addresses that it requested,
    `dialogs` the kinds of those that it opened and that were accepted."""

    def __init__(self, commands: int, replies: int):
        self._commands = commands
        self._replies = replies
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Send one command of the protocol, and return its result."""
        number = self._send(method, params)
        while True:
            reply = self._read(30)
            if reply.get("id") == number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        return self._number

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script[:80]}: {result['exceptionDetails']['exception'].get('description')}")
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = 120) -> Any:
        """Wait until the expression is truthy, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise AssertionError(f"still false: {script}; console: {self.messages}; page: {self.run('document.body.innerText')[-400:]}")
            time.sleep(0.05)
        return value

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self._loaded(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def _loaded(self, script: str) -> None:
        """Wait for the expression in the page that is on its way: an evaluation that the old page's end cuts off is asked again."""
        while True:
            try:
                self.wait(script)
                return
            except RuntimeError as error:
                if "navigated or closed" not in str(error):
                    raise

    def reload(self) -> None:
        self.run("window.before = 1")
        self.call("Page.reload")
        self._loaded("!window.before && document.readyState === 'complete'")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: str = "", number: int = 0, modifiers: int = 0) -> None:
        """Press a key: `number` is its key code, modifiers 1 Alt, 2 Control, 8 Shift."""
        text = "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            event = {"type": kind, "key": key, "code": code or key, "windowsVirtualKeyCode": number, "modifiers": modifiers}
            self.call("Input.dispatchKeyEvent", **event, **extra)

    def picture(self, width: int, height: int, dark: bool = False) -> bytes:
        """The page as PNG."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        time.sleep(0.3)
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _read(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            if not select.select([self._replies], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"the browser has said nothing for {seconds} s")
            piece = os.read(self._replies, 1 << 16)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.messages.append(details.get("exception", {}).get("description") or details["text"])
        elif message.get("method") == "Log.entryAdded":
            self.messages.append(params["entry"]["text"])
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message.get("method") == "Page.javascriptDialogOpening":
            self.dialogs.append(params["type"])
            self._send("Page.handleJavaScriptDialog", {"accept": True})
        return message


@contextlib.contextmanager
def browser(path: str) -> Iterator[Browser]:
    """A new browser with its own profile."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs_in, theirs_out)]  # not 3 and 4, which Chromium uses
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # its child processes may still write into it
        command = [sys.executable, "-c", _LAUNCH, *map(str, high), path, "--remote-debugging-pipe", *_FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(command, pass_fds=high, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (theirs_in, theirs_out, *high):
            os.close(end)
        try:
            page = Browser(ours_out, ours_in)
            yield page
        finally:
            process.kill()
            process.wait()
            os.close(ours_in)
            os.close(ours_out)
