"""A compiler's eye on Metal: clang reads the text as C++ for OpenCL, which knows the same memories under other names.

device, threadgroup, constant and thread are OpenCL's global, local, constant and private address spaces: clang refuses a pointer of the
wrong one, casts between them, threadgroup variables that are not in a kernel's outermost scope or have initial values, pointers to
functions, virtual functions, double, arrays of variable length, and (by -Wpre-c++17-compat) what C++14, of which Metal 3.0 is made, has
not. It only looks: declarations (metal_spaces.h) are all it needs. A pointer that names no memory is `generic` to OpenCL; metal_lint.py
refuses it.
"""

from __future__ import annotations

import re
import subprocess

from tests.emulator.metal import without_comments
from tests.emulator.places import FOLDER, HERE
from tinyvllm.backends.cpu.toolchain import provide_compiler

_VECTOR = r"(?:packed_)?(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float)[234]"
_MADE = re.compile(rf"\b({_VECTOR}|vec<[^<>;(){{}}]*>)(\s*)\((?!\s*[&*]\s*\w+\s*\)\s*[\[(])")
_FLAGS = (
    "-target", "spir64", "-x", "clcpp", "-cl-std=clc++1.0", "-cl-no-stdinc", "-Xclang", "-cl-ext=-all,+cl_khr_fp16", "-fsyntax-only",
    "-ferror-limit=5", "-Wno-everything", "-Werror=pre-c++17-compat", "-Werror=pre-c++20-compat", "-Werror=return-type",
    "-Xclang", "-ast-dump", "-fno-color-diagnostics",
)  # fmt: skip


def read(text: str) -> tuple[str, list[str]]:
    """What clang says against a kernel's full text, constants in front ("" is nothing), and its tree of it, from the text's first line on.

    Lines that are named are the text's. The tree is clang's -ast-dump, a node a line.
    """
    code = re.sub(r"#\s*include\s*<[^>]*>", "", without_comments(text))
    code = _own_methods(_MADE.sub(r"spaces_make<\1>\2(", code))
    command = [provide_compiler(FOLDER), *_FLAGS, "-include", str(HERE / "metal_spaces.h"), "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True)
    if done.returncode:
        return done.stderr, []
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if " spaces_end " in line and line.startswith("|-TypedefDecl"))
    return "", lines[start + 2 :]


def _own_methods(code: str) -> str:
    """Member functions that name no memory are of objects in thread memory, to Metal; to OpenCL of objects anywhere."""
    out, scopes, at = [], [], 0
    for brace in re.finditer(r"[{};]", code):
        before = code[at : brace.start()]
        if brace[0] == "{":
            method = re.search(r"(?<![:,\s])\s+[&\w]+\s*(\((?:[^()]|\([^()]*\))*\))\s*(const)?\s*$", before)
            if scopes and scopes[-1] and method and not re.search(r"\bstatic\b", before):
                before += " thread "
            scopes.append(bool(re.search(r"\b(struct|class|union)\s+\w+[^()]*$", before)))
        elif brace[0] == "}" and scopes:
            scopes.pop()
        out += [before, brace[0]]
        at = brace.end()
    return "".join([*out, code[at:]])


def complaints(text: str) -> str:
    """What clang has against a kernel's full text; "" is nothing."""
    return read(text)[0]
