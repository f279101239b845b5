"""The roof is measured once a machine and kept; predicted times follow from it."""

from __future__ import annotations

import pytest

from tinyvllm.placement import Placement
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
    monkeypatch.setattr(
        roof, "_product_rates", lambda placement, format, size: note(f"{format} {size >> 20}", (5e10, 4e10, 3e10, 2e10, 1e10))
    )
    return done


def test_a_measured_roof_is_a_plausible_one(cache, monkeypatch):
    monkeypatch.setattr(roof, "SECONDS", 0.002)
    monkeypatch.setattr(roof, "SIDE", 256)
    monkeypatch.setattr(roof, "MIN_BYTES", 1 << 18)
    monkeypatch.setattr(roof, "read_bandwidth", lambda device: 1e10)
    found = measured_roof("CPU", ["BF16", "Q4_K"], 1)
    assert 0 < found.launch_seconds < 0.1
    for rate in found.products.values():
        assert len(rate.numbers_per_second) == len(roof.ROWS) and all(1e5 < each < 1e13 for each in rate.numbers_per_second)
        assert 1e7 < rate.operations_per_second < 1e15


def test_matrices_are_as_many_bytes_as_the_model_reads(monkeypatch):
    """Products of few rows, which are as slow as their matrices are read; of many rows one matrix will do."""
    monkeypatch.setattr(roof, "SIDE", 64)
    monkeypatch.setattr(roof, "_multiply", lambda placement, weights, rows: (len({id(weight) for weight in weights}), rows))
    monkeypatch.setattr(roof, "_seconds", lambda placement, captured: captured[0] * captured[1])
    rates = roof._product_rates(Placement("CPU"), "BF16", 5 * 64 * 64 * 2)
    assert rates == pytest.approx([64 * 64 / rows for rows in roof.ROWS])
    counts = []
    monkeypatch.setattr(roof, "_seconds", lambda placement, captured: counts.append(captured[0]) or 1.0)
    roof._product_rates(Placement("CPU"), "BF16", 5 * 64 * 64 * 2)
    assert counts == [5, 5, 5, 1, 1]


def test_the_best_of_the_first_processes_counts(cache, measured, monkeypatch):
    """Later ones measure only what is new."""
    for bandwidth in (1e10, 3e10, 2e10):
        monkeypatch.setattr(roof, "read_bandwidth", lambda device, bandwidth=bandwidth: measured.append("bandwidth") or bandwidth)
        found = measured_roof("CPU", ["BF16"])
    assert measured == ["bandwidth", "launch", "BF16 256"] * roof.PROCESSES and found.bandwidth == 3e10
    found = measured_roof("CPU", ["BF16", "Q8_0"])
    assert found.products.keys() == {"BF16", "Q8_0"} and measured[9:] == ["Q8_0 256"] and found.bandwidth == 3e10
    assert measured_roof("CPU", ["Q8_0"], again=True).bandwidth == 2e10
    assert measured[10:] == ["bandwidth", "launch", "Q8_0 256"]
    measured_roof("CPU", ["Q8_0"], 13 << 20)
    assert measured[13:] == ["bandwidth", "launch", "Q8_0 16"], "products that read less come from a cache"


def test_the_bandwidth_alone_is_kept_with_the_rest(cache, measured, monkeypatch):
    for bandwidth in (1e10, 3e10, 2e10, 5e10):
        monkeypatch.setattr(roof, "read_bandwidth", lambda device, nbytes=0, bandwidth=bandwidth: measured.append("bandwidth") or bandwidth)
        found = roof.measured_bandwidth("CPU")
    assert found == 3e10 and measured == ["bandwidth"] * roof.PROCESSES
    assert measured_roof("CPU", ["BF16"]).bandwidth == 3e10 and measured[roof.PROCESSES :] == ["launch", "BF16 256"]
    assert roof.measured_bandwidth("CPU") == 3e10


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
        b'{"KEY": {"bandwidth": {"rates": [-1.0], "processes": 9}, "BF16 256 MiB": {"rates": [1.0], "processes": 9}}}',
    ],
)  # fmt: skip
def test_a_file_that_is_not_sound_is_measured_again(cache, measured, content):
    key = roof._key(Placement("CPU")).encode()
    cache.write(roof.FILE, content.replace(b"KEY", key))
    assert measured_roof("CPU", ["BF16"]).bandwidth == 1e10 and len(measured) == 3


def test_a_rate_is_between_those_that_were_measured():
    rate = ProductRate((10.0, 8.0, 4.0, 2.0, 1.0))
    assert [rate.seconds(rows) for rows in roof.ROWS] == [0.1, 0.125, 0.25, 0.5, 1.0]
    assert rate.seconds(10) == pytest.approx((0.125 + 0.25) / 2) and rate.seconds(512) == 2.0
    assert rate.operations_per_second == 512


def test_a_row_reads_its_share_of_experts_and_many_rows_read_all():
    """One in eight experts: of four rows each reads others, of 64 all experts have eight rows each. Attention of no heads takes no time."""
    rate = ProductRate((1e10, 1e10, 5e9, 2e9, 1e9))
    times = StepTimes(Roof(1e11, 0.0, {"Q4_K": rate}), [Matrices("Q4_K", 8 * 10**9, 16 * 10**9, 0, 0.125)], 0, 1, 0)
    assert times.prompt(1) == pytest.approx(0.2) and times.prompt(4) == pytest.approx(0.8)
    assert times.prompt(64) == pytest.approx(16e9 * rate.seconds(8)) and times.prompt(64) > times.prompt(8) > times.prompt(4)


def test_times_are_numbers_of_matrices_by_their_rates():
    matrices = [Matrices("Q4_K", 8 * 10**9, 14 * 10**9, 10**9), Matrices("F32", 10**6, 0, 0)]
    rate = ProductRate((1e10, 1e10, 5e9, 2e9, 1e9))
    times = StepTimes(Roof(1e11, 1e-6, {"Q4_K": rate}), matrices, kv_token_bytes=10**5, layers=10, attention_width=1000)
    launches = 54e-6
    attention = 2 * 10 * 1000 * 1e6 / rate.operations_per_second
    assert times.prompt(1000, 500) - times.prompt(1000) == pytest.approx(attention)
    assert times.prompt(1000) == pytest.approx(13 * 1000 / 256 + 0.1 + attention + launches), "the head has one row"
