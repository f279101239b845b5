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
from tinyvllm.backends.registry import REFERENCE, choice_of, select
from tinyvllm.batch import Batch, StateCache
from tinyvllm.bridge import store_states
from tinyvllm.errors import ArgumentError, KernelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.placement import Placement

__all__ = ["REFERENCE_TOKENS", "DeltaShape", "DeltaWeights", "check_step_tokens", "delta_facts", "gated_delta", "has_kernel"]

REFERENCE_TOKENS = 64  # of a sequence in a step, by the reference: it takes three small kernels a token


def delta_facts(placement: Placement, shape: DeltaShape, drafts: int = 0) -> ShapeFacts:
    """What a backend's limits are checked against."""
    return ShapeFacts(placement, head_dim=shape.key_dim, outputs=shape.value_dim, drafts=drafts)


def has_kernel(shape: DeltaShape, device: str, drafts: int) -> bool:
    """Whether a kernel computes states that keep up to `drafts` drafts."""
    choice = choice_of("gated_delta", _heads(shape), delta_facts(Placement.of(device), shape, drafts))
    return choice.variant != REFERENCE


def check_step_tokens(tokens: int, shape: DeltaShape, device: str, drafts: int = 0) -> None:
    """ArgumentError for steps with up to `tokens` tokens of a sequence where the reference computes them, which takes fewer."""
    if tokens > REFERENCE_TOKENS and not has_kernel(shape, device, drafts):
        raise ArgumentError(
            f"max_num_batched_tokens must be at most {REFERENCE_TOKENS} where no kernel computes gated_delta ({_heads(shape)} on "
            f"{Placement.of(device).device}), got {tokens}"
        )


def _heads(shape: DeltaShape) -> str:
    return f"{shape.key_heads} key and {shape.value_heads} value heads of {shape.key_dim} and {shape.value_dim}"


def gated_delta(y: Tensor, weights: DeltaWeights, cache: StateCache, batch: Batch) -> Tensor:
    """The heads' values float32 [T, VH DV] from y float32 [T, WIDTH]: of each row q [KH, DK], k [KH, DK], v [VH, DV], z [VH, DV], b [VH]
    and a [VH]. The states of the batch's sequences are read from slots of the cache, but for sequences that begin at position 0, and
    are in their own slots after the step; a copy is made after as many tokens as `Batch.states` says. Decodes with one slot are a token and
    up to `cache.drafts` drafts after it: the state is that after the token, and a later step takes those drafts into it whose positions
    are before its own. A row's bits depend neither on the other sequences nor on how its own is divided into steps, where a kernel
    computes them.

    KernelError for more than REFERENCE_TOKENS tokens of a sequence in a step where no kernel does.
    """
    s, placement = weights.shape, Placement.of(y.device)
    kernel = select("gated_delta", placement, _heads(s), delta_facts(placement, s, cache.drafts))
    if kernel is not None:
        return kernel.backend.gated_delta(kernel.variant, y, weights, cache, batch)
    tokens = batch.max_query if batch.num_chunks else 1
    if tokens > REFERENCE_TOKENS:  # `check_step_tokens` has passed: a kernel was replaced since
        raise KernelError(f"gated_delta: the reference takes up to {REFERENCE_TOKENS} tokens of a sequence in a step, not {tokens}")
    return _reference(y, weights, cache, batch, tokens)


