"""Which fixed call tests an op, by the facts of its shape, and how exact its results must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from itertools import combinations

from tinyvllm.backends.cases.inputs import DRAWN, GROUPS, QUERY_HEADS, VOCABULARY, S, columns, numbers_of
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.formats import FORMATS, Layout
from tinyvllm.quant.kv import KV_FORMATS

TESTED = frozenset(
    {
        "embed", "norm_qkv_rope_store", "kv_append", "attention_decode", "attention_prefill", "matmul", "norm_gate_up_silu", "norm_head",
        "norm_route", "experts_gate_up_silu", "experts_down", "lora_bias", "gated_delta", "advance", "kv_copy", "sample", "pack_tiles",
    }
)  # fmt: skip
MAX_HEADS = 256  # of a case: each has a copy of inputs
# Of draws that are tested with the model's own kernel. Penalties and biases have tables of rows of the vocabulary, which take too much.
FEATURES = tuple("+".join(("sampled", *filters)) for n in range(4) for filters in combinations(("top_k", "top_p", "min_p"), n))
WIDE = 512  # features of a head whose values GPUs divide in halves
MAX_WEIGHTS = 1 << 20  # of a product that is tested in the model's own sizes: they are packed before the first step
_MIXED = ("norm_qkv_rope_store", "norm_gate_up_silu", "experts_gate_up_silu")  # whose parts may be in several formats


@dataclass(frozen=True)
class Sizes:
    """Inputs of a product, its outputs, of each of gate and up, and what the norm before it adds inside of the root.

    Of q, k and v also the query and KV heads and what a head has; they have no biases then, as most models.
    """

    inputs: int
    outputs: int
    eps: float
    heads: tuple[int, int] = (0, 0)
    head_dim: int = 0


@dataclass(frozen=True)
class Case:
    """One fixed call: of `stem`, with weights in `format` in `layout`, a KV cache in `cache`, and heads of `head_dim`.

    Parts of a product in several formats have these with + between them, as ShapeFacts has. `cap` and `sinks` are attention's. With
    `drafts` recurrent states keep some, whatever the number that the model's keep. `heads`
    are the query and KV heads of attention, and `table_blocks` the least width of its block tables: where they are the model's, the kernel
    of the case is the model's own, and one compilation serves both. Results are the same with any. So are `sizes`, those of a small product
    of the model: weights and answers then repeat those of the usual sizes. So is the `vocabulary` of a draw by `features`; without them
    it is by all.
    """

    stem: str
    format: str = ""
    layout: str = ""
    cache: str = ""
    head_dim: int = 0
    cap: bool = False
    sinks: bool = False
    drafts: bool = False
    features: str = ""
    heads: tuple[int, int] = field(default=(QUERY_HEADS, GROUPS), compare=False)
    table_blocks: int = field(default=0, compare=False)
    sizes: Sizes | None = field(default=None, compare=False)
    vocabulary: int = field(default=DRAWN, compare=False)

    @property
    def is_mixed(self) -> bool:
        return "+" in self.format

    @property
    def is_recorded(self) -> bool:
        """Whether its answer is recorded; else it is computed (expected.py)."""
        return not (self.is_mixed or self.cap or self.sinks or self.head_dim == WIDE or self.sizes)

    @property
    def inputs(self) -> int:
        """Columns of the weights of a product."""
        return columns(self.format) if self.sizes is None else self.sizes.inputs

    @property
    def name(self) -> str:
        """As in messages and on disk: "matmul Q8_0"."""
        dim = f"D={self.head_dim}" if self.head_dim else ""
        policies = "capped" * self.cap, "sinks" * self.sinks, "drafts" * self.drafts
        return " ".join(word for word in (self.stem, self.format, self.layout, self.cache, dim, *policies, self.features) if word)

    @property
    def answer(self) -> str:
        """Which answer it has: float formats, grouped formats and cache formats hold the same numbers."""
        values = "" if self.format not in FORMATS or self.stem == "pack_tiles" else numbers_of(self.format)
        return " ".join(word for word in (self.stem, values, str(self.head_dim or ""), "drafts" * self.drafts, self.features) if word)

    @property
    def tolerances(self) -> Mapping[str, float]:
        """What each result may differ by, as a share of the answer's largest number; 0: not at all."""
        # numbers may be rounded to either neighbour
        stored = {"F32": 1e-5, "F16": 2**-10, "BF16": 2**-7, "KV_INT8": 2**-6, "KV_FP8": 2**-3, "KV_INT4": 0.25}.get(self.cache, 0.0)
        if self.stem == "norm_qkv_rope_store":
            return {"q": _PRODUCT, "kv": max(stored, _PRODUCT), "kept": 0.0}
        if self.stem == "kv_append" and self.cache in KV_FORMATS:
            return {"kv": stored, "kept": 0.0}
        if self.stem in ("attention_decode", "attention_prefill"):
            if self.cache in KV_FORMATS:
                return {"out": {"KV_INT8": 0.02, "KV_FP8": 0.08, "KV_INT4": 0.25}[self.cache]}
            return {"out": FORMATS[self.cache].tolerance}  # GPUs round the weights of the values to the cache's format
        return _TOLERANCES.get(self.stem, {})


