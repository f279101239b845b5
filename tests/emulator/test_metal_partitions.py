"""Merging partitions in attention_decode.metal: the emulator reports what would fail on a GPU whose stores arrive late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.emulator import emulate as emulator
from tests.emulator.emulate import EmulatorError, emulate
from tests.emulator.metal_snippets import run
from tests.kernels.calling import aligned
from tests.kernels.metal.test_attention import TOLERANCE, attention_shape
from tests.kernels.test_attention import Case, Shape, _ints, make, oracle
from tinyvllm.backends.metal import plan as records

Plant = Callable[..., None]
SEEDS = range(6)

STORE = "atomic_store_explicit(word, bits == 0 ? 0x80000000u : bits, memory_order_relaxed);"
WAIT = "while (bits == 0 && patience.tries > 0) {"
TAKE = "return atomic_exchange_explicit(word, 0u, memory_order_relaxed);"
RESET = "if (before == expected - 1) atomic_store_explicit(counter, 0u, memory_order_relaxed);"
COUNT = "  count_results(lasts, to, sequences, unit, thread_index);\n"
WRITE = "  write_results(to, merged, exchange, sequences, unit, partition, thread_index);\n"
READY = "threadgroup_barrier(mem_flags::mem_device);"


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Replaces text of kernels: pairs of a text that occurs once and its replacement."""
    shipped = emulator.kernel_text

    def plant(*pairs: tuple[str, str]) -> None:
        def changed(*arguments: object, **options: object) -> str:
            text = shipped(*arguments, **options)  # type: ignore[arg-type]
            for old, new in pairs:
                assert text.count(old) == 1, old
                text = text.replace(old, new)
            return text

        monkeypatch.setattr(emulator, "kernel_text", changed)

    return plant


TRIES = "constant constexpr int MAX_TRIES = 1 << 20;"
LOOK = "constant constexpr int TRIES_PER_LOOK = 1 << 10;"
FEW_TRIES = TRIES, TRIES.replace("1 << 20", "64")
FAULT = 1  # word of the scratch

CASE = make(Shape(H=3, K=1, D=32, S=8, dtype="BF16"), [1, 1, 1], [20, 61, 96])
WANT = oracle(CASE)


def launches(case: Case, seed: int, times: int = 2) -> list[np.ndarray]:
    """The outputs of `times` launches with one scratch buffer."""
    B = len(case.new)
    (kernel,), words = records.attention_decode("apple7", B, attention_shape(case), partition=32, simds=2)
    partial, outs = aligned((words,), np.uint32, 0), []
    for again in range(times):
        outs.append(aligned(case.q.shape, np.float32))
        ins = case.q, case.cache, case.tables, _ints(case.context), _ints([B])
        emulate(kernel, outs[-1], partial, *ins, seed=seed + again, resident=1 + seed % 4)
    return outs


