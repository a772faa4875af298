"""The drawings of docs/how-it-works.md. What they show is computed: codes are nearest vectors, beams are kept by score.

Usage: python benchmarks/drawings.py [docs/pictures]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

INK, PALE, ACCENT, SECOND, THIRD, PAPER = "#1f2937", "#9ca3af", "#3949ab", "#e07a1f", "#2e8b57", "#ffffff"


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    tips = "".join(
        f'<marker id="tip-{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="11" markerHeight="11" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'
        for colour in (INK, ACCENT, SECOND, THIRD)
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="14" fill="{INK}">\n<title>{title}</title>\n'
        f'<defs>{tips}</defs>\n<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, words: object, *, fill: str = INK, bold: bool = False, size: int = 14) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" font-size="{size}" fill="{fill}"{weight}>{words}</text>'


def line(
    x1: float, y1: float, x2: float, y2: float, *, stroke: str = INK, width: float = 1.5, tip: bool = True
) -> str:
    marker = f' marker-end="url(#tip-{stroke[1:]})"' if tip else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" '
        f'stroke-width="{width:g}"{marker}/>'
    )


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    words: object,
    *,
    stroke: str = INK,
    fill: str = PAPER,
    bold: bool = False,
) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="1.5"/>{text(x + width / 2, y + height / 2 + 5, words, bold=bold)}'
    )


def column(x: float, y: float, values: np.ndarray, colour: str) -> str:
    """A vector as a column of cells; the larger a number, the darker its cell."""
    shades = (values - values.min()) / np.ptp(values)
    return "".join(
        f'<rect x="{x:g}" y="{y + 14 * row:g}" width="18" height="14" fill="{colour}" '
        f'fill-opacity="{0.1 + 0.9 * shade:.2f}" stroke="{colour}" stroke-width="0.5"/>'
        for row, shade in enumerate(shades)
    )


def four_steps() -> str:
    random = np.random.default_rng(3)
    image, words = random.standard_normal((2, 6))
    fused = image + words
    parts = [
        text(x, 28, name, bold=True, size=16)
        for x, name in ((185, "1 Encode"), (385, "2 Fuse"), (560, "3 Quantize"), (775, "4 Search"))
    ]
    parts += [
        box(20, 55, 90, 50, "picture"),
        box(20, 150, 90, 50, "text"),
        line(112, 80, 172, 80),
        line(112, 175, 172, 175),
        column(178, 45, image, ACCENT),
        column(178, 145, words, SECOND),
        text(187, 246, "features", fill=INK, size=13),
        line(202, 87, 362, 122),
        line(202, 187, 362, 142),
        column(370, 90, fused, INK),
        text(379, 246, "embedding", size=13),
        line(394, 132, 462, 132),
        *(box(468 + 46 * place, 115, 42, 34, code) for place, code in enumerate((0, 107, 198, 234))),
        text(560, 246, "ID", size=13),
        line(656, 132, 700, 132),
    ]
    # A query goes down the tree of the IDs.
    parts += [box(735, 45, 80, 30, "query"), line(775, 77, 775, 90)]
    tree = {(775, 100): ((725, 145), (775, 145), (825, 145)), (775, 145): ((750, 195), (800, 195))}
    for above, below in tree.items():
        parts += [line(*above, *place, stroke=PALE, tip=False) for place in below]
    for here, there in (((775, 100), (775, 145)), ((775, 145), (800, 195))):
        parts.append(line(*here, *there, stroke=ACCENT, width=3, tip=False))
    kept = {(775, 100), (775, 145), (800, 195)}
    places = {*tree, *(place for below in tree.values() for place in below)}
    parts += [
        f'<circle cx="{x}" cy="{y}" r="8" fill="{ACCENT if (x, y) in kept else PALE}"/>'
        for x, y in sorted(places)
    ]
    parts += [line(800, 204, 800, 228, stroke=ACCENT), text(800, 246, "items, ranked", size=13)]
    return svg(880, 265, "Encode, fuse, quantize, search", parts)


def anatomy() -> str:
    """Residual quantization of one point of a plane, with codebooks of random vectors."""
    random = np.random.default_rng(100)
    embedding = np.array([580.0, 230.0])
    scales, vectors, codes = (440, 210, 95, 40), [], []
    left = embedding.copy()
    for level, scale in enumerate(scales):
        angles = random.uniform(0, 2 * np.pi, 3 if level == 0 else 24)
        book = scale * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        if level == 0:
            book = scale * np.array([[0.97, 0.2], [-0.2, 0.9], [0.3, -0.9]])
        codes.append(int(((book - left) ** 2).sum(axis=1).argmin()))
        vectors.append(book[codes[-1]])
        left = left - vectors[-1]
    colours = (INK, ACCENT, SECOND, THIRD)
    names = ("modality", "region", "finer", "finest")
    parts = [text(242, 28, "An ID, and the vectors of its codes", bold=True, size=16)]
    for place, (code, colour, name) in enumerate(zip(codes, colours, names, strict=True)):
        parts += [box(40 + 105 * place, 48, 90, 40, code, stroke=colour, bold=True)]
        parts += [text(85 + 105 * place, 108, name, fill=colour, size=13)]
    here = np.array([110.0, 390.0])
    start = here.copy()
    for vector, colour in zip(vectors, colours, strict=True):
        there = here + vector * (1, -1)
        parts.append(line(*here, *there, stroke=colour, width=3))
        here = there
    x, y = start + embedding * (1, -1)
    parts += [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="none" stroke="{INK}" stroke-width="2"/>',
        text(x + 58, y + 2, "embedding"),
        text(
            here[0] + 95,
            here[1] + 34,
            f"what is left: {np.linalg.norm(left) / np.linalg.norm(embedding):.0%}",
            size=13,
        ),
        f'<circle cx="{start[0]:g}" cy="{start[1]:g}" r="4" fill="{INK}"/>',
    ]
    return svg(880, 410, "An ID and the vectors of its codes", parts)


def beam(width: int = 2) -> str:
    ids = [(0, 1, 2), (0, 1, 7), (0, 4, 4), (0, 9, 0), (1, 3, 3), (1, 3, 5), (1, 6, 1), (1, 8, 2), (1, 8, 6)]
    random = np.random.default_rng(2)
    score: dict[tuple[int, ...], float] = {(): 1.0}
    kept: list[tuple[int, ...]] = [()]
    shown: set[tuple[int, ...]] = {()}
    for depth in (1, 2, 3):
        for prefix in kept:
            children = sorted({one[:depth] for one in ids if one[: depth - 1] == prefix})
            chances = random.dirichlet(np.full(len(children), 1.2))
            score |= {child: score[prefix] * chance for child, chance in zip(children, chances, strict=True)}
        kept = sorted((one for one in score if len(one) == depth), key=score.__getitem__)[::-1][:width]
        shown |= set(kept)
    places: dict[tuple[int, ...], tuple[float, float]] = {
        one: (80 + 90 * n, 285) for n, one in enumerate(ids)
    }
    for depth in (2, 1, 0):
        for prefix in sorted({one[:depth] for one in ids}):
            below = [places[one][0] for one in places if len(one) == depth + 1 and one[:depth] == prefix]
            places[prefix] = (sum(below) / len(below), 45 + 80 * depth)
    parts = []
    for one, (x, y) in places.items():
        if one:
            is_kept = one in shown
            parts.append(
                line(
                    *places[one[:-1]],
                    x,
                    y,
                    stroke=ACCENT if is_kept else PALE,
                    width=3 if is_kept else 1,
                    tip=False,
                )
            )
    for one, (x, y) in places.items():
        is_kept = one in shown
        fill = ACCENT if is_kept else PALE
        parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="15" fill="{fill if is_kept else PAPER}" stroke="{fill}" stroke-width="2"/>'
        )
        parts.append(text(x, y + 5, one[-1] if one else "", fill=PAPER if is_kept else INK, bold=is_kept))
        if one in score and one:
            parts.append(text(x + 33, y + 5, f"{score[one]:.2f}", fill=INK, size=12))
    parts += [
        text(
            440,
            335,
            "Numbers are the probabilities of prefixes. At each level the two best are kept (blue), and only their children are scored.",
            size=13,
        ),
    ]
    return svg(880, 350, f"Beam search of width {width} in a tree of IDs", parts)


DRAWINGS = {"four-steps.svg": four_steps, "id.svg": anatomy, "beam.svg": beam}


def main(folder: Path) -> None:
    for name, draw in DRAWINGS.items():
        (folder / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures"))
