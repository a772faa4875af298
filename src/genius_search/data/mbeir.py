"""A data set in M-BEIR's layout: which files it has, and the queries and candidates in them.

Layout and fields: M-BEIR's data card and UniIR's loader. Files are read line by line, one record at a time.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TextIO, TypeVar

from genius_search.errors import BadData, BadRecord, UsageError
from genius_search.records import TASKS, Candidate, Modality, Query, candidate_number, parse_id, query_number

Record = TypeVar("Record")

_FILE_NAME: Final = re.compile(
    r"^mbeir_(?P<name>.+?)(?:_(?P<split>up_train|train|val|test))?(?:_cand_pool|_qrels)?\.(?:jsonl|txt)$"
)


@dataclass(slots=True)
class BadLines:
    """Counts lines that could not be used and remembers the first few."""

    remember: int = 20
    """How many to keep; all are counted."""
    count: int = 0
    problems: list[BadRecord] = field(default_factory=list)

    def add(self, problem: BadRecord) -> None:
        """Count one more."""
        self.count += 1
        if len(self.problems) < self.remember:
            self.problems.append(problem)


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers; a byte order mark is dropped."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror}") from None
    with file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if line.strip():
                yield number, line.rstrip(b"\r\n")


def numbered_records(
    path: Path, parse: Callable[[dict[str, Any]], Record], skip_bad: BadLines | None
) -> Iterator[tuple[int, Record]]:
    """What ``parse`` makes of each line's JSON object, with the line's number."""
    for line, raw in numbered_lines(path):
        try:
            record = parse(_object(raw))
        except UnicodeDecodeError as error:
            refuse(path, line, f"is not UTF-8 (byte {error.start + 1} of the line)", skip_bad)
        except json.JSONDecodeError as error:
            refuse(path, line, f"is not valid JSON: {error.msg} at column {error.colno}", skip_bad)
        except RecursionError:
            refuse(path, line, "is not usable JSON: nested too deeply", skip_bad)
        except (BadData, UsageError, ValueError) as error:
            refuse(path, line, str(error), skip_bad)
        else:
            yield line, record


def refuse(path: Path, line: int, problem: str, skip_bad: BadLines | None) -> None:
    """Raise that a line cannot be used, or give it to ``skip_bad``."""
    error = bad_record(path, line, problem)
    if skip_bad is None:
        raise error from None
    skip_bad.add(error)


def bad_record(path: Path, line: int, problem: str) -> BadRecord:
    """The error that names a line with its data set and split."""
    return BadRecord(path, line, f"{_origin(path)}{problem}")


def _origin(path: Path) -> str:
    """``flickr8k_task1, test: `` from a file's name and folder, as far as they tell."""
    match = _FILE_NAME.match(path.name)
    if match is None:
        return ""
    split = match["split"] or path.parent.name
    return f"{match['name']}, {split}: "


def _object(raw: bytes) -> dict[str, Any]:
    row = json.loads(raw.decode())
    if not isinstance(row, dict):
        raise BadData(f"is a JSON {type(row).__name__}, expected an object {{...}}")
    return row


def parse_query(row: Mapping[str, Any]) -> Query:
    """The query that a row is."""
    qid = _text(row, "qid")
    if qid is None:
        raise BadData("has no qid")
    query_number(qid)
    modality, text, image = _content(row, "query_modality", "query_txt", "query_img_path")
    task_id = row.get("task_id")
    if task_id is not None and (not isinstance(task_id, int) or isinstance(task_id, bool)):
        raise BadData(f"task_id is {task_id!r}, expected a number")
    return Query(
        qid=qid,
        modality=modality,
        text=text,
        image=image,
        positives=_ids(row, "pos_cand_list"),
        negatives=_ids(row, "neg_cand_list"),
        task_id=task_id,
        source=_source(row.get("query_src_content")),
    )


def parse_candidate(row: Mapping[str, Any]) -> Candidate:
    """The candidate that a row is."""
    did = _text(row, "did")
    if did is None:
        raise BadData("has no did")
    candidate_number(did)
    modality, text, image = _content(row, "modality", "txt", "img_path")
    return Candidate(did, modality, text, image, _source(row.get("src_content")))


