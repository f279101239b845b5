"""The file below tinygrad's surface: host access to buffers, stores through an index, aliases, capture, and what is kept on disk."""

import subprocess
import sys

import numpy as np
import pytest


def realized(array):
    from tinygrad import Tensor

    return Tensor(array).contiguous().realize()


def test_upload_and_download_keep_the_buffer():
    from tinyvllm.ops.launch import download, upload

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
    from tinyvllm.ops.launch import alias, store_kv

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
    from tinyvllm.ops.launch import download, scatter_add

    table = realized(np.zeros((3, 4), np.int32))
    rows, columns = realized(np.array([1, 1, 2], np.int32)), realized(np.array([3, 3, 0], np.int32))
    scatter_add(table, rows, columns).realize()
    expected = np.zeros((3, 4), np.int32)
    expected[1, 3], expected[2, 0] = 2, 1
    np.testing.assert_array_equal(download(table), expected)


def test_captured_replays_on_changed_buffers_arguments_and_variables():
    from tinyvllm.ops.launch import Captured, download, upload

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


def test_uninitialized_gives_the_shapes_and_restores_tensor():
    from tinygrad import Tensor, nn

    from tinyvllm.ops.launch import uninitialized

    with uninitialized():
        layer = nn.Linear(8, 4, bias=False)
    assert layer.weight.shape == (4, 8)
    assert Tensor.zeros(2, 2).numpy().sum() == 0 and Tensor.ones(3).numpy().sum() == 3 and nn.Linear(2, 2).weight.numpy().any()


def test_programs_of_another_process_are_found_on_disk(tmp_path):
    """The second process compiles nothing: its kernel comes from the table, also with a compiler that cannot work."""
    code = (
        "import os\nfrom tinyvllm.ops.launch import keep_programs\nkeep_programs()\nfrom tinygrad import Tensor\n"
        "print((Tensor([1.0, 2.0, 3.0]).contiguous().realize() * 7).sum().item())"
    )
    import os

    environ = os.environ | {"CACHEDB": str(tmp_path / "cache.db"), "DEV": "CPU"}
    first = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    second = subprocess.run([sys.executable, "-c", code], env=environ | {"CC": "/bin/false"}, capture_output=True, text=True)
    assert first.stdout == second.stdout == "42.0\n", second.stderr
