from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from genius_search import registry
from genius_search.errors import UsageError
from genius_search.registry import find_part, known_parts

GROUP = "genius_search.quantizers"


@pytest.fixture
def installed(monkeypatch):
    """Entry points as installed packages would declare them."""
    points = EntryPoints(
        [
            EntryPoint("flat", "collections:OrderedDict", GROUP),
            EntryPoint("mine", "collections:OrderedDict", GROUP),
            EntryPoint("broken", "no_such_package:Quantizer", GROUP),
            EntryPoint("elsewhere", "collections:OrderedDict", "genius_search.encoders"),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", points.select)


@pytest.mark.usefixtures("installed")
def test_a_part_is_found_among_our_own_first_and_then_among_installed_ones():
    assert find_part("quantizers", "mine", {"mine": int}) is int
    assert find_part("quantizers", "flat", {"mine": int}) is sys.modules["collections"].OrderedDict
    assert known_parts("quantizers", {"mine": int}) == ["mine", "broken", "flat"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "said"), [("nothing", "mine, broken, flat"), ("broken", "no_such_package")])
def test_a_part_that_cannot_be_had_is_refused_with_what_there_is(name, said):
    with pytest.raises(UsageError, match=said):
        find_part("quantizers", name, {"mine": int})
