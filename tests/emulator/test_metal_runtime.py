"""tinygrad's Metal device, our graph, launches, copies and mapped weights on the emulated runtime; and the errors that it reports."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
from typing import Any

import numpy as np
import pytest

from tests.emulator.metal_runtime import Copy, Dispatch, Execute, MetalError, Runtime, metal_device
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import kernel_source
from tinyvllm.bridge import prefer_device
from tinyvllm.config.switches import cache_folder
from tinyvllm.errors import KernelError
from tinyvllm.runner.device import start_device

# out[i] = x[n - 1 - i] by way of threadgroup memory, n = count[0]; then total[0] += n
REVERSE = """
kernel void planted_reverse(device int *out [[buffer(0)]], device int *total [[buffer(1)]], device const int *x [[buffer(2)]],
                            device const int *count [[buffer(3)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup int kept[THREADS];
  const int n = count[0];
  if (int(i) < n) kept[i] = x[i];
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (int(i) < n) out[i] = kept[n - 1 - i];
  if (i == 0) total[0] += n;
}
"""


@pytest.fixture(scope="module", autouse=True)
def cpu() -> None:
    start_device("CPU", cache_folder())


@pytest.fixture
def planted(monkeypatch, tmp_path):
    kernel_source("metal", "matrix_probe")  # it is kept; the device is opened with it
    (tmp_path / "metal").mkdir()
    (tmp_path / "metal/planted_reverse.metal").write_text(REVERSE)
    monkeypatch.setattr("tinyvllm.backends.source.kernels_folder", lambda: tmp_path)


@pytest.fixture(params=[0, 1])
def runtime(request, planted):
    with metal_device(seed=request.param, capacity=64 << 20) as runtime:
        yield runtime


def on_device(array):
    from tinygrad import Tensor

    return Tensor(array, device="METAL").contiguous().realize()


def integers(*values):
    return on_device(np.array(values, np.int32))


def reverse(out, total, x, count, block=32):
    from tinyvllm.backends.launch import launch

    kernel = Kernel("planted_reverse", "metal", "apple7", (("THREADS", block),), 2, 2, grid=(1, 1, 1), block=block)
    return launch(kernel, [out, total], [x, count])


def captured_step(total, count):
    from tinyvllm.bridge import Captured

    def function(x, n=1):
        out, after = reverse(x * 0, total, (x + n).contiguous(), count)
        again, after = reverse(out * 1, after, (out * 2).contiguous(), count)
        return (again + after).contiguous().realize()

    return Captured(function, {"n": (1, 9)})


def handle(tensor) -> int:
    return tensor.uop.buffer._buf.buf.value


# --- tinygrad


def test_tinygrad_computes(runtime):
    random = np.random.default_rng(0)
    a, b = random.standard_normal((5, 48)).astype(np.float32), random.standard_normal((48, 7)).astype(np.float32)
    from tinygrad import dtypes

    for dtype in (dtypes.float16, dtypes.bfloat16):
        x, y = (on_device(m).cast(dtype).realize() for m in (a, b))
        expected = x.float().numpy() @ y.float().numpy() + 1
        expected = np.exp(expected - expected.max(1, keepdims=True))
        product = (x.float() @ y.float() + 1).softmax().cast(dtype)
        np.testing.assert_allclose(product.float().numpy(), expected / expected.sum(1, keepdims=True), rtol=1e-5, atol=5e-3)


def test_memory_runs_out_as_on_a_gpu(runtime):
    from tinygrad import Tensor

    from tinyvllm.backends.metal.queue import metal_free_memory

    free = metal_free_memory("METAL")
    held = integers(*range(1024))
    assert metal_free_memory("METAL") == free - 4096
    with pytest.raises(MemoryError, match="failed on METAL"):
        Tensor.empty(65 << 20, dtype="uint8", device="METAL").uop.buffer.ensure_allocated()
    assert held.numpy()[5] == 5


# --- copies


def test_upload_download_and_spans(runtime):
    from tinyvllm.bridge import download, peek, spans, upload

    whole = on_device(np.arange(48, dtype=np.int32))
    first, second = spans(whole, [(0, 16), (32, 3)])
    after = (whole + 0).contiguous().realize()
    upload(whole, np.array([7, 8, 9], np.int32), start=32)
    upload(first, np.full(16, 5, np.int32))
    assert (second + 1).numpy().tolist() == [8, 9, 10] and peek(second).tolist() == [7, 8, 9]
    assert download(whole).tolist() == [5] * 16 + list(range(16, 32)) + [7, 8, 9] + list(range(35, 48))
    assert download(after).tolist() == list(range(48))
    bits = on_device(np.arange(7, dtype=np.uint8))
    big = np.random.default_rng(0).integers(0, 99, 5 << 18, np.int32)  # larger than a block
    target, doubled = on_device(big * 0), (bits * 2).contiguous().realize()
    upload(bits, np.array([9, 9, 9], np.uint8), start=1)  # no multiple of 4
    upload(target, big)
    assert download(bits).tolist() == [0, 9, 9, 9, 4, 5, 6] and download(doubled).tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert (download(target) == big).all()


def test_uploads_keep_their_order_and_do_not_wait(runtime):
    """The host's array changes right afterwards; kernels between uploads read the values of that time."""
    from tinyvllm.bridge import download, upload

    x, sums = on_device(np.zeros(64, np.int32)), []
    before, array = runtime.counts.copy(), np.empty(64, np.int32)
    for i in range(20):
        array[:] = i
        upload(x, array)
        sums.append(x[i::32].sum().contiguous().realize())
    assert runtime._seed % 2 or (runtime.counts - before)["waitUntilCompleted"] <= 4, "no wait while there are 16 blocks"
    assert [download(s).item() for s in sums] == [2 * i for i in range(20)]


def test_async_reads(runtime):
    """A read returns the values at the time of the call, whatever follows, and waits for nothing else."""
    from tinyvllm.bridge import read_async, upload

    x, readings = integers(1, 2, 3), []
    for i in range(6):
        (x + 1).contiguous().realize()
        upload(x, np.array([i, 10 * i, 100 * i], np.int32))
        readings.append(read_async(x))
    assert runtime._seed or not readings[-1].ready() and len(runtime._queue) > 6
    assert readings[0].get().tolist() == [0, 0, 0]
    assert runtime._seed or runtime._queue, "no wait for later reads"
    assert [reading.get().tolist() for reading in readings] == [[i, 10 * i, 100 * i] for i in range(6)]
    assert all(reading.ready() for reading in readings)
    (x + 1).contiguous().realize()
    buffers = len(runtime.buffers)
    cells = read_async(x.reshape(3, 1).contiguous().realize()).get()
    assert cells.shape == (3, 1) and cells.dtype == np.int32 and len(runtime.buffers) <= buffers + 1, "blocks are reused"
    for _ in range(9):
        read_async(x)  # never fetched
    assert len(runtime.buffers) <= buffers + 1


def test_a_failure_in_flight_is_reported(runtime):
    from tinyvllm.bridge import read_async

    x = integers(1)
    runtime.idle()
    runtime.next_failure = "Caused GPU Timeout Error"
    with pytest.raises(KernelError, match="METAL: the work in flight failed: Caused GPU Timeout Error; .*TINYVLLM_KERNELS=all=ref"):
        (x + 1).contiguous().realize()
        read_async(x).get()


# out[i] = x[i]; the fault of `partial` if x[0] is 7, and a word that the next launch must not find
FAULTY = """
kernel void planted_faulty(device int *out [[buffer(0)]], device uint *partial [[buffer(1)]], device const int *x [[buffer(2)]],
                           uint i [[thread_index_in_threadgroup]]) {
  out[i] = partial[2] == 0 ? x[i] : -1;
  threadgroup_barrier(metal::mem_flags::mem_device);
  if (i == 0 && x[0] == 7) partial[1] = 1, partial[2] = 5;
}
"""


def faulty(x):
    """The output of a launch whose scratch is watched, and the scratch."""
    from tinyvllm.backends.metal.call import _counting_scratch
    from tinyvllm.backends.metal.launch import launch

    kernel = Kernel("planted_faulty", "metal", "apple7", (), 2, 1, grid=(1, 1, 1), block=4)
    scratch = _counting_scratch(x, kernel, 8)
    return launch(kernel, [x * 0, scratch], [x])[0].contiguous().realize(), scratch


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_a_fault_of_a_kernel_is_reported_and_its_scratch_is_zero_again(runtime, tmp_path, how):
    """Also results that were in flight then are not believed."""
    from tinyvllm.bridge import Captured, download, read_async, upload

    (tmp_path / "metal/planted_faulty.metal").write_text(FAULTY)
    x = integers(1, 2, 3, 4)
    run = Captured(lambda x: faulty(x)[0]) if how == "captured" else lambda x: faulty(x)[0]
    assert read_async(run(x)).get().tolist() == [1, 2, 3, 4]
    _, scratch = faulty(x)
    runtime.idle()
    upload(x, np.array([7, 8, 9, 10], np.int32))
    failed = "METAL: planted_faulty gave up waiting .*TINYVLLM_KERNELS=planted_faulty=apple7_merge"
    with pytest.raises(KernelError, match=failed):
        readings = [read_async(run(x)) for _ in range(3)]
        for reading in reversed(readings):
            reading.get()
    assert not download(scratch).any()
    upload(x, np.array([1, 2, 3, 4], np.int32))
    again = read_async(run(x))
    assert again.get().tolist() == [1, 2, 3, 4]


def test_what_was_in_flight_at_a_fault_is_not_believed(planted, tmp_path):
    from tinyvllm.bridge import read_async

    (tmp_path / "metal/planted_faulty.metal").write_text(FAULTY)
    with metal_device(seed=0) as runtime:
        x, y = integers(7, 8, 9, 10), integers(1, 2, 3, 4)
        runtime.idle()
        first, second = read_async(faulty(x)[0]), read_async(faulty(y)[0])
        with pytest.raises(KernelError, match="planted_faulty gave up"):
            first.get()
        with pytest.raises(KernelError, match="a copy was in flight when earlier work failed"):
            second.get()
        assert read_async(faulty(y)[0]).get().tolist() == [1, 2, 3, 4]


def test_a_failed_command_buffer_leaves_no_counts(planted, tmp_path):
    """Of a launch that was cut off in the middle."""
    from tinyvllm.bridge import download, read_async, upload

    (tmp_path / "metal/planted_faulty.metal").write_text(FAULTY)
    with metal_device(seed=0) as runtime:
        x = integers(1, 2, 3, 4)
        _, scratch = faulty(x)
        runtime.idle()
        upload(scratch, np.array([3, 0, 4, 0, 5, 0, 6, 0], np.int32))
        runtime.next_failure = "Caused GPU Hang Error"
        with pytest.raises(KernelError, match="GPU Hang"):
            read_async(faulty(x)[0]).get()
        assert not download(scratch).any() and read_async(faulty(x)[0]).get().tolist() == [1, 2, 3, 4]


def test_command_buffers_that_have_run_are_freed(runtime):
    from tinygrad import Device

    from tinyvllm.bridge import read_async

    total, count, x = integers(0), integers(4), integers(1, 2, 3, 4)
    step = captured_step(total, count)
    for _ in range(20):
        step(x, n=1)
        read_async(total).get()
    assert len(Device["METAL"].mtl_buffers_in_flight) <= 3


# --- launches


def test_encoding_of_a_launch(runtime):
    out, total, x, count = integers(0, 0, 0), integers(1), integers(1, 2, 3), integers(3)
    runtime.idle()
    before = len(runtime.submissions)
    reverse(out, total, x, count)[0].realize()
    (submission,) = runtime.submissions[before:]
    (entry,) = submission.entries
    assert isinstance(entry, Dispatch) and (entry.name, entry.grid, entry.threads) == ("planted_reverse", (1, 1, 1), (32, 1, 1))
    assert [entry.bindings[i].buffer for i in range(4)] == [handle(t) for t in (out, total, x, count)] and len(entry.bindings) == 4
    assert out.numpy().tolist() == [3, 2, 1] and total.numpy().item() == 4


def test_in_place_writes_keep_their_order(runtime):
    """Each kernel reads what the one before has written: the third's `count` is computed from `total` after the first two."""
    total, x = integers(0), integers(1, 2, 3, 4, 5, 6)
    first, after = reverse(integers(0, 0, 0, 0, 0, 0), total, x, integers(2))
    second, after = reverse(integers(0, 0, 0, 0, 0, 0), after, first, integers(2))
    third, after = reverse(integers(0, 0, 0, 0, 0, 0), after, (x + second).contiguous(), (after + 1).contiguous())
    assert (third + after * 100).numpy().tolist() == [905, 904, 903, 904, 902, 900] and total.numpy().item() == 9


def test_a_step_is_one_indirect_command_buffer_with_a_barrier_before_each_command(runtime):
    from tinyvllm.bridge import spans

    total, count, memory = integers(0), integers(4), integers(9, 9, 9, 9, 1, 2, 3, 4)
    (x,) = spans(memory, [(4, 4)])
    step = captured_step(total, count)
    before = len(runtime.submissions)
    assert step(x, n=1).numpy().tolist() == [4 + 8, 6 + 8, 8 + 8, 10 + 8]
    (commands,) = runtime.indirect
    named = [command.name for command in commands.commands]
    assert named.count("planted_reverse") == 2 and len(named) == 2 + 5 and all(command.barrier for command in commands.commands)
    (replay,) = [s for s in runtime.submissions[before:] if s.label == f"batched {len(named)}"]
    *held, execute = replay.entries
    assert {entry.name for entry in held} == set(named), "Apple7 would lose these pipelines"
    assert all(entry.grid == (0, 0, 0) for entry in held)
    assert (execute.first, execute.count) == (0, len(named))
    used = [binding.buffer for command in commands.commands for binding in command.bindings.values()]
    assert set(execute.resources) == set(used) and len(set(execute.resources)) == len(execute.resources)
    adding = next(command for command in commands.commands if handle(x) in [b.buffer for b in command.bindings.values()])
    assert 16 in [binding.offset for binding in adding.bindings.values()], "x begins at byte 16"


def test_a_replay_encodes_nothing_and_does_not_wait(runtime):
    from tinyvllm.bridge import download, upload

    total, count, x = integers(0), integers(4), integers(1, 2, 3, 4)
    step = captured_step(total, count)
    assert download(step(x, n=1)).tolist() == [4 + 8, 6 + 8, 8 + 8, 10 + 8]
    before, encoded, submitted = runtime.counts.copy(), runtime.encoded, len(runtime.submissions)
    for _ in range(3):
        result = step(x, n=1)
    upload(x, np.array([10, 20, 30, 40], np.int32))
    spent = runtime.counts - before
    assert runtime.encoded == encoded and spent["executeCommandsInBuffer:withRange:"] == 3 and spent["newBufferWithLength:options:"] <= 1
    assert runtime._seed or (spent["waitUntilCompleted"] == 0 and isinstance(runtime.submissions[-1].entries[0], Copy))
    executions = [entry for s in runtime.submissions[submitted:] for entry in s.entries if isinstance(entry, Execute)]
    assert len(executions) == 3 and all(entry == executions[0] for entry in executions)
    assert download(result).tolist() == [4 + 32, 6 + 32, 8 + 32, 10 + 32], "the replay used x as it was before the upload"
    assert download(step(x, n=1)).tolist() == [22 + 40, 42 + 40, 62 + 40, 82 + 40]


def test_a_replay_updates_changed_arguments(runtime):
    """Without waiting, a command would be changed while it is executed, which the runtime reports."""
    from tinyvllm.bridge import read_async

    total, count, x, y = integers(0), integers(2), integers(1, 2), integers(5, 6)
    step = captured_step(total, count)
    expected, changed, readings = 0, [], []
    for tensor, array, n in ((x, [1, 2], 1), (x, [1, 2], 2), (y, [5, 6], 2), (y, [5, 6], 2), (x, [1, 2], 7)):
        before = runtime.encoded
        expected += 4
        readings.append((read_async(step(tensor, n=n)), (2 * (np.array(array) + n) + expected).tolist()))
        changed.append(runtime.encoded - before)
    assert [reading.get().tolist() for reading, _ in readings] == [values for _, values in readings]
    assert changed[1] == changed[3] == 0 and changed[2] == changed[4] > 0, "variables are in a buffer, inputs in commands"


def test_a_profiled_replay_launches_each_kernel_and_computes_the_same(runtime):
    from tinyvllm.bridge import KernelTimer, download, start_timing, stop_timing

    total, count, x, y = integers(0), integers(2), integers(1, 2), integers(5, 6)
    step = captured_step(total, count)
    step(x, n=1)
    before, timer = runtime.counts.copy(), KernelTimer()
    start_timing(timer)
    results = [download(step(tensor, n=n)).tolist() for tensor, n in ((x, 2), (y, 2))]
    stop_timing(timer)
    assert results == [(2 * (t.numpy() + 2) + s).tolist() for t, s in ((x, 8), (y, 12))]
    assert not (runtime.counts - before)["executeCommandsInBuffer:withRange:"]
    names = [time.name for time in timer.times]
    assert len(names) == 2 * len(step._graph.kernels) and names.count("planted_reverse") == 4
    assert all(time.seconds >= 0 for time in timer.times)


def test_another_thread_may_replay(runtime):
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


def test_repeat_executes_the_step_n_times(runtime):
    from tinyvllm.bridge import download, peek, repeat

    total, count, x = integers(0), integers(2), integers(1, 2)
    step = captured_step(total, count)
    step(x, n=1)
    before = runtime.counts.copy()
    repeated = repeat([(step, (x,), {"n": 1})], 5)
    while not repeated.wait():
        pass
    spent = runtime.counts - before
    assert spent["executeCommandsInBuffer:withRange:"] == 5 and spent["waitUntilCompleted"] <= 1, "at the end, for errors"
    assert runtime.launched.count("planted_reverse") == 12 and not runtime._queue
    assert peek(total).item() == download(total).item() == 6 * 4


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_step_that_is_freed_while_it_runs(runtime):
    total, count, x = integers(0), integers(2), integers(1, 2)
    step = captured_step(total, count)
    step(x, n=1)
    result = step(x, n=1)
    del step
    gc.collect()
    assert result.numpy().tolist() == [4 + 8, 6 + 8]


def test_too_many_threads_for_a_kernels_registers(planted):
    with metal_device(max_threads=64) as runtime:
        total, count, x = integers(0), integers(2), integers(1, 2)
        from tinyvllm.bridge import Captured

        def function(x):
            out, after = reverse(x * 0, total, x, count, block=96)
            return (out + after).contiguous().realize()

        with pytest.raises(KernelError, match="planted_reverse has 96 threads per threadgroup; this GPU runs at most 64 of it"):
            Captured(function)(x)
        assert "planted_reverse" not in runtime.launched


def test_candidates_are_timed_by_the_gpus_clock_between_two_captures(runtime, monkeypatch, tmp_path):
    from dataclasses import dataclass

    from tinyvllm.backends import autotune
    from tinyvllm.backends.autotune import source_digest
    from tinyvllm.backends.metal.launch import TimedKernel
    from tinyvllm.backends.metal.queue import gpu_name
    from tinyvllm.bridge import Captured, download

    @dataclass(frozen=True)
    class Threads:
        threads: int

    monkeypatch.setenv("TINYVLLM_AUTOTUNE", "1")
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path))
    autotune.tuner.cache_clear()
    runtime.seconds_of = lambda record: 1e-4 * abs(record.entries[0].threads[0] - 64) + 1e-5  # 64 is best
    runtime.max_threads, x, count = 128, integers(1, 2, 3), integers(3)

    def timed(candidate):
        kernel = Kernel("planted_reverse", "metal", "apple7", (("THREADS", n := candidate.threads),), 2, 2, grid=(1, 1, 1), block=n)
        return TimedKernel(kernel, "METAL", [12, np.array([7], np.int32), x, np.array([3], np.int32)])

    def function(x):
        candidates = [Threads(32), Threads(96), Threads(64), Threads(256)]
        best = autotune.tuned(gpu_name("METAL"), "planted_reverse", "n=3", candidates, timed, source_digest("metal", "planted_reverse"))
        return reverse(x * 0, integers(0), x, count, block=best.threads)[0].contiguous().realize()

    for capture, threads in enumerate((32, 64)):  # the default, and the best: 256 do not run on this GPU
        assert download(Captured(function)(x)).tolist() == [3, 2, 1]
        command = next(command for command in runtime.indirect[capture].commands if command.name == "planted_reverse")
        assert command.threads == (threads, 1, 1)
        while autotune.time_next():
            pass
    assert "Emulated M" in (tmp_path / "autotune.json").read_text()
    before = runtime.launched.count("planted_reverse")
    Captured(function)(x)
    assert runtime.launched.count("planted_reverse") == before + 1, "tuned once"


