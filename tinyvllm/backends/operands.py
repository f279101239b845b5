"""Arguments of kernels in addition to tensors: weights, norms, the decode history, and the sampling features."""

from __future__ import annotations

from typing import Literal

from tinygrad import Tensor

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.layouts import MixedWeight, PackedWeight, RowWeight, StoredWeight
from tinyvllm.quant.slices import ColumnShare


@dataclass(frozen=True, eq=False)
class TensorWeight:
    """Weights [O_i, I] as plain tensors, whose outputs are concatenated; only the reference computes with them."""

    parts: tuple[Tensor, ...]

    @property
    def O(self) -> int:  # noqa: E743  the dimension's letter
        return sum(int(part.shape[0]) for part in self.parts)

    @property
    def I(self) -> int:  # noqa: E743
        return int(self.parts[0].shape[1])


KernelWeight = PackedWeight | StoredWeight | MixedWeight  # what kernels multiply with
Weight = TensorWeight | KernelWeight
KernelTable = PackedWeight | RowWeight  # an embedding table that kernels read
NormKind = Literal["RMS", "LAYER"]


def packed(weight: KernelWeight) -> PackedWeight:
    """The weight as panels or tiles; TypeError for rows of a file, and for parts of several formats."""
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"kernels: {weight.format} weights are no single matrix of panels or tiles, which these kernels take")
    return weight


def packed_parts(weight: KernelWeight) -> tuple[PackedWeight, ...]:
    """The parts of a weight in panels, of one format each; TypeError for rows of a file."""
    return weight.parts if isinstance(weight, MixedWeight) else (packed(weight),)


def matrices_of(weight: KernelWeight) -> tuple[KernelWeight, ...]:
    """The matrices of which a weight consists, each a weight that `matmul` takes."""
    if isinstance(weight, StoredWeight):
        return tuple(StoredWeight((part,)) for part in weight.parts)
    return packed_parts(weight)


def stored(weight: KernelWeight) -> StoredWeight:
    """The weight as rows of a file; TypeError for panels and tiles."""
    if not isinstance(weight, StoredWeight):
        raise TypeError(f"kernels: {weight.format} weights are packed; these kernels take rows of a file")
    return weight


@dataclass(frozen=True, eq=False)
class NormWeights:
    """A norm's weights: `kind` is "RMS" or "LAYER"; weight [E] and, for LAYER, bias [E]."""

    kind: NormKind
    weight: Tensor
    eps: float
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class QKV:
    """The weight [(H + 2K) D, E], rows of q, then k, then v; its bias, [T, (H + 2K) D] where each row has its own, or
    None; the q/k norms [D] of Qwen3 or None.

    `parts` are 3, 2 where the rows of k are also those of v, which is then neither rotated nor normed by k_norm, or 1 for q alone. With
    `value_norm` each head of v is normed by RMS, without a weight (Gemma 4).
    """

    weight: Weight
    bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qk_eps: float = 1e-6
    parts: int = 3
    value_norm: bool = False


