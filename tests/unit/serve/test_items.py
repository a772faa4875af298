"""Items over HTTP: seen, added, replaced, deleted."""

from __future__ import annotations

import io
import json
import os

import pytest
from PIL import Image

from genius_search.errors import ArtifactMismatch
from genius_search.index.index import Index
from genius_search.index.pool import SAME_ID
from genius_search.index.snapshot import Snapshot
from genius_search.serve.body import split_parts
from genius_search.serve.schemas import FIELDS_BYTES, MAX_ITEMS

from .conftest import form, picture, serving
from .test_guard import JSON, is_problem


def add(client, *items, **pictures):
    return client.post(
        "/v1/items",
        **(form({"items": items}, **pictures) if pictures else {"json": {"items": items}}),
    )


def test_an_item_is_shown_without_its_path(client):
    assert client.get("/v1/items", params={"id": "1:4"}).json() | {"codes": []} == {
        "id": "1:4",
        "modality": "text",
        "text": "a green boat",
        "image": None,
        "fields": {"price": 4, "colour": "green", "size": {"width": 0}},
        "codes": [],
        "picture_text": [],
    }
    shown = client.get("/v1/items", params={"id": "2:1", "index": "things"}).json()
    assert shown["image"] == "/v1/items/picture?index=things&id=2%3A1&size=256"
    assert len(shown["codes"]) == len(client.get("/v1/indexes").json()["indexes"][0]["levels"])
    for name in ("nobody", "../../etc/passwd", "\0", "x" * 500):
        is_problem(client.get("/v1/items", params={"id": name}), 404)
    is_problem(client.get("/v1/items", params={"id": "x" * (500 + 1)}), 422)


def test_a_picture_is_drawn_anew_small_and_without_exif(writable):
    exif = Image.Exif()
    exif[0x010E] = "where I live"
    assert add(
        writable, {"id": "photo", "image": "p"}, p=picture(size=(900, 600), kind="JPEG", exif=exif)
    ).json()["added"]
    drawn = writable.get("/v1/items/picture", params={"id": "photo", "size": 90})
    shown = Image.open(io.BytesIO(drawn.content))
    assert (shown.format, shown.size, dict(shown.getexif())) == ("JPEG", (90, 60), {})
    assert b"where I live" not in drawn.content
    tag = drawn.headers["etag"]
    again = writable.get(
        "/v1/items/picture", params={"id": "photo", "size": 90}, headers={"If-None-Match": tag}
    )
    assert (again.status_code, again.content) == (304, b"")
    add(writable, {"id": "photo", "image": "p"}, p=picture("blue", size=(900, 600)))
    changed = writable.get(
        "/v1/items/picture", params={"id": "photo", "size": 90}, headers={"If-None-Match": tag}
    )
    assert changed.status_code == 200


def test_the_original_of_a_picture_is_its_file(client, writable):
    data = picture(size=(900, 600), kind="JPEG")
    add(writable, {"id": "trip/photo.jpg", "image": "p"}, p=data)
    found = writable.get("/v1/items/original", params={"id": "trip/photo.jpg"})
    assert (found.content, found.headers["content-type"]) == (data, "image/jpeg")
    assert found.headers["content-disposition"] == 'inline; filename="photo.jpg"'
    for name in ("1:1", "nobody"):
        is_problem(client.get("/v1/items/original", params={"id": name}), 404)


def test_no_other_file_than_a_picture_is_given_away(writable, tmp_path):
    add(writable, {"id": "photo", "image": "p"}, p=picture())
    [stored] = tmp_path.rglob("pictures/*/*")
    stored.write_text("secret")
    is_problem(writable.get("/v1/items/original", params={"id": "photo"}), 404)
    os.truncate(stored, 1 << 40)
    with pytest.raises(ArtifactMismatch, match=stored.name):
        writable.app.state.service.indexes["things"].check()


def test_a_picture_outside_an_index_is_that_which_was_indexed_or_below_a_root(
    writable, monkeypatch
):
    service = writable.app.state.service
    folder = service.indexes["things"].folder.parent
    (folder / "private.png").write_bytes(picture())

    def statuses(name: str) -> set[int]:
        paths = ("/v1/items/picture", "/v1/items/original")
        return {writable.get(path, params={"id": name}).status_code for path in paths}

    assert statuses("2:1") == {200}
    item_at = Snapshot.item_at
    for path in (folder / "private.png", folder / "things.index" / ".." / "private.png"):
        monkeypatch.setattr(
            Snapshot, "item_at", lambda *of, to=path: item_at(*of)._replace(image=str(to))
        )
        assert statuses("2:1") == {404}
    service.roots = [folder]
    assert statuses("2:1") == {200}


