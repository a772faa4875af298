"""The share of exact search's first ten that an index keeps is chosen, measured, and measured again."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search import Index
from genius_search.errors import UsageError


def draw(items, dim, seed=0):
    return np.random.default_rng(seed).standard_normal((items, dim)).astype(np.float32)


def share_of_ten(index, vectors, queries):
    """Return the share of the ten largest cosines that searches without densities find."""
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    shares = []
    for query in queries:
        nearest = np.argsort(-(units @ query))[:10]
        hits = index.search(vector=query, k=10)
        shares.append(len({str(row) for row in nearest} & {hit.id for hit in hits}) / 10)
    return np.mean(shares)


def test_more_recall_takes_more_bits_and_a_longer_shortlist(tmp_path):
    vectors = draw(3_000, 48)
    queries = draw(30, 48, seed=1)
    shares = []
    for recall in (0.6, 0.98):
        index = Index.from_vectors(
            tmp_path / str(recall),
            vectors,
            recall=recall,
            embedding_bits=None if recall > 0.9 else 2,
        )
        assert index.info().measured.kept >= recall
        shares.append(share_of_ten(index, vectors, queries))
    assert shares[1] > 0.93 > shares[0]


def test_few_numbers_get_eight_bits_where_four_lose_more_than_a_fiftieth(tmp_path):
    index = Index.from_vectors(tmp_path / "i", draw(17_000, 16))
    assert index._snapshot.manifest.embedding_bits == 8


def test_the_measured_share_counts_what_bits_lose(tmp_path):
    vectors = draw(2_000, 64)
    index = Index.from_vectors(tmp_path / "i", vectors, embedding_bits=2)
    noise = draw(200, 64, seed=1)
    queries = vectors[:200] / np.linalg.norm(vectors[:200], axis=1, keepdims=True)
    queries += 0.3 * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    share = share_of_ten(index, vectors, queries)
    assert share < 0.9
    assert index.info().measured.kept_with_densities == pytest.approx(share, abs=0.05)
    index.refit()
    assert index.info().measured.kept_with_densities < 0.9


def test_vectors_whose_nearest_ten_eight_bits_lose_are_stored_whole(tmp_path):
    vectors = np.eye(512)[np.random.default_rng(0).integers(0, 512, 500)]
    index = Index.from_vectors(tmp_path / "i", vectors.astype(np.float32))
    assert index._snapshot.manifest.embedding_bits == 16
    index = Index.from_vectors(tmp_path / "j", draw(500, 512))
    assert index._snapshot.manifest.embedding_bits == 8


@pytest.mark.parametrize(("items", "bits"), [(600, None), (600, 16), (1_500, None)])
def test_close_items_are_found_by_their_vectors(items, bits, tmp_path):
    vectors = np.exp(4 * draw(1, 30)) * np.exp(0.1 * draw(items, 30, seed=1))
    index = Index.from_vectors(tmp_path / "i", vectors.astype(np.float32), embedding_bits=bits)
    firsts = index.search_vectors(vectors, k=1)
    are_found = [int(hit.id) == row for row, (hit,) in enumerate(firsts)]
    assert np.mean(are_found) > 0.995


def test_a_target_that_is_no_share_is_refused(tmp_path):
    with pytest.raises(UsageError, match="recall: 95 is no share between 0 and 1"):
        Index.from_vectors(tmp_path / "i", draw(60, 4), recall=95)
    assert not (tmp_path / "i").exists()


def test_a_target_that_would_be_ignored_is_refused(tmp_path):
    with pytest.raises(UsageError, match="recall: only an index that is created with an encoder"):
        Index.from_vectors(tmp_path / "i", draw(60, 4), recall=0.95, embeddings="none")


def test_recall_is_measured_again_when_an_index_has_grown_by_half(tmp_path):
    index = Index.from_vectors(tmp_path / "i", draw(80, 6), recall=0.9)
    index.add_vectors(draw(30, 6, seed=1), ids=[f"b{number}" for number in range(30)])
    assert index.info().measured.items == 80
    index.add_vectors(draw(30, 6, seed=2), ids=[f"c{number}" for number in range(30)])
    assert index.info().measured.items == 140
    index.refit(recall=0.8)
    assert index._snapshot.manifest.recall == 0.8
