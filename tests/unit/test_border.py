"""Ids, texts, vectors and paths from outside: what they become, and what is refused, at every entry."""

from __future__ import annotations

import json
import shutil
import unicodedata
from decimal import Decimal
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from genius_search import Filter, Index, NewItem, SearchPart, SearchRequest
from genius_search.border import as_id, as_id_list, as_ids, as_matrix, as_numbers, as_path, as_text
from genius_search.cli import main
from genius_search.cli.options import read_vectors
from genius_search.data.mbeir import MBeir, read_candidates, read_qrels
from genius_search.data.values import fields_to_json
from genius_search.encoders.open import absolute_spec
from genius_search.errors import ArtifactMissing, BadData, GeniusError, UsageError
from genius_search.index.calibrate import read_pairs

DIM, ITEMS = 6, 40
X = np.random.default_rng(0).normal(size=(ITEMS, DIM)).astype(np.float32)
COMPOSED, DECOMPOSED = "Müller", unicodedata.normalize("NFD", "Müller")
NOT_AVAILABLE = type("NAType", (), {})()  # as of pandas
IDS = [COMPOSED, *map(str, range(1, ITEMS))]
NO_IDS = [
    None,
    float("nan"),
    b"5",
    True,
    1.5,
    (5, 1),
    NOT_AVAILABLE,
    np.ma.masked,
    Path("5"),
    np.array(b"5"),
    np.timedelta64(5, "D"),
    Decimal("sNaN"),
]


@pytest.fixture(scope="module")
def shared_index(tmp_path_factory) -> Index:
    index = Index.from_vectors(tmp_path_factory.mktemp("made") / "made.index", X, ids=IDS)
    index.learn(5, vector=X[5])
    return index


@pytest.fixture
def index(shared_index, tmp_path) -> Index:
    return Index.open(shutil.copytree(shared_index.folder, tmp_path / "copied.index"))


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """Return the home folder, which is not the working folder."""
    for folder in ("home", "work"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("7", "7"),
        (7, "7"),
        (np.uint8(7), "7"),
        (7.0, "7"),
        (np.float16(7), "7"),
        (-0.0, "0"),
        (Decimal("7.0"), "7"),
        (np.array(7), "7"),
        (np.array("7"), "7"),
        (torch.tensor(7), "7"),
        (10**30, str(10**30)),
        (2.0**53 - 1, str(2**53 - 1)),
        (np.str_("a"), "a"),
        (DECOMPOSED, COMPOSED),
        ("", ""),
    ],
)
def test_texts_and_whole_numbers_are_ids(value, expected):
    assert as_id(value) == expected
    assert type(as_id(value)) is str


@pytest.mark.parametrize(
    ("value", "words"),
    [
        *((value, "expected a text or a whole number") for value in NO_IDS),
        (b"5", "decode it"),
        (None, "leave out items without an id"),
        (np.float32(2**24 + 2), "may have been rounded"),
        (float("inf"), "inf"),
    ],
)
def test_nothing_else_is_an_id(value, words):
    with pytest.raises(UsageError, match=words):
        as_id(value)
    with pytest.raises(BadData, match=f"row 1: .*{words}"):
        as_ids(["a", value])
    with pytest.raises(UsageError, match="a value that cannot be shown"):
        as_id(10**5000)


@pytest.mark.parametrize(
    "column",
    [
        [0, 1, 2],
        (0.0, 1.0, 2.0),
        range(3),
        iter("012"),
        np.arange(3),
        np.arange(3.0),
        np.ma.arange(3),
        np.array([0, "1", 2.0], dtype=object),
        torch.arange(3),
        dict.fromkeys("012").keys(),
    ],
)
def test_any_column_of_ids_is_read(column):
    assert as_ids(column) == ["0", "1", "2"]


def test_columns_of_data_frames_are_read_and_their_gaps_are_named():
    for module, gap in (("pandas", "nan"), ("polars", "None"), ("pyarrow", "None")):
        library = pytest.importorskip(module)
        make = library.array if module == "pyarrow" else library.Series
        assert as_ids(make([5, 6])) == ["5", "6"]
        with pytest.raises(BadData, match=f"row 1: the id is .*{gap}"):
            as_ids(make([5, None]))
        if module != "pyarrow":
            with pytest.raises(UsageError, match="one column of a table"):
                as_ids(library.DataFrame({"id": [5]}))
            assert as_numbers(make([[1.0, 2.0], [3.0, 4.0]]), "x").shape == (2, 2)


