"""How a model holds its weights: products in panels with the right rows and format, in no more bytes than the files have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tinygrad import Tensor, dtypes

from tests.conftest import HIDDEN, VOCAB
from tests.tiny.to_gguf import dequantized, read_folder, write_gguf
from tinyvllm.errors import ModelError
from tinyvllm.ops.linear import TensorWeight
from tinyvllm.placement import Placement
from tinyvllm.quant.codecs import bf16_to_f32, f32_to_bf16
from tinyvllm.quant.formats import FLOATS, FORMATS, QUANTIZATIONS
from tinyvllm.quant.layouts import quantize_rows, unpack_rows

GOLDEN = Path(__file__).parents[1] / "tiny" / "golden"
PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_output": ("self_attn.o_proj",),
    "ffn_in": ("mlp.gate_proj", "mlp.up_proj"),
    "ffn_down": ("mlp.down_proj",),
}
DTYPES = {"auto": None, "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass
class Loaded:
    """A model with its weights, the loader that set them, and the progress that it reported."""

    model: Any
    loader: Any
    progress: list[tuple[int, int, str]]


def load(
    path: Path, dtype: str = "auto", format: str | None = None, dummy: bool = False, checkpoint: Any = None, kept: Path | None = None,
    device: str = "CPU", imatrix: Any = None,
) -> Loaded:  # fmt: skip
    """From a folder or file to a model as the runner does it; `format` is that of every matrix, None the stored one."""
    from tinyvllm.models.families import find_family, read_config, recipes_of
    from tinyvllm.runner.source import CheckpointSource, weight_dtype
    from tinyvllm.runner.weight_plan import WeightPlan
    from tinyvllm.runner.weights import WeightLoader
    from tinyvllm.weights.checkpoint import open_checkpoint

    checkpoint = checkpoint or open_checkpoint(path)
    source = CheckpointSource(checkpoint)
    family = find_family(source)
    config = read_config(family, source)
    model = family.model(config)
    progress: list[tuple[int, int, str]] = []
    plan = WeightPlan(Placement(device), weight_dtype(dtype, checkpoint), format or DTYPES[dtype], imatrix)
    loader = WeightLoader(None if dummy else checkpoint, plan, lambda *report: progress.append(report), kept)
    loader.load(model, recipes_of(family, config, model, checkpoint.kind))
    return Loaded(model, loader, progress)


def write(folder: Path, heads: int = 4, kv_heads: int = 2, intermediate: int = 96, hidden: int = 64) -> dict[str, np.ndarray]:
    """A random LLaMA of one layer, float32; returns its tensors."""
    shape = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "vocab_size": 40, **shape}
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32", "max_position_embeddings": 64}))
    random, D = np.random.default_rng(0), hidden // heads
    rows = {"q": hidden, "k": kv_heads * D, "v": kv_heads * D, "o": hidden}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": (O, hidden) for name, O in rows.items()}
    shapes |= {"mlp.gate_proj": (intermediate, hidden), "mlp.up_proj": (intermediate, hidden), "mlp.down_proj": (hidden, intermediate)}
    shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    named = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    named |= {"model.embed_tokens.weight": (40, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (40, hidden)}
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in named.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return tensors


def check_rows(model: Any, tensors: dict[str, np.ndarray], formats: set[str], atol: float = 0.0) -> None:
    """Every packed product of the model holds the rows of its parts, one part after the other. `tensors` under Hugging Face's names."""
    packed = set()
    for i, block in enumerate(model.blk):
        for field, parts in PRODUCTS.items():
            weight = getattr(block.weights, field).weight
            if not isinstance(weight, TensorWeight):
                want = np.concatenate([tensors[f"model.layers.{i}.{part}.weight"] for part in parts])
                assert want.shape == (weight.O, weight.I) and weight.format in formats, field
                np.testing.assert_allclose(weight.dense().numpy(), want, rtol=0, atol=atol, err_msg=field)
                assert all(getattr(block, name).weight is None for name in block.products()[field])
                packed.add(field)
    assert packed, "nothing was packed"


def as_bf16(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: bf16_to_f32(f32_to_bf16(tensor)) for name, tensor in tensors.items()}


