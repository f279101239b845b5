"""Normalisation over the hidden dimension, in float32."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.operands import NormWeights


class Norm(NormWeights):
    """A norm with its weights, applied by calling it."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, E] to float32 [T, E]."""
        return rms_norm(x, self.weight, self.eps) if self.kind == "RMS" else layer_norm(x, self.weight, self.bias, self.eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; float32 (Zhang & Sennrich, 2019, arXiv:1910.07467)."""
    x = x.float()
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x if weight is None else x * weight.float()


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension; float32 (Ba et al., 2016, arXiv:1607.06450)."""
    x = x.float()
    x = x - x.mean(-1, keepdim=True)
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    x = x if weight is None else x * weight.float()
    return x if bias is None else x + bias.float()
