"""What tests do with the chat page in a browser: the keys of a user, and answers that no real server gives."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server import browser

needs_browser = pytest.mark.skipif(browser.find() is None, reason=f"no browser: none of {', '.join(browser.NAMES)}")


def say(page: browser.Browser, text: str) -> None:
    page.run("document.querySelector('#input').focus()")
    page.type(text)
    page.press("Enter", number=13)


def fill(page: browser.Browser, selector: str, value: str) -> None:
    page.run(f"""{{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)};
        e.dispatchEvent(new Event("input", {{bubbles: true}})); e.dispatchEvent(new Event("change", {{bubbles: true}})); }}""")


def answers(page: browser.Browser, *contents: str, status: int = 200, field: str = "content", finish: str | None = "stop") -> None:
    """From now on /v1/chat/completions returns these pieces, and window.sent holds the request bodies."""
    chunks = [{"choices": [{"index": 0, "delta": {field: text}, "finish_reason": None}]} for text in contents]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    if status != 200:
        body = json.dumps({"error": {"message": "refused, as the test wants", "type": "t", "param": None, "code": None}})
    page.run(f"""window.sent = []; window.real ??= window.fetch;
        window.fetch = async (to, options) => {{
            if (!String(to).includes("chat/completions")) return window.real(to, options);
            window.sent.push({{ body: JSON.parse(options.body), headers: options.headers }});
            return new Response({json.dumps(body)}, {{ status: {status} }});
        }}; 0""")


def settled(page: browser.Browser) -> None:
    page.wait("document.querySelector('#stop').hidden && !document.querySelector('.busy')")


def alt(page: browser.Browser, letter: str) -> None:
    page.press(letter, f"Key{letter.upper()}", ord(letter.upper()), modifiers=1)


def click(page: browser.Browser, text: str, within: str = "body") -> None:
    """Click the last visible button with this text."""
    found = f"[...document.querySelectorAll({json.dumps(within + ' button')})].filter(b => b.textContent === {json.dumps(text)})"
    page.run(found + ".at(-1).click()")


def texts(page: browser.Browser, selector: str) -> list[Any]:
    found: list[Any] = page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")
    return found


def upload(page: browser.Browser, text: str) -> None:
    """Choose a file with this text to import."""
    page.run(f"""{{ const files = new DataTransfer(); files.items.add(new File([{json.dumps(text)}], "f.json"));
        const input = document.querySelector("#file"); input.files = files.files; input.dispatchEvent(new Event("change")); }}""")


def notice(page: browser.Browser, part: str) -> str:
    """Wait until the notice has this part, and return all of it."""
    page.wait(f"document.querySelector('#notice').textContent.includes({json.dumps(part)})")
    return str(page.run("document.querySelector('#notice').textContent"))
