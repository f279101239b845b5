"""A run that was recorded runs again bit for bit, and what differs is named: the step, the request, the token."""

from __future__ import annotations

import copy
import json
import platform
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tinyvllm import LLM, cli
from tinyvllm.config.engine import resolve
from tinyvllm.engine.engine import Engine
from tinyvllm.engine.frontend import start_engine
from tinyvllm.engine.output import RequestState
from tinyvllm.engine.tools.record import Recorder, advanced_run, record_to
from tinyvllm.engine.tools.recording import read_run
from tinyvllm.engine.tools.replay import config_of, replay
from tinyvllm.errors import ArgumentError, BusyError, FormatError, OutputError, RequestError
from tinyvllm.request import BeamSearchParams, RequestOptions, SamplingParams, StructuredOutputsParams

SMALL = {"device": "CPU", "max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 32, "num_blocks": 14}
LAST = 400  # steps, before a run counts as hung


def engine_of(model: Path, record: Path, **options) -> Engine:
    return start_engine(resolve(model, record=str(record), **SMALL | options), None)


def traffic(engine: Engine, seed: int = 3) -> None:
    """Requests that come while others run, of all kinds; some are given up."""
    random = np.random.default_rng(seed)
    prompts = [[256, *random.integers(32, 127, int(n)).tolist()] for n in random.integers(2, 60, 14)]
    kinds = [
        lambda i: SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        lambda i: SamplingParams(temperature=0.9, max_tokens=20, top_p=0.9, logit_bias={65: 3.0}, stop=["zq"]),
        lambda i: SamplingParams(temperature=1.0, seed=i, n=2, best_of=3, max_tokens=9, ignore_eos=True),
        lambda i: BeamSearchParams(beam_width=2, max_tokens=6),
    ]
    arrivals = sorted(zip(random.integers(0, 30, len(prompts)).tolist(), range(len(prompts)), strict=True))
    added: list[str] = []
    for step in range(LAST):
        while arrivals and arrivals[0][0] <= step:
            i = arrivals.pop(0)[1]
            added.append(f"r{i}")
            engine.add(added[-1], prompts[i], kinds[i % 4](i), None, RequestOptions(priority=i % 2, key=str(i % 3)))
        if step == 12:
            for name in (added[-1], added[-3], "unknown"):
                engine.abort(name)
        if not arrivals and not engine.has_work():
            return
        engine.step()
    raise AssertionError("hung")


def recorded(model: Path, file: Path, **options):
    engine = engine_of(model, file, **options)
    try:
        traffic(engine)
    finally:
        engine.close()
    return read_run(str(file))


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """A run with preemptions, forks, beams, aborts and priorities."""
    return recorded(tiny_model, tmp_path_factory.mktemp("record") / "run.jsonl")


def again(run, tokens_only=False, **overrides):
    return replay(run, config_of(run, overrides), tokens_only)


def test_the_recording_has_arrivals_schedules_and_results(run, tiny_model):
    assert run.complete and len(run.added) == 14 and 1 <= len([e for e in run.arrivals if "abort" in e]) <= 2
    first = copy.deepcopy(next(e for e in run.added if e["add"] == "r1"))
    assert isinstance(first["params"].pop("seed"), int), "the seed that was drawn"
    assert first["params"] == {"temperature": 0.9, "max_tokens": 20, "top_p": 0.9, "logit_bias": {"65": 3.0}, "stop": ["zq"]}
    assert first["options"] == {"priority": 1, "key": "1"} and "beams" in next(e for e in run.added if e["add"] == "r3")
    assert {end["end"] for end in run.ends} == {f"r{i}" for i in range(14)} and len(run.ends[0]["chain"]) == 16
    assert run.header["config"]["model"] == str(tiny_model) and run.header["config"]["num_blocks"] == 14
    chunks = [e for entries, _ in run.schedule.values() for e in entries[3::4] if e > 1]
    assert max(chunks) <= 32 and len(run.schedule) > 30
    text = Path(run.path).read_text()
    assert '"on":1' in text, "steps with the same decodes are short"


def test_it_runs_again_bit_for_bit(run):
    outcome = again(run)
    assert outcome.identical and outcome.requests == 14
    assert outcome.tokens == sum(len(ids) for end in run.ends for ids in end["tokens"]) > 100


def test_a_recording_of_format_1_is_read(run, tmp_path):
    events = [json.loads(line) for line in Path(run.path).read_text().splitlines()]
    events[0]["format"] = 1
    marks = {"opening": "[[", "closing": "]]", "begins": "be" + "hind"}
    for event in events:
        if "add" in event:
            event["terms"] = event.pop("options")
            if event["add"] == "r1":
                event["params"]["thinking"] = marks
    old = tmp_path / "old.jsonl"
    old.write_text("".join(json.dumps(event) + "\n" for event in events))
    read = read_run(str(old))
    assert [event["options"] for event in read.added] == [event["options"] for event in run.added]
    changed = next(event["params"] for event in read.added if event["add"] == "r1")
    assert changed["reasoning"] == marks | {"begins": "after"} and "thinking" not in changed
    assert again(read).identical


@pytest.mark.long
def test_other_engines_give_the_same_tokens_in_another_schedule(run):
    other = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_blocks": 40}
    assert again(run, tokens_only=True, **other).identical
    outcome = again(run, **other)
    assert not outcome.identical and outcome.difference is None or outcome.difference.step is not None
    assert outcome.step is not None and outcome.expected != outcome.got


def test_a_smaller_budget_ends_every_request_or_says_what_is_missing(run, capsys):
    """Another schedule needs more steps than the recording has; a context that is too short is an error before anything runs."""
    options = ["--max-num-batched-tokens", "8", "--max-num-seqs", "2"]
    assert cli.main(["replay", run.path, *options]) == 1
    out, err = capsys.readouterr()
    assert "DIVERGES: the schedule of step" in out and "got no end" not in out and "max_num_seqs 2 (recorded 6)" in err
    assert "max_num_batched_tokens 8 (recorded 32)" in err and "--tokens-only" in err
    for options in (["--num-blocks", "2"], ["--max-model-len", "20"]):
        assert cli.main(["replay", run.path, "--tokens-only", *options]) == 2
        out, err = capsys.readouterr()
        assert out == "" and re.search(r"request r\d+ has \d+ tokens in the recording, and the engine has a context of (32|20) tokens", err)


def test_a_token_that_differs_is_named_with_its_step(run, tmp_path):
    lines = Path(run.path).read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"end":"r4"' in line)
    end = json.loads(lines[at])
    kept = end["tokens"][0][5]
    end["tokens"][0][5] = kept + 1
    lines[at] = json.dumps(end)
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join(lines) + "\n")
    outcome = again(read_run(str(changed)))
    found = outcome.difference
    assert outcome.step is None and (found.request_id, found.continuation, found.index) == ("r4", 0, 5)
    assert (found.expected, found.got) == (kept + 1, kept)
    prompt = len(next(e["prompt"] for e in run.added if e["add"] == "r4"))
    number = [e["add"] for e in run.added].index("r4")
    entries, rounds = run.schedule[found.step]
    mine = [entries[i : i + 4] for i in range(0, len(entries), 4) if entries[i] == number]
    assert len(mine) == 1 and mine[0][2] + mine[0][3] * rounds == prompt + 5, "the step that computed the token before"


