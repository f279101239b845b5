"""The tiny gpt-oss as a model that writes a script: each of its tokens has one successor. Its tokenizer has harmony's marks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.tiny.to_gguf import read_folder
from tinyvllm.text.parsing.formats import MARKS

GOLDEN = Path(__file__).parent / "golden" / "gpt-oss"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ENDS = ("<|return|>", "<|call|>")


def write_harmony_model(folder: Path, script: list[str]) -> Path:
    """`script`: the tokens that follow "<|start|>assistant", each another one; the last is one of ENDS. Marks that the script has twice are
    part of a longer token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True)
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("assistant", *script) if text not in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ENDS[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = [tokenizer.token_to_id(mark) for mark in ENDS]
    vocabulary = tokenizer.get_vocab_size()
    config = json.loads((GOLDEN / "config.json").read_text()) | {
        "vocab_size": vocabulary,
        "eos_token_id": ends,
        "dtype": "float32",
        "max_position_embeddings": 1024,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights([tokenizer.token_to_id(text) for text in ("assistant", *script)], vocabulary), folder / "model.safetensors")
    return folder


def _weights(ids: list[int], vocabulary: int) -> dict[str, np.ndarray]:
    """Layers add nothing to the residual stream, and the head's row of a token is the embedding of the one before it."""
    tensors = read_folder(GOLDEN)
    for name in tensors:
        if ".o_proj." in name or ".down_proj" in name:
            tensors[name] = np.zeros_like(tensors[name])
    size = tensors["model.norm.weight"].shape[0]
    embedding = np.random.default_rng(0).standard_normal((vocabulary, size)).astype(np.float32)
    head = np.zeros((vocabulary, size), np.float32)
    for token, following in itertools.pairwise(ids):
        head[following] = embedding[token]
    tensors["model.norm.weight"] = np.ones_like(tensors["model.norm.weight"])
    return tensors | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
