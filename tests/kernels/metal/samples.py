"""Metal kernels as layers of Llama 3.2 1B, Llama 3.1 8B and Qwen3 0.6B launch them, for tests that look at their text."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from tests.kernels.delta_rule import recurrent_samples
from tinyvllm.backends import low_rank
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.metal import expert_plan
from tinyvllm.backends.metal import plan as records
from tinyvllm.backends.metal.expert_plan import Lists
from tinyvllm.backends.operands import GateClamp, RoutingPolicy
from tinyvllm.backends.shapes import AdapterProduct, Attention, Heads, Product
from tinyvllm.quant.formats import GROUPED, Layout, packed_in
from tinyvllm.quant.kv import KV_FORMATS

VARIANT, EPS = "apple7", "1e-05f"
FORMATS = ("BF16", "F16", "F32", "Q8_0", "Q4_0", "Q4_K")  # in every kernel; the others where a row is read in another way
GROUPED_SOME = ("INT2_G64", "INT3_G32", "INT4_G128", "INT5_G32", "INT6_G64", "INT8_G128")  # each width, each size of groups
OTHERS = (*(name for name in packed_in(Layout.ROWS) if name not in (*FORMATS, *GROUPED)), *GROUPED_SOME)
EVERY = (*FORMATS, *OTHERS)
FEATURES = ("SAMPLED", "TOP_K", "TOP_P", "MIN_P", "PENALIZED", "BIASED")


@dataclass(frozen=True)
class Sizes:
    E: int
    F: int
    H: int
    K: int
    D: int
    V: int
    qk_norm: bool = False

    def heads(self, cache: str, bias: bool = False) -> Heads:
        return Heads(self.H, self.K, self.D, 16, self.D, cache, bias, self.qk_norm, EPS)

    def attention(self, cache: str, window: int = 0, blocks: int = 512, cap: float = 0.0, sinks: bool = False) -> Attention:
        return Attention(self.H, self.K, self.D, 16, blocks, cache, f"{self.D**-0.5}f", window, cap, sinks)


SMALL, LARGE = Sizes(2048, 8192, 32, 8, 64, 128256), Sizes(4096, 14336, 32, 8, 128, 128256)
QWEN = Sizes(1024, 3072, 16, 8, 128, 151936, True)
EIGHT = Sizes(2048, 5632, 32, 4, 64, 32000)  # TinyLlama 1.1B: eight query heads a KV head
WIDE = Sizes(2560, 10240, 8, 4, 256, 262144, True)  # Gemma 3 4B
WIDEST = Sizes(5376, 21504, 32, 4, 512, 262144, True)  # the global layers of Gemma 4 31B
OSS = Sizes(2880, 2880, 64, 8, 64, 201088)  # gpt-oss


def samples() -> dict[str, Kernel]:
    """Kernels by name, of which the first word is the stem."""
    recurrent = recurrent_samples("metal", VARIANT, EPS)  # gated_delta and delta_norm
    return _few() | _many() | _adapters() | _experts() | recurrent | _attention() | _tokens()


def _few() -> dict[str, Kernel]:
    found = {}
    for format in FORMATS:
        for T in (1, 8, 16):
            found[f"matvec {format} of {T}"] = records.matvec(VARIANT, Product(format, T, LARGE.E, LARGE.F, residual=T == 1))
        found[f"norm_gate_up_silu {format}"] = records.norm_gate_up_silu(VARIANT, format, 1, LARGE.E, LARGE.F, EPS)
    for format in OTHERS:
        found[f"matvec {format} of 1"] = records.matvec(VARIANT, Product(format, 1, LARGE.E, LARGE.F))
    for format in ("BF16", "Q4_0", "Q4_K"):
        for name, sizes, T, cache in (("8b", LARGE, 1, "BF16"), ("qwen", QWEN, 4, "F16")):
            heads = sizes.heads(cache)
            found[f"norm_qkv_rope_store {format} {name}"] = records.norm_qkv_rope_store(VARIANT, format, T, sizes.E, heads, EPS)
            found[f"norm_head {format} {name}"] = records.norm_head(VARIANT, format, T, sizes.V, sizes.E, EPS)
    for cache in KV_FORMATS:
        found[f"norm_qkv_rope_store {cache}"] = records.norm_qkv_rope_store(VARIANT, "Q4_0", 4, SMALL.E, SMALL.heads(cache), EPS)
    for name, sizes in (("8b", LARGE), ("qwen", QWEN)):
        heads = sizes.heads("BF16")
        kernel = records.norm_qkv_rope_store(VARIANT, "Q4_K", 2, sizes.E, heads, EPS, apart=(heads.K * heads.D,))
        found[f"norm_qkv_rope_store {name}, v apart"] = kernel
    found["norm_head of all rows"] = records.norm_head(VARIANT, "Q6_K", 2, LARGE.K * LARGE.D, LARGE.E, EPS, gather=False)
    for half in ("GATE", "UP"):
        found[f"norm_gate_up_silu {half}"] = records.norm_gate_up_silu(VARIANT, "Q6_K", 2, LARGE.E, LARGE.F, EPS, bias=True, half=half)
    found["matvec with all"] = records.matvec(VARIANT, Product("BF16", 4, SMALL.E, SMALL.E, bias=True, residual=True, gelu=True))
    found["norm_gate_up_silu with bias"] = records.norm_gate_up_silu(VARIANT, "BF16", 3, QWEN.E, QWEN.F, EPS, bias=True)
    found["norm_qkv_rope_store with bias"] = records.norm_qkv_rope_store(VARIANT, "Q8_0", 16, SMALL.E, SMALL.heads("F32", True), EPS)
    return found


def _many() -> dict[str, Kernel]:
    found = {}
    for format in FORMATS:
        found[f"matmul {format} of 64"] = records.matmul(VARIANT, Product(format, 64, LARGE.E, LARGE.F, residual=True))
        found[f"matmul {format} with silu"] = records.matmul(VARIANT, Product(format, 256, SMALL.F, SMALL.E, silu=True, eps=EPS))
    for format in OTHERS:
        found[f"matmul {format} of 64"] = records.matmul(VARIANT, Product(format, 64, LARGE.E, LARGE.F))
    for format in ("Q6_K", "Q3_K"):
        found[f"matmul16 {format}"] = records.matmul16(records.MATRIX, Product(format, 16, LARGE.E, LARGE.F))
    found["matmul gated"] = records.matmul(VARIANT, Product("Q6_K", 64, LARGE.F, LARGE.E, gated=True, eps=EPS))
    found["matmul16 gated"] = records.matmul16(records.MATRIX, Product("Q6_K", 16, LARGE.F, LARGE.E, gated=True, eps=EPS))
    for format in FORMATS:
        found[f"matmul16 {format}"] = records.matmul16(records.MATRIX, Product(format, 16, LARGE.E, LARGE.F, residual=True))
        found[f"matmul16 {format} with silu"] = records.matmul16(
            records.MATRIX, Product(format, 9, QWEN.F, QWEN.E, silu=True, eps=EPS), fragments=records.FRAGMENTS[-1]
        )
    found["matmul16 of three"] = records.matmul16(records.MATRIX, Product("Q4_0", 16, 3072, SMALL.E, eps=EPS, borders=(2048, 2560)))
    found["matmul16 gathered"] = records.matmul16(records.MATRIX, Product("Q4_K", 16, SMALL.V, SMALL.E, eps=EPS, gather=True))
    found["matmul of three"] = records.matmul(VARIANT, Product("Q4_K", 32, 3072, SMALL.E, eps=EPS, borders=(2048, 2560)))
    found["matmul gathered"] = records.matmul(VARIANT, Product("Q4_0", 17, SMALL.V, SMALL.E, eps=EPS, gather=True))
    for cache in ("F32", "F16", "BF16", *KV_FORMATS):
        found[f"rope_store {cache}"] = records.rope_store(VARIANT, 128, (QWEN if cache == "F16" else SMALL).heads(cache))
    found["argmax"], found["argmax_merge"], _ = records.argmax(VARIANT, 16, SMALL.V)
    return found


def _adapters() -> dict[str, Kernel]:
    """Their own kernels, and those that take a bias of each row."""
    found, O = {}, (LARGE.H + 2 * LARGE.K) * LARGE.D
    for T, R in ((1, 16), (512, 64)):
        for name, starts, eps in (("qkv", (0, LARGE.H * LARGE.D, (LARGE.H + LARGE.K) * LARGE.D), EPS), ("alone", (0,), None)):
            p = AdapterProduct(T, O, LARGE.E, R, starts, eps, eps is None)
            found[f"lora_shrink {name} of {T}"], found[f"lora_bias {name} of {T}"] = low_rank.plan("metal", VARIANT, p)
    for T in (1, 16, 64):
        product = Product("Q4_K", T, LARGE.E, LARGE.F, bias=True, residual=True, bias_pitch=LARGE.E)
        both = Product("Q4_K", T, LARGE.F, LARGE.E, bias=True, silu=True, eps=EPS, bias_pitch=2 * LARGE.F)
        if T > records.FEW:
            found["matmul with biases of rows"], found["matmul with silu and biases of rows"] = (
                records.matmul(VARIANT, each) for each in (product, both)
            )
            continue
        found[f"matvec of {T} with biases of rows"] = records.matvec(VARIANT, product)
        shape, pitch = (VARIANT, "Q4_K", T, LARGE.E, LARGE.F, EPS, True), 2 * LARGE.F
        found[f"norm_gate_up_silu of {T} with biases of rows"] = records.norm_gate_up_silu(*shape, bias_pitch=pitch)
        for sizes in (LARGE, QWEN):
            heads = replace(sizes.heads("BF16", True), bias_pitch=(sizes.H + 2 * sizes.K) * sizes.D)
            kernel = records.norm_qkv_rope_store(VARIANT, "BF16", T, sizes.E, heads, EPS)
            found[f"norm_qkv_rope_store {sizes.E} of {T} with biases of rows"] = kernel
    found["norm_gate_up_silu UP with biases of rows"] = records.norm_gate_up_silu(*shape, half="UP", bias_pitch=pitch)
    found["matmul16 with biases of rows"] = records.matmul16(records.MATRIX, replace(both, T=16))
    found["rope_store with biases of rows"] = records.rope_store(VARIANT, 128, heads)
    return found


def _experts() -> dict[str, Kernel]:
    """Of Qwen3 30B A3B, gpt-oss 20B and DeepSeek-V3."""
    found, usual, clamped = {}, RoutingPolicy(128, 8, True), RoutingPolicy(32, 4, True, bias="logits")
    grouped = RoutingPolicy(256, 8, True, True, "choice", 8, 4, 2.5, gated=True)
    for T, policy in itertools.product((1, 64), (usual, clamped, grouped)):
        found[f"norm_route {policy.experts} of {T}"] = expert_plan.norm_route(VARIANT, T, 2048, policy, EPS)
        found[f"choose_experts {policy.experts} of {T}"] = expert_plan.choose_experts(VARIANT, T, policy)
    found["norm_route alone"] = expert_plan.norm_route(VARIANT, 64, 7168, usual, None)
    found |= {f"list_experts {X}": expert_plan.list_experts(VARIANT, Lists(64, 8, X)) for X in (32, 512, 1024)}
    found |= {f"experts_sum {on}": expert_plan.experts_sum(VARIANT, Lists(64, 8, 128), 2048, on) for on in (True, False)}
    for format, T in itertools.product(("BF16", "Q4_K", "MXFP4"), (1, 64, 512)):
        lists = Lists(T, 8, 128)
        found[f"norm_gate_up_silu {format} by experts of {T}"] = expert_plan.experts_gate_up(VARIANT, format, lists, 2048, 768, EPS)
        product = Product(format, lists.task, 2048, 768, bias=True)
        found[f"matvec {format} by experts of {T}"] = expert_plan.experts_matvec(VARIANT, product, lists)
    gate = GateClamp(1.702, 7.0)
    found["norm_gate_up_silu clamped"] = expert_plan.experts_gate_up(VARIANT, "MXFP4", Lists(64, 4, 32), 2880, 2880, EPS, True, clamp=gate)
    found["norm_gate_up_silu gelu"] = expert_plan.experts_gate_up(VARIANT, "BF16", Lists(1, 4, 32), 2880, 2880, EPS, half="UP", gelu=True)
    return found


def _attention() -> dict[str, Kernel]:
    found = {}
    wide = ("wide", WIDE, "F32"), ("widest", WIDEST, "BF16"), ("widest F32", WIDEST, "F32")
    for name, sizes, cache in (("1b", SMALL, "F16"), ("8b", LARGE, "BF16"), *wide):
        a = sizes.attention(cache, window=1024 if sizes is WIDE else 0)
        found[f"attention_prefill {name}"] = records.attention_prefill(VARIANT, 512, 2, a)
        found[f"attention_decode {name}"] = records.attention_decode(VARIANT, 16, a)[0][0]
        found[f"attention_decode {name} shared"] = records.attention_decode(VARIANT, 16, a, cascade=True)[0][0]
        found[f"attention_decode {name} of two"], found[f"attention_merge {name}"] = records.attention_decode(records.MERGE, 16, a)[0]
    for name, sizes, cache in (
        ("int8", LARGE, "KV_INT8"),
        ("int4", SMALL, "KV_INT4"),
        ("fp8", WIDE, "KV_FP8"),
        ("widest int4", WIDEST, "KV_INT4"),
        ("widest int8", WIDEST, "KV_INT8"),
    ):
        a = sizes.attention(cache)
        found[f"attention_prefill {name}"] = records.attention_prefill(VARIANT, 512, 2, a)
        found[f"attention_decode {name}"] = records.attention_decode(VARIANT, 16, a)[0][0]
        found[f"attention_decode {name} shared"] = records.attention_decode(VARIANT, 16, a, cascade=True)[0][0]
    a = OSS.attention("F16", window=128, cap=50.0, sinks=True)
    found["attention_prefill sinks and cap"] = records.attention_prefill(VARIANT, 512, 2, a)
    found["attention_decode sinks and cap"] = records.attention_decode(VARIANT, 16, a)[0][0]
    two = records.attention_decode(records.MERGE, 16, a, cascade=True)[0]
    found["attention_decode sinks and cap of two"], found["attention_merge sinks and cap"] = two
    found["attention_decode int4 of eight heads"] = records.attention_decode(VARIANT, 16, EIGHT.attention("KV_INT4"), cascade=True)[0][0]
    found["attention_decode short"] = records.attention_decode(VARIANT, 16, SMALL.attention("BF16", blocks=32))[0][0]
    return found


def _tokens() -> dict[str, Kernel]:
    found = {f"embed {format}": records.embed(VARIANT, format, 64, SMALL.V, SMALL.E) for format in EVERY}
    for cache in ("F32", "F16", "BF16", *KV_FORMATS):
        found[f"kv_append {cache}"] = records.kv_append(VARIANT, 64, 8, 16, 128, cache)
    found["matrix_probe"] = records.matrix_probe(VARIANT)
    found["kv_copy"] = records.kv_copy(VARIANT, 4, 2 * 8 * 16 * 128 * 2)
    found["advance"] = records.advance(VARIANT, 256, 512, 16, 64)
    found["read"] = records.read(VARIANT, 1 << 26)
    for name, B, on in (("greedy", 1, ()), ("drawn", 8, FEATURES[:1]), ("with all", 1, FEATURES), ("of many with all", 200, FEATURES)):
        kernels, _ = records.sample(VARIANT, B, QWEN.V, 256, {feature: feature in on for feature in FEATURES})
        found |= {f"sample {name}, launch {i}": kernel for i, kernel in enumerate(kernels)}
    return found
