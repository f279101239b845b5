"""The NEON variant of whole kernels, run under qemu on three threads, against the plain variant on this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.calling import FOLDER, call
from tests.kernels.samples import SAMPLES
from tests.kernels.test_sanitizers import MAIN, NAMES
from tinyvllm.backends.cpu.compile import _ALONE, _COMMON
from tinyvllm.backends.cpu.toolchain import CPU_TARGETS, provide_compiler
from tinyvllm.backends.source import kernel_text, kernels_folder

TARGET = "aarch64-linux-musl"
PROCESSORS = {"first": CPU_TARGETS["neon"][0], "dots": CPU_TARGETS["neon"][0] + "+dotprod+bf16"}


def numbers(raw: bytes, like: np.ndarray) -> np.ndarray:
    """float64 of an array's bytes; what is kept as uint16 is bfloat16 here. Poison counts as 0."""
    bits = np.frombuffer(raw, like.dtype)
    values = (bits.astype(np.uint32) << 16).view(np.float32) if like.dtype == np.uint16 else bits
    return np.nan_to_num(values.astype(np.float64))


@pytest.mark.long  # the C library is built for it first
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_does_on_arm_what_the_plain_one_does(name: str, processor: str, tmp_path: Path) -> None:
    ziglang = pytest.importorskip("ziglang", reason="the wheel ziglang builds programs for other architectures")
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not qemu:
        pytest.skip("no qemu-aarch64 (Debian: apt-get install qemu-user)")
    kernel, arrays = SAMPLES[name]("neon")
    count = kernel.outs + kernel.ins
    actual = ", ".join(f"arguments[{i}]" for i in range(count))
    team = (kernels_folder() / "cpu/include/thread_team.h").read_text()
    main = team + "void entry();" + MAIN.format(count=count, outs=kernel.outs, actual=actual)
    code, program, given, written = (tmp_path / name for name in ("kernel.o", "program", "in", "out"))
    # the C library is built for one processor only, which takes long the first time
    flags = [*_COMMON, *_ALONE, f"--target={TARGET}", PROCESSORS[processor]]
    subprocess.run([provide_compiler(FOLDER), *flags, "-", "-o", str(code)], input=kernel_text(kernel).encode(), check=True)
    command = [str(Path(ziglang.__file__).parent / "zig"), "cc", "-target", TARGET, "-static", "-w", "-DPLANT_RACE=0", "-DPLANT_SHORT=-1"]
    subprocess.run([*command, "-x", "c", "-", "-x", "none", str(code), "-o", str(program)], input=main.encode(), check=True)
    given.write_bytes(b"".join(np.int64(a.nbytes).tobytes() + a.tobytes() for a in arrays))
    subprocess.run([qemu, "-cpu", "max", str(program), str(given), str(written)], check=True)

    plain, _ = SAMPLES[name]("plain")
    call(plain, *arrays)
    got, want = numbers(written.read_bytes()[: arrays[0].nbytes], arrays[0]), numbers(arrays[0].tobytes(), arrays[0])
    # float32 sums of a few hundred products, once more rounded to bfloat16 where a normed x is rounded before its product
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-4 * abs(want).max())
