"""The tree of codes, compared with counting the items one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from genius_search.search.tree import CodeTree, Ranges, UnknownPrefix


def pools(plain):
    """Drawn pools of several parts with deleted items: the tree, and the living items' IDs by part and row."""
    for seed in range(plain.SOME_POOLS):
        random = np.random.default_rng(seed)
        sizes = plain.sizes_of(seed % plain.NUM_MODELS)
        pool = plain.draw_pool(random, sizes)
        living = {
            (segment, row): tuple(codes[row].tolist())
            for segment, (codes, alive) in enumerate(zip(pool.codes, pool.alive, strict=True))
            for row in range(len(codes))
            if alive is None or alive[row]
        }
        yield CodeTree(pool.segments), sizes, living


def prefixes(sizes, living) -> Counter:
    """How many items there are below each prefix."""
    return Counter(id_[:depth] for id_ in living.values() for depth in range(len(sizes) + 1))


def test_counts_are_those_of_the_living_items_and_childrens_counts_sum_to_the_nodes(plain):
    for tree, sizes, living in pools(plain):
        expected = prefixes(sizes, living)
        assert tree.count(tree.root()).tolist() == [len(living)]
        for prefix, count in expected.items():
            ranges = tree.find(prefix)
            assert tree.count(ranges).tolist() == [count]
            if len(prefix) == len(sizes):
                continue
            children, counts = tree.children(ranges, len(prefix))
            found = dict(zip(children.code.tolist(), counts.tolist(), strict=True))
            assert found == {
                one[-1]: number
                for one, number in expected.items()
                if len(one) == len(prefix) + 1 and one[:-1] == prefix
            }
            assert sum(found.values()) == count


def test_what_no_living_item_has_is_not_there(plain):
    for tree, sizes, living in pools(plain):
        known = prefixes(sizes, living)
        for code in range(sizes[0] + 1):
            if (code,) not in known:
                with pytest.raises(UnknownPrefix, match=f"begins with {code}$"):
                    tree.find([code])


def test_examples_are_different_living_items_below_the_prefix(plain):
    for tree, sizes, living in pools(plain):
        below = [prefix for prefix in prefixes(sizes, living) if prefix]
        found = [tree.find(prefix) for prefix in below]
        if not found:
            continue
        together = Ranges(*(np.concatenate(column) for column in zip(*found, strict=True)))
        for most in (0, 1, 3, 100):
            picked = tree.pick(together, most)
            places = list(zip(picked.segments.tolist(), picked.rows.tolist(), strict=True))
            for number, prefix in enumerate(below):
                own = [place for place, owner in zip(places, picked.owner, strict=True) if owner == number]
                count = sum(id_[: len(prefix)] == prefix for id_ in living.values())
                assert len(set(own)) == len(own) == min(most, count)
                assert all(living[place][: len(prefix)] == prefix for place in own)


def test_shared_prefixes_are_those_of_several_living_items_the_largest_first(plain):
    for tree, sizes, living in pools(plain):
        for depth in range(1, len(sizes) + 1):
            counts = Counter(id_[:depth] for id_ in living.values())
            expected = sorted(((-count, prefix) for prefix, count in counts.items() if count > 1))
            found = tree.shared_prefixes(depth)
            ids = []
            for low, high in zip(*found.ranges, strict=True):
                segment = int(np.flatnonzero(high > low)[0])
                ids.append(tuple(tree.segments[segment].table.ids[low[segment], :depth].tolist()))
            assert list(zip((-found.items).tolist(), ids, strict=True)) == expected


def test_a_pool_of_nothing_has_a_root_and_no_children():
    tree = CodeTree([])
    assert tree.count(tree.root()).tolist() == [0]
    children, counts = tree.children(tree.root(), 0)
    assert len(children.code) == len(counts) == 0
    assert len(tree.pick(tree.root(), 4).rows) == 0
    assert len(tree.shared_prefixes(1).items) == 0
