"""Texts and pictures out of columns, as mteb and Hugging Face's data sets hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from PIL import Image

from genius.data.records import Modality
from genius.errors import BadData


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
