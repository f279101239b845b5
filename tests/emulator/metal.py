"""Reads Metal source for the emulator: a kernel's signature, its variables in threadgroup memory, and the entry that calls it."""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import dataclass

from tests.emulator.places import FOLDER
from tinyvllm.backends.cpu.toolchain import provide_compiler
from tinyvllm.backends.kernel import Kernel

PLACES = {  # positions in three dimensions; the number is metal.cpp's
    "threadgroup_position_in_grid": 0, "threadgroups_per_grid": 1, "thread_position_in_threadgroup": 2, "threads_per_threadgroup": 3,
    "thread_position_in_grid": 4, "threads_per_grid": 5,
}  # fmt: skip
NUMBERS = {
    "thread_index_in_threadgroup": 0, "thread_index_in_simdgroup": 1, "simdgroup_index_in_threadgroup": 2, "threads_per_simdgroup": 3,
    "simdgroups_per_threadgroup": 4,
}  # fmt: skip
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(r"(?P<attributes>(?:\[\[[^\]]*\]\]\s*)*)\bkernel\s+(?P<more>(?:\[\[[^\]]*\]\]\s*)*)void\s+(?P<name>\w+)\s*\(")
_ATTRIBUTE = r"\s*__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)"  # as tinygrad writes it; Metal's own is alignas
_SHARED = re.compile(rf"(?P<before>[;{{}}]|#[^\n]*[^\\\n]\n)(?P<space>\s*)threadgroup\b(?P<what>(?:{_ATTRIBUTE})?[^;{{}}()\[*&]*[\[;])")

_SHARED_IN_MACRO = re.compile(r"#[ \t]*define\b(?:[^\n]|\\\n)*?\bthreadgroup\b[^;{}()\[*&\n]*[\[;]")


class SignatureError(AssertionError):
    """A kernel's parameters are not what Metal or tinygrad can pass to it."""


@dataclass(frozen=True)
class Parameter:
    """`declaration`: without its attribute. `attribute`: "buffer" or one of PLACES and NUMBERS. `index`: of a buffer."""

    declaration: str
    attribute: str
    index: int = 0

    @property
    def read_only(self) -> bool:
        return bool(re.search(r"\b(const|constant)\b", self.declaration.split("*")[0].split("&")[0]))


@dataclass(frozen=True)
class Signature:
    """A kernel's name, its parameters in order, and its bound of threads a threadgroup as an expression, empty if it has none."""

    name: str
    parameters: tuple[Parameter, ...]
    max_threads: str

    @property
    def buffers(self) -> dict[int, Parameter]:
        return {p.index: p for p in self.parameters if p.attribute == "buffer"}


def without_comments(text: str) -> str:
    """The text with spaces in place of comments; line numbers do not change."""
    return _COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), text)


