"""docs/images/chat.png: the chat page of a new server, while other clients use it.

python -m tests.server.take_picture [--dark] [FILE.png]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

from benchmarks.own_server import ready_url
from tests.server import browser

ROOT = Path(__file__).parents[2]
MAX_SIZE = 150_000  # bytes, of a picture in the docs
OTHERS = 4


def ask(url: str, number: int) -> None:
    """Another client, which sends requests while the picture is taken."""
    body = {"prompt": f"Once upon a time, number {number}", "max_tokens": 900, "ignore_eos": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with contextlib.suppress(OSError):
        while True:
            urllib.request.urlopen(request).read()


def take(url: str, dark: bool) -> bytes:
    path = browser.find()
    if path is None:
        raise SystemExit(f"no browser: none of {', '.join(browser.NAMES)}")
    with browser.browser(path) as page:
        page.go(url + "/")
        page.wait("document.querySelector('#model').value")
        for question in ("Tell me a story about a red kite", "And what happened then?"):
            page.run("document.querySelector('#input').focus()")
            page.type(question)
            page.press("Enter", number=13)
            page.wait("document.querySelector('#stop').hidden && !document.querySelector('.busy')", 120)
        page.run("document.querySelector('#show-settings').click()")
        page.picture(1000, 640, dark)  # lays the page out again
        page.run("document.querySelector('#log').scrollTop = 0")
        page.run("new Promise(done => setTimeout(done, 4500))")
        page.wait("Number(document.querySelector('#live-running').textContent) > 2")
        return page.picture(1000, 640, dark)


def main() -> None:
    parser = argparse.ArgumentParser(description="a picture of the chat page")
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "docs" / "images" / "chat.png")
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    command = [sys.executable, str(ROOT / "main.py"), "serve", "--port", "0", "--no-access-log", "--num-blocks", "600"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    try:
        url = ready_url(process.stderr)
        for number in range(OTHERS):
            threading.Thread(target=ask, args=(url, number), daemon=True).start()
        picture = take(url, options.dark)
    finally:
        process.kill()
        process.wait()
    assert len(picture) < MAX_SIZE, f"{len(picture)} bytes are too many for the docs"
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_bytes(picture)
    print(f"{options.file}: {len(picture)} bytes")


if __name__ == "__main__":
    main()
