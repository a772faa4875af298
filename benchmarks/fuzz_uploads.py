"""Send a running service pictures and bodies that were made to hurt it.

``python benchmarks/fuzz_uploads.py URL --cases 600 --pid PID`` sends pictures that are cut off, damaged, of
other kinds, enormous once decoded; JSON that is deep, half or no JSON; streams that break off. Each
has to be refused with a 4xx and its reason, except those that only look odd, which may also be taken. The service
has to be alive afterwards, and with ``--pid`` its memory is looked at. Give it a service over a copy of an
index. ``--key`` is an API key where there are keys.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import socket
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from PIL import Image
from serve import megabytes

HOSTILE_PATHS = (
    "../../etc/passwd",
    "/etc/passwd",
    "..\\..\\boot.ini",
    "a/../../b",
    "file:///etc/passwd",
    "~root",
)
JSON = {"Content-Type": "application/json"}
STREAM = {"Content-Type": "application/x-ndjson"}
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")


class Hostile(NamedTuple):
    """A request."""

    name: str
    path: str
    arguments: dict[str, Any]
    """Of httpx's ``Client.request``."""
    method: str = "POST"
    may_be_taken: bool = False
    """Odd, but not invalid."""


class Nasty(NamedTuple):
    """A picture."""

    name: str
    data: bytes
    may_be_taken: bool = False


def picture(kind: str, size: tuple[int, int] = (48, 32), **more: object) -> bytes:
    file = io.BytesIO()
    noise = Image.effect_noise(size, 80).convert("RGB")
    noise.save(file, kind, **more)
    return file.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes, *, extra: bytes = b"") -> bytes:
    """Return a PNG that claims so many pixels of one bit, whatever its rows hold."""
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", head)
        + extra
        + png_chunk(b"IDAT", zlib.compress(rows, 9))
        + png_chunk(b"IEND", b"")
    )


def bombs() -> Iterator[Nasty]:
    """Pictures that are small to send and large to decode, or claim to be."""
    for side in (5_001, 12_000, 30_000, 65_535):
        yield Nasty(f"PNG of {side} x {side}", png(side, side, b"\0" * (1 << 20)))
    yield Nasty("PNG of 12,000 x 12,000 whole", png(12_000, 12_000, b"\0" * (12_000 * 1501)))
    yield Nasty("PNG of 2^31 x 1", png(2**31 - 1, 1, b"\0"))
    yield Nasty("PNG of 0 x 0", png(0, 0, b""))
    text = png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"x" * (200 << 20), 9))
    yield Nasty("PNG with 200 MB of text inside", png(8, 8, b"\0\0" * 8, extra=text))
    profile = png_chunk(b"iCCP", b"p\0\0" + zlib.compress(b"x" * (200 << 20), 9))
    yield Nasty("PNG with 200 MB of profile inside", png(8, 8, b"\0\0" * 8, extra=profile), may_be_taken=True)
    for kind, place, form in (("GIF", 6, "<HH"), ("BMP", 18, "<ii")):
        data = bytearray(picture(kind))
        struct.pack_into(form, data, place, *((65_535, 65_535) if kind == "GIF" else (60_000, 60_000)))
        yield Nasty(f"{kind} said to be enormous", bytes(data))
    data = bytearray(picture("BMP"))
    struct.pack_into("<ii", data, 18, -5, -5)
    yield Nasty("BMP of fewer than no pixels", bytes(data))
    webp = bytearray(picture("WEBP", lossless=True))
    webp[21:25] = struct.pack("<I", 0x3FFF | (0x3FFF << 14))
    yield Nasty("WebP said to be 16,384 x 16,384", bytes(webp))
    tiff = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(tiff, "TIFF", compression="group4")
    yield Nasty("TIFF of 20,000 x 20,000 in a few bytes", tiff.getvalue())


