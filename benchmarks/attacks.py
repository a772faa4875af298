"""Attack a service in several ways, and measure its memory and what other clients notice.

Usage: python benchmarks/attacks.py INDEX [--only NAME ...] [--seconds 15] [-- flags of `genius serve`]

Each attack has a new `genius serve` on a copy of the index, and a process of its own. Meanwhile this process
asks for `/healthz` and searches, one after the other, each time with a new connection; told to try again, as its
address is the attacker's too, it does. Prints a table; exits with 1 if an answer to `/healthz` took more than a
second, there was none to a search, or the server took more than 600 MB.
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

MOST_SECONDS = 1.0
MOST_MB = 600
SOCKETS = 1_100
CLIENTS = 16
JSON = "application/json"
FORM = "multipart/form-data; boundary=x"
HEAD = "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n\r\n"

Attack = Callable[[str, float], Counter[str]]


def send_repeatedly(
    url: str, seconds: float, path: str, bodies: list[bytes], kind: str = JSON
) -> Counter[str]:
    """Send bodies from many clients at once, again and again; return how often each status was answered."""
    until = time.monotonic() + seconds

    def send(number: int) -> Counter[str]:
        seen: Counter[str] = Counter()
        with httpx.Client(base_url=url, timeout=120) as client:
            for body in itertools.islice(itertools.cycle(bodies), number, None):
                if time.monotonic() > until:
                    return seen
                try:
                    answer = client.post(path, content=body, headers={"Content-Type": kind})
                    seen[str(answer.status_code)] += 1
                except httpx.HTTPError as error:
                    seen[type(error).__name__] += 1
        return seen

    with ThreadPoolExecutor(CLIENTS) as threads:
        return sum(threads.map(send, range(CLIENTS)), Counter())


def send_slowly(
    url: str,
    seconds: float,
    starts: list[bytes],
    rest: bytes = b"",
    *,
    pause: float = 0.001,
    size: int = 1 << 18,
) -> Counter[str]:
    """Open many connections, send a beginning on each and then, slowly, the rest; read nothing until the end."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    place, until = urlsplit(url), time.monotonic() + seconds
    seen: Counter[str] = Counter()
    open_ones: list[socket.socket] = []
    for start in starts:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(5)
        try:
            one.connect((place.hostname or "", place.port or 0))
            one.setblocking(False)
            one.send(start)
        except OSError as error:
            seen[type(error).__name__] += 1
        open_ones.append(one)
    left = {one: memoryview(rest) for one in open_ones}
    while time.monotonic() < until:
        for one, data in left.items():
            try:
                left[one] = data[one.send(data[:size]) :] if data else data
            except BlockingIOError:
                continue
            except OSError:
                left[one] = data[:0]
        time.sleep(pause)
    for one in open_ones:
        try:
            answer = one.recv(64)
            seen[answer[9:12].decode() if answer else "closed"] += 1
        except BlockingIOError:
            seen["open"] += 1
        except OSError:
            seen["closed"] += 1
    return seen


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
    fields = ",".join(f'"{n}":[0,0,0]' for n in range(3_000))
    body = (
        json.dumps({"items": []})[:-2]
        + ",".join([f'{{"text":"x","fields":{{{fields}}}}}'] * 10)
        + "]}"
    )
    return send_repeatedly(url, seconds, "/v1/items", [body.encode()])


def idle_connections(url: str, seconds: float) -> Counter[str]:
    return send_slowly(url, seconds, [b""] * SOCKETS)


def kept_connections(url: str, seconds: float) -> Counter[str]:
    ask = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return send_slowly(url, seconds, [ask] * SOCKETS, ask * 20, pause=2.0, size=len(ask))


