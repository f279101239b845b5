"""What HTTP, JSON, events and detokenizing cost: the same work through a server and through LLM offline, in turn.

    python -m benchmarks.server_overhead --what overhead,first,idle,ready --clients 16,64

overhead: all clients send one request at once and stream its answer; offline the same prompts go to LLM.generate together. The model has
the shape of --shape with random weights, and the bundled model's tokenizer made as long as its vocabulary, so that every token has a text.
The client runs on the same machine: its processor time is told, and so is that of the server's event loop, which is no estimate.
first: the time to the first token of a short request while prompts of 4096 tokens are prefilled, versus that of a step.
idle: processor seconds in ten seconds without requests. ready: from the start of the process to the line that says it is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import one_round, record, spread, table, take_turns
from benchmarks.own_server import own_server
from benchmarks.shapes import SHAPES, write_config
from tinyvllm.bench_serve.client import Client, Stream

_BUNDLED = Path(__file__).parents[1] / "tinyvllm" / "demo" / "model"
_TICK = os.sysconf("SC_CLK_TCK")


def write_model(shape: str, folder: Path) -> Path:
    """A folder with config.json of a shape and a tokenizer of exactly its vocabulary: the bundled one with made-up words added."""
    config = SHAPES[shape]
    write_config(config, folder)
    tokenizer = json.loads((_BUNDLED / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    taken = {entry["id"] for entry in tokenizer["added_tokens"]} | set(vocabulary.values())
    for i in range(config["vocab_size"]):
        if i not in taken:
            vocabulary[f"\u0120w{i:x}"] = i  # a blank and four letters
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text((_BUNDLED / "tokenizer_config.json").read_text())
    return folder


def options_of(options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """What both engines are given."""
    longest = options.prompt + options.answer + 16
    blocks = rows * (-(-longest // 16) + 1)
    # without drafts: random weights repeat themselves by chance
    return {
        "dtype": options.dtype, "max_model_len": longest, "max_num_seqs": rows, "num_blocks": blocks, "load_format": "dummy",
        "speculative_config": "off",
    }  # fmt: skip


def flags(given: dict[str, Any]) -> list[str]:
    """The same for `main.py serve`."""
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids that no two rounds share, so that nothing is cached."""
    chance = random.Random(seed)
    return [[chance.randrange(10, 3000) for _ in range(length)] for _ in range(count)]


def _offline(port: Any, folder: str, given: dict[str, Any], answer: int) -> None:
    """A process with an LLM: for each list of prompts the seconds that it takes."""
    from tinyvllm import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    with LLM(folder, **given) as llm:
        port.send(0.0)
        while (work := port.recv()) is not None:
            began = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in work], params)
            seconds = time.perf_counter() - began
            assert all(len(output.outputs[0].token_ids) == answer for output in outputs)
            port.send(seconds)


@contextlib.contextmanager
def offline(folder: Path, given: dict[str, Any], answer: int) -> Iterator[tuple[Any, int]]:
    """(what takes lists of prompts and gives seconds, process id)."""
    context = multiprocessing.get_context("spawn")
    port, theirs = context.Pipe()
    process = context.Process(target=_offline, args=(theirs, str(folder), given, answer), daemon=True)
    process.start()
    port.recv()
    yield port, process.pid or 0
    port.send(None)
    process.join(30)


def loop_seconds(pid: int) -> float:
    """Processor seconds of a process's first thread, which in a server is the event loop."""
    words = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICK


def process_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICK


def body(ids: list[int], answer: int, stream: bool = True, **more: Any) -> bytes:
    said = {"prompt": ids, "max_tokens": answer, "temperature": 0, "ignore_eos": True, "stream": stream, **more}
    return json.dumps(said | ({"stream_options": {"include_usage": True}} if stream else {})).encode()


def overhead(options: argparse.Namespace, folder: Path, clients: int) -> dict[str, Any]:
    """One row: offline and through the server, in turn."""
    given = options_of(options, clients)
    tokens = clients * options.answer
    seeds = iter(range(10**9))
    cost = {"loop": 0.0, "client": 0.0, "tokens": 0}
    with (
        offline(folder, given, options.answer) as (port, child),
        own_server(["--model", str(folder), *flags(given)]) as (url, pid),
        asyncio.Runner() as runner,
    ):
        client = Client(url)

        async def stream_all(work: list[list[int]]) -> list[Stream]:
            return await asyncio.gather(*(client.post("/v1/completions", body(ids, options.answer)) for ids in work))

        def served() -> float:
            work = prompts(clients, options.prompt, next(seeds))
            mine, theirs, began = time.process_time(), loop_seconds(pid), time.perf_counter()
            streams = runner.run(stream_all(work))
            seconds = time.perf_counter() - began
            cost["client"] += time.process_time() - mine
            cost["loop"] += loop_seconds(pid) - theirs
            cost["tokens"] += tokens
            wrong = [s.error for s in streams if s.error or (s.usage or {}).get("completion_tokens") != options.answer]
            assert not wrong, wrong[0]
            return seconds

        def alone() -> float:
            port.send(prompts(clients, options.prompt, next(seeds)))
            seconds: float = port.recv()
            return seconds

        for _ in range(2):  # programs are made, memory is touched
            alone()
            served()
        cost.update(loop=0.0, client=0.0, tokens=0)
        turns = take_turns({"offline": alone, "server": served}, options.rounds, [child, pid], patience=1.0)
        client.close()
    pairs = [b.seconds / a.seconds - 1 for a, b in zip(turns["offline"], turns["server"], strict=True)]
    both = {name: spread(each) for name, each in turns.items()}
    figures = {name: each.figures(tokens, 1) for name, each in both.items()}
    micro = {name: round(cost[name] / cost["tokens"] * 1e6, 1) for name in ("loop", "client")}
    step = both["offline"].median / options.answer
    share = {name: round(value * 1e-6 * clients / step, 3) for name, value in micro.items()}
    return {
        "clients": clients, **figures, "overhead": round(median(pairs), 3), "us_a_token": micro, "of_a_step": share,
        "spreads": list(both.values()),
    }  # fmt: skip


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """The row, which is also printed."""
    header = ["clients", "offline tok/s", "server tok/s", "overhead", "loop us/token", "client us/token", "loop/step", "client/step"]
    shares = [f"{value:.1%}" for value in row["of_a_step"].values()]
    cells = [row["clients"], row["offline"]["rate"], row["server"]["rate"], f"{row['overhead']:.1%}", *row["us_a_token"].values(), *shares]
    print(table(header, [cells]), flush=True)
    return row


