"""Fixed descriptions of images by edges and colours: what the small encoder reads instead of pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

SIDE: Final = 64
"""Images are squeezed to this many pixels a side before they are described."""
ORIENTATIONS: Final = 9
"""Directions an edge can run in, over half a turn."""
_COLOUR_BITS: Final = 2  # of red, green and blue each, in the colour histogram
_GRIDS: Final = (8, 4)
_BLUR: Final = 7  # pixels of the box that blurs, twice; stripes and dots vanish and outlines stay
_THUMBNAIL: Final = 8
_MARGIN: Final = SIDE // 8
_BATCH: Final = 16  # few enough that the steps between stay in a core's cache

DESCRIPTOR_SIZE: Final = (
    sum(grid * grid * ORIENTATIONS for grid in _GRIDS) + _THUMBNAIL * _THUMBNAIL * 3 + 2 * 8**_COLOUR_BITS
)
"""Numbers per image, without outlines."""
OUTLINE_SIZE: Final = _GRIDS[0] ** 2 * ORIENTATIONS
"""Numbers per image that describe its outlines."""
CELLS: Final = _GRIDS[-1] ** 2
"""Cells of the coarser grid; each is a token of feature fusion, as a patch is of a ViT."""
CELL_SIZE: Final = (DESCRIPTOR_SIZE - 2 * 8**_COLOUR_BITS) // CELLS
"""Numbers per cell, without outlines: all but the histograms, which describe the whole image."""


def descriptor_size(*, outlines: bool) -> int:
    """Return how many numbers describe an image."""
    return DESCRIPTOR_SIZE + outlines * OUTLINE_SIZE


def describe(images: Sequence[Image.Image], *, outlines: bool = False) -> Float[Tensor, "items pixels"]:
    """Describe images by their edges and colours; each part has a root mean square near 1.

    Parameters
    ----------
    outlines
        describe the edges of the blurred image too. Without its stripes and dots, the shape is clearer.
    """
    if not images:
        return torch.zeros(0, descriptor_size(outlines=outlines))
    return torch.cat(
        [
            _describe_batch(images[start : start + _BATCH], outlines=outlines)
            for start in range(0, len(images), _BATCH)
        ]
    )


def cells(descriptors: Float[Tensor, "items pixels"]) -> Float[Tensor, "items cells numbers"]:
    """Split descriptions by cell, row by row, leaving out the histograms.

    A cell has the edges of its four quarters and its own, its four spots of the thumbnail, and, if they are
    described, the outlines of its quarters.
    """
    fine, coarse = _GRIDS
    sizes = [ORIENTATIONS * fine * fine, ORIENTATIONS * coarse * coarse, 3 * _THUMBNAIL * _THUMBNAIL]
    parts = [*descriptors[:, : sum(sizes)].split(sizes, dim=1)]
    sides = [fine, coarse, _THUMBNAIL]
    if descriptors.shape[1] > DESCRIPTOR_SIZE:
        parts.append(descriptors[:, DESCRIPTOR_SIZE:])
        sides.append(fine)
    return torch.cat(
        [
            planes.view(len(planes), -1, coarse, side // coarse, coarse, side // coarse)
            .permute(0, 2, 4, 1, 3, 5)
            .reshape(len(planes), CELLS, -1)
            for planes, side in zip(parts, sides, strict=True)
        ],
        dim=2,
    )


def _describe_batch(images: Sequence[Image.Image], *, outlines: bool) -> Float[Tensor, "items pixels"]:
    squares = [
        rgb
        if rgb.size == (SIDE, SIDE)
        else rgb.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)
        for rgb in (image if image.mode == "RGB" else image.convert("RGB") for image in images)
    ]
    stacked = torch.from_numpy(np.stack([np.asarray(square, dtype=np.uint8) for square in squares]))
    colours = stacked.permute(0, 3, 1, 2).contiguous().float().div_(255)
    thumbnail = F.avg_pool2d(colours, SIDE // _THUMBNAIL).flatten(1).sub_(0.5).mul_(3)
    parts = [*_edges(colours, _GRIDS), thumbnail, *_histograms(stacked)]
    if outlines:
        for _ in range(2):
            colours = F.avg_pool2d(colours, _BLUR, 1, _BLUR // 2, count_include_pad=False)
        parts += _edges(colours, _GRIDS[:1])
    return torch.cat(parts, dim=1)


def _edges(
    colours: Float[Tensor, "items 3 side side"], grids: Sequence[int]
) -> list[Float[Tensor, "items _"]]:
    """Return histograms of edge directions in the overlapping cells of each grid.

    The slopes of the three colours are combined by their structure tensor (Di Zenzo, 1986), so that red on
    green of the same brightness has an edge. Its angle covers half a turn: an edge from dark to bright and
    one from bright to dark run the same way.
    """
    items = len(colours)
    # Central differences; the outermost pixels have no edge.
    across = colours[:, :, 1:-1, 2:] - colours[:, :, 1:-1, :-2]
    down = colours[:, :, 2:, 1:-1] - colours[:, :, :-2, 1:-1]
    mixed = (across * down).sum(dim=1).flatten(1).mul_(2)
    level, steep = across.square_().sum(dim=1).flatten(1), down.square_().sum(dim=1).flatten(1)
    strength = (level + steep).sqrt_()
    # From [-pi, pi] to [0, ORIENTATIONS]; the two ends are one direction.
    position = torch.atan2(mixed, level.sub_(steep)).mul_(ORIENTATIONS / (2 * math.pi)).add_(ORIENTATIONS / 2)
    lower = position.floor().clamp_(max=ORIENTATIONS - 1)
    upper_share = position.sub_(lower).mul_(strength)
    bins = lower.long()
    planes_of_bins = ORIENTATIONS + 1  # the last plane is the first one again
    fine = 16  # cells of 4 pixels, pooled below into larger ones that overlap
    rows = torch.arange(1, SIDE - 1) * fine // SIDE
    bins += ((rows[:, None] * fine + rows[None, :]) * planes_of_bins).flatten()
    counts = torch.zeros(items, fine * fine * planes_of_bins)
    counts.scatter_add_(1, bins, strength - upper_share)
    counts.scatter_add_(1, bins + 1, upper_share)
    planes = counts.view(items, fine, fine, planes_of_bins).permute(0, 3, 1, 2)
    planes[:, 0] += planes[:, -1]
    planes = planes[:, :-1].contiguous()
    histograms = []
    for grid in grids:
        stride = fine // grid
        pooled = F.avg_pool2d(planes, 2 * stride - 1, stride, padding=(2 * stride - 2) // 2)
        # Square roots, then one scale for the whole image: faint images look like strong ones.
        rooted = pooled.flatten(1).sqrt()
        histograms.append(rooted / (rooted.square().mean(dim=1, keepdim=True) + 1e-4).sqrt())
    return histograms


def _histograms(levels: UInt8[Tensor, "items side side 3"]) -> list[Float[Tensor, "items _"]]:
    """Return how much of each colour is in the middle and in the margin."""
    red, green, blue = (levels >> 8 - _COLOUR_BITS).unbind(dim=3)
    code = ((red << 2 * _COLOUR_BITS) | (green << _COLOUR_BITS) | blue).long()
    in_margin = torch.ones(SIDE, SIDE, dtype=torch.long)
    in_margin[_MARGIN:-_MARGIN, _MARGIN:-_MARGIN] = 0
    bins = 8**_COLOUR_BITS
    counts = torch.zeros(len(levels), 2 * bins)
    counts.scatter_add_(1, (code + in_margin * bins).flatten(1), torch.ones(len(levels), SIDE * SIDE))
    return [
        (half / half.sum(dim=1, keepdim=True)).sqrt() * math.sqrt(bins)
        for half in torch.split(counts, bins, dim=1)
    ]
