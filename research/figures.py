"""The figures of a report, in colours that colour-blind readers can distinguish."""

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

# By Okabe and Ito.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK: Final = "#33302b"
GRID: Final = "#e4e0d8"
ITEMS_PER_CODE: Final = 8
"""Maximum number of items of a code that are drawn."""
CODES_PER_LEVEL: Final = 3
"""Maximum number of codes of a level that are drawn."""
MAX_SEMANTIC_LEVELS: Final = 3
"""Maximum number of semantic levels that are drawn."""
THUMBNAIL_PIXELS: Final = 96
"""Longest side of a picture."""
MAX_SCATTER_ITEMS: Final = 3000


class ShownItem(NamedTuple):
    """A picture or a text that stands for an item."""

    pixels: np.ndarray | None
    text: str


class Drawing(NamedTuple):
    """A figure with its title and its description."""

    name: str
    """Name of the figure's file."""
    title: str
    alt: str
    """Description of the figure for readers who cannot see it."""
    figure: Figure


def new_figure(width: float = 7.0, height: float = 4.0) -> Figure:
    """Return an empty figure of a size in inches."""
    return Figure(figsize=(width, height), dpi=160, layout="constrained")


def beam_figure(beams: Sequence[tuple[int, System]]) -> Drawing:
    """Draw recall by the width of the beam, with the standard deviation of seeds as bars."""
    figure = new_figure()
    axes = figure.add_subplot()
    columns = [
        (method, name) for method in beams[0][1].methods("global") for name in ("R@1", "R@5")
    ]
    for number, (method, name) in enumerate(columns):
        points = []
        for width, system in beams:
            recall = system.average("global", method, name)
            if recall is not None:
                points.append((width, recall.value, recall.sd or 0.0))
        widths, recalls, deviations = zip(*points, strict=True) if points else ((), (), ())
        axes.errorbar(
            widths,
            recalls,
            yerr=deviations,
            color=COLOURS[number % len(COLOURS)],
            marker="o",
            capsize=3,
            label=f"{method}, {name}",
        )
    ticks = [width for width, _ in beams]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [str(width) for width in ticks])
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
    """Draw the vectors of IDs and, with ``data``, items that share codes.

    Return an empty list if the evaluation has no codes.
    """
    folder = evaluation / CANDIDATES
    codes_files = sorted(folder.glob("codes-*/codes.npy"))
    if not codes_files:
        return []
    features = Features.open(folder / "features")
    columns = np.load(codes_files[0], mmap_mode="r")
    codes = columns[:, : columns.shape[1] - NUM_EXTRA_COLUMNS]
    quantizer = StoredQuantizer(model / "quantizer").codebooks
    drawings = [scatter_figure(quantizer, codes, features.modality, title=title)]
    if data is not None:
        first = 1 if quantizer.has_modality_level else 0
        groups = group_by_code(codes, features.modality != Modality.TEXT.code, first=first)
        results = json.loads((evaluation / "results.json").read_text(encoding="utf-8"))
        items = read_shown_items(data, results["split"], features, groups)
        drawings.append(codes_figure(groups, items, title))
    return drawings