@functools.cache
def preprocessed(text: str) -> list[tuple[int, str]]:
    """The preprocessed text, without Apple's headers, as lines with their numbers in the text."""
    code = re.sub(r"#\s*include\s*<[^>]*>", "", without_comments(text))
    command = [provide_compiler(FOLDER), "-x", "c++", "-std=c++14", "-E", "-nostdinc++", "-w", "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True)
    if done.returncode:
        raise SignatureError(f"preprocessor error:\n{done.stderr[:2000]}")
    lines, number = [], 0
    for row in done.stdout.splitlines():
        marker = re.match(r'#\s*(?:line)?\s*(\d+) "', row)
        if marker:
            number = int(marker[1])
            continue
        if not row.lstrip().startswith("#"):
            lines.append((number, row))
        number += 1
    return lines


@functools.cache
def signatures(text: str) -> list[Signature]:
    """All kernels of a text."""
    code = "\n".join(line for _, line in preprocessed(text))
    kernels = []
    for match in _KERNEL.finditer(code):
        end = _closing(code, match.end() - 1)
        limit = re.search(r"max_total_threads_per_threadgroup\s*\(([^\]]*)\)\s*\]\]", match["attributes"] + match["more"])
        parameters: list[Parameter] = []
        for words in _split(code[match.end() : end]):
            parameters.append(_parameter(match["name"], words, sum(p.attribute == "buffer" for p in parameters)))
        kernels.append(Signature(match["name"], tuple(parameters), limit[1] if limit else ""))
    return kernels


def check_record(kernel: Kernel, text: str) -> None:
    """Raises SignatureError where a kernel's buffers are not the arguments of its `Kernel`: outs first, then ins, which are const."""
    signature = next((s for s in signatures(text) if s.name == kernel.stem), None)
    if signature is None:
        raise SignatureError(f"{kernel.stem}: expected 'kernel void {kernel.stem}(' in the source")
    count = kernel.outs + kernel.ins
    if sorted(signature.buffers) != list(range(count)):
        raise SignatureError(f"{kernel.stem}: buffers {sorted(signature.buffers)}; expected 0 to {count - 1}")
    for index, parameter in signature.buffers.items():
        if parameter.read_only != (index >= kernel.outs):
            expected = "const" if index >= kernel.outs else "not const"
            message = f"{kernel.stem}: buffer {index} is '{parameter.declaration}'; expected {expected}"
            raise SignatureError(f"{message}, as the kernel has {kernel.outs} outs")


def _parameter(name: str, words: str, next_buffer: int) -> Parameter:
    attribute = re.search(r"\[\[\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*\]\]", words)
    plain = " ".join(re.sub(r"\[\[.*?\]\]", "", words).split())
    if attribute is None or attribute[1] == "buffer":
        if not re.search(r"\b(device|constant)\b[^*&]*[*&]", plain):
            expected = "a device or constant pointer, or an attribute such as [[buffer(0)]]"
            raise SignatureError(f"{name}: parameter '{plain}'; expected {expected}")
        return Parameter(plain, "buffer", next_buffer if attribute is None else int(attribute[2]))
    if attribute[1] not in PLACES | NUMBERS:
        raise SignatureError(f"{name}: attribute {attribute[1]}; expected buffer, {', '.join([*PLACES, *NUMBERS])}")
    return Parameter(plain, attribute[1])


def _closing(code: str, start: int) -> int:
    depth = 0
    for at in range(start, len(code)):
        depth += (code[at] == "(") - (code[at] == ")")
        if depth == 0:
            return at
    raise SignatureError("a parenthesis is not closed")


def _split(parameters: str) -> list[str]:
    depth, parts = 0, [""]
    for letter in parameters:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def mark_shared(text: str, mark: str) -> str:
    """Puts `mark` before variables such as `threadgroup float s[8];`: a macro could not tell variables from pointers."""
    code = without_comments(text)
    if hidden := _SHARED_IN_MACRO.search(code):
        raise SignatureError(
            f"a variable in threadgroup memory in a macro, where the emulator does not find it: {hidden[0]!r}; declare it outside"
        )
    out, at = [], 0
    for variable in _SHARED.finditer(code):
        start = variable.start("what") - len("threadgroup")
        out += [text[at:start], mark]
        at = variable.start("what")
    return "".join([*out, text[at:]])


def entry(signature: Signature) -> str:
    """C++ that reads a kernel's arguments from an array of addresses and calls it for one thread of the core."""
    values = []
    for p in signature.parameters:
        if p.attribute == "buffer":
            kind = "EmulatedPointer" if "*" in p.declaration else "EmulatedReference"
            values.append(f"{kind}{{((const unsigned long *)arguments)[{p.index}]}}")
        elif p.attribute in PLACES:
            places = ", ".join(f"metal_place({PLACES[p.attribute]}, {i})" for i in range(3))
            values.append(f"EmulatedPlace{{{{{places}}}}}")
        else:
            values.append(f"EmulatedNumber{{metal_number({NUMBERS[p.attribute]})}}")
    exported = 'extern "C" __attribute__((visibility("default")'
    return (
        f"\n{exported})) const int gpu_bounds_{signature.name} = ({signature.max_threads or 1024});"
        f"\n{exported}, disable_sanitizer_instrumentation)) void metal_entry_{signature.name}(unsigned long arguments) "
        f"{{ {signature.name}({', '.join(values)}); }}\n"
    )