def test_pictures_of_a_folder_are_handed_out_while_their_contents_are_those_indexed(
    model, tmp_path
):
    exif = Image.Exif()
    exif[0x010E] = "a caption inside"
    photo = tmp_path / "photos" / "trip" / "a.jpg"
    photo.parent.mkdir(parents=True)
    photo.write_bytes(picture(kind="JPEG", exif=exif))
    made = Index.create(tmp_path / "photos.index", tmp_path / "photos", model=model)
    with serving(made) as client:
        for data, status in ((photo.read_bytes(), 200), (picture("blue", kind="JPEG"), 404)):
            photo.write_bytes(data)
            assert client.get("/v1/items/original?id=trip/a.jpg").status_code == status
        os.truncate(photo, 1 << 40)  # of holes; to hash it would take hours
        assert client.get("/v1/items/original?id=trip/a.jpg").status_code == 404


def test_half_a_character_is_told_by_item_and_nothing_is_stored(writable):
    for field, item in (
        ("id", r'"id": "a\udfffb"'),
        ("text", r'"text": "\ud83d"'),
        ("fields", r'"fields": {"a": ["\ud800"]}'),
        ("fields", r'"fields": {"\ud800": 1}'),
    ):
        body = f'{{"items": [{{"id": "good", "text": "x"}}, {{{item}}}]}}'
        told = is_problem(writable.post("/v1/items", content=body, headers=JSON), 422)
        assert [one["field"] for one in told["errors"]] == [f"items[1].{field}"]
    is_problem(writable.get("/v1/items?id=good"), 404)


def test_a_picture_that_is_not_there_or_too_large_to_draw_is_a_problem(client, writable):
    is_problem(client.get("/v1/items/picture", params={"id": "1:1"}), 404)
    is_problem(client.get("/v1/items/picture", params={"id": "nobody"}), 404)
    for size in (0, 15, 1025, "x", 1e30):
        is_problem(client.get("/v1/items/picture", params={"id": "2:1", "size": size}), 422)
    index = writable.app.state.service.indexes["things"]
    pool = index.folder.parent / "pool"
    (pool / "red.png").write_bytes(b"gone")
    (pool / "green.png").unlink()
    os.mkfifo(pool / "green.png")
    for name in ("2:0", "2:1"):
        body = is_problem(writable.get("/v1/items/picture", params={"id": name}), 404)
        assert str(index.folder.parent) not in json.dumps(body)


def test_what_is_added_is_found_and_is_there_after_a_restart(writable, ids_of_all):
    added = add(
        writable,
        {"id": "a/../b", "text": "a green drum", "fields": {"price": 7.5, "tags": ["x"]}},
        {"id": "p", "image": "green"},
        {"text": "a text without an id"},
        green=picture("green"),
    ).json()
    assert added | {"ids": []} == {
        "added": 3,
        "replaced": 0,
        "unchanged": 0,
        "left_out": [],
        "ids": [],
    }
    assert added["ids"][:2] == ["a/../b", "p"]
    assert {"a/../b", "p", added["ids"][2]} < ids_of_all()
    index = writable.app.state.service.indexes["things"]
    reopened = Index.open(index.folder, model=index.model)
    assert reopened.check().items == 15
    (hit,) = reopened.search("a drum", where=["price=7.5"])
    assert hit.id == "a/../b"


def test_adding_again_changes_nothing_and_another_content_replaces(writable):
    item = {"id": "new", "text": "a drum"}
    assert add(writable, item).json()["added"] == 1
    assert add(writable, item).json()["unchanged"] == 1
    assert [add(writable, {"text": "no id"}).json()["added"] for _ in range(2)] == [1, 0]
    assert add(writable, {**item, "text": "a harp"}).json()["replaced"] == 1
    assert writable.get("/v1/items?id=new").json()["text"] == "a harp"


