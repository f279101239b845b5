"""The block formats against hand-computed vectors and against the gguf package."""

import struct

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from tests.quant.blocks import finite_blocks
from tinyvllm.errors import FormatError
from tinyvllm.quant.codecs import bf16_to_f32, f32_to_bf16, pack, readable_formats, unpack
from tinyvllm.quant.formats import (
    FLOATS,
    FORMATS,
    FORMATS_BY_TYPE_ID,
    GROUPED,
    QUANTIZATIONS,
    Activations,
    Layout,
    activations_of,
    formats_in,
    packed_in,
)
from tinyvllm.quant.random_rows import random_blocks

HALF = struct.Struct("<e")
READ = [name for name in readable_formats() if name not in FLOATS]
UNPACKED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "NVFP4", "Q1_0")  # at load
GGML = [name for name in READ if FORMATS[name].type_id is not None and name != "Q1_0"]  # Q1_0 the package knows by size alone


def block(*parts: bytes | float) -> np.ndarray:
    """Bytes as given, floats as float16."""
    joined = b"".join(HALF.pack(p) if isinstance(p, float) else p for p in parts)
    return np.frombuffer(joined, np.uint8)[None]


def test_table_agrees_with_ggml():
    members = gguf.GGMLQuantizationType.__members__  # an old gguf lacks the newest
    known = [f for f in FORMATS.values() if f.type_id is not None and (f.name in readable_formats() or f.name in members)]
    for f in known:
        kind = gguf.GGMLQuantizationType[f.name]
        assert (f.type_id, f.elements, f.nbytes) == (kind.value, *gguf.GGML_QUANT_SIZES[kind])
    assert len(FORMATS_BY_TYPE_ID) == sum(f.type_id is not None for f in FORMATS.values())
    assert set(readable_formats()) == {*FLOATS, *packed_in(Layout.PANELS), *UNPACKED}


def test_lists_are_derived_from_the_table():
    assert FLOATS == ("F32", "F16", "BF16")
    assert set(QUANTIZATIONS) == {name for name in packed_in(Layout.PANELS) if FORMATS[name].type_id is not None}
    assert packed_in(Layout.PANELS) == (
        "Q8_0",
        "Q4_0",
        "Q5_0",
        "Q4_1",
        "Q5_1",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
        "IQ4_XS",
        "MXFP4",
        *GROUPED,
        "FP8_G128",
        "MXFP8",
        "NVFP4_G128",
        "NF4",
        "BNB_FP4",
    )
    assert len(GROUPED) == 18 and GROUPED[:4] == ("INT2_G128", "INT2_G64", "INT2_G32", "INT3_G128")
    assert formats_in(Layout.PANELS) == FLOATS + packed_in(Layout.PANELS)
    assert formats_in(Layout.TILES)[:4] == ("F16", "BF16", "Q8_0", "Q4_0")
    assert formats_in(Layout.TILES) == tuple(name for name in formats_in(Layout.PANELS) if name != "F32")
    assert packed_in(Layout.ROWS) == packed_in(Layout.TILES) == packed_in(Layout.PANELS)
    assert activations_of("BF16", Layout.TILES) is Activations.BFLOAT16 and activations_of("Q4_0", Layout.PANELS) is Activations.INT8
    assert activations_of("Q4_0", Layout.ROWS) is activations_of("F16", Layout.PANELS) is Activations.FLOAT32


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_rows_of_the_table_are_consistent(format):
    """Fields fill a block, and what has kernels has fields and a reader, what is offered for packing a writer."""
    if format.fields:
        assert sum(field.nbytes for field in format.fields) in (format.nbytes, 2 * format.nbytes)
    if format.layouts:
        assert format.fields and format.name in readable_formats()
    if format.is_float or format.quantization:
        zeros = np.zeros((2, format.elements), np.float32)
        np.testing.assert_array_equal(unpack(format.name, pack(format.name, zeros)), zeros)


@pytest.mark.parametrize("name", GGML)
def test_unpack_agrees_with_gguf(name):
    data = finite_blocks(name, 200, 0.05)
    expected = dequantize(data, gguf.GGMLQuantizationType[name])
    got = unpack(name, data)
    assert got.dtype == np.float32 and got.shape == (200, FORMATS[name].elements)
    np.testing.assert_array_equal(got, expected.reshape(got.shape))


@pytest.mark.parametrize("name", READ)
def test_unpack_takes_a_strided_view(name):
    data = finite_blocks(name, 8)
    np.testing.assert_array_equal(unpack(name, data[::2]), unpack(name, data)[::2])
    assert unpack(name, data[:0]).shape == (0, FORMATS[name].elements)


