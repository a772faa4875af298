"""Limits of the HTTP API. Anything beyond them is refused before it costs much."""

from __future__ import annotations

from typing import Final

BODY_BYTES: Final = 32 << 20
"""Size of a request body that may contain pictures. A stream of items may be longer, but not its lines."""
SMALL_BODY_BYTES: Final = 1 << 20
"""Size of any other request body."""
BODIES_BYTES: Final = 96 << 20
"""Total size of the request bodies being processed, and of their decoded images."""
VALUES: Final = 20_000
"""Values in a JSON body: texts, numbers, lists, objects."""
ITEMS_VALUES: Final = 100_000
"""Values in a JSON body of items to add, or in a line of a stream."""
CONNECTIONS: Final = 1_000
HEAD_SECONDS: Final = 20.0
"""Longest time until the head of a request has arrived, and for which a client may not read its response."""
BODY_SECONDS: Final = 30.0
"""Longest time between two chunks of a body."""
PICTURE_BYTES: Final = 16 << 20
PICTURE_CHARACTERS: Final = 4 * -(-PICTURE_BYTES // 3) + 100
"""Length of an image in base64, including the prefix of a data: URL."""
PICTURE_PIXELS: Final = 25_000_000
"""Pixels of a decoded image. Large JPEGs are decoded at an eighth of their size, so they may have more; WebP,
AVIF and progressive JPEGs take more memory, and may have fewer."""
LINE_BYTES: Final = PICTURE_CHARACTERS + (1 << 20)
"""In a line of a stream."""
TEXT_CHARACTERS: Final = 10_000
ID_CHARACTERS: Final = 500
INDEX_CHARACTERS: Final = 200
FIELDS_BYTES: Final = 64 << 10
"""Size of an item's fields as JSON."""
FIELDS_DEPTH: Final = 16
"""Nesting depth of lists and objects in fields."""
HITS: Final = 1_000
BEAM: Final = 1_000
CANDIDATES: Final = 100_000
PARTS: Final = 16
WEIGHT: Final = 100.0
CONDITIONS: Final = 50
CONDITION_CHARACTERS: Final = 2_000
ITEMS: Final = 1_000
"""Items per request; a stream adds any number, in batches."""
IDS: Final = 10_000
"""Deleted by one request."""
GROUPS: Final = 100
"""Groups of items that share codes, per page."""
DEADLINE_MS: Final = 60_000
"""Longest time for a search, also if it has no deadline of its own."""
THUMBNAIL_PIXELS: Final = 1_024
"""On the longer side."""
