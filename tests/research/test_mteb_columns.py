from __future__ import annotations

import pytest

from genius_search.errors import BadData
from research.mteb import Content, read_columns


class Columns:
    """A data set like ``datasets.Dataset``, which remembers what was asked of it."""

    def __init__(self, columns, asked=None):
        self.columns = columns
        self.asked = [] if asked is None else asked

    @property
    def column_names(self):
        return list(self.columns)

    def select_columns(self, names):
        return Columns({name: self.columns[name] for name in names}, self.asked)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows):
        self.asked.append((rows.start, rows.stop, tuple(self.columns)))
        return {name: values[rows] for name, values in self.columns.items()}


def read(columns, modalities=("text", "image"), batch_size=10):
    return [one for batch in read_columns(Columns(columns), modalities, batch_size) for one in batch]


def test_columns_of_modalities_that_the_task_lacks_are_not_even_decoded():
    data = Columns({"id": ["a"], "text": ["x"], "image": ["never looked at"]})
    assert [*read_columns(data, ("text",), 10)] == [[Content("a", None, "x", None)]]
    assert data.asked == [(0, 10, ("id", "text"))]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"_id": ["a"], "text": ["x"]}, "the columns are _id, text; expected one called id"),
        ({"id": ["a"], "image": [{"bytes": b""}]}, "a: its image is a dict, expected a decoded picture"),
        ({"id": ["a"], "text": [["hello", "you"]]}, "a: its text is a list; conversations"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(columns, problem):
    with pytest.raises(BadData, match=problem):
        read(columns)
