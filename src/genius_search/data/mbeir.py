"""Data sets in M-BEIR's layout: paths, queries, candidates, qrels, instructions.

Layout and fields follow M-BEIR's data card and UniIR's loader. Files are read one line at a time.
"""

from __future__ import annotations

import csv
import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TextIO, TypeVar

from genius_search.errors import BadData, BadRecord, UsageError
from genius_search.records import TASKS, Candidate, Modality, Query, candidate_number, parse_id, query_number
from genius_search.writing import write_atomically

Record = TypeVar("Record")

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
"""M-BEIR's rows in the order in which the papers print them."""

_HEADLINE_AT_10: Final = frozenset({"fashion200k", "fashioniq"})
_ROW_NAME: Final = re.compile(r"^(?P<dataset>.+)_task(?P<task>\d+)$")
_FILE_NAME: Final = re.compile(
    r"^mbeir_(?P<name>.+?)(?:_(?P<split>up_train|train|val|test))?(?:_cand_pool|_qrels)?\.(?:jsonl|txt)$"
)
_RELEVANCE: Final = {
    "mbeir": (re.compile(r"[0-9]{1,9}"), "a whole number from 0 up"),
    "trec": (re.compile(r"-?[0-9]{1,9}"), "a whole number"),
}


@dataclass(slots=True)
class BadLines:
    """Collector of unusable lines: their number, and the first few of them."""

    remember: int = 20
    """Maximum number of lines to keep; all are counted."""
    count: int = 0
    problems: list[BadRecord] = field(default_factory=list)

    def add(self, problem: BadRecord) -> None:
        """Count a line, and keep it if it is among the first."""
        self.count += 1
        if len(self.problems) < self.remember:
            self.problems.append(problem)


class IdColumn:
    """Mapping from ids to small non-negative integers; 0 by default.

    The ids of a data set are nearly contiguous, so an array takes a fortieth of what a dict or a set would:
    5.6 million candidates fit into 6 MB (typecode ``B``).
    """

    def __init__(self, typecode: Literal["B", "H"] = "B") -> None:
        self._typecode = typecode
        self._arrays: dict[int, array[int]] = {}

    def __getitem__(self, id_: str) -> int:
        dataset, number = parse_id(id_)
        values = self._arrays.get(dataset, ())
        return values[number] if number < len(values) else 0

    def __setitem__(self, id_: str, value: int) -> None:
        dataset, number = parse_id(id_)
        values = self._arrays.setdefault(dataset, array(self._typecode))
        if number >= len(values):
            values.frombytes(bytes(values.itemsize * (number + 1 - len(values))))
        values[number] = value


def numbered_lines(
    path: Path, observe: Callable[[bytes], object] | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield non-blank lines with their numbers, without a byte order mark.

    ``observe`` is called with the raw bytes of every line.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror}") from None
    with file:
        for number, raw in enumerate(file, start=1):
            if observe is not None:
                observe(raw)
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if line.strip():
                yield number, line.rstrip(b"\r\n")


def bad_record(path: Path, line: int, problem: str) -> BadRecord:
    """Return an error about a line; it names data set and split if the file's name contains them."""
    match = _FILE_NAME.match(path.name)
    origin = f"{match['name']}, {match['split'] or path.parent.name}: " if match else ""
    return BadRecord(path, line, f"{origin}{problem}")


def _refuse(path: Path, line: int, problem: str, skip_bad: BadLines | None) -> None:
    error = bad_record(path, line, problem)
    if skip_bad is None:
        raise error from None
    skip_bad.add(error)


def read_json_lines(
    path: Path,
    parse: Callable[[dict[str, Any]], Record],
    skip_bad: BadLines | None = None,
    observe: Callable[[bytes], object] | None = None,
) -> Iterator[tuple[int, Record]]:
    """Parse the JSON object on each line; yield line numbers and results.

    Raises
    ------
    BadRecord
        A line is invalid, and there is no ``skip_bad`` to collect it.
    BadData
        The file cannot be opened.
    """
    if path.exists() and not path.is_file():  # a pipe or a device may never end
        raise BadData(f"{path}: is not a file; expected lines in a file")
    for line, raw in numbered_lines(path, observe):
        try:
            row = json.loads(raw.decode())
            if not isinstance(row, dict):
                raise BadData(f"is a JSON {type(row).__name__}, expected an object {{...}}")
            record = parse(row)
        except UnicodeDecodeError as error:
            _refuse(path, line, f"is not UTF-8 (byte {error.start + 1} of the line)", skip_bad)
        except json.JSONDecodeError as error:
            _refuse(path, line, f"is not valid JSON: {error.msg} at column {error.colno}", skip_bad)
        except RecursionError:
            _refuse(path, line, "is not usable JSON: nested too deeply", skip_bad)
        except ValueError as error:
            _refuse(path, line, str(error), skip_bad)
        else:
            yield line, record


