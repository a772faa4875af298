"""Looks a data set over before hours are spent on it: what is there, what is missing, what contradicts.

Everything is read line by line. What is kept for each id is a bit per pool, a byte and a checksum, and for
each picture a 64-bit hash, so that M-BEIR's millions fit in a small machine's memory.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter, deque
from collections.abc import Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from genius_search.data.images import TooManyPixels, open_image
from genius_search.data.mbeir import (
    PAPER_ROWS,
    BadLines,
    EvaluationRow,
    IdSet,
    InstructionKey,
    MBeir,
    NameSet,
    read_candidates,
    read_qrels,
    read_queries,
)
from genius_search.errors import BadData, BadImage
from genius_search.records import TASKS, Candidate, Modality, Query, parse_id

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
    "no-images",
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
        "no-images",
        "no-instructions",
        "no-positives",
        "some-positives-outside-global-pool",
        "some-positives-outside-local-pool",
    }
)

NUM_EXAMPLES: Final = 5
"""How many of a kind are named; all are counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of trouble: how often, and the first few by name."""

    severity: Severity
    kind: Kind
    count: int
    examples: tuple[str, ...]


@dataclass(slots=True)
class Findings:
    """Collects what is wrong."""

    counts: Counter[Kind] = field(default_factory=Counter)
    examples: dict[Kind, list[str]] = field(default_factory=dict)

    def add(self, kind: Kind, example: str, count: int = 1) -> None:
        """Count one more of a kind, or several; the first few are remembered."""
        self.counts[kind] += count
        kept = self.examples.setdefault(kind, [])
        if len(kept) < NUM_EXAMPLES:
            kept.append(example)

    def add_bad_lines(self, bad: BadLines) -> None:
        """Count the lines of a file that could not be used."""
        for problem in bad.problems[:NUM_EXAMPLES]:
            self.add("bad-line", str(problem))
        self.counts["bad-line"] += bad.count - len(bad.problems[:NUM_EXAMPLES])

    def all(self) -> tuple[Finding, ...]:
        """Errors first, each kind in the order of the alphabet."""
        found = [
            Finding("warning" if kind in _WARNINGS else "error", kind, count, tuple(self.examples[kind]))
            for kind, count in self.counts.items()
            if count
        ]
        return tuple(sorted(found, key=lambda finding: (finding.severity, finding.kind)))


_FOLDER: Final = "mbeir_images"
"""Where M-BEIR's own pictures are unpacked."""
_SHORTEST_SIDE: Final = 224
"""What encoders look at; pictures are decoded no larger than that where the format allows."""


class Pictures:
    """Looks at every picture once, in threads, a few at a time."""

    def __init__(self, data: MBeir, findings: Findings, *, decode: bool, workers: int) -> None:
        self._data = data
        self._findings = findings
        self._decode = decode
        self._threads = ThreadPoolExecutor(max(1, workers))
        self._most_waiting = 32 * max(1, workers)
        self._waiting: deque[Future[tuple[Kind, str] | None]] = deque()
        self._seen = NameSet()
        self._unpacked = decode or (data.root / _FOLDER).exists()
        self._num_packed = 0

    @property
    def num_seen(self) -> int:
        """Different pictures so far."""
        return len(self._seen)

    def close(self) -> None:
        """Wait for what is still being looked at."""
        while self._waiting:
            self._collect()
        self._threads.shutdown()
        if self._num_packed:
            self._findings.add(
                "no-images",
                f"{self._data.root / _FOLDER} is missing, so no picture was looked for; unpack M-BEIR's "
                "archive of pictures there, or use an encoder that needs none (precomputed:)",
                self._num_packed,
            )

    def look_at(self, relative: str, owner: str) -> None:
        """Have a picture looked at, if this is the first time that it is referred to."""
        if not self._seen.add(relative):
            return
        if not self._unpacked and relative.startswith(f"{_FOLDER}/"):
            self._num_packed += 1
            return
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
            return "missing-image", f"{owner}: {path} is missing; put the picture there, or drop the record"
        if not self._decode:
            return None
        try:
            open_image(path, shortest_side=_SHORTEST_SIDE).close()
        except TooManyPixels as error:
            return "oversized-image", f"{owner}: {error}"
        except BadImage as error:
            return "broken-image", f"{owner}: {error}"
        return None


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