def test_what_cannot_be_used_is_left_out_with_its_reason_and_the_rest_is_added(writable):
    bad = [
        ({"id": "empty"}, "needs a text"),
        ({"id": "cut", "image": "cut"}, "damaged"),
        ({"id": "url", "image": "https://example.com/x.png"}, "not fetched"),
        ({"id": "wide", "text": "x", "fields": {"a": "x" * FIELDS_BYTES}}, "bytes"),
        ({"id": "nul\0", "text": "x"}, "control character"),
    ]
    good = {"id": "good", "text": "a drum"}
    added = add(writable, good, *(item for item, _ in bad), cut=picture()[:40]).json()
    assert added["added"] == 1
    reasons = {one["id"]: one["reason"] for one in added["left_out"]}
    assert set(reasons) == {item["id"] for item, _ in bad}
    for item, why in bad:
        assert why in reasons[item["id"]]
    twice = add(writable, {"id": "a", "text": "a horn"}, {"id": "a", "text": "a bell"}).json()
    assert [entry["reason"] for entry in twice["left_out"]] == [SAME_ID]
    assert writable.get("/v1/items?id=a").json()["text"] == "a bell"
    alone = is_problem(add(writable, bad[0][0]), 422)
    assert alone["left_out"] == [{"id": "empty", "reason": reasons["empty"]}]


def test_a_body_that_is_no_list_of_items_is_refused(client):
    for body in (
        {},
        {"items": []},
        {"items": [{"id": ""}]},
        {"items": [{"text": "x", "path": "/etc"}]},
        {"items": [{"text": "a drum"}, {"id": "x" * 501}]},
        {"items": [7]},
        {"items": [{"text": "x"}] * (MAX_ITEMS + 1)},
        [],
        {"items": [{"id": "x", "fields": []}]},
    ):
        is_problem(client.post("/v1/items", json=body), 422)
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/mixed",
        "image/png",
        "",
    ):
        for path in ("/v1/items", "/v1/search"):
            is_problem(client.post(path, content=b"x", headers={"Content-Type": kind}), 415)
    is_problem(client.post("/v1/items?index=other", json={"items": [{"text": "x"}]}), 404)


def test_what_is_deleted_is_found_no_more(writable, ids_of_all):
    def delete(*ids):
        return writable.delete("/v1/items", params={"id": ids})

    assert delete("1:0", "nobody", "2:0").json() == {"deleted": 2, "missing": ["nobody"]}
    assert delete("1:1").json() == {"deleted": 1, "missing": []}
    assert not {"1:0", "1:1", "2:0"} & ids_of_all()
    is_problem(writable.get("/v1/items?id=1:0"), 404)
    before = ids_of_all()
    assert delete("1:2\0x").json() == {"deleted": 0, "missing": ["1:2\0x"]}  # NUL ends no name
    assert ids_of_all() == before
    is_problem(delete(), 422)
    is_problem(delete(""), 422)


def test_parts_of_an_upload_have_any_bytes_and_belong_to_their_names(client):
    noise = bytes(range(256)) + b"\r\n--x--\r\n--x\r\n\r\n" + bytes(99)
    kind, body = "multipart/form-data; boundary=xyz", b""
    for name, data in (("a", noise), ("umlaut ü", b""), ("json", b"{}")):
        body += (
            b'--xyz\r\nContent-Disposition: form-data; name="%s"; filename="f"\r\n' % name.encode()
        )
        body += b"Content-Type: image/png\r\n\r\n" + data + b"\r\n"
    assert split_parts(kind, body + b"--xyz--\r\n") == {"a": noise, "umlaut ü": b"", "json": b"{}"}
    for wrong, data in (
        (kind, b"--xyz\r\n\r\nx\r\n--xyz--"),
        ("multipart/form-data", b"x"),
        (kind, b"--xyz\r\n" * 2_000),
    ):
        is_problem(client.post("/v1/items", content=data, headers={"Content-Type": wrong}), 400)


def test_a_chosen_item_is_found_earlier_by_similar_searches(writable):
    search = {"text": "a red kite", "modality": "text", "k": 30}

    def rank(of: str) -> int:
        hits = writable.post("/v1/search", json=search).json()["hits"]
        return [hit["id"] for hit in hits].index(of)

    last = writable.post("/v1/search", json=search).json()["hits"][-1]["id"]
    before = rank(last)
    assert writable.post("/v1/feedback", json={**search, "id": last}).status_code == 204
    assert rank(last) < before
    told = writable.post("/v1/explain", json={**search, "id": last}).json()
    assert [(one["chosen"], one["text"]) for one in told["raised_by"]] == [(last, "a red kite")]
    shown = {"json": json.dumps({"image": "p", "id": last})}
    assert (
        writable.post("/v1/feedback", data=shown, files={"p": picture("blue")}).status_code == 204
    )
    is_problem(writable.post("/v1/feedback", json={**search, "id": "nobody"}), 404)
    for query, count in (({"text": "another"}, 0), ({"text": "a red kite"}, 1), ({}, 1)):
        gone = writable.delete("/v1/feedback", params={"id": last, **query})
        assert gone.json() == {"forgotten": count}
    assert rank(last) == before
