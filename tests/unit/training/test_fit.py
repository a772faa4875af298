"""What the stages together promise: nothing is done twice, nothing depends on where it was done."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace

import pytest

import genius_search
from genius_search.data.mbeir import MBeir
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.index.index import Index
from genius_search.model import Genius
from genius_search.recipe import preset
from genius_search.training.fit import fit


class Recorder:
    """Remembers which stages began."""

    def __init__(self):
        self.begun = []

    def begin(self, stage, total):
        self.begun.append(stage)

    def advance(self, done, measures):
        pass

    def say(self, message):
        pass


@pytest.fixture(scope="module")
def fitted(trained, tmp_path_factory):
    """A model that was trained for a few steps, with all that a training leaves."""
    folder = tmp_path_factory.mktemp("fitted") / "model"
    fit(MBeir(trained.data), "small", folder, tiny(), progress=Recorder())
    return folder


@pytest.fixture
def copied(fitted, tmp_path):
    """A copy of the model, which a test may change."""
    return shutil.copytree(fitted, tmp_path / "model")


def tiny(**training):
    """The settings of a quick training; `training` changes those of every stage."""
    config, training = preset("tiny"), {"checkpoint_seconds": 0.0, "max_steps": 3, **training}
    return replace(
        config,
        **{
            name: replace(part, training=replace(part.training, **training))
            for name, part in vars(config).items()
            if name in ("encoder", "quantizer", "generator")
        },
    )


def test_fitting_again_does_nothing_again(trained, copied):
    progress = Recorder()
    before = Genius.open(copied).fingerprint
    model = genius_search.fit(str(trained.data), "small", str(copied), tiny(), progress=progress)
    assert progress.begun == []
    assert model.fingerprint == before


@pytest.mark.parametrize("operation", [20, 60])
def test_a_training_killed_at_a_change_of_files_goes_on_to_the_very_same_model(
    fitted, trained, tmp_path, killed_at, operation
):
    """A quick one of the kills in tests/end_to_end/test_kill.py."""

    def work():
        return fit(MBeir(trained.data), "small", tmp_path / "model", tiny(), progress=Recorder())

    assert killed_at(operation, work)
    with pytest.raises(ArtifactMissing):
        Genius.open(tmp_path / "model")
    assert work().fingerprint == Genius.open(fitted).fingerprint


def test_a_model_is_trained_again_from_the_part_whose_settings_changed(
    trained, copied, monkeypatch
):
    data, before = MBeir(trained.data), Genius.open(copied).fingerprint
    changed = replace(tiny(), quantizer=tiny(max_steps=1).quantizer)

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("genius_search.training.fit.train_generator", fail)
        with pytest.raises(OSError, match="No space"):
            fit(data, "small", copied, changed, progress=Recorder())
    with pytest.raises(ArtifactMismatch, match="interrupted"):
        Genius.open(copied)
    progress = Recorder()
    model = fit(data, "small", copied, changed, progress=progress)
    assert [stage for stage in progress.begun if stage.startswith("train")] == ["train generator"]
    assert Genius.open(copied).fingerprint == model.fingerprint != before


def test_a_model_is_retrained_with_its_own_encoder(trained, copied):
    again = fit(
        MBeir(trained.data),
        f"small:{copied / 'encoder'}",
        copied,
        tiny(max_steps=1),
        progress=Recorder(),
    )
    assert again.encoder.spec == f"small:{copied / 'encoder'}"
    assert Genius.open(copied.rename(copied.parent / "moved")).fingerprint == again.fingerprint


@pytest.mark.parametrize("output", ["file", "index", "photos"])
def test_an_output_that_is_something_else_is_refused_before_anything_is_written(
    trained, tmp_path, output
):
    folder = tmp_path / output
    if output == "file":
        folder.write_text("")
    elif output == "index":
        pool = trained.data / "cand_pool" / "global" / "mbeir_union_val_cand_pool.jsonl"
        Index.create(folder, pool, model=trained.model)
    else:
        folder.mkdir()
        (folder / "beach.jpg").write_bytes(b"")
    before = {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
    with pytest.raises(UsageError, match=output):
        fit(MBeir(trained.data), "small", folder, preset("tiny"), progress=Recorder())
    assert {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]} == before


BROKEN = replace(preset("tiny"), quantizer=replace(preset("tiny").quantizer, levels=0))


@pytest.mark.parametrize(
    ("settings", "device", "error"),
    [(BROKEN, "cpu", r"quantizer\.levels"), (preset("tiny"), "nonsense", "`device='cpu'`")],
)
def test_what_cannot_be_done_is_refused_before_any_work(trained, tmp_path, settings, device, error):
    with pytest.raises(UsageError, match=error):
        fit(
            MBeir(trained.data),
            "small",
            tmp_path / "model",
            settings,
            progress=Recorder(),
            device=device,
        )
    assert not (tmp_path / "model").exists()
