import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from tinyvllm.errors import FormatError, ModelError
from tinyvllm.foreign import MAX_JSON_VALUES, MAX_TENSORS
from tinyvllm.weights.safetensors import MAX_HEADER, read_safetensors, read_sharded


def write(path, header, body=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


def test_reads_what_the_safetensors_package_writes(file):
    rng = np.random.default_rng(0)
    arrays = {"a": rng.normal(size=(3, 5)).astype(np.float32), "b.c": rng.normal(size=7).astype(np.float16), "s": np.array(3, np.int64),
              "e": np.zeros((0, 4), np.float32)}  # fmt: skip
    save_file(arrays, file, metadata={"format": "pt"})
    tensors = read_safetensors(file)
    assert {n: (t.name, t.format, t.shape) for n, t in tensors.items()} == {
        "a": ("a", "F32", (3, 5)), "b.c": ("b.c", "F16", (7,)), "s": ("s", "I64", ()), "e": ("e", "F32", (0, 4))}  # fmt: skip
    for name, array in arrays.items():
        assert tensors[name].data.tobytes() == array.tobytes()
        assert not tensors[name].data.flags.writeable and tensors[name].data.base is not None


@pytest.mark.parametrize(
    "header,body,message",
    [
        ({"a": entry()}, b"\0" * 7, "is truncated: its tensors need 8 bytes, it has 7"),
        ({"a": entry()}, b"\0" * 9, "has 1 bytes beyond its last tensor"),
        ({"a": entry(offsets=(0, 4))}, b"\0" * 8, r"tensor 'a', F32 \[2\], does not take the 4 bytes"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12, "tensor 'b' overlaps its neighbour at byte 4"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, b"\0" * 20, "tensor 'b' follows a hole at byte 12"),
        ({"a": entry(offsets=(8, 0))}, b"\0" * 8, "impossible offsets"),
        ({"a": entry(offsets=(0, 2**70))}, b"\0" * 8, "impossible offsets"),
        ({"a": entry(offsets=(True, 8))}, b"\0" * 8, "impossible offsets"),
        ({"a": entry(shape=(-2,))}, b"\0" * 8, "impossible shape"),
        ({"a": entry(shape=(2.0,))}, b"\0" * 8, "impossible shape"),
        ({"a": entry(shape=(1,) * 17)}, b"\0" * 8, "impossible shape"),
        ({"a": entry(dtype="F7")}, b"\0" * 8, "unknown dtype 'F7'"),
        ({"a": entry(dtype=["F32"])}, b"\0" * 8, "unknown dtype"),
        ({"a": {"dtype": "F32"}}, b"", "needs exactly dtype, shape and data_offsets"),
        ({"a": 3}, b"", "needs exactly dtype"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ must map strings"),
        (b'{"a": 1, "a": 2}', b"", "key 'a' appears twice"),
        (b"[]", b"", "header that is not an object but list"),
        (b"[" * 100_000, b"", "damaged header"),
        (b"\xff\xfe{}", b"", "damaged header"),
        (b"{", b"", "damaged header"),
    ],
)
def test_refuses_a_damaged_header(file, header, body, message):
    with pytest.raises(FormatError, match=message) as caught:
        read_safetensors(write(file, header, body))
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("length,message", [(2**60, "more than the"), (MAX_HEADER + 1, "more than the"), (100, "is truncated: its header")])
def test_refuses_a_header_length_beyond_the_file(file, length, message):
    with pytest.raises(FormatError, match=message):
        read_safetensors(write(file, {}, length=length))


def test_refuses_files_that_are_no_files(file, tmp_path):
    with pytest.raises(ModelError, match="cannot read .*: No such file"):
        read_safetensors(file)
    with pytest.raises(ModelError, match="cannot read .*: Is a directory"):
        read_safetensors(tmp_path)
    file.write_bytes(b"")
    with pytest.raises(FormatError, match="is empty"):
        read_safetensors(file)
    file.write_bytes(b"1234567")
    with pytest.raises(FormatError, match="too short for a header"):
        read_safetensors(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(FormatError, match="git-lfs pointer"):
        read_safetensors(file)


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "m-1.safetensors")
    save_file({"b": np.zeros(3, np.float16), "c": np.ones(1, np.float16)}, tmp_path / "m-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-2.safetensors"}}))
    return index


def test_reads_shards(sharded):
    tensors = read_sharded(sharded)
    assert {n: t.shape for n, t in tensors.items()} == {"a": (2,), "b": (3,), "c": (1,)}


def test_refuses_a_missing_shard(sharded):
    (sharded.parent / "m-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"index.json names m-2.safetensors, which is not in"):
        read_sharded(sharded)


def test_refuses_a_tensor_that_is_not_in_its_shard(sharded):
    save_file({"b": np.zeros(3, np.float16)}, sharded.parent / "m-2.safetensors")
    with pytest.raises(FormatError, match="says that 'c' is in m-2.safetensors, but it is not"):
        read_sharded(sharded)


def test_refuses_a_tensor_in_two_shards(sharded):
    save_file({"a": np.zeros(3, np.float16), "b": np.zeros(3, np.float16), "c": np.ones(1, np.float16)}, sharded.parent / "m-2.safetensors")
    with pytest.raises(FormatError, match="tensor 'a' is in two shards, the second m-2.safetensors"):
        read_sharded(sharded)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../x.safetensors"}}',
                                  '{"weight_map": {"a": "/etc/x.safetensors"}}', '{"weight_map": {"a": "x.bin"}}', "{"])  # fmt: skip
def test_refuses_a_damaged_index(sharded, text):
    sharded.write_text(text)
    with pytest.raises(FormatError, match="index.json"):
        read_sharded(sharded)


def test_refuses_too_many_tensors_and_values_before_they_are_looked_at(file):
    many = ",".join(f'"{i}":0' for i in range(MAX_TENSORS + 1)).encode()
    with pytest.raises(FormatError, match=f"has {MAX_TENSORS + 1} tensors, and at most {MAX_TENSORS} are read; split it into shards"):
        read_safetensors(write(file, b"{%s}" % many))
    with pytest.raises(FormatError, match=f"at most {MAX_JSON_VALUES} are read"):
        read_safetensors(write(file, b'{"a":[%s[]]}' % (b"[]," * MAX_JSON_VALUES)))
