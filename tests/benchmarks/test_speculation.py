"""The benchmark of speculation: ratios, bars, what it refuses to measure, and llama.cpp's loop with a model of a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import figures, speculation
from benchmarks.compare.contest import Contestant
from benchmarks.compare.play_llama_drafts import LlamaDrafts, SecondModel
from benchmarks.harness import Round
from benchmarks.speculation import AUTOMATIC, OFF, Ours, Text, Theirs, bars, ratios, show
from tinyvllm.lab.prompts import LabPrompt
from tinyvllm.lab.target import Answer, DraftCounts, Job
from tinyvllm.speculative import AUTO, SpeculativeConfig


def test_a_ratio_is_that_of_one_round() -> None:
    """Rounds that others disturbed are left out, whichever of the two they disturbed."""
    off = [Round(2.0, 0.0), Round(4.0, 0.0), Round(9.0, 0.0), Round(6.0, 0.0), Round(100.0, 1.0)]
    on = [Round(1.0, 0.0), Round(2.0, 0.0), Round(1.0, 0.5), Round(2.0, 0.0), Round(1.0, 0.0)]
    one = ratios(on, off)
    assert (one.median, one.low, one.high, one.quiet, one.rounds) == (2.0, 2.0, 2.5, 3, 5)


def test_short_turns_get_more_rounds_where_a_control_tells_the_noise() -> None:
    alone, batched = (Text("noise", [], {"auto": AUTOMATIC, **speculation.CONTROLS}, batch=batch) for batch in (1, 64))
    assert [speculation.rounds_of(alone, 9, seconds) for seconds in (0.0, 0.5, 60.0)] == [speculation.MAX_ROUNDS, 16, 9]
    assert speculation.rounds_of(batched, 9, 60.0) == 7
    assert speculation.rounds_of(Text("copy", [], {"auto": AUTOMATIC}), 9, 0.1) == 9
    assert "off again" in speculation.texts_of(speculation.parse_arguments(["--texts", "chat"]))[0].ways


def line_of(text: str, ratio: float = 1.0, added: float = 0.0, ahead: float | None = None) -> dict[str, Any]:
    rates = {"rate": 10.0, "low": 9.0, "high": 11.0, "rounds": 3, "quiet": 3}
    spread = {"median": ratio, "low": ratio, "high": ratio}
    line: dict[str, Any] = {
        "model": "bundled", "text": text, "batch": 1, "commit": "a", "isa": "avx2", "cores": 2, "cpu": "X",
        "tok_s": {OFF: rates, "auto": rates, "llama.cpp lookup": rates}, "ratio": {"auto": spread},
        "drafts": {"auto": {"tokens_a_step": 2.0, "accepted": 0.5}}, "host_us": {"auto": 9.0}, "added_us": {"auto": added},
    }  # fmt: skip
    return line | ({} if ahead is None else {"ahead": {"of": "llama.cpp lookup", "by": "auto", **spread, "median": ahead}})


def test_bars_are_those_of_the_texts_that_were_measured() -> None:
    lines = {"copy": line_of("copy", 2.4, ahead=0.9), "chat": line_of("chat", 0.97, 70.0), "mixed": line_of("mixed", 1.06)}
    rows = {cells[1].strip(): cells[-2].strip() for cells in (line.split("|") for line in bars(lines).splitlines()[2:])}
    assert rows == {
        "copy and edit text, one sequence, auto against off": "gate",
        "chat, one sequence, auto against off": "missed",
        "64 concurrent requests, mixed, auto against off": "goal",
        "copy: our best against llama.cpp's best": "missed",
    }
    story = {"chat": line_of("chat", added=20.0), "story": line_of("story", added=30.0)}
    (host,) = (line for line in bars(story).splitlines() if "host time" in line)
    assert "30.0" in host and "gate" in host  # lower is better, and the worse of the two counts


def test_auto_is_the_configuration_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, k = AUTOMATIC
    assert spec.config(k) == {"method": AUTO.method} and spec.label == "auto"
    own = SpeculativeConfig("ngram", num_speculative_tokens=3, prompt_lookup_max=4, controller="window")
    assert speculation.spec_of("x", own).config(3) == {
        "method": "ngram", "prompt_lookup_max": 4, "controller": "window", "num_speculative_tokens": 3,
    }  # fmt: skip


class Target:
    """Answers of two tokens, a second each; `wrong` changes the last one with drafts."""

    def __init__(self, wrong: bool = False):
        self.wrong, self.trials = wrong, list[str]()

    def run(self, cell: Any, jobs: Sequence[Job], limits: Any, trial: str) -> tuple[list[Answer], DraftCounts]:
        self.trials.append(trial)
        last = 9 if self.wrong and not cell.is_baseline else 3
        return [Answer((1,), (2, last), 1.0, 2.0) for _ in jobs], DraftCounts(turns=len(jobs), steps=1)


def test_an_answer_that_differs_ends_the_run() -> None:
    text = Text("chat", [Job(LabPrompt(text="a"), 0), Job(LabPrompt(text="b"), 1)], {"auto": AUTOMATIC})
    ours = Ours(Target(), text, count())  # type: ignore[arg-type]
    assert [ours.turn(OFF), ours.turn("auto")] == [2.0, 2.0] and ours.num_tokens == 2
    assert len(set(ours.target.trials)) == 4  # type: ignore[attr-defined]  # no run knows the answers of another
    again = Ours(Target(), Text("again", text.jobs, text.ways, remembers=True), count())  # type: ignore[arg-type]
    again.turn("auto")
    again.turn("auto")
    assert len(set(again.target.trials)) == 1  # type: ignore[attr-defined]  # but here they shall
    wrong = Ours(Target(wrong=True), text, count())  # type: ignore[arg-type]
    wrong.turn(OFF)
    with pytest.raises(SystemExit, match="answer 0 with auto is not the one without drafts"):
        wrong.turn("auto")


def test_a_peer_that_is_missing_takes_no_part() -> None:
    text = Text("copy", [], {"auto": AUTOMATIC}, ("plain",))
    for one in (None, Contestant("llama.cpp", None, "no llama_cpp here")):
        theirs = Theirs(one, text, [], [], "")
        theirs.tune()
        assert theirs.names == [] and theirs.missing == ("" if one is None else "no llama_cpp here")


def test_the_command_measures_and_records_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(speculation, "record", lambda *arguments: pytest.fail("a quick run was recorded"))
    speculation.main(["--quick", "--texts", "chat", "--max-tokens", "6"])
    out, err = capsys.readouterr()
    assert "| auto" in out and "chat, one sequence, auto against off" in out and "no --llama-python" in err


@pytest.mark.parametrize("words", [["--texts", "poem"], ["--texts", "copy", "--shape", "tinyllama-1.1b"]])
def test_texts_that_do_not_exist_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="no text"):
        speculation.texts_of(speculation.parse_arguments(words))


def test_the_page_has_a_row_for_each_way() -> None:
    text = figures.speculation([line_of("copy", 1.0), line_of("copy", 2.5, ahead=1.5), line_of("chat", 0.99)])
    assert "2.50 (2.50 to 2.50)" in text and "1.50" in text and "1.00 (" not in text and len(text.splitlines()) == 2 + 3
    assert "copy, 1 at a time" in show(line_of("copy") | {"same_tokens": {}})


# --- llama.cpp's loop, over a model whose next token follows from the last two


class Model:
    """What `llama_decode` does for one sequence: tokens by position, of which those that were cut are gone."""

    chunk = 4

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.calls = 0

    def _forget(self) -> None:
        self.tokens.clear()

    def cut(self, position: int) -> None:
        self.tokens = {p: token for p, token in self.tokens.items() if p < position}

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        self.calls += 1
        for token, position, _, _ in entries:
            assert position not in self.tokens and position == len(self.tokens)  # neither computed twice nor left out
            self.tokens[position] = token
        return [(self.tokens[p] * 3 + self.tokens[p - 1]) % 7 for _, p, _, wanted in entries if wanted]


class Lookup(Model, LlamaDrafts):
    def __init__(self, way: str):
        Model.__init__(self)
        self._drafts, self._lookup, self._second = 3, None, None
        if way == "lookup":
            self._lookup = lambda known: np.array([known[-2], 5, known[-1]])
        if way == "draft":
            self._second = Second()


class Second(Model, SecondModel):
    """Right two times of three."""

    def __init__(self) -> None:
        Model.__init__(self)
        self._cached = []

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        return [token if (token + entries[-1][1]) % 3 else (token + 1) % 7 for token in super()._decode(entries)]


def test_drafts_change_no_token_of_llama_cpps_loop() -> None:
    prompts, counts = [[1, 2, 3, 4, 5, 6], [4, 4]], [20, 9]
    plain = Lookup("plain")
    expected = plain.answers(prompts, counts)[1]
    assert [len(answer) for answer in expected] == counts  # type: ignore[union-attr, arg-type]
    for way in ("lookup", "draft"):
        player = Lookup(way)
        assert player.answers(prompts, counts)[1] == expected
        assert player.calls < plain.calls or way == "lookup"


def test_k_is_the_fastest_on_two_prompts() -> None:
    sent: list[tuple[object, ...]] = []

    def ask(*command: object) -> dict[str, Any]:
        sent.append(command)
        return {"seconds": 0.0} if command[0] == "use" else {"seconds": 0.0, "settings": [1.0 + (command != sent[1]), [[1, 2]]]}

    one = SimpleNamespace(missing=None, ask=ask)
    text = Text("copy", [], {"auto": AUTOMATIC}, ("lookup",))
    theirs = Theirs(one, text, [[1], [2], [3]], [2, 2, 2], "d.gguf")  # type: ignore[arg-type]
    theirs.tune()
    assert theirs.settings == {"llama.cpp lookup": 2} and sent[0] == ("use", "lookup", 2, "d.gguf") and sent[1][1] == [[1], [2]]
    assert theirs.answers == {"llama.cpp lookup": [[1, 2]]}
