"""Finds in a kernel's text, without a Mac, what Metal forbids or what it means differently from C++.

`lint` checks clang's syntax tree of the text (metal_spaces.py) where meaning counts, the preprocessed tokens where Metal's own grammar
counts, and the kernel's signature. The rules are those of the Metal Shading Language Specification, version 3.0, and of tinygrad's Metal
device, which binds buffers only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.emulator.emulate import EmulatorError, declared
from tests.emulator.metal import NUMBERS, PLACES, Signature, SignatureError, preprocessed, signatures
from tests.emulator.metal_spaces import read

MAX_BUFFERS, MAX_THREADS, MAX_SHARED = 31, 1024, 32 * 1024


def lint(text: str, threads: int = 32) -> list[str]:
    """All problems of a kernel's full text, its constants first, when it is launched with `threads` threads a threadgroup."""
    try:
        problems = _signatures(signatures(text), threads)
    except SignatureError as error:
        return [str(error)]
    problems += _words(text) + _bounds(text, threads)
    errors, tree = read(text)
    if errors:
        return [*problems, f"compiler error: {errors}"]
    nodes = list(_nodes(tree))
    problems += _forbidden(nodes) + _variables(nodes) + _recursion(nodes)
    problems += _shared_size(text)
    return list(dict.fromkeys(problems))


# --- signatures


def _signatures(kernels: list[Signature], threads: int) -> list[str]:
    if not kernels:
        return ["no kernel: expected 'kernel void NAME('"]
    problems = []
    if not 1 <= threads <= MAX_THREADS:
        problems.append(f"{threads} threads a threadgroup; expected 1 to {MAX_THREADS}")
    for kernel in kernels:
        if len(kernel.buffers) > MAX_BUFFERS or max(kernel.buffers, default=0) >= MAX_BUFFERS:
            problems.append(f"{kernel.name}: {len(kernel.buffers)} buffers; expected at most {MAX_BUFFERS}, numbered from 0")
        types = {p.declaration.split()[0] for p in kernel.parameters if p.attribute in PLACES}
        if len(types) > 1 or not types <= {"uint", "uint2", "uint3", "ushort", "ushort2", "ushort3"}:
            message = f"positions of types {', '.join(sorted(types))}"
            problems.append(f"{kernel.name}: {message}; expected one of uint, uint2, uint3 or ushort's for all")
        for p in kernel.parameters:
            if p.attribute in NUMBERS and p.declaration.split()[0] not in ("uint", "ushort"):
                problems.append(f"{kernel.name}: '{p.declaration}' for {p.attribute}; expected uint or ushort")
    return problems


def _bounds(text: str, threads: int) -> list[str]:
    """Without a bound of its own, a kernel that needs many registers may have fewer threads than it is launched with."""
    kernels = signatures(text)
    unbounded = [kernel.name for kernel in kernels if not kernel.max_threads]
    if unbounded:
        return [f"{name}: no [[max_total_threads_per_threadgroup(N)]]" for name in unbounded]
    try:
        bounds, _ = declared(text)
    except EmulatorError as error:
        return [str(error)]
    wrong = [kernel.name for kernel in kernels if bounds[kernel.name] < threads]
    return [f"{name}: max_total_threads_per_threadgroup({bounds[name]}); expected at least {threads}" for name in wrong]


def _shared_size(text: str) -> list[str]:
    try:
        _, size = declared(text)
    except EmulatorError as error:
        return [str(error)]
    return [f"{size} bytes of threadgroup memory; expected at most {MAX_SHARED}"] if size > MAX_SHARED else []


# --- tokens

_SPACES = {"device", "constant", "thread", "threadgroup", "threadgroup_imageblock", "ray_data", "object_data"}
_NUMBER = ["bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float"]
_FIXED = [f"{u}int{n}_t" for u in ("", "u") for n in (8, 16, 32, 64)]
_NAMES = {f"{packed}{name}{n}" for packed in ("", "packed_") for name in _NUMBER for n in (2, 3, 4)} | {*_NUMBER, *_FIXED, "void", "auto"}
_LIBRARY_NAMES = {"atomic_int", "atomic_uint", "atomic_float", "simdgroup_float8x8", "simdgroup_half8x8", "simdgroup_bfloat8x8"}
_TOKEN = re.compile(r"[A-Za-z_]\w*|\.?\d(?:[eE][+-]|[\w.])*|::|->|&&|\|\||<<|>>|[^\s\w]")


@dataclass(frozen=True)
class Word:
    text: str
    line: int


