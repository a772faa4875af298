"""Items as a stream of lines, with a line of acknowledgement for each batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from genius.serve import limits
from genius.serve.problems import respond
from genius.serve.refused import Overloaded
from genius.serve.schemas import AddedAnswer, NewItemBody
from genius.serve.service import Service
from genius.serve.uploads import SentItem, add

BATCH_ITEMS: Final = 256
BATCH_BYTES: Final = 8 << 20
"""A batch is added when it has so many items, or so many bytes."""
ATTEMPTS: Final = 30
"""How often a batch is offered to an index that is busy."""


class Acknowledged(Response):
    """Reads lines while it writes acknowledgements, so that a stream may be longer than any memory."""

    media_type = limits.STREAM

    def __init__(self, request: Request, here: Service, index: str) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._request = request
        self._here = here
        self._index = index

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  request has it
        """Read, add, acknowledge, until there are no lines any more."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for batch in _batches(self._request.stream()):
                added = await self._add(batch)
                line = added.model_dump_json().encode() + b"\n"
                await send({"type": "http.response.body", "body": line, "more_body": True})
        except ClientDisconnect:
            raise
        except Exception as error:  # noqa: BLE001  half an answer is out; the last line says what is wrong
            problem = respond(error, self._request.state.request_id, self._here.redact)
            await send({"type": "http.response.body", "body": bytes(problem.body) + b"\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _add(self, batch: list[SentItem]) -> AddedAnswer:
        """Add a batch; whoever streams waits for the index, and need not ask again."""
        for _ in range(ATTEMPTS):
            try:
                return await add(self._here, self._index, batch)
            except Overloaded as busy:
                await asyncio.sleep(busy.retry_after_seconds)
        return await add(self._here, self._index, batch)


async def _batches(stream: AsyncIterator[bytes]) -> AsyncIterator[list[SentItem]]:
    """Items of a stream, some at a time."""
    batch: list[SentItem] = []
    size = number = 0
    async for line in _lines(stream):
        number += 1
        if not line.strip():
            continue
        batch.append(_item(line, f"line {number}"))
        size += len(line)
        if len(batch) >= BATCH_ITEMS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


async def _lines(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines of a stream; of one that is too long only the beginning, which is no JSON."""
    begun = bytearray()
    async for part in stream:
        *ends, rest = part.split(b"\n")
        for end in ends:
            yield bytes(begun + end)
            begun.clear()
        begun += rest[: max(0, limits.LINE_BYTES - len(begun))]
    if begun:
        yield bytes(begun)


def _item(line: bytes, name: str) -> SentItem:
    if len(line) >= limits.LINE_BYTES:
        return SentItem(name, None, problem=f"the line has more than {limits.LINE_BYTES:,} bytes")
    try:
        body = NewItemBody.model_validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return SentItem(name, None, problem=f"{f'{where}: ' if where else ''}{first['msg']}"[:300])
    return SentItem(body.id or name, body)
