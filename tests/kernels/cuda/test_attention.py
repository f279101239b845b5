"""Paged attention of the CUDA backend in the emulator: against a softmax in float64, and decode against prefill bit for bit.

Sequences and caches are those of the tests of the CPU kernels: NaN in every slot that no row sees, unused table entries beyond the pool.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.kernels.test_attention import CONTEXT, NEW, Case, Shape, _ints, make, oracle, same, with_sinks
from tinyvllm.backends.cuda import attention_plan, hopper_plan
from tinyvllm.backends.cuda import plan as records
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.shapes import Attention
from tinyvllm.quant.codecs import bf16_to_f32, f32_to_bf16
from tinyvllm.quant.kv import KV_FORMATS

GPU = records.GPU(multiprocessors=3, shared=227 << 10, shared_of_one=228 << 10)
# Weights, at most 1, are rounded to the cache's format before the product with the values; the rest is float32.
TOLERANCE = {"BF16": {"rtol": 0, "atol": 8e-3}, "F16": {"rtol": 0, "atol": 1e-3}}
TOLERANCE |= dict.fromkeys(KV_FORMATS, {"rtol": 0, "atol": 1.2e-2})  # as BF16, and weights are rounded with their value's scale


def rounded(case: Case) -> Case:
    """The case with queries rounded as in the kernels, for the oracle."""
    if case.shape.dtype != "F16":
        return dataclasses.replace(case, q=bf16_to_f32(f32_to_bf16(case.q)).reshape(case.q.shape))
    return dataclasses.replace(case, q=case.q.astype(np.float16).astype(np.float32))


def told(case: Case) -> Attention:
    s = case.shape
    return Attention(s.H, s.K, s.D, s.S, case.tables.shape[1], s.dtype, f"{s.D**-0.5}f", s.window, s.cap, bool(s.sinks))


def with_section(kernel: Kernel, section: int) -> Kernel:
    return dataclasses.replace(kernel, defines=(*kernel.defines, ("SECTION", section)))


def decode(
    case: Case, grid: int | None = None, count: int | None = None, section: int = 4096, seed: int = 0,
    shared_prefix_lens: list[int] | None = None, read: list[int] | None = None,
) -> np.ndarray:  # fmt: skip
    """The last row of each sequence; afterwards the counters are zero again. `read`: bytes read of each array, [4] is the cache."""
    s, (B, M) = case.shape, case.tables.shape
    kernel, floats, counts = attention_plan.attention_decode("sm_90", B, told(case), GPU, cascade=shared_prefix_lens is not None)
    if grid or section != 4096:
        wide = grid or kernel.grid[0]
        parts, halves = -(-s.H // s.K // 16), kernel.grid[1]
        kernel = with_section(dataclasses.replace(kernel, grid=(wide, halves, 1)), section)
        sections, cascade, heads = -(-M * s.S // section), sum(kernel.integers[1:2]), s.K * parts
        kept = B * heads * (sections + min(cascade, -(-M * s.S // 256))) if cascade else 0
        floats = halves * (wide * 2 * (section // 256 + sections) + kept) * -(-s.H // s.K // parts) * (s.D // halves + 2)
        counts = halves * 2 * wide + (B * heads if cascade else 0)
    last = aligned((B, s.H, s.D), np.float32)
    last[...] = case.q[case.starts[1:] - 1]
    out, partial, counters = aligned(last.shape, np.float32), aligned((floats,), np.float32), aligned((counts,), np.uint32, 0)
    ins = [last, case.cache, case.tables, _ints(case.context), _ints([B if count is None else count]), *s.sink_arrays]
    ins += [_ints(shared_prefix_lens)] if shared_prefix_lens is not None and len(ins) < kernel.ins else []
    for again in range(2 if seed == 0 else 1):  # a captured launch starts with what the previous one left
        emulate(kernel, out, partial, counters, *ins, seed=seed + again, read=read)
        assert not counters.any()
    return out


def prefill(
    case: Case, first: int = 0, count: int | None = None, section: int = 4096, stages: int = 2, seed: int = 0, gpu: records.GPU = GPU
) -> np.ndarray:
    chunks = len(case.new) - first if count is None else count
    kernel = attention_plan.attention_prefill("sm_90", sum(case.new), len(case.new), told(case), gpu)
    kernel = with_section(kernel, section)
    if stages == 1:
        kernel = dataclasses.replace(kernel, defines=tuple((name, 1 if name == "STAGES" else value) for name, value in kernel.defines))
    out = aligned(case.q.shape, np.float32)
    ins = (case.q, case.cache, case.tables, _ints(case.context), case.starts, *case.shape.sink_arrays, _ints([first, chunks]))
    emulate(kernel, out, *ins, seed=seed)
    return out


def close(got: np.ndarray, want: np.ndarray, case: Case) -> None:
    np.testing.assert_allclose(got, want, **TOLERANCE[case.shape.dtype])


RAGGED = [
    Shape(H=8, K=1, D=32, S=8, dtype="BF16"),
    Shape(H=3, K=1, D=64, S=16, dtype="F16"),
    Shape(H=4, K=4, D=32, S=128, dtype="F16"),
    Shape(H=4, K=2, D=96, S=32, dtype="BF16"),
    Shape(H=4, K=1, D=128, S=16, dtype="F16"),
    Shape(H=2, K=1, D=256, S=16, dtype="BF16"),
    Shape(H=2, K=1, D=512, S=16, dtype="BF16"),
    with_sinks(Shape(H=4, K=2, D=288, S=8, dtype="F16", window=70, cap=2.0)),
    Shape(H=2, K=1, D=512, S=16, dtype="KV_INT8"),
    Shape(H=2, K=1, D=512, S=32, dtype="KV_INT4", window=70),
    with_sinks(Shape(H=4, K=2, D=288, S=8, dtype="KV_INT4")),
    Shape(H=3, K=1, D=352, S=16, dtype="KV_FP8"),
    Shape(H=2, K=2, D=48, S=256, dtype="BF16"),
    Shape(H=20, K=1, D=32, S=16, dtype="BF16"),
    Shape(H=2, K=1, D=64, S=8, dtype="F16", window=5),
    Shape(H=3, K=3, D=32, S=16, dtype="BF16", window=70),
    Shape(H=4, K=1, D=64, S=64, dtype="F16", window=300),
    Shape(H=4, K=1, D=64, S=16, dtype="KV_INT8"),
    Shape(H=2, K=2, D=48, S=8, dtype="KV_INT8", window=70),
    Shape(H=2, K=1, D=128, S=128, dtype="KV_INT8"),
    Shape(H=4, K=2, D=64, S=16, dtype="KV_INT4"),
    Shape(H=2, K=1, D=96, S=8, dtype="KV_INT4", window=5),
    Shape(H=3, K=1, D=64, S=16, dtype="KV_FP8"),
    Shape(H=2, K=2, D=32, S=32, dtype="KV_FP8", window=300),
    Shape(H=2, K=1, D=256, S=16, dtype="KV_FP8"),
    with_sinks(Shape(H=20, K=1, D=32, S=16, dtype="BF16", cap=2.0)),  # in two parts
    with_sinks(Shape(H=8, K=2, D=64, S=16, dtype="F16", window=300)),
    with_sinks(Shape(H=8, K=4, D=256, S=16, dtype="KV_INT8", window=70, cap=2.0)),
]


@functools.cache
def ragged(shape: Shape) -> Case:
    return make(shape, NEW, CONTEXT)


@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_ragged_sequences(shape: Shape) -> None:
    case = ragged(shape)
    want, last = oracle(rounded(case)), case.starts[1:] - 1
    rows, ends = prefill(case), decode(case)
    close(rows, want, case)
    close(ends, want[last], case)
    assert same(ends, rows[last]), "decode and prefill of the same row differ in bits"


@pytest.mark.parametrize("dtype, window", [("BF16", 0), ("F16", 0), ("BF16", 64)])
def test_decode_at_the_borders_of_tiles_and_partitions(dtype: str, window: int) -> None:
    contexts = [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 600]
    case = make(Shape(H=2, K=1, D=32, dtype=dtype, window=window), [1] * len(contexts), contexts, seed=3)
    want = decode(case)
    close(want, oracle(rounded(case)), case)
    for grid, seed in ((1, 1), (2, 2), (5, 3), (40, 4)):
        assert same(decode(case, grid=grid, seed=seed), want), f"{grid} thread blocks"
    for b in (0, 4, 9, 10):
        alone = Case(case.shape, [1], contexts[b : b + 1], case.q[b : b + 1], case.cache, case.tables[b : b + 1], [], [])
        assert same(decode(alone, seed=b), want[b : b + 1]), contexts[b]


SECTIONED = [with_sinks(Shape(H=3, K=1, D=32, dtype="BF16")), Shape(H=2, K=2, D=32, S=8, dtype="F16", window=1000)]
SECTIONED_WIDE = with_sinks(Shape(H=3, K=1, D=288, dtype="BF16"))


@pytest.mark.parametrize("shape", [*SECTIONED, pytest.param(SECTIONED_WIDE, marks=pytest.mark.long)], ids=str)
def test_sections(shape: Shape) -> None:
    case = make(shape, [3, 1, 1], [1700, 1280, 513], M=216)
    want, last = oracle(rounded(case)), case.starts[1:] - 1
    rows = prefill(case, section=512)
    close(rows, want, case)
    for grid, seed in ((1, 1), (3, 2), (4, 3), (17, 4)):
        ends = decode(case, grid=grid, section=512, seed=seed)
        assert same(ends, rows[last]), f"{grid} thread blocks"


# --- few sequences: attention_decode_team


def prefill_on_hopper(case: Case, section: int = 4096, seed: int = 0, stage_keys: int = 128, warps: int = 0) -> np.ndarray:
    kernel = with_section(hopper_plan.attention_prefill("sm_90a", sum(case.new), len(case.new), told(case)), section)
    defines = dict(kernel.defines) | {"STAGE_KEYS": stage_keys} | ({"WARPS": warps} if warps else {})
    warps, s = int(defines["WARPS"]), case.shape
    grid = (-(-sum(case.new) // (warps * 16 * s.K // s.H)) + len(case.new), s.K, 1)
    kernel = dataclasses.replace(kernel, defines=tuple(defines.items()), shared=8 * stage_keys * s.D, block=32 * warps, grid=grid)
    out = aligned(case.q.shape, np.float32)
    ins = (case.q, case.cache, case.tables, _ints(case.context), case.starts, *case.shape.sink_arrays, _ints([0, len(case.new)]))
    emulate(kernel, out, *ins, seed=seed)
    return out


HOPPERS = [
    Shape(H=4, K=2, D=64, S=16, dtype="F16"),
    with_sinks(Shape(H=4, K=1, D=128, S=32, dtype="BF16", window=70)),
    pytest.param(with_sinks(Shape(H=20, K=1, D=64, S=8, dtype="BF16", cap=2.0)), marks=pytest.mark.long),
    pytest.param(Shape(H=3, K=3, D=128, S=16, dtype="F16", window=300), marks=pytest.mark.long),
]


@pytest.mark.parametrize("shape", HOPPERS, ids=str)
def test_products_of_warpgroups_have_the_bits_of_warps(shape: Shape) -> None:
    """Chunks in the middle of a sequence, one of a single row, and a whole prompt; sections."""
    case = make(shape, [70, 1, 133, 20], [700, 257, 133, 300])
    rows = prefill(case)
    assert same(prefill_on_hopper(case), rows)
    assert same(prefill_on_hopper(case, section=512, seed=1, stage_keys=64, warps=4), prefill(case, section=512))
    close(rows, oracle(rounded(case)), case)


TEAMS = [
    Shape(H=4, K=2, D=64, S=16, dtype="F16"),
    with_sinks(Shape(H=2, K=1, D=128, S=32, dtype="BF16", window=70)),
    pytest.param(with_sinks(Shape(H=20, K=1, D=64, S=8, dtype="BF16", cap=2.0)), marks=pytest.mark.long),  # in two parts
    pytest.param(Shape(H=8, K=1, D=128, S=16, dtype="F16", window=300), marks=pytest.mark.long),
]


@pytest.mark.parametrize("shape", TEAMS, ids=str)
def test_a_team_of_warps_has_the_bits_of_one(shape: Shape) -> None:
    """Contexts of one key, of whole tiles, and of several partitions; more thread blocks than units, and fewer."""
    case = make(shape, [3, 1, 20, 1], [700, 257, 64, 1])
    assert attention_plan.attention_decode("sm_90", 4, told(case), GPU)[0].stem == "attention_decode_team"
    want, last, rows = oracle(rounded(case)), case.starts[1:] - 1, prefill(case)
    for grid, seed in ((None, 0), (1, 1), (2, 2), (5, 3), (40, 4)):
        ends = decode(case, grid=grid, seed=seed)
        close(ends, want[last], case)
        assert same(ends, rows[last]), f"{grid} thread blocks"
    some = decode(case, count=2)
    assert same(some[:2], rows[last[:2]]) and (some[2:].view(np.uint32) == 0xFFFFFFFF).all()


def test_a_team_merges_sections() -> None:
    case = make(with_sinks(Shape(H=3, K=1, D=64, dtype="BF16")), [3, 1, 1], [1700, 1280, 513], M=216)
    rows, last = prefill(case, section=512), case.starts[1:] - 1
    for grid, seed in ((1, 1), (3, 2), (17, 3)):
        assert same(decode(case, grid=grid, section=512, seed=seed), rows[last]), f"{grid} thread blocks"


def test_teams_are_for_few_sequences_of_usual_heads() -> None:
    def stem(B: int, D: int, dtype: str = "BF16", gpu: records.GPU = GPU) -> str:
        return attention_plan.attention_decode("sm_80", B, Attention(8, 2, D, 16, 64, dtype, "0.1f", 0), gpu)[0].stem

    assert {stem(4, 64), stem(1, 128)} == {"attention_decode_team"}
    small = records.GPU(3, 99 << 10, 100 << 10)
    assert {stem(5, 64), stem(1, 96), stem(1, 64, "KV_INT8"), stem(1, 128, gpu=small)} == {"attention_decode"}


def test_a_long_context() -> None:
    case = make(Shape(H=1, K=1, D=32, dtype="BF16"), [2], [4400])
    rows = prefill(case)
    close(rows, oracle(rounded(case)), case)
    assert same(decode(case, grid=4), rows[1:])


@pytest.mark.parametrize("shape", [Shape(H=4, K=1, D=32, dtype="BF16"), Shape(H=3, K=3, D=32, S=8, dtype="F16", window=90)], ids=str)
def test_every_row_has_the_bits_of_decode_for_any_chunks(shape: Shape) -> None:
    whole = make(shape, [150], [290])
    rows = prefill(whole)
    for new, context in ((1, 290), (2, 257), (5, 230), (64, 204), (67, 290)):
        first = context - new - 140  # row of `whole` that comes first in this cut
        q = aligned((new, shape.H, shape.D), np.float32)
        q[...] = whole.q[first : first + new]
        cut = Case(shape, [new], [context], q, whole.cache, whole.tables, whole.keys, whole.values)
        assert same(prefill(cut, seed=new), rows[first : first + new]), (new, context)
        assert same(decode(cut, seed=new), rows[first + new - 1 : first + new]), (new, context)


def test_one_stage_has_the_bits_of_two() -> None:
    case = ragged(RAGGED[1])
    assert same(prefill(case, stages=1, seed=5), prefill(case, seed=6))


# Warps, stages and keys of a stage that a GPU with this number of KiB has.
PARTS = [
    (Shape(H=2, K=1, D=256, S=16, dtype="BF16"), 99, (3, 2, 32)),
    (Shape(H=2, K=1, D=512, S=16, dtype="BF16"), 99, (2, 2, 16)),
    (Shape(H=2, K=1, D=512, S=16, dtype="KV_INT8"), 99, (2, 1, 32)),
    (Shape(H=2, K=1, D=512, S=32, dtype="KV_INT4", window=70), 99, (2, 2, 32)),
    (Shape(H=3, K=1, D=352, S=16, dtype="KV_FP8"), 99, (2, 2, 32)),
    (with_sinks(Shape(H=4, K=2, D=288, S=8, dtype="F16", window=70, cap=2.0)), 64, (2, 2, 16)),
    (Shape(H=2, K=1, D=256, S=16, dtype="KV_FP8"), 99, (3, 2, 32)),
    (with_sinks(Shape(H=8, K=4, D=256, S=16, dtype="KV_INT8", window=70, cap=2.0)), 64, (2, 1, 32)),
    (Shape(H=2, K=1, D=256, S=64, dtype="F16", window=300), 64, (2, 2, 16)),
    (Shape(H=2, K=1, D=512, S=16, dtype="BF16"), 64, (1, 1, 16)),
]


@pytest.mark.parametrize("shape, kib, block", [pytest.param(*p, marks=() if i < 3 else pytest.mark.long) for i, p in enumerate(PARTS)])
def test_parts_of_tiles_have_the_bits_of_whole_ones(shape: Shape, kib: int, block: tuple[int, int, int]) -> None:
    small, case = records.GPU(3, kib << 10, kib + 1 << 10), ragged(shape)
    defines = dict(attention_plan.attention_prefill("sm_80", 1, 1, told(case), small).defines)
    assert (defines["WARPS"], defines["STAGES"], defines["STAGE_KEYS"]) == block
    rows = prefill(case, gpu=small)
    close(rows, oracle(rounded(case)), case)
    assert same(rows, prefill(case, seed=1)), "parts of tiles and whole ones differ in bits"


def test_parts_of_sections() -> None:
    """Across the borders of partitions and sections, and where warps see different tiles."""
    shape, small = Shape(H=1, K=1, D=192, dtype="BF16", window=700), records.GPU(3, 64 << 10, 65 << 10)
    case = make(shape, [70, 1], [1100, 530])
    assert same(prefill(case, section=512, gpu=small, seed=2), prefill(case, section=512))


def test_rows_beyond_the_count_are_not_touched() -> None:
    case = make(Shape(D=32, dtype="BF16"), [1, 1, 40, 5, 1], [300, 20, 40, 12, 9])
    want = oracle(rounded(case))
    out = decode(case, count=2)
    close(out[:2], want[:2], case)
    assert (out[2:].view(np.uint32) == 0xFFFFFFFF).all()
    assert (decode(case, count=0).view(np.uint32) == 0xFFFFFFFF).all()
    out = prefill(case, first=2, count=2)
    close(out[2:47], want[2:47], case)
    assert (out[[0, 1, 47]].view(np.uint32) == 0xFFFFFFFF).all()
    assert (prefill(case, first=2, count=0).view(np.uint32) == 0xFFFFFFFF).all()


def test_large_scores_do_not_overflow() -> None:
    case = make(Shape(D=32, dtype="BF16"), [20], [300])
    case.q *= 200
    want = oracle(rounded(case))
    rows = prefill(case)
    assert np.isfinite(rows).all()
    close(rows, want, case)


def test_a_broken_sequence_does_not_affect_others() -> None:
    case = make(Shape(H=2, K=1, D=32, dtype="BF16"), [30, 1, 20], [100, 90, 80])
    clean, ends = prefill(case), decode(case)
    case.cache[case.tables[1, 1], :, :, 3] = 0xFFFF
    dirty, broken = prefill(case, seed=1), decode(case, seed=1)
    assert same(dirty[:30], clean[:30]) and same(dirty[31:], clean[31:]) and np.isnan(dirty[30]).all()
    assert same(broken[::2], ends[::2]) and np.isnan(broken[1]).all()
