"""Rules for the shapes that a backend's kernels support, written as tables: op -> rules (backends/*/limits.py).

A rule returns None if the kernel supports the shape, or else the reason, which the table of choices shows: what the kernel supports, and
what the model has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.placement import Placement


@dataclass(frozen=True)
class ShapeFacts:
    """What the rules of an op may depend on. A field that the op does not have keeps its default, and no rule of the op reads it.

    inputs, outputs  columns and rows of the weight; outputs of each of gate and up
    format, layout   of the weight: "Q8_0", ...; "panels", "tiles" or "rows"
    matrices         matrices of a weight in rows
    norm, eps        "RMS" or "LAYER", "" if there is none before the product, and what it adds inside of the root
    gelu             the gate has GELU instead of SiLU
    output_norm, output_scale  the outputs are normed, or scaled, before the residual is added
    whole_qk_norm    the q/k norms are over all heads at once
    other_values     values are normed, are the keys, or are those of another layer
    cap              scores, or logits, are capped
    sinks            heads have sinks: one more score each, without a value
    experts          of a mixture
    pair_bias        each pair of a row and an expert has a bias of its own
    ungrouped        the reference has chosen the experts of rows, so that nothing lists the rows of an expert
    scaled           rows of the embedding are scaled, or logits are
    head_dim, query_heads, kv_heads
    latent           features of a key that are also the value; 0: values are stored
    block_size       tokens of a KV block; block_bytes: bytes of it in one layer
    table_blocks     blocks in a row of the block table
    cache_format     "F32", "F16", "BF16", or packed: "KV_FP8", "KV_INT8", "KV_INT4"; cache_elements, cache_bytes: of one layer's cache
    vocabulary       tokens
    features         what rows of a draw ask for: "sampled+top_p"; "" if that is not known
    drafts           that a slot of recurrent states keeps
    """

    placement: Placement
    inputs: int = 0
    outputs: int = 0
    format: str = ""
    layout: str = ""
    matrices: int = 1
    norm: str = "RMS"
    eps: float = 0.0
    gelu: bool = False
    output_norm: bool = False
    output_scale: bool = False
    whole_qk_norm: bool = False
    other_values: bool = False
    cap: bool = False
    sinks: bool = False
    scaled: bool = False
    experts: int = 0
    pair_bias: bool = False
    ungrouped: bool = False
    head_dim: int = 0
    query_heads: int = 1
    kv_heads: int = 1
    latent: int = 0
    block_size: int = 0
    block_bytes: int = 0
    table_blocks: int = 0
    cache_format: str = ""
    cache_elements: int = 0
    cache_bytes: int = 0
    vocabulary: int = 0
    features: str = ""
    drafts: int = 0

    @property
    def queries_per_kv_head(self) -> int:
        return self.query_heads // self.kv_heads


Rule = Callable[[ShapeFacts], str | None]
Limits = Mapping[str, Sequence[Rule]]

_NOUNS = {
    "inputs": "inputs of the weight",
    "outputs": "outputs",
    "experts": "experts of a layer",
    "head_dim": "head dimension",
    "latent": "features of a latent",
    "queries_per_kv_head": "query heads per KV head",
    "block_size": "tokens per KV block",
    "block_bytes": "bytes per KV block",
    "cache_elements": "cache elements per layer",
    "cache_bytes": "cache bytes per layer",
    "vocabulary": "vocabulary",
}
_FIELDS = {field.name for field in fields(ShapeFacts)} | {"queries_per_kv_head"}
assert set(_NOUNS) <= _FIELDS


def _number(facts: ShapeFacts, name: str) -> int:
    return int(getattr(facts, name))


def _rule(name: str, fits: Callable[[int, ShapeFacts], bool], wanted: Callable[[ShapeFacts], str]) -> Rule:
    noun = _NOUNS[name]

    def check(facts: ShapeFacts) -> str | None:
        value = _number(facts, name)
        return None if fits(value, facts) else f"kernel supports {noun} {wanted(facts)}; the model has {value}"

    return check


def multiple_of(name: str, step: int | Callable[[ShapeFacts], int]) -> Rule:
    """The number is a multiple of `step`, which may depend on the other facts."""

    def step_of(facts: ShapeFacts) -> int:
        return step if isinstance(step, int) else step(facts)

    return _rule(name, lambda value, facts: value % step_of(facts) == 0, lambda facts: f"in multiples of {step_of(facts)}")


def between(name: str, low: int, high: int) -> Rule:
    """low <= number <= high."""
    return _rule(name, lambda value, facts: low <= value <= high, lambda facts: f"from {low} to {high}")


def at_most(name: str, limit: int) -> Rule:
    """number <= limit."""
    return _rule(name, lambda value, facts: value <= limit, lambda facts: f"up to {limit}")


def less_than(name: str, limit: int) -> Rule:
    """number < limit."""
    return _rule(name, lambda value, facts: value < limit, lambda facts: f"below {limit}")


def power_of_two(name: str, low: int, high: int) -> Rule:
    """A power of two with low <= number <= high."""
    return _rule(
        name,
        lambda value, facts: value & (value - 1) == 0 and low <= value <= high,
        lambda facts: f"that are a power of two from {low} to {high}",
    )


def rms_norm_only(facts: ShapeFacts) -> str | None:
    if facts.norm == "RMS":
        return None
    return f"kernel supports RMSNorm only; the model uses {'LayerNorm' if facts.norm == 'LAYER' else 'no norm before the product'}"


def no_layer_norm(facts: ShapeFacts) -> str | None:
    return "kernel supports RMSNorm only; the model uses LayerNorm" if facts.norm == "LAYER" else None


def normed_in_sixteens(facts: ShapeFacts) -> str | None:
    """A norm of outputs reads sixteen at a time."""
    if not facts.output_norm or facts.outputs % 16 == 0:
        return None
    return f"kernel norms outputs in multiples of 16; the model has {facts.outputs}"


def some_norm(facts: ShapeFacts) -> str | None:
    return None if facts.norm else "kernel supports products after a norm; the model uses no norm before the product"


def without(policy: str, what: str) -> Rule:
    """The policy, a field of the facts, is not set; `what` the kernel cannot do."""

    def check(facts: ShapeFacts) -> str | None:
        return f"kernel does not support {what}" if getattr(facts, policy) else None

    return check


plain_rows = without("scaled", "a scale of the embedding")
plain_outputs = (without("output_norm", "a norm of the outputs"), without("output_scale", "a scale of the outputs"))
plain_logits = (without("scaled", "a divisor of the logits"), without("cap", "a cap of the logits"))
silu_gate = without("gelu", "a gate with GELU")
stored_values = without("latent", "values that are a part of the keys")
grouped_rows = without("ungrouped", "experts that norm_route has not chosen")
shared_bias = without("pair_bias", "biases of each pair of a row and an expert, which adapters of experts make")
norm_by_head = without("whole_qk_norm", "norms of q and k over all heads at once")
own_values = without("other_values", "values that are normed, that are the keys, or that another layer has")


def tiles_only(facts: ShapeFacts) -> str | None:
    return None if facts.layout == "tiles" else f"kernel supports weights in tiles only; these {facts.format} weights are in {facts.layout}"


def matrices(count: int, what: str) -> Rule:
    """The weight consists of `count` matrices, which are `what`."""

    def check(facts: ShapeFacts) -> str | None:
        if facts.matrices == count:
            return None
        return f"kernel supports {count} {'matrix' if count == 1 else 'matrices'} ({what}); the weight has {facts.matrices}"

    return check


def cache_formats(*formats: str) -> Rule:
    """The KV cache is in one of these formats."""

    def check(facts: ShapeFacts) -> str | None:
        if facts.cache_format in formats:
            return None
        return f"kernel supports a KV cache in {' or '.join(formats)}; the cache is {facts.cache_format}"

    return check


def pairs_of_sixteen(facts: ShapeFacts) -> str | None:
    """A KV cache in int4: sixteen bytes hold 32 numbers of a head."""
    if facts.cache_format != "KV_INT4" or facts.head_dim % 32 == 0:
        return None
    return f"kernel supports a KV cache in KV_INT4 for head dimensions in multiples of 32; the model has {facts.head_dim}"


def first_reason(rules: Sequence[Rule], facts: ShapeFacts) -> str | None:
    """The reason of the first rule that the facts break, None if they break none."""
    return next((reason for rule in rules if (reason := rule(facts)) is not None), None)