def test_projections_of_a_group_are_one_matrix(tiny_model):
    tensors = load_file(tiny_model / "model.safetensors")
    model = load(tiny_model).model
    check_rows(model, tensors, {"F32"})
    np.testing.assert_array_equal(model.weights.head.dense().numpy(), tensors["lm_head.weight"])
    np.testing.assert_array_equal(model.weights.table.dense().numpy(), tensors["model.embed_tokens.weight"])
    assert not any(isinstance(getattr(model.blk[1].weights, field).weight, TensorWeight) for field in PRODUCTS)
    check_rows(load(tiny_model, "bfloat16").model, as_bf16(tensors), {"BF16"})


@pytest.mark.parametrize(("heads", "kv_heads", "intermediate"), [(8, 1, 96), (4, 2, 104)])
def test_parts_that_share_a_panel(tmp_path, heads, kv_heads, intermediate):
    """Eight rows of k, 104 of gate: the next part begins in the middle of sixteen."""
    tensors = write(tmp_path, heads, kv_heads, intermediate)
    check_rows(load(tmp_path).model, tensors, {"F32"})
    check_rows(load(tmp_path, "bfloat16").model, as_bf16(tensors), {"BF16"})


def test_products_without_kernels_stay_tensors(tmp_path, monkeypatch):
    tensors = write(tmp_path, intermediate=104)
    block = load(tmp_path).model.blk[0]
    assert isinstance(block.weights.ffn_down.weight, TensorWeight), "104 columns are no multiple of 32"
    np.testing.assert_array_equal(block.ffn_down.weight.numpy(), tensors["model.layers.0.mlp.down_proj.weight"])
    monkeypatch.setenv("TINYVLLM_KERNELS", "all=ref")
    model = load(tmp_path).model
    assert isinstance(model.weights.head, TensorWeight) and isinstance(model.weights.table, Tensor)
    assert all(isinstance(getattr(model.blk[0].weights, field).weight, TensorWeight) for field in PRODUCTS)
    np.testing.assert_array_equal(model.blk[0].attn_k.weight.numpy(), tensors["model.layers.0.self_attn.k_proj.weight"])


# --- quantized at load


@pytest.mark.parametrize("format", QUANTIZATIONS)
def test_quantized_at_load(tmp_path, monkeypatch, format):
    tensors = {name: rounded(tensor, format) for name, tensor in write(tmp_path, hidden=256, intermediate=512).items()}
    loaded = load(tmp_path, format=format)
    check_rows(loaded.model, tensors, {format})
    assert loaded.model.weights.table.format == loaded.model.weights.head.format == format
    matrices = sum(tensor.size for tensor in tensors.values() if tensor.ndim == 2)
    assert loaded.loader.bytes == matrices * FORMATS[format].nbytes // FORMATS[format].elements + 4 * 3 * 256
    if format in ("Q8_0", "Q4_K"):
        monkeypatch.setenv("TINYVLLM_KERNELS", "all=ref")
        check_rows(load(tmp_path, format=format).model, tensors, {format})  # packed even where the reference computes


def rounded(tensor: np.ndarray, format: str, importance: np.ndarray | None = None) -> np.ndarray:
    """A matrix as the format's definition rounds it; vectors as they are."""
    return unpack_rows(format, quantize_rows(format, tensor, importance)) if tensor.ndim == 2 else tensor


def test_a_width_that_cannot_be_quantized_is_refused(tmp_path):
    write(tmp_path, intermediate=104)
    with pytest.raises(ModelError, match="blk.0.ffn_down.weight cannot be Q8_0: .*104 is not a multiple.*leave quantization out"):
        load(tmp_path, format="Q8_0")


@pytest.mark.parametrize("format", [*FLOATS, *(name for name in QUANTIZATIONS if FORMATS[name].elements <= 32)])
def test_dummy_weights(tiny_model, format):
    loaded = load(tiny_model, "auto", format, dummy=True)
    first, second = (block.weights.qkv.weight for block in loaded.model.blk)
    assert first.format == format
    values = first.dense().numpy()
    assert abs(values.std() - 0.02) < 0.002 and np.isfinite(values).all()
    assert not np.array_equal(values, second.dense().numpy()) and not np.array_equal(values[:64], values[64:])
    again = load(tiny_model, "auto", format, dummy=True).model.blk[0].weights.qkv.weight
    np.testing.assert_array_equal(again.dense().numpy(), values)
    assert (loaded.model.blk[0].attn_norm.weight.numpy() == 1).all()


