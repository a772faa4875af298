"""Items over HTTP: seen, added, replaced, deleted."""

from __future__ import annotations

import base64
import io
import json

from PIL import Image

from genius_search.index.index import Index
from genius_search.serve import limits

from .conftest import picture
from .test_guard import is_problem


def add(client, *items, **query):
    return client.post("/v1/items", json={"items": list(items)}, params=query)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_an_item_is_shown_without_its_path(client):
    assert client.get("/v1/items", params={"id": "1:4"}).json() | {"codes": []} == {
        "id": "1:4",
        "modality": "text",
        "text": "a green boat",
        "image": None,
        "fields": {"price": 4, "colour": "green", "size": {"width": 0}},
        "codes": [],
    }
    shown = client.get("/v1/items", params={"id": "2:1", "index": "things"}).json()
    assert shown["image"] == "/v1/items/picture?index=things&id=2%3A1&size=256"
    assert len(shown["codes"]) == len(client.get("/v1/indexes/things").json()["levels"])
    for name in ("nobody", "../../etc/passwd", "\0", "x" * limits.ID_CHARACTERS):
        is_problem(client.get("/v1/items", params={"id": name}), 404)
    is_problem(client.get("/v1/items", params={"id": "x" * (limits.ID_CHARACTERS + 1)}), 422)


