"""Adapters that PEFT itself has written: log-probabilities and greedy tokens are those of PEFT's model. Needs PyTorch and peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")
transformers = pytest.importorskip("transformers", reason="transformers is installed by `make test-peers` only")
peft = pytest.importorskip("peft", reason="peft is installed by `make test-peers` only")

from tests.models.test_parity import GOLDEN, open_model  # noqa: E402
from tinyvllm import LoRARequest, SamplingParams  # noqa: E402

_EXPERTS: dict[str, Any] = {  # of which PEFT has no dropout
    "r": 3,
    "lora_alpha": 6,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama2": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "qwen2": {"r": 6, "lora_alpha": 3, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "phi3": {"r": 4, "lora_alpha": 8, "target_modules": r".*\.(qkv_proj|gate_up_proj|down_proj)"},
    "glm4": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "gate_up_proj"], "layers_to_transform": [1]},
    "gemma2": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2, "model.layers.0.mlp.up_proj": 16},
        "alpha_pattern": {"down_proj": 2},
    },
    "qwen3.5": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "qwen3next": {"r": 4, "lora_alpha": 8, "target_modules": r".*\.(in_proj_qkvz|in_proj_ba|out_proj|q_proj)"},
    "gemma4": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "deepseek2": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    "deepseek3": {"r": 4, "lora_alpha": 8, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    "qwen3moe": _EXPERTS,
    "gpt-oss": _EXPERTS,
    "mixtral": _EXPERTS | {"target_modules": None},
    "granitemoe": _EXPERTS | {"target_parameters": ["experts.down_proj"], "target_modules": []},
    "gemma4moe": {"r": 4, "lora_alpha": 8, "target_modules": r".*\.(self_attn\.[qkv]_proj|mlp\.(gate|down)_proj)"},
}
STEPS = 12
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, by PEFT


@pytest.mark.parametrize("name", SETTINGS)
def test_an_adapter_gives_what_peft_computes(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **{"lora_dropout": 0.1} | SETTINGS[name])).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if "lora_B" in key:
                tensor.copy_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(tmp_path)
    prompt = list(range(40, 61))
    with torch.no_grad():
        ids = torch.tensor([prompt])
        for _ in range(STEPS):
            logits = model(ids).logits.float()
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        logprobs = model(ids).logits.float().log_softmax(-1)[0].numpy()
    tokens = ids[0].tolist()
    llm = open_model(GOLDEN / name, enable_lora=True, lora_experts="target_parameters" in SETTINGS[name])
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, lora_request=LoRARequest("peft", lora_path=str(tmp_path)))
    assert list(output.outputs[0].token_ids) == tokens[len(prompt) :]
    steps = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    got = [step[token].logprob for step, token in zip(steps, tokens[1:], strict=True) if step is not None]
    np.testing.assert_allclose(got, [logprobs[i, token] for i, token in enumerate(tokens[1:])], rtol=0, atol=2e-3)