def test_limits_of_a_launch(runtime):
    from tinyvllm.backends.launch import launch

    many = [integers(0) for _ in range(31)]
    with pytest.raises(ValueError, match="planted_reverse got 32 tensors and 0 bytes"):
        launch(Kernel("planted_reverse", "metal", "apple7", (), 1, 31), [integers(0)], many)


def test_a_kernel_that_does_not_compile(runtime, tmp_path):
    (tmp_path / "metal/planted_wrong.metal").write_text("kernel void planted_wrong(device int *out [[buffer(0)]]) { out[0] = missing; }")
    (tmp_path / "metal/planted_odd.metal").write_text("kernel void planted_odd(device int *out [[buffer(0)]]) { } // \N{EM DASH}")
    from tinyvllm.backends.launch import launch

    for stem, words in (("planted_wrong", "_wrong_apple7 does not compile for METAL: .*missing"), ("planted_odd", "not plain ASCII")):
        with pytest.raises(KernelError, match=words):
            launch(Kernel(stem, "metal", "apple7", (), 1, 0), [integers(0)], [])[0].realize()


def test_older_and_newer_systems(planted):
    from tinygrad.device import CompileError

    from tinyvllm.backends.metal.queue import gpu_family

    with metal_device(macos="13.6", family=9) as runtime:
        assert gpu_family("METAL") == "Apple9"
        from tinygrad import dtypes

        with pytest.raises(CompileError, match="bfloat"):  # Metal 3.0 has none
            (integers(1, 2).cast(dtypes.bfloat16).contiguous() * 3).realize()
        total, count, x = integers(0), integers(2), integers(1, 2)
        assert captured_step(total, count)(x, n=1).numpy().tolist() == [4 + 4, 6 + 4]
        assert not any(isinstance(entry, Dispatch) and entry.grid == (0, 0, 0) for s in runtime.submissions for entry in s.entries)


