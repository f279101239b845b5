"""Every file of a model, mutated: it is opened, or refused with one of the project's errors in one line of at most 300 characters.

A few hundred mutations in the normal run, 20,000 in the long one (`-m long`). Each is made from its number alone:
`opened(KIND, NUMBER, folder)` repeats one.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from tests import conftest
from tests.mutations import Tensor, Typed, mutate_bytes, mutate_gguf, mutate_json, mutate_lines, mutate_protobuf, typed, write_gguf
from tests.text.vocabularies import byte_level, gguf_of_byte_level, gguf_of_sentencepiece, llama2_json, sentencepiece_model, tiktoken_lines
from tinyvllm.engine.prompt import default_sampling_params
from tinyvllm.engine.startup import eos_ids_of
from tinyvllm.errors import TinyvllmError
from tinyvllm.models.families import check_layers, find_family, read_config
from tinyvllm.runner.source import CheckpointSource, weight_dtype
from tinyvllm.text.chat import render_chat
from tinyvllm.text.load import load_tokenizer, tokenizer_from_gguf
from tinyvllm.weights.checkpoint import open_checkpoint, open_description

GOLDEN = Path(__file__).parent / "tiny" / "golden"
USER = [{"role": "user", "content": "a question"}]
TEXT = "the quick brown fox, 日本語 \x00 1234 <|eot_id|> ẞ"
TEMPLATE = conftest.CHAT_TEMPLATE
MAX_MESSAGE = 300
MAX_REFUSAL = 1000  # of the one message that lists every architecture

Files = dict[str, bytes]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@cache
def _tokenizer_config() -> bytes:
    added = {str(i): {"content": f"<extra_{i}>", "special": True, "lstrip": False, "single_word": False} for i in (424, 425)}
    names = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>", "lstrip": False}}
    return _json(
        {**names, "add_bos_token": True, "added_tokens_decoder": added, "chat_template": TEMPLATE, "legacy": False, "tokenizer_class": "X"}
    )


@cache
def seed_files(kind: str) -> Files:
    """A whole model of one kind: file contents by name."""
    config = (GOLDEN / "phi3-longrope" / "config.json").read_bytes()
    generation = _json({"eos_token_id": [1, 2], "bos_token_id": 0, "temperature": 0.7})
    folder = {"config.json": config, "generation_config.json": generation, "tokenizer_config.json": _tokenizer_config()}
    more = {"special_tokens_map.json": _json({"pad_token": "<pad>"}), "added_tokens.json": _json({"<extra_426>": 426})}
    if kind == "byte-level":
        return folder | more | {"tokenizer.json": byte_level().to_str().encode()}
    if kind == "metaspace":
        return {
            "tokenizer.json": llama2_json(sentencepiece_model()).to_str().encode(),
            "tokenizer_config.json": _json({"bos_token": "<s>"}),
        }
    if kind == "sentencepiece":
        return {"tokenizer.model": sentencepiece_model(), "tokenizer_config.json": _json({"add_bos_token": True, "legacy": False})}
    if kind == "tiktoken":
        return {"tokenizer.model": tiktoken_lines(byte_level())}
    if kind == "safetensors":
        return {"config.json": config, "model.safetensors": _safetensors()}
    if kind == "shards":
        source = GOLDEN / "llama3"
        return {path.name: path.read_bytes() for path in source.iterdir() if path.suffix != ".npz"}
    assert kind in ("gguf-bpe", "gguf-spm"), kind
    return {"model.gguf": write_gguf(*_gguf(kind))}


@cache
def _safetensors() -> bytes:
    tensors = {"a.weight": np.ones((4, 8), np.float32), "b": np.ones(3, np.float16), "c": np.zeros((), np.int64)}
    return save(tensors, {"format": "pt"})


@cache
def _gguf(kind: str) -> tuple[dict[str, Typed], list[Tensor]]:
    values = gguf_of_byte_level(byte_level()) if kind == "gguf-bpe" else gguf_of_sentencepiece(sentencepiece_model())
    model = {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 16, "attention.head_count": 2}
    model |= {
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "linear",
    }
    model |= {"rope.scaling.factor": 2.0, "attention.sliding_window": 16}
    values = {"general.architecture": "llama", "general.alignment": 32} | values | {f"llama.{key}": value for key, value in model.items()}
    values |= {"tokenizer.chat_template": TEMPLATE, "tokenizer.chat_template.tool_use": TEMPLATE, "tokenizer.ggml.add_bos_token": True}
    values |= {"tokenizer.ggml.unknown_token_id": 0} if kind == "gguf-spm" else {}
    tensors: list[Tensor] = [("token_embd.weight", (8, 4), 0, bytes(128)), ("blk.0.attn_norm.weight", (8,), 0, bytes(32))]
    tensors += [("blk.0.attn_output.weight", (8, 8), 0, bytes(256))]  # what check_layers looks for
    return {key: typed(value) for key, value in values.items() if value is not None}, tensors


KINDS = ("byte-level", "metaspace", "sentencepiece", "tiktoken", "safetensors", "shards", "gguf-bpe", "gguf-spm")
_SHARES = (4, 2, 4, 1, 2, 1, 4, 4)  # of the mutations: most go where the most structure is


def mutated(kind: str, number: int) -> Files:
    """The files of mutation `number`: one of them is changed."""
    rng = random.Random(f"{kind} {number}")
    files = dict(seed_files(kind))
    if kind.startswith("gguf"):
        return {"model.gguf": mutate_gguf(rng, *_gguf(kind))}
    name = rng.choice([name for name in files if kind != "shards" or name.endswith(".json")])
    if name.endswith(".json"):
        files[name] = mutate_json(rng, files[name])
    elif kind == "safetensors":
        files[name] = _mutated_header(rng, files[name])
    elif kind == "sentencepiece":
        files[name] = mutate_protobuf(rng, files[name])
    else:
        files[name] = mutate_lines(rng, files[name])
    return files


def _mutated_header(rng: random.Random, data: bytes) -> bytes:
    size = int.from_bytes(data[:8], "little")
    if rng.random() < 0.4:
        return mutate_bytes(rng, data)
    header = mutate_json(rng, data[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def read_all(folder: Path) -> list[str]:
    """What a start of the engine reads of a model's files, and what its first request does with them; the messages of their errors."""
    messages = []
    for read, needs in (
        (_read_model, ("config.json", "model.gguf")),
        (_use_tokenizer, ("tokenizer.json", "tokenizer.model", "model.gguf")),
    ):
        if any((folder / name).is_file() for name in needs):
            try:
                read(folder)
            except TinyvllmError as error:
                messages.append(str(error))
    return messages


