"""The vocabulary of the CPU kernels: every variant has every word, and every word means what lanes_plain.h says it means.

A variant for another architecture runs under qemu, where that is installed.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.calling import FOLDER
from tinyvllm.backends.cpu.toolchain import cpu_features, provide_compiler
from tinyvllm.backends.source import kernels_folder

INCLUDE = kernels_folder() / "cpu" / "include"
FOLDERS = (INCLUDE, kernels_folder() / "include")
VARIANTS = ("plain", "avx2", "avx512", "neon")


@dataclass(frozen=True)
class Build:
    """One way to compile a variant: compiler flags, processor features that it needs to run (None: it is for Arm and runs under qemu)."""

    variant: str
    flags: tuple[str, ...]
    needs: frozenset[str] | None


BUILDS = {
    "plain": Build("plain", (), frozenset()),
    "plain-fused": Build("plain", ("-march=x86-64-v3",), frozenset({"avx2", "fma"})),  # the compiler may fuse products and sums
    "avx2": Build("avx2", ("-march=x86-64-v3",), frozenset({"avx2", "fma", "f16c"})),
    "avxvnni": Build("avx2", ("-march=x86-64-v3", "-mavxvnni"), frozenset({"avx2", "fma", "f16c", "avx_vnni"})),
    "avx512": Build("avx512", ("-march=x86-64-v4",), frozenset({"avx512f"})),
    "avx512-bytes": Build("avx512", ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi"), frozenset({"avx512_bf16", "avx512vbmi"})),
    "avx512-dots": Build("avx512", ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"), frozenset({"avx512_bf16", "avx512_vnni"})),
    "plain-arm": Build("plain", ("-march=armv8-a",), None),
    "neon": Build("neon", ("-march=armv8.2-a+fp16",), None),
    "neon-dots": Build("neon", ("-march=armv8.2-a+fp16+dotprod+bf16",), None),
    "neon-i8mm": Build("neon", ("-march=armv8.2-a+fp16+dotprod+bf16+i8mm",), None),
}

# What is done with one row of inputs for each word. a, b, c: float32 of any bits; f, g: between -8 and 8; n: whole, -126 to 127; o: whole,
# -127 to 127; w: 64 bytes of any bits, also as halves h; x: any 32 bits; p: bfloat16 pairs and y: one pair, none of them large.
EXPRESSIONS = {
    "v16_load": "v16_store(out, v16_load(a))",
    "v16_store": "v16_store(out + 1, v16_load(b))",
    "v16_set": "v16_store(out, v16_set(a[5]))",
    "v16_add": "v16_store(out, v16_add(v16_load(a), v16_load(b)))",
    "v16_sub": "v16_store(out, v16_sub(v16_load(a), v16_load(b)))",
    "v16_mul": "v16_store(out, v16_mul(v16_load(a), v16_load(b)))",
    "v16_div": "v16_store(out, v16_div(v16_load(a), v16_load(b)))",
    "v16_min": "v16_store(out, v16_min(v16_load(a), v16_load(b)))",
    "v16_max": "v16_store(out, v16_max(v16_load(a), v16_load(b)))",
    "v16_fma": "v16_store(out, v16_fma(v16_load(f), v16_load(g), v16_load(n)))",
    "v16_round": "v16_store(out, v16_round(v16_load(a)))",
    "v16_fraction": "v16_store(out, v16_fraction(v16_load(f)))",
    "v16_scale2": "v16_store(out, v16_scale2(v16_load(a), v16_load(n)))",
    "v16_zero_below": "v16_store(out, v16_zero_below(v16_load(a), v16_load(b), v16_load(c)))",
    "v16_abs": "v16_store(out, v16_abs(v16_load(a)))",
    "v16_sum": "out[0] = v16_sum(v16_load(a)), out[1] = v16_sum(v16_load(f))",
    "v16_sum_four": "v16_sum_four(out, (v16[]){v16_load(a), v16_load(f), v16_load(g), v16_load(b)})",
    "v16_max_four": "v16_max_four(out, (v16[]){v16_load(f), v16_load(g), v16_load(n), v16_load(o)})",
    "v16_max_of": "out[0] = v16_max_of(v16_load(f)), out[1] = v16_max_of(v16_load(n))",
    "v16_load_bf16": "v16_store(out, v16_load_bf16(h))",
    "v16_load_f16": "v16_store(out, v16_load_f16(h))",
    "v16_store_bf16": "v16_store_bf16((uint16_t *)out, v16_load(a)), v16_store_bf16((uint16_t *)out + 16, v16_load(f))",
    "v16_store_f16": "v16_store_f16((uint16_t *)out, v16_load(a)), v16_store_f16((uint16_t *)out + 16, v16_load(f))",
    "w16_load": "i16_store(out, i16_dot_u8s8(i16_set(0), w16_load(w), 1u << (r % 4 * 8)))",
    "v16_dot_bf16": "v16_store(out, v16_dot_bf16(v16_load(f), w16_load(p), y))",
    "i16_dot_u8s8": "i16_store(out, i16_dot_u8s8(i16_set((int)x >> 8), w16_load(w), x))",
    "i16_set": "i16_store(out, i16_set((int)x >> 8))",
    "v16_from_i16": "v16_store(out, v16_from_i16(i16_dot_u8s8(i16_set((int)x), w16_load(w), x)))",
    "w16_low_nibbles": "i16_store(out, i16_dot_u8s8(i16_set(0), w16_low_nibbles(w16_load(w)), 1u << (r % 4 * 8)))",
    "w16_high_nibbles": "i16_store(out, i16_dot_u8s8(i16_set(0), w16_high_nibbles(w16_load(w)), 1u << (r % 4 * 8)))",
    "w16_load_halves": "i16_store(out, i16_dot_u8s8(i16_set(0), w16_load_halves(h + 16, h), 1u << (r % 4 * 8)))",
    "i16_dot_u4s8": "i16_store(out, i16_dot_u4s8(i16_set((int)x >> 8), w16_low_nibbles(w16_load(w)), x))",
    "w16_load_u16": "i16_store(out, i16_dot_u8s8(i16_set(0), w16_load_u16(h), 1u << (r % 4 * 8)))",
    "w16_bits": "i16_store(out, i16_dot_u8s8(i16_set(0), w16_bits(w16_load(w), (int)(r % 12) - 4, masks[r % 12]), 1u << (r % 4 * 8)))",
    "w16_lookup": "i16_store(out, i16_dot_u8s8(i16_set(0), w16_lookup(w16_low_nibbles(w16_load(w)), table), 1u << (r % 4 * 8)))",
    "v16_from_bits": "v16_store(out, v16_from_bits(w16_load(w), (int)(r % 7) * 4, 6))",
    "v16_from_s8": "v16_store(out, v16_from_s8(w16_load(w), (int)(r % 4)))",
    "v16_from_e4m3": "v16_store(out, v16_from_e4m3(w16_load(w), (int)(r % 4)))",
    "v16_lookup": "v16_store(out, v16_lookup(w16_load(w), (int)(r % 8) * 4, numbers))",
    "w16_fifth_bits": "i16_store(out, i16_dot_u8s8(i16_set(0), w16_fifth_bits(w16_load(w), r % 8 * 4), 1u << (r % 4 * 8)))",
    "w16_or": "i16_store(out, i16_dot_u8s8(i16_set(0), w16_or(w16_load(w), w16_high_nibbles(w16_load(w))), 1u << (r % 4 * 8)))",
    "v16_store_i8": "v16_store_i8((int8_t *)out, v16_load(o))",
    "v16_first": "v16_store(out, v16_first((int)(x % 17), v16_load(a), v16_load(b)))",
    "w16_transpose": "transposed(out, rows, r, count)",
    "v16_from_w16": "v16_store(out, v16_from_w16(w16_load(w)))",
    "v16_from_low_bf16": "v16_store(out, v16_from_low_bf16(w16_load(w)))",
    "v16_from_high_bf16": "v16_store(out, v16_from_high_bf16(w16_load(w)))",
    "v16_from_low_f16": "v16_store(out, v16_from_low_f16(w16_load(w)))",
    "v16_from_high_f16": "v16_store(out, v16_from_high_f16(w16_load(w)))",
    "v16_round_bf16": "v16_store(out, v16_round_bf16(v16_load(a)))",
    "v16_exp2": "v16_store(out, v16_exp2(v16_mul(v16_abs(v16_load(f)), v16_set(-20))))",
    "v16_exp": "v16_store(out, v16_exp(v16_mul(v16_load(f), v16_set(11))))",
}
ROUNDED_OTHERWISE = {"v16_fma": 2.0**-23, "v16_dot_bf16": 2.0**-22}  # of the sum of what is added, in absolute values
PROBE = """
#include "lanes.h"
// whole numbers below 2^24 are exact in float32; integers are only looked at through them
static const uint8_t table[16] = {{250, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 128}};
static const uint8_t masks[12] = {{240, 248, 252, 254, 255, 127, 63, 31, 15, 7, 3, 1}};  // bits of one byte, shifts from -4
static const float numbers[16] = {{-1, -.7f, -.5f, -.4f, -.3f, -.2f, -.1f, 0, .1f, .2f, .3f, .35f, .45f, .6f, .7f, 1}};
static inline void i16_store(float *out, i16 a) {{ v16_store(out, v16_from_i16(a)); }}
struct row {{ float a[16], b[16], c[16], f[16], g[16], n[16], o[16]; uint16_t h[32], p[32]; uint32_t x, y; uint32_t rest[14]; }};
// row r % 16 of the square of words that begins at row r, or ends at the last row
static inline void transposed(float *out, const struct row *rows, long r, long count) {{
  w16 square[16];
  long first = r + 16 < count ? r : count - 16;
  for (int i = 0; i < 16; i++) square[i] = w16_load(rows[first + i].h);
  w16_transpose(square);
  v16_store(out, v16_from_w16(square[r % 16]));
}}
void probe(const struct row *rows, float *out, long count) {{
  for (long r = 0; r < count; r++) {{
    const float *a = rows[r].a, *b = rows[r].b, *c = rows[r].c, *f = rows[r].f, *g = rows[r].g, *n = rows[r].n, *o = rows[r].o;
    const uint16_t *h = rows[r].h, *p = rows[r].p;
    const uint32_t x = rows[r].x, y = rows[r].y;
    const void *w = h;
    {calls}
  }}
}}
"""
MAIN = """
#include <stdio.h>
#include <stdlib.h>
void probe(const void *, float *, long);
int main(void) {{
  char *in = malloc({size}); float *out = calloc({words} * 17, 4);
  if (fread(in, 1, {size}, stdin) != {size}) return 1;
  probe(in, out, {rows});
  return fwrite(out, 4, {words} * 17, stdout) == {words} * 17 ? 0 : 1;
}}
"""
HALVES, WORDS = [("h", "<u2", 32), ("p", "<u2", 32)], [("x", "<u4"), ("y", "<u4"), ("rest", "<u4", 14)]
ROW = np.dtype([*((name, "<f4", 16) for name in "abcfgno"), *HALVES, *WORDS])
# halfway cases, borders and subnormals of float32, float16 and bfloat16
SPECIAL = [0, 0.5, 1.5, 2.5, 2**22 + 0.5, 2**23 - 0.5, 2**23 + 1, 65504, 65519.99, 65520, 2**-14, 2**-24, 2**-25, 3 * 2**-25, 1e-45, 3e38]
SPECIAL += [-x for x in SPECIAL] + [np.nan, -np.nan, np.inf, -np.inf, 2.0**-126, 1e-40, 6e-8, 1 + 2**-8, 1 + 3 * 2**-8]


def signatures(header: str) -> dict[str, tuple[str, ...]]:
    """Name -> types of result and arguments, of the words that a header has."""
    found = re.findall(r"^static inline ([\w ]+?\*?) ?((?:v16|w16|i16)_\w+)\(([^)]*)\)", (INCLUDE / header).read_text(), re.MULTILINE)
    return {name: (kind, *(re.sub(r"\w+$", "", p.strip()).strip() for p in given.split(","))) for kind, name, given in found}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_has_every_word(variant: str) -> None:
    here = signatures(f"lanes_{variant}.h")
    assert len(here) > 25
    for other in VARIANTS:
        assert signatures(f"lanes_{other}.h") == here


def test_every_word_is_tried() -> None:
    assert set(EXPRESSIONS) == set(signatures("lanes_plain.h")) | set(signatures("lanes.h"))


@functools.cache
def inputs() -> np.ndarray:
    random = np.random.default_rng(0)
    count = 600
    rows = np.zeros(count, ROW)
    for name in "abc":
        bits = random.integers(0, 2**32, (count, 16), np.uint32)
        rows[name] = bits.view(np.float32)
        rows[name][100:300] = random.choice(np.array(SPECIAL, np.float32), (200, 16))
        rows[name][300:400] = random.standard_normal((100, 16)) * 10.0 ** random.integers(-8, 8, (100, 16))
        rows[name][400:450] = random.integers(-20, 20, (50, 16)) / 2  # ties
        rows[name].view(np.uint32)[450:500] = bits[450:500] & 0x80FFFFFF | 0x38000000  # around the smallest float16
        rows[name].view(np.uint32)[500:] = bits[500:] & 0x8FFFF000 | 0x38001000  # ties of float16
    for name in "fg":
        rows[name] = random.uniform(-8, 8, (count, 16))
    rows["n"] = random.integers(-126, 128, (count, 16))
    rows["o"] = random.integers(-127, 128, (count, 16))
    rows["h"] = random.integers(0, 2**16, (count, 32))
    rows["h"][:20] = 0xFFFF  # the largest sums
    rows["x"] = random.integers(0, 2**32, count)
    rows["x"][:20] = 0x7F7F7F7F, 0x80808080, 0x80808080 << 1 & 0xFFFFFFFF, 1, *rows["x"][4:20]
    rows["p"] = random.uniform(-8, 8, (count, 32)).astype(np.float32).view(np.uint32) >> 16
    pairs = random.uniform(-8, 8, (count, 2)).astype(np.float32).view(np.uint32) >> 16
    rows["y"] = pairs[:, 0] | pairs[:, 1] << 16
    return rows


def build(this: Build) -> Path:
    """The probe as a shared object; for another architecture as a program that reads rows and writes results."""
    calls = "\n    ".join(f"{text}, out += 17;" for text in EXPRESSIONS.values())
    text = PROBE.format(calls=calls)
    flags = ["-x", "c", "-O2", "-ffreestanding", f"-DLANES_{this.variant.upper()}", *this.flags]
    sources = [text, *(p.read_text() for folder in FOLDERS for p in sorted(folder.glob("*.h"))), repr(flags)]
    path = FOLDER / f"lanes-{hashlib.sha256(''.join(sources).encode()).hexdigest()[:24]}"
    if path.exists():
        return path
    clang = provide_compiler(FOLDER)
    FOLDER.mkdir(exist_ok=True)
    if this.needs is not None:
        subprocess.run(
            [clang, *flags, *(f"-I{folder}" for folder in FOLDERS), "-shared", "-fPIC", "-", "-o", str(path)],
            input=text.encode(),
            check=True,
        )
        return path
    ziglang = pytest.importorskip("ziglang", reason="the wheel ziglang links programs for other architectures")
    zig, target = str(Path(ziglang.__file__).parent / "zig"), "aarch64-linux-musl"
    probe, main = path.with_suffix(".o"), path.with_suffix(".c")
    subprocess.run(
        [clang, f"--target={target}", *flags, *(f"-I{folder}" for folder in FOLDERS), "-c", "-", "-o", str(probe)],
        input=text.encode(),
        check=True,
    )
    main.write_text(MAIN.format(size=inputs().nbytes, words=len(inputs()) * len(EXPRESSIONS), rows=len(inputs())))
    subprocess.run([zig, "cc", "-target", target, "-static", str(main), str(probe), "-o", str(path)], check=True)
    return path


@functools.cache
def results(name: str) -> dict[str, np.ndarray]:
    """Word -> [rows, 17] uint32, what one build writes: sixteen words and one more, which only a store outside its place reaches."""
    this, count = BUILDS[name], len(inputs())
    if this.needs is None:
        qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
        if not qemu:
            pytest.skip("no qemu-aarch64 (Debian: apt-get install qemu-user)")
        said = subprocess.run([qemu, "-cpu", "max", str(build(this))], input=inputs().tobytes(), stdout=subprocess.PIPE, check=True).stdout
        out = np.frombuffer(said, np.uint32)
    else:
        if not this.needs <= cpu_features():
            pytest.skip(f"this processor has no {', '.join(sorted(this.needs - cpu_features()))}")
        import ctypes

        out = np.zeros(count * len(EXPRESSIONS) * 17, np.uint32)
        ctypes.CDLL(str(build(this))).probe(*(ctypes.c_void_p(x.ctypes.data) for x in (inputs(), out)), ctypes.c_long(count))
    return dict(zip(EXPRESSIONS, out.reshape(count, -1, 17).transpose(1, 0, 2)))


def sum_of_sizes(word: str) -> np.ndarray:
    """[rows, 16]: what a word adds up, in absolute values."""
    rows = inputs()
    if word == "v16_fma":
        return abs(rows["f"] * rows["g"]) + abs(rows["n"])
    low, high = ((rows["y"] << 16).view(np.float32), (rows["y"] & 0xFFFF0000).view(np.float32))
    pairs = (rows["p"].astype(np.uint32) << 16).view(np.float32).reshape(-1, 16, 2)
    return abs(rows["f"]) + abs(pairs[:, :, 0] * low[:, None]) + abs(pairs[:, :, 1] * high[:, None])


@pytest.mark.parametrize("word", EXPRESSIONS)
@pytest.mark.parametrize("name", [n for n in BUILDS if n != "plain"])
def test_a_row_agrees_with_the_plain_one(name: str, word: str) -> None:
    got, wanted = results(name)[word], results("plain")[word]
    a, b = got.view(np.float32), wanted.view(np.float32)
    if word in ROUNDED_OTHERWISE:
        assert (abs(a[:, :16] - b[:, :16]) <= ROUNDED_OTHERWISE[word] * sum_of_sizes(word)).all()
    elif word == "v16_fraction":  # AVX-512 rounds it down
        np.testing.assert_allclose(a, b, rtol=0, atol=2.0**-24)
    elif word in ("v16_exp", "v16_exp2"):
        np.testing.assert_allclose(a, b, rtol=3e-7, atol=0)
    elif word in ("v16_store_bf16", "v16_store_f16", "v16_store_i8"):
        np.testing.assert_array_equal(got, wanted)
    else:  # the bits of a NaN may differ
        np.testing.assert_array_equal(np.where(np.isnan(a), 0, got), np.where(np.isnan(b), 0, wanted))
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))


def plain(word: str) -> np.ndarray:
    return results("plain")[word].view(np.float32)[:, :16]


def test_plain_halves_are_rounded_as_numpy_rounds() -> None:
    with np.errstate(over="ignore"):
        for name, places in (("a", slice(0, 16)), ("f", slice(16, 32))):
            got = results("plain")["v16_store_f16"].view(np.float16)[:, places]
            np.testing.assert_array_equal(got, inputs()[name].astype(np.float16))
    np.testing.assert_array_equal(plain("v16_load_f16"), inputs()["h"][:, :16].copy().view(np.float16).astype(np.float32))


def test_plain_words_are_what_they_say() -> None:
    rows = inputs()
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(plain("v16_round"), np.rint(rows["a"]))
        np.testing.assert_array_equal(plain("v16_fraction"), rows["f"] - np.floor(rows["f"]))
        np.testing.assert_array_equal(plain("v16_scale2"), np.ldexp(rows["a"], rows["n"].astype(int)))
        np.testing.assert_array_equal(plain("v16_zero_below"), np.where(rows["b"] < rows["c"], np.float32(0), rows["a"]))
        exact = np.exp(np.float64(rows["f"] * np.float32(11)))
        negative = abs(rows["f"]) * np.float32(-20)
        powers = np.exp2(np.float64(negative))
    count = len(rows)
    square = np.array([rows["h"].view(np.uint32)[min(r, count - 16) :][:16, r % 16] for r in range(count)])
    np.testing.assert_array_equal(results("plain")["w16_transpose"][:, :16], square)
    first = np.arange(16) < rows["x"][:, None] % 17
    np.testing.assert_array_equal(plain("v16_first"), np.where(first, rows["a"], rows["b"]))
    words = rows["h"].view(np.uint32)
    np.testing.assert_array_equal(results("plain")["v16_from_high_bf16"][:, :16], words & 0xFFFF0000)
    np.testing.assert_array_equal(plain("v16_from_high_f16"), (words >> 16).astype(np.uint16).view(np.float16).astype(np.float32))
    exponents = rows["f"] * np.float32(11)
    np.testing.assert_allclose(plain("v16_exp"), np.where(exponents < -87, 0, exact), rtol=3e-7)
    np.testing.assert_allclose(plain("v16_exp2"), np.where(negative < -100, 0, powers), rtol=3e-7)
    assert (negative < -100).any() and (negative > -100).any()
    bytes_ = rows["h"].view(np.uint8).reshape(-1, 16, 4).astype(int)
    signed = np.ascontiguousarray(rows["x"]).view(np.int8).reshape(-1, 1, 4).astype(int)
    start = rows["x"].view(np.int32)[:, None] >> 8
    np.testing.assert_array_equal(plain("i16_dot_u8s8"), (start + (bytes_ * signed).sum(-1)).astype(np.float32))
    np.testing.assert_array_equal(results("plain")["v16_store_i8"].view(np.int8)[:, :16], rows["o"])
    places = np.arange(len(rows)) % 4
    picked = bytes_[np.arange(len(rows)), :, places]
    np.testing.assert_array_equal(plain("w16_load"), picked)
    np.testing.assert_array_equal(plain("w16_low_nibbles"), picked & 15)
    np.testing.assert_array_equal(plain("w16_high_nibbles"), picked >> 4)
    whole = rows["h"].view(np.uint32)
    fifth = whole >> (np.arange(len(rows), dtype=np.uint32) % 8 * 4)[:, None] >> places[:, None].astype(np.uint32) & 1
    np.testing.assert_array_equal(plain("w16_fifth_bits"), fifth * 16)
    np.testing.assert_array_equal(plain("w16_or"), picked | picked >> 4)
    right = (np.arange(len(rows)) % 12 - 4)[:, None]
    shifted = np.where(right < 0, picked << np.maximum(-right, 0), picked >> np.maximum(right, 0))
    np.testing.assert_array_equal(plain("w16_bits"), shifted & 255)
    table = np.array([250, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 128])
    np.testing.assert_array_equal(plain("w16_lookup"), table[picked & 15])
    start = (np.arange(len(rows), dtype=np.uint32) % 7 * 4)[:, None]
    np.testing.assert_array_equal(plain("v16_from_bits"), whole >> start & 63)
    np.testing.assert_array_equal(plain("v16_from_s8"), np.where(picked > 127, picked - 256, picked))
    halves = (rows["h"][:, :16].astype(int) >> 8 * places[:, None] & 255) * (places[:, None] < 2)
    np.testing.assert_array_equal(plain("w16_load_u16"), halves)
