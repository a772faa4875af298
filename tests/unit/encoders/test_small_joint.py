"""small's clip-ff and blip-ff: one vector for image and text; what is not there does not count."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from genius_search.config import SmallEncoderConfig, from_json, to_json
from genius_search.data.features import FeatureBatch
from genius_search.encoders.base import (
    ImageInput,
    ItemKey,
    JointEncoder,
    JointInput,
    TextInput,
    is_joint,
    load_encoder,
)
from genius_search.encoders.descriptors import (
    CELL_SIZE,
    CELLS,
    DESCRIPTOR_SIZE,
    ORIENTATIONS,
    OUTLINE_SIZE,
    cells,
    describe,
)
from genius_search.encoders.small import SmallEncoder, SmallJointEncoder, create_small
from genius_search.errors import MissingExtra, UsageError

KEY = ItemKey("candidate", "9:1")
TEXTS = ["a red bar on green", "a blue bar", "green", "the yellow bar beside the red one"]
KINDS = ("clip-ff", "blip-ff")


def settings_of(kind, **changed):
    sizes = {"dim": 12, "vocabulary": 400, "max_tokens": 10, "pair_buckets": 64}
    return SmallEncoderConfig(kind=kind, text_width=16, image_width=16, **(sizes | changed))


def noise(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 50, 3), dtype=np.uint8))


def both(seed, text):
    return JointInput(noise(seed), text, KEY, has_image=True)


def text_alone(text):
    return JointInput(None, text, KEY, has_image=False)


@pytest.fixture(scope="module", params=KINDS)
def encoder(request):
    return create_small(settings_of(request.param), TEXTS, seed=0)


@pytest.mark.parametrize("kind", KINDS)
def test_feature_fusion_makes_a_joint_encoder_and_score_fusion_does_not(kind):
    joint = create_small(settings_of(kind), TEXTS, seed=0)
    assert isinstance(joint, JointEncoder)
    assert is_joint(joint)
    apart = create_small(settings_of(kind.replace("ff", "sf")), TEXTS, seed=0)
    assert isinstance(apart, SmallEncoder)
    assert not is_joint(apart)


def test_any_mixture_of_items_has_one_vector_each(encoder):
    items = [both(1, TEXTS[0]), text_alone(TEXTS[1]), both(2, ""), text_alone("")]
    found = encoder.joint_features(items)
    assert found.shape == (4, 12)
    assert found.isfinite().all()
    assert encoder.joint_features([]).shape == (0, 12)


def test_a_row_does_not_depend_on_its_batch(encoder):
    items = [both(1, TEXTS[0]), text_alone(TEXTS[3]), both(2, ""), text_alone(TEXTS[2]), both(3, TEXTS[3])]
    together = encoder.joint_features(items)
    for row, item in enumerate(items):
        torch.testing.assert_close(encoder.joint_features([item]), together[[row]])


def test_one_modality_alone_is_the_pair_without_the_other(encoder):
    images = encoder.image_features([ImageInput(noise(1), KEY)])
    assert torch.equal(images, encoder.joint_features([both(1, "")]))
    texts = encoder.text_features([TextInput(TEXTS[0], KEY)])
    assert torch.equal(texts, encoder.joint_features([text_alone(TEXTS[0])]))


def test_both_modalities_matter(encoder):
    pair, other_text, other_image, alone = encoder.joint_features(
        [both(1, TEXTS[0]), both(1, TEXTS[3]), both(2, TEXTS[0]), text_alone(TEXTS[0])]
    )
    for other in (other_text, other_image, alone):
        assert not torch.allclose(pair, other, atol=1e-4)


def test_padding_and_what_an_absent_slot_holds_change_nothing(encoder):
    tokens = encoder.prepare_texts(TEXTS[:2]).float()
    descriptors = torch.randn(2, DESCRIPTOR_SIZE, generator=torch.Generator().manual_seed(0))
    yes, no = torch.tensor([True, True]), torch.tensor([False, False])
    with torch.inference_mode():
        short = encoder.network.embedding(FeatureBatch(descriptors, tokens, no, yes))
        longer = encoder.network.embedding(FeatureBatch(-descriptors, F.pad(tokens, (0, 9)), no, yes))
        torch.testing.assert_close(short, longer)
        picture = encoder.network.embedding(FeatureBatch(descriptors, tokens, yes, no))
        same = encoder.network.embedding(FeatureBatch(descriptors, 0 * tokens, yes, no))
        torch.testing.assert_close(picture, same)


@pytest.mark.parametrize("kind", KINDS)
def test_where_padding_counts_a_missing_picture_is_a_blank_one(kind):
    counting = create_small(settings_of(kind, count_padding=True), TEXTS, seed=0)
    leaving = create_small(settings_of(kind), TEXTS, seed=0)
    tokens = counting.prepare_texts(TEXTS[:1]).float()
    blank = torch.zeros(1, DESCRIPTOR_SIZE)
    yes, no = torch.tensor([True]), torch.tensor([False])
    with torch.inference_mode():
        there, absent = (
            counting.network.embedding(FeatureBatch(blank, tokens, has, yes)) for has in (yes, no)
        )
        torch.testing.assert_close(there, absent)
        honoured = leaving.network.embedding(FeatureBatch(blank, tokens, no, yes))
    assert not torch.allclose(honoured, absent, atol=1e-4)


def test_where_padding_counts_the_longer_row_of_clip_ff_is_another_vector():
    counting = create_small(settings_of("clip-ff", count_padding=True), TEXTS, seed=0)
    tokens = counting.prepare_texts(TEXTS[:1]).float()
    blank, yes = torch.zeros(1, DESCRIPTOR_SIZE), torch.tensor([True])
    with torch.inference_mode():
        short, longer = (
            counting.network.embedding(FeatureBatch(blank, row, yes, yes))
            for row in (tokens, F.pad(tokens, (0, 9)))
        )
    assert not torch.allclose(short, longer, atol=1e-4)


def test_the_order_of_words_matters(encoder):
    one, other = encoder.joint_features([text_alone("a red bar on green"), text_alone("a green bar on red")])
    assert not torch.allclose(one, other, atol=1e-4)


def test_every_weight_is_trained(encoder):
    yes, no = torch.tensor([True, True]), torch.tensor([True, False])
    batch = FeatureBatch(torch.randn(2, DESCRIPTOR_SIZE), encoder.prepare_texts(TEXTS[:2]).float(), no, yes)
    encoder.network.zero_grad()
    encoder.network.embedding(batch).square().sum().backward()
    without = [name for name, weight in encoder.network.named_parameters() if weight.grad is None]
    assert without == []


def test_a_step_down_the_gradient_lowers_the_loss(encoder):
    network = create_small(encoder.config, TEXTS, seed=3).network
    tokens = encoder.prepare_texts(TEXTS).float()
    pictures = describe([noise(seed) for seed in range(4)])
    yes, no = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)

    def loss():
        texts = F.normalize(network.embedding(FeatureBatch(0 * pictures, tokens, no, yes)))
        images = F.normalize(network.embedding(FeatureBatch(pictures, 0 * tokens, yes, no)))
        return F.cross_entropy(texts @ images.T / 0.1, torch.arange(4))

    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        losses.append(loss())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[1] < losses[0]


def test_saving_and_loading_changes_nothing(encoder, tmp_path):
    encoder.save(tmp_path)
    loaded = load_encoder(f"small:{tmp_path}")
    assert isinstance(loaded, SmallJointEncoder)
    assert (loaded.config, loaded.fingerprint) == (encoder.config, encoder.fingerprint)
    items = [both(1, TEXTS[0]), text_alone(TEXTS[1]), both(2, "")]
    assert torch.equal(loaded.joint_features(items), encoder.joint_features(items))


def test_the_same_seed_starts_the_same_and_another_does_not(encoder):
    assert create_small(encoder.config, TEXTS, seed=0).fingerprint == encoder.fingerprint
    assert create_small(encoder.config, TEXTS, seed=1).fingerprint != encoder.fingerprint


def test_an_absent_picture_is_refused_by_its_id(encoder):
    with pytest.raises(UsageError, match="candidate 9:1"):
        encoder.joint_features([JointInput(None, "red", KEY, has_image=True)])


def test_without_transformers_the_extra_is_named(monkeypatch, encoder, tmp_path):
    encoder.save(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for make in (
        lambda: create_small(encoder.config, TEXTS, seed=0),
        lambda: load_encoder(f"small:{tmp_path}"),
    ):
        with pytest.raises(MissingExtra, match=r"genius-search\[hf\]"):
            make()


def test_padding_cannot_count_where_there_is_no_fusion():
    with pytest.raises(UsageError, match="count_padding is for clip-ff and blip-ff"):
        settings_of("clip-sf", count_padding=True)


def test_settings_that_only_other_kinds_know_are_not_saved():
    """So an encoder that was trained before there were kinds has the fingerprint it had."""
    assert not {"kind", "count_padding"} & to_json(settings_of("clip-sf")).keys()
    saved = to_json(settings_of("blip-ff", count_padding=True))
    assert from_json(SmallEncoderConfig, saved) == settings_of("blip-ff", count_padding=True)


def test_cells_hold_what_lies_in_them_from_left_to_right_and_down():
    picture = Image.new("RGB", (64, 64), (90, 120, 30))
    picture.paste((200, 30, 30), (48, 16, 64, 32))  # in the second row's last cell
    plain, marked = (
        cells(describe([image])) for image in (Image.new("RGB", (64, 64), (90, 120, 30)), picture)
    )
    assert marked.shape == (1, CELLS, CELL_SIZE)
    colours = slice(5 * ORIENTATIONS, None)
    changed = (plain[0, :, colours] != marked[0, :, colours]).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [7]


def test_cells_with_outlines_have_those_of_their_quarters_too():
    picture = Image.new("RGB", (64, 64), (90, 120, 30))
    picture.paste((200, 30, 30), (48, 16, 64, 32))
    described = describe([picture], outlines=True)
    found = cells(described)
    assert torch.equal(found[:, :, :CELL_SIZE], cells(described[:, :DESCRIPTOR_SIZE]))
    outlines = found[0, :, CELL_SIZE:]
    assert outlines.shape == (CELLS, OUTLINE_SIZE // CELLS)
    assert outlines.square().sum(dim=1).argmax() == 7
