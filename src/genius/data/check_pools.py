"""Every candidate of every pool: counted, and whether it is the same wherever it occurs."""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from genius.data.check_findings import NUM_EXAMPLES, Findings
from genius.data.check_pictures import Pictures
from genius.data.ids import IdSet
from genius.data.lines import BadLines
from genius.data.mbeir import read_candidates
from genius.data.records import Candidate, Modality, Query, parse_id


@dataclass(frozen=True, slots=True)
class PoolCount:
    """Candidates of one pool file, by modality."""

    pool: str
    num_candidates: int
    num_images: int
    num_texts: int
    num_image_texts: int


class Pools:
    """Every candidate of every pool: its modality, and whether it is the same wherever it occurs."""

    def __init__(self, findings: Findings, pictures: Pictures) -> None:
        self._findings = findings
        self._pictures = pictures
        self._checksums = Checksums()
        self._modalities: dict[int, bytearray] = {}
        self.counts: list[PoolCount] = []

    def read(self, root: Path, path: Path) -> IdSet:
        """Read one pool file; what it holds."""
        members, bad = IdSet(), BadLines(NUM_EXAMPLES)
        by_modality: Counter[Modality] = Counter()
        for candidate in read_candidates(path, skip_bad=bad):
            by_modality[candidate.modality] += 1
            if not members.add(candidate.did):
                self._findings.add("duplicate-id", f"{path}: did {candidate.did} occurs again")
            if not self._checksums.agree(candidate.did, content_of(candidate)):
                self._findings.add(
                    "conflicting-id",
                    f"{path}: did {candidate.did} is something else in an earlier line or pool",
                )
            self._remember(candidate)
            if candidate.image is not None:
                self._pictures.look_at(candidate.image, f"did {candidate.did}")
        self._findings.add_bad_lines(bad)
        self.counts.append(
            PoolCount(
                pool=path.relative_to(root / "cand_pool").as_posix(),
                num_candidates=by_modality.total(),
                num_images=by_modality[Modality.IMAGE],
                num_texts=by_modality[Modality.TEXT],
                num_image_texts=by_modality[Modality.IMAGE_TEXT],
            )
        )
        return members

    def modality(self, did: str) -> Modality | None:
        """What a candidate is made of; None when no pool holds it."""
        dataset, number = parse_id(did)
        codes = self._modalities.get(dataset, b"")
        code = codes[number] if number < len(codes) else 0
        return list(Modality)[code - 1] if code else None

    def __contains__(self, did: object) -> bool:
        """Whether any pool holds it: what stands for the union pool where there is no such file."""
        return isinstance(did, str) and self.modality(did) is not None

    def _remember(self, candidate: Candidate) -> None:
        dataset, number = parse_id(candidate.did)
        codes = self._modalities.setdefault(dataset, bytearray())
        if number >= len(codes):
            codes.extend(bytes(number + 1 - len(codes)))
        codes[number] = candidate.modality.code + 1


class Checksums:
    """Tells whether an id stands for the same content as before, in four bytes an id."""

    def __init__(self) -> None:
        self._sums: dict[int, array[int]] = {}

    def agree(self, id_: str, content: str) -> bool:
        """Whether the content is the first under this id, or the same as the first."""
        dataset, number = parse_id(id_)
        sums = self._sums.setdefault(dataset, array("I"))
        if number >= len(sums):
            sums.extend([0] * (number + 1 - len(sums)))
        checksum = zlib.crc32(content.encode()) or 1
        if sums[number] == 0:
            sums[number] = checksum
        return sums[number] == checksum


def content_of(record: Candidate | Query) -> str:
    """What a candidate or a query is made of, in one string to compare."""
    parts = (record.modality.value, record.text, record.image)
    return "\0".join(part or "" for part in parts)