@dataclass(frozen=True, eq=False)
class AdapterStack:
    """The low-rank matrices of all N adapters for one product of P projections, each of at most R ranks.

    a [N, P, R, I] float32, zeros from an adapter's rank on; b [N, R, O] float32, with the adapter's scale in it; ranks [N] int32, 0 for an
    adapter that leaves the product as it is; `starts`: the first output of each projection. With a `unit` above 0 a's sums are added as
    those of a product over slices of x that are cut by as many columns (quant/slices.py): so ranks may divide them, of which this one
    has the columns of `share`.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    starts: tuple[int, ...]
    unit: int = 0
    share: ColumnShare | None = None


@dataclass(frozen=True)
class DeltaShape:
    """Heads of the gated delta rule: `key_heads` of `key_dim` features, `value_heads` of `value_dim`; `taps` of the convolution.

    tiled  value head h has the key head h % key_heads, instead of h key_heads / value_heads
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool = False

    @property
    def keys(self) -> int:
        """Features of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Features of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What the convolution reads of a row: q, k and v."""
        return 2 * self.keys + self.values

    @property
    def width(self) -> int:
        """What a row's projections give: q, k, v, z, and of each value head b and a."""
        return self.channels + self.values + 2 * self.value_heads

    def key_head(self, head: int) -> int:
        """The key head that a value head reads."""
        return head % self.key_heads if self.tiled else head * self.key_heads // self.value_heads

    @property
    def state(self) -> int:
        """Numbers of a sequence's state: the last taps - 1 rows of q, k and v, then S of each value head, `lanes` columns at a time."""
        return (self.taps - 1) * self.channels + self.value_heads * self.key_dim * self.value_dim

    def slot(self, drafts: int) -> int:
        """Numbers of a slot that keeps up to `drafts` drafts: the state, with their q, k and v after its last rows, then b and a of each,
        and how many tokens the state is of. A multiple of 16.
        """
        numbers = self.state + drafts * (self.channels + 2 * self.value_heads) + 1
        return -(-numbers // 16) * 16 if drafts else self.state

    @property
    def lanes(self) -> int:
        """Columns of S that lie side by side: those that kernels compute together."""
        return self.lanes_of(self.value_dim)

    @staticmethod
    def lanes_of(value_dim: int) -> int:
        return value_dim if value_dim % 16 else 16


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """Of a layer with the gated delta rule, float32: taps [taps channels], the last for the row itself; decay [VH], below 0; shift [VH],
    which is added to a; norm [DV] with its eps.
    """

    shape: DeltaShape
    taps: Tensor
    decay: Tensor
    shift: Tensor
    norm: Tensor
    eps: float


RouterBias = Literal["", "logits", "choice"]


@dataclass(frozen=True)
class GateClamp:
    """A gated product of gpt-oss: min(gate, limit) * sigmoid(alpha min(gate, limit)) * (clip(up, -limit, limit) + 1)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class RoutingPolicy:
    """How a mixture chooses: of `experts` the `chosen` with the largest logits, with their shares of the softmax over all logits, or over
    the chosen ones if `renormalize`.

    sigmoid  scores are sigmoids of the logits instead of shares of the softmax
    bias     what the router's bias is added to: nothing, the logits, or the scores for the choice alone
    groups   of experts, of which the `kept_groups` are chosen from whose two largest scores, with their biases, add up to the most; with
             `group_scores` 1 those with the largest score
    scale    of the shares
    gated    whether the router has one more row: the logit of the gate of an expert that all rows share
    """

    experts: int
    chosen: int
    renormalize: bool
    sigmoid: bool = False
    bias: RouterBias = ""
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0
    gated: bool = False
    group_scores: int = 2

    @property
    def by_scores(self) -> bool:
        """Whether the largest logits are not, by definition, what is chosen."""
        return self.sigmoid or self.bias == "choice" or self.groups > 1


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts of each row: shares float32 [T, C] and their numbers `chosen` int32 [T, C], the largest share first.

    groups  pairs of row and expert by expert, as the backend's kernels read them (kernels/cpu/include/experts.h, cuda/list_experts.cu):
            order int32 and tasks int32; None if the reference has chosen
    gates   of the shared expert float32 [T, 1], None if it has none
    """

    shares: Tensor
    chosen: Tensor
    groups: tuple[Tensor, Tensor] | None = None
    gates: Tensor | None = None


@dataclass(frozen=True, eq=False)
class History:
    """Tokens of the last rounds, int32 [N, B] (-1 where a row had none), and the round that is written next, int32 [1]."""

    tokens: Tensor
    round: Tensor


@dataclass(frozen=True, eq=False)
class DrawInputs:
    """How a batch's tokens are drawn from its logits.

    lines        int32 [B, 12], each row's parameters as the kernel's file has them; if `sampled`, drawing advances their positions
    count        int32 [1], rows that count
    neutral_row  the row of `seen` and `bias` that changes nothing
    sampled, top_k, top_p, min_p  whether any row needs it
    seen         counts int32 [R, V], to which drawn tokens are added, and prompted uint8 [R, V]; None if no row has penalties
    bias         float32 [R, V], None if no row has a bias
    """

    lines: Tensor
    count: Tensor
    neutral_row: int
    sampled: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    seen: tuple[Tensor, Tensor] | None = None
    bias: Tensor | None = None

    @property
    def features(self) -> dict[str, bool]:
        """Switches of the kernel, by the names of its constants."""
        filters = {"SAMPLED": self.sampled, "TOP_K": self.top_k, "TOP_P": self.top_p, "MIN_P": self.min_p}
        return filters | {"PENALIZED": self.seen is not None, "BIASED": self.bias is not None}