def _words(text: str) -> list[str]:
    words = [Word(token, line) for line, row in preprocessed(text) for token in _TOKEN.findall(re.sub(r'"(\\.|[^"])*"', '""', row))]
    types = _NAMES | _LIBRARY_NAMES
    for before, word in zip(words, words[1:]):
        if before.text in ("struct", "class", "union", "enum", "typename", "using"):
            types.add(word.text)
    for i, word in enumerate(words):
        if word.text == "typedef":
            end = next((k for k in range(i, len(words)) if words[k].text == ";"), i)
            types.add(words[end - 1].text)
    problems = _idle_atomics(words)
    for i, word in enumerate(words):
        problems += _size_rule(words, i) + _space_rule(words, i, types)
        if word.text in ("asm", "__asm__", "register", "thread_local", "try", "throw", "catch", "typeid", "dynamic_cast", "mutable"):
            problems.append(f"line {word.line}: {word.text} is not part of Metal")
        if re.fullmatch(r"(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?[lL]?", word.text):
            problems.append(f"line {word.line}: {word.text} is a double; expected {word.text}f")
    return problems


# Read-modify-writes that change nothing by these values: LLVM may make plain loads of them, which bring no newer value.
_ALL = 0xFFFFFFFF
_IDLE_VALUES = {
    "add": (0,), "sub": (0,), "or": (0,), "xor": (0,), "and": (_ALL,), "min": (_ALL, 0x7FFFFFFF), "max": (0, 0x80000000),
}  # fmt: skip
_LIMITS = {"UINT_MAX": "0xFFFFFFFF", "INT_MAX": "0x7FFFFFFF", "INT_MIN": "(-0x80000000)", "true": "1", "false": "0"}


def _idle_atomics(words: list[Word]) -> list[str]:
    constants = dict(_LIMITS)
    for i in range(len(words) - 2):
        if words[i + 1].text == "=" and "constexpr" in {word.text for word in words[max(0, i - 4) : i]}:
            end = next((k for k in range(i, len(words)) if words[k].text == ";"), i)
            constants[words[i].text] = " ".join(word.text for word in words[i + 2 : end])
    problems = []
    for i, word in enumerate(words):
        name = re.fullmatch(r"atomic_fetch_(\w+)_explicit", word.text)
        if not name or i + 1 >= len(words) or words[i + 1].text != "(":
            continue
        value = _constant(_second_argument(words, i + 1), constants)
        if value is not None and value & _ALL in _IDLE_VALUES.get(name[1], ()):
            message = f"{word.text} by {value} changes nothing, and may become a plain load that brings no newer value"
            problems.append(f"line {word.line}: {message}; expected atomic_exchange_explicit, or a load where any value will do")
    return problems


def _second_argument(words: list[Word], start: int) -> list[str]:
    """The tokens between the first and the second comma of the arguments in parentheses from `start` on."""
    depth, commas, found = 0, 0, []
    for word in words[start:]:
        depth += (word.text in ("(", "[", "{")) - (word.text in (")", "]", "}"))
        if depth == 0:
            break
        if word.text == "," and depth == 1:
            commas += 1
        elif commas == 1:
            found.append(word.text)
    return found


def _constant(tokens: list[str], constants: dict[str, str], depth: int = 0) -> int | None:
    """The value of an expression of numbers and known constants; None if it is no such expression."""
    text = re.sub(r"\( *(?:uint|int|float|ulong|long) *\)|\b(?:uint|int|float)\b(?= *\()", "", " ".join(tokens))
    text = re.sub(r"\b(0[xX][0-9a-fA-F]+|\d+)[uUlL]*\b(?! *\.)", r"\1", re.sub(r"(\d\.\d*|\.\d+)[fFhH]", r"\1", text))
    for name in set(re.findall(r"[A-Za-z_]\w*", re.sub(r"0[xX]\w+", "", text))):
        if name not in constants or depth > 8:
            return None
        value = _constant(_TOKEN.findall(constants[name]), constants, depth + 1)
        if value is None:
            return None
        text = re.sub(rf"\b{name}\b", f"({value})", text)
    if not re.fullmatch(r"[0-9a-fA-FxX.~+*|&^()<> -]+", text):
        return None
    try:
        return int(eval(text, {"__builtins__": {}}))
    except (SyntaxError, TypeError, ValueError):
        return None


def _size_rule(words: list[Word], i: int) -> list[str]:
    word, following = words[i], words[i + 1].text if i + 1 < len(words) else ""
    if word.text == "long" and following in ("long", "int", "unsigned", "double"):
        return [f"line {word.line}: {word.text} {following} is of unclear size; expected long or ulong, which have 64 bits"]
    if word.text in ("unsigned", "signed", "wchar_t", "size_t", "ptrdiff_t"):
        return [f"line {word.line}: {word.text} is of unclear size; expected uint, ushort, uchar, ulong or int8_t to int64_t"]
    if word.text == "char":
        return [f"line {word.line}: plain char; expected int8_t or uchar, whose sign is explicit"]
    return []