def test_hand_computed_blocks_of_32():
    nibbles = bytes([0x21] + [0x88] * 15)  # element 0 is 1, element 16 is 2, the others 8
    q4_0 = unpack("Q4_0", block(0.5, nibbles))[0]
    assert (q4_0[0], q4_0[16], q4_0[1]) == (0.5 * (1 - 8), 0.5 * (2 - 8), 0.0)
    q4_1 = unpack("Q4_1", block(0.5, -3.0, nibbles))[0]
    assert (q4_1[0], q4_1[16], q4_1[1]) == (0.5 - 3, 1.0 - 3, 4.0 - 3)
    fifth = (1 << 16 | 1 << 31).to_bytes(4, "little")  # elements 16 and 31
    q5_0 = unpack("Q5_0", block(2.0, fifth, nibbles))[0]
    assert (q5_0[0], q5_0[16], q5_0[31], q5_0[1]) == (2 * (1 - 16), 2 * (18 - 16), 2 * (24 - 16), 2 * (8 - 16))
    q5_1 = unpack("Q5_1", block(2.0, 1.0, fifth, nibbles))[0]
    assert (q5_1[0], q5_1[16], q5_1[31], q5_1[1]) == (3, 37, 49, 17)
    q8_0 = unpack("Q8_0", block(0.25, bytes([1, 255, 128, 127]) + bytes(28)))[0]
    assert q8_0[:5].tolist() == [0.25, -0.25, -32.0, 31.75, 0.0]


def test_hand_computed_bits():
    """Q1_0: one bit a weight, for the scale or its negative."""
    q1 = unpack("Q1_0", block(0.5, bytes([0b101, 0x80] + [0] * 14)))[0]
    assert q1[[0, 1, 2, 15]].tolist() == [0.5, -0.5, 0.5, 0.5] and q1.sum() == 0.5 * (3 - 125)


def test_hand_computed_k_quants():
    q2 = unpack("Q2_K", block(bytes([0x32] + [0x10] * 15), bytes([0b11100100] + [0] * 63), 2.0, 1.0))[0]
    assert (q2[0], q2[1], q2[16]) == (-3.0, -3.0, -1.0)  # scale 2*2, minimum 1*3, quant 0; then minimum 1
    assert (q2[32], q2[64], q2[96]) == (-1.0, -1.0, -1.0)  # quants 1..3 there, but their scales are 0
    q3 = unpack("Q3_K", block(bytes([1] + [0] * 31), bytes([3] + [0] * 63), bytes([0x01] + [0] * 7 + [0b10] + [0] * 3), 0.5))[0]
    assert (q3[0], q3[1]) == (0.5 * (33 - 32) * 3, 0.5 * 1 * -4)  # third bit set: no offset; clear: minus 4
    assert q3[16] == 0.5 * -32 * -4  # scale 1 is 0 - 32
    q4 = unpack("Q4_K", block(1.0, 0.5, bytes([0x42, 1, 0, 0, 0x83, 0, 0, 0, 0x75, 0, 0, 0]), bytes([0x9A] + [0] * 127)))[0]
    assert (q4[0], q4[1], q4[32]) == (2 * 10 - 1.5, -1.5, 9.0)  # scale 2, minimum 3; sub-block 1: scale 1, minimum 0
    assert q4[128] == -0.5 * (7 | 2 << 4)  # minimum 4: low half 7, high bits 2
    q5 = unpack("Q5_K", block(1.0, 0.0, bytes([2, 1] + [0] * 10), bytes([0b01] + [0] * 31), bytes([0x9A] + [0] * 127)))[0]
    assert (q5[0], q5[1], q5[32]) == (2 * (10 + 16), 0.0, 9.0)
    q6 = unpack("Q6_K", block(bytes([0x21] + [0] * 127), bytes([0b10] + [0] * 63), bytes([255, 2] + [1] * 14), 0.5))[0]
    assert (q6[0], q6[1], q6[16], q6[64]) == (-0.5 * (33 - 32), 0.5 * 32, -32.0, 0.5 * (2 - 32))


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].is_rounded_quickly])
def test_pack_agrees_with_gguf(name):
    rng = np.random.default_rng(3)
    values = rng.normal(0, 1, (500, max(FORMATS[name].elements, 4))).astype(np.float32)
    values[0], values[1, :3] = 0, (-4.0, 4.0, 2.0)
    got = pack(name, values)
    np.testing.assert_array_equal(got, quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8).reshape(got.shape))


def test_bf16_rounds_to_nearest_even():
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF800000, 0x80000001], np.uint32)
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFF80, 0x8000]
    assert f32_to_bf16(bits.view(np.float32)).tolist() == expected
    nans = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(bf16_to_f32(f32_to_bf16(nans))).all()
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    back = f32_to_bf16(bf16_to_f32(every))
    numbers = ~np.isnan(bf16_to_f32(every))
    assert (back[numbers] == every[numbers]).all()


@pytest.mark.filterwarnings("error")
def test_infinite_scales_are_kept_without_a_warning():
    data = random_blocks("Q4_0", 2)
    data[0, :2] = block(float("inf"))[0]
    assert not np.isfinite(unpack("Q4_0", data)[0]).any()


def test_a_format_without_a_reader_is_named():
    with pytest.raises(FormatError, match="Q8_K cannot be unpacked; readable are "):
        unpack("Q8_K", np.zeros((1, 292), np.uint8))
    with pytest.raises(FormatError, match="IQ2_XS cannot be packed; writable are F32, F16, BF16, Q8_0"):
        pack("IQ2_XS", np.zeros((1, 256), np.float32))
    with pytest.raises(FormatError, match="Q9_9"):
        unpack("Q9_9", np.zeros((1, 74), np.uint8))