def read_queries(
    path: Path, *, skip_bad: BadLines | None = None, observe: Callable[[bytes], object] | None = None
) -> Iterator[Query]:
    """Read the queries of one file lazily; raises like :func:`read_json_lines`.

    ``observe`` is called with the raw bytes of every line, for example to hash the file.
    """
    return (query for _, query in read_json_lines(path, _parse_query, skip_bad, observe))


def read_candidates(path: Path, *, skip_bad: BadLines | None = None) -> Iterator[Candidate]:
    """Read the candidates of one file lazily; raises like :func:`read_json_lines`."""
    return (candidate for _, candidate in read_json_lines(path, parse_candidate, skip_bad))


def read_pool(paths: Iterable[Path]) -> Iterator[Candidate]:
    """Read the candidates of a pool in several files. If an id occurs in two files, the first one counts.

    An id that occurs twice in the same file is a bad line, because it is unclear which one is meant.
    """
    last_file = IdColumn("H")
    for number, path in enumerate(paths, start=1):
        for line, candidate in read_json_lines(path, parse_candidate):
            earlier, last_file[candidate.did] = last_file[candidate.did], number
            if earlier == number:
                raise bad_record(path, line, f"did {candidate.did!r} occurs twice in this file")
            if not earlier:
                yield candidate


def _parse_query(row: Mapping[str, Any]) -> Query:
    qid = _required(row, "qid")
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
    """Parse a candidate; :class:`BadData` says what is wrong with it."""
    did = _required(row, "did")
    candidate_number(did)
    modality, text, image = _content(row, "modality", "txt", "img_path")
    return Candidate(did, modality, text, image, _source(row.get("src_content")))


def _content(
    row: Mapping[str, Any], modality_key: str, text_key: str, image_key: str
) -> tuple[Modality, str | None, str | None]:
    """Return modality, text and image path; the declared modality must agree with the parts."""
    declared = _required(row, modality_key)
    modality = Modality.parse(declared)
    text, image = _text(row, text_key), _text(row, image_key)
    if "\0" in (image or ""):
        raise BadData(f"{image_key} is {image!r}, and no file's name contains a NUL character")
    for key, value, other in ((text_key, text, Modality.IMAGE), (image_key, image, Modality.TEXT)):
        if modality is not other and value is None:
            raise BadData(f"{modality_key} is {declared!r} but there is no {key}")
        if modality is other and value is not None:
            raise BadData(f"{modality_key} is {declared!r} but {key} is {value[:80]!r}")
    return modality, text, image


def _required(row: Mapping[str, Any], key: str) -> str:
    text = _text(row, key)
    if text is None:
        raise BadData(f"has no {key}")
    return text


