"""The options of `tinyvllm bench serve`, by the title of their group. Names are those of vLLM's benchmark where it has the option."""

from __future__ import annotations

from tinyvllm.cli.options import Option

BENCH_SERVE_OPTIONS: dict[str, tuple[Option, ...]] = {
    "server": (
        ("--base-url", {"metavar": "URL", "default": "http://127.0.0.1:8000", "help": "the server; default http://127.0.0.1:8000"}),
        ("--endpoint", {"metavar": "PATH", "default": "/v1/completions", "help": "/v1/completions (default) or /v1/chat/completions"}),
        ("--model", {"metavar": "NAME", "default": None, "help": "its name there; default: the first that the server lists"}),
        ("--api-key", {"metavar": "KEY", "default": None, "help": "API key for the server"}),
        (
            "--ready-check-timeout-sec",
            {"type": float, "metavar": "S", "default": 600.0, "help": "wait so long for the server; default 600"},
        ),
        ("--timeout", {"type": float, "metavar": "S", "default": 600.0, "help": "an answer fails that is not whole by then; default 600"}),
    ),
    "load": (
        ("--num-prompts", {"type": int, "metavar": "N", "default": 100, "help": "requests of a load; default 100"}),
        ("--request-rate", {"metavar": "R,...", "default": "inf", "help": "arrivals a second; default inf: all at the start"}),
        ("--burstiness", {"type": float, "metavar": "B", "default": 1.0, "help": "shape of the gamma arrivals: 1 is Poisson, inf a clock"}),
        ("--max-concurrency", {"metavar": "N,...", "default": None, "help": "requests at the same time; the others wait here"}),
        ("--num-warmups", {"type": int, "metavar": "N", "default": 8, "help": "requests before the first load; default 8"}),
        ("--seed", {"type": int, "metavar": "S", "default": 0, "help": "seed of prompts, arrivals and sampling; default 0"}),
    ),
    "requests": (
        ("--dataset", {"metavar": "D", "default": "random", "help": "random, or a .jsonl or .txt file of prompts"}),
        (
            "--output-len",
            {"type": int, "metavar": "N", "default": 256, "help": "max_tokens of a file's prompts without their own; default 256"},
        ),
        (
            "--random-input-len",
            {"metavar": "L", "default": "1024", "help": "tokens: N, LOW-HIGH, or lognormal:MEDIAN,SIGMA,MAX; default 1024"},
        ),
        ("--random-output-len", {"metavar": "L", "default": "128", "help": "tokens of an answer, in the same forms; default 128"}),
        ("--random-prefix-len", {"type": int, "metavar": "N", "default": 0, "help": "tokens before them that several prompts share"}),
        ("--random-num-prefixes", {"type": int, "metavar": "N", "default": 1, "help": "number of such beginnings; default 1"}),
        (
            "--random-vocabulary",
            {"type": int, "metavar": "V", "default": 1000, "help": "prompts are token ids from 10 to below V; default 1000"},
        ),
        (
            "--random-words",
            {"action": "store_true", "default": False, "help": "prompts are words, for servers without token ids; so with chat"},
        ),
        ("--temperature", {"type": float, "metavar": "T", "default": 0.0, "help": "default 0"}),
        ("--ignore-eos", {"action": "store_true", "default": False, "help": "force answers of max_tokens; others count as failed"}),
        ("--extra-body", {"metavar": "JSON", "default": None, "help": "more fields of every request"}),
    ),
    "results": (
        (
            "--goodput",
            {
                "nargs": "+",
                "metavar": "METRIC:MS",
                "default": [],
                "help": "count requests a second that keep these limits, such as ttft:200 tpot:50; of ttft, tpot, itl, e2el",
            },
        ),
        (
            "--percentile-metrics",
            {"metavar": "M,...", "default": "ttft,tpot,itl,e2el", "help": "metrics to show; default ttft,tpot,itl,e2el"},
        ),
        ("--metric-percentiles", {"metavar": "P,...", "default": "90,95,99", "help": "percentiles of each; default 90,95,99"}),
        ("--output-format", {"metavar": "F", "default": "md", "help": "md, json or csv"}),
        ("--output", {"metavar": "F", "default": None, "help": "write the results to this file; then stdout has the tables"}),
        ("--save-detailed", {"action": "store_true", "default": False, "help": "JSON has the figures of each request, too"}),
        ("--plot", {"metavar": "F.svg", "default": None, "help": "draw latencies and rates against load"}),
    ),
}
