"""What a service gets out of the machine: many requests with prompts and answers of random lengths, all given at once.

    python -m benchmarks.throughput --shape tinyllama-1.1b --requests 64 --prompt 16-256 --answer 16-128 --max-num-seqs 16

Tokens a second count prompts and answers apart; the ratio compares the answers' rate with what one sequence alone would get at the roof.
"""

from __future__ import annotations

import argparse
import random

from benchmarks.compare.child import prompt
from benchmarks.harness import record, spread, table, take_turns
from benchmarks.latency import load_model, model_arguments, model_name
from benchmarks.roof import read_once, read_size


def span(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def requests(count: int, prompts: tuple[int, int], answers: tuple[int, int], seed: int) -> list[tuple[list[int], int]]:
    """(token ids, tokens to answer) of each request, the same for the same seed."""
    chance = random.Random(seed)
    return [(prompt(chance.randint(*prompts), i), chance.randint(*answers)) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description="requests of random lengths, all at once")
    model_arguments(parser)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=span, default=(16, 256), metavar="LOW-HIGH")
    parser.add_argument("--answer", type=span, default=(16, 128), metavar="LOW-HIGH")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(rounds=3)
    options = parser.parse_args()
    from tinyvllm import SamplingParams

    longest = options.prompt[1] + options.answer[1]
    blocks = options.max_num_seqs * (-(-longest // 16) + 1)
    llm = load_model(options, max_model_len=longest, max_num_seqs=options.max_num_seqs, num_blocks=blocks)
    work = requests(options.requests, options.prompt, options.answer, options.seed)
    prompts = [{"prompt_token_ids": ids} for ids, _ in work]
    params = [SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True) for _, tokens in work]
    llm.generate(prompts, params)  # captures what it needs
    read_once()  # touches its memory
    turns = take_turns({"run": lambda: llm.generate(prompts, params) and None, "read": read_once}, options.rounds)
    timed, bandwidth = spread(turns["run"]), spread(turns["read"]).rate(read_size())
    given, answered = sum(len(ids) for ids, _ in work), sum(tokens for _, tokens in work)
    weights = llm.engine.model_bytes_per_token
    ratio = timed.rate(answered) * weights / bandwidth
    counts = {"prompts": given, "answers": answered, "both": given + answered}
    rows = [[what, timed.rate(n), n / timed.high, n / timed.low] for what, n in counts.items()]
    name = model_name(options)
    print(f"{name}: {options.requests} requests in {timed.median:.2f} s")
    print(f"answers: {ratio:.2f} x the roof of one sequence alone, {bandwidth / weights:.1f} tok/s at {bandwidth / 1e9:.1f} GB/s")
    print(table(["tok/s", "median", "low", "high"], rows))
    record("throughput", {
        "model": name, "dtype": llm.config.dtype, "requests": options.requests, "prompt": options.prompt, "answer": options.answer,
        "max_num_seqs": options.max_num_seqs, "prompt_tok_s": timed.figures(given), "answer_tok_s": timed.figures(answered),
        "read_GBps": round(bandwidth / 1e9, 1), "roof_tok_s": round(bandwidth / weights, 1), "of_roof": round(ratio, 3),
    }, [timed])  # fmt: skip


if __name__ == "__main__":
    main()
