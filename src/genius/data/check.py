"""Looks a data set over before hours are spent on it: what is there, what is missing, what contradicts.

Everything is read line by line. What is kept for each id is a bit per pool, a byte and a checksum, and for
each picture a 64-bit hash, so that M-BEIR's millions fit in a small machine's memory.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from genius.data.images import TooManyPixels, open_image
from genius.data.mbeir import (
    BadLines,
    EvaluationRow,
    IdSet,
    InstructionKey,
    MBeir,
    read_candidates,
    read_qrels,
    read_queries,
)
from genius.data.records import TASKS, Candidate, Modality, Query, parse_id
from genius.errors import BadData, BadImage

Severity = Literal["error", "warning"]
Kind = Literal[
    "bad-line",
    "broken-image",
    "conflicting-id",
    "duplicate-id",
    "layout",
    "missing-image",
    "missing-instruction",
    "missing-qrels",
    "no-instructions",
    "no-positives",
    "oversized-image",
    "positives-outside-global-pool",
    "positives-outside-local-pool",
    "qrels-disagree",
    "some-positives-outside-global-pool",
    "some-positives-outside-local-pool",
    "task-mismatch",
]

_WARNINGS: Final = frozenset[Kind](
    {
        "missing-qrels",
        "no-instructions",
        "no-positives",
        "some-positives-outside-global-pool",
        "some-positives-outside-local-pool",
    }
)
_NUM_EXAMPLES: Final = 5
_SHORTEST_SIDE: Final = 224
"""What encoders look at; pictures are decoded no larger than that where the format allows."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of trouble: how often, and the first few by name."""

    severity: Severity
    kind: Kind
    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QueryCount:
    """Queries of one task in one split of one data set."""

    split: str
    dataset: str
    """As the file is named."""
    dataset_id: int
    task_id: int | None
    num_queries: int
    num_positives: int


@dataclass(frozen=True, slots=True)
class PoolCount:
    """Candidates of one pool file, by modality."""

    pool: str
    num_candidates: int
    num_images: int
    num_texts: int
    num_image_texts: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found; JSON-able through ``dataclasses.asdict``."""

    root: str
    name: str
    queries: tuple[QueryCount, ...]
    pools: tuple[PoolCount, ...]
    num_images: int
    """Different pictures that are referred to."""
    images_decoded: bool
    """False when it was only looked whether they are there."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is nothing worse than a warning."""
        return all(finding.severity != "error" for finding in self.findings)


def check(root: Path, *, decode_images: bool = True, workers: int = 2) -> CheckReport:
    """Look a folder in M-BEIR's layout over.

    Parameters
    ----------
    decode_images
        decode every picture; without, only look whether the files are there.
    workers
        threads that decode.

    Raises
    ------
    BadData
        the folder is not in M-BEIR's layout at all.
    """
    data = MBeir(root)
    findings = _Findings()
    with closing(_Pictures(data, findings, decode=decode_images, workers=workers)) as pictures:
        catalogue = _Catalogue(findings, pictures)
        global_pools = sorted((root / "cand_pool" / "global").glob("*_cand_pool.jsonl"))
        members = {path: catalogue.read(root, path) for path in (*data.local_pools(), *global_pools)}
        if not members:
            findings.add("layout", f"{root / 'cand_pool'}: there is no pool")
        questions = _Questions(data, findings, pictures, catalogue, members)
        for folder in sorted(path for path in (root / "query").iterdir() if path.is_dir()):
            questions.read_split(folder.name)
    questions.report_instructions()
    return CheckReport(
        root=str(root),
        name=data.name,
        queries=questions.counts(),
        pools=tuple(catalogue.pools),
        num_images=pictures.num_seen,
        images_decoded=decode_images,
        findings=findings.all(),
    )


@dataclass(slots=True)
class _Findings:
    counts: Counter[Kind] = field(default_factory=Counter)
    examples: dict[Kind, list[str]] = field(default_factory=dict)

    def add(self, kind: Kind, example: str, count: int = 1) -> None:
        self.counts[kind] += count
        kept = self.examples.setdefault(kind, [])
        if len(kept) < _NUM_EXAMPLES:
            kept.append(example)

    def add_bad_lines(self, bad: BadLines) -> None:
        for problem in bad.problems[:_NUM_EXAMPLES]:
            self.add("bad-line", str(problem))
        self.counts["bad-line"] += bad.count - len(bad.problems[:_NUM_EXAMPLES])

    def all(self) -> tuple[Finding, ...]:
        """Errors first, each kind in the order of the alphabet."""
        found = [
            Finding("warning" if kind in _WARNINGS else "error", kind, count, tuple(self.examples[kind]))
            for kind, count in self.counts.items()
            if count
        ]
        return tuple(sorted(found, key=lambda finding: (finding.severity, finding.kind)))


