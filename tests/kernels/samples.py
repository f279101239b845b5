"""One small call of every CPU kernel, for tests that only ask whether it compiles, links and keeps within its memory.

`SAMPLES[name](target)` gives the Kernel and its arrays in the order of its arguments. Every array is exactly as large as the kernel's file
says, but for the scratch areas of attention, which are larger. Weights are random bits without NaN or infinity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tests.formats import sampled_formats
from tests.kernels.calling import aligned
from tinyvllm.backends.cpu.toolchain import cpu_features
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.operands import DeltaShape
from tinyvllm.batch import NO_SLOT, KVLayout
from tinyvllm.quant.formats import FORMATS, Activations, Layout
from tinyvllm.quant.kv import KV_FORMATS, pack_blocks
from tinyvllm.quant.random_rows import packable_width

Call = tuple[Kernel, list[np.ndarray]]
BYTES = {name: (FORMATS[name].nbytes, FORMATS[name].elements) for name in sampled_formats(Layout.PANELS)}  # of blocks, and their weights
random = np.random.default_rng(7)


def filled(values: np.ndarray) -> np.ndarray:
    return aligned(values.shape, values.dtype, values)


def int32(*values: int) -> np.ndarray:
    return filled(np.array(values, np.int32))


def floats(*shape: int) -> np.ndarray:
    return filled(random.standard_normal(shape).astype(np.float32))


def blank(*shape: int, dtype: str = "float32") -> np.ndarray:
    return aligned(shape, dtype)


def weight_bytes(weight: str, rows: int, width: int) -> np.ndarray:
    size, of = BYTES[weight]
    return filled(random.integers(0, 64, rows * width * size // of, np.uint8))  # numbers below 2 in every float format


def panels(weight: str, rows: int, width: int) -> np.ndarray:
    return weight_bytes(weight, -(-rows // 16) * 16, width)


def prepared(weight: str, target: str, rows: int, width: int) -> np.ndarray:
    """Scratch of a product: product.h's PREPARED_BYTES for every row, rows counted up to a multiple of 16."""
    dots, pairs = (target == "amx" or target == "avx512" and feature in cpu_features() for feature in ("avx512_vnni", "avx512_bf16"))
    wide = target in ("avx2", "avx512") and not dots and (weight in ("Q8_0", "IQ4_NL", "IQ4_XS") or weight.startswith("INT8_"))
    group = (64 if wide else 32) + 4 + (8 if weight in ("Q2_K", "Q3_K", "Q6_K", "NVFP4_G128") else 4)
    floats = 2 * width if weight == "BF16" and (pairs or target in ("neon", "plain")) else 4 * width
    row = {Activations.INT8: width // 32 * group}.get(FORMATS[weight].activations, floats)
    return blank(-(-rows // 16) * 16 * 64 * (-(-row // 64) | 1), dtype="uint8")


def kernel(stem: str, target: str, outs: int, arrays: list[np.ndarray], **defines: int | float | str) -> Call:
    return Kernel(stem, "cpu", target, tuple(defines.items()), outs, len(arrays) - outs), arrays


def matmul(weight: str, target: str, T: int = 15, I: int = 96, O: int = 50) -> Call:
    I = packable_width(weight, I)
    ins = [floats(T, I), panels(weight, O, I), floats(O), floats(T, O), int32(T)]
    arrays = [blank(T, O), prepared(weight, target, T, I), *ins]
    return kernel("matmul", target, 2, arrays, I=I, O=O, WEIGHT=weight, BIAS=1, RESIDUAL=1, ACTIVATION=1)


def lora_bias(target: str, T: int = 15, E: int = 96, O: int = 112, norm: bool = True) -> Call:
    """Two adapters, of which rows have one, the other or none."""
    R, parts, ranks, adapters = 8, 3, int32(5, 8), int32(*(t % 3 for t in range(T)))
    ins = [floats(T, E), *([floats(E)] if norm else []), floats(2, parts, R, E), floats(2, R, O), ranks, floats(O), adapters, int32(T)]
    sizes: dict[str, int | str] = {"E": E, "O": O, "R": R, "PARTS": parts, "BIAS": 1, "SECOND": 64, "THIRD": 96}
    policy: dict[str, float | str] = {"EPS": 1e-5} if norm else {"NORM": "NO_NORM"}
    return kernel("lora_bias", target, 2, [blank(T, O), blank(T, E + parts * R), *ins], **sizes, **policy)


def lora_bias_of_a_rank(target: str, T: int = 15, E: int = 96, O: int = 112) -> Call:
    """The first of two ranks, which have half of the columns each."""
    R, place = 8, 16 * T * 8
    ins = [floats(T, E), floats(2, 1, R, E), floats(2, R, O), int32(5, 8), floats(O), int32(*(t % 3 for t in range(T))), int32(T)]
    sizes = {"E": E, "O": O, "R": R, "PARTS": 1, "BIAS": 1, "UNIT": 32, "SLICES": 4, "FIRST_SLICE": 0, "ALL_I": 2 * E}
    outs = [blank(T, O), blank(T, E + R), shared_by_two(place, 0)]
    return kernel("lora_bias", target, 3, [*outs, *ins], **sizes, NORM="NO_NORM", WORLD=2, RANK=0, PLACE=place)


def gated_delta(target: str, T: int = 15, KH: int = 2, VH: int = 6, DK: int = 32, DV: int = 48, drafts: int = 0) -> Call:
    """Three decodes of four rows, and two chunks, the second of which begins its sequence; with `drafts` the third decode is the draft of
    the second, and each sequence that began earlier lacks two of its tokens.
    """
    channels = 2 * KH * DK + VH * DV
    state = DeltaShape(KH, VH, DK, DV, 4).slot(drafts)
    positions = int32(4, 0, 9, 0, *range(7, 14), *range(4))
    slots = int32(5, 5, 6, 0, 0, 0, 7, 1, 2, 2, 8, 0, 8, 8, 8, 0, 1, 4, 8, 0, 3, 3, 9, 2)
    ins = [
        floats(T, channels + VH * DV + 2 * VH),
        floats(4, channels),
        -np.abs(floats(VH)),
        floats(VH),
        floats(DV),
        slots,
    ]
    ins += [positions, int32(0, 1, 2, 3, 4, 11, 15), int32(3), int32(4, 2)]
    states = floats(10, state)
    if drafts:
        states[:, (3 + drafts) * channels + VH * DK * DV + drafts * 2 * VH] = 5
        positions[:] = int32(7, 0, 1, 0, *range(7, 14), *range(4))
        slots[4:12] = int32(0, 0, 7, 1, 0, 0, 7, 1)
    arrays = [blank(T, VH * DV), blank(T, channels + 2 * VH + KH), states, *ins]
    return kernel("gated_delta", target, 3, arrays, KH=KH, VH=VH, DK=DK, DV=DV, TAPS=4, TILED=1, EPS=1e-6, DRAFTS=drafts)


def matmul_normed(target: str, T: int = 15, I: int = 96, O: int = 48) -> Call:
    ins = [floats(T, I), panels("BF16", O, I), floats(O), floats(T, O), int32(T)]
    sizes = {"I": I, "O": O, "WEIGHT": "BF16", "BIAS": 0, "RESIDUAL": 1, "ACTIVATION": 0}
    return kernel("matmul", target, 2, [blank(T, O), prepared("BF16", target, T, I), *ins], **sizes, OUT_NORM=1, OUT_SCALE="0.5f", EPS=1e-5)


def shared_by_two(place: int, logits: int) -> np.ndarray:
    """The memory of two ranks (kernels/cpu/include/meeting.h) in which the other rank has met this one already and left its sums."""
    memory = aligned((4096 + 4 * (2 * 2 * place + logits),), np.uint8, 0)
    memory[128:132].view(np.int32)[:] = 5  # meetings of rank 1
    memory[4096:].view(np.float32)[:] = floats(2 * 2 * place + logits)
    return memory


def all_reduce(target: str, T: int = 5, O: int = 544) -> Call:
    arrays = [blank(T, O), shared_by_two(T * O, 0), floats(T, O), floats(O), floats(T, O), int32(T)]
    return kernel("all_reduce", target, 2, arrays, O=O, WORLD=2, RANK=0, PLACE=T * O, BIAS=1, RESIDUAL=1)


def all_reduce_normed(target: str, T: int = 5, O: int = 544) -> Call:
    arrays = [blank(T, O), shared_by_two(T * O, 0), floats(T, O), floats(O), floats(T, O), int32(T)]
    sizes = {"O": O, "WORLD": 2, "RANK": 0, "PLACE": T * O, "BIAS": 0, "RESIDUAL": 1}
    return kernel("all_reduce", target, 2, arrays, **sizes, OUT_NORM=1, OUT_SCALE="0.5f", EPS=1e-5)


def experts_all_reduce(target: str, T: int = 5, E: int = 544, C: int = 2) -> Call:
    """Two rows at a time: the ranks meet three times."""
    place, chosen = 2 * C * E, int32(*([0, 2] * T)).reshape(T, C)
    ins = [floats(T * C, E), floats(3 * E), floats(T, C), chosen, floats(T, E), int32(T)]
    sizes = {"E": E, "C": C, "WORLD": 2, "RANK": 0, "PLACE": place, "BIAS": 1, "RESIDUAL": 1}
    return kernel("experts_all_reduce", target, 2, [blank(T, E), shared_by_two(place, 0), *ins], **sizes)


def gather_logits(target: str, N: int = 3, V: int = 75, columns: int = 48) -> Call:
    arrays = [blank(N, V), shared_by_two(16, N * V), floats(N, columns), int32(N)]
    return kernel("gather_logits", target, 2, arrays, V=V, COLUMNS=columns, FIRST=0, WORLD=2, RANK=0, PLACE=16, LOGITS=N * V)


def own_rows(target: str, T: int = 7, N: int = 48) -> Call:
    return kernel("own_rows", target, 2, [blank(4, N), blank(1, dtype="int32"), floats(T, N), int32(T)], N=N, WORLD=2, RANK=1)


def gather_rows(target: str, T: int = 7, N: int = 48) -> Call:
    arrays = [blank(T, N), shared_by_two(4 * N, 0), floats(4, N), int32(T)]
    return kernel("gather_rows", target, 2, arrays, N=N, WORLD=2, RANK=0, PLACE=4 * N)


def changed(sample: Callable[[str], Call], changes: dict[str, int | float | str], target: str) -> Call:
    """A sample with more or other constants."""
    made, arrays = sample(target)
    return replace(made, defines=tuple((dict(made.defines) | changes).items())), arrays


def norm_gate_up_silu(weight: str, target: str, T: int = 5, E: int = 64, F: int = 48) -> Call:
    arrays = [blank(T, F), prepared(weight, target, T, E), floats(T, E), floats(E), panels(weight, 2 * F, E), int32(T)]
    return kernel("norm_gate_up_silu", target, 2, arrays, E=E, F=F, WEIGHT=weight, HALF="BOTH", BIAS=0, EPS=1e-5)


def norm_route(target: str, T: int = 5, E: int = 64, X: int = 21, C: int = 3) -> Call:
    working = np.concatenate([prepared("F32", target, T, E), blank(T * 32).view(np.uint8)])
    outs = [blank(T, C), blank(T, C, dtype="int32"), blank(T * C, dtype="int32"), blank(1 + 3 * T * C, dtype="int32"), filled(working)]
    ins = [floats(T, E), floats(E), panels("F32", X, E), int32(T)]
    return kernel("norm_route", target, 5, outs + ins, E=E, X=X, C=C, WEIGHT="F32", RENORMALIZE=1, EPS=1e-5)


def norm_route_with_policies(target: str, T: int = 5, E: int = 64, X: int = 16, C: int = 3) -> Call:
    """The gate of a shared expert is the seventeenth logit."""
    made, arrays = norm_route(target, T, E, X, C)
    outs, (x, norm, _, rows) = [*arrays[:4], blank(T), arrays[4]], arrays[5:]
    defines = dict(made.defines) | {
        "SIGMOID": 1,
        "CHOICE_BIAS": 1,
        "EXPERT_GROUPS": 4,
        "KEPT_GROUPS": 2,
        "SHARE_SCALE": "2.5f",
        "SHARED_GATE": 1,
    }
    return kernel("norm_route", target, 6, outs + [x, norm, panels("F32", X + 1, E), floats(X), rows], **defines)


# Five rows with two of three experts each; expert 1 has one pair, expert 2 has two tasks.
ORDER, TASKS = int32(1, 4, 7, 2, 0, 3, 5, 6, 8, 9), int32(4, 0, 0, 3, 1, 3, 4, 2, 4, 7, 2, 7, 10)


def gathering(weight: str, target: str, rows: int, width: int) -> np.ndarray:
    """Scratch of a product of experts: that of a product, and a tile for each of 64 threads."""
    tiles = prepared(weight, target, 64 * 32, width).nbytes
    return blank(prepared(weight, target, rows, width).nbytes + tiles, dtype="uint8")


def experts_gate_up_silu(weight: str, target: str, T: int = 5, E: int = 64, F: int = 48) -> Call:
    ins = [floats(T, E), floats(E), panels(weight, 2 * 3 * F, E), ORDER, TASKS, int32(T)]
    arrays = [blank(T * 2, F), gathering(weight, target, T, E), *ins]
    return kernel("experts_gate_up_silu", target, 2, arrays, E=E, F=F, X=3, C=2, WEIGHT=weight, HALF="BOTH", EPS=1e-5)


def experts_down(weight: str, target: str, T: int = 5, F: int = 64, E: int = 48) -> Call:
    ins = [floats(T * 2, F), panels(weight, 3 * E, F), floats(T, 2), ORDER, TASKS, floats(T, E), int32(T)]
    arrays = [blank(T, E), blank(T * 2, E), gathering(weight, target, T * 2, F), *ins]
    return kernel("experts_down", target, 3, arrays, E=E, F=F, X=3, C=2, WEIGHT=weight, RESIDUAL=1)


def experts_down_of_a_rank(target: str, T: int = 5, F: int = 128, E: int = 48) -> Call:
    """Four slices, which begin within a block of 256."""
    ins = [floats(T * 2, F), panels("Q4_K", 3 * E, 256), ORDER, TASKS, int32(T)]
    arrays = [blank(T * 2, E), gathering("Q4_K", target, T * 2, 256), *ins]
    slices = {"SLICES": 4, "FIRST_SLICE": 4, "ALL_I": 256, "BEFORE": 128, "RESIDUAL": 0}
    return kernel("experts_down", target, 2, arrays, E=E, F=F, X=3, C=2, WEIGHT="Q4_K", **slices)


def experts_with_biases(stem: str, target: str) -> Call:
    made, arrays = {"experts_gate_up_silu": experts_gate_up_silu, "experts_down": experts_down}[stem]("BF16", target)
    clamp = {"GATE_ALPHA": "1.7f", "GATE_LIMIT": "7.0f"} if stem == "experts_gate_up_silu" else {}
    after_weight = {"experts_gate_up_silu": 5, "experts_down": 5}[stem]
    biases = floats(2 * 3 * 48 if clamp else 3 * 48)
    return kernel(stem, target, made.outs, [*arrays[:after_weight], biases, *arrays[after_weight:]], **dict(made.defines), BIAS=1, **clamp)


def experts_with_biases_of_pairs(target: str) -> Call:
    """As adapters of experts make them."""
    made, arrays = experts_gate_up_silu("BF16", target)
    return kernel(
        made.stem, target, made.outs, [*arrays[:5], floats(5 * 2, 2 * 48), *arrays[5:]], **dict(made.defines), BIAS=1, BIAS_PITCH=96
    )


def attention_with_sinks(stem: str, target: str) -> Call:
    made, arrays = attention(stem, "BF16", target)
    return kernel(stem, target, 2, [*arrays, floats(4)], **dict(made.defines), SINKS=1)


def norm_qkv_rope_store(weight: str, target: str, T: int = 5, E: int = 64, H: int = 4, K: int = 2, D: int = 48) -> Call:
    S, P, O = 8, 3, (H + 2 * K) * D
    outs = [blank(T, H, D), blank(P, 2, K, S, D, dtype="uint16"), blank(1), prepared(weight, target, T, E)]
    ins = [floats(T, E), floats(E), panels(weight, O, E), floats(O), floats(D), floats(D), floats(T, D), int32(23, 0, 7, 8, 9), int32(T)]
    sizes = {"E": E, "H": H, "K": K, "D": D, "S": S, "R": D, "MAIN": H + 2 * K, "SECOND": 0, "WEIGHT": weight, "CACHE_TYPE": "BF16"}
    return kernel("norm_qkv_rope_store", target, 4, outs + ins, **sizes, NORM=0, BIAS=1, QK_NORM=1, EPS=1e-5, QK_EPS=1e-6)


def norm_q_rope(target: str, parts: int, T: int = 5, E: int = 64, H: int = 4, K: int = 2, D: int = 48) -> Call:
    """With values that are the keys, or those of another layer."""
    S, P, O, weight = 8, 3, (H + (parts - 1) * K) * D, "Q4_0"
    outs = [blank(T, H, D), blank(P, 2, K, S, D, dtype="uint16") if parts > 1 else blank(1), blank(1), prepared(weight, target, T, E)]
    norms = [floats(D) for _ in range(parts)]
    ins = [floats(T, E), floats(E), panels(weight, O, E), *norms, floats(T, D), int32(23, 0, 7, 8, 9), int32(T)]
    sizes = {"E": E, "H": H, "K": K, "D": D, "S": S, "R": D, "MAIN": O // D, "SECOND": 0, "WEIGHT": weight, "CACHE_TYPE": "BF16"}
    sizes |= {"PROJECTIONS": parts, "VALUE_NORM": 1, "BIAS": 0, "QK_NORM": 1, "NORM": 0}
    return kernel("norm_qkv_rope_store", target, 4, outs + ins, **sizes, EPS=1e-5, QK_EPS=1e-6)


def norm_head(weight: str, target: str, T: int = 5, N: int = 3, E: int = 64, V: int = 50) -> Call:
    outs = [blank(N, V), blank(N, dtype="int32"), prepared(weight, target, N, E)]
    ins = [floats(T, E), floats(E), floats(E), panels(weight, V, E), int32(4, 0, 2), int32(N)]
    return kernel("norm_head", target, 3, outs + ins, E=E, V=V, N=N, WEIGHT=weight, NORM=1, EPS=1e-5)


def embed(weight: str, target: str, in_panels: int = 1, T: int = 3, E: int = 96, V: int = 37) -> Call:
    E = packable_width(weight, E)
    table = panels(weight, V, E) if in_panels else weight_bytes(weight, V, E)
    return kernel("embed", target, 1, [blank(T, E), table, int32(36, 0, 16), int32(T)], E=E, V=V, WEIGHT=weight, PANELS=in_panels)


def kv_append(cache: str, target: str, T: int = 4, P: int = 3, K: int = 2, S: int = 8, D: int = 48) -> Call:
    if cache in KV_FORMATS:
        pool = blank(P, KVLayout(cache, K, S, D).block_bytes, dtype="uint8")
    else:
        pool = blank(P, 2, K, S, D, dtype="float32" if cache == "F32" else "uint16")
    arrays = [pool, blank(1), floats(T, K, D), floats(T, K, D), int32(23, 0, 7, 8), int32(T)]
    return kernel("kv_append", target, 2, arrays, K=K, S=S, D=D, CACHE_TYPE=cache)


def kv_append_latents(target: str, T: int = 4, S: int = 8, D: int = 80) -> Call:
    arrays = [blank(3, S, D, dtype="uint16"), blank(1), floats(T, 1, D), int32(23, 0, NO_SLOT, 8), int32(T)]
    return kernel("kv_append", target, 2, arrays, K=1, S=S, D=D, CACHE_TYPE="BF16", LATENT=64)


def kv_copy(target: str) -> Call:
    return kernel("kv_copy", target, 1, [floats(4, 512), int32(0, 3, 1, 2), int32(2)], BLOCK_BYTES=2048)


def read(target: str) -> Call:
    return kernel("read", target, 1, [blank(64, dtype="uint64"), filled(np.arange(2048, dtype=np.uint64))], N=2048)


def advance(target: str, B: int = 3, M: int = 2, S: int = 8, N: int = 2) -> Call:
    state = [int32(1, 2, 3), int32(0, 7, 15), int32(0, 15, 47), int32(1, 8, 16), blank(N, B, dtype="int32"), int32(1)]
    arrays = [*state, int32(4, -1, 5), filled(np.arange(B * M, dtype=np.int32).reshape(B, M)), int32(B)]
    return kernel("advance", target, 6, arrays, B=B, M=M, S=S, N=N, NO_SLOT=NO_SLOT)


def attention(stem: str, cache: str, target: str, H: int = 4, K: int = 2, D: int = 48, S: int = 16, latent: int = 0) -> Call:
    """Contexts of one block less a token, of one token, and of two chunks of keys; the last block of the pool ends with the last token.

    The first `latent` features of the one key are the value, if it is not 0, and K is how many parts the heads are in.
    """
    context, new, M = [15, 1, 320], [3, 1, 40], 20
    P, T = 22, sum(new) if stem == "attention_prefill" else 3
    numbers = random.standard_normal((P, 1, 1, S, D) if latent else (P, 2, K, S, D)).astype(np.float32)
    floats_of = {"F32": numbers, "F16": numbers.astype(np.float16), "BF16": (numbers.view(np.uint32) >> 16).astype(np.uint16)}
    pool = pack_blocks(cache, numbers) if cache in KV_FORMATS else floats_of[cache]
    tables = np.full((3, M), 2**30, np.int32)  # a block that is read by mistake is far away
    tables[0, 0], tables[1, 0], tables[2] = 1, 0, np.arange(2, 22)
    scratch = blank(64 * (256 * D + 128 * (3 * D + 32)))
    ins = [floats(T, H, D), filled(pool), filled(tables), int32(*context)]
    ins += [int32(0, *np.cumsum(new)), int32(0, 3)] if stem == "attention_prefill" else [int32(3)]
    sizes = {"H": H, "K": K, "D": D, "S": S, "B": 3, "M": M, "CACHE_TYPE": cache}
    sizes |= {"LATENT": latent} if latent else {}
    return kernel(stem, target, 2, [blank(T, H, latent or D), scratch, *ins], **sizes, SCALE=f"{D**-0.5}f", WINDOW=0)


def attention_ranks(cache: str, target: str, H: int = 4, K: int = 2, D: int = 48, S: int = 256) -> Call:
    """The first of two ranks: two decodes and a chunk, whose 83 results for the rank's partitions take turns in a place for 60."""
    P, M, entries = 5, 3, 60
    numbers = random.standard_normal((P, 2, K, S, D)).astype(np.float32)
    pool = pack_blocks(cache, numbers) if cache in KV_FORMATS else (numbers.view(np.uint32) >> 16).astype(np.uint16)
    tables = np.full((3, M), 2**30, np.int32)
    tables[0, 0], tables[1, :2], tables[2, :2] = 1, (0, 2), (3, 4)
    place = entries * H * (D + 2)
    outs = [blank(42, H, D), shared_by_two(place, 0), blank(64 * (256 * D + 128 * (3 * D + 32)))]
    ins = [floats(42, H, D), filled(pool), filled(tables), int32(15, 600, 640), int32(0, 1, 2, 42), int32(2), int32(2, 1)]
    sizes = {"H": H, "K": K, "D": D, "S": S, "M": M, "CACHE_TYPE": cache, "WORLD": 2, "RANK": 0, "PLACE": place}
    return kernel("attention_ranks", target, 3, outs + ins, **sizes, SCALE=f"{D**-0.5}f", WINDOW=0)


def cascade(cache: str, target: str, H: int = 4, K: int = 2, D: int = 48, S: int = 16) -> Call:
    """Three decodes whose first 272 tokens are in the same blocks, and a fourth that has nothing in common with them."""
    context, shared, M = [300, 320, 290, 33], 17, 20
    own = [-(-n // S) - shared for n in context[:3]] + [3]
    P = shared + sum(own)
    numbers = random.standard_normal((P, 2, K, S, D)).astype(np.float32)
    pool = {"F32": numbers, "BF16": (numbers.view(np.uint32) >> 16).astype(np.uint16)}[cache]
    tables, ids = np.full((4, M), 2**30, np.int32), iter(range(shared, P))
    for b in range(4):
        blocks = [*range(shared if b < 3 else 0), *(next(ids) for _ in range(own[b]))]
        tables[b, : len(blocks)] = blocks
    ins = [floats(4, H, D), filled(pool), filled(tables), int32(*context), int32(4), int32(0, 16 * shared, 16 * shared, 0)]
    sizes = {"H": H, "K": K, "D": D, "S": S, "B": 4, "M": M, "CACHE_TYPE": cache, "CASCADE": 1}
    return kernel("attention_decode", target, 2, [blank(4, H, D), blank(4 * H * 2 * (D + 2)), *ins], **sizes, SCALE=f"{D**-0.5}f", WINDOW=0)


def pack(source: str, format: str, target: str, I: int = 96, rows: int = 37) -> Call:
    I = packable_width(format, I)
    arrays = [panels(format, rows, I), weight_bytes(source, rows, I), int32(0, 3, rows, I)]
    return kernel("pack", target, 1, arrays, SOURCE=source, FORMAT=format)


def quantize(format: str, target: str, weighted: int, I: int = 768, rows: int = 3) -> Call:
    outs = [weight_bytes(format, rows, I), int32(0)]
    arrays = [*outs, floats(rows, I), np.abs(floats(I if weighted else 1)), int32(rows)]
    return kernel("quantize", target, 2, arrays, I=I, SOURCE="F32", FORMAT=format, WEIGHTED=weighted)


def sample(target: str, B: int = 4, V: int = 300, R: int = 4, **only: int) -> Call:
    """Three threads draw a row each and then the last one together, which is the neutral row of the tables."""
    features = {name: only.get(name, 1 - bool(only)) for name in ("SAMPLED", "TOP_K", "TOP_P", "MIN_P", "PENALIZED", "BIASED")}
    tables, filtered = features["PENALIZED"] | features["BIASED"], features["TOP_K"] | features["TOP_P"] | features["MIN_P"]
    lines = np.zeros((B, 12), np.int32)
    lines[:, 0] = lines[:, 1] = np.arange(B) % R
    lines[:, 2:5], lines[:, 6], lines[:, 7] = 7, 5 * np.arange(1, B + 1), 2**29
    lines.view(np.float32)[:, [5, 8, 9, 10, 11]] = 1.5, -3.0, 1.2, 0.5, 0.25
    scratch = 2 * 64 * 192 + 4 * B * (tables * V + filtered * (V + -(-V // 128)))
    seen, prompted = (filled((np.arange(R * V).reshape(R, V) % most).astype(dtype)) for most, dtype in ((3, np.int32), (2, np.uint8)))
    outs = [blank(B, dtype="int32"), filled(lines), blank(scratch, dtype="uint8"), *([seen] if features["PENALIZED"] else [])]
    ins = [floats(B, V), *([prompted] if features["PENALIZED"] else []), *([floats(R, V)] if features["BIASED"] else []), int32(B)]
    return kernel("sample", target, len(outs), outs + ins, V=V, NEUTRAL_ROW=R - 1, **features)


POLICIES: dict[str, dict[str, int | float | str]] = {  # what some families differ in (tinyvllm/backends/policies.py)
    "embed BF16": {"ROW_SCALE": "8.0f"},
    "norm_gate_up_silu BF16": {"GATE_GELU": 1},
    "norm_head BF16": {"DIVISOR": "8.0f", "CAP": "30.0f"},
    "attention_decode BF16": {"CAP": "50.0f"},
    "attention_prefill F16": {"CAP": "50.0f"},
    "kv_append BF16": {"WORLD": 2, "RANK": 1},
}


def _samples() -> dict[str, Callable[[str], Call]]:
    samples: dict[str, Callable[[str], Call]] = {"kv_copy": kv_copy, "advance": advance, "read": read, "sample": sample}
    samples |= {"norm_route": norm_route, "experts_down of a rank": experts_down_of_a_rank, "experts_all_reduce": experts_all_reduce}
    samples["all_reduce with a norm of its outputs"] = all_reduce_normed
    samples |= {"all_reduce": all_reduce, "gather_logits": gather_logits, "own_rows": own_rows, "gather_rows": gather_rows}
    samples["sample greedy"] = functools.partial(sample, SAMPLED=0)
    for weight in BYTES:
        for make in (matmul, embed):
            samples[f"{make.__name__} {weight}"] = functools.partial(make, weight)
        samples[f"embed {weight} from rows"] = functools.partial(embed, weight, in_panels=0)
        samples[f"pack {weight}"] = functools.partial(pack, weight, weight)
    for weight in ("BF16", "Q4_0"):
        for make in (norm_gate_up_silu, experts_gate_up_silu, experts_down, norm_qkv_rope_store, norm_head):
            samples[f"{make.__name__} {weight}"] = functools.partial(make, weight)
    for format, weighted in (("Q8_0", 0), ("Q4_1", 1), ("Q2_K", 0), ("Q3_K", 0), ("Q5_K", 1), ("IQ4_NL", 0), ("Q6_K", 1)):
        samples[f"quantize {format}"] = functools.partial(quantize, format, weighted=weighted)
    for parts in (1, 2):
        samples[f"norm_qkv_rope_store of {parts} parts"] = functools.partial(norm_q_rope, parts=parts)
    samples["lora_bias"] = lora_bias
    samples["lora_bias of a rank"] = lora_bias_of_a_rank
    samples["lora_bias without norm"] = functools.partial(lora_bias, norm=False)
    samples["gated_delta"] = gated_delta
    samples["gated_delta with drafts"] = functools.partial(gated_delta, drafts=2)
    samples["norm_route with policies"] = norm_route_with_policies
    for stem in ("experts_gate_up_silu", "experts_down"):
        samples[f"{stem} BF16 with biases"] = functools.partial(experts_with_biases, stem)
    samples["experts_gate_up_silu BF16 with biases of pairs"] = experts_with_biases_of_pairs
    for stem in ("attention_decode", "attention_prefill"):
        samples[f"{stem} BF16 with sinks"] = functools.partial(attention_with_sinks, stem)
    samples["matmul with a norm of its outputs"] = matmul_normed
    samples["pack F32 as BF16"] = functools.partial(pack, "F32", "BF16")
    for cache in ("F32", "F16", "BF16"):
        samples[f"kv_append {cache}"] = functools.partial(kv_append, cache)
        for stem in ("attention_decode", "attention_prefill"):
            samples[f"{stem} {cache}"] = functools.partial(attention, stem, cache)
    for stem, cache, D in (
        ("attention_decode", "KV_INT8", 48),
        ("attention_prefill", "KV_INT8", 80),
        ("attention_prefill", "KV_INT4", 64),
        ("attention_decode", "KV_FP8", 48),
    ):
        samples[f"{stem} {cache}"] = functools.partial(attention, stem, cache, D=D)
    for stem, cache in (("attention_decode", "BF16"), ("attention_prefill", "F32")):
        samples[f"{stem} {cache} of latents"] = functools.partial(attention, stem, cache, D=80, latent=64)
    samples["kv_append of latents"] = kv_append_latents
    samples["kv_append KV_INT4"] = functools.partial(kv_append, "KV_INT4")
    for cache in ("F32", "BF16"):
        samples[f"attention_decode {cache} shared"] = functools.partial(cascade, cache)
    for cache in ("BF16", "KV_INT8"):
        samples[f"attention_ranks {cache}"] = functools.partial(attention_ranks, cache)
    for name, changes in POLICIES.items():
        samples[f"{name} with a policy"] = functools.partial(changed, samples[name], changes)
    return samples


SAMPLES = _samples()
