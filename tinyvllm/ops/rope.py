"""Rotary position embeddings: the tables of angles, with every published way of stretching them, and the rotation.

Tables are made once on the host in float64. The rotation pairs feature i with i + R/2 (the half-split layout of Hugging Face and of
tinygrad's model); checkpoints with interleaved pairs have their rows permuted at load.
"""

from __future__ import annotations

import math

import numpy as np
from tinygrad import Tensor

from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """How angles are stretched beyond the trained context. `kind` is Hugging Face's rope_type; proportional RoPE rotates a `share`."""

    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    share: float = 1.0


SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


def rope_table(dim: int, theta: float, max_len: int, scaling: RopeScaling, context: int = 0) -> np.ndarray:
    """cos and sin of every position's angles: float32 [max_len, dim], the first dim/2 columns cosines, the rest sines.

    `context` is what scalings that depend on the length go by; 0 is max_len.
    """
    inverse = 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    inverse, magnitude = _SCALE[scaling.kind](inverse, scaling, dim, theta, context or max_len)
    angles = np.arange(max_len, dtype=np.float64)[:, None] * inverse
    return (np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * magnitude).astype(np.float32)


def query_factors(beta: float, length: int, max_len: int) -> np.ndarray:
    """1 + beta log(1 + floor(p / length)) of every position p, float32 [max_len, 1]: Llama 4's, which keeps attention sharp far out."""
    return (1 + beta * np.log(1 + np.arange(max_len) // length)).astype(np.float32)[:, None]


def _default(inverse: np.ndarray, s: RopeScaling, dim: int, theta: float, context: int) -> tuple[np.ndarray, float]:
    return inverse, 1.0


def _linear(inverse: np.ndarray, s: RopeScaling, dim: int, theta: float, context: int) -> tuple[np.ndarray, float]:
    return inverse / s.factor, 1.0


def _llama3(inverse: np.ndarray, s: RopeScaling, dim: int, theta: float, context: int) -> tuple[np.ndarray, float]:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear blend between (Llama 3 reference implementation)."""
    wavelength = 2 * math.pi / inverse
    blend = (s.original_context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * inverse / s.factor + blend * inverse, 1.0


def _yarn(inverse: np.ndarray, s: RopeScaling, dim: int, theta: float, context: int) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al., 2023, arXiv:2309.00071): interpolate slow features, keep fast ones, raise the attention temperature."""

    def turns_at(rotations: float) -> float:
        return dim * math.log(s.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turns_at(s.beta_fast), turns_at(s.beta_slow)
    low, high = max(math.floor(low) if s.truncate else low, 0), min(math.ceil(high) if s.truncate else high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    magnitude = s.attention_factor
    if magnitude is None:
        both = s.mscale and s.mscale_all_dim
        magnitude = yarn_mscale(s.factor, s.mscale) / yarn_mscale(s.factor, s.mscale_all_dim) if both else yarn_mscale(s.factor, 1.0)
    return inverse / s.factor * ramp + inverse * (1 - ramp), magnitude


def yarn_mscale(factor: float, mscale: float) -> float:
    """What YaRN raises the temperature by."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(inverse: np.ndarray, s: RopeScaling, dim: int, theta: float, context: int) -> tuple[np.ndarray, float]:
    """LongRoPE (Ding et al., 2024, arXiv:2402.13753): a factor per feature.

    The long factors are used for every sequence when the engine's context exceeds the trained one, the short ones otherwise: a switch
    in the middle of a sequence would make its cached keys wrong.
    """
    factors = s.long_factor if context > s.original_context else s.short_factor
    magnitude = s.attention_factor
    if magnitude is None:
        magnitude = 1.0 if s.factor <= 1 else math.sqrt(1 + math.log(s.factor) / math.log(s.original_context))
    return inverse / np.asarray(factors, dtype=np.float64), magnitude


def _proportional(inverse: np.ndarray, s: RopeScaling, dim: int, theta: float, context: int) -> tuple[np.ndarray, float]:
    """Gemma 4: of all pairs the first share is rotated, by the angles that it has among all; the others are left as they are."""
    return inverse * (np.arange(dim // 2) < int(s.share * dim // 2)) / s.factor, 1.0


_SCALE = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def apply_rope(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the first R features of x [T, H, D] by angles [T, R] (R/2 cosines, R/2 sines); the others pass (Su et al., 2104.09864)."""
    R = int(angles.shape[-1])
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R/2]
    a, b = x[..., : R // 2], x[..., R // 2 : R]
    rotated = (a * cos - b * sin).cat(b * cos + a * sin, dim=-1)
    return rotated if x.shape[-1] == R else rotated.cat(x[..., R:], dim=-1)
