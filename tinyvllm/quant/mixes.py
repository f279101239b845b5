"""What `--quantization` may name: one format for every matrix, or one of llama.cpp's mixes, which give some matrices more bits.

A mix has the name, the base format and the rules of llama.cpp's file type (src/llama-quant.cpp): the head is Q6_K, and attn_v, attn_output
and ffn_down of some layers have more bits, because errors there cost most. A format's own name is what llama-quantize calls pure. This
file does without numpy, because configuration and the command line read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.formats import FORMATS, QUANTIZATIONS

_Layers = Callable[[int, int], bool]  # (layer, number of layers)
_Rules = tuple[tuple[_Layers, str], ...]  # the first that holds decides
_HEAD, _WIDE_HEAD = "Q6_K", "Q8_0"
# What llama.cpp takes for rows that are no whole number of blocks of 256.
_NARROW = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
_SHARED_V_LAYERS = 80  # a 70B model: eight heads share attn_v, so that more bits cost nothing


def _every(layer: int, layers: int) -> bool:
    return True


def _more_bits(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers, and every third one between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _first(count: int) -> _Layers:
    return lambda layer, layers: layer < count


def _first_share(divisor: int) -> _Layers:
    return lambda layer, layers: layer < layers // divisor


@dataclass(frozen=True)
class Mix:
    """The format of most matrices, and rules for the parts of a layer that differ."""

    base: str
    rules: dict[str, _Rules] = field(default_factory=dict)


MIXES: dict[str, Mix] = {
    "Q3_K_S": Mix("Q3_K"),
    "Q3_K_M": Mix(
        "Q3_K",
        {
            "attn_v": ((_first(2), "Q5_K"), (_every, "Q4_K")),
            "attn_output": ((_every, "Q4_K"),),
            "ffn_down": ((_first_share(16), "Q5_K"), (_every, "Q4_K")),
        },
    ),
    "Q3_K_L": Mix("Q3_K", {name: ((_every, "Q5_K"),) for name in ("attn_v", "attn_output", "ffn_down")}),
    "Q4_K_S": Mix("Q4_K", {"attn_v": ((_first(4), "Q5_K"),), "ffn_down": ((_first_share(8), "Q5_K"),)}),
    "Q4_K_M": Mix("Q4_K", {name: ((_more_bits, "Q6_K"),) for name in ("attn_v", "ffn_down")}),
    "Q5_K_S": Mix("Q5_K"),
    "Q5_K_M": Mix("Q5_K", {name: ((_more_bits, "Q6_K"),) for name in ("attn_v", "ffn_down")}),
}
NAMES = (*QUANTIZATIONS, *MIXES)
# Formats whose rounding has no search, so that the importance of a column changes nothing.
UNWEIGHTED = frozenset({"Q8_0", "MXFP4"})


@dataclass(frozen=True)
class Quantization:
    """A name of NAMES applied to a model of `layers` layers; `tied` says that the embedding table is the head."""

    name: str
    layers: int
    tied: bool

    def wanted(self, name: str, width: int) -> str:
        """The format for the matrix of this GGUF name with rows of `width` numbers, whatever its width allows but for the head."""
        mix = MIXES.get(self.name)
        if mix is None:
            return self.name
        if name == ("token_embd.weight" if self.tied else "output.weight"):
            return _WIDE_HEAD if width % FORMATS[mix.base].elements else _HEAD
        _, number, part, *_ = (*name.split("."), "", "", "")
        rules = mix.rules.get(part.removesuffix("_exps").removesuffix("_shexp"), ()) if name.startswith("blk.") else ()
        chosen = next((format for holds, format in rules if holds(int(number), self.layers)), mix.base)
        return "Q5_K" if part == "attn_v" and self.layers == _SHARED_V_LAYERS and chosen in ("Q3_K", "Q4_K") else chosen

    def format_of(self, name: str, width: int) -> str:
        """`wanted`, or the format of 32 that llama.cpp takes where rows are no whole number of its blocks."""
        wanted = self.wanted(name, width)
        return _NARROW.get(wanted, wanted) if width % FORMATS[wanted].elements else wanted


def formats_of(name: str) -> tuple[str, ...]:
    """All formats that a name of NAMES may give to matrices whose width it fits."""
    mix = MIXES.get(name)
    if mix is None:
        return (name,)
    return tuple(dict.fromkeys([mix.base, _HEAD, *(format for rules in mix.rules.values() for _, format in rules)]))
