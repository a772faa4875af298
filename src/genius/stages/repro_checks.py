"""A first look at M-BEIR's files before hours are spent: cheap, not all that `genius data check` does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from genius.data.instructions import InstructionKey
from genius.data.mbeir import MBeir, read_candidates, read_queries
from genius.data.records import TASKS, parse_id
from genius.evaluation.published import SIZES, UNION_SIZE
from genius.stages.embed_records import count_lines
from genius.stages.repro_needs import UNION_POOL, pool_file, qrels_file, query_file

SAMPLE: Final = 20
"""Records of each file whose pictures are looked for."""


class Check(NamedTuple):
    """Something cheap to look at before hours are spent (M-BEIR, section 7)."""

    what: str
    expected: str
    found: str
    ok: bool


def checks(folder: Path, rows: Sequence[str], *, pools: Sequence[str]) -> list[Check]:
    """Cheap looks at the files that are there: numbers of records, instructions, columns, some pictures."""
    data = MBeir(folder)
    found = []
    for name in rows:
        size = SIZES.get(name)
        if size is not None:
            for path, count in ((query_file(name), size.queries), (pool_file(name), size.pool)):
                found += _count(folder, path, count)
        found += _instructions(data, name)
        found += _columns(folder / qrels_file(name))
        found += _pictures(data, name)
    if "global" in pools:
        found += _count(folder, UNION_POOL, UNION_SIZE)
    return found


def _count(data: Path, path: str, expected: int) -> list[Check]:
    if not (data / path).exists():
        return []
    found = count_lines([data / path])
    return [Check(f"{path}: records", f"{expected:,}", f"{found:,}", found == expected)]


def _instructions(data: MBeir, name: str) -> list[Check]:
    """Every key that this row's queries look up."""
    if not data.instructions_file.exists() or not (data.root / query_file(name)).exists():
        return []
    asked, wanted = TASKS[int(name.rpartition("_task")[2])]
    first = next(read_queries(data.root / query_file(name)), None)
    if first is None:
        return [Check(f"{query_file(name)}: a first query", "one", "none", ok=False)]
    dataset_id = parse_id(first.qid)[0]
    offered = data.instructions.rows.get(InstructionKey(dataset_id, asked, wanted), ())
    return [
        Check(f"{name}: instructions", "4", str(len(offered)), len(offered) == 4),
        Check(
            f"{name}: modality of the first query", asked.label, first.modality.label, first.modality is asked
        ),
    ]


def _columns(path: Path) -> list[Check]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        columns = len(file.readline().split())
    return [Check(f"{path.name}: columns", "5", str(columns), columns == 5)]


def _pictures(data: MBeir, name: str) -> list[Check]:
    """Whether the first records' pictures are there."""
    paths = []
    if (data.root / query_file(name)).exists():
        paths += [query.image for query in islice(read_queries(data.root / query_file(name)), SAMPLE)]
    if (data.root / pool_file(name)).exists():
        paths += [one.image for one in islice(read_candidates(data.root / pool_file(name)), SAMPLE)]
    wanted = [path for path in paths if path is not None]
    if not wanted:
        return []
    there = sum(data.image_path(path).is_file() for path in wanted)
    return [Check(f"{name}: first pictures", str(len(wanted)), str(there), there == len(wanted))]
