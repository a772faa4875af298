"""A set of M-BEIR ids that fits millions into a megabyte."""

from __future__ import annotations

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
