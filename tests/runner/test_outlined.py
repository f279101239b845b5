"""The weights that are planned from headers are those that the loader then holds: every family, quantized checkpoints, every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runner.test_weights import GOLDEN, load, write
from tests.tiny import quantized
from tests.tiny.to_gguf import write_gguf
from tinyvllm.errors import ModelError
from tinyvllm.quant.formats import QUANTIZATIONS
from tinyvllm.runner.outlined import WeightOutline
from tinyvllm.runner.planned import streamed_matrices

KINDS: dict[str, tuple[dict[str, Any], quantized.Quantize]] = {
    "gptq": (quantized.gptq_settings(4, 32), quantized.gptq(4, 32)),
    "gptq in another order": (quantized.gptq_settings(4, 32, desc_act=True), quantized.gptq(4, 32, index=quantized.shuffled)),
    "awq": (quantized.awq_settings(64), quantized.awq(64)),
    "hqq": (quantized.hqq_settings(), quantized.hqq(4, 64)),
}


def outline_of(path: Path, **options: Any) -> WeightOutline:
    from tinyvllm.config.engine import resolve
    from tinyvllm.runner.opened import open_model

    return open_model(resolve(path, device="CPU", **options), "CPU").outline()


def check(path: Path, outline: WeightOutline, **options: Any) -> None:
    loader = load(path, **options).loader
    assert (outline.bytes, outline.streamed, outline.formats) == (loader.bytes, loader.streamed, loader.formats)
    assert sum(held.nbytes for held in outline.held) == outline.bytes


@pytest.mark.parametrize("family", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_a_family_of_models(family):
    check(GOLDEN / family, outline_of(GOLDEN / family))


def test_a_decode_step_reads_the_experts_of_one_row():
    """Two of eight experts, and all else but the embedding table."""
    outline = outline_of(GOLDEN / "qwen3moe")
    experts = sum(held.nbytes for held in outline.held if "_exps." in held.name)
    table = sum(held.nbytes for held in outline.held if not held.streamed)
    assert experts and outline.streamed == outline.bytes - table - experts * 6 // 8
    assert sorted(matrices.share for matrices in streamed_matrices(outline.held) if matrices.share < 1) == [0.25]


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_checkpoint(tmp_path, kind):
    path = quantized.write(tmp_path, *KINDS[kind]) / "quantized"
    check(path, outline_of(path))


@pytest.mark.parametrize("format", ["Q8_0", "Q4_K_M", "Q3_K_S"])
@pytest.mark.parametrize("intermediate", [512, 288])
def test_quantized_while_loading(tmp_path, format, intermediate):
    """288 is no whole number of blocks of 256: these matrices get another format."""
    write(tmp_path, hidden=256, intermediate=intermediate)
    check(tmp_path, outline_of(tmp_path, quantization=format.lower()), format=format)


def test_a_packed_file(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(GOLDEN / "llama2", path, "llama", "Q8_0")
    outline = outline_of(path)
    check(path, outline)
    assert outline.formats == {"Q8_0"}


def test_a_matrix_that_cannot_be_quantized_is_the_loaders_error(tmp_path):
    write(tmp_path, hidden=40, heads=4, kv_heads=2, intermediate=96)
    for quantization in QUANTIZATIONS[:2]:
        with pytest.raises(ModelError, match="cannot be") as planned:
            outline_of(tmp_path, quantization=quantization.lower())
        with pytest.raises(ModelError) as loaded:
            load(tmp_path, format=quantization)
        assert str(planned.value) == str(loaded.value)
