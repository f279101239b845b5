"""gpt-oss as it is published: experts in MXFP4, with the rows of gate and up alternating."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.models.test_parity import GOLDEN, TOLERANCE, open_model, read_golden
from tests.tiny.small_floats import experts_in_mxfp4
from tests.tiny.to_gguf import read_folder
from tinyvllm import LLM
from tinyvllm.errors import ModelError


def write(folder: Path, tensors: dict[str, np.ndarray], **changes: object) -> Path:
    shutil.copytree(GOLDEN / "gpt-oss", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def test_experts_in_mxfp4_are_those_of_their_floats(tmp_path: Path) -> None:
    packed, floats = experts_in_mxfp4(read_folder(GOLDEN / "gpt-oss"), np.random.default_rng(3))
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    prompt = read_golden("gpt-oss")[0]
    want = open_model(write(tmp_path / "floats", floats)).prompt_logits(prompt.ids)
    folder = write(tmp_path / "packed", packed, quantization_config=settings)
    np.testing.assert_allclose(open_model(folder).prompt_logits(prompt.ids), want, rtol=0, atol=TOLERANCE)
    kept = LLM(str(folder), max_model_len=64, max_num_seqs=2, skip_tokenizer_init=True)  # as packed: x is rounded to int8
    assert np.abs(kept.prompt_logits(prompt.ids) - want).mean() < 0.05


@pytest.mark.parametrize(("changes", "said"), [({"rope_parameters": None}, "rope_scaling"), ({"attention_sinks": 4}, "attention_sinks")])
def test_what_is_missing_or_not_understood_is_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        open_model(write(tmp_path / "model", read_folder(GOLDEN / "gpt-oss"), **changes))
