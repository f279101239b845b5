"""What a capture records: launches without tinygrad's scheduler, what they need computed first, and functions in several captures."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bridge.test_bridge import COPY, pool_of, realized


def copy_in(pool, pairs, count):
    from tinyvllm.backends.launch import launch

    return launch(COPY, [pool], [pairs, count])[0]


def constant(*numbers):
    return realized(np.array(numbers, np.int32))


def test_launches_of_a_capture_pass_the_scheduler(monkeypatch):
    """It took most of a capture's time, in proportion to the kernels."""
    from tinygrad import schedule, tensor

    from tinyvllm.bridge import Captured, download, upload

    scheduled = []
    create = schedule.create_linear_with_vars
    monkeypatch.setattr(tensor, "create_linear_with_vars", lambda sink: scheduled.append(1) or create(sink))
    pool, count = realized(pool_of(6)), constant(1)
    pairs = [constant(0, 1).reshape(1, 2), constant(1, 2).reshape(1, 2), constant(4, 1).reshape(1, 2)]

    def function():
        for pair in pairs:
            copied = copy_in(pool, pair, count)
        return copied

    scheduled.clear()
    step = Captured(function)
    assert download(step())[:, 0].tolist() == [0, 4, 0, 3, 4, 5], "in the order of the program, each once"
    assert not scheduled
    upload(pool, pool_of(6) * 10)
    assert download(step())[:, 0].tolist() == [0, 40, 0, 30, 40, 50]


def test_a_program_is_stripped_where_it_is_compiled():
    """tinygrad names it by all nodes that it has, and by the text of what it is estimated to cost."""
    import os

    from tinygrad import Tensor
    from tinygrad.uop.ops import Ops

    from tinyvllm.bridge.recording import recording

    with recording() as recorded:
        (Tensor.arange(os.getpid() % 1000 + 2000) * 3).contiguous().realize()  # a length that no test has compiled
    programs = [call.src[0] for call in recorded.calls if call.src[0].op is Ops.PROGRAM]
    assert programs and all(not program.src[0].src and not program.src[2].src for program in programs)


def test_what_a_launch_reads_is_computed_before_it():
    from tinyvllm.bridge import Captured, download

    pools, count, numbers = [realized(pool_of(4)) for _ in range(2)], constant(1), constant(0, 1)

    def function(x):
        pairs = (numbers * 2 + x).reshape(1, 2)  # not in a buffer yet
        results = [copy_in(pool, pairs, count) for pool in pools]
        return results[0], results[1]

    step = Captured(function)
    for x in (0, 1):
        for result in step(constant(x)):
            assert download(result)[x + 2, 0] == x


def test_an_expression_over_what_a_launch_changed_is_computed_again():
    """The two expressions are one node to tinygrad: the launch changed the buffer, and not what names it."""
    from tinyvllm.bridge import Captured, download

    numbers, other, count = constant(*range(32)).reshape(2, 16), realized(pool_of(64)), constant(1)
    pair = constant(1, 0).reshape(1, 2)

    def function():
        copy_in(other, numbers[0, :2].reshape(1, 2) + 0, count)  # block 0 to block 1
        copy_in(numbers, pair, count)  # the second row over the first
        return copy_in(other, numbers[0, :2].reshape(1, 2) + 0, count)  # block 16 to block 17

    assert download(Captured(function)())[[1, 17], 0].tolist() == [0, 16]


def test_an_output_that_is_not_in_a_buffer_is_computed_into_one():
    from tinyvllm.bridge import Captured, download

    pair, count = constant(0, 1).reshape(1, 2), constant(1)
    step = Captured(lambda x: tuple(copy_in(x * factor, pair, count) for factor in (2, 3)))
    x = realized(pool_of(2) + 1)
    for factor, result in zip((2, 3), step(x), strict=True):
        assert download(result)[:, 0].tolist() == [factor, factor]
    assert download(x)[:, 0].tolist() == [1, 2]


def test_a_generated_kernel_reads_what_launches_before_it_wrote():
    from tinyvllm.bridge import Captured, download, upload

    pool, count = realized(pool_of(4)), constant(1)

    def function(pairs):
        first = copy_in(pool, pairs, count).sum(1).contiguous().realize()
        second = copy_in(pool, pairs + 1, count).sum(1)
        return (first * 1000 + second).contiguous()

    step = Captured(function)
    for _ in range(2):
        upload(pool, pool_of(4))
        assert download(step(constant(0, 1).reshape(1, 2))).tolist() == [0, 0, 32000, 48048]
        pool_now = download(pool)[:, 0].tolist()
        assert pool_now == [0, 0, 0, 3]


