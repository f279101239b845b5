"""From a Kernel record to the text that a compiler reads: finds the source, puts constants and entry before it, inlines what it includes.

The folder `kernels/` stands at the top of a checkout and lies in the wheel as `tinyvllm/kernels`.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from tinyvllm.backends.kernel import Kernel
from tinyvllm.errors import KernelError

ENDINGS = {"cpu": ".c", "cuda": ".cu", "metal": ".metal"}
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*\n", re.MULTILINE)


@functools.cache
def kernels_folder() -> Path:
    """Where the sources lie: in the wheel beside this package, in a checkout or an editable install one level up."""
    package = Path(__file__).parents[1]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "cpu").is_dir():
            return folder
    raise KernelError(f"kernels: no kernel sources at {package / 'kernels'} or {package.parent / 'kernels'}; install tinyvllm again")


@functools.cache
def kernel_source(backend: str, stem: str, instead: Path | None = None) -> str:
    """The text of one kernel's file with its own headers in place of `#include "..."`, each once, at its first mention.

    A header of the same name in the folder `instead` is taken in its place: an emulator's words for the machine's.
    """
    folder = kernels_folder() / backend
    path = folder / f"{stem}{ENDINGS[backend]}"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob(f"*{ENDINGS[backend]}")))
        raise KernelError(f"kernels: there is no {path.name} for {backend}; there are {known}")
    return _inlined(path, folder, instead, set())


def _inlined(path: Path, folder: Path, instead: Path | None, seen: set[Path]) -> str:
    places = [instead] if instead else []
    places += [path.parent, folder / "include"]

    def replace(match: re.Match[str]) -> str:
        header = next((place / match[1] for place in places if (place / match[1]).is_file()), None)
        if header is None:
            raise KernelError(f"kernels: {path.name} includes {match[1]}, which is neither beside it nor in {folder / 'include'}")
        if header in seen:
            return ""
        seen.add(header)
        return f"// --- {header.name}\n{_inlined(header, folder, instead, seen)}"

    return _INCLUDE.sub(replace, _ONCE.sub("", path.read_text()))


def kernel_text(kernel: Kernel, instead: Path | None = None) -> str:
    """Everything that the compiler reads for one kernel; `instead` as for `kernel_source`."""
    defines = "".join(f"#define {name} {value}\n" for name, value in kernel.defines)
    if kernel.backend == "cpu":
        return f"#define LANES_{kernel.target.upper()}\n{defines}{_cpu_entry(kernel)}{kernel_source('cpu', kernel.stem)}{_CPU_END}"
    before = _METAL_LIBRARY if kernel.backend == "metal" else ""
    return before + defines + kernel_source(kernel.backend, kernel.stem, instead)


# Ahead of the constants: Apple's headers have template parameters called T and the like.
_METAL_LIBRARY = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\n"


# A crew meets behind every kernel; whoever is alone must do it himself, or the next kernel would find the last one's tickets drawn.
_CPU_END = "\nstatic void left(const struct team *team) { if (team->lanes == 1) meet(team); }\n"


def _cpu_entry(kernel: Kernel) -> str:
    """The function that is called: tinygrad jumps to the start of the object file, so it comes first, and it passes integers.

    The last argument is the team.
    """
    count = kernel.outs + kernel.ins
    formal = ", ".join(f"long a{i}" for i in range(count))
    actual = ", ".join(f"a{i}" for i in range(count))
    types = ", ".join(["long"] * count)
    return f"""struct team;
static void {kernel.stem}();
static void left(const struct team *team);
void entry({formal}, const struct team *team) {{
  ((void (*)({types}, const struct team *)){kernel.stem})({actual}, team);
  left(team);
}}
"""
