"""Paged attention, by kernels and by the reference, against a few lines of numpy: decodes, chunks, both, windows, groups of query heads,
blocks that sequences share.

Blocks come in any order, decodes are padded to their bucket, and every slot of the pool that no row may read holds a NaN.
"""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests.ops.inputs import VARIANTS, numbers, realized
from tinyvllm.backends import registry
from tinyvllm.backends.cpu.toolchain import cpu_features
from tinyvllm.batch import Batch, LayerCache
from tinyvllm.bridge import alias
from tinyvllm.ops.attention import PagedAttention

S, D, P, M = 8, 32, 24, 6
BUCKET = 4  # decodes are padded to


def reference(q, positions, owners, tables, pool, window, cap=0.0, sinks=None):
    """Row by row: gather the owner's keys up to the row's position, softmax with the head's sink, weigh the values."""
    T, H, D = q.shape
    K = pool.shape[2]
    out = np.zeros_like(q)
    for t in range(T):
        end, start = positions[t] + 1, max(0, positions[t] + 1 - window) if window else 0
        blocks = pool[tables[owners[t]]]  # [M, 2, K, S, D]
        keys, values = (blocks[:, i].transpose(1, 0, 2, 3).reshape(K, -1, D)[:, start:end] for i in (0, 1))
        for h in range(H):
            scores = keys[h * K // H] @ q[t, h] * D**-0.5
            scores = cap * np.tanh(scores / cap) if cap else scores
            sink = -np.inf if sinks is None else sinks[h]
            top = max(scores.max(), sink)
            weights = np.exp(scores - top)
            out[t, h] = weights / (weights.sum() + np.exp(sink - top)) @ values[h * K // H]
    return out


class Step:
    """Decodes with the context lengths `decodes`, and chunks of (start, length), in the layout of the runner.

    `rows` [N] are the rows that count, with their `positions` and `owners`; `pool` [P, 2, K, S, D] has numbers in the slots they may read.
    The first `shared` tokens of all decodes are in the same blocks. `shared_prefix_lens` is what the batch declares of that; with None it
    declares nothing.
    """

    def __init__(self, decodes, chunks, K, D=D, S=S, M=M, P=P, shared=0, shared_prefix_lens=None):
        bucket = BUCKET if decodes else 0
        sequences, random = bucket + len(chunks), np.random.default_rng(3)
        tables = np.zeros((sequences, M), np.int32)
        contexts = np.zeros(sequences, np.int32)
        blocks = random.permutation(P).tolist()
        for b, context in [*enumerate(decodes), *((bucket + i, start + length) for i, (start, length) in enumerate(chunks))]:
            needed, lead = -(-context // S), shared // S if 0 < b < len(decodes) else 0
            tables[b, :lead] = tables[0, :lead]
            tables[b, lead:needed], blocks, contexts[b] = blocks[: needed - lead], blocks[needed - lead :], context
        positions, owners, starts = [c - 1 for c in decodes] + [0] * (bucket - len(decodes)), list(range(bucket)), [*range(bucket + 1)]
        for i, (start, length) in enumerate(chunks):
            positions += range(start, start + length)
            owners += [bucket + i] * length
            starts.append(starts[-1] + length)
        self.rows = np.array([*range(len(decodes)), *range(bucket, len(positions))])
        self.positions, self.owners, self.tables = np.array(positions)[self.rows], np.array(owners)[self.rows], tables
        self.pool = np.full((P, 2, K, S, D), np.nan, np.float32)
        for b, context in enumerate(contexts):
            for position in range(context):
                self.pool[tables[b, position // S], :, :, position % S] = random.standard_normal((2, K, D))
        self.q = numbers(len(positions), 3 * K if K == 2 else K, D)
        arrays = [[0] * len(positions), positions, [0] * len(positions), tables, starts, contexts, [len(positions)], [len(decodes)]]
        arrays += [[bucket, len(chunks)], [0], [0]]
        tensors = [realized(np.asarray(a, dtype=np.int32)) for a in arrays]
        longest = max((n for _, n in chunks), default=1)
        common = (
            None
            if shared_prefix_lens is None
            else realized(np.array([*shared_prefix_lens, *[0] * (sequences - len(shared_prefix_lens))], np.int32))
        )
        self.batch = Batch(*tensors, -(-int(contexts.max()) // S), bucket, longest, common)
        self.S = S

    def attend(self, window=0, dtype=dtypes.float32, cap=0.0, sinks=None):
        pool = Tensor(self.pool).cast(dtype).contiguous().realize()
        cache, scale = LayerCache(pool, alias(pool)), self.q.shape[2] ** -0.5
        out = PagedAttention(self.batch, self.S)(realized(self.q), cache, scale, window, cap, None if sinks is None else realized(sinks))
        return out.numpy().reshape(self.q.shape)[self.rows]

    def expected(self, window=0, dtype=dtypes.float32, cap=0.0, sinks=None):
        pool = Tensor(self.pool).cast(dtype).float().numpy()
        return reference(self.q[self.rows], self.positions, self.owners, self.tables, pool, window, cap, sinks)


def force(monkeypatch, decode, prefill):
    monkeypatch.setenv("TINYVLLM_KERNELS", f"attention_decode={decode},attention_prefill={prefill}")
    registry.forget_choices()


CASES = {
    "one decode": ([11], []),
    "decodes": ([1, 8, 48, 23], []),
    "a fresh prompt": ([], [(0, 20)]),
    "a chunk in the middle": ([], [(13, 9)]),
    "several chunks": ([], [(0, 5), (30, 16), (7, 1)]),
    "decodes and chunks": ([9, 40], [(0, 12), (16, 3)]),
}


GROUPS = {"6 of 2": (2, 0), "4 of 4 in a window": (4, 5)}
# each case is a program of its own of the reference, which has one of the groups in turn
BY_REFERENCE = [(case, "ref", list(GROUPS)[i % 2]) for i, case in enumerate(CASES)]


@pytest.mark.parametrize(("case", "variant", "group"), [*((case, VARIANTS[0], group) for case in CASES for group in GROUPS), *BY_REFERENCE])
def test_against_numpy(monkeypatch, case, variant, group):
    K, window = GROUPS[group]
    force(monkeypatch, variant, variant)
    step = Step(*CASES[case], K)
    np.testing.assert_allclose(step.attend(window), step.expected(window), atol=2e-6)
    assert {choice.variant for choice in registry.choices()} == {variant}


@pytest.mark.parametrize("variant", ["ref", VARIANTS[0]])
def test_capped_scores(monkeypatch, variant):
    force(monkeypatch, variant, variant)
    step = Step(*CASES["decodes and chunks"], 2)
    np.testing.assert_allclose(step.attend(5, cap=0.5), step.expected(5, cap=0.5), atol=2e-6)
    assert np.abs(step.expected(5) - step.expected(5, cap=0.5)).max() > 0.05
    assert {choice.variant for choice in registry.choices()} == {variant}


@pytest.mark.parametrize("variant", VARIANTS)
def test_wide_heads_of_gemma4(monkeypatch, variant):
    force(monkeypatch, variant, variant)
    step = Step([20, 300], [(290, 20)], 2, D=512, S=16, M=20, P=60)
    np.testing.assert_allclose(step.attend(), step.expected(), atol=2e-6)
    assert {choice.variant for choice in registry.choices()} == {variant}


def check_rounded(step, dtype, variant, atol):
    """Tiles of AMX, and products of pairs of bfloat16, round queries and weights to the cache's bfloat16."""
    rounds = variant == "amx" or variant == "avx512" and "avx512_bf16" in cpu_features()
    tiles = rounds and dtype == dtypes.bfloat16
    off = np.abs(step.attend(dtype=dtype) - step.expected(dtype=dtype))
    assert off.max() < (1e-2 if tiles else atol) and off.mean() < (1e-3 if tiles else atol), (off.max(), off.mean())


SINKS = np.array([0.5, -2.0, 60.0, -60.0, 1.0, 2.0], np.float32)  # also far above all scores and far below


@pytest.mark.parametrize("variant", ["ref", *VARIANTS])
def test_sinks(monkeypatch, variant):
    """Contexts of one partition of 256 keys, and of several."""
    force(monkeypatch, variant, variant)
    step = Step([20, 600], [(500, 20)], 2, S=16, M=40, P=100)
    for window in (0, 300):
        np.testing.assert_allclose(step.attend(window, sinks=SINKS), step.expected(window, sinks=SINKS), atol=2e-6)
    assert {choice.variant for choice in registry.choices()} == {variant}


class Latents(Step):
    """A step with `heads` over a cache of one key a token, whose first `latent` features are its value."""

    def __init__(self, *args, heads=6, wide=112, latent=80, **sizes):
        super().__init__(*args, K=1, D=wide, **sizes)
        self.latent, self.q = latent, numbers(len(self.q), heads, wide)
        self.pool[:, 1] = self.pool[:, 0]

    def attend(self, window=0, dtype=dtypes.float32, cap=0.0):
        pool = Tensor(self.pool[:, :1]).cast(dtype).contiguous().realize()
        cache = LayerCache(pool, alias(pool), latent=self.latent)
        out = PagedAttention(self.batch, self.S)(realized(self.q), cache, self.q.shape[2] ** -0.5)
        return out.numpy().reshape(*self.q.shape[:2], self.latent)[self.rows]

    def expected(self, window=0, dtype=dtypes.float32, cap=0.0):
        return super().expected(window, dtype, cap)[..., : self.latent]


@pytest.mark.parametrize("variant", ["ref", *VARIANTS])
def test_values_that_are_a_part_of_the_keys(monkeypatch, variant):
    force(monkeypatch, variant, variant)
    step = Latents([257, 600], [(500, 20)], S=16, M=40, P=100)
    np.testing.assert_allclose(step.attend(), step.expected(), atol=2e-6)
    assert {choice.variant for choice in registry.choices()} == {variant}


def test_latents_of_deepseek(monkeypatch):
    """Twenty heads in parts of five."""
    force(monkeypatch, VARIANTS[0], VARIANTS[0])
    step = Latents([290], [(270, 5)], heads=20, wide=576, latent=512, S=16, M=40, P=60)
    check_rounded(step, dtypes.bfloat16, VARIANTS[0], atol=5e-6)


def test_a_prompts_row_of_latents_has_the_bits_of_a_decode(monkeypatch):
    force(monkeypatch, VARIANTS[0], VARIANTS[0])
    decode, chunk = Latents([600], [], S=16, M=40, P=60), Latents([], [(570, 30)], S=16, M=40, P=60)
    chunk.pool[chunk.tables[0, :38]] = decode.pool[decode.tables[0, :38]]
    chunk.q[-1] = decode.q[0]
    np.testing.assert_array_equal(decode.attend()[0].view(np.uint32), chunk.attend()[-1].view(np.uint32))


@pytest.mark.parametrize(("decode", "prefill"), [(v, v) for v in VARIANTS[1:]] + [("ref", VARIANTS[0]), (VARIANTS[0], "ref")])
def test_other_variants_and_one_half_by_the_reference(monkeypatch, decode, prefill):
    force(monkeypatch, decode, prefill)
    step = Step(*CASES["decodes and chunks"], 2)
    np.testing.assert_allclose(step.attend(), step.expected(), atol=2e-6)
    assert {choice.stem: choice.variant for choice in registry.choices()} == {"attention_decode": decode, "attention_prefill": prefill}


HALVES = {"float16": dtypes.float16, "bfloat16": dtypes.bfloat16}
# D: a row of half a cache line, of one, of one and a half; the reference has one type for each
OF_HALVES = [(name, D, VARIANTS[0]) for name in HALVES for D in (16, 32, 48)] + [("float16", 16, "ref"), ("bfloat16", 48, "ref")]


@pytest.mark.parametrize(("name", "D", "variant"), OF_HALVES)
def test_half_caches_are_read_as_they_are(monkeypatch, name, D, variant):
    dtype = HALVES[name]
    monkeypatch.setenv("TINYVLLM_KERNELS", f"all={variant}")
    check_rounded(Step([30], [(5, 11)], 2, D), dtype, variant, atol=2e-6)


@pytest.mark.parametrize("variant", ["ref", VARIANTS[0]])
@pytest.mark.parametrize("window", [0, 300], ids=["full", "window"])
def test_contexts_of_several_partitions(monkeypatch, window, variant):
    """Longer than the partition of 256 keys that one unit of the decode kernel reads."""
    force(monkeypatch, variant, variant)
    step = Step([257, 600], [(500, 20)], 2, S=16, M=40, P=100)
    np.testing.assert_allclose(step.attend(window), step.expected(window), atol=2e-6)


@pytest.mark.parametrize("D", [16, 40, 528])
def test_what_the_kernels_cannot_do_goes_to_the_reference(monkeypatch, D):
    monkeypatch.delenv("TINYVLLM_KERNELS", raising=False)
    registry.forget_choices()
    step = Step([9], [(0, 3)], 2, D=D)
    np.testing.assert_allclose(step.attend(), step.expected(), atol=2e-6)
    assert all(
        c.variant == "ref" and "kernel supports head dimension" in c.why and f"the model has {D}" in c.why for c in registry.choices()
    )


def test_a_decode_has_the_same_bits_in_any_batch(monkeypatch):
    force(monkeypatch, VARIANTS[0], VARIANTS[0])
    contexts = (11, 48, 3)
    step = Step(contexts, [], 2)
    whole = step.attend()
    for b, context in enumerate(contexts):
        alone, blocks = Step([context], [], 2), -(-context // S)
        alone.pool[alone.tables[0, :blocks]] = step.pool[step.tables[b, :blocks]]
        alone.q[0] = step.q[b]
        np.testing.assert_array_equal(alone.attend()[0].view(np.uint32), whole[b].view(np.uint32))


CONTEXTS, SHARED_PREFIX_LENS = [600, 513, 560, 520], [0, 512, 512, 512]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [0, 300], ids=["full", "window"])
def test_blocks_that_decodes_share_change_no_bits(monkeypatch, window, variant):
    force(monkeypatch, variant, variant)
    sizes = {"S": 16, "M": 40, "P": 60}
    alone, together = (Step(CONTEXTS, [(0, 20)], 2, shared=512, shared_prefix_lens=lens, **sizes) for lens in (None, SHARED_PREFIX_LENS))
    np.testing.assert_allclose(together.attend(window), together.expected(window), atol=2e-6)
    np.testing.assert_array_equal(together.attend(window).view(np.uint32), alone.attend(window).view(np.uint32))


def test_the_kernel_trusts_shared_prefix_lens_and_the_reference_does_not(monkeypatch):
    sizes = {"S": 16, "M": 40, "P": 140}
    for variant, trusts in ((VARIANTS[0], True), ("ref", False)):
        force(monkeypatch, variant, "ref")
        step = Step(CONTEXTS, [], 2, shared_prefix_lens=SHARED_PREFIX_LENS, **sizes)  # nothing is shared
        wrong, right = step.attend(), step.expected()
        np.testing.assert_allclose(wrong[0], right[0], atol=2e-6)
        assert np.allclose(wrong[1:], right[1:], atol=2e-6) is not trusts
