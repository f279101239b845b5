"""Blocks of random bits of any readable format, whose scales are finite, and how far rounded numbers may be from their originals."""

import numpy as np

from tinyvllm.quant.codecs import unpack
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.random_rows import random_blocks

# Where a block of a format that the table does not describe by fields has its float16.
SCALES = {"IQ1_S": 0, "IQ2_XXS": 0, "IQ2_XS": 0, "IQ2_S": 0, "IQ3_XXS": 0, "IQ3_S": 0, "TQ1_0": 52, "TQ2_0": 64, "Q1_0": 0}


def finite_blocks(name: str, count: int, size: float = 1.0, seed: int = 0) -> np.ndarray:
    """uint8 [count, bytes of a block], numbers with a standard deviation of about `size`."""
    if FORMATS[name].fields:
        return random_blocks(name, count, size, seed)
    rng = np.random.default_rng([seed, count, FORMATS[name].type_id])
    data = rng.integers(0, 256, (count, FORMATS[name].nbytes), np.uint8)
    if name == "NVFP4":  # four scales of e4m3 around 2^-7
        data[:, :4] = max(8, round(56 + 8 * np.log2(size / 2))) + rng.integers(0, 8, (count, 4))
        return data
    _set_scale(name, data, np.ones(count))
    _set_scale(name, data, size / unpack(name, data).std() * rng.uniform(0.5, 1.5, count))
    return data


def _set_scale(name: str, data: np.ndarray, scale: np.ndarray) -> None:
    halves = scale.astype("<f2")
    if name != "IQ1_M":
        data[:, SCALES[name] : SCALES[name] + 2] = halves[:, None].view(np.uint8)
        return
    for i in range(4):  # a nibble of it at the top of each of the last four words
        high = (halves.view(np.uint16) >> 4 * i & 15).astype(np.uint8)
        data[:, 49 + 2 * i] = data[:, 49 + 2 * i] & 15 | high << 4


# Root mean square errors of normal numbers, as shares of their standard deviation. A bit less doubles them.
ERRORS = {"Q8_0": 0.006, "Q4_0": 0.1, "Q5_0": 0.05, "Q4_1": 0.09, "Q5_1": 0.045, "Q2_K": 0.32, "Q3_K": 0.18, "Q4_K": 0.08, "Q5_K": 0.04,
          "Q6_K": 0.022, "IQ4_NL": 0.082, "IQ4_XS": 0.085, "MXFP4": 0.14}  # fmt: skip


def relative_error(format: str, got: np.ndarray, want: np.ndarray) -> float:
    """The root mean square error of `got` against normal numbers `want`, as a share of what the format may have."""
    return float(np.sqrt(((got - want) ** 2).mean()) / want.std() / ERRORS[format])