def test_a_virtual_machine_has_no_indirect_command_buffers(planted):
    from tinyvllm.backends.metal.queue import gpu_name
    from tinyvllm.bridge import download, read_async, repeat

    with metal_device(name="Apple Paravirtual device") as runtime:
        assert gpu_name("METAL") == "Apple Paravirtual device"
        total, count, x = integers(0), integers(2), integers(1, 2)
        step = captured_step(total, count)
        first = read_async(step(x, n=1))
        assert read_async(step(x, n=1)).get().tolist() == [4 + 8, 6 + 8] and first.get().tolist() == [4 + 4, 6 + 4]
        assert repeat([(step, (x,), {"n": 1})], 3).wait() and download(total).item() == 20 and not runtime.indirect


# --- weights that are mapped


def layer_source(stem: str, count: int) -> str:
    """out = x + the first number of each of a layer's weights."""
    arguments = ", ".join(f"device const int *w{i} [[buffer({2 + i})]]" for i in range(count))
    return (
        f"kernel void {stem}(device int *out [[buffer(0)]], device const int *x [[buffer(1)]], {arguments}, "
        f"uint i [[thread_index_in_threadgroup]]) {{ out[i] = x[i] + {' + '.join(f'w{i}[0]' for i in range(count))}; }}"
    )


