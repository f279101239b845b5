"""What an NVIDIA GPU gets out of this engine: one part a command, each prints its figures and adds them to a run. gpu.sh runs them all.
What is not of NVIDIA alone serves mac.py as well, which says so by a Machine.

    python -m benchmarks.gpu roofs --run FILE
    python -m benchmarks.gpu decode --shape llama-3.2-1b --weights q8_0 --run FILE
    python -m benchmarks.gpu table --run FILE

Each figure is a line of the run's file and, with what the GPU and its driver are, of results/gpu.jsonl. Shares are of the bandwidth or of
the operations a second that the part `roofs` measured in the same run; without it they are left out. --tiny takes toy shapes, for trying
the parts themselves; its figures mean nothing and are not recorded. --dry is --tiny on an emulated GPU that launches nothing
(tests/emulator/dry.py): it needs neither a GPU nor a C compiler, and compiles everything.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.compare.child import prompt
from benchmarks.gpu_checks import checks, compile_kernels, environment, selftest
from benchmarks.gpu_figures import (
    ROOT,
    Machine,
    attempt,
    bandwidth_of,
    computing,
    effort,
    emit,
    gpu,
    lines_of,
    measured,
    peer,
    start,
)  # fmt: skip
from benchmarks.harness import table
from benchmarks.loading import load
from benchmarks.shapes import SHAPES, tensors, write_config, write_gguf
from tinyvllm.engine.tools.stepping import Stepping
from tinyvllm.quant.formats import Layout, formats_in
from tinyvllm.quant.kv import KV_FORMATS

WARM_STEPS = 16
WIDTH = {"bf16": None, "q8_0": "q8_0", "q4_0": "q4_0"}  # what --weights names, as the engine's option quantization
FILES = {"q4_k_m": "Q4_K_M"}  # what else it names: files that are written for it, of several formats
TOY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
       "vocab_size": 1024, "head_dim": 32}  # fmt: skip


# --- roofs


def roofs(o: argparse.Namespace) -> None:
    """Bandwidth of copying and reading, by our kernels and by the driver; cuBLAS's bfloat16 products, if torch is there."""
    start(o)
    from benchmarks.gpu_ops import driver_copy_seconds, memory_seconds

    size = 1 << 16 if o.tiny else 2 << 30
    ways: dict[str, tuple[int, Callable[[int, Any], float]]] = {
        "copy, our kernel": (2 * size, partial(memory_seconds, "copy")),
        "read, our kernel": (size, partial(memory_seconds, "read")),
        "copy, the driver": (2 * size, driver_copy_seconds),
    }

    def bandwidth(name: str, moved: int, seconds: Callable[[int, Any], float]) -> None:
        emit(o, name, moved / seconds(size, effort(o)) / 1e9, "GB/s")

    for name, (moved, seconds) in ways.items():
        attempt(o, bandwidth, name, moved, seconds)
    if o.tiny:
        return
    found = peer(o, "cublas", "--sizes", "4096,8192")
    for edge in (4096, 8192):
        if f"tflops_{edge}" in found:
            emit(o, f"cuBLAS bf16, {edge}", found[f"tflops_{edge}"], "TFLOP/s", torch=found["torch"])


# --- kernels by themselves


