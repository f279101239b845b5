"""Folders of heads that are damaged, or do not fit the model: one clear error each, before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tinyvllm import LLM
from tinyvllm.config.engine import DEFAULT_MODEL
from tinyvllm.errors import TinyvllmError

HEADS = DEFAULT_MODEL.parent / "heads"
CONFIG = json.loads((HEADS / "config.json").read_text())
HUGE_HEADER = (2**62).to_bytes(8, "little")


def refused(folder: Path, match: str) -> None:
    with pytest.raises(TinyvllmError, match=match) as caught:
        LLM(speculative_config={"method": "eagle3", "model": str(folder), "num_speculative_tokens": 2}).close()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "config, match",
    [
        ({**CONFIG, "rope_magic": 3}, "rope_magic"),
        ({**CONFIG, "hidden_size": 10**12}, "fc.weight.*expected"),
        ({**CONFIG, "num_attention_heads": "x"}, "num_attention_heads must be an integer"),
        ({**CONFIG, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [99, -1, 5]}}, "eagle_aux_hidden_state_layer_ids"),
        ({**CONFIG, "draft_vocab_size": 5}, "lm_head.weight.*expected"),
        ([1, 2], "must hold a JSON object"),
    ],
    ids=["unknown key", "hidden size", "type", "layers", "vocabulary", "list"],
)
def test_settings_that_do_not_fit(tmp_path: Path, config: object, match: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((HEADS / "model.safetensors").read_bytes())
    refused(tmp_path, match)


@pytest.mark.parametrize("damage, match", [(100_000, "truncated"), (0, "empty"), (None, "header")], ids=["cut", "empty", "header"])
def test_damaged_files(tmp_path: Path, damage: int | None, match: str) -> None:
    data = (HEADS / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(HUGE_HEADER + data[8:] if damage is None else data[:damage])
    refused(tmp_path, match)


def test_a_table_of_tokens_that_leaves_the_vocabulary(tmp_path: Path) -> None:
    """Its tokens are looked up in the embedding by the next guess."""
    data = bytearray((HEADS / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:start])["d2t"]["data_offsets"]
    data[start + begin : start + end] = np.full((end - begin) // 8, 10**6, np.int64).tobytes()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(data)
    refused(tmp_path, "d2t")
