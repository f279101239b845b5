"""tinyvllm versus llama.cpp, transformers on PyTorch and tinygrad's own LLM: the same weights, interleaved, the same number of threads.

    python -m benchmarks.compare --shape tinyllama-1.1b --formats bf16,q8_0,q4_0 --tests decode,prefill,batch,context

Timed, the same for all: greedy decoding by hand, from the last token to the next one known to Python (argmax of the logits included,
texts and tokenizers not). `decode`: one sequence, short context. `prefill`: one prompt of 512 tokens, up to the first token of its answer.
`batch`: 16 sequences together; the tokens of all count. `context`: one sequence that holds 7936 tokens.

Formats: BF16 is a Hugging Face folder for tinyvllm and transformers and a GGUF file for the others; Q8_0 and Q4_0 are GGUF files, which
transformers does not compute on. A contestant that is not installed is reported as missing. Each may have an interpreter of its own.
llama.cpp and ik_llama.cpp play with the fastest of their settings at each test (see play_llama_cpp and play_ik_llama).
Only one computes at a time; a round is long enough for timers (see ROUND_SECONDS), and rounds that other processes disturbed are left out;
where too few were quiet, the figures are shown and not recorded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.compare.contest import READING, Contestant, contest, start, steps_of_a_round, tune
from benchmarks.harness import Spread, record, table
from benchmarks.roof import read_size, threads_of_machine
from benchmarks.shapes import SHAPES, bytes_per_token, checkpoint, parse_formats

TESTS = ("decode", "prefill", "batch", "context")
PLAYERS = {
    "tinyvllm": "play_tinyvllm",
    "llama.cpp": "play_llama_cpp",
    "ik_llama.cpp": "play_ik_llama",
    "transformers": "play_transformers",
    "tinygrad.llm": "play_tinygrad",
}
ROUND_SECONDS = 0.5


def parse_tests(text: str) -> list[str]:
    tests = [word.strip() for word in text.split(",")]
    if wrong := [t for t in tests if t not in TESTS]:
        raise argparse.ArgumentTypeError(f"no test {', '.join(wrong)}; there are {', '.join(TESTS)}")
    return tests


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="tinyvllm versus its peers on the same weights")
    parser.add_argument("--shape", choices=SHAPES, default="tiny160m")
    parser.add_argument("--formats", type=parse_formats, default=["BF16"])
    parser.add_argument("--tests", type=parse_tests, default=["decode", "prefill"])
    parser.add_argument("--only", default=",".join(PLAYERS), help="contestants, with commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=threads_of_machine())
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=7936)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept; a temporary folder otherwise")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--torch-python", default=sys.executable)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for format in options.formats:
            for tests in _shared_loads(options.tests):
                compare(options, format, tests, folder, logs)


def _shared_loads(tests: list[str]) -> list[list[str]]:
    """Tests that can run on one load: a batch of 16 and a long context would take a cache for both."""
    short = [t for t in tests if t in ("decode", "prefill")]
    return [group for group in (short, *[[t] for t in tests if t not in short]) if group]


def compare(options: argparse.Namespace, format: str, tests: list[str], folder: Path, logs: Path) -> None:
    contestants = []
    try:
        for name in options.only.split(","):
            contestants.append(_load(options, name, format, tests, folder, logs))
            one = contestants[-1]
            print(f"{name}: {one.missing or f'loaded in {one.load_seconds:.1f} s'}", file=sys.stderr)
        for test in tests:
            _one_test(options, format, test, contestants)
    finally:
        for one in contestants:
            one.close()


def _load(options: argparse.Namespace, name: str, format: str, tests: list[str], folder: Path, logs: Path) -> Contestant:
    if name not in PLAYERS:
        raise SystemExit(f"compare: there is no contestant {name!r}; there are {', '.join(PLAYERS)}")
    if name == "transformers" and format != "BF16":
        return Contestant(name, None, f"does not compute on {format}")
    has_experts = "num_experts" in SHAPES[options.shape]
    if name == "transformers" and has_experts:
        return Contestant(name, None, "reads folders, and experts are written as GGUF")
    if name == "tinygrad.llm" and not {"decode", "prefill", "context"} & set(tests):
        return Contestant(name, None, "one sequence at a time")
    from_folder = format == "BF16" and name in ("tinyvllm", "transformers") and not has_experts
    model = checkpoint(options.shape, "folder" if from_folder else format, folder)
    python = {"llama.cpp": options.llama_python, "transformers": options.torch_python}.get(name, sys.executable)
    length = options.context + 1024 if "context" in tests else max(1024, options.prompt + 512)
    limits = {"threads": options.threads, "batch": options.batch if "batch" in tests else 1, "length": length, "chunk": 512}
    return start(name, PLAYERS[name], python, model, limits, logs / f"{name}.log")


def _one_test(options: argparse.Namespace, format: str, test: str, contestants: list[Contestant]) -> None:
    batch = options.batch if test == "batch" else 1
    tune(contestants, test, batch, {"prefill": options.prompt, "context": options.context}.get(test, 16))
    if test == "prefill":
        units = {one.name: options.prompt for one in contestants}
        commands: dict[str, tuple[object, ...]] = {one.name: ("prefill", options.prompt) for one in contestants}
        spreads = contest(contestants, test, None, commands, 2, options.rounds)
    else:
        begin = ("begin", batch, options.context if test == "context" else 16)
        most = 900 // (3 * options.rounds + 3)  # so that no sequence outgrows its cache, however many rounds it takes
        counts = steps_of_a_round(contestants, test, begin, ROUND_SECONDS, most)
        units = {name: batch * count for name, count in counts.items()}
        spreads = contest(contestants, test, begin, {name: ("steps", count) for name, count in counts.items()}, 1, options.rounds)
    report(options, format, test, contestants, spreads, units)


def report(
    options: argparse.Namespace, format: str, test: str, contestants: list[Contestant], spreads: dict[str, Spread], units: dict[str, int]
) -> None:
    bandwidth, weights = spreads.pop(READING).rate(read_size()), bytes_per_token(SHAPES[options.shape], format)
    rates = {name: s.figures(units[name]) for name, s in spreads.items()}
    ours = rates.get("tinyvllm", {}).get("rate")
    roof = bandwidth / weights if test == "decode" else None
    rows = []
    for one in contestants:
        if one.name in spreads:
            s, r = spreads[one.name], rates[one.name]
            rows.append([one.name, r["rate"], r["low"], r["high"], ours / r["rate"] if ours else None, f"{s.quiet}/{s.rounds}"])
        else:
            rows.append([one.name, None, None, None, None, one.missing or one.notes.get(test, "")])
    print(f"\n{options.shape} {format} {test}, {options.threads} threads, {bandwidth / 1e9:.1f} GB/s")
    print(table(["contestant", "tok/s", "low", "high", "tinyvllm is faster by", "quiet rounds"], rows), flush=True)
    record("compare", {
        "shape": options.shape, "format": format, "test": test, "threads": options.threads,
        "batch": options.batch if test == "batch" else 1,
        "context": {"context": options.context, "prefill": 0}.get(test, 16), "prompt": options.prompt if test == "prefill" else None,
        "read_GBps": round(bandwidth / 1e9, 1), "weight_bytes": weights,
        "roof_tok_s": round(roof, 1) if roof else None,
        "of_roof": {name: round(r["rate"] / roof, 3) for name, r in rates.items()} if roof else {},
        "settings": {one.name: one.settings for one in contestants if one.settings},
        "tok_s": rates, "faster": {name: round(ours / r["rate"], 3) for name, r in rates.items()} if ours else {},
        "missing": {one.name: one.missing or one.notes[test] for one in contestants if one.missing or test in one.notes},
    }, spreads.values())  # fmt: skip


if __name__ == "__main__":
    main()
