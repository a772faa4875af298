"""The ways of searching that ``genius bench quality`` compares.

Most of them first find prefixes (a beam) and then order the items under these; the same beams are ordered in
several ways. The others answer in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

from genius.baselines.routing import CodeRouter
from genius.bench.quality_ground import Batch, Ground
from genius.config import SearchConfig
from genius.search.beam import Beams, search
from genius.search.decoding import Decoding
from genius.search.exact import exact_search, less, with_one
from genius.search.whole import everything

HITS: Final = 10
"""Asked of every method."""
PAPER_BEAM: Final = 50
"""IDs that the paper keeps at each level."""
EXACT_FUSED: Final = "exact-fused"
"""What the others' recall is compared with."""
EXACT_FUSED_HUBNESS: Final = "exact-fused+hubness"
"""The same, less the share of density that our own orders take from a score."""
GENERATOR, GEOMETRY, ONE_LEVEL = "generator", "geometry", "geometry, one level"
ORDERS: Final = {"none": "alone", "codes": "+ codes", "embeddings": "+ embeddings"}
LINES: Final = {
    (GENERATOR, "none"): "ours, by probability",
    (GENERATOR, "codes"): "ours, by codes",
    (GENERATOR, "embeddings"): "ours, by vectors",
    (GEOMETRY, "codes"): "nearest code vectors, by codes",
    (GEOMETRY, "embeddings"): "nearest code vectors, by vectors",
}
"""What they are called in drawings."""

Route = Callable[[Float[Tensor, "queries dim"]], Beams]
Rows = list[Int64[np.ndarray, " _"]]
"""Item rows of each query, best first."""


class Routed(NamedTuple):
    """A way of getting at candidates, and ways of ordering them."""

    name: str
    router: str
    """:data:`GENERATOR` or one of the others; empty where nothing routes."""
    beam: int
    leaves: int
    route: Route
    orders: tuple[SearchConfig, ...]

    def called(self, order: SearchConfig) -> str:
        """The name of one of them."""
        mixed = f" + {order.mix:g} log p" if order.mix else ""
        return f"{self.name} {ORDERS[order.rerank]}{mixed}" if self.router else self.name


class Answered(NamedTuple):
    """What a way without beams found."""

    items: Rows
    touched: int
    """Candidates that were compared, of all queries together."""


class Direct(NamedTuple):
    """A way that answers in one go."""

    name: str
    line: str
    """Its name in drawings."""
    find: Callable[[Batch], Answered]
    code_bytes: float
    """Of an item, as short as it can be written."""
    stored_bytes: float
    """Of an item, as it is kept."""
    lists: int = 0
    """Of faiss, looked through."""


def direct(ground: Ground) -> list[Direct]:
    """Exact search over whole vectors; with a byte more each, less what crowded places cost."""
    uncrowded = less(ground.fused, np.float32(SearchConfig().hubness) * ground.densities)

    def exact(name: str, vectors: Tensor, queries: Callable[[Batch], Tensor], more: int = 0) -> Direct:
        size = ground.vector_bytes + more

        def find(batch: Batch) -> Answered:
            found = exact_search(queries(batch), vectors.__getitem__, len(ground), k=HITS)
            return Answered(list(found.items), len(ground) * len(found.items))

        return Direct(name, "exact search", find, size, size)

    return [
        exact("exact-raw", ground.raw, lambda batch: batch.raw),
        exact(EXACT_FUSED, ground.fused, lambda batch: batch.fused),
        exact(EXACT_FUSED_HUBNESS, uncrowded, lambda batch: with_one(batch.fused), more=1),
    ]


def routed(ground: Ground, *, beam: int, leaves: int, mix: float) -> Iterator[Routed]:
    """Everything by codes, the paper's full-depth search, and routing within a leaf budget."""
    codes, embeddings = SearchConfig(rerank="codes"), SearchConfig(rerank="embeddings")
    mixed = (SearchConfig(rerank="codes", mix=mix),) if mix else ()
    yield Routed("exact-codes", "", 0, 0, lambda queries: everything(ground.parts, len(queries)), (codes,))
    yield Routed(
        f"{GENERATOR}, beam {PAPER_BEAM}, all levels",
        GENERATOR,
        PAPER_BEAM,
        0,
        by_beam(ground, ground.model.decoder, beam=PAPER_BEAM, leaves=0, is_ordered=False),
        (SearchConfig(rerank="none"), codes, embeddings),
    )
    routers: dict[str, Decoding] = {GENERATOR: ground.model.decoder, GEOMETRY: ground.model.router}
    for router, decoder in routers.items():
        yield Routed(
            f"{router}, beam {beam}, {leaves:,} leaves",
            router,
            beam,
            leaves,
            by_beam(ground, decoder, beam=beam, leaves=leaves),
            (codes, *(mixed if router == GENERATOR else ()), embeddings),
        )
    one_level = CodeRouter(
        ground.parts,
        ground.model.quantizer.tables(),
        has_modality_level=ground.model.quantizer.has_modality_level,
    )
    yield Routed(
        f"{ONE_LEVEL}, {leaves:,} leaves",
        ONE_LEVEL,
        0,
        leaves,
        lambda queries: filled(one_level.route(queries, beam=leaves), leaves),
        (codes, embeddings),
    )


def by_beam(ground: Ground, decoder: Decoding, *, beam: int, leaves: int, is_ordered: bool = True) -> Route:
    """Beam search, until few enough leaves are left or, with 0, the IDs are settled.

    Parameters
    ----------
    is_ordered
        whether something orders the items afterwards; without, every level of every ID is scored.
    """
    config = SearchConfig(beam=beam, leaves=leaves, rerank="codes" if is_ordered else "none")
    return lambda queries: search(decoder, ground.parts, queries, config)


def filled(beams: Beams, leaves: int) -> Beams:
    """The best prefixes, as many as hold so many IDs; of the last one only the IDs that come first.

    For one part: leaves are cut in the order of its table.
    """
    sizes = (beams.high - beams.low)[:, :, 0]
    before = sizes.cumsum(axis=1) - sizes
    kept = np.minimum(sizes, np.maximum(leaves - before, 0))
    history = np.where((kept > 0)[..., None], beams.log_probabilities, np.float32(-np.inf))
    return Beams(beams.low, beams.low + kept[..., None], history)
