"""Each rule of the lint reports what it forbids, and not what looks similar and is allowed."""

from __future__ import annotations

import re

import pytest

from tests.emulator.metal_lint import lint
from tests.emulator.metal_snippets import full
from tests.emulator.metal_spaces import compiler_errors

CLEAN = """constant constexpr int N = 4;
constant float table[2] = {1.0f, 2.5e-3f};
struct Sums { float4 o[N]; float top; float best() const { return top; } };
template <int A> INLINE float twice(float x) { return A > 1 ? x + x : x; }
INLINE float same(float x) { return x; }
INLINE float2 same(float2 x) { return float2(same(x.x), same(x.y)); }
INLINE void add(threadgroup float *s, thread float (&x)[N], thread const Sums &sums) { s[0] += x[0] * sums.best(); }
INLINE float first(device const packed_float4 *p) { return float4(p[0]).x; }
---device float *out, device const float *in, device const half4 *more) {
  threadgroup float s[N * 32];
  threadgroup Sums all[2];
  threadgroup float *p = s + 1;
  float x[N] = {1.0h, 2.0f};
  Sums sums, other = sums;
  simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  m.thread_elements()[0] = 1.0f;
  const auto from = in + index * 2;
  add(p, x, sums);
  all[0].top = other.best();
  simdgroup_load(m, s, 8);
  simdgroup_store(m, out, 8);
  out[0] = twice<2>(float4(more[0]).y) + same(float2(1.0f)).x + first((device const packed_float4 *)from) + table[1] + 1e-5f;
}"""

OUT = "---device float *out) "
SAME = f"INLINE float f(float x) {{ return x; }}\n{OUT}"

# rule: text, expected problem. Helper functions before ---
FORBIDDEN = {
    "recursion": (
        "INLINE float f(float x) { return x > 1.0f ? f(x * 0.5f) : x; }\n" + OUT + "{ out[0] = f(out[0]); }",
        "calls itself",
    ),
    "recursion through another function": (
        "float g(float x);\nINLINE float f(float x) { return g(x); }\nINLINE float g(float x) { return f(x); }\n"
        "---device float *out) { out[0] = f(out[0]); }", "f calls itself",
    ),
    "recursion of a template": (
        "template <int A> INLINE float f(float x) { return x > 1.0f ? f<A>(x - A) : x; }\n" + OUT + "{ out[0] = f<2>(out[0]); }",
        "calls itself",
    ),
    "function pointer": (SAME + "{ float (*p)(float) = f; out[0] = p(1.0f); }", "function"),
    "function pointer by auto": (SAME + "{ auto p = f; out[0] = p(1.0f); }", "function"),
    "double": ("device float *out) { double x = 1.0f; out[0] = x; }", "double"),
    "double literal": ("device float *out) { out[0] = out[1] * 1.5; }", "1.5 is a double"),
    "double literal with an exponent": ("device float *out) { out[0] = 1e-5; }", "1e-5 is a double"),
    "array of variable length": ("device float *out) { int n = int(out[0]); float x[n]; out[1] = x[0]; }", "array size|variable length"),
    "too many buffers": (", ".join(f"device float *a{i}" for i in range(32)) + ") { a0[0] = 1.0f; }", "32 buffers"),
    "too much threadgroup memory": (
        "device float *out) { threadgroup float s[8192]; threadgroup uint t[1]; s[index] = t[0] = 1; out[0] = s[0]; }", "32772 bytes",
    ),
    "plain char": ("device float *out) { char c = 1; out[0] = c; }", "plain char"),
    "long long": ("device float *out) { long long c = 1; out[0] = c; }", "unclear size"),
    "unsigned long": ("device float *out) { unsigned long c = 1; out[0] = c; }", "unclear size"),
    "size_t": ("device float *out) { size_t c = 1; out[0] = c; }", "unclear size"),
    "goto": ("device float *out) { if (index > 1) goto end; out[0] = 1.0f; end: out[1] = 2.0f; }", "goto"),
    "new": ("device float *out) { out[0] = *new float(1.0f); }", "new|compiler error"),
    "virtual": ("struct A { virtual float f() { return 1.0f; } };\n" + OUT + "{ A a; out[0] = a.f(); }", "virtual"),
    "derived class": (
        "struct A { int x; };\nstruct B : A { int y; };\n" + OUT + "{ B b; b.x = 1; out[0] = b.x; }",
        "derived",
    ),
    "exception": ("device float *out) { if (index) throw 1; out[0] = 1.0f; }", "throw|exceptions"),
    "lambda": ("device float *out) { auto f = [](float x) { return x; }; out[0] = f(1.0f); }", "lambda"),
    "static local": ("device float *out) { static int n; out[0] = n++; }", "static"),
    "global variable": ("int counter;\n" + OUT + "{ out[0] = counter; }", "global variable"),
    "asm": ('device float *out) { asm("nop"); out[0] = 1.0f; }', "asm"),
    "pointer without an address space": ("device float *out) { float x[2]; float *p = x; out[0] = p[0]; }", "names no address space"),
    "parameter without an address space": (
        "INLINE float f(const float *p) { return p[0]; }\n" + OUT + "{ out[0] = f(out); }", "names no address space",
    ),
    "reference to an array without an address space": (
        "INLINE float f(float (&p)[2]) { return p[0]; }\n" + OUT + "{ float x[2]; out[0] = f(x); }", "names no address space",
    ),
    "threadgroup memory in a function": (
        "INLINE float f(float x) { threadgroup float s[2]; s[0] = x; return s[1]; }\n" + OUT + "{ out[0] = f(1.0f); }", "address space",
    ),
    "threadgroup memory in an inner scope": (
        "device float *out) { if (index) { threadgroup float s[2]; s[0] = out[0]; } }", "outermost scope",
    ),
    "threadgroup memory with a value": ("device float *out) { threadgroup float s = 1.0f; out[0] = s; }", "initializer"),
    "if constexpr": ("device float *out) { if constexpr (LANES > 3) out[0] = 1.0f; }", "constexpr if"),
}  # fmt: skip