def file_of(tmp_path, array, offset) -> np.ndarray:
    """The array in a mapped file, from byte `offset` on."""
    (tmp_path / "weights").write_bytes(b"\0" * offset + array.tobytes() + b"\1" * 100)
    with open(tmp_path / "weights", "rb") as file:
        whole = np.frombuffer(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ), np.uint8)
    return whole[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)


def test_a_mapped_file_is_not_copied(runtime, tmp_path):
    from tinyvllm.bridge import mapped, spans

    values = np.arange(3 * mmap.PAGESIZE, dtype=np.int32).reshape(3, -1)
    array, allocated = file_of(tmp_path, values, start := 5 * mmap.PAGESIZE + 208), runtime.allocated()
    tensor = mapped(array, "METAL")
    assert runtime.allocated() == allocated and tensor.uop.buffer._buf.offset == start and tensor.shape == values.shape
    (buffer,) = [buffer for buffer in runtime.buffers.values() if not buffer.own]
    assert buffer.contents() + start == array.ctypes.data and buffer.memory.nbytes == 18 * mmap.PAGESIZE, "the whole file"
    assert (tensor.numpy() == values).all() and (tensor + 1).numpy()[2, 7] == values[2, 7] + 1
    assert spans(tensor, [(5, 2)])[0].numpy().tolist() == [5, 6], "an offset added to an offset"
    out, _ = reverse(integers(0, 0, 0), integers(0), tensor, integers(3))
    assert out.numpy().tolist() == [2, 1, 0]


