"""The figures of a report, in colours that the colour-blind can tell apart."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int64
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from genius_search.data.features import Features
from genius_search.data.images import open_image
from genius_search.data.mbeir import MBeir, read_pool
from genius_search.nn.codebooks import Codebooks, StoredQuantizer, sum_codes
from genius_search.nn.spread import NUM_EXTRA_COLUMNS
from genius_search.records import Modality, candidate_number
from research.evaluate import CANDIDATES
from research.systems import System

# Okabe and Ito's.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK: Final = "#33302b"
GRID: Final = "#e4e0d8"
SHOWN: Final = 8
"""Items of a code that are drawn."""
CODES_SHOWN: Final = 3
"""Codes of a level."""
LEVELS_SHOWN: Final = 3
"""Semantic levels."""
THUMBNAIL: Final = 96
"""Pixels of a picture's longest side."""
CLOUD_ITEMS: Final = 3000
Shown = tuple[np.ndarray | None, str]
"""Pixels and text of an item."""


class Drawing(NamedTuple):
    """A figure with its title and its description."""

    name: str
    """The name of its file."""
    title: str
    alt: str
    """A description for those who cannot see it."""
    figure: Figure


def new_figure(width: float = 7.0, height: float = 4.0) -> Figure:
    """Return an empty figure of a size in inches."""
    return Figure(figsize=(width, height), dpi=160, layout="constrained")


