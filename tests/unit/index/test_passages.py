"""Texts that are longer than the encoder reads: found by passage, counted as one item."""

from __future__ import annotations

import itertools
import json
from functools import partial

import numpy as np
import PIL.Image
import pytest

from genius_search.cli import main
from genius_search.encoders.base import is_cut
from genius_search.encoders.open import load_encoder
from genius_search.encoders.passages import divide, query_passages
from genius_search.index.build import find_passages
from genius_search.index.index import Index
from genius_search.index.query import SnapshotSearcher
from genius_search.index.request import SearchRequest
from genius_search.records import format_text, instructed

WORDLLAMA = "text:wordllama"
TOPICS = {
    "volcanoes": "lava ash crater magma eruption volcano",
    "bread": "flour yeast oven dough crust baking",
    "music": "violin strings orchestra melody concert",
    "football": "goal striker stadium referee match",
    "winter": "snow ice frost blizzard skating",
    "ships": "harbour anchor sail captain voyage",
}


def chapters(topics, *, words=400):
    """A long text with a chapter on each topic."""
    random = np.random.default_rng(0)
    return "\n\n".join(" ".join(random.choice(TOPICS[topic].split(), words)) for topic in topics)


def create(place):
    notes = place / "notes"
    notes.mkdir()
    names = [*TOPICS]
    for number in range(6):  # each book ends with another topic, and none begins with it
        (notes / f"book {number}.txt").write_text(
            chapters(names[number + 1 :] + names[: number + 1])
        )
    for topic, words in TOPICS.items():
        (notes / f"{topic}.txt").write_text(f"A short note on {topic}: {words}.")
    made = Index.create(place / "notes.index", notes, encoder=WORDLLAMA)
    added = made.last_change
    assert (added.added, added.shortened, len(made)) == (12, [], 12)
    assert made.info().passages > 40
    return made


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Nobody may change it."""
    return create(tmp_path_factory.mktemp("passages"))


@pytest.fixture
def changing(tmp_path):
    return create(tmp_path)


def found(index, text, **options):
    hits = index.search(text, k=100, **options)
    assert len(hits) == len({hit.id for hit in hits}), "an item is found once"
    return {hit.id: hit for hit in hits}


def test_a_word_near_the_end_of_a_long_text_finds_its_passage(index):
    for number, (topic, words) in enumerate(TOPICS.items()):
        hits = index.search(words, where=["name~book"], k=6)
        assert len({hit.id for hit in hits}) == 6
        last = next(hit for hit in hits if hit.id == f"book {number}.txt")
        assert set(last.passage.split()) & set(words.split()), topic
        assert last.passage in last.text
        assert [hit.rank for hit in hits] == [1, 2, 3, 4, 5, 6]


def test_everything_counts_items(index):
    assert len(found(index, "magma")) == len([*index]) == len(index) == 12
    assert set(found(index, "magma", where=["name~book"])) == {f"book {n}.txt" for n in range(6)}
    assert set(found(index, "magma", match="note")) == {f"{topic}.txt" for topic in TOPICS}
    listed = [hit.id for hit in index.search(where=["name~book"], k=100)]
    assert sorted(listed) == [f"book {n}.txt" for n in range(6)]
    assert [len(index.search("magma", k=k)) for k in (1, 5, 11, 12)] == [1, 5, 11, 12]
    pages = [hit.id for offset in (0, 5, 10) for hit in index.search("magma", k=5, offset=offset)]
    assert pages == [hit.id for hit in index.search("magma", k=12)]
    info = index.info()
    assert (info.items, info.by_modality) == (12, {"text": 12})


def test_passages_follow_their_item_through_changes(changing, tmp_path):
    index, folder = changing, tmp_path / "notes"
    before = index.info().passages
    assert index.delete("book 0.txt").deleted == 1
    assert len(index) == len(found(index, "lava")) == 11
    (folder / "book 1.txt").write_text("nothing but anchors")
    (folder / "book 2.txt").rename(folder / "moved.txt")
    (folder / "book 6.txt").write_text(chapters(["winter", "bread"]))
    done = index.sync()
    assert (done.moved, done.replaced) == (1, 1)
    hits = found(index, TOPICS["winter"])
    assert len(hits) == len(index) == 13  # the deleted file is there again
    assert hits["book 1.txt"].passage is None
    compact = partial(index.compact, min_deleted=0)
    for change in (lambda: None, compact, index.refit, compact):
        change()
        hits = found(index, TOPICS["volcanoes"])
        assert len(hits) == 13
        assert set(hits["moved.txt"].passage.split()) <= set(chapters(TOPICS).split())
        assert hits["book 0.txt"].passage in hits["book 0.txt"].text
    assert 0 < index.info().passages < before
    index.check()


def test_long_captions_beside_and_inside_photos_have_passages(tmp_path):
    (tmp_path / "photos").mkdir()
    exif = PIL.Image.Exif()
    exif[0x010E] = chapters(["bread", "winter"])  # ImageDescription
    PIL.Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "inside.jpg", exif=exif)
    PIL.Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "beside.jpg")
    (tmp_path / "photos" / "beside.txt").write_text(chapters(["bread", "ships"]))
    index = Index.create(tmp_path / "made.index", tmp_path / "photos", encoder=WORDLLAMA)
    added = index.last_change
    assert (len(index), added.shortened) == (2, [])
    for photo, topic in (("inside.jpg", "winter"), ("beside.jpg", "ships")):
        hit = index.search(TOPICS[topic])[0]
        assert hit.id == photo
        assert hit.passage in hit.text
    assert index.sync().unchanged == 2


def test_choices_raise_the_item(changing):
    query = "a frozen lake"
    books = {"where": ["name~book"], "k": 6}
    second = changing.search(query, **books)[1].id
    changing.learn(second, query)
    hits = [hit.id for hit in changing.search(query, **books)]
    assert hits[0] == second
    assert len(set(hits)) == 6


def test_rare_words_and_codes_find_the_item_once(changing):
    changing.add(
        [{"id": "code", "text": chapters(TOPICS) + " invoice INV-20341 " + chapters(["winter"])}]
    )
    hits = changing.search("INV-20341", k=13)
    assert hits[0].id == "code"
    assert len({hit.id for hit in hits}) == 13


def test_an_explanation_follows_the_best_passage(index):
    words = TOPICS["volcanoes"]
    hits = index.search(words, k=12)
    rank = next(hit.rank for hit in hits if hit.id == "book 0.txt")
    told = index.explain("book 0.txt", words)
    assert told.rank == rank
    assert told.codes == hits[rank - 1].codes


def test_the_command_prints_the_passage(index, capsys):
    assert main(["search", str(index.folder), TOPICS["winter"], "--json", "-k", "12"]) == 0
    hits = {hit["id"]: hit for hit in json.loads(capsys.readouterr().out)["hits"]}
    assert set(hits["book 4.txt"]["passage"].split()) & set(TOPICS["winter"].split())
    assert main(["search", str(index.folder), TOPICS["winter"], "-k", "12"]) == 0
    assert hits["book 4.txt"]["passage"][:20] in capsys.readouterr().out


@pytest.mark.parametrize("text", [chapters(TOPICS), "一" * 5000, "x" * 40_000, "word " * 2000])
def test_passages_cover_the_text_and_none_is_cut(text):
    encoder = load_encoder(WORDLLAMA)
    assert is_cut(encoder, text)
    passages = find_passages(encoder, text)
    assert not any(is_cut(encoder, text[start:end]) for start, end, _ in passages)
    assert not is_cut(encoder, text[: passages[0].start])
    starts = [one.start for one in passages]
    assert starts == sorted(starts)
    for before, after in itertools.pairwise(passages):
        assert after.start <= before.end + 1
    assert passages[-1].end >= len(text.rstrip())


def test_only_passages_that_would_be_cut_are_shorter_than_others():
    text = "word " * 2000 + "\U0001f9ff" * 4000 + " word" * 2000
    lengths = [
        len(text[start:end].split())
        for start, end, _ in find_passages(load_encoder(WORDLLAMA), text)
    ]
    assert lengths.count(200) >= 19


def test_a_short_text_has_none():
    assert find_passages(load_encoder(WORDLLAMA), "a short note") == []


def test_all_of_a_long_query_is_searched_for(index):
    volcanoes = chapters(["volcanoes"], words=600)
    first, second = (
        index.search(f"{volcanoes} {chapters([end])}", k=12) for end in ("bread", "ships")
    )
    scores = [{hit.id: hit.score for hit in hits} for hits in (first, second)]
    assert scores[0]["bread.txt"] > scores[1]["bread.txt"] + 0.05
    assert scores[1]["ships.txt"] > scores[0]["ships.txt"] + 0.05
    assert {first[0].id, second[0].id} <= {
        "volcanoes.txt",
        *(f"book {number}.txt" for number in range(6)),
    }


def test_a_long_query_is_the_normalised_mean_of_its_passages(index):
    text = chapters(TOPICS)
    texts = [text[start:end] for start, end in divide(index.model.encoder, text, format_text)]
    searcher = SnapshotSearcher(*index._current_state())
    [long], *parts = searcher.encode([SearchRequest(text=one) for one in (text, *texts)])
    mean = np.mean([part.feature for [part] in parts], axis=0)
    assert len(parts) > 10
    np.testing.assert_allclose(long.feature, mean / np.linalg.norm(mean), atol=1e-5)


def test_each_passage_of_a_query_has_its_instruction(index):
    text = chapters(TOPICS, words=100)
    texts = query_passages(index.model.encoder, text, partial(instructed, "Find a note."))
    assert len(texts) > 1
    assert all(one.startswith("Find a note. ") for one in texts)
    assert not any(is_cut(index.model.encoder, one) for one in texts)


def test_it_is_said_once_that_a_query_is_longer_than_what_is_searched_for(index, caplog):
    index.search("a short query")
    index.search(chapters(TOPICS))
    assert not caplog.records
    index.search("word " * 10_000)
    assert [one.getMessage().partition(",")[0] for one in caplog.records] == [
        "only the beginning of the query is searched for: the first 45"
    ]


def test_a_passage_of_subtitles_knows_its_second(tmp_path):
    words = np.random.default_rng(0)
    lines = []
    for number, topic in enumerate(TOPICS):
        for part in range(20):
            start = 600 * number + 20 * part
            times = [
                f"{s // 3600:02}:{s // 60 % 60:02}:{s % 60:02},000" for s in (start, start + 9)
            ]
            text = " ".join(words.choice(TOPICS[topic].split(), 20))
            lines.append(f"{' --> '.join(times)}\n{text}\n")
    (tmp_path / "film.srt").write_text("\n".join(lines))
    index = Index.create(tmp_path / "t.index", tmp_path / "film.srt", encoder=WORDLLAMA)
    for number, topic in enumerate(TOPICS):
        [hit] = index.search(TOPICS[topic])
        assert 600 * number <= hit.moment < 600 * number + 400
