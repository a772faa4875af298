"""``genius repro``: reproduce a published row of M-BEIR, Flickr30K or COCO and compare the numbers."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from genius_search.data.mbeir import MBeir
from genius_search.errors import ArtifactMissing, UsageError
from genius_search.hub import CHECKPOINTS
from genius_search.lab.evaluate import evaluate
from genius_search.lab.published.numbers import (
    CAPTION_RESULTS,
    COMPARABLE,
    PAPER_BEAM,
    SIZES,
    TOLERANCE,
    CaptionResult,
    Reference,
    RowSize,
    expected_size,
    references,
)
from genius_search.lab.results import ResultRow, in_order, published_beside
from genius_search.lab.settings import EvaluationConfig, Pool
from genius_search.model import MODEL_FILE, Genius
from genius_search.progress import Progress
from genius_search.records import TASKS, Modality

DATA_REPOSITORY: Final = "TIGER-Lab/M-BEIR"
UNION_POOL: Final = "cand_pool/global/mbeir_union_test_cand_pool.jsonl"
INSTRUCTIONS: Final = "instructions/query_instructions.tsv"
ARCHIVE: Final = "mbeir_images.tar.gz.part-*"
"""Four parts, 169.3 GB together."""
METHODS: Final = tuple(COMPARABLE)
INSTRUCTION_CHOICE: Final = "first"
SCORES: Final = "vocabulary"
"""Probabilities are normalised over the whole vocabulary, as the authors' code does."""


class CaptionSet(NamedTuple):
    """A data set that `genius data karpathy` makes from Karpathy's JSON."""

    dataset: str
    dataset_id: int
    json: str
    size: RowSize
    """Different captions and pictures of the test split."""


