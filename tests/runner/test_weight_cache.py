"""Packed weights on disk: every damage is seen before a start uses them, edited weights are another model, a full disk is one line."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.notices import without_notices
from tests.runner.test_weights import as_bf16, check_rows, load, write
from tests.storage.attacks import ATTACKS
from tests.storage.test_digests import edit
from tinyvllm.runner import weight_cache, weights
from tinyvllm.storage import digests, folders
from tinyvllm.weights.mapping import forget_pages

check = weight_cache._check


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small models are kept, too; every test logs as a new process does."""
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 0)
    monkeypatch.setattr(folders, "_logged", set())
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each matrix that is packed."""
    real, found = weights.pack_panels, []

    def counted(format: str, *rest: object) -> None:
        found.append(format)
        real(format, *rest)

    monkeypatch.setattr(weights, "pack_panels", counted)
    return found


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("ending", [".panels", ".index"])
def test_damage_is_seen_and_packed_again(tmp_path, packed, ending, attack, caplog):
    tensors, cache = write(tmp_path), tmp_path / "cache"
    load(tmp_path, "bfloat16", kept=cache)
    once = len(packed)
    (path,) = (cache / "weights").glob(f"*{ending}")
    ATTACKS[attack](path)
    check_rows(load(tmp_path, "bfloat16", kept=cache).model, as_bf16(tensors), {"BF16"})
    longer = ending == ".panels" and attack == "longer"  # every byte that is used is right
    assert len(packed) == (once if longer else 2 * once)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("cache: ")]
    assert len(lines) == (0 if longer else 1) and all("built again" in line for line in lines)
    check_rows(load(tmp_path, "bfloat16", kept=cache).model, as_bf16(tensors), {"BF16"})
    assert len(packed) == (once if longer else 2 * once), "the third start maps what the second wrote"


def test_every_piece_is_checked(tmp_path, packed):
    """A zeroed page anywhere in the products."""
    tensors, cache = write(tmp_path), tmp_path / "cache"
    load(tmp_path, "bfloat16", kept=cache)
    (path,) = (cache / "weights").glob("*.panels")
    whole = path.read_bytes()
    used = [at for at in range(0, len(whole), 4096) if any(whole[at : at + 4096])]
    assert len(used) > 5
    for at in used[:: len(used) // 5]:
        once = len(packed)
        path.write_bytes(whole[:at] + bytes(4096) + whole[at + 4096 :])
        check_rows(load(tmp_path, "bfloat16", kept=cache).model, as_bf16(tensors), {"BF16"})
        assert len(packed) > once, f"byte {at}"


def test_a_file_is_checked_once_after_each_change(tmp_path, packed, monkeypatch):
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**18))
    monkeypatch.setattr(weight_cache, "in_small_pages", lambda descriptor: False)
    tensors, cache, checked = write(tmp_path), tmp_path / "cache", []
    monkeypatch.setattr(weight_cache, "_check", lambda *given: (checked.append(1), check(*given))[1])
    for expected in (0, 1, 1, 1):  # packed, checked, and then known
        check_rows(load(tmp_path, "bfloat16", kept=cache).model, as_bf16(tensors), {"BF16"})
        assert len(checked) == expected
    once = len(packed)
    (path,) = (cache / "weights").glob("*.panels")
    edit(path, 70)  # of equal size, with the time of before
    load(tmp_path, "bfloat16", kept=cache)
    assert len(checked) == 2 and len(packed) == 2 * once
    load(tmp_path, "bfloat16", kept=cache)
    (index,) = (cache / "weights").glob("*.index")
    shutil.copy(index, tmp_path / "other")
    (tmp_path / "other").replace(index)  # the same sums: still known
    load(tmp_path, "bfloat16", kept=cache)
    assert len(checked) == 3 and len(packed) == 2 * once


@pytest.mark.parametrize("in_small", [True, False])
def test_small_pages_are_read_again_once(tmp_path, packed, monkeypatch, in_small):
    forgotten = []
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**18))
    monkeypatch.setattr(weight_cache, "in_small_pages", lambda descriptor: in_small)
    monkeypatch.setattr(weight_cache, "forget_pages", lambda descriptor: (forgotten.append(1), forget_pages(descriptor)))
    tensors = write(tmp_path)
    for _ in range(4):
        check_rows(load(tmp_path, "bfloat16", kept=tmp_path / "cache").model, as_bf16(tensors), {"BF16"})
    assert len(forgotten) == in_small


def test_a_file_that_changes_while_it_is_checked_is_not_remembered(tmp_path, packed, monkeypatch):
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**18))
    write(tmp_path)
    load(tmp_path, "bfloat16", kept=tmp_path / "cache")
    (path,) = (tmp_path / "cache" / "weights").glob("*.panels")
    monkeypatch.setattr(weight_cache, "_check", lambda *given: (check(*given), edit(path, 70), False)[2])
    load(tmp_path, "bfloat16", kept=tmp_path / "cache")
    assert not path.with_suffix(".checked").exists()


@pytest.mark.parametrize("in_small", [True, False])
def test_a_file_that_the_disk_refuses_is_not_remembered(tmp_path, packed, monkeypatch, in_small):
    refused = []

    def refuse_once(descriptor: int) -> None:  # as Linux does
        if not refused:
            refused.append(descriptor)
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**18))
    monkeypatch.setattr(weight_cache, "in_small_pages", lambda descriptor: in_small)
    write(tmp_path)
    load(tmp_path, "bfloat16", kept=tmp_path / "cache")
    monkeypatch.setattr(os, "fsync", refuse_once)
    load(tmp_path, "bfloat16", kept=tmp_path / "cache")
    assert refused and not [*(tmp_path / "cache" / "weights").glob("*.checked")]


def test_a_file_that_may_still_change_is_not_remembered(tmp_path, packed, monkeypatch):
    write(tmp_path)
    for _ in range(2):
        load(tmp_path, "bfloat16", kept=tmp_path / "cache")
    assert not [*(tmp_path / "cache" / "weights").glob("*.checked")]


def test_edited_weights_of_equal_size_and_time_are_another_model(tmp_path, packed):
    write(tmp_path)
    before = load(tmp_path, "bfloat16", kept=tmp_path / "cache")
    once = len(packed)
    path = tmp_path / "model.safetensors"
    edit(path, path.stat().st_size - 3)
    after = load(tmp_path, "bfloat16", kept=tmp_path / "cache")
    assert len(packed) == 2 * once
    changed = [
        not np.array_equal(a.tensor.numpy(), b.tensor.numpy())
        for a, b in ((before.model.weights.head, after.model.weights.head), *pairs(before.model, after.model))
    ]
    assert sum(changed) <= 1  # the last tensor of the file may be a norm


def pairs(one, other):
    fields = ("qkv", "attn_output", "gate_up", "ffn_down")
    for a, b in zip(one.blk, other.blk, strict=True):
        for field in fields:
            if hasattr(a.weights, field):
                yield getattr(a.weights, field).weight, getattr(b.weights, field).weight


def test_a_copied_model_is_found(tmp_path, packed):
    (tmp_path / "a").mkdir()
    write(tmp_path / "a")
    load(tmp_path / "a", "bfloat16", kept=tmp_path / "cache")
    once = len(packed)
    shutil.copytree(tmp_path / "a", tmp_path / "image" / "b")
    shutil.copytree(tmp_path / "cache", tmp_path / "image" / "cache")
    load(tmp_path / "image" / "b", "bfloat16", kept=tmp_path / "image" / "cache")
    assert len(packed) == once


def test_a_full_disk_is_one_line(tmp_path, monkeypatch, packed, caplog):
    tensors, real, calls = write(tmp_path), os.pwrite, []

    def full(descriptor: int, data: object, at: int) -> int:
        calls.append(at)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    check_rows(load(tmp_path, "bfloat16", kept=tmp_path / "cache").model, as_bf16(tensors), {"BF16"})
    (line,) = without_notices(caplog.messages)
    assert "not kept: No space left" in line and list((tmp_path / "cache" / "weights").iterdir()) == [], "no half file is left"


def test_a_limit_on_file_sizes_is_one_line(tmp_path):
    """In a process of its own: neither SIGXFSZ nor SIGBUS ends it."""
    write(tmp_path)
    code = (
        "import resource, sys, pathlib\nfrom tinyvllm.runner import weight_cache\nweight_cache.MIN_BYTES = 0\n"
        "from tinyvllm.config.switches import cache_folder\nfrom tinyvllm.runner.device import start_device\n"
        "start_device('CPU', cache_folder())\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "from tests.runner.test_weights import load\nfolder = pathlib.Path(sys.argv[1])\n"
        "print(load(folder, 'bfloat16', kept=folder / 'kept').model.weights.head.format)"
    )
    environ = {name: value for name, value in os.environ.items() if name != "TINYVLLM_CACHE"}
    # -B: under the limit Python would leave truncated .pyc files, which the next import fails on
    done = subprocess.run([sys.executable, "-B", "-c", code, str(tmp_path)], env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout == "BF16\n" and "not kept: File too large" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 20000


def test_a_small_disk_is_one_line(tmp_path, monkeypatch, caplog):
    tensors = write(tmp_path)
    monkeypatch.setattr(weight_cache.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    check_rows(load(tmp_path, kept=tmp_path / "cache").model, tensors, {"F32"})
    (line,) = without_notices(caplog.messages)
    assert "GB free" in line


def test_the_models_used_least_recently_leave(tmp_path, monkeypatch, packed):
    cache = tmp_path / "cache"
    for i, intermediate in enumerate((96, 128, 160)):
        folder = tmp_path / str(intermediate)
        folder.mkdir()
        write(folder, intermediate=intermediate)
        load(folder, kept=cache)
        (index,) = [path for path in (cache / "weights").glob("*.index") if path.stat().st_mtime > 10**9]
        for path in (index, index.with_suffix(".panels")):
            os.utime(path, (i + 1, i + 1))
    load(tmp_path / "96", kept=cache)  # used now: 128 is the oldest
    once, size = len(packed), max(path.stat().st_size for path in (cache / "weights").glob("*.panels"))
    monkeypatch.setattr(weight_cache, "MAX_FOLDER_BYTES", 3 * size)
    folder = tmp_path / "192"
    folder.mkdir()
    write(folder, intermediate=192)
    load(folder, kept=cache)
    held = sum(path.stat().st_size for path in (cache / "weights").glob("*.panels"))
    assert held <= 4 * size
    before = len(packed)
    load(tmp_path / "96", kept=cache)
    assert len(packed) == before > once
    load(tmp_path / "128", kept=cache)
    assert len(packed) > before


def test_a_temporary_folder_keeps_no_weights(tmp_path, caplog):
    write(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    load(tmp_path, kept=tmp_path / "open")
    (line,) = without_notices(caplog.messages)
    assert "every user can write" in line and not any((tmp_path / "open").iterdir())
