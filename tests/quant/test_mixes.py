"""Which format each matrix gets by a name of `--quantization`: llama.cpp's mixes, and what replaces a format where rows do not fit it."""

from collections import Counter

import pytest

from tinyvllm.quant.formats import FORMATS, QUANTIZATIONS
from tinyvllm.quant.mixes import MIXES, NAMES, UNWEIGHTED, Quantization, formats_of

PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def layers_with(name: str, part: str, layers: int = 32) -> dict[str, list[int]]:
    """Format -> the layers whose `part` has it."""
    rule, out = Quantization(name, layers, tied=False), {}
    for i in range(layers):
        out.setdefault(rule.format_of(f"blk.{i}.{part}.weight", 4096), []).append(i)
    return out


def test_more_bits_are_in_the_first_and_last_eighth_and_every_third_layer():
    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    for name, base in (("Q4_K_M", "Q4_K"), ("Q5_K_M", "Q5_K")):
        for part in ("attn_v", "ffn_down"):
            assert layers_with(name, part) == {"Q6_K": more, base: [i for i in range(32) if i not in more]}
        assert layers_with(name, "ffn_up") == {base: list(range(32))}


def test_small_mixes_raise_the_first_layers():
    assert layers_with("Q4_K_S", "attn_v") == {"Q5_K": [0, 1, 2, 3], "Q4_K": list(range(4, 32))}
    assert layers_with("Q4_K_S", "ffn_down") == {"Q5_K": [0, 1, 2, 3], "Q4_K": list(range(4, 32))}
    assert layers_with("Q3_K_M", "attn_v") == {"Q5_K": [0, 1], "Q4_K": list(range(2, 32))}
    assert layers_with("Q3_K_M", "ffn_down") == {"Q5_K": [0, 1], "Q4_K": list(range(2, 32))}
    assert layers_with("Q3_K_M", "attn_output") == {"Q4_K": list(range(32))}
    assert layers_with("Q3_K_L", "ffn_down") == {"Q5_K": list(range(32))}
    assert all(layers_with(name, part) == {name[:4]: list(range(32))} for name in ("Q3_K_S", "Q5_K_S") for part in PARTS)


def test_a_model_of_80_layers_has_no_attn_v_below_five_bits():
    assert layers_with("Q4_K_S", "attn_v", 80) == {"Q5_K": list(range(80))}
    assert set(layers_with("Q4_K_M", "attn_v", 80)) == {"Q6_K", "Q5_K"}


def test_the_head_has_six_bits_and_is_the_table_where_they_are_tied():
    for name in MIXES:
        apart, tied = Quantization(name, 32, tied=False), Quantization(name, 32, tied=True)
        assert apart.format_of("output.weight", 4096) == tied.format_of("token_embd.weight", 4096) == "Q6_K"
        assert apart.format_of("token_embd.weight", 4096) == MIXES[name].base
        assert apart.format_of("output.weight", 4096 + 32) == "Q8_0"
    assert all(Quantization(name, 2, tied=True).format_of("token_embd.weight", 4096) == name for name in QUANTIZATIONS)


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_fit_no_block_of_256_get_a_format_of_32(name):
    rule = Quantization(name, 24, tied=False)
    for part in PARTS:
        for i in range(24):
            wide, narrow = (rule.format_of(f"blk.{i}.{part}.weight", width) for width in (1024, 1056))
            assert wide in formats_of(name) and FORMATS[narrow].elements == 32
            more = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
            assert narrow == more.get(wide, wide)


def test_every_name_is_known_and_only_formats_without_a_search_ignore_importance():
    assert Counter(NAMES).most_common(1)[0][1] == 1
    assert all(set(formats_of(name)) <= set(QUANTIZATIONS) for name in NAMES)
    assert set(QUANTIZATIONS) > UNWEIGHTED
