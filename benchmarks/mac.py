"""What an Apple GPU gets out of this engine: one part a command, each prints its figures and adds them to a run. mac.sh runs them all.

    python -m benchmarks.mac roofs --run FILE
    python -m benchmarks.mac decode --shape llama-3.2-1b --weights q8_0 --run FILE
    python -m benchmarks.mac report --run FILE --checks FILE

What is not of Apple alone is gpu.py's, and so are the options. Shares are of the bandwidth that the part `roofs` measured in the same run;
the report adds the share of Apple's figure for the chip. A model that does not fit the machine's memory is left out and named.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import gpu
from benchmarks.gpu_checks import checks, selftest, version_of
from benchmarks.gpu_figures import Machine, ask, attempt, bandwidth_of, effort, emit, lines_of, measured, start
from benchmarks.harness import machine, table
from benchmarks.shapes import SHAPES, bytes_per_token, write_config, write_gguf

DEVICE = "METAL"
READ = "read, our kernel"
PEERS_SHAPE, PEERS_CONTEXT, PEERS_PROMPT, PEERS_BATCHES = "llama-3.2-1b", 128, 512, (1, 16)
MEMORY_SHARE = 0.6  # of the machine's memory that a model's weights may take: about three quarters are the GPU's, and a cache comes on top


# --- the machine


@functools.cache
def describe() -> dict[str, Any]:
    """Chip, cores of its GPU, GB of memory and macOS; "unknown" and 0 on what is no Mac."""
    memory = _asked("sysctl", "-n", "hw.memsize")
    return {
        "chip": _asked("sysctl", "-n", "machdep.cpu.brand_string").removeprefix("Apple ") or "unknown",
        "gpu_cores": gpu_cores(_asked("system_profiler", "SPDisplaysDataType", "-json")),
        "memory_gb": int(memory) >> 30 if memory.isdigit() else 0,
        "macos": platform.mac_ver()[0] or "unknown",
    }


def _asked(*command: str) -> str:
    """What a command of macOS says; nothing where there is no such command."""
    if sys.platform != "darwin" or shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def gpu_cores(profile: str) -> int:
    """The number in system_profiler's JSON of displays; 0 if it says none."""
    with contextlib.suppress(ValueError):
        for display in json.loads(profile).get("SPDisplaysDataType", []):
            if str(display.get("sppci_cores", "")).isdigit():
                return int(display["sppci_cores"])
    return 0


def named_bandwidth(chip: str, cores: int) -> float | None:
    """GB/s that Apple names for a chip (benchmarks/plan.py); of two of one name, the smaller one that has as many cores."""
    from benchmarks.plan import CHIPS

    similar = [known for known in CHIPS if known.name == chip or known.name.rsplit(" ", 1)[0] == chip and known.name[-1].isdigit()]
    enough = sorted((known.cores, known.bandwidth) for known in similar if known.cores >= cores)
    return enough[0][1] if enough else None


def fits(shape: str, weights: str) -> bool:
    memory = describe()["memory_gb"]
    return not memory or bytes_per_token(SHAPES[shape], weights.upper()) < MEMORY_SHARE * memory * 2**30


MAC = Machine(DEVICE, "mac", describe, (READ,), "read", "matmul BF16, 512 rows")


# --- parts


def environment(o: argparse.Namespace) -> None:
    """Versions; every kernel compiled by this Mac's compiler, and whether its threads fit: registers decide how many may be."""
    start(o)
    from tinygrad import Device

    from tests.kernels.metal.samples import samples
    from tinyvllm.backends.source import kernel_text

    device: Any = Device[DEVICE]
    known = describe()
    print(f"{known['chip']}, {known['gpu_cores']} GPU cores ({device.arch}), {known['memory_gb']} GB; macOS {known['macos']}")
    print(f"python {platform.python_version()}, tinygrad {version_of('tinygrad')}", flush=True)
    begin, wrong = time.perf_counter(), {}
    kernels = samples()
    for name, kernel in kernels.items():
        try:
            program = device.runtime(kernel.stem, device.renderer.compiler.compile_cached(kernel_text(kernel)))
        except Exception as error:  # of the compiler, or of the pipeline
            wrong[name] = f"does not compile: {error}"
            continue
        if program.max_total_threads < kernel.block:
            wrong[name] = f"may have {program.max_total_threads} threads, and is launched with {kernel.block}"
    for name, why in wrong.items():
        print(f"{name}: {why}")
    emit(o, "kernels compiled", len(kernels) - len(wrong), f"of {len(kernels)}", seconds=round(time.perf_counter() - begin, 1))
    if wrong:
        raise SystemExit(f"mac: {len(wrong)} kernels cannot be launched here")


