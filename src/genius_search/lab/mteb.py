"""Run a model on mteb's retrieval tasks: search by IDs, or its exact rivals, in mteb's protocol.

>>> import mteb  # doctest: +SKIP
>>> from genius_search.lab.mteb import MtebModel  # doctest: +SKIP
>>> mteb.evaluate(MtebModel("model"), mteb.get_tasks(tasks=["CIRRIT2IRetrieval"]))  # doctest: +SKIP
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float, Float16, Float32, Int, Int16, Int64, UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import SearchConfig, checked
from genius_search.data.features import ABSENT, FeatureBatch
from genius_search.embed import is_joint
from genius_search.encoders.base import ImageInput, ItemKey, JointInput, TextInput
from genius_search.errors import BadData, MissingExtra, UsageError
from genius_search.lab.methods import BEAM_METHODS
from genius_search.lab.runs import falling, some
from genius_search.model import Genius
from genius_search.nn.density import NUM_EXTRA_COLUMNS
from genius_search.records import Modality, format_text, instructed
from genius_search.search.beam import search as beam_search
from genius_search.search.rank import Evidence, exact_search, rank_items
from genius_search.search.table import IdTable, Part


class Content(NamedTuple):
    """One row: a candidate or a query."""

    id: str
    image: Image.Image | None
    """Decoded, RGB."""
    text: str
    """Title and body; empty where there is none."""
    instruction: str | None
    """A query's own."""

    @property
    def is_empty(self) -> bool:
        """Whether there is neither text nor image."""
        return self.image is None and not self.text

    @property
    def modality(self) -> Modality:
        """What it is made of; an empty row is an error."""
        return Modality.of(has_image=self.image is not None, has_text=bool(self.text))


def read_columns(data: Any, modalities: Sequence[str], batch_size: int) -> Iterator[list[Content]]:
    """Rows of a ``datasets.Dataset``, so many at a time; only that many pictures are decoded at once.

    Columns differ: one may be absent, or there and empty, row by row or whole (mteb issues #4436, #4440); a
    text is in ``text`` or ``body``, with or without a ``title``. Columns of other ``modalities`` than the
    task's are passed over.

    Raises
    ------
    BadData
        there is no ``id``, or a row holds something else than a text and a decoded picture.
    """
    wanted = ["id", "instruction"]
    wanted += ["title", "text", "body"] if "text" in modalities else []
    wanted += ["image"] if "image" in modalities else []
    present = [name for name in wanted if name in data.column_names]
    if "id" not in present:
        raise BadData(f"the columns are {', '.join(data.column_names)}; expected one called id")
    chosen = data.select_columns(present)
    for start in range(0, len(chosen), batch_size):
        columns: Mapping[str, Sequence[Any]] = chosen[start : start + batch_size]
        rows = zip(*(columns[name] for name in present), strict=True)
        yield [_content(dict(zip(present, row, strict=True))) for row in rows]


def _content(row: Mapping[str, Any]) -> Content:
    image = row.get("image")
    if image is not None and not isinstance(image, Image.Image):
        raise BadData(f"{row['id']}: its image is a {type(image).__name__}, expected a decoded picture")
    body = row.get("text") or row.get("body") or ""
    if not isinstance(body, str):
        raise BadData(f"{row['id']}: its text is a {type(body).__name__}; conversations are not searched")
    return Content(
        id=str(row["id"]),
        image=None if image is None else image.convert("RGB"),
        text=f"{row.get('title') or ''} {body}".strip(),
        instruction=row.get("instruction") or None,
    )


class MemoryPool(NamedTuple):
    """Candidates by row, and the ID table over them."""

    ids: list[str]
    codes: Int16[np.ndarray, "items columns"]
    """Codes of the IDs, then half norms and densities."""
    typicality: Float32[np.ndarray, " items"]
    embeddings: Float16[np.ndarray, "items dim"] | None
    densities: UInt8[np.ndarray, " items"] | None
    """How crowded it is around each, beside fused embeddings."""
    usual: Modality
    """The most frequent modality."""
    left_out: frozenset[str]
    """Candidates that cannot be found, because they have no content."""
    rows: Mapping[str, int]
    """Id -> row."""
    table: IdTable

    def vectors(self, items: slice | Int64[np.ndarray, " items"]) -> Float[Tensor, "items dim"]:
        """Embeddings of item rows."""
        if self.embeddings is None:
            raise UsageError("this pool was made without embeddings")
        return torch.from_numpy(self.embeddings[items]).float()

    def hits(
        self, items: Int64[np.ndarray, " hits"], scores: Float32[np.ndarray, " hits"]
    ) -> dict[str, float]:
        """Candidate -> score, in the order given, whatever sorts them again."""
        return {self.ids[item]: float(score) for item, score in zip(items, falling(scores), strict=True)}

    def part(self, ids: Sequence[str]) -> MemoryPool:
        """Some of its candidates, each once; those that were left out are passed over.

        Raises
        ------
        BadData
            one was never here.
        """
        unknown = [did for did in ids if did not in self.rows and did not in self.left_out]
        if unknown:
            raise BadData(f"{len(unknown)} candidates to rank are not in the corpus: {some(unknown)}")
        rows = np.array([self.rows[did] for did in dict.fromkeys(ids) if did in self.rows], dtype=np.int64)
        codes, typicality = self.codes[rows], self.typicality[rows]
        return self._replace(
            ids=[self.ids[row] for row in rows],
            codes=codes,
            typicality=typicality,
            embeddings=None if self.embeddings is None else self.embeddings[rows],
            densities=None if self.densities is None else self.densities[rows],
            rows={self.ids[row]: place for place, row in enumerate(rows)},
            table=IdTable.build(codes, typicality),
        )


