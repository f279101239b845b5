"""tinygrad's CUDA device, the CUDA graph, launches and copies on the emulated driver; and that the driver detects errors."""

from __future__ import annotations

import ctypes
import gc
import threading
from concurrent.futures import wait

import numpy as np
import pytest

from tests.emulator.driver import Driver, cuda_device
from tinyvllm.backends.kernel import Kernel
from tinyvllm.bridge import prefer_device
from tinyvllm.config.switches import cache_folder
from tinyvllm.errors import KernelError
from tinyvllm.runner.device import start_device

SHARED = 60 << 10  # bytes: more than a launch may have without the function's attribute

# out[i] = x[n - 1 - i] through the far end of dynamic shared memory, n = count[0]; then total[0] += n
REVERSE = """
#include "gpu.cuh"
extern "C" __global__ void __launch_bounds__(32) planted_reverse(int *out, int *total, const int *x, const int *count) {
  await_previous();
  DYNAMIC_SHARED(bytes);
  int *stored = (int *)(bytes + SHARED) - 32, n = count[0], i = threadIdx.x;
  if (i < n) stored[i] = x[i];
  __syncthreads();
  if (i < n) out[i] = stored[n - 1 - i];
  if (i == 0) total[0] += n;
}
"""


@pytest.fixture(scope="module", autouse=True)
def cpu() -> None:
    start_device("CPU", cache_folder())


@pytest.fixture(params=[0, 1])
def driver(request, monkeypatch, tmp_path):
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/planted_reverse.cu").write_text(REVERSE)
    monkeypatch.setattr("tinyvllm.backends.source.kernels_folder", lambda: tmp_path)
    with cuda_device(seed=request.param, capacity=16 << 20) as driver:
        yield driver


def on_device(array):
    from tinygrad import Tensor

    return Tensor(array, device="CUDA").contiguous().realize()


def reverse(out, total, x, count, shared=SHARED):
    from tinyvllm.backends.launch import launch

    return launch(Kernel.cuda("planted_reverse", "sm_80", 2, 2, (1, 1, 1), 32, shared, SHARED=shared), [out, total], [x, count])


def integers(*values):
    return on_device(np.array(values, np.int32))


# --- tinygrad


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tinygrad_computes(driver, dtype):
    from tinygrad import Tensor, dtypes

    random = np.random.default_rng(0)
    a, b = random.standard_normal((5, 48)).astype(np.float32), random.standard_normal((48, 7)).astype(np.float32)
    x, y = (on_device(m).cast(getattr(dtypes, dtype)).realize() for m in (a, b))
    product = (x.float() @ y.float() + 1).softmax().cast(getattr(dtypes, dtype))
    expected = x.float().numpy() @ y.float().numpy() + 1
    expected = np.exp(expected - expected.max(1, keepdims=True))
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(product.float().numpy(), expected, rtol=1e-5, atol=1e-5 if dtype == "float32" else 5e-3)
    assert isinstance(product, Tensor) and driver.counts["cuLaunchKernel"] > 2


def test_binaries_are_not_printed_by_debugging(driver):
    from tinygrad import Context, Device

    assert not Device["CUDA"].renderer.compiler.ptx, "an older driver would not accept the PTX"
    with Context(DEBUG=5):
        assert (integers(1, 2) * 3).numpy().tolist() == [3, 6]
        assert reverse(integers(0, 0), integers(0), integers(1, 2), integers(2))[0].numpy().tolist() == [2, 1]


def test_memory_runs_out_as_on_a_gpu(driver):
    from tinygrad import Tensor

    with pytest.raises(MemoryError, match="failed on CUDA"):
        Tensor.empty(32 << 20, dtype="uint8", device="CUDA").uop.buffer.ensure_allocated()


# --- copies


def test_upload_download_and_spans(driver):
    from tinyvllm.bridge import download, peek, spans, upload

    whole = on_device(np.arange(48, dtype=np.int32))
    first, second = spans(whole, [(0, 16), (32, 3)])
    upload(whole, np.array([7, 8, 9], np.int32), start=32)
    upload(first, np.full(16, 5, np.int32))
    assert (second + 1).numpy().tolist() == [8, 9, 10] and peek(second).tolist() == [7, 8, 9]
    assert download(whole).tolist() == [5] * 16 + list(range(16, 32)) + [7, 8, 9] + list(range(35, 48))
    big = np.random.default_rng(0).integers(0, 99, 5 << 18, np.int32)  # larger than a segment of the ring
    assert (download(on_device(big)) == big).all()


