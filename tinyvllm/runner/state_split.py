"""Which heads of layers with recurrent states a rank has: some value heads, and the key heads that these read."""

from __future__ import annotations

from dataclasses import replace

from tinyvllm.errors import ModelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.ops.delta import DeltaShape
from tinyvllm.runner.row_part import RowPart, runs

_OF_HEADS = frozenset(("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"))  # a number of each value head


@dataclass(frozen=True)
class StateSplit:
    """The part of a rank of layers whose heads are `whole`: neighbouring value heads, since the columns of the output are in their order.
    `keys` are the numbers of the rank's key heads, in its order; ranks whose value heads read the same one have that one each.
    """

    whole: DeltaShape
    heads: slice
    keys: tuple[int, ...]

    @classmethod
    def of(cls, whole: DeltaShape, rank: int, world: int) -> StateSplit:
        """ModelError where ranks cannot have as many value heads each."""
        if whole.value_heads % world:
            raise ModelError(
                f"tensor_parallel_size={world}: {whole.value_heads} value heads of layers with recurrent states cannot be divided; "
                "use fewer"
            )
        count = whole.value_heads // world
        heads = range(rank * count, (rank + 1) * count)
        return cls(whole, slice(heads.start, heads.stop), _key_heads(whole, heads))

    @property
    def local(self) -> DeltaShape:
        return replace(self.whole, key_heads=len(self.keys), value_heads=self.heads.stop - self.heads.start)

    def rows(self, part: str) -> RowPart | None:
        """The rows of a matrix, or the numbers of a vector, of this part of a layer; None for one that is no layer's with a state."""
        s = self.whole
        if part in _OF_HEADS:
            return RowPart.of_heads(self.heads, 1)
        if part == "attn_gate":
            return RowPart.of_heads(self.heads, s.value_dim)
        if part not in ("attn_qkv", "ssm_conv1d"):
            return None
        values = runs(range(self.heads.start, self.heads.stop), s.value_dim, 2 * s.keys)
        first, *more = (*runs(self.keys, s.key_dim), *runs(self.keys, s.key_dim, s.keys), *values)
        return RowPart(first, s.taps if part == "ssm_conv1d" else 1, tuple(more))


def _key_heads(whole: DeltaShape, heads: range) -> tuple[int, ...]:
    """The fewest key heads of which the value heads `heads` read each its own, if they are numbered as those of a model."""
    wanted = [whole.key_head(head) for head in heads]
    for count in (count for count in range(1, len(heads) + 1) if len(heads) % count == 0):
        local = replace(whole, key_heads=count, value_heads=len(heads))
        found = dict(sorted({(local.key_head(head), key) for head, key in enumerate(wanted)}))
        if all(found[local.key_head(head)] == key for head, key in enumerate(wanted)):
            return tuple(found[key] for key in range(count))
    raise AssertionError("a key head for each value head always does")
