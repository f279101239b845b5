"""Parity with transformers, live: fresh random checkpoints of every family, written and evaluated by transformers as the test runs.

The seeds differ from those of tests/tiny/golden, and every position of every prompt is compared. Needs PyTorch (`make test-peers`).
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")
transformers = pytest.importorskip("transformers", reason="transformers is installed by `make test-peers` only")

from tests.models.test_parity import GOLDEN, check  # noqa: E402
from tests.tiny.families import FAMILIES, STEPS  # noqa: E402
from tests.tiny.reference import make  # noqa: E402
from tests.tiny.to_gguf import write_gguf  # noqa: E402
from tinyvllm import LLM, SamplingParams  # noqa: E402

JOINED = ("mixtral", "qwen3next", "deepseek2", "deepseek3", "dots1", "gpt-oss")  # classes without "moe" in their names, with experts
FIRST_SEED = 700_000  # the golden checkpoints' seeds lie below 100 000 and a few
TOLERANCE = 2e-3
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_fresh_checkpoint(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    folder = tmp_path / name
    _, reference = make(family, folder, FIRST_SEED)
    paths = [folder]
    if family.gguf:
        paths.append(tmp_path / "model.gguf")
        write_gguf(folder, paths[1], family.gguf)
    for path, context in product(paths, sorted(set(family.contexts))):
        rows = [row for row, needed in enumerate(family.contexts) if needed == context]
        llm = LLM(str(path), dtype="float32", max_model_len=context, max_num_seqs=2, skip_tokenizer_init=True)
        for row in rows:
            logits = llm.prompt_logits(reference.prompts[row])
            np.testing.assert_allclose(logits, reference.logits[row], rtol=0, atol=TOLERANCE, err_msg=f"{path.name}, prompt {row}")
        outputs = llm.generate([{"prompt_token_ids": reference.prompts[row]} for row in rows], GREEDY)
        assert [list(output.outputs[0].token_ids) for output in outputs] == [reference.tokens[row] for row in rows], path.name


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "moe" in family.model_class.lower() or name in JOINED])
def test_experts_as_transformers_computes_with_them(name: str, tmp_path: Path) -> None:
    """Not in the published layout: experts of a layer in two tensors, and Mixtral's and Granite's modules under other names."""
    model = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, save_original_format=False)
    check(tmp_path, name)
