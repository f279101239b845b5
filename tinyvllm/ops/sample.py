"""The operations between logits and tokens, for a whole batch at once: penalties, bias, filters, counter-based noise, argmax.

Letters: B rows of the batch, V vocabulary. Everything here is a function of one row and of nothing else in the batch, down to the last
bit: sums are sums of integers, maxima are maxima of integers, and the expressions that round freely (noise, scores, weights) are kernels
of their own, whose text does not depend on what else the batch needs. So a row's token cannot depend on its neighbours. Knows no
sequences and no parameters' names.

The order is vLLM's: repetition, presence and frequency penalties, bias, temperature, min_p, top_k, top_p, draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.operands import DrawInputs as DrawInputs
from tinyvllm.backends.registry import select
from tinyvllm.bridge import copied
from tinyvllm.integers import round_up
from tinyvllm.placement import Placement

THREEFRY_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
THREEFRY_ROUNDS = 20
THREEFRY_PARITY = 0x1BD11BDA
TOP_P_BITS = 30
TOP_P_ONE = 1 << TOP_P_BITS  # top_p is a fixed-point number with TOP_P_BITS fractional bits
WEIGHT_ONE = 1 << 40  # a token's weight relative to the most probable one: fixed point, 40 fractional bits; V of them fit 63 bits
SEARCH_BITS = 4  # 16 intervals a pass: with 2 bits the vocabulary is read twice as often, with 8 there is too much to compare

_BELOW_FLOATS, _ABOVE_FLOATS = 0x00800000, 0xFF800000  # order_bits of -inf and +inf; beyond them are the NaNs


def threefry2x32(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor], rounds: int = THREEFRY_ROUNDS) -> tuple[Tensor, Tensor]:
    """Two random words for each (key, counter), all uint32 and of one shape.

    Threefry-2x32 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Chosen over Philox because
    it needs no 64-bit products, which CPUs do not vectorise.
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ THREEFRY_PARITY)
    a, b = counter[0] + keys[0], counter[1] + keys[1]
    for i in range(rounds):
        rotation = THREEFRY_ROTATIONS[i % 8]
        a = a + b
        b = ((b << rotation) | (b >> (32 - rotation))) ^ a
        if i % 4 == 3:
            turn = i // 4 + 1
            a, b = a + keys[turn % 3], b + keys[(turn + 1) % 3] + turn
    return a, b