def others() -> Iterator[Nasty]:
    """Files of other kinds."""
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><image href="http://169.254.169.254/"/><script>alert(1)</script></svg>'
    entity = '<?xml version="1.0"?><!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg>&x;</svg>'
    for name, data in (
        ("nothing", b""),
        ("a byte", b"\0"),
        ("zeros", bytes(10_000)),
        ("text", b"just words"),
        ("HTML", b"<!doctype html><script>alert(1)</script>"),
        ("SVG", svg.encode()),
        ("SVG with an entity", entity.encode()),
        ("PDF", b"%PDF-1.7\n1 0 obj<</Type/Catalog>>endobj"),
        ("PostScript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file"),
        ("ZIP", b"PK\x03\x04" + bytes(60)),
        ("gzip", zlib.compress(b"x" * 1000)),
        ("ELF", b"\x7fELF" + bytes(60)),
        ("an icon", b"\0\0\1\0\1\0" + bytes(40)),
        ("Photoshop", b"8BPS\0\1" + bytes(60)),
        ("JPEG 2000", b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(60)),
        ("a playlist", b"#EXTM3U\nhttp://169.254.169.254/\n"),
        ("XBM", b"#define x_width 9\n#define x_height 9\nstatic char x[]={0};"),
        ("FITS", b"SIMPLE  =                    T" + b" " * 2850),
    ):
        yield Nasty(name, data)
    for kind, magic in (
        ("PNG", b"\x89PNG\r\n\x1a\n"),
        ("JPEG", b"\xff\xd8\xff\xe0"),
        ("GIF", b"GIF89a"),
        ("WEBP", b"RIFF\xff\xff\xff\x7fWEBP"),
        ("TIFF", b"II*\0\xff\xff\xff\xff"),
        ("BMP", b"BM"),
    ):
        yield Nasty(f"only the beginning of {kind}", magic)
        yield Nasty(f"the beginning of {kind}, then noise", magic + random.Random(3).randbytes(500))


