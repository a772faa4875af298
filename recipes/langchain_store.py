"""An index of GENIUS as a vector store of LangChain (langchain-core 1): copy this class into your program.

>>> store = GeniusStore("texts.index", embedding)
>>> store.add_texts(["a red kite", "an anchor"], [{"page": 1}, {"page": 2}])
>>> store.similarity_search("something that flies", k=1, where=["page<3"])
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from genius_search import Index

METADATA = "metadata"
"""The field with all metadata as JSON. Each entry is also a field of its own, to filter by."""


class GeniusStore(VectorStore):
    """Texts with vectors of a LangChain embedding, in the folder of an index, which is made when it is needed.

    Searches take the options of :meth:`genius_search.Index.search`, such as ``where=["page<3"]``.
    """

    def __init__(self, folder: str | Path, embedding: Embeddings) -> None:
        self._folder = Path(folder)
        self._embedding = embedding
        self._index = Index.open(folder) if (self._folder / "index.json").exists() else None

    @property
    def embeddings(self) -> Embeddings:
        return self._embedding

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        folder: str | Path = "langchain.index",
        **_: Any,
    ) -> GeniusStore:
        store = cls(folder, embedding)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **_: Any,
    ) -> list[str]:
        texts = list(texts)
        names = [name or str(uuid.uuid4()) for name in ids or [None] * len(texts)]
        rows = {name: row for row, name in enumerate(names)}  # the last of an id counts
        if not rows:
            return names
        known = metadatas or [{}] * len(texts)
        vectors = np.array(self._embedding.embed_documents([texts[row] for row in rows.values()]))
        columns: dict[str, Any] = {
            "ids": [*rows],
            "texts": [texts[row] for row in rows.values()],
            "fields": [{**known[row], METADATA: json.dumps(known[row])} for row in rows.values()],
        }
        if self._index is None:
            self._index = Index.from_vectors(self._folder, vectors, **columns)
        else:
            self._index.add_vectors(vectors, **columns)
        return names

    def delete(self, ids: list[str] | None = None, **_: Any) -> bool | None:
        if self._index is not None:
            self._index.delete([item.id for item in self._index] if ids is None else ids)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        index = self._index
        return (
            [] if index is None else [_document(index.get(name)) for name in ids if name in index]
        )

    def similarity_search_with_score(
        self, query: str, k: int = 4, **options: Any
    ) -> list[tuple[Document, float]]:
        return self._search(self._embedding.embed_query(query), k, options)

    def similarity_search(self, query: str, k: int = 4, **options: Any) -> list[Document]:
        return [document for document, _ in self.similarity_search_with_score(query, k, **options)]

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, **options: Any
    ) -> list[Document]:
        return [document for document, _ in self._search(embedding, k, options)]

    def _search(
        self, vector: list[float], k: int, options: dict[str, Any]
    ) -> list[tuple[Document, float]]:
        hits = (
            []
            if self._index is None
            else self._index.search(vector=np.array(vector), k=k, **options)
        )
        return [(_document(hit), hit.score) for hit in hits]


def _document(item: Any) -> Document:
    return Document(
        id=item.id, page_content=item.text or "", metadata=json.loads(item.fields[METADATA])
    )
