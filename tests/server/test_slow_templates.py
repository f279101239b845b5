"""Chat templates on a server: a quick one is rendered at once, a slow one in a thread, and one without end is refused."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest

from tests.server.conftest import running
from tinyvllm.server.core import conversation
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.text import chat, template_budget

QUICK = "{% for m in messages %}{{ m.content }}{% endfor %}"
SLOW = QUICK + "{% for i in range(100) %}{% for j in range(1000) %}{% set k = [i, j] %}{% endfor %}{% endfor %}"
ENDLESS = QUICK + "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BODY = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("template", "threads"), [(QUICK, [False, True, True]), (SLOW, [False, True, False, True, False])], ids=["quick", "slow"]
)
def test_a_slow_template_is_rendered_in_a_thread(template: str, threads: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time in a thread, since it is compiled; then on the loop, until it takes too long there."""
    loops: list[bool] = []
    render = chat._output

    def recorded(*args):
        loops.append(threading.current_thread().name.endswith("(run)"))
        return render(*args)

    chat._compile.cache_clear()
    chat._compiled.clear()
    monkeypatch.setattr(chat, "_output", recorded)
    with running(ServerConfig(port=0, access_log=False)) as server:
        server.service.models.loaded()["demo"].tokenizer.chat_templates["default"] = template
        for _ in range(3):
            assert server.post("/v1/chat/completions", BODY).status_code == 200
    assert loops == threads


def test_a_template_without_end_is_an_error_of_its_request() -> None:
    with running(ServerConfig(port=0, access_log=False)) as server:
        server.service.models.loaded()["demo"].tokenizer.chat_templates["default"] = ENDLESS
        answer = server.post("/v1/chat/completions", BODY)
        assert answer.status_code in (400, 422, 500) and "chat template: it takes more than" in answer.text
        assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 1}).status_code == 200


def test_all_renderings_of_a_conversation_have_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that ignores tool results is rendered three times; each takes two of five seconds, by a clock that counts its readings."""
    hides = SLOW.replace("range(100)", "range(5)").replace("{% for m in messages %}", "{% for m in messages if m.role == 'user' %}")
    messages = [BODY["messages"][0], {"role": "tool", "tool_call_id": "a", "content": "42"}]
    whole = conversation.Conversation(messages=messages, template=hides)
    tokenizer = SimpleNamespace(chat_templates={}, special_tokens={})
    ticks, tick = itertools.count(), 0.0
    monkeypatch.setattr(template_budget.time, "thread_time", lambda: next(ticks) * tick)
    renderings = []
    render = conversation._render
    monkeypatch.setattr(conversation, "_render", lambda *args: renderings.append(args) or render(*args))
    assert "42" in conversation._render_with_results(tokenizer, whole)[1] and len(renderings) == 3
    tick = 2.0 * len(renderings) / next(ticks)
    with pytest.raises(chat.SlowRenderError, match="takes more than 5 seconds"):
        conversation._render_with_results(tokenizer, whole)
    assert len(renderings) == 6


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_a_tokenizer_that_may_be_slow_works_in_a_thread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(ServerConfig(port=0, access_log=False)) as server:
        tokenizer, threads = server.service.models.loaded()["demo"].tokenizer, []
        body = BODY if "chat" in path else {"prompt": "Once"}
        assert server.post(path, body).status_code == 200
        encode = tokenizer._encode
        monkeypatch.setattr(tokenizer, "_encode", lambda text: threads.append(threading.current_thread().name) or encode(text))
        for quick in (True, False):
            tokenizer.is_quick = quick
            assert server.post(path, body).status_code == 200
    assert [name.endswith("(run)") for name in threads] == [True, False]
