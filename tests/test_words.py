"""One language: words that the project does not use, and names that are retired. docs/glossary.md has the words that it does use.

The list is short on purpose. The field has a plain word for each of these; a reader of vLLM or llama.cpp had to guess what they meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENDINGS = {".py", ".md", ".c", ".h", ".cpp", ".cu", ".cuh", ".metal", ".sh", ".js", ".html", ".css", ".toml", ".yaml", ".yml"}
NOT_OURS = {"build", "dist", "venv", "node_modules"}

NAME_IT = "name the request, sequence or caller"
# Word -> what to write instead.
BANNED = {
    **dict.fromkeys(("who", "whom", "whoever", "somebody", "someone", "nobody", "anybody", "everybody"), NAME_IT),
    **dict.fromkeys(("he", "him", "his", "himself"), NAME_IT),
    "anew": "again",
    "beside": "next to, versus, in addition to, during",
    "besides": "in addition",
    "behind": "after; in the background",
    "alike": "equal, the same, both",
    "so many": "N, that number of",
    "goes on": "continues, is unchanged",
    "go on": "continue",
    "stands": "is, holds",
    "lies": "is in, is at",
    "company": "batch",
    "crew": "thread pool",
    "door": "entry, middleware, admission",
    "doors": "imports",
}  # fmt: skip

# Names of the past -> their names now. The words above are checked everywhere; these as whole identifiers or file names.
RETIRED = {
    "calls_of": "backend_for",
    "refuses_": "unsupported",
    "Terms": "RequestOptions",
    "Leading": "InflightPrefixes",
    "Steady": "ReusableDecode",
    "Warming": "Warmup",
    "Shaping": "TokenConstraints",
    "Accounts": "EngineStats",
    "Thoughts": "Reasoning",
    "PrefixFolder": "PrefixStore",
    "KeptPanels": "WeightCache",
    "LineGraph": "CudaGraph",
    "IndirectGraph": "MetalGraph",
    "verify_prefix": "speculate/policies",
    "ops/launch": "bridge",
    "ops/calls": "backends",
    "matmul_sixteen": "matmul16",
    "best_merge": "argmax_merge",
}

# (file or folder, word) -> why it may be there.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("tests/test_words.py", "*"): "this list",
    ("CHANGELOG.md", "*"): "says what was renamed",
    ("docs/decisions/0024-one-language-and-a-layout-to-extend.md", "*"): "says which words went",
    ("README.md", "he"): "the transcript is a story of the bundled model",
    ("tinyvllm/demo/README.md", "*"): "answers and stories of the bundled model",
    ("tinyvllm/demo/train.py", "who"): "questions of the bundled model's examination",
    ("tinyvllm/demo/train.py", "his"): "questions of the bundled model's examination",
    ("tests/demo/test_corpus.py", "who"): "questions of the bundled model's training data",
    ("tests/demo/test_corpus.py", "he"): "text of the bundled model's training data",
    ("tinyvllm/demo/corpus.py", "*"): "text of the bundled model's training data",
    ("tinyvllm/demo/stories.py", "*"): "text of the bundled model's training data",
    ("tinyvllm/demo/world.py", "*"): "text of the bundled model's training data",
}
PHRASES = ("behind a proxy", "behind a reverse proxy", "behind a load balancer")  # what networks call it


def files() -> list[Path]:
    folders = ("tinyvllm", "kernels", "benchmarks", "tests", "docs", ".github")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS and path.is_file()]
    found += [path for path in ROOT.iterdir() if path.is_file() and (path.suffix in ENDINGS or path.name == "Makefile")]
    return sorted(path for path in found if not NOT_OURS & set(path.relative_to(ROOT).parts))


def pattern(words: list[str], flags: int = 0) -> re.Pattern[str]:
    """Whole words; an underscore separates words, too. A word that ends with one is the beginning of a name."""
    each = [rf"(?<!\w){word}" if word.endswith("_") else rf"(?<![A-Za-z]){re.escape(word)}(?![A-Za-z])" for word in words]
    return re.compile("|".join(each), flags)


_BANNED = pattern(sorted(BANNED, key=len, reverse=True), re.IGNORECASE)
_RETIRED = pattern(sorted(RETIRED, key=len, reverse=True))
_PHRASES = re.compile("|".join(PHRASES), re.IGNORECASE)


def is_excepted(name: str, word: str) -> bool:
    return any((name == place or name.startswith(f"{place}/")) and excepted in ("*", word) for place, excepted in EXCEPTIONS)


def may_offend(text: str) -> bool:
    """Whether it has any word of the lists: the patterns take twenty times as long, and most files have none."""
    lower = text.lower()
    words = set(re.findall("[a-z]+", lower))
    return any(word in lower if " " in word else word in words for word in BANNED) or any(name in text for name in RETIRED)


def offences(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, word, what to write instead) of each banned word and retired name of a file."""
    name, whole = path.relative_to(ROOT).as_posix(), path.read_text()
    if not may_offend(whole):
        return
    for number, line in enumerate(whole.splitlines(), 1):
        text = _PHRASES.sub("", line)
        for word in _BANNED.findall(text):
            if not is_excepted(name, word.lower()):
                yield number, word, BANNED[word.lower()]
        for word in _RETIRED.findall(text):
            if not is_excepted(name, word):
                yield number, word, RETIRED[word]


def folder_of(path: Path) -> str:
    """The first part of its path, "." for files at the top."""
    return path.relative_to(ROOT).parent.parts[0] if path.parent != ROOT else "."


@pytest.mark.parametrize("folder", sorted({folder_of(path) for path in files()}))
def test_words(folder: str) -> None:
    paths = [path for path in files() if folder_of(path) == folder]
    wrong = [f"{path.relative_to(ROOT)}:{line}: {word!r}; write: {instead}" for path in paths for line, word, instead in offences(path)]
    assert not wrong, "\n".join(wrong)


def test_exceptions_are_needed() -> None:
    """An exception whose file is gone, or whose word it no longer has, goes too."""
    for place, word in EXCEPTIONS:
        paths = [path for path in files() if path.relative_to(ROOT).as_posix().startswith(place)]
        assert paths, f"{place} is not there"
        text = "\n".join(path.read_text() for path in paths)
        assert word == "*" or pattern([word], re.IGNORECASE).search(text), f"{place} has no {word!r}"


def test_a_banned_word_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_words.ROOT", tmp_path)
    path = tmp_path / "a.py"
    path.write_text("# Whoever stands behind a proxy\nx = calls_of(1)\nlead_behind = whole\n")
    assert [(line, word) for line, word, _ in offences(path)] == [(1, "Whoever"), (1, "stands"), (2, "calls_of"), (3, "behind")]
