"""How much anybody may ask for or send. What is beyond is refused before it costs anything."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genius_search.serve.problems import Overloaded, Problem

BODY_BYTES: Final = 32 << 20
"""Of a request. A stream of items (NDJSON) may go on for as long as it likes; its lines may not."""
BODIES_BYTES: Final = 256 << 20
"""Of all requests that are being answered."""
BODY_SECONDS: Final = 30.0
"""Between two parts of a body."""
PICTURE_BYTES: Final = 16 << 20
PICTURE_CHARACTERS: Final = 4 * -(-PICTURE_BYTES // 3) + 100
"""Of a picture in base64, with what a data: URL has before it."""
PICTURE_PIXELS: Final = 25_000_000
"""That a picture decodes to; a large JPEG decodes to an eighth, and so may have many more."""
LINE_BYTES: Final = PICTURE_CHARACTERS + (1 << 20)
"""Of a line of a stream."""
TEXT_CHARACTERS: Final = 10_000
ID_CHARACTERS: Final = 500
FIELDS_BYTES: Final = 64 << 10
"""Of an item's fields, as JSON."""
FIELDS_DEPTH: Final = 16
"""Of lists and objects inside each other."""
HITS: Final = 1_000
BEAM: Final = 1_000
CANDIDATES: Final = 100_000
PARTS: Final = 16
WEIGHT: Final = 100.0
CONDITIONS: Final = 50
CONDITION_CHARACTERS: Final = 2_000
ITEMS: Final = 1_000
"""That are added at once; a stream adds them in batches."""
IDS: Final = 10_000
"""That are deleted at once."""
GROUPS: Final = 100
"""Of items that share codes, on a page."""
DEADLINE_MS: Final = 600_000
THUMBNAIL_PIXELS: Final = 1_024
"""Of a thumbnail's longer side."""

STREAM: Final = "application/x-ndjson"


def kind_of(headers: Headers) -> str:
    """What kind of body a request says it has; asked here only, so that nobody takes it for two kinds."""
    return headers.get("content-type", "").split(";")[0].strip().lower()


class LimitBodies:
    """Counts what is sent: by what it says, and by what comes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._held = 0
        """Bytes of the bodies that are being worked on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose body keeps within the limits."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_stream = kind_of(headers) == STREAM
        said = headers.get("content-length", "0")
        if not is_stream and said.isdigit() and int(said[:20]) > BODY_BYTES:
            raise _too_large()
        here = 0
        is_complete = False

        async def counted() -> Message:
            nonlocal here, is_complete
            if is_complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), BODY_SECONDS)
            except TimeoutError:
                raise Problem(408, f"nothing came for {BODY_SECONDS:g} seconds; send it faster") from None
            is_complete = not message.get("more_body", False)
            if not is_stream:
                size = len(message.get("body", b""))
                here += size
                self._held += size
                if here > BODY_BYTES:
                    raise _too_large()
                if self._held > BODIES_BYTES:
                    raise Overloaded("too much is being sent at once; try again", retry_after_seconds=1.0)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= here


def _too_large() -> Problem:
    return Problem(
        413, f"the body has more than {BODY_BYTES:,} bytes; send less at once, or items as a stream of lines"
    )