def kernels(o: argparse.Namespace) -> None:
    """Paged attention of decodes and of a prompt, and large products, each with its roof. --only takes those whose name contains it."""
    start(o)
    from benchmarks.gpu_ops import attention_decode_op, attention_prefill_op, placing_seconds, product_op, seconds_of
    from tinyvllm.backends.registry import usable_variants
    from tinyvllm.placement import Placement
    from tinyvllm.quant.layouts import panel_bytes

    shapes = [(2, 40, 4, 2, 32)] if o.tiny else [(32, 4096, 32, 8, 128), (1, 32768, 32, 8, 128), (256, 600, 16, 8, 128)]

    def decoding(shape: tuple[int, int, int, int, int], cache: str) -> None:
        op = attention_decode_op(*shape, cache=cache)
        rate, bandwidth = op.bytes / seconds_of(op, effort(o)), bandwidth_of(o)
        emit(o, f"{op.name}, H={shape[2]} K={shape[3]} D={shape[4]}", rate / 1e9, "GB/s", "copy", bandwidth and bandwidth / 1e9)

    def prompting(T: int, H: int, K: int, D: int, cache: str, variant: str) -> None:
        op = attention_prefill_op(T, H, K, D, cache, variant)
        rate = op.flops / seconds_of(op, effort(o)) / 1e12
        emit(o, f"{op.name} causal, H={H} K={K} D={D}, {variant}", rate, "TFLOP/s", "cuBLAS 8192", measured(o, "cuBLAS bf16, 8192"))

    def product(edge: int, format: str, row: str) -> None:
        op = product_op("", edge, edge, edge, format, variant=row)
        rate = op.flops / seconds_of(op, effort(o)) / 1e12
        emit(o, f"matmul {format}, {edge}, {row}", rate, "TFLOP/s", f"cuBLAS {edge}", measured(o, f"cuBLAS bf16, {edge}"))

    def placing(format: str) -> None:
        O, I = (48, 256) if o.tiny else (28672, 4096)  # gate and up of 8B
        rate = panel_bytes(format, O, I) / placing_seconds(format, O, I)
        emit(o, f"pack_tiles {format}, upload and packing", rate / 1e9, "GB/s")

    for cache in ("BF16", *o.caches):
        for shape in shapes if o.only in "attention_decode" else ():
            attempt(o, decoding, shape, cache)
        variants = usable_variants(Placement("CUDA"), "attention_prefill")  # of packed caches all are the first
        for variant in variants[: None if cache == "BF16" else 1] if o.only in "attention_prefill" else ():
            attempt(o, prompting, *((40, 4, 2, 32) if o.tiny else (16384, 32, 8, 128)), cache, variant)
    rows_here = usable_variants(Placement("CUDA"), "matmul")
    quantized = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", *o.formats)  # Q4_K and Q6_K are those of a Q4_K_M file
    large = [(4096, "BF16"), (8192, "BF16"), *((4096, format) for format in quantized)]
    for edge, format in [(64, "BF16"), *((256, format) for format in quantized)] if o.tiny else large:
        for row in rows_here if format == "BF16" else rows_here[:1]:
            if o.only in f"matmul {format}, {edge}, {row}":
                attempt(o, product, edge, format, row)
    for format in ("BF16", *quantized):
        attempt(o, placing, format)


