"""What an engine counts, as a scraper reads it: names as documented, vLLM's buckets, numbers that add up."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tinyvllm.metrics import EnergyTotals, EngineMetrics, FinishedRequest, NoMetrics, StepStats, engine_metrics, registry_of, token_bounds

ROOT = Path(__file__).parents[1]
CACHE = {"block_size": 16, "num_gpu_blocks": 100}


def samples(registry) -> dict[tuple[str, frozenset], float]:
    """What the text of a scrape says, by name and labels; model_name and engine are left out."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (s.name, frozenset((k, v) for k, v in s.labels.items() if k not in ("model_name", "engine"))): s.value
        for family in families
        for s in family.samples
    }


def value(found: dict, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("tiny", cache_config=CACHE)


def test_the_page_lists_what_is_exported_and_no_more(metrics):
    metrics.energy = EnergyTotals(counters={"cpu package-0": 1.0}, not_measured={"gpu": "there is none"})
    page = (ROOT / "docs" / "metrics.md").read_text().partition("## Where the meaning differs")[0]
    listed = {(name, kind, labels) for name, kind, labels in re.findall(r"^\| `(\w+:\w+)` \| (\w+) \| ([^|]*?) ?\| ", page, re.MULTILINE)}
    families = list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))
    exported = set()
    for family in families:
        own = {label for sample in family.samples for label in sample.labels} - {"model_name", "engine", "le"}
        info = family.name == "vllm:cache_config_info"
        name = f"{family.name}_total" if family.type == "counter" else family.name
        exported.add((name, family.type, "the configuration" if info else ", ".join(sorted(own))))
    assert listed == exported
    del metrics.energy
    assert not [name for name, _ in samples(metrics.registry) if "energy" in name]
    missing = (ROOT / "docs" / "metrics.md").read_text().partition("## vLLM's names that are not here")[2]
    assert not {family.name for family in families} & set(re.findall(r"`(vllm:\w+?)(?:_total)?`", missing))


def test_a_step_is_counted(metrics):
    metrics.step(
        StepStats(
            schedule=3e-5, prepare=2e-4, run=4e-3, sample=1e-4, output=6e-5, running=3, waiting=5, deferred=1, prompt_tokens=40,
            generated_tokens=3, forced_tokens=1, queried_tokens=100, cached_tokens=60, blocks_used=10, blocks_cached=30, blocks_free=60,
            tokens_held=120, recomputed=1, swapped=2, swapped_out=1000, swapped_in=500, evictions=4,
            waits_first=[0.3], waits_next=[0.01, 0.02],
        )
    )  # fmt: skip
    metrics.step(StepStats(schedule=5e-5, running=2, generated_tokens=2, blocks_used=0, blocks_free=100, recomputed=1))
    found = samples(metrics.registry)
    assert value(found, "vllm:num_requests_running") == 2 and value(found, "vllm:generation_tokens_total") == 5
    assert value(found, "vllm:prompt_tokens_total") == 100
    assert value(found, "vllm:prompt_tokens_by_source_total", source="local_compute") == 40
    assert value(found, "vllm:prefix_cache_queries_total") == 100 and value(found, "vllm:prefix_cache_hits_total") == 60
    assert value(found, "vllm:num_preemptions_total") == 4 and value(found, "tinyvllm:preemptions_total", kind="swap") == 2
    assert value(found, "tinyvllm:swap_bytes_total", direction="out") == 1000
    assert value(found, "tinyvllm:prefix_cache_evictions_total") == 4 and value(found, "tinyvllm:forced_tokens_total") == 1
    assert value(found, "tinyvllm:step_seconds_sum", phase="schedule") == pytest.approx(8e-5)
    assert value(found, "tinyvllm:step_seconds_bucket", phase="schedule", le="5e-05") == 2
    assert value(found, "tinyvllm:step_seconds_bucket", phase="schedule", le="2e-05") == 0
    assert value(found, "vllm:iteration_tokens_total_bucket", le="32.0") == 1 and value(found, "vllm:iteration_tokens_total_count") == 2
    assert value(found, "vllm:time_to_first_token_seconds_bucket", le="0.5") == 1
    assert value(found, "vllm:inter_token_latency_seconds_bucket", le="0.01") == 1, "a value on a bound is below it"
    assert value(found, "vllm:inter_token_latency_seconds_bucket", le="0.025") == 2
    assert value(found, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.03)
    assert value(found, "vllm:kv_cache_usage_perc") == 0 and value(found, "tinyvllm:kv_fragmentation_ratio") == 0