def test_uploads_are_ordered_and_do_not_wait(driver):
    """The host's array changes right after each upload, and the ring wraps around several times; each kernel sees the upload before it."""
    from tinyvllm.bridge import download, upload

    x, sums = on_device(np.zeros(1 << 18, np.int32)), []
    pinned, before = len(driver.pinned), driver.counts.copy()  # the ring is allocated, blocks for reading are not
    array = np.empty(1 << 18, np.int32)  # 1 MiB
    for i in range(20):
        array[:] = i
        upload(x, array)
        sums.append(x[i :: 1 << 17].sum().contiguous().realize())
    spent = driver.counts - before
    assert spent["cuCtxSynchronize"] == 0 and spent["cuMemcpyHtoDAsync_v2"] == 20
    assert [download(s).item() for s in sums] == [2 * i for i in range(20)]
    assert len(driver.pinned) <= pinned + 1, "pinned memory does not grow with the number of uploads"


@pytest.mark.parametrize("threads", [1, 3])
def test_a_large_upload_is_read_by_several_threads(driver, monkeypatch, threads):
    """Its segments arrive in their places, between the launches that it was between, and the host's array may change at once."""
    from tinyvllm.backends.cuda import copies as copies_module
    from tinyvllm.backends.cuda import driver as cuda_driver
    from tinyvllm.bridge import download, upload

    copies, move, movers = cuda_driver.copies_of("CUDA"), ctypes.memmove, []
    monkeypatch.setattr(copies, "_threads", threads)
    monkeypatch.setattr(ctypes, "memmove", lambda *arguments: movers.append(threading.current_thread().name) or move(*arguments))
    monkeypatch.setattr(copies_module, "SEGMENT_BYTES", 1 << 18)  # the ring is 2 MiB
    monkeypatch.setattr(copies, "_ring", [])
    size = (3 << 18) + 77  # int32: 3 MiB, more than the ring
    x, few, sums = on_device(np.zeros(size, np.int32)), on_device(np.zeros(8, np.int32)), []
    array, expected = np.arange(size, dtype=np.int32), []
    for turn in range(3):
        array += turn
        upload(few, np.full(8, turn, np.int32))  # a part of a segment between two large ones
        upload(x, array)
        sums.append(x[turn :: 1 << 17].sum().contiguous().realize() + few.sum())
        expected.append(int(array[turn :: 1 << 17].sum()) + 8 * turn)
    assert (download(x) == array).all()
    array[:] = -1
    assert [total.item() for total in sums[-1:]] == expected[-1:]
    assert {name.startswith("tinyvllm-upload") for name in movers} == ({False} if threads == 1 else {True, False})


def test_a_large_upload_that_fails_leaves_no_thread_reading_the_array(driver, monkeypatch):
    from tinyvllm.backends.cuda import copies as copies_module
    from tinyvllm.backends.cuda import driver as cuda_driver
    from tinyvllm.bridge import upload

    copies, move, running = cuda_driver.copies_of("CUDA"), ctypes.memmove, []
    monkeypatch.setattr(copies, "_threads", 3)
    x = on_device(np.zeros(2 << 20, np.int32))
    gate, ended = threading.Event(), []

    def slow(place, source, count):
        if not threading.current_thread().name.startswith("tinyvllm-upload"):
            return move(place, source, count)
        running.append(1)
        if len(running) > 1:
            gate.wait(20)
        ended.append(move(place, source, count))

    def await_fills(fills):  # until it is called, only the first thread has read its part
        gate.set()
        return wait(fills)

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "memmove", slow)
        patch.setattr(copies_module, "wait", await_fills)
        patch.setattr(copies._driver, "cuMemcpyHtoDAsync_v2", lambda *arguments: 700)
        with pytest.raises(KernelError, match="an upload failed with error 700"):
            upload(x, np.zeros(2 << 20, np.int32))
        assert len(running) == len(ended) == 3
    upload(x, np.ones(2 << 20, np.int32))
    assert x.sum().item() == 2 << 20


def test_tinygrads_own_copies_keep_no_pinned_memory(driver):
    tensors = [on_device(np.full(size, size, np.int32)) for size in range(1000, 1020)]
    assert len(driver.pinned) == 1 and sum(map(len, driver.pinned.values())) <= 16 << 20
    assert [tensor[-1].item() for tensor in tensors] == list(range(1000, 1020))