def test_a_picture_is_drawn_anew_small_and_without_exif(writable):
    exif = Image.Exif()
    exif[0x010E] = "where I live"
    assert add(
        writable, {"id": "photo", "image": b64(picture(size=(900, 600), kind="JPEG", exif=exif))}
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
    add(writable, {"id": "photo", "image": b64(picture("blue", size=(900, 600)))})
    changed = writable.get(
        "/v1/items/picture", params={"id": "photo", "size": 90}, headers={"If-None-Match": tag}
    )
    assert changed.status_code == 200


def test_the_original_of_a_picture_is_its_file(client, writable):
    data = picture(size=(900, 600), kind="JPEG")
    add(writable, {"id": "trip/photo.jpg", "image": b64(data)})
    found = writable.get("/v1/items/original", params={"id": "trip/photo.jpg"})
    assert (found.content, found.headers["content-type"]) == (data, "image/jpeg")
    assert found.headers["content-disposition"] == 'inline; filename="photo.jpg"'
    for name in ("1:1", "nobody"):
        is_problem(client.get("/v1/items/original", params={"id": name}), 404)


def test_no_other_file_than_a_picture_is_given_away(writable, tmp_path):
    add(writable, {"id": "photo", "image": b64(picture())})
    [stored] = tmp_path.rglob("pictures/*/*")
    stored.write_text("secret")
    is_problem(writable.get("/v1/items/original", params={"id": "photo"}), 404)


def test_a_picture_that_is_not_there_or_too_large_to_draw_is_a_problem(client, writable):
    is_problem(client.get("/v1/items/picture", params={"id": "1:1"}), 404)
    is_problem(client.get("/v1/items/picture", params={"id": "nobody"}), 404)
    for size in (0, 15, 1025, "x", 1e30):
        is_problem(client.get("/v1/items/picture", params={"id": "2:1", "size": size}), 422)
    index = writable.app.state.service.engine.indexes["things"]
    (index.folder.parent / "pool" / "red.png").write_bytes(b"gone")
    body = is_problem(writable.get("/v1/items/picture", params={"id": "2:0"}), 404)
    assert str(index.folder.parent) not in json.dumps(body)


def test_what_is_added_is_found_and_is_there_after_a_restart(writable, found):
    added = add(
        writable,
        {"id": "a/../b", "text": "a green drum", "fields": {"price": 7.5, "tags": ["x"]}},
        {"id": "p", "image": b64(picture("green"))},
        {"text": "a text without an id"},
    ).json()
    assert added | {"ids": []} == {"added": 3, "replaced": 0, "unchanged": 0, "left_out": [], "ids": []}
    assert added["ids"][:2] == ["a/../b", "p"]
    assert {"a/../b", "p", added["ids"][2]} < found()
    index = writable.app.state.service.engine.indexes["things"]
    reopened = Index.open(index.folder, model=index.model)
    assert reopened.verify().items == 15
    (hit,) = reopened.search("a drum", where=["price=7.5"])
    assert hit.id == "a/../b"


def test_adding_again_changes_nothing_and_another_content_replaces(writable):
    item = {"id": "new", "text": "a drum"}
    assert add(writable, item).json()["added"] == 1
    assert add(writable, item).json()["unchanged"] == 1
    assert add(writable, {"text": "no id"}).json() == {
        **add(writable, {"text": "no id"}).json(),
        "unchanged": 0,
        "added": 1,
    }
    assert add(writable, {**item, "text": "a harp"}).json()["replaced"] == 1
    assert writable.get("/v1/items?id=new").json()["text"] == "a harp"


def test_what_cannot_be_used_is_left_out_with_its_reason_and_the_rest_is_added(writable):
    deep = {"a": 1}
    for _ in range(limits.FIELDS_DEPTH):
        deep = {"a": deep}
    bad = [
        ({"id": "empty"}, "needs a text"),
        ({"id": "cut", "image": b64(picture()[:40])}, "cut off"),
        ({"id": "url", "image": "https://example.com/x.png"}, "not fetched"),
        ({"id": "deep", "text": "x", "fields": deep}, "nested"),
        ({"id": "wide", "text": "x", "fields": {"a": "x" * limits.FIELDS_BYTES}}, "more than"),
        ({"id": "nul\0", "text": "x"}, "control character"),
        ({"id": "long", "text": "x" * (limits.TEXT_CHARACTERS + 1)}, "10000 characters"),
        ({"id": "other", "text": "x", "path": "/etc"}, "path: "),
        ({"id": "many", "text": "x", **{f"k{n}": n for n in range(100)}}, "100 invalid"),
    ]
    added = add(writable, {"id": "good", "text": "a drum"}, *(item for item, _ in bad)).json()
    assert added["added"] == 1
    assert [one["id"] for one in added["left_out"]] == [item["id"] for item, _ in bad]
    for one, (_, why) in zip(added["left_out"], bad, strict=True):
        assert why in one["reason"]
    alone = is_problem(add(writable, bad[0][0]), 422)
    assert alone["left_out"] == [{"id": "empty", "reason": added["left_out"][0]["reason"]}]


def test_items_that_are_not_objects_are_left_out_by_their_number(writable):
    added = add(writable, {"id": "good", "text": "a drum"}, 7, {"id": 7}, {"id": "x" * 501}).json()
    assert (added["added"], added["ids"]) == (1, ["good", "item 2", "item 3", "x" * 500])


def test_a_whole_number_of_any_size_is_a_field(writable):
    assert add(writable, {"id": "n", "text": "a", "fields": {"n": 10**400}}).json()["added"] == 1


def test_two_items_with_one_id_are_counted_once(writable):
    added = add(writable, {"id": "x.txt", "text": "a drum"}, {"id": "x.txt", "text": "a harp"}).json()
    assert (added["added"], added["replaced"]) == (1, 1)


def test_a_body_that_is_no_list_of_items_is_refused(client):
    for body in (
        {},
        {"items": []},
        {"items": [{"id": ""}]},
        {"items": [{"text": "x", "path": "/etc"}]},
        {"items": [{"text": "x"}] * (limits.ITEMS + 1)},
        [],
        {"items": [{"id": "x", "fields": []}]},
    ):
        is_problem(client.post("/v1/items", json=body), 422)
    is_problem(client.post("/v1/items", content=b"x", headers={"Content-Type": "image/png"}), 415)
    is_problem(client.post("/v1/items?index=other", json={"items": [{"text": "x"}]}), 404)


def test_what_is_deleted_is_found_no_more(writable, found):
    assert writable.post("/v1/items/delete", json={"ids": ["1:0", "nobody", "2:0"]}).json() == {
        "deleted": 2,
        "missing": ["nobody"],
    }
    assert writable.delete("/v1/items?id=1:1").json() == {"deleted": 1, "missing": []}
    is_problem(writable.delete("/v1/items?id=1:1"), 404)
    assert not {"1:0", "1:1", "2:0"} & found()
    is_problem(writable.get("/v1/items?id=1:0"), 404)
    for body in ({}, {"ids": []}, {"ids": ["x"] * (limits.IDS + 1)}, {"ids": [1]}):
        is_problem(writable.post("/v1/items/delete", json=body), 422)


def test_an_id_with_nul_means_no_other_item(writable, found):
    before = found()
    is_problem(writable.delete("/v1/items?id=1:1%00x"), 404)
    assert writable.post("/v1/items/delete", json={"ids": ["1:1\0x"]}).json() == {
        "deleted": 0,
        "missing": ["1:1\0x"],
    }
    is_problem(writable.get("/v1/items?id=1:1%00x"), 404)
    is_problem(writable.post("/v1/explain", json={"text": "a kite", "id": "1:1\0x"}), 404)
    assert found() == before


def test_too_large_a_body_is_refused_whether_it_says_so_or_not(client, monkeypatch):
    monkeypatch.setattr(limits, "BODY_BYTES", 1000)
    big = json.dumps({"text": "x" * 2000}).encode()
    json_type = {"Content-Type": "application/json"}
    is_problem(client.post("/v1/search", content=big, headers=json_type), 413)

    def parts():
        for start in range(0, len(big), 100):
            yield big[start : start + 100]

    is_problem(client.post("/v1/search", content=parts(), headers=json_type), 413)
    assert client.post("/v1/search", json={"text": "x"}).status_code == 200


def test_too_much_at_once_is_refused_for_a_while(client, monkeypatch):
    monkeypatch.setattr(limits, "BODIES_BYTES", 10)
    response = client.post("/v1/search", json={"text": "a long enough text"})
    is_problem(response, 429)
    assert response.headers["retry-after"] == "1"
    monkeypatch.undo()
    assert client.post("/v1/search", json={"text": "x"}).status_code == 200


def test_decoded_pictures_count_as_what_is_sent_at_once(client, monkeypatch):
    body = {"image": b64(picture(size=(300, 200)))}
    monkeypatch.setattr(limits, "BODIES_BYTES", 200_000)
    is_problem(client.post("/v1/search", json=body), 429)
    monkeypatch.setattr(limits, "BODIES_BYTES", 250_000)
    for _ in range(2):
        assert client.post("/v1/search", json=body).status_code == 200


def test_a_picture_with_too_many_bytes_is_refused(client, monkeypatch):
    monkeypatch.setattr(limits, "PICTURE_BYTES", 50)
    is_problem(client.post("/v1/search", json={"image": b64(picture())}), 413)
