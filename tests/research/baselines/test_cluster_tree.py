"""Trees of clusters: paths of known and of new items."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from research.baselines.ids import ClusterTree


def draw(items, seed=0, dim=6):
    return torch.randn(items, dim, generator=torch.Generator().manual_seed(seed))


def build(items, *, branches=3, leaf=4, seed=0):
    return ClusterTree.build(
        items, branches=branches, leaf=leaf, generator=torch.Generator().manual_seed(seed)
    )


@settings(max_examples=30)
@given(
    items=st.integers(1, 120), branches=st.integers(2, 6), leaf=st.integers(1, 8), seed=st.integers(0, 1000)
)
def test_each_item_has_a_path_of_its_own_and_none_begins_another(items, branches, leaf, seed):
    _, paths = build(draw(items, seed), branches=branches, leaf=leaf)
    distinct = set(paths)
    assert len(distinct) == items
    assert not any(path[:length] in distinct for path in distinct for length in range(len(path)))
    assert max(max(path[:-1], default=0) for path in paths) < branches
    assert max(path[-1] for path in paths) < leaf


@settings(max_examples=30)
@given(items=st.integers(1, 120), seed=st.integers(0, 1000))
def test_going_down_to_the_nearest_centroid_finds_the_paths_again(items, seed):
    vectors = draw(items, seed)
    tree, paths = build(vectors)
    assert tree.paths(vectors) == paths
