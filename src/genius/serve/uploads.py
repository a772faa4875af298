"""Items that are sent: checked, their pictures looked at, and handed to the index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile

from genius.errors import BadImage
from genius.index import NewItem
from genius.serve import limits
from genius.serve.pictures import from_base64
from genius.serve.problems import Problem
from genius.serve.reading import bytes_of, fields_of_form, validated
from genius.serve.schemas import AddedAnswer, LeftOutBody, NewItemBody
from genius.serve.service import Service

_TEXTS: Final = frozenset({".txt", ".md"})
FILES: Final = "files"
"""The field of a form whose files are an item each."""


class SentItem(NamedTuple):
    """An item as it came; ``problem`` says why it cannot be used."""

    name: str
    """Its id, or where it stood."""
    body: NewItemBody | None
    image: bytes | None = None
    """A picture that came as a file."""
    problem: str | None = None


def numbered(bodies: Iterable[NewItemBody]) -> list[SentItem]:
    """Items of one body."""
    return [SentItem(body.id or f"item {number}", body) for number, body in enumerate(bodies, start=1)]


async def items_of_form(form: FormData) -> list[SentItem]:
    """Files of a form: each of ``files`` is an item by its name, or the form is one item as JSON has it.

    Raises
    ------
    Problem
        it is neither.
    """
    files = form.getlist(FILES)
    if not files:
        sent = await fields_of_form(form)
        body = validated(NewItemBody, sent.body)
        return [SentItem(body.id or "item 1", body, sent.image)]
    if len(files) != len(form.multi_items()) or not all(isinstance(file, UploadFile) for file in files):
        raise Problem(422, "a form has files, each of which is an item, or the fields of one item; not both")
    return [await _of_file(file) for file in files if isinstance(file, UploadFile)]


async def _of_file(file: UploadFile) -> SentItem:
    """A picture or a text by the name of its file; folders of whoever sends it are nobody's business."""
    name = PurePosixPath((file.filename or "").replace("\\", "/")).name[-limits.ID_CHARACTERS :]
    if not name:
        return SentItem("a file", None, problem="it has no name")
    if PurePosixPath(name).suffix.lower() not in _TEXTS:
        if (file.size or 0) > limits.PICTURE_BYTES:
            return SentItem(name, None, problem=f"it has more than {limits.PICTURE_BYTES:,} bytes")
        return _checked(name, {"id": name}, await bytes_of(file))
    if (file.size or 0) > 4 * limits.TEXT_CHARACTERS:
        return SentItem(name, None, problem=f"it has more than {limits.TEXT_CHARACTERS:,} characters")
    try:
        text = (await file.read()).decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return SentItem(name, None, problem="it is not a UTF-8 text")
    return _checked(name, {"id": name, "text": text}, None)


def _checked(name: str, fields: dict[str, Any], image: bytes | None) -> SentItem:
    try:
        return SentItem(name, NewItemBody.model_validate(fields), image)
    except ValidationError as error:
        return SentItem(name, None, problem=str(error.errors()[0]["msg"]))


async def add(here: Service, index: str, sent: Sequence[SentItem]) -> AddedAnswer:
    """Add items; what cannot be used is left out, each with its reason, and the others are added."""
    reasons: dict[int, LeftOutBody] = {}
    new: dict[int, NewItem] = {}
    for place, one in enumerate(sent):
        try:
            new[place] = await _new_item(here, one)
        except (Problem, BadImage) as error:
            reason = error.reason if isinstance(error, BadImage) else str(error)
            reasons[place] = LeftOutBody(id=one.name, reason=reason)
    counts = {"added": 0, "replaced": 0, "unchanged": 0}
    if new:
        outcomes = await here.engine.add(index, list(new.values()))
        for place, outcome in zip(new, outcomes, strict=True):
            if outcome.became == "left out":
                reasons[place] = LeftOutBody(id=outcome.item_id, reason=outcome.reason or "")
            else:
                counts[outcome.became] += 1
    return AddedAnswer(
        **counts,
        left_out=[reasons[place] for place in sorted(reasons)],
        ids=[new[place].item_id if place in new else one.name for place, one in enumerate(sent)],
    )


async def _new_item(here: Service, sent: SentItem) -> NewItem:
    """An item whose picture can be decoded, and whose fields are not too many."""
    body = sent.body
    if body is None:
        raise Problem(422, sent.problem or "it cannot be used")
    image = sent.image if body.image is None else from_base64(body.image)
    if image is not None:
        await here.pictures.decode(image)
    if body.fields is not None:
        _check_fields(body.fields)
    return NewItem(body.id or _own_id(body, image), body.text, image, body.fields)


def _check_fields(fields: dict[str, Any]) -> None:
    if _depth(fields) > limits.FIELDS_DEPTH:
        raise Problem(422, f"fields: they are nested more than {limits.FIELDS_DEPTH} deep")
    if len(json.dumps(fields)) > limits.FIELDS_BYTES:
        raise Problem(422, f"fields: they have more than {limits.FIELDS_BYTES:,} bytes")


def _depth(value: object) -> int:
    """How many lists and objects are inside each other; no more are looked at than are allowed."""
    level: list[object] = [value]
    for depth in range(limits.FIELDS_DEPTH + 2):
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        if not inner:
            return depth
        level = inner
    return limits.FIELDS_DEPTH + 1


def _own_id(body: NewItemBody, image: bytes | None) -> str:
    """An id for an item that has none, so that sending it twice adds it once."""
    digest = hashlib.sha256(image or b"")
    digest.update(json.dumps([body.text, body.fields], sort_keys=True).encode())
    return digest.hexdigest()[:24]
