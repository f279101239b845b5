"""What loading did to matrices that a user did not ask for, one log line each: unpacked to floats, or quantized to another format."""

from __future__ import annotations

import logging
from dataclasses import field

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import WeightRecipe
from tinyvllm.quant.formats import FLOATS
from tinyvllm.quant.mixes import NAMES, formats_of

log = logging.getLogger("tinyvllm")
_NAMED = 2  # names of matrices in a line


@dataclass
class LoadNotes:
    """`wanted` is the plan's format. `unweighted` are the matrices that an importance matrix does not have."""

    wanted: str | None
    unweighted: list[str] = field(default_factory=list)
    _unpacked: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    _replaced: dict[str, list[str]] = field(default_factory=dict)

    def add(self, recipe: WeightRecipe, stored: str, format: str) -> None:
        """A matrix that the file has in `stored` is held in `format`."""
        if self.wanted is None and stored not in FLOATS and format in FLOATS:
            self._unpacked.setdefault((stored, format), []).append(recipe.name)
        if self.wanted in NAMES and len(recipe.shape) == 2 and format not in formats_of(self.wanted) and format not in FLOATS:
            self._replaced.setdefault(format, []).append(recipe.name)

    def log(self) -> None:
        for (stored, format), names in self._unpacked.items():
            text = "weights: %s stored as %s become %s: no kernel of this device reads them packed, or they are transposed"
            log.warning(text, _listed(names), stored, format)
        for format, names in self._replaced.items():
            text = "weights: %s become %s instead of %s: their width is no whole number of its blocks"
            log.warning(text, _listed(names), format, self.wanted)
        if self.unweighted:
            log.warning("weights: the imatrix does not have %s; all their columns weigh the same", _listed(self.unweighted))


def _listed(names: list[str]) -> str:
    """How many, and the first of them."""
    named = ", ".join(names[:_NAMED])
    return f"{len(names)} {'matrix' if len(names) == 1 else 'matrices'} ({named}{', ...' if len(names) > _NAMED else ''})"
