"""Programs in UOps that tinygrad's own ops cannot express: stores through an index."""

from __future__ import annotations

from tinygrad import Tensor, UOp, dtypes
from tinygrad.uop.ops import KernelInfo

from tinyvllm.batch import LayerCache, StateCache


def store_kv(cache: LayerCache, k: Tensor, v: Tensor, slots: Tensor) -> LayerCache:
    """cache, of [P, 2, K, S, D], with k, v [T, K, D] written at slots [T] (block * S + offset), in place; returns the cache after it.

    Rows with a negative slot (NO_SLOT) go to the first slot of the last block, which no row reads.

    tinygrad's scatter rewrites the whole destination; this stores T rows. Whatever reads the returned tensors runs after the store,
    also inside a captured step.
    """
    K, S, D = cache.K, cache.S, cache.D

    def program(keys: UOp, values: UOp, k: UOp, v: UOp, slots: UOp) -> UOp:
        t, h, d = UOp.range(k.shape[0], 0), UOp.range(K, 1), UOp.range(D, 2)
        slot = _stored_slot(keys, slots, t, S)
        block, offset, dtype = slot // S, slot % S, keys.dtype.base
        key = keys[block, 0, h, offset, d].store(k[t, h, d].cast(dtype))
        value = values[block, 1, h, offset, d].store(v[t, h, d].cast(dtype))
        sink: UOp = UOp.group(key, value).end(t, h, d).sink(arg=KernelInfo(name="store_kv"))
        return sink

    return cache.after(*cache.keys.custom_kernel(cache.values, k, v, slots, fxn=program)[:2])


def store_latents(cache: LayerCache, k: Tensor, slots: Tensor) -> LayerCache:
    """The same for a cache of latents, [P, 1, 1, S, D], with k [T, 1, D]; keys and values are one memory, so that both stores are one."""
    S, D = cache.S, cache.D

    def program(keys: UOp, values: UOp, k: UOp, slots: UOp) -> UOp:
        t, d = UOp.range(k.shape[0], 0), UOp.range(D, 1)
        slot = _stored_slot(keys, slots, t, S)
        block, offset, number = slot // S, slot % S, k[t, 0, d].cast(keys.dtype.base)
        stores = [side[block, 0, 0, offset, d].store(number) for side in (keys, values)]
        sink: UOp = UOp.group(*stores).end(t, d).sink(arg=KernelInfo(name="store_latents"))
        return sink

    return cache.after(*cache.keys.custom_kernel(cache.values, k, slots, fxn=program)[:2])


def store_states(cache: StateCache, slots: Tensor, rows: Tensor, result: Tensor) -> Tensor:
    """`result` [T, D] in memory of its own, once rows [B, N] are stored at slots [B] of the cache, in place.

    Slots are distinct but for that of padding. The copy is what makes a step store: nothing else reads the cache after it.
    """

    def program(states: UOp, copy: UOp, rows: UOp, result: UOp, slots: UOp) -> UOp:
        b, n = UOp.range(rows.shape[0], 0), UOp.range(rows.shape[1], 1)
        t, d = UOp.range(result.shape[0], 2), UOp.range(result.shape[1], 3)
        stored = states[slots[b].cast(dtypes.weakint), n].store(rows[b, n]).end(b, n)
        copied = copy[t, d].store(result[t, d]).end(t, d)
        sink: UOp = UOp.sink(stored, copied, arg=KernelInfo(name="store_states"))
        return sink

    copy = Tensor.empty(*result.shape, dtype=result.dtype, device=result.device)
    return cache.states.custom_kernel(copy, rows, result, slots, fxn=program)[1]


def _stored_slot(keys: UOp, slots: UOp, t: UOp, S: int) -> UOp:
    slot = slots[t]
    stored: UOp = (slot < 0).where((int(keys.shape[0]) - 1) * S, slot).cast(dtypes.weakint)
    return stored


def store_packed_kv(cache: LayerCache, k: Tensor, v: Tensor, slots: Tensor) -> LayerCache:
    """The same for a packed cache; k, v uint8 [T, K, bytes + 2] are the quants of each row and then its scale."""
    layout = cache.packed
    assert layout is not None
    K, S, N, scales = layout.K, layout.S, layout.row_bytes, layout.scales

    def program(keys: UOp, values: UOp, k: UOp, v: UOp, slots: UOp) -> UOp:
        t, h, i = UOp.range(k.shape[0], 0), UOp.range(K, 1), UOp.range(N + 2, 2)
        slot = _stored_slot(keys, slots, t, S)
        block, s = slot // S, slot % S
        of_key = h * (S * N) + (i // 4 * S + s) * 4 + i % 4
        of_value = (h + K) * (S * N) + (s // 4 * N + i) * 4 + s % 4
        of_scales = (scales + 2 * ((side * K + h) * S + s) + i - N for side in (0, 1))
        stores = []
        for pool, rows, of_quant, of_scale in zip((keys, values), (k, v), (of_key, of_value), of_scales, strict=True):
            stores.append(pool[block, (i < N).where(of_quant, of_scale)].store(rows[t, h, i]))
        sink: UOp = UOp.group(*stores).end(t, h, i).sink(arg=KernelInfo(name="store_packed_kv"))
        return sink

    return cache.after(*cache.keys.custom_kernel(cache.values, k, v, slots, fxn=program)[:2])


def scatter_add(table: Tensor, rows: Tensor, columns: Tensor, amount: int = 1) -> Tensor:
    """table [R, V] int32 with `amount` added at (rows [B], columns [B]), in place and in that order; returns the table after it."""

    def program(table: UOp, rows: UOp, columns: UOp) -> UOp:
        b = UOp.range(rows.shape[0], 0)
        cell = table[rows[b].cast(dtypes.weakint), columns[b].cast(dtypes.weakint)]
        sink: UOp = cell.store(cell + amount).end(b).sink(arg=KernelInfo(name="scatter_add", opts_to_apply=()))
        return sink

    return table.custom_kernel(rows, columns, fxn=program)[0]