class _Pictures:
    """Looks at every picture once, in threads, a few at a time."""

    def __init__(self, data: MBeir, findings: _Findings, *, decode: bool, workers: int) -> None:
        self._data = data
        self._findings = findings
        self._decode = decode
        self._threads = ThreadPoolExecutor(max(1, workers))
        self._most_waiting = 32 * max(1, workers)
        self._waiting: deque[Future[tuple[Kind, str] | None]] = deque()
        self._seen: set[int] = set()

    @property
    def num_seen(self) -> int:
        return len(self._seen)

    def close(self) -> None:
        """Wait for what is still being looked at."""
        while self._waiting:
            self._collect()
        self._threads.shutdown()

    def look_at(self, relative: str, owner: str) -> None:
        """Have a picture looked at, if this is the first time that it is referred to."""
        name = int.from_bytes(hashlib.blake2b(relative.encode(), digest_size=8).digest())
        if name in self._seen:
            return
        self._seen.add(name)
        self._waiting.append(self._threads.submit(self._trouble, relative, owner))
        if len(self._waiting) >= self._most_waiting:
            self._collect()

    def _collect(self) -> None:
        trouble = self._waiting.popleft().result()
        if trouble is not None:
            self._findings.add(*trouble)

    def _trouble(self, relative: str, owner: str) -> tuple[Kind, str] | None:
        try:
            path = self._data.image_path(relative)
        except BadData as error:
            return "missing-image", f"{owner}: {error}"
        if not path.exists():
            return "missing-image", f"{owner}: {path}"
        if not self._decode:
            return None
        try:
            open_image(path, shortest_side=_SHORTEST_SIDE).close()
        except TooManyPixels as error:
            return "oversized-image", f"{owner}: {error}"
        except BadImage as error:
            return "broken-image", f"{owner}: {error}"
        return None


class _CountKey(NamedTuple):
    split: str
    dataset: str
    dataset_id: int
    task_id: int | None


