"""Paged attention against a few lines of numpy: decodes, chunks, both at once, windows, groups of query heads, blocks in any order."""

import numpy as np
import pytest

S, D, P, M = 8, 16, 24, 6


def reference(q, positions, owners, tables, pool, window):
    """Row by row: gather the owner's keys up to the row's position, softmax, weigh the values."""
    T, H, _ = q.shape
    K = pool.shape[2]
    out = np.zeros_like(q)
    for t in range(T):
        end, start = positions[t] + 1, max(0, positions[t] + 1 - window) if window else 0
        blocks = pool[tables[owners[t]]]  # [M, 2, K, S, D]
        keys, values = (blocks[:, i].transpose(1, 0, 2, 3).reshape(K, -1, D)[:, start:end] for i in (0, 1))
        for h in range(H):
            scores = keys[h * K // H] @ q[t, h] * D**-0.5
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ values[h * K // H]
    return out


def batch_of(decodes, chunks, tables):
    """A Batch of `decodes` contexts of one new token each and `chunks` of (start, length), with padding as the runner makes it."""
    from tinygrad import Tensor

    from tinyvllm.batch import Batch

    starts, positions, owners = [*range(len(decodes) + 1)], [c - 1 for c in decodes], list(range(len(decodes)))
    for i, (start, length) in enumerate(chunks):
        positions += range(start, start + length)
        owners += [len(decodes) + i] * length
        starts.append(starts[-1] + length)
    contexts = [*decodes, *(a + b for a, b in chunks)]
    arrays = [[0] * len(positions), positions, [0] * len(positions), tables, starts, contexts]
    tensors = [Tensor(np.asarray(a, dtype=np.int32)).realize() for a in arrays]
    blocks = max(-(-c // S) for c in contexts)
    longest = max((n for _, n in chunks), default=1)
    return Batch(*tensors, blocks, len(decodes), longest), np.array(positions), np.array(owners)


CASES = {
    "one decode": ([11], []),
    "decodes": ([1, 8, 48, 23], []),
    "a fresh prompt": ([], [(0, 20)]),
    "a chunk in the middle": ([], [(13, 9)]),
    "several chunks": ([], [(0, 5), (30, 16), (7, 1)]),
    "decodes and chunks": ([9, 40], [(0, 12), (16, 3)]),
}


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["4 of 4", "6 of 2"])
@pytest.mark.parametrize("window", [0, 5], ids=["full", "window"])
@pytest.mark.parametrize("case", CASES)
def test_against_numpy(case, window, heads):
    from tinygrad import Tensor

    from tinyvllm.batch import LayerCache
    from tinyvllm.ops.attention import PagedAttention
    from tinyvllm.ops.launch import alias

    (H, K), (decodes, chunks), random = heads, CASES[case], np.random.default_rng(3)
    sequences = len(decodes) + len(chunks)
    tables = random.permutation(P)[: sequences * M].reshape(-1, M) if sequences * M <= P else random.integers(0, P, (sequences, M))
    batch, positions, owners = batch_of(decodes, chunks, tables)
    pool = random.standard_normal((P, 2, K, S, D)).astype(np.float32)
    q = random.standard_normal((len(positions), H, D)).astype(np.float32)
    keys = Tensor(pool).contiguous().realize()
    out = PagedAttention(batch, S)(Tensor(q), LayerCache(keys, alias(keys)), D**-0.5, window).numpy()
    np.testing.assert_allclose(out, reference(q, positions, owners, tables, pool, window), atol=2e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_caches_are_read_as_they_are(dtype):
    from tinygrad import Tensor, dtypes

    from tinyvllm.batch import LayerCache
    from tinyvllm.ops.attention import PagedAttention
    from tinyvllm.ops.launch import alias

    random = np.random.default_rng(4)
    tables = random.permutation(P)[:M].reshape(1, M)
    batch, positions, owners = batch_of([30], [], tables)
    pool = Tensor(random.standard_normal((P, 2, 2, S, D)).astype(np.float32)).cast(getattr(dtypes, dtype)).realize()
    q = random.standard_normal((1, 4, D)).astype(np.float32)
    out = PagedAttention(batch, S)(Tensor(q), LayerCache(pool, alias(pool)), D**-0.5).numpy()
    np.testing.assert_allclose(out, reference(q, positions, owners, tables, pool.float().numpy(), 0), atol=2e-6)
