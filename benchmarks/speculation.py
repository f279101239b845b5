"""Speculation on and off, interleaved in one process, and llama.cpp's own on the same weights and text.

    python -m benchmarks.speculation --llama-python PATH
    python -m benchmarks.speculation --shape tinyllama-1.1b --format BF16 --folder FOLDER --llama-python PATH

Every contestant answers the same prompts in turn, a round each; a speed-up is the median of the ratios within rounds. Answers with drafts
must be those without: a token that differs ends the run. Each run but those of `again` has a cache salt of its own, so neither the prefix
cache nor a drafter knows the answers of the round before; within a run the prompts share what was learned, as requests of one user do. The
engine has its default settings.

copy, chat, story  prompt sets of the bundled model's world (docs/lab.md), one sequence at a time, greedy, up to the end of the answer;
                   timed from the first token of an answer to its last
mixed              128 requests of copy, code, chat and story, 64 at a time; timed from the first request to the last answer
again, noise       for --shape, whose weights are random, so that no text of its own repeats itself (87 of 96 greedy tokens differ).
                   again: greedy requests that the same user has sent before, whose answers `auto` has learned; noise: at temperature 1,
                   never sent before, near uniform tokens, which nothing predicts
again64, noise64   the same, 64 sequences at a time

Where a ratio near 1 is expected, "off again" is a second turn without drafts: how far it is from 1 is what the machine adds, and short
turns get more rounds. Host time is the processor time of the engine's thread outside kernels. What speculation adds to a step is its
difference with and without, by steps, on texts that nothing predicts. llama.cpp answers as many tokens by the loop of
compare/play_llama_drafts.py, with the K that is fastest on the first two prompts.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compare.child import prompt
from benchmarks.compare.contest import PAUSE, Contestant, start
from benchmarks.harness import Round, Spread, record, spread, table, take_turns
from benchmarks.host_time import host_seconds
from benchmarks.roof import threads_of_machine
from benchmarks.shapes import FORMATS, SHAPES, checkpoint, write_gguf_of
from tinyvllm.lab.engine_target import EngineTarget
from tinyvllm.lab.prompts import SETS, LabPrompt
from tinyvllm.lab.sweep import PLAIN, Cell, DrafterSpec, Sweep
from tinyvllm.lab.target import DraftCounts, Job, Limits
from tinyvllm.speculate.policies import EXACT
from tinyvllm.speculative import AUTO, SpeculativeConfig

Line = dict[str, Any]
OFF, CONTROL = "off", "off again"
DEMO = Path(__file__).parents[1] / "tinyvllm" / "demo"
LOOKUP_K, DRAFT_K = (2, 4, 6, 10), (2, 3, 4, 6, 8)  # that llama.cpp chooses among
WARM, MAX_WARM = 2, 5  # turns that are not timed: at least, and at most while steps are captured
PATIENCE = 2.0  # times the rounds, where others disturb them
MEASURED, MAX_ROUNDS = 8.0, 45  # seconds of each contestant's turns, and the most rounds, where a turn is short


@dataclass(frozen=True)
class Text:
    """One measurement: prompts, how they are answered, and which ways of guessing take part."""

    name: str
    jobs: list[Job]
    ways: Mapping[str, tuple[DrafterSpec, int | None]]
    rivals: tuple[str, ...] = ()  # of llama.cpp
    batch: int = 1
    temperature: float = 0.0
    max_tokens: int = 128
    ignore_eos: bool = False
    remembers: bool = False  # each run is of one user, whose drafter has learned from the runs before


def spec_of(label: str, config: SpeculativeConfig) -> DrafterSpec:
    """The drafter with all settings of a configuration but K."""
    given = {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default}
    return DrafterSpec(label, given.pop("method"), tuple(sorted((k, v) for k, v in given.items() if k != "num_speculative_tokens")))


AUTOMATIC = (spec_of("auto", AUTO), AUTO.num_speculative_tokens)
_DRAFT, _HEADS = (("model", str(DEMO / "draft")),), (("model", str(DEMO / "heads")),)
CONTROLS: dict[str, tuple[DrafterSpec, int | None]] = {CONTROL: (PLAIN, 0)}
MODELS: dict[str, tuple[DrafterSpec, int | None]] = {
    "draft_model": (DrafterSpec("draft_model", "draft_model", _DRAFT), None),
    "draft_model, K=4": (DrafterSpec("draft_model", "draft_model", _DRAFT), 4),
    "eagle3": (DrafterSpec("eagle3", "eagle3", _HEADS), None),
    "eagle3, K=5": (DrafterSpec("eagle3", "eagle3", _HEADS), 5),
    "eagle3, K=7": (DrafterSpec("eagle3", "eagle3", _HEADS), 7),
    "eagle3 Q8_0, K=7": (DrafterSpec("eagle3 Q8_0", "eagle3", (*_HEADS, ("quantization", "q8_0"))), 7),
}


def bundled_texts(num_prompts: int, max_tokens: int, batch: int) -> list[Text]:
    """The texts of the bundled model's world."""

    def jobs(name: str, number: int) -> list[Job]:
        return [Job(one, i) for i, one in enumerate(islice(SETS[name](0), number))]

    auto = {"auto": AUTOMATIC}
    controlled = auto | CONTROLS
    mixed = [job for each in zip(*(jobs(name, max(1, batch // 2)) for name in SETS), strict=True) for job in each]
    return [
        Text("copy", jobs("copy", num_prompts), auto, ("plain", "lookup"), max_tokens=max_tokens),
        Text("chat", jobs("chat", num_prompts), controlled, max_tokens=max_tokens),
        Text("story", jobs("story", num_prompts), controlled | MODELS, ("plain", "lookup", "draft"), max_tokens=max_tokens),
        Text("mixed", mixed, controlled, batch=batch, max_tokens=max_tokens),
    ]


def shape_texts(num_prompts: int, max_tokens: int, batch: int) -> list[Text]:
    """Texts of random weights."""

    def jobs(number: int) -> list[Job]:
        return [Job(LabPrompt(token_ids=tuple(prompt(16, i))), i) for i in range(number)]

    common: dict[str, Any] = {"ways": {"auto": AUTOMATIC}, "ignore_eos": True, "max_tokens": max_tokens}
    controlled = common | {"ways": common["ways"] | CONTROLS}
    return [
        Text("again", jobs(num_prompts), rivals=("plain", "lookup"), remembers=True, **common),
        Text("noise", jobs(num_prompts), temperature=1.0, **controlled),
        Text("again64", jobs(batch), batch=batch, remembers=True, **common),
        Text("noise64", jobs(batch), temperature=1.0, batch=batch, **controlled),
    ]


@dataclass
class Runs:
    """What the runs of one contestant gave; `counts` and `host` have an entry a timed run."""

    tokens: list[tuple[int | str, ...]] = field(default_factory=list)
    counts: list[DraftCounts] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


class Ours:
    """The engine's side of one text."""

    def __init__(self, target: EngineTarget, text: Text, trials: Iterator[int]):
        self.target, self.text, self._trials = target, text, trials
        self.runs: dict[str, Runs] = {name: Runs() for name in (OFF, *text.ways)}

    def turn(self, name: str) -> float:
        """Answer all prompts once; seconds."""
        runs, seconds = self.runs[name], [0.0]
        runs.counts.append(DraftCounts())
        answered: list[tuple[int | str, ...]] = []

        def run() -> None:
            jobs, size = self.text.jobs, 1 if self.text.batch == 1 else len(self.text.jobs)
            for first in range(0, len(jobs), size):
                seconds[0] += self._batch(name, jobs[first : first + size], answered, runs.counts[-1])

        runs.host.append(host_seconds(run))
        self._check(name, answered)
        return seconds[0]

    def _batch(self, name: str, jobs: Sequence[Job], answered: list[tuple[int | str, ...]], counts: DraftCounts) -> float:
        text = self.text
        spec, k = text.ways.get(name, (PLAIN, 0))
        cell = Cell(spec, k, EXACT, len(jobs), text.temperature, text.name)
        limits = Limits(text.max_tokens, text.ignore_eos)
        trial = name if text.remembers else f"{name} {next(self._trials)}"
        answers, drafted = self.target.run(cell, jobs, limits, trial)
        counts.add(drafted)
        answered += [answer.tokens for answer in answers]
        end = max(answer.finished for answer in answers)
        return end - answers[0].first_token if text.batch == 1 else end

    def _check(self, name: str, answered: list[tuple[int | str, ...]]) -> None:
        runs, expected = self.runs[name], self.runs[OFF].tokens or answered
        if answered != expected:
            wrong = next(i for i, (ours, theirs) in enumerate(zip(answered, expected, strict=True)) if ours != theirs)
            raise SystemExit(f"speculation: {self.text.name}: answer {wrong} with {name} is not the one without drafts: a defect")
        runs.tokens = answered

    def warm(self, most: int) -> float:
        """Turns that are not timed, until none captures a step, at most `most`: controllers learn what steps cost, and try more drafts.

        Returns the seconds of the last turn without drafts.
        """
        engine, captures, seconds = self.target.loaded(), -1, 0.0
        for number in range(most):
            if self.captures() == captures and number >= WARM:
                break
            captures = self.captures()
            seconds = {name: self.turn(name) for name in self.runs}[OFF]
            engine.stop_speculation()
            while not number and engine.warmup():
                pass  # times kernels that are new
        for runs in self.runs.values():
            runs.counts.clear()
            runs.host.clear()
        return seconds

    def captures(self) -> int:
        """Steps that were captured in this process so far."""
        return int(self.target.loaded().runner.capture_work().count)

    @property
    def num_tokens(self) -> int:
        """Tokens that a turn's seconds count for."""
        return sum(len(tokens) - (self.text.batch == 1) for tokens in self.runs[OFF].tokens)


class Theirs:
    """llama.cpp's side of one text. `missing` says why it takes no part."""

    def __init__(self, one: Contestant | None, text: Text, prompts: list[list[int]], counts: list[int], draft: str):
        self._one, self._prompts, self._counts, self._draft = one, prompts, counts, draft
        self.settings: dict[str, int] = {}
        self.answers: dict[str, list[list[int]]] = {}
        self.missing = "" if one is None else one.missing or ""
        self.names = [f"llama.cpp {way}" for way in text.rivals] if one is not None and not self.missing else []

    def tune(self) -> None:
        """The fastest K of each way, on two prompts; then a turn that is not timed."""
        for name in list(self.names):
            way, best = name.rpartition(" ")[2], float("inf")
            for k in {"lookup": LOOKUP_K, "draft": DRAFT_K}.get(way, (0,)):
                if (seconds := self._answers(name, k, 2)) is not None and seconds < best:
                    best, self.settings[name] = seconds, k
            if name not in self.settings:
                self.names.remove(name)

    def turn(self, name: str) -> float:
        time.sleep(PAUSE)  # its threads spin after their work
        seconds = self._answers(name, self.settings[name], len(self._prompts))
        if seconds is None:
            raise SystemExit(f"speculation: {self.missing}")
        return seconds

    def _answers(self, name: str, k: int, number: int) -> float | None:
        assert self._one is not None
        used = self._one.ask("use", name.rpartition(" ")[2], k, self._draft)
        reply = used if "error" in used else self._one.ask("answers", self._prompts[:number], self._counts[:number])
        if "settings" not in reply:
            self.missing = f"{name}: {reply.get('error', 'no answer')}"
            print(self.missing, file=sys.stderr)
            return None
        seconds, self.answers[name] = reply["settings"]
        return float(seconds)


def ratios(one: Sequence[Round], other: Sequence[Round]) -> Spread:
    """How many times faster `one` is than `other`, from the rounds that both took part in."""
    return spread([Round(b.seconds / a.seconds, max(a.others, b.others)) for a, b in zip(one, other)])


def ratio_figures(one: Spread) -> dict[str, float]:
    return {"median": round(one.median, 3), "low": round(one.low, 3), "high": round(one.high, 3), "rounds": one.rounds, "quiet": one.quiet}


def measure(ours: Ours, theirs: Theirs, rounds: int, pids: list[int]) -> tuple[Line, list[Spread]]:
    """The record of one text, and the spreads that decide whether it is kept."""
    text = ours.text
    turns: dict[str, Callable[[], float]] = {name: _turn(ours.turn, name) for name in ours.runs}
    turns |= {name: _turn(theirs.turn, name) for name in theirs.names}
    captures = ours.captures()
    timed = take_turns(turns, rounds, pids, PATIENCE)
    spreads = {name: spread(each) for name, each in timed.items()}
    line: Line = {
        "text": text.name, "batch": text.batch, "temperature": text.temperature, "requests": len(text.jobs), "tokens": ours.num_tokens,
        "tok_s": {name: each.figures(ours.num_tokens, 1) for name, each in spreads.items()},
        "ratio": {name: ratio_figures(ratios(timed[name], timed[OFF])) for name in text.ways},
        "drafts": {name: _drafts(ours.runs[name], ours.num_tokens) for name in text.ways},
        "host_us": {name: _host_us(ours.runs[name]) for name in ours.runs},
        "added_us": {name: _added_us(ours.runs[name], ours.runs[OFF]) for name in text.ways},
        "captures": ours.captures() - captures,
    }  # fmt: skip
    if theirs.names:
        best, rival = (min(names, key=lambda name: spreads[name].median) for names in (ours.runs, theirs.names))
        same = {name: _share(answers, ours.runs[OFF].tokens) for name, answers in theirs.answers.items()}
        line |= {"ahead": {"of": rival, "by": best, **ratio_figures(ratios(timed[best], timed[rival]))}, "settings": theirs.settings}
        line |= {"same_tokens": same}
    return line | ({"missing": theirs.missing} if theirs.missing else {}), list(spreads.values())


def _turn(turn: Callable[[str], float], name: str) -> Callable[[], float]:
    return lambda: turn(name)


def _drafts(runs: Runs, tokens: int) -> dict[str, float]:
    """Tokens a sequence and step, verified drafts, and the accepted share, over all rounds."""
    turns, drafted = sum(each.turns or 0 for each in runs.counts), sum(sum(each.drafted) for each in runs.counts)
    accepted = sum(sum(each.accepted) for each in runs.counts)
    rates = {
        "tokens_a_step": 1 + accepted / max(1, turns),
        "drafts_a_step": drafted / max(1, turns),
        "accepted": accepted / max(1, drafted),
    }
    return {name: round(rate, 3) for name, rate in rates.items()}


def _host_us(runs: Runs) -> float:
    """Microseconds of the host in a step, those of the prompts' steps included."""
    return round(1e6 * median(host / max(1, each.steps) for host, each in zip(runs.host, runs.counts, strict=True)), 1)


def _added_us(runs: Runs, plain: Runs) -> float:
    """Microseconds that the host works more, by steps: the median over rounds."""
    each = zip(runs.host, plain.host, runs.counts, strict=True)
    return round(1e6 * median((with_drafts - without) / max(1, counts.steps) for with_drafts, without, counts in each), 1)


def _share(answers: Sequence[Sequence[int]], ours: Sequence[Sequence[int | str]]) -> float:
    """How many of our tokens are theirs at the same place."""
    same = sum(a == b for theirs, own in zip(answers, ours) for a, b in zip(theirs, own))
    return round(same / max(1, sum(len(own) for _, own in zip(answers, ours))), 3)


# --- the bars

Figure = Callable[[Mapping[str, Line]], float]


def _models_best(lines: Mapping[str, Line]) -> float:
    return max(float(lines["story"]["ratio"][name]["median"]) for name in MODELS)


def _auto(text: str) -> Figure:
    return lambda lines: float(lines[text]["ratio"]["auto"]["median"])


def _ahead(text: str) -> Figure:
    return lambda lines: float(lines[text]["ahead"]["median"])


def _host(*texts: str) -> Figure:
    return lambda lines: max(float(lines[text]["added_us"]["auto"]) for text in texts)


# what is measured, from the lines by text; gate and goal
BARS: tuple[tuple[str, Figure, float, float], ...] = (
    ("copy and edit text, one sequence, auto against off", _auto("copy"), 2.0, 2.8),
    ("chat, one sequence, auto against off", _auto("chat"), 0.98, 1.0),
    ("stories, one sequence, auto against off", _auto("story"), 0.98, 1.0),
    ("64 concurrent requests, mixed, auto against off", _auto("mixed"), 0.99, 1.05),
    ("stories with the bundled draft model or heads, the best of them, against off", _models_best, 1.4, 2.6),
    ("host time added a step, chat and stories, us", _host("chat", "story"), 60.0, 25.0),
    ("copy: our best against llama.cpp's best", _ahead("copy"), 1.0, 1.5),
    ("stories: our best against llama.cpp's best", _ahead("story"), 1.0, 1.5),
    ("again (answers that were given before), one sequence, auto against off", _auto("again"), 2.0, 2.8),
    ("noise (nothing predicts it), one sequence, auto against off", _auto("noise"), 0.98, 1.0),
    ("again, 64 sequences, auto against off", _auto("again64"), 0.99, 1.05),
    ("noise, 64 sequences, auto against off", _auto("noise64"), 0.99, 1.05),
    ("host time added a step, noise, us", _host("noise"), 60.0, 25.0),
    ("again: our best against llama.cpp's best", _ahead("again"), 1.0, 1.5),
)


def bars(lines: Mapping[str, Line]) -> str:
    """Measured figures by gate and goal; a bar whose text was not measured is left out."""
    rows: list[list[object]] = []
    for label, figure, gate, goal in BARS:
        try:
            value = figure(lines)
        except KeyError:
            continue
        reached = (value <= gate, value <= goal) if goal < gate else (value >= gate, value >= goal)
        verdict = "goal" if reached[1] else "gate" if reached[0] else "missed"
        rows.append([label, f"{value:.1f}" if goal < gate else f"{value:.2f}", f"{gate:g}", f"{goal:g}", verdict])
    return table(["bar", "measured", "gate", "goal", "reached"], rows)


def show(line: Line) -> str:
    """The table of one text."""
    rows: list[list[object]] = []
    for name, rates in line["tok_s"].items():
        drafts, ratio = line["drafts"].get(name, {}), line["ratio"].get(name, {})
        row: list[object] = [name, rates["rate"], rates["low"], rates["high"], f"{rates['quiet']}/{rates['rounds']}"]
        row += [ratio.get("median"), ratio.get("low"), ratio.get("high"), drafts.get("tokens_a_step"), drafts.get("accepted")]
        rows.append([*row, line["host_us"].get(name), line["added_us"].get(name), line.get("same_tokens", {}).get(name)])
    header = ["tok/s", "median", "low", "high", "quiet", "of off", "low", "high", "tokens/step", "accepted", "host us", "added us", "same"]
    return table([f"{line['text']}, {line['batch']} at a time", *header[1:]], rows)


# --- the run


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description="speculation on, off, and llama.cpp's")
    parser.add_argument("--shape", choices=SHAPES, help="random weights instead of the bundled model")
    parser.add_argument("--format", choices=FORMATS, default="BF16", help="of --shape, for both engines")
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept; a temporary folder otherwise")
    parser.add_argument("--texts", help="with commas; default: all")
    parser.add_argument("--rounds", type=int, help="default: 9, with --shape 5")
    parser.add_argument("--prompts", type=int, help="of each text with one sequence at a time; default: 8, with --shape 2")
    parser.add_argument("--max-tokens", type=int, help="of an answer; default: 128, with --shape 48")
    parser.add_argument("--batch", type=int, default=64, help="sequences of mixed, again64 and noise64")
    parser.add_argument("--threads", type=int, default=threads_of_machine(), help="of llama.cpp; ours are TINYVLLM_THREADS")
    parser.add_argument("--llama-python", help="an interpreter with llama-cpp-python; without it llama.cpp takes no part")
    parser.add_argument("--quick", action="store_true", help="one short round, which shows that it runs; nothing is recorded")
    options = parser.parse_args(words)
    small = options.shape is not None
    for name, usual, with_shape, quick in (("rounds", 9, 5, 1), ("prompts", 8, 2, 1), ("max_tokens", 128, 48, 12)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else with_shape if small else usual)
    options.batch = min(options.batch, 4) if options.quick else options.batch
    return options


def texts_of(options: argparse.Namespace) -> list[Text]:
    texts = (shape_texts if options.shape else bundled_texts)(options.prompts, options.max_tokens, options.batch)
    wanted = options.texts.split(",") if options.texts else [text.name for text in texts]
    if wrong := [name for name in wanted if name not in [text.name for text in texts]]:
        raise SystemExit(f"speculation: no text {', '.join(wrong)}; there are {', '.join(text.name for text in texts)}")
    return [text for text in texts if text.name in wanted]


def target_of(options: argparse.Namespace, folder: Path) -> EngineTarget:
    """The engine by its default settings; random weights without a tokenizer, in a cache that holds the batch."""
    engine: dict[str, Any] = {"enable_prefix_caching": True, "max_num_seqs": options.batch if options.quick else 64}
    if options.shape:
        model = checkpoint(options.shape, "folder" if options.format == "BF16" else options.format, folder)
        engine |= {"model": str(model), "skip_tokenizer_init": True, "max_model_len": 512, "num_blocks": 64 * 16}
    ways = max(len(text.ways) for text in texts_of(options))  # they take turns: none is opened, and its steps captured, in a timed one
    return EngineTarget(Sweep(engine=tuple(sorted(engine.items())), batch_sizes=(1,), cost_rows=(1,)), open_drafters=ways)


def rival_of(options: argparse.Namespace, folder: Path, log: Path) -> tuple[Contestant | None, str]:
    """llama.cpp with the same weights, and the file of its draft model. None where no interpreter is named."""
    if options.llama_python is None:
        print("llama.cpp takes no part: no --llama-python", file=sys.stderr)
        return None, ""
    if options.shape:
        model, draft = checkpoint(options.shape, options.format, folder), ""
    else:
        folder.mkdir(parents=True, exist_ok=True)
        model = write_gguf_of(DEMO / "model", folder / "bundled-BF16.gguf")
        draft = str(write_gguf_of(DEMO / "draft", folder / "bundled-draft-BF16.gguf"))
    limits = {"threads": options.threads, "batch": 1, "length": 1024, "chunk": 512}
    one = start("llama.cpp", "play_llama_drafts", options.llama_python, model, limits, log)
    print(f"llama.cpp: {one.missing or f'loaded in {one.load_seconds:.1f} s'}", file=sys.stderr)
    if one.missing is None:
        print(f"llama.cpp: {one.ask('tune', 'decode', 1, 64).get('settings')}", file=sys.stderr)
    return one, draft


def run(options: argparse.Namespace, target: EngineTarget, rival: Contestant | None, draft: str) -> dict[str, Line]:
    lines: dict[str, Line] = {}
    trials, name = count(), options.shape or "bundled"
    for text in texts_of(options):
        ours = Ours(target, text, trials)
        seconds = ours.warm(1 if options.quick else MAX_WARM)
        prompts = [answer_ids(target, job) for job in text.jobs] if text.rivals else []
        theirs = Theirs(rival if text.rivals else None, text, prompts, [len(tokens) for tokens in ours.runs[OFF].tokens], draft)
        theirs.tune()
        rounds = options.rounds if options.quick else rounds_of(text, options.rounds, seconds)
        line, spreads = measure(ours, theirs, rounds, [rival.pid] if rival is not None and rival.process else [])
        lines[text.name] = line
        print(f"\n{show(line)}", flush=True)
        if not options.quick:
            record("speculation", {"model": name, "format": options.format, **line}, spreads)
    return lines


def rounds_of(text: Text, rounds: int, seconds: float) -> int:
    """Rounds where a turn takes `seconds`: fewer of long turns, and more of short ones that are compared with a control."""
    usual = rounds if text.batch == 1 else min(rounds, max(3, rounds - 2))
    return usual if CONTROL not in text.ways else max(usual, min(MAX_ROUNDS, math.ceil(MEASURED / max(seconds, 1e-3))))


def answer_ids(target: EngineTarget, job: Job) -> list[int]:
    """The prompt's token ids."""
    from tinyvllm.engine.prompt import encode_all

    return list(encode_all(target.loaded().tokenizer, [job.prompt.engine_prompt()])[0].token_ids)


def main(words: Sequence[str] | None = None) -> None:
    options = parse_arguments(words)
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "llama.log"
        target = stack.enter_context(closing(target_of(options, folder)))
        rival, draft = rival_of(options, folder, log)
        if rival is not None:
            stack.callback(rival.close)
        lines = run(options, target, rival, draft)
    print(f"\n{bars(lines)}")


if __name__ == "__main__":
    main()