OTHER_WAYS = {
    "rounds": {"num_scheduler_steps": 4},
    "swap": {"swap_space": 1 << 20, "preemption_mode": "swap"},
    "ahead": {"async_scheduling": True},  # whether it pays to read tokens first for drafts depends on measured times
    "ahead with drafts": {"async_scheduling": True, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.mark.long
@pytest.mark.parametrize("options", OTHER_WAYS.values(), ids=OTHER_WAYS)
def test_other_ways_to_run(tiny_model, tmp_path, options):
    run = recorded(tiny_model, tmp_path / "run.jsonl", **options)
    if "num_scheduler_steps" in options:
        assert any(rounds > 1 for _, rounds in run.schedule.values())
    if "swap_space" in options:
        assert run.swapped
    assert again(run).identical
    if options == OTHER_WAYS["ahead"]:
        assert run.ahead and not again(replace(run, ahead=frozenset())).identical, "surplus rows of sequences that ended are missing"
    else:
        assert run.ahead or "async_scheduling" not in options


def test_the_drafts_of_a_step_are_recorded_and_used_again(tiny_model, tmp_path):
    """Not guessed again: how many drafts a step has may depend on measured times."""
    lookup = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    run = recorded(tiny_model, tmp_path / "run.jsonl", speculative_config=lookup)
    assert any(len(drafts) > 1 for drafts in run.drafts.values()), "random text repeats single tokens"
    assert again(run).identical
    other = replace(run, drafts={})
    assert not again(other).identical, "without the recorded drafts the schedule is another"


def test_a_swap_is_repeated_where_costs_decided_it(tiny_model, tmp_path):
    engine = engine_of(tiny_model, tmp_path / "run.jsonl", swap_space=1 << 20)

    class Dear(type(engine.scheduler.rates)):
        prefill_token = 1.0  # seconds

    engine.scheduler.rates = Dear()
    traffic(engine)
    engine.close()
    run = read_run(str(tmp_path / "run.jsonl"))
    assert run.swapped and again(run).identical


def test_chunks_are_as_long_again_as_measured_rates_made_them(tiny_model, tmp_path):
    engine = engine_of(tiny_model, tmp_path / "run.jsonl", max_step_ms=50, max_num_batched_tokens=64)
    rates, lengths = engine.scheduler.rates, iter((16, 32, 16, 64))
    rates.max_chunk_tokens = lambda seconds, budget: min(budget, next(lengths, 32))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.add("decodes", [256, 70], params)
    engine.step()
    engine.add("long", [256, *range(32, 127)], params)
    while engine.has_work():
        engine.step()
    engine.close()
    run = read_run(str(tmp_path / "run.jsonl"))
    assert list(run.max_chunk_tokens.values()) == [16, 32, 16, 64]
    assert again(run).identical
    assert not again(run, max_num_batched_tokens=24).identical and again(run, tokens_only=True, max_step_ms=0).identical


def test_deadlines_pass_again_when_they_passed(tiny_model, tmp_path):
    skipped = [0.0]
    record = tmp_path / "run.jsonl"
    config = resolve(tiny_model, record=str(record), **SMALL)
    engine = Engine(config, observers=[record_to(str(record))], clock=lambda: time.monotonic() + skipped[0])
    engine.step()
    late = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    engine.add("late", [256, 70, 71], late, None, RequestOptions(deadline_ms=600_000))
    engine.add("plain", [256, 80], late)
    for _ in range(6):
        engine.step()
    skipped[0] = 3600.0
    while engine.has_work():
        engine.step()
    engine.close()
    run = read_run(str(tmp_path / "run.jsonl"))
    end = next(e for e in run.ends if e["end"] == "late")
    assert end["reasons"] == ["deadline"] and 1 <= len(end["tokens"][0]) < 100
    assert again(run).identical  # at once: an hour of the recorded clock is not waited for
    assert again(run, tokens_only=True, max_num_batched_tokens=8).identical


def test_refusals_are_taken_as_given(tiny_model, tmp_path):
    engine = engine_of(tiny_model, tmp_path / "run.jsonl", max_num_seqs=1, max_num_queued_reqs=1)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    for name in "abc":
        try:
            engine.add(name, [256, 70], params)
        except BusyError:
            assert name == "c"
    while engine.has_work():
        engine.step()
    engine.close()
    run = read_run(str(tmp_path / "run.jsonl"))
    outcome = again(run)
    assert outcome.identical and outcome.requests == 2 and outcome.refused == 1


def test_structures_and_words_are_recorded(tiny_model, tmp_path):
    pytest.importorskip("llguidance")
    engine = engine_of(tiny_model, tmp_path / "run.jsonl")
    structure = StructuredOutputsParams(regex="(ab|ba){2,4}")
    engine.add("s", [256, 70], SamplingParams(temperature=1.0, max_tokens=8, structured_outputs=structure))
    engine.add("w", [256, 71], SamplingParams(temperature=1.0, max_tokens=8, bad_words=["a", "e"], allowed_token_ids=[*range(97, 123)]))
    while engine.has_work():
        engine.step()
    engine.close()
    run = read_run(str(tmp_path / "run.jsonl"))
    assert run.added[0]["params"]["structured_outputs"] == {"regex": "(ab|ba){2,4}"}
    assert again(run).identical and set(run.ends[0]["tokens"][0]) <= {97, 98, 257}


def test_functions_are_named_and_not_run_without(tiny_model, tmp_path, capsys):
    engine = engine_of(tiny_model, tmp_path / "run.jsonl")
    engine.add("odd", [256, 70], SamplingParams(temperature=0.0, max_tokens=3, logits_processors=(lambda p, o, logits: logits,)))
    engine.add("even", [256, 71], SamplingParams(temperature=0.0, max_tokens=3))
    while engine.has_work():
        engine.step()
    engine.close()
    run = read_run(str(tmp_path / "run.jsonl"))
    with pytest.raises(ArgumentError, match="request odd has logits processors"):
        again(run)
    outcome = again(run, tokens_only=True)
    assert outcome.identical and outcome.requests == 1 and outcome.skipped == ["odd"]


def test_the_command(run, tmp_path, capsys):
    assert cli.main(["replay", run.path]) == 0
    assert capsys.readouterr().out == f"identical: 14 requests, {sum(len(ids) for e in run.ends for ids in e['tokens'])} tokens\n"
    assert cli.main(["replay", run.path, "--max-num-seqs", "2", "--max-num-batched-tokens", "8"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("DIVERGES: the schedule of step ") and "expected r" in out and "got r" in out


def test_another_model_is_not_taken_for_the_recorded_one(run, tmp_path, capsys):
    lines = Path(run.path).read_text().splitlines()
    header = json.loads(lines[0])
    header["weights"] = "0" * 32
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    assert cli.main(["replay", str(changed)]) == 2
    assert "has changed since" in capsys.readouterr().err


def test_another_architecture_is_remarked(run, tmp_path, capsys):
    """Sums of bfloat16 products differ between sm_80 and sm_90."""
    lines = Path(run.path).read_text().splitlines()
    header = json.loads(lines[0])
    assert header["architecture"].startswith(platform.machine())
    other = tmp_path / "other"
    other.write_text("\n".join([json.dumps(header | {"architecture": "sm_80"}), *lines[1:]]) + "\n")
    assert cli.main(["replay", str(other)]) == 0
    assert f"architecture {header['architecture']}, recorded with sm_80" in "".join(capsys.readouterr())


@pytest.mark.parametrize("last", ["run", "end", "add", "abort", "chunks"])
def test_a_recording_that_is_cut_off_runs_to_its_last_whole_line(run, tmp_path, last):
    """Also where the step that the last line belongs to is not in it."""
    lines = Path(run.path).read_text().splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if last in json.loads(line)]
    end = ends[len(ends) // 2]
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(lines[: end + 1]) + lines[end + 1][:9])
    part = read_run(str(cut))
    assert not part.complete and part.last_step < run.last_step and again(part).identical


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (None, ArgumentError, "cannot read"),
        ("", FormatError, "does not begin like a recording"),
        ('{"format":99,"config":{}}\n', FormatError, "format 1"),
        ('{"format":1,"config":{}}\nno\n', FormatError, ":2 is not JSON"),
        ('{"format":1,"config":{}}\n{"end":"a"}\n', FormatError, ":2 is not an event"),
        ('{"format":1,"config":{"model":"m","warp":9}}\n', ArgumentError, "warp=9, which is not an option of this version"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(tmp_path, text, error, words):
    file = tmp_path / "r.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(error, match=words):
        config_of(read_run(str(file)), {})


def test_a_recording_beyond_the_limit_and_a_deep_one_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "r.jsonl"
    file.write_text('{"format":2,"config":{}}\n' + "[" * 100_000 + "\n")
    with pytest.raises(FormatError, match=":2 is not JSON"):
        read_run(str(file))
    monkeypatch.setattr("tinyvllm.engine.tools.recording.MAX_FILE", 1000)
    with pytest.raises(FormatError, match=r"has 100026 bytes, and at most 1000 are read; its first lines can \(head -n\)"):
        read_run(str(file))


def test_a_recording_is_never_overwritten(tiny_model, tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text("something\n")
    with pytest.raises(OutputError, match="exists already"):
        engine_of(tiny_model, file)
    with pytest.raises(OutputError, match="cannot write"):
        engine_of(tiny_model, tmp_path / "no" / "r.jsonl")


def test_a_full_disk_ends_the_recording_and_not_the_run(tiny_model, capsys):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    engine = engine_of(tiny_model, Path("/dev/full"))
    engine.add("a", [256, 70], SamplingParams(temperature=0.0, max_tokens=3))
    while engine.has_work():
        engine.step()
    engine.close()
    assert capsys.readouterr().err.count("ends here, the engine continues") == 1


def test_advanced_run_moves_every_start():
    assert advanced_run([4, 0, 17, 1, 5, 1, 3, 1], 3) == [4, 0, 20, 1, 5, 1, 6, 1]


def test_the_chain_depends_on_every_end_before():
    def ends(*requests: tuple[str, list[int], str]) -> list:
        events: list = []
        recorder = Recorder(events.append)
        for name, tokens, reason in requests:
            state = RequestState(name, None, [1], SamplingParams(seed=1), None, (), 64, 0.0)
            state.sequences[0].output_token_ids, state.sequences[0].finish_reason = tokens, reason
            output = state.output()
            assert output is not None
            recorder.request_finished(state, output)
        return events

    events, other = ends(("a", [1, 2], "stop"), ("b", [3], "length")), ends(("a", [1, 9], "stop"), ("b", [3], "length"))
    assert events[1]["chain"] != other[1]["chain"] and events[1]["tokens"] == other[1]["tokens"]


def with_segments(model: Path, file: Path) -> None:
    """Segments that stay while all else is evicted, one too many, one released and one after another; prompts that begin with them."""
    answer = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(model, record=str(file), **SMALL | {"num_blocks": 10}) as llm:
        rules = llm.segment([256, *range(40, 75)], cache_salt="a")
        llm.generate([{"prompt_token_ids": [n] * 90} for n in (5, 6)], answer)
        letter = llm.segment([*range(80, 100)], after=rules)
        with pytest.raises(RequestError, match="this one needs 5 more"):
            llm.segment([9] * 80)
        with pytest.raises(RequestError, match="[a-z]+ leave [0-9]+ of"):
            llm.generate({"prompt_token_ids": [7] * 126}, answer)
        llm.generate([{"prompt_token_ids": [n] * 60} for n in (7, 8)], answer)
        llm.generate([letter + [7, 8], rules + [9]], answer, options=RequestOptions(cache_salt="a"))
        letter.release()
        llm.generate([{"prompt_token_ids": [n] * 100} for n in (11, 12)], answer)
        (output,) = llm.generate(letter + [10], answer, options=RequestOptions(cache_salt="a"))
        assert output.num_cached_tokens == 32, "what was released is gone, what was held is not"


def test_segments_are_held_and_released_again(tiny_model, tmp_path):
    file = tmp_path / "run.jsonl"
    with_segments(tiny_model, file)
    run = read_run(str(file))
    tried = [(e["hold"], e["held"], "tokens" in e) for e in run.arrivals if "hold" in e]
    assert tried == [(0, False, True), (0, True, False), (1, False, True), (1, True, False), (2, False, True)]
    assert [e["release"] for e in run.arrivals if "release" in e] == [1]
    said: list[str] = []
    outcome = replay(run, config_of(run, {}), remark=said.append)
    assert outcome.identical and outcome.requests == 11 and not said
    lines = [line for line in file.read_text().splitlines(keepends=True) if '"hold"' not in line]
    (tmp_path / "without.jsonl").write_text("".join(lines))
    assert not again(read_run(str(tmp_path / "without.jsonl"))).identical, "that they are held makes a difference"


def test_a_segment_that_another_engine_cannot_hold_is_named(tiny_model, tmp_path):
    with_segments(tiny_model, tmp_path / "run.jsonl")
    run = read_run(str(tmp_path / "run.jsonl"))
    said: list[str] = []
    outcome = replay(run, config_of(run, {"max_num_batched_tokens": 8}), tokens_only=True, remark=said.append)
    assert outcome.identical and said[0].startswith("segment 0 is not held before step"), "it is computed in more steps than it was"
