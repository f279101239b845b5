"""What a process takes: resident bytes after loading and after running, the peak, and Python's allocations in a step.

    python -m benchmarks.memory --shape tinyllama-1.1b [--model FILE] [--batch 8]

The measure is weights + KV pool: what stays above that is the interpreter, the libraries, and scratch. Resident size counts what is in
mapped files too, as far as it has been touched; `own` is without them. Measured in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

from benchmarks.harness import record, table
from benchmarks.latency import load_model, model_name
from benchmarks.shapes import SHAPES
from tinyvllm.engine.tools.stepping import Stepping
from tinyvllm.integers import round_up

_STEPS = 32
_PROMPT = 256  # tokens


def resident() -> dict[str, int]:
    """Bytes by the system's account: all, without mapped files (`own`), and the peak. Linux."""
    text = Path("/proc/self/status").read_text()
    values = {line.split(":")[0]: int(line.split()[1]) << 10 for line in text.splitlines() if line.endswith(" kB")}
    return {"resident": values["VmRSS"], "own": values["RssAnon"] + values["RssShmem"], "peak": values["VmHWM"]}


def allocations(stepping: Stepping) -> dict[str, float]:
    """What a step allocates. In Python: blocks and bytes that remain after it, and the peak during it.

    On the device: bytes that all the steps left, by tinygrad's own counter.
    """
    from tinygrad.helpers import GlobalCounters

    gc.collect()
    device = GlobalCounters.mem_used
    tracemalloc.start()
    stepping.steps(2)
    before, blocks = tracemalloc.get_traced_memory()[0], sys.getallocatedblocks()
    tracemalloc.reset_peak()
    stepping.steps(_STEPS)
    after, peak = tracemalloc.get_traced_memory()
    left = sys.getallocatedblocks() - blocks
    tracemalloc.stop()
    each = {"bytes_left_a_step": round((after - before) / _STEPS, 1), "blocks_left_a_step": round(left / _STEPS, 2)}
    return each | {"peak_bytes": peak - before, "device_bytes_left": GlobalCounters.mem_used - device}


def measure(options: argparse.Namespace) -> dict[str, object]:
    from benchmarks.compare.child import prompt

    begin = resident()
    # The first request decodes while the others' prompts are computed: in as many steps as tokens say, whatever the machine's speed.
    longest = round_up(_PROMPT + 2 * _STEPS + 8 + options.batch, 16)
    blocks = options.batch * longest // 16  # all of which the run fills: untouched ones would take no memory
    llm = load_model(options, max_model_len=longest, max_num_seqs=options.batch, num_blocks=blocks, max_step_ms=0)
    loaded = resident()
    stepping = Stepping(llm)
    stepping.begin([prompt(_PROMPT, b) for b in range(options.batch)])
    stepping.steps(_STEPS)
    ran = resident()
    figures = {"before": begin, "loaded": loaded, "ran": ran, "step": allocations(stepping)}
    return {"weights": weight_bytes(options, llm.engine), "kv_pool": pool_bytes(options, blocks), **figures}


def weight_bytes(options: argparse.Namespace, engine: Any) -> int:
    """What decoding streams, and the embedding table (of two bytes a number) where that is not among it."""
    config = SHAPES[options.shape]
    apart = not config["tie_word_embeddings"]
    return int(engine.model_bytes_per_token + apart * 2 * config["vocab_size"] * config["hidden_size"])


def pool_bytes(options: argparse.Namespace, blocks: int, block_size: int = 16) -> int:
    """Bytes of the KV pool in bfloat16: 2 K S D numbers a block and layer, and the engine's own scratch block."""
    config = SHAPES[options.shape]
    heads = config["num_key_value_heads"] * config["head_dim"]
    return int((blocks + 1) * 2 * config["num_hidden_layers"] * heads * block_size * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description="resident size after load and after running")
    parser.add_argument("--shape", choices=SHAPES, default="tiny160m")
    parser.add_argument("--model", help="a checkpoint of that shape; random weights otherwise")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), help="numbers of two bytes, as in the cache's account")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options)))
        return
    command = [sys.executable, "-m", "benchmarks.memory", "--child", *sys.argv[1:]]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    figures = json.loads(said.splitlines()[-1])
    due = figures["weights"] + figures["kv_pool"]
    rows = []
    for when in ("before", "loaded", "ran"):
        sizes = figures[when]
        rows.append([when, *(sizes[k] / 1e6 for k in ("resident", "own", "peak")), sizes["resident"] / due])
    name = model_name(options)
    print(f"{name}: weights {figures['weights'] / 1e6:.0f} MB, KV pool {figures['kv_pool'] / 1e6:.0f} MB, batch {options.batch}")
    print(table(["MB", "resident", "own", "peak", "resident / (weights + KV)"], rows))
    print(table(["a step", ""], [[k, v] for k, v in figures["step"].items()]))
    record("memory", {"model": name, "batch": options.batch, **figures, "ratio": round(figures["ran"]["resident"] / due, 3)})


if __name__ == "__main__":
    main()
