"""Paged attention on the GPU against numpy, at contexts of thousands. Prefill and decode of one row give the same bits, alone or in a
batch, and with shared blocks.
"""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests.gpu.operands import EMULATED, best_variant, same_bits
from tests.ops.inputs import int32, numbers, realized
from tests.ops.test_attention import reference
from tinyvllm.backends import registry
from tinyvllm.batch import Batch, LayerCache
from tinyvllm.bridge import alias
from tinyvllm.ops.attention import PagedAttention
from tinyvllm.placement import Placement

S = 16
# Of results of about 1: q and the probabilities are rounded to bfloat16.
TOLERANCE = 2e-2
SHAPES = {"1b": (32, 8, 64), "8b": (32, 8, 128), "qwen": (16, 8, 128), "multi-head": (8, 8, 64)}
TOYS = {"1b": (4, 2, 32), "8b": (8, 2, 64), "qwen": (2, 1, 128), "multi-head": (2, 2, 32)}


class Cached:
    """A bfloat16 pool of sequences of the given numbers of tokens, their blocks in random order; NaN where there is no token.

    The first `shared[b]` tokens of sequence b are in the blocks of the one before it.
    """

    def __init__(self, contexts: tuple[int, ...], H: int, K: int, D: int, shared: tuple[int, ...] = ()):
        random, self.contexts, self.M = np.random.default_rng(1), contexts, -(-max(contexts) // S)
        order = random.permutation(sum(-(-context // S) for context in contexts) + 3).tolist()
        pool = np.full((len(order), 2, K, S, D), np.nan, np.float32)
        self.tables = np.zeros((len(contexts), self.M), np.int32)
        for b, context in enumerate(contexts):
            common = shared[b] // S if shared else 0
            self.tables[b, :common] = self.tables[b - 1, :common]
            for m in range(common, -(-context // S)):
                block, count = order.pop(), min(S, context - m * S)
                self.tables[b, m] = block
                pool[block, :, :, :count] = random.standard_normal((2, K, count, D))
        self.pool = Tensor(pool).cast(dtypes.bfloat16).contiguous().realize()
        self.values = self.pool.float().numpy()
        self.H, self.D = H, D
        self.cap, self.sinks = 0.0, None

    def attend(self, q: np.ndarray, batch: Batch, window: int = 0) -> np.ndarray:
        sinks = None if self.sinks is None else realized(self.sinks)
        out = PagedAttention(batch, S)(realized(q), LayerCache(self.pool, alias(self.pool)), self.D**-0.5, window, self.cap, sinks)
        return out.numpy()[: len(q)].reshape(q.shape)

    def decode(
        self, q: np.ndarray, ids: list[int], lengths: list[int], window: int = 0, shared_prefix_lens: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """Row i is the token at lengths[i] - 1 of sequence ids[i]; `shared_prefix_lens` is that of the batch."""
        B, last = len(ids), [n - 1 for n in lengths]
        batch = Batch(
            int32(*[0] * B), int32(*last), int32(*[0] * B), realized(self.tables[ids]), int32(*range(B + 1)), int32(*lengths), int32(B),
            int32(B), int32(B, 0), int32(*range(B)), int32(B), self.M, B, 1,
            None if shared_prefix_lens is None else int32(*shared_prefix_lens),
        )  # fmt: skip
        return self.attend(q, batch, window)

    def chunk(self, q: np.ndarray, sequence: int, start: int, window: int = 0) -> np.ndarray:
        """The rows are the tokens of one sequence from `start` on."""
        T = len(q)
        batch = Batch(
            int32(*[0] * T), int32(*range(start, start + T)), int32(*[0] * T), realized(self.tables[[sequence]]), int32(0, T),
            int32(start + T), int32(T), int32(0), int32(0, 1), int32(T - 1), int32(1), self.M, 0, T,
        )  # fmt: skip
        return self.attend(q, batch, window)


@pytest.fixture(scope="module", params=SHAPES)
def shape(request) -> tuple[int, int, int]:
    return (TOYS if EMULATED else SHAPES)[request.param]


@pytest.fixture
def cached(shape, sizes, monkeypatch) -> Cached:
    variant = best_variant("attention_decode")
    monkeypatch.setenv("TINYVLLM_KERNELS", f"attention_decode={variant},attention_prefill={variant}")
    registry.forget_choices()
    return Cached(sizes.contexts, *shape)


@pytest.mark.parametrize("window", [0, 100])
def test_decodes(cached, sizes, window):
    lengths = list(sizes.contexts)
    ids = list(range(len(lengths)))
    q = numbers(len(ids), cached.H, cached.D)
    got = cached.decode(q, ids, lengths, window)
    want = reference(q, [n - 1 for n in lengths], ids, cached.tables, cached.values, window)
    np.testing.assert_allclose(got, want, atol=TOLERANCE)
    assert np.abs(got - want).mean() < TOLERANCE / 8
    for b in ids:
        same_bits(cached.decode(q[b : b + 1], [b], lengths[b : b + 1], window), got[b : b + 1], f"sequence {b} alone")


# Sequences that share all or a part of one prefix; the last three have another. One is much longer than the rest.
SHARED = (0, 2048, 2048, 1040, 1024, 512, 2048, 2048, 2048, 0, 768, 768) if not EMULATED else (0, 512, 512, 272, 256, 0, 256)
OWN = (1, 17, 300, 64, 900, 5, 31, 200, 2000, 100, 256, 3) if not EMULATED else (5, 17, 1, 300, 20, 9, 16)


# no sequence of the emulator is as long as the window
@pytest.mark.parametrize("window", [0, pytest.param(2200, marks=pytest.mark.long if EMULATED else ())])
def test_blocks_that_are_shared_give_the_bits_of_each_alone(shape, sizes, monkeypatch, window):
    """The batch may declare fewer shared tokens, or none."""
    variant = best_variant("attention_decode")
    monkeypatch.setenv("TINYVLLM_KERNELS", f"attention_decode={variant}")
    registry.forget_choices()
    lengths = [own + max((*SHARED, 0)[b : b + 2]) for b, own in enumerate(OWN)]
    cached, ids = Cached(tuple(lengths), *shape, SHARED), list(range(len(OWN)))
    q = numbers(len(ids), cached.H, cached.D)
    got = cached.decode(q, ids, lengths, window, SHARED)
    want = reference(q, [n - 1 for n in lengths], ids, cached.tables, cached.values, window)
    np.testing.assert_allclose(got, want, atol=TOLERANCE)
    for shared_prefix_lens in (None, (0,) * len(ids), tuple(n // 2 // S * S for n in SHARED), SHARED):
        same_bits(cached.decode(q, ids, lengths, window, shared_prefix_lens), got, f"declared as shared: {shared_prefix_lens}")
    for b in ids:
        same_bits(cached.decode(q[b : b + 1], [b], lengths[b : b + 1], window), got[b : b + 1], f"sequence {b} alone")


@pytest.mark.parametrize("window, policies", [(0, False), (100, False), (0, True)])
def test_a_chunk_is_its_decodes(cached, sizes, window, policies):
    """The last rows of a prompt, those of a chunk in the middle, and the same tokens decoded one by one; also with sinks and a cap."""
    if policies:
        cached.cap, cached.sinks = 2.0, np.linspace(-3, 6, cached.H).astype(np.float32)
    sequence = len(sizes.contexts) - 1
    context = sizes.contexts[sequence]
    rows = min(context, 300)
    start = context - rows
    q = numbers(rows, cached.H, cached.D)
    got = cached.chunk(q, sequence, start, window)
    some = [0, 1, rows // 2, rows - 1]
    positions, tables = [start + t for t in some], cached.tables[[sequence]]
    want = reference(q[some], positions, [0] * 4, tables, cached.values, window, cached.cap, cached.sinks)
    np.testing.assert_allclose(got[some], want, atol=TOLERANCE)
    assert np.abs(got[some] - want).mean() < TOLERANCE / 8
    for t in some:
        same_bits(cached.decode(q[t : t + 1], [sequence], [start + t + 1], window), got[t : t + 1], f"row {t} as a decode")
    middle = rows // 3
    same_bits(cached.chunk(q[middle : 2 * middle], sequence, start + middle, window), got[middle : 2 * middle], "a chunk in the middle")


@pytest.mark.parametrize("window", [0, 100])
def test_every_variant_for_prompts_has_the_same_bits(shape, sizes, monkeypatch, window):
    """Hopper's own is used on request; NVIDIA does not promise that its instructions round as the others do."""
    variants = registry.usable_variants(Placement("CUDA"), "attention_prefill")
    if len(variants) == 1:
        pytest.skip(f"{variants[0]} is the only variant for this GPU")
    cached, context = Cached(sizes.contexts, *shape), sizes.contexts[-1]
    rows = min(context, 300)
    q, results = numbers(rows, cached.H, cached.D), []
    for variant in variants:
        monkeypatch.setenv("TINYVLLM_KERNELS", f"attention_prefill={variant}")
        registry.forget_choices()
        results.append(cached.chunk(q, len(sizes.contexts) - 1, context - rows, window))
    for variant, other in zip(variants[1:], results[1:], strict=True):
        same_bits(other, results[0], f"{variant} against {variants[0]}")
