"""What a model's logits say of the tokens of a text, next to a reference's logits for the same tokens. Numpy in float64.

The figures and their standard errors are those of llama.cpp's `llama-perplexity --kl-divergence`, from unrounded logits: errors take the
tokens as independent, percentiles interpolate between neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.sampling.divergence import divergence, log_softmax

MAX_ELEMENTS = 1 << 21  # logits that are computed with at the same time: 16 MiB an array of float64
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class TokenScores:
    """One number a scored token, each [N]: natural logarithms, probabilities as shares of 1.

    nll, reference_nll  float64: negative log-probability of the text's token, by the model and by the reference
    kl                  float64: Kullback-Leibler divergence from the reference's distribution
    same_top            bool: both have the same most probable token
    """

    nll: np.ndarray
    reference_nll: np.ndarray
    kl: np.ndarray
    same_top: np.ndarray


def score(reference: np.ndarray, logits: np.ndarray, tokens: np.ndarray) -> TokenScores:
    """The scores of tokens [N], whose logits are float32 [N, V] by the reference and by the model."""
    step = max(1, MAX_ELEMENTS // logits.shape[1])
    parts = [slice(start, start + step) for start in range(0, len(tokens), step)]
    return joined(_score(reference[part], logits[part], tokens[part]) for part in parts)


def _score(reference: np.ndarray, logits: np.ndarray, tokens: np.ndarray) -> TokenScores:
    p, q, rows = log_softmax(reference), log_softmax(logits), np.arange(len(tokens))
    return TokenScores(-q[rows, tokens], -p[rows, tokens], divergence(p, q), reference.argmax(1) == logits.argmax(1))


def joined(parts: Iterable[TokenScores]) -> TokenScores:
    """The scores of several runs of tokens as one."""
    fields = zip(*((part.nll, part.reference_nll, part.kl, part.same_top) for part in parts), strict=True)
    return TokenScores(*(np.concatenate(field) for field in fields))


@dataclass(frozen=True)
class Figures:
    """The summary of TokenScores.

    perplexity        exp of the mean negative log-probability
    perplexity_ratio  the model's perplexity by the reference's
    kl, kl_max        mean and maximum divergence in nats; kl_percentiles by percent
    same_top          share of tokens with the same most probable token
    mean_dp, rms_dp   of the difference of the text's token's probability, model minus reference
    """

    tokens: int
    perplexity: Estimate
    perplexity_ratio: Estimate
    kl: Estimate
    kl_percentiles: dict[int, float]
    kl_max: float
    same_top: Estimate
    mean_dp: Estimate
    rms_dp: Estimate


def figures_of(scores: TokenScores) -> Figures:
    """The summary of at least two tokens."""
    dp = np.exp(-scores.nll) - np.exp(-scores.reference_nll)
    square = _mean(dp * dp)
    rms = square.value**0.5
    return Figures(
        tokens=len(scores.nll),
        perplexity=_exp(_mean(scores.nll)),
        perplexity_ratio=_exp(_mean(scores.nll - scores.reference_nll)),
        kl=_mean(scores.kl),
        kl_percentiles={percent: float(np.percentile(scores.kl, percent)) for percent in PERCENTILES},
        kl_max=float(scores.kl.max()),
        same_top=_mean(scores.same_top.astype(np.float64)),
        mean_dp=_mean(dp),
        rms_dp=Estimate(rms, 0.5 * square.error / rms if rms else 0.0),
    )


def _mean(values: np.ndarray) -> Estimate:
    return Estimate(float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5))


def _exp(mean: Estimate) -> Estimate:
    """exp of a mean; its error to first order."""
    value = float(np.exp(mean.value))
    return Estimate(value, value * mean.error)
