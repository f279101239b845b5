"""The command line: what it refuses before anything is loaded, and what it writes with a real, tiny model."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tinyvllm import LLM, SamplingParams, cli
from tinyvllm.backends.cpu.variants import cpu_variants
from tinyvllm.cli import chat as cli_chat
from tinyvllm.cli import generate as cli_generate
from tinyvllm.cli import progress as figures
from tinyvllm.cli.aliases import ALIASES
from tinyvllm.cli.arguments import PARSERS, parse
from tinyvllm.cli.jsonl import Job, read_prompts
from tinyvllm.cli.new_file import new_file
from tinyvllm.cli.options import engine_options, sampling_options
from tinyvllm.errors import OutputError, nearest

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
        (["--prompt", "x", "--confog", "a"], ["--confog"]),  # and no suggestion of --choice for the dashes that both have
        (["--prompt", "x", "--config", "a"], ["--config must end in .yaml or .yml", "'a'"]),
        (["--prompt", "x", "--gpu-memory-utilization", "0.9"], ["--gpu-memory-utilization=0.9", "nearest: --kv-memory, --num-blocks"]),
        (["--prompt", "x", "--gpu_memory_utilization=0.9"], ["--gpu_memory_utilization=0.9", "nearest: --kv-memory"]),
        (["--prompt", "x", "--data-parallel-size", "2"], ["data_parallel_size=2 is for AsyncLLM, serve and batch", "leave it out"]),
        (["--prompt", "x", "-tp", "3"], ["tensor_parallel_size must be one of 1, 2, 4, 8", "got 3"]),
        (["--prompt", "x", "-pp", "2", "--device", "METAL"], ["pipeline_parallel_size=2 runs on the CPU and", "device=METAL"]),
        (["--prompt", "x", "-cp", "2", "--block-size", "32"], ["block_size=32 does not work with context_parallel_size=2", "give 512"]),
        (["--prompt", "x", "--no-enable-chunked-prefill"], ["--no-enable-chunked-prefill=False", "accepted: True"]),
        (["--prompt", "x", "-ngl", "99", "--device", "CUDA"], ["gpu_layers=99", "device=CUDA: give device=CUDA,CPU"]),
        (["--prompt", "x", "-t", "65"], ["--threads must be a number from 1 to 64", "65"]),
        (["--prompt", "x", "-tb", "4"], ["-tb=4", "--threads"]),
        (["--prompt", "x", "-cnv"], ["-cnv", "tinyvllm chat"]),
        (["--prompt", "x", "-sys", "kind"], ["-sys is --system here, which this command does not have"]),
        (["--prompt", "x", "--swap-space", "4"], ["swap_space=4", "'4GiB'"]),
        (["serve", "some-model"], ["some-model", "--model PATH"]),
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
        (["--prompt", "x", "--lora", "folder"], ["lora_modules", "NAME=FOLDER", "'folder'"]),
        (["--prompt", "x", "--lora", "a=.", "--lora-modules", "c=."], ["--lora", "give it once"]),
        (["--prompt", "x", "--lora", "a=b", "--lora", "a=c"], ["lora_modules", "two adapters of one name"]),
        (["--prompt", "x", "--lora", "a=/no/such"], ["lora_modules", "'a'", "'/no/such'"]),
        (["--prompt", "x", "--max-lora-rank", "8"], ["max_lora_rank=8", "enable_lora"]),
        (["serve", "--lora", "a=b", "--served-model-name", "a"], ["--lora", "'a' is taken by a model"]),
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
    assert code == 2 and all(word in message for word in words) and "--choice" not in message, message


def test_a_server_refuses_a_lossy_policy_unless_it_may(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"method": "ngram", "policy": "typical"}'
    words = ("serve", "--model", str(tiny_model), "--speculative-config", config)
    code, message = refused(capsys, *words)
    assert code == 2 and "policy='typical' (typical(epsilon=0.09, delta=0.3), lossy)" in message and "--allow-lossy-speculation" in message
    code, message = refused(capsys, *words, "--allow-lossy-speculation", "--share-prefixes")
    assert "--share-prefixes is for API keys" in message  # the next check


def test_a_server_of_several_models_refuses_to_publish_events(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("serve", "--model", f"a={tiny_model}", "--model", f"b={tiny_model}", "--kv-events-config", '{"enable_kv_cache_events": true}')
    code, message = refused(capsys, *words)
    assert code == 2 and "--kv-events-config is for one model: 2 would share" in message


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
    for option in ("--model", "--prompts-file", "--stop-token-id", "--kv-memory", "--ignore-eos", "--n", "--load-format"):
        assert option in text
    flat = " ".join(text.split())
    assert "cache in bytes, such as 2GiB; or give --num-blocks" in flat and "cache in blocks; or give --kv-memory" in flat
    others = flat.partition("Other commands:")[2]
    names = ("chat", "serve", "batch", "kernels", "plan", "doctor", "verify", "quality", "bench", "bench-serve", "replay", "lab")
    assert all(name in others for name in names)
    assert "benchmarks" not in text


def test_unknown_environment_switch(tiny_model: Path) -> None:
    done = run("--prompt", "x", "--model", str(tiny_model), TINYVLLM_DEVISE="cpu")
    assert done.returncode == 2 and "TINYVLLM_DEVISE is not known, did you mean 'TINYVLLM_DEVICE'" in done.stderr


def test_options_become_fields() -> None:
    words = "--prompt x --stop A --stop B --stop-token-id 7 --top-k 4 --kv-memory 2MiB --max-num-seqs 3 --ignore-eos --n 2"
    command, options = parse(words.split())
    assert command == "generate" and parse(["generate", "--prompt", "x"])[0] == "generate" and parse(["chat"])[0] == "chat"
    assert sampling_options(options) == {"stop": ["A", "B"], "stop_token_ids": [7], "top_k": 4, "ignore_eos": True, "n": 2}
    assert engine_options(options) == {"kv_memory": 2 << 20, "max_num_seqs": 3}


def test_options_of_other_programs_that_mean_the_same() -> None:
    vllm = "--prompt x --max_model_len 9 --num-gpu-blocks-override=7 --tensor-parallel-size 1 --trust-remote-code --n 2"
    options = parse([*vllm.split(), "--enable-chunked-prefill"])[1]
    assert engine_options(options) == {"max_model_len": 9, "num_blocks": 7, "tensor_parallel_size": 1} and sampling_options(options) == {
        "n": 2
    }
    lora = parse(["serve", "--lora-modules", "a=b", "--lora", "c=d", "--enable-lora", "--max-loras", "3"])[1]
    assert engine_options(lora) == {"lora_modules": ["a=b", "c=d"], "enable_lora": True, "max_loras": 3, "warm_up": True}
    llama = "-m PATH -p --prompt=hi -n 5 -c 64 --temp 0.5 -s 3 -np 2 -fa on -r A -r B -j {}"
    _, options = parse(llama.replace("-p --prompt=hi", "-p hi").split())
    assert options.prompt == ["hi"] and engine_options(options) == {"model": "PATH", "max_model_len": 64, "max_num_seqs": 2}
    sampling = sampling_options(options)
    assert sampling.pop("structured_outputs").json == "{}"
    assert sampling == {"max_tokens": 5, "temperature": 0.5, "seed": 3, "stop": ["A", "B"]}
    assert parse(["serve", "-a", "name", "--jinja", "--port", "0"])[1].served_model_name == ["name"]


@pytest.mark.parametrize("command", list(PARSERS))
def test_no_alias_hides_an_option_of_ours(command: str) -> None:
    """And every option that an alias names exists in a command."""
    every = set().union(*(make().known_options() for make in PARSERS.values()))
    letters = {"-p", "-n", "-d", "-b", "-r", "-o"} if command == "bench" else {"-o"}  # llama-bench's are not those of llama-cli
    assert not PARSERS[command]().known_options() & ALIASES.keys() - letters
    for name, alias in ALIASES.items():
        for ours in (*filter(None, [alias.ours]), *alias.nearest):
            assert (ours if ours.startswith("-") else f"--{ours.replace('_', '-')}").split()[0] in every, (name, ours)


def test_prompts_from_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes("\ufefffirst\r\n\n  \nzw\u00f6lf \u2028 one line\n".encode())
    jobs = [job for job in read_prompts(str(file)) if isinstance(job, Job)]
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
    first, second, third = [job for job in read_prompts(str(file)) if isinstance(job, Job)]
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
        ('{"prompt": "a", "stop": 7}', ["p.jsonl:2", "stop must be a string or a list", "got 7"]),
        ('{"prompt": "a", "stop": {"a": 1}}', ["p.jsonl:2", "stop must be"]),
        ('{"prompt": "a", "ignore_eos": "no"}', ["p.jsonl:2", "ignore_eos must be True or False", "'no'"]),
        ('{"prompt": "a", "logit_bias": [1]}', ["p.jsonl:2", "logit_bias must be a dict", "[1]"]),
        ('{"prompt": "a", "logit_bias": {"3": true}}', ["p.jsonl:2", "logit_bias", "3: True"]),
        ('{"prompt": "a", "stop_token_ids": 5}', ["p.jsonl:2", "stop_token_ids", "5"]),
        ("[" * 100_000, ["p.jsonl:2", "not JSON"]),
    ],
)
def test_json_lines_that_are_refused(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: list[str]
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    code, message = refused(capsys, "--model", str(tiny_model), "--prompts-file", str(file))
    assert code in (1, 2) and all(word in message for word in words), message


def test_prompt_files_that_hold_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "bytes.txt").write_bytes(b"abc\xff")
    (tmp_path / "folder.txt").mkdir()
    os.mkfifo(tmp_path / "fifo.txt")
    for name, words in [
        ("empty.txt", "has no prompt"), ("bytes.txt", "byte 3 is 0xff"), ("folder.txt", "is a directory"), ("fifo.txt", "is a pipe"),
    ]:  # fmt: skip
        _, message = refused(capsys, "--model", str(tiny_model), "--prompts-file", str(tmp_path / name))
        assert words in message, message


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
    assert refused(capsys, "--model", str(tiny_model), "--prompt", "-") == (2, "--prompt -: stdin is empty")


def test_nearest_suggests_only_what_is_near() -> None:
    assert nearest("--temprature", ["--temperature", "--top-k"]) == ", did you mean '--temperature'?"
    assert nearest("--frobnicate", ["--temperature", "--top-k"]) == ""


def test_unexpected_failures_are_one_line_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: str, options: argparse.Namespace) -> int:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr(cli, "_run", fail)
    assert refused(capsys) == (1, "ZeroDivisionError: a b (--debug shows the traceback)")
    assert cli.main(["--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: str, options: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main([]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, num_blocks=64, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture
def loaded(llm: LLM, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """cli.main with the model already loaded: loading it for every test would be most of their time."""
    for command in (cli_generate, cli_chat):
        monkeypatch.setattr(command, "load", lambda options: contextlib.nullcontext(llm))
    return lambda *arguments: cli.main([*arguments, "--model", str(tiny_model)])


GREEDY = ("--temperature", "0", "--max-tokens", "6", "--ignore-eos")


def greedy(llm: LLM, prompt: Any) -> str:
    return llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))[0].outputs[0].text


def test_one_prompt_is_answered_on_stdout(loaded: Callable[..., int], llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert loaded("--prompt", "hello", *GREEDY) == 0
    out, err = capsys.readouterr()
    assert out == greedy(llm, "hello") + "\n"
    assert re.fullmatch(
        r"6 prompt \+ 6 generated tokens, first token after \d+\.\d\d s, [\d.]+ tok/s, \d+% of \d+ GB/s(; [\d.]+ s [a-z ]+)?\n", err
    ), err
    assert loaded("--prompt", "hello", *GREEDY, "--quiet") == 0
    assert capsys.readouterr() == (out, "")


def test_stop_and_stdin(loaded: Callable[..., int], llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = greedy(llm, "hello")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert loaded("--prompt", "-", *GREEDY, "--stop", text[2]) == 0
    assert capsys.readouterr().out == text[: text.index(text[2])] + "\n"


def test_many_prompts_are_answered_in_order(loaded: Callable[..., int], llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert loaded("--prompt", "hello", "--prompt", "b", *GREEDY) == 0
    out, err = capsys.readouterr()
    assert out == f"=== hello\n{greedy(llm, 'hello')}\n=== b\n{greedy(llm, 'b')}\n"
    assert re.fullmatch(
        r"2 prompts, 8 prompt \+ 12 generated tokens in [\d.]+ s, first token after [\d.]+ s \(median\), [\d.]+ tok/s, \d+% of \d+ GB/s"
        r"(; [\d.]+ s [a-z ]+)?\n",
        err,
    ), err
    assert loaded("--prompt", "x " * 50, "--n", "2", *GREEDY) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("=== x x")] == [
        "=== " + ("x " * 50)[:67] + "... (1/2)",
        "=== " + ("x " * 50)[:67] + "... (2/2)",
    ]


def test_figures_of_several_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the first token is the median one, the share of the bandwidth that of the steps, which all prompts have in common."""
    steps, outputs = llm.engine.stats.num_steps, llm.generate(["hello", "b", "c"], SamplingParams(max_tokens=6, ignore_eos=True))
    assert llm.engine.stats.num_steps - steps == 6
    for output, arrival, first, end in zip(outputs, (10.0, 10.5, 11.0), (12.0, 11.0, 12.0), (13.0, 12.0, 14.0), strict=True):
        output.metrics.arrival, output.metrics.first_token, output.metrics.finished = arrival, first, end
    monkeypatch.setattr("tinyvllm.engine.stats.memory_bandwidth", lambda device: float(llm.engine.model_bytes_per_token) * 3)
    monkeypatch.setattr(llm.engine.runner, "compile_seconds", lambda: 3.04)
    assert figures.closing_line(llm, figures.Tally.of(outputs), 6).endswith(" GB/s; 3.0 s since the start were spent compiling")
    monkeypatch.setattr(llm.engine.runner, "compile_seconds", lambda: 0.0)
    line = figures.closing_line(llm, figures.Tally.of(outputs), 6)
    assert line.startswith("3 prompts, 10 prompt + 18 generated tokens in 4.00 s, first token after 1.00 s (median), 4.5 tok/s, 50% of ")
    monkeypatch.setattr(llm.engine, "config", replace(llm.config, device="CUDA:1"))  # not the memory that was measured
    assert figures.closing_line(llm, figures.Tally.of(outputs), 6).endswith("4.5 tok/s")
    for output in outputs:
        output.metrics.first_token = None
    assert figures.closing_line(llm, figures.Tally.of(outputs), 6) == "3 prompts, 10 prompt + 18 generated tokens"


