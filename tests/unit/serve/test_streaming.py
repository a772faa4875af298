"""Items as lines, acknowledged batch by batch."""

from __future__ import annotations

import asyncio
import json

import pytest

from genius_search.serve import adding, limits
from genius_search.serve.engine import Draining, Overloaded

LINES = {"Content-Type": "application/x-ndjson"}


def acknowledged(response) -> list[dict]:
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def lines(count: int) -> bytes:
    return b"".join(json.dumps({"id": f"n{n}", "text": f"number {n}"}).encode() + b"\n" for n in range(count))


def test_each_batch_of_a_stream_is_acknowledged_and_all_of_it_is_found(writable, found, monkeypatch):
    monkeypatch.setattr(adding, "BATCH_ITEMS", 4)
    sent = lines(10)

    def parts():
        for start in range(0, len(sent), 7):  # wherever a line may be cut
            yield sent[start : start + 7]

    answer = acknowledged(writable.post("/v1/items/stream", content=parts(), headers=LINES))
    assert [one["added"] for one in answer] == [4, 4, 2]
    assert answer[1]["ids"] == ["n4", "n5", "n6", "n7"]
    assert {f"n{n}" for n in range(10)} < found()


def test_invalid_lines_are_left_out_and_the_others_are_added(writable, monkeypatch):
    monkeypatch.setattr(limits, "LINE_BYTES", 200)
    sent = (
        b'{"id": "a", "text": "a drum"}\n\nnot json\n{"id": "b"}\n{"idd": 1}\n{"text": "%b"}\n{"id":"c","text":"x"}'
        % (b"x" * 300)
    )
    (answer,) = acknowledged(writable.post("/v1/items/stream", content=sent, headers=LINES))
    assert answer["added"] == 2
    assert [one["id"] for one in answer["left_out"]] == ["line 3", "b", "line 5", "line 6"]
    assert "more than 200 bytes" in answer["left_out"][3]["reason"]
    assert acknowledged(writable.post("/v1/items/stream", content=b"", headers=LINES)) == []


def test_a_stream_says_how_much_of_it_is_in_memory():
    async def chunks():
        for chunk in (b'{"text": "a"}\n{"te', b'xt": "b"}', b"\n{}"):
            yield chunk

    held = []

    async def read():
        return [item async for batch in adding._batches(chunks(), held.append) for item in batch]

    assert len(asyncio.run(read())) == 3
    assert held == [17, 26, 28, 28]


def test_a_line_with_too_many_values_is_left_out(writable, monkeypatch):
    monkeypatch.setattr(limits, "ITEMS_VALUES", 10)
    sent = b'{"text": "a drum"}\n{"text": "x", "fields": {"a": [1,2,3,4,5,6,7,8,9,10]}}'
    (answer,) = acknowledged(writable.post("/v1/items/stream", content=sent, headers=LINES))
    assert (answer["added"], [one["id"] for one in answer["left_out"]]) == (1, ["line 2"])


def test_a_stream_waits_for_an_index_that_is_busy(writable, found, monkeypatch):
    engine = writable.app.state.service.engine
    add, busy = engine.add, [Overloaded("busy", retry_after_seconds=0.0)] * 3

    async def sometimes(name, items):
        if busy:
            raise busy.pop()
        return await add(name, items)

    monkeypatch.setattr(engine, "add", sometimes)
    (answer,) = acknowledged(writable.post("/v1/items/stream", content=lines(2), headers=LINES))
    assert answer["added"] == 2
    assert not busy


@pytest.mark.parametrize("error", [Draining(), RuntimeError("secret")])
def test_an_error_in_the_middle_is_the_last_line(writable, monkeypatch, error):
    async def fail(*_):
        raise error

    monkeypatch.setattr(writable.app.state.service.engine, "add", fail)
    (answer,) = acknowledged(writable.post("/v1/items/stream", content=lines(2), headers=LINES))
    assert answer["status"] == (503 if isinstance(error, Draining) else 500)
    assert "secret" not in json.dumps(answer)
