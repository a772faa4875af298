"""Adding items from requests to an index, as a list or as a stream of lines."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import anyio.to_thread
from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from genius_search.errors import BadImage
from genius_search.index import adding
from genius_search.serve import limits
from genius_search.serve.bodies import PARSERS, check_values
from genius_search.serve.engine import Engine, Overloaded
from genius_search.serve.guard import STREAM_TYPE, Problem, Redact, respond
from genius_search.serve.pictures import Pictures, decode_base64
from genius_search.serve.schemas import Added, LeftOut, NewItem, explain_invalid

BATCH_ITEMS: Final = 256
BATCH_BYTES: Final = 8 << 20
"""A batch of a stream is added when it reaches this number of items or bytes."""
ATTEMPTS: Final = 30
"""Number of attempts to add a batch to a busy index."""


async def add(engine: Engine, pictures: Pictures, index: str, items: Sequence[NewItem | LeftOut]) -> Added:
    """Add items; report unusable ones with their reasons."""
    left_out: dict[int, LeftOut] = {}
    new: dict[int, adding.NewItem] = {}
    for number, item in enumerate(items):
        if isinstance(item, LeftOut):
            left_out[number] = item.model_copy(update={"id": item.id or f"item {number + 1}"})
            continue
        try:
            new[number] = await _read_item(pictures, item)
        except (Problem, BadImage) as error:
            reason = error.reason if isinstance(error, BadImage) else error.detail
            left_out[number] = LeftOut(id=item.id or f"item {number + 1}", reason=reason)
    counts = {"added": 0, "replaced": 0, "unchanged": 0}
    if new:
        outcomes = await engine.add(index, list(new.values()))
        for number, outcome in zip(new, outcomes, strict=True):
            if outcome.status == "left out":
                left_out[number] = LeftOut(id=outcome.id, reason=outcome.reason or "")
            else:
                counts[outcome.status] += 1
    return Added(
        **counts,
        left_out=[left_out[number] for number in sorted(left_out)],
        ids=[new[n].id if n in new else left_out[n].id for n in range(len(items))],
    )


async def _read_item(pictures: Pictures, item: NewItem) -> adding.NewItem:
    image = None if item.image is None else decode_base64(item.image)
    if image is not None:
        await pictures.decode(image)  # raises for images that the index could not read
    contents = await anyio.to_thread.run_sync(_check_contents, item, limiter=PARSERS)
    # Without an id, the item is named by a hash of its contents, so that sending it twice adds it once.
    derived = hashlib.sha256((image or b"") + contents.encode()).hexdigest()[:24]
    return adding.NewItem(item.id or derived, item.text, image, item.fields)


def _check_contents(item: NewItem) -> str:
    """Return the text and fields of an item as JSON; raise :class:`Problem` if the fields are too large."""
    if item.fields is not None:
        if len(json.dumps(item.fields)) > limits.FIELDS_BYTES:
            raise Problem(422, f"fields: they have more than {limits.FIELDS_BYTES:,} bytes")
        if _depth(item.fields) > limits.FIELDS_DEPTH:
            raise Problem(422, f"fields: they are nested more than {limits.FIELDS_DEPTH} levels deep")
    return json.dumps([item.text, item.fields], sort_keys=True)


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner)) if inner else 0


class Acknowledgements(StreamingResponse):
    """Response that acknowledges batches while lines still arrive, in bounded memory."""

    media_type = STREAM_TYPE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the response; unlike Starlette's own, leave receiving to the reader of the request."""
        await self.stream_response(send)


async def acknowledge(
    request: Request, engine: Engine, pictures: Pictures, index: str, redact: Redact
) -> AsyncIterator[bytes]:
    """Add the items of a stream; yield one line per batch, and a last one for the error that ended it."""
    try:
        async for batch in _batches(request.stream(), request.state.hold):
            for attempt in range(ATTEMPTS):
                try:
                    added = await add(engine, pictures, index, batch)
                    break
                except Overloaded as busy:  # the stream waits, so the client need not resend anything
                    if attempt + 1 == ATTEMPTS:
                        raise
                    await asyncio.sleep(busy.retry_after_seconds)
            yield added.model_dump_json().encode() + b"\n"
    except ClientDisconnect:
        raise
    except Exception as error:  # noqa: BLE001  the response has begun, so its last line tells the error
        yield bytes(respond(error, request.state.request_id, redact).body) + b"\n"


async def _batches(
    chunks: AsyncIterator[bytes], hold: Callable[[int], None]
) -> AsyncIterator[list[NewItem | LeftOut]]:
    """Yield the items of a stream; ``hold`` is told how many bytes of it are in memory.

    Lines that are too long are truncated, and so are invalid JSON.
    """
    batch: list[NewItem | LeftOut] = []
    begun = bytearray()
    num_bytes = number = 0
    async for chunk in _with_last_newline(chunks):
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            begun += end
            number += 1
            line = bytes(begun)
            begun.clear()
            if line.strip():
                batch.append(_parse(line, number))
                num_bytes += len(line)
            del line  # it may have 20 MB, and the batch is added next
            if len(batch) >= BATCH_ITEMS or num_bytes >= BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
        begun += rest[: max(0, limits.LINE_BYTES - len(begun))]
        hold(num_bytes + len(begun))
    if batch:
        yield batch


async def _with_last_newline(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield chunk
    yield b"\n"


def _parse(line: bytes, number: int) -> NewItem | LeftOut:
    name = f"line {number}"
    if len(line) >= limits.LINE_BYTES:
        return LeftOut(id=name, reason=f"the line has more than {limits.LINE_BYTES:,} bytes")
    try:
        check_values(line, limits.ITEMS_VALUES)
        return NewItem.model_validate_json(line)
    except Problem as error:
        return LeftOut(id=name, reason=error.detail)
    except ValidationError as error:
        return LeftOut(id=name, reason=explain_invalid(error))
