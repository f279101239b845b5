"""The chat page's conversations: versions, replay, tokens, the list, files, and storage that fails; in a real browser."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.server import browser
from tests.server.chat_page import alt, answers, click, fill, needs_browser, notice, say, settled, texts, upload

pytestmark = needs_browser

HEADS = """new Promise(done => { const opening = indexedDB.open("tinyvllm"); opening.onsuccess = () => {
    const all = opening.result.transaction("TABLE").objectStore("TABLE").getAll();
    all.onsuccess = () => { opening.result.close(); done(all.result); }; }; })"""


def rows(page: browser.Browser, table: str) -> list[dict[str, Any]]:
    """What the browser keeps of the page in this table."""
    found: list[dict[str, Any]] = page.run(HEADS.replace("TABLE", table))
    return found


def body(page: browser.Browser, kind: str = "assistant") -> str:
    return texts(page, f".message.{kind} > .body")[-1]


def note(page: browser.Browser) -> str:
    return texts(page, ".message.assistant .note")[-1]


def ask(page: browser.Browser, text: str) -> str:
    say(page, text)
    settled(page)
    return body(page)


def test_an_answer_is_replayed_and_its_tokens_are_shown(page: browser.Browser) -> None:
    fill(page, "[data-field=max_tokens]", "24")
    first = ask(page, "Tell me a story")
    seed = note(page).split("seed ")[1].split()[0]
    assert int(seed) < 2**32
    alt(page, "p")
    page.wait("document.querySelector('.assistant .note').textContent.startsWith('replay: equal, 24 tokens')")
    alt(page, "t")
    page.wait("document.querySelectorAll('.tokens span').length === 24")
    shown = "".join(texts(page, ".tokens span")).replace("↵", "")
    assert "".join(shown.split()) == "".join(first.split())  # apart from paragraphs
    page.run("document.querySelector('.tokens span').focus()")
    page.press("ArrowRight", number=39)
    detail = page.run("document.querySelector('.detail').textContent")
    assert detail.startswith("2: ") and detail.count("%") in (5, 6), detail  # it, and the others of five
    page.run("document.querySelectorAll('.tokens span')[3].dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))")
    assert page.run("document.querySelector('.detail').textContent").startswith("4: ")
    alt(page, "r")
    settled(page)
    page.wait("document.querySelector('.tools').nextSibling || document.querySelectorAll('.message').length === 2")
    assert f"seed {seed}" not in note(page) and not texts(page, ".tokens")  # another answer has a seed of its own
    alt(page, "j")
    assert f"seed {seed}" in note(page) and texts(page, ".tokens")
    assert not page.messages


def test_a_replay_that_differs(page: browser.Browser) -> None:
    answers(page, "the sky ", "is blue")
    ask(page, "look")
    answers(page, "the sky ", "is grey")
    click(page, "replay")
    page.wait(
        "document.querySelector('.assistant .note').textContent.includes('differs after 8 characters: \"is grey\" is now, \"is blue\" was')"
    )
    answers(page, "the sky ")
    click(page, "replay")
    page.wait("document.querySelector('.assistant .note').textContent.includes('it ends after 8 of 15 characters')")
    click(page, "tokens")
    settled(page)
    assert body(page) == "the sky is blue" and not texts(page, ".tokens")
    sent = page.run("window.sent.map(s => s.body)")
    assert [s["seed"] for s in sent] == [sent[0]["seed"]] * 2 and sent[0]["top_logprobs"] == 5


def test_a_cut_answer_is_continued_and_replayed(page: browser.Browser) -> None:
    fill(page, "[data-field=max_tokens]", "5")
    first = ask(page, "Tell me a story")
    assert "length" in note(page)
    alt(page, "m")
    settled(page)
    page.wait(f"document.querySelector('.message.assistant .body').textContent.length > {len(first)}")
    assert body(page).startswith(first)
    click(page, "replay")
    page.wait("document.querySelector('.assistant .note').textContent.startsWith('replay: equal, 10 tokens')")  # both requests
    say(page, "And then?")
    settled(page)
    assert texts(page, ".message.assistant .tools")[0].count("continue") == 0  # what follows belongs to the text as it is


def test_a_stopped_answer_is_replayed_as_far_as_it_went(page: browser.Browser) -> None:
    fill(page, "[data-field=temperature]", "1")
    say(page, "Tell me a very long story")
    page.wait("document.querySelector('.message.assistant .body')?.textContent.length > 20")
    page.press("Escape", number=27)
    settled(page)
    click(page, "replay")
    page.wait("document.querySelector('.assistant .note').textContent.startsWith('replay: equal')")


def test_versions_of_questions_and_answers(page: browser.Browser) -> None:
    answers(page, "one")
    ask(page, "first")
    answers(page, "two")
    alt(page, "r")
    settled(page)
    assert body(page) == "two" and "2/2" in texts(page, ".message.assistant .tools")[0]
    click(page, "edit", ".message.user")
    assert texts(page, ".message") == []
    page.press("Escape", number=27)
    assert body(page) == "two"  # nothing is lost
    click(page, "edit", ".message.user")
    page.run("document.querySelector('#input').value = ''")
    answers(page, "three")
    assert ask(page, "second") == "three"
    page.reload()
    page.wait("document.querySelectorAll('.message').length === 2")
    assert body(page, "user") == "second"
    click(page, "<", ".message.user")
    assert body(page, "user") == "first" and body(page) == "two"
    alt(page, "j")
    assert body(page) == "one"
    click(page, "edit", ".message.assistant")
    page.run("document.querySelector('#input').value = ''")
    say(page, "my own")
    assert body(page) == "my own" and "3/3" in texts(page, ".message.assistant .tools")[0] and "replay" not in texts(page, "button")
    answers(page, " words")
    click(page, "continue")
    settled(page)
    assert body(page) == "my own words"
    sent = page.run("window.sent[0].body")
    assert sent["continue_final_message"] and not sent["add_generation_prompt"]
    assert sent["messages"] == [{"role": "user", "content": "first"}, {"role": "assistant", "content": "my own"}]


def test_an_answer_that_was_stopped_before_its_first_token(page: browser.Browser) -> None:
    answers(page, "one")
    ask(page, "first")
    page.run("""window.fetch = (to, { signal } = {}) => !String(to).includes("chat/completions") ? window.real(to)
        : new Promise((_, refuse) => signal.addEventListener("abort", () => refuse(signal.reason))); 0""")
    say(page, "second")
    page.run("{ const now = performance.now.bind(performance); let calls = 0; performance.now = () => now() + 3000 * ++calls; }")
    count = HEADS.replace("TABLE", "messages").replace("done(all.result)", "done(all.result.length === COUNT)")
    page.wait(count.replace("COUNT", "4"))  # it is kept every few seconds, and the head names it
    page.press("Escape", number=27)
    settled(page)
    page.wait(count.replace("COUNT", "3"))
    page.reload()
    page.wait("document.querySelectorAll('.message').length === 3")
    assert body(page, "user") == "second"
    answers(page, "two")
    alt(page, "r")  # of the last question, not of the last answer
    settled(page)
    assert texts(page, ".message > .body") == ["first", "one", "second", "two"]


def test_the_view_and_the_focus_remain(page: browser.Browser) -> None:
    answers(page, "a\n\n" * 60)
    ask(page, "first")
    alt(page, "r")
    settled(page)
    ask(page, "more")
    assert page.run("document.querySelector('#log').scrollTop") > 500  # what is new is shown
    page.run("document.querySelector('#log').scrollTop = 100")
    click(page, "<", ".assistant")
    assert "1/2" in texts(page, ".assistant .tools")[0] and page.run("document.querySelector('#log').scrollTop") == 100
    alt(page, "t")
    settled(page)
    page.run("[...document.querySelectorAll('.assistant button')].find(b => b.textContent === 'tokens').focus({preventScroll: true})")
    page.press("Enter", number=13)
    assert page.run("document.activeElement.textContent") == "tokens"


def test_a_stream_that_is_cut_off_is_an_error(page: browser.Browser) -> None:
    answers(page, "half of", finish=None)
    ask(page, "all of it?")
    assert texts(page, ".message.error") == ["the connection ended before the answer did"] and body(page).startswith("half of")


def test_the_list(page: browser.Browser) -> None:
    alt(page, "c")
    answers(page, "of apples")
    ask(page, "Pears?")
    alt(page, "n")
    answers(page, "never")
    ask(page, "Snow?")
    page.wait("document.querySelectorAll('#conversations li').length === 2")
    assert texts(page, "#conversations .open") == ["Snow?", "Pears?"]
    fill(page, "#search", "APPLES")
    page.wait("document.querySelector('#count').textContent === '1 of 2'")
    page.run("document.querySelector('#search').focus()")
    page.press("ArrowDown", number=40)
    page.press("F2", number=113)
    page.wait("document.activeElement.matches('#conversations input')")
    page.run("document.activeElement.value = 'Fruit <b>'")
    page.press("Enter", number=13)
    fill(page, "#search", "")
    page.wait("document.querySelector('#conversations').textContent.includes('Fruit <b>')")
    page.press("ArrowUp", "ArrowUp", 38, modifiers=1)
    page.press("ArrowDown", "ArrowDown", 40, modifiers=1)
    page.wait("document.querySelector('[aria-current]')?.textContent === 'Fruit <b>'")
    assert body(page) == "of apples"
    page.run("document.querySelector('[aria-current]').focus()")
    page.press("Delete", number=46)
    notice(page, "“Fruit <b>” is deleted.")
    page.wait("document.querySelectorAll('#conversations li').length === 1")
    assert not texts(page, ".message") and len(rows(page, "messages")) == 2
    click(page, "undo")
    page.wait("document.querySelectorAll('#conversations li').length === 2")
    assert len(rows(page, "messages")) == 4
    assert not page.messages


def test_a_title_is_written_while_the_list_changes(page: browser.Browser) -> None:
    answers(page, "one")
    ask(page, "first")
    answers(page, "two")
    alt(page, "r")
    settled(page)
    alt(page, "c")
    page.wait("!!document.querySelector('#conversations .open')")
    alt(page, "j")  # the list has the conversation as it was before
    click(page, "✎", "#conversations")
    page.run("document.activeElement.value = 'mine'")
    fill(page, "#search", "")  # draws the list
    page.run("new Promise(done => setTimeout(done, 50))")
    assert page.run("document.activeElement.value") == "mine"
    page.press("Enter", number=13)
    page.wait("document.querySelector('#conversations .open')?.textContent === 'mine'")
    page.reload()
    page.wait("document.querySelectorAll('.message').length === 2")
    assert body(page) == "one"


def test_answers_continue_while_other_conversations_are_shown(page: browser.Browser) -> None:
    """Two conversations run at the same time: the server is made for batches."""
    page.run("""window.ends = []; window.real ??= window.fetch; window.fetch = async (to, options) => {
        if (!String(to).includes("chat/completions")) return window.real(to, options);
        const said = JSON.parse(options.body).messages[0].content;
        const event = (content, reason) => JSON.stringify({choices: [{delta: {content}, finish_reason: reason}]});
        const piece = (content, reason) => new TextEncoder().encode(`data: ${event(content, reason)}\\n\\n`);
        return new Response(new ReadableStream({ start(out) { out.enqueue(piece("so " + said)); window.ends.push(() => {
            out.enqueue(piece(", all of it", "stop")); out.close(); }); } })); }; 0""")
    alt(page, "c")
    say(page, "one")
    page.wait("document.querySelector('.message.assistant .body')?.textContent === 'so one'")
    alt(page, "n")
    say(page, "two")
    page.wait("document.querySelector('.message.assistant .body')?.textContent === 'so two'")
    page.wait("document.querySelectorAll('.open.running').length === 2")
    page.run("window.ends[0]()")
    page.wait("document.querySelectorAll('.open.running').length === 1")
    assert body(page) == "so two"
    click(page, "one", "#conversations")
    page.wait("document.querySelector('.message.assistant .body')?.textContent === 'so one, all of it'")
    click(page, "two", "#conversations")
    page.wait("!document.querySelector('#stop').hidden")  # it still runs
    page.run("window.ends[1]()")
    page.wait("document.querySelector('.message.assistant .body')?.textContent === 'so two, all of it'")
    settled(page)
    assert {r["content"] for r in rows(page, "messages")} == {"one", "two", "so one, all of it", "so two, all of it"}


def test_another_tab_adds_and_deletes(page: browser.Browser) -> None:
    answers(page, "one")
    ask(page, "first")
    [head], messages = rows(page, "heads"), rows(page, "messages")
    other = {**messages[1], "id": "other", "role": "assistant", "content": "elsewhere", "created": messages[1]["created"] + 1}
    other["parent"] = next(m["id"] for m in messages if m["role"] == "user")
    tab = """import("/page/storage.js?another").then(async other => { await other.open(() => 0);
        ACTION; })"""
    page.run(tab.replace("ACTION", f"await other.save({json.dumps(head)}, {json.dumps(other)})"))
    page.wait("document.querySelector('.message.assistant .tools').textContent.includes('/2')")
    page.run(tab.replace("ACTION", f"await other.remove({json.dumps(head['id'])})"))
    page.wait("!document.querySelector('.message')")
    assert rows(page, "heads") == [] and rows(page, "messages") == []


def test_a_storage_that_fails_later_is_told(page: browser.Browser) -> None:
    page.run("IDBObjectStore.prototype.getAll = () => { throw new Error('the disk is gone'); }; 0")
    alt(page, "c")
    notice(page, "The page failed: the disk is gone")


EXPORT = """new Promise(done => { const made = URL.createObjectURL; URL.createObjectURL = blob => { URL.createObjectURL = made;
    blob.text().then(done); return "blob:none"; }; document.querySelector("#ID").click(); })"""


def exported(page: browser.Browser, button: str = "export") -> dict[str, Any]:
    value: dict[str, Any] = json.loads(page.run(EXPORT.replace("ID", button)))
    return value


def without_ids(file: dict[str, Any]) -> list[Any]:
    conversations = sorted(file["conversations"], key=lambda c: c["title"])
    return [[{**m, "id": 0, "parent": m["parent"] is None} for m in c["messages"]] for c in conversations]


def test_export_and_import(page: browser.Browser) -> None:
    fill(page, "[data-field=max_tokens]", "4")
    fill(page, "#system", "Be brief.")
    ask(page, "hello")
    alt(page, "t")
    page.wait("!!document.querySelector('.tokens')")
    alt(page, "r")
    settled(page)
    alt(page, "n")
    ask(page, "other")
    file = exported(page)
    assert [(c["title"], len(c["messages"])) for c in file["conversations"]] == [("other", 2), ("hello", 3)]
    assert [c["title"] for c in exported(page, "export-this")["conversations"]] == ["other"]
    upload(page, json.dumps(file))
    notice(page, "2 imported.")
    twice = exported(page)
    assert len({c["leaf"] for c in twice["conversations"]}) == 4  # new ids: nothing is overwritten
    assert without_ids(twice)[::2] == without_ids(twice)[1::2] == without_ids(file)
    page.wait("document.querySelectorAll('#conversations li').length === 4")
    click(page, "hello", "#conversations")
    page.wait("document.querySelector('.message.user .body')?.textContent === 'hello'")
    click(page, "replay")
    page.wait("document.querySelector('.assistant .note').textContent.startsWith('replay: equal, 4 tokens')")


def test_a_file_is_really_downloaded(page: browser.Browser, tmp_path: Path) -> None:
    """The content security policy allows it."""
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    answers(page, "one")
    ask(page, "first")
    alt(page, "c")
    click(page, "Export this")
    end = time.monotonic() + 30
    while not (found := [path for path in tmp_path.iterdir() if path.suffix == ".json"]):
        assert time.monotonic() < end, "no file"
        time.sleep(0.02)
    assert found[0].name == "tinyvllm-conversation.json" and json.loads(found[0].read_text())["conversations"][0]["title"] == "first"
    assert not page.messages


def one_message(**fields: Any) -> dict[str, Any]:
    return {"id": "a", "parent": None, "created": 1, "role": "user", "content": "hi", **fields}


def a_file(*messages: Any, **fields: Any) -> dict[str, Any]:
    conversation = {"title": "t", "updated": 1, "leaf": "a", "messages": list(messages or [one_message()]), **fields}
    return {"format": "tinyvllm-conversations", "version": 1, "conversations": [conversation]}


HOSTILE_FILES = {
    "not json": ("{", "not JSON"),
    "a list": ([], "file: expected an object, got []"),
    "another format": ({"format": "x"}, 'file.format: expected "tinyvllm-conversations", got "x"'),
    "a later version": ({**a_file(), "version": 2}, "file.version: expected 1, got 2"),
    "no messages": (a_file(messages=None), "file.conversations[0].messages: expected a list, got null"),
    "a role": (a_file(one_message(role="system")), 'messages[0].role: expected "user" or "assistant", got "system"'),
    "content as parts": (a_file(one_message(content=[{"type": "image_url"}])), "messages[0].content: expected a text"),
    "a long title": (a_file(title="x" * 1001), "title: expected at most 1000 characters, got 1001"),
    "deep": (a_file(one_message(content="[" * 99)) | {"version": json.loads("[" * 900 + "]" * 900)}, "file.version: expected 1"),
    "an unknown parent": (a_file(one_message(parent="__proto__")), "messages[0].parent: expected the id of a message"),
    "its own ancestor": (a_file(one_message(parent="b"), one_message(id="b", parent="a")), "expected a tree"),
    "an id twice": (a_file(one_message(), one_message()), "expected ids that differ"),
    "no such leaf": (a_file(leaf="z"), "leaf: expected the id of a message"),
    "a number as text": (a_file(one_message(created="1")), "created: expected a number"),
    "a request": (a_file(one_message(requests=[{"from": 0, "seed": "1"}])), "requests[0].seed: expected a number"),
    "tokens": (a_file(one_message(tokens=[["a", 0.5]])), "tokens[0]: expected [text, log-probability, alternatives]"),
    "alternatives": (a_file(one_message(tokens=[["a", 0.5, [["b", 0.5]] * 21]])), "tokens[0][2]: expected at most 20 entries, got 21"),
}  # fmt: skip


def test_hostile_files_are_refused_whole(page: browser.Browser) -> None:
    for name, (file, message) in HOSTILE_FILES.items():
        upload(page, file if isinstance(file, str) else json.dumps(file))
        assert message in notice(page, message), name
        page.run("document.querySelector('#notice').textContent = ''")
    page.run("""{ const big = new File(["x"], "f.json"); Object.defineProperty(big, "size", { value: 2 ** 27 });
        const input = document.querySelector("#file"); Object.defineProperty(input, "files", { value: [big], configurable: true });
        input.dispatchEvent(new Event("change")); delete input.files; }""")
    notice(page, "the file has 134217728 bytes, more than 67108864")
    good, wrong = a_file()["conversations"][0], a_file(title=7)["conversations"][0]
    upload(page, json.dumps({**a_file(), "conversations": [good, wrong]}))
    notice(page, "file.conversations[1].title: expected a text, got 7")
    assert rows(page, "heads") == [] and rows(page, "messages") == []


def test_texts_of_files_are_shown_as_text(page: browser.Browser) -> None:
    bad = "<img src=x onerror='window.hit = 1'><script>window.hit = 1</script>"
    shown = dict.fromkeys(("content", "reasoning", "error", "end", "figures", "verdict"), bad)
    request = {"from": 0, "seed": 1, "model": bad, "__proto__": {"x": 1}}
    answer = one_message(id="b", parent="a", role="assistant", tokens=[[bad, -0.5, [[bad, -1.0]]]], requests=[request], **shown)
    upload(page, json.dumps(a_file(one_message(content=bad), answer, title=bad, leaf="b", evil={"more": 1})))
    notice(page, "1 imported.")
    page.wait("!!document.querySelector('#conversations .open')")
    page.run("document.querySelector('#conversations .open').click()")
    page.wait("!!document.querySelector('.message.assistant')")
    click(page, "tokens")
    page.wait("!!document.querySelector('.tokens span')")
    page.run("document.querySelector('.tokens span').focus()")
    fill(page, "#search", "onerror")
    page.wait("document.querySelector('#count').textContent === '1 of 1'")
    assert page.run("window.hit ?? null") is None
    assert not page.run("document.querySelectorAll('#log img, #log script, nav img, nav script, #notice img').length")
    assert page.run("document.querySelector('.message.error').textContent") == bad
    assert not [r for r in page.requests if r.endswith("/x")]
    assert set(rows(page, "heads")[0]) == {"id", "title", "updated", "leaf"}


def test_a_full_storage_loses_nothing(page: browser.Browser) -> None:
    origin = page.run("location.origin").replace("127.0.0.1", "localhost")  # not used before: Chromium remembers how much room there was
    page.call("Storage.overrideQuotaForOrigin", origin=origin, quotaSize=1000)
    try:
        page.go(origin)
        page.wait("document.querySelector('#model').value")
        answers(page, "x" * 100_000)
        ask(page, "big")
        notice(page, "Not saved: the browser's storage for this page is full")
        alt(page, "n")
        answers(page, "fine")
        ask(page, "small")
        assert sorted(c["title"] for c in exported(page)["conversations"]) == ["big", "small"]
        alt(page, "c")
        page.wait("document.querySelectorAll('#conversations li').length === 2")
        click(page, "big", "#conversations")
        page.wait("document.querySelector('.user .body')?.textContent === 'big'")  # from memory
        assert len(body(page)) == 100_000
    finally:
        page.call("Storage.overrideQuotaForOrigin", origin=origin)
    answers(page, "again")
    ask(page, "more")
    notice(page, "All is saved now.")
    page.reload()  # without a question: all is saved
    page.wait("document.querySelectorAll('.message').length === 4")
    assert len(rows(page, "messages")) == 6 and not page.dialogs


def test_a_browser_without_storage(page: browser.Browser) -> None:
    script = "Object.defineProperty(window, 'indexedDB', { value: { open() { throw new Error('not allowed here'); } } })"
    identifier = page.call("Page.addScriptToEvaluateOnNewDocument", source=script)["identifier"]
    try:
        page.reload()
        notice(page, "stores no conversations (not allowed here)")
        page.wait("document.querySelector('#model').value")
        answers(page, "one")
        ask(page, "first")
        alt(page, "n")
        alt(page, "c")
        page.wait("document.querySelectorAll('#conversations li').length === 1")
        click(page, "first", "#conversations")
        page.wait("document.querySelectorAll('.message').length === 2")  # while the page is open
    finally:
        page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=identifier)


@pytest.mark.parametrize("valid", [True, False])
def test_the_conversation_of_the_version_before(page: browser.Browser, valid: bool) -> None:
    answer = {"role": "assistant" if valid else "root", "content": "there", "reasoning": "", "figures": "9 tokens"}
    old = [{"role": "user", "content": "hi"}, answer]
    page.run(f"localStorage['tinyvllm.messages'] = {json.dumps(json.dumps(old))}")
    page.reload()
    if valid:
        page.wait("!localStorage['tinyvllm.messages']")
        alt(page, "c")
        page.wait("!!document.querySelector('#conversations .open')")
        click(page, "hi", "#conversations")
        page.wait("document.querySelectorAll('.message').length === 2")
        assert body(page) == "there" and "9 tokens" in note(page) and "replay" not in texts(page, ".tools button")
    else:
        notice(page, "messages[1].role: expected")
        assert page.run("localStorage['tinyvllm.messages']") and rows(page, "heads") == []


def test_light_dark_and_keyboard(page: browser.Browser) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    shades = []
    for scheme in ("light", "dark"):
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        shades.append(page.run(colour))
    assert shades[0] != shades[1]
    for shade in shades:  # the switch: light, dark, and the system's, which is dark
        page.run("document.querySelector('#theme').click()")
        assert page.run(colour) == shade
    page.call("Emulation.setEmulatedMedia", features=[])
    alt(page, "c")
    alt(page, "s")
    answers(page, "one")
    ask(page, "first")
    named = page.run("""[...document.querySelectorAll("button, select, textarea, input:not([hidden])")].filter(e => e.offsetParent)
        .map(e => [e.tabIndex, e.ariaLabel || e.title || e.textContent || e.closest("label")?.textContent])""")
    assert len(named) > 25 and all(index == 0 and name for index, name in named)
    assert page.run("[...document.querySelectorAll('input[type=file]')].map(e => e.id).join()") == "file"  # no upload of pictures
