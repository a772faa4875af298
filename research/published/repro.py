"""``python -m research.published.repro``: reproduce a published row of M-BEIR, Flickr30K or COCO."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import tyro

from genius_search.cli.options import JsonOption, OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress, print_json, print_table, print_text
from genius_search.data.mbeir import MBeir
from genius_search.errors import ArtifactMissing, UsageError
from genius_search.model import Genius
from genius_search.records import TASKS, Modality
from research.command import run
from research.evaluate import evaluate
from research.published.numbers import (
    CAPTION_RESULTS,
    COMPARABLE,
    PAPER_BEAM,
    SIZES,
    TOLERANCE,
    RowSize,
    expected_size,
    format_percent,
    references,
)
from research.results import ResultRow, in_order, print_results, published_beside, to_json
from research.settings import EvaluationConfig, Pool

UNION_POOL: Final = "cand_pool/global/mbeir_union_test_cand_pool.jsonl"
INSTRUCTIONS: Final = "instructions/query_instructions.tsv"
METHODS: Final = tuple(COMPARABLE)
INSTRUCTION_CHOICE: Final = "first"
SCORES: Final = "vocabulary"
"""Probabilities are normalised over the whole vocabulary, as the authors' code does."""


class CaptionSet(NamedTuple):
    """A data set that `research.karpathy` makes from Karpathy's JSON."""

    dataset: str
    size: RowSize
    """Different captions and pictures of the test split."""


CAPTION_SETS: Final = {
    "flickr30k": CaptionSet("flickr30k", RowSize(5_000, 1_000)),
    "coco": CaptionSet("mscoco", RowSize(24_809, 5_000)),
}
NAMES: Final = (*SIZES, "all", *CAPTION_SETS)


def row_files(name: str) -> tuple[str, str, str]:
    """Return the paths of a row's queries, local pool and qrels, relative to the data set."""
    split = "_test" if name.startswith(("mscoco", "flickr30k")) else ""
    return (
        f"query/test/mbeir_{name}_test.jsonl",
        f"cand_pool/local/mbeir_{name}{split}_cand_pool.jsonl",
        f"qrels/test/mbeir_{name}_test_qrels.txt",
    )


def picture_folders(rows: Sequence[str]) -> list[str]:
    """Return the folders of pictures that the queries and pools of some rows refer to."""
    pictured = [row for row in rows if set(TASKS[int(row.rpartition("_task")[2])]) != {Modality.TEXT}]
    # InfoSeek shows the pictures of OVEN.
    datasets = [row.split("_")[0].replace("infoseek", "oven") for row in pictured]
    return list(dict.fromkeys(f"mbeir_images/{name}_images" for name in datasets))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """A published row to reproduce, and the files and folders that it needs, relative to ``data``."""

    rows: tuple[str, ...]
    data: Path
    pools: tuple[Pool, ...]
    files: tuple[str, ...]
    captions: CaptionSet | None = None

    @property
    def missing(self) -> list[str]:
        """Files and folders that are not there."""
        return [path for path in self.files if not (self.data / path).exists()]


def plan(name: str, data: Path, pools: Sequence[Pool] = ("local",)) -> Reproduction:
    """Return what reproducing a row of M-BEIR, ``all`` of them, ``flickr30k`` or ``coco`` needs.

    Raises UsageError: there is no such row, or it has no such pool.
    """
    if name not in NAMES:
        raise UsageError(f"there is no row {name!r} to reproduce; choose one of {', '.join(NAMES)}")
    captions = CAPTION_SETS.get(name)
    if captions is not None:
        if "global" in pools:
            raise UsageError(f"{name} has one pool; give --pools local")
        rows: tuple[str, ...] = (f"{captions.dataset}_task0",)
        files = [f"mbeir_images/{captions.dataset}"]
    else:
        rows = tuple(SIZES) if name == "all" else (name,)
        files = [INSTRUCTIONS, *picture_folders(rows)]
        if "global" in pools:
            files += [UNION_POOL, *picture_folders(tuple(SIZES))]
    files += [path for row in rows for path in row_files(row)]
    return Reproduction(
        rows=rows, data=data, pools=tuple(pools), files=tuple(dict.fromkeys(files)), captions=captions
    )


