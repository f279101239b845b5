"""What shells complete. bash runs everywhere; zsh and fish where they are installed; elsewhere only their scripts' words are checked."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tinyvllm import cli
from tinyvllm.cli.arguments import COMMANDS, PARSERS, SHELLS

LINES: list[tuple[list[str], list[str]]] = [
    (["se"], ["serve"]),
    ([""], list(COMMANDS)),
    (["serve", "--unl"], ["--unload-idle"]),
    (["--tempe"], ["--temperature"]),
    (["generate", "--tempe"], ["--temperature"]),
    (["serve", "--port", "3", "--hos"], ["--host"]),
    (["serve", "--no-warm"], ["--no-warm-up"]),
    (["show-config", "--json", "verif"], ["verify"]),
    (["show-config", "--sch"], ["--schema"]),
    (["show-config", "serve", "--unl"], ["--unload-idle"]),
    (["show-config", "--json", "serve", "--unl"], ["--unload-idle"]),
    (["completion", ""], list(SHELLS)),
    (["bench", ""], ["serve"]),
    (["bench", "serve", "--good"], ["--goodput"]),
    (["bench", "--repe"], ["--repetitions"]),
    (["show-config", "bench", "serve", "--good"], ["--goodput"]),
    (["serve", "--prof"], ["--profile"]),
]


def script(shell: str, capsys: pytest.CaptureFixture[str], folder: Path) -> Path:
    assert cli.main(["completion", shell]) == 0
    path = folder / f"completion.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def run(program: str, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def in_bash(path: Path, lines: list[list[str]]) -> list[list[str]]:
    """The replies of the completion function that the script has registered, each line's last word being the one to complete."""
    calls = [f"COMP_WORDS=({shlex.join(['tinyvllm', *line])}); COMP_CWORD={len(line)}; ask" for line in lines]
    register = "complete -p tinyvllm | grep -q -- '-F _tinyvllm' || exit 3"
    ask = 'ask() { _tinyvllm tinyvllm; (IFS=" "; echo "${COMPREPLY[*]}"); }'
    output = run("bash", "--norc", "-c", "\n".join([f"source {shlex.quote(str(path))}", register, ask, *calls]))
    return [line.split() for line in output.split("\n")[:-1]]


def test_bash_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = script("bash", capsys, tmp_path)
    # bash completes a file where there is no reply; it splits --model=PATH at the sign
    none = [
        ["serve", "--port", ""],
        ["serve", "--model", ""],
        ["serve", "--model", "="],
        ["serve", "--model", "=", "--"],
        ["nonsense", "--x"],
        ["replay", "x"],
    ]
    options = [[*([] if command == "generate" else [command]), "--"] for command in COMMANDS]
    replies = in_bash(path, [*(line for line, _ in LINES), *none, *options])
    assert replies[: len(LINES)] == [reply for _, reply in LINES]
    assert replies[len(LINES) : -len(COMMANDS)] == [[]] * len(none)
    for command, reply in zip(COMMANDS, replies[-len(COMMANDS) :]):
        assert set(reply) == {option for option in PARSERS[command]().known_options() if option.startswith("--")}, command


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Which options are offered for a line; how zsh itself offers them (_arguments, _describe) is replaced."""
    path = script("zsh", capsys, tmp_path)
    run("zsh", "-n", str(path))
    head = 'compdef() { : }; _describe() { print -r -- ${(P)2} }; _arguments() { print -r -- "$@" }'
    lines = [line for line, _ in LINES]
    calls = [f"words=({shlex.join(['tinyvllm', *line])}); CURRENT={len(line) + 1}; _tinyvllm" for line in lines]
    output = run("zsh", "-f", "-c", "\n".join([head, f"source {shlex.quote(str(path))}", *calls])).splitlines()
    assert all(word in line for line, (_, reply) in zip(output, LINES, strict=True) for word in reply)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = script("fish", capsys, tmp_path)
    run("fish", "--no-execute", str(path))
    calls = [f"complete -C {shlex.quote(shlex.join(['tinyvllm', *line[:-1]]) + ' ' + line[-1])}; echo END" for line, _ in LINES]
    blocks = run("fish", "-c", "\n".join([f"source {shlex.quote(str(path))}", *calls])).split("END\n")[:-1]
    for block, (line, reply) in zip(blocks, LINES, strict=True):
        assert {entry.partition("\t")[0] for entry in block.splitlines()} == set(reply), line


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_have_every_option_and_whole_words(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Quotes and brackets in help texts must not end a word: the words of a script are those of a POSIX shell, which both read so."""
    text = script(shell, capsys, tmp_path).read_text()
    lines = [line for line in text.splitlines() if line.startswith("complete ") or line.endswith(" ;;")]
    words = [word for line in lines for word in shlex.split(line)]
    for command in COMMANDS:
        for action in PARSERS[command]()._actions:
            for option in action.option_strings:
                if shell == "zsh":
                    assert any(word.lstrip("*").startswith(f"{option}[") and word.count("[") >= 1 for word in words), option
                else:
                    assert option.lstrip("-") in words, option