class _Catalogue:
    """Every candidate of every pool: its modality, and whether it is the same wherever it occurs."""

    def __init__(self, findings: _Findings, pictures: _Pictures) -> None:
        self._findings = findings
        self._pictures = pictures
        self._checksums = _Checksums()
        self._modalities: dict[int, bytearray] = {}
        self.pools: list[PoolCount] = []

    def read(self, root: Path, path: Path) -> IdSet:
        """Read one pool file; what it holds."""
        members, bad = IdSet(), BadLines(_NUM_EXAMPLES)
        counts: Counter[Modality] = Counter()
        for candidate in read_candidates(path, skip_bad=bad):
            counts[candidate.modality] += 1
            if not members.add(candidate.did):
                self._findings.add("duplicate-id", f"{path}: did {candidate.did} occurs again")
            if not self._checksums.agree(candidate.did, _content_of(candidate)):
                self._findings.add(
                    "conflicting-id",
                    f"{path}: did {candidate.did} is something else in an earlier line or pool",
                )
            self._remember(candidate)
            if candidate.image is not None:
                self._pictures.look_at(candidate.image, f"did {candidate.did}")
        self._findings.add_bad_lines(bad)
        self.pools.append(
            PoolCount(
                pool=path.relative_to(root / "cand_pool").as_posix(),
                num_candidates=counts.total(),
                num_images=counts[Modality.IMAGE],
                num_texts=counts[Modality.TEXT],
                num_image_texts=counts[Modality.IMAGE_TEXT],
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


class _Checksums:
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


class _Questions:
    """The queries of every split, against pools, qrels and instructions."""

    def __init__(
        self,
        data: MBeir,
        findings: _Findings,
        pictures: _Pictures,
        catalogue: _Catalogue,
        members: dict[Path, IdSet],
    ) -> None:
        self._data = data
        self._findings = findings
        self._pictures = pictures
        self._catalogue = catalogue
        self._members = members
        self._num_queries: Counter[_CountKey] = Counter()
        self._num_positives: Counter[_CountKey] = Counter()
        self._asked: Counter[InstructionKey] = Counter()

    def read_split(self, split: str) -> None:
        """Read every file of queries in ``query/<split>``."""
        trains = split in {"train", "union_train"}
        for path in self._data.query_files(split):
            if trains:
                self._read(path, split, "train", None)
            elif split.startswith("union_"):
                self._read(path, split, split.removeprefix("union_"), None)
            else:
                try:
                    row = self._data.row(path, split)
                except BadData as error:
                    self._findings.add("layout", str(error))
                    row = None
                self._read(path, split, split, row)

    def report_instructions(self) -> None:
        """Name what is asked for and has no instruction."""
        if self._data.instructions.file is None:
            file = self._data.instructions_file
            self._findings.add("no-instructions", f"{file} is missing: queries are read without one")
            return
        for key, num_queries in sorted(self._asked.items(), key=str):
            if key not in self._data.instructions.rows:
                asked = f"data set {key.dataset_id}, {key.query.label} -> {key.candidate.label}"
                self._findings.add("missing-instruction", f"{asked} ({num_queries:,} queries)")

    def counts(self) -> tuple[QueryCount, ...]:
        """How many queries there are."""
        return tuple(
            QueryCount(*key, num_queries=count, num_positives=self._num_positives[key])
            for key, count in self._num_queries.items()
        )

    def _read(self, path: Path, folder: str, split: str, row: EvaluationRow | None) -> None:
        """Read one file; ``row`` says what belongs to it, and is None for files of several tasks."""
        seen, checksums, bad = IdSet(), _Checksums(), BadLines(_NUM_EXAMPLES)
        dataset = row.dataset if row else path.stem.removeprefix("mbeir_").removesuffix(f"_{split}")
        qrels = self._qrels(row)
        union_file = self._data.root / "cand_pool" / "global" / f"mbeir_union_{split}_cand_pool.jsonl"
        union = self._members.get(union_file, self._catalogue)
        for query in read_queries(path, skip_bad=bad):
            where = f"{path}: qid {query.qid}"
            again = not seen.add(query.qid)
            if not checksums.agree(query.qid, _content_of(query)):
                self._findings.add("conflicting-id", f"{where} is something else in an earlier line")
            elif again and folder != "union_train":  # the union training file repeats rare data sets
                self._findings.add("duplicate-id", f"{where} occurs again")
            if query.image is not None:
                self._pictures.look_at(query.image, f"qid {query.qid}")
            task_id = self._task(query, row, where)
            key = _CountKey(folder, dataset, parse_id(query.qid)[0], task_id)
            self._num_queries[key] += 1
            self._num_positives[key] += len(query.positives)
            if not query.positives:
                self._findings.add("no-positives", where)
                continue
            if row is not None:
                self._find_positives(query, self._members[row.local_pool], "local", where)
            self._find_positives(query, union, "global", where)
            if qrels is not None and qrels.pop(query.qid, set()) != set(query.positives):
                self._findings.add(
                    "qrels-disagree", f"{where}: its positives are not those in {row and row.qrels}"
                )
        for qid in qrels or ():
            self._findings.add("qrels-disagree", f"{path}: qid {qid} is in {row and row.qrels} and not here")
        self._findings.add_bad_lines(bad)

    def _qrels(self, row: EvaluationRow | None) -> dict[str, set[str]] | None:
        if row is None:
            return None
        if row.qrels is None:
            self._findings.add("missing-qrels", f"{row.queries}: no qrels/{row.split} file for {row.name}")
            return None
        try:
            qrels = read_qrels(row.qrels)
        except BadData as error:
            self._findings.add("bad-line", str(error))
            return None
        return {qid: {did for did, relevance in dids.items() if relevance > 0} for qid, dids in qrels.items()}

    def _task(self, query: Query, row: EvaluationRow | None, where: str) -> int | None:
        """The query's task, and whether everything that tells it agrees; counts what it asks for."""
        task_id = query.task_id
        if task_id is None and row is not None:
            task_id = row.task_id
        wanted = self._wanted(query)
        if wanted is not None:
            self._asked[InstructionKey(parse_id(query.qid)[0], query.modality, wanted)] += 1
        found = f"{query.modality.label} -> {wanted.label if wanted else 'unknown'}"
        if row is not None and task_id != row.task_id:
            self._findings.add("task-mismatch", f"{where} has task {task_id}, the file says {row.task_id}")
        elif task_id is not None and not _fits(task_id, query.modality, wanted):
            self._findings.add("task-mismatch", f"{where} has task {task_id} but is {found}")
        return task_id

    def _wanted(self, query: Query) -> Modality | None:
        """The modality of its first positive that any pool holds (the query's own data set comes first)."""
        found = (self._catalogue.modality(did) for did in query.positives)
        return next((modality for modality in found if modality is not None), None)

    def _find_positives(
        self, query: Query, pool: Container[str], which: Literal["local", "global"], where: str
    ) -> None:
        outside = [did for did in query.positives if did not in pool]
        if len(outside) == len(query.positives):
            none: Kind = f"positives-outside-{which}-pool"  # type: ignore[assignment]
            self._findings.add(none, f"{where}: none of its positives ({', '.join(outside[:3])}) is there")
            return
        # OVEN and InfoSeek list each other's candidates, which a local pool need not hold (UniIR).
        own = parse_id(query.qid)[0]
        strays = [did for did in outside if which == "global" or parse_id(did)[0] == own]
        if strays:
            some: Kind = f"some-positives-outside-{which}-pool"  # type: ignore[assignment]
            self._findings.add(some, f"{where}: {', '.join(strays[:3])}")


def _fits(task_id: int, query: Modality, candidate: Modality | None) -> bool:
    expected = TASKS.get(task_id)
    return expected is not None and query is expected[0] and candidate in {expected[1], None}


def _content_of(record: Candidate | Query) -> str:
    parts: Iterable[str | None] = (record.modality.value, record.text, record.image)
    return "\0".join(part or "" for part in parts)
