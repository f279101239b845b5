"""Normalisation over the hidden dimension, in float32."""

from tinygrad import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; float32 (Zhang & Sennrich, 2019, arXiv:1910.07467)."""
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension; float32 (Ba et al., 2016, arXiv:1607.06450)."""
    x = x.float()
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float() + bias.float()