class MemoryPoolWriter:
    """Fills a pool batch by batch, in arrays that are made once.

    Parameters
    ----------
    size
        the most candidates there can be.
    dim
        width of the embeddings; None keeps none.
    """

    def __init__(self, size: int, *, levels: int, dim: int | None) -> None:
        self._rows: dict[str, int] = {}
        self._left_out: list[str] = []
        self._counts = dict.fromkeys(Modality, 0)
        self._codes = np.zeros((size, levels), dtype=np.int16)
        self._typicality = np.zeros(size, dtype=np.float32)
        self._embeddings = None if dim is None else np.zeros((size, dim), dtype=np.float16)
        self._densities: list[np.ndarray] = []

    def add(
        self,
        ids: Sequence[str],
        modalities: Sequence[Modality],
        codes: Int[Tensor, "items columns"],
        typicality: Float[Tensor, " items"],
        embeddings: Float[Tensor, "items dim"],
        densities: UInt8[Tensor, " items"] | None = None,
    ) -> None:
        """Add candidates; their embeddings are kept if the pool keeps any, densities if all have them.

        Raises
        ------
        BadData
            one of them is here already.
        """
        here = slice(len(self._rows), len(self._rows) + len(ids))
        self._rows.update(zip(ids, range(here.start, here.stop), strict=True))
        if len(self._rows) < here.stop:
            raise BadData(f"a candidate's id occurs twice in the corpus, in {some(list(ids))}")
        for modality in modalities:
            self._counts[modality] += 1
        self._codes[here] = codes.numpy()
        self._typicality[here] = typicality.numpy()
        if self._embeddings is not None:
            self._embeddings[here] = embeddings.numpy()
        if densities is not None:
            self._densities.append(densities.numpy())

    def leave_out(self, ids: Sequence[str]) -> None:
        """Remember candidates that have no content."""
        self._left_out += ids

    def finish(self) -> MemoryPool:
        """The pool.

        Raises
        ------
        BadData
            it is empty.
        """
        size = len(self._rows)
        if not size:
            raise BadData(f"no candidate has any content ({len(self._left_out)} were given)")
        codes, typicality = self._codes[:size], self._typicality[:size]
        densities = np.concatenate([np.zeros(0, dtype=np.uint8), *self._densities])
        return MemoryPool(
            ids=list(self._rows),
            codes=codes,
            typicality=typicality,
            embeddings=None if self._embeddings is None else self._embeddings[:size],
            densities=densities if len(densities) == size else None,
            usual=max(self._counts, key=lambda modality: self._counts[modality]),
            left_out=frozenset(self._left_out),
            rows=self._rows,
            table=IdTable.build(codes, typicality),
        )


Method = Literal[
    "generative", "generative+codes", "generative+embeddings", "generative+raw", "exact-fused", "exact-raw"
]
InstructionSource = Literal["task", "model", "none"]
RAW: Final = frozenset({"generative+raw", "exact-raw"})
FUSED: Final = frozenset({"generative+embeddings", "exact-fused"})
BATCH: Final = 32
"""Candidates or queries at once where mteb names no ``batch_size``."""

logger = logging.getLogger(__name__)


