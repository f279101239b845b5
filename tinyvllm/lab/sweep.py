"""A sweep: the axes of the measurement, and the cells that follow from them.

    model: PATH                        the target; engine options in `engine`
    drafters: [none, ngram, eagle3:PATH, {method: draft_model, model: PATH, label: small}]
    k: [1, 3, auto]                    drafts a step; auto lets the engine's controller choose
    policies: [exact, typical, {name: confidence, tau: 0.3}]
    batch_sizes: [1, 8]
    temperatures: [0, 0.7]
    prompts: [copy, code, chat, story, {file: mine.jsonl}]

docs/lab.md has all keys. A cell without drafts (`none`) is measured for each batch size, temperature and prompt set, whether the list names
it or not: the others are compared with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyvllm.errors import ArgumentError
from tinyvllm.foreign import quoted
from tinyvllm.lab.costs import StepCosts, parse_costs
from tinyvllm.lab.settings import Settings, digest_text, number_in
from tinyvllm.speculate.policies import EXACT, Policy, parse_policy, policy_of

FORMAT = 1  # of the results: another one is another set of keys
MAX_DRAFTS, MAX_BATCH, MAX_PROMPTS, MAX_NEW_TOKENS, MAX_REPEATS, MAX_CELLS = 64, 1024, 10_000, 65_536, 1000, 10_000
NONE = "none"
COST_ROWS = (1, 2, 4, 8, 16, 32, 64)
_SETS = ("copy", "code", "chat", "story")


@dataclass(frozen=True)
class DrafterSpec:
    """A way of guessing: what it is called in the results, and `speculative_config` without the number of drafts, as sorted items."""

    label: str
    method: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def speculates(self) -> bool:
        return self.method != NONE

    def config(self, num_drafts: int | None) -> dict[str, Any] | None:
        """`speculative_config` as vLLM spells it; None without drafts. With `num_drafts` None the engine chooses."""
        if not self.speculates:
            return None
        number = {} if num_drafts is None else {"num_speculative_tokens": num_drafts}
        return {"method": self.method, **dict(self.options), **number}


PLAIN = DrafterSpec(NONE, NONE)


@dataclass(frozen=True)
class PromptSource:
    """A prompt set: its name in the results, and the file that it is read from, or None for one of the bundled world."""

    name: str
    file: str | None = None


@dataclass(frozen=True)
class Cell:
    """One combination of the axes. `k` is None where the engine's controller chooses, and 0 without drafts."""

    drafter: DrafterSpec
    k: int | None
    policy: Policy
    batch_size: int
    temperature: float
    prompts: str

    @property
    def baseline(self) -> Cell:
        """The cell without drafts that this one is compared with."""
        return Cell(PLAIN, 0, EXACT, self.batch_size, self.temperature, self.prompts)

    @property
    def is_baseline(self) -> bool:
        return not self.drafter.speculates

    @property
    def is_lossy(self) -> bool:
        """Whether the output may differ from the baseline's: the prefix of most probable tokens is exact if the request is greedy."""
        return self.policy.lossy and not (self.policy.name == "longest_prefix" and self.temperature == 0)

    def axes(self) -> dict[str, Any]:
        """As a line of the results has it."""
        return {
            "drafter": self.drafter.label,
            "method": self.drafter.method,
            "options": dict(self.drafter.options),
            "k": "auto" if self.k is None else self.k,
            "policy": self.policy.label,
            "lossy": self.is_lossy,
            "batch_size": self.batch_size,
            "temperature": self.temperature,
            "prompts": self.prompts,
        }

    def __str__(self) -> str:
        drafts = "no drafts" if self.is_baseline else f"{self.drafter.label} k={'auto' if self.k is None else self.k} {self.policy.label}"
        return f"{drafts}, batch {self.batch_size}, T {self.temperature:g}, {self.prompts}"


@dataclass(frozen=True)
class FakeSettings:
    """The fake model: acceptance by position for each drafter, the cost curve of its virtual clock, and milliseconds of drafting a step."""

    vocabulary: int
    acceptance: tuple[tuple[str, tuple[float, ...]], ...]
    costs: StepCosts
    draft_ms: float
    seed: int


