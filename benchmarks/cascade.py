"""What it saves to read a prompt that many sequences share once for all of them: attention alone, and a whole engine.

    python -m benchmarks.cascade --shapes tinyllama-1.1b,tiny160m --sequences 64 --prefix 2048
    python -m benchmarks.cascade --engine --shapes tiny160m

Three ways in turn, of one decode step after a prompt of `prefix` tokens with `own` tokens of each sequence: *apart*, every sequence has
a copy of the prompt's keys and values; *shared*, they lie in the same blocks, and each sequence reads them, from the processor's caches as
far as those reach; *cascade*, they are read once for all. The results have the same bits. Every layer has a cache of its own, so that a
call finds nothing in the processor's caches, as in a step. The roof is the slower of two: the bytes that must come from memory, once each,
and the operations.

`--engine` compares steps of two engines with prefix cache, one with `enable_cascade=False`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.compare.child import prompt
from benchmarks.harness import Spread, record, spread, table, take_turns
from benchmarks.kernels import ROUND_SECONDS, Runner, Work, empty, floats, ints, plain
from benchmarks.loading import load
from benchmarks.roof import operations, read_once, read_size, threads_of_machine
from benchmarks.shapes import SHAPES, write_config
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.registry import usable_variants
from tinyvllm.engine.tools.stepping import Stepping
from tinyvllm.placement import Placement

S = 16
WAYS = ("apart", "shared", "cascade")
_STEPS = 4  # a round of the engine


def tables_of(way: str, B: int, prefix: int, own: int) -> tuple[np.ndarray, int]:
    """Block tables [B, M] int32 in no order of memory, and how many blocks they use. `prefix` is a multiple of S."""
    common, single = prefix // S, -(-own // S)
    if way == "apart":
        blocks = B * (common + single)
        return np.random.default_rng(0).permutation(blocks).astype(np.int32).reshape(B, -1), blocks
    blocks = common + B * single
    ids = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    return np.concatenate([np.tile(ids[:common], (B, 1)), ids[common:].reshape(B, single)], axis=1), blocks


def work_of(way: str, config: dict[str, Any], B: int, prefix: int, own: int, target: str) -> Work:
    """One layer's `attention_decode` in bfloat16; its bytes are those that the sequences or groups read."""
    H, K, D = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    tables, blocks = tables_of(way, B, prefix, own)
    M, context = tables.shape[1], prefix + own
    sizes = (("H", H), ("K", K), ("D", D), ("S", S), ("M", M), ("WINDOW", 0), ("CASCADE", int(way == "cascade")))
    defines = (*sizes, ("CACHE_TYPE", "BF16"), ("SCALE", f"{D**-0.5}f"))
    kernel = Kernel("attention_decode", "cpu", target, defines, 2, 5 + (way == "cascade"))
    partial = empty(B * H * -(-M * S // 256) * (D + 2))
    arguments = [empty(B, H, D), partial, floats(B, H, D), ints(), ints(*tables.reshape(-1).tolist()), ints(*[context] * B), ints(B)]
    arguments += [ints(0, *[prefix] * (B - 1))] if way == "cascade" else []
    token = 2 * K * D * 2
    read = token * (prefix + B * own if way == "cascade" else B * context)
    return Work(kernel, arguments, 3, lambda: plain(blocks * S * token), read, 4 * B * context * H * D, "f32_flops")


def attention(shape: str, options: argparse.Namespace) -> list[list[object]]:
    config, B, num_threads = SHAPES[shape], options.sequences, options.threads
    L = config["num_hidden_layers"]
    works = {way: work_of(way, config, B, options.prefix, options.own, options.target) for way in WAYS}
    runners = {way: Runner(work, num_threads) for way, work in works.items()}
    ways: dict[str, Callable[[], float | None]] = {}
    times = {}
    for way, runner in runners.items():
        once = take_turns({"": partial(runner.run, len(runner.sets))}, 2, patience=1)[""][1].seconds / len(runner.sets)
        times[way] = max(len(runner.sets), round(ROUND_SECONDS / once))
        ways[way] = partial(runner.run, times[way])
    turns = take_turns(ways | {"read": lambda: read_once(num_threads)}, options.rounds)
    bandwidth, most = read_size(num_threads) / spread(turns["read"]).median, operations("f32_flops", num_threads)
    timed = {way: spread(turns[way]).divided(times[way]) for way in WAYS}
    rows: list[list[object]] = []
    figures: dict[str, dict[str, object]] = {}
    for way, work in works.items():
        took, of_bytes = timed[way].median, works["apart" if way == "apart" else "cascade"].bytes / bandwidth
        of_operations = work.flops / most if most else 0.0
        of_roof = max(of_bytes, of_operations) / took
        faster = timed["apart"].median / took
        rows.append([f"{shape}, {way}", 1e-6 * L * work.bytes, 1e3 * took, 1e3 * timed[way].low, 1e3 * timed[way].high, 1e3 * L * took,
                     1e3 * of_bytes, 1e3 * of_operations, f"{of_roof:.0%}", faster, f"{timed[way].quiet}/{timed[way].rounds}"])  # fmt: skip
        figures[way] = {"step_MB": round(1e-6 * L * work.bytes, 1), "layer_ms": round(1e3 * took, 3), "of_roof": round(of_roof, 3),
                        "low_ms": round(1e3 * timed[way].low, 3), "high_ms": round(1e3 * timed[way].high, 3), "faster": round(faster, 2),
                        "quiet": timed[way].quiet, "rounds": timed[way].rounds, "others": timed[way].others}  # fmt: skip
    record("cascade", {
        "shape": shape, "sequences": B, "prefix": options.prefix, "own": options.own, "threads": num_threads, "ways": figures,
        "read_GBps": round(bandwidth / 1e9, 1), "roof_Gops": most and round(most / 1e9),
    }, timed.values())  # fmt: skip
    return rows


def engine(shape: str, options: argparse.Namespace) -> list[list[object]]:
    """Steps of all sequences, with and without cascade, each after the same prompt and a tail of its own."""
    B, longest = options.sequences, options.prefix + options.own + 3 * options.rounds * _STEPS + 16
    blocks = options.prefix // S + (B + 1) * (-(-(longest - options.prefix) // S) + 1)
    steppings: dict[str, Stepping] = {}
    with TemporaryDirectory() as folder:
        path = write_config(SHAPES[shape], Path(folder))
        for way in WAYS[1:]:
            llm = load(path, dummy=True, dtype="bfloat16", max_model_len=longest, max_num_seqs=B, num_blocks=blocks,
                       enable_prefix_caching=True, enable_cascade=way == "cascade")  # fmt: skip
            steppings[way] = Stepping(llm)
    common = prompt(options.prefix)
    for stepping in steppings.values():
        stepping.prefill(common + prompt(1))  # the others find it
        stepping.begin([common + prompt(options.own, b) for b in range(B)])
        stepping.steps(2)
    turns = take_turns({way: lambda s=s: s.steps(_STEPS) for way, s in steppings.items()} | {"read": read_once}, options.rounds, patience=2)
    timed: dict[str, Spread] = {way: spread(turns[way]).divided(_STEPS) for way in steppings}
    weights, bandwidth = llm.engine.model_bytes_per_token, spread(turns["read"]).rate(read_size())
    faster = timed["shared"].median / timed["cascade"].median
    figures = {way: timed[way].figures(B) for way in timed}
    record("cascade", {
        "shape": shape, "sequences": B, "prefix": options.prefix, "own": options.own, "engine_tok_s": figures, "faster": round(faster, 3),
        "read_GBps": round(bandwidth / 1e9, 1), "weight_bytes": weights,
    }, timed.values())  # fmt: skip
    return [[f"{shape}, {way}", B / s.median, B / s.high, B / s.low, 1e3 * s.median, timed["shared"].median / s.median,
             f"{s.quiet}/{s.rounds}"] for way, s in timed.items()]  # fmt: skip


def main() -> None:
    best = usable_variants(Placement("CPU"))[0]
    parser = argparse.ArgumentParser(description="decodes that share a prompt")
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=["tinyllama-1.1b", "tiny160m"])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=2048, help="tokens in common, a multiple of 16")
    parser.add_argument("--own", type=int, default=64, help="tokens of each sequence after them")
    parser.add_argument("--engine", action="store_true", help="whole engines instead of attention alone")
    parser.add_argument("--target", default=best)
    parser.add_argument("--threads", type=int, default=threads_of_machine())
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if wrong := [name for name in options.shapes if name not in SHAPES]:
        parser.error(f"there is no shape {', '.join(wrong)}; there are {', '.join(SHAPES)}")
    if options.prefix % S or options.sequences < 2:
        parser.error(f"a prefix of a multiple of {S} tokens and two sequences or more, got {options.prefix} and {options.sequences}")
    read_once(options.threads)  # touches its memory
    header = ["attention", "MB a step", "ms a layer", "low", "high", "ms a step", "for bytes", "for operations", "of the roof", "x apart",
              "quiet"]  # fmt: skip
    if options.engine:
        header = ["engine", "tok/s", "low", "high", "ms a step", "x shared", "quiet"]
    rows = [row for shape in options.shapes for row in (engine if options.engine else attention)(shape, options)]
    print(f"{options.sequences} sequences, {options.own} tokens each after {options.prefix}; {options.target}, {options.threads} threads")
    print(table(header, rows))


if __name__ == "__main__":
    main()
