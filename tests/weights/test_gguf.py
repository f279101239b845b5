import struct

import gguf
import numpy as np
import pytest
from gguf.quants import quantize

from tinyvllm.errors import FormatError, ModelError
from tinyvllm.quant.formats import FORMATS_BY_TYPE_ID
from tinyvllm.weights.gguf import read_gguf


def text(s):
    raw = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name, kind, payload):
    return text(name) + struct.pack("<I", kind) + payload


def info(name, dims, type_id, offset):
    """`dims` in the file's order, innermost first."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def write(path, keys=(), infos=(), body=b"", version=3, alignment=32, counts=None, magic=b"GGUF"):
    head = magic + struct.pack("<IQQ", version, *(counts or (len(infos), len(keys)))) + b"".join(keys) + b"".join(infos)
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + body)
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "m.gguf"


def test_reads_what_the_gguf_package_writes(file):
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint32("u", 7)
    writer.add_float32("f", 0.5)
    writer.add_bool("yes", True)
    writer.add_string("s", "grüße 🌍")
    writer.add_array("words", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.0])
    writer.add_array("flags", [True, False])
    a, h = rng.normal(size=(3, 64)).astype(np.float32), rng.normal(size=(5,)).astype(np.float16)
    writer.add_tensor("a", a)
    writer.add_tensor("h", h)
    for name in ("Q8_0", "Q4_0", "BF16"):
        writer.add_tensor(name, quantize(a, gguf.GGMLQuantizationType[name]), raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata, tensors = read_gguf(file)
    assert metadata == {"general.architecture": "llama", "u": 7, "f": 0.5, "yes": True, "s": "grüße 🌍", "words": ["a", "", "ü"],
                        "numbers": [1, -2, 3], "floats": [0.5, -1.0], "flags": [True, False]}  # fmt: skip
    assert type(metadata["u"]) is int and type(metadata["yes"]) is bool and type(metadata["f"]) is float
    assert {n: (t.format, t.shape) for n, t in tensors.items()} == {
        "a": ("F32", (3, 64)), "h": ("F16", (5,)), **{n: (n, (3, 64)) for n in ("Q8_0", "Q4_0", "BF16")}}  # fmt: skip
    assert tensors["a"].data.tobytes() == a.tobytes() and tensors["h"].data.tobytes() == h.tobytes()
    assert tensors["Q4_0"].data.tobytes() == quantize(a, gguf.GGMLQuantizationType.Q4_0).tobytes()
    assert not tensors["a"].data.flags.writeable


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(file, version):
    scalars = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60000), 3: ("h", -300), 4: ("I", 2**32 - 1), 5: ("i", -(2**31)), 6: ("f", 0.25),
               7: ("B", 1), 10: ("Q", 2**64 - 1), 11: ("q", -(2**63)), 12: ("d", 1e300)}  # fmt: skip
    keys = [key(f"k{kind}", kind, struct.pack("<" + code, value)) for kind, (code, value) in scalars.items()]
    keys += [key(f"a{kind}", 9, struct.pack(f"<IQ2{code}", kind, 2, value, value)) for kind, (code, value) in scalars.items()]
    nested = struct.pack("<IQ", 9, 2) + struct.pack("<IQ2B", 0, 2, 1, 2) + struct.pack("<IQ", 8, 1) + text("x")
    metadata, tensors = read_gguf(write(file, [*keys, key("nested", 9, nested), key("none", 9, struct.pack("<IQ", 8, 0))], version=version))
    for kind, (_, value) in scalars.items():
        assert metadata[f"k{kind}"] == value and metadata[f"a{kind}"] == [value, value]
    assert metadata["nested"] == [[1, 2], ["x"]] and metadata["none"] == [] and tensors == {}


def test_shapes_offsets_and_alignment(file):
    body = bytes(range(12)) + bytes(116) + np.arange(6, dtype=np.float16).tobytes()
    infos = [info("late", (3, 2), 1, 128), info("early", (3,), 0, 0)]
    _, tensors = read_gguf(write(file, [key("general.alignment", 4, struct.pack("<I", 64))], infos, body, alignment=64))
    assert tensors["late"].shape == (2, 3) and tensors["early"].data.tobytes() == bytes(range(12))
    assert tensors["late"].data.view(np.float16).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "broken,message",
    [
        (dict(magic=b"GGML"), "is not a GGUF file"),
        (dict(version=1), "is GGUF version 1; versions 2 and 3"),
        (dict(version=3 << 24), "big-endian"),
        (dict(counts=(0, 65_536)), "is truncated or corrupt"),
        (dict(counts=(65_536, 0)), "is truncated or corrupt"),
        (dict(counts=(0, 65_537)), "has 65537 metadata keys, and at most 65536 are read"),
        (dict(counts=(65_537, 0)), "has 65537 tensors, and at most 65536 are read"),
        (dict(counts=(2**60, 0)), "has 1152921504606846976 tensors"),
        (dict(keys=[struct.pack("<Q", 2**60)]), "metadata key at byte .* needs 1152921504606846976 bytes"),
        (dict(keys=[key("k", 8, struct.pack("<Q", 2**63))]), "value of 'k'"),
        (dict(keys=[key("k", 9, struct.pack("<IQ", 8, 2**20))]), r"string \d+ of 'k' extends past the end"),
        (dict(keys=[key("k", 9, struct.pack("<IQ", 8, 2**60))]), "have more than 2097152 values together, 'k' has 1152921504606846976"),
        (dict(keys=[key("k", 9, struct.pack("<IQ", 12, 2**20))]), "value of 'k' at byte"),
        (dict(keys=[key("k", 9, struct.pack("<IQ", 9, 2**17 + 1))]), "have more than 2097152 values together"),  # arrays cost more time
        (dict(keys=[key(name, 9, struct.pack("<IQ", 0, 2**20) + bytes(2**20)) for name in "abc"]), "values together, 'c' has 1048576"),
        (dict(keys=[key("k", 9, struct.pack("<IQ", 9, 1) * 50)]), "nested deeper"),
        (dict(keys=[key("k", 13, b"")]), "unknown value type 13"),
        (dict(keys=[key("k", 7, b"\2")]), "true or false"),
        (dict(keys=[key("k", 8, text(b"\xff"))]), "value of 'k' is not UTF-8"),
        (dict(keys=[key(b"\xff", 0, b"1")]), "metadata key is not UTF-8"),
        (dict(keys=[key("k", 9, struct.pack("<IQ", 8, 2) + text("a") + text(b"\xff"))]), "string 1 of 'k' is not UTF-8"),
        (dict(keys=[key("k", 0, b"1"), key("k", 0, b"2")]), "key 'k' appears twice"),
        (dict(keys=[key("general.alignment", 4, struct.pack("<I", 24))]), "power of two"),
        (dict(keys=[key("general.alignment", 4, struct.pack("<I", 0))]), "power of two"),
        (dict(keys=[key("general.alignment", 8, text("x"))]), "power of two"),
        (dict(infos=[info("t", (8,), 0, 0)]), "is truncated: tensor 't' ends at byte"),
        (dict(infos=[info("t", (2**40, 2**40), 0, 0)]), "is truncated: tensor 't'"),
        (dict(infos=[info("t", (1,), 0, 2**63)]), "is truncated: tensor 't'"),
        (dict(infos=[info("t", (1,), 0, 8)], body=bytes(64)), "not a multiple of the alignment, 32"),
        (dict(infos=[info("t", (1,), 0, 0)] * 2, body=bytes(64)), "tensor 't' appears twice"),
        (dict(infos=[info("t", (16,), 0, 0), info("u", (1,), 0, 32)], body=bytes(64)), "'t' and 'u' overlap"),
        (dict(infos=[info("t", (1, 1, 1, 1, 1), 0, 0)], body=bytes(64)), "5 dimensions"),
        (dict(infos=[info("t", (33,), 2, 0)], body=bytes(64)), r"rows of 33 numbers, but Q4_0 needs multiples of 32"),
        (dict(infos=[info("t", (1,), 99, 0)], body=bytes(64)), "tensor 't' has the unknown type number 99"),
    ],
)
def test_refuses_a_damaged_file(file, broken, message):
    with pytest.raises(FormatError, match=message) as caught:
        read_gguf(write(file, **broken))
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_every_truncation_is_refused(file):
    whole = write(file, [key("k", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("c"))], [info("t", (3, 2), 0, 0)], bytes(24)).read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            read_gguf(file)


def test_reads_a_large_vocabulary(file):
    words = b"".join(text(f"token{i}") for i in range(128_000))
    scores = struct.pack("<IQ", 6, 128_000) + bytes(512_000)
    write(file, [key("tokens", 9, struct.pack("<IQ", 8, 128_000) + words), key("scores", 9, scores)])
    metadata, _ = read_gguf(file)
    assert len(metadata["tokens"]) == 128_000 and metadata["tokens"][127_999] == "token127999" and metadata["scores"][5] == 0.0


def split(folder, count, tensors, announced=None):
    for number in range(count):
        keys = [key("split.no", 2, struct.pack("<H", number)), key("split.count", 2, struct.pack("<H", count))]
        keys += [key("split.tensors.count", 5, struct.pack("<i", announced or count * tensors))]
        infos = [info(f"t{number}.{i}", (8,), 0, 32 * i) for i in range(tensors)]
        write(folder / f"m-{number + 1:05d}-of-{count:05d}.gguf", keys, infos, bytes([number]) * 32 * tensors)
    return [folder / f"m-{number + 1:05d}-of-{count:05d}.gguf" for number in range(count)]


def test_reads_a_split_model_from_any_part(tmp_path):
    for part in split(tmp_path, 3, 2):
        metadata, tensors = read_gguf(part)
        assert metadata["split.no"] == 0
        assert {n: t.data[0] for n, t in tensors.items()} == {f"t{p}.{i}": p for p in range(3) for i in range(2)}


def test_refuses_an_incomplete_split_model(tmp_path):
    first, second, _ = split(tmp_path, 3, 1)
    second.unlink()
    with pytest.raises(ModelError, match="is one of 3 parts, and m-00002-of-00003.gguf is not in the same folder"):
        read_gguf(first)
    (lone := tmp_path / "renamed.gguf").write_bytes(first.read_bytes())
    with pytest.raises(FormatError, match="belongs to a model in 3 parts, but 1 were found"):
        read_gguf(lone)


def test_refuses_parts_that_do_not_belong_together(tmp_path):
    parts = split(tmp_path, 2, 1)
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(FormatError, match="has split.no 0"):
        read_gguf(parts[0])
    with pytest.raises(FormatError, match="2 tensors in total, but the first declares 5"):
        read_gguf(split(tmp_path, 2, 1, announced=5)[0])


def test_every_known_type_has_its_size(file):
    for f in FORMATS_BY_TYPE_ID.values():
        write(file, infos=[info("t", (f.elements * 2, 3), f.type_id, 0)], body=bytes(6 * f.nbytes))
        assert len(read_gguf(file)[1]["t"].data) == 6 * f.nbytes
