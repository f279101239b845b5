"""Writes the figures of README.md and docs/figures.md from benchmarks/results, so that each figure has a record.

    python -m benchmarks.figures --write

A page has blocks between `<!-- figures NAME -->` and `<!-- end -->`; each is made of the newest records of one kind of processor. Only
records of a clean commit count. A row without such a record is left out. tests/benchmarks/test_figures.py checks that the pages are up to
date.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, table
from tinyvllm.cli.quality_plot import plot
from tinyvllm.cli.quality_report import best_line
from tinyvllm.cli.quality_report import table as quality_table

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/figures.md", "docs/quality.md", "docs/speculation.md")
LAB_PICTURES = "images/lab"  # in docs/
QUALITY_PICTURE = "docs/images/quality.svg"
PEERS = ("tinyvllm", "llama.cpp", "ik_llama.cpp", "transformers")
_BLOCK = re.compile(r"(<!-- figures (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FLAGS = {
    "avx2": "AVX2",
    "avx_vnni": "AVX-VNNI",  # where AVX-512, which is preferred, is missing
    "avx512f": "AVX-512",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "BF16",
    "amx_tile": "AMX",
    "asimd": "NEON",
    "i8mm": "I8MM",
}

Line = dict[str, Any]

SHAPE, EXPERTS = "tinyllama-1.1b", "qwen3-moe-4b"  # of benchmarks.shapes
NAMES = {SHAPE: "TinyLlama-1.1B's shape", EXPERTS: "64 experts, 8 a token"}

PROMPT = 512  # tokens

# what a row is called: format and test of `benchmarks.compare`, and the tokens of the prompt if they are not PROMPT
COMPARED: dict[str, tuple[str, str] | tuple[str, str, int]] = {
    "one sequence, bf16": ("BF16", "decode"),
    "one sequence, Q8_0": ("Q8_0", "decode"),
    "one sequence, Q4_0": ("Q4_0", "decode"),
    "one sequence, Q4_K_M": ("Q4_K_M", "decode"),
    "one sequence, Q6_K": ("Q6_K", "decode"),
    "one sequence with 7,936 tokens of context, bf16": ("BF16", "context"),
    "sixteen sequences in one batch, bf16": ("BF16", "batch"),
    "prompt of 512 tokens, bf16": ("BF16", "prefill"),
    "prompt of 512 tokens, Q8_0": ("Q8_0", "prefill"),
    "prompt of 512 tokens, Q4_0": ("Q4_0", "prefill"),
    "prompt of 512 tokens, Q4_K_M": ("Q4_K_M", "prefill"),
    "prompt of 1,536 tokens, bf16": ("BF16", "prefill", 1536),
    "prompt of 1,536 tokens, Q4_K_M": ("Q4_K_M", "prefill", 1536),
}


WHOLE = {(format, test) for format in ("BF16", "Q8_0", "Q4_0", "Q4_K_M") for test in ("decode", "prefill")}


def records(name: str, forced: bool = False) -> list[Line]:
    """The lines of results/NAME.jsonl that belong to a commit, the oldest first; `forced`: also those with TINYVLLM_KERNELS set."""
    path = RESULTS / f"{name}.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    known = [line for line in lines if line["commit"] and not line["commit"].endswith("-dirty") and line.get("isa")]
    return [line for line in known if forced or not line.get("forced")]


def processor(line: Line) -> str:
    """ "2 cores of an AMD EPYC, Zen 4 (AVX2, AVX-512, VNNI, BF16)", and which kernels were forced.

    Older records have no `core`; of the EPYCs with AVX-512 only Zen 5 has AVX-VNNI too.
    """
    isa = line["isa"].split()
    core = line.get("core") or ("Zen 5" if "EPYC" in line["cpu"] and {"avx_vnni", "avx512f"} <= set(isa) else "")
    flags = ", ".join(text for flag, text in _FLAGS.items() if flag in isa and (flag != "avx_vnni" or "avx512f" not in isa))
    forced = f", with `TINYVLLM_KERNELS={line['forced']}`" if line.get("forced") else ""
    return f"{line['cores']} cores of an {line['cpu']}{core and f', {core}'} ({flags}){forced}"


def newest(lines: Iterable[Line], **wanted: object) -> Line | None:
    return next((line for line in reversed(list(lines)) if all(line.get(k) == v for k, v in wanted.items())), None)


def by_processor(lines: list[Line], block: Callable[[list[Line]], str]) -> str:
    """One block a kind of processor, each with its heading; the kind measured last comes first, those with forced kernels last."""
    kinds = list(dict.fromkeys(processor(line) for line in sorted(reversed(lines), key=lambda line: "forced" in line)))
    return "\n\n".join(f"{kind}:\n\n{block([line for line in lines if processor(line) == kind])}" for kind in kinds)


def compared(lines: list[Line], roofs: bool, shape: str = SHAPE) -> str:
    """Tokens a second of every contestant; with `roofs` also their share of what reading the weights once a token allows."""
    rows: list[list[object]] = []
    for label, line in [(label, line) for label, of in COMPARED.items() for line in runs(lines, shape, *of)]:
        rates = {name: figures["rate"] for name, figures in line["tok_s"].items()}
        row: list[object] = [label, *(_rate(rates.get(name)) for name in PEERS)]
        others = [rate for name, rate in rates.items() if name != "tinyvllm"]
        row.append(f"{rates['tinyvllm'] / max(others):.2f}" if others else "")
        if roofs:
            of_roof = line.get("of_roof") or {}
            row += [f"{of_roof[name]:.0%}" if name in of_roof else "" for name in PEERS[:2]]
            row += [line["read_GBps"], line.get("settings", {}).get("llama.cpp", ""), line["commit"]]
        rows.append(row)
    roof_columns = ["tinyvllm of the roof", "llama.cpp of the roof", "GB/s", "llama.cpp's settings", "commit"] if roofs else []
    return table([f"tok/s, {NAMES[shape]}", *PEERS, "tinyvllm / best other", *roof_columns], rows)


def runs(lines: list[Line], shape: str, format: str, test: str, prompt: int = PROMPT) -> list[Line]:
    """The newest record of a test; and of each older one that has a peer which no newer one has: a ratio is of one run."""
    chosen, peers = list[Line](), set[str]()
    for line in reversed([one for one in lines if (one["shape"], one["format"], one["test"]) == (shape, format, test)]):
        if test == "prefill" and line.get("prompt", PROMPT) != prompt:
            continue
        if not chosen or not set(line["tok_s"]) <= peers:
            chosen.append(line)
            peers |= set(line["tok_s"])
    return chosen


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def readme(lines: list[Line]) -> str:
    """The table of the kind of processor that was measured with all of `WHOLE` and with the most peers; of several, the last measured."""
    lines = [line for line in lines if line["shape"] == SHAPE]
    done: dict[str, set[tuple[str, str]]] = {}
    peers: dict[str, set[str]] = {}
    for line in reversed(lines):
        done.setdefault(processor(line), set()).add((line["format"], line["test"]))
        peers.setdefault(processor(line), set()).update(line["tok_s"])
    whole = [kind for kind, tests in done.items() if tests >= WHOLE]
    kind = max(whole, key=lambda kind: len(peers[kind]), default=processor(lines[-1]))
    return f"{kind}:\n\n{compared([line for line in lines if processor(line) == kind], roofs=False)}"


# each: records' file, which record, what is measured, and the words for its figures
OTHERS: list[tuple[str, dict[str, object], str, Callable[[Line], str]]] = [
    ("traffic", {"what": "batching", "work": "equal lengths"}, "continuous vs. static batching, equal lengths, 160M shape",
     lambda r: f"{r['of_static']:.1%}"),
    ("traffic", {"what": "batching", "work": "random lengths"}, "continuous vs. static batching, mixed lengths, 160M shape",
     lambda r: f"{r['of_static']:.1%}"),
    ("traffic", {"what": "prefix"}, "first token after 2,048 cached tokens vs. computing them, 1.1B shape",
     lambda r: f"{r['hit_ms']:.0f} ms vs. {r['miss_ms']:.0f} ms, {r['miss_ms'] / r['hit_ms']:.0f} times sooner"),
    ("traffic", {"what": "together", "tokens": 2048}, "16 requests at once sharing an uncached 2,048-token prefix, 1.1B shape",
     lambda r: f"{r['one_s']:.1f} s; {r['each_s']:.1f} s if each computes it"),
    ("traffic", {"what": "cache"}, "prefix-cache bookkeeping at a 0% hit rate, 160M shape", lambda r: f"{r['share']:.1%} of the time"),
    ("traffic", {"what": "idle", "batch": 1}, "device idle while decoding one sequence, 1.1B shape", lambda r: f"{r['share']:.1%}"),
    ("traffic", {"what": "idle", "batch": 16}, "device idle while decoding sixteen, 1.1B shape", lambda r: f"{r['share']:.1%}"),
    ("traffic", {"what": "host"}, "scheduling and preparing a step of 64 decodes, 1.1B shape",
     lambda r: f"{r['us']:.0f} us in the median, {r['us_90th']:.0f} us at the 90th percentile"),
    ("traffic", {"what": "ramp"}, "first token, thirty requests to a fresh server, with warmup / without, 160M shape",
     lambda r: f"{r['before']['first_median_ms']} ms / {r['on the way']['first_median_ms']} ms"),
    ("server_overhead", {"what": "overhead", "clients": 16}, "16 streaming clients of the server vs. `LLM.generate`, 160M shape",
     lambda r: f"{r['overhead']:.1%} slower"),
    ("server_overhead", {"what": "overhead", "clients": 64}, "64 streaming clients of the server vs. `LLM.generate`, 160M shape",
     lambda r: f"{r['overhead']:.1%} slower"),
    ("server_overhead", {"what": "first"}, "first token of a short prompt during prefill of four prompts of 4,096 tokens, 160M shape",
     lambda r: f"{r['loaded_ms'] / 1000:.2f} s; all four take {r['four_prompts_s']:.1f} s"),
    ("server_overhead", {"what": "ready"}, "server ready with the bundled model, warm caches", lambda r: f"{r['ready_s']:.1f} s"),
    ("server_overhead", {"what": "idle"}, "processor time of an idle server in 10 s, after warmup", lambda r: f"{r['idle_cpu_s']:.2f} s"),
    ("start", {"model": None}, "`python main.py --prompt hi --max-tokens 1`, bundled model, warm caches, whole process",
     lambda r: f"{r['seconds']['1 tokens']['median']:.2f} s"),
    ("start", {"model": None}, "the same on a fresh machine, which compiles its kernels",
     lambda r: f"{r['seconds']['cold']['median']:.2f} s" if "cold" in r["seconds"] else "not measured"),
    ("memory", {"model": "tinyllama-1.1b"}, "resident memory, eight sequences, 1.1B shape in bf16",
     lambda r: f"{r['ran']['resident'] / 1e6:.0f} MB, {r['ratio']:.2f} times its weights and KV cache"),
]  # fmt: skip


def others(_: list[Line]) -> str:
    """Everything that is not a comparison of engines, a row a measurement."""
    rows: list[list[object]] = []
    for name, wanted, label, words in OTHERS:
        line = newest(records(name), **wanted)
        if line is not None:
            rows.append([label, words(line), processor(line), f"`{name}`", line["commit"]])
    return table(["what", "measured", "processor", "`benchmarks.`", "commit"], rows) if rows else "No record of a clean commit yet."


def kv_caches(lines: list[Line]) -> str:
    """Decoding with each type of KV cache, at a depth: a row a batch, from the newest record of each format of weights."""
    rows: list[list[object]] = []
    for weights in dict.fromkeys(line["weights"] for line in lines):
        line = next(line for line in reversed(lines) if line["weights"] == weights)
        for run in line["runs"]:
            base, *packed = run["types"].items()
            cells = [f"{_rate(figures['tok_s']['rate'])}, {figures['faster']:.2f} of {figures['by_bytes']:.2f}" for _, figures in packed]
            size = f"{base[1]['weight_bytes'] / 1e6:.0f} + {base[1]['kv_bytes'] / 1e6:.0f}"
            label = f"{weights}, {run['batch']} x {line['context']}"
            rows.append([label, size, _rate(base[1]["tok_s"]["rate"]), *cells, run["read_GBps"], line["commit"]])
            names = [name for name, _ in packed]
    return table(["weights, sequences x context", "MB of weights + KV", "auto", *names, "GB/s", "commit"], rows)


def ops(lines: list[Line]) -> str:
    """Each op of a layer, as tinygrad compiles it and as our kernel."""
    line = lines[-1]
    rows: list[list[object]] = [
        [op, f"{f['reference_us']:.0f}", f"{f['kernel_us']:.0f}", f"{f['faster']:.1f}"] for op, f in line["ops"].items()
    ]
    return table([f"us, commit {line['commit']}", "tinygrad", "kernel", "times faster"], rows)


def engines(lines: list[Line], shape: str = SHAPE) -> str:
    own = [line for line in lines if line["shape"] == shape]
    return by_processor(own, lambda kind: compared(kind, roofs=True, shape=shape)) or "No record of a clean commit yet."


def experts(lines: list[Line]) -> str:
    return engines(lines, EXPERTS)


def quality(lines: list[Line]) -> str:
    """Every format of the bundled model, of the newest record."""
    line = lines[-1]
    head = f"{processor(line)}, commit {line['commit']}; `python -m benchmarks.quality`:"
    return "\n\n".join([head, quality_table(line["rows"]), best_line(line["rows"]), quality_goals(line["rows"])])


# what is limited, the limit, the rows (weights, KV cache) that it needs, and the words for their figures; None: the reference's weights
GOALS: list[tuple[str, str, list[tuple[str | None, str]], Callable[..., str]]] = [
    ("perplexity of q8_0, change", "below 0.1%", [("q8_0", "auto")], lambda row: _change(row)),
    ("KL mean of q8_0", "at most 0.0015", [("q8_0", "auto")], lambda row: f"{row['kl']['value']:.6f}"),
    ("KL mean of q4_k_m by that of q4_0", "at most 0.5", [("q4_k_m", "auto"), ("q4_0", "auto")],
     lambda mix, plain: f"{mix['kl']['value'] / plain['kl']['value']:.2f}"),
    ("KL mean of q4_k by that of q4_0", "none", [("q4_k", "auto"), ("q4_0", "auto")],
     lambda packed, plain: f"{packed['kl']['value'] / plain['kl']['value']:.2f}"),
    ("perplexity with KV cache int8, change", "at most 0.1%", [(None, "int8")], lambda row: _change(row)),
    ("perplexity with KV cache int4, change", "at most 1%", [(None, "int4")], lambda row: _change(row)),
]  # fmt: skip


def _change(row: Line) -> str:
    return f"{100 * (row['perplexity_ratio']['value'] - 1):+.3f}%"


def quality_goals(lines: list[Line]) -> str:
    """What formats should keep to, and what they do. A goal whose rows were not measured is left out."""
    own = next(line["weights"] for line in lines if line["reference"])
    rows = {(None if line["weights"] == own else line["weights"], line["kv_cache"]): line for line in lines if not line["reference"]}
    known = [(name, limit, words(*(rows[need] for need in needs))) for name, limit, needs, words in GOALS if set(needs) <= rows.keys()]
    return table(["goal", "limit", "measured"], known)


def quality_picture() -> str:
    """The picture of the same record; empty without one."""
    lines = records("quality")
    return plot(lines[-1]["rows"]) if lines else ""


def speculation(lines: list[Line]) -> str:
    """Every text and way of guessing, of the newest record of each model."""
    rows: list[list[object]] = []
    for model in dict.fromkeys(line["model"] for line in reversed(lines)):
        for text in dict.fromkeys(line["text"] for line in lines if line["model"] == model):
            line = newest(lines, model=model, text=text)
            assert line is not None
            rows += [_drafted(line, name) for name in line["ratio"]]
            rows += [_peer(line)] if "ahead" in line else []
    header = ["text, way of guessing", "tok/s without", "tok/s with", "times", "tokens a step", "accepted", "host us added", "commit"]
    return table(header, rows)


def _drafted(line: Line, name: str) -> list[object]:
    """Speculation against none; times as the median and the quartiles of the rounds."""
    rates, ratio, drafts = line["tok_s"], line["ratio"][name], line["drafts"][name]
    label = f"{line['model']}, {line['text']}, {line['batch']} at a time: {name}"
    times = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    speeds = [_rate(rates["off"]["rate"]), _rate(rates[name]["rate"])]
    return [label, *speeds, times, drafts["tokens_a_step"], f"{drafts['accepted']:.0%}", line["added_us"][name], line["commit"]]


def _peer(line: Line) -> list[object]:
    """The fastest of ours against the fastest of llama.cpp's."""
    ahead, rates = line["ahead"], line["tok_s"]
    label = f"{line['model']}, {line['text']}: {ahead['by']} against {ahead['of']}"
    times = f"{ahead['median']:.2f} ({ahead['low']:.2f} to {ahead['high']:.2f})"
    return [label, _rate(rates[ahead["of"]]["rate"]), _rate(rates[ahead["by"]]["rate"]), times, "", "", "", line["commit"]]


