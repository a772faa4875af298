"""What was chosen for a query raises it for similar queries, for these alone, and until it is forgotten."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from genius_search.cli import main
from genius_search.errors import ArtifactMismatch, BadData, UsageError
from genius_search.index import learned
from genius_search.index.index import Index
from genius_search.index.snapshot import UnknownItem

DIM, ITEMS = 24, 400


def draw(count: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Index:
    folder = tmp_path_factory.mktemp("learned") / "i"
    return Index.from_vectors(folder, draw(ITEMS, 0), modalities=["image", "text"] * (ITEMS // 2))


@pytest.fixture
def index(template, tmp_path) -> Index:
    return Index.open(shutil.copytree(template.folder, tmp_path / "i"))


def ids(index: Index, vector: np.ndarray, **options) -> list[str]:
    return [hit.id for hit in index.search(vector=vector, k=20, **options)]


def far_choice(index: Index, query: np.ndarray) -> str:
    """An image beyond the first twenty hits, but not the worst."""
    return [hit.id for hit in index.search(vector=query, k=60, modality="image")][40]


def test_a_choice_raises_its_item_for_similar_queries_at_once_and_everywhere(index):
    query, other = draw(2, 1)
    chosen = far_choice(index, query)
    elsewhere, before = Index.open(index.folder), ids(index, other)
    index.learn(chosen, vector=query)
    for reader in (index, elsewhere, Index.open(index.folder)):
        assert chosen in ids(reader, query, modality="image")[:5]
        assert chosen in ids(reader, query + 0.02 * draw(1, 2)[0], modality="image")[:5]
        assert chosen in ids(reader, query)
        assert chosen not in ids(reader, query, modality="text")
        (why,) = reader.explain(chosen, vector=query, modality="image").raised_by
        assert why.cosine == pytest.approx(1, abs=0.01)
        assert ids(reader, other) == before


def test_gains_are_bounded_and_a_repeated_choice_counts_once(index):
    query = draw(1, 3)[0]
    first = ids(index, query, modality="image")[0]
    chosen = far_choice(index, query)
    index.learn(chosen, vector=query)
    once = index.search(vector=query, modality="image", k=20)
    index.learn_many([{"chosen": chosen, "vector": query}] * 50)
    again = index.search(vector=query, modality="image", k=20)
    assert [(hit.id, hit.score) for hit in once] == [(hit.id, hit.score) for hit in again]
    assert first in [hit.id for hit in again][:3]
    assert len([*index.choices()]) == 1


def test_choices_of_deleted_items_are_silent_and_filters_hold(index):
    query = draw(1, 4)[0]
    chosen = far_choice(index, query)
    index.learn(chosen, vector=query)
    index.delete(chosen)
    assert chosen not in ids(index, query, modality="image")
    with pytest.raises(UnknownItem, match="no item"):
        index.learn(chosen, vector=query)
    assert index.learn_many(
        [{"chosen": chosen, "vector": query}, {"chosen": "1", "vector": query}]
    ) == [chosen]
    with pytest.raises(UsageError, match="names the id of the chosen item"):
        index.learn_many([{"text": "a kite"}])
    with pytest.raises(UsageError, match="a choice is of type str"):
        index.learn_many("abc")


def test_choices_are_exported_forgotten_and_learned_again(index, tmp_path, capsys):
    queries = draw(30, 5)
    chosen = [far_choice(index, query) for query in queries]
    index.learn_many(
        [{"chosen": name, "vector": query} for name, query in zip(chosen, queries, strict=True)]
    )
    raised = [ids(index, query, modality="image") for query in queries]
    assert np.mean([name in own[:5] for name, own in zip(chosen, raised, strict=True)]) > 0.9
    assert main(["index", "learn", str(index.folder), "--export"]) == 0
    lines = capsys.readouterr().out
    assert {json.loads(line)["chosen"] for line in lines.splitlines()} == {*chosen}
    assert index.forget(chosen=chosen[0]) == chosen.count(chosen[0])
    assert chosen[0] not in ids(index, queries[0], modality="image")[:5]
    with pytest.raises(BadData, match="the log of choices for texts has 0 pairs"):
        index.train()
    assert main(["index", "learn", str(index.folder), "--forget-all"]) == 0
    assert not [*index.choices()]
    plain = [ids(index, query, modality="image") for query in queries]
    assert not any(name in own for name, own in zip(chosen, plain, strict=True))
    (tmp_path / "log.jsonl").write_text(lines)
    assert main(["index", "learn", str(index.folder), str(tmp_path / "log.jsonl")]) == 0
    again = [ids(index, query, modality="image") for query in queries]
    assert np.mean([one[:5] == other[:5] for one, other in zip(raised, again, strict=True)]) > 0.9


def test_the_oldest_choices_are_forgotten_when_there_are_too_many(index, monkeypatch):
    monkeypatch.setattr(learned, "MAX_CHOICES", 20)
    for first in range(0, 42, 3):
        index.learn_many(
            [{"chosen": str(n), "vector": draw(1, n)[0]} for n in range(first, first + 3)]
        )
    kept = sorted(int(choice["chosen"]) for choice in index.choices())
    assert 18 <= len(kept) <= 20
    assert kept == [*range(42)][-len(kept) :]


def test_the_log_follows_changes_of_the_index(index):
    query = draw(1, 6)[0]
    chosen = far_choice(index, query)
    index.learn(chosen, vector=query)
    index.add_vectors(draw(50, 7), ids=[f"new {row}" for row in range(50)], modalities="image")
    index.compact(min_deleted=0)
    index.refit()
    assert chosen in ids(index, query, modality="image")[:5]
    assert index.check().items == ITEMS + 50
    (path, *_) = (index.folder / "learned" / "segments").glob("*/*.npy")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactMismatch, match=path.name):
        index.check()


def damage_log(index: Index, how: str) -> None:
    path = max((index.folder / "learned" / "segments").glob("*/ids.npy"))
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "flipped":
        path.write_bytes(path.read_bytes()[:-1] + b"\x77")
    elif how == "manifest":
        (index.folder / "learned" / "index.json").write_text("{")
    elif how == "empty":
        (index.folder / "learned" / "index.json").write_text("")
    else:
        (index.folder / "learned" / "index.json").unlink()


@pytest.mark.parametrize("how", ["cut", "flipped", "manifest", "empty", "lost"])
def test_searches_do_without_a_damaged_log_which_can_be_forgotten(index, caplog, capsys, how):
    query = draw(1, 8)[0]
    plain, chosen = ids(index, query), far_choice(index, query)
    for vector in draw(9, 11):
        index.learn(chosen, vector=vector)
    index.learn(chosen, vector=query)
    damage_log(index, how)
    opened = Index.open(index.folder)
    for _ in range(2):
        assert ids(opened, query) == plain
    opened.explain(chosen, vector=query)
    (warning,) = {record.message for record in caplog.records}
    assert "--forget-all" in warning
    for change in (
        opened.check,
        lambda: [*opened.choices()],
        lambda: opened.forget(chosen=chosen),
    ):
        with pytest.raises(ArtifactMismatch, match="--forget-all"):
            change()
    with pytest.raises(ArtifactMismatch, match="--forget-all"):
        opened.learn_many([{"chosen": chosen, "vector": one} for one in draw(9, 9)])
    opened.add_vectors(draw(1, 7), ids=["new"])
    assert ids(opened, query) == plain
    assert main(["index", "learn", str(index.folder), "--forget-all"]) == 0
    assert opened.check().items == ITEMS + 1
    opened.learn(chosen, vector=query)
    assert chosen in ids(opened, query)


def test_a_log_whose_model_is_damaged_can_be_forgotten_and_learned_again(index):
    query = draw(1, 8)[0]
    index.learn("1", vector=query)
    (weights,) = (index.folder / "learned").glob("model*/quantizer/*.safetensors")
    weights.unlink()
    with pytest.raises(ArtifactMismatch, match="--forget-all"):
        index.learn("2", vector=query)
    assert index.forget() == 1
    index.learn("2", vector=query)
    assert [choice["chosen"] for choice in index.choices()] == ["2"]


def test_a_text_is_forgotten_in_any_form_of_unicode(tmp_path):
    texts = [f"a kite number {number}" for number in range(20)]
    index = Index.create(tmp_path / "i", texts, encoder="text:wordllama")
    for composed in ("caf\u00e9", "cafe\u0301"):
        for asked in ("caf\u00e9", "cafe\u0301"):
            index.learn("7", composed)
            assert [choice["text"] for choice in index.choices()] == ["caf\u00e9"]
            assert index.forget(text=asked) == 1


def test_first_choices_of_several_threads_are_all_learned(index):
    queries = draw(6, 10)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda row: index.learn(str(row), vector=queries[row]), range(6)))
    assert {choice["chosen"] for choice in index.choices()} == set("012345")
