"""The cost curve on disk: kept from engine to engine, and whatever else is in its file costs a line of log and nothing more."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tinyvllm import LLM, SamplingParams
from tinyvllm.config.engine import EngineConfig
from tinyvllm.engine import kept_costs
from tinyvllm.engine.kept_costs import MAX_POINTS, MAX_ROWS, KeptCosts
from tinyvllm.placement import Placement
from tinyvllm.speculate.cost_curve import MIN_SAMPLES
from tinyvllm.storage import cache, folders


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(folders, "_logged", set())
    return tmp_path / "cache"


def kept(method: str = "suffix", threads: int = 2, **options: Any) -> KeptCosts:
    runner: Any = SimpleNamespace(
        config="4 layers of 256", weight_formats={"bf16"}, weight_layout="panels", dtype="bf16", placement=Placement("CPU"),
        architecture="avx512", variants=lambda: ["avx512", "ref"], num_threads=lambda: threads,
    )  # fmt: skip
    return KeptCosts(runner, EngineConfig("model", **options), method)


def learned(costs: KeptCosts) -> KeptCosts:
    for rows, drafts, seconds in ((1, 0, 0.25), (2, 0, 0.5), (2, 7, 0.75)):
        for _ in range(MIN_SAMPLES):
            costs.costs.observe(rows, drafts, seconds)
    return costs


def test_the_next_engine_begins_with_the_curve(folder):
    costs = kept()
    assert costs.costs.points() == {}
    learned(costs).save()
    assert kept().costs.points() == {(1, 0): 0.25, (2, 0): 0.5, (2, 7): 0.25}
    assert (folder / costs.place).stat().st_mode & 0o777 == 0o600


def test_drafts_that_cannot_pay_are_measured_again():
    costs = learned(kept())
    for drafts, seconds in ((1, 1.25), (2, 0.7), (3, 1.1)):
        for _ in range(MIN_SAMPLES):
            costs.costs.observe(1, drafts, seconds)
    costs.save()
    assert kept().costs.points().keys() == costs.costs.points().keys() - {(1, 1), (1, 3)}, "0.45 s for one step of 0.25 s, 0.85 s for three"


@pytest.mark.parametrize("other", [{"threads": 1}, {"method": "eagle3"}, {"kv_cache_dtype": "int8"}, {"block_size": 32}])
def test_what_times_depend_on_is_in_the_name(other):
    learned(kept()).save()
    assert kept(**other).costs.points() == {}


def test_another_version_measures_again(monkeypatch):
    learned(kept()).save()
    monkeypatch.setattr(kept_costs, "VERSION", "999")
    assert kept().costs.points() == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"[" * 100_000, "nested"),
        (b"[1, 2]", "numbers of rows"),
        (json.dumps({str(n + 1): 1.0 for n in range(MAX_POINTS + 1)}).encode(), f"at most {MAX_POINTS}"),
        (b'{"0": 1.0}', "1 to"),
        (b'{"-1": 1.0}', "1 to"),
        (json.dumps({str(MAX_ROWS + 1): 1.0}).encode(), "1 to"),
        (b'{"' + b"9" * 5000 + b'": 1.0}', "1 to"),
        ('{"\u0663": 1.0}'.encode(), "1 to"),
        (b'{"1+0": 1.0}', "1 to"),
        (b'{"1+": 1.0}', "1 to"),
        (b'{"1+2+3": 1.0}', "1 to"),
        (b'{"1": 0}', "more than 0"),
        (b'{"1": -1}', "more than 0"),
        (b'{"1": NaN}', "more than 0"),
        (b'{"1": 1e999}', "more than 0"),
        (b'{"1": true}', "more than 0"),
        (b'{"1": "1"}', "more than 0"),
        (b'{"1": [1]}', "more than 0"),
    ],
)
def test_content_that_is_no_curve_is_discarded_with_one_line(folder, caplog, content, message):
    place = kept().place
    assert cache.open_cache().write(place, content)
    with caplog.at_level(logging.WARNING, logger="tinyvllm"):
        assert kept().costs.points() == {}
    (record,) = caplog.records
    assert message in record.getMessage() and "built again" in record.getMessage() and "\n" not in record.getMessage()
    assert not (folder / place).exists()
    learned(kept()).save()
    assert kept().costs.points()


@pytest.mark.parametrize("damage", ["changed", "truncated", "link", "others can write"])
def test_a_damaged_file_is_not_believed(folder, caplog, damage):
    costs = kept()
    learned(costs).save()
    path = folder / costs.place
    data = path.read_bytes()
    match damage:
        case "changed":
            path.write_bytes(data.replace(b"0.25", b"0.35"))
        case "truncated":
            path.write_bytes(data[:-1])
        case "link":
            path.rename(folder / "elsewhere")
            path.symlink_to(folder / "elsewhere")
        case "others can write":
            path.chmod(0o666)
    with caplog.at_level(logging.WARNING, logger="tinyvllm"):
        assert kept().costs.points() == {}
    assert len(caplog.records) == 1 and "not used" in caplog.text


def test_engines_keep_it(folder):
    """What an engine has measured is there for the next one; without speculation nothing is read or written."""
    options: dict[str, Any] = {"device": "CPU", "max_model_len": 64, "max_num_seqs": 2}
    wanted = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    with LLM(**options, speculative_config="off") as llm:
        llm.generate([{"prompt_token_ids": [0, 11, 12]}], [wanted])
    assert not (folder / "costs").exists()
    with LLM(**options, speculative_config="auto") as llm:
        assert llm.engine._kept_costs.costs.points() == {}
        for _ in range(2):
            llm.generate([{"prompt_token_ids": [0, 11, 12, 13]}], [wanted])
        points = llm.engine._kept_costs.costs.points()
    assert (1, 0) in points
    with LLM(**options, speculative_config="auto") as llm:
        assert llm.engine._kept_costs.costs.points() == points
        assert llm.engine.speculation._controller.costs is llm.engine._kept_costs.costs
