"""Where the GPU cannot run a kernel, its variant is replaced in the op that launched it: each method is under its op's name."""

from __future__ import annotations

from inspect import getclosurevars

import pytest

from tinyvllm.backends.metal.call import MetalBackend

SAME = ("embed", "norm_qkv_rope_store", "attention_decode", "attention_prefill", "matmul", "lora_bias", "norm_head", "advance", "sample")
OPS = {**{stem: stem for stem in SAME}, "append_kv": "kv_append", "gate_up_silu": "norm_gate_up_silu", "copy_blocks": "kv_copy"}


@pytest.mark.parametrize("method", OPS)
def test_a_method_is_under_the_name_of_its_op(method: str) -> None:
    """A method put between a decorator and the one below took its name: an unusable kernel of that op ended the step."""
    assert getclosurevars(getattr(MetalBackend, method)).nonlocals["stem"] == OPS[method]
