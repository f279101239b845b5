"""How many drafts a sequence gets in a step: as many as raise the expected tokens a second. No clock, no randomness.

The expected tokens of a step are 1 for each sequence, and for each draft the chance that it and those before it are accepted. Drafts
of all sequences are admitted in the order of that chance, as vLLM 0.33 does, and the number is taken that has the most tokens by the cost
curve (docs/decisions/0036-how-many-drafts-pay.md).
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from math import exp, log

from tinyvllm.errors import ArgumentError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import Sequence
from tinyvllm.speculate.cost_curve import MAX_FEW, CostCurve, StepCosts
from tinyvllm.speculate.protocol import Draft, DraftRequest
from tinyvllm.speculative import MAX_DRAFTS, max_lookup_drafts

MAX_CHANCE = 0.98  # of a single draft: no estimate is certain
MIN_CHANCE = 0.02  # of a draft with all before it; what is less likely never pays
MIN_GAIN = 0.02  # of tokens a second: covers what the host does for drafts, and that it does not overlap with the device


class FixedController:
    """Always the same number of drafts."""

    pauses = False

    def __init__(self, num_drafts: int):
        self._num_drafts = _checked(num_drafts)

    def limits(self, sequences: Row[Sequence], num_sequences: int) -> list[int]:
        """The number, for each."""
        return [self._num_drafts] * len(sequences)

    def rest(self, sequences: Row[Sequence]) -> int:
        """None."""
        return 0

    def batch_pause(self, num_sequences: int) -> int:
        """None."""
        return 0

    def choose(self, requests: Row[DraftRequest], drafts: Row[Draft], num_sequences: int) -> list[int]:
        """All of each draft."""
        return [len(draft.tokens) for draft in drafts]

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Nothing is learned."""

    def observe_step(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Nothing is learned."""

    def observe_proposal(self, num_drafts: int, seconds: float) -> None:
        """Nothing is learned."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""


class WindowController(FixedController):
    """The simple adaptive rule: one draft more or less for a sequence, by its acceptance over a window.

    `raise_at` or more raises the number, less than `lower_at` lowers it. A sequence begins with half of `max_drafts`, and
    keeps at least one.
    """

    def __init__(self, max_drafts: int, window: int = 16, raise_at: float = 0.8, lower_at: float = 0.4):
        """`window`: drafts that are verified between two changes."""
        super().__init__(max_drafts)
        if window < 1 or not 0 <= lower_at <= raise_at <= 1:
            raise ArgumentError(
                f"speculation: expected window >= 1 and 0 <= lower_at <= raise_at <= 1, got window={window}, lower_at={lower_at}, "
                f"raise_at={raise_at}"
            )
        self._window, self._raise_at, self._lower_at = window, raise_at, lower_at
        self._counts: dict[int, tuple[int, int, int]] = {}  # number of drafts; verified and accepted since it changed

    def limits(self, sequences: Row[Sequence], num_sequences: int) -> list[int]:
        """Each sequence's own number."""
        return [self._count(sequence)[0] for sequence in sequences]

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Count, and change the number at the end of a window."""
        number, verified, accepted = self._count(sequence)
        verified, accepted = verified + num_drafts, accepted + num_accepted
        if verified >= self._window:
            if accepted >= self._raise_at * verified:
                number = min(self._num_drafts, number + 1)
            elif accepted < self._lower_at * verified:
                number = max(1, number - 1)
            verified = accepted = 0
        self._counts[sequence.sequence_id] = number, verified, accepted

    def forget(self, sequence: Sequence) -> None:
        """Drop its window."""
        self._counts.pop(sequence.sequence_id, None)

    def _count(self, sequence: Sequence) -> tuple[int, int, int]:
        return self._counts.get(sequence.sequence_id, (max(1, self._num_drafts // 2), 0, 0))


def _checked(num_drafts: int) -> int:
    if not 1 <= num_drafts <= MAX_DRAFTS:
        raise ArgumentError(f"speculation: num_speculative_tokens must be 1 to {MAX_DRAFTS}, got {num_drafts}")
    return num_drafts


# ---- the adaptive controller ----

_BINS = 32  # of confidence
_PRIOR_SLOPE, _PRIOR_BIAS = 0.5, -0.2  # vLLM's: logit(chance) = slope * logit(confidence) + bias
_PRIOR_CHANCE = 0.5  # of a draft without confidence
_PRIOR_COUNT, _MAX_COUNT = 4, 100  # weight of the prior; of the past


class Calibration:
    """How often a draft is accepted if those before it are: by the drafter's confidence, in bins, or by position where it has none.

    Bins instead of a logistic curve (Zadrozny and Elkan 2001): confidences by frequency take few values, and a lookup is cheaper than a
    logarithm and an exponential. The bins begin as a logistic curve.
    """

    def __init__(self) -> None:
        bins = [(i + 0.5) / _BINS for i in range(_BINS)]
        self._chances = [1 / (1 + exp(-_PRIOR_SLOPE * log(c / (1 - c)) - _PRIOR_BIAS)) for c in bins]
        self._chances += [_PRIOR_CHANCE] * MAX_DRAFTS
        self._weights = [_PRIOR_COUNT] * (_BINS + MAX_DRAFTS)

    def keys(self, draft: Draft) -> list[int]:
        """The bin of each token."""
        if len(draft.confidences) == len(draft.tokens):
            return [min(_BINS - 1, int(max(0.0, c) * _BINS)) for c in draft.confidences]
        return self.position_keys(len(draft.tokens))

    @staticmethod
    def position_keys(count: int) -> list[int]:
        """The bins of the positions 0 to `count`."""
        return [_BINS + min(i, MAX_DRAFTS - 1) for i in range(count)]

    def chance(self, key: int) -> float:
        """Between 0 and 1."""
        return self._chances[key]

    def observe(self, key: int, accepted: bool) -> None:
        """Whether a draft of the bin was the token that came, those before it being right."""
        weight = self._weights[key] = min(_MAX_COUNT, self._weights[key] + 1)
        self._chances[key] += (accepted - self._chances[key]) / weight


_DECAY, _PRIOR = 0.95, 1.5
PATIENCE = 4  # times in a row that a sequence is asked in vain without a pause
MAX_PAUSE_LOOKUP, MAX_PAUSE_MODEL = 16, 256  # tokens
_SHORTEST = 1e-9  # seconds of a call, without its captures
MAX_PAUSE_BATCH = 64  # steps
MAX_ROW = 0.5  # what one more row of a large batch may cost for guesses to be tried, in what a token of the step costs
_FADE, _ALL_HOST = 0.9, 2.0  # a call; the host's time for guesses by that of the drafter alone
MEASURE, MEASURE_EVERY = 4, 16  # of MEASURE_EVERY steps of a number of sequences whose time is not known, MEASURE have no drafts
_PROOF = 2  # tokens of a guess that was not verified, all right, from the first: the text may have begun to repeat


@dataclass(slots=True)
class _Account:
    """Seconds that drafts save by expectation in large batches of one class of sizes, and what guessing them takes; both fade."""

    saved: float = 0.0
    spent: float = 0.0
    calls: int = 0
    pause: int = 0  # the last one, if drafts have not paid since

    def spend(self, seconds: float) -> None:
        self.saved, self.spent, self.calls = _FADE * self.saved, _FADE * self.spent + _ALL_HOST * seconds, self.calls + 1

    def next_pause(self) -> int:
        """Steps without guesses from now on; where these have taken more than they save, twice the last pause. Then one is tried."""
        if self.calls < PATIENCE:
            return 0
        if self.saved >= self.spent:
            self.pause = 0
        else:
            self.calls, self.pause = PATIENCE - 1, min(MAX_PAUSE_BATCH, 2 * self.pause or PATIENCE)
        return self.pause


@dataclass(slots=True)
class _History:
    """What is known of a sequence. The last guess waits for the tokens that came in its place, whether it was verified or not."""

    accepted: float = 0.0  # drafts, and how many were expected; both fade
    expected: float = 0.0
    length: int = 0  # at the last call
    time: int = 0  # AdaptiveController._time at the last call
    guess: list[int] | None = None
    keys: list[int] | None = None
    base: int = 0  # position of the first token of the guess
    verified: bool = False  # some of the guess
    score_at: int = 0  # time from which enough tokens have come to score a guess that is not verified
    asked_at: int = -1  # its length when it was asked last
    misses: int = 0  # times in a row that asking has gained nothing
    probed: bool = False  # asked although it does not seem to pay
    probe_pause: int = 8  # tokens until the next probe
    resume_at: int = 0  # time (AdaptiveController._time) from which it is asked again

    @property
    def ratio(self) -> float:
        """How much better than others of the same confidence its drafts are."""
        return (self.accepted + _PRIOR) / (self.expected + _PRIOR)


class AdaptiveController:
    """Chooses the drafts of a step by calibrated chances and the cost curve.

    Guesses that are not verified are scored by the tokens that come, for nothing. A sequence that is asked PATIENCE times in a row in vain
    is asked less often: the pause doubles, up to MAX_PAUSE_LOOKUP tokens, and ends when a guess is verified, or when _PROOF tokens of one
    that was not turn out right. Pauses end together, at multiples of their lengths, so that most steps of a batch ask for nothing. A
    drafter that runs a model (`looks_up` False) is asked for as many drafts as pay by acceptance at each position; if none do, for one
    after pauses that double up to MAX_PAUSE_MODEL tokens.
    """

    pauses = True

    def __init__(self, max_drafts: int, costs: StepCosts | None = None, looks_up: bool = True):
        self.costs = costs or StepCosts()
        self._max_drafts, self._looks_up = _checked(max_drafts), looks_up
        self._calibration = Calibration()
        self._histories: dict[int, _History] = {}
        self._time = 0  # tokens by which the sequences have advanced; those of drafts do not count
        self._proposals = CostCurve()  # of a drafter's calls, by drafts of a sequence
        self._accounts: dict[int, _Account] = {}  # by class of sizes
        self._account: _Account | None = None  # of the step, if its batch is large

    # ---- before a step ----

    def limits(self, sequences: Row[Sequence], num_sequences: int) -> list[int]:
        """0 for a sequence in a pause; otherwise as many as pay if all are right, or for a model what pays."""
        histories = self._updated(sequences)
        awake = [history.asked_at == history.length or history.resume_at <= self._time for history in histories]
        if not any(awake) or self._must_measure(num_sequences):
            return [0] * len(sequences)
        if self._looks_up:
            self._account = self._account_of(num_sequences)
            most = self._worth(num_sequences, sum(awake))
            if not most:  # whatever the guess
                for history in histories:
                    history.resume_at = max(history.resume_at, self._time + MAX_PAUSE_LOOKUP)
                return [0] * len(sequences)
        else:
            most = self._passes(histories, awake, num_sequences)
        for history, asked in zip(histories, awake, strict=True):
            history.probed = most == 0
            if asked and self._looks_up:
                self._ask(history)
        return [max(1, most) if asked else 0 for asked in awake]

    def batch_pause(self, num_sequences: int) -> int:
        """For a large batch whose rows cost nearly what its tokens do, or whose steps were not timed yet, and where guesses have taken more
        than they saved."""
        account = self._account_of(num_sequences) if self._looks_up else None
        if account is None:
            return 0
        if not self.costs.knows(num_sequences):
            return MEASURE_EVERY
        half, seconds = num_sequences // 2, self.costs.seconds
        if self.costs.knows(half):
            row = 2 * (1 - seconds(half, 0) / seconds(num_sequences, 0))  # the second half of the rows, by their share of the step
            if row > MAX_ROW:
                return MAX_PAUSE_BATCH
        return account.next_pause()

    def rest(self, sequences: Row[Sequence]) -> int:
        """Until the shortest of the sequences' pauses ends, or a guess that waits can be scored."""
        histories = [self._histories[sequence.sequence_id] for sequence in sequences]
        return min(h.resume_at if h.guess is None else min(h.resume_at, h.score_at) for h in histories) - self._time

    def choose(self, requests: Row[DraftRequest], drafts: Row[Draft], num_sequences: int) -> list[int]:
        """The drafts with the most expected tokens a second."""
        candidates: list[tuple[float, int]] = []
        for i, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            if draft.tokens:
                candidates += [(chance, -i) for chance in self._chances(self._note(request.sequence, draft))]
        candidates.sort(reverse=True)
        if self._looks_up:
            del candidates[max_lookup_drafts(num_sequences) :]
        counts = [0] * len(drafts)
        best = self._best_count([chance for chance, _ in candidates], num_sequences)
        for _, i in candidates[:best]:
            counts[-i] += 1
        if best and self._account is not None:
            tokens = num_sequences + sum(chance for chance, _ in candidates[:best])
            plain = self.costs.seconds(num_sequences, 0)
            self._account.saved += plain * tokens / num_sequences - self.costs.seconds(num_sequences, best)
        for request, count in zip(requests, counts, strict=True):
            if count:
                history = self._histories[request.sequence.sequence_id]
                history.verified = True
                if not history.probed or history.probe_pause < MAX_PAUSE_MODEL:  # the first probes are all made in a row
                    history.misses, history.resume_at = 0, self._time
        return counts

    # ---- after a step ----

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Nothing: the sequence's tokens tell."""

    def observe_step(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """What drafts cost."""
        self.costs.observe(num_sequences, num_drafts, seconds)

    def observe_proposal(self, num_drafts: int, seconds: float) -> None:
        """The drafter took so long for up to `num_drafts` drafts of each sequence."""
        if self._account is not None:
            self._account.spend(seconds)
        self._proposals.observe(num_drafts, max(seconds, _SHORTEST))

    def forget(self, sequence: Sequence) -> None:
        """Drop its history."""
        self._histories.pop(sequence.sequence_id, None)

    # ---- parts ----

    def _account_of(self, num_sequences: int) -> _Account | None:
        return None if num_sequences <= MAX_FEW else self._accounts.setdefault(num_sequences.bit_length(), _Account())

    def _must_measure(self, num_sequences: int) -> bool:
        """Whether a step without drafts is wanted: only what it takes tells what drafts add. Not for long, as it may not be timed."""
        return not self.costs.knows(num_sequences) and self._time % MEASURE_EVERY < MEASURE

    def _worth(self, num_sequences: int, num_asked: int) -> int:
        """How many drafts of each of the sequences asked could pay if all were right, by powers of two. 0: no guess is worth its call."""
        seconds, most, total = self.costs.seconds, self._max_drafts * num_asked, 0
        rate, count = (1 + MIN_GAIN) * num_sequences / seconds(num_sequences, 0), 1
        while count <= most:
            if num_sequences + MAX_CHANCE * count > rate * seconds(num_sequences, count):
                total = count
            count *= 2
        return min(self._max_drafts, 2 * total)

    def _best_count(self, chances: list[float], num_sequences: int) -> int:
        """How many of the drafts, likeliest first, have the most expected tokens a second."""
        seconds, tokens = self.costs.seconds, float(num_sequences)
        rate = tokens / seconds(num_sequences, 0)
        best, best_rate = 0, (1 + MIN_GAIN) * rate
        for count, chance in enumerate(chances, start=1):
            tokens += chance
            if tokens > best_rate * (cost := seconds(num_sequences, count)):
                best, best_rate = count, tokens / cost
        return best

    def _passes(self, histories: list[_History], awake: list[bool], num_sequences: int) -> int:
        """How many drafts of each awake sequence pay, by acceptance at each position; 0 if none."""
        ratios = [history.ratio for history, up in zip(histories, awake, strict=True) if up]
        fixed, per_pass = self._proposal_line()
        tokens, survivals, seconds = float(num_sequences), [1.0] * len(ratios), self.costs.seconds
        best, best_rate = 0, (1 + MIN_GAIN) * tokens / seconds(num_sequences, 0)
        for count, key in enumerate(self._calibration.position_keys(self._max_drafts), start=1):
            chance = self._calibration.chance(key)
            survivals = [survival * min(MAX_CHANCE, chance * ratio) for survival, ratio in zip(survivals, ratios, strict=True)]
            tokens += sum(survivals)
            rate = tokens / (seconds(num_sequences, count * len(ratios)) + fixed + count * per_pass)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _proposal_line(self) -> tuple[float, float]:
        """Seconds of a call of a drafter that runs a model: its own, and those of a position. With one number measured, half is its own."""
        points = self._proposals.points()
        if not points:
            return 0.0, 0.0
        low, high = min(points), max(points)
        per_pass = max(0.0, (points[high] - points[low]) / (high - low)) if low < high else points[low] / (2 * low)
        return max(0.0, points[low] - low * per_pass), per_pass

    def _note(self, sequence: Sequence, draft: Draft) -> _History:
        """Keep the guess until its tokens come."""
        history = self._histories.setdefault(sequence.sequence_id, _History())
        if history.guess is not None and len(sequence) > history.base:
            self._score(history, sequence)
        history.guess, history.keys, history.base = draft.tokens, self._calibration.keys(draft), len(sequence)
        history.verified, history.score_at = False, self._time + _PROOF
        if not self._looks_up:  # `limits` may have been for a look ahead of the last token, without a pass
            self._ask(history)
        return history

    def _chances(self, history: _History) -> list[float]:
        """The chance of each token of the guess that it and those before it are right; ends where that gets too low."""
        survival, ratio, chances = 1.0, history.ratio, []
        for key in history.keys or ():
            survival *= min(MAX_CHANCE, self._calibration.chance(key) * ratio)
            if survival < MIN_CHANCE:
                break
            chances.append(survival)
        return chances

    def _updated(self, sequences: Row[Sequence]) -> list[_History]:
        """The sequences' histories, with their last guesses scored by the tokens that came since."""
        histories, times = [], []
        for sequence in sequences:
            history, length = self._histories.setdefault(sequence.sequence_id, _History()), len(sequence)
            if history.length:  # at least one token a step
                times.append(history.time + length - history.length)
            history.length = length
            if history.guess is not None and length >= history.base + (1 if history.verified else _PROOF):
                self._score(history, sequence)
            histories.append(history)
        self._time = max(self._time, min(times, default=0))
        for history in histories:
            history.time = self._time
        return histories

    def _score(self, history: _History, sequence: Sequence) -> None:
        guess, keys = history.guess or [], history.keys or []
        history.guess = history.keys = None
        right = 0
        for i, token in enumerate(sequence.token_ids(history.base, history.base + len(guess))):
            accepted = token == guess[i]
            self._learn(history, keys[i], accepted)
            if not self._looks_up and keys[i] < _BINS:
                self._calibration.observe(_BINS + i, accepted)
            if not accepted:
                break
            right += 1
        if right >= _PROOF or (right and history.probed):
            history.misses, history.resume_at = 0, 0
        elif right:
            history.misses = max(0, history.misses - 2)  # the call itself is one

    def _learn(self, history: _History, key: int, accepted: bool) -> None:
        history.accepted = _DECAY * history.accepted + accepted
        history.expected = _DECAY * history.expected + self._calibration.chance(key)
        self._calibration.observe(key, accepted)

    def _ask(self, history: _History) -> None:
        """The sequence is asked, in vain until `choose` or its tokens show that it was not: when it would be asked again."""
        if history.asked_at == history.length:
            return
        history.asked_at, history.misses = history.length, history.misses + 1
        pause, most = 1, MAX_PAUSE_LOOKUP if self._looks_up else MAX_PAUSE_MODEL
        if history.probed:
            pause, history.probe_pause = history.probe_pause, min(most, 2 * history.probe_pause)
        else:
            history.probe_pause = 8
            if history.misses >= PATIENCE:
                pause = min(most, 2 << min(20, history.misses - PATIENCE))
        history.resume_at = _multiple_after(self._time, pause) if self._looks_up else self._time + pause


def _multiple_after(time: int, pause: int) -> int:
    """The multiple of `pause` that is nearest to its end, after `time`: sequences that pause equally long wake together."""
    return (time + pause + pause // 2) // pause * pause
