"""What tests of several rooms share: one tiny LLaMA, written to disk as a Hugging Face folder the way a user would find it."""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.shares import divide

# The suite runs in several processes at once, and threads that outnumber the cores wait for each other; tests of the pool set a number.
os.environ.setdefault("TINYVLLM_THREADS", "1")
# Its tests switch it on: every cache folder of a test would pay for the compilers of the cases.
os.environ.setdefault("TINYVLLM_SELFTEST", "off")
# Its tests switch it on: tests of captures and of the kernels in them would find what an earlier test has captured.
os.environ.setdefault("TINYVLLM_KEEP_STEPS", "0")

# The rooms with the dearest files, which begin first: the files that end a run then take seconds, and both processes end together.
FIRST = ("emulator", "kernels", "models", "engine", "gpu", "ops", "benchmarks")

LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 2, 128, 4, 2, 128
SPECIALS = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")
BOS, EOS = 256, 257
VOCAB = 264  # three more rows than the tokenizer has tokens, as padded checkpoints do
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """FIRST, then the others as they were found. What tests/shares.py says is long is marked."""
    divide(items)
    here, place = Path(__file__).parent, {room: index for index, room in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.relative_to(here).parts[0], len(FIRST)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """After the time TESTS_UNTIL (seconds since 1970) no test begins: it is skipped, and counted as that. .ci/run has an end to keep."""
    until = os.environ.get("TESTS_UNTIL")
    if until is not None and time.time() > float(until):
        pytest.skip("TESTS_UNTIL: the time for these tests is over")


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: a token for every byte (id = the byte), then the special ones, no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's spelling of bytes as characters
    rest = [b for b in range(256) if b not in printable]
    spelling = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
    tokenizer = Tokenizer(models.BPE(vocab={spelling[b]: b for b in range(256)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_weights(folder: Path, seed: int = 0) -> None:
    """model.safetensors in float32 under Hugging Face's names; matrices are [out, in]."""
    random = np.random.default_rng(seed)
    head = HIDDEN // HEADS

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    tensors = {"model.embed_tokens.weight": random.standard_normal((VOCAB, HIDDEN)).astype(np.float32)}
    tensors |= {"model.norm.weight": np.ones(HIDDEN, np.float32), "lm_head.weight": matrix(VOCAB, HIDDEN) * 3}
    letters = list(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    others = np.setdiff1d(np.arange(VOCAB), letters)
    tensors["lm_head.weight"][others] *= 0.1  # answers are mostly letters: a line of them stays a line
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * head, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = (1 + 0.1 * random.standard_normal(HIDDEN)).astype(np.float32)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def write_config(folder: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS, "temperature": 0.7, "top_k": 50}))


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """What earlier files left is not searched for garbage again. Late in a run a collection took a second, and an emulator makes three."""
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(scope="module", autouse=True)
def loggers_as_found() -> Iterator[None]:
    """`serve` in this process replaces the handlers of its loggers for good: later files would find neither their records nor caplog's."""
    loggers = [logging.getLogger(name) for name in ("tinyvllm", "tinyvllm.server", "uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")]
    found = [(logger, logger.handlers[:], logger.propagate, logger.level, logger.disabled) for logger in loggers]
    yield
    for logger, handlers, logger.propagate, level, logger.disabled in found:
        logger.handlers[:] = handlers
        logger.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def no_notice_of_compilers() -> None:
    """The line that compilers have run for a second comes once a process: in the log of whatever test runs then."""
    from tinyvllm.bridge.compiling import compile_clock

    compile_clock._noted = True


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer LLaMA: hidden 128, 4 heads of 32 (the fewest that kernels have), 2 KV heads, tokens for bytes."""
    folder = tmp_path_factory.mktemp("tiny_model")
    write_tokenizer(folder)
    write_weights(folder)
    write_config(folder)
    return folder
