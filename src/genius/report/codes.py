"""What codes mean, with pictures: items that share a code, level by level (paper, figure 3; supplement, 2-4).

The first semantic levels are shown as a path: at each level the fullest codes under the ones chosen before.
An item's picture stands for it, or its words where it has none.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int64, UInt8
from matplotlib.axes import Axes

from genius.report.drawing import INK, PAPER, Drawing, blank
from genius.report.table import Cell, Table

SHOWN: Final = 8
"""Items of a code."""
GROUPS: Final = 3
"""Codes of a level."""
LEVELS: Final = 3
"""Semantic levels."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One item as it is drawn."""

    image: UInt8[np.ndarray, "rows columns 3"] | None
    text: str


class Group(NamedTuple):
    """The items under one prefix."""

    level: int
    """Of the last code."""
    prefix: tuple[int, ...]
    size: int
    rows: Int64[np.ndarray, " items"]
    """Some of them, spread evenly."""


def groups_of(
    codes: Int[np.ndarray, "items levels"],
    has_picture: Bool[np.ndarray, " items"],
    *,
    first: int,
    seed: int = 0,
) -> list[Group]:
    """The fullest codes of each level; each level's under the fullest of the level before.

    Codes of a single item show nothing and are left out.

    Parameters
    ----------
    codes, has_picture
        of a pool's items. Behind the modality only items with a picture are shown, if there are any.
    first
        the first semantic level: 1 behind a modality code.
    """
    random = np.random.default_rng(seed)
    inside = np.arange(len(codes))
    prefix: tuple[int, ...] = ()
    found: list[Group] = []
    for level in range(min(first + LEVELS, codes.shape[1])):
        if level == first and has_picture[inside].any():
            inside = inside[has_picture[inside]]
        values, counts = np.unique(codes[inside, level], return_counts=True)
        order = np.argsort(-counts, kind="stable")[:GROUPS]
        order = order[counts[order] > 1]
        for place in order:
            members = inside[codes[inside, level] == values[place]]
            some = np.sort(random.choice(members, size=min(SHOWN, len(members)), replace=False))
            found.append(Group(level, (*prefix, int(values[place])), len(members), some))
        if not len(order):
            break
        onward = int(order[0])
        if level < first:  # the way leads on where the most pictures are
            onward = int(max(order, key=lambda place: has_picture[codes[:, level] == values[place]].sum()))
        prefix = (*prefix, int(values[onward]))
        inside = inside[codes[inside, level] == values[onward]]
    return found


def codes_figure(groups: Sequence[Group], items: Sequence[Sequence[Shown]], *, title: str) -> Drawing:
    """A row for each group, its items beside each other.

    Parameters
    ----------
    items
        of each group, as many as it has rows.
    """
    figure = blank(1.15 * (SHOWN + 2), 1.18 * len(groups) + 0.3)
    axes = figure.subplots(len(groups), SHOWN + 1, width_ratios=[1.9, *[1.0] * SHOWN], squeeze=False)
    for line, (group, shown) in enumerate(zip(groups, items, strict=True)):
        named = ".".join(map(str, group.prefix))
        count = f"{group.size:,} {'item' if group.size == 1 else 'items'}"
        _words(axes[line, 0], f"level {group.level}\n{named}\n{count}", size=9.0)
        for place in range(SHOWN):
            panel = axes[line, place + 1]
            if place >= len(shown):
                panel.axis("off")
            else:
                _draw(panel, shown[place])
    return Drawing(
        name="codes",
        title=title,
        alt="Rows of items that share their first codes; each level's rows are under the first row before",
        figure=figure,
    )


def codes_table(groups: Sequence[Group], items: Sequence[Sequence[Shown]]) -> Table:
    """The same in words."""
    lines: list[tuple[Cell, ...]] = [
        (
            str(group.level),
            ".".join(map(str, group.prefix)),
            "; ".join(textwrap.shorten(one.text, 60, placeholder=" …") for one in shown[:4]),
            group.size,
        )
        for group, shown in zip(groups, items, strict=True)
    ]
    return Table(
        name="codes-by-level",
        title="Codes by level",
        note="The fullest codes of each level, under the fullest code of the level before; level 0 is the "
        "modality where the model has such a code. Some of the items under each.",
        headings=("level", "codes", "some of the items", "items"),
        lines=lines,
        text_columns=3,
    )


def _draw(axes: Axes, shown: Shown) -> None:
    if shown.image is None:
        _words(axes, textwrap.fill(shown.text, 15, max_lines=5, placeholder=" …"), size=6.5)
        return
    axes.imshow(shown.image)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(PAPER)


def _words(axes: Axes, text: str, *, size: float) -> None:
    axes.axis("off")
    # Two dollars in a caption are prices, not a formula.
    axes.text(
        0.0, 0.5, text, fontsize=size, color=INK, ha="left", va="center", transform=axes.transAxes,
        parse_math=False,
    )  # fmt: skip
