"""Attack a service in several ways, and measure its memory and the times of other clients.

Usage: python benchmarks/attacks.py INDEX [--only NAME ...] [--seconds 15] [-- FLAGS]

FLAGS are for `genius serve`. Each attack runs in a new process against a new service on a copy of
the index. Meanwhile, this process requests `/healthz` and a search in turns, each over a new
connection. It has the attacker's address, so it can be refused with status 429, and then tries
again. Prints a table. Exits with 1 if an answer to `/healthz` took more than a second, a search had
no answer, or the server took more than 600 MB.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import multiprocessing
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from PIL import ExifTags, Image
from serve import megabytes, serving

MAX_HEALTHZ_SECONDS = 1.0
MAX_SERVER_MB = 600
NUM_SOCKETS = 1_100
NUM_CLIENTS = 16
JSON = "application/json"
FORM = "multipart/form-data; boundary=x"
HEAD = (
    "POST {path} HTTP/1.1\r\n"
    "Host: localhost\r\n"
    "Content-Type: {content_type}\r\n"
    "Content-Length: {size}\r\n"
    "\r\n"
)

Attack = Callable[[str, float], Counter[str]]
"""A function of a URL and seconds that returns the number of answers by status or error."""


def send_repeatedly(
    url: str, seconds: float, path: str, bodies: list[bytes], content_type: str = JSON
) -> Counter[str]:
    """Send bodies from many clients at once, repeatedly."""
    until = time.monotonic() + seconds

    def send(number: int) -> Counter[str]:
        counts: Counter[str] = Counter()
        with httpx.Client(base_url=url, timeout=120) as client:
            for body in itertools.islice(itertools.cycle(bodies), number, None):
                if time.monotonic() > until:
                    return counts
                try:
                    headers = {"Content-Type": content_type}
                    answer = client.post(path, content=body, headers=headers)
                    counts[str(answer.status_code)] += 1
                except httpx.HTTPError as error:
                    counts[type(error).__name__] += 1
        return counts

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        return sum(threads.map(send, range(NUM_CLIENTS)), Counter())


def send_slowly(
    url: str,
    seconds: float,
    heads: list[bytes],
    tail: bytes = b"",
    *,
    pause: float = 0.001,
    chunk_size: int = 1 << 18,
) -> Counter[str]:
    """Open a connection for each head, send it and then, slowly, the tail; read only at the end."""
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    until = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    connections = [_connect(url, head, counts) for head in heads]
    unsent = {connection: memoryview(tail) for connection in connections}
    while time.monotonic() < until:
        for connection, data in unsent.items():
            try:
                if data:
                    unsent[connection] = data[connection.send(data[:chunk_size]) :]
            except BlockingIOError:
                continue
            except OSError:
                unsent[connection] = data[:0]
        time.sleep(pause)
    for connection in connections:
        try:
            answer = connection.recv(64)
            counts[answer[9:12].decode() if answer else "closed"] += 1
        except BlockingIOError:
            counts["open"] += 1
        except OSError:
            counts["closed"] += 1
    return counts


def _connect(url: str, head: bytes, counts: Counter[str]) -> socket.socket:
    """Open a connection with a small receive buffer and send the head; count errors."""
    address = urlsplit(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(5)
    try:
        connection.connect((address.hostname or "", address.port or 0))
        connection.setblocking(False)
        connection.send(head)
    except OSError as error:
        counts[type(error).__name__] += 1
    return connection


def json_of_many_values(url: str, seconds: float) -> Counter[str]:
    members = ",".join(f'"{n}":0' for n in range(32_000))
    vectors = ",".join(f'{{"vector":[{",".join(["0.1"] * 320)}]}}' for _ in range(100))
    bodies = [
        f"{{{members}}}",
        '{"":[' + "[]," * 32_000 + "0]}",
        "[" * 1_000_000,
        '{"text":"' + "\\u0041" * 160_000 + '"}',
        f'{{"searches":[{vectors}]}}',
        "x" * (32 << 20),
    ]
    return send_repeatedly(url, seconds, "/v1/search", [body.encode() for body in bodies])


def json_of_allowed_values(url: str, seconds: float) -> Counter[str]:
    item = {"text": "x", "fields": {str(n): [0, 0, 0] for n in range(3_000)}}
    body = json.dumps({"items": [item] * 10}, separators=(",", ":"))
    return send_repeatedly(url, seconds, "/v1/items", [body.encode()])


def idle_connections(url: str, seconds: float) -> Counter[str]:
    return send_slowly(url, seconds, [b""] * NUM_SOCKETS)


def kept_connections(url: str, seconds: float) -> Counter[str]:
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    heads = [request] * NUM_SOCKETS
    return send_slowly(url, seconds, heads, request * 20, pause=2.0, chunk_size=len(request))


def half_a_head(url: str, seconds: float) -> Counter[str]:
    head = HEAD.format(path="/v1/search", content_type=JSON, size=9)[:-4].encode()
    long_head = head + b"\r\nX: ".join([b"x" * 9_000] * 40)
    return send_slowly(url, seconds, [b"GET /hea", long_head] * (NUM_SOCKETS // 2), long_head)


def trickled_bodies(url: str, seconds: float) -> Counter[str]:
    head = HEAD.format(path="/v1/search", content_type=JSON, size=60_000).encode()
    heads = [head + b" "] * NUM_SOCKETS
    return send_slowly(url, seconds, heads, b" " * 1_000, pause=3.0, chunk_size=1)


def unfinished_uploads(url: str, seconds: float) -> Counter[str]:
    body = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"x" * (22 << 20)
    head = HEAD.format(path="/v1/items", content_type=FORM, size=len(body) + 1)
    return send_slowly(url, seconds, [head.encode()] * 120, body)


def make_form(query: dict[str, Any], picture: bytes) -> bytes:
    """Return the body of a form with a JSON part and a picture."""
    parts = {b"json": json.dumps(query).encode(), b"picture": picture}
    head = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'
    return b"".join(head % name + part + b"\r\n" for name, part in parts.items()) + b"--x--\r\n"


def hostile_uploads(url: str, seconds: float) -> Counter[str]:
    """Send large files that are not pictures, and bodies full of beginnings of a boundary."""
    item = {"items": [{"id": "x", "image": "picture"}]}
    bodies = [
        make_form(item, bytes(15 << 20)),
        make_form(item, b"\r\n--" * (4 << 20)),
        b"\r\n--x" * (6 << 20),
    ]
    return send_repeatedly(url, seconds, "/v1/items", bodies, FORM)


def unread_answers(url: str, seconds: float) -> Counter[str]:
    requests = []
    for k in (1_000, 100):
        body = json.dumps({"text": "a kite", "k": k, "where": ["fat~x"]})
        head = HEAD.format(path="/v1/search", content_type=JSON, size=len(body))
        requests.append((head + body).encode())
    return send_slowly(url, seconds, requests * 100)


def make_picture(mode: str, size: tuple[int, int], format_name: str, **options: Any) -> bytes:
    """Return a black picture file."""
    file = io.BytesIO()
    Image.new(mode, size).save(file, format_name, **options)
    return file.getvalue()


def make_segment(marker: int, data: bytes) -> bytes:
    """Return a segment of a JPEG file."""
    return bytes([0xFF, marker]) + (len(data) + 2).to_bytes(2) + data


def make_jpeg(frame_marker: int, side: int, num_colours: int, symbol: int, scans: bytes) -> bytes:
    """Return a JPEG file with flat quantisation, and Huffman tables of one symbol each."""
    frame = b"\x08" + 2 * side.to_bytes(2) + bytes([num_colours])
    frame += b"".join(bytes([colour, 0x11, 0]) for colour in range(1, num_colours + 1))
    head = make_segment(0xDB, bytes([0] + [1] * 64)) + make_segment(frame_marker, frame)
    for table, value in ((0, 0), (0x10, symbol)):
        head += make_segment(0xC4, bytes([table, 1, *[0] * 15, value]))
    return b"\xff\xd8" + head + scans + b"\xff\xd9"


def make_jpeg_of_three_scans(side: int) -> bytes:
    """Return a grey JPEG with a scan for each colour; a reader must keep all of it in memory."""
    zeros = bytes((-(-side // 8)) ** 2 // 4 + 1)
    scans = [make_segment(0xDA, bytes([1, colour, 0, 0, 63, 0])) + zeros for colour in (1, 2, 3)]
    return make_jpeg(0xC0, side, 3, 0, b"".join(scans))


def make_jpeg_of_many_scans(side: int, count: int) -> bytes:
    """Return a grey, progressive JPEG; each scan has few bytes and refines all pixels."""
    blocks = (-(-side // 8)) ** 2
    first = make_segment(0xDA, bytes([1, 1, 0, 0, 0, 0])) + bytes(blocks // 8 + 1)
    refinement = make_segment(0xDA, bytes([1, 1, 0, 1, 63, 0])) + bytes(blocks // 8_000 + 2)
    return make_jpeg(0xC2, side, 1, 0xE0, first + refinement * count)


def large_pictures(url: str, seconds: float) -> Counter[str]:
    """Send pictures with nearly the allowed number of pixels of their format, or with more."""
    rotated = Image.Exif()
    rotated[ExifTags.Base.Orientation] = 6
    large, medium = (4_990, 4_990), (3_800, 3_800)
    pictures = [
        make_picture("RGB", large, "PNG"),
        make_picture("RGBA", large, "PNG", exif=rotated),
        make_picture("I;16", large, "PNG"),
        make_picture("RGB", (256, 97_000), "PNG"),
        make_picture("RGBA", medium, "WEBP"),
        make_picture("RGB", large, "WEBP"),
        make_picture("RGB", (4_100, 4_100), "AVIF", speed=10),
        make_picture("CMYK", (4_600, 4_600), "JPEG", progressive=True),
        make_picture("RGB", large, "TIFF", compression="tiff_lzw"),
        make_jpeg_of_three_scans(4_990),
        make_jpeg_of_three_scans(13_000),
        make_jpeg_of_many_scans(4_990, 100_000),
        b"\xff\xd8" + b"\xff\xe1\x00\x09Exif\0\0x" * 1_000_000,
    ]
    bodies = [make_form({"image": "picture"}, picture) for picture in pictures]
    return send_repeatedly(url, seconds, "/v1/search", bodies, FORM)


def slow_conditions(url: str, seconds: float) -> Counter[str]:
    queries: list[dict[str, Any]] = []
    for number in range(NUM_CLIENTS):
        if number % 4 == 0:
            queries.append({"text": "a kite", "match": f"k*{' x*' * (number // 4)}"})
        else:
            where = [f"fat~{'x' * 50}{number}y{position}" for position in range(50)]
            queries.append({"text": "a kite", "where": where})
    bodies = [json.dumps(query).encode() for query in queries]
    return send_repeatedly(url, seconds, "/v1/search", bodies)


def slow_explanations(url: str, seconds: float) -> Counter[str]:
    bodies = []
    for number in range(NUM_CLIENTS):
        where = [f"fat~{number}y{position}" for position in range(50)]
        query = {"id": "fat0", "text": "a kite", "beam": 1_000, "where": where}
        bodies.append(json.dumps(query).encode())
    return send_repeatedly(url, seconds, "/v1/explain", bodies)


def wide_searches(url: str, seconds: float) -> Counter[str]:
    wide = {"k": 1_000, "beam": 1_000}
    generated = {
        "parts": [{"text": f"kite {n}"} for n in range(16)],
        "combine": "any",
        "rerank": "none",
    }
    queries = [{"text": "a kite", **wide}, {**generated, **wide}]
    bodies = [json.dumps(query).encode() for query in queries]
    return send_repeatedly(url, seconds, "/v1/search", bodies)


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        json_of_many_values,
        json_of_allowed_values,
        idle_connections,
        kept_connections,
        half_a_head,
        trickled_bodies,
        unfinished_uploads,
        hostile_uploads,
        unread_answers,
        large_pictures,
        slow_conditions,
        slow_explanations,
        wide_searches,
    )
}


def add_large_items(url: str) -> None:
    """Add items with a field of nearly the allowed length, which makes conditions slow."""
    items = []
    for n in range(300):
        fields = {"fat": f"{n} " + "x" * 60_000}
        items.append({"id": f"fat{n}", "text": f"a kite {n}", "fields": fields})
    for start in range(0, len(items), 4):
        body = {"items": items[start : start + 4]}
        httpx.post(f"{url}/v1/items", json=body, timeout=120).raise_for_status()


def watch(url: str, attack: multiprocessing.Process) -> Iterator[tuple[str, float]]:
    """Yield path and seconds of each request until the attack ends; infinity without an answer."""
    while attack.is_alive():
        for path, body in (("/healthz", None), ("/v1/search", {"text": "a red kite"})):
            began = time.monotonic()
            try:
                with httpx.Client(base_url=url, timeout=60) as client:
                    while True:
                        answer = client.request("POST" if body else "GET", path, json=body)
                        if answer.status_code != 429:
                            break
                        time.sleep(float(answer.headers["Retry-After"]))
                    answer.raise_for_status()
                yield path, time.monotonic() - began
            except httpx.HTTPError as error:
                sys.stderr.write(f"{path}: {error!r}\n")
                yield path, float("inf")
            time.sleep(0.05)


def measure(name: str, index: Path, seconds: float, flags: list[str]) -> dict[str, object]:
    with serving(index, *flags) as server:
        url, pid = server.address, server.process.pid
        if ATTACKS[name] in (slow_conditions, slow_explanations, unread_answers):
            add_large_items(url)
        before = megabytes(pid, "VmRSS")
        results: multiprocessing.SimpleQueue[Counter[str]] = multiprocessing.SimpleQueue()
        attack = multiprocessing.Process(target=lambda: results.put(ATTACKS[name](url, seconds)))
        attack.start()
        times: dict[str, list[float]] = {"/healthz": [], "/v1/search": []}
        for path, request_seconds in watch(url, attack):
            times[path].append(request_seconds)
        attack.join()
        peak = megabytes(pid, "VmHWM")
    answers = sorted(results.get().items())
    healthz_times, search_times = sorted(times["/healthz"]), sorted(times["/v1/search"])
    return {
        "attack": name.replace("_", " "),
        "answers": ", ".join(f"{status} x {count}" for status, count in answers),
        "/healthz, worst s": round(healthz_times[-1], 2),
        "times": len(healthz_times),
        "another's search, median s": round(search_times[len(search_times) // 2], 2),
        "worst s": round(search_times[-1], 2),
        "MB before": round(before),
        "MB at most": round(peak),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("index", type=Path, help="copied first, so it stays as it is")
    parser.add_argument("--only", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments, flags = parser.parse_known_args()
    flags = [flag for flag in flags if flag != "--"]
    multiprocessing.set_start_method("fork")
    has_failed = False
    for number, name in enumerate(arguments.only):
        row = measure(name, arguments.index, arguments.seconds, flags)
        if not number:
            print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
        print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
        has_failed |= row["/healthz, worst s"] > MAX_HEALTHZ_SECONDS
        has_failed |= row["MB at most"] > MAX_SERVER_MB or row["worst s"] == float("inf")
    return int(has_failed)


if __name__ == "__main__":
    raise SystemExit(main())
