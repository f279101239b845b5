"""Faults of Metal kernels are reported, and the corrected kernels are not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.emulate import EmulatorError, emulate_source
from tests.emulator.metal import SignatureError
from tests.emulator.metal_snippets import full, run

SEEDS = range(4)

# name: a kernel with {}, what makes it wrong, what makes it right, the expected message, threads
FAULTS = {
    "missing barrier": (
        "device float *out, device const float *in) {{ threadgroup float s[64]; s[index] = in[index]; {} out[index] = s[63 - index]; }}",
        "", "threadgroup_barrier(mem_flags::mem_threadgroup);", "race|never written", 64,
    ),
    "barrier of the wrong memory": (
        "device float *out, device const float *in) {{ threadgroup float s[64]; s[index] = in[index]; "
        "threadgroup_barrier(mem_flags::{}); out[index] = s[63 - index]; }}",
        "mem_device", "mem_threadgroup", "race|never written", 64,
    ),
    "barrier of no memory": (
        "device float *out, device const float *in) {{ threadgroup float s[64]; s[index] = in[index]; "
        "threadgroup_barrier(mem_flags::{}); out[index] = s[63 - index]; }}",
        "mem_none", "mem_threadgroup | mem_flags::mem_device", "race|never written", 64,
    ),
    "device memory after a barrier for threadgroup memory": (
        "device float *out, device const float *in) {{ out[index] = in[index]; threadgroup_barrier(mem_flags::{}); "
        "float other = out[63 - index]; threadgroup_barrier(mem_flags::mem_device); out[index] = other; }}",
        "mem_threadgroup", "mem_device", "race", 64,
    ),
    "simd barrier where a threadgroup's is needed": (
        "device float *out, device const float *in) {{ threadgroup float s[64]; s[index] = in[index]; "
        "{}(mem_flags::mem_threadgroup); out[index] = s[63 - index]; }}",
        "simdgroup_barrier", "threadgroup_barrier", "race|never written", 64,
    ),
    "a shuffle is no barrier": (
        "device float *out, device const float *in) {{ threadgroup float s[32]; s[lane] = in[lane]; {} out[lane] = s[31 - lane]; }}",
        "simd_sum(1.0f);", "simdgroup_barrier(mem_flags::mem_threadgroup);", "race|never written", 32,
    ),
    "matrix stored and loaded without a barrier": (
        "device float *out, device const float *in) {{ threadgroup float s[64]; simdgroup_float8x8 m; simdgroup_load(m, in); "
        "simdgroup_store(m, s); {} simdgroup_load(m, s); simdgroup_store(m, out); }}",
        "", "simdgroup_barrier(mem_flags::mem_threadgroup);", "race", 32,
    ),
    "divergent sum": (
        "device float *out, device const float *in) {{ {} out[index] = simd_sum(in[index]); else out[index] = simd_sum(-in[index]); }}",
        "if (lane < 7)", "if (in[0] < 7)", "no thread can continue.*simd_sum", 32,
    ),
    "sum of some lanes only": (
        "device float *out, device const float *in) {{ {} out[index] = simd_sum(in[index]); "
        "uint most = simd_max(lane); if (lane == 5) out[100] = most; }}",
        "if (lane < 7)", "", "no thread can continue.*simd_(sum|max)", 32,
    ),
    "divergent barrier": (
        "device float *out, device const float *in) {{ out[index] = in[index]; {} threadgroup_barrier(mem_flags::mem_device); }}",
        "if (index != 5)", "", "no thread can continue|returned", 64,
    ),
    "barrier after some threads have returned": (
        "device float *out, device const float *in) {{ if ({}) return; threadgroup_barrier(mem_flags::mem_none); "
        "out[index] = in[index]; }}",
        "simd == 1", "group.x == 1", "no thread can continue.*returned", 64,
    ),
    "divergent matrix product": (
        "device float *out, device const float *in) {{ simdgroup_float8x8 m; simdgroup_load(m, in); "
        "{} simdgroup_multiply_accumulate(m, m, m, m); simdgroup_store(m, out); }}",
        "if (lane != 3)", "", "no thread can continue.*simdgroup", 32,
    ),
    "matrix at different addresses in different lanes": (
        "device float *out, device const float *in) {{ simdgroup_float8x8 m; simdgroup_load(m, in + {}); simdgroup_store(m, out); }}",
        "lane % 2", "simd", "same address in all lanes", 32,
    ),
    "broadcast from different lanes": (
        "device float *out, device const float *in) {{ out[index] = simd_broadcast(in[index], ushort({})); }}",
        "lane", "3", "same lane number", 32,
    ),
    "shuffle from a lane that has returned": (
        "device float *out, device const float *in) {{ if (lane >= 16) return; out[index] = simd_shuffle_xor(in[index], {}); }}",
        "16", "8", "which has returned", 32,
    ),
    "threadgroup memory overrun": (
        "device float *out, device const float *in) {{ threadgroup float s[32], t[32]; threadgroup float *p = s; "
        "p[index + {}] = 1.0f; t[index] = 2.0f; "
        "threadgroup_barrier(mem_flags::mem_threadgroup); out[index] = s[index] + t[index] + in[index]; }}",
        "in[0] == 1.0f ? 33 : 0", "0", "out of bounds|race|never written", 32,
    ),
    "index beyond a threadgroup array": (
        "device float *out, device const float *in) {{ threadgroup float s[32]; s[index + {}] = 1.0f; "
        "out[index] = s[index] + in[index]; }}",
        "1", "0", "out of bounds|never written|race", 32,
    ),
    "reading beyond an input": (
        "device float *out, device const float *in) {{ out[index] = in[index + {}]; }}",
        "65", "64", "out of bounds.*argument 1", 64,
    ),
    "writing beyond an output": (
        "device float *out, device const float *in) {{ out[index + {}] = in[index]; }}",
        "65", "64", "out of bounds.*argument 0", 64,
    ),
    "writing before an output": (
        "device float *out, device const float *in) {{ out[int(index) - {}] = in[index]; }}",
        "1", "0", "out of bounds.*argument 0", 64,
    ),
    "matrix beyond an input": (
        "device float *out, device const float *in) {{ simdgroup_float8x8 m; simdgroup_load(m, in, {}); simdgroup_store(m, out); }}",
        "18", "8", "out of bounds.*argument 1", 32,
    ),
    "misaligned vector": (
        "device float *out, device const float *in) {{ device const float4 *p = (device const float4 *)(in + {}); "
        "float4 v = p[index % 4]; out[index] = v.x; }}",
        "1", "4", "misaligned", 32,
    ),
    "misaligned half vector written": (
        "device float *out, device const float *in) {{ *(device half2 *)((device half *)out + 2 * index + {}) = half2(in[index]); }}",
        "1", "0", "misaligned", 32,
    ),
    "writing a device const": (
        "device float *out, device const float *in) {{ ((device float *){})[index] = 1.0f; out[index] = in[index]; }}",
        "in", "out", "writes to argument 1, which is read-only", 32,
    ),
    "two lanes write one word": (
        "device float *out, device const float *in) {{ out[index / {}] = in[index]; }}",
        "2", "1", "race", 32,
    ),
    "unwritten threadgroup memory": (
        "device float *out, device const float *in) {{ threadgroup float s[32]; if (lane {}) s[lane] = in[lane]; "
        "threadgroup_barrier(mem_flags::mem_threadgroup); out[lane] = s[31 - lane]; }}",
        "> 0", ">= 0", "never written", 32,
    ),
    "plain and atomic": (
        "device atomic_uint *out, device const float *in) {{ {} }}",
        "atomic_fetch_add_explicit(out, 1, memory_order_relaxed); if (index == 0) *(device uint *)out = 0;",
        "atomic_fetch_add_explicit(out, 1, memory_order_relaxed); if (index == 0) atomic_store_explicit(out, 0, memory_order_relaxed);",
        "race", 32,
    ),
    "an atomic orders nothing": (
        "device atomic_uint *out, device const float *in) {{ threadgroup float s[1]; threadgroup atomic_uint ready; "
        "if (index == 32) {{ s[0] = in[0]; atomic_store_explicit(&ready, 1, memory_order_relaxed); }} {} "
        "if (index == 0 && atomic_load_explicit(&ready, memory_order_relaxed) == 1) "
        "atomic_store_explicit(out, uint(s[0]), memory_order_relaxed); }}",
        "if (index == 0) while (atomic_load_explicit(&ready, memory_order_relaxed) != 1) {}",
        "threadgroup_barrier(mem_flags::mem_threadgroup);", "race|never written", 64,
    ),
}  # fmt: skip


def _run(name: str, which: int, seed: int) -> None:
    text, *pieces, _, threads = FAULTS[name]
    out, x = np.full(128, np.nan, np.float32), np.ones(128, np.float32)
    run(text.format(pieces[which]), out, x, block=threads, seed=seed)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(name: str) -> None:
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=f"(?s){FAULTS[name][3]}"):
            _run(name, 0, seed)


@pytest.mark.parametrize("name", FAULTS)
def test_the_corrected_kernel_runs(name: str) -> None:
    for seed in SEEDS:
        _run(name, 1, seed)


@pytest.mark.parametrize("how", ["plain", "atomic"])
def test_two_threadgroups_write_the_same_word(how: str) -> None:
    stored = "atomic_store_explicit((device atomic_float *)out, 1.0f, memory_order_relaxed);"
    words = {"plain": "out[group.x / 2] = 1.0f;", "atomic": stored}
    text = f"device float *out, device const float *in) {{ if (index == 0) {{ {words[how]} }} }}"
    for seed in SEEDS:
        if how == "atomic":
            run(text, np.zeros(8, np.float32), np.zeros(8, np.float32), grid=6, seed=seed)
            continue
        with pytest.raises(EmulatorError, match="race"):
            run(text, np.zeros(8, np.float32), np.zeros(8, np.float32), grid=6, seed=seed)


def test_one_threadgroup_reads_what_another_writes() -> None:
    text = "device float *out) { if (index == 0) out[group.x] = out[(group.x + 1) % 6] + 1.0f; }"
    with pytest.raises(EmulatorError, match="race.*block"):
        run(text, np.zeros(8, np.float32), grid=6)


@pytest.mark.parametrize(
    ("declared", "block", "shared", "message"),
    [
        ("threadgroup float s[8193];", (32, 1, 1), 0, "threadgroup|shared memory declared"),
        ("threadgroup float s[8192];", (32, 1, 1), 16, "dynamic"),
        ("threadgroup float s[8192];", (33, 32, 1), 0, "threads in a block"),
    ],
)
def test_limits_of_the_gpu(declared: str, block: tuple[int, int, int], shared: int, message: str) -> None:
    text = full(f"device float *out) {{ {declared} s[index % 32] = 0.0f; }}")
    with pytest.raises(EmulatorError, match=message):
        emulate_source(text, "k", (1, 1, 1), block, shared, [0], [], language="metal")
    assert "[[max_total_threads" not in text
    bounded = text.replace("kernel void", "[[max_total_threads_per_threadgroup(16 * 2)]] kernel void").replace("8193", "64")
    with pytest.raises(EmulatorError, match="at most 32"):
        emulate_source(bounded, "k", (1, 1, 1), (64, 1, 1), 0, [0], [], language="metal")


def test_a_threadgroup_variable_after_a_preprocessor_line_is_shared() -> None:
    text = """device float *out, device const float *in) {
#if 1
      threadgroup float s[64];
#endif
      s[index] = in[index];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      out[index] = s[63 - index];
    }"""
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    run(text, out, x, block=64)
    assert (out == x[::-1]).all()


@pytest.mark.parametrize("new_line", ["", " \\\n"])
def test_a_threadgroup_variable_in_a_macro_is_refused(new_line: str) -> None:
    """It would be each thread's own: only its text marks it."""
    text = (
        f"#define TILE(n) {new_line} threadgroup float s[n]\n---device float *out) {{ TILE(64); s[index] = 0.0f; out[index] = s[index]; }}"
    )
    with pytest.raises(SignatureError, match="in a macro.*declare it outside"):
        run(text, np.zeros(64, np.float32), block=64)


def test_thread_is_a_keyword() -> None:
    text = full("device float *out) { }").replace("uint index [[", "uint thread [[").replace("{ }", "{ out[thread] = 0.0f; }")
    with pytest.raises(EmulatorError, match="compiler failed"):
        emulate_source(text, "k", (1, 1, 1), (32, 1, 1), 0, [0], [], language="metal")
