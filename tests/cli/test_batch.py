"""Batch files: what is refused before anything is loaded, answers, and runs that were killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tinyvllm import cli
from tinyvllm.cli import batch_file
from tinyvllm.cli.batch_file import Output, answer_line, check_input, read_lines
from tinyvllm.errors import ArgumentError, FormatError, OutputError, TinyvllmError

ROOT = Path(__file__).parents[2]


def request(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 4, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body, **changes}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def answers(path: Path) -> dict[str, dict[str, Any]]:
    """Responses by custom_id; fails for a line that is torn or there twice."""
    text = path.read_text()
    assert text.endswith("\n")
    records = [json.loads(line) for line in text.splitlines()]
    found = {record["custom_id"]: record["response"] for record in records}
    assert len(found) == len(records) and all(set(r) == {"id", "custom_id", "response", "error"} for r in records)
    return found


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["in.jsonl:2", "not JSON"]),
        ("[1]", ["in.jsonl:2", "object"]),
        (request("a"), ["in.jsonl:1", "'a'", "in.jsonl:2"]),
        (request(""), ["custom_id"]),
        (request("b", custom="x"), ["'custom'"]),
        (request("b", method="GET"), ["method", "'GET'"]),
        (request("b", url="/v1/chat/completion"), ["url", "did you mean '/v1/chat/completions'"]),
        (request("b", body=[1]), ["body"]),
        (request("b", body={"stream": True}), ["stream"]),
    ],
)
def test_lines_that_are_refused(tmp_path: Path, line: dict[str, Any] | str, words: list[str]) -> None:
    path = write(tmp_path / "in.jsonl", request("a"), line)
    with pytest.raises((ArgumentError, FormatError)) as caught:
        check_input(str(path))
    assert all(word in str(caught.value) for word in words), caught.value


def test_files_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path / "in.jsonl", request("a")))
    for arguments, words in [
        ([str(tmp_path / "no.jsonl"), "-o", "o"], ["no.jsonl", "No such file"]),
        ([str(write(tmp_path / "empty.jsonl")), "-o", "o"], ["has no request"]),
        ([path, "-o", path], ["--output", "input"]),
        ([path, "-o", str(tmp_path / "no" / "o")], ["cannot write"]),
        ([path, "-o", str(tmp_path / "o"), "--concurrency", "0"], ["--concurrency"]),
        ([path], ["--output"]),
    ]:
        assert cli.main(["batch", *arguments]) in (1, 2)
        message = capsys.readouterr().err
        assert all(word in message for word in words), message
    assert not (tmp_path / "o").exists()


def test_an_output_of_something_else_is_left_alone(tmp_path: Path) -> None:
    line = answer_line("a", 200, "req", {"x": 1}).decode()
    for name, text, words in [
        ("other", line.replace('"a"', '"z"'), "'z', which is not in the input"),
        ("text", "my notes\nof today\n", "not a line of answers"),
        ("middle", '{"torn\n' + line, "not a line of answers"),
    ]:
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(TinyvllmError, match=words):
            Output(str(path), {"a", "b"})
        assert path.read_text() == text


def test_a_torn_last_line_is_dropped_and_a_second_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = (answer_line(name, 200, "req", {}) for name in "ab")
    for torn in (second[:-1], second[:20], b"\0" * 50, b'{"half": \n'):
        path.write_bytes(first + torn)
        output = Output(str(path), {"a", "b"})
        assert output.done == {"a"} and path.read_bytes() == first
        with pytest.raises(ArgumentError, match="another run"):
            Output(str(path), {"a", "b"})
        output.close()


def test_answers(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hé \u2028"}], "max_tokens": 3, "temperature": 0}
    path = write(
        tmp_path / "in.jsonl", request("text"), "", request("chat", url="/v1/chat/completions", body=chat),
        request("unknown field", body={"model": "tiny", "prompt": "x", "temprature": 1}),
        request("other model", body={"model": "x", "prompt": "x"}),
        request("vector", url="/v1/embeddings", body={"model": "tiny", "input": "ab"}),
    )  # fmt: skip
    out = tmp_path / "out.jsonl"
    options = ["--model", f"tiny={tiny_model}", "--dtype", "float32", "--num-blocks", "64", "--max-num-seqs", "4"]
    assert cli.main(["batch", str(path), "-o", str(out), *options]) == 1
    assert "5 requests, 2 failed" in capsys.readouterr().err
    found = answers(out)
    assert {name: answer["status_code"] for name, answer in found.items()} == {
        "text": 200, "chat": 200, "unknown field": 400, "other model": 404, "vector": 200,
    }  # fmt: skip
    assert found["text"]["body"]["object"] == "text_completion" and found["text"]["body"]["usage"]["completion_tokens"] == 4
    assert found["chat"]["body"]["choices"][0]["message"]["role"] == "assistant" and found["chat"]["request_id"]
    assert "temprature" in found["unknown field"]["body"]["error"]["message"]
    before = out.read_bytes()
    assert cli.main(["batch", str(path), "-o", str(out), *options]) == 0  # nothing is left to do
    assert out.read_bytes() == before


def test_a_killed_run_continues_where_it_ended(tiny_model: Path, tmp_path: Path) -> None:
    count = 60
    bodies = [{"prompt": [i, 5, 9], "max_tokens": 24, "temperature": 0, "ignore_eos": True} for i in range(count)]
    path = write(tmp_path / "in.jsonl", *(request(f"r{i}", body=body) for i, body in enumerate(bodies)))
    out = tmp_path / "out.jsonl"
    command = [sys.executable, str(ROOT / "main.py"), "batch", str(path), "-o", str(out), "--model", str(tiny_model), "--dtype", "float32"]
    command += ["--num-blocks", "64", "--max-num-seqs", "2", "--concurrency", "3"]
    lines = 0
    for target in (20,):
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 120
        while (lines := out.read_bytes().count(b"\n") if out.exists() else 0) < target:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert lines < count
    with open(out, "ab") as file:
        file.write(b'{"id": "batch_req_1", "custom_id": "r5')
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=120, check=False)
    assert done.returncode == 0 and f"of {count} requests were answered by an earlier run" in done.stderr, done.stderr
    found = answers(out)
    assert set(found) == {line.custom_id for line in read_lines(str(path))} and len(found) == count
    assert all(answer["body"]["usage"]["completion_tokens"] == 24 for answer in found.values())
    alone = tmp_path / "alone.jsonl"  # the same tokens as in an undisturbed run
    assert cli.main([*command[2:4], "-o", str(alone), *command[6:], "--quiet"]) == 0
    texts = {name: answer["body"]["choices"][0]["text"] for name, answer in answers(alone).items()}
    assert texts == {name: answer["body"]["choices"][0]["text"] for name, answer in found.items()}


def test_a_disk_that_fails_is_said_with_the_next_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_file, "SYNC_SECONDS", 0.01)
    synced: list[int] = []
    monkeypatch.setattr(batch_file.os, "fsync", synced.append)

    async def write_some() -> None:
        for name in "abc":
            await output.add(answer_line(name, 200, "req", {}))
        await asyncio.sleep(0.2)
        assert len(synced) == 1  # once for all three, and not only when the next one comes
        monkeypatch.setattr(batch_file.os, "fsync", fail)
        await output.add(answer_line("d", 200, "req", {}))
        await asyncio.sleep(0.2)
        await output.add(answer_line("e", 200, "req", {}))

    def fail(file: int) -> None:
        raise OSError(28, "No space left on device")

    output = Output(str(tmp_path / "out.jsonl"), set("abcde"))
    with pytest.raises(OutputError, match="No space left"):
        asyncio.run(write_some())
    with pytest.raises(OutputError, match="No space left"):
        output.close()
