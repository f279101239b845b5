"""Loads the tokenizer of a model: from a Hugging Face folder, or from the metadata of a GGUF file.

Tokenizer libraries are imported inside the functions, when a model needs them: start-up time counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tinyvllm.errors import TokenizerError
from tinyvllm.text.tokenizer import Tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, else tokenizer.model (tiktoken or sentencepiece, detected from its content).

    TokenizerError if the folder has neither, or a file is corrupt.
    """
    from tinyvllm.text.folder import read_settings

    folder = Path(folder)
    if not folder.is_dir():
        raise TokenizerError(f"tokenizer: {folder} is not a folder; pass the folder that holds tokenizer.json or tokenizer.model")
    if (folder / "tokenizer.json").is_file():
        from tinyvllm.text.huggingface import load_tokenizer_json

        return load_tokenizer_json(folder / "tokenizer.json", read_settings(folder))
    path = folder / "tokenizer.model"
    if not path.is_file():
        raise TokenizerError(f"tokenizer: {folder} has neither tokenizer.json nor tokenizer.model; copy one from the original model")
    from tinyvllm.text.tiktoken_model import load_tiktoken, looks_like_tiktoken

    if looks_like_tiktoken(path):
        return load_tiktoken(path, read_settings(folder))
    from tinyvllm.text.sentencepiece_model import load_sentencepiece

    return load_sentencepiece(path, read_settings(folder))


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer inside a GGUF file, from its metadata by key. TokenizerError names the key that is missing or wrong."""
    from tinyvllm.text.gguf_vocab import build_tokenizer

    return build_tokenizer(metadata)
