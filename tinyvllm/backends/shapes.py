"""Constants that kernels of several backends are compiled with for the same thing, under the same names."""

from __future__ import annotations

from dataclasses import dataclass


def up(amount: int, to: int) -> int:
    """How many times `to` goes into `amount`, counted up."""
    return -(amount // -to)


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

    @property
    def defines(self) -> dict[str, int | float | str]:
        return dict(
            H=self.H, K=self.K, D=self.D, S=self.S, R=self.R, CACHE_TYPE=self.cache, BIAS=int(self.bias), QK_NORM=int(self.qk_norm),
            QK_EPS=self.qk_eps,
        )  # fmt: skip

    @property
    def outputs(self) -> int:
        return (self.H + 2 * self.K) * self.D

    @property
    def whole(self) -> bool:
        """Whether a head must be put together before it can be stored."""
        return self.qk_norm or self.R not in (0, self.D)

    def optional(self, biases: int) -> int:
        """Arguments that are there or not; `biases` if they are: one for all, or one for each of q, k and v."""
        return biases * self.bias + 2 * self.qk_norm + (self.R > 0)


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

    @property
    def defines(self) -> dict[str, int | float | str]:
        return dict(H=self.H, K=self.K, D=self.D, S=self.S, M=self.M, CACHE_TYPE=self.cache, SCALE=self.scale, WINDOW=self.window)
