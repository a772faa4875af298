"""The committed model that many tests share is one that today's code would write."""

from __future__ import annotations

import json

from genius_search.artifact import open_artifact
from genius_search.config import to_json
from genius_search.model import Genius
from tests import tiny_model

TRAIN_AGAIN = "run `python -m tests.tiny_model` and commit tests/model"


def test_its_settings_are_those_of_the_command():
    settings = tiny_model.settings()
    for stage in ("encoder", "quantizer", "generator"):
        manifest = json.loads((tiny_model.MODEL / stage / "manifest.json").read_text())
        expected = json.loads(json.dumps(to_json(getattr(settings, stage))))
        assert manifest["config"] == expected, TRAIN_AGAIN


def test_it_opens_with_every_byte_checked():
    model = Genius.open(tiny_model.MODEL)
    for stage in ("encoder", "quantizer", "generator"):
        open_artifact(tiny_model.MODEL / stage, kind=stage, check_contents=True)
    assert model.has_generator, TRAIN_AGAIN


def test_it_knows_the_instructions_of_todays_world(trained):
    instructions = (trained.data / "instructions" / "query_instructions.tsv").read_text()
    texts = {entry.text for entry in Genius.open(trained.model).instructions}
    assert all(text in instructions for text in texts), TRAIN_AGAIN
