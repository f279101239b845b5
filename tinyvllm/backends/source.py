"""From a Kernel record to the text that a compiler reads: finds the source, prepends constants and entry, inlines the headers it includes.

The folder `kernels/` is at the top of a checkout, and in the wheel it is `tinyvllm/kernels`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path

from tinyvllm.backends.kernel import Kernel
from tinyvllm.errors import KernelError

ENDINGS = {"cpu": ".c", "cuda": ".cu", "metal": ".metal"}
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*\n", re.MULTILINE)


@functools.cache
def kernels_folder() -> Path:
    """The folder of the kernel sources: inside this package in the wheel, one level up in a checkout or an editable install."""
    package = Path(__file__).parents[1]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "cpu").is_dir():
            return folder
    raise KernelError(f"kernels: no kernel sources at {package / 'kernels'} or {package.parent / 'kernels'}; install tinyvllm again")


@functools.cache
def file_digests(folder: Path, ending: str = "") -> tuple[tuple[str, bytes], ...]:
    """Name in the folder and SHA-256 of each file in it and in its folders, sorted; of those with an ending, or of all but documents."""
    found, start = [], len(os.path.join(folder, ""))
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for path in (os.path.join(place, name) for name in names if name.endswith(ending) and not name.endswith(".md")):
            with open(path, "rb", buffering=0) as file:
                found.append((path[start:], hashlib.sha256(file.readall()).digest()))
    return tuple(sorted(found))


@functools.cache
def kernel_source(backend: str, stem: str, instead: Path | None = None) -> str:
    """The text of one kernel's file with the project's own headers in place of `#include "..."`, each once, at its first mention.

    Headers are searched in `instead` (an emulator's replacements of headers with machine instructions), next to the including file, in the
    backend's `include/`, and in the `include/` that all backends share.
    """
    folder = kernels_folder() / backend
    path = folder / f"{stem}{ENDINGS[backend]}"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob(f"*{ENDINGS[backend]}")))
        raise KernelError(f"kernels: there is no {path.name} for {backend}; there are {known}")
    return inline_headers(path, backend, instead)


def inline_headers(path: Path, backend: str, instead: Path | None = None) -> str:
    """The text of any file for a backend, with headers as in `kernel_source`."""
    places = [*([instead] if instead else []), None, kernels_folder() / backend / "include", kernels_folder() / "include"]
    return _inlined(path, places, set())


def _inlined(path: Path, places: list[Path | None], included: set[Path]) -> str:
    """`places`: the folders to search; None is the folder of the including file."""

    def replace(match: re.Match[str]) -> str:
        folders = [place or path.parent for place in places]
        header = next((folder / match[1] for folder in folders if (folder / match[1]).is_file()), None)
        if header is None:
            raise KernelError(f"kernels: {path.name} includes {match[1]}, which is in none of {', '.join(map(str, folders))}")
        if header in included:
            return ""
        included.add(header)
        return f"// --- {header.name}\n{_inlined(header, places, included)}"

    return _INCLUDE.sub(replace, _ONCE.sub("", path.read_text()))


def kernel_text(kernel: Kernel, instead: Path | None = None) -> str:
    """Everything that the compiler reads for one kernel; `instead` as for `kernel_source`."""
    defines = "".join(f"#define {name} {value}\n" for name, value in kernel.defines)
    if kernel.backend == "cpu":
        return f"#define LANES_{kernel.target.upper()}\n{defines}{_cpu_entry(kernel)}{kernel_source('cpu', kernel.stem)}{_CPU_END}"
    before = _METAL_LIBRARY if kernel.backend == "metal" else ""
    return before + defines + kernel_source(kernel.backend, kernel.stem, instead)


# Before the constants: Apple's headers have template parameters called T and the like.
_METAL_LIBRARY = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\n"


# Thread pools have a barrier after every kernel. A single thread needs none, but the unit counter must return to 0 for the next kernel.
_CPU_END = "\nstatic void finish_alone(const struct thread_team *team) { if (team->threads == 1) barrier(team); }\n"


def _cpu_entry(kernel: Kernel) -> str:
    """The function `entry`: tinygrad jumps to the start of the object file, so it comes first, and it passes integers.

    The last argument is the thread team. The kernel's function is not inlined into it: compilers would optimize it twice.
    """
    count = kernel.outs + kernel.ins
    formal = ", ".join(f"long a{i}" for i in range(count))
    actual = ", ".join(f"a{i}" for i in range(count))
    types = ", ".join(["long"] * count)
    return f"""struct thread_team;
static __attribute__((noinline)) void {kernel.stem}();
static void finish_alone(const struct thread_team *team);
void entry({formal}, const struct thread_team *team) {{
  ((void (*)({types}, const struct thread_team *)){kernel.stem})({actual}, team);
  finish_alone(team);
}}
"""