def test_a_format_without_kernels_on_the_device_is_refused(monkeypatch):
    from tinyvllm.models.config import WeightRecipe
    from tinyvllm.runner import weight_plan
    from tinyvllm.runner.weight_plan import WeightPlan

    monkeypatch.setattr(weight_plan, "packed_in", lambda layout: ("Q8_0", "Q4_0", "Q4_K"))
    recipes = [WeightRecipe("blk.0.attn_q.weight", (64, 256), ("a",)), WeightRecipe("output.weight", (64, 256), ("b",))]
    with pytest.raises(ModelError, match="METAL has no kernels for IQ4_NL matrices, only for Q8_0, Q4_0, Q4_K.* and floats"):
        WeightPlan(Placement("METAL"), dtypes.float16, "IQ4_NL").wanted(recipes)
    with pytest.raises(ModelError, match=r"METAL has no kernels for Q3_K matrices \(some of Q3_K_M\), only for Q8_0"):
        WeightPlan(Placement("METAL"), dtypes.float16, "Q3_K_M").wanted(recipes)


# --- heads and tables


def test_a_tied_head_and_the_table_are_one():
    loaded = load(GOLDEN / "llama3.2")
    model, table = loaded.model, read_folder(GOLDEN / "llama3.2")["model.embed_tokens.weight"]
    assert model.weights.table is model.weights.head and model.token_embd.weight is None
    np.testing.assert_array_equal(model.weights.table.dense().numpy(), table)
    assert loaded.loader.bytes == loaded.loader.streamed, "it is read as the head and counted once"


def test_a_table_of_its_own_is_not_streamed(tiny_model):
    loaded = load(tiny_model)
    assert loaded.loader.bytes - loaded.loader.streamed == VOCAB * HIDDEN * 4


def test_progress_ends_at_the_total(tiny_model):
    for options in ({}, {"format": "Q4_0"}, {"dummy": True}):
        progress = load(tiny_model, **options).progress
        done = [d for d, _, _ in progress]
        assert done == sorted(done) and progress[-1][:2] == (progress[0][1], progress[0][1])
        names = [name for _, _, name in progress]
        assert len(set(names)) == len(names) and "blk.1.attn_k.weight" in names


# --- GGUF


def gguf_file(path: Path, kind: str) -> dict[str, np.ndarray]:
    """Golden llama2 with its matrices stored as `kind`; returns their values under Hugging Face's names and in its order."""
    folder = GOLDEN / "llama2"
    write_gguf(folder, path, "llama", kind)
    return dequantized(read_folder(folder), kind)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q5_0"])
def test_a_gguf_stays_as_it_is_stored(tmp_path, kind):
    tensors = gguf_file(tmp_path / "model.gguf", kind)
    loaded = load(tmp_path / "model.gguf")
    check_rows(loaded.model, tensors, {kind})
    assert loaded.model.weights.table.format == kind
    np.testing.assert_array_equal(loaded.model.weights.table.dense().numpy(), tensors["model.embed_tokens.weight"])

    from tinyvllm.weights.checkpoint import open_checkpoint

    stored = sum(record.data.nbytes for record in open_checkpoint(tmp_path / "model.gguf").tensors.values())
    assert abs(loaded.loader.bytes / stored - 1) < 0.02
    packed = [loaded.model.weights.head, *(getattr(block.weights, field).weight for block in loaded.model.blk for field in PRODUCTS)]
    vectors = 4 * 64 * (1 + 2 * len(loaded.model.blk))
    assert loaded.loader.streamed == sum(weight.tensor.nbytes() for weight in packed) + vectors, "the count equals what the model holds"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_quantized_gguf_becomes_floats_with_an_explicit_dtype(tmp_path, dtype):
    tensors = gguf_file(tmp_path / "model.gguf", "Q8_0")
    if dtype == "float16":
        tensors = {name: tensor.astype(np.float16).astype(np.float32) for name, tensor in tensors.items()}
    model = load(tmp_path / "model.gguf", dtype).model
    check_rows(model, tensors, {DTYPES[dtype]})
    assert model.weights.table.format == DTYPES[dtype]


def test_a_quantized_gguf_is_quantized_further(tmp_path):
    tensors = gguf_file(tmp_path / "model.gguf", "Q8_0")
    step = max(np.abs(tensor).max() for tensor in tensors.values()) / 8
    check_rows(load(tmp_path / "model.gguf", format="Q4_0").model, tensors, {"Q4_0"}, atol=step)


