"""The candidates of an evaluation, encoded once on disk: the union of all pools, or each row's own.

No pool is held in memory. An evaluation of single rows in their local pools embeds these alone, and what it
embedded is there for the next; one in the global pool embeds everything, and serves the local pools too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int64

from genius.artifact import open_artifact
from genius.data import features as features_on_disk
from genius.data.features import Features
from genius.data.mbeir import EvaluationRow, MBeir, read_pool
from genius.data.records import Candidate, candidate_number, did_of
from genius.encoders.protocol import Encoder
from genius.errors import ArtifactError, BadData
from genius.evaluation.health import Health
from genius.model import Genius
from genius.search.segment import ItemArrays, StoredEmbeddings
from genius.stages.embed_records import count_lines, embed_pool, fingerprint_of_files
from genius.stages.encode import encode_features, examine_items
from genius.stages.methods import FUSED, PoolCandidates, PoolItems
from genius.stages.progress import Progress

Pool = Literal["local", "global"]
ALL: Final = "candidates"
"""Folder of the union's candidates; a local pool's has its name behind it."""


Candidates = TypeVar("Candidates", bound=PoolItems)


@dataclass(frozen=True, slots=True)  # beartype knows no generic named tuples
class _Opened(Generic[Candidates]):
    """Candidates that were embedded together, and how some of them become a pool."""

    features: Features
    rows: Callable[[Int64[np.ndarray, " items"]], Candidates]

    def part(self, pool: Iterable[Candidate]) -> Candidates:
        """A pool's candidates, in the pool's order."""
        numbers = np.fromiter((candidate_number(candidate.did) for candidate in pool), dtype=np.int64)
        order = np.argsort(self.features.ids, kind="stable")
        place = np.searchsorted(self.features.ids, numbers, sorter=order).clip(max=len(order) - 1)
        chosen = order[place]
        absent = numbers[self.features.ids[chosen] != numbers]
        if len(absent):
            raise BadData(
                f"{len(absent)} candidates of a pool were not embedded with the others, for example "
                f"{did_of(int(absent[0]))}; its file changed meanwhile: run the same again"
            )
        return self.rows(chosen)


class Pools(Generic[Candidates]):
    """Gives the pools of an evaluation; everything is embedded when it is made.

    Parameters
    ----------
    rows
        whose local pools are wanted.
    pools
        that will be evaluated: local ones alone, or the union of all.
    folder
        where features are kept, and found again.
    prepare
        embeds the candidates of some files into a folder.
    """

    def __init__(
        self,
        data: MBeir,
        rows: Sequence[EvaluationRow],
        folder: Path,
        *,
        split: str,
        pools: Sequence[Pool],
        prepare: Callable[[list[Path], Path], _Opened[Candidates]],
    ) -> None:
        union = data.global_pool(split)
        files = list(dict.fromkeys([*union, *data.local_pools_of(split)]))
        self._all = (
            prepare(files, folder / ALL) if "global" in pools or _is_there(folder / ALL, files) else None
        )
        own = dict.fromkeys(row.local_pool for row in rows) if self._all is None else {}
        self._own = {path: prepare([path], folder / _name_of(path)) for path in own}
        # The union's candidates come first, in its order.
        self._union_rows = np.arange(count_lines(union)) if len(union) == 1 else None

    def of(self, row: EvaluationRow, pool: Pool) -> Candidates:
        """A row's local pool, or the global one."""
        if self._all is None:
            own = self._own[row.local_pool]
            return own.rows(np.arange(len(own.features)))
        if pool == "local":
            return self._all.part(read_pool([row.local_pool]))
        everyone = np.arange(len(self._all.features)) if self._union_rows is None else self._union_rows
        return self._all.rows(everyone)


class EmbeddedPools(Pools[PoolItems]):
    """Pools of an encoder's features alone."""

    def __init__(
        self,
        data: MBeir,
        encoder: Encoder,
        rows: Sequence[EvaluationRow],
        folder: Path,
        *,
        split: str,
        pools: Sequence[Pool],
        progress: Progress,
    ) -> None:
        def prepare(chosen: list[Path], place: Path) -> _Opened[PoolItems]:
            features = embed_pool(data, chosen, encoder, place / "features", progress=progress)
            return _Opened(features, lambda rows: PoolItems(features, rows))

        super().__init__(data, rows, folder, split=split, pools=pools, prepare=prepare)


class EvaluationPools(Pools[PoolCandidates]):
    """Pools of a model: features and codes.

    Parameters
    ----------
    methods
        that will be evaluated; they decide what has to be kept of each candidate.
    """

    def __init__(
        self,
        data: MBeir,
        model: Genius,
        rows: Sequence[EvaluationRow],
        folder: Path,
        *,
        split: str,
        pools: Sequence[Pool],
        methods: Sequence[str],
        progress: Progress,
    ) -> None:
        self._model = model
        self._encoded: list[_Encoded] = []
        keep: StoredEmbeddings = "fused" if FUSED & set(methods) else "none"

        def prepare(chosen: list[Path], place: Path) -> _Opened[PoolCandidates]:
            features = embed_pool(data, chosen, model.encoder, place / "features", progress=progress)
            codes = place / f"codes-{keep}"
            arrays = encode_features(model, features, codes, embeddings=keep, progress=progress)
            self._encoded.append(_Encoded(features, arrays))
            return _Opened(features, lambda rows: PoolCandidates(features, arrays, rows))

        super().__init__(data, rows, folder, split=split, pools=pools, prepare=prepare)

    def health(self) -> Health:
        """Of the IDs of all candidates here."""
        return examine_items(self._model, self._encoded)


class _Encoded(NamedTuple):
    """Candidates with their features and codes."""

    features: Features
    arrays: ItemArrays


def _name_of(local_pool: Path) -> str:
    return f"{ALL}-{local_pool.stem.removeprefix('mbeir_').removesuffix('_cand_pool')}"


def _is_there(place: Path, files: Sequence[Path]) -> bool:
    """Whether all candidates of these files were embedded before."""
    try:
        manifest = open_artifact(place / "features", kind=features_on_disk.KIND)
    except ArtifactError:
        return False
    return manifest.inputs.get("records") == fingerprint_of_files(files)