def one_launch(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The output of a launch, and its scratch afterwards."""
    (kernel,), words = records.attention_decode("apple7", len(case.new), attention_shape(case), partition=32, simds=2)
    out, partial = aligned(case.q.shape, np.float32), aligned((words,), np.uint32, 0)
    ins = case.q, case.cache, case.tables, _ints(case.context), _ints([len(case.new)])
    emulate(kernel, out, partial, *ins, seed=seed, resident=1 + seed % 4)
    return out, partial


def test_the_kernel_is_right_in_any_order() -> None:
    for seed in SEEDS:
        first, second = launches(CASE, seed)
        np.testing.assert_allclose(first, WANT, **TOLERANCE)
        assert np.array_equal(first, second)


@pytest.mark.parametrize("how", ["counted before anything is stored", "stored without a barrier"])
def test_the_time_of_the_count_does_not_matter(plant: Plant, how: str) -> None:
    if how == "stored without a barrier":
        plant((READY, ""))
    else:
        plant((COUNT, ""), (WRITE, f"{COUNT}{WRITE}"))
    for seed in SEEDS:
        for out in launches(CASE, seed):
            np.testing.assert_allclose(out, WANT, **TOLERANCE)


def test_a_plain_store_is_a_race(plant: Plant) -> None:
    plant((STORE, "*(device uint *)word = bits == 0 ? 0x80000000u : bits;"))
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match="race.*block"):
            launches(CASE, seed)


def test_a_plain_load_is_a_race(plant: Plant) -> None:
    plant((TAKE, "const uint bits = *(device uint *)word; *(device uint *)word = 0; return bits;"))
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match="race.*block"):
            launches(CASE, seed)


def test_reading_once_is_wrong(plant: Plant) -> None:
    """The count says that stores were executed, not that they have arrived."""
    plant((WAIT, "while (false) {"))
    assert not all(np.allclose(out, WANT, **TOLERANCE) for seed in SEEDS for out in launches(CASE, seed))


@pytest.mark.parametrize("idle", ["or", "add", "sub", "xor"])
def test_a_read_modify_write_that_changes_nothing_may_stay_stale(plant: Plant, idle: str) -> None:
    """LLVM may make a load of it, which may return the same 0 for ever: the threadgroup gives up, and says so."""
    plant((TAKE, f"return atomic_fetch_{idle}_explicit(word, 0u, memory_order_relaxed);"), FEW_TRIES)
    faults = 0
    for seed in SEEDS:
        out, partial = one_launch(CASE, seed)
        gave_up = np.isnan(out).any()
        assert gave_up == bool(partial[FAULT]) and (gave_up or np.allclose(out, WANT, **TOLERANCE))
        faults += int(gave_up)
    assert faults > 0


def test_words_that_never_arrive_end_in_a_fault(plant: Plant) -> None:
    plant((STORE, "if (word == nullptr) " + STORE), FEW_TRIES)
    for seed in SEEDS:
        out, partial = one_launch(CASE, seed)
        assert partial[FAULT] == 1 and np.isnan(out[1:]).all() and np.allclose(out[:1], WANT[:1], **TOLERANCE)


def test_after_one_thread_has_given_up_the_others_wait_less(plant: Plant) -> None:
    counts: list[int] = []
    plant(
        (STORE, "if (word == nullptr) " + STORE), (TRIES, TRIES.replace("1 << 20", "1 << 10")), (LOOK, LOOK.replace("1 << 10", "MAX_LOOK"))
    )
    for look in (1 << 4, 1 << 20):
        (kernel,), words = records.attention_decode("apple7", 3, attention_shape(CASE), partition=32, simds=2)
        kernel = replace(kernel, defines=(*kernel.defines, ("MAX_LOOK", look)))
        ins = CASE.q, CASE.cache, CASE.tables, _ints(CASE.context), _ints([3])
        counts.append(emulate(kernel, aligned(CASE.q.shape, np.float32), aligned((words,), np.uint32, 0), *ins))
    assert counts[0] < counts[1] / 3, counts


def test_words_that_are_not_reset_are_taken_for_new_ones(plant: Plant) -> None:
    plant((TAKE, TAKE.replace("exchange_explicit(word, 0u, ", "load_explicit(word, ")))
    other = make(CASE.shape, CASE.new, CASE.context, seed=1)
    correct = []
    for seed in SEEDS:
        (kernel,), words = records.attention_decode("apple7", 3, attention_shape(CASE), partition=32, simds=2)
        out, partial = aligned(CASE.q.shape, np.float32), aligned((words,), np.uint32, 0)
        for case in (CASE, other):
            emulate(kernel, out, partial, case.q, case.cache, case.tables, _ints(case.context), _ints([3]), seed=seed)
        correct.append(np.allclose(out, oracle(other), **TOLERANCE))
    assert not all(correct)


def test_a_count_that_is_not_reset_has_no_last_threadgroup(plant: Plant) -> None:
    plant((RESET, ""))
    first, second = launches(CASE, seed=1)
    np.testing.assert_allclose(first, WANT, **TOLERANCE)
    assert np.isnan(second[1:]).all() and np.array_equal(first[:1], second[:1])


def test_a_stored_zero_would_be_waited_for_in_vain(plant: Plant) -> None:
    zeros = make(CASE.shape, [1], [61])
    zeros.cache[:, 1] = 0
    (out,) = launches(zeros, seed=1, times=1)
    assert not out.any()
    plant((STORE, "atomic_store_explicit(word, bits, memory_order_relaxed);"), FEW_TRIES)
    out, partial = one_launch(zeros, seed=1)
    assert np.isnan(out).all() and partial[FAULT] == 1


def test_a_relaxed_store_is_visible_at_once_in_its_own_threadgroup_and_late_in_others() -> None:
    text = """device atomic_uint *out) {
      device atomic_uint *words = out + group.x * 64, *count = out + 192;
      atomic_store_explicit(words + index, 7, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_device);
      if (atomic_load_explicit(words + 63 - index, memory_order_relaxed) != 7) atomic_store_explicit(out + 193, 1, memory_order_relaxed);
      if (index == 0) atomic_fetch_add_explicit(count, 1, memory_order_relaxed);
      if (index > 0 || group.x > 0) return;
      while (atomic_load_explicit(count, memory_order_relaxed) < 3) {}
      for (uint i = 0; i < 192; i++)
        if (atomic_load_explicit(out + i, memory_order_relaxed) != 7) atomic_fetch_add_explicit(out + 194, 1, memory_order_relaxed);
    }"""
    missed = 0
    for seed in SEEDS:
        words = np.zeros(195, np.uint32)
        run(text, words, grid=3, block=64, seed=seed)
        assert (words[:192] == 7).all() and words[193] == 0
        missed += int(words[194])
    assert missed > 0
