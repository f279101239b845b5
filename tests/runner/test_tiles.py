"""Weights on an emulated GPU: rows go up as the file has them, are packed there, and need no more memory than a staging buffer."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.emulator.driver import cuda_device
from tests.runner.test_weights import GOLDEN, gguf_file, load, write
from tinyvllm.backends.cuda import packing as gpu_packing
from tinyvllm.bridge import download
from tinyvllm.errors import ModelError
from tinyvllm.ops.linear import TensorWeight
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import Layout, formats_in
from tinyvllm.quant.layouts import RowSource, TileWeight, convert_rows, pack_tiles, unpack_tiles
from tinyvllm.quant.random_rows import packable_width
from tinyvllm.runner import packing, weight_cache
from tinyvllm.runner.packing import place_tiles
from tinyvllm.weights.dummy import dummy_rows

CUDA, TILED = Placement("CUDA"), formats_in(Layout.TILES)
IN_FORMAT = packing.in_format


@pytest.fixture
def driver():
    with cuda_device(seed=1, multiprocessors=1) as driver:
        yield driver


@pytest.fixture(autouse=True)
def host_packs_nothing(monkeypatch):
    """The host neither packs nor converts the rows of products, but where a test says so."""
    for name in ("pack_tiles", "in_format"):
        monkeypatch.setattr(packing, name, lambda *_: pytest.fail("packed on the host"))


def tiles_of(weight: TileWeight) -> np.ndarray:
    assert isinstance(weight, TileWeight)
    return download(weight.tensor)


def check_model(model, tensors: dict[str, np.ndarray], format: str) -> None:
    """Every product has the tiles of its parts' rows, one part after the other. `tensors` under Hugging Face's names, exact in `format`."""
    products = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn_output": ("self_attn.o_proj",),
        "ffn_in": ("mlp.gate_proj", "mlp.up_proj"),
        "ffn_down": ("mlp.down_proj",),
    }
    for i, block in enumerate(model.blk):
        for field, parts in products.items():
            weight = getattr(block.weights, field).weight
            if isinstance(weight, TensorWeight):
                continue
            want = np.concatenate([tensors[f"model.layers.{i}.{part}.weight"] for part in parts])
            assert weight.format == format and want.shape == (weight.O, weight.I), field
            np.testing.assert_array_equal(unpack_tiles(format, tiles_of(weight), weight.O, weight.I), want, err_msg=f"{i} {field}")


# What the writer of test files can pack a model of 64 columns in; tests/emulator/test_packed_files.py has the other formats.
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_a_gguf_whose_rotary_pairs_move(tmp_path, driver, kind):
    """q and k are permuted, and fused with v; nothing else than the rows of the matrices is uploaded for them."""
    tensors = gguf_file(tmp_path / "model.gguf", kind)
    before, launches = driver.uploaded, len(driver.launched)
    loaded = load(tmp_path / "model.gguf", device="CUDA")
    check_model(loaded.model, tensors, kind)
    assert driver.launched[launches:] == ["pack_tiles"] * (4 * len(loaded.model.blk) + 1), "one launch a product, and the head"
    rows = sum(4 * (weight.O + 16) for weight in weights(loaded.model))
    assert loaded.loader.bytes <= driver.uploaded - before <= loaded.loader.bytes + rows + 16 * len(weights(loaded.model))


def weights(model) -> list[TileWeight]:
    found = [getattr(block.weights, field).weight for block in model.blk for field in ("qkv", "attn_output", "ffn_in", "ffn_down")]
    return [weight for weight in [*found, model.weights.head] if isinstance(weight, TileWeight)]


def test_parts_that_share_sixteen_rows(tmp_path, driver):
    """Eight rows of k, 104 of gate: the next part begins in the middle of a tile."""
    write(tmp_path, 8, 1, 104)
    on_host, on_gpu = (load(tmp_path, "bfloat16", device=device).model for device in ("CPU", "CUDA"))
    a, b = (model.blk[0].weights for model in (on_host, on_gpu))
    for field in ("qkv", "attn_output", "ffn_in"):
        weight = getattr(b, field).weight
        want = getattr(a, field).weight.dense().numpy()
        np.testing.assert_array_equal(unpack_tiles("BF16", tiles_of(weight), weight.O, weight.I), want)


@pytest.mark.parametrize("dtype, format", [("bfloat16", "BF16"), ("float16", "F16")])
def test_floats_are_converted_on_the_device(tmp_path, driver, dtype, format):
    tensors = write(tmp_path)
    loaded = load(tmp_path, dtype, device="CUDA")
    rounded = {name: convert_rows("F32", format, tensor.view(np.uint8)) for name, tensor in tensors.items() if tensor.ndim == 2}
    for name, field in (("mlp.down_proj", "ffn_down"), ("self_attn.o_proj", "attn_output")):
        weight = getattr(loaded.model.blk[0].weights, field).weight
        np.testing.assert_array_equal(tiles_of(weight), pack_tiles(format, rounded[f"model.layers.0.{name}.weight"]))


@pytest.mark.parametrize("kernels", ["", "pack_tiles=ref"])
def test_numbers_beyond_float16_are_refused_by_name(tmp_path, driver, monkeypatch, kernels):
    tensors = write(tmp_path)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name][3, 5] = 7e4
    save_file(tensors, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    monkeypatch.setenv("TINYVLLM_KERNELS", kernels)
    if kernels:
        monkeypatch.setattr(packing, "in_format", IN_FORMAT)
    with pytest.raises(ModelError, match="'blk.0.attn_k.weight' holds numbers beyond float16's range; use bfloat16 or float32"):
        load(tmp_path, "float16", device="CUDA")


@pytest.mark.parametrize("wanted", ["F16", "BF16"])
def test_parts_of_several_float_formats_are_made_one_on_the_host(driver, monkeypatch, wanted):
    monkeypatch.setattr(packing, "in_format", IN_FORMAT)
    rows = dummy_rows(Shaped("m", (32, 64)), "F32")
    parts = [RowSource.of(kind, convert_rows("F32", kind, rows)) for kind in ("F32", "F16", "BF16")]
    weight = place_tiles(CUDA, parts, 64, wanted)
    want = pack_tiles(wanted, np.concatenate([convert_rows(part.format, wanted, part.gathered()) for part in parts]))
    np.testing.assert_array_equal(tiles_of(weight), want)


def test_a_fused_tensor_of_the_file_is_cut_and_uploaded_once(driver):
    """Phi-3 has q, k and v in one tensor, gate and up in another."""
    before = driver.uploaded
    loaded = load(GOLDEN / "phi3", "bfloat16", device="CUDA")
    assert weights(loaded.model) and driver.uploaded - before <= 2 * loaded.loader.bytes * 1.1, "F32 in the file, bfloat16 on the device"


# --- any order of rows, in bounded memory


def matrix(format: str, O: int, I: int) -> RowSource:
    return RowSource.of(format, dummy_rows(Shaped("m", (O, I)), format))


class Shaped:
    """A recipe's name and shape."""

    def __init__(self, name: str, shape: tuple[int, ...]):
        self.name, self.shape = name, shape


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("format", TILED)
def test_staging_is_bounded(monkeypatch, driver, format, scattered):
    """A matrix of several staging buffers needs one more of them on the device than its tiles; also if its rows are in no order at all."""
    O, I, staging = 500, packable_width(format, 64), 4096
    source = matrix(format, O, I)
    if scattered:
        source = source.taken(np.random.default_rng(0).permutation(O))
    want = pack_tiles(format, source.gathered())
    staging = max(staging, 16 * source.row_bytes)
    monkeypatch.setattr(gpu_packing, "STAGING_BYTES", staging)
    weight = place_tiles(CUDA, [source], I, format)
    np.testing.assert_array_equal(tiles_of(weight), want)
    pieces = driver.launched.count("pack_tiles")
    assert source.nbytes / staging <= pieces <= 1 + 500 // 16 and driver.uploaded <= source.nbytes + 4 * (O + 16) + 16 * pieces
    table = 4 * 2 * (O + 20)
    assert want.nbytes < driver.peak <= want.nbytes + staging + table, "tiles, rows, places"


