from __future__ import annotations

import numpy as np

from genius_search.search.beam import Frontier, choose_all, choose_best
from genius_search.search.table import Children

OWNER = np.array([0, 0, 0, 2, 2])
SCORES = np.array([-3, -1, -3, -np.inf, -5], dtype=np.float32)


def test_the_best_of_each_query_come_in_their_places_and_the_impossible_nowhere():
    chosen = choose_best(OWNER, SCORES, np.array([2, 9, 9]))
    assert chosen.query.tolist() == [0, 0, 2]
    assert chosen.place.tolist() == [0, 1, 0]
    assert chosen.child.tolist() == [1, 0, 4]


def test_everything_keeps_its_order():
    chosen = choose_all(OWNER, 3)
    assert chosen.query.tolist() == OWNER.tolist()
    assert chosen.place.tolist() == [0, 1, 2, 0, 1]
    assert chosen.child.tolist() == [0, 1, 2, 3, 4]


def test_a_frontier_grows_by_a_level_and_knows_where_each_place_came_from():
    root = Frontier.root(2, [10], 2)
    children = Children(
        np.array([0, 0, 1]), np.array([4, 7, 5]), np.array([[0], [6], [0]]), np.array([[6], [10], [2]])
    )
    assert root.owners(children).tolist() == [0, 0, 1]
    gained = np.array([-2, -1, -4], dtype=np.float32)
    frontier = root.extend(children, choose_best(root.owners(children), gained, np.array([5, 5])), gained, 0)
    assert frontier.rows.tolist() == [[0, 0], [1, 1]]
    assert frontier.is_filled().tolist() == [[True, True], [True, False]]
    assert frontier.codes[:, :, 0][frontier.is_filled()].tolist() == [7, 4, 5]
    assert frontier.low[..., 0].tolist() == [[6, 0], [0, 0]]
    assert frontier.high[..., 0].tolist() == [[10, 6], [2, 0]]
    assert frontier.total.tolist() == [[-1, -2], [-4, -np.inf]]
    np.testing.assert_array_equal(
        frontier.history, [[[-1, np.nan], [-2, np.nan]], [[-4, np.nan], [-np.inf, -np.inf]]]
    )
    second = frontier.take(np.array([1]))
    assert (second.queries.tolist(), second.low.shape) == ([1], (1, 2, 1))
    turned = frontier.places(np.array([1, 0]))
    assert turned.total.tolist() == [[-2, -1], [-np.inf, -4]]


def test_growing_by_nothing_leaves_places_without_ids():
    root = Frontier.root(2, [10, 4], 3)
    nothing = np.zeros(0, dtype=np.int64)
    children = Children(nothing, nothing, nothing.reshape(0, 2), nothing.reshape(0, 2))
    frontier = root.extend(children, choose_all(nothing, 2), None, 0)
    assert frontier.is_filled().tolist() == [[False], [False]]
    assert np.isneginf(frontier.history).all()
