"""Sets of M-BEIR ids and of file names that fit millions into some megabytes."""

from __future__ import annotations

import hashlib
from array import array

from genius.data.records import parse_id


class IdSet:
    """Which candidate (or query) ids were seen: one bit each, so that millions fit in a megabyte."""

    def __init__(self) -> None:
        self._bits: dict[int, bytearray] = {}

    def add(self, id_: str) -> bool:
        """Remember an id; whether it was new."""
        dataset, number = parse_id(id_)
        bits = self._bits.setdefault(dataset, bytearray())
        byte, mask = number >> 3, 1 << (number & 7)
        if byte >= len(bits):
            bits.extend(bytes(byte + 1 - len(bits)))
        new = not bits[byte] & mask
        bits[byte] |= mask
        return new

    def __contains__(self, id_: object) -> bool:
        if not isinstance(id_, str):
            return False
        dataset, number = parse_id(id_)
        bits = self._bits.get(dataset, b"")
        byte = number >> 3
        return byte < len(bits) and bool(bits[byte] & 1 << (number & 7))


class NameSet:
    """Which names were seen: 64 bits of a hash each, in an open table: a quarter of a set's memory.

    Two names can have one hash, and the second then counts as seen. Among 4 million names there is such a
    pair with a chance of 4 in 10 million; `genius data check` would then look at one picture too few.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * 1024))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, name: str) -> bool:
        """Remember a name; whether it was new."""
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        if not _place(self._slots, int.from_bytes(digest) or 1):
            return False
        self._count += 1
        if 3 * self._count > 2 * len(self._slots):
            larger = array("Q", bytes(16 * len(self._slots)))
            for seen in self._slots:
                if seen:
                    _place(larger, seen)
            self._slots = larger
        return True


def _place(slots: array[int], value: int) -> bool:
    """Put a number into the first free slot from its own on; False if it is there already."""
    mask = len(slots) - 1
    slot = value & mask
    while slots[slot]:
        if slots[slot] == value:
            return False
        slot = (slot + 1) & mask
    slots[slot] = value
    return True
