"""Damaged files: whatever the bytes, the two readers answer with tensors or with one FormatError line, soon and in little memory."""

import json
import random
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf.quants import quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests.mutations import mutate_bytes
from tinyvllm.errors import FormatError, ModelError
from tinyvllm.weights.gguf import read_gguf
from tinyvllm.weights.safetensors import read_safetensors, read_sharded

MUTATIONS = 2000
# Values that sit on the edges of length checks.


def whole_safetensors(path):
    save_file({"a.weight": np.ones((4, 8), np.float32), "b": np.ones(3, np.float16), "c": np.zeros((), np.int64)}, path, {"k": "v"})
    return path.read_bytes()


def whole_gguf(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokens", ["a", "bc", "def"])
    writer.add_array("scores", [0.5, 1.5, 2.5])
    writer.add_bool("flag", True)
    writer.add_tensor("a.weight", np.ones((4, 32), np.float32))
    quantized = quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("q", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


READERS = {"safetensors": (whole_safetensors, read_safetensors), "gguf": (whole_gguf, read_gguf)}


def check(reader, path, data):
    """True if the bytes were accepted; then every tensor must be inside the file and as long as declared."""
    path.write_bytes(data)
    try:
        result = reader(path)
    except FormatError as error:
        assert "\n" not in str(error) and len(str(error)) <= 300
        return False
    tensors = result[1] if isinstance(result, tuple) else result
    assert sum(t.data.nbytes for t in tensors.values()) <= len(data)
    for record in tensors.values():
        record.data.sum()
    return True


@pytest.mark.parametrize("name", READERS)
def test_mutated_files(tmp_path, name):
    write, reader = READERS[name]
    path = tmp_path / f"whole.{name}"
    data = write(path)
    assert check(reader, path, data)
    rng = random.Random(2)
    tracemalloc.start()
    accepted = sum(check(reader, path, mutate_bytes(rng, data)) for _ in range(MUTATIONS))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < accepted < MUTATIONS  # changed weights are no damage that a reader could see
    assert peak < 10e6


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), head=st.booleans())
def test_random_bytes(tmp_path, name, data, head):
    prefix = {"safetensors": struct.pack("<Q", len(data)), "gguf": b"GGUF" + struct.pack("<I", 3)}[name]
    check(READERS[name][1], tmp_path / "f", prefix + data if head else data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["F32", "BF16", "I64"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), inner, max_size=3),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "F16", "F4", "F6_E2M3", "?"]) | JSON, "shape": st.lists(st.integers(-1, 9), max_size=3) | JSON,
     "data_offsets": st.lists(st.integers(-1, 64), min_size=2, max_size=2) | JSON}
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), ENTRY | JSON, max_size=4) | JSON, size=st.integers(0, 80))
def test_random_headers(tmp_path, header, size):
    text = json.dumps(header).encode()
    check(read_safetensors, tmp_path / "f", struct.pack("<Q", len(text)) + text + bytes(size))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=3), st.text(max_size=9), max_size=3) | JSON}) | JSON)
def test_random_indexes(tmp_path, index):
    (tmp_path / "i.json").write_text(json.dumps(index))
    with pytest.raises(ModelError):  # there are no shards to find
        read_sharded(tmp_path / "i.json")


COUNT = st.integers(0, 5) | st.just(2**60)
LIST = st.builds(lambda kind, count, raw: struct.pack("<IQ", kind, count) + raw, st.integers(0, 13), COUNT, st.binary(max_size=40))
VALUE = st.tuples(st.integers(0, 13), st.binary(max_size=24)) | st.tuples(st.just(9), LIST)
INFO = st.tuples(st.text(max_size=2), st.lists(st.integers(0, 64) | st.just(2**40), max_size=5), st.integers(0, 45),
                 st.integers(0, 4).map(lambda n: 32 * n) | st.just(2**60))  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.lists(st.tuples(st.text(max_size=2), VALUE), max_size=3), infos=st.lists(INFO, max_size=3), size=st.integers(0, 300))
def test_random_tables(tmp_path, keys, infos, size):
    out = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys))
    for key, (kind, raw) in keys:
        out += struct.pack("<Q", len(key.encode())) + key.encode() + struct.pack("<I", kind) + raw
    for name, dims, type_id, offset in infos:
        out += struct.pack("<Q", len(name.encode())) + name.encode()
        out += struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)
    check(read_gguf, tmp_path / "f", out + bytes(size))
