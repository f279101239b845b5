"""The chat page in a real browser, against a real server; answers that no real server gives are injected into the page's fetch."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.server import browser
from tests.server.chat_page import alt, answers, fill, needs_browser, say, settled

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tinyvllm" / "server" / "page"


@needs_browser
def test_a_conversation(page: browser.Browser) -> None:
    say(page, "Tell me a story")
    page.wait("document.querySelector('.message.assistant .body')?.textContent.length > 40")
    settled(page)
    figures = page.run("document.querySelector('#figures').textContent")
    assert re.search(r"first token after \d+ ms · [\d.]+ tok/s · \d+ tokens · prompt \d+", figures), figures
    first = page.run("document.querySelector('.message.assistant .body').innerText")
    say(page, "And then?")
    page.wait("document.querySelectorAll('.message.assistant').length === 2")
    settled(page)
    before = page.run("document.querySelector('#log').innerText")
    page.reload()
    page.wait("document.querySelectorAll('.message').length === 4")
    after = page.run("document.querySelector('#log').innerText")
    assert first in after and before == after  # kept in the browser
    page.press("n", "KeyN", 78, modifiers=1)
    assert page.run("document.querySelectorAll('.message').length") == 0
    page.press("c", "KeyC", 67, modifiers=1)
    page.wait("document.querySelector('#conversations .open')?.textContent === 'Tell me a story'")  # the old one is in the list
    page.reload()
    page.wait("document.querySelector('#model').value")
    assert page.run("document.querySelectorAll('.message').length") == 0
    assert not page.messages


@needs_browser
def test_stopping_ends_the_work(page: browser.Browser) -> None:
    fill(page, "[data-field=temperature]", "0")
    say(page, "Tell me a very long story")
    page.wait("document.querySelector('.message.assistant .body')?.textContent.length > 20")
    page.press("Escape", number=27)
    settled(page)
    assert "stopped" in page.run("document.querySelector('.message.assistant').innerText")
    assert "stopped" in page.run("document.querySelector('#figures').innerText")
    end = time.monotonic() + 60
    while page.run("fetch('/status').then(r => r.json()).then(s => Object.values(s.models)[0].running)"):
        assert time.monotonic() < end, "the server still works on it"
    page.press("ArrowUp", number=38)
    assert page.run("document.querySelector('#input').value") == "Tell me a very long story"
    assert page.run("document.querySelectorAll('.message').length") == 0


@needs_browser
def test_every_button_is_reached_on_a_narrow_screen(page: browser.Browser) -> None:
    """Of a telephone, 320 points wide; a panel leaves the header and the form free."""
    page.picture(320, 640)
    page.wait("innerWidth === 320")
    beyond = "[...document.querySelectorAll('header > *')].filter(e => e.getBoundingClientRect().right > innerWidth).map(e => e.id)"
    assert page.run(beyond) == [] and page.run("document.documentElement.scrollWidth") == 320
    alt(page, "s")
    edges = page.run("""['#settings', '#middle'].map(name => { const e = document.querySelector(name).getBoundingClientRect();
        return [e.top, e.bottom, e.right]; })""")
    assert edges[0] == edges[1]
    alt(page, "s")
    page.call("Emulation.clearDeviceMetricsOverride")


@needs_browser
def test_settings_are_sent(page: browser.Browser) -> None:
    answers(page, "ok")
    for field, value in {"temperature": "0.5", "top_k": "7", "seed": "3", "stop": "END"}.items():
        fill(page, f"[data-field={field}]", value)
    fill(page, "#system", "Be brief.")
    fill(page, "#key", "secret")
    say(page, "one\ntwo")
    page.wait("window.sent.length === 1")
    settled(page)
    sent = page.run("window.sent[0]")
    assert sent["headers"]["Authorization"] == "Bearer secret"
    model = page.run("document.querySelector('#model').value")
    assert sent["body"] == {
        "model": model, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "top_k": 7, "seed": 3, "stop": "END",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one\ntwo"}],
    }  # fmt: skip
    assert "secret" not in page.run("JSON.stringify(localStorage)")
    page.reload()
    page.wait("document.querySelector('#model').value")
    assert page.run("document.querySelector('[data-field=seed]').value") == "3"
    assert page.run("document.querySelector('#key').value") == "secret"


@needs_browser
def test_reasoning_is_shown_separately(page: browser.Browser) -> None:
    answers(page, "because ", "of it", field="reasoning_content")
    say(page, "why?")
    page.wait("document.querySelector('details.reasoning')?.textContent.includes('because of it')")
    settled(page)
    assert page.run("document.querySelector('.message.assistant .body').textContent") == ""
    answers(page, "so")
    say(page, "and?")
    page.wait("window.sent.length === 1")
    assert page.run("window.sent[0].body.messages.map(m => Object.keys(m).join())") == ["role,content"] * 3


@needs_browser
def test_errors_are_shown_and_can_be_retried(page: browser.Browser) -> None:
    answers(page, status=400)
    say(page, "hello")
    page.wait("document.querySelector('.message.error')?.textContent === 'refused, as the test wants'")
    answers(page, status=401)
    page.press("r", "KeyR", 82, modifiers=1)
    page.wait("document.activeElement.id === 'key' || document.querySelector('#settings').hidden === false")
    settled(page)
    answers(page, "now ", "it works")
    page.press("r", "KeyR", 82, modifiers=1)
    page.wait("document.querySelector('.message.assistant .body')?.textContent === 'now it works'")
    assert not page.run("document.querySelector('.message.error')")
    assert [m["role"] for m in page.run("window.sent[0].body.messages")] == ["user"]


@needs_browser
def test_the_live_view_pauses_while_it_is_hidden(page: browser.Browser) -> None:
    page.wait("document.querySelector('#live-blocks').textContent.includes('used')")
    assert page.run("document.querySelector('#live-running').textContent") == "0"
    page.run("""Object.defineProperty(document, "visibilityState", { get: () => window.shownAs, configurable: true });
        window.shownAs = "hidden"; document.dispatchEvent(new Event("visibilitychange")); 0""")
    page.run("""window.polls = 0; const later = window.setTimeout;
        window.setTimeout = (f, pause) => f.name !== "pollStatus" ? later(f, pause)
            : (window.polls++, later(() => { window.polls--; f(); }, 0)); 0""")  # the next poll comes at once, if one comes
    page.requests.clear()
    say(page, "hi")
    settled(page)
    page.wait("window.polls === 0")
    assert not [r for r in page.requests if r.endswith("/status")]
    page.run('window.shownAs = "visible"; document.dispatchEvent(new Event("visibilitychange")); 0')
    end = time.monotonic() + 60
    while not [r for r in page.requests if r.endswith("/status")]:
        assert time.monotonic() < end, "no poll after the page is visible again"
        page.run("new Promise(done => setTimeout(done, 20))")  # its requests arrive with its reply
    page.press("l", "KeyL", 76, modifiers=1)
    assert page.run("document.querySelector('#live').hidden")


HOSTILE = [
    "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>",
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe><svg onload=window.hit=1>",
    "[click](javascript:window.hit=1) [data](data:text/html,<script>window.hit=1</script>) ![x](javascript:window.hit=1)",
    "[a](https://example.org/\"onmouseover=\"window.hit=1) <https://example.org/'onclick='window.hit=1>",
    "![pixel](https://example.org/pixel.png)",
    '```html\n<script>window.hit = 1</script>\n```\n```"><img/src=x/onerror=window.hit=1>\nx\n```',
    "| <b onclick=window.hit=1>a</b> |\n|---|\n| <img src=x onerror=window.hit=1> |",
    "# <img src=x onerror=window.hit=1>\n> <script>window.hit=1</script>\n- <details open ontoggle=window.hit=1>",
    "[x](vbscript:msgbox) [y]( java\tscript:window.hit=1) [z](JaVaScRiPt:window.hit=1)",
]
TABLES = {"TABLE", "THEAD", "TBODY", "TR", "TH", "TD"}
HARMLESS = {"P", "A", "EM", "STRONG", "CODE", "PRE", "DIV", "SPAN", "BUTTON", "H2", "BLOCKQUOTE", "UL", "LI", *TABLES}


@needs_browser
def test_model_output_is_never_executed_or_fetched(page: browser.Browser) -> None:
    answers(page, *(text + "\n\n" for text in HOSTILE))
    say(page, HOSTILE[0])
    page.wait("document.querySelector('.message.assistant .body')?.textContent.includes('JaVaScRiPt')")
    settled(page)
    page.run("document.querySelectorAll('.body a').forEach(a => a.dispatchEvent(new MouseEvent('mouseover')))")
    page.run("new Promise(done => setTimeout(done, 200))")
    assert page.run("window.hit ?? null") is None
    names = set(page.run("[...document.querySelectorAll('.body *')].map(e => e.tagName)"))
    assert names <= HARMLESS, names
    attributes = set(page.run("[...document.querySelectorAll('.body *')].flatMap(e => e.getAttributeNames())"))
    assert attributes <= {"class", "type", "href", "target", "rel", "style"}, attributes
    assert all(link.startswith("https://example.org/") for link in page.run("[...document.querySelectorAll('.body a')].map(a => a.href)"))
    assert "<script>window.hit = 1</script>" in page.run("document.querySelector('.message.assistant .body').textContent")
    assert not [r for r in page.requests if "example.org" in r or r.endswith("/x")]


def markdown(page: browser.Browser, *texts: str) -> Any:
    """The HTML of the last text, rendered into a node that showed the other texts before."""
    return page.run(f"""import("/page/markdown.js").then(m => {{ const node = document.createElement("div");
        for (const text of {json.dumps(texts)}) m.render(node, text);
        return node.innerHTML.replace(/ target="_blank" rel="[^"]*"/g, ""); }})""")


@needs_browser
@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a *b* **c** _d_ ~~e~~ `f*g*`", "<p>a <em>b</em> <strong>c</strong> <em>d</em> <s>e</s> <code>f*g*</code></p>"),
        ("snake_case_name 2 * 3 * 4 \\*x\\*", "<p>snake_case_name 2 * 3 * 4 *x*</p>"),
        ("# One\ntwo\n\nthree", "<h2>One</h2><p>two</p><p>three</p>"),
        ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
        ("3. a\n\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("> q\n> r\n\ns", "<blockquote><p>q\nr</p></blockquote><p>s</p>"),
        ("---", "<hr>"),
        ("[n](https://a.b/c) https://d.e/f.", '<p><a href="https://a.b/c">n</a> <a href="https://d.e/f">https://d.e/f</a>.</p>'),
        ("| a | b |\n|---|--:|\n| 1 | `x` |",
         '<table><thead><tr><th style="text-align: left;">a</th><th style="text-align: right;">b</th></tr></thead>'
         '<tbody><tr><td style="text-align: left;">1</td><td style="text-align: right;"><code>x</code></td></tr></tbody></table>'),
        ("```py\nif x: # y\n```",
         '<div class="block"><div><span>py</span><button type="button">copy</button></div>'
         '<pre><code><span class="w">if</span> x: <span class="c"># y</span></code></pre></div>'),
        ("open **bold and `code", "<p>open **bold and `code</p>"),
    ],
)  # fmt: skip
def test_markdown(page: browser.Browser, text: str, html: str) -> None:
    assert markdown(page, text) == html
    pieces = [text[:i] for i in range(1, len(text) + 1)]
    assert markdown(page, *pieces) == html  # as it streams


@needs_browser
@pytest.mark.parametrize("text", ["*" * 20000, "`" * 5000 + "a", "_a" * 10000, "[" * 20000, "> " * 5000, "- " * 5000, "|" * 20000,
                                  "**a " * 5000, "~" * 20000, "```" + "\"'`" * 10000, "[a](" * 5000, "\n" * 20000,
                                  "http://" * 5000])  # fmt: skip
def test_markdown_of_hostile_size_ends(page: browser.Browser, text: str) -> None:
    markdown(page, text)  # the browser has a limit of thirty seconds


def test_the_page_is_small_and_loads_nothing_from_elsewhere() -> None:
    files = {path.name: path.read_text() for path in PAGE.iterdir()}
    used = set(re.findall(r'(?:from "\./|page/)(\w+\.(?:js|css))"', "".join(files.values())))
    assert set(files) == used | {"index.html"}  # nothing is there that no file loads
    assert sum(len(text.encode()) for text in files.values()) < 76_000
    for name, text in files.items():
        assert not re.search(r"(src|href|url|import|from)\s*[=(]?\s*[\"'(]\s*(https?:)?//", text), name
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text and "document.write" not in text, name
    assert "default-src 'none'" in files["index.html"]