_Pool = Literal["local", "global"]
_NONE_INSIDE: Final[dict[_Pool, Kind]] = {
    "local": "positives-outside-local-pool",
    "global": "positives-outside-global-pool",
}
_SOME_OUTSIDE: Final[dict[_Pool, Kind]] = {
    "local": "some-positives-outside-local-pool",
    "global": "some-positives-outside-global-pool",
}


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


class _CountKey(NamedTuple):
    split: str
    dataset: str
    dataset_id: int
    task_id: int | None


class _Place(NamedTuple):
    """Where answers are looked for."""

    members: Container[str]
    name: str


class Queries:
    """The queries of every split, against pools, qrels and instructions."""

    def __init__(
        self,
        data: MBeir,
        findings: Findings,
        pictures: Pictures,
        pools: Pools,
        members: dict[Path, IdSet],
    ) -> None:
        self._data = data
        self._findings = findings
        self._pictures = pictures
        self._pools = pools
        self._members = members
        self._num_queries: Counter[_CountKey] = Counter()
        self._num_positives: Counter[_CountKey] = Counter()
        self._asked: Counter[InstructionKey] = Counter()
        self._from_mbeir = False

    def read_split(self, split: str) -> None:
        """Read every file of queries in ``query/<split>``."""
        trains = split in {"train", "union_train"}
        files = self._data.query_files(split)
        self._find_orphans(split, files)
        for path in files:
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
            if self._from_mbeir:
                self._findings.add(
                    "layout",
                    f"{file} is missing, and M-BEIR's queries ask for nothing without it; fetch it again",
                )
            else:
                self._findings.add("no-instructions", f"{file} is missing: queries are read without one")
            return
        for key, num_queries in sorted(self._asked.items(), key=str):
            if key not in self._data.instructions.rows:
                asked = f"data set {key.dataset_id}, {key.query.value} -> {key.candidate.value}"
                self._findings.add(
                    "missing-instruction",
                    f"{self._data.instructions.file}: no row for {asked} ({num_queries:,} queries); add "
                    f"{key.query.mbeir}<tab>{key.candidate.mbeir}<tab>NAME<tab>{key.dataset_id}"
                    "<tab>INSTRUCTION",
                )

    def counts(self) -> tuple[QueryCount, ...]:
        """How many queries there are."""
        return tuple(
            QueryCount(*key, num_queries=count, num_positives=self._num_positives[key])
            for key, count in self._num_queries.items()
        )

    def _read(self, path: Path, folder: str, split: str, row: EvaluationRow | None) -> None:
        """Read one file; ``row`` says what belongs to it, and is None for files of several tasks."""
        seen, checksums, bad = IdSet(), Checksums(), BadLines(NUM_EXAMPLES)
        dataset = row.dataset if row else path.stem.removeprefix("mbeir_").removesuffix(f"_{split}")
        qrels = self._qrels(row)
        union_file = self._data.root / "cand_pool" / "global" / f"mbeir_union_{split}_cand_pool.jsonl"
        union = _Place(
            self._members.get(union_file, self._pools),
            str(union_file) if union_file in self._members else f"any pool (there is no {union_file.name})",
        )
        local = None if row is None else _Place(self._members[row.local_pool], str(row.local_pool))
        if row is not None and row.name in PAPER_ROWS:
            self._from_mbeir = True
        for query in read_queries(path, skip_bad=bad):
            where = f"{path}: qid {query.qid}"
            again = not seen.add(query.qid)
            if not checksums.agree(query.qid, content_of(query)):
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
            if local is not None:
                self._find_positives(query, local, "local", where)
            self._find_positives(query, union, "global", where)
            if qrels is not None and row is not None:
                self._compare(query, qrels.pop(query.qid, None), row, where)
        for qid in qrels or ():
            self._findings.add(
                "qrels-disagree",
                f"{path}: qid {qid} is in {row and row.qrels} and not here; fetch both files again",
            )
        self._findings.add_bad_lines(bad)

    def _qrels(self, row: EvaluationRow | None) -> dict[str, set[str]] | None:
        if row is None:
            return None
        if row.qrels is None:
            folder = self._data.root / "qrels" / row.split
            file = folder / f"mbeir_{row.name}_{row.split}_qrels.txt"
            if any(folder.glob("*_qrels.txt")):
                self._findings.add(
                    "layout", f"{file} is missing, while other rows have theirs; fetch it again"
                )
            else:
                self._findings.add(
                    "missing-qrels", f"{file} is missing: the queries' own positives are taken"
                )
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
        found = f"{query.modality.value} -> {wanted.value if wanted else 'unknown'}"
        if row is not None and task_id != row.task_id:
            self._findings.add("task-mismatch", f"{where} has task {task_id}, the file says {row.task_id}")
        elif task_id is not None and not _fits(task_id, query.modality, wanted):
            self._findings.add("task-mismatch", f"{where} has task {task_id} but is {found}")
        return task_id

    def _wanted(self, query: Query) -> Modality | None:
        """The modality of its first positive that any pool holds (the query's own data set comes first)."""
        found = (self._pools.modality(did) for did in query.positives)
        return next((modality for modality in found if modality is not None), None)

    def _find_orphans(self, split: str, files: Sequence[Path]) -> None:
        """Name query files that are missing, as far as the qrels know of them."""
        known = {f"{path.stem}_qrels.txt" for path in files}
        for path in sorted((self._data.root / "qrels" / split).glob("mbeir_*_qrels.txt")):
            if path.name not in known:
                absent = self._data.root / "query" / split / f"{path.stem.removesuffix('_qrels')}.jsonl"
                self._findings.add(
                    "layout", f"{absent} is missing, and {path} is there; fetch the one or remove the other"
                )

    def _compare(self, query: Query, judged: set[str] | None, row: EvaluationRow, where: str) -> None:
        """Whether the qrels say what the query says."""
        if judged is None:
            line = f"{query.qid} 0 {query.positives[0]} 1 {row.task_id}"
            self._findings.add("qrels-disagree", f"{where}: no line in {row.qrels}; add `{line}`")
        elif judged != set(query.positives):
            differs = ", ".join(sorted(judged ^ set(query.positives))[:3])
            self._findings.add(
                "qrels-disagree",
                f"{where}: {differs} stands in its positives or in {row.qrels}, and not in both",
            )

    def _find_positives(self, query: Query, pool: _Place, which: _Pool, where: str) -> None:
        outside = [did for did in query.positives if did not in pool.members]
        if len(outside) == len(query.positives):
            self._findings.add(
                _NONE_INSIDE[which],
                f"{where}: none of its positives ({', '.join(outside[:3])}) is in {pool.name}; add the "
                "candidate's line, or fetch the pool again",
            )
            return
        # OVEN and InfoSeek list each other's candidates, which a local pool need not hold (UniIR).
        own = parse_id(query.qid)[0]
        strays = [did for did in outside if which == "global" or parse_id(did)[0] == own]
        if strays:
            self._findings.add(_SOME_OUTSIDE[which], f"{where}: {', '.join(strays[:3])} not in {pool.name}")


def _fits(task_id: int, query: Modality, candidate: Modality | None) -> bool:
    expected = TASKS.get(task_id)
    return expected is not None and query is expected[0] and candidate in {expected[1], None}


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
    findings = Findings()
    with closing(Pictures(data, findings, decode=decode_images, workers=workers)) as pictures:
        pools = Pools(findings, pictures)
        global_pools = sorted((root / "cand_pool" / "global").glob("*_cand_pool.jsonl"))
        members = {path: pools.read(root, path) for path in (*data.local_pools(), *global_pools)}
        if not members:
            findings.add("layout", f"{root / 'cand_pool'}: there is no pool")
        queries = Queries(data, findings, pictures, pools, members)
        for folder in sorted(path for path in (root / "query").iterdir() if path.is_dir()):
            queries.read_split(folder.name)
    queries.report_instructions()
    return CheckReport(
        root=str(root),
        name=data.name,
        queries=queries.counts(),
        pools=tuple(pools.counts),
        num_images=pictures.num_seen,
        images_decoded=decode_images,
        findings=findings.all(),
    )
