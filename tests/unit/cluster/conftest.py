"""A pool with every modality, an index of it, and a cluster of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from genius_search.cluster.build import Settings, build_cluster
from genius_search.data.mbeir import read_candidates
from genius_search.index.index import Index
from genius_search.records import Candidate, Modality
from research.mbeir_files import write_candidates


@pytest.fixture(scope="session")
def pool(trained, tmp_path_factory) -> Path:
    """Forty candidates of each modality, and their pictures."""
    global_pool = trained.data / "cand_pool" / "global" / "mbeir_union_test_cand_pool.jsonl"
    of_modality: dict[Modality, list[Candidate]] = {modality: [] for modality in Modality}
    for candidate in read_candidates(global_pool):
        of_modality[candidate.modality].append(candidate)
    root = tmp_path_factory.mktemp("pool")
    (root / "mbeir_images").symlink_to(trained.data / "mbeir_images")
    (root / "cand_pool").mkdir()
    file = root / "cand_pool" / "some.jsonl"
    write_candidates(
        file, [candidate for candidates in of_modality.values() for candidate in candidates[:40]]
    )
    return file


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
    """An index of the pool."""
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