def gumbel(seed_low: Tensor, seed_high: Tensor, position: Tensor, V: int) -> Tensor:
    """Standard Gumbel noise float32 [B, V], a function of (seed, position, token id) alone; the arguments are uint32 [B, 1].

    -log(E) with E = -log(1 - u), u in (0, 1] of 31 random bits. The tokens that win have u near 0, where floats are dense, so even in a
    vocabulary of 10^5 equal logits ties are rare.
    """
    # At a width that is a multiple of 3, tinygrad unrolls this kernel by 3 and the C compiler vectorises it. At other widths tinygrad
    # unrolls by 4, which the C compiler does not vectorise.
    B, width = int(seed_low.shape[0]), round_up(V, 3)
    token = Tensor.arange(width, device=seed_low.device).cast(dtypes.uint32).reshape(1, width)
    spread = [t.expand(B, width) for t in (seed_low, seed_high, token, position)]
    word, _ = threefry2x32((spread[0], spread[1]), (spread[2], spread[3]))
    u = ((word >> 1).cast(dtypes.int32).cast(dtypes.float32) + 0.5) * 2.0**-31
    small = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))  # 1 - u would round a small u away
    return -_log((u < 0.01).where(small, -_log(1.0 - u))).contiguous()[:, :V]


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of float32 that are normal and positive, 2e-6 off at most; of 0 about -88.

    The device's own logarithm is slower on CPUs (it handles what cannot occur here) and differs between devices, and a seed should
    mean the same tokens everywhere. Reduction to [sqrt(1/2), sqrt(2)) and polynomial of Moshier's Cephes library, `logf`.
    """
    bits = x.bitcast(dtypes.int32) - 0x3F3504F3
    exponent = (bits >> 23).cast(dtypes.float32)
    m = ((bits & 0x7FFFFF) + 0x3F3504F3).bitcast(dtypes.float32) - 1.0
    y: Tensor = m * _LOG_POLYNOMIAL[0] + _LOG_POLYNOMIAL[1]
    for coefficient in _LOG_POLYNOMIAL[2:]:
        y = y * m + coefficient
    return exponent * math.log(2.0) + (m + m * m * (y * m - 0.5))


_LOG_POLYNOMIAL = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip


def order_bits(x: Tensor) -> Tensor:
    """uint32 that compare as the float32 in x do; the two zeros are equal. CPUs vectorise maxima of integers, but not of floats."""
    bits = x.bitcast(dtypes.int32)
    return (bits < 0).where(-(bits & 0x7FFFFFFF), bits).bitcast(dtypes.uint32) ^ 0x80000000


def from_order_bits(order: Tensor) -> Tensor:
    """The float32 whose order bits are `order`; the order bits of a NaN give the infinity next to it."""
    bits = (order.maximum(_BELOW_FLOATS).minimum(_ABOVE_FLOATS) ^ 0x80000000).bitcast(dtypes.int32)
    return (bits < 0).where(-bits | -0x80000000, bits).bitcast(dtypes.float32)


def argmax(x: Tensor) -> Tensor:
    """int32 [B]: the token with the largest x [B, V] in each row, the lowest id among equals; -1 where there is none.

    None means that every entry is -inf, or that NaNs reach the top: tinygrad's own argmax answers V for them, which is no token.
    """
    V = int(x.shape[1])
    backwards = (V - 1 - Tensor.arange(V, device=x.device)).cast(dtypes.uint64)
    best = ((order_bits(x).cast(dtypes.uint64) << 32) | backwards).max(1)  # value and id in one reduction
    value, token = (best >> 32).cast(dtypes.uint32), V - 1 - (best & 0xFFFFFFFF).cast(dtypes.int32)
    return ((value > _BELOW_FLOATS) & (value <= _ABOVE_FLOATS)).where(token, -1)


def penalize(logits: Tensor, counts: Tensor, prompted: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Logits [B, V] lowered for tokens that were there before; counts int32 and prompted uint8 [B, V], the penalties float32 [B, 1].

    `repetition` divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al. 2019, CTRL); `presence` and
    `frequency` are subtracted for output tokens, once and once per occurrence (OpenAI's definition). 1, 0, 0 change no bit.
    """
    seen = (counts > 0) | (prompted > 0)
    repeated = (logits > 0).where(logits / repetition, logits * repetition)
    return seen.where(repeated, logits) - presence * (counts > 0).cast(dtypes.float32) - frequency * counts.cast(dtypes.float32)


def perturb(logits: Tensor, inverse_temperature: Tensor, seed_low: Tensor, seed_high: Tensor, position: Tensor) -> Tensor:
    """Float32 [B, V] whose argmax is a draw from softmax(logits / temperature): the Gumbel-max method.

    Rows with inverse temperature 0 are greedy: they come back as they are. `logits` must be a buffer, not an expression, and the result
    is one: in a kernel with more in it, multiplication and addition might round once where they round twice elsewhere.
    """
    noise = gumbel(seed_low, seed_high, position, int(logits.shape[1]))
    return (inverse_temperature == 0).where(logits, logits * inverse_temperature + noise).contiguous()


def search_steps(device: str) -> list[Tensor]:
    """The widths of the intervals in the passes of a threshold search, one small buffer each.

    As constants in the graph they would make every pass a kernel to be compiled on its own.
    """
    shifts = range(32 - SEARCH_BITS, -1, -SEARCH_BITS)
    return [copied(np.array([1 << shift], np.uint32), device) for shift in shifts]


def row_numbers(B: int, device: str) -> Tensor:
    """0 to B - 1, int32."""
    return Tensor.arange(B, device=device).cast(dtypes.int32).contiguous()


