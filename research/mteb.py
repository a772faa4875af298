"""Run a model on mteb's retrieval tasks: search by IDs, or exact search, in mteb's protocol.

>>> import mteb  # doctest: +SKIP
>>> from research.mteb import MtebModel  # doctest: +SKIP
>>> mteb.evaluate(MtebModel("model"), mteb.get_tasks(tasks=["CIRRIT2IRetrieval"]))  # doctest: +SKIP
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from genius_search.config import DENSITY_WEIGHT, PAPER_SEARCH, SearchConfig
from genius_search.data.features import FeatureBatch
from genius_search.encoders.contents import encode_contents
from genius_search.errors import BadData, UsageError
from genius_search.index.build import encode_batch
from genius_search.index.encode import QUERY_KEY
from genius_search.index.evaluate import format_first_ids
from genius_search.index.store import StoredEmbeddings
from genius_search.index.writer import ItemArrays
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize
from genius_search.records import Modality, format_text, instructed
from research.methods import PoolCandidates, RowQueries, find
from research.runs import strictly_decreasing

Method = Literal[
    "generative",
    "generative+codes",
    "generative+embeddings",
    "generative+raw",
    "exact-fused",
    "exact-raw",
]
RAW: Final = frozenset({"generative+raw", "exact-raw"})
FUSED: Final = frozenset({"generative+embeddings", "exact-fused"})
BATCH: Final = 32
"""Default ``batch_size``."""
SEARCH: Final = replace(PAPER_SEARCH, density_weight=DENSITY_WEIGHT)
"""The search that the options of :class:`MtebModel` change."""

logger = logging.getLogger(__name__)


class Content(NamedTuple):
    """A candidate or a query."""

    id: str
    image: Image.Image | None
    """Decoded, RGB."""
    text: str
    """Title and body, or an empty string."""
    instruction: str | None
    """The query's own instruction."""

    @property
    def is_empty(self) -> bool:
        """True if there is neither text nor image."""
        return self.image is None and not self.text

    @property
    def modality(self) -> Modality:
        """The modality; an error if the content is empty."""
        return Modality.of(has_image=self.image is not None, has_text=bool(self.text))


def read_columns(data: Any, modalities: Sequence[str], batch_size: int) -> Iterator[list[Content]]:
    """Read a ``datasets.Dataset`` in batches, so that few pictures are decoded at once.

    Columns differ: one may be absent or empty, by row or entirely (mteb issues #4436, #4440); a text is in
    ``text`` or ``body``, with or without a ``title``. Columns of other ``modalities`` than the task's are not
    read.

    Raises BadData: there is no ``id``, or a row has a text or a picture of another type.
    """
    columns = {"text": ["title", "text", "body"], "image": ["image"]}
    wanted = [
        "id",
        "instruction",
        *(name for modality in modalities for name in columns.get(modality, ())),
    ]
    if "id" not in data.column_names:
        raise BadData(f"the columns are {', '.join(data.column_names)}; expected one called id")
    chosen = data.select_columns([name for name in wanted if name in data.column_names])
    for batch in chosen.iter(batch_size):
        yield [
            _content(dict(zip(batch, row, strict=True)))
            for row in zip(*batch.values(), strict=True)
        ]


def _content(row: Mapping[str, Any]) -> Content:
    image = row.get("image")
    if image is not None and not isinstance(image, Image.Image):
        raise BadData(
            f"{row['id']}: its image is a {type(image).__name__}, expected a decoded picture"
        )
    body = row.get("text") or row.get("body") or ""
    if not isinstance(body, str):
        raise BadData(
            f"{row['id']}: its text is a {type(body).__name__}; conversations are not supported"
        )
    return Content(
        id=str(row["id"]),
        image=None if image is None else image.convert("RGB"),
        text=f"{row.get('title') or ''} {body}".strip(),
        instruction=row.get("instruction") or None,
    )


class MemoryPool(PoolCandidates):
    """Candidates in memory under mteb's ids; the embeddings that a method needs are fused or raw ones."""

    def __init__(self, arrays: ItemArrays, ids: Sequence[str]) -> None:
        self._arrays, self._ids = arrays, ids
        self._rows = np.arange(len(ids))

    def did(self, item: int) -> str:
        """Return the id of the candidate at a place of the pool."""
        return self._ids[item]

    def raw(self, places: slice | np.ndarray) -> Float[Tensor, "items dim"]:
        """Return the embeddings that were kept."""
        return self.fused(places)


