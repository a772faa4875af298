"""Validation of a data set before training: unusable lines and pictures, ids that lead nowhere.

Files are read line by line; in memory are two bytes for each id and pool, and the names of images.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from genius_search.data.images import SHORTEST_SIDE, open_image
from genius_search.data.mbeir import IdColumn, MBeir, read_candidates, read_queries
from genius_search.errors import BadData
from genius_search.records import Modality, Query, parse_id

NUM_EXAMPLES: Final = 5
"""Maximum number of examples per kind of finding; all are counted."""
_IMAGES_AT_ONCE: Final = 256


@dataclass(slots=True)
class Finding:
    """One kind of problem, with its number of occurrences and the first examples."""

    kind: str
    """Name in lower case, for example ``bad-image`` or ``duplicate-id``."""
    severity: Literal["error", "warning"]
    """A data set with warnings can be used."""
    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of a check; JSON-able through ``dataclasses.asdict``."""

    records: dict[str, int]
    """Number of usable queries or candidates of each file, by its path in the folder."""
    findings: list[Finding]
    """Errors first, each kind in alphabetical order."""

    @property
    def ok(self) -> bool:
        """True if there are no errors, only warnings."""
        return all(finding.severity != "error" for finding in self.findings)


def check(root: Path, *, images: bool = True) -> CheckReport:
    """Check a folder in M-BEIR's layout, and with ``images`` decode every image.

    Raises
    ------
    BadData
        The folder is not in M-BEIR's layout.
    """
    data = MBeir(root)
    run = _Check(data)
    for path in [*data.local_pools(), *sorted((root / "cand_pool" / "global").glob("*_cand_pool.jsonl"))]:
        run.check_pool(path)
    for split in sorted(path.name for path in (root / "query").iterdir() if path.is_dir()):
        for path in data.query_files(split).values():
            run.check_queries(path, split)
    if data.instructions.file is None:
        missing = f"{data.instructions_file} is missing: queries are read without one"
        run.add("no-instructions", missing, severity="warning")
    if images:
        run.check_images()
    findings = sorted(run.findings.values(), key=lambda finding: (finding.severity, finding.kind))
    return CheckReport(dict(run.records), findings)


class _Check:
    """Checks pools, then queries against pools and instructions, and every picture once."""

    def __init__(self, data: MBeir) -> None:
        self.data = data
        self.records: Counter[str] = Counter()
        self.images: set[str] = set()
        self.findings: dict[str, Finding] = {}
        self._pools: dict[Path, IdColumn] = {}
        self._modalities = IdColumn()  # of candidates of any pool: code + 1

    def add(self, kind: str, example: str, severity: Literal["error", "warning"] = "error") -> None:
        """Count a problem, and keep the first examples of its kind."""
        finding = self.findings.setdefault(kind, Finding(kind, severity))
        finding.count += 1
        if finding.count <= NUM_EXAMPLES:
            finding.examples.append(example)

    def check_pool(self, path: Path) -> None:
        members = self._pools[path] = IdColumn()
        for candidate in read_candidates(path, on_bad=lambda bad: self.add("bad-line", str(bad))):
            self._count(path, candidate.image)
            if members[candidate.did]:
                self.add("duplicate-id", f"{path}: did {candidate.did} occurs again")
            members[candidate.did] = 1
            self._modalities[candidate.did] = candidate.modality.code + 1

    def check_queries(self, path: Path, split: str) -> None:
        """Check one query file; one of an evaluation split is a row, which has a pool."""
        pool = self._modalities
        if split != "train" and not split.startswith("union_"):
            try:
                pool = self._pools[self.data.row(path, split).local_pool]
            except BadData as error:
                self.add("layout", str(error))
        for query in read_queries(path, on_bad=lambda bad: self.add("bad-line", str(bad))):
            where = f"{path}: qid {query.qid}"
            self._count(path, query.image)
            if not query.positives:
                self.add("no-positives", where, severity="warning")
            elif not any(pool[did] for did in query.positives):
                self.add(
                    "positives-outside-pool",
                    f"{where}: none of its positives ({', '.join(query.positives[:3])}) is in the pool; add "
                    "the candidate's line, or fetch the pool again",
                )
            self._check_instruction(where, query)

    def _check_instruction(self, where: str, query: Query) -> None:
        """Look for the instruction that a query needs for its first positive that is in any pool."""
        code = next((code for did in query.positives if (code := self._modalities[did])), 0)
        if code:
            wanted = list(Modality)[code - 1]
            try:
                self.data.instructions.lookup(parse_id(query.qid)[0], query.modality, wanted)
            except BadData as error:
                self.add("missing-instruction", f"{where}: {error}")

    def check_images(self) -> None:
        """Decode all images."""

        def problem_of(relative: str) -> str | None:
            try:
                open_image(self.data.image_path(relative), shortest_side=SHORTEST_SIDE)
            except BadData as error:
                return str(error)
            return None

        names = sorted(self.images)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for start in range(0, len(names), _IMAGES_AT_ONCE):
                for problem in filter(None, threads.map(problem_of, names[start : start + _IMAGES_AT_ONCE])):
                    self.add("bad-image", problem)

    def _count(self, path: Path, image: str | None) -> None:
        self.records[path.relative_to(self.data.root).as_posix()] += 1
        if image is not None:
            self.images.add(image)
