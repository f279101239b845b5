"""Memory that runs out refuses the request that needs it; the others are answered, and the engine continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs ulimit -v and /proc")
DESCRIPTION = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def attacked(tmp_path: Path, kind: str, rounds: int, mebibytes: int, vocabulary: int, **environment: str) -> dict:
    (tmp_path / "config.json").write_text(json.dumps(DESCRIPTION | {"vocab_size": vocabulary}))
    script = Path(__file__).with_name("memory_attack.py")
    command = [sys.executable, str(script), kind, str(rounds), str(mebibytes), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict, failures: int) -> None:
    assert len(found["failures"]) == failures and all("memory" in failure for failure in found["failures"])
    assert (found["blocks"], found["requests"]) == (0, 0)


def test_a_request_that_needs_a_table_is_refused_and_the_others_are_answered(tmp_path):
    check(attacked(tmp_path, "table", 20, 80, vocabulary=262_144), 20)


@pytest.mark.long
def test_a_chunk_whose_scores_do_not_fit_is_refused_and_the_others_are_answered(tmp_path):
    check(attacked(tmp_path, "long", 20, 160, vocabulary=1024, TINYVLLM_KERNELS="all=ref"), 20)


@pytest.mark.long
def test_continuations_that_do_not_fit_at_once_run_in_smaller_batches(tmp_path):
    """The recovery admits one sequence after the other: with fewer at a time there is room."""
    check(attacked(tmp_path, "wide", 20, 80, vocabulary=262_144), 0)
