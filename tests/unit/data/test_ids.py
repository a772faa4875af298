import pytest

from genius_search.data.mbeir import IdSet, NameSet
from genius_search.errors import BadData


def test_an_id_set_takes_only_ids():
    ids = IdSet()
    assert 7 not in ids
    with pytest.raises(BadData):
        ids.add("cat")


def test_a_name_set_knows_what_it_has_seen_also_after_growing():
    names = NameSet()
    assert all(names.add(f"{number}.jpg") for number in range(5_000))
    assert not any(names.add(f"{number}.jpg") for number in range(5_000))
    assert len(names) == 5_000
    assert names.add("")


def test_a_name_set_never_takes_a_new_name_for_a_seen_one():
    names, seen = NameSet(), set()
    for number in (n * n % 7_919 for n in range(20_000)):  # half of them again
        name = f"mbeir_images/{number:x}/{number}.jpg"
        assert names.add(name) == (name not in seen)
        seen.add(name)
    assert len(names) == len(seen) > 3_000
