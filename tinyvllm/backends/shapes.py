"""Shapes of launches, and the constants that kernels of several backends are compiled with for them, under the same names."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends import policies
from tinyvllm.backends.buffers import cache_format, constant
from tinyvllm.backends.kernel import Constant
from tinyvllm.backends.operands import QKV, AdapterStack, NormWeights
from tinyvllm.batch import PACKED_KV, Batch, KVLayout, LayerCache
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.placement import RankGroup


@dataclass(frozen=True)
class Product:
    """A product of x [T, I] with a weight in `format`, O outputs, and what is computed before and after it.

    bias, residual, gelu  are applied to the outputs, in this order
    silu                  the weight has 2 * O rows, gate and then up; the outputs are silu(gate) * up
    gated                 the weight is up; the outputs hold gate, and become silu(gate) * up
    eps                   of the RMSNorm before the product, as C reads it; None if there is none
    gather                x is gathered through an index of rows
    borders               where the outputs of the second and the third of three matrices start
    gate                  the residual is a gate: its silu multiplies the outputs
    bias_first            the first of the outputs' biases, if the bias is that of several matrices
    bias_pitch            from a row's biases to the next row's, 0 where all rows have the same
    """

    format: str
    T: int
    O: int
    I: int
    bias: bool = False
    residual: bool = False
    gelu: bool = False
    silu: bool = False
    gated: bool = False
    eps: str | None = None
    gather: bool = False
    borders: tuple[int, int] | None = None
    gate: bool = False
    bias_first: int = 0
    bias_pitch: int = 0

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.O * (1 + self.silu)


@dataclass(frozen=True)
class AdapterProduct:
    """The products of x [T, I] with the low-rank matrices of each row's adapter, O outputs by up to R ranks: `AdapterStack`.

    starts  the first output of each projection
    eps     of the RMSNorm before the product, as C reads it; None if there is none
    bias    is added to what adapters make
    """

    T: int
    O: int
    I: int
    R: int
    starts: tuple[int, ...] = (0,)
    eps: str | None = None
    bias: bool = False

    @classmethod
    def of(cls, x: Tensor, norm: NormWeights | None, stack: AdapterStack, bias: Tensor | None) -> AdapterProduct:
        (_, _, R, I), O = (int(d) for d in stack.a.shape), int(stack.b.shape[2])
        return cls(int(x.shape[0]), O, I, R, stack.starts, None if norm is None else constant(norm.eps), bias is not None)

    @property
    def hidden(self) -> int:
        """Numbers between the two matrices, of a row."""
        return len(self.starts) * self.R

    @property
    def borders(self) -> dict[str, Constant]:
        """Constants of kernels that must know an output's projection."""
        return dict(zip(("SECOND", "THIRD", "FOURTH"), self.starts[1:]))


@dataclass(frozen=True)
class Heads:
    """What becomes of the outputs of q, k and v: constants of norm_qkv_rope_store and rope_store."""

    H: int
    K: int
    D: int
    S: int
    R: int
    cache: str
    bias: bool
    qk_norm: bool
    qk_eps: str
    others: tuple[int, ...] = ()  # heads of the second and the third matrix, where parts have several formats
    bias_pitch: int = 0  # as of Product
    ranks: RankGroup | None = None  # that divide contexts

    @classmethod
    def of(cls, outputs: int, qkv: QKV, angles: Tensor | None, cache: LayerCache) -> Heads:
        """The heads of a layer whose q, k and v together have `outputs` outputs."""
        K, S, D = cache.K, cache.S, cache.D
        R = 0 if angles is None else int(angles.shape[1])
        H, norms, pitch = outputs // D - 2 * K, qkv.q_norm is not None, policies.bias_pitch(qkv.bias)
        biased, eps = qkv.bias is not None, constant(qkv.qk_eps)
        return cls(H, K, D, S, R, cache_format(cache), biased, norms, eps, bias_pitch=pitch, ranks=cache.ranks)

    @property
    def defines(self) -> dict[str, Constant]:
        return dict(
            H=self.H, K=self.K, D=self.D, S=self.S, R=self.R, CACHE_TYPE=self.cache, BIAS=int(self.bias), QK_NORM=int(self.qk_norm),
            QK_EPS=self.qk_eps, **policies.row_bias(self.bias_pitch), **policies.ranks(self.ranks),
        )  # fmt: skip

    @property
    def main(self) -> int:
        """Heads of the first matrix, of all if there are no others."""
        return self.H + 2 * self.K - sum(self.others)

    @property
    def parts(self) -> dict[str, Constant]:
        """Constants of kernels that take the heads from MAIN on from other products."""
        return dict(MAIN=self.main, SECOND=self.others[0]) if self.others else {}

    @property
    def outputs(self) -> int:
        return (self.H + 2 * self.K) * self.D

    @property
    def whole(self) -> bool:
        """Whether a head must be complete before it can be stored."""
        return self.qk_norm or self.R not in (0, self.D) or self.cache in PACKED_KV.values()

    def optional(self, biases: int) -> int:
        """How many of the optional arguments there are; `biases` of them are the bias: one for all, or one for each of q, k and v."""
        return biases * self.bias + 2 * self.qk_norm + (self.R > 0)


def cached_bytes(cache: str, D: int) -> int:
    """Bytes of one key or value of D numbers in a cache, with its scale."""
    if cache in PACKED_KV.values():
        return KVLayout(cache, 1, 1, D).row_bytes + 2
    return D * (4 if cache == "F32" else 2)


@dataclass(frozen=True)
class Attention:
    """Constants of the attention kernels."""

    H: int
    K: int
    D: int
    S: int
    M: int
    cache: str
    scale: str
    window: int
    cap: float = 0.0
    sinks: bool = False

    @classmethod
    def of(
        cls, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch, cap: float, sinks: Tensor | None
    ) -> Attention:  # fmt: skip
        """The attention of q [T, H, D] over a cache."""
        (H, K, S, D), M = (int(q.shape[1]), cache.K, cache.S, cache.D), int(batch.block_tables.shape[1])
        return cls(H, K, D, S, M, cache_format(cache), constant(scale), window, cap, sinks is not None)

    @property
    def defines(self) -> dict[str, Constant]:
        sizes: dict[str, Constant] = dict(
            H=self.H, K=self.K, D=self.D, S=self.S, M=self.M, CACHE_TYPE=self.cache, SCALE=self.scale, WINDOW=self.window
        )
        return sizes | policies.score_cap(self.cap) | policies.sinks(self.sinks)