@pytest.mark.parametrize(
    "column", ["012", b"012", {"0": 1}, 5, np.array(5), np.zeros((3, 1)), None]
)
def test_a_column_is_not_one_text_a_mapping_or_a_table(column):
    with pytest.raises(UsageError, match="expected a list, or one column of a table"):
        as_ids(column)
    with pytest.raises(UsageError, match="a set, which has no order"):
        as_ids({"a", "b"})
    assert sorted(as_id_list({"a", "b"})) == ["a", "b"]


def strided() -> np.ndarray:
    wide = np.zeros((2 * ITEMS, 2 * DIM))
    wide[::2, ::2] = X
    return wide[::2, ::2]


def read_only() -> np.ndarray:
    copied = X.copy()
    copied.flags.writeable = False
    return copied


def of_objects() -> np.ndarray:
    rows = np.empty(ITEMS, dtype=object)
    rows[:] = [*X]
    return rows


class OfJax:
    """An array of another library, which NumPy can read."""

    def __array__(self, dtype=None, copy=None):
        return X.astype(dtype or X.dtype)


@pytest.mark.parametrize(
    "vectors",
    [
        X,
        X.astype(np.float64),
        X.astype(">f4"),
        np.asfortranarray(X),
        strided(),
        read_only(),
        X.tolist(),
        [*X],
        of_objects(),
        X.astype(object),
        np.ma.array(X, mask=False),
        OfJax(),
        torch.tensor(X),
        torch.tensor(X, requires_grad=True),
        [*torch.tensor(X, requires_grad=True)],
    ],
)
def test_vectors_of_any_kind_are_read(vectors):
    assert np.array_equal(as_matrix(vectors, "the vectors"), X)


def test_numbers_that_numpy_lacks_become_floats():
    for kind in (torch.bfloat16, torch.float16):
        read = as_matrix(torch.tensor(X, dtype=kind, requires_grad=True), "the vectors")
        assert read.dtype == np.float32
        assert np.allclose(read, X, rtol=0.01)
    assert (
        as_matrix(torch.ones((2, 3), dtype=torch.float8_e4m3fn), "the vectors").tolist()
        == [[1.0] * 3] * 2
    )
    types = pytest.importorskip("ml_dtypes")
    assert as_matrix(X.astype(types.bfloat16), "the vectors").dtype == np.float32
    with pytest.raises(UsageError, match="as NumPy saves bfloat16"):
        as_matrix(X.astype(types.bfloat16).view("V2"), "the vectors")


def changed(value, kind: object = np.float64) -> np.ndarray:
    vectors = X.astype(kind)
    vectors[3, 2] = value
    return vectors


@pytest.mark.parametrize(
    ("vectors", "words"),
    [
        (np.ma.masked_less(changed(-99), -98), "row 3 of the vectors is masked"),
        (
            [*X[:3], np.ma.masked_less(changed(-99)[3], -98)],
            "number 2 of row 3 of the vectors is masked",
        ),
        (changed(np.nan), "row 3 of the vectors has a number that is not finite"),
        (changed(np.inf, np.float16), "row 3 of the vectors has a number that is not finite"),
        (changed(1e200), "row 3 of the vectors has numbers too small or too large"),
        (np.vstack([X[:3], np.zeros(DIM)]), "row 3 of the vectors has only zeros"),
        (changed(None, object), "row 3 of the vectors is .*expected real numbers"),
        (changed("2", object).tolist(), "row 3 of the vectors is .*expected real numbers"),
        (changed(10**30, object).tolist(), "row 3 of the vectors is .*expected real numbers"),
        ([*X[:3], X[3, :2]], r"row 3 of the vectors has the shape \(2,\)"),
        (X > 0, "bool"),
        (X + 1j, "complex"),
        (X.astype(str), "<U32"),
        (torch.ones(2, 3).to_sparse(), "to_dense"),
        (torch.ones((2, 3), device="meta"), "meta"),
        (X[0], r"of shape \(6,\)"),
        ({"a": 1}, "dict"),
        (None, "NoneType"),
        ([], r"of shape \(0,\)"),
        (np.zeros(2, [("x", "f4")]).view(np.recarray), "expected real numbers"),
    ],
)
def test_what_is_not_a_plain_finite_matrix_is_refused_by_row_or_name(vectors, words, tmp_path):
    with pytest.raises(GeniusError, match=words):
        as_matrix(vectors, "the vectors")
    if vectors is not None:
        with pytest.raises(GeniusError, match=words):
            Index.from_vectors(tmp_path / "x.index", vectors)
    assert not (tmp_path / "x.index").exists()


