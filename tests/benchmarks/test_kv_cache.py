"""The benchmark of KV caches: prompts that were never computed are found in the prefix cache, and a record becomes the page's table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import kv_cache
from benchmarks.compare.child import prompt
from benchmarks.figures import kv_caches
from benchmarks.shapes import SHAPES, write_config
from tinyvllm.engine.tools.stepping import Stepping

CONTEXT, BATCH = 150, 2
MICRO = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 1024, "head_dim": 32}  # fmt: skip


@pytest.fixture(scope="module")
def steppings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stepping]:
    model = write_config(SHAPES["tinyllama-1.1b"] | MICRO, tmp_path_factory.mktemp("micro"))
    opened = {name: kv_cache.open_engine(model, True, name, BATCH, CONTEXT + 80) for name in ("auto", "int4")}
    for stepping in opened.values():
        kv_cache.insert_prompts(stepping, [prompt(CONTEXT, b) for b in range(BATCH)])
    return opened


def test_prompts_are_found_without_being_computed(steppings: dict[str, Stepping]) -> None:
    for stepping in steppings.values():
        prefix, pool = stepping.engine.scheduler.prefix, stepping.engine.runner.pool
        blocks = [prefix.find(prefix.hash_blocks(prompt(CONTEXT, b))) for b in range(BATCH)]
        assert [len(each) for each in blocks] == [CONTEXT // 16] * BATCH and len({*blocks[0], *blocks[1]}) == BATCH * (CONTEXT // 16)
        contents, beginning = pool.read(blocks[0]), kv_cache.BEGINNING // 16
        assert contents.any(axis=1).all() and (contents[beginning : 2 * beginning] == contents[:beginning]).all()
        hits = prefix.hits
        stepping.begin([prompt(CONTEXT, b) for b in range(BATCH)])
        assert prefix.hits - hits == BATCH * (CONTEXT // 16) * 16
        stepping.stop()


def test_ratios_and_bytes_of_a_run(steppings: dict[str, Stepping]) -> None:
    run, spreads = kv_cache.measure(steppings, BATCH, CONTEXT, rounds=1)
    plain, packed = run["types"]["auto"], run["types"]["int4"]
    assert plain["kv_bytes"] == BATCH * CONTEXT * 2 * 2 * 2 * 32 * 2 and packed["kv_bytes"] == BATCH * CONTEXT * 2 * 2 * 2 * (16 + 2)
    assert plain["faster"] == plain["by_bytes"] == 1 and plain["weight_bytes"] == packed["weight_bytes"] > 0
    total = plain["weight_bytes"] + plain["kv_bytes"]
    assert packed["by_bytes"] == round(total / (packed["weight_bytes"] + packed["kv_bytes"]), 3) > 1
    assert len(spreads) == 2 and len(kv_cache.rows_of("BF16", run)[0]) == len(kv_cache.HEADER)


def test_a_record_is_a_row_of_the_page(tmp_path: Path) -> None:
    def figures(rate: float, faster: float, kv: int) -> dict[str, object]:
        return {"tok_s": {"rate": rate}, "weight_bytes": 200_000_000, "kv_bytes": kv, "faster": faster, "by_bytes": 1.5, "of_roof": 0.8}

    types = {"auto": figures(10.0, 1.0, 4_000_000), "int8": figures(14.0, 1.4, 2_000_000)}
    line = {"weights": "BF16", "context": 8192, "commit": "abc", "runs": [{"batch": 4, "types": types, "read_GBps": 50.0}]}
    older = line | {"runs": [], "commit": "old"}
    cells = [cell.strip() for cell in kv_caches([older, line]).splitlines()[-1].split("|")[1:-1]]
    assert cells == ["BF16, 4 x 8192", "200 + 4", "10.0", "14.0, 1.40 of 1.50", "50.0", "abc"]
