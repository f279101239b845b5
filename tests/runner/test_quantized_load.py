"""Matrices quantized while a model is loaded: mixes, importance, widths that fit no block, what is named; and files that are unpacked."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from tinygrad import dtypes

from tests.quant.blocks import finite_blocks
from tests.runner.test_weights import load, write
from tests.tiny.to_gguf import write_gguf
from tests.weights.test_imatrix import write_dat
from tinyvllm.errors import ModelError, ToolchainError
from tinyvllm.placement import Placement
from tinyvllm.quant.codecs import readable_formats
from tinyvllm.quant.formats import FLOATS, FORMATS, Layout, packed_in
from tinyvllm.quant.layouts import quantize_rows, unpack_rows
from tinyvllm.quant.mixes import formats_of

UNPACKED = [name for name in readable_formats() if name not in (*FLOATS, *packed_in(Layout.PANELS))]


def rows_of(model, field: str) -> np.ndarray:
    return getattr(model.blk[0].weights, field).weight.dense().numpy()


def rounded(format: str, tensor: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    return unpack_rows(format, quantize_rows(format, tensor, importance))


def test_a_mix_gives_each_matrix_its_format(tmp_path):
    tensors = write(tmp_path, hidden=256, intermediate=512)
    loaded = load(tmp_path, format="Q4_K_M")
    qkv = loaded.model.blk[0].weights.qkv.weight
    assert qkv.format == "Q4_K+Q6_K", "the only layer has more bits"
    parts = {"q": "Q4_K", "k": "Q4_K", "v": "Q6_K"}
    want = [rounded(format, tensors[f"model.layers.0.self_attn.{part}_proj.weight"]) for part, format in parts.items()]
    np.testing.assert_array_equal(qkv.dense().numpy(), np.concatenate(want))
    np.testing.assert_array_equal(rows_of(loaded.model, "ffn_down"), rounded("Q6_K", tensors["model.layers.0.mlp.down_proj.weight"]))
    assert (loaded.model.weights.head.format, loaded.model.weights.table.format) == ("Q6_K", "Q4_K")
    assert loaded.loader.formats == set(formats_of("Q4_K_M"))


def test_a_width_that_fits_no_block_of_256_is_replaced_and_named(tmp_path, caplog):
    write(tmp_path, hidden=256, intermediate=288)
    with caplog.at_level(logging.WARNING, "tinyvllm"):
        loaded = load(tmp_path, format="Q4_K")
    assert loaded.model.blk[0].weights.ffn_down.weight.format == "Q5_0"
    assert (
        "weights: 1 matrix (blk.0.ffn_down.weight) become Q5_0 instead of Q4_K: their width is no whole number of its blocks" in caplog.text
    )


def test_importance_weighs_the_columns(tmp_path, caplog):
    from tinyvllm.weights.imatrix import read_imatrix

    tensors = write(tmp_path, hidden=256, intermediate=512)
    columns = np.random.default_rng(0).uniform(0, 10, 256).astype(np.float32)
    imatrix = read_imatrix(
        write_dat(tmp_path / "i.dat", {"blk.0.attn_output.weight": (2, 2 * columns), "blk.0.ffn_up.weight": (1, columns)})
    )
    with caplog.at_level(logging.WARNING, "tinyvllm"):
        loaded = load(tmp_path, format="Q4_K", imatrix=imatrix)
    output = tensors["model.layers.0.self_attn.o_proj.weight"]
    assert not np.array_equal(rounded("Q4_K", output, columns), rounded("Q4_K", output))
    np.testing.assert_array_equal(rows_of(loaded.model, "attn_output"), rounded("Q4_K", output, columns))
    both = [rounded("Q4_K", tensors[f"model.layers.0.mlp.{part}_proj.weight"], columns) for part in ("gate", "up")]
    np.testing.assert_array_equal(rows_of(loaded.model, "ffn_in"), np.concatenate(both), "gate reads the same x as up")
    assert "the imatrix does not have 6 matrices (blk.0.ffn_down.weight, " in caplog.text


def test_importance_of_another_model_is_refused_before_anything_is_loaded(tmp_path):
    from tinyvllm.weights.imatrix import read_imatrix

    write(tmp_path, hidden=256, intermediate=512)
    for name, size, message in (
        ("blk.7.attn_q.weight", 256, "has none of the model's matrices"),
        ("blk.0.attn_q.weight", 64, "64 columns of 1 matrices for blk.0.attn_q.weight, which has 256"),
    ):
        imatrix = read_imatrix(write_dat(tmp_path / "i.dat", {name: (1, np.ones(size, np.float32))}))
        with pytest.raises(ModelError, match=message):
            load(tmp_path, format="Q4_K", imatrix=imatrix)


def test_packings_are_kept_apart_by_their_importance(tmp_path):
    from tinyvllm.runner.weight_plan import WeightPlan
    from tinyvllm.weights.imatrix import read_imatrix

    plans = [WeightPlan(Placement("CPU"), dtypes.float32, "Q4_K")]
    for scale in (1, 2):
        imatrix = read_imatrix(write_dat(tmp_path / f"{scale}.dat", {"a": (1, np.full(8, scale, np.float32))}))
        plans.append(WeightPlan(Placement("CPU"), dtypes.float32, "Q4_K", imatrix))
    assert len({plan.identity for plan in plans}) == 3


@pytest.mark.parametrize("number", [np.nan, 1e5])
def test_numbers_that_cannot_be_quantized_are_refused(tmp_path, number):
    from safetensors.numpy import save_file

    tensors = write(tmp_path, hidden=256, intermediate=512)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = number
    save_file(tensors, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match="'blk.0.ffn_up.weight' has numbers that are not finite or beyond float16's range, and cannot be Q8_0"
    ):
        load(tmp_path, format="Q8_0")


def test_numpy_quantizes_where_nothing_compiles_the_kernel(monkeypatch, caplog):
    from tinyvllm.runner import quantize
    from tinyvllm.storage import folders

    def nothing(*_):
        raise ToolchainError("no compiler")

    rows = np.random.default_rng(0).standard_normal((5, 512)).astype(np.float32)
    by_kernel = quantize.quantized("F32", rows.view(np.uint8), "Q5_K")
    monkeypatch.setattr(quantize, "run_now", nothing)
    monkeypatch.setattr(folders, "_logged", set())
    with caplog.at_level(logging.WARNING, "tinyvllm"):
        np.testing.assert_array_equal(quantize.quantized("F32", rows.view(np.uint8), "Q5_K"), by_kernel)
    assert "matrices are quantized by numpy, many times slower than by the kernel: no compiler" in caplog.text
    rows[2, 2] = np.inf
    with pytest.raises(FloatingPointError):
        quantize.quantized("F32", rows.view(np.uint8), "Q5_K")


def test_pieces_of_any_source_are_one_matrix(monkeypatch):
    from tinyvllm.runner import quantize

    monkeypatch.setattr(quantize, "_PIECE", 1024)
    values = np.random.default_rng(0).standard_normal((7, 512)).astype(np.float32)
    stored = quantize_rows("Q8_0", values)
    np.testing.assert_array_equal(quantize.quantized("Q8_0", stored, "Q4_K"), quantize_rows("Q4_K", unpack_rows("Q8_0", stored)))
    np.testing.assert_array_equal(quantize.quantized("F16", values.astype(np.float16).view(np.uint8), "Q3_K"),
                                  quantize_rows("Q3_K", values.astype(np.float16).astype(np.float32)))  # fmt: skip


# --- files in formats that no kernel multiplies

E, F, V = 256, 256, 64
CONFIG = {
    "model_type": "llama", "hidden_size": E, "intermediate_size": F, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "vocab_size": V,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {"attn_q": (E, E), "attn_k": (128, E), "attn_v": (128, E), "attn_output": (E, E), "ffn_gate": (F, E), "ffn_up": (F, E),
          "ffn_down": (E, F)}  # fmt: skip


@pytest.mark.parametrize("format", UNPACKED)
def test_a_file_in_an_unpacked_format_answers_as_its_numbers(tmp_path, caplog, format):
    """The same tokens as a file that holds the unpacked numbers, and one line that names what became floats."""
    import json

    from tinyvllm import LLM, SamplingParams

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes = {f"blk.0.{name}.weight": shape for name, shape in SHAPES.items()} | {"token_embd.weight": (V, E), "output.weight": (V, E)}
    per_row = {I: I // FORMATS[format].elements for _, I in shapes.values()}
    stored = {
        name: (format, finite_blocks(format, O * per_row[I], I**-0.5, seed).reshape(O, -1))
        for seed, (name, (O, I)) in enumerate(shapes.items())
    }
    norms = {f"blk.0.{name}.weight": np.ones(E, np.float32) for name in ("attn_norm", "ffn_norm")} | {
        "output_norm.weight": np.ones(E, np.float32)
    }
    plain = {name: unpack_rows(format, rows) for name, (_, rows) in stored.items()}
    write_gguf(tmp_path, tmp_path / "packed.gguf", "llama", tensors=norms, stored=stored)
    write_gguf(tmp_path, tmp_path / "plain.gguf", "llama", tensors=norms | plain)
    answers = []
    for name in ("packed.gguf", "plain.gguf"):
        with caplog.at_level(logging.WARNING, "tinyvllm"):
            llm = LLM(tmp_path / name, device="CPU", dtype="auto" if name == "packed.gguf" else "float16", skip_tokenizer_init=True)
        with llm:
            params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
            answers.append([out.outputs[0].token_ids for out in llm.generate([{"prompt_token_ids": [1, 5, 9, 33]}], [params])])
    assert answers[0] == answers[1]
    assert f"9 matrices (blk.0.attn_q.weight, blk.0.attn_k.weight, ...) stored as {format} become F16: no kernel" in caplog.text


def test_an_engine_reads_the_importance_matrix_of_its_option(tmp_path):
    from tinyvllm import LLM, SamplingParams

    write(tmp_path, hidden=256, intermediate=512)
    write_dat(tmp_path / "i.dat", {"blk.0.attn_q.weight": (1, np.ones(256, np.float32))})
    options = {"device": "CPU", "quantization": "q4_k_m", "skip_tokenizer_init": True}
    with LLM(tmp_path, imatrix=tmp_path / "i.dat", **options) as llm:
        assert llm.engine.runner.weight_identity.split()[1] == "Q4_K_M" and len(llm.engine.runner.weight_identity.split()) == 3
        (out,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)])
        assert len(out.outputs[0].token_ids) == 2
    with pytest.raises(ModelError, match="imatrix: cannot read .*none.dat: No such file"):
        LLM(tmp_path, imatrix=tmp_path / "none.dat", **options)
