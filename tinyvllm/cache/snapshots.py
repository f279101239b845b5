"""Which slot holds a copy of the recurrent states after which prefix. Integers and digests only."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


class StateSnapshots:
    """Copies of states, by the hash of the prefix's last block (cache/prefix.py). The one used longest ago makes room for a new one, unless
    a step in flight reads or writes it.
    """

    def __init__(self, capacity: int) -> None:
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # the one used last is the last
        self._free = list(range(capacity))
        self._held: Counter[int] = Counter()

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_held(self) -> int:
        """Slots that a step in flight reads or writes."""
        return sum(count > 0 for count in self._held.values())

    def longest(self, hashes: Sequence[bytes]) -> int:
        """Blocks of the longest prefix that has a copy, 0 for none."""
        return next((count for count in range(len(hashes), 0, -1) if hashes[count - 1] in self._slots), 0)

    def read(self, hash: bytes) -> int:
        """The slot of a copy that is there, held until `release`."""
        self._slots.move_to_end(hash)
        self._held[self._slots[hash]] += 1
        return self._slots[hash]

    def take(self) -> int | None:
        """A slot for a new copy, held until `publish` or `discard`; None if all are held."""
        if not self._free:
            oldest = next((hash for hash, slot in self._slots.items() if not self._held[slot]), None)
            if oldest is None:
                return None
            self._free.append(self._slots.pop(oldest))
        slot = self._free.pop()
        self._held[slot] += 1
        return slot

    def publish(self, hash: bytes, slot: int) -> None:
        """The copy in a slot that was taken is there, and found from now on."""
        if hash in self._slots:
            self.discard(slot)
            return
        self.release(slot)
        self._slots[hash] = slot

    def discard(self, slot: int) -> None:
        """No copy was made in a slot that was taken."""
        self.release(slot)
        self._free.append(slot)

    def release(self, slot: int) -> None:
        """The step that reads a copy has been launched."""
        self._held[slot] -= 1

    def reset(self) -> None:
        """Forget every copy."""
        self._free += self._slots.values()
        self._slots.clear()