def test_asynchronous_reads_after_a_launch(driver):
    """A read returns the values at the time of the call, whatever is launched later."""
    from tinyvllm.bridge import read_async, upload

    x = integers(1, 2, 3)
    before = driver.counts.copy()
    readings = []
    for i in range(6):
        upload(x, np.array([i, 10 * i, 100 * i], np.int32))
        readings.append(read_async(x))
    assert not all(reading.ready() for reading in readings) or driver._done == driver._issued
    assert [reading.get().tolist() for reading in readings] == [[i, 10 * i, 100 * i] for i in range(6)]
    assert all(reading.ready() for reading in readings)
    pinned, cells = len(driver.pinned), read_async(x.reshape(3, 1).contiguous().realize()).get()
    assert cells.shape == (3, 1) and cells.dtype == np.int32 and len(driver.pinned) == pinned, "blocks are reused"
    for _ in range(9):
        read_async(x)  # its result is dropped
    assert len(driver.pinned) == pinned
    assert (driver.counts - before)["cuCtxSynchronize"] == 0


def test_a_failure_in_flight_is_reported(driver, monkeypatch):
    from tinygrad.runtime.autogen import cuda

    from tinyvllm.bridge import read_async

    reading = read_async(integers(1))
    monkeypatch.setattr(cuda, "cuEventSynchronize", lambda event: 2)
    with pytest.raises(KernelError, match="CUDA: the work in flight failed with error 2: out of memory; .*TINYVLLM_KERNELS=all=ref"):
        reading.get()


# --- launches


def test_a_kernel_between_generated_ones(driver):
    total, count = integers(0), integers(5)
    out, after = reverse(integers(*range(8)) * 0, total, integers(1, 2, 3, 4, 5, 6, 7, 8) * 2, (count * 1).contiguous())
    assert (out + after).numpy().tolist() == [15, 13, 11, 9, 7, 5, 5, 5] and total.numpy().item() == 5


def test_kernels_keep_the_order_of_what_they_write_in_place(driver):
    """Each reads what the one before has written: the third's `count` comes from the `total` of the first two."""
    total, x = integers(0), integers(1, 2, 3, 4, 5, 6)
    first, after = reverse(integers(0, 0, 0, 0, 0, 0), total, x, integers(2))
    second, after = reverse(integers(0, 0, 0, 0, 0, 0), after, first, integers(2))
    third, after = reverse(integers(0, 0, 0, 0, 0, 0), after, (x + second).contiguous(), (after + 1).contiguous())
    assert (third + after * 100).numpy().tolist() == [905, 904, 903, 904, 902, 900] and total.numpy().item() == 9


def captured_step(total, count):
    from tinyvllm.bridge import Captured

    def function(x, n=1):
        out, after = reverse(x * 0, total, (x + n).contiguous(), count)
        again, after = reverse(out * 1, after, (out * 2).contiguous(), count)
        return (again + after).contiguous().realize()

    return Captured(function, {"n": (1, 9)})


def test_a_replay_is_one_launch_of_one_graph(driver):
    from tinyvllm.bridge import download, upload

    total, count, x = integers(0), integers(4), integers(1, 2, 3, 4)
    step = captured_step(total, count)
    assert download(step(x, n=1)).tolist() == [4 + 8, 6 + 8, 8 + 8, 10 + 8]
    assert step._graph is not None and driver.counts["cuGraphLaunch"] == 1
    before = driver.counts.copy()
    for _ in range(3):
        result = step(x, n=1)
    upload(x, np.array([10, 20, 30, 40], np.int32))
    assert download(result).tolist() == [4 + 32, 6 + 32, 8 + 32, 10 + 32], "the replay used x before the upload, whenever it is read"
    assert download(step(x, n=1)).tolist() == [22 + 40, 42 + 40, 62 + 40, 82 + 40]
    spent = driver.counts - before
    assert spent["cuGraphLaunch"] == 4
    assert not {"cuLaunchKernel", "cuGraphExecKernelNodeSetParams", "cuCtxSynchronize", "cuGraphInstantiate_v2"} & set(spent)