class MtebModel:
    """A model as mteb searches with it.

    The corpus is read in batches and kept as IDs; no picture outlives its batch. Nothing tells the search
    which modality is wanted: the instruction does, as in the paper. A candidate without text and image is
    left out of the index and a query without any finds nothing; both are logged. A beam finds fewer hits
    than mteb asks for (1,000); what it did not find counts as not found.

    Parameters
    ----------
    model
        a model, or the folder of one.
    method
        a row of ``genius evaluate``'s table. Those with embeddings (``fused`` or ``raw``) keep two bytes a
        number for each candidate in memory.
    search
        width of the beam and how its scores are normalised; ``method`` says how hits are ranked.
    instructions
        what the encoder reads before a query. ``task``: the query's own, else the task's prompt, else the
        model's training instruction for such queries and candidates; ``model``: the query's own, else the
        model's, else the task's; ``none``: nothing.
    name
        in mteb's results; default ``genius/`` and the folder's name.

    Raises
    ------
    MissingExtra
        mteb is not installed.
    UsageError
        a method or a source of instructions that is not offered.
    """

    def __init__(
        self,
        model: str | Path | Genius,
        *,
        method: Method = "generative",
        search: SearchConfig | None = None,
        instructions: InstructionSource = "task",
        name: str | None = None,
    ) -> None:
        if importlib.util.find_spec("mteb") is None:
            raise MissingExtra("mteb is not installed: pip install 'genius-search[lab]'")
        for given, offered in ((method, get_args(Method)), (instructions, get_args(InstructionSource))):
            if given not in offered:
                raise UsageError(f"{given!r} is not one of {', '.join(offered)}")
        config = checked(search or SearchConfig())
        if config.rerank != "none":
            raise UsageError(
                f"search.rerank is {config.rerank!r}, but here the method says how hits are ranked: give "
                f"method='generative+{config.rerank}'"
            )
        self.model = model if isinstance(model, Genius) else Genius.open(model)
        self.method = method
        self.instructions = instructions
        by_name = not isinstance(model, Genius) and not Path(model).is_dir()
        self.name = name or (str(model) if by_name else f"genius/{self.model.folder.resolve().name}")
        self._config = config
        self._pool: MemoryPool | None = None

    @property
    def mteb_model_meta(self) -> Any:
        """What mteb asks of a model: its name, its fingerprint, what it reads, how it was set."""
        from mteb.models import ModelMeta  # noqa: PLC0415  seconds to import, and optional

        reads_texts_only = self.model.encoder.spec.startswith("text:")
        return ModelMeta.create_empty(
            {
                "name": self.name,
                "revision": self.model.fingerprint[:12],
                "modalities": ["text"] if reads_texts_only else ["text", "image"],
                "framework": ["PyTorch"],
                "use_instructions": self.instructions != "none",
                "experiment_kwargs": {
                    "method": self.method,
                    "beam": self._config.beam,
                    "scores": self._config.scores,
                    "candidates": self._config.candidates,
                    "shortlist": self._config.shortlist,
                    "generator_weight": self._config.generator_weight,
                    "density_weight": self._config.density_weight,
                    "instructions": self.instructions,
                },
            }
        )

    def index(self, corpus: Any, *, task_metadata: Any, encode_kwargs: Mapping[str, Any], **_: Any) -> None:
        """Encode a corpus to IDs; called by mteb."""
        from mteb.types import PromptType  # noqa: PLC0415

        model = self.model
        writer = MemoryPoolWriter(
            len(corpus),
            levels=model.quantizer.num_levels + NUM_EXTRA_COLUMNS,
            dim=model.dim if self.method in RAW | FUSED else None,
        )
        modalities = task_metadata.get_modalities(PromptType.document)
        for batch in read_columns(corpus, modalities, encode_kwargs.get("batch_size", BATCH)):
            writer.leave_out([one.id for one in batch if one.is_empty])
            contents = [one for one in batch if not one.is_empty]
            if contents:
                features = self._features(contents, "candidate", [format_text(one.text) for one in contents])
                kinds = [one.modality for one in contents]
                encoded = model.encode(features, np.array([kind.code for kind in kinds]))
                vectors = _raw(features) if self.method in RAW else encoded.embeddings
                densities = None
                if self.method == "generative+embeddings":
                    measurer = model.quantizer.norm_and_density
                    densities = measurer.item_density(encoded.embeddings, encoded.codes)
                names = [one.id for one in contents]
                writer.add(names, kinds, encoded.columns, encoded.code_cosine, vectors, densities)
        self._pool = writer.finish()
        if self._pool.left_out:
            logger.warning(
                "%d of %d candidates have neither text nor image and cannot be found",
                len(self._pool.left_out),
                len(corpus),
            )

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        top_k: int,
        encode_kwargs: Mapping[str, Any],
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **_: Any,
    ) -> dict[str, dict[str, float]]:
        """Query id -> candidate id -> score, scores falling; called by mteb after :meth:`index`.

        With ``top_ranked`` each query is answered among its own candidates, all of which are ranked.
        """
        from mteb.types import PromptType  # noqa: PLC0415

        if self._pool is None:
            raise UsageError("there is nothing to search yet: mteb calls index() first")
        found: dict[str, dict[str, float]] = {}
        prompt = _prompt(task_metadata.prompt)
        modalities = task_metadata.get_modalities(PromptType.query)
        for batch in read_columns(queries, modalities, encode_kwargs.get("batch_size", BATCH)):
            found.update({one.id: {} for one in batch})
            asked = [one for one in batch if not one.is_empty]
            if top_ranked is not None:
                asked = [one for one in asked if top_ranked.get(one.id)]
            if not asked:
                continue
            words = [self._words(one, prompt, self._pool.usual) for one in asked]
            features = self._features(asked, "query", words)
            fused, raw = self.model.embed(features), _raw(features)
            if top_ranked is None:
                answers = self._answer(self._pool, fused, raw, top_k, beam=self._config.beam)
            else:
                answers = []
                for row, one in enumerate(asked):
                    part = self._pool.part(top_ranked[one.id])
                    here, wide = slice(row, row + 1), max(self._config.beam, len(part.table))
                    answers += self._answer(part, fused[here], raw[here], top_k, beam=wide)
            found.update({one.id: answer for one, answer in zip(asked, answers, strict=True)})
        empty = sum(not hits for hits in found.values())
        if empty:
            logger.warning("%d of %d queries found nothing (no content, or no candidates)", empty, len(found))
        return found

    def _words(self, query: Content, prompt: str | None, wanted: Modality) -> str:
        """What the encoder reads: UniIR's instruction, blank, text."""
        own = self.model.instruction_for(query.modality, wanted)
        match self.instructions:
            case "task":
                instruction = query.instruction or prompt or own
            case "model":
                instruction = query.instruction or own or prompt
            case "none":
                instruction = None
        return instructed(instruction, query.text)

    def _features(
        self, contents: Sequence[Content], role: Literal["query", "candidate"], words: Sequence[str]
    ) -> FeatureBatch:
        encoder = self.model.encoder
        keys = [ItemKey(role, one.id) for one in contents]
        nothing = torch.zeros(0, encoder.dim)
        if is_joint(encoder):
            joint = [
                JointInput(one.image, text, key, one.image is not None)
                for one, text, key in zip(contents, words, keys, strict=True)
            ]
            everyone = np.arange(len(joint))
            return FeatureBatch.of(
                nothing, encoder.joint_features(joint), np.full_like(everyone, ABSENT), everyone
            )
        images = [
            ImageInput(one.image, key)
            for one, key in zip(contents, keys, strict=True)
            if one.image is not None
        ]
        texts = [TextInput(text, key) for text, key in zip(words, keys, strict=True) if text]
        return FeatureBatch.of(
            encoder.image_features(images) if images else nothing,
            encoder.text_features(texts) if texts else nothing,
            _places([one.image is not None for one in contents]),
            _places([bool(text) for text in words]),
        )

    def _answer(
        self,
        pool: MemoryPool,
        fused: Float[Tensor, "queries dim"],
        raw: Float[Tensor, "queries dim"],
        k: int,
        *,
        beam: int,
    ) -> list[dict[str, float]]:
        """Hits of each query in their order, whatever sorts them again."""
        vectors = raw if self.method in RAW else fused
        if self.method not in BEAM_METHODS:
            nearest = exact_search(
                vectors, pool.vectors, len(pool.ids), k=k, device=self.model.quantizer.device
            )
            return [
                pool.hits(items, scores) for items, scores in zip(nearest.items, nearest.scores, strict=True)
            ]
        settings = dataclasses.replace(self._config, beam=beam, rerank=BEAM_METHODS[self.method].rerank)
        parts = [Part(pool.table)]
        beams = beam_search(self.model.decoder, parts, fused, settings)
        densities = None if pool.densities is None else [pool.densities]
        evidence = Evidence(self.model.ranker, [pool.vectors], self.method in RAW, densities)
        answers = [
            rank_items(
                parts,
                beams,
                query,
                vectors[query],
                config=settings,
                evidence=evidence,
                k=k,
                for_codes=fused[query],
            )
            for query in range(len(fused))
        ]
        return [pool.hits(answer.items, answer.scores) for answer in answers]


def _prompt(prompt: str | Mapping[str, str] | None) -> str | None:
    """A task's prompt for queries."""
    return prompt.get("query") if isinstance(prompt, Mapping) else prompt


def _places(present: Sequence[bool]) -> Int64[np.ndarray, " items"]:
    """Rows of packed features; absent ones have none."""
    there = np.array(present)
    return np.where(there, np.cumsum(there) - 1, ABSENT).astype(np.int64)


def _raw(features: FeatureBatch) -> Float[Tensor, "items dim"]:
    return F.normalize(features.total(), dim=-1)
