"""A process whose memory is nearly used up, for test_out_of_memory.py: requests that need more fail, and the others are answered.

`python memory_attack.py ATTACK ROUNDS MIB SPEC`: SPEC is a folder with a description of a model; MIB is what the process may allocate in
addition once it has answered. Prints one JSON object.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

from tinyvllm import LLM, SamplingParams
from tinyvllm.engine.engine import Engine
from tinyvllm.errors import OutOfMemoryError
from tinyvllm.request import RequestOutput

SMALL = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
BIG: dict[str, tuple[list[int], SamplingParams]] = {
    # sixty rows of logits over the vocabulary, and the scratch of a draw from them
    "wide": ([1, 2, 3], SamplingParams(temperature=1.0, seed=1, n=60, max_tokens=4, ignore_eos=True, top_k=50)),
    # a table of counts for every sequence that could run
    "table": ([1, 2, 3], SamplingParams(temperature=0.0, repetition_penalty=1.1, max_tokens=4, ignore_eos=True)),
    # a chunk whose scores are laid out for the longest context
    "long": ([5] * 2000, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)),
}


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def steps(engine: Engine, wanted: set[str]) -> dict[str, RequestOutput]:
    """Steps until all of these requests have ended; their last outputs."""
    ended: dict[str, RequestOutput] = {}
    for _ in range(2000):
        ended |= {output.request_id: output for output in engine.step() if output.finished}
        if wanted <= ended.keys():
            return ended
    raise AssertionError(f"hung: {wanted - ended.keys()}")


def small(engine: Engine, name: str) -> None:
    for i in range(2):
        engine.add(f"{name}-{i}", [7 + i, 8, 9], SMALL)


def tokens_of(ended: dict[str, RequestOutput], name: str) -> list[list[int]]:
    return [ended[f"{name}-{i}"].outputs[0].token_ids for i in range(2)]


def attack(engine: Engine, kind: str, rounds: int, mebibytes: int) -> dict[str, Any]:
    for _ in range(4):  # captures and compilations take memory too, the latter only with an empty cache: they come first
        small(engine, "warm")
        expected = tokens_of(steps(engine, {"warm-0", "warm-1"}), "warm")
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + (mebibytes << 20), resource.RLIM_INFINITY))
    prompt, params = BIG[kind]
    failures: list[str] = []
    for n in range(rounds):
        small(engine, f"small{n}")
        engine.step()
        engine.add(f"big{n}", prompt, params)
        ended = steps(engine, {f"small{n}-0", f"small{n}-1", f"big{n}"})
        assert tokens_of(ended, f"small{n}") == expected, f"round {n}: {tokens_of(ended, f'small{n}')} instead of {expected}"
        failure = ended[f"big{n}"].failure
        assert failure is None or isinstance(failure, OutOfMemoryError), f"round {n}: {failure!r}"
        failures += [] if failure is None else [str(failure)]
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    engine.add("free", prompt, params)
    again = steps(engine, {"free"})["free"]
    assert again.failure is None and len(again.outputs) == (params.n or 1), again.failure
    pool = engine.scheduler.pool
    return {"failures": failures, "blocks": pool.num_blocks - pool.num_free, "requests": len(engine.requests)}


def main(kind: str, rounds: str, mebibytes: str, folder: str) -> None:
    options: dict[str, Any] = dict(device="CPU", load_format="dummy", dtype="float32", skip_tokenizer_init=True, max_num_seqs=64)
    with LLM(folder, num_blocks=1100, max_model_len=16384, max_num_batched_tokens=2048, enable_prefix_caching=False, **options) as llm:
        print(json.dumps(attack(llm.engine, kind, int(rounds), int(mebibytes))))


if __name__ == "__main__":
    main(*sys.argv[1:])