def odd() -> Iterator[Nasty]:
    """Unusual pictures."""
    frames = [Image.new("RGB", (64, 64), (n % 256, 0, 0)) for n in range(600)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    yield Nasty("GIF of 600 frames", file.getvalue(), may_be_taken=True)
    jpeg = picture("JPEG")
    yield Nasty("JPEG and ZIP", jpeg + b"PK\x03\x04" + bytes(100), may_be_taken=True)
    yield Nasty("JPEG and HTML", jpeg + b"<script>alert(1)</script>", may_be_taken=True)
    yield Nasty("GIF and JavaScript", picture("GIF") + b"/*;alert(1)//", may_be_taken=True)
    yield Nasty("PNG of 25,000 x 1", picture("PNG", (25_000, 1)), may_be_taken=True)
    yield Nasty("PNG of one pixel", picture("PNG", (1, 1)), may_be_taken=True)
    exif = Image.Exif()
    exif[0x0112] = 99
    exif[0x010E] = "x" * 60_000
    yield Nasty("JPEG with odd EXIF", picture("JPEG", exif=exif), may_be_taken=True)


def damaged(number: random.Random) -> Iterator[Nasty]:
    """Yield pictures cut off anywhere or with bytes changed, without end."""
    whole = {kind: picture(kind, (96, 64)) for kind in FORMATS}
    while True:
        kind = number.choice(FORMATS)
        data = whole[kind]
        cut = number.randrange(1, len(data) // 2)
        yield Nasty(f"{kind} cut off after {cut}", data[:cut])
        changed = bytearray(data)
        for _ in range(number.randrange(1, 60)):
            changed[number.randrange(len(changed))] = number.randrange(256)
        yield Nasty(f"{kind} with changed bytes", bytes(changed), may_be_taken=True)


def sent_as_picture(nasty: Nasty, way: int) -> Hostile:
    """Send a picture in one of the ways in which it can come."""
    text = base64.b64encode(nasty.data).decode()
    item = {"id": "fuzz", "image": text}
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("search, JSON", "/v1/search", {"json": {"image": text}}),
        ("search, data URL", "/v1/search", {"json": {"image": f"data:image/png;base64,{text}"}}),
        ("part, JSON", "/v1/search", {"json": {"parts": [{"image": text}]}}),
        ("item, JSON", "/v1/items", {"json": {"items": [item]}}),
        ("item, line", "/v1/items/stream", {"content": json.dumps(item).encode(), "headers": STREAM}),
    ]
    name, path, arguments = ways[way % len(ways)]
    return Hostile(f"{name}: {nasty.name}", path, arguments, may_be_taken=nasty.may_be_taken)


def json_bodies() -> Iterator[Hostile]:
    """Bodies that are not JSON, or JSON that nobody means."""
    deep = b'{"fields":' * 50_000
    contents = [
        b"", b"{", b"nul", b"[]", b'"x"', b"0", b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}", b"{}" * 100,
        b'{"text": NaN}', b'{"k": NaN}', b'{"k": Infinity}', b'{"k": 1e400}', b'{"k": -0.5}', b'{"k": ' + b"9" * 10_000 + b"}",
        b'{"text": "\\ud800"}', b'{"text": "\\udfff x"}', b'{"text": "\xff"}', b'{"text": "\xed\xa0\x80"}', b'{"text": 1}',
        b'{"text": {"a": 1}}', b'{"text": ["x"]}', b'{"text": "x", "k": true}', b'{"text": "x", "k": "ten"}',
        b'{"text": "x", "where": {"a": 1}}', b'{"text": "x", "where": ["a"]}', b'{"text": "x", "where": [null]}',
        b'{"text": "x", "where": ["' + b"a" * 5000 + b'=1"]}', b'{"text": "x", "where": ["a in ' + b"1," * 999 + b'"]}',
        b'{"text": "x", "where": ["image~/etc"]}', b'{"text": "x", "match": "\\"\\"\\""}', b'{"text": "x", "match": ""}',
        b'{"text": "x", "index": "../../etc"}', b'{"text": "x", "index": "\\u0000"}', b'{"text": "x", "__proto__": {}}',
        b'{"parts": [{"id": "\\u0000"}]}', b'{"parts": [{"id": "../../etc/passwd"}]}', b'{"parts": [{"text": "x", "weight": 1e308}]}',
        b'{"parts": [{"text": "x", "weight": 0}]}', b'{"parts": [[]]}', b'{"parts": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        deep, b"[" * 200_000, b'{"text": "' + b"x" * 2_000_000 + b'"}', b'{"' + b"k" * 1_000_000 + b'": 1}',
        b'{"image": "http://169.254.169.254/latest/meta-data"}', b'{"image": "file:///etc/passwd"}', b'{"image": "//evil.example/x"}',
        b'{"image": "data:text/html;base64,PHNjcmlwdD4="}', b'{"image": "' + b"A" * (23 << 20) + b'"}',
    ]  # fmt: skip
    for path in ("/v1/search", "/v1/explain", "/v1/items", "/v1/items/delete"):
        for content in contents:
            name = f"{path}: {content[:40]!r} of {len(content):,} bytes"
            yield Hostile(name, path, {"content": content, "headers": JSON})
    for fields in ({"a": float("nan")}, {"a": "\ud800"}, {"x" * 70_000: 1}, {"a": list(range(40_000))}):
        body = json.dumps({"items": [{"id": "fuzz", "text": "x", "fields": fields}]}).encode()
        yield Hostile(f"fields {str(fields)[:30]!r}", "/v1/items", {"content": body, "headers": JSON})
    nested: dict[str, object] = {}
    for _ in range(150):
        nested = {"a": nested}
    yield Hostile("nested fields", "/v1/items", {"json": {"items": [{"text": "x", "fields": nested}]}})
    for name in ("", "x" * 501, "nul\0"):
        yield Hostile(f"id {name[:10]!r}", "/v1/items", {"json": {"items": [{"id": name, "text": "x"}]}})
    for name in HOSTILE_PATHS:
        body = {"items": [{"id": name, "text": "x"}]}
        yield Hostile(f"id {name}", "/v1/items", {"json": body}, may_be_taken=True)
        for path, given in (
            ("/v1/items", {"id": name, "index": name}),
            ("/v1/items/picture", {"id": name, "size": 9}),
            ("/assets/" + name.replace("%", "%25"), {}),
            ("/v1/indexes/" + name.replace("/", "%2F"), {}),
        ):
            yield Hostile(f"{path} {name}", path, {"params": given}, method="GET")