def test_memory_of_a_whole_model_is_its_weights_and_one_staging_buffer(tmp_path, monkeypatch, driver):
    monkeypatch.setattr(gpu_packing, "STAGING_BYTES", 1 << 15)
    write(tmp_path, intermediate=512)
    loaded = load(tmp_path, "bfloat16", device="CUDA")
    # tinygrad keeps buffers of all sizes in use, which are powers of two: of rows up to the limit, of places up to 2048
    assert loaded.loader.bytes < driver.peak <= loaded.loader.bytes + 2 * (1 << 15) + 4 * 2 * 2048


def test_copies_are_ahead_of_the_kernels_that_read_them(monkeypatch):
    """Whatever the stream has run when the next piece is copied, and with rows that are dropped right afterwards."""
    monkeypatch.setattr(gpu_packing, "STAGING_BYTES", 1 << 12)
    source = matrix("Q4_0", 300, 96)
    want = pack_tiles("Q4_0", source.gathered())
    for seed in range(4):
        with cuda_device(seed=seed, multiprocessors=1):
            mutable = RowSource("Q4_0", source.row_bytes, tuple(block.copy() for block in source.blocks), source.places)
            weight = place_tiles(CUDA, [mutable], 96, "Q4_0")
            for block in mutable.blocks:
                block[:] = 0
            np.testing.assert_array_equal(tiles_of(weight), want)


