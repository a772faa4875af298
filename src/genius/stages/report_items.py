"""Items of an evaluated pool for ``genius report``: their IDs, pictures and words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int16

from genius.artifact import open_artifact
from genius.data.features import Features
from genius.data.images import open_image
from genius.data.mbeir import MBeir, read_pool
from genius.data.records import Candidate, candidate_number, did_of
from genius.errors import BadData
from genius.models.marks import NUM_MARKS
from genius.report.codes import Group, Shown
from genius.stages.encode import KIND as CODES

PICTURE: Final = 96
"""Pixels of a picture's side."""


class EncodedPool(NamedTuple):
    """IDs of a pool's candidates, from an evaluation's folder."""

    features: Features
    codes: Int16[np.ndarray, "items levels"]


def encoded_pool(evaluation: Path) -> EncodedPool | None:
    """The candidates that an evaluation encoded; nothing where it kept none of the union."""
    folder = evaluation / "candidates"
    for place in sorted(folder.glob("codes-*")):
        manifest = open_artifact(place, kind=CODES)
        features = Features.open(folder / "features")
        if manifest.inputs.get("features") == features.manifest.fingerprint:
            columns = np.load(place / "codes.npy", mmap_mode="r")
            return EncodedPool(features, columns[:, : columns.shape[1] - NUM_MARKS])
    return None


def shown_items(data: MBeir, split: str, features: Features, groups: Sequence[Group]) -> list[list[Shown]]:
    """The items of groups, with their pictures.

    Raises
    ------
    BadData
        the data set is not the one that was evaluated.
    """
    wanted = {int(features.ids[row]) for group in groups for row in group.rows}
    found = {
        number: _item(data, candidate)
        for candidate in read_pool([*data.global_pool(split), *data.local_pools_of(split)])
        if (number := candidate_number(candidate.did)) in wanted
    }
    if len(found) < len(wanted):
        raise BadData(
            f"{data.root} has no candidate {did_of(min(wanted - found.keys()))}, which was evaluated; give "
            "--data the data set of the evaluations, or leave it out"
        )
    return [[found[int(features.ids[row])] for row in group.rows] for group in groups]


def _item(data: MBeir, candidate: Candidate) -> Shown:
    image = None
    if candidate.image is not None:
        picture = open_image(data.image_path(candidate.image), shortest_side=PICTURE)
        picture.thumbnail((PICTURE, PICTURE))
        image = np.asarray(picture)
    return Shown(image=image, text=candidate.text or candidate.did)
