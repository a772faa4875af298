"""load_encoder: one name, one encoder, nothing imported that is not needed."""

import pytest

from genius_search.encoders.open import load_encoder
from genius_search.errors import ArtifactMissing, UsageError


@pytest.mark.parametrize(
    "spec", ["", "small", "clip", "clip:", "nothing:here", "openai/clip-vit-base-patch32"]
)
def test_an_unknown_form_is_refused_with_the_known_ones(spec):
    with pytest.raises(
        UsageError, match=r"(?s)(?=.*small)(?=.*clip)(?=.*precomputed)(?=.*text).*uniir"
    ):
        load_encoder(spec)


@pytest.mark.parametrize("kind", ["small", "clip", "precomputed", "text", "uniir"])
def test_an_absent_folder_is_refused_whatever_the_kind(kind, tmp_path):
    with pytest.raises(ArtifactMissing):
        load_encoder(f"{kind}:{tmp_path / 'nothing'}")
