"""What `tinyvllm plan` predicts, and what an engine then does: bytes, and tokens a second of decode and prompt.

    python -m benchmarks.prediction [MODEL] [--quantization Q] [--sequences N] [--rounds R]
    TINYVLLM_THREADS=1 python -m benchmarks.prediction --processor-seconds     # where other processes run, too

The rehearsal and the engine are in one process and take turns, so that what else the machine does affects both. The goals are 2% of the
bytes and 15% of the speeds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness import record, table
from tinyvllm import LLM
from tinyvllm.config.engine import EngineConfig, resolve
from tinyvllm.engine.frontend import plan_engine
from tinyvllm.engine.tools.plan import SPEED_TOKENS, on_device
from tinyvllm.engine.tools.rehearsal import Rehearsal
from tinyvllm.engine.tools.stepping import Stepping

TOKENS = 64  # of a sequence in a round
SPEED, BYTES = 0.15, 0.02


@dataclass
class Measured:
    """An engine with the model's weights, without its tokenizer, as the rehearsal is."""

    stepping: Stepping
    context: int
    clock: Callable[[], float]

    def decode(self, sequences: int) -> float:
        """Seconds of a step of decodes alone: with parts of prompts in it, it would be another step."""
        self.stepping.begin([_prompt(self.context - TOKENS // 2, number) for number in range(sequences)])
        self.stepping.steps(4)
        seconds = self._seconds(lambda: self.stepping.steps(TOKENS - 8)) / (TOKENS - 8)
        self.stepping.stop()
        return seconds

    def prefill(self, tokens: int) -> float:
        return self._seconds(lambda: self.stepping.prefill(_prompt(tokens, 0)))

    def _seconds(self, run: Callable[[], None]) -> float:
        start = self.clock()
        run()
        return self.clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="predicted and measured bytes and speeds")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quantization")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processor-seconds", action="store_true", help="of this process, instead of those on the clock")
    chosen = parser.parse_args()
    options = {"quantization": chosen.quantization, "max_num_seqs": chosen.sequences, "enable_prefix_caching": False}
    config = on_device(resolve(chosen.model, **options), None)[0]
    clock = time.process_time if chosen.processor_seconds else time.perf_counter
    weights = plan_engine(config, speed=False).sizes.memory.weights
    with LLM(chosen.model, skip_tokenizer_init=True, speculative_config="off", **options) as llm:
        context = min(SPEED_TOKENS, llm.max_model_len)
        with _rehearsal(config, chosen.sequences, context, clock) as rehearsal:
            turns = _in_turn(rehearsal, Measured(Stepping(llm), context, clock), chosen.sequences, context, chosen.rounds)
        loaded = llm.engine.runner.weight_bytes
    rows: list[list[object]] = [["weights", weights, loaded, f"{100 * (weights / loaded - 1):+.1f}%", abs(weights / loaded - 1) <= BYTES]]
    units = {"decode": 1, "decode_all": chosen.sequences, "prompt": context}
    predicted = {name: units[name] / median(one for one, _ in turns[name]) for name in units}
    measured = {name: units[name] / median(one for _, one in turns[name]) for name in units}
    for name in units:
        error = 1 / median(one / other for one, other in turns[name]) - 1
        rows.append([name, predicted[name], measured[name], f"{100 * error:+.1f}%", abs(error) <= SPEED])
    print(table(["", "predicted", "measured", "error", "within the goal"], rows))
    record(
        "prediction",
        {
            "model": Path(chosen.model).name if chosen.model else "bundled",
            "quantization": chosen.quantization,
            "clock": clock.__name__,
            "predicted": {"weights": weights, **predicted},
            "measured": {"weights": loaded, **measured},
        },
    )


def _rehearsal(config: EngineConfig, sequences: int, context: int, clock: Callable[[], float]) -> Rehearsal:
    """That of the plan."""
    from tinyvllm.runner.opened import open_model

    opened = open_model(config, config.device)
    return Rehearsal(config, opened, opened.outline().held, sequences, context, clock)


def _in_turn(rehearsal: Rehearsal, measured: Measured, sequences: int, context: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each figure, rehearsed and measured, round by round; the first round captures and does not count."""
    turns: dict[str, list[tuple[float, float]]] = {"decode": [], "decode_all": [], "prompt": []}
    for _ in range(rounds + 1):
        turns["decode"].append((rehearsal.decode(1), measured.decode(1)))
        turns["decode_all"].append((rehearsal.decode(sequences), measured.decode(sequences)))
        turns["prompt"].append((rehearsal.prefill(context), measured.prefill(context)))
    return {name: pairs[1:] for name, pairs in turns.items()}


def _prompt(tokens: int, sequence: int) -> list[int]:
    return [(7 * i + sequence) % 200 + 3 for i in range(tokens)]


if __name__ == "__main__":
    main()