class MtebModel:
    """A searcher for mteb.

    The corpus is read in batches and kept as IDs; no picture outlives its batch. The modality of the results
    follows from the instruction alone, as in the paper. A candidate without text and image is left out, and
    a query without either finds nothing; both are logged. A beam finds fewer hits than mteb requests (1,000);
    the rest count as not found. A query's instruction is its own, else the task's prompt, else the model's.

    Raises UsageError: the method is unknown.

    Parameters
    ----------
    model
        A model, or the folder of one.
    method
        A method of ``genius evaluate``. Methods with embeddings (fused or raw) keep two bytes per number
        of each candidate in memory.
    search
        Options that change :data:`SEARCH`: the beam and the normalisation of its scores; ``method`` decides
        how hits are ranked.
    """

    def __init__(
        self,
        model: str | Path | Genius,
        *,
        method: Method = "generative",
        search: SearchConfig | None = None,
    ) -> None:
        if method not in get_args(Method):
            raise UsageError(f"{method!r} is not one of {', '.join(get_args(Method))}")
        config = SEARCH.with_options(search or SearchConfig())
        if config.rerank != "none":
            raise UsageError(
                f"search.rerank is {config.rerank!r}, but the method decides how hits are ranked: use "
                f"method='generative+{config.rerank}'"
            )
        self.model = model if isinstance(model, Genius) else Genius.open(model)
        self.method = method
        self.name = f"genius/{self.model.folder.resolve().name}"
        self._config = config
        self._pool: MemoryPool | None = None
        self._modality = Modality.IMAGE

    @property
    def mteb_model_meta(self) -> Any:
        """The model's name, fingerprint, modalities and settings."""
        from mteb.models import ModelMeta  # noqa: PLC0415  seconds to import, and optional

        reads_texts_only = self.model.encoder.spec.startswith("text:")
        return ModelMeta.create_empty(
            {
                "name": self.name,
                "revision": self.model.fingerprint[:12],
                "modalities": ["text"] if reads_texts_only else ["text", "image"],
                "framework": ["PyTorch"],
                "use_instructions": True,
                "experiment_kwargs": {**asdict(self._config), "method": self.method},
            }
        )

    def index(
        self, corpus: Any, *, task_metadata: Any, encode_kwargs: Mapping[str, Any], **_: Any
    ) -> None:
        """Encode a corpus to IDs; called by mteb.

        Raises BadData: an id occurs twice, or no candidate has any content.
        """
        from mteb.types import PromptType  # noqa: PLC0415

        ids: list[str] = []
        left_out: list[str] = []
        modalities: list[Modality] = []
        encoded: list[ItemArrays] = []
        stored: StoredEmbeddings = (
            "raw" if self.method in RAW else "fused" if self.method in FUSED else "none"
        )
        columns = task_metadata.get_modalities(PromptType.document)
        for batch in read_columns(corpus, columns, encode_kwargs.get("batch_size", BATCH)):
            left_out += [one.id for one in batch if one.is_empty]
            contents = [one for one in batch if not one.is_empty]
            if not contents:
                continue
            features = self._features(
                [(one.image, format_text(one.text) or "") for one in contents]
            )
            kinds = [one.modality for one in contents]
            codes = np.array([kind.code for kind in kinds], dtype=np.int8)
            encoded.append(encode_batch(self.model, features, codes, embeddings=stored))
            ids += [one.id for one in contents]
            modalities += kinds
        if not ids:
            raise BadData(f"no candidate has any content (out of {len(left_out)})")
        twice = [did for did, count in Counter(ids).items() if count > 1]
        if twice:
            raise BadData(f"{len(twice)} ids occur twice in the corpus: {format_first_ids(twice)}")
        if left_out:
            logger.warning(
                "%d of %d candidates have neither text nor image and cannot be found",
                len(left_out),
                len(corpus),
            )
        self._modality = max(Modality, key=modalities.count)
        arrays = {
            name: np.concatenate([batch._asdict()[name] for batch in encoded])
            for name, array in encoded[0]._asdict().items()
            if isinstance(array, np.ndarray)
        }
        self._pool = MemoryPool(ItemArrays(**arrays), ids)

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        top_k: int,
        encode_kwargs: Mapping[str, Any],
        **_: Any,
    ) -> dict[str, dict[str, float]]:
        """Return query id -> candidate id -> score, best first; called by mteb after :meth:`index`."""
        from mteb.types import PromptType  # noqa: PLC0415

        if self._pool is None:
            raise UsageError("there is nothing to search yet: call index() first")
        found: dict[str, dict[str, float]] = {}
        prompt = task_metadata.prompt
        if isinstance(prompt, Mapping):
            prompt = prompt.get("query")
        columns = task_metadata.get_modalities(PromptType.query)
        for batch in read_columns(queries, columns, encode_kwargs.get("batch_size", BATCH)):
            found.update({one.id: {} for one in batch})
            contents = [one for one in batch if not one.is_empty]
            if not contents:
                continue
            features = self._features([(one.image, self._text(one, prompt)) for one in contents])
            vectors = normalize(features.total()), self.model.embed_features(features)
            asked = RowQueries([one.id for one in contents], *map(torch.from_numpy, vectors))
            ((ranked,),) = find(
                self.model, [asked], self._pool, [self.method], self._config, depth=top_k
            )
            for qid, hits in zip(asked.qids, ranked.hits, strict=True):
                # Strictly decreasing, so that sorting by score keeps the order.
                scores = strictly_decreasing([hit.score for hit in hits]).tolist()
                found[qid] = {hit.did: score for hit, score in zip(hits, scores, strict=True)}
        empty = sum(not hits for hits in found.values())
        if empty:
            logger.warning(
                "%d of %d queries found nothing (no content, or no candidates)", empty, len(found)
            )
        return found

    def _text(self, query: Content, prompt: str | None) -> str:
        """Return the encoder's input: the instruction, a blank, the query's text (UniIR's format)."""
        own = self.model.instruction_for(query.modality, self._modality)
        return instructed(query.instruction or prompt or own, query.text)

    def _features(self, contents: Sequence[tuple[Image.Image | None, str]]) -> FeatureBatch:
        image, text = encode_contents(self.model.encoder, contents, QUERY_KEY)
        return FeatureBatch(
            image,
            text,
            np.array([image is not None for image, _ in contents]),
            np.array([bool(text) for _, text in contents]),
        )
