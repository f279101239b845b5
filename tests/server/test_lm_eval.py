"""lm-evaluation-harness, run as against any OpenAI server: its numbers are those of LLM.prompt_logits.

Runs where lm_eval is installed, best in an environment of its own: pip install "lm_eval[api]". `python -m tests.server.test_lm_eval`
prints the figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval")

from tests.server.conftest import Running, running
from tinyvllm import LLM, SamplingParams
from tinyvllm.server.core.config import ServerConfig

ROOT = Path(__file__).parents[2]
TASKS = ("endings", "perplexity", "stories")
TOLERANCE = 1e-4  # of sums of log-probabilities: the server's are computed in float32, numpy's here in float64


def harness(url: str, folder: Path, more: str = "") -> dict[str, list[dict[str, Any]]]:
    """The samples of each task, by task name."""
    arguments = f"model=demo,base_url={url}/v1/completions,max_length=1024,max_retries=1{more}"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    command += ["--include_path", "tests/server/lm_eval_task", "--tasks", ",".join(f"tinyvllm_{task}" for task in TASKS)]
    command += ["--log_samples", "--output_path", str(folder)]
    alone = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "no_proxy": "*"}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **alone}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for task in TASKS:
        (path,) = folder.rglob(f"samples_tinyvllm_{task}_*.jsonl")
        found[task] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def logprobs(llm: LLM, token_ids: list[int]) -> tuple[list[float], list[bool]]:
    """For every token except the first: its log-probability given the tokens before it, and whether it is the most probable one."""
    logits = llm.prompt_logits(token_ids)[:-1].astype(np.float64)
    peaks = logits.max(-1)
    normal = logits - (np.log(np.exp(logits - peaks[:, None]).sum(-1)) + peaks)[:, None]
    own = normal[np.arange(len(normal)), token_ids[1:]]
    return [float(value) for value in own], [bool(value) for value in own == normal.max(-1)]


def offline(llm: LLM, sample: dict[str, Any]) -> Iterator[tuple[float, bool]]:
    """The expected results of the harness: (log-probability, is greedy) of each text in this sample."""
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    for request in sample["arguments"].values():
        context = request["arg_0"] if "arg_1" in request else None
        text = request.get("arg_1", request["arg_0"])
        if context is None:
            before, whole = 1, [tokenizer.eos_ids[0], *tokenizer.encode(text, add_special_tokens=False)]
        else:
            whole = tokenizer.encode(context + text, add_special_tokens=False)
            before = len(tokenizer.encode(context, add_special_tokens=False))
        values, greedy = logprobs(llm, whole)
        yield sum(values[before - 1 :]), all(greedy[before - 1 :])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=128) as made:
        yield made


@pytest.fixture(scope="module")
def samples(server: Running, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return harness(server.url, tmp_path_factory.mktemp("harness"))


def test_probabilities_of_endings(llm: LLM, samples: dict[str, list[dict[str, Any]]]) -> None:
    """The harness uses the server's tokenizer over HTTP."""
    assert len(samples["endings"]) == 8
    for sample in samples["endings"]:
        told = [(float(value), greedy in (True, "True")) for value, greedy in (reply[0] for reply in sample["resps"])]
        right = list(offline(llm, sample))
        assert [greedy for _, greedy in told] == [greedy for _, greedy in right]
        assert [value for value, _ in told] == pytest.approx([value for value, _ in right], abs=TOLERANCE)


def test_probabilities_of_whole_texts(llm: LLM, samples: dict[str, list[dict[str, Any]]]) -> None:
    for sample in samples["perplexity"]:
        ((told,),) = sample["resps"]
        ((right, _),) = offline(llm, sample)
        assert float(told[0] if isinstance(told, list) else told) == pytest.approx(right, abs=TOLERANCE)


def test_texts(llm: LLM, samples: dict[str, list[dict[str, Any]]]) -> None:
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    for sample in samples["stories"]:
        ids = tokenizer.encode(sample["arguments"]["gen_args_0"]["arg_0"], add_special_tokens=False)
        params = SamplingParams(temperature=0.0, max_tokens=24, stop=[".", "\n"])
        (right,) = llm.generate({"prompt_token_ids": ids}, params)
        assert sample["resps"] == [[right.outputs[0].text]]


def main() -> None:
    import tempfile

    with LLM(num_blocks=128) as llm, running(ServerConfig(port=0, access_log=False)) as server, tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        samples = harness(server.url, Path(folder))
        print(f"{sum(map(len, samples.values()))} samples in {time.perf_counter() - began:.1f} s")
        gaps = []
        for sample in samples["endings"]:
            told = [float(reply[0][0]) for reply in sample["resps"]]
            right = [value for value, _ in offline(llm, sample)]
            gaps += [abs(a - b) for a, b in zip(told, right, strict=True)]
            print(sample["doc"]["story"][-40:], [f"{a:.4f} {b:.4f}" for a, b in zip(told, right, strict=True)])
        print(f"log-probabilities differ by {max(gaps):.1e} at most; accuracy {np.mean([s['acc'] for s in samples['endings']]):.3f}")


if __name__ == "__main__":
    main()
