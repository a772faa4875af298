"""Import of UniIR's checkpoints as encoders."""

from __future__ import annotations

import pytest
import torch

from research.published.encoders import checkpoint_shapes, main, network_shapes

TOWER = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 12,
}
PICTURES = {**TOWER, "image_size": 224, "patch_size": 56}
TEXTS = {**TOWER, "vocab_size": 49408, "max_position_embeddings": 77}


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
    config = {
        "projection_dim": 32,
        "text_config": TEXTS,
        "vision_config": {**PICTURES, "num_hidden_layers": 24},
    }
    shapes = checkpoint_shapes("clip-sf", network_shapes("clip-sf", config))
    return save(tmp_path_factory.mktemp("clip") / "clip_sf_large.pth", shapes)


def test_the_command_imports_and_shows_the_encoders_spec(clip_file, tmp_path, capsys):
    out = tmp_path / "clip-sf"
    assert main(["clip-sf", str(clip_file), "--out", str(out)]) == 0
    assert f"uniir:{out}" in capsys.readouterr().err.replace("\n", "")
    assert main(["blip-ff", str(clip_file), "--out", str(tmp_path / "blip")]) == 2
    assert "give --tokenizer" in capsys.readouterr().err.replace("\n", " ")