def half_a_head(url: str, seconds: float) -> Counter[str]:
    head = HEAD.format(path="/v1/search", kind=JSON, size=9)[:-4].encode()
    fat = head + b"\r\nX: ".join([b"x" * 9_000] * 40)
    return send_slowly(url, seconds, [b"GET /hea", fat] * (SOCKETS // 2), fat)


def trickled_bodies(url: str, seconds: float) -> Counter[str]:
    head = HEAD.format(path="/v1/search", kind=JSON, size=60_000).encode()
    return send_slowly(url, seconds, [head + b" "] * SOCKETS, b" " * 1_000, pause=3.0, size=1)


def unfinished_uploads(url: str, seconds: float) -> Counter[str]:
    body = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"x" * (22 << 20)
    head = HEAD.format(path="/v1/items", kind=FORM, size=len(body) + 1)
    return send_slowly(url, seconds, [head.encode()] * 120, body)


def form_of(query: dict[str, Any], picture: bytes) -> bytes:
    parts = {"json": json.dumps(query).encode(), "picture": picture}
    each = [
        b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (n.encode(), p)
        for n, p in parts.items()
    ]
    return b"".join(each) + b"--x--\r\n"


def hostile_uploads(url: str, seconds: float) -> Counter[str]:
    """Large pictures that are none, and bodies with as many beginnings of a boundary as fit."""
    item = {"items": [{"id": "x", "image": "picture"}]}
    bodies = [
        form_of(item, bytes(15 << 20)),
        form_of(item, b"\r\n--" * (4 << 20)),
        b"\r\n--x" * (6 << 20),
    ]
    return send_repeatedly(url, seconds, "/v1/items", bodies, FORM)


def unread_answers(url: str, seconds: float) -> Counter[str]:
    bodies = [json.dumps({"text": "a kite", "k": k, "where": ["fat~x"]}) for k in (1_000, 100)]
    heads = [HEAD.format(path="/v1/search", kind=JSON, size=len(body)) for body in bodies]
    return send_slowly(
        url, seconds, [(a + b).encode() for a, b in zip(heads, bodies, strict=True)] * 100
    )


def saved(mode: str, size: tuple[int, int], kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()


def segment(kind: int, data: bytes) -> bytes:
    return bytes([0xFF, kind]) + (len(data) + 2).to_bytes(2) + data


def jpeg(kind: int, side: int, colours: int, symbol: int, scans: bytes) -> bytes:
    frame = b"\x08" + 2 * side.to_bytes(2) + bytes([colours])
    frame += b"".join(bytes([one, 0x11, 0]) for one in range(1, colours + 1))
    tables = [segment(0xC4, bytes([to, 1, *[0] * 15, one])) for to, one in ((0, 0), (0x10, symbol))]
    head = segment(0xDB, bytes([0] + [1] * 64)) + segment(kind, frame)
    return b"\xff\xd8" + head + b"".join(tables) + scans + b"\xff\xd9"


def in_three_scans(side: int) -> bytes:
    """Make a grey JPEG whose colours come one after the other, so that all of it is kept while it is read."""
    zeros = bytes((-(-side // 8)) ** 2 // 4 + 1)
    scans = [segment(0xDA, bytes([1, one, 0, 0, 63, 0])) + zeros for one in (1, 2, 3)]
    return jpeg(0xC0, side, 3, 0, b"".join(scans))


def in_many_scans(side: int, count: int) -> bytes:
    """Make a grey, progressive JPEG of scans that go over all pixels, in a few bytes each."""
    blocks = (-(-side // 8)) ** 2
    first = segment(0xDA, bytes([1, 1, 0, 0, 0, 0])) + bytes(blocks // 8 + 1)
    again = segment(0xDA, bytes([1, 1, 0, 1, 63, 0])) + bytes(blocks // 8_000 + 2)
    return jpeg(0xC2, side, 1, 0xE0, first + again * count)


def large_pictures(url: str, seconds: float) -> Counter[str]:
    """Pictures of nearly as many pixels as are allowed for their format, and some of more."""
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    whole, half = (4_990, 4_990), (3_800, 3_800)
    pictures = [
        saved("RGB", whole, "PNG"),
        saved("RGBA", whole, "PNG", exif=turned),
        saved("I;16", whole, "PNG"),
        saved("RGB", (256, 97_000), "PNG"),
        saved("RGBA", half, "WEBP"),
        saved("RGB", whole, "WEBP"),
        saved("RGB", (4_100, 4_100), "AVIF", speed=10),
        saved("CMYK", (4_600, 4_600), "JPEG", progressive=True),
        saved("RGB", whole, "TIFF", compression="tiff_lzw"),
        in_three_scans(4_990),
        in_three_scans(13_000),
        in_many_scans(4_990, 100_000),
        b"\xff\xd8" + b"\xff\xe1\x00\x09Exif\0\0x" * 1_000_000,
    ]
    bodies = [form_of({"image": "picture"}, one) for one in pictures]
    return send_repeatedly(url, seconds, "/v1/search", bodies, FORM)


def slow_conditions(url: str, seconds: float) -> Counter[str]:
    bodies = [
        {"text": "a kite", "where": [f"fat~{'x' * 50}{number}y{place}" for place in range(50)]}
        for number in range(CLIENTS)
    ]
    bodies[::4] = [
        {"text": "a kite", "match": f"k*{' x*' * place}"} for place in range(CLIENTS // 4)
    ]
    return send_repeatedly(
        url, seconds, "/v1/search", [json.dumps(body).encode() for body in bodies]
    )


def slow_explanations(url: str, seconds: float) -> Counter[str]:
    body = {"id": "fat0", "text": "a kite", "beam": 1_000}
    conditions = [[f"fat~{number}y{place}" for place in range(50)] for number in range(CLIENTS)]
    bodies = [json.dumps({**body, "where": where}).encode() for where in conditions]
    return send_repeatedly(url, seconds, "/v1/explain", bodies)


def wide_searches(url: str, seconds: float) -> Counter[str]:
    wide = {"k": 1_000, "beam": 1_000}
    generated = {
        "parts": [{"text": f"kite {n}"} for n in range(16)],
        "combine": "any",
        "rerank": "none",
    }
    bodies = [{"text": "a kite", **wide, "candidates": 100_000}, {**generated, **wide}]
    return send_repeatedly(
        url, seconds, "/v1/search", [json.dumps(body).encode() for body in bodies]
    )


ATTACKS: dict[str, Attack] = {
    one.__name__: one
    for one in (
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


def add_fat_items(url: str) -> None:
    """Add items with as large a field as is allowed, for conditions that take long."""
    items = [
        {"id": f"fat{n}", "text": f"a kite {n}", "fields": {"fat": f"{n} " + "x" * 60_000}}
        for n in range(300)
    ]
    for start in range(0, len(items), 4):
        body = {"items": items[start : start + 4]}
        httpx.post(f"{url}/v1/items", json=body, timeout=120).raise_for_status()


def watch(url: str, attack: multiprocessing.Process) -> Iterator[tuple[str, float]]:
    """Yield how long each answer took, until the attack has ended; infinity if there was none."""
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
            add_fat_items(url)
        before = megabytes(pid, "VmRSS")
        answers: multiprocessing.SimpleQueue[Counter[str]] = multiprocessing.SimpleQueue()
        attack = multiprocessing.Process(target=lambda: answers.put(ATTACKS[name](url, seconds)))
        attack.start()
        times: dict[str, list[float]] = {"/healthz": [], "/v1/search": []}
        for path, took in watch(url, attack):
            times[path].append(took)
        attack.join()
        peak = megabytes(pid, "VmHWM")
    return {
        "attack": name.replace("_", " "),
        "answers": ", ".join(
            f"{status} x {count}" for status, count in sorted(answers.get().items())
        ),
        "/healthz, worst s": round(max(times["/healthz"]), 2),
        "times": len(times["/healthz"]),
        "another's search, median s": round(
            sorted(times["/v1/search"])[len(times["/v1/search"]) // 2], 2
        ),
        "worst s": round(max(times["/v1/search"]), 2),
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
    bad = False
    for number, name in enumerate(arguments.only):
        row = measure(name, arguments.index, arguments.seconds, flags)
        if not number:
            print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
        print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
        bad |= row["/healthz, worst s"] > MOST_SECONDS or row["MB at most"] > MOST_MB
        bad |= row["worst s"] == float("inf")
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
