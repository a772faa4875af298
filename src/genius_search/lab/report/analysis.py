"""Analyses of rankings and codes for a report: kinds of errors, confidence of first hits, shared codes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Float64, Int, Int16, Int64, UInt8
from scipy import special, stats

from genius_search.artifact import open_artifact
from genius_search.data.features import Features
from genius_search.data.images import open_image
from genius_search.data.mbeir import MBeir, read_pool
from genius_search.errors import BadData
from genius_search.lab.codes import KIND as CODES
from genius_search.lab.report.evaluated import System
from genius_search.lab.report.reliability import Predictions
from genius_search.lab.runs import Qrels, Run
from genius_search.lab.settings import Pool
from genius_search.nn.columns import NUM_EXTRA_COLUMNS
from genius_search.records import TASKS, candidate_number, did_of, parse_id

OUTCOMES: Final = (
    "right",
    "wrong modality",
    "wrong data set",
    "right item further down",
    "another item",
    "nothing found",
)
"""Kinds of first hits; the first that applies counts."""
SUMS_OF_LOG_PROBABILITIES: Final = ("generative",)
ITEMS_SHOWN: Final = 8
"""Items of a code."""
GROUPS_SHOWN: Final = 3
"""Codes of a level."""
LEVELS_SHOWN: Final = 3
"""Semantic levels."""
THUMBNAIL: Final = 96
"""Pixels of a picture's longest side."""


def outcomes(system: System, method: str, pool: Pool, modalities: Mapping[str, int]) -> pd.Series:
    """Return the share of each outcome as the mean over seeds and tasks; ``modalities`` has codes by id."""
    shares = []
    for one in system.seeds:
        for task in system.tasks(pool):
            qrels, run = one.qrels(pool, task.name), one.run(pool, method, task.name)
            wanted = TASKS[task.task_id][1].code
            counts = Counter(outcome(run, qrels, qid, wanted=wanted, modalities=modalities) for qid in qrels)
            shares.append({kind: counts[kind] / len(qrels) for kind in OUTCOMES})
    return pd.DataFrame(shares).mean().rename(f"{system.title}: {method}")


def outcome(run: Run, qrels: Qrels, qid: str, *, wanted: int, modalities: Mapping[str, int]) -> str:
    """Return which of :data:`OUTCOMES` one query's first hit is."""
    ranking = run.hits.get(qid, ())
    if not ranking:
        return "nothing found"
    right = {did for did, relevance in qrels[qid].items() if relevance > 0}
    first = ranking[0].did
    if first in right:
        return "right"
    if modalities[first] != wanted:
        return "wrong modality"
    if parse_id(first)[0] not in {parse_id(did)[0] for did in right}:
        return "wrong data set"
    return "right item further down" if any(hit.did in right for hit in ranking) else "another item"


class FirstHits(NamedTuple):
    """The first hits of one system: how sure it was, and whether they are right."""

    label: str
    method: str
    scores: Float64[np.ndarray, " queries"]
    right: Bool[np.ndarray, " queries"]
    promised: Float64[np.ndarray, " queries"] | None
    """Probability of the first hit among the hits that were kept, where scores are log-probabilities."""

    @property
    def sureness(self) -> Float64[np.ndarray, " queries"]:
        """The promise, or else the score."""
        return self.scores if self.promised is None else self.promised

    def cases(self) -> Predictions:
        """Return the predicted probabilities and whether each first hit is right."""
        if self.promised is None:
            raise ValueError(f"{self.method}: its scores are not probabilities")
        return Predictions(self.promised, self.right, np.ones(len(self.promised)))


def first_hits(system: System, pool: Pool, method: str) -> FirstHits:
    """Return the first hits of all seeds and tasks; queries without any hit are left out."""
    scores, right, promised = [], [], []
    for one in system.seeds:
        for task in system.tasks(pool):
            qrels = one.qrels(pool, task.name)
            for qid, ranking in one.run(pool, method, task.name).hits.items():
                if ranking:
                    scores.append(ranking[0].score)
                    right.append(qrels[qid].get(ranking[0].did, 0) > 0)
                    promised.append(share_of_first([hit.score for hit in ranking]))
    return FirstHits(
        system.title,
        method,
        np.array(scores, dtype=np.float64),
        np.array(right, dtype=bool),
        np.array(promised, dtype=np.float64) if method in SUMS_OF_LOG_PROBABILITIES else None,
    )


def share_of_first(scores: Sequence[float]) -> float:
    """Return the first of some log-probabilities as a share of all of them.

    A sum over levels alone is next to nothing: most IDs that could be written do not exist.
    """
    return math.exp(scores[0] - float(special.logsumexp(scores)))


