"""The room below tinygrad's surface: host access to buffers, stores through an index, aliases, kernels as nodes, capture, what is kept."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tinyvllm.backends.cpu.toolchain import cpu_features
from tinyvllm.backends.kernel import Kernel

COPY = Kernel("kv_copy", "cpu", "plain", (("BLOCK_BYTES", 64),), 1, 2)  # pool[to] = pool[from], sixteen int32 a block


def realized(array):
    from tinygrad import Tensor

    return Tensor(array).contiguous().realize()


def test_upload_and_download_keep_the_buffer():
    from tinyvllm.bridge import download, upload

    tensor = realized(np.zeros((4, 10), np.int32))
    buffer = tensor.uop.buffer
    upload(tensor, np.arange(5, dtype=np.int32), start=20)
    expected = np.zeros(40, np.int32)
    expected[20:25] = np.arange(5)
    np.testing.assert_array_equal(download(tensor), expected.reshape(4, 10))
    assert tensor.uop.buffer is buffer
    with pytest.raises(ValueError, match="do not fit"):
        upload(tensor, np.zeros(21, np.int32), start=20)
    with pytest.raises(ValueError, match="do not fit"):
        upload(tensor, np.zeros(4, np.int64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_store_kv_writes_its_rows_and_no_other(dtype):
    from tinygrad import Tensor, dtypes

    from tinyvllm.batch import LayerCache
    from tinyvllm.bridge import alias, store_kv

    P, K, S, D, T = 5, 2, 4, 8, 3
    random, slots = np.random.default_rng(0), np.array([17, 2, 11], np.int32)
    pool = Tensor(random.standard_normal((P, 2, K, S, D)).astype(np.float32)).cast(getattr(dtypes, dtype)).contiguous().realize()
    expected = pool.float().numpy()
    k, v = (Tensor(random.standard_normal((T, K, D)).astype(np.float32)).cast(getattr(dtypes, dtype)).float().realize() for _ in range(2))
    written = store_kv(LayerCache(pool, alias(pool)), k, v, realized(slots))
    Tensor.realize(*written)
    for t, slot in enumerate(slots):
        expected[slot // S, 0, :, slot % S], expected[slot // S, 1, :, slot % S] = k.numpy()[t], v.numpy()[t]
    np.testing.assert_array_equal(pool.float().numpy(), expected)


def test_scatter_add_counts_repeated_cells():
    from tinyvllm.bridge import download, scatter_add

    table = realized(np.zeros((3, 4), np.int32))
    rows, columns = realized(np.array([1, 1, 2], np.int32)), realized(np.array([3, 3, 0], np.int32))
    scatter_add(table, rows, columns).realize()
    expected = np.zeros((3, 4), np.int32)
    expected[1, 3], expected[2, 0] = 2, 1
    np.testing.assert_array_equal(download(table), expected)


def test_captured_replays_on_changed_buffers_arguments_and_variables():
    from tinyvllm.bridge import Captured, download, upload

    calls, held = [], realized(np.arange(8, dtype=np.float32))

    def function(x, n):
        calls.append(1)
        return (held[:n].sum() + x).contiguous().realize()

    step = Captured(function, {"n": (1, 8)})
    x, y = realized(np.array([100.0], np.float32)), realized(np.array([200.0], np.float32))
    assert download(step(x, n=3)).item() == 103
    assert download(step(x, n=5)).item() == 110
    assert download(step(y, n=1)).item() == 200
    upload(held, np.ones(8, np.float32))
    assert download(step(y, n=8)).item() == 208
    assert len(calls) == 1, "captured at the first call and never run again"


def test_captured_steps_share_the_memory_of_what_they_compute_on_the_way(monkeypatch):
    """One that is too small is not taken; results are their own, however replays take turns."""
    import gc

    from tinyvllm.bridge import Captured, arena, download, upload_parts

    monkeypatch.setattr(arena, "_arenas", [])  # other tests have theirs
    steps, inputs = [], []
    for count in (300, 50_000, 40_000):
        x = realized(np.arange(count, dtype=np.float32))
        steps.append(Captured(lambda x: ((x + 1).contiguous().realize() * (x + 2).contiguous().realize()).sum().contiguous().realize()))
        inputs.append(x)
    for _ in range(2):
        results = [step(x) for step, x in zip(steps, inputs, strict=True)]
        for x, result in zip(inputs, results, strict=True):
            numbers = np.arange(x.numel(), dtype=np.float64)
            assert download(result).item() == pytest.approx(((numbers + 1) * (numbers + 2)).sum(), rel=1e-4)
        upload_parts(inputs[0], np.arange(300, dtype=np.float32), [(0, 300)])
    new = [ref() for ref in arena._arenas]
    assert len(new) == 2 and max(arena.arg for arena in new) >= 2 * 50_000 * 4, "one for the last two"
    del steps, new
    gc.collect()
    assert not any(ref() for ref in arena._arenas), "it goes with the last that uses it"


def test_spans_are_the_same_memory():
    from tinyvllm.bridge import download, spans, upload

    whole = realized(np.arange(48, dtype=np.int32))
    first, second = spans(whole, [(0, 16), (32, 3)])
    assert download(second).tolist() == [32, 33, 34] and first.shape == (16,)
    upload(whole, np.array([7, 8, 9], np.int32), start=32)
    assert (second + 1).numpy().tolist() == [8, 9, 10], "read by a kernel, too"
    upload(first, np.full(16, 5, np.int32))
    assert download(whole)[:17].tolist() == [5] * 16 + [16]


# --- hand-written kernels


def pool_of(blocks):
    return np.arange(blocks, dtype=np.int32)[:, None].repeat(16, 1)


def copy_block(pool, source, to):
    from tinyvllm.backends.launch import launch

    return launch(COPY, [pool], [realized(np.array([[source, to]], np.int32)), realized(np.array([1], np.int32))])[0]


def test_launches_keep_the_order_of_what_they_write_in_place():
    pool = realized(pool_of(5))
    doubled = copy_block(pool, 0, 1)
    swapped = copy_block(copy_block(doubled, 2, 3), 1, 2)  # 2 must have been read before it is written
    assert (swapped * 10).numpy()[:, 0].tolist() == [0, 0, 0, 20, 40]
    assert pool.numpy()[:, 0].tolist() == [0, 0, 0, 2, 4], "the buffer itself"


def test_a_kernel_reads_what_tinygrad_has_yet_to_compute():
    from tinyvllm.backends.launch import launch

    numbers = realized(np.arange(4, dtype=np.int32))
    pairs, count = (numbers[:2].reshape(1, 2) + 1).contiguous(), (numbers[1:2] * 1).contiguous()
    (out,) = launch(COPY, [realized(2 * pool_of(4) + 1)], [pairs, count])
    assert (out.sum(1) + 1).numpy().tolist() == [17, 49, 49, 113]


def test_the_number_of_tensors_is_checked():
    from tinyvllm.backends.launch import launch, run_now

    pool, pairs, count = realized(pool_of(2)), realized(np.zeros((1, 2), np.int32)), realized(np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="kv_copy writes 1 and reads 2 tensors, got 1 and 1"):
        launch(COPY, [pool], [pairs])
    with pytest.raises(ValueError, match="got 2 and 2"):
        launch(COPY, [pool, pool], [pairs, count])
    with pytest.raises(ValueError, match="kv_copy takes 3 contiguous arrays"):
        run_now(COPY, pool_of(2), np.zeros((1, 2), np.int32))
    with pytest.raises(ValueError, match="contiguous"):
        run_now(COPY, pool_of(2).T, np.zeros((1, 2), np.int32), np.zeros(1, np.int32))


@pytest.mark.parametrize("name", ["run_now", "run_alone"])
def test_a_kernel_on_host_memory_has_run_on_return(name):
    from tinyvllm.backends import launch

    run = getattr(launch, name)
    for _ in range(3):  # the second finds no leftovers of the first
        pool = pool_of(6)
        run(COPY, pool, np.array([[0, 5], [1, 4], [2, 3]], np.int32), np.array([3], np.int32))
        assert pool[:, 0].tolist() == [0, 1, 2, 2, 1, 0]


def test_a_kernel_outside_a_step_resets_its_counters():
    """Units are counted in shared words; a kernel that runs outside a captured step must reset them."""
    for _ in range(3):
        pool = realized(pool_of(4))
        assert copy_block(pool, 3, 0).numpy()[:, 0].tolist() == [3, 1, 2, 3]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_captured_step_mixes_kernels_of_both_kinds(monkeypatch, num_threads):
    """Generated, hand-written, generated, and again; with arguments and buffers that change between the replays."""
    from tinyvllm.backends.cpu import graph
    from tinyvllm.backends.cpu.threads import ThreadPool
    from tinyvllm.backends.launch import launch
    from tinyvllm.bridge import Captured, download, upload

    threads = ThreadPool(num_threads)
    monkeypatch.setattr(graph, "thread_pool", lambda: threads)
    pool, pairs, count = realized(pool_of(8)), realized(np.array([[0, 7], [1, 6], [2, 5]], np.int32)), realized(np.array([3], np.int32))

    def function(x):
        fresh = pool.assign(x.reshape(8, 1) + pool * 0).realize()
        (copied,) = launch(COPY, [fresh], [pairs, count])
        return (copied.sum(1) + x).contiguous().realize()

    step = Captured(function)
    for start in (0, 100, 200):
        x = realized(np.arange(start, start + 8, dtype=np.int32))
        blocks = np.arange(start, start + 8)
        blocks[[7, 6, 5]] = blocks[[0, 1, 2]]
        assert download(step(x)).tolist() == (16 * blocks + np.arange(start, start + 8)).tolist()
    upload(count, np.array([1], np.int32))
    assert download(step(x)).tolist()[5:] == [17 * 205, 17 * 206, 16 * 200 + 207]
    assert len(threads._threads) == num_threads - 1, "this pool ran it"
    threads.dismiss()


def counter():
    """A captured step that adds n to a cell of its own and counts itself in another."""
    from tinyvllm.bridge import Captured

    total, steps = realized(np.zeros(1, np.int32)), realized(np.zeros(1, np.int32))

    def function(x, n=1):
        steps.assign(steps + 1).realize()
        return total.assign(total + x * n).realize()

    return Captured(function, {"n": (1, 9)}), total, steps


def test_repeat_is_as_many_calls():
    from tinyvllm.bridge import download, repeat

    (first, total, steps), (second, other, _) = counter(), counter()
    x, y = realized(np.array([1], np.int32)), realized(np.array([100], np.int32))
    first(x, n=1)
    second(x, n=1)
    assert all(captured._graph is not None for captured in (first, second)), "one list, with no way back to Python"
    running = repeat([(first, (x,), {"n": 3}), (second, (y,), {"n": 2})], 5)
    while not running.wait():
        pass
    assert download(total).item() == 1 + 5 * 3 and download(steps).item() == 6 and download(other).item() == 1 + 5 * 200
    running = repeat([(first, (x,), {"n": 3})], 0)
    while not running.wait():
        pass
    assert download(steps).item() == 6


def test_an_idle_device_is_waited_for_once(monkeypatch):
    """tinygrad's own wait takes as long as some kernels of a step, and each copy made one."""
    from tinyvllm.bridge import download, opened_device, synchronize

    waits = []
    wait = opened_device("CPU").synchronize
    monkeypatch.setattr(opened_device("CPU"), "synchronize", lambda *values: waits.append(1) or wait(*values))
    x = realized(np.arange(8, dtype=np.int32))
    (x + 1).realize()
    synchronize("CPU")
    before = len(waits)
    assert before > 0, "something was launched"
    synchronize("CPU")
    assert download(x).tolist() == list(range(8)) and len(waits) == before