def roofs(o: argparse.Namespace) -> None:
    """Bandwidth of a kernel that does nothing but read."""
    start(o)
    from benchmarks.gpu_ops import memory_seconds

    size = 1 << 16 if o.tiny else 1 << 30
    named = named_bandwidth(describe()["chip"], describe()["gpu_cores"])
    attempt(o, lambda: emit(o, READ, size / memory_seconds("read", size, effort(o)) / 1e9, "GB/s", "what Apple names", named))


def kernels(o: argparse.Namespace) -> None:
    """A product for one row, for sixteen and for many, and attention, by themselves, at the shapes of Llama 3.1 8B."""
    start(o)
    from benchmarks.gpu_ops import Op, attention_decode_op, attention_prefill_op, product_op, seconds_of

    O, I, many, (H, K, D) = (48, 256, 20, (4, 2, 32)) if o.tiny else (4096, 14336, 512, (32, 8, 128))

    def streaming(op: Op) -> None:
        rate, bandwidth = op.bytes / seconds_of(op, effort(o)), bandwidth_of(o)
        emit(o, op.name, rate / 1e9, "GB/s", MAC.roof_name, bandwidth and bandwidth / 1e9)

    def computing(op: Op) -> None:
        emit(o, op.name, op.flops / seconds_of(op, effort(o)) / 1e12, "TFLOP/s")

    def streaming_product(T: int, format: str) -> None:
        streaming(product_op(f"product {format} of {T}", T, O, I, format))

    def computing_product(format: str) -> None:
        computing(product_op(f"matmul {format}, {many} rows", many, O, I, format))

    def streaming_attention(B: int, context: int) -> None:
        streaming(attention_decode_op(B, context, H, K, D))

    for format in ("BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_NL"):
        for T in (1, 16):
            attempt(o, streaming_product, T, format)
        # the variant for sixteen rows that is used on request only: does it pay?
        by_matrices = replace(product_op(f"product {format} of 16, apple7_matrix", 16, O, I, format), choice="matmul=apple7_matrix")
        attempt(o, streaming, by_matrices)
        attempt(o, computing_product, format)
    for B, context in ((2, 40),) if o.tiny else ((1, 8192), (16, 1024)):
        attempt(o, streaming_attention, B, context)
    attempt(o, lambda: computing(attention_prefill_op(40 if o.tiny else 2048, H, K, D)))


def decode(o: argparse.Namespace) -> None:
    """gpu.py's, of what the memory holds."""
    if o.tiny or fits(o.shape, o.weights):
        gpu.decode(o)
    else:
        print(f"left out: {o.shape} in {o.weights} wants more than {MEMORY_SHARE:.0%} of {describe()['memory_gb']} GB", flush=True)


# --- peers


def peers(o: argparse.Namespace) -> None:
    """mlx-lm and llama.cpp, as far as they are there, on a model of the same shape and width."""
    config = SHAPES[PEERS_SHAPE] | (gpu.TOY if o.tiny else {})
    for weights in ("bf16", "q8_0", "q4_0", "q4_k_m"):
        with TemporaryDirectory() as folder:
            attempt(o, compare_mlx, o, weights, config, Path(folder))
        if shutil.which("llama-batched-bench") is None:
            print("no llama.cpp: llama-batched-bench is not on the PATH; left out", flush=True)
            continue
        with TemporaryDirectory() as folder:
            attempt(o, compare_llama_cpp, o, weights, config, Path(folder))


def compare_mlx(o: argparse.Namespace, weights: str, config: dict[str, Any], folder: Path) -> None:
    model = write_config(config, folder)
    bits = {"bf16": 0, "q8_0": 8, "q4_0": 4, "q4_k_m": 4}[weights]
    batches = ",".join(map(str, PEERS_BATCHES))
    words = str(model), "--bits", str(bits), "--batches", batches, "--context", str(PEERS_CONTEXT), "--prompt", str(PEERS_PROMPT)
    found = ask(o, "mlx-lm", o.torch_python, "benchmarks.mac_peers", *words)
    if found:
        emit_peer(o, f"mlx-lm {found['version']}", weights, found)


