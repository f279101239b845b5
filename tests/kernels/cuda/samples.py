"""CUDA kernels as layers of Llama 3.2 1B, Llama 3.1 8B and Qwen3 0.6B launch them, for tests of their compilation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.formats import sampled_formats
from tests.kernels.delta_rule import recurrent_samples
from tinyvllm.backends import low_rank
from tinyvllm.backends.cuda import attention_plan, context_plan, expert_plan, hopper_plan
from tinyvllm.backends.cuda import plan as records
from tinyvllm.backends.cuda.expert_plan import Lists
from tinyvllm.backends.cuda.plan import GPU
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.operands import GateClamp, RoutingPolicy
from tinyvllm.backends.shapes import AdapterProduct, Attention, Heads, Product
from tinyvllm.placement import RankGroup
from tinyvllm.quant.formats import Layout

GPUS = {"sm_80": GPU(108, 163 << 10, 164 << 10), "sm_90": GPU(132, 227 << 10, 228 << 10)}  # A100; H100 and H200
VARIANT, EPS = "sm_80", "1e-05f"
USUAL = ("BF16", "F16", "Q8_0", "Q4_0")
PACKED = tuple(name for name in sampled_formats(Layout.TILES) if name not in USUAL)
TILED = (*USUAL, *PACKED)
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

    def heads(self, cache: str) -> Heads:
        return Heads(self.H, self.K, self.D, 16, self.D, cache, False, self.qk_norm, EPS)

    def attention(self, cache: str, window: int = 0, cap: float = 0.0, sinks: bool = False) -> Attention:
        return Attention(self.H, self.K, self.D, 16, 512, cache, f"{self.D**-0.5}f", window, cap, sinks)


SMALL, LARGE = Sizes(2048, 8192, 32, 8, 64, 128256), Sizes(4096, 14336, 32, 8, 128, 128256)
QWEN = Sizes(1024, 3072, 16, 8, 128, 151936, True)
WIDE = Sizes(2560, 10240, 8, 4, 256, 262144, True)  # Gemma 3 4B
WIDEST = Sizes(5376, 21504, 32, 4, 512, 262144, True)  # the global layers of Gemma 4 31B
SINKS, CAPPED = Sizes(2880, 2880, 64, 8, 64, 201088), Sizes(2304, 9216, 8, 4, 256, 256000)  # gpt-oss; Gemma 2 2B


def samples(gpu: GPU, arch: str) -> dict[str, Kernel]:
    """Kernels for a GPU of an architecture by name; the first word of a name is the stem."""
    return (
        _few(gpu)
        | _many(gpu)
        | _adapters(gpu)
        | _experts(gpu)
        | recurrent_samples("cuda", VARIANT, EPS)  # gated_delta and delta_norm
        | (_hopper(gpu) if f"{arch}a" == hopper_plan.HOPPER else {})
        | _attention(gpu)
        | _tokens(gpu)
        | _ranks()
        | _context_ranks(gpu)
    )


def _ranks() -> dict[str, Kernel]:
    """Of the second of two ranks, and of the first of eight."""
    two, eight = RankGroup(1, 2, None, 1 << 22, 0), RankGroup(0, 8, None, 1 << 16, 0)
    return {
        "all_reduce of two": records.all_reduce(VARIANT, 1, LARGE.E, two, False, True, 0),
        "all_reduce of eight": records.all_reduce(VARIANT, 512, SMALL.E, eight, True, True, SMALL.E),
        "gather_logits of two": records.gather_logits(VARIANT, 1, LARGE.V, LARGE.V // 2, two),
        "gather_logits of eight": records.gather_logits(VARIANT, 64, QWEN.V, 18992, eight),
    }


def _context_ranks(gpu: GPU) -> dict[str, Kernel]:
    """Of the second of two ranks and the first of eight; M blocks of 256 tokens of each rank."""
    two, eight = RankGroup(1, 2, None, 1 << 24, 0), RankGroup(0, 8, None, 1 << 24, 0)
    found = {
        "gather_blocks": context_plan.gather_blocks(VARIANT, replace(LARGE.attention("BF16"), S=256, M=256), 1 << 20, two),
        "own_rows": context_plan.own_rows(VARIANT, 512, LARGE.E, two),
        "gather_rows of two": context_plan.gather_rows(VARIANT, 512, LARGE.E, two),
        "gather_rows of eight": context_plan.gather_rows(VARIANT, 512, SMALL.E, eight),
        "rope_store of a rank": records.rope_store(VARIANT, 128, replace(QWEN.heads("KV_INT8"), S=256, ranks=two)),
        "kv_append of a rank": records.kv_append(VARIANT, 64, 8, 256, 128, "F16", two),
    }
    for name, told in (
        ("of 64 features", SMALL.attention("F16")),
        ("of 128 features", LARGE.attention("BF16", window=4096)),
        ("of 256 features", WIDE.attention("BF16")),
        ("KV_INT4", LARGE.attention("KV_INT4")),
        ("with sinks", SINKS.attention("BF16", 128, sinks=True)),
        ("capped", CAPPED.attention("BF16", 4096, cap=50.0)),
    ):
        a, group = replace(told, S=256, M=256), eight if told.D == 64 else two
        found[f"attention_decode_ranks {name}"] = context_plan.attention_decode_ranks(VARIANT, 0, 2, a, gpu, group)
        found[f"merge_ranks {name}"] = context_plan.merge_ranks(VARIANT, 0, 2, a, group)
        found[f"attention_prefill of ranks {name}"] = context_plan.attention_prefill(VARIANT, 512, 2, a, gpu, group)
    return found


def _few(gpu: GPU) -> dict[str, Kernel]:
    found = {}
    for format in TILED:
        found[f"matvec {format} of 1"] = records.matvec(VARIANT, Product(format, 1, LARGE.E, LARGE.F, residual=True), gpu)
        found[f"matvec {format} of 8"] = records.matvec(VARIANT, Product(format, 8, LARGE.E, LARGE.F), gpu)
        found[f"norm_gate_up_silu {format}"] = records.norm_gate_up_silu(VARIANT, format, 8, LARGE.E, LARGE.F, gpu, EPS)
    for format in ("BF16", "Q4_0", *PACKED):
        for name, sizes, T, cache in (("8b", LARGE, 8, "BF16"), ("qwen", QWEN, 1, "F16")):
            heads = sizes.heads(cache)
            found[f"norm_qkv_rope_store {format} {name}"] = records.norm_qkv_rope_store(VARIANT, format, T, sizes.E, heads, gpu, EPS)
            found[f"norm_head {format} {name}"] = records.norm_head(VARIANT, format, T, sizes.V, sizes.E, gpu, EPS)
    mixed = replace(LARGE.heads("BF16"), others=(8,))  # v in another format
    found["norm_qkv_rope_store mixed"] = records.norm_qkv_rope_store(VARIANT, "Q4_K", 8, LARGE.E, mixed, gpu, EPS)
    found["norm_head of every row"] = records.norm_head(VARIANT, "Q6_K", 8, 1024, LARGE.E, gpu, EPS, indexed=False)
    found["matvec with all"] = records.matvec(VARIANT, Product("BF16", 4, SMALL.E, SMALL.E, bias=True, residual=True, gelu=True), gpu)
    found["norm_gate_up_silu qwen"] = records.norm_gate_up_silu(VARIANT, "BF16", 3, QWEN.E, QWEN.F, gpu, EPS, bias=True)
    return found


def _many(gpu: GPU) -> dict[str, Kernel]:
    found = {f"quantize_input {format}": records.quantize_input(VARIANT, format, 128, SMALL.E, EPS) for format in TILED}
    found["quantize_input gathered"] = records.quantize_input(VARIANT, "BF16", 64, LARGE.E, EPS, gather=True)
    found["quantize_input alone"] = records.quantize_input(VARIANT, "Q4_0", 64, LARGE.F)
    for format in TILED:
        for T in (16, 64, 512, 4096) if format in ("BF16", "Q4_0", "Q6_K") else (64, 4096):
            found[f"matmul {format} of {T}"] = records.matmul(VARIANT, Product(format, T, LARGE.E, LARGE.F, residual=True), gpu)[0]
        found[f"matmul {format} with silu"] = records.matmul(VARIANT, Product(format, 256, SMALL.F, SMALL.E, silu=True), gpu)[0]
    for cache in ("F32", "F16", "BF16"):
        found[f"rope_store {cache}"] = records.rope_store(VARIANT, 128, (QWEN if cache == "F16" else SMALL).heads(cache))
    found["matmul with a gate"] = records.matmul(VARIANT, Product("Q5_K", 64, 2048, 2048, True, True, gate=True, bias_first=2048), gpu)[0]
    found["rope_store mixed"] = records.rope_store(VARIANT, 128, replace(SMALL.heads("BF16"), others=(8, 8)))
    found["argmax of 1"], found["argmax of 64"] = records.argmax(VARIANT, 1, SMALL.V, gpu), records.argmax(VARIANT, 64, QWEN.V, gpu)
    return found


def _adapters(gpu: GPU) -> dict[str, Kernel]:
    """Their own kernels, and those that take a bias of each row."""
    found, O = {}, (LARGE.H + 2 * LARGE.K) * LARGE.D
    for T, R in ((1, 16), (512, 64)):
        for name, starts, eps in (("qkv", (0, LARGE.H * LARGE.D, (LARGE.H + LARGE.K) * LARGE.D), EPS), ("alone", (0,), None)):
            p = AdapterProduct(T, O, LARGE.E, R, starts, eps, eps is None)
            found[f"lora_shrink {name} of {T}"], found[f"lora_bias {name} of {T}"] = low_rank.plan("cuda", VARIANT, p)
    for T in (1, 8):
        product = Product("Q4_K", T, LARGE.E, LARGE.F, bias=True, residual=True, bias_pitch=LARGE.E)
        found[f"matvec of {T} with biases of rows"] = records.matvec(VARIANT, product, gpu)
        shape = VARIANT, "BF16", T, LARGE.E, LARGE.F, gpu, EPS, True, 2 * LARGE.F
        found[f"norm_gate_up_silu of {T} with biases of rows"] = records.norm_gate_up_silu(*shape)
        for sizes in (LARGE, QWEN):
            heads = replace(sizes.heads("BF16"), bias=True, bias_pitch=(sizes.H + 2 * sizes.K) * sizes.D)
            kernel = records.norm_qkv_rope_store(VARIANT, "BF16", T, sizes.E, heads, gpu, EPS)
            found[f"norm_qkv_rope_store {sizes.E} of {T} with biases of rows"] = kernel
    found["rope_store with biases of rows"] = records.rope_store(VARIANT, 128, heads)
    for T, format in ((16, "BF16"), (512, "BF16"), (4096, "BF16"), (64, "Q6_K"), (4096, "Q6_K")):
        product = Product(format, T, LARGE.E, LARGE.F, bias=True, residual=True, bias_pitch=LARGE.E)
        found[f"matmul {format} of {T} with biases of rows"] = records.matmul(VARIANT, product, gpu)[0]
        both = Product(format, T, LARGE.F, LARGE.E, bias=True, silu=True, bias_pitch=2 * LARGE.F)
        found[f"matmul {format} of {T} with silu and biases of rows"] = records.matmul(VARIANT, both, gpu)[0]
    return found


def _experts(gpu: GPU) -> dict[str, Kernel]:
    """Of Qwen3 30B A3B, gpt-oss 20B and DeepSeek-V3."""
    usual, clamped = RoutingPolicy(128, 8, True), RoutingPolicy(32, 4, True, bias="logits")
    grouped = RoutingPolicy(256, 8, True, True, "choice", 8, 4, 2.5, gated=True)
    found = {
        f"norm_route {p.experts} of {T}": expert_plan.norm_route(VARIANT, T, 2048, p, EPS)[0]
        for p in (usual, clamped, grouped)
        for T in (1, 64)
    }
    found["norm_route alone"] = expert_plan.norm_route(VARIANT, 64, 7168, usual, None)[0]
    found |= {f"list_experts {X}": expert_plan.list_experts(VARIANT, Lists(64, 8, X)) for X in (32, 512, 1024)}
    found["experts_sum"], found["experts_sum alone"] = (
        expert_plan.experts_sum(VARIANT, Lists(64, 8, 128), 2048, on) for on in (True, False)
    )
    found["experts_sum of a rank"] = expert_plan.experts_sum(VARIANT, Lists(64, 4, 32), 2880, False, bias=True)
    for format in TILED:
        for T in (1, 64, 4096):
            lists = Lists(T, 8, 128)
            both, down = Product(format, lists.places, 768, 2048, silu=True), Product(format, lists.places, 2048, 768, bias=True)
            found[f"matmul {format} by experts of {T}"] = expert_plan.experts_matmul(VARIANT, both, lists, gpu)
            found[f"matmul {format} down by experts of {T}"] = expert_plan.experts_matmul(VARIANT, down, lists, gpu)
    lists = Lists(64, 4, 32)
    gated = Product("MXFP4", lists.places, 2880, 2880, bias=True, silu=True)
    found["matmul MXFP4 clamped"] = expert_plan.experts_matmul(VARIANT, gated, lists, gpu, clamp=GateClamp(1.702, 7.0))
    found["matmul BF16 gelu"] = expert_plan.experts_matmul(VARIANT, replace(gated, format="BF16"), lists, gpu, gelu=True)
    found["quantize_input by experts"] = expert_plan.gathered(VARIANT, "Q4_K", Lists(64, 8, 128), 2048, EPS, 8)
    return found


def _hopper(gpu: GPU) -> dict[str, Kernel]:
    variant = hopper_plan.HOPPER
    found = {}
    for cut in hopper_plan.CUTS:
        name = f"matmul_hopper BF16, {cut.tile_o} x {cut.tile_t}"
        for split in (1, 2)[: 1 + cut.splits]:
            down = Product("BF16", cut.tile_t, SMALL.E, SMALL.F, residual=True)
            found[f"{name}, {split}"] = hopper_plan.matmul_hopper(variant, down, gpu, (cut, split))[0]
        gate_up = Product("F16", cut.tile_t, SMALL.F, SMALL.E, silu=True)
        found[f"{name} with silu"] = hopper_plan.matmul_hopper(variant, gate_up, gpu, (cut, 1))[0]
    both = Product("BF16", 2048, LARGE.F, LARGE.E, bias=True, silu=True, bias_pitch=2 * LARGE.F)
    found["matmul_hopper BF16 with biases of rows"] = hopper_plan.matmul_hopper(variant, both, gpu)[0]
    for name, sizes, cache in (("1b", SMALL, "F16"), ("8b", LARGE, "BF16")):
        told = sizes.attention(cache)
        found[f"attention_prefill_hopper {name}"] = hopper_plan.attention_prefill(variant, 512, 2, told)
    found["quantize_cores BF16"] = hopper_plan.quantize_cores(VARIANT, "BF16", 256, LARGE.E, EPS)
    return found


def _attention(gpu: GPU) -> dict[str, Kernel]:
    found = {}
    for name, sizes, cache in (("1b", SMALL, "F16"), ("8b", LARGE, "BF16"), ("wide", WIDE, "BF16")):
        told = sizes.attention(cache, window=1024 if sizes is WIDE else 0)
        found[f"attention_prefill {name}"] = attention_plan.attention_prefill(VARIANT, 512, 2, told, gpu)
        found[f"attention_decode {name}"] = attention_plan.attention_decode(VARIANT, 32, told, gpu)[0]
        if (team := attention_plan.attention_decode(VARIANT, 1, told, gpu)[0]).stem == "attention_decode_team":
            found[f"attention_decode_team {name}"] = team
        if sizes is not WIDE:
            found[f"attention_decode {name}, shared"] = attention_plan.attention_decode(VARIANT, 64, told, gpu, cascade=True)[0]
    for name, told in (("sinks", SINKS.attention("BF16", 128, sinks=True)), ("capped", CAPPED.attention("BF16", 4096, cap=50.0))):
        found[f"attention_prefill {name}"] = attention_plan.attention_prefill(VARIANT, 512, 2, told, gpu)
        found[f"attention_decode {name}"] = attention_plan.attention_decode(VARIANT, 32, told, gpu)[0]
        found[f"attention_decode {name}, shared"] = attention_plan.attention_decode(VARIANT, 64, told, gpu, cascade=True)[0]
    for cache in ("BF16", "F16", "KV_INT8", "KV_INT4", "KV_FP8"):
        found[f"attention_prefill {cache} of 512 features"] = attention_plan.attention_prefill(
            VARIANT, 512, 2, WIDEST.attention(cache), gpu
        )
        found[f"attention_decode {cache} of 512 features"] = attention_plan.attention_decode(VARIANT, 32, told, gpu)[0]
    small = GPU(128, 99 << 10, 100 << 10)  # sm_86, sm_89 and sm_120
    for sizes, cache in ((WIDE, "BF16"), (WIDEST, "BF16"), (WIDEST, "KV_INT8"), (WIDEST, "KV_INT4")):
        name = f"attention_prefill {cache} of {sizes.D} features in 99 KiB"
        found[name] = attention_plan.attention_prefill(VARIANT, 512, 2, sizes.attention(cache), small)
    both = LARGE.attention("BF16", cap=50.0, sinks=True)
    found["attention_decode of all policies, shared"] = attention_plan.attention_decode(VARIANT, 64, both, gpu, cascade=True)[0]
    packed = attention_plan.attention_decode(VARIANT, 64, SMALL.attention("KV_INT4"), gpu, cascade=True)[0]
    found |= {"attention_decode KV_INT4, shared": packed, "kv_append KV_FP8": records.kv_append(VARIANT, 64, 8, 16, 128, "KV_FP8")}
    found["attention_prefill KV_INT8"] = attention_plan.attention_prefill(VARIANT, 512, 2, LARGE.attention("KV_INT8"), gpu)
    found["rope_store KV_INT4"] = records.rope_store(VARIANT, 128, QWEN.heads("KV_INT4"))
    return found


def _tokens(gpu: GPU) -> dict[str, Kernel]:
    found = {}
    for format in ("F32", *TILED):
        found[f"embed {format} from rows"] = records.embed(VARIANT, format, 64, SMALL.V, SMALL.E, False)
        if format != "F32":
            found[f"embed {format}"] = records.embed(VARIANT, format, 64, SMALL.V, SMALL.E, True)
    for cache in ("F32", "F16", "BF16"):
        found[f"kv_append {cache}"] = records.kv_append(VARIANT, 64, 8, 16, 128, cache)
    found["kv_copy"] = records.kv_copy(VARIANT, 4, 2 * 8 * 16 * 128 * 2)
    found["advance"] = records.advance(VARIANT, 256, 512, 16, 64)
    found |= {f"pack_tiles {format}": records.pack_tiles(VARIANT, format, format, gpu) for format in TILED}
    for source, format in (("F32", "BF16"), ("F32", "F16"), ("F16", "BF16"), ("BF16", "F16")):
        found[f"pack_tiles {source} as {format}"] = records.pack_tiles(VARIANT, source, format, gpu)
    found["read"], found["copy"] = records.read(VARIANT, 1 << 26, 264), records.copy(VARIANT, 1 << 26, 264)
    for name, B, on in (("greedy", 1, ()), ("drawn", 8, FEATURES[:1]), ("with all", 1, FEATURES), ("of many with all", 200, FEATURES)):
        kernels, _ = records.sample(VARIANT, B, QWEN.V, 256, {feature: feature in on for feature in FEATURES}, gpu)
        found |= {f"sample {name}, launch {i}": kernel for i, kernel in enumerate(kernels)}
    return found
