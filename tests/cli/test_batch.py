"""Batch files: what is refused before anything is loaded, answers, and runs that were killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tinyvllm import cli
from tinyvllm.cli import batch, lines
from tinyvllm.cli.batch_file import check_input, custom_id_of, read_requests
from tinyvllm.cli.lines import AnswerFile
from tinyvllm.cli.progress import Progress
from tinyvllm.errors import ArgumentError, FormatError, OutputError, TinyvllmError
from tinyvllm.server.core.batch_lines import MAX_CUSTOM_ID, answer_line

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
        (request("b" * (MAX_CUSTOM_ID + 1)), ["in.jsonl:2", "custom_id", "at most 512", "513"]),
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
    path, fifo = str(write(tmp_path / "in.jsonl", request("a"))), str(tmp_path / "fifo.jsonl")
    os.mkfifo(fifo)
    for arguments, words in [
        ([str(tmp_path / "no.jsonl"), "-o", "o"], ["no.jsonl", "No such file"]),
        ([str(write(tmp_path / "empty.jsonl")), "-o", "o"], ["has no request"]),
        ([path, "-o", path], ["--output", "input"]),
        ([path, "-o", str(tmp_path / "no" / "o")], ["cannot write"]),
        ([path, "-o", str(tmp_path / "o"), "--concurrency", "0"], ["--concurrency"]),
        ([path], ["--output"]),
        ([path, "-o", "/dev/full"], ["/dev/full is a device, expected a regular file"]),  # whose reading never ends
        (["/dev/zero", "-o", str(tmp_path / "o")], ["/dev/zero is a device, expected a regular file"]),
        ([fifo, "-o", str(tmp_path / "o")], ["fifo.jsonl is a pipe, expected a regular file"]),
        ([path, "-o", fifo], ["fifo.jsonl is a pipe, expected a regular file"]),
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
            AnswerFile(str(path), {"a", "b"}, custom_id_of)
        assert path.read_text() == text


def test_a_torn_last_line_is_dropped_and_a_second_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = (answer_line(name, 200, "req", {}) for name in "ab")
    for torn in (second[:-1], second[:20], b"\0" * 50, b'{"half": \n'):
        path.write_bytes(first + torn)
        output = AnswerFile(str(path), {"a", "b"}, custom_id_of)
        assert output.done == {"a"} and path.read_bytes() == first
        with pytest.raises(ArgumentError, match="another run"):
            AnswerFile(str(path), {"a", "b"}, custom_id_of)
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
    assert cli.main(["batch", str(path), "-o", str(out), *options]) == 1  # nothing is left to do, but not all of it has succeeded
    assert out.read_bytes() == before
    assert "5 of 5 requests were answered by an earlier run, 2 of them with an error: to have" in capsys.readouterr().err
    out.write_bytes(b"".join(line for line in before.splitlines(True) if b'"status_code": 200' in line))
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "temprature" not in line and '"x", "prompt"' not in line))
    assert cli.main(["batch", str(path), "-o", str(out), *options]) == 0


def test_a_killed_run_continues_where_it_ended(tiny_model: Path, tmp_path: Path) -> None:
    count = 60
    bodies = [{"prompt": [i, 5, 9], "max_tokens": 24, "temperature": 0, "ignore_eos": True} for i in range(count)]
    path = write(tmp_path / "in.jsonl", *(request(f"r{i}", body=body) for i, body in enumerate(bodies)))
    out = tmp_path / "out.jsonl"
    command = [sys.executable, str(ROOT / "main.py"), "batch", str(path), "-o", str(out), "--model", str(tiny_model), "--dtype", "float32"]
    command += ["--num-blocks", "64", "--max-num-seqs", "2", "--concurrency", "3"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while not (lines := out.read_bytes().count(b"\n") if out.exists() else 0):  # the other answers take longer than a look
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
    assert set(found) == {line.custom_id for line in read_requests(str(path))} and len(found) == count
    assert all(answer["body"]["usage"]["completion_tokens"] == 24 for answer in found.values())
    alone = tmp_path / "alone.jsonl"  # the same tokens as in an undisturbed run
    assert cli.main([*command[2:4], "-o", str(alone), *command[6:], "--quiet"]) == 0
    texts = {name: answer["body"]["choices"][0]["text"] for name, answer in answers(alone).items()}
    assert texts == {name: answer["body"]["choices"][0]["text"] for name, answer in found.items()}


def test_lines_are_brought_to_the_disk_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(lines.os, "fsync", synced.append)
    output = AnswerFile(str(tmp_path / "out.jsonl"), set("abc"), custom_id_of)
    for name in "abc":
        output.write(answer_line(name, 200, "req", {}))
        output.sync_if_due()
    assert not synced  # SYNC_SECONDS have not passed
    monkeypatch.setattr(lines, "SYNC_SECONDS", 0.0)
    output.sync_if_due()
    output.sync_if_due()
    assert len(synced) == 1  # once for all three, and not only when the next one comes
    output.close()


def test_a_disk_that_fails_ends_the_run_while_requests_are_still_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int) -> None:
        raise OSError(28, "No space left on device")

    async def never_answer(*connection: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(lines, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr(batch, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr(lines.os, "fsync", fail)
    path = write(tmp_path / "in.jsonl", request("a"), request("b"))
    output = AnswerFile(str(tmp_path / "out.jsonl"), set("abc"), custom_id_of)
    output.write(answer_line("c", 200, "req", {}))
    run = batch._run_workers(2, never_answer, read_requests(str(path)), output, batch.Tally(), Progress(2, 0, "requests", True))
    with pytest.raises(OutputError, match="No space left"):
        asyncio.run(run)
    with pytest.raises(OutputError, match="No space left"):
        output.close()


def test_memory_does_not_grow_with_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20,000 lines of a kilobyte only the ids are held, and of one without an end no more than the limit."""
    count, padding = 20_000, "x" * 1000
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with open(path, "w") as file, open(out, "wb") as answered:
        for i in range(count):
            file.write(json.dumps(request(f"r{i}", body={"prompt": padding})) + "\n")
            answered.write(answer_line(f"r{i}", 200, "req", {"text": padding}))
    tracemalloc.start()
    wanted = check_input(str(path))
    output = AnswerFile(str(out), wanted, custom_id_of)
    assert sum(1 for line in read_requests(str(path)) if line.custom_id in output.done) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    output.close()
    assert peak < count * 400, peak  # the lines are more than 1,000 bytes each
    monkeypatch.setattr(lines, "MAX_LINE", 1 << 16)
    with open(path, "wb") as endless:
        endless.truncate(1 << 30)  # zeros without a line feed, and without room on the disk
    with pytest.raises(FormatError, match="in.jsonl:1: the line is longer"):
        check_input(str(path))


def test_progress_is_a_line_every_few_seconds_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    progress = Progress(10, 2, "requests", False, lambda: now[0])
    progress.add()
    now[0] += 4.9
    progress.add(failed=True)
    assert capsys.readouterr().err == ""
    now[0] += 0.1
    progress.tick()
    progress.tick()
    assert capsys.readouterr().err == "4 of 10 requests, 1 failed, 0.4 a second\n"
    now[0] += 5
    progress.add()
    assert capsys.readouterr().err == "5 of 10 requests, 1 failed, 0.3 a second\n"
    progress.close()
    quiet = Progress(10, 0, "requests", True, lambda: now[0])
    now[0] += 60
    progress.tick()
    quiet.tick()
    assert capsys.readouterr().err == ""


def test_an_interrupted_run_says_what_it_has(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(*arguments: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "_answer_all", interrupted)
    path = write(tmp_path / "in.jsonl", request("a"), request("b"))
    (tmp_path / "out.jsonl").write_bytes(answer_line("a", 200, "req", {}))
    assert cli.main(["batch", str(path), "-o", str(tmp_path / "out.jsonl"), "--model", str(tiny_model)]) == 130
    assert "interrupted: 1 of 2 requests are answered; the same command answers the others\n" in capsys.readouterr().err