def lab_pictures(_: list[Line]) -> str:
    """The pictures that `tinyvllm lab --plots docs/images/lab` has drawn."""
    paths = sorted((ROOT / "docs" / LAB_PICTURES).glob("*.svg"))
    return "\n\n".join(f"![{path.stem.replace('_', ' ')}]({LAB_PICTURES}/{path.name})" for path in paths) or "No pictures yet."


WITH_FORCED = (engines, experts)  # a table for each choice of kernels
WITHOUT_RECORDS = (others, lab_pictures)  # they say themselves what is missing
BLOCKS: dict[str, tuple[str, Callable[[list[Line]], str]]] = {
    "readme": ("compare", readme),
    "engines": ("compare", engines),
    "experts": ("compare", experts),
    "ops": ("reference", lambda lines: by_processor(lines, ops)),
    "kv_cache": ("kv_cache", lambda lines: by_processor(lines, kv_caches)),
    "others": ("traffic", others),
    "quality": ("quality", quality),
    "speculation": ("speculation", lambda lines: by_processor(lines, speculation)),
    "lab_pictures": ("speculation", lab_pictures),
}


def filled(text: str) -> str:
    """A page's text with its blocks filled again."""

    def block(match: re.Match[str]) -> str:
        name, make = BLOCKS[match[2]]
        lines = records(name, forced=make in WITH_FORCED)
        made = make(lines) if lines or make in WITHOUT_RECORDS else "No record of a clean commit yet."
        return f"{match[1]}{made}\n{match[3]}"

    return _BLOCK.sub(block, text)


def main() -> None:
    parser = argparse.ArgumentParser(description="the figures of the pages, from the records")
    parser.add_argument("--write", action="store_true", help="write the pages; otherwise only say which are out of date")
    options = parser.parse_args()
    for page in PAGES:
        path = ROOT / page
        text = path.read_text()
        if filled(text) != text:
            print(f"{page}: {'written' if options.write else 'out of date'}")
            if options.write:
                path.write_text(filled(text))
    if options.write and quality_picture():
        (ROOT / QUALITY_PICTURE).write_text(quality_picture())


if __name__ == "__main__":
    main()
