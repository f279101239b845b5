"""The checkpoints that benchmarks write: one set of numbers whatever the file, and what the peers expect in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.shapes import SHAPES, bytes_per_token, parse_formats, tensors, write_folder, write_gguf, write_gguf_of

MICRO = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 1024, "head_dim": 32}  # fmt: skip
PROMPT = [5, 300, 41, 7, 7, 120, 9]


def micro(shape: str) -> dict:
    return SHAPES[shape] | MICRO


def logits(model: Path) -> np.ndarray:
    from tinyvllm import LLM

    with LLM(model, dtype="float32", max_model_len=64, num_blocks=4, skip_tokenizer_init=True) as llm:
        return llm.prompt_logits(PROMPT)


@pytest.mark.parametrize("shape", ["tinyllama-1.1b", "llama-3.2-1b", "qwen3-0.6b"])
def test_folder_and_gguf_are_one_model(shape: str, tmp_path: Path) -> None:
    """Also the order of q's and k's rows and Llama-3's frequencies: a wrong one changes every logit."""
    folder = logits(write_folder(micro(shape), tmp_path / "folder"))
    assert folder.std() > 0.01
    np.testing.assert_allclose(logits(write_gguf(micro(shape), tmp_path / "a.gguf", "BF16")), folder, atol=1e-4 * folder.std())
    rough = logits(write_gguf(micro(shape), tmp_path / "b.gguf", "Q8_0"))
    assert 0 < np.abs(rough - folder).max() < 0.2 * folder.std()


def test_sizes_of_the_named_shapes() -> None:
    count = {name: sum(int(np.prod(shape)) for _, _, shape in tensors(config)) for name, config in SHAPES.items()}
    assert count["tinyllama-1.1b"] == 1_100_048_384
    assert count["llama-3.2-1b"] == 1_235_814_400
    assert count["qwen3-0.6b"] == 596_049_920
    assert count["llama-3.1-8b"] == 8_030_261_248
    assert count["qwen3-moe-4b"] == 3_983_070_208


def test_experts_are_read_from_gguf(tmp_path: Path) -> None:
    """A router and experts in their own formats give finite, different logits; a folder is not written."""
    config = micro("qwen3-moe-4b") | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    exact = logits(write_gguf(config, tmp_path / "a.gguf", "BF16"))
    rough = logits(write_gguf(config, tmp_path / "b.gguf", "Q8_0"))
    assert np.isfinite(exact).all() and exact.std() > 0.01 and (rough != exact).any()
    with pytest.raises(ValueError, match="written as GGUF alone"):
        write_folder(config, tmp_path / "c")


def test_bytes_of_a_token_leave_the_embedding_table_out() -> None:
    config = SHAPES["tinyllama-1.1b"]
    vectors = 45 * 2048
    matrices = 1_100_048_384 - vectors - 32000 * 2048
    assert bytes_per_token(config, "BF16") == 2 * matrices + 4 * vectors
    assert bytes_per_token(config, "Q4_0") == matrices // 32 * 18 + 4 * vectors
    config = SHAPES["qwen3-moe-4b"]
    attention, experts, router = 2048 * (2 * 4096 + 2 * 512), 8 * 3 * 2048 * 768, 64 * 2048
    vectors = 12 * (2 * 2048 + 2 * 128) + 2048
    matrices = 12 * (attention + experts) + 32000 * 2048
    assert bytes_per_token(config, "BF16") == 2 * matrices + 4 * (vectors + 12 * router)


def test_formats_are_checked() -> None:
    assert parse_formats("bf16, q4_0") == ["BF16", "Q4_0"]
    with pytest.raises(Exception, match="Q7_0"):
        parse_formats("q7_0")


def test_a_folder_is_written_as_the_same_gguf(tmp_path: Path) -> None:
    """Byte by byte the file that is made of the same numbers; another data type is refused."""
    folder = write_folder(micro("tinyllama-1.1b"), tmp_path / "a")
    copied = write_gguf_of(folder, tmp_path / "a.gguf")
    assert copied.read_bytes() == write_gguf(micro("tinyllama-1.1b"), tmp_path / "b.gguf", "BF16").read_bytes()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"BF16"', b'"FP16"', 1))
    with pytest.raises(ValueError, match="is FP16 .* expected BF16"):
        write_gguf_of(folder, tmp_path / "c.gguf")
