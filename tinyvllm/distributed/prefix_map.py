"""Which replica has computed which beginning of a prompt: hashes of prompts, and a bounded map of them. Knows no Ray and no engine.

A prompt is hashed in pieces of its bytes, each with the hash before it: the chaining of the prefix cache (tinyvllm/cache/prefix.py).
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b

PIECE_BYTES = 256  # of a prompt: 64 token ids, or about as many tokens of text
MAX_PIECES = 256  # of one prompt; what follows does not count
MAX_ENTRIES = 200_000  # hashes in a map, about 200 bytes each
MAX_EXCESS = 8  # requests that the replica with the prefix may have more than the least busy one
MAX_SHARE = 1.25  # of the mean number of pieces of a replica, that one may have before new prompts go to another
_HASH_BYTES = 16


def chained_hashes(prompt: bytes, salt: bytes) -> list[bytes]:
    """The hashes of the beginnings of a prompt, the shortest first; none for an empty one. Prompts with another salt share none."""
    parent = blake2b(salt, digest_size=_HASH_BYTES, person=b"salt").digest()
    hashes: list[bytes] = []
    for start in range(0, min(len(prompt) // PIECE_BYTES, MAX_PIECES) * PIECE_BYTES, PIECE_BYTES):
        parent = blake2b(parent + prompt[start : start + PIECE_BYTES], digest_size=_HASH_BYTES).digest()
        hashes.append(parent)
    if not hashes and prompt:  # a short prompt is one piece
        hashes.append(blake2b(parent + prompt, digest_size=_HASH_BYTES).digest())
    return hashes


def token_hashes(token_ids: Sequence[int], salt: str | None) -> list[bytes]:
    """`chained_hashes` of a prompt of token ids, none for ids beyond 32 bits. Requests share cached prefixes with those of one salt."""
    try:
        prompt = array("i", token_ids[: MAX_PIECES * PIECE_BYTES // 4]).tobytes()
    except (OverflowError, TypeError):
        return []
    return chained_hashes(prompt, repr(salt).encode("utf-8", "surrogatepass"))


class PrefixMap:
    """Ranks replicas for a prompt: those that computed the longest beginning first, unless they are too busy.

    A beginning that no replica has goes to the replica that its hash prefers (rendezvous hashing), so that routers that share no state
    agree, and a replica that comes or goes moves only its own share. Replicas that would then have MAX_SHARE times the pieces of the mean
    one are passed over, as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016): two large prefixes on one
    replica whose cache holds one would push each other out for ever, next to replicas without any.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, max_excess: int = MAX_EXCESS) -> None:
        self._max_entries, self._max_excess = max_entries, max_excess
        self._replicas: OrderedDict[bytes, dict[str, None]] = OrderedDict()  # by hash; the least recently used first
        self._pieces: Counter[str] = Counter()  # of each replica: hashes that it has

    def __len__(self) -> int:
        return len(self._replicas)

    def rank(self, hashes: Sequence[bytes], loads: Mapping[str, int]) -> list[str]:
        """All replicas of `loads` (name to running requests), the best first."""
        if not loads:
            return []
        lengths = self._lengths(hashes, loads)
        limit = min(loads.values()) + self._max_excess
        key = hashes[-1] if hashes else b""
        free = [name for name in loads if loads[name] <= limit]
        busy = [name for name in loads if loads[name] > limit]
        if not hashes:
            return sorted(loads, key=lambda name: (loads[name], name))
        preferred = sorted(free, key=lambda name: (-lengths.get(name, 0), _rendezvous(key, name)))
        if not lengths.get(preferred[0]):
            full = self._full(len(hashes), loads)
            half = min(loads.values()) + self._max_excess // 2
            preferred.sort(key=lambda name: (loads[name] > half, name in full, _rendezvous(key, name)))
        return preferred + sorted(busy, key=lambda name: (loads[name], name))

    def _full(self, pieces: int, replicas: Collection[str]) -> set[str]:
        """The replicas that would have too large a share with `pieces` more; never all of them."""
        had = {name: self._pieces[name] for name in replicas}
        most = max(MAX_SHARE * (sum(had.values()) + pieces) / len(had), min(had.values()) + pieces)
        return {name for name, count in had.items() if count + pieces > most}

    def routed(self, hashes: Sequence[bytes], replica: str) -> None:
        """A prompt was sent to a replica, which has its beginnings from now on."""
        for hash in hashes:
            names = self._replicas.setdefault(hash, {})
            self._pieces[replica] += replica not in names
            names[replica] = None
            self._replicas.move_to_end(hash)
        while len(self._replicas) > self._max_entries:
            self._pieces.subtract(self._replicas.popitem(last=False)[1].keys())

    def keep(self, replicas: set[str]) -> None:
        """Forget all other replicas."""
        for hash in [hash for hash, names in self._replicas.items() if not replicas.issuperset(names)]:
            names = {name: None for name in self._replicas[hash] if name in replicas}
            if names:
                self._replicas[hash] = names
            else:
                del self._replicas[hash]
        self._pieces = Counter({name: count for name, count in self._pieces.items() if name in replicas})

    def _lengths(self, hashes: Sequence[bytes], loads: Mapping[str, int]) -> dict[str, int]:
        """How many leading hashes each replica has."""
        lengths: dict[str, int] = {}
        for i, hash in enumerate(hashes):
            names = [name for name in self._replicas.get(hash, ()) if name in loads and lengths.get(name, 0) == i]
            if not names:
                break
            lengths.update((name, i + 1) for name in names)
        return lengths


def _rendezvous(key: bytes, name: str) -> bytes:
    return blake2b(name.encode(), key=key, digest_size=8).digest()