def test_a_memory_mapped_matrix_is_not_read_at_once(tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert np.shares_memory(as_matrix(mapped, "the vectors"), mapped)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("~", "{home}"),
        ("~/a/b", "{home}/a/b"),
        (Path("~/a"), "{home}/a"),
        ("a/~", "a/~"),
        ("./~", "~"),
        ("~of nobody/a", "~of nobody/a"),
        ("~\0", "~\0"),
        ("~$a.docx", "~$a.docx"),
    ],
)
def test_a_tilde_is_the_home_folder_as_in_shells(home, path, expected):
    assert str(as_path(path)) == expected.format(home=home)


@pytest.mark.parametrize("text", [b"a", 5, None, "\ud800"])
def test_a_text_is_a_text(text):
    assert as_text(np.str_(DECOMPOSED), "it") == COMPOSED
    with pytest.raises(UsageError):
        as_text(text, "it")


@pytest.mark.parametrize("key", [5, 5.0, np.int64(5), "5", torch.tensor(5)])
def test_an_item_has_one_id_wherever_it_is_named(index, key):
    assert key in index
    assert index.get(key).id == index.get("5").id == "5"
    assert index.explain(key, SearchRequest(vector=X[5])).item.id == "5"
    assert index.search(parts=[SearchPart(id=key)], k=1)[0].id == "5"
    assert [
        hit.id for hit in index.search(where={"id": key.item() if hasattr(key, "item") else key})
    ] == ["5"]
    assert index.add_vectors(X[5:6], ids=[key]).unchanged == 1
    index.learn(key, vector=X[6])
    assert index.forget(chosen=key) == 2
    assert index.delete(key).deleted == 1
    assert index.delete([key, DECOMPOSED]) == (1, ["5"])


@pytest.mark.parametrize("key", NO_IDS)
def test_what_is_not_an_id_is_refused_wherever_an_item_is_named(index, key, tmp_path):
    calls = [
        lambda: key in index,
        lambda: index.get(key),
        lambda: index.explain(key, SearchRequest(vector=X[5])),
        lambda: index.delete([key]),
        lambda: index.add_vectors(X[5:6], ids=[key]),
        lambda: index.add([NewItem(key, "a text")]),
        lambda: index.add([{"id": key, "text": "a text"}]),
        lambda: Index.from_vectors(tmp_path / "new.index", X[:1], ids=[key]),
    ]
    if key is not None:  # which stands for no item there
        calls += [
            lambda: index.search(parts=[SearchPart(id=key)]),
            lambda: index.learn(key, vector=X[5]),
            lambda: index.forget(chosen=key),
        ]
    for call in calls:
        with pytest.raises(
            GeniusError, match=r"expected a text or a whole number|a choice names the id|column"
        ):
            call()
    assert len(index) == ITEMS


def test_items_from_memory_have_whole_numbers_as_ids(tmp_path):
    pool = [NewItem(7, "a kite"), {"id": 8.0, "text": "a dog"}, {"id": DECOMPOSED, "text": "a cat"}]
    index = Index.create(tmp_path / "x.index", pool, encoder="text:wordllama")
    assert sorted(index._snapshot.ids()) == ["7", "8", COMPOSED]
    with pytest.raises(UsageError, match="the id of item 1 of the list is nan"):
        index.add([NewItem(1, "a"), {"id": float("nan"), "text": "b"}])


def test_texts_agree_in_every_form_of_unicode(tmp_path):
    pool = [
        NewItem("a", f"a letter to {DECOMPOSED}", fields={DECOMPOSED: DECOMPOSED}),
        NewItem("b", "a kite"),
    ]
    index = Index.create(tmp_path / "x.index", pool, encoder="text:wordllama")
    for form in (COMPOSED, DECOMPOSED):
        assert [hit.id for hit in index.search(match=form)] == ["a"]
        assert [hit.id for hit in index.search(where={form: form})] == ["a"]
        assert [hit.id for hit in index.search(where=[f"{form}={form}"])] == ["a"]
        index.learn("b", form)
        assert index.forget(text=form) == 1
    index.learn("b", DECOMPOSED)
    assert index.forget(chosen="b", text=COMPOSED) == 1


def test_texts_fields_and_modalities_of_vectors_are_read_by_row(tmp_path):
    vectors = X[:2]
    for given in ({"texts": ["a", b"b"]}, {"fields": [{}, 5]}):
        with pytest.raises(BadData, match="row 1: the "):
            Index.from_vectors(tmp_path / "x.index", vectors, **given)
    for given in ({"modalities": ["text", 5]}, {"texts": "ab"}, {"fields": {"a": 1}}):
        with pytest.raises(UsageError):
            Index.from_vectors(tmp_path / "x.index", vectors, **given)
    index = Index.from_vectors(
        tmp_path / "x.index", vectors, texts=["a", float("nan")], fields=[None, {5: 1}]
    )
    assert [item.text for item in index] == ["a", None]
    assert index.get(1).fields == {"5": 1}


