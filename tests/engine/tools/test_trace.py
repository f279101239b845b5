"""A trace of the tiny model: phases, kernels with their bytes, requests as flows, bounds; and the same tokens without one."""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Collection, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.starts import use_own_steps
from tinyvllm import LLM, ArgumentError, SamplingParams
from tinyvllm.bridge import kernel_timer
from tinyvllm.cli import main
from tinyvllm.cli.arguments import PARSERS
from tinyvllm.engine import observer, stages
from tinyvllm.engine.tools import trace as module
from tinyvllm.engine.tools.kernel_table import KernelRoof, KernelTable
from tinyvllm.engine.tools.trace_output import TraceFile, TraceMemory
from tinyvllm.engine.tracing import start_trace, stop_trace
from tinyvllm.errors import BusyError, OutputError
from tinyvllm.runner import roof

PROMPTS = ["hello", "a longer prompt than the first, of several chunks"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PHASES = ["schedule", "prepare", "launch", "wait", "sample", "output"]
OPTIONS: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, "speculative_config": "off"}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, **OPTIONS) as llm:
        llm.generate(PROMPTS, PARAMS)  # every step is captured
        yield llm


def traced(llm: LLM, prompts: list[str], params: Any = PARAMS) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """The events of some requests, and their tokens."""
    output = TraceMemory()
    trace = start_trace(llm.engine, output)
    outputs = llm.generate(prompts, params)
    stop_trace(llm.engine, trace)
    return json.loads(output.text()), [output.outputs[0].token_ids for output in outputs]


def of(events: list[dict[str, Any]], kind: str, thread: int | None = None, name: str | None = None) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == kind and thread in (None, e.get("tid")) and name in (None, e["name"])]