def test_a_file_is_one_buffer_or_pieces_of_what_a_buffer_may_be(planted, tmp_path):
    """Pieces do not overlap; a matrix over the border of two has a buffer of its own pages."""
    from tinyvllm.bridge import mapped

    page = mmap.PAGESIZE
    with metal_device(longest_buffer=4 * page + 5) as runtime:
        array = file_of(tmp_path, np.arange(10 * page // 4, dtype=np.int32), 0)
        places = [(0, 64), (page // 2, 64), (3 * page, page), (4 * page, 32), (4 * page - 64, 128), (9 * page, page), (4 * page - 32, page)]
        parts = [array[start // 4 : (start + size) // 4] for start, size in places]
        tensors = [mapped(part, "METAL") for part in parts]
        buffers = [runtime.buffers[handle(tensor)] for tensor in tensors]
        first = array.ctypes.data
        spans = [((b.contents() - first) // page, b.memory.nbytes // page) for b in buffers]
        assert spans == [(0, 4), (0, 4), (0, 4), (4, 4), (3, 2), (8, 3), (3, 2)]
        assert len({handle(tensor) for tensor in tensors}) == 4
        for tensor, part in zip(tensors, parts, strict=True):
            assert (tensor.numpy() == part).all()


SHAPES = {"Qwen3 0.6B": (28, 7, 4, 3), "1.1B": (22, 7, 2, 3)}  # layers; matrices and norms of a layer; embedding, head, last norm


@pytest.mark.parametrize("name", SHAPES)
def test_resources_of_a_step(planted, tmp_path, monkeypatch, name):
    """A step names its file of weights once, for reading; before, it named each matrix, for reading and writing."""
    from tinygrad import Tensor

    from tinyvllm.backends.metal.launch import launch
    from tinyvllm.bridge import Captured, DeviceHooks, install_hooks, mapped
    from tinyvllm.bridge.hooks import hooks_of

    layers, matrices, norms, others = SHAPES[name]
    count, size = layers * matrices + others, mmap.PAGESIZE
    stem = f"planted_layer{matrices + norms}"
    (tmp_path / f"metal/{stem}.metal").write_text(layer_source(stem, matrices + norms))
    kernel = Kernel(stem, "metal", "apple7", (), 1, 1 + matrices + norms, grid=(1, 1, 1), block=4)
    found = {}
    for whole in (False, True):
        with metal_device(seed=0, races=False) as runtime:
            hooks = hooks_of("METAL")
            if not whole:
                install_hooks("METAL", DeviceHooks(hooks.copies, hooks.import_pages))
            array = file_of(tmp_path, np.ones((count, size // 4), np.int32), 0)
            weights, small = [mapped(row, "METAL") for row in array], [integers(i) for i in range(layers * norms)]

            def step(x, weights=weights, small=small):
                for i in range(layers):
                    ins = [x, *weights[i * matrices :][:matrices], *small[i * norms :][:norms]]
                    x = launch(kernel, [Tensor.empty(4, dtype="int32", device="METAL")], ins)[0]
                return x.contiguous().realize()

            x = integers(1, 2, 3, 4)
            run = Captured(step)
            expected = [v + layers * matrices + sum(range(layers * norms)) for v in (1, 2, 3, 4)]
            assert run(x).numpy().tolist() == expected == run(x).numpy().tolist()
            found[whole] = next(entry for entry in runtime.submissions[-1].entries if isinstance(entry, Execute))
            assert set(found[whole].read_only) >= {handle(weight) for weight in weights[: layers * matrices]}
    before, after = (len(found[whole].resources) for whole in (False, True))
    assert before - after == layers * matrices - 1, (before, after)
    assert len(found[True].resources) - len(found[True].read_only) <= 4, "intermediate results"


def test_a_resource_that_is_declared_for_reading_may_not_be_written(planted):
    with metal_device(seed=0) as runtime:
        total, count, x = integers(0), integers(2), integers(1, 2)
        step = captured_step(total, count)
        step(x, n=1).numpy()
        graph = step._graph
        execute = next(entry for entry in runtime.submissions[-1].entries if isinstance(entry, Execute))
        assert {handle(count), handle(x)} <= set(execute.read_only) and handle(total) not in execute.read_only
        graph._written.discard(handle(total))
        graph._used = graph._resources()
        step(x, n=1)
        with pytest.raises(AssertionError, match="read-only"):
            runtime.idle()


def test_a_mapped_file_stays_mapped_while_it_is_read(runtime, tmp_path):
    import weakref

    from tinyvllm.bridge import mapped

    array = file_of(tmp_path, np.arange(64, dtype=np.int32), 16)
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    gone = weakref.ref(base.obj if isinstance(base, memoryview) else base)
    tensor = mapped(array, "METAL")
    del array, base
    result = (tensor * 2).contiguous().realize()
    assert gone() is not None
    del tensor
    gc.collect()
    assert gone() is None and not any(not buffer.own for buffer in runtime.buffers.values())
    assert result.numpy().tolist() == list(range(0, 128, 2))


def test_arrays_that_cannot_be_mapped_are_copied(runtime, tmp_path):
    from tinygrad import dtypes

    from tinyvllm.bridge import mapped

    values = np.arange(600, dtype=np.int16)
    runtime.longest_buffer = 1 << 14
    for array in (values, file_of(tmp_path, values, 8), file_of(tmp_path, np.zeros(1 << 14, np.int16), 16), values[::2]):
        tensor = mapped(array, "METAL", dtypes.int16)
        assert all(buffer.own for buffer in runtime.buffers.values()) and (tensor.numpy() == array).all()
    assert mapped(values, "CPU").numpy()[599] == 599
    with pytest.raises(ValueError, match="of another size"):
        mapped(values, "METAL", dtypes.int32)


def test_a_kernel_may_not_write_to_a_mapped_file(runtime, tmp_path):
    from tinyvllm.bridge import mapped

    tensor = mapped(file_of(tmp_path, np.zeros(4, np.int32), 0), "METAL")
    with pytest.raises(AssertionError, match="buffer 0"):
        reverse(tensor, integers(0), integers(1, 2), integers(2))[0].numpy()


# --- the runtime itself


def command_buffer():
    from tinygrad import Device

    return Device["METAL"].mtl_queue.commandBuffer().retained()


def test_freed_objects(runtime):
    buffer = command_buffer()
    value = buffer.value
    buffer.commit()
    buffer.waitUntilCompleted()
    del buffer
    from tinygrad.runtime.autogen import metal

    with pytest.raises(MetalError, match="does not exist or was freed"):
        metal.MTLCommandBuffer(value).status()
    with pytest.raises(MetalError, match="the emulated Device has no newHeapWithDescriptor:"):
        metal.MTLDevice(runtime.sysdevice.handle).newHeapWithDescriptor(metal.MTLHeapDescriptor(0))
    assert metal.MTLCommandBuffer(0).error().value is None


def test_invalid_states(runtime):
    buffer = command_buffer()
    encoder = buffer.computeCommandEncoder().retained()
    with pytest.raises(MetalError, match="before its encoder has ended"):
        buffer.commit()
    with pytest.raises(MetalError, match="encoded twice"):
        buffer.blitCommandEncoder()
    encoder.endEncoding()
    buffer.commit()
    with pytest.raises(MetalError, match="committed twice"):
        buffer.commit()
    with pytest.raises(MetalError, match="never committed"):
        command_buffer().waitUntilCompleted()
    with pytest.raises(TypeError):
        buffer.setLabel(1.5)


def test_missing_barriers_or_resources_and_changes_in_flight_are_reported(planted):
    """The duties of our graph, each removed in turn."""
    from tinygrad import Device

    from tinyvllm.backends.metal.icb import MetalGraph

    with metal_device(seed=0) as runtime:
        total, count, x, y = integers(0), integers(2), integers(1, 2), integers(3, 4)
        step = captured_step(total, count)
        step(x, n=1).numpy()
        graph = step._graph
        assert isinstance(graph, MetalGraph)
        kept, graph._used = graph._used, graph._used[:1]
        step(x, n=1)
        with pytest.raises(MetalError, match="not a declared resource"):
            runtime.idle()
        Device["METAL"].mtl_buffers_in_flight.clear()
        graph._used = kept
        step(x, n=1)
        graph._last.clear()  # as if nothing were in flight
        with pytest.raises(MetalError, match="changed while it is executed"):
            step(y, n=1)
        runtime.idle()
        runtime.indirect[0].commands[3].barrier = False
        step(x, n=1)
        with pytest.raises(MetalError, match="command 3, .* has no barrier after the one before it"):
            runtime.idle()


def test_a_graph_in_a_cycle_of_garbage_waits_for_what_it_has_launched(planted):
    """What the graph holds may be released before the graph itself is finalized: Python begins with the oldest object of the cycle."""
    from tinyvllm.backends.metal.queue import queue_of

    unraisable: list[Any] = []
    with metal_device(seed=0) as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", unraisable.append)
        older = queue_of("METAL").command_buffer("older than the graph")
        queue_of("METAL").commit(older)
        queue_of("METAL").wait_for_all()
        step = captured_step(integers(0), integers(2))
        step(integers(1, 2), n=1)
        graph, step._graph = step._graph, None
        graph._last.insert(0, older)
        graph.itself = graph
        waits = runtime.counts["waitUntilCompleted"]
        del step, graph, older
        gc.collect()
        assert runtime.counts["waitUntilCompleted"] == waits + 2 and not unraisable


def test_no_trace_is_left(monkeypatch):
    from tinygrad import codegen, helpers
    from tinygrad.engine.realize import runtime_cache

    monkeypatch.setattr(helpers.DEV, "_value", [helpers.Target()])  # as in a process that has opened no device
    kept = (ctypes.CDLL, codegen.to_program_cache, {name for name in sys.modules if "metal" in name and "tinygrad" in name})
    with metal_device() as runtime:
        assert on_device(np.arange(3, dtype=np.int32)).numpy().tolist() == [0, 1, 2]
        assert "tinygrad.runtime.ops_metal" in sys.modules
        prefer_device("METAL")  # as an engine does
    assert not helpers.DEV.device
    left = {name for name in sys.modules if "metal" in name and "tinygrad" in name}
    assert (ctypes.CDLL, codegen.to_program_cache, left) == kept
    assert not any(device.startswith("METAL") for _, device in runtime_cache)
    assert isinstance(runtime, Runtime)
