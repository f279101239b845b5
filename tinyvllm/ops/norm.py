"""Normalisation over the hidden dimension, in float32."""

from tinygrad import Tensor


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
