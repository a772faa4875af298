"""onnx: the features of transformers, from graphs that are exported here."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from genius_search.encoders.base import is_cut
from genius_search.encoders.onnx import prepare_pixels
from genius_search.encoders.open import absolute_spec, load_encoder
from genius_search.errors import ArtifactMismatch, ArtifactMissing

TEXTS = ["a red anchor", "A green anchor on a red ground", "anchor"]


@pytest.fixture(scope="module", params=["clip", "siglip", "siglip2"])
def exported(request, tmp_path_factory, export_onnx):
    folder = request.getfixturevalue(f"{request.param}_folder")
    names = ("text_embeds", "image_embeds") if request.param == "clip" else ("pooler_output",) * 2
    return folder, export_onnx(folder, tmp_path_factory.mktemp("onnx") / "model", names)


def test_features_are_those_of_transformers(exported, pictures):
    theirs, ours = load_encoder(f"clip:{exported[0]}"), load_encoder(str(exported[1]))
    images, texts = pictures, TEXTS
    np.testing.assert_allclose(
        ours.image_features(images), theirs.image_features(images), atol=1e-3
    )
    np.testing.assert_allclose(ours.text_features(texts), theirs.text_features(texts), atol=1e-3)
    assert ours.dim == theirs.dim
    assert ours.image_features([]).shape == ours.text_features([]).shape == (0, ours.dim)
    for text in (*TEXTS, "anchor " * 200):
        assert is_cut(ours, text) == is_cut(theirs, text)


def test_a_folder_is_one_encoder_whatever_it_is_called(exported, monkeypatch):
    spec = f"onnx:{exported[1]}"
    monkeypatch.chdir(exported[1].parent)
    assert absolute_spec("model") == spec
    assert load_encoder(spec).fingerprint == load_encoder("model").fingerprint


@pytest.mark.parametrize("weights", ["inside", "beside"])
def test_a_model_of_links_as_in_the_cache_gives_the_same(exported, tmp_path, weights):
    blobs, model = (
        tmp_path / "blobs",
        shutil.copytree(exported[1], tmp_path / "snapshots" / "model"),
    )
    blobs.mkdir()
    graph = model / "onnx" / "text_model.onnx"
    if weights == "beside":
        data = f"{graph.name}_data"
        onnx.save(
            onnx.load(graph), graph, save_as_external_data=True, location=data, size_threshold=0
        )
    for number, file in enumerate(sorted(graph.parent.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    encoder, texts = load_encoder(str(model)), TEXTS
    expected = load_encoder(str(exported[1])).text_features(texts)
    np.testing.assert_allclose(encoder.text_features(texts), expected, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "onnx/text_model.onnx", "preprocessor_config.json"]
)
def test_files_that_are_missing_or_damaged_are_named(exported, tmp_path, name):
    broken = shutil.copytree(exported[1], tmp_path / "model")
    for file in (broken / name, *broken.glob(f"{Path(name).stem}.model")):
        file.write_bytes(b"{")
    with pytest.raises(ArtifactMismatch, match=Path(name).stem):
        load_encoder(str(broken)).text_features(TEXTS)
    (broken / name).unlink()
    with pytest.raises(ArtifactMissing, match=r"lacks|expected"):
        load_encoder(str(broken))


@pytest.mark.parametrize("size", [{"shortest_edge": 20}, {"height": 14, "width": 22}])
@pytest.mark.parametrize("crop", [None, {"height": 18, "width": 18}])
def test_pixels_are_those_of_transformers(pictures, size, crop):
    from transformers import CLIPImageProcessorPil  # noqa: PLC0415  slow

    given = {
        "size": size,
        "crop_size": crop,
        "do_center_crop": crop is not None and "height" not in size,
    }
    processor = CLIPImageProcessorPil(
        **{name: value for name, value in given.items() if value is not None}
    )
    settings = processor.to_dict()
    for picture in pictures:
        expected = processor(images=picture, return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(prepare_pixels(picture, settings), expected, atol=1e-5)


def test_graphs_in_8_bits_are_taken_only_when_they_are_asked_for(exported, tmp_path):
    model = shutil.copytree(exported[1], tmp_path / "model")
    with pytest.raises(ArtifactMissing, match=r"text_model_quantized\.onnx"):
        load_encoder(f"onnx-quantized:{model}")
    for graph in ("text_model", "vision_model"):
        shutil.copy(model / "onnx" / f"{graph}.onnx", model / "onnx" / f"{graph}_quantized.onnx")
    quantized = load_encoder(f"onnx-quantized:{model}")
    assert quantized.spec == absolute_spec(f"onnx-quantized:{model}")
    assert quantized.text_features(TEXTS).shape == (3, quantized.dim)