def test_our_kernels_begin_early_from_hopper_on(driver, monkeypatch):
    """The edge to one of ours says so, that to one of tinygrad's does not; an older GPU or driver has none such."""
    from tinyvllm.backends.cuda import graph

    total, count, x = integers(0), integers(4), integers(1, 2, 3, 4)
    step = captured_step(total, count)
    step(x, n=1)
    ours = [kernel.is_ours for kernel in step._graph.kernels]
    assert ours.count(True) == 2 and ours.count(False) >= 1
    assert driver.counts["cuGraphAddDependencies_v2"] == sum(ours[1:])
    with monkeypatch.context() as patch:  # undone before the driver's own
        patch.setattr(graph.nvrtc, "waits", lambda arch: False)
        captured_step(total, count)(x, n=1)
    assert driver.counts["cuGraphAddDependencies_v2"] == sum(ours[1:])


def test_a_replay_updates_only_changed_nodes(driver):
    from tinyvllm.bridge import download

    total, count, x, y = integers(0), integers(2), integers(1, 2), integers(5, 6)
    step = captured_step(total, count)
    expected, sets = 0, []
    for tensor, n in ((x, 1), (x, 2), (y, 2), (y, 2), (x, 7)):
        before = driver.counts["cuGraphExecKernelNodeSetParams"]
        expected += 4
        assert download(step(tensor, n=n)).tolist() == (2 * (tensor.numpy() + n) + expected).tolist()
        sets.append(driver.counts["cuGraphExecKernelNodeSetParams"] - before)
    assert sets[1] == 1 and sets[2] >= 1 and sets[3] == 0 and sets[4] >= 1


def test_a_profiled_replay_launches_each_kernel_and_computes_the_same(driver):
    from tinyvllm.bridge import KernelTimer, download, start_timing, stop_timing

    total, count, x, y = integers(0), integers(2), integers(1, 2), integers(5, 6)
    step = captured_step(total, count)
    step(x, n=1)
    before, timer = driver.counts.copy(), KernelTimer()
    start_timing(timer)
    results = [download(step(tensor, n=n)).tolist() for tensor, n in ((x, 2), (y, 2))]
    stop_timing(timer)
    assert results == [(2 * (t.numpy() + 2) + s).tolist() for t, s in ((x, 8), (y, 12))]
    assert (driver.counts - before)["cuGraphLaunch"] == 0
    names = [time.name for time in timer.times]
    assert len(names) == 2 * len(step._graph.kernels) and names.count("planted_reverse") == 4
    assert all(time.seconds >= 0 for time in timer.times)
    step(y, n=2)
    assert len(timer.times) == len(names) and driver.counts["cuGraphLaunch"] == before["cuGraphLaunch"] + 1


def test_another_thread_may_replay(driver):
    from tinyvllm.bridge import download, upload

    total, count, x, results = integers(0), integers(2), integers(1, 2), []
    step = captured_step(total, count)
    step(x, n=1)

    def replay() -> None:
        step(x, n=1)
        upload(x, np.array([3, 4], np.int32))
        results.append(download(step(x, n=1)).tolist())

    thread = threading.Thread(target=replay)
    thread.start()
    thread.join(60)
    assert results == [[8 + 12, 10 + 12]]


def test_repeat_launches_each_time(driver):
    from tinyvllm.bridge import download, repeat

    total, count, x = integers(0), integers(2), integers(1, 2)
    step = captured_step(total, count)
    step(x, n=1)
    before = driver.counts.copy()
    pending = repeat([(step, (x,), {"n": 1})], 5)
    while not pending.wait():
        pass
    assert driver.launched.count("planted_reverse") == 12 and not driver._stream
    assert (driver.counts - before)["cuGraphLaunch"] == 5 and (driver.counts - before)["cuCtxSynchronize"] == 0
    assert download(total).item() == 6 * 4


# --- the driver itself


def test_more_shared_memory_than_a_block_can_have_is_rejected(driver):
    out = reverse(integers(0, 0), integers(0), integers(1, 2), integers(2), shared=228 << 10)[0]
    with pytest.raises(RuntimeError, match="CUDA Error 1, invalid argument"):
        out.realize()


def test_garbage_collected_in_a_launch_runs_no_later_launch(driver):
    """The collection of a graph waits for the device; in the middle of a launch that ran the next one, and sometimes hung or crashed."""
    ran: list[str] = []

    class Graph:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            driver.idle()

    def launch() -> None:
        Graph()
        assert [[] for _ in range(10_000)], "allocations enough for a collection"
        ran.append("first")

    driver.idle()
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(10, 1, 1)
    try:
        issued = driver._issued = driver._issued + 2
        driver._stream += [(issued - 1, launch), (issued, lambda: ran.append("second"))]
        driver._run(issued)
    finally:
        gc.set_threshold(*thresholds)
        if not enabled:
            gc.disable()
    assert ran == ["first", "second"]


