"""From records to tensors: every format to every dtype, transforms, what is mapped and for how long, and what is refused."""

import gc
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tinygrad import Device, Tensor, dtypes

from tinyvllm.errors import FormatError, ModelError
from tinyvllm.models.llama import halves_from_pairs
from tinyvllm.quant.codecs import bf16_to_f32, f32_to_bf16, pack, unpack
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.layouts import row_bytes
from tinyvllm.weights import convert, load, memory
from tinyvllm.weights.checkpoint import Checkpoint, TensorRecord
from tinyvllm.weights.dummy import dummy_tensors
from tinyvllm.weights.load import load_rows, load_tensors, locate_rows
from tinyvllm.weights.mapping import is_mapped, map_file

DTYPES = {"F32": dtypes.float32, "F16": dtypes.float16, "BF16": dtypes.bfloat16}


@dataclass(frozen=True)
class Weight:
    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    transform: Callable | None = None


def checkpoint(tmp_path, tensors, shift=0):
    """A checkpoint of {name: (format, shape, bytes)} in one mapped file; every tensor begins at a multiple of 64, plus `shift`."""
    body, places = bytearray(), {}
    for name, (_, _, raw) in tensors.items():
        body += bytes(-len(body) % 64 + shift)
        places[name] = (len(body), len(body) + len(raw))
        body += raw
    path = tmp_path / "weights.data"
    path.write_bytes(body)
    data = map_file(path, "test")
    records = {n: TensorRecord(n, kind, tuple(shape), data[slice(*places[n])]) for n, (kind, shape, _) in tensors.items()}
    return Checkpoint("safetensors", path, {}, records, tmp_path)


def stored(values, kind):
    """(format, shape, bytes) of float32 `values`."""
    return kind, values.shape, pack(kind, values.reshape(-1, FORMATS[kind].elements)).tobytes()


def bits(tensor):
    """The tensor's numbers, bfloat16 as uint16, without compiling a kernel."""
    raw = np.frombuffer(tensor.uop.buffer.as_memoryview(), np.uint8)
    kind = {dtypes.float32: np.float32, dtypes.float16: np.float16, dtypes.bfloat16: np.uint16}[tensor.dtype]
    return raw.view(kind).reshape(tensor.shape)


def address(tensor):
    return tensor.uop.buffer.options.external_ptr


def mapping_of(source):
    """A weak reference to the array over the mapped file; dead when nothing looks into the file any more."""
    return weakref.ref(next(iter(source.tensors.values())).data.base)