def _content(
    row: Mapping[str, Any], modality_key: str, text_key: str, image_key: str
) -> tuple[Modality, str | None, str | None]:
    """What a row is made of, when it is made of what it says."""
    declared = _text(row, modality_key)
    if declared is None:
        raise BadData(f"has no {modality_key}")
    modality = Modality.parse(declared)
    text, image = _text(row, text_key), _text(row, image_key)
    for key, value, wanted in (
        (text_key, text, modality is not Modality.IMAGE),
        (image_key, image, modality is not Modality.TEXT),
    ):
        if wanted and value is None:
            raise BadData(f"{modality_key} is {declared!r} but there is no {key}")
        if not wanted and value is not None:
            raise BadData(f"{modality_key} is {declared!r} but {key} is {value[:80]!r}")
    return modality, text, image


def _text(row: Mapping[str, Any], key: str) -> str | None:
    """A string field; absent, null and blank are alike."""
    value = row.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadData(f"{key} is {str(value)[:80]}, expected a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadData(f"{key} holds half a character (a lone surrogate)") from None
    return value if value.strip() else None


def _ids(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = row.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(did, str) for did in value):
        raise BadData(f"{key} is {str(value)[:80]}, expected a list of candidate ids")
    for did in value:
        candidate_number(did)
    return tuple(value)


def _source(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_WHOLE: Final = {"mbeir": re.compile(r"[0-9]{1,9}"), "trec": re.compile(r"-?[0-9]{1,9}")}
"""What a relevance looks like: M-BEIR's count from 0 up, TREC has collections with some below 0."""


def read_qrels(path: Path, *, layout: Literal["mbeir", "trec"] = "mbeir") -> dict[str, dict[str, int]]:
    """Relevance by query and candidate; a pair may be judged twice if it is judged alike.

    M-BEIR, section 1.5: ``qid 0 did relevance [task]``; blank lines are passed over.

    Parameters
    ----------
    layout
        ``mbeir``: ids are M-BEIR's (``9:12``), and a relevance counts from 0 up. ``trec``: ids are any
        words, and a relevance is any whole number; above 0 is a right answer.

    Raises
    ------
    BadRecord
        a line with other columns, an id that is none, a relevance that is none, or another relevance than
        an earlier line gave the same pair.
    """
    qrels: dict[str, dict[str, int]] = {}
    for line, raw in numbered_lines(path):
        columns = raw.split()
        if len(columns) not in {4, 5}:
            raise bad_record(
                path,
                line,
                f"has {len(columns)} columns, expected 4 (TREC) or 5 (M-BEIR): qid 0 did relevance [task]",
            )
        try:
            qid, _, did, relevance = (column.decode() for column in columns[:4])
            if layout == "mbeir":
                query_number(qid)
                candidate_number(did)
            judged = _relevance(relevance, layout)
        except (BadData, ValueError) as error:
            raise bad_record(path, line, str(error)) from None
        if qrels.setdefault(qid, {}).setdefault(did, judged) != judged:
            raise bad_record(path, line, f"{qid} {did} has another relevance in an earlier line")
    return qrels


def _relevance(text: str, layout: Literal["mbeir", "trec"]) -> int:
    if not _WHOLE[layout].fullmatch(text):
        expected = "a whole number from 0 up" if layout == "mbeir" else "a whole number"
        raise BadData(f"relevance {text[:20]!r} is not {expected}, of at most nine digits")
    return int(text)


def write_queries(path: Path, queries: Iterable[Query]) -> int:
    """Write queries with M-BEIR's fields; how many there were. The file appears when it is complete."""
    return _write_json_lines(
        path,
        (
            {
                "qid": query.qid,
                "query_txt": query.text,
                "query_img_path": query.image,
                "query_modality": query.modality.mbeir,
                "query_src_content": query.source,
                "pos_cand_list": list(query.positives),
                "neg_cand_list": list(query.negatives),
                "task_id": query.task_id,
            }
            for query in queries
        ),
    )


def write_candidates(path: Path, candidates: Iterable[Candidate]) -> int:
    """Write candidates with M-BEIR's fields; how many there were. The file appears when it is complete."""
    return _write_json_lines(
        path,
        (
            {
                "did": candidate.did,
                "txt": candidate.text,
                "img_path": candidate.image,
                "modality": candidate.modality.mbeir,
                "src_content": candidate.source,
            }
            for candidate in candidates
        ),
    )


def write_qrels(path: Path, queries: Iterable[Query]) -> int:
    """Write the queries' positives in five columns, as UniIR needs them; how many lines there were."""
    num_lines = 0
    with appearing_whole(path) as file:
        for query in queries:
            if query.task_id is None:
                raise BadData(f"query {query.qid} has no task number, and M-BEIR's qrels need one")
            for did in query.positives:
                file.write(f"{query.qid} 0 {did} 1 {query.task_id}\n")
                num_lines += 1
    return num_lines


@contextmanager
def appearing_whole(path: Path) -> Iterator[TextIO]:
    """A file to write that takes its name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_json_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> int:
    num_rows = 0
    with appearing_whole(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            num_rows += 1
    return num_rows


class InstructionKey(NamedTuple):
    """What an instruction is chosen by."""

    dataset_id: int
    query: Modality
    candidate: Modality


class InstructionRow(NamedTuple):
    """One row of the instruction file."""

    query: Modality
    candidate: Modality
    dataset: str
    dataset_id: int
    instructions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Instructions:
    """The ways of saying what is wanted, by data set, query modality and candidate modality."""

    file: Path | None
    """Where they were read; None when the data set has none, then every look-up gives none."""
    rows: Mapping[InstructionKey, tuple[str, ...]]

    @staticmethod
    def empty() -> Instructions:
        """Of a data set without instructions: every look-up gives ``()``."""
        return Instructions(None, {})

    @staticmethod
    def read(path: Path) -> Instructions:
        """Read ``query_instructions.tsv`` by position, as UniIR does; a first row of names is skipped."""
        rows: dict[InstructionKey, tuple[str, ...]] = {}
        for line, raw in numbered_lines(path):
            try:
                cells = next(csv.reader([raw.decode()], delimiter="\t"))
                if line == 1 and not (len(cells) > 3 and cells[3].strip().isdecimal()):
                    continue
                key, instructions = _instruction(cells)
            except (UsageError, UnicodeDecodeError, csv.Error, ValueError) as error:
                raise BadRecord(path, line, f"instructions: {error}") from None
            known = rows.get(key, ())
            rows[key] = known + tuple(text for text in instructions if text not in known)
        return Instructions(path, rows)

    def lookup(self, dataset_id: int, query: Modality, candidate: Modality) -> tuple[str, ...]:
        """Every instruction for this data set and these modalities.

        Raises
        ------
        BadData
            there is a file and it has no such row.
        """
        if self.file is None:
            return ()
        found = self.rows.get(InstructionKey(dataset_id, query, candidate))
        if found is None:
            raise BadData(
                f"{self.file}: no instruction for data set {dataset_id}, {query.value} -> {candidate.value}; "
                f"add a row {query.mbeir}<tab>{candidate.mbeir}<tab>NAME<tab>{dataset_id}<tab>INSTRUCTION"
            )
        return found

    def keys(self) -> KeysView[InstructionKey]:
        """The combinations that have instructions."""
        return self.rows.keys()


def write_instructions(path: Path, rows: Iterable[InstructionRow]) -> None:
    """Write ``query_instructions.tsv``; rows with fewer instructions than others end in empty cells."""
    kept = list(rows)
    for row in kept:
        if any(set(text) & set("\t\r\n") for text in row.instructions):
            raise BadData(f"instructions of {row.dataset} hold a tab or a line break, which a TSV row cannot")
    width = max((len(row.instructions) for row in kept), default=0)
    with appearing_whole(path) as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        names = (f"prompt_{number}" for number in range(1, width + 1))
        writer.writerow(["query_modality", "cand_modality", "dataset_name", "dataset_id", *names])
        for row in kept:
            empty = [""] * (width - len(row.instructions))
            writer.writerow(
                [row.query.mbeir, row.candidate.mbeir, row.dataset, row.dataset_id, *row.instructions, *empty]
            )


def _instruction(cells: list[str]) -> tuple[InstructionKey, tuple[str, ...]]:
    if len(cells) < 5:
        raise ValueError(
            f"has {len(cells)} columns, expected query modality, candidate modality, data set, "
            "data set number and at least one instruction, with tabs between them"
        )
    if not cells[3].strip().isdecimal():
        raise ValueError(f"the data set number is {cells[3]!r}, expected a number in the fourth column")
    key = InstructionKey(int(cells[3]), Modality.parse(cells[0]), Modality.parse(cells[1]))
    instructions = tuple(text.strip() for text in cells[4:] if text.strip())
    if not instructions:
        raise ValueError("has no instruction")
    return key, instructions


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


_ROW_NAME: Final = re.compile(r"^(?P<dataset>.+)_task(?P<task>\d+)$")

PAPER_ROWS: Final = (
    "visualnews_task0",
    "mscoco_task0",
    "fashion200k_task0",
    "webqa_task1",
    "edis_task2",
    "webqa_task2",
    "visualnews_task3",
    "mscoco_task3",
    "fashion200k_task3",
    "nights_task4",
    "oven_task6",
    "infoseek_task6",
    "fashioniq_task7",
    "cirr_task7",
    "oven_task8",
    "infoseek_task8",
)
"""The order in which the papers print M-BEIR's rows."""

_HEADLINE_AT_10: Final = frozenset({"fashion200k", "fashioniq"})


def read_queries(path: Path, *, skip_bad: BadLines | None = None) -> Iterator[Query]:
    """The queries of one file, one at a time.

    Raises
    ------
    BadRecord
        a line is wrong and there is no ``skip_bad`` to collect it.
    BadData
        the file cannot be opened.
    """
    return (query for _, query in numbered_records(path, parse_query, skip_bad))


def read_candidates(path: Path, *, skip_bad: BadLines | None = None) -> Iterator[Candidate]:
    """The candidates of one file, one at a time; errors as for :func:`read_queries`."""
    return (candidate for _, candidate in numbered_records(path, parse_candidate, skip_bad))


def read_pool(paths: Iterable[Path], *, skip_bad: BadLines | None = None) -> Iterator[Candidate]:
    """The candidates of a pool kept in several files, each once: what came first stays.

    An id that occurs twice in one file is a bad line, since nobody can tell which of the two was meant.
    """
    earlier = IdSet()
    for path in paths:
        here = IdSet()
        for line, candidate in numbered_records(path, parse_candidate, skip_bad):
            if not here.add(candidate.did):
                refuse(path, line, f"did {candidate.did!r} occurs twice in this file", skip_bad)
            elif earlier.add(candidate.did):
                yield candidate


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One line of the results table: the queries of one task of one data set and what answers them."""

    name: str
    """As in file names, for example ``mscoco_task0``."""
    dataset: str
    dataset_id: int
    task_id: int
    split: str
    queries: Path
    qrels: Path | None
    """None when there are only the queries' own positives."""
    local_pool: Path
    headline_k: int
    """The papers' cut-off for this row: 10 for Fashion200K and FashionIQ, else 5."""


class MBeir:
    """A data set in M-BEIR's layout.

    >>> data = MBeir(Path("M-BEIR"))  # doctest: +SKIP
    >>> for row in data.rows("test"):  # doctest: +SKIP
    ...     print(row.name, row.local_pool)
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise BadData(f"{root}: there is no such folder")
        absent = [name for name in ("query", "cand_pool") if not (root / name).is_dir()]
        if absent:
            raise BadData(
                f"{root} is not in M-BEIR's layout: it has no {' and no '.join(absent)} folder; expected "
                "query/<split>, cand_pool/local, and if there are any qrels/<split> and instructions"
            )
        self.root = root
        self.name = root.resolve().name
        self.instructions_file = root / "instructions" / "query_instructions.tsv"
        self.instructions = (
            Instructions.read(self.instructions_file)
            if self.instructions_file.exists()
            else Instructions.empty()
        )

    def splits(self) -> list[str]:
        """Splits that have queries by task, usually test and val; the training files are not among them."""
        return [
            folder.name
            for folder in sorted((self.root / "query").iterdir())
            if folder.is_dir()
            and not folder.name.startswith("union_")
            and folder.name != "train"
            and any(folder.glob("*.jsonl"))
        ]

    def training_queries(self) -> list[Path]:
        """The union training file where there is one, else every data set's own."""
        union = _files(self.root / "query" / "union_train", "*.jsonl")
        return union or _files(self.root / "query" / "train", "*.jsonl")

    def training_pools(self) -> list[Path]:
        """The union training pool where there is one, else all local pools; for :func:`read_pool`."""
        return self._union_pool("train") or self.local_pools()

    def local_pools(self) -> list[Path]:
        """Every local pool, of all splits."""
        return _files(self.root / "cand_pool" / "local", "*_cand_pool.jsonl")

    def local_pools_of(self, split: str) -> list[Path]:
        """The local pools of a split's rows, as far as they are there."""
        found = (self._local_pool(_row_name(path, split), split) for path in self.query_files(split))
        return list(dict.fromkeys(path for path in found if path is not None))

    def global_pool(self, split: str) -> list[Path]:
        """The union pool of a split, else the local pools of its rows; for :func:`read_pool`."""
        union = self._union_pool(split)
        return union or list(dict.fromkeys(row.local_pool for row in self.rows(split)))

    def query_files(self, split: str) -> list[Path]:
        """The files of queries of one split, in the order of the papers' tables, others after them."""

        def place(path: Path) -> tuple[int, str]:
            name = _row_name(path, split)
            return (PAPER_ROWS.index(name) if name in PAPER_ROWS else len(PAPER_ROWS), name)

        return sorted(_files(self.root / "query" / split, "*.jsonl"), key=place)

    def rows(self, split: str, *, names: Collection[str] = ()) -> list[EvaluationRow]:
        """What there is to evaluate in a split, in the order of the papers' tables; or these of it only.

        Raises
        ------
        BadData
            the split has no queries, or a row has no local pool.
        UsageError
            a name is not that of a row.
        """
        files = self.query_files(split)
        if not files:
            raise BadData(
                f"{self.root}: no queries for split {split!r} in {self.root / 'query' / split}; "
                f"there are: {', '.join(self.splits()) or 'none'}"
            )
        known = [_row_name(path, split) for path in files]
        absent = [name for name in names if name not in known]
        if absent:
            raise UsageError(f"there is no row {absent[0]!r} in {self.root}; there are: {', '.join(known)}")
        return [
            self.row(path, split)
            for path, name in zip(files, known, strict=True)
            if not names or name in names
        ]

    def has_qrels(self, split: str) -> bool:
        """Whether the split has any qrels."""
        return bool(self._qrels_files(split))

    def rows_without_queries(self, split: str) -> list[str]:
        """Names of rows that have qrels and no query file: something was lost, or not fetched."""
        known = {_row_name(path, split) for path in self.query_files(split)}
        named = [
            path.stem.removeprefix("mbeir_").removesuffix(f"_{split}_qrels")
            for path in self._qrels_files(split)
        ]
        return [name for name in named if name not in known and _ROW_NAME.match(name)]

    def row(self, queries: Path, split: str) -> EvaluationRow:
        """One file of queries with the files that belong to it; raises as :meth:`rows`."""
        name = _row_name(queries, split)
        parts = _ROW_NAME.match(name)
        if parts is None or int(parts["task"]) not in TASKS:
            raise BadData(
                f"{queries}: the name does not say which task it is; expected "
                f"mbeir_<data set>_task<N>_{split}.jsonl with N one of {', '.join(map(str, TASKS))}"
            )
        pool = self._local_pool(name, split)
        if pool is None:
            local = self.root / "cand_pool" / "local"
            raise BadData(
                f"{queries}: no local pool for it; expected {local / f'mbeir_{name}_cand_pool.jsonl'} "
                f"(or mbeir_{name}_{split}_cand_pool.jsonl)"
            )
        first = next(read_queries(queries), None)
        if first is None:
            raise BadData(f"{queries}: has no queries")
        qrels = self.root / "qrels" / split / f"mbeir_{name}_{split}_qrels.txt"
        return EvaluationRow(
            name=name,
            dataset=parts["dataset"],
            dataset_id=parse_id(first.qid)[0],
            task_id=int(parts["task"]),
            split=split,
            queries=queries,
            qrels=qrels if qrels.exists() else None,
            local_pool=pool,
            headline_k=10 if parts["dataset"] in _HEADLINE_AT_10 else 5,
        )

    def image_path(self, relative: str) -> Path:
        """Where an image of this data set lies; a path that leaves the data set's folder is refused."""
        if relative.startswith("/") or ".." in relative.split("/"):
            raise BadData(f"{self.root}: image path {relative!r} leads out of the data set's folder")
        return self.root / relative

    def _local_pool(self, name: str, split: str) -> Path | None:
        local = self.root / "cand_pool" / "local"
        names = [f"mbeir_{name}_{split}_cand_pool.jsonl", f"mbeir_{name}_cand_pool.jsonl"]
        return next((local / one for one in names if (local / one).exists()), None)

    def _qrels_files(self, split: str) -> list[Path]:
        return _files(self.root / "qrels" / split, "*_qrels.txt")

    def _union_pool(self, split: str) -> list[Path]:
        path = self.root / "cand_pool" / "global" / f"mbeir_union_{split}_cand_pool.jsonl"
        return [path] if path.exists() else []


def _row_name(queries: Path, split: str) -> str:
    return queries.stem.removeprefix("mbeir_").removesuffix(f"_{split}")


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))
