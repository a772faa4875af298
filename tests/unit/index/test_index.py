from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from genius_search.config import PAPER_SEARCH, SearchConfig
from genius_search.data.mbeir import read_candidates
from genius_search.errors import ArtifactMismatch, ArtifactMissing, BadData, BadRecord, UsageError
from genius_search.index.index import Index
from genius_search.index.request import SearchPart
from genius_search.nn.codebooks import as_floats, normalize
from genius_search.records import Candidate, Modality, format_text, instructed
from research.mbeir_files import write_candidates


@pytest.fixture(scope="module")
def candidates(trained) -> list[Candidate]:
    """Twelve candidates of each modality."""
    pool = list(
        read_candidates(trained.data / "cand_pool" / "global" / "mbeir_union_test_cand_pool.jsonl")
    )
    return [
        candidate
        for modality in Modality
        for candidate in [one for one in pool if one.modality is modality][:12]
    ]


@pytest.fixture(scope="module")
def pool(trained, candidates, tmp_path_factory) -> Path:
    """A data set's root with those candidates only, and its pictures."""
    root = tmp_path_factory.mktemp("pool")
    (root / "mbeir_images").symlink_to(trained.data / "mbeir_images")
    (root / "cand_pool").mkdir()
    write_candidates(root / "cand_pool" / "some.jsonl", candidates)
    return root / "cand_pool" / "some.jsonl"


@pytest.fixture(scope="module")
def shared(model, pool, tmp_path_factory) -> Index:
    """An index that no test changes."""
    folder = tmp_path_factory.mktemp("shared") / "index"
    return Index.create(folder, pool, model=model, embeddings="fused")


@pytest.fixture
def own(shared, model, tmp_path) -> Index:
    """An index that the test may change."""
    shutil.copytree(shared.folder, tmp_path / "index")
    return Index.open(tmp_path / "index", model=model)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text_row(did: str, text: str) -> dict[str, Any]:
    return {"did": did, "modality": "text", "txt": text, "img_path": None}


WIDE = dataclasses.replace(PAPER_SEARCH, beam=500)


def test_the_numbers_of_info_are_counted_right(shared):
    info = shared.info()
    everything = shared.search("anything", k=100, config=WIDE)
    ids = [hit.codes for hit in everything]
    assert info.distinct_ids == len(set(ids))
    assert info.collision_rate == pytest.approx(sum(ids.count(id_) > 1 for id_ in ids) / len(ids))
    (segment,) = shared._snapshot.segments
    sizes = {file.name: file.stat().st_size for file in segment.folder.iterdir()}
    assert info.bytes_per_item == {
        name.partition(".")[0]: size / 36 for name, size in sizes.items()
    }
    assert info.bytes_per_item["embeddings"] == pytest.approx(2 * shared.model.dim + 128 / 36)
    assert info.embeddings == "fused, 16 bits a number"
    assert (info.segments, info.deleted) == (1, 0)
    assert info.generation == 1


def test_hits_are_ranked_from_1_with_scores_that_never_rise_and_carry_their_item(
    shared, candidates
):
    by_id = {candidate.did: candidate for candidate in candidates}
    hits = shared.search("a red star", instruction="Find it.", k=20, config=PAPER_SEARCH)
    assert [hit.rank for hit in hits] == list(range(1, 21))
    assert all(before.score >= after.score for before, after in itertools.pairwise(hits))
    for hit in hits:
        candidate = by_id[hit.id]
        assert (hit.modality, hit.text) == (candidate.modality, candidate.text)
        assert (hit.image is None) == (candidate.image is None)
        assert hit.image is None or Path(hit.image).is_file()
        assert len(hit.codes) == len(hit.log_probabilities) == len(shared.model.codebooks.sizes)
    stopped = dataclasses.replace(PAPER_SEARCH, rerank="codes", candidates=36)
    for hit in shared.search("a red star", instruction="Find it.", k=20, config=stopped):
        assert len(hit.log_probabilities) < len(hit.codes)
        assert all(probability <= 0 for probability in hit.log_probabilities)


@pytest.mark.parametrize("modality", ["image", "text", "image-text", Modality.IMAGE_TEXT])
def test_a_wanted_modality_is_the_only_one_found(shared, modality):
    wanted = Modality.parse(modality) if isinstance(modality, str) else modality
    hits = shared.search("a red star", modality=modality, k=100, config=WIDE)
    assert len(hits) == 12
    assert {hit.modality for hit in hits} == {wanted}


def picture_of(candidates: list[Candidate], root: Path) -> Path:
    return root.parent.parent / next(one.image for one in candidates if one.image is not None)


def test_a_picture_may_be_a_path_or_opened_in_any_mode(shared, candidates, pool):
    path = picture_of(candidates, pool)
    expected = shared.search(image=path, k=5)
    assert shared.search(image=str(path), k=5) == expected
    opened = Image.open(path).convert("RGB")
    assert [hit.id for hit in shared.search(image=opened, k=5)] == [hit.id for hit in expected]
    for mode in ("L", "RGBA", "P"):
        assert len(shared.search(image=opened.convert(mode), k=5)) == 5
    assert shared.search(" \n", image=path, k=5) == expected  # a blank text is none


def test_an_instruction_changes_the_query_and_without_one_the_models_own_is_used(shared, model):
    own = model.instruction_for(Modality.TEXT, Modality.TEXT)
    assert own is not None
    implied = shared.search("a red star", modality="text", k=12)
    assert shared.search("a red star", modality="text", instruction=own, k=12) == implied
    assert shared.search("a red star", modality="text", instruction="Name a price", k=12) != implied


