import json

import pytest

from genius_search.errors import ArtifactMissing, BadData
from genius_search.lab.report.evaluated import read_evaluation


def test_an_estimate_is_the_mean_of_the_seeds_and_their_spread(system):
    found = system("ours", {"generative": [1, 1, 6, 0]}, {"generative": [1, 2, 3, 6]})
    one = found.estimate("global", "generative", "toys_task0")
    assert (one.value, one.sd) == (pytest.approx(62.5), pytest.approx(17.6777, abs=1e-3))
    average = found.average("global", "generative", "R@1", with_interval=True)
    assert average.value == pytest.approx(37.5)
    assert average.low < 37.5 < average.high


def test_a_query_counts_its_mean_over_seeds(system):
    found = system("ours", {"generative": [1, 1, 6, 0]}, {"generative": [1, 2, 3, 6]})
    values = found.per_query("global", "generative", "R@1")["toys_task1"]
    assert values == {"7:0": 1.0, "7:1": 0.5, "7:2": 0.0, "7:3": 0.0}


def test_nothing_is_estimated_of_what_was_not_evaluated(system):
    found = system("ours", {"generative": [1, 1, 1, 1]})
    assert found.estimate("local", "generative", "toys_task0") is None
    assert found.average("global", "exact-fused") is None
    assert found.methods("local") == []


def test_known_methods_come_in_the_order_of_tables_and_others_behind(system):
    places = [1, 1, 1, 1]
    found = system("ours", {"grace-string": places, "generative": places, "exact-raw": places})
    assert found.methods("global") == ["exact-raw", "generative", "grace-string"]


def test_what_is_no_evaluation_is_refused(tmp_path):
    with pytest.raises(ArtifactMissing, match=r"holds no results\.json"):
        read_evaluation(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps({"rows": []}))
    with pytest.raises(BadData, match="not what `genius evaluate` writes"):
        read_evaluation(tmp_path)


def test_a_lost_run_is_named(system):
    found = system("ours", {"generative": [1, 1, 1, 1]})
    (found.seeds[0].folder / "runs" / "toys_task0_test.global.generative.trec").unlink()
    with pytest.raises(ArtifactMissing, match=r"toys_task0_test\.global\.generative\.trec is missing"):
        found.per_query("global", "generative")