# --- dummy weights, the reference, the cache on disk


@pytest.mark.parametrize("format", TILED)
def test_dummy_weights_are_cut_from_the_pool_on_the_device(driver, format):
    """The numbers are those of every other device; a matrix costs the upload of the pool."""
    from tinyvllm.weights.dummy import _rows_pool, dummy_source

    recipe = Shaped("blk.0.ffn_down.weight", (400, packable_width(format, 3200)))
    before, launches = driver.uploaded, len(driver.launched)
    weight = place_tiles(CUDA, [dummy_source(recipe, format)], recipe.shape[1], format)
    assert driver.uploaded - before <= len(_rows_pool(format)) + weight.tensor.nbytes() / 400 + 4 * 420
    np.testing.assert_array_equal(tiles_of(weight), pack_tiles(format, dummy_rows(recipe, format)))
    assert driver.launched[launches:] == ["pack_tiles"]


def test_a_dummy_model_has_the_weights_of_other_devices(tiny_model, driver):
    on_gpu, on_cpu = (load(tiny_model, "auto", "Q4_0", dummy=True, device=device).model for device in ("CUDA", "CPU"))
    a, b = (model.blk[1].weights.qkv.weight for model in (on_gpu, on_cpu))
    np.testing.assert_array_equal(unpack_tiles("Q4_0", tiles_of(a), a.O, a.I), b.dense().numpy())


def test_the_definition_packs_where_the_kernel_is_not_wanted(driver, monkeypatch):
    source = matrix("Q8_0", 40, 64)
    before = len(driver.launched)
    monkeypatch.setenv("TINYVLLM_KERNELS", "pack_tiles=ref")
    monkeypatch.setattr(packing, "pack_tiles", pack_tiles)
    monkeypatch.setattr(packing, "in_format", IN_FORMAT)
    weight = place_tiles(CUDA, [source], 64, "Q8_0")
    np.testing.assert_array_equal(tiles_of(weight), pack_tiles("Q8_0", source.gathered()))
    assert "pack_tiles" not in driver.launched[before:]


def test_nothing_is_kept_on_disk(tmp_path, monkeypatch, driver):
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 0)
    write(tmp_path)
    loaded = load(tmp_path, "bfloat16", kept=tmp_path / "cache", device="CUDA")
    assert weights(loaded.model) and not loaded.loader.maps_all and not (tmp_path / "cache").exists()
