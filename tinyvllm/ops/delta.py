"""Linear attention by the gated delta rule (Gated Delta Networks, Yang et al., 2024, arXiv:2412.06464): a state a sequence in place of keys
and values.

A value head has a state S [DK, DV]. With a row's q and k, the value v, a decay g and a rate b of the row and head,
S <- g S; S <- S + k (b (v - S^T k))^T; o = S^T q. q, k and v are silu of a causal convolution of each channel; q and k then have the length
1, and q is divided by sqrt(DK). The result is silu(z) norm(o).
"""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.operands import DeltaShape, DeltaWeights
from tinyvllm.backends.registry import select
from tinyvllm.batch import Batch, StateCache
from tinyvllm.bridge import store_states
from tinyvllm.errors import ArgumentError, KernelError
from tinyvllm.placement import Placement

__all__ = ["REFERENCE_TOKENS", "DeltaShape", "DeltaWeights", "check_step_tokens", "delta_facts", "gated_delta"]

REFERENCE_TOKENS = 64  # of a sequence in a step, by the reference: it takes three small kernels a token


def delta_facts(placement: Placement, shape: DeltaShape) -> ShapeFacts:
    """What a backend's limits are checked against."""
    return ShapeFacts(placement, head_dim=shape.key_dim, outputs=shape.value_dim)


def check_step_tokens(tokens: int, shape: DeltaShape, device: str) -> None:
    """ArgumentError for steps with up to `tokens` tokens of a sequence where the reference computes them, which takes fewer."""
    placement = Placement.of(device)
    if tokens > REFERENCE_TOKENS and select("gated_delta", placement, _heads(shape), delta_facts(placement, shape)) is None:
        raise ArgumentError(
            f"max_num_batched_tokens must be at most {REFERENCE_TOKENS} where no kernel computes gated_delta ({_heads(shape)} on "
            f"{placement.device}), got {tokens}"
        )


def _heads(shape: DeltaShape) -> str:
    return f"{shape.key_heads} key and {shape.value_heads} value heads of {shape.key_dim} and {shape.value_dim}"


def gated_delta(y: Tensor, weights: DeltaWeights, cache: StateCache, batch: Batch) -> Tensor:
    """The heads' values float32 [T, VH DV] from y float32 [T, WIDTH]: of each row q [KH, DK], k [KH, DK], v [VH, DV], z [VH, DV], b [VH]
    and a [VH]. The states of the batch's sequences are read from slots of the cache, but for sequences that begin at position 0, and
    are in their own slots after the step; a copy is made after as many tokens as `Batch.states` says. A row's bits
    depend neither on the other sequences nor on how its own is divided into steps, where a kernel computes them.

    KernelError for more than REFERENCE_TOKENS tokens of a sequence in a step where no kernel does.
    """
    s, placement = weights.shape, Placement.of(y.device)
    kernel = select("gated_delta", placement, _heads(s), delta_facts(placement, s))
    if kernel is not None:
        return kernel.backend.gated_delta(kernel.variant, y, weights, cache, batch)
    tokens = batch.max_query if batch.num_chunks else 1
    if tokens > REFERENCE_TOKENS:  # `check_step_tokens` has passed: a kernel was replaced since
        raise KernelError(f"gated_delta: the reference takes up to {REFERENCE_TOKENS} tokens of a sequence in a step, not {tokens}")
    return _reference(y, weights, cache, batch, tokens)


