import pytest

from genius.data.ids import IdSet
from genius.errors import BadData


def test_an_id_set_takes_only_ids():
    ids = IdSet()
    assert 7 not in ids
    with pytest.raises(BadData):
        ids.add("cat")
