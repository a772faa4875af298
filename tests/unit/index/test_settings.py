"""Probabilities of hits by kind of query."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.config import SearchConfig
from genius_search.index.settings import (
    Calibration,
    KindScale,
    Outcome,
    QueryKind,
    Weights,
    from_dict,
    to_dict,
)
from genius_search.records import Modality

OUTCOME = Outcome(
    queries=1, error=0.0, brier=0.0, base_brier=0.0, coverage=0.0, precision=0.0, refused=0.0, bins=()
)
SCALE = {
    "intercept": 0.0,
    "weights": Weights(1.0, 0.0, 0.0, 0.0),
    "alone": (0.0, 0.0),
    "lowest": -9.0,
    "highest": 9.0,
    "queries": 9,
    "held_out": OUTCOME,
}


def calibration(*kinds, threshold=0.5):
    return Calibration(
        **SCALE,
        search=SearchConfig(),
        threshold=threshold,
        wanted_precision=0.8,
        absent=0.2,
        data="",
        items=9,
        kinds=kinds,
        common_words=("a", "the"),
    )


def kind(query, item, words, threshold=0.5):
    return KindScale(**SCALE, query=query, item=item, words=words, threshold=threshold)


def test_common_words_do_not_make_a_query_long():
    common = ("a", "the")
    assert QueryKind.of("The green Umbrella", has_image=False, item=Modality.IMAGE, common=common).words == 2
    assert QueryKind.of("the", has_image=False, item=Modality.IMAGE, common=common).words == 1
    assert QueryKind.of("one two three four five", has_image=False, item=Modality.TEXT).words == 4
    assert QueryKind.of("red", has_image=True, item=Modality.TEXT) == ("image-text", "text", 4)


def test_the_closest_kind_counts_and_the_general_scale_without_one():
    short, long = kind("text", "image", 2), kind("text", "image", 4)
    fitted = calibration(short, long)
    assert fitted.scale("a green umbrella", has_image=False, item=Modality.IMAGE) is short
    assert fitted.scale("umbrella", has_image=False, item=Modality.IMAGE) is short
    assert fitted.scale("a b c d e", has_image=False, item=Modality.IMAGE) is long
    assert fitted.scale("umbrella", has_image=False, item=Modality.TEXT) is fitted


def test_relevance_is_one_half_at_the_threshold():
    probabilities = np.array([0.1, 0.2, 0.9])
    relevance = kind("text", "text", 1, threshold=0.2).relevance(probabilities)
    assert relevance[1] == pytest.approx(0.5)
    assert (np.diff(relevance) > 0).all()
    assert (kind("text", "text", 1, threshold=None).relevance(probabilities) == probabilities).all()


def test_a_calibration_of_an_earlier_version_is_read():
    fitted = calibration(kind("text", "text", 1))
    body = to_dict(fitted)
    assert from_dict(Calibration, body) == fitted
    earlier = {name: value for name, value in body.items() if name not in ("kinds", "common_words")}
    assert from_dict(Calibration, earlier).kinds == ()
