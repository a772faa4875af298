"""text: a sentence embedder's folder, pooled as the folder says."""

# ruff: noqa: PLC0415  transformers is imported where it is needed

import json

import pytest
import torch
from torch.nn import functional as F

from genius_search.encoders.base import Encoder, ItemKey
from genius_search.encoders.open import load_encoder
from genius_search.encoders.pretrained import JointPretrainedEncoder, PretrainedEncoder
from genius_search.errors import ArtifactMismatch

MODULES = "sentence_transformers.models"


def open_folder(folder):
    return load_encoder(f"text:{folder}")


def assemble(sentence_folder, folder, *, pooling, modules=("Transformer", "Pooling", "Normalize")):
    for file in sentence_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    listed = [
        {
            "idx": place,
            "name": str(place),
            "path": f"{place}_{name}" if place else "",
            "type": f"{MODULES}.{name}",
        }
        for place, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    settings = {
        "word_embedding_dimension": 16,
        **{f"pooling_mode_{name}": True for name in pooling},
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    return folder


def states_of(sentence_folder, ids):
    from transformers import BertModel

    with torch.inference_mode():
        return (
            BertModel.from_pretrained(sentence_folder)
            .eval()(input_ids=torch.tensor([ids]))
            .last_hidden_state[0]
        )


def test_token_vectors_are_averaged_without_padding_and_normalised(sentence_folder, tmp_path):
    encoder = open_folder(assemble(sentence_folder, tmp_path, pooling=["mean_tokens"]))
    found = encoder.text_features(["a red anchor", "a green anchor on red"])
    expected = F.normalize(states_of(sentence_folder, [2, 3, 4, 6, 9]).mean(dim=0), dim=0)
    torch.testing.assert_close(found[0], expected)
    assert isinstance(encoder, Encoder)
    assert (encoder.dim, encoder.needs_pixels, encoder.spec) == (16, False, f"text:{tmp_path}")


def test_a_folder_without_modules_is_averaged_and_not_normalised(sentence_folder):
    found = open_folder(sentence_folder).text_features(["a red anchor"])
    torch.testing.assert_close(found[0], states_of(sentence_folder, [2, 3, 4, 6, 9]).mean(dim=0))


def test_the_models_prompts_for_queries_and_documents_are_put_before_the_texts(
    sentence_folder, tmp_path
):
    folder = assemble(sentence_folder, tmp_path, pooling=["mean_tokens"])
    plain = open_folder(folder).text_features(["red a anchor", "green a anchor"])
    settings = {"prompts": {"query": "red ", "passage": "green ", "clustering": "on "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    encoder = open_folder(folder)
    for role, expected in zip(("query", "candidate"), plain, strict=True):
        found = encoder.text_features(["a anchor"], [ItemKey(role, "9:1")])
        torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("router", [False, True])
def test_parts_that_would_run_programs_of_the_folder_are_refused(sentence_folder, tmp_path, router):
    folder = assemble(sentence_folder, tmp_path, pooling=["mean_tokens"])
    if router:
        (folder / "1_Pooling" / "router_config.json").write_text('{"types": {"q": "evil.Pooling"}}')
    else:
        listed = json.loads((folder / "modules.json").read_text())
        listed[1]["type"] = "evil.Pooling"
        (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ArtifactMismatch, match=r"evil\.Pooling"):
        open_folder(folder)
    assert not (tmp_path / "ran").exists()


class Together:
    """Stands for a model that embeds image and text as one; a vector tells what was in the input."""

    modalities = ("text", "image", "message")
    max_seq_length, prompts = 8, {"query": "find: "}

    def __getitem__(self, _):
        return self

    def supports(self, _):
        return True

    def get_embedding_dimension(self):
        return 3

    def encode_document(self, inputs, *, prompt, **_):
        return torch.tensor(
            [["image" in one, len(one.get("text", "")), len(prompt)] for one in inputs]
        )

    encode_query = encode_document


def test_image_and_text_go_together_where_the_model_can(tmp_path, pictures):
    encoder = JointPretrainedEncoder("st:x", tmp_path, Together())
    assert not hasattr(PretrainedEncoder("st:x", tmp_path, Together()), "joint_features")
    items = [pictures[0], None, pictures[1]], ["red", "green", ""]
    assert encoder.joint_features(*items).tolist() == [[1, 3, 0], [0, 5, 0], [1, 0, 0]]
    queries = [ItemKey("query", "9:1")] * 3
    assert encoder.joint_features(*items, queries).tolist() == [[1, 3, 6], [0, 5, 6], [1, 0, 6]]
