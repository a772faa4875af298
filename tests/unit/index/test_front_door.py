"""The first page that a user reads, run line by line: one way in for each thing, and results that show themselves."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from genius_search import Genius, Index, SearchPart, SearchRequest
from genius_search.cli import main
from genius_search.errors import UsageError
from genius_search.index.hits import Hits, HitsOfQueries

TEXTS = [
    {"id": f"{colour} {thing}", "text": f"a {colour} {thing}", "fields": {"price": price}}
    for price, (colour, thing) in enumerate(
        (colour, thing)
        for colour in ("red", "green", "blue", "yellow")
        for thing in ("bag", "kite", "boat", "hat", "drum")
    )
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Index:
    return Index.create(
        tmp_path_factory.mktemp("door") / "photos.index", TEXTS, encoder="text:wordllama"
    )


@pytest.fixture
def index(tmp_path) -> Index:
    return Index.create(tmp_path / "photos.index", TEXTS, encoder="text:wordllama")


def ids(hits: Hits) -> list[str]:
    return [hit.id for hit in hits]


def test_create_returns_the_index_which_remembers_its_last_change(index):
    assert (index.last_change.added, index.last_change.left_out) == (len(TEXTS), [])
    assert index.add([{"id": "new", "text": "a new thing"}]) is index.last_change
    assert (index.last_change.added, len(index)) == (1, len(TEXTS) + 1)
    index.delete(["new", "nothing"])
    assert (index.last_change.deleted, index.last_change.added) == (1, 0)
    assert Index.open(index.folder).last_change.added == 0


def test_a_search_by_each_way_of_asking(shared):
    assert ids(shared.search("a red bag", k=3))[0] == "red bag"
    assert ids(shared.search("a red bag", where={"price": {"<": 10}}, modality="text", k=2))
    assert ids(shared.search(parts=[SearchPart(id="red kite")], k=1)) == ["red kite"]
    assert len(shared.search(where=["price<5"], k=100)) == 5
    request = SearchRequest(text="a red bag", k=3)
    assert shared.search(request) == shared.search("a red bag", k=3)
    assert shared.explain("red bag", request).item.id == "red bag"


def test_a_list_of_queries_gives_a_list_of_hits(shared):
    many = shared.search(["a red bag", "a kite"], k=2)
    assert many == [shared.search("a red bag", k=2), shared.search("a kite", k=2)]
    assert shared.search([SearchRequest(text="a kite", k=2)]) == many[1:]
    assert shared.search([]) == []


def test_options_belong_into_a_request_or_beside_a_text(shared):
    with pytest.raises(UsageError, match="a SearchRequest comes with k="):
        shared.search(SearchRequest(text="a"), k=3)
    with pytest.raises(UsageError, match="pictures are image="):
        shared.search(Path("bag.jpg"))
    with pytest.raises(TypeError, match="kk"):
        shared.search("a", kk=3)


def test_vectors_have_their_own_way_in(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    index = Index.from_vectors(tmp_path / "mine.index", vectors, fields=[{"row": 1}] * 60)
    assert index.last_change.added == 60
    assert index.add_vectors(-vectors[:2], ids=["a", "b"]).added == index.last_change.added == 2
    assert [hits[0].id for hits in index.search_vectors(vectors[:3], k=1)] == ["0", "1", "2"]
    assert index.search(vector=-vectors[0], k=1)[0].id == "a"


def test_learning_training_and_checking(index):
    index.learn("blue drum", "something to beat")
    assert list(index.choices()) == [{"text": "something to beat", "chosen": "blue drum"}]
    index.forget()
    assert index.check().items == len(TEXTS)
    with pytest.raises(TypeError, match="imag"):
        index.learn("blue drum", imag="drum.jpg")


def test_calibration_and_evaluation(trained, tmp_path):
    index = Index.create(
        tmp_path / "index",
        pool_of(trained.data),
        model=trained.model,
        embeddings="fused",
    )
    calibration = index.calibrate(trained.data, split="test", precision=0.05)
    assert index.calibration == calibration
    hits = index.search("a photo of a red square", modality="image")
    assert hits.good_match in (True, False, None)
    rows = index.evaluate(trained.data, split="test").rows
    assert {row.method for row in rows} >= {"search", "exact"}
    assert index.evaluate(str(trained.data)).rows == rows
    few = index.evaluate(trained.data, max_queries=2).rows
    assert {row.queries for row in few if row.task} == {2}


def pool_of(data: Path) -> Path:
    [pool] = (data / "cand_pool" / "global").glob("*test*.jsonl")
    return pool


def test_hits_print_as_a_table(shared):
    hits = shared.search("a red bag", k=2)
    lines = str(hits).splitlines()
    assert lines[0].split() == ["rank", "score", "id", "text", "or", "file"]
    assert lines[1].split()[0] == "1"
    assert lines[1].split(maxsplit=2)[2].split("  ")[0] == "red bag"
    assert lines[1].endswith("a red bag")
    assert str(Hits()) == "no hits"
    listed = str(shared.search(where=["price=0"])).splitlines()
    assert listed[1].split() == ["1", "red", "bag", "a", "red", "bag"]  # without a score
    long = Hits([*hits[:1], type(hits[1])(**{**fields(hits[1]), "text": "long " * 200})])
    assert max(map(len, str(long).splitlines())) <= 100
    assert str(shared.search(["red", "blue"], k=1)).count("rank") == 2


def fields(hit):
    return {name: getattr(hit, name) for name in hit.__dataclass_fields__}


def test_hits_are_escaped_in_notebooks(tmp_path):
    texts = [{"id": "<b>", "text": "<script>alert(1)</script> & more"}, *TEXTS]
    index = Index.create(tmp_path / "x.index", texts, encoder="text:wordllama")
    hits = index.search("alert", k=30)
    html = hits._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert html.count("<tr>") == len(hits) + 1
    assert index.search(["a", "b"], k=1)._repr_html_().count("<table>") == 2
    assert Hits()._repr_html_() == "<p>no hits</p>"


def test_hits_know_whether_one_is_good_also_after_a_copy(shared):
    for hits in (shared.search("two dogs play in the snow"), HitsOfQueries([Hits()])[0]):
        again = pickle.loads(pickle.dumps(hits))  # noqa: S301
        assert (again, again.good_match) == (hits, hits.good_match)


def test_a_model_gives_embeddings_and_ids(trained):
    model = Genius.open(trained.model)
    picture = Image.new("RGB", (64, 48), "red")
    inputs = ["a dog", picture, np.asarray(picture), ("a dog", picture)]
    embeddings, codes = model.embed(inputs), model.ids(inputs)
    assert embeddings.shape == (4, model.dim)
    assert np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)
    assert codes.shape == (4, model.num_levels)
    assert np.array_equal(embeddings[1], embeddings[2])
    assert not np.allclose(embeddings[0], embeddings[3])
    assert model.embed([]).shape == (0, model.dim)
    for wrong, words in (
        (["", "a"], "empty text"),
        ("a dog", "give a list"),
        ([("a",)], "a pair is"),
    ):
        with pytest.raises(UsageError, match=words):
            model.embed(wrong)


def test_ids_are_those_of_an_index(trained, tmp_path):
    model = Genius.open(trained.model)
    index = Index.create(tmp_path / "i", ["a red kite", "a boat", "a drum"], model=model)
    snapshot = index._snapshot
    stored = [snapshot.id_at(snapshot.locate(name))[: model.num_levels] for name in "012"]
    assert model.ids(["a red kite", "a boat", "a drum"]).tolist() == np.array(stored).tolist()


def test_the_command_line_of_vectors_needs_ids(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.eye(8, dtype=np.float32))
    assert main(["index", "create", str(tmp_path / "i"), "--vectors", str(tmp_path / "x.npy")]) == 0
    assert main(["index", "add", str(tmp_path / "i"), "--vectors", str(tmp_path / "x.npy")]) == 2
    assert "needs --ids" in capsys.readouterr().err
    assert main(["index", "add", str(tmp_path / "i")]) == 2
    assert "exactly one of a pool and --vectors" in capsys.readouterr().err
    assert json.loads((tmp_path / "i" / "index.json").read_text())["generation"] >= 0
