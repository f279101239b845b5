"""`tinyvllm chat` with a model that reasons: its reasoning is shown apart, and is no part of the conversation."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.replies import ReplyServer
from tests.tiny.harmony import write_harmony_model
from tinyvllm import cli

SCRIPT = ["<|channel|>", "analysis", "<|message|>", "why", " not", "<|end|>", "<|start|>",
          "assistant<|channel|>final<|message|>", "so", " be it", "<|return|>"]  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_harmony_model(tmp_path_factory.mktemp("harmony") / "model", SCRIPT)


def test_the_final_channel_is_the_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, options = tmp_path / "talk.json", ["--model", str(model), "--device", "cpu", "--num-blocks", "32", "--temperature", "0"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"Name?\n/save {file}\nAnd?\n"))
    assert cli.main(["chat", *options]) == 0
    out, err = capsys.readouterr()
    assert out == "so be it\nso be it\n" and err.count("why not\n") == 2 and "<|" not in out + err
    assert json.loads(file.read_text())[-1] == {"role": "assistant", "content": "so be it"}


@pytest.fixture
def reasoning_server() -> Iterator[ReplyServer]:
    deltas = [{"reasoning_content": "why"}, {"reasoning": " not"}, {"content": "so be it"}]
    lines = [f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n" for delta in deltas]
    with ReplyServer((200, {}, ("".join(lines) + "data: [DONE]\n\n").encode())).serving() as server:
        yield server


def test_reasoning_is_dimmed_on_a_terminal_and_left_out_when_quiet(
    reasoning_server: ReplyServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for quiet, expected in ((False, "\033[2mwhy\033[22m\033[2m not\033[22m\033[2m\n\033[22m"), (True, "")):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdin", io.StringIO("Name?\n"))
        monkeypatch.setattr(sys, "stderr", terminal)
        assert cli.main(["chat", "--url", reasoning_server.url, "--model", "m", *(["--quiet"] if quiet else [])]) == 0
        assert capsys.readouterr().out == "so be it\n" and terminal.getvalue() == expected
