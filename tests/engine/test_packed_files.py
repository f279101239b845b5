"""Whole GGUF files in packed formats, mixed as converters mix them: kernels against the reference, and the same bits in any batch.

The weights are random bits: the formats' values are tested in tests/quant, and here only that all parts are read as the file says.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from tests.engine.test_kernels import answers, greedy, kernels, prompts_of
from tests.tiny.to_gguf import write_gguf
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.engine.tools.verify import verify
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import Layout, packed_in
from tinyvllm.quant.layouts import unpack_rows
from tinyvllm.quant.random_rows import random_rows

E, F, V, LAYERS = 256, 512, 256, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": E, "intermediate_size": F, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "vocab_size": V, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
SHAPES = {"attn_q": (E, E), "attn_k": (128, E), "attn_v": (128, E), "attn_output": (E, E), "ffn_gate": (F, E), "ffn_up": (F, E),
          "ffn_down": (E, F)}  # fmt: skip
# What llama.cpp's mixes give to some matrices of some layers; the others have the format named first.
MIXES = {
    "Q4_K_M": ("Q4_K", {"blk.0.attn_v": "Q6_K", "blk.0.ffn_down": "Q6_K", "output": "Q6_K"}),
    "Q5_K_M": ("Q5_K", {"blk.1.attn_v": "Q6_K", "blk.1.ffn_down": "Q6_K", "output": "Q6_K"}),
    "Q3_K_M": ("Q3_K", {"blk.0.attn_v": "Q5_K", "blk.1.attn_v": "Q4_K", "blk.1.ffn_down": "Q4_K", "output": "Q6_K"}),
    "Q2_K": ("Q2_K", {"blk.0.attn_v": "Q4_K", "blk.0.ffn_down": "Q3_K", "blk.0.attn_output": "Q3_K", "output": "Q6_K"}),
    "IQ4_XS": ("IQ4_XS", {"blk.0.attn_v": "Q5_K", "output": "Q6_K"}),
    "gate and up apart": ("Q4_1", {"blk.0.ffn_up": "Q5_1", "blk.0.attn_k": "MXFP4", "blk.1.attn_k": "IQ4_NL"}),
}


def matrices_of(mix: str) -> dict[str, tuple[str, np.ndarray]]:
    """The matrices of a model by name: format and rows, uint8 [O, bytes]."""
    usual, others = MIXES[mix]
    shapes = {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()} | {"token_embd": (V, E), "output": (V, E)}
    blocks = {f"{name}.weight": (others.get(name, usual), shape) for name, shape in shapes.items()}
    return {
        name: (format, random_rows(format, *shape, size=shape[1] ** -0.5, seed=i))
        for i, (name, (format, shape)) in enumerate(blocks.items())
    }


def write_model(folder: Path, mix: str, unpacked: bool = False) -> Path:
    """A GGUF file with these matrices, or with their exact values as float32."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    norms = {f"blk.{i}.{name}.weight": np.ones(E, np.float32) for i in range(LAYERS) for name in ("attn_norm", "ffn_norm")}
    norms["output_norm.weight"] = np.full(E, 2.0, np.float32)
    stored = matrices_of(mix)
    values = {name: unpack_rows(format, rows) for name, (format, rows) in stored.items()} if unpacked else {}
    write_gguf(folder, folder / "model.gguf", "llama", tensors=norms | values, stored={} if unpacked else stored)
    return folder / "model.gguf"


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory):
    @functools.cache
    def make(mix: str) -> Path:
        return write_model(tmp_path_factory.mktemp("packed"), mix)

    return make


def open_file(path: Path, **options) -> LLM:
    return LLM(path, device="CPU", max_model_len=160, skip_tokenizer_init=True, **options)


def formats_read(device: str | None = None) -> set[str]:
    """Of the matrices that kernels multiplied since the choices were forgotten, on all devices or on one."""
    return {
        part
        for choice in registry.choices(device)
        if choice.stem in PRODUCTS and "load" not in choice.shape
        for part in choice.shape.split()[-1].split("+")
    }


PRODUCTS = ("matmul", "norm_head", "norm_gate_up_silu")


@pytest.mark.parametrize("mix", [mix if mix == "Q4_K_M" else pytest.param(mix, marks=pytest.mark.long) for mix in MIXES])
def test_kernels_follow_the_reference_and_no_matrix_is_unpacked(model_of, mix):
    """Place by place on the same packed weights: a reference that is chosen at load would unpack them, and not round activations."""
    path, best = model_of(mix), registry.usable_variants(Placement("CPU"))[0]
    with kernels(best), open_file(path, max_num_seqs=2) as llm:
        report = verify(llm.engine, [{"prompt_token_ids": prompts_of(2, V)[0]}], steps=2)
        greedy(llm, prompts_of(2, V), 4)
        assert report.fine, report
        assert formats_read() <= set(packed_in(Layout.PANELS))
        assert llm.engine.runner.weight_bytes < 1.02 * path.stat().st_size


def test_a_mixed_file_has_the_same_bits_in_any_batch(model_of):
    prompts = [{"prompt_token_ids": ids} for ids in prompts_of(5, V)]
    greedy_params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
    path = model_of("Q4_K_M")
    with open_file(path, max_num_seqs=1) as llm:
        alone = [answers(llm.generate([prompt], [greedy_params]))[0] for prompt in prompts]
    with open_file(path, max_num_seqs=5, max_num_batched_tokens=24) as llm:
        assert answers(llm.generate(prompts, [greedy_params] * 5)) == alone