def _space_rule(words: list[Word], i: int, types: set[str]) -> list[str]:
    """A pointer or reference whose declaration names no address space."""
    if words[i].text not in ("*", "&", "&&"):
        return []
    at = i - 1
    if at >= 0 and words[at].text == "(" and i + 2 < len(words) and words[i + 2].text == ")":
        at -= 1  # T (&name)[4]
    while at >= 0 and words[at].text in ("const", "volatile", "*"):
        at -= 1
    if at >= 0 and words[at].text == ">":
        depth = 0
        while at >= 0:
            depth += (words[at].text == ">") - (words[at].text == "<")
            at -= 1
            if depth == 0:
                break
        if at < 0 or words[at].text not in ("vec", "atomic", "simdgroup_matrix", "packed_vec"):
            return []
    elif at < 0 or words[at].text not in types:
        return []
    start = at
    while start >= 0 and words[start].text not in ("(", ",", ";", "{", "}", "<", ">", "=", "return"):
        start -= 1
    if _SPACES & {word.text for word in words[start + 1 : i]}:
        return []
    what = " ".join(word.text for word in words[start + 1 : i + 2])
    return [f"line {words[i].line}: '{what}' names no address space; expected device, constant, threadgroup or thread"]


# --- the syntax tree


@dataclass(frozen=True)
class Node:
    """`depth`: column of its kind. `line`: of the text, 0 where unknown."""

    depth: int
    kind: str
    address: str
    rest: str
    line: int


def _nodes(tree: list[str]) -> Iterator[Node]:
    own, line = True, 0
    for row in tree:
        match = re.match(r"([ |`-]*)(\w+)(?: (0x[0-9a-f]+))?(.*)", row)
        if match is None:
            continue
        span = re.match(r"[^<]*<(.*?)>(?: |$)", match[4].replace("<stdin>", "stdin"))
        for file, number in re.findall(r"([\w./-]+):(\d+):\d+", span[1] if span else ""):
            own = own if file == "line" else file == "stdin"
            if own:
                line = int(number)
        yield Node(len(match[1]), match[2], match[3] or "", match[4], line)


_FORBIDDEN = {
    "GotoStmt": "goto", "LabelStmt": "a label", "CXXNewExpr": "new", "CXXDeleteExpr": "delete", "LambdaExpr": "a lambda",
    "CXXThrowExpr": "throw", "CXXTryStmt": "try", "CXXDynamicCastExpr": "dynamic_cast", "CXXTypeidExpr": "typeid", "GCCAsmStmt": "asm",
}  # fmt: skip


def _forbidden(nodes: list[Node]) -> list[str]:
    problems = [f"line {node.line}: {_FORBIDDEN[node.kind]} is forbidden" for node in nodes if node.kind in _FORBIDDEN]
    # the tree lists the bases of a class after its definition
    return problems + [f"line {n.line}: a derived class is forbidden" for n in nodes if n.kind in ("public", "private", "protected")]


def _variables(nodes: list[Node]) -> list[str]:
    """Variables that outlive a call must be in constant memory."""
    problems = []
    above: list[Node] = []
    for node in nodes:
        while above and above[-1].depth >= node.depth:
            above.pop()
        name, kind = re.search(r"(\w+) '", node.rest), re.search(r"'([^']*)'", node.rest)
        if node.kind == "VarDecl" and name and kind and "__constant" not in kind[1]:
            inside = any(n.kind in ("FunctionDecl", "CXXMethodDecl") for n in above)
            if not inside:
                problems.append(f"line {node.line}: {name[1]} is a global variable; expected one in constant")
            elif re.search(r"' static\b", node.rest):
                problems.append(f"line {node.line}: {name[1]} is a static variable of a function")
        above.append(node)
    return problems


def _recursion(nodes: list[Node]) -> list[str]:
    first: dict[str, str] = {}  # a declaration's address to that of the function's first
    names: dict[str, str] = {}
    calls: dict[str, set[str]] = {}
    functions: list[Node] = []
    for node in nodes:
        while functions and functions[-1].depth >= node.depth:
            functions.pop()
        if node.kind in ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl"):
            before = re.search(r"\bprev (0x[0-9a-f]+)", node.rest)
            first[node.address] = first.get(before[1], before[1]) if before else node.address
            name = re.search(r"(\w+) '", node.rest)
            names[first[node.address]] = name[1] if name else "?"
            functions.append(node)
        for called in re.findall(r"\b(?:Function|CXXMethod|method\w*|[.>]\w+) (0x[0-9a-f]+)", node.rest) if functions else []:
            calls.setdefault(first[functions[0].address], set()).add(called)
    edges = {f: {first.get(c, c) for c in called} for f, called in calls.items()}
    problems = []
    for start in edges:
        reached, todo = set(), list(edges[start])
        while todo:
            at = todo.pop()
            if at not in reached:
                reached.add(at)
                todo += edges.get(at, ())
        if start in reached:
            problems.append(f"{names[start]} calls itself, perhaps through other functions: recursion is forbidden")
    return problems