def ablation(o: argparse.Namespace) -> None:
    """Each kernel of a layer against tinygrad's own code for the op, at the shapes of Llama-3.2-1B, one sequence and 512 rows."""
    start(o)
    from benchmarks.gpu_ops import Op, attention_prefill_op, draw_seconds, layer_ops, seconds_of

    c = SHAPES[o.shape] | (TOY if o.tiny else {})
    H, K, D = (c[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def compare(op: Op, rows: int) -> None:
        both(f"{op.name}, {rows} rows", op.bytes, op.flops, partial(seconds_of, op), rows == 1)

    def both(name: str, nbytes: int, flops: int, seconds: Callable[..., float], streams: bool) -> None:
        fast = seconds(effort(o))
        bandwidth = bandwidth_of(o) if streams else None
        more = {"us": round(1e6 * fast, 2), "TFLOPs": round(flops / fast / 1e12, 2)}
        try:
            slow = seconds(effort(o), kernel=False)
            more |= {"tinygrad_us": round(1e6 * slow, 2), "faster": round(slow / fast, 2)}
            print(f"  tinygrad {1e6 * slow:.1f} us, kernel {1e6 * fast:.1f} us: {slow / fast:.1f} times faster")
        finally:
            emit(o, name, nbytes / fast / 1e9, "GB/s", o.machine.roof_name, bandwidth and bandwidth / 1e9, **more)

    many = 10 if o.tiny else 512
    for op in layer_ops(c, 1, 40 if o.tiny else 1024):
        attempt(o, compare, op, 1)
    for op in layer_ops(c, many, 17):
        if not op.stem.startswith("attention") and op.stem not in ("embed", "norm_head"):
            attempt(o, compare, op, many)
    attempt(o, lambda: compare(attention_prefill_op(many, H, K, D), many))
    V = c["vocab_size"]
    for B in (1,) if o.tiny else (1, 64):
        attempt(o, both, f"sample, {B} rows", 4 * B * V, 0, partial(draw_seconds, V, B), False)


# --- the engine


def engine(o: argparse.Namespace, shape: str, weights: str = "bf16", **limits: Any) -> Any:
    """An LLM of a named shape with random weights. A kernel that its self-test has replaced counts as a failed measurement."""
    with TemporaryDirectory() as folder:
        if weights in FILES:  # the engine maps the file, and keeps what it has mapped when the folder is gone
            config = SHAPES[shape] | (TOY | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if o.tiny else {})
            llm = load(write_gguf(config, Path(folder) / "model.gguf", FILES[weights]), device=o.machine.device, **limits)
        else:
            config = SHAPES[shape] | (TOY if o.tiny else {})
            options = {"device": o.machine.device, "dtype": "bfloat16", "quantization": WIDTH[weights]}
            llm = load(write_config(config, Path(folder)), dummy=True, **options, **limits)
    replaced = llm.engine.runner.self_test.replaced
    for name, reason in replaced.items():
        print(f"FAILED: the self-test has replaced {name}: {reason}; the figures below are without it", flush=True)
    o.failed += len(replaced)
    return llm


def kv_bytes_per_token(shape: str, tiny: bool) -> int:
    """Bytes of one token's keys and values in all layers, in bfloat16."""
    c = SHAPES[shape] | (TOY if tiny else {})
    return 2 * 2 * int(c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"])


def flops_per_token(shape: str, tiny: bool) -> int:
    """Operations of the layers' products for one token of a prompt; attention's and the head's are left out."""
    config = SHAPES[shape] | (TOY if tiny else {})
    return sum(2 * math.prod(size) for name, _, size in tensors(config) if len(size) == 2 and ".layers." in name)


class LastGraph:
    """The graph of the decode step that ran last, to be replayed by itself."""

    def __init__(self, runner: Any):
        self._decode = runner.decode
        self._last: tuple[Any, Any] | None = None
        runner.decode = self._remember

    def _remember(self, step: Any, draw: Any, kind: Any, plain: bool) -> Any:
        reading = self._decode(step, draw, kind, plain)
        self._last = step.plan.rounds[kind], step.values
        return reading

    def seconds(self, effort: Any) -> float | None:
        """Seconds of the device for one replay. The requests must be ended afterwards: the device is further than the host knows.

        None where no step was launched ahead of the host: then its graph is not all of it.
        """
        from benchmarks.gpu_ops import device_seconds

        if self._last is None:
            return None
        graph, values = self._last
        return device_seconds(lambda: graph(**values), effort)


def decoding(o: argparse.Namespace, llm: Any, name: str, shape: str, batch: int, context: int) -> None:
    """Continuous decode of `batch` sequences: tokens a second, share of the copy bandwidth, idle share of the device."""
    from benchmarks.gpu_ops import Effort

    stepping, graph = Stepping(llm), LastGraph(llm.engine.runner)
    rounds, count, warm = (1, 2, 2) if o.tiny else (5, 60, WARM_STEPS)
    stepping.begin_tuned([prompt(context, b) for b in range(batch)], warm)
    step = median(_seconds(lambda: stepping.steps(count)) / count for _ in range(rounds))
    device = graph.seconds(Effort(1, 0.0) if o.tiny else Effort(3, 0.02))
    stepping.stop()
    held = context + warm + rounds * count // 2
    moved = llm.engine.model_bytes_per_token + batch * held * kv_bytes_per_token(shape, o.tiny)
    bandwidth = bandwidth_of(o)
    more = {"step_us": round(1e6 * step, 1), "step_bytes": moved}
    if device is not None:
        more |= {"device_us": round(1e6 * device, 1), "device_share": bandwidth and round(moved / device / bandwidth, 4)}
    roof = bandwidth and bandwidth / moved * batch
    emit(o, f"decode {name}, {batch} x {context}", batch / step, "tok/s", o.machine.roof_name, roof, **more)
    if device is not None:
        emit(o, f"idle, {name}, {batch} x {context}", 100 * max(0.0, 1 - device / step), "% of a step")


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def decode(o: argparse.Namespace) -> None:
    """Batch-1 decode of a shape and, where asked for, prompts of 512 and 4096 tokens."""
    start(o)
    context, prompts = (20, [40]) if o.tiny else (128, o.prompts)
    longest = max([context + 640, *(tokens + 1 for tokens in prompts)])
    blocks = max(o.batches) * (-(-longest // 16) + 1)
    limits = {"max_model_len": longest, "max_num_seqs": max(o.batches), "num_blocks": blocks}
    name = f"{o.shape} {o.weights}"
    with engine(o, o.shape, o.weights, max_num_batched_tokens=max([512, *prompts]), **limits) as llm:
        for batch in o.batches:
            attempt(o, decoding, o, llm, name, o.shape, batch, context)
        for tokens in prompts:
            attempt(o, prefilling, o, llm, name, tokens)


def prefilling(o: argparse.Namespace, llm: Any, name: str, tokens: int) -> None:
    """One prompt, from `add` to its first token; each time another, of which the prefix cache has nothing."""
    stepping = Stepping(llm)
    first, *prompts = [prompt(tokens, 500 + i) for i in range(2 if o.tiny else 8)]
    stepping.prefill(first)
    timed = median(_seconds(partial(stepping.prefill, ids)) for ids in prompts)
    compute = computing(o) if o.weights == "bf16" else None
    roof = compute and 1e12 * compute / flops_per_token(o.shape, o.tiny)
    emit(o, f"prefill {name}, {tokens}", tokens / timed, "tok/s", o.machine.compute, roof, ms=round(1e3 * timed, 2))


def serve(o: argparse.Namespace) -> None:
    """256 requests at once, as nano-vllm's benchmark has them: prompts and answers of 100 to 1024 random tokens, temperature 0.6."""
    start(o)
    from tinyvllm import SamplingParams

    count, low, high = (3, 4, 12) if o.tiny else (256, 100, 1024)
    chance = random.Random(0)
    prompts = [[chance.randint(0, 10000) % (250 if o.tiny else 10001) for _ in range(chance.randint(low, high))] for _ in range(count)]
    answers = [chance.randint(low, high) for _ in range(count)]
    blocks = sum(-(-(len(ids) + n) // 16) + 1 for ids, n in zip(prompts, answers, strict=True))
    limits: dict[str, Any] = {"max_model_len": 2 * high, "max_num_seqs": count, "num_blocks": blocks}
    given = [{"prompt_token_ids": ids} for ids in prompts]
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True, seed=i) for i, n in enumerate(answers)]
    with engine(o, o.shape, max_num_batched_tokens=64 if o.tiny else 8192, **limits) as llm:
        roof = serving_roof(o, prompts, answers, llm.engine)
        if not o.tiny:
            attempt(o, lambda: decoding(o, llm, o.shape, o.shape, count, 512))
        # the first time compiles and captures what it meets
        first, seconds = (_seconds(lambda: llm.generate(given, params)) for _ in range(2))
        if llm.engine.recovery.num_failed:
            raise SystemExit("gpu: steps of the engine failed while requests were timed; their errors are logged above")
        emit(o, f"{count} requests, {o.shape}, captures included", first, "s")
        emit(o, f"{count} requests, {o.shape}, warm", sum(answers) / seconds, "tok/s", "its roof", roof, seconds=round(seconds, 2))


def serving_roof(o: argparse.Namespace, prompts: list[list[int]], answers: list[int], engine: Any) -> float | None:
    """Tokens a second if nothing took time but reading: the weights once a step, of as many as the longest answer has, and what each
    decoded token reads of keys and values; and the prompts' operations."""
    bandwidth, compute = bandwidth_of(o), computing(o)
    if bandwidth is None:
        return None
    seen = sum(n * len(ids) + n * (n + 1) // 2 for ids, n in zip(prompts, answers, strict=True))
    moved = max(answers) * engine.model_bytes_per_token + seen * kv_bytes_per_token(o.shape, o.tiny)
    work = sum(map(len, prompts)) * flops_per_token(o.shape, o.tiny)
    return float(sum(answers) / (moved / bandwidth + (work / compute / 1e12 if compute else 0.0)))


# --- a profiler's view


def profile(o: argparse.Namespace) -> None:
    """Attention of decodes, a large product and a small one by Nsight Compute, if it is installed; its report is printed."""
    words = [sys.executable, "-m", "benchmarks.gpu", "profiled", *(["--dry"] if o.dry else ["--tiny"] if o.tiny else [])]
    profiler = shutil.which("ncu")
    if profiler is None:
        print("no profiler: ncu is not on the PATH; the kernels run without it", flush=True)
    else:
        names = "regex:attention_decode|matmul|matvec"
        # clocks as they are: setting them needs more rights, and lowers them
        words = [profiler, "--target-processes", "all", "--clock-control", "none", "--kernel-name", names, "--launch-count", "8",
                 "--section", "SpeedOfLight", "--section", "MemoryWorkloadAnalysis", "--section", "LaunchStats", *words]  # fmt: skip
    if status := subprocess.run(words, cwd=ROOT, timeout=o.patience).returncode:
        raise SystemExit(f"gpu: the profiled process ended with status {status}; ERR_NVGPUCTRPERM means that ncu must run as root")


def profiled(o: argparse.Namespace) -> None:
    """What `profile` looks at: each op once as a graph, after its capture."""
    start(o)
    from benchmarks.gpu_ops import Effort, attention_decode_op, product_op, seconds_of
    from tinyvllm.backends.registry import usable_variants
    from tinyvllm.placement import Placement

    hopper = usable_variants(Placement("CUDA"), "matmul")[-1]  # where there are several, its own instructions are last
    ops = [attention_decode_op(*((2, 40, 4, 2, 32) if o.tiny else (32, 4096, 32, 8, 128)))]
    sizes = [(64, 64), (1, 64)] if o.tiny else [(4096, 4096), (1, 4096)]
    ops += [product_op("matmul", T, edge, edge, variant=hopper) for T, edge in sizes]
    for op in ops:
        seconds_of(op, Effort(1, 0.0))
        print(f"{op.name}: has run", flush=True)


# --- peers


def peers(o: argparse.Namespace) -> None:
    """Llama-3.2-1B's shape decoded here and by transformers (static cache, compiled as a CUDA graph), one after the other."""
    for batch in (1, 64):
        attempt(o, compare_transformers, o, batch)


def compare_transformers(o: argparse.Namespace, batch: int) -> None:
    ours = measured(o, f"decode llama-3.2-1b bf16, {batch} x 128")
    with TemporaryDirectory() as folder:
        model = write_config(SHAPES["llama-3.2-1b"], Path(folder))
        words = "decode", str(model), "--batch", str(batch), "--context", "128", "--steps", "300"
        theirs = peer(o, *words) or peer(o, *words, "--compile", "0")  # what compiles for torch may be missing
    if not theirs:
        return
    way = "compiled" if theirs["compiled"] else "eager"
    rate = batch / theirs["step_seconds"]
    more = {name: theirs[name] for name in ("torch", "transformers")} | ({"faster": round(ours / rate, 3)} if ours else {})
    emit(o, f"transformers {way} llama-3.2-1b bf16, {batch} x 128", rate, "tok/s", **more)
    if ours:
        print(f"  tinyvllm {ours:.0f} tok/s: {ours / rate:.2f} times as fast")


def llama(o: argparse.Namespace) -> None:
    """llama.cpp, in turn with us: gpu_llama.py."""
    from benchmarks import gpu_llama

    gpu_llama.llama(o)


# --- the end


def experts(o: argparse.Namespace) -> None:
    """A mixture's experts, low-rank adapters and recurrent states: gpu_experts.py."""
    from benchmarks import gpu_experts  # not above: it imports tinygrad, and --dry chooses its device first

    gpu_experts.experts(o)


def summary(o: argparse.Namespace) -> None:
    """All figures of the run, and what its tests have found."""
    rows = []
    for line in lines_of(o.run):
        share = None if line["share"] is None else f"{line['share']:.1%} of {line['of']}"
        ratio = f"{line['faster']:.2f} x" if "faster" in line else None
        rows.append([line["what"], float(line["value"]), line["unit"], share, ratio])
    print(table(["figure", "value", "unit", "share", "ours is faster by"], rows))
    if o.checks is not None and o.checks.exists():
        print(checks(o.checks))


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "environment": environment, "selftest": selftest, "compile": compile_kernels, "roofs": roofs, "kernels": kernels,
    "ablation": ablation, "experts": experts, "decode": decode,
    "serve": serve, "profile": profile, "profiled": profiled, "peers": peers, "llama": llama, "table": summary,
}  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


NVIDIA = Machine("CUDA", "gpu", gpu, ("copy, our kernel", "copy, the driver"), "copy", "cuBLAS bf16, 8192")


def parse_arguments(words: list[str] | None = None, machine: Machine = NVIDIA, parts: Iterable[str] = PARTS) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="measures what runs on a GPU, part by part")
    parser.add_argument("part", choices=parts)
    parser.add_argument("--run", type=Path, help="a file that collects the figures of one run; shares are taken of the roofs in it")
    parser.add_argument("--checks", type=Path, help="of table: what tests/gpu/attempts.py has written of the tests")
    parser.add_argument("--shape", choices=SHAPES, help="of ablation, decode (llama-3.2-1b) and serve (qwen3-0.6b)")
    parser.add_argument("--weights", choices=(*WIDTH, *FILES), default="bf16")
    parser.add_argument("--batches", type=numbers, default=[1], help="sequences that decode together, with commas")
    parser.add_argument("--prompts", type=numbers, default=[], help="lengths of the prompts that decode also times, with commas")
    parser.add_argument("--torch-python", default=sys.executable, help="the interpreter that has torch and transformers, or mlx-lm")
    parser.add_argument("--llama-bench", default=shutil.which("llama-bench"), help="of llama: the executable, if it is not on the PATH")
    parser.add_argument("--patience", type=float, default=100.0, help="seconds for one measurement of a peer")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, nothing recorded")
    parser.add_argument("--dry", action="store_true", help="toy shapes on an emulated GPU that launches nothing; the first failure ends it")
    parser.add_argument("--only", default="", help="of kernels: what the names of its measurements contain")
    parser.add_argument("--formats", nargs="*", default=[], choices=formats_in(Layout.TILES), help="of kernels: further weight formats")
    parser.add_argument("--caches", nargs="*", default=[], choices=KV_FORMATS, help="of kernels: packed KV caches, next to bfloat16")
    parser.add_argument("--unrecorded", action="store_true", help="add the figures to the run alone, not to results/")
    parser.add_argument("--strict", action="store_true", help="stop at the first failure, with its trace")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one measurement here")
    parser.add_argument("--skip", type=int, default=0, help="measurements of the part that were tried already")
    parser.add_argument("--failed", type=int, default=0, help="how many of them failed")
    o = parser.parse_args(words)
    o.tiny, o.strict = o.tiny or o.dry, o.strict or o.dry
    o.shape = o.shape or ("qwen3-0.6b" if o.part == "serve" else "llama-3.2-1b")
    o.machine, o.words, o.tried = machine, sys.argv[1:] if words is None else words, 0
    return o


def main(
    words: list[str] | None = None, machine: Machine = NVIDIA, parts: Mapping[str, Callable[[argparse.Namespace], None]] = PARTS
) -> None:
    o = parse_arguments(words, machine, parts)
    with _emulated() if o.dry else contextlib.nullcontext():
        parts[o.part](o)
    if o.failed:
        raise SystemExit(f"{o.machine.module}: {o.failed} measurements of {o.part} failed")


@contextlib.contextmanager
def _emulated() -> Iterator[None]:
    from tests.emulator.dry import dry_gpu

    with dry_gpu():
        from tinygrad import Context

        with Context(DEV="CUDA"):  # type: ignore[no-untyped-call]
            yield


if __name__ == "__main__":
    main()