def differing_rows(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the rows of exact search that are not within the tolerance of the released CLIP_SF."""
    return [
        row
        for row in in_order(rows)
        if row.method == "exact-raw" and row.score is not None
        for one in published_beside(row)
        if one.weights == "released" and abs(100 * row.score - one.value) > TOLERANCE
    ]


def why_not_compared(plan: Reproduction, rows: Sequence[ResultRow]) -> str | None:
    """Return why no published number stands beside any of ours; None where at least one does."""

    def expected(row: ResultRow) -> RowSize | None:
        return expected_size(row.name, row.pool) if plan.captions is None else plan.captions.size

    if any((row.queries, row.pool_size) == expected(row) for row in rows):
        return None
    first = in_order(rows)[0]
    size = expected(first) or RowSize(0, 0)
    return (
        f"nothing was compared: no row has the size of the published test data ({first.name}, {first.pool}: "
        f"{first.queries:,} of {size.queries:,} queries, pool {first.pool_size:,} of {size.pool:,})"
    )


@command
class Repro(JsonOption):
    """Reproduce a published row: list the files it needs; with --model, evaluate and compare.

    ROW is one of M-BEIR's 16 rows as in its file names (mscoco_task3), all, flickr30k or coco. Exit status 1
    if exact search differs from the released CLIP_SF by more than 0.3 points, or if nothing was compared
    because the data has other sizes than the published numbers are for; 4 if files are missing.
    """

    row: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ROW")]
    """Name of a row, all, flickr30k or coco."""

    data: Path
    """M-BEIR, or the converted captions."""

    model: OptionalFolder = None
    """Folder of the model: the published checkpoints, imported."""

    out: OptionalFolder = None
    """Folder for features and runs; default: evaluation/ in the model's folder."""

    pools: tuple[Pool, ...] = ("local",)
    """Each row's own pool, the union of all pools, or both."""

    device: str = "cpu"
    """Device of the model: cpu or cuda."""

    def run(self) -> int:
        """List what a reproduction needs, or reproduce as the published numbers were measured.

        That is with the first instruction of each query (as pyserini does), a beam of 50, and the released
        code's scores.
        """
        needed = plan(self.row, self.data, self.pools)
        if self.model is None:
            _print_plan(needed)
            return 0
        if needed.missing:
            raise ArtifactMissing(
                f"{len(needed.missing)} of {len(needed.files)} files are missing in {self.data}, the first "
                f"is {needed.missing[0]}; research/README.md says how to get them"
            )
        config = EvaluationConfig(
            pools=needed.pools,
            methods=METHODS,
            rows=needed.rows,
            beam=PAPER_BEAM,
            scores=SCORES,
            instructions=INSTRUCTION_CHOICE,
        )
        with TerminalProgress() as progress:
            model = Genius.open(self.model, device=self.device)
            folder = self.out or self.model / "evaluation"
            rows = in_order(evaluate(MBeir(self.data), model, config, folder, progress=progress).rows)
            reason = why_not_compared(needed, rows)
            if reason:
                progress.say(reason)
        if self.json:
            print_json({**to_json(rows), "compared": reason is None})
        elif needed.captions is not None:
            _print_captions(needed.captions, rows)
        else:
            print_results(rows)
        differing = differing_rows(rows)
        for row in differing:
            print_text(f"{row.name}, {row.pool}: exact search differs from the released CLIP_SF", error=True)
        return 1 if reason or differing else 0


def _print_plan(needed: Reproduction) -> None:
    """Print the files of a reproduction and the numbers that it is compared with."""
    print_text(f"Files in {needed.data} for the {' and the '.join(needed.pools)} pool:")
    for path in needed.files:
        print_text(f"  {'missing' if path in needed.missing else 'there  '}  {path}")
    print_text(f"Published (exact-raw has to lie within {TOLERANCE} of the released weights):")
    for row in needed.rows:
        for pool in needed.pools:
            for method in METHODS:
                for one in references(row, pool, method):
                    number = f"{format_percent(one.value)} ({one.system}, {one.weights})"
                    print_text(f"  {row}, {pool}, {method}: {number}")
    if needed.captions is not None:
        _print_captions(needed.captions, [])


def _print_captions(captions: CaptionSet, rows: Sequence[ResultRow]) -> None:
    """Print our recalls and the published ones."""
    ours = [
        (row.method, "(this model)", *(f"{100 * row.measures[f'R@{k}']:.1f}" for k in (1, 5, 10)))
        for row in rows
    ]
    published = [
        (one.system, one.trained_on, *map(format_percent, one.recalls))
        for one in CAPTION_RESULTS
        if one.dataset == captions.dataset
    ]
    columns = ("system", "trained on", "R@1", "R@5", "R@10")
    print_table(columns, [*ours, *published], left=columns[:2])


main = partial(run, Repro, "published.repro")


if __name__ == "__main__":
    sys.exit(main())