def test_a_kernel_that_begins_early_must_wait(driver):
    from tinygrad.runtime import ops_cuda

    from tests.emulator.driver import DriverError
    from tinyvllm.bridge import EdgeData, cuda_driver

    cuda, operands = cuda_driver(), [integers(0, 0), integers(0), integers(1, 2), integers(2)]
    reverse(*operands)[0].realize()
    (handle,) = [number for number, thing in driver._handles.items() if getattr(thing, "name", "") == "planted_reverse"]
    graph, nodes = cuda.CUgraph(), [cuda.CUgraphNode(), cuda.CUgraphNode()]
    cuda.cuGraphCreate(ctypes.byref(graph), 0)
    for node in nodes:
        _, packed = ops_cuda.encode_args([t.uop.buffer._buf for t in operands], [])
        p = cuda.CUDA_KERNEL_NODE_PARAMS_v1(ctypes.cast(handle, cuda.CUfunction), 1, 1, 1, 32, 1, 1, SHARED, None, packed)
        cuda.cuGraphAddKernelNode(ctypes.byref(node), graph, None, 0, ctypes.byref(p))
    before, early = ((cuda.CUgraphNode * 1)(node) for node in nodes)
    edge = ctypes.byref(EdgeData(from_port=1, type=1))
    assert cuda.cuGraphAddDependencies_v2(graph, before, early, edge, 1) == 0
    assert cuda.cuGraphAddDependencies_v2(graph, before, early, ctypes.byref(EdgeData(from_port=1)), 1) == 1
    function = driver._handles[handle]
    function.text = function.text.replace("  await_previous();", "")
    with pytest.raises(DriverError, match="planted_reverse begins early and does not wait"):
        cuda.cuGraphAddDependencies_v2(graph, before, early, edge, 1)


def test_a_missing_edge_is_detected(driver):
    """Two kernels in a graph without an edge run in either order, depending on the seed."""
    from tinygrad.runtime import ops_cuda
    from tinygrad.runtime.autogen import cuda

    out, total, x, count = integers(0, 0), integers(0), integers(1, 2), integers(2)
    reverse(out, total, x, count)[0].realize()
    (function,) = [f for f in driver._handles.values() if getattr(f, "name", "") == "planted_reverse"]
    handle = next(number for number, thing in driver._handles.items() if thing is function)
    results = set()
    for _ in range(12):
        graph, instance = cuda.CUgraph(), cuda.CUgraphExec()
        cuda.cuGraphCreate(ctypes.byref(graph), 0)
        for to, source in ((out, x), (x, out)):
            arguments, packed = ops_cuda.encode_args([t.uop.buffer._buf for t in (to, total, source, count)], [])
            p = cuda.CUDA_KERNEL_NODE_PARAMS_v1(ctypes.cast(handle, cuda.CUfunction), 1, 1, 1, 32, 1, 1, SHARED, None, packed)
            assert cuda.cuGraphAddKernelNode(ctypes.byref(cuda.CUgraphNode()), graph, None, 0, ctypes.byref(p)) == 0
        cuda.cuGraphInstantiate_v2(ctypes.byref(instance), graph, None, None, 0)
        x.assign(integers(1, 2)).realize()
        out.assign(integers(5, 6)).realize()
        cuda.cuGraphLaunch(instance, None)
        results.add(str((out.numpy().tolist(), x.numpy().tolist())))
        driver.idle()
    assert len(results) == 2


def test_the_emulated_device_leaves_nothing_in_the_process(monkeypatch):
    from tinygrad import codegen, helpers
    from tinygrad.engine.realize import runtime_cache
    from tinygrad.runtime import ops_cuda
    from tinygrad.runtime.autogen import cuda

    monkeypatch.setattr(helpers.DEV, "_value", [helpers.Target()])  # as in a process that has opened no device
    original = (cuda.cuInit, codegen.to_program_cache, list(ops_cuda.CUDADevice.devices))
    with cuda_device() as driver:
        prefer_device("CUDA")  # as an engine does
        assert on_device(np.arange(3, dtype=np.int32)).numpy().tolist() == [0, 1, 2]
        assert cuda.cuInit is not original[0]
    assert (cuda.cuInit, codegen.to_program_cache, ops_cuda.CUDADevice.devices) == original
    assert not helpers.DEV.device
    assert not any(device.startswith("CUDA") for _, device in runtime_cache)
    assert isinstance(driver, Driver)
