"""Items, hits and indexes as they are told to others: no path of this machine, nothing that is no JSON."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, get_args
from urllib.parse import urlencode

from genius.answers import SearchHit
from genius.config import SearchConfig
from genius.data.records import Modality
from genius.index import Index
from genius.search.described import count_by_modality
from genius.search.filters import COLUMNS
from genius.search.items import Item, fields_of
from genius.search.opened import OpenedIndex
from genius.serve import limits
from genius.serve.schemas import (
    ExampleBody,
    FieldBody,
    HitBody,
    IndexBody,
    InstructionBody,
    ItemBody,
    ModalityName,
    SettingsUsed,
)

THUMBNAIL: Final = 256
"""Pixels of the longer side, unless one says otherwise."""
SAMPLE: Final = 500
"""About so many items of each segment are looked at to see which fields there are."""
FIELDS: Final = 100
EXAMPLES: Final = 5
EXAMPLE_CHARACTERS: Final = 80

Kind = Literal["number", "text", "truth", "list"]

_PLAIN: Final = re.compile(r"[^\s.=!<>~\"',]+")


def name_of(modality: Modality) -> ModalityName:
    """``image-text`` and the like."""
    return get_args(ModalityName)[get_args(ModalityName).index(modality.label)]  # type: ignore[no-any-return]


def picture_url(index: str, item_id: str) -> str:
    """Where the picture of an item is to be had."""
    return f"/v1/items/picture?{urlencode({'index': index, 'id': item_id, 'size': THUMBNAIL})}"


def show_hit(index: str, hit: SearchHit) -> HitBody:
    """A hit as it is told."""
    return HitBody(
        rank=hit.rank,
        id=hit.item_id,
        score=hit.score,
        probability=hit.probability,
        modality=name_of(hit.modality),
        text=hit.text,
        image=None if hit.image is None else picture_url(index, hit.item_id),
        fields=clean(hit.fields),
        codes=list(hit.codes),
        log_probabilities=list(hit.log_probabilities),
    )


def show_item(index: str, item: Item, codes: Sequence[int]) -> ItemBody:
    """An item as it is told."""
    return ItemBody(
        id=item.item_id,
        modality=name_of(item.modality),
        text=item.text,
        image=None if item.image is None else picture_url(index, item.item_id),
        fields=clean(fields_of(item.source)),
        codes=list(codes),
    )


def show_example(index: str, item: Item) -> ExampleBody:
    """An item in short."""
    return ExampleBody(
        id=item.item_id,
        modality=name_of(item.modality),
        text=item.text,
        image=None if item.image is None else picture_url(index, item.item_id),
    )


def show_index(name: str, index: Index, *, writable: bool) -> IndexBody:
    """An index as it is told."""
    opened, model = index.opened, index.model
    counts = count_by_modality(opened.segments)
    return IndexBody(
        name=name,
        items=opened.state.num_alive,
        modalities={name_of(modality): counts[modality] for modality in Modality if modality in counts},
        levels=list(model.quantizer.sizes),
        fields=_fields(opened),
        instructions=[
            InstructionBody(
                text=known.text,
                modality=name_of(Modality.parse(known.candidate)),
                query=name_of(Modality.parse(known.query)),
            )
            for known in model.instructions
        ],
        stores_embeddings=opened.state.facts.embeddings != "none",
        calibrated=index.calibration is not None,
        writable=writable,
        settings=show_settings(index.settings, None, 1),
    )


def show_settings(config: SearchConfig, beam: int | None, k: int) -> SettingsUsed:
    """How it was searched."""
    return SettingsUsed(beam=max(beam or config.beam, k), leaves=config.leaves, rerank=config.rerank)


def clean(value: Any, depth: int = 2 * limits.FIELDS_DEPTH) -> Any:
    """What came with an item, as JSON that everybody reads: finite, whole characters, not too deep."""
    match value:
        case dict():
            return {clean(name): clean(inner, depth - 1) for name, inner in value.items()} if depth else None
        case list():
            return [clean(inner, depth - 1) for inner in value] if depth else None
        case str():
            return value if value.isascii() else value.encode("utf-8", "replace").decode()
        case float():
            return value if math.isfinite(value) else None
        case _:
            return value


def _fields(opened: OpenedIndex) -> list[FieldBody]:
    """What a sample of the items has for fields, the frequent ones first."""
    kinds: dict[str, list[Kind]] = defaultdict(list)
    examples: dict[str, dict[str, Any]] = defaultdict(dict)
    for item in _sample(opened):
        for name, value in _flat(clean(fields_of(item.source))):
            kind = _kind(value)
            if kind is None:
                continue
            kinds[name].append(kind)
            few = examples[name]
            if kind != "list" and len(few) < EXAMPLES and len(str(value)) <= EXAMPLE_CHARACTERS:
                few.setdefault(str(value), value)
    names = sorted(kinds, key=lambda name: -len(kinds[name]))[:FIELDS]
    return [
        FieldBody(
            name=name, kind=Counter(kinds[name]).most_common(1)[0][0], examples=[*examples[name].values()]
        )
        for name in names
    ]


def _flat(fields: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Fields by the names that conditions have for them: inner ones after a dot, odd ones in quotes."""
    for name, value in fields.items():
        if '"' in name and "'" in name:
            continue  # no condition can name it
        quote = "'" if '"' in name else '"'
        is_own = not above and name in COLUMNS
        spelt = above + (name if _PLAIN.fullmatch(name) and not is_own else f"{quote}{name}{quote}")
        if isinstance(value, dict):
            yield from _flat(value, f"{spelt}.")
        else:
            yield spelt, value


def _sample(opened: OpenedIndex) -> Iterator[Item]:
    """Items from all over each segment."""
    for segment in opened.segments:
        count = segment.table.num_items
        yield from segment.items.get(range(0, count, max(1, count // SAMPLE)))


def _kind(value: object) -> Kind | None:
    match value:
        case bool():
            return "truth"
        case int() | float():
            return "number"
        case str():
            return "text"
        case list():
            return "list"
        case _:
            return None
