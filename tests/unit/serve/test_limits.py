"""Bodies that never end, and bodies that are given back."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features
from starlette.requests import Request

from genius_search.errors import BadImage
from genius_search.serve import adding, bodies, limits
from genius_search.serve.bodies import BodyLimits, check_values
from genius_search.serve.guard import STREAM_PATH, Problem
from genius_search.serve.pictures import Pictures
from genius_search.serve.schemas import NewItem

from .test_guard import is_problem

SCOPE = {"type": "http", "path": "/v1/search", "headers": [(b"content-type", b"application/json")]}


async def read_all(scope, receive, send):
    await Request(scope, receive).body()


async def ignore(message):
    pass


async def nobody():
    raise AssertionError


def test_a_body_that_stops_coming_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.01)
    sent = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive():
        if not sent:
            await asyncio.sleep(60)
        return sent.pop()

    with pytest.raises(Problem, match=r"0\.01 seconds") as raised:
        asyncio.run(BodyLimits(read_all)(SCOPE, receive, ignore))
    assert raised.value.status_code == 408


def test_what_was_held_for_a_request_is_given_back_however_it_ends(monkeypatch):
    monkeypatch.setattr(limits, "BODIES_BYTES", 100)
    limited = BodyLimits(read_all)

    async def receive():
        return {"type": "http.request", "body": b"x" * 60, "more_body": False}

    async def endless():
        return {"type": "http.request", "body": b"x" * 60, "more_body": True}

    async def scenario():
        for _ in range(5):
            await limited(SCOPE, receive, ignore)
            with pytest.raises(Problem, match="429"):
                await limited(SCOPE, endless, ignore)

    asyncio.run(scenario())


def test_a_stream_may_go_on_but_a_body_that_only_says_how_long_it_is_may_not():
    async def nothing(scope, receive, send):
        pass

    headers = [(b"content-length", str(limits.BODY_BYTES + 1).encode())]
    stream = {"type": "http", "headers": headers, "path": STREAM_PATH}
    asyncio.run(BodyLimits(nothing)(stream, nobody, ignore))
    with pytest.raises(Problem, match="413"):
        asyncio.run(BodyLimits(nothing)({**SCOPE, "headers": headers}, nobody, ignore))


@settings(max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(alphabet='a",:[]{}\\\n'),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a",[]{}\\'), inner),
    ),
    st.sampled_from([None, 2]),
)
def test_the_values_of_a_text_are_counted_before_they_are_made(value, indent):
    def count(value: object) -> int:
        inner = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        return 1 + sum(map(count, inner))

    text = json.dumps(value, indent=indent).encode()
    check_values(text, 2 * count(value))
    with pytest.raises(Problem, match="413"):
        check_values(text, (count(value) - 1) // 2 - 1)


@pytest.mark.parametrize(
    "body",
    [
        b"{" + b",".join(b'"k%d":[]' % number for number in range(limits.VALUES)) + b"}",
        b'{"parts": [' + b"[]," * limits.VALUES + b"[]]}",
        b'{"where": [' + b'{"":""},' * limits.VALUES + b"1]}",
        b"[" * (limits.VALUES + 1),
        b'"' * (4 * limits.VALUES + 1),
    ],
)
def test_json_with_too_many_values_is_refused(client, body):
    for path in ("/v1/search", "/v1/explain", "/v1/items/delete"):
        is_problem(client.post(path, content=body, headers={"Content-Type": "application/json"}), 413)


def test_json_as_deep_as_can_be_is_no_error_of_the_server(client):
    json_type = {"Content-Type": "application/json"}
    for depth in (100, 900, 5_000):
        nested = b"[" * depth + b"]" * depth
        assert client.post("/v1/search", content=nested, headers=json_type).status_code in (400, 422)
        item = b'{"items": [{"text": "x", "fields": {"a": %b}}]}' % nested
        assert client.post("/v1/items", content=item, headers=json_type).status_code in (400, 422)


def test_a_body_that_can_have_no_picture_is_small(client):
    body = b" " * (limits.SMALL_BODY_BYTES + 1)
    for path, status in (("/v1/items/delete", 413), ("/v1/search", 422)):
        response = client.post(path, content=body, headers={"Content-Type": "application/json"})
        is_problem(response, status)


def test_what_is_in_memory_of_a_stream_counts_until_it_is_added(monkeypatch):
    monkeypatch.setattr(limits, "BODIES_BYTES", 100)

    async def stream(scope, receive, send):
        scope["state"]["seen"] = 0
        async for chunk in Request(scope, receive).stream():
            scope["state"]["seen"] += len(chunk)
            if scope["adds"]:
                scope["state"]["hold"](0)

    def chunks():
        sent = [
            {"type": "http.request", "body": b"x" * 60, "more_body": more} for more in (False, True, True)
        ]

        async def receive():
            return sent.pop()

        return receive

    async def scenario():
        limited = BodyLimits(stream)
        for adds in (True, False):
            scope = {"type": "http", "path": STREAM_PATH, "headers": [], "adds": adds}
            if adds:
                await limited(scope, chunks(), ignore)
                assert scope["state"]["seen"] == 180
            else:
                with pytest.raises(Problem, match="429"):
                    await limited(scope, chunks(), ignore)

    asyncio.run(scenario())


def test_the_fields_of_an_item_are_read_beside_the_event_loop(monkeypatch):
    """A single item may have 64 kB of them, and a request a thousand items."""
    threads = []
    check = adding._check_contents
    monkeypatch.setattr(
        adding, "_check_contents", lambda item: threads.append(threading.current_thread()) or check(item)
    )

    async def scenario():
        return await adding._read_item(Pictures(), NewItem(text="x", fields={"a": 1}))

    assert asyncio.run(scenario()).fields == {"a": 1}
    assert threads[0] is not threading.current_thread()


def test_few_large_bodies_are_parsed_at_a_time_and_small_ones_meanwhile(monkeypatch):
    """Many threads that parse would keep the searches waiting."""
    lock, running, most = threading.Lock(), [], []
    has_begun, may_end = threading.Event(), threading.Event()
    parse = bodies.parse_json

    def slow(body, values):
        if len(body) > bodies.LARGE_BYTES:
            with lock:
                running.append(1)
                most.append(len(running))
                if len(running) == 2:
                    has_begun.set()
            assert may_end.wait(60)
            with lock:
                running.pop()
        return parse(body, values)

    monkeypatch.setattr(bodies, "parse_json", slow)

    async def read(body: bytes):
        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        return await bodies._JsonRequest({**SCOPE, "server": ("localhost", 80)}, receive).json()

    async def scenario():
        large = [asyncio.create_task(read(b" " * 70_000 + b"1")) for _ in range(8)]
        await asyncio.to_thread(has_begun.wait, 60)
        assert await read(b"2") == 2
        may_end.set()
        assert await asyncio.gather(*large) == [1] * 8

    asyncio.run(scenario())
    assert max(most) == 2


def avif(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "AVIF", speed=10, subsampling="4:4:4")
    return file.getvalue()


@pytest.mark.skipif(
    not features.check("avif") or sys.platform != "linux", reason="needs AVIF, and memory limits"
)
@pytest.mark.parametrize("brand", [b"avif", b"mif1"])
def test_an_avif_picture_that_is_larger_than_it_says_is_refused(client, monkeypatch, brand):
    whole = avif(2_500).replace(b"ftypavif", b"ftyp" + brand)
    place = whole.index(b"ispe") + 8
    smaller = whole[:place] + (200).to_bytes(4) * 2 + whole[place + 8 :]

    def search(data: bytes):
        return client.post("/v1/search", json={"image": base64.b64encode(data).decode(), "k": 1})

    assert search(smaller).status_code == 200
    monkeypatch.setattr(limits, "PICTURE_PIXELS", 4_000_000)
    assert "takes more than 28 MB" in is_problem(search(smaller), 422)["detail"]
    assert search(avif(200).replace(b"ftypavif", b"ftyp" + brand)).status_code == 200
    assert is_problem(search(avif(64)[:-20]), 422)


def test_nothing_of_a_picture_that_cannot_be_read_stays_in_memory():
    async def refuse():
        with pytest.raises(BadImage):
            await Pictures().decode(b"no picture")

    asyncio.run(refuse())
    gc.collect()
    gc.disable()
    try:
        asyncio.run(refuse())
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [one for one in gc.garbage if isinstance(one, BadImage)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