def _read_model(folder: Path) -> None:
    path = folder / "model.gguf" if (folder / "model.gguf").is_file() else folder
    default_sampling_params(folder)
    checkpoint = open_checkpoint(path) if path.is_file() or [*folder.glob("*.safetensors*")] else open_description(path)
    assert sum(record.data.nbytes for record in checkpoint.tensors.values()) <= sum(f.stat().st_size for f in folder.iterdir())
    json.dumps(checkpoint.config, sort_keys=True, default=str).encode()  # as the digest of a model does
    eos_ids_of(checkpoint.config)
    weight_dtype("auto", checkpoint)
    source = CheckpointSource(checkpoint)
    family = find_family(source)
    config = read_config(family, source)
    if checkpoint.tensors:
        check_layers(family, config, source)


def _use_tokenizer(folder: Path) -> None:
    path = folder / "model.gguf"
    tokenizer = tokenizer_from_gguf(open_checkpoint(path).config) if path.is_file() else load_tokenizer(folder)
    ids = tokenizer.encode(TEXT)
    assert all(type(i) is int for i in ids)
    tokenizer.decode(ids).encode("utf-8")
    for token_id in (*ids, *tokenizer.eos_ids, 0, tokenizer.vocab_size - 1, tokenizer.vocab_size):
        tokenizer.token_text(token_id).encode("utf-8")
    for name in ("default", *tokenizer.chat_templates):
        render_chat(tokenizer, USER, chat_template=name)


def opened(kind: str, number: int, folder: Path) -> str | None:
    """The messages that refused mutation `number`, None if it was read. AssertionError for a message that cannot be shown."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in mutated(kind, number).items():
        (folder / name).write_bytes(data)
    messages = read_all(folder)
    for message in messages:
        limit = MAX_REFUSAL if message.startswith("models: the architecture ") else MAX_MESSAGE
        assert 0 < len(message) <= limit, f"{len(message)} characters: {message[:400]!r}"
        assert message.isprintable(), f"not printable: {message!r}"
    return "; ".join(messages) or None


def run(total: int, folder: Path) -> None:
    """`total` mutations over all kinds. What goes wrong is collected, so that one run shows everything."""
    wrong, refused, slowest = [], 0, (0.0, "")
    for kind, share in zip(KINDS, _SHARES, strict=True):
        count = total * share // sum(_SHARES)
        for number in range(count):
            start = time.perf_counter()
            try:
                refused += opened(kind, number, folder) is not None
            except BaseException as error:  # also a panic of a library, which is no Exception
                if isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise
                wrong.append(f"{kind} {number}: {type(error).__name__}: {str(error)[:300]}")
            slowest = max(slowest, (time.perf_counter() - start, f"{kind} {number}"))
    print(f"{total} mutated files: {refused} refused, {len(wrong)} wrong; slowest {slowest[1]}, {slowest[0]:.2f} s")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:60])
    assert refused


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_good_before_they_are_mutated(tmp_path: Path, kind: str) -> None:
    for name, data in seed_files(kind).items():
        (tmp_path / name).write_bytes(data)
    if kind in ("byte-level", "metaspace", "sentencepiece", "tiktoken") or kind.startswith("gguf"):
        _use_tokenizer(tmp_path)
    if kind == "shards" or kind.startswith("gguf"):
        _read_model(tmp_path)


def test_mutated_files(tmp_path: Path) -> None:
    run(600, tmp_path / "model")


@pytest.mark.long
def test_many_mutated_files(tmp_path: Path) -> None:
    run(20_000, tmp_path / "model")