def first_token(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Milliseconds to the first token of a short request: alone, and while four long prompts are read."""
    given = {"dtype": options.dtype, "max_model_len": 4224, "max_num_seqs": 8, "num_blocks": 1200, "load_format": "dummy"}
    alone, loaded, urgent, whole, still = [], [], [], [], []  # still: long prompts that were being read when a short one had been answered
    with own_server(["--model", str(folder), *flags(given)]) as (url, _), asyncio.Runner() as runner:
        client = Client(url)

        async def short(seed: int, **more: Any) -> float:
            began = time.perf_counter()
            stream = await client.post("/v1/completions", body(prompts(1, 16, seed)[0], 1, **more))
            assert stream.error is None and stream.first is not None, stream.error
            return stream.first - began

        async def crowded(seed: int) -> None:
            began = time.perf_counter()
            long = [asyncio.create_task(client.post("/v1/completions", body(ids, 1))) for ids in prompts(4, 4096, seed)]
            await asyncio.sleep(0.5)
            for number in range(4):
                if number % 2:
                    loaded.append(await short(seed * 10 + number))
                else:
                    urgent.append(await short(seed * 10 + number, priority=-1))
                still.append(sum(not task.done() for task in long))
            streams = await asyncio.gather(*long)
            assert all(stream.error is None for stream in streams), streams[0].error
            whole.append(time.perf_counter() - began)

        for seed in range(4):
            runner.run(short(10**6 + seed))
        alone = [runner.run(short(10**7 + seed)) for seed in range(9)]
        for seed in range(1 + options.rounds // 3):
            runner.run(crowded(10**8 + seed))
        client.close()
    budget = 512
    step = median(whole) * budget / (4 * 4096)
    return {
        "alone_ms": round(median(alone) * 1000, 1), "loaded_ms": round(median(loaded) * 1000, 1), "worst_ms": round(max(loaded) * 1000, 1),
        "urgent_ms": [round(value * 1000, 1) for value in urgent],
        "still": still, "step_of_512_ms": round(step * 1000, 1), "four_prompts_s": round(median(whole), 2),
    }  # fmt: skip


def idle(seconds: float = 10.0) -> dict[str, Any]:
    """Processor seconds of a server of the bundled model that has worked and has nothing to do."""
    with own_server(["--num-blocks", "256"]) as (url, pid), asyncio.Runner() as runner:
        client = Client(url)
        runner.run(client.post("/v1/completions", body([5, 6, 7], 20)))
        warm_up = settle(pid)
        before = process_seconds(pid)
        time.sleep(seconds)
        spent = process_seconds(pid) - before
        client.close()
    return {"idle_cpu_s": round(spent, 3), "in_s": seconds, "warm_up_s": round(warm_up, 1)}


def settle(pid: int, most: float = 120.0) -> float:
    """Seconds until the process has done next to nothing for two of them: a server captures its usual steps while it is idle."""
    began, last = time.perf_counter(), process_seconds(pid)
    while time.perf_counter() - began < most:
        time.sleep(2.0)
        before, last = last, process_seconds(pid)
        if last - before < 0.1:
            return time.perf_counter() - began - 2.0
    raise RuntimeError(f"server_overhead: the server is still busy after {most:.0f} s without requests")


def ready(rounds: int) -> dict[str, Any]:
    """Seconds from the start of the process until it takes requests, with the bundled model; the first, which may be cold, is left out."""
    found = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        with own_server([]):
            found.append(time.perf_counter() - began)
    return {"ready_s": round(median(found[1:]), 2), "fastest_s": round(min(found[1:]), 2)}


def _pause() -> None:
    time.sleep(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="a server versus LLM offline")
    parser.add_argument("--what", default="overhead,first,idle,ready")
    parser.add_argument("--shape", choices=SHAPES, default="tiny160m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--clients", type=lambda text: [int(word) for word in text.split(",")], default=[16, 64])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--answer", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    what = options.what.split(",")
    with TemporaryDirectory() as root:
        folder = write_model(options.shape, Path(root) / options.shape)
        if "overhead" in what:
            for clients in options.clients:
                row = _told(overhead(options, folder, clients))
                spreads = row.pop("spreads")
                record("server_overhead", {"what": "overhead", "shape": options.shape, **row}, spreads)
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "first": partial(first_token, options, folder),
            "idle": idle,
            "ready": partial(ready, options.rounds),
        }
        for name, measure in measures.items():
            if name in what:
                before, figures, after = one_round(_pause), measure(), one_round(_pause)  # is the machine quiet?
                print(name, figures, flush=True)
                record("server_overhead", {"what": name, "shape": options.shape, **figures}, [spread([before, after])])


if __name__ == "__main__":
    main()
