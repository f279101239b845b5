"""Multi-token prediction of MiMo: the layer for drafts that a checkpoint has after the model's own, method "mtp".

MiMo-7B (Xiaomi 2025, arXiv:2505.07608), `model.mtp_layers.0.*`: x = input_proj(concat(hidden_layernorm(state), token_layernorm(embedding)))
with the residual stream after the model's last layer, before its final norm; then a decoder layer of the model's own kind; then
`final_layernorm` and the model's head. That is EAGLE-1 with norms, so tensors get EAGLE's names here. The layer was trained for one token
ahead; for more it reads its own state after `final_layernorm`, as vLLM does it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields
from tinyvllm.models.config import ModelConfig
from tinyvllm.speculate.eagle import EagleConfig
from tinyvllm.speculate.head_files import SPEAKER, HeadFile
from tinyvllm.weights.checkpoint import Checkpoint
from tinyvllm.weights.mapping import Record

_LAYER = re.compile(r"model\.mtp_layers\.(\d{1,4})\.(.+)")
_NAMES = {  # of modules of the layer in EAGLE's layout
    "input_proj": "fc", "final_layernorm": "norm", "hidden_layernorm": "layers.0.hidden_norm", "token_layernorm": "layers.0.token_norm",
}  # fmt: skip


def mtp_file(checkpoint: Checkpoint) -> HeadFile:
    """The layer of a model's checkpoint as heads. ModelError if it has none, or several."""
    tensors: dict[str, Record] = {}
    layers: set[str] = set()
    for name, record in checkpoint.tensors.items():
        if found := _LAYER.fullmatch(name):
            module, _, kind = found[2].rpartition(".")
            layers.add(found[1])
            tensors[f"{_NAMES.get(module, 'layers.0.' + module)}.{kind}"] = record
    if len(layers) != 1:
        raise ModelError(
            f"{SPEAKER}: method mtp needs one layer model.mtp_layers.0.* in the model's checkpoint, {checkpoint.path} has {len(layers)}; "
            "of the supported families MiMo, Qwen3-Next, 3.5 and 3.6 have one"
        )
    return HeadFile(replace(checkpoint, tensors=tensors), Fields(checkpoint.config))


def read_mtp(file: HeadFile, model: ModelConfig) -> EagleConfig:
    """The configuration of the layer, which is that of the model's last one."""
    layer = replace(model, num_blocks=1, windows=model.windows[-1:] or (0,), tied=False)
    return EagleConfig(layer, draft_vocab_size=model.vocab_size, norm_output=True, mtp_layers=model.num_blocks)
