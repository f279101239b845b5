"""Peak memory of loading, measured from outside: a process of its own loads a checkpoint of 100 MB and more and reports what it took.

The peak counts every page of the file that was touched. It must stay under 1.2 times the bytes that stay resident.
"""

import json
import subprocess
import sys

import numpy as np
import pytest

from tinyvllm.quant.formats import FORMATS

ROWS, COLUMNS = 2048, 2048  # 4 Mi numbers a tensor
SCRIPT = """
import ctypes, json, sys
import numpy as np
from dataclasses import dataclass
from pathlib import Path
from tinygrad import Tensor, dtypes
from tinyvllm.weights.checkpoint import open_checkpoint
from tinyvllm.weights.load import load_tensors

@dataclass(frozen=True)
class Weight:
    name: str
    sources: tuple
    shape: tuple
    transform: object = None

def peak():
    # not ru_maxrss: Linux lets it begin at what the parent, pytest, had in memory
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

path, dtype, transform = sys.argv[1], getattr(dtypes, sys.argv[2]), sys.argv[3]
Tensor([1.0], device="CPU").numpy()  # tinygrad's own memory is not ours to answer for
before = peak()
checkpoint = open_checkpoint(Path(path))
moved = {"no": None, "yes": lambda x: x[0].reshape(2, -1, x[0].shape[1]).swapaxes(0, 1).reshape(x[0].shape)}[transform]
tensors = load_tensors(checkpoint, [Weight(n, (n,), r.shape, moved) for n, r in checkpoint.tensors.items()], "CPU", dtype)
for t in tensors.values():  # every page, as the first forward pass would
    np.frombuffer((ctypes.c_uint8 * (t.numel() * dtype.itemsize)).from_address(t.uop.buffer.options.external_ptr), np.uint8)[::4096].sum()
resident = sum(t.numel() * dtype.itemsize for t in tensors.values())
print(json.dumps({"peak": peak() - before, "resident": resident}))
"""


def write_safetensors(folder, kind, count):
    size = ROWS * COLUMNS * 2
    header = {f"t{i}": {"dtype": kind, "shape": [ROWS, COLUMNS], "data_offsets": [i * size, (i + 1) * size]} for i in range(count)}
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text + b" " * (-len(text) % 8)).to_bytes(8, "little") + text + b" " * (-len(text) % 8))
        for _ in range(count):
            file.write(rng.integers(0, 0x3C00, ROWS * COLUMNS, dtype=np.uint16).tobytes())
    (folder / "config.json").write_text("{}")
    return folder


def write_gguf(folder, name, count):
    stored = FORMATS[name]
    size = ROWS * COLUMNS // stored.elements * stored.nbytes
    infos = b""
    for i in range(count):
        key = f"t{i}".encode()
        infos += len(key).to_bytes(8, "little") + key + (2).to_bytes(4, "little") + COLUMNS.to_bytes(8, "little")
        infos += ROWS.to_bytes(8, "little") + stored.type_id.to_bytes(4, "little") + (i * size).to_bytes(8, "little")
    head = b"GGUF" + (3).to_bytes(4, "little") + count.to_bytes(8, "little") + bytes(8) + infos
    with open(folder / "m.gguf", "wb") as file:
        file.write(head + bytes(-len(head) % 32))
        for i in range(count):
            file.write(np.random.default_rng(i).integers(0, 0x30, size, dtype=np.uint8).tobytes())
    return folder / "m.gguf"


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(
    "write,kind,count,dtype,transform",
    [
        (write_safetensors, "BF16", 20, "bfloat16", "no"),  # 168 MB, mapped
        (write_safetensors, "F16", 10, "float32", "no"),  # 84 MB -> 168 MB
        (write_safetensors, "F16", 20, "float16", "yes"),  # 168 MB, rearranged
        (write_gguf, "Q4_0", 10, "float32", "no"),  # 24 MB -> 168 MB
        (write_gguf, "Q8_0", 20, "float16", "yes"),  # 89 MB -> 168 MB, rearranged
    ],
)
def test_peak_memory_of_loading(tmp_path, write, kind, count, dtype, transform):
    path = write(tmp_path, kind, count)
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path), dtype, transform], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["resident"] >= 160e6
    assert 0.7 * figures["resident"] < figures["peak"] < 1.2 * figures["resident"]
