"""How the weights of a model are held: the format of each matrix, the layout, and about how many bytes that takes."""

from __future__ import annotations

from math import prod

from tinygrad.dtype import DType

from tinyvllm.backends.registry import backend_for
from tinyvllm.errors import ModelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import WeightRecipe
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import FLOATS, FORMATS, Layout, packed_in, tolerance_of
from tinyvllm.quant.mixes import Quantization
from tinyvllm.weights.checkpoint import Checkpoint
from tinyvllm.weights.convert import DTYPE_FORMATS
from tinyvllm.weights.imatrix import ImportanceMatrix


@dataclass(frozen=True)
class WeightPlan:
    """How to hold weights: `dtype` of what is not packed; `format` of every matrix, a float format or a name of `--quantization`.

    A `format` of None keeps the one that the file has. `imatrix` weighs the columns of matrices that are quantized.
    """

    placement: Placement
    dtype: DType
    format: str | None
    imatrix: ImportanceMatrix | None = None

    @property
    def layout(self) -> Layout:
        """The layout that the device's kernels read; panels for a device without kernels."""
        backend = backend_for(self.placement)
        return Layout.PANELS if backend is None else backend.layout

    def layout_of(self, recipe: WeightRecipe) -> Layout:
        """The layout of a matrix: that of the device, but rows for a router on GPUs with tiles, which have none of float32."""
        return Layout.ROWS if recipe.stem == "norm_route" and self.layout is Layout.TILES else self.layout

    @property
    def floats(self) -> str:
        """The format of `dtype`."""
        return DTYPE_FORMATS[self.dtype]

    def multiplies(self, recipe: WeightRecipe) -> bool:
        """Whether the device has kernels for the op of a matrix; a device without any has those of the reference."""
        backend = backend_for(self.placement)
        return backend is None or recipe.stem in backend.stems

    def wanted(self, recipes: list[WeightRecipe]) -> dict[str, str]:
        """The format of each matrix of a model by the recipe's name; none where the file's formats are kept.

        ModelError if the device has no kernels for one of them.
        """
        if self.format is None:
            return {}
        matrices = [recipe for recipe in recipes if len(recipe.shape) == 2 and recipe.format is None and self.multiplies(recipe)]
        if not self.quantized:
            return {recipe.name: self.format for recipe in matrices}
        layers = {recipe.name.split(".")[1] for recipe in recipes if recipe.name.startswith("blk.")}
        rule = Quantization(self.format, len(layers), all(recipe.name != "output.weight" for recipe in recipes))
        formats = {recipe.name: rule.format_of(recipe.name, recipe.shape[1]) for recipe in matrices}
        known = packed_in(self.layout)
        if lacking := [format for format in dict.fromkeys(formats.values()) if format not in known]:
            some = "" if lacking[0] == self.format else f" (some of {self.format})"
            raise ModelError(
                f"weights: {self.placement} has no kernels for {lacking[0]} matrices{some}, only for {', '.join(known)} and floats"
            )
        return formats

    def needed_bytes(self, recipes: list[WeightRecipe], checkpoint: Checkpoint | None) -> int:
        """About how much the weights of these recipes take: vectors in float32, matrices as `format` wants or as the file has them."""
        stored, packed = {} if checkpoint is None else checkpoint.tensors, packed_in(self.layout)
        wanted, total = self.wanted(recipes), 0
        for recipe in recipes:
            source = next((stored[name].format for name in recipe.sources if name in stored), self.floats)
            matrix = wanted.get(recipe.name) or (source if source in packed and self.multiplies(recipe) else self.floats)
            format = FORMATS["F32" if len(recipe.shape) == 1 else recipe.format or matrix]
            total += prod(recipe.shape) * format.nbytes // format.elements
        return total

    def matrix_formats(self, recipes: list[WeightRecipe], checkpoint: Checkpoint | None) -> set[str]:
        """The formats that matrices of these recipes will have."""
        if wanted := self.wanted(recipes):
            return set(wanted.values())
        stored, packed = {} if checkpoint is None else checkpoint.tensors, packed_in(self.layout)
        sources = {stored[name].format for recipe in recipes if len(recipe.shape) == 2 for name in recipe.sources if name in stored}
        return {source if source in packed else self.floats for source in sources | {self.floats}}

    @property
    def quantized(self) -> bool:
        """Whether every matrix must be packed."""
        return self.format is not None and self.format not in FLOATS

    @property
    def identity(self) -> str:
        """What packed matrices depend on, in addition to the checkpoint."""
        return " ".join([self.floats, str(self.format), *([] if self.imatrix is None else [self.imatrix.digest])])


def widest_tolerance(formats: set[str], layout: Layout) -> tuple[str, float]:
    """Of these formats (F32 if none) in this layout the one that `verify` gives the widest tolerance, and that."""
    tolerances = {name: tolerance_of(name, layout) for name in formats or {"F32"}}
    return max(tolerances.items(), key=lambda item: item[1])