CAPTION_SETS: Final = {
    "flickr30k": CaptionSet("flickr30k", 10, "dataset_flickr30k.json", RowSize(5_000, 1_000)),
    "coco": CaptionSet("mscoco", 9, "dataset_coco.json", RowSize(24_809, 5_000)),
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
    """A published row to reproduce: the files it needs and the numbers it is compared with."""

    name: str
    rows: tuple[str, ...]
    data: Path
    model: Path | None
    pools: tuple[Pool, ...]
    """Pools to evaluate: those asked for, or every pool whose files are there (the local one if none is)."""
    files: tuple[str, ...]
    """Files and folders that the pools need, relative to ``data``."""
    captions: CaptionSet | None = None

    @property
    def missing(self) -> list[str]:
        """Files and folders that are not there."""
        return [path for path in self.files if not (self.data / path).exists()]

    @property
    def has_model(self) -> bool:
        """True if there is a finished model."""
        return self.model is not None and (self.model / MODEL_FILE).exists()

    @property
    def targets(self) -> list[tuple[str, Pool, str, Reference]]:
        """Row, pool, method and published number of each comparison."""
        return [
            (row, pool, method, reference)
            for pool in self.pools
            for row in self.rows
            for method in METHODS
            for reference in references(row, pool, method)
        ]

    @property
    def caption_targets(self) -> list[CaptionResult]:
        """Published recalls on the caption data set, if it is one."""
        name = None if self.captions is None else self.captions.dataset
        return [one for one in CAPTION_RESULTS if one.dataset == name]

    @property
    def commands(self) -> list[str]:
        """Shell commands that lead from what is there to the numbers."""
        data, model = shlex.quote(str(self.data)), shlex.quote(str(self.model or "MODEL"))
        fetch = f"hf download {DATA_REPOSITORY} --repo-type dataset --local-dir {data}"
        commands = []
        if self.missing and self.captions is not None:
            commands.append(
                f"genius data karpathy {self.captions.json} --images PICTURES --out {data} "
                f"--dataset-id {self.captions.dataset_id} --dataset-name {self.captions.dataset}"
            )
        elif self.missing:
            files = [path for path in self.missing if not path.startswith("mbeir_images/")]
            if files:
                commands.append(f"{fetch} {' '.join(f'--include {shlex.quote(path)}' for path in files)}")
            if len(files) < len(self.missing):
                commands += [
                    f"{fetch} --include {shlex.quote(ARCHIVE)}",
                    f"cat {data}/{ARCHIVE} | tar -xzf - -C {data}",
                ]
            commands.append(f"genius data check {data} --skip-images")
        if not self.has_model:
            (clip,) = CHECKPOINTS["clip-sf"].files
            quantizer, generator = CHECKPOINTS["genius"].files
            commands += [
                *(f"genius pull {name} --out published/{name}" for name in ("clip-sf", "genius")),
                f"genius import clip-sf published/clip-sf/{clip} --out clip-sf",
                (
                    f"genius import genius --quantizer published/genius/{quantizer} "
                    f"--generator published/genius/{generator} --encoder uniir:clip-sf "
                    f"--data {data} --out {model}"
                ),
            ]
        run = f"genius repro {self.name} --data {data} --model {model} --pools {','.join(self.pools)} --run"
        return [*commands, run]

    def require(self) -> None:
        """Raise ArtifactMissing if the model or a file is missing."""
        problems: list[str] = []
        if not self.has_model:
            problems.append(f"no model at {self.model} (it has no {MODEL_FILE})")
        if self.missing:
            count = f"{len(self.missing)} of {len(self.files)}"
            problems.append(f"{count} files are missing in {self.data}, the first is {self.missing[0]}")
        if problems:
            raise ArtifactMissing(
                f"{self.name} cannot be reproduced yet: {'; '.join(problems)}; without --run the command "
                "lists what is missing and how to get it"
            )


def plan(name: str, data: Path, model: Path | None, *, pools: Sequence[Pool] = ()) -> Reproduction:
    """Return what reproducing a row of M-BEIR, ``all`` of them, ``flickr30k`` or ``coco`` needs.

    Raises UsageError: there is no such row, or it has no such pool.
    """
    name = {"mscoco": "coco"}.get(name, name)
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.4)
        advice = f"did you mean {near[0]}? All names" if near else "choose one of"
        raise UsageError(f"there is no row {name!r} to reproduce; {advice}: {', '.join(NAMES)}")
    captions = CAPTION_SETS.get(name)
    if captions is not None:
        if "global" in pools:
            raise UsageError(f"--pools {','.join(pools)}: {name} has one pool; give local, or nothing")
        rows: tuple[str, ...] = (f"{captions.dataset}_task0",)
        local, union = [f"mbeir_images/{captions.dataset}"], None
    else:
        rows = tuple(SIZES) if name == "all" else (name,)
        local = [INSTRUCTIONS, *picture_folders(rows)]
        union = [UNION_POOL, *picture_folders(tuple(SIZES))]
        all_pools = [row_files(row)[1] for row in SIZES]
        if not (data / UNION_POOL).exists() and all((data / path).exists() for path in all_pools):
            union[:1] = all_pools
    local += [path for row in rows for path in row_files(row)]
    has_union = union is not None and all((data / path).exists() for path in union)
    chosen: tuple[Pool, ...] = tuple(pools) or (("local", "global") if has_union else ("local",))
    files = dict.fromkeys([*local, *((union or []) if "global" in chosen else [])])
    return Reproduction(
        name=name, rows=rows, data=data, model=model, pools=chosen, files=tuple(files), captions=captions
    )


def reproduce(plan: Reproduction, model: Genius, folder: Path, *, progress: Progress) -> list[ResultRow]:
    """Evaluate the rows as the published numbers were measured.

    The first instruction of each query (as pyserini does), a beam of 50, and the released code's scores.
    Raises ArtifactMissing if a file that is needed is not there.
    """
    plan.require()
    config = EvaluationConfig(
        pools=plan.pools,
        methods=METHODS,
        rows=plan.rows,
        beam=PAPER_BEAM,
        scores=SCORES,
        instructions=INSTRUCTION_CHOICE,
    )
    return in_order(evaluate(MBeir(plan.data), model, config, folder, progress=progress).rows)


class Verdict(NamedTuple):
    """One of our numbers beside the published ones."""

    row: str
    pool: Pool
    method: str
    score: float
    """Percent."""
    references: list[Reference]
    """Empty when queries or candidates are not as many as the published numbers are for."""
    ok: bool | None
    """Whether exact-raw lies within the tolerance of the released CLIP_SF; None for everything else."""


def verdicts(rows: Sequence[ResultRow]) -> list[Verdict]:
    """Compare our numbers with the published ones."""
    found = []
    for row in in_order(rows):
        if row.method not in METHODS or row.score is None:
            continue
        score = 100 * row.score
        published = published_beside(row)
        released = [one.value for one in published if one.weights == "released"]
        ok = abs(score - released[0]) <= TOLERANCE if row.method == "exact-raw" and released else None
        found.append(Verdict(row.name, row.pool, row.method, score, published, ok))
    return found


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