def recorded_step(calls):
    from tinyvllm.bridge import Recorded

    pool, count = realized(pool_of(4)), constant(1)
    pairs = constant(3, 0).reshape(1, 2)

    @Recorded
    def forward():
        calls.append(1)
        return copy_in(pool, pairs, count), (pool.sum(1) * 2).contiguous()

    return forward, pool


def test_a_recorded_function_runs_once_for_all_captures_that_contain_it():
    from tinyvllm.bridge import Captured, download, upload

    calls = []
    forward, pool = recorded_step(calls)
    steps = [Captured(lambda factor=factor: (forward()[1] + factor).contiguous()) for factor in (1, 2, 3)] + [Captured(forward)]
    for start in (0, 10):
        for factor, step in enumerate(steps, 1):
            upload(pool, pool_of(4) + start)
            result = step()
            expected = [32 * (n + start) for n in (3, 1, 2, 3)]
            if factor < 4:
                assert download(result).tolist() == [n + factor for n in expected]
            else:
                assert download(result[1]).tolist() == expected and download(result[0])[0, 0] == 3 + start
    assert len(calls) == 1


def test_a_function_is_recorded_again_after_a_capture_has_failed(monkeypatch):
    """Its kernels may have been replaced by others; and what it recorded of a failed capture may be half of it."""
    from tinyvllm.backends.cpu.graph import CpuGraph
    from tinyvllm.bridge import Captured, download

    calls = []
    forward, pool = recorded_step(calls)
    step = Captured(lambda: (forward()[1] + 1).contiguous())
    with monkeypatch.context() as patch:
        patch.setattr(CpuGraph, "__init__", lambda self, *arguments, **named: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            step()
    assert len(calls) == 1
    assert download(step()).tolist() == [97, 33, 65, 97]
    assert len(calls) == 2


def test_a_capture_within_a_capture_is_an_error():
    from tinyvllm.bridge import Captured

    inner = Captured(lambda: (constant(1) + 1).contiguous())
    with pytest.raises(RuntimeError, match="capture within a capture"):
        Captured(lambda: inner())()


def test_a_function_that_launches_nothing_is_an_error():
    from tinyvllm.bridge import Captured

    with pytest.raises(ValueError, match="launches nothing"):
        Captured(lambda: None)()


def test_empty_is_tinygrads():
    from tinygrad import Tensor, dtypes

    from tinyvllm.bridge import empty

    for shape in ((), (1,), (7,), (3, 5), (1, 8, 1)):
        ours, theirs = empty(shape, dtypes.int32, "CPU"), Tensor.empty(*shape, dtype=dtypes.int32, device="CPU")
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
        assert ours.uop.op is theirs.uop.op and ours.uop.base.arg == theirs.uop.base.arg
        assert ours.uop.base is not empty(shape, dtypes.int32, "CPU").uop.base, "a buffer of its own"


def test_memory_that_a_view_reads_is_not_given_away():
    """Contiguous parts of a computed row are views of it, so it lives as long as they are read."""
    from tinyvllm.bridge import Captured, download

    numbers, pools, count = constant(*range(64)), [realized(pool_of(64)) for _ in range(4)], constant(1)

    def function(x):
        row = ((numbers + x) % 64).reshape(1, 64).contiguous()
        first, last = (row[:, at : at + 2].contiguous() for at in (0, 62))
        results = [copy_in(pools[0], first, count)]  # the last use of the row but through a view
        for i, pool in enumerate(pools[1:3]):
            other = ((numbers * 0 + x * 0 + 2 * i).reshape(1, 64) + 1).contiguous()
            results.append(copy_in(pool, other[:, :2] * 1 + constant(0, 1), count))
        results.append(copy_in(pools[3], last, count))  # blocks 62 + x to 63 + x
        return tuple(results)

    step = Captured(function)
    for x in (0, -1):
        results = step(constant(x))
    assert download(results[3])[62, 0] == 61 and download(results[3])[63, 0] == 62
