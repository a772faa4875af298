"""Run a model on mteb's retrieval tasks: search by IDs, or exact search, by mteb's protocol.

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
from genius_search.index.build import arrays_of_features
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
RAW_METHODS: Final = frozenset({"generative+raw", "exact-raw"})
"""Methods that need raw embeddings of candidates."""
FUSED_METHODS: Final = frozenset({"generative+embeddings", "exact-fused"})
"""Methods that need fused embeddings of candidates."""
BATCH: Final = 32
"""Default ``batch_size``."""
SEARCH: Final = replace(PAPER_SEARCH, density_weight=DENSITY_WEIGHT)
"""Search settings that the options of :class:`MtebModel` change."""

logger = logging.getLogger(__name__)


class Content(NamedTuple):
    """A candidate or a query."""

    id: str
    image: Image.Image | None
    """Decoded, RGB."""
    text: str
    """Title and body, or an empty string."""
    instruction: str | None
    """Instruction in the row of the query."""

    @property
    def is_empty(self) -> bool:
        """Whether the content has neither text nor image."""
        return self.image is None and not self.text

    @property
    def modality(self) -> Modality:
        """Modality of the content, which must not be empty."""
        return Modality.of(has_image=self.image is not None, has_text=bool(self.text))


def read_columns(data: Any, modalities: Sequence[str], batch_size: int) -> Iterator[list[Content]]:
    """Read a ``datasets.Dataset`` in batches, so that few pictures are decoded at once.

    A column may be absent, or empty in some or all rows (mteb issues #4436, #4440). A text is in
    ``text`` or ``body``, with or without a ``title``. Only columns of the task's ``modalities`` are
    read.

    Raises
    ------
    BadData
        There is no ``id``, or a text or a picture has an unexpected type.
    """
    columns = {"text": ["title", "text", "body"], "image": ["image"]}
    names = ["id", "instruction"]
    for modality in modalities:
        names += columns.get(modality, [])
    if "id" not in data.column_names:
        raise BadData(f"the columns are {', '.join(data.column_names)}; expected one called id")
    selected = data.select_columns([name for name in names if name in data.column_names])
    for batch in selected.iter(batch_size):
        yield [
            _read_content(dict(zip(batch, row, strict=True)))
            for row in zip(*batch.values(), strict=True)
        ]


def _read_content(row: Mapping[str, Any]) -> Content:
    image = row.get("image")
    if image is not None and not isinstance(image, Image.Image):
        raise BadData(
            f"{row['id']}: the image is a {type(image).__name__}, expected a decoded picture"
        )
    body = row.get("text") or row.get("body") or ""
    if not isinstance(body, str):
        raise BadData(
            f"{row['id']}: the text is a {type(body).__name__}; conversations are not supported"
        )
    return Content(
        id=str(row["id"]),
        image=None if image is None else image.convert("RGB"),
        text=f"{row.get('title') or ''} {body}".strip(),
        instruction=row.get("instruction") or None,
    )


class MemoryPool(PoolCandidates):
    """Candidates in memory, with mteb's ids and the method's embeddings, fused or raw."""

    def __init__(self, arrays: ItemArrays, ids: Sequence[str]) -> None:
        self._arrays, self._ids = arrays, ids
        self._rows = np.arange(len(ids))

    def did(self, item: int) -> str:
        """Return the id of the candidate at a position of the pool."""
        return self._ids[item]

    def raw(self, positions: slice | np.ndarray) -> Float[Tensor, "items dim"]:
        """Return the stored embeddings, which are raw ones."""
        return self.fused(positions)


class MtebModel:
    """A searcher for mteb.

    The corpus is read in batches and stored as IDs; pictures are dropped after their batch. The
    modality of the results follows from the instruction alone, as in the paper. A query has the
    instruction of its row, else the task's prompt, else the model's instruction.

    A candidate without text and image is left out, and a query without them finds nothing; both are
    logged. A beam finds fewer hits than mteb requests (1,000).

    Parameters
    ----------
    model
        a model, or the folder of one.
    method
        a method of ``genius evaluate``. Methods with embeddings (fused or raw) store two bytes per
        number of each candidate in memory.
    search
        options that change :data:`SEARCH`: the beam and the normalisation of its scores; ``method``
        decides how hits are ranked.

    Raises
    ------
    UsageError
        The method is unknown, or ``search`` ranks hits in another way.
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
                f"search.rerank is {config.rerank!r}, but the method decides how hits are ranked: "
                f"use method='generative+{config.rerank}'"
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

        Raises
        ------
        BadData
            An id occurs twice, or no candidate has a text or an image.
        """
        from mteb.types import PromptType  # noqa: PLC0415

        ids: list[str] = []
        num_empty = 0
        modalities: list[Modality] = []
        encoded: list[ItemArrays] = []
        stored: StoredEmbeddings = "none"
        if self.method in RAW_METHODS:
            stored = "raw"
        elif self.method in FUSED_METHODS:
            stored = "fused"
        columns = task_metadata.get_modalities(PromptType.document)
        for batch in read_columns(corpus, columns, encode_kwargs.get("batch_size", BATCH)):
            contents = [content for content in batch if not content.is_empty]
            num_empty += len(batch) - len(contents)
            if not contents:
                continue
            features = self._encode_features(
                [(content.image, format_text(content.text) or "") for content in contents]
            )
            batch_modalities = [content.modality for content in contents]
            codes = np.array([modality.code for modality in batch_modalities], dtype=np.int8)
            encoded.append(arrays_of_features(self.model, features, codes, embeddings=stored))
            ids += [content.id for content in contents]
            modalities += batch_modalities
        if not ids:
            raise BadData(f"none of {num_empty} candidates has a text or an image")
        repeated = [did for did, count in Counter(ids).items() if count > 1]
        if repeated:
            raise BadData(
                f"{len(repeated)} ids occur twice in the corpus: {format_first_ids(repeated)}"
            )
        if num_empty:
            logger.warning(
                "%d of %d candidates have neither text nor image and cannot be found",
                num_empty,
                len(corpus),
            )
        self._modality = max(Modality, key=modalities.count)
        arrays = {}
        for name, array in encoded[0]._asdict().items():
            if isinstance(array, np.ndarray):
                arrays[name] = np.concatenate([getattr(batch, name) for batch in encoded])
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
        """Return query id -> candidate id -> score, best first; mteb calls :meth:`index` before."""
        from mteb.types import PromptType  # noqa: PLC0415

        if self._pool is None:
            raise UsageError("there is nothing to search yet: call index() first")
        results: dict[str, dict[str, float]] = {}
        prompt = task_metadata.prompt
        if isinstance(prompt, Mapping):
            prompt = prompt.get("query")
        columns = task_metadata.get_modalities(PromptType.query)
        for batch in read_columns(queries, columns, encode_kwargs.get("batch_size", BATCH)):
            results.update({content.id: {} for content in batch})
            contents = [content for content in batch if not content.is_empty]
            if not contents:
                continue
            features = self._encode_features(
                [(content.image, self._format_query(content, prompt)) for content in contents]
            )
            row_queries = RowQueries(
                [content.id for content in contents],
                torch.from_numpy(normalize(features.total())),
                torch.from_numpy(self.model.embed_features(features)),
            )
            ((method_hits,),) = find(
                self.model, [row_queries], self._pool, [self.method], self._config, depth=top_k
            )
            for qid, hits in zip(row_queries.qids, method_hits.hits, strict=True):
                # Strictly decreasing scores, so that sorting by score does not change the order.
                scores = strictly_decreasing([hit.score for hit in hits]).tolist()
                dids = [hit.did for hit in hits]
                results[qid] = dict(zip(dids, scores, strict=True))
        num_empty = sum(not hits for hits in results.values())
        if num_empty:
            logger.warning(
                "%d of %d queries have no hits (no content, or no candidates)",
                num_empty,
                len(results),
            )
        return results

    def _format_query(self, query: Content, prompt: str | None) -> str:
        """Return the encoder's input: instruction, blank, and the query's text (UniIR's format)."""
        default = self.model.instruction_for(query.modality, self._modality)
        return instructed(query.instruction or prompt or default, query.text)

    def _encode_features(self, contents: Sequence[tuple[Image.Image | None, str]]) -> FeatureBatch:
        image, text = encode_contents(self.model.encoder, contents, QUERY_KEY)
        return FeatureBatch(
            image,
            text,
            np.array([image is not None for image, _ in contents]),
            np.array([bool(text) for _, text in contents]),
        )