def _reference(y: Tensor, weights: DeltaWeights, cache: StateCache, batch: Batch, Q: int) -> Tensor:
    """Sequences padded to `cache.drafts` accepted drafts and Q rows each; what is computed of padded rows is dropped."""
    assert batch.states is not None
    s, D, T, B = weights.shape, cache.drafts, int(y.shape[0]), int(batch.states.shape[0])
    starts, runs = batch.query_starts[:B], _runs(batch, B, D)
    Q = max(Q, min(D + 1, batch.num_decodes))
    N = D + Q
    at = Tensor.arange(Q, device=y.device).reshape(1, Q)
    own = y[(starts.unsqueeze(1) + at).minimum(T - 1)].contiguous()  # [B, Q, WIDTH]
    first = batch.positions[starts.minimum(T - 1)]
    held = (first > 0).reshape(B, 1).where(cache.states[batch.states[:, 1]], 0.0).contiguous()
    (kept, S, gates), taken = _divided(held, s, D), _taken(held, first, s, D)
    x = _joined_rows(kept, own[:, :, : s.channels], taken, D).contiguous()  # [B, TAPS - 1 + N, channels]
    taps = weights.taps.reshape(s.taps, 1, 1, s.channels)
    mixed = sum((x[:, i : i + N] * taps[i] for i in range(1, s.taps)), x[:, :N] * taps[0]).silu().contiguous()
    q, k, v = (
        part.reshape(B, N, -1, width)
        for part, width in zip(mixed.split([s.keys, s.keys, s.values], dim=2), (s.key_dim, s.key_dim, s.value_dim))
    )
    q, k = (_by_value_head(_unit(part), s).contiguous() for part in (q, k))
    q = (q * s.key_dim**-0.5).contiguous()
    z, rates = own[:, :, s.channels :].split([s.values, 2 * s.value_heads], dim=2)
    rates = _joined_rows(gates, rates, taken, D).contiguous()
    b, a = rates.split([s.value_heads, s.value_heads], dim=2)
    decay = (weights.decay * (a + weights.shift).softplus()).exp().contiguous()  # [B, N, VH]
    rate = b.sigmoid().contiguous()
    place = (batch.states[:, 3] - 1 - first).contiguous()  # of the row after which a copy is made
    outputs, copy, after = [], S, S
    for t in range(N):
        kept_S, kt = S * decay[:, t].reshape(B, -1, 1, 1), k[:, t].unsqueeze(3)
        d = ((v[:, t] - (kept_S * kt).sum(2)) * rate[:, t].unsqueeze(2)).contiguous()  # [B, VH, DV]
        S = _if(taken + runs.rows > t, kept_S + kt * d.unsqueeze(2), S)
        after = _if(taken + runs.certain > t, S, after) if D else S
        copy = _if(taken + place == t, S, copy)
        outputs.append((S * q[:, t].unsqueeze(3)).sum(2).contiguous())
    o = outputs[0].unsqueeze(1) if N == 1 else Tensor.stack(*outputs, dim=1)  # [B, N, VH, DV]
    o = _rows_from(o.reshape(B, N, s.values), taken, Q).reshape(B, Q, s.value_heads, s.value_dim) if D else o
    o = o * (o.square().mean(3, keepdim=True) + weights.eps).rsqrt() * weights.norm
    o = (o.reshape(B, Q, s.values) * z.silu()).contiguous()
    made = (place >= 0) & (place < runs.certain)
    ends = runs.certain, made.where(place + 1, 0)
    joined = [
        _joined(_rows_from(x, taken + end, s.taps - 1 + D), state, _rows_from(rates, taken + end, D) if D else None, first + end, s, D)
        for end, state in zip(ends, (after, copy), strict=True)
    ]
    scratch = int(cache.states.shape[0]) - 1
    slots = (runs.rows > 0).where(batch.states[:, 0], scratch).cat(made.where(batch.states[:, 2], scratch)).cast("int32").contiguous()
    return store_states(cache, slots, joined[0].cat(joined[1]).contiguous(), _flat(o, batch, runs, T, Q).contiguous())


@dataclass(frozen=True, eq=False)
class _Runs:
    """int32 [B] of each sequence: its rows, those that are no drafts, and of a decode the number of its draft. The drafts of a sequence are
    sequences without rows.
    """

    rows: Tensor
    certain: Tensor
    number: Tensor | None = None


def _runs(batch: Batch, B: int, D: int) -> _Runs:
    assert batch.states is not None
    rows = (batch.query_starts[1:] - batch.query_starts[:B]).contiguous()
    if not D or batch.num_decodes < 2:
        return _Runs(rows, rows)
    slots, b = batch.states[:, 0], Tensor.arange(B, device=rows.device)
    drafts = ((slots[1:] == slots[:-1]) & (b[1:] < batch.decodes)).cast("int32").pad(((1, 0),)).contiguous()
    before = after = drafts * 0 + 1
    number = following = drafts * 0
    for i in range(min(D, batch.num_decodes - 1)):
        before = before * drafts.pad(((i, 0),))[:B]
        after = after * drafts[i + 1 :].pad(((0, i + 1),))
        number, following = (number + before).contiguous(), (following + after).contiguous()
    return _Runs((drafts > 0).where(0, rows + following).contiguous(), (drafts > 0).where(0, rows).contiguous(), number)


def _if(condition: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """By sequence, of tensors [B, VH, DK, DV]."""
    return condition.reshape(-1, 1, 1, 1).where(one, other).contiguous()


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(3, keepdim=True) + 1e-6).rsqrt()


