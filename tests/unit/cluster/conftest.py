"""A pool with every modality, the index of it, and its cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from genius_search.cluster.build import Settings, build_cluster
from genius_search.data.mbeir import read_candidates
from genius_search.index.index import Index
from genius_search.records import Modality
from research.mbeir_files import write_candidates


@pytest.fixture(scope="session")
def pool(trained, tmp_path_factory) -> Path:
    """Forty candidates of each modality, and their pictures."""
    given = list(
        read_candidates(trained.data / "cand_pool" / "global" / "mbeir_union_test_cand_pool.jsonl")
    )
    root = tmp_path_factory.mktemp("pool")
    (root / "mbeir_images").symlink_to(trained.data / "mbeir_images")
    (root / "cand_pool").mkdir()
    some = [one for kind in Modality for one in [one for one in given if one.modality is kind][:40]]
    write_candidates(root / "cand_pool" / "some.jsonl", some)
    return root / "cand_pool" / "some.jsonl"


@pytest.fixture
def texts(tmp_path) -> Path:
    """A folder of 24 texts."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(24):
        (folder / f"note {number}.txt").write_text(f"a note about number {number}")
    return folder


@pytest.fixture(scope="session")
def single(model, pool, tmp_path_factory) -> Index:
    """One index of the pool."""
    return Index.create(
        tmp_path_factory.mktemp("single") / "index", pool, model=model, embeddings="fused"
    )


@pytest.fixture(scope="session")
def cluster_settings(pool, trained) -> Settings:
    return Settings(str(pool), model=str(trained.model), shards=3, embeddings="fused")


@pytest.fixture(scope="session")
def cluster_folder(cluster_settings, tmp_path_factory) -> Path:
    """A cluster that no test changes."""
    folder = tmp_path_factory.mktemp("cluster") / "X"
    build_cluster(folder, cluster_settings)
    return folder