def _reference(y: Tensor, weights: DeltaWeights, cache: StateCache, batch: Batch, Q: int) -> Tensor:
    """Sequences padded to Q rows each; what is computed of padded rows is dropped."""
    assert batch.states is not None
    s, T, B = weights.shape, int(y.shape[0]), int(batch.states.shape[0])
    starts = batch.query_starts[:B]
    at = Tensor.arange(Q, device=y.device).reshape(1, Q)
    valid = (at < (batch.query_starts[1:] - starts).unsqueeze(1)).contiguous()  # [B, Q]
    own = y[(starts.unsqueeze(1) + at).minimum(T - 1)].contiguous()  # [B, Q, WIDTH]
    is_old = (batch.positions[starts.minimum(T - 1)] > 0).reshape(B, 1)
    held = is_old.where(cache.states[batch.states[:, 1]], 0.0).contiguous()
    kept, S = _divided(held, s)
    x = kept.cat(own[:, :, : s.channels], dim=1).contiguous()  # [B, TAPS - 1 + Q, channels]
    taps = weights.taps.reshape(s.taps, 1, 1, s.channels)
    mixed = sum((x[:, i : i + Q] * taps[i] for i in range(1, s.taps)), x[:, :Q] * taps[0]).silu().contiguous()
    q, k, v = (
        part.reshape(B, Q, -1, D) for part, D in zip(mixed.split([s.keys, s.keys, s.values], dim=2), (s.key_dim, s.key_dim, s.value_dim))
    )
    q, k = (_by_value_head(_unit(part), s).contiguous() for part in (q, k))
    q = (q * s.key_dim**-0.5).contiguous()
    z, b, a = own[:, :, s.channels :].split([s.values, s.value_heads, s.value_heads], dim=2)
    decay = (weights.decay * (a + weights.shift).softplus()).exp().contiguous()  # [B, Q, VH]
    rate = b.sigmoid().contiguous()
    place = (batch.states[:, 3] - 1 - batch.positions[starts.minimum(T - 1)]).contiguous()  # of the row after which a copy is made
    outputs, copy = [], S
    for t in range(Q):
        kept_S, kt = S * decay[:, t].reshape(B, -1, 1, 1), k[:, t].unsqueeze(3)
        d = ((v[:, t] - (kept_S * kt).sum(2)) * rate[:, t].unsqueeze(2)).contiguous()  # [B, VH, DV]
        S = valid[:, t].reshape(B, 1, 1, 1).where(kept_S + kt * d.unsqueeze(2), S).contiguous()
        copy = (place == t).reshape(B, 1, 1, 1).where(S, copy).contiguous()
        outputs.append((S * q[:, t].unsqueeze(3)).sum(2).contiguous())
    o = outputs[0].unsqueeze(1) if Q == 1 else Tensor.stack(*outputs, dim=1)  # [B, Q, VH, DV]
    o = o * (o.square().mean(3, keepdim=True) + weights.eps).rsqrt() * weights.norm
    o = (o.reshape(B, Q, s.values) * z.silu()).contiguous()
    count = valid.sum(1).cast("int32")
    made = (place >= 0) & (place < count)
    rows = _joined(_last_rows(x, count, s), S).cat(_joined(_last_rows(x, made.where(place + 1, 0), s), copy)).contiguous()
    scratch = int(cache.states.shape[0]) - 1
    slots = batch.states[:, 0].cat(made.where(batch.states[:, 2], scratch)).cast("int32").contiguous()
    return store_states(cache, slots, rows, _flat(o, batch, T, Q).contiguous())


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(3, keepdim=True) + 1e-6).rsqrt()


def _by_value_head(x: Tensor, s: DeltaShape) -> Tensor:
    """The key head of each value head, of x [B, Q, KH, DK]."""
    B, Q, KH, DK = (int(d) for d in x.shape)
    group = s.value_heads // KH
    x = x.unsqueeze(2).expand(B, Q, group, KH, DK) if s.tiled else x.unsqueeze(3).expand(B, Q, KH, group, DK)
    return x.reshape(B, Q, s.value_heads, DK)


def _divided(held: Tensor, s: DeltaShape) -> tuple[Tensor, Tensor]:
    """Of states [B, STATE] as caches have them the last rows [B, TAPS - 1, channels] and S [B, VH, DK, DV]."""
    B, kept = int(held.shape[0]), (s.taps - 1) * s.channels
    tiles = held[:, kept:].reshape(B, s.value_heads, s.value_dim // s.lanes, s.key_dim, s.lanes)
    S = tiles.permute(0, 1, 3, 2, 4).reshape(B, s.value_heads, s.key_dim, s.value_dim)
    return held[:, :kept].reshape(B, s.taps - 1, s.channels), S.contiguous()


def _joined(kept: Tensor, S: Tensor) -> Tensor:
    """The opposite of `_divided`."""
    B, VH, DK, DV = (int(d) for d in S.shape)
    lanes = DeltaShape.lanes_of(DV)
    tiles = S.reshape(B, VH, DK, DV // lanes, lanes).permute(0, 1, 3, 2, 4)
    return kept.reshape(B, -1).cat(tiles.reshape(B, -1), dim=1)


def _last_rows(x: Tensor, count: Tensor, s: DeltaShape) -> Tensor:
    """The rows [B, TAPS - 1, channels] that the convolution reads after `count` [B] rows, of x with those of the state in front."""
    B = int(x.shape[0])
    index = (count.reshape(-1, 1) + Tensor.arange(s.taps - 1, device=x.device)).reshape(B, s.taps - 1, 1)
    return x.gather(1, index.expand(B, s.taps - 1, s.channels).cast("int32"))


def _flat(o: Tensor, batch: Batch, T: int, Q: int) -> Tensor:
    """Rows [T, VH DV] of the flat batch from [B, Q, VH DV]."""
    if Q == 1:
        return o.reshape(int(o.shape[0]), -1)[:T]
    t = Tensor.arange(T, device=o.device)
    B = int(o.shape[0])
    owner = (batch.query_starts[1:B].unsqueeze(0) <= t.unsqueeze(1)).where(1, 0).sum(1).cast("int32") if B > 1 else t * 0
    place = owner * Q + (t - batch.query_starts[owner]).minimum(Q - 1)
    return o.reshape(B * Q, -1)[place.cast("int32")]