def test_names_of_fields_are_texts_or_whole_numbers():
    stored, problems = fields_to_json({b"x": 1, None: 2, 2024: 3, DECOMPOSED: 4})
    assert json.loads(stored) == {"2024": 3, COMPOSED: 4}
    assert len(problems) == 2
    stored, problems = fields_to_json({COMPOSED: 1, DECOMPOSED: 2, "size": {1: 3, "1": 4}})
    assert json.loads(stored) == {COMPOSED: 1}
    assert ["one has this name" in problems[0], "are alike" in problems[1]] == [True, True]
    with pytest.raises(UsageError, match="the name of a field is b'x'"):
        Filter.parse({b"x": 1})
    with pytest.raises(UsageError, match="match is 5"):
        Filter.parse(match=5)


def test_queries_are_read_like_vectors_of_items(shared_index):
    for vector in (
        X[3].tolist(),
        torch.tensor(X[3], requires_grad=True),
        torch.tensor(X[3]).bfloat16(),
    ):
        assert shared_index.search(vector=vector, k=1)[0].id == "3"
        assert shared_index.search(parts=[SearchPart(vector=vector)], k=1)[0].id == "3"
    for vectors in (X[:2].tolist(), torch.tensor(X[:2], requires_grad=True)):
        assert [hits[0].id for hits in shared_index.search_vectors(vectors, k=1)] == IDS[:2]
    assert shared_index.search_vectors([]) == shared_index.search_vectors(X[:0]) == []
    masked = np.ma.masked_greater(X[3], X[3].max() - 0.01)
    for call in (
        shared_index.search,
        lambda vector: shared_index.search(parts=[SearchPart(vector=vector)]),
    ):
        with pytest.raises(BadData, match="the query's vector is masked"):
            call(vector=masked)
    with pytest.raises(BadData, match="the query's vector is masked"):
        shared_index.learn("3", vector=masked)
    with pytest.raises(BadData, match="row 3 of the vectors has a number"):
        shared_index.search_vectors(changed(np.nan))
    with pytest.raises(UsageError, match=r"of shape \(\)"):
        shared_index.search_vectors(np.array(1.0))
    with pytest.raises(UsageError, match="not finite"):
        shared_index.search(vector=np.full(DIM, np.inf, np.float16))
    with pytest.raises(UsageError, match="the text of a part is 5"):
        SearchPart(text=5)


def test_typical_queries_are_read_like_vectors_of_items(tmp_path):
    queries = np.random.default_rng(1).normal(size=(120, DIM))
    index = Index.from_vectors(tmp_path / "x.index", X, query_vectors=queries.tolist())
    index.refit(query_vectors=torch.tensor(queries, requires_grad=True))
    queries[7] = 0
    for call in (
        index.refit,
        lambda **given: Index.from_vectors(tmp_path / "y.index", X, **given),
    ):
        with pytest.raises(BadData, match="row 7 of the query vectors has only zeros"):
            call(query_vectors=queries)
    assert not (tmp_path / "y.index").exists()


def test_features_of_encoders_are_read_like_vectors(shared_index, monkeypatch):
    for given, kind in (
        (torch.tensor(X[3:4]).bfloat16(), None),
        (X[3:4].tolist(), None),
        (X[:1] * np.nan, BadData),
    ):
        monkeypatch.setattr(
            shared_index.model.encoder,
            "text_features",
            lambda *_, given=given: given,
            raising=False,
        )
        if kind is None:
            assert shared_index.search("a text", k=1)[0].id == "3"
        else:
            with pytest.raises(kind, match="not finite"):
                shared_index.search("a text")


def test_a_picture_with_masked_pixels_is_left_out(tmp_path):
    pixels = np.ma.masked_less(np.arange(27, dtype=np.uint8).reshape(3, 3, 3), 5)
    pool = [NewItem("a", "a text"), NewItem("b", "a picture", pixels)]
    added = Index.create(tmp_path / "x.index", pool, encoder="text:wordllama").last_change
    assert ["masked" in one.reason for one in added.left_out] == [True]


