"""Captured steps on disk: what is loaded launches the same as what was captured, and what does not fit is captured again."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.bridge.test_bridge import pool_of, realized
from tests.bridge.test_recording import constant, copy_in
from tinyvllm.bridge import Captured, KeptSteps, StepNotes, capture_work, download, upload
from tinyvllm.bridge.kept import ROOM
from tinyvllm.storage.cache import open_cache

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))
    return open_cache()


class Engine:
    """A step of a launch, an expression with a variable, and a launch that reads it, as each start of a program makes it."""

    def __init__(self, version: str = "1", factor: int = 3, blocks: int = 6, roots: Any = None):
        self.pool, self.count, self.pair = realized(pool_of(blocks)), constant(1), constant(0, 1).reshape(1, 2)
        self.factor, self.calls = factor, 0
        steps = KeptSteps("CPU", {"pool": self.pool, "factor": factor} | (roots or {}), lambda: version, StepNotes())
        kept = steps.step("copies", count=self.count, pair=self.pair)
        self.step = Captured(self.function, {"n": (1, 8)}, kept)

    def function(self, x, n):
        self.calls += 1
        copy_in(self.pool, self.pair, self.count)
        sums = (self.pool.sum(1) * self.factor + n).contiguous()
        return copy_in(self.pool, x, self.count), sums, None

    def results(self, x=(2, 3), n=2) -> tuple[list[Any], list[Any]]:
        """Of a replay on fresh contents."""
        upload(self.pool, pool_of(int(self.pool.shape[0])))
        pool, sums, none = self.step(constant(*x).reshape(1, 2), n=n)
        assert none is None
        return download(pool)[:, 0].tolist(), download(sums).tolist()

    def launches(self) -> list[Any]:
        """Of the captured step, with what each buffer is: a part of the pool, of another tensor by its size, or the input."""
        pool = self.pool.uop.buffer
        return [
            (launch.program, launch.binary, launch.inputs, [(b.base is pool.base, b.nbytes) for b in launch.buffers])
            for launch in self.step._graph.launches
        ]


def record_of_step(cache) -> str:
    (name,) = (path.name for path in (cache.path / ROOM).iterdir() if path.suffix != ".code")
    return f"{ROOM}/{name}"


def test_a_later_start_launches_the_same_and_runs_no_function():
    first, second = Engine(), Engine()
    before = capture_work()
    expected = [first.results(), first.results((4, 0), 7), first.results()]
    assert expected[0] != expected[1]
    assert [second.results(), second.results((4, 0), 7), second.results()] == expected
    assert (first.calls, second.calls) == (1, 0) and second.launches() == first.launches()
    after = capture_work()
    assert (after.count - before.count, after.loaded - before.loaded) == (1, 1)


def test_the_memory_of_intermediate_results_is_shared_with_other_captures():
    from tinyvllm.bridge.arena import arenas

    first, second = Engine(), Engine()
    first.results()
    count = len(arenas())
    second.results()
    assert len(arenas()) == count


@pytest.mark.parametrize("other", [{"version": "2"}, {"factor": 4}, {"blocks": 7}, {"roots": {"more": 1}}])
def test_another_version_option_or_shape_is_captured(other):
    Engine().results()
    engine = Engine(**other)
    fresh = Engine(version="never kept", **{name: value for name, value in other.items() if name != "version"})
    assert engine.results() == fresh.results() and engine.calls == 1


CHANGES: dict[str, Change] = {
    "a buffer after the last": lambda r: r["launches"][0][1].__setitem__(0, len(r["buffers"])),
    "a program after the last": lambda r: r["launches"][0].__setitem__(0, len(r["programs"])),
    "an index below zero": lambda r: r["launches"][0].__setitem__(0, -1),
    "an index that is true": lambda r: r["launches"][0].__setitem__(0, True),
    "a buffer that is true": lambda r: r["launches"][0][1].__setitem__(0, True),
    "a buffer that is a float": lambda r: r["launches"][0][1].__setitem__(0, 0.0),
    "a buffer before the first": lambda r: r["launches"][0][1].__setitem__(0, -1),
    "bytes after the end": lambda r: r["buffers"][0].__setitem__(2, 1 << 30),
    "a start after the end": lambda r: r["buffers"][0].__setitem__(1, 1 << 30),
    "memory of another size": lambda r: r["memory"][0].__setitem__(-1, 4096),
    "memory of no tensor": lambda r: r["memory"].__setitem__(0, ["named", "wte", 64]),
    "memory of another kind": lambda r: r["memory"].__setitem__(0, ["address", 4096, 64]),
    "more memory than there is": lambda r: r["memory"].__setitem__(0, ["own", 1 << 50]),
    "a tensor of the process that is unknown": lambda r: r["memory"].__setitem__(0, ["process", ["os.system", "true"], 64]),
    "arguments of another type": lambda r: r["memory"].__setitem__(0, ["process", ["cpu row numbers", "x"], 64]),
    "too many numbers": lambda r: r["memory"].__setitem__(0, ["process", ["cpu row numbers", 1 << 40], 64]),
    "code outside of the folder": lambda r: r["programs"][0].__setitem__(0, "../../../../../../../../../../bin/true"),
    "code that is missing": lambda r: r["programs"][0].__setitem__(0, "0" * 40),
    "an argument that the launch lacks": lambda r: r["programs"][0].__setitem__(5, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    "a grid of nothing": lambda r: r["programs"][0].__setitem__(2, [0, 1, 1]),
    "a result of another shape": lambda r: r["result"][1].__setitem__("shape", [7]),
    "a result of an unknown type": lambda r: r["result"][1].__setitem__("dtype", "float128"),
    "results in results": lambda r: r.__setitem__("result", [[[[None]]]]),
    "no launches": lambda r: r.__setitem__("launches", []),
    "launches that are no list": lambda r: r.__setitem__("launches", {"0": 1}),
    "nothing": lambda r: r.clear(),
    "notes that are none": lambda r: r.pop("notes"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_record_with_anything_out_of_range_is_captured_again(cache, what, caplog, monkeypatch):
    """Its file is whole, as if it had been written here."""
    from tinyvllm.storage import folders

    first = Engine()
    expected = first.results()
    place = record_of_step(cache)
    record = json.loads(cache.read(place))
    CHANGES[what](record)
    cache.write(place, json.dumps(record).encode())
    monkeypatch.setattr(folders, "_logged", set())
    second, third = Engine(), Engine()
    assert second.results() == expected and second.calls == 1
    assert [line for line in caplog.messages if "is not used" in line and "it is built again" in line]
    assert third.results() == expected and third.calls == 0, "the new capture was kept"


@pytest.mark.parametrize("suffix", ["", ".code"])
@pytest.mark.parametrize("damage", ["changed", "truncated", "missing", "huge"])
def test_a_damaged_file_is_made_again(cache, suffix, damage, monkeypatch):
    from tinyvllm.bridge import kept

    expected = Engine().results()
    monkeypatch.setattr(kept, "_codes", {})  # as in another process
    for path in [path for path in (cache.path / ROOM).iterdir() if path.suffix == suffix]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        content = {"changed": data, "truncated": data[:-9], "missing": None, "huge": data + bytes(kept.MAX_CODE)}[damage]
        path.unlink() if content is None else path.write_bytes(content)
    second, third = Engine(), Engine()
    assert second.results() == expected and second.calls == 1
    monkeypatch.setattr(kept, "_codes", {})
    assert third.results() == expected and third.calls == 0


def test_what_has_no_name_is_not_kept(cache, caplog):
    """A tensor that only the function holds; a result that is no tensor; a function among what a step reads."""
    caplog.set_level(logging.DEBUG, "tinyvllm")
    pool, count, pair = realized(pool_of(3)), constant(1), constant(0, 1).reshape(1, 2)
    steps = KeptSteps("CPU", {"pool": pool, "count": count}, lambda: "1", StepNotes())
    roots = {"anonymous": {}, "dictionary": {"pair": pair}, "partial": {"pair": pair, "f": print}, "array": {"pair": np.zeros(3)}}
    for name, more in roots.items():
        wrap = (lambda result: {"pool": result}) if name == "dictionary" else (lambda result: result)
        for _ in range(2):
            upload(pool, pool_of(3))
            Captured(lambda: wrap(copy_in(pool, pair, count)), kept=steps.step(name, **more))()  # noqa: B023
            assert download(pool)[:, 0].tolist() == [0, 0, 2]
    assert not [path for path in (cache.path / ROOM).iterdir() if path.suffix != ".code"]
    for name in roots:
        assert f"steps: {name} is not kept: " in caplog.text


def test_a_capture_is_not_kept_if_what_decides_it_changes_meanwhile(cache):
    versions = iter("1122334455")
    pool, count, pair = realized(pool_of(3)), constant(1), constant(0, 1).reshape(1, 2)
    steps = KeptSteps("CPU", {"all": [pool, count, pair]}, lambda: next(versions)[0], StepNotes())

    def function():
        next(versions)  # a kernel was replaced
        return copy_in(pool, pair, count)

    Captured(function, kept=steps.step("copy"))()
    assert cache.room(ROOM) is None or not [path for path in cache.room(ROOM).iterdir() if path.suffix != ".code"]


def test_old_files_are_removed_when_there_are_too_many(cache, monkeypatch):
    import os

    from tinyvllm.bridge import kept

    Engine().results()
    old = [path.name for path in (cache.path / ROOM).iterdir()]
    for path in (cache.path / ROOM).iterdir():
        os.utime(path, (1, 1))
    monkeypatch.setattr(kept, "MAX_FILES", len(old) - 1)
    engine = Engine(version="2")
    engine.results()
    remaining = {path.name for path in (cache.path / ROOM).iterdir()}
    assert len(set(old) - remaining) >= len(old) // 2
    again = Engine(version="2")
    assert again.results() == engine.results() and again.calls <= 1


def test_names_do_not_depend_on_the_process():
    from tinyvllm.bridge.names import NamedBuffers

    def roots(pool, count):
        return {"a": [pool, {"x": (count, 1.5, None)}], "b": {"set", "of", "words"}}

    pool, count = realized(pool_of(3)), constant(1)
    names, same = NamedBuffers(roots(pool, count)), NamedBuffers(roots(realized(pool_of(3) * 2), constant(5)))
    assert names.digest == same.digest, "contents do not count"
    part = pool.uop.buffer.view(8, pool.dtype, 64).ensure_allocated()
    assert names.place_of(part) == ("a.0", 64) and same.place_of(part) is None
    assert names.buffer("a.1.x.0") is count.uop.buffer and names.buffer("a.1.x.1") is None
