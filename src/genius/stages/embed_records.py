"""Turn M-BEIR's records into rows of features: which text the encoder reads, under which instruction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from genius.artifact import file_fingerprint, fingerprint_of
from genius.data.features import Features
from genius.data.ids import IdSet
from genius.data.instructions import Instructions
from genius.data.mbeir import MBeir, read_pool, read_queries
from genius.data.records import (
    Candidate,
    Modality,
    Query,
    candidate_number,
    format_text,
    instructed,
    parse_id,
    query_number,
)
from genius.encoders.protocol import Encoder, ItemKey
from genius.errors import BadData
from genius.stages.embed import FeatureRow, embed
from genius.stages.progress import Progress

InstructionChoice = Literal["hashed", "first", "none", "all"]


class TrainingFeatures(NamedTuple):
    """Features of a data set's training queries and training pool."""

    queries: Features
    candidates: Features


def embed_training(data: MBeir, encoder: Encoder, folder: Path, *, progress: Progress) -> TrainingFeatures:
    """Embed the training pool, and each training query once under each of its instructions."""
    candidates = embed_pool(data, data.training_pools(), encoder, folder / "candidates", progress=progress)
    queries = embed(
        _training_query_rows(data, candidates),
        encoder,
        folder / "queries",
        inputs={"records": fingerprint_of_files([*data.training_queries(), *instruction_files(data)])},
        expected=count_lines(data.training_queries()) * _usual_number(data.instructions),
        progress=progress,
    )
    return TrainingFeatures(queries, candidates)


def embed_pool(
    data: MBeir, pools: Sequence[Path], encoder: Encoder, folder: Path, *, progress: Progress
) -> Features:
    """Embed the candidates of some pool files, each candidate once."""
    rows = (candidate_row(data, candidate) for candidate in read_pool(pools))
    return embed(
        rows,
        encoder,
        folder,
        inputs={"records": fingerprint_of_files(pools)},
        expected=count_lines(pools),
        progress=progress,
    )


def candidate_row(data: MBeir, candidate: Candidate) -> FeatureRow:
    """A candidate as the encoder shall see it: never with an instruction."""
    return FeatureRow(
        id=candidate_number(candidate.did),
        key=ItemKey("candidate", candidate.did),
        modality=candidate.modality,
        image=None if candidate.image is None else data.image_path(candidate.image),
        text=format_text(candidate.text),
    )


def query_row(
    data: MBeir, query: Query, wanted: Modality, instruction: str | None, variant: int, *, split: str
) -> FeatureRow:
    """A query of a split under one instruction."""
    return FeatureRow(
        id=query_number(query.qid),
        key=ItemKey("query", query.qid, split),
        modality=query.modality,
        image=None if query.image is None else data.image_path(query.image),
        text=instructed(instruction, query.text),
        variant=variant,
        wanted=wanted,
    )


def choose_instruction(
    instructions: Instructions,
    query: Query,
    wanted: Modality,
    choice: Literal["hashed", "first", "none"],
    *,
    seed: int,
) -> str | None:
    """One instruction for a query, the same on every run and machine.

    Deviation 25: UniIR draws it at random.
    """
    if choice == "none":
        return None
    offered = instructions_for(instructions, query, wanted)
    if not offered:
        return None
    if choice == "first":
        return offered[0]
    digest = hashlib.sha256(f"{seed} {query.qid}".encode()).digest()
    return offered[int.from_bytes(digest[:8], "big") % len(offered)]


def instructions_for(instructions: Instructions, query: Query, wanted: Modality) -> tuple[str, ...]:
    """Every instruction that fits a query and what it asks for."""
    return instructions.lookup(parse_id(query.qid)[0], query.modality, wanted)


def instruction_files(data: MBeir) -> list[Path]:
    """The data set's instructions, if it has any."""
    return [data.instructions_file] if data.instructions_file.exists() else []


def _usual_number(instructions: Instructions) -> int:
    """About how many instructions a query has."""
    counts = [len(texts) for texts in instructions.rows.values()]
    return max(1, round(sum(counts) / len(counts))) if counts else 1


def count_lines(files: Sequence[Path]) -> int:
    """Records of some files: their lines, blank ones left out, whether or not the last one ends."""
    total = 0
    for path in files:
        with path.open("rb") as file:
            total += sum(not line.isspace() for line in file)
    return total


def fingerprint_of_files(files: Sequence[Path]) -> str:
    """Fingerprint of the contents of some files, whatever their folder."""
    return fingerprint_of([[path.name, file_fingerprint(path)] for path in files])


def _training_query_rows(data: MBeir, candidates: Features) -> Iterator[FeatureRow]:
    order = np.argsort(candidates.ids, kind="stable")
    ids = candidates.ids[order]
    modalities = list(Modality)
    seen = IdSet()
    for path in data.training_queries():
        for query in read_queries(path):
            if not seen.add(query.qid):  # the upsampled training file repeats queries
                continue
            positives = np.array([candidate_number(did) for did in query.positives], dtype=np.int64)
            place = np.searchsorted(ids, positives).clip(max=len(ids) - 1)
            if not (ids[place] == positives).all():
                absent = query.positives[int(np.flatnonzero(ids[place] != positives)[0])]
                raise BadData(
                    f"{path}: query {query.qid} has the positive {absent}, which is not in the training "
                    "pool; run `genius data check` on the data set"
                )
            for code in np.unique(candidates.modality[order[place]]):
                wanted = modalities[int(code)]
                offered = instructions_for(data.instructions, query, wanted)
                for variant, instruction in enumerate(offered or (None,)):
                    yield query_row(data, query, wanted, instruction, variant, split="train")
