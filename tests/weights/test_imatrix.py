"""llama.cpp's importance matrices: both kinds of file read, hostile ones refused, and what a model takes from them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest

from tinyvllm.errors import FormatError, ModelError
from tinyvllm.weights.imatrix import read_imatrix

COLUMNS = np.arange(1, 9, dtype=np.float32)


@dataclass(frozen=True)
class Matrix:
    name: str
    sources: tuple[str, ...] = ("x",)
    shape: tuple[int, ...] = (4, 8)
    transform: None = None


def write_dat(path: Path, entries: dict[str, tuple[int, np.ndarray]], tail: bytes = struct.pack("<ii", 7, 4) + b"text") -> Path:
    """{name: (count, sums)}, as llama-imatrix wrote it before GGUF."""
    data = struct.pack("<i", len(entries))
    for name, (count, sums) in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", count, len(sums)) + sums.astype("<f4").tobytes()
    path.write_bytes(data + tail)
    return path


def write_gguf(path: Path, entries: dict[str, tuple[np.ndarray, np.ndarray]], kind: str = "imatrix") -> Path:
    """{name: (sums [matrices, columns], counts [matrices, 1])}."""
    writer = gguf.GGUFWriter(path, "x")
    writer.add_type(kind)
    for name, (sums, counts) in entries.items():
        writer.add_tensor(f"{name}.in_sum2", sums.astype(np.float32))
        writer.add_tensor(f"{name}.counts", counts.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_both_kinds_of_file_give_the_mean_of_the_squares(tmp_path):
    dat = read_imatrix(write_dat(tmp_path / "a.dat", {"blk.0.attn_q.weight": (4, 4 * COLUMNS), "blk.0.ffn_up.weight": (0, COLUMNS)}))
    entries = {"blk.0.attn_q.weight": (4 * COLUMNS[None], np.array([[4]])), "blk.0.ffn_up.weight": (COLUMNS[None], np.array([[0]]))}
    new = read_imatrix(write_gguf(tmp_path / "a.gguf", entries))
    for imatrix in (dat, new):
        np.testing.assert_array_equal(imatrix.columns(Matrix("blk.0.attn_q.weight")), COLUMNS)
        assert imatrix.columns(Matrix("blk.0.attn_output.weight")) is None
    np.testing.assert_array_equal(dat.columns(Matrix("blk.0.ffn_up.weight")), COLUMNS)
    np.testing.assert_array_equal(new.columns(Matrix("blk.0.ffn_up.weight")), np.ones(8))  # as llama.cpp: nothing was counted
    assert dat.digest != new.digest


def test_a_matrix_is_looked_up_by_its_own_name_its_source_and_what_reads_the_same_input(tmp_path):
    imatrix = read_imatrix(write_dat(tmp_path / "a.dat", {"blk.0.attn_qkv.weight": (1, COLUMNS), "file's own": (1, 2 * COLUMNS)}))
    np.testing.assert_array_equal(imatrix.columns(Matrix("blk.0.attn_k.weight")), COLUMNS)
    np.testing.assert_array_equal(imatrix.columns(Matrix("blk.0.attn_k.weight", ("file's own",))), 2 * COLUMNS)
    assert imatrix.columns(Matrix("blk.1.attn_k.weight")) is None


def test_another_number_of_columns_is_refused(tmp_path):
    imatrix = read_imatrix(write_dat(tmp_path / "a.dat", {"blk.0.attn_q.weight": (1, COLUMNS)}))
    with pytest.raises(ModelError, match="a.dat has 8 columns of 1 matrices for blk.0.attn_q.weight, which has 16 columns of one matrix"):
        imatrix.columns(Matrix("blk.0.attn_q.weight", shape=(4, 16)))
    experts = {"blk.0.attn_q.weight": (np.ones((2, 4)), np.ones((2, 1)))}
    with pytest.raises(ModelError, match="has 4 columns of 2 matrices for"):
        read_imatrix(write_gguf(tmp_path / "a.gguf", experts)).columns(Matrix("blk.0.attn_q.weight"))


@pytest.mark.parametrize("number", [-1.0, np.nan, np.inf])
def test_numbers_that_are_no_means_of_squares_are_refused(tmp_path, number):
    sums = COLUMNS.copy()
    sums[3] = number
    with pytest.raises(FormatError, match="is negative or not finite"):
        read_imatrix(write_dat(tmp_path / "a.dat", {"blk.0.attn_q.weight": (1, sums)})).columns(Matrix("blk.0.attn_q.weight"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\0\0", "truncated, or no imatrix: the number of entries at byte 0 needs 4 bytes, and 2 are left"),
        (struct.pack("<i", 0), "the number of entries is 0, expected 1 to 65536"),
        (struct.pack("<i", -5), "the number of entries is -5"),
        (struct.pack("<i", 1 << 30), "expected 1 to 65536"),
        (struct.pack("<ii", 1, 1 << 30), "the length of name 0 is 1073741824, expected 1 to 256"),
        (struct.pack("<ii", 1, 3) + b"abc" + struct.pack("<ii", 1, 1 << 30), "the sums of 'abc' at byte 19 needs 4294967296 bytes, and 0"),
        (struct.pack("<ii", 1, 3) + b"abc" + struct.pack("<ii", 1, 0), "the number of columns of 'abc' is 0"),
        (struct.pack("<ii", 2, 1) + 2 * (b"a" + struct.pack("<iifi", 1, 1, 1.0, 1)), "'a' appears twice"),
        (struct.pack("<ii", 1, 1) + b"a" + struct.pack("<iif", 1, 1, 1.0) + struct.pack("<ii", 1, 1) + b"xy", "1 bytes follow its last"),
    ],
)
def test_damaged_files_are_refused(tmp_path, data, message):
    path = tmp_path / "a.dat"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message):
        read_imatrix(path)


def test_every_truncation_is_refused(tmp_path):
    path = write_dat(tmp_path / "a.dat", {"a": (1, COLUMNS), "b": (2, COLUMNS)}, tail=b"")
    data = path.read_bytes()
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(FormatError):
            read_imatrix(path)


def test_other_gguf_files_are_refused(tmp_path):
    with pytest.raises(FormatError, match="general.type is 'model', expected 'imatrix': is it a model?"):
        read_imatrix(write_gguf(tmp_path / "a.gguf", {"a": (COLUMNS[None], np.ones((1, 1)))}, "model"))
    with pytest.raises(FormatError, match="it has no entries"):
        read_imatrix(write_gguf(tmp_path / "b.gguf", {}))
    with pytest.raises(ModelError, match="cannot read"):
        read_imatrix(tmp_path / "none.dat")
