"""What reproducing a published row needs: files, hours, commands, and the numbers to compare with."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from genius.data.mbeir import PAPER_ROWS
from genius.errors import ArtifactMissing, UsageError
from genius.evaluation.published import (
    CAPTION_RESULTS,
    COMPARABLE,
    CaptionResult,
    Reference,
    references,
)
from genius.stages.model_file import MODEL_FILE
from genius.stages.repro_commands import commands_for, get_captions, get_data, has_archive
from genius.stages.repro_needs import (
    ARCHIVE_GB,
    IMAGE_FOLDERS,
    MTEB,
    NeededFile,
    Work,
    global_files,
    local_files,
    model_files,
    needed_file,
    pool_file,
    qrels_file,
    query_file,
    work_of,
)

Pool = Literal["local", "global"]
METHODS: Final = tuple(COMPARABLE)
INSTRUCTION_CHOICE: Final = "first"
"""Of each query, always."""
SCORES: Final = "vocabulary"
"""Normalised over all of it, as the authors' code does."""


class CaptionSet(NamedTuple):
    """A data set that is made from Karpathy's JSON."""

    dataset: Literal["flickr30k", "mscoco"]
    dataset_id: int
    json: str
    queries: int
    """Different captions of the test split."""
    images: int


CAPTION_SETS: Final = {
    "flickr30k": CaptionSet("flickr30k", 10, "dataset_flickr30k.json", 5_000, 1_000),
    "coco": CaptionSet("mscoco", 9, "dataset_coco.json", 24_809, 5_000),
}
NAMES: Final = (*PAPER_ROWS, "all", *CAPTION_SETS)
ALIASES: Final = {"mscoco": "coco"}
FEATURE_BYTES: Final = 2 * 768
"""Of one picture or text on disk."""


class PublishedNumber(NamedTuple):
    """What a row will be compared with."""

    row: str
    pool: Pool
    method: str
    reference: Reference


