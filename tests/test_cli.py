"""The command line: what it refuses before anything is loaded, and what it writes with a real, tiny model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinyvllm import cli
from tinyvllm.cli.arguments import engine_options, parse, sampling_options
from tinyvllm.cli.jsonl import new_file, read_prompts
from tinyvllm.config import nearest
from tinyvllm.errors import ArgumentError, FormatError, OutputError

ROOT = Path(__file__).parents[1]


def run(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """main.py in a process of its own, which then says on its last line of stderr whether it has imported tinygrad."""
    code = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print('tinygrad' in sys.modules, file=sys.stderr))\n"
        f"sys.argv[0] = {str(ROOT / 'main.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINYVLLM_")}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, env=kept | environ, timeout=120, check=False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one line on stderr of a command that must fail with nothing on stdout."""
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("\n") and err.count("\n") == 1 and err.startswith("tinyvllm: error: "), (out, err)
    return code, err.removeprefix("tinyvllm: error: ").strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--prompt", "--prompts-file"]),
        (["--prompt", "x", "--temprature", "1"], ["--temprature", "did you mean '--temperature'"]),
        (["--prompt", "x", "--max-token=3"], ["--max-token=3", "did you mean '--max-tokens'"]),
        (["caht"], ["'caht'", "did you mean 'chat'"]),
        (["chat", "--prompt", "x"], ["--prompt"]),
        (["--prompt"], ["--prompt", "expected one argument"]),
        (["--prompt", "x", "--temperature", "warm"], ["--temperature", "'warm'"]),
        (["--prompt", "x", "--temperature", "-1"], ["temperature", "-1"]),
        (["--prompt", "x", "--temperature", "nan"], ["temperature", "nan"]),
        (["--prompt", "x", "--top-p", "1.5"], ["top_p", "1.5"]),
        (["--prompt", "x", "--min-p", "-0.1"], ["min_p", "-0.1"]),
        (["--prompt", "x", "--top-k", "-7"], ["top_k", "-7"]),
        (["--prompt", "x", "--repetition-penalty", "0"], ["repetition_penalty"]),
        (["--prompt", "x", "--presence-penalty", "3"], ["presence_penalty"]),
        (["--prompt", "x", "--max-tokens", "0"], ["max_tokens"]),
        (["--prompt", "x", "--max-tokens", "4", "--min-tokens", "5"], ["min_tokens"]),
        (["--prompt", "x", "--stop", ""], ["stop"]),
        (["--prompt", "x", "--stop-token-id", "-3"], ["stop_token_ids"]),
        (["--prompt", "x", "--n", "0"], ["n must be"]),
        (["--prompt", "x", "--logprobs", "3"], ["--logprobs", "--output"]),
        (["--prompt", "x", "--logprobs", "99", "--output", "o.jsonl"], ["logprobs", "20"]),
        (["--prompt", "x", "--model", "/no/such/model"], ["model", "/no/such/model"]),
        (["--prompt", "x", "--device", "toaster"], ["device", "toaster"]),
        (["--prompt", "x", "--dtype", "float23"], ["dtype", "float23", "did you mean 'float32'"]),
        (["--prompt", "x", "--kv-memory", "much"], ["--kv-memory", "'much'"]),
        (["--prompt", "x", "--kv-memory", "1GiB", "--num-blocks", "9"], ["num_blocks", "kv_memory"]),
        (["--prompt", "x", "--block-size", "17"], ["block_size"]),
        (["--prompt", "x", "--output", "answers.txt"], ["--output", ".jsonl", "answers.txt"]),
        (["--prompts-file", "/no/such.txt"], ["--prompts-file", "/no/such.txt", "No such file"]),
        (["--prompts-file", "prompts.csv"], ["--prompts-file", ".txt", ".jsonl"]),
        (["--prompts-file", "a.jsonl", "--output", "./a.jsonl"], ["--output", "--prompts-file"]),
        (["--prompt", "\udcff"], ["--prompt", "UTF-8"]),
    ],
)
def test_arguments_that_are_refused(tiny_model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    model = [] if "--model" in arguments or "caht" in arguments else ["--model", str(tiny_model)]
    code, message = refused(capsys, *arguments, *model)
    assert code == 2 and all(word in message for word in words), message


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompt", "x", "--temperature", "-1"],
        ["--prompt", "x", "--model", "./nowhere"],
        ["chat", "--top-p", "2"],
        ["--prompt", "x", "--output", "/no/such/folder/o.jsonl"],
        ["--help"],
        ["chat", "--help"],
        ["--version"],
    ],
)
def test_what_needs_no_model_does_not_wait_for_tinygrad(tiny_model: Path, arguments: list[str]) -> None:
    done = run(*arguments, *([] if "--model" in arguments else ["--model", str(tiny_model)]))
    assert done.stderr.splitlines()[-1] == "False", done.stderr
    helps = arguments[-1] in ("--help", "--version")
    assert done.returncode == (0 if helps else 1 if "--output" in arguments else 2), done.stderr
    assert bool(done.stdout) == helps and len(done.stderr.splitlines()) == (1 if helps else 2), done.stderr