def wait_for(condition, seconds=120.0):
    """Memory is let go by a thread of its own, so what becomes true soon is waited for."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return condition()


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def expected(values, kind):
    return {"F32": values, "F16": values.astype(np.float16), "BF16": f32_to_bf16(values)}[kind]


@pytest.mark.parametrize("wanted", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_every_format_to_every_dtype(tmp_path, kind, wanted, monkeypatch):
    monkeypatch.setattr(convert, "_PIECE", 96)  # several pieces, the last one short
    values = normal(7, 64)
    source = checkpoint(tmp_path, {"a": stored(values, kind)})
    exact = unpack(kind, source.tensors["a"].data.reshape(-1, FORMATS[kind].nbytes)).reshape(7, 64)
    tensor = load_tensors(source, [Weight("w", ("a",), (7, 64))], "CPU", DTYPES[wanted])["w"]
    assert tensor.dtype == DTYPES[wanted] and tensor.shape == (7, 64) and tensor.device == "CPU"
    np.testing.assert_array_equal(bits(tensor), expected(exact, wanted))
    assert (address(tensor) == source.tensors["a"].data.ctypes.data) == (kind == wanted)


@pytest.mark.parametrize("kind,shift,mapped", [("F32", 0, True), ("F32", 8, False), ("F32", 1, False), ("F16", 8, True), ("F16", 2, False),
                                              ("BF16", 8, True), ("BF16", 3, False)])  # fmt: skip
def test_only_aligned_tensors_are_mapped(tmp_path, kind, shift, mapped):
    values = normal(5, 33)
    source = checkpoint(tmp_path, {"a": stored(values, kind)}, shift)
    tensor = load_tensors(source, [Weight("w", ("a",), (5, 33))], "CPU", DTYPES[kind])["w"]
    assert (address(tensor) == source.tensors["a"].data.ctypes.data) == mapped
    np.testing.assert_array_equal(bits(tensor), expected(values, kind))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("wanted", ["F32", "F16", "BF16"])
def test_transforms_move_elements_of_any_format(tmp_path, kind, wanted, monkeypatch):
    monkeypatch.setattr(convert, "_PIECE", 100)
    values = [normal(6, 32, seed=s) for s in (1, 2)]
    source = checkpoint(tmp_path, {"a": stored(values[0], kind), "b": stored(values[1], kind)})
    a, b = (unpack(kind, r.data.reshape(-1, FORMATS[kind].nbytes)).reshape(6, 32) for r in source.tensors.values())
    recipes = [
        Weight("transposed", ("a",), (32, 6), lambda x: x[0].T),
        Weight("rows", ("a",), (2, 32), lambda x: x[0][2:4]),
        Weight("stacked", ("a", "b"), (2, 6, 32), np.stack),
        Weight("pairs", ("b",), (6, 32), lambda x: x[0].reshape(3, 2, 32).swapaxes(0, 1).reshape(6, 32)),
    ]
    tensors = load_tensors(source, recipes, "CPU", DTYPES[wanted])
    for name, array in {"transposed": a.T, "rows": a[2:4], "stacked": np.stack([a, b]), "pairs": b[[0, 2, 4, 1, 3, 5]]}.items():
        np.testing.assert_array_equal(bits(tensors[name]), expected(np.ascontiguousarray(array), wanted), err_msg=name)


def test_sources_of_different_formats_are_joined_in_the_wanted_one(tmp_path):
    a, b = normal(2, 32), normal(2, 32, seed=1)
    source = checkpoint(tmp_path, {"a": stored(a, "F32"), "b": stored(b, "BF16")})
    tensor = load_tensors(source, [Weight("w", ("a", "b"), (4, 32), np.concatenate)], "CPU", dtypes.bfloat16)["w"]
    np.testing.assert_array_equal(bits(tensor), np.concatenate([f32_to_bf16(a), f32_to_bf16(b)]))


def test_a_slice_of_rows_stays_in_the_file_and_a_slice_of_memory_is_cut_off(tmp_path):
    values = normal(8, 64)
    source = checkpoint(tmp_path, {"plain": stored(values, "F16"), "packed": stored(values, "Q8_0")})
    recipes = [Weight(n, (n,), (2, 64), lambda x: x[0][4:6]) for n in ("plain", "packed")]
    tensors = load_tensors(source, recipes, "CPU", dtypes.float16)
    assert address(tensors["plain"]) == source.tensors["plain"].data.ctypes.data + 4 * 64 * 2
    assert address(tensors["packed"]) % 4096 == 0  # memory of its own, not the middle of the unpacked whole


@pytest.mark.parametrize("device", ["PYTHON", "CPU:1"])  # the second copies as CUDA does, from writable memory only
@pytest.mark.parametrize("wanted", ["F32", "F16", "BF16"])
def test_other_devices_get_a_copy(tmp_path, wanted, device, monkeypatch):
    for module in (load, memory):
        monkeypatch.setattr(module, "is_cpu", lambda name: name == "CPU")
    values = normal(4, 32)
    source = checkpoint(tmp_path, {"a": stored(values, "BF16"), "b": stored(values, wanted)}, shift=6)
    recipes = [Weight("w", ("a",), (4, 32)), Weight("t", ("b",), (32, 4), lambda x: x[0].T), Weight("s", ("b",), (4, 32))]
    tensors = load_tensors(source, recipes, device, DTYPES[wanted])
    assert all(t.device == device and t.dtype == DTYPES[wanted] for t in tensors.values())
    for name, array in {"w": bf16_to_f32(f32_to_bf16(values)), "t": np.ascontiguousarray(values.T), "s": values}.items():
        np.testing.assert_array_equal(bits(tensors[name]), expected(array, wanted), err_msg=name)
    mapping = mapping_of(source)
    del source
    assert wait_for(lambda: mapping() is None)  # nothing of the file is kept


def test_progress_counts_resident_bytes(tmp_path):
    source = checkpoint(tmp_path, {"a": stored(normal(4, 32), "F32"), "b": stored(normal(32), "F32")})
    calls = []
    recipes = [Weight("x", ("a",), (4, 32)), Weight("y", ("b",), (32,))]
    load_tensors(source, recipes, "CPU", dtypes.float16, lambda *args: calls.append(args))
    assert calls == [(256, 320, "x"), (320, 320, "y")]


def test_a_mapping_lives_as_long_as_what_uses_it(tmp_path):
    values = normal(64, 64)
    source = checkpoint(tmp_path, {"a": stored(values, "F32")})
    mapping, tensors = mapping_of(source), load_tensors(source, [Weight("w", ("a",), (64, 64))], "CPU", dtypes.float32)
    del source
    holder = Tensor.empty(64, 64)
    holder.replace(tensors["w"])  # as a model takes its weights: another Tensor object, the same buffer
    tensors.clear()
    gc.collect()
    assert not wait_for(lambda: mapping() is None, seconds=0.2)
    np.testing.assert_array_equal(holder.numpy(), values)
    view = holder[3:5]
    del holder
    assert not wait_for(lambda: mapping() is None, seconds=0.2)
    np.testing.assert_array_equal(view.numpy(), values[3:5])
    del view
    assert wait_for(lambda: mapping() is None)


def test_memory_of_its_own_is_given_back(tmp_path, monkeypatch):
    source = checkpoint(tmp_path, {"a": stored(normal(64, 64), "F16"), "q": stored(normal(64, 64), "Q8_0")})
    allocated = []
    original = convert.allocate
    monkeypatch.setattr(convert, "allocate", lambda n: (held := original(n), allocated.append(weakref.ref(held.base)))[0])
    recipes = [Weight("w", ("a",), (64, 64)), Weight("q", ("q",), (64, 64)), Weight("part", ("q",), (8, 64), lambda x: x[0][:8])]
    tensors = load_tensors(source, recipes, "CPU", dtypes.float32)
    gc.collect()
    assert len(allocated) == 4 and sum(a() is not None for a in allocated) == 3  # `part` was cut from the fourth, which is gone
    tensors.clear()
    assert wait_for(lambda: all(a() is None for a in allocated))


def test_memory_is_not_let_go_before_the_device_has_run(tmp_path, monkeypatch):
    source = checkpoint(tmp_path, {"a": stored(normal(8, 8), "F32")})
    mapping, log = mapping_of(source), []
    device = Device["CPU"]
    original = device.synchronize
    # tinygrad itself waits when it frees a buffer, but in a garbage cycle finalizers like ours come first: look at our thread alone.
    ours = lambda: threading.current_thread().name == "tinyvllm-release-weights"  # noqa: E731
    monkeypatch.setattr(device, "synchronize", lambda: (log.append(mapping() is not None) if ours() else None, original()))
    tensors = load_tensors(source, [Weight("w", ("a",), (8, 8))], "CPU", dtypes.float32)
    del source
    assert log == []
    tensors.clear()
    assert wait_for(lambda: mapping() is None)
    assert log == [True]


@pytest.mark.parametrize(
    "recipe,kind,message",
    [
        (Weight("w", ("nope",), (4, 32)), ModelError, "has no tensor 'nope', which the model needs"),
        (Weight("w", ("no", "nor", "a"), (4, 32), np.stack), ModelError, r"no tensor 'no' \(nor 1 others, such as 'nor'\)"),
        (Weight("w", ("a",), (32, 4)), ModelError, r"'w' must have the shape \[32, 4\] by the .*, but 'a' in .* has \[4, 32\]"),
        (Weight("w", ("a",), (3, 3), lambda x: x[0][:3]), ModelError, r"\[3, 3\] by .* but 'a' \[4, 32\] give \[3, 32\]"),
        (Weight("w", ("a",), (3, 3), lambda x: x[0].reshape(5, 5)), ModelError, r"cannot be made from 'a' \[4, 32\]: cannot reshape"),
        (Weight("w", ("a", "a"), (8, 32)), ModelError, "'w' has 2 sources and no transform"),
        (Weight("w", ("i",), (4,)), FormatError, "tensor 'i' in .* is stored as I64, which cannot be read; use a model in one of F32"),
        (Weight("w", ("f8",), (4,)), FormatError, "tensor 'f8' in .* is stored as F8_E4M3"),
        (Weight("w", ("big",), (2,)), ModelError, "'w' holds numbers beyond float16's range"),
    ],
)
def test_refuses_what_cannot_be_loaded(tmp_path, recipe, kind, message):
    tensors = {"a": stored(normal(4, 32), "F32"), "i": ("I64", (4,), bytes(32)), "f8": ("F8_E4M3", (4,), bytes(4)),
               "big": stored(np.array([1e5, 1], np.float32), "BF16")}  # fmt: skip
    with pytest.raises(kind, match=message) as caught:
        load_tensors(checkpoint(tmp_path, tensors), [recipe], "CPU", dtypes.float16)
    assert "\n" not in str(caught.value)


def test_refuses_a_dtype_that_no_model_has(tmp_path):
    with pytest.raises(ModelError, match="float32, float16 or bfloat16, got"):
        load_tensors(checkpoint(tmp_path, {"a": stored(normal(1), "F32")}), [], "CPU", dtypes.int8)


def test_infinities_that_are_stored_are_loaded(tmp_path):
    source = checkpoint(tmp_path, {"a": ("F32", (3,), struct.pack("<3f", float("inf"), float("nan"), -1.0))})
    tensor = load_tensors(source, [Weight("w", ("a",), (3,))], "CPU", dtypes.float16)["w"]
    np.testing.assert_array_equal(bits(tensor), np.array([np.inf, np.nan, -1], np.float16))


def numbers(kind, rows):
    """float32 [O, I] of rows of bytes."""
    return unpack(kind, rows.reshape(-1, FORMATS[kind].nbytes)).reshape(len(rows), -1)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("shift", [0, 1])
def test_rows_are_the_files_bytes(tmp_path, kind, shift):
    source = checkpoint(tmp_path, {"a": stored(normal(6, 64), kind)}, shift)
    whole = source.tensors["a"].data.reshape(6, -1)
    for transform, part in ((None, whole), (lambda x: x[0][2:4], whole[2:4])):
        name, rows = load_rows(source, Weight("w", ("a",), (len(part), 64), transform), dtypes.bfloat16)
        assert name == kind and rows.dtype == np.uint8 and rows.ctypes.data == part.ctypes.data and is_mapped(rows)
        np.testing.assert_array_equal(rows, part)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("transform", [None, halves_from_pairs(3, 8), lambda x: x[0][4:20], lambda x: x[0][::-1]])
def test_located_rows_are_the_loaded_ones(tmp_path, kind, transform):
    """Without a copy, and without what is before and after them, where whole rows move."""
    raw = np.random.default_rng(0).integers(0, 64, 24 * row_bytes(kind, 256), np.uint8)
    source = checkpoint(tmp_path, {"a": (kind, (24, 256), raw.tobytes())})
    recipe = Weight("w", ("a",), (24 if transform is None else len(transform([np.zeros((24, 2))])), 256), transform)
    rows = locate_rows(source, recipe, dtypes.bfloat16, ("Q8_0",))
    name, loaded = load_rows(source, recipe, dtypes.bfloat16, ("Q8_0",))
    assert rows.format == name == ("BF16" if kind == "Q6_K" else kind)
    np.testing.assert_array_equal(rows.gathered(), loaded)
    assert is_mapped(rows.blocks[0]) == (kind != "Q6_K") and rows.nbytes == loaded.nbytes


def test_located_rows_of_several_sources(tmp_path):
    source = checkpoint(tmp_path, {"a": stored(normal(2, 32), "Q8_0"), "b": stored(normal(3, 32, seed=1), "Q8_0")})
    recipe = Weight("w", ("a", "b"), (5, 32), lambda x: np.concatenate(x)[[4, 0, 2, 1, 3]])
    rows = locate_rows(source, recipe, dtypes.float16, ("Q8_0",))
    assert len(rows.blocks) == 2 and all(is_mapped(block) for block in rows.blocks)
    np.testing.assert_array_equal(rows.gathered(), load_rows(source, recipe, dtypes.float16)[1])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("rope_dim", [8, 4])
def test_rows_of_rotary_pairs_move_packed_as_they_do_unpacked(tmp_path, kind, rope_dim):
    transform = halves_from_pairs(3, rope_dim)
    source = checkpoint(tmp_path, {"a": stored(normal(24, 96), kind)})
    name, rows = load_rows(source, Weight("w", ("a",), (24, 96), transform), dtypes.float32)
    assert name == kind and not is_mapped(rows)
    plain = numbers(kind, source.tensors["a"].data.reshape(24, -1))
    np.testing.assert_array_equal(numbers(kind, rows), transform([plain]))
    assert not (numbers(kind, rows) == plain).all()


def test_rows_of_several_sources(tmp_path):
    a, b = normal(2, 32), normal(3, 32, seed=1)
    source = checkpoint(tmp_path, {"a": stored(a, "Q8_0"), "b": stored(b, "Q8_0"), "c": stored(b, "Q4_0")})
    recipe = Weight("w", ("a", "b"), (5, 32), np.concatenate)
    name, rows = load_rows(source, recipe, dtypes.float32)
    assert (name, rows.tobytes()) == ("Q8_0", b"".join(source.tensors[n].data.tobytes() for n in "ab"))
    name, rows = load_rows(source, Weight("w", ("a", "c"), (5, 32), np.concatenate), dtypes.float16)
    assert name == "F16"  # of two formats: unpacked
    exact = [numbers(k, source.tensors[n].data.reshape(-1, FORMATS[k].nbytes)) for n, k in (("a", "Q8_0"), ("c", "Q4_0"))]
    np.testing.assert_array_equal(rows.view(np.float16), np.concatenate(exact).astype(np.float16))


@pytest.mark.parametrize("kind,name", [("F32", "F32"), ("BF16", "BF16"), ("Q8_0", "F16"), ("Q4_0", "F16")])
@pytest.mark.parametrize("transform", [lambda x: x[0].T, lambda x: x[0].T[:, ::-1], lambda x: x[0].T.reshape(32, 32)])
def test_rows_of_a_transposed_matrix(tmp_path, kind, name, transform):
    """Square, so that the shape does not tell."""
    source = checkpoint(tmp_path, {"a": stored(normal(32, 32), kind)})
    found, rows = load_rows(source, Weight("w", ("a",), (32, 32), transform), dtypes.float16)
    exact = transform([numbers(kind, source.tensors["a"].data.reshape(32, -1))])
    assert found == name and rows.flags.c_contiguous
    np.testing.assert_array_equal(numbers(name, rows), exact.astype(np.float16).astype(np.float32) if name == "F16" else exact)


def test_rows_of_other_formats_are_unpacked(tmp_path):
    raw = np.random.default_rng(0).integers(0, 64, (4 * 210,), np.uint8)  # small scales: finite numbers
    source = checkpoint(tmp_path, {"a": ("Q6_K", (4, 256), raw.tobytes())})
    exact = numbers("Q6_K", raw.reshape(4, 210))
    name, rows = load_rows(source, Weight("w", ("a",), (4, 256)), dtypes.bfloat16, ("Q4_0",))
    assert (name, rows.shape) == ("BF16", (4, 512))
    np.testing.assert_array_equal(rows.view(np.uint16), f32_to_bf16(exact))
    name, rows = load_rows(source, Weight("w", ("a",), (4, 256), lambda x: x[0][::-1]), dtypes.float32, ("Q4_0",))
    assert name == "F32"
    np.testing.assert_array_equal(rows.view(np.float32), exact[::-1])


@pytest.mark.parametrize("kind,fits,beyond", [("F32", 65519.996, 65520.0), ("BF16", 65280.0, 65536.0)])
def test_rows_must_fit_float16(tmp_path, kind, fits, beyond):
    for largest in (fits, -fits, np.inf, np.nan):
        source = checkpoint(tmp_path, {"a": stored(np.array([[0, 1, largest]], np.float32), kind)})
        assert load_rows(source, Weight("w", ("a",), (1, 3)), dtypes.float16)[0] == kind
    for largest in (beyond, -beyond, 3e38):
        source = checkpoint(tmp_path, {"a": stored(np.array([[0, 1, largest]], np.float32), kind)})
        with pytest.raises(ModelError, match="'w' holds numbers beyond float16's range; use bfloat16 or float32"):
            load_rows(source, Weight("w", ("a",), (1, 3)), dtypes.float16)
        assert load_rows(source, Weight("w", ("a",), (1, 3)), dtypes.bfloat16)[0] == kind


@pytest.mark.parametrize(
    "recipe,kind,message",
    [
        (Weight("w", ("nope",), (4, 32)), ModelError, "has no tensor 'nope', which the model needs"),
        (Weight("w", ("a",), (32, 4)), ModelError, r"'w' must have the shape \[32, 4\] by the .*, but 'a' in .* has \[4, 32\]"),
        (Weight("w", ("a",), (3, 32), lambda x: x[0][:2]), ModelError, r"\[3, 32\] by .* but 'a' \[4, 32\] give \[2, 32\]"),
        (Weight("w", ("a",), (5, 32), lambda x: x[0].reshape(5, 5)), ModelError, r"cannot be made from 'a' \[4, 32\]: cannot reshape"),
        (Weight("w", ("a",), (128,), lambda x: x[0].reshape(-1)), ModelError, r"'w' has the shape \[128\], expected a matrix"),
        (Weight("w", ("i",), (4, 1)), FormatError, "tensor 'i' in .* is stored as I64, which cannot be read"),
    ],
)
def test_refuses_rows_that_cannot_be_had(tmp_path, recipe, kind, message):
    source = checkpoint(tmp_path, {"a": stored(normal(4, 32), "Q8_0"), "i": ("I64", (4, 1), bytes(32))})
    with pytest.raises(kind, match=message) as caught:
        load_rows(source, recipe, dtypes.float16)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wanted", ["F32", "F16", "BF16"])
def test_dummy_tensors(wanted):
    recipes = [Weight("big.weight", (), (1500, 1024)), Weight("norm.weight", (), (64,)), Weight("q.bias", (), (64,))]
    tensors = dummy_tensors(recipes, "CPU", DTYPES[wanted], seed=1)
    values = {n: bf16_to_f32(bits(t)) if wanted == "BF16" else bits(t).astype(np.float32) for n, t in tensors.items()}
    assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {r.name: (r.shape, DTYPES[wanted]) for r in recipes}
    assert abs(values["big.weight"].std() - 0.02) < 1e-3 and abs(values["big.weight"].mean()) < 1e-3
    assert (values["norm.weight"] == 1).all() and 0 < np.abs(values["q.bias"]).max() < 0.2
    assert len({row.tobytes() for row in values["big.weight"]}) == 1500  # no row repeats, though the numbers do
    again = dummy_tensors(recipes[::-1], "CPU", DTYPES[wanted], seed=1)
    other = dummy_tensors(recipes, "CPU", DTYPES[wanted], seed=2)
    assert all((bits(again[n]) == bits(tensors[n])).all() for n in tensors)
    assert not (bits(other["big.weight"]) == bits(tensors["big.weight"])).all()


def test_a_file_that_is_truncated_while_it_is_mapped(tmp_path):
    """In a process of its own: a read beyond the end is a SIGBUS, which the second half shows on purpose."""
    values = normal(64, 4096)
    np.save(tmp_path / "values.npy", values)
    code = f"""
import faulthandler, os, pathlib, sys
import numpy as np
from tests.weights.test_load import Weight, checkpoint, dtypes, load_rows, load_tensors, stored
from tinyvllm.errors import FormatError
path = pathlib.Path({str(tmp_path)!r})
source = checkpoint(path, {{"a": stored(np.load(path / "values.npy"), "F32")}})
os.truncate(path / "weights.data", 5000)
for load in (lambda r: load_rows(source, r, dtypes.float32), lambda r: load_tensors(source, [r], "CPU", dtypes.float16)):
    try:
        load(Weight("w", ("a",), (64, 4096)))
    except FormatError as error:
        print(error)
from tinyvllm import cli
cli.main(["--version"])
print("fault", flush=True)
source.tensors["a"].data.sum()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    said = done.stdout.splitlines()
    assert len([line for line in said if "was truncated while it was open: 1048576 bytes are needed, it has 5000" in line]) == 2, done
    assert said[-1] == "fault" and done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr and "Current thread" in done.stderr
