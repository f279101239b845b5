"""Constants of what families do differently within an op. One that changes nothing is not defined, so that texts stay as they are."""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.backends.buffers import constant
from tinyvllm.backends.kernel import Constant
from tinyvllm.backends.operands import AdapterStack, GateClamp, NormWeights, RoutingPolicy
from tinyvllm.placement import RankGroup
from tinyvllm.quant.slices import ALL_SLICES, ColumnShare


def row_scale(scale: float) -> dict[str, Constant]:
    """Of `embed`: what rows of the table are multiplied by."""
    return {} if scale == 1.0 else {"ROW_SCALE": constant(scale)}


def gate(gelu: bool, clamp: GateClamp | None = None) -> dict[str, Constant]:
    """Of a gated product: GELU, or gpt-oss's gate, instead of SiLU."""
    clamped: dict[str, Constant] = {} if clamp is None else {"GATE_ALPHA": constant(clamp.alpha), "GATE_LIMIT": constant(clamp.limit)}
    return ({"GATE_GELU": 1} if gelu else {}) | clamped


def bias(has: bool) -> dict[str, Constant]:
    """Of products of experts."""
    return {"BIAS": 1} if has else {}


def sinks(has: bool) -> dict[str, Constant]:
    """Of attention: one more score a head, without a value."""
    return {"SINKS": 1} if has else {}


def routing(policy: RoutingPolicy) -> dict[str, Constant]:
    """Of a choice of experts."""
    constants: dict[str, Constant] = {}
    if policy.sigmoid:
        constants["SIGMOID"] = 1
    if policy.bias:
        constants["LOGIT_BIAS" if policy.bias == "logits" else "CHOICE_BIAS"] = 1
    if policy.groups > 1:
        constants |= {"EXPERT_GROUPS": policy.groups, "KEPT_GROUPS": policy.kept_groups}
        constants |= {"GROUP_SCORES": 1} if policy.group_scores == 1 else {}
    if policy.scale != 1.0:
        constants["SHARE_SCALE"] = constant(policy.scale)
    if policy.gated:
        constants["SHARED_GATE"] = 1
    return constants


def output_norm(norm: NormWeights | None) -> dict[str, Constant]:
    """Of a product: the norm of its outputs before the residual is added."""
    return {} if norm is None else {"OUT_NORM": 1, "EPS": constant(norm.eps)}


def output_scale(scale: float) -> dict[str, Constant]:
    """Of a product: what its outputs are multiplied by before the residual is added."""
    return {} if scale == 1.0 else {"OUT_SCALE": constant(scale)}


def logits(divisor: float, cap: float) -> dict[str, Constant]:
    """Of `norm_head`: what logits are divided by, and then capped at."""
    return ({} if divisor == 1.0 else {"DIVISOR": constant(divisor)}) | score_cap(cap)


def bias_pitch(bias: Tensor | None) -> int:
    """From a row's bias to the next one's, where each row has its own, as adapters make it; else 0."""
    return 0 if bias is None or len(bias.shape) == 1 else int(bias.shape[1])


def row_bias(pitch: int) -> dict[str, Constant]:
    """Of a product: `bias_pitch`."""
    return {"BIAS_PITCH": pitch} if pitch else {}


def values(parts: int, norm: bool) -> dict[str, Constant]:
    """Of the projections of attention: `QKV.parts`, and whether values are normed."""
    found: dict[str, Constant] = {} if parts == 3 else {"PROJECTIONS": parts}
    return found | ({"VALUE_NORM": 1} if norm else {})


def latent(features: int) -> dict[str, Constant]:
    """Of a cache: the first `features` of a key are also the value, if there are any."""
    return {"LATENT": features} if features else {}


def slices(share: ColumnShare | None) -> dict[str, Constant]:
    """Of a product of which a rank has some columns: what kernels/cpu/include/slices.h wants to know of them."""
    if share is None:
        return {}
    return {"SLICES": share.count, "FIRST_SLICE": share.first, "ALL_I": share.all_columns, "BEFORE": share.before}


def sums_of_adapters(stack: AdapterStack) -> dict[str, Constant]:
    """Of `lora_bias`: the slices that A's sums are added in, and the ranks that divide them, if there are any."""
    if not stack.unit:
        return {}
    share = stack.share
    if share is None:
        return {"UNIT": stack.unit, "SLICES": ALL_SLICES}
    return {"UNIT": stack.unit, **slices(share), "BEFORE": 0, **ranks(share.group), "PLACE": share.group.place}


def ranks(group: RankGroup | None) -> dict[str, Constant]:
    """The ranks that divide contexts, or columns, if there are any."""
    return {} if group is None else {"WORLD": group.world_size, "RANK": group.rank}


def score_cap(cap: float) -> dict[str, Constant]:
    """Of attention: CAP * tanh(score / CAP) before the softmax."""
    return {} if cap == 0.0 else {"CAP": constant(cap)}