def test_help_names_every_option_and_no_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--model", "--prompts-file", "--stop-token-id", "--kv-memory", "--ignore-eos", "--n N", "--load-format", "tinyvllm chat"):
        assert option in text
    assert "serve" not in text and "bench" not in text


def test_unknown_environment_switch(tiny_model: Path) -> None:
    done = run("--prompt", "x", "--model", str(tiny_model), TINYVLLM_DEVISE="cpu")
    assert done.returncode == 2 and "TINYVLLM_DEVISE is not known, did you mean 'TINYVLLM_DEVICE'" in done.stderr


def test_options_become_fields() -> None:
    words = "--prompt x --stop A --stop B --stop-token-id 7 --top-k 4 --kv-memory 2MiB --max-num-seqs 3 --ignore-eos --n 2"
    command, options = parse(words.split())
    assert command == "generate" and parse(["generate", "--prompt", "x"])[0] == "generate" and parse(["chat"])[0] == "chat"
    assert sampling_options(options) == {"stop": ["A", "B"], "stop_token_ids": [7], "top_k": 4, "ignore_eos": True, "n": 2}
    assert engine_options(options) == {"kv_memory": 2 << 20, "max_num_seqs": 3}


def test_prompts_from_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes("\ufefffirst\r\n\n  \nzw\u00f6lf \u2028 one line\n".encode())
    jobs = read_prompts(str(file))
    assert [job.prompt for job in jobs] == ["first", "zw\u00f6lf \u2028 one line"]
    assert [job.source for job in jobs] == [f"{file}:1", f"{file}:4"]


def test_prompts_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    records = [
        {"prompt": "a", "id": 7, "temperature": 0.5, "logit_bias": {"3": -1}},
        {"prompt_token_ids": [1, 2], "stop": ["x"]},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    first, second, third = read_prompts(str(file))
    assert (first.prompt, first.id, first.sampling) == ("a", 7, {"temperature": 0.5, "logit_bias": {3: -1}})
    assert (second.prompt, second.id, second.sampling) == ({"prompt_token_ids": [1, 2]}, None, {"stop": ["x"]})
    assert third.prompt == {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["p.jsonl:2", "not JSON"]),
        ("[1]", ["p.jsonl:2", "object"]),
        ("{}", ["p.jsonl:2", "exactly one of", "none"]),
        ('{"prompt": "a", "messages": []}', ["p.jsonl:2", "prompt and messages"]),
        ('{"prompt": "a", "temprature": 1}', ["p.jsonl:2", "temprature", "did you mean 'temperature'"]),
        ('{"prompt": 3}', ["p.jsonl:2", "must be a text"]),
        ('{"prompt": "a", "top_p": 7}', ["p.jsonl:2", "top_p", "7"]),
        ('{"prompt": "a", "stop": 7}', ["p.jsonl:2"]),
        ("[" * 100_000, ["p.jsonl:2", "not JSON"]),
    ],
)
def test_json_lines_that_are_refused(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: list[str]) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    code, message = refused(capsys, "--model", str(tiny_model), "--prompts-file", str(file))
    assert code in (1, 2) and all(word in message for word in words), message


def test_prompt_files_that_hold_nothing(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("\n \n")
    with pytest.raises(ArgumentError, match="holds no prompt"):
        read_prompts(str(file))
    file.write_bytes(b"abc\xff")
    with pytest.raises(FormatError, match="byte 3 is 0xff"):
        read_prompts(str(file))
    with pytest.raises(ArgumentError, match="directory"):
        read_prompts(str(tmp_path.joinpath("folder.txt").mkdir() or tmp_path / "folder.txt"))


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "o.jsonl"
    target.write_text("before")
    with pytest.raises(RuntimeError), new_file(str(target)):
        raise RuntimeError
    assert os.listdir(tmp_path) == ["o.jsonl"] and target.read_text() == "before"
    with new_file(str(target)) as publish:
        assert target.read_text() == "before"
        publish("after")
    assert os.listdir(tmp_path) == ["o.jsonl"] and target.read_text() == "after"
    for wrong in (tmp_path, tmp_path / "none" / "o.jsonl", target / "o.jsonl"):
        with pytest.raises(OutputError, match="cannot write"), new_file(str(wrong)):
            raise AssertionError("the block must not be entered")


def test_output_refused_before_the_model_is_looked_at(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()  # an empty folder: loading it would fail with another message
    code, message = refused(capsys, "--model", str(tmp_path / "model"), "--prompt", "x", "--output", str(tmp_path / "none" / "o.jsonl"))
    assert code == 1 and "cannot write" in message


def test_empty_stdin(tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert refused(capsys, "--model", str(tiny_model), "--prompt", "-") == (2, "--prompt - found nothing on stdin")


def test_nearest_suggests_only_what_is_near() -> None:
    assert nearest("--temprature", ["--temperature", "--top-k"]) == ", did you mean '--temperature'?"
    assert nearest("--frobnicate", ["--temperature", "--top-k"]) == ""


def test_unexpected_failures_are_one_line_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str]) -> int:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr(cli, "_run", fail)
    assert refused(capsys) == (1, "ZeroDivisionError: a b (--debug shows where)")
    assert cli.main(["--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main([]) == 130
    assert capsys.readouterr() == ("", "")