# Pointers and values of the wrong address space
SPACES = {
    "threadgroup to device": "threadgroup float s[4]; device float *p = s; p[0] = 1.0f;",
    "device to threadgroup": "threadgroup float *p = out; p[0] = 1.0f;",
    "device to a threadgroup parameter": "shared(out);",
    "thread to a device parameter": "float x[4]; plain(x);",
    "thread to a threadgroup reference": "Sums sums; fill(sums);",
    "a cast": "threadgroup float s[4]; plain((device float *)s);",
    "device const to device": "plain(in);",
    "writing through const": "in[0] = 1.0f;",
    "a matrix out of registers": "float x[64]; simdgroup_float8x8 m; simdgroup_load(m, x, 8);",
    "an atomic of a thread's": "atomic_uint n; atomic_fetch_add_explicit(&n, 1, memory_order_relaxed);",
    "constant to device": "device const float *p = table; out[0] = p[0];",
}
HELPERS = """constant float table[2] = {1.0f, 2.0f};
struct Sums { float top; };
INLINE void shared(threadgroup float *p) { p[0] = 1.0f; }
INLINE void plain(device float *p) { p[0] = 1.0f; }
INLINE void fill(threadgroup Sums &sums) { sums.top = 0.0f; }
---device float *out, device const float *in) { BODY }"""


def bounded(text: str, threads: int = 1024) -> str:
    """A snippet as a kernel with a bound of threads."""
    return full(text).replace("kernel void", f"[[max_total_threads_per_threadgroup({threads})]] kernel void")


def test_a_clean_kernel_passes() -> None:
    assert lint(bounded(CLEAN), 1024) == []


def test_a_kernel_needs_a_bound_of_its_threads() -> None:
    text = "device float *out) { out[index] = 1.0f; }"
    assert lint(full(text), 64) == ["k: no [[max_total_threads_per_threadgroup(N)]]"]
    assert lint(bounded(text, 32), 64) == ["k: max_total_threads_per_threadgroup(32); expected at least 64"]
    assert lint(bounded(text, 64), 64) == []


# Atomics that change nothing, and atomics that look similar.
IDLE = [
    "or_explicit(p, 0u",
    "add_explicit(p, 0",
    "sub_explicit(p, NOTHING",
    "xor_explicit(p, uint(0)",
    "and_explicit(p, ~0u",
    "or_explicit(p, ZERO",
    "and_explicit(p, 0xFFFFFFFFu",
    "min_explicit(p, 0xFFFFFFFFu",
    "max_explicit(p, (uint)(1 - 1)",
    "or_explicit(p + min(1, 2), 4u & 3u",
]
BUSY = [
    "or_explicit(p, 1u",
    "add_explicit(p, index * 0",
    "and_explicit(p, 0u",
    "min_explicit(p, 0u",
    "max_explicit(p, 0xFFFFFFFFu",
    "or_explicit(p, ONE",
]


@pytest.mark.parametrize("call", [*IDLE, *BUSY])
def test_an_atomic_that_changes_nothing_is_reported(call: str) -> None:
    helpers = "#define NOTHING 0\nconstant constexpr uint ONE = 1u;\nconstant constexpr uint ZERO = ONE - 1u;\n"
    text = bounded(f"{helpers}---device atomic_uint *p) {{ atomic_fetch_{call}, memory_order_relaxed); }}")
    assert bool([problem for problem in lint(text) if "changes nothing" in problem]) == (call in IDLE)


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_a_forbidden_construct_is_reported(rule: str) -> None:
    text, message = FORBIDDEN[rule]
    problems = "\n".join(lint(full(text)))
    assert re.search(message, problems), problems


def test_launches_and_positions() -> None:
    text = full("device float *out) { out[0] = 1.0f; }")
    assert any("1025 threads" in line for line in lint(text, 1025)) and any("0 threads" in line for line in lint(text, 0))
    mixed = text.replace("uint index [[", "uint at [[thread_position_in_grid]], uint index [[")
    assert any("positions of types uint, uint3" in line for line in lint(mixed))
    assert any("expected uint or ushort" in line for line in lint(text.replace("uint lane", "uint2 lane")))
    assert any("attribute lane_id" in line for line in lint(text.replace("thread_index_in_simdgroup", "lane_id")))
    assert lint("int f() { return 1; }") == ["no kernel: expected 'kernel void NAME('"]


@pytest.mark.parametrize("name", SPACES)
def test_a_pointer_of_the_wrong_address_space_is_an_error(name: str) -> None:
    assert "error" in compiler_errors(full(HELPERS.replace("BODY", SPACES[name])))


def test_pointers_of_the_right_address_space_are_accepted() -> None:
    right = "threadgroup float s[4]; threadgroup Sums sums; shared(s); fill(sums); plain(out); plain((device float *)in); *out = table[1];"
    assert compiler_errors(full(HELPERS.replace("BODY", right))) == ""
