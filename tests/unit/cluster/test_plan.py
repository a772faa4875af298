"""What a cluster takes, on paper."""

from __future__ import annotations

import pytest

from genius_search.cluster.build import Settings, build_cluster
from genius_search.cluster.folder import open_index
from genius_search.cluster.plan import PlanSettings, plan_cluster
from genius_search.errors import UsageError


def figures(**given) -> dict[str, float]:
    return {figure.name: figure.value for figure in plan_cluster(PlanSettings(**given))}


def test_figures_follow_from_those_above_them():
    found = figures(
        items=1e9, dim=768, levels=8, embedding_bits=8, memory_gb=80.0, cores=10, build_machines=5
    )
    assert found["ID tables"] == 24e9
    assert found["stored embeddings"] == 771e9
    assert found["in memory"] == 795e9
    assert found["shards"] == 14  # 795 / 60
    assert found["machines that serve"] == 27
    assert found["encoding"] == pytest.approx(1e9 / 2400 / 50 / 3600)


def test_calls_cost_only_where_there_are_several_shards():
    assert figures(items=1e8, search_ms=3.0)["a query"] == 3
    assert figures(items=1e8, search_ms=3.0, shards=8, batch=16, call_ms=5.0)["a query"] == 3 + 2 * 8 / 16 * 5


def test_the_size_on_disk_is_that_of_a_built_cluster(trained, tmp_path):
    pool = tmp_path / "pool.jsonl"
    pool.write_text("".join(f'{{"id": "{n}", "text": "text {n}"}}\n' for n in range(300)))
    build_cluster(tmp_path / "X", Settings(str(pool), model=str(trained.model), embeddings="fused", shards=2))
    index = open_index(tmp_path / "X")
    (first, *_) = segments = index.snapshot.segments
    planned = figures(
        items=float(index.snapshot.num_alive),
        dim=index.model.dim,
        levels=index.model.num_levels,
        embedding_bits=16,
    )
    arrays = ("ids", "starts", "bucket_starts", "items", "typicality", "embeddings", "embedding_densities")
    held = sum((one.folder / f"{name}.npy").stat().st_size for one in segments for name in arrays)
    assert held == pytest.approx(planned["in memory"], rel=0.05)
    assert first.table.ids.itemsize == 1


@pytest.mark.parametrize("given", [{"items": 0.0}, {"items": 1e9, "batch": 0}, {"items": 1e9, "shards": -1}])
def test_numbers_that_make_no_sense_are_refused(given):
    with pytest.raises(UsageError):
        figures(**given)
