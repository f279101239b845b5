"""docs/images/chat.png and chat-tokens.png: the chat page of a new server, while other clients use it; the second one dark, with tokens.

python -m tests.server.take_picture [FOLDER]
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
from tests.server.chat_page import alt

ROOT = Path(__file__).parents[2]
MAX_SIZE = 150_000  # bytes, of a picture in the docs
OTHERS = 4
WIDTH, HEIGHT = 1040, 640


def send_forever(url: str, number: int) -> None:
    """Another client, which sends requests while the picture is taken."""
    body = {"prompt": f"Once upon a time, number {number}", "max_tokens": 900, "ignore_eos": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with contextlib.suppress(OSError):
        while True:
            urllib.request.urlopen(request).read()


def ask(page: browser.Browser, question: str) -> None:
    page.run("document.querySelector('#input').focus()")
    page.type(question)
    page.press("Enter", number=13)
    settle(page)


def settle(page: browser.Browser) -> None:
    page.wait("document.querySelector('#stop').hidden && !document.querySelector('.busy')", 120)


def take(url: str) -> dict[str, bytes]:
    path = browser.find()
    if path is None:
        raise SystemExit(f"no browser: none of {', '.join(browser.NAMES)}")
    with browser.browser(path) as page:
        page.go(url + "/")
        page.wait("document.querySelector('#model').value")
        alt(page, "c")
        for question in ("What is the sun?", "Why is the sky blue?"):
            ask(page, question)
            alt(page, "n")
        ask(page, "Tell me a story about a red kite")
        alt(page, "r")
        settle(page)
        alt(page, "p")
        settle(page)
        ask(page, "And what happened then?")
        alt(page, "s")
        page.picture(WIDTH, HEIGHT)  # lays the page out again
        page.run("document.querySelector('#log').scrollTop = 0")
        page.run("new Promise(done => setTimeout(done, 4500))")
        page.wait("Number(document.querySelector('#live-running').textContent) > 2")
        light = page.picture(WIDTH, HEIGHT)
        alt(page, "s")
        alt(page, "t")
        settle(page)
        page.wait("document.querySelectorAll('.tokens span').length")
        page.run("""[...document.querySelectorAll('.tokens span')]
            .reduce((a, b) => (a.style.getPropertyValue("--p") < b.style.getPropertyValue("--p") ? a : b)).focus()""")
        return {"chat.png": light, "chat-tokens.png": page.picture(WIDTH, HEIGHT, dark=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description="pictures of the chat page")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    command = [sys.executable, str(ROOT / "main.py"), "serve", "--port", "0", "--no-access-log", "--num-blocks", "600"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    try:
        url = ready_url(process.stderr)
        for number in range(OTHERS):
            threading.Thread(target=send_forever, args=(url, number), daemon=True).start()
        pictures = take(url)
    finally:
        process.kill()
        process.wait()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        assert len(picture) < MAX_SIZE, f"{name}: {len(picture)} bytes are too many for the docs"
        (options.folder / name).write_bytes(picture)
        print(f"{options.folder / name}: {len(picture)} bytes")


if __name__ == "__main__":
    main()
