"""mteb evaluates a model on tasks of the synthetic catalogue, without a network."""

# ruff: noqa: PLC0415  (mteb is optional, takes seconds, and is imported after its folders are set)

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from genius_search.data.images import open_image
from genius_search.data.mbeir import MBeir, read_candidates, read_qrels, read_queries
from genius_search.progress import Silent
from genius_search.records import Modality, parse_id
from research.evaluate import evaluate
from research.mteb import MtebModel
from research.settings import EvaluationConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mteb") is None, reason="needs mteb"),
]

LETTERS = {Modality.IMAGE: "i", Modality.TEXT: "t", Modality.IMAGE_TEXT: "it"}


@pytest.fixture(scope="module")
def mteb(tmp_path_factory) -> Any:
    """The package, without a hub and with caches in temporary folders."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "DISABLE_TELEMETRY"):
            patch.setenv(name, "1")
        for name in ("HF_HOME", "MTEB_CACHE"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        import mteb
        import mteb.mocks

        yield mteb


@pytest.fixture(scope="module")
def data(trained) -> MBeir:
    return MBeir(trained.data)


def dataset(*rows: dict[str, Any]) -> Any:
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageColumn

    columns = list(dict.fromkeys(name for row in rows for name in row))
    types = {name: ImageColumn() if name == "image" else Value("string") for name in columns}
    values = {name: [row.get(name) for row in rows] for name in columns}
    return Dataset.from_dict(values, features=Features(types))


def catalogue_task(mteb, data: MBeir, row):
    """Return a row of the catalogue as a task of mteb, with columns instead of paths."""
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    def columns(record, id_):
        image = None if record.image is None else open_image(data.image_path(record.image))
        return {"id": id_, "text": record.text, "image": image}

    queries = list(read_queries(row.queries))
    candidates = list(read_candidates(row.local_pool))
    modality, target_modality = queries[0].modality, candidates[0].modality
    dataset_id, _ = parse_id(queries[0].qid)
    instruction = data.instructions.lookup(dataset_id, modality, target_modality)[0]

    class CatalogueTask(AbsTaskRetrieval):
        metadata = mteb.mocks.MockAny2AnyRetrievalT2ITask.metadata.model_copy(
            update={
                "name": "Catalogue",
                "category": f"{LETTERS[modality]}2{LETTERS[target_modality]}",
                "prompt": {"query": instruction},
            }
        )

        def load_data(self, **_):
            self.dataset = {
                "default": {
                    "test": {
                        "queries": dataset(*(columns(query, query.qid) for query in queries)),
                        "corpus": dataset(*(columns(item, item.did) for item in candidates)),
                        "relevant_docs": read_qrels(row.qrels),
                        "top_ranked": None,
                    }
                }
            }
            self.data_loaded = True

    return CatalogueTask(), len(candidates)


@pytest.fixture(scope="module")
def our_measures(model, data, tmp_path_factory) -> dict[tuple[int, str], dict[str, float]]:
    """Measures of `research.evaluate` by task and method."""
    config = EvaluationConfig(
        pools=("local",), methods=("generative", "exact-raw"), instructions="first"
    )
    result = evaluate(data, model, config, tmp_path_factory.mktemp("ours"), progress=Silent())
    return {(row.task_id, row.method): dict(row.measures) for row in result.rows}


@pytest.mark.parametrize("method", ["generative", "exact-raw"])
def test_mteb_measures_tasks_like_evaluate(mteb, model, data, our_measures, method):
    hit_rates, chance = [], []
    rows = data.rows("test")
    for row in rows[::3]:
        task, size = catalogue_task(mteb, data, row)
        result = mteb.evaluate(MtebModel(model, method=method), task, cache=None, co2_tracker=False)
        (scores,) = result.task_results[0].scores["test"]
        expected = our_measures[row.task_id, method]
        # Stored features have 16 bits and mteb's have 32, so that neighbours may swap ranks.
        assert scores["hit_rate_at_10"] == pytest.approx(expected["R@10"], abs=1 / 12 + 1e-4)
        assert scores["ndcg_at_10"] == pytest.approx(expected["nDCG@10"], abs=0.05)
        hit_rates.append(scores["hit_rate_at_10"])
        chance.append(10 / size)
    assert method == "generative" or np.mean(hit_rates) > 3 * np.mean(chance)