def test_parts_of_different_formats_stay_as_they_are_stored(tmp_path):
    """As converters write them: v has more bits than q and k."""
    from tinyvllm.weights.checkpoint import open_checkpoint

    eights, fours = gguf_file(tmp_path / "eight.gguf", "Q8_0"), gguf_file(tmp_path / "four.gguf", "Q4_0")
    checkpoint, other = open_checkpoint(tmp_path / "four.gguf"), open_checkpoint(tmp_path / "eight.gguf")
    checkpoint.tensors["blk.0.attn_v.weight"] = other.tensors["blk.0.attn_v.weight"]
    model = load(tmp_path, checkpoint=checkpoint).model
    mixed = fours | {"model.layers.0.self_attn.v_proj.weight": eights["model.layers.0.self_attn.v_proj.weight"]}
    first, second = (block.weights for block in model.blk)
    assert first.qkv.weight.format == "Q4_0+Q8_0" and first.attn_output.weight.format == second.qkv.weight.format == "Q4_0"
    assert [part.O for part in first.qkv.weight.parts] == [96, 32], "q and k are one matrix, v another"
    check_rows(model, mixed, {"Q4_0+Q8_0", "Q4_0"})


# --- panels kept on disk


@pytest.fixture
def small_are_kept(monkeypatch):
    from tinyvllm.runner import weight_cache

    monkeypatch.setattr(weight_cache, "MIN_BYTES", 0)


def kept_files(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "weights").iterdir())


def test_the_second_start_maps_the_matrices_that_the_first_packed(tmp_path, monkeypatch, small_are_kept):
    from tinyvllm.runner import weights

    tensors, cache = write(tmp_path), tmp_path / "cache"
    first = load(tmp_path, "bfloat16", kept=cache)
    check_rows(first.model, as_bf16(tensors), {"BF16"})
    assert kept_files(cache) == [".index", ".panels"]
    monkeypatch.setattr(weights, "pack_panels", lambda *_: pytest.fail("packed again"))
    second = load(tmp_path, "bfloat16", kept=cache)
    check_rows(second.model, as_bf16(tensors), {"BF16"})
    assert (second.loader.bytes, second.loader.streamed) == (first.loader.bytes, first.loader.streamed)
    assert second.progress[-1] == first.progress[-1]


def test_another_packing_or_another_model_is_packed_again(tmp_path, small_are_kept):
    cache = tmp_path / "cache"
    for intermediate in (96, 128):
        tensors = write(tmp_path, intermediate=intermediate)
        check_rows(load(tmp_path, "bfloat16", kept=cache).model, as_bf16(tensors), {"BF16"})
    check_rows(load(tmp_path, "float32", kept=cache).model, tensors, {"F32"})
    assert kept_files(cache) == [*3 * [".index"], *3 * [".panels"]], "one of each packing and content"


def test_files_of_a_killed_start_are_removed(tmp_path, small_are_kept):
    write(tmp_path)
    cache = tmp_path / "cache"
    load(tmp_path, "bfloat16", kept=cache)
    (index,) = (cache / "weights").glob("*.index")
    gone, alive = (index.with_name(f"{index.stem}.{pid}.fresh") for pid in (2**22 + 1, 1))  # the first is above the largest possible pid
    gone.touch()
    alive.touch()
    index.unlink()
    load(tmp_path, "bfloat16", kept=cache)
    assert not gone.exists()
    assert alive.exists(), "another process may be writing it"


def test_small_and_unfinished_packings_are_not_kept(tmp_path, monkeypatch):
    from tinyvllm.runner import weight_cache

    tensors, cache = write(tmp_path), tmp_path / "cache"
    check_rows(load(tmp_path, kept=cache).model, tensors, {"F32"})
    assert kept_files(cache) == [], "packing takes less time than caching is worth"
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 0)
    monkeypatch.setattr(weight_cache.WeightCache, "finish", lambda self: None)  # as if the process had been killed here
    check_rows(load(tmp_path, kept=cache).model, tensors, {"F32"})
    monkeypatch.undo()
    check_rows(load(tmp_path, kept=cache).model, tensors, {"F32"})
    assert ".index" not in kept_files(cache)