def test_lines_of_json_name_items_by_texts_or_whole_numbers(index, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    lines = [
        {"vector": X[row].tolist(), "chosen": chosen}
        for row, chosen in enumerate((7, 8.0, DECOMPOSED))
    ]
    log.write_text("\n".join(map(json.dumps, lines)))
    assert main(["index", "learn", str(index.folder), str(log)]) == 0
    assert {choice["chosen"] for choice in Index.open(index.folder).choices()} == {
        "5",
        "7",
        "8",
        COMPOSED,
    }
    for bad in ({"vector": [float("nan")] * DIM, "chosen": "7"}, {"text": "a", "chosen": None}):
        log.write_text(json.dumps(bad))
        assert main(["index", "learn", str(index.folder), str(log)]) == BadData.exit_code
        assert "log.jsonl:1" in capsys.readouterr().err
    log.write_text(json.dumps({"text": DECOMPOSED, "id": [7, DECOMPOSED]}))
    ((query, items, _),) = read_pairs(index.folder, log)
    assert (query.text, items) == (COMPOSED, ("7", COMPOSED))
    log.write_text(json.dumps({"text": "a", "id": [None]}))
    with pytest.raises(BadData, match=r"log.jsonl:1: row 0: the id is None"):
        read_pairs(index.folder, log)


def test_texts_and_ids_of_data_sets_are_composed(tmp_path):
    (tmp_path / "pool.jsonl").write_text(
        json.dumps({"did": "1:1", "modality": "text", "txt": DECOMPOSED})
    )
    assert [one.text for one in read_candidates(tmp_path / "pool.jsonl")] == [COMPOSED]
    (tmp_path / "qrels").write_text(f"1 0 {DECOMPOSED} 1\n")
    assert read_qrels(tmp_path / "qrels") == {"1": {COMPOSED: 1}}


def test_paths_in_python_begin_at_the_home_folder(home):
    (home / "pool").mkdir()
    PIL.Image.new("RGB", (8, 8)).save(home / "a.png")
    for name in ("pool/a.txt", "b.txt"):
        (home / name).write_text("a red kite")
    index = Index.create(home / "x.index", "~/pool", encoder="text:wordllama")
    index.add("~/b.txt")
    index.add(
        [
            NewItem("c", "a picture", Path("~/a.png")),
            NewItem("d", "a picture", "~/a.png"),
            Path("~/pool/a.txt"),
        ]
    )
    with pytest.raises(UsageError, match="is a file"):
        index.add([NewItem("e", "a text"), "~/b.txt"])
    expected = ["a.txt", "b.txt", "c", "d", str(home / "pool" / "a.txt")]
    assert sorted(index._snapshot.ids()) == sorted(expected)
    assert index.sync("~/pool").unchanged == 1
    assert Index.open(home / "x.index", model="~/x.index/model").model.dim == index.model.dim
    (home / "pairs.jsonl").write_text(json.dumps({"image": "~/a.png", "id": "c"}))
    ((query, *_),) = read_pairs(index.folder, Path("~/pairs.jsonl"))
    assert query.image == str(home / "a.png")
    assert absolute_spec("onnx:~/pool") == f"onnx:{home / 'pool'}"
    with pytest.raises(BadData, match=f"{home}/pool is not in M-BEIR's layout"):
        MBeir("~/pool")
    assert not [*Path().iterdir()]


def test_a_path_that_cannot_exist_is_an_error_with_a_sentence(tmp_path):
    index = Index.create(tmp_path / "x.index", [NewItem("a", "a kite")], encoder="text:wordllama")
    (tmp_path / "circle").symlink_to("circle")
    for pool in (tmp_path / "circle", "a\0b", "a\ud800", "x" * 5000):
        with pytest.raises(BadData, match="there is no such file or folder"):
            index.add(pool)
    with pytest.raises(BadData, match="there is no such file or folder"):
        index.sync(tmp_path / "circle")
    for folder in ("a\0b", "a\ud800"):
        with pytest.raises(UsageError, match="cannot be the name of a folder"):
            Index.from_vectors(folder, X)
    (tmp_path / "empty.npy").touch()
    with pytest.raises(BadData, match="No data left in file"):
        read_vectors(tmp_path / "empty.npy")
    assert main(["serve", str(tmp_path / "circle")]) == ArtifactMissing.exit_code


def test_paths_of_commands_begin_at_the_home_folder(home, capsys):
    np.save(home / "x.npy", X)
    (home / "ids.txt").write_text("\n".join(IDS))
    np.savez(home / "several.npz", x=X)
    assert main(["index", "create", "~/x.index", "--vectors=~/x.npy", "--ids", "~/ids.txt"]) == 0
    assert main(["search", "~/x.index", "-k", "1", "--json"]) == 0
    assert main(["index", "create", "~/y.index", "--vectors", "~/several.npz"]) == BadData.exit_code
    assert f"{home}/several.npz contains several arrays" in capsys.readouterr().err
    assert not [*Path().iterdir()]