def _search(reached: Callable[[Tensor], Tensor], B: int, steps: list[Tensor]) -> Tensor:
    """The largest float32 [B, 1] that `reached` holds for, found exactly, 4 bits of its order bits a pass.

    `reached` maps candidates [B, 15] to booleans of that shape, true up to some value in each row and false from there on.
    """
    device, last = steps[0].device, (1 << SEARCH_BITS) - 1
    multiples = Tensor.arange(1, last + 1, device=device).cast(dtypes.uint32).reshape(1, last)
    low = Tensor.zeros(B, 1, dtype=dtypes.uint32, device=device).contiguous()
    for step in steps:
        hits = reached(from_order_bits(low + multiples * step)).cast(dtypes.uint32).sum(1, keepdim=True, dtype=dtypes.uint32)
        low = (low + hits * step).contiguous()
    return from_order_bits(low)


def _total(x: Tensor) -> Tensor:
    """x [B, N, V] of integers, summed over V.

    From V = 32768 on tinygrad splits the sum itself. Below, it unrolls by four neighbours, which keeps the C compiler from vectorising:
    summing 32 parts whose elements lie side by side, then the rest, is 3 to 5 times faster.
    """
    B, N, V = (int(d) for d in x.shape)
    if V < 32768 and V % 32 == 0:
        x = x.reshape(B, N, 32, V // 32).sum(2).contiguous()
    return x.sum(2).contiguous()


def peak(logits: Tensor) -> Tensor:
    """The largest logit of each row, [B, 1]."""
    return from_order_bits(order_bits(logits).max(1, keepdim=True)).contiguous()


def top_k_threshold(logits: Tensor, k: Tensor, steps: list[Tensor]) -> Tensor:
    """The k-th largest logit of each row, [B, 1], for k int32 [B, 1] from 1 to V. Tokens that equal it survive with it."""
    B, V = (int(d) for d in logits.shape)

    def reached(candidates: Tensor) -> Tensor:
        above = logits.reshape(B, 1, V) >= candidates.reshape(B, -1, 1)
        return _total(above.cast(dtypes.int32)) >= k

    return _search(reached, B, steps)


def top_p_threshold(
    logits: Tensor, peaks: Tensor, floor: Tensor, inverse_temperature: Tensor, top_p: Tensor, steps: list[Tensor]
) -> Tensor:
    """The logit of the last token that top_p lets live, [B, 1], among those that reach `floor`; `floor` itself where top_p is 1.

    That is the largest threshold at which the surviving tokens' probabilities, renormalised over those that reach `floor`, sum to top_p
    or more; tokens that equal it survive with it. top_p int64 [B, 1] counts in units of 1 / TOP_P_ONE, the others are float32 [B, 1].
    """
    B, V = (int(d) for d in logits.shape)
    weights = ((logits - peaks) * inverse_temperature).exp() * WEIGHT_ONE
    weights = (logits >= floor).where(weights, 0).cast(dtypes.int64).contiguous()  # integers, so that no order of summation shows
    total = weights.sum(1, keepdim=True)
    # total * top_p / TOP_P_ONE without leaving 63 bits
    share = (total >> TOP_P_BITS) * top_p + (((total & (TOP_P_ONE - 1)) * top_p) >> TOP_P_BITS)
    share = share.maximum(1).contiguous()

    def reached(candidates: Tensor) -> Tensor:
        above = logits.reshape(B, 1, V) >= candidates.reshape(B, -1, 1)
        return _total(above.where(weights.reshape(B, 1, V), 0)) >= share

    return (top_p >= TOP_P_ONE).where(floor, _search(reached, B, steps))


def draw(logits: Tensor, how: DrawInputs) -> Tensor | None:
    """Tokens int32 [B], drawn from logits float32 [B, V] by all of the above in one kernel; None if there is no kernel for it.

    `logits` must be a buffer. Whatever a row's parameters ask for must be switched on in `how`. Nothing else in the graph may read
    `how.lines`.
    """
    V, placement = int(logits.shape[1]), Placement.of(logits.device)
    features = "+".join(name.lower() for name, on in how.features.items() if on) or "greedy"
    kernel = select("sample", placement, f"V={V} {features}", ShapeFacts(placement, vocabulary=V, features=features))
    return None if kernel is None else kernel.backend.sample(kernel.variant, logits, how)