def _text(row: Mapping[str, Any], key: str) -> str | None:
    """Return a string field, or None if it is absent, null or blank."""
    value = row.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadData(f"{key} is {str(value)[:80]}, expected a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadData(f"{key} contains a lone surrogate (half a character)") from None
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


def read_qrels(path: Path, *, layout: Literal["mbeir", "trec"] = "mbeir") -> dict[str, dict[str, int]]:
    """Read relevance by query and candidate from lines ``qid 0 did relevance [task]`` (M-BEIR, section 1.5).

    Parameters
    ----------
    layout
        ``mbeir``: ids are M-BEIR's (``9:12``), and relevance is 0 or more. ``trec``: ids are any words, and
        relevance is any integer; above 0 is relevant.

    Raises
    ------
    BadRecord
        A line has the wrong number of columns, an id or relevance is invalid, or a pair occurs twice with
        different relevance.
    """
    pattern, expected = _RELEVANCE[layout]
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
            if not pattern.fullmatch(relevance):
                raise BadData(f"relevance {relevance[:20]!r} is not {expected}, of at most nine digits")
        except ValueError as error:
            raise bad_record(path, line, str(error)) from None
        if qrels.setdefault(qid, {}).setdefault(did, int(relevance)) != int(relevance):
            raise bad_record(path, line, f"{qid} {did} has another relevance in an earlier line")
    return qrels


def query_row(query: Query) -> dict[str, object]:
    """Return a query with M-BEIR's fields."""
    return {
        "qid": query.qid,
        "query_txt": query.text,
        "query_img_path": query.image,
        "query_modality": query.modality.mbeir,
        "query_src_content": query.source,
        "pos_cand_list": list(query.positives),
        "neg_cand_list": list(query.negatives),
        "task_id": query.task_id,
    }


def candidate_row(candidate: Candidate) -> dict[str, object]:
    """Return a candidate with M-BEIR's fields."""
    return {
        "did": candidate.did,
        "txt": candidate.text,
        "img_path": candidate.image,
        "modality": candidate.modality.mbeir,
        "src_content": candidate.source,
    }


def write_json_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> int:
    """Write one JSON object per line atomically; return their number."""
    num_rows = 0
    with replacing(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            num_rows += 1
    return num_rows


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Open a text file for writing that replaces ``path`` when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        yield file


class InstructionKey(NamedTuple):
    """Data set and modalities that an instruction is for."""

    dataset_id: int
    query: Modality
    candidate: Modality


@dataclass(frozen=True, slots=True)
class Instructions:
    """Instructions by data set, query modality and candidate modality."""

    file: Path | None = None
    """File of the instructions; None if the data set has none, so that every look-up returns ``()``."""
    rows: Mapping[InstructionKey, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Instructions:
        """Read ``query_instructions.tsv`` by column position, as UniIR does; a header is skipped."""
        rows: dict[InstructionKey, tuple[str, ...]] = {}
        for line, raw in numbered_lines(path):
            try:
                cells = next(csv.reader([raw.decode()], delimiter="\t"))
                if line == 1 and not (len(cells) > 3 and cells[3].strip().isdecimal()):
                    continue
                if len(cells) < 5:
                    raise BadData(
                        f"has {len(cells)} columns, expected query modality, candidate modality, data set, "
                        "data set number and at least one instruction, with tabs between them"
                    )
                if not cells[3].strip().isdecimal():
                    raise BadData(f"the data set number is {cells[3]!r}, expected a number in column 4")
                key = InstructionKey(int(cells[3]), Modality.parse(cells[0]), Modality.parse(cells[1]))
                instructions = tuple(text.strip() for text in cells[4:] if text.strip())
                if not instructions:
                    raise BadData("has no instruction")
            except (ValueError, csv.Error) as error:
                raise BadRecord(path, line, f"cannot be used as a row of instructions: {error}") from None
            rows[key] = tuple(dict.fromkeys((*rows.get(key, ()), *instructions)))
        return Instructions(path, rows)

    def lookup(self, dataset_id: int, query: Modality, candidate: Modality) -> tuple[str, ...]:
        """Return all instructions for a data set and modalities.

        Raises
        ------
        BadData
            The file has no such row.
        """
        instructions = self.rows.get(InstructionKey(dataset_id, query, candidate), ())
        if self.file is not None and not instructions:
            raise BadData(
                f"{self.file}: no instruction for data set {dataset_id}, {query} -> {candidate}; "
                f"add a row {query.mbeir}<tab>{candidate.mbeir}<tab>NAME<tab>{dataset_id}<tab>INSTRUCTION"
            )
        return instructions


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One row of the results table: the files of one task of one data set."""

    name: str
    """Name as in file names, for example ``mscoco_task0``."""
    dataset: str
    dataset_id: int
    task_id: int
    split: str
    queries: Path
    qrels: Path | None
    """Path of the qrels; None if only the queries' own positives exist."""
    local_pool: Path
    headline_k: int
    """Cut-off of the papers' tables: 10 for Fashion200K and FashionIQ, otherwise 5."""


class Layout:
    """Paths of the files in M-BEIR's layout."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def local_pool(self, name: str) -> Path:
        """Return the path of a row's own pool."""
        return self.root / "cand_pool" / "local" / f"mbeir_{name}_cand_pool.jsonl"

    def union_pool(self, split: str) -> Path:
        """Return the path of the union pool of a split."""
        return self.root / "cand_pool" / "global" / f"mbeir_union_{split}_cand_pool.jsonl"

    def queries(self, split: str, name: str) -> Path:
        """Return the path of a query file; ``name`` ends with the split."""
        return self.root / "query" / split / f"mbeir_{name}.jsonl"

    def qrels(self, split: str, name: str) -> Path:
        """Return the path of a query file's qrels."""
        return self.root / "qrels" / split / f"mbeir_{name}_qrels.txt"


class MBeir:
    """A data set in M-BEIR's layout.

    >>> data = MBeir("M-BEIR")  # doctest: +SKIP
    >>> for row in data.rows("test"):  # doctest: +SKIP
    ...     print(row.name, row.local_pool)
    """

    def __init__(self, root: str | Path) -> None:
        root = Path(root)
        if not root.is_dir():
            raise BadData(f"{root}: there is no such folder")
        absent = [name for name in ("query", "cand_pool") if not (root / name).is_dir()]
        if absent:
            raise BadData(
                f"{root} is not in M-BEIR's layout: it has no {' and no '.join(absent)} folder; expected "
                "query/<split>, cand_pool/local, and if there are any qrels/<split> and instructions"
            )
        self.root = root
        self.layout = Layout(root)
        self.name = root.resolve().name
        self.instructions_file = root / "instructions" / "query_instructions.tsv"
        has_instructions = self.instructions_file.exists()
        self.instructions = Instructions.read(self.instructions_file) if has_instructions else Instructions()

    def training_queries(self) -> list[Path]:
        """Return the union training file if it exists, otherwise the files of all data sets."""
        query = self.root / "query"
        return _files(query / "union_train", "*.jsonl") or _files(query / "train", "*.jsonl")

    def training_pools(self) -> list[Path]:
        """Return the union training pool if it exists, otherwise all local pools; for :func:`read_pool`."""
        return self._union_pool("train") or self.local_pools()

    def local_pools(self) -> list[Path]:
        """Return every local pool, of all splits."""
        return _files(self.root / "cand_pool" / "local", "*_cand_pool.jsonl")

    def local_pools_of(self, split: str) -> list[Path]:
        """Return the existing local pools of a split's rows."""
        pools = (self._local_pool(_row_name(path, split), split) for path in self.query_files(split))
        return list(dict.fromkeys(path for path in pools if path is not None))

    def global_pool(self, split: str) -> list[Path]:
        """Return a split's union pool, otherwise the local pools of its rows; for :func:`read_pool`."""
        return self._union_pool(split) or list(dict.fromkeys(row.local_pool for row in self.rows(split)))

    def query_files(self, split: str) -> list[Path]:
        """Return a split's query files in the order of the papers' tables, then any others."""
        order = {name: place for place, name in enumerate(PAPER_ROWS)}

        def place(path: Path) -> tuple[int, str]:
            name = _row_name(path, split)
            return order.get(name, len(order)), name

        return sorted(_files(self.root / "query" / split, "*.jsonl"), key=place)

    def rows(self, split: str, *, names: Collection[str] = ()) -> list[EvaluationRow]:
        """Return the rows of a split (all, or those named) in the order of the papers' tables.

        Raises
        ------
        BadData
            The split has no queries, or a row has no local pool.
        UsageError
            There is no row with a given name.
        """
        files = {_row_name(path, split): path for path in self.query_files(split)}
        if not files:
            splits = [
                path.name
                for path in sorted((self.root / "query").iterdir())
                if path.name != "train" and not path.name.startswith("union_") and _files(path, "*.jsonl")
            ]
            raise BadData(
                f"{self.root}: no queries for split {split!r} in {self.root / 'query' / split}; "
                f"there are: {', '.join(splits) or 'none'}"
            )
        absent = [name for name in names if name not in files]
        if absent:
            raise UsageError(f"there is no row {absent[0]!r} in {self.root}; there are: {', '.join(files)}")
        return [self.row(path, split) for name, path in files.items() if not names or name in names]

    def row(self, queries: Path, split: str) -> EvaluationRow:
        """Return the row of a query file; raises like :meth:`rows`."""
        name = _row_name(queries, split)
        parts = _ROW_NAME.match(name)
        if parts is None or int(parts["task"]) not in TASKS:
            raise BadData(
                f"{queries}: the name does not say which task it is; expected "
                f"mbeir_<data set>_task<N>_{split}.jsonl with N one of {', '.join(map(str, TASKS))}"
            )
        pool = self._local_pool(name, split)
        if pool is None:
            raise BadData(
                f"{queries}: no local pool for it; expected {self.layout.local_pool(name)} "
                f"(or mbeir_{name}_{split}_cand_pool.jsonl)"
            )
        first = next(read_queries(queries), None)
        if first is None:
            raise BadData(f"{queries}: has no queries")
        qrels = self.layout.qrels(split, f"{name}_{split}")
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
        """Return the absolute path of an image, refusing paths outside the data set's folder."""
        if relative.startswith("/") or ".." in relative.split("/"):
            raise BadData(f"{self.root}: image path {relative!r} leads out of the data set's folder")
        return self.root / relative

    def _local_pool(self, name: str, split: str) -> Path | None:
        paths = map(self.layout.local_pool, (f"{name}_{split}", name))
        return next((path for path in paths if path.exists()), None)

    def _union_pool(self, split: str) -> list[Path]:
        path = self.layout.union_pool(split)
        return [path] if path.exists() else []


def _row_name(queries: Path, split: str) -> str:
    return queries.stem.removeprefix("mbeir_").removesuffix(f"_{split}")


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def read_judgements(row: EvaluationRow, qids: Sequence[str]) -> dict[str, Mapping[str, int]]:
    """Return the relevance judgements of queries, from the row's qrels or otherwise its query file.

    Raises
    ------
    BadData
        A query has none.
    """
    if row.qrels is not None:
        known: Mapping[str, Mapping[str, int]] = read_qrels(row.qrels)
    else:
        known = {query.qid: dict.fromkeys(query.positives, 1) for query in read_queries(row.queries)}
    missing = [qid for qid in qids if qid not in known]
    if missing:
        raise BadData(f"{row.qrels}: no line for query {missing[0]} and {len(missing) - 1} others")
    return {qid: known[qid] for qid in qids}
