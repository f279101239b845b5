"""Which token followed which context, and how often: the statistics of suffix decoding, in constant time and memory a token.

Suffix decoding (Oliaro et al. 2024, arXiv:2411.04975) keeps the suffixes of a text in a tree, and pays for each token by the depth of the
tree. Here a context is the last 16, 8, 4 or 2 tokens, and has one entry of a hash table: four updates a token, whatever the text is. A
guess uses the longest context that occurred before, as PPM does (Cleary and Witten 1984).

Tokens come from outside, so the hashes are salted. Two contexts with the same hash (one pair in 2^61) would only cost a wrong draft.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Sequence as Row

from tinyvllm.speculate.protocol import Draft

LENGTHS = (16, 8, 4, 2)
# The estimate that c of n continuations are right is c / (n + ESCAPE): a short context also recurs by chance.
ESCAPE = (0.1, 0.3, 1.0, 3.0)
MAX_BRANCHES = 8  # tokens that are counted after one context; the others only raise its total
# Upper bounds on CPython 3.11: an entry's slots right after the table has grown, its key and value; list and dictionary of a branched one.
ENTRY_BYTES, BRANCH_BYTES = 200, 600

_SALT = int.from_bytes(os.urandom(7), "little")
_START = -1  # before the first token
_TOKEN, _ONCE = (1 << 32) - 1, 1 << 32
_ROOM = 64  # tokens between two looks at the bounds


class Trail:
    """The hashes of the contexts that end with the last token. A context of 2 n tokens is hashed from the two contexts of n in it."""

    __slots__ = ("_eights", "_fours", "_token", "_twos", "keys")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._token, self._twos, self._fours, self._eights = _START, [0] * 3, [0] * 5, [0] * 9
        self.keys: tuple[int, ...] = ()  # in the order of LENGTHS; none before the first token
        for token in tokens:
            self.push(token)

    def copy(self) -> Trail:
        """An independent trail at the same place."""
        other = Trail.__new__(Trail)
        other._token, other.keys = self._token, self.keys
        other._twos, other._fours, other._eights = self._twos[-3:], self._fours[-5:], self._eights[-9:]
        return other

    def push(self, token: int) -> None:
        """Append one token."""
        two = hash((_SALT, self._token, token))
        four = hash((self._twos[-2], two))
        eight = hash((self._fours[-4], four))
        self.keys = (hash((self._eights[-8], eight)), eight, four, two)
        self._token = token
        self._twos.append(two)
        self._fours.append(four)
        self._eights.append(eight)
        if len(self._eights) > 64:
            del self._twos[:-3], self._fours[:-5], self._eights[:-9]


def context_key(tokens: list[int]) -> int:
    """What `Trail.keys` has for a context of these tokens, 4 or 8 of them."""
    if len(tokens) == 4:
        one, two, three, four = tokens
        return hash((hash((_SALT, one, two)), hash((_SALT, three, four))))
    return hash((context_key(tokens[:4]), context_key(tokens[4:])))


class ContextCounts:
    """The continuations of contexts, with their counts. Holds at most about `max_bytes`, by ENTRY_BYTES and BRANCH_BYTES.

    There are two generations. A context that occurs again moves to the young one. When that one fills half of `max_bytes`, the old one is
    dropped, and the young one is the old one from then on. So the contexts of the last max_bytes / 2 always stay.

    The value of a context that one token followed n times is token + (n - 1) * 2^32; that of others is a list [n, most frequent token, its
    count, {token: count}]. Of equally frequent tokens the latest one is the most frequent.
    """

    __slots__ = ("_branched", "_old", "_old_branched", "_young", "max_bytes")

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._young: dict[int, int | list] = {}  # type: ignore[type-arg]  # a list of mixed types
        self._old: dict[int, int | list] = {}  # type: ignore[type-arg]
        self._branched = self._old_branched = 0

    @property
    def nbytes(self) -> int:
        """Bytes of both generations, at most."""
        return (len(self._young) + len(self._old)) * ENTRY_BYTES + (self._branched + self._old_branched) * BRANCH_BYTES

    def learn(self, trail: Trail, tokens: Row[int]) -> None:
        """Count the tokens after the contexts that they follow; the trail is before the first of them, and ends after the last."""
        for start in range(0, len(tokens), _ROOM):
            for token in tokens[start : start + _ROOM]:
                self._count(trail.keys, token)
                trail.push(token)
            if len(self._young) * ENTRY_BYTES + self._branched * BRANCH_BYTES > self.max_bytes // 2:
                self.drop_old()

    def drop_old(self) -> None:
        """Forget the old generation; the young one takes its place."""
        self._old, self._old_branched = self._young, self._branched
        self._young, self._branched = {}, 0

    def __contains__(self, key: int) -> bool:
        """Whether the context of a key occurred."""
        return key in self._young or key in self._old

    def best(self, key: int) -> tuple[int, int, int] | None:
        """The token that followed a context most often, its count, and the count of the context; None if it did not occur."""
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is None:
                return None
        if type(value) is int:
            count = (value >> 32) + 1
            return value & _TOKEN, count, count
        return value[1], value[2], value[0]  # type: ignore[index]

    def _count(self, keys: tuple[int, ...], token: int) -> None:
        young, old = self._young, self._old
        for key in keys:
            value = young.get(key)
            if value is None:
                value = old.pop(key, None) if old else None
                if value is None:
                    young[key] = token
                    continue
                young[key] = value
                if type(value) is not int:
                    self._branched, self._old_branched = self._branched + 1, self._old_branched - 1
            if type(value) is not int:
                _count_branch(value, token)  # type: ignore[arg-type]
            elif value & _TOKEN == token:
                young[key] = value + _ONCE
            else:
                count = (value >> 32) + 1
                young[key] = branches = [count, value & _TOKEN, count, {value & _TOKEN: count}]
                _count_branch(branches, token)
                self._branched += 1


def _count_branch(branches: list, token: int) -> None:  # type: ignore[type-arg]
    branches[0] += 1
    counts: dict[int, int] = branches[3]
    count = counts.get(token, 0) + 1
    if count > 1 or len(counts) < MAX_BRANCHES:
        counts[token] = count
        if count >= branches[2]:
            branches[1], branches[2] = token, count


def guess(trail: Trail, sources: Row[ContextCounts], max_tokens: int, min_survival: float) -> Draft:
    """The most likely tokens after the trail, one after another, by the longest context that any source has; of two equal ones the first.

    Ends before the token whose estimated chance to be accepted, with all before it, is below `min_survival`.
    """
    draft, survival = Draft(), 1.0
    for _ in range(max_tokens):
        following = _next(trail.keys, sources)
        if following is None:
            break
        token, confidence = following
        survival *= confidence
        if survival < min_survival:
            break
        if not draft.tokens:
            trail = trail.copy()
        draft.tokens.append(token)
        draft.confidences.append(confidence)
        trail.push(token)
    return draft


def _next(keys: tuple[int, ...], sources: Row[ContextCounts]) -> tuple[int, float] | None:
    """A token and its confidence."""
    for key, escape in zip(keys, ESCAPE, strict=False):
        for source in sources:
            best = source.best(key)
            if best is not None:
                token, count, total = best
                return token, count / (total + escape)
    return None
