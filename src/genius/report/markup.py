"""Text and pictures as HTML that is safe to show and fetches nothing."""

from __future__ import annotations

import base64
import html
from typing import Final

from genius.errors import BadData

IMAGE_SIGNATURES: Final = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""How the image files that a browser shows begin."""


def shown(text: str) -> str:
    """Escaped text; the colon of a URL as an entity, so that the file names no address."""
    return html.escape(text).replace("://", "&#58;//")


def task_shown(task: str) -> str:
    """``text -> image-text`` with an arrow, broken only at the arrow."""
    return " → ".join(f'<span class="word">{shown(part)}</span>' for part in task.split(" -> "))


def picture(data: bytes, alt: str) -> str:
    """An image file inside the page.

    Raises
    ------
    BadData
        the bytes are not a PNG, JPEG, GIF or WebP file.
    """
    for signature, kind in IMAGE_SIGNATURES.items():
        if data.startswith(signature):
            encoded = base64.b64encode(data).decode()
            return (
                '<div class="picture">'
                f'<img alt="{shown(alt)}" src="data:image/{kind};base64,{encoded}"></div>'
            )
    raise BadData(f"an image of the page begins with {data[:4]!r}, expected a PNG, JPEG, GIF or WebP file")
