"""Items come and go while others search: what is acknowledged is there, and the index is kept small."""

from __future__ import annotations

import threading
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from genius_search.index.index import Index
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import read_manifest
from genius_search.index.writer import open_writer
from genius_search.serve import service
from genius_search.serve.watch import FileWatch

from .conftest import make_index, serving
from .test_guard import is_problem


def test_changes_at_once_are_all_made_and_searches_go_on(writable, ids_of_all):
    def change(number: int) -> list[int]:
        items = [
            {"id": f"{number}-{place}", "text": f"a drum {number} {place}"} for place in range(3)
        ]
        added = writable.post("/v1/items", json={"items": items})
        gone = writable.delete("/v1/items", params={"id": f"{number}-0"})
        searched = writable.post("/v1/search", json={"text": "a kite"})
        return [added.json()["added"], gone.json()["deleted"], len(searched.json()["hits"])]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(change, range(16))) == [[3, 1, 10]] * 16
    assert {f"{n}-{place}" for n in range(16) for place in (1, 2)} <= ids_of_all()
    index = writable.app.state.service.indexes["things"]
    assert Index.open(index.folder, model=index.model).check().items == 12 + 32


def test_an_index_with_many_deleted_items_is_compacted(writable):
    index = writable.app.state.service.indexes["things"]
    writable.delete("/v1/items", params={"id": [f"1:{number}" for number in range(5)]})
    until = time.monotonic() + 20
    while any(one.deleted for one in read_manifest(index.folder).segments) or removed_but_open(
        index
    ):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert index._snapshot.num_alive == 7


def removed_but_open(index: Index) -> list[str]:
    """Files of an index that keep their place on the disk although they have no name any more (on Linux)."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return [line for line in lines if str(index.folder) in line and line.endswith("(deleted)")]


def test_ids_are_texts_or_whole_numbers_in_composed_form(writable, ids_of_all):
    composed, decomposed = (unicodedata.normalize(form, "Müller") for form in ("NFC", "NFD"))
    items = [{"id": key, "text": "a drum"} for key in (7, 8.0, decomposed)]
    assert writable.post("/v1/items", json={"items": items}).json()["ids"] == ["7", "8", composed]
    assert {"7", "8", composed} <= ids_of_all()
    for key in (7, 7.0, "7"):
        query = {"parts": [{"id": key}], "k": 1}
        assert writable.post("/v1/search", json=query).json()["hits"][0]["text"] == "a drum"
        assert (
            writable.post("/v1/explain", json={"text": "a drum", "id": key}).json()["item"]["id"]
            == "7"
        )
        assert writable.post("/v1/feedback", json={"text": "a drum", "id": key}).status_code == 204
    assert writable.delete("/v1/feedback", params={"id": "7", "text": "a drum"}).json() == {
        "forgotten": 1
    }
    assert writable.delete("/v1/items", params={"id": decomposed}).json()["deleted"] == 1
    for bad in (7.5, True, [7], ""):
        assert is_problem(
            writable.post("/v1/items", json={"items": [{"id": bad, "text": "a"}]}), 422
        )


def test_an_index_that_another_process_changes_is_busy_for_now(writable, monkeypatch):
    monkeypatch.setattr(service, "MAX_CHANGE_WAIT_SECONDS", 0.2)
    index = writable.app.state.service.indexes["things"]
    item = {"items": [{"id": "new", "text": "a drum"}]}
    with open_writer(index.folder):
        answer = writable.post("/v1/items", json=item)
        assert is_problem(answer, 429)
        assert answer.headers["retry-after"]
    assert writable.post("/v1/items", json=item).json()["added"] == 1


def test_a_damaged_index_fails_every_request_until_it_is_whole(writable):
    index = writable.app.state.service.indexes["things"]
    manifest = index.folder / "index.json"
    whole = manifest.read_bytes()
    manifest.write_text("{")
    is_problem(writable.post("/v1/search", json={"text": "x"}), 500)
    is_problem(writable.post("/v1/items", json={"items": [{"text": "x"}]}), 500)
    manifest.write_bytes(whole)
    assert writable.post("/v1/search", json={"text": "x"}).status_code == 200


def test_a_damaged_file_is_told_by_healthz_and_is_not_searched(writable):
    index = writable.app.state.service.indexes["things"]
    assert writable.get("/healthz").json() == {"status": "ok"}
    file = index.folder / "segments" / "000001" / "code_cosines.npy"
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)  # the same file, as a failing disk changes it
    watch = FileWatch(index)
    writable.app.state.service.watches.append(watch)
    waited = time.monotonic() + 20
    while not watch.damage and time.monotonic() < waited:
        time.sleep(0.02)
    assert writable.get("/healthz").json() == {"status": "damaged"}
    is_problem(writable.post("/v1/search", json={"text": "x"}), 500)


def test_files_are_checked_until_the_service_ends(model, tmp_path):
    def watched() -> list[str]:
        return [thread.name for thread in threading.enumerate() if str(tmp_path) in thread.name]

    with serving(make_index(tmp_path, model)):
        assert len(watched()) == 1
    waited = time.monotonic() + 20
    while watched() and time.monotonic() < waited:
        time.sleep(0.02)
    assert not watched()


def test_a_search_whose_conditions_are_slow_delays_no_other(writable, monkeypatch):
    restriction = Snapshot.restriction
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(self, wanted, **more):
        if wanted.match == "kite":
            has_begun.set()
            assert may_end.wait(60)
        return restriction(self, wanted, **more)

    monkeypatch.setattr(Snapshot, "restriction", slow)
    with ThreadPoolExecutor(6) as pool:
        waiting = [
            pool.submit(writable.post, "/v1/search", json={"text": "a kite", "match": "kite"})
            for _ in range(6)
        ]
        try:
            assert has_begun.wait(60)
            time.sleep(0.1)  # the others arrive
            assert writable.post("/v1/search", json={"text": "a red boat"}).status_code == 200
            assert not any(answer.done() for answer in waiting)
        finally:
            may_end.set()
        assert [answer.result().status_code for answer in waiting] == [200] * 6
