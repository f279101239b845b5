"""Ray Data: answers of JSON lines and Parquet, and a second run that computes what the first one lacks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray
ENGINE = {"max_model_len": 128, "max_num_seqs": 4, "num_blocks": 64}
SAMPLING = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    environment = {"TINYVLLM_THREADS": "1", "TINYVLLM_SELFTEST": "off", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False, runtime_env={"env_vars": environment})
    yield
    ray.shutdown()


def answers(folder: Path) -> dict[int, dict]:
    lines = [json.loads(line) for path in folder.glob("part-*.jsonl") for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line for line in lines}


def test_answers_and_resume(tmp_path: Path) -> None:
    from tinyvllm import LLM, SamplingParams
    from tinyvllm.errors import ArgumentError, OutputError
    from tinyvllm.integrations.ray_data import generate

    rows = [{"id": i, "prompt": f"Once upon a time {i}"} for i in range(10)]
    rows[3]["prompt"] = "word " * 400  # longer than the context
    source, folder = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"engine": ENGINE, "sampling": SAMPLING, "batch_size": 4}
    assert generate(str(source), str(folder), **given) == 10
    found = answers(folder)
    assert sorted(found) == list(range(10)) and found[3]["error"] and "text" not in found[3]
    with LLM(**ENGINE) as llm:
        assert found[0]["text"] == llm.generate(rows[0]["prompt"], SamplingParams(**SAMPLING))[0].outputs[0].text
    assert generate(str(source), str(folder), **given) == 0
    lost = sorted(folder.glob("part-*.jsonl"))[0]
    missing = len(lost.read_text().splitlines())
    lost.unlink()
    assert generate(str(source), str(folder), **given) == missing and answers(folder) == found
    with pytest.raises(ArgumentError, match="no column 'name'"):
        generate(str(source), str(folder), key="name")
    lost.write_text("{}\n")
    with pytest.raises(OutputError, match="is no answer with the key 'id'"):
        generate(str(source), str(folder), **given)


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    from tinyvllm.integrations.ray_data import generate

    table = {"id": [1, 2], "prompt_token_ids": [[5, 6, 7], [8, 9]]}
    parquet.write_table(pyarrow.table(table), tmp_path / "in.parquet")
    assert generate(str(tmp_path / "in.parquet"), str(tmp_path / "out"), engine=ENGINE, sampling=SAMPLING) == 2
    assert {i: one["prompt_tokens"] for i, one in answers(tmp_path / "out").items()} == {1: 3, 2: 2}
