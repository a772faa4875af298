"""Every error class is met on a path that a person can take."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from genius_search import errors
from genius_search.artifact import open_artifact
from genius_search.config import TrainingConfig
from genius_search.data.images import open_image
from genius_search.data.mbeir import MBeir, read_candidates
from genius_search.encoders.base import load_encoder
from genius_search.index.index import Index
from genius_search.progress import Silent
from genius_search.records import parse_id
from genius_search.training.loop import StepResult, train
from genius_search.writing import ArtifactWriter


def asks_for_something_unknown(folder: Path) -> None:
    load_encoder("magic:" + str(folder))


def opens_an_index_that_is_not_there(folder: Path) -> None:
    Index.open(folder / "nowhere")


def opens_a_folder_of_another_kind(folder: Path) -> None:
    ArtifactWriter(folder / "a", kind="quantizer", config={}, inputs={}).finish()
    open_artifact(folder / "a", kind="generator")


def needs_what_is_not_on_this_machine(folder: Path) -> None:
    pytest.importorskip("transformers")
    load_encoder("clip:nobody/has-this-model")


def reads_an_id_that_is_none(folder: Path) -> None:
    parse_id("nine:one")


def reads_a_line_that_is_no_record(folder: Path) -> None:
    (folder / "pool.jsonl").write_text('{"did": "1:1"}\n')
    list(read_candidates(folder / "pool.jsonl"))


def opens_an_empty_picture(folder: Path) -> None:
    (folder / "a.png").touch()
    open_image(folder / "a.png")


def trains_into_nothing(folder: Path) -> None:
    module = nn.Linear(1, 1)
    train(
        module,
        lambda _: StepResult(module(torch.tensor([torch.inf])).sum(), {}),
        total=2,
        config=TrainingConfig(),
        folder=folder,
        progress=Silent(),
        name="train nothing",
    )


def lacks_an_extra(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda _: None)
        load_encoder(f"clip:{folder}")


PATHS: list[tuple[type[errors.GeniusError], Callable[[Path], None]]] = [
    (errors.UsageError, asks_for_something_unknown),
    (errors.MissingExtra, lacks_an_extra),
    (errors.ArtifactMissing, opens_an_index_that_is_not_there),
    (errors.ArtifactMismatch, opens_a_folder_of_another_kind),
    (errors.NetworkNeeded, needs_what_is_not_on_this_machine),
    (errors.BadData, reads_an_id_that_is_none),
    (errors.BadRecord, reads_a_line_that_is_no_record),
    (errors.BadImage, opens_an_empty_picture),
    (errors.TrainingFailed, trains_into_nothing),
]
ROOTS = {errors.GeniusError, errors.ArtifactError}
"""Only ever raised as one of their children."""
TIMED = {errors.DeadlinePassed, errors.SnapshotGone}
"""Raised in the tests of filters, of the service and of clusters."""


@pytest.mark.parametrize(("kind", "path"), PATHS, ids=lambda value: value.__name__)
def test_every_error_can_be_met_and_says_on_one_line_what_is_wrong(kind, path, tmp_path):
    with pytest.raises(kind) as caught:
        path(tmp_path)
    assert type(caught.value) is kind
    assert len(str(caught.value)) > 20
    assert "\n" not in str(caught.value)


def test_no_error_class_is_forgotten():
    everything = {getattr(errors, name) for name in errors.__all__}
    assert everything == {kind for kind, _ in PATHS} | ROOTS | TIMED
    assert everything == {kind for kind in vars(errors).values() if isinstance(kind, type)} - {Path}


def test_errors_of_records_and_pictures_carry_their_place(tmp_path):
    with pytest.raises(errors.BadRecord) as record:
        reads_a_line_that_is_no_record(tmp_path)
    assert (record.value.file.name, record.value.line) == ("pool.jsonl", 1)
    with pytest.raises(errors.BadImage) as image:
        opens_an_empty_picture(tmp_path)
    assert image.value.file == tmp_path / "a.png"
    assert "empty" in image.value.reason


def test_a_folder_that_is_no_data_set_is_refused(tmp_path):
    with pytest.raises(errors.BadData, match=re.escape(str(tmp_path))):
        MBeir(tmp_path)