def test_repeat_continues_from_what_the_previous_call_wrote():
    """a reads what b wrote, and b what a wrote: only the order a, b, a, b gives these numbers."""
    from tinyvllm.bridge import Captured, download, repeat

    cells = realized(np.array([1], np.int32)), realized(np.array([0], np.int32))

    def add():
        return cells[0].assign(cells[0] + cells[1] + 1).realize()

    def double():
        return cells[1].assign(cells[0] * 2).realize()

    calls = [(Captured(add), (), {}), (Captured(double), (), {})]
    a, b = 1, 0
    for captured, _, _ in calls:
        captured()
    a, b = a + b + 1, 2 * (a + b + 1)
    running = repeat(calls, 4)
    while not running.wait():
        pass
    for _ in range(4):
        a = a + b + 1
        b = 2 * a
    assert [download(cell).item() for cell in cells] == [a, b]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_its_own_launcher():
    """The parent's thread does not exist in the child: a child that submitted work to it would wait forever."""
    code = (
        "import os\nfrom tinyvllm.bridge.capture import _launcher\n_launcher().submit(int).result(120)\n"
        "if os.fork() == 0:\n    os._exit(_launcher().submit(int, 7).result(120))\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]), _launcher().submit(int, 5).result(120))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "7 5\n", done.stderr


def test_debug_shows_a_kernels_work():
    code = (
        "import numpy as np\nfrom tinyvllm.config.switches import cache_folder\nfrom tinyvllm.runner.device import start_device\n"
        "start_device('CPU', cache_folder())\nfrom tests.ops.inputs import *\nfrom tinyvllm.ops.linear import linear\n"
        "linear(realized(numbers(4, 256)), packed('F32', 512, 256), int32(4)).realize().numpy()"
    )
    environ = os.environ | {"DEBUG": "2", "TINYVLLM_KERNELS": "matmul=plain"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "matmul_plain" in line]
    flops, low, high = re.search(r"\(\s*([\d.]+) GFLOPS\s+([\d.]+)\|([\d.]+)\s+GB/s", line).groups()
    assert float(flops) > 0 and float(low) > 0 and float(high) > 0, line


def test_uninitialized_gives_the_shapes_and_restores_tensor():
    from tinygrad import Tensor, nn

    from tinyvllm.bridge import uninitialized

    with uninitialized():
        layer = nn.Linear(8, 4, bias=False)
    assert layer.weight.shape == (4, 8)
    assert Tensor.zeros(2, 2).numpy().sum() == 0 and Tensor.ones(3).numpy().sum() == 3 and nn.Linear(2, 2).weight.numpy().any()


def test_programs_of_another_process_are_found_on_disk(tmp_path):
    """The second process compiles nothing: its kernel comes from the table, also with a compiler that cannot work."""
    code = (
        "import os\nfrom tinyvllm.backends.cpu.toolchain import compiler_command\n"
        "from tinyvllm.bridge import enable_program_cache, use_c_compiler\nenable_program_cache('this')\n"
        "use_c_compiler(compiler_command)\nfrom tinygrad import Tensor\n"
        "print((Tensor([1.0, 2.0, 3.0]).contiguous().realize() * 7).sum().item())"
    )
    environ = os.environ | {"TINYVLLM_CACHE": str(tmp_path), "CACHEDB": str(tmp_path / "none" / "cache.db"), "DEV": "CPU"}
    first = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    second = subprocess.run([sys.executable, "-c", code], env=environ | {"CC": "/bin/false"}, capture_output=True, text=True)
    assert first.stdout == second.stdout == "42.0\n", second.stderr
    assert not (tmp_path / "none").exists(), "tinygrad's own database is never opened"


def test_tinygrads_compiler_that_cannot_be_started_is_named(monkeypatch):
    from tinygrad.runtime.support.compiler_cpu import ClangJITCompiler

    from tinyvllm.errors import KernelError

    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(KernelError, match="/no/such/compiler cannot be started: No such file.*CC names another"):
        ClangJITCompiler(["x86_64", "native"]).compile_to_obj("void f(void) {}")


def test_a_buffer_that_is_collected_in_tinygrads_own_worker_does_not_stop_it():
    """Such a buffer (memory of ours, so that tinygrad does not keep it) used to make the worker wait for the end of its own work."""
    import threading

    from tinygrad import Device, Tensor

    from tinyvllm.bridge import synchronize

    device, memory, done = Device["CPU"], np.zeros(64, np.float32), threading.Event()
    tensors = [Tensor.from_blob(memory.ctypes.data, (64,), device="CPU")]
    tensors[0].uop.buffer.ensure_allocated()

    def collect(thread: int) -> None:
        tensors.clear()
        done.set()

    (tensors[0] + 1).realize()  # a task before it, so that the timeline has something to wait for
    device.hw_compute_queue_t().cmd(collect).signal(device.timeline_signal, device.next_timeline()).submit(device)
    assert done.wait(120), "the worker waits for itself"
    synchronize("CPU")


@pytest.mark.skipif(not {"avx2", "fma", "f16c"} <= cpu_features(), reason="needs a processor with AVX2")
def test_generated_kernels_move_bfloat16_without_the_compilers_library(monkeypatch):
    """clang rounds a selected `__bf16` by a call of __truncsfbf2 where there is no AVX512-BF16, and nothing links that."""
    from tinygrad import Tensor, dtypes, helpers

    monkeypatch.setattr(helpers.DEV, "_value", [helpers.Target.parse("CPU::x86_64,x86-64-v3")])
    values = np.array([[1.5, -2.0], [np.inf, 3.25], [-0.0, 7.0]], np.float32)
    table = Tensor(values, device="CPU").cast(dtypes.bfloat16).contiguous().realize()
    rows = Tensor([2, 0, 1, 2], device="CPU", dtype=dtypes.int32).realize()
    gathered = table[rows].contiguous().realize()
    np.testing.assert_array_equal(gathered.float().numpy(), values[[2, 0, 1, 2]])
    raised = (table == 3.25).where(Tensor(-1.5, dtype=dtypes.bfloat16, device="CPU"), table).contiguous().realize()
    np.testing.assert_array_equal(raised.float().numpy(), np.where(values == 3.25, -1.5, values))


def test_a_capture_that_fails_is_captured_by_the_next_call(monkeypatch):
    from tinygrad import Tensor

    from tinyvllm.backends.cpu.graph import CpuGraph
    from tinyvllm.bridge import Captured, capture_work, recover_device

    x = realized(np.arange(1000, dtype=np.float32))

    def function() -> Tensor:
        return (x * 2 + 1).contiguous().realize()

    def fail(self, *arguments, **named):
        raise MemoryError("no room for the graph")

    captured, before = Captured(function), capture_work().count
    with monkeypatch.context() as patch:
        patch.setattr(CpuGraph, "__init__", fail)
        with pytest.raises(MemoryError):
            captured()
    assert not captured.captured
    recover_device("CPU")
    np.testing.assert_array_equal(captured().numpy(), np.arange(1000) * 2 + 1)
    assert captured.captured and captured._graph is not None and capture_work().count == before + 2


def test_a_large_buffer_is_refused_before_the_system_would_kill_the_process(monkeypatch):
    from tinygrad import Tensor

    from tinyvllm import host_memory

    left = host_memory.Headroom(host_memory.RESERVE + (8 << 20), "the control group's memory.max is 1024 MiB")
    monkeypatch.setattr(host_memory, "headroom", lambda: left)
    with pytest.raises(MemoryError):
        Tensor.empty(16 << 20, dtype="uint8", device="CPU").uop.buffer.allocate()
    Tensor.empty(4 << 20, dtype="uint8", device="CPU").uop.buffer.allocate()


def test_the_cpu_device_works_again_after_its_worker_failed():
    from tinyvllm.bridge import opened_device, recover_device, synchronize

    device = opened_device("CPU")
    device.error_state = MemoryError("in the worker")
    device.timeline_value += 1  # a launch that was never signalled
    with pytest.raises(MemoryError):
        synchronize("CPU")
    recover_device("CPU")
    synchronize("CPU")
    np.testing.assert_array_equal((realized(np.arange(4, dtype=np.int32)) + 1).numpy(), [1, 2, 3, 4])


@pytest.mark.parametrize("stage", ["before it is scheduled", "while it is scheduled"])
def test_what_a_failed_capture_has_assigned_is_as_before(monkeypatch, stage):
    """An assignment changes the Tensor at once. One that never ran would become part of whatever reads the tensor next."""
    from tinygrad import Tensor

    from tinyvllm.bridge import Captured, download, upload

    state, step = realized(np.arange(4, dtype=np.int32)), realized(np.full(4, 10, np.int32))
    buffer, fails = state.uop, [True]

    def function():
        state.assign(state + step)
        if fails and stage == "before it is scheduled":
            raise MemoryError
        return state.realize()

    def out_of_memory(*tensors):
        raise MemoryError

    captured = Captured(function)
    with monkeypatch.context() as patch:
        if stage == "while it is scheduled":
            patch.setattr(Tensor, "linear_with_vars", out_of_memory)
        with pytest.raises(MemoryError):
            captured()
    fails.clear()
    assert state.uop is buffer and download(state).tolist() == [0, 1, 2, 3]
    upload(step, np.full(4, 100, np.int32))
    assert download(Captured(lambda: (state * 2).contiguous().realize())()).tolist() == [0, 2, 4, 6]
    for turn in (1, 2, 3):
        captured()
        assert download(state).tolist() == [100 * turn + i for i in range(4)]