_PRODUCT = 1e-4
_TOLERANCES = dict.fromkeys(("matmul", "norm_gate_up_silu", "experts_gate_up_silu", "experts_down"), {"y": _PRODUCT}) | {
    "lora_bias": {"y": _PRODUCT, "same": 0.0},
    "norm_head": {"logits": _PRODUCT, "best": 0.0},
    "norm_route": {"shares": _PRODUCT},
    "gated_delta": {"y": _PRODUCT, "states": _PRODUCT, "kept": 0.0},
}


def case_of(stem: str, facts: ShapeFacts | None) -> Case | None:
    """The case that is run for an op with these facts; None for one without facts, or without a case."""
    if facts is None or stem not in TESTED:
        return None
    if stem in ("attention_decode", "attention_prefill"):
        # 48 is for all the others: kernels take the multiples of 16 in loops, of 32 in KV_INT4
        other = 64 if facts.cache_format == "KV_INT4" else 48
        if facts.head_dim > 256 and not facts.placement.is_cpu:
            other = WIDE
        head_dim = facts.head_dim if facts.head_dim in (64, 128) else other
        case = Case(stem, cache=facts.cache_format, head_dim=head_dim, cap=facts.cap, sinks=facts.sinks)
        if head_dim != facts.head_dim:
            return case
        heads = facts.query_heads, facts.kv_heads
        shares = facts.placement.is_cpu and facts.block_size == S and heads[1] > 1 and 2 * heads[1] <= heads[0] <= MAX_HEADS
        return replace(case, heads=heads, table_blocks=facts.table_blocks) if shares else case
    if stem == "sample":
        own = facts.placement.is_cpu and facts.features in FEATURES and facts.vocabulary >= DRAWN
        return Case(stem, features=facts.features, vocabulary=facts.vocabulary) if own else Case(stem)
    layout = Layout(facts.layout).value if stem == "embed" else ""
    cached = stem in ("norm_qkv_rope_store", "kv_append")
    format = facts.format if stem in _MIXED else facts.format.split("+")[0]
    cache = facts.cache_format if cached else ""
    return Case(stem, format, layout, cache, drafts=facts.drafts > 0, sizes=_own_sizes(stem, facts))


def _own_sizes(stem: str, facts: ShapeFacts) -> Sizes | None:
    """Those of the CPU's small products, which then have the kernel of the case, but for options that few models have."""
    own_norms = ("norm_gate_up_silu", "norm_head", "norm_qkv_rope_store")
    normed = stem in own_norms and facts.norm == "RMS" and facts.eps > 0
    matrices = 2 if stem == "norm_gate_up_silu" else 1
    small = 0 < facts.inputs * facts.outputs * matrices <= MAX_WEIGHTS
    plain = (stem == "matmul" and not facts.norm) or (stem == "embed" and not facts.scaled and facts.outputs >= VOCABULARY)
    if not (normed or plain) or not small or not facts.placement.is_cpu:
        return None
    if "+" in facts.format or facts.inputs % max(32, FORMATS[facts.format].elements):  # a rank's columns may end within a block
        return None
    if stem != "norm_qkv_rope_store":
        return Sizes(facts.inputs, facts.outputs, facts.eps)
    if facts.block_size != S or facts.whole_qk_norm or facts.other_values:
        return None
    heads = facts.outputs // facts.head_dim - 2 * facts.kv_heads, facts.kv_heads
    return Sizes(facts.inputs, facts.outputs, facts.eps, heads, facts.head_dim)
