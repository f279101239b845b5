"""The text that a compiler reads: where sources lie, what is put before them, and what is put in place of an #include."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tinyvllm.backends import source
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import kernel_source, kernel_text, kernels_folder
from tinyvllm.errors import KernelError

KERNEL = Kernel("one", "cpu", "avx2", (("E", 64), ("WEIGHT", "Q8_0"), ("EPS", "1e-05f")), 1, 2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """kernels/ of a kernel `one` that includes a.h and b.h, which include each other and c.h."""
    monkeypatch.setattr(source, "kernels_folder", lambda: tmp_path)
    kernel_source.cache_clear()
    (tmp_path / "cpu" / "include").mkdir(parents=True)
    files = {
        "one.c": '#include <stdint.h>\n#include "a.h"\n  #  include "b.h" // and why\nstatic void one() {}\n',
        "include/a.h": '#pragma once\n#include "b.h"\n#include "c.h"\nint a;\n',
        "include/b.h": '#pragma once\n#include "a.h"\n#include "c.h"\nint b;\n',
        "include/c.h": "#pragma once\nint c;\n",
    }
    for name, text in files.items():
        (tmp_path / "cpu" / name).write_text(text)
    yield tmp_path
    kernel_source.cache_clear()


def test_headers_are_put_in_once_where_they_are_first_mentioned(folder):
    text = kernel_source("cpu", "one")
    assert '#include "' not in text and "#pragma once" not in text and "#include <stdint.h>" in text
    assert re.findall(r"^int (\w);$|(static void one)", text, re.MULTILINE) == [("c", ""), ("b", ""), ("a", ""), ("", "static void one")]
    assert all(f"// --- {name}.h" in text for name in "abc")


def test_headers_are_searched_next_to_the_file_then_in_the_backend_then_in_the_shared_folder(folder):
    (folder / "include").mkdir()
    (folder / "cpu" / "one.c").write_text('#include "shared.h"\n')
    (folder / "include" / "shared.h").write_text('#include "own.h"\n#include "c.h"\nint shared;\n')
    (folder / "cpu" / "include" / "own.h").write_text("int own;\n")  # a shared header includes one of the backend's
    (folder / "include" / "c.h").write_text("int common;\n")
    assert re.findall(r"^int (\w+);$", kernel_source("cpu", "one"), re.MULTILINE) == ["own", "common", "shared"]
    kernel_source.cache_clear()
    (folder / "cpu" / "include" / "shared.h").write_text("int mine;\n")
    assert re.findall(r"^int (\w+);$", kernel_source("cpu", "one"), re.MULTILINE) == ["mine"]


def test_a_replaced_header_comes_before_all_others(folder, tmp_path):
    (tmp_path / "replaced").mkdir()
    (tmp_path / "replaced" / "a.h").write_text("int replaced;\n")
    text = kernel_source("cpu", "one", tmp_path / "replaced")
    assert re.findall(r"^int (\w+);$", text, re.MULTILINE) == ["replaced", "c", "b"]


def test_a_header_next_to_the_kernel_comes_before_one_of_the_same_name(folder):
    (folder / "cpu" / "c.h").write_text("int near;\n")
    (folder / "cpu" / "one.c").write_text('#include "c.h"\n')
    assert "int near;" in kernel_source("cpu", "one")


def test_a_missing_header_is_named_with_the_file_that_includes_it(folder):
    (folder / "cpu" / "include" / "c.h").unlink()
    with pytest.raises(KernelError, match=r"b\.h includes c\.h, which is in none of .*/cpu/include, .*/include"):
        kernel_source("cpu", "one")


def test_a_missing_kernel_is_named_with_those_that_are_there(folder):
    (folder / "cpu" / "two.c").touch()
    with pytest.raises(KernelError, match=r"there is no three\.c for cpu; there are one, two"):
        kernel_source("cpu", "three")


def test_row_constants_and_entry_come_first(folder):
    lines = kernel_text(KERNEL).splitlines()
    assert lines[:4] == ["#define LANES_AVX2", "#define E 64", "#define WEIGHT Q8_0", "#define EPS 1e-05f"]
    functions = [line for line in lines if re.match(r"(static )?(inline )?\w+ \w+\(.*\) \{", line)]
    entry = "void entry(long a0, long a1, long a2, const struct thread_team *team)"
    assert functions[0].startswith(entry), "tinygrad jumps to the first byte"


def test_sources_of_gpus_get_their_constants_alone(folder):
    (folder / "cuda").mkdir()
    (folder / "cuda" / "one.cu").write_text("__global__ void one() {}\n")
    assert kernel_text(Kernel("one", "cuda", "sm_90", (("E", 64),), 1, 2)) == "#define E 64\n__global__ void one() {}\n"


@pytest.mark.parametrize("place", ["tinyvllm/kernels", "kernels"], ids=["wheel", "checkout"])
def test_sources_are_found_in_a_wheel_and_in_a_checkout(tmp_path, monkeypatch, place):
    (tmp_path / "tinyvllm" / "ops").mkdir(parents=True)
    monkeypatch.setattr(source, "__file__", str(tmp_path / "tinyvllm" / "backends" / "source.py"))
    with pytest.raises(KernelError, match="no kernel sources at .*tinyvllm/kernels or .*kernels; install tinyvllm again"):
        kernels_folder.__wrapped__()
    (tmp_path / "kernels" / "other").mkdir(parents=True)  # of another project: no cpu in it
    (tmp_path / place / "cpu").mkdir(parents=True)
    assert kernels_folder.__wrapped__() == tmp_path / place


def test_this_installation_has_them():
    assert (kernels_folder() / "cpu" / "matmul.c").is_file() and kernels_folder().parts[-1] == "kernels"
    assert isinstance(kernels_folder(), Path)
