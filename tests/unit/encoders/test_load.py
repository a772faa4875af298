"""load_encoder: one name, one encoder, nothing imported that is not needed."""

import sys
import types
from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch

from genius_search.encoders import base
from genius_search.encoders.base import Encoder, load_encoder
from genius_search.errors import ArtifactMissing, UsageError


@pytest.mark.parametrize(
    "spec", ["", "small", "clip", "clip:", "nothing:here", "openai/clip-vit-base-patch32"]
)
def test_an_unknown_form_is_refused_with_the_known_ones(spec):
    with pytest.raises(UsageError, match=r"(?s)(?=.*small)(?=.*clip)(?=.*precomputed)(?=.*text).*uniir"):
        load_encoder(spec)


def test_an_encoder_of_another_package_is_opened_by_its_entry_point(monkeypatch):
    """A class that knows nothing of this package but the protocol."""

    class Constant:
        dim, fingerprint, needs_pixels = 2, "constant", False

        def __init__(self, place, *, download, device):
            self.spec, self.given = f"constant:{place}", (download, device)

        def image_features(self, images):
            return torch.ones(len(images), 2)

        text_features = image_features

    module = types.ModuleType("another_package")
    module.Constant = Constant
    monkeypatch.setitem(sys.modules, "another_package", module)
    point = EntryPoint("constant", "another_package:Constant", "genius_search.encoders")
    monkeypatch.setattr(base, "entry_points", EntryPoints([point]).select)
    encoder = load_encoder("constant:a:b", download=True, device="cpu")
    assert isinstance(encoder, Encoder)
    assert (encoder.spec, encoder.given) == ("constant:a:b", (True, "cpu"))
    with pytest.raises(UsageError, match="constant"):
        load_encoder("unheard-of:place")


@pytest.mark.parametrize("kind", ["small", "clip", "precomputed", "text", "uniir"])
def test_an_absent_folder_is_refused_whatever_the_kind(kind, tmp_path):
    with pytest.raises(ArtifactMissing):
        load_encoder(f"{kind}:{tmp_path / 'nothing'}")
