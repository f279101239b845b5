"""What `tinyvllm plan` predicts, and what an engine then does: bytes, and tokens a second of decode and prompt.

    python -m benchmarks.prediction [MODEL] [--quantization Q] [--sequences N]

On a quiet machine. The goals are 2% of the bytes and 15% of the speeds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

from benchmarks.harness import record, table
from tinyvllm import LLM, SamplingParams
from tinyvllm.config import resolve
from tinyvllm.engine.frontend import plan_engine
from tinyvllm.engine.tools.stepping import Stepping

_ROUNDS, _TOKENS = 5, 64
SPEED, BYTES = 0.15, 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description="predicted and measured bytes and speeds")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quantization")
    parser.add_argument("--sequences", type=int, default=8)
    chosen = parser.parse_args()
    options = {"quantization": chosen.quantization, "max_num_seqs": chosen.sequences, "enable_prefix_caching": False}
    plan = plan_engine(resolve(chosen.model, **options))
    if plan.speed is None:
        parser.error(f"no speed is predicted: {plan.unpredicted}")
    context = plan.speed.context
    with LLM(chosen.model, skip_tokenizer_init=True, speculative_config="off", **options) as llm:
        measured = {
            "weights": float(llm.engine.runner.weight_bytes),
            "decode": 1 / decode_seconds(llm, 1, context),
            "decode_all": chosen.sequences / decode_seconds(llm, chosen.sequences, context),
            "prompt": context / median(run_seconds(llm, 1, context - 1, 1) for _ in range(_ROUNDS)),
        }
    predicted = {"weights": float(plan.sizes.memory.weights), "decode": plan.speed.decode, "decode_all": plan.speed.decode_all,
                 "prompt": plan.speed.prompt}  # fmt: skip
    rows = []
    for name, value in measured.items():
        error = predicted[name] / value - 1
        rows.append([name, predicted[name], value, f"{100 * error:+.1f}%", abs(error) <= (BYTES if name == "weights" else SPEED)])
    print(table(["", "predicted", "measured", "error", "within the goal"], rows))
    record(
        "prediction",
        {
            "model": Path(chosen.model).name if chosen.model else "bundled",
            "quantization": chosen.quantization,
            "predicted": predicted,
            "measured": measured,
        },
    )


def decode_seconds(llm: LLM, sequences: int, context: int) -> float:
    """Of a step of decodes alone: with parts of prompts in it, it would be another step, and the scheduler would shorten these."""
    stepping, spans = Stepping(llm), []
    for _ in range(_ROUNDS):
        stepping.begin([_prompt(context - _TOKENS // 2, s) for s in range(sequences)])
        stepping.steps(4)
        start = time.perf_counter()
        stepping.steps(_TOKENS - 8)
        spans.append((time.perf_counter() - start) / (_TOKENS - 8))
    stepping.stop()
    return median(spans)


def run_seconds(llm: LLM, sequences: int, prompt: int, tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": _prompt(prompt, s)} for s in range(sequences)]
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start


def _prompt(tokens: int, sequence: int) -> list[int]:
    return [(7 * i + sequence) % 200 + 3 for i in range(tokens)]


if __name__ == "__main__":
    main()