@dataclass(frozen=True, kw_only=True, slots=True)
class ReproPlan:
    """What one reproduction needs, what is there of it, and what it will be compared with."""

    name: str
    rows: tuple[str, ...]
    """Of the evaluation."""
    data: Path
    model: Path | None
    asked: tuple[Pool, ...]
    """Pools that were asked for; none means those whose files are there."""
    files: tuple[NeededFile, ...]
    """For the local pools, the model among them."""
    global_files: tuple[NeededFile, ...]
    """For the global pool, besides."""
    work: tuple[Work, ...]
    """For each pool that is meant."""
    download_gigabytes: float
    """Of the pictures' archive; 0 where it is there, or not needed."""
    unpacked_gigabytes: float
    """An estimate of what will be unpacked from it."""
    commands: tuple[str, ...]
    """From what is there to the numbers."""
    mteb: tuple[str, ...]
    """Copies of single rows with their pictures inside."""
    published: tuple[PublishedNumber, ...]
    captions: tuple[CaptionResult, ...]

    @property
    def needed(self) -> tuple[NeededFile, ...]:
        """What has to be there to run: for the local pools, and for the global one if it was asked for."""
        return (*self.files, *self.global_files) if "global" in self.asked else self.files

    @property
    def missing(self) -> list[NeededFile]:
        """What of it is not there."""
        return [file for file in self.needed if not file.found]

    @property
    def has_model(self) -> bool:
        """Whether a finished model is there."""
        return self.model is not None and (self.model / MODEL_FILE).exists()

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Those that a run evaluates: asked for, or their files are there."""
        if self.missing:
            return ()
        if self.asked:
            return self.asked
        has_global = self.global_files and all(file.found for file in self.global_files)
        return ("local", "global") if has_global else ("local",)

    @property
    def file_gigabytes(self) -> float:
        """Of the missing files whose sizes are published."""
        meant = (*self.files, *self.global_files) if self.means_global else self.files
        return math.fsum(file.gigabytes or 0.0 for file in meant if not file.found)

    @property
    def feature_gigabytes(self) -> float:
        """Of the features; what one pool encodes the other does not encode again."""
        return max((work.images + work.texts) * FEATURE_BYTES / 1e9 for work in self.work)

    @property
    def means_global(self) -> bool:
        """Whether the global pool is among those that work and commands are for."""
        return any(work.pool == "global" for work in self.work)

    def require(self) -> None:
        """Raise ArtifactMissing if there is no model, or a file that a run needs is not there."""
        problems = []
        if self.model is not None and not self.has_model:
            problems.append(f"no model at {self.model} (it has no {MODEL_FILE})")
        lost = [file for file in self.missing if not file.of_model]
        if lost:
            total = sum(not file.of_model for file in self.needed)
            first = f"{lost[0].path}, …" if len(lost) > 1 else lost[0].path
            problems.append(f"{len(lost)} of {total} files are missing in {self.data} ({first})")
        if problems:
            raise ArtifactMissing(
                f"{self.name} cannot be reproduced yet: {'; '.join(problems)}; without --run the command "
                "lists what is missing and how to get it"
            )


def named(name: str) -> str:
    """What can be reproduced under a name that a person gives.

    Raises
    ------
    UsageError
        nothing has this name; says the nearest.
    """
    name = ALIASES.get(name, name)
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.4)
        advice = f"did you mean {near[0]}? All names" if near else "choose one of"
        raise UsageError(f"there is no row {name!r} to reproduce; {advice}: {', '.join(NAMES)}")
    return name


def plan(name: str, data: Path, model: Path | None, *, pools: Sequence[Pool] = ()) -> ReproPlan:
    """What reproducing a row of M-BEIR, ``all`` of them, ``flickr30k`` or ``coco`` needs.

    Without ``pools`` it is for both, or for the local pools alone once all that they need is there.
    """
    name = named(name)
    if name in CAPTION_SETS:
        return _plan_captions(name, data, model, tuple(pools))
    rows = PAPER_ROWS if name == "all" else (name,)
    files = (*local_files(rows, data), *model_files(model))
    besides = tuple(global_files(rows, data))
    meant = _meant(pools, files, besides)
    wanted = [*files, *(besides if "global" in meant else ())]
    missing = [file for file in wanted if not file.found and not file.of_model]
    unpacks = any(file.path in IMAGE_FOLDERS.values() for file in missing)
    return ReproPlan(
        name=name,
        rows=rows,
        data=data,
        model=model,
        asked=tuple(pools),
        files=files,
        global_files=besides,
        work=tuple(work_of(rows, pool) for pool in meant),
        download_gigabytes=ARCHIVE_GB if unpacks and not has_archive(data) else 0.0,
        unpacked_gigabytes=ARCHIVE_GB if unpacks else 0.0,
        commands=commands_for(name, data, model, get_data=get_data(data, missing), pools=pools),
        mteb=tuple(f"mteb/{_mteb_name(row)}@{MTEB[row]}" for row in rows) if missing else (),
        published=tuple(
            PublishedNumber(row, pool, method, reference)
            for pool in meant
            for row in rows
            for method in METHODS
            for reference in references(row, pool, method)
        ),
        captions=(),
    )


def _meant(
    asked: Sequence[Pool], files: Sequence[NeededFile], besides: Sequence[NeededFile]
) -> tuple[Pool, ...]:
    """The pools that a plan is for."""
    if asked:
        return tuple(asked)
    only_local = all(file.found for file in files) and not all(file.found for file in besides)
    return ("local",) if only_local else ("local", "global")


def _plan_captions(name: str, data: Path, model: Path | None, pools: tuple[Pool, ...]) -> ReproPlan:
    if "global" in pools:
        raise UsageError(f"--pools {','.join(pools)}: {name} has one pool; give local, or nothing")
    kind = CAPTION_SETS[name]
    row = f"{kind.dataset}_task0"
    files = [
        needed_file(data, path, why)
        for path, why in (
            (query_file(row), f"made from {kind.json}"),
            (pool_file(row), f"made from {kind.json}"),
            (qrels_file(row), f"made from {kind.json}"),
            (f"mbeir_images/{kind.dataset}", "link to the pictures"),
        )
    ]
    convert = get_captions(data, kind.json, dataset=kind.dataset, dataset_id=kind.dataset_id)
    missing = not all(file.found for file in files)
    copies = ("mteb/flickr30kt2i@e819702b287bfbe084e129a61f308a802b7c108e",) if name == "flickr30k" else ()
    return ReproPlan(
        name=name,
        rows=(row,),
        data=data,
        model=model,
        asked=pools,
        files=(*files, *model_files(model)),
        global_files=(),
        work=(Work("local", kind.queries, kind.images, kind.images, kind.queries),),
        download_gigabytes=0.0,
        unpacked_gigabytes=0.0,
        commands=commands_for(name, data, model, get_data=[convert] if missing else [], pools=pools),
        mteb=copies if missing else (),
        published=(),
        captions=tuple(one for one in CAPTION_RESULTS if one.dataset == kind.dataset),
    )


def _mteb_name(row: str) -> str:
    return "InfoSeekIT2ITRetrieval" if row == "infoseek_task8" else f"mbeir_{row}"