def test_each_phase_is_in_each_step_once_and_in_order(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORT_STEP", 0.0)
    events, _ = traced(llm, PROMPTS)
    slices = of(events, "X", 1)
    starts = [i for i, event in enumerate(slices) if event["name"] == "step"]
    assert len(starts) >= 8
    for start, end in zip(starts, [*starts[1:], len(slices)], strict=True):
        step, *phases = slices[start:end]
        names = [phase["name"] for phase in phases]
        assert names == PHASES or names == [name for name in PHASES if name != "sample"], names  # parts of prompts draw nothing
        end = step["ts"]
        for phase in phases:
            assert phase["ts"] == pytest.approx(end, abs=0.002)
            end = phase["ts"] + phase["dur"]
        assert end <= step["ts"] + step["dur"] + 0.002


def test_short_steps_are_in_slices_together_but_for_some(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of seven, and each with another batch, have slices of their own with phases. No step is in two slices, or in none."""
    monkeypatch.setattr(module, "SHORT_STEP", math.inf)
    monkeypatch.setattr(module, "SAMPLE_SHARE", 1e-9)
    monkeypatch.setattr(module, "WITH_PHASES", 2)
    monkeypatch.setattr(module, "WITHOUT", 5)
    output = TraceMemory()
    trace = start_trace(llm.engine, output)
    llm.generate(["hello", "x"], [replace(PARAMS, max_tokens=30), replace(PARAMS, max_tokens=12)])
    stop_trace(llm.engine, trace)
    events = json.loads(output.text())
    slices = sorted(of(events, "X", 1), key=lambda event: (event["ts"], -event["dur"]))
    starts = [i for i, event in enumerate(slices) if event["name"] in ("step", "steps")]
    steps = [slices[start:end] for start, end in zip(starts, [*starts[1:], len(slices)], strict=True)]
    assert all(len(step) >= len(PHASES) if step[0]["name"] == "step" else len(step) == 1 for step in steps)
    counts = [step[0]["args"].get("steps", 1) for step in steps]
    assert sum(counts) == trace.num_steps and max(counts) == 5 and [step[0]["name"] for step in steps[-6:]].count("steps") == 2
    for (before, *_), (after, *_) in zip(steps, steps[1:], strict=False):
        assert after["ts"] >= before["ts"] + before["dur"] - 0.01
        if before["args"]["rows"] != after["args"]["rows"]:
            assert after["name"] == "step", "other rows"


@pytest.mark.parametrize("steps", range(1, 12))
def test_a_trace_of_short_steps_ends_after_its_number(llm: LLM, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Also where nothing is noted of its last step, and all before it is written."""
    monkeypatch.setattr(module, "SHORT_STEP", math.inf)
    monkeypatch.setattr(module, "COUNTER_SECONDS", 0.0)
    monkeypatch.setattr(module, "WITH_PHASES", 2)
    monkeypatch.setattr(module, "WITHOUT", 5)
    output, ended = TraceMemory(), list[int]()

    def end() -> None:
        ended.append(trace.num_steps)
        stop_trace(llm.engine, trace)

    trace = start_trace(llm.engine, output, steps, end)
    llm.generate("hello", replace(PARAMS, max_tokens=20))
    slices = [event for event in of(json.loads(output.text()), "X", 1) if event["name"] in ("step", "steps")]
    assert ended == [steps] == [sum(event["args"].get("steps", 1) for event in slices)]


def test_a_slice_of_several_steps_ends_with_the_last_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished or aborted: the time in which the engine is idle is of no step."""
    monkeypatch.setattr(module, "SHORT_STEP", math.inf)
    monkeypatch.setattr(module, "SAMPLE_SHARE", 1e-9)
    output = TraceMemory()
    trace = start_trace(llm.engine, output)
    llm.generate("hello", replace(PARAMS, max_tokens=20))
    time.sleep(0.3)
    llm.engine.add("r", [5, 6, 7], replace(PARAMS, max_tokens=100))
    for _ in range(20):
        llm.engine.step()
    llm.engine.abort("r")
    time.sleep(0.3)
    llm.generate("hello", PARAMS)
    stop_trace(llm.engine, trace)
    slices = of(json.loads(output.text()), "X", 1)
    assert len(of(slices, "X", name="steps")) >= 2 and all(event["dur"] < 0.25e6 for event in slices)
    assert sum(event["args"].get("steps", 1) for event in slices if event["name"] in ("step", "steps")) == trace.num_steps


@pytest.mark.parametrize(
    "options",
    [{"async_scheduling": True}, {"num_scheduler_steps": 4}, {"speculative_config": "ngram"}],
    ids=lambda options: next(iter(options)),
)
def test_other_loops(tiny_model: Path, options: dict[str, Any]) -> None:
    """A step that is launched ahead draws on the device; drafts and repeats have their phases, too."""
    with LLM(tiny_model, **{**OPTIONS, **options}) as llm:
        before = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
        events, tokens = traced(llm, PROMPTS)
    assert tokens == before and len(of(events, "f")) == 2
    assert {event["name"] for event in of(events, "X", 1)} - {"sample"} == {"step", *PHASES} - {"sample"}
    if "async_scheduling" in options:
        slices = "".join(event["name"][0] for event in of(events, "X", 1))  # s: step, schedule, sample
        assert "ssplwo" in slices


def sample_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_EVERY", 1)
    monkeypatch.setattr(module, "SAMPLE_SHARE", math.inf)


def test_tokens_are_the_same_without_a_trace(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_every_step(monkeypatch)
    before = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    assert traced(llm, PROMPTS)[1] == before


def test_the_kernels_of_a_captured_step_have_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode of the bundled model: in each layer its matrices and activations once, and one context."""
    sample_every_step(monkeypatch)
    with LLM(**OPTIONS) as llm:
        events, _ = traced(llm, ["hello"])
        c, prompt = llm.engine.runner.config, of(events, "b")[0]["args"]["prompt_tokens"]
    step = of(events, "X", 1, "step")[-1]
    kernels = [e for e in of(events, "X", 3) if e["ts"] >= step["ts"]]
    found = [(e["name"].rpartition("_")[0], e["args"]["bytes"]) for e in kernels]
    L, E, F, V, kv = c.num_blocks, c.dim, c.hidden_dim, c.vocab_size, c.n_kv_heads * c.head_dim
    weights, context = 2, prompt + PARAMS.max_tokens - 1  # BF16; the token that is drawn last is not computed
    layer = [
        ("norm_qkv_rope_store", weights * E * (E + 2 * kv) + 4 * (E + E)),
        ("attention_decode", weights * 2 * kv * context),
        ("matmul", weights * E * E + 4 * (E + E)),
        ("norm_gate_up_silu", weights * 2 * F * E + 4 * (E + F)),
        ("matmul", weights * E * F + 4 * (E + F)),
    ]
    whole = [*layer * L, ("norm_head", weights * V * E + 4 * (V + E))]
    assert [(name, nbytes) for name, nbytes in found if name in dict(whole)] == whole
    assert all(event["dur"] > 0 for event in kernels if event["name"].rpartition("_")[0] in dict(whole))
    assert kernels[0]["ts"] >= step["ts"] and kernels[-1]["ts"] + kernels[-1]["dur"] <= step["ts"] + step["dur"]
    for event, after in zip(kernels, kernels[1:], strict=False):
        assert after["ts"] >= event["ts"] + event["dur"] - 0.01
        if event["dur"] > 1:
            assert event["args"]["GB/s"] == pytest.approx(event["args"]["bytes"] / event["dur"] / 1e3, rel=0.02, abs=0.01)


def test_the_share_of_the_roof_is_that_of_the_nearer_one() -> None:
    both = KernelRoof(1e9, 4e9)
    assert both.share(2.0, 10**9, 10**9) == (0.5, "memory") and both.share(2.0, 10**8, 4 * 10**9) == (0.5, "compute")
    assert both.share(0.0, 1, 1) == (0.0, "") and both.share(1.0, 0, 0) == (0.0, "")
    assert KernelRoof(1e9).share(2.0, 10**9, 10**12) == (0.5, "memory") and KernelRoof(0.0).share(1.0, 5, 5) == (0.0, "")
    table = KernelTable(both)
    table.add("product", 2.0, 10**8, 6 * 10**9)
    table.add("copy", 1.0, 9 * 10**8, 0)
    assert [line.split()[-3:] for line in table.text().splitlines()[2:]] == [["3.0", "75%", "compute"], ["-", "90%", "memory"]]
    assert "roof 1 GB/s and 4 GFLOP/s" in table.text() and "`tinyvllm plan` measures it" in str(KernelRoof(1e9))


def test_kernels_have_operations_and_the_share_of_a_measured_roof(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate of products is measured for --profile; a trace of a server takes what is kept, and measures nothing."""
    sample_every_step(monkeypatch)
    measured: list[list[str]] = []

    def measure(device: str, formats: Collection[str], nbytes: int) -> None:
        measured.append([*formats])

    monkeypatch.setattr(roof, "measured_roof", measure)
    monkeypatch.setattr(roof, "kept_operations", lambda device, formats: 5e9 if measured else 0.0)
    with LLM(tiny_model, **OPTIONS) as llm:
        events, _ = traced(llm, ["hello"])
        assert not measured and {event["args"]["bound"] for event in of(events, "X", 3)} <= {"memory", ""}
        formats = sorted(llm.engine.runner.weight_formats)
    with LLM(tiny_model, **OPTIONS, profile=str(tmp_path / "trace.json")) as llm:
        llm.generate(PROMPTS, PARAMS)
    assert [sorted(each) for each in measured] == [formats]
    kernels = [e for e in of(json.loads((tmp_path / "trace.json").read_text()), "X", 3) if e["args"]["FLOP"] and e["dur"] > 1]
    assert any(event["args"]["bound"] == "compute" for event in kernels), "5 GFLOP/s is less than any processor here multiplies"
    for event in (event for event in kernels if event["args"]["bound"] == "compute"):
        assert event["args"]["of roof"] == pytest.approx(event["args"]["FLOP"] / (event["dur"] * 1e-6) / 5e9, rel=0.05, abs=0.002)
        assert event["args"]["GFLOP/s"] == pytest.approx(event["args"]["FLOP"] / event["dur"] / 1e3, rel=0.05, abs=0.01)


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_step_with_a_trace_costs_a_fixed_number_of_calls(llm: LLM, monkeypatch: pytest.MonkeyPatch, sequences: int) -> None:
    """What a step adds: a reading of the clock a phase and two more, whatever the batch; texts are made later, many at a time."""
    steps, readings, writes = 20, [0], list[object]()
    clock = module.time.perf_counter

    def counted() -> float:
        readings[0] += 1
        return clock()

    params = replace(PARAMS, max_tokens=steps + 8)
    monkeypatch.setattr(module, "SHORT_STEP", 0.0)  # else most have two readings
    for number in range(sequences):
        llm.engine.add(f"r{number}", [5 + number, 6, 7], params)
    for _ in range(4):
        llm.engine.step()  # prefills, and the first decodes
    output = TraceMemory()
    trace = start_trace(llm.engine, output)
    llm.engine.step()  # begins the flows of the requests, and is sampled
    trace._count_at = trace._flush_at = trace.marks.until = math.inf
    for each in (stages, observer, module):
        monkeypatch.setattr(each, "time", SimpleNamespace(perf_counter=counted))
    monkeypatch.setattr(output, "write", writes.append)
    before, texts = len(trace.marks), len(trace._events)
    for _ in range(steps):
        llm.engine.step()
    assert readings[0] == steps * (len(PHASES) + 2) and len(trace.marks) - before == 2 * readings[0]
    assert len(trace._events) == texts and not writes
    monkeypatch.undo()
    stop_trace(llm.engine, trace)
    while llm.engine.has_work():
        llm.engine.step()


def num_sampled(llm: LLM) -> int:
    return [event["args"]["sampled"] for event in of(traced(llm, ["hello"])[0], "X", 1, "step")].count(True)


def test_one_step_in_many_is_sampled(llm: LLM) -> None:
    assert num_sampled(llm) == 1


def test_samples_that_take_much_of_the_time_are_fewer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_every_step(monkeypatch)
    assert num_sampled(llm) > 4
    monkeypatch.setattr(module, "SAMPLE_SHARE", 1e-6)
    assert num_sampled(llm) == 1


def test_a_request_is_one_flow_from_its_arrival_to_its_end(llm: LLM) -> None:
    prompts = ["of more tokens than a step has, " + "and so in chunks"[::-1], "x"]
    events, _ = traced(llm, prompts, params=[PARAMS, replace(PARAMS, max_tokens=3)])  # the end of one makes a new schedule of the other
    steps = of(events, "X", 1, "step")
    for flow in (1, 2):
        links = [e for e in events if e["ph"] in "stf" and e.get("id") == flow]
        assert "".join(e["ph"] for e in links) == "s" + "t" * (len(links) - 2) + "f" and links[-1]["bp"] == "e"
        assert all(before["ts"] <= after["ts"] for before, after in zip(links, links[1:], strict=False))
        for link in links[1:-1]:  # an arrow binds to the slice around it
            assert any(step["ts"] <= link["ts"] <= step["ts"] + step["dur"] for step in steps)
        marks = [e for e in events if e["ph"] in "bne" and e.get("id") == flow]
        assert [e["ph"] for e in marks][0] == "b" and marks[-1]["ph"] == "e" and marks[-1]["args"]["output_tokens"] == (8, 3)[flow - 1]
        chunks = [e["args"]["tokens"] for e in marks if e["name"] == "prefill chunk"]
        prompt = marks[0]["args"]["prompt_tokens"]
        assert sum(chunks) + marks[-1]["args"]["cached_tokens"] == prompt and len(chunks) == (2 if flow == 1 else 1)
        assert len([e for e in marks if e["name"] == "first decode"]) == 1
        assert len(links) == 2 + len(chunks) + 1


def test_a_trace_that_begins_between_two_decodes_knows_their_batch(llm: LLM) -> None:
    for number in range(2):
        llm.engine.add(f"r{number}", [5 + number, 6, 7], PARAMS)
    for _ in range(4):
        llm.engine.step()
    output = TraceMemory()
    trace = start_trace(llm.engine, output)
    for _ in range(2):
        llm.engine.step()
    stop_trace(llm.engine, trace)
    events = json.loads(output.text())
    steps = [e["args"] for e in of(events, "X", 1) if e["name"] in ("step", "steps")]
    assert [(step["rows"], step["sequences"]) for step in steps] == [(2, 2)] * 2 and len(of(events, "b")) == 2
    while llm.engine.has_work():
        llm.engine.step()


def test_memory_is_counted(llm: LLM) -> None:
    events, _ = traced(llm, ["hello"])
    blocks, resident = of(events, "C", name="KV blocks"), of(events, "C", name="RSS")
    assert blocks and resident and blocks[0]["args"]["used"] >= 1 and resident[0]["args"]["MB"] > 10


def test_a_hostile_request_id_is_quoted_and_short(llm: LLM) -> None:
    output = TraceMemory()
    trace = start_trace(llm.engine, output)
    llm.engine.add('"}],\n\x00' + "\ud800" * 5000, [5, 6, 7], PARAMS)
    while llm.engine.has_work():
        llm.engine.step()
    stop_trace(llm.engine, trace)
    (begin,) = of(json.loads(output.text()), "b")
    assert len(begin["args"]["id"]) == module.MAX_ID


def test_without_a_trace_nothing_is_left_on_the_way(llm: LLM) -> None:
    before = len(llm.engine.observer._observers)
    traced(llm, ["hello"])
    assert llm.engine.trace is None and llm.engine.stages.marks is None and len(llm.engine.observer._observers) == before
    assert kernel_timer() is None


def test_one_trace_at_a_time_and_it_ends_after_its_steps(llm: LLM) -> None:
    ended: list[int] = []
    trace = start_trace(llm.engine, TraceMemory(), 3, lambda: ended.append(trace.num_steps))
    with pytest.raises(BusyError, match="another trace"):
        start_trace(llm.engine, TraceMemory())
    llm.generate("hello", PARAMS)
    stop_trace(llm.engine, trace)
    stop_trace(llm.engine, trace)
    assert ended == [3]
    output = TraceMemory()
    trace = start_trace(llm.engine, output, 3, lambda: stop_trace(llm.engine, trace))
    llm.generate("hello", PARAMS)
    assert len(of(json.loads(output.text()), "X", 1, "step")) == 3 and kernel_timer() is None


def test_steps_kept_on_disk_keep_the_work_of_their_kernels(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_every_step(monkeypatch)
    use_own_steps(monkeypatch, tmp_path)
    seen = []
    for profile in (None, str(tmp_path / "trace.json")):  # which decides no launch
        with LLM(tiny_model, **OPTIONS, profile=profile) as llm:
            if llm.engine.trace is not None:
                stop_trace(llm.engine, llm.engine.trace)
            events, _ = traced(llm, ["hello"])
            seen.append((llm.engine.runner.capture_work().loaded, [(e["name"], e["args"]["bytes"]) for e in of(events, "X", 3)]))
    assert seen[1][0] > seen[0][0] and seen[0][1] == seen[1][1] and any(nbytes for _, nbytes in seen[0][1])


def test_a_recording_is_replayed_without_the_profile_of_its_run(tiny_model: Path, tmp_path: Path) -> None:
    """The replay would replace that file."""
    from tinyvllm.engine.tools.recording import read_run
    from tinyvllm.engine.tools.replay import config_of

    path = tmp_path / "run.jsonl"
    with LLM(tiny_model, **OPTIONS, record=str(path), profile=str(tmp_path / "trace.json"), energy=True) as llm:
        llm.generate("hello", PARAMS)
    config = config_of(read_run(str(path)), {})
    assert config.profile is None and not config.energy


@pytest.mark.parametrize("command", ["kernels", "verify", "replay", "lab", "plan", "bench"])
@pytest.mark.parametrize("option", ["--energy", "--profile"])
def test_commands_without_requests_of_a_user_do_not_take_it(command: str, option: str) -> None:
    """Most of them make an engine without observers, which would ignore it."""
    assert option not in PARSERS[command]().known_options()
    assert option in PARSERS["generate"]().known_options()


# ---- the file


def test_the_command_line_writes_a_file_and_a_table(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    arguments = ["--model", str(tiny_model), "--prompt", "hello", "--max-tokens", "6", "--num-blocks", "32", "--profile", str(path)]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert main(arguments) == 0
    events = json.loads(path.read_text())
    assert len(of(events, "X", 1, "step")) >= 6 and of(events, "X", 3)
    assert "profile: kernels of" in err.getvalue() and "matmul_" in err.getvalue() and "of roof" in err.getvalue()


def test_the_file_is_json_after_every_write(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "trace.json"))
    expected = []
    for count in (0, 1, 3, 2):
        file.write([f'{{"i":{i}}}' for i in range(count)])
        expected += [{"i": i} for i in range(count)]
        assert json.loads(Path(file.path).read_text()) == expected
    file.close()
    file.write(['{"i":1}'])
    assert json.loads(Path(file.path).read_text()) == expected


@pytest.mark.parametrize("writes", [0, 1])
def test_a_full_disk_leaves_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """The first half of what was to be written arrives."""
    file, write = TraceFile(str(tmp_path / "trace.json")), os.pwrite
    for _ in range(writes):
        file.write(['{"i":0}'])
    short = [True]

    def half(number: int, text: bytes, offset: int) -> int:
        return write(number, text[: len(text) // 2] if short and short.pop() else text, offset)

    monkeypatch.setattr("tinyvllm.engine.tools.trace_output.os.pwrite", half)
    file.write([f'{{"i":{i}}}' for i in range(50)])
    assert file.full and json.loads(Path(file.path).read_text()) == [{"i": 0}] * writes
    file.close()


def test_files_and_memory_are_bounded(tmp_path: Path) -> None:
    file, memory = TraceFile(str(tmp_path / "trace.json"), limit=100), TraceMemory(limit=100)
    for output in (file, memory):
        for _ in range(50):
            output.write(['{"i":1}', '{"i":2}'])
        assert output.full
        output.close()
    assert Path(file.path).stat().st_size <= 100 and json.loads(Path(file.path).read_text())
    assert len(memory.text()) <= 110 and json.loads(memory.text())


def test_a_file_that_cannot_be_written(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="profile: cannot write"):
        LLM(tiny_model, num_blocks=32, profile=str(tmp_path))
    with pytest.raises(ArgumentError, match="profile"):
        LLM(tiny_model, num_blocks=32, profile=" ")
