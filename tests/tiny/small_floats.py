"""Matrices of floats of a few bits as checkpoints store them, from the layouts of their kinds (tests/tiny/quantized.py writes the models).

Dense numbers are float64. Nothing here comes from the readers.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.tiny.quantized import Quantize, Stored, bits_along

E4M3, E8M0, E5M2 = (np.dtype([(name, "u1")]) for name in ("F8_E4M3", "F8_E8M0", "F8_E5M2"))
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(codes: np.ndarray) -> np.ndarray:
    """float64 by the definition; no code is a NaN."""
    exponent, mantissa = codes.astype(int) >> 3 & 15, codes.astype(int) & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(codes & 128, -size, size)


def codes_of_eight_bits(rng: np.random.Generator, O: int, I: int) -> np.ndarray:
    """About normal numbers of a size of 100; some are subnormal, and none is a NaN."""
    every = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    order = np.argsort(e4m3(every), kind="stable")
    wanted = rng.standard_normal((O, I)) * 100
    codes = every[order][np.searchsorted(e4m3(every)[order], wanted).clip(0, len(every) - 1)]
    return np.where(rng.random((O, I)) < 0.05, rng.integers(0, 8, (O, I)), codes).astype(np.uint8)


def rows_and_columns(scales: np.ndarray, block: tuple[int, int], O: int, I: int) -> np.ndarray:
    return np.asarray(scales, np.float64).repeat(block[0], 0)[:O].repeat(block[1], 1)[:, :I]


def fp8(block: tuple[int, int], name: str = "weight_scale_inv", dtype: str = "f4", flat: int = 2, powers: bool = False) -> Quantize:
    """e4m3 with a scale a block, of which 0 rows or columns are all; `flat` dimensions of the scale are kept."""

    def quantize(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
        size = block[0] or O, block[1] or I
        shape = -(-O // size[0]), -(-I // size[1])
        codes = codes_of_eight_bits(rng, O, I)
        scales = (rng.uniform(0.7, 1.3, shape) * I**-0.5 / 100).astype(dtype)
        if powers:
            exponents = rng.integers(115, 118, shape).astype(np.uint8)
            scales = 2.0 ** (exponents.astype(float) - 127)
        dense = e4m3(codes) * rows_and_columns(scales, size, O, I)
        stored = exponents.view(E8M0) if powers else scales
        return {"weight": codes.view(E4M3), name: stored.reshape(stored.shape[:flat])}, dense

    return quantize


def mxfp8(mlx: bool) -> Quantize:
    def quantize(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
        codes, exponents = codes_of_eight_bits(rng, O, I), rng.integers(115, 118, (O, I // 32)).astype(np.uint8)
        dense = e4m3(codes) * rows_and_columns(2.0 ** (exponents.astype(float) - 127), (1, 32), O, I)
        if mlx:
            return {"weight": bits_along(codes, 8), "scales": exponents}, dense
        return {"weight": codes.view(E4M3), "weight_scale": exponents}, dense

    return quantize


def fp4_codes(rng: np.random.Generator, O: int, I: int) -> np.ndarray:
    return rng.integers(0, 16, (O, I)).astype(np.uint8)


def pairs(codes: np.ndarray) -> np.ndarray:
    """Even columns in the low halves."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def mxfp4(mlx: bool) -> Quantize:
    def quantize(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
        codes, exponents = fp4_codes(rng, O, I), rng.integers(120, 123, (O, I // 32)).astype(np.uint8)
        dense = FP4[codes] * rows_and_columns(2.0 ** (exponents.astype(float) - 127), (1, 32), O, I)
        if mlx:
            return {"weight": bits_along(codes, 4), "scales": exponents}, dense
        return {"weight_packed": pairs(codes), "weight_scale": exponents}, dense

    return quantize


def experts_in_mxfp4(floats: Stored, rng: np.random.Generator) -> tuple[Stored, Stored]:
    """gpt-oss's tensors [X, I, O] with random experts as published, in blocks of rows [X, O, I], and the same experts in float32."""
    packed, dense = dict(floats), dict(floats)
    for name in [name for name in floats if name.endswith(("gate_up_proj", "down_proj"))]:
        X, I, O = packed.pop(name).shape
        stored, values = mxfp4(mlx=False)(rng, X * O, I)
        packed[f"{name}_blocks"] = stored["weight_packed"].reshape(X, O, I // 32, 16)
        packed[f"{name}_scales"] = stored["weight_scale"].reshape(X, O, I // 32)
        dense[name] = values.reshape(X, O, I).swapaxes(1, 2).astype(np.float32)
    return packed, dense


def nvfp4(mlx: bool, divisor: float = 4096.0) -> Quantize:
    def quantize(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
        codes, scales = (
            fp4_codes(rng, O, I),
            rng.integers(0x40 if not mlx else 0x08, 0x58 if not mlx else 0x20, (O, I // 16)).astype(np.uint8),
        )
        dense = FP4[codes] * rows_and_columns(e4m3(scales), (1, 16), O, I)
        if mlx:
            return {"weight": bits_along(codes, 4), "scales": scales}, dense
        whole = np.array([divisor], np.float32)
        stored = {"weight_packed": pairs(codes), "weight_scale": scales.view(E4M3), "weight_global_scale": whole}
        return stored | {"input_global_scale": np.ones(1, np.float32)}, dense / float(whole[0])

    return quantize


def modelopt_nvfp4(factor: float = 2.0**-12) -> Quantize:
    """NVFP4 of modelopt: the matrix's own scale is a factor, and its codes are called `weight`."""

    def quantize(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
        parts, dense = nvfp4(mlx=False, divisor=1.0)(rng, O, I)
        stored = {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}
        scales = {"weight_scale_2": np.array(factor, np.float32), "input_scale": np.array(0.01, np.float32)}
        return stored | scales, dense * float(scales["weight_scale_2"])

    return quantize


def modelopt_fp8(block: tuple[int, int] = (0, 0)) -> Quantize:
    """e4m3 of modelopt with a scale a block, of which 0 rows or columns are all."""

    def quantize(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
        stored, dense = fp8(block, "weight_scale")(rng, O, I)
        scale = stored["weight_scale"]
        shape = () if scale.size == 1 else (O,) if len(scale) == O else (scale.shape[0], 1, scale.shape[1], 1)
        return stored | {"weight_scale": scale.reshape(shape), "input_scale": np.array(0.01, np.float32)}, dense

    return quantize


def modelopt_settings(algorithm: str | None, group: int | None = None, **more: Any) -> dict[str, Any]:
    """quantization_config as newer versions write it into config.json."""
    bits = 4 if algorithm and "NVFP4" in algorithm else 8
    weights = {"dynamic": False, "num_bits": bits, "type": "float"} | ({} if group is None else {"group_size": group})
    groups = {"group_0": {"weights": weights, "input_activations": weights, "targets": ["Linear"]}}
    producer = {"name": "modelopt", "version": "0.33.0"}
    return settings("modelopt", config_groups=groups, ignore=["lm_head"], quant_algo=algorithm, producer=producer, **more)


NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32)  # fmt: skip
BNB_FP4 = (np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)).astype(np.float32)


def bitsandbytes(kind: str = "nf4", blocksize: int = 64, nested: bool = False, table: np.ndarray | None = None) -> Quantize:
    values = table if table is not None else {"nf4": NF4, "fp4": BNB_FP4}[kind]

    def quantize(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
        codes = fp4_codes(rng, O, I).reshape(-1)
        blocks = -(-O * I // blocksize)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": blocksize, "dtype": "bfloat16", "shape": [O, I]}
        absmax = (rng.uniform(1, 2, blocks) * I**-0.5).astype(np.float32)
        stored: Stored = {"weight": (codes[::2] << 4 | codes[1::2])[:, None], "weight.quant_map": values}
        if nested:
            inner, outer = rng.integers(0, 256, blocks).astype(np.uint8), rng.uniform(0.01, 0.02, -(-blocks // 256)).astype(np.float32)
            numbers = np.linspace(-1, 1, 256).astype(np.float32)
            offset = 0.0700000003  # float32 keeps another number
            absmax = numbers[inner] * outer.repeat(256)[:blocks] + np.float32(offset)
            stored |= {"weight.absmax": inner, "weight.nested_absmax": outer, "weight.nested_quant_map": numbers}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        else:
            stored["weight.absmax"] = absmax
        stored[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        dense = values.astype(np.float64)[codes] * absmax.astype(np.float64).repeat(blocksize)[: O * I]
        return stored, dense.reshape(O, I)

    return quantize


def int8_rows(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
    """LLM.int8 of bitsandbytes."""
    quants, scale = rng.integers(-127, 128, (O, I)).astype(np.int8), (rng.uniform(1, 2, O) * I**-0.5).astype(np.float32)
    stored = {"weight": quants, "SCB": scale, "weight_format": np.array(0, np.uint8)}
    return stored, quants * (scale.astype(np.float64) / 127)[:, None]


def settings(method: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method} | more}