def test_re_ranking_by_embeddings_that_are_not_stored_is_refused_with_advice(model, pool, tmp_path):
    index = Index.create(tmp_path / "index", pool, model=model)
    assert index.info().embeddings == "none"
    with pytest.raises(UsageError, match="embeddings='fused'"):
        index.search("a star", config=SearchConfig(rerank="embeddings"))


def test_without_re_ranking_the_score_is_the_log_probability(shared):
    for hit in shared.search("a red star", hybrid=False, config=SearchConfig(rerank="none")):
        assert hit.score == pytest.approx(sum(hit.log_probabilities), abs=1e-4)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"query": "a red star", "k": 0}, "k is 0"),
        ({"query": "a red star", "k": 2.5}, "k is 2.5 .*, expected a whole number"),
        ({"query": "a red star", "offset": None}, "offset is None"),
        ({"query": "a red star", "order_by": ["price"]}, "order_by is .*, expected the name"),
        ({"query": "a red star", "facets": [5]}, r"facets are \(5,\)"),
        ({"query": "a red star", "facets": {"price": "abc"}}, "the bounds of price are"),
        ({"where": 5}, r"conditions \[5\]"),
        ({"where": {"price": np.array(b"5")}}, "expected a text, a number"),
        ({"query": "a red star", "k": 10**9 + 1}, "k is 1000000001"),
        ({"query": "caf\udce9"}, "half a character"),
        ({"query": "x", "instruction": "\ud800"}, "half a character"),
        ({"instruction": "Find a photo"}, "a text, an image, or both"),
        ({"query": " \n"}, "a text, an image, or both"),
        ({"query": "a", "parts": [SearchPart(text="b", id="1")]}, "a text, an image, or both"),
        ({"parts": [SearchPart(text="b", weight=2.0)], "combine": "any"}, "no effect"),
    ],
)
def test_a_request_that_means_nothing_is_refused(shared, asked, said):
    with pytest.raises(UsageError, match=said):
        shared.search(**asked)


def test_an_index_built_by_adding_equals_one_built_at_once(model, candidates, pool, tmp_path):
    root = pool.parent.parent
    halves = [root / "cand_pool" / f"half{number}.jsonl" for number in (0, 1)]
    for number, path in enumerate(halves):
        write_candidates(path, candidates[number::2])
    index = Index.create(tmp_path / "halves", halves[0], model=model)
    index.add(halves[1])
    whole = Index.create(tmp_path / "whole", pool, model=model)
    found, expected = (
        {hit.id: (hit.codes, pytest.approx(hit.score, abs=1e-5)) for hit in hits}
        for hits in (
            index.search("a star", k=99, config=WIDE),
            whole.search("a star", k=99, config=WIDE),
        )
    )
    assert found.keys() == expected.keys()
    assert all(found[item][0] == expected[item][0] for item in found)


@pytest.mark.parametrize(
    "kind", ["empty folder", "empty file", "only broken", "no such", "another ending"]
)
def test_a_pool_without_anything_usable_is_refused_and_leaves_no_index(model, tmp_path, kind):
    pool = tmp_path / ("pool.csv" if kind == "another ending" else "pool.jsonl")
    match kind:
        case "empty file":
            pool.write_text("")
        case "another ending":
            pool.write_text("a,b")
        case "empty folder" | "only broken":
            pool = tmp_path / "pool"
            pool.mkdir()
            if kind == "only broken":
                (pool / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n torn")
    with pytest.raises(BadData):
        Index.create(tmp_path / "index", pool, model=model)
    assert not (tmp_path / "index").exists()
    with pytest.raises(ArtifactMissing):
        Index.open(tmp_path / "index")


def test_an_index_that_could_not_be_made_or_added_to_leaves_other_files_alone(own, model, tmp_path):
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n torn")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    before = own.info()
    with pytest.raises(UsageError, match="choose a new folder"):
        Index.create(tmp_path / "mine", tmp_path / "torn", model=model)
    with pytest.raises(BadData, match=r"nothing to index.*torn\.png: "):
        own.add(tmp_path / "torn")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    assert not (own.folder / ".work").exists()
    assert own.info() == before


def test_a_pool_that_names_a_candidate_twice_is_refused_with_file_and_line(model, tmp_path):
    rows = write_rows(tmp_path / "pool.jsonl", [text_row("1:1", "a"), text_row("1:1", "b")])
    with pytest.raises(BadRecord, match=r"pool\.jsonl:2"):
        Index.create(tmp_path / "index", rows, model=model)


def test_an_index_of_another_model_does_not_open(trained, tmp_path):
    index = Index.from_vectors(tmp_path / "own.index", np.eye(20))
    with pytest.raises(ArtifactMismatch, match="another model"):
        Index.open(index.folder, model=trained.model)


def test_raw_embeddings_re_rank_by_the_sums_of_the_encoders_features(model, pool, tmp_path):
    index = Index.create(tmp_path / "index", pool, model=model, embeddings="raw")
    config = dataclasses.replace(PAPER_SEARCH, beam=500, rerank="embeddings")
    asked = model.instruction_for(Modality.TEXT, Modality.IMAGE)
    hits = index.search("a red star", instruction=asked, hybrid=False, k=100, config=config)
    text = as_floats(model.encoder.text_features([instructed(asked, "a red star")]))
    by_id = {hit.id: hit for hit in hits}
    for candidate in list(read_candidates(pool))[12:24]:  # texts alone
        own = as_floats(model.encoder.text_features([format_text(candidate.text)]))
        expected = float((normalize(text) * normalize(own)).sum())
        assert by_id[candidate.did].score == pytest.approx(expected, abs=2e-3)


def test_a_whole_data_set_is_no_pool_and_its_pools_are_named(model, trained, tmp_path):
    with pytest.raises(BadData, match=r"give one of its pools.*cand_pool"):
        Index.create(tmp_path / "index", trained.data, model=model)
