"""genius import clip-sf and its kin: what is told, what is written, what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from genius_search.artifact import open_artifact
from genius_search.cli import main
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.lab.published import encoders as stage
from genius_search.lab.published.checkpoint import open_checkpoint
from genius_search.lab.published.encoders import checkpoint_shapes, import_encoder, look, network_shapes
from genius_search.progress import Silent

TOWER = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_hidden_layers": 12}
PICTURES = {**TOWER, "image_size": 224, "patch_size": 56}
TEXTS = {**TOWER, "vocab_size": 49408, "max_position_embeddings": 77}
MIXER = {"d_model": 64, "d_kv": 16, "d_ff": 80, "num_heads": 3, "num_layers": 2}
BERT = {
    **TOWER,
    "encoder_hidden_size": 64,
    "vocab_size": 9,
    "max_position_embeddings": 100,
    "is_decoder": True,
}


def shapes_of(kind, **config):
    return checkpoint_shapes(kind, network_shapes(kind, config))


SHAPES = shapes_of(
    "clip-sf", projection_dim=32, text_config=TEXTS, vision_config={**PICTURES, "num_hidden_layers": 24}
)
MIXED = shapes_of("clip-ff", text_config=TEXTS, vision_config=PICTURES, mixer_config=MIXER)
BLIP = shapes_of("blip-ff", text_config=BERT, vision_config=PICTURES)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "kite"]


class Listener(Silent):
    """Keeps what is said."""

    def __init__(self):
        self.lines = []

    def say(self, message):
        self.lines.append(message)


def save(path, shapes, **extra):
    torch.manual_seed(0)
    weights = {name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    weights |= {name: torch.tensor(4.6) for name in weights if name.endswith("logit_scale")}
    weights |= extra
    moments = {0: {"exp_avg": torch.zeros(5), "exp_avg_sq": torch.zeros(5)}}
    torch.save({"model": weights, "optimizer": {"state": moments}, "epoch": 19}, path)
    return path


@pytest.fixture(scope="module")
def clip_file(tmp_path_factory):
    return save(tmp_path_factory.mktemp("clip") / "clip_sf_large.pth", SHAPES)


@pytest.fixture(scope="module")
def blip_file(tmp_path_factory):
    shapes = BLIP | {"visual_encoder_m.cls_token": (1, 1, 64), "temp": ()}
    return save(tmp_path_factory.mktemp("blip") / "blip_ff_large.pth", shapes)


@pytest.fixture
def vocabulary(tmp_path):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(WORDS))
    return tmp_path / "bert"


def test_a_checkpoint_becomes_a_finished_folder(clip_file, tmp_path):
    made = import_encoder(clip_file, "clip-sf", tmp_path / "clip-sf", progress=Silent())
    manifest = open_artifact(made.folder, kind="uniir", verify=True)
    assert manifest.fingerprint == made.fingerprint
    assert manifest.inputs["checkpoint"] == made.source.sha256
    told = json.loads((made.folder / "uniir.json").read_text())
    assert told["kind"] == "clip-sf"
    assert told["source"] == {
        "bytes": clip_file.stat().st_size,
        "sha256": made.source.sha256,
        "published": False,
    }
    weights = load_file(made.folder / "model.safetensors")
    assert len(weights) == 590
    theirs = open_checkpoint(clip_file).tensors["clip_model.text_projection"]
    assert torch.equal(weights["text_projection.weight"], theirs.T)
    written = {path.name: path.stat().st_size for path in made.folder.iterdir()}
    for name, size in made.source.files.items():
        assert written[name] == pytest.approx(size, rel=0.01)


def test_the_same_file_again_is_kept_and_another_replaces_it(clip_file, tmp_path, monkeypatch):
    folder = tmp_path / "clip-sf"
    first = import_encoder(clip_file, "clip-sf", folder, progress=Silent())
    monkeypatch.setattr(stage, "write_weights", lambda *_, **__: pytest.fail("written again"))
    assert import_encoder(clip_file, "clip-sf", folder, progress=Silent()).fingerprint == first.fingerprint
    monkeypatch.undo()
    other = save(tmp_path / "other.pth", SHAPES, **{"clip_model.logit_scale": torch.tensor(3.0)})
    assert import_encoder(other, "clip-sf", folder, progress=Silent()).fingerprint != first.fingerprint


def test_an_import_that_dies_leaves_nothing_that_opens(clip_file, tmp_path, monkeypatch):
    def die(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "write_weights", die)
    with pytest.raises(KeyboardInterrupt):
        import_encoder(clip_file, "clip-sf", tmp_path / "clip-sf", progress=Silent())
    assert not (tmp_path / "clip-sf").exists()
    monkeypatch.undo()
    import_encoder(clip_file, "clip-sf", tmp_path / "clip-sf", progress=Silent())
    open_artifact(tmp_path / "clip-sf", kind="uniir")


def test_a_folder_with_other_things_in_it_is_left_alone(clip_file, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds something that genius did not make"):
        import_encoder(clip_file, "clip-sf", tmp_path, progress=Silent())


NORM = "clip_model.ln_final.weight"


@pytest.mark.parametrize(
    ("kind", "shapes", "name"),
    [
        ("clip-sf", SHAPES, NORM),
        ("blip-ff", BLIP, "text_encoder.pooler.dense.bias"),
        ("clip-ff", MIXED, "t5_layers.final_layer_norm.weight"),
    ],
)
def test_numbers_that_are_no_weights_are_refused_naming_the_tensor(kind, shapes, name, vocabulary, tmp_path):
    file = save(tmp_path / "odd.pth", shapes, **{name: torch.full(shapes[name], torch.nan)})
    with pytest.raises(ArtifactMismatch, match=f"as {kind}: {name} holds NaN"):
        look(open_checkpoint(file), kind, tokenizer=vocabulary if kind == "blip-ff" else None)


def test_tied_overlapping_and_scattered_tensors_are_written_one_by_one(tmp_path):
    memory = torch.randn(200)
    odd = {
        NORM: memory[:64],
        "clip_model.ln_final.bias": memory[:64],
        "clip_model.visual.ln_pre.weight": memory[30:94],
        "clip_model.visual.ln_pre.bias": memory[70:198:2],
        "clip_model.visual.ln_post.bias": memory[:64].half(),
        "clip_model.visual.proj": torch.randn(32, 64).t(),
    }
    file = save(tmp_path / "odd.pth", SHAPES, **odd)
    made = import_encoder(file, "clip-sf", tmp_path / "odd", progress=Silent())
    weights = load_file(made.folder / "model.safetensors")
    assert torch.equal(weights["text_model.final_layer_norm.weight"], memory[:64])
    assert torch.equal(weights["text_model.final_layer_norm.bias"], memory[:64])
    assert torch.equal(weights["vision_model.pre_layrnorm.weight"], memory[30:94])
    assert torch.equal(weights["vision_model.pre_layrnorm.bias"], memory[70:198:2])
    assert torch.equal(weights["vision_model.post_layernorm.bias"], memory[:64].half().float())
    assert torch.equal(weights["visual_projection.weight"], odd["clip_model.visual.proj"].t())


def test_the_published_file_is_known_by_its_hash(clip_file, blip_file, vocabulary, monkeypatch):
    assert look(open_checkpoint(clip_file), "clip-sf").published is False
    assert look(open_checkpoint(blip_file), "blip-ff", tokenizer=vocabulary).published is None
    monkeypatch.setattr(stage, "file_fingerprint", lambda _: stage.PUBLISHED["clip-sf"])
    assert look(open_checkpoint(clip_file), "clip-sf").published is True


def test_a_strange_scale_is_a_warning(tmp_path):
    file = save(tmp_path / "odd.pth", SHAPES, **{"clip_model.logit_scale": torch.tensor(9.0)})
    listener = Listener()
    import_encoder(file, "clip-sf", tmp_path / "odd", progress=listener)
    assert any(line.startswith("WARNING: exp(logit_scale) is 8103") for line in listener.lines)


def test_blip_takes_berts_vocabulary_in_either_form(blip_file, vocabulary, tmp_path):
    made = import_encoder(blip_file, "blip-ff", tmp_path / "blip", progress=Silent(), tokenizer=vocabulary)
    assert made.source.weights.left_out == ("visual_encoder_m.cls_token", "temp")
    ready = tmp_path / "ready"
    ready.mkdir()
    (ready / "tokenizer.json").write_text((made.folder / "tokenizer.json").read_text())
    again = import_encoder(blip_file, "blip-ff", tmp_path / "again", progress=Silent(), tokenizer=ready)
    assert again.fingerprint == made.fingerprint


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [*WORDS, "more", "words", "still"],
            "has 10 tokens, and the checkpoint was trained with 7 and two more",
        ),
        (["a", "kite", *"cdefg"], r"lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]"),
    ],
)
def test_another_vocabulary_is_refused(blip_file, vocabulary, tmp_path, words, message):
    (vocabulary / "vocab.txt").write_text("\n".join(words))
    with pytest.raises(ArtifactMismatch, match=message):
        import_encoder(blip_file, "blip-ff", tmp_path / "blip", progress=Silent(), tokenizer=vocabulary)


def test_a_damaged_vocabulary_and_none_at_all_are_refused(blip_file, tmp_path):
    with pytest.raises(ArtifactMissing, match=r"neither tokenizer\.json nor vocab\.txt"):
        look(open_checkpoint(blip_file), "blip-ff", tokenizer=tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ArtifactMismatch, match="cannot be read as a tokenizer"):
        look(open_checkpoint(blip_file), "blip-ff", tokenizer=tmp_path)


def test_a_vocabulary_is_given_where_it_is_needed_and_only_there(clip_file, blip_file, vocabulary):
    with pytest.raises(UsageError, match="blip-ff reads BERT's tokens; give --tokenizer"):
        look(open_checkpoint(blip_file), "blip-ff")
    with pytest.raises(UsageError, match="clip-sf brings its own vocabulary"):
        look(open_checkpoint(clip_file), "clip-sf", tokenizer=vocabulary)


def test_a_dry_run_in_json_names_sizes_and_problems(clip_file, blip_file, vocabulary, capsys):
    assert main(["import", "clip-sf", str(clip_file), "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["used"], told["published"], told["problem"]) == (446, False, None)
    assert told["file"]["tensors"] == 446
    assert "model.safetensors" in told["writes_bytes"]
    assert main(["import", "clip-sf", str(blip_file), "--dry-run", "--json"]) == 4
    assert "another model" in json.loads(capsys.readouterr().out)["problem"]
    arguments = ["import", "blip-ff", str(blip_file), "--tokenizer", str(vocabulary), "--dry-run"]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "2 left out" in told
    assert "left out: visual_encoder_m.cls_token, temp" in told
    assert "whether that is the published file is not known" in told


def test_the_command_imports_and_says_how_to_use_it(clip_file, tmp_path, capsys):
    out = tmp_path / "clip-sf"
    assert main(["import", "clip-sf", str(clip_file), "--out", str(out), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["fingerprint"] == open_artifact(out, kind="uniir").fingerprint
    assert f"uniir:{out}" in told.err.replace("\n", "")


def test_without_a_place_nothing_is_imported(clip_file, capsys):
    assert main(["import", "clip-sf", str(clip_file)]) == 2
    assert "--out FOLDER" in capsys.readouterr().err


def test_every_kind_has_a_command(clip_file, vocabulary, capsys):
    for kind, flags in (
        ("clip-ff", []),
        *((k, ["--tokenizer", str(vocabulary)]) for k in ("blip-sf", "blip-ff")),
    ):
        assert main(["import", kind, str(clip_file), "--dry-run", *flags]) == 4
        assert f"as {kind}" in capsys.readouterr().err
