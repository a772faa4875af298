"""Where IDs lie: the vectors that they stand for, in two dimensions (supplement, figure 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int

from genius.data.records import Modality
from genius.report.drawing import BLUE, GREEN, INK, VERMILION, Drawing, blank

COLOURS: Final = (BLUE, VERMILION, GREEN)
"""Of images, texts, and both."""


class Cloud(NamedTuple):
    """The vectors of one model's IDs."""

    title: str
    vectors: Float[np.ndarray, "items dim"]
    modalities: Int[np.ndarray, " items"]


class Projection(NamedTuple):
    """Vectors in two dimensions."""

    places: Float64[np.ndarray, "items 2"]
    kept: float
    """Share of the variance that the two dimensions hold."""
    distinct: int
    """Different vectors."""


def principal(vectors: Float[np.ndarray, "items dim"]) -> Projection:
    """The two directions of most variance."""
    distinct = len(np.unique(np.round(vectors, 6), axis=0))
    centred = vectors.astype(np.float64) - vectors.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    total = float(np.sum(sizes**2))
    kept = float(np.sum(sizes[:2] ** 2)) / total if total > 0 else 0.0
    places: Float64[np.ndarray, "items 2"] = left[:, :2] * sizes[:2]
    return Projection(places, kept, distinct)


def clouds_figure(clouds: Sequence[Cloud]) -> Drawing:
    """A panel for each model; each has axes of its own, since nothing makes their lengths comparable."""
    figure = blank(4.6 * len(clouds), 4.6)
    panels = figure.subplots(1, len(clouds), squeeze=False)[0]
    for axes, cloud in zip(panels, clouds, strict=True):
        found = principal(cloud.vectors)
        for modality in Modality:
            own = cloud.modalities == modality.code
            if own.any():
                axes.scatter(
                    found.places[own, 0],
                    found.places[own, 1],
                    s=7,
                    alpha=0.55,
                    linewidths=0,
                    color=COLOURS[modality.code],
                    label=modality.label,
                )
        axes.set_title(cloud.title, loc="left", fontsize=11)
        axes.set_xlabel(
            f"{found.distinct:,} different IDs of {len(cloud.vectors):,} items;\n"
            f"{found.kept:.0%} of the variance is shown",
            color=INK,
        )
        axes.set_xticks([])
        axes.set_yticks([])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, markerscale=2.5)
    return Drawing(
        name="embeddings",
        title="Vectors of the IDs, by modality (principal components)",
        alt=f"Scatter of ID vectors for {', '.join(cloud.title for cloud in clouds)}, coloured by modality",
        figure=figure,
    )
