"""What README.md and docs/ say about the repository: links, files, options of the command line. Needs no tinygrad."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest

from tinyvllm.cli.arguments import COMMANDS, PARSERS, TWO_WORDS
from tinyvllm.cli.definitions import negations

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FOLDERS = ("tinyvllm", "tests", "docs", "kernels", "benchmarks")

LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*|[\w-]+\.(?:py|toml)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
COMMAND = re.compile(r"(?:\bmain\.py|^tinyvllm)(?: |$)(.*)")
FOREIGN = re.compile(r"^(pip|make|python -m|docker|uvx|xcode-select)\b")  # commands with options of their own


def inline_code(text: str) -> list[str]:
    return CODE.findall(FENCE.sub("", text))


def fenced_lines(text: str) -> list[str]:
    return [line.strip() for block in FENCE.findall(text) for line in block.splitlines()[1:-1]]


@functools.cache
def options_of(command: str) -> set[str]:
    return {option for action in PARSERS[command]()._actions for option in (*action.option_strings, *negations(action))}


def check_command(line: str) -> str | None:
    """What is wrong with `main.py ...` or `tinyvllm ...`; None if nothing is, or if it is no such line."""
    match = COMMAND.search(line)
    if match is None:
        return None
    words = shlex.split(match[1], comments=True)
    command = words[0] if words and not words[0].startswith("-") else "generate"
    command = TWO_WORDS.get((words[0], words[1]), command) if len(words) > 1 else command
    if command not in COMMANDS:
        return f"{line!r}: there is no command {command!r}"
    if command == "show-config" and (target := next((word for word in words[1:] if word in COMMANDS), None)):
        return check_command(f"tinyvllm {shlex.join(words[words.index(target) :])}")
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in options_of(command)]
    return f"{line!r}: {command} knows no {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if not re.match(r"[a-z]+:", target):
            path, _, heading = target.partition("#")
            assert not heading, f"{page.name}: {target}: headings are not checked, link the page"
            assert (page.parent / path).exists(), f"{page.name}: {target} is not there"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_named_files_exist(page: Path) -> None:
    for code in inline_code(page.read_text()):
        if PATH.fullmatch(code):
            assert (ROOT / code).exists(), f"{page.name}: there is no {code}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_and_options_are_known(page: Path) -> None:
    text = page.read_text()
    codes = inline_code(text)
    wrong = [problem for line in (*codes, *fenced_lines(text)) if (problem := check_command(line))]
    everything = set().union(*(options_of(command) for command in COMMANDS))
    for code in codes:
        if not FOREIGN.match(code):
            wrong += [f"{code!r}: no command knows {option}" for option in OPTION.findall(code) if option not in everything]
    assert not wrong, f"{page.name}: " + "; ".join(wrong)


def test_every_page_is_reached_from_the_readme() -> None:
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in reached:
            reached.add(page)
            targets = [(page.parent / t).resolve() for t in LINK.findall(page.read_text()) if t.endswith(".md") and ":" not in t]
            todo += [target for target in targets if target.exists()]
    assert not set(PAGES) - reached


def test_readme_fits_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_figures_are_filled_in() -> None:
    for page in PAGES:
        assert "FIGURE(" not in page.read_text(), f"{page.name}: a figure is still to be measured"
