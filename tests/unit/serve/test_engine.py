"""The engine answers many at once, and searches go on while items come and go."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from genius_search.config import SearchConfig
from genius_search.errors import ArtifactError, UsageError
from genius_search.index.adding import NewItem
from genius_search.index.index import Index
from genius_search.index.requests import SearchPart, SearchRequest
from genius_search.index.snapshot import Snapshot
from genius_search.index.writer import one_writer
from genius_search.model import Genius
from genius_search.serve import engine as engine_module
from genius_search.serve.engine import Draining, Engine, EngineSettings, Overloaded

WIDE = SearchConfig(beam=200)
NARROW = SearchConfig(beam=20, rerank="none")


@pytest.fixture
def folder(model, tmp_path) -> Path:
    """A new index of forty texts."""
    pool = tmp_path / "pool"
    pool.mkdir()
    for number in range(40):
        (pool / f"{number}.txt").write_text(f"a {('red', 'green', 'blue')[number % 3]} kite, number {number}")
    Index.create(tmp_path / "kites.index", model=model, pool=pool)
    return tmp_path / "kites.index"


@asynccontextmanager
async def running(folder: Path, model: Genius, **settings) -> AsyncIterator[Engine]:
    engine = Engine({"kites": Index(folder, model)}, EngineSettings(**settings))
    assert not engine.is_ready
    await engine.start()
    assert engine.is_ready
    try:
        yield engine
    finally:
        await engine.stop()


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def measured(engine: Engine, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = generate_latest(engine.metrics.registry).decode().splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)]
    assert values, name
    return sum(values)


def test_requests_at_once_get_what_each_would_alone(folder, model):
    requests = [SearchRequest(text=f"a green kite, number {n}", k=1 + n % 4) for n in range(24)]
    configs = [WIDE if n % 3 else NARROW for n in range(24)]
    index = Index(folder, model)
    expected = [index.search_many([one], config=c)[0] for one, c in zip(requests, configs, strict=True)]

    async def test():
        async with running(folder, model, max_batch=8, batch_wait_ms=50.0) as engine:
            answers = await asyncio.gather(
                *(engine.search("kites", one, c) for one, c in zip(requests, configs, strict=True))
            )
            for answer, hits in zip(answers, expected, strict=True):
                assert [hit.id for hit in answer.hits] == [hit.id for hit in hits]
                assert [hit.score for hit in answer.hits] == pytest.approx(
                    [hit.score for hit in hits], abs=1e-4
                )
                timing = answer.timing
                assert timing.total >= timing.queue + timing.encode + timing.search - 1
                assert min(timing.queue, timing.encode, timing.search) >= 0
            assert measured(engine, "genius_search_batch_size_sum") == 25  # and the one that start() makes
            assert measured(engine, "genius_search_batch_size_count") == 1 + 1 + 2
            assert measured(engine, "genius_stage_seconds_count") == 3 * 24

    on_loop(test)


def test_a_bad_request_spoils_no_other_in_its_batch(folder, model):
    bad = [
        SearchRequest(text=""),
        SearchRequest(text="half \ud800"),
        SearchRequest(text="a kite", k=0),
        SearchRequest(parts=(SearchPart(id="nobody"),)),
    ]
    good = [SearchRequest(text=f"a blue kite, number {n}", k=3) for n in range(12)]
    mixed = [*good[:5], *bad[:2], *good[5:], *bad[2:]]

    async def test():
        async with running(folder, model, batch_wait_ms=50.0) as engine:
            answers = await asyncio.gather(
                *(engine.search("kites", one, WIDE) for one in mixed), return_exceptions=True
            )
            for request, answer in zip(mixed, answers, strict=True):
                if request in good:
                    assert len(answer.hits) == 3
                else:
                    assert isinstance(answer, UsageError)
            assert measured(engine, "genius_errors_total") == len(bad)

    on_loop(test)


def test_an_unexpected_error_fails_one_request_and_verifies_the_index_at_most_once(
    folder, model, monkeypatch
):
    restriction, verified = Snapshot.restriction, []

    def broken(self, wanted, **more):
        if wanted.match == "broken":
            raise ValueError("a bug")
        return restriction(self, wanted, **more)

    monkeypatch.setattr(Snapshot, "restriction", broken)
    monkeypatch.setattr("genius_search.index.verify.verify", verified.append)

    async def test():
        async with running(folder, model, batch_wait_ms=50.0) as engine:
            requests = [SearchRequest(text="a kite", match="broken" if n == 5 else "kite") for n in range(16)]
            answers = await asyncio.gather(
                *(engine.search("kites", one, WIDE) for one in requests), return_exceptions=True
            )
            assert [isinstance(answer, ValueError) for answer in answers] == [n == 5 for n in range(16)]
            with pytest.raises(ValueError, match="a bug"):
                await engine.search("kites", requests[5], WIDE)
            assert len(verified) <= 1

    on_loop(test)


def test_what_is_added_is_found_at_once_and_what_is_deleted_no_more(folder, model):
    async def test():
        async with running(folder, model) as engine:
            outcomes = await engine.add(
                "kites",
                [
                    NewItem("new", "a striped umbrella", fields={"price": 3}),
                    NewItem("0.txt", "a drum"),
                    NewItem("x"),
                ],
            )
            assert [outcome.status for outcome in outcomes] == ["added", "replaced", "left out"]
            hits = (await engine.search("kites", SearchRequest(text="a striped umbrella", k=50), WIDE)).hits
            assert {"new", "0.txt"} < {hit.id for hit in hits}
            deleted = await engine.delete("kites", ["new", "nobody", "new"])
            assert (deleted.deleted, deleted.missing) == (1, ["nobody"])
            hits = (await engine.search("kites", SearchRequest(text="a striped umbrella", k=50), WIDE)).hits
            assert "new" not in {hit.id for hit in hits}
            assert measured(engine, 'genius_items{index="kites"}') == 40
            assert measured(engine, 'genius_items_changed_total{became="added"') == 1

    on_loop(test)


def test_adds_at_once_share_one_change_and_each_hears_of_its_own_items(folder, model):
    async def test():
        async with running(folder, model, write_wait_ms=200.0) as engine:
            before = engine.indexes["kites"].info().generation
            added = await asyncio.gather(
                *(
                    engine.add("kites", [NewItem(f"{n}-{m}", f"a drum {n} {m}") for m in range(n)])
                    for n in range(1, 9)
                )
            )
            for n, outcomes in enumerate(added, 1):
                assert [(one.id, one.status) for one in outcomes] == [(f"{n}-{m}", "added") for m in range(n)]
            assert engine.indexes["kites"].info().generation == before + 1
            gone = await asyncio.gather(
                engine.delete("kites", ["1-0", "2-0", "no"]), engine.delete("kites", ["1-0", "3-0"])
            )
            assert [(one.deleted, one.missing) for one in gone] == [(2, ["no"]), (1, ["1-0"])]
            assert engine.indexes["kites"].info().generation == before + 2

    on_loop(test)


def test_searches_go_on_while_items_come_and_go_and_the_index_compacts(folder, model):
    async def test():
        async with running(folder, model) as engine:
            is_over = False
            answered = 0

            async def search_on() -> None:
                nonlocal answered
                while not is_over:
                    hits = (await engine.search("kites", SearchRequest(text="a red kite", k=100), WIDE)).hits
                    assert {f"{n}.txt" for n in range(20, 40)} <= {hit.id for hit in hits}
                    answered += 1

            async def change() -> None:
                for n in range(12):
                    await engine.add("kites", [NewItem(f"drum {n}", f"a drum, number {n}")])
                    hits = await engine.search("kites", SearchRequest(text="a drum", k=100), WIDE)
                    assert f"drum {n}" in {hit.id for hit in hits.hits}
                    await engine.delete("kites", [f"{n}.txt"])

            searching = [asyncio.create_task(search_on()) for _ in range(3)]
            await change()
            is_over = True
            await asyncio.gather(*searching)
            assert answered > 10
            await engine.stop()  # compaction included
            assert measured(engine, "genius_compactions_total") >= 1
            assert measured(engine, 'genius_items{index="kites"}') == 40
            assert measured(engine, "genius_deleted_items") <= 10  # a fifth of all that is stored

    on_loop(test)


def test_an_index_that_another_process_changes_is_busy_for_now(folder, model, monkeypatch):
    monkeypatch.setattr(engine_module, "PATIENCE_SECONDS", 1.0)

    async def test():
        async with running(folder, model, write_wait_ms=50.0) as engine:
            began = time.monotonic()
            with one_writer(folder):
                answers = await asyncio.gather(
                    *(engine.add("kites", [NewItem(str(n), "a drum")]) for n in range(9)),
                    return_exceptions=True,
                )
            assert all(isinstance(answer, Overloaded) for answer in answers)
            assert time.monotonic() - began < 6  # once for all nine
            assert (await engine.add("kites", [NewItem("1", "a drum")]))[0].status == "added"

    on_loop(test)


def test_look_ups_run_beside_searches_and_pass_on_their_errors(folder, model):
    async def test():
        async with running(folder, model) as engine:
            assert await engine.read("kites", lambda index: index.info().items) == 40
            with pytest.raises(ZeroDivisionError):
                await engine.read("kites", lambda index: 1 // 0)
            assert measured(engine, 'genius_errors_total{kind="ZeroDivisionError"}') == 1

    on_loop(test)


def test_stopping_finishes_accepted_requests_and_refuses_new_ones(folder, model):
    async def test():
        async with running(folder, model, batch_wait_ms=10_000.0, write_wait_ms=10_000.0) as engine:
            search = asyncio.create_task(engine.search("kites", SearchRequest(text="a kite"), WIDE))
            add = asyncio.create_task(engine.add("kites", [NewItem("last", "a drum")]))
            await asyncio.sleep(0.05)
            await engine.stop()
            assert (await search).hits
            assert (await add)[0].status == "added"
            for late in (
                engine.search("kites", SearchRequest(text="a kite"), WIDE),
                engine.add("kites", [NewItem("late", "a drum")]),
                engine.read("kites", lambda index: 1),
            ):
                with pytest.raises(Draining):
                    await late

    on_loop(test)
    assert "last" in {hit.id for hit in Index(folder, model).search(text="a drum", k=50, config=WIDE)}


def test_a_damaged_index_fails_every_request_and_the_engine_continues(folder, model):
    async def test():
        async with running(folder, model) as engine:
            manifest = folder / "index.json"
            whole = manifest.read_bytes()
            manifest.write_text("{")
            answers = await asyncio.gather(
                *(engine.search("kites", SearchRequest(text="a kite"), WIDE) for _ in range(3)),
                return_exceptions=True,
            )
            assert all(isinstance(answer, ArtifactError) for answer in answers)
            with pytest.raises(ArtifactError):
                await engine.add("kites", [NewItem("1", "a drum")])
            manifest.write_bytes(whole)
            assert (await engine.search("kites", SearchRequest(text="a kite"), WIDE)).hits

    on_loop(test)


def test_a_search_whose_conditions_are_slow_delays_no_other(folder, model, monkeypatch):
    restriction = Snapshot.restriction
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(self, wanted, **more):
        if wanted.match == "kite":
            has_begun.set()
            assert may_end.wait(60)
        return restriction(self, wanted, **more)

    monkeypatch.setattr(Snapshot, "restriction", slow)

    async def test():
        async with running(folder, model) as engine:
            try:
                slow = asyncio.create_task(
                    engine.search("kites", SearchRequest(text="a kite", match="kite"), WIDE)
                )
                await asyncio.to_thread(has_begun.wait, 60)
                quick = [SearchRequest(text="a red kite"), SearchRequest(text="a kite", match="red", k=3)]
                answers = await asyncio.wait_for(
                    asyncio.gather(*(engine.search("kites", one, WIDE) for one in quick)), 60
                )
                assert [len(answer.hits) for answer in answers] == [10, 3]
                await engine.add("kites", [NewItem("new", "a new kite")])
                assert not slow.done()
            finally:
                may_end.set()
            assert len((await slow).hits) == 10

    on_loop(test)


def test_conditions_hold_in_the_state_that_is_searched(folder, model, monkeypatch):
    """An index that changes after the conditions were looked up and before the search."""
    find = engine_module.find_constraints

    def change(model, snapshot, request):
        found = find(model, snapshot, request)
        if request.match == "number":
            Index(folder, model).delete(["0.txt"])
            Index(folder, model).compact()
        return found

    monkeypatch.setattr(engine_module, "find_constraints", change)

    async def test():
        async with running(folder, model) as engine:
            for expected in (40, 39):
                answer = await engine.search(
                    "kites", SearchRequest(text="a kite", match="number", k=50), WIDE
                )
                assert len(answer.hits) == expected

    on_loop(test)
