"""The store of features: each thing once, part by part, resumed where it stopped."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from genius_search.encoders import rows as encoding
from genius_search.encoders.base import ItemKey
from genius_search.encoders.rows import FeatureRow, encode_rows
from genius_search.encoders.store import Share, embed
from genius_search.errors import BadData, BadImage
from genius_search.progress import Silent
from genius_search.records import Modality

DIM = 3
BOTH = Modality.IMAGE_TEXT


class Encoder:
    """Says what it was asked: the mean colour of pictures, the number in texts."""

    spec = "fake"
    dim = DIM
    fingerprint = "fake-1"

    def __init__(self, *, needs_pixels=True, fail_after=10**9):
        self.needs_pixels = needs_pixels
        self.seen = []
        self.fail_after = fail_after

    def image_features(self, images, keys):
        assert images, "an encoder is never asked for nothing"
        self._see([key.id for key in keys])
        if not self.needs_pixels:
            return torch.tensor([[float(key.id), 1.0, 0.0] for key in keys])
        return torch.tensor([np.asarray(image).mean(axis=(0, 1)).tolist() for image in images])

    def text_features(self, texts, keys):
        assert texts, "an encoder is never asked for nothing"
        self._see(texts)
        return torch.tensor([[float(key.id), 0.0, 1.0] for key in keys])

    def _see(self, names):
        if len(self.seen) >= self.fail_after:
            raise KeyboardInterrupt
        self.seen += names


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(encoding, "ENCODE_BATCH", 2)


def text_rows(count):
    return [
        FeatureRow(id=n, key=ItemKey("candidate", str(n)), modality=Modality.TEXT, text=f"text {n}")
        for n in range(count)
    ]


def image_rows(paths):
    return [
        FeatureRow(id=n, key=ItemKey("candidate", str(n)), modality=Modality.IMAGE, image=path)
        for n, path in enumerate(paths)
    ]


def run(rows, encoder, folder, **settings):
    return embed(
        rows,
        encoder,
        folder,
        inputs=settings.pop("inputs", {"records": "r"}),
        expected=len(rows),
        progress=Silent(),
        part_rows=4,
        **settings,
    )


@pytest.fixture
def pictures(tmp_path):
    paths = [tmp_path / f"{n}.png" for n in range(6)]
    for n, path in enumerate(paths):
        Image.new("RGB", (8, 8), (n, 10 * n, 20 * n)).save(path)
    return paths


def test_an_interrupted_run_encodes_only_the_shards_that_are_missing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(text_rows(10), Encoder(fail_after=6), tmp_path / "f")
    assert not (tmp_path / "f").exists()
    encoder = Encoder()
    features = run(text_rows(10), encoder, tmp_path / "f")
    assert encoder.seen == [f"text {n}" for n in range(4, 10)]
    whole = run(text_rows(10), Encoder(), tmp_path / "g")
    assert np.array_equal(features.gather(np.arange(10)).text, whole.gather(np.arange(10)).text)


def test_only_rows_with_other_contents_are_encoded_when_the_records_change(tmp_path, pictures):
    rows = text_rows(6) + [row._replace(id=row.id + 6) for row in image_rows(pictures)]
    run(rows, Encoder(), tmp_path / "f")
    rows[2] = rows[2]._replace(text="another text")
    Image.new("RGB", (9, 9)).save(pictures[3])
    encoder = Encoder()
    again = run(rows[1:], encoder, tmp_path / "f", inputs={"records": "other"})
    assert encoder.seen == ["another text", "3"]
    whole = run(rows[1:], Encoder(), tmp_path / "g")
    batch, expected = (features.gather(np.arange(11)) for features in (again, whole))
    assert np.array_equal(batch.total(), expected.total())
    assert again.fingerprint != whole.fingerprint  # of other inputs, although the files are equal
    assert not list(tmp_path.glob(".*.parts"))


def test_an_interruption_changes_no_byte_of_the_finished_features(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(text_rows(10), Encoder(fail_after=6), tmp_path / "f")
    interrupted = run(text_rows(10), Encoder(), tmp_path / "f")
    assert interrupted.fingerprint == run(text_rows(10), Encoder(), tmp_path / "g").fingerprint


@pytest.mark.parametrize("interrupted", [False, True])
def test_processes_share_out_the_rows_and_leave_the_features_of_one(tmp_path, interrupted):
    rows, barrier, agreed = text_rows(18), threading.Barrier(2), []

    def agree(value):
        agreed.append(value)
        barrier.wait()
        return any(agreed)

    if interrupted:  # by another number of processes
        with pytest.raises(KeyboardInterrupt):
            run(rows, Encoder(fail_after=6), tmp_path / "shared")
    encoders = [Encoder(), Encoder()]
    with ThreadPoolExecutor(2) as threads:
        shares = [Share(number, 2, agree, barrier.wait) for number in range(2)]
        both = threads.map(
            lambda encoder, share: run(rows, encoder, tmp_path / "shared", share=share),
            encoders,
            shares,
        )
        prints = {features.fingerprint for features in both}
    assert prints == {run(rows, Encoder(), tmp_path / "alone").fingerprint}
    seen = [{int(text.removeprefix("text ")) // 4 for text in encoder.seen} for encoder in encoders]
    assert seen == [{2, 4} if interrupted else {0, 2, 4}, {1, 3}]


def test_a_finished_folder_is_opened_without_encoding_unless_something_changed(tmp_path):
    run(text_rows(5), Encoder(), tmp_path / "f")
    again = Encoder()
    run(text_rows(5), again, tmp_path / "f")
    assert again.seen == []
    other = Encoder()
    other.fingerprint = "fake-2"
    run(text_rows(5), other, tmp_path / "f")
    assert len(other.seen) == 5


def test_equal_contents_are_encoded_once_in_a_shard_unless_features_are_looked_up(
    tmp_path, pictures
):
    rows = [
        row._replace(image=pictures[row.id % 2], text="same", modality=BOTH) for row in text_rows(4)
    ]
    encoder = Encoder()
    batch = run(rows, encoder, tmp_path / "f").gather(np.arange(4))
    assert len(encoder.seen) == 3
    assert batch.image[:, 2].tolist() == [0, 20, 0, 20]
    assert batch.has_text.all()
    looked_up = run(rows, Encoder(needs_pixels=False), tmp_path / "g").gather(np.arange(4))
    assert looked_up.image[:, 0].tolist() == looked_up.text[:, 0].tolist() == [0, 1, 2, 3]


def test_left_out_pictures_are_listed_and_the_others_keep_their_features(tmp_path, pictures):
    for n in (1, 5):
        pictures[n].write_bytes(b"not a picture")
    with pytest.raises(BadImage, match=r"1\.png"):
        run(image_rows(pictures), Encoder(), tmp_path / "f")
    features = run(image_rows(pictures), Encoder(), tmp_path / "f", skip_bad_images=True)
    assert features.ids.tolist() == [0, 2, 3, 4]
    assert features.gather(np.arange(4)).image[:, 2].tolist() == [0, 40, 60, 80]
    left_out = encode_rows(
        list(enumerate(image_rows(pictures))), Encoder(), skip_bad_images=True
    ).left_out
    assert [(row.id, row.file) for row in left_out] == [
        (1, str(pictures[1])),
        (5, str(pictures[5])),
    ]
    assert all(row.reason for row in left_out)


def test_nothing_to_embed_is_bad_data(tmp_path, pictures):
    with pytest.raises(BadData, match="nothing to embed"):
        run([], Encoder(), tmp_path / "f")
    pictures[0].write_bytes(b"")
    with pytest.raises(BadData, match="nothing to embed"):
        run(image_rows(pictures[:1]), Encoder(), tmp_path / "g", skip_bad_images=True)


class Joint(Encoder):
    """One vector for both: the number of the key, whether there is a picture, how long the text is."""

    def image_features(self, images, keys):
        raise AssertionError("a joint encoder is not asked for images alone")

    text_features = image_features

    def joint_features(self, images, texts, keys):
        assert images, "an encoder is never asked for nothing"
        self._see([key.id for key in keys])
        inputs = zip(images, texts, keys, strict=True)
        return torch.tensor(
            [[float(key.id), image is not None, len(text)] for image, text, key in inputs]
        )


def mixed_rows(pictures):
    return [
        FeatureRow(
            id=n,
            key=ItemKey("candidate", str(n)),
            modality=list(Modality)[n % 3],
            image=None if n % 3 == 1 else pictures[n % 6],
            text=None if n % 3 == 0 else "x" * n,
        )
        for n in range(6)
    ]


def test_a_joint_vector_stands_in_the_text_slot(tmp_path, pictures):
    features = run(mixed_rows(pictures), Joint(), tmp_path / "f")
    batch = features.gather(np.arange(6))
    assert batch.has_text.all()
    assert not batch.has_image.any()
    assert batch.total().tolist() == [[n, n % 3 != 1, 0 if n % 3 == 0 else n] for n in range(6)]