def beam_figure(beams: Sequence[tuple[int, System]]) -> Drawing:
    """Draw recall by the beam's width, the spread of seeds as bars."""
    figure = new_figure()
    axes = figure.add_subplot()
    columns = [
        (method, name) for method in beams[0][1].methods("global") for name in ("R@1", "R@5")
    ]
    for number, (method, name) in enumerate(columns):
        found = [(width, system.average("global", method, name)) for width, system in beams]
        known = [(width, one) for width, one in found if one is not None]
        axes.errorbar(
            [width for width, _ in known],
            [one.value for _, one in known],
            yerr=[one.sd or 0.0 for _, one in known],
            color=COLOURS[number % len(COLOURS)],
            marker="o",
            capsize=3,
            label=f"{method}, {name}",
        )
    widths = [width for width, _ in beams]
    axes.set_xscale("log")
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_xlabel("beam: IDs kept at each level", color=INK)
    axes.set_ylabel("mean over tasks, %", color=INK)
    axes.grid(visible=True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return Drawing(
        name="beam",
        title="Recall and the beam's width",
        alt="Recall by the beam's width",
        figure=figure,
    )


def code_figures(model: Path, evaluation: Path, data: MBeir | None, *, title: str) -> list[Drawing]:
    """Draw items that share codes (with ``data``) and the vectors of IDs; nothing without stored codes."""
    folder = evaluation / CANDIDATES
    codes_files = sorted(folder.glob("codes-*/codes.npy"))
    if not codes_files:
        return []
    features = Features.open(folder / "features")
    columns = np.load(codes_files[0], mmap_mode="r")
    codes = columns[:, : columns.shape[1] - NUM_EXTRA_COLUMNS]
    quantizer = StoredQuantizer(model / "quantizer").codebooks
    drawings = [cloud_figure(quantizer, codes, features.modality, title=title)]
    if data is not None:
        first = 1 if quantizer.has_modality_level else 0
        groups = group_by_code(codes, features.modality != Modality.TEXT.code, first=first)
        split = evaluation.joinpath("results.json").read_text(encoding="utf-8")
        drawings.append(
            codes_figure(groups, _items(data, json.loads(split)["split"], features, groups), title)
        )
    return drawings


def cloud_figure(
    quantizer: Codebooks,
    codes: Int[np.ndarray, "items levels"],
    modality: Int[np.ndarray, " items"],
    *,
    title: str,
) -> Drawing:
    """Draw the vectors of IDs on their two principal components, coloured by modality."""
    rows = np.linspace(0, len(codes) - 1, min(CLOUD_ITEMS, len(codes))).astype(np.int64)
    vectors = sum_codes(quantizer.tables(), codes[rows])
    # On the two directions of most variance, with the share of the variance that they hold.
    left, sizes, _ = np.linalg.svd(vectors - vectors.mean(axis=0), full_matrices=False)
    places, shares = left[:, :2] * sizes[:2], np.square(sizes) / max(np.square(sizes).sum(), 1e-12)
    figure = new_figure(5.0, 5.0)
    axes = figure.add_subplot()
    for one, colour in zip(Modality, COLOURS, strict=False):
        own = modality[rows] == one.code
        if own.any():
            axes.scatter(
                places[own, 0],
                places[own, 1],
                s=7,
                alpha=0.55,
                linewidths=0,
                color=colour,
                label=one.value,
            )
    axes.set_xlabel(f"{shares[:2].sum():.0%} of the variance is shown", color=INK)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.legend(frameon=False)
    return Drawing(
        name="embeddings",
        title=f"Vectors of the IDs, by modality ({title})",
        alt="Scatter of ID vectors, coloured by modality",
        figure=figure,
    )


class Group(NamedTuple):
    """The items under one prefix."""

    prefix: tuple[int, ...]
    size: int
    rows: Int64[np.ndarray, " items"]
    """Some of them, drawn at random."""


def group_by_code(
    codes: Int[np.ndarray, "items levels"], has_picture: Bool[np.ndarray, " items"], *, first: int
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
        if has_picture[inside].any():
            inside = inside[has_picture[inside]]
        values, counts = np.unique(codes[inside, level], return_counts=True)
        order = np.argsort(-counts, kind="stable")[:CODES_SHOWN]
        order = order[counts[order] > 1]
        for place in order:
            members = inside[codes[inside, level] == values[place]]
            rows = np.sort(random.choice(members, size=min(SHOWN, len(members)), replace=False))
            found.append(Group((*prefix, int(values[place])), len(members), rows))
        if not len(order):
            break
        following = int(values[order[0]])
        prefix = (*prefix, following)
        inside = inside[codes[inside, level] == following]
    return found


def _items(
    data: MBeir, split: str, features: Features, groups: Sequence[Group]
) -> list[list[Shown]]:
    wanted = {int(features.ids[row]) for group in groups for row in group.rows}
    found: dict[int, Shown] = {}
    pools = dict.fromkeys([*data.global_pool(split), *(row.local_pool for row in data.rows(split))])
    for candidate in read_pool(pools):
        number = candidate_number(candidate.did)
        if number in wanted:
            image = None
            if candidate.image is not None:
                picture = open_image(data.image_path(candidate.image), shortest_side=THUMBNAIL)
                picture.thumbnail((THUMBNAIL, THUMBNAIL))
                image = np.asarray(picture)
            found[number] = image, candidate.text or candidate.did
    return [[found[int(features.ids[row])] for row in group.rows] for group in groups]


def codes_figure(groups: Sequence[Group], items: Sequence[Sequence[Shown]], title: str) -> Drawing:
    """Draw a row for each group with its items beside each other."""
    figure = new_figure(1.15 * (SHOWN + 2), 1.18 * max(1, len(groups)) + 0.3)
    panels = figure.subplots(
        max(1, len(groups)), SHOWN + 1, width_ratios=[1.9, *[1.0] * SHOWN], squeeze=False
    )
    for row in panels:
        for axes in row:
            axes.axis("off")
    for row, group, shown in zip(panels, groups, items, strict=False):
        _write(row[0], f"{'.'.join(map(str, group.prefix))}\n{group.size:,} items", size=9.0)
        for axes, (image, text) in zip(row[1:], shown, strict=False):
            if image is not None:
                axes.imshow(image)
            else:
                _write(axes, textwrap.fill(text, 15, max_lines=5, placeholder=" …"), size=6.5)
    return Drawing(
        name="codes",
        title=f"Items that share codes ({title})",
        alt="Rows of items that share their first codes; each level's rows are under the first row before",
        figure=figure,
    )


def _write(axes: Axes, text: str, *, size: float) -> None:
    style: dict[str, Any] = {"fontsize": size, "color": INK, "ha": "left", "va": "center"}
    # Two dollars in a caption are prices, not a formula.
    axes.text(0.0, 0.5, text, transform=axes.transAxes, parse_math=False, **style)