@dataclass(frozen=True)
class Sweep:
    """All settings. `engine` has the fields of EngineConfig, the model among them, as sorted items."""

    drafters: tuple[DrafterSpec, ...] = (PLAIN, DrafterSpec("ngram", "ngram"))
    k: tuple[int | None, ...] = (4,)
    policies: tuple[Policy, ...] = (EXACT,)
    batch_sizes: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    prompts: tuple[PromptSource, ...] = tuple(PromptSource(name) for name in _SETS)
    num_prompts: int = 8
    max_tokens: int = 128
    repeats: int = 3
    warmup: int = 1
    seed: int = 0
    ignore_eos: bool = False
    quality: bool = True
    paired: bool = True
    cost_rows: tuple[int, ...] = COST_ROWS
    costs: StepCosts | None = None
    engine: tuple[tuple[str, Any], ...] = ()
    fake: FakeSettings | None = None
    servers: tuple[tuple[str, str], ...] = ()  # OpenAI servers by name, which then are the drafters

    @property
    def has_baseline(self) -> bool:
        """Whether anything runs without drafts: of servers, one that is called none."""
        return not self.servers or NONE in dict(self.servers)

    def cells(self) -> list[Cell]:
        """Every combination once, those of one drafter, K and policy together: each needs its engine. Baselines come first."""
        found = dict.fromkeys(cell.baseline for cell in self._combinations() if self.has_baseline)
        return list(found | dict.fromkeys(self._combinations()))

    def _combinations(self) -> Iterator[Cell]:
        for drafter in self.drafters:
            for k in self.k if drafter.speculates else (0,):
                for policy in self.policies if drafter.speculates else (EXACT,):
                    for source in self.prompts:
                        for temperature in self.temperatures:
                            for batch_size in self.batch_sizes:
                                yield Cell(drafter, k, policy, batch_size, temperature, source.name)

    def key_of(self, cell: Cell, about: Mapping[str, Any]) -> str:
        """What a finished cell is known by: its axes, the settings that its figures depend on, and `about` the target and the prompts."""
        settings = [FORMAT, self.num_prompts, self.max_tokens, self.repeats, self.warmup, self.seed, self.ignore_eos, self.quality]
        text = digest_text([settings, self.paired, cell.axes(), dict(about)])
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def parse_sweep(values: Mapping[str, Any], where: str = "sweep") -> Sweep:
    """A sweep from a mapping of JSON types. ArgumentError, with the key, for anything that it does not know or take."""
    s = Settings(values, where)
    engine = dict(s.mapping("engine").items())
    if (model := s.text("model")) is not None:
        if "model" in engine:
            raise ArgumentError(f"{where}: model is there twice: next to engine, and in it; give one")
        engine["model"] = model
    if "speculative_config" in engine:
        raise ArgumentError(f"{where}: engine: speculative_config is what drafters and k are for")
    default, servers = Sweep(), _servers(s)
    sweep = Sweep(
        *(_server_axes(s, servers) if servers else _axes(s)),
        s.axis("batch_sizes", default.batch_sizes, lambda value: _integer(s, "batch_sizes", value, 1, MAX_BATCH)),
        s.axis("temperatures", default.temperatures, lambda value: _temperature(s, value)),
        s.axis("prompts", _SETS, lambda value: _source(s, value)),
        s.integer("num_prompts", default.num_prompts, 1, MAX_PROMPTS),
        s.integer("max_tokens", default.max_tokens, 2, MAX_NEW_TOKENS),
        s.integer("repeats", default.repeats, 1, MAX_REPEATS),
        s.integer("warmup", default.warmup, 0, MAX_REPEATS),
        s.integer("seed", default.seed, 0, 2**31 - 1),
        s.boolean("ignore_eos", default.ignore_eos),
        s.boolean("quality", default.quality),
        s.boolean("paired", default.paired),
        s.axis("cost_rows", default.cost_rows, lambda value: _integer(s, "cost_rows", value, 1, MAX_BATCH)),
        parse_costs(s, "costs"),
        tuple(sorted(engine.items())),
        _fake(s.mapping("fake"), where) if "fake" in s else None,
        servers,
    )
    s.finish()
    _check(sweep, where)
    return sweep


def _axes(s: Settings) -> tuple[tuple[DrafterSpec, ...], tuple[int | None, ...], tuple[Policy, ...]]:
    """Drafters, K and policies."""
    return (
        s.axis("drafters", [NONE, "ngram"], lambda value: _drafter(s, value)),
        s.axis("k", (4,), lambda value: _k(s, value)),
        s.axis("policies", ["exact"], lambda value: _policy(s, value)),
    )


def _servers(s: Settings) -> tuple[tuple[str, str], ...]:
    servers = s.mapping("servers").items()
    for name, url in servers.items():
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise s.refuse(f"servers: {name}", "a URL such as http://localhost:8000", url)
    return tuple(servers.items())


def _server_axes(s: Settings, servers: Sequence[tuple[str, str]]) -> tuple[tuple[DrafterSpec, ...], tuple[None], tuple[Policy, ...]]:
    """Each server is a drafter: how it guesses, how much and by which rule was chosen when it was started."""
    if axis := next((key for key in ("drafters", "k", "policies", "fake", "engine", "model") if key in s), None):
        raise ArgumentError(f"servers and {axis} contradict each other: a server was started with its own; name the servers after theirs")
    specs = tuple(PLAIN if name == NONE else DrafterSpec(name, "server", (("url", url),)) for name, url in servers)
    return specs, (None,), (EXACT,)


