"""Libraries that tinygrad would load whenever it opens the CPU device."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from tinyvllm.config.switches import cache_folder
from tinyvllm.runner.device import start_device
start_device("CPU", cache_folder())
import tinygrad.helpers
assert tinygrad.helpers.sqlite3.connect and tinygrad.helpers.sqlite3.OperationalError
from tinygrad.runtime.support import c
unused = [name for name in sys.modules if name.startswith(("tinygrad.runtime.ops_rdma", "tinygrad.runtime.support.mlx", "tinygrad.runtime.autogen.libusb", "tinygrad.runtime.autogen.mesa", "tinygrad.runtime.autogen.llvm", "tinygrad.runtime.autogen.libc", "tinygrad.codegen.opt.search", "tinyvllm.backends.cuda", "tinyvllm.backends.metal"))]
print(sorted(c.DLL._loaded_ - {"libc"}), unused)
from tinygrad.runtime.ops_rdma import RDMADevice
from tinygrad.renderer.nir import LVPRenderer
from tinygrad.runtime import ops_cpu
assert ops_cpu.LVPRenderer is not LVPRenderer
from tinygrad.runtime.support import elf, hcq
assert (elf.libc.ELFCLASS64, hcq.libc.EI_CLASS) == (2, 4) and not hasattr(elf.libc, "no_such_name")
from tinygrad.codegen.opt import search
from tinyvllm.bridge import programs
assert (search.diskcache_get, search.diskcache_put) == (programs._load, programs._keep)
"""  # noqa: E501


def test_opening_the_cpu_loads_nothing_that_is_unused():
    """And tinygrad's own module is there for a program that wants it."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "[] []\n"), done.stderr


def test_a_library_that_the_user_names_is_found(monkeypatch, tmp_path):
    from tinyvllm.bridge import absent

    library = tmp_path / "libLLVM.so"
    library.write_bytes(b"\x7fELF")
    monkeypatch.setattr(absent, "_find", lambda name, *arguments: str(library))
    assert absent._find_used("llvm", []) is None
    assert absent._find_used("libc", []) == str(library)
    monkeypatch.setenv("LLVM_PATH", str(library))
    assert absent._find_used("llvm", []) == str(library)
