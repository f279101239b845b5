"""Checks Metal's address spaces: clang parses the text as C++ for OpenCL, which has the same address spaces under other names.

device, threadgroup, constant and thread are OpenCL's global, local, constant and private address spaces: clang refuses a pointer of the
wrong one, casts between them, threadgroup variables that are not in a kernel's outermost scope or have initial values, pointers to
functions, virtual functions, double, arrays of variable length, and (by -Wpre-c++17-compat) what C++14, on which Metal 3.0 is based, does
not have. It only parses: declarations (metal_spaces.h) are all it needs. A pointer that names no address space is `generic` in OpenCL;
metal_lint.py rejects it.
"""

from __future__ import annotations

import re
import subprocess

from tests.emulator.metal import without_comments
from tests.emulator.places import FOLDER, HERE
from tinyvllm.backends.cpu.toolchain import provide_compiler

_VECTOR = r"(?:packed_)?(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float)[234]"
_CONSTRUCTED = re.compile(rf"\b({_VECTOR}|vec<[^<>;(){{}}]*>)(\s*)\((?!\s*[&*]\s*\w+\s*\)\s*[\[(])")
_FLAGS = (
    "-target", "spir64", "-x", "clcpp", "-cl-std=clc++1.0", "-cl-no-stdinc", "-Xclang", "-cl-ext=-all,+cl_khr_fp16", "-fsyntax-only",
    "-ferror-limit=5", "-Wno-everything", "-Werror=pre-c++17-compat", "-Werror=pre-c++20-compat", "-Werror=return-type",
    "-Xclang", "-ast-dump", "-fno-color-diagnostics",
)  # fmt: skip


def read(text: str) -> tuple[str, list[str]]:
    """Clang's errors for a kernel's full text, constants first ("" for none), and its syntax tree from the text's first line on.

    Line numbers are the text's. The tree is clang's -ast-dump, a node a line.
    """
    code = re.sub(r"#\s*include\s*<[^>]*>", "", without_comments(text))
    code = _own_methods(_CONSTRUCTED.sub(r"spaces_make<\1>\2(", code))
    command = [provide_compiler(FOLDER), *_FLAGS, "-include", str(HERE / "metal_spaces.h"), "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True)
    if done.returncode:
        return done.stderr, []
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if " spaces_end " in line and line.startswith("|-TypedefDecl"))
    return "", lines[start + 2 :]


def _own_methods(code: str) -> str:
    """Qualifies member functions: without a qualifier they are for objects in thread memory in Metal, for any object in OpenCL."""
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


def compiler_errors(text: str) -> str:
    """Clang's errors for a kernel's full text; "" for none."""
    return read(text)[0]
