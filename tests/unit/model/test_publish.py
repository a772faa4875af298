"""What is saved and published: complete, self-contained, nothing that was not meant to go out."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.model import Genius
from genius_search.model.publish import check_model, save_model
from genius_search.writing import ArtifactWriter


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory) -> Path:
    return save_model(trained.model, tmp_path_factory.mktemp("saved") / "model", name="me/model")


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
    check_model(saved, verify=True)


def test_config_json_says_what_it_is(saved):
    config = json.loads((saved / "config.json").read_text())
    model = Genius.open(saved)
    assert config["model_type"] == "genius"
    assert config["library_name"] == "genius-search"
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
    assert head["library_name"] == "genius-search"
    assert {"pipeline_tag", "tags"} <= head.keys()
    sections = re.findall(r"^## (.*)$", card, re.MULTILINE)
    assert sections == ["Use", "Training data", "Numbers", "Health of its IDs", "Licence", "Citation"]
    assert 'Genius.from_pretrained("me/model")' in card
    assert "pip install 'genius-search[hf]'" in card
    assert 'modality="image"' in card
    assert "UniIR" not in card
    inputs = json.loads((trained.model / "quantizer" / "manifest.json").read_text())["inputs"]
    assert all(fingerprint in card for fingerprint in inputs.values())
    health = json.loads((trained.model / "quantizer" / "manifest.json").read_text())["facts"]["health"]
    assert f"| candidates that share an ID | {health['collision_rate']:.2%} |" in card


def test_the_card_names_data_licence_and_numbers_that_were_given(trained, tmp_path):
    row = {"dataset": "toys|bits", "task": "text -> image", "pool": "local", "method": "generative"}
    row |= {"queries": 1200, "R@1": 0.25, "R@5": 0.5}
    fingerprint = Genius.open(trained.model).fingerprint
    config = {"max_queries": 50, "rows": ["toys_task0"], "beam": 50, "instructions": "hashed"}
    body = {"model": fingerprint, "data": "toy|shop", "split": "val", "config": config, "rows": [row]}
    (tmp_path / "results.json").write_text(json.dumps(body))
    about = {"license": "cc-by-4.0", "datasets": ("owner/toys", "my photos")}
    about |= {"name": "me/model", "results": tmp_path / "results.json"}
    card = (save_model(trained.model, tmp_path / "model", **about) / "README.md").read_text()
    assert head_of(card)["license"] == "cc-by-4.0"
    assert head_of(card)["datasets"] == ["owner/toys"]
    assert "Trained on owner/toys, my photos." in card
    assert "Measured on toy\\|shop, split val; beam 50, instructions hashed." in card
    assert (
        "**Only a part of the evaluation: at most 50 queries of each row; only the rows toys_task0.**" in card
    )
    assert "| toys\\|bits | text -> image | local | generative | 1,200 | 0.250 | 0.500 |" in card


@pytest.mark.parametrize("text", ["", "[]", '{"rows": [{}]}', '{"rows": [], "config": {"rows": 3}}'])
def test_a_file_of_results_that_is_none_is_refused_by_name(trained, tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UsageError, match=r"results\.json.*genius evaluate") as refused:
        save_model(trained.model, tmp_path / "model", results=tmp_path / "results.json")
    assert "Error(" not in str(refused.value)
    assert not (tmp_path / "model").exists()


@pytest.fixture
def measured(trained, tmp_path):
    """A model with numbers beside it, of whatever model."""

    def make(model) -> Path:
        source = Path(shutil.copytree(trained.model, tmp_path / "source", dirs_exist_ok=True))
        (source / "evaluation").mkdir(exist_ok=True)
        body = {"model": model, "data": "toys", "split": "test", "config": {"max_queries": 0, "rows": []}}
        body |= {"rows": [{"method": "generative", "R@1": 0.125}]}
        if model is None:
            del body["model"]
        (source / "evaluation" / "results.json").write_text(json.dumps(body))
        return source

    return make


def test_numbers_beside_the_model_are_found(trained, measured, tmp_path, caplog):
    source = measured(Genius.open(trained.model).fingerprint)
    saved = save_model(source, tmp_path / "model")
    card = (saved / "README.md").read_text()
    assert "| generative |  | 0.125 |" in card
    assert "Only a part" not in card
    assert not caplog.records
    assert not (saved / "evaluation").exists()


@pytest.mark.parametrize("model", ["0" * 64, None])
def test_numbers_of_another_model_are_left_out_and_said_or_refused_if_given(
    measured, tmp_path, model, caplog
):
    source = measured(model)
    saved = save_model(source, tmp_path / "model")
    assert "No evaluation came with this model." in (saved / "README.md").read_text()
    assert "left out of the card" in caplog.text
    with pytest.raises(UsageError, match=r"results\.json.*genius evaluate"):
        save_model(source, tmp_path / "given", results=source / "evaluation" / "results.json")
    assert not (tmp_path / "given").exists()


def test_saving_again_replaces_and_saving_over_something_else_is_refused(copied, trained, tmp_path):
    before = (copied / "README.md").read_text()
    save_model(trained.model, copied, license="mit")
    assert (copied / "README.md").read_text() != before
    (tmp_path / "empty").mkdir()
    assert Genius.open(save_model(trained.model, tmp_path / "empty")).fingerprint
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("years of work")
    for target in (tmp_path / "foreign", tmp_path / "foreign" / "thesis.txt", trained.model):
        with pytest.raises(UsageError, match=target.name):
            save_model(trained.model, target)
    assert (tmp_path / "foreign" / "thesis.txt").read_text() == "years of work"
    other = Path(shutil.copytree(trained.model, tmp_path / "training"))
    with pytest.raises(UsageError, match="features"):
        save_model(trained.model, other)


def test_a_failure_leaves_the_saved_model_as_it_was(copied, trained, monkeypatch):
    before = {file: file.read_bytes() for file in copied.rglob("*") if file.is_file()}

    def full(*_):
        raise OSError(28, "no space left")

    monkeypatch.setattr("genius_search.writing.shutil.copyfile", full)
    with pytest.raises(UsageError, match="No space"):
        save_model(trained.model, copied, license="mit")
    assert {entry.name for entry in copied.parent.iterdir()} == {copied.name}
    assert {file: file.read_bytes() for file in copied.rglob("*") if file.is_file()} == before


def test_an_encoder_on_this_machine_goes_along_unless_it_shall_not(trained, tmp_path):
    source = Path(shutil.copytree(trained.model, tmp_path / "source"))
    (source / "encoder").rename(tmp_path / "my-encoder")
    edit(source / "model.json", lambda body: body["encoder"].update(spec=f"small:{tmp_path}/my-encoder"))
    saved = save_model(source, tmp_path / "saved")
    named = save_model(source, tmp_path / "named", copy_encoder=False)
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
    saved = save_model(copied, tmp_path / "saved")
    found = {file.relative_to(saved).as_posix() for file in (saved / "encoder").rglob("*") if file.is_file()}
    assert found == {"encoder/config.json", "encoder/model.safetensors", "encoder/1_Pooling/config.json"}
    assert json.loads((saved / "model.json").read_text())["encoder"]["spec"] == "clip:./encoder"
    edit(copied / "model.json", lambda body: body["encoder"].update(spec="clip:openai/clip-vit-base-patch32"))
    saved = save_model(copied, tmp_path / "second")
    assert not (saved / "encoder").exists()
    spec = json.loads((saved / "model.json").read_text())["encoder"]["spec"]
    assert spec == "clip:openai/clip-vit-base-patch32"
    assert head_of((saved / "README.md").read_text())["base_model"] == "openai/clip-vit-base-patch32"


def test_a_model_on_precomputed_features_is_not_saved(copied, tmp_path):
    edit(copied / "model.json", lambda body: body["encoder"].update(spec="precomputed:features"))
    with pytest.raises(UsageError, match="looks its features up"):
        save_model(copied, tmp_path / "saved")


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
        check_model(copied, verify=True)


@pytest.mark.parametrize("spec", ["small:./encoder", "clip:openai/clip-vit-base-patch32", "uniir:./encoder"])
def test_a_strangers_encoder_that_is_inside_or_on_the_hub_is_accepted(copied, spec):
    (copied / "encoder" / "uniir.json").write_text("{}")
    edit(copied / "model.json", lambda body: body["encoder"].update(spec=spec))
    check_model(copied, verify=True)


@pytest.mark.parametrize(
    ("kind", "removed", "missing"),
    [
        *((kind, ("config.json", "model.safetensors"), "config.json") for kind in ("text", "clip", "small")),
        ("text", (), "model_type"),
        ("uniir", ("uniir.json",), "uniir.json"),
        ("uniir", ("manifest.json",), "manifest.json"),
    ],
)
def test_an_encoder_that_did_not_come_along_or_is_of_another_kind_is_found_out(
    copied, kind, removed, missing
):
    (copied / "encoder" / "uniir.json").write_text("{}")
    edit(copied / "model.json", lambda body: body["encoder"].update(spec=f"{kind}:./encoder"))
    for name in removed:
        (copied / "encoder" / name).unlink()
    with pytest.raises(ArtifactMissing, match=rf"encoder is {kind}:.*{missing}"):
        check_model(copied)


def test_parts_that_do_not_belong_together_are_found_out(copied):
    edit(copied / "model.json", lambda body: body.update(fingerprint="0" * 64))
    with pytest.raises(ArtifactMismatch, match="fingerprint"):
        check_model(copied)
    edit(copied / "model.json", lambda body: body["generator"].update(fingerprint="0" * 64))
    with pytest.raises(ArtifactMismatch, match="generator"):
        check_model(copied)


def test_a_manifest_may_not_name_files_outside_its_folder(copied):
    (copied / "secret").write_bytes(b"x")
    outside = {"../secret": {"bytes": 1, "sha256": "0"}}
    edit(copied / "quantizer" / "manifest.json", lambda body: body["files"].update(outside))
    for use in (check_model, lambda folder: save_model(folder, copied.parent / "saved")):
        with pytest.raises(ArtifactMismatch, match="outside its folder"):
            use(copied)


def test_a_saved_copy_keeps_entries_that_a_later_version_adds(copied, tmp_path):
    edit(copied / "model.json", lambda body: body.update(later="grace"))
    saved = save_model(copied, tmp_path / "saved")
    assert json.loads((saved / "model.json").read_text())["later"] == "grace"


def test_an_imported_models_card_credits_the_authors_and_claims_nothing_that_is_unknown(copied, tmp_path):
    for part in ("quantizer", "generator"):
        inputs = {"published": f"hash of {part}", "level0": "unknown"}
        edit(copied / part / "manifest.json", lambda body, inputs=inputs: body.update(inputs=inputs))
    edit(copied / "quantizer" / "manifest.json", lambda body: body["facts"].update(health=None))
    writer = ArtifactWriter(tmp_path / "clip-sf", kind="uniir", config={"kind": "clip-sf"}, inputs={})
    writer.finish()
    edit(copied / "model.json", lambda body: body["encoder"].update(spec=f"uniir:{tmp_path}/clip-sf"))
    card = (save_model(copied, tmp_path / "saved", name="me/model") / "README.md").read_text()
    assert "the quantizer and generator, from published checkpoints of GENIUS (Kim et al., CVPR 2025)" in card
    assert "UniIR's clip-sf (Wei et al., ECCV 2024)" in card
    assert "kim2025genius" in card
    assert "wei2024uniir" in card
    assert "| SHA-256 of the quantizer's published file | hash of quantizer |" in card
    assert "unknown |" not in card
    assert "did not name the data set" not in card
    assert 'index.search("a red leather bag", k=5)' in card


def test_a_level_0_that_was_learned_from_candidates_is_in_the_card(copied, tmp_path):
    inputs = {"published": "hash", "level0": "of some candidates"}
    edit(copied / "quantizer" / "manifest.json", lambda body: body.update(inputs=inputs))
    card = (save_model(copied, tmp_path / "saved") / "README.md").read_text()
    assert "| fingerprint of the candidates that level 0 was learned from | of some candidates |" in card
    assert "trained by the publisher: the quantizer, from published" in card
    assert 'modality="image"' in card


@pytest.mark.parametrize("name", ["", "the MIT licence", "mit\n", "-", "mit: x", 'm"it'])
def test_a_licence_that_cannot_be_one_is_refused_before_anything_is_written(trained, tmp_path, name):
    with pytest.raises(UsageError, match=r"expected its short name on the hub"):
        save_model(trained.model, tmp_path / "saved", license=name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"instructions": 7},
        {"instructions": "text"},
        {"instructions": [7]},
        {"instructions": [{"query": "text"}]},
        {"instructions": [{"query": "text", "candidate": "image", "text": 7}]},
        {"instructions": {}},
        {"fingerprint": 7},
        {"encoder": {"spec": 7, "fingerprint": "0"}},
        {"quantizer": {"fingerprint": None}},
        {"generator": "x"},
        {"format": "1"},
        {"format": None},
    ],
)
def test_a_model_file_of_another_form_is_damaged(copied, change):
    edit(copied / "model.json", lambda body: body.update(change))
    with pytest.raises(ArtifactMismatch, match=r"model\.json is damaged"):
        Genius.open(copied)


@pytest.fixture
def another(copied, tmp_path) -> Path:
    """A saved copy of what calls itself another model."""
    other = Path(shutil.copytree(copied, tmp_path / "another"))
    edit(other / "config.json", lambda body: body.update(fingerprint="0" * 64))
    return other


def test_another_models_folder_is_not_replaced(another, trained):
    before = (another / "README.md").read_text()
    with pytest.raises(UsageError, match=r"holds another model \(fingerprint 000000000000"):
        save_model(trained.model, another, license="mit")
    assert (another / "README.md").read_text() == before


def test_a_folder_that_only_looks_like_a_saved_model_is_not_replaced(copied, trained):
    (copied / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(UsageError, match="something else"):
        save_model(trained.model, copied)
    assert (copied / "config.json").read_text() == '{"model_type": "clip"}'