def _check(sweep: Sweep, where: str) -> None:
    for names, what in (([one.label for one in sweep.drafters], "drafters"), ([one.name for one in sweep.prompts], "prompts")):
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ArgumentError(f"{where}: {what}: {quoted(twice)} is there twice; give each its own label")
    axes = (sweep.drafters, sweep.k, sweep.policies, sweep.batch_sizes, sweep.temperatures, sweep.prompts)
    number = 1
    for axis in axes:
        number *= len(axis)
    if number > MAX_CELLS:
        raise ArgumentError(f"{where}: {number} cells, and at most {MAX_CELLS} are measured; shorten an axis")


def _integer(s: Settings, key: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise s.refuse(key, f"integers from {low} to {high}", value)
    return value


def _k(s: Settings, value: Any) -> int | None:
    return None if value == "auto" else _integer(s, "k (or auto)", value, 1, MAX_DRAFTS)


def _temperature(s: Settings, value: Any) -> float:
    number = number_in(value, 0, 100)
    if number is None:
        raise s.refuse("temperatures", "numbers from 0 to 100", value)
    return number


def _drafter(s: Settings, value: Any) -> DrafterSpec:
    if isinstance(value, str) and value:
        return PLAIN if value == NONE else _named_drafter(value)
    if not isinstance(value, dict) or not isinstance(value.get("method"), str) or not isinstance(value.get("label", ""), str):
        raise s.refuse("drafters", "names, or mappings with method, label and the other keys of speculative_config", value)
    if "num_speculative_tokens" in value:
        raise ArgumentError("drafters: num_speculative_tokens is the axis k")
    options = {str(name): one for name, one in value.items() if name not in ("method", "label")}
    if bad := next((name for name, one in options.items() if not isinstance(one, (str, int, float, bool))), None):
        raise s.refuse(f"drafters: {bad}", "a text, a number or a boolean", options[bad])
    if value["method"] == NONE:
        return PLAIN
    return DrafterSpec(value.get("label") or value["method"], value["method"], tuple(sorted(options.items())))


def _named_drafter(text: str) -> DrafterSpec:
    """METHOD, or METHOD:MODEL, which the results call by the method and the last part of the model's name."""
    method, colon, model = text.partition(":")
    if not colon:
        return DrafterSpec(method, method)
    name = model.replace("\\", "/").rstrip("/").rpartition("/")[2]
    if not method or not name:
        raise ArgumentError(f"drafters: expected METHOD or METHOD:MODEL, such as eagle3:heads, got {quoted(text)}")
    return DrafterSpec(f"{method}:{name}", method, (("model", model),))


def _policy(s: Settings, value: Any) -> Policy:
    if isinstance(value, str):
        return parse_policy(value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise s.refuse("policies", "names, or mappings with name and its parameters", value)
    return policy_of(value["name"], {str(name): one for name, one in value.items() if name != "name"})


def _source(s: Settings, value: Any) -> PromptSource:
    if isinstance(value, str):
        if value in _SETS:
            return PromptSource(value)
        raise s.refuse("prompts", f"{', '.join(_SETS)} or a mapping with file and name", value)
    if not isinstance(value, dict):
        raise s.refuse("prompts", f"{', '.join(_SETS)} or a mapping with file and name", value)
    own = Settings(value, "sweep: prompts")
    file, name = own.text("file"), own.text("name")
    own.finish()
    if file is None:
        raise s.refuse("prompts", "a mapping with file", value)
    return PromptSource(name or file.replace("\\", "/").rpartition("/")[2].removesuffix(".jsonl"), file)


def _fake(s: Settings, where: str) -> FakeSettings:
    rates: list[tuple[str, tuple[float, ...]]] = []
    for label, values in s.mapping("acceptance").items().items():
        shares = [number_in(value, 0, 1) for value in values] if isinstance(values, list) else []
        if not shares or None in shares or len(shares) > MAX_DRAFTS:
            raise s.refuse(f"acceptance: {label}", f"a list of 1 to {MAX_DRAFTS} probabilities, one a position", values)
        rates.append((label, tuple(share for share in shares if share is not None)))
    costs = parse_costs(s, "step_ms") or StepCosts.of([(1, 10.0), (64, 20.0)])
    draft_ms = number_in(s.get("draft_ms", 0.0), 0, 1e6)
    if draft_ms is None:
        raise s.refuse("draft_ms", "milliseconds from 0", s.get("draft_ms"))
    fake = FakeSettings(s.integer("vocabulary", 48, 4, 4096), tuple(rates), costs, draft_ms, s.integer("seed", 0, 0, 2**31 - 1))
    s.finish()
    return fake