def scatter_figure(
    quantizer: Codebooks,
    codes: Int[np.ndarray, "items levels"],
    modality: Int[np.ndarray, " items"],
    *,
    title: str,
) -> Drawing:
    """Draw the vectors of IDs on their two principal components, coloured by modality."""
    rows = np.linspace(0, len(codes) - 1, min(MAX_SCATTER_ITEMS, len(codes))).astype(np.int64)
    vectors = sum_codes(quantizer.tables(), codes[rows])
    left, sizes, _ = np.linalg.svd(vectors - vectors.mean(axis=0), full_matrices=False)
    points = left[:, :2] * sizes[:2]
    shares = np.square(sizes) / max(np.square(sizes).sum(), 1e-12)  # of the variance
    figure = new_figure(5.0, 5.0)
    axes = figure.add_subplot()
    for item_modality, colour in zip(Modality, COLOURS, strict=False):
        selected = points[modality[rows] == item_modality.code]
        if len(selected):
            axes.scatter(
                selected[:, 0],
                selected[:, 1],
                s=7,
                alpha=0.55,
                linewidths=0,
                color=colour,
                label=item_modality.value,
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
    """The items with the same prefix of an ID."""

    prefix: tuple[int, ...]
    size: int
    rows: Int64[np.ndarray, " items"]
    """Random sample of the items."""


def group_by_code(
    codes: Int[np.ndarray, "items levels"], has_picture: Bool[np.ndarray, " items"], *, first: int
) -> list[Group]:
    """Return the most frequent codes of each level, under the most frequent code one level up.

    Codes of a single item are left out. Items without a picture are shown only if no item has one.

    Parameters
    ----------
    first
        first semantic level.
    """
    random = np.random.default_rng(0)
    members = np.arange(len(codes))
    prefix: tuple[int, ...] = ()
    groups: list[Group] = []
    for level in range(min(first + MAX_SEMANTIC_LEVELS, codes.shape[1])):
        if has_picture[members].any():
            members = members[has_picture[members]]
        values, counts = np.unique(codes[members, level], return_counts=True)
        order = np.argsort(-counts, kind="stable")[:CODES_PER_LEVEL]
        frequent = values[order[counts[order] > 1]].tolist()
        for code in frequent:
            rows = members[codes[members, level] == code]
            size = min(ITEMS_PER_CODE, len(rows))
            sample = np.sort(random.choice(rows, size=size, replace=False))
            groups.append(Group((*prefix, code), len(rows), sample))
        if not frequent:
            break
        prefix = (*prefix, frequent[0])
        members = members[codes[members, level] == frequent[0]]
    return groups


def read_shown_items(
    data: MBeir, split: str, features: Features, groups: Sequence[Group]
) -> list[list[ShownItem]]:
    """Read the pictures and texts of the groups' items."""
    numbers = {int(features.ids[row]) for group in groups for row in group.rows}
    items: dict[int, ShownItem] = {}
    pools = dict.fromkeys([*data.global_pool(split), *(row.local_pool for row in data.rows(split))])
    for candidate in read_pool(pools):
        number = candidate_number(candidate.did)
        if number not in numbers:
            continue
        pixels = None
        if candidate.image is not None:
            path = data.image_path(candidate.image)
            picture = open_image(path, shortest_side=THUMBNAIL_PIXELS)
            picture.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
            pixels = np.asarray(picture)
        items[number] = ShownItem(pixels, candidate.text or candidate.did)
    return [[items[int(features.ids[row])] for row in group.rows] for group in groups]


def codes_figure(
    groups: Sequence[Group], items: Sequence[Sequence[ShownItem]], title: str
) -> Drawing:
    """Draw the items of each group in a row."""
    num_rows = max(1, len(groups))
    figure = new_figure(1.15 * (ITEMS_PER_CODE + 2), 1.18 * num_rows + 0.3)
    panels = figure.subplots(
        num_rows,
        ITEMS_PER_CODE + 1,
        width_ratios=[1.9, *[1.0] * ITEMS_PER_CODE],
        squeeze=False,
    )
    for axes in panels.flat:
        axes.axis("off")
    for row, group, group_items in zip(panels, groups, items, strict=False):
        _write_text(row[0], f"{'.'.join(map(str, group.prefix))}\n{group.size:,} items", size=9.0)
        for axes, item in zip(row[1:], group_items, strict=False):
            if item.pixels is not None:
                axes.imshow(item.pixels)
            else:
                text = textwrap.fill(item.text, 15, max_lines=5, placeholder=" …")
                _write_text(axes, text, size=6.5)
    return Drawing(
        name="codes",
        title=f"Items that share codes ({title})",
        alt="Rows of items that share their first codes; the rows of a level are under the first "
        "row of the level above",
        figure=figure,
    )


def _write_text(axes: Axes, text: str, *, size: float) -> None:
    style: dict[str, Any] = {"fontsize": size, "color": INK, "ha": "left", "va": "center"}
    # Without parse_math=False, two dollar signs in a caption would begin and end a formula.
    axes.text(0.0, 0.5, text, transform=axes.transAxes, parse_math=False, **style)
