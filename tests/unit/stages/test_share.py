"""What is saved and published: complete, self-contained, nothing that was not meant to go out."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from genius.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius.hub.card import IndexCard, index_card
from genius.model import Genius
from genius.stages.pulled import check_pulled
from genius.stages.save import About, save_index, save_model
from genius.stages.share import staged


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory) -> Path:
    return save_model(trained.model, tmp_path_factory.mktemp("saved") / "model", About(name="me/model"))


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit(path, change):
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def head_of(card):
    """The YAML of a card; every value is JSON."""
    lines = card.split("---\n")[1].splitlines()
    return {line.partition(": ")[0]: json.loads(line.partition(": ")[2]) for line in lines}


def test_a_saved_model_is_complete_and_holds_nothing_else(trained, saved):
    assert Genius.open(saved).fingerprint == Genius.open(trained.model).fingerprint
    found = {entry.name for entry in saved.iterdir()}
    assert found == {"README.md", "config.json", "model.json", "encoder", "quantizer", "generator"}
    assert not [file for file in saved.rglob("*") if file.suffix in (".pt", ".pkl", ".pth", ".bin")]
    check_pulled(saved, "model")


def test_config_json_says_what_it_is(saved):
    config = json.loads((saved / "config.json").read_text())
    model = Genius.open(saved)
    assert config["model_type"] == "genius"
    assert config["library_name"] == "genius-retrieval"
    assert config["fingerprint"] == model.fingerprint
    assert config["sizes"] == list(model.quantizer.sizes)
    assert config["levels"] == len(config["sizes"])
    assert config["dim"] == model.dim
    assert set(config["versions"]) == {"genius", "torch"}
    assert config["encoder"]["spec"] == "small:./encoder"


def test_the_card_has_a_head_and_every_section(trained, saved):
    card = (saved / "README.md").read_text()
    head = head_of(card)
    assert head["license"] == "unknown"
    assert head["library_name"] == "genius-retrieval"
    assert {"pipeline_tag", "tags"} <= head.keys()
    sections = re.findall(r"^## (.*)$", card, re.MULTILINE)
    assert sections == ["Use", "Training data", "Numbers", "Health of its IDs", "Licence", "Citation"]
    assert 'Genius.from_pretrained("me/model")' in card
    inputs = json.loads((trained.model / "quantizer" / "manifest.json").read_text())["inputs"]
    assert all(fingerprint in card for fingerprint in inputs.values())
    health = json.loads((trained.model / "quantizer" / "manifest.json").read_text())["facts"]["health"]
    assert f"| candidates that share an ID | {health['collision_rate']:.2%} |" in card


def test_the_card_names_data_licence_and_numbers_that_were_given(trained, tmp_path):
    row = {"dataset": "toys|bits", "task": "text -> image", "pool": "local", "method": "generative"}
    row |= {"queries": 1200, "R@1": 0.25, "R@5": 0.5}
    (tmp_path / "results.json").write_text(json.dumps({"rows": [row]}))
    about = About("me/model", "cc-by-4.0", ("owner/toys", "my photos"), tmp_path / "results.json")
    card = (save_model(trained.model, tmp_path / "model", about) / "README.md").read_text()
    assert head_of(card)["license"] == "cc-by-4.0"
    assert head_of(card)["datasets"] == ["owner/toys"]
    assert "Trained on owner/toys, my photos." in card
    assert "| toys\\|bits | text -> image | local | generative | 1,200 | 0.250 | 0.500 |" in card


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 3}', '{"rows": [{}]}'])
def test_a_file_of_results_that_is_none_is_refused_by_name(trained, tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UsageError, match=r"results\.json.*genius evaluate --json"):
        save_model(trained.model, tmp_path / "model", About(results=tmp_path / "results.json"))
    assert not (tmp_path / "model").exists()


def test_numbers_beside_the_model_are_found(trained, tmp_path):
    source = Path(shutil.copytree(trained.model, tmp_path / "source"))
    (source / "evaluation").mkdir(exist_ok=True)
    (source / "evaluation" / "results.json").write_text('{"rows": [{"method": "generative", "R@1": 0.125}]}')
    saved = save_model(source, tmp_path / "model", About())
    assert "| generative |  | 0.125 |" in (saved / "README.md").read_text()
    assert not (saved / "evaluation").exists()


def test_saving_again_replaces_and_saving_over_something_else_is_refused(copied, trained, tmp_path):
    before = (copied / "README.md").read_text()
    save_model(trained.model, copied, About(license="mit"))
    assert (copied / "README.md").read_text() != before
    (tmp_path / "empty").mkdir()
    assert Genius.open(save_model(trained.model, tmp_path / "empty", About())).fingerprint
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("years of work")
    for target in (tmp_path / "foreign", tmp_path / "foreign" / "thesis.txt", trained.model):
        with pytest.raises(UsageError, match=target.name):
            save_model(trained.model, target, About())
    assert (tmp_path / "foreign" / "thesis.txt").read_text() == "years of work"
    other = Path(shutil.copytree(trained.model, tmp_path / "training"))
    with pytest.raises(UsageError, match="features"):
        save_model(trained.model, other, About())


def test_a_failure_leaves_the_saved_model_as_it_was(copied, trained, monkeypatch):
    before = {file: file.read_bytes() for file in copied.rglob("*") if file.is_file()}

    def full(*_):
        raise OSError(28, "no space left")

    monkeypatch.setattr("genius.stages.save.shutil.copyfile", full)
    with pytest.raises(OSError, match="no space"):
        save_model(trained.model, copied, About(license="mit"))
    assert {file: file.read_bytes() for file in copied.rglob("*") if file.is_file()} == before


def test_an_encoder_on_this_machine_goes_along_unless_it_shall_not(trained, tmp_path):
    source = Path(shutil.copytree(trained.model, tmp_path / "source"))
    (source / "encoder").rename(tmp_path / "my-encoder")
    edit(source / "model.json", lambda body: body["encoder"].update(spec=f"small:{tmp_path}/my-encoder"))
    saved = save_model(source, tmp_path / "saved", About())
    named = save_model(source, tmp_path / "named", About(), copy_encoder=False)
    assert not (named / "encoder").exists()
    assert Genius.open(named).encoder.spec == f"small:{(tmp_path / 'my-encoder').resolve()}"
    shutil.rmtree(tmp_path / "my-encoder")
    assert Genius.open(saved).fingerprint == Genius.open(trained.model).fingerprint


def test_a_pretrained_encoders_folder_goes_along_and_a_name_on_the_hub_stays_one(copied, tmp_path):
    folder = tmp_path / "clip"
    (folder / "1_Pooling").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "1_Pooling/config.json", "pytorch_model.bin"):
        (folder / name).write_text("{}")
    edit(copied / "model.json", lambda body: body["encoder"].update(spec=f"clip:{folder}"))
    saved = save_model(copied, tmp_path / "saved", About())
    found = {file.relative_to(saved).as_posix() for file in (saved / "encoder").rglob("*") if file.is_file()}
    assert found == {"encoder/config.json", "encoder/model.safetensors", "encoder/1_Pooling/config.json"}
    assert json.loads((saved / "model.json").read_text())["encoder"]["spec"] == "clip:./encoder"
    edit(copied / "model.json", lambda body: body["encoder"].update(spec="clip:openai/clip-vit-base-patch32"))
    saved = save_model(copied, tmp_path / "second", About())
    assert not (saved / "encoder").exists()
    spec = json.loads((saved / "model.json").read_text())["encoder"]["spec"]
    assert spec == "clip:openai/clip-vit-base-patch32"
    assert head_of((saved / "README.md").read_text())["base_model"] == "openai/clip-vit-base-patch32"


def test_a_model_on_precomputed_features_is_not_saved(copied, tmp_path):
    edit(copied / "model.json", lambda body: body["encoder"].update(spec="precomputed:features"))
    with pytest.raises(UsageError, match="looks its features up"):
        save_model(copied, tmp_path / "saved", About())


@pytest.mark.parametrize(
    "spec",
    [
        "small:/etc",
        "small:encoder",
        "small:./../elsewhere",
        "small:./",
        "precomputed:./encoder",
        "text:~/model",
        "clip:a/b/c",
        "clip:../b",
        "other:x/y",
    ],
)
def test_a_strangers_encoder_may_only_be_inside_or_on_the_hub(copied, spec):
    edit(copied / "model.json", lambda body: body["encoder"].update(spec=spec))
    with pytest.raises(ArtifactMismatch, match="inside the model or clip:owner/name"):
        check_pulled(copied, "model")


@pytest.mark.parametrize("spec", ["small:./encoder", "clip:openai/clip-vit-base-patch32", "uniir:./encoder"])
def test_a_strangers_encoder_that_is_inside_or_on_the_hub_is_accepted(copied, spec):
    edit(copied / "model.json", lambda body: body["encoder"].update(spec=spec))
    check_pulled(copied, "model")


def test_parts_that_do_not_belong_together_are_found_out(copied):
    edit(copied / "model.json", lambda body: body["generator"].update(fingerprint="0" * 64))
    with pytest.raises(ArtifactMismatch, match="generator"):
        check_pulled(copied, "model")


def test_a_fingerprint_that_is_not_the_parts_own_is_found_out(copied):
    edit(copied / "model.json", lambda body: body.update(fingerprint="0" * 64))
    with pytest.raises(ArtifactMismatch, match="fingerprint"):
        check_pulled(copied, "model")


@pytest.mark.parametrize("snapshot", ["../elsewhere", "/etc", "nothing", 3, None])
def test_a_strangers_index_may_only_name_a_state_inside_it(tmp_path, snapshot):
    (tmp_path / "index.json").write_text(json.dumps({"snapshot": snapshot}))
    with pytest.raises(ArtifactMismatch, match="no part of it"):
        check_pulled(tmp_path, "index")


def test_only_a_model_or_an_index_can_be_published(tmp_path):
    with pytest.raises(ArtifactMissing, match="neither"), staged(tmp_path, "me/x", About()):
        pass
    with pytest.raises(UsageError, match="owner/name"), staged(tmp_path, "nothing", About()):
        pass
    with pytest.raises(ArtifactMissing, match="no index"):
        save_index(tmp_path, tmp_path / "out", About())


def test_an_indexs_card_says_what_it_gives_away():
    card = IndexCard("me/some", "unknown", None, "f" * 64, {"image": 1200}, False, True, True)
    text = index_card(card)
    assert "paths of the items' pictures, not the pictures; an embedding of each item" in text
    assert "texts of the items" not in text
    assert "| items: image | 1,200 |" in text
    assert head_of(text)["viewer"] is False