def bodies() -> Iterator[Hostile]:
    """Bodies of other kinds, streams, and bodies that are too long."""
    kinds = ("multipart/form-data", "text/plain", "application/xml", "image/png", "")
    for path in ("/v1/search", "/v1/items"):
        for kind in (*kinds, "application/json;" + "x" * 5000):
            arguments = {"content": b"{", "headers": {"Content-Type": kind}}
            yield Hostile(f"{path} as {kind[:30]!r}", path, arguments)
        yield Hostile(f"{path}: 40 MB", path, {"content": bytes(40 << 20), "headers": JSON})
        pieces = iter([bytes(1 << 20)] * 40)
        yield Hostile(f"{path}: 40 MB in pieces", path, {"content": pieces, "headers": JSON})
    for content in (
        b"{",
        b"not json\n" * 50,
        b"\0\n",
        b"[" * 100_000,
        b'{"id":"s","image":"http://evil.example/"}',
        b"x" * (25 << 20),
    ):
        name = f"stream {content[:20]!r} of {len(content):,} bytes"
        yield Hostile(name, "/v1/items/stream", {"content": content, "headers": STREAM})


def everything(cases: int, start: int) -> Iterator[Hostile]:
    """Yield so many requests; damaged pictures fill up the rest."""
    number = random.Random(start)
    fixed = [*json_bodies(), *bodies()]
    for place, nasty in enumerate([*bombs(), *others(), *odd()]):
        fixed += [sent_as_picture(nasty, place + way) for way in (0, 2, 4)]
    yield from fixed[:cases] if cases < len(fixed) else fixed
    for place, nasty in zip(range(cases - len(fixed)), damaged(number), strict=False):
        yield sent_as_picture(nasty, place)


def refused(response: httpx.Response) -> bool:
    """Return whether a response is a clear 4xx or, for a stream, lines that say what was wrong."""
    if 400 <= response.status_code < 500:
        return (
            bool(response.json()["detail"])
            and response.json()["request_id"] == response.headers["x-request-id"]
        )
    if response.headers.get("content-type") != "application/x-ndjson":
        return False
    lines = [json.loads(line) for line in response.text.splitlines()]
    return bool(lines) and all(line.get("left_out") or line.get("detail") for line in lines)


def broken_off(url: str) -> None:
    """Send requests that are never finished or malformed."""
    place = urlsplit(url)
    for content in (
        b"\0" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
        b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"GET /" + b"a" * 200_000,
    ):
        with socket.create_connection((place.hostname or "localhost", place.port or 80), timeout=10) as raw:
            raw.sendall(content)


def memory(pid: int | None) -> dict[str, int]:
    """Return the memory of the service in MB: now and at most."""
    names = {} if pid is None else {"now_mb": "VmRSS", "most_mb": "VmHWM"}
    return {name: round(megabytes(pid, field)) for name, field in names.items()}


def fuzz(url: str, cases: int, start: int, headers: dict[str, str], pid: int | None) -> dict[str, object]:
    statuses: Counter[int] = Counter()
    failures = []
    taken = 0
    slowest = (0.0, "")
    before = memory(pid)
    with httpx.Client(base_url=url, headers=headers, timeout=120) as client:
        for hostile in everything(cases, start):
            began = time.monotonic()
            try:
                response = client.request(hostile.method, hostile.path, **hostile.arguments)
            except httpx.HTTPError as error:  # refused while it was still being sent
                failures += [] if "40 MB" in hostile.name else [f"{hostile.name}: {error!r}"]
                statuses[413] += "40 MB" in hostile.name
                continue
            slowest = max(slowest, (round(time.monotonic() - began, 2), hostile.name))
            statuses[response.status_code] += 1
            is_refused = refused(response)
            taken += not is_refused
            if not (is_refused or (hostile.may_be_taken and response.status_code == 200)):
                failures.append(f"{hostile.name}: {response.status_code} {response.text[:300]}")
        broken_off(url)
        alive = client.get("/readyz").status_code == 200
        found = client.post("/v1/search", json={"text": "a kite"}).status_code == 200
    return {
        "cases": cases,
        "statuses": dict(sorted(statuses.items())),
        "taken": taken,
        "alive": alive and found,
        "slowest": slowest,
        "memory_before": before,
        "memory_after": memory(pid),
        "failures": failures[:20],
        "failed": len(failures),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key")
    parser.add_argument("--pid", type=int)
    arguments = parser.parse_args()
    headers = {} if arguments.key is None else {"Authorization": f"Bearer {arguments.key}"}
    found = fuzz(arguments.url.rstrip("/"), arguments.cases, arguments.seed, headers, arguments.pid)
    print(json.dumps(found, indent=2))
    return 0 if found["alive"] and not found["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