def test_gauges_of_the_pool(metrics):
    metrics.step(StepStats(blocks_used=10, blocks_cached=30, blocks_free=60, tokens_held=120, waiting=5, deferred=2))
    found = samples(metrics.registry)
    assert value(found, "vllm:kv_cache_usage_perc") == pytest.approx(0.1)
    assert value(found, "tinyvllm:kv_fragmentation_ratio") == pytest.approx(0.25)
    assert value(found, "tinyvllm:block_pool_blocks", state="cached") == 30
    assert value(found, "vllm:num_requests_waiting_by_reason", reason="capacity") == 3
    assert value(found, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1


def test_requests_that_are_over(metrics):
    metrics.request_finished(
        FinishedRequest(10.0, 14.0, 10.5, 11.0, prompt_tokens=50, cached_tokens=32, generated=[4, 7], reasons=["stop", "length"], n=2,
                        max_tokens=7, preemptions=1)
    )  # fmt: skip
    metrics.request_finished(FinishedRequest(10.0, 10.2, prompt_tokens=8, generated=[0], reasons=["abort"]))
    metrics.rejected("max_num_queued_reqs")
    metrics.grammar_compiled(0.03)
    found = samples(metrics.registry)
    sums = {"e2e_request_latency": 4.2, "request_queue_time": 0.5, "request_inference_time": 3.5, "request_prefill_time": 0.5}
    sums |= {"request_decode_time": 3.0, "request_time_per_output_token": 0.5}
    for name, total in sums.items():
        assert value(found, f"vllm:{name}_seconds_sum") == pytest.approx(total), name
    assert value(found, "vllm:request_queue_time_seconds_count") == 1, "a request that never ran has no time in the queue"
    assert value(found, "vllm:request_generation_tokens_sum") == 11 and value(found, "vllm:request_max_num_generation_tokens_sum") == 7
    assert value(found, "vllm:request_prefill_kv_computed_tokens_sum") == 26 and value(found, "vllm:request_params_n_sum") == 3
    for reason, count in {"stop": 1, "length": 1, "abort": 1, "error": 0}.items():
        assert value(found, "vllm:request_success_total", finished_reason=reason) == count
    assert value(found, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1
    assert value(found, "tinyvllm:grammar_compile_seconds_bucket", le="0.05") == 1


def test_buckets_are_vllms(metrics):
    bounds = {}
    for (name, labels), _ in samples(metrics.registry).items():
        if name.endswith("_bucket"):
            bounds.setdefault(name.removesuffix("_bucket"), []).append(float(dict(labels)["le"]))
    whole = sorted(bounds["vllm:e2e_request_latency_seconds"])
    assert whole[:3] == [0.3, 0.5, 0.8] and len(whole) == 22
    assert len(bounds["vllm:time_to_first_token_seconds"]) == 23 and len(bounds["vllm:inter_token_latency_seconds"]) == 20
    assert token_bounds(100) == (1, 2, 5, 10, 20, 50, 100) and token_bounds(60) == (1, 2, 5, 10, 20, 50)


def test_several_engines_under_one_name():
    engines = [EngineMetrics("a"), EngineMetrics("b", "1")]
    engines[1].step(StepStats(generated_tokens=7))
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(registry_of(engines)).decode())}
    found = {s.labels["model_name"]: s.value for s in families["vllm:generation_tokens"].samples}
    assert found == {"a": 0, "b": 7}


def test_without_the_package_the_engine_counts_nothing(monkeypatch):
    assert isinstance(engine_metrics("m"), EngineMetrics)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    none = engine_metrics("m")
    none.step(StepStats())
    none.request_finished(FinishedRequest(0, 1))
    none.rejected("deadline")
    none.grammar_compiled(0.1)
    public = {name for name in dir(EngineMetrics) if not name.startswith("_")}
    assert none.registry is None and public == {name for name in dir(NoMetrics) if not name.startswith("_")}


def test_importing_it_imports_no_prometheus():
    code = "import sys, tinyvllm.metrics; m = tinyvllm.metrics.EngineMetrics('m'); m.step(tinyvllm.metrics.StepStats()); " \
           "sys.exit('prometheus_client' in sys.modules)"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
