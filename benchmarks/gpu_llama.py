"""llama.cpp on the same GPU, in turn with us, on the same files of random weights: the part `llama` of gpu.py.

It needs llama-bench, built with CUDA, on the PATH, or --llama-bench PATH. Its decodes are those of llama-bench: 256 tokens after 128, with
no token looked at by the host, which favours it; prompts are of 512 tokens, in one batch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu_figures import attempt, emit, measured, start
from benchmarks.shapes import SHAPES, write_gguf

CONTEXT, STEPS, PROMPT, ROUNDS = 128, 256, 512, 5
FORMATS = {"bf16": "BF16", "q8_0": "Q8_0", "q4_k_m": "Q4_K_M"}


def rates_of(lines: str) -> dict[str, float]:
    """Tokens a second by llama-bench's JSON lines: "decode", "prompt". SystemExit where it ran without a GPU, which it does not say."""
    found: dict[str, float] = {}
    for line in map(json.loads, filter(lambda line: line.startswith("{"), lines.splitlines())):
        if not line.get("gpu_info"):
            raise SystemExit("gpu: llama-bench found no GPU: build it with CUDA, and let it find the libraries (LD_LIBRARY_PATH)")
        found["decode" if line["n_gen"] else "prompt"] = float(line["avg_ts"])
    return found


def _run(o: argparse.Namespace, path: Path, *words: str) -> dict[str, float]:
    command = [o.llama_bench, "-m", str(path), "-ngl", "99", "-r", str(ROUNDS), "-o", "jsonl", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=o.patience)
    if done.returncode:
        raise SystemExit(f"gpu: llama-bench ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    return rates_of(done.stdout)


def _theirs(o: argparse.Namespace, path: Path) -> dict[str, float]:
    decode = _run(o, path, "-p", "0", "-n", str(STEPS), "-d", str(CONTEXT))
    return decode | _run(o, path, "-p", str(PROMPT), "-n", "0", "-b", str(PROMPT), "-ub", str(PROMPT))


def _ours(o: argparse.Namespace, path: Path, name: str) -> dict[str, float]:
    """The same by us, recorded as the part `decode` records it."""
    from benchmarks import gpu
    from benchmarks.loading import load

    context, tokens = (20, 40) if o.tiny else (CONTEXT, PROMPT)
    limits: dict[str, Any] = {"max_model_len": context + 640, "max_num_seqs": 1, "num_blocks": 64 if o.tiny else 96}
    with load(path, device=o.machine.device, max_num_batched_tokens=max(PROMPT, tokens), **limits) as llm:
        gpu.decoding(o, llm, name, o.shape, 1, context)
        gpu.prefilling(o, llm, name, tokens)
    rates = {"decode": measured(o, f"decode {name}, 1 x {context}"), "prompt": measured(o, f"prefill {name}, {tokens}")}
    return {what: rate for what, rate in rates.items() if rate is not None}


def _compare(o: argparse.Namespace, weights: str) -> None:
    from benchmarks.gpu import TOY

    config = SHAPES[o.shape] | (TOY | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if o.tiny else {})
    name = f"{o.shape} {weights}"
    with TemporaryDirectory() as folder:
        path = write_gguf(config, Path(folder) / "model.gguf", FORMATS[weights])
        ours, theirs = _ours(o, path, f"{name} file"), _theirs(o, path) if o.llama_bench else {}
    for what, rate in theirs.items():
        emit(o, f"llama.cpp {what} {name}", rate, "tok/s", faster=round(ours[what] / rate, 3))
        print(f"  tinyvllm {ours[what]:.0f} tok/s: {ours[what] / rate:.2f} times as fast")


def llama(o: argparse.Namespace) -> None:
    """Llama-3.2-1B's shape in bf16, Q8_0 and Q4_K_M: decodes of one sequence, and prompts, by us and by llama.cpp."""
    start(o)
    if not o.llama_bench:
        print("llama.cpp is left out: no llama-bench on the PATH (--llama-bench names one); built with CUDA from its sources", flush=True)
    for weights in FORMATS:
        attempt(o, _compare, o, weights)
