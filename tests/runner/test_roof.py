"""The roof is measured once a machine and kept; predicted times follow from it."""

from __future__ import annotations

import pytest

from tinyvllm.runner import roof
from tinyvllm.runner.planned import Matrices, StepTimes
from tinyvllm.runner.roof import ProductRate, Roof, measured_roof
from tinyvllm.storage.cache import CacheFolder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> CacheFolder:
    folder = CacheFolder(tmp_path)
    monkeypatch.setattr(roof, "open_cache", lambda: folder)
    return folder


@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """What was measured, in its order."""
    done: list[str] = []

    def note(what: str, value: object) -> object:
        done.append(what)
        return value

    monkeypatch.setattr(roof, "read_bandwidth", lambda device: note("bandwidth", 1e10))
    monkeypatch.setattr(roof, "_launch_seconds", lambda placement: note("launch", 1e-6))
    monkeypatch.setattr(roof, "_product_rates", lambda placement, format: note(format, (2e10, 1e12)))
    return done


def test_a_measured_roof_is_a_plausible_one(cache, monkeypatch):
    monkeypatch.setattr(roof, "SECONDS", 0.002)
    monkeypatch.setattr(roof, "SIDE", 256)
    monkeypatch.setattr(roof, "read_bandwidth", lambda device: 1e10)
    found = measured_roof("CPU", ["BF16", "Q4_K"])
    assert 0 < found.launch_seconds < 0.1
    for rate in found.products.values():
        assert 1e5 < rate.bytes_per_second < 1e13 and 1e7 < rate.operations_per_second < 1e15


def test_the_best_of_the_first_processes_counts(cache, measured, monkeypatch):
    """Later ones measure only what is new."""
    for bandwidth in (1e10, 3e10, 2e10):
        monkeypatch.setattr(roof, "read_bandwidth", lambda device, bandwidth=bandwidth: measured.append("bandwidth") or bandwidth)
        found = measured_roof("CPU", ["BF16"])
    assert measured == ["bandwidth", "BF16", "launch"] * roof.PROCESSES and found.bandwidth == 3e10
    found = measured_roof("CPU", ["BF16", "Q8_0"])
    assert found.products.keys() == {"BF16", "Q8_0"} and measured[9:] == ["Q8_0"] and found.bandwidth == 3e10
    assert measured_roof("CPU", ["Q8_0"], again=True).bandwidth == 2e10
    assert measured[10:] == ["bandwidth", "Q8_0", "launch"]


def test_other_threads_are_another_machine(cache, measured, monkeypatch):
    for threads in range(1, roof.MAX_KEYS + 3):
        monkeypatch.setattr(roof, "num_threads_wanted", lambda threads=threads: threads)
        measured_roof("CPU", ["BF16"])
    assert measured.count("bandwidth") == roof.MAX_KEYS + 2
    assert len(roof._every(cache.read(roof.FILE))) == roof.MAX_KEYS


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[1]", b"{", b"[" * 10_000, b'{"KEY": 3}', b'{"KEY": {"bandwidth": -1.0}}', b'{"KEY": {"bandwidth": {"rates": [1.0]}}}',
        b'{"KEY": {"bandwidth": {"rates": [9e99, 1.0], "processes": 9}}}', b'{"KEY": {"bandwidth": {"rates": [NaN], "processes": 9}}}',
        b'{"KEY": {"bandwidth": {"rates": [-1.0], "processes": 9}, "BF16": {"rates": [1.0], "processes": 9}}}',
    ],
)  # fmt: skip
def test_a_file_that_is_not_sound_is_measured_again(cache, measured, content):
    from tinyvllm.placement import Placement

    key = roof._key(Placement("CPU")).encode()
    cache.write(roof.FILE, content.replace(b"KEY", key))
    assert measured_roof("CPU", ["BF16"]).bandwidth == 1e10 and len(measured) == 3


def test_times_are_bytes_and_operations_by_their_rates():
    matrices = [Matrices("Q4_K", 8 * 10**9, 14 * 10**9, 10**9), Matrices("F32", 10**6, 0, 0)]
    found = Roof(1e11, 1e-6, {"Q4_K": ProductRate(5e10, 1e13)})
    times = StepTimes(found, matrices, kv_token_bytes=10**5, layers=10, attention_width=1000)
    launches = 54e-6
    assert times.decode(1, 0) == pytest.approx(8e9 / 5e10 + 1e6 / 5e10 + launches), "unpacked from the cache more slowly than read"
    assert times.decode(1, 1000) - times.decode(1, 0) == pytest.approx(1000 * 1e5 / 1e11)
    assert times.decode(101, 0) == pytest.approx(2 * 14e9 * 100 / 1e13 + 1e6 / 5e10 + launches), "many rows multiply longer than they read"
    assert times.prompt(1000, 500) - times.prompt(1000) == pytest.approx(2 * 10 * 1000 * 1e6 / 1e13)
    assert times.prompt(1000) == pytest.approx(2 * 13e9 * 1000 / 1e13 + 1e6 / 5e10 + 2 * 10 * 1000 * 1e6 / 1e13 + launches)
