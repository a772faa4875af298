"""Validation queries: described once, searched exactly between epochs, and the best state kept."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from genius_search.data.images import open_image
from genius_search.data.mbeir import MBeir, read_pool, read_queries
from genius_search.embed_mbeir import candidate_row, choose_instruction, query_row
from genius_search.encoders.small import load_small
from genius_search.errors import BadData
from genius_search.presets import preset
from genius_search.progress import Silent
from genius_search.records import TASKS, candidate_number
from genius_search.training import validation as module
from genius_search.training.embed import TrainingRecords
from genius_search.training.encoder import train_encoder
from genius_search.training.validation import Validation, validation_files


@pytest.fixture
def data(trained):
    return MBeir(trained.data)


def settings(patience):
    tiny = preset("tiny").encoder
    training = replace(tiny.training, epochs=2.0, checkpoint_seconds=0.0)
    return replace(tiny, network=replace(tiny.network, dim=16), training=training, patience=patience)


@torch.no_grad()
def vector(encoder, row):
    total = torch.zeros(1, encoder.dim)
    if row.image is not None:
        total += encoder.encode_images([open_image(row.image)])
    if row.text:
        total += encoder.encode_texts([row.text])
    return F.normalize(total, dim=-1)[0]


def reciprocal_ranks(data, encoder):
    """Slow and simple: one after the other, from files to ranks."""
    pool = list(read_pool(data.global_pool("val")))
    vectors = torch.stack([vector(encoder, candidate_row(data, candidate)) for candidate in pool])
    for row in data.rows("val"):
        wanted = TASKS[row.task_id][1]
        for query in read_queries(row.queries):
            instruction = choose_instruction(data.instructions, query, wanted, "hashed", seed=0)
            one = vector(encoder, query_row(data, query, wanted, instruction, 0, split="val"))
            order = (vectors @ one).argsort(descending=True).tolist()
            rank = next(n for n, place in enumerate(order, 1) if pool[place].did in query.positives)
            yield 1 / rank if rank <= 10 else 0.0


def test_the_kept_state_has_the_best_measure_and_that_is_the_mean_reciprocal_rank(data, tmp_path):
    train_encoder(TrainingRecords(data), tmp_path, settings(patience=5), progress=Silent())
    log = [json.loads(line) for line in (tmp_path / "encoder" / "metrics.jsonl").read_text().splitlines()]
    measured = [line["validation"] for line in log if "validation" in line]
    assert len(measured) == 2
    encoder = load_small(tmp_path / "encoder")
    expected = np.mean(list(reciprocal_ranks(data, encoder)))
    assert max(measured) == pytest.approx(expected, abs=0.01)  # descriptions are kept with 16 bits
    assert expected > 0.02


class Oracle:
    """An encoder, and a network over it, for which a query is its first right answer."""

    needs_pixels, spec, dim, fingerprint = False, "oracle", 8, "of a test"

    def __init__(self, data):
        self.answers = {
            query.qid: query.positives[0] for row in data.rows("val") for query in read_queries(row.queries)
        }

    def text_features(self, inputs):
        ids = [self.answers.get(one.key.id, one.key.id) for one in inputs]
        return np.array([np.random.default_rng(candidate_number(id_)).standard_normal(8) for id_ in ids])

    image_features = text_features

    def embedding(self, batch):
        return torch.where(batch.has_text[:, None], batch.text, batch.image)


def test_a_large_pool_is_thinned_but_keeps_the_answers(data, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_QUERIES", 16)
    monkeypatch.setattr(module, "MOST_OTHERS", 8)
    oracle = Oracle(data)
    validation = Validation.prepare(data, oracle, tmp_path / "few", progress=Silent())
    assert len(validation.queries) == 16
    answers = set().union(*validation.answers)
    assert len(answers) < len(validation.candidates) <= len(answers) + 8
    assert validation.measure(oracle.embedding) == 1


def test_an_answer_outside_the_pool_is_an_error(data, tmp_path, monkeypatch):
    oracle = Oracle(data)
    lost = next(iter(oracle.answers.values()))
    pool = [candidate for candidate in read_pool(data.global_pool("val")) if candidate.did != lost]
    monkeypatch.setattr(module, "read_pool", lambda _: iter(pool))
    with pytest.raises(BadData, match=f"1 right answers of the split val .* {candidate_number(lost)}"):
        Validation.prepare(data, oracle, tmp_path, progress=Silent())


def test_without_validation_queries_nothing_is_measured(trained, tmp_path):
    shutil.copytree(trained.data, tmp_path / "data", symlinks=True, ignore=shutil.ignore_patterns("val"))
    data = MBeir(tmp_path / "data")
    assert validation_files(data) == []
    train_encoder(TrainingRecords(data), tmp_path / "model", settings(patience=1), progress=Silent())
    assert "validation" not in (tmp_path / "model" / "encoder" / "metrics.jsonl").read_text()
