"""Pictures of products."""

from __future__ import annotations

import numpy as np
import pytest

from research.synth.pictures import PIXELS, Pose, draw
from research.synth.world import VALUES, Product


@pytest.mark.parametrize("fill", ["outlined", "striped", "dotted", "checkered", "two-tone"])
def test_a_disc_has_an_edge_in_its_colour_with_every_fill(fill):
    number = {name: values.index for name, values in VALUES.items()}
    product = Product(
        number["shape"]("disc"),
        number["colour"]("black"),
        number["fill"](fill),
        number["background"]("white"),
        number["frame"]("none"),
    )
    picture = draw(product, Pose(7)).astype(float)  # not rotated, not shifted
    solid = draw(product._replace(fill=number["fill"]("solid")), Pose(7))
    rows, columns = np.nonzero(solid.mean(axis=2) < 128)
    centre, radius = (rows.mean(), columns.mean()), (np.ptp(rows) + 1) / 2
    y, x = np.mgrid[0:PIXELS, 0:PIXELS]
    angle = np.degrees(np.arctan2(y - centre[0], x - centre[1])) % 360
    is_rim = np.abs(np.hypot(y - centre[0], x - centre[1]) - radius) < 2.5
    darkest = [
        picture[is_rim & (angle >= start) & (angle < start + 10)].min()
        for start in range(0, 360, 10)
    ]
    assert max(darkest) < 150