def separation(scores: Float64[np.ndarray, " queries"], right: Bool[np.ndarray, " queries"]) -> float | None:
    """Return the area under the ROC curve (Mann and Whitney's statistic); None without both kinds."""
    if right.all() or not right.any():
        return None
    statistic = stats.mannwhitneyu(scores[right], scores[~right]).statistic
    return float(statistic) / (int(right.sum()) * int((~right).sum()))


def accuracy_of_surest(found: FirstHits, share: float) -> float:
    """Return the share of right answers among this share of the queries, the surest."""
    order = np.argsort(-found.sureness, kind="stable")
    return float(found.right[order[: max(1, round(share * len(order)))]].mean())


def read_encoded_pool(evaluation: Path) -> tuple[Features, Int16[np.ndarray, "items levels"]] | None:
    """Read what an evaluation encoded; None where it kept no candidates of the union of pools."""
    folder = evaluation / "candidates"
    for place in sorted(folder.glob("codes-*")):
        manifest = open_artifact(place, kind=CODES)
        features = Features.open(folder / "features")
        if manifest.inputs.get("features") == features.manifest.fingerprint:
            columns = np.load(place / "codes.npy", mmap_mode="r")
            return features, columns[:, : columns.shape[1] - NUM_EXTRA_COLUMNS]
    return None


class Group(NamedTuple):
    """The items under one prefix."""

    level: int
    """The level of the last code."""
    prefix: tuple[int, ...]
    size: int
    rows: Int64[np.ndarray, " items"]
    """Some of them, drawn at random."""


def group_by_code(
    codes: Int[np.ndarray, "items levels"],
    has_picture: Bool[np.ndarray, " items"],
    *,
    first: int,
) -> list[Group]:
    """Return the fullest codes of each level, each level's under the fullest of the level before.

    Codes of a single item show nothing and are left out. From ``first`` on, the first semantic level, only
    items with a picture are shown, if there are any.
    """
    random = np.random.default_rng(0)
    inside = np.arange(len(codes))
    prefix: tuple[int, ...] = ()
    found: list[Group] = []
    for level in range(min(first + LEVELS_SHOWN, codes.shape[1])):
        if level == first and has_picture[inside].any():
            inside = inside[has_picture[inside]]
        values, counts = np.unique(codes[inside, level], return_counts=True)
        order = np.argsort(-counts, kind="stable")[:GROUPS_SHOWN]
        order = order[counts[order] > 1]
        for place in order:
            members = inside[codes[inside, level] == values[place]]
            rows = np.sort(random.choice(members, size=min(ITEMS_SHOWN, len(members)), replace=False))
            found.append(Group(level, (*prefix, int(values[place])), len(members), rows))
        if not len(order):
            break
        following = int(order[0])
        if level < first:  # follow the modality with the most pictures
            following = int(max(order, key=lambda place: has_picture[codes[:, level] == values[place]].sum()))
        prefix = (*prefix, int(values[following]))
        inside = inside[codes[inside, level] == values[following]]
    return found


class Item(NamedTuple):
    """One item as a figure shows it."""

    image: UInt8[np.ndarray, "rows columns 3"] | None
    text: str


def read_items(data: MBeir, split: str, features: Features, groups: Sequence[Group]) -> list[list[Item]]:
    """Return the items of groups with their pictures; raises BadData where the data set is another one."""
    wanted = {int(features.ids[row]) for group in groups for row in group.rows}
    found: dict[int, Item] = {}
    for candidate in read_pool([*data.global_pool(split), *data.local_pools_of(split)]):
        number = candidate_number(candidate.did)
        if number in wanted:
            image = None
            if candidate.image is not None:
                picture = open_image(data.image_path(candidate.image), shortest_side=THUMBNAIL)
                picture.thumbnail((THUMBNAIL, THUMBNAIL))
                image = np.asarray(picture)
            found[number] = Item(image=image, text=candidate.text or candidate.did)
    if len(found) < len(wanted):
        raise BadData(
            f"{data.root} has no candidate {did_of(min(wanted - found.keys()))}, which was evaluated; give "
            "--data the data set of the evaluations, or leave it out"
        )
    return [[found[int(features.ids[row])] for row in group.rows] for group in groups]


class Projection(NamedTuple):
    """Vectors in two dimensions."""

    places: Float64[np.ndarray, "items 2"]
    kept: float
    """Share of the variance that the two dimensions hold."""
    distinct: int
    """Number of different vectors."""


def project(vectors: Float[np.ndarray, "items dim"]) -> Projection:
    """Project vectors on the two directions of most variance."""
    distinct = len(np.unique(np.round(vectors, 6), axis=0))
    centred = vectors.astype(np.float64) - vectors.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    total = float(np.sum(sizes**2))
    kept = float(np.sum(sizes[:2] ** 2)) / total if total > 0 else 0.0
    places: Float64[np.ndarray, "items 2"] = left[:, :2] * sizes[:2]
    return Projection(places, kept, distinct)
