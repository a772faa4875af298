"""HTML pages of one file each: templates with escaping, one style sheet, pictures inside."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup, escape

from genius_search.artifact import write_file
from genius_search.errors import BadData

IMAGE_SIGNATURES: Final = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""How the image files that a browser shows begin."""


def write_html(path: Path, template: str, page: Any) -> None:
    """Render a template as one file that fetches nothing; raises BadData for bytes that are no image."""
    files = resources.files("genius_search.lab") / "templates"
    script = (files / "page.js").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (files / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_hide_addresses,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["picture"] = _picture
    text = environment.get_template(template).render(
        page=page,
        style=Markup((files / "page.css").read_text(encoding="utf-8")),  # noqa: S704  ours, or escaped
        script=Markup(script),  # noqa: S704  ours, or escaped
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    write_file(path, text.encode())


def _hide_addresses(value: Any) -> Any:
    """Write the colon of an address as an entity: the text is the same, but the file names no address."""
    if isinstance(value, str) and not isinstance(value, Markup) and "://" in value:
        return Markup(str(escape(value)).replace("://", "&#58;//"))  # noqa: S704  ours, or escaped
    return value


def _picture(data: bytes, alt: str) -> Markup:
    for signature, kind in IMAGE_SIGNATURES.items():
        if data.startswith(signature):
            source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
            alt_text = str(escape(alt)).replace("://", "&#58;//")
            return Markup(f'<div class="picture"><img alt="{alt_text}" src="{source}"></div>')  # noqa: S704  ours, or escaped
    raise BadData(f"an image of the page begins with {data[:4]!r}, expected a PNG, JPEG, GIF or WebP file")
