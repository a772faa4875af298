"""Choose the default settings of an index's searches, and apply the options of a search to them."""

from __future__ import annotations

import dataclasses
import math

from genius_search.config import (
    SearchConfig,
    SearchSettings,
    default_cell_search,
    default_search,
    routed_by_generator,
)
from genius_search.errors import UsageError
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import Measured
from genius_search.model import Genius


def default_settings(model: Genius, snapshot: Snapshot) -> SearchSettings:
    """Return the default settings of an index; see :attr:`~genius_search.Index.settings`."""
    manifest = snapshot.manifest
    has_fine_codes = manifest.fine_codes > 0
    settings = (default_cell_search if has_fine_codes else default_search)(snapshot.num_rows)
    weight = manifest.density_weight
    if manifest.measured is not None:
        shortlist = grow_shortlist(manifest.measured, snapshot.num_rows)
        margin = manifest.measured.margin
        settings = dataclasses.replace(
            settings, shortlist=shortlist, margin=settings.margin if margin is None else margin
        )
        if weight is None:  # otherwise calibration or training chose it
            weight = manifest.measured.density_weight
    if weight is not None:
        settings = dataclasses.replace(settings, density_weight=weight)
    if manifest.embeddings == "fused" and (manifest.has_own_model or not model.has_generator):
        settings = dataclasses.replace(settings, rerank="embeddings")
    return settings


def grow_shortlist(measured: Measured, num_rows: int) -> int:
    """Return the measured shortlist, in proportion to the growth of the index since then."""
    return math.ceil(measured.shortlist * max(1.0, num_rows / measured.items))


def adjust_settings(
    defaults: SearchSettings, model: Genius, config: SearchConfig
) -> SearchSettings:
    """Return an index's settings with the options of a search.

    If the generator leads the search, the default number of candidates is smaller.

    Raises
    ------
    UsageError
        An option is out of range, the model has no generator to lead the search or to order its
        hits, or the order of the hits needs the generator while ``router="geometry"`` excludes it.
    """
    if config.router == "generator":
        defaults = routed_by_generator(defaults)
    settings = defaults.with_options(config)
    for name, value in (("router", "generator"), ("rerank", "none")):
        if getattr(settings, name) == value and not model.has_generator:
            raise UsageError(
                f"{name}: this model has no generator, which {value!r} needs; leave {name} out, or "
                "`genius fit` trains one"
            )
    # In complete settings, no option is meant to exclude another.
    is_complete = isinstance(config, SearchSettings)
    if config.router == "geometry" and settings.rerank == "none" and not is_complete:
        raise UsageError(
            "router: geometry does without the generator, whose log-probabilities are the scores "
            "without re-ranking (rerank none)"
        )
    return settings