def compare_llama_cpp(o: argparse.Namespace, weights: str, config: dict[str, Any], folder: Path) -> None:
    """Its own benchmark, all layers on the GPU."""
    model = write_gguf(config, folder / "model.gguf", weights.upper())
    room = max(PEERS_BATCHES) * (PEERS_PROMPT + 64)
    lengths = f"{PEERS_CONTEXT},{PEERS_PROMPT}"
    command = ["llama-batched-bench", "-m", str(model), "-c", str(room), "-b", "2048", "-ub", "512", "-ngl", "99", "-npp", lengths]
    command += ["-ntg", "64", "-npl", ",".join(map(str, PEERS_BATCHES)), "--output-format", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=o.patience)
    found = batched_bench(done.stdout)
    if not found:
        raise RuntimeError(f"llama-batched-bench ends with status {done.returncode} and no figure: {done.stderr.strip()[-300:]}")
    emit_peer(o, "llama.cpp", weights, found)


def batched_bench(said: str) -> dict[str, float]:
    """Tokens a second out of llama-batched-bench's lines of JSON, under the names that mac_peers has."""
    found: dict[str, float] = {}
    for line in said.splitlines():
        if line.startswith("{"):
            figures = json.loads(line)
            if figures["pp"] == PEERS_CONTEXT:
                found[f"decode_{figures['pl']}"] = float(figures["speed_tg"])
            if figures["pp"] == PEERS_PROMPT and figures["pl"] == 1:
                found["prefill"] = float(figures["speed_pp"])
    return found


def emit_peer(o: argparse.Namespace, peer: str, weights: str, found: dict[str, Any]) -> None:
    """A peer's figures, with the ratio of ours to them."""
    names = {f"decode_{batch}": f"decode {PEERS_SHAPE} {weights}, {batch} x {PEERS_CONTEXT}" for batch in PEERS_BATCHES}
    names["prefill"] = f"prefill {PEERS_SHAPE} {weights}, {PEERS_PROMPT}"
    for key, name in names.items():
        if key in found:
            ours = measured(o, name)
            emit(o, f"{peer}: {name}", found[key], "tok/s", **({"faster": round(ours / found[key], 3)} if ours else {}))


# --- the report


def report(o: argparse.Namespace) -> None:
    """All of a run as Markdown, to be pasted into an issue."""
    known = describe()
    print(f"### tinyvllm on {known['chip']}, {known['gpu_cores']} GPU cores, {known['memory_gb']} GB, macOS {known['macos']}\n")
    commit = machine()["commit"] or "unknown"
    print(f"commit {commit}, Python {platform.python_version()}, tinygrad {version_of('tinygrad')}\n")
    print(checks(o.checks) + "\n")
    named = named_bandwidth(known["chip"], known["gpu_cores"])
    print(figures(lines_of(o.run), named))
    if named:
        print(f"\nApple names {named:g} GB/s for this chip.")
    if o.failed:
        print(f"\nParts that failed: {'; '.join(o.failed)}.")


def figures(lines: list[dict[str, Any]], named: float | None) -> str:
    """A line each: value, share of the bandwidth that was measured and of the one that is named, and how many times as fast we are."""
    roof = next((line["value"] for line in reversed(lines) if line["what"] == READ), None)
    rows: list[list[object]] = []
    for line in lines:
        share, of_named = line["share"], None
        if share is not None and line["of"] == MAC.roof_name and roof and named:
            of_named = f"{share * roof / named:.1%}"
        shown = None if share is None else f"{share:.1%} of {line['of']}"
        faster = f"{line['faster']:.2f} x" if "faster" in line else None
        rows.append([line["what"], float(line["value"]), line["unit"], shown, of_named, faster])
    return table(["figure", "value", "unit", "share", "of what Apple names", "ours is faster by"], rows)


PARTS = {
    "environment": environment, "selftest": selftest, "roofs": roofs, "kernels": kernels, "ablation": gpu.ablation,
    "experts": gpu.experts, "decode": decode, "peers": peers,
}  # fmt: skip


def report_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="all of a run as Markdown")
    parser.add_argument("--run", type=Path, help="a file with the figures of one run")
    parser.add_argument("--checks", type=Path, help="what tests/gpu/attempts.py has written of the tests")
    parser.add_argument("--failed", nargs="*", default=[], help="parts of the run that failed")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["report"]:
        report(report_arguments(words[1:]))
    else:
        gpu.main(words, MAC, PARTS)


if __name__ == "__main__":
    main()
