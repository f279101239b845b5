"""Panels: the numpy definition against the formats' own, tinygrad's reading of it, and the kernel that writes the same bytes."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from tinygrad import GlobalCounters, Tensor, dtypes

from tests.in_turn import in_turn
from tests.kernels.calling import aligned, call
from tests.ops.inputs import device_bytes
from tests.quant.blocks import relative_error
from tinyvllm.backends.cpu.toolchain import cpu_features
from tinyvllm.backends.kernel import Kernel
from tinyvllm.errors import ModelError
from tinyvllm.quant.codecs import pack, unpack
from tinyvllm.quant.formats import FLOATS, FORMATS, QUANTIZATIONS, Layout, formats_in
from tinyvllm.quant.layouts import (
    PackedWeight,
    RowWeight,
    StoredWeight,
    TileWeight,
    convert_rows,
    pack_panels,
    pack_tiles,
    packable,
    panel_bytes,
    quantize_rows,
    row_bytes,
    unpack_panels,
    unpack_tiles,
)
from tinyvllm.quant.random_rows import packable_width, random_blocks, random_rows
from tinyvllm.weights.mapping import allocate
from tinyvllm.weights.memory import adopt

TARGETS = ("plain", *(["avx2"] if {"avx2", "fma", "f16c"} <= cpu_features() else []), *(["avx512"] if "avx512f" in cpu_features() else []))
PACKED = formats_in(Layout.PANELS)
SHAPES = [(1, 32), (17, 64), (48, 96), (17, 2048)]
CONVERSIONS = [(s, f) for s in FLOATS for f in FLOATS if s != f]


@functools.cache
def file_rows(format: str, O: int, I: int) -> np.ndarray:
    """uint8 [O, row_bytes] of normal numbers, and some that round by a tie, are subnormal in float16, or are NaN."""
    if not FORMATS[format].is_rounded_quickly:
        return random_rows(format, O, I)
    values = np.random.default_rng(O * I).normal(0, 1, (O, I)).astype(np.float32)
    values[0, :4] = 1 + 2**-9, 1 + 3 * 2**-9, 3e-6, -0.0
    if format in FLOATS:
        values[-1, -3:] = np.inf, -np.inf, np.nan
    return pack(format, values.reshape(-1, FORMATS[format].elements)).reshape(O, -1)


def exact(format: str, rows: np.ndarray) -> np.ndarray:
    return unpack(format, rows.reshape(-1, FORMATS[format].nbytes)).reshape(len(rows), -1)


def fields_of(format: str) -> set[str]:
    return {field.name for field in FORMATS[format].fields}


def tensor(data: np.ndarray) -> Tensor:
    memory = allocate(data.size)
    memory[:] = data.reshape(-1)
    return adopt(memory, "CPU", dtypes.uint8)


@pytest.mark.parametrize("O,I", SHAPES)
@pytest.mark.parametrize("format", PACKED)
def test_panels_hold_the_rows_numbers(format, O, I):
    I = packable_width(format, I)
    rows = file_rows(format, O, I)
    panels = pack_panels(format, rows)
    assert rows.shape[1] == row_bytes(format, I) and panels.shape == (panel_bytes(format, O, I),)
    np.testing.assert_array_equal(unpack_panels(format, panels, O, I), exact(format, rows))
    padding = -O % 16  # rows of zero bytes, which unpack to zeros of either sign, or to those of the smallest exponent
    assert (np.abs(unpack_panels(format, panels, O + padding, I)[O:]) < 1e-37).all()


def test_panels_byte_for_byte():
    """The layouts spelled out for one panel of 64 columns, element by element."""
    O, I, k, r = 16, 64, 45, 3
    panel = {f: pack_panels(f, file_rows(f, O, I)) for f in (*FLOATS, "Q8_0", "Q4_0")}
    for format in ("F32", "F16"):
        number = {"F32": np.float32, "F16": np.float16}[format]
        assert panel[format].view(number).reshape(I, 16)[k, r] == file_rows(format, O, I).view(number)[r, k]
    assert panel["BF16"].view(np.uint16).reshape(I // 2, 16, 2)[k // 2, r, k % 2] == file_rows("BF16", O, I).view(np.uint16)[r, k]
    k -= 32  # element 13 of the second block
    for format, size in (("Q8_0", 544), ("Q4_0", 288)):
        block, row = panel[format].reshape(2, size)[1], file_rows(format, O, I)[r, row_bytes(format, I) // 2 :]
        assert block[:32].view(np.float16)[r] == row[:2].view(np.float16)[0]
        quants = block[32:].reshape(-1, 16, 4)
        if format == "Q8_0":
            assert int(quants[k // 4, r, k % 4]) - 128 == row[2:].view(np.int8)[k]
        else:
            assert quants[k // 4, r, k % 4] == row[2 + k]  # elements 13 and 29


@pytest.mark.parametrize("O,I", [pytest.param(1, 32, marks=pytest.mark.long), (17, 96), pytest.param(48, 64, marks=pytest.mark.long)])
@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("kind", [PackedWeight, RowWeight])
def test_tinygrad_reads_the_exact_numbers(kind, format, O, I):
    I = packable_width(format, I)
    rows = file_rows(format, O, I)
    weight = kind(tensor(pack_panels(format, rows) if kind is PackedWeight else rows), format, O, I)
    want = exact(format, rows)
    tolerance = 1e-6 * np.abs(want).max() if "offset" in fields_of(format) or "minimum" in fields_of(format) else 0  # a fused subtraction
    np.testing.assert_allclose(weight.dense().numpy(), want, atol=tolerance, rtol=0)
    ids = np.array([O - 1, 0, O // 2, O - 1], np.int32)
    np.testing.assert_allclose(weight.rows(Tensor(ids)).numpy(), want[ids], atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", [PackedWeight, RowWeight])
@pytest.mark.parametrize("format", PACKED)
def test_reading_a_few_rows_does_not_unpack_the_matrix(kind, format):
    O, I = 4096, 256
    weight = kind(tensor(np.zeros(panel_bytes(format, O, I), np.uint8)), format, O, I)
    ids = Tensor([5, 4000]).realize()
    GlobalCounters.reset()
    weight.rows(ids).realize()
    assert GlobalCounters.global_mem < O * I  # bytes read and written; writing the whole matrix unpacked would be 4 O I


# --- the kernel


def packed_by_kernel(target: str, source: str, format: str, rows: np.ndarray, I: int, threads: int, shift: int = 0) -> np.ndarray:
    """The panels of `rows`, which begin `shift` bytes after an aligned address, written between two panels that must not change."""
    kernel = Kernel("pack", "cpu", target, (("SOURCE", source), ("FORMAT", format)), 1, 2)
    room = aligned((rows.size + shift,), np.uint8)
    room[shift:] = rows.reshape(-1)
    count, panel = -(-len(rows) // 16), panel_bytes(format, 16, I)
    out = aligned(((count + 2) * panel,), np.uint8)
    call(kernel, out, room[shift:], np.array([1, 1 + count, len(rows), I], np.int32), threads=threads)
    assert (out[:panel] == 0xFF).all() and (out[-panel:] == 0xFF).all()
    return out[panel:-panel]


@pytest.mark.parametrize(("format", "target"), in_turn(PACKED, TARGETS))
@pytest.mark.parametrize("threads,shift", [(1, 0), (2, 1), (3, 10)])
def test_kernel_writes_the_same_bytes(target, format, threads, shift):
    for O, I in SHAPES:
        I = packable_width(format, I)
        rows = file_rows(format, O, I)
        np.testing.assert_array_equal(packed_by_kernel(target, format, format, rows, I, threads, shift), pack_panels(format, rows))


@pytest.mark.parametrize(("source", "format", "target"), in_turn(CONVERSIONS, TARGETS))
def test_kernel_converts_as_numpy_does(target, source, format):
    for O, I in SHAPES:
        rows = file_rows(source, O, I)
        whole = O + -O % 16  # the zeros that complete the last panel, too; as numbers, since a NaN's payload may differ
        got = unpack_panels(format, packed_by_kernel(target, source, format, rows, I, threads=2, shift=3), whole, I)
        want = unpack_panels(format, pack_panels(format, convert_rows(source, format, rows)), whole, I)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_kernel_stacks_matrices_by_a_call_each():
    I = 64
    parts = [file_rows("Q8_0", O, I) for O in (32, 16, 17)]
    kernel = Kernel("pack", "cpu", "plain", (("SOURCE", "Q8_0"), ("FORMAT", "Q8_0")), 1, 2)
    out, first = aligned((panel_bytes("Q8_0", 65, I),), np.uint8), 0
    for rows in parts:
        last = first + -(-len(rows) // 16)
        call(kernel, out, aligned(rows.shape, np.uint8, rows), np.array([first, last, len(rows), I], np.int32))
        first = last
    np.testing.assert_array_equal(out, pack_panels("Q8_0", np.concatenate(parts)))


# --- conversions, and what is refused


def test_convert_rows_rounds_to_nearest_and_keeps_infinities():
    values = np.array([[1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, -1e30, np.inf]], np.float32)
    half = convert_rows("F32", "F16", values.view(np.uint8)).view(np.float16)
    np.testing.assert_array_equal(half, np.array([[1, 1 + 2**-9, 65504, np.inf, -np.inf, np.inf]], np.float16))
    assert convert_rows("F32", "F32", values.view(np.uint8)).ctypes.data == values.ctypes.data
    with pytest.raises(ModelError, match="between F32, F16, BF16, not from Q8_0 to F16"):
        convert_rows("Q8_0", "F16", file_rows("Q8_0", 1, 32))


@pytest.mark.parametrize("format", QUANTIZATIONS)
def test_quantize_rows_is_the_formats_quantizer(format):
    values = np.random.default_rng(0).normal(0, 1, (70, 1024)).astype(np.float32)  # two pieces
    rows = quantize_rows(format, values)
    np.testing.assert_array_equal(rows, pack(format, values.reshape(-1, FORMATS[format].elements)).reshape(70, -1))
    assert relative_error(format, exact(format, rows), values) < 1


def test_unpackable_shapes_and_formats_have_a_reason():
    assert all(packable(format, 256) is None for format in PACKED)
    assert packable("Q6_K", 64) == "the kernels read 256 columns at a time, and 64 is not a multiple of that"
    assert packable("TQ1_0", 256) == f"there are no panels of TQ1_0, only of {', '.join(PACKED)}"
    assert packable("BF16", 48) == "the kernels read 32 columns at a time, and 48 is not a multiple of that"
    assert packable("F32", 0) is not None
    with pytest.raises(ModelError, match="a F16 matrix of 33 columns cannot be packed: the kernels read 32"):
        panel_bytes("F16", 16, 33)
    with pytest.raises(ModelError, match=f"quantized to {' or '.join(QUANTIZATIONS)}, not to IQ2_S"):
        quantize_rows("IQ2_S", np.zeros((1, 256), np.float32))


DESCRIBED = [format for format in FORMATS.values() if format.fields and not format.is_float]


@pytest.mark.parametrize("format", [format.name for format in DESCRIBED])
def test_the_fields_of_a_format_give_its_values(format):
    """Of random bytes with finite scales, in each layout; formats without kernels too, so that a new one begins with a tested reference."""
    known, O, blocks = FORMATS[format], 19, 2
    I = blocks * known.elements
    rows = random_blocks(format, O * blocks).reshape(O, -1)
    want = exact(format, rows)
    for weight in (
        RowWeight(device_bytes(rows), format, O, I),
        PackedWeight(device_bytes(pack_panels(format, rows)), format, O, I),
        TileWeight(device_bytes(pack_tiles(format, rows)), format, O, I),
    ):
        np.testing.assert_allclose(weight.dense().numpy(), want, atol=1e-6 * np.abs(want).max())
    np.testing.assert_array_equal(unpack_panels(format, pack_panels(format, rows), O, I), want)
    np.testing.assert_array_equal(unpack_tiles(format, pack_tiles(format, rows), O, I), want)


def test_q4_k_rows_are_read_as_stored():
    """Of random bytes with finite scales."""
    blocks = np.random.default_rng(0).integers(0, 256, (6, 144), np.uint8)
    blocks[:, [1, 3]] &= 0xBF
    weight = RowWeight(device_bytes(blocks), "Q4_K", 3, 512)
    want = unpack("Q4_K", blocks).reshape(3, 512)
    np.testing.assert_allclose(weight.dense().numpy(), want, atol=1e-6 * np.abs(want).max())
    both = StoredWeight((weight, RowWeight(device_bytes(blocks[:2]), "Q4_K", 1, 512)))
    assert (both.O, both.I, both.format) == (4, 512, "Q4_K")
    np.testing.assert_array_equal(both.dense().numpy()[3], weight.dense().numpy()[0])
