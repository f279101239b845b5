"""Published vocabularies: the ones that llama.cpp tests its own tokenizers with, next to texts and the token ids that are expected of them.

They are in the source distribution of llama-cpp-python, which pip downloads here (77 MB); nothing of it is in this repository. Needs
`make test-peers` and a package index.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tinyvllm.errors import TokenizerError
from tinyvllm.text.load import tokenizer_from_gguf
from tinyvllm.weights.gguf import read_gguf

SOURCE = "llama-cpp-python==0.3.36"
VOCABULARIES = (
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2",
    "qwen35", "refact", "starcoder",
)  # fmt: skip
REFUSED = {"bert-bge": "tokenizer.ggml.model is 'bert'"}
BETWEEN_TEXTS = "\n__ggml_vocab_test__\n"
MIN_TEXTS = 46  # in each file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the vocabularies."""
    folder = tmp_path_factory.mktemp("llama.cpp")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(folder), SOURCE]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not download {SOURCE} within 10 minutes")
    archives = list(folder.glob("*.tar.gz"))
    if not archives:
        pytest.skip(f"pip could not download {SOURCE}: {(ended.stderr or ended.stdout).strip()[-300:]}")
    with tarfile.open(archives[0]) as archive:
        for member in archive:
            name = member.name.rpartition("/")[2]
            if member.isfile() and name.startswith("ggml-vocab-") and (content := archive.extractfile(member)) is not None:
                (folder / name).write_bytes(content.read())
    archives[0].unlink()
    return folder


def expected(folder: Path, name: str) -> list[tuple[str, list[int]]]:
    """The texts of a vocabulary and their token ids."""
    texts = (folder / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode("utf-8").split(BETWEEN_TEXTS)
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text().split("\n")
    if len(lines) > len(texts) and not lines[-1]:  # of an empty text where there is one, else the end of the file
        lines.pop()
    return list(zip(texts, ([int(word) for word in line.split()] for line in lines), strict=True))


@pytest.mark.parametrize("name", VOCABULARIES)
def test_texts_are_encoded_as_expected(folder: Path, name: str) -> None:
    tokenizer = tokenizer_from_gguf(read_gguf(folder / f"ggml-vocab-{name}.gguf")[0])
    pairs = expected(folder, name)
    assert len(pairs) >= MIN_TEXTS
    wrong = [(text, ids, got) for text, ids in pairs if (got := tokenizer.encode(text, add_special_tokens=False)) != ids]
    assert not wrong, f"{len(wrong)} of {len(pairs)}: {wrong[0]}"


@pytest.mark.parametrize("name", REFUSED)
def test_other_kinds_are_refused_by_name(folder: Path, name: str) -> None:
    with pytest.raises(TokenizerError, match=REFUSED[name]):
        tokenizer_from_gguf(read_gguf(folder / f"ggml-vocab-{name}.gguf")[0])