def answers_of(output: Path) -> list[dict[str, Any]]:
    """The lines of an --output file in the order of their prompts, each index once."""
    records = sorted(map(json.loads, output.read_text().splitlines()), key=lambda record: record["index"])
    assert [record["index"] for record in records] == list(range(len(records)))
    return records


def test_json_lines_in_and_out(loaded: Callable[..., int], llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = [{"role": "user", "content": "hi"}]
    records = [
        {"id": "first", "prompt": "hello"},
        {"id": 2, "prompt_token_ids": [256, 98], "max_tokens": 3, "logprobs": 1},
        {"messages": talk, "n": 2},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    output = tmp_path / "out.jsonl"
    assert loaded("--prompt", "zero", "--prompts-file", str(tmp_path / "in.jsonl"), "--output", str(output), *GREEDY) == 0
    assert capsys.readouterr().out == "" and sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]
    zero, first, second, third = answers_of(output)
    assert zero["prompt"] == "zero" and "id" not in zero and (first["id"], second["id"]) == ("first", 2)
    assert first["outputs"][0]["text"] == greedy(llm, "hello") and first["outputs"][0]["finish_reason"] == "length"
    assert (first["prompt_tokens"], first["completion_tokens"]) == (6, 6)
    assert second["prompt_token_ids"] == [256, 98] and len(second["outputs"][0]["token_ids"]) == 3
    best = second["outputs"][0]["logprobs"][0][0]
    assert best["token_id"] == second["outputs"][0]["token_ids"][0] and best["rank"] == 1 and best["logprob"] < 0
    assert third["messages"] == talk and len(third["outputs"]) == 2 and third["completion_tokens"] == 12
    assert third["outputs"][0]["text"] == greedy(llm, {"messages": talk})
    assert loaded("--prompt", "hello", "--output", "-", "--logprobs", "0", *GREEDY) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["logprobs"][0][0]["token"] == greedy(llm, "hello")[0]


def test_one_prompt_too_long_is_an_error_in_its_place(
    loaded: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("fine\n\n" + "x" * 600 + "\n")
    assert loaded("--prompts-file", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.jsonl"), *GREEDY) == 1
    out, err = capsys.readouterr()
    *_, line = err.splitlines()
    assert out == "" and line.startswith(f"tinyvllm: error: {tmp_path}/in.txt:3: the prompt has 601 tokens")
    fine, wrong = answers_of(tmp_path / "out.jsonl")
    assert len(fine["outputs"][0]["token_ids"]) == 6 and wrong["prompt"] == "x" * 600
    assert wrong["error"]["type"] == "RequestError" and "601 tokens" in wrong["error"]["message"]
    assert loaded("--prompt", "x" * 600) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tinyvllm: error: --prompt 1: the prompt has 601 tokens") and err.count("\n") == 1
    assert loaded("--prompt", "x" * 600, "--prompt", "fine", *GREEDY, "--quiet") == 1
    out, err = capsys.readouterr()
    assert out.startswith("=== fine\n") and err.count("--prompt 1: the prompt has 601 tokens") == 2


def test_bad_lines_fail_alone_if_they_may(loaded: Callable[..., int], llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ['{"prompt": "hello", "id": "a"}', "{", '{"prompt": "b", "top_p": 7}', '{"prompt": "b\\ud800"}', '{"prompt": "b"}']
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(lines))
    options = ("--prompts-file", str(file), "--output", str(output), *GREEDY)
    assert loaded(*options) in (1, 2) and os.listdir(tmp_path) == ["in.jsonl"]  # without the option nothing runs
    assert "in.jsonl:2: not JSON" in (err := capsys.readouterr().err) and "--skip-bad answers the other prompts" in err
    assert loaded(*options, "--skip-bad") == 1
    assert f"tinyvllm: error: {file}:2 and " in capsys.readouterr().err
    first, torn, wrong, _, last = answers_of(output)
    assert first["id"] == "a" and first["outputs"][0]["text"] == greedy(llm, "hello") and last["outputs"][0]["text"] == greedy(llm, "b")
    assert torn["line"] == "{" and torn["error"] == {"type": "FormatError", "message": torn["error"]["message"], "source": f"{file}:2"}
    assert "top_p" in wrong["error"]["message"] and wrong["prompt"] == "b"
    before = output.read_bytes()
    assert loaded(*options, "--skip-bad") == 0 and output.read_bytes() == before  # all are answered
    assert "5 of 5 prompts were answered by an earlier run" in capsys.readouterr().err
    file.write_text("\n".join(["{", "[]"]))
    assert loaded("--prompts-file", str(file), "--output", str(tmp_path / "none.jsonl"), "--skip-bad") in (1, 2)
    assert not (tmp_path / "none.jsonl").exists()


def test_an_interrupted_run_keeps_its_answers_and_continues(
    loaded: Callable[..., int], llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the middle of a run, a torn last line, and the same command again: the answers of an undisturbed run."""
    count = 20
    (tmp_path / "in.txt").write_text("".join(f"prompt {i}\n" for i in range(count)))
    output, alone = tmp_path / "out.jsonl", tmp_path / "alone.jsonl"
    options = ("--prompts-file", str(tmp_path / "in.txt"), *GREEDY, "--output")
    steps, step = iter(range(10**6)), llm.engine.step

    def interrupting() -> list[Any]:
        if next(steps) == 14:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupting)
    assert loaded(*options, str(output)) == 130
    monkeypatch.undo()
    llm.generate("x", SamplingParams(max_tokens=1))
    assert not llm.engine.has_work()
    done = len(output.read_text().splitlines())
    assert 0 < done < count  # four run at a time, six steps each
    assert f"interrupted: {done} of {count} prompts are answered; the same command answers the others\n" in capsys.readouterr().err
    with open(output, "a") as file:
        file.write('{"index": 19, "prompt": "prompt')
    monkeypatch.setattr(cli_generate, "load", lambda options: contextlib.nullcontext(llm))
    assert loaded(*options, str(output)) == 0
    assert f"{done} of {count} prompts were answered by an earlier run\n" in capsys.readouterr().err
    assert loaded(*options, str(alone)) == 0
    assert answers_of(output) == answers_of(alone)
    (tmp_path / "in.txt").write_text("other\n" * count)
    before = output.read_bytes()
    assert loaded(*options, str(output)) == 2 and output.read_bytes() == before
    assert "which is not in the input: name another file" in capsys.readouterr().err


def test_several_answers_stream_in_the_order_of_their_prompts(
    loaded: Callable[..., int], llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first answer grows on stdout before any other is finished; a later one that is finished first waits for its turn."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "b", "max_tokens": 2}\n{"prompt": "c", "n": 2, "seed": 1}\n')
    seen: list[str] = []
    step = llm.engine.step

    def observing() -> list[Any]:
        seen.append(sys.stdout.getvalue())  # type: ignore[attr-defined]
        return step()

    monkeypatch.setattr(llm.engine, "step", observing)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert loaded("--prompts-file", str(tmp_path / "in.jsonl"), *GREEDY) == 0
    text, out = greedy(llm, "hello"), sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert out.startswith(f"=== hello\n{text}\n=== b\n{greedy(llm, 'b')[:2]}\n=== c (1/2)\n") and "=== c (2/2)\n" in out
    assert f"=== hello\n{text[:3]}" in seen[:6] and not any("=== b" in shown for shown in seen[:6])


def test_max_tokens_beyond_the_context(loaded: Callable[..., int], llm: LLM, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The context has 512 tokens. The default of 256 just fits; a number of the user's is limited, which one line says."""
    long = "x" * 500
    assert loaded("--prompt", long, "--temperature", "0", "--ignore-eos") == 0
    out, err = capsys.readouterr()
    assert len(out) <= 12 and "limited" not in err
    assert loaded("--prompt", long, "--temperature", "0", "--ignore-eos", "--max-tokens", "900") == 0
    limited, err = capsys.readouterr()
    assert limited == out and "max_tokens is limited by the context of 512 tokens (--prompt 1: from 900 to 11)\n" in err
    (tmp_path / "in.txt").write_text(f"{long}\n{long}\n")
    assert loaded("--prompts-file", str(tmp_path / "in.txt"), "--max-tokens", "12", "--output", "-") == 0
    assert f"({tmp_path}/in.txt:1: from 12 to 11, and 1 more)\n" in capsys.readouterr().err


def chat(loaded: Callable[..., int], monkeypatch: pytest.MonkeyPatch, *lines: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    return loaded("chat", *GREEDY)


def test_chat_remembers_and_forgets(
    loaded: Callable[..., int], llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    hi = [say("hi")]
    one = greedy(llm, {"messages": hi})
    more = [*hi, {"role": "assistant", "content": one}, say("more")]
    two = greedy(llm, {"messages": more})
    system = {"role": "system", "content": "be kind"}
    three = greedy(llm, {"messages": [system, *more]})
    four = greedy(llm, {"messages": [system, *hi]})
    assert chat(loaded, monkeypatch, "hi", "more", "", "/undo", "/system be kind", "more", "/reset", "hi", "/system", "/reset", "hi") == 0
    assert capsys.readouterr().out == "".join(text + "\n" for text in (one, two, three, four, one))
    assert chat(loaded, monkeypatch, "hi", "/exit", "more") == 0
    assert capsys.readouterr().out == one + "\n"


def test_chat_settings_and_statistics(
    loaded: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["/set max_tokens 2", "/set stop ab c", '/set logit_bias {"98": -1}', "/set seed 3", "/set seed null"]
    assert chat(loaded, monkeypatch, *settings, "/show", "hi", "/stats", "/help") == 0
    out, err = capsys.readouterr()
    assert "max_tokens = 2\n" in err and 'stop = ["ab c"]\n' in err and "seed = null\n" in err and "messages = 0\n" in err
    assert 'logit_bias = {"98": -1}\n' in err
    assert "generated tokens, first token after" in err and "/save FILE" in err and len(out) <= 6


def test_chat_conversations_can_be_saved(
    loaded: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    assert chat(loaded, monkeypatch, "/system S", "hi", f"/save {file}", "more") == 0
    one, two = capsys.readouterr().out.splitlines()
    assert [m["role"] for m in json.loads(file.read_text())] == ["system", "user", "assistant"]
    assert chat(loaded, monkeypatch, f"/load {file}", "more") == 0
    assert capsys.readouterr().out.splitlines() == [two]
    (tmp_path / "wrong.json").write_text('{"role": "user"}')
    assert chat(loaded, monkeypatch, f"/load {tmp_path}/none", f"/load {tmp_path}/wrong.json", f"/save {tmp_path}/no/such") == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 3 and "No such file" in err[0] and "role and content" in err[1] and "cannot write" in err[2]


def test_chat_continues_after_mistakes(
    loaded: Callable[..., int], llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["/unod", "/undo", "/set temprature 1", "/set top_p 7", "/set top_p warm", "/set n 2", "/save", "/load", "/stats"]
    wrong += ["/set logit_bias [1]", "/set ignore_eos yes", "/set stop 7", "/set stop_token_ids 5", "/set top_k " + "[" * 20_000, "x" * 600]
    assert chat(loaded, monkeypatch, *wrong, "hi") == 1
    out, err = capsys.readouterr()
    *lines, cut = err.splitlines()
    assert cut == "(the answer is cut by max_tokens=6: /set max_tokens N changes it)"
    assert len(lines) == len(wrong) and all(line.startswith("tinyvllm: ") for line in lines), err
    assert "did you mean '/undo'" in lines[0] and "did you mean 'temperature'" in lines[2] and "at most 511" in lines[-1]
    assert out == greedy(llm, {"messages": [{"role": "user", "content": "hi"}]}) + "\n"


def test_chat_at_the_end_of_its_context(
    loaded: Callable[..., int], llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The context has 512 tokens, a byte each: the third message does not fit with the first two, and the first turn leaves."""
    long = [letter * 180 for letter in "abc"]
    assert chat(loaded, monkeypatch, "/system S", *long, "/show") == 0
    out, err = capsys.readouterr()
    leaves = r"\(the context is full: it holds \d+ tokens and the conversation has \d+: the oldest turn leaves the conversation; /reset "
    assert re.search(leaves, err) and "messages = 4\n" in err
    first, answer, third = out.splitlines()
    rest = [("system", "S"), ("user", long[1]), ("assistant", answer), ("user", long[2])]
    assert third == greedy(llm, {"messages": [{"role": role, "content": text} for role, text in rest]})
    assert chat(loaded, monkeypatch, "hi", "x" * 600, "/show", "/undo", "/show") == 1  # a message that fits nowhere drops no turn
    err = capsys.readouterr().err
    assert "at most 511" in err and "the oldest" not in err and "messages = 2\n" in err and "messages = 0\n" in err
    assert chat(loaded, monkeypatch, "/set max_tokens null", "y" * 470, "/set max_tokens 600", "hi") == 0
    err = capsys.readouterr().err
    assert "(the answer is cut by the end of the context: /undo takes the last question back, /reset starts over)\n" in err
    assert "max_tokens=600 is limited by the context of 512 tokens\n" in err
    for end in ("/quit", "/bye"):
        assert chat(loaded, monkeypatch, end, "hi") == 0 and capsys.readouterr().out == ""


def test_chat_with_a_model_that_cannot(
    loaded: Callable[..., int], llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llm.engine.tokenizer, "chat_templates", {})
    assert chat(loaded, monkeypatch, "hi") == 1
    assert "no chat template" in capsys.readouterr().err


@pytest.fixture(scope="module")
def broken_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, which has no finite logits after a "z"; its answers are letters, but not that one."""
    folder = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][ord("z")] = np.nan
    tensors["lm_head.weight"][ord("z")] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


NO_LOGITS = "the model gave no finite logits; its weights or its cache are broken"


@pytest.fixture
def broken(broken_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """`loaded` for the broken model."""
    with LLM(broken_model, num_blocks=64, max_num_seqs=4) as llm:
        for command in (cli_generate, cli_chat):
            monkeypatch.setattr(command, "load", lambda options: contextlib.nullcontext(llm))
        yield lambda *arguments: cli.main([*arguments, "--model", str(broken_model)])


def test_a_broken_model_is_a_failure(broken: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert broken("--prompt", "fizz", *GREEDY, "--quiet") == 1
    assert capsys.readouterr() == ("\n", f"tinyvllm: error: --prompt 1: {NO_LOGITS}\n")
    assert broken("--prompt", "fizz", "--prompt", "hello", *GREEDY, "--quiet") == 1
    out, err = capsys.readouterr()
    assert re.fullmatch(r"=== fizz\n\n=== hello\n.{6}\n", out) and err == f"tinyvllm: error: --prompt 1: {NO_LOGITS}\n"
    (tmp_path / "in.txt").write_text("hello\nfizz\nz\n")
    assert broken("--prompts-file", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.jsonl"), *GREEDY) == 1
    line, error = capsys.readouterr().err.splitlines()
    assert line.startswith("3 prompts, ") and error == f"tinyvllm: error: {tmp_path}/in.txt:2 and 1 more: {NO_LOGITS}"
    results = answers_of(tmp_path / "out.jsonl")
    assert [result["outputs"][0]["finish_reason"] for result in results] == ["length", "error", "error"]


def test_chat_continues_after_a_broken_answer(
    broken: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(broken, monkeypatch, "hi", "fizz", "/show", "hi") == 1
    out, err = capsys.readouterr()
    assert f"tinyvllm: chat: {NO_LOGITS}\n" in err and err.count("tinyvllm: ") == 1 and "messages = 2\n" in err
    first, nothing, second = out.splitlines()
    assert len(first) == len(second) == 6 and nothing == ""


def test_an_interrupt_stops_the_answer_and_not_the_chat(
    loaded: Callable[..., int], llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, step, before = (
        iter(range(10**6)),
        llm.engine.step,
        signal.getsignal(signal.SIGINT),
    )  # ignored in a background job

    def interrupting() -> list[Any]:
        if next(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupting)
    assert chat(loaded, monkeypatch, "/set max_tokens 50", "hi", "/show", "/set max_tokens 2", "more") == 0
    out, err = capsys.readouterr()
    answer, second = out.splitlines()
    assert len(answer) <= 4 and len(second) <= 2 and "messages = 2\n" in err
    monkeypatch.undo()
    llm.generate("x", SamplingParams(max_tokens=1))
    assert not llm.engine.has_work() and signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("patience", [0.0, 1000.0])
def test_a_bar_appears_when_loading_takes_long(
    patience: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "PATIENCE", patience)
    bar = figures.LoadBar()
    for done in (0, 1 << 20, 3 << 20, 4 << 20):
        bar(done, 4 << 20, "weights")
    bar.close()
    out, err = capsys.readouterr()
    assert out == "" and ("weights: " in err and "/4.00M" in err if patience == 0 else err == "")


def test_main_from_start_to_end(tiny_model: Path) -> None:
    done = run("--model", str(tiny_model), "--prompt", "hello", "--max-tokens", "4", "--num-blocks", "1", "--seed", "1", "--device", "cpu")
    assert done.returncode == 0 and done.stdout.endswith("\n"), done.stderr
    *remarks, line, tinygrad = done.stderr.splitlines()
    others = [remark for remark in remarks if not remark.startswith("kernels are being compiled")]  # said with a cold cache
    assert len(remarks) <= 2 and len(others) == 1 and others[0].startswith("the context is 16 tokens by default"), done.stderr
    assert "6 prompt + " in line and tinygrad == "True"


def kernel_table(model: Path, *options: str, **environ: str) -> tuple[list[list[str]], str]:
    """Cells of the lines that `kernels` prints, without the headings, and what it says beneath."""
    done = run("kernels", "--model", str(model), "--device", "CPU", *options, **environ)
    assert done.returncode == 0, done.stderr
    headings, *lines = done.stdout.splitlines()
    assert headings.split() == ["op", "shape", "kernel", "why"]
    below = lines.pop() if "--quiet" not in options else ""
    if "--quiet" not in options:
        assert lines.pop().startswith("self-test: ")
    return [re.split("  +", line) for line in lines], below


def test_kernels_says_what_runs_each_op_and_why(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_attention_heads": 8, "num_key_value_heads": 4}  # heads of 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines, below = kernel_table(tmp_path, TINYVLLM_THREADS="1", TINYVLLM_KERNELS="matmul=plain")
    rows = {stem: (row, why) for stem, _, row, why in lines}
    assert {"embed", "norm_qkv_rope_store", "attention_decode", "attention_prefill", "norm_gate_up_silu", "norm_head"} <= rows.keys()
    assert rows["matmul"] == ("plain", "TINYVLLM_KERNELS asks for it")
    assert rows["attention_decode"][0] == "ref" and "head dimension from 32 to 512; the model has 16" in rows["attention_decode"][1]
    assert "device CPU" in below
    # what the machine lacks is a reason of every row, so that no row has it
    assert not any(why.startswith("not ") for _, why in rows.values())
    assert all(reason in below for reason in itertools.takewhile(lambda reason: reason is not None, cpu_variants().values()))


def test_kernels_of_the_reference_and_of_no_such_row(tiny_model: Path) -> None:
    lines, _ = kernel_table(tiny_model, "--quiet", TINYVLLM_KERNELS="all=ref")
    assert lines and all(line[2:] == ["ref", "TINYVLLM_KERNELS asks for it"] for line in lines)
    done = run("kernels", "--model", str(tiny_model), TINYVLLM_KERNELS="matmul=avx1024")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("tinyvllm: error: ") and "avx1024" in done.stderr


def has_cuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_cuda(), reason="this machine has a CUDA driver")
def test_a_device_that_is_not_there(tiny_model: Path) -> None:
    done = run("--model", str(tiny_model), "--prompt", "hello", "--device", "cuda:1")
    message, _ = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"tinyvllm: error: device CUDA:1 cannot be opened here: .*\bcuda\b.*; try --device CPU", message), message


def test_a_reader_that_goes_away_is_no_error(tiny_model: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(ROOT / "main.py"), "--help"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # so that it shows at exit if not before
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environ, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