def _by_value_head(x: Tensor, s: DeltaShape) -> Tensor:
    """The key head of each value head, of x [B, Q, KH, DK]."""
    B, Q, KH, DK = (int(d) for d in x.shape)
    group = s.value_heads // KH
    x = x.unsqueeze(2).expand(B, Q, group, KH, DK) if s.tiled else x.unsqueeze(3).expand(B, Q, KH, group, DK)
    return x.reshape(B, Q, s.value_heads, DK)


def _divided(held: Tensor, s: DeltaShape, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of slots [B, numbers] as caches have them the last rows with those of drafts [B, TAPS - 1 + D, channels], S [B, VH, DK, DV], and
    b and a of drafts [B, D, 2 VH].
    """
    B, kept = int(held.shape[0]), (s.taps - 1 + D) * s.channels
    matrix, gates = kept + s.value_heads * s.key_dim * s.value_dim, 2 * s.value_heads * D
    tiles = held[:, kept:matrix].reshape(B, s.value_heads, s.value_dim // s.lanes, s.key_dim, s.lanes)
    S = tiles.permute(0, 1, 3, 2, 4).reshape(B, s.value_heads, s.key_dim, s.value_dim)
    rates = held[:, matrix : matrix + gates].reshape(B, D, 2 * s.value_heads)
    return held[:, :kept].reshape(B, s.taps - 1 + D, s.channels), S.contiguous(), rates


def _taken(held: Tensor, first: Tensor, s: DeltaShape, D: int) -> Tensor:
    """Accepted drafts that the states [B] before the positions `first` [B] lack; of padding any number that slots have room for."""
    if not D:
        return first * 0
    tokens = held[:, s.state + D * (s.channels + 2 * s.value_heads)].cast("int32")
    return (first - tokens).maximum(0).minimum(D).contiguous()


def _joined(kept: Tensor, S: Tensor, rates: Tensor | None, tokens: Tensor, s: DeltaShape, D: int) -> Tensor:
    """The opposite of `_divided`."""
    B, VH, DK, DV = (int(d) for d in S.shape)
    tiles = S.reshape(B, VH, DK, DV // s.lanes, s.lanes).permute(0, 1, 3, 2, 4)
    slot = kept.reshape(B, -1).cat(tiles.reshape(B, -1), dim=1)
    if rates is None:
        return slot
    slot = slot.cat(rates.reshape(B, -1), tokens.cast("float32").reshape(B, 1), dim=1)
    return slot.pad(((0, 0), (0, s.slot(D) - int(slot.shape[1]))))


def _joined_rows(kept: Tensor, own: Tensor, taken: Tensor, D: int) -> Tensor:
    """The rows [B, M, n] of `kept` but for its last D, of these the first `taken` [B], and then those of `own` [B, Q, n]."""
    if not D:
        return kept.cat(own, dim=1)
    both = kept.cat(own, dim=1)
    r, end = Tensor.arange(int(both.shape[1]), device=own.device).unsqueeze(0), (taken + int(kept.shape[1]) - D).unsqueeze(1)
    return _rows_at(both, (r < end).where(r, (r + (D - taken).unsqueeze(1)).minimum(int(both.shape[1]) - 1)))


def _rows_from(x: Tensor, start: Tensor, count: int) -> Tensor:
    """`count` rows of each sequence from `start` [B], of x [B, M, n]; the last one again after it."""
    at = start.unsqueeze(1) + Tensor.arange(count, device=x.device).unsqueeze(0)
    return _rows_at(x, at.minimum(int(x.shape[1]) - 1))


def _rows_at(x: Tensor, at: Tensor) -> Tensor:
    return x.gather(1, at.unsqueeze(2).expand(*at.shape, int(x.shape[2])).cast("int32"))


def _flat(o: Tensor, batch: Batch, runs: _Runs, T: int, Q: int) -> Tensor:
    """Rows [T, VH DV] of the flat batch from [B, Q, VH DV]."""
    if Q == 1:
        return o.reshape(int(o.shape[0]), -1)[:T]
    t = Tensor.arange(T, device=o.device)
    B = int(o.shape[0])
    owner = (batch.query_starts[1:B].unsqueeze(0) <= t.unsqueeze(1)).where(1, 0).sum(1).cast("int32") if B > 1 else t * 0
    if runs.number is not None:
        owner = (owner - runs.number[owner]).cast("int32")
    place = owner * Q + (t - batch.query_starts[owner]).minimum(Q - 1)
    return o.reshape(B * Q, -1)[place.cast("int32")]
